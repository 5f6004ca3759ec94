"""Accountants for DP-SGD: the noise multiplier with which a run is (epsilon, delta)-differentially private.

`noise_multiplier` is the entry point. ``pld`` bounds the privacy loss distribution of the run, with every numerical
error bounded; ``rdp`` uses Renyi divergences, ``zcdp`` concentrated differential privacy, ``ac`` and ``nc`` advanced
and naive composition.

**The bound of ``pld``** on the delta of repeated Poisson-sampled Gaussian steps, `loss_delta`, bounds every numerical
error.

A step releases x ~ N(0, sigma^2) without the record and x ~ (1-q)*N(0, sigma^2) + q*N(1, sigma^2) with it. Write P and
Q for the two, in either order, L = ln(dP/dQ) for the privacy loss, and L_1, ..., L_T for the losses of T steps under P.
Then delta(epsilon) = E[max(0, 1 - exp(epsilon - L_1 - ... - L_T))] (Sommer, Meiser, Mohammadi 2019). The function
inside does not fall in any loss, so a loss that is too large only raises delta. The computation has four parts:

1. **Grid.** The P-mass and Q-mass of {k*h <= L <= (k+1)*h} are split between the two ends so that both are kept. The
   original pair is a post-processing of the split pair, so delta never falls ("connect the dots", Doroshenko et al.
   2022). The masses are integrals of Gaussian densities over short intervals, by Gauss-Legendre quadrature of 8 nodes.
2. **Errors of one step.** Every mass has a relative error of at most `inflation`, every loss an absolute error of at
   most `shift`. T steps multiply delta by at most exp(T*inflation) and move epsilon by at most T*shift.
3. **Tilt.** With K = ln(sum a_k*exp(t*l_k)) the masses a_k*exp(t*l_k - K) are convolved instead of the a_k, and the
   result at l is multiplied by exp(T*K - t*l). This is exact for every t. The t of the Chernoff bound places the sum
   near epsilon, so that the rounding errors of the convolution are small relative to delta, and not only to 1.
4. **Convolution** by Fourier transforms of length N. A transform of v has an error of at most 8*log2(N)*u*|v|_1 in each
   entry (u = 2^-53: each input passes log2(N) butterflies, each of relative error below 8u; Higham 2002, section 24.1).
   The errors are carried through the power and added up by Parseval's identity. What wraps around from above is
   bounded by Chernoff's inequality; what wraps around from below only adds to delta.

No step costs more than without sampling: a Gaussian step becomes a sampled one if its output is replaced by fresh noise
with probability 1-q. So the exact delta of T full steps is a second bound, and the smaller one is returned.
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
from numpy.typing import NDArray
from scipy import fft
from scipy.optimize import brentq
from scipy.special import logsumexp, softmax

from quietmax.accounting.costs import delta_of, mu_of
from quietmax.errors import InvalidInput, as_number

Floats = NDArray[np.float64]

Accountant = Literal["pld", "rdp", "zcdp", "ac", "nc"]
NoiseAnalysis = Literal["proven", "published"]
ACCOUNTANTS: tuple[Accountant, ...] = ("pld", "rdp", "zcdp", "ac", "nc")
PUBLISHED_ACCOUNTANTS = ACCOUNTANTS[1:]

_SMALLEST_DELTA = 1e-9
"""No smaller delta is accepted; the noise samplers and `rdp` are not calibrated below it."""
_TOLERANCE = 1e-5
_UP = 1.0 + 1e-12
_POINTS_PER_DEVIATION = 32
_LARGEST_STEP_SUPPORT, _LARGEST_SUPPORT = 2.0**16, 2.0**19
_ROUNDING = 1e-12
"""Allowance for the rounding of one step's computed Renyi divergence."""
_ORDERS = (
    *(1 + part / 100 for part in range(1, 10)),
    *(1 + part / 10 for part in range(1, 100)),
    *range(11, 64),
    *(round(2 ** (quarter / 4)) for quarter in range(24, 61)),
)
"""The orders of Renyi divergences that are tried. Each gives a valid bound, and the best one counts."""


