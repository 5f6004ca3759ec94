from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quietmax.data import Holdout, Records, Split, hold_out, split
from quietmax.data.records import _hash_rows, is_held_out
from quietmax.errors import InvalidInput
from tests.data.conftest import problem_of


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
        persons=np.array(["ann", "bob", "cid"], dtype=object),
        raw_hashes=np.array([7, 8, 9], dtype=np.uint64),
    )
    taken = records.take([2, 0])
    np.testing.assert_array_equal(taken.features, records.features[[2, 0]])
    np.testing.assert_array_equal(taken.labels, [2, 0])
    assert taken.persons.tolist() == ["cid", "ann"]
    assert taken.raw_hashes.tolist() == [9, 7]
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


def test_digest_changes_with_labels_classes_and_copies_and_not_with_the_name() -> None:
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
    assert replace(records, name="other").digest() == records.digest()


@given(st.integers(0, 2**32 - 1), st.sampled_from([(0, 1), (0.5, 0.75), (1, 1.5), (0, -0.0, 2)]))
def test_equal_rows_have_equal_hashes_and_different_rows_different_ones(
    seed: int, levels: tuple[float, ...]
) -> None:
    features = np.random.default_rng(seed).choice(np.array(levels, dtype=np.float32), size=(200, 8))
    hashes = _hash_rows(features)
    rows = [tuple(row) for row in features.tolist()]
    assert len(set(hashes.tolist())) == len(set(rows))
    assert len(set(zip(hashes.tolist(), rows, strict=True))) == len(set(rows))


def test_hashes_of_many_similar_rows_do_not_collide() -> None:
    # 2^17 different 0/1 rows: at n^2 / 2^60 the chance of any collision is 1.5e-8.
    rows = (np.arange(2**17)[:, None] >> np.arange(17) & 1).astype(np.float32)
    assert len(np.unique(_hash_rows(rows))) == 2**17


def test_hashes_stay_what_they_are() -> None:
    assert _hash_rows(np.array([[0, 1], [0.5, -2]], dtype=np.float32)).tolist() == [
        13239411494886720341,
        13975802354573317555,
    ]


ZEROS = np.zeros((3, 2), dtype=np.float32)
HUGE = np.full((3, 2), np.finfo(np.float32).max, dtype=np.float32)


def changed(features: Any, **cells: float) -> Any:
    """A copy in which some cells, as r1c0, have other values."""
    copy = features.copy()
    for cell, value in cells.items():
        copy[int(cell[1]), int(cell[3])] = value
    return copy


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        *(
            ({"features": changed(ZEROS, r1c0=value)}, "feature 0 of record 1")
            for value in (np.nan, np.inf, -np.inf)
        ),
        ({"features": changed(HUGE, r0c0=np.inf, r2c1=-np.inf)}, "feature 0 of record 0"),
        *(({"labels": np.array([0, label, 0])}, "from 0 to 1; record 1 of") for label in (-1, 2)),
        ({"labels": np.zeros(2)}, "(3, 2)"),
        ({"features": np.zeros(6, dtype=np.float32), "labels": np.zeros(6)}, "(6,)"),
        ({"persons": np.zeros(2, dtype=object)}, "persons of 'some' must have the shape (3,)"),
        ({"raw_hashes": np.zeros(2, dtype=np.uint64)}, "raw_hashes of 'some'"),
        ({"image_shape": (1, 2, 2)}, "(1, 2, 2)"),
    ],
)
def test_records_that_do_not_fit_together_are_rejected(wrong: dict[str, Any], said: str) -> None:
    given = {"name": "some", "features": HUGE, "labels": np.array([0, 1, 0]), "classes": 2}
    assert len(Records(**given)) == 3  # huge numbers are finite
    assert said in problem_of(InvalidInput, Records, **{**given, **wrong})


def distinct(count: int) -> Records:
    return Records("numbers", np.arange(count, dtype=np.float32)[:, None], np.arange(count) % 2, classes=2)


def with_copies(values: list[int]) -> Records:
    numbers = np.array(values, dtype=np.float32)
    return Records("copies", numbers[:, None], np.array(values) % 2, classes=2)


def rows_of(parts: Split) -> list[int]:
    return [*parts.train_rows.tolist(), *parts.test_rows.tolist(), *parts.pool_rows.tolist()]


def values(records: Records) -> set[float]:
    return set(records.features[:, 0].tolist())


