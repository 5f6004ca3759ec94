"""Model folders that are read, at the start and while the service runs."""

from __future__ import annotations

import hashlib
import http.client
import inspect
import io
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from quietmax.accounting import Guarantee
from quietmax.cli.serve import command
from quietmax.data import Records, hold_out
from quietmax.errors import DataUnavailable, InvalidInput, QuietmaxError
from quietmax.estimators import PrivateHead, open_private, save_private
from quietmax.estimators.evaluation import evaluate_folder
from quietmax.estimators.serialization import decide_folder
from quietmax.ledger import Ledger, Terms
from quietmax.mechanisms import Algorithm1
from quietmax.models import Model
from quietmax.models.features import Identity
from quietmax.noise import ExactNoise
from quietmax.server import Service, Settings, deployment
from quietmax.server.deployment import (
    Deployment,
    ModelRepository,
    _parse_model,
    deploy,
    load_models,
)
from quietmax.server.run import _Server, run_in_thread
from quietmax.server.settings import Listener
from quietmax.server.telemetry import Log
from tests.server.running_service import (
    CLASSES,
    FEATURES,
    Running,
    inference,
    is_ready,
    run_async,
    serve_command,
    some_rows,
    until,
    watch,
)


def test_scores_that_are_not_finite_are_answered_as_undecided_and_not_with_an_error(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error after the charge would reveal something about the model."""
    broken = np.zeros((3, CLASSES))
    broken[0, 0], broken[1, 1] = np.nan, np.inf
    (served,) = load_models([str(models / "plain")], budget=Terms(1.0), accept_unproven=True)
    monkeypatch.setattr(Model, "scores", lambda *_: broken)
    answers = served.answer(np.zeros((3, FEATURES), np.float32))
    assert answers.probabilities is not None
    assert np.isfinite(answers.probabilities).all()
    assert len(answers.labels) == 3


def test_served_answers_draw_exact_noise_only(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a mechanism releases, the source is the exact one; no option or file names another."""
    sources = watch(monkeypatch, Algorithm1, "release", lambda *given: given[-1])
    (served,) = load_models([str(models / "plain")], budget=Terms(1.0), accept_unproven=True)
    served.answer(np.zeros((2, FEATURES), np.float32))
    assert sources
    assert all(type(source) is ExactNoise and source.exact for source in sources)
    for entry in (command, load_models, Deployment, deploy, Settings, Service):
        assert not {"seed", "seeded", "source", "random_state"} & set(inspect.signature(entry).parameters)


def test_a_model_without_proven_guarantee_is_refused_unless_accepted(folder: Path) -> None:
    rng = np.random.default_rng(0)
    seeded = PrivateHead(
        1.0, 1e-5, features=Identity(), declared_size=60, classes=range(2), random_state=0
    ).fit(rng.normal(size=(60, 3)), rng.integers(0, 2, 60))
    save_private(seeded, folder / "seeded", dataset="d")
    for name, message in (
        ("plain", r"is refuted, not proven: .*theory page, section 2.* requires `accept_unproven`"),
        ("seeded", "is conditional, not proven"),
    ):
        with pytest.raises(InvalidInput, match=message):
            load_models([str(folder / name)], budget=Terms(1.0))
    (served,) = load_models([str(folder / "plain")], budget=Terms(1.0), accept_unproven=True)
    assert served.status == "refuted"
    for name in ("head", "teachers", "asked"):
        assert load_models([str(folder / name)])[0].status == "proven"


def test_folders_that_cannot_be_served_are_refused(folder: Path) -> None:
    path = shutil.copytree(folder / "plain", folder / "other") / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "kind": "pickle"}))
    head = folder / "head"
    refused: list[tuple[list[Any], type[Exception], str]] = [
        ([folder / "other"], InvalidInput, r"must be one of mlp, head, teachers, dpsgd, but .* has 'pickle'"),
        ([folder], DataUnavailable, "no model in"),
        ([folder / "plain"], InvalidInput, "`budget` is required"),
        ([head, f"head={head}"], InvalidInput, "must be unique, got two models called head/1"),
    ]
    for models, kind, message in refused:
        with pytest.raises(kind, match=message):
            load_models(list(map(str, models)), accept_unproven=True)


