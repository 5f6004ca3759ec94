"""Charge, draw, store, answer: the order, the answer cache and retries."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pytest

from quietmax.accounting.costs import LIMIT
from quietmax.ledger.transactions import Failed
from quietmax.mechanisms import Answerer
from quietmax.server import Service, Settings, batching
from quietmax.server.batching import Pipeline
from tests.server.running_service import (
    CLASSES,
    LEDGER_DOWN,
    TABLE,
    Running,
    Start,
    caller,
    decoded,
    run_async,
    some_rows,
    watch,
)


def test_too_many_requests_in_flight_are_refused_without_a_charge(start: Start) -> None:
    with start("plain", settings=Settings(max_in_flight=1)) as service:
        in_flight: Any = service.service._pipeline._in_flight  # type: ignore[union-attr]
        in_flight.add("another")
        refused = service.infer(some_rows(1))
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        in_flight.clear()
        assert service.infer(some_rows(1)).status_code == 200
        assert service.ledger.account("people").spent_units == LIMIT // 20


def test_answers_drawn_together_are_stored_each_under_its_own_query(plain: Running) -> None:
    queries = [some_rows(1 + number % 2, number) for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        first = [response.json()["outputs"] for response in pool.map(plain.infer, queries)]
    for rows, outputs in zip(queries, first, strict=True):
        again = plain.infer(rows).json()
        assert again["outputs"] == outputs
        assert again["parameters"]["new_answers"] == 0


def test_cached_answers_outlive_the_process(start: Start) -> None:
    with start("plain") as service:
        first = service.infer(some_rows(1)).json()["outputs"]
    with start("plain") as service:
        again = service.infer(some_rows(1)).json()
        assert again["outputs"] == first
        assert again["parameters"]["cost"] == 0
        assert again["parameters"]["remaining_answers"] == 19


def test_the_answer_cache_can_be_turned_off(start: Start) -> None:
    with start("plain", settings=Settings(answer_cache=False)) as service:
        tables = [service.infer(some_rows(1)).json()["outputs"][1]["data"] for _ in range(4)]
        assert len({tuple(table) for table in tables}) == 4
        assert service.ledger.account("people").spent_units == 4 * LIMIT // 20


def test_a_retry_with_the_same_id_is_free_and_another_body_is_refused_with_409(start: Start) -> None:
    with start("plain", settings=Settings(answer_cache=False)) as service:
        first = service.infer(some_rows(2), id="mine")
        again = service.infer(some_rows(2), id="mine")
        assert first.json()["id"] == again.json()["id"] == "mine"
        assert first.json()["outputs"] == again.json()["outputs"]
        assert again.json()["parameters"]["cost"] == 0
        other = service.infer(some_rows(2, 5), id="mine")
        assert (other.status_code, "another request" in other.json()["error"]) == (409, True)
        assert service.ledger.account("people").spent_units == 2 * LIMIT // 20
        elsewhere = service.infer(some_rows(1), key=service.admin, id="mine")
        assert elsewhere.status_code == 200, "ids of different clients do not meet"


def test_many_retries_at_once_are_paid_once_and_all_get_one_answer(start: Start) -> None:
    with start("plain", settings=Settings(answer_cache=False)) as service, ThreadPoolExecutor(12) as pool:
        responses = list(pool.map(lambda _: service.infer(some_rows(1), id="same"), range(12)))
        assert {response.status_code for response in responses} == {200}
        assert len({response.json()["outputs"][1]["data"][0] for response in responses}) == 1
        assert service.ledger.account("people").spent_units == LIMIT // 20


def test_tries_of_one_id_that_draw_at_the_same_time_report_one_new_answer(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both tries are drawn before either is stored, as in two replicas."""
    with start("plain", settings=Settings(answer_cache=False)) as service:
        both, submit = threading.Barrier(2), service.ledger.submit_answers
        waiting: list[Any] = []

        def hold(answers: Any, done: Any) -> None:
            waiting.append((answers, done))
            if len(waiting) == 2:
                for each in waiting:
                    submit(*each)

        monkeypatch.setattr(service.ledger, "submit_answers", hold)

        def ask(_: int) -> dict[str, Any]:
            both.wait()
            document: dict[str, Any] = service.infer(some_rows(1), id="visit").json()
            return document

        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(ask, range(2)))
        assert answers[0]["outputs"] == answers[1]["outputs"]
        assert sorted(each["parameters"]["new_answers"] for each in answers) == [0, 1]
        assert sum(each["parameters"]["cost"] > 0 for each in answers) == 1
        assert service.ledger.verify().sound


