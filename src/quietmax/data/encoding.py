"""The public encoding of a table: how the cells of each row become features.

Each cell is converted on its own (THEORY 3.8): its features depend on the cell, on the declared column and on
the declared type of the data (a pandas dtype, or the Arrow type in a Parquet file), never on another cell.  The
type says how a cell is read:

- integers, decimals: exact, whatever their size; booleans: `True` and `False`, as numbers 1 and 0;
- floats: NaN is a missing value;
- strings: without outer blanks; bytes: as UTF-8, other bytes written as `\\xNN`;
- bytes of a fixed length (also UUIDs): as hexadecimal digits;
- dates, times, timestamps: `2024-01-31`, `08:30:00`, `2024-01-31 08:30:00.5Z`; durations: the number of units;
- dictionaries and extension types: as the type of their values;
- null, `None`, `NA`, `NaT`: a missing value.

Lists, structs, maps and all other types are errors, because of the column's type alone.  A cell that is not a
number in a numeric column, not a date in a column of dates, or neither yes nor no in a boolean column is an error,
because of that cell alone.  Errors are for the owner of the table and are not part of any release.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal, get_args, overload

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from quietmax.errors import InvalidData, InvalidInput

Scale = Literal["linear", "log"]
Style = Literal["one-hot", "codes"]

MISSING_MARKERS = frozenset({"", "?", "NA", "N/A", "null", "NULL", "nan", "NaN"})
"""Strings that stand for a missing value (besides an empty cell), unless they are declared as a category."""

YES = frozenset({"yes", "y", "true", "t", "1"})
NO = frozenset({"no", "n", "false", "f", "0"})
"""What a boolean column may hold, in any case."""

THOUSANDS = {".": r"\.", ",": ",", " ": "[ \u00a0\u202f]", "'": "['\u2019]", "_": "_"}
"""The thousands separators, and what each matches: a blank may be a no-break space, an apostrophe may be curved."""

DATE_DIRECTIVES = "dmYyHIMSfpbB"
"""The directives of `datetime.strptime` that the format of a date may use."""

MAX_BUCKETS = 1 << 16

_FORMATS = ("quietmax encoding 3", "quietmax encoding 2", "quietmax encoding 1")
"""The format that is written, followed by older ones that are read."""

_LITERAL = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
"""A number among categories; 01 is a code, not a number."""

_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?inf(inity)?", re.IGNORECASE)
"""A number in a numeric column."""

_ROWS_AT_ONCE = 4096
"""Rows that are encoded together: few enough for a processor's cache."""

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which no valid string contains."""

_ISO_DATE = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?(Z|[+-][0-9]{2}(:?[0-9]{2})?)?)?"
)
_MICROSECOND = timedelta(microseconds=1)

_FRACTION = (
    (r"(\.[0-9]*?)0+(Z|[+-][0-9]{4})?$", r"\1\2"),
    (r"\.(Z|[+-][0-9]{4})?$", r"\1"),
)
"""Replacements that together remove trailing zeros of the fraction of a second from Arrow's string of a time."""

_STRING_TYPES = (
    pyarrow.types.is_string,
    pyarrow.types.is_large_string,
    pyarrow.types.is_string_view,
    pyarrow.types.is_binary,
    pyarrow.types.is_large_binary,
    pyarrow.types.is_binary_view,
)


@dataclass(frozen=True)
class Losses:
    """How many cells of a column the encoding does not take as they are; for the owner of the table only.

    Parameters
    ----------
    missing : int
        Cells without a value.
    clipped : int
        Numbers and dates outside the bounds.
    unknown : int
        Values that are none of the categories.
    unreadable : int
        Cells that are an error: no number, no date, neither yes nor no.
    """

    missing: int = 0
    clipped: int = 0
    unknown: int = 0
    unreadable: int = 0


