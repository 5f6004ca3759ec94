"""A small table, its group of trials and their shared inputs."""

from __future__ import annotations

import numpy as np
import pytest

from quietmax.experiments.grid import DataSource, Effort, Group, ResultStore
from quietmax.experiments.methods import SharedInputs


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> DataSource:
    """600 points in the unit square; the label says whether a + b is above 1."""
    path = tmp_path_factory.mktemp("table") / "points.csv"
    generator = np.random.default_rng(0)
    rows = [f"{a:.4f},{b:.4f},{int(a + b > 1)}" for a, b in generator.random((600, 2))]
    path.write_text("a,b,above\n" + "\n".join(rows) + "\n")
    bounds = {"a": [0.0, 1.0], "b": [0.0, 1.0]}
    return DataSource.of(str(path), {"label": "above", "classes": ["0", "1"], "bounds": bounds})


@pytest.fixture(scope="session")
def group(table: DataSource) -> Group:
    """200 training records, two shadow networks, two attacks."""
    return Group(table, Effort(200, 2, epochs=5, attack_epochs=3, attacks=("shadow", "threshold")))


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> ResultStore:
    """Where the networks of the group are stored."""
    return ResultStore(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="session")
def shared(group: Group, store: ResultStore) -> SharedInputs:
    """The shared inputs of the group."""
    return SharedInputs(group, store)


@pytest.fixture(scope="session")
def visits(tmp_path_factory: pytest.TempPathFactory) -> DataSource:
    """150 persons with 1 to 4 rows in the unit square; the label says whether a + b is above 1."""
    path = tmp_path_factory.mktemp("visits") / "visits.csv"
    generator = np.random.default_rng(1)
    persons = np.repeat(np.arange(150), np.arange(150) % 4 + 1)
    points = generator.random((len(persons), 2))
    rows = [f"p{who},{a:.4f},{b:.4f},{int(a + b > 1)}" for who, (a, b) in zip(persons, points, strict=True)]
    path.write_text("who,a,b,above\n" + "\n".join(rows) + "\n")
    bounds = {"a": [0.0, 1.0], "b": [0.0, 1.0]}
    declared = {"label": "above", "classes": ["0", "1"], "bounds": bounds, "person": "who"}
    return DataSource.of(str(path), declared)
