"""Who may send requests: API keys, sessions and anonymous access."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest

from quietmax.accounting import LIMIT
from quietmax.ledger import Terms
from quietmax.server import Settings
from tests.server.running_service import (
    Running,
    Start,
    inference,
    running,
    some_rows,
)


def test_only_health_metadata_of_the_server_and_the_login_page_need_no_key(plain: Running) -> None:
    with httpx.Client(base_url=plain.url) as nobody:
        for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/", "/openapi.json"):
            assert nobody.get(path).status_code == 200, path
        for path in (
            "/v2/models",
            "/v2/models/plain",
            "/v2/models/plain/ready",
            "/v2/models/plain/budget",
            "/metrics",
            "/state",
        ):
            refused = nobody.get(path)
            assert refused.status_code == 401, path
        assert "Log in" in nobody.get("/").text
        assert nobody.post("/v2/models/plain/infer", json=inference(some_rows(1))).status_code == 401
        assert nobody.post("/try?model=plain", json=inference(some_rows(1))).status_code == 401
    assert plain.ledger.account("people").spent_units == 0


@pytest.mark.parametrize("header", ["Bearer", "Bearer x", "Basic {key}", "{key}", "Bearer {key}x", "bearer"])
def test_a_wrong_key_is_401(plain: Running, header: str) -> None:
    response = plain.http.get("/v2/models", headers={"authorization": header.format(key=plain.key)})
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"].endswith(".")


def test_a_revoked_key_is_refused_even_before_the_server_reads_keys_again(plain: Running) -> None:
    assert plain.infer(some_rows(1)).status_code == 200
    key = next(key for key in plain.ledger.keys() if key.client == "ann")  # noqa: SIM118
    plain.ledger.revoke_key(key.id)
    refused = plain.infer(some_rows(1, 1))
    assert refused.status_code == 401
    assert plain.ledger.account("people").spent_units == LIMIT // 20
    time.sleep(1.1)
    assert plain.http.get("/v2/models").status_code == 401


def test_an_expired_key_is_refused(plain: Running) -> None:
    shown, _ = plain.ledger.create_key("brief", days=0.6 / 86400)
    headers = {"authorization": f"Bearer {shown}"}
    time.sleep(0.7)
    assert plain.http.get("/v2/models", headers=headers).status_code == 401


def test_anonymous_access_works_on_this_machine_and_not_through_a_proxy_or_another_name(
    models: Path, tmp_path: Path
) -> None:
    settings = Settings(anonymous=True)
    with (
        running(
            f"sqlite:///{tmp_path / 'l.sqlite'}",
            [f"plain={models / 'plain'}"],
            budget=Terms(10.0),
            queries=20,
            settings=settings,
        ) as service,
        httpx.Client(base_url=service.url) as nobody,
    ):
        body = inference(some_rows(1))
        assert nobody.post("/v2/models/plain/infer", json=body).status_code == 200
        assert nobody.get("/").status_code == 200
        for header in (
            {"x-forwarded-for": "203.0.113.5"},
            {"forwarded": "for=203.0.113.5"},
            {"host": "attacker.example"},
        ):
            refused = nobody.post("/v2/models/plain/infer", json=body, headers=header)
            assert refused.status_code == 403, header
            assert nobody.get("/", headers=header).status_code == 403
        assert [part.client for part in service.ledger.subaccounts(service.ledger.account("people"))] == [
            "anonymous"
        ]
        with_key = {"authorization": f"Bearer {service.key}", "x-forwarded-for": "203.0.113.5"}
        assert nobody.post("/v2/models/plain/infer", json=body, headers=with_key).status_code == 200


def test_the_session_cookie_is_for_pages_only_and_carries_no_key(plain: Running) -> None:
    with httpx.Client(base_url=plain.url) as browser:
        login = browser.post("/login", data={"key": plain.key})
        assert login.status_code == 303
        cookie = login.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert plain.key.split("_", 2)[2] not in cookie
        assert browser.get("/state").json()["client"] == "ann"
        assert browser.get("/v2/models").status_code == 401, "a cookie is no key"
        assert browser.post("/logout").status_code == 303
        browser.cookies.clear()
        assert browser.get("/state").status_code == 401


def test_a_forged_expired_or_revoked_session_is_refused(plain: Running) -> None:
    with httpx.Client(base_url=plain.url) as browser:
        browser.post("/login", data={"key": plain.key})
        cookie = browser.cookies["quietmax_session"]
        number, end, signature = cookie.split(".")
        for forged in (
            f"{number}.{int(end) + 1}.{signature}",
            f"{'0' * 16}.{end}.{signature}",
            f"{number}.{end}.{'0' * 64}",
            "x",
            "..",
            "",
            "a.b.ü",
        ):
            headers = {b"cookie": f"quietmax_session={forged}".encode()}
            assert httpx.get(f"{plain.url}/state", headers=headers).status_code == 401, forged
        old = f"{number}.{int(time.time()) - 1}"
        expired = f"{old}.{plain.service.auth._signature(old)}"
        assert httpx.get(f"{plain.url}/state", cookies={"quietmax_session": expired}).status_code == 401
        plain.ledger.revoke_key(number)
        time.sleep(1.1)
        assert browser.get("/state").status_code == 401


@pytest.mark.parametrize(
    "headers",
    [{"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}],
)
def test_a_page_of_another_site_cannot_spend_an_anonymous_budget(
    start: Start, headers: dict[str, str]
) -> None:
    with start("plain", budget=Terms(10.0), queries=20, settings=Settings(anonymous=True)) as service:
        body = json.dumps(inference(some_rows(1)))
        asked = httpx.post(
            f"{service.url}/v2/models/plain/infer",
            content=body,
            headers={"content-type": "text/plain", **headers},
        )
        assert (asked.status_code, "other sites" in asked.json()["error"]) == (403, True)
        assert service.ledger.account("people").spent_units == 0
        own = httpx.post(
            f"{service.url}/v2/models/plain/infer", content=body, headers={"origin": service.url}
        )
        assert own.status_code == 200
