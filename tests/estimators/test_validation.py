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
from quietmax.estimators.training_set import LARGEST_SIZE, _checked_records, _checked_size, _class_numbers
from quietmax.models.features import FeatureMap, Identity, Scattering, UnitNorm
from quietmax.models.features.images import Turned
from tests.estimators.made import made

SECRET = 0.72152971
ROWS = np.full((60, 3), SECRET)
LABELS = np.arange(60) % 2
ALL = pytest.mark.parametrize("make", [PrivateHead, Teachers, DPSGD])


@ALL
@pytest.mark.parametrize(
    ("records", "labels", "sentence"),
    [
        (ROWS[0], LABELS, "Expected 2D array, got 1D array"),
        (np.full((60, 3), f"secret {SECRET}"), LABELS, "could not convert string"),
        (np.where(np.arange(180).reshape(60, 3) == 7, np.nan, ROWS), LABELS, "contains NaN"),
        (ROWS, LABELS[:50], "inconsistent numbers of samples"),
        (ROWS[:0], LABELS[:0], "0 sample"),
        (ROWS, LABELS + SECRET, "Unknown label type: continuous"),
        ([[1, 2]] * 1233 + [[1]], [0, 1] * 617, "A row of X has another number of columns"),
        ([[1, 2]] * 1233 + [[1, [2]]], [0, 1] * 617, "or an element that is not a number"),
        ([[1, 2]] * 1234, [0, 1] * 616 + [0, [1]], "every label must be a string, an integer or a boolean"),
        ([[1, 2]] * 1234, [[0], [1]] * 616 + [[0], [1, 2]], "every label must be a string"),
        (np.zeros((1234, 0)), [0, 1] * 617, "0 feature"),
        ([[1, 2]] * 1234, np.zeros((1234, 2)), "y should be a 1d array"),
    ],
)
def test_what_is_no_table_is_refused_without_a_value_or_the_number_of_rows(
    make: Any, records: Any, labels: Any, sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence) as error:
        make(declared_size=1000, classes=[0, 1]).fit(records, labels)
    told = str(error.value)
    assert not [shown for shown in ("0.72", "60", "50", "123", "secret", "\n") if shown in told]
    assert told.endswith("and y must have one label for each row.")
    assert error.value.__suppress_context__


