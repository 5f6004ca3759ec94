"""What one row, or one person, more or less in the source table does to the two kinds of splits (`data.records`).

In the paper's split other rows can move.  In the split of a user's own table (THEORY 3.8) nobody else moves.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quietmax.data import Holdout, Records, hold_out, split
from quietmax.data.records import is_held_out
from quietmax.errors import InvalidInput

groups = st.lists(st.integers(1, 9), min_size=3, max_size=25)


def table(sizes: list[int], by_person: bool) -> Records:
    """Rows in groups of these sizes: of equal features, or of different features and one person."""
    person = np.repeat(np.arange(len(sizes)), sizes)
    if by_person:
        features = np.arange(len(person), dtype=np.float32)[:, None]
        return Records("visits", features, person % 2, 2, persons=person.astype(str).astype(object))
    return Records("copies", person.astype(np.float32)[:, None], np.arange(len(person)) % 2, 2)


def lost_and_gained(records: Records, removed: int, size: int | None, seed: int) -> tuple[int, int]:
    """How many rows the training part loses and gains when one row is taken out of the table."""
    rest = records.take([row for row in range(len(records)) if row != removed])
    parts = []
    for source in (records, rest):
        train = split(source, size=size, seed=seed).train
        parts.append(Counter(zip(train.features[:, 0].tolist(), train.labels.tolist(), strict=True)))
    before, after = parts
    return (before - after).total(), (after - before).total()


@settings(max_examples=200)
@given(
    st.integers(5, 60),
    st.booleans(),
    st.none() | st.integers(1, 12),
    st.integers(0, 999),
    st.integers(0, 999),
)
def test_without_copies_one_row_replaces_at_most_one_training_row(
    count: int, by_person: bool, size: int | None, removed: int, seed: int
) -> None:
    assume(size is None or 2 * size < count)
    lost, gained = lost_and_gained(table([1] * count, by_person), removed % count, size, seed)
    assert lost <= 1
    assert gained <= 1


@settings(max_examples=200)
@given(groups, st.booleans(), st.integers(1, 40), st.integers(0, 999), st.integers(0, 999))
def test_with_copies_and_a_given_size_at_most_as_many_rows_move_as_the_largest_group_has(
    sizes: list[int], by_person: bool, size: int, removed: int, seed: int
) -> None:
    records = table([*sizes, *[1] * 12], by_person)  # single rows, so that most sizes can be filled exactly
    size = 1 + size % (len(records) // 3)
    try:
        lost, gained = lost_and_gained(records, removed % len(records), size, seed)
    except InvalidInput:
        assume(False)
    assert lost == gained <= max(sizes)


def worst(size: int | None) -> tuple[int, int]:
    """The largest loss and gain of the training part over seeds, one group of 60 copies among 141 single rows."""
    records, moved = table([60] + [1] * 141, by_person=False), [(0, 0)]
    for seed in range(400):
        try:
            moved.append(lost_and_gained(records, 0, size, seed))
        except InvalidInput:
            continue
    return max(moved, key=sum)


@pytest.mark.parametrize("size", [80, None])
def test_with_copies_one_row_can_replace_many_training_rows(size: int | None) -> None:
    lost, gained = worst(size)
    assert lost >= 59
    assert gained >= 59


# A user's own table: a person is held out or not, whoever else is in the table.

rows_of_people = st.lists(
    st.tuples(st.sampled_from("abcdefghijkl"), st.integers(0, 9)), min_size=1, max_size=40
)


def visits(rows: list[tuple[str, int]], by_person: bool) -> Records:
    """Rows of named people, or of nobody: then the content of a row decides."""
    persons = np.array([name for name, _ in rows], dtype=object) if by_person else None
    features = np.array([[ord(name), number] for name, number in rows], dtype=np.float32).reshape(-1, 2)
    return Records("visits", features, np.arange(len(rows)) % 2, 2, persons=persons)


@settings(max_examples=300)
@given(
    rows_of_people, rows_of_people, st.booleans(), st.floats(0, 1, exclude_max=True), st.integers(0, 2**70)
)
def test_adding_and_removing_people_moves_nobody_else_to_the_other_side(
    rows: list[tuple[str, int]], others: list[tuple[str, int]], by_person: bool, share: float, seed: int
) -> None:
    holdout = Holdout(share, seed)
    sides: dict[object, bool] = {}
    for source in (rows, rows[1:], [*others, *rows], others):
        for row, held_out in zip(
            source, is_held_out(visits(source, by_person), holdout).tolist(), strict=True
        ):
            assert sides.setdefault(row[0] if by_person else row, held_out) == held_out


@settings(max_examples=200)
@given(rows_of_people, st.booleans(), st.integers(0, 999))
def test_leaving_one_person_out_takes_that_person_and_nobody_else_from_the_training_set(
    rows: list[tuple[str, int]], by_person: bool, seed: int
) -> None:
    gone = rows[0][0] if by_person else rows[0]
    rest = [row for row in rows if (row[0] if by_person else row) != gone]
    before, after = (hold_out(visits(source, by_person), 0.4, seed=seed).train for source in (rows, rest))
    kept = [
        row
        for row in before.features.tolist()
        if (chr(int(row[0])) if by_person else (chr(int(row[0])), int(row[1]))) != gone
    ]
    assert after.features.tolist() == kept


@settings(max_examples=100)
@given(rows_of_people, st.integers(0, 999))
def test_no_person_is_on_both_sides_and_a_larger_share_only_adds_people(
    rows: list[tuple[str, int]], seed: int
) -> None:
    records = visits(rows, True)
    small, large = (hold_out(records, share, seed=seed) for share in (0.3, 0.6))
    for parts in (small, large):
        assert parts.train.persons is not None
        assert parts.test.persons is not None
        assert not set(parts.train.persons) & set(parts.test.persons)
        assert sorted([*parts.train_rows, *parts.test_rows]) == [*range(len(rows))]
    assert set(small.test_rows) <= set(large.test_rows)
