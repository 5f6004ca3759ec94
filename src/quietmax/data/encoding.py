"""The public encoding of a table: how the cells of each row become features.

Each row is encoded on its own (THEORY 3.8): its features depend on its cells and on the declared columns, never on
another row; `cells` says how a cell is read.  A cell that is not a number in a numeric column, not a date in a column
of dates, or neither yes nor no in a boolean column is an error, because of that cell alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax.data.cells import (
    MISSING_MARKERS,
    NOT_A_NUMBER,
    as_strings,
    exact_number,
    first_of,
    holds_numbers,
    holds_strings,
    is_missing,
    map_distinct,
    numbers_or_nan,
    parse_boolean,
    parse_date,
    parse_number,
    read_numbers,
    refuse_unreadable,
)
from quietmax.data.text import DIMENSION, ENCODER, WEIGHTS_SHA256, embed, read_encoder
from quietmax.errors import DataUnavailable, InvalidData, InvalidInput

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_module("pandas")

Scale = Literal["linear", "log"]
Style = Literal["one-hot", "codes"]

_THOUSANDS = {".": r"\.", ",": ",", " ": "[ \u00a0\u202f]", "'": "['\u2019]", "_": "_"}
"""The thousands separators, and what each matches: a blank may be a no-break space, an apostrophe may be curved."""

_DATE_DIRECTIVES = "dmYyHIMSfpbB"
"""The directives of `datetime.strptime` that the format of a date may use."""

_MAX_BUCKETS = 1 << 16

_FORMATS = ("quietmax encoding 3", "quietmax encoding 2", "quietmax encoding 1")
"""The format that is written, followed by older ones that are read."""

_ROWS_AT_ONCE = 4096
"""Rows that are encoded together: few enough for a processor's cache."""

_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True)
class Losses:
    """How many cells of a column the encoding does not take as they are; for the owner of the table only."""

    missing: int  # Cells without a value
    clipped: int = 0  # Numbers and dates outside the bounds
    unknown: int = 0  # Values that are none of the categories
    unreadable: int = 0  # Cells that are an error: no number, no date, neither yes nor no


class _Cells(NamedTuple):
    """What the cells of a column say, each read alone."""

    values: NDArray[Any]  # Numbers, indices or texts; anything where there is none
    absent: NDArray[np.bool_]  # Missing values
    unreadable: NDArray[np.bool_]  # Cells that are an error


class Column(ABC):
    """What all kinds of columns share: `_read` says what the cells mean, `_index` or `_share` what they become.

    A kind of indicators has an index for each value: that feature is 1 and the others are 0; -1 is none.  Any
    other kind has one feature, a share from 0 to 1.  A missing value sets the last feature, if there is one for it.
    """

    kind: ClassVar[str]
    name: str
    missing: bool
    missing_values: tuple[str, ...]
    _problem: ClassVar[str] = ""  # What a cell that cannot be read has
    _lost_as: ClassVar[str] = ""  # What values outside the limits are called in `Losses`

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features that the column becomes."""
        return (*self._names, f"{self.name} missing") if self.missing else self._names

    @property
    def is_indicator(self) -> bool:
        """Whether a value sets one of several features to 1, instead of being a number in one feature."""
        return True

    def encode(self, values: pd.Series[Any], features: NDArray[np.float32]) -> None:
        """Write the features of a column's cells into an array of zeros with one column per feature name."""
        cells = self._read(values)
        refuse_unreadable(cells.unreadable, self.name, self._problem)
        self.write(cells.values, cells.absent, features)

    def write(self, values: NDArray[Any], absent: NDArray[np.bool_], features: NDArray[np.float32]) -> None:
        """Write the features of values that have been read."""
        if self.is_indicator:
            index = np.where(absent, -1, self._index(values))
            known = np.flatnonzero(index >= 0)
            features[known, index[known]] = 1
        else:
            features[:, 0] = np.where(absent, 0.0, self._share(values))
        if self.missing:
            features[absent, -1] = 1

    def losses(self, values: pd.Series[Any]) -> Losses:
        """Return how many cells are missing, clipped, unknown or unreadable."""
        cells = self._read(values)
        found = {"missing": int(cells.absent.sum()), "unreadable": int(cells.unreadable.sum())}
        if self._lost_as:
            outside = (cells.values < self._limits[0]) | (cells.values > self._limits[1])
            found[self._lost_as] = int((outside & ~cells.absent & ~cells.unreadable).sum())
        return Losses(**found)

    @property
    def _names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def _limits(self) -> tuple[float, float]:
        return 0.0, math.inf

    @abstractmethod
    def _read(self, values: pd.Series[Any]) -> _Cells: ...

    def _index(self, values: NDArray[Any]) -> NDArray[np.int64]:
        return values

    def _share(self, values: NDArray[Any]) -> NDArray[np.float64]:
        share: NDArray[np.float64] = np.clip(values, 0.0, 1.0)
        return share

    def _is_missing(self, string: str) -> bool:
        return string in MISSING_MARKERS or string in self.missing_values


