"""The contract of every built-in attack, its formulas beside a second implementation, and the registry."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import quietmax as qm
from quietmax.accounting import Budget
from quietmax.attacks import RMIA, Attack, LiRA, Shadow, ShadowPool, Threshold
from quietmax.attacks.builtin import (
    ATTACK_NETWORK,
    _attack_data,
    _bernoulli,
    _gaussian,
    make_attack,
    registered_attacks,
)
from quietmax.attacks.metrics import _released_probabilities
from quietmax.attacks.shadow_models import Design, _leftover_rows, candidate_rows
from quietmax.data import Split
from quietmax.errors import InvalidInput
from quietmax.mechanisms import NoisyMax
from quietmax.mechanisms.base import Answerer
from quietmax.models import CrossEntropy, TrainingSettings, accuracy
from quietmax.noise import SeededNoise
from tests.attacks.conftest import World
from tests.attacks.reference_attacks import lira_scores, rmia_scores, view_of
from tests.mechanisms.made_up import bounds

SMALL = TrainingSettings(hidden=(8,), loss=CrossEntropy(), epochs=3)


class _Margin(Threshold):
    """A plug-in."""

    name = "margin"


CASES: list[tuple[str, Design]] = [
    ("shadow", "disjoint"),
    ("threshold", "disjoint"),
    ("threshold-confidence", "disjoint"),
    ("threshold-entropy", "overlapping"),
    ("lira", "overlapping"),
    ("lira-offline", "overlapping"),
    ("lira-offline", "disjoint"),
    ("rmia", "overlapping"),
    ("rmia-offline", "overlapping"),
    ("rmia-offline", "disjoint"),
    ("margin", "disjoint"),
]
WEAK = {
    ("threshold-confidence", "disjoint"),
    ("threshold-entropy", "overlapping"),
    ("lira-offline", "disjoint"),
}
"""Attacks that do not use the true label, or do not know how hard a record is without it."""


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[EntryPoint]]:
    """Register objects as entry points of the group `quietmax.attacks`."""

    def register(**plugins: Any) -> list[EntryPoint]:
        module = ModuleType("attack_plugins")
        vars(module).update(plugins)
        entries = [EntryPoint(name, f"attack_plugins:{name}", "quietmax.attacks") for name in plugins]
        monkeypatch.setitem(sys.modules, "attack_plugins", module)
        monkeypatch.setattr(
            "quietmax._lazy.entry_points", lambda group: entries if group == "quietmax.attacks" else []
        )
        return entries

    return register


def test_the_contract_is_tested_with_every_attack() -> None:
    assert {name for name, _ in CASES} == {*registered_attacks(), "margin"}


@pytest.mark.parametrize(("name", "design"), CASES)
def test_every_attack_tells_memorised_records_apart_and_finds_nothing_in_an_untrained_network(
    world: World, name: str, design: Design, install: Callable[..., object]
) -> None:
    """Without a difference, TPR - FPR of 100 and 100 has standard deviation at most 0.071, the AUC 0.041."""
    install(margin=_Margin)
    attack = make_attack(name, models=9, seed=4)
    assert (attack.name, attack.models, attack.seed) == (name, 9, 4)
    report = world.run(attack, design=design)
    weak, strong = (name, design) in WEAK, name.startswith(("lira", "rmia"))
    assert report.leakage.low > (0.3 if weak else 0.5)
    assert report.auc.low > (0.6 if weak else 0.9 if strong else 0.8)
    assert report.leakage.value == report.tpr.value - report.fpr.value
    assert name == "shadow" or report.advantage.value == report.leakage.value
    others = 220 if name.startswith("rmia") else 0
    assert (report.members, report.nonmembers, report.queries, report.spent) == (100, 100, 200 + others, None)
    assert report.settings["models"] == world.pool(design).networks
    assert report.settings["pool"] == design
    labels = world.run(attack, world.model.predict, design)
    assert labels.released == "labels"
    assert labels.leakage.value > 0.4
    assert labels.auc.value > 0.75
    for target in (world.untrained, world.untrained.predict):
        nothing = world.run(attack, target, design)
        assert abs(nothing.leakage.value) < 0.36
        assert abs(nothing.auc.value - 0.5) < 0.21


@pytest.mark.parametrize(
    ("attack", "design", "needed"),
    [
        (LiRA(), "disjoint", "overlapping"),
        (RMIA(), "disjoint", "overlapping"),
        (Shadow(), "overlapping", "disjoint"),
    ],
)
def test_a_pool_of_another_design_is_an_error(
    world: World, attack: Attack, design: Design, needed: Design
) -> None:
    with pytest.raises(InvalidInput, match=f"requires a shadow pool of design {needed}, got {design}"):
        world.run(attack, design=design)


@pytest.mark.parametrize("attack", [LiRA(), LiRA(variance="per-example"), RMIA(), RMIA(mode="offline")])
def test_too_few_reference_networks_are_an_error(world: World, attack: Attack) -> None:
    networks = 1 if attack.name == "rmia-offline" else 2
    pool = ShadowPool.train("overlapping", world.data, world.model.settings, networks)
    with pytest.raises(InvalidInput, match=f"{networks} reference networks are too few"):
        attack.run(world.model, world.data, pool=pool)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LiRA(mode="sideways"), "mode must be 'online' or 'offline', got 'sideways'"),
        (lambda: RMIA(mode="sideways"), "mode must be 'online' or 'offline', got 'sideways'"),
        (lambda: LiRA(variance="none"), "variance must be 'fixed' or 'per-example', got 'none'"),
        (lambda: RMIA(gamma=0.0), "gamma must be positive and finite, got 0.0"),
        (lambda: RMIA(offset=2.0), "offset must be from 0 to 1"),
        (lambda: RMIA(population=0), "population must be at least 1, got 0"),
        (lambda: Threshold(statistic="length"), "loss, confidence, entropy"),
        (lambda: make_attack("lirra", models=1), "did you mean 'lira'"),
    ],
)
def test_invalid_settings_are_errors(make: Callable[[], Attack], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


@pytest.mark.parametrize("statistic", ["loss", "confidence", "entropy"])
def test_the_score_of_a_threshold_is_the_named_statistic_of_each_answer(world: World, statistic: Any) -> None:
    attack = Threshold(statistic=statistic)
    answers = attack.query(world.model, world.data).answers
    scores = attack.fit(world.disjoint, "probabilities").scores(answers)
    labels = world.data.records.labels[candidate_rows(world.data)]
    for record in range(0, 200, 13):
        row = _released_probabilities(answers)[record].tolist()
        expected = {
            "loss": math.log(row[labels[record]]),
            "confidence": max(row),
            "entropy": sum(p * math.log(p) for p in row),
        }[statistic]
        assert scores[record] == pytest.approx(expected, rel=1e-9)


def test_the_threshold_depends_on_the_shadow_networks_and_not_on_the_target(world: World) -> None:
    one, other = (world.run(Threshold(), target) for target in (world.model, world.untrained))
    assert one.threshold == other.threshold
    assert one.auc.value > other.auc.value + 0.2


def test_with_labels_only_the_leakage_of_a_threshold_is_the_accuracy_gap(world: World) -> None:
    report = world.run(Threshold(), world.model.predict)
    gap = accuracy(world.model, world.data.train) - accuracy(world.model, world.data.test)
    assert report.leakage.value == pytest.approx(gap)
    assert report.notes


def test_the_attack_network_is_that_of_the_paper() -> None:
    paper = TrainingSettings(
        (64,), "tanh", CrossEntropy(), learning_rate=0.01, batch_size=100, epochs=100, l2=1e-6
    )
    assert paper == ATTACK_NETWORK


def test_attack_data_are_the_plain_answers_of_the_shadow_networks(world: World) -> None:
    features, labels, inside, units = _attack_data(world.disjoint, "probabilities")
    assert features.shape == (8 * 200, 3)
    assert len(units) == 8 * 200
    second = next(network for index, network in enumerate(world.disjoint.each()) if index == 1)
    rows = np.flatnonzero(world.disjoint.inside[1])
    expected = torch.softmax(second.logits(world.data.records.features[rows]), -1)
    np.testing.assert_allclose(features[200:300], expected.numpy(), atol=1e-6)
    np.testing.assert_array_equal(labels[200:300], world.data.records.labels[rows])
    assert inside.reshape(8, 2, 100).tolist() == [[[1] * 100, [0] * 100]] * 8


def test_every_record_is_judged_by_the_network_of_its_true_class(world: World) -> None:
    attack = Shadow(network=SMALL)
    fitted = attack.fit(world.disjoint, "probabilities")
    networks = attack.networks(world.disjoint, "probabilities")
    answers = attack.query(world.model, world.data).answers
    scores = fitted.scores(answers)
    labels = world.disjoint.candidate_labels
    for record in range(0, 200, 17):
        judge = networks.stack.network(int(labels[record]))
        answer = _released_probabilities(answers)[record : record + 1].astype(np.float32)
        outside, inside = judge.logits(answer)[0].tolist()
        assert scores[record] == pytest.approx(inside - outside, abs=1e-5)
    with pytest.raises(InvalidInput, match="labels only"):
        fitted.scores(attack.query(world.model.predict, world.data).answers)


def test_classes_without_shadow_records_are_judged_by_one_network_for_all(world: World) -> None:
    """The leftover records hold no record of class 2, which the candidates do."""
    data, labels = world.data, world.data.records.labels
    kept = data.pool_rows[labels[data.pool_rows] != 2]
    scarce = Split(data.records, data.train_rows, data.test_rows, kept, 0)
    pool = ShadowPool.train("disjoint", scarce, world.model.settings, 3)
    attack = Shadow(network=SMALL)
    networks = attack.networks(pool, "probabilities")
    assert networks.stack.networks == 3
    assert networks.network_of_class.tolist() == [0, 1, 2]
    assert _attack_data(pool, "probabilities")[1].max() == 1
    assert "for 1 classes (2)" in attack.run(world.model, scarce, pool=pool).notes[-1]


def test_a_proven_mechanism_with_strong_noise_hides_membership(world: World) -> None:
    """What is certified here is the noise's scale beside these logits; 0.36 is five standard deviations."""
    target = Answerer.prepare(
        world.model, NoisyMax(bounds=bounds(100.0, 100.0)), Budget(0.1), noise=SeededNoise(0)
    )
    report = world.run(Shadow(), target)
    assert report.released == "labels"
    assert abs(report.leakage.value) < 0.36


