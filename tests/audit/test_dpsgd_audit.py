"""Audit of DP-SGD by repeated training: the claim survives, with half the noise it falls."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from quietmax import audit
from quietmax.audit.training import label_score, one_run, private_network_draws
from quietmax.data import Records
from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd import DPSGD
from quietmax.estimators.dpsgd_claim import claim
from quietmax.estimators.dpsgd_plan import plan

SURE = 1 - 1e-6
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
    return audit.distinguish(without, inside, claimed, samples=samples, confidence=SURE)


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
    report = one_run(_fit(), label_score, records, canaries, confidence=SURE)
    assert report.verdict == "consistent"
    assert report.samples == 40


def test_only_one_canary_makes_neighbours():
    records, _ = _records()
    planned = _plan()
    with pytest.raises(InvalidInput, match="exactly one record"):
        private_network_draws(records, records, settings=planned.settings, noise_multiplier=1.0, size=SIZE)
