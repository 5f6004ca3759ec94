"""Exact sums over records, and the rows in the form in which a head sums them.

Floating-point sums depend on the order of the records, and their sensitivity can be far larger than that of true sums
(Casacuberta et al., 2022). Here every number that enters a sum is an integer multiple of a power of two (features and
clipped residuals: 2^-20), with so few bits that products and sums of a few thousand rows are exact in float64. These
are added as integers (`ExactSum`), in any order and on any number of threads or machines. So removing a record changes
the sum by exactly its contribution, whose length is bounded. Where a person has k rows, each of them counts 1/k: they
contribute together at most what a single record does (THEORY 3.7).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax.estimators.blocks import EXACT_ROWS, Blocks, Floats, Labels, Table
from quietmax.models.features.base import square_sums

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

BITS = 20
GRID = 2.0**-30
"""Released gradient sums are multiples of this, or of more from a size of 2^22 on."""
MOST_BLOCKS = 2**31
"""`ExactSum` is exact for up to this many blocks."""
_UNIT = 2.0**BITS
_SHORTENED = 1.0 - 2.0**-36
"""Lengths computed in float64 are right up to 2^-40; scaling to this much less than the limit keeps them below it."""
_MANTISSA = 53
MOMENTS_GRID = 2.0**-20
"""Released second moments are multiples of this, or of more from a size of 2^24 on."""
MOMENTS_BITS = 45
"""Released second moments are at most 2^45 grid steps, so that products with numbers of 8 bits are exact."""
WHITENING_BITS = 32
_IMAGE_BITS = 26
_LOW_BITS = 32
_PER_UNIT, _PLACES = 2.0**10, 2**14
Rows = Table | Blocks


def on_grid(values: Floats) -> Floats:
    """Round towards zero to multiples of 2^-20, so that no length grows."""
    return _truncated(np.asarray(values * _UNIT))


def _truncated(units: Floats) -> Floats:
    """Round units of 2^-20 towards zero, in place, and return their values."""
    np.trunc(units, out=units)
    units *= 1.0 / _UNIT
    return units


def clipped_rows(features: NDArray[np.float32], radius: float) -> Floats:
    """Divide rows by a radius, shorten them to length at most 1 and put them on the grid."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = features.astype(np.float64)
        if radius != 1.0:
            scaled /= radius
        lengths = np.sqrt(square_sums(scaled))
        if not np.isfinite(lengths).all():
            scaled[~np.isfinite(scaled)] = 0.0
            # A row whose length is too large for float64 becomes 0.
            lengths = np.sqrt(square_sums(scaled))
    scaled *= _UNIT * (_SHORTENED / np.maximum(lengths, _SHORTENED))
    return _truncated(scaled)


def _unit_rows(rows: Floats, centre: Floats, bias: float) -> Floats:
    """Compute `(f - m, b) / ||(f - m, b)||` on the grid, for rows f, centre m and constant feature b."""
    shifted = np.empty((len(rows), rows.shape[1] + 1))
    np.subtract(rows, centre, out=shifted[:, :-1])
    shifted[:, -1] = on_grid(np.array(bias))
    # Exact: integer multiples of 2^-40, at most 2^43 of them.
    squares = np.einsum("ij,ij->i", shifted, shifted)[:, None]
    shifted /= np.sqrt(np.maximum(squares, 2.0**-60))
    shifted *= _UNIT * _SHORTENED
    return _truncated(shifted)


def _whitening_on_grid(whitening: Floats) -> Floats:
    """Scale a whitening to norm below 1 and round it to 2^-32: its products with rows on the grid are exact."""
    if whitening.ndim == 2:
        whitening = (whitening + whitening.T) / 2
    factor = (1.0 - 2.0**-10) / _spectral_norm(whitening) * 2.0**WHITENING_BITS
    units: Floats = np.trunc(whitening * factor)
    return units / 2.0**WHITENING_BITS


def _spectral_norm(whitening: Floats) -> float:
    return float(np.linalg.norm(whitening, 2) if whitening.ndim == 2 else np.abs(whitening).max())


def is_whitening(whitening: Floats, features: int) -> bool:
    """Return whether an array is one that `_whitening_on_grid` may have returned."""
    if whitening.dtype != np.float64 or whitening.shape not in ((features, features), (features,)):
        return False
    units = whitening * 2.0**WHITENING_BITS
    if not np.isfinite(whitening).all() or not (units == np.trunc(units)).all():
        return False
    return bool((whitening == whitening.T).all()) and _spectral_norm(whitening) <= 1.0


def _whitened_rows(rows: Floats, whitening: Floats) -> Floats:
    """Compute `A g / ||A g||` on the grid, for rows g and a symmetric matrix A."""
    diagonal = whitening.ndim == 1
    images = rows * whitening if diagonal else _exact_product(rows, whitening)
    # The products are exact; rounded to multiples of 2^-26, so is the sum of squares: at most 2^52 units of 2^-52.
    images *= 2.0**_IMAGE_BITS
    np.trunc(images, out=images)
    squares = np.einsum("ij,ij->i", images, images)[:, None]
    images *= _UNIT * _SHORTENED
    images /= np.sqrt(np.maximum(squares, 1.0))
    return _truncated(images)