def test_the_plain_model_of_location_leaks_at_least_what_the_paper_reports(real_data: Path) -> None:
    """Four shadow networks instead of thirty, to be quick; the paper's leakage is 0.36."""
    data = qm.load("location", data_dir=real_data)
    report = Shadow(models=4).run(qm.train(data), data)
    assert report.leakage.value >= 0.36
    assert report.members == report.nonmembers == 1200


@pytest.mark.parametrize(
    ("attack", "design"),
    [
        (LiRA(), "overlapping"),
        (LiRA(variance="per-example"), "overlapping"),
        (LiRA(mode="offline"), "overlapping"),
        (LiRA(mode="offline", variance="per-example"), "overlapping"),
        (LiRA(mode="offline"), "disjoint"),
    ],
)
def test_scores_of_lira_equal_those_of_the_reference_implementation(
    world: World, attack: LiRA, design: Design
) -> None:
    answers = attack.query(world.model, world.data).answers
    scores = attack.fit(world.pool(design), "probabilities").scores(answers)
    view = view_of(world.model, world.data, world.pool(design), candidate_rows(world.data))
    expected = lira_scores(view, online=attack.mode == "online", fixed=attack.variance == "fixed")
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [None, 0.0, 0.3, 1.0])
def test_scores_of_rmia_equal_those_of_the_reference_implementation(
    world: World, offset: float | None
) -> None:
    attack = RMIA(mode="online" if offset is None else "offline", offset=offset, population=60)
    answers = attack.query(world.model, world.data).answers
    scores = attack.fit(world.overlapping, "probabilities").scores(answers)
    rows = np.concatenate([candidate_rows(world.data), _leftover_rows(world.data, 60, 0)])
    view = view_of(world.model, world.data, world.overlapping, rows)
    np.testing.assert_allclose(scores, rmia_scores(view, 200, gamma=2.0, offset=offset))


