"""Who may send requests: API keys, sessions and anonymous access."""

from __future__ import annotations

import hmac
import json
import socket
import time
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from quietmax.accounting.costs import LIMIT
from quietmax.ledger import Terms
from quietmax.server import Settings
from quietmax.server.auth import is_local
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
            {"via": "1.1 proxy"},
            {"x-forwarded-proto": "https"},
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
        number, session, end, signature = cookie.split(".")
        for forged in (
            f"{number}.{session}.{int(end) + 1}.{signature}",
            f"{number}.{'0' * 32}.{end}.{signature}",
            f"{'0' * 16}.{session}.{end}.{signature}",
            f"{number}.{session}.{end}.{'0' * 64}",
            "x",
            "..",
            "",
            "a.b.ü",
        ):
            headers = {b"cookie": f"quietmax_session={forged}".encode()}
            assert httpx.get(f"{plain.url}/state", headers=headers).status_code == 401, forged
        old = f"{number}.{session}.{int(time.time()) - 1}"
        (key,) = (key for key in plain.ledger.keys() if key.id == number)  # noqa: SIM118
        expired = f"{old}.{plain.service.auth._signature(old, key)}"
        assert httpx.get(f"{plain.url}/state", cookies={"quietmax_session": expired}).status_code == 401
        plain.ledger.revoke_key(number)
        time.sleep(1.1)
        assert browser.get("/state").status_code == 401


def state_with(url: str, cookie: str) -> int:
    """The status of the dashboard's state for a session cookie."""
    return httpx.get(f"{url}/state", cookies={"quietmax_session": cookie}).status_code


def test_a_cookie_ends_at_logout_in_every_process_and_other_sessions_go_on(start: Start) -> None:
    settings = Settings(session_secret=b"shared by two replicas, 32 bytes")
    with (
        start("plain", budget=Terms(10.0), queries=20, settings=settings) as first,
        start("plain", budget=Terms(10.0), queries=20, settings=settings) as second,
    ):
        ended, kept = (
            httpx.post(f"{first.url}/login", data={"key": first.key}).cookies["quietmax_session"]
            for _ in range(2)
        )
        assert state_with(first.url, ended) == state_with(second.url, ended) == 200
        out = httpx.post(f"{first.url}/logout", cookies={"quietmax_session": ended})
        assert out.status_code == 303
        assert state_with(first.url, ended) == 401
        time.sleep(1.1)
        assert state_with(first.url, ended) == state_with(second.url, ended) == 401
        assert state_with(first.url, kept) == state_with(second.url, kept) == 200
        assert httpx.post(f"{first.url}/logout", cookies={"quietmax_session": "x.y.1.z"}).status_code == 303


def test_a_copy_of_the_ledger_signs_no_session(start: Start) -> None:
    """The ledger holds no secret, and a key created again under the same id does not revive its sessions."""
    with start("plain", budget=Terms(10.0), queries=20) as service:
        cookie = httpx.post(f"{service.url}/login", data={"key": service.admin}).cookies["quietmax_session"]
        assert state_with(service.url, cookie) == 200
        with service.ledger._engine.connect() as connection:
            meta = dict(tuple(row) for row in connection.execute(text("SELECT name, value FROM meta")))
            hashes = list(connection.execute(text("SELECT secret_hash FROM keys")).scalars())
        content, _, signature = cookie.rpartition(".")
        for value in [*meta.values(), *hashes]:
            is_hex = len(value) % 2 == 0 and set(value) <= set("0123456789abcdef")
            for secret in {value.encode(), bytes.fromhex(value) if is_hex else b""}:
                for signed in (content, *(f"{content}.{each}" for each in hashes)):
                    assert hmac.new(secret, signed.encode(), "sha256").hexdigest() != signature
        with service.ledger._engine.begin() as connection:
            connection.execute(text("UPDATE keys SET secret_hash = 'other'"))
        time.sleep(1.1)
        assert state_with(service.url, cookie) == 401


def test_sessions_of_a_service_that_was_started_again_end_unless_the_secret_is_kept(start: Start) -> None:
    kept = Settings(session_secret=b"kept in a file by the operator, 32")
    for settings, status in ((None, 401), (kept, 200)):
        with start("plain", budget=Terms(10.0), queries=20, settings=settings) as service:
            cookie = httpx.post(f"{service.url}/login", data={"key": service.key}).cookies["quietmax_session"]
        with start("plain", budget=Terms(10.0), queries=20, settings=settings) as service:
            assert state_with(service.url, cookie) == status


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


def test_anonymous_access_is_refused_to_what_a_plain_proxy_sends(start: Start) -> None:
    body = json.dumps(inference(some_rows(1))).encode()
    with start("plain", budget=Terms(10.0), queries=20, settings=Settings(anonymous=True)) as service:
        address = service.url.removeprefix("http://")
        for version, headers, status in (
            ("1.0", f"Host: {address}\r\n", 403),  # nginx with proxy_pass alone
            ("1.1", "", 403),
            ("1.1", f"Host: {address}\r\n", 200),
        ):
            host, port = address.split(":")
            with socket.create_connection((host, int(port)), timeout=30) as connection:
                connection.sendall(
                    f"POST /v2/models/plain/infer HTTP/{version}\r\n{headers}Connection: close\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n".encode()
                    + body
                )
                assert int(connection.recv(2**16).split()[1]) == status, (version, headers)


def test_only_a_loopback_peer_is_local() -> None:
    headers = [(b"host", b"localhost")]
    for address, local in (("127.0.0.1", True), ("::1", True), ("172.17.0.1", False)):
        scope = {"client": (address, 5), "http_version": "1.1", "headers": headers}
        assert is_local(scope) == local
    assert not is_local({"client": None, "http_version": "1.1", "headers": headers})


def test_no_redirect_leads_to_the_host_that_a_client_names(plain: Running) -> None:
    for path in ("/v2/", "/v2/models/", "/login/"):
        answered = plain.http.get(path, headers={"host": "evil.example"})
        assert answered.status_code in (404, 405)
        assert "location" not in answered.headers
