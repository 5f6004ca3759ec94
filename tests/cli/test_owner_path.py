"""From a messy CSV file to a served answer in five commands; the service is a process of its own."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietmax.server.client import Client
from tests.cli.conftest import document, printed

PERSONS = 400
REGIONS = ("Île-de-France", "Bretagne", "Provence, Alpes")
YES_NO = (("no", "NO", "False", "n", "0"), ("Yes", "yes", "TRUE", "y", "1"))
(HEADER,) = csv.reader(
    [" Customer No ,Âge,Monthly Income (€) ,Région,Smoker,Member Since,Remarks,Fax,Defaulted"]
)


def write_messy_table(path: Path) -> None:
    """Write loans of customers as an office exports them.

    A byte-order mark, blanks around the headers and cells, accents, quoted commas and quotes, missing values in several
    spellings, decimal commas with thousands separators, mixed case, several rows per customer, dates, free text and an
    empty column.
    """
    generator = np.random.default_rng(0)
    rows: list[tuple[str, ...]] = []
    for person in range(PERSONS):
        age, income = int(generator.integers(18, 80)), float(generator.gamma(4, 800))
        region, smoker = int(generator.integers(3)), int(generator.integers(2))
        for _ in range(int(generator.integers(1, 4))):
            joined = np.datetime64("2012-01-01") + generator.integers(0, 4000)
            score = (age - 49) / 20 - (income - 3200) / 1600 + (region == 0) + generator.normal(0, 0.3)
            rows.append(
                (
                    f"C-{person:04d}",
                    _or_missing(generator, f" {age} "),
                    _or_missing(generator, _french(income)),
                    _in_some_case(generator, REGIONS[region]),
                    YES_NO[smoker][generator.integers(5)],
                    joined.astype(object).strftime("%d.%m.%Y"),
                    f'said "call me at {generator.integers(24)}", then number {len(rows)} again',
                    "",
                    _in_some_case(generator, "oui" if score > 0.3 else "non"),
                )
            )
    generator.shuffle(rows)
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([HEADER, *rows])


def _french(amount: float) -> str:
    """1.234,50"""
    return f"{amount:,.2f}".translate(str.maketrans(",.", ".,"))


def _or_missing(generator: np.random.Generator, text: str) -> str:
    return str(generator.choice(["NA", "", "?"])) if generator.random() < 0.05 else text


def _in_some_case(generator: np.random.Generator, text: str) -> str:
    return (text, text.upper(), text.lower())[generator.choice(3, p=[0.8, 0.1, 0.1])]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_messy_table(Path("loans.csv"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIETMAX_LEDGER", str(Path("ledger.sqlite")))
    monkeypatch.setenv("NO_PROXY", "*")
    return tmp_path


@contextmanager
def _serving(*words: str) -> Iterator[str]:
    """The address of a service that runs in a process of its own."""
    program = [sys.executable, "-c", "from quietmax.cli import main; main()", "serve", *words]
    quiet: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    service = subprocess.Popen([*program, "--port", "0", "--json"], **quiet)
    try:
        assert service.stdout is not None
        told = ""
        while not told.rstrip().endswith("}") or told.count("{") != told.count("}"):
            line = service.stdout.readline()
            assert line, "the service ended before it said where it listens"
            told += line
        yield json.loads(told)["url"]
    finally:
        service.terminate()
        service.communicate(timeout=60)


def test_a_messy_file_becomes_a_served_model_in_five_commands(folder: Path) -> None:
    # 1. A draft finds everything, and nothing of it is confirmed.
    draft = printed("schema", "draft", "loans.csv", "--label", "Defaulted")
    proposed = tomllib.loads(draft)
    assert proposed["person"] == "Customer No"
    assert proposed["classes"] == ["non", "oui"]
    assert (proposed["ignore"], proposed["text"]) == (["Fax"], ["Remarks"])
    assert proposed["booleans"] == ["Smoker"]
    assert sorted(proposed["ignore_case"]) == ["Defaulted", "Région"]
    assert sorted(proposed["categories"]["Région"]) == sorted(REGIONS)
    assert proposed["date_formats"] == {"Member Since": "%d.%m.%Y"}
    assert proposed["decimal"] == {"Monthly Income (€)": ","}
    assert proposed["thousands"] == {"Monthly Income (€)": "."}
    columns = {name.strip() for name in HEADER} - {"Customer No", "Defaulted"}
    confirm = proposed["confirm"]
    assert {key for key, how in confirm.items() if isinstance(how, str)} == {"person", "classes"}
    assert {name for how in confirm.values() if isinstance(how, dict) for name in how} == columns | {
        "Defaulted"
    }

    # The owner knows better what ages there can be and that the remarks say nothing, and confirms the rest.
    edited = draft[: draft.index("\n[confirm]\n")].replace('"Âge" = [0, 80]', '"Âge" = [18, 100]')
    edited = edited.replace('ignore = ["Fax"]', 'ignore = ["Fax", "Remarks"]')
    edited = edited.replace('text = ["Remarks"]\n', "")
    assert "[18, 100]" in edited
    assert "text = " not in edited
    (folder / "loans.toml").write_text(edited, encoding="utf-8")

    # 2. The check tells the owner what is lost.
    checked = document("schema", "check", "loans.csv")
    assert (checked["persons"], checked["unconfirmed"]) == (PERSONS, [])

    # 3. Training, with a fifth of the customers held out.
    options = ("--holdout", "0.2", "--epsilon", "4", "--declared-size", "320", "--output", "defaulted")
    trained = document("train", "head", "loans.csv", *options)
    assert (trained["unit"], trained["size"], trained["size_from"]) == ("person", 320, "declared")
    assert (trained["guarantee"]["status"], trained["guarantee"]["unit"]) == ("proven", "person")

    # 4. An accuracy that may be published, on the customers who were held out.
    evaluation = document("evaluate", "defaulted", "--data", "loans.csv")
    assert evaluation["publishable"]
    assert evaluation["composition"] == "parallel"
    assert evaluation["guarantee"]["mu"] == trained["guarantee"]["mu"]
    # In 60 trainings with their own noise: mean 0.925, standard deviation 0.025, at least 0.867.
    assert evaluation["accuracy"]["value"] > 0.7

    # 5. Columns in, class names out.
    rows = [(75, "512,00", "île-de-france", True, "03.05.2014"), (25, "9.000,50", "Bretagne", False, "")]
    names = ("Âge", "Monthly Income (€)", "Région", "Smoker", "Member Since")
    asked = [dict(zip(names, values, strict=True)) for values in rows]
    with _serving("defaulted", "--anonymous") as url, Client(url) as client:
        answer = client.infer("defaulted", asked)
    assert answer.labels.tolist() == ["oui", "non"]
    assert answer.probabilities is not None
    assert answer.probabilities.sum(axis=1) == pytest.approx([1, 1])
    assert answer.parameters["guarantee_status"] == "proven"
    assert answer.parameters["paid_at_training"]


def test_a_column_of_free_text_goes_all_the_way_from_the_draft_to_the_service(folder: Path) -> None:
    said = {
        "yes": "paid everything on time, a friendly customer",
        "no": "refused to pay, the lawyer was informed",
    }
    rows = [
        (f"visit {number} in {2000 + number % 20}: {said[label]}", str(20 + number % 60), label)
        for number, label in enumerate(["yes", "no"] * 60)
    ]
    with (folder / "notes.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("note", "age", "repaid"), *rows])

    draft = printed("schema", "draft", "notes.csv", "--label", "repaid")
    assert tomllib.loads(draft)["text"] == ["note"]
    assert "free text" in tomllib.loads(draft)["confirm"]["text"]["note"]
    (folder / "notes.toml").write_text(draft[: draft.index("\n[confirm]\n")] + "\n", encoding="utf-8")
    checked = document("schema", "check", "notes.csv")
    assert [(column["name"], column["kind"]) for column in checked["columns"]] == [
        ("note", "text"),
        ("age", "numeric"),
    ]

    options = ("--holdout", "0.3", "--epsilon", "50", "--declared-size", "84", "--output", "repaid")
    trained = document("train", "head", "notes.csv", *options)["guarantee"]
    assert trained["status"] == "proven"
    assert any(
        each.startswith("The sentence encoder all-MiniLM-L6-v2 (SHA-256 53aa5117")
        and each.endswith("was made without the private records.")
        for each in trained["assumptions"]
    )
    evaluation = document("evaluate", "repaid", "--data", "notes.csv")
    assert evaluation["publishable"]
    new = (said["no"], "30"), (said["yes"], ""), ("", "40")
    with (folder / "new.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("note", "age"), *new])
    predict = ("predict", "--model", "repaid", "--input", "new.csv")
    # Over many fits the logits of these two texts were 7 and 4 standard deviations away from 0.
    assert document(*predict)["labels"][:2] == ["no", "yes"]

    with _serving("repaid=repaid", "--anonymous", "--accept-weak") as url, Client(url) as client:
        answer = client.infer("repaid", [{"note": note, "age": age} for note, age in new])
    assert answer.labels[:2].tolist() == ["no", "yes"]
    assert answer.parameters["guarantee_status"] == "proven"
