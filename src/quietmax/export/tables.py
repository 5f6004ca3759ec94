"""A released model of a table without Quietmax: as one SQL statement, or as one HTML file that needs no network.

Both look up what a row's cell adds to the scores. `Reading` says how each column is read: where its cells begin, and
how its values are spelled. Where a number's or date's cells begin is found by asking the encoding itself, to the last
bit: rounding, logarithms and bounds are all in these borders.

`statement.sql` is the statement: `CASE` terms for the columns, their sum, softmax and the answer; `sqlglot` writes
names, strings and types in the dialect. A row with a cell that Quietmax would refuse, or that SQL cannot tell, has NULL
for all answers, rather than another answer. `calculator.html` is the page.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from quietmax import __version__
from quietmax._io import atomic_write
from quietmax._lazy import required
from quietmax.data.cells import MISSING_MARKERS, NO, YES, exact_number
from quietmax.data.encoding import (
    BooleanColumn,
    CategoricalColumn,
    Column,
    DateColumn,
    Encoding,
    HashedColumn,
    NumericColumn,
    TextColumn,
    quoted,
)
from quietmax.errors import InvalidInput
from quietmax.estimators.figures import decision_in_words, threshold_of
from quietmax.estimators.head.effects import Additive
from quietmax.estimators.head.weights import TableWeights
from quietmax.estimators.serialization import PrivateModel
from quietmax.export.released import _metadata, _open_released
from quietmax.models.features.tabular import CROSSED_LEVELS, table_cells
from quietmax.spending import DESCRIPTION_FILE

BLANKS = "".join(character for character in map(chr, range(0x3001)) if character.isspace())
"""What `str.strip` removes."""
CASED = range(0x20000)
"""Characters that `str.casefold` may change."""
_SIGN = -(2**63)


@dataclass(frozen=True)
class Reading:
    """Which cell each value of a column has; None for a value that is an error."""

    column: Column
    missing: int  # The cell of a missing value
    starts: tuple[Any, ...] = ()  # From which number, or date as ISO 8601, on each further cell begins
    words: tuple[tuple[str, int], ...] = ()  # The cell of each string, folded if case is ignored
    numbers: tuple[tuple[Decimal, int], ...] = ()  # The cell of strings that are such a number
    other: int | None = None  # The cell of all other strings
    coarse: int = 1  # So many cells are one in a cross

    @property
    def folded(self) -> bool:
        """Whether strings match in any case."""
        return isinstance(self.column, BooleanColumn) or getattr(self.column, "ignore_case", False)

    @property
    def codes(self) -> list[float]:
        """The numbers that stand for a missing value."""
        assert isinstance(self.column, NumericColumn)
        parsed = map(self.column.parse, self.column.missing_values)
        return [code for code in parsed if code is not None and code == code]

    @property
    def markers(self) -> list[str]:
        """The strings that stand for a missing value."""
        return sorted(MISSING_MARKERS.union(self.column.missing_values))


def open_additive(folder: str | Path, form: str) -> tuple[PrivateModel, Additive, list[Reading]]:
    """Open a released model whose scores are sums over columns, and read its columns."""
    model = _open_released(folder)
    if not isinstance(model.classifier, TableWeights):
        raise InvalidInput(
            f"Only heads and linear DP-SGD models of a table with a schema, without columns of text, can be exported "
            f"to {form}: only their scores are sums over columns. Export this model to ONNX, skops or MLflow."
        )
    sums = model.additive()
    return model, sums, [_reading(column, sums.cells.levels, form) for column in sums.encoding.columns]


def refused(column: Column, form: str) -> InvalidInput:
    """Return the error for a column that a format cannot hold."""
    reasons = {HashedColumn: "hashes (BLAKE2b)", TextColumn: "tokenizers"}
    needed = reasons.get(type(column), f"columns of the type '{column.kind}'")
    return InvalidInput(
        f"Column '{column.name}' cannot be exported to {form}, which has no operator for {needed}. The formats skops "
        "and MLflow can hold it."
    )


def refused_dates(column: DateColumn, form: str) -> InvalidInput:
    """Return the error for dates that a format cannot read."""
    return InvalidInput(
        f"Column '{column.name}' cannot be exported to {form}: only dates such as 2024-01-31 or 31.01.2024 can, "
        "without the time of day."
    )


def date_parts(column: DateColumn) -> tuple[str, str] | None:
    """Return the order of year, month and day (as in "dmY") and the mark between them; None for other formats."""
    written = column.format or "%Y-%m-%d"
    order, mark = written[1::3], written[2:3]
    plain = written == mark.join(f"%{part}" for part in order) and mark in ("-", ".", "/")
    return (order, mark) if plain and sorted(order) == sorted("Ymd") and len(column.low) == 10 else None


@cache
def characters_by_case() -> dict[str, list[str]]:
    """Return the characters that `str.casefold` changes, by what it makes of them."""
    found = defaultdict(list)
    for character in map(chr, CASED):
        if (folded := character.casefold()) != character:
            found[folded].append(character)
    return found


def _reading(column: Column, levels: int, form: str) -> Reading:
    """Ask the encoding how a column is read."""
    cell_of = _cell_of(column, levels)
    missing = int(cell_of([None])[0])
    coarse = levels // CROSSED_LEVELS if column.is_share else 1
    if isinstance(column, NumericColumn):
        plain = _cell_of(replace(column, missing_values=()), levels)
        low, high = _keys(np.array([column.low, column.high], np.float64)).tolist()
        count = levels if column.is_share else len(column.indicated)
        starts = _floats(_borders(lambda keys: plain(_floats(keys)), low, high, count))
        return Reading(column, missing, tuple(starts.tolist()), coarse=coarse)
    if isinstance(column, DateColumn):
        if date_parts(column) is None or column.bounds is None:
            raise refused_dates(column, form)
        iso = _cell_of(replace(column, format=None, missing_values=()), levels)
        days = _borders(lambda keys: iso(_days(keys)), *column.bounds, levels)
        return Reading(column, missing, tuple(_days(days)), coarse=coarse)
    if isinstance(column, BooleanColumn):
        no, yes = cell_of(["no", "yes"]).tolist()
        words = [(word, cell) for group, cell in ((NO, no), (YES, yes)) for word in sorted(group)]
        return Reading(column, missing, words=tuple(words), numbers=((Decimal(0), no), (Decimal(1), yes)))
    if not isinstance(column, CategoricalColumn):
        raise refused(column, form)
    places = [*zip(column.categories, cell_of(column.categories).tolist(), strict=True)]
    fold = str.casefold if column.ignore_case else str
    numbers: dict[Decimal, int] = {}
    for category, cell in places:
        if (number := exact_number(category)) is not None:
            numbers.setdefault(number, cell)
    return Reading(
        column,
        missing,
        words=tuple((fold(category), cell) for category, cell in places),
        numbers=tuple(numbers.items()),
        other=int(cell_of([unlisted(column)])[0]),
        coarse=coarse,
    )


def unlisted(column: Column) -> str:
    """Return a string that is no category."""
    return "another value" + "!" * max(map(len, column.indicated))


def _cell_of(column: Column, levels: int) -> Callable[[Any], NDArray[np.int64]]:
    """Return the function that says which cells the values of a column have, by the encoding and the map."""
    encoding = Encoding((replace(column, name="x"),), "y", ("no", "yes"))  # type: ignore[type-var]
    cells = table_cells(encoding, levels)
    if cells is None:
        raise refused(column, "this format")
    return lambda values: cells.transform(encoding.encode(pd.DataFrame({"x": values})))[:, 0].astype(np.int64)


def _borders(
    cell_of: Callable[[NDArray[np.int64]], NDArray[np.int64]], low: int, high: int, count: int
) -> NDArray[np.int64]:
    """Return the smallest integer in every cell but the first; a cell never falls from `low` to `high`."""
    wanted = np.arange(1, count)
    below, above = np.full(count - 1, low), np.full(count - 1, high)
    for _ in range(65):
        middle = (below >> 1) + (above >> 1) + (below & above & 1)
        reached = cell_of(middle) >= wanted
        below, above = np.where(reached, below, middle), np.where(reached, middle, above)
    return above


def _keys(numbers: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return integers in the order of float64, one after the other."""
    bits = numbers.view(np.int64)
    return np.where(bits >= 0, bits, _SIGN - bits)


