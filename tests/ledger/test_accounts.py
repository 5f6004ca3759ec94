"""Accounts, quotas and keys at their limits: what is just allowed, what is just refused, and what is written down."""

from __future__ import annotations

import json
import time

import pytest

from quietmax.accounting import LIMIT, PureCost
from quietmax.errors import InvalidInput
from quietmax.ledger import (
    AccountState,
    ApiKey,
    Charge,
    Charged,
    Failed,
    InvalidKey,
    Ledger,
    LedgerDamaged,
    LimitExceeded,
    NewAnswers,
    Replayed,
    RequestIdReused,
    SpendingPoint,
    StoredAnswer,
    Subaccount,
    Terms,
    Verification,
    find_key,
)
from quietmax.ledger.accounts import check_reason, now
from quietmax.ledger.answer_cache import AnswerCache
from quietmax.ledger.database import Cursor, write_transaction
from quietmax.ledger.journal import JournalEntry
from quietmax.ledger.transactions import (
    AccountTransaction,
    ChargeBatch,
    _Balance,
    lock_accounts,
    store_answers,
)

WORDS = "three words suffice"


@pytest.fixture
def book(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as opened:
        yield opened


def _patients(ledger) -> AccountState:
    return ledger.open_account("patients", PureCost(1.0), Terms(1.0))


def _kinds(ledger, account="patients") -> list[str]:
    return [entry.kind for entry in ledger.export(account)]


def test_what_the_ledger_says_cannot_be_changed_and_what_it_handles_by_the_thousand_is_small():
    told = (
        AccountState,
        Charge,
        Charged,
        JournalEntry,
        Failed,
        ApiKey,
        InvalidKey,
        Subaccount,
        SpendingPoint,
    )
    told += (LimitExceeded, Replayed, RequestIdReused, NewAnswers, StoredAnswer, Terms, Verification)
    assert all(each.__dataclass_params__.frozen for each in told)
    for each in (
        AccountTransaction,
        Charge,
        Charged,
        JournalEntry,
        Failed,
        InvalidKey,
        LimitExceeded,
        Replayed,
        RequestIdReused,
        NewAnswers,
        StoredAnswer,
        _Balance,
    ):
        assert "__dict__" not in dir(each), each


# --- accounts -----------------------------------------------------------------------------------------------------


def test_a_new_account_has_spent_nothing_and_its_first_row_says_so(book):
    account = _patients(book)
    assert (account.limit_units, account.spent_units, account.sequence) == (LIMIT, 0, 1)
    first = next(book.export("patients"))
    assert (first.sequence, first.answers, first.units, first.spent_units, first.limit_units) == (
        1,
        0,
        0,
        0,
        LIMIT,
    )
    assert first.detail == json.dumps(json.loads(first.detail), sort_keys=True)
    assert json.loads(first.detail) == {
        "terms": {"delta": 0.0, "epsilon": 1.0, "analysis": "proven"},
        "total": {"measure": "pure", "epsilon": 1.0},
    }


def test_times_are_in_microseconds():
    before, told, after = time.time_ns(), now(), time.time_ns()
    assert before // 1000 <= told <= after // 1000


def test_accounts_and_keys_say_when_they_were_opened(book):
    before = now()
    account = _patients(book)
    _, key = book.create_key("ann")
    assert before <= account.opened <= now()
    assert before <= key.created <= now()


def test_a_reason_has_three_words_and_at_most_a_thousand_letters():
    for kept in (WORDS, "a b " + "c" * 996):
        assert check_reason(kept) == kept
    for refused in ("two words", "", "a b " + "c" * 997):
        with pytest.raises(InvalidInput, match="at least 3 words"):
            check_reason(refused)


def test_a_name_may_have_64_letters(book):
    assert book.open_account("x" * 64, PureCost(1.0), Terms(1.0)).name == "x" * 64


def test_every_training_set_finds_its_own_account(book):
    for name, digest in (("one", "aa"), ("two", "bb"), ("three", None)):
        book.open_account(name, PureCost(1.0), Terms(1.0), digest=digest)
    assert book.find_account("x", "aa").name == "one"
    assert book.find_account("x", "bb").name == "two"
    assert book.find_account("three", "cc").name == "three"
    assert book.find_account("x", "cc") is None
    assert [account.name for account in book.accounts()] == ["one", "three", "two"]


def test_an_owner_who_names_another_account_with_a_reason_moves_the_records(book):
    book.open_account("patients", PureCost(1.0), Terms(1.0), digest="abc")
    moved = book.open_account(
        "mine", PureCost(1.0), Terms(1.0), digest="abc", named_by_owner=True, because=WORDS
    )
    assert moved.name == book.find_account("patients", "abc").name == "mine"


def test_opening_an_account_again_writes_nothing(book):
    for _ in range(3):
        book.open_account("patients", PureCost(1.0), Terms(1.0), digest="abc", because=WORDS)
    assert _kinds(book) == ["open"]
    assert len(list(book.export())) == 1


def test_a_grant_may_lower_the_budget_to_what_is_spent_but_not_below(book):
    account = _patients(book)
    book.charge(Charge(account.id, book.client("ann"), "m/1", LIMIT // 2, rows=1))
    assert book.grant("patients", Terms(0.5), WORDS).remaining_units == 0
    with pytest.raises(InvalidInput, match="at least what is spent"):
        book.grant("patients", Terms(0.49999), WORDS)


def test_a_grant_may_raise_the_budget_900_times_and_never_beyond_what_the_database_counts(book):
    _patients(book)
    assert book.grant("patients", Terms(900.0), WORDS).limit_units == 900 * LIMIT
    with pytest.raises(InvalidInput, match="at most about 900 times"):
        book.grant("patients", Terms(920.0), WORDS)


def test_a_grant_is_counted_in_parts_of_the_first_budget(book):
    book.open_account("patients", PureCost(2.0), Terms(2.0))
    granted = book.grant("patients", Terms(3.0), WORDS)
    assert (granted.limit_units, granted.limit) == (3 * LIMIT // 2, PureCost(3.0))


def test_a_quota_is_from_nothing_to_the_whole_budget(book):
    account = _patients(book)
    book.client("ann")
    for share, limit in ((0, 0), (1, LIMIT), (0.25, LIMIT // 4), (None, None)):
        book.set_quota("patients", "ann", share, WORDS)
        assert book.subaccounts(account) == [Subaccount("ann", limit, 0, 0)]
    for share in (-0.01, 1.01):
        with pytest.raises(InvalidInput, match="between 0 and 1"):
            book.set_quota("patients", "ann", share, WORDS)
    assert book.verify().sound


def test_a_quota_may_be_what_was_spent_but_not_less_and_touches_nobody_else(book):
    account = _patients(book)
    other = book.open_account("others", PureCost(1.0), Terms(1.0))
    for number in (account.id, other.id):
        for client in ("ann", "bob"):
            book.charge(Charge(number, book.client(client), "m/1", LIMIT // 4, rows=1))
    with pytest.raises(InvalidInput, match=r"has spent, 0\.25 of the budget"):
        book.set_quota("patients", "ann", 0.2, WORDS)
    book.set_quota("patients", "ann", 0.25, WORDS)
    limits = {
        (name, part.client): part.limit_units
        for name in ("patients", "others")
        for part in book.subaccounts(book.account(name))
    }
    assert limits.pop(("patients", "ann")) == LIMIT // 4
    assert set(limits.values()) == {None}
    assert book.verify().sound


def test_revoking_the_part_of_a_client_who_spent_nothing_leaves_nothing(book):
    account = _patients(book)
    ann = book.client("ann")
    book.revoke("patients", "ann", WORDS)
    assert book.subaccounts(account) == [Subaccount("ann", 0, 0, 0)]
    assert isinstance(book.charge(Charge(account.id, ann, "m/1", 1, rows=1)), LimitExceeded)
    assert book.verify().sound


def test_a_model_without_proof_is_noted_once_for_each_status_and_account(book):
    account, other = _patients(book), book.open_account("others", PureCost(1.0), Terms(1.0))
    for _ in range(2):
        book.record_unproven(account, "m/1", "refuted")
    book.record_unproven(account, "m/1", "conditional")
    book.record_unproven(other, "m/2", "refuted")
    assert book.unproven_models(account) == [("m/1", "refuted"), ("m/1", "conditional")]
    assert book.unproven_models(other) == [("m/2", "refuted")]
    assert _kinds(book) == ["open", "unproven", "unproven"]


# --- charges ------------------------------------------------------------------------------------------------------


def test_an_answer_may_cost_nothing_and_then_leaves_no_trace(book):
    account = _patients(book)
    ann, bob = book.client("ann"), book.client("bob")
    query = book.query_key(b"model", b"query")
    book.store_answers(NewAnswers(account.id, (query,), b"answer"))
    assert book.charge(Charge(account.id, ann, "m/1", 0, rows=0)).units == 0
    assert book.charge(Charge(account.id, bob, "m/1", 5, 1, queries=(query,))).units == 0
    assert book.subaccounts(account) == []
    assert _kinds(book) == ["open"]


def test_training_that_costs_nothing_is_written_down_all_the_same(book):
    account = _patients(book)
    book.charge_training(account, "head/1", "digest", PureCost(0.0))
    assert _kinds(book) == ["open", "training"]


def _decided(ledger, charges, moment):
    """What a transaction at that moment says; undone afterwards."""
    with write_transaction(ledger._engine) as connection:
        cursor = Cursor(connection)
        accounts_locked = lock_accounts(cursor, {charge.account for charge in charges})
        outcomes = ChargeBatch(cursor, AnswerCache(), accounts_locked, charges, moment).results
        connection.rollback()
        return outcomes


def test_a_key_ends_at_the_very_moment_it_expires(book):
    account = _patients(book)
    shown, key = book.create_key("ann", days=1)
    charge = Charge(account.id, key.client_id, "m/1", 1, rows=1, key=key.id)
    for moment, holds in ((key.expires - 1, True), (key.expires, False), (key.expires + 1, False)):
        (outcome,) = _decided(book, [charge], moment)
        assert isinstance(outcome, Charged if holds else InvalidKey)
        assert (find_key({key.id: key}, shown, moment) is not None) is holds


def test_a_key_pays_for_its_own_client_only(book):
    account = _patients(book)
    _, key = book.create_key("ann")
    assert book.charge(Charge(account.id, book.client("bob"), "m/1", 1, rows=1, key=key.id)) == InvalidKey()


def test_only_who_pays_gets_a_part_of_the_account(book):
    account = _patients(book)
    ann, bob = book.client("ann"), book.client("bob")
    query = book.query_key(b"model", b"query")
    book.store_answers(NewAnswers(account.id, (query,), b"answer"))
    with write_transaction(book._engine) as connection:
        cursor = Cursor(connection)
        charges = [
            Charge(account.id, ann, "m/1", 5, 1),
            Charge(account.id, bob, "m/1", 5, 1, queries=(query,)),
        ]
        batch = ChargeBatch(cursor, AnswerCache(), lock_accounts(cursor, {account.id}), charges, now())
        assert batch.changed
        batch.save()
    assert book.subaccounts(account) == [Subaccount("ann", None, 5, 0)]


def test_a_charge_to_an_account_that_is_not_there_is_said_to_be_damage(book):
    outcome = book.charge(Charge(999, book.client("ann"), "m/1", 1, rows=1))
    assert isinstance(outcome.error, LedgerDamaged)


def test_an_answer_to_a_request_that_was_never_charged_is_said_to_be_damage(book):
    with pytest.raises(LedgerDamaged, match="is missing from the ledger"):
        book.store_answers(NewAnswers(request=b"unknown", answer=b"answer"))
    with write_transaction(book._engine) as connection, pytest.raises(LedgerDamaged):
        store_answers(Cursor(connection), [NewAnswers(request=b"unknown", answer=b"answer")])


# --- keys ---------------------------------------------------------------------------------------------------------


def test_a_key_lasts_for_more_than_no_time_and_at_most_a_century(book):
    _, key = book.create_key("ann", days=36_500)
    assert key.expires - key.created == 36_500 * 24 * 3600 * 10**6
    for days in (-1, 0, 36_501):
        with pytest.raises(InvalidInput, match="greater than 0 and at most 36500"):
            book.create_key("ann", days=days)
    with pytest.raises(InvalidInput, match="admin or client"):
        book.create_key("ann", "owner")


def test_a_revoked_key_ends_alone_and_once(book):
    made = [book.create_key(client)[1] for client in ("ann", "bob", "ann")]
    first = book.revoke_key(made[1].id)
    assert first.id == made[1].id
    assert first.revoked is not None
    assert book.revoke_key(made[1].id) == first
    assert [(key.id, key.client, key.revoked) for key in sorted(book.keys(), key=lambda key: key.client)] == [
        *((made[number].id, "ann", None) for number in sorted((0, 2), key=lambda each: made[each].created)),
        (made[1].id, "bob", first.revoked),
    ]
    assert sum(entry.kind == "key-revoked" for entry in book.export()) == 1
    assert book.verify().sound


def test_the_hashes_of_requests_and_queries_have_the_length_that_the_file_holds(book):
    assert len(book.request_key(1, "first")) == 32
    assert len(book.query_key(b"model", b"query")) == 16
