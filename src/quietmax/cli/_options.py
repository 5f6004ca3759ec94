"""Options that several commands share, and groups of options as dataclasses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_type_hints

import typer

from quietmax.cli._output import as_document, in_json, print_note, progress_bar
from quietmax.errors import InvalidInput, unknown_name

if TYPE_CHECKING:
    from quietmax._ray import RayEngine
    from quietmax.data.records import Split
    from quietmax.data.tables import TableRows
    from quietmax.estimators.blocks import LocalEngine
    from quietmax.mechanisms.base import Mechanism
    from quietmax.models.stacked import Loss

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Seed = Annotated[
    int, typer.Option(min=0, help="Public seed of the split, the initial weights and the batches.")
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Compute on the Ray cluster at this address (host:port or auto), or on one that is started on this "
        "machine. Requires quietmax[ray].",
    ),
]
Model = Annotated[Path, typer.Argument(help="Model folder, written by 'quietmax train'.")]
Alpha = Annotated[
    float | None,
    "Constant of the convexified loss; 0 is the cross-entropy. Default: the data set's, 1 for your own table.",
]


def flag(name: str) -> str:
    """How the command line writes the name of an argument."""
    return f"--{name.replace('_', '-')}"


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command --json, and one option for each field of its parameters that are dataclasses.

    A text in the annotation of a field or parameter, ``Annotated[int, "Number of classes.", {"min": 2}]``, is the help
    of its option, and what follows are other settings of it. Texts in the annotation of a dataclass name the fields
    that the command does not have. The fields that a group declares are shown in the panel ``PANEL`` of the help, if it
    has one.
    """
    groups: dict[str, type[Any]] = {}
    parameters: list[Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for parameter in signature(command).parameters.values():
        kind, *left_out = _taken_apart(hints[parameter.name])
        if is_dataclass(kind):
            assert isinstance(kind, type)
            groups[parameter.name] = kind
            parameters += [each for each in _parameters_of(kind) if each.name not in left_out]
        else:
            annotation = _with_option(parameter.name, hints[parameter.name])
            parameters.append(parameter.replace(annotation=annotation, kind=Parameter.KEYWORD_ONLY))

    own_json = any(parameter.name == "as_json" for parameter in parameters)
    if not own_json:
        parameters.append(Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=Json))

    @wraps(command)
    def _flat(**given: Any) -> None:
        as_json = given["as_json"] if own_json else given.pop("as_json")
        built = {
            name: group(
                **{field.name: given.pop(field.name) for field in fields(group) if field.name in given}
            )
            for name, group in groups.items()
        }
        with as_document(wanted=as_json):
            command(**given, **built)

    _flat.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    _flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return _flat


def _taken_apart(hint: Any) -> tuple[Any, ...]:
    """A type and what its annotation adds to it."""
    return get_args(hint) if hasattr(hint, "__metadata__") else (hint,)


def _parameters_of(group: type[Any]) -> Iterator[Parameter]:
    """The fields of a dataclass as keyword-only parameters."""
    hints = get_type_hints(group, include_extras=True)
    owners = {
        name: base for base in reversed(group.__mro__) for name in vars(base).get("__annotations__", {})
    }
    for field in fields(group):
        default = Parameter.empty if field.default is MISSING else field.default
        annotation = _with_option(
            field.name, hints[field.name], vars(owners[field.name]).get("PANEL"), on=default is True
        )
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _with_option(name: str, hint: Any, panel: str | None = None, *, on: bool = False) -> Any:
    """The annotation of an option with its help, if the annotation has a text."""
    kind, *metadata = _taken_apart(hint)
    if not metadata or not isinstance(metadata[0], str):
        return hint
    names = (flag(name),) if kind is bool and not on else ()  # --no-... only for a bool that is on by default
    settings = metadata[1] if len(metadata) > 1 else {}
    return Annotated[kind, typer.Option(*names, help=metadata[0], rich_help_panel=panel, **settings)]


def arguments_of(group: object) -> dict[str, Any]:
    """The options of a group that were given, by field name."""
    return {name: value for name, value in vars(group).items() if value is not None and value != []}


@dataclass(frozen=True)
class TableOptions:
    """Names of columns of the user's own table, as `quietmax.load` takes them; a schema says what is in them."""

    PANEL: ClassVar = "Your own table"

    schema: Annotated[
        Path | None,
        "TOML or JSON file with what is public about the table. Default: the .toml file of the same name beside it.",
    ] = None
    label: Annotated[str | None, "Label column."] = None
    person: Annotated[
        str | None,
        "Column that says whose row it is; not a feature. The guarantee is then for whole persons.",
    ] = None
    infer: Annotated[
        bool, "Read undeclared or unconfirmed facts from the records. The guarantee is then conditional."
    ] = False

    def given(self) -> dict[str, Any]:
        """The facts that were given, as keyword arguments of `quietmax.load`."""
        return {field.name: value for field in fields(TableOptions) if (value := getattr(self, field.name))}


