from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

import pytest
from sqlalchemy import text

from quietmax.accounting import GaussianCost, PureCost
from quietmax.accounting.costs import LIMIT
from quietmax.errors import InvalidInput, LedgerDamaged
from quietmax.ledger import Charge, ChargeResult, Ledger, Terms
from quietmax.ledger.accounts import Subaccount, _check_reason, token_client_name
from quietmax.ledger.database import Cursor, _write_transaction, now
from quietmax.ledger.transactions import Charged, NewAnswers, Replayed, _prune
from tests.ledger.scenarios import (
    REASON,
    account_of,
    charge_for,
    edit,
    exceeded,
    journal_kinds,
    open_patients,
    pay,
    query_key,
)


def test_a_new_account_has_spent_nothing_and_its_first_row_holds_its_terms(sqlite_ledger: Ledger) -> None:
    before = now()
    account = open_patients(sqlite_ledger)
    assert (account.limit_units, account.spent_units, account.sequence) == (LIMIT, 0, 1)
    first = next(sqlite_ledger.export("patients"))
    told = first.sequence, first.answers, first.units, first.spent_units, first.limit_units
    assert told == (1, 0, 0, 0, LIMIT)
    assert before <= account.opened <= first.time <= now()
    assert first.detail == json.dumps(json.loads(first.detail), sort_keys=True)
    assert json.loads(first.detail) == {
        "terms": {"delta": 0.0, "epsilon": 1.0, "analysis": "proven"},
        "total": {"measure": "pure", "epsilon": 1.0},
    }


def test_a_reason_has_at_least_three_words_and_at_most_a_thousand_characters(sqlite_ledger: Ledger) -> None:
    for kept in (REASON, "a b " + "c" * 996):
        _check_reason(kept)
    for refused in ("two words", "", "a b " + "c" * 997):
        with pytest.raises(InvalidInput, match="at least 3 words"):
            _check_reason(refused)
        with pytest.raises(InvalidInput, match="at least 3 words"):
            open_patients(sqlite_ledger, because=refused)
    assert sqlite_ledger.accounts() == []


@pytest.mark.parametrize("name", ["", "a b", "(keys)", "-x", "x" * 65, "näme", "a/b"])
def test_invalid_names_are_errors(ledger: Ledger, name: str) -> None:
    with pytest.raises(InvalidInput, match="must be 1 to 64 letters"):
        open_patients(ledger, name)
    with pytest.raises(InvalidInput, match="client name must be 1 to 64 letters"):
        ledger.create_key(name)
    with pytest.raises(InvalidInput, match="account name must be 1 to 64 letters"):
        ledger.find_account(name)
    assert ledger.open_account("x" * 64, PureCost(1.0), Terms(1.0)).name == "x" * 64


def test_the_error_for_an_unknown_account_lists_the_accounts(ledger: Ledger) -> None:
    open_patients(ledger)
    with pytest.raises(InvalidInput, match=r"no account 'nobody'\. Its accounts: patients"):
        ledger.account("nobody")
    with pytest.raises(InvalidInput, match="no account"):
        ledger.account("(keys)")
    with pytest.raises(InvalidInput, match="no client 'eve'"):
        ledger.set_quota("patients", "eve", 0.1, "some words of reason")


def test_every_training_set_has_its_own_account_which_a_retrained_model_uses(ledger: Ledger) -> None:
    for name, digest, opened in (("one", "aa", "one"), ("two", "bb", "two"), ("again", "aa", "one")):
        assert open_patients(ledger, name, digest=digest).name == opened
    open_patients(ledger, "three")
    found = [account_of(ledger, *each) for each in (("aa",), ("bb",), ("cc", "three"), ("cc",))]
    assert found == ["one", "two", "three", None]
    with pytest.raises(InvalidInput, match="belong to the account 'one'"):
        open_patients(ledger, "mine", digest="aa", named_by_owner=True)
    assert [account.name for account in ledger.accounts()] == ["one", "three", "two"]


