"""Lower bounds on epsilon and mu: from counts of an event, and from right guesses about canaries.

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
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from quietmax.accounting.dpsgd import Schedule, loss_delta
from quietmax.attacks.metrics import clopper_pearson
from quietmax.errors import InvalidInput

Parameter = Literal["epsilon", "mu"]

CONFIDENCE = 1 - 1e-6
"""Default confidence of a bound from draws of a release: one audit in a million refutes a true claim."""
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


def check_confidence(confidence: float) -> None:
    """Raise `InvalidInput` unless ``confidence`` lies strictly between 0 and 1."""
    if not 0 < confidence < 1:
        raise InvalidInput(f"confidence must lie strictly between 0 and 1, got {confidence}.")


@dataclass(frozen=True)
class EventCounts:
    """How often an event happened in equally many draws on two neighbouring inputs."""

    likely: int  # How often on the input where it was expected more often
    unlikely: int  # How often on the other input
    trials: int  # Number of draws on each input

    def lower_bound(self, parameter: Parameter, delta: float, confidence: float) -> float:
        """Compute a lower bound on epsilon or mu."""
        p, q = self.limits(confidence)
        if p <= delta:
            return 0.0
        bound = math.log((p - delta) / q) if parameter == "epsilon" else float(ndtri(p - delta) - ndtri(q))
        return max(0.0, bound)

    def limits(self, confidence: float) -> tuple[float, float]:
        """Return a lower limit of P and an upper limit of Q, which hold together with this ``confidence``."""
        low, high = clopper_pearson([self.likely, self.unlikely], self.trials, (1 - confidence) / 2)
        return float(low[0]), float(high[1])


@dataclass(frozen=True)
class SampledSteps:
    """What DP-SGD with Poisson samples claims: the curve of T sampled Gaussian steps."""

    noise_multiplier: float  # Standard deviation of the noise as a multiple of the clipping norm
    schedule: Schedule  # Sampling rate and number of steps

    def rejected(self, p: ArrayLike, q: ArrayLike) -> NDArray[np.bool_]:
        """Return whether no event can have probability ``p`` on one input and ``q`` on the other."""
        return np.asarray(np.asarray(p, np.float64) > self.permitted(q))

    def permitted(self, q: ArrayLike) -> NDArray[np.float64]:
        """Return the largest probability that an event of probability ``q`` can have on the neighbouring input."""
        epsilons, deltas = self._curve
        return np.asarray((np.exp(epsilons) * np.asarray(q, np.float64)[..., None] + deltas).min(-1))

    @cached_property
    def _curve(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        deltas = [loss_delta(self.noise_multiplier, each, self.schedule) for each in _EPSILONS]
        return _EPSILONS, np.array(deltas)

    def epsilon(self, delta: float) -> float:
        """Return the epsilon of the steps at ``delta``."""

        def exceeded(epsilon: float) -> bool:
            return loss_delta(self.noise_multiplier, epsilon, self.schedule) > delta

        if not exceeded(0.0):
            return 0.0
        high = 1.0
        while exceeded(high):
            if high >= _LARGEST_EPSILON_OF_STEPS:
                return high
            high *= 2
        return _bisected(exceeded, high / 2 if high > 1 else 0.0, high, rounds=12)

    def lower_bound(self, p: float, q: float, delta: float) -> float:
        """Return the epsilon at ``delta`` of the least noise multiplier that ``p`` and ``q`` reject."""

        # Beyond these epsilons exp(epsilon)*q alone exceeds p.
        epsilons = [each for each in _EPSILONS if math.exp(each) * q < p]

        def rejected(log: float) -> bool:
            return any(
                p > math.exp(each) * q + loss_delta(math.exp(log), each, self.schedule) for each in epsilons
            )

        own = math.log(self.noise_multiplier)
        step = math.log(2.0) if rejected(own) else -math.log(2.0)
        # More noise is rejected sooner: look for the border below the claimed noise, or above it.
        near, far = own, own - step
        while rejected(far) == (step > 0):
            near, far = far, far - step
            if far - own > _MOST_NOISE:
                return 0.0
            if far - own < _LEAST_NOISE:
                return SampledSteps(math.exp(near), self.schedule).epsilon(delta)
        low, high = min(near, far), max(near, far)
        # The least noise that is known to be rejected: less noise might not be, and would give a larger epsilon.
        border = -_bisected(lambda log: rejected(-log), -high, -low, rounds=12)
        return SampledSteps(math.exp(border), self.schedule).epsilon(delta)


ENOUGH_POWER = 0.9
"""An audit notices something if a repetition would refute the claim with at least this probability."""
Rejects = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.bool_]]
"""Whether lower limits of P and upper limits of Q contradict a claim."""


@dataclass(frozen=True)
class CountedEvent:
    """What an event that was counted says about a repetition of the audit: would it refute the claim?"""

    counts: EventCounts  # The counts
    rejects: Rejects  # Whether lower limits of P and upper limits of Q contradict the claim
    confidence: float  # The confidence of the two limits together
    draws_per_trial: int = 2  # Draws of a whole audit on each input for each draw that bounds the event

    def power(self, trials: int | None = None) -> float:
        """Estimate the probability that ``trials`` new draws refute, if P and Q are as they were counted.

        >>> claim = lambda p, q: p > np.e * q
        >>> CountedEvent(EventCounts(700, 200, 1000), claim, 0.99).power()
        0.6875
        """
        trials = self.counts.trials if trials is None else trials
        # A count of 0 or of all may have been luck: half an event more or less, as in Jeffreys' estimate.
        shares = [
            (count + 0.5) / (self.counts.trials + 1) for count in (self.counts.likely, self.counts.unlikely)
        ]
        likely, unlikely = np.random.default_rng(0).binomial(trials, shares, (_REPETITIONS, 2)).T
        limits = [clopper_pearson(counts, trials, (1 - self.confidence) / 2) for counts in (likely, unlikely)]
        return float(self.rejects(limits[0][0], limits[1][1]).mean())

    def samples_needed(self) -> int | None:
        """Estimate the number of samples with power `ENOUGH_POWER`; None if 1,000 times as many would not do."""
        for factor in _FACTORS:
            trials = int(self.counts.trials * factor)
            if self.power(trials) >= ENOUGH_POWER:
                return self.draws_per_trial * trials
        return None


@dataclass(frozen=True)
class CountedGuesses:
    """What the guesses of a one-run audit say about a repetition, if each is right as often as they were."""

    canaries: int  # Numbers of canaries, of guesses about them, and of right guesses
    guesses: int
    right: int
    rejected: Callable[[int], bool]  # Whether a number of right guesses contradicts the claim

    def power(self) -> float:
        """Estimate the probability that a repetition refutes the claim."""
        low, high = 0, self.guesses
        if not self.rejected(high):
            return 0.0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.rejected(middle) else (middle, high)
        return float(binom.sf(high - 1, self.guesses, (self.right + 0.5) / (self.guesses + 1)))

    def samples_needed(self) -> int | None:
        """Return None: more canaries disturb each other, so their number does not follow from the guesses."""
        return None


def approximate_lower_bounds(
    likely: NDArray[np.int64],
    unlikely: NDArray[np.int64],
    trials: int,
    parameter: Parameter,
    delta: float,
    confidence: float,
) -> NDArray[np.float64]:
    """Approximate `EventCounts.lower_bound` for many events, by Wilson's interval: good enough to choose an event."""
    low, high = _approximate_limits(likely, unlikely, trials, confidence)
    tiny = 1e-300
    p = np.maximum(low - delta, tiny)
    q = np.clip(high, tiny, 1.0)
    if parameter == "epsilon":
        return np.asarray(np.log(p / q))
    return np.asarray(ndtri(p) - ndtri(q))


