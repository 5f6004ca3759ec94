"""DP-SGD's noise multiplier for a promised (epsilon, delta), under five accountants and in two readings.

A run takes `steps` steps. Each draws a batch, clips every record's gradient to norm S, adds them up and adds
N(0, (sigma*S)^2) noise: sigma is the *noise multiplier*. How large it must be depends on who counts:

* `proven`: what is run is what is counted. Every step takes each record independently with probability q
  (Poisson sampling), neighbours differ by one record added or removed, and all steps are composed.
* `published`: as in the program the paper used (Jayaraman and Evans 2019). NC, AC and zCDP compose over *epochs*
  of shuffled batches, as though a record's place in an epoch did not move the other records; RDP counts shuffled
  batches as though they were Poisson samples. Neither is what was run, so the claim is conditional.

| accountant | proven, q the sampling rate, T the steps | published, E = q*T the epochs |
| --- | --- | --- |
| `pld` | privacy loss distribution of all T steps, errors bounded (`loss_distribution`) | none |
| `rdp` | Renyi divergences of all T steps (dp-accounting) | the same, with the conversion of Mironov 2017 |
| `zcdp` | T steps; zCDP gains nothing from sampling | sqrt(E/2)*(sqrt(L+eps)+sqrt(L))/eps, L = ln(1/delta) |
| `ac` | advanced composition of T sampled steps | sqrt(E*ln(2.5E/delta))*(sqrt(l+2eps)+sqrt(l))/eps, l = ln(2/delta) |
| `nc` | eps/T and delta/T for each sampled step | E*sqrt(2*ln(1.25E/delta))/eps |
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy.optimize import brentq

from quietmax.accounting.advanced import advanced_composition_per_query
from quietmax.accounting.decimals import as_number
from quietmax.accounting.gaussian import mu_of
from quietmax.accounting.loss_distribution import sampled_gaussian_delta
from quietmax.errors import InvalidInput

Accountant = Literal["pld", "rdp", "zcdp", "ac", "nc"]
NoiseReading = Literal["proven", "published"]
ACCOUNTANTS: tuple[Accountant, ...] = ("pld", "rdp", "zcdp", "ac", "nc")
PUBLISHED_ACCOUNTANTS: tuple[Accountant, ...] = ("rdp", "zcdp", "ac", "nc")

SMALLEST_DELTA = 1e-9
"""No smaller delta is accepted; the noise samplers and `rdp` are not calibrated below it."""
_TOLERANCE = 1e-5
_UP = 1.0 + 1e-12
_POINTS_PER_DEVIATION = 32
_LARGEST_STEP_SUPPORT, _LARGEST_SUPPORT = 2.0**16, 2.0**19
_ROUNDING = 1e-12
"""Allowance for the rounding of one step's computed Renyi divergence."""


@dataclass(frozen=True)
class Schedule:
    """The public numbers of a run: each of `steps` steps takes a record with probability `sampling_rate`.

    >>> Schedule(0.02, 5000).epochs
    100.0
    """

    sampling_rate: float
    steps: int

    def __post_init__(self) -> None:
        if not 0.0 < as_number(self.sampling_rate) <= 1.0:
            raise InvalidInput(
                f"The sampling rate is {self.sampling_rate!r}, but must be more than 0 and at most 1: give the"
                " expected share of the records in one batch."
            )
        if isinstance(self.steps, bool) or not (
            1 <= as_number(self.steps) < math.inf and self.steps == int(self.steps)
        ):
            raise InvalidInput(
                f"The number of steps is {self.steps!r}, but must be a whole number from 1 up: give one."
            )

    @property
    def epochs(self) -> float:
        """How often a record is taken on average; a whole number up to rounding is that number."""
        epochs = self.sampling_rate * self.steps
        return float(round(epochs)) if abs(epochs - round(epochs)) <= 1e-9 * epochs else epochs


def noise_multiplier(
    epsilon: float,
    delta: float,
    schedule: Schedule,
    *,
    accountant: Accountant = "pld",
    reading: NoiseReading = "proven",
) -> float:
    """Return the noise multiplier with which a run is (epsilon, delta)-private according to the accountant.

    Searched values (`pld`, `rdp`) are rounded up by at most 1e-4 of themselves.

    >>> round(noise_multiplier(1.0, 1e-5, Schedule(0.01, 10_000), accountant="nc", reading="published"), 1)
    571.7
    """
    if not 1e-4 <= as_number(epsilon) <= 1e6:
        raise InvalidInput(f"epsilon is {epsilon!r}, but must be from 0.0001 to 1000000: give such a number.")
    if not SMALLEST_DELTA <= as_number(delta) < 1.0:
        raise InvalidInput(
            f"delta is {delta!r}, but must be from 1e-9 to below 1 for DP-SGD: give such a number, for instance"
            " 1/(10*records)."
        )
    if reading == "published":
        return _published(float(epsilon), float(delta), schedule, accountant)
    if reading != "proven":
        raise InvalidInput(f"The reading is {reading!r}, but must be 'proven' or 'published': name one.")
    return _proven(float(epsilon), float(delta), schedule, accountant)


