"""The noisy size and centre, the settings, and the gradient method."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.datasets import make_blobs

from quietmax.errors import InvalidInput
from quietmax.estimators.head import training
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.head.exact_sums import Table, clipped_rows, unit_rows
from quietmax.estimators.head.training import (
    Allowance,
    descend,
    moments_share,
    released_centre,
    released_moments,
    released_size,
    whitened,
    whitening_matrix,
)
from quietmax.noise import SeededNoise

TABLE, LABELS = make_blobs(400, centers=3, n_features=4, cluster_std=1.0, random_state=0)
TABLE = (TABLE - TABLE.min(0)) / (TABLE.max(0) - TABLE.min(0))
PUBLIC = {"classes": (0, 1, 2), "declared_size": 400}


def test_the_count_and_the_centre_get_the_stated_noise() -> None:
    counts = np.array([released_size(1000, 0.1, SeededNoise(seed)) for seed in range(400)])
    assert abs((np.square((counts - 1000) * 0.1).sum() - 400) / math.sqrt(800)) < 6
    assert released_size(0, 0.1, SeededNoise(1)) >= 1.0
    rows = np.zeros((10, 5001), np.float32)
    centre = released_centre(rows, 1e4, 0.5, SeededNoise(0))
    assert abs((np.square(centre * 1e4 * 0.5).sum() - 5000) / math.sqrt(10_000)) < 6
    assert np.linalg.norm(released_centre(rows, 1.0, 1e-3, SeededNoise(0))) <= 1.0


def test_the_plan_depends_on_public_numbers_only_and_keeps_the_noise_on_a_logit() -> None:
    for size, features, classes, mu in (
        (1200, 447, 30, 0.26),
        (10_000, 3970, 10, 0.26),
        (10_000, 138, 2, 1.0),
    ):
        plan = training.gradient_plan(size, features, classes, mu)
        assert training.FEWEST_STEPS <= plan.steps <= training.MOST_STEPS
        assert plan.learning_rate * plan.max_grad_norm * plan.steps / (mu * size) == pytest.approx(
            training.GRADIENT_NOISE
        )
    assert (
        training.gradient_plan(1e6, 10, 2, 100.0).learning_rate * training.MAX_GRAD_NORM
        == training.LONGEST_STEP
    )


def test_a_learning_rate_that_makes_the_weights_explode_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="Training diverged"):
        PrivateHead(learning_rate=1e300, random_state=0, **PUBLIC).fit(TABLE, LABELS)


def test_weights_of_any_reasonable_size_keep_the_sums_exact() -> None:
    head = PrivateHead(learning_rate=1e40, random_state=0, **PUBLIC).fit(TABLE, LABELS)
    assert np.isfinite(head.coef_).all()


def test_shares_of_the_budget_add_up_to_it() -> None:
    parts = Allowance.of(0.8, 0.01, 0.05)
    assert math.hypot(parts.size or 0, parts.centre or 0, parts.training) == pytest.approx(0.8, rel=1e-9)
    assert (parts.size or 0) ** 2 + (parts.centre or 0) ** 2 + parts.training**2 <= 0.64


def test_a_thousand_releases_on_neighbours_cannot_be_told_apart_better_than_the_claim_allows() -> None:
    """The best test for one step projects on the true difference; its two distributions lie at most mu apart."""
    mu, releases = 2.0, 1000
    plan = training.GradientPlan(steps=1, learning_rate=1.0, max_grad_norm=0.3)
    rows = unit_rows(clipped_rows(TABLE[:3].astype(np.float32), 1.0), np.zeros(4), 0.2).astype(np.float32)
    tables = [Table(rows[:kept], LABELS[:kept], 3) for kept in (3, 2)]
    clean = [descend(table, plan, 3.0, 1e9, SeededNoise(0)) for table in tables]
    direction = clean[0] - clean[1]
    seen = [
        np.array(
            [
                (descend(table, plan, 3.0, mu, SeededNoise(start + seed)) * direction).sum()
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
    noise = released_moments(table, 0.5, SeededNoise(3)) * 0.5
    np.testing.assert_array_equal(noise, noise.T)
    diagonal, above = np.diag(noise), noise[np.triu_indices(120, 1)] * math.sqrt(2)
    assert abs(np.square(diagonal).sum() - 120) / math.sqrt(240) < 6
    assert abs(np.square(above).sum() / len(above) - 1) < 6 * math.sqrt(2 / len(above)) + 4e-4


def test_without_noise_the_whitening_makes_the_moments_equal_in_all_directions() -> None:
    rng = np.random.default_rng(5)
    features = rng.normal(size=(20_000, 6)) * np.geomspace(1.0, 0.01, 6)
    rows = unit_rows(clipped_rows((features / 5).astype(np.float32), 1.0), np.zeros(6), 0.2).astype(
        np.float32
    )
    table = Table(rows, np.zeros(20_000, np.int64), 2)
    before = np.linalg.eigvalsh(released_moments(table, 1e9, SeededNoise(0)) / 20_000)
    matrix = whitening_matrix(released_moments(table, 1e9, SeededNoise(0)), 20_000.0, 1e9)
    after = np.linalg.eigvalsh(
        np.cov(whitened(rows, matrix).T, bias=True) + np.outer(rows.mean(0), rows.mean(0))
    )
    assert before[-1] / before[0] > 1000
    assert after[-1] / after[0] < 5


def test_second_moments_are_used_where_the_size_is_large_against_the_features() -> None:
    assert moments_share(1e6, 52, 0.26) == training.MOMENTS_SHARE
    assert moments_share(39_000, 100, 0.26) == training.MOMENTS_SHARE
    for size, features in ((60_000, 3970), (10_000, 3970), (1200, 447), (400, 6), (4000, 120)):
        assert moments_share(size, features, 0.26) == 0.0


def test_shares_with_second_moments_add_up_to_the_budget() -> None:
    parts = Allowance.of(0.8, 0.01, 0.05, 0.1)
    each = [part or 0.0 for part in (parts.size, parts.centre, parts.moments, parts.training)]
    assert math.hypot(*each) == pytest.approx(0.8, rel=1e-9)
    assert sum(part**2 for part in each) <= 0.64
    assert parts.moments == pytest.approx(0.8 * math.sqrt(0.1))


def test_the_released_weights_are_the_mean_after_the_last_steps() -> None:
    rows = unit_rows(clipped_rows(TABLE.astype(np.float32), 1.0), np.zeros(4), 0.2).astype(np.float32)
    table = Table(rows, LABELS, 3)
    after = [
        descend(table, training.GradientPlan(steps, 2.0, 0.3), 400.0, math.sqrt(steps), SeededNoise(1))
        for steps in (1, 2, 3, 4)
    ]
    averaged = descend(table, training.GradientPlan(4, 2.0, 0.3, averaged=3), 400.0, 2.0, SeededNoise(1))
    np.testing.assert_allclose(averaged, np.mean(after[1:], axis=0), atol=1e-12)


def test_whitened_rows_get_plans_of_few_steps_that_keep_the_noise_on_a_logit() -> None:
    large = training.gradient_plan(1e6, 52, 2, 0.26, whitening="moments")
    assert (large.steps, large.averaged) == (20, 10)
    assert large.learning_rate * large.max_grad_norm == training.LONGEST_WHITENED_STEP * 52
    assert training.gradient_plan(1e4, 52, 2, 0.26, whitening="moments").steps == 40
    for size, features, whitening, kappa in (
        (4000, 40, "moments", training.GRADIENT_NOISE),
        (39_000, 1750, "centre", training.INDICATOR_NOISE),
    ):
        plan = training.gradient_plan(size, features, 2, 0.26, whitening=whitening)  # type: ignore[arg-type]
        assert plan.averaged == plan.steps // 2
        noise = plan.learning_rate * plan.max_grad_norm * plan.steps / (0.26 * size)
        assert noise == pytest.approx(kappa)
    assert training.gradient_plan(39_000, 1750, 2, 0.26).averaged == 1
