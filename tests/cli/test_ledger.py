from __future__ import annotations

import json
import math
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quietmax.accounting import GaussianCost, PureCost
from quietmax.cli._output import console
from quietmax.ledger import Charge, Ledger, Terms
from tests.cli.conftest import Run, assert_error, output_of

WHY = ("--because", "The board has allowed it.")
RunJson = Callable[..., Any]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger with the account `patients` of epsilon 1, of which ann spent a quarter. Printed lines are wide."""
    monkeypatch.setattr(console, "_width", 200)
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        ann = ledger.client("ann")
        ledger.charge(Charge(account.id, ann, "m/1", account.units(PureCost(0.125)), rows=2))
    return path


@pytest.fixture
def run_json(run: Run, path: Path) -> RunJson:
    """Run a ledger command with --json and return the document."""

    def call(*arguments: object) -> Any:
        code, out, err = run("ledger", *arguments, "--ledger", path, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return call


# --- budgets ------------------------------------------------------------------------------------------------------


def test_status_shows_what_is_spent_and_by_whom(run: Run, path: Path, run_json: RunJson) -> None:
    (account,) = run_json("status")["accounts"]
    assert account["spent"]["epsilon"] == pytest.approx(0.25)
    assert [each["client"] for each in account["clients"]] == ["ann"]
    out = output_of(run("ledger", "status", "--ledger", path))
    assert f"patients:{account['rows']}:{account['head']}" in out
    assert "25.00%" in out
    assert "Clients of patients" in out


def test_status_shows_what_the_training_set_and_the_holdout_have_spent(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "new.sqlite"
    with Ledger(path) as ledger:
        account = ledger.open_account("people", GaussianCost(1.0), Terms(4.4, 1e-5))
        ledger.charge_training(account, "head/1", "model", GaussianCost(0.6), split="a fifth held out")
        ledger.charge_evaluation(account, "head/1", "evaluation", GaussianCost(0.5), split="a fifth held out")
    (shown,) = json.loads(run("ledger", "status", "--ledger", path, "--json")[1])["accounts"]
    assert shown["spent"]["mu"] == pytest.approx(0.6)
    assert [(part["side"], part["split"]) for part in shown["parts"]] == [
        ("holdout", "a fifth held out"),
        ("training", "a fifth held out"),
    ]
    _, out, _ = run("ledger", "status", "--ledger", path)
    assert "36.00%" in out
    assert "25.00%" in out


def test_a_new_ledger_says_what_opens_accounts_and_an_unused_account_shows_no_clients(
    run: Run, tmp_path: Path
) -> None:
    Ledger(tmp_path / "new.sqlite").close()
    out = output_of(run("ledger", "status", "--ledger", tmp_path / "new.sqlite"))
    assert "no accounts yet" in out
    with Ledger(tmp_path / "new.sqlite") as ledger:
        ledger.open_account("patients", PureCost(1.0), Terms(1.0))
    out = output_of(run("ledger", "status", "--ledger", tmp_path / "new.sqlite"))
    assert "Account patients" in out
    assert "Clients of" not in out


def test_grant_raises_the_budget_and_keeps_the_delta(run_json: RunJson) -> None:
    granted = run_json("grant", "patients", "--epsilon", 2, *WHY)
    assert granted["budget"]["epsilon"] == pytest.approx(2)
    assert granted["terms"]["delta"] == 0
    assert granted["spent"]["epsilon"] == pytest.approx(0.25)


def test_grant_to_a_client_sets_a_quota(run: Run, path: Path, run_json: RunJson) -> None:
    run_json("grant", "patients", "--client", "ann", "--share", 0.5, *WHY)
    _, out, _ = run("ledger", "status", "--ledger", path)
    assert "50.00%" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("grant patients", "Either --epsilon (a budget) or --client (a quota) is required"),
        ("grant patients --epsilon 2 --client ann", "Either --epsilon (a budget) or --client (a quota)"),
        ("grant patients --epsilon 2 --share 0.5", "--share requires --client"),
        ("grant patients --client ann --delta 1e-5", "--delta requires --epsilon"),
        ("grant patients --client ann --share 2", "--share must be between 0 and 1, got 2.0"),
        ("key create ann --days 0", "--days must be greater than 0"),
    ],
)
def test_invalid_options_are_reported_with_their_flags_and_change_nothing(
    run: Run, path: Path, run_json: RunJson, words: str, message: str
) -> None:
    before = run_json("status")
    why = WHY if words.startswith("grant") else ()
    assert_error(run("ledger", *words.split(), *why, "--ledger", path), 2, message)
    assert run_json("status") == before


def test_revoke_takes_back_what_is_unspent(run: Run, path: Path, run_json: RunJson) -> None:
    out = output_of(run("ledger", "revoke", "patients", *WHY, "--ledger", path))
    assert "100.00%" in out
    (account,) = run_json("status")["accounts"]
    assert account["limit_units"] == account["spent_units"]


# --- audit log ----------------------------------------------------------------------------------------------------


def test_export_writes_every_row_as_lines_or_as_one_document(
    run: Run, path: Path, run_json: RunJson, tmp_path: Path
) -> None:
    _, out, _ = run("ledger", "export", "--ledger", path)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [row["kind"] for row in lines if row["account"] == lines[-1]["account"]] == ["open", "charge"]
    assert run_json("export") == lines
    file = tmp_path / "audit-log.jsonl"
    output_of(run("ledger", "export", "--ledger", path, "--output", file))
    assert file.read_text() == out


def test_a_failed_export_keeps_the_earlier_file_and_leaves_no_other(
    run: Run, path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "exports"
    folder.mkdir()
    file = folder / "audit-log.jsonl"
    file.write_text("the earlier one")
    result = run("ledger", "export", "--account", "nobody", "-o", file, "--ledger", path)
    assert_error(result, 2, "no account 'nobody'")
    assert [each.name for each in folder.iterdir()] == ["audit-log.jsonl"]
    assert file.read_text() == "the earlier one"


def test_an_export_to_a_missing_folder_is_an_error(run: Run, path: Path, tmp_path: Path) -> None:
    result = run("ledger", "export", "-o", tmp_path / "no" / "audit-log.jsonl", "--ledger", path)
    assert_error(result, 1, "Cannot write the audit log")


def test_verify_finds_an_edited_row_and_a_missing_anchor(run: Run, path: Path, run_json: RunJson) -> None:
    status = run_json("status")
    (account,) = status["accounts"]
    anchor = f"patients:{account['rows']}:{account['head']}"
    keys, same = sorted(status["heads"])
    assert same == anchor
    assert run_json("verify", "--anchor", anchor, "--anchor", keys)["sound"] is True
    assert (
        f"Audit log of accounts, training sets and API keys: {keys}"
        in run("ledger", "status", "--ledger", path)[1]
    )
    out = output_of(run("ledger", "verify", "--ledger", path))
    assert "No faults found in 3 rows of 1 account." in out
    wrong = f"patients:1:{account['head']}"
    assert_error(run("ledger", "verify", "--anchor", wrong, "--ledger", path), 1, "'patients': row 1 is not")
    with sqlite3.connect(path) as database:
        database.execute("UPDATE journal SET units = units - 1 WHERE kind = 'charge'")
    code, out, err = run("ledger", "verify", "--json", "--ledger", path)
    assert code == 1
    assert json.loads(out)["sound"] is False
    assert "was edited or is damaged" in err


def test_the_last_row_is_printed_in_one_line_as_an_anchor(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_width", 40)
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        account = ledger.open_account("acc", PureCost(1.0), Terms(1.0))
        ann = ledger.client("ann")
        for _ in range(99):
            ledger.charge(Charge(account.id, ann, "m/1", 1, rows=1))
        head = ledger.account("acc").head
    out = output_of(run("ledger", "status", "--ledger", path))
    assert f"acc:100:{head}" in out
    output_of(run("ledger", "verify", "--ledger", path, "--anchor", f"acc:100:{head}"))


@pytest.mark.parametrize("text", ["patients", "patients:one:" + "0" * 64, "patients:1:short"])
def test_an_anchor_of_another_form_is_an_error(run: Run, path: Path, text: str) -> None:
    result = run("ledger", "verify", "--anchor", text, "--ledger", path)
    assert_error(result, 2, "--anchor must be ACCOUNT:ROW:HASH", repr(text))


# --- API keys and addresses ---------------------------------------------------------------------------------------


def test_keys_are_created_listed_and_revoked(run: Run, path: Path, run_json: RunJson) -> None:
    made = run_json("key", "create", "bob", "--days", 30)
    out = output_of(run("ledger", "key", "create", "eve", "--ledger", path))
    shown = out.splitlines()[-1]
    listed = run_json("key", "list")["keys"]
    assert [key["client"] for key in listed] == ["bob", "eve"]
    assert shown not in json.dumps(listed)
    assert made["key"] not in json.dumps(listed)
    out = output_of(run("ledger", "key", "revoke", made["id"], "--ledger", path))
    assert "of bob is revoked" in out
    assert run_json("key", "revoke", listed[1]["id"])["revoked"] is not None
    _, out, _ = run("ledger", "key", "list", "--ledger", path)
    assert out.count("revoked 20") == 2


def test_prune_reports_what_it_deleted_and_keeps_at_least_an_hour(
    run: Run, path: Path, run_json: RunJson
) -> None:
    with Ledger(path) as ledger:
        account, ann = ledger.account("patients"), ledger.client("ann")
        ledger.charge(Charge(account.id, ann, "m/1", 1, 1, request=b"id", body=b"body"))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE requests SET time = 5")
    assert run_json("prune", "--days", 30) == {"requests": 1, "batches": 0}
    code, out, _ = run("ledger", "prune", "--days", 30, "--ledger", path)
    assert (code, "Deleted 0 stored requests" in out) == (0, True)
    assert_error(run("ledger", "prune", "--days", 0, "--ledger", path), 2, "between 1/24 and 36500")


def test_a_ledger_that_was_replaced_is_an_error_until_the_loss_is_accepted(run: Run, path: Path) -> None:
    path.unlink()
    assert_error(run("ledger", "key", "create", "ann", "--ledger", path), 1, "what was spent is unknown")
    assert_error(run("ledger", "accept-loss", "--because", "no", "--ledger", path), 2, "at least 3 words")
    code, out, err = run("ledger", "accept-loss", *WHY, "--ledger", path)
    assert (code, err) == (0, "")
    assert "Lost, with what was spent: 1 account." in " ".join(out.split())
    assert "keys that were revoked meanwhile may be valid again" in " ".join(out.split())
    assert run("ledger", "key", "create", "ann", "--ledger", path)[0] == 0
    assert_error(run("ledger", "accept-loss", *WHY, "--ledger", path), 2, "has lost nothing")


# --- losses -------------------------------------------------------------------------------------------------------


def test_a_lost_charge_is_charged_again_once_the_loss_is_accepted(
    run: Run, path: Path, run_json: RunJson
) -> None:
    assert_error(run("ledger", "accept-loss", *WHY, "--ledger", path), 2, "has lost nothing")
    copy = path.with_suffix(".old")
    shutil.copy(path, copy)
    with Ledger(path) as ledger:
        account = ledger.account("patients")
        ledger.charge(Charge(account.id, ledger.client("ann"), "m/1", account.units(PureCost(0.5)), rows=1))
    shutil.copy(copy, path)
    assert_error(run("ledger", "verify", "--ledger", path), 1, "has lost charges")
    (account_now,) = run_json("accept-loss", *WHY)["accounts"]
    assert account_now["spent"]["epsilon"] == pytest.approx(0.75)
    (shown,) = run_json("status")["accounts"]
    assert {each["client"] for each in shown["clients"]} == {"ann", "lost"}
    assert run("ledger", "verify", "--ledger", path)[0] == 0


@pytest.mark.parametrize(
    ("accuracy", "grade"),
    [
        (0.749, "proven"),
        (0.751, "proven, but weak: an adversary can be right up to 75.1% of the time"),
    ],
)
def test_status_says_whether_a_budget_is_weak(accuracy: float, grade: str, run: Run, path: Path) -> None:
    epsilon = math.log(accuracy / (1 - accuracy)) - 1e-6
    with Ledger(path) as ledger:
        ledger.open_account("people", PureCost(epsilon), Terms(epsilon))
    lines = run("ledger", "status", "--ledger", path)[1].splitlines()
    cells = [line.strip("│").split("│") for line in lines]
    assert [cell[1].strip() for cell in cells if cell[0].strip() == "guarantee"] == ["proven", grade]


def test_status_states_no_limit_for_an_account_with_an_unproven_model(run: Run, path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.record_unproven(ledger.account("patients"), "m/1", "refuted")
    assert "no proven limit: m/1 is refuted" in run("ledger", "status", "--ledger", path)[1]
    assert "m/1 is refuted" in run("ledger", "revoke", "patients", "--ledger", path, *WHY)[1]
    granted = run("ledger", "grant", "patients", "--epsilon", 60, "--ledger", path, *WHY)[1]
    assert "m/1 is refuted" in granted
    assert "proven, but weak" not in granted