@dataclass(frozen=True)
class NumericColumn(Column):
    """A column of numbers with public bounds.

    A value v is clipped to [low, high] and becomes `(v - low) / (high - low)`, with `scale="log"` `ln(1 + v -
    low) / ln(1 + high - low)`.  With `edges` it becomes one feature per interval instead: 1 for the interval
    that contains v, else 0.  Infinity is clipped like any large number.

    Parameters
    ----------
    name : str
        Name of the column.
    low, high : float
        Public bounds, `low < high`.
    scale : {"linear", "log"}
        How values are spread over [0, 1]; ignored with `edges`.
    edges : tuple of float
        Inner borders of the intervals, in rising order; an edge belongs to the interval above it.
    missing : bool
        Whether values may be missing.  A missing value (also NaN) becomes the lower bound, or no interval; one
        more feature is then 1 for it.
    decimal : {".", ","}
        Decimal separator of numbers that are written as strings.
    thousands : {"", ".", ",", " ", "'", "_"}
        Their thousands separator.  It must stand before every third digit or nowhere.
    unit : str
        A currency sign or unit that may stand before or after such a number, as "€" or "kg".
    missing_values : tuple of str
        Further values that stand for a missing one, such as "-999" or "unknown".

    Raises
    ------
    InvalidInput
        If the bounds, the scale, the edges or the separators are not valid.

    Examples
    --------
    >>> NumericColumn("age", 0, 100, edges=(18, 65)).feature_names
    ('age>=0', 'age>=18', 'age>=65', 'age missing')
    """

    kind: ClassVar[str] = "numeric"
    _problem: ClassVar[str] = NOT_A_NUMBER
    _lost_as: ClassVar[str] = "clipped"
    name: str
    low: float
    high: float
    scale: Scale = "linear"
    edges: tuple[float, ...] = ()
    missing: bool = True
    decimal: str = "."
    thousands: str = ""
    missing_values: tuple[str, ...] = ()
    unit: str = ""

    def __post_init__(self) -> None:
        if not (self.low < self.high and math.isfinite(self.high - self.low)):
            raise InvalidInput(
                f"The bounds of column '{self.name}' must be two finite numbers, the lower one first; got "
                f"{self.low} and {self.high}."
            )
        if self.scale not in get_args(Scale):
            raise InvalidInput(
                f"The scale of column '{self.name}' must be 'linear' or 'log', got {self.scale!r}."
            )
        rising = all(first < second for first, second in zip(self.edges, self.edges[1:], strict=False))
        if not rising or any(not self.low < edge <= self.high for edge in self.edges):
            raise InvalidInput(
                f"The edges of column '{self.name}' must rise and lie between its bounds {self.low} and "
                f"{self.high}, got {list(self.edges)}."
            )
        separators = self.decimal in (".", ",") and (not self.thousands or self.thousands in _THOUSANDS)
        if not separators or self.decimal == self.thousands:
            raise InvalidInput(
                f"The separators of column '{self.name}' must be '.' or ',' for decimals and another one of "
                f"{quoted([*_THOUSANDS])} for thousands; got {self.decimal!r} and {self.thousands!r}."
            )
        if self.unit != self.unit.strip() or re.search("[0-9.,+-]", self.unit):
            raise InvalidInput(
                f"The unit of column '{self.name}' must be a sign or word without digits, signs and separators, got "
                f"{self.unit!r}."
            )

    @property
    def is_indicator(self) -> bool:
        """Whether the numbers are cut into intervals."""
        return bool(self.edges)

    def parse(self, string: str) -> float | None:
        """Return the number that a string without outer blanks stands for: NaN if missing, None if it is no number.

        >>> NumericColumn("income", 0, 1e6, decimal=",", thousands=".").parse("1.234,50")
        1234.5
        """
        if self.unit and self.unit in string:
            sign, rest = (string[0], string[1:]) if string[0] in "+-" else ("", string)
            rest = (
                rest.removeprefix(self.unit) if rest.startswith(self.unit) else rest.removesuffix(self.unit)
            )
            string = sign + rest.strip() or self.unit
        if self._pattern is None or string in MISSING_MARKERS:
            return parse_number(string)
        if not self._pattern.fullmatch(string):
            return None
        plain = re.sub(_THOUSANDS[self.thousands], "", string) if self.thousands else string
        return parse_number(plain.replace(self.decimal, "."))

    @property
    def _names(self) -> tuple[str, ...]:
        intervals = tuple(f"{self.name}>={start:g}" for start in (self.low, *self.edges))
        return intervals if self.edges else (self.name,)

    @property
    def _limits(self) -> tuple[float, float]:
        return self.low, self.high

    def _read(self, values: pd.Series[Any]) -> _Cells:
        numbers, unreadable = read_numbers(values, self.parse)
        codes = [number for value in self.missing_values if (number := self.parse(value)) is not None]
        named = as_strings(values)[unreadable] if unreadable.any() else np.empty(0, dtype=object)
        unreadable[unreadable] = [string not in self.missing_values for string in named]
        absent = (np.isnan(numbers) | np.isin(numbers, codes)) & ~unreadable
        return _Cells(numbers, absent, unreadable)

    def _clipped(self, values: NDArray[Any]) -> NDArray[np.float64]:
        # Adding 0.0 turns -0.0 into 0.0: which of the two a comparison returns is left open by IEEE 754.
        clipped: NDArray[np.float64] = np.clip(values, self.low, self.high) + 0.0
        return clipped

    def _index(self, values: NDArray[Any]) -> NDArray[np.int64]:
        return np.searchsorted(self.edges, self._clipped(values), side="right")

    def _share(self, values: NDArray[Any]) -> NDArray[np.float64]:
        distance = self._clipped(values) - self.low
        if self.scale == "linear":
            return distance / (self.high - self.low)
        # NumPy's log1p may round by the place in the array (vector or scalar code), math.log1p cannot.
        logs = np.fromiter(map(math.log1p, distance.tolist()), np.float64, len(distance))
        return logs / math.log1p(self.high - self.low)

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        """What a number written with the column's separators looks like; None for the usual way."""
        if self.decimal == "." and not self.thousands:
            return None
        separator = _THOUSANDS.get(self.thousands)
        integer = f"([0-9]+|[0-9]{{1,3}}({separator}[0-9]{{3}})+)" if separator else "([0-9]+)"
        fraction = f"({re.escape(self.decimal)}[0-9]*)"
        return re.compile(rf"[+-]?{integer}?{fraction}?([eE][+-]?[0-9]+)?|[+-]?inf(inity)?", re.IGNORECASE)


