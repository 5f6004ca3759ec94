from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pyarrow
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quietmax.data import Schema, check_table, encode_table
from quietmax.data.draft import Proposal, _infer_classes, _propose, _round_outwards, _with_proposals


def declared(values: Any, name: str = "x") -> dict[str, Any]:
    return dict(_propose(name, values if isinstance(values, pd.Series) else pd.Series(values)).declared)


@pytest.mark.parametrize(
    ("low", "high", "bounds"),
    [
        (17, 90, (0, 100)),
        (0, 99_999, (0, 100_000)),
        (0, 100, (0, 100)),
        (0, 0, (0, 1)),
        (5, 5, (0, 5)),
        (-3, -3, (-3, 0)),
        (0.02, 0.7, (0, 0.8)),
        (1987, 2021, (1980, 2030)),
        (-12, 35, (-20, 40)),
        (-90, -17, (-100, 0)),
        (36.1, 41.9, (36, 42)),
    ],
)
def test_bounds_are_rounded_outwards(low: float, high: float, bounds: tuple[float, float]) -> None:
    assert _round_outwards(low, high) == pytest.approx(bounds)


@given(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12))
def test_rounded_bounds_hold_the_values_and_differ(first: float, second: float) -> None:
    low, high = sorted((first, second))
    assume(high == low or high - low > 1e-9 * max(abs(low), abs(high), 1e-280))
    assume(max(abs(low), abs(high)) > 1e-280 or low == high == 0)
    down, up = _round_outwards(low, high)
    slack = 1e-9 * max(abs(low), abs(high))
    assert down <= low + slack
    assert up >= high - slack
    assert down < up


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["17", "90", "NA"], {"bounds": (0, 100)}),
        (["", "?", None], {"ignore": True}),
        (["Yes", "no", "", "TRUE"], {"booleans": True}),
        (["0", "1", "1"], {"booleans": True}),
        (["a", "b", "a"], {"categories": ("a", "b")}),
        (["North", "north", "north", "South"], {"categories": ("South", "north"), "ignore_case": True}),
        (["2020-01-31", "2021-06-01"], {"dates": ("2020-01-01", "2021-12-31")}),
        (["2020-01-31 08:00", "2021-06-01T09:30:00Z"], {"dates": ("2020-01-01", "2021-12-31")}),
        (["31.01.2020", "1.6.2021"], {"dates": ("2020-01-01", "2021-12-31"), "date_formats": "%d.%m.%Y"}),
        (["01/31/2020", "06/01/2021"], {"dates": ("2020-01-01", "2021-12-31"), "date_formats": "%m/%d/%Y"}),
        (
            ["31 Jan 2020 08:30", "1 Jun 2021 09:00"],
            {"dates": ("2020-01-01", "2021-12-31"), "date_formats": "%d %b %Y %H:%M"},
        ),
        (["1.234,50", "7,25", "12"], {"bounds": (0, 1500), "decimal": ",", "thousands": "."}),
        (["1,5", "2,25"], {"bounds": (1.5, 2.3), "decimal": ","}),
        (["1,234.5", "12"], {"bounds": (0, 1500), "thousands": ","}),
        (["1 234", "45\u00a0678"], {"bounds": (0, 50_000), "thousands": " "}),
        (["34", "61", "-", "n.a."], {"bounds": (30, 70), "missing_values": ("-", "n.a.")}),
        (["2020-01-31", "None"], {"dates": ("2020-01-01", "2020-12-31"), "missing_values": ("None",)}),
        (["0", "1", "2", "3+"], {"categories": ("0", "1", "2", "3+")}),
        (["$1,200.50", "$7", "-$5"], {"bounds": (-1000, 2000), "thousands": ",", "units": "$"}),
        (["1.200,50 €", "7 €"], {"bounds": (0, 1500), "decimal": ",", "thousands": ".", "units": "€"}),
        (["12%", "5%", ""], {"bounds": (0, 12), "units": "%"}),
        (["K1", "K2", "K3"], {"categories": ("K1", "K2", "K3")}),
        (["01234", "90210"], {"categories": ("01234", "90210")}),
        ([*map(str, range(40)), "unknown"], {"bounds": (0, 40), "missing_values": ("unknown",)}),
        ([*map(str, range(5, 40)), "-999"], {"bounds": (0, 40), "missing_values": ("-999",)}),
    ],
)
def test_the_values_say_what_a_column_holds(cells: list[Any], expected: dict[str, Any]) -> None:
    assert declared(pd.Series(cells, dtype="str")) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pd.Series([1.5, math.nan, 3]), {"bounds": (0, 3)}),
        (pd.Series([True, False]), {"booleans": True}),
        (pd.Series([0, 1, 1]), {"booleans": True}),
        (pd.Series([math.nan, math.nan]), {"ignore": True}),
        (pd.Series([math.inf, 2.0, 8.0]), {"bounds": (0, 8)}),
        (pd.Series(pd.to_datetime(["2020-05-05", None])), {"dates": ("2020-01-01", "2020-12-31")}),
        (
            pd.Series(pd.arrays.ArrowExtensionArray(pyarrow.array([1, None, 90], pyarrow.int8()))),
            {"bounds": (0, 100)},
        ),
        (pd.Series(pd.arrays.ArrowExtensionArray(pyarrow.array([[1], [2]]))), {"ignore": True}),
    ],
)
def test_the_type_of_a_column_counts_too(values: Any, expected: dict[str, Any]) -> None:
    assert declared(values) == expected


def test_small_values_among_large_ones_are_put_on_a_log_scale() -> None:
    assert declared([0] * 50 + [20_000, 99_999])["scales"] == "log"
    assert "scales" not in declared([*range(0, 100_000, 1_000)])


