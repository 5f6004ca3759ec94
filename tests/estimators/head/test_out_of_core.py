"""A head has the same weights, bit for bit, wherever its rows are and in whatever order they come (THEORY 3.11)."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quietmax import PrivateHead
from quietmax.data.sources import ParquetPart
from quietmax.data.tables import table_rows
from quietmax.errors import DataUnavailable, InvalidInput
from quietmax.estimators import blocks
from quietmax.estimators.blocks import LocalEngine
from quietmax.estimators.serialization import open_private, save_private
from tests.estimators.made import made
from tests.estimators.table_of_people import PERSONS, PLAIN, files, table_of_people
from tests.estimators.test_out_of_core import assert_same

ROWS = 3000
people = partial(table_of_people, ROWS, 1200)
SETTINGS: dict[str, dict[str, Any]] = {
    "records": {"schema": PLAIN, "steps": 4},
    "persons": {"schema": PERSONS, "steps": 4},
    "declared size": {"schema": PERSONS, "declared_size": 1000, "steps": 4},
    "second moments": {"schema": PERSONS, "second_moments": 0.1, "features": "unit-norm", "steps": 4},
    "large declared size": {"schema": PLAIN, "declared_size": 10**8, "steps": 3, "second_moments": 0.1},
}


def fit(source: Any, settings: dict[str, Any], **more: Any) -> PrivateHead:
    return made(PrivateHead, 1.0, 1e-5, random_state=3, **settings, **more).fit(source)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("height", [1, 64])
def test_the_weights_depend_on_neither_blocks_nor_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, Any], height: int
) -> None:
    frame = people().iloc[: 300 if height == 1 else 1200]
    torch.set_num_threads(1)
    expected = fit(frame, settings)
    monkeypatch.setattr(blocks, "_block_rows", lambda _: height)
    monkeypatch.setattr(blocks, "_PERSONS_AT_ONCE", 100)
    for threads, memory in ((1, None), (3, 20_000)):
        torch.set_num_threads(threads)
        engine = LocalEngine(memory, tmp_path)
        assert_same(fit(frame, settings, engine=engine), expected)


def test_arrays_and_groups_give_the_same_weights_on_disk(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    X, groups = rng.normal(size=(2000, 6)), rng.integers(500, size=2000)
    y = (X[:, 0] + rng.normal(size=2000) > 0).astype(int)
    before = X.copy()

    def weights(order: np.ndarray, engine: Any) -> np.ndarray:
        head = PrivateHead(1.0, 1e-5, classes=(0, 1), random_state=1, engine=engine)
        return np.asarray(head.fit(X[order], y[order], groups=groups[order]).coef_)

    expected = weights(np.arange(2000), "local")
    engine = LocalEngine(max_memory=0, cache_dir=tmp_path)
    np.testing.assert_array_equal(weights(rng.permutation(2000), engine), expected)
    np.testing.assert_array_equal(X, before)


def test_the_output_method_is_certified_out_of_core(tmp_path: Path) -> None:
    """Its sums are in floating point: the minimisers agree up to the tolerance, not bit for bit."""
    frame = people()
    folder = files(tmp_path / "people", frame, [1000])
    settings = {"schema": PERSONS, "method": "output", "declared_size": 1000}
    engine = LocalEngine(max_memory=0, cache_dir=tmp_path)
    one, other = fit(frame, settings), fit(folder, settings, engine=engine)
    apart = 2 * one.plan_.tolerance / one.plan_.regularisation
    assert np.linalg.norm(one.coef_ - other.coef_) <= apart
    assert one.guarantee_ == other.guarantee_


def test_a_head_trained_on_files_is_saved_and_opened_as_ever(tmp_path: Path) -> None:
    frame = people()
    rows = table_rows(files(tmp_path / "people", frame, [1000, 2000]), PERSONS, holdout=0.2, seed=1)
    head = PrivateHead(1.0, 1e-5).fit(rows.train)
    assert head.guarantee_.status == "proven"
    assert head.guarantee_.parameters["holdout"] == {"share": 0.2, "seed": 1}
    save_private(head, tmp_path / "model", dataset="people")
    opened = open_private(tmp_path / "model")
    assert opened.guarantee == head.guarantee_
    with pytest.raises(InvalidInput, match="held out"):
        PrivateHead(1.0, 1e-5).fit(rows.test)


@pytest.fixture
def engine(tmp_path: Path) -> LocalEngine:
    """An engine that keeps what an interrupted training has encoded."""
    (tmp_path / "cache").mkdir()
    return LocalEngine(0, tmp_path / "cache", resume=True)


def interrupted(folder: Path, engine: LocalEngine, calls: int, settings: dict[str, Any]) -> None:
    """Train until progress was reported some times."""
    seen = iter(range(calls))

    def progress(*_: int) -> None:
        if next(seen, None) is None:
            raise KeyboardInterrupt

    head = made(PrivateHead, 1.0, 1e-5, **settings, engine=replace(engine, progress=progress))
    with pytest.raises(KeyboardInterrupt):
        head.fit(folder)
    drawn = ("size_", "centre_", "whitening_", "coef_", "feature_map_", "plan_", "sensitivity_")
    assert not any(hasattr(head, name) for name in drawn)


@pytest.mark.parametrize("calls", [1, 3, 9])
@pytest.mark.parametrize("settings", [SETTINGS["records"], SETTINGS["persons"]], ids=["records", "persons"])
def test_an_interrupted_training_goes_on_where_it_was_with_the_same_weights(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    engine: LocalEngine,
    settings: dict[str, Any],
    calls: int,
) -> None:
    frame = people()
    folder = files(tmp_path / "people", frame, [1000, 2000, 2500])
    expected = fit(frame, settings)
    interrupted(folder, engine, calls, settings)
    (kept,) = (tmp_path / "cache").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o077 == 0 for file in kept.iterdir())
    read: list[str] = []
    frames = ParquetPart._frames

    def noted(part: ParquetPart, columns: Any, rows: int) -> Any:
        read.append(part.file.name)
        return frames(part, columns, rows)

    monkeypatch.setattr(ParquetPart, "_frames", noted)
    assert_same(fit(folder, settings, engine=engine), expected)
    done = min(calls + 1, 4)
    assert read == [f"{number:02}.parquet" for number in range(done, 4)]
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_changed_file_is_read_again_and_another_schema_starts_anew(
    tmp_path: Path, engine: LocalEngine
) -> None:
    frame = people()
    folder = files(tmp_path / "people", frame, [1000, 2000])
    interrupted(folder, engine, 5, SETTINGS["persons"])
    frame.loc[2500, "age"] = 1
    frame.iloc[2000:].to_parquet(folder / "02.parquet", index=False)
    assert_same(fit(folder, SETTINGS["persons"], engine=engine), fit(frame, SETTINGS["persons"]))
    interrupted(folder, engine, 5, SETTINGS["persons"])
    assert_same(fit(folder, SETTINGS["records"], engine=engine), fit(frame, SETTINGS["records"]))
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_another_file_of_the_same_size_and_time_is_read(tmp_path: Path, engine: LocalEngine) -> None:
    frame = people().assign(age=lambda table: table["age"] % 90 + 10)
    changed = frame.assign(age=frame["age"].to_numpy()[::-1])
    (tmp_path / "people").mkdir()
    file = tmp_path / "people" / "0.csv"
    frame.to_csv(file, index=False)
    before = file.stat()
    interrupted(file.parent, engine, 5, SETTINGS["records"])
    changed.to_csv(file, index=False)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert_same(fit(file.parent, SETTINGS["records"], engine=engine), fit(changed, SETTINGS["records"]))


def test_a_half_written_file_of_encoded_rows_is_not_used(tmp_path: Path, engine: LocalEngine) -> None:
    frame = people()
    folder = files(tmp_path / "people", frame, [1000])
    interrupted(folder, engine, 9, SETTINGS["persons"])
    (kept,) = (tmp_path / "cache").iterdir()
    finished = sorted(kept.glob("*.json"))
    assert len(finished) == 2
    finished[0].unlink()
    for file in kept.glob(f"{finished[0].stem}*"):
        file.write_bytes(file.read_bytes()[:100])
    assert_same(fit(folder, SETTINGS["persons"], engine=engine), fit(frame, SETTINGS["persons"]))


def test_two_trainings_do_not_share_a_folder_of_encoded_rows(tmp_path: Path, engine: LocalEngine) -> None:
    folder = files(tmp_path / "people", people(), [1000])
    rows = table_rows(folder, PERSONS)
    with blocks.Blocks(2, engine) as first:
        first.read(rows, b"key")
        with (
            pytest.raises(DataUnavailable, match="Another training uses the folder"),
            blocks.Blocks(2, engine) as second,
        ):
            second.read(rows, b"key")
        assert len(first) == ROWS
    interrupted(folder, engine, 9, SETTINGS["persons"])
    (kept,) = (tmp_path / "cache").iterdir()
    kept.chmod(0o755)
    with pytest.raises(DataUnavailable, match="must belong to you alone"):
        fit(folder, SETTINGS["persons"], engine=engine)


def test_what_cannot_be_read_twice_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="requires a `cache_dir`"):
        LocalEngine(resume=True)
    engine = LocalEngine(0, tmp_path, resume=True)
    with pytest.raises(InvalidInput, match="`resume` requires a head that is trained on files"):
        fit(people(), SETTINGS["persons"], engine=engine)
    with pytest.raises(InvalidInput, match="`resume` requires"):
        PrivateHead(1.0, 1e-5, engine=engine).fit(np.eye(2), [0, 1])
    assert list(tmp_path.iterdir()) == []
