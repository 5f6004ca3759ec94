"""Readers of the 0/1 tables prepared by Shokri et al.: Location, Purchase and Texas.

The texts are large (Texas: 67,330 lines of 6,169 values), so they are read in pieces into bytes; only the
finished table becomes float32.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from typing import IO

import numpy as np
from numpy.typing import NDArray

from quietmax.data.columns import NumericColumn
from quietmax.data.encoding import Encoding
from quietmax.data.files import Part, Source
from quietmax.data.records import Records
from quietmax.errors import DataUnavailable

LOCATION_PART = Part(
    "bangkok", "2ca8f7fc231251e089823e44d39f2d1eed124574cc351c7f80368cfe631dd718", "dataset_location.tgz"
)
PURCHASE_PART = Part("dataset_purchase", None, "dataset_purchase.tgz")
TEXAS_FEATURES_PART = Part("100/feats", None, "dataset_texas.tgz")
TEXAS_LABELS_PART = Part("100/labels", None, "dataset_texas.tgz")

LOCATION_WIDTH = 446
PURCHASE_WIDTH = 600
TEXAS_WIDTH = 6169
CLUSTERING_SEED = 0
_PIECE_BYTES = 1 << 24


def read_location(source: Source) -> Records:
    """Read the 5,010 Bangkok check-in profiles: label 1..30 in quotes, then 446 values."""
    content = source.contents([LOCATION_PART])[LOCATION_PART.name]
    bits, labels = _labelled_bits(LOCATION_PART, io.BytesIO(content), width=LOCATION_WIDTH)
    return _records("location", bits, labels, 30)


def read_purchase(source: Source, classes: int) -> Records:
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
        measurements=("the labels, which are k-means clusters of all records",),
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


def read_texas(source: Source) -> Records:
    """Read the hospital stays: `feats` has 6,169 values a line, `labels` one label 1..100 a line."""
    results = source.read_each([TEXAS_FEATURES_PART, TEXAS_LABELS_PART], _texas_part)
    bits, labels = results[TEXAS_FEATURES_PART.name], results[TEXAS_LABELS_PART.name]
    if len(bits) != len(labels):
        raise DataUnavailable(
            f"{TEXAS_FEATURES_PART.name} holds {len(bits)} records but {TEXAS_LABELS_PART.name} "
            f"{len(labels)} labels; get the official file again."
        )
    return _records("texas", bits, labels.astype(np.int64), 100)


def _texas_part(part: Part, stream: IO[bytes]) -> NDArray[np.generic]:
    if part == TEXAS_LABELS_PART:
        return _numbers(part, stream.read().split(), 0)
    blocks, read = [], 0
    for lines in _pieces(stream):
        blocks.append(_bits(part, [b"," + line for line in lines], TEXAS_WIDTH, read))
        read += len(lines)
    return np.concatenate(blocks) if blocks else np.empty((0, TEXAS_WIDTH), dtype=np.uint8)


def _labelled_bits(
    part: Part, stream: IO[bytes], *, width: int
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


def _bits(part: Part, lines: list[bytes], width: int, read: int) -> NDArray[np.uint8]:
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


def _numbers(part: Part, texts: list[bytes], read: int) -> NDArray[np.int64]:
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
