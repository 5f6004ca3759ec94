from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quietmax.data.encoding import Encoding
from quietmax.data.schema import Schema
from quietmax.data.tables import encode_table
from quietmax.errors import InvalidInput
from quietmax.estimators.evaluation import EvaluationCharge, _noisy_evaluation, composed_guarantee
from quietmax.estimators.figures import BINS, GroupsOf, sensitivity
from quietmax.estimators.head.weights import HeadWeights
from tests.estimators.evaluated import TRAINING, UNITS, noisy, tables

GROUPS = GroupsOf("sex", ("f", "m", "missing or other"), 0, 2, None, True)
ROWS = st.lists(
    st.tuples(
        st.integers(0, 1), st.integers(0, 1), st.integers(0, 13), st.integers(0, 2), st.integers(0, UNITS)
    ),
    max_size=40,
)


@given(ROWS)
def test_one_person_adds_a_vector_of_sum_at_most_one_to_each_table(rows: list[tuple[int, ...]]) -> None:
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    counted = tables(groups=GROUPS)
    own = np.full(len(rows), max(len(rows), 1))
    counts = counted.count(table[:, 0], table[:, 1:].astype(np.int32), own)
    assert len(counts) == 4 + 2 * 14 + 3 * 8
    for part in np.split(counts, [4, 32]):
        assert (part >= 0).all()
        assert part.sum() <= UNITS
        assert part.sum() >= (UNITS - len(rows) if rows else 0)
    assert np.linalg.norm(counts / UNITS) <= counted.sensitivity == sensitivity(3)
    plain = tables().count(table[:, 0], table[:, 1:].astype(np.int32), own)
    assert np.array_equal(plain, counts[:32])
    assert np.linalg.norm(plain / UNITS) <= tables().sensitivity == sensitivity(2)


@pytest.mark.parametrize(("classes", "costs"), [(2, None), (2, ((0, 0.3), (0.7, 0))), (3, None)])
def test_every_row_is_answered_on_its_own_bit_for_bit(classes: int, costs: Any) -> None:
    """Answers in one large batch round differently from answers to single rows; these must not."""
    rng = np.random.default_rng(1)
    head = HeadWeights(rng.normal(size=(classes, 41)) * 5, np.zeros(40), 1.0, 1.0)
    features = rng.random(size=(300, 40)).astype(np.float32)
    counted = tables(classes, costs=costs, groups=GroupsOf("age", ("a", "b", "c"), 3, 1, (-1, 0.4), False))
    answers = counted.answers(head, None, features)
    for chosen in (rng.permutation(300), np.arange(7, 300, 3), np.array([5])):
        assert np.array_equal(counted.answers(head, None, features[chosen]), answers[chosen])
    probabilities = np.concatenate([head.predict_proba(row[None]) for row in features])
    predicted, bins, group, mass = answers.T
    if classes == 2:
        assert counted.edges is not None
        assert np.array_equal(predicted, probabilities[:, 1] > (0.3 if costs else 0.5))
        low, high = np.array(counted.edges)[bins], np.array(counted.edges)[bins + 1]
        assert ((low < probabilities[:, 1]) & (probabilities[:, 1] <= high)).all()
        assert np.abs(mass / UNITS - probabilities[:, 1]).max() <= 0.5 / UNITS
    else:
        assert np.array_equal(probabilities.argmax(axis=1), predicted)
        edges = np.linspace(1 / 3, 1, BINS + 1)
        found = np.searchsorted(edges, probabilities.max(axis=1), "right") - 1
        assert np.array_equal(np.clip(found, 0, 4), bins)
        assert np.abs(mass / UNITS - probabilities.max(axis=1)).max() <= 0.5 / UNITS
    assert np.array_equal(group, features[:, 3] >= np.float32(0.4))


class Overflowing:
    """A network that answers some rows with NaN or infinity."""

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def predict_proba(self, rows: np.ndarray) -> np.ndarray:
        return np.full((1, self.classes), rows[0, 0])


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("answer", [np.nan, np.inf, -np.inf, 1e30])
def test_a_row_whose_answer_is_no_probability_adds_no_more_than_others(classes: int, answer: float) -> None:
    counted = tables(classes, groups=GroupsOf("age", ("a", "b", "c"), 3, 1, (-1, 0.4), False))
    records = np.full((1, 4), answer, np.float32)
    counts = counted.count(np.array([1]), counted.answers(Overflowing(classes), None, records), None)
    assert counts.min() >= 0
    assert np.linalg.norm(counts / UNITS) <= counted.sensitivity


