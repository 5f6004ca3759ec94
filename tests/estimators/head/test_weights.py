"""Scores of fitted weights, and the bounds on them."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quietmax.accounting import Budget
from quietmax.estimators import open_private, save_private
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.head.exact_sums import _unit_rows, _whitened_rows, _whitening_on_grid, clipped_rows
from quietmax.estimators.head.weights import HeadWeights, PrivateHeadWeights
from quietmax.mechanisms import NoisyMax, SampledNeuron
from quietmax.models.features import UnitNorm
from quietmax.noise import SeededNoise
from quietmax.predictor import Predictor
from quietmax.sensitivity import Sensitivity
from tests.estimators.made import LABELS, PUBLIC, TABLE, made


def test_long_weights_are_scaled_to_the_public_length_instead_of_refused() -> None:
    """Before, weights this long beside a sensitivity this small were a reason to refuse."""
    head = HeadWeights(np.array([[3e6, 4e6], [0.0, 0.0]]), np.zeros(1), 0.2, 1.0)
    certain = Sensitivity(1e-6, "certified", "made up")
    kept = PrivateHeadWeights.certified(head, certain, max_norm=1e7)
    cut = PrivateHeadWeights.certified(head, certain, max_norm=1.0)
    np.testing.assert_array_equal(kept.weights, head.weights)
    np.testing.assert_allclose(cut.weights, [[0.6, 0.8], [0.0, 0.0]])
    # A computed score is off by up to 4 * 2^-53 * 5e6 here, twice that between neighbours.
    assert kept.bounds.vector.value - 1e-6 > 8 * 2.0**-53 * 5e6
    assert cut.bounds.vector.value < 1.001e-6


def test_scores_of_unreleased_weights_stay_within_their_bounds_for_neighbours() -> None:
    settings = {
        "epsilon": 1.0,
        "method": "output",
        "release": "query",
        "classes": (0, 1, 2),
        "declared_size": 25,
    }
    queries = UnitNorm(0.6).transform(np.random.default_rng(4).normal(size=(200, 4)) * 5)
    whole: Any = made(PrivateHead, **settings).fit(TABLE[:25], LABELS[:25]).predictor_.model
    for removed in range(25):
        kept = np.delete(np.arange(25), removed)
        other = made(PrivateHead, **settings).fit(TABLE[kept], LABELS[kept]).predictor_.model
        moved = whole.scores(queries) - other.scores(queries)
        assert np.abs(moved).max() <= whole.bounds.one.value
        assert np.linalg.norm(moved, axis=1).max() <= whole.bounds.vector.value


def test_unreleased_weights_answer_through_any_predictor() -> None:
    head = PrivateHead(epsilon=50.0, method="output", release="query", **PUBLIC).fit(TABLE, LABELS)
    budget = Budget(1e4, queries=400)
    answers = Predictor(head.predictor_.model, SampledNeuron(), budget, noise=SeededNoise(0))
    mapped = head.feature_map_.transform(TABLE)
    assert (answers.predict(mapped) == LABELS).mean() > 0.8
    assert answers.guarantee.status == "conditional"  # seeded noise only


def test_only_weights_of_a_fit_or_of_a_folder_have_proven_bounds(tmp_path) -> None:
    head = PrivateHead(epsilon=1.0, method="output", release="query", queries=2, **PUBLIC).fit(TABLE, LABELS)
    fitted: Any = head.predictor_.model
    opened: Any = open_private(save_private(head, tmp_path / "model", dataset="made up"))
    parts: list[Any] = [fitted.weights, fitted.centre, fitted.bias, fitted.radius]
    trust_me = Sensitivity(1e-9, "certified", "trust me")
    by_hand = PrivateHeadWeights.certified(HeadWeights(*parts), trust_me, max_norm=1e9)

    def status(model: Any) -> str:
        return Predictor(model, NoisyMax("permute-and-flip"), Budget(1.0, queries=1)).guarantee.status

    assert [head.guarantee_.status, opened.guarantee.status, status(fitted)] == ["proven"] * 3
    models = (
        by_hand,
        PrivateHeadWeights(*parts, by_hand.bounds),  # type: ignore[call-arg]
        replace(fitted, bounds=by_hand.bounds),
    )
    for model in models:
        assert status(model) == "conditional"
    with pytest.raises(TypeError, match="_fitted"):
        PrivateHeadWeights(*parts, by_hand.bounds, _fitted=True)  # type: ignore[call-arg]


def test_whitened_rows_have_the_same_bits_whether_torch_or_numpy_multiplies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(7)
    for features in (3, 40, 200):
        factors = rng.normal(size=(features + 1, features + 1))
        whitening = _whitening_on_grid(factors @ factors.T)
        records = rng.normal(size=(2000, features)).astype(np.float32)
        rows = _unit_rows(clipped_rows(records, 1.0), np.zeros(features), 0.2)
        by_torch = _whitened_rows(rows, whitening)
        with monkeypatch.context() as without:
            without.delitem(sys.modules, "torch")
            by_numpy = _whitened_rows(rows, whitening)
        np.testing.assert_array_equal(by_numpy, by_torch)
        assert np.abs(by_torch).max() > 0.01


def test_probabilities_sent_as_float32_are_those_of_a_softmax_by_torch() -> None:
    rng = np.random.default_rng(8)
    for classes in (2, 3, 10, 50):
        head = HeadWeights(rng.normal(size=(classes, 21)) * 8, np.zeros(20), 0.2, 1.0)
        features = rng.normal(size=(5000, 20)).astype(np.float32)
        probabilities = head.predict_proba(features)
        expected = torch.softmax(torch.from_numpy(head.scores(features)), -1).numpy()
        np.testing.assert_allclose(probabilities, expected, rtol=1e-14)
        np.testing.assert_array_equal(probabilities.astype(np.float32), expected.astype(np.float32))
        one_by_one = np.vstack([head.predict_proba(row[None]) for row in features[:500]])
        np.testing.assert_array_equal(probabilities[:500].argmax(1), one_by_one.argmax(1))
