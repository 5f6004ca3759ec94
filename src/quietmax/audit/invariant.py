"""Check on this machine that no record changes what is computed from another record (the invariant of THEORY 3.8).

Synthetic records are encoded, mapped, trained on and summed several times, with records removed, added, repeated and
reordered, at several memory alignments and with 1 and 2 threads. All other records must keep their numbers, bit for
bit. No difference is evidence for this machine and these library versions; it is no proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from quietmax.audit.bounds import Verdict
from quietmax.data.encoding import Encoding
from quietmax.errors import InvalidInput
from quietmax.estimators.blocks import Table
from quietmax.estimators.dpsgd.gradients import exact_clipped_sum
from quietmax.estimators.head.estimator import _with_cells
from quietmax.estimators.head.exact_sums import clipped_rows, gradient_sum
from quietmax.estimators.head.tables import ROWS_AT_ONCE as CELL_ROWS_AT_ONCE
from quietmax.estimators.head.tables import Basis, _Residuals, cell_scores, with_lengths
from quietmax.estimators.head.weights import _Excess, even_shares
from quietmax.estimators.serialization import PrivateModel
from quietmax.estimators.teachers import TeacherEnsemble
from quietmax.models.features.base import FeatureMap, bits
from quietmax.models.features.tabular import TableCells
from quietmax.models.stacked import MLP, CrossEntropy, TrainingSettings, initial_mlp, train_independent
from quietmax.predictor import Predictor

Rows = NDArray[np.intp]
THREADS = (1, 2)
ALIGNMENTS = (0, 1, 3, 8)
"""Distances of a table's first number from a 64-byte boundary, in numbers."""
_ALONE = 4
_NETWORK_RECORDS = 8
_NETWORK_STEPS = 3


@dataclass(frozen=True)
class InvariantCheck:
    """One part of what happens to a record before the noise."""

    part: str
    comparisons: int  # Number of records, networks or sums that were compared
    broken: str | None = None  # The first difference in words; None if there was none

    @property
    def verdict(self) -> str:
        """``refuted`` if something differed."""
        return "consistent" if self.broken is None else "refuted"