@dataclass(frozen=True)
class CategoricalColumn(Column):
    """A column of public categories.

    A cell belongs to the category of the same string, else to the first category that is the same number: 1, 1.0
    and "1.00" are.  A category that is not listed becomes all zeros.

    Parameters
    ----------
    name : str
        Name of the column.
    categories : tuple of str
        The categories in order, all different.
    style : {"one-hot", "codes"}
        One feature per category, or one feature with the value `(i + 1) / k` for the i-th of k categories
        (counted from 0).
    missing : bool
        Whether values may be missing; one more feature is then 1 for a missing value.
    ignore_case : bool
        Whether a cell matches a category in any case.
    missing_values : tuple of str
        Further values that stand for a missing one.

    Raises
    ------
    InvalidInput
        If the categories or the style are not valid.

    Examples
    --------
    >>> CategoricalColumn("sex", ("Female", "Male"), missing=False).feature_names
    ('sex=Female', 'sex=Male')
    """

    kind: ClassVar[str] = "categorical"
    _lost_as: ClassVar[str] = "unknown"
    name: str
    categories: tuple[str, ...]
    style: Style = "one-hot"
    missing: bool = True
    ignore_case: bool = False
    missing_values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        named = all(isinstance(category, str) for category in self.categories)
        if not self.categories or not named or len(set(self.categories)) < len(self.categories):
            raise InvalidInput(
                f"The categories of column '{self.name}' must be at least one string, all different."
            )
        if self.style not in get_args(Style):
            raise InvalidInput(
                f"The style of column '{self.name}' must be 'one-hot' or 'codes', got {self.style!r}."
            )
        if self.ignore_case:
            _require_distinct_without_case(self.name, self.categories)
        both = sorted(set(self.categories) & set(self.missing_values))
        if both:
            raise InvalidInput(f"'{both[0]}' is both a category and a missing value of column '{self.name}'.")

    @property
    def is_indicator(self) -> bool:
        """Whether each category has a feature of its own."""
        return self.style == "one-hot"

    @property
    def _names(self) -> tuple[str, ...]:
        names = tuple(f"{self.name}={category}" for category in self.categories)
        return names if self.is_indicator else (self.name,)

    def _read(self, values: pd.Series[Any]) -> _Cells:
        strings = as_strings(values)
        index = map_distinct(strings, self._category)
        absent = is_missing(strings, self.missing_values) & (index < 0)
        return _Cells(index, absent, np.zeros(len(index), dtype=bool))

    def _share(self, values: NDArray[Any]) -> NDArray[np.float64]:
        return (values + 1) / len(self.categories)

    def _category(self, string: str) -> int:
        """Return the index of the category of a string, or -1."""
        index = self._by_string.get(string.casefold() if self.ignore_case else string)
        return self._by_number.get(exact_number(string), -1) if index is None else index

    @cached_property
    def _by_string(self) -> dict[str, int]:
        fold = str.casefold if self.ignore_case else str
        return {fold(category): index for index, category in enumerate(self.categories)}

    @cached_property
    def _by_number(self) -> dict[Decimal | None, int]:
        """The index of the first category for each number among the categories."""
        numbers = {
            exact_number(category): index for index, category in reversed([*enumerate(self.categories)])
        }
        return {number: index for number, index in numbers.items() if number is not None}


