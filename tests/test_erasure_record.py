"""What released models may tell about a person who leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from quietmax import PrivateHead
from quietmax.accounting import Guarantee
from quietmax.data import Schema
from quietmax.data.tables import table_rows
from quietmax.erasure_record import ModelRecord, in_words, model_record, to_html, together
from quietmax.errors import InvalidInput
from quietmax.estimators import save_private
from quietmax.estimators.evaluation import evaluate_folder
from quietmax.estimators.serialization import open_private
from quietmax.models import Model, TrainingSettings, save_model
from quietmax.models.stacked import initial_mlp

PEOPLE = 400
SCHEMA = Schema(
    label="ill",
    classes=("no", "yes"),
    bounds={"age": (0, 100)},
    complete=("age",),
    person="who",
    cohort="hash:4",
)


def people(**names: object) -> pd.DataFrame:
    age = np.arange(PEOPLE) % 100
    who = names.get("who", [f"P{number}" for number in range(PEOPLE)])
    return pd.DataFrame({"who": who, "age": age, "ill": np.where(age > 50, "yes", "no")})


def head(folder: Path, *, holdout: float = 0.0, cohort: str | None = None, after: Path | None = None) -> Path:
    """Train a head on everybody, or a version of a series."""
    rows, trained = table_rows(people(), SCHEMA, holdout=holdout), PrivateHead(1.0, 1e-5, declared_size=100)
    if after is None:
        trained.fit(rows, cohort=cohort)
    else:
        trained.update(rows, cohort=str(cohort), after=after)
    return save_private(trained, folder, dataset="people")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    head(folder / "everybody")
    head(folder / "held", holdout=0.3)
    first = head(folder / "1", cohort="1")
    head(folder / "2", cohort="2", after=first)
    network = Model(initial_mlp((1, 2, 2), "tanh", (0,)), TrainingSettings((2,)), 10, "people", 0)
    save_model(network, folder / "plain")
    return folder


def test_a_model_trained_on_everybody_may_have_had_the_person(folders: Path) -> None:
    record = model_record(folders / "everybody", "P1")
    assert record.trained_on == "maybe"
    assert record.guarantee is not None
    assert record.guarantee.unit == "person"
    assert "is right at most" in record.in_words


def test_the_holdout_rule_of_a_model_says_who_was_left_out(folders: Path) -> None:
    held = table_rows(people(), SCHEMA, holdout=0.3).test.records()
    out = {name for records in held for name in (() if records.persons is None else records.persons)}
    assert 0 < len(out) < PEOPLE
    for number in range(40):
        record = model_record(folders / "held", f" P{number}")
        assert (record.trained_on == "no") == (f"P{number}" in out)


def test_a_hash_of_cohorts_says_in_which_version_a_person_may_have_been(folders: Path) -> None:
    rule = table_rows(people(), SCHEMA).cohorts
    assert rule is not None
    for number in range(20):
        part = int(rule.of_persons([f"P{number}".encode()])[0])
        first, second = (model_record(folders / each, f"P{number}") for each in "12")
        assert (first.trained_on, second.trained_on) == (
            "maybe" if part == 1 else "no",
            "maybe" if part in (1, 2) else "no",
        )
        assert f"part {part} of hash:4" in first.because


def test_a_series_counts_once_and_other_models_add_up(folders: Path) -> None:
    first, second, other = (model_record(folders / each, "P1") for each in ("1", "2", "everybody"))
    one, both, all_of_them = together([second]), together([first, second]), together([first, second, other])
    assert one is not None
    assert all_of_them is not None
    assert both == one
    assert all_of_them.mu == pytest.approx(np.hypot(one.mu, other.guarantee.mu))  # type: ignore[union-attr,arg-type]
    assert together([replace(first, series=frozenset()), second]).mu > one.mu  # type: ignore[union-attr,operator]


def test_an_earlier_version_with_dear_evaluations_adds_up_too(tmp_path: Path) -> None:
    first = head(tmp_path / "1", cohort="1")
    second = head(tmp_path / "2", cohort="2", after=first)
    model = open_private(first)
    rows = table_rows(people(), SCHEMA).of_cohort("1")
    evaluate_folder(first, model, rows, mu=3.0)
    assert together([model_record(each, "P1") for each in (first, second)]).mu > 3.0  # type: ignore[union-attr,operator]


def test_without_a_guarantee_nothing_limits_what_a_model_tells(folders: Path) -> None:
    plain, known = model_record(folders / "plain", "P1"), model_record(folders / "1", "P1")
    assert plain.trained_on == "maybe"
    assert "No guarantee" in plain.in_words
    assert together([plain, known]) is None
    assert "cannot state the sum" in in_words([plain, known])[0]
    refuted = replace(known, guarantee=replace(known.guarantee, status="refuted", because="No."))  # type: ignore
    assert together([refuted]) is None
    conditional = replace(known, guarantee=replace(known.guarantee, status="conditional", because="If."))  # type: ignore
    assert together([conditional]).status == "conditional"  # type: ignore[union-attr]
    approximate = Guarantee("approximate", epsilon=1.0, delta=1e-5, status="proven", because="A test.")
    assert together([replace(known, guarantee=approximate)]) is None


def test_a_person_column_of_numbers_needs_the_number_as_the_table_has_it(tmp_path: Path) -> None:
    table = people(who=range(PEOPLE))
    trained = PrivateHead(1.0, 1e-5, declared_size=PEOPLE, schema=replace(SCHEMA, cohort=None)).fit(table)
    folder = save_private(trained, tmp_path / "model", dataset="people")
    assert model_record(folder, "7").trained_on == "maybe"
    for name in ("007", "7.0", "seven"):
        with pytest.raises(InvalidInput, match="without zeros before it"):
            model_record(folder, name)


def test_the_page_states_what_is_promised_and_escapes_what_it_shows() -> None:
    page = to_html([ModelRecord("<model>", "maybe", "<because>", None)], "0123456789abcdef")
    assert "0123456789abcdef" in page
    assert "&lt;model&gt;" in page
    assert "<because>" not in page
    for promise in (
        "<b>Promised</b>",
        "<b>Not promised</b>",
        "that is for its owner to do",
        "stay as they are",
    ):
        assert promise in " ".join(page.split())
    assert "http" not in page
