from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quietmax.accounting.costs import LIMIT
from quietmax.errors import InvalidInput, LedgerDamaged
from quietmax.ledger import AccountState, Charge, ChargeResult, Ledger, LimitExceeded
from quietmax.ledger import ledger as ledger_module
from quietmax.ledger.database import Cursor, _write_transaction
from quietmax.ledger.transactions import (
    Charged,
    NewAnswers,
    Part,
    Replayed,
    RequestIdReused,
    StoredAnswer,
    _store_answers,
)
from tests.ledger.scenarios import (
    charge_error,
    hold_writer,
    journal_kinds,
    open_patients,
    pay,
    query_key,
    wait_for,
)


@pytest.mark.parametrize(("units", "rows"), [(-1, 1), (1, -1)])
def test_a_negative_charge_is_an_error(units: int, rows: int) -> None:
    with pytest.raises(InvalidInput, match="must not be negative"):
        Charge(1, 1, "m/1", units, rows)


@pytest.mark.parametrize("kind", ["charge", "migrated-budget"])
def test_answers_that_are_charged_one_by_one_concern_everybody(kind: Any) -> None:
    """The parts are read from the rows of trainings and evaluations: others would be free again and again."""
    part = Part("a", "holdout")
    assert Charge(1, 1, "m/1", 1, 1, kind="evaluation", part=part).part == part
    with pytest.raises(InvalidInput, match=f"Only a training or an evaluation .* got the kind {kind}"):
        Charge(1, 1, "m/1", 1, 1, kind=kind, part=part)


def test_charges_of_one_client_for_one_model_in_one_transaction_share_a_journal_row(ledger: Ledger) -> None:
    account, units = open_patients(ledger), 1000
    ann, ben, eve = (ledger.client(name) for name in ("ann", "ben", "eve"))
    results: list[ChargeResult] = []
    hold = hold_writer(ledger)
    for client, model, request in [
        (ann, "m/1", None),
        (ann, "m/1", None),
        (ann, "m/1", b"id"),
        (ann, "m/1", None),
        (ann, "m/2", None),
        (ben, "m/2", None),
        (ben, "m/2", None),
    ]:
        charge = Charge(account.id, client, model, units, rows=1, request=request, body=b"body")
        ledger.submit_charges([charge], results.extend)
    ledger.submit_charges([Charge(account.id, eve, "m/1", 0, rows=0)], results.extend)
    hold.set()
    wait_for(results, 8)
    assert {each.client for each in ledger.subaccounts(account)} == {"ann", "ben"}
    rows = [row for row in ledger.export("patients") if row.kind == "charge"]
    names = ledger.client_names()
    assert [(names[row.client], row.model, row.answers, bool(row.detail)) for row in rows] == [
        ("ann", "m/1", 2, False),
        ("ann", "m/1", 1, True),
        ("ann", "m/1", 1, False),
        ("ann", "m/2", 1, False),
        ("ben", "m/2", 2, False),
    ]
    assert [row.units for row in rows] == [row.answers * units for row in rows]
    assert rows[-1].spent_units == ledger.account("patients").spent_units == 7 * units
    assert ledger.verify().sound


@pytest.mark.parametrize("others_first", [True, False])
def test_clients_together_spend_one_budget_and_one_of_them_no_more_than_its_quota(
    sqlite_ledger: Ledger, others_first: bool
) -> None:
    """Whoever comes first, three quarters of the budget are left to the others, and no answer beyond it to anybody."""
    account, cost = open_patients(sqlite_ledger), LIMIT // 40
    greedy, ann, ben = (sqlite_ledger.client(name) for name in ("greedy", "ann", "ben"))
    sqlite_ledger.set_quota("patients", "greedy", 0.25, "a quarter for this client")

    def ask(client: int, times: int) -> Counter[str]:
        results = [
            sqlite_ledger.charge(Charge(account.id, client, "m/1", cost, rows=1)) for _ in range(times)
        ]
        return Counter("paid" if isinstance(each, Charged) else each.limit for each in results)

    for client in (ann, ben, greedy) if others_first else (greedy, ann, ben):
        wanted = {ann: (10, {"paid": 10}), ben: (19, {"paid": 19}), greedy: (50, {"paid": 10, "quota": 40})}
        times, expected = wanted[client]
        assert ask(client, times) == expected
    assert ask(ben, 5) == {"paid": 1, "budget": 4}
    assert ask(ann, 5) == ask(ben, 5) == {"budget": 5}
    assert sqlite_ledger.account("patients").spent_units == 40 * cost