@dataclass(frozen=True)
class NumericColumn:
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
        separators = self.decimal in (".", ",") and (not self.thousands or self.thousands in THOUSANDS)
        if not separators or self.decimal == self.thousands:
            raise InvalidInput(
                f"The separators of column '{self.name}' must be '.' or ',' for decimals and another one of "
                f"{quoted([*THOUSANDS])} for thousands; got {self.decimal!r} and {self.thousands!r}."
            )
        if self.unit != self.unit.strip() or re.search("[0-9.,+-]", self.unit):
            raise InvalidInput(
                f"The unit of column '{self.name}' must be a sign or word without digits, signs and separators, got "
                f"{self.unit!r}."
            )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features that the column becomes."""
        intervals = tuple(f"{self.name}>={start:g}" for start in (self.low, *self.edges))
        return _with_missing(self, intervals if self.edges else (self.name,))

    def encode(self, values: pd.Series[Any], features: NDArray[np.float32]) -> None:
        """Write the features of a column's cells.

        Parameters
        ----------
        values : pandas.Series
            The cells.
        features : ndarray of float32
            Output array of zeros, one column per feature name.
        """
        numbers, unreadable = self._read(values)
        _refuse(unreadable, self.name, _NOT_A_NUMBER)
        self.write(numbers, features)

    def write(self, numbers: NDArray[np.float64], features: NDArray[np.float32]) -> None:
        """Write the features of numbers.

        Parameters
        ----------
        numbers : ndarray of float64
            The numbers, NaN for a missing one.
        features : ndarray of float32
            Output array of zeros, one column per feature name.
        """
        absent = np.isnan(numbers)
        # Adding 0.0 turns -0.0 into 0.0: which of the two a comparison returns is left open by IEEE 754.
        clipped = np.clip(np.where(absent, self.low, numbers), self.low, self.high) + 0.0
        if self.edges:
            interval = np.searchsorted(self.edges, clipped, side="right")
            present = np.flatnonzero(~absent)
            features[present, interval[present]] = 1
        elif self.scale == "log":
            # NumPy's log1p may round by the place in the array (vector or scalar code), math.log1p cannot.
            logs = np.fromiter(map(math.log1p, (clipped - self.low).tolist()), np.float64, len(clipped))
            features[:, 0] = logs / math.log1p(self.high - self.low)
        else:
            features[:, 0] = (clipped - self.low) / (self.high - self.low)
        if self.missing:
            features[absent, -1] = 1

    def losses(self, values: pd.Series[Any]) -> Losses:
        """Return how many cells are missing, clipped or unreadable.

        Parameters
        ----------
        values : pandas.Series
            The cells.

        Returns
        -------
        Losses
        """
        numbers, unreadable = self._read(values)
        outside = (numbers < self.low) | (numbers > self.high)
        absent = np.isnan(numbers) & ~unreadable
        return Losses(int(absent.sum()), int(outside.sum()), unreadable=int(unreadable.sum()))

    def _read(self, values: pd.Series[Any]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return the number of every cell, NaN for a missing value, and which cells are no numbers."""
        numbers, unreadable = _read_numbers(values, self.parse)
        codes = [number for value in self.missing_values if (number := self.parse(value)) is not None]
        named = as_strings(values)[unreadable] if unreadable.any() else np.empty(0, dtype=object)
        unreadable[unreadable] = [string not in self.missing_values for string in named]
        return (np.where(np.isin(numbers, codes), math.nan, numbers) if codes else numbers), unreadable

    def parse(self, string: str) -> float | None:
        """Return the number that a string stands for.

        Parameters
        ----------
        string : str
            A cell as a string without outer blanks.

        Returns
        -------
        float or None
            NaN for a missing value, None if the string is not a number with the column's separators.

        Examples
        --------
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
        plain = re.sub(THOUSANDS[self.thousands], "", string) if self.thousands else string
        return parse_number(plain.replace(self.decimal, "."))

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        """What a number written with the column's separators looks like; None for the usual way."""
        if self.decimal == "." and not self.thousands:
            return None
        separator = THOUSANDS.get(self.thousands)
        integer = f"([0-9]+|[0-9]{{1,3}}({separator}[0-9]{{3}})+)" if separator else "([0-9]+)"
        fraction = f"({re.escape(self.decimal)}[0-9]*)"
        return re.compile(rf"[+-]?{integer}?{fraction}?([eE][+-]?[0-9]+)?|[+-]?inf(inity)?", re.IGNORECASE)


