"""Releases are told apart where they differ, and a true claim survives."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from quietmax.accounting import Cost, GaussianCost, Guarantee, PureCost
from quietmax.audit import Neighbours, audit_mechanism, distinguish
from quietmax.audit.distinguishing import Draw, _largest_change, _worst_case_neighbours
from quietmax.errors import InvalidInput
from quietmax.mechanisms import Algorithm1, Answers, GaussianScores, Mechanism, NoisyMax, SampledNeuron
from quietmax.noise import EXACT, NoiseSource
from tests.mechanisms.made_up import bounds


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


def test_a_rare_leak_is_found_and_a_claimed_delta_is_taken_into_account() -> None:
    """A release that tells the truth once in 200 draws is not private, but the same leak is within (1, 0.01)."""
    rng = np.random.default_rng(6)

    def sometimes(world: int) -> Draw:
        return lambda draws: np.where(rng.random(draws) < 0.005, 100.0 * world, rng.normal(0, 1.0, draws))

    draws = sometimes(-1), sometimes(1)
    assert distinguish(*draws, PureCost(1.0), samples=60_000).verdict == "refuted"
    claim = Guarantee("approximate", epsilon=1.0, delta=0.01, because="Under test.")
    report = distinguish(*draws, claim, samples=60_000, confidence=1 - 1e-7)
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
    ("first", "arguments", "words"),
    [
        (np.zeros, {"samples": 10}, "at least 64, got 10"),
        (np.zeros, {"confidence": 1.0}, "confidence"),
        (np.zeros, {"delta": 0.0}, "delta"),
        (lambda draws: np.full(draws, np.nan), {}, "NaN"),
        (lambda draws: Answers(np.zeros(draws, np.int64), np.full((draws, 2), np.nan)), {}, "NaN"),
        (lambda draws: np.zeros((draws, 0)), {}, "missing"),
        (lambda draws: np.zeros((draws, 2)), {}, "same release"),
        (lambda draws: np.zeros(draws - 1), {}, "same release"),
    ],
)
def test_invalid_settings_and_releases_are_errors(first: Draw, arguments: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        distinguish(first, np.zeros, PureCost(1.0), **arguments)


# A proven mechanism is called refuted with at most this probability; the bounds asserted below are missed by a true
# auditor with less, being six standard errors or more inside what is expected.
Noise = Literal["laplace", "gaussian"]
FALSE_ALARM = 1e-7
SURE = 1 - FALSE_ALARM
VOTES = bounds(1.0, math.sqrt(2))
BUILDS: dict[str, Callable[[float], Mechanism]] = {
    "exponential": lambda cost: NoisyMax("exponential", bounds=VOTES, per_query=PureCost(cost)),
    "permute-and-flip": lambda cost: NoisyMax("permute-and-flip", bounds=VOTES, per_query=PureCost(cost)),
    "gaussian-max": lambda cost: NoisyMax("gaussian", bounds=VOTES, per_query=GaussianCost(cost)),
    "laplace-neuron": lambda cost: SampledNeuron("laplace", bounds=VOTES, per_query=PureCost(cost)),
    "gaussian-neuron": lambda cost: SampledNeuron("gaussian", bounds=VOTES, per_query=GaussianCost(cost)),
    "gaussian-scores": lambda cost: GaussianScores(bounds=VOTES, per_query=GaussianCost(cost)),
    "gaussian-votes": lambda cost: GaussianScores(50, bounds=VOTES, per_query=GaussianCost(cost)),
}


@pytest.mark.parametrize(
    ("name", "classes", "samples"),
    [
        ("exponential", 10, 20_000),
        ("permute-and-flip", 10, 20_000),
        ("gaussian-max", 10, 20_000),
        ("laplace-neuron", 2, 20_000),
        ("laplace-neuron", 10, 80_000),
        ("gaussian-neuron", 2, 20_000),
        ("gaussian-neuron", 10, 20_000),
        ("gaussian-scores", 10, 20_000),
        ("gaussian-votes", 3, 20_000),
    ],
)
def test_a_proven_mechanism_is_consistent_two_fifths_are_shown_and_half_the_noise_is_refuted(
    name: str, classes: int, samples: int
) -> None:
    options: Any = {"samples": samples, "confidence": SURE, "seed": 1}
    report = audit_mechanism(BUILDS[name](1.0), classes, **options)
    assert report.verdict == "consistent", report
    assert report.share >= 0.4, report
    claimed = BUILDS[name](1.0).guarantee(classes)
    report = audit_mechanism(BUILDS[name](2.0), classes, claimed=claimed, **options)
    assert report.verdict == "refuted", report


def algorithm1(noise: Noise, classes: int, epsilon: float = 1.0, factor: float = 1.0) -> Algorithm1:
    share = epsilon / (2 * classes + 1) if noise == "laplace" else epsilon / math.sqrt(4 * classes + 1)
    return Algorithm1(noise, share, factor * share, logit_sensitivity=0.358, probability_sensitivity=1.0)


@pytest.mark.parametrize(
    ("noise", "classes"), [("laplace", 3), ("laplace", 10), ("gaussian", 10), ("laplace", 30)]
)
def test_algorithm_1_with_three_or_more_classes_is_refuted_within_its_own_sensitivity(
    noise: Noise, classes: int
) -> None:
    """THEORY 2.1: at the paper's epsilon = 1, found without being told where to look."""
    mechanism = algorithm1(noise, classes)
    pairs = _worst_case_neighbours(classes, _largest_change(mechanism, None), 1.0)
    assert max(np.abs(pair.second - pair.first).max() for pair in pairs) <= 0.358 * (1 + 1e-12)
    report = audit_mechanism(mechanism, classes, samples=8000, confidence=SURE)
    assert report.verdict == "refuted"
    assert report.claimed == pytest.approx(1.0)
    assert report.lower_bound > 4
    assert "repeat" in report.evidence


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_algorithm_1_with_two_classes_is_consistent_with_its_true_cost_but_not_with_half_the_noise(
    noise: Noise,
) -> None:
    """THEORY 2.2: cost 2*e_n, less than the paper claims."""
    claimed = algorithm1(noise, 2).guarantee(2)
    whole = audit_mechanism(algorithm1(noise, 2), 2, samples=100_000, confidence=SURE)
    assert whole.verdict == "consistent"
    assert whole.share >= 0.4
    half = audit_mechanism(
        algorithm1(noise, 2, factor=2.0), 2, claimed=claimed, samples=100_000, confidence=SURE
    )
    assert half.verdict == "refuted"


