"""Audit of a training run: releases of known mu and epsilon survive, with half the noise they fall."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, linprog
from scipy.special import ndtr, ndtri
from scipy.stats import binom, norm

from quietmax import audit
from quietmax.accounting import GaussianCost, Guarantee, PureCost
from quietmax.audit.training import (
    _mass_needed,
    epsilon_lower_bound,
    label_score,
    mislabelled,
    mu_lower_bound,
    network_draws,
    one_run,
    private_network_draws,
    repeated,
    tail_under_epsilon,
)
from quietmax.data import Records, load
from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd.config import plan
from quietmax.estimators.dpsgd.estimator import DPSGD, claim
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.teachers import Teachers
from quietmax.models import CrossEntropy, TrainingSettings
from quietmax.models.features import UnitNorm

SURE = 1 - 1e-7


def sums(noise, scale, canaries, seed=0):
    """Release how often each number occurs, with noise: one record moves one count by 1."""
    dice = np.random.default_rng(seed)
    draw = dice.normal if noise == "gaussian" else dice.laplace

    def fit(features, _labels):
        present = np.bincount(features[:, 0].astype(int), minlength=canaries + 1)[1:]
        return present + draw(0.0, scale, canaries)

    return fit


def apart(count):
    """Canaries that do not disturb each other: the numbers from 1; and a record of zero that no canary resembles."""
    canaries = Records("canaries", np.arange(1, count + 1)[:, None], np.zeros(count, int), classes=2)
    return Records("zero", np.zeros((1, 1)), np.zeros(1, int), classes=2), canaries


def released(model, _features, _labels):
    return model


@pytest.mark.parametrize(
    ("noise", "claimed"), [("gaussian", GaussianCost(1.0)), ("laplace", PureCost(1.0))], ids=["mu", "epsilon"]
)
def test_one_run_leaves_a_true_claim_alone_and_refutes_half_the_noise(noise, claimed):
    """Counts with noise of scale 1 cost exactly 1 per canary; 2,000 guesses about 20,000 canaries.

    Of these, at 99%, fewer than 40 wrong ones refute mu = 1. With mu = 1 each is wrong with probability 0.096, with
    mu = 2 with 0.0049: either verdict comes out wrong with probability below 1e-9. For epsilon even less.
    """
    records, canaries = apart(20_000)
    honest = one_run(sums(noise, 1.0, 20_000), released, records, canaries, claimed, shares=[0.1])
    assert honest.verdict == "consistent"
    assert honest.share > 0.4
    assert honest.confidence == 0.99
    broken = one_run(sums(noise, 0.5, 20_000), released, records, canaries, claimed, shares=[0.1])
    assert broken.verdict == "refuted"
    assert broken.samples == 20_000
    assert broken.details["games"][0]["guesses"] == 2000


def test_one_run_at_high_confidence_leaves_true_claims_alone():
    """False-alarm probability 1e-7 each."""
    records, canaries = apart(1000)
    for noise, claimed in (("gaussian", GaussianCost(1.0)), ("laplace", PureCost(1.0))):
        report = one_run(
            sums(noise, 1.0, 1000, seed=7), released, records, canaries, claimed, confidence=SURE
        )
        assert report.verdict == "consistent"


def test_one_run_without_any_noise_finds_every_canary():
    records, canaries = apart(400)
    report = one_run(
        sums("gaussian", 1e-9, 400), released, records, canaries, PureCost(3.0), shares=[0.5, 0.1]
    )
    assert report.verdict == "refuted"
    assert report.evidence == "200 of 200 guesses about canaries were right"


def test_scores_that_know_nothing_show_nothing():
    """Ties are broken at random: a constant score guesses right half of the time."""
    records, canaries = apart(2000)
    report = one_run(
        sums("gaussian", 1.0, 2000),
        lambda *_: np.zeros(2000),
        records,
        canaries,
        PureCost(0.0),
        confidence=SURE,
    )
    assert report.verdict == "consistent"
    (everything,) = [game for game in report.details["games"] if game["guesses"] == 2000]
    assert 850 < everything["right"] < 1150  # 6.7 standard deviations on either side


def test_repeated_training_leaves_a_true_claim_alone_and_refutes_half_the_noise():
    """A mean of 50 records in [0, 1]^3: noise of 1/50 per coordinate makes a unit canary cost mu = 1."""
    dice = np.random.default_rng(1)
    records = Records("fifty", dice.random((50, 3)), np.zeros(50, int), classes=2)
    canary = Records("canary", np.array([[1.0, 0.0, 0.0]]), np.array([0]), classes=2)

    def mean(scale):
        return lambda features, _: features.sum(0) / 50 + dice.normal(0, scale / 50, 3)

    honest = repeated(mean(1.0), released, records, canary, GaussianCost(1.0), times=6000, confidence=SURE)
    assert honest.verdict == "consistent"
    assert honest.share > 0.4
    broken = repeated(mean(0.5), released, records, canary, GaussianCost(1.0), times=6000, confidence=SURE)
    assert broken.verdict == "refuted"


def head(mu, seeds):
    def fit(features, labels):
        return PrivateHead(
            mu=mu,
            features=UnitNorm(),
            classes=(0, 1),
            declared_size=4,
            centring=0.0,
            steps=1,
            random_state=next(seeds),
        ).fit(features, labels)

    return fit


def test_the_private_head_survives_repeated_training_and_falls_with_half_the_noise():
    """One noisy step on four records, all released weights looked at: the worst case of the gradient route.

    With 400 trainings to bound by, mu = 2 is estimated to 0.11 and mu = 4 to 0.2: the assertions on lower bounds are
    five such errors away from what is expected, the honest verdict has a false-alarm probability of 1e-7.
    """
    records = Records("four", np.eye(4, 2) + 0.1, np.array([0, 1, 0, 1]), classes=2)
    canary = Records("canary", np.array([[0.0, 5.0]]), np.array([0]), classes=2)

    def weights(model, _features, _labels):
        return model.coef_.ravel()

    honest = repeated(head(2.0, itertools.count()), weights, records, canary, times=800, confidence=SURE)
    assert honest.definition == "gaussian"
    assert honest.claimed == pytest.approx(2.0)
    assert honest.verdict == "consistent"
    assert honest.share > 0.3
    broken = repeated(
        head(4.0, itertools.count()), weights, records, canary, GaussianCost(2.0), times=800, confidence=0.999
    )
    assert broken.verdict == "refuted"


def test_teachers_survive_a_one_run_audit_of_the_labels_they_release():
    data = load("mnist-5k", records=300, seed=2)
    canaries = mislabelled(data.pool, count=100, seed=2)

    def fit(features, labels):
        crowd = Teachers(
            1.0,
            1e-5,
            queries=100,
            teachers=5,
            classes=tuple(range(10)),
            declared_size=300,
            network=TrainingSettings(hidden=(16,), loss=CrossEntropy(), epochs=5),
            random_state=5,
        )
        return crowd.fit(features, labels)

    report = one_run(fit, label_score, data.train, canaries, confidence=SURE)
    assert report.verdict == "consistent"
    assert report.epsilon_claimed == pytest.approx(1.0, rel=1e-6)


def test_an_ordinary_network_is_refuted_by_training_it_often_with_and_without_one_record():
    """Many networks at once; 64 trainings without and 64 with a mislabelled record."""
    data = load("mnist-5k", records=60, seed=1)
    canary = mislabelled(data.pool, count=1, seed=1)
    settings = TrainingSettings(hidden=(16,), loss=CrossEntropy(), epochs=30, learning_rate=0.01)
    claim = Guarantee("approximate", epsilon=0.5, delta=1e-5, because="Nobody's claim.")
    without, inside = network_draws(data.train, canary, settings=settings)
    report = audit.distinguish(without, inside, claim, samples=80, confidence=0.999)
    assert report.verdict == "refuted"


def test_networks_without_the_canary_are_not_told_apart():
    data = load("mnist-5k", records=60, seed=1)
    canary = mislabelled(data.pool, count=1, seed=1)
    without, _ = network_draws(
        data.train, canary, settings=TrainingSettings(hidden=(4,), loss=CrossEntropy(), epochs=2)
    )
    report = audit.distinguish(without, without, PureCost(0.0), samples=64, confidence=SURE)
    assert report.verdict == "consistent"


def test_canaries_are_real_records_with_wrong_labels():
    data = load("mnist-5k", records=100, seed=0)
    canaries = mislabelled(data.pool, count=50, seed=3)
    known = {row.tobytes(): label for row, label in zip(data.pool.features, data.pool.labels, strict=True)}
    for row, label in zip(canaries.features, canaries.labels, strict=True):
        assert known[row.tobytes()] != label
        assert 0 <= label < 10


def test_the_label_score_uses_probabilities_where_there_are_some():
    class Labels:
        def predict(self, _):
            return np.array([0, 1])

    class Probabilities(Labels):
        def predict_proba(self, _):
            return np.array([[0.5, 0.5], [0.0, 1.0]])

    features, labels = np.zeros((2, 1), np.float32), np.array([1, 1])
    assert label_score(Labels(), features, labels).tolist() == [0.0, 1.0]
    assert label_score(Probabilities(), features, labels) == pytest.approx([np.log(0.5), 0.0])


def test_what_makes_no_game_is_refused_with_a_sentence():
    records, canaries = apart(10)
    fit = sums("gaussian", 1.0, 10)
    with pytest.raises(InvalidInput, match="at least 2 canaries"):
        one_run(fit, released, records, canaries.take([0]), PureCost(1.0))
    with pytest.raises(InvalidInput, match="numbers, one per canary"):
        one_run(fit, lambda *_: np.zeros(3), records, canaries, PureCost(1.0))
    with pytest.raises(InvalidInput, match="no guarantee of its own"):
        one_run(fit, released, records, canaries)
    with pytest.raises(InvalidInput, match="exactly one record"):
        repeated(fit, released, records, canaries, PureCost(1.0))
    with pytest.raises(InvalidInput, match="features"):
        one_run(fit, released, records, Records("wide", np.zeros((4, 2)), np.zeros(4, int), 2), PureCost(1.0))
    with pytest.raises(InvalidInput, match="ask for fewer"):
        mislabelled(records, count=2)


SURE_of_dpsgd_audit = 1 - 1e-6
SIZE = 30


def _records():
    """Thirty records, and a canary that differs from all of them by a column of its own."""
    features = np.zeros((SIZE, 5), np.float32)
    features[:, :4] = np.random.default_rng(0).random((SIZE, 4))
    labels = (features[:, 0] > features[:, 1]).astype(np.int64)
    canary = Records("canary", np.array([[0, 0, 0, 0, 4.0]], np.float32), np.array([1]), 2)
    return Records("blobs", features, labels, 2), canary


def _plan(**changes):
    options = {"steps": 10, "clip": 0.02, "learning_rate": 0.05, "optimiser": "sgd"} | changes
    return plan(SIZE, epsilon=8.0, delta=1e-5, **options)


def _report(planned, noise_share, samples=1000):
    without, inside = private_network_draws(
        *_records(),
        settings=planned.settings,
        noise_multiplier=noise_share * planned.noise_multiplier,
        size=SIZE,
        seed=3,
    )
    claimed = claim(planned, exact=False, own_module=False, size_declared=True, classes_declared=True)
    return audit.distinguish(without, inside, claimed, samples=samples, confidence=SURE_of_dpsgd_audit)


def test_repeated_training_leaves_the_claim_alone_and_refutes_half_the_noise():
    """A true claim is refuted with probability 1e-6 at most; halved noise, mu = 3.3, stays far above 1.67."""
    honest = _report(_plan(), 1.0)
    assert honest.claimed == pytest.approx(1.666, abs=0.001)
    assert honest.verdict == "consistent"
    assert honest.share > 0.4  # the adversary sees something, so the next line means something
    assert _report(_plan(), 0.5).verdict == "refuted"


def test_poisson_samples_are_as_private_as_claimed_and_no_noise_is_refuted():
    planned = _plan(sampling_rate=0.5)
    assert planned.settings.sampling == "poisson"
    assert _report(planned, 1.0).verdict == "consistent"
    # Without noise and with every record taken half the time, the canary is in some step of nearly every run.
    unmasked = replace(planned, epsilon=2.0)
    assert _report(unmasked, 1e-6).verdict == "refuted"


def _fit():
    seeds = itertools.count()

    def fit(features, labels):
        options = {
            "steps": 10,
            "clip": 0.02,
            "learning_rate": 0.05,
            "optimiser": "sgd",
            "declared_size": SIZE,
        }
        private = DPSGD(8.0, 1e-5, classes=range(2), random_state=next(seeds), **options)
        return private.fit(features, labels)

    return fit


def test_one_run_leaves_dpsgd_alone():
    records, _ = _records()
    generator = np.random.default_rng(1)
    canaries = Records(
        "canaries", generator.random((40, 5), dtype=np.float32), generator.integers(0, 2, 40), 2
    )
    report = one_run(_fit(), label_score, records, canaries, confidence=SURE_of_dpsgd_audit)
    assert report.verdict == "consistent"
    assert report.samples == 40


def test_only_one_canary_makes_neighbours():
    records, _ = _records()
    planned = _plan()
    with pytest.raises(InvalidInput, match="exactly one record"):
        private_network_draws(records, records, settings=planned.settings, noise_multiplier=1.0, size=SIZE)


@pytest.mark.parametrize(
    ("canaries", "guesses", "right", "delta", "published"),
    [(1000, 100, 75, 1e-4, 0.673), (100_000, 1510, 1439, 1e-5, 2.675)],
    ids=["appendix D", "section 7"],
)
def test_figures_printed_by_steinke_nasr_and_jagielski_come_out(canaries, guesses, right, delta, published):
    """arXiv:2305.08846v1, at 95%; the second figure is cut off, not rounded."""
    bound = epsilon_lower_bound(canaries, guesses, right, delta=delta, confidence=0.95)
    assert bound == pytest.approx(published, abs=1e-3)


@given(
    canaries=st.integers(1, 300),
    share=st.floats(0, 1),
    epsilon=st.floats(0, 4),
    delta=st.sampled_from([0.0, 1e-3, 0.05]),
    confidence=st.sampled_from([0.8, 0.99]),
)
@settings(max_examples=60)
def test_the_bound_on_epsilon_is_wrong_with_at_most_the_stated_probability(
    canaries, share, epsilon, delta, confidence
):
    """Randomised response that tells everything with probability delta, guessing about a fixed part of the canaries.

    Its law is known, so the probability of an error is summed, not sampled.
    """
    guesses = max(1, int(share * canaries))
    right = np.arange(guesses + 1)
    law = (1 - delta) * binom.pmf(right, guesses, 1 / (1 + math.exp(-epsilon)))
    law[-1] += delta
    rejected = [tail_under_epsilon(canaries, guesses, v, epsilon, delta) <= 1 - confidence for v in right]
    assert law[rejected].sum() <= (1 - confidence) * (1 + 1e-9)


@given(canaries=st.integers(2, 50), mu=st.floats(0.1, 3), confidence=st.sampled_from([0.8, 0.99]))
@settings(max_examples=20)
def test_the_bound_on_mu_is_wrong_with_at_most_the_stated_probability(canaries, mu, confidence):
    """One number with Gaussian noise per canary: each guess is right with probability Phi(mu/2)."""
    right = np.arange(canaries + 1)
    law = binom.pmf(right, canaries, norm.cdf(mu / 2))
    wrong = [mu_lower_bound(canaries, canaries, int(v), confidence=confidence) > mu for v in right]
    assert law[wrong].sum() <= (1 - confidence) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("canaries", "guesses", "right", "mu"), [(8, 8, 7, 0.7), (12, 6, 6, 1.0), (20, 10, 8, 0.3)]
)
def test_the_least_mass_is_the_solution_of_the_linear_programme(canaries, guesses, right, mu):
    """Independently: maximise P[N >= v] over all laws that obey the inequalities, F replaced by its tangents."""
    levels = np.arange(guesses + 1)
    rows, limits = [], []
    for k in range(1, guesses + 1):
        for point in ndtr(np.linspace(-9, 4, 400)):
            value = ndtr(ndtri(point) + mu)
            slope = norm.pdf(ndtri(point) + mu) / norm.pdf(ndtri(point))
            correct = np.where(levels >= k, levels, 0) / canaries
            wrong = np.where(levels >= k - 1, guesses - levels, 0) / canaries
            rows.append(correct - slope * wrong)
            limits.append(value - slope * point)
    solved = linprog(
        -(levels >= right).astype(float),
        A_ub=np.array(rows),
        b_ub=np.array(limits),
        A_eq=np.ones((1, guesses + 1)),
        b_eq=[1.0],
        bounds=(0, 1),
    )
    assert solved.success

    def excess(tail):
        needed = _mass_needed(np.array([mu]), canaries, guesses, right, 0.0, tail)
        return float(needed[0]) - guesses / canaries

    assert brentq(excess, 1e-12, 1.0, xtol=1e-12) == pytest.approx(-solved.fun, rel=2e-3)


def test_bounds_grow_with_right_guesses_and_fall_with_confidence_and_delta():
    bounds = [mu_lower_bound(1000, 100, right, confidence=0.95) for right in (50, 70, 90, 100)]
    assert bounds == sorted(bounds)
    assert bounds[0] == 0
    assert mu_lower_bound(1000, 100, 90, confidence=0.999) < bounds[2]
    assert mu_lower_bound(1000, 100, 90, extra_delta=1e-3, confidence=0.95) < bounds[2]
    assert epsilon_lower_bound(1000, 100, 90, delta=1e-3, confidence=0.95) < epsilon_lower_bound(
        1000, 100, 90, confidence=0.95
    )


@pytest.mark.parametrize("numbers", [(10, 11, 5), (10, 5, 6), (10, 0, 0), (10, 5, -1)])
def test_impossible_games_are_refused(numbers):
    with pytest.raises(InvalidInput, match="impossible"):
        mu_lower_bound(*numbers, confidence=0.95)
    with pytest.raises(InvalidInput, match="impossible"):
        tail_under_epsilon(*numbers, 1.0)


@pytest.mark.parametrize(("epsilon", "delta"), [(-1, 0), (float("nan"), 0), (1, -0.1), (1, 1.1)])
def test_a_claim_that_is_none_is_refused(epsilon, delta):
    with pytest.raises(InvalidInput, match="at least 0"):
        tail_under_epsilon(10, 10, 5, epsilon, delta)


@pytest.mark.parametrize("bound", [epsilon_lower_bound, mu_lower_bound])
@pytest.mark.parametrize("confidence", [0, 1, -1, float("nan")])
def test_a_confidence_that_is_none_is_refused(bound, confidence):
    with pytest.raises(InvalidInput, match="strictly between 0 and 1"):
        bound(10, 10, 5, confidence=confidence)
