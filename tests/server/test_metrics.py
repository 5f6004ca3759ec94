"""What metrics and log contain, and what they never contain."""

from __future__ import annotations

import io
import json

import httpx
import pytest

from quietmax.server import Settings
from quietmax.server.metrics import Log
from tests.server.running_service import (
    LEDGER_DOWN,
    Running,
    Start,
    some_rows,
)


def test_metrics_count_requests_answers_and_the_budget_but_name_no_client(plain: Running) -> None:
    plain.infer(some_rows(4))
    plain.infer(some_rows(4))
    plain.infer([[0.0]])
    text = plain.http.get("/metrics").text
    assert 'quietmax_requests_total{model="plain",status="200",version="1"} 2.0' in text
    assert 'quietmax_requests_total{model="plain",status="422",version="1"} 1.0' in text
    assert 'quietmax_answers_total{model="plain",origin="new",version="1"} 4.0' in text
    assert 'quietmax_answers_total{model="plain",origin="cached",version="1"} 4.0' in text
    assert 'quietmax_budget_spent_fraction{account="people"} 0.2' in text
    assert "quietmax_ledger_up 1.0" in text
    assert "ann" not in text


def test_the_log_names_requests_but_never_inputs_outputs_ids_or_keys(plain: Running) -> None:
    rows = some_rows(1)
    answer = plain.infer(rows, id="my-secret-id").json()
    plain.infer(rows, id="x" * 200)
    httpx.post(f"{plain.url}/login", data={"key": plain.admin})
    plain.service.log.flush()
    text = plain.log.getvalue().decode()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["event"] for line in lines] == ["started", "request", "request", "login"]
    assert lines[1]["model"] == "plain"
    assert (lines[1]["client"], lines[1]["rows"], lines[1]["status"]) == ("ann", 1, 200)
    assert lines[2]["status"] == 400
    for secret in (
        plain.key,
        plain.key.split("_", 2)[2],
        plain.admin.split("_", 2)[2],
        "my-secret-id",
        *(str(value) for value in rows[0]),
        *(str(value) for value in answer["outputs"][1]["data"]),
    ):
        assert secret not in text


def test_without_request_logs_a_request_leaves_no_line(start: Start) -> None:
    with start("head", settings=Settings(log_requests=False)) as service:
        assert service.infer(some_rows(1), "head").status_code == 200
        events = [json.loads(line)["event"] for line in service.log.getvalue().splitlines()]
    assert "request" not in events
    assert "started" in events


def test_metrics_say_that_the_ledger_is_down(plain: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "quietmax_ledger_up 1.0" in plain.http.get("/metrics").text

    def fail() -> None:
        raise LEDGER_DOWN

    monkeypatch.setattr(plain.ledger, "keys", fail)
    monkeypatch.setattr(plain.ledger, "accounts", fail)
    monkeypatch.setattr(plain.service.auth, "_read_at", -1e9)
    assert "quietmax_ledger_up 0.0" in plain.http.get("/metrics").text
    assert httpx.get(f"{plain.url}/metrics", headers={"authorization": "Bearer qm_wrong"}).status_code == 401
    assert plain.http.get("/v2/models").status_code == 503


def test_a_log_that_cannot_be_written_stops_nothing() -> None:
    stream = io.BytesIO()
    stream.close()
    log = Log(stream)
    log.event("started")
    assert log._lines == [], "lines that cannot be written are dropped, not kept in memory"
