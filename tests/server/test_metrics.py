"""What the metrics contain, and what they never contain."""

from __future__ import annotations

import httpx
import pytest

from tests.server.running_service import (
    LEDGER_DOWN,
    Running,
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
