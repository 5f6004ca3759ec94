"""The proven mechanisms: distributions, costs, and that neighbours differ by no more than stated (THEORY 3.3, 3.4)."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.special import logsumexp

from quietmax.accounting import GaussianCost, PureCost, bounded_range_as_gaussian, compose, pure_as_gaussian
from quietmax.errors import InvalidInput
from quietmax.estimators.head.weights import HeadWeights, PrivateHeadWeights
from quietmax.estimators.teachers import TeacherEnsemble
from quietmax.mechanisms import GaussianScores, NoisyMax, SampledNeuron
from quietmax.mechanisms.base import proves_bounds, selection_epsilon
from quietmax.mechanisms.noisy_max import onto_simplex
from quietmax.models import TorchModel, softmax
from quietmax.noise import EXACT, SeededNoise
from quietmax.sensitivity import ScoreBounds, Sensitivity

FALSE_ALARM = 1e-7


def bounds(one: float = 0.5, vector: float = 0.6) -> ScoreBounds:
    return ScoreBounds(Sensitivity(one, "certified", "made up"), Sensitivity(vector, "certified", "made up"))


def neighbours(
    generator: np.random.Generator, classes: int, limits: ScoreBounds
) -> tuple[np.ndarray, np.ndarray]:
    """Two score vectors as far apart as the bounds allow."""
    scores = generator.normal(0, 2, classes)
    move = (
        generator.choice([-1.0, 1.0], classes) if generator.random() < 0.5 else generator.normal(size=classes)
    )
    move *= min(limits.one.value / np.abs(move).max(), limits.vector.value / np.linalg.norm(move))
    return scores, scores + move


@given(
    one=st.floats(0.01, 10),
    vector=st.floats(0.01, 10),
    classes=st.integers(2, 12),
    seed=st.integers(0, 10**6),
)
def test_differences_and_log_odds_move_by_at_most_the_spread(one, vector, classes, seed) -> None:
    limits = bounds(one, vector)
    first, second = neighbours(np.random.default_rng(seed), classes, limits)
    for v in range(classes):
        others = [w for w in range(classes) if w != v]
        moved = abs((first[v] - logsumexp(first[others])) - (second[v] - logsumexp(second[others])))
        assert moved <= limits.spread * (1 + 1e-9)
        for w in others:
            assert abs((first[v] - first[w]) - (second[v] - second[w])) <= limits.spread * (1 + 1e-9)


def test_the_spread_is_reached() -> None:
    one_bound = bounds(0.5, 100.0)  # opposite moves of two logits
    assert one_bound.spread == pytest.approx(1.0)
    two_bound = bounds(100.0, 0.6)
    move = np.array([1.0, -1.0]) * 0.6 / math.sqrt(2)
    assert two_bound.spread == pytest.approx(move[0] - move[1])


def test_votes_have_a_spread_of_two() -> None:
    assert bounds(1.0, math.sqrt(2)).spread == pytest.approx(2.0)


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
def test_the_choice_has_the_stated_law(source) -> None:
    scores, limits = np.array([1.0, 0.3, -0.8, 0.9]), bounds()
    chosen = NoisyMax("exponential", bounds=limits, per_query=PureCost(2.0)).release(
        np.tile(scores, (30_000, 1)), source
    )
    expected = 30_000 * softmax(2.0 * scores / limits.spread)
    assert stats.chisquare(np.bincount(chosen.labels, minlength=4), expected).pvalue > FALSE_ALARM
    assert chosen.probabilities is None


def test_gaussian_noisy_max_has_the_stated_law() -> None:
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
    right = {
        method: int(
            (
                NoisyMax(method, bounds=bounds(1, math.sqrt(2)), per_query=PureCost(1.0))
                .release(scores, EXACT)
                .labels
                == 0
            ).sum()
        )
        for method in ("exponential", "permute-and-flip")
    }
    gain = (right["permute-and-flip"] - right["exponential"]) / math.sqrt(2 * 40_000 * 0.25)
    assert gain > 5.2


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_the_sampled_neurons_log_odds_have_the_stated_law(noise) -> None:
    limits, scores = bounds(), np.array([8.0, 0.0, 0.5])  # far ahead: label 0 is practically always chosen
    cost = PureCost(4.0) if noise == "laplace" else GaussianCost(3.0)
    mechanism = SampledNeuron(noise, sampling_share=0.75, bounds=limits, per_query=cost)
    answers = mechanism.release(np.tile(scores, (20_000, 1)), SeededNoise(3))
    sure = answers.labels == 0
    assert sure.mean() > 0.999
    winning = answers.probabilities[sure, 0]
    odds = np.log(winning) - np.log1p(-winning)
    true_odds = 8.0 - np.logaddexp(0.0, 0.5)
    distribution = (
        stats.laplace(true_odds, limits.spread / 1.0)
        if noise == "laplace"
        else stats.norm(true_odds, limits.spread / 1.5)
    )
    # Compare below the region where 1 - p rounds to 0 and above where p >= 1/C clips.
    kept = (odds > 0) & (odds < 20)

    def clipped(x):
        return (distribution.cdf(x) - distribution.cdf(0)) / (distribution.cdf(20) - distribution.cdf(0))

    assert stats.kstest(odds[kept], clipped).pvalue > FALSE_ALARM


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_the_shares_of_the_budget_add_up_to_no_more_than_it(noise) -> None:
    cost = PureCost(1.3) if noise == "laplace" else GaussianCost(1.3)
    mechanism = SampledNeuron(noise, bounds=bounds(), per_query=cost)
    choice, odds = mechanism._shares(cost)
    total = compose([choice, odds])
    value = total.epsilon if noise == "laplace" else total.mu
    assert 1.3 * (1 - 1e-12) < value <= 1.3


@given(mu=st.floats(1e-4, 8))
def test_a_gaussian_cost_pays_for_exactly_the_epsilon_that_converts_back(mu) -> None:
    for selection, convert in (
        ("exponential", bounded_range_as_gaussian),
        ("permute-and-flip", pure_as_gaussian),
    ):
        epsilon = selection_epsilon(GaussianCost(mu), selection)
        assert convert(epsilon) <= mu
        assert convert(epsilon * (1 + 1e-9)) > mu * (1 - 1e-9)


def test_with_two_classes_nothing_is_sampled_and_all_goes_to_the_log_odds() -> None:
    limits = bounds()
    mechanism = SampledNeuron("laplace", bounds=limits, per_query=PureCost(1.0))
    answers = mechanism.release(np.tile([0.2, 0.9], (20_000, 1)), EXACT)
    odds = np.log(answers.probabilities[:, 1]) - np.log(answers.probabilities[:, 0])
    kept = np.abs(odds) < 15
    distribution = stats.laplace(0.7, limits.spread)

    def inside(x):
        return (distribution.cdf(x) - distribution.cdf(-15)) / (distribution.cdf(15) - distribution.cdf(-15))

    assert stats.kstest(odds[kept], inside).pvalue > FALSE_ALARM
    assert (answers.labels == (odds > 0)).all()
    assert mechanism.guarantee(2).parameters["selection"] == "none"


def test_noise_cannot_flip_the_chosen_label() -> None:
    scores = np.random.default_rng(0).normal(size=(2000, 7))
    answers = SampledNeuron("laplace", bounds=bounds(), per_query=PureCost(0.01)).release(scores, EXACT)
    assert (answers.probabilities.max(1) >= 1 / 7).all()
    ties = answers.probabilities.max(1) == answers.probabilities.min(1)
    assert (answers.probabilities.argmax(1) == answers.labels)[~ties].all()
    np.testing.assert_allclose(answers.probabilities.sum(1), 1.0)


def test_the_cost_does_not_depend_on_the_number_of_classes() -> None:
    mechanism = SampledNeuron("laplace", bounds=bounds(), per_query=PureCost(0.7))
    assert {mechanism.cost(classes) for classes in (2, 10, 1000)} == {PureCost(0.7)}


class StatingModel(TorchModel):
    bounds = bounds()


def certified_model(classes: int = 3) -> PrivateHeadWeights:
    """Weights of which this library proves the bounds, if the sensitivity is one."""
    weights = HeadWeights(np.zeros((classes, 4)), np.zeros(3), 0.2, 1.0)
    return PrivateHeadWeights.certified(weights, Sensitivity(0.5, "certified", "made up"), max_norm=1.0)


PROVEN_AND_COST = [
    (NoisyMax("exponential"), PureCost(1.0)),
    (NoisyMax("permute-and-flip"), PureCost(1.0)),
    (NoisyMax("gaussian"), GaussianCost(1.0)),
    (SampledNeuron("laplace"), PureCost(1.0)),
    (SampledNeuron("gaussian"), GaussianCost(1.0)),
    (GaussianScores(), GaussianCost(1.0)),
]


@pytest.mark.parametrize(("mechanism", "cost"), PROVEN_AND_COST)
def test_bounds_that_are_merely_stated_make_the_guarantee_conditional(mechanism, cost) -> None:
    model = certified_model()
    smaller = dataclasses.replace(mechanism, bounds=bounds(0.001, 0.001))
    for stated in (
        smaller.prepared(model, cost),
        smaller.prepared(TorchModel(torch.nn.Identity(), 3), cost),
        dataclasses.replace(smaller, per_query=cost),
        dataclasses.replace(mechanism.prepared(model, cost), bounds=bounds(0.001, 0.001)),
    ):
        claimed = stated.guarantee(3)
        assert claimed.status == "conditional"
        assert claimed.assumptions == (
            "One record moves the scores of any query by at most 0.001 each and 0.001 together in L2.",
        )
        assert claimed.cost == cost
    same = dataclasses.replace(mechanism, bounds=model.bounds).prepared(model, cost)
    assert (same.guarantee(3).status, same.guarantee(3).assumptions) == ("proven", ())


@pytest.mark.parametrize(("mechanism", "cost"), PROVEN_AND_COST)
def test_bounds_that_a_class_of_the_users_own_states_are_an_assumption_however_they_are_handed_in(
    mechanism, cost
) -> None:
    certified = certified_model()

    class Subclass(PrivateHeadWeights):
        def scores(self, features):
            return 1000 * super().scores(features)

    class Duck:
        classes = 3
        bounds = certified.bounds

        def scores(self, features):
            return np.zeros((len(features), 3))

    parts = [getattr(certified, name) for name in ("weights", "centre", "bias", "radius")]
    models = [
        StatingModel(torch.nn.Identity(), 3),
        Duck(),
        Subclass.certified(certified, Sensitivity(0.5, "certified", "made up"), max_norm=1.0),
        PrivateHeadWeights(*parts, bounds(1e-9, 1e-9)),
        dataclasses.replace(certified, bounds=bounds(1e-9, 1e-9)),
        TeacherEnsemble([torch.nn.Linear(2, 3)] * 4, np.zeros(4, dtype=bool), 3, False),
    ]
    for model in models:
        assert mechanism.prepared(model, cost).guarantee(3).status == "conditional"
        handed_in = dataclasses.replace(mechanism, bounds=model.bounds).prepared(model, cost).guarantee(3)
        assert handed_in == mechanism.prepared(model, cost).guarantee(3)
    assert mechanism.prepared(certified, cost).guarantee(3).status == "proven"


def test_only_classes_of_the_library_prove_their_bounds() -> None:
    with pytest.raises(InvalidInput, match="Only classes of quietmax"):
        proves_bounds(StatingModel, when=lambda model: True)  # noqa: ARG005


def test_every_proven_guarantee_lists_its_public_parameters() -> None:
    model = certified_model()
    for mechanism, cost in PROVEN_AND_COST:
        guarantee = mechanism.prepared(model, cost).guarantee(3)
        assert guarantee.status == "proven"
        assert guarantee.cost == cost
        assert guarantee.neighbours == "add-remove"
        assert {"mechanism", "classes", "one_score", "score_vector_l2", "basis", "releases"} <= set(
            guarantee.parameters
        )
        assert "THEORY 3" in guarantee.because


def test_a_model_without_certified_bounds_is_refused() -> None:
    model = TorchModel(torch.nn.Identity(), 3)
    for mechanism, cost in (
        (NoisyMax(), PureCost(1.0)),
        (SampledNeuron(), PureCost(1.0)),
        (GaussianScores(), GaussianCost(1.0)),
    ):
        with pytest.raises(InvalidInput, match="no certified bound"):
            mechanism.prepared(model, cost)


@pytest.mark.parametrize("basis", ["published", "empirical"])
def test_only_certified_sensitivities_make_bounds(basis) -> None:
    entry = Sensitivity(0.5, basis, "made up")
    with pytest.raises(InvalidInput, match="certified"):
        ScoreBounds(entry, entry)


@given(
    rows=st.integers(1, 5), classes=st.integers(2, 9), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 10**6)
)
def test_projection_gives_the_nearest_probabilities(rows, classes, scale, seed) -> None:
    points = np.random.default_rng(seed).normal(0, scale, (rows, classes))
    projected = onto_simplex(points)
    np.testing.assert_allclose(projected.sum(1), 1.0, atol=1e-9 * max(scale, 1))
    assert (projected >= 0).all()
    # Optimality: no feasible direction towards a vertex comes closer.
    for row, vertex in itertools.product(range(rows), range(classes)):
        step = np.eye(classes)[vertex] - projected[row]
        assert (points[row] - projected[row]) @ step <= 1e-7 * max(scale, 1)


def test_noisy_votes_become_probabilities() -> None:
    votes = np.array([[40.0, 10.0, 0.0]])
    answers = GaussianScores(votes=50, bounds=bounds(1, math.sqrt(2)), per_query=GaussianCost(100.0)).release(
        votes, EXACT
    )
    np.testing.assert_allclose(answers.probabilities, [[0.8, 0.2, 0.0]], atol=0.01)
    logits = GaussianScores(bounds=bounds(), per_query=GaussianCost(1e6)).release(
        np.array([[1.0, 2.0]]), EXACT
    )
    np.testing.assert_allclose(logits.probabilities, softmax(np.array([[1.0, 2.0]])), atol=1e-4)


def test_bad_input_is_refused_with_a_sentence() -> None:
    ready = NoisyMax(bounds=bounds(), per_query=PureCost(1.0))
    for scores, match in (
        (np.zeros(3), "shape"),
        (np.zeros((2, 1)), "shape"),
        (np.array([[np.nan, 0.0]]), "NaN"),
    ):
        with pytest.raises(InvalidInput, match=match):
            ready.release(scores, EXACT)
    for make, match in (
        (lambda: NoisyMax("laplace"), "method"),
        (lambda: NoisyMax("gaussian", count_in="pure"), "count_in must be"),
        (lambda: SampledNeuron("uniform"), "noise"),
        (lambda: SampledNeuron(selection="best"), "selection"),
        (lambda: SampledNeuron(sampling_share=1.0), "sampling_share"),
        (lambda: NoisyMax().release(np.zeros((1, 2)), EXACT), "cannot release"),
        (lambda: SampledNeuron().cost(3), "cannot release"),
        (lambda: GaussianScores().cost(3), "cannot release"),
        (lambda: GaussianScores(bounds=bounds()).prepared(None, PureCost(1.0)), "must be a GaussianCost"),
        (
            lambda: SampledNeuron("gaussian", bounds=bounds(), per_query=PureCost(1.0)).cost(3),
            "must be a GaussianCost",
        ),
        (
            lambda: NoisyMax("gaussian", bounds=bounds(), per_query=PureCost(1.0)).release(
                np.zeros((1, 2)), EXACT
            ),
            "must be a GaussianCost",
        ),
        (
            lambda: NoisyMax("gaussian", bounds=bounds(), per_query=PureCost(1.0)).guarantee(2),
            "must be a GaussianCost",
        ),
        (
            lambda: NoisyMax("gaussian", bounds=bounds()).prepared(None, PureCost(1.0)),
            "must be a GaussianCost",
        ),
        (lambda: GaussianScores(bounds=bounds(), per_query=PureCost(1.0)).cost(3), "must be a GaussianCost"),
        (lambda: SampledNeuron(bounds=bounds()).prepared(None, GaussianCost(1.0)), "must be a PureCost"),
    ):
        with pytest.raises(InvalidInput, match=match):
            make()


@pytest.mark.parametrize("classes", [2, 4])
def test_the_noise_of_the_sampled_neuron_covers_the_rounding_of_its_log_odds(classes, monkeypatch) -> None:
    from quietmax.mechanisms import sampled_neuron

    used: dict[str, list[float]] = {"noise": [], "choice": []}
    release, pick = sampled_neuron.release_laplace, sampled_neuron.choose

    def noised(values, *, sensitivity, **rest):
        used["noise"].append(sensitivity)
        return release(values, sensitivity=sensitivity, **rest)

    def chosen(values, *, range_sensitivity, **rest):
        used["choice"].append(range_sensitivity)
        return pick(values, range_sensitivity=range_sensitivity, **rest)

    monkeypatch.setattr(sampled_neuron, "release_laplace", noised)
    monkeypatch.setattr(sampled_neuron, "choose", chosen)
    mechanism = SampledNeuron("laplace", "exponential", bounds=bounds(), per_query=PureCost(1.0))
    mechanism.release(np.zeros((3, classes)), EXACT)
    stated = bounds().spread
    assert len(used["noise"]) == 1
    assert len(used["choice"]) == (classes > 2)
    for sensitivity in used["noise"] + used["choice"]:
        assert stated * (1 + 2**-24) < sensitivity < stated * (1 + 2**-16)
