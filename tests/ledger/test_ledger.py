from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quietmax.accounting import GaussianCost, PureCost, delta_of, epsilon_of, mu_of
from quietmax.accounting.costs import LIMIT
from quietmax.errors import InvalidInput, LedgerDamaged, LedgerUnavailable, QuietmaxError
from quietmax.ledger import AccountState, Charge, Ledger, Terms
from quietmax.ledger import accounts as accounts_module
from quietmax.ledger.accounts import SpendingPoint
from quietmax.ledger.database import START
from quietmax.ledger.ledger import TRAINING_CLIENT, ledger_exists
from quietmax.ledger.transactions import Charged, Failed, Part
from tests.ledger.scenarios import (
    charge_error,
    charge_for,
    edit,
    journal_kinds,
    open_patients,
    pay,
    wait_for,
    writer_driver,
)


def test_request_keys_of_different_clients_differ(ledger: Ledger) -> None:
    assert len(ledger.request_key(1, "first")) == 32
    assert ledger.request_key(1, "1 x") != ledger.request_key(11, " x")
    assert ledger.request_key(1, "x") != ledger.request_key(2, "x")


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM meta WHERE name = '{}'",
        "UPDATE meta SET value = 'zz' WHERE name = '{}'",
        "UPDATE meta SET value = '' WHERE name = '{}'",
        "UPDATE meta SET value = x'00' WHERE name = '{}'",
    ],
)
def test_a_ledger_without_its_salt_is_an_error(filled: Path, statement: str) -> None:
    edit(filled, statement.format("query_salt"))
    with pytest.raises(LedgerDamaged, match="The ledger's query_salt is missing or was changed"):
        Ledger(filled)


def test_training_is_charged_once_for_each_model(ledger: Ledger) -> None:
    account = ledger.open_account("patients", PureCost(2.0), Terms(2.0))
    for _ in range(3):
        ledger.charge_training(account, "head/1", "digest one", PureCost(1.0))
    assert ledger.account("patients").spent_units == LIMIT // 2
    ledger.charge_training(account, "head/2", "digest two", PureCost(1.0))
    with pytest.raises(Exception, match="spent more than remains in the account 'patients'"):
        ledger.charge_training(account, "head/3", "digest three", PureCost(0.1))
    ledger.charge_training(account, "head/4", "digest four", PureCost(0.0))
    assert journal_kinds(ledger) == ["open", "training", "training", "training"], "also what costs nothing"


def test_the_export_has_every_row_and_its_hashes_can_be_recomputed(charged_ledger: Ledger) -> None:
    rows = list(charged_ledger.export("patients"))
    assert [row.sequence for row in rows] == list(range(1, 12))
    assert [row.kind for row in rows] == ["open", "quota", *["charge"] * 9]
    assert all(row.expected_hash() == row.hash for row in rows)
    assert [row.previous for row in rows] == [START, *(row.hash for row in rows[:-1])]
    assert len(list(charged_ledger.export())) == len(rows) + 4, "an account and three changes of keys"
    assert json.loads(json.dumps(asdict(rows[0])))["limit_units"] == LIMIT


