"""How one column of a table becomes features, with public constants only.

Nothing here looks at more than the value it encodes: bounds, edges and categories are part of the column's
description and are chosen without the private records.  Every rule is total, so no value of a record can stop
the encoding except one that is not a number where a number is declared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from quietmax.errors import InvalidInput

MISSING_MARKERS = frozenset({"", "?", "NA", "N/A", "null", "NULL"})
"""Texts that stand for a missing value (besides an empty cell), unless they are declared as a category."""

_NUMBER = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
"""A number as text; 01 is a code, not a number."""

Scale = Literal["linear", "log"]
Style = Literal["one-hot", "codes"]


@dataclass(frozen=True)
class NumericColumn:
    """A column of numbers with public bounds.

    A value v is clipped to [low, high] and becomes `(v - low) / (high - low)`, with `scale="log"` `ln(1 + v -
    low) / ln(1 + high - low)`.  With `edges` it becomes one feature per interval instead, 1 for the interval
    that holds v (an edge belongs to the interval above it).  A missing value becomes the lower bound (no
    interval), and one more feature, present if `missing`, is 1 for it.
    """

    name: str
    low: float
    high: float
    scale: Scale = "linear"
    edges: tuple[float, ...] = ()
    missing: bool = True

    def __post_init__(self) -> None:
        if not (self.low < self.high and math.isfinite(self.high - self.low)):
            raise InvalidInput(
                f"The bounds of column '{self.name}' are {self.low} and {self.high}, but two finite numbers "
                "with the lower one first are needed; correct the bounds."
            )
        if self.scale not in get_args(Scale):
            raise InvalidInput(
                f"The scale of column '{self.name}' is {self.scale!r}, but it must be 'linear' or 'log'; "
                "give one of them."
            )
        if any(not self.low < edge <= self.high for edge in self.edges) or any(
            first >= second for first, second in zip(self.edges, self.edges[1:], strict=False)
        ):
            raise InvalidInput(
                f"The edges of column '{self.name}' must rise and lie between its bounds {self.low} and "
                f"{self.high}; correct the edges or the bounds."
            )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Name of every feature the column becomes."""
        if self.edges:
            starts = (self.low, *self.edges)
            names = tuple(f"{self.name}>={start:g}" for start in starts)
        else:
            names = (self.name,)
        return (*names, f"{self.name} missing") if self.missing else names

    def encode(self, values: pd.Series[Any], features: NDArray[np.float32]) -> None:
        """Write the features of all values into `features`: zeros, one column per feature name."""
        numbers, absent = _numbers(values, self.name)
        clipped = np.clip(np.where(absent, self.low, numbers), self.low, self.high)
        if self.edges:
            interval = np.searchsorted(self.edges, clipped, side="right")
            present = np.flatnonzero(~absent)
            features[present, interval[present]] = 1
        elif self.scale == "log":
            features[:, 0] = np.log1p(clipped - self.low) / math.log1p(self.high - self.low)
        else:
            features[:, 0] = (clipped - self.low) / (self.high - self.low)
        if self.missing:
            features[absent, -1] = 1


@dataclass(frozen=True)
class CategoricalColumn:
    """A column of k public categories.

    `one-hot`: one feature per category.  `codes`: one feature, `(i + 1) / k` for the i-th category (from 0).
    A value belongs to the category of the same text, else to the first that is the same number: 1, 1.0 and "1.00" are.
    A category that is not listed becomes all zeros, and so does a missing value, for which one more feature,
    present if `missing`, is 1.
    """

    name: str
    categories: tuple[str, ...]
    style: Style = "one-hot"
    missing: bool = True

    def __post_init__(self) -> None:
        named = all(isinstance(category, str) for category in self.categories)
        if not self.categories or not named or len(set(self.categories)) < len(self.categories):
            raise InvalidInput(
                f"The categories of column '{self.name}' must be a list of different names, at least one; "
                "correct the list."
            )
        if self.style not in get_args(Style):
            raise InvalidInput(
                f"The style of column '{self.name}' is {self.style!r}, but it must be 'one-hot' or 'codes'; "
                "give one of them."
            )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Name of every feature the column becomes."""
        names = (
            (self.name,)
            if self.style == "codes"
            else tuple(f"{self.name}={category}" for category in self.categories)
        )
        return (*names, f"{self.name} missing") if self.missing else names

    def encode(self, values: pd.Series[Any], features: NDArray[np.float32]) -> None:
        """Write the features of all values into `features`: zeros, one column per feature name."""
        texts = as_texts(values)
        index = pd.Index(self.categories, dtype=object).get_indexer(pd.Index(texts, dtype=object))
        if self._numbers:
            for row in np.flatnonzero(index < 0):
                index[row] = self._numbers.get(_number(texts[row]), -1)
        known = np.flatnonzero(index >= 0)
        if self.style == "codes":
            features[known, 0] = (index[known] + 1) / len(self.categories)
        else:
            features[known, index[known]] = 1
        if self.missing:
            features[is_missing(texts) & (index < 0), -1] = 1

    @cached_property
    def _numbers(self) -> dict[Decimal | None, int]:
        """The index of the first category for each number among the categories."""
        numbers = {_number(category): index for index, category in reversed([*enumerate(self.categories)])}
        return {number: index for number, index in numbers.items() if number is not None}


Column = NumericColumn | CategoricalColumn


def as_texts(values: pd.Series[Any]) -> NDArray[np.object_]:
    """Return every value as text without outer blanks; a whole number has no decimals, an empty cell is "".

    >>> as_texts(pd.Series([1.0, None, 2.5])).tolist()
    ['1', '', '2.5']
    """
    if isinstance(values.dtype, pd.StringDtype | pd.CategoricalDtype):
        codes, distinct = pd.factorize(values, use_na_sentinel=False)
        return np.array([as_text(value) for value in distinct], dtype=object)[codes]
    return np.array([as_text(value) for value in values.tolist()], dtype=object)


def as_text(value: object) -> str:
    """Return one cell as text."""
    if isinstance(value, str):
        return value.strip()
    if value is None or value is pd.NA or value is pd.NaT or value != value:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _number(text: str) -> Decimal | None:
    return Decimal(text) if _NUMBER.fullmatch(text) else None


def is_missing(texts: Iterable[str]) -> NDArray[np.bool_]:
    """Tell for every text whether it stands for a missing value."""
    return np.array([text in MISSING_MARKERS for text in texts], dtype=bool)


def _numbers(values: pd.Series[Any], name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the values as numbers, and which of them are missing; never show a value in an error."""
    if pd.api.types.is_numeric_dtype(values.dtype):
        numbers = values.to_numpy(dtype=np.float64, na_value=np.nan)
        absent = np.isnan(numbers)
    else:
        texts = as_texts(values)
        absent = is_missing(texts)
        numbers = pd.to_numeric(
            pd.Series(np.where(absent, "0", texts), dtype=object), errors="coerce"
        ).to_numpy(dtype=np.float64)
    wrong = np.flatnonzero(~absent & ~np.isfinite(numbers))
    if wrong.size:
        raise InvalidInput(
            f"Column '{name}' holds something other than a finite number in record {wrong[0] + 1} (and in "
            f"{wrong.size - 1} more); correct it, leave the cell empty if the value is missing, or declare "
            "the column's categories."
        )
    return numbers, absent