def _exact_product(rows: Floats, matrix: Floats) -> Floats:
    """Multiply matrices whose products and sums are exact, so that every library returns the same bits."""
    if "torch" in sys.modules:
        return (torch.from_numpy(rows) @ torch.from_numpy(matrix)).numpy()
    return np.asarray(rows @ matrix)


@dataclass(frozen=True, eq=False)
class ExactSum:
    """Integers of any size as pairs, `high * 2^32 + low`: 2^31 sums of blocks below 2^63 cannot overflow."""

    high: NDArray[np.int64]  # the high and the low part; `low` is at least 0
    low: NDArray[np.int64]

    @classmethod
    def of(cls, total: NDArray[np.int64]) -> ExactSum:
        """Return the sum over one block."""
        return cls(total >> _LOW_BITS, total & (2**_LOW_BITS - 1))

    def __add__(self, other: ExactSum) -> ExactSum:
        return ExactSum(self.high + other.high, self.low + other.low)

    def _to_grid(self, *, drop: int, bits: int = _MANTISSA) -> Floats:
        """Divide by 2^drop, round and clamp to float64 numbers: sums d apart differ by at most `d / 2^drop + 1`."""
        high, low = self.high + (self.low >> _LOW_BITS), self.low & (2**_LOW_BITS - 1)
        # Beyond this limit the result is clamped anyway; within it nothing overflows.
        limit = 1 << (bits + drop - _LOW_BITS + 1)
        high = np.clip(high, -limit, limit)
        rounded = (high << (_LOW_BITS - drop)) + ((low + ((1 << drop) >> 1)) >> drop)
        clamped: Floats = np.clip(rounded, -(1 << bits), 1 << bits).astype(np.float64)
        return clamped


def gradient_grid(size: float) -> float:
    """Return the grid of gradient sums of N records: `2^-30`, from `N = 2^22` on in proportion; float64 holds 2 N."""
    return _grown(GRID, size / 2**22)


def moments_grid(size: float) -> float:
    """Return the grid of released second moments for a public size N: `2^-20`, growing from `N = 2^24` on."""
    return _grown(MOMENTS_GRID, size / 2**24)


def _grown(grid: float, ratio: float) -> float:
    """Return a grid times the smallest power of two that is at least a ratio and 1."""
    mantissa, exponent = math.frexp(max(ratio, 1.0))
    return math.ldexp(grid, exponent - (mantissa == 0.5))


def _repeatable_exp(values: Floats) -> Floats:
    """Compute exp(x) for x <= 0 to about 2 units in the last place, whatever a number's place in the array."""
    clipped = np.maximum(values, -700.0)
    powers = np.rint(clipped * 1.4426950408889634)
    rest = clipped - powers * 0.693147180369123816490  # ln 2 with its last 21 bits zero: the product is exact
    rest -= powers * 1.90821492927058770002e-10
    result = np.full_like(rest, 1.0 / math.factorial(13))
    for order in range(12, -1, -1):
        result *= rest
        result += 1.0 / math.factorial(order)
    # 2^power from its bits; powers are at least -1010, so nothing underflows and the product is exact.
    result *= ((powers.astype(np.int64) + 1023) << 52).view(np.float64)
    return result


def probabilities(logits: Floats) -> Floats:
    """Compute the softmax of every column; a column's result does not depend on the other columns."""
    if len(logits) == 2:
        # The larger one has exp(0) = 1: one exponential per column is enough.
        smaller = _repeatable_exp(-np.abs(logits[0] - logits[1]))
        weights = np.where(logits >= logits[::-1], 1.0, smaller)
    else:
        weights = _repeatable_exp(logits - logits.max(axis=0))
    total = weights[0].copy()
    for weight in weights[1:]:
        total += weight
    shares: Floats = weights / total
    return shares


def logistic(scores: Floats) -> Floats:
    """Look up `1 / (1 + exp(-x))` at the nearest multiple of 2^-10, up to 16: it is off by at most 2^-13."""
    found: Floats = _logistic_table().take(_places(scores), mode="clip")
    return found


def _places(scores: Floats) -> NDArray[np.int64]:
    places = scores * _PER_UNIT
    np.rint(places, out=places)
    np.clip(places, -_PLACES, _PLACES, out=places)
    places += _PLACES
    return places.astype(np.int64)


@cache
def _logistic_table() -> Floats:
    smaller = _repeatable_exp(np.arange(_PLACES + 1) / -_PER_UNIT)
    return np.concatenate([smaller[:0:-1], np.ones(_PLACES + 1)]) / (
        1.0 + np.concatenate([smaller[:0:-1], smaller])
    )