def test_cached_answers_follow_their_rows_in_any_order_with_copies_and_signs_of_zero(plain: Running) -> None:
    rows = some_rows(4)
    rows[3] = 0.0

    def ask(asked: Any) -> tuple[list[list[float]], int]:
        body = plain.infer(asked).json()
        probabilities = np.array(body["outputs"][1]["data"]).reshape(-1, CLASSES)
        return probabilities.tolist(), body["parameters"]["new_answers"]

    first, new = ask(rows)
    assert new == 4
    order = [3, 1, 1, 0, 2, 3, 0]
    assert ask(rows[order]) == ([first[row] for row in order], 0)
    assert ask(-rows[3:]) == (first[3:], 0)
    assert ask(np.full((1, rows.shape[1]), 1e-46)) == (first[3:], 0)  # zero as a 32-bit number
    assert [ask(rows[row : row + 1]) for row in range(4)] == [([answer], 0) for answer in first]
    mixed, new = ask(np.vstack([rows[::-1], some_rows(1, 7), rows[:1]]))
    assert (mixed[:4], mixed[5:], new) == (first[::-1], first[:1], 1)
    assert plain.ledger.account("people").spent_units == 5 * LIMIT // 20


PEOPLE: dict[str, list[Any]] = {
    "age": [10, 20, None, 40],
    "income": [1, 2.5, 3, 99_999],
    "région": ["north", "south", "", "north"],
}


def _some(people: dict[str, list[Any]], rows: list[int]) -> dict[str, list[Any]]:
    return {name: [cells[row] for row in rows] for name, cells in people.items()}


def test_cached_answers_to_columns_follow_their_rows_and_are_shared_with_encoded_rows(start: Start) -> None:
    with start("survey") as service:

        def told(response: httpx.Response) -> tuple[list[str], int]:
            body = response.json()
            return body["outputs"][0]["data"], body["parameters"]["new_answers"]

        first, new = told(service.infer_columns(PEOPLE, "survey"))
        assert (set(first) <= {"no", "yes"}, new) == (True, 4)
        order = [3, 1, 1, 0, 2, 3, 0]
        assert told(service.infer_columns(_some(PEOPLE, order), "survey")) == (
            [first[row] for row in order],
            0,
        )
        encoded = TABLE.encode(pd.DataFrame(PEOPLE))
        assert told(service.infer(encoded[order], "survey")) == ([first[row] for row in order], 0)
        strings = {name: ["" if cell is None else str(cell) for cell in PEOPLE[name]] for name in PEOPLE}
        assert told(service.infer_columns(strings, "survey")) == (first, 0)
        clipped = {**_some(PEOPLE, [3]), "income": [100_000]}
        assert told(service.infer_columns(clipped, "survey"))[1] == 1
        assert told(service.infer_columns({**clipped, "income": [1e300]}, "survey"))[1] == 0, "clipped alike"
        assert service.http.get("/v2/models/survey/budget").json()["remaining_answers"] == 35