@dataclass(frozen=True)
class Schedule:
    """The public numbers of a training run."""

    sampling_rate: float
    steps: int  # The number of steps, at least 1

    def __post_init__(self) -> None:
        if not 0.0 < as_number(self.sampling_rate) <= 1.0:
            raise InvalidInput(f"sampling_rate must be above 0 and at most 1, got {self.sampling_rate!r}.")
        if isinstance(self.steps, bool) or not (
            1 <= as_number(self.steps) < math.inf and self.steps == int(self.steps)
        ):
            raise InvalidInput(f"steps must be an integer of at least 1, got {self.steps!r}.")

    @property
    def epochs(self) -> float:
        """How often a record is sampled on average; rounded to an integer if it is one up to rounding errors."""
        epochs = self.sampling_rate * self.steps
        return float(round(epochs)) if math.isclose(epochs, round(epochs), rel_tol=1e-9) else epochs


def noise_multiplier(
    epsilon: float,
    delta: float,
    schedule: Schedule,
    *,
    accountant: Accountant = "pld",
    analysis: NoiseAnalysis = "proven",
) -> float:
    """Return the noise multiplier (noise over clipping norm) with which a run is (epsilon, delta)-private.

    Values that are found by search (``pld``, ``rdp``) are rounded up by at most 1e-4 of themselves.
    """
    if not 1e-4 <= as_number(epsilon) <= 1e6:
        raise InvalidInput(f"epsilon must be between 0.0001 and 1000000 for DP-SGD, got {epsilon!r}.")
    if not _SMALLEST_DELTA <= as_number(delta) < 1.0:
        raise InvalidInput(f"delta must be at least 1e-9 and below 1 for DP-SGD, got {delta!r}.")
    if analysis == "published":
        return _published(float(epsilon), float(delta), schedule, accountant)
    if analysis != "proven":
        raise InvalidInput(f"analysis must be 'proven' or 'published', got {analysis!r}.")
    return _proven(float(epsilon), float(delta), schedule, accountant)


@lru_cache(maxsize=1024)
def _published(epsilon: float, delta: float, schedule: Schedule, accountant: str) -> float:
    """Return the noise multiplier of the program that the paper used (Jayaraman, Evans 2019)."""
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
        f"accountant must be one of {', '.join(PUBLISHED_ACCOUNTANTS)} with analysis='published', got {accountant!r}."
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
        share = _advanced_share(epsilon, schedule.steps, delta / 2)
        return _of_sampled_step(share, delta / (2 * schedule.steps), schedule.sampling_rate)
    if accountant == "nc":
        return _of_sampled_step(epsilon / schedule.steps, delta / schedule.steps, schedule.sampling_rate)
    raise InvalidInput(f"accountant must be one of {', '.join(ACCOUNTANTS)}, got {accountant!r}.")


_COMPOSITION_SLACK = 2.0**-44


def _advanced_composition(epsilon: float, queries: int, delta: float) -> float:
    """Return the total epsilon of several pure releases at a delta, rounded up (advanced composition)."""
    return _composed_epsilon(epsilon, queries, delta) * (1.0 + _COMPOSITION_SLACK)


def _composed_epsilon(epsilon: float, queries: int, delta: float) -> float:
    drift = queries * epsilon * math.tanh(0.5 * epsilon)
    return min(queries * epsilon, drift + epsilon * math.sqrt(2.0 * queries * -math.log(delta)))


def _advanced_share(total_epsilon: float, queries: int, delta: float) -> float:
    """Return the largest epsilon per release that stays within (total_epsilon, delta), rounded down."""

    def _excess(epsilon: float) -> float:
        return _composed_epsilon(epsilon, queries, delta) - total_epsilon

    share = total_epsilon
    if _excess(share) > 0.0:
        lowest = 0.5 * (total_epsilon / queries)
        share = float(brentq(_excess, lowest, total_epsilon, xtol=1e-300, rtol=2.0**-48, maxiter=500))
    while _advanced_composition(share, queries, delta) > total_epsilon:
        share *= 1.0 - _COMPOSITION_SLACK
    return share