def _floats(keys: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.where(keys >= 0, keys, _SIGN - keys).view(np.float64)


def _days(ordinals: NDArray[np.int64]) -> list[str]:
    return [date.fromordinal(ordinal).isoformat() for ordinal in ordinals.tolist()]


def terms_of(sums: Additive) -> list[NDArray[np.float64]]:
    """Return what the constant, each column and each cross add to the scores: (classes, cells) each."""
    *added, constant = np.split(sums.weights.weights, np.cumsum(sums.weights.sizes), axis=1)
    return [constant, *added]


# --- SQL ------------------------------------------------------------------------------------------------------------

DIALECTS = ("duckdb", "postgres", "sqlite", "bigquery", "snowflake")
_MOST_WEIGHTS, _MOST_TERMS = 200_000, 1_500
"""Limits of a statement: databases have at most 1,600 columns, and no database reads a text of any length."""
_DATE = (
    "^([0-9]{4}-(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|[0-9]{4}-(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|[0-9]{4}-02-(0[1-9]|1[0-9]|2[0-8])"
    "|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
    "([T ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9]([.][0-9]+)?)?(Z|[+-]([01][0-9]|2[0-3])(:?[0-5][0-9])?)?)?$"
)
"""The days that exist, and the time of a day."""
_TYPES = {
    NumericColumn: "a type of numbers",
    CategoricalColumn: "text, or a type whose text is the category",
    BooleanColumn: "boolean, or text such as yes and no",
    DateColumn: "date, timestamp, or text as {}",
}


def export_sql(
    folder: str | Path,
    file: str | Path | None,
    dialect: str,
    *,
    table: str = "people",
    keep: Sequence[str] = (),
    reasons: bool = False,
) -> str:
    """Write a released model of a table as a SQL statement.

    The statement reads a table that has the columns of the training by their names, and returns for each row these
    columns, ``prediction``, and ``probability of`` each class. A column of numbers must have a type of numbers. Any
    other column may be text, or have a type whose text Quietmax reads, such as dates and booleans. NULL and NaN are
    missing values. A row with a cell that cannot be read has NULL for its answers.

    Parameters
    ----------
    folder : str or Path
        The model folder.
    file : str, Path or None
        The file to write; None to write none.
    dialect : {"duckdb", "postgres", "sqlite", "bigquery", "snowflake"}
        The dialect of SQL.
    table : str, default="people"
        The table to read, as the dialect writes it.
    keep : sequence of str, optional
        Further columns of the table that stand beside the answers, such as an identifier.
    reasons : bool, default=False
        Whether the statement also returns what the constant and each column and cross added to the score of each class,
        as ``contribution of COLUMN to CLASS``.

    Returns
    -------
    str
        The statement.
    """
    if dialect not in DIALECTS:
        raise InvalidInput(f"The SQL dialect must be one of {quoted(DIALECTS)}, got {dialect!r}.")
    model, sums, readings = open_additive(folder, "SQL")
    weights, terms = sums.weights.weights.size, len(sums.summands) * len(model.classes)
    if weights > _MOST_WEIGHTS or terms > _MOST_TERMS:
        raise InvalidInput(
            f"The model is too large for SQL: it has {weights:,} weights in {terms:,} terms, but at most "
            f"{_MOST_WEIGHTS:,} and {_MOST_TERMS:,} are possible. Export it to ONNX."
        )
    provenance = _metadata(model, (Path(folder) / DESCRIPTION_FILE).read_bytes())["provenance"]
    text = _filled(
        _Dialect(dialect),
        model,
        sums,
        readings,
        provenance=provenance,
        table=table,
        kept=dict.fromkeys([*keep, *(reading.column.name for reading in readings)]),
        summands=sums.summands if reasons else (),
    )
    if file is not None:
        atomic_write(Path(file), lambda staging: staging.write_text(text, encoding="utf-8"))
    return text


class _Dialect:
    """How a dialect writes names, strings and types."""

    def __init__(self, dialect: str) -> None:
        self._glot, self.dialect = required("sqlglot", "An export to SQL", extra="sql"), dialect
        self.double, self.text = (
            self._glot.exp.DataType.build(kind).sql(dialect) for kind in ("double", "text")
        )

    def name(self, name: str) -> str:
        return str(self._glot.exp.to_identifier(name, quoted=True).sql(self.dialect))

    def string(self, text: str) -> str:
        return str(self._glot.exp.Literal.string(text).sql(self.dialect))

    def strings(self, texts: Iterable[str]) -> str:
        return ", ".join(map(self.string, texts))

    def table(self, table: str) -> str:
        try:
            return str(self._glot.exp.to_table(table, dialect=self.dialect).sql(self.dialect))
        except self._glot.errors.SqlglotError:
            raise InvalidInput(f"This is no name of a table in {self.dialect}: {table!r}.") from None

    def matches(self, value: str, pattern: str) -> str:
        exp = self._glot.exp
        return str(
            exp.RegexpLike(this=exp.column(value), expression=exp.Literal.string(pattern)).sql(self.dialect)
        )

    @property
    def blanks(self) -> str:
        """The blanks as an expression: as they are, editors may change them."""
        function = "CHAR" if self.dialect == "sqlite" else "CHR"
        return " || ".join(f"{function}({ord(blank)})" for blank in BLANKS)


def _filled(
    sql: _Dialect,
    model: PrivateModel,
    sums: Additive,
    readings: Sequence[Reading],
    *,
    table: str,
    **values: Any,
) -> str:
    """Fill in the statement."""
    jinja2 = required("jinja2", "An export to SQL", extra="sql")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"name": sql.name, "string": sql.string, "number": _literal, "line": _line}
    crossed = {place for pair in sums.cells.crosses for place in pair}
    cells = ["0", *(f"qm_cell_{place}" for place in range(len(readings)))]
    in_pairs = [
        f"qm_{'cell' if each.coarse == 1 else 'coarse'}_{place}" for place, each in enumerate(readings)
    ]
    for one, other in sums.cells.crosses:
        cells.append(f"{in_pairs[one]} * {sums.cells.crossed_size(other)} + {in_pairs[other]}")
    terms = zip(cells, terms_of(sums), strict=True)
    return str(
        environment.from_string(Path(__file__).with_name("statement.sql").read_text("utf-8")).render(
            {"as": "AS" if sql.dialect in ("bigquery", "snowflake") else "AS MATERIALIZED"},
            sql=sql,
            version=__version__,
            guarantee=model.guarantee,
            decision=decision_in_words(model.costs, model.classes),
            table=sql.table(table),
            columns=[_column(sql, each, place, place in crossed) for place, each in enumerate(readings)],
            terms=[{"cell": cell, "weights": weights.tolist()} for cell, weights in terms],
            classes=model.classes,
            outputs=[*range(len(model.classes))],
            costs=model.costs,
            threshold=threshold_of(model.costs) if len(model.classes) == 2 else None,
            **values,
        )
    )


