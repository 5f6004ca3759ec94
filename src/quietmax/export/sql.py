"""A released model of a table as one SQL statement: `CASE` terms for the columns, their sum, softmax and the answer.

`statement.sql` is the statement; `sqlglot` writes names, strings and types in the dialect. A row with a cell that
Quietmax would refuse, or that SQL cannot tell, has NULL for all answers, rather than another answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from quietmax import __version__
from quietmax._io import atomic_write
from quietmax._lazy import required
from quietmax.data.encoding import BooleanColumn, CategoricalColumn, DateColumn, NumericColumn, quoted
from quietmax.errors import InvalidInput
from quietmax.estimators.figures import decision_in_words, threshold_of
from quietmax.estimators.head.effects import Additive
from quietmax.estimators.serialization import PrivateModel
from quietmax.export.reading import (
    BLANKS,
    Reading,
    characters_by_case,
    date_parts,
    open_additive,
    refused_dates,
    terms_of,
)
from quietmax.export.released import _metadata
from quietmax.spending import DESCRIPTION_FILE

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
