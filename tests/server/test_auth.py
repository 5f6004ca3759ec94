"""Who may send requests: keys, sessions, anonymous access, and how many requests."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quietmax.accounting.costs import LIMIT
from quietmax.ledger import Terms
from quietmax.server import Settings, auth
from quietmax.server.app import _is_local
from quietmax.server.auth import RateLimiter
from tests.server.running_service import (
    Running,
    Start,
    bearer,
    check_message,
    inference,
    some_rows,
)


def test_only_health_metadata_of_the_server_and_the_login_page_need_no_key(plain: Running) -> None:
    model = "/v2/models/plain"
    with httpx.Client(base_url=plain.url) as nobody:
        for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/"):
            assert nobody.get(path).status_code == 200, path
        for path in (
            "/v2/models",
            model,
            f"{model}/ready",
            f"{model}/budget",
            "/metrics",
            "/contents",
            "/state",
        ):
            assert nobody.get(path).status_code == 401, path
        assert "Log in" in nobody.get("/").text
        assert "people" not in nobody.get("/").text
        assert nobody.post(f"{model}/infer", json=inference(some_rows(1))).status_code == 401
    assert plain.ledger.account("people").spent_units == 0


def test_a_wrong_or_expired_key_is_401(plain: Running) -> None:
    expired, _ = plain.ledger.create_key("brief", days=0.6 / 86400)
    time.sleep(0.7)
    bearer = f"Bearer {expired}"
    for header in (
        "Bearer",
        "Bearer x",
        f"Basic {plain.key}",
        plain.key,
        f"Bearer {plain.key}x",
        "bearer",
        bearer,
    ):
        response = plain.http.get("/v2/models", headers={"authorization": header})
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


def test_anonymous_access_works_on_this_machine_and_not_through_a_proxy_another_name_or_another_site(
    start: Start,
) -> None:
    with (
        start("plain", settings=Settings(anonymous=True)) as service,
        httpx.Client(base_url=service.url) as nobody,
    ):
        path, body = "/v2/models/plain/infer", inference(some_rows(1))
        for header in (
            {"x-forwarded-for": "203.0.113.5"},
            {"forwarded": "for=203.0.113.5"},
            {"host": "attacker.example"},
            {"via": "1.1 proxy"},
            {"x-forwarded-proto": "https"},
            {"origin": "http://evil.example"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
        ):
            refused = nobody.post(path, json=body, headers=header)
            assert refused.status_code == 403, header
            assert ("other sites" in refused.json()["error"]) == (
                not {"origin", "sec-fetch-site"}.isdisjoint(header)
            )
            assert nobody.get("/contents", headers=header).status_code == 403
        assert service.ledger.account("people").spent_units == 0
        assert nobody.post(path, json=body, headers={"origin": service.url}).status_code == 200
        assert nobody.get("/contents").status_code == 200
        (part,) = service.ledger.subaccounts(service.ledger.account("people"))
        assert part.client == "anonymous"
        with_key = {**bearer(service.key), "x-forwarded-for": "203.0.113.5"}
        assert nobody.post(path, json=body, headers=with_key).status_code == 200


def test_a_cookie_is_no_key_and_no_redirect_leads_to_the_host_that_a_client_names(plain: Running) -> None:
    for path in ("/state", "/contents", "/v2/models"):
        refused = httpx.get(plain.url + path, cookies={"key": plain.key, "authorization": plain.key})
        assert refused.status_code == 401
        assert "set-cookie" not in refused.headers
    for path in ("/v2/", "/v2/models/", "/state/"):
        answered = plain.http.get(path, headers={"host": "evil.example"})
        assert answered.status_code in (404, 405)
        assert "location" not in answered.headers


def test_anonymous_access_is_refused_to_what_a_plain_proxy_sends(start: Start) -> None:
    body = json.dumps(inference(some_rows(1))).encode()
    with start("plain", settings=Settings(anonymous=True)) as service:
        address = service.url.removeprefix("http://")
        for version, headers, status in (
            ("1.0", f"Host: {address}\r\n", 403),  # nginx with proxy_pass alone
            ("1.1", "", 400),
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
        assert _is_local(scope) == local
    assert not _is_local({"client": None, "http_version": "1.1", "headers": headers})


class _Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_a_client_has_a_burst_and_then_the_rate() -> None:
    clock = _Clock()
    limiter = RateLimiter(4.0, burst=3, clock=clock)
    assert [limiter._wait(1) for _ in range(5)] == [0, 0, 0, 0.25, 0.25]
    assert limiter._wait(2) == 0, "another client is not affected"
    clock.now += 0.25
    assert [limiter._wait(1) for _ in range(2)] == [0, 0.25]
    clock.now += 100
    assert [limiter._wait(1) for _ in range(4)] == [0, 0, 0, 0.25], "no more than the burst is saved up"


@pytest.mark.parametrize(("rate", "burst"), [(0.1, 1), (1.0, 1), (2.5, 2), (100.0, 100)])
def test_the_burst_is_the_requests_of_one_second_by_default(rate: float, burst: int) -> None:
    limiter = RateLimiter(rate, clock=_Clock())
    assert [limiter._wait(1) == 0 for _ in range(burst + 1)] == [True] * burst + [False]


@given(
    st.floats(0.1, 50),
    st.integers(1, 20),
    st.lists(st.floats(0, 3), min_size=1, max_size=120),
)
def test_no_span_of_time_has_more_requests_than_the_burst_and_the_rate(
    rate: float, burst: int, pauses: list[float]
) -> None:
    clock = _Clock()
    limiter = RateLimiter(rate, burst, clock)
    accepted = []
    for pause in pauses:
        clock.now += pause
        wait = limiter._wait(1)
        if wait == 0:
            accepted.append(clock.now)
        else:
            clock.now += wait * 1.000001 + 1e-9
            assert limiter._wait(1) == 0, "a request after the stated wait is accepted"
            accepted.append(clock.now)
    for first, start in enumerate(accepted):
        for last in range(first, len(accepted)):
            assert last - first + 1 <= burst + rate * (accepted[last] - start) + 1e-6 * (1 + rate)


def test_memory_is_bounded_however_many_clients_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "_MAX_CLIENT_IDS", 100)
    clock = _Clock()
    limiter = RateLimiter(1.0, burst=2, clock=clock)
    for client in range(1000):
        clock.now += 0.001
        assert limiter._wait(client) == 0
        assert len(limiter._busy_until) <= 100
    assert [limiter._wait(999) for _ in range(2)] == [0, 1.0], "the latest client is not forgotten"
    clock.now += 10
    limiter._forget(clock.now)
    assert limiter._busy_until == {}


def test_a_request_beyond_the_limit_is_429_and_costs_nothing(start: Start) -> None:
    settings = Settings(rate_limit=0.001, rate_burst=2)
    with start("plain", settings=settings) as service:
        assert service.infer(some_rows(1)).status_code == 200
        assert service.http.get("/v2/models").status_code == 200
        refused = service.infer(some_rows(1, 1))
        assert refused.status_code == 429
        assert 990 <= int(refused.headers["retry-after"]) <= 1000
        check_message(refused)
        assert "Nothing was charged" in refused.json()["error"]
        assert service.ledger.account("people").spent_units == LIMIT // 20
        assert service.http.get("/v2/health/ready").status_code == 200
        assert service.get("/v2/models", service.admin).status_code == 200, "another client"
        assert 'status="429"' in service.get("/metrics", service.admin).text


def test_an_exhausted_budget_is_never_429(start: Start) -> None:
    settings = Settings(rate_limit=1000.0)
    with start("plain", budget=Terms(10.0), queries=2, settings=settings) as service:
        statuses = [service.infer(some_rows(1, row)).status_code for row in range(4)]
        assert statuses == [200, 200, 403, 403]


def test_requests_of_the_page_have_a_limit_of_their_own(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "_PAGE_BURST", 4)
    monkeypatch.setattr(auth, "_PAGE_RATE", 0.001)
    settings = Settings(rate_limit=0.001, rate_burst=1)
    with start("head", settings=settings) as service:
        paths = ("/contents", "/state", "/state", "/state")
        assert [service.http.get(path).status_code for path in paths] == [200] * 4
        for path in ("/contents", "/state"):
            refused = service.http.get(path)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) > 0
            check_message(refused)
        assert service.http.get("/v2/models").status_code == 200, "the page does not use up other requests"
        assert service.get("/state", service.admin).status_code == 200
