"""`quietmax ask`: all rows of a file, asked of a running service."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from quietmax.ledger import Terms
from quietmax.server import Client, Settings
from tests.cli.conftest import assert_error, document, printed, run
from tests.server.conftest import models
from tests.server.running_service import Running, running, some_people

__all__ = ["models"]


@pytest.fixture
def service(models: Path, tmp_path: Path) -> Iterator[Running]:
    """A service of the model `table`, which answers four rows at a time."""
    some_people(6).drop(columns="approved").to_csv("people.csv", index=False)
    Path("empty.txt").touch()
    shutil.copytree(models / "table", tmp_path / "table")
    with running(
        f"sqlite:///{tmp_path / 'served.sqlite'}",
        [f"table={tmp_path / 'table'}"],
        budget=Terms(10.0),
        queries=20,
        settings=Settings(max_rows=4, answer_cache=False),
    ) as started:
        Path("key.txt").write_text(f"{started.key}\n", encoding="utf-8")
        yield started


def test_a_file_is_answered_and_a_second_run_pays_nothing(
    service: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = document("ask", service.url, "table", "people.csv", "--key-file", "key.txt")
    assert (first["rows"], first["new_answers"], first["output"]) == (6, 6, "people.answers.csv")
    lines = Path("people.answers.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "label,probability of no,probability of yes"
    assert len(lines) == 7
    monkeypatch.setenv("QUIETMAX_KEY", service.key)
    told = printed("ask", service.url, "table/1", "people.csv", "-o", "again.csv")
    left = first["remaining_answers"]
    assert told == f"6 answers are in again.csv. 0 new answers were charged; {left} are left.\n"
    assert Path("again.csv").read_text(encoding="utf-8").splitlines() == lines


def test_an_interrupted_run_says_how_to_go_on_and_writes_nothing(
    service: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, sent = Client._send, []

    def interrupt(self: Client, *request: object) -> object:
        sent.append(request)
        if len(sent) == 2:
            raise KeyboardInterrupt
        return send(self, *request)  # type: ignore[arg-type]

    monkeypatch.setattr(Client, "_send", interrupt)
    asked = ("ask", service.url, "table", "people.csv", "--key-file", "key.txt")
    assert_error(run(*asked), 130, "Run the same command again: what was charged is not charged again.")
    assert not Path("people.answers.csv").exists()
    assert document(*asked)["new_answers"] == 2


def test_errors_are_one_sentence_and_nothing_is_written_or_charged(service: Running) -> None:
    before = service.ledger.account("people").spent_units
    Path("wrong.csv").write_text("age\n3\n", encoding="utf-8")
    Path("bad.txt").write_text("qm_nonsense", encoding="utf-8")
    key = ("--key-file", "key.txt")
    for code, words, arguments in (
        (1, "An API key is required", ("table", "people.csv")),
        (1, "The API key is wrong, revoked or expired.", ("table", "people.csv", "--key-file", "bad.txt")),
        (1, "cannot be read", ("table", "people.csv", "--key-file", "absent.txt")),
        (1, "must hold one API key", ("table", "people.csv", "--key-file", "empty.txt")),
        (2, "no such model", ("nobody", "people.csv", *key)),
        (1, "no column 'income', 'région'", ("table", "wrong.csv", *key)),
        (1, "There is no file", ("table", "absent.csv", *key)),
        (2, "--output must be another file", ("table", "people.csv", *key, "-o", "people.csv")),
        (
            1,
            "The answers cannot be written to none/answers.csv",
            ("table", "people.csv", *key, "-o", "none/answers.csv"),
        ),
    ):
        assert_error(run("ask", service.url, *arguments), code, words)
    some_people(60).to_csv("people.csv", index=False)
    assert service.ledger.account("people").spent_units == before
    result = run("ask", service.url, "table", "people.csv", *key)
    assert_error(
        result, 1, "Privacy budget exhausted: 4 answers requested", "44 rows before", "same file and key"
    )
    assert not Path("people.answers.csv").exists()
