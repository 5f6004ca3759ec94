from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from quietmax.accounting import Cost, GaussianCost, Guarantee, PureCost
from quietmax.audit import distinguish
from quietmax.audit.distinguishing import Draw
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import Answers


def test_the_confidence_holds_although_the_event_is_searched() -> None:
    """Two equal inputs: any positive bound is an error. 150 audits at 90%: more than 46 errors have chance 1e-11."""
    rng = np.random.default_rng(5)
    wrong = 0
    for _ in range(150):
        report = distinguish(
            lambda draws: rng.normal(size=(draws, 3)),
            lambda draws: rng.normal(size=(draws, 3)),
            PureCost(0.0),
            samples=400,
            confidence=0.9,
        )
        wrong += report.verdict == "refuted"
    assert stats.binom.sf(46, 150, 0.1) < 1e-11
    assert wrong <= 46


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_noise_on_a_number_is_measured_to_within_a_fifth(noise: str) -> None:
    """The bound fails to reach four fifths of the truth, or exceeds it, with probability below 1e-6."""
    rng = np.random.default_rng(3)
    draw = rng.normal if noise == "gaussian" else rng.laplace
    claim: Cost = GaussianCost(1.0) if noise == "gaussian" else PureCost(1.0)
    report = distinguish(
        lambda draws: draw(0.0, 1.0, draws),
        lambda draws: draw(1.0, 1.0, draws),
        claim,
        samples=60_000,
        confidence=1 - 1e-7,
    )
    assert report.verdict == "consistent"
    assert report.share > 0.8
    assert report.epsilon_lower_bound <= report.epsilon_claimed


def test_a_value_that_noise_does_not_change_is_found() -> None:
    """Noise on one of three numbers, drawn anew: the difference of the other two tells the inputs apart."""
    rng = np.random.default_rng(4)

    def leaky(gap: float) -> Draw:
        def draw(draws: int) -> NDArray[np.float64]:
            numbers = np.tile([gap, 0.0, 1.0], (draws, 1)) + rng.normal(0, 50.0, (draws, 1))
            numbers[np.arange(draws), rng.integers(0, 3, draws)] += rng.normal(0, 50.0, draws)
            return numbers

        return draw

    report = distinguish(leaky(0.0), leaky(1e-3), PureCost(1.0), samples=8000)
    assert report.verdict == "refuted"
    assert "repeat" in report.evidence


def test_a_rare_leak_is_found() -> None:
    """A release that tells the truth once in 200 draws is not private, whatever it does otherwise."""
    rng = np.random.default_rng(6)

    def sometimes(world: int) -> Draw:
        return lambda draws: np.where(rng.random(draws) < 0.005, 100.0 * world, rng.normal(0, 1.0, draws))

    report = distinguish(sometimes(-1), sometimes(1), PureCost(1.0), samples=60_000)
    assert report.verdict == "refuted"


def test_a_claimed_delta_is_taken_into_account() -> None:
    """The same leak is within (1, 0.01)-privacy."""
    rng = np.random.default_rng(6)

    def sometimes(world: int) -> Draw:
        return lambda draws: np.where(rng.random(draws) < 0.005, 100.0 * world, rng.normal(0, 1.0, draws))

    claim = Guarantee("approximate", epsilon=1.0, delta=0.01, because="Under test.")
    report = distinguish(sometimes(-1), sometimes(1), claim, samples=60_000, confidence=1 - 1e-7)
    assert report.verdict == "consistent"
    assert report.delta == 0.01


def test_the_report_is_json_and_a_table() -> None:
    rng = np.random.default_rng(0)
    report = distinguish(
        lambda draws: rng.normal(size=draws),
        lambda draws: rng.normal(4.0, 1.0, draws),
        GaussianCost(1.0),
        samples=2000,
        subject="two normals",
    )
    record = report.to_json()
    assert record["verdict"] == "refuted"
    assert record["subject"] == "two normals"
    assert record["lower_bound"] > record["claimed"] == 1.0
    rows = dict(report.rows())
    assert rows["verdict"] == "refuted"
    assert rows["mu claimed"] == "1"
    assert "epsilon at least at delta 1e-05" in rows


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"samples": 10}, "at least 64, got 10"),
        ({"confidence": 1.0}, "confidence"),
        ({"delta": 0.0}, "delta"),
    ],
)
def test_invalid_settings_are_errors(arguments: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        distinguish(np.zeros, np.zeros, PureCost(1.0), **arguments)


def test_answers_that_are_not_numbers_are_errors_and_not_called_consistent() -> None:
    def answers(value: float) -> Draw:
        return lambda draws: Answers(np.zeros(draws, np.int64), np.full((draws, 2), value))

    with pytest.raises(InvalidInput, match="NaN"):
        distinguish(answers(np.nan), answers(0.5), PureCost(1.0), samples=1000)


def test_invalid_releases_are_errors() -> None:
    with pytest.raises(InvalidInput, match="NaN"):
        distinguish(lambda draws: np.full(draws, np.nan), np.zeros, PureCost(1.0))
    with pytest.raises(InvalidInput, match="missing"):
        distinguish(lambda draws: np.zeros((draws, 0)), np.zeros, PureCost(1.0))
    with pytest.raises(InvalidInput, match="same release"):
        distinguish(lambda draws: np.zeros((draws, 2)), np.zeros, PureCost(1.0))
    with pytest.raises(InvalidInput, match="same release"):
        distinguish(lambda draws: np.zeros(draws - 1), np.zeros, PureCost(1.0))
