"""Model folders that are read, and loaded and unloaded while the service runs."""

from __future__ import annotations

import hashlib
import http.client
import inspect
import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from quietmax.accounting import GaussianCost, Guarantee
from quietmax.accounting.costs import LIMIT
from quietmax.cli.serve import command
from quietmax.data import Records, hold_out
from quietmax.errors import DataUnavailable, InvalidInput, QuietmaxError
from quietmax.estimators import PrivateHead, open_private, save_private
from quietmax.estimators.evaluation import evaluate_folder
from quietmax.ledger import Ledger, Terms
from quietmax.mechanisms import Algorithm1, Answers
from quietmax.models import Model
from quietmax.models.features import Identity
from quietmax.noise import ExactNoise
from quietmax.server import Service, Settings
from quietmax.server.deployment import Deployment, deploy
from quietmax.server.repository import (
    LOADERS,
    DesiredModels,
    ModelControl,
    ModelFolder,
    ModelRepository,
    SharedState,
    _parse_model,
    load_models,
)
from quietmax.server.run import _Server, run_in_thread
from quietmax.server.settings import Listener
from quietmax.server.telemetry import Log
from tests.server.running_service import (
    CLASSES,
    FEATURES,
    Command,
    Running,
    check_message,
    inference,
    is_ready,
    run_async,
    serve_command,
    some_rows,
    until,
)


def test_scores_that_are_not_finite_are_answered_as_undecided_and_not_with_an_error(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error after the charge would reveal something about the model."""
    broken = np.zeros((3, CLASSES))
    broken[0, 0], broken[1, 1] = np.nan, np.inf
    (deployment,) = load_models([str(models / "plain")], budget=Terms(1.0), accept_unproven=True)
    monkeypatch.setattr(Model, "scores", lambda *_: broken)
    answers = deployment.answer(np.zeros((3, FEATURES), np.float32))
    assert answers.probabilities is not None
    assert np.isfinite(answers.probabilities).all()
    assert len(answers.labels) == 3


def test_served_answers_draw_exact_noise_only(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a mechanism releases, the source is the exact one; no option or file names another."""
    sources = []
    original = Algorithm1.release

    def watched(self: Algorithm1, scores: Any, source: Any) -> Any:
        sources.append(source)
        return original(self, scores, source)

    monkeypatch.setattr(Algorithm1, "release", watched)
    (deployment,) = load_models([str(models / "plain")], budget=Terms(1.0), accept_unproven=True)
    deployment.answer(np.zeros((2, FEATURES), np.float32))
    assert sources
    assert all(type(source) is ExactNoise and source.exact for source in sources)
    for entry in (command, load_models, ModelFolder, Deployment, deploy, Settings, Service):
        assert not {"seed", "seeded", "source", "random_state"} & set(inspect.signature(entry).parameters)


def test_a_model_without_proven_guarantee_is_refused_unless_accepted(folder: Path) -> None:
    with pytest.raises(
        InvalidInput, match=r"is refuted, not proven: .*theory page, section 2.* requires `accept_unproven`"
    ):
        load_models([str(folder / "plain")], budget=Terms(1.0))
    (deployment,) = load_models([str(folder / "plain")], budget=Terms(1.0), accept_unproven=True)
    assert deployment.status == "refuted"
    for name in ("head", "teachers", "asked"):
        assert load_models([str(folder / name)])[0].status == "proven"


def test_a_head_trained_with_a_seed_is_refused_like_any_other_that_is_not_proven(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    head = PrivateHead(
        1.0, 1e-5, features=Identity(), declared_size=60, classes=range(2), random_state=0
    ).fit(rng.normal(size=(60, 3)), rng.integers(0, 2, 60))
    save_private(head, tmp_path / "seeded", dataset="d")
    with pytest.raises(InvalidInput, match="is conditional, not proven"):
        load_models([str(tmp_path / "seeded")])


def test_a_folder_that_claims_to_be_proven_without_being_a_known_kind_is_refused(folder: Path) -> None:
    path = folder / "plain" / "model.json"
    description = json.loads(path.read_text())
    path.write_text(json.dumps({**description, "kind": "pickle"}))
    with pytest.raises(InvalidInput, match=r"must be one of mlp, head, teachers, dpsgd, but .* has 'pickle'"):
        load_models([str(folder / "plain")])
    with pytest.raises(DataUnavailable, match="no model in"):
        load_models([str(folder)])


def test_a_further_kind_is_one_function(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    guarantee = Guarantee.of(
        GaussianCost(0.5), status="proven", because="A test of the registry (THEORY 3.1)."
    )

    def load(folder: ModelFolder) -> Deployment:
        return Deployment(
            folder.name,
            folder.version,
            kind="own",
            inputs=3,
            classes=("a", "b"),
            dataset=folder.dataset,
            mechanism="released weights",
            answer=lambda rows: Answers(np.zeros(len(rows), np.int64), None),
            guarantee=guarantee,
            digest=folder._digest(),
            training_cost=guarantee.cost,
            terms=Terms(1.0, 1e-5),
        )

    monkeypatch.setitem(LOADERS, "own", load)
    path = folder / "plain" / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "kind": "own"}))
    (deployment,) = deploy(ledger, load_models([str(folder / "plain")]))
    assert (deployment.unit_cost, deployment.account.spent_units) == (0, LIMIT)


