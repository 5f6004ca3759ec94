"""The Gaussian currency seen from outside: mu against (epsilon, delta), and pure steps as Gaussian ones.

With x = epsilon/mu - mu/2 and Mills' ratio M(x) = (1 - Phi(x))/phi(x), theory section 2.5 reads

    delta(epsilon) = Phi(-x) - exp(epsilon) * Phi(-x - mu) = phi(x) * (M(x) - M(x + mu)),

because exp(epsilon) * phi(x + mu) = phi(x). The right-hand side neither overflows nor, with M' = x*M - 1
integrated for small mu, cancels. Every result errs on the safe side: delta and epsilon are rounded up, mu (of
an epsilon and a delta) is rounded down; the stated slack covers the rounding of the floating-point steps for
mu from 1e-6 to 100 and delta from 1e-300 to 0.5, where the tests compare with 60-digit arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq
from scipy.special import erfcx, erfinv, log_expit, ndtr, ndtri, ndtri_exp

from quietmax.accounting.decimals import as_number
from quietmax.errors import InvalidInput

SMALLEST_DELTA = 1e-300
"""No smaller positive delta is ever claimed."""
SLACK = 2.0**-36
"""Relative slack added to every computed delta; mu/64 times as much for larger mu, where x cancels."""
_FINE = 2.0**-44
_SMALL_MU = 0.5
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)


def _mills(x: float) -> float:
    return math.sqrt(math.pi / 2) * float(erfcx(x / math.sqrt(2)))


def _log_delta(mu: float, x: float) -> float:
    """Natural logarithm of delta at epsilon = mu*(x + mu/2), to a relative error of delta below the slack."""
    if mu < _SMALL_MU:
        points = x + 0.5 * mu * (_NODES + 1.0)
        slopes = 1.0 - points * math.sqrt(math.pi / 2) * erfcx(points / math.sqrt(2))
        difference = 0.5 * mu * float(_WEIGHTS @ slopes)
    elif x > 0.0:
        difference = _mills(x) - _mills(x + mu)
    else:
        density = math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return math.log(float(ndtr(-x)) - density * _mills(x + mu))
    if difference <= 0.0:
        return -math.inf
    return math.log(difference) - 0.5 * x * x - 0.5 * math.log(2 * math.pi)


def _checked(value: float, name: str, low: float, high: float) -> float:
    number = as_number(value)
    if low <= number < high:
        return number
    raise InvalidInput(
        f"{name} is {value!r}, but must be at least {low:g} and less than {high:g}: give such a number."
    )


def delta_of(mu: float, epsilon: float) -> float:
    """Return the delta at which mu-Gaussian privacy is (epsilon, delta)-differential privacy, rounded up.

    delta = Phi(-epsilon/mu + mu/2) - exp(epsilon) * Phi(-epsilon/mu - mu/2)   (theory section 2.5)

    At least the true value and, for mu up to 100, at most (1 + 3e-11) times it; never a positive number below
    1e-300.

    >>> round(delta_of(1.0, 1.0), 3)
    0.127
    """
    mu = _checked(mu, "mu", 0.0, math.inf)
    epsilon = _checked(epsilon, "epsilon", 0.0, math.inf)
    if mu == 0.0:
        return 0.0
    log_delta = _log_delta(mu, epsilon / mu - 0.5 * mu)
    return min(1.0, max(SMALLEST_DELTA, math.exp(log_delta) * (1.0 + SLACK * max(1.0, mu / 64.0))))


def epsilon_of(mu: float, delta: float) -> float:
    """Return the smallest epsilon at which mu-Gaussian privacy is (epsilon, delta)-private, rounded up.

    `delta_of(mu, epsilon_of(mu, delta)) <= delta` always.

    >>> round(epsilon_of(1.0, 1e-5), 2)
    4.38
    """
    mu = _checked(mu, "mu", 0.0, math.inf)
    delta = _checked(delta, "delta", SMALLEST_DELTA, 1.0)
    if delta_of(mu, 0.0) <= delta:
        return 0.0

    def excess(point: float) -> float:
        return _log_delta(mu, point) - math.log(delta)

    # epsilon = 0 is x = -mu/2; delta <= Phi(-x), so the root lies below x = -ndtri(delta).
    x = -0.5 * mu
    if excess(x) > 0.0:
        x = _root(excess, x, -float(ndtri(delta)) + 1e-3)
    epsilon = mu * (x + 0.5 * mu)
    return _stepped(lambda step: epsilon * (1.0 + step) + mu * step, lambda e: delta_of(mu, e) <= delta)


def mu_of(epsilon: float, delta: float) -> float:
    """Return the largest mu whose Gaussian privacy is within (epsilon, delta), rounded down.

    `delta_of(mu_of(epsilon, delta), epsilon) <= delta` always.

    >>> round(mu_of(1.0, 1e-5), 3)
    0.268
    """
    epsilon = _checked(epsilon, "epsilon", 0.0, math.inf)
    delta = _checked(delta, "delta", SMALLEST_DELTA, 1.0)
    # delta <= mu/sqrt(2 pi) and delta <= Phi(-x), which is below 1e-300 for x > 38, give two mu that certainly suffice.
    low, width = math.log(max(delta, min(1.0, epsilon / 40.0))), 1.0

    def excess(log_mu: float) -> float:
        mu = math.exp(log_mu)
        return _log_delta(mu, epsilon / mu - 0.5 * mu) - math.log(delta)

    while excess(low + width) <= 0.0:
        width *= 2.0
    mu = math.exp(_root(excess, low, low + width))
    return _stepped(lambda step: mu * (1.0 - step), lambda m: delta_of(m, epsilon) <= delta)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    return float(brentq(function, low, high, xtol=1e-300, rtol=4 * np.finfo(float).eps, maxiter=500))


def _stepped(candidate: Callable[[float], float], safe: Callable[[float], bool]) -> float:
    """Return the first candidate, of steps 2^-44, 2^-43, ... away from the root, that is on the safe side."""
    step = _FINE
    while not safe(candidate(step)):
        step *= 2.0
    return candidate(step)


def pure_as_gaussian(epsilon: float) -> float:
    """Return mu such that every epsilon-private release is mu-Gaussian private, rounded up.

    mu = 2 * Phi^-1(exp(epsilon)/(1 + exp(epsilon))): the curve of mu-Gaussian privacy is convex and passes
    through the one corner of the curve of epsilon-privacy, hence lies below it everywhere (theory section 3).

    >>> round(pure_as_gaussian(0.01) / 0.01, 4)
    1.2533
    """
    epsilon = _checked(epsilon, "epsilon", 0.0, math.inf)
    if epsilon < 1.0:
        mu = 2.0 * math.sqrt(2.0) * float(erfinv(math.tanh(0.5 * epsilon)))
    else:
        mu = -2.0 * float(ndtri_exp(log_expit(-epsilon)))
    return mu * (1.0 + _FINE)


def bounded_range_as_gaussian(epsilon: float) -> float:
    """Return mu such that every release of bounded range epsilon is mu-Gaussian private, rounded up.

    mu = 2 * Phi^-1(1/(1 + exp(-epsilon/2))). Bounded range: the logarithms of the probability ratios lie in
    an interval of length epsilon, as for the exponential mechanism (Dong, Durfee, Rogers 2020). The worst
    pair for the interval [t - epsilon, t] is binary, with probabilities p(t) and q(t) = exp(-t)*p(t), and
    needs mu = Phi^-1(p) - Phi^-1(q). Its derivative in t has the sign of h(p) - h(q), h(s) =
    phi(Phi^-1(s))/(s*(1-s)), and h grows with |s - 1/2| since phi/Phi + phi/(1 - Phi) is convex and even; so
    the maximum is at t = epsilon/2.

    >>> round(bounded_range_as_gaussian(0.01) / 0.01, 4)
    0.6267
    """
    return pure_as_gaussian(0.5 * as_number(epsilon))