def _concentrated(epsilon: float, delta: float, releases: float) -> float:
    """Return the noise multiplier from zero-concentrated privacy (Bun and Steinke 2016, propositions 1.3 and 1.6).

    Each release is 1/(2*sigma^2)-zCDP, and rho in total gives epsilon = rho + 2*sqrt(rho*ln(1/delta)). The
    Renyi divergence of a Poisson sample is at most that of the release itself, and for large orders no smaller.
    """
    log = math.log(1 / delta)
    return math.sqrt(releases / 2) * (math.sqrt(log + epsilon) + math.sqrt(log)) / epsilon


def _of_sampled_step(epsilon: float, delta: float, sampling_rate: float) -> float:
    """Return the noise multiplier with which one Poisson-sampled Gaussian step is (epsilon, delta)-private.

    A release that is (e, d)-private is (ln(1 + q*(exp(e) - 1)), q*d)-private on a Poisson sample (Balle, Barthe,
    Gaboardi 2018, theorem 8); solved for e and d, and the Gaussian mechanism's exact mu for them.
    """
    unsampled = epsilon + math.log1p((sampling_rate - 1) * math.exp(-epsilon)) - math.log(sampling_rate)
    return _UP / mu_of(unsampled, min(delta / sampling_rate, 0.5))


def _renyi(epsilon: float, delta: float, schedule: Schedule, *, published: bool) -> float:
    # The best order lies near 1 + 2*ln(1/delta)/epsilon, where both terms of the bound are equal.
    largest = 64 - 4 * math.log(delta) / epsilon

    def _excess(sigma: float) -> float:
        return renyi_epsilon(sigma, delta, schedule, largest_order=largest, published=published) - epsilon

    return _smallest(_excess, epsilon, schedule)


def _smallest(excess: Callable[[float], float], epsilon: float, schedule: Schedule) -> float:
    """Return the smallest noise multiplier at which the decreasing function `excess` is at most 0, rounded up."""
    # Roughly what many small steps need. The search starts here and ends at the same place from anywhere.
    first_guess = max(0.2, 4.0 * schedule.sampling_rate * math.sqrt(schedule.steps) / epsilon)
    low = high = math.log(first_guess)
    while excess(math.exp(high)) > 0.0:
        low, high = high, high + 1.0
        if high > 60.0:
            raise InvalidInput(
                f"No noise multiplier up to 1e26 gives epsilon {epsilon:g} for this delta and {schedule.steps} steps."
            )
    while excess(math.exp(low)) <= 0.0:
        low, high = low - 1.0, low
    root = float(brentq(lambda log: excess(math.exp(log)), low, high, xtol=_TOLERANCE))
    while excess(math.exp(root)) > 0.0:
        root += _TOLERANCE
    return math.exp(root)


def loss_delta(sigma: float, epsilon: float, schedule: Schedule) -> float:
    """Return an upper bound on the delta of a run, from its privacy loss distribution."""
    return max(_sampled_gaussian_delta(sigma, epsilon, schedule, _interval(sigma, schedule)), 1e-12)


