"""What the service says and does at its edges: starting, stopping, a ledger that fails in between, odd requests."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from quietmax.errors import InvalidInput, LedgerUnavailable, QuietmaxError
from quietmax.ledger import Failed, Ledger, Terms
from quietmax.mechanisms import Answerer
from quietmax.server import Client, Service, Settings, deploy, load_servables
from quietmax.server import batching as pipeline_module
from quietmax.server.auth import Caller
from quietmax.server.batching import Pipeline
from quietmax.server.codec import Query
from quietmax.server.errors import HttpError, unavailable
from quietmax.server.inference import InferenceGate
from quietmax.server.run import Listening
from quietmax.spending import FileAccount
from tests.server.running_service import inference, some_rows

AWAY = LedgerUnavailable("The ledger is away; ask again later.")


@pytest.fixture
def idle(tmp_path, models):
    """A service of an ordinary model with 20 answers, not started."""
    ledger = Ledger(tmp_path / "idle.sqlite")
    loaded = load_servables(
        [f"plain={models / 'plain'}"], budget=Terms(10.0), queries=20, accept_unproven=True
    )
    yield Service(ledger, deploy(ledger, loaded, budget=Terms(10.0)), Settings(anonymous=True))
    ledger.close()


def _run(coroutine):
    """Run in a thread of its own: Playwright leaves a loop running in the main one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result(120)


def _ann(service):
    return Caller("ann", service.ledger.client("ann"), None, False)


def _query(count=1, request_id=None):
    return Query(some_rows(count).astype(np.float32), request_id, ())


def test_a_service_that_has_not_started_refuses_and_says_so(idle):
    deployment = idle.deployment("plain", None)
    with pytest.raises(HttpError) as refusal:
        _run(idle.answer(deployment, _query(), _ann(idle)))
    assert refusal.value.status == 503
    assert "starting or stopping" in _run(idle.unready())
    assert idle.ledger.account(deployment.account.name).spent_units == 0
    _run(idle.stop())


def test_a_stop_waits_for_what_was_charged(idle, monkeypatch):
    deployment = idle.deployment("plain", None)
    drawing, go_on = threading.Event(), threading.Event()
    release = Answerer.release

    def slowly(self, scores):
        drawing.set()
        assert go_on.wait(60)
        return release(self, scores)

    monkeypatch.setattr(Answerer, "release", slowly)

    async def ask_and_stop():
        await idle.start()
        asked = asyncio.create_task(idle.answer(deployment, _query(), _ann(idle)))
        await asyncio.to_thread(drawing.wait, 60)
        stopping = asyncio.create_task(idle.stop())
        await asyncio.sleep(0.05)
        assert not stopping.done()
        go_on.set()
        told, _ = await asked
        await stopping
        return told

    assert len(_run(ask_and_stop()).rows) == 1


def test_an_answer_that_comes_after_its_asker_left_is_dropped(idle, monkeypatch):
    """The connection ended while the answer was drawn; it is paid, and nobody gets it."""
    deployment = idle.deployment("plain", None)
    delivered = threading.Event()
    deliver = pipeline_module._deliver

    def watched(finished):
        deliver(finished)
        delivered.set()

    monkeypatch.setattr(pipeline_module, "_deliver", watched)

    async def ask_and_leave():
        line = Pipeline(idle.ledger, idle.settings)
        asked = asyncio.create_task(line.ask(deployment, _query(), _ann(idle)))
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.to_thread(delivered.wait, 60)
        assert line.in_flight == 0
        await line.close()

    _run(ask_and_leave())
    assert idle.ledger.account(deployment.account.name).spent_units == deployment.unit_cost


def test_more_rows_than_are_drawn_at_once_are_all_answered(plain, monkeypatch):
    monkeypatch.setattr(pipeline_module, "_MOST_ROWS_AT_ONCE", 2)
    answers = plain.infer(some_rows(5)).json()
    assert answers["outputs"][0]["shape"] == [5]
    assert answers["parameters"]["new_answers"] == 5


def test_a_model_without_further_cost_is_not_asked_while_the_ledger_fails(start):
    with start("head") as service:
        assert service.infer(some_rows(1), "head").status_code == 200
        service.ledger.writer.error = AWAY
        refused = service.infer(some_rows(1), "head")
        assert refused.status_code == 503
        assert refused.json()["error"] == str(AWAY)
        service.ledger.writer.error = None


def test_an_answer_with_an_id_that_cannot_be_stored_does_not_leave(plain, monkeypatch):
    monkeypatch.setattr(plain.ledger, "submit_answers", lambda _, done: done(Failed(AWAY)))
    refused = plain.infer(some_rows(1), id="one")
    assert refused.status_code == 503
    assert "outputs" not in refused.json()