@lru_cache(maxsize=1024)
def _published(epsilon: float, delta: float, schedule: Schedule, accountant: str) -> float:
    epochs = schedule.epochs
    if accountant == "nc":
        return epochs * math.sqrt(2 * math.log(1.25 * epochs / delta)) / epsilon
    if accountant == "ac":
        half = math.log(2 / delta)
        roots = math.sqrt(half + 2 * epsilon) + math.sqrt(half)
        return math.sqrt(epochs * math.log(2.5 * epochs / delta)) * roots / epsilon
    if accountant == "zcdp":
        return _concentrated(epsilon, delta, epochs)
    if accountant == "rdp":
        return _renyi(epsilon, delta, schedule, published=True)
    raise InvalidInput(
        f"The accountant is {accountant!r}, but the published reading knows {', '.join(PUBLISHED_ACCOUNTANTS)}:"
        " name one of them, or ask for the proven reading."
    )


@lru_cache(maxsize=1024)
def _proven(epsilon: float, delta: float, schedule: Schedule, accountant: str) -> float:
    if accountant == "pld":
        if schedule.sampling_rate == 1.0:
            # Full batches are T Gaussian mechanisms, together exactly sqrt(T)/sigma-Gaussian private.
            return math.sqrt(schedule.steps) / mu_of(epsilon, delta) * _UP
        return _smallest(
            lambda sigma: math.log(loss_delta(sigma, epsilon, schedule) / delta), epsilon, schedule
        )
    if accountant == "rdp":
        return _renyi(epsilon, delta, schedule, published=False)
    if accountant == "zcdp":
        return _concentrated(epsilon, delta, schedule.steps) * _UP
    if accountant == "ac":
        share = advanced_composition_per_query(epsilon, schedule.steps, delta / 2)
        return _of_sampled_step(share, delta / (2 * schedule.steps), schedule.sampling_rate)
    if accountant == "nc":
        return _of_sampled_step(epsilon / schedule.steps, delta / schedule.steps, schedule.sampling_rate)
    raise InvalidInput(
        f"The accountant is {accountant!r}, but must be one of {', '.join(ACCOUNTANTS)}: name one of them."
    )


def _concentrated(epsilon: float, delta: float, releases: float) -> float:
    """Each release is 1/(2*sigma^2)-zCDP; rho in total is epsilon = rho + 2*sqrt(rho*ln(1/delta)).

    Bun and Steinke 2016, propositions 1.3 and 1.6. The Renyi divergence of a Poisson-sampled release is at most that
    of the release itself (convexity), and for large orders no smaller: sampling gains nothing here.
    """
    log = math.log(1 / delta)
    return math.sqrt(releases / 2) * (math.sqrt(log + epsilon) + math.sqrt(log)) / epsilon


def _of_sampled_step(epsilon: float, delta: float, sampling_rate: float) -> float:
    """The noise multiplier with which one Poisson-sampled Gaussian step is (epsilon, delta)-private.

    A release that is (e, d)-private is (ln(1 + q*(exp(e) - 1)), q*d)-private on a Poisson sample (Balle, Barthe,
    Gaboardi 2018, theorem 8); solved for e and d, and the Gaussian mechanism's exact mu for them.
    """
    unsampled = epsilon + math.log1p((sampling_rate - 1) * math.exp(-epsilon)) - math.log(sampling_rate)
    return _UP / mu_of(unsampled, min(delta / sampling_rate, 0.5))


def _renyi(epsilon: float, delta: float, schedule: Schedule, *, published: bool) -> float:
    # The best order lies near 1 + 2*ln(1/delta)/epsilon, where both terms of the bound are equal.
    largest = math.ceil(4 * math.log(1 / delta) / epsilon) + 64

    def excess(sigma: float) -> float:
        return renyi_epsilon(sigma, delta, schedule, largest_order=largest, published=published) - epsilon

    return _smallest(excess, epsilon, schedule)


def _smallest(excess: Callable[[float], float], epsilon: float, schedule: Schedule) -> float:
    """The smallest noise multiplier at which the decreasing function `excess` is not above 0, rounded up."""
    # Roughly what many small steps need; only the place where the search starts.
    start = max(0.2, 4.0 * schedule.sampling_rate * math.sqrt(schedule.steps) / epsilon)
    low = high = math.log(start)
    while excess(math.exp(high)) > 0.0:
        low, high = high, high + 1.0
        if high > 60.0:
            raise InvalidInput(
                f"No noise multiplier up to 1e26 gives epsilon {epsilon:g} for these steps and this delta:"
                " raise epsilon or delta."
            )
    while excess(math.exp(low)) <= 0.0:
        low, high = low - 0.5, low
    root = float(brentq(lambda log: excess(math.exp(log)), low, high, xtol=_TOLERANCE))
    while excess(math.exp(root)) > 0.0:
        root += _TOLERANCE
    return math.exp(root)


