"""What the owner of a table declares about it: label, classes, persons, and what each column holds.

These are public facts.  They come as arguments or in a small TOML or JSON file with the same keys:

    label = "income"
    classes = ["<=50K", ">50K"]
    person = "customer_id"
    ignore = ["row"]
    complete = ["age"]                                  # no missing values
    booleans = ["smoker"]                               # yes and no, true and false, 1 and 0
    ignore_case = ["region"]                            # "North" is "NORTH"
    crosses = [["education", "sex"]]                    # combinations as features
    bounds = { age = [17, 90], gain = [0, 99999] }      # numbers
    scales = { gain = "log" }
    edges = { age = [30, 45, 60] }
    decimal = { gain = "," }                            # 1.234,50
    thousands = { gain = "." }
    units = { gain = "€" }                              # 1.234,50 €
    categories = { sex = ["Female", "Male"] }
    dates = { joined = ["2010-01-01", "2025-12-31"] }
    date_formats = { joined = "%d.%m.%Y" }
    hashed = { zip = 64 }                               # strings with very many values, in 64 buckets
    text = ["note"]                                     # free text, embedded by a public sentence encoder
    missing_values = { age = ["-999", "unknown"] }
    confirm.bounds = { age = "from the values" }        # a proposal that nobody has confirmed yet
"""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietmax.data.cells import as_string
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
COLUMN_KEYS = (*_TYPE_KEYS, "ignore")
"""The keys that say what a column holds; a column may be named in one of them."""

NO_PERSON = "Give each such row a value of its own, or delete it."
"""The way out where rows have no person."""

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
        Lower and upper bound of each numeric column.  The bounds of the column "*" hold for every column that
        nothing else is declared for.
    categories : mapping of str to tuple of str
        The categories of each categorical column.
    scales : mapping of str to {"linear", "log"}
        Scale of numeric columns; see `NumericColumn`.
    edges : mapping of str to tuple of float
        Intervals of numeric columns; see `NumericColumn`.
    complete : tuple of str
        Columns without missing values; "*" stands for all columns.
    ignore : tuple of str
        Columns that are not features.
    person : str, optional
        Column that tells people apart; it is not a feature.  Guarantees then hold for all rows of one person, and
        rows of one person stay on the same side of a split.
    dates : mapping of str to (str, str)
        First and last date, or timestamp, of each column of dates; see `DateColumn`.
    date_formats : mapping of str to str
        How the dates of a column are written, if not as in ISO 8601; see `DateColumn`.
    booleans : tuple of str
        Columns of yes and no; see `BooleanColumn`.
    decimal, thousands : mapping of str to str
        Separators of numeric columns that are written as strings; see `NumericColumn`.
    units : mapping of str to str
        Currency signs or units beside the numbers of such columns; see `NumericColumn`.
    hashed : mapping of str to int
        Number of buckets of each column of strings with very many values; see `HashedColumn`.
    text : tuple of str
        Columns of free text; see `TextColumn`.
    ignore_case : tuple of str
        Categorical or hashed columns, and maybe the label and the person, whose values match in any case.
    missing_values : mapping of str to tuple of str
        Further values that stand for a missing one.
    crosses : tuple of (str, str)
        Pairs of columns whose combinations become features too.
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
        known = {entry.name for entry in fields(cls)}
        unknown = sorted(set(renamed) - known)
        where = "" if origin is None else f"In {origin}: "
        if unknown:
            raise InvalidInput(f"{where}Unknown key '{unknown[0]}'; the keys are {', '.join(sorted(known))}.")
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
        """Return the schema with further declarations, which replace those of the same key and column.

        Columns in `ignore` are added to those of the schema.

        What is declared here counts as confirmed, fact by fact: bounds of a column confirm nothing else about it.

        Parameters
        ----------
        arguments : mapping
            Declarations as for `from_dict`; None means not given.

        Returns
        -------
        Schema

        Raises
        ------
        InvalidInput
            If a key is unknown or a value has the wrong type.

        Examples
        --------
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
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {key: _json_value(value) for key, value in values.items() if value}

    def to_toml(self) -> str:
        """Return the schema as the content of a .toml file.

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
        return "\n".join([*lines, "", *tables] if tables else [*lines, ""])


def _confirmed(confirm: Mapping[str, Any], added: Schema) -> dict[str, Any]:
    """Return what is still to be confirmed after some declarations were added."""
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
    """Return a mapping as a table of TOML, and the mappings in it as tables of their own."""
    rows = [
        f"{_toml_key(key)} = {_toml(each)}" for key, each in value.items() if not isinstance(each, Mapping)
    ]
    inner = [(f"{name}.{key}", each) for key, each in value.items() if isinstance(each, Mapping)]
    own = ["\n".join([f"[{name}]", *rows, ""])] if rows else []
    return own + [table for each in inner for table in _toml_tables(*each)]


def _json_value(value: Any) -> Any:
    """Return tuples as lists and mappings as dictionaries."""
    if isinstance(value, Mapping):
        return {name: _json_value(listed) for name, listed in value.items()}
    return [_json_value(item) for item in value] if isinstance(value, tuple) else value