@pytest.mark.parametrize(
    ("text", "name", "version"),
    [("a/b", "b", "1"), ("x=a/b", "x", "1"), ("x/7=a/b", "x", "7"), ("x/v1.2=/a", "x", "v1.2")],
)
def test_models_are_named_after_their_folder_or_as_stated(text: str, name: str, version: str) -> None:
    assert _parse_model(text)[:2] == (name, version)


@pytest.mark.parametrize("text", ["", "a b=c", "x/=c", "ä=c", "x/1 2=c", "/"])
def test_invalid_names_of_models_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        _parse_model(text)


def test_two_models_of_one_name_and_version_are_refused(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="must be unique, got two models called head/1"):
        load_models([str(folder / "head"), f"head={folder / 'head'}"])


def test_an_ordinary_model_requires_a_budget_and_algorithm_1(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="`budget` is required"):
        load_models([str(folder / "plain")], accept_unproven=True)
    with pytest.raises(InvalidInput, match="must be algorithm1"):
        load_models(
            [str(folder / "plain")], budget=Terms(1.0), mechanism="sampled-neuron", accept_unproven=True
        )
    with pytest.raises(InvalidInput, match="must be noisy-max, got 'algorithm1'"):
        load_models([str(folder / "teachers")], mechanism="algorithm1")
    with pytest.raises(InvalidInput, match="`mechanism` must not be set"):
        load_models([str(folder / "head")], mechanism="sampled-neuron")


def test_the_digest_of_a_served_model_changes_with_weights_and_mechanism(folder: Path) -> None:
    def digest(**more: Any) -> bytes:
        return load_models([str(folder / "plain")], budget=Terms(1.0), accept_unproven=True, **more)[0].digest

    first = digest()
    assert first == digest()
    assert first != digest(queries=2)
    weights = folder / "plain" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    with pytest.raises(DataUnavailable, match=r"are not those that model\.json describes"):
        digest()
    path = folder / "plain" / "model.json"
    description = json.loads(path.read_text())
    path.write_text(json.dumps(description | {"weights_sha256": hashlib.sha256(content).hexdigest()}))
    assert first != digest()