def loss_delta(sigma: float, epsilon: float, schedule: Schedule) -> float:
    """Return an upper bound on the delta of a run at this epsilon, from its privacy loss distribution.

    `loss_distribution` bounds every numerical error. The grid interval follows the spread of the loss, so that the
    number of points, and with it memory, is bounded for every epsilon; a coarser interval only raises delta.

    >>> 0.9e-5 < loss_delta(5.346, 1.0, Schedule(0.02, 5000)) < 1.1e-5
    True
    """
    delta = sampled_gaussian_delta(
        sigma,
        epsilon,
        sampling_rate=schedule.sampling_rate,
        steps=schedule.steps,
        interval=_interval(sigma, schedule),
    )
    return max(delta, 1e-12)


def _interval(sigma: float, schedule: Schedule) -> float:
    """A fraction of the standard deviation of one step's loss, or more where that would need too many points."""
    rate = schedule.sampling_rate
    point = np.linspace(-12.0, 12.0, 4001)
    weight = np.exp(-0.5 * point * point)
    weight /= weight.sum()
    absent = -math.inf if rate == 1.0 else math.log1p(-rate)

    def loss(shift: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        # ln(1 - q + q*exp((2x - 1)/(2 sigma^2))) at x = sigma*point + shift, the record left out (0) or taken (1).
        return np.logaddexp(absent, math.log(rate) + (2 * (sigma * point + shift) - 1) / (2 * sigma * sigma))

    without, taken = loss(0.0), loss(1.0)
    narrow = math.sqrt(float(weight @ (without - weight @ without) ** 2))
    mean = (1 - rate) * (weight @ without) + rate * (weight @ taken)
    wide = math.sqrt(
        float((1 - rate) * (weight @ (without - mean) ** 2) + rate * (weight @ (taken - mean) ** 2))
    )
    narrow, wide = min(narrow, wide), max(narrow, wide)
    return max(
        narrow / _POINTS_PER_DEVIATION,
        float(taken[-1] - without[0]) / _LARGEST_STEP_SUPPORT,
        17.0 * wide * math.sqrt(schedule.steps) / _LARGEST_SUPPORT,
    )


def renyi_epsilon(
    sigma: float, delta: float, schedule: Schedule, *, largest_order: int = 1024, published: bool = False
) -> float:
    """Return the epsilon of a run at this delta from its Renyi divergences of orders up to `largest_order`.

    The divergences of the sampled Gaussian mechanism are dp-accounting's (Mironov, Talwar, Zhang 2019). With r that of
    order a: epsilon = min over a of r + ln(1 - 1/a) - ln(a*delta)/(a - 1) (Canonne, Kamath, Steinke 2020, proposition
    12), or as `published`, r + ln(1/delta)/(a - 1) (Mironov 2017, proposition 3).

    >>> round(renyi_epsilon(7.0, 1e-5, Schedule(0.02, 5000), published=True), 2)
    1.0
    """
    import dp_accounting
    from dp_accounting import rdp

    orders = [1 + part / 100 for part in range(1, 10)] + [1 + part / 10 for part in range(1, 100)]
    orders += list(range(11, 64))
    orders += [round(2 ** (quarter / 4)) for quarter in range(24, 61) if 2 ** (quarter / 4) <= largest_order]
    step = dp_accounting.GaussianDpEvent(sigma)
    if schedule.sampling_rate < 1.0:
        step = dp_accounting.PoissonSampledDpEvent(schedule.sampling_rate, step)
    with _quiet():
        accountant = rdp.RdpAccountant(orders)
        accountant.compose(step, schedule.steps)
    order = np.array(orders)
    divergence = np.array(accountant._rdp)
    for index in np.flatnonzero(np.isinf(divergence)):
        divergence[index] = schedule.steps * _renyi_divergence(orders[index], sigma, schedule.sampling_rate)
    # Divergences of tiny steps can come out negative by rounding, which dp-accounting reads as epsilon 0.
    divergence = np.maximum(divergence, 0.0) + _ROUNDING * schedule.steps
    if published:
        bounds = divergence + math.log(1 / delta) / (order - 1)
    else:
        bounds = divergence + np.log1p(-1 / order) - np.log(delta * order) / (order - 1)
    return max(0.0, float(bounds.min()))


def _renyi_divergence(order: float, sigma: float, sampling_rate: float) -> float:
    """One sampled step's divergence of this order, by quadrature: dp-accounting's series gives up for little noise.

    exp((a - 1)*divergence) is the mean of (1 - q + q*exp((2x - 1)/(2 sigma^2)))^a over x ~ N(0, sigma^2) (Mironov,
    Talwar, Zhang 2019, section 3). Its integrand is a mixture of bells of width sigma between 0 and a, for which
    the trapezoidal rule with 32 points per sigma is right to all digits.
    """
    step = sigma / 32
    point = np.arange(-40.0 * sigma, order + 40.0 * sigma, step)
    ratio = np.logaddexp(
        math.log1p(-sampling_rate), math.log(sampling_rate) + (2 * point - 1) / (2 * sigma**2)
    )
    exponent = order * ratio - 0.5 * (point / sigma) ** 2
    largest = float(exponent.max())
    mean = largest + math.log(
        float(np.exp(exponent - largest).sum()) * step / (sigma * math.sqrt(2 * math.pi))
    )
    return mean / (order - 1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep dp-accounting's warnings (orders that do not converge, which it then leaves out) from users."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