@dataclass(frozen=True)
class BooleanColumn(Column):
    """A column of yes and no; also true and false, y and n, t and f, 1 and 0, in any case.

    Parameters
    ----------
    name : str
        Name of the column.
    missing : bool
        Whether values may be missing; one more feature is then 1 for a missing value.
    missing_values : tuple of str
        Further values that stand for a missing one.

    Examples
    --------
    >>> BooleanColumn("smoker").feature_names
    ('smoker=no', 'smoker=yes', 'smoker missing')
    """

    kind: ClassVar[str] = "boolean"
    _problem: ClassVar[str] = "neither yes nor no in the boolean column '{}'"
    name: str
    missing: bool = True
    missing_values: tuple[str, ...] = ()

    @property
    def _names(self) -> tuple[str, ...]:
        return f"{self.name}=no", f"{self.name}=yes"

    def _read(self, values: pd.Series[Any]) -> _Cells:
        answers = map_distinct(
            as_strings(values), lambda string: -1 if self._is_missing(string) else parse_boolean(string)
        )
        return _Cells(answers, answers == -1, answers == -2)


@dataclass(frozen=True)
class DateColumn(Column):
    """A column of dates or timestamps with public bounds.

    A value is clipped to the bounds and becomes `(v - low) / (high - low)`.  It counts in days, without the time of
    day, if both bounds are dates, and in microseconds of UTC if they are timestamps.  A timestamp without an offset
    counts as UTC.

    Parameters
    ----------
    name : str
        Name of the column.
    low, high : str
        Public bounds, as dates ("2024-01-31") or timestamps ("2024-01-31 08:30:00") of ISO 8601.
    format : str, optional
        How the cells are written, as for `datetime.strptime` ("%d.%m.%Y"); by default ISO 8601.
    missing : bool
        Whether values may be missing.  A missing value becomes the lower bound; one more feature is then 1 for it.
    missing_values : tuple of str
        Further values that stand for a missing one.

    Raises
    ------
    InvalidInput
        If the bounds or the format are not valid.

    Examples
    --------
    >>> column, features = DateColumn("joined", "2020-01-01", "2020-01-11"), np.zeros((2, 2), dtype=np.float32)
    >>> column.encode(pd.Series(["2020-01-06", None]), features)
    >>> features.tolist()
    [[0.5, 0.0], [0.0, 1.0]]
    """

    kind: ClassVar[str] = "date"
    _lost_as: ClassVar[str] = "clipped"
    name: str
    low: str
    high: str
    format: str | None = None
    missing: bool = True
    missing_values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.bounds is None or not self.bounds[0] < self.bounds[1]:
            raise InvalidInput(
                f"The bounds of column '{self.name}' must be two dates such as '2024-01-31', or two timestamps such "
                f"as '2024-01-31 08:30:00', the earlier one first; got {self.low!r} and {self.high!r}."
            )
        directives = re.findall("%(.?)", self.format or "%d")
        if not directives or not all(directive and directive in _DATE_DIRECTIVES for directive in directives):
            raise InvalidInput(
                f"The date format of column '{self.name}' must be built from "
                f"{', '.join('%' + letter for letter in _DATE_DIRECTIVES)}, as in '%d.%m.%Y'; got {self.format!r}."
            )

    @property
    def is_indicator(self) -> bool:
        """Dates are numbers."""
        return False

    @cached_property
    def bounds(self) -> tuple[int, int] | None:
        """The bounds in days or microseconds, or None if they are not two dates or two timestamps."""
        low, high = (parse_date(bound) if isinstance(bound, str) else None for bound in (self.low, self.high))
        if low is None or high is None or (len(self.low) == 10) != (len(self.high) == 10):
            return None
        return self._count(low), self._count(high)

    @property
    def _limits(self) -> tuple[float, float]:
        return 0.0, 1.0

    @property
    def _problem(self) -> str:  # type: ignore[override]
        written = self.format or "dates such as 2024-01-31"
        return f"no date in the column '{{}}', which is declared as {written}"

    def _read(self, values: pd.Series[Any]) -> _Cells:
        """Return where every cell lies between the bounds."""
        assert self.bounds is not None
        low, high = self.bounds
        # What has a type is written as ISO 8601, whatever the format of the strings of other tables.
        pattern = self.format if holds_strings(values) else None

        def share(string: str) -> float | None:
            if self._is_missing(string):
                return math.nan
            moment = parse_date(string, pattern)
            return None if moment is None else (self._count(moment) - low) / (high - low)

        strings = as_strings(values)
        known = {string: share(string) for string in set(strings.tolist())}
        shares, unreadable = numbers_or_nan(np.array([known[string] for string in strings], dtype=object))
        return _Cells(shares, np.isnan(shares) & ~unreadable, unreadable)

    def _count(self, moment: datetime) -> int:
        """Return the number of days, or of microseconds of UTC, since the beginning of the year 1."""
        if len(self.low) == 10:
            return moment.toordinal()
        offset = moment.utcoffset() or timedelta()
        return (moment.replace(tzinfo=None) - datetime.min - offset) // _MICROSECOND


