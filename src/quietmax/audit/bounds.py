"""Lower bounds on epsilon and mu: from counts of an event, and from right guesses about canaries.

*Counts.* If an answer is (epsilon, delta)-private, then ``P <= exp(epsilon)*Q + delta`` for every event, P and Q its
probabilities on two neighbouring inputs. If it is mu-Gaussian private, ``Phi^-1(P) - Phi^-1(Q) <= mu`` (Dong, Roth and
Su 2022, section 2). A lower limit of P and an upper limit of Q therefore give lower bounds on epsilon and mu. Both are
exact limits (Clopper and Pearson 1934), each with half of the permitted error, as in Jagielski, Ullman and Oprea 2020
and, for mu, Nasr et al. 2023.

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
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from quietmax.attacks.metrics import clopper_pearson
from quietmax.errors import InvalidInput

Parameter = Literal["epsilon", "mu"]

CONFIDENCE = 1 - 1e-6
"""Default confidence of a bound from draws of a release: one audit in a million refutes a true claim."""
_LARGEST_EPSILON = 64.0
_LARGEST_MU = 32.0
_SCANNED = 129
_ROUNDS = 5
_GRID = 65


def check_confidence(confidence: float) -> None:
    """Raise `InvalidInput` unless ``confidence`` lies strictly between 0 and 1."""
    if not 0 < confidence < 1:
        raise InvalidInput(f"confidence must lie strictly between 0 and 1, got {confidence}.")


@dataclass(frozen=True)
class EventCounts:
    """How often an event happened in equally many draws on two neighbouring inputs.

    Parameters
    ----------
    likely : int
        How often on the input where it was expected more often.
    unlikely : int
        How often on the other input.
    trials : int
        Number of draws on each input.
    """

    likely: int
    unlikely: int
    trials: int

    def lower_bound(self, parameter: Parameter, delta: float, confidence: float) -> float:
        """Compute a lower bound on epsilon or mu.

        Parameters
        ----------
        parameter : {"epsilon", "mu"}
            What is bounded: ``ln((P - delta)/Q)`` or ``Phi^-1(P - delta) - Phi^-1(Q)``.
        delta : float
            The probability with which the release may do anything.
        confidence : float
            The bound holds with at least this probability.

        Returns
        -------
        float
            The bound, at least 0.

        Examples
        --------
        >>> round(EventCounts(500, 0, 1000).lower_bound("epsilon", 0.0, 0.95), 2)
        4.85
        >>> round(EventCounts(841, 500, 1000).lower_bound("mu", 0.0, 0.95), 2)
        0.82
        """
        error = (1 - confidence) / 2
        p = clopper_pearson(self.likely, self.trials, error)[0] - delta
        q = clopper_pearson(self.unlikely, self.trials, error)[1]
        if p <= 0:
            return 0.0
        bound = math.log(p / q) if parameter == "epsilon" else float(ndtri(p) - ndtri(q))
        return max(0.0, bound)


def approximate_lower_bounds(
    likely: NDArray[np.int64],
    unlikely: NDArray[np.int64],
    trials: int,
    parameter: Parameter,
    delta: float,
    confidence: float,
) -> NDArray[np.float64]:
    """Approximate `EventCounts.lower_bound` for many events, by Wilson's interval: good enough to choose an event.

    Parameters
    ----------
    likely, unlikely : array of int
        How often each event happened on the two inputs.
    trials : int
        Number of draws on each input.
    parameter, delta, confidence
        As in `EventCounts.lower_bound`.

    Returns
    -------
    array of float
        One bound per event; it may be negative.
    """
    z = -float(ndtri((1 - confidence) / 2))

    def wilson(happened: NDArray[np.int64], sign: float) -> NDArray[np.float64]:
        share = happened / trials
        spread = z * np.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
        return np.asarray((share + z * z / (2 * trials) + sign * spread) / (1 + z * z / trials))

    tiny = 1e-300
    p = np.maximum(wilson(likely, -1.0) - delta, tiny)
    q = np.clip(wilson(unlikely, 1.0), tiny, 1.0)
    if parameter == "epsilon":
        return np.asarray(np.log(p / q))
    return np.asarray(ndtri(p) - ndtri(q))


def guess_tail(canaries: int, guesses: int, right: int, epsilon: float, delta: float = 0.0) -> float:
    """Bound the probability of ``right`` or more right guesses under (epsilon, delta)-privacy: a p-value.

    Parameters
    ----------
    canaries : int
        Number of canaries, each in the training set with probability 1/2.
    guesses : int
        Number of guesses, at least 1.
    right : int
        Number of right guesses.
    epsilon, delta : float
        The privacy of the training.

    Returns
    -------
    float
        An upper bound on the probability.

    Examples
    --------
    >>> round(guess_tail(100, 100, 75, np.log(3)), 3)
    0.553
    """
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
    """Return the largest epsilon below which every epsilon is rejected by the number of right guesses.

    Parameters
    ----------
    canaries, guesses, right : int
        Numbers of canaries, of guesses about them, and of right guesses.
    delta : float
        The delta at which epsilon is bounded.
    confidence : float
        The bound holds with at least this probability.

    Returns
    -------
    float
        The lower bound, at least 0.

    Examples
    --------
    >>> round(epsilon_from_guesses(1000, 100, 75, delta=1e-4, confidence=0.95), 3)
    0.673
    """
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
    """Return the largest mu that the number of right guesses rejects.

    Parameters
    ----------
    canaries, guesses, right : int
        Numbers of canaries, of guesses about them, and of right guesses.
    extra_delta : float
        A probability with which the release may do anything: ``F(x) + extra_delta`` in place of F.
    confidence : float
        The bound holds with at least this probability.

    Returns
    -------
    float
        The lower bound, at least 0.

    Examples
    --------
    >>> round(mu_from_guesses(1000, 100, 90, confidence=0.95), 2)
    0.6
    """
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


def _bisected(rejected: Callable[[float], bool], low: float, high: float) -> float:
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low


def _check_guesses(canaries: int, guesses: int, right: int) -> None:
    if not 0 <= right <= guesses <= canaries or guesses < 1:
        raise InvalidInput(
            "The numbers must satisfy 0 <= right <= guesses <= canaries and guesses >= 1; got right "
            f"{right}, guesses {guesses}, canaries {canaries}."
        )