@dataclass(frozen=True)
class SplitOptions:
    """Which records of a data set or table to use."""

    records: Annotated[
        int | None,
        "Data sets of the paper: number of training records, and of test records. Default: that of the data set.",
    ] = None
    holdout: Annotated[
        float | None,
        "Your own table: share of the persons (without a person column: of the rows) that are not trained on, as in "
        "0.2.",
    ] = None
    seed: Seed = 0

    def load(self, name: str, **facts: Any) -> Split:
        """Load and split a data set or table."""
        from quietmax.data.registry import load

        chosen = {field.name: getattr(self, field.name) for field in fields(SplitOptions)}
        with progress_bar("loading"):
            return load(name, **chosen, **facts)


@dataclass(frozen=True)
class DataOptions(SplitOptions, TableOptions):
    """Which records of a data set or table to use, and how to read them."""

    def load(self, name: str, **facts: Any) -> Split:
        """Load and split a data set or table."""
        return super().load(name, **self.given(), **facts)

    def rows(self, name: str) -> TableRows:
        """Prepare a table that is read part by part."""
        from quietmax.data.registry import load_rows

        if self.records is not None:
            raise InvalidInput(
                f"records applies only to registered data sets; '{name}' trains on all of its rows except the share "
                "given as `holdout`."
            )
        return load_rows(name, holdout=self.holdout, seed=self.seed, **self.given())


@dataclass(frozen=True)
class EngineOptions:
    """Where a command computes, and how it reads tables that may not fit into memory."""

    PANEL: ClassVar = "Your own table"

    max_memory: Annotated[
        str | None,
        "Read the table part by part, and keep at most this much of its rows in memory, as in 512M or 4G; the rest "
        "goes to temporary files. Default: 512M for a folder or a pattern, no limit for one file.",
    ] = None
    cache_dir: Annotated[
        Path | None,
        "Folder for the temporary files, which are removed at the end. Default: that of the operating system.",
    ] = None
    resume: Annotated[
        bool,
        "Continue a training that was interrupted: the encoded rows, which are private, stay in --cache-dir until a "
        "training on the same files ends well.",
    ] = False
    ray: Ray = None

    def reads_parts(self, data: str) -> bool:
        """Whether a table is read part by part: a folder, a pattern, or one file whose memory is limited."""
        from quietmax.data.registry import datasets
        from quietmax.data.sources import FILE_SUFFIXES, names_several_files

        several = data not in datasets() and names_several_files(data)
        given = self.max_memory is not None or self.cache_dir is not None
        if given and not several and Path(data).suffix.lower() not in FILE_SUFFIXES:
            name = "--cache-dir" if self.max_memory is None else "--max-memory"
            raise InvalidInput(f"{name} applies only to CSV, TSV and Parquet files and folders of them.")
        return several or given

    def engine(self) -> LocalEngine | RayEngine:
        """Where rows are kept, whether they stay there, and where a command computes."""
        from quietmax._ray import RayEngine
        from quietmax.estimators.blocks import LocalEngine

        if self.ray is not None:
            for name in ("max_memory", "cache_dir", "resume"):
                if getattr(self, name) not in (None, False):
                    raise InvalidInput(f"{flag(name)} cannot be combined with --ray.")
            return RayEngine(self.ray)
        if self.cache_dir is not None and not self.cache_dir.expanduser().is_dir():
            raise InvalidInput(f"cache_dir must be a folder that exists, got '{self.cache_dir}'.")
        limit = None if self.max_memory is None else _memory_size(self.max_memory)
        report = None if in_json() else print_note
        return LocalEngine(limit, self.cache_dir, report=report, resume=self.resume)


def _memory_size(text: str) -> int:
    """Parse the value of ``--max-memory``: bytes, or a number with the unit K, M, G or T."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise InvalidInput(f"max_memory must be a size, as in 512M or 4G, got {text!r}.")
    return int(float(found[1]) * 2 ** (10 * " KMGT".index(found[2].upper() or " ")))


def mechanism_of(name: str) -> Mechanism:
    """The paper's mechanism, or that of a plug-in."""
    from quietmax.mechanisms.algorithm1 import Algorithm1
    from quietmax.mechanisms.base import plugin_mechanisms

    known: dict[str, Mechanism] = {
        "algorithm1": Algorithm1("gaussian"),
        "algorithm1-laplace": Algorithm1("laplace"),
        **plugin_mechanisms(),
    }
    if name not in known:
        raise unknown_name("mechanism", name, known)
    return known[name]


def loss_of(alpha: float | None, data: str = "") -> Loss:
    """The convexified loss with the constant of --alpha, by default that of the data set; 0 is the cross-entropy."""
    from quietmax.data.registry import datasets
    from quietmax.models.stacked import Convexified, CrossEntropy

    if alpha is None:
        alpha = datasets()[data].alpha if data in datasets() else 1.0
    return CrossEntropy() if alpha == 0 else Convexified(alpha)
