"""The noisy size and centre, the settings, and the gradient method."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import norm

from quietmax.accounting.costs import GaussianCost
from quietmax.errors import InvalidInput
from quietmax.estimators import HeadSettings
from quietmax.estimators.blocks import Table
from quietmax.estimators.head import weights
from quietmax.estimators.head.estimator import (
    PrivateHead,
    _descend,
    _released_centre,
    _released_moments,
    _released_size,
    _step_mus,
    _whitened,
    _whitening_matrix,
)
from quietmax.estimators.head.exact_sums import _unit_rows, clipped_rows, gradient_grid, moments_grid
from quietmax.estimators.head.weights import GradientPlan, _gradient_plan, moments_share
from quietmax.noise import SeededNoise
from tests.estimators.made import LABELS, PUBLIC, TABLE


def test_the_count_and_the_centre_get_the_stated_noise() -> None:
    counts = np.array([_released_size(1000, 0.1, SeededNoise(seed)) for seed in range(400)])
    assert abs((np.square((counts - 1000) * 0.1).sum() - 400) / math.sqrt(800)) < 6
    assert _released_size(0, 0.1, SeededNoise(1)) >= 1.0


def test_a_noisy_count_is_no_larger_than_the_grids_of_sums_allow() -> None:
    counts = [_released_size(1000, 1e-12, SeededNoise(seed)) for seed in range(20)]
    assert max(counts) == 2.0**35
    # Sums in units of 2^-40 are shifted by this many bits; `ExactSum._to_grid` takes at most 31.
    assert math.log2(moments_grid(max(counts))) + 40 == 31
    assert math.log2(gradient_grid(max(counts))) + 40 < 31
    table = Table(np.zeros((10, 5001), np.float32), np.zeros(10, np.int64), 2)
    centre = _released_centre(table, 1e4, 0.5, SeededNoise(0))
    assert abs((np.square(centre * 1e4 * 0.5).sum() - 5000) / math.sqrt(10_000)) < 6
    assert np.linalg.norm(_released_centre(table, 1.0, 1e-3, SeededNoise(0))) <= 1.0


SHAPES = ((500, 20), (1200, 447), (10_000, 3970), (60_000, 3970), (50_000, 10_977), (1_000_000, 52))
"""Sizes and numbers of features of heads."""
KINDS: tuple[weights.Whitening, ...] = ("none", "moments", "centre")


@pytest.mark.parametrize("whitening", KINDS)
@pytest.mark.parametrize("mu", [0.05, 0.27, 0.72, 1.6])
@pytest.mark.parametrize(("size", "features"), SHAPES)
def test_the_plan_keeps_the_noise_on_a_logit_unless_training_is_long_enough_with_less(
    size: int, features: int, mu: float, whitening: weights.Whitening
) -> None:
    plan = _gradient_plan(size, features, mu, classes=3, whitening=whitening)
    length = plan.learning_rate * plan.max_grad_norm * plan.steps
    noise = length / (mu * size)
    longest = min(weights.LONGEST_TRAINING, weights.TRAINING_PER_FEATURE * features)
    if whitening == "moments":
        longest = min(longest, weights.MOMENTS_RATE * 3 * features * plan.steps * plan.max_grad_norm)
    if length == pytest.approx(longest):
        assert noise <= weights.GRADIENT_NOISE * (1 + 1e-12)
    else:
        assert length < longest
        assert noise == pytest.approx(weights.GRADIENT_NOISE)


@pytest.mark.parametrize("whitening", KINDS)
@pytest.mark.parametrize("features", [20, 447, 3970, 10_977])
def test_training_becomes_no_shorter_or_its_steps_longer_when_the_budget_or_the_size_grows(
    features: int, whitening: weights.Whitening
) -> None:
    def length(size: float, mu: float) -> float:
        plan = _gradient_plan(size, features, mu, classes=3, whitening=whitening)
        # With clear second moments fewer steps are enough.
        return plan.learning_rate * plan.max_grad_norm * (1 if whitening == "moments" else plan.steps)

    sizes, mus = np.geomspace(100, 1e7, 60), np.geomspace(0.01, 10, 60)
    for lengths in ([length(size, 0.27) for size in sizes], [length(10_000, mu) for mu in mus]):
        assert (np.diff(lengths) >= -1e-9 * np.array(lengths[1:])).all()


def test_the_number_of_steps_is_limited_by_the_numbers_read() -> None:
    for size, features in SHAPES:
        for whitening, most in (("none", weights.STEPS), ("centre", weights.STEPS), ("moments", 40)):
            plan = _gradient_plan(size, features, 0.27, whitening=whitening)  # type: ignore[arg-type]
            assert plan.steps <= most
            if plan.steps > weights.FEWEST_STEPS and whitening != "moments":
                assert plan.steps * size * features <= weights.NUMBERS_READ
    assert _gradient_plan(50_000, 10_977, 0.27).steps == weights.STEPS
    assert _gradient_plan(1e7, 10_977, 0.27).steps == weights.FEWEST_STEPS


def test_whitened_by_second_moments_there_are_fewer_steps_the_clearer_these_are() -> None:
    steps = [
        [_gradient_plan(size, 52, mu, whitening="moments").steps for size in (2000, 2e4, 5e4, 1e5, 1e6)]
        for mu in (0.25, 1.0)
    ]
    assert steps == [[40, 38, 15, 10, 10], [40, 38, 15, 10, 10]]
    assert [_gradient_plan(6e4, 785, mu, whitening="moments").steps for mu in (0.25, 3.0, 12.0)] == [
        40,
        40,
        15,
    ]


def test_two_classes_have_the_learning_rate_of_their_two_lines_and_a_clip_of_their_difference() -> None:
    for whitening in KINDS:
        one, three = (
            _gradient_plan(5000, 20, 0.27, classes=classes, whitening=whitening) for classes in (2, 3)
        )
        assert one.learning_rate == pytest.approx(three.learning_rate)
        assert one.max_grad_norm == pytest.approx(three.max_grad_norm * math.sqrt(0.5))


def test_given_settings_are_kept() -> None:
    given = HeadSettings(steps=7, learning_rate=3.0, max_grad_norm=0.4)
    plan = _gradient_plan(1000, 20, 0.27, settings=given)
    assert plan == GradientPlan(7, 3.0, 0.4)
    assert plan.to_json() == {"steps": 7, "learning_rate": 3.0, "max_grad_norm": 0.4, "schedule": "linear"}


@pytest.mark.parametrize("mu", [1e-3, 0.2680742, 7.0])
@pytest.mark.parametrize("steps", [1, 2, 3, 20, 99, 100, 1000])
def test_the_mus_of_the_steps_fall_with_the_learning_rate_and_add_up_to_the_whole(
    steps: int, mu: float
) -> None:
    """In exact arithmetic: what the guarantee counts is at least the sum, and too much by less than 2^-47."""
    parts = _step_mus(steps, mu)
    np.testing.assert_allclose(parts**2 / parts[-1] ** 2, np.arange(steps, 0, -1), rtol=1e-12)
    total = sum((GaussianCost(float(part)).amount for part in parts), Fraction())
    counted = GaussianCost(mu).amount * weights._STEPS_ROUNDED
    assert total <= counted <= total * (1 + Fraction(1, 2**47))


def test_all_noise_together_is_what_a_constant_learning_rate_would_have_added() -> None:
    """Rows of zeros: only noise moves the weights. Chi-square at six deviations."""
    table = Table(np.zeros((4, 4000), np.float32), np.zeros(4, np.int64), 2)
    plan = GradientPlan(steps=30, learning_rate=2.0, max_grad_norm=0.3)
    weights = _descend(table, plan, 50.0, 0.5, SeededNoise(4))
    kappa = 2.0 * 0.3 * 30 / (0.5 * 50.0)
    differences = (weights[0] - weights[1]) / (kappa * 2)  # both scores move
    assert abs(np.square(differences).sum() - 4000) / math.sqrt(8000) < 6


def test_each_step_gets_the_noise_and_the_learning_rate_of_the_schedule() -> None:
    """One record of length 1 and no noise to speak of: every step is computed again in float64."""
    row = np.array([[0.0, 1.0]], np.float32)
    plan = GradientPlan(steps=3, learning_rate=0.6, max_grad_norm=0.2)
    weights = _descend(Table(row, np.array([1]), 2), plan, 1.0, 1e9, SeededNoise(0))
    # The residual p - 1 is clipped to 0.2; the rates 0.9, 0.6 and 0.3 add up to 3 * 0.6.
    np.testing.assert_allclose(weights[:, 1], np.array([-1, 1]) * 1.8 * 0.2, atol=1e-5)
    np.testing.assert_allclose(weights[:, 0], 0.0, atol=1e-7)


def test_accuracy_does_not_fall_with_epsilon_where_the_rows_vary_mostly_in_one_direction() -> None:
    """With constant steps the weights oscillate along the first column: 0.68, 0.59 and 0.69 at epsilon 2, 8 and 50."""
    rng = np.random.default_rng(3)
    normal = rng.normal(size=(2900, 30))
    records = 0.5 + 0.1 * normal * np.geomspace(1.0, 0.1, 30)
    labels = (normal @ rng.normal(size=30) > 0).astype(int)
    accuracies = []
    for epsilon in (0.5, 2.0, 8.0, 50.0):
        head = PrivateHead(
            epsilon,
            classes=(0, 1),
            declared_size=900,
            settings=HeadSettings(second_moments=0.0),
            random_state=1,
        )
        head.fit(records[:900], labels[:900])
        accuracies.append(head.score(records[900:], labels[900:]))
    assert accuracies == sorted(accuracies)
    assert accuracies[-1] > 0.72


def test_a_learning_rate_that_makes_the_weights_explode_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="Training diverged"):
        PrivateHead(settings=HeadSettings(learning_rate=1e300), random_state=0, **PUBLIC).fit(TABLE, LABELS)


def test_weights_of_any_reasonable_size_keep_the_sums_exact() -> None:
    head = PrivateHead(settings=HeadSettings(learning_rate=1e40), random_state=0, **PUBLIC).fit(TABLE, LABELS)
    assert np.isfinite(head.coef_).all()


def test_a_thousand_releases_on_neighbours_cannot_be_told_apart_better_than_the_claim_allows() -> None:
    """The best test for one step projects on the true difference; its two distributions lie at most mu apart."""
    mu, releases = 2.0, 1000
    plan = GradientPlan(steps=1, learning_rate=1.0, max_grad_norm=0.3)
    rows = _unit_rows(clipped_rows(TABLE[:3].astype(np.float32), 1.0), np.zeros(4), 0.2).astype(np.float32)
    tables = [Table(rows[:kept], LABELS[:kept], 3) for kept in (3, 2)]
    clean = [_descend(table, plan, 3.0, 1e9, SeededNoise(0)) for table in tables]
    direction = clean[0] - clean[1]
    seen = [
        np.array(
            [
                (_descend(table, plan, 3.0, mu, SeededNoise(start + seed)) * direction).sum()
                for seed in range(releases)
            ]
        )
        for table, start in zip(tables, (0, releases), strict=True)
    ]
    best = max(np.mean(seen[0] > cut) - np.mean(seen[1] > cut) for cut in np.concatenate(seen))
    # the true advantage is at most 2 Phi(mu/2) - 1; by DKW each empirical distribution is off by more with p = 1e-8
    margin = 2 * math.sqrt(math.log(2e8) / (2 * releases))
    assert 0.5 < best <= 2 * norm.cdf(mu / 2) - 1 + margin < 0.9


def test_the_second_moments_get_the_stated_noise() -> None:
    """Noise of 1/mu on the diagonal and 1/(sqrt(2) mu) above it, mirrored below: chi-square at six deviations."""
    table = Table(np.zeros((10, 120), np.float32), np.zeros(10, np.int64), 2)
    noise = _released_moments(table, 10.0, 0.5, SeededNoise(3)) * 0.5
    np.testing.assert_array_equal(noise, noise.T)
    diagonal, above = np.diag(noise), noise[np.triu_indices(120, 1)] * math.sqrt(2)
    assert abs(np.square(diagonal).sum() - 120) / math.sqrt(240) < 6
    assert abs(np.square(above).sum() / len(above) - 1) < 6 * math.sqrt(2 / len(above)) + 4e-4


def test_without_noise_the_whitening_makes_the_moments_equal_in_all_directions() -> None:
    rng = np.random.default_rng(5)
    features = rng.normal(size=(20_000, 6)) * np.geomspace(1.0, 0.01, 6)
    rows = _unit_rows(clipped_rows((features / 5).astype(np.float32), 1.0), np.zeros(6), 0.2).astype(
        np.float32
    )
    table = Table(rows, np.zeros(20_000, np.int64), 2)
    before = np.linalg.eigvalsh(_released_moments(table, 2e4, 1e9, SeededNoise(0)) / 20_000)
    matrix = _whitening_matrix(_released_moments(table, 2e4, 1e9, SeededNoise(0)), 20_000.0, 1e9)
    changed = _whitened(matrix, table).rows
    after = np.linalg.eigvalsh(np.cov(changed.T, bias=True) + np.outer(changed.mean(0), changed.mean(0)))
    assert before[-1] / before[0] > 1000
    assert after[-1] / after[0] < 5


def test_second_moments_are_used_where_the_size_is_large_against_the_features() -> None:
    for size, features in ((1_000_000, 52), (39_000, 100), (4000, 120), (4000, 52), (1000, 20)):
        assert moments_share(size, features, 0.26) == weights.MOMENTS_SHARE
    for size, features in ((60_000, 3970), (10_000, 3970), (1200, 447), (400, 6), (1000, 120)):
        assert moments_share(size, features, 0.26) == 0.0
