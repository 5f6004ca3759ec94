"""Guarantees: what is claimed of a release, and whether the claim holds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

from scipy.special import ndtr, ndtri

from quietmax.accounting.costs import (
    Cost,
    GaussianCost,
    PureCost,
    _checked_amount,
    decimal,
    delta_of,
    epsilon_of,
    rounded_up,
)
from quietmax.errors import InvalidInput

Definition = Literal["pure", "gaussian", "approximate"]
Status = Literal["proven", "conditional", "refuted"]
Unit = Literal["record", "person"]
Strength = Literal["strong", "moderate", "weak", "none"]
_STATUSES: tuple[Status, ...] = get_args(Status)
UNITS: tuple[Unit, ...] = get_args(Unit)
_STRENGTHS: tuple[tuple[Strength, float, str], ...] = (
    ("strong", 0.55, "strong protection [###]"),
    ("moderate", 0.75, "moderate protection [##-]"),
    ("weak", 0.95, "weak protection [#--]"),
    ("none", math.inf, "no protection [---]"),
)
"""Each strength, the `max_accuracy` below which a guarantee has it, and its words (THEORY 3.13)."""
MADE_WITHOUT_RECORDS = "was made without the private records"
"""Words of the assumption about a file; `Guarantee.in_words` repeats such an assumption."""
_UP = 1.0 + 2.0**-44
_LIBRARY_UP = 1.0 + 2.0**-40
"""Covers the relative errors of SciPy's normal distribution and its inverse."""
_JSON_FIELDS = (
    *("definition", "epsilon", "mu", "extra_delta", "neighbours", "unit", "status", "because"),
    *("parameters", "assumptions"),
)
_STATED: dict[str, set[str]] = {"pure": {"epsilon"}, "gaussian": {"mu"}, "approximate": {"epsilon", "delta"}}