def _interval(sigma: float, schedule: Schedule) -> float:
    """Return a fraction of the standard deviation of one step's loss, or more if that needed too many points."""
    rate = schedule.sampling_rate
    point = np.linspace(-12.0, 12.0, 4001)
    weight = np.exp(-0.5 * point * point)
    weight /= weight.sum()
    absent = -math.inf if rate == 1.0 else math.log1p(-rate)

    def _loss_at(shift: float) -> Floats:
        # ln(1 - q + q*exp((2x - 1)/(2 sigma^2))) at x = sigma*point + shift, the record left out (0) or taken (1).
        return np.logaddexp(absent, math.log(rate) + (2 * (sigma * point + shift) - 1) / (2 * sigma * sigma))

    without, taken = _loss_at(0.0), _loss_at(1.0)
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
    sigma: float, delta: float, schedule: Schedule, *, largest_order: float = 1024, published: bool = False
) -> float:
    """Return the epsilon of a run at this delta from its Renyi divergences.

    The divergences of the sampled Gaussian mechanism are dp-accounting's (Mironov, Talwar, Zhang 2019). With r that of
    order a: epsilon = min over a of r + ln(1 - 1/a) - ln(a*delta)/(a - 1) (Canonne, Kamath, Steinke 2020, proposition
    12), or as published, r + ln(1/delta)/(a - 1) (Mironov 2017, proposition 3).
    """
    import dp_accounting
    from dp_accounting import rdp

    orders = [order for order in _ORDERS if order <= largest_order]
    step = dp_accounting.PoissonSampledDpEvent(schedule.sampling_rate, dp_accounting.GaussianDpEvent(sigma))
    with _quiet():
        accountant = rdp.RdpAccountant(orders)
        accountant.compose(step, schedule.steps)
    order = np.array(orders)
    divergence = np.array(accountant._rdp)
    for index in np.flatnonzero(np.isinf(divergence)):
        divergence[index] = schedule.steps * _renyi_divergence(orders[index], sigma, schedule.sampling_rate)
    # Divergences of tiny steps can become negative by rounding, which dp-accounting takes for epsilon 0.
    divergence = np.maximum(divergence, 0.0) + _ROUNDING * schedule.steps
    if published:
        bounds = divergence + math.log(1 / delta) / (order - 1)
    else:
        bounds = divergence + np.log1p(-1 / order) - np.log(delta * order) / (order - 1)
    return max(0.0, float(bounds.min()))


