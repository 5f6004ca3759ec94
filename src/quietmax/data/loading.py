"""The way in: a data set by name, or the user's own file, as encoded records or as a split."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypedDict, Unpack

from quietmax.data.records import Records, Split
from quietmax.data.registry import dataset, missing_sentence
from quietmax.data.splits import split
from quietmax.errors import DataUnavailable, InvalidInput


class Options(TypedDict, total=False):
    """Keyword arguments of `load` and `load_records` besides the name.

    `data_dir`: folder of the data files.  `verify`: compare contents with known checksums (default).
    `encoding`: how to encode a data set that offers a choice.
    """

    data_dir: str | os.PathLike[str] | None
    verify: bool
    encoding: str | None


def load(name: str | Path, *, records: int | None = None, seed: int = 0, **options: Unpack[Options]) -> Split:
    """Load a data set and split it into `records` for training, as many for testing, and a pool.

    Without `records` the data set's own size is taken (the paper's), for the user's own file two fifths.

    >>> data = load("mnist-5k", seed=1)
    >>> len(data.train), len(data.test), len(data.pool), data.classes
    (2000, 2000, 1000, 10)
    """
    encoded = load_records(name, **options)
    size = dataset(str(name)).records if records is None else records
    return split(encoded, size=size, seed=seed)


def load_records(name: str | Path, **options: Unpack[Options]) -> Records:
    """Load all records of a data set, encoded."""
    chosen = dataset(str(name))
    source = chosen.source(options.get("data_dir"), verify=options.get("verify", True))
    encoding = options.get("encoding")
    if encoding is not None and "encoding" not in chosen.options:
        raise InvalidInput(f"The data set '{chosen.name}' has only one encoding; leave the encoding out.")
    missing = chosen.missing(source)
    if missing:
        raise DataUnavailable(missing_sentence(chosen, missing, source))
    return chosen.read(source) if encoding is None else chosen.read(source, encoding=encoding)
