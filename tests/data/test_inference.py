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


HUNDRED = range(100)
ACCOUNTS = [123_456_789_012 + 7_919 * number for number in HUNDRED]


@pytest.mark.parametrize(
    ("name", "cells", "expected", "said"),
    [
        (
            "x",
            [0] * 50 + [20_000, 99_999],
            {"bounds": (0, 100_000), "scales": "log"},
            "most values are small",
        ),
        ("x", [*range(0, 100_000, 1_000)], {"bounds": (0, 100_000)}, "bounds 0 to 100000"),
        ("x", [f"city {number % 80}" for number in range(400)], {"hashed": 64}, "many different values"),
        (
            "notes",
            [f"called on day {number} about a loan" for number in HUNDRED],
            {"text": True},
            "free text",
        ),
        ("surname", [f"name{number}x" for number in HUNDRED], {"ignore": True}, "nearly every row"),
        *((name, [*HUNDRED], {"ignore": True}, "number the rows") for name in ("", "Index", "Unnamed: 0")),
        ("zip_code", [f"{number:05}" for number in HUNDRED], {"hashed": 64}, ""),
        ("PLZ", [*range(10_000, 10_100)], {"hashed": 64}, "from the name"),
        ("Compte", ACCOUNTS, {"ignore": True}, "seem to be ids"),
        ("Compte", [*map(str, ACCOUNTS)], {"ignore": True}, "seem to be ids"),
        (
            "Compte",
            [account // 10 for account in ACCOUNTS],
            {"bounds": (12_345_670_000, 12_345_760_000)},
            "bounds",
        ),
        (
            "amount",
            [123_456_789_012, 234_567_890_123] * 50,
            {"bounds": (100_000_000_000, 300_000_000_000)},
            "bounds",
        ),
        (
            "day",
            ["01/02/2020", "03/04/2021"],
            {"dates": ("2020-01-01", "2021-12-31"), "date_formats": "%d/%m/%Y"},
            "also fit %m/%d/%Y",
        ),
        ("x", ["1,234", "5,678"], {"bounds": (0, 6000), "thousands": ","}, "check whether"),
        ("x", ["1.234", "5.678"], {"bounds": (0, 6)}, "check whether"),
        ("x", ["1.25", "5.678"], {"bounds": (0, 6)}, "from the values, rounded outwards"),
    ],
)
def test_a_proposal_follows_from_the_values_and_the_name_and_says_how(
    name: str, cells: list[Any], expected: dict[str, Any], said: str
) -> None:
    proposal = _propose(name, pd.Series(cells))
    assert dict(proposal.declared) == expected
    assert said in proposal.because


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
