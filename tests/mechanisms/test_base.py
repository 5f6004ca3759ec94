"""What all mechanisms have in common: open parameters, bounds, scores; and the path from features to answers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quietmax.accounting import Budget, Cost, GaussianCost, PureCost, pure_as_gaussian
from quietmax.accounting.costs import bounded_range_as_gaussian
from quietmax.errors import InvalidInput
from quietmax.estimators.head.weights import HeadWeights, PrivateHeadWeights
from quietmax.estimators.teachers import TeacherEnsemble
from quietmax.mechanisms import Algorithm1, Answerer, Answers, GaussianScores, NoisyMax, SampledNeuron
from quietmax.mechanisms import base as base_module
from quietmax.mechanisms.base import (
    _read_plugin,
    digest_text,
    proves_bounds,
    releases_probabilities,
    selection_epsilon,
)
from quietmax.models import TorchModel
from quietmax.models.features import Scaling
from quietmax.models.stacked import initial_mlp
from quietmax.noise import EXACT, ExactNoise, SeededNoise
from quietmax.sensitivity import ScoreBounds, Sensitivity
from tests.mechanisms.made_up import bounds, spied


class StatingModel(TorchModel):
    bounds = bounds()


def certified_model(classes: int = 3) -> PrivateHeadWeights:
    """Weights that carry the mark of a fit, so their bounds count as proven."""
    weights = HeadWeights(np.zeros((classes, 4)), np.zeros(3), 0.2, 1.0)
    return PrivateHeadWeights._of_fit(weights, Sensitivity(0.5, "certified", "made up"), max_norm=1.0)


BOUNDS = bounds()
SCORES = TorchModel(torch.nn.Identity(), 3)
PROVEN: list[tuple[Any, Cost]] = [
    (NoisyMax("exponential"), PureCost(1.0)),
    (NoisyMax("permute-and-flip"), PureCost(1.0)),
    (NoisyMax("gaussian"), GaussianCost(1.0)),
    (SampledNeuron("laplace"), PureCost(1.0)),
    (SampledNeuron("gaussian"), GaussianCost(1.0)),
    (GaussianScores(), GaussianCost(1.0)),
]
every_proven_mechanism = pytest.mark.parametrize(("mechanism", "cost"), PROVEN)


def test_a_mechanism_cannot_be_changed_after_it_was_made() -> None:
    for made in (*(each[0] for each in PROVEN), Algorithm1(), Answers(np.zeros(1, np.int64), None)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, dataclasses.fields(made)[0].name, None)


def test_answers_are_told_apart_as_objects_so_that_they_can_be_kept_in_a_set() -> None:
    one, other = (Answers(np.zeros(3, np.int64), np.ones((3, 2)) / 2) for _ in range(2))
    assert len({one, other, one}) == 2


@every_proven_mechanism
def test_a_mechanism_needs_both_bounds_and_a_cost_to_say_or_do_anything(mechanism, cost) -> None:
    for half in ({"bounds": BOUNDS}, {"per_query": cost}):
        open_ = dataclasses.replace(mechanism, **half)
        for use in (
            open_.cost,
            open_.guarantee,
            lambda _, open_=open_: open_.release(np.zeros((1, 3)), EXACT),
        ):
            with pytest.raises(InvalidInput, match="cannot release"):
                use(3)
    with pytest.raises(InvalidInput, match="no certified bound"):
        mechanism.prepared(SCORES, cost)
    assert dataclasses.replace(mechanism, bounds=BOUNDS).prepared(SCORES, cost).cost(3) == cost


@every_proven_mechanism
def test_a_cost_given_to_the_mechanism_itself_stays(mechanism, cost) -> None:
    own = type(cost)(0.25)
    prepared = dataclasses.replace(mechanism, bounds=BOUNDS, per_query=own).prepared(SCORES, cost)
    assert (prepared.cost(3), prepared.bounds) == (own, BOUNDS)


def test_a_model_with_certified_bounds_gives_them_unless_others_are_given() -> None:
    class Certified(TorchModel):
        bounds = BOUNDS

    model = Certified(torch.nn.Identity(), 3)
    assert NoisyMax().prepared(model, PureCost(1.0)).bounds == BOUNDS
    other = ScoreBounds(BOUNDS.vector, BOUNDS.vector)
    assert NoisyMax(bounds=other).prepared(model, PureCost(1.0)).bounds == other


@settings(max_examples=60)
@given(st.floats(1e-6, 30.0))
def test_a_choice_spends_its_gaussian_cost_to_twelve_digits_and_never_more(mu) -> None:
    # The inverse subtracts two logarithms near ln(1/2), so float64 resolves a small mu only to about 2^-52 / mu.
    more = mu * (1 + 1e-12 + 2**-51 / mu)
    assert selection_epsilon(PureCost(mu), "exponential") == mu
    for selection, convert in (
        ("exponential", bounded_range_as_gaussian),
        ("permute-and-flip", pure_as_gaussian),
    ):
        epsilon = selection_epsilon(GaussianCost(mu), selection)
        assert convert(epsilon) <= mu
        assert epsilon < selection_epsilon(GaussianCost(more), selection)


@every_proven_mechanism
def test_scores_are_finite_numbers_of_queries_and_two_or_more_classes(mechanism, cost) -> None:
    ready = dataclasses.replace(mechanism, bounds=BOUNDS, per_query=cost)
    for scores in (np.zeros(3), np.zeros((2, 1)), np.zeros((2, 3, 4))):
        with pytest.raises(InvalidInput, match="shape"):
            ready.release(scores, EXACT)
    with pytest.raises(InvalidInput, match="NaN"):
        ready.release(np.array([[np.nan, 0.0]]), EXACT)


def test_every_mechanism_answers_each_query_of_two_and_of_three_classes() -> None:
    for mechanism, cost in PROVEN:
        ready = dataclasses.replace(mechanism, bounds=BOUNDS, per_query=type(cost)(1e6))
        for classes in (2, 3):
            scores = np.eye(classes)[[1, 0, 1, classes - 1]] * 8.0
            answers = ready.release(scores, EXACT)
            assert answers.labels.tolist() == [1, 0, 1, classes - 1]
            if answers.probabilities is not None:
                np.testing.assert_allclose(answers.probabilities.sum(1), 1.0, rtol=1e-12)
                assert answers.probabilities.argmax(1).tolist() == answers.labels.tolist()


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
@pytest.mark.parametrize("classes", [2, 4])
def test_one_number_of_each_query_is_noised_and_rounded(noise, classes, monkeypatch) -> None:
    spy = spied(monkeypatch, base_module, f"release_{noise}")
    cost = PureCost(1.0) if noise == "laplace" else GaussianCost(1.0)
    Algorithm1(noise, 0.5, 0.5, 0.3, 0.8).release(np.zeros((5, classes)), EXACT)
    SampledNeuron(noise, bounds=BOUNDS, per_query=cost).release(np.zeros((5, classes)), EXACT)
    assert [value.shape for value in spy.values] == [(5,), (5,)]
    assert [options["coordinates"] for options in spy.given] == [1, 1]


@every_proven_mechanism
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


@every_proven_mechanism
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

    parts: list[Any] = [getattr(certified, name) for name in ("weights", "centre", "bias", "radius")]
    models: list[Any] = [
        StatingModel(torch.nn.Identity(), 3),
        Duck(),
        Subclass._of_fit(certified, Sensitivity(0.5, "certified", "made up"), max_norm=1.0),
        PrivateHeadWeights.certified(certified, Sensitivity(1e-9, "certified", "trust me"), max_norm=1.0),
        PrivateHeadWeights(*parts, bounds(1e-9, 1e-9)),  # type: ignore[call-arg]
        dataclasses.replace(certified, bounds=bounds(1e-9, 1e-9)),
        TeacherEnsemble([torch.nn.Linear(2, 3)] * 4, np.zeros(4, dtype=bool), 3, False),
        TeacherEnsemble(initial_mlp((2, 3), "tanh", (0, 1, 2, 3)), np.zeros(4, dtype=bool), 3, False),
    ]
    for model in models:
        assert mechanism.prepared(model, cost).guarantee(3).status == "conditional"
        handed_in = dataclasses.replace(mechanism, bounds=model.bounds).prepared(model, cost).guarantee(3)
        assert handed_in == mechanism.prepared(model, cost).guarantee(3)
    assert mechanism.prepared(certified, cost).guarantee(3).status == "proven"


class EqualToAll(float):
    """A number that says it equals any other."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = float.__hash__