@ALL
@pytest.mark.parametrize(
    ("labels", "value"),
    [
        *((labels, SECRET) for labels in (np.arange(60), np.arange(60) // 1.5, np.arange(60).astype(str))),
        *((LABELS, value) for value in (1e300, 1e39, 3e38, 1e-300)),
    ],
)
def test_nothing_is_warned_of_that_depends_on_labels_or_values(make: Any, labels: Any, value: float) -> None:
    """scikit-learn warns if more than half of the labels differ."""
    records = np.where(np.arange(180).reshape(60, 3) == 7, value, ROWS)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with contextlib.suppress(InvalidInput):
            make(declared_size=60, classes=np.unique(labels)).fit(records, labels)
    assert [str(each.message) for each in told] == []


RECORDS = np.random.default_rng(0).random((40, 3), dtype=np.float32)
DIAGNOSES = np.array(["healthy", "ill"] * 19 + ["healthy", "infected"])


@ALL
@pytest.mark.parametrize(
    ("labels", "declared", "sentence"),
    [
        (DIAGNOSES, ("healthy", "ill"), "label that is not one of the 2 declared classes"),
        (np.full(40, "infected"), None, "only one class"),
    ],
)
def test_a_label_that_cannot_be_is_refused_without_showing_it(
    make: Any, labels: Any, declared: Any, sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence) as error:
        make(classes=declared, declared_size=40).fit(RECORDS, labels)
    assert "infected" not in str(error.value)
    assert error.value.__context__ is None  # a KeyError there would carry the label


@pytest.mark.parametrize("declared", [(), ("ill",), ("ill", "ill"), ("ill", "healthy", "ill")])
def test_fewer_than_two_different_declared_classes_are_refused(declared: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput, match="two different classes"):
        _class_numbers(np.array(["ill"]), declared)


def test_a_label_s_number_is_its_place_in_the_declaration() -> None:
    classes, numbers = _class_numbers(np.array([7, 3, 7]), (7, 5, 3))
    assert classes.tolist() == [7, 5, 3]
    assert numbers.tolist() == [0, 2, 0]


def _numbers(labels: Any, declared: Any) -> list[int]:
    """Class numbers of labels, as an estimator finds them."""
    _, given = _checked_records(PrivateHead(), np.zeros((len(labels), 2)), labels)
    return _class_numbers(given, declared)[1].tolist()


BIG = 2**53
MIXED = [
    ([BIG, BIG + 1], 1.0, (BIG, BIG + 1, 1)),
    ([2**63, 2**63 + 1], -1, (2**63, 2**63 + 1, -1)),
    ([0, 1], "2", (0, 1, "2", "0", "1")),
    ([True, False], "True", (True, False, "True", "False")),
    (["a", "a\0"], 1, ("a", "a\0", 1)),
    ([np.int64(BIG), np.int64(BIG + 1)], np.float64(1.0), (BIG, BIG + 1, 1)),
]


@pytest.mark.parametrize(("labels", "another", "declared"), MIXED)
@pytest.mark.parametrize("as_objects", [False, True])
def test_a_label_of_another_type_does_not_change_the_class_of_other_rows(
    labels: list[Any], another: Any, declared: tuple[Any, ...], as_objects: bool
) -> None:
    def sequence(values: Any) -> Any:
        return np.array(values, dtype=object) if as_objects else values

    assert _numbers(sequence(labels), sequence(declared)) == [0, 1]
    assert _numbers(sequence([*labels, another]), sequence(declared)) == [0, 1, 2]
    assert _numbers(sequence([another, *labels]), sequence(declared)) == [2, 0, 1]


@pytest.mark.parametrize(
    "labels", [["0", 1], [0, "1"], ["True", 0], [0, None], [0, b"1"], [0, 0.5], [0, np.nan]]
)
@pytest.mark.parametrize("as_objects", [False, True])
def test_a_label_that_equals_no_declared_class_is_refused_beside_all_other_labels(
    labels: list[Any], as_objects: bool
) -> None:
    with pytest.raises(InvalidInput, match=r"not one of the 2 declared|Unknown label type"):
        _numbers(np.array(labels, dtype=object) if as_objects else labels, (0, 1))


@pytest.mark.parametrize(
    ("declared", "kind"),
    [
        ((0, 1), "i"),
        (range(2), "i"),
        (("a", "b"), "U"),
        ((False, True), "b"),
        ((0.0, 1.0), "f"),
        ((0, "1"), "O"),
        ((BIG + 1, 1.0), "O"),
        (np.array(["a", "b"], dtype=object), "O"),
    ],
)
def test_declared_classes_keep_their_type_and_mixed_ones_are_objects(declared: Any, kind: str) -> None:
    classes, numbers = _class_numbers(np.array(list(declared), dtype=object), declared)
    assert classes.dtype.kind == kind
    assert classes.tolist() == list(declared)
    assert numbers.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("labels", "kind"), [([1, 0], "i"), (["b", "a"], "U"), ([True, False], "b"), ([1.0, 0], "f")]
)
def test_classes_that_are_read_off_a_list_have_the_type_of_its_labels(labels: list[Any], kind: str) -> None:
    _, given = _checked_records(PrivateHead(), np.zeros((2, 2)), labels)
    classes, numbers = _class_numbers(given, None)
    assert classes.dtype.kind == kind
    assert classes.tolist() == sorted(labels)
    assert numbers.tolist() == [1, 0]


def test_strings_beside_numbers_need_declared_classes() -> None:
    with pytest.raises(InvalidInput, match="declare the classes"):
        PrivateHead().fit(np.zeros((3, 2)), [0, 1, "2"])


@pytest.mark.parametrize("declared", [((0, 1), (2, 3)), ((0, 1), 2)])
def test_declared_classes_that_are_sequences_are_refused(declared: Any) -> None:
    with pytest.raises(InvalidInput, match="classes must be a flat sequence"):
        _class_numbers(np.array([0]), declared)


@pytest.mark.parametrize("size", [1, 480, np.int64(7), 12.0, LARGEST_SIZE])
def test_a_number_of_records_is_taken_as_it_is(size: Any) -> None:
    assert _checked_size(size) == size
    assert isinstance(_checked_size(size), int)


@pytest.mark.parametrize(
    "size", [0, -3, 1.5, math.nan, math.inf, True, "12", LARGEST_SIZE + 1, 10**20, 10**400]
)
@ALL
def test_every_estimator_refuses_what_is_no_number_of_records_before_it_trains(make: Any, size: Any) -> None:
    with pytest.raises(InvalidInput, match="must be an integer from 1 to 1,000,000,000") as error:
        make(classes=(0, 1), declared_size=size).fit(ROWS, LABELS)
    assert "\n" not in str(error.value)


def test_teachers_that_would_train_for_days_are_refused() -> None:
    with pytest.raises(InvalidInput, match="Each of 3 teachers would take 400,000,020 training steps"):
        Teachers(teachers=3, classes=(0, 1), declared_size=LARGEST_SIZE).fit(ROWS, LABELS)


IMAGES = np.random.default_rng(1).random((24, 64), dtype=np.float32)
DIGITS = np.arange(24) % 2


def _fast(make: type, **settings: Any) -> Any:
    """An estimator that trains in a moment."""
    quick = {"teachers": 2} if make is Teachers else {"steps": 1}
    return made(make, classes=(0, 1), declared_size=24, **quick, **settings)


@ALL
def test_images_are_scattered_by_default_and_tables_are_not(make: type) -> None:
    images = _fast(make, image_shape=(1, 8, 8)).fit(IMAGES, DIGITS)
    assert images.feature_map_ == Turned(Scattering((1, 8, 8)))
    table = _fast(make).fit(IMAGES, DIGITS)
    assert table.feature_map_ == (None if make is Teachers else UnitNorm(2.4))


def test_the_paper_trains_dpsgd_on_the_pixels_of_images() -> None:
    paper = _fast(DPSGD, image_shape=(1, 8, 8), preset="paper").fit(IMAGES, DIGITS)
    assert paper.feature_map_ is None


@ALL
@pytest.mark.parametrize(
    ("name", "expected"),
    [("identity", Identity()), ("unit-norm", UnitNorm(1.0)), ("scattering", Scattering((1, 8, 8)))],
)
def test_a_feature_map_can_be_named(make: type, name: str, expected: FeatureMap) -> None:
    fitted = _fast(make, features=name, image_shape=(1, 8, 8)).fit(IMAGES, DIGITS)
    # To DP-SGD the identity is no map at all: the default step size then follows from the number of columns.
    assert fitted.feature_map_ == (None if make is DPSGD and name == "identity" else expected)


def test_the_method_of_a_head_follows_from_what_it_releases() -> None:
    released = _fast(PrivateHead).fit(IMAGES, DIGITS).guarantee_
    asked = PrivateHead(classes=(0, 1), declared_size=24, release="query").fit(IMAGES, DIGITS).guarantee_
    assert released.parameters["training_method"] == "gradient"
    assert asked.parameters["training_method"] == "output"