@pytest.mark.parametrize("groups", [None, GROUPS])
def test_the_noise_has_the_size_that_the_guarantee_states(groups: GroupsOf | None) -> None:
    evaluations = [noisy(np.zeros((2, 2), dtype=np.int64), seed, groups=groups) for seed in range(500)]
    found = [
        [
            *np.ravel(each.confusion),
            *np.ravel(each.calibration),
            *np.ravel([] if groups is None else each._groups),
        ]
        for each in evaluations
    ]
    expected = (2 if groups is None else 3) ** 0.5 / 0.268
    assert evaluations[0].noise == pytest.approx(expected, rel=1e-3)
    # The variance of 16,000 draws or more: five standard errors.
    assert np.var(found) == pytest.approx(expected**2, rel=5 * (2 / 16_000) ** 0.5)
    counted, charges = tables(groups=groups), [EvaluationCharge(0.268, "parallel")]
    nobody = counted.count(np.empty(0, np.int64), np.empty((0, 4), np.int32), None)
    both = _noisy_evaluation(nobody, counted, TRAINING, charges)
    assert both.noise == pytest.approx(expected, rel=1e-3)
    assert both.guarantee == composed_guarantee(TRAINING, charges)


FRAME = pd.DataFrame(
    {
        "sex": ["f", "m", "?", None, "f", "x"],
        "code": ["a", "b", "zz", None, "b", "a"],
        "smoker": ["yes", "no", "yes", None, "no", "no"],
        "age": [18, 30, 49.5, None, 50, 200],
        "pay": [0, 10, 999, None, 1000, 2000],
        "ill": ["no", "yes", "no", "yes", "no", "yes"],
    }
)
SCHEMA = Schema(
    label="ill",
    classes=("no", "yes"),
    categories={"sex": ("f", "m"), "code": ("a", "b")},
    booleans=("smoker",),
    bounds={"age": (18, 90), "pay": (0, 2000)},
    edges={"pay": (10, 1000)},
)


@pytest.mark.parametrize(
    ("by", "names", "expected"),
    [
        ("sex", ("f", "m"), [0, 1, 2, 2, 0, 2]),
        ("code", ("a", "b"), [0, 1, 2, 2, 1, 0]),
        ("smoker", ("no", "yes"), [1, 0, 1, 2, 0, 0]),
        (("age", [50, 30]), ("below 30", "30 to 50", "50 and above"), [0, 1, 1, 3, 2, 2]),
        ("pay", ("below 10", "10 to 1000", "1000 and above"), [0, 1, 1, 3, 2, 2]),
    ],
)
def test_the_group_of_a_row_follows_from_its_own_cell(by: Any, names: Any, expected: list[int]) -> None:
    records = encode_table(FRAME, SCHEMA)
    groups = GroupsOf.of(by, records.encoding)
    assert groups.names == (*names, "missing or other")
    assert groups.numbers(records.features).tolist() == expected
    for row in range(len(FRAME)):
        assert groups.numbers(records.features[row : row + 1]).tolist() == expected[row : row + 1]


def test_groups_of_shares_of_categories_are_the_categories() -> None:
    encoding = encode_table(FRAME, SCHEMA).encoding
    assert encoding is not None
    from dataclasses import replace

    columns = tuple(
        replace(column, style="codes") if column.name == "code" else column  # type: ignore[call-arg, type-var]
        for column in encoding.columns
    )
    shares = Encoding(columns, "ill", ("no", "yes"))
    groups = GroupsOf.of("code", shares)
    assert groups.numbers(shares.encode(FRAME)).tolist() == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("ill", "must be a column of the schema, got 'ill'"),
        ("age", "age=30,50; got 'age'"),
        (("sex", [1]), "got 'sex' with numbers"),
        (("pay", [100]), "got 'pay' with numbers"),
        (("age", [30, 30]), "must be different, above 18 and at most 90, got 30, 30"),
        (("age", [91]), "above 18 and at most 90, got 91"),
    ],
)
def test_other_columns_give_no_groups(by: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        GroupsOf.of(by, encode_table(FRAME, SCHEMA).encoding)


def test_thresholds_are_for_two_classes_and_between_0_and_1() -> None:
    with pytest.raises(InvalidInput, match="`at` requires a model of two classes; this one has 3"):
        tables(3, at=(0.3,))
    for at, got in (((0.3, 1.5), r"0\.3, 1\.5"), ((5e-324,), "4.94066e-324")):
        with pytest.raises(InvalidInput, match=f"between 0 and 1, got {got}"):
            tables(at=at)
