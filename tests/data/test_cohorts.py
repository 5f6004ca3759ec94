"""Which cohort a person is in: a function of that person's rows and public numbers alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from quietmax.data import Schema, cohorts
from quietmax.data.cohorts import CohortRule, ErasureList, people_of, person_digests
from quietmax.data.encoding import CategoricalColumn, DateColumn
from quietmax.data.tables import TableRows, table_rows
from quietmax.errors import InvalidInput

SCHEMA = Schema(
    label="ill",
    classes=("no", "yes"),
    person="person",
    bounds={"age": (0, 100)},
    dates={"visit": ("2026-01-01", "2027-06-30")},
    categories={"wave": ("pilot", "first", "second")},
    ignore=("visit", "wave"),
    cohort="visit:month",
)
VISITS = pd.DataFrame(
    [
        ("ann", 20, "2026-01-31", "first", "no"),
        ("ann", 21, "2026-02-01", "pilot", "yes"),  # comes back
        ("bob", 30, "2026-02-28", "second", "no"),
        ("cid", 40, "2026-03-01", "first", "yes"),
        ("cid", 41, "2026-02-27", "", "no"),  # an earlier row that stands later
        ("dan", 50, "", "other", "yes"),  # says nothing
        ("eve", 60, "2025-12-31", "", "no"),  # a date before the declared ones counts as missing
        ("eve", 61, "2026-02-02", "second", "no"),
    ],
    columns=["person", "age", "visit", "wave", "ill"],
)


def people(rows: TableRows) -> set[str]:
    return {str(name) for records in rows.records() for name in records.persons}  # type: ignore[union-attr]


def of(schema: Schema, name: str, table: Any = VISITS) -> TableRows:
    return table_rows(table, schema).of_cohort(name)


def test_a_person_belongs_to_the_cohort_of_their_first_date_with_all_rows() -> None:
    assert people(of(SCHEMA, "2026-01")) == {"ann"}
    assert people(of(SCHEMA, "2026-02")) == {"bob", "cid", "eve"}
    assert people(of(SCHEMA, "2026-03")) == set()
    ages = [age for records in of(SCHEMA, "2026-01").records() for age in records.features[:, 0]]
    assert ages == pytest.approx([0.2, 0.21])


def test_a_person_belongs_to_the_first_category_in_the_public_order() -> None:
    schema = replace(SCHEMA, cohort="wave")
    assert people(of(schema, "pilot")) == {"ann"}
    assert people(of(schema, "first")) == {"cid"}
    assert people(of(schema, "second")) == {
        "bob",
        "eve",
    }  # nobody states another category than the declared ones


def test_a_keyed_hash_divides_people_and_knows_no_other_row() -> None:
    schema = replace(SCHEMA, cohort="hash:3")
    parts = [people(of(schema, str(part))) for part in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == ["ann", "bob", "cid", "dan", "eve"]
    assert [people(of(schema, str(part), VISITS[::-1])) for part in (1, 2, 3)] == parts
    others = [people(of(replace(SCHEMA, cohort="hash:3:1"), str(part))) for part in (1, 2, 3)]
    assert others != parts  # another key


def test_without_a_person_column_cohorts_are_by_row() -> None:
    schema = replace(SCHEMA, person=None, ignore=(*SCHEMA.ignore, "person"))
    assert sum(map(len, of(schema, "2026-02").records())) == 4
    hashed = replace(schema, cohort="hash:2")
    assert sum(len(records) for part in "12" for records in of(hashed, part).records()) == len(VISITS)


@pytest.mark.parametrize("period", ["year", "quarter", "month", "week", "day"])
def test_each_date_is_in_the_period_of_its_name(period: str) -> None:
    rule = CohortRule(f"visit:{period}", DateColumn("visit", "2024-12-25", "2027-01-10"))
    days = pd.date_range("2024-12-25", "2027-01-10")
    names: list[str] = {
        "year": [*days.strftime("%Y")],
        "quarter": [f"{day.year}-Q{day.quarter}" for day in days],
        "month": [*days.strftime("%Y-%m")],
        "week": [*days.strftime("%G-W%V")],
        "day": [*days.strftime("%Y-%m-%d")],
    }[period]
    numbers = rule.of_rows(pd.DataFrame({"visit": days.strftime("%Y-%m-%d")}))
    assert numbers.tolist() == [rule.number(name) for name in names]
    assert (np.diff(numbers) >= 0).all()


@pytest.mark.parametrize(
    "name", ["2026-13", "2026-1", "2025-12", "2027-07", "2026", "", "2026-02 ", "2026-Q1"]
)
def test_a_cohort_that_the_rule_does_not_have_is_an_error(name: str) -> None:
    with pytest.raises(InvalidInput, match="months from '2026-01' to '2027-06'"):
        of(SCHEMA, name)


@pytest.mark.parametrize(
    "cohort", ["visit", "wave:month", "age", "nothing:month", "hash:1", "hash:x", "visit:hour", "hash:2:1:1"]
)
def test_a_rule_that_cannot_be_read_is_an_error(cohort: str) -> None:
    with pytest.raises(InvalidInput, match="cohort"):
        table_rows(VISITS, replace(SCHEMA, cohort=cohort))


def test_a_table_without_a_rule_has_no_cohorts() -> None:
    with pytest.raises(InvalidInput, match="declares no `cohort`"):
        of(replace(SCHEMA, cohort=None), "2026-01")


def test_a_rule_survives_json() -> None:
    for rule in (
        CohortRule("hash:12:7"),
        CohortRule("visit:week", DateColumn("visit", "2026-01-01", "2027-06-30")),
        CohortRule("wave", CategoricalColumn("wave", ("a", "b"))),
    ):
        assert CohortRule.from_json(rule.to_json()) == rule


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_files_in_parts_and_frames_have_the_same_cohorts(tmp_path: Path, kind: str) -> None:
    for number, part in enumerate((VISITS[:3], VISITS[3:5], VISITS[5:])):
        if kind == "csv":
            part.to_csv(tmp_path / f"{number}.csv", index=False)
        else:
            part.to_parquet(tmp_path / f"{number}.parquet", index=False)
    for name in ("2026-01", "2026-02"):
        assert people(of(SCHEMA, name, str(tmp_path))) == people(of(SCHEMA, name))


def test_many_rows_are_compared_in_parts_without_losing_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohorts, "_MOST_WAITING", 100)
    rule = CohortRule("wave", CategoricalColumn("wave", ("a", "b")))
    names = np.array([f"person {number % 700}" for number in range(2000)], dtype=object)
    numbers = np.where(np.arange(2000) < 300, 0, 1)
    parts = ((names[start : start + 50], numbers[start : start + 50]) for start in range(0, 2000, 50))
    cohort = people_of(rule, "b", parts)
    assert cohort.members is not None
    assert len(cohort.members) == 400
    assert not np.isin(person_digests(names[:300]), cohort.members).any()


def test_people_on_an_erasure_list_are_left_out_whoever_else_is_there(tmp_path: Path) -> None:
    ErasureList.add(tmp_path / "erased", "cid")
    listed = ErasureList.from_file(tmp_path / "erased")
    assert people(table_rows(VISITS, SCHEMA).without(listed)) == {"ann", "bob", "dan", "eve"}
    assert people(of(SCHEMA, "2026-02").without(listed)) == {"bob", "eve"}
    assert people(of(SCHEMA, "2026-02", VISITS[3:5]).without(listed)) == set()
    with pytest.raises(InvalidInput, match="use one list"):
        table_rows(VISITS, SCHEMA).without(listed).without(ErasureList("00" * 32))
    with pytest.raises(InvalidInput, match="requires a `person` column"):
        table_rows(
            VISITS, replace(SCHEMA, person=None, cohort=None, ignore=("person", *SCHEMA.ignore))
        ).without(listed)
