"""What cannot be trained on is refused in one sentence that shows no value of a record."""

from __future__ import annotations

import contextlib
import math
import warnings

import numpy as np
import pytest

from quietmax.errors import InvalidInput
from quietmax.estimators import DPSGD, PrivateHead, Teachers
from quietmax.estimators.validation import LARGEST_SIZE, checked_size, class_numbers

SECRET = 0.72152971
ROWS = np.full((60, 3), SECRET)
LABELS = np.arange(60) % 2


@pytest.mark.parametrize("make", [PrivateHead, Teachers, DPSGD])
@pytest.mark.parametrize(
    ("records", "labels", "sentence"),
    [
        (ROWS[0], LABELS, "Expected 2D array, got 1D array"),
        (np.full((60, 3), f"secret {SECRET}"), LABELS, "could not convert string"),
        (np.where(np.arange(180).reshape(60, 3) == 7, np.nan, ROWS), LABELS, "contains NaN"),
        (ROWS, LABELS[:50], "inconsistent numbers of samples"),
        (ROWS[:0], LABELS[:0], "0 sample"),
        (ROWS, LABELS + SECRET, "Unknown label type: continuous"),
    ],
)
def test_a_table_that_is_none_is_refused_without_showing_a_value(make, records, labels, sentence):
    with pytest.raises(InvalidInput, match=sentence) as refusal:
        make(declared_size=60, classes=[0, 1]).fit(records, labels)
    told = str(refusal.value)
    assert "0.72" not in told
    assert "60" not in told
    assert "50" not in told
    assert "secret" not in told
    assert "\n" not in told
    assert told.endswith("give a table of finite numbers and one label for each row.")
    assert refusal.value.__suppress_context__


@pytest.mark.parametrize("make", [PrivateHead, Teachers, DPSGD])
@pytest.mark.parametrize(
    "labels", [np.arange(60), np.arange(60) // 1.5, np.array([f"name {n}" for n in range(60)])]
)
def test_nothing_is_warned_of_that_depends_on_the_labels(make, labels):
    """scikit-learn warns if more than half of the labels differ."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        make(declared_size=60, classes=np.unique(labels)).fit(ROWS, labels)
    assert [str(each.message) for each in told] == []


@pytest.mark.parametrize("make", [PrivateHead, Teachers, DPSGD])
@pytest.mark.parametrize("value", [1e300, 1e39, 3e38, 1e-300])
def test_nothing_is_warned_of_that_depends_on_the_values(make, value):
    records = np.where(np.arange(180).reshape(60, 3) == 7, value, ROWS)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with contextlib.suppress(InvalidInput):
            make(declared_size=60, classes=[0, 1]).fit(records, LABELS)
    assert [str(each.message) for each in told] == []


RECORDS = np.random.default_rng(0).random((40, 3), dtype=np.float32)
LABELS_of_declared_classes = np.array(["healthy", "ill"] * 19 + ["healthy", "infected"])


@pytest.mark.parametrize("estimator", [DPSGD, PrivateHead, Teachers])
def test_an_undeclared_label_is_refused_without_showing_it(estimator):
    with pytest.raises(InvalidInput, match="2 classes were declared, but the data hold a label") as refusal:
        estimator(classes=("healthy", "ill"), declared_size=40).fit(RECORDS, LABELS_of_declared_classes)
    assert "infected" not in str(refusal.value)
    assert refusal.value.__context__ is None  # a KeyError there would carry the label


@pytest.mark.parametrize("estimator", [DPSGD, PrivateHead, Teachers])
def test_a_single_class_read_off_the_labels_is_refused_without_showing_it(estimator):
    with pytest.raises(InvalidInput, match="one class only") as refusal:
        estimator().fit(RECORDS, np.full(40, "infected"))
    assert "infected" not in str(refusal.value)


@pytest.mark.parametrize("declared", [(), ("ill",), ("ill", "ill"), ("ill", "healthy", "ill")])
def test_fewer_than_two_different_declared_classes_are_refused(declared):
    with pytest.raises(InvalidInput, match="two different classes"):
        class_numbers(np.array(["ill"]), declared)


def test_a_label_s_number_is_its_place_in_the_declaration():
    classes, numbers = class_numbers(np.array([7, 3, 7]), (7, 5, 3))
    assert classes.tolist() == [7, 5, 3]
    assert numbers.tolist() == [0, 2, 0]


FEATURES = np.linspace(0, 1, 60, dtype=np.float32)[:, None]
LABELS_of_declared_size = np.arange(60) % 2


@pytest.mark.parametrize("size", [1, 480, np.int64(7), 12.0, LARGEST_SIZE])
def test_a_number_of_records_is_taken_as_it_is(size):
    assert checked_size(size) == size
    assert isinstance(checked_size(size), int)


@pytest.mark.parametrize(
    "size", [0, -3, 1.5, math.nan, math.inf, True, "12", LARGEST_SIZE + 1, 10**20, 10**400]
)
@pytest.mark.parametrize("estimator", [PrivateHead, Teachers, DPSGD])
def test_every_estimator_refuses_what_is_no_number_of_records_before_it_trains(estimator, size):
    with pytest.raises(
        InvalidInput, match="must be a whole number from 1 to 1,000,000,000: give one"
    ) as refusal:
        estimator(classes=(0, 1), declared_size=size).fit(FEATURES, LABELS_of_declared_size)
    assert "\n" not in str(refusal.value)


def test_teachers_that_would_train_for_days_are_refused():
    with pytest.raises(InvalidInput, match=r"each of 3 teachers would take 400,000,020 steps"):
        Teachers(teachers=3, classes=(0, 1), declared_size=LARGEST_SIZE).fit(
            FEATURES, LABELS_of_declared_size
        )
