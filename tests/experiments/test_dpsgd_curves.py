"""Published DP-SGD beside the paper's curves."""

from __future__ import annotations

import numpy as np
import pytest

from quietmax.errors import InvalidInput
from quietmax.experiments.dpsgd_curves import TOLERANCE, PublishedCurve, published_dpsgd_losses


def test_a_curve_is_compared_point_by_point():
    curve = PublishedCurve("location", "rdp", (1.0, 5.0, 3.0), ((0.85, 0.66, 0.1), (0.87, 0.68, 0.1)))
    rows = curve.comparisons()
    assert [row.agrees for row in rows] == [True, False]  # 3.0 is not in the paper
    assert rows[1].difference == pytest.approx(0.67 - 0.5816)
    assert abs(rows[1].difference) > TOLERANCE
    assert rows[0].spread == pytest.approx(0.02 / np.sqrt(2))
    assert curve.to_json()["means"] == pytest.approx([0.86, 0.67, 0.1])


@pytest.mark.parametrize("loss", [pytest.param("cross-entropy", marks=pytest.mark.slow), "convexified"])
def test_less_noise_loses_less_accuracy_and_progress_is_told(loss):
    """Embedded digits: with epsilon 1000 under zCDP nearly nothing is lost, with 0.01 everything."""
    told = []
    curves = published_dpsgd_losses(
        "mnist-5k",
        repeats=2,
        records=200,
        epsilons=(0.01, 1000.0),
        accountants=("zcdp", "nc"),
        loss=loss,
        progress=lambda *now: told.append(now),
    )
    assert [curve.accountant for curve in curves] == ["zcdp", "nc"]
    assert np.shape(curves[0].losses) == (2, 2)
    assert curves[0].means[0] > 0.7
    assert curves[0].means[1] < 0.1
    assert curves[0].comparisons() == []  # not a data set of the paper
    assert told[-1][0] == told[-1][1]


def test_senseless_requests_are_refused():
    with pytest.raises(InvalidInput, match="repeats"):
        published_dpsgd_losses("mnist-5k", repeats=0)
    with pytest.raises(InvalidInput, match="loss"):
        published_dpsgd_losses("mnist-5k", loss="hinge")
