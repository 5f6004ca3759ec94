"""What cannot be trained on is refused in one sentence that shows no value of a record."""

from __future__ import annotations

import contextlib
import warnings

import numpy as np
import pytest

from quietmax.errors import InvalidInput
from quietmax.estimators import DPSGD, PrivateHead, Teachers

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
