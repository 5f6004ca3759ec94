"""Names of classes, folders and accounts are printed as they are, whatever brackets and colons they hold."""

from __future__ import annotations

import json

import pytest
from rich.color import ColorSystem

from quietmax.accounting import PureCost
from quietmax.cli._output import console, errors, print_table, progress_bar
from quietmax.ledger import Charge, Ledger, Terms

DECLARED = ("--label", "income", "--bounds", "age=0:100")


@pytest.fixture
def bracketed(tmp_path):
    """The file of a table with the given names of classes."""

    def write(*names: str):
        path = tmp_path / "people.csv"
        path.write_text("age,income\n" + "".join(f"{age},{names[age > 50]}\n" for age in range(1, 100)))
        return path

    return write


def test_paid_answers_are_printed_whatever_the_classes_are_called(run, bracketed, tmp_path):
    asked = tmp_path / "asked.csv"
    asked.write_text("age\n10\n95\n")
    folder = tmp_path / "crowd"
    code, _, _ = run(
        "train", bracketed("[/x]", "[low]"), *DECLARED, "--classes", "[/x],[low]", "--private", "teachers",
        "--teachers", 3, "--queries", 4, "--epsilon", 4000, "--declared-size", 60, "-o", folder,
    )  # fmt: skip
    assert code == 0
    code, out, err = run("predict", "--model", folder, "--input", asked, "--json")
    assert (code, err) == (0, "")
    labels = json.loads(out)["labels"]
    code, out, err = run("predict", "--model", folder, "--input", asked)
    assert (code, err) == (0, "")
    assert [line.split("│")[2].strip() for line in out.splitlines() if line.startswith("│")] == labels


def test_a_folder_with_brackets_in_its_name_is_reported(run, bracketed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    declared = (bracketed("no", "yes"), *DECLARED, "--classes", "no,yes")
    code, out, _ = run("train", *declared, "--private", "head", "-o", "we[/ird]")
    assert code == 0
    assert "we[/ird]" in out
    code, out, _ = run("card", "we[/ird]")
    assert code == 0
    assert "we[/ird]" in out


def test_the_head_of_a_journal_at_row_100_can_be_written_down(run, tmp_path, monkeypatch):
    monkeypatch.setattr(console, "_width", 200)
    place = tmp_path / "ledger.sqlite"
    with Ledger(place) as ledger:
        account = ledger.open_account("acc", PureCost(1.0), Terms(1.0))
        ann = ledger.client("ann")
        for _ in range(99):
            ledger.charge(Charge(account.id, ann, "m/1", 1, rows=1))
        head = ledger.account("acc").head
    code, out, _ = run("ledger", "status", "--ledger", place)
    assert code == 0
    assert f"acc:100:{head}" in out
    code, _, _ = run("ledger", "verify", "--ledger", place, "--anchor", f"acc:100:{head}")
    assert code == 0


def test_titles_captions_and_progress_are_shown_as_they_are(capsys, monkeypatch):
    print_table("[/title] :100:", ("[/column]", ":x:"), [("[red]", ":x:")], caption="[/caption]")
    told = capsys.readouterr().out
    assert all(each in told for each in ("[/title] :100:", "[/column]", ":x:", "[red]", "[/caption]"))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(errors, "_force_terminal", True)
    monkeypatch.setattr(errors, "_width", 120)
    monkeypatch.setattr(errors, "is_interactive", True)
    with progress_bar("training [/x]") as progress:
        progress(1, 2)
    assert "training [/x]" in capsys.readouterr().err


def test_styles_still_colour_what_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(console, "_force_terminal", True)
    monkeypatch.setattr(console, "_color_system", ColorSystem.STANDARD)
    monkeypatch.setattr(console, "no_color", False)
    console.print("Guarantee", style="green")
    assert capsys.readouterr().out == "\x1b[32mGuarantee\x1b[0m\n"
