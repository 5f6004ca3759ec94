"""An upper bound on the delta of repeated Poisson-sampled Gaussian steps, with every numerical error bounded.

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

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.special import logsumexp

from quietmax.accounting.gaussian import delta_of

Floats = NDArray[np.float64]

_U = 2.0**-53
_REACH = 12.0
"""Standard deviations that are integrated; the rest, below `_LOST` of the mass, counts as an infinite loss."""
_LOST = 1e-32
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_BLOCK = 4096
_LONGEST_TRANSFORM, _SPREADS_BELOW = 2**20, 10.0
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


def sampled_gaussian_delta(
    sigma: float, epsilon: float, *, sampling_rate: float, steps: int, interval: float
) -> float:
    """Return an upper bound on the delta of `steps` Poisson-sampled Gaussian steps.

    Parameters
    ----------
    sigma : noise multiplier, the standard deviation of the noise for sensitivity 1.
    epsilon : where the privacy curve is evaluated.
    sampling_rate : probability of a record to be in a step, above 0 and at most 1.
    steps : number of steps.
    interval : grid spacing of the privacy loss. Every value is safe; a coarser one gives a larger delta.

    Returns
    -------
    An upper bound for adding and for removing one record, at most 1.

    Examples
    --------
    >>> bound = sampled_gaussian_delta(1.0, 1.0, sampling_rate=0.1, steps=1, interval=0.001)
    >>> 0.000207 < bound < 0.000208
    True
    """
    unsampled = delta_of(math.sqrt(steps) / sigma * (1 + 8 * _U), epsilon)
    if sampling_rate == 1.0 or steps > _MOST_STEPS or sigma * _LARGEST_SHIFT < 1.0:
        return unsampled
    bounds = [
        _composed_delta(_one_step(sigma, sampling_rate, interval, removed=removed), steps, epsilon)
        for removed in (True, False)
    ]
    return unsampled if any(map(math.isnan, bounds)) else min(unsampled, max(bounds))


def _loss(t: Floats, scale: float, rate: float) -> Floats:
    """ln(1 - q + q*exp(y)) with y = (t - scale/2)*scale, the log ratio with/without the record at x = t*sigma."""
    y = (t - scale / 2) * scale
    change = rate * np.expm1(np.minimum(y, 700.0))
    low = np.log((1.0 - rate) + rate * np.exp(np.minimum(y, 0.0)))
    high = y + math.log(rate) + np.log1p((1.0 - rate) / rate * np.exp(-np.maximum(y, 0.0)))
    middle = np.log1p(np.maximum(change, -0.5))
    return np.where(y > 30.0, high, np.where(change < -0.5, low, middle))


def _edges(scale: float, rate: float, interval: float, removed: bool) -> list[Floats]:
    """The ends of the integration intervals: where the loss is on the grid, and never further than 1.5/(12 + scale)."""
    width = min(0.125, 1.5 / (_REACH + scale))
    windows = [(-_REACH, _REACH)]
    if removed and scale < 2 * _REACH:
        windows = [(-_REACH, scale + _REACH)]
    elif removed:
        windows.append((scale - _REACH, scale + _REACH))
    found = []
    for low, high in windows:
        ends = _loss(np.array([low, high]), scale, rate) / interval
        grid = np.arange(math.ceil(ends[0]), math.floor(ends[1]) + 1) * interval
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.where(
                grid < -0.5,
                np.log(np.maximum(np.exp(np.minimum(grid, 0.0)) - (1.0 - rate), 0.0) / rate),
                np.where(
                    grid > 30.0,
                    grid - math.log(rate) + np.log1p(-(1.0 - rate) * np.exp(-np.maximum(grid, 0.0))),
                    np.log1p(np.maximum(np.expm1(np.minimum(grid, 30.0)) / rate, -1.0)),
                ),
            )
        even = np.linspace(low, high, math.ceil((high - low) / width) + 1)
        crossings = ratio / scale + scale / 2
        crossings = crossings[(crossings > low) & (crossings < high)]
        found.append(np.unique(np.concatenate([even, crossings])))
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
    losses: Floats = (step.first + np.arange(len(masses), dtype=np.float64)) * h
    farthest = float(np.abs(losses).max())
    epsilon = epsilon - steps * (step.shift + 4 * _U * farthest) - 8 * _U * epsilon
    positive = masses > 0.0
    logs = np.full(len(masses), -math.inf)
    logs[positive] = np.log(masses[positive])
    if steps * float(losses[positive].max()) <= epsilon:
        return lost
    tilt = _tilt(logs, losses, epsilon / steps)
    level = float(logsumexp(logs + tilt * losses))
    tilted = masses * np.exp(tilt * losses - level)
    mean = float(tilted @ losses) / h - step.first
    spread = math.sqrt(max(0.0, steps * float(tilted @ (losses - h * (step.first + mean)) ** 2))) / h

    # Chernoff: the tilted sum reaches x with probability at most exp(min(growth - extra*x))
    extra = np.array([0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 14.0, 20.0]) / (h * max(spread, 1.0))
    growth = steps * (np.array([logsumexp(logs + (tilt + more) * losses) for more in extra]) - level)
    end = float(((growth + 28.0) / extra).min()) / h - steps * step.first

    whole = steps * (len(masses) - 1) + 1
    needed = min(whole, _SPREADS_BELOW * spread + max(end - steps * mean, spread) + 64)
    length = 2 ** math.ceil(math.log2(max(len(masses), min(needed, _LONGEST_TRANSFORM))))
    base = 0 if whole <= length else math.floor(steps * mean - _SPREADS_BELOW * spread)
    if whole > length and tilt > 0.0:
        # nothing below the window may count; without a tilt it counts less than where it wraps to
        base = min(base, math.floor(epsilon / h) - 1 - steps * step.first)
    over = np.maximum(h * (steps * step.first + base + np.arange(length)) - epsilon, 0.0)
    gain = np.exp(-tilt * over) * -np.expm1(-over)
    del over

    each = 8 * math.log2(length) * _U * float(tilted.sum()) * (1 + 2.0**-20)
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
        body += min(1.0, 2 * math.exp(float((growth - extra * top).min()))) / (1.0 + tilt)
    exponent = steps * level - tilt * epsilon
    slack = steps * (step.inflation + 8 * _U * (2 + tilt * farthest + abs(level)))
    slack += 8 * _U * (steps * abs(level) + tilt * abs(epsilon) + 4.0) + 2.0**-40
    return math.inf if exponent + slack > 700.0 else math.exp(exponent + slack) * (body + 1e-200) + lost


def _tilt(logs: Floats, losses: Floats, mean: float) -> float:
    """The t >= 0 at which the tilted losses have about this mean; any other would be as valid, but less sharp."""

    def tilted_mean(t: float) -> float:
        weights = np.exp(logs + t * losses - (logs + t * losses).max())
        return float(weights @ losses) / float(weights.sum())

    if tilted_mean(0.0) >= mean:
        return 0.0
    low = high = 1.0
    while tilted_mean(high) < mean:
        low, high = high, 2 * high
        if high > 1e9:
            return high
    while tilted_mean(low) >= mean:
        low, high = low / 2, low
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if tilted_mean(middle) < mean else (low, middle)
    return high
