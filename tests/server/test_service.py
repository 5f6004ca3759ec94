"""What the service answers and tells: budgets, quotas, versions, metadata and readiness."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietmax.accounting.costs import LIMIT
from quietmax.estimators import PrivateHead, open_private, save_private
from quietmax.ledger import Terms
from quietmax.mechanisms import Answerer, Answers
from quietmax.models.features import Identity
from quietmax.server import Service
from quietmax.server.errors import HttpError
from tests.server.running_service import (
    CLASSES,
    LEDGER_DOWN,
    Running,
    Start,
    caller,
    decoded,
    down,
    run_async,
    running,
    some_rows,
)


def test_a_client_sees_its_own_spending_and_an_administrator_that_of_all(plain: Running) -> None:
    plain.infer(some_rows(2))
    plain.infer(some_rows(1, 1), key=plain.admin)
    mine = plain.get("/v2/models/plain/budget").json()
    assert [part["client"] for part in mine["clients"]] == ["ann"]
    assert mine["spent_fraction"] == pytest.approx(3 / 20)
    everyones = plain.get("/v2/models/plain/budget", plain.admin).json()
    assert {part["client"]: part["spent_fraction"] for part in everyones["clients"]} == {
        "ann": pytest.approx(0.1),
        "owner": pytest.approx(0.05),
    }


def test_the_seed_of_a_model_is_shown_nowhere(tmp_path: Path) -> None:
    """Whoever knows the seed of the noise can subtract the noise."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(60, 3))
    head = PrivateHead(1.0, 1e-5, features=Identity(), declared_size=60, classes=[0, 1], random_state=5)
    save_private(head.fit(features, features[:, 0] > 0), tmp_path / "seeded", dataset="people")
    seed = str(head.guarantee_.parameters["noise_source"]["seed"])
    with running(f"sqlite:///{tmp_path / 'ledger.sqlite'}", [f"seeded={tmp_path / 'seeded'}"]) as service:
        metadata = service.http.get("/v2/models/seeded")
        assert metadata.json()["parameters"]["guarantee_status"] == "conditional"
        assert metadata.json()["parameters"]["guarantee"]["parameters"]["noise_source"]["exact"] is False
        page = service.get("/contents", service.admin)
        answered = service.infer(features[:1].astype(np.float32), "seeded")
        budget = service.http.get("/v2/models/seeded/budget")
        for response in (metadata, page, answered, budget):
            assert response.status_code == 200
            assert seed not in response.text


def test_answers_metadata_and_page_warn_of_an_unproven_guarantee(
    plain: Running,
) -> None:
    assert "refuted" in plain.infer(some_rows(1)).json()["parameters"]["warning"]
    metadata = plain.http.get("/v2/models/plain").json()["parameters"]
    assert metadata["guarantee_status"] == "refuted"
    assert "theory page, section 2.1" in metadata["warning"]
    page = plain.get("/contents", plain.admin).text
    assert "No proven guarantee (refuted)" in page
    assert "plain/1 (refuted) answers from this account without a proven guarantee" in page
    assert plain.http.get("/v2/models/plain/budget").json()["unproven_models"] == ["plain/1 (refuted)"]


def test_the_budget_pays_for_exactly_its_answers_and_for_a_batch_completely_or_not_at_all(
    plain: Running,
) -> None:
    assert plain.infer(some_rows(18)).status_code == 200
    refused = plain.infer(some_rows(3, 1))
    assert (refused.status_code, refused.json()["remaining_answers"]) == (403, 2)
    assert plain.infer(some_rows(2, 1)).status_code == 200
    refused = plain.infer(some_rows(1, 99))
    assert refused.status_code == 403
    assert refused.json() == {
        "error": "Privacy budget exhausted: 1 answer requested, 0 left. Nothing was charged.",
        "remaining": 0,
        "remaining_answers": 0,
    }
    assert plain.ledger.account("people").spent_units == LIMIT
    assert plain.infer(some_rows(18)).status_code == 200, "stored answers stay free"


