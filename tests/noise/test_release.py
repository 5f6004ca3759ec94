"""Releases: the accounted sensitivity covers clipping and rounding, and the noise has the stated size.

Statistical tests reject below 1e-8, fewer than 10 of them.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from quietmax.errors import InvalidInput
from quietmax.noise import ExactNoise, SeededNoise, release_gaussian, release_laplace
from quietmax.noise.release import grid_for

REJECT = 1e-8


class Silent:
    """A source without noise that records the scale it was asked for."""

    name, exact = "silent", False

    def gaussian(self, scale, shape):
        self.scale = scale
        return np.zeros(shape, dtype=np.int64)

    laplace = gaussian


RELEASES = [(release_gaussian, "mu", 2), (release_laplace, "epsilon", 1)]
NAMED = [(release, name) for release, name, _ in RELEASES]
sensitivities = st.floats(1e-6, 1e6)
privacies = st.floats(1e-4, 1e4)


@settings(deadline=None, max_examples=300)
@given(
    st.integers(1, 40).flatmap(
        lambda size: st.tuples(
            arrays(float, size, elements=st.floats(-1e12, 1e12)),
            arrays(float, size, elements=st.floats(-1, 1)),
        )
    ),
    sensitivities,
    privacies,
    st.sampled_from(RELEASES),
)
def test_neighbours_on_the_grid_are_never_further_apart_than_the_noise_covers(
    pair, sensitivity, privacy, kind
) -> None:
    values, direction = pair
    release, name, order = kind
    length = np.linalg.norm(direction, order)
    other = values + (direction / length if length > 0 else direction) * sensitivity
    true_distance = float(np.linalg.norm(other - values, order))  # as the floats really are
    source = Silent()
    rounded = [
        release(
            v, sensitivity=max(sensitivity, true_distance * (1 + 1e-12)), source=source, **{name: privacy}
        )
        for v in (values, other)
    ]
    step = rounded[0].step
    steps = [[int(Fraction(float(v)) / Fraction(step)) for v in one.values] for one in rounded]
    moved = [abs(a - b) for a, b in zip(*steps, strict=True)]
    distance = math.sqrt(sum(m * m for m in moved)) if order == 2 else sum(moved)
    assert distance / source.scale <= privacy * (1 + 1e-12)


@settings(deadline=None, max_examples=300)
@given(sensitivities, st.floats(1e-6, 1e6), st.integers(1, 10**6))
def test_the_grid_covers_sensitivity_and_rounding_exactly_and_wastes_little(
    sensitivity, privacy, rounding
) -> None:
    grid = grid_for(sensitivity, privacy, rounding)
    assert math.frexp(grid.step)[0] == 0.5  # a power of two
    needed = (Fraction(sensitivity) / Fraction(grid.step) + rounding) / Fraction(privacy)
    assert needed <= Fraction(grid.scale) <= needed * (1 + Fraction(1, 2**50))
    assert grid.scale >= 2.0**20
    waste = grid.scale * grid.step / (sensitivity / privacy) - 1
    if rounding / privacy <= 2.0**16:
        assert waste < 1.1 * 2.0**-16 or waste < 2 * rounding / privacy / 2.0**32


@pytest.mark.parametrize("source", [ExactNoise(), SeededNoise(31)], ids=["exact", "seeded"])
def test_released_values_scatter_as_stated(source) -> None:
    values = np.full(100_000, 3.25)
    gaussian = release_gaussian(values, sensitivity=2.0, mu=0.5, source=source, coordinates=1)
    assert gaussian.scale == pytest.approx(4.0, rel=1e-4)
    assert stats.kstest((gaussian.values - 3.25) / gaussian.scale, "norm").pvalue > REJECT
    laplace = release_laplace(values, sensitivity=2.0, epsilon=0.5, source=source, coordinates=1)
    assert laplace.scale == pytest.approx(4.0, rel=1e-4)
    assert stats.kstest((laplace.values - 3.25) / laplace.scale, "laplace").pvalue > REJECT
    assert gaussian.source == laplace.source == source.name


def test_released_values_are_whole_multiples_of_the_step() -> None:
    release = release_gaussian(np.linspace(-1, 1, 999), sensitivity=0.1, mu=1.0)
    steps = release.values / release.step
    assert np.array_equal(steps, np.rint(steps))


@pytest.mark.parametrize(("release", "name", "order"), RELEASES)
def test_rounding_counts_every_coordinate_unless_fewer_are_stated(release, name, order) -> None:
    scales = []
    for coordinates in (None, 1):
        source = Silent()
        made = release(
            np.zeros(10_000), sensitivity=1.0, source=source, coordinates=coordinates, **{name: 1.0}
        )
        scales.append((source.scale, made.step))
    steps = 100 if order == 2 else 10_000
    assert scales[0][0] == pytest.approx(1.0 / scales[0][1] + steps, rel=1e-12)
    assert scales[1][0] == pytest.approx(1.0 / scales[1][1] + 1, rel=1e-12)


@pytest.mark.parametrize(("release", "name"), NAMED)
def test_huge_values_are_clipped_far_beyond_the_noise_and_nothing_overflows(release, name) -> None:
    made = release([1e300, -1e300, 0.0], sensitivity=1.0, **{name: 1.0})
    assert np.all(np.isfinite(made.values))
    assert 1e9 < made.values[0] == pytest.approx(-made.values[1], rel=1e-6)
    assert abs(made.values[2]) < 1e3


@pytest.mark.parametrize(("release", "name"), NAMED)
@pytest.mark.parametrize("values", [np.nan, [1.0, np.inf], ["a"], [[1.0], [1.0, 2.0]]])
def test_values_that_are_no_finite_numbers_are_refused_before_anything_is_drawn(
    release, name, values
) -> None:
    def no_bytes(_count):
        raise AssertionError("entropy was read")

    with pytest.raises(InvalidInput, match="Nothing was drawn"):
        release(values, sensitivity=1.0, source=ExactNoise(_bytes=no_bytes), **{name: 1.0})


@pytest.mark.parametrize(("release", "name"), NAMED)
@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, "much"])
def test_parameters_that_are_no_positive_numbers_are_refused(release, name, bad) -> None:
    with pytest.raises(InvalidInput):
        release([1.0], sensitivity=bad, **{name: 1.0})
    with pytest.raises(InvalidInput):
        release([1.0], sensitivity=1.0, **{name: bad})
    with pytest.raises(InvalidInput):
        release([1.0], sensitivity=1.0, coordinates=0, **{name: 1.0})


def test_noise_too_wide_for_any_grid_is_refused_with_advice() -> None:
    with pytest.raises(InvalidInput, match="fewer coordinates"):
        release_laplace(np.zeros(1000), sensitivity=1.0, epsilon=1e-30)


@pytest.mark.parametrize(("release", "name"), NAMED)
def test_shapes_are_kept_and_inputs_untouched(release, name) -> None:
    for shape in ((), (0,), (3,), (2, 5), (2, 3, 4)):
        values = np.ones(shape)
        made = release(values, sensitivity=1.0, **{name: 1.0})
        assert made.values.shape == shape
        assert np.array_equal(values, np.ones(shape))


def test_extreme_privacy_from_a_thousandth_to_ten_thousand_keeps_the_values_unclipped() -> None:
    for epsilon in (1e-3, 1.0, 1e4):
        made = release_laplace([1000.0, -1000.0], sensitivity=1e-3, epsilon=epsilon)
        assert made.values == pytest.approx([1000.0, -1000.0], abs=60 * made.scale)
        assert made.scale == pytest.approx(1e-3 / epsilon, rel=1e-3)
