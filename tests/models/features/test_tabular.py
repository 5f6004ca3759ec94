from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quietmax.errors import InvalidInput
from quietmax.models.features import (
    FeatureMap,
    OneHot,
    Scaling,
    UnitNorm,
)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=6),
    st.floats(0.01, 100.0),
)
def test_normalising_with_a_constant_keeps_every_affine_decision(
    values: list[float], constant: float
) -> None:
    x = np.array([values], np.float32)
    weights = np.random.default_rng(0).normal(size=x.shape[1])
    before = float(x[0].astype(float) @ weights + constant)
    after = float(UnitNorm(constant).transform(x)[0].astype(float) @ np.append(weights, 1.0))
    length = float(np.sqrt(np.square(x.astype(float)).sum() + constant**2))
    assert after == pytest.approx(before / length, abs=1e-5 * float(np.linalg.norm(np.append(weights, 1.0))))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Scaling(low=(0.0,), high=(0.0,)), "two finite bounds for each column"),
        (lambda: Scaling(low=(0.0, 1.0), high=(1.0,)), "two finite bounds for each column"),
        (lambda: Scaling(low=(), high=()), "two finite bounds for each column"),
        (lambda: OneHot(((1.0, 1.0),)), "different categories for every column"),
        (lambda: OneHot(((),)), "different categories for every column"),
        (lambda: OneHot(()), "different categories for every column"),
        (lambda: UnitNorm(-1.0), "at least 0, got -1"),
        (lambda: UnitNorm(float("nan")), "at least 0, got nan"),
    ],
)
def test_wrong_constants_are_rejected_when_the_map_is_made(
    build: Callable[[], FeatureMap], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        build()