def _line(value: object) -> str:
    """Return a text in one line."""
    return " ".join(str(value).split())


def _column(sql: _Dialect, reading: Reading, place: int, crossed: bool) -> dict[str, Any]:
    """Return what the statement says about a column."""
    column, value, text = reading.column, f"qm_value_{place}", f"qm_text_{place}"
    form = (isinstance(column, DateColumn) and column.format) or "YYYY-MM-DD"
    found: dict[str, Any] = {
        "plain": column.name,
        "type": _TYPES[type(column)].format(form),
        "kind": "words",
        "missing": reading.missing,
        "other": reading.other,
        "markers": sql.strings(reading.markers),
        "cells": [("cell", 1), ("coarse", reading.coarse)][: 1 + (crossed and reading.coarse > 1)],
        "text": value,
        "rewritten": None,
    }
    if isinstance(column, NumericColumn):
        codes, starts = ", ".join(map(_literal, reading.codes)), [*map(_literal, reading.starts)]
        return {**found, "kind": "number", "codes": codes, "starts": starts}
    if isinstance(column, DateColumn):
        found |= {"kind": "date", "text": text, "rewritten": _iso(column, value)}
        return {**found, "is_date": sql.matches(text, _DATE), "starts": [*map(sql.string, reading.starts)]}
    if reading.folded:
        found |= {"text": text, "rewritten": _folded(sql, reading, value)}
    groups: dict[int, list[str]] = {}
    for word, cell in reading.words:
        groups.setdefault(cell, []).append(word)
    numbers = [(*map(sql.strings, _spellings(number)), cell) for number, cell in reading.numbers]
    return {
        **found,
        "words": [(sql.strings(each), cell) for cell, each in groups.items()],
        "numbers": numbers,
    }