@pytest.mark.parametrize("named_by_owner", [False, True])
def test_records_move_to_another_account_only_with_a_reason(ledger: Ledger, named_by_owner: bool) -> None:
    open_patients(ledger, digest="abc")
    with pytest.raises(InvalidInput, match="must have at least 3 words"):
        open_patients(ledger, "mine", digest="abc", because="because")
    words = "The ethics board allowed a second study."
    other = open_patients(ledger, "mine", digest="abc", named_by_owner=named_by_owner, because=words)
    assert other.name == "mine"
    assert account_of(ledger, "abc", "patients") == "mine"
    assert sum(words in row.detail for row in ledger.export()) == 2
    assert ledger.verify().sound


def test_opening_an_account_again_writes_nothing(sqlite_ledger: Ledger) -> None:
    for _ in range(3):
        open_patients(sqlite_ledger, digest="abc", because=REASON)
    assert journal_kinds(sqlite_ledger) == ["open"]
    kinds = [row.kind for row in sqlite_ledger.export()]
    assert kinds == ["account", "training-set", "open"], "once each"


def test_an_account_keeps_its_budget_until_a_grant(ledger: Ledger) -> None:
    account = open_patients(ledger)
    with pytest.raises(InvalidInput, match="was opened with epsilon = 1"):
        ledger.open_account("patients", PureCost(2.0), Terms(2.0))
    granted = ledger.grant("patients", Terms(2.0), "The board allows twice as much.")
    assert (granted.limit_units, granted.limit) == (2 * LIMIT, PureCost(2.0))
    assert open_patients(ledger).limit_units == 2 * LIMIT
    ledger.charge(Charge(account.id, ledger.client("ann"), "m/1", 3 * LIMIT // 2, rows=1))
    assert ledger.account("patients").remaining == PureCost(0.5)
    with pytest.raises(InvalidInput, match=r"cannot become epsilon = 1\.49999 .*at least what is spent"):
        ledger.grant("patients", Terms(1.49999), "This would be too little.")
    assert ledger.grant("patients", Terms(1.5), REASON).remaining_units == 0
    assert ledger.verify().sound


def test_the_largest_budget_is_2_to_the_62_units(sqlite_ledger: Ledger) -> None:
    sqlite_ledger.open_account("patients", PureCost(76.904296875), Terms(76.904296875))
    largest = 70368.744177664  # 2^62 / LIMIT times the first budget, exactly
    assert sqlite_ledger.grant("patients", Terms(largest), REASON).limit_units == 2**62
    with pytest.raises(InvalidInput, match="at most about 900 times"):
        sqlite_ledger.grant("patients", Terms(largest + 1e-9), REASON)


def test_a_model_takes_an_account_exclusively_once_and_only_an_unused_one(sqlite_ledger: Ledger) -> None:
    account = open_patients(sqlite_ledger)
    for _ in range(2):
        sqlite_ledger.charge_training(account, "m/1", "digest", "all")
    assert journal_kinds(sqlite_ledger) == ["open", "exclusive", "training"]
    with pytest.raises(InvalidInput, match="has already paid for something"):
        sqlite_ledger.charge_training(account, "m/2", "other", "all")
    used = open_patients(sqlite_ledger, "used")
    pay(sqlite_ledger, Charge(used.id, sqlite_ledger.client("ann"), "m/1", 1, rows=1))
    with pytest.raises(InvalidInput, match="has already paid for something"):
        sqlite_ledger.charge_training(used, "m/1", "digest", "all")
    lowered = open_patients(sqlite_ledger, "lowered")
    sqlite_ledger.grant("lowered", Terms(0.5), REASON)
    with pytest.raises(InvalidInput, match="needs the whole budget"):
        sqlite_ledger.charge_training(lowered, "m/1", "digest", "all")
    assert sqlite_ledger.verify().sound


@pytest.mark.parametrize(
    "fields", [{"more": 1}, {"reading": "proven"}, {"epsilon": "x"}, {"analysis": "mine"}]
)
def test_terms_have_exactly_their_three_fields(fields: dict[str, Any]) -> None:
    written = Terms(1.0, 1e-5).to_json()
    assert Terms._from_json(written) == Terms(1.0, 1e-5)
    of_version_0_1 = {"epsilon": 1.0, "delta": 1e-5, "reading": "published"}
    assert Terms._from_json(of_version_0_1) == Terms(1.0, 1e-5, "published")
    with pytest.raises(ValueError):
        Terms._from_json({**written, **fields})


@pytest.mark.parametrize(
    ("total", "terms", "granted", "limit_units"),
    [
        (PureCost(2.0), Terms(2.0), Terms(3.0), 3 * LIMIT // 2),
        (GaussianCost(1.0), Terms(1.0, 1e-5, "published"), Terms(2.0, 1e-5, "published"), 4 * LIMIT),
    ],
)
def test_a_grant_is_counted_in_units_of_the_first_budget_and_in_squares_of_mu(
    ledger: Ledger, total: Any, terms: Terms, granted: Terms, limit_units: int
) -> None:
    ledger.open_account("patients", total, terms)
    account = ledger.grant("patients", granted, REASON)
    assert (account.limit_units, account.limit) == (limit_units, granted.total(total.measure))


def test_a_quota_is_between_nothing_and_the_whole_budget(sqlite_ledger: Ledger) -> None:
    account = open_patients(sqlite_ledger)
    sqlite_ledger.client("ann")
    for share, limit in ((0, 0), (1, LIMIT), (0.25, LIMIT // 4), (None, None)):
        sqlite_ledger.set_quota("patients", "ann", share, REASON)
        assert sqlite_ledger.subaccounts(account) == [Subaccount("ann", limit, 0, 0)]
    for share in (-0.01, 1.01):
        with pytest.raises(InvalidInput, match="between 0 and 1"):
            sqlite_ledger.set_quota("patients", "ann", share, REASON)
    assert sqlite_ledger.verify().sound


def test_a_quota_is_at_least_what_was_spent_and_changes_no_other_client(sqlite_ledger: Ledger) -> None:
    account = open_patients(sqlite_ledger)
    other = open_patients(sqlite_ledger, "others")
    for number in (account.id, other.id):
        for client in ("ann", "bob"):
            sqlite_ledger.charge(Charge(number, sqlite_ledger.client(client), "m/1", LIMIT // 4, rows=1))
    with pytest.raises(InvalidInput, match=r"has spent, 0\.25 of the budget"):
        sqlite_ledger.set_quota("patients", "ann", 0.2, REASON)
    sqlite_ledger.set_quota("patients", "ann", 0.25, REASON)
    limits = {
        (name, each.client): each.limit_units
        for name in ("patients", "others")
        for each in sqlite_ledger.subaccounts(sqlite_ledger.account(name))
    }
    assert limits.pop(("patients", "ann")) == LIMIT // 4
    assert set(limits.values()) == {None}
    assert sqlite_ledger.verify().sound


def test_revoking_takes_back_what_is_unspent(ledger: Ledger) -> None:
    account = open_patients(ledger)
    ann, bob = ledger.client("ann"), ledger.client("bob")
    ledger.charge(Charge(account.id, ann, "m/1", 100, rows=1))
    ledger.revoke("patients", "ann", "ann has left us")
    assert exceeded(ledger, Charge(account.id, ann, "m/1", 1, rows=1)).limit == "quota"
    ledger.charge(Charge(account.id, bob, "m/1", 1, rows=1))
    assert ledger.revoke("patients", None, "the study is over").remaining_units == 0
    assert exceeded(ledger, Charge(account.id, bob, "m/1", 1, rows=1)).limit == "budget"
    eve = ledger.client("eve")  # has spent nothing
    ledger.revoke("patients", "eve", REASON)
    assert exceeded(ledger, Charge(account.id, eve, "m/1", 1, rows=1)).remaining_units == 0
    assert Subaccount("eve", 0, 0, 0) in ledger.subaccounts(account)
    assert ledger.verify().sound


def test_an_unproven_model_is_recorded_once_for_each_status_and_account(sqlite_ledger: Ledger) -> None:
    account = open_patients(sqlite_ledger)
    other = open_patients(sqlite_ledger, "others")
    for _ in range(2):
        sqlite_ledger.record_unproven(account, "m/1", "refuted")
    sqlite_ledger.record_unproven(account, "m/1", "conditional")
    sqlite_ledger.record_unproven(other, "m/2", "refuted")
    assert sqlite_ledger.unproven_models(account) == [("m/1", "refuted"), ("m/1", "conditional")]
    assert sqlite_ledger.unproven_models(other) == [("m/2", "refuted")]
    assert journal_kinds(sqlite_ledger) == ["open", "unproven", "unproven"]


def test_a_gaussian_account_pays_a_pure_cost_but_not_the_other_way_round(ledger: Ledger) -> None:
    gaussian = ledger.open_account("one", GaussianCost(1.0), Terms(1.0, 1e-5))
    assert gaussian.units(PureCost(0.1)) == gaussian.units(PureCost(0.1).as_gaussian())
    pure = open_patients(ledger, "two")
    with pytest.raises(ValueError, match="A pure budget cannot be charged a gaussian cost"):
        pure.units(GaussianCost(0.1))


# --- retention ----------------------------------------------------------------------------------------------------

DAY = 24 * 3600 * 1_000_000


def test_pruning_deletes_old_requests_and_answers_and_the_journal_still_verifies(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pruned id is charged like a new one: there is never a second draw for one charge."""
    account = open_patients(ledger)
    ledger.charge_training(account, "head/1", "digest", PureCost(0.25))
    query = query_key(ledger, b"model", b"query")

    def ask(request_id: str) -> ChargeResult:
        charge = charge_for(ledger, 1000, request_id, queries=(query,))
        result = ledger.charge(charge)
        if isinstance(result, Charged):
            new = (query,) if not result.cached else ()
            answers = NewAnswers(account.id, new, b"draw" if new else b"", charge.request, b"draw")
            ledger.store_answers(answers)
        return result

    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() - 1000 * 40 * DAY)
    assert ask("old") == Charged(1000, 1, ledger.account("patients").remaining_units)
    monkeypatch.undo()
    assert isinstance(ask("new"), Charged)
    assert ledger.prune(60) == (0, 0)
    spent = ledger.account("patients").spent_units
    assert ledger.prune(30) == (1, 1)
    assert ledger.account("patients").spent_units == spent
    assert ledger.verify().sound
    assert isinstance(ask("new"), Replayed), "what is newer is kept"
    again = ask("old")
    assert isinstance(again, Charged)
    assert again.units == 1000
    ledger.charge_training(account, "head/1", "digest", PureCost(0.25))
    assert ledger.account("patients").spent_units == spent + 1000, "the training is not charged again"
    assert ledger.verify().sound
    assert ledger.prune(30) == (0, 0)


def test_pruning_deletes_what_is_older_than_so_many_days(sqlite_ledger: Ledger) -> None:
    """Not what is exactly as old; and the journal explains which requests are gone."""
    account = open_patients(sqlite_ledger)
    for number in range(3):
        request = bytes([number])
        pay(sqlite_ledger, charge_for(sqlite_ledger, request=request, body=b"body"))
        sqlite_ledger.store_answers(NewAnswers(account.id, (request * 16,), b"x", request, b"x"))
    moment = 10**16
    with _write_transaction(sqlite_ledger._engine) as connection:
        for number, time_ in enumerate((moment - 30 * DAY - 1, moment - 30 * DAY, moment)):
            for table, column, name in (
                ("requests", "request", f"x'0{number}'"),
                ("answers", "keys", f"x'{f'0{number}' * 16}'"),
            ):
                changed = connection.execute(
                    text(f"UPDATE {table} SET time = {time_} WHERE {column} = {name}")
                )
                assert changed.rowcount == 1
        assert _prune(Cursor(connection), 30, moment) == (1, 1)
        kept = connection.execute(text("SELECT time FROM requests ORDER BY time")).scalars().all()
        assert kept == [moment - 30 * DAY, moment]
    pruned = json.loads(list(sqlite_ledger.export("patients"))[-1].detail)
    assert pruned == {"batches": 1, "before": moment - 30 * DAY, "requests": 1}


def test_pruning_keeps_at_least_an_hour_and_at_most_a_century(sqlite_ledger: Ledger) -> None:
    for days in (1 / 24, 36_500):
        assert sqlite_ledger.prune(days) == (0, 0)
    for wrong in (0, 1 / 25, -1, 36_500.5, float("nan")):
        with pytest.raises(InvalidInput, match="days must be between 1/24 and 36500"):
            sqlite_ledger.prune(wrong)


def test_an_old_request_that_is_tried_again_is_not_pruned_before_its_answer_is_stored(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was charged long ago and never answered. The draw of the retry is paid, so it must not get lost."""
    charge = charge_for(ledger, 1000, "old")
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() - 1000 * 40 * DAY)
    pay(ledger, charge)
    monkeypatch.undo()
    assert pay(ledger, charge).units == 0
    assert ledger.prune(30) == (0, 0)
    assert ledger.verify().sound
    stored = ledger.store_answers(NewAnswers(charge.account, request=charge.request, answer=b"draw"))
    assert (stored.answer, stored.first) == (b"draw", True)
    assert isinstance(ledger.charge(charge), Replayed), "one charge pays for one draw"
    assert ledger.account("patients").spent_units == 1000
    assert ledger.verify().sound


def test_a_request_that_was_pruned_while_it_was_drawn_is_not_answered(ledger: Ledger) -> None:
    charge = charge_for(ledger, 1000, "slow")
    pay(ledger, charge)
    edit(ledger, "UPDATE requests SET time = 5")
    assert ledger.prune(1) == (1, 0)
    assert list(ledger.export("patients"))[-1].kind == "prune"
    with pytest.raises(LedgerDamaged, match="A charged request is missing"):
        ledger.store_answers(NewAnswers(charge.account, request=charge.request, answer=b"draw"))


def test_the_client_of_a_token_has_a_name_of_its_own_and_no_api_key(ledger: Ledger) -> None:
    ann = token_client_name("https://login.example.org", "ann")
    assert ann == "oidc:ann@login.example.org"
    names = {
        ann,
        token_client_name("https://login.example.org", "oidc:ann"),
        token_client_name("https://login.example.org", "ann@login.example.org"),
        token_client_name("https://login.example.org/ann", "ann"),
        token_client_name("http://localhost:8000", "ann"),
    }
    clients = set()
    for name in map(str, names):
        for _ in range(2):  # before and after the ledger knows the client
            with pytest.raises(InvalidInput, match="client name must be"):
                ledger.create_key(name)
            clients.add(ledger.client(name))
    assert len(clients) == len(names) == 5
    assert ledger.keys() == []
    for subject in ("", " ", "a b", "ann\n", "ä", "x" * 256):
        assert token_client_name("https://login.example.org", subject) is None
    for name in ("oidc:ann", "oidc:@login.example.org", "oidc:a b@login.example.org", "saml:ann@example.org"):
        with pytest.raises(InvalidInput, match="client name must be"):
            ledger.client(name)


def test_the_client_of_a_token_may_get_a_quota_before_its_first_request(ledger: Ledger) -> None:
    open_patients(ledger)
    ledger.set_quota("patients", "oidc:ann@login.example.org", 0.5, "a share for a new client")
    (share,) = ledger.subaccounts(ledger.account("patients"))
    assert (share.client, share.limit_units) == ("oidc:ann@login.example.org", LIMIT // 2)


def test_an_erased_client_leaves_a_pseudonym_and_the_chain_verifies(charged_ledger: Ledger) -> None:
    stated = next(each for each, name in charged_ledger.client_names().items() if name == "ann")
    journal = json.dumps([asdict(entry) for entry in charged_ledger.export()])
    assert stated in journal
    assert "ann" not in [entry.client for entry in charged_ledger.export()]
    spent = charged_ledger.account("patients").spent_units
    assert charged_ledger.erase_client("ann") == stated
    assert charged_ledger.verify().sound
    assert charged_ledger.account("patients").spent_units == spent
    assert [share.client for share in charged_ledger.subaccounts(charged_ledger.account("patients"))] == [
        stated
    ]
    assert not any(key.is_valid(0) for key in charged_ledger.keys() if key.client == stated)  # noqa: SIM118
    assert list(charged_ledger.export())[-1].kind != "loss"
    for gone in ("ann", stated):
        with pytest.raises(InvalidInput):
            charged_ledger.erase_client(gone)
    assert charged_ledger.client("ann") != charged_ledger.client("bob")
    assert charged_ledger.verify().sound


def test_a_name_that_was_changed_is_found(charged_ledger: Ledger) -> None:
    edit(charged_ledger, "UPDATE client_names SET name = 'eve' WHERE name = 'ann'")
    assert charged_ledger.verify().faults == ("The name of client 'eve' was changed.",)


def test_two_administrators_raise_a_budget_together_and_the_journal_names_both(
    charged_ledger: Ledger,
) -> None:
    ledger = charged_ledger
    more, because = Terms(2.0), "The board allowed it."
    assert ledger.grant("patients", Terms(1.5), because).limit_units > LIMIT, "nobody or one has a key"
    (ann, _), (bob, bobs), (own, _) = (ledger.create_key(name, "admin") for name in ("ann", "bob", "bob"))
    _, clients = ledger.create_key("eve")
    with pytest.raises(InvalidInput, match="two administrators"):
        ledger.grant("patients", more, because)
    assert ledger.grant("patients", Terms(1.2), "Less is enough.").limit_units < 1.5 * LIMIT
    limit = ledger.account("patients").limit_units
    with pytest.raises(InvalidInput, match="Nothing was proposed"):
        ledger.confirm("patients", ann)
    for key in ("qm_0123456789abcdef_" + 43 * "x", clients.id):
        with pytest.raises(InvalidInput, match="key of an administrator"):
            ledger.propose("patients", more, because, key)
    ledger.propose("patients", more, because, bob)
    with pytest.raises(InvalidInput, match="another administrator"):
        ledger.confirm("patients", own)
    ledger.revoke_key(bobs.id)
    with pytest.raises(InvalidInput, match="another administrator"):
        ledger.confirm("patients", ann)
    ledger.propose("patients", more, because, own)
    assert ledger.account("patients").limit_units == limit
    assert ledger.confirm("patients", ann).limit_units == 2 * LIMIT
    with pytest.raises(InvalidInput, match="Nothing was proposed"):
        ledger.confirm("patients", ann)
    detail = json.loads(list(ledger.export("patients"))[-1].detail)
    assert [ledger.client_names()[each] for each in detail["approved"]] == ["bob", "ann"]
    assert detail["because"] == because
    assert ledger.verify().sound


def test_a_closed_account_is_not_opened_again_by_one_of_two_administrators(ledger: Ledger) -> None:
    open_patients(ledger)
    for name in ("ann", "bob"):
        ledger.create_key(name, "admin")
    ledger.revoke("patients", None, "The study is over.")
    with pytest.raises(InvalidInput, match="two administrators"):
        ledger.grant("patients", Terms(0.5), "One more question.")


def test_the_usage_of_clients_adds_up_to_what_was_spent(charged_ledger: Ledger) -> None:
    account = charged_ledger.account("patients")
    uses = charged_ledger.usage(account)
    assert sum(use.units for use in uses) == account.spent_units
    assert {(charged_ledger.client_names()[use.client], use.model) for use in uses} == {("ann", "m/1")}
    assert all(use.hour * 3_600_000_000 <= use.first <= use.last for use in uses)
    assert charged_ledger.usage(account, account.sequence) == []