@dataclass(frozen=True)
class Guarantee:
    """A privacy guarantee: a definition with its numbers, its status, and the reason.

    Parameters
    ----------
    definition : {"pure", "gaussian", "approximate"}
        epsilon-differential privacy, mu-Gaussian differential privacy, or one point (epsilon, delta). An approximate
        guarantee is what a numerical accountant certifies of a release whose whole curve has neither form, such as
        subsampled noisy gradients. It has no cost: (epsilon, delta) pairs do not compose exactly.
    epsilon : float or None
        Stated by a pure and an approximate guarantee.
    mu : float or None
        Stated by a Gaussian guarantee.
    extra_delta : float
        Added to every derived delta; at least 0 and below 1.
    neighbours : {"add-remove"}
        Neighbouring data sets differ by one added or removed unit.
    status : {"proven", "conditional", "refuted"}
        ``"conditional"``: true if the `assumptions` hold. ``"refuted"``: the numbers are claimed, but do not hold.
    because : str
        The reason, one sentence that names the section of the theory page.
    parameters : Mapping
        The public constants on which the claim rests, as JSON values.
    assumptions : tuple of str
        What a conditional guarantee assumes.
    delta : float or None
        Stated by an approximate guarantee.
    unit : {"record", "person"}
        What is added or removed: one record, or all records of one person.

    Examples
    --------
    >>> print(Guarantee("gaussian", mu=1.0, status="proven", because="Section 3."))
    proven: 1-Gaussian differential privacy for one record added or removed: epsilon 4.38 at delta 1e-05. Section 3.
    """

    definition: Definition
    epsilon: float | None = None
    mu: float | None = None
    extra_delta: float = 0.0
    neighbours: Literal["add-remove"] = "add-remove"
    status: Status = "conditional"
    because: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    assumptions: tuple[str, ...] = ()
    delta: float | None = None
    unit: Unit = "record"

    def __post_init__(self) -> None:
        for name, valid in (("definition", _STATED), ("status", _STATUSES), ("unit", UNITS)):
            if getattr(self, name) not in valid:
                raise InvalidInput(f"{name} must be one of {', '.join(valid)}, got {getattr(self, name)!r}.")
        stated = _STATED[self.definition]
        given = {name for name in ("epsilon", "mu", "delta") if getattr(self, name) is not None}
        if given != stated:
            raise InvalidInput(
                f"The definition '{self.definition}' requires {' and '.join(sorted(stated))} alone, "
                f"got {' and '.join(sorted(given)) or 'none'}."
            )
        if self.neighbours != "add-remove":
            raise InvalidInput(f"neighbours must be 'add-remove', got {self.neighbours!r}.")
        if not 0.0 <= self.extra_delta < 1.0:
            raise InvalidInput(f"extra_delta must be at least 0 and below 1, got {self.extra_delta!r}.")
        if not self.because.strip():
            raise InvalidInput("because must be a sentence, got an empty string.")
        for name in sorted(stated):
            object.__setattr__(self, name, _checked_amount(getattr(self, name), name))
        if self._surplus >= 1.0:
            raise InvalidInput(f"delta and extra_delta together must be below 1, got {self._surplus!r}.")
        object.__setattr__(self, "parameters", dict(self.parameters))
        object.__setattr__(self, "assumptions", tuple(self.assumptions))

    @classmethod
    def of(
        cls,
        cost: Cost,
        *,
        status: Status,
        because: str,
        parameters: Mapping[str, Any] | None = None,
        assumptions: tuple[str, ...] = (),
        extra_delta: float = 0.0,
        unit: Unit = "record",
    ) -> Guarantee:
        """Return the guarantee of a release that has a cost; the other parameters are those of the class.

        Examples
        --------
        >>> Guarantee.of(PureCost(0.5), status="proven", because="Laplace mechanism.").epsilon
        0.5
        """
        stated: dict[str, Any] = {**vars(cost), "extra_delta": extra_delta, "unit": unit}
        texts: dict[str, Any] = {"status": status, "because": because, "assumptions": assumptions}
        return cls(cost.measure, **stated, **texts, parameters=parameters or {})

    @property
    def cost(self) -> Cost:
        """The cost of the release. An approximate guarantee has none and raises `InvalidInput`."""
        if self.definition == "approximate":
            raise InvalidInput(
                f"An approximate guarantee ({self.epsilon:g}, {self.delta:g}) has no cost: (epsilon, delta) pairs do "
                "not compose exactly."
            )
        if self.definition == "pure":
            return PureCost(cast(float, self.epsilon))
        return GaussianCost(cast(float, self.mu))

    @property
    def _surplus(self) -> float:
        """The sum of `extra_delta` and the stated delta, which is added to every derived delta."""
        if self.delta is None or self.extra_delta == 0.0:
            return self.extra_delta if self.delta is None else self.delta
        return (self.extra_delta + self.delta) * _UP

    def at_epsilon(self, epsilon: float) -> float:
        """Return the claimed delta at this epsilon, rounded up.

        Pure: max(0, (exp(claimed) - exp(epsilon))/(1 + exp(claimed))), where randomised response is the worst case.
        Approximate: the same plus the stated delta (the worst case reveals everything with that probability; Kairouz,
        Oh, Viswanath 2015). Gaussian: `delta_of`. `extra_delta` is added to all.
        """
        if self.definition == "gaussian":
            delta = delta_of(cast(float, self.mu), epsilon)
        else:
            claimed = cast(float, self.epsilon)
            gap = epsilon - claimed
            if not 0.0 <= epsilon < math.inf:
                raise InvalidInput(f"epsilon must be a finite number of at least 0, got {epsilon!r}.")
            delta = abs(math.expm1(min(gap, 0.0))) / (1.0 + math.exp(-claimed)) * _UP
        return min(1.0, (delta + self._surplus) * (_UP if delta and self._surplus else 1.0))

    def at_delta(self, delta: float) -> float:
        """Return the claimed epsilon at this delta, rounded up; infinite if `extra_delta` alone exceeds it.

        Pure and approximate: claimed + ln(1 - delta*(1 + exp(-claimed))), the inverse of `at_epsilon`, where the
        stated delta of an approximate guarantee counts as `extra_delta`. Gaussian: `epsilon_of`.
        """
        if not 0.0 <= delta < 1.0:
            raise InvalidInput(f"delta must be at least 0 and below 1, got {delta!r}.")
        left = delta - self._surplus
        if self._surplus > 0.0:
            left /= _UP
        if left < 0.0:
            return math.inf
        if self.definition == "gaussian":
            mu = cast(float, self.mu)
            return (0.0 if mu == 0.0 else math.inf) if left == 0.0 else epsilon_of(mu, left)
        claimed = cast(float, self.epsilon)
        spread = left * (1.0 + math.exp(-claimed)) / _UP
        return 0.0 if spread >= 1.0 else max(0.0, min(claimed, claimed * _UP + math.log1p(-spread)))

    def weakened(self, status: Status, because: str, assumptions: tuple[str, ...] = ()) -> Guarantee:
        """Return the guarantee with a status no better than before, a new reason and further assumptions.

        Examples
        --------
        >>> claim = Guarantee.of(PureCost(1.0), status="proven", because="Laplace mechanism.")
        >>> claim.weakened("conditional", "Seeded noise, theory section 3.5.").status
        'conditional'
        """
        if status not in _STATUSES or _STATUSES.index(status) < _STATUSES.index(self.status):
            raise InvalidInput(f"A {self.status} guarantee cannot be weakened to {status!r}.")
        return replace(
            self, status=status, because=because, assumptions=self.assumptions + tuple(assumptions)
        )

    def max_accuracy(self) -> float:
        """Return how often the best guess at membership is right at most, with even odds before (THEORY 3.13).

        The guesser sees everything that the guarantee covers, knows everything else in the data, and guesses whether
        one unit is in them. Gaussian: Phi(mu/2). Pure: exp(epsilon)/(1 + exp(epsilon)). `extra_delta` counts half.

        Examples
        --------
        >>> round(Guarantee("gaussian", mu=0.268, because="Theory section 3.").max_accuracy(), 3)
        0.553
        """
        return min(1.0, (1.0 + self.at_epsilon(0.0)) / 2.0 * _UP)

    @property
    def strength(self) -> Strength:
        """What the numbers are worth, whatever the status (THEORY 3.13).

        By `max_accuracy`: below 55% ``"strong"``, below 75% ``"moderate"``, below 95% ``"weak"``, else ``"none"``. A
        refuted guarantee has the strength ``"none"``.

        Examples
        --------
        >>> Guarantee("pure", epsilon=60.0, status="proven", because="Theory section 3.").strength
        'none'
        """
        return self._rated[0]

    @property
    def protection(self) -> str:
        """The strength in words, with a sign: ``moderate protection [##-]``."""
        return self._rated[2]

    @property
    def _rated(self) -> tuple[Strength, float, str]:
        best = 1.0 if self.status == "refuted" else self.max_accuracy()
        return next(each for each in _STRENGTHS if best < each[1])

    @property
    def grade(self) -> str:
        """What a colour stands for: the strength if it is proven, else the status."""
        return self.strength if self.status == "proven" else self.status

    @property
    def summary(self) -> str:
        """Status and strength in one line, and how often an adversary may be right.

        Examples
        --------
        >>> claim = Guarantee("gaussian", mu=0.268, status="proven", because="Theory section 3.", unit="person")
        >>> claim.summary.partition(": ")[0]
        'proven, moderate protection [##-]'
        >>> claim.summary.partition(": ")[2]
        'a guess whether one person is in the data is right at most 55.4% of the time'
        """
        words = f"{self.status}, {self.protection}"
        if self.status == "refuted":
            return words
        right = _percent(self.max_accuracy())
        return f"{words}: a guess whether one {self.unit} is in the data is right at most {right} of the time"

    def max_true_positive_rate(self, false_positive_rate: float) -> float:
        """Return the largest true-positive rate of any membership test with this false-positive rate (THEORY 3.13).

        Gaussian: Phi(Phi^-1(a) + mu). Pure: min(exp(epsilon)*a, 1 - exp(-epsilon)*(1 - a)). A surplus delta d adds at
        most d (Dong, Roth, Su 2022, arXiv:1905.02383).

        Examples
        --------
        >>> round(Guarantee("gaussian", mu=0.268, because="Theory section 3.").max_true_positive_rate(0.001), 4)
        0.0024
        """
        rate = float(false_positive_rate)
        if not 0.0 <= rate <= 1.0:
            raise InvalidInput(f"false_positive_rate must be from 0 to 1, got {false_positive_rate!r}.")
        if self.definition == "gaussian":
            best = float(ndtr(ndtri(rate) + cast(float, self.mu))) * _LIBRARY_UP
        else:
            epsilon = cast(float, self.epsilon)
            half = math.exp(min(epsilon / 2, 700.0))  # a logarithm of the rate would cost digits
            few = half * rate * half * _UP
            many = (1.0 - math.exp(-epsilon) * (1.0 - rate)) * _UP
            best = min(few, many)
        return min(1.0, (best + self._surplus) * (_UP if self._surplus else 1.0))

    def for_group(self, units: int) -> Guarantee:
        """Return what the guarantee implies for several units that are added or removed together.

        Group privacy: k times epsilon, k times mu. A surplus delta d of a neighbour grows to
        d*(exp(k*epsilon) - 1)/(exp(epsilon) - 1), and for Gaussian guarantees to the sum of Phi(Phi^-1(d) + j*mu) over
        j < k: the curve G(a) = Phi(Phi^-1(a) + mu) is concave with G(0) = 0, so G(a + d) <= G(a) + G(d) at each of the
        k steps from one data set to the other.

        Raises
        ------
        InvalidInput
            If the guarantee says nothing about groups of this size, because the surplus delta reaches 1.

        Examples
        --------
        >>> Guarantee("gaussian", mu=0.25, because="Theory section 3.").for_group(4).mu
        1.0
        """
        if isinstance(units, bool) or not isinstance(units, int) or units < 1:
            raise InvalidInput(f"units must be an integer of at least 1, got {units!r}.")
        if units == 1:
            return self
        surplus = min(1.0, self._group_surplus(units) * _LIBRARY_UP)
        if surplus >= 1.0:
            raise InvalidInput(f"The guarantee says nothing about {units} units together.")
        stated: dict[str, Any] = {
            name: rounded_up(units * decimal(amount))
            for name in ("epsilon", "mu")
            if (amount := getattr(self, name)) is not None
        }
        if self.delta is None:
            return replace(self, **stated, extra_delta=surplus)
        return replace(self, **stated, delta=surplus, extra_delta=0.0)

    def _group_surplus(self, units: int) -> float:
        if self._surplus == 0.0:
            return 0.0
        if self.definition == "gaussian":
            mu = cast(float, self.mu)
            return math.fsum(float(ndtr(ndtri(self._surplus) + step * mu)) for step in range(units))
        epsilon = cast(float, self.epsilon)
        try:
            return math.fsum(self._surplus * math.exp(step * epsilon) for step in range(units))
        except OverflowError:
            return math.inf

    def in_words(self, released: str = "everything that this guarantee covers") -> list[str]:
        """Return what the guarantee means, as plain sentences with all percentages rounded up (THEORY 3.13).

        `released` says what the guarantee covers. Other releases about the same people add to it.

        Examples
        --------
        >>> claim = Guarantee("gaussian", mu=0.268, status="proven", because="Theory section 3.", unit="person")
        >>> claim.in_words()[0].partition("is right ")[2]
        'at most 55.4% of the time; tossing a coin is right 50% of the time.'
        """
        if self.status == "refuted":
            return ["The claimed limits do not hold, so nothing can be said about what an adversary learns."]
        many, who = ("people", "who") if self.unit == "person" else ("records", "that")
        sentences = [
            f"Somebody who sees {released}, knows all other {many} in the data, and guesses with even odds "
            f"whether a {self.unit} is in the data, is right at most {_percent(self.max_accuracy())} of "
            "the time; tossing a coin is right 50% of the time.",
            f"A test that wrongly accuses 0.1% of the {many} {who} are not in the data recognises at most "
            f"{_percent(self.max_true_positive_rate(0.001))} of those {who} are.",
        ]
        if self.status == "conditional":
            sentences.append("These limits hold if the assumptions of the guarantee hold.")
        sentences += [
            f"The limits rest on this: {each}" for each in self.assumptions if MADE_WITHOUT_RECORDS in each
        ]
        if self.unit == "record":
            limits = " and ".join(
                f"at most {self._group_accuracy(rows)} with {rows} records" for rows in (2, 5)
            )
            sentences.append(
                "The limits are for one record. For a person with several records in the data, the even-odds guess is "
                f"right {limits}."
            )
        return sentences

    def _group_accuracy(self, units: int) -> str:
        try:
            return _percent(self.for_group(units).max_accuracy())
        except InvalidInput:
            return "100%"

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name, as JSON values; `delta` only if it is stated."""
        record = {name: getattr(self, name) for name in _JSON_FIELDS}
        record |= {"parameters": dict(self.parameters), "assumptions": list(self.assumptions)}
        return record if self.delta is None else {**record, "delta": self.delta}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Guarantee:
        """Return the guarantee that `to_json` wrote."""
        names = set(_JSON_FIELDS) - {"unit"}
        if set(record) - {"delta", "unit"} != names:
            raise InvalidInput(f"A guarantee must have the fields {sorted(names)}, got {sorted(record)}.")
        return cls(**{**record, "assumptions": tuple(record["assumptions"])})

    def __str__(self) -> str:
        whose = f"for one {self.unit} added or removed"
        if self.definition == "pure":
            claim = f"{self.epsilon:.4g}-differential privacy {whose}"
        elif self.definition == "approximate":
            claim = f"({self.epsilon:.4g}, {self._surplus:.3g})-differential privacy {whose}"
        else:
            claim = (
                f"{self.mu:.4g}-Gaussian differential privacy {whose}:"
                f" epsilon {self.at_delta(1e-5):.3g} at delta 1e-05"
            )
        return f"{self.status}: {claim}. {self.reason}"

    @property
    def reason(self) -> str:
        """`because` for readers: a section of the theory is called by its page."""
        return re.sub(r"\bTHEORY (?=\d)", "theory page, section ", self.because)


def _percent(share: float) -> str:
    """Return a positive probability as a percentage of three significant digits, rounded up."""
    digits = 2 - math.floor(math.log10(100.0 * share))
    return f"{math.ceil(100.0 * share * 10**digits) / 10**digits:.{digits}f}%"
