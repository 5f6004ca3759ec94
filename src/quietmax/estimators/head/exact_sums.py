"""The records as a head sees them, and sums over records without rounding.

Differential privacy is proven for exact sums. Floating-point sums are not: they depend on the order of the
records, and the sensitivity of a rounded sum can be far larger than that of the true one (Casacuberta et
al., 2022). Here every number that enters a sum over records is a whole multiple of a power of two, with so
few bits that products and sums are exact in float64, in any order and on any number of threads. What a
record contributes is then a function of that record and of public numbers alone: removing it changes the
sum by exactly its contribution, whose length is bounded.

Units: features are multiples of 2^-20 of length at most 1; clipped residuals are multiples of 2^-20.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from quietmax.errors import InvalidInput
from quietmax.models.features.base import parallel_map, square_sums

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

BITS = 20
"""Features and residuals are multiples of 2^-BITS."""
GRID = 2.0**-30
"""Released sums are multiples of this."""
LARGEST_TABLE = 2**22
"""More records would overflow 63 bits: a sum over records is at most `sqrt(2) * 2^22` in multiples of 2^-40."""
ROWS_AT_ONCE = 512
_BLOCK = 2**19
"""About this many numbers are held in float64 at once: they fit into a processor's cache."""
_UNIT = 2.0**BITS
_SHORTENED = 1.0 - 2.0**-36
"""Lengths computed in float64 are right up to 2^-40; scaling to this much less than the limit keeps them below it."""
_MANTISSA = 53


def on_grid(values: Floats) -> Floats:
    """Round towards zero to multiples of 2^-20, so that no length grows."""
    units: Floats = np.trunc(values * _UNIT)
    return units / _UNIT


def clipped_rows(features: NDArray[np.float32], radius: float) -> Floats:
    """Rows divided by `radius`, shortened to length at most 1 and put on the grid; what is not finite becomes 0.

    >>> clipped_rows(np.array([[3.0, 4.0], [0.25, 0.0]], np.float32), 1.0).round(3)
    array([[0.6 , 0.8 ],
           [0.25, 0.  ]])
    """
    scaled = np.nan_to_num(features.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0) / radius
    lengths = np.sqrt(square_sums(scaled))
    return on_grid(scaled * (_SHORTENED / np.maximum(lengths, _SHORTENED)))


def unit_rows(rows: Floats, centre: Floats, bias: float) -> Floats:
    """`(f - m, b) / ||(f - m, b)||` for rows f and centre m on the grid, both of length at most 1, put on the grid.

    A linear classifier of the result is an affine one of f: dividing by a length changes no decision.
    """
    shifted = np.concatenate([rows - centre, np.full((len(rows), 1), on_grid(np.array(bias)))], axis=1)
    # Exact: whole multiples of 2^-40, at most 2^43 of them.
    squares = np.square(shifted).sum(axis=1, keepdims=True)
    lengths = np.sqrt(np.maximum(squares, 2.0**-60))
    return on_grid(shifted / lengths * _SHORTENED)


