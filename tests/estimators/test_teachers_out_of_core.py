"""Teachers are the same, bit for bit, wherever the rows of their shards are and wherever they are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from quietmax import Teachers
from quietmax._ray import RayEngine
from quietmax.data.schema import Schema
from quietmax.errors import InvalidData, InvalidInput
from quietmax.estimators import blocks, teachers
from quietmax.estimators.blocks import LocalEngine
from quietmax.estimators.teachers import _teacher_stacks, shard_of
from quietmax.models.stacked import LARGEST_STACK, CrossEntropy, TrainingSettings, train_networks

ROWS, PEOPLE = 300, 120
COLUMNS: dict[str, Any] = {"label": "ill", "classes": ("no", "yes"), "bounds": {"age": (0, 1000)}}
PLAIN = Schema(**COLUMNS, categories={"job": ("a", "b")}, ignore=("who",))
PERSONS = Schema(**COLUMNS, categories={"job": ("a", "b")}, person="who")
NETWORK = TrainingSettings(hidden=(4,), loss=CrossEntropy(), learning_rate=0.01, epochs=2, batch_size=10)


def people() -> pd.DataFrame:
    """Rows of persons, who are spread over all rows; the age tells the person."""
    rng = np.random.default_rng(0)
    person = rng.integers(PEOPLE, size=ROWS)
    return pd.DataFrame(
        {
            "who": [f"p{number}" for number in person],
            "age": 8 * person,
            "job": rng.choice(["a", "b"], ROWS),
            "ill": np.where(person + rng.normal(0, 20, ROWS) > PEOPLE / 2, "yes", "no"),
        }
    )


def fit(
    source: Any, schema: Schema = PERSONS, engine: Any = "local", count: int = 5, **more: Any
) -> Teachers:
    settings = {"network": NETWORK, "random_state": 3, **more}
    return Teachers(2.0, queries=5, teachers=count, schema=schema, engine=engine, **settings).fit(source)


def weights(fitted: Teachers) -> np.ndarray[Any, Any]:
    return np.asarray(fitted.ensemble_.teachers.weight_vectors())


def files(folder: Path, frame: pd.DataFrame, cuts: list[int]) -> Path:
    folder.mkdir()
    for number, part in enumerate(np.split(np.arange(len(frame)), cuts)):
        frame.iloc[part].to_parquet(folder / f"{number}.parquet", index=False, row_group_size=30)
    return folder


def make_blocks_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 rows, so that every shard is in many of them."""
    monkeypatch.setattr(blocks, "ROWS_AT_ONCE", 16)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    make_blocks_small(monkeypatch)


