from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from quietmax.ledger import Ledger
from quietmax.ledger import transactions as cache_module
from quietmax.ledger.database import Cursor, _read_transaction, _write_transaction
from quietmax.ledger.transactions import AnswerCache, ChargeBatch, Failed, NewAnswers, _store_answers
from tests.ledger.scenarios import (
    charge_for,
    charge_patients,
    edit,
    hold_writer,
    open_patients,
    pay,
    query_key,
    wait_for,
)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_answers_are_found_however_many_rows_are_read_at_once(
    path: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_ROWS_PER_READ", 2)
    keys = [bytes([number]) * 16 for number in range(rows)]
    with Ledger(path) as ledger:
        account = charge_patients(ledger)
        for number, key in enumerate(keys):
            ledger.store_answers(NewAnswers(account.id, (key,), b"%d" % number))
        with _write_transaction(ledger._engine) as connection:
            found = AnswerCache()._find(Cursor(connection), account.id, keys)
            assert found == {key: b"%d" % number for number, key in enumerate(keys)}
            for most in range(1, rows + 1):
                latest = AnswerCache(most)._find(Cursor(connection), account.id, keys)
                assert list(latest) == keys[-most:]


def test_only_the_newest_answers_are_indexed_and_they_survive_a_restart(ledger: Ledger) -> None:
    account = open_patients(ledger)
    queries = [query_key(ledger, b"model", b"%d" % number) for number in range(12)]
    for start in range(0, 12, 2):
        ledger.store_answers(
            NewAnswers(account.id, tuple(queries[start : start + 2]), b"%02d%02d" % (start, start + 1))
        )
    with _write_transaction(ledger._engine) as connection:
        for _ in range(2):
            answer_cache = AnswerCache(max_answers=5)
            found = answer_cache._find(Cursor(connection), account.id, queries)
            assert found == {queries[number]: b"%02d" % number for number in range(8, 12)}
            everything = AnswerCache(max_answers=100)
            assert len(everything._find(Cursor(connection), account.id, queries)) == 12
        ten = AnswerCache(max_answers=12)
        ten._find(Cursor(connection), account.id, [])
        _store_answers(Cursor(connection), {}, [NewAnswers(account.id, (b"z" * 16,), b"zz")], b"", 0)
        assert ten._find(Cursor(connection), account.id, [queries[0], b"z" * 16]) == {b"z" * 16: b"zz"}
    assert pay(ledger, charge_for(ledger, 1000)).units == 1000


def test_keys_with_the_same_first_half_are_different_queries(ledger: Ledger) -> None:
    other = charge_for(ledger, queries=(b"12345678abcdefgh",))
    ledger.store_answers(NewAnswers(other.account, (b"12345678" * 2,), b"answer"))
    assert pay(ledger, other).answers == 1


def test_answers_stored_by_another_process_are_found(address: str) -> None:
    with Ledger(address) as one, Ledger(address) as other:
        query = query_key(one, b"model", b"query")
        asked = charge_for(one, queries=(query,))
        assert pay(other, asked).answers == 1
        one.store_answers(NewAnswers(asked.account, (query,), b"answer"))
        assert dict(pay(other, asked).cached) == {query: b"answer"}


def test_answers_of_a_rolled_back_transaction_are_not_found(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = query_key(ledger, b"model", b"query")
    charge = charge_for(ledger, 1000, queries=(query,))
    gate, results = hold_writer(ledger), list[Any]()
    with monkeypatch.context() as patch:
        patch.setattr(ChargeBatch, "_save", lambda _: 1 / 0)
        answers = NewAnswers(charge.account, (query,), b"answer", deadline=0.0)
        ledger.submit_answers(answers, results.append)
        ledger.submit_charges([charge], results.extend)
        gate.set()
        wait_for(results, 2)
        assert all(isinstance(result, Failed) for result in results)
    assert pay(ledger, charge).answers == 1
    assert ledger.account("patients").spent_units == 1000


def test_the_id_of_a_deleted_answer_is_not_used_again(path: Path) -> None:
    """The index remembers the last id that it has read, and would never look at a smaller one."""
    with Ledger(path) as ledger:
        account = charge_patients(ledger)
        ledger.store_answers(NewAnswers(account.id, (b"a" * 16,), b"x"))
        edit(ledger, "DELETE FROM answers")
        ledger.store_answers(NewAnswers(account.id, (b"b" * 16,), b"y"))
        asked = charge_for(ledger, queries=(b"b" * 16,))
        assert dict(pay(ledger, asked).cached) == {b"b" * 16: b"y"}
        with _read_transaction(ledger._engine) as connection:
            assert connection.execute(text("SELECT id FROM answers")).scalar_one() == 2


def test_more_keys_than_one_statement_can_hold_are_looked_up(ledger: Ledger) -> None:
    account = open_patients(ledger)
    queries = tuple(number.to_bytes(16, "little") for number in range(25_000))
    for query in queries[::25]:
        start = int.from_bytes(query, "little")
        ledger.submit_answers(NewAnswers(account.id, queries[start : start + 25], b"x" * 25), lambda _: None)
    charged = pay(ledger, charge_for(ledger, queries=queries))
    assert (charged.units, len(charged.cached)) == (0, 25_000)


def test_of_equal_queries_the_answer_that_was_stored_first_is_found(path: Path) -> None:
    one, other, new = (bytes([number]) * 16 for number in range(3))
    with Ledger(path) as ledger:
        account = charge_patients(ledger)
        ledger.store_answers(NewAnswers(account.id, (one, other), b"12"))
        ledger.store_answers(NewAnswers(account.id, (new, other, one), b"345"))
        with _write_transaction(ledger._engine) as connection:
            found = AnswerCache()._find(Cursor(connection), account.id, [other, new, one])
            assert found == {one: b"1", other: b"2", new: b"3"}
            twice = bytes([9]) * 16
            _store_answers(Cursor(connection), {}, [NewAnswers(account.id, (twice, twice), b"67")], b"", 0)
            assert AnswerCache()._find(Cursor(connection), account.id, [twice]) == {twice: b"6"}


def test_the_oldest_answers_are_dropped_once_a_sixteenth_more_than_the_limit_is_indexed(path: Path) -> None:
    keys = [bytes([number]) * 16 for number in range(36)]
    with Ledger(path) as ledger:
        account = charge_patients(ledger)
        cache = AnswerCache(max_answers=32)
        sizes = []
        for key in keys:
            ledger.store_answers(NewAnswers(account.id, (key,), b"x"))
            with _write_transaction(ledger._engine) as connection:
                sizes.append(len(cache._find(Cursor(connection), account.id, keys)))
        assert sizes == [*range(1, 35), 32, 33]


def test_an_answer_that_is_stored_after_an_equal_one_was_pruned_is_found(ledger: Ledger) -> None:
    query = query_key(ledger, b"model", b"query")
    charge = charge_for(ledger, queries=(query,))
    pay(ledger, charge)
    ledger.store_answers(NewAnswers(charge.account, (query,), b"old"))
    assert dict(pay(ledger, charge).cached) == {query: b"old"}
    edit(ledger, "UPDATE answers SET time = 5")
    ledger.prune(1)
    assert pay(ledger, charge).units == 1
    ledger.store_answers(NewAnswers(charge.account, (query,), b"new"))
    assert dict(pay(ledger, charge).cached) == {query: b"new"}, "it is paid for once"