def _renyi_divergence(order: float, sigma: float, sampling_rate: float) -> float:
    """Return one sampled step's divergence by quadrature, where dp-accounting's series does not converge.

    exp((a - 1)*divergence) is the mean of (1 - q + q*exp((2x - 1)/(2 sigma^2)))^a over x ~ N(0, sigma^2) (Mironov,
    Talwar, Zhang 2019, section 3). Its integrand is a mixture of bells of width sigma between 0 and a, for which
    the trapezoidal rule with 32 points per sigma is right to all digits.
    """
    point = np.arange(-40.0, order / sigma + 40.0, 1 / 32)  # in units of sigma
    ratio = np.logaddexp(math.log1p(-sampling_rate), math.log(sampling_rate) + (point - 0.5 / sigma) / sigma)
    bell = -0.5 * point**2
    return float(logsumexp(order * ratio + bell) - logsumexp(bell)) / (order - 1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress dp-accounting's warnings about orders that do not converge; it leaves these out."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


_U = 2.0**-53
_REACH = 12.0
"""The standard deviations that are integrated; the rest, below `_LOST` of the mass, counts as an infinite loss."""
_LOST = 1e-32
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_BLOCK = 4096
_LONGEST_TRANSFORM, _SPREADS_BELOW, _LOG_BEYOND = 2**20, 10.0, -28.0
_EXTRA_TILTS = np.array([0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 14.0, 20.0])
"""These say how much of the sum a transform holds, and where Chernoff's bound on the rest is tried. What a transform
does not hold is bounded, so every value is safe."""
_MOST_STEPS = 10**12
_LARGEST_SHIFT = 4096.0
"""For more steps, or a noise multiplier below 1/4096, only the bound without sampling is used."""


@dataclass(frozen=True)
class _Step:
    """One step's losses (first + k)*interval with their masses, and the bounds of part 2."""

    first: int
    masses: Floats
    interval: float
    shift: float
    inflation: float


def _sampled_gaussian_delta(sigma: float, epsilon: float, schedule: Schedule, interval: float) -> float:
    """Return an upper bound on the delta of Poisson-sampled Gaussian steps, on a grid of this interval."""
    rate, steps = schedule.sampling_rate, schedule.steps
    unsampled = delta_of(math.sqrt(steps) / sigma * (1 + 8 * _U), epsilon)
    if rate == 1.0 or steps > _MOST_STEPS or sigma * _LARGEST_SHIFT < 1.0:
        return unsampled
    bounds = [
        _composed_delta(_one_step(sigma, rate, interval, removed=removed), steps, epsilon)
        for removed in (True, False)
    ]
    return unsampled if any(map(math.isnan, bounds)) else min(unsampled, max(bounds))


def _loss(t: Floats, scale: float, rate: float) -> Floats:
    """ln(1 - q + q*exp(y)) with y = (t - scale/2)*scale, the log ratio with/without the record at x = t*sigma."""
    y = (t - scale / 2) * scale
    # The larger of 1 and exp(y) is taken out, so that no exponential overflows.
    above, away = y > 0.0, -np.abs(y)
    share, rest = np.where(above, 1.0 - rate, rate), np.where(above, rate, 1.0 - rate)
    change = share * np.expm1(away)
    with np.errstate(divide="ignore"):
        near, far = np.log1p(change), np.log(rest + share * np.exp(away))
    loss: Floats = np.where(above, y, 0.0) + np.where(change < -0.5, far, near)
    return loss


def _edges(scale: float, rate: float, interval: float, removed: bool) -> list[Floats]:
    """The ends of the integration intervals: where the loss is on the grid, and never further than 1.5/(12 + scale)."""
    windows = [(-_REACH, _REACH)]
    if removed:
        windows.append((max(_REACH, scale - _REACH), scale + _REACH))
    found = []
    for low, high in windows:
        ends = _loss(np.array([low, high]), scale, rate) / interval
        grid = np.arange(math.ceil(ends[0]), math.floor(ends[1]) + 1) * interval
        away = -np.abs(grid)
        with np.errstate(divide="ignore"):
            above = grid + np.log1p((rate - 1.0) / rate * np.expm1(away))
            below = np.log1p(np.maximum(np.expm1(away) / rate, -1.0))
            far_below = np.log(np.maximum(np.exp(away) - (1.0 - rate), 0.0) / rate)
        ratio = np.where(grid > 0.0, above, np.where(grid < -0.5, far_below, below))
        even = np.linspace(low, high, math.ceil((high - low) * (_REACH + scale) / 1.5) + 1)
        found.append(np.unique(np.concatenate([even, np.clip(ratio / scale + scale / 2, low, high)])))
    return found


def _one_step(sigma: float, rate: float, interval: float, *, removed: bool) -> _Step:
    """Parts 1 and 2: one step's losses on the grid, when the record is removed (P has it) or added (Q has it)."""
    scale, sign = 1.0 / sigma, 1.0 if removed else -1.0
    pieces = _edges(scale, rate, interval, removed)
    start = np.concatenate([edges[:-1] for edges in pieces])
    width = np.concatenate([np.diff(edges) for edges in pieces])
    middle = sign * _loss(start + width / 2, scale, rate)
    index = np.floor(middle / interval).astype(np.int64)
    ends = sign * np.stack([_loss(start, scale, rate), _loss(start + width, scale, rate)])
    floor = index * interval
    # how far an interval's losses leave the two grid points they are split between, by rounding
    outside = max(
        0.0, float((floor - ends.min(axis=0)).max()), float((ends.max(axis=0) - floor - interval).max())
    )
    largest = float(np.abs(ends).max())
    rounding = 32 * _U * (largest + scale * (_REACH + scale) + interval)
    shift = outside + rounding

    first = int(index.min())
    place = index - first
    size = int(place.max()) + 2
    mass, upper = np.zeros(size), np.zeros(size)
    cell = -math.expm1(-interval)
    for part in range(0, len(start), _BLOCK):
        block = slice(part, part + _BLOCK)
        t = start[block, None] + width[block, None] * ((_NODES + 1) / 2)
        weight = np.exp(-0.5 * t * t)
        if removed:
            weight = (1.0 - rate) * weight + rate * np.exp(-0.5 * (t - scale) ** 2)
        weight *= width[block, None] * (_WEIGHTS / (2 * math.sqrt(2 * math.pi)))
        share = -np.expm1(floor[block, None] - sign * _loss(t, scale, rate)) / cell
        mass += np.bincount(place[block], weight.sum(axis=1), size)
        upper += np.bincount(place[block], (weight * share).sum(axis=1), size)
    upper = np.clip(upper + mass * (4 * shift / cell + 2.0**-40), 0.0, mass)
    masses = mass - upper
    masses[1:] += upper[:-1]
    masses[masses < 1e-290] = 0.0  # within what `_LOST` allows, and clear of underflow
    added_up = int(np.bincount(place).max())
    inflation = _U * (8 * (_REACH + scale) ** 2 + added_up + 128)
    return _Step(first, masses, interval, shift, inflation)


def _composed_delta(step: _Step, steps: int, epsilon: float) -> float:
    """Parts 3 and 4: an upper bound on delta at epsilon after `steps` steps."""
    masses, h = step.masses, step.interval
    lost = steps * _LOST
    place = np.arange(len(masses), dtype=np.float64)
    losses = (step.first + place) * h
    farthest = float(np.abs(losses).max())
    epsilon -= steps * (step.shift + 4 * _U * farthest) + 8 * _U * epsilon
    with np.errstate(divide="ignore"):
        logs = np.log(masses)
    if epsilon / steps >= losses[masses > 0.0].max():
        return lost
    tilt = _tilt(logs, losses, epsilon / steps)
    level = float(logsumexp(logs + tilt * losses))
    tilted = masses * np.exp(tilt * losses - level)
    mean = float(tilted @ place)
    spread = math.sqrt(steps * float(tilted @ (place - mean) ** 2))

    # Chernoff: the tilted sum reaches x with probability at most exp(min(growth - extra*x))
    extra = _EXTRA_TILTS / (h * max(spread, 1.0))
    growth = steps * (np.array([logsumexp(logs + (tilt + more) * losses) for more in extra]) - level)
    end = float(((growth - _LOG_BEYOND) / extra).min()) / h - steps * step.first

    # The sum has `whole` places, of which the transform holds those from `base` on.
    whole = steps * (len(masses) - 1) + 1
    base = math.floor(steps * mean - _SPREADS_BELOW * spread)
    length = 2 ** math.ceil(math.log2(max(len(masses), min(whole, end - base, _LONGEST_TRANSFORM))))
    if whole <= length:
        base = 0
    elif tilt > 0.0:
        # nothing below the window may count; without a tilt it counts less than where it wraps to
        base = min(base, math.floor(epsilon / h) - steps * step.first)
    over = np.maximum(h * (steps * step.first + base + np.arange(length)) - epsilon, 0.0)
    gain = np.exp(-tilt * over) * -np.expm1(-over)
    del over

    each = 8 * math.log2(length) * _U * float(tilted.sum())
    transform = fft.rfft(tilted, length)
    size = np.abs(transform)
    with np.errstate(divide="ignore", under="ignore"):
        power = np.exp(steps * np.log(size))
        error = math.expm1(steps * 24 * _U) * power
        error += steps * each * np.exp((steps - 1) * np.log(size + each))
    convolved = np.roll(
        fft.irfft(power * np.exp(1j * (steps * np.angle(transform))), length), -(base % length)
    )
    # the transform of a real vector repeats all entries but the first and the last
    squared, absolute = 2 * float(error @ error) / length, 2 * float(power.sum()) / length
    body = float(convolved @ gain) + length * _U * float(np.abs(convolved) @ gain)
    body += math.sqrt(squared) * float(np.linalg.norm(gain))
    body += (each + 4 * _U) * absolute * float(gain.sum()) * (1 + steps * 24 * _U)
    if whole > length:
        top = h * (steps * step.first + base + length)
        body += math.exp(min(0.0, math.log(2) + float((growth - extra * top).min()))) / (1.0 + tilt)
    slack = steps * step.inflation + 2.0**-40
    slack += 8 * _U * (steps * (2.0 + tilt * farthest + 2 * abs(level)) + tilt * abs(epsilon) + 4.0)
    with np.errstate(over="ignore"):
        factor = np.exp(steps * level - tilt * epsilon + slack)
    return float(factor * (body + 1e-200) + lost)


def _tilt(logs: Floats, losses: Floats, mean: float) -> float:
    """The t >= 0 at which the tilted losses have this mean; any other would be as valid, but less sharp."""

    def _excess(t: float) -> float:
        return float(softmax(logs + t * losses) @ (losses - mean))

    if _excess(0.0) >= 0.0:
        return 0.0
    high = 1.0
    while _excess(high) < 0.0:
        high *= 2
    return float(brentq(_excess, 0.0, high, maxiter=500))
