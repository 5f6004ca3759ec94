"""Claims, the lower bounds on epsilon and mu that test them, and the report of an audit.

A bound follows from counts of an event, from right guesses about canaries, or from the sums of their signals.

*Counts.* If an answer is (epsilon, delta)-private, then ``P <= exp(epsilon)*Q + delta`` for every event, P and Q its
probabilities on two neighbouring inputs. If it is mu-Gaussian private, ``Phi^-1(P) - Phi^-1(Q) <= mu`` (Dong, Roth and
Su 2022, section 2). A lower limit of P and an upper limit of Q therefore give lower bounds on epsilon and mu. Both are
exact limits (Clopper and Pearson 1934), each with half of the permitted error, as in Jagielski, Ullman and Oprea 2020
and, for mu, Nasr et al. 2023.

*Curves.* DP-SGD with Poisson samples is neither: its parameters, sampling rate q, T steps and noise multiplier sigma,
determine a whole curve ``delta(epsilon)``, and ``P <= exp(epsilon)*Q + delta(epsilon)`` holds for every epsilon. One
point of it, the (epsilon, delta) that is published, hardly restricts events that are seen in a few thousand draws; the
curve does. The sigmas that the limits of P and Q reject are all above some sigma*, whose epsilon at the published delta
is the lower bound (as Nasr et al. 2023 audit with the trade-off curve of the sampled Gaussian). It is a lower bound
within this family, as that on mu is one among Gaussian releases.

*Guesses.* Each of m canaries is put into the training set by a fair coin. From the trained model the auditor guesses
for r of them whether they are in the set; r is fixed beforehand. v guesses are right.

For epsilon and delta: Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", arXiv:2305.08846v1,
Corollary 5.4. Under (epsilon, delta)-privacy, with W binomial with r trials and success ``q = 1/(1 + exp(-epsilon))``,

    P[at least v right] <= P[W >= v] + 2*m*delta * max_{i >= 1} P[v > W >= v - i] / i.

For mu: pairs (epsilon, delta) lose most of what a Gaussian release reveals, so mu is bounded directly, by the idea of
Mahloujifar, Melis and Chaudhuri, "Auditing f-Differential Privacy in One Run", arXiv:2410.22235. Let N be the number
of right guesses and J one of the m canaries at random. Flipping J's coin turns a right guess about J into a wrong one
and leaves the other guesses unchanged. Write ``R_k = P[J guessed right, N >= k]``, ``H_k = P[J guessed wrong, N >=
k]``, and ``F(x) = Phi(Phi^-1(x) + mu)`` for the largest probability that an event of probability x can have on the
neighbouring input. Then

    R_k <= F(H_{k-1})   for all k,

where averaging over J and the other coins is Jensen's inequality, F being concave. ``p_i = P[N = i]`` adds ``i*p_i/m``
to R and ``(r-i)*p_i/m`` to H, and everything must add up to ``R_0 + H_0 = r/m``. Suppose ``P[N >= v] = t``. Putting
all of t on N = v and then, from v-1 down to 0, adding no more mass than the inequality for k = i+1 demands, uses the
least total: if p' is another solution, then ``R'_i >= R_i`` and ``R'_i - R_i >= i/(r-i) * (H'_i - H_i)`` hold at i = v
and carry over from i+1 to i. If even this needs more than r/m, then P[N >= v] < t.

*Sums.* The general bound must allow that canaries disturb each other in the worst way, so it shows about half of mu. A
release that only adds independent Gaussian noise permits more. Let ``X_i = c + b_i*A_i + s*G_i`` be the signal of
canary i: b_i its coin, G independent standard normal numbers, s > 0 and c unknown, and ``A_i <= mu*s``, whatever else
A_i depends on. Of m canaries n are inside. With the mean of each side, and S the standard deviation of those outside,

    t = (mean inside - mean outside) / (S*r),    r = sqrt(1/n + 1/(m-n)),

never exceeds a variable with noncentral t distribution, m-n-1 degrees of freedom and noncentrality mu/r: the mean of
the A_i is at most mu*s, and canaries outside are noise alone. So every mu for which t lies in the upper tail of size 1
- confidence is rejected (Student's test). This holds for a claim of mu and *this form of noise*. Noise that is
correlated or not normal is outside of the theorem; the bound from guesses needs no such assumption. What comes on top
of mu with probability delta may happen to each canary: m*delta of the permitted error is kept for it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import nctdtr, ndtr, ndtri
from scipy.stats import binom

from quietmax.accounting.costs import Cost, PureCost
from quietmax.accounting.dpsgd import Schedule, loss_delta
from quietmax.accounting.guarantee import Definition, Guarantee, Unit
from quietmax.attacks.metrics import clopper_pearson
from quietmax.errors import InvalidInput

Floats = NDArray[np.float64]
Parameter = Literal["epsilon", "mu"]
Verdict = Literal["refuted", "consistent"]

CONFIDENCE = 1 - 1e-6
"""Default confidence of a bound from draws of a release: one audit in a million refutes a true claim."""
ENOUGH_POWER = 0.9
"""An audit notices something if a repetition would refute the claim with at least this probability."""
_NOISE_IN_WORDS = {0.5: "half the noise", 0.75: "three quarters of the noise"}
_FEWEST_SIGNALS = 8
_LARGEST_EPSILON = 64.0
_LARGEST_EPSILON_OF_STEPS = 2.0**20
_LARGEST_MU = 32.0
_SCANNED = 129
_ROUNDS = 5
_GRID = 65
_REPETITIONS = 400
_FACTORS = 2.0 ** np.arange(0.5, 10.5, 0.5)
_EPSILONS = np.concatenate([np.linspace(0.0, 3.0, 13), np.linspace(3.5, 10.0, 14)])
"""Epsilons at which a curve is tested; any choice is correct, more of them show a little more."""
_MOST_NOISE, _LEAST_NOISE = math.log(1e3), -1.01 * math.log(4.0)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise InvalidInput(f"confidence must lie strictly between 0 and 1, got {confidence}.")


@dataclass(frozen=True)
class EventCounts:
    """How often an event happened in equally many draws on two neighbouring inputs."""

    likely: int  # On the input where it was expected more often
    unlikely: int
    trials: int  # On each input

    def _limits(self, confidence: float) -> tuple[float, float]:
        """Return a lower limit of P and an upper limit of Q, which hold together with this ``confidence``."""
        low, high = clopper_pearson([self.likely, self.unlikely], self.trials, (1 - confidence) / 2)
        return float(low[0]), float(high[1])


@dataclass(frozen=True)
class SampledSteps:
    """What DP-SGD with Poisson samples claims: the curve of T sampled Gaussian steps."""

    noise_multiplier: float  # Standard deviation of the noise as a multiple of the clipping norm
    schedule: Schedule  # Sampling rate and number of steps

    def _permitted(self, q: ArrayLike) -> Floats:
        """Return the largest probability that an event of probability ``q`` can have on the neighbouring input."""
        return np.asarray((np.exp(_EPSILONS) * np.asarray(q, np.float64)[..., None] + self._deltas).min(-1))

    @cached_property
    def _deltas(self) -> Floats:
        return np.array([loss_delta(self.noise_multiplier, each, self.schedule) for each in _EPSILONS])

    def _epsilon(self, delta: float) -> float:
        """Return the epsilon of the steps at ``delta``."""

        def _exceeded(epsilon: float) -> bool:
            return loss_delta(self.noise_multiplier, epsilon, self.schedule) > delta

        if not _exceeded(0.0):
            return 0.0
        high = 1.0
        while _exceeded(high):
            if high >= _LARGEST_EPSILON_OF_STEPS:
                return high
            high *= 2
        return _bisected(_exceeded, high / 2 if high > 1 else 0.0, high, rounds=12)

    def _lower_bound(self, p: float, q: float, delta: float) -> float:
        """Return the epsilon at ``delta`` of the least noise multiplier that ``p`` and ``q`` reject."""

        # Beyond these epsilons exp(epsilon)*q alone exceeds p.
        epsilons = [each for each in _EPSILONS if math.exp(each) * q < p]

        def _rejected(log: float) -> bool:
            return any(
                p > math.exp(each) * q + loss_delta(math.exp(log), each, self.schedule) for each in epsilons
            )

        own = math.log(self.noise_multiplier)
        step = math.log(2.0) if _rejected(own) else -math.log(2.0)
        # More noise is rejected sooner: look for the border below the claimed noise, or above it.
        near, far = own, own - step
        while _rejected(far) == (step > 0):
            near, far = far, far - step
            if far - own > _MOST_NOISE:
                return 0.0
            if far - own < _LEAST_NOISE:
                return SampledSteps(math.exp(near), self.schedule)._epsilon(delta)
        low, high = min(near, far), max(near, far)
        # The least noise that is known to be rejected: less noise might not be, and would give a larger epsilon.
        border = -_bisected(lambda log: _rejected(-log), -high, -low, rounds=12)
        return SampledSteps(math.exp(border), self.schedule)._epsilon(delta)


def _guess_tail(canaries: int, guesses: int, right: int, epsilon: float, delta: float = 0.0) -> float:
    """Bound the probability of ``right`` or more right guesses under (epsilon, delta)-privacy: a p-value."""
    share = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, share))
    if delta > 0 and right > 0:
        below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, share))
        tail += 2 * canaries * delta * float((below / np.arange(1, right + 1)).max())
    return min(tail, 1.0)


def epsilon_from_guesses(
    canaries: int, guesses: int, right: int, *, delta: float = 0.0, confidence: float
) -> float:
    """Return the largest epsilon below which every epsilon is rejected by the number of right guesses."""
    _check_guesses(canaries, guesses, right, confidence)
    error = 1 - confidence

    def _rejected(epsilon: float) -> bool:
        return _guess_tail(canaries, guesses, right, epsilon, delta) <= error

    # With a delta the tail need not grow with epsilon: look for the first epsilon that is not rejected. The last one
    # is not: there a guess is right with probability 1 in floating point, and the tail is 1.
    scanned = np.linspace(0.0, _LARGEST_EPSILON, _SCANNED)
    first = next(place for place, epsilon in enumerate(scanned) if not _rejected(epsilon))
    return 0.0 if first == 0 else _bisected(_rejected, float(scanned[first - 1]), float(scanned[first]))


def _mu_from_guesses(
    canaries: int, guesses: int, right: int, *, extra_delta: float = 0.0, confidence: float
) -> float:
    """Return the largest mu that the number of right guesses rejects."""
    _check_guesses(canaries, guesses, right, confidence)
    error = 1 - confidence
    low, high = 0.0, _LARGEST_MU
    for _ in range(_ROUNDS):
        grid = np.linspace(low, high, _GRID)
        rejected = _mass_needed(grid, canaries, guesses, right, extra_delta, error) > guesses / canaries
        count = int(np.count_nonzero(np.logical_and.accumulate(rejected)))
        if count == 0:
            return 0.0
        if count == _GRID:
            return high
        low, high = float(grid[count - 1]), float(grid[count])
    return low


def _mass_needed(
    mus: Floats, canaries: int, guesses: int, right: int, extra_delta: float, tail: float
) -> Floats:
    """Return ``R_0 + H_0`` of the cheapest distribution with ``P[N >= right] = tail``, for each mu; see the module."""
    correct = np.full(len(mus), tail * right / canaries)
    wrong = np.full(len(mus), tail * (guesses - right) / canaries)
    for index in range(right - 1, -1, -1):
        # H_i >= F^-1(R_{i+1}), and mass is only ever added
        demanded = ndtr(ndtri(np.clip(correct - extra_delta, 0.0, 1.0)) - mus)
        added = np.maximum(demanded - wrong, 0.0)
        wrong = wrong + added
        correct = correct + added * (index / (guesses - index))
        if index % 64 == 0 and (correct + wrong > guesses / canaries).all():
            break
    return np.asarray(correct + wrong)


def _bisected(rejected: Callable[[float], bool], low: float, high: float, rounds: int = 40) -> float:
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low


def _check_guesses(canaries: int, guesses: int, right: int, confidence: float) -> None:
    _check_confidence(confidence)
    if not 0 <= right <= guesses <= canaries or guesses < 1:
        raise InvalidInput(
            "The numbers must satisfy 0 <= right <= guesses <= canaries and guesses >= 1; got right "
            f"{right}, guesses {guesses}, canaries {canaries}."
        )


@dataclass(frozen=True)
class Claim:
    """The claim that an audit tests."""

    definition: Definition
    amount: float  # Epsilon or mu
    extra_delta: float = 0.0  # The delta that comes on top of it
    steps: SampledSteps | None = None

    @classmethod
    def _of(cls, claimed: Guarantee | Cost) -> Claim:
        """Return the claim that a guarantee or a cost makes."""
        if not isinstance(claimed, Guarantee):
            return cls(claimed.measure, claimed.epsilon if isinstance(claimed, PureCost) else claimed.mu)
        if claimed.mu is not None:
            return cls("gaussian", claimed.mu, claimed.extra_delta)
        epsilon = 0.0 if claimed.epsilon is None else claimed.epsilon
        return cls(claimed.definition, epsilon, claimed.at_epsilon(epsilon), _sampled_steps(claimed))

    @property
    def parameter(self) -> Parameter:
        """What is bounded: mu of a Gaussian claim, else epsilon."""
        return "mu" if self.definition == "gaussian" else "epsilon"

    def _lower_bound(self, counts: EventCounts, confidence: float) -> float:
        """Return the lower bound on the claimed epsilon or mu that the counts of an event give."""
        p, q = counts._limits(confidence)
        if self.steps is not None:
            return self.steps._lower_bound(p, q, self.extra_delta)
        left = p - self.extra_delta
        if left <= 0:
            return 0.0
        return max(0.0, math.log(left / q) if self.parameter == "epsilon" else float(ndtri(left) - ndtri(q)))

    def _on_epsilon(self, delta: float) -> Claim:
        """Return the claim on epsilon alone; of a Gaussian claim, at ``delta``."""
        return Claim("approximate", self._stated(delta)["epsilon_claimed"], self._delta(delta))

    def _rejected(self, p: Floats, q: Floats) -> NDArray[np.bool_]:
        """Return whether events of probability ``p`` on one input and ``q`` on the other contradict the claim."""
        if self.steps is not None:
            return np.asarray(p > self.steps._permitted(q))
        left = np.maximum(p - self.extra_delta, 0.0)
        if self.parameter == "mu":
            return np.asarray(ndtri(left) > ndtri(q) + self.amount)
        return np.asarray(left > np.exp(self.amount) * q)

    def _rejected_by_guesses(self, canaries: int, guesses: int, right: int, confidence: float) -> bool:
        """Return whether that many right guesses contradict the claim."""
        if self.parameter == "epsilon":
            return _guess_tail(canaries, guesses, right, self.amount, self.extra_delta) <= 1 - confidence
        needed = _mass_needed(
            np.array([self.amount]), canaries, guesses, right, self.extra_delta, 1 - confidence
        )
        return bool(needed[0] > guesses / canaries)

    def _delta(self, delta: float) -> float:
        """Return the claim's own delta; of a Gaussian claim, ``delta``."""
        return delta if self.definition == "gaussian" else self.extra_delta

    def _stated(self, delta: float) -> dict[str, Any]:
        """Return what a report says of the claim; of a Gaussian claim, also its epsilon at ``delta``."""
        epsilon = self.amount
        if self.definition == "gaussian":
            gaussian = Guarantee("gaussian", mu=epsilon, because="Under audit.", extra_delta=self.extra_delta)
            epsilon = gaussian.at_delta(delta)
        return {
            "definition": self.definition,
            "claimed": self.amount,
            "delta": self._delta(delta),
            "epsilon_claimed": epsilon,
        }