@dataclass(frozen=True)
class HashedColumn(Column):
    """A column of strings with very many values, such as postal codes, hashed into a public number of buckets.

    A value becomes 1 in the bucket `BLAKE2b(string) mod buckets` and 0 in all others.

    Parameters
    ----------
    name : str
        Name of the column.
    buckets : int
        Number of buckets, from 2 to 65536.
    missing : bool
        Whether values may be missing; one more feature is then 1 for a missing value.
    ignore_case : bool
        Whether strings that differ in case only count as equal.
    missing_values : tuple of str
        Further values that stand for a missing one.

    Raises
    ------
    InvalidInput
        If the number of buckets is not valid.

    Examples
    --------
    >>> HashedColumn("zip", 3, missing=False).feature_names
    ('zip#0', 'zip#1', 'zip#2')
    """

    kind: ClassVar[str] = "hashed"
    name: str
    buckets: int
    missing: bool = True
    ignore_case: bool = False
    missing_values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        integer = isinstance(self.buckets, int) and not isinstance(self.buckets, bool)
        if not integer or not 2 <= self.buckets <= _MAX_BUCKETS:
            raise InvalidInput(
                f"The number of buckets of column '{self.name}' must be an integer from 2 to {_MAX_BUCKETS}, got "
                f"{self.buckets!r}."
            )

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(f"{self.name}#{bucket}" for bucket in range(self.buckets))

    def _read(self, values: pd.Series[Any]) -> _Cells:
        strings = as_strings(values)
        absent = is_missing(strings, self.missing_values)
        return _Cells(map_distinct(strings, self._bucket), absent, np.zeros(len(strings), dtype=bool))

    def _bucket(self, string: str) -> int:
        content = (string.casefold() if self.ignore_case else string).encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") % self.buckets


