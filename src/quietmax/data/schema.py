"""What the owner of a table declares about it, as arguments or in a small TOML or JSON file with the same keys.

These are public facts: label, classes, persons, and what each column holds.
"""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietmax.data.cells import as_string
from quietmax.data.cohorts import COHORT_FORMS, CohortRule
from quietmax.data.encoding import (
    BooleanColumn,
    CategoricalColumn,
    Column,
    DateColumn,
    HashedColumn,
    NumericColumn,
    Scale,
    TextColumn,
    require_columns,
)
from quietmax.data.sources import RawTable
from quietmax.errors import DataUnavailable, InvalidInput

if TYPE_CHECKING:
    import pandas as pd

_ANY_COLUMN = "*"
"""Stands, in `bounds`, for every column that nothing else is declared for."""

_TYPE_KEYS = ("bounds", "categories", "dates", "booleans", "hashed", "text")
_COLUMN_KEYS = (*_TYPE_KEYS, "ignore")
"""The keys that say what a column holds; a column may be named in one of them."""

_REFINEMENTS = {
    **dict.fromkeys(("scales", "edges", "decimal", "thousands", "units"), ("bounds",)),
    "date_formats": ("dates",),
    "ignore_case": ("categories", "hashed"),
}
"""The keys that refine a declaration, and those that a column must be named in for it."""

_NO_PERSON = "Give each such row a value of its own, or delete it."

_DRAFT_HEADER = """\
# A draft. Each line under [confirm] says how a proposal was found in the records. Only facts that would be the same
# without any of these people may stay: check each proposal, correct it if needed, and delete its line under [confirm]
# or, for a fact about a column, under [confirm.bounds] and so on. When all are checked, delete these sections.
"""

_OLD_KEYS = {"identifier": "person"}
"""Keys in schema files of version 0.1, and their names now."""


