"""Options that several commands share, and groups of options as dataclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from quietmax.cli._output import progress_bar
from quietmax.errors import InvalidInput

if TYPE_CHECKING:
    from quietmax.data.records import Split

_TABLE_PANEL = "Your own table"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder of the data files. Default: $QUIETMAX_DATA, else the user's cache folder."),
]
Download = Annotated[bool, typer.Option("--download", help="Download missing official files first.")]
Seed = Annotated[
    int, typer.Option(min=0, help="Public seed of the split, the initial weights and the batches.")
]
Names = Annotated[
    list[str] | None,
    typer.Option("--datasets", help="One or more data sets, as in: --datasets mnist location."),
]
AdultEncoding = Annotated[
    str | None, typer.Option("--encoding", help="Data set adult: codes (as in the paper) or one-hot.")
]


def arguments_of(group: object) -> dict[str, Any]:
    """The options of a group that were given, by field name.

    Parameters
    ----------
    group : dataclass instance
        A group of options, None (or an empty list) where an option was not given.

    Returns
    -------
    dict
        Keyword arguments for the function or class that the group's fields are named after.
    """
    return {name: value for name, value in vars(group).items() if value is not None and value != []}


@dataclass(frozen=True)
class TableOptions:
    """The public facts about the user's own table, as `quietmax.load` takes them."""

    label: Annotated[str | None, typer.Option(help="Label column.", rich_help_panel=_TABLE_PANEL)] = None
    classes: Annotated[
        str | None,
        typer.Option(
            help="Class names in order, as in no,yes; or their number if the labels are 0, 1, ...",
            rich_help_panel=_TABLE_PANEL,
        ),
    ] = None
    bounds: Annotated[
        list[str] | None,
        typer.Option(
            help="Public bounds of a numeric column, as in age=0:100. Repeatable.",
            rich_help_panel=_TABLE_PANEL,
        ),
    ] = None
    categories: Annotated[
        list[str] | None,
        typer.Option(
            help="Public categories of a column, as in sex=Female,Male. Repeatable.",
            rich_help_panel=_TABLE_PANEL,
        ),
    ] = None
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help="Column that is not a feature, besides those of the schema. Repeatable.",
            rich_help_panel=_TABLE_PANEL,
        ),
    ] = None
    person: Annotated[
        str | None,
        typer.Option(
            help="Column that says whose row it is; not a feature. The guarantee is then for whole persons.",
            rich_help_panel=_TABLE_PANEL,
        ),
    ] = None
    schema: Annotated[
        Path | None,
        typer.Option(
            help="TOML or JSON file with these facts. Default: the .toml file of the same name beside the table.",
            rich_help_panel=_TABLE_PANEL,
        ),
    ] = None
    infer: Annotated[
        bool,
        typer.Option(
            "--infer",
            help="Read undeclared or unconfirmed facts from the records. The guarantee is then conditional.",
            rich_help_panel=_TABLE_PANEL,
        ),
    ] = False

    def given(self) -> dict[str, Any]:
        """The facts that were given, as keyword arguments of `quietmax.load`."""
        facts = {
            "label": self.label,
            "classes": class_names(self.classes),
            "bounds": column_bounds(self.bounds),
            "categories": column_categories(self.categories),
            "ignore": self.ignore,
            "person": self.person,
            "schema": self.schema,
            "infer": self.infer,
        }
        return {name: value for name, value in facts.items() if value}


@dataclass(frozen=True)
class DataOptions(TableOptions):
    """Which records of a data set or table to use, and how to read them."""

    records: Annotated[
        int | None,
        typer.Option(
            help="Data sets of the paper: number of training records, and of test records. "
            "Your own table: see --holdout."
        ),
    ] = None
    holdout: Annotated[
        float | None,
        typer.Option(
            help="Share of the persons (without --person: of the rows) that are not trained on, as in 0.2. "
            "Default: 0, everybody is trained on.",
            rich_help_panel=_TABLE_PANEL,
        ),
    ] = None
    seed: Seed = 0
    encoding: AdultEncoding = None
    data_dir: DataDir = None
    download: Download = False

    def load(self, name: str, *, quiet: bool) -> Split:
        """Load and split a data set or table, with a progress bar.

        Parameters
        ----------
        name : str
            Name of a data set, or path of a table.
        quiet : bool
            Show no progress.

        Returns
        -------
        Split
            Training part, and test part or holdout; for a data set of the paper also a pool.

        Raises
        ------
        InvalidInput
            If an option does not apply to the data.
        """
        from quietmax.data.load import load

        facts = self.given()
        if self.holdout is not None:
            facts["holdout"] = self.holdout
        with progress_bar("loading", quiet=quiet) as progress:
            return load(
                name,
                records=self.records,
                seed=self.seed,
                encoding=self.encoding,
                data_dir=self.data_dir,
                download=self.download,
                progress=lambda _, done, total: progress(done, total or done),
                **facts,
            )


def class_names(text: str | None) -> int | list[str] | None:
    """Parse the value of ``--classes``: names separated by commas, or the number of classes.

    Parameters
    ----------
    text : str or None
        The value, None if the option was not given.

    Returns
    -------
    int, list of str or None
        The number of classes, or their names in order.

    Examples
    --------
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
            f"--classes must be at least two names (no,yes) or a number of at least 2, got {text!r}."
        )
    return int(names[0])


def column_bounds(texts: list[str] | None) -> dict[str, tuple[float, float]]:
    """Parse the values of ``--bounds``.

    Parameters
    ----------
    texts : list of str or None
        Values of the form ``column=low:high``.

    Returns
    -------
    dict of str to pair of float
        Lowest and highest value by column.

    Examples
    --------
    >>> column_bounds(["age=0:100"])
    {'age': (0.0, 100.0)}
    """
    bounds = {}
    for text in texts or []:
        name, _, interval = text.rpartition("=")
        low, _, high = interval.partition(":")
        try:
            bounds[name] = (float(low), float(high))
        except ValueError:
            raise InvalidInput(
                f"--bounds must have the form column=low:high, as in age=0:100, got {text!r}."
            ) from None
    return bounds


def column_categories(texts: list[str] | None) -> dict[str, tuple[str, ...]]:
    """Parse the values of ``--categories``.

    Parameters
    ----------
    texts : list of str or None
        Values of the form ``column=first,second,...``.

    Returns
    -------
    dict of str to tuple of str
        Categories by column.

    Examples
    --------
    >>> column_categories(["sex=Female,Male"])
    {'sex': ('Female', 'Male')}
    """
    categories = {}
    for text in texts or []:
        name, equals, values = text.partition("=")
        if not equals or not name or not values:
            raise InvalidInput(
                f"--categories must have the form column=first,second, as in sex=Female,Male, got {text!r}."
            )
        categories[name] = tuple(value.strip() for value in values.split(","))
    return categories


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of its parameters that are dataclasses.

    Parameters
    ----------
    command : callable
        A command whose parameters are all keyword-only. The fields of its dataclass parameters are annotated like
        Typer parameters.

    Returns
    -------
    callable
        A command with a flat signature for Typer; it builds the dataclasses and calls ``command``.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    parameters: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            assert isinstance(kind, type)
            groups[parameter.name] = kind
            parameters += _parameters_of(kind)
        else:
            parameters.append(parameter.replace(annotation=kind, kind=Parameter.KEYWORD_ONLY))

    @wraps(command)
    def flat(**given: Any) -> None:
        built = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **built)

    flat.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _parameters_of(group: type[Any]) -> list[Parameter]:
    """The fields of a dataclass as keyword-only parameters."""
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
