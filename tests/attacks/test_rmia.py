from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from quietmax.attacks import RMIA, ShadowPool
from quietmax.attacks.metrics import Released
from quietmax.attacks.shadow_models import candidate_rows, leftover_rows
from quietmax.data import Split
from quietmax.errors import InvalidInput
from quietmax.models import Model
from tests.attacks.reference_attacks import Experiment, rmia_scores, view_of

BOTH_MODES = [RMIA(), RMIA(mode="offline")]


@pytest.mark.parametrize("offset", [None, 0.0, 0.3, 1.0])
def test_scores_equal_those_of_the_reference_implementation(
    memorised: Split, overfitted: Model, overlapping_pool: ShadowPool, offset: float | None
) -> None:
    attack = RMIA(mode="online" if offset is None else "offline", offset=offset, population=60)
    answers = attack.query(overfitted, memorised).answers
    scores = attack.fit(overlapping_pool, "probabilities").scores(answers)
    rows = np.concatenate([candidate_rows(memorised), leftover_rows(memorised, 60, 0)])
    view = view_of(overfitted, memorised, overlapping_pool, rows)
    expected = rmia_scores(view, 200, gamma=2.0, offset=offset)
    np.testing.assert_allclose(scores, expected)


@pytest.mark.parametrize("attack", BOTH_MODES)
def test_memorised_records_are_told_apart(
    memorised: Split, overfitted: Model, overlapping_pool: ShadowPool, attack: RMIA
) -> None:
    report = attack.run(overfitted, memorised, pool=overlapping_pool)
    assert report.auc.low > 0.9
    assert report.leakage.low > 0.5
    assert report.advantage.value == report.leakage.value


@pytest.mark.parametrize("attack", BOTH_MODES)
@pytest.mark.parametrize("released", ["probabilities", "labels"])
def test_an_untrained_network_leaks_nothing(
    memorised: Split, untrained: Model, overlapping_pool: ShadowPool, attack: RMIA, released: Released
) -> None:
    target = untrained if released == "probabilities" else untrained.predict
    report = attack.run(untrained, memorised, pool=overlapping_pool, target=target)
    assert report.released == released
    # Without a difference, the AUC of 100 and 100 records has standard deviation 0.041: 0.21 is more than five of them.
    assert abs(report.auc.value - 0.5) < 0.21
    assert abs(report.leakage.value) < 0.36


@pytest.mark.parametrize("attack", BOTH_MODES)
def test_labels_are_enough_to_tell_memorised_records_apart(
    memorised: Split, overfitted: Model, overlapping_pool: ShadowPool, attack: RMIA
) -> None:
    report = attack.run(overfitted, memorised, pool=overlapping_pool, target=overfitted.predict)
    assert report.released == "labels"
    assert report.auc.value > 0.75


def test_the_target_is_queried_for_the_population_too(
    memorised: Split, overfitted: Model, overlapping_pool: ShadowPool
) -> None:
    report = RMIA(population=50).run(overfitted, memorised, pool=overlapping_pool)
    assert report.queries == 250
    assert (report.members, report.nonmembers) == (100, 100)


def test_without_leftover_records_candidates_are_compared_with_each_other(
    memorised: Split, overfitted: Model
) -> None:
    everything = Split(
        memorised.records, memorised.train_rows, memorised.test_rows, memorised.pool_rows[:0], 0
    )
    pool = ShadowPool.train("overlapping", everything, overfitted.settings, 8)
    report = RMIA().run(overfitted, everything, pool=pool)
    assert report.queries == 200
    assert "compared with each other" in report.notes[-1]
    assert report.auc.value > 0.9


def test_online_rmia_requires_overlapping_networks(
    memorised: Split, overfitted: Model, disjoint_pool: ShadowPool
) -> None:
    with pytest.raises(InvalidInput, match="requires a shadow pool of design overlapping, got disjoint"):
        RMIA().run(overfitted, memorised, pool=disjoint_pool)


@pytest.mark.parametrize("attack", BOTH_MODES)
def test_too_few_reference_networks_are_an_error(memorised: Split, overfitted: Model, attack: RMIA) -> None:
    pool = ShadowPool.train("overlapping", memorised, overfitted.settings, 2)
    with pytest.raises(InvalidInput, match="2 reference networks are too few"):
        attack.run(overfitted, memorised, pool=pool)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RMIA(mode="sideways"), "mode must be 'online' or 'offline', got 'sideways'"),  # type: ignore[arg-type]
        (lambda: RMIA(gamma=0.0), "gamma must be positive and finite, got 0.0"),
        (lambda: RMIA(offset=2.0), "offset must be from 0 to 1"),
        (lambda: RMIA(population=0), "population must be at least 1, got 0"),
    ],
)
def test_invalid_settings_are_errors(make: Callable[[], RMIA], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


@pytest.mark.slow
def test_the_auc_on_location_is_that_of_an_independent_implementation(location: Experiment) -> None:
    """Own random halves, own training loop and own formulas, 16 reference networks each."""
    ours = ShadowPool.train("overlapping", location.data, location.model.settings, 16)
    expected = rmia_scores(location.view, 2400, gamma=2.0, offset=None)
    found = RMIA().run(location.model, location.data, pool=ours).auc.value
    assert found == pytest.approx(roc_auc_score(np.repeat([1, 0], 1200), expected), abs=0.02)
    assert found > 0.85
