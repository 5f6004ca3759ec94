"""Releases: the accounted sensitivity covers clipping and rounding; noise and choices are distributed as stated.

Fewer than 50 statistical tests reject below 1e-8: together a false alarm has probability below 1e-6.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from quietmax.errors import InvalidInput
from quietmax.noise import (
    ExactNoise,
    SeededNoise,
    choose,
    permute_and_flip,
    release_gaussian,
    release_laplace,
)
from quietmax.noise import release as release_module

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
    grid = release_module._grid_for(sensitivity, privacy, rounding)
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
def test_shapes_are_kept_inputs_untouched_and_values_whole_multiples_of_the_step(release, name) -> None:
    for shape in ((), (0,), (3,), (2, 5), (2, 3, 4)):
        values = np.full(shape, 0.1)  # on no grid, so that noise that is merely added to it would show
        made = release(values, sensitivity=1.0, **{name: 1.0})
        assert made.values.shape == shape
        assert np.array_equal(values, np.full(shape, 0.1))
        assert np.array_equal(made.values % made.step, np.zeros(shape))


def exact(seed: int, margin: float | None = None) -> ExactNoise:
    return ExactNoise(_bytes=np.random.default_rng(seed).bytes, _margin=margin)


def exponential_distribution(keys: np.ndarray) -> np.ndarray:
    weights = np.exp(keys - keys.max())
    return weights / weights.sum()


def permute_and_flip_distribution(keys: np.ndarray) -> np.ndarray:
    """Sum over all orders: each candidate in turn is accepted with probability exp(key - best key)."""
    accept = np.exp(keys - keys.max())
    distribution = np.zeros(keys.size)
    orders = list(itertools.permutations(range(keys.size)))
    for order in orders:
        reached = 1.0 / len(orders)
        for candidate in order:
            distribution[candidate] += reached * accept[candidate]
            reached *= 1.0 - accept[candidate]
    return distribution


def exponent(spread: float, epsilon: float) -> float:
    """What the scores are multiplied by."""
    grid = release_module._choice_grid(spread, epsilon)
    return grid.scale / grid.step


DISTRIBUTIONS = [(choose, exponential_distribution), (permute_and_flip, permute_and_flip_distribution)]
SCORES = [[0.0, 0.3, 1.0, 1.2], [2.0, 2.0], [5.0, -1.0, 4.0, 4.5, 0.0, 4.9], [0.0, -30.0, -0.001]]


@pytest.mark.parametrize(("mechanism", "distribution"), DISTRIBUTIONS)
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("source", [exact(21), SeededNoise(21)], ids=["test", "seeded"])
def test_choices_are_as_frequent_as_the_closed_form_says(mechanism, distribution, scores, source) -> None:
    rows = np.tile(scores, (200_000, 1))
    chosen = mechanism(rows, epsilon=2.0, range_sensitivity=2.0, source=source)
    expected = distribution(exponent(2.0, 2.0) * np.array(scores)) * len(rows)
    counts = np.bincount(chosen, minlength=len(scores))
    likely = expected > 10
    assert counts[~likely].sum() <= 60
    counts, expected = counts[likely], expected[likely]
    assert stats.chisquare(counts, expected / expected.sum() * counts.sum()).pvalue > REJECT


neighbours = st.integers(2, 5).flatmap(
    lambda size: st.tuples(
        arrays(float, size, elements=st.floats(-50, 50)),
        arrays(float, size, elements=st.floats(-1, 1)),
        st.floats(-1e6, 1e6),
    )
)


class Capture:
    """A source that records the gaps and the rate it is asked for, and always chooses the first."""

    name, exact = "capture", False

    def exponential_choice(self, gaps, rate):
        self.keys = -rate * gaps[:, 0]
        return np.zeros(gaps.shape[1], dtype=np.int64)

    permute_and_flip_choice = exponential_choice


@settings(deadline=None, max_examples=300)
@given(neighbours, st.floats(1e-3, 1e3), st.sampled_from(DISTRIBUTIONS))
def test_neighbouring_scores_have_distributions_within_epsilon_even_after_rounding_and_a_common_shift(
    pair, epsilon, mechanism_and_distribution
) -> None:
    scores, moves, shift = pair
    mechanism, distribution = mechanism_and_distribution
    source = Capture()
    spread = max(float(np.ptp(moves)), 1e-3)
    distributions, keys = [], []
    for values in (scores, scores + moves + shift):
        # adding the shift in floats itself moves scores by up to 1e-10, which the range must include
        mechanism(values, epsilon=epsilon, range_sensitivity=spread * (1 + 1e-6), source=source)
        keys.append(source.keys)
        distributions.append(distribution(source.keys))
    assert np.ptp(keys[0] - keys[1]) <= epsilon * (1 + 1e-12)
    seen = (distributions[0] > 1e-250) & (distributions[1] > 1e-250)
    assert (
        np.abs(np.log(distributions[0][seen]) - np.log(distributions[1][seen])).max()
        <= epsilon * (1 + 1e-9) + 1e-9
    )


def test_a_common_shift_beyond_any_clipping_does_not_break_the_range() -> None:
    source = Capture()
    small, large = np.array([0.0, 1.0, 2.0]), np.array([0.0, 1.0, 2.0]) + 2.0**50
    keys = []
    for values in (small, large):
        choose(values, epsilon=1.0, range_sensitivity=1e-9, source=source)
        keys.append(source.keys)
    assert np.array_equal(keys[0], keys[1])


def test_gaps_are_clipped_where_whole_steps_are_still_exact() -> None:
    source = Capture()
    for spread in (1e-6, 1.0, 1e6):
        choose([0.0, 1.0, 1e300], epsilon=1.0, range_sensitivity=spread, source=source)
        rate = release_module._choice_grid(spread, 1.0).scale
        assert source.keys.tolist() == [-rate * 2.0**45, -rate * 2.0**45, 0.0]


@given(st.floats(0.0, 2.0), st.lists(st.floats(-2.0, 2.0), min_size=2, max_size=4))
def test_gaps_near_the_clipping_move_no_further_than_the_range(beyond, moves) -> None:
    source = Capture()
    limit = release_module._choice_grid(4.0, 1.0).step * 2.0**45
    scores = np.append(np.zeros(len(moves) - 1), limit + beyond)
    keys = []
    for values in (scores, scores + np.array(moves)):
        choose(values, epsilon=1.0, range_sensitivity=4.0 + 1e-6, source=source)
        keys.append(source.keys)
    assert np.ptp(keys[0] - keys[1]) <= 1.0 + 1e-9


def test_scores_at_the_ends_of_the_float_range_are_chosen_from_without_a_warning() -> None:
    with np.errstate(all="raise", under="ignore"):
        chosen = choose([[1e308, -1e308], [-1e308, 1e308]], epsilon=1.0, range_sensitivity=2.0)
    assert chosen.tolist() == [0, 1]


def test_rounding_costs_less_than_a_hundred_thousandth_of_the_exponent() -> None:
    assert 1.0 - 1e-5 < exponent(0.6, 1.0) * 0.6 < 1.0
    assert release_module._ROUNDING_STEPS == 3


@pytest.mark.parametrize("mechanism", [choose, permute_and_flip])
@pytest.mark.parametrize(
    ("scores", "epsilon", "spread"),
    [
        ([0.0, np.nan], 1.0, 1.0),
        ([0.0, np.inf], 1.0, 1.0),
        ([[]], 1.0, 1.0),
        (3.0, 1.0, 1.0),
        ([0.0, 1.0], 0.0, 1.0),
        ([0.0, 1.0], 1.0, 0.0),
        ([0.0, 1.0], 1.0, -1.0),
        ([0.0, 1.0], 1.0, None),
    ],
)
def test_bad_input_is_refused_before_anything_is_drawn(mechanism, scores, epsilon, spread) -> None:
    def no_bytes(_count):
        raise AssertionError("entropy was read")

    with pytest.raises(InvalidInput):
        mechanism(scores, epsilon=epsilon, range_sensitivity=spread, source=ExactNoise(_bytes=no_bytes))


@pytest.mark.parametrize("mechanism", [choose, permute_and_flip])
def test_shapes_follow_the_scores(mechanism) -> None:
    for shape in ((2,), (7, 3), (0, 3)):
        assert mechanism(np.zeros(shape), epsilon=1.0, range_sensitivity=2.0).shape == shape[:-1]
    assert mechanism(np.zeros((2, 1)), epsilon=1.0, range_sensitivity=2.0).tolist() == [0, 0]
