"""Loading: a data set by name, or the user's own file, as encoded records or as a split."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from quietmax.data.download import DownloadProgress, fetch
from quietmax.data.records import Records, Split, hold_out, split
from quietmax.data.registry import dataset, stand_in_for
from quietmax.data.schema import Schema
from quietmax.data.sources import TableRows, table_rows
from quietmax.data.tables import is_table_path, read_records
from quietmax.errors import DataUnavailable, InvalidInput, check_type


class RegisteredOptions(TypedDict, total=False):
    """Options for a registered data set."""

    data_dir: str | os.PathLike[str] | None
    download: bool  # Whether to fetch official files that are missing
    progress: DownloadProgress | None  # Called during a download; see `fetch`
    verify: bool  # Whether to compare contents with known checksums; True by default
    encoding: str | None  # How to encode a data set that offers a choice (adult: "codes" or "one-hot")


class TableOptions(TypedDict, total=False):
    """Options for the user's own file."""

    schema: Schema | str | Path | None
    label: str | None
    classes: int | Sequence[str] | None
    bounds: Mapping[str, tuple[float, float]] | None
    categories: Mapping[str, Sequence[str]] | None
    scales: Mapping[str, str] | None
    edges: Mapping[str, Sequence[float]] | None
    complete: Sequence[str] | None
    ignore: Sequence[str] | None
    person: str | None
    dates: Mapping[str, tuple[str, str]] | None
    date_formats: Mapping[str, str] | None
    booleans: Sequence[str] | None
    decimal: Mapping[str, str] | None
    thousands: Mapping[str, str] | None
    units: Mapping[str, str] | None
    hashed: Mapping[str, int] | None
    text: Sequence[str] | None
    ignore_case: Sequence[str] | None
    missing_values: Mapping[str, Sequence[str]] | None
    crosses: Sequence[tuple[str, str]] | None
    confirm: Mapping[str, object] | None
    infer: bool  # Whether to read from the records what is not declared; the encoding lists it in `inferred`
    features: str  # Name of the array of features in an NPZ file


class Options(RegisteredOptions, TableOptions, total=False):
    """All options of `load` and `load_records`."""


_IGNORED_WHERE_UNUSED = {"data_dir", "progress", "verify", "features"}


def load(
    name: str | Path,
    *,
    records: int | None = None,
    holdout: float | None = None,
    seed: int = 0,
    **options: Unpack[Options],
) -> Split:
    """Load a data set and split it.

    The user's own table is the training set, except for the persons that are held out.  A data set of the paper is
    split as in the paper, into a training set, a test set of the same size and a pool.

    Parameters
    ----------
    name : str or Path
        A registered data set (see `datasets`) or the path of a CSV, TSV, Parquet or NPZ file.
    records : int, optional
        Registered data sets only: size of the training set and of the test set; by default the paper's.
    holdout : float, optional
        Share of the persons (without a `person` column: of the rows) that are held out, as in 0.2; see `hold_out`.
        By default 0 for the user's own table (everybody trains), and 0.2 for the data set `fair`.
    seed : int
        Public seed of the split.
    **options
        See `RegisteredOptions` for a registered data set and `TableOptions` for a file.

    Returns
    -------
    Split

    Raises
    ------
    DataUnavailable
        If a file is missing or damaged.
    InvalidInput
        If the name is unknown, an option does not apply, or a table does not match its declarations.

    Examples
    --------
    >>> data = load("mnist-5k", seed=1)
    >>> len(data.train), len(data.test), len(data.pool), data.classes
    (2000, 2000, 1000, 10)
    """
    check_type(name, (str, Path), "name", "the name of a data set or the path of a file")
    if records is not None and holdout is not None:
        raise InvalidInput("records and `holdout` are two ways to split; only one of them may be given.")
    if is_table_path(name):
        if records is not None:
            raise InvalidInput(
                f"records applies only to registered data sets; '{name}' trains on all of its rows except the share "
                "given as `holdout`."
            )
        return hold_out(load_records(name, **options), holdout or 0.0, seed=seed)
    encoded, chosen = load_records(name, **options), dataset(str(name))
    share = chosen.holdout if holdout is None else holdout
    if records is None and share is not None:
        return hold_out(encoded, share, seed=seed)
    return split(encoded, size=chosen.records if records is None else records, seed=seed)


