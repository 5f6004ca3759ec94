"""What the user declares about a table of their own: label, classes, bounds, categories.

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

from quietmax.data.encoding import Scale, as_text
from quietmax.errors import DataUnavailable, InvalidInput

ANY_COLUMN = "*"
_RENAMED = {"identifier": "person"}
"""Keys of schema files of version 0.1, and their names now."""


@dataclass(frozen=True)
class Schema:
    """Declarations about a table; whatever is left out is unknown, not guessed.

    `classes` are the names of the classes in order, or their number if labels are 0, 1, ...  `bounds` and
    `categories` declare a column as numeric or categorical; the bounds of the column "*" hold for every
    column that nothing else is declared for.  `scales` and `edges` refine numeric columns (see
    NumericColumn), `complete` names columns without missing values, `ignore` columns that are not features.
    `person` names a column that tells records apart: rows with the same person stay on the same side
    of a split.
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
    def of(cls, content: Mapping[str, Any], origin: str = "the given schema") -> Schema:
        """Return the schema with these declarations, refusing unknown keys and wrong types.

        >>> Schema.of({"label": "ill", "classes": 2, "bounds": {"age": [0, 120]}}).classes
        ('0', '1')
        """
        content = {_RENAMED.get(key, key): value for key, value in content.items()}
        known = {entry.name for entry in fields(cls)}
        unknown = sorted(set(content) - known)
        if unknown:
            raise InvalidInput(
                f"{origin[:1].upper()}{origin[1:]} has the unknown key '{unknown[0]}', but the keys are "
                f"{', '.join(sorted(known))}; correct it."
            )
        values = {}
        for key, value in content.items():
            try:
                values[key] = _PARSERS[key](value)
            except (TypeError, ValueError, AttributeError) as error:
                raise InvalidInput(f"In {origin}, '{key}' must be {_EXPECTED[key]}; correct it.") from error
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> Schema:
        """Read a schema from a .toml or .json file."""
        file = Path(path).expanduser()
        try:
            text = file.read_text(encoding="utf-8")
            content = tomllib.loads(text) if file.suffix.lower() == ".toml" else json.loads(text)
        except OSError as error:
            raise DataUnavailable(
                f"The schema file {file} cannot be read ({error.strerror}); give the path of a .toml or "
                ".json file."
            ) from error
        except RecursionError as error:
            raise InvalidInput(
                f"The schema file {file} is nested too deeply; write it as the documentation shows."
            ) from error
        except ValueError as error:
            raise InvalidInput(
                f"The schema file {file} is not valid TOML or JSON ({error}); correct it."
            ) from error
        if not isinstance(content, dict):
            raise InvalidInput(
                f"The schema file {file} must hold one object with keys such as 'label'; correct it."
            )
        return cls.of(content, f"the schema file {file}")

    def with_arguments(self, arguments: Mapping[str, Any]) -> Schema:
        """Return the schema with the given declarations added; they win over those of the same key and column."""
        given = {key: value for key, value in arguments.items() if value is not None}
        added = Schema.of(given, "the arguments")
        values: dict[str, Any] = {}
        for key in given:
            before, value = getattr(self, key), getattr(added, key)
            values[key] = {**before, **value} if isinstance(value, dict) else value or before
        return replace(self, **values)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError
    return value


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError
    return tuple(as_text(item) for item in value)


def _classes(value: object) -> tuple[str, ...]:
    if isinstance(value, int) and not isinstance(value, bool):
        return tuple(str(number) for number in range(value))
    return _texts(value)


def _numbers(value: Sequence[Any]) -> tuple[float, ...]:
    if isinstance(value, str):
        raise TypeError
    return tuple(float(number) for number in value)


def _pair(value: Sequence[Any]) -> tuple[float, float]:
    low, high = _numbers(value)
    return low, high


_PARSERS: Mapping[str, Any] = {
    "label": _text,
    "classes": _classes,
    "bounds": lambda value: {_text(name): _pair(pair) for name, pair in value.items()},
    "categories": lambda value: {_text(name): _texts(texts) for name, texts in value.items()},
    "scales": lambda value: {_text(name): _text(scale) for name, scale in value.items()},
    "edges": lambda value: {_text(name): _numbers(edges) for name, edges in value.items()},
    "complete": _texts,
    "ignore": _texts,
    "person": _text,
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
