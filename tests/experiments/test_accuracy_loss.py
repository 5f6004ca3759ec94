"""Algorithm 1's accuracy loss over epsilon, against the curves of the paper's figures."""

from __future__ import annotations

import pytest

from quietmax.experiments.accuracy_loss import EPSILONS, TOLERANCE, LossCurve, measure_accuracy_loss


def _differences(name, real_data, repeats=10):
    curves = measure_accuracy_loss(name, repeats=repeats, data_dir=real_data)
    rows = [row for curve in curves for row in curve.comparisons()]
    assert len(rows) == 2 * len(EPSILONS)
    return {row.quantity: round(row.difference, 4) for row in rows if not row.agrees}


def test_location_is_within_the_tolerance_at_every_epsilon(real_data):
    assert _differences("location", real_data) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "adult"])
def test_mnist_and_adult_are_within_the_tolerance_at_every_epsilon(real_data, name):
    assert _differences(name, real_data) == {}


def test_a_curve_is_compared_point_by_point():
    curve = LossCurve("location", "gaussian", (1.0, 5.0, 3.0), ((0.45, 0.36, 0.1), (0.46, 0.36, 0.1)))
    rows = curve.comparisons()
    assert [row.agrees for row in rows] == [True, False]  # 3.0 is not in the paper
    assert rows[1].difference == pytest.approx(0.36 - 0.3053)
    assert abs(rows[1].difference) > TOLERANCE