def _sampled_steps(claimed: Guarantee) -> SampledSteps | None:
    """Return the steps that a guarantee of DP-SGD with Poisson samples states; None for any other guarantee."""
    stated = claimed.parameters
    kind = tuple(stated.get(name) for name in ("estimator", "analysis", "sampling"))
    if kind != ("dpsgd", "proven", "poisson") or claimed.definition != "approximate" or claimed.extra_delta:
        return None
    return SampledSteps(
        float(stated["noise_multiplier"]), Schedule(float(stated["sampling_rate"]), int(stated["steps"]))
    )


@dataclass(frozen=True)
class CountedEvent:
    """What an event that was counted says about a repetition of the audit: would it refute the claim?"""

    counts: EventCounts
    claim: Claim
    confidence: float  # Of both limits together

    def _power(self, factor: float = 1.0) -> float:
        """Estimate the probability that ``factor`` times the draws refute, if P and Q are as they were counted."""
        trials = int(self.counts.trials * factor)
        # A count of 0 or of all may have been luck: half an event more or less, as in Jeffreys' estimate.
        shares = [
            (count + 0.5) / (self.counts.trials + 1) for count in (self.counts.likely, self.counts.unlikely)
        ]
        likely, unlikely = np.random.default_rng(0).binomial(trials, shares, (_REPETITIONS, 2)).T
        limits = [clopper_pearson(counts, trials, (1 - self.confidence) / 2) for counts in (likely, unlikely)]
        return float(self.claim._rejected(limits[0][0], limits[1][1]).mean())

    def _samples_needed(self) -> int | None:
        """Estimate the number of samples with power `ENOUGH_POWER`; None if 1,000 times as many would not do."""
        enough = next((factor for factor in _FACTORS if self._power(factor) >= ENOUGH_POWER), None)
        # Half of the samples choose the event.
        return None if enough is None else 2 * int(self.counts.trials * enough)


