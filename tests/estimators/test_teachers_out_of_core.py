"""Teachers are the same, bit for bit, wherever the rows of their shards are and wherever they are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from quietmax import Teachers
from quietmax._ray import RayEngine
from quietmax.data.schema import Schema
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