@dataclass(frozen=True)
class CategoricalColumn:
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
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features that the column becomes."""
        names = (
            (self.name,)
            if self.style == "codes"
            else tuple(f"{self.name}={category}" for category in self.categories)
        )
        return _with_missing(self, names)

    def encode(self, values: pd.Series[Any], features: NDArray[np.float32]) -> None:
        """Write the features of a column's cells.

        Parameters
        ----------
        values : pandas.Series
            The cells.
        features : ndarray of float32
            Output array of zeros, one column per feature name.
        """
        index, absent = self._read(values)
        known = np.flatnonzero(index >= 0)
        if self.style == "codes":
            features[known, 0] = (index[known] + 1) / len(self.categories)
        else:
            features[known, index[known]] = 1
        if self.missing:
            features[absent, -1] = 1

    def losses(self, values: pd.Series[Any]) -> Losses:
        """Return how many cells are missing or none of the categories.

        Parameters
        ----------
        values : pandas.Series
            The cells.

        Returns
        -------
        Losses
        """
        index, absent = self._read(values)
        return Losses(missing=int(absent.sum()), unknown=int(((index < 0) & ~absent).sum()))

    def _read(self, values: pd.Series[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the index of every cell's category, -1 for none, and which cells are missing values."""
        strings = as_strings(values)
        index = _map_distinct(strings, self._index)
        return index, _is_absent(strings, self.missing_values) & (index < 0)

    def _index(self, string: str) -> int:
        """Return the index of the category of a string, or -1."""
        index = self._by_string.get(string.casefold() if self.ignore_case else string)
        return self._by_number.get(_literal(string), -1) if index is None else index

    @cached_property
    def _by_string(self) -> dict[str, int]:
        return {
            category.casefold() if self.ignore_case else category: index
            for index, category in enumerate(self.categories)
        }

    @cached_property
    def _by_number(self) -> dict[Decimal | None, int]:
        """The index of the first category for each number among the categories."""
        numbers = {_literal(category): index for index, category in reversed([*enumerate(self.categories)])}
        return {number: index for number, index in numbers.items() if number is not None}


