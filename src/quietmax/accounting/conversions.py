"""Exact arithmetic on decimal numbers, and conversions between pure, Gaussian and (epsilon, delta) privacy.

A float stands for the decimal number it prints as. 0.1 is not a binary fraction, so ten charges of the *binary* 0.1
exceed a budget of 1 by 5.6e-16 and the tenth answer would be refused. Costs and budgets are therefore read as the
shortest decimal that names the float (0.1 is 1/10), added as exact fractions, and turned back into floats outwards:
what was spent is rounded up, what is left is rounded down. A float differs from its decimal by at most 2^-53 of it;
`quietmax.noise` adds noise for that difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from scipy.special import erfcx, erfinv, log_expit, ndtr, ndtri, ndtri_exp

from quietmax.errors import InvalidInput

SMALLEST = 1e-100
LARGEST = 1e100


def decimal(value: float) -> Fraction:
    """Return the decimal number that a float prints as."""
    return Fraction(repr(float(value)))


def as_number(value: float) -> float:
    """Return `value` as a float, or NaN if it is not a number."""
    try:
        return float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError, OverflowError):
        return math.nan


def checked_amount(value: float, name: str) -> float:
    """Return `value` as a float if it is 0 or between 1e-100 and 1e100."""
    number = as_number(value)
    if number == 0.0 or SMALLEST <= number <= LARGEST:
        return abs(number)
    raise InvalidInput(f"{name} must be 0 or between 1e-100 and 1e100, got {value!r}.")


def rounded_up(value: Fraction) -> float:
    """Return the smallest float whose decimal is at least `value`."""
    nearest = float(value)
    return nearest if decimal(nearest) >= value else math.nextafter(nearest, math.inf)


def rounded_down(value: Fraction) -> float:
    """Return the largest float whose decimal is at most `value`."""
    nearest = float(value)
    return nearest if decimal(nearest) <= value else math.nextafter(nearest, -math.inf)


def root_rounded_up(value: Fraction) -> float:
    """Return the smallest float whose squared decimal is at least `value`."""
    root = math.sqrt(float(value)) * (1.0 - 2.0**-51)  # a few floats too low
    while decimal(root) ** 2 < value:
        root = math.nextafter(root, math.inf)
    return root


def root_rounded_down(value: Fraction) -> float:
    """Return the largest float whose squared decimal is at most `value`."""
    root = root_rounded_up(value)
    return root if decimal(root) ** 2 <= value else math.nextafter(root, 0.0)


_SMALLEST_DELTA = 1e-300
"""No smaller positive delta is ever claimed."""
_SLACK = 2.0**-36
"""Relative slack added to every computed delta; mu/64 times as much for larger mu, where x cancels."""
_FINE = 2.0**-44
_SMALL_MU = 0.5
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)


def _mills(x: float) -> float:
    """Return Mills' ratio P(N > x)/phi(x)."""
    return math.sqrt(math.pi / 2) * float(erfcx(x / math.sqrt(2)))


def _log_delta(mu: float, x: float) -> float:
    """Return ln(delta) at epsilon = mu*(x + mu/2), with a relative error of delta below the slack."""
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
    """Return `value` as a float if it is at least `low` and below `high`."""
    number = as_number(value)
    if low <= number < high:
        return number
    raise InvalidInput(f"{name} must be at least {low:g} and below {high:g}, got {value!r}.")


def delta_of(mu: float, epsilon: float) -> float:
    """Return the delta at which mu-Gaussian privacy is (epsilon, delta)-differential privacy, rounded up.

    delta = Phi(-epsilon/mu + mu/2) - exp(epsilon) * Phi(-epsilon/mu - mu/2)   (THEORY 2.5)

    The result is at least the true value and, for mu up to 100, at most (1 + 3e-11) times it. It is never a positive
    number below 1e-300.

    Parameters
    ----------
    mu : float
        At least 0.
    epsilon : float
        At least 0.

    Returns
    -------
    float
        The delta, at most 1.

    Examples
    --------
    >>> round(delta_of(1.0, 1.0), 3)
    0.127
    """
    mu = _checked(mu, "mu", 0.0, math.inf)
    epsilon = _checked(epsilon, "epsilon", 0.0, math.inf)
    if mu == 0.0:
        return 0.0
    log_delta = _log_delta(mu, epsilon / mu - 0.5 * mu)
    return min(1.0, max(_SMALLEST_DELTA, math.exp(log_delta) * (1.0 + _SLACK * max(1.0, mu / 64.0))))


def epsilon_of(mu: float, delta: float) -> float:
    """Return the smallest epsilon at which mu-Gaussian privacy is (epsilon, delta)-private, rounded up.

    ``delta_of(mu, epsilon_of(mu, delta)) <= delta`` always holds.

    Parameters
    ----------
    mu : float
        At least 0.
    delta : float
        At least 1e-300 and below 1.

    Returns
    -------
    float
        The epsilon.

    Examples
    --------
    >>> round(epsilon_of(1.0, 1e-5), 2)
    4.38
    """
    mu = _checked(mu, "mu", 0.0, math.inf)
    delta = _checked(delta, "delta", _SMALLEST_DELTA, 1.0)
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

    ``delta_of(mu_of(epsilon, delta), epsilon) <= delta`` always holds.

    Parameters
    ----------
    epsilon : float
        At least 0.
    delta : float
        At least 1e-300 and below 1.

    Returns
    -------
    float
        The mu.

    Examples
    --------
    >>> round(mu_of(1.0, 1e-5), 3)
    0.268
    """
    epsilon = _checked(epsilon, "epsilon", 0.0, math.inf)
    delta = _checked(delta, "delta", _SMALLEST_DELTA, 1.0)
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
    """Return the root of a function between two points where its signs differ."""
    from scipy.optimize import brentq

    return float(brentq(function, low, high, xtol=1e-300, maxiter=500))


def _stepped(candidate: Callable[[float], float], safe: Callable[[float], bool]) -> float:
    """Return the first candidate, of steps 2^-44, 2^-43, ... away from the root, that is on the safe side."""
    step = _FINE
    while not safe(candidate(step)):
        step *= 2.0
    return candidate(step)


def pure_as_gaussian(epsilon: float) -> float:
    """Return mu such that every epsilon-private release is mu-Gaussian private, rounded up.

    mu = 2 * Phi^-1(exp(epsilon)/(1 + exp(epsilon))): the curve of mu-Gaussian privacy is convex and passes through the
    one corner of the curve of epsilon-privacy, hence lies below it everywhere (THEORY section 3).

    Parameters
    ----------
    epsilon : float
        At least 0.

    Returns
    -------
    float
        The mu.

    Examples
    --------
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
    """
    return pure_as_gaussian(0.5 * as_number(epsilon))
