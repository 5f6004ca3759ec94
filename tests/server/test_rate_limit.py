"""Rate limits per client."""

from __future__ import annotations

import time

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quietmax.accounting.costs import LIMIT
from quietmax.ledger import Terms
from quietmax.server import Settings, auth
from quietmax.server import auth as rate_limit
from quietmax.server.auth import RateLimiter
from tests.server.running_service import Start, check_message, inference, some_rows


class _Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_a_client_has_a_burst_and_then_the_rate() -> None:
    clock = _Clock()
    limiter = RateLimiter(4.0, burst=3, clock=clock)
    assert [limiter.wait(1) for _ in range(5)] == [0, 0, 0, 0.25, 0.25]
    assert limiter.wait(2) == 0, "another client is not affected"
    clock.now += 0.25
    assert [limiter.wait(1) for _ in range(2)] == [0, 0.25]
    clock.now += 100
    assert [limiter.wait(1) for _ in range(4)] == [0, 0, 0, 0.25], "no more than the burst is saved up"


@pytest.mark.parametrize(("rate", "burst"), [(0.1, 1), (1.0, 1), (2.5, 2), (100.0, 100)])
def test_the_burst_is_the_requests_of_one_second_by_default(rate: float, burst: int) -> None:
    limiter = RateLimiter(rate, clock=_Clock())
    assert [limiter.wait(1) == 0 for _ in range(burst + 1)] == [True] * burst + [False]


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
        wait = limiter.wait(1)
        if wait == 0:
            accepted.append(clock.now)
        else:
            clock.now += wait * 1.000001 + 1e-9
            assert limiter.wait(1) == 0, "a request after the stated wait is accepted"
            accepted.append(clock.now)
    for first, start in enumerate(accepted):
        for last in range(first, len(accepted)):
            assert last - first + 1 <= burst + rate * (accepted[last] - start) + 1e-6 * (1 + rate)


def test_memory_is_bounded_however_many_clients_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "_MAX_CLIENT_IDS", 100)
    clock = _Clock()
    limiter = RateLimiter(1.0, burst=2, clock=clock)
    for client in range(1000):
        clock.now += 0.001
        assert limiter.wait(client) == 0
        assert len(limiter._busy_until) <= 100
    assert [limiter.wait(999) for _ in range(2)] == [0, 1.0], "the latest client is not forgotten"
    clock.now += 10
    limiter._forget(clock.now)
    assert limiter._busy_until == {}


def test_a_request_beyond_the_limit_is_429_and_costs_nothing(start: Start) -> None:
    settings = Settings(rate_limit=0.001, rate_burst=2)
    with start("plain", budget=Terms(10.0), queries=20, settings=settings) as service:
        assert service.infer(some_rows(1)).status_code == 200
        assert service.http.get("/v2/models").status_code == 200
        refused = service.infer(some_rows(1, 1))
        assert refused.status_code == 429
        assert 990 <= int(refused.headers["retry-after"]) <= 1000
        check_message(refused)
        assert "Nothing was charged" in refused.json()["error"]
        assert service.ledger.account("people").spent_units == LIMIT // 20
        assert service.http.get("/v2/health/ready").status_code == 200
        admin = {"authorization": f"Bearer {service.admin}"}
        assert service.http.get("/v2/models", headers=admin).status_code == 200, "another client"
        assert 'status="429"' in service.http.get("/metrics", headers=admin).text


def test_answers_on_the_page_count(start: Start) -> None:
    settings = Settings(rate_limit=0.001, rate_burst=1)
    with (
        start("plain", budget=Terms(10.0), queries=20, settings=settings) as service,
        httpx.Client(base_url=service.url) as browser,
    ):
        browser.post("/login", data={"key": service.key})
        body = inference(some_rows(1))
        assert [browser.post("/try?model=plain", json=body).status_code for _ in range(2)] == [200, 429]
        assert browser.get("/state").status_code == 200


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
    with start("head", settings=settings) as service, httpx.Client(base_url=service.url) as browser:
        assert browser.post("/login", data={"key": service.key}).status_code == 303
        assert [browser.get(path).status_code for path in ("/", "/state", "/state")] == [200] * 3
        for path in ("/", "/state"):
            refused = browser.get(path)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) > 0
            check_message(refused)
        assert browser.post("/logout").status_code == 429
        assert service.http.get("/v2/models").status_code == 200, "the page does not use up other requests"
        with httpx.Client(base_url=service.url) as other:
            assert other.post("/login", data={"key": service.admin}).status_code == 303
            assert other.get("/state").status_code == 200


def test_failed_logins_are_limited_for_each_address(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "_FAILED_LOGIN_BURST", 3)
    monkeypatch.setattr(auth, "_FAILED_LOGIN_RATE", 0.5)
    with start("head") as service:
        statuses = [
            httpx.post(f"{service.url}/login", data={"key": f"qm_{attempt}"}).status_code
            for attempt in range(5)
        ]
        assert statuses == [401, 401, 401, 429, 429]
        refused = httpx.post(f"{service.url}/login", data={"key": service.key})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) in (1, 2)
        check_message(refused)
        elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(transport=elsewhere) as other:
            assert other.post(f"{service.url}/login", data={"key": service.key}).status_code == 303
        assert service.http.get("/v2/models").status_code == 200, "keys work all the same"
        time.sleep(2.1)
        assert httpx.post(f"{service.url}/login", data={"key": service.key}).status_code == 303
        failed = [line["status"] for line in service.lines() if line["event"] == "login_failed"]
        assert failed == [401, 401, 401, 429, 429, 429]


def test_logins_that_succeed_are_not_limited_as_failed_ones(start: Start) -> None:
    with start("head") as service:
        for _ in range(15):
            assert httpx.post(f"{service.url}/login", data={"key": service.key}).status_code == 303


def test_addresses_of_one_network_share_a_limit() -> None:
    limiter = RateLimiter(1.0, burst=1, clock=_Clock())
    assert limiter.remaining_wait("a") == 0
    assert limiter.wait("a") == 0
    assert limiter.remaining_wait("a") == limiter.wait("a") == 1.0
    assert (
        auth._network("2001:db8::1") == auth._network("2001:db8::ffff:1") != auth._network("2001:db8:0:1::1")
    )