def _folded(sql: _Dialect, reading: Reading, value: str) -> str:
    """Return what `str.casefold` makes of a string, as far as the result can be one of the words.

    The lower case of databases depends on their settings. Here each character is replaced by what Python makes of it,
    if that is part of a word.
    """
    table, words = characters_by_case(), [word for word, _ in reading.words]
    pairs = [(each, part) for part in table for each in table[part] if any(part in word for word in words)]
    if sql.dialect == "sqlite":  # has no TRANSLATE, and its LOWER changes A to Z alone
        value, pairs = f"LOWER({value})", [pair for pair in pairs if not pair[0].isascii()]
    elif single := [pair for pair in pairs if len(pair[1]) == 1]:
        before, after = (sql.string("".join(each)) for each in zip(*single, strict=True))
        value, pairs = f"TRANSLATE({value}, {before}, {after})", [pair for pair in pairs if len(pair[1]) > 1]
    for character, part in pairs:
        value = f"REPLACE({value}, {sql.string(character)}, {sql.string(part)})"
    return value


def _literal(number: float) -> str:
    """Return a literal of float64: with an exponent, or DuckDB takes it for a decimal."""
    text = repr(float(number))
    return text if "e" in text else f"{text}e0"


def _spellings(number: Decimal) -> tuple[list[str], list[str]]:
    """Return how a number is written without a point, and with one but without the zeros at its end."""
    sign = "-" if number < 0 else ""
    integer, _, fraction = f"{abs(number):f}".partition(".")
    fraction = fraction.rstrip("0")
    if number == 0:
        return ["0", "-0"], ["0.", "-0.", ".", "-."]
    if not fraction:
        return [f"{sign}{integer}"], [f"{sign}{integer}."]
    return [], [f"{sign}{integer}.{fraction}", *([f"{sign}.{fraction}"] if integer == "0" else [])]