def _weights_on_grid(weights: Floats) -> Floats:
    """Round weights to a grid coarse enough that every logit of a row on the grid is exact in float64."""
    longest = math.sqrt(float(np.square(weights).sum(axis=1).max()))
    bits = _MANTISSA - BITS - 1 - max(0, math.frexp(longest)[1])
    unit = 2.0 ** min(bits, 40)
    grid: Floats = np.rint(weights * unit)
    return grid / unit


def _residuals(scores: Floats, labels: Labels) -> Floats:
    if len(scores) == 1:
        return logistic(scores) - labels
    errors = probabilities(scores)
    errors[labels, np.arange(len(labels))] -= 1.0
    return errors


def _clipped_residuals(errors: Floats, max_grad_norm: float, shares: Floats | None = None) -> Floats:
    """Compute `(1/k) (p - e_y) * min(1, S / ||p - e_y||)` on the grid: the k rows of a person add at most S."""
    squares = np.zeros(errors.shape[1])
    for error in errors:
        squares += error * error
    factors = max_grad_norm * _SHORTENED / np.maximum(np.sqrt(squares), max_grad_norm * _SHORTENED)
    if shares is not None:
        factors *= shares
    return on_grid(errors * factors)


def gradient_sum(
    table: Rows,
    weights: Floats,
    max_grad_norm: float,
    *,
    grid: float = GRID,
    class_weights: Floats | None = None,
) -> Floats:
    """Compute `sum_i (1/k_i) clip_S((p_i - e_{y_i}) f_i^T)` without rounding, then round it to multiples of a grid.

    For two classes there is one line, the difference of theirs. One record, or all rows of one person, change the sum
    by at most `certified.head_gradient`. With weights of classes (at most 1), a part is multiplied by its class's.
    """
    grid_weights = torch.from_numpy(_weights_on_grid(weights))
    # All clipped residuals that one output can have: of label 0, then of label 1.
    both = np.concatenate([_logistic_table(), _logistic_table() - 1.0])
    looked_up = _clipped_residuals(both[None], max_grad_norm)[0]

    def _block_sum(block: Table) -> ExactSum:
        total = np.zeros(grid_weights.shape, dtype=np.int64)
        chunks_sum = torch.zeros_like(grid_weights)
        summed, shares = 0, block.shares
        for rows, part in block.chunks():
            labels, scores = block.labels[part], (grid_weights @ rows.T).numpy()
            counted = None if shares is None else shares[part]
            if class_weights is not None:
                counted = class_weights[labels] * (1.0 if counted is None else counted)
            if len(scores) == 1 and counted is None:
                errors = looked_up.take(_places(scores) + labels * _logistic_table().size, mode="clip")
            else:
                errors = _clipped_residuals(_residuals(scores, labels), max_grad_norm, counted)
            if summed + len(rows) > EXACT_ROWS:
                total += np.ldexp(chunks_sum.numpy(), 2 * BITS).astype(np.int64)
                chunks_sum.zero_()
                summed = 0
            chunks_sum.addmm_(torch.from_numpy(errors), rows)
            summed += len(rows)
        total += np.ldexp(chunks_sum.numpy(), 2 * BITS).astype(np.int64)
        return ExactSum.of(total)

    return _released(table.sum(_block_sum), 2 * BITS, grid)


def _row_sum(table: Rows) -> Floats:
    """Sum rows, each divided by its person's k, without rounding; one person changes the sum by at most 1 in L2."""

    def _block_sum(block: Table) -> ExactSum:
        total = np.zeros(block.features, dtype=np.int64)
        for rows, part in block.chunks():
            if block.repeats is not None:
                rows = torch.from_numpy(on_grid(rows.numpy() / block.repeats[part, None]))
            total += np.ldexp(rows.sum(dim=0).numpy(), BITS).astype(np.int64)
        return ExactSum.of(total)

    return _released(table.sum(_block_sum), BITS, 2.0**-BITS)


def _moment_sum(table: Rows, *, grid: float = MOMENTS_GRID) -> Floats:
    """Compute `sum_i f_i f_i^T / k_i` on a grid: a person moves it by at most 1 (Frobenius), plus a step per entry."""

    def _block_sum(block: Table) -> ExactSum:
        total = np.zeros((block.features, block.features), dtype=np.int64)
        roots = None if block.repeats is None else np.sqrt(1.0 / block.repeats)
        for rows, part in block.chunks():
            scaled = rows if roots is None else torch.from_numpy(on_grid(rows.numpy() * roots[part, None]))
            total += np.ldexp((scaled.T @ scaled).numpy(), 2 * BITS).astype(np.int64)
        return ExactSum.of(total)

    return _released(table.sum(_block_sum), 2 * BITS, grid, MOMENTS_BITS)


def _released(total: ExactSum, unit_bits: int, grid: float, bits: int = _MANTISSA) -> Floats:
    """Round integers in units of 2^-unit_bits to multiples of a grid, at most 2^bits of them."""
    drop = unit_bits + round(math.log2(grid))
    return np.ldexp(total._to_grid(drop=drop, bits=bits), drop - unit_bits)