@pytest.mark.parametrize("count", [5, 60], ids=["one stack", "three stacks"])
@pytest.mark.parametrize("schema", [PLAIN, PERSONS], ids=["records", "persons"])
def test_teachers_are_the_same_in_memory_and_out_of_core(
    tmp_path: Path, schema: Schema, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = people()
    expected = fit(frame, schema, count=count)
    assert len(np.unique(weights(expected).round(3), axis=0)) == count
    make_blocks_small(monkeypatch)
    whole = files(tmp_path / "whole", frame, [])
    parts = files(tmp_path / "parts", frame, [1, 50, 200])
    frame.to_csv(tmp_path / "people.csv", index=False)
    before = set(tmp_path.iterdir())
    disk, some = LocalEngine(0, tmp_path), LocalEngine(2000, tmp_path)
    for source, engine in (
        (frame, disk),
        (frame, some),
        (whole, "local"),
        (parts, disk),
        (tmp_path / "people.csv", some),
        (iter(pa.Table.from_pandas(frame).to_batches(max_chunksize=50)), disk),
    ):
        found = fit(source, schema, engine, count)
        np.testing.assert_array_equal(weights(expected), weights(found))
        np.testing.assert_array_equal(found.ensemble_.silent, expected.ensemble_.silent)
        assert found.guarantee_ == expected.guarantee_
        assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("count", [5, 60], ids=["one stack", "three stacks"])
def test_the_number_of_threads_changes_no_bit(count: int) -> None:
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(weights(fit(people(), count=count)))
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(*found)


@pytest.mark.slow
def test_teachers_are_the_same_on_ray_workers(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    expected = fit(people(), count=60)
    folder = files(tmp_path / "people", people(), [50, 200])
    done: list[tuple[int, int]] = []
    engine = RayEngine(workers=2, progress=lambda *each: done.append(each))
    np.testing.assert_array_equal(weights(expected), weights(fit(folder, engine=engine, count=60)))
    assert done == [(1, 3), (2, 3), (3, 3)]


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of every call of `train_networks`."""
    seen: list[tuple[Any, ...]] = []

    def watched(*given: Any) -> Any:
        seen.append(given)
        return train_networks(*given)

    monkeypatch.setattr(teachers, "train_networks", watched)
    return seen


@pytest.mark.usefixtures("small_blocks")
def test_all_rows_of_a_person_are_in_the_shard_that_the_name_decides_whatever_file_they_are_in(
    tmp_path: Path, jobs: list[tuple[Any, ...]]
) -> None:
    frame, count = people(), 60
    folder = files(tmp_path / "people", frame, [10, 20, 150])
    fitted = fit(folder, engine=LocalEngine(0, tmp_path), count=count)
    shards = [features[own] for features, _, _, rows, *_ in jobs for own in rows]
    assert len(shards) == count
    assert sum(map(len, shards)) == ROWS
    for person in range(PEOPLE):
        rows = int((frame["who"] == f"p{person}").sum())
        expected = np.zeros(count, int)
        expected[shard_of([f"p{person}".encode()], count, fitted._key())] = rows
        found = [int((np.abs(own[:, 0] - 8 * person / 1000) < 0.003).sum()) for own in shards]
        assert found == expected.tolist()


@pytest.mark.usefixtures("small_blocks")
def test_removing_a_person_changes_one_teacher_out_of_core(tmp_path: Path) -> None:
    frame = people()
    public: dict[str, Any] = {"count": 60, "declared_size": PEOPLE, "engine": LocalEngine(0, tmp_path)}
    everybody = fit(files(tmp_path / "all", frame, [40, 100]), **public)
    for person in ("p3", "p77"):
        others = frame[frame["who"] != person]
        without = fit(files(tmp_path / person, others, [90]), **public)
        changed = (weights(everybody) != weights(without)).any(1)
        assert np.flatnonzero(changed).tolist() == shard_of([person.encode()], 60, without._key()).tolist()


def test_stacks_follow_from_public_numbers(
    tmp_path: Path, jobs: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teachers, "STACK_BYTES", 20_000)
    edges = _teacher_stacks(60, PEOPLE, 5, 2, NETWORK)
    assert 3 < len(edges) - 1 < 60
    for engine in (LocalEngine(), LocalEngine(0, tmp_path), LocalEngine(10**4, tmp_path)):
        jobs.clear()
        features = fit(people(), engine=engine, count=60, declared_size=PEOPLE).n_features_in_
        assert features == 5
        assert [len(rows) for _, _, _, rows, *_ in jobs] == np.diff(edges).tolist()
        assert max(len(rows) for rows, *_ in jobs) < ROWS / 2
    monkeypatch.undo()
    assert np.diff(_teacher_stacks(1000, 10**6, 50, 10, NETWORK)).tolist() == [LARGEST_STACK] * 40
    assert _teacher_stacks(3, 10**9, 100, 2, NETWORK) == [0, 1, 2, 3]


def test_the_size_that_is_not_declared_is_the_number_of_persons(tmp_path: Path) -> None:
    frame = people()
    fitted = fit(files(tmp_path / "people", frame, [100]), engine=LocalEngine(0, tmp_path))
    assert fitted.guarantee_.parameters["declared_size"] == frame["who"].nunique()
    assert fit(frame, PLAIN).guarantee_.parameters["declared_size"] == ROWS


@pytest.mark.usefixtures("small_blocks")
def test_modules_of_the_users_own_are_the_same_out_of_core(tmp_path: Path) -> None:
    found = [
        [
            each.weight.detach().numpy()
            for each in fit(people(), engine=engine, network=torch.nn.Linear).ensemble_.teachers
        ]
        for engine in ("local", LocalEngine(0, tmp_path))
    ]
    np.testing.assert_array_equal(*found)
    assert np.any(found[0])


@pytest.mark.parametrize("error", [InvalidInput, KeyboardInterrupt])
def test_nothing_is_left_on_disk_after_an_error(
    tmp_path: Path, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def interrupted(*_: Any) -> None:
        seen.extend(1 for _ in tmp_path.rglob("*.labels"))
        raise error

    monkeypatch.setattr(teachers, "train_networks", interrupted)
    with pytest.raises(error):
        fit(people(), engine=LocalEngine(0, tmp_path))
    assert seen
    assert not list(tmp_path.iterdir())


def test_wrong_rows_and_engines_are_errors(tmp_path: Path) -> None:
    frame = people()
    with pytest.raises(InvalidData, match="Nobody is left"):
        fit(frame.iloc[:0])
    frame.loc[ROWS - 1, "ill"] = "perhaps"
    with pytest.raises(InvalidInput, match=r"1\.parquet"):
        fit(files(tmp_path / "people", frame, [100]))
    for engine in ("disk", 5):
        with pytest.raises(InvalidInput, match="engine must be"):
            fit(people(), engine=engine)


def test_progress_ends_with_its_total() -> None:
    done: list[tuple[int, int]] = []
    fit(people(), engine=LocalEngine(progress=lambda *each: done.append(each)), count=60)
    assert done[-1][0] == done[-1][1] > ROWS
    assert [one for one, _ in done] == sorted(one for one, _ in done)