def test_leaving_a_network_out_equals_fitting_the_others() -> None:
    generator = np.random.default_rng(0)
    values, counted = generator.normal(5, 2, (7, 9)), generator.random((7, 9)) < 0.6
    fits = [
        (partial(_gaussian, pooled=True), values),
        (partial(_gaussian, pooled=False), values),
        (_bernoulli, (values > 5).astype(float)),
    ]
    for fit, seen in fits:
        together = fit(seen, counted, True)
        for index in range(7):
            others = np.arange(7) != index
            alone = fit(seen[others], counted[others], False)
            known = together.known[index]
            np.testing.assert_array_equal(known, alone.known)
            for measure, expected in zip(together[:2], alone[:2], strict=True):
                np.testing.assert_allclose(measure(seen)[index][known], expected(seen[index])[known])


def test_labels_are_scored_by_the_likelihood_ratio_of_bernoulli_distributions(world: World) -> None:
    attack, pool, records = LiRA(), world.overlapping, world.data.records
    answers = attack.query(world.model.predict, world.data).answers
    scores = attack.fit(pool, "labels").scores(answers)
    rows = candidate_rows(world.data)[:20]
    labels = records.labels[rows]
    right = np.array([net.logits(records.features[rows]).argmax(1).numpy() == labels for net in pool.each()])
    inside = pool.inside[:, rows]
    for i in range(20):
        seen, unseen = right[inside[:, i], i], right[~inside[:, i], i]
        p, q = (sum(seen) + 0.5) / 7, (sum(unseen) + 0.5) / 7
        hit = answers.labels[i] == labels[i]
        assert scores[i] == pytest.approx(math.log(p / q) if hit else math.log((1 - p) / (1 - q)))