def approximate_shares(
    likely: NDArray[np.int64],
    unlikely: NDArray[np.int64],
    trials: int,
    steps: SampledSteps,
    confidence: float,
) -> NDArray[np.float64]:
    """Approximate how much of what ``steps`` permit each event shows: good enough to choose an event."""
    p, q = _approximate_limits(likely, unlikely, trials, confidence)
    return np.asarray((p - q) / np.maximum(steps.permitted(q) - q, 1e-300))


def _approximate_limits(
    likely: NDArray[np.int64], unlikely: NDArray[np.int64], trials: int, confidence: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return Wilson's limits: of P from below and of Q from above."""
    z = -float(ndtri((1 - confidence) / 2))

    def wilson(happened: NDArray[np.int64], sign: float) -> NDArray[np.float64]:
        share = happened / trials
        spread = z * np.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
        return np.asarray((share + z * z / (2 * trials) + sign * spread) / (1 + z * z / trials))

    return wilson(likely, -1.0), wilson(unlikely, 1.0)


def guess_tail(canaries: int, guesses: int, right: int, epsilon: float, delta: float = 0.0) -> float:
    """Bound the probability of ``right`` or more right guesses under (epsilon, delta)-privacy: a p-value."""
    _check_guesses(canaries, guesses, right)
    if not epsilon >= 0:
        raise InvalidInput(f"epsilon must be at least 0, got {epsilon}.")
    if not 0 <= delta <= 1:
        raise InvalidInput(f"delta must be from 0 to 1, got {delta}.")
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
    check_confidence(confidence)
    error = 1 - confidence

    def rejected(epsilon: float) -> bool:
        return guess_tail(canaries, guesses, right, epsilon, delta) <= error

    # With a delta the tail need not grow with epsilon: look for the first epsilon that is not rejected. The last one
    # is not: there a guess is right with probability 1 in floating point, and the tail is 1.
    scanned = np.linspace(0.0, _LARGEST_EPSILON, _SCANNED)
    first = next(place for place, epsilon in enumerate(scanned) if not rejected(epsilon))
    return 0.0 if first == 0 else _bisected(rejected, float(scanned[first - 1]), float(scanned[first]))


def mu_from_guesses(
    canaries: int, guesses: int, right: int, *, extra_delta: float = 0.0, confidence: float
) -> float:
    """Return the largest mu that the number of right guesses rejects."""
    _check_guesses(canaries, guesses, right)
    check_confidence(confidence)
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


def mu_rejected(
    mu: float, canaries: int, guesses: int, right: int, *, extra_delta: float = 0.0, confidence: float
) -> bool:
    """Return whether the number of right guesses rejects ``mu``; the other parameters as in `mu_from_guesses`."""
    needed = _mass_needed(np.array([mu]), canaries, guesses, right, extra_delta, 1 - confidence)
    return bool(needed[0] > guesses / canaries)


def _mass_needed(
    mus: NDArray[np.float64], canaries: int, guesses: int, right: int, extra_delta: float, tail: float
) -> NDArray[np.float64]:
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


def _check_guesses(canaries: int, guesses: int, right: int) -> None:
    if not 0 <= right <= guesses <= canaries or guesses < 1:
        raise InvalidInput(
            "The numbers must satisfy 0 <= right <= guesses <= canaries and guesses >= 1; got right "
            f"{right}, guesses {guesses}, canaries {canaries}."
        )