def test_a_shift_common_to_all_logits_leaks_nothing() -> None:
    mechanism = algorithm1("laplace", 4)
    shifted = Neighbours([0.3, -0.2, 1.0, 0.0], [0.5, 0.0, 1.2, 0.2])
    report = audit_mechanism(mechanism, neighbours=shifted, samples=20_000, confidence=SURE)
    assert report.verdict == "consistent"
    assert report.lower_bound == 0


def test_an_audit_can_be_repeated_unless_it_draws_the_exact_noise_of_a_release() -> None:
    audit = partial(audit_mechanism, BUILDS["exponential"](1.0), 5, samples=4000)
    assert audit(seed=9) == audit(seed=9)
    assert audit(seed=9) != audit(seed=10)
    report = audit_mechanism(BUILDS["laplace-neuron"](1.0), 2, samples=20_000, confidence=SURE, noise=EXACT)
    assert report.verdict == "consistent"
    assert report.share > 0.4
    assert report.to_json()["noise_source"] == "exact"


class Confident:
    """A mechanism of another package: a noisy label whose probability is released without noise."""

    name = "confident"

    def release(self, scores: NDArray[np.float64], source: NoiseSource) -> Answers:
        labels = source.exponential_choice(-scores.T + scores.max(), 0.5)
        best = np.exp(scores.max(1)) / np.exp(scores).sum(1)
        probabilities = np.tile(((1 - best) / (scores.shape[1] - 1))[:, None], scores.shape[1])
        probabilities[np.arange(len(labels)), labels] = best
        return Answers(labels, probabilities)


def test_a_mechanism_that_releases_one_number_without_noise_is_refuted() -> None:
    change = bounds(0.5, 100.0)
    report = audit_mechanism(
        Confident(), 4, change=change, claimed=PureCost(1.0), samples=6000, confidence=SURE
    )
    assert report.verdict == "refuted"


def test_worst_case_neighbours_differ_by_at_most_the_given_change() -> None:
    for classes in (2, 3, 10):
        pairs = _worst_case_neighbours(classes, (0.7, 0.8), 0.5, seed=4)
        moves = np.stack([pair.second - pair.first for pair in pairs])
        assert np.abs(moves).max() <= 0.7 * (1 + 1e-9)
        assert np.linalg.norm(moves, axis=1).max() <= 0.8 * (1 + 1e-9)
        assert np.linalg.norm(moves, axis=1).max() >= 0.8 * (1 - 1e-9)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: audit_mechanism(BUILDS["exponential"](1.0)), "classes is required"),
        (lambda: audit_mechanism(Confident(), 3, claimed=PureCost(1.0)), "does not state how far"),
        (lambda: Neighbours([0.0, 1.0], [0.0]), "same classes"),
        (lambda: Neighbours([0.0, math.nan], [0.0, 1.0]), "NaN"),
        (lambda: _worst_case_neighbours(1, (1.0, 1.0), 1.0), "at least 2"),
        (
            lambda: audit_mechanism(
                BUILDS["exponential"](1.0), 3, neighbours=Neighbours([0.0, 1.0], [1.0, 0.0])
            ),
            "got 3",
        ),
        (lambda: audit_mechanism(BUILDS["exponential"](1.0), neighbours=[]), "at least one pair"),
    ],
)
def test_invalid_arguments_are_errors(call: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        call()