def test_a_charge_of_nothing_writes_nothing(sqlite_ledger: Ledger) -> None:
    account = open_patients(sqlite_ledger)
    ann, bob = sqlite_ledger.client("ann"), sqlite_ledger.client("bob")
    query = query_key(sqlite_ledger, b"model", b"query")
    sqlite_ledger.store_answers(NewAnswers(account.id, (query,), b"answer"))
    assert pay(sqlite_ledger, Charge(account.id, ann, "m/1", 0, rows=0)).units == 0
    assert pay(sqlite_ledger, Charge(account.id, bob, "m/1", 5, 1, queries=(query,))).units == 0
    assert sqlite_ledger.subaccounts(account) == []
    assert journal_kinds(sqlite_ledger) == ["open"]


def test_the_row_of_a_charge_names_its_request_and_what_was_paid_before(sqlite_ledger: Ledger) -> None:
    account, ann = open_patients(sqlite_ledger), sqlite_ledger.client("ann")
    charge = Charge(account.id, ann, "m/1", 5, 1, request=b"\xab", body=b"body")
    for each in (
        charge,
        replace(charge, rows=2),
        replace(charge, request=b"\xcd", body=b""),
        replace(charge, request=None),
        replace(charge, request=b"\xef", kind="training", part=Part("a", "training")),
    ):
        pay(sqlite_ledger, each)
    details = [row.detail and json.loads(row.detail) for row in sqlite_ledger.export("patients")]
    assert details[1:] == [
        {"request": "ab"},
        {"request": "ab", "paid": 5},
        {"request": "cd", "keep": True},
        "",
        {"request": "ef", "side": "training", "split": "a", "units": 5},
    ]


def test_a_missing_account_and_an_answer_to_a_request_that_was_never_charged_are_damage(
    sqlite_ledger: Ledger,
) -> None:
    charge = Charge(999, sqlite_ledger.client("ann"), "m/1", 1, rows=1)
    assert isinstance(charge_error(sqlite_ledger, charge), LedgerDamaged)
    unknown = NewAnswers(1, request=b"unknown", answer=b"answer")
    with pytest.raises(LedgerDamaged, match="is missing from the ledger"):
        sqlite_ledger.store_answers(unknown)
    with _write_transaction(sqlite_ledger._engine) as connection, pytest.raises(LedgerDamaged):
        _store_answers(Cursor(connection), {}, [unknown], b"", 0)


# --- any sequence of charges, retries and answers -----------------------------------------------------------------