def test_a_ledger_that_is_away_makes_the_service_not_ready(plain, monkeypatch):
    def away():
        raise AWAY

    monkeypatch.setattr(plain.ledger, "ping", away)
    told = plain.http.get("/v2/health/ready")
    assert told.status_code == 503
    assert told.json()["error"] == str(AWAY)
    assert told.headers["retry-after"] == "1"


def test_a_login_while_the_ledger_is_away_is_no_wrong_key(plain, monkeypatch):
    async def away(_):
        raise unavailable(str(AWAY))

    monkeypatch.setattr(plain.service.access, "login", away)
    assert httpx.post(f"{plain.url}/login", data={"key": plain.key}).status_code == 503


def test_the_budget_a_client_sees_is_that_of_its_quota(plain):
    account = next(iter(plain.service.deployments)).account.name
    plain.infer(some_rows(1))
    plain.ledger.set_quota(account, "ann", 0.25, "A quarter for Ann's study.")
    assert plain.http.get("/v2/models/plain/budget").json()["remaining_answers"] == 4
    plain.ledger.set_quota(account, "ann", None, "Ann's study needs no limit.")
    assert plain.http.get("/v2/models/plain/budget").json()["remaining_answers"] == 19


def test_metadata_name_only_the_outputs_a_model_has_and_warn_only_of_what_is_not_proven(start):
    with start("asked", "head") as service:
        asked = service.http.get("/v2/models/asked").json()
        assert [output["name"] for output in asked["outputs"]] == ["label"]
        head = service.http.get("/v2/models/head").json()
        assert [output["name"] for output in head["outputs"]] == ["label", "probabilities"]
        assert "warning" not in head["parameters"]


def test_without_request_logs_a_request_leaves_no_line(start):
    with start("head", settings=Settings(log_requests=False)) as service:
        assert service.infer(some_rows(1), "head").status_code == 200
        events = [json.loads(line)["event"] for line in service.log.getvalue().splitlines()]
    assert "request" not in events
    assert "started" in events


def test_a_connection_that_ends_within_the_body_spends_nothing(idle):
    sent = []

    async def ask():
        parts = iter(
            [{"type": "http.request", "body": b'{"inputs"', "more_body": True}, {"type": "http.disconnect"}]
        )

        async def receive():
            return next(parts)

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v2/models/plain/infer", "headers": []}
        await InferenceGate(lambda *_: None, idle)(scope, receive, send)

    _run(ask())
    assert sent[0]["status"] == 400
    assert idle.ledger.account(idle.deployment("plain", None).account.name).spent_units == 0


def test_bytes_behind_the_json_need_a_tensor_they_belong_to(plain):
    text = json.dumps(inference(some_rows(1))).encode()
    headers = {"inference-header-content-length": str(len(text))}
    refused = plain.http.post("/v2/models/plain/infer", content=text + b"1234", headers=headers)
    assert refused.status_code == 400
    assert "binary_data_size" in refused.json()["error"]


def test_data_nested_deeper_than_any_shape_are_refused(plain):
    asked = inference(some_rows(1))
    for _ in range(12):
        asked["inputs"][0]["data"] = [asked["inputs"][0]["data"]]
    asked["inputs"][0]["data"].append("x")
    assert plain.http.post("/v2/models/plain/infer", json=asked).status_code == 422
    asked["inputs"][0]["data"].pop()
    assert plain.http.post("/v2/models/plain/infer", json=asked).status_code == 422


def test_a_client_that_never_asked_can_be_closed():
    with Client("http://127.0.0.1:9") as client:
        assert client._connection is None


@pytest.mark.parametrize("name", ["max_bytes", "max_rows", "seconds", "max_waiting"])
@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_a_limit_must_be_positive(name, limit):
    with pytest.raises(InvalidInput, match=name):
        Settings(**{name: limit})


def test_answers_given_outside_that_the_account_cannot_pay_stop_the_service(start, tmp_path, models):
    """A folder that answered before, and an account of which nothing is left."""
    with start("teachers") as service:
        account = next(iter(service.service.deployments)).account.name
        service.ledger.revoke(account, None, "The study is over.")
    shutil.copytree(models / "teachers", tmp_path / "again")
    FileAccount(tmp_path / "again" / "account.json").charge(3, 40)
    with Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}") as ledger:
        loaded = load_servables([str(tmp_path / "again")])
        with pytest.raises(QuietmaxError, match="quietmax ledger grant"):
            deploy(ledger, loaded)


def test_a_ledger_that_fails_while_answers_are_carried_over_stops_the_service(tmp_path, models, monkeypatch):
    monkeypatch.setattr(Ledger, "charge", lambda *_: Failed(AWAY))
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        loaded = load_servables([str(models / "teachers")])
        with pytest.raises(LedgerUnavailable, match="away"):
            deploy(ledger, loaded)