def test_a_moved_sqlite_ledger_is_not_charged(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        charge = charge_for(ledger)
        path.rename(tmp_path / "elsewhere.sqlite")
        assert "was moved, deleted or replaced" in str(charge_error(ledger, charge))
        assert ledger.writer.error is not None
        path.touch()
        with pytest.raises(LedgerUnavailable, match="was moved, deleted or replaced"):
            ledger.ping()
        (tmp_path / "elsewhere.sqlite").rename(path)
        assert pay(ledger, charge).units == 1
        assert ledger.writer.error is None
        ledger.ping()


def test_a_full_disk_is_an_error_and_the_ledger_recovers(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        charge = charge_for(ledger)
        pay(ledger, charge)
        writer_driver(ledger).execute("PRAGMA max_page_count=1")
        results: list[Any] = []
        while not results or isinstance(results[-1], Charged):
            results.append(ledger.charge(charge))
            assert len(results) < 300
        assert "disk is full" in str(results[-1].error)
        paid = len(results)
        assert ledger.account("patients").spent_units == paid
        assert ledger.verify().sound
        assert pay(ledger, charge).units == 1
        ledger.ping()
        assert ledger.account("patients").spent_units == paid + 1


def test_an_open_ledger_does_not_keep_the_process_alive(path: Path) -> None:
    with Ledger(path) as ledger:
        assert ledger.writer._thread.daemon
        assert ledger.writer.batches == 0


# --- evaluations --------------------------------------------------------------------------------------------------

SPLIT = "0.2 of the people by 'customer', seed 0"


def open_gaussian(ledger: Ledger, mu: float = 0.5) -> AccountState:
    return ledger.open_account("people", GaussianCost(mu), Terms(epsilon_of(mu, 1e-5), 1e-5))


def test_an_evaluation_of_the_holdout_is_free_next_to_the_training(ledger: Ledger) -> None:
    account = open_gaussian(ledger)
    for _ in range(2):
        ledger.charge_training(account, "head/1", "model", GaussianCost(0.5), split=SPLIT)
        ledger.charge_evaluation(account, "head/1", "first evaluation", GaussianCost(0.3), split=SPLIT)
        ledger.charge_evaluation(account, "head/1", "second evaluation", GaussianCost(0.4), split=SPLIT)
    state = ledger.account("people")
    assert (state.spent_units, state.remaining_units) == (LIMIT, 0)
    rows = list(ledger.export("people"))
    assert [(row.kind, row.units) for row in rows if row.kind != "answered"] == [
        ("open", 0), ("training", LIMIT), ("evaluation", 0), ("evaluation", 0)
    ]  # fmt: skip
    spent = ledger.parts(state)
    assert spent[Part(SPLIT, "training")] == LIMIT
    assert LIMIT <= spent[Part(SPLIT, "holdout")] <= LIMIT + 2
    assert ledger.verify().sound
    with pytest.raises(QuietmaxError, match="Evaluating the model head/1 spent more than remains"):
        ledger.charge_evaluation(account, "head/1", "third evaluation", GaussianCost(0.1), split=SPLIT)
    assert ledger.account("people") == state


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["training", "evaluation", "charge"]),
            st.sampled_from([None, SPLIT, "another"]),
            st.sampled_from([None, "May", "June"]),
            st.integers(0, LIMIT // 4),
        ),
        max_size=10,
    )
)
def test_an_account_has_spent_what_the_person_who_pays_most_has_paid(
    ledger: Ledger, steps: list[tuple[Any, str | None, str | None, int]]
) -> None:
    """A person is of one cohort and, for every split, on one side. Answers paid one by one concern everybody."""
    name, client = f"people-{len(ledger.accounts())}", ledger.client(TRAINING_CLIENT)
    account = ledger.open_account(name, GaussianCost(1.0), Terms(4.4, 1e-5))
    sides = ("training", "holdout")
    paid = Counter(dict.fromkeys(product(sides, sides, ["April", "May", "June"]), 0))
    spent, charges, expected, results = Counter[Part](), [], [], list[Any]()
    for number, (kind, split, cohort, units) in enumerate(steps):
        side: Any = "training" if kind == "training" else "holdout"
        named = Part(split, side if split else None, cohort, RULE if cohort else None)
        part = None if kind == "charge" or named == Part() else named
        request = ledger.request_key(account.id, f"{number}")
        charges.append(
            Charge(account.id, client, "m/1", units, 1, request=request, body=b"body", kind=kind, part=part)
        )
        after = paid + Counter(
            {
                (first, second, month): units
                for first, second, month in paid
                if part is None
                or (
                    {SPLIT: first, "another": second}.get(str(split), side) == side
                    and cohort in (None, month)
                )
            }
        )
        fits = max(after.values(), default=0) <= LIMIT
        expected.append(max(after.values(), default=0) - max(paid.values(), default=0) if fits else None)
        if fits:
            paid = Counter({person: after[person] for person in paid})
            spent += Counter({part: units} if part else {})
    if charges:
        ledger.submit_charges(charges, results.extend)
        wait_for(results, len(charges))
    assert [each.units if isinstance(each, Charged) else None for each in results] == expected
    assert ledger.account(name).spent_units == max(paid.values())
    assert Counter(ledger.parts(account)) == spent
    of_cohort = {month: max(paid[person] for person in paid if person[2] == month) for _, _, month in paid}
    charged = {part.cohort for part in ledger.parts(account) if part.cohort}
    assert ledger.cohorts(account) == {month: of_cohort[month] for month in sorted(charged)}
    assert ledger.verify().sound