@pytest.mark.parametrize(
    ("text", "name", "version"),
    [("a/b", "b", ""), ("x=a/b", "x", ""), ("x/7=a/b", "x", "7"), ("x/v1.2=/a", "x", "v1.2")],
)
def test_models_are_named_after_their_folder_or_as_stated(text: str, name: str, version: str) -> None:
    assert _parse_model(text)[:2] == (name, version)


@pytest.mark.parametrize("text", ["", "a b=c", "x/=c", "ä=c", "x/1 2=c", "/"])
def test_invalid_names_of_models_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        _parse_model(text)


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
    (served,) = load_models(["head=eps=1"])
    assert served.label == "head/1"
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


def opened(repository: Path, reserved: tuple[str, ...] = (), keep: int = 1) -> ModelRepository:
    return ModelRepository(repository, load_models, deploy, reserved, keep)


def labels(models: Iterable[Deployment]) -> list[str]:
    return sorted(model.label for model in models)


@contextmanager
def serving(tmp_path: Path, repository: Path, fixed: Path | None = None, keep: int = 1) -> Iterator[Running]:
    """Run a service with a repository in a thread."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    loaded = [] if fixed is None else load_models([f"fixed={fixed}"])
    models = opened(repository, tuple(each.name for each in loaded), keep)
    models.start(ledger)
    key, _ = ledger.create_key("ann")
    log = io.BytesIO()
    service = Service(ledger, deploy(ledger, loaded), log=Log(log), repository=models)
    with run_in_thread(service) as url:
        started = Running(url, service, "", key, log)
        yield started
        started.http.close()


def reload(running: Running) -> None:
    """Read the repository again, as SIGHUP does."""
    run_async(running.service._reload())


def test_the_highest_version_of_each_model_below_the_directory_is_served(
    tmp_path: Path, repository: Path, models: Path, add: Add, ledger: Ledger
) -> None:
    for version in ("1", "9", "10", ".11"):
        add("head", f"m/{version}")
    (repository / "link").mkdir()
    (repository / "link" / "1").symlink_to(models / "head")
    (repository / "away").symlink_to(models)
    add("head", ".hidden/1")
    (repository / "file").write_text("")
    assert labels(opened(repository).start(ledger)) == ["m/10"]
    assert labels(opened(repository).start(None)) == ["m/10"]
    with pytest.raises(InvalidInput, match="Model names must be unique, but m is also"):
        opened(repository, ("m",)).start(ledger)
    with pytest.raises(InvalidInput, match="must be a directory"):
        opened(tmp_path / "absent")


def test_what_is_new_is_served_and_what_is_gone_is_not_while_the_service_runs(
    tmp_path: Path, repository: Path, models: Path, add: Add
) -> None:
    add("head", "m/1")
    with serving(tmp_path, repository, fixed=models / "head") as running:
        budget = running.http.get("/v2/models/m/budget").json()
        assert budget["spent_fraction"] == 1.0
        add("head", "m/2")  # the same weights as another version: the same training
        add("head", "fixed/2")
        reload(running)
        assert labels(running.service.deployments) == ["fixed/1", "m/2"]
        assert running.infer(some_rows(1), "m").json()["model_version"] == "2"
        shutil.rmtree(repository / "m")
        reload(running)
        assert running.infer(some_rows(1), "m").status_code == 404
        add("head", "m/1")
        reload(running)
        assert running.http.get("/v2/models/m/budget").json() == budget, "a training is charged once"
        repository.rename(tmp_path / "away")
        reload(running)
        assert labels(running.service.deployments) == ["fixed/1", "m/1"]
        told = [line for line in running.lines() if line["event"].startswith("model_")]
        reserved = "Model names must be unique, but fixed is also in the model repository."
        assert [(each["event"], each["model"], each.get("error")) for each in told[:-1]] == [
            ("model_loaded", "m/2", None),
            ("model_unloaded", "m/1", None),
            ("model_failed", "fixed", reserved),
            ("model_unloaded", "m", None),
            ("model_failed", "fixed", reserved),
            ("model_loaded", "m/1", None),
            ("model_failed", "fixed", reserved),
        ]
        assert "is away; its models stay" in told[-1]["error"]
        kinds = [row.kind for row in running.ledger.export("visitors")]
    assert kinds.count("training") == 1


@pytest.mark.parametrize("problem", ["weights", "json", "budget", "code"])
def test_a_model_that_cannot_be_served_leaves_the_one_before_it(
    repository: Path, add: Add, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    add("head", "m/1")
    models = opened(repository)
    models.start(ledger)
    broken = add("plain" if problem == "budget" else "head", "m/2")
    weights = broken / "weights.safetensors"
    if problem == "weights":
        weights.write_bytes(weights.read_bytes()[:-8])
    elif problem == "json":
        (broken / "model.json").write_text("{")
    elif problem == "code":
        monkeypatch.setattr(deployment, "open_private", lambda _: 1 / 0)
    add("head", "n/1")
    errors = models.refresh(ledger)
    assert labels(models.deployments) == (["m/1"] if problem == "code" else ["m/1", "n/1"])
    assert set(errors) == ({"m", "n"} if problem == "code" else {"m"})
    with pytest.raises(QuietmaxError):
        opened(repository).start(ledger)


def test_a_model_that_cannot_be_paid_for_is_not_served(repository: Path, add: Add, ledger: Ledger) -> None:
    add("head", "m/1")
    models = opened(repository)
    models.start(ledger)
    ledger.revoke("visitors", None, "The study is over.")
    folder = add("head", "m/2")
    description = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**description, "note": "another training"}))
    (error,) = models.refresh(ledger).values()
    assert "visitors" in error
    assert labels(models.deployments) == ["m/1"]


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
        reload(running)
        assert running.infer(some_rows(1), "m").json()["model_version"] == "2"
        slow.send(body[10:])
        response = slow.getresponse()
        assert (response.status, json.loads(response.read())["model_version"]) == (200, "1")
        slow.close()


def test_no_request_is_lost_while_versions_are_replaced(tmp_path: Path, repository: Path, add: Add) -> None:
    """Some ask for the newest version, some for one that they have pinned, until it is retired."""
    answers: list[tuple[str | None, int, str | None]] = []
    stop = threading.Event()
    add("head", "m/1")
    with serving(tmp_path, repository, keep=2) as running:

        def ask(pinned: str | None) -> None:
            path = "/v2/models/m" + ("" if pinned is None else f"/versions/{pinned}")
            with httpx.Client(base_url=running.url, headers=running.http.headers, timeout=60) as http:
                while not stop.is_set():
                    response = http.post(f"{path}/infer", json=inference(some_rows(1)))
                    answers.append((pinned, response.status_code, response.json().get("model_version")))

        threads = [threading.Thread(target=ask, args=(pinned,)) for pinned in (None, None, "1", "2")]
        for thread in threads:
            thread.start()
        for version in "12345":
            if version != "1":
                add("head", f"m/{version}")
                reload(running)
            until(lambda wanted=(None, 200, version): wanted in answers, 30)  # type: ignore[misc]
        stop.set()
        for thread in threads:
            thread.join()
        gone = running.http.post("/v2/models/m/versions/2/infer", json=inference(some_rows(1)))
        assert gone.status_code == 410
        assert "Version 2 of this model is retired" in gone.json()["error"]
        assert running.http.get("/v2/models/m/versions/6").status_code == 404
        assert running.http.get("/v2/models/m").json()["versions"] == ["4", "5"]
    assert {each for each in answers if each[0] is None} == {(None, 200, version) for version in "12345"}
    for pinned, first in (("1", 200), ("2", 404)):
        found = [status for asked, status, _ in answers if asked == pinned]
        assert list(dict.fromkeys(found)) in ([first, 200, 410], [200, 410]), "served, then retired"
        assert {got for asked, status, got in answers if (asked, status) == (pinned, 200)} <= {pinned}


def test_the_newest_versions_are_kept_and_a_broken_one_retires_nothing(
    repository: Path, add: Add, ledger: Ledger
) -> None:
    for version in ("1", "2", "3"):
        add("head", f"m/{version}")
    models = opened(repository, keep=2)
    models.start(ledger)
    assert labels(models.deployments) == ["m/2", "m/3"]
    (add("head", "m/4") / "model.json").write_text("{")
    assert set(models.refresh(ledger)) == {"m"}
    assert labels(models.deployments) == ["m/2", "m/3"]
    shutil.rmtree(repository / "m" / "4")
    add("head", "m/5")
    assert models.refresh(ledger) == {}
    assert labels(models.deployments) == ["m/3", "m/5"]
    assert models.has_seen("m", "1")
    assert not models.has_seen("m", "6")


def test_a_new_evaluation_is_charged_when_the_repository_is_read_again(
    repository: Path, ledger: Ledger
) -> None:
    features = np.random.default_rng(0).random((600, 3)).astype(np.float32)
    records = Records("people", features, (features[:, 0] > 0.5).astype(np.int64), 2)
    head = PrivateHead(epsilon=1.0, delta=1e-5, declared_size=480).fit(hold_out(records, 0.2).train)
    folder = save_private(head, repository / "m" / "1", dataset="people")
    models = opened(repository)
    (first,) = models.start(ledger)
    assert models.refresh(ledger) == {}
    assert models.deployments == [first]
    evaluate_folder(folder, open_private(folder), records)
    assert models.refresh(ledger) == {}
    assert models.deployments != [first]
    assert [row.kind for row in ledger.export("people")].count("evaluation") == 1


def test_a_new_decision_changes_the_labels_when_the_repository_is_read_again(
    tmp_path: Path, repository: Path
) -> None:
    rng = np.random.default_rng(0)
    features = rng.random((600, 3)).astype(np.float32)
    labels = features[:, 0] + 0.7 * rng.standard_normal(600) > 0.5
    head = PrivateHead(epsilon=1.0, delta=1e-5, declared_size=600, classes=(0, 1))
    folder = save_private(head.fit(features, labels), repository / "m" / "1", dataset="people")
    rows = features[:50]
    shares = open_private(folder).predict_proba(rows)[:, 1]
    threshold = float(np.sort(shares)[-11:-9].mean())
    with serving(tmp_path, repository) as running:

        def answered() -> list[int]:
            found = running.infer(rows, "m").json()["outputs"]
            return list(next(each["data"] for each in found if each["name"] == "label"))

        assert answered() == (shares > 0.5).tolist()
        decide_folder(folder, threshold={"1": threshold})
        reload(running)
        assert answered() == (shares > threshold).tolist()
        assert sum(answered()) == 10


def test_after_sighup_all_workers_serve_what_is_new_also_those_that_are_started_later(
    tmp_path: Path, repository: Path, add: Add
) -> None:
    add("head", "m/1")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        key, _ = ledger.create_key("ann")
    options = ("--repository", repository, "--workers", "2")
    with serve_command(tmp_path / "ledger.sqlite", *options) as started:
        url, process = started.told["url"], started.process

        def versions() -> set[str | None]:
            """Which versions answer, over several connections: the workers share them."""
            headers = {"authorization": f"Bearer {key}"}
            path, query = f"{url}/v2/models/m/infer", inference(some_rows(1))
            answers = [httpx.post(path, json=query, headers=headers, timeout=60) for _ in range(12)]
            return {answer.json().get("model_version") for answer in answers}

        until(lambda: is_ready(url))
        assert versions() == {"1"}
        add("head", "m/2")
        (add("head", "n/1") / "model.json").write_text("{")
        process.send_signal(signal.SIGHUP)
        until(lambda: started.events().count("model_failed") == 2)
        assert versions() == {"2"}
        for worker in psutil.Process(process.pid).children():
            worker.kill()
            worker.wait(60)
        until(lambda: started.events().count("started") == 4)
        assert versions() == {"2"}
        assert process.poll() is None
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert [row.kind for row in ledger.export("visitors")].count("training") == 1


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
