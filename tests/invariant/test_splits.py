"""What one row more or less in the source table does to the training part of the paper's split (`data.records`)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quietmax.data import Records, split
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
