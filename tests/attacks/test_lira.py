from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from quietmax.attacks import LiRA, ShadowPool
from quietmax.attacks.builtin import _Bernoulli, _Gaussian
from quietmax.attacks.metrics import Released
from quietmax.attacks.shadow_models import candidate_rows
from quietmax.data import Split
from quietmax.errors import InvalidInput
from quietmax.models import Model
from tests.attacks.reference_attacks import Experiment, lira_scores, view_of

BOTH_MODES = [LiRA(), LiRA(mode="offline")]


@pytest.mark.parametrize("variance", ["fixed", "per-example"])
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_scores_equal_those_of_the_reference_implementation(
    memorised: Split, overfitted: Model, overlapping_pool: ShadowPool, mode: Any, variance: Any
) -> None:
    attack = LiRA(mode=mode, variance=variance)
    answers = attack.query(overfitted, memorised).answers
    scores = attack.fit(overlapping_pool, "probabilities").scores(answers)
    view = view_of(overfitted, memorised, overlapping_pool, candidate_rows(memorised))
    expected = lira_scores(view, online=mode == "online", fixed=variance == "fixed")
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)


def test_offline_lira_can_learn_from_disjoint_networks(
    memorised: Split, overfitted: Model, disjoint_pool: ShadowPool
) -> None:
    attack = LiRA(mode="offline")
    answers = attack.query(overfitted, memorised).answers
    scores = attack.fit(disjoint_pool, "probabilities").scores(answers)
    view = view_of(overfitted, memorised, disjoint_pool, candidate_rows(memorised))
    np.testing.assert_allclose(scores, lira_scores(view, online=False, fixed=True), rtol=1e-5, atol=1e-5)


def test_leaving_a_network_out_equals_fitting_the_others() -> None:
    generator = np.random.default_rng(0)
    values, counted = generator.normal(5, 2, (7, 9)), generator.random((7, 9)) < 0.6
    for pooled in (True, False):
        together = _Gaussian.fit(values, counted, True, pooled=pooled)
        for index in range(7):
            others = np.arange(7) != index
            alone = _Gaussian.fit(values[others], counted[others], False, pooled=pooled)
            known = together.known[index]
            np.testing.assert_array_equal(known, alone.known)
            np.testing.assert_allclose(together.mean[index][known], alone.mean[known])
            np.testing.assert_allclose(together.variance[index][known], alone.variance[known])
    right = (values > 5).astype(float)
    all_but_one = _Bernoulli.fit(right, counted, True)
    without_first = _Bernoulli.fit(right[1:], counted[1:], False)
    np.testing.assert_allclose(all_but_one.probability[0], without_first.probability)


@pytest.mark.parametrize("attack", BOTH_MODES)
def test_memorised_records_are_told_apart(
    memorised: Split, overfitted: Model, overlapping_pool: ShadowPool, attack: LiRA
) -> None:
    report = attack.run(overfitted, memorised, pool=overlapping_pool)
    assert report.auc.low > 0.9
    assert report.leakage.low > 0.5
    assert report.advantage.value == report.leakage.value


@pytest.mark.parametrize("attack", BOTH_MODES)
@pytest.mark.parametrize("released", ["probabilities", "labels"])
def test_an_untrained_network_leaks_nothing(
    memorised: Split, untrained: Model, overlapping_pool: ShadowPool, attack: LiRA, released: Released
) -> None:
    target = untrained if released == "probabilities" else untrained.predict
    report = attack.run(untrained, memorised, pool=overlapping_pool, target=target)
    assert report.released == released
    # Without a difference, the AUC of 100 and 100 records has standard deviation 0.041: 0.21 is more than five of them.
    assert abs(report.auc.value - 0.5) < 0.21
    assert abs(report.leakage.value) < 0.36


@pytest.mark.parametrize("attack", BOTH_MODES)
def test_labels_are_enough_to_tell_memorised_records_apart(
    memorised: Split, overfitted: Model, overlapping_pool: ShadowPool, attack: LiRA
) -> None:
    report = attack.run(overfitted, memorised, pool=overlapping_pool, target=overfitted.predict)
    assert report.released == "labels"
    assert report.auc.value > 0.75


def test_labels_are_scored_by_the_likelihood_ratio_of_bernoulli_distributions(
    memorised: Split, overfitted: Model, overlapping_pool: ShadowPool
) -> None:
    attack = LiRA()
    answers = attack.query(overfitted.predict, memorised).answers
    scores = attack.fit(overlapping_pool, "labels").scores(answers)
    candidates = candidate_rows(memorised)
    features, labels = memorised.records.features[candidates], memorised.records.labels[candidates]
    right = [
        [int(net.logits(features[i][None]).argmax()) == labels[i] for i in range(20)]
        for net in overlapping_pool.each()
    ]
    inside = overlapping_pool.inside[:, candidates]
    for i in range(20):
        seen = [net[i] for net, own in zip(right, inside, strict=True) if own[i]]
        unseen = [net[i] for net, own in zip(right, inside, strict=True) if not own[i]]
        p, q = (sum(seen) + 0.5) / 7, (sum(unseen) + 0.5) / 7
        hit = answers.labels[i] == labels[i]
        assert scores[i] == pytest.approx(math.log(p / q) if hit else math.log((1 - p) / (1 - q)))


def test_online_lira_requires_overlapping_networks(
    memorised: Split, overfitted: Model, disjoint_pool: ShadowPool
) -> None:
    with pytest.raises(InvalidInput, match="requires a shadow pool of design overlapping, got disjoint"):
        LiRA().run(overfitted, memorised, pool=disjoint_pool)


@pytest.mark.parametrize("attack", [LiRA(), LiRA(variance="per-example")])
def test_too_few_reference_networks_are_an_error(memorised: Split, overfitted: Model, attack: LiRA) -> None:
    pool = ShadowPool.train("overlapping", memorised, overfitted.settings, 2)
    with pytest.raises(InvalidInput, match="2 reference networks are too few"):
        attack.run(overfitted, memorised, pool=pool)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LiRA(mode="sideways"), "mode must be 'online' or 'offline', got 'sideways'"),  # type: ignore[arg-type]
        (lambda: LiRA(variance="none"), "variance must be 'fixed' or 'per-example', got 'none'"),  # type: ignore[arg-type]
    ],
)
def test_unknown_settings_are_errors(make: Callable[[], LiRA], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_the_auc_on_location_is_that_of_an_independent_implementation(
    location: Experiment, mode: Any
) -> None:
    """Own random halves, own training loop and own formulas, 16 reference networks each."""
    ours = ShadowPool.train("overlapping", location.data, location.model.settings, 16)
    expected = lira_scores(location.candidates_only, online=mode == "online", fixed=True)
    found = LiRA(mode=mode).run(location.model, location.data, pool=ours).auc.value
    assert found == pytest.approx(roc_auc_score(np.repeat([1, 0], 1200), expected), abs=0.02)
    assert found > 0.85