def test_administrators_alone_learn_what_used_the_budget_up(plain: Running) -> None:
    assert plain.infer(some_rows(18)).status_code == 200
    assert plain.infer(some_rows(2, 1), key=plain.admin).status_code == 200
    body = plain.infer(some_rows(1, 99), key=plain.admin).json()
    assert "Most was used by client ann for plain/1: 90.0% since 20" in body["error"]
    ann, owner = body["used_by"]
    assert (ann["client"], ann["model"], ann["spent_fraction"]) == ("ann", "plain/1", pytest.approx(0.9))
    assert (owner["client"], owner["spent_fraction"]) == ("owner", pytest.approx(0.1))
    assert ann["since"] <= ann["last"] <= owner["since"]
    others = plain.infer(some_rows(1, 99))
    assert (others.status_code, "used_by" in others.json(), "ann" in others.text) == (403, False, False)
    assert "used_by" not in plain.http.get("/v2/models/plain/budget").json()
    assert plain.get("/v2/models/plain/budget", plain.admin).json()["used_by"] == body["used_by"]
    page = plain.get("/contents", plain.admin).text
    assert all(f"What {name} spent, over time" in page for name in ("ann", "owner"))
    assert "over time" not in plain.get("/contents").text.replace("Budget spent over time", "")
    plain.ledger.erase_client("ann")
    assert "ann" not in [
        each["client"] for each in plain.get("/v2/models/plain/budget", plain.admin).json()["used_by"]
    ]


def test_a_quota_refuses_one_client_and_not_another(plain: Running) -> None:
    def remaining() -> int:
        answers: int = plain.http.get("/v2/models/plain/budget").json()["remaining_answers"]
        return answers

    plain.ledger.client("ann")
    plain.ledger.set_quota("people", "ann", 0.1, "two answers for ann")
    assert remaining() == 2
    assert plain.infer(some_rows(2)).json()["parameters"]["remaining_answers"] == remaining() == 0
    refused = plain.infer(some_rows(1, 1))
    assert refused.status_code == 403
    assert refused.json()["error"].startswith("Quota of this client exhausted")
    assert plain.infer(some_rows(1, 1), key=plain.admin).status_code == 200
    plain.ledger.set_quota("people", "ann", None, "Ann's study needs no limit.")
    assert remaining() == 17


def test_teachers_answer_as_often_as_their_own_budget_pays_for(start: Start) -> None:
    with start("teachers") as service:
        body = service.infer(some_rows(30), "teachers").json()
        assert [output["name"] for output in body["outputs"]] == ["label"]
        assert body["parameters"]["guarantee_status"] == "proven"
        assert "warning" not in body["parameters"]
        assert body["parameters"]["remaining_answers"] == 10
        assert service.infer(some_rows(11, 1), "teachers").status_code == 403
        assert service.infer(some_rows(10, 1), "teachers").status_code == 200
        assert service.http.get("/v2/models/teachers/budget").json()["remaining_answers"] == 0


def test_a_head_of_released_weights_answers_any_number_of_queries_at_no_further_cost(
    start: Start, models: Path
) -> None:
    with start("head") as service:
        for seed in range(5):
            rows = some_rows(100, seed)
            body = service.infer(rows, "head").json()
            assert body["parameters"]["cost"] == 0
            assert body["parameters"]["paid_at_training"] is True
        expected = open_private(models / "head").predict_proba(rows.astype(np.float32))
        answered = np.array(body["outputs"][1]["data"]).reshape(100, CLASSES)
        np.testing.assert_allclose(answered, expected, atol=1e-6)
        budget = service.http.get("/v2/models/head/budget").json()
        assert budget["spent_fraction"] == 1.0
        assert budget["remaining"] == 0
        assert budget["remaining_answers"] is None
        assert "Any number of answers is free" in budget["note"]
        assert [row.kind for row in service.ledger.export("visitors")] == ["open", "training", "answered"]