@dataclass(frozen=True)
class TextColumn(Column):
    """A column of free text, such as a note or a review, embedded by a public sentence encoder.

    A text becomes a vector of length 1: texts with a similar meaning have similar vectors.  See `quietmax.data.text`.

    Parameters
    ----------
    name : str
        Name of the column.
    missing : bool
        Whether texts may be missing.  A missing text becomes zeros; one more feature is then 1 for it.
    missing_values : tuple of str
        Further values that stand for a missing one.
    encoder, sha256 : str
        Name of the sentence encoder and digest of its weights.

    Raises
    ------
    DataUnavailable
        If this version of Quietmax has another sentence encoder, or if it is not installed.

    Examples
    --------
    >>> TextColumn("note").feature_names[-2:]
    ('note~383', 'note missing')
    """

    kind: ClassVar[str] = "text"
    name: str
    missing: bool = True
    missing_values: tuple[str, ...] = ()
    encoder: str = ENCODER
    sha256: str = WEIGHTS_SHA256

    def __post_init__(self) -> None:
        if (self.encoder, self.sha256) != (ENCODER, WEIGHTS_SHA256):
            raise DataUnavailable(
                f"Column '{self.name}' needs the sentence encoder {self.encoder} with the SHA-256 {self.sha256}, but "
                f"this version of Quietmax has {ENCODER} with the SHA-256 {WEIGHTS_SHA256}."
            )

    @property
    def is_indicator(self) -> bool:
        """Embeddings are numbers."""
        return False

    def write(self, values: NDArray[Any], absent: NDArray[np.bool_], features: NDArray[np.float32]) -> None:
        """Write the embeddings of texts."""
        features[~absent, :DIMENSION] = embed(values[~absent].tolist())
        if self.missing:
            features[absent, -1] = 1

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(f"{self.name}~{number}" for number in range(DIMENSION))

    def _read(self, values: pd.Series[Any]) -> _Cells:
        strings = as_strings(values)
        return _Cells(strings, is_missing(strings, self.missing_values), np.zeros(len(strings), dtype=bool))


