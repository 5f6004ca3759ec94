from __future__ import annotations

import math

import numpy as np
import pytest

from quietmax.errors import InvalidInput
from quietmax.estimators import DPSGD, PrivateHead, Teachers
from quietmax.estimators.declared_size import LARGEST_SIZE, checked_size

FEATURES = np.linspace(0, 1, 60, dtype=np.float32)[:, None]
LABELS = np.arange(60) % 2


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
        estimator(classes=(0, 1), declared_size=size).fit(FEATURES, LABELS)
    assert "\n" not in str(refusal.value)


def test_teachers_that_would_train_for_days_are_refused():
    with pytest.raises(InvalidInput, match=r"each of 3 teachers would take 400,000,020 steps"):
        Teachers(teachers=3, classes=(0, 1), declared_size=LARGEST_SIZE).fit(FEATURES, LABELS)
