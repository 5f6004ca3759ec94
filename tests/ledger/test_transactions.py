from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quietmax.accounting import PureCost
from quietmax.accounting.costs import LIMIT
from quietmax.errors import InvalidInput, LedgerDamaged
from quietmax.ledger import Charge, ChargeResult, Ledger, LimitExceeded, Terms
from quietmax.ledger.accounts import Subaccount
from quietmax.ledger.database import Cursor, _write_transaction
from quietmax.ledger.transactions import (
    Charged,
    NewAnswers,
    Part,
    Replayed,
    RequestIdReused,
    _store_answers,
)
from tests.ledger.scenarios import (
    charge_error,
    exceeded,
    hold_writer,
    journal_kinds,
    open_patients,
    open_with_unit_cost,
    pay,
    query_key,
    wait_until,
)

_steps = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(1, LIMIT // 3), st.integers(1, 3), st.none() | st.integers(0, 3)
    ),
    min_size=1,
    max_size=25,
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
    account, units = open_with_unit_cost(ledger)
    ann, ben = ledger.client("ann"), ledger.client("ben")
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
    hold.set()
    wait_until(lambda: len(results) == 7)
    rows = [row for row in ledger.export("patients") if row.kind == "charge"]
    assert [(row.client, row.model, row.answers, bool(row.detail)) for row in rows] == [
        ("ann", "m/1", 2, False),
        ("ann", "m/1", 1, True),
        ("ann", "m/1", 1, False),
        ("ann", "m/2", 1, False),
        ("ben", "m/2", 2, False),
    ]
    assert [row.units for row in rows] == [row.answers * units for row in rows]
    assert rows[-1].spent_units == ledger.account("patients").spent_units == 7 * units
    assert ledger.verify().sound