# --- cohorts ------------------------------------------------------------------------------------------------------

RULE = "first_visit:month of the persons by 'customer'"


def train(ledger: Ledger, cohort: str | None, digest: str, mu: float = 0.5, rule: str = RULE) -> None:
    account = open_gaussian(ledger)
    which = None if cohort is None else (rule, cohort)
    ledger.charge_training(account, f"visits/{digest}", digest, GaussianCost(mu), cohort=which)


def test_a_series_costs_as_much_as_its_most_expensive_cohort(ledger: Ledger) -> None:
    for number, mu in enumerate((0.3, 0.5, 0.4)):
        for _ in range(2):
            train(ledger, f"2026-{number}", f"{number}", mu)
    account = ledger.account("people")
    assert account.spent_units == LIMIT
    spent = ledger.cohorts(account)
    assert list(spent) == ["2026-0", "2026-1", "2026-2"]
    assert [spent[each] / LIMIT for each in spent] == pytest.approx([0.36, 1.0, 0.64])
    rows = [row for row in ledger.export("people") if row.kind == "training"]
    assert [json.loads(row.detail)["cohort"] for row in rows] == ["2026-0", "2026-1", "2026-2"]
    assert ledger.verify().sound


def test_training_a_cohort_twice_adds_up(ledger: Ledger) -> None:
    train(ledger, "May", "first", 0.4)
    train(ledger, "June", "second", 0.4)
    with pytest.raises(QuietmaxError, match=r"visits/third spent more than remains for the cohort 'May'"):
        train(ledger, "May", "third", 0.4)
    train(ledger, "May", "fourth", 0.3)
    assert ledger.account("people").spent_units == pytest.approx(LIMIT)
    assert ledger.verify().sound


def test_what_concerns_everybody_counts_for_every_cohort(ledger: Ledger) -> None:
    train(ledger, "May", "first", 0.4)
    train(ledger, None, "everybody", 0.3)
    with pytest.raises(QuietmaxError, match="spent more than remains"):
        train(ledger, "June", "second", 0.41)
    train(ledger, "June", "third", 0.4)
    account = ledger.account("people")
    assert account.remaining_units < 10
    assert set(ledger.cohorts(account).values()) == {account.spent_units}
    assert ledger.verify().sound


def test_cohorts_of_another_rule_could_overlap_and_are_refused(ledger: Ledger) -> None:
    train(ledger, "May", "first", 0.1)
    before = ledger.account("people")
    with pytest.raises(InvalidInput, match="a person could be in two of them"):
        train(ledger, "spring", "second", 0.1, "first_visit:season of the persons by 'customer'")
    assert ledger.account("people") == before
    train(ledger, "June", "third", 0.1)


def test_two_rules_in_one_batch_are_refused_too(ledger: Ledger) -> None:
    account, client = open_gaussian(ledger), ledger.client(TRAINING_CLIENT)
    charges = [
        Charge(account.id, client, "m/1", 1, 1, kind="training", part=Part(cohort="May", rule=rule))
        for rule in ("first", "second", "first")
    ]
    results: list[Any] = []
    ledger.submit_charges(charges, results.extend)
    wait_for(results, 3)
    assert [type(each) for each in results] == [Charged, Failed, Charged]


def test_a_closed_account_pays_for_no_further_cohort(ledger: Ledger) -> None:
    train(ledger, "May", "first", 0.3)
    closed = ledger.revoke("people", None, "The series has ended.")
    train(ledger, "May", "first", 0.3)  # paid already
    with pytest.raises(QuietmaxError, match="spent more than remains for the cohort 'June'"):
        train(ledger, "June", "second", 0.1)
    assert ledger.account("people").spent_units == closed.spent_units
    ledger.grant("people", closed.terms, "The series goes on.")
    train(ledger, "June", "second", 0.3)
    assert ledger.verify().sound