@dataclass(frozen=True)
class InvariantReport:
    """The result of an invariant audit."""

    subject: str
    records: int  # Number of synthetic records
    checks: tuple[InvariantCheck, ...]  # One per part that the subject has

    @property
    def broken(self) -> str | None:
        """The first difference in words; None if there was none."""
        return next((check.broken for check in self.checks if check.broken is not None), None)

    @property
    def verdict(self) -> Verdict:
        """`refuted` if a record changed what was computed from another one, else `consistent`."""
        return "consistent" if self.broken is None else "refuted"

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name, as JSON values."""
        return {
            "subject": self.subject,
            "verdict": self.verdict,
            "records": self.records,
            "threads": list(THREADS),
            "checks": [asdict(check) for check in self.checks],
        }


def audit_invariant(
    features: FeatureMap | None,
    columns: int,
    *,
    encoding: Encoding | None = None,
    networks: MLP | None = None,
    classes: int | None = None,
    records: int = 200,
    seed: int = 0,
    subject: str = "feature map",
) -> InvariantReport:
    """Check on synthetic records a feature map and what comes before and after it.

    Parameters
    ----------
    features : FeatureMap or None
        The feature map; it may be a class of the user's own.
    columns : int
        Number of columns of a record before the map.
    encoding : Encoding or None
        Also check how rows of a table are encoded.
    networks : MLP or None
        Also check that training a stack of this shape keeps its networks independent (teachers).
    classes : int or None
        Also check the sums that a head or DP-SGD with this many classes adds noise to.
    records : int
        Number of synthetic records, at least 3.
    seed : int
        Determines the synthetic records.
    subject : str
        Name for the report.

    Returns
    -------
    InvariantReport
        One check per part.

    Examples
    --------
    >>> from quietmax.models.features import UnitNorm
    >>> audit_invariant(UnitNorm(), 5).verdict
    'consistent'
    """
    if records < 3:
        raise InvalidInput(f"records must be at least 3, got {records}.")
    table = _synthetic_records(records, columns, seed)
    width = columns if features is None else features.dimension(columns)
    checks = []
    if encoding is not None:
        checks.append(_check_encoding(encoding, records, seed))
    if features is not None:
        checks.append(_check_features(features, table, seed))
    if networks is not None:
        checks.append(_check_networks(networks, seed))
    if isinstance(features, TableCells) and classes is not None:
        checks.append(_check_sums(_sums_of_cells(features, table, classes, seed), records, seed))
    elif classes is not None:
        checks.append(_check_sums(_sums_of_rows(records, width, classes, seed), records, seed))
    return InvariantReport(subject, records, tuple(checks))


def audit_model_invariant(model: PrivateModel, *, records: int = 200, seed: int = 0) -> InvariantReport:
    """Check everything that happens to a record of a private model before the noise."""
    stack = None
    if isinstance(model.classifier, Predictor) and isinstance(model.classifier.model, TeacherEnsemble):
        stack = model.classifier.model.teachers
    return audit_invariant(
        model.features,
        model.inputs,
        encoding=model.encoding,
        networks=stack if isinstance(stack, MLP) else None,
        classes=None if stack is not None else len(model.classes),
        records=records,
        seed=seed,
        subject=model.kind,
    )


def _check_encoding(encoding: Encoding, records: int, seed: int) -> InvariantCheck:
    """Encode rows of a synthetic table, with other rows changing."""
    table = _synthetic_table(encoding, records, seed)

    def _encode(rows: Rows, alignment: int) -> NDArray[np.float32]:  # noqa: ARG001
        return encoding.encode(table.iloc[rows].reset_index(drop=True))

    return _compare_rows("encoding", _encode, records, records, seed)


def _check_features(features: FeatureMap, table: NDArray[np.float32], seed: int) -> InvariantCheck:
    """Map synthetic records, with other records changing."""
    extreme = _extreme_records(table)

    def _transform(rows: Rows, alignment: int) -> NDArray[np.float32]:
        return features.transform(_aligned(np.concatenate([table, extreme])[rows], alignment))

    return _compare_rows("features", _transform, len(table), len(table) + len(extreme), seed)


def _compare_rows(
    part: str, compute: Callable[[Rows, int], NDArray[np.float32]], records: int, available: int, seed: int
) -> InvariantCheck:
    """Compute all rows once on one thread, then again with other rows beside them."""
    with _threads(1):
        expected = compute(np.arange(available), 0)
    compared = 0
    for threads in THREADS:
        for number, (circumstance, rows) in enumerate(_circumstances(records, available, seed)):
            alignment = ALIGNMENTS[number % len(ALIGNMENTS)]
            with _threads(threads):
                found = compute(rows, alignment)
            changed = (bits(found) != bits(expected[rows])).any(axis=1)
            compared += len(rows)
            if changed.any():
                with np.errstate(invalid="ignore"):
                    largest = float(np.nanmax(np.abs(found - expected[rows]), initial=0.0))
                broken = (
                    f"{part} of {int(changed.sum())} of {len(rows)} synthetic records changed, by up to "
                    f"{largest:.1e}, {circumstance} (threads: {threads}, alignment: {alignment})"
                )
                return InvariantCheck(part, compared, broken)
    return InvariantCheck(part, compared)


def _circumstances(records: int, available: int, seed: int) -> Iterator[tuple[str, Rows]]:
    """Yield the ways in which other records change, in words and as the rows that are computed together.

    Rows from ``records`` on are extreme ones; they are only used beside the others.
    """
    everyone = np.arange(records)
    generator = np.random.default_rng((seed, 1))
    yield "when nothing else changed", everyone
    for removed in (0, records // 2, records - 1):
        yield f"when record {removed + 1} was removed", np.delete(everyone, removed)
    yield "when a record was added in front", np.concatenate([[records - 1], everyone])
    yield "when the records were in reverse order", everyone[::-1]
    yield "when the records were in random order", generator.permutation(records)
    yield "when every record was repeated", np.repeat(everyone, 2)
    yield "when all records were copies of one", np.zeros(records, np.intp)
    if available > records:
        others = records + np.arange(records) % (available - records)
        yield "beside extreme records", np.stack([everyone, others], axis=1).ravel()
    for record in generator.choice(records, min(_ALONE, records), replace=False):
        yield f"when record {record + 1} was alone", np.array([record])


def _check_networks(stack: MLP, seed: int) -> InvariantCheck:
    """Train the stack on synthetic shards, change records of one shard, and compare the other networks."""
    count, (columns, *hidden, classes) = stack.networks, stack.widths
    table = _synthetic_records(count * _NETWORK_RECORDS, columns, seed)
    labels = np.arange(len(table)) % classes
    shards = np.arange(len(table)) % count
    settings = TrainingSettings(
        tuple(hidden), stack.activation, CrossEntropy(), learning_rate=0.01, batch_size=50
    )

    def _weights(kept: Rows, records: NDArray[np.float32]) -> NDArray[np.float32]:
        rows = [np.flatnonzero(shards[kept] == shard) for shard in range(count)]
        trained = train_independent(
            records[kept],
            labels[kept],
            classes,
            rows,
            settings=settings,
            seeds=range(count),
            steps=_NETWORK_STEPS,
        )
        return trained.weight_vectors().numpy()

    everyone = np.arange(len(table))
    extreme = table.copy()
    extreme[0] = 2.0**60
    ways = (
        ("when nothing changed", everyone, table),
        ("when a record of the first was removed", everyone[1:], table),
        ("when the first had no records", everyone[shards > 0], table),
        ("when a record of the first was extreme", everyone, extreme),
    )
    compared = 0
    for threads in THREADS:
        with _threads(threads):
            expected = _weights(everyone, table)
            for words, kept, records in ways:
                changed = (bits(_weights(kept, records)) != bits(expected))[1:].any(axis=1)
                compared += len(changed)
                if changed.any():
                    broken = f"{int(changed.sum())} of {count - 1} other networks changed {words} (threads: {threads})"
                    return InvariantCheck("networks", compared, broken)
    return InvariantCheck("networks", compared)


_Sums = Callable[[Rows], tuple[NDArray[Any], ...]]
"""Returns the sums that get noise, of records in some order."""


def _sums_of_rows(records: int, width: int, classes: int, seed: int) -> _Sums:
    """Return the clipped sums of a head and of DP-SGD."""
    rows = clipped_rows(_synthetic_records(records, width, seed), np.sqrt(width)).astype(np.float32)
    labels = np.arange(records) % classes
    repeats = np.arange(records) % 5 + 1  # what rows of persons with 1 to 5 rows weigh
    weights = np.random.default_rng((seed, 2)).normal(size=(classes, width))
    network = initial_mlp((width, 16, classes), "tanh", (seed,), torch.float64)

    def _sums(order: Rows) -> tuple[NDArray[np.float64], ...]:
        inputs, targets = torch.from_numpy(rows[order]), torch.from_numpy(labels[order])
        clipped = exact_clipped_sum(network, inputs, targets, 0.5)
        gradients = (
            gradient_sum(Table(rows[order], labels[order], classes, rows_of_person), weights, 0.5)
            for rows_of_person in (None, repeats[order])
        )
        return *gradients, *(tensor.numpy() for tensor in clipped.tensors())

    return _sums


def _sums_of_cells(cells: TableCells, table: NDArray[np.float32], classes: int, seed: int) -> _Sums:
    """Return the clipped sum of a head on cells, and the sum by which it is calibrated."""
    labels, repeats = np.arange(len(table)) % classes, np.arange(len(table)) % 5 + 1
    basis = Basis.of(cells, even_shares(cells.sizes), 0.01, 100.0)
    weights = np.random.default_rng((seed, 2)).normal(size=(classes, basis.features))
    residuals = _Residuals(cells.sizes, basis.scores(weights[1:] if classes == 2 else weights), 0.5)
    excess = _Excess(partial(cell_scores, basis.scores(weights), cells.sizes), 0.7, CELL_ROWS_AT_ONCE)

    def _sums(order: Rows) -> tuple[NDArray[Any], ...]:
        plain = Table(table[order], labels[order], classes, repeats[order])
        measured = with_lengths(basis, cells.sizes, _with_cells(cells, plain))
        return measured.sum(residuals), np.array(measured.sum(excess))

    return _sums


def _check_sums(sums: _Sums, records: int, seed: int) -> InvariantCheck:
    """Check that the sums that get noise do not depend on the order of the records."""
    compared = 0
    expected = sums(np.arange(records))
    for threads in THREADS:
        for _, order in _circumstances(records, records, seed):
            if len(order) != records or len(np.unique(order)) != records:
                continue
            with _threads(threads):
                found = sums(order)
            compared += len(found)
            if not all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True)):
                broken = f"sums changed with the order of the records (threads: {threads})"
                return InvariantCheck("sums", compared, broken)
    return InvariantCheck("sums", compared)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _aligned(values: NDArray[np.float32], alignment: int) -> NDArray[np.float32]:
    """Return a copy whose memory starts ``alignment`` numbers after a multiple of 64 bytes."""
    memory = np.zeros(values.nbytes + 64 + 4 * alignment, np.uint8)
    start = -memory.ctypes.data % 64 + 4 * alignment
    copy = memory[start : start + values.nbytes].view(np.float32).reshape(values.shape)
    copy[:] = values
    return copy


def _synthetic_records(records: int, columns: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng((seed, 0)).random((records, columns), np.float32)


def _extreme_records(table: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return records that a library may treat differently: zeros, very large, very small and negative numbers."""
    powers = np.array([[0.0], [2.0**60], [2.0**-70], [-(2.0**20)]], np.float32)
    return np.resize(table, (len(powers), table.shape[1])) * powers


def _synthetic_table(encoding: Encoding, records: int, seed: int) -> pd.DataFrame:
    """Return strings as in a CSV file: values inside and outside the declared ones, and missing ones."""
    generator = np.random.default_rng((seed, 3))
    columns = {}
    for column in encoding.columns:
        cells = column._synthetic(records, generator)
        absent = generator.random(records) < 0.05 * column.missing
        columns[column.name] = [None if gone else text for gone, text in zip(absent, cells, strict=True)]
    return pd.DataFrame(columns, dtype="string")
