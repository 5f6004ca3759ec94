"""Exact sums over records, and the records in the form in which a head sums them.

Differential privacy is proven for exact sums. Floating-point sums are not exact: they depend on the order of the
records, and the sensitivity of a rounded sum can be far larger than that of the true one (Casacuberta et al., 2022).
Here every number that enters a sum over records is an integer multiple of a power of two, with so few bits that
products and sums are exact in float64, in any order and on any number of threads. What a record contributes is then a
function of that record and of public numbers alone: removing it changes the sum by exactly its contribution, whose
length is bounded.

Units: features are multiples of 2^-20 of length at most 1; clipped residuals are multiples of 2^-20.

Where a person has k rows, each of them counts 1/k: the rows of one person together contribute at most what a single
record does (THEORY 3.7). The number k depends on that person's rows alone.
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
MOMENTS_GRID = 2.0**-20
"""Released second moments are multiples of this."""
WHITENING_BITS = 32
"""A whitening consists of multiples of 2^-32."""
_IMAGE_BITS = 26


def on_grid(values: Floats) -> Floats:
    """Round towards zero to multiples of 2^-20, so that no length grows.

    Parameters
    ----------
    values : array
        Any numbers.

    Returns
    -------
    array
        The rounded numbers.
    """
    units: Floats = np.trunc(values * _UNIT)
    return units / _UNIT


def clipped_rows(features: NDArray[np.float32], radius: float) -> Floats:
    """Divide rows by a radius, shorten them to length at most 1 and put them on the grid.

    Parameters
    ----------
    features : array of shape (records, features)
        Public features; numbers that are not finite, before or after the division, count as 0.
    radius : float
        The length to which features are clipped.

    Returns
    -------
    array of shape (records, features)
        The rows in float64.

    Examples
    --------
    >>> clipped_rows(np.array([[3.0, 4.0], [0.25, 0.0]], np.float32), 1.0).round(3)
    array([[0.6 , 0.8 ],
           [0.25, 0.  ]])
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = features.astype(np.float64)
        scaled /= radius
        scaled[~np.isfinite(scaled)] = 0.0
        # A row whose length is too large for float64 becomes 0.
        lengths = np.sqrt(square_sums(scaled))
    scaled *= _SHORTENED / np.maximum(lengths, _SHORTENED)
    return on_grid(scaled)


def unit_rows(rows: Floats, centre: Floats, bias: float) -> Floats:
    """Compute `(f - m, b) / ||(f - m, b)||` on the grid, for rows f, centre m and constant feature b.

    A linear classifier of the result is an affine one of f: dividing by a length changes no decision.

    Parameters
    ----------
    rows : array of shape (records, features)
        Rows f on the grid, of length at most 1.
    centre : array of shape (features,)
        The centre m on the grid, of length at most 1.
    bias : float
        The constant feature b.

    Returns
    -------
    array of shape (records, features + 1)
        Rows on the grid, of length at most 1.
    """
    shifted = np.empty((len(rows), rows.shape[1] + 1))
    np.subtract(rows, centre, out=shifted[:, :-1])
    shifted[:, -1] = on_grid(np.array(bias))
    # Exact: integer multiples of 2^-40, at most 2^43 of them.
    squares = np.square(shifted).sum(axis=1, keepdims=True)
    shifted /= np.sqrt(np.maximum(squares, 2.0**-60))
    shifted *= _SHORTENED
    return on_grid(shifted)


def whitening_on_grid(whitening: Floats) -> Floats:
    """Scale a whitening to spectral norm below 1 and round it to multiples of 2^-32.

    Products with rows on the grid are then exact: all partial sums are multiples of 2^-52 and at most 1.

    Parameters
    ----------
    whitening : array of shape (features, features) or (features,)
        A symmetric matrix, or the diagonal of one. Its scale does not matter to `whitened_rows`.

    Returns
    -------
    array of the same shape
        A for `whitened_rows`.

    Examples
    --------
    >>> whitening_on_grid(np.array([8.0, 2.0])).round(2)
    array([1.  , 0.25])
    """
    if whitening.ndim == 2:
        whitening = (whitening + whitening.T) / 2
    factor = (1.0 - 2.0**-10) / _spectral_norm(whitening) * 2.0**WHITENING_BITS
    units: Floats = np.trunc(whitening * factor)
    return units / 2.0**WHITENING_BITS


def _spectral_norm(whitening: Floats) -> float:
    """Return the largest singular value of a matrix, or of a diagonal one."""
    return float(np.linalg.norm(whitening, 2) if whitening.ndim == 2 else np.abs(whitening).max())


