"""What explains the paper's numbers on CIFAR: scalings, trials, and the stored ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quietmax.data.records import Records
from quietmax.errors import InvalidInput
from quietmax.experiments import paper
from quietmax.experiments.cifar import (
    DATASETS,
    SCALINGS,
    STORED,
    Case,
    CifarTrial,
    NetworkRow,
    cases,
    is_measured,
    measure,
    network_rows,
    private_rows,
)
from quietmax.experiments.stored import stored_table

CASE = Case("cifar-10", "pixel/255", 1e-3, 3, "convexified", 2.0, splits=2)


@pytest.fixture(scope="module")
def images() -> Records:
    """Small images of three planes, ten classes."""
    generator = np.random.default_rng(0)
    features = generator.random((200, 12), dtype=np.float32)
    return Records("cifar-10", features, np.arange(200) % 10, classes=10)


def test_scalings_are_what_their_names_say(images: Records) -> None:
    scaled = {name: scale(images.features) for name, scale in SCALINGS.items()}
    assert scaled["pixel/255"] is images.features
    assert np.allclose(scaled["pixel/255 - 0.5"] + 0.5, images.features)
    assert all(each.dtype == np.float32 for each in scaled.values())


def test_a_case_trains_one_network_per_split_and_answers_with_algorithm1_at_every_epsilon(
    images: Records,
) -> None:
    trials = measure(CASE, images, size=60)
    assert [trial.split for trial in trials if trial.method == "plain"] == [0, 1]
    for noise in ("gaussian", "laplace"):
        found = [trial for trial in trials if (trial.method, trial.split) == (f"algorithm1-{noise}", 1)]
        assert [trial.epsilon for trial in found] == list(paper.EPSILONS)
    assert all(0.01 <= (trial.worst_share or 0) <= 1 for trial in trials if trial.method == "plain")
    assert is_measured(CASE, trials)
    assert not is_measured(replace(CASE, splits=3), trials)
    assert not is_measured(replace(CASE, alpha=1.0), trials)
    assert measure(CASE, images, size=60) == trials


def test_the_losses_and_alphas_train_differently(images: Records) -> None:
    plain = [
        measure(replace(CASE, loss=loss, alpha=alpha, epochs=30), images, size=60)[0]
        for loss, alpha in (("convexified", 2.0), ("convexified", 1.0), ("cross-entropy", None))
    ]
    assert len({(trial.train_accuracy, trial.test_accuracy) for trial in plain}) == 3
    assert plain[2].worst_share is None


def test_dpsgd_is_trained_at_every_epsilon_with_the_learning_rate_of_the_case(images: Records) -> None:
    case = Case("cifar-10", "pixel/255", 1e-2, 100, "cross-entropy", None, "published-rdp", 1, (1.0, 1000.0))
    trials = measure(case, images, size=60)
    assert [(trial.method, trial.epsilon) for trial in trials] == [
        ("published-rdp", 1.0),
        ("published-rdp", 1000.0),
    ]
    slower = measure(replace(case, learning_rate=1e-6), images, size=60)
    assert (trials[1].train_accuracy or 0) > (slower[1].train_accuracy or 0)


def _trial(method: str, epsilon: float | None, test: float, split: int = 0) -> CifarTrial:
    train = 0.6 if method == "plain" else None
    return CifarTrial(
        "cifar-10", "pixel/255", 1e-3, 100, "convexified", 2.0, split, method, epsilon, train, test
    )


def test_rows_compare_means_over_splits_with_the_papers_table_and_curves() -> None:
    printed = paper.curve("cifar-10", "acc_loss", "alg1_gauss")
    trials = [_trial("plain", None, 0.4), _trial("plain", None, 0.5, 1)]
    for split, baseline in ((0, 0.4), (1, 0.5)):
        near = baseline * (1 - printed[1.0])
        trials += [
            _trial("algorithm1-gaussian", 1.0, near, split),
            _trial("algorithm1-gaussian", 10.0, 0.0, split),
        ]
    (row,) = network_rows(trials)
    assert (row.splits, row.train_accuracy.value, row.test_accuracy.value) == (2, 0.6, 0.45)
    assert (row.paper_train_accuracy, row.paper_test_accuracy) == (0.5731, 0.4236)
    assert row.difference == pytest.approx(0.6 - 0.5731)
    assert not row.agrees
    assert (row.points, row.within) == (2, 1)
    assert row.largest_difference == pytest.approx(1 - printed[10.0])


def test_the_accuracy_loss_of_dpsgd_is_against_the_network_of_the_same_settings() -> None:
    private = replace(_trial("published-rdp", 1.0, 0.3), loss="cross-entropy", alpha=None)
    other = replace(private, scaling="pixel/255 - 0.5")
    first, second = private_rows([_trial("plain", None, 0.4), private, other])
    assert first.accuracy_loss == pytest.approx(0.25)
    assert first.paper_test_accuracy == pytest.approx(0.4236 * (1 - 0.3191))
    assert second.accuracy_loss is None


def test_only_cifar_has_cases() -> None:
    assert {case.dataset for case in cases()} == set(DATASETS)
    assert all(case.scaling in SCALINGS for case in cases())
    with pytest.raises(InvalidInput, match="mnist"):
        cases(["mnist"])


def test_all_cases_are_stored() -> None:
    trials = stored_table(CifarTrial, STORED)
    assert [case for case in cases() if not is_measured(case, trials)] == []


def _stored(name: str, scaling: str, rate: float, alpha: float | None) -> NetworkRow:
    wanted = (name, scaling, rate, 100, "cross-entropy" if alpha is None else "convexified", alpha)
    (found,) = network_rows([trial for trial in stored_table(CifarTrial, STORED) if trial.settings == wanted])
    return found


def test_a_tenth_of_the_stated_learning_rate_gives_all_rows_of_the_paper() -> None:
    for name, alpha in (("cifar-10", 2.0), ("cifar-10", None), ("cifar-100", 1.0), ("cifar-100", None)):
        assert _stored(name, "pixel/255", 1e-4, alpha).agrees, (name, alpha)
    for name, alpha in (("cifar-10", 2.0), ("cifar-100", 1.0)):
        curves = _stored(name, "pixel/255", 1e-4, alpha)
        assert curves.within == curves.points == 2 * len(paper.EPSILONS)


def test_the_stated_learning_rate_gives_neither_row_of_cifar_10_with_any_scaling() -> None:
    rows = [
        row
        for row in network_rows(stored_table(CifarTrial, STORED, ["cifar-10"]))
        if (row.learning_rate, row.epochs) == (1e-3, 100) and row.alpha in (None, 2.0)
    ]
    assert len({row.scaling for row in rows}) > 1
    assert not any(row.agrees for row in rows)


def test_a_tenth_of_the_stated_learning_rate_gives_the_papers_dpsgd() -> None:
    rows = [
        row
        for row in private_rows(stored_table(CifarTrial, STORED))
        if (row.scaling, row.learning_rate, row.loss) == ("pixel/255", 1e-4, "convexified")
    ]
    assert rows
    assert all(abs(row.test_accuracy - row.paper_test_accuracy) < 0.02 for row in rows)


def test_at_the_stated_learning_rate_the_accuracy_depends_on_the_split() -> None:
    spreads = {
        rate: _stored("cifar-10", scaling, rate, 2.0).train_accuracy.spread
        for scaling, rate in (("pixel/255 - 0.5", 1e-3), ("pixel/255", 1e-4))
    }
    assert (spreads[1e-3] or 0) > 0.05 > 0.02 > (spreads[1e-4] or 1)
