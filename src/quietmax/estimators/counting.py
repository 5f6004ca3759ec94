"""What an evaluation counts: each answered row as its cells of the tables that `figures` describes.

The cells of a row follow from that row and from public settings alone, and each row is answered on its own, in calls of
equal shape (THEORY 3.8). What one person adds to a table has no negative entry and a sum of at most 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quietmax.data.encoding import BooleanColumn, CategoricalColumn, Column, Encoding, NumericColumn, quoted
from quietmax.errors import InvalidInput
from quietmax.estimators.decisions import NOT_TOO_CLOSE, Costs, decided, is_threshold, threshold_of
from quietmax.estimators.figures import BINS, Evaluation, GroupCounts, edges_with, nested_tuples, sensitivity

Counts = NDArray[np.int64]
By = str | tuple[str, Sequence[float]]
"""The column of the groups; of a column of numbers also the numbers that divide it."""

SHARE = 2**24
"""A person's rows share this many units; sums of units below 2^53 are exact in float64."""
_NO_GROUP = "missing or other"


@dataclass(frozen=True)
class GroupsOf:
    """Groups of people by one declared column."""

    column: str
    names: tuple[str, ...]  # The last one is for values that are missing or not declared
    start: int  # The first feature of the column
    width: int  # The number of its features, without that of a missing value
    cuts: tuple[float, ...] | None  # Of a column with one feature: the least feature of each group
    missing: bool  # Whether a missing value has a feature

    @classmethod
    def of(cls, by: By, encoding: Encoding | None) -> GroupsOf:
        """Find the groups of a column of the schema."""
        if encoding is None:
            raise InvalidInput("`by` requires a model that was trained on a table with a schema.")
        name, ends = (by, ()) if isinstance(by, str) else (by[0], tuple(sorted(map(float, by[1]))))
        columns = {column.name: column for column in encoding.columns}
        if name not in columns:
            raise InvalidInput(
                f"`by` must be a column of the schema, got {name!r}; the columns are {quoted([*columns])}."
            )
        names, cuts = _groups_of(columns[name], ends)
        before = itertools.takewhile(lambda column: column.name != name, encoding.columns)
        start = sum(len(column.feature_names) for column in before)
        column = columns[name]
        width = len(column.feature_names) - column.missing
        return cls(name, (*names, _NO_GROUP), start, width, cuts, column.missing)

    def numbers(self, records: NDArray[np.float32]) -> Counts:
        """Return the number of the group of each encoded row."""
        cells = records[:, self.start : self.start + self.width]
        if self.cuts is None:
            found = np.where(cells.any(1), cells.argmax(1), -1)
        else:
            found = np.searchsorted(np.array(self.cuts, np.float32), cells[:, 0], side="right") - 1
            if self.missing:
                found[records[:, self.start + self.width] > 0] = -1
        return np.where(found < 0, len(self.names) - 1, found)


def _groups_of(column: Column, ends: tuple[float, ...]) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """Return the names of the groups of a column, and of a column with one feature the least feature of each."""
    if isinstance(column, BooleanColumn | CategoricalColumn) and not ends:
        names = ("no", "yes") if isinstance(column, BooleanColumn) else column.categories
        codes = (np.arange(len(names)) + 0.5) / len(names)
        return names, tuple(codes.tolist()) if column.is_share else None
    if not isinstance(column, NumericColumn) or bool(column.edges) == bool(ends):
        raise InvalidInput(
            "`by` must be a column of categories, of yes and no or of numbers with declared bins, or one of other "
            f"numbers together with the numbers that divide it, as in age=30,50; got {column.name!r}"
            f"{' with numbers' if ends else ''}."
        )
    given = column.edges or ends
    if not all(column.low < end <= column.high for end in given) or len({*given}) < len(given):
        raise InvalidInput(
            f"The numbers that divide {column.name!r} must be different, above {column.low:g} and at most "
            f"{column.high:g}, got {', '.join(f'{end:g}' for end in given)}."
        )
    between = (f"{low:g} to {high:g}" for low, high in itertools.pairwise(given))
    names = (f"below {given[0]:g}", *between, f"{given[-1]:g} and above")
    return names, None if column.edges else (-math.inf, *column._code(np.array(given)).tolist())


