"""Small models of every kind, and the service on a real port."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietmax.estimators import PrivateHead, Teachers, save_private
from quietmax.ledger import Ledger, Terms
from quietmax.models import Model, TrainingSettings, save_model
from quietmax.models.features import Identity
from quietmax.models.stacked import initial_mlp
from quietmax.server import Service, Settings
from quietmax.server.deployment import deploy, load_models
from tests.server.running_service import (
    CLASSES,
    FEATURES,
    LOANS_SCHEMA,
    TABLE,
    TABLE_SCHEMA,
    Running,
    Start,
    running,
    some_loans,
    some_people,
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `plain` (ordinary), `teachers` (40 answers), `asked` (head charged per answer, 40 answers),
    `head` (released weights), and models of a table: `table` (ordinary), `inferred` (the same with an encoding that was
    not declared), `survey` (teachers, 40 answers), `loans` (head, released weights) and `summed` (the same, whose
    scores are sums over columns).
    """
    folder = tmp_path_factory.mktemp("models")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, 160)
    features = (rng.normal(size=(160, FEATURES)) + 2 * np.eye(FEATURES)[labels]).astype(np.float32)
    plain = Model(initial_mlp((FEATURES, 8, CLASSES), "tanh", (0,)), TrainingSettings((8,)), 160, "people", 0)
    save_model(plain, folder / "plain")
    public: dict[str, Any] = {"declared_size": 160, "classes": range(CLASSES)}
    teachers = Teachers(2.0, 1e-5, 40, 5, network=TrainingSettings((8,), epochs=2), **public)
    save_private(teachers.fit(features, labels), folder / "teachers", dataset="patients")
    head = PrivateHead(1.0, 1e-5, features=Identity(), **public)
    save_private(head.fit(features, labels), folder / "head", dataset="visitors")
    asked = PrivateHead(
        1.0, 1e-5, features=Identity(), method="output", release="query", queries=40, **public
    )
    save_private(asked.fit(features, labels), folder / "asked", dataset="members")
    network = initial_mlp((len(TABLE.feature_names), 8, 2), "tanh", (0,))
    inferred = replace(TABLE, inferred=("bounds of age", "categories of région"))
    for name, encoding in (("table", TABLE), ("inferred", inferred)):
        save_model(Model(network, TrainingSettings((8,)), 160, "people", 0, encoding=encoding), folder / name)
    survey = Teachers(
        2.0, 1e-5, 40, 5, network=TrainingSettings((8,), epochs=2), declared_size=400, schema=TABLE_SCHEMA
    )
    save_private(survey.fit(some_people(400)), folder / "survey", dataset="survey.csv")
    loans = PrivateHead(8.0, 1e-5, features=Identity(), declared_size=1000, schema=LOANS_SCHEMA)
    save_private(loans.fit(some_loans(2000)), folder / "loans", dataset="loans.csv")
    summed = PrivateHead(8.0, 1e-5, declared_size=1000, schema=LOANS_SCHEMA)
    save_private(summed.fit(some_loans(2000)), folder / "summed", dataset="loans.csv")
    return folder


@pytest.fixture
def folder(models: Path, tmp_path: Path) -> Path:
    """A copy of the models: deploying one moves its budget into the ledger."""
    return shutil.copytree(models, tmp_path / "models")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite") as opened:
        yield opened


@pytest.fixture
def start(tmp_path: Path, models: Path) -> Start:
    """Start the service with the named models of `models`, on a fresh SQLite ledger.

    Ordinary models have a budget for 20 answers unless the options say otherwise.
    """

    @contextmanager
    def _start(*names: str, **options: Any) -> Iterator[Running]:
        if {"plain", "table", "inferred"} & set(names):
            options = {"budget": Terms(10.0), "queries": 20, **options}
        for name in names:
            if not (tmp_path / name).exists():
                shutil.copytree(models / name, tmp_path / name)
        address = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
        with running(address, [f"{name}={tmp_path / name}" for name in names], **options) as service:
            yield service

    return _start


@pytest.fixture
def plain(start: Start) -> Iterator[Running]:
    """An ordinary model behind Algorithm 1, with a budget for 20 answers."""
    with start("plain") as service:
        yield service


@pytest.fixture
def table(start: Start) -> Iterator[Running]:
    """An ordinary model of a table behind Algorithm 1, with a budget for 20 answers."""
    with start("table") as service:
        yield service


@pytest.fixture
def idle(tmp_path: Path, models: Path) -> Iterator[Service]:
    """A service of an ordinary model with 20 answers, not started."""
    with Ledger(tmp_path / "idle.sqlite") as ledger:
        loaded = load_models(
            [f"plain={models / 'plain'}"], budget=Terms(10.0), queries=20, accept_unproven=True
        )
        yield Service(ledger, deploy(ledger, loaded, budget=Terms(10.0)), Settings(anonymous=True))


@pytest.fixture(scope="session")
def new_certificate() -> Callable[[Path], tuple[Path, Path]]:
    """Make a certificate for this machine and its key, in a new folder."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing; install it with: apt-get install -y openssl")

    def make(folder: Path) -> tuple[Path, Path]:
        folder.mkdir()
        files = (folder / "certificate.pem", folder / "key.pem")
        made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
        names = "-addext subjectAltName=IP:127.0.0.1,DNS:localhost"
        where = f"-out {files[0]} -keyout {files[1]}"
        subprocess.run(f"{made} {names} {where}".split(), check=True, capture_output=True)
        return files

    return make


@pytest.fixture(scope="session")
def certificate(
    tmp_path_factory: pytest.TempPathFactory, new_certificate: Callable[[Path], tuple[Path, Path]]
) -> tuple[Path, Path]:
    return new_certificate(tmp_path_factory.mktemp("tls") / "files")