def test_a_charge_debits_account_and_client_or_neither(ledger: Ledger) -> None:
    account, units = open_with_unit_cost(ledger)
    ann, bob = ledger.client("ann"), ledger.client("bob")
    ledger.set_quota("patients", "ann", 0.3, "ann asked for three answers")
    refused = [exceeded(ledger, Charge(account.id, ann, "m/1", units, rows=4))]
    for _ in range(3):
        pay(ledger, Charge(account.id, ann, "m/1", units, rows=1))
    refused.append(exceeded(ledger, Charge(account.id, ann, "m/1", units, rows=1)))
    assert [(result.limit, result.remaining_units) for result in refused] == [
        ("quota", 3 * LIMIT // 10),
        ("quota", 0),
    ]
    too_much = exceeded(ledger, Charge(account.id, bob, "m/1", units, rows=8))
    assert (too_much.limit, too_much.remaining_units) == ("budget", 7 * LIMIT // 10)
    assert isinstance(ledger.charge(Charge(account.id, bob, "m/1", units, rows=7)), Charged)
    spent = {each.client: each.spent_units for each in ledger.subaccounts(account)}
    assert spent == {"ann": 3 * LIMIT // 10, "bob": 7 * LIMIT // 10}
    assert ledger.account("patients").remaining_units == 0


def test_a_charge_reports_what_remains_for_its_client(ledger: Ledger) -> None:
    account, units = open_with_unit_cost(ledger)
    ann, bob = ledger.client("ann"), ledger.client("bob")
    ledger.set_quota("patients", "ann", 0.3, "ann asked for three answers")
    assert pay(ledger, Charge(account.id, ann, "m/1", units, rows=1)).remaining_units == 2 * LIMIT // 10
    assert pay(ledger, Charge(account.id, bob, "m/1", units, rows=6)).remaining_units == 3 * LIMIT // 10
    assert pay(ledger, Charge(account.id, bob, "m/1", units, rows=2)).remaining_units == LIMIT // 10
    request = ledger.request_key(ann, "last")
    last = Charge(account.id, ann, "m/1", units, rows=1, request=request, body=b"body")
    assert pay(ledger, last).remaining_units == 0  # the budget ends before her quota
    ledger.store_answers(NewAnswers(account.id, request=request, answer=b"answer"))
    assert ledger.charge(last) == Replayed(b"answer", 0)


def test_a_charge_of_nothing_writes_nothing(sqlite_ledger: Ledger) -> None:
    account = open_patients(sqlite_ledger)
    ann, bob = sqlite_ledger.client("ann"), sqlite_ledger.client("bob")
    query = query_key(sqlite_ledger, b"model", b"query")
    sqlite_ledger.store_answers(NewAnswers(account.id, (query,), b"answer"))
    assert pay(sqlite_ledger, Charge(account.id, ann, "m/1", 0, rows=0)).units == 0
    assert pay(sqlite_ledger, Charge(account.id, bob, "m/1", 5, 1, queries=(query,))).units == 0
    assert sqlite_ledger.subaccounts(account) == []
    assert journal_kinds(sqlite_ledger) == ["open"]


def test_a_client_whose_request_is_answered_from_the_cache_gets_no_subaccount(
    sqlite_ledger: Ledger,
) -> None:
    account, ann = open_patients(sqlite_ledger), sqlite_ledger.client("ann")
    query = query_key(sqlite_ledger, b"model", b"query")
    sqlite_ledger.store_answers(NewAnswers(account.id, (query,), b"answer"))
    cached = Charge(account.id, ann, "m/1", 5, 1, queries=(query,), request=b"id", body=b"body")
    assert pay(sqlite_ledger, cached).units == 0
    assert journal_kinds(sqlite_ledger) == ["open", "charge"]
    assert sqlite_ledger.subaccounts(account) == []
    assert pay(sqlite_ledger, replace(cached, queries=(), unit_cost=1)).units == 1
    assert sqlite_ledger.subaccounts(account) == [Subaccount("ann", None, 1, 0)]
    assert sqlite_ledger.verify().sound


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


def test_a_charge_to_a_missing_account_is_reported_as_damage(sqlite_ledger: Ledger) -> None:
    charge = Charge(999, sqlite_ledger.client("ann"), "m/1", 1, rows=1)
    assert isinstance(charge_error(sqlite_ledger, charge), LedgerDamaged)


def test_a_retry_of_a_request_is_free_and_gets_the_stored_answer_unless_its_body_differs(
    ledger: Ledger,
) -> None:
    account, units = open_with_unit_cost(ledger)
    ann = ledger.client("ann")
    request = ledger.request_key(ann, "first")
    charge = Charge(account.id, ann, "m/1", units, rows=2, request=request, body=b"body")
    assert pay(ledger, charge).units == 2 * units
    assert ledger.store_answers(NewAnswers(account.id, request=request, answer=b"two answers")).first
    again = ledger.charge(charge)
    assert isinstance(again, Replayed)
    assert again.answer == b"two answers"
    assert ledger.charge(replace(charge, body=b"other")) == RequestIdReused()
    assert ledger.account("patients").spent_units == 2 * units


def test_one_account_does_not_answer_a_request_that_another_one_has_paid_for(ledger: Ledger) -> None:
    """As after the records were moved to another account: the id was charged, and never answered."""
    account, units = open_with_unit_cost(ledger)
    other = ledger.open_account("others", PureCost(1.0), Terms(1.0))
    ann = ledger.client("ann")
    request = ledger.request_key(ann, "moved")
    charge = Charge(account.id, ann, "m/1", units, rows=1, request=request, body=b"body")
    pay(ledger, charge)
    assert ledger.charge(replace(charge, account=other.id)) == RequestIdReused()
    gate, results = hold_writer(ledger), list[Any]()
    for number in (account.id, other.id):
        together = replace(charge, account=number, request=ledger.request_key(ann, "together"))
        ledger.submit_charges([together], results.extend)
    gate.set()
    wait_until(lambda: len(results) == 2)
    assert [type(each) for each in results] == [Charged, RequestIdReused]
    assert ledger.account("others").spent_units == 0
    assert ledger.verify().sound
    ledger.store_answers(NewAnswers(account.id, request=request, answer=b"answer"))
    again = ledger.charge(replace(charge, account=other.id))
    assert isinstance(again, Replayed), "an answer that was released may be released again"
    assert again.answer == b"answer"


def test_a_retry_before_the_answer_was_stored_pays_nothing_and_only_the_first_answer_stays(
    ledger: Ledger,
) -> None:
    account, units = open_with_unit_cost(ledger)
    ann = ledger.client("ann")
    request = ledger.request_key(ann, "lost")
    query = query_key(ledger, b"model", b"query")
    charge = Charge(account.id, ann, "m/1", units, rows=1, request=request, body=b"body", queries=(query,))
    first, second = pay(ledger, charge), pay(ledger, charge)
    assert (first.units, first.resumed) == (units, False)
    assert (second.units, second.answers, second.resumed) == (0, 1, True)
    won = ledger.store_answers(NewAnswers(account.id, (query,), b"drawn second", request, b"drawn second"))
    lost = ledger.store_answers(NewAnswers(account.id, (query,), b"drawn first", request, b"drawn first"))
    assert (won.first, lost.first) == (True, False)
    assert lost.answer == b"drawn second"
    asked = pay(ledger, Charge(account.id, ann, "m/1", units, rows=1, queries=(query,)))
    assert dict(asked.cached) == {query: b"drawn second"}
    assert ledger.account("patients").spent_units == units


def test_two_draws_of_one_request_in_one_batch_leave_only_the_first(ledger: Ledger) -> None:
    account, units = open_with_unit_cost(ledger)
    ann = ledger.client("ann")
    request, query = ledger.request_key(ann, "twice"), query_key(ledger, b"model", b"query")
    charge = Charge(account.id, ann, "m/1", units, 1, queries=(query,), request=request)
    assert pay(ledger, charge).units + pay(ledger, charge).units == units
    gate, results = hold_writer(ledger), list[Any]()
    for drawn in (b"first", b"second"):
        ledger.submit_answers(NewAnswers(account.id, (query,), drawn, request, drawn), results.append)
    gate.set()
    wait_until(lambda: len(results) == 2)
    assert [(kept.answer, kept.first) for kept in results] == [(b"first", True), (b"first", False)]
    asked = pay(ledger, Charge(account.id, ann, "m/1", units, rows=1, queries=(query,)))
    assert dict(asked.cached) == {query: b"first"}


def test_a_resumed_request_pays_only_what_it_has_not_paid_yet(ledger: Ledger) -> None:
    account, units = open_with_unit_cost(ledger)
    ann = ledger.client("ann")
    request = ledger.request_key(ann, "grown")
    charge = Charge(account.id, ann, "m/1", units, rows=1, request=request, body=b"body")
    ledger.charge(charge)
    grown = Charge(account.id, ann, "m/1", units, rows=3, request=request, body=b"body")
    assert pay(ledger, grown).units == 2 * units
    assert pay(ledger, grown).units == 0
    assert ledger.account("patients").spent_units == 3 * units


def test_identical_queries_are_free_once_their_answer_is_stored(ledger: Ledger) -> None:
    account, units = open_with_unit_cost(ledger)
    ann, bob = ledger.client("ann"), ledger.client("bob")
    queries = tuple(query_key(ledger, b"model", bytes([number])) for number in range(3))
    assert pay(ledger, Charge(account.id, ann, "m/1", units, 3, queries=queries)).answers == 3
    ledger.store_answers(NewAnswers(account.id, queries[:2], b"answer 0answer 1"))
    charged = pay(ledger, Charge(account.id, bob, "m/1", units, 3, queries=queries))
    assert (charged.answers, charged.units) == (1, units)
    assert dict(charged.cached) == {queries[0]: b"answer 0", queries[1]: b"answer 1"}
    another_version = query_key(ledger, b"retrained", bytes([0]))
    assert pay(ledger, Charge(account.id, bob, "m/2", units, 1, queries=(another_version,))).answers == 1


def test_an_answer_to_a_request_that_was_never_charged_is_reported_as_damage(sqlite_ledger: Ledger) -> None:
    with pytest.raises(LedgerDamaged, match="is missing from the ledger"):
        sqlite_ledger.store_answers(NewAnswers(1, request=b"unknown", answer=b"answer"))
    with _write_transaction(sqlite_ledger._engine) as connection, pytest.raises(LedgerDamaged):
        _store_answers(Cursor(connection), {}, [NewAnswers(1, request=b"unknown", answer=b"answer")], b"", 0)


@settings(max_examples=25)
@given(steps=_steps, together=st.booleans(), quota=st.none() | st.sampled_from([0.1, 0.5]))
def test_any_sequence_of_charges_agrees_with_a_naive_count(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[int, int, int, int | None]],
    together: bool,
    quota: float | None,
) -> None:
    with Ledger(tmp_path_factory.mktemp("naive") / "ledger.sqlite") as ledger:
        account, _ = open_with_unit_cost(ledger)
        numbers = [ledger.client(name) for name in ("ann", "bob", "eve")]
        if quota is not None:
            ledger.set_quota("patients", "ann", quota, "a part for ann alone")
        charges = [
            Charge(
                account.id,
                numbers[who],
                "m/1",
                units,
                rows=rows,
                request=None if request is None else bytes([who, request]),
                body=b"%d %d" % (units, rows),
            )
            for who, units, rows, request in steps
        ]
        if together:
            gate, results = hold_writer(ledger), list[Any]()
            for charge in charges:
                ledger.submit_charges([charge], results.extend)
            gate.set()
            wait_until(lambda: len(results) == len(charges))
        else:
            results = [ledger.charge(charge) for charge in charges]

        spent = 0
        by_client: Counter[int] = Counter()
        requests: dict[bytes | None, bytes] = {}
        for charge, result in zip(charges, results, strict=True):
            limit = LIMIT if quota is None or charge.client != numbers[0] else int(LIMIT * quota)
            due = charge.unit_cost * charge.rows
            if charge.request in requests:
                if requests[charge.request] != charge.body:
                    assert result == RequestIdReused()
                    continue
                due = 0
            if spent + due > LIMIT or by_client[charge.client] + due > limit:
                assert isinstance(result, LimitExceeded)
                continue
            assert isinstance(result, Charged)
            assert result.units == due
            spent += due
            by_client[charge.client] += due
            if charge.request is not None:
                requests.setdefault(charge.request, charge.body)
        assert ledger.account("patients").spent_units == spent
        verification = ledger.verify()
        assert verification.sound, verification.faults
