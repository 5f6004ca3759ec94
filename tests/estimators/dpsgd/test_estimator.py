"""The estimator: what it claims follows from what it ran, it learns, and it keeps to scikit-learn's rules."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietmax.accounting.dpsgd import Schedule, noise_multiplier
from quietmax.data import load, load_records, split
from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd.estimator import DPSGD, NUMERICAL, PLACES, POISSON
from quietmax.models.features import Scattering
from tests.estimators.made import made


def _blobs(count=1000, seed=0):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 3, count)
    centres = np.random.default_rng(99).random(size=(3, 6))
    points = centres[labels] + 0.15 * generator.normal(size=(count, 6))
    return np.clip(points, 0, 1).astype(np.float32), labels


def _private(**changes):
    return made(DPSGD, **({"epsilon": 2.0, "declared_size": 1000, "classes": range(3)} | changes))


def test_a_private_network_learns_and_its_guarantee_is_proven() -> None:
    features, labels = _blobs()
    others, truth = _blobs(seed=1)
    fitted = _private(sampling_rate=0.5).fit(features, labels)
    assert fitted.score(others, truth) > 0.85
    claimed = fitted.guarantee_
    assert (claimed.definition, claimed.status) == ("approximate", "proven")
    assert (claimed.epsilon, claimed.delta) == (2.0, 1 / 10_000)
    assert claimed.parameters["noise_multiplier"] == noise_multiplier(2.0, 1e-4, Schedule(0.5, 100))
    np.testing.assert_allclose(fitted.predict_proba(others).sum(1), 1.0)


def test_with_groups_the_guarantee_is_for_persons() -> None:
    features, labels = _blobs()
    people = np.arange(1000) // 3
    others, truth = _blobs(seed=1)
    fitted = _private(sampling_rate=0.5, declared_size=334).fit(features, labels, groups=people)
    claimed = fitted.guarantee_
    assert (claimed.status, claimed.unit) == ("proven", "person")
    assert "persons' mean clipped features and gradients" in claimed.because
    assert claimed.delta == 1 / 3340
    assert fitted.score(others, truth) > 0.7
    unsized = _private(declared_size=None, steps=2).fit(features, labels, groups=people)
    assert unsized.plan_.size == 334
    assert any("number of persons is public" in each for each in unsized.guarantee_.assumptions)
    full = _private(sampling_rate=1.0, steps=2).fit(features, labels, groups=people).guarantee_
    assert (full.definition, full.unit) == ("gaussian", "person")


def test_full_batches_are_claimed_in_the_gaussian_measure() -> None:
    features, labels = _blobs()
    claimed = _private(delta=1e-5, sampling_rate=1.0).fit(features, labels).guarantee_
    assert claimed.definition == "gaussian"
    assert claimed.parameters["sampling_rate"] == 1.0
    assert claimed.mu == pytest.approx(math.sqrt(100) / claimed.parameters["noise_multiplier"])
    assert claimed.at_delta(1e-5) == pytest.approx(2.0, rel=1e-6)
    assert claimed.at_delta(1e-5) <= 2.0


@pytest.mark.parametrize("accountant", ["rdp", "zcdp", "ac", "nc"])
def test_the_published_analysis_is_conditional_shuffles_and_names_its_assumption(accountant: str) -> None:
    features, labels = _blobs(300)
    fitted = _private(
        preset="paper",
        analysis="published",
        accountant=accountant,
        declared_size=300,
        hidden=(4,),
        epsilon=50.0,
    ).fit(features, labels)
    claimed, settings = fitted.guarantee_, fitted.plan_.settings
    assert (claimed.status, claimed.definition) == ("conditional", "approximate")
    assert (POISSON if accountant == "rdp" else PLACES.format(unit="record")) in claimed.assumptions
    assert (settings.sampling, settings.optimizer, settings.learning_rate) == ("shuffled", "adam", 0.001)
    assert (settings.steps, settings.max_grad_norm, settings.l2) == (300, 1.0, 0.001)
    assert fitted.plan_.schedule.epochs == 100


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"delta": 2.0}, "delta"),
        ({"accountant": "moments"}, "accountant"),
        ({"accountant": "pld", "analysis": "published"}, "with analysis=.published."),
        ({"analysis": "guessed"}, "analysis"),
        ({"preset": "mine"}, "preset must be one of default, paper"),
        ({"length": -1.0}, "length"),
        ({"optimizer": "newton"}, "optimizer"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(changes: dict[str, Any], match: str) -> None:
    features, labels = _blobs(60)
    with pytest.raises(InvalidInput, match=match):
        _private(**changes).fit(features, labels)


@pytest.mark.parametrize(("accountant", "listed"), [("pld", True), ("rdp", True), ("zcdp", False)])
def test_what_a_numerical_accountant_needs_of_its_library_is_listed_as_an_assumption(
    accountant: str, listed: bool
) -> None:
    settings = {
        "declared_size": 1000,
        "classes": (0, 1),
        "sampling_rate": 0.1,
        "steps": 3,
        "accountant": accountant,
    }
    X, y = np.array([[0.0, 1.0], [1.0, 0.0]] * 500), np.array([0, 1] * 500)
    guarantee = made(DPSGD, 1.0, 1e-5, **settings).fit(X, y).guarantee_
    assert guarantee.status == "proven"
    assert guarantee.assumptions[1:] == ((NUMERICAL[accountant],) if listed else ())


def _accuracy(data, **options):
    size = len(data.train.labels)
    private = made(
        DPSGD, 1.0, 1e-5, declared_size=size, classes=range(data.classes), random_state=0, **options
    )
    private.fit(data.train.features, data.train.labels)
    assert (private.plan_.accountant, private.plan_.analysis) == ("pld", "proven")
    return private.score(data.test.features, data.test.labels)


def test_the_embedded_digits_are_learnt_from_their_pixels() -> None:
    assert _accuracy(load("mnist-5k", records=2500)) > 0.7


def test_adult_reaches_0_83(real_data: Path) -> None:
    records = load_records("adult", data_dir=real_data, encoding="one-hot")
    assert _accuracy(split(records, size=10_000, seed=0)) >= 0.83


def test_mnist_reaches_0_86_on_pixels(real_data: Path) -> None:
    assert _accuracy(split(load_records("mnist", data_dir=real_data), size=10_000, seed=0)) >= 0.86


@pytest.mark.slow
def test_mnist_reaches_0_93_on_scattering(real_data: Path) -> None:
    records = load_records("mnist", data_dir=real_data)
    assert _accuracy(split(records, size=10_000, seed=0), features=Scattering(records.image_shape)) >= 0.93
