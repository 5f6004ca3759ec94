from __future__ import annotations

import multiprocessing
import threading
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from quietmax.accounting import LIMIT, Budget, GaussianCost, PureCost, per_query
from quietmax.errors import InvalidInput
from quietmax.ledger import (
    Charge,
    Charged,
    Failed,
    InvalidKey,
    Ledger,
    LimitExceeded,
    NewAnswers,
    Replayed,
    RequestIdReused,
    Terms,
)
from quietmax.ledger import writer as writer_module
from quietmax.ledger.answer_cache import AnswerCache
from quietmax.ledger.database import Cursor, write_transaction
from quietmax.ledger.transactions import ChargeBatch, store_answers
from tests.ledger.holding import held


def _open(ledger, queries=10, name="patients"):
    account = ledger.open_account(name, PureCost(1.0), Terms(1.0))
    return account, account.units(per_query(Budget(1.0, queries=queries), "pure"))


def test_a_budget_for_ten_answers_pays_for_exactly_ten(ledger):
    account, units = _open(ledger)
    ann = ledger.client("ann")
    outcomes = [ledger.charge(Charge(account.id, ann, "m/1", units, rows=1)) for _ in range(12)]
    assert [type(outcome) for outcome in outcomes] == [Charged] * 10 + [LimitExceeded] * 2
    assert ledger.account("patients").spent_units == LIMIT
    assert ledger.verify().sound


