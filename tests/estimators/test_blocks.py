"""Rows in blocks: the same sums wherever the blocks are, bounded memory, and nothing left behind."""

from __future__ import annotations

import errno
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quietmax.errors import DataUnavailable, InvalidInput
from quietmax.estimators import blocks
from quietmax.estimators.blocks import (
    Blocks,
    LocalEngine,
    Table,
    _block_rows,
    _chunk_rows,
    _person_digests,
    added,
)


@pytest.fixture(params=["memory", "disk", "both"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> LocalEngine:
    limits = {"memory": None, "disk": 0, "both": 3000}
    return LocalEngine(limits[request.param], tmp_path)


def small_blocks(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(blocks, "_block_rows", lambda _: rows)


def table_of(rows: int, columns: int = 5, seed: int = 0) -> Table:
    rng = np.random.default_rng(seed)
    content = rng.integers(-1000, 1000, (rows, columns)).astype(np.float32)
    return Table(content, rng.integers(3, size=rows), 3)


@dataclass(frozen=True)
class Total:
    """The sum of rows and labels, and the blocks that it comes from."""

    rows: Any
    labels: int
    blocks: int = 1

    def __add__(self, other: Total) -> Total:
        return Total(self.rows + other.rows, self.labels + other.labels, self.blocks + other.blocks)


def total(block: Table) -> Total:
    return Total(block.rows.astype(np.int64).sum(axis=0), int(block.labels.sum()))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("height", [1, 37, 100, 5000])
def test_a_sum_is_the_same_in_any_blocks_anywhere(
    monkeypatch: pytest.MonkeyPatch, engine: LocalEngine, threads: int, height: int
) -> None:
    table = table_of(1000)
    small_blocks(monkeypatch, height)
    torch.set_num_threads(threads)
    with Blocks(3, engine) as stored:
        stored.extend([table.take(slice(0, 10)), table.take(slice(10, 11)), table.take(slice(11, 1000))])
        assert (len(stored), stored.units, stored.features, stored.repeated) == (1000, 1000, 5, False)
        found = stored.sum(total)
    np.testing.assert_array_equal(found.rows, total(table).rows)
    assert found.labels == total(table).labels
    assert found.blocks >= 1000 // height


def test_an_update_replaces_all_rows_and_keeps_their_labels(
    monkeypatch: pytest.MonkeyPatch, engine: LocalEngine
) -> None:
    table = table_of(100)
    small_blocks(monkeypatch, 30)
    with Blocks(3, engine) as stored:
        stored.extend([table])
        stored.update(lambda block: replace(block, rows=block.rows[:, :2] * 2))
        stored.update(lambda block: block.pieces(2))
        assert (len(stored), stored.features) == (100, 2)
        found = stored.sum(total)
    np.testing.assert_array_equal(found.rows, 2 * total(table).rows[:2])
    assert found.labels == total(table).labels


def test_rows_beyond_the_limit_are_on_disk_and_gone_afterwards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = table_of(1000)
    small_blocks(monkeypatch, 50)
    limit = table._nbytes // 4
    with Blocks(3, LocalEngine(limit, tmp_path)) as stored:
        stored.extend([table])
        in_memory = [block for block in stored._blocks if isinstance(block, Table)]
        assert limit - 50 * 28 < sum(block._nbytes for block in in_memory) <= limit
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(list(folder.iterdir())) == 2 * (20 - len(in_memory))
        stored.update(lambda block: replace(block, rows=np.repeat(block.rows, 2, axis=1)))
        assert sum(block._nbytes for block in stored._blocks if isinstance(block, Table)) <= limit
        files = len([block for block in stored._blocks if not isinstance(block, Table)])
        assert len(list(folder.iterdir())) == 2 * files
    assert list(tmp_path.iterdir()) == []


def test_rows_in_memory_are_not_copied_and_not_changed() -> None:
    table = table_of(100)
    before = table.rows.copy()
    with Blocks(3) as stored:
        stored.extend([table])
        assert np.shares_memory(stored._blocks[0]._load().rows, table.rows)
    np.testing.assert_array_equal(table.rows, before)


@pytest.mark.parametrize("at_once", [90, 10**6])
def test_persons_are_counted_over_all_blocks(
    monkeypatch: pytest.MonkeyPatch, engine: LocalEngine, at_once: int
) -> None:
    rng = np.random.default_rng(1)
    owner = rng.integers(200, size=1000)
    names = np.array([f"person {number}" for number in owner], dtype=object)
    small_blocks(monkeypatch, 37)
    monkeypatch.setattr(blocks, "_PERSONS_AT_ONCE", at_once)
    with Blocks(3, engine) as stored:
        stored.extend([replace(table_of(1000), persons=_person_digests(names, b"key"))])
        stored._count_persons()
        assert stored.repeated
        assert stored.units == len(set(owner.tolist()))
        repeats = np.concatenate([block._load().repeats for block in stored._blocks])
        rows = np.concatenate([block._load().rows for block in stored._blocks])
        assert all(block._load().persons is None for block in stored._blocks)
    np.testing.assert_array_equal(repeats, np.bincount(owner)[owner])
    np.testing.assert_array_equal(rows, table_of(1000).rows)


def test_the_key_of_the_digests_changes_no_count() -> None:
    names = np.array(["a", "b", "a", "", "\ud800", "a\0"], dtype=object)
    for key in (b"one", b"other"):
        digests = _person_digests(names, key)
        assert len(set(digests.tolist())) == 5
        assert digests[0] == digests[2]
        assert all(len(digest) <= 16 for digest in digests.tolist())
    assert _person_digests(names, b"one")[0] != _person_digests(names, b"other")[0]


def test_digests_that_end_in_zeros_stay_different(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy drops zeros at the end of bytes when it shows them; sums and searches must not."""
    contents = [b"\0" * 16, b"\0" * 15 + b"\1", b"\1" + b"\0" * 15, b"\0" * 16]
    digests = np.frombuffer(b"".join(contents), dtype="S16")
    monkeypatch.setattr(blocks, "_PERSONS_AT_ONCE", 2)
    with Blocks(3) as stored:
        stored.extend([replace(table_of(4), persons=digests)])
        stored._count_persons()
        assert stored.units == 3
        assert stored._blocks[0]._load().repeats.tolist() == [2, 1, 1, 2]


@pytest.mark.parametrize("limit", [-1, "4G", 1.5])
def test_a_limit_that_is_no_number_of_bytes_is_an_error(limit: object) -> None:
    with pytest.raises(InvalidInput, match="max_memory must be a number of bytes, at least 0"):
        LocalEngine(max_memory=limit)  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(DataUnavailable, match=r"No temporary folder can be made in .*absent"),
        Blocks(3, LocalEngine(0, tmp_path / "absent")) as stored,
    ):
        stored.extend([table_of(3)])

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(blocks, "open", full, raising=False)
    with (
        pytest.raises(DataUnavailable, match=r": No space left on device\. `cache_dir`"),
        Blocks(3, LocalEngine(0, tmp_path)) as stored,
    ):
        stored.extend([table_of(3)])
    assert list(tmp_path.iterdir()) == []


def test_the_size_of_the_files_is_stated_and_must_fit_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with Blocks(3, LocalEngine(10**6, tmp_path, report=said.append)) as stored:
        stored._reserve(1000, 100)
        assert said == []
        stored._reserve(10**7, 100)
        assert said == [f"The rows need up to 4.3 GB of temporary files in {tmp_path}."]
        assert list(tmp_path.iterdir()) == []
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
        with pytest.raises(DataUnavailable, match=r"need 4.3 GB of files in .*, which has 1.0 GB free"):
            stored._reserve(10**7, 100)
    with Blocks(3, LocalEngine(0, tmp_path, report=said.append)) as stored:
        stored.extend([table_of(10)])
    assert said[1:] == [f"Rows that do not fit into memory go to temporary files in {tmp_path}."]


def test_the_stated_size_is_that_of_the_files(tmp_path: Path) -> None:
    said: list[str] = []
    with Blocks(3, LocalEngine(0, tmp_path, report=said.append)) as stored:
        stored._reserve(50_000, 500)
        stored.extend([table_of(50_000, columns=500)])
        on_disk = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
        assert all(file.stat().st_mode & 0o777 == 0o600 for file in tmp_path.rglob("*") if file.is_file())
    assert 0.95 * 0.1 < on_disk / 1e9 <= 0.11
    assert said == [f"The rows need up to 0.1 GB of temporary files in {tmp_path}."]


def test_progress_reaches_the_announced_total(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    small_blocks(monkeypatch, 30)
    with Blocks(3, LocalEngine(progress=lambda done, whole: seen.append((done, whole)))) as stored:
        stored.expect(4, rows=100)
        stored.extend([table_of(100)])
        stored.update(lambda block: block)
        stored.expect(2)
        stored.sum(total)
        stored.sum(total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (400, 400)
    assert {whole for _, whole in seen} == {400}


def test_a_sum_over_no_rows_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="no records"):
        Blocks(3).sum(total)


@pytest.mark.parametrize("columns", [1, 51, 4000, 10**6])
def test_a_block_is_small_enough_for_memory_and_for_exact_sums(columns: int) -> None:
    height = _block_rows(columns)
    assert height <= blocks.MAX_BLOCK_ROWS
    assert height <= blocks.CHUNKS_PER_BLOCK * _chunk_rows(columns)
    assert height * columns * 4 <= max(blocks.BLOCK_BYTES, 4 * columns * blocks.ROWS_AT_ONCE)
    tall = Table(np.empty((3 * height, 0), np.float32), np.zeros(3 * height, np.int64), 2)
    assert max(map(len, tall.pieces(1))) <= blocks.MAX_BLOCK_ROWS


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 1000])
def test_adding_in_pairs_adds_every_value_once(count: int) -> None:
    assert added(range(count)) == count * (count - 1) // 2
    depth = 0

    class Depth:
        def __init__(self, level: int) -> None:
            self.level = level

        def __add__(self, other: Depth) -> Depth:
            return Depth(max(self.level, other.level) + 1)

    depth = added(Depth(0) for _ in range(count)).level
    assert depth <= 2 * np.log2(max(count, 2))