QUERIES = [bytes([number]) * 16 for number in range(4)]
Asked = tuple[int, int, int, int | tuple[bytes, ...], int | None, bytes]
"""Account, client, units of one answer, number of answers or queries, request id, and body."""
_asked = st.tuples(
    st.integers(0, 1),
    st.integers(0, 1),
    st.sampled_from([0, 7, LIMIT // 10, LIMIT // 3]),
    st.integers(0, 3) | st.lists(st.sampled_from(QUERIES), min_size=1, unique=True).map(tuple),
    st.none() | st.integers(0, 2),
    st.sampled_from([b"body", b"body", b"body", b"other"]),
)
_steps = st.lists(
    st.one_of(
        st.lists(_asked, min_size=1, max_size=4),
        st.lists(_asked, min_size=1, max_size=1),
        st.tuples(st.just("store"), st.integers(0, 1), st.integers(0, 2), st.integers(1, 2)),
        st.tuples(st.just("cache"), st.integers(0, 1), st.sampled_from(QUERIES)),
        st.tuples(st.just("quota"), st.integers(0, 1), st.integers(0, 1), st.sampled_from([None, 0.4, 1.0])),
    ),
    min_size=10,
    max_size=30,
)


@dataclass
class NaiveRequest:
    account: int
    body: bytes
    paid: int
    queries: tuple[bytes, ...]
    answer: bytes | None = None


class NaiveLedger:
    """What a ledger promises, without a database."""

    def __init__(self) -> None:
        self.spent: Counter[int] = Counter()
        self.by_client: Counter[tuple[int, int]] = Counter()
        self.quotas: dict[tuple[int, int], int | None] = {}
        self.requests: dict[tuple[int, int], NaiveRequest] = {}
        self.cache: dict[tuple[int, bytes], bytes] = {}

    def left(self, account: int, client: int) -> dict[str, int]:
        left, quota = {"budget": LIMIT - self.spent[account]}, self.quotas.get((account, client))
        return left if quota is None else {**left, "quota": quota - self.by_client[account, client]}

    def charge(self, asked: Asked) -> ChargeResult:
        account, client, units, wanted, number, body = asked
        earlier = None if number is None else self.requests.get((client, number))
        if earlier and (earlier.body != body or (earlier.answer is None and earlier.account != account)):
            return RequestIdReused()
        left = self.left(account, client)
        if earlier and earlier.answer is not None:
            return Replayed(earlier.answer, min(left.values()))
        queries = wanted if isinstance(wanted, tuple) else ()
        cached = {query: self.cache[account, query] for query in queries if (account, query) in self.cache}
        answers = wanted if isinstance(wanted, int) else len(wanted) - len(cached)
        due = max(answers * units - (earlier.paid if earlier else 0), 0)
        for limit, amount in left.items():
            if due > amount:
                return LimitExceeded(limit, due, amount)  # type: ignore[arg-type]
        self.spent[account] += due
        self.by_client[account, client] += due
        if number is not None:
            paid = due + (earlier.paid if earlier else 0)
            new = tuple(query for query in queries if query not in cached)
            self.requests[client, number] = NaiveRequest(account, body, paid, new)
        return Charged(due, answers, min(self.left(account, client).values()), cached)

    def store(self, request: NaiveRequest, draw: bytes) -> StoredAnswer:
        if request.answer is not None:
            return StoredAnswer(request.answer, False)
        request.answer = draw
        for query in request.queries:
            self.cache.setdefault((request.account, query), draw)
        return StoredAnswer(draw, True)


def _check_balances(ledger: Ledger, naive: NaiveLedger, accounts: list[AccountState], run: int) -> None:
    for number, account in enumerate(accounts):
        assert ledger.account(account.name).spent_units == naive.spent[number]
        shares = {each.client: (each.limit_units, each.spent_units) for each in ledger.subaccounts(account)}
        for client in range(2):
            stated = naive.quotas.get((number, client)), naive.by_client[number, client]
            assert shares.get(f"c{run}-{client}", (None, 0)) == stated
    verification = ledger.verify()
    assert verification.sound, verification.faults


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_steps)
def test_any_sequence_of_charges_retries_and_answers_agrees_with_a_naive_ledger(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, steps: list[Any]
) -> None:
    """A retry is free, and of several draws the first that is stored leaves."""
    monkeypatch.setattr(ledger_module, "_FLUSH_INTERVAL", 0.0)
    naive, run = NaiveLedger(), ledger.heads()[-1][1].account  # other names in each example
    names = [f"a{run}-{number}" for number in range(2)]
    accounts = [open_patients(ledger, name) for name in names]
    clients = [ledger.client(f"c{run}-{number}") for number in range(2)]

    def charge_of(asked: Asked) -> Charge:
        account, client, units, wanted, number, body = asked
        queries, rows = (wanted, 0) if isinstance(wanted, tuple) else ((), wanted)
        request = None if number is None else ledger.request_key(clients[client], f"{number}")
        options: dict[str, Any] = {"queries": queries, "request": request, "body": body}
        return Charge(accounts[account].id, clients[client], "m/1", units, rows, **options)

    for place, step in enumerate(steps):
        results, expected = list[Any](), list[Any]()
        if isinstance(step, list):
            ledger.submit_charges([charge_of(asked) for asked in step], results.extend)
            expected = [naive.charge(asked) for asked in step]
        elif step[0] == "store" and (request := naive.requests.get(step[1:3])):
            for draw in [b"%03d %d" % (place, number) for number in range(step[3])]:
                key, answers = ledger.request_key(clients[step[1]], f"{step[2]}"), draw * len(request.queries)
                stored = NewAnswers(accounts[request.account].id, request.queries, answers, key, draw)
                ledger.submit_answers(stored, results.append)
                expected.append(naive.store(request, draw))
        elif step[0] == "cache":
            draw = b"%03d  " % place
            ledger.submit_answers(NewAnswers(accounts[step[1]].id, (step[2],), draw), results.append)
            naive.cache.setdefault(step[1:], draw)
            expected = [StoredAnswer(b"", True)]
        wait_for(results, len(expected))
        assert results == expected
        if step[0] == "quota":
            share = None if step[3] is None else int(step[3] * LIMIT)
            if share is None or share >= naive.by_client[step[1:3]]:
                ledger.set_quota(names[step[1]], f"c{run}-{step[2]}", step[3], "a part for one client")
                naive.quotas[step[1:3]] = share
    _check_balances(ledger, naive, accounts, run)