_KINDS: dict[str, type[Column]] = {
    column.kind: column
    for column in (NumericColumn, CategoricalColumn, BooleanColumn, DateColumn, HashedColumn, TextColumn)
}


def _require_distinct_without_case(name: str, values: Sequence[str]) -> None:
    """Refuse categories or classes that differ in case only where case is ignored."""
    if len({value.casefold() for value in values}) < len(values):
        raise InvalidInput(
            f"The values of column '{name}' must differ in more than case, as it ignores case."
        )


@dataclass(frozen=True)
class Encoding:
    """Public description of a table: its columns in order, its label column and its class names.

    Parameters
    ----------
    columns : tuple of NumericColumn, CategoricalColumn, BooleanColumn, DateColumn, HashedColumn and TextColumn
        The columns that become features, in order.
    label : str
        Name of the label column.
    classes : tuple of str
        Names of the classes, in the order of their numbers.
    inferred : tuple of str
        Everything in the encoding that was read from the records instead of declared.  A guarantee for a model
        that uses such an encoding holds only if these things are public after all.
    crosses : tuple of (str, str)
        Pairs of columns whose combinations a feature map may use as features; the encoding itself makes none.
    label_ignores_case : bool
        Whether labels match class names in any case.
    person : str, optional
        Name of the column that tells people apart; it is not a feature.
    person_type : str, optional
        The type of that column; see `person_type`.  In a column of another type the same people may have other names.
    person_ignores_case : bool
        Whether names of people that differ in case only are of one person.

    Raises
    ------
    InvalidInput
        If there is no column, if names are repeated, if there are fewer than two classes, or if a cross is not a
        pair of columns.

    Examples
    --------
    >>> encoding = Encoding((NumericColumn("age", 0, 100, missing=False),), "ill", ("no", "yes"))
    >>> encoding.encode(pd.DataFrame({"age": [25, 250]}))
    array([[0.25],
           [1.  ]], dtype=float32)
    """

    columns: tuple[Column, ...]
    label: str
    classes: tuple[str, ...]
    inferred: tuple[str, ...] = ()
    crosses: tuple[tuple[str, str], ...] = ()
    label_ignores_case: bool = False
    person: str | None = None
    person_type: str | None = None
    person_ignores_case: bool = False

    def __post_init__(self) -> None:
        names = [*(column.name for column in self.columns), self.label]
        if not self.columns or len(set(names)) < len(names):
            raise InvalidInput(
                "An encoding must have at least one column besides the label, and all names must be different."
            )
        if len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise InvalidInput(
                f"The label '{self.label}' must have at least two classes with different names; got "
                f"{len(self.classes)} name(s), {len(set(self.classes))} of them different."
            )
        if self.label_ignores_case:
            _require_distinct_without_case(self.label, self.classes)
        crossable = [column.name for column in self.columns if not isinstance(column, TextColumn)]
        pairs = [frozenset(cross) for cross in self.crosses]
        if any(len(pair) != 2 or not pair <= set(crossable) for pair in pairs) or len(set(pairs)) < len(
            pairs
        ):
            raise InvalidInput(
                "crosses must be different pairs of two columns that are not free text; these are "
                f"{quoted(crossable)}."
            )

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """Names of all features, in order."""
        return tuple(name for column in self.columns for name in column.feature_names)

    @property
    def encoders(self) -> tuple[tuple[str, str], ...]:
        """Name and SHA-256 of the sentence encoder, if there are text columns."""
        texts = (column for column in self.columns if isinstance(column, TextColumn))
        return tuple(dict.fromkeys((column.encoder, column.sha256) for column in texts))

    def read_encoders(self) -> None:
        """Read the sentence encoder if there are text columns, so that the first `encode` need not."""
        if self.encoders:
            read_encoder()

    def encode(self, table: pd.DataFrame) -> NDArray[np.float32]:
        """Encode the rows of a table.

        Parameters
        ----------
        table : pandas.DataFrame
            The rows.  Columns that the encoding does not know are ignored.

        Returns
        -------
        ndarray of float32, shape (rows, features)

        Raises
        ------
        InvalidInput
            If a column is missing or a cell cannot be read.
        """
        require_columns(table, [column.name for column in self.columns])
        named = _with_string_names(table)
        features = np.zeros((len(table), len(self.feature_names)), dtype=np.float32)
        start, numeric = 0, []
        for column in self.columns:
            end = start + len(column.feature_names)
            cells = named[column.name]
            if isinstance(column, NumericColumn) and holds_numbers(cells) and not column.missing_values:
                numeric.append((column, cells.to_numpy(), slice(start, end)))
            else:
                column.encode(cells, features[:, start:end])
            start = end
        # Nothing can be wrong in columns of numbers. Going through them row by row needs less memory traffic.
        for top in range(0, len(table), _ROWS_AT_ONCE):
            rows = slice(top, top + _ROWS_AT_ONCE)
            for column, numbers, place in numeric:
                values = numbers[rows].astype(np.float64)
                column.write(values, np.isnan(values), features[rows, place])
        return features

    def encode_labels(self, table: pd.DataFrame) -> NDArray[np.int64]:
        """Return the class number of every row; a row without a declared class is an error."""
        require_columns(table, [self.label])
        strings = as_strings(_with_string_names(table)[self.label])
        fold = str.casefold if self.label_ignores_case else str
        numbers = {fold(name): number for number, name in enumerate(self.classes)}
        labels = map_distinct(strings, lambda string: numbers.get(fold(string), -1))
        wrong = np.flatnonzero(labels < 0)
        if wrong.size:
            missing = strings[wrong[0]] in MISSING_MARKERS
            problem = "no label" if missing else "a label outside the classes"
            advice = "Delete such rows" if missing else "Declare the class too, or delete such rows"
            raise InvalidData(
                f"{first_of(wrong)} has {problem} in column '{self.label}'; the declared classes are "
                f"{quoted(self.classes)}. {advice}."
            )
        return labels

    def to_json(self) -> str:
        """Return the encoding as a JSON string."""
        columns = [{"type": column.kind, **asdict(column)} for column in self.columns]  # type: ignore[call-overload]
        others = {entry.name: getattr(self, entry.name) for entry in fields(self)[1:]}
        return json.dumps({"format": _FORMATS[0], "columns": columns, **others}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Encoding:
        """Read an encoding from JSON."""
        try:
            content = json.loads(text)
            age = _FORMATS.index(content["format"])
            if age == 2:
                content["inferred"] = content["measurements"]
            columns = [_KINDS[entry.pop("type")](**_tuples(entry)) for entry in content["columns"]]
            names = [entry.name for entry in fields(cls)[1:]]
            others = {name: content[name] for name in (names[:3] if age else names)}
            return cls(tuple(columns), **_tuples(others))
        except InvalidInput:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(
                f"This is not the JSON of an encoding in the format '{_FORMATS[0]}'."
            ) from error


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with tuples in the place of lists."""

    def converted(value: Any) -> Any:
        return tuple(map(converted, value)) if isinstance(value, list) else value

    return {name: converted(value) for name, value in values.items()}


def require_columns(table: pd.DataFrame, names: Sequence[str]) -> None:
    """Check that a table has the named columns, and each name once."""
    present = Counter(str(column).strip() for column in table.columns)
    repeated = sorted(name for name, count in present.items() if count > 1)
    if repeated:
        raise InvalidData(
            f"Column names must be different; the table has several columns named {quoted(repeated)}."
        )
    absent = [name for name in names if name not in present]
    if absent:
        raise InvalidInput(f"The table has no column {quoted(absent)}; its columns are {quoted([*present])}.")


def _with_string_names(table: pd.DataFrame) -> pd.DataFrame:
    return table.set_axis([str(name).strip() for name in table.columns], axis=1)


def quoted(names: Sequence[str], limit: int = 30) -> str:
    """Return names in quotes, separated by commas, for messages."""
    shown = ", ".join(f"'{name}'" for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
