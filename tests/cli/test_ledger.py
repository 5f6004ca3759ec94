from __future__ import annotations

import json
import math
import shutil
import sqlite3
from pathlib import Path

import pytest

from quietmax.accounting import GaussianCost, PureCost
from quietmax.cli._output import console
from quietmax.ledger import Charge, Ledger, Terms
from tests.cli.conftest import assert_error, document, printed, run

PATH = Path("ledger.sqlite")
WHY = ("--because", "The board has allowed it.")


@pytest.fixture(autouse=True)
def patients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger with the account `patients` of epsilon 1, of which ann spent a quarter. Printed lines are wide."""
    monkeypatch.setattr(console, "_width", 200)
    with Ledger(PATH) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        charge(ledger, account.units(PureCost(0.125)), rows=2)


def charge(ledger: Ledger, units: int, rows: int = 1, **request: bytes) -> None:
    """Charge the account `patients` for an answer to ann."""
    account = ledger.account("patients")
    ledger.charge(Charge(account.id, ledger.client("ann"), "m/1", units, rows=rows, **request))


# --- budgets ------------------------------------------------------------------------------------------------------


def test_status_shows_what_is_spent_and_by_whom() -> None:
    (account,) = document("ledger", "status")["accounts"]
    assert account["spent"]["epsilon"] == pytest.approx(0.25)
    assert [each["client"] for each in account["clients"]] == ["ann"]
    out = printed("ledger", "status")
    for words in (f"patients:{account['rows']}:{account['head']}", "25.00%", "Clients of patients"):
        assert words in out


def test_status_shows_what_the_training_set_and_the_holdout_have_spent() -> None:
    with Ledger(PATH) as ledger:
        account = ledger.open_account("people", GaussianCost(1.0), Terms(4.4, 1e-5))
        ledger.charge_training(account, "head/1", "model", GaussianCost(0.6), split="a fifth held out")
        ledger.charge_evaluation(account, "head/1", "evaluation", GaussianCost(0.5), split="a fifth held out")
    shown = {each["account"]: each for each in document("ledger", "status")["accounts"]}["people"]
    assert shown["spent"]["mu"] == pytest.approx(0.6)
    assert {part["side"]: part["split"] for part in shown["parts"]} == dict.fromkeys(
        ("holdout", "training"), "a fifth held out"
    )
    out = printed("ledger", "status")
    assert "36.00%" in out
    assert out.count("25.00%") == 3  # of patients, of ann, and of the holdout


def test_status_shows_what_each_cohort_has_spent() -> None:
    with Ledger(PATH) as ledger:
        account = ledger.open_account("people", GaussianCost(1.0), Terms(4.4, 1e-5))
        for month, mu in (("2026-10", 0.6), ("2026-11", 0.5)):
            ledger.charge_training(account, "m/1", month, GaussianCost(mu), cohort=("visit:month", month))
    shown = {each["account"]: each for each in document("ledger", "status")["accounts"]}["people"]
    assert shown["spent"]["mu"] == pytest.approx(0.6)
    assert list(shown["cohorts"]) == ["2026-10", "2026-11"]
    assert shown["cohorts"]["2026-10"] == shown["spent_units"]
    out = printed("ledger", "status")
    assert "Cohorts of people" in out
    assert "by visit:month" in out
    (october,) = (line for line in out.splitlines() if "2026-10" in line)
    assert "36.00%" in october


def test_a_new_ledger_says_what_opens_accounts_and_an_unused_account_shows_no_clients() -> None:
    status = ("ledger", "status", "--ledger", "new.sqlite")
    Ledger(Path("new.sqlite")).close()
    assert "no accounts yet" in printed(*status)
    with Ledger(Path("new.sqlite")) as ledger:
        ledger.open_account("patients", PureCost(1.0), Terms(1.0))
    out = printed(*status)
    assert "Account patients" in out
    assert "Clients of" not in out


def test_grant_raises_the_budget_and_keeps_the_delta_or_sets_the_quota_of_a_client() -> None:
    granted = document("ledger", "grant", "patients", "--epsilon", 2, *WHY)
    assert granted["budget"]["epsilon"] == pytest.approx(2)
    assert granted["terms"]["delta"] == 0
    assert granted["spent"]["epsilon"] == pytest.approx(0.25)
    assert "50.00%" not in printed("ledger", "status")
    document("ledger", "grant", "patients", "--client", "ann", "--share", 0.5, *WHY)
    assert "50.00%" in printed("ledger", "status")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("grant patients", 2, "Either --epsilon (a budget) or --client (a quota) is required"),
        ("grant patients --epsilon 2 --client ann", 2, "Either --epsilon (a budget) or --client (a quota)"),
        ("grant patients --epsilon 2 --share 0.5", 2, "--share requires --client"),
        ("grant patients --client ann --delta 1e-5", 2, "--delta requires --epsilon"),
        ("grant patients --client ann --share 2", 2, "--share must be between 0 and 1, got 2.0"),
        ("key create ann --days 0", 2, "--days must be greater than 0"),
        ("prune --days 0", 2, "between 1/24 and 36500"),
        ("accept-loss", 2, "has lost nothing"),
        ("verify --anchor patients", 2, "--anchor must be ACCOUNT:ROW:HASH"),
        (f"verify --anchor patients:one:{'0' * 64}", 2, "'patients:one:"),
        ("verify --anchor patients:1:short", 2, "'patients:1:short'"),
        (f"verify --anchor patients:1:{'0' * 64}", 1, "'patients': row 1 is not"),
        ("export --account nobody -o log.jsonl", 2, "no account 'nobody'"),
        ("export -o no/log.jsonl", 1, "Cannot write the audit log"),
    ],
)
def test_errors_name_the_flags_and_change_nothing(words: str, code: int, message: str) -> None:
    Path("log.jsonl").write_text("the earlier one")
    before, names = document("ledger", "status"), sorted(Path().iterdir())
    why = WHY if words.startswith(("grant", "accept-loss")) else ()
    assert_error(run("ledger", *words.split(), *why), code, message)
    assert document("ledger", "status") == before
    assert sorted(Path().iterdir()) == names
    assert Path("log.jsonl").read_text() == "the earlier one"


def test_two_administrators_raise_a_budget_with_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("olga", "paul"):
        Path(f"{name}.key").write_text(document("ledger", "key", "create", name, "--role", "admin")["key"])
    raised = ("ledger", "grant", "patients", "--epsilon", 2, *WHY)
    assert_error(run(*raised), 2, "two administrators", "--key-file")
    assert "confirm patients" in printed(*raised, "--key-file", "olga.key")
    monkeypatch.delenv("QUIETMAX_KEY", raising=False)
    assert_error(run("ledger", "confirm", "patients"), 2, "--key-file")
    assert_error(run("ledger", "confirm", "patients", "--key-file", "olga.key"), 2, "another administrator")
    confirmed = document("ledger", "confirm", "patients", "--key-file", "paul.key")
    assert confirmed["budget"]["epsilon"] == pytest.approx(2)
    assert "No faults" in printed("ledger", "verify")


def test_an_erased_client_is_a_pseudonym_from_then_on() -> None:
    (stated,) = document("ledger", "clients")["clients"]
    assert stated in printed("ledger", "clients")
    assert stated in printed("ledger", "erase-client", "ann")
    assert "ann" not in printed("ledger", "status")
    assert document("ledger", "clients") == {"clients": {}}
    assert "No faults" in printed("ledger", "verify")
    assert_error(run("ledger", "erase-client", "ann"), 2, "no client 'ann'")


def test_a_backup_is_restored_elsewhere_and_an_upgrade_is_rehearsed() -> None:
    before = document("ledger", "status")
    backup = document("ledger", "backup", "monday.sqlite")
    assert backup["heads"] == before["heads"]
    assert_error(run("ledger", "backup", "monday.sqlite"), 2, "exists already")
    assert_error(run("ledger", "backup", "no/monday.sqlite"), 1, "Cannot write the backup")
    assert "no head file" in printed("ledger", "restore", "monday.sqlite", "--ledger", "other.sqlite")
    assert document("ledger", "status", "--ledger", "other.sqlite")["accounts"] == before["accounts"]
    rehearsed = document("ledger", "migrate", "--check")
    assert rehearsed["before"] == rehearsed["after"]
    assert rehearsed["sound"]
    with sqlite3.connect(PATH) as connection:
        connection.execute("UPDATE accounts SET spent_units = 0")
    assert_error(run("ledger", "migrate"), 1, "Nothing was changed")
    assert_error(run("ledger", "backup", "tuesday.sqlite"), 1, "has faults")
    assert not Path("tuesday.sqlite").exists()


def test_revoke_takes_back_what_is_unspent() -> None:
    assert "100.00%" in printed("ledger", "revoke", "patients", *WHY)
    (account,) = document("ledger", "status")["accounts"]
    assert account["limit_units"] == account["spent_units"]


# --- audit log ----------------------------------------------------------------------------------------------------


def test_export_writes_every_row_as_lines_or_as_one_document() -> None:
    out = printed("ledger", "export")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [row["kind"] for row in lines if row["account"] == lines[-1]["account"]] == ["open", "charge"]
    assert document("ledger", "export") == lines
    printed("ledger", "export", "--output", "audit-log.jsonl")
    assert Path("audit-log.jsonl").read_text() == out


def test_verify_finds_an_edited_row_and_a_missing_anchor() -> None:
    status = document("ledger", "status")
    (account,) = status["accounts"]
    keys, anchor = sorted(status["heads"])
    assert anchor == f"patients:{account['rows']}:{account['head']}"
    assert document("ledger", "verify", "--anchor", anchor, "--anchor", keys)["sound"] is True
    assert f"Audit log of accounts, training sets and API keys: {keys}" in printed("ledger", "status")
    assert "No faults found in 3 rows of 1 account." in printed("ledger", "verify")
    with sqlite3.connect(PATH) as database:
        database.execute("UPDATE journal SET units = units - 1 WHERE kind = 'charge'")
    code, out, err = run("ledger", "verify", "--json")
    assert (code, json.loads(out)["sound"]) == (1, False)
    assert "was edited or is damaged" in err


def test_the_last_row_is_printed_in_one_line_as_an_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_width", 40)
    with Ledger(PATH) as ledger:
        for _ in range(98):
            charge(ledger, 1)
        anchor = f"patients:100:{ledger.account('patients').head}"
    assert anchor in printed("ledger", "status")
    printed("ledger", "verify", "--anchor", anchor)


# --- API keys and addresses ---------------------------------------------------------------------------------------


def test_keys_are_created_listed_and_revoked() -> None:
    made = document("ledger", "key", "create", "bob", "--days", 30)
    shown = printed("ledger", "key", "create", "eve").splitlines()[-1]
    listed = document("ledger", "key", "list")["keys"]
    assert [key["client"] for key in listed] == ["bob", "eve"]
    assert shown not in json.dumps(listed)
    assert made["key"] not in json.dumps(listed)
    assert "of bob is revoked" in printed("ledger", "key", "revoke", made["id"])
    assert document("ledger", "key", "revoke", listed[1]["id"])["revoked"] is not None
    assert printed("ledger", "key", "list").count("revoked 20") == 2


def test_prune_reports_what_it_deleted() -> None:
    with Ledger(PATH) as ledger:
        charge(ledger, 1, request=b"id", body=b"body")
    with sqlite3.connect(PATH) as connection:
        connection.execute("UPDATE requests SET time = 5")
    assert document("ledger", "prune", "--days", 30) == {"requests": 1, "batches": 0}
    assert "Deleted 0 stored requests" in printed("ledger", "prune", "--days", 30)


# --- losses -------------------------------------------------------------------------------------------------------


def test_a_ledger_that_was_replaced_is_an_error_until_the_loss_is_accepted() -> None:
    PATH.unlink()
    assert_error(run("ledger", "key", "create", "ann"), 1, "what was spent is unknown")
    assert_error(run("ledger", "accept-loss", "--because", "no"), 2, "at least 3 words")
    out = " ".join(printed("ledger", "accept-loss", *WHY).split())
    assert "Lost, with what was spent: 1 account." in out
    assert "keys that were revoked meanwhile may be valid again" in out
    printed("ledger", "key", "create", "ann")
    assert_error(run("ledger", "accept-loss", *WHY), 2, "has lost nothing")


def test_a_lost_charge_is_charged_again_once_the_loss_is_accepted() -> None:
    shutil.copy(PATH, "old.sqlite")
    with Ledger(PATH) as ledger:
        charge(ledger, ledger.account("patients").units(PureCost(0.5)))
    shutil.copy("old.sqlite", PATH)
    assert_error(run("ledger", "verify"), 1, "has lost charges")
    (account_now,) = document("ledger", "accept-loss", *WHY)["accounts"]
    assert account_now["spent"]["epsilon"] == pytest.approx(0.75)
    (shown,) = document("ledger", "status")["accounts"]
    assert {each["client"] for each in shown["clients"]} == {"ann", "lost"}
    printed("ledger", "verify")


# --- what a budget means ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accuracy", "strength", "words"),
    [(0.749, "moderate", "moderate protection [##-]"), (0.751, "weak", "weak protection [#--]")],
)
def test_status_says_how_strong_a_budget_is(accuracy: float, strength: str, words: str) -> None:
    epsilon = math.log(accuracy / (1 - accuracy)) - 1e-6
    with Ledger(PATH) as ledger:
        ledger.open_account("people", PureCost(epsilon), Terms(epsilon))
    shown = " ".join(printed("ledger", "status").replace("│", " ").split())
    assert f"proven, {words}: a guess whether one record is in the data is right at most" in shown
    by_name = {each["account"]: each["strength"] for each in document("ledger", "status")["accounts"]}
    assert by_name["people"] == strength


def test_status_states_no_limit_for_an_account_with_an_unproven_model() -> None:
    with Ledger(PATH) as ledger:
        ledger.record_unproven(ledger.account("patients"), "m/1", "refuted")
    assert "no proven limit: m/1 is refuted" in printed("ledger", "status")
    assert [each["strength"] for each in document("ledger", "status")["accounts"]] == ["none"]
    assert "m/1 is refuted" in printed("ledger", "revoke", "patients", *WHY)
    granted = printed("ledger", "grant", "patients", "--epsilon", 60, *WHY)
    assert "m/1 is refuted" in granted
    assert "protection" not in granted
