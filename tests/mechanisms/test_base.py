"""Mechanisms at the ends of what they take: what is open, what is given, what is refused, what is enormous."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quietmax.accounting import GaussianCost, PureCost, compose
from quietmax.errors import InvalidInput
from quietmax.mechanisms import Algorithm1, Answers, GaussianScores, NoisyMax, SampledNeuron
from quietmax.mechanisms import algorithm1 as algorithm1_module
from quietmax.mechanisms import sampled_neuron as sampled_neuron_module
from quietmax.mechanisms.algorithm1 import claimed_epsilon
from quietmax.mechanisms.base import selection_epsilon
from quietmax.mechanisms.noisy_max import onto_simplex
from quietmax.models import Model, TorchModel, TrainingSettings, softmax
from quietmax.models.mlp import initial_mlp
from quietmax.noise import EXACT, SeededNoise
from quietmax.sensitivity import ScoreBounds, Sensitivity, published_sensitivity

BOUNDS = ScoreBounds(Sensitivity(0.5, "certified", "made up"), Sensitivity(0.6, "certified", "made up"))
MODEL = Model(initial_mlp((4, 128, 3), "tanh", (0,)), TrainingSettings(), 10_000, "made up", 0)
SCORES = TorchModel(torch.nn.Identity(), 3)
PROVEN = [
    (NoisyMax("exponential"), PureCost(1.0), PureCost(0.25)),
    (NoisyMax("gaussian"), GaussianCost(1.0), GaussianCost(0.25)),
    (SampledNeuron("laplace"), PureCost(1.0), PureCost(0.25)),
    (SampledNeuron("gaussian"), GaussianCost(1.0), GaussianCost(0.25)),
    (GaussianScores(), GaussianCost(1.0), GaussianCost(0.25)),
]


class Spy:
    """Passes a call on and remembers what was given and what came back."""

    def __init__(self, function):
        self._function = function
        self.given: list[dict] = []
        self.values: list[np.ndarray] = []

    def __call__(self, values, **options):
        self.given.append(options)
        self.values.append(np.asarray(values))
        return self._function(values, **options)


def spied(monkeypatch, module, name) -> Spy:
    spy = Spy(getattr(module, name))
    monkeypatch.setattr(module, name, spy)
    return spy


def test_a_mechanism_cannot_be_changed_after_it_was_made() -> None:
    for made in (*(each[0] for each in PROVEN), Algorithm1(), Answers(np.zeros(1, np.int64), None)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, dataclasses.fields(made)[0].name, None)


def test_answers_are_told_apart_as_objects_so_that_they_can_be_kept_in_a_set() -> None:
    one, other = (Answers(np.zeros(3, np.int64), np.ones((3, 2)) / 2) for _ in range(2))
    assert len({one, other, one}) == 2


# --- what is open and what is given -------------------------------------------------------------------------------


@pytest.mark.parametrize(("mechanism", "cost", "own"), PROVEN)
def test_a_mechanism_needs_both_bounds_and_a_cost_to_say_or_do_anything(mechanism, cost, own) -> None:
    for half in (
        dataclasses.replace(mechanism, bounds=BOUNDS),
        dataclasses.replace(mechanism, per_query=own),
    ):
        with pytest.raises(InvalidInput, match="cannot release"):
            half.cost(3)
        with pytest.raises(InvalidInput, match="cannot release"):
            half.guarantee(3)
        with pytest.raises(InvalidInput, match="cannot release"):
            half.release(np.zeros((1, 3)), EXACT)
    assert dataclasses.replace(mechanism, bounds=BOUNDS).prepared(SCORES, cost).cost(3) == cost


@pytest.mark.parametrize(("mechanism", "cost", "own"), PROVEN)
def test_a_cost_given_to_the_mechanism_itself_stays(mechanism, cost, own) -> None:
    prepared = dataclasses.replace(mechanism, bounds=BOUNDS, per_query=own).prepared(SCORES, cost)
    assert prepared.cost(3) == own
    assert prepared.bounds == BOUNDS


def test_a_model_with_certified_bounds_gives_them_unless_others_are_given() -> None:
    class Certified(TorchModel):
        bounds = BOUNDS

    model = Certified(torch.nn.Identity(), 3)
    assert NoisyMax().prepared(model, PureCost(1.0)).bounds == BOUNDS
    other = ScoreBounds(BOUNDS.vector, BOUNDS.vector)
    assert NoisyMax(bounds=other).prepared(model, PureCost(1.0)).bounds == other


def test_a_label_is_counted_in_the_measure_asked_for() -> None:
    assert NoisyMax("exponential").measure == NoisyMax("permute-and-flip").measure == "pure"
    assert NoisyMax("exponential", count_in="pure").measure == "pure"
    assert NoisyMax("exponential", count_in="gaussian").measure == "gaussian"
    assert NoisyMax("gaussian").measure == NoisyMax("gaussian", count_in="gaussian").measure == "gaussian"
    assert GaussianScores().measure == SampledNeuron("gaussian").measure == "gaussian"
    assert SampledNeuron("laplace").measure == "pure"


def test_the_reason_names_the_mechanism() -> None:
    for method, reason in (
        ("gaussian", "Gaussian mechanism"),
        ("exponential", "Exponential mechanism"),
        ("permute-and-flip", "Permute-and-flip"),
    ):
        cost = GaussianCost(1.0) if method == "gaussian" else PureCost(1.0)
        guarantee = NoisyMax(method, bounds=BOUNDS, per_query=cost).guarantee(3)
        assert guarantee.because.startswith(reason)
        assert guarantee.parameters["method"] == method


@pytest.mark.parametrize("selection", ["exponential", "permute-and-flip"])
def test_the_neuron_is_chosen_as_asked_for(selection, monkeypatch) -> None:
    spies = {
        "exponential": spied(monkeypatch, sampled_neuron_module, "choose"),
        "permute-and-flip": spied(monkeypatch, sampled_neuron_module, "permute_and_flip"),
    }
    SampledNeuron(selection=selection, bounds=BOUNDS, per_query=PureCost(1.0)).release(
        np.zeros((4, 3)), EXACT
    )
    assert [name for name, spy in spies.items() if spy.given] == [selection]


@pytest.mark.parametrize("share", [-0.1, 0.0, 1.0, math.nan])
def test_a_part_of_the_budget_goes_to_the_choice_but_never_all_or_nothing(share) -> None:
    with pytest.raises(InvalidInput, match="sampling_share"):
        SampledNeuron(sampling_share=share)
    assert SampledNeuron(sampling_share=0.999).sampling_share == 0.999


def test_the_guarantee_says_how_the_budget_is_shared() -> None:
    mechanism = SampledNeuron(bounds=BOUNDS, per_query=PureCost(1.0), sampling_share=0.6)
    shares = {classes: mechanism.guarantee(classes).parameters["sampling_share"] for classes in (2, 3, 4)}
    assert shares == {2: 0.0, 3: 0.6, 4: 0.6}
    assert mechanism.guarantee(3).parameters["selection"] == "exponential"


@given(st.floats(1e-6, 1e3), st.floats(0.01, 0.99))
def test_both_parts_together_never_cost_more_than_the_whole_and_hardly_less(whole, share) -> None:
    for noise, kind in (("laplace", PureCost), ("gaussian", GaussianCost)):
        choice, odds = SampledNeuron(noise, sampling_share=share)._shares(kind(whole))
        assert compose([choice, odds]).amount <= kind(whole).amount
        assert float(compose([choice, odds]).amount / kind(whole).amount) > 1 - 1e-12
        assert float(choice.amount / kind(whole).amount) == pytest.approx(share, rel=1e-12)


@settings(max_examples=30)
@given(st.floats(1e-6, 30.0))
def test_a_choice_spends_its_gaussian_cost_to_twelve_digits(mu) -> None:
    assert selection_epsilon(PureCost(mu), "exponential") == mu
    for selection in ("exponential", "permute-and-flip"):
        epsilon = selection_epsilon(GaussianCost(mu), selection)
        assert epsilon < selection_epsilon(GaussianCost(mu * (1 + 1e-12)), selection)


# --- scores -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3,), (2, 1), (2, 3, 4)])
def test_scores_are_a_table_of_queries_and_two_or_more_classes(shape) -> None:
    for mechanism, cost, _ in PROVEN:
        ready = dataclasses.replace(mechanism, bounds=BOUNDS, per_query=cost)
        with pytest.raises(InvalidInput, match="shape"):
            ready.release(np.zeros(shape), EXACT)


def test_every_mechanism_answers_each_query_of_two_and_of_three_classes() -> None:
    for mechanism, cost, _ in PROVEN:
        ready = dataclasses.replace(mechanism, bounds=BOUNDS, per_query=type(cost)(1e6))
        for classes in (2, 3):
            scores = np.eye(classes)[[1, 0, 1, classes - 1]] * 8.0
            answers = ready.release(scores, EXACT)
            assert answers.labels.tolist() == [1, 0, 1, classes - 1]
            if answers.probabilities is not None:
                np.testing.assert_allclose(answers.probabilities.sum(1), 1.0, rtol=1e-12)
                assert answers.probabilities.argmax(1).tolist() == answers.labels.tolist()


def test_votes_are_projected_and_logits_go_through_the_softmax() -> None:
    sure = GaussianCost(1e6)
    votes = GaussianScores(votes=10, bounds=BOUNDS, per_query=sure).release(
        np.array([[7.0, 3.0, 0.0]]), EXACT
    )
    np.testing.assert_allclose(votes.probabilities, [[0.7, 0.3, 0.0]], atol=1e-5)
    logits = GaussianScores(bounds=BOUNDS, per_query=sure).release(np.array([[7.0, 3.0, 0.0]]), EXACT)
    np.testing.assert_allclose(logits.probabilities, softmax(np.array([[7.0, 3.0, 0.0]])), atol=1e-5)


def test_probabilities_are_left_as_they_are_by_the_projection() -> None:
    points = np.array([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    np.testing.assert_allclose(onto_simplex(points), points, atol=1e-15)
    np.testing.assert_allclose(onto_simplex(points + 4.0), points, atol=1e-15)


def test_the_other_labels_share_what_the_chosen_one_leaves() -> None:
    ready = SampledNeuron("laplace", bounds=BOUNDS, per_query=PureCost(1e6))
    answers = ready.release(np.array([[2.0, 1.0, 0.0, 0.5]]), EXACT)
    winning = 1 / (1 + math.exp(np.logaddexp.reduce([1.0, 0.0, 0.5]) - 2.0))
    np.testing.assert_allclose(answers.probabilities, [[winning, *[(1 - winning) / 3] * 3]], atol=1e-5)


# --- noise --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
@pytest.mark.parametrize("classes", [2, 4])
def test_one_number_of_each_query_is_noised_and_rounded(noise, classes, monkeypatch) -> None:
    spies = [
        spied(monkeypatch, module, f"release_{noise}")
        for module in (algorithm1_module, sampled_neuron_module)
    ]
    cost = PureCost(1.0) if noise == "laplace" else GaussianCost(1.0)
    Algorithm1(noise, 0.5, 0.5, 0.3, 0.8).release(np.zeros((5, classes)), EXACT)
    SampledNeuron(noise, bounds=BOUNDS, per_query=cost).release(np.zeros((5, classes)), EXACT)
    for spy in spies:
        assert [value.shape for value in spy.values] == [(5,)]
        assert [options["coordinates"] for options in spy.given] == [1]


def test_all_scores_of_a_query_are_noised_and_rounded_together(monkeypatch) -> None:
    from quietmax.mechanisms import noisy_max
    from quietmax.mechanisms import noisy_max as gaussian

    for module, mechanism in ((gaussian, GaussianScores()), (noisy_max, NoisyMax("gaussian"))):
        spy = spied(monkeypatch, module, "release_gaussian")
        dataclasses.replace(mechanism, bounds=BOUNDS, per_query=GaussianCost(1.0)).release(
            np.zeros((5, 4)), EXACT
        )
        assert spy.given[0]["coordinates"] == 4
        assert spy.given[0]["sensitivity"] == BOUNDS.vector.value


@pytest.mark.parametrize("classes", [2, 3])
def test_enormous_logits_are_clipped_where_their_rounding_would_exceed_the_slack(
    classes, monkeypatch
) -> None:
    spy = spied(monkeypatch, sampled_neuron_module, "release_laplace")
    ready = SampledNeuron("laplace", bounds=BOUNDS, per_query=PureCost(1.0))
    scores = np.zeros((2, classes))
    scores[0, :2] = -1e300, 1e300
    scores[1, :2] = -BOUNDS.spread * 2**22, BOUNDS.spread * 2**22
    ready.release(scores, EXACT)
    odds = np.abs(spy.values[0])
    assert 4 * np.spacing(odds).max() < BOUNDS.spread * 2**-20
    assert odds[1] >= BOUNDS.spread * 2**22  # what is merely large is not clipped


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
@pytest.mark.parametrize("epsilon", [1e6, 1e8, 1e10])
def test_without_noise_worth_speaking_of_algorithm_1_gives_the_plain_answer(noise, epsilon) -> None:
    logits = np.random.default_rng(0).normal(0, 2, (200, 5))
    answers = Algorithm1(noise, epsilon, epsilon, 0.36, 1.0).release(logits, SeededNoise(0))
    np.testing.assert_allclose(answers.probabilities, softmax(logits), atol=1e-5)


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_algorithm_1_answers_even_for_logits_at_the_end_of_the_floats(noise) -> None:
    logits = np.array([[1e308, -1e308, 0.0], [0.0, 1e308, 1e308]])
    released = Algorithm1(noise, 0.5, 0.5, 0.3, 0.8).release(logits, SeededNoise(0)).probabilities
    assert np.isfinite(released).all()
    np.testing.assert_allclose(released.sum(1), 1.0)


# --- Algorithm 1 --------------------------------------------------------------------------------------------------


def test_the_papers_claim_weighs_both_epsilons_as_printed() -> None:
    assert claimed_epsilon(0.25, 0.5, 3, "laplace") == pytest.approx(0.25 + 6 * 0.5, rel=1e-15)
    assert claimed_epsilon(0.25, 0.5, 3, "gaussian") == pytest.approx(
        math.hypot(0.25, math.sqrt(12) * 0.5), rel=1e-15
    )
    mechanism = Algorithm1("gaussian", 0.25, 0.5, 0.3, 0.8)
    assert mechanism.cost(3).mu == mechanism.guarantee(3).parameters["claimed_by_the_paper"]
    assert mechanism.guarantee(2).parameters["claimed_by_the_paper"] > mechanism.cost(2).mu


@given(st.floats(1e-3, 1e3), st.integers(3, 40))
def test_a_split_budget_is_never_exceeded_by_the_claim(epsilon, classes) -> None:
    model = TorchModel(torch.nn.Identity(), classes)
    for noise, kind in (("laplace", PureCost), ("gaussian", GaussianCost)):
        open_ = Algorithm1(noise, logit_sensitivity=0.3, probability_sensitivity=0.8)
        spent = open_.prepared(model, kind(epsilon)).cost(classes)
        assert spent.amount <= kind(epsilon).amount
        assert float(spent.amount / kind(epsilon).amount) > 1 - 1e-14


def test_what_is_given_to_algorithm_1_is_kept_and_only_the_rest_is_filled_in() -> None:
    formulas = published_sensitivity(MODEL)
    logit = Algorithm1(logit_sensitivity=0.9).prepared(MODEL, GaussianCost(1.0))
    assert (logit.logit_sensitivity, logit.probability_sensitivity) == (0.9, formulas.probability.value)
    probability = Algorithm1(probability_sensitivity=0.7).prepared(MODEL, GaussianCost(1.0))
    assert (probability.logit_sensitivity, probability.probability_sensitivity) == (formulas.logit.value, 0.7)
    neuron = Algorithm1("laplace", epsilon_neuron=0.25).prepared(MODEL, PureCost(7.0))
    assert (neuron.epsilon_sampling, neuron.epsilon_neuron) == (pytest.approx(1.0), 0.25)


@pytest.mark.parametrize("bad", [-1.0, 0.0, math.inf, math.nan])
@pytest.mark.parametrize(
    "name", ["epsilon_sampling", "epsilon_neuron", "logit_sensitivity", "probability_sensitivity"]
)
def test_every_number_of_algorithm_1_is_positive_and_finite(name, bad) -> None:
    with pytest.raises(InvalidInput, match=f"{name} must be"):
        Algorithm1(**{name: bad})


def test_one_class_is_nothing_to_predict() -> None:
    with pytest.raises(InvalidInput, match="2 or more classes"):
        Algorithm1("gaussian", 0.5, 0.5, 0.3, 0.8).release(np.zeros((3, 1)), EXACT)
