"""The ledger commands, as an administrator types them."""

from __future__ import annotations

import json
import sqlite3

import pytest

from quietmax.accounting import PureCost
from quietmax.cli._output import console
from quietmax.ledger import Charge, Ledger, Terms

WHY = ("--because", "The board has allowed it.")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A ledger with the account `patients` of epsilon 1, of which ann spent a quarter; wide lines."""
    monkeypatch.setattr(console, "_width", 200)
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        ann = ledger.client("ann")
        ledger.charge(Charge(account.id, ann, "m/1", account.units(PureCost(0.125)), rows=2))
    return path


@pytest.fixture
def told(run, place):
    """What a ledger command says in JSON."""

    def ask(*arguments):
        code, out, err = run("ledger", *arguments, "--ledger", place, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return ask


def test_status_shows_what_is_spent_and_by_whom(run, place, told):
    (account,) = told("status")["accounts"]
    assert account["spent"]["epsilon"] == pytest.approx(0.25)
    assert [part["client"] for part in account["clients"]] == ["ann"]
    code, out, _ = run("ledger", "status", "--ledger", place)
    assert code == 0
    assert f"patients:{account['rows']}:{account['head']}" in out
    assert "25.00%" in out


def test_a_ledger_without_accounts_says_what_opens_them(run, tmp_path):
    Ledger(tmp_path / "new.sqlite").close()
    code, out, _ = run("ledger", "status", "--ledger", tmp_path / "new.sqlite")
    assert code == 0
    assert "no accounts yet" in out


def test_an_account_nobody_has_asked_yet_shows_no_spenders(run, tmp_path):
    with Ledger(tmp_path / "new.sqlite") as ledger:
        ledger.open_account("patients", PureCost(1.0), Terms(1.0))
    _, out, _ = run("ledger", "status", "--ledger", tmp_path / "new.sqlite")
    assert "Account patients" in out
    assert "Who spent" not in out


def test_a_ledger_that_is_not_there_is_not_created_by_looking(run, tmp_path):
    code, _, err = run("ledger", "status", "--ledger", tmp_path / "none.sqlite")
    assert code == 1
    assert "There is no ledger" in err
    assert not (tmp_path / "none.sqlite").exists()


def test_grant_raises_the_budget_and_keeps_the_delta(told):
    granted = told("grant", "patients", "--epsilon", 2, *WHY)
    assert granted["budget"]["epsilon"] == pytest.approx(2)
    assert granted["terms"]["delta"] == 0
    assert granted["spent"]["epsilon"] == pytest.approx(0.25)


def test_grant_to_a_client_sets_a_quota(run, place, told):
    told("grant", "patients", "--client", "ann", "--share", 0.5, *WHY)
    _, out, _ = run("ledger", "status", "--ledger", place)
    assert "50.00%" in out


@pytest.mark.parametrize("both", [(), ("--epsilon", 2, "--client", "ann")])
def test_grant_wants_a_budget_or_a_client_and_not_both(run, place, told, both):
    before = told("status")
    code, _, err = run("ledger", "grant", "patients", *both, *WHY, "--ledger", place)
    assert code == 1
    assert "one of them" in err
    assert told("status") == before


def test_revoke_takes_back_what_is_unspent(run, place, told):
    code, out, _ = run("ledger", "revoke", "patients", *WHY, "--ledger", place)
    assert code == 0
    assert "100.00%" in out
    (account,) = told("status")["accounts"]
    assert account["limit_units"] == account["spent_units"]


def test_export_writes_every_row_as_lines_or_as_one_document(run, place, told, tmp_path):
    _, out, _ = run("ledger", "export", "--ledger", place)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [row["kind"] for row in lines if row["account"] == lines[-1]["account"]] == ["open", "charge"]
    assert told("export") == lines
    file = tmp_path / "journal.jsonl"
    code, _, _ = run("ledger", "export", "--ledger", place, "--output", file)
    assert code == 0
    assert file.read_text() == out


def test_an_export_that_fails_leaves_the_earlier_file_and_nothing_else(run, place, tmp_path):
    folder = tmp_path / "exports"
    folder.mkdir()
    file = folder / "journal.jsonl"
    file.write_text("the earlier one")
    code, _, err = run("ledger", "export", "--account", "nobody", "-o", file, "--ledger", place)
    assert code == 1
    assert "no account 'nobody'" in err
    assert [path.name for path in folder.iterdir()] == ["journal.jsonl"]
    assert file.read_text() == "the earlier one"


def test_an_export_to_a_folder_that_is_not_there_is_refused_in_a_sentence(run, place, tmp_path):
    code, _, err = run("ledger", "export", "-o", tmp_path / "no" / "journal.jsonl", "--ledger", place)
    assert code == 1
    assert "choose another file" in err


def test_verify_finds_an_edited_row_and_an_anchor_that_is_gone(run, place, told):
    (account,) = told("status")["accounts"]
    anchor = f"patients:{account['rows']}:{account['head']}"
    assert told("verify", "--anchor", anchor)["sound"] is True
    code, out, _ = run("ledger", "verify", "--ledger", place)
    assert code == 0
    assert "Sound" in out
    code, _, err = run("ledger", "verify", "--anchor", f"patients:1:{account['head']}", "--ledger", place)
    assert code == 1
    assert "patients" in err
    with sqlite3.connect(place) as database:
        database.execute("UPDATE journal SET units = units - 1 WHERE kind = 'charge'")
    code, out, err = run("ledger", "verify", "--json", "--ledger", place)
    assert code == 1
    assert json.loads(out)["sound"] is False
    assert "tampered with" in err


@pytest.mark.parametrize("text", ["patients", "patients:one:" + "0" * 64, "patients:1:short"])
def test_an_anchor_of_another_form_is_refused(run, place, text):
    code, _, err = run("ledger", "verify", "--anchor", text, "--ledger", place)
    assert code == 1
    assert "ACCOUNT:ROW:HASH" in err


def test_keys_are_created_listed_and_revoked(run, place, told):
    made = told("key", "create", "bob", "--days", 30)
    code, out, _ = run("ledger", "key", "create", "eve", "--ledger", place)
    assert code == 0
    shown = out.splitlines()[-1]
    listed = told("key", "list")["keys"]
    assert [key["client"] for key in listed] == ["bob", "eve"]
    assert shown not in json.dumps(listed)
    assert made["key"] not in json.dumps(listed)
    code, out, _ = run("ledger", "key", "revoke", made["id"], "--ledger", place)
    assert code == 0
    assert "of bob is revoked" in out
    assert told("key", "revoke", listed[1]["id"])["revoked"] is not None
    _, out, _ = run("ledger", "key", "list", "--ledger", place)
    assert out.count("revoked 20") == 2


def test_a_share_goes_with_a_client_and_a_delta_with_an_epsilon(run, place):
    for options in (("--epsilon", 2, "--share", 0.5), ("--client", "ann", "--delta", 1e-5)):
        code, _, err = run("ledger", "grant", "patients", *options, *WHY, "--ledger", place)
        assert code == 1
        assert "--share belongs to --client" in err


@pytest.mark.parametrize("address", [":memory:", "sqlite://", "postgresql://host:abc/db", "mysql://host/db"])
def test_an_address_that_keeps_nothing_or_names_nothing_is_refused(run, address):
    code, _, err = run("ledger", "key", "create", "ann", "--ledger", address)
    assert code == 1
    assert "give one of these" in err