def test_every_answer_is_charged_before_noise_is_drawn(
    plain: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    balances = watch(monkeypatch, Answerer, "release", lambda *_: plain.ledger.account("people").spent_units)
    for number in range(3):
        plain.infer(some_rows(1, number))
    assert balances == [LIMIT // 20, 2 * LIMIT // 20, 3 * LIMIT // 20]


def test_a_request_with_an_id_is_answered_only_after_its_answer_is_stored(
    plain: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    submit = plain.ledger.submit_answers

    def watched(answers: Any, done: Any) -> None:
        def stored(result: Any) -> None:
            order.append("stored")
            time.sleep(0.05)
            done(result)

        submit(answers, stored)

    monkeypatch.setattr(plain.ledger, "submit_answers", watched)
    plain.infer(some_rows(1), id="x")
    order.append("answered")
    assert order == ["stored", "answered"]


def test_a_model_that_fails_after_the_charge_answers_503_and_the_service_goes_on(
    plain: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret inner detail")

    with monkeypatch.context() as patch:
        patch.setattr(Answerer, "release", broken)
        failed = plain.infer(some_rows(1))
    assert failed.status_code == 503
    assert "secret inner detail" not in failed.text
    assert plain.infer(some_rows(1, 1)).status_code == 200


def test_an_answer_is_dropped_if_the_connection_ended_meanwhile(
    idle: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection ended while the answer was drawn; it is paid, and nobody gets it."""
    deployment = idle.deployment("plain", None)
    delivered = threading.Event()
    deliver = batching._deliver

    def watched(finished: Any) -> None:
        deliver(finished)
        delivered.set()

    monkeypatch.setattr(batching, "_deliver", watched)

    async def infer_and_leave() -> None:
        pipeline = Pipeline(idle.ledger, idle.settings)
        asked = asyncio.create_task(pipeline._infer(deployment, decoded(), caller(idle)))
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.to_thread(delivered.wait, 60)
        assert not pipeline._in_flight
        await pipeline._close()

    run_async(infer_and_leave())
    assert idle.ledger.account(deployment.account.name).spent_units == deployment.unit_cost


def test_more_rows_than_are_drawn_at_once_are_all_answered(
    plain: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "_MAX_BATCH_ROWS", 2)
    answers = plain.infer(some_rows(5)).json()
    assert answers["outputs"][0]["shape"] == [5]
    assert answers["parameters"]["new_answers"] == 5


def test_a_model_with_free_answers_does_not_answer_while_the_ledger_fails(start: Start) -> None:
    with start("head") as service:
        assert service.infer(some_rows(1), "head").status_code == 200
        service.ledger.writer.error = LEDGER_DOWN
        refused = service.infer(some_rows(1), "head")
        assert refused.status_code == 503
        assert refused.json()["error"] == "The ledger is not available. No query is answered until it is."
        service.ledger.writer.error = None


def test_an_answer_with_an_id_that_cannot_be_stored_does_not_leave(
    plain: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain.ledger, "submit_answers", lambda _, done: done(Failed(LEDGER_DOWN)))
    refused = plain.infer(some_rows(1), id="one")
    assert refused.status_code == 503
    assert "outputs" not in refused.json()


def test_answers_that_nobody_stores_are_not_packed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> None:
        raise AssertionError("packed")

    monkeypatch.setattr(batching, "_pack_answers", forbidden)
    with start("head", settings=Settings(answer_cache=False)) as service:
        assert service.infer(some_rows(3), "head", id="free").status_code == 200
    with start("plain", settings=Settings(answer_cache=False)) as service:
        assert service.infer(some_rows(3)).status_code == 200
        assert service.infer(some_rows(3), id="stored").status_code == 503


@pytest.mark.parametrize(("seconds", "limit", "thread"), [(0.0, 60.0, False), (0.02, 0.015, True)])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_model_that_takes_long_is_drawn_in_a_thread_of_its_own(
    start: Start, monkeypatch: pytest.MonkeyPatch, seconds: float, limit: float, thread: bool, rows: int
) -> None:
    def note(*_: Any) -> str:
        time.sleep(seconds)
        return threading.current_thread().name

    threads = watch(monkeypatch, Answerer, "release", note)
    monkeypatch.setattr(batching, "_MAX_SECONDS_IN_LOOP", limit)
    with start("plain", queries=200) as service:
        for number in range(20):
            assert service.infer(some_rows(rows, number), "plain").status_code == 200
    assert threads[0].startswith("drawing"), "how long it takes is not known yet"
    assert all(name.startswith("drawing") for name in threads[1:]) is thread


def test_scores_computed_during_the_charge_are_those_of_the_rows_that_are_drawn(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request has cached rows and a copy among its rows: only the scores of the new ones are drawn."""
    compute = Answerer.scores
    scored = watch(
        monkeypatch,
        Answerer,
        "scores",
        lambda _, features: (threading.current_thread().name, len(features)),
    )
    drawn = watch(monkeypatch, Answerer, "release", lambda _, scores: scores)
    monkeypatch.setattr(batching, "_MIN_SECONDS_TO_SCORE", 0.0)
    monkeypatch.setattr(batching, "_MAX_SECONDS_IN_LOOP", 5.0)
    rows = some_rows(4)
    with start("plain", queries=200) as service:
        answerer = service.service.deployments[0].answerer
        assert answerer is not None
        service.infer(rows[:2], "plain")  # how long a draw takes is not known before
        service.infer(rows[[0, 2, 3, 2]], "plain")
    assert scored == [("drawing_0", 2), (scored[1][0], 4)]
    assert scored[1][0] != "drawing_0"
    np.testing.assert_allclose(drawn[1], compute(answerer, rows[[2, 3]]), rtol=1e-5)


def test_requests_drawn_together_are_split_by_model_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_MAX_BATCH_ROWS", 4)
    one, other = object(), object()

    def pending(deployment: Any, rows: int) -> Any:
        return batching._Pending(deployment, np.zeros((rows, 1), np.float32), None, 0.0)

    waiting = [pending(one, 3), pending(other, 9), pending(one, 2), pending(one, 1), pending(other, 1)]
    sizes = [[len(each.rows) for each in group] for group in batching._groups(waiting)]
    assert sizes == [[3, 2], [1], [9], [1]]


def test_answers_that_nobody_waits_for_are_stored_soon_without_another_charge(plain: Running) -> None:
    plain.infer(some_rows(1))
    with sqlite3.connect(plain.ledger.address.removeprefix("sqlite:///")) as database:
        deadline = time.monotonic() + 30
        while not database.execute("SELECT COUNT(*) FROM answers").fetchone()[0]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