@dataclass(frozen=True)
class CountedGuesses:
    """What the guesses of a one-run audit say about a repetition, if each is right as often as they were."""

    canaries: int
    guesses: int
    right: int
    claim: Claim
    confidence: float  # With which a repetition may reject the claim

    def _power(self) -> float:
        """Estimate the probability that a repetition refutes the claim."""
        rejected = partial(
            self.claim._rejected_by_guesses, self.canaries, self.guesses, confidence=self.confidence
        )
        # More right guesses are rejected sooner, so the least number of them is found by bisection.
        least = 1 + bisect_left(range(1, self.guesses + 1), True, key=rejected)
        return float(binom.sf(least - 1, self.guesses, (self.right + 0.5) / (self.guesses + 1)))


@dataclass(frozen=True)
class SummedSignals:
    """What the signals of canaries inside and outside say; see the module."""

    inside: int
    outside: int
    distance: float  # Of the mean signals, in standard deviations of those outside: an estimate of mu
    claim: Claim
    confidence: float

    @classmethod
    def _of(
        cls, signals: Floats, inside: NDArray[np.bool_], claim: Claim, confidence: float
    ) -> SummedSignals:
        """Summarise the signals of canaries."""
        own, others = signals[inside], signals[~inside]
        if min(len(own), len(others)) < _FEWEST_SIGNALS or claim.parameter != "mu":
            raise InvalidInput(
                f"Sums of signals require a claim of mu and at least {_FEWEST_SIGNALS} canaries on either side; got "
                f"{claim.parameter} and {len(own)} inside of {len(signals)}."
            )
        spread = max(float(others.std(ddof=1)), np.finfo(np.float64).tiny)
        distance = min(float(own.mean() - others.mean()) / spread, _LARGEST_MU)  # less distance shows less
        return cls(len(own), len(others), distance, claim, confidence)

    def _tail(self, mu: float, distance: float) -> float:
        """Bound the probability of this ``distance`` or more under ``mu``."""
        root = math.sqrt(1 / self.inside + 1 / self.outside)
        return float(1 - nctdtr(self.outside - 1, mu / root, distance / root))

    @property
    def _error(self) -> float:
        return 1 - self.confidence - (self.inside + self.outside) * self.claim.extra_delta

    def _lower_bound(self) -> float:
        """Return the largest mu that the signals reject."""
        return _bisected(
            lambda mu: self._tail(mu, self.distance) <= self._error, 0.0, max(self.distance, 0.0)
        )

    def _power(self, noise_share: float = 1.0) -> float:
        """Estimate the probability that a repetition with a share of this noise refutes the claim."""
        mu = self.claim.amount
        least = _bisected(lambda distance: self._tail(mu, distance) > self._error, mu, 4 * mu + 8)
        return self._tail(self.distance / noise_share, least)