def _iso(column: DateColumn, value: str) -> str:
    """Return a date of the column's format as ISO 8601; what has another form is left as it is."""
    order, mark = date_parts(column) or ("", "")
    if (order, mark) == ("Ymd", "-"):
        return value
    if (order, mark) == ("Ydm", "-"):  # cannot be told from the text of a date
        raise refused_dates(column, "SQL")
    starts, start = {}, 1
    for part in order:
        starts[part], start = start, start + (5 if part == "Y" else 3)
    year, month, day = (f"SUBSTR({value}, {starts[part]}, {4 if part == 'Y' else 2})" for part in "Ymd")
    marks = " AND ".join(f"SUBSTR({value}, {starts[part] - 1}, 1) = '{mark}'" for part in order[1:])
    formed = f"LENGTH({value}) = 10 AND {marks}"
    return f"CASE WHEN {formed} THEN {year} || '-' || {month} || '-' || {day} ELSE {value} END"


# --- HTML -----------------------------------------------------------------------------------------------------------


def export_html(folder: str | Path, file: str | Path) -> None:
    """Write a released model of a table as an HTML file: a form, the answer, its reasons and the guarantee.

    The file needs no network and no Quietmax. Its content security policy allows its own script and style by their
    SHA-256, and nothing else. The script has the function ``answer``, which takes a row as an object of strings, as the
    form has them, and returns ``label``, ``probabilities`` and ``contributions``.

    Parameters
    ----------
    folder : str or Path
        The model folder.
    file : str or Path
        The file to write.
    """
    model, sums, readings = open_additive(folder, "HTML")
    constant, *weights = terms_of(sums)
    costs, defaults = model.costs, dict(sums.encoding.defaults)
    data = {
        "fields": [{**_field(reading), "default": defaults.get(reading.column.name)} for reading in readings],
        "crosses": [(one, other, sums.cells.crossed_size(other)) for one, other in sums.cells.crosses],
        "summands": sums.summands,
        "constant": constant[:, 0].tolist(),
        "weights": [each.tolist() for each in weights],
        "classes": model.classes,
        "threshold": threshold_of(costs) if costs and len(costs) == 2 else None,
        "costs": costs,
        "decision": decision_in_words(costs, model.classes),
        "about": _metadata(model, (Path(folder) / DESCRIPTION_FILE).read_bytes()),
    }
    page = Path(__file__).with_name("calculator.html").read_text("utf-8")
    script, style = (
        _hash(re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[0]) for tag in ("script", "style")
    )
    values = {
        "policy": f"default-src 'none'; script-src '{script}'; style-src '{style}'; base-uri 'none'; "
        "form-action 'none'",
        "title": escape(f"Prediction of {sums.encoding.label}"),
        "guarantee": "\n".join(f"<p>{escape(line)}</p>" for line in _words(model)),
        "data": json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
    }
    text = re.sub(r"\{\{ (\w+) \}\}", lambda found: values[found[1]], page)
    atomic_write(Path(file), lambda staging: staging.write_text(text, encoding="utf-8"))