def block_rows(features: int) -> int:
    """Rows of a block of a table with so many features."""
    return min(max(_BLOCK // features, 16), 4096)


@dataclass(frozen=True)
class Extent:
    """The public numbers of a table that rounding errors depend on: at most so many records, features, classes."""

    records: int
    features: int
    classes: int

    def __len__(self) -> int:
        return self.records

    @property
    def rows_at_once(self) -> int:
        """Rows of a block."""
        return block_rows(self.features)


@dataclass(frozen=True, eq=False)
class Table:
    """Records ready for training: `rows` on the grid, of length at most 1, and class numbers in `labels`."""

    rows: NDArray[np.float32]
    labels: Labels
    classes: int

    def __post_init__(self) -> None:
        if len(self.rows) > LARGEST_TABLE:
            raise InvalidInput(
                f"There are {len(self.rows)} records, but a head sums at most {LARGEST_TABLE} exactly; give fewer."
            )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def features(self) -> int:
        """The number of features, the constant one included."""
        return int(self.rows.shape[1])

    @property
    def rows_at_once(self) -> int:
        """Rows of a block: at most 4096, whose clipped gradients sum to less than 2^53 multiples of 2^-40."""
        return block_rows(self.features)

    @cached_property
    def lengths(self) -> Floats:
        """The length of every row; the sums of squares are exact."""
        parts = [np.square(rows.numpy()).sum(axis=1) for rows, _ in self.blocks()]
        squares: Floats = np.concatenate([np.empty(0), *parts])
        return np.sqrt(squares)

    @property
    def pieces(self) -> list[slice]:
        """Consecutive parts of the records, one for each of torch's threads unless there are few records."""
        count = max(1, min(torch.get_num_threads(), len(self.rows) // ROWS_AT_ONCE))
        edges = [len(self.rows) * piece // count for piece in range(count + 1)]
        return [slice(start, stop) for start, stop in itertools.pairwise(edges)]

    def blocks(self, piece: slice | None = None) -> Iterator[tuple[torch.Tensor, slice]]:
        """Rows in float64 and which they are, some at a time; the tensor is overwritten by the next ones."""
        first, last = (0, len(self.rows)) if piece is None else (piece.start, piece.stop)
        height = self.rows_at_once
        buffer = torch.empty((min(height, last - first), self.features), dtype=torch.float64)
        for start in range(first, last, height):
            part = slice(start, min(start + height, last))
            rows = buffer[: part.stop - start]
            rows.copy_(torch.from_numpy(self.rows[part]))
            yield rows, part


def repeatable_exp(values: Floats) -> Floats:
    """exp(x) for x <= 0, to about 2 units in the last place, by additions and multiplications of whole arrays alone.

    Library exponentials may round differently at the end of an array; these do not depend on a number's
    place.

    >>> float(abs(repeatable_exp(np.array([-1.0])) - math.exp(-1.0))[0]) < 1e-15
    True
    """
    clipped = np.maximum(values, -700.0)
    powers = np.rint(clipped * 1.4426950408889634)
    rest = clipped - powers * 0.693147180369123816490  # ln 2 with its last 21 bits zero: the product is exact
    rest = rest - powers * 1.90821492927058770002e-10
    result = np.full_like(rest, 1.0 / math.factorial(13))
    for order in range(12, -1, -1):
        result = result * rest
        result = result + 1.0 / math.factorial(order)
    scaled: Floats = np.ldexp(result, powers.astype(np.int32))
    return scaled


def probabilities(logits: Floats) -> Floats:
    """Softmax over the first axis of (C, n) logits; a column's result does not depend on the other columns."""
    weights = repeatable_exp(logits - logits.max(axis=0))
    total = weights[0].copy()
    for weight in weights[1:]:
        total += weight
    shares: Floats = weights / total
    return shares


def weights_on_grid(weights: Floats) -> Floats:
    """Weights rounded to a grid coarse enough that every logit of a row on the grid is exact in float64.

    A logit's partial sums are at most `||W_c||` long, in multiples of 2^-20 times the grid: at most 2^53 of
    them.
    """
    longest = math.sqrt(float(np.square(weights).sum(axis=1).max()))
    bits = _MANTISSA - BITS - 1 - max(0, math.frexp(longest)[1])
    unit = 2.0 ** min(bits, 40)
    grid: Floats = np.rint(weights * unit)
    return grid / unit


def residuals(weights: torch.Tensor, rows: torch.Tensor, labels: Labels) -> Floats:
    """`p - e_y` of every row as (C, n), for weights on their grid."""
    errors = probabilities((weights @ rows.T).numpy())
    errors[labels, np.arange(len(labels))] -= 1.0
    return errors


def clipped_residuals(errors: Floats, lengths: Floats, max_grad_norm: float) -> Floats:
    """`(p - e_y) * min(1, S / (||p - e_y|| ||f||))` on the grid: then `||(p - e_y) f^T|| <= S`."""
    squares = np.zeros(errors.shape[1])
    for error in errors:
        squares += error * error
    norms = np.sqrt(squares) * lengths
    return on_grid(errors * (max_grad_norm * _SHORTENED / np.maximum(norms, max_grad_norm * _SHORTENED)))


def gradient_sum(table: Table, weights: Floats, max_grad_norm: float) -> Floats:
    """`sum_i clip_S((p_i - e_{y_i}) f_i^T)` as (C, d), without rounding, then rounded to multiples of `GRID`.

    One record changes it by at most `certified.head_gradient(max_grad_norm, coordinates=C*d, grid=GRID)` in L2.
    """
    grid_weights = torch.from_numpy(weights_on_grid(weights))
    lengths, pieces = table.lengths, table.pieces

    def piece_sum(number: int) -> NDArray[np.int64]:
        total = np.zeros((table.classes, table.features), dtype=np.int64)
        for rows, part in table.blocks(pieces[number]):
            errors = clipped_residuals(
                residuals(grid_weights, rows, table.labels[part]), lengths[part], max_grad_norm
            )
            total += np.ldexp((torch.from_numpy(errors) @ rows).numpy(), 2 * BITS).astype(np.int64)
        return total

    sums = parallel_map(piece_sum, len(pieces))
    return _released(np.add.reduce(sums), 2 * BITS)


def row_sum(rows: NDArray[np.float32]) -> Floats:
    """Sum of rows on the grid, without rounding."""
    total = np.zeros(rows.shape[1], dtype=np.int64)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        total += np.ldexp(rows[start : start + ROWS_AT_ONCE].sum(axis=0, dtype=np.float64), BITS).astype(
            np.int64
        )
    return np.ldexp(total.astype(np.float64), -BITS)


def _released(total: NDArray[np.int64], bits: int) -> Floats:
    """Whole numbers of 2^-bits rounded to multiples of `GRID`: at most 2^53 of them, so exact in float64."""
    drop = bits + round(math.log2(GRID))
    rounded = (total + (1 << (drop - 1))) >> drop
    return np.ldexp(rounded.astype(np.float64), drop - bits)