def test_strings_with_many_values_are_hashed_and_free_text_is_ignored() -> None:
    cities = [f"city {number % 80}" for number in range(400)]
    assert declared(cities) == {"hashed": 64}
    notes = [f"called on day {number} and asked about the loan" for number in range(100)]
    assert "free text" in _propose("notes", pd.Series(notes)).because
    names = [f"name{number}x" for number in range(100)]
    assert "nearly every row" in _propose("surname", pd.Series(names)).because
    for name in ("", "Index", "Unnamed: 0"):
        assert "number the rows" in _propose(name, pd.Series(range(100))).because
    assert declared([f"{number:05}" for number in range(100)], "zip_code") == {"hashed": 64}
    assert declared([*range(10_000, 10_100)], "PLZ") == {"hashed": 64}


@pytest.mark.parametrize(
    ("name", "values", "identifies"),
    [
        ("customer_id", [number // 3 for number in range(300)], 2),
        ("Kunden-Nr", [f"K{number // 3}" for number in range(300)], 2),
        ("patientID", [*range(300)], 2),
        ("email", [f"a{number}@example.org" for number in range(300)], 2),
        ("id", [number // 3 for number in range(300)], 1),
        ("loan_id", [*range(300)], 0),
        ("LoanId", [*range(300)], 0),
        ("Account No.", [*range(300)], 0),
        ("loan_id", [number // 3 for number in range(300)], 1),
        ("Numéro de prêt", [*range(300)], 0),
        ("Numéro d'assuré", [*range(300)], 2),
        ("Identifiant du patient", [*range(300)], 2),
        ("Mitgliedsnummer", [*range(300)], 2),
        ("id_paciente", [number // 3 for number in range(300)], 2),
        ("numero_de_hijos", [number % 5 for number in range(300)], 0),
        ("customer_age", [number % 80 for number in range(300)], 0),
        ("number_of_children", [number % 5 for number in range(300)], 0),
        ("paid", [*range(300)], 0),
        ("customer_type", [("new", "old")[number % 2] for number in range(300)], 0),
        ("house_no", [number % 40 for number in range(300)], 0),
        ("customer_id", [float(number) + 0.5 for number in range(300)], 0),
    ],
)
def test_names_and_values_say_who_is_a_person(name: str, values: list[Any], identifies: int) -> None:
    assert _propose(name, pd.Series(values)).identifies == identifies


@pytest.mark.parametrize("kind", ["int64", "str"])
def test_long_integers_that_are_nearly_unique_are_ids(kind: Any) -> None:
    accounts = pd.Series([123_456_789_012 + 7_919 * number for number in range(100)])
    assert declared(accounts.astype(kind), "Compte") == {"ignore": True}
    assert "bounds" in declared((accounts // 10).astype(kind), "Compte")
    assert "bounds" in declared(pd.Series([123_456_789_012, 234_567_890_123] * 50).astype(kind), "amount")


def test_dates_that_fit_two_formats_are_said_to() -> None:
    assert "also fit %m/%d/%Y" in _propose("day", pd.Series(["01/02/2020", "03/04/2021"])).because


def test_numbers_whose_separator_is_unclear_are_said_to_be() -> None:
    for cells in (["1,234", "5,678"], ["1.234", "5.678"]):
        assert "check whether" in _propose("x", pd.Series(cells)).because
    assert "check whether" not in _propose("x", pd.Series(["1.25", "5.678"])).because


def test_classes_are_in_the_order_of_numbers_or_letters_and_of_the_usual_spelling() -> None:
    assert _infer_classes(pd.Series(["10", "9", "-1"], dtype=object)) == (("-1", "9", "10"), False)
    assert _infer_classes(pd.Series(["b", "a", "A", "a"], dtype=object)) == (("a", "b"), True)


def test_what_is_declared_is_not_replaced_by_a_proposal() -> None:
    schema = Schema(scales={"x": "linear"}, booleans=("b",))
    proposals = {
        "x": Proposal({"bounds": (0, 9), "scales": "log"}, ""),
        "b": Proposal({"booleans": True}, ""),
    }
    completed = _with_proposals(schema, proposals)
    assert (completed.scales, completed.bounds, completed.booleans) == (
        {"x": "linear"},
        {"x": (0, 9)},
        ("b",),
    )


cells = st.one_of(
    st.sampled_from(
        ["", "NA", "yes", "No", "1", "0", "1,5", "1.234,5", "2020-01-01", "31.12.2020", "a b c d e f g"]
    ),
    st.text(max_size=5),
    st.integers(-(10**9), 10**9).map(str),
    st.floats(allow_nan=False).map(repr),
)


@given(st.lists(cells, min_size=2, max_size=40), st.sampled_from(["x", "customer_id", "zip"]))
def test_a_column_can_be_read_as_proposed_without_loss(values: list[str], name: str) -> None:
    table = pd.DataFrame(
        {
            name: pd.Series(values, dtype="str"),
            "y": ["a", "b"] * (len(values) // 2) + ["a"] * (len(values) % 2),
        }
    )
    schema = _with_proposals(Schema(label="y", classes=("a", "b")), {name: _propose(name, table[name])})
    report = check_table(table, schema)
    assert not report.problems
    for column in report.columns:
        finite = [value for value in values if "inf" not in value.casefold() and "e+30" not in value]
        assert column.losses.unknown == column.losses.unreadable == 0
        assert column.losses.clipped <= len(values) - len(finite)
    if report.columns:
        assert len(encode_table(table, schema)) == len(values)
