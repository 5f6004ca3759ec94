"""Rows of a training set by their numbers, of which DP-SGD takes samples.

The rows are in blocks, in memory or on disk (`blocks`). For every row only its label stays in memory, in one byte if
there are at most 128 classes; and if there are persons, the number of its person and the number of their rows, in 4
bytes each. A step also needs one byte per record or person, which says whether it is in the sample.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quietmax.errors import InvalidData, InvalidInput
from quietmax.estimators.blocks import (
    FILES_IN_MEMORY,
    Blocks,
    LocalEngine,
    Table,
    block_rows,
    person_digests,
)
from quietmax.estimators.training_set import NOBODY, Persons, TrainingRows
from quietmax.models.features.base import FeatureMap


class NumberedPersons(Persons):
    """Whom each row belongs to, without the names."""

    def __init__(self, digests: NDArray[np.bytes_]) -> None:
        super().__init__(np.empty(0, object))
        _, first, places = np.unique(digests, return_index=True, return_inverse=True)
        numbers = np.empty(len(first), np.int32 if len(first) < 2**31 else np.int64)
        # In the order in which the persons come, so that the digests themselves do not matter.
        numbers[np.argsort(first)] = np.arange(len(first))
        codes = numbers[places]
        rows = np.bincount(codes).astype(np.int32 if len(codes) < 2**31 else np.int64)[codes]
        self.__dict__.update(codes=codes, rows=rows, count=len(first))


class StoredRows:
    """The rows of a training set, which are read by their numbers."""

    def __init__(self, data: TrainingRows, engine: LocalEngine | Literal["local"] = "local") -> None:
        kept = LocalEngine() if engine == "local" else engine
        if not isinstance(kept, LocalEngine):
            raise InvalidInput("DP-SGD is trained in this process: engine must be 'local' or a LocalEngine.")
        key = secrets.token_bytes(16)
        classes = len(data.classes)
        compact = np.int8 if classes <= 2**7 else np.int32
        labels: list[NDArray[np.signedinteger[Any]]] = []
        digests: list[NDArray[np.bytes_]] = []

        def tables() -> Iterator[Table]:
            for piece in data.pieces:
                labels.append(piece.labels.astype(compact))
                if piece.persons is not None:
                    digests.append(person_digests(piece.persons, key))
                yield Table(piece.records, piece.labels, classes)

        self._blocks = Blocks(classes, kept, None if data.in_memory else FILES_IN_MEMORY)
        try:
            self._blocks.reserve(data.count, data.columns)
            self._blocks.extend(tables())
            if not len(self._blocks):
                raise InvalidData(NOBODY)
        except BaseException:
            self.close()
            raise
        self.labels = labels[0] if len(labels) == 1 else np.concatenate(labels)
        self.persons = NumberedPersons(np.concatenate(digests)) if data.unit == "person" else None

    def __enter__(self) -> StoredRows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop all rows, and remove what is on disk."""
        self._blocks.close()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self._blocks), self._blocks.features

    @property
    def units(self) -> int:
        """The number of persons, or of rows if there are no persons."""
        return len(self) if self.persons is None else self.persons.count

    def __getitem__(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the rows with these numbers, in this order."""
        return self._blocks.rows_at(numbers)

    def update(
        self,
        function: Callable[[NDArray[np.float32]], NDArray[np.float32]],
        feature_map: object = None,
        *,
        finite: bool = True,
    ) -> None:
        """Replace the rows by what a function makes of them, block by block."""

        def changed(block: Table) -> Iterator[Table]:
            columns = block.features
            if isinstance(feature_map, FeatureMap):
                columns = feature_map.dimension(columns)
            for piece in block.pieces(-(-len(block) // block_rows(columns))):
                table = replace(piece, rows=function(piece.rows))
                if finite and not np.isfinite(table.rows).all():
                    raise InvalidInput("Features must be finite, but a record holds NaN or infinity.")
                yield from table.pieces(-(-len(table) // block_rows(table.features)))

        if isinstance(feature_map, FeatureMap):
            self._blocks.reserve(len(self), feature_map.dimension(self._blocks.features))
        self._blocks.update(changed)

    def expect(self, passes: float) -> None:
        """Announce how often every row will still be read or replaced, for the time left."""
        self._blocks.expect(max(1, round(passes)))