@given(count=st.integers(2, 80), seed=st.integers(0, 2**70), data=st.data())
def test_parts_are_disjoint_of_the_asked_size_and_leave_nothing_out(
    count: int, seed: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, count // 2))
    parts = split(distinct(count), size=size, seed=seed)
    assert (len(parts.train), len(parts.test), len(parts.pool)) == (size, size, count - 2 * size)
    assert sorted(rows_of(parts)) == list(range(count))
    np.testing.assert_array_equal(parts.train.features[:, 0], parts.train_rows)
    assert parts.classes == 2
    assert parts.name == "numbers"
    assert parts.seed == seed


def test_the_parts_of_a_known_source_stay_what_they_are() -> None:
    for seed, rows in ((0, ([0, 7, 2], [6, 4, 8])), (1, ([9, 8, 4], [5, 6, 1]))):
        parts = split(distinct(10), size=3, seed=seed)
        assert (parts.train_rows.tolist(), parts.test_rows.tolist()) == rows


@given(st.permutations(range(30)), st.integers(0, 1_000))
def test_parts_do_not_depend_on_the_order_of_the_source(order: list[int], seed: int) -> None:
    records = distinct(30)
    parts, shuffled = (split(source, size=12, seed=seed) for source in (records, records.take(order)))
    assert values(parts.train) == values(shuffled.train)
    assert values(parts.test) == values(shuffled.test)


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 12), min_size=10, max_size=60),
    st.integers(0, 1_000),
    st.none() | st.integers(1, 10),
)
def test_copies_of_one_record_never_lie_on_two_sides(numbers: list[int], seed: int, size: int | None) -> None:
    records = with_copies(numbers)
    try:
        parts = split(records, size=size, seed=seed)
    except InvalidInput:
        assume(False)
    assert sorted(rows_of(parts)) == list(range(len(numbers)))
    assert len(parts.train) == len(parts.test) == (size or len(parts.train))
    assert len(parts.train) >= 1
    assert not values(parts.train) & values(parts.test)
    assert not values(parts.train) & values(parts.pool)
    assert not values(parts.test) & values(parts.pool)


def test_a_few_copies_do_not_change_the_sizes_of_the_parts() -> None:
    parts = split(with_copies([*range(100), *range(20)]), size=50, seed=1)
    assert (len(parts.train), len(parts.test), len(parts.pool)) == (50, 50, 20)
    assert not values(parts.train) & values(parts.test)


