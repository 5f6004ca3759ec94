"""Algorithm 1 does what the paper prints, and what THEORY section 2 says of it is shown here."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from quietmax.accounting import GaussianCost, PureCost
from quietmax.errors import InvalidInput
from quietmax.mechanisms import Algorithm1
from quietmax.mechanisms.algorithm1 import _claimed_epsilon, budget_split
from quietmax.models import Model, TorchModel, TrainingSettings
from quietmax.models.stacked import initial_mlp
from quietmax.models.training import softmax
from quietmax.noise import EXACT, SeededNoise, release_gaussian
from quietmax.sensitivity import published_sensitivity

MODEL = Model(initial_mlp((4, 128, 3), "tanh", (0,)), TrainingSettings(), 10_000, "made up", 0)


FALSE_ALARM = 1e-7
SOURCES = [EXACT, SeededNoise(11)]


def _set(noise="gaussian", sampling=0.5, neuron=0.5, logit=0.3, probability=0.8) -> Algorithm1:
    return Algorithm1(noise, sampling, neuron, logit, probability)


def _log_odds(probabilities):
    return np.log(probabilities[:, 0]) - np.log(probabilities[:, 1])


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_a_budget_is_split_as_the_paper_says(noise) -> None:
    cost = GaussianCost(2.0) if noise == "gaussian" else PureCost(2.0)
    prepared = Algorithm1(noise).prepared(MODEL, cost)
    share = 2.0 / math.sqrt(4 * 3 + 1) if noise == "gaussian" else 2.0 / (2 * 3 + 1)
    assert prepared.epsilon_sampling == prepared.epsilon_neuron == pytest.approx(share)
    assert prepared.logit_sensitivity == published_sensitivity(MODEL).logit.value
    assert prepared.probability_sensitivity == published_sensitivity(MODEL).probability.value
    spent = prepared.cost(3)
    assert prepared.measure == ("gaussian" if noise == "gaussian" else "pure")
    assert (spent.mu if noise == "gaussian" else spent.epsilon) == pytest.approx(2.0)


def test_a_neuron_is_sampled_with_the_papers_probabilities() -> None:
    """Chi-square over which logit was noised; false-alarm probability 1e-7 per source."""
    logits = np.array([1.0, 0.2, -0.5, 0.9])
    mechanism = _set(sampling=6.0)
    for source in SOURCES:
        released = mechanism.release(np.tile(logits, (20_000, 1)), source).probabilities
        # The noised logit is the one whose relation to the others changed.
        log = np.log(released) - logits
        noised = np.abs(log - np.median(log, axis=1, keepdims=True)).argmax(1)
        weights = np.exp(6.0 * softmax(logits) / (2 * 0.8))
        expected = len(noised) * weights / weights.sum()
        observed = np.bincount(noised, minlength=4)
        assert stats.chisquare(observed, expected).pvalue > FALSE_ALARM


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_the_noise_on_the_sampled_logit_has_the_papers_scale(noise) -> None:
    """Kolmogorov-Smirnov on two classes, where the log-odds show the noise; false-alarm probability 1e-7."""
    distribution = stats.norm if noise == "gaussian" else stats.laplace
    for source in SOURCES:
        released = _set(noise).release(np.tile([0.7, -0.4], (20_000, 1)), source).probabilities
        assert (
            stats.kstest(_log_odds(released), distribution(loc=1.1, scale=0.3 / 0.5).cdf).pvalue > FALSE_ALARM
        )


def test_it_is_stable_for_a_thousand_classes_and_every_epsilon() -> None:
    logits = np.random.default_rng(0).normal(0, 30, (50, 1000))
    for noise, cost in (("gaussian", GaussianCost), ("laplace", PureCost)):
        for epsilon in (0.001, 1.0, 10_000.0):
            mechanism = Algorithm1(noise, logit_sensitivity=3.1, probability_sensitivity=1.0)
            model = TorchModel(torch.nn.Identity(), 1000)
            released = mechanism.prepared(model, cost(epsilon)).release(logits, SeededNoise(1)).probabilities
            assert np.isfinite(released).all()
            np.testing.assert_allclose(released.sum(1), 1.0, rtol=1e-12)


def test_a_huge_epsilon_gives_the_plain_answer_and_a_tiny_one_gets_half_of_the_labels_right() -> None:
    logits = np.random.default_rng(0).normal(0, 2, (4000, 10))
    best = logits.argmax(1)
    for noise in ("laplace", "gaussian"):
        for epsilon in (1e6, 1e8, 1e10):
            sure = Algorithm1(noise, epsilon, epsilon, 0.36, 1.0).release(logits, SeededNoise(0))
            assert (sure.labels == best).mean() > 0.99
            np.testing.assert_allclose(sure.probabilities, softmax(logits), atol=1e-5)
    unsure = Algorithm1("gaussian", 1e-6, 1e-6, 0.36, 1.0).release(logits, SeededNoise(0))
    # Noise of either sign swamps the sampled logit: a positive one wins, so the label survives in about 1/2 + 1/(2C).
    assert (unsure.labels == best).mean() == pytest.approx(0.5, abs=0.05)


def test_stacked_models_are_answered_at_once() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 5, 4))
    assert _set().release(logits, EXACT).probabilities.shape == (3, 5, 4)


@pytest.mark.parametrize("source", SOURCES, ids=["exact", "seeded"])
@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_for_three_or_more_classes_log_ratios_of_the_other_logits_survive_exactly(noise, source) -> None:
    """THEORY 2.1: for u, w other than the sampled neuron, ln p_u - ln p_w is z_u - z_w, whatever the noise."""
    logits = np.array([[2.0, -1.0, 0.5, 0.25, -0.75]])
    mechanism = Algorithm1(noise, logit_sensitivity=0.36, probability_sensitivity=1.0)
    cost = GaussianCost(1.0) if noise == "gaussian" else PureCost(1.0)
    released = mechanism.prepared(TorchModel(torch.nn.Identity(), 5), cost).release(
        np.repeat(logits, 500, 0), source
    )
    log = np.log(np.maximum(released.probabilities, 1e-300))
    visible = (released.probabilities > 1e-290).all(1)
    grid = 1e-5  # the logits are rounded to a grid finer than this
    assert visible.mean() > 0.95
    gaps = (log - logits)[visible]
    exact = np.isclose(gaps, np.median(gaps, axis=1, keepdims=True), atol=grid).sum(1)
    assert (exact >= 4).all()  # all but the sampled neuron keep their relations


def test_one_answer_tells_two_neighbours_apart_with_certainty() -> None:
    """THEORY 2.1: the output distributions are mutually singular when every pair of logits moves; delta is 1."""
    worlds = np.array([[1.0, 0.5, -0.5, 0.1], [1.1, 0.45, -0.3, 0.12]])
    mechanism = _set(sampling=0.01, neuron=0.01)
    grid = release_gaussian([0.0], sensitivity=0.3, mu=0.01).step  # both logits of a pair are rounded to it

    def told(answer):
        """The world with some pair of log-ratios exactly as in the answer."""
        ratios = np.log(answer[:, None] / answer[None, :])
        pairs = ~np.eye(4, dtype=bool)
        return [
            bool(np.isclose(ratios, world[:, None] - world[None, :], atol=1.1 * grid, rtol=0)[pairs].any())
            for world in worlds
        ]

    for world in (0, 1):
        answers = mechanism.release(np.repeat(worlds[world : world + 1], 300, 0), EXACT).probabilities
        usable = [answer for answer in answers if (answer > 1e-290).all()]
        assert len(usable) > 250
        assert all(told(answer) == [world == 0, world == 1] for answer in usable)


def test_three_classes_say_refuted_and_two_say_conditional() -> None:
    for classes, status, section in (
        (3, "refuted", "2.1"),
        (100, "refuted", "2.1"),
        (2, "conditional", "2.2"),
    ):
        guarantee = _set().guarantee(classes)
        assert (guarantee.status, section in guarantee.because) == (status, True)
        assert bool(guarantee.assumptions) == (classes == 2)


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_for_two_classes_the_output_law_does_not_depend_on_the_sampled_neuron(noise) -> None:
    """Two-sample Kolmogorov-Smirnov, false-alarm probability 1e-7: sampling always v=0 against always v=1."""
    logits = np.tile([0.7, -0.4], (20_000, 1))
    always = []
    for towards in (0, 1):

        class Fixed(SeededNoise):
            def exponential_choice(self, gaps, rate, towards=towards):  # noqa: ARG002
                return np.full(gaps.shape[1], towards)

        always.append(_log_odds(_set(noise).release(logits, Fixed(3 + towards)).probabilities))
    assert stats.ks_2samp(*always).pvalue > FALSE_ALARM


def test_for_two_classes_the_tight_cost_holds() -> None:
    """The log-odds move by 2*Dz at most and carry Lap(Dz/e_n): the density ratio reaches exp(2*e_n), no more."""
    mechanism = _set("laplace", sampling=9.0, neuron=0.4, logit=0.3)
    assert mechanism.cost(2) == PureCost(0.8)
    scale, gap = 0.3 / 0.4, 2 * 0.3
    points = np.linspace(-5, 5, 10_001)
    ratios = stats.laplace(0, scale).logpdf(points) - stats.laplace(gap, scale).logpdf(points)
    assert ratios.max() == pytest.approx(mechanism.cost(2).epsilon)
    # Seen in samples: the event "log-odds below 0" in worst-case neighbours (false-alarm probability below 1e-7).
    near = _log_odds(mechanism.release(np.tile([0.0, 0.0], (200_000, 1)), SeededNoise(5)).probabilities)
    far = _log_odds(mechanism.release(np.tile([0.3, -0.3], (200_000, 1)), SeededNoise(6)).probabilities)
    observed = math.log((near < 0).mean() / (far < 0).mean())
    assert observed == pytest.approx(0.8, abs=0.05)
    # A shift of 2*Dz under noise of Dz/e_n is 2*e_n standard deviations.
    assert _set("gaussian", sampling=9.0, neuron=0.4, logit=0.3).cost(2) == GaussianCost(0.8)


def test_the_tight_cost_is_below_the_papers_claim() -> None:
    for noise in ("gaussian", "laplace"):
        share = budget_split(1.0, 2, noise)
        assert _set(noise, share, share).cost(2).amount < 1


def test_for_two_classes_no_digit_below_the_noise_grid_is_released() -> None:
    """With noise on a grid, an unrounded other logit would show its low digits exactly, whatever the noise."""
    scale = 0.3 / 0.5
    step = release_gaussian([0.0], sensitivity=0.3, mu=0.5).step
    assert step < scale / 2**19
    logits = np.tile([0.123456789123, math.pi / 7], (400, 1))
    steps = _log_odds(_set().release(logits, EXACT).probabilities) / step
    # The log-odds are whole steps, up to the rounding of two logarithms of probabilities near 1/2.
    assert np.abs(steps - np.rint(steps)).max() < 1e-3


def test_invalid_arguments_and_scores_are_refused() -> None:
    with pytest.raises(InvalidInput, match="cannot release"):
        Algorithm1().release(np.zeros((1, 3)), EXACT)
    with pytest.raises(InvalidInput, match="'gaussian' or 'laplace'"):
        Algorithm1("uniform")
    for wrong in (np.zeros(3), np.zeros((3, 1))):
        with pytest.raises(InvalidInput, match="2 or more classes"):
            _set().release(wrong, EXACT)
    with pytest.raises(InvalidInput, match="NaN"):
        _set().release(np.array([[0.0, np.nan]]), EXACT)
    with pytest.raises(InvalidInput, match="logit_sensitivity and probability_sensitivity are required"):
        Algorithm1().prepared(TorchModel(torch.nn.Identity(), 3), GaussianCost(1.0))


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_logits_at_the_end_of_the_floats_are_clipped_at_the_same_limit(noise) -> None:
    mechanism = _set(noise)
    released = mechanism.release(np.array([[1e308, -1e308, 0.0], [0.0, 1e308, 1e308]]), SeededNoise(0))
    assert np.isfinite(released.probabilities).all()
    np.testing.assert_allclose(released.probabilities.sum(1), 1.0)
    for enormous in (1e308, -1e308):
        equal = mechanism.release(np.full((50, 2), enormous), SeededNoise(0)).probabilities
        assert np.abs(_log_odds(equal)).max() < 40 * 0.3 / 0.5  # nothing but the noise is left


def test_the_papers_claim_weighs_both_epsilons_as_printed() -> None:
    assert _claimed_epsilon(0.25, 0.5, 3, "laplace") == pytest.approx(0.25 + 6 * 0.5, rel=1e-15)
    assert _claimed_epsilon(0.25, 0.5, 3, "gaussian") == pytest.approx(
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
    assert neuron.epsilon_sampling == 1.0  # a seventh; 7 is reached exactly
    assert neuron.epsilon_neuron == 0.25


@pytest.mark.parametrize("bad", [-1.0, 0.0, math.inf, math.nan])
@pytest.mark.parametrize(
    "name", ["epsilon_sampling", "epsilon_neuron", "logit_sensitivity", "probability_sensitivity"]
)
def test_every_number_of_algorithm_1_is_positive_and_finite(name, bad) -> None:
    with pytest.raises(InvalidInput, match=f"{name} must be"):
        Algorithm1(**{name: bad})
