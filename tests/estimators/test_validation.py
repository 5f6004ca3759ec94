"""What cannot be trained on is refused in one sentence that shows no value of a record."""

from __future__ import annotations

import contextlib
import math
import warnings
from typing import Any

import numpy as np
import pytest

from quietmax.errors import InvalidInput
from quietmax.estimators import DPSGD, PrivateHead, Teachers
from quietmax.estimators.validation import LARGEST_SIZE, checked_size, class_numbers
from quietmax.models.features import FeatureMap, Identity, Scattering, UnitNorm

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
def test_a_table_that_is_none_is_refused_without_showing_a_value(
    make: Any, records: Any, labels: Any, sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence) as error:
        make(declared_size=60, classes=[0, 1]).fit(records, labels)
    told = str(error.value)
    assert "0.72" not in told
    assert "60" not in told
    assert "50" not in told
    assert "secret" not in told
    assert "\n" not in told
    assert told.endswith("and y must have one label for each row.")
    assert error.value.__suppress_context__


@pytest.mark.parametrize("make", [PrivateHead, Teachers, DPSGD])
@pytest.mark.parametrize(
    "labels", [np.arange(60), np.arange(60) // 1.5, np.array([f"name {n}" for n in range(60)])]
)
def test_nothing_is_warned_of_that_depends_on_the_labels(make: Any, labels: Any) -> None:
    """scikit-learn warns if more than half of the labels differ."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        make(declared_size=60, classes=np.unique(labels)).fit(ROWS, labels)
    assert [str(each.message) for each in told] == []


@pytest.mark.parametrize("make", [PrivateHead, Teachers, DPSGD])
@pytest.mark.parametrize("value", [1e300, 1e39, 3e38, 1e-300])
def test_nothing_is_warned_of_that_depends_on_the_values(make: Any, value: float) -> None:
    records = np.where(np.arange(180).reshape(60, 3) == 7, value, ROWS)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with contextlib.suppress(InvalidInput):
            make(declared_size=60, classes=[0, 1]).fit(records, LABELS)
    assert [str(each.message) for each in told] == []


RECORDS = np.random.default_rng(0).random((40, 3), dtype=np.float32)
DIAGNOSES = np.array(["healthy", "ill"] * 19 + ["healthy", "infected"])


@pytest.mark.parametrize("estimator", [DPSGD, PrivateHead, Teachers])
def test_an_undeclared_label_is_refused_without_showing_it(estimator: Any) -> None:
    with pytest.raises(InvalidInput, match="label that is not one of the 2 declared classes") as error:
        estimator(classes=("healthy", "ill"), declared_size=40).fit(RECORDS, DIAGNOSES)
    assert "infected" not in str(error.value)
    assert error.value.__context__ is None  # a KeyError there would carry the label


@pytest.mark.parametrize("estimator", [DPSGD, PrivateHead, Teachers])
def test_a_single_class_read_off_the_labels_is_refused_without_showing_it(estimator: Any) -> None:
    with pytest.raises(InvalidInput, match="only one class") as error:
        estimator().fit(RECORDS, np.full(40, "infected"))
    assert "infected" not in str(error.value)


@pytest.mark.parametrize("declared", [(), ("ill",), ("ill", "ill"), ("ill", "healthy", "ill")])
def test_fewer_than_two_different_declared_classes_are_refused(declared: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput, match="two different classes"):
        class_numbers(np.array(["ill"]), declared)


def test_a_label_s_number_is_its_place_in_the_declaration() -> None:
    classes, numbers = class_numbers(np.array([7, 3, 7]), (7, 5, 3))
    assert classes.tolist() == [7, 5, 3]
    assert numbers.tolist() == [0, 2, 0]


FEATURES = np.linspace(0, 1, 60, dtype=np.float32)[:, None]
LABELS = np.arange(60) % 2


@pytest.mark.parametrize("size", [1, 480, np.int64(7), 12.0, LARGEST_SIZE])
def test_a_number_of_records_is_taken_as_it_is(size: Any) -> None:
    assert checked_size(size) == size
    assert isinstance(checked_size(size), int)


@pytest.mark.parametrize(
    "size", [0, -3, 1.5, math.nan, math.inf, True, "12", LARGEST_SIZE + 1, 10**20, 10**400]
)
@pytest.mark.parametrize("estimator", [PrivateHead, Teachers, DPSGD])
def test_every_estimator_refuses_what_is_no_number_of_records_before_it_trains(
    estimator: Any, size: Any
) -> None:
    with pytest.raises(InvalidInput, match="must be an integer from 1 to 1,000,000,000") as error:
        estimator(classes=(0, 1), declared_size=size).fit(FEATURES, LABELS)
    assert "\n" not in str(error.value)


def test_teachers_that_would_train_for_days_are_refused() -> None:
    with pytest.raises(InvalidInput, match="Each of 3 teachers would take 400,000,020 training steps"):
        Teachers(teachers=3, classes=(0, 1), declared_size=LARGEST_SIZE).fit(FEATURES, LABELS)


IMAGES = np.random.default_rng(1).random((24, 64), dtype=np.float32)
DIGITS = np.arange(24) % 2


def _fast(estimator: type, **settings: Any) -> Any:
    """An estimator that trains in a moment."""
    quick = {"teachers": 2} if estimator is Teachers else {"steps": 1}
    return estimator(classes=(0, 1), declared_size=24, **quick, **settings)


@pytest.mark.parametrize("estimator", [DPSGD, PrivateHead, Teachers])
def test_images_are_scattered_by_default_and_tables_are_not(estimator: type) -> None:
    images = _fast(estimator, image_shape=(1, 8, 8)).fit(IMAGES, DIGITS)
    assert images.feature_map_ == Scattering((1, 8, 8))
    table = _fast(estimator).fit(IMAGES, DIGITS)
    assert table.feature_map_ == (UnitNorm(2.4) if estimator is PrivateHead else None)


def test_the_paper_trains_dpsgd_on_the_pixels_of_images() -> None:
    paper = _fast(DPSGD, image_shape=(1, 8, 8), preset="paper").fit(IMAGES, DIGITS)
    assert paper.feature_map_ is None


@pytest.mark.parametrize("estimator", [DPSGD, PrivateHead, Teachers])
@pytest.mark.parametrize(
    ("name", "expected"),
    [("identity", Identity()), ("unit-norm", UnitNorm(1.0)), ("scattering", Scattering((1, 8, 8)))],
)
def test_a_feature_map_can_be_named(estimator: type, name: str, expected: FeatureMap) -> None:
    fitted = _fast(estimator, features=name, image_shape=(1, 8, 8)).fit(IMAGES, DIGITS)
    # To DP-SGD the identity is no map at all: the default step size then follows from the number of columns.
    assert fitted.feature_map_ == (None if estimator is DPSGD and name == "identity" else expected)


@pytest.mark.parametrize("estimator", [DPSGD, PrivateHead, Teachers])
def test_an_unknown_feature_map_and_scattering_of_a_table_are_errors(estimator: type) -> None:
    with pytest.raises(InvalidInput, match="features must be one of auto, identity, unit-norm, scattering"):
        _fast(estimator, features="wavelets").fit(IMAGES, DIGITS)
    with pytest.raises(InvalidInput, match="requires image_shape"):
        _fast(estimator, features="scattering").fit(IMAGES, DIGITS)


def test_the_method_of_a_head_follows_from_what_it_releases() -> None:
    released = _fast(PrivateHead).fit(IMAGES, DIGITS).guarantee_
    asked = PrivateHead(classes=(0, 1), declared_size=24, release="query").fit(IMAGES, DIGITS).guarantee_
    assert released.parameters["training_method"] == "gradient"
    assert asked.parameters["training_method"] == "output"