def test_without_leftover_records_candidates_are_compared_with_each_other(world: World) -> None:
    data = world.data
    everything = Split(data.records, data.train_rows, data.test_rows, data.pool_rows[:0], 0)
    pool = ShadowPool.train("overlapping", everything, world.model.settings, 8)
    report = RMIA().run(world.model, everything, pool=pool)
    assert report.queries == 200
    assert "compared with each other" in report.notes[-1]
    assert report.auc.value > 0.9


def test_a_plug_in_must_return_an_attack(install: Callable[..., object]) -> None:
    install(mine=_Margin, odd=lambda models, seed: models + seed)
    assert list(registered_attacks())[-2:] == ["mine", "odd"]
    with pytest.raises(InvalidInput, match="must return a quietmax"):
        make_attack("odd", models=1)


def test_broken_plug_ins_are_skipped_with_a_warning(install: Callable[..., list[EntryPoint]]) -> None:
    entries = install(shadow=_Margin, number=3)
    entries.append(EntryPoint("absent", "attack_plugins:absent", "quietmax.attacks"))
    with pytest.warns(UserWarning, match="plug-in") as warned:
        known = registered_attacks()
    assert [str(each.message).split("'")[1] for each in warned] == ["shadow", "number", "absent"]
    assert "number" not in known
    assert known["shadow"] is not _Margin