class BoundsEqualToAll(ScoreBounds):
    """Bounds that say they equal any others."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = ScoreBounds.__hash__


@every_proven_mechanism
def test_stated_bounds_cannot_pass_as_the_models_own_by_a_comparison_of_their_own(mechanism, cost) -> None:
    model = certified_model()
    tiny = Sensitivity(EqualToAll(1e-9), "certified", model.bounds.one.because)
    assert type(tiny.value) is float
    entry = Sensitivity(1e-9, "certified", model.bounds.one.because)
    for stated in (ScoreBounds(tiny, tiny), BoundsEqualToAll(entry, entry)):
        prepared = dataclasses.replace(mechanism, bounds=stated).prepared(model, cost)
        assert prepared.guarantee(3).status == "conditional"


@every_proven_mechanism
def test_a_guarantee_has_the_unit_of_the_bounds(mechanism, cost) -> None:
    for unit in ("record", "person"):
        stated = dataclasses.replace(BOUNDS, unit=unit)
        guarantee = dataclasses.replace(mechanism, bounds=stated, per_query=cost).guarantee(3)
        assert guarantee.unit == unit


def test_bounds_of_persons_do_not_pass_as_those_of_a_model_whose_unit_is_the_record() -> None:
    model = certified_model()
    other = dataclasses.replace(model.bounds, unit="person")
    prepared = NoisyMax(bounds=other).prepared(model, PureCost(1.0))
    assert prepared.guarantee(3).status == "conditional"
    assert "One person moves" in prepared.guarantee(3).assumptions[0]
    with pytest.raises(InvalidInput, match="unit"):
        dataclasses.replace(BOUNDS, unit="household")


def test_only_classes_of_the_library_prove_their_bounds() -> None:
    with pytest.raises(InvalidInput, match="Only classes of quietmax"):
        proves_bounds(StatingModel, when=lambda model: True)  # noqa: ARG005


def test_every_proven_guarantee_lists_its_public_parameters_and_names_the_mechanism() -> None:
    model = certified_model()
    for mechanism, cost in PROVEN:
        guarantee = mechanism.prepared(model, cost).guarantee(3)
        assert guarantee.status == "proven"
        assert guarantee.cost == cost
        assert guarantee.neighbours == "add-remove"
        assert {"mechanism", "classes", "one_score", "score_vector_l2", "basis", "releases"} <= set(
            guarantee.parameters
        )
        assert "THEORY 3" in guarantee.because
        assert {mechanism.prepared(model, cost).cost(classes) for classes in (2, 10, 1000)} == {cost}
    for method in ("gaussian", "exponential", "permute-and-flip"):
        cost = GaussianCost(1.0) if method == "gaussian" else PureCost(1.0)
        guarantee = NoisyMax(method, bounds=BOUNDS, per_query=cost).guarantee(3)
        assert guarantee.because.lower().startswith(method)
        assert guarantee.parameters["method"] == method


def test_a_noisy_maximum_is_a_label_and_all_others_release_probabilities_too() -> None:
    for mechanism, cost in PROVEN:
        ready = dataclasses.replace(mechanism, bounds=BOUNDS, per_query=cost)
        assert releases_probabilities(ready, 3) is not isinstance(mechanism, NoisyMax)


@pytest.mark.parametrize(
    ("name", "lacking", "reason"),
    [
        ("plain", "", "must be a frozen dataclass"),  # its text names its numbers
        ("plain", "release", "must have release"),
        ("other", "", "must be the name of the entry point, 'other'"),
    ],
)
def test_a_plug_in_that_is_no_mechanism_is_an_error(name, lacking, reason) -> None:
    needed = {"measure", "analysis", "prepared", "cost", "guarantee", "release"} - {lacking}
    plain = type("Plain", (), {"name": "plain", **dict.fromkeys(needed)})
    with pytest.raises((TypeError, ValueError), match=reason):
        _read_plugin(name, plain)
    assert _read_plugin("noisy-max", NoisyMax) == ("noisy-max", NoisyMax())


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: NoisyMax("laplace"), "method"),
        (lambda: NoisyMax("gaussian", count_in="pure"), "count_in must be"),
        (lambda: SampledNeuron("uniform"), "noise"),
        (lambda: SampledNeuron(selection="best"), "selection"),
        (lambda: SampledNeuron(bounds=BOUNDS).prepared(None, GaussianCost(1.0)), "must be a PureCost"),
    ],
)
def test_invalid_arguments_are_refused(make, match) -> None:
    with pytest.raises(InvalidInput, match=match):
        make()


@pytest.mark.parametrize("mechanism", [NoisyMax("gaussian"), SampledNeuron("gaussian"), GaussianScores()])
def test_gaussian_noise_is_not_paid_for_by_a_pure_cost(mechanism) -> None:
    stated = dataclasses.replace(mechanism, bounds=BOUNDS)
    paid = dataclasses.replace(stated, per_query=PureCost(1.0))
    for use in (
        lambda: stated.prepared(None, PureCost(1.0)),
        lambda: paid.cost(3),
        lambda: paid.guarantee(3),
        lambda: paid.release(np.zeros((1, 3)), EXACT),
    ):
        with pytest.raises(InvalidInput, match="must be a GaussianCost"):
            use()


def test_an_answerer_applies_the_feature_map_the_model_and_the_mechanism_in_turn() -> None:
    mechanism = GaussianScores(bounds=BOUNDS, per_query=GaussianCost(1e6))
    rows = np.array([[0.5, 0.0, 0.25], [0.0, 0.125, 0.5]], np.float32)
    answerer = Answerer(SCORES, mechanism, SeededNoise(1), Scaling((0.0,) * 3, (0.5,) * 3))
    np.testing.assert_allclose(answerer.scores(rows), 2 * rows)
    answers = answerer.answer(rows)
    again = mechanism.release(2.0 * rows, SeededNoise(1))
    np.testing.assert_array_equal(answers.probabilities, again.probabilities)
    np.testing.assert_array_equal(answers.labels, again.labels)


@pytest.mark.parametrize(("queries", "epsilon"), [(None, 2.0), (8, 0.25)])
def test_an_answerer_is_prepared_for_the_share_of_one_query(queries: int | None, epsilon: float) -> None:
    mechanism = NoisyMax(bounds=BOUNDS)
    answerer = Answerer.prepare(SCORES, mechanism, Budget(2.0, queries=queries))
    assert answerer.cost == PureCost(epsilon)
    assert answerer.noise is EXACT


def test_scores_that_are_not_finite_are_an_error_before_anything_is_drawn_or_count_as_undecided() -> None:
    mechanism = NoisyMax(bounds=BOUNDS, per_query=PureCost(1e6))
    rows = np.array([[np.nan, 0, 0], [np.inf, 0, 0], [9, 0, 0]], np.float32)

    class Overflowing:
        classes = 3

        def scores(self, features: np.ndarray) -> np.ndarray:
            return features.astype(np.float64)

    def no_bytes(_count: int) -> bytes:
        raise AssertionError("entropy was read")

    with pytest.raises(InvalidInput, match="must be finite"):
        Answerer(Overflowing(), mechanism, ExactNoise(_bytes=no_bytes)).answer(rows)
    undecided = Answerer(Overflowing(), mechanism, non_finite="undecided")
    np.testing.assert_array_equal(undecided.scores(rows), [[0, 0, 0], [0, 0, 0], [9, 0, 0]])
    assert undecided.answer(rows).labels[2] == 0


def test_the_text_that_stored_answers_are_found_by_is_that_of_version_0_1() -> None:
    """A change would charge stored answers again."""
    assert digest_text(Algorithm1("laplace", 0.5, 0.25, 0.3, 0.8)) == (
        "Algorithm1(noise='laplace', epsilon_sampling=0.5, epsilon_neuron=0.25, logit_sensitivity=0.3, "
        "probability_sensitivity=0.8, reading='published')"
    )
    assert digest_text(NoisyMax(bounds=BOUNDS, per_query=PureCost(0.5))) == (
        "NoisyMax(method='exponential', count_in=None, bounds=ScoreBounds(one=Sensitivity(value=0.5, "
        "basis='certified', because='made up'), vector=Sensitivity(value=0.6, basis='certified', "
        "because='made up')), per_query=PureCost(epsilon=0.5))"
    )
