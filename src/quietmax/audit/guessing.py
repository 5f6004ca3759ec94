"""The guessing game of a one-run audit: how many correct guesses about canaries a private training run permits.

Each of m canaries is put into the training set by a fair coin. From the trained model the auditor says of r of them
whether they were in, and abstains on the rest; r is fixed beforehand. If v guesses are right, what follows?

*Epsilon and delta.* Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", arXiv:2305.08846v1,
Corollary 5.4: under (epsilon, delta)-privacy, with W binomial with r trials and success ``q = 1/(1 + exp(-epsilon))``,

    P[at least v right] <= P[W >= v] + 2*m*delta * max_{i >= 1} P[v > W >= v - i] / i.

*Mu.* Pairs (epsilon, delta) waste most of what a Gaussian release lets one see, so mu is bounded directly, by
the idea of Mahloujifar, Melis and Chaudhuri, "Auditing f-Differential Privacy in One Run", arXiv:2410.22235. Let N
be the number of right guesses and J one of the m canaries at random. Flipping J's coin turns a right guess about J
into a wrong one and leaves the other guesses alone. Write ``R_k = P[J guessed right, N >= k]``, ``H_k = P[J guessed
wrong, N >= k]``, and ``F(x) = Phi(Phi^-1(x) + mu)`` for the largest probability that an event of probability x can
have in the neighbouring world. Then

    R_k <= F(H_{k-1})   for all k,

where averaging over J and the other coins is Jensen's inequality, F being concave. ``p_i = P[N = i]`` adds
``i*p_i/m`` to R and ``(r-i)*p_i/m`` to H, and everything must add up to ``R_0 + H_0 = r/m``. Suppose ``P[N >= v] =
t``. Putting all of t on N = v and then, from v-1 down to 0, adding no more mass than the inequality for k = i+1
demands, uses the least total: if p' is another solution, then ``R'_i >= R_i`` and ``R'_i - R_i >= i/(r-i) *
(H'_i - H_i)`` hold at i = v and carry over from i+1 to i. If even this needs more than r/m, then P[N >= v] < t.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from quietmax.audit.intervals import checked_confidence
from quietmax.errors import InvalidInput

_LARGEST_EPSILON = 64.0
_LARGEST_MU = 32.0
_SCANNED = 129
_ROUNDS = 5
_GRID = 65


def tail_under_epsilon(canaries: int, guesses: int, right: int, epsilon: float, delta: float = 0.0) -> float:
    """The largest probability of ``right`` or more right guesses under (epsilon, delta)-privacy: a p-value.

    >>> round(tail_under_epsilon(100, 100, 75, np.log(3)), 3)
    0.553
    """
    _check(canaries, guesses, right)
    if not (epsilon >= 0 and 0 <= delta <= 1):
        raise InvalidInput(
            f"epsilon {epsilon} and delta {delta} must be at least 0, and delta at most 1; give such numbers."
        )
    share = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, share))
    if delta > 0 and right > 0:
        below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, share))
        tail += 2 * canaries * delta * float((below / np.arange(1, right + 1)).max())
    return min(tail, 1.0)


def epsilon_lower_bound(
    canaries: int, guesses: int, right: int, *, delta: float = 0.0, confidence: float
) -> float:
    """The largest epsilon such that it and all smaller ones are rejected; 0 if none is.

    >>> round(epsilon_lower_bound(1000, 100, 75, delta=1e-4, confidence=0.95), 3)
    0.673
    """
    error = 1 - checked_confidence(confidence)

    def rejected(epsilon: float) -> bool:
        return tail_under_epsilon(canaries, guesses, right, epsilon, delta) <= error

    # The tail need not grow with epsilon where delta counts: look for the first epsilon that is not rejected. The last
    # one is not: there a guess is right with probability 1 in floating point, and the tail is 1.
    scanned = np.linspace(0.0, _LARGEST_EPSILON, _SCANNED)
    first = next(place for place, epsilon in enumerate(scanned) if not rejected(epsilon))
    return 0.0 if first == 0 else _bisected(rejected, float(scanned[first - 1]), float(scanned[first]))


def mu_lower_bound(
    canaries: int, guesses: int, right: int, *, extra_delta: float = 0.0, confidence: float
) -> float:
    """The largest mu that is rejected: under it, ``right`` or more right guesses are rarer than ``1 - confidence``.

    ``extra_delta`` is a probability with which the release may do anything: ``F(x) + extra_delta`` instead of F.

    >>> round(mu_lower_bound(1000, 100, 90, confidence=0.95), 2)
    0.6
    """
    _check(canaries, guesses, right)
    error = 1 - checked_confidence(confidence)
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
    """``R_0 + H_0`` of the cheapest law with ``P[N >= right] = tail``, for each mu; see the module."""
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


def _check(canaries: int, guesses: int, right: int) -> None:
    if not 0 <= right <= guesses <= canaries or guesses < 1:
        raise InvalidInput(
            f"{right} right of {guesses} guesses about {canaries} canaries is impossible; need at least one guess, "
            "no more right than guessed and no more guessed than canaries; count again."
        )
