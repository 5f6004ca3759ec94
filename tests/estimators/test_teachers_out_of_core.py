"""Teachers are the same, bit for bit, wherever the rows of their shards are and wherever they are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from quietmax import Teachers
from quietmax._ray import RayEngine
from quietmax.estimators import teachers
from quietmax.estimators.blocks import LocalEngine
from quietmax.estimators.teachers import _teacher_stacks, shard_of
from quietmax.models.stacked import LARGEST_STACK, train_networks
from tests.estimators.table_of_people import files, table_of_people
from tests.estimators.test_out_of_core import USUAL
from tests.estimators.test_out_of_core import fit as fit_any

NETWORK = USUAL[Teachers]["network"]
ROWS, PEOPLE = 300, 120


def people() -> pd.DataFrame:
    """Rows of persons, who are spread over all rows; the age tells the person."""
    frame = table_of_people(ROWS, PEOPLE)
    return frame.assign(age=frame["who"].str[1:].astype(int) * 100 / PEOPLE)


def fit(source: Any, **more: Any) -> Teachers:
    fitted: Teachers = fit_any(Teachers, source, **({"teachers": 60} | more))
    return fitted


def weights(fitted: Teachers) -> np.ndarray[Any, Any]:
    return np.asarray(fitted.ensemble_.teachers.weight_vectors())


@pytest.mark.slow
def test_teachers_are_the_same_on_ray_workers(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    expected = fit(people())
    folder = files(tmp_path / "people", people(), [50, 200])
    done: list[tuple[int, int]] = []
    engine = RayEngine(workers=2, progress=lambda *each: done.append(each))
    np.testing.assert_array_equal(weights(expected), weights(fit(folder, engine=engine)))
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
    fitted = fit(folder, engine=LocalEngine(0, tmp_path))
    shards = [features[own] for features, _, _, rows, *_ in jobs for own in rows]
    assert len(shards) == count
    assert sum(map(len, shards)) == ROWS
    for person in set(frame["who"].str[1:].astype(int)):
        rows = int((frame["who"] == f"p{person}").sum())
        expected = np.zeros(count, int)
        expected[shard_of([f"p{person}".encode()], count, fitted._key())] = rows
        found = [int((np.abs(own[:, 0] - person / PEOPLE) < 0.5 / PEOPLE).sum()) for own in shards]
        assert found == expected.tolist()


def test_stacks_follow_from_public_numbers(
    tmp_path: Path, jobs: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teachers, "STACK_BYTES", 20_000)
    for engine in (LocalEngine(), LocalEngine(0, tmp_path), LocalEngine(10**4, tmp_path)):
        jobs.clear()
        columns = fit(people(), engine=engine, declared_size=PEOPLE).n_features_in_
        edges = _teacher_stacks(60, PEOPLE, columns, 2, NETWORK)
        assert 3 < len(edges) - 1 < 60
        assert [len(rows) for _, _, _, rows, *_ in jobs] == np.diff(edges).tolist()
        assert max(len(rows) for rows, *_ in jobs) < ROWS / 2
    monkeypatch.undo()
    assert np.diff(_teacher_stacks(1000, 10**6, 50, 10, NETWORK)).tolist() == [LARGEST_STACK] * 40
    assert _teacher_stacks(3, 10**9, 100, 2, NETWORK) == [0, 1, 2, 3]