def is_whitening(whitening: Floats, features: int) -> bool:
    """Return whether an array is one that `whitening_on_grid` may have returned.

    Parameters
    ----------
    whitening : array
        Any numbers.
    features : int
        The number of features.

    Returns
    -------
    bool

    Examples
    --------
    >>> is_whitening(whitening_on_grid(np.eye(2)), 2), is_whitening(np.eye(2) / 3, 2)
    (True, False)
    """
    if whitening.dtype != np.float64 or whitening.shape not in ((features, features), (features,)):
        return False
    units = whitening * 2.0**WHITENING_BITS
    if not np.isfinite(whitening).all() or not (units == np.trunc(units)).all():
        return False
    return bool((whitening == whitening.T).all()) and _spectral_norm(whitening) <= 1.0


def whitened_rows(rows: Floats, whitening: Floats) -> Floats:
    """Compute `A g / ||A g||` on the grid, for rows g and a symmetric matrix A.

    Parameters
    ----------
    rows : array of shape (records, features)
        Rows g on the grid, of length at most 1.
    whitening : array of shape (features, features) or (features,)
        A, or its diagonal, from `whitening_on_grid`.

    Returns
    -------
    array of shape (records, features)
        Rows on the grid, of length at most 1.
    """
    diagonal = whitening.ndim == 1
    images = rows * whitening if diagonal else (torch.from_numpy(rows) @ torch.from_numpy(whitening)).numpy()
    # The products are exact; rounded to multiples of 2^-26, so is the sum of squares: at most 2^52 units of 2^-52.
    images *= 2.0**_IMAGE_BITS
    np.trunc(images, out=images)
    squares = np.square(images).sum(axis=1, keepdims=True)
    images *= _UNIT * _SHORTENED
    images /= np.sqrt(np.maximum(squares, 1.0))
    np.trunc(images, out=images)
    images /= _UNIT
    return images