def test_a_folder_with_an_equals_sign_in_its_name_is_a_folder(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(models / "head", tmp_path / "eps=1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="NAME=FOLDER gives a folder another name"):
        load_models(["eps=1"])
    (deployment,) = load_models(["head=eps=1"])
    assert deployment.label == "head/1"
    with pytest.raises(QuietmaxError):
        load_models(["eps=2"])


def test_a_mechanism_that_spends_a_delta_per_answer_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarantee = Algorithm1.guarantee

    def with_delta(self: Algorithm1, classes: int) -> Guarantee:
        return replace(guarantee(self, classes), extra_delta=1e-9)

    monkeypatch.setattr(Algorithm1, "guarantee", with_delta)
    with pytest.raises(InvalidInput, match="spends a delta with every answer"):
        load_models([str(folder / "plain")], budget=Terms(1.0), accept_unproven=True)


Add = Callable[[str, str], Path]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    return folder


@pytest.fixture
def add(models: Path, repository: Path) -> Add:
    """Copy one of `models` into the repository, as NAME/VERSION."""
    return lambda kind, label: shutil.copytree(models / kind, repository / label)


def control_of(repository: Path, state: Path, reserved: tuple[str, ...] = ()) -> ModelControl:
    state.mkdir(exist_ok=True)
    return ModelControl(
        ModelRepository(repository),
        SharedState(state),
        lambda model: load_models([model])[0],
        deploy,
        reserved,
    )


@contextmanager
def serving(tmp_path: Path, repository: Path, fixed: Path | None = None) -> Iterator[Running]:
    """Run a service with a repository in a thread."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    loaded = [] if fixed is None else load_models([f"fixed={fixed}"])
    control = control_of(repository, tmp_path / "state", tuple(each.name for each in loaded))
    admin, _ = ledger.create_key("owner", "admin")
    key, _ = ledger.create_key("ann")
    log = io.BytesIO()
    bound = deploy(ledger, [*loaded, *control.start()])
    with run_in_thread(Service(ledger, bound, log=Log(log), control=control)) as url:
        started = Running(url, None, admin, key, log)  # type: ignore[arg-type]
        yield started
        started.http.close()


@pytest.fixture(name="running")
def running_with_a_head(tmp_path: Path, repository: Path, add: Add) -> Iterator[Running]:
    """A service of a repository with version 1 of a head `m`."""
    add("head", "m/1")
    with serving(tmp_path, repository) as started:
        yield started


def as_admin(running: Running) -> dict[str, str]:
    return {"Authorization": f"Bearer {running.admin}"}


def post(running: Running, path: str, **more: Any) -> httpx.Response:
    return running.http.post(f"/v2/repository/{path}", headers=as_admin(running), **more)


def served(running: Running) -> list[str]:
    models = running.http.get("/v2/models").json()["models"]
    return sorted(f"{model['name']}/{model['version']}" for model in models)


def test_an_unmodified_client_lists_loads_and_unloads_models(running: Running, add: Add) -> None:
    client = triton.InferenceServerClient(running.url.removeprefix("http://"))
    headers = as_admin(running)
    assert client.get_server_metadata()["extensions"] == [
        "binary_tensor_data",
        "model_repository",
        "privacy_budget",
    ]
    assert client.get_model_repository_index(headers) == [
        {"name": "m", "version": "1", "state": "READY", "reason": ""}
    ]
    add("asked", "m/2")
    assert client.get_model_repository_index(headers)[1] == {
        "name": "m",
        "version": "2",
        "state": "UNAVAILABLE",
        "reason": "not loaded",
    }
    client.load_model("m", headers)
    assert served(running) == ["m/2"]
    assert client.is_model_ready("m", headers=headers)
    assert running.infer(some_rows(1), "m").json()["parameters"]["cost"] > 0
    client.unload_model("m", headers)
    assert served(running) == []
    assert running.infer(some_rows(1), "m").status_code == 404
    client.load_model("m", headers)
    assert running.infer(some_rows(1), "m").status_code == 200
    with pytest.raises(InferenceServerException, match="no such model"):
        client.load_model("absent", headers)
    with pytest.raises(InferenceServerException, match="`parameters` are not supported"):
        client.load_model("m", headers, config="{}")
    client.close()
    events = [json.loads(line) for line in running.log.getvalue().splitlines()]
    loaded = [each for each in events if each["event"] == "model_loaded"]
    assert [(each["model"], each["client"]) for each in loaded] == [("m/2", "owner")] * 2


def test_only_administrators_see_and_change_the_repository(running: Running) -> None:
    for path in ("index", "models/m/load", "models/m/unload"):
        for response, status in (
            (running.http.post(f"/v2/repository/{path}"), 403),
            (httpx.post(f"{running.url}/v2/repository/{path}"), 401),
        ):
            assert response.status_code == status
            check_message(response)
    assert served(running) == ["m/1"]


def test_a_model_that_cannot_be_loaded_leaves_the_old_one_serving(running: Running, add: Add) -> None:
    broken = add("head", "m/2")
    weights = broken / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    response = post(running, "models/m/load")
    assert response.status_code == 400
    check_message(response)
    assert running.infer(some_rows(1), "m").json()["model_version"] == "1"
    row = post(running, "index").json()[1]
    assert (row["version"], row["state"], row["reason"]) == ("2", "UNAVAILABLE", response.json()["error"])
    shutil.rmtree(broken)
    add("plain", "m/2")  # an ordinary model: it would need a budget and a consent
    response = post(running, "models/m/load")
    assert response.status_code == 400
    assert "budget" in response.json()["error"]
    assert served(running) == ["m/1"]
    assert post(running, "index", json={"ready": True}).json() == [
        {"name": "m", "version": "1", "state": "READY", "reason": ""}
    ]


def test_training_is_charged_once_and_unloading_refunds_nothing(
    tmp_path: Path, repository: Path, add: Add
) -> None:
    add("head", "m/1")
    with serving(tmp_path, repository) as running:
        budget = running.http.get("/v2/models/m/budget").json()
        assert budget["spent_fraction"] == 1.0
        for _ in range(2):
            assert post(running, "models/m/unload").status_code == 200
            assert post(running, "models/m/load").status_code == 200
        add("head", "m/2")  # the same weights as another version: the same training
        assert post(running, "models/m/load").status_code == 200
        assert running.http.get("/v2/models/m/budget").json() == budget
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        (account,) = ledger.accounts()
        assert account.spent_units == account.limit_units
        with sqlite_rows(
            tmp_path / "ledger.sqlite", "SELECT count(*) FROM journal WHERE kind = 'training'"
        ) as rows:
            assert rows == [(1,)]


@contextmanager
def sqlite_rows(path: Path, query: str) -> Iterator[list[tuple[Any, ...]]]:
    connection = sqlite3.connect(path)
    try:
        yield connection.execute(query).fetchall()
    finally:
        connection.close()


def test_nothing_outside_the_repository_can_be_loaded(
    tmp_path: Path, repository: Path, models: Path, add: Add
) -> None:
    add("head", "m/1")
    (repository / "link").mkdir()
    (repository / "link" / "1").symlink_to(models / "head")
    (repository / "away").symlink_to(models)
    add("head", ".hidden/1")
    add("head", "m/.2")
    (repository / "file").write_text("")
    found = ModelRepository(repository)
    assert found._names() == ["m"]
    assert found._versions("m") == ["1"]
    assert found._versions("../" + tmp_path.name) == []
    add("head", "m/10")
    add("head", "m/9")
    assert found._versions("m") == ["1", "9", "10"]
    with serving(tmp_path, repository) as running:
        for name in ("..", "%2e%2e", "..%2Frepository%2Fm", "link", "away", "m%2F1", "%2Fetc", "a" * 200):
            for action in ("load", "unload"):
                response = post(running, f"models/{name}/{action}")
                assert response.status_code == 404, (name, response.text)
                check_message(response)


def test_models_named_at_the_start_can_neither_be_replaced_nor_unloaded(
    tmp_path: Path, repository: Path, models: Path, add: Add
) -> None:
    with serving(tmp_path, repository, fixed=models / "head") as running:
        add("head", "fixed/2")
        for action in ("load", "unload"):
            response = post(running, f"models/fixed/{action}")
            assert response.status_code == 400
            assert "named at the start" in response.json()["error"]
        assert served(running) == ["fixed/1"]
    with pytest.raises(ValueError, match="Model names must be unique, but fixed is also"):
        control_of(repository, tmp_path / "other", ("fixed",))


@pytest.mark.parametrize(
    ("body", "status"), [(b"[1]", 400), (b"{", 400), (b"x" * 70_000, 413), (b'{"ready": 1}', 200)]
)
def test_a_wrong_body_is_an_error(running: Running, body: bytes, status: int) -> None:
    assert post(running, "index", content=body).status_code == status


def test_a_service_without_a_repository_lists_its_models_and_loads_none(start: Any) -> None:
    with start("head") as running:
        row = {"name": "head", "version": "1", "state": "READY", "reason": ""}
        assert post(running, "index").json() == [row]
        response = post(running, "models/head/unload")
        assert response.status_code == 400
        assert "no model repository" in response.json()["error"]


def test_a_request_in_flight_is_answered_by_the_model_it_was_sent_to(
    tmp_path: Path, repository: Path, add: Add
) -> None:
    add("head", "m/1")
    body = json.dumps(inference(some_rows(2))).encode()
    with serving(tmp_path, repository) as running:
        slow = http.client.HTTPConnection(running.url.removeprefix("http://"))
        slow.putrequest("POST", "/v2/models/m/infer")
        slow.putheader("authorization", f"Bearer {running.key}")
        slow.putheader("content-length", str(len(body)))
        slow.endheaders(body[:10])
        time.sleep(0.3)
        add("head", "m/2")
        assert post(running, "models/m/load").status_code == 200
        assert running.infer(some_rows(1), "m").json()["model_version"] == "2"
        assert post(running, "models/m/unload").status_code == 200
        slow.send(body[10:])
        response = slow.getresponse()
        assert (response.status, json.loads(response.read())["model_version"]) == (200, "1")
        slow.close()


def test_no_request_fails_while_versions_change(running: Running, add: Add) -> None:
    answers: list[tuple[int, str]] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            response = running.infer(some_rows(1), "m")
            answers.append((response.status_code, response.json().get("model_version")))

    thread = threading.Thread(target=ask)
    thread.start()
    for version in ("1", "2", "3", "4"):
        if version != "1":
            add("head", f"m/{version}")
            assert post(running, "models/m/load").status_code == 200
        until = time.monotonic() + 30
        while (200, version) not in answers and time.monotonic() < until:
            time.sleep(0.01)
    stop.set()
    thread.join()
    assert set(answers) == {(200, version) for version in "1234"}


def test_a_worker_that_cannot_follow_keeps_its_model_and_is_reported(
    tmp_path: Path, repository: Path, add: Add
) -> None:
    add("head", "m/1")
    control = control_of(repository, tmp_path / "state")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        control._serve(ledger, deploy(ledger, control.start()), lambda: None)
        state = SharedState.__new__(SharedState)
        state.__dict__.update(vars(control._state))
        desired = state._read()
        version = desired.models["m"]
        assert version is not None
        other = type(version)("1", "00", "another folder")
        state._write(DesiredModels(desired.revision + 1, {"m": other}))
        assert control._is_behind
        (error,) = control._follow()
        assert "has changed since it was loaded" in error
        assert [each.label for each in control.deployments] == ["m/1"]
        assert state._wait(desired.revision + 1, "m") == (0, 1, error)
        assert state._wait(desired.revision + 1, "another") == (1, 1, None)
        assert not control._is_behind


def test_a_worker_that_cannot_follow_tries_again_until_it_can(
    tmp_path: Path, repository: Path, add: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quietmax.server.repository._MAX_RETRY_SECONDS", 0.2)
    add("head", "m/1")
    control = control_of(repository, tmp_path / "state")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        control._serve(ledger, deploy(ledger, control.start()), lambda: None)
        assert control._follow() == []
        desired = control._state._read()
        version = desired.models["m"]
        assert version is not None
        newer = add("head", "m/2")
        (newer / "model.json").rename(newer / "away")  # a file system that is away for a moment
        (read,) = load_models([f"m/2={repository / 'm' / '1'}"])
        other = type(version)("2", read.digest.hex(), "")
        control._state._write(DesiredModels(desired.revision + 1, {"m": other}))
        for _ in range(2):
            until(lambda: control._is_behind)
            (error,) = control._follow()
            assert not control._is_behind
            assert control._state._wait(desired.revision + 1, "m") == (0, 1, error)
        assert [each.label for each in control.deployments] == ["m/1"]
        (newer / "away").rename(newer / "model.json")
        until(lambda: control._is_behind)
        assert control._follow() == []
        assert [each.label for each in control.deployments] == ["m/2"]
        assert control._state._wait(desired.revision + 1, "m") == (1, 1, None)
        time.sleep(0.3)
        assert not control._is_behind


def test_a_worker_that_starts_without_a_model_says_so_and_loads_it_later(
    tmp_path: Path, repository: Path, add: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quietmax.server.repository._MAX_RETRY_SECONDS", 0.0)
    folder = add("head", "m/1")
    control = control_of(repository, tmp_path / "state")
    control._models = {}  # as in a worker that restarts after another one has loaded the model
    (folder / "model.json").rename(folder / "away")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert control.start() == []
        control._serve(ledger, [], lambda: None)
        control._confirm()
        revision = control._state._read().revision
        confirmed, workers, error = control._state._wait(revision, "m")
        assert (confirmed, workers) == (0, 1)
        assert error is not None
        (folder / "away").rename(folder / "model.json")
        assert control._is_behind
        assert control._follow() == []
        assert [each.label for each in control.deployments] == ["m/1"]
        assert control._state._wait(revision, "m") == (1, 1, None)


def test_the_service_goes_on_following_after_an_unexpected_error(
    tmp_path: Path, repository: Path, add: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quietmax.server.service._FOLLOW_RETRY_SECONDS", 0.0)
    add("head", "m/1")
    follow, calls = ModelControl._follow, []

    def once_broken(control: ModelControl) -> list[str]:
        calls.append(control)
        if len(calls) == 1:
            raise RuntimeError("can't start new thread")
        return follow(control)

    monkeypatch.setattr(ModelControl, "_follow", once_broken)
    with serving(tmp_path, repository) as running:
        until(lambda: len(calls) == 2)
        until(lambda: running.log.getvalue().count(b"RuntimeError") == 1)


def test_changes_that_wait_for_other_workers_keep_no_request_waiting(
    tmp_path: Path, repository: Path, add: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    add("head", "m/1")
    go_on = threading.Event()
    monkeypatch.setattr(ModelControl, "unload", lambda *_: go_on.wait(60))
    with serving(tmp_path, repository) as running, ThreadPoolExecutor(40) as pool:
        changes = [pool.submit(post, running, "models/m/unload") for _ in range(40)]
        try:
            time.sleep(0.5)
            assert httpx.get(f"{running.url}/v2/health/ready", timeout=2).status_code == 200
            assert httpx.get(
                f"{running.url}/v2/models/m/budget", headers=running.http.headers, timeout=2
            ).json()
            assert not any(each.done() for each in changes)
        finally:
            go_on.set()
        assert {each.result().status_code for each in changes} == {200}


def test_a_new_evaluation_is_charged_when_the_repository_is_loaded_again(
    tmp_path: Path, repository: Path
) -> None:
    features = np.random.default_rng(0).random((600, 3)).astype(np.float32)
    records = Records("people", features, (features[:, 0] > 0.5).astype(np.int64), 2)
    head = PrivateHead(epsilon=1.0, delta=1e-5, declared_size=480).fit(hold_out(records, 0.2).train)
    folder = save_private(head, repository / "m" / "1", dataset="people")
    control = control_of(repository, tmp_path / "state")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        control._serve(ledger, deploy(ledger, control.start()), lambda: None)
        assert control._reload() == ([], {})
        evaluate_folder(folder, open_private(folder), records)
        assert control._reload() == (["m/1"], {})
        assert control._reload() == ([], {})
        assert [row.kind for row in ledger.export("people")].count("evaluation") == 1


def test_a_change_waits_for_workers_that_live_and_for_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quietmax.server.repository._CONFIRM_TIMEOUT", 0.2)
    state = SharedState(tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / f"worker-{ended.pid}").write_text('{"revision": 0, "errors": {}}')
    state._confirm(3, {})
    assert state._wait(3, "m") == (1, 1, None)
    (tmp_path / f"worker-{os.getppid()}").write_text('{"revision": 2, "errors": {}}')
    assert state._wait(3, "m") == (1, 2, None)
    with (
        state._lock(),
        pytest.raises(Exception, match="Another change of the models is in progress"),
        state._lock(),
    ):
        pass


@contextmanager
def _serving_repository(tmp_path: Path, repository: Path, *options: str) -> Iterator[tuple[Command, Running]]:
    """Run `quietmax serve --repository` as a process."""
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        admin, _ = ledger.create_key("owner", "admin")
        key, _ = ledger.create_key("ann")
    with serve_command(tmp_path / "ledger.sqlite", "--repository", repository, *options) as started:
        url = started.told["url"]
        until(lambda: is_ready(url))
        running = Running(url, None, admin, key, started.lines)  # type: ignore[arg-type]
        yield started, running
        running.http.close()


def versions_of_workers(running: Running, count: int = 12) -> set[str | None]:
    """Which versions answer, over several connections: the workers share them."""
    found = set()
    for _ in range(count):
        response = httpx.post(
            f"{running.url}/v2/models/m/infer",
            json=inference(some_rows(1)),
            headers=running.http.headers,
            timeout=60,
        )
        found.add(response.json().get("model_version"))
    return found


def children(process: int) -> list[int]:
    listed = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(each) for each in listed.split()]


def test_all_workers_follow_a_load_a_kill_and_an_unload(tmp_path: Path, repository: Path, add: Add) -> None:
    add("head", "m/1")
    with _serving_repository(tmp_path, repository, "--workers", "2") as (started, running):
        process = started.process
        assert versions_of_workers(running) == {"1"}
        add("head", "m/2")
        assert post(running, "models/m/load").status_code == 200
        assert versions_of_workers(running) == {"2"}
        victim, other = children(process.pid)
        os.kill(victim, signal.SIGKILL)
        until(lambda: set(children(process.pid)) - {victim, other})
        os.kill(other, signal.SIGKILL)  # now both have been restarted and read what to serve
        time.sleep(1)
        assert versions_of_workers(running) == {"2"}
        assert post(running, "models/m/unload").status_code == 200
        assert versions_of_workers(running) == {None}
    with sqlite_rows(
        tmp_path / "ledger.sqlite", "SELECT count(*) FROM journal WHERE kind = 'training'"
    ) as rows:
        assert rows == [(1,)]


def test_sighup_loads_what_is_new_and_never_stops_the_service(
    tmp_path: Path, repository: Path, add: Add
) -> None:
    add("head", "m/1")
    with _serving_repository(tmp_path, repository) as (started, running):
        process = started.process
        add("head", "m/2")
        broken = add("head", "n/1")
        (broken / "model.json").write_text("{")
        process.send_signal(signal.SIGHUP)
        until(lambda: "model_failed" in started.events())
        assert served(running) == ["m/2"]
        assert post(running, "models/m/unload").status_code == 200
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert served(running) == []  # it was unloaded on request
        assert process.poll() is None


def test_sighup_reads_the_certificate_again_and_keeps_it_if_the_new_one_is_broken(
    tmp_path: Path, models: Path, certificate: tuple[Path, Path]
) -> None:
    files = [shutil.copy(each, tmp_path / f"{number}.pem") for number, each in enumerate(certificate)]
    log = io.BytesIO()
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        bound = deploy(ledger, load_models([f"m={models / 'head'}"]))
        listener = Listener("127.0.0.1", 0, *files)
        server = _Server(Service(ledger, bound, log=Log(log)), listener)
        before = listener.ssl_context
        run_async(server._reload())
        assert listener.ssl_context is not before
        read = listener.ssl_context
        files[0].write_text("This is no certificate.")
        run_async(server._reload())
        assert listener.ssl_context is read
        assert server._service.log.flush()
    assert b"certificate_invalid" in log.getvalue()