def test_a_body_nested_too_deeply_is_refused(plain):
    asked = json.dumps(inference(some_rows(1)))
    deep = asked[:-1] + ', "parameters": {"x": ' + "[" * 900 + "]" * 900 + "}}"
    refused = plain.http.post("/v2/models/plain/infer", content=deep)
    assert refused.status_code == 400
    assert "nested too deeply" in refused.json()["error"]


def test_metrics_tell_that_the_ledger_is_away(plain, monkeypatch):
    assert "quietmax_ledger_up 1.0" in plain.http.get("/metrics").text

    def away():
        raise AWAY

    monkeypatch.setattr(plain.ledger, "keys", away)
    monkeypatch.setattr(plain.ledger, "accounts", away)
    monkeypatch.setattr(plain.service.access, "_read_at", -1e9)
    assert "quietmax_ledger_up 0.0" in plain.http.get("/metrics").text
    assert httpx.get(f"{plain.url}/metrics", headers={"authorization": "Bearer qm_wrong"}).status_code == 401
    assert plain.http.get("/v2/models").status_code == 503


def test_a_folder_that_was_carried_over_may_lie_elsewhere_later(tmp_path, models):
    shutil.copytree(models / "teachers", tmp_path / "here")
    FileAccount(tmp_path / "here" / "account.json").charge(3, 40)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        (deployment,) = deploy(ledger, load_servables([str(tmp_path / "here")]))
        spent = ledger.account("patients").spent_units
        assert spent == 3 * deployment.unit_cost
        (tmp_path / "here").rename(tmp_path / "there")
        deploy(ledger, load_servables([str(tmp_path / "there")]))
        assert ledger.account("patients").spent_units == spent


def test_another_model_put_into_a_marked_folder_is_charged_for_its_own_answers(tmp_path, models):
    shutil.copytree(models / "teachers", tmp_path / "here")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        deploy(ledger, load_servables([str(tmp_path / "here")]))
        description = json.loads((models / "teachers" / "model.json").read_text())
        (tmp_path / "here" / "model.json").write_text(json.dumps({**description, "note": "trained again"}))
        shutil.copy(models / "teachers" / "account.json", tmp_path / "here")
        FileAccount(tmp_path / "here" / "account.json").charge(4, 40)
        (deployment,) = deploy(ledger, load_servables([str(tmp_path / "here")]))
        assert ledger.account("patients").spent_units == 4 * deployment.unit_cost
        assert FileAccount(tmp_path / "here" / "account.json").answered == 40


def test_an_account_that_was_put_back_after_it_had_been_moved_is_charged_and_emptied_again(tmp_path, models):
    shutil.copytree(models / "teachers", tmp_path / "here")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for count in (3, 5, 2):
            shutil.copy(models / "teachers" / "account.json", tmp_path / "here")
            FileAccount(tmp_path / "here" / "account.json").charge(count, 40)
            for _ in range(2):
                (deployment,) = deploy(ledger, load_servables([str(tmp_path / "here")]))
            assert FileAccount(tmp_path / "here" / "account.json").answered == 40
        assert ledger.account("patients").spent_units == 10 * deployment.unit_cost


def test_a_copy_made_before_is_charged_for_its_own_answers(tmp_path, models):
    for name, count in (("one", 3), ("two", 5)):
        shutil.copytree(models / "teachers", tmp_path / name)
        FileAccount(tmp_path / name / "account.json").charge(count, 40)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for name in ("one", "two"):
            (deployment,) = deploy(ledger, load_servables([str(tmp_path / name)]))
        assert ledger.account("patients").spent_units == 8 * deployment.unit_cost


@pytest.mark.parametrize(
    "address", ["http://h:99999", "http://[::1", "ftp://h", "http://", "h:80", "http://h:0"]
)
def test_a_client_takes_only_an_address(address):
    with pytest.raises(InvalidInput, match="no http or https address"):
        Client(address)


def test_a_client_takes_only_rows_of_numbers():
    with Client() as client, pytest.raises(InvalidInput, match="no rows of numbers"):
        client.ask("m", [[1, 2], [3]])


def test_a_folder_with_an_equals_sign_in_its_name_is_a_folder(tmp_path, models, monkeypatch):
    shutil.copytree(models / "head", tmp_path / "eps=1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="choose one with NAME=FOLDER"):
        load_servables(["eps=1"])
    (named,) = load_servables(["head=eps=1"])
    assert named.label == "head/1"
    with pytest.raises(QuietmaxError):
        load_servables(["eps=2"])


def test_a_certificate_that_is_none_is_refused_at_once(tmp_path):
    for name in ("certificate", "key"):
        (tmp_path / name).write_text("nothing of the kind")
    with pytest.raises(InvalidInput, match="give a PEM certificate"):
        Listening("127.0.0.1", 0, tmp_path / "certificate", tmp_path / "key")