@pytest.mark.parametrize("by_person", [True, False])
def test_rows_of_one_person_and_rows_equal_before_encoding_stay_together(by_person: bool) -> None:
    features = np.arange(40, dtype=np.float32)[:, None]
    pairs = np.repeat(np.arange(20, dtype=np.uint64), 2)
    persons, raw_hashes = (pairs.astype(str).astype(object), None) if by_person else (None, pairs)
    records = Records("visits", features, np.arange(40) % 2, 2, persons=persons, raw_hashes=raw_hashes)
    parts = split(records, size=10, seed=5)
    sides = [set((rows // 2).tolist()) for rows in (parts.train_rows, parts.test_rows, parts.pool_rows)]
    assert [len(side) for side in sides] == [5, 5, 10]
    assert len(set.union(*sides)) == 20


def test_without_a_size_training_and_test_part_take_two_fifths_each() -> None:
    parts = split(distinct(100), seed=0)
    assert (len(parts.train), len(parts.test), len(parts.pool)) == (40, 40, 20)


def test_every_record_and_every_pair_is_equally_likely_to_be_trained_on() -> None:
    # 4,000 seeds, 50 records whose features differ in few bits, 15 trained on.  Under uniformity each record is chosen
    # Binomial(4000, 0.3) times and each pair of neighbours with probability 0.3 * 14 / 49; the chance that any of 99
    # strays by more than 6 standard deviations is below 99 * 2e-9 = 2e-7 (seeds are fixed).
    records, runs = distinct(50), 4_000
    chosen, together = np.zeros(50), np.zeros(49)
    for seed in range(runs):
        inside = np.zeros(50, dtype=bool)
        inside[split(records, size=15, seed=seed).train_rows] = True
        chosen += inside
        together += inside[1:] & inside[:-1]
    for counts, share in ((chosen, 0.3), (together, 0.3 * 14 / 49)):
        assert np.abs(counts - share * runs).max() < 6 * np.sqrt(runs * share * (1 - share))


@pytest.mark.parametrize(
    ("records", "settings", "said"),
    [
        (distinct(9), {"size": 5}, "has 9 records, so the training set and the test set can have at most 4"),
        *((distinct(9), {"size": size}, "at least 1") for size in (0, -1, True, 2.5)),
        *((distinct(9), {"size": 2, "seed": seed}, "seed must be") for seed in (-1, 1.5, "0", None, True)),
        (with_copies([1] * 8 + [2] * 8), {"size": 7}, "too many copies"),
        (with_copies([1] * 10), {}, "a `person` column tells rows of different people apart"),
    ],
)
def test_a_split_that_is_not_possible_is_rejected(
    records: Records, settings: dict[str, Any], said: str
) -> None:
    assert said in problem_of(InvalidInput, split, records, **settings)


def visits(rows: list[tuple[str, int]]) -> Records:
    """Rows of named people; the number is the feature."""
    persons = np.array([name for name, _ in rows], dtype=object)
    features = np.array([[number] for _, number in rows], dtype=np.float32)
    return Records("visits", features.reshape(len(rows), 1), np.arange(len(rows)) % 2, 2, persons=persons)


def test_units_number_people_by_first_appearance_and_else_rows() -> None:
    records = visits([("cid", 1), ("ann", 2), ("cid", 3), ("bob", 4)])
    assert (records.unit, records.units.tolist()) == ("person", [0, 1, 0, 2])
    assert (distinct(3).unit, distinct(3).units.tolist()) == ("record", [0, 1, 2])


def test_by_default_everybody_trains_and_there_is_no_pool() -> None:
    parts = hold_out(distinct(7), seed=3)
    assert (parts.train_rows.tolist(), len(parts.test), len(parts.pool)) == ([*range(7)], 0, 0)
    assert parts.holdout == Holdout(0.0, seed=3)
    assert hold_out(distinct(7), 0.5).holdout == Holdout(0.5, seed=0) == Holdout(0.5)
    assert split(distinct(7), seed=3).holdout is None


def test_the_holdout_of_known_people_and_rows_stays_what_it_is() -> None:
    people = visits([(f"person {number}", number) for number in range(12)])
    assert np.flatnonzero(is_held_out(people, Holdout(0.4, seed=5))).tolist() == [2, 6]
    rows = np.flatnonzero(is_held_out(distinct(12), Holdout(0.4, seed=5))).tolist()
    assert rows == [3, 4, 5, 6, 7, 9, 10, 11]


def test_who_is_held_out_has_a_hash_below_the_share() -> None:
    """At a share that is exactly a hash / 2^64, that person trains; at the next larger float, not."""
    key = hashlib.blake2b(b"5", digest_size=32).digest()

    def share(content: bytes) -> Fraction:
        digest = hashlib.blake2b(content, digest_size=8, key=key).digest()
        return Fraction(int.from_bytes(digest, "little"), 2**64)

    people, rows = visits([(f"person {number}", 0) for number in range(9_000)]), distinct(9_000)
    contents = ([name.encode() for name in people.persons], [row.tobytes() for row in rows.features])
    for records, each in zip((people, rows), contents, strict=True):
        found = [(row, float(share(content))) for row, content in enumerate(each)]
        row, exact = next(pair for pair in found if 0.5 < pair[1] < 1 and share(each[pair[0]]) == pair[1])
        alone = records.take([row])
        assert not is_held_out(alone, Holdout(exact, 5)).any()
        assert is_held_out(alone, Holdout(math.nextafter(exact, 1), 5)).all()


def test_minus_zero_counts_as_zero_in_hashes_digest_and_holdout() -> None:
    zeros = np.zeros((64, 2), dtype=np.float32)
    zeros[:, 1] = np.arange(64)
    first, second = (Records("zeros", sign * zeros, np.zeros(64), 2) for sign in (1, [-1, 1]))
    assert np.signbit(second.features[:, 0]).all()
    assert np.array_equal(first._content_hashes, second._content_hashes)
    assert first.digest() == second.digest()
    held_out = is_held_out(first, Holdout(0.5))
    assert 0 < held_out.sum() < 64
    assert np.array_equal(held_out, is_held_out(second, Holdout(0.5)))


def test_people_are_held_out_with_the_declared_probability_for_every_seed_anew() -> None:
    # Binomial(20000, p); 6 standard deviations: false alarm below 1e-8 for each of 7 fixed draws. Two seeds with share
    # 0.5 hold the same person out with probability 0.25.
    people = visits([(str(number), 0) for number in range(20_000)])
    for records in (people, distinct(20_000)):
        for seed in range(3):
            held = int(is_held_out(records, Holdout(0.2, seed)).sum())
            assert abs(held - 4_000) < 6 * np.sqrt(20_000 * 0.2 * 0.8)
    both = is_held_out(people, Holdout(0.5, 1)) & is_held_out(people, Holdout(0.5, 2))
    assert abs(int(both.sum()) - 5_000) < 6 * np.sqrt(20_000 * 0.25 * 0.75)


@pytest.mark.parametrize("share", [-0.1, 1, 1.5, float("nan"), True, "0.2", None])
def test_a_share_that_is_no_probability_below_one_is_rejected(share: object) -> None:
    assert "below 1" in problem_of(InvalidInput, Holdout, share)  # type: ignore[arg-type]


def test_a_holdout_is_read_back_from_json_and_nothing_else_is() -> None:
    assert Holdout.from_json(json.loads(json.dumps(Holdout(0.25, 2**70).to_json()))) == Holdout(0.25, 2**70)
    for content in ({"share": 0.2}, {"share": 0.2, "seed": 0, "key": 1}, {"share": 2, "seed": 0}, [0.2, 0]):
        with pytest.raises(InvalidInput):
            Holdout.from_json(content)  # type: ignore[arg-type]


def test_the_digest_reads_every_row() -> None:
    rows = [Records("one", np.full((1, 2), value, np.float32), np.array([0]), 2) for value in (0.0, 1.0)]
    assert rows[0].digest() != rows[1].digest()
