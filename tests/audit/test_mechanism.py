"""Proven mechanisms survive an audit; broken ones and Algorithm 1 are refuted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from quietmax.accounting import GaussianCost, PureCost
from quietmax.audit import Neighbours, audit_mechanism
from quietmax.audit.distinguishing import _largest_change, _worst_case_neighbours
from quietmax.errors import InvalidInput
from quietmax.estimators.teachers import VOTE_BOUNDS, Teachers
from quietmax.mechanisms import Algorithm1, Answers, GaussianScores, Mechanism, NoisyMax, SampledNeuron
from quietmax.models import TrainingSettings
from quietmax.noise import EXACT, NoiseSource
from quietmax.sensitivity import ScoreBounds, Sensitivity

# A proven mechanism is called refuted with at most this probability; the bounds asserted below are missed by a true
# auditor with less, being six standard errors or more inside what is expected.
Noise = Literal["laplace", "gaussian"]
FALSE_ALARM = 1e-7
SURE = 1 - FALSE_ALARM

ONE_AND_ANOTHER = ScoreBounds(
    Sensitivity(1.0, "certified", "made up"), Sensitivity(math.sqrt(2), "certified", "made up")
)

HALF = ScoreBounds(Sensitivity(0.5, "certified", "made up"), Sensitivity(100.0, "certified", "made up"))


def exponential(cost: float) -> NoisyMax:
    return NoisyMax("exponential", bounds=ONE_AND_ANOTHER, per_query=PureCost(cost))


def permute_and_flip(cost: float) -> NoisyMax:
    return NoisyMax("permute-and-flip", bounds=ONE_AND_ANOTHER, per_query=PureCost(cost))


def gaussian_max(cost: float) -> NoisyMax:
    return NoisyMax("gaussian", bounds=ONE_AND_ANOTHER, per_query=GaussianCost(cost))


def laplace_neuron(cost: float) -> SampledNeuron:
    return SampledNeuron("laplace", bounds=ONE_AND_ANOTHER, per_query=PureCost(cost))


def gaussian_neuron(cost: float) -> SampledNeuron:
    return SampledNeuron("gaussian", bounds=ONE_AND_ANOTHER, per_query=GaussianCost(cost))


def gaussian_scores(cost: float) -> GaussianScores:
    return GaussianScores(bounds=ONE_AND_ANOTHER, per_query=GaussianCost(cost))


def gaussian_votes(cost: float) -> GaussianScores:
    return GaussianScores(50, bounds=VOTE_BOUNDS, per_query=GaussianCost(cost))


Build = Callable[[float], Mechanism]
CASES: list[tuple[Build, int, int]] = [
    (exponential, 10, 20_000),
    (permute_and_flip, 10, 20_000),
    (gaussian_max, 10, 20_000),
    (laplace_neuron, 2, 20_000),
    (laplace_neuron, 10, 80_000),
    (gaussian_neuron, 2, 20_000),
    (gaussian_neuron, 10, 20_000),
    (gaussian_scores, 10, 20_000),
    (gaussian_votes, 3, 20_000),
]
NAMES = [f"{build.__name__}-{classes}" for build, classes, _ in CASES]


@pytest.mark.parametrize(("build", "classes", "samples"), CASES, ids=NAMES)
def test_a_proven_mechanism_is_consistent_and_two_fifths_of_its_claim_are_shown(
    build: Build, classes: int, samples: int
) -> None:
    report = audit_mechanism(build(1.0), classes, samples=samples, confidence=SURE, seed=1)
    assert report.verdict == "consistent", report
    assert report.share >= 0.4, report


@pytest.mark.parametrize(("build", "classes", "samples"), CASES, ids=NAMES)
def test_the_same_mechanism_with_half_the_noise_is_refuted(build: Build, classes: int, samples: int) -> None:
    claimed = build(1.0).guarantee(classes)
    report = audit_mechanism(build(2.0), classes, claimed=claimed, samples=samples, confidence=SURE, seed=1)
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


def test_the_exact_noise_of_a_release_can_be_audited() -> None:
    report = audit_mechanism(laplace_neuron(1.0), 2, samples=20_000, confidence=SURE, noise=EXACT)
    assert report.verdict == "consistent"
    assert report.share > 0.4
    assert report.to_json()["noise_source"] == "exact"


def test_an_audit_can_be_repeated() -> None:
    first, second = (audit_mechanism(exponential(1.0), 5, samples=4000, seed=9) for _ in range(2))
    assert first == second
    assert first != audit_mechanism(exponential(1.0), 5, samples=4000, seed=10)


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
    report = audit_mechanism(
        Confident(), 4, change=HALF, claimed=PureCost(1.0), samples=6000, confidence=SURE
    )
    assert report.verdict == "refuted"


def test_teachers_are_consistent_on_the_votes_with_and_without_a_record() -> None:
    """Real votes of one query: train with all records and without one, same key; only one teacher may differ."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(60, 4)).astype(np.float32)
    labels = (features[:, 0] > 0).astype(int)
    settings = TrainingSettings(hidden=(8,), epochs=3, batch_size=10)
    make = Teachers(
        1.0, 1e-5, queries=1, teachers=6, network=settings, classes=(0, 1), declared_size=60, random_state=3
    )
    everybody = make.fit(features, labels)
    votes, mechanism = everybody.ensemble_.scores(features), everybody.predictor_.mechanism
    moved, query, fewer = 0.0, 0, votes
    for left_out in range(12):
        kept = np.delete(np.arange(60), left_out)
        other = make.fit(features[kept], labels[kept]).ensemble_.scores(features)
        change = np.linalg.norm(other - votes, axis=1)
        assert change.max() <= VOTE_BOUNDS.vector.value
        if change.max() > moved:
            moved, query, fewer = float(change.max()), int(change.argmax()), other
    assert moved > 0, "no record mattered, so the audit would compare equal votes"
    pair = Neighbours(votes[query], fewer[query], "a record left out")
    report = audit_mechanism(mechanism, neighbours=pair, samples=40_000, confidence=SURE)
    assert report.verdict == "consistent"
    assert report.lower_bound > 0


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
        (lambda: audit_mechanism(exponential(1.0)), "classes is required"),
        (lambda: audit_mechanism(Confident(), 3, claimed=PureCost(1.0)), "does not state how far"),
        (lambda: Neighbours([0.0, 1.0], [0.0]), "same classes"),
        (lambda: Neighbours([0.0, math.nan], [0.0, 1.0]), "NaN"),
        (lambda: _worst_case_neighbours(1, (1.0, 1.0), 1.0), "at least 2"),
        (
            lambda: audit_mechanism(exponential(1.0), 3, neighbours=Neighbours([0.0, 1.0], [1.0, 0.0])),
            "got 3",
        ),
        (lambda: audit_mechanism(exponential(1.0), neighbours=[]), "at least one pair"),
    ],
)
def test_invalid_arguments_are_errors(call: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        call()