def test_the_holdout_of_each_cohort_is_evaluated_beside_its_training(ledger: Ledger) -> None:
    account = open_gaussian(ledger)
    for month in ("May", "June"):
        more: dict[str, Any] = {"split": SPLIT, "cohort": (RULE, month)}
        ledger.charge_training(account, "visits/1", month, GaussianCost(0.5), **more)
        ledger.charge_evaluation(account, "visits/1", month, GaussianCost(0.5), **more)
    assert ledger.account("people").spent_units == LIMIT
    with pytest.raises(QuietmaxError, match="for the cohort 'May'"):
        ledger.charge_evaluation(
            account, "visits/1", "again", GaussianCost(0.1), split=SPLIT, cohort=(RULE, "May")
        )
    with pytest.raises(QuietmaxError, match="spent more than remains in the account"):
        ledger.charge_evaluation(account, "visits/1", "of all", GaussianCost(0.1), split=SPLIT)


def test_the_holdout_of_a_guarantee_that_does_not_compose_is_evaluated_once(ledger: Ledger) -> None:
    account = ledger.open_account("people", PureCost(1.0), Terms(1.0, 1e-5))
    ledger.charge_training(account, "dpsgd/1", "model", "all", split=SPLIT)
    mu = mu_of(1.0, 1e-5)
    ledger.charge_evaluation(account, "dpsgd/1", "evaluation", GaussianCost(mu), split=SPLIT)
    state = ledger.account("people")
    assert state.remaining_units == 0
    for cost in (0.01, 1.0):
        with pytest.raises(QuietmaxError):
            ledger.charge_evaluation(account, "dpsgd/1", f"{cost}", GaussianCost(cost), split=SPLIT)
    assert ledger.account("people") == state


def test_an_evaluation_does_not_fit_into_a_budget_that_was_lowered(ledger: Ledger) -> None:
    """It spends the pair that the account was opened with, however small the budget is now."""
    ledger.open_account("people", PureCost(1.0), Terms(1.0, 1e-5))
    lowered = ledger.grant("people", Terms(0.5, 1e-5), "Half of it is enough.")
    with pytest.raises(QuietmaxError, match="Evaluating the model dpsgd/1 spent more than remains"):
        ledger.charge_evaluation(lowered, "dpsgd/1", "evaluation", GaussianCost(mu_of(1.0, 1e-5)))
    assert ledger.account("people") == lowered