def load_records(name: str | Path, **options: Unpack[Options]) -> Records:
    """Load all records of a data set, without splitting them.

    Parameters
    ----------
    name : str or Path
        A registered data set or the path of a file, as for `load`.
    **options
        As for `load`.

    Returns
    -------
    Records

    Raises
    ------
    DataUnavailable
        If a file is missing or damaged.
    InvalidInput
        If the name is unknown, an option does not apply, or a table does not match its declarations.
    """
    unknown = sorted(options.keys() - Options.__annotations__.keys())
    if unknown:
        raise TypeError(f"quietmax.data.load has no keyword argument '{unknown[0]}'")
    check_type(name, (str, Path), "name", "the name of a data set or the path of a file")
    is_table = is_table_path(name)
    _check_options(name, options, is_table=is_table)
    return _load_table(name, options) if is_table else _load_registered(str(name), options)


def load_rows(
    name: str | Path, *, holdout: float | None = None, seed: int = 0, **options: Unpack[Options]
) -> TableRows:
    """Prepare a table of any size: its rows are read and encoded part by part, when they are needed."""
    _check_options(name, options, is_table=True)
    if options.get("infer"):
        raise InvalidInput(
            f"infer reads facts from all records at once, so it cannot be used for '{name}', which is read part by "
            "part: a schema must declare them."
        )
    declared = {key: options.get(key) for key in Schema.__dataclass_fields__}
    schema = find_schema(name, options.get("schema")).updated(declared)
    return table_rows(name, schema, holdout=holdout or 0.0, seed=seed)


def _check_options(name: str | Path, options: Options, *, is_table: bool) -> None:
    """Refuse options that do not apply to a table, or to a registered data set."""
    foreign = (RegisteredOptions if is_table else TableOptions).__annotations__.keys() - _IGNORED_WHERE_UNUSED
    wrong = sorted(key for key, value in options.items() if key in foreign and value)
    if wrong:
        kind = "registered data sets" if is_table else "files (.csv, .tsv, .parquet, .npz)"
        raise InvalidInput(f"{wrong[0]} applies only to {kind}, not to '{name}'.")


def find_schema(path: str | Path, schema: Schema | str | Path | None = None) -> Schema:
    """Return the schema of a table."""
    table = Path(path).expanduser()
    beside = table.with_suffix(".toml") if table.name else table
    given = schema or (beside if beside.is_file() else None)
    return given if isinstance(given, Schema) else Schema() if given is None else Schema.from_file(given)


def _load_table(path: str | Path, options: Options) -> Records:
    """Read the user's own file with its declarations."""
    schema = find_schema(path, options.get("schema"))
    declared = {key: options.get(key) for key in Schema.__dataclass_fields__}
    return read_records(
        path,
        schema.updated(declared),
        infer=options.get("infer", False),
        features=options.get("features", "features"),
    )


def _load_registered(name: str, options: Options) -> Records:
    """Read a registered data set, after a download if it is wanted and needed."""
    chosen = dataset(name)
    encoding = options.get("encoding")
    if encoding is not None and "encoding" not in chosen.options:
        raise InvalidInput(f"The data set '{name}' has only one encoding; `encoding` does not apply to it.")
    directory = chosen.directory(options.get("data_dir"), verify=options.get("verify", True))
    missing = chosen.missing(directory)
    if missing and options.get("download", False):
        for download in chosen.downloads_of(missing):
            fetch(download, directory.folders[0], progress=options.get("progress"))
        missing = chosen.missing(directory)
    if missing:
        hint = " The option `download` fetches official files." if chosen.downloads else ""
        if (stand_in := stand_in_for(name)) is not None:
            hint += f" Generated records of the same shape are in '{stand_in}'."
        raise DataUnavailable(chosen.missing_message(missing, directory) + hint)
    return chosen.read(directory) if encoding is None else chosen.read(directory, encoding=encoding)