@dataclass(frozen=True)
class SelfTest:
    """The same audit of the same claim, with a share of the noise that the claim requires."""

    noise_share: float
    lower_bound: float  # What the audit found with that noise
    power: float  # Estimated probability that a repetition with that noise refutes the claim
    samples_needed: int | None = None

    @classmethod
    def _of(cls, report: AuditReport, noise_share: float) -> SelfTest:
        """Return what the report of an audit with a share of the noise says about a repetition."""
        assert report.repetition is not None, "every audit says what it counted"
        power, needed = report.repetition._power(), None
        # Of guesses it does not follow: more canaries disturb each other.
        if power < ENOUGH_POWER and isinstance(report.repetition, CountedEvent):
            needed = report.repetition._samples_needed()
        return cls(noise_share, report.lower_bound, power, needed)

    @property
    def notices(self) -> bool:
        """Whether a repetition with this noise would refute the claim with probability 0.9 or more."""
        return self.power >= ENOUGH_POWER

    def sentence(self, parameter: str, claimed: float) -> str:
        """Return the result in words."""
        share = _NOISE_IN_WORDS.get(self.noise_share, f"{self.noise_share:g} of the noise")
        would = "would" if self.notices else "would not reliably" if self.power >= 0.5 else "would not"
        side = "above" if self.lower_bound > claimed else "not above"
        said = (
            f"This audit {would} notice {share}: with it, {parameter} is at least {self.lower_bound:.3g}, {side} the "
            f"claim of {claimed:.3g} (power about {self.power:.2g})."
        )
        if self.samples_needed is not None:
            said += f" About {self.samples_needed:,} samples would."
        return said


