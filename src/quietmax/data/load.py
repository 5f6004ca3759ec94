"""The way in: a data set by name, or the user's own file, as encoded records or as a split."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from quietmax.data.download import Progress, fetch
from quietmax.data.records import Records, Split, split
from quietmax.data.registry import dataset, downloads_for, missing_files_message
from quietmax.data.schema import Schema
from quietmax.data.tables import is_table_path, read_records
from quietmax.errors import DataUnavailable, InvalidInput, check_type


class RegisteredOptions(TypedDict, total=False):
    """Options for a registered data set.

    `data_dir`: folder of the data files (default: QUIETMAX_DATA, else the user's cache folder).  `download`:
    fetch official files that are missing, with `progress` called on the way.  `verify`: compare contents with
    known checksums (default). `encoding`: how to encode a data set that offers a choice (adult: "codes" or
    "one-hot").
    """

    data_dir: str | os.PathLike[str] | None
    download: bool
    progress: Progress | None
    verify: bool
    encoding: str | None


class OwnOptions(TypedDict, total=False):
    """Options for the user's own file.

    Declarations as in `Schema`.  `schema`: a Schema or the path of a schema file, which the other
    declarations add to; by default the .toml file beside the table, if there is one (`people.toml` beside
    `people.csv`).  `infer`: read off the records what is not declared, and say so in the encoding.
    `features`: the array of features in an NPZ file.
    """

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
    infer: bool
    features: str


class Options(RegisteredOptions, OwnOptions, total=False):
    """All options of `load` and `load_records`."""


def load(name: str | Path, *, records: int | None = None, seed: int = 0, **options: Unpack[Options]) -> Split:
    """Load a data set and split it into `records` for training, as many for testing, and a pool.

    `name` is a registered data set or the path of a CSV, TSV, Parquet or NPZ file.  Without `records` the
    data set's own size is taken (the paper's); of the user's own file training and test part get two fifths
    each.

    >>> data = load("mnist-5k", seed=1)
    >>> len(data.train), len(data.test), len(data.pool), data.classes
    (2000, 2000, 1000, 10)
    """
    encoded = load_records(name, **options)
    if records is None and not is_table_path(name):
        records = dataset(str(name)).records
    return split(encoded, size=records, seed=seed)


def load_records(name: str | Path, **options: Unpack[Options]) -> Records:
    """Load all records of a data set or of the user's own file, encoded; see `load`."""
    unknown = sorted(options.keys() - Options.__annotations__.keys())
    if unknown:
        raise TypeError(f"quietmax.data.load has no keyword argument '{unknown[0]}'")
    check_type(name, (str, Path), "name", "the name of a data set or the path of a file")
    own = is_table_path(name)
    foreign = RegisteredOptions.__annotations__ if own else OwnOptions.__annotations__
    harmless = {"data_dir", "progress", "verify", "features"}
    wrong = sorted(key for key, value in options.items() if key in foreign and key not in harmless and value)
    if wrong:
        kind = "a registered data set" if own else "a file of one's own (.csv, .parquet, .npz)"
        raise InvalidInput(
            f"The option '{wrong[0]}' is for {kind}, but '{name}' is none; leave the option out."
        )
    return _load_own(name, options) if own else _load_registered(str(name), options)


def _load_own(path: str | Path, options: Options) -> Records:
    table = Path(path).expanduser()
    beside = table.with_suffix(".toml") if table.name else table
    given = options.get("schema") or (beside if beside.is_file() else None)
    schema = given if isinstance(given, Schema) else Schema() if given is None else Schema.from_file(given)
    declared = {key: options.get(key) for key in Schema.__dataclass_fields__}
    return read_records(
        path,
        schema.with_arguments(declared),
        infer=options.get("infer", False),
        features=options.get("features", "features"),
    )


def _load_registered(name: str, options: Options) -> Records:
    chosen = dataset(name)
    encoding = options.get("encoding")
    if encoding is not None and "encoding" not in chosen.options:
        raise InvalidInput(f"The data set '{name}' has only one encoding; leave the encoding out.")
    source = chosen.source(options.get("data_dir"), verify=options.get("verify", True))
    missing = chosen.missing(source)
    if missing and options.get("download", False):
        for download in downloads_for(chosen, missing):
            fetch(download, source.places[0], progress=options.get("progress"))
        missing = chosen.missing(source)
    if missing:
        raise DataUnavailable(missing_files_message(chosen, missing, source))
    return chosen.read(source) if encoding is None else chosen.read(source, encoding=encoding)
