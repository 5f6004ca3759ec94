"""What the owner of a table declares about it: label, classes, bounds, categories.

These are public facts.  They come as arguments or in a small TOML or JSON file with the same keys:

    label = "income"
    classes = ["<=50K", ">50K"]
    ignore = ["row"]
    person = "person"
    complete = ["age"]
    bounds = { age = [17, 90], gain = [0, 99999] }
    scales = { gain = "log" }
    edges = { age = [30, 45, 60] }
    categories = { sex = ["Female", "Male"] }
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from quietmax.data.encoding import Scale, as_string
from quietmax.errors import DataUnavailable, InvalidInput

ANY_COLUMN = "*"
"""Stands, in `bounds`, for every column that nothing else is declared for."""

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
        Columns without missing values.
    ignore : tuple of str
        Columns that are not features.
    person : str, optional
        Column that tells people apart; it is not a feature.  Rows of one person stay on the same side of a split.

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

    @classmethod
    def from_dict(cls, declarations: Mapping[str, Any], origin: str | None = None) -> Schema:
        """Return the schema with these declarations.

        Parameters
        ----------
        declarations : mapping
            Values by the names of the parameters of `Schema`; `classes` may also be their number, if the labels
            are 0, 1, ...
        origin : str, optional
            The file that the declarations come from, for errors.

        Returns
        -------
        Schema

        Raises
        ------
        InvalidInput
            If a key is unknown or a value has the wrong type.

        Examples
        --------
        >>> Schema.from_dict({"label": "ill", "classes": 2, "bounds": {"age": [0, 120]}}).classes
        ('0', '1')
        """
        renamed = {_OLD_KEYS.get(key, key): value for key, value in declarations.items()}
        known = {entry.name for entry in fields(cls)}
        unknown = sorted(set(renamed) - known)
        where = "" if origin is None else f"In {origin}: "
        if unknown:
            raise InvalidInput(f"{where}Unknown key '{unknown[0]}'; the keys are {', '.join(sorted(known))}.")
        values = {}
        for key, value in renamed.items():
            try:
                values[key] = _PARSERS[key](value)
            except (TypeError, ValueError, AttributeError) as error:
                raise InvalidInput(f"{where}{key} must be {_EXPECTED[key]}.") from error
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> Schema:
        """Read a schema from a file.

        Parameters
        ----------
        path : str or Path
            A .toml or .json file.

        Returns
        -------
        Schema

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
            raise InvalidInput(f"The schema file {file} is not valid TOML or JSON: {error}.") from error
        if not isinstance(content, dict):
            raise InvalidInput(f"The schema file {file} must hold one object with keys such as 'label'.")
        return cls.from_dict(content, str(file))

    def updated(self, arguments: Mapping[str, Any]) -> Schema:
        """Return the schema with further declarations, which replace those of the same key and column.

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
        """
        given = {key: value for key, value in arguments.items() if value is not None}
        added = Schema.from_dict(given)
        values: dict[str, Any] = {}
        for key in given:
            before, value = getattr(self, key), getattr(added, key)
            values[key] = {**before, **value} if isinstance(value, dict) else value or before
        return replace(self, **values)


def _string(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError
    return value


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


_PARSERS: Mapping[str, Any] = {
    "label": _string,
    "classes": _classes,
    "bounds": lambda value: {_string(name): _pair(pair) for name, pair in value.items()},
    "categories": lambda value: {_string(name): _strings(listed) for name, listed in value.items()},
    "scales": lambda value: {_string(name): _string(scale) for name, scale in value.items()},
    "edges": lambda value: {_string(name): _numbers(edges) for name, edges in value.items()},
    "complete": _strings,
    "ignore": _strings,
    "person": _string,
}
_EXPECTED = {
    "label": "the name of a column",
    "classes": "a list of class names, or their number",
    "bounds": "a lower and an upper number for each named column",
    "categories": "a list of names for each named column",
    "scales": "'linear' or 'log' for each named column",
    "edges": "a list of numbers for each named column",
    "complete": "a list of column names",
    "ignore": "a list of column names",
    "person": "the name of a column",
}