@dataclass(frozen=True)
class Tables:
    """The tables that an evaluation counts."""

    classes: tuple[str, ...]
    costs: Costs | None = None  # How the model answers
    at: tuple[float, ...] = ()  # Thresholds that the owner named
    groups: GroupsOf | None = None

    def __post_init__(self) -> None:
        if self.at and len(self.classes) != 2:
            raise InvalidInput(f"`at` requires a model of two classes; this one has {len(self.classes)}.")
        if not all(map(is_threshold, self.at)):
            raise InvalidInput(
                f"Every threshold of `at` must be between 0 and 1, got {', '.join(f'{each:g}' for each in self.at)}"
                f"{NOT_TOO_CLOSE}."
            )

    @cached_property
    def edges(self) -> tuple[float, ...] | None:
        """The edges of the bins of the score, for two classes."""
        return edges_with([*self.at, threshold_of(self.costs)]) if len(self.classes) == 2 else None

    @property
    def sensitivity(self) -> float:
        """How far one person moves all counts together."""
        return sensitivity(2 if self.groups is None else 3)

    def answers(self, classifier: Any, feature_map: Any, records: NDArray[np.float32]) -> NDArray[np.int32]:
        """Answer encoded rows: the predicted class, the bin, the group and the mass of each, in units of 2^-24."""
        probabilities = _probabilities(classifier, feature_map, records, len(self.classes))
        predicted = decided(probabilities, self.costs)
        if self.edges is None:
            mass = np.take_along_axis(probabilities, predicted[:, None], 1)[:, 0]
            scaled = (mass - 1 / len(self.classes)) / (1 - 1 / len(self.classes)) * BINS
            bins = np.clip(np.floor(scaled), 0, BINS - 1)
        else:
            mass = probabilities[:, 1]
            bins = np.searchsorted(self.edges[1:-1], mass)
        group = np.zeros(len(mass)) if self.groups is None else self.groups.numbers(records)
        units = np.clip(np.rint(mass * SHARE), 0, SHARE)
        return np.stack([predicted, bins, group, units], 1).astype(np.int32)

    def count(self, labels: Counts, answers: NDArray[np.int32], rows_of_person: Counts | None) -> Counts:
        """Count answers in units of 2^-24 people, one table after the other. The sums are exact."""
        predicted, bins, group, units = answers.astype(np.int64).T
        shares = np.full(len(labels), SHARE) if rows_of_person is None else SHARE // rows_of_person
        confusion, calibration, grouped = (np.zeros(math.prod(shape), np.int64) for shape in self._shapes)
        wrong = labels != predicted
        np.add.at(confusion, labels * len(self.classes) + predicted, shares)
        np.add.at(calibration, 2 * bins + (wrong if self.edges is None else labels == 0), shares)
        if self.groups is not None:
            cells = ((group * len(self.classes) + labels) * 2 + wrong) * 2
            high = shares * units // SHARE
            np.add.at(grouped, cells, shares - high)
            np.add.at(grouped, cells + 1, high)
        return np.concatenate([confusion, calibration, grouped])

    def evaluation(self, counts: NDArray[np.float64], **fields: Any) -> Evaluation:
        """Return the evaluation of what was counted, in people."""
        sizes = [math.prod(shape) for shape in self._shapes]
        parts = np.split(counts, np.cumsum(sizes)[:-1])
        confusion, calibration, grouped = (
            nested_tuples(part.reshape(shape).tolist())
            for part, shape in zip(parts, self._shapes, strict=True)
        )
        by_group = (
            None if self.groups is None else GroupCounts(self.groups.column, self.groups.names, grouped)
        )
        return Evaluation(
            classes=self.classes,
            confusion=confusion,
            calibration=calibration,
            edges=self.edges,
            at=self.at,
            costs=self.costs,
            by_group=by_group,
            **fields,
        )

    @property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tables."""
        classes, groups = len(self.classes), 0 if self.groups is None else len(self.groups.names)
        bins = BINS if self.edges is None else len(self.edges) - 1
        return (classes, classes), (bins, 2), (groups, classes, 2, 2)


def _probabilities(
    classifier: Any, feature_map: Any, records: NDArray[np.float32], classes: int
) -> NDArray[np.float64]:
    """Answer each row on its own, so that no other row changes its rounding."""
    features = records if feature_map is None else feature_map.transform(records)
    row = np.empty((1, features.shape[1]), dtype=np.float32)  # one place in memory for all rows
    probabilities = np.empty((len(features), classes))
    for number, values in enumerate(features):
        row[0] = values
        probabilities[number] = classifier.predict_proba(row)[0]
    # A network may overflow for some rows. What such a row adds must stay between 0 and 1.
    return np.clip(np.nan_to_num(probabilities, nan=0.0), 0.0, 1.0)
