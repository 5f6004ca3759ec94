"""Queries from a file: records without labels, as features of a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quietmax.data.columns import as_numbers
from quietmax.data.encoding import Encoding
from quietmax.data.tables import read_table
from quietmax.errors import DataUnavailable, InvalidInput


def read_queries(path: str | Path, *, encoding: Encoding | None, width: int) -> NDArray[np.float32]:
    """Read a CSV, TSV, Parquet or NPZ file as queries of ``width`` features.

    With an ``encoding`` (a model trained on a table) the columns are those of the training table; the label
    column may be missing. Without one, the file has exactly ``width`` columns of numbers, already scaled as
    in training.
    """
    frame = read_table(path).frame
    if encoding is not None:
        if len(encoding.feature_names) != width:
            raise DataUnavailable(
                f"The encoding makes {len(encoding.feature_names)} features, but the model takes {width}; train it "
                "again or restore a copy of its folder."
            )
        return encoding.encode(frame)
    if frame.shape[1] != width:
        raise InvalidInput(
            f"The file {path} has {frame.shape[1]} columns, but the model takes {width} features; "
            "give one column per feature and no label."
        )
    numbers = [as_numbers(frame[name], str(name)) for name in frame.columns]
    features = np.stack(numbers, axis=1).astype(np.float32)
    if not np.isfinite(features).all():
        row, column = np.argwhere(~np.isfinite(features))[0]
        raise InvalidInput(
            f"Record {row + 1} of {path} has no finite number in column '{frame.columns[column]}'; correct "
            "that record."
        )
    return np.ascontiguousarray(features)