def _hash(content: str) -> str:
    return f"sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _words(model: PrivateModel) -> list[str]:
    """Return the guarantee with its strength, what it means, and what it rests on."""
    guarantee = model.guarantee
    return [
        f"{guarantee.summary}.",
        *guarantee.in_words("everything computed from this model"),
        f"{guarantee}",
        *(f"Assumption: {each}" for each in guarantee.assumptions),
    ]


def _field(reading: Reading) -> dict[str, Any]:
    """Return a column as a field of the form, and how its value is read."""
    column = reading.column
    field: dict[str, Any] = {
        "name": column.name,
        "required": not column.missing,
        "kind": "select",
        "missing": reading.missing,
        "coarse": reading.coarse,
        "starts": reading.starts,
        "other": reading.other,
        "codes": [],
        "choices": [],
        "low": None,
        "hint": "",
    }
    if isinstance(column, NumericColumn | DateColumn):
        field |= {"low": column.low, "high": column.high}
    if isinstance(column, NumericColumn):
        hint = f"{column.low:,.12g} to {column.high:,.12g} {column.unit}".strip()
        return {**field, "kind": "number", "codes": reading.codes, "hint": hint}
    if isinstance(column, DateColumn):
        return {**field, "kind": "date", "hint": f"{column.low} to {column.high}"}
    fold, cells = str.casefold if reading.folded else str, dict(reading.words)
    choices = [(word, cells[fold(word)]) for word in column.indicated if word]
    return {**field, "choices": choices, "unlisted": unlisted(column)}