@dataclass(frozen=True)
class Schema:
    """Declarations about a table; what is left out is unknown, not guessed.

    Parameters
    ----------
    label : str, optional
        Name of the label column.
    classes : tuple of str, optional
        Names of the classes, in the order of their numbers.
    bounds : mapping of str to (float, float)
        Lower and upper bound of each numeric column, which becomes one feature from 0 to 1: a number v is clipped to
        the bounds and becomes ``(v - low) / (high - low)``.  The bounds of the column "*" hold for every column that
        nothing else is declared for.
    categories : mapping of str to tuple of str
        The categories of each categorical column, which become one feature each.  A cell belongs to the category of
        the same string, else to the first one that is the same number; one that is not listed becomes zeros.
    scales : mapping of str to {"linear", "log"}
        Scale of numeric columns; "log" is ``ln(1 + v - low) / ln(1 + high - low)``.
    edges : mapping of str to tuple of float
        Rising borders inside the bounds, which cut a numeric column into intervals with one feature each.
    complete : tuple of str
        Columns without missing values; "*" stands for all columns.  In any other column a missing value has a
        feature of its own.
    ignore : tuple of str
        Columns that are not features.
    person : str, optional
        Column that tells people apart; it is not a feature.  Guarantees then hold for all rows of one person, and
        rows of one person stay on the same side of a split.
    dates : mapping of str to (str, str)
        First and last date of each column of dates, as "2024-01-31", or first and last timestamp, as "2024-01-31
        08:30:00".  Cells become numbers as in `bounds`, in days or in microseconds of UTC.
    date_formats : mapping of str to str
        How the dates of a column are written, if not as in ISO 8601: as for `datetime.strptime` ("%d.%m.%Y").
    booleans : tuple of str
        Columns of yes and no; also true and false, y and n, t and f, 1 and 0, in any case.
    decimal, thousands : mapping of str to str
        Separators of numbers that are written as strings: "." or "," and one of ".", ",", " ", "'", "_".  A thousands
        separator must stand before every third digit or nowhere.
    units : mapping of str to str
        Currency signs or units that may stand before or after such numbers, as "€" or "kg".
    hashed : mapping of str to int
        Number of buckets, from 2 to 65536, of each column of strings with very many values, such as postal codes.  A
        string becomes 1 in the bucket ``BLAKE2b(string) mod buckets``.
    text : tuple of str
        Columns of free text, each embedded by a public sentence encoder (extra `text`).
    ignore_case : tuple of str
        Categorical or hashed columns, and maybe the label and the person, whose values match in any case.
    missing_values : mapping of str to tuple of str
        Further values that stand for a missing one, such as "-999" or "unknown".
    crosses : tuple of (str, str)
        Pairs of columns whose combinations become features too.
    cohort : str, optional
        Which part of a table that grows each person belongs to, so that a model can be trained on one part after the
        other: "first_visit:month" for the month (or year, quarter, week, day) of a person's first date in a column of
        `dates`; the name of a column in `categories`, for the first of them in the declared order that a person has;
        or "hash:12" for 12 parts by a keyed hash of the person ("hash:12:7" with another public key).  A column that
        is also in `ignore` is no feature.
    defaults : mapping of str to str, float or bool
        Values that the form of the service's page is filled with; never used in training. Dates are written as in
        `dates`.
    confirm : mapping
        What `draft_schema` proposed and nobody has confirmed yet, and how it was found: a string by "label",
        "classes" and "person", and strings by column name by each of the other keys, as in
        ``{"classes": "...", "bounds": {"age": "..."}}``.  Training refuses such a schema unless `infer` is set.

    Attributes
    ----------
    unconfirmed : tuple of str
        The facts in `confirm`, for messages.

    Raises
    ------
    InvalidInput
        If a value has the wrong type.

    Examples
    --------
    >>> Schema(label="ill", classes=("no", "yes"), bounds={"age": (0, 120)}).person is None
    True
    """

    label: str | None = None
    classes: tuple[str, ...] | None = None
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scales: Mapping[str, Scale] = field(default_factory=dict)
    edges: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    complete: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    person: str | None = None
    dates: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    date_formats: Mapping[str, str] = field(default_factory=dict)
    booleans: tuple[str, ...] = ()
    decimal: Mapping[str, str] = field(default_factory=dict)
    thousands: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    hashed: Mapping[str, int] = field(default_factory=dict)
    text: tuple[str, ...] = ()
    ignore_case: tuple[str, ...] = ()
    missing_values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    crosses: tuple[tuple[str, str], ...] = ()
    cohort: str | None = None
    defaults: Mapping[str, str | float] = field(default_factory=dict)
    confirm: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None:
                object.__setattr__(self, entry.name, _parse(entry.name, value))

    @classmethod
    def from_dict(cls, declarations: Mapping[str, Any], origin: str | None = None) -> Schema:
        """Return the schema with these declarations."""
        renamed = {_OLD_KEYS.get(key, key): value for key, value in declarations.items()}
        where = "" if origin is None else f"In {origin}: "
        unknown = sorted(renamed.keys() - _KEYS.keys())
        if unknown:
            raise InvalidInput(f"{where}Unknown key '{unknown[0]}'; the keys are {', '.join(sorted(_KEYS))}.")
        return cls(**{key: _parse(key, value, where) for key, value in renamed.items()})

    @classmethod
    def from_file(cls, path: str | Path) -> Schema:
        """Read a schema from a .toml or .json file.

        Raises
        ------
        DataUnavailable
            If the file cannot be read.
        InvalidInput
            If its content is not a schema.
        """
        file = Path(path).expanduser()
        try:
            text = file.read_text(encoding="utf-8")
            content = tomllib.loads(text) if file.suffix.lower() == ".toml" else json.loads(text)
        except OSError as error:
            raise DataUnavailable(f"The schema file {file} cannot be read: {error.strerror}.") from error
        except RecursionError as error:
            raise InvalidInput(f"The schema file {file} is nested too deeply.") from error
        except ValueError as error:
            raise InvalidInput(
                f"The schema file {file} is not valid TOML or JSON: {error}. In TOML, names with blanks, dots or "
                "letters such as \u00fc need quotes."
            ) from error
        if not isinstance(content, dict):
            raise InvalidInput(f"The schema file {file} must hold one object with keys such as 'label'.")
        return cls.from_dict(content, str(file))

    def updated(self, arguments: Mapping[str, Any]) -> Schema:
        """Return the schema with further declarations, as for `from_dict`; None means not given.

        They replace those of the same key and column; columns in `ignore` are added.  What is declared here counts as
        confirmed, fact by fact: bounds of a column confirm nothing else about it.

        >>> drafted = Schema(confirm={"bounds": {"age": "from the values"}, "scales": {"age": "as under bounds"}})
        >>> drafted.updated({"bounds": {"age": (0, 120)}}).unconfirmed
        ("'age' in scales",)
        """
        given = {key: value for key, value in arguments.items() if value is not None}
        added = Schema.from_dict(given)
        values: dict[str, Any] = {}
        for key in given:
            before, value = getattr(self, key), getattr(added, key)
            if key == "ignore":
                values[key] = tuple(dict.fromkeys((*before, *value)))
            else:
                values[key] = {**before, **value} if isinstance(value, dict) else value or before
        values["confirm"] = _confirmed(self.confirm, added)
        return replace(self, **values)

    @property
    def unconfirmed(self) -> tuple[str, ...]:
        """The facts that a draft proposed and nobody has confirmed yet, for messages."""
        found: list[str] = []
        for key, how in self.confirm.items():
            found += [key] if isinstance(how, str) else [f"'{name}' in {key}" for name in how]
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Return what is declared, by key, as JSON values; `from_dict` reads it."""
        declared = {key: value for key, value in asdict(self).items() if value}
        content: dict[str, Any] = json.loads(json.dumps(declared))  # lists in the place of tuples
        return content

    def to_toml(self) -> str:
        """Return the schema as the content of a .toml file; in that of a draft, a comment says what to do with it.

        >>> print(Schema(label="ill", bounds={"age": (0, 120)}).to_toml())
        label = "ill"
        <BLANKLINE>
        [bounds]
        age = [0, 120]
        <BLANKLINE>
        """
        lines, tables = [], []
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Mapping):
                tables += _toml_tables(entry.name, value)
            elif value:
                lines.append(f"{entry.name} = {_toml(value)}")
        text = "\n".join([*lines, "", *tables] if tables else [*lines, ""])
        if not self.confirm:
            return text
        unknown = "" if self.label else '# label = "..."    the column to predict; and its classes\n'
        return f"{_DRAFT_HEADER}\n{unknown}{text}"


def _confirmed(confirm: Mapping[str, Any], added: Schema) -> dict[str, Any]:
    left: dict[str, Any] = {}
    for key, how in confirm.items():
        stated = getattr(added, key)
        if isinstance(how, str) or not (isinstance(stated, Mapping) or key == "ignore"):
            # A list replaces the one of the draft, so nothing of that is left.
            left |= {} if stated else {key: how}
        else:
            left[key] = {name: because for name, because in how.items() if name not in stated}
    # About a column that is no feature there is nothing to confirm.
    unused = {*added.ignore, added.person}
    for key, how in left.items():
        if isinstance(how, Mapping):
            left[key] = {name: because for name, because in how.items() if name not in unused}
    for key, how in added.confirm.items():
        left[key] = how if isinstance(how, str) else {**left.get(key, {}), **how}
    return {key: how for key, how in left.items() if how}


def _toml_tables(name: str, value: Mapping[str, Any]) -> list[str]:
    rows = [
        f"{_toml_key(key)} = {_toml(each)}" for key, each in value.items() if not isinstance(each, Mapping)
    ]
    inner = [(f"{name}.{key}", each) for key, each in value.items() if isinstance(each, Mapping)]
    own = ["\n".join([f"[{name}]", *rows, ""])] if rows else []
    return own + [table for each in inner for table in _toml_tables(*each)]


def _toml_key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: object) -> str:
    if isinstance(value, str):
        # A TOML string has the escapes of a JSON string, and must also escape the character 127.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if isinstance(value, Sequence):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return str(value)


def _parse(key: str, value: Any, where: str = "") -> Any:
    try:
        return _KEYS[key][0](value)
    except (TypeError, ValueError, AttributeError) as error:
        column = f"; check that of '{error}'" if isinstance(error, _WrongColumn) else ""
        raise InvalidInput(f"{where}{key} must be {_KEYS[key][1]}{column}.") from error


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value.strip()


def _string(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError
    return value


def _column(value: object) -> str:
    return _string(_name(value))


def _listed(value: object) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError
    return value


def _strings(value: object) -> tuple[str, ...]:
    return tuple(map(as_string, _listed(value)))


def _classes(value: object) -> tuple[str, ...]:
    if isinstance(value, int) and not isinstance(value, bool):
        return tuple(map(str, range(value)))
    return _strings(value)


def _numbers(value: Iterable[Any]) -> tuple[float, ...]:
    if isinstance(value, str):
        raise TypeError
    return tuple(map(float, value))


def _pair(value: Iterable[Any]) -> tuple[float, float]:
    low, high = _numbers(value)
    return low, high


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError
    return value


def _date(value: object) -> str:
    if isinstance(value, datetime.datetime):
        return value.isoformat(" ")
    return value.isoformat() if isinstance(value, datetime.date) else _string(value)


def _default(value: object) -> str | float:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, int | float) else _date(value)


def _two_dates(value: object) -> tuple[str, str]:
    first, last = _listed(value)
    return _date(first), _date(last)


def _pairs_of_names(value: Iterable[Any]) -> tuple[tuple[str, ...], ...]:
    pairs = tuple(map(_strings, value))
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError
    return pairs


class _WrongColumn(ValueError):
    """What is declared about a column has the wrong type; the message is the name of the column."""


def _of_columns(parse: Callable[[Any], Any]) -> Callable[[Mapping[object, Any]], dict[str, Any]]:
    def parsed(value: Mapping[object, Any]) -> dict[str, Any]:
        columns = {}
        for name, declared in value.items():
            try:
                columns[_name(name)] = parse(declared)
            except (TypeError, ValueError, AttributeError) as error:
                raise _WrongColumn(name) from error
        return columns

    return parsed


_SINGLE = ("label", "classes", "person")
"""The keys that say one fact about the table, not about columns."""


def _confirm(value: Mapping[str, Any]) -> dict[str, Any]:
    parse = _of_columns(_string)
    confirm = {key: _string(how) if key in _SINGLE else parse(how) for key, how in value.items()}
    if confirm.keys() - (_KEYS.keys() - {"confirm"}):
        raise TypeError
    return {key: how for key, how in confirm.items() if how}


_NAMES = (_strings, "a list of column names")

_KEYS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "label": (_column, "the name of a column"),
    "classes": (_classes, "a list of class names, or their number"),
    "bounds": (_of_columns(_pair), "a lower and an upper number for each named column"),
    "categories": (_of_columns(_strings), "a list of names for each named column"),
    "scales": (_of_columns(_string), "'linear' or 'log' for each named column"),
    "edges": (_of_columns(_numbers), "a list of numbers for each named column"),
    "complete": _NAMES,
    "ignore": _NAMES,
    "person": (_column, "the name of a column"),
    "dates": (_of_columns(_two_dates), "a first and a last date for each named column"),
    "date_formats": (_of_columns(_string), "a format such as '%d.%m.%Y' for each named column"),
    "booleans": _NAMES,
    "decimal": (_of_columns(_string), "'.' or ',' for each named column"),
    "thousands": (_of_columns(_string), "a separator such as ',' for each named column"),
    "units": (_of_columns(_string), "a sign or unit such as '€' for each named column"),
    "hashed": (_of_columns(_integer), "a number of buckets for each named column"),
    "text": _NAMES,
    "ignore_case": _NAMES,
    "missing_values": (_of_columns(_strings), "a list of values for each named column"),
    "crosses": (_pairs_of_names, "a list of pairs of column names"),
    "cohort": (_column, COHORT_FORMS),
    "defaults": (_of_columns(_default), "a value for each named column"),
    "confirm": (
        _confirm,
        "a string for 'label', 'classes' and 'person', and one for each named column under the other keys",
    ),
}
"""How the value of each key is read, and what it must be."""


def _check_declarations(frame: pd.DataFrame, schema: Schema, label: str | None) -> None:
    keys = (*_TYPE_KEYS, *_REFINEMENTS, "complete", "missing_values", "defaults")
    named = [name for key in keys for name in getattr(schema, key) if name != _ANY_COLUMN]
    named += [name for name in schema.ignore if name]  # a column without a name is ignored anyway
    single = [name for name in (label, schema.person) if name is not None]
    require_columns(frame, [*single, *named, *(name for pair in schema.crosses for name in pair)])
    declared = [name for key in _TYPE_KEYS for name in getattr(schema, key)] + single
    twice = sorted({name for name in declared if declared.count(name) > 1})
    if twice:
        raise InvalidInput(
            f"Column '{twice[0]}' is declared more than once; only one of `label`, `person`, "
            f"{', '.join(f'`{key}`' for key in _TYPE_KEYS[:-1])} and `{_TYPE_KEYS[-1]}` may name it."
        )
    for key, kinds in _REFINEMENTS.items():
        others = {name for kind in _TYPE_KEYS if kind not in kinds for name in getattr(schema, kind)}
        wrong = sorted(others & set(getattr(schema, key)))
        if wrong:
            raise InvalidInput(
                f"Column '{wrong[0]}' is named in `{key}`, which is for columns in "
                f"{' or '.join(f'`{kind}`' for kind in kinds)} only."
            )


def declared_cohorts(schema: Schema, table: RawTable) -> CohortRule | None:
    """Return what says which cohort a person is in, if the schema does."""
    if schema.cohort is None:
        return None
    columns = {name: _declared_column(name, schema, table) for name in (*schema.dates, *schema.categories)}
    return CohortRule.of(
        schema.cohort, {name: column for name, column in columns.items() if column is not None}
    )


def _declared_column(name: str, schema: Schema, table: RawTable) -> Column | None:
    either: dict[str, Any] = {
        "missing": not table.complete and not {name, _ANY_COLUMN} & set(schema.complete),
        "missing_values": schema.missing_values.get(name, ()),
    }
    ignore_case = name in schema.ignore_case
    if name in schema.categories:
        return CategoricalColumn(name, schema.categories[name], ignore_case=ignore_case, **either)
    if name in schema.booleans:
        return BooleanColumn(name, **either)
    if name in schema.dates:
        return DateColumn(name, *schema.dates[name], schema.date_formats.get(name), **either)
    if name in schema.hashed:
        return HashedColumn(name, schema.hashed[name], ignore_case=ignore_case, **either)
    if name in schema.text:
        return TextColumn(name, **either)
    bounds = schema.bounds.get(name, schema.bounds.get(_ANY_COLUMN, table.type_bounds))
    if bounds is None:
        return None
    return NumericColumn(
        name,
        *bounds,
        scale=schema.scales.get(name, "linear"),
        edges=schema.edges.get(name, ()),
        decimal=schema.decimal.get(name, "."),
        thousands=schema.thousands.get(name, ""),
        unit=schema.units.get(name, ""),
        **either,
    )
