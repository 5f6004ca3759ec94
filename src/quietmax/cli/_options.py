"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from quietmax.errors import InvalidInput

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder of the data files; default: QUIETMAX_DATA, else the user's cache folder."),
]
Download = Annotated[bool, typer.Option("--download", help="Fetch missing official files first.")]
Seed = Annotated[
    int, typer.Option(min=0, help="Fixes the split, the initial weights and the order of records.")
]
Names = Annotated[
    list[str] | None,
    typer.Option("--datasets", help="One or more data sets, as in: --datasets mnist location."),
]

AdultEncoding = Annotated[
    str | None, typer.Option("--encoding", help="adult: 'codes' (the paper's) or 'one-hot'.")
]

_OWN = "Own table"


@dataclass(frozen=True)
class TableOptions:
    """The declarations about an own table."""

    label: Annotated[str | None, typer.Option(help="The label column.", rich_help_panel=_OWN)] = None
    classes: Annotated[
        str | None,
        typer.Option(
            help="The classes in order, as in no,yes; or their number if labels are 0, 1, ...",
            rich_help_panel=_OWN,
        ),
    ] = None
    bounds: Annotated[
        list[str] | None,
        typer.Option(
            help="Public bounds of a numeric column, column=low:high; repeat.", rich_help_panel=_OWN
        ),
    ] = None
    categories: Annotated[
        list[str] | None,
        typer.Option(help="Public categories of a column, column=a,b,c; repeat.", rich_help_panel=_OWN),
    ] = None
    ignore: Annotated[
        list[str] | None, typer.Option(help="A column that is not a feature; repeat.", rich_help_panel=_OWN)
    ] = None
    identifier: Annotated[
        str | None, typer.Option(help="The column that tells people apart.", rich_help_panel=_OWN)
    ] = None
    schema: Annotated[
        Path | None,
        typer.Option(help="A TOML or JSON file with all of these declarations.", rich_help_panel=_OWN),
    ] = None
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Read what is not declared off the records; a guarantee is then conditional.",
            rich_help_panel=_OWN,
        ),
    ] = False

    def given(self) -> dict[str, Any]:
        """Those that were given, as `quietmax.load` takes them."""
        read = {
            **vars(self),
            "classes": class_names(self.classes),
            "bounds": column_bounds(self.bounds),
            "categories": column_categories(self.categories),
        }
        return {name: value for name, value in read.items() if value}


def class_names(text: str | None) -> int | list[str] | None:
    """Read names in order, or one whole number: the number of classes.

    >>> class_names("no, yes"), class_names("2"), class_names("0,1")
    (['no', 'yes'], 2, ['0', '1'])
    """
    if not text:
        return None
    names = [name.strip() for name in text.split(",")]
    if len(names) > 1:
        return names
    if not names[0].isdecimal() or int(names[0]) < 2:
        raise InvalidInput(
            f"--classes {text!r} names fewer than two classes; give names, as in no,yes, or a number, as in 2."
        )
    return int(names[0])


def column_bounds(texts: list[str] | None) -> dict[str, tuple[float, float]]:
    """Read ``column=low:high``.

    >>> column_bounds(["age=0:100"])
    {'age': (0.0, 100.0)}
    """
    bounds = {}
    for text in texts or []:
        name, _, span = text.rpartition("=")
        low, _, high = span.partition(":")
        try:
            bounds[name] = (float(low), float(high))
        except ValueError:
            raise InvalidInput(
                f"--bounds {text!r} is not of the form column=low:high; write it as in age=0:100."
            ) from None
    return bounds


def column_categories(texts: list[str] | None) -> dict[str, tuple[str, ...]]:
    """Read ``column=first,second,...``.

    >>> column_categories(["sex=Female,Male"])
    {'sex': ('Female', 'Male')}
    """
    categories = {}
    for text in texts or []:
        name, equals, values = text.partition("=")
        if not equals or not name or not values:
            raise InvalidInput(
                f"--categories {text!r} is not of the form column=first,second; write it as in sex=Female,Male."
            )
        categories[name] = tuple(value.strip() for value in values.split(","))
    return categories


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command for Typer in which each parameter that is a dataclass is replaced by the fields of the dataclass.

    Fields are annotated like a command's own parameters; Typer reads them from the signature given here.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    parameters: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            assert isinstance(kind, type)
            groups[parameter.name] = kind
            parameters += _parameters(kind)
        else:
            parameters.append(parameter.replace(annotation=kind, kind=Parameter.KEYWORD_ONLY))

    @wraps(command)
    def called(**given: Any) -> None:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **made)

    called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _parameters(group: type[Any]) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in fields(group)
    ]