def test_a_charge_debits_account_and_client_or_neither(ledger):
    account, units = _open(ledger)
    ann, bob = ledger.client("ann"), ledger.client("bob")
    ledger.set_quota("patients", "ann", 0.3, "ann asked for three answers")
    refused = [ledger.charge(Charge(account.id, ann, "m/1", units, rows=4))]
    refused += [ledger.charge(Charge(account.id, ann, "m/1", units, rows=1)) for _ in range(4)][3:]
    assert [(outcome.limit, outcome.remaining_units) for outcome in refused] == [
        ("quota", 3 * LIMIT // 10),
        ("quota", 0),
    ]
    too_much = ledger.charge(Charge(account.id, bob, "m/1", units, rows=8))
    assert (too_much.limit, too_much.remaining_units) == ("budget", 7 * LIMIT // 10)
    assert isinstance(ledger.charge(Charge(account.id, bob, "m/1", units, rows=7)), Charged)
    parts = {part.client: part.spent_units for part in ledger.subaccounts(account)}
    assert parts == {"ann": 3 * LIMIT // 10, "bob": 7 * LIMIT // 10}
    assert ledger.account("patients").remaining_units == 0


def test_refusals_are_counted_for_each_client(address):
    with Ledger(address) as ledger:
        account, _ = _open(ledger)
        ann = ledger.client("ann")
        for _ in range(3):
            ledger.charge(Charge(account.id, ann, "m/1", LIMIT + 1, rows=1))
    with Ledger(address) as ledger:
        assert [(part.client, part.refused) for part in ledger.subaccounts(ledger.account("patients"))] == [
            ("ann", 3)
        ]
        assert ledger.verify().sound


@pytest.mark.parametrize(("units", "rows"), [(-1, 1), (1, -1)])
def test_a_charge_below_nothing_cannot_be_made(units, rows):
    with pytest.raises(InvalidInput, match="must not be negative"):
        Charge(1, 1, "m/1", units, rows)


def test_refusals_are_counted_soon_even_when_nothing_else_is_written(ledger):
    account, _ = _open(ledger)
    ann = ledger.client("ann")
    ledger.charge(Charge(account.id, ann, "m/1", LIMIT + 1, rows=1))
    deadline = time.monotonic() + 60
    while [part.refused for part in ledger.subaccounts(account)] != [1]:
        assert time.monotonic() < deadline, "the refusal was never counted"
        time.sleep(0.05)


def test_a_flood_of_refusals_is_counted_while_it_lasts(ledger):
    account, _ = _open(ledger)
    ann = ledger.client("ann")
    deadline = time.monotonic() + 60
    while not [part for part in ledger.subaccounts(account) if part.refused]:
        assert time.monotonic() < deadline, "the refusals were never counted"
        ledger.charge(Charge(account.id, ann, "m/1", LIMIT + 1, rows=1))
    assert ledger.verify().sound


def test_a_pure_cost_counts_in_a_gaussian_account_but_not_the_other_way(ledger):
    gaussian = ledger.open_account("one", GaussianCost(1.0), Terms(1.0, 1e-5))
    assert gaussian.units(PureCost(0.1)) == gaussian.units(PureCost(0.1).as_gaussian())
    pure = ledger.open_account("two", PureCost(1.0), Terms(1.0))
    with pytest.raises(ValueError, match="cannot be charged to a pure budget"):
        pure.units(GaussianCost(0.1))


def test_a_charge_says_what_is_left_for_its_client(ledger):
    account, units = _open(ledger)
    ann, bob = ledger.client("ann"), ledger.client("bob")
    ledger.set_quota("patients", "ann", 0.3, "ann asked for three answers")
    assert ledger.charge(Charge(account.id, ann, "m/1", units, rows=1)).remaining_units == 2 * LIMIT // 10
    assert ledger.charge(Charge(account.id, bob, "m/1", units, rows=6)).remaining_units == 3 * LIMIT // 10
    assert ledger.charge(Charge(account.id, bob, "m/1", units, rows=2)).remaining_units == LIMIT // 10
    request = ledger.request_key(ann, "last")
    last = Charge(account.id, ann, "m/1", units, rows=1, request=request, body=b"body")
    assert ledger.charge(last).remaining_units == 0  # the budget ends before her quota
    ledger.store_answers(NewAnswers(request=request, answer=b"answer"))
    assert ledger.charge(last) == Replayed(b"answer", 0)


def test_the_curve_of_spending_begins_with_the_first_row(ledger):
    account, units = _open(ledger)
    assert [point.spent_units for point in ledger.spending_history(ledger.account("patients"))] == [0]
    ledger.charge(Charge(account.id, ledger.client("ann"), "m/1", units, rows=1))
    spent = [point.spent_units for point in ledger.spending_history(ledger.account("patients"))]
    assert (spent[0], spent[-1]) == (0, units)


def test_the_database_itself_refuses_an_overspent_balance(ledger):
    account, _ = _open(ledger)
    with pytest.raises(IntegrityError), ledger._engine.connect() as connection, connection.begin():
        connection.execute(
            text("UPDATE accounts SET spent_units = limit_units + 1 WHERE id = :id"), {"id": account.id}
        )


def test_a_retry_with_the_same_request_id_is_free_and_gets_the_stored_answer(ledger):
    account, units = _open(ledger)
    ann = ledger.client("ann")
    request = ledger.request_key(ann, "first")
    charge = Charge(account.id, ann, "m/1", units, rows=2, request=request, body=b"body")
    assert ledger.charge(charge).units == 2 * units
    assert ledger.store_answers(NewAnswers(request=request, answer=b"two answers")).first
    again = ledger.charge(charge)
    assert isinstance(again, Replayed)
    assert again.answer == b"two answers"
    assert ledger.account("patients").spent_units == 2 * units


def test_the_same_request_id_with_another_body_is_refused(ledger):
    account, units = _open(ledger)
    ann = ledger.client("ann")
    request = ledger.request_key(ann, "first")
    ledger.charge(Charge(account.id, ann, "m/1", units, rows=1, request=request, body=b"body"))
    other = ledger.charge(Charge(account.id, ann, "m/1", units, rows=1, request=request, body=b"other"))
    assert other == RequestIdReused()
    assert ledger.account("patients").spent_units == units


def test_request_ids_of_different_clients_never_meet(ledger):
    assert ledger.request_key(1, "1 x") != ledger.request_key(11, " x")
    assert ledger.request_key(1, "x") != ledger.request_key(2, "x")


def test_a_retry_before_the_answer_was_stored_pays_nothing_and_only_the_first_answer_stays(ledger):
    account, units = _open(ledger)
    ann = ledger.client("ann")
    request = ledger.request_key(ann, "lost")
    query = ledger.query_key(b"model", b"query")
    charge = Charge(account.id, ann, "m/1", units, rows=1, request=request, body=b"body", queries=(query,))
    first, second = ledger.charge(charge), ledger.charge(charge)
    assert (first.units, first.resumed) == (units, False)
    assert (second.units, second.answers, second.resumed) == (0, 1, True)
    won = ledger.store_answers(NewAnswers(account.id, (query,), b"drawn second", request, b"drawn second"))
    lost = ledger.store_answers(NewAnswers(account.id, (query,), b"drawn first", request, b"drawn first"))
    assert (won.first, lost.first) == (True, False)
    assert lost.answer == b"drawn second"
    asked = ledger.charge(Charge(account.id, ann, "m/1", units, rows=1, queries=(query,)))
    assert dict(asked.cached) == {query: b"drawn second"}
    assert ledger.account("patients").spent_units == units


def test_two_draws_of_one_request_stored_in_one_group_leave_only_the_first(ledger):
    account, units = _open(ledger)
    ann = ledger.client("ann")
    request, query = ledger.request_key(ann, "twice"), ledger.query_key(b"model", b"query")
    charge = Charge(account.id, ann, "m/1", units, 1, queries=(query,), request=request)
    assert ledger.charge(charge).units + ledger.charge(charge).units == units
    gate, told = held(ledger), []
    for drawn in (b"first", b"second"):
        ledger.submit_answers(NewAnswers(account.id, (query,), drawn, request, drawn), told.append)
    gate.set()
    _wait_until(lambda: len(told) == 2)
    assert [(kept.answer, kept.first) for kept in told] == [(b"first", True), (b"first", False)]
    asked = ledger.charge(Charge(account.id, ann, "m/1", units, rows=1, queries=(query,)))
    assert dict(asked.cached) == {query: b"first"}


def _wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_a_resumed_request_pays_only_what_it_has_not_paid_yet(ledger):
    account, units = _open(ledger)
    ann = ledger.client("ann")
    request = ledger.request_key(ann, "grown")
    charge = Charge(account.id, ann, "m/1", units, rows=1, request=request, body=b"body")
    ledger.charge(charge)
    grown = Charge(account.id, ann, "m/1", units, rows=3, request=request, body=b"body")
    assert ledger.charge(grown).units == 2 * units
    assert ledger.charge(grown).units == 0
    assert ledger.account("patients").spent_units == 3 * units


def test_identical_queries_are_free_once_their_answer_is_stored(ledger):
    account, units = _open(ledger)
    ann, bob = ledger.client("ann"), ledger.client("bob")
    queries = tuple(ledger.query_key(b"model", bytes([number])) for number in range(3))
    assert ledger.charge(Charge(account.id, ann, "m/1", units, 3, queries=queries)).answers == 3
    ledger.store_answers(NewAnswers(account.id, queries[:2], b"answer 0answer 1"))
    charged = ledger.charge(Charge(account.id, bob, "m/1", units, 3, queries=queries))
    assert (charged.answers, charged.units) == (1, units)
    assert dict(charged.cached) == {queries[0]: b"answer 0", queries[1]: b"answer 1"}
    another_version = ledger.query_key(b"retrained", bytes([0]))
    assert ledger.charge(Charge(account.id, bob, "m/2", units, 1, queries=(another_version,))).answers == 1


def test_more_query_keys_than_the_database_takes_in_one_statement_are_looked_up(ledger):
    account, _ = _open(ledger)
    ann = ledger.client("ann")
    queries = tuple(number.to_bytes(16, "little") for number in range(25_000))
    for query in queries[::25]:
        start = int.from_bytes(query, "little")
        ledger.submit_answers(NewAnswers(account.id, queries[start : start + 25], b"x" * 25), lambda _: None)
    charged = ledger.charge(Charge(account.id, ann, "m/1", 1, len(queries), queries=queries))
    assert (charged.units, len(charged.cached)) == (0, 25_000)


def test_concurrent_charges_share_transactions(ledger):
    account, _ = _open(ledger)
    ann = ledger.client("ann")
    gate = held(ledger)
    before = ledger.writer.batches
    told: list = []
    for _ in range(500):
        ledger.submit_charge(Charge(account.id, ann, "m/1", LIMIT // 400, rows=1), told.append)
    gate.set()
    _wait_until(lambda: len(told) == 500)
    assert Counter(type(outcome) for outcome in told) == {Charged: 400, LimitExceeded: 100}
    assert ledger.writer.batches - before == 1
    assert ledger.verify().sound


def test_a_group_is_written_as_soon_as_as_many_are_there_as_before(ledger, monkeypatch):
    account, _ = _open(ledger)
    ann = ledger.client("ann")
    told: list = []
    gate = held(ledger)
    for _ in range(3):
        ledger.submit_charge(Charge(account.id, ann, "m/1", 1, rows=1), told.append)
    gate.set()
    _wait_until(lambda: len(told) == 3)
    monkeypatch.setattr(writer_module, "_BATCH_WINDOW", 600.0)
    before = ledger.writer.batches
    for _ in range(3):
        ledger.submit_charge(Charge(account.id, ann, "m/1", 1, rows=1), told.append)
    _wait_until(lambda: len(told) == 6)
    assert ledger.writer.batches - before == 1


def test_a_charge_past_its_deadline_is_dropped_unpaid(ledger):
    account, units = _open(ledger)
    late = Charge(account.id, ledger.client("ann"), "m/1", units, rows=1, deadline=time.monotonic() - 1)
    assert isinstance(ledger.charge(late), Failed)
    assert ledger.account("patients").spent_units == 0


def test_a_revoked_or_expired_key_is_refused_in_the_very_transaction(ledger):
    account, units = _open(ledger)
    _, key = ledger.create_key("ann")
    _, brief = ledger.create_key("ann", days=1e-11)
    charge = Charge(account.id, key.client_id, "m/1", units, rows=1, key=key.id)
    assert isinstance(ledger.charge(charge), Charged)
    ledger.revoke_key(key.id)
    assert ledger.charge(charge) == InvalidKey()
    expired = Charge(account.id, brief.client_id, "m/1", units, rows=1, key=brief.id)
    assert ledger.charge(expired) == InvalidKey()
    stranger = Charge(account.id, ledger.client("bob"), "m/1", units, rows=1, key="ffff")
    assert ledger.charge(stranger) == InvalidKey()
    assert ledger.account("patients").spent_units == units


def test_training_is_charged_once_for_each_model(ledger):
    account = ledger.open_account("patients", PureCost(2.0), Terms(2.0))
    for _ in range(3):
        ledger.charge_training(account, "head/1", "digest one", PureCost(1.0))
    assert ledger.account("patients").spent_units == LIMIT // 2
    ledger.charge_training(account, "head/2", "digest two", PureCost(1.0))
    with pytest.raises(Exception, match="spent more than remains in the account 'patients'"):
        ledger.charge_training(account, "head/3", "digest three", PureCost(0.1))
    assert [entry.kind for entry in ledger.export("patients")] == ["open", "training", "training"]


def _asked(ledger, question):
    with ledger._engine.connect() as connection:
        return connection.exec_driver_sql(question).scalar_one()


def test_every_commit_is_flushed_to_the_disk(ledger):
    account, units = _open(ledger)
    ledger.charge(Charge(account.id, ledger.client("ann"), "m/1", units, rows=1))
    driver = ledger.writer._connection.connection.driver_connection
    if ledger._engine.dialect.name == "sqlite":
        full = 2
        assert driver.execute("PRAGMA synchronous").fetchone()[0] == full
        assert _asked(ledger, "PRAGMA journal_mode") == "wal"
    else:
        assert driver.execute("SHOW synchronous_commit").fetchone()[0] == "on"
        assert driver.execute("SHOW fsync").fetchone()[0] == "on"


def test_answers_nobody_waits_for_are_written_with_the_next_charge_or_soon(ledger):
    account, units = _open(ledger)
    query = ledger.query_key(b"model", b"query")
    charge = Charge(account.id, ledger.client("ann"), "m/1", units, 1, queries=(query,))
    before = ledger.writer.batches
    ledger.submit_answers(NewAnswers(account.id, (query,), b"answer"), lambda _: None)
    assert dict(ledger.charge(charge).cached) == {query: b"answer"}
    assert ledger.writer.batches - before == 1
    ledger.submit_answers(NewAnswers(account.id, (b"other" * 3 + b"!",), b"answer"), lambda _: None)
    _wait_until(lambda: ledger.writer.batches - before == 2, 2.0)


def test_a_sqlite_ledger_is_readable_by_its_owner_alone(tmp_path):
    path = tmp_path / "deep" / "ledger.sqlite"
    with Ledger(path):
        assert path.stat().st_mode & 0o777 == 0o600


_amounts = st.integers(1, LIMIT // 3)
_steps = st.lists(
    st.tuples(st.integers(0, 2), _amounts, st.integers(1, 3), st.none() | st.integers(0, 3)),
    min_size=1,
    max_size=25,
)


@settings(max_examples=25)
@given(steps=_steps, together=st.booleans(), quota=st.none() | st.sampled_from([0.1, 0.5]))
def test_any_sequence_of_charges_agrees_with_a_naive_count(tmp_path_factory, steps, together, quota):
    with Ledger(tmp_path_factory.mktemp("naive") / "ledger.sqlite") as ledger:
        account, _ = _open(ledger)
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
            gate, outcomes = held(ledger), []
            for charge in charges:
                ledger.submit_charge(charge, outcomes.append)
            gate.set()
            _wait_until(lambda: len(outcomes) == len(charges))
        else:
            outcomes = [ledger.charge(charge) for charge in charges]

        spent, by_client, requests = 0, Counter(), {}
        for charge, outcome in zip(charges, outcomes, strict=True):
            limit = LIMIT if quota is None or charge.client != numbers[0] else int(LIMIT * quota)
            due = charge.unit_cost * charge.rows
            if charge.request in requests:
                if requests[charge.request] != charge.body:
                    assert outcome == RequestIdReused()
                    continue
                due = 0
            if spent + due > LIMIT or by_client[charge.client] + due > limit:
                assert isinstance(outcome, LimitExceeded)
                continue
            assert outcome.units == due
            spent += due
            by_client[charge.client] += due
            if charge.request is not None:
                requests.setdefault(charge.request, charge.body)
        assert ledger.account("patients").spent_units == spent
        verification = ledger.verify()
        assert verification.sound, verification.faults


def _spend(address, tries, threads, start, results):
    with Ledger(address) as ledger:
        account = ledger.account("patients")
        units = account.units(per_query(Budget(1.0, queries=150), "pure"))
        client = ledger.client("ann")
        start.wait()
        outcomes: list = []

        def ask():
            for _ in range(tries):
                outcomes.append(ledger.charge(Charge(account.id, client, "m/1", units, rows=1)))

        workers = [threading.Thread(target=ask) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        results.put(Counter(type(outcome).__name__ for outcome in outcomes))


def test_four_processes_of_four_threads_get_exactly_the_answers_the_budget_pays_for(address):
    with Ledger(address) as ledger:
        _open(ledger)
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_spend, args=(address, 29, 4, start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    total = sum((results.get(timeout=60) for _ in processes), Counter())
    for process in processes:
        process.join()
    assert total == {"Charged": 150, "LimitExceeded": 4 * 4 * 29 - 150}
    with Ledger(address) as ledger:
        assert ledger.account("patients").remaining_units == 0
        assert ledger.verify().sound


def test_answers_stored_by_another_process_are_found(address):
    with Ledger(address) as one, Ledger(address) as other:
        account, units = _open(one)
        ann = one.client("ann")
        query = one.query_key(b"model", b"query")
        asked = Charge(account.id, ann, "m/1", units, 1, queries=(query,))
        assert other.charge(asked).answers == 1
        one.store_answers(NewAnswers(account.id, (query,), b"answer"))
        assert dict(other.charge(asked).cached) == {query: b"answer"}


def test_only_the_latest_answers_are_kept_in_the_index_and_they_survive_a_restart(ledger):
    account, units = _open(ledger)
    queries = [ledger.query_key(b"model", b"%d" % number) for number in range(12)]
    for start in range(0, 12, 2):
        ledger.store_answers(
            NewAnswers(account.id, tuple(queries[start : start + 2]), b"%02d%02d" % (start, start + 1))
        )
    with write_transaction(ledger._engine) as connection:
        for _ in range(2):
            answer_cache = AnswerCache(max_answers=5)
            found = answer_cache.find(Cursor(connection), account.id, queries)
            assert found == {queries[number]: b"%02d" % number for number in range(8, 12)}
            everything = AnswerCache(max_answers=100)
            assert len(everything.find(Cursor(connection), account.id, queries)) == 12
        ten = AnswerCache(max_answers=12)
        ten.find(Cursor(connection), account.id, [])
        store_answers(Cursor(connection), [NewAnswers(account.id, (b"z" * 16,), b"zz")])
        assert ten.find(Cursor(connection), account.id, [queries[0], b"z" * 16]) == {b"z" * 16: b"zz"}
    assert ledger.charge(Charge(account.id, ledger.client("ann"), "m/1", units, 1)).units == units


def test_keys_that_agree_in_their_first_half_only_are_told_apart(ledger):
    account, units = _open(ledger)
    ledger.store_answers(NewAnswers(account.id, (b"12345678" * 2,), b"answer"))
    other = Charge(account.id, ledger.client("ann"), "m/1", units, 1, queries=(b"12345678abcdefgh",))
    assert ledger.charge(other).answers == 1


def test_what_an_undone_transaction_stored_is_not_found_afterwards(ledger, monkeypatch):
    account, units = _open(ledger)
    query = ledger.query_key(b"model", b"query")
    charge = Charge(account.id, ledger.client("ann"), "m/1", units, 1, queries=(query,))
    gate, told = held(ledger), []
    with monkeypatch.context() as patch:
        patch.setattr(ChargeBatch, "save", lambda _: 1 / 0)
        ledger.submit_answers(NewAnswers(account.id, (query,), b"answer", deadline=0.0), told.append)
        ledger.submit_charge(charge, told.append)
        gate.set()
        _wait_until(lambda: len(told) == 2)
        assert all(isinstance(outcome, Failed) for outcome in told)
    assert ledger.charge(charge).answers == 1
    assert ledger.account("patients").spent_units == units