def self_tested(audit: Callable[[float], AuditReport], noise_shares: Sequence[float] = (0.5,)) -> AuditReport:
    """Audit a claim, and if it is consistent, audit it again with less noise: would the audit have noticed?"""
    report = audit(1.0)
    if report.verdict == "refuted":
        return report
    first, *further = (SelfTest._of(audit(share), share) for share in noise_shares)
    return replace(report, self_test=first, further_self_tests=tuple(further))


@dataclass(frozen=True)
class AuditReport:
    """A lower bound on a privacy parameter beside the claimed value.

    Parameters
    ----------
    subject : str
        What was audited.
    definition : {"pure", "approximate", "gaussian"}
        What ``claimed`` and ``lower_bound`` are: epsilon (pure), epsilon at ``delta`` (approximate) or mu (gaussian).
    claimed : float
        The claimed value.
    lower_bound : float
        A lower bound on the true value, correct with probability ``confidence``.
    confidence : float
        The confidence of the bounds.
    evidence : str
        The distinguishing event in words.
    samples : int
        Number of draws on each input, or of canaries.
    delta : float
        The delta of the two epsilons below.
    epsilon_claimed, epsilon_lower_bound : float
        Claim and bound as epsilon at ``delta``; they equal ``claimed`` and ``lower_bound`` unless the claim is
        Gaussian.
    details : Mapping[str, Any]
        Further figures as JSON values.
    unit : {"record", "person"}
        What the neighbouring inputs differ in: one record, or one person with all rows.
    repetition : CountedEvent, CountedGuesses, SummedSignals or None
        Estimates the probability that a repetition of this audit refutes the claim.
    self_test : SelfTest or None
        The same audit with less noise, if it was run.
    further_self_tests : tuple of SelfTest
        The same with other shares of the noise.

    Examples
    --------
    >>> AuditReport("coin", "pure", 1.0, 1.5, 0.999, "heads", 100, 0.0, 1.0, 1.5).verdict
    'refuted'
    """

    subject: str
    definition: Definition
    claimed: float
    lower_bound: float
    confidence: float
    evidence: str
    samples: int
    delta: float
    epsilon_claimed: float
    epsilon_lower_bound: float
    details: Mapping[str, Any] = field(default_factory=dict)
    unit: Unit = "record"
    repetition: CountedEvent | CountedGuesses | SummedSignals | None = field(
        default=None, repr=False, compare=False
    )
    self_test: SelfTest | None = None
    further_self_tests: tuple[SelfTest, ...] = ()

    @property
    def parameter(self) -> Parameter:
        """What ``claimed`` and ``lower_bound`` are: mu of a Gaussian claim, else epsilon."""
        return "mu" if self.definition == "gaussian" else "epsilon"

    @property
    def verdict(self) -> Verdict:
        """`refuted` if the lower bound exceeds the claim, else `consistent`.

        A true claim is refuted with probability at most ``1 - confidence``. `consistent` means that this adversary
        found nothing; it is no proof.
        """
        return "refuted" if self.lower_bound > self.claimed else "consistent"

    @property
    def meaning(self) -> str:
        """What the verdict means, in one sentence or two."""
        if self.verdict == "refuted":
            return "The claim is refuted: the event tells the inputs apart better than the claim permits."
        return "No contradiction to the claim was found. This is evidence, not a proof."

    @property
    def share(self) -> float:
        """The lower bound divided by the claim: how much of the claim the adversary could show."""
        return self.lower_bound / self.claimed if self.claimed > 0 else float("inf")

    @property
    def _self_tests(self) -> tuple[SelfTest, ...]:
        return () if self.self_test is None else (self.self_test, *self.further_self_tests)

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name, as JSON values."""
        apart = ("details", "repetition", "self_test", "further_self_tests")
        tests = [{"notices": each.notices, **asdict(each)} for each in self._self_tests]
        return {
            **{each.name: getattr(self, each.name) for each in fields(self) if each.name not in apart},
            "verdict": self.verdict,
            "self_test": tests[0] if tests else None,
            "further_self_tests": tests[1:],
            **self.details,
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of a table: name and value."""
        name = self.parameter
        lines = [
            ("verdict", self.verdict),
            ("unit", f"one {self.unit}"),
            (f"{name} claimed", f"{self.claimed:.4g}"),
            (f"{name} at least", f"{self.lower_bound:.4g}"),
        ]
        if self.definition == "gaussian":
            lines += [
                (f"epsilon claimed at delta {self.delta:g}", f"{self.epsilon_claimed:.4g}"),
                (f"epsilon at least at delta {self.delta:g}", f"{self.epsilon_lower_bound:.4g}"),
            ]
        elif self.delta:
            lines.append(("at delta", f"{self.delta:g}"))
        lines += [
            ("confidence", f"{self.confidence:.10g}"),
            ("evidence", self.evidence),
            ("samples", f"{self.samples:,}"),
        ]
        for test in self._self_tests:
            bound = f"{test.lower_bound:.4g}, power {test.power:.2g}"
            lines.append((f"{name} at least with {test.noise_share:g} of the noise", bound))
        return lines + [
            (key.replace("_", " "), str(value))
            for key, value in self.details.items()
            if isinstance(value, str | int | float)
        ]