@dataclass(frozen=True)
class BooleanColumn:
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

    name: str
    missing: bool = True
    missing_values: tuple[str, ...] = ()

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features that the column becomes."""
        return _with_missing(self, (f"{self.name}=no", f"{self.name}=yes"))

    def encode(self, values: pd.Series[Any], features: NDArray[np.float32]) -> None:
        """Write the features of a column's cells.

        Parameters
        ----------
        values : pandas.Series
            The cells.
        features : ndarray of float32
            Output array of zeros, one column per feature name.
        """
        answers = self._read(values)
        _refuse(answers == -2, self.name, "neither yes nor no in the boolean column '{}'")
        known = np.flatnonzero(answers >= 0)
        features[known, answers[known]] = 1
        if self.missing:
            features[answers == -1, -1] = 1

    def losses(self, values: pd.Series[Any]) -> Losses:
        """Return how many cells are missing or unreadable.

        Parameters
        ----------
        values : pandas.Series
            The cells.

        Returns
        -------
        Losses
        """
        answers = self._read(values)
        return Losses(missing=int((answers == -1).sum()), unreadable=int((answers == -2).sum()))

    def _read(self, values: pd.Series[Any]) -> NDArray[np.int64]:
        """Return 1 for yes, 0 for no, -1 for a missing value and -2 for anything else."""

        def answer(string: str) -> int:
            if string in MISSING_MARKERS or string in self.missing_values:
                return -1
            return parse_boolean(string)

        return _map_distinct(as_strings(values), answer)


@dataclass(frozen=True)
class DateColumn:
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

    name: str
    low: str
    high: str
    format: str | None = None
    missing: bool = True
    missing_values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self._bounds is None or not self._bounds[0] < self._bounds[1]:
            raise InvalidInput(
                f"The bounds of column '{self.name}' must be two dates such as '2024-01-31', or two timestamps such "
                f"as '2024-01-31 08:30:00', the earlier one first; got {self.low!r} and {self.high!r}."
            )
        directives = re.findall("%(.?)", self.format or "%d")
        if not directives or not all(directive and directive in DATE_DIRECTIVES for directive in directives):
            raise InvalidInput(
                f"The date format of column '{self.name}' must be built from "
                f"{', '.join('%' + letter for letter in DATE_DIRECTIVES)}, as in '%d.%m.%Y'; got {self.format!r}."
            )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features that the column becomes."""
        return _with_missing(self, (self.name,))

    def encode(self, values: pd.Series[Any], features: NDArray[np.float32]) -> None:
        """Write the features of a column's cells.

        Parameters
        ----------
        values : pandas.Series
            The cells.
        features : ndarray of float32
            Output array of zeros, one column per feature name.
        """
        shares, unreadable = self._read(values)
        _refuse(
            unreadable,
            self.name,
            f"no date in the column '{{}}', which is declared as {self.format or 'dates such as 2024-01-31'}",
        )
        absent = np.isnan(shares)
        features[:, 0] = np.clip(np.where(absent, 0.0, shares), 0.0, 1.0) + 0.0
        if self.missing:
            features[absent, -1] = 1

    def losses(self, values: pd.Series[Any]) -> Losses:
        """Return how many cells are missing, clipped or unreadable.

        Parameters
        ----------
        values : pandas.Series
            The cells.

        Returns
        -------
        Losses
        """
        shares, unreadable = self._read(values)
        absent = np.isnan(shares) & ~unreadable
        outside = (shares < 0) | (shares > 1)
        return Losses(int(absent.sum()), int(outside.sum()), unreadable=int(unreadable.sum()))

    def _read(self, values: pd.Series[Any]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return where every cell lies between the bounds, NaN for a missing value, and which cells are no dates."""
        assert self._bounds is not None
        low, high = self._bounds
        # What has a type is written as ISO 8601, whatever the format of the strings of other tables.
        pattern = self.format if _holds_strings(values) else None

        def share(string: str) -> float | None:
            if string in MISSING_MARKERS or string in self.missing_values:
                return math.nan
            moment = parse_date(string, pattern)
            return None if moment is None else (self._count(moment) - low) / (high - low)

        strings = as_strings(values)
        known = {string: share(string) for string in set(strings.tolist())}
        return _numbers_or_nan(np.array([known[string] for string in strings], dtype=object))

    @cached_property
    def _bounds(self) -> tuple[int, int] | None:
        """The bounds as numbers, or None if they are not two dates or two timestamps."""
        low, high = (parse_date(bound) if isinstance(bound, str) else None for bound in (self.low, self.high))
        if low is None or high is None or (len(self.low) == 10) != (len(self.high) == 10):
            return None
        return self._count(low), self._count(high)

    def _count(self, moment: datetime) -> int:
        """Return the number of days, or of microseconds of UTC, since the beginning of the year 1."""
        if len(self.low) == 10:
            return moment.toordinal()
        offset = moment.utcoffset() or timedelta()
        return (moment.replace(tzinfo=None) - datetime.min - offset) // _MICROSECOND


@dataclass(frozen=True)
class HashedColumn:
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

    name: str
    buckets: int
    missing: bool = True
    ignore_case: bool = False
    missing_values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        integer = isinstance(self.buckets, int) and not isinstance(self.buckets, bool)
        if not integer or not 2 <= self.buckets <= MAX_BUCKETS:
            raise InvalidInput(
                f"The number of buckets of column '{self.name}' must be an integer from 2 to {MAX_BUCKETS}, got "
                f"{self.buckets!r}."
            )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features that the column becomes."""
        return _with_missing(self, tuple(f"{self.name}#{bucket}" for bucket in range(self.buckets)))

    def encode(self, values: pd.Series[Any], features: NDArray[np.float32]) -> None:
        """Write the features of a column's cells.

        Parameters
        ----------
        values : pandas.Series
            The cells.
        features : ndarray of float32
            Output array of zeros, one column per feature name.
        """
        strings = as_strings(values)
        absent = _is_absent(strings, self.missing_values)
        present = np.flatnonzero(~absent)
        features[present, _map_distinct(strings[present], self._bucket)] = 1
        if self.missing:
            features[absent, -1] = 1

    def losses(self, values: pd.Series[Any]) -> Losses:
        """Return how many cells are missing.

        Parameters
        ----------
        values : pandas.Series
            The cells.

        Returns
        -------
        Losses
        """
        return Losses(missing=int(_is_absent(as_strings(values), self.missing_values).sum()))

    def _bucket(self, string: str) -> int:
        """Return the bucket of a string."""
        content = (string.casefold() if self.ignore_case else string).encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") % self.buckets


def _with_missing(column: Column, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a column's features, followed by that of the missing value if there is one."""
    return (*names, f"{column.name} missing") if column.missing else names


def _is_absent(strings: NDArray[np.object_], missing_values: tuple[str, ...]) -> NDArray[np.bool_]:
    """Return for every string whether it stands for a missing value of a column."""
    markers = MISSING_MARKERS.union(missing_values)
    return np.array([string in markers for string in strings], dtype=bool)


def _require_distinct_without_case(name: str, values: Sequence[str]) -> None:
    """Refuse categories or classes that differ in case only where case is ignored."""
    if len({value.casefold() for value in values}) < len(values):
        raise InvalidInput(
            f"The values of column '{name}' must differ in more than case, as it ignores case."
        )


def _holds_strings(values: pd.Series[Any]) -> bool:
    """Return whether the type of a column is that of strings (or unknown), rather than of dates or numbers."""
    if isinstance(values.dtype, pd.ArrowDtype):
        kind = values.dtype.pyarrow_dtype
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        return any(test(kind) for test in _STRING_TYPES)
    return isinstance(values.dtype, pd.StringDtype | pd.CategoricalDtype) or values.dtype.kind == "O"


def parse_boolean(string: str) -> int:
    """Return 1 if a string says yes, 0 if it says no.

    Parameters
    ----------
    string : str
        A cell as a string.

    Returns
    -------
    int
        -2 if it says neither.

    Examples
    --------
    >>> parse_boolean("TRUE"), parse_boolean("n"), parse_boolean("1.0"), parse_boolean("maybe")
    (1, 0, 1, -2)
    """
    folded = string.casefold()
    number = _literal(folded)
    if folded in YES or number == 1:
        return 1
    return 0 if folded in NO or number == 0 else -2


Column = NumericColumn | CategoricalColumn | BooleanColumn | DateColumn | HashedColumn


@dataclass(frozen=True)
class Encoding:
    """Public description of a table: its columns in order, its label column and its class names.

    Parameters
    ----------
    columns : tuple of NumericColumn, CategoricalColumn, BooleanColumn, DateColumn and HashedColumn
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

    Attributes
    ----------
    feature_names : tuple of str
        Names of all features, in order.

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
        pairs = [frozenset(cross) for cross in self.crosses]
        if any(len(pair) != 2 or not pair <= set(names[:-1]) for pair in pairs) or len(set(pairs)) < len(
            pairs
        ):
            raise InvalidInput(f"crosses must be different pairs of two columns among {quoted(names[:-1])}.")

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """Names of all features, in order."""
        return tuple(name for column in self.columns for name in column.feature_names)

    @overload
    def encode(self, table: pd.DataFrame, label: None = None) -> NDArray[np.float32]: ...

    @overload
    def encode(self, table: pd.DataFrame, label: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]: ...

    def encode(
        self, table: pd.DataFrame, label: str | None = None
    ) -> NDArray[np.float32] | tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Encode the rows of a table.

        Parameters
        ----------
        table : pandas.DataFrame
            The rows.  Columns that the encoding does not know are ignored.
        label : str, optional
            Name of the label column; without it only features are returned.

        Returns
        -------
        features : ndarray of float32, shape (rows, features)
        labels : ndarray of int64, shape (rows,)
            The class numbers, only with `label`.

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
            if isinstance(column, NumericColumn) and _holds_numbers(cells) and not column.missing_values:
                numeric.append((column, cells.to_numpy(), slice(start, end)))
            else:
                column.encode(cells, features[:, start:end])
            start = end
        # Nothing can be wrong in columns of numbers. Going through them row by row needs less memory traffic.
        for top in range(0, len(table), _ROWS_AT_ONCE):
            rows = slice(top, top + _ROWS_AT_ONCE)
            for column, numbers, place in numeric:
                column.write(numbers[rows].astype(np.float64), features[rows, place])
        return features if label is None else (features, self.encode_labels(table, label))

    def encode_labels(self, table: pd.DataFrame, label: str | None = None) -> NDArray[np.int64]:
        """Return the class number of every row.

        Parameters
        ----------
        table : pandas.DataFrame
            The rows.
        label : str, optional
            Name of the label column; by default the encoding's own.

        Returns
        -------
        ndarray of int64, shape (rows,)

        Raises
        ------
        InvalidInput
            If a row has no label, or one outside the classes.
        """
        name = self.label if label is None else label
        require_columns(table, [name])
        strings = as_strings(_with_string_names(table)[name])
        fold = str.casefold if self.label_ignores_case else str
        numbers = {fold(name): number for number, name in enumerate(self.classes)}
        labels = _map_distinct(strings, lambda string: numbers.get(fold(string), -1))
        wrong = np.flatnonzero(labels < 0)
        if wrong.size:
            problem = "no label" if is_missing(strings[wrong[:1]])[0] else "a label outside the classes"
            raise InvalidData(
                f"{first_of(wrong)} has {problem} in column '{name}'; the declared classes are "
                f"{quoted(self.classes)}."
            )
        return labels

    def to_json(self) -> str:
        """Return the encoding as a JSON string."""
        columns = [{"type": COLUMN_TYPES[type(column)], **asdict(column)} for column in self.columns]
        content = {
            "format": _FORMATS[0],
            "columns": columns,
            "label": self.label,
            "classes": self.classes,
            "inferred": self.inferred,
            "crosses": self.crosses,
            "label_ignores_case": self.label_ignores_case,
            "person": self.person,
            "person_type": self.person_type,
            "person_ignores_case": self.person_ignores_case,
        }
        return json.dumps(content, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Encoding:
        """Read an encoding from JSON.

        Parameters
        ----------
        text : str
            What `to_json` returned, in this or an earlier version.

        Returns
        -------
        Encoding

        Raises
        ------
        InvalidInput
            If the string is not the JSON of an encoding.
        """
        try:
            content = json.loads(text)
            age = _FORMATS.index(content["format"])
            return cls(
                columns=tuple(_column_from_json(entry) for entry in content["columns"]),
                label=content["label"],
                classes=tuple(content["classes"]),
                inferred=tuple(content["measurements" if age == 2 else "inferred"]),
                crosses=() if age else tuple((first, second) for first, second in content["crosses"]),
                label_ignores_case=False if age else content["label_ignores_case"],
                person=None if age else content["person"],
                person_type=None if age else content["person_type"],
                person_ignores_case=False if age else content["person_ignores_case"],
            )
        except InvalidInput:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(
                f"This is not the JSON of an encoding in the format '{_FORMATS[0]}'."
            ) from error


COLUMN_TYPES: dict[type[Column], str] = {
    NumericColumn: "numeric",
    CategoricalColumn: "categorical",
    BooleanColumn: "boolean",
    DateColumn: "date",
    HashedColumn: "hashed",
}


def _column_from_json(entry: Mapping[str, Any]) -> Column:
    """Return one column; raises ValueError, KeyError or TypeError if the entry is not one."""
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
    }
    kinds = {name: column for column, name in COLUMN_TYPES.items()}
    return kinds[fields.pop("type")](**fields)


def require_columns(table: pd.DataFrame, names: Sequence[str]) -> None:
    """Check that a table has the named columns, and each name once.

    Parameters
    ----------
    table : pandas.DataFrame
        The table.
    names : sequence of str
        Names of the columns that are needed.

    Raises
    ------
    InvalidInput
        If a column is missing or two columns have the same name.
    """
    present = [str(column).strip() for column in table.columns]
    distinct = set(present)
    repeated = (
        sorted(name for name in distinct if present.count(name) > 1) if len(distinct) < len(present) else []
    )
    if repeated:
        raise InvalidData(
            f"Column names must be different; the table has several columns named {quoted(repeated)}."
        )
    absent = [name for name in names if name not in distinct]
    if absent:
        raise InvalidInput(f"The table has no column {quoted(absent)}; its columns are {quoted(present)}.")


def _with_string_names(table: pd.DataFrame) -> pd.DataFrame:
    return table.set_axis([str(name).strip() for name in table.columns], axis=1)


def quoted(names: Sequence[str], limit: int = 30) -> str:
    """Return names in quotes, separated by commas, for messages.

    Parameters
    ----------
    names : sequence of str
        The names.
    limit : int
        How many are shown at most.

    Returns
    -------
    str

    Examples
    --------
    >>> quoted(["a", "b", "c"], limit=2)
    "'a', 'b' and 1 more"
    """
    shown = ", ".join(f"'{name}'" for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def first_of(rows: NDArray[np.int64]) -> str:
    """Return the number of the first of some rows, counted from 1, and how many follow, for messages.

    Parameters
    ----------
    rows : ndarray of int64
        Row numbers, counted from 0.

    Returns
    -------
    str

    Examples
    --------
    >>> first_of(np.array([4])), first_of(np.array([4, 7, 9]))
    ('Row 5', 'Row 5 (and 2 more)')
    """
    return f"Row {rows[0] + 1}" + (f" (and {len(rows) - 1} more)" if len(rows) > 1 else "")


# Reading the cells of a column.


def as_strings(values: pd.Series[Any]) -> NDArray[np.object_]:
    """Return every cell as a string without outer blanks; an integer has no decimals, a missing value is "".

    Parameters
    ----------
    values : pandas.Series
        The cells of a column.

    Returns
    -------
    ndarray of str

    Examples
    --------
    >>> as_strings(pd.Series([1.0, None, 2.5])).tolist()
    ['1', '', '2.5']
    """
    return _map_cells(values, as_string)


def as_string(value: Any) -> str:
    """Return one cell as a string; see `as_strings`.

    Parameters
    ----------
    value : object
        A number, boolean, string, bytes, date or time, or a missing value.

    Returns
    -------
    str
    """
    if isinstance(value, str):
        return value.strip()
    if value is None:
        return ""
    if isinstance(value, float | np.floating):
        return "" if value != value else str(int(value)) if value.is_integer() else str(value)
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace").strip()
    if not pd.api.types.is_scalar(value):
        raise InvalidData(
            "Cells must be numbers, booleans, strings, bytes, dates or times; a cell of the table is of type "
            f"{type(value).__name__}."
        )
    if value is pd.NA or value is pd.NaT or pd.isna(value):
        return ""
    if isinstance(value, Decimal) and value.is_finite():
        digits = f"{value:f}"
        return digits.rstrip("0").rstrip(".") if "." in digits else digits
    string = str(value)
    if isinstance(value, datetime) and value.tzinfo is None and "." in string:
        return string.rstrip("0")  # as in a column of timestamps
    return string


def as_numbers(values: pd.Series[Any], name: str) -> NDArray[np.float64]:
    """Return every cell as a number, NaN for a missing value.

    Parameters
    ----------
    values : pandas.Series
        The cells of a column.
    name : str
        Name of the column, for errors; no error shows a value.

    Returns
    -------
    ndarray of float64

    Raises
    ------
    InvalidInput
        If a cell is not a number.

    Examples
    --------
    >>> as_numbers(pd.Series(["1.5", "?", "-inf"]), "age").tolist()
    [1.5, nan, -inf]
    """
    numbers, unreadable = _read_numbers(values, parse_number)
    _refuse(unreadable, name, _NOT_A_NUMBER)
    return numbers


_NOT_A_NUMBER = "no number in the numeric column '{}'; a missing value is an empty cell"


def _refuse(unreadable: NDArray[np.bool_], name: str, problem: str) -> None:
    """Raise the error of the first cell that cannot be read."""
    rows = np.flatnonzero(unreadable)
    if rows.size:
        raise InvalidData(f"{first_of(rows)} has {problem.format(name)}.")


def _read_numbers(
    values: pd.Series[Any], parse: Callable[[str], float | None]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the number of every cell, NaN for a missing value, and which cells are no numbers."""
    if isinstance(values.dtype, pd.ArrowDtype):
        column = _plain(_arrow(values))
        if pyarrow.types.is_boolean(column.type):
            column = column.cast(pyarrow.uint8())
        if pyarrow.types.is_integer(column.type) or pyarrow.types.is_floating(column.type):
            floats = pyarrow.compute.fill_null(column.cast(pyarrow.float64(), safe=False), math.nan)
            return np.asarray(floats, dtype=np.float64), np.zeros(len(values), dtype=bool)
    elif pd.api.types.is_numeric_dtype(values.dtype) and values.dtype.kind != "c":
        return values.to_numpy(dtype=np.float64, na_value=np.nan), np.zeros(len(values), dtype=bool)

    def number(value: object) -> float | None:
        if isinstance(value, bool | np.bool_ | float | np.floating):
            return float(value)
        return (parse if isinstance(value, str | bytes) else parse_number)(as_string(value))

    return _numbers_or_nan(_map_cells(values, number))


def _numbers_or_nan(numbers: NDArray[np.object_]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return numbers with NaN for None, and where None was."""
    unreadable = np.array([number is None for number in numbers], dtype=bool)
    return np.where(unreadable, math.nan, numbers).astype(np.float64), unreadable


def parse_number(string: str) -> float | None:
    """Return the number that a string stands for.

    Parameters
    ----------
    string : str
        A cell as a string.

    Returns
    -------
    float or None
        NaN for a missing value, None if the string is not a number.

    Examples
    --------
    >>> parse_number("-2.50"), parse_number("1,000")
    (-2.5, None)
    """
    if string in MISSING_MARKERS:
        return math.nan
    return float(string) if _DECIMAL.fullmatch(string) else None


def parse_date(string: str, pattern: str | None = None) -> datetime | None:
    """Return the date or timestamp that a string stands for.

    Parameters
    ----------
    string : str
        A cell as a string.
    pattern : str, optional
        The format, as for `datetime.strptime`; by default ISO 8601.

    Returns
    -------
    datetime or None
        None if the string is not a date.

    Examples
    --------
    >>> parse_date("2024-01-31 08:30"), parse_date("31.1.24", "%d.%m.%y"), parse_date("31.1.24")
    (datetime.datetime(2024, 1, 31, 8, 30), datetime.datetime(2024, 1, 31, 0, 0), None)
    """
    try:
        if pattern is not None:
            return datetime.strptime(string, pattern)
        return datetime.fromisoformat(string) if _ISO_DATE.fullmatch(string) else None
    except ValueError:
        return None


def is_missing(strings: Iterable[str]) -> NDArray[np.bool_]:
    """Return for every string whether it stands for a missing value.

    Parameters
    ----------
    strings : iterable of str
        Cells as strings.

    Returns
    -------
    ndarray of bool
    """
    return np.array([string in MISSING_MARKERS for string in strings], dtype=bool)


def is_text(strings: Iterable[str]) -> NDArray[np.bool_]:
    """Return for every string whether it is valid Unicode: whether it has no half of a surrogate pair.

    Parameters
    ----------
    strings : iterable of str
        Cells as strings.

    Returns
    -------
    ndarray of bool

    Examples
    --------
    >>> is_text(["Zoë", "\\ud800"]).tolist()
    [True, False]
    """
    return np.array([string.isascii() or not _SURROGATE.search(string) for string in strings], dtype=bool)


def _literal(string: str) -> Decimal | None:
    """Return the exact number that a category is, or None."""
    return Decimal(string) if _LITERAL.fullmatch(string) else None


def _map_distinct(strings: NDArray[np.object_], rule: Callable[[str], int]) -> NDArray[np.int64]:
    """Return the rule's integer for every string; equal strings are computed once."""
    known = {string: rule(string) for string in set(strings.tolist())}
    return np.fromiter(map(known.__getitem__, strings.tolist()), dtype=np.int64, count=len(strings))


def _holds_numbers(values: pd.Series[Any]) -> bool:
    """Return whether the type of a column allows booleans, integers or floating-point numbers alone."""
    return isinstance(values.dtype, np.dtype) and values.dtype.kind in "biuf"


def _map_cells(values: pd.Series[Any], rule: Callable[[object], object]) -> NDArray[np.object_]:
    """Return the rule's value for every cell; equal strings, categories and integers are computed once."""
    if isinstance(values.dtype, pd.StringDtype | pd.CategoricalDtype):
        codes, distinct = pd.factorize(values, use_na_sentinel=False)
        return np.array([rule(value) for value in distinct], dtype=object)[codes]
    if isinstance(values.dtype, np.dtype) and values.dtype.kind in "biu":
        codes, integers = pd.factorize(values.to_numpy())
        return np.array([rule(value) for value in integers.tolist()], dtype=object)[codes]
    return np.array([rule(value) for value in _cells(values)], dtype=object)


def _cells(values: pd.Series[Any]) -> list[Any]:
    """Return the cells as Python values; the rule follows from the declared type of the column."""
    if not isinstance(values.dtype, pd.ArrowDtype) and values.dtype.kind not in "mM":
        return values.tolist()
    column = _plain(_arrow(values))
    kind, types = column.type, pyarrow.types
    if types.is_null(kind) or types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return list(column.to_pylist())
    if types.is_decimal(kind):
        return list(column.to_pylist())
    if types.is_fixed_size_binary(kind):
        return [None if value is None else value.hex() for value in column.to_pylist()]
    if any(test(kind) for test in _STRING_TYPES):
        return list(column.cast(pyarrow.large_binary()).to_pylist())
    if types.is_temporal(kind) and not types.is_interval(kind):
        try:
            strings = column.cast(pyarrow.string())
        except pyarrow.ArrowException:
            raise InvalidData(
                f"Column '{values.name}' has the type {kind}, whose time zone is unknown on this system."
            ) from None
        for pattern, kept in _FRACTION:
            strings = pyarrow.compute.replace_substring_regex(strings, pattern, kept)
        return list(strings.to_pylist())
    raise InvalidData(
        f"Column '{values.name}' must hold numbers, booleans, strings, bytes, dates or times; its type is {kind}."
    )


def _arrow(values: pd.Series[Any]) -> Any:
    """Return a column as chunks of Arrow arrays."""
    if isinstance(values.dtype, pd.ArrowDtype):
        column = values.array.__arrow_array__()
    else:
        column = pyarrow.array(values, from_pandas=True)
    return column if isinstance(column, pyarrow.ChunkedArray) else pyarrow.chunked_array([column])


def _plain(column: Any) -> Any:
    """Return the values of dictionaries, runs and extension types, piece by piece, as the type that they have."""
    kind = column.type
    if pyarrow.types.is_dictionary(kind):
        # Arrow cannot take from strings in the view layout.
        view = pyarrow.types.is_string_view(kind.value_type) or pyarrow.types.is_binary_view(kind.value_type)
        inner = pyarrow.large_binary() if view else kind.value_type
        pieces = [piece.dictionary.cast(inner).take(piece.indices) for piece in column.chunks]
        return _plain(pyarrow.chunked_array(pieces, type=inner))
    if pyarrow.types.is_run_end_encoded(kind):
        pieces = [pyarrow.compute.run_end_decode(piece) for piece in column.chunks]
        return _plain(pyarrow.chunked_array(pieces, type=kind.value_type))
    if isinstance(kind, pyarrow.BaseExtensionType):
        pieces = [piece.storage for piece in column.chunks]
        return _plain(pyarrow.chunked_array(pieces, type=kind.storage_type))
    return column
