"""PrivateHead: its guarantee follows from what it ran, its noise is as stated, and it learns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import make_blobs

import quietmax.data
from quietmax.accounting import PureCost, mu_of
from quietmax.data import Schema
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.estimators import HeadSettings, open_private, save_private
from quietmax.estimators import training_set as conditions
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.head.weights import weights_guarantee
from quietmax.models.features import (
    Identity,
    Pipeline,
    RandomFourier,
    TableCells,
    TableFeatures,
    UnitNorm,
)
from quietmax.noise.sources import ExactNoise
from tests.estimators.made import LABELS, PUBLIC, TABLE, made
from tests.models.features.maps import ModuleMap


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"declared_size": 400},
        {"centring": 0.0},
        {"centring": 0.5, "method": "output"},
        {"declared_size": 7, "method": "output", "steps": 3},
        {"steps": 1},
        {"steps": 77, "max_grad_norm": 2.0},
        {"second_moments": 0.3},
        {"second_moments": 0.5, "centring": 0.2, "method": "output"},
    ],
    ids=str,
)
@pytest.mark.parametrize("budget", [{"epsilon": 0.1}, {"epsilon": 3.0, "delta": 1e-7}, {"mu": 1.0}], ids=str)
def test_all_releases_together_never_cost_more_than_the_budget(
    settings: dict[str, Any], budget: dict[str, Any]
) -> None:
    head = made(PrivateHead, **budget, **settings, random_state=0).fit(TABLE, LABELS)
    claim = head.guarantee_
    assert (claim.definition, claim.neighbours, claim.extra_delta) == ("gaussian", "add-remove", 0.0)
    assert "THEORY 3.1" in claim.because
    assert "mu" in budget or claim.at_delta(budget.get("delta", 1e-5)) <= budget["epsilon"]
    allowed = budget.get("mu") or mu_of(budget["epsilon"], budget.get("delta", 1e-5))
    assert head.guarantee_.mu <= allowed
    assert head.guarantee_.mu == pytest.approx(allowed, rel=1e-9)
    names = ("mu_size", "mu_centring", "mu_moments", "mu_training")
    parts = [head.guarantee_.parameters[name] or 0.0 for name in names]
    assert (head.guarantee_.parameters["mu_moments"] is not None) == bool(settings.get("second_moments"))
    assert math.hypot(*parts) <= allowed


def test_without_a_declared_size_a_noisy_count_is_released_and_paid_for() -> None:
    head = PrivateHead(epsilon=1.0, classes=(0, 1, 2)).fit(TABLE, LABELS)
    assert head.guarantee_.status == "proven"
    assert head.guarantee_.parameters["size_from"] == "noisy count"
    assert head.guarantee_.parameters["mu_size"] == pytest.approx(0.1 * mu_of(1.0, 1e-5), rel=1e-9)
    # standard deviation 1/mu_size = 37.3: ten of them have probability below 1e-22
    assert abs(head.size_ - 400) < 373
    declared = PrivateHead(epsilon=1.0, **PUBLIC).fit(TABLE, LABELS)
    assert declared.guarantee_.parameters["mu_size"] is None
    assert declared.size_ == 400


@pytest.mark.parametrize("loss", ["cross-entropy", "convexified"])
def test_the_fitted_minimisers_of_neighbours_are_within_the_certified_sensitivity(loss: str) -> None:
    """End to end, with noise too small to see."""
    settings = {"mu": 1e9, "method": "output", "regularisation": 0.02, "centring": 0.0, "calibration": 0.0}
    settings |= {"loss": loss, "alpha": 0.01, "classes": (0, 1, 2), "declared_size": 30}
    whole = made(PrivateHead, **settings).fit(TABLE[:30], LABELS[:30])
    bound = whole.sensitivity_.value
    rng = np.random.default_rng(1)
    for trial in range(40):
        kept = np.delete(np.arange(30), trial % 30)
        extreme = TABLE[:30].copy()
        extreme[trial % 30] = rng.choice([-1e6, 0.0, 1e6], size=4)
        labels = LABELS[:30].copy()
        labels[trial % 30] = rng.integers(3)
        fitted = [
            made(PrivateHead, **settings).fit(*data)
            for data in ((extreme, labels), (extreme[kept], labels[kept]))
        ]
        assert np.linalg.norm(fitted[0].coef_ - fitted[1].coef_) <= bound
    if loss == "cross-entropy":
        assert bound == pytest.approx(1.01 * math.sqrt(2) / (0.02 * 30), rel=1e-6)


def test_one_step_on_neighbours_with_the_same_noise_differs_by_at_most_one_clipped_gradient() -> None:
    settings = {"steps": 1, "centring": 0.0, "max_grad_norm": 0.3, "learning_rate": 30.0} | PUBLIC
    settings["random_state"] = 5
    whole = made(PrivateHead, **settings).fit(TABLE, LABELS)
    for removed in range(0, 400, 20):
        kept = np.delete(np.arange(400), removed)
        other = made(PrivateHead, **settings).fit(TABLE[kept], LABELS[kept])
        assert np.linalg.norm(whole.coef_ - other.coef_) <= 30.0 / 400 * 0.3 * (1 + 1e-6)


def noise_energy(noise: np.ndarray, deviation: float) -> float:
    """Standardised chi-square of noise whose classes were made to sum to zero."""
    freedom = (noise.shape[0] - 1) * noise.shape[1]
    return float((np.square(noise / deviation).sum() - freedom) / math.sqrt(2 * freedom))


RNG = np.random.default_rng(2)
WIDE: Any = RNG.normal(size=(60, 4000)), RNG.integers(3, size=60)


@pytest.mark.parametrize("steps", [None, 1, 4])
def test_the_stated_noise_is_added_once_or_at_every_step(steps: int | None) -> None:
    settings = {"centring": 0.0, "classes": (0, 1, 2), "declared_size": 60}
    if steps is None:
        settings |= {"method": "output", "regularisation": 0.05}
    else:
        settings |= {"steps": steps, "max_grad_norm": 1e-3, "learning_rate": 1.0}
    clean = made(PrivateHead, mu=1e9, **settings).fit(*WIDE)
    noisy = made(PrivateHead, mu=0.5, random_state=0, **settings).fit(*WIDE)
    deviation = noisy.sensitivity_.value / 0.5
    if steps is not None:
        # the noise is small beside what would change the gradients, so steps add up independently
        deviation = 1.0 / 60 * 1e-3 * steps / 0.5
    # |z| < 6: a correct sampler fails with probability below 2e-9
    assert abs(noise_energy(noisy.coef_ - clean.coef_, deviation)) < 6


def test_accuracy_grows_with_epsilon() -> None:
    table, labels = make_blobs(400, centers=3, n_features=4, cluster_std=4.0, random_state=0)

    def accuracy(epsilon: float) -> float:
        heads = [
            PrivateHead(epsilon, random_state=seed, features=Identity(), settings=HeadSettings(radius=20.0))
            for seed in range(5)
        ]
        return float(np.mean([head.fit(table, labels).score(table, labels) for head in heads]))

    accuracies = [accuracy(epsilon) for epsilon in (0.01, 0.3, 10.0)]
    assert accuracies[0] < accuracies[1] - 0.05 < accuracies[2] - 0.1
    assert accuracies[2] > 0.8


def test_labels_may_be_words_and_a_declared_class_need_not_occur() -> None:
    words = np.array(["a", "b", "c"])[LABELS]
    head = PrivateHead(epsilon=10.0, classes=("a", "b", "c", "never"), random_state=0).fit(TABLE, words)
    assert head.coef_.shape[0] == 4
    assert set(head.predict(TABLE)) <= {"a", "b", "c", "never"}
    assert head.score(TABLE, words) > 0.8


def test_one_class_in_the_data_is_no_reason_to_refuse_if_classes_are_declared() -> None:
    head = PrivateHead(classes=(0, 1), declared_size=50).fit(TABLE[:50], np.zeros(50, int))
    assert head.guarantee_.status == "proven"


@pytest.mark.parametrize(
    "features",
    [
        Identity(),
        UnitNorm(),
        RandomFourier(count=40),
        Pipeline((UnitNorm(0.5), RandomFourier(count=40, bandwidth=0.5))),
        ModuleMap(torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh()), outputs=9),
    ],
    ids=lambda each: each.kind,
)
def test_a_head_learns_on_any_public_feature_map(features: Any) -> None:
    head = PrivateHead(epsilon=20.0, features=features, random_state=0, **PUBLIC).fit(TABLE, LABELS)
    assert head.score(TABLE, LABELS) > 0.8
    assert head.coef_.shape == (3, features.dimension(4) + 1)
    assert head.guarantee_.parameters["features"]["kind"] == features.kind


@pytest.mark.parametrize(
    ("alpha", "regularisation"), [(1e5, 1e-4), (1e4, 0.01), (1e4, 1e-4), (100.0, 1e-4), (1.0, 1e-6)]
)
def test_whether_a_head_is_refused_does_not_depend_on_the_labels(alpha: float, regularisation: float) -> None:
    generator = np.random.default_rng(0)
    records = generator.random((60, 20)).astype(np.float32)
    outcomes = set()
    for labels in (
        records[:, 0] > np.median(records[:, 0]),
        generator.integers(0, 2, 60),
        np.zeros(60, int),
    ):
        settings = {"loss": "convexified", "alpha": alpha, "regularisation": regularisation}
        head = made(PrivateHead, method="output", classes=(0, 1), declared_size=60, centring=0.0, **settings)
        try:
            fitted = head.fit(records, np.asarray(labels, int))
            outcomes.add((fitted.sensitivity_.value, fitted.plan_.tolerance))
        except InvalidInput as error:
            outcomes.add(str(error))
    assert len(outcomes) == 1


def test_features_that_are_not_finite_count_as_zero_instead_of_refusing() -> None:
    class Broken(torch.nn.Module):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return batch.log()

    features = ModuleMap(Broken(), outputs=4)
    head = PrivateHead(features=features, **PUBLIC).fit(TABLE - 0.5, LABELS)
    assert head.guarantee_.status == "conditional"
    assert head.guarantee_.because.endswith(conditions.OWN_MAP.because)


def test_answers_per_query_are_pure_and_stop_when_paid_out() -> None:
    head = PrivateHead(epsilon=8.0, method="output", release="query", queries=10, **PUBLIC).fit(TABLE, LABELS)
    claim = head.guarantee_
    assert (claim.definition, claim.status) == ("pure", "proven")
    assert claim.cost == PureCost(8.0)
    assert claim.parameters["queries"] == 10
    assert not hasattr(head, "coef_")
    assert not hasattr(head, "predict_proba")
    assert not hasattr(head, "decision_function")
    assert set(head.predict(TABLE[:10])) <= {0, 1, 2}
    head.predict(TABLE[:10])  # asked again: the stored answers, at no cost
    with pytest.raises(QuietmaxError):
        head.predict(TABLE[10:11])


CELLS = TableCells(TABLE.shape[1], tuple((each, each + 1) for each in range(TABLE.shape[1])))


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "objective"},
        {"release": "nothing"},
        {"loss": "hinge"},
        {"release": "query"},
        {"release": "query", "method": "output"},
        {"release": "query", "method": "output", "declared_size": 400, "mu": 1.0},
        {"loss": "convexified"},
        {"centring": 1.0},
        {"centring": -0.1},
        *({"radius": each} for each in (0.0, 1e-272, 1e-13, 1e13)),
        *({"second_moments": each} for each in (-0.1, 0.95, 1.0, math.nan)),
        *({"calibration": each} for each in (-0.1, 0.95, 1.0, math.nan)),
        {"calibration": 0.5, "second_moments": 0.5},
        *(
            {"features": CELLS, **each}
            for each in ({"method": "output"}, {"radius": 2.0}, {"second_moments": 0.1})
        ),
        {"features": CELLS, "release": "query", "declared_size": 400},
        {"declared_size": -5},
        {"steps": 0},
        {"steps": 0.5},
        {"learning_rate": -1.0},
        {"max_grad_norm": math.nan},
        {"regularisation": 0.0, "method": "output"},
        {"mu": 0.0},
        {"epsilon": -1.0},
        {"delta": 0.0},
        {"queries": 0},
        {"image_shape": (1, 28, 28)},
        {"classes": (0, 1, 2, 2)},
    ],
    ids=str,
)
def test_settings_without_meaning_are_refused_with_one_sentence(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as error:
        made(PrivateHead, **settings).fit(TABLE, LABELS)
    assert str(error.value).count("\n") == 0


def test_refitting_leaves_nothing_of_the_former_release_behind() -> None:
    head = PrivateHead(epsilon=5.0, method="output", random_state=0, **PUBLIC).fit(TABLE, LABELS)
    head.set_params(release="query").fit(TABLE, LABELS)
    assert not hasattr(head, "coef_")
    head.set_params(release="weights").fit(TABLE, LABELS)
    assert not hasattr(head, "predictor_")
    before = head.predict_proba(TABLE)
    np.testing.assert_array_equal(
        head.set_params(settings=HeadSettings(radius=9.0)).predict_proba(TABLE), before
    )


@pytest.mark.parametrize(
    ("name", "records", "options", "epsilon", "least"),
    [
        ("adult", 10_000, {"encoding": "one-hot"}, 1.0, 0.83),
        ("location", 1200, {}, 1.0, 0.13),
        ("location", 1200, {}, 10.0, 0.45),
    ],
)
def test_tables_reach_the_promised_accuracy_with_the_defaults(
    real_data: Path, name: str, records: Any, options: dict[str, Any], epsilon: float, least: float
) -> None:
    accuracies = []
    for seed in range(3):
        split = quietmax.data.load(name, records=records, seed=seed, data_dir=real_data, **options)
        head = PrivateHead(epsilon, 1e-5, classes=range(split.classes), random_state=seed)
        head.fit(split.train.features, split.train.labels)
        accuracies.append(head.score(split.test.features, split.test.labels))
    assert np.mean(accuracies) >= least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "least"),
    [({"epsilon": 1.0}, 0.965), ({"mu": 1.0}, 0.975), ({"epsilon": 1.0, "method": "output"}, 0.94)],
    ids=str,
)
def test_ten_thousand_digits_reach_the_promised_accuracy_with_the_defaults(
    real_data: Path, settings: dict[str, Any], least: float
) -> None:
    split = quietmax.data.load("mnist", records=10_000, seed=0, data_dir=real_data)
    head = made(PrivateHead, **settings, image_shape=(1, 28, 28), classes=range(10), declared_size=10_000)
    head.fit(split.train.features, split.train.labels)
    assert head.guarantee_.status == "proven"
    assert head.score(split.test.features, split.test.labels) >= least


# --- persons ----------------------------------------------------------------------------------------------------------


def repeated(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every record of the table one to six times, in random order, with the person of each row."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(np.repeat(np.arange(400), rng.integers(1, 7, 400)))
    return TABLE[order], LABELS[order], order


@pytest.mark.parametrize("method", ["gradient", "output"])
def test_a_person_with_equal_rows_counts_as_one_record(method: Any) -> None:
    """The same noise, and sums that differ only by the rounding of the shares."""
    settings: dict[str, Any] = {"mu": 1.0, "method": method, "classes": (0, 1, 2), "random_state": 3}
    alone = made(PrivateHead, **settings).fit(TABLE, LABELS)
    rows, labels, persons = repeated()
    together = made(PrivateHead, **settings).fit(rows, labels, groups=persons)
    assert together.size_ == alone.size_
    np.testing.assert_allclose(together.centre_, alone.centre_, atol=1e-5)
    assert np.abs(together.coef_ - alone.coef_).max() < 1e-3 * np.abs(alone.coef_).max()
    assert together.sensitivity_.value == pytest.approx(alone.sensitivity_.value)
    by_row = made(PrivateHead, **settings).fit(rows, labels)
    assert abs(by_row.size_ - together.size_) > 500


def test_the_minimisers_with_and_without_one_person_are_within_the_certified_sensitivity() -> None:
    rows, labels, persons = repeated(1)
    settings: dict[str, Any] = {"release": "query", "classes": (0, 1, 2), "declared_size": 30}
    few = persons < 30
    whole: Any = made(PrivateHead, **settings).fit(rows[few], labels[few], groups=persons[few])
    for person in range(0, 30, 3):
        kept = few & (persons != person)
        other: Any = made(PrivateHead, **settings).fit(rows[kept], labels[kept], groups=persons[kept])
        moved = whole.predictor_.model.weights - other.predictor_.model.weights
        assert 0.0 < np.linalg.norm(moved) <= whole.sensitivity_.value


# --- whitening --------------------------------------------------------------------------------------------------------


def uneven(records: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    """Columns of very different spread; the label depends on the ones of small spread."""
    rng = np.random.default_rng(7)
    rows = rng.normal(size=(records, 12)) * np.geomspace(1.0, 0.02, 12)
    return rows, (rows @ (1.0 / np.geomspace(1.0, 0.02, 12)) + rng.normal(size=records) > 0).astype(int)


def test_second_moments_help_where_columns_have_very_different_spread() -> None:
    rows, labels = uneven(40_000)
    settings: dict[str, Any] = {"declared_size": 20_000, "classes": (0, 1), "random_state": 0}
    train, others = (rows[:20_000], labels[:20_000]), (rows[20_000:], labels[20_000:])
    plain = made(PrivateHead, 1.0, 1e-5, second_moments=0.0, **settings).fit(*train)
    whitened = made(PrivateHead, 1.0, 1e-5, **settings).fit(*train)
    assert plain.whitening_ is None
    assert whitened.whitening_.shape == (14, 14)
    assert whitened.plan_.steps < plain.plan_.steps
    assert whitened.guarantee_.mu == pytest.approx(plain.guarantee_.mu, rel=1e-9)
    assert whitened.score(*others) > plain.score(*others) + 0.02


def test_a_whitened_head_predicts_from_each_row_alone() -> None:
    rows, labels = uneven(6000)
    public = {"classes": (0, 1), "declared_size": 6000}
    head = made(PrivateHead, mu=1.0, second_moments=0.1, **public).fit(rows, labels)
    alone = [head.decision_function(row[None])[0] for row in rows[:50]]
    np.testing.assert_allclose(alone, head.decision_function(rows[:50]), rtol=1e-12)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_records_too_large_for_float32_are_refused_before_any_noise_is_drawn(
    monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setattr(ExactNoise, "gaussian", lambda *_: pytest.fail("noise was drawn"))
    with pytest.raises(InvalidInput, match=r"infinity|too large"), np.errstate(over="ignore"):
        PrivateHead(classes=(0, 1, 2)).fit(np.where(TABLE > 0.99, 1e300, TABLE).astype(kind), LABELS)


def people(count: int = 3000) -> pd.DataFrame:
    """A table of people; the label depends on a step in age and on the region."""
    rng = np.random.default_rng(8)
    frame = pd.DataFrame(
        {"age": rng.integers(18, 90, count), "region": rng.choice(["north", "south"], count)}
    )
    late = (frame["age"] > 50) ^ (frame["region"] == "north")
    frame["late"] = np.where(late ^ (rng.random(count) < 0.05), "yes", "no")
    return frame


def test_dense_features_of_tables_are_scaled_by_the_released_centre_at_no_cost(tmp_path: Path) -> None:
    regions = {"region": ("north", "south")}
    schema = Schema(label="late", classes=("no", "yes"), bounds={"age": (0, 100)}, categories=regions)
    frame = people()
    dense = HeadSettings(second_moments=0.0)
    head = PrivateHead(2.0, 1e-5, schema=schema, declared_size=3000, settings=dense).fit(frame)
    claim = head.guarantee_
    assert claim.status == "proven"
    assert claim.mu == pytest.approx(mu_of(2.0, 1e-5), rel=1e-9)
    assert isinstance(head.feature_map_, TableFeatures)
    assert claim.parameters["whitening"] == "centre"
    assert claim.parameters["mu_moments"] is None
    expected = head.feature_map_.scale(head.centre_, 1.0 / (claim.parameters["mu_centring"] * 3000))
    assert head.whitening_ is not None
    np.testing.assert_allclose(head.whitening_[:-1] / head.whitening_[-1], expected, rtol=1e-6)
    assert list(head.predict(frame[:3])) == list(head.classes_[head.predict_proba(frame[:3]).argmax(1)])
    opened = open_private(save_private(head, tmp_path / "model", dataset="people"))
    np.testing.assert_array_equal(opened.predict_proba(opened.encode(frame)), head.predict_proba(frame))
    assert opened.guarantee == claim
    # without a centre there is nothing to scale by
    plain = made(PrivateHead, schema=schema, declared_size=3000, centring=0.0, second_moments=0.0).fit(frame)
    assert plain.whitening_ is None


@pytest.mark.parametrize("steps", [0, 0.5, -3, "10"])
def test_facts_with_impossible_steps_support_no_guarantee(steps: Any) -> None:
    head = PrivateHead(declared_size=40, classes=(0, 1), random_state=0).fit(
        np.eye(2)[np.arange(40) % 2], np.arange(40) % 2
    )
    earlier = {name: fact for name, fact in head.guarantee_.parameters.items() if name != "schedule"}
    assert weights_guarantee({**earlier, "steps": 10}, own_map=False).status == "conditional"
    with pytest.raises(InvalidInput, match="steps must be an integer of at least 1"):
        weights_guarantee({**earlier, "steps": steps}, own_map=False)