def _block_rows(features: int) -> int:
    """Return the number of rows of a block: at most 4096, whose clipped gradients sum to less than 2^53 units."""
    return min(max(_BLOCK // features, 16), 4096)


def thread_pieces(records: int) -> list[slice]:
    """Divide a number of records into consecutive pieces, one for each of torch's threads, fewer if there are few.

    Parameters
    ----------
    records : int
        Number of records.

    Returns
    -------
    list of slice
        At least one piece.

    Examples
    --------
    >>> thread_pieces(3)
    [slice(0, 3, None)]
    """
    count = max(1, min(torch.get_num_threads(), records // ROWS_AT_ONCE))
    edges = [records * piece // count for piece in range(count + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


@dataclass(frozen=True)
class TableShape:
    """The public numbers of a table that rounding errors depend on.

    Parameters
    ----------
    units : int
        Largest number of records, or of persons.
    features, classes : int
        Numbers of features (the constant one included) and of classes.
    repeated : bool
        Whether persons have several rows. Their number has no public bound but `LARGEST_TABLE`.
    """

    units: int
    features: int
    classes: int
    repeated: bool = False

    def __len__(self) -> int:
        return LARGEST_TABLE if self.repeated else self.units

    @property
    def rows_at_once(self) -> int:
        """Rows of a block."""
        return _block_rows(self.features)


@dataclass(frozen=True, eq=False)
class Table:
    """Records ready for training.

    Parameters
    ----------
    rows : array of shape (records, features)
        Rows on the grid, of length at most 1.
    labels : array of shape (records,)
        Class indices.
    classes : int
        Number of classes.
    repeats : array of shape (records,), optional
        How many rows the person of each row has. None if every row is a record of its own.

    Raises
    ------
    InvalidInput
        If there are more than `LARGEST_TABLE` records.
    """

    rows: NDArray[np.float32]
    labels: Labels
    classes: int
    repeats: Labels | None = None

    def __post_init__(self) -> None:
        if len(self.rows) > LARGEST_TABLE:
            raise InvalidInput(f"A head can be trained on at most {LARGEST_TABLE:,} records.")

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def features(self) -> int:
        """The number of features, the constant one included."""
        return int(self.rows.shape[1])

    @property
    def rows_at_once(self) -> int:
        """Rows of a block."""
        return _block_rows(self.features)

    @cached_property
    def shares(self) -> Floats | None:
        """What every row counts: 1/k if its person has k rows. None if all count 1."""
        return None if self.repeats is None else 1.0 / self.repeats

    @property
    def units(self) -> int:
        """The number of persons, or of records if there are no persons."""
        return len(self.rows) if self.shares is None else round(float(self.shares.sum()))

    @cached_property
    def lengths(self) -> Floats:
        """The length of every row; the sums of squares are exact."""
        lengths, pieces = np.empty(len(self.rows)), self.pieces

        def fill(number: int) -> None:
            for rows, part in self.blocks(pieces[number]):
                lengths[part] = np.sqrt(np.square(rows.numpy()).sum(axis=1))

        parallel_map(fill, len(pieces))
        return lengths

    @property
    def pieces(self) -> list[slice]:
        """Consecutive parts of the records: one for each of torch's threads, fewer if there are few records."""
        return thread_pieces(len(self.rows))

    def blocks(self, piece: slice | None = None) -> Iterator[tuple[torch.Tensor, slice]]:
        """Iterate over blocks of rows.

        Parameters
        ----------
        piece : slice, optional
            The part of the records to go through; all by default.

        Yields
        ------
        tuple of tensor and slice
            Rows in float64, and their place. The tensor is overwritten by the next block.
        """
        first, last = (0, len(self.rows)) if piece is None else (piece.start, piece.stop)
        height = self.rows_at_once
        buffer = torch.empty((min(height, last - first), self.features), dtype=torch.float64)
        for start in range(first, last, height):
            part = slice(start, min(start + height, last))
            rows = buffer[: part.stop - start]
            rows.copy_(torch.from_numpy(self.rows[part]))
            yield rows, part


def repeatable_exp(values: Floats) -> Floats:
    """Compute exp(x) for x <= 0 to about 2 units in the last place, by additions and multiplications alone.

    Library exponentials may round differently at the end of an array. This function does not depend on a number's
    place.

    Parameters
    ----------
    values : array
        Numbers from 0 down.

    Returns
    -------
    array
        Their exponentials.

    Examples
    --------
    >>> float(abs(repeatable_exp(np.array([-1.0])) - math.exp(-1.0))[0]) < 1e-15
    True
    """
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
    """Compute the softmax of every column; a column's result does not depend on the other columns.

    Parameters
    ----------
    logits : array of shape (classes, records)
        The logits.

    Returns
    -------
    array of shape (classes, records)
        Probabilities.
    """
    if len(logits) == 2:
        # The larger one has exp(0) = 1: one exponential per column is enough.
        smaller = repeatable_exp(-np.abs(logits[0] - logits[1]))
        weights = np.where(logits >= logits[::-1], 1.0, smaller)
    else:
        weights = repeatable_exp(logits - logits.max(axis=0))
    total = weights[0].copy()
    for weight in weights[1:]:
        total += weight
    shares: Floats = weights / total
    return shares


def weights_on_grid(weights: Floats) -> Floats:
    """Round weights to a grid coarse enough that every logit of a row on the grid is exact in float64.

    A logit's partial sums are at most `||W_c||`, in multiples of 2^-20 times the grid: at most 2^53 of them.

    Parameters
    ----------
    weights : array of shape (classes, features)
        The weights.

    Returns
    -------
    array of shape (classes, features)
        The rounded weights.
    """
    longest = math.sqrt(float(np.square(weights).sum(axis=1).max()))
    bits = _MANTISSA - BITS - 1 - max(0, math.frexp(longest)[1])
    unit = 2.0 ** min(bits, 40)
    grid: Floats = np.rint(weights * unit)
    return grid / unit


def residuals(weights: torch.Tensor, rows: torch.Tensor, labels: Labels) -> Floats:
    """Compute `p - e_y` of every row.

    Parameters
    ----------
    weights : tensor of shape (classes, features)
        Weights from `weights_on_grid`.
    rows : tensor of shape (records, features)
        Rows on the grid.
    labels : array of shape (records,)
        Class indices y.

    Returns
    -------
    array of shape (classes, records)
        The residuals.
    """
    errors = probabilities((weights @ rows.T).numpy())
    errors[labels, np.arange(len(labels))] -= 1.0
    return errors


def clipped_residuals(
    errors: Floats, lengths: Floats, max_grad_norm: float, shares: Floats | None = None
) -> Floats:
    """Compute `(1/k) (p - e_y) * min(1, S / (||p - e_y|| ||f||))` on the grid.

    Then `||(1/k) (p - e_y) f^T|| <= S/k`, and the k rows of one person together contribute at most S.

    Parameters
    ----------
    errors : array of shape (classes, records)
        The residuals `p - e_y`.
    lengths : array of shape (records,)
        The lengths of the rows f.
    max_grad_norm : float
        S.
    shares : array of shape (records,), optional
        1/k of every row; None if all are 1.

    Returns
    -------
    array of shape (classes, records)
        The clipped residuals.
    """
    squares = np.zeros(errors.shape[1])
    for error in errors:
        squares += error * error
    norms = np.sqrt(squares) * lengths
    factors = max_grad_norm * _SHORTENED / np.maximum(norms, max_grad_norm * _SHORTENED)
    if shares is not None:
        factors *= shares
    return on_grid(errors * factors)


def gradient_sum(table: Table, weights: Floats, max_grad_norm: float) -> Floats:
    """Compute `sum_i (1/k_i) clip_S((p_i - e_{y_i}) f_i^T)` without rounding, then round it to multiples of `GRID`.

    One record, or all rows of one person, change it by at most `certified.head_gradient(S, coordinates=C*d, grid=GRID)`
    in L2.

    Parameters
    ----------
    table : Table
        The records.
    weights : array of shape (classes, features)
        The current weights.
    max_grad_norm : float
        S, the per-record gradient clipping norm.

    Returns
    -------
    array of shape (classes, features)
        The sum.
    """
    grid_weights = torch.from_numpy(weights_on_grid(weights))
    lengths, shares, pieces = table.lengths, table.shares, table.pieces

    def piece_sum(number: int) -> NDArray[np.int64]:
        total = np.zeros((table.classes, table.features), dtype=np.int64)
        for rows, part in table.blocks(pieces[number]):
            errors = clipped_residuals(
                residuals(grid_weights, rows, table.labels[part]),
                lengths[part],
                max_grad_norm,
                None if shares is None else shares[part],
            )
            total += np.ldexp((torch.from_numpy(errors) @ rows).numpy(), 2 * BITS).astype(np.int64)
        return total

    sums = parallel_map(piece_sum, len(pieces))
    return _released(np.add.reduce(sums), 2 * BITS)


def row_sum(rows: NDArray[np.float32], repeats: Labels | None = None) -> Floats:
    """Sum rows on the grid without rounding; where a person has k rows, each of them divided by k and rounded.

    One record, or all rows of one person, change the sum by at most 1 in L2.

    Parameters
    ----------
    rows : array of shape (records, features)
        Rows on the grid, of length at most 1.
    repeats : array of shape (records,), optional
        k of every row; None if all are 1.

    Returns
    -------
    array of shape (features,)
        The exact sum.
    """
    total = np.zeros(rows.shape[1], dtype=np.int64)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[start : start + ROWS_AT_ONCE].astype(np.float64)
        if repeats is not None:
            part = on_grid(part / repeats[start : start + ROWS_AT_ONCE, None])
        total += np.ldexp(part.sum(axis=0), BITS).astype(np.int64)
    return np.ldexp(total.astype(np.float64), -BITS)


def moment_sum(table: Table) -> Floats:
    """Compute the second moments `sum_i h_i h_i^T` without rounding, then round them to multiples of `MOMENTS_GRID`.

    h is a row, times `1/sqrt(k)` on the grid where a person has k rows. So one record, or all rows of one person,
    change the sum by a matrix of Frobenius norm at most 1, plus one grid step per entry.

    Parameters
    ----------
    table : Table
        The records.

    Returns
    -------
    array of shape (features, features)
        The symmetric matrix.
    """
    roots = None if table.repeats is None else np.sqrt(1.0 / table.repeats)
    pieces = table.pieces

    def piece_sum(number: int) -> NDArray[np.int64]:
        total = np.zeros((table.features, table.features), dtype=np.int64)
        for rows, part in table.blocks(pieces[number]):
            scaled = rows if roots is None else torch.from_numpy(on_grid(rows.numpy() * roots[part, None]))
            total += np.ldexp((scaled.T @ scaled).numpy(), 2 * BITS).astype(np.int64)
        return total

    return _released(np.add.reduce(parallel_map(piece_sum, len(pieces))), 2 * BITS, MOMENTS_GRID)


def _released(total: NDArray[np.int64], bits: int, grid: float = GRID) -> Floats:
    """Round integers in units of 2^-bits to multiples of a grid: at most 2^53 of them, so exact in float64."""
    drop = bits + round(math.log2(grid))
    rounded = (total + (1 << (drop - 1))) >> drop
    return np.ldexp(rounded.astype(np.float64), drop - bits)
