"""The proven mechanisms: distributions, costs, and that neighbours differ by no more than stated (THEORY 3.3, 3.4)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from quietmax.accounting import GaussianCost, PureCost, compose
from quietmax.errors import InvalidInput
from quietmax.mechanisms import GaussianScores, NoisyMax, SampledNeuron
from quietmax.mechanisms import base as base_module
from quietmax.mechanisms.base import _onto_simplex
from quietmax.models.training import softmax
from quietmax.noise import EXACT, SeededNoise
from tests.mechanisms.made_up import bounds, neighbours, spied

BOUNDS = bounds()


FALSE_ALARM = 1e-7


@given(epsilon=st.floats(1e-3, 20), classes=st.integers(2, 8), seed=st.integers(0, 10**6))
def test_the_exponential_choice_never_exceeds_epsilon_on_neighbours(epsilon, classes, seed) -> None:
    """The distribution itself, not samples: log-ratios lie within epsilon, and their range too (bounded range)."""
    limits = bounds()
    first, second = neighbours(np.random.default_rng(seed), classes, limits)
    ratios = np.log(softmax(epsilon * first / limits.spread)) - np.log(
        softmax(epsilon * second / limits.spread)
    )
    assert np.abs(ratios).max() <= epsilon * (1 + 1e-9)
    assert ratios.max() - ratios.min() <= epsilon * (1 + 1e-9)


@pytest.mark.parametrize("source", [EXACT, SeededNoise(2)], ids=["exact", "seeded"])
def test_the_choice_has_the_stated_distribution(source) -> None:
    scores, limits = np.array([1.0, 0.3, -0.8, 0.9]), bounds()
    chosen = NoisyMax("exponential", bounds=limits, per_query=PureCost(2.0)).release(
        np.tile(scores, (30_000, 1)), source
    )
    expected = 30_000 * softmax(2.0 * scores / limits.spread)
    assert stats.chisquare(np.bincount(chosen.labels, minlength=4), expected).pvalue > FALSE_ALARM
    assert chosen.probabilities is None


def test_gaussian_noisy_max_has_the_stated_distribution() -> None:
    """Two classes: the difference of two scores carries N(0, 2*sigma^2)."""
    limits, scores = bounds(), np.array([0.4, 0.0])
    mechanism = NoisyMax("gaussian", bounds=limits, per_query=GaussianCost(0.5))
    labels = mechanism.release(np.tile(scores, (40_000, 1)), EXACT).labels
    sigma = limits.vector.value / 0.5
    expected = stats.norm.sf(0.4, scale=math.sqrt(2) * sigma)
    assert stats.binomtest(int((labels == 1).sum()), 40_000, expected).pvalue > FALSE_ALARM


def test_permute_and_flip_is_right_at_least_as_often_as_the_exponential_mechanism() -> None:
    """McKenna and Sheldon 2020; a one-sided test at false-alarm probability 1e-7."""
    scores = np.tile([3.0, 2.0, 1.0, 0.0, 0.0, 0.0], (40_000, 1))
    right = {}
    for method in ("exponential", "permute-and-flip"):
        mechanism = NoisyMax(method, bounds=bounds(1, math.sqrt(2)), per_query=PureCost(1.0))
        right[method] = int((mechanism.release(scores, EXACT).labels == 0).sum())
    gain = (right["permute-and-flip"] - right["exponential"]) / math.sqrt(2 * 40_000 * 0.25)
    assert gain > 5.2


@given(
    rows=st.integers(1, 5), classes=st.integers(2, 9), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 10**6)
)
def test_projection_gives_the_nearest_probabilities(rows, classes, scale, seed) -> None:
    points = np.random.default_rng(seed).normal(0, scale, (rows, classes))
    projected = _onto_simplex(points)
    np.testing.assert_allclose(projected.sum(1), 1.0, atol=1e-9 * max(scale, 1))
    assert (projected >= 0).all()
    # Optimality: no feasible direction towards a vertex comes closer.
    for row, vertex in itertools.product(range(rows), range(classes)):
        step = np.eye(classes)[vertex] - projected[row]
        assert (points[row] - projected[row]) @ step <= 1e-7 * max(scale, 1)


def test_a_label_is_counted_in_the_measure_asked_for() -> None:
    assert NoisyMax("exponential").measure == NoisyMax("permute-and-flip").measure == "pure"
    assert NoisyMax("exponential", count_in="pure").measure == "pure"
    assert NoisyMax("exponential", count_in="gaussian").measure == "gaussian"
    assert NoisyMax("gaussian").measure == NoisyMax("gaussian", count_in="gaussian").measure == "gaussian"
    assert GaussianScores().measure == SampledNeuron("gaussian").measure == "gaussian"
    assert SampledNeuron("laplace").measure == "pure"


def test_votes_are_projected_and_logits_go_through_the_softmax() -> None:
    sure = GaussianCost(1e6)
    votes = GaussianScores(votes=10, bounds=BOUNDS, per_query=sure).release(
        np.array([[7.0, 3.0, 0.0]]), EXACT
    )
    np.testing.assert_allclose(votes.probabilities, [[0.7, 0.3, 0.0]], atol=1e-5)
    logits = GaussianScores(bounds=BOUNDS, per_query=sure).release(np.array([[7.0, 3.0, 0.0]]), EXACT)
    np.testing.assert_allclose(logits.probabilities, softmax(np.array([[7.0, 3.0, 0.0]])), atol=1e-5)


def test_all_scores_of_a_query_are_noised_and_rounded_together(monkeypatch) -> None:
    for mechanism in (GaussianScores(), NoisyMax("gaussian")):
        spy = spied(monkeypatch, base_module, "release_gaussian")
        dataclasses.replace(mechanism, bounds=BOUNDS, per_query=GaussianCost(1.0)).release(
            np.zeros((5, 4)), EXACT
        )
        assert spy.given[0]["coordinates"] == 4
        assert spy.given[0]["sensitivity"] == BOUNDS.vector.value


def assert_distributed(odds, distribution, low, high) -> None:
    """The log-odds between two limits have a distribution, as far as it lies between them."""
    below, above = distribution.cdf([low, high])
    kept = odds[(odds > low) & (odds < high)]
    assert stats.kstest(kept, lambda x: (distribution.cdf(x) - below) / (above - below)).pvalue > FALSE_ALARM


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_the_sampled_neurons_log_odds_have_the_stated_distribution(noise) -> None:
    limits, scores = bounds(), np.array([8.0, 0.0, 0.5])  # far ahead: label 0 is practically always chosen
    cost = PureCost(4.0) if noise == "laplace" else GaussianCost(3.0)
    mechanism = SampledNeuron(noise, sampling_share=0.75, bounds=limits, per_query=cost)
    answers = mechanism.release(np.tile(scores, (20_000, 1)), SeededNoise(3))
    sure = answers.labels == 0
    assert sure.mean() > 0.999
    assert answers.probabilities is not None
    winning = answers.probabilities[sure, 0]
    odds = np.log(winning) - np.log1p(-winning)
    true_odds = 8.0 - np.logaddexp(0.0, 0.5)
    distribution = (
        stats.laplace(true_odds, limits.spread / 1.0)
        if noise == "laplace"
        else stats.norm(true_odds, limits.spread / 1.5)
    )
    # Compare below the region where 1 - p rounds to 0 and above where p >= 1/C clips.
    assert_distributed(odds, distribution, 0, 20)


def test_with_two_classes_nothing_is_sampled_and_all_goes_to_the_log_odds() -> None:
    limits = bounds()
    mechanism = SampledNeuron("laplace", bounds=limits, per_query=PureCost(1.0))
    answers = mechanism.release(np.tile([0.2, 0.9], (20_000, 1)), EXACT)
    assert answers.probabilities is not None
    odds = np.log(answers.probabilities[:, 1]) - np.log(answers.probabilities[:, 0])
    assert_distributed(odds, stats.laplace(0.7, limits.spread), -15, 15)
    assert (answers.labels == (odds > 0)).all()


def test_noise_cannot_flip_the_chosen_label() -> None:
    scores = np.random.default_rng(0).normal(size=(2000, 7))
    answers = SampledNeuron("laplace", bounds=bounds(), per_query=PureCost(0.01)).release(scores, EXACT)
    assert (answers.probabilities.max(1) >= 1 / 7).all()
    ties = answers.probabilities.max(1) == answers.probabilities.min(1)
    assert (answers.probabilities.argmax(1) == answers.labels)[~ties].all()
    np.testing.assert_allclose(answers.probabilities.sum(1), 1.0)
    assert answers.probabilities.max(1).min() == 1 / 7


def test_two_labels_that_are_equally_likely_are_told_apart_as_argmax_does(monkeypatch) -> None:
    monkeypatch.setattr(
        base_module, "_noised", lambda odds, *_, **__: SimpleNamespace(values=np.zeros_like(odds))
    )
    answers = SampledNeuron("laplace", bounds=BOUNDS, per_query=PureCost(1.0)).release(np.eye(2), EXACT)
    assert answers.labels.tolist() == answers.probabilities.argmax(1).tolist() == [0, 0]


@pytest.mark.parametrize("classes", [2, 4])
def test_the_noise_of_the_sampled_neuron_covers_the_rounding_of_its_log_odds(classes, monkeypatch) -> None:
    noise = spied(monkeypatch, base_module, "release_laplace")
    choice = spied(monkeypatch, base_module, "choose")
    mechanism = SampledNeuron("laplace", "exponential", bounds=bounds(), per_query=PureCost(1.0))
    mechanism.release(np.zeros((3, classes)), EXACT)
    stated = bounds().spread
    used = [each["sensitivity"] for each in noise.given]
    assert len(used) == 1
    assert len(choice.given) == (classes > 2)
    for sensitivity in used + [each["range_sensitivity"] for each in choice.given]:
        assert stated * (1 + 2**-24) < sensitivity < stated * (1 + 2**-16)


@pytest.mark.parametrize("classes", [3, 100])
def test_the_noise_covers_the_rounding_of_log_odds_that_hardly_move(classes, monkeypatch) -> None:
    """A head of very many records: its logits move by less than the logarithm of a sum is rounded by."""
    scores = np.random.default_rng(5).normal(0.0, 1e-9, (2000, classes))
    scores[:, 0] = 1e-6  # it is certain to be chosen
    moved = scores - 5e-13
    moved[:, 0] = scores[:, 0] + 5e-13
    limits = bounds(one=float(np.abs(moved - scores).max()), vector=1.0)
    spy = spied(monkeypatch, base_module, "release_laplace")
    ready = SampledNeuron("laplace", bounds=limits, per_query=PureCost(1.0))
    for logits in (scores, moved):
        assert (ready.release(logits, EXACT).labels == 0).all()
    assert np.abs(spy.values[1] - spy.values[0]).max() <= spy.given[0]["sensitivity"]


@pytest.mark.parametrize("selection", ["exponential", "permute-and-flip"])
def test_the_neuron_is_chosen_as_asked_for(selection, monkeypatch) -> None:
    spies = {
        "exponential": spied(monkeypatch, base_module, "choose"),
        "permute-and-flip": spied(monkeypatch, base_module, "permute_and_flip"),
    }
    SampledNeuron(selection=selection, bounds=BOUNDS, per_query=PureCost(1.0)).release(
        np.zeros((4, 3)), EXACT
    )
    assert [name for name, spy in spies.items() if spy.given] == [selection]


def test_a_part_of_the_budget_goes_to_the_choice_but_never_all_or_nothing() -> None:
    for share in (-0.1, 0.0, 1.0, math.nan):
        with pytest.raises(InvalidInput, match="sampling_share"):
            SampledNeuron(sampling_share=share)
    assert SampledNeuron(sampling_share=0.999).sampling_share == 0.999
    mechanism = SampledNeuron(bounds=BOUNDS, per_query=PureCost(1.0), sampling_share=0.6)
    stated = {classes: mechanism.guarantee(classes).parameters for classes in (2, 3, 4)}
    assert {classes: each["sampling_share"] for classes, each in stated.items()} == {2: 0.0, 3: 0.6, 4: 0.6}
    assert [each["selection"] for each in stated.values()] == ["none", "exponential", "exponential"]


@given(st.floats(1e-6, 1e3), st.floats(0.01, 0.99))
def test_both_parts_together_never_cost_more_than_the_whole_and_hardly_less(whole, share) -> None:
    for noise, kind in (("laplace", PureCost), ("gaussian", GaussianCost)):
        choice, odds = SampledNeuron(noise, sampling_share=share)._shares(kind(whole))
        assert compose([choice, odds]).amount <= kind(whole).amount
        assert float(compose([choice, odds]).amount / kind(whole).amount) > 1 - 1e-12
        assert float(choice.amount / kind(whole).amount) == pytest.approx(share, rel=1e-12)


def test_the_other_labels_share_what_the_chosen_one_leaves() -> None:
    ready = SampledNeuron("laplace", bounds=BOUNDS, per_query=PureCost(1e6))
    answers = ready.release(np.array([[2.0, 1.0, 0.0, 0.5]]), EXACT)
    winning = 1 / (1 + math.exp(np.logaddexp.reduce([1.0, 0.0, 0.5]) - 2.0))
    np.testing.assert_allclose(answers.probabilities, [[winning, *[(1 - winning) / 3] * 3]], atol=1e-5)


@pytest.mark.parametrize("classes", [2, 3])
def test_enormous_logits_are_clipped_where_their_rounding_would_exceed_the_slack(
    classes, monkeypatch
) -> None:
    spy = spied(monkeypatch, base_module, "release_laplace")
    ready = SampledNeuron("laplace", bounds=BOUNDS, per_query=PureCost(1.0))
    scores = np.zeros((3, classes))
    scores[0, :2] = -1e300, 1e300
    scores[2, :2] = 1e300, -1e300
    scores[1, :2] = -BOUNDS.spread * 2**22, BOUNDS.spread * 2**22
    ready.release(scores, EXACT)
    odds = np.abs(spy.values[0])
    assert 4 * np.spacing(odds).max() < BOUNDS.spread * 2**-20
    assert odds[1] >= BOUNDS.spread * 2**22  # what is merely large is not clipped
    assert odds[0] == odds[2] == BOUNDS.spread * 2**24 * (2 if classes == 2 else 1)