def _toml_key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: object) -> str:
    """Return a string, number or sequence as TOML."""
    if isinstance(value, str):
        # A TOML string has the escapes of a JSON string, and must also escape the character 127.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if isinstance(value, Sequence):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return str(value)


def _parse(key: str, value: Any, where: str = "") -> Any:
    """Return the value of a key as the schema stores it."""
    try:
        return _KEYS[key][0](value)
    except (TypeError, ValueError, AttributeError) as error:
        column = f"; check that of '{error}'" if isinstance(error, _WrongColumn) else ""
        raise InvalidInput(f"{where}{key} must be {_KEYS[key][1]}{column}.") from error


def _string(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError
    return value


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value.strip()


def _strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError
    return tuple(as_string(item) for item in value)


def _classes(value: object) -> tuple[str, ...]:
    if isinstance(value, int) and not isinstance(value, bool):
        return tuple(str(number) for number in range(value))
    return _strings(value)


def _numbers(value: Sequence[Any]) -> tuple[float, ...]:
    if isinstance(value, str):
        raise TypeError
    return tuple(float(number) for number in value)


def _pair(value: Sequence[Any]) -> tuple[float, float]:
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


def _two_dates(value: object) -> tuple[str, str]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError
    first, last = value
    return _date(first), _date(last)


def _pairs_of_names(value: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    pairs = tuple(map(_strings, value))
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError
    return pairs


def _column(value: object) -> str:
    return _string(_name(value))


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


_KEYS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "label": (_column, "the name of a column"),
    "classes": (_classes, "a list of class names, or their number"),
    "bounds": (_of_columns(_pair), "a lower and an upper number for each named column"),
    "categories": (_of_columns(_strings), "a list of names for each named column"),
    "scales": (_of_columns(_string), "'linear' or 'log' for each named column"),
    "edges": (_of_columns(_numbers), "a list of numbers for each named column"),
    "complete": (_strings, "a list of column names"),
    "ignore": (_strings, "a list of column names"),
    "person": (_column, "the name of a column"),
    "dates": (_of_columns(_two_dates), "a first and a last date for each named column"),
    "date_formats": (_of_columns(_string), "a format such as '%d.%m.%Y' for each named column"),
    "booleans": (_strings, "a list of column names"),
    "decimal": (_of_columns(_string), "'.' or ',' for each named column"),
    "thousands": (_of_columns(_string), "a separator such as ',' for each named column"),
    "units": (_of_columns(_string), "a sign or unit such as '€' for each named column"),
    "hashed": (_of_columns(_integer), "a number of buckets for each named column"),
    "text": (_strings, "a list of column names"),
    "ignore_case": (_strings, "a list of column names"),
    "missing_values": (_of_columns(_strings), "a list of values for each named column"),
    "crosses": (_pairs_of_names, "a list of pairs of column names"),
    "confirm": (
        _confirm,
        "a string for 'label', 'classes' and 'person', and one for each named column under the other keys",
    ),
}
"""How the value of each key is read, and what it must be."""


_REFINEMENTS = {
    "scales": ("bounds",),
    "edges": ("bounds",),
    "decimal": ("bounds",),
    "thousands": ("bounds",),
    "units": ("bounds",),
    "date_formats": ("dates",),
    "ignore_case": ("categories", "hashed"),
}
"""The keys that refine a declaration, and those that a column must be named in for it."""


def check_declarations(frame: pd.DataFrame, schema: Schema, label: str | None) -> None:
    """Refuse declarations about columns that do not exist, or that contradict each other."""
    keys = (*_TYPE_KEYS, *_REFINEMENTS, "complete", "missing_values")
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


def declared_column(name: str, schema: Schema, table: RawTable) -> Column | None:
    """Return a column of a table as declared, or None if nothing is declared for it."""
    missing = not table.complete and not {name, _ANY_COLUMN} & set(schema.complete)
    values, ignore_case = schema.missing_values.get(name, ()), name in schema.ignore_case
    if name in schema.categories:
        return CategoricalColumn(
            name, schema.categories[name], missing=missing, ignore_case=ignore_case, missing_values=values
        )
    if name in schema.booleans:
        return BooleanColumn(name, missing, values)
    if name in schema.dates:
        return DateColumn(name, *schema.dates[name], schema.date_formats.get(name), missing, values)
    if name in schema.hashed:
        return HashedColumn(name, schema.hashed[name], missing, ignore_case, values)
    if name in schema.text:
        return TextColumn(name, missing, values)
    bounds = schema.bounds.get(name, schema.bounds.get(_ANY_COLUMN, table.type_bounds))
    if bounds is None:
        return None
    return NumericColumn(
        name,
        *bounds,
        scale=schema.scales.get(name, "linear"),
        edges=schema.edges.get(name, ()),
        missing=missing,
        decimal=schema.decimal.get(name, "."),
        thousands=schema.thousands.get(name, ""),
        missing_values=values,
        unit=schema.units.get(name, ""),
    )
