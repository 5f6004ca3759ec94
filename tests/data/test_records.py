from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quietmax.data import Records
from quietmax.data.records import content_identities
from quietmax.errors import InvalidInput

Refusal = Callable[..., str]


def some_records(count: int = 12, width: int = 3, seed: int = 0) -> Records:
    rng = np.random.default_rng(seed)
    return Records(
        "some", rng.normal(size=(count, width)).astype(np.float32), rng.integers(4, size=count), classes=4
    )


def test_features_become_contiguous_float32_and_labels_int64() -> None:
    records = Records("some", np.asfortranarray(np.eye(3)), np.array([0, 1, 1], dtype=np.uint8), classes=2)
    assert records.features.dtype == np.float32
    assert records.features.flags["C_CONTIGUOUS"]
    assert records.labels.dtype == np.int64


def test_take_keeps_the_asked_order_and_everything_else() -> None:
    records = Records(
        "images",
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.array([0, 1, 2]),
        classes=3,
        image_shape=(1, 2, 2),
        identities=np.array([7, 8, 9], dtype=np.uint64),
    )
    taken = records.take([2, 0])
    np.testing.assert_array_equal(taken.features, records.features[[2, 0]])
    np.testing.assert_array_equal(taken.labels, [2, 0])
    np.testing.assert_array_equal(taken.identities, [9, 7])
    assert (taken.name, taken.classes, taken.image_shape, len(taken)) == ("images", 3, (1, 2, 2), 2)


def test_take_accepts_a_mask_and_nothing_at_all() -> None:
    records = some_records(count=4)
    np.testing.assert_array_equal(
        records.take(np.array([False, True, False, True])).labels, records.labels[[1, 3]]
    )
    assert len(records.take([])) == 0


@given(st.permutations(range(12)))
def test_digest_does_not_depend_on_the_order_of_rows(order: list[int]) -> None:
    records = some_records()
    assert records.take(order).digest() == records.digest()


@given(row=st.integers(0, 11), column=st.integers(0, 2))
def test_digest_changes_with_any_single_feature(row: int, column: int) -> None:
    records = some_records()
    changed = records.features.copy()
    changed[row, column] = np.nextafter(changed[row, column], np.float32(np.inf))
    assert Records("some", changed, records.labels, 4).digest() != records.digest()


def test_digest_changes_with_a_label_the_number_of_classes_a_missing_row_and_a_copied_row() -> None:
    records = some_records()
    labels = records.labels.copy()
    labels[3] = (labels[3] + 1) % 4
    others = [
        Records("some", records.features, labels, 4),
        Records("some", records.features, records.labels, 5),
        records.take(range(11)),
        records.take([*range(12), 0]),
    ]
    digests = {records.digest(), *(other.digest() for other in others)}
    assert len(digests) == 5


def test_digest_does_not_depend_on_the_name() -> None:
    records = some_records()
    assert Records("other", records.features, records.labels, 4).digest() == records.digest()


@given(st.integers(0, 2**32 - 1), st.sampled_from([(0, 1), (0.5, 0.75), (1, 1.5), (0, -0.0, 2)]))
def test_equal_rows_have_equal_identities_and_different_rows_different_ones(
    seed: int, levels: tuple[float, ...]
) -> None:
    features = np.random.default_rng(seed).choice(np.float32(levels), size=(200, 8))
    identities = content_identities(features)
    rows = [tuple(row) for row in features.tolist()]
    assert len(set(identities.tolist())) == len(set(rows))
    assert len(set(zip(identities.tolist(), rows, strict=True))) == len(set(rows))


def test_identities_of_many_similar_rows_do_not_collide() -> None:
    # 2^17 different 0/1 rows: at n^2 / 2^60 the chance of any collision is 1.5e-8.
    rows = (np.arange(2**17)[:, None] >> np.arange(17) & 1).astype(np.float32)
    assert len(np.unique(content_identities(rows))) == 2**17


def test_identities_stay_what_they_are() -> None:
    assert content_identities(np.array([[0, 1], [0.5, -2]], dtype=np.float32)).tolist() == [
        13239411494886720341,
        13975802354573317555,
    ]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_feature_that_is_not_finite_is_refused(value: float, refusal: Refusal) -> None:
    features = np.zeros((3, 2), dtype=np.float32)
    features[1, 0] = value
    sentence = refusal(lambda: Records("some", features, np.array([0, 1, 0]), 2), InvalidInput)
    assert "Feature 0 of record 1" in sentence


def test_opposite_infinities_are_refused_although_huge_finite_features_are_not(refusal: Refusal) -> None:
    huge = np.full((4, 4), np.finfo(np.float32).max, dtype=np.float32)
    labels = np.array([0, 1, 0, 1])
    assert len(Records("huge", huge, labels, 2)) == 4
    huge[0, 0], huge[3, 3] = np.inf, -np.inf
    assert "Feature 0 of record 0" in refusal(lambda: Records("huge", huge, labels, 2), InvalidInput)


@pytest.mark.parametrize("label", [-1, 2])
def test_a_label_outside_the_classes_is_refused(label: int, refusal: Refusal) -> None:
    sentence = refusal(
        lambda: Records("some", np.zeros((2, 1), dtype=np.float32), np.array([0, label]), 2), InvalidInput
    )
    assert "Record 1" in sentence
    assert "0 to 1" in sentence


def test_shapes_that_do_not_fit_are_refused(refusal: Refusal) -> None:
    features, labels = np.zeros((3, 2), dtype=np.float32), np.zeros(2, dtype=np.int64)
    assert "(3, 2)" in refusal(lambda: Records("some", features, labels, 2), InvalidInput)
    assert "(6,)" in refusal(lambda: Records("some", features.ravel(), np.zeros(6), 2), InvalidInput)
    few = np.zeros(2, dtype=np.uint64)
    assert "identity" in refusal(
        lambda: Records("some", features, np.zeros(3), 2, identities=few), InvalidInput
    )
    assert "(1, 2, 2)" in refusal(
        lambda: Records("some", features, np.zeros(3), 2, image_shape=(1, 2, 2)), InvalidInput
    )
