"""How the columns of a table become features and its label column becomes class numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from quietmax.data.columns import CategoricalColumn, Column, NumericColumn, as_texts, each, is_missing
from quietmax.errors import InvalidInput

_FORMAT = "quietmax encoding 1"


@dataclass(frozen=True)
class Encoding:
    """Public description of a table: its columns in order, its label column, its class names.

    `measurements` names everything in it that was read off the records instead of given; a guarantee for a
    model that uses such an encoding holds only if these things are public after all.

    >>> encoding = Encoding((NumericColumn("age", 0, 100, missing=False),), "ill", ("no", "yes"))
    >>> encoding.encode(pd.DataFrame({"age": [25, 250]}))
    array([[0.25],
           [1.  ]], dtype=float32)
    """

    columns: tuple[Column, ...]
    label: str
    classes: tuple[str, ...]
    measurements: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [*(column.name for column in self.columns), self.label]
        if not self.columns or len(set(names)) < len(names):
            raise InvalidInput(
                "An encoding needs at least one column besides the label and different names for all of "
                "them; correct the columns."
            )
        if len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise InvalidInput(
                f"The label '{self.label}' needs at least two classes with different names, but "
                f"{len(self.classes)} given name(s) do not make that; correct the classes."
            )

    @property
    def measured(self) -> bool:
        """Whether anything in the encoding was read off the records."""
        return bool(self.measurements)

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """Name of every feature, in order."""
        return tuple(name for column in self.columns for name in column.feature_names)

    @overload
    def encode(self, table: pd.DataFrame, label: None = None) -> NDArray[np.float32]: ...

    @overload
    def encode(self, table: pd.DataFrame, label: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]: ...

    def encode(
        self, table: pd.DataFrame, label: str | None = None
    ) -> NDArray[np.float32] | tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the features of the table's rows and, if the label column is named, the class numbers.

        Columns that the encoding does not know are left aside.
        """
        require_columns(table, [column.name for column in self.columns])
        named = _with_text_names(table)
        features = np.zeros((len(table), len(self.feature_names)), dtype=np.float32)
        start = 0
        for column in self.columns:
            end = start + len(column.feature_names)
            column.encode(named[column.name], features[:, start:end])
            start = end
        return features if label is None else (features, self.encode_labels(table, label))

    def encode_labels(self, table: pd.DataFrame, label: str | None = None) -> NDArray[np.int64]:
        """Return the class number of every row, read from the label column."""
        name = self.label if label is None else label
        require_columns(table, [name])
        texts = as_texts(_with_text_names(table)[name])
        numbers = {name: number for number, name in enumerate(self.classes)}
        labels = each(texts, lambda text: numbers.get(text, -1), np.int64)
        wrong = np.flatnonzero(labels < 0)
        if wrong.size:
            kind = "no label" if is_missing(texts[wrong[:1]])[0] else "a label outside the declared classes"
            raise InvalidInput(
                f"Record {wrong[0] + 1} has {kind} in column '{name}' (and {wrong.size - 1} more have a "
                f"wrong one or none), but the classes are {_listed(self.classes)}; correct the label or "
                "declare its class."
            )
        return labels

    def to_json(self) -> str:
        """Return the encoding as JSON text."""
        columns = [{"type": _TYPES[type(column)], **asdict(column)} for column in self.columns]
        content = {
            "format": _FORMAT,
            "columns": columns,
            "label": self.label,
            "classes": self.classes,
            "measurements": self.measurements,
        }
        return json.dumps(content, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Encoding:
        """Return the encoding that `to_json` wrote."""
        try:
            content = json.loads(text)
            if content["format"] != _FORMAT:
                raise ValueError
            return cls(
                columns=tuple(_column(entry) for entry in content["columns"]),
                label=content["label"],
                classes=tuple(content["classes"]),
                measurements=tuple(content["measurements"]),
            )
        except InvalidInput:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(
                f"This is not the description of an encoding in the form '{_FORMAT}'; give the text that "
                "Encoding.to_json wrote."
            ) from error


_TYPES: dict[type[Column], str] = {NumericColumn: "numeric", CategoricalColumn: "categorical"}


def _column(entry: Mapping[str, Any]) -> Column:
    fields = dict(entry)
    kind = fields.pop("type")
    if kind == "numeric":
        return NumericColumn(**{**fields, "edges": tuple(fields["edges"])})
    if kind == "categorical":
        return CategoricalColumn(**{**fields, "categories": tuple(fields["categories"])})
    raise ValueError


def require_columns(table: pd.DataFrame, names: list[str]) -> None:
    """Refuse a table that lacks one of the named columns or has several columns of one name."""
    present = [str(column) for column in table.columns]
    distinct = set(present)
    repeated = (
        sorted(name for name in distinct if present.count(name) > 1) if len(distinct) < len(present) else []
    )
    if repeated:
        raise InvalidInput(
            f"The table has several columns named {_listed(repeated)}, but every column needs its own name; "
            "rename them."
        )
    absent = [name for name in names if name not in distinct]
    if absent:
        raise InvalidInput(
            f"The table has no column {_listed(absent)}, its columns are {_listed(present)}; correct the "
            "name, add the column, or separate columns by commas."
        )


def _with_text_names(table: pd.DataFrame) -> pd.DataFrame:
    return table.set_axis([str(name) for name in table.columns], axis=1)


def _listed(names: list[str] | tuple[str, ...], limit: int = 30) -> str:
    """Return names in quotes, separated by commas; of many only the first."""
    shown = ", ".join(f"'{name}'" for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
