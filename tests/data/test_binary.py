from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from quietmax.accounting import Guarantee
from quietmax.data import binary, load, load_records
from quietmax.errors import DataUnavailable
from quietmax.estimators.private_file import with_encoding

Refusal = Callable[..., str]


def lines(bits: NDArray[np.uint8], labels: list[object] | None = None) -> bytes:
    rows = [",".join(map(str, row)) for row in bits]
    if labels is not None:
        rows = [f"{label},{row}" for label, row in zip(labels, rows, strict=True)]
    return ("\n".join(rows) + "\n").encode()


def bits_of(count: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(2, size=(count, width), dtype=np.uint8)


def write_archive(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def write_purchase(
    folder: Path, count: int = 40, packed: bool = True
) -> tuple[NDArray[np.uint8], list[object]]:
    bits, labels = bits_of(count, 600), [1 + (7 * row) % 100 for row in range(count)]
    content = lines(bits, list(labels))
    if packed:
        write_archive(folder / "dataset_purchase.tgz", {"dataset_purchase": content})
    else:
        (folder / "dataset_purchase").write_bytes(content)
    return bits, list(labels)


def test_location_labels_in_quotes_become_classes_from_zero(tmp_path: Path) -> None:
    bits = bits_of(5, 446)
    (tmp_path / "bangkok").write_bytes(lines(bits, ['"13"', '"1"', '"30"', '"2"', '"9"']))
    records = load_records("location", data_dir=tmp_path, verify=False)
    np.testing.assert_array_equal(records.features, bits)
    assert records.labels.tolist() == [12, 0, 29, 1, 8]
    assert records.classes == 30


@pytest.mark.parametrize("packed", [True, False])
def test_purchase_is_read_from_the_archive_and_unpacked(tmp_path: Path, packed: bool) -> None:
    bits, labels = write_purchase(tmp_path, packed=packed)
    records = load_records("purchase-100", data_dir=tmp_path)
    np.testing.assert_array_equal(records.features, bits)
    assert (records.labels + 1).tolist() == labels
    assert records.classes == 100


@pytest.mark.parametrize("piece", [1, 7, 601, 1202, 5_000])
def test_the_size_of_the_pieces_read_makes_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    bits, labels = write_purchase(tmp_path, count=6)
    monkeypatch.setattr(binary, "_PIECE_BYTES", piece)
    records = load_records("purchase-100", data_dir=tmp_path)
    np.testing.assert_array_equal(records.features, bits)
    assert (records.labels + 1).tolist() == labels


def test_lines_may_end_as_on_windows_or_lack_the_last_end(tmp_path: Path) -> None:
    bits = bits_of(3, 600)
    content = lines(bits, [1, 50, 100]).replace(b"\n", b"\r\n").removesuffix(b"\r\n")
    (tmp_path / "dataset_purchase").write_bytes(content)
    np.testing.assert_array_equal(load_records("purchase-100", data_dir=tmp_path).features, bits)


def test_purchase_with_fewer_classes_is_clustered_always_in_the_same_way(tmp_path: Path) -> None:
    centres = bits_of(10, 600, seed=1)
    noise = (np.random.default_rng(2).random((200, 600)) < 0.2).astype(np.uint8)
    bits = centres[np.arange(200) % 10] ^ noise
    (tmp_path / "dataset_purchase").write_bytes(lines(bits, [1] * 200))
    first, again = (load_records("purchase-10", data_dir=tmp_path) for _ in range(2))
    np.testing.assert_array_equal(first.labels, again.labels)
    assert first.encoding is not None
    assert first.encoding.measurements == ("the labels, which are k-means clusters of all records",)
    assert (first.name, first.classes) == ("purchase-10", 10)
    np.testing.assert_array_equal(first.features, bits)
    assert set(first.labels.tolist()) == set(range(10))
    means = np.stack([bits[first.labels == cluster].mean(axis=0) for cluster in range(10)])
    distances = ((bits[:, None, :] - means[None]) ** 2).sum(axis=2)
    np.testing.assert_array_equal(distances.argmin(axis=1), first.labels)


def test_labels_that_are_clusters_of_all_records_make_no_proven_guarantee(tmp_path: Path) -> None:
    write_purchase(tmp_path, count=40)
    proven = Guarantee("gaussian", mu=1.0, status="proven", because="Theory section 3.")
    clustered, labelled = (load_records(f"purchase-{classes}", data_dir=tmp_path) for classes in (2, 100))
    assert with_encoding(proven, clustered.encoding).status == "conditional"
    assert with_encoding(proven, labelled.encoding).status == "proven"


def test_too_few_records_to_cluster_are_refused(tmp_path: Path, refusal: Refusal) -> None:
    write_purchase(tmp_path, count=5)
    assert "5 records" in refusal(lambda: load_records("purchase-10", data_dir=tmp_path), DataUnavailable)


@pytest.mark.parametrize("packed", [True, False])
def test_texas_is_read_from_the_archive_and_unpacked(tmp_path: Path, packed: bool) -> None:
    bits, labels = bits_of(9, 6_169), [1, 100, 5, 5, 7, 8, 9, 10, 11]
    members = {"texas/100/feats": lines(bits), "texas/100/labels": "\n".join(map(str, labels)).encode()}
    if packed:
        write_archive(tmp_path / "dataset_texas.tgz", {"texas/50/feats": b"0,1\n", **members})
    else:
        for name, content in members.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
    records = load_records("texas", data_dir=tmp_path)
    np.testing.assert_array_equal(records.features, bits)
    assert (records.labels + 1).tolist() == labels
    assert records.classes == 100


def test_texas_with_another_number_of_labels_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    write_archive(
        tmp_path / "dataset_texas.tgz",
        {"texas/100/feats": lines(bits_of(2, 6_169)), "texas/100/labels": b"1\n2\n3\n"},
    )
    sentence = refusal(lambda: load_records("texas", data_dir=tmp_path), DataUnavailable)
    assert "2 records" in sentence
    assert "3 labels" in sentence


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[:-100], "Line 40 of dataset_purchase does not hold 600 values"),
        (lambda text: text.replace(b",1,", b",2,", 1), "Line 1 of dataset_purchase does not hold 600 values"),
        (
            lambda text: text.replace(b"\n8,", b"\n8;", 1),
            "Line 2 of dataset_purchase does not hold 600 values",
        ),
        (
            lambda text: text.replace(b"\n8,", b"\neight,", 1),
            "Line 2 of dataset_purchase has no whole number",
        ),
        (lambda text: text.replace(b"\n8,", b"\n101,", 1), "labels outside 1 to 100"),
        (lambda text: text.replace(b"\n8,", b"\n0,", 1), "labels outside 1 to 100"),
        (lambda _text: b"", "empty"),
        (lambda _text: b"\n\n", "empty"),
    ],
)
def test_a_damaged_purchase_file_is_refused(
    tmp_path: Path, damage: Callable[[bytes], bytes], said: str, refusal: Refusal
) -> None:
    write_purchase(tmp_path, packed=False)
    file = tmp_path / "dataset_purchase"
    file.write_bytes(damage(file.read_bytes()))
    assert said in refusal(lambda: load_records("purchase-100", data_dir=tmp_path), DataUnavailable)


def test_a_missing_texas_or_purchase_file_is_named_with_its_origin_and_its_place(
    tmp_path: Path, refusal: Refusal
) -> None:
    for name, file in (("texas", "dataset_texas.tgz"), ("purchase-20", "dataset_purchase.tgz")):
        sentence = refusal(lambda n=name: load(n, data_dir=tmp_path), DataUnavailable)
        assert file in sentence
        assert "https://" in sentence
        assert str(tmp_path / name.split("-")[0]) in sentence
        assert "--download" in sentence


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
    assert len(np.unique(records.contents)) == 5_010