@pytest.mark.parametrize("gmac", [True, False], ids=["gmac", "version 0.1"])
@pytest.mark.parametrize("size", [1, 2046, 2047, 2048, 4094, 5000])
def test_the_keys_of_queries_depend_on_the_query_the_model_and_the_secret_of_the_ledger(
    sqlite_ledger: Ledger, size: int, gmac: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are stored: with other keys, everything that was asked before would be paid again."""
    monkeypatch.setattr(sqlite_ledger, "_has_gmac_keys", gmac)
    content, salt = bytes(number % 251 for number in range(3 * size)), sqlite_ledger._salt
    for model in (b"model", b"other"):
        key = hashlib.blake2b(b"query " + model, key=salt, digest_size=32).digest()
        expected = [
            AESGCM(key).encrypt(bytes(12), b"", query)
            if gmac
            else hashlib.blake2b(model + query, key=salt, digest_size=16).digest()
            for query in (content[:size], content[size : 2 * size], content[2 * size :])
        ]
        assert sqlite_ledger.query_keys(model, memoryview(content), size) == expected
        assert len(set(expected)) == 3
        assert {len(each) for each in expected} == {16}


def test_an_interrupted_evaluation_takes_nothing_of_what_is_granted_later(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget does not compose with the evaluation, which takes all of it: as much as there was, and once."""
    cost = GaussianCost(mu_of(1.0, 1e-5))

    def crash(_: object) -> None:
        raise KeyboardInterrupt

    for split, training in ((None, False), (SPLIT, True)):
        account = ledger.open_account(f"people-{training}", PureCost(1.0), Terms(1.0, 1e-5))
        if training:
            ledger.charge_training(account, "m/1", "model", PureCost(0.9), split=split)

        monkeypatch.setattr(ledger, "store_answers", crash)
        with pytest.raises(KeyboardInterrupt):
            ledger.charge_evaluation(account, "m/1", "evaluation", cost, split=split)
        monkeypatch.undo()
        granted = ledger.grant(account.name, Terms(2.0, 1e-5), "The board allows more.")
        parts = ledger.parts(granted)
        for _ in range(2):
            ledger.charge_evaluation(granted, "m/1", "evaluation", cost, split=split)
        assert ledger.account(account.name).spent_units == granted.spent_units == LIMIT
        assert ledger.parts(granted) == parts
        kinds = [row.kind for row in ledger.export(account.name)]
        assert (kinds.count("evaluation"), kinds[-1]) == (1, "answered")
        assert ledger.verify().sound


def test_it_is_known_for_which_models_an_account_has_paid(sqlite_ledger: Ledger) -> None:
    account = open_patients(sqlite_ledger)
    other = open_patients(sqlite_ledger, "others")
    assert not sqlite_ledger.is_training_charged(account, "first")
    sqlite_ledger.charge_training(account, "b/1", "first", PureCost(0.25))
    sqlite_ledger.charge_training(account, "a/1", "second", PureCost(0.25))
    sqlite_ledger.charge_training(other, "c/1", "third", PureCost(0.25))
    assert [sqlite_ledger.is_training_charged(account, each) for each in ("first", "second", "third")] == [
        True,
        True,
        False,
    ]
    assert sqlite_ledger.charged_models(account) == ["a/1", "b/1"]
    assert sqlite_ledger.charged_models(other) == ["c/1"]


def test_an_evaluation_that_spends_exactly_what_is_promised_takes_the_whole_account(
    sqlite_ledger: Ledger,
) -> None:
    cost = GaussianCost(0.25)
    terms = Terms(1.0, delta_of(cost.mu, 1.0))
    account = sqlite_ledger.open_account("people", PureCost(1.0), terms)
    sqlite_ledger.charge_evaluation(account, "dpsgd/1", "evaluation", cost)
    assert sqlite_ledger.account("people").remaining_units == 0


def test_the_newest_row_of_all_accounts_decides_whether_the_clock_went_back(path: Path) -> None:
    with Ledger(path) as ledger:
        assert abs(ledger._newest_time() - time.time_ns() // 1000) < 10**9, "there is no row"
        account, ann = open_patients(ledger), ledger.client("ann")
        other = open_patients(ledger, "others")
        for number in (account.id, other.id, account.id):
            pay(ledger, Charge(number, ann, "m/1", 1, rows=1))
        *_, before, newest = sorted(
            row.time for name in ("patients", "others") for row in ledger.export(name)
        )
        assert ledger._newest_time() == newest
    edit(path, f"UPDATE journal SET time = 'abc' WHERE time = {newest}")
    with Ledger(path) as ledger:
        assert ledger._newest_time() == before


def test_a_ledger_can_be_created_below_a_writable_folder_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not ledger_exists(tmp_path / "a" / "b" / "ledger.sqlite")
    (tmp_path / "file").touch()
    with pytest.raises(LedgerUnavailable, match="file is not a writable folder"):
        ledger_exists(tmp_path / "file" / "b" / "ledger.sqlite")
    monkeypatch.setattr(os, "access", lambda folder, _: folder != tmp_path)
    with pytest.raises(LedgerUnavailable, match="is not a writable folder"):
        ledger_exists(tmp_path / "a" / "ledger.sqlite")


def test_the_spending_history_has_the_first_row_the_last_and_rows_at_equal_distances(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts_module, "_HISTORY_POINTS", 4)
    account, ann = open_patients(ledger), ledger.client("ann")
    assert ledger.spending_history(replace(account, sequence=0))[0].spent_units == 0
    assert [point.spent_units for point in ledger.spending_history(account)] == [0]
    for _ in range(15):
        pay(ledger, Charge(account.id, ann, "m/1", 10, rows=1))
    rows = [SpendingPoint(row.time, row.spent_units) for row in ledger.export("patients")]
    history = ledger.spending_history(ledger.account("patients"))
    assert history == [rows[number - 1] for number in (1, 4, 8, 12, 16)]
