"""One client, or one training set, at its limit does not disturb the others."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np

from quietmax.ledger import Terms
from quietmax.server import Settings
from tests.server.running_service import Running, Start, bearer, inference, some_rows

QUESTIONS = 80


def _ask(service: Running, key: str, seed: int) -> list[tuple[int, float]]:
    """Ask one new question every 20 ms; the status and the seconds of each."""
    seen = []
    with httpx.Client(base_url=service.url, headers=bearer(key), timeout=60) as http:
        for number in range(QUESTIONS):
            begun = time.monotonic()
            body = inference(some_rows(1, seed + number), id=f"{seed}-{number}")
            status = http.post("/v2/models/plain/infer", json=body).status_code
            seen.append((status, time.monotonic() - begun))
            time.sleep(0.02)
    return seen


def _flood(service: Running, key: str, stop: threading.Event, number: int) -> Counter[int]:
    """Ask as fast as the service answers, until told to stop."""
    statuses: Counter[int] = Counter()
    with httpx.Client(base_url=service.url, headers=bearer(key), timeout=60) as http:
        while not stop.is_set():
            rows = some_rows(1, 10**6 * number + statuses.total())
            statuses[http.post("/v2/models/plain/infer", json=inference(rows)).status_code] += 1
    return statuses


def test_a_client_at_its_rate_limit_and_its_quota_does_not_slow_or_starve_another(start: Start) -> None:
    settings = Settings(rate_limit=60, rate_burst=60, request_log=False)
    with (
        start("plain", settings=settings, budget=Terms(10.0), queries=1000) as service,
        ThreadPoolExecutor(4) as pool,
    ):
        keys = {name: service.ledger.create_key(name)[0] for name in ("bob", "limited", "at-quota")}
        service.infer(some_rows(1, 9999), key=keys["at-quota"])
        service.ledger.set_quota("people", "at-quota", 0.001, "one answer for this client")
        alone = _ask(service, keys["bob"], 0)
        stop = threading.Event()
        floods = [
            pool.submit(_flood, service, keys[name], stop, number)
            for number, name in enumerate(("limited", "limited", "at-quota"), start=1)
        ]
        beside = _ask(service, keys["bob"], 5000)
        stop.set()
        statuses = [flood.result(60) for flood in floods]
        spent = {
            part.client: part.spent_units
            for part in service.ledger.subaccounts(service.ledger.account("people"))
        }
    assert [status for status, _ in alone + beside] == [200] * 2 * QUESTIONS
    limited, at_quota = statuses[0] + statuses[1], statuses[2]
    assert set(limited) == {200, 429}
    assert limited[429] > limited[200]
    assert 403 in at_quota
    assert set(at_quota) <= {403, 429}
    assert spent["bob"] == spent["at-quota"] * 2 * QUESTIONS, "each answer is charged to who asked"
    p50, p99 = (
        np.quantile([[seconds for _, seconds in each] for each in (alone, beside)], share, axis=1)
        for share in (0.5, 0.99)
    )
    print(f"\nalone and beside: p50 {p50 * 1000} ms, p99 {p99 * 1000} ms; {limited}, {at_quota}")
    assert p50[1] < 10 * p50[0] + 0.05
    assert p99[1] < 1


def test_an_exhausted_account_does_not_affect_that_of_another_training_set(start: Start) -> None:
    with start("plain", "teachers", budget=Terms(10.0, 1e-5)) as service:
        assert service.infer(some_rows(20)).status_code == 200
        for number in range(3):
            refused = service.infer(some_rows(1, 50 + number))
            assert (refused.status_code, refused.json()["remaining_answers"]) == (403, 0)
            answered = service.infer(some_rows(10, 90 + number), "teachers")
            assert answered.status_code == 200
            assert answered.json()["parameters"]["new_answers"] == 10
        accounts = {each.name: each for each in service.ledger.accounts()}
        assert accounts["people"].remaining_units < accounts["people"].limit_units // 20
        assert accounts["patients"].spent_units == 30 * service.service.deployment("teachers").unit_cost
        assert service.get("/v2/health/ready").status_code == 200
