"""Guarantee: what is claimed of a release, and whether the claim is true."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from quietmax.accounting.conversions import checked_amount, delta_of, epsilon_of
from quietmax.accounting.costs import Cost, GaussianCost, PureCost
from quietmax.errors import InvalidInput

Definition = Literal["pure", "gaussian", "approximate"]
Status = Literal["proven", "conditional", "refuted"]
Parameter = Any
"""A JSON value: text, number, truth value, None, or a list or mapping of these."""
_UP = 1.0 + 2.0**-44
_STATED: dict[str, set[str]] = {"pure": {"epsilon"}, "gaussian": {"mu"}, "approximate": {"epsilon", "delta"}}


@dataclass(frozen=True)
class Guarantee:
    """What is claimed: epsilon- (pure), mu-Gaussian or (epsilon, delta)- (approximate) privacy, its status, and why.

    An approximate guarantee is one point (epsilon, `delta`): what a numerical accountant certifies of a release whose
    whole curve is in neither measure, such as subsampled noisy gradients. It has no cost: (epsilon, delta) pairs do
    not compose exactly. `extra_delta` is added to every derived delta. `status` is `proven`, `conditional` (true if
    the named `assumptions` hold) or `refuted` (the numbers are what was claimed, not what holds). `because` is one
    sentence that names the section of the theory page. `parameters` are the public constants the claim rests
    on.

    >>> print(Guarantee("gaussian", mu=1.0, status="proven", because="Theory section 3."))
    proven: 1-Gaussian differential privacy (add-remove): epsilon 4.38 at delta 1e-05. Theory section 3.
    """

    definition: Definition
    epsilon: float | None = None
    mu: float | None = None
    extra_delta: float = 0.0
    neighbours: Literal["add-remove"] = "add-remove"
    status: Status = "conditional"
    because: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    delta: float | None = None

    def __post_init__(self) -> None:
        if self.definition not in _STATED or self.status not in ("proven", "conditional", "refuted"):
            raise InvalidInput(
                f"A guarantee was given definition {self.definition!r} and status {self.status!r}: name pure,"
                " gaussian or approximate, and proven, conditional or refuted."
            )
        stated = _STATED[self.definition]
        given = {name for name in ("epsilon", "mu", "delta") if getattr(self, name) is not None}
        if given != stated:
            raise InvalidInput(
                f"A {self.definition} guarantee was given epsilon {self.epsilon!r}, mu {self.mu!r} and delta"
                f" {self.delta!r}: give a pure one epsilon alone, a gaussian one mu alone, an approximate one"
                " epsilon and delta."
            )
        if self.neighbours != "add-remove" or not 0.0 <= self.extra_delta < 1.0 or not self.because.strip():
            raise InvalidInput(
                f"A guarantee was given neighbours {self.neighbours!r}, extra_delta {self.extra_delta!r} and"
                f" because {self.because!r}: give add-remove, a number from 0 to below 1 and a sentence."
            )
        for name in sorted(stated):
            amount = checked_amount(getattr(self, name), f"The {name} of a guarantee")
            object.__setattr__(self, name, amount)
        if self._surplus >= 1.0:
            raise InvalidInput(
                f"The delta of a guarantee is {self._surplus!r}, but must be less than 1: give such a number."
            )
        object.__setattr__(self, "parameters", dict(self.parameters))
        object.__setattr__(self, "assumptions", tuple(self.assumptions))

    @classmethod
    def of(
        cls,
        cost: Cost,
        *,
        status: Status,
        because: str,
        parameters: Mapping[str, Parameter] | None = None,
        assumptions: tuple[str, ...] = (),
        extra_delta: float = 0.0,
    ) -> Guarantee:
        """Return the guarantee that a release of this cost has.

        >>> Guarantee.of(PureCost(0.5), status="proven", because="Laplace mechanism.").epsilon
        0.5
        """
        return cls(
            definition=cost.measure,
            epsilon=cost.epsilon if isinstance(cost, PureCost) else None,
            mu=cost.mu if isinstance(cost, GaussianCost) else None,
            extra_delta=extra_delta,
            status=status,
            because=because,
            parameters=parameters or {},
            assumptions=assumptions,
        )

    @property
    def cost(self) -> Cost:
        """The cost of the release in its measure; an approximate guarantee is in none, and refuses."""
        if self.definition == "approximate":
            raise InvalidInput(
                f"An approximate guarantee ({self.epsilon:g}, {self.delta:g}) has no cost: (epsilon, delta) pairs do"
                " not compose exactly; keep such a release outside of a budget in epsilon or mu."
            )
        if self.definition == "pure":
            return PureCost(cast(float, self.epsilon))
        return GaussianCost(cast(float, self.mu))

    @property
    def _surplus(self) -> float:
        """What is added to every derived delta: `extra_delta`, and the stated delta of an approximate guarantee."""
        if self.delta is None or self.extra_delta == 0.0:
            return self.extra_delta if self.delta is None else self.delta
        return (self.extra_delta + self.delta) * _UP

    def at_epsilon(self, epsilon: float) -> float:
        """Return the claimed delta at this epsilon, rounded up.

        Pure: max(0, (exp(claimed) - exp(epsilon))/(1 + exp(claimed))), the worst case being randomised
        response. Approximate: the same plus the stated delta (the worst case reveals everything with that
        probability; Kairouz, Oh, Viswanath 2015). Gaussian: `delta_of`. `extra_delta` is added to all.
        """
        if self.definition == "gaussian":
            delta = delta_of(cast(float, self.mu), epsilon)
        else:
            claimed = cast(float, self.epsilon)
            gap = epsilon - claimed
            if not 0.0 <= epsilon < math.inf:
                raise InvalidInput(f"epsilon is {epsilon!r}, but must be at least 0: give such a number.")
            delta = abs(math.expm1(min(gap, 0.0))) / (1.0 + math.exp(-claimed)) * _UP
        return min(1.0, (delta + self._surplus) * (_UP if delta and self._surplus else 1.0))

    def at_delta(self, delta: float) -> float:
        """Return the claimed epsilon at this delta, rounded up; infinite if `extra_delta` alone exceeds it.

        Pure and approximate: claimed + ln(1 - delta*(1 + exp(-claimed))), the inverse of `at_epsilon`, where the
        stated delta of an approximate guarantee counts as `extra_delta`. Gaussian: `epsilon_of`.
        """
        if not 0.0 <= delta < 1.0:
            raise InvalidInput(f"delta is {delta!r}, but must be from 0 to below 1: give such a number.")
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

        >>> claim = Guarantee.of(PureCost(1.0), status="proven", because="Laplace mechanism.")
        >>> claim.weakened("conditional", "Seeded noise, theory section 3.5.").status
        'conditional'
        """
        order = ("proven", "conditional", "refuted")
        if status not in order or order.index(status) < order.index(self.status):
            raise InvalidInput(
                f"A {self.status} guarantee cannot be weakened to {status!r}: name a weaker status."
            )
        return replace(
            self, status=status, because=because, assumptions=self.assumptions + tuple(assumptions)
        )

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name, as JSON values; `delta` only where it is stated."""
        record = {
            "definition": self.definition,
            "epsilon": self.epsilon,
            "mu": self.mu,
            "extra_delta": self.extra_delta,
            "neighbours": self.neighbours,
            "status": self.status,
            "because": self.because,
            "parameters": dict(self.parameters),
            "assumptions": list(self.assumptions),
        }
        return record if self.delta is None else {**record, "delta": self.delta}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Guarantee:
        """Return the guarantee that `to_json` wrote."""
        names = set(cls.__dataclass_fields__) - {"delta"}
        if set(record) - {"delta"} != names:
            raise InvalidInput(
                f"A guarantee has the fields {sorted(names)}, but the record has {sorted(record)}: give"
                " exactly those."
            )
        return cls(**{**record, "assumptions": tuple(record["assumptions"])})

    def __hash__(self) -> int:
        amounts = (self.epsilon, self.mu, self.delta)
        return hash((self.definition, *amounts, self.status, self.because, self.assumptions))

    def __str__(self) -> str:
        if self.definition == "pure":
            claim = f"{self.epsilon:.4g}-differential privacy ({self.neighbours})"
        elif self.definition == "approximate":
            claim = f"({self.epsilon:.4g}, {self._surplus:.3g})-differential privacy ({self.neighbours})"
        else:
            claim = (
                f"{self.mu:.4g}-Gaussian differential privacy ({self.neighbours}):"
                f" epsilon {self.at_delta(1e-5):.3g} at delta 1e-05"
            )
        return f"{self.status}: {claim}. {self.because}"