def test_several_models_and_versions_are_served_and_the_highest_version_by_default(
    tmp_path: Path, models: Path
) -> None:
    labels = {("people", version): "plain" for version in ("v2", "9", "10", "v10")} | {("head", "1"): "head"}
    names = [f"{name}/{version}={models / kind}" for (name, version), kind in labels.items()]
    address = f"sqlite:///{tmp_path / 'l.sqlite'}"
    with running(address, names, budget=Terms(10.0, 1e-5), queries=20) as service:
        assert service.http.get("/v2/models/people").json()["versions"] == ["9", "10", "v2", "v10"]
        assert service.infer(some_rows(1), "people").json()["model_version"] == "v10"
        assert service.infer(some_rows(1), "people/versions/9").json()["model_version"] == "9"
        for missing in ("people/versions/8", "people/versions/", "nobody"):
            assert service.infer(some_rows(1), missing).status_code == 404
        listed = service.http.get("/v2/models").json()["models"]
        assert {(model["name"], model["version"]) for model in listed} == set(labels)


def test_the_metadata_state_the_guarantee_of_the_budget_after_a_grant(plain: Running) -> None:
    plain.ledger.grant("people", Terms(50.0, analysis="published"), "five times as many answers")
    assert plain.http.get("/v2/models/plain").json()["parameters"]["guarantee"]["mu"] == pytest.approx(50.0)


def test_a_service_that_has_not_started_refuses_and_says_so(idle: Service) -> None:
    deployment = idle.deployment("plain", None)
    with pytest.raises(HttpError) as error:
        run_async(idle.infer(deployment, decoded(), caller(idle)))
    assert error.value.status == 503
    assert "starting or stopping" in str(run_async(idle._readiness_error()))
    assert idle.ledger.account(deployment.account.name).spent_units == 0
    run_async(idle.stop())


def test_a_stopping_service_answers_what_was_charged(idle: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = idle.deployment("plain", None)
    drawing, go_on = threading.Event(), threading.Event()
    release = Answerer.release

    def slowly(self: Answerer, scores: Any) -> Answers:
        drawing.set()
        assert go_on.wait(60)
        return release(self, scores)

    monkeypatch.setattr(Answerer, "release", slowly)

    async def infer_and_stop() -> Answers:
        await idle.start()
        asked = asyncio.create_task(idle.infer(deployment, decoded(), caller(idle)))
        await asyncio.to_thread(drawing.wait, 60)
        stopping = asyncio.create_task(idle.stop())
        await asyncio.sleep(0.05)
        assert not stopping.done()
        go_on.set()
        answers, _ = await asked
        await stopping
        return answers

    assert len(run_async(infer_and_stop()).labels) == 1


def test_a_ledger_that_is_down_makes_the_service_not_ready(
    plain: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain.ledger, "ping", down)
    response = plain.http.get("/v2/health/ready")
    assert response.status_code == 503
    assert response.json()["error"] == "The ledger is not available. No query is answered until it is."
    assert str(LEDGER_DOWN) in [line.get("error") for line in plain.lines()]
    assert response.headers["retry-after"] == "1"


def test_a_head_that_answers_per_query_releases_labels_only_and_metadata_say_so(start: Start) -> None:
    with start("asked", "head") as service:
        body = service.infer(some_rows(1), "asked").json()
        assert body["parameters"]["remaining_answers"] == 39
        asked = service.http.get("/v2/models/asked").json()
        for described in (body, asked):
            assert [output["name"] for output in described["outputs"]] == ["label"]
        head = service.http.get("/v2/models/head").json()
        assert [output["name"] for output in head["outputs"]] == ["label", "probabilities"]
        assert "warning" not in head["parameters"], "only of what is not proven"
