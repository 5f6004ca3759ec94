"""Calibration: what the last steps release, what one record or person changes of it, and the scale that follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quietmax.accounting.dpsgd import Schedule, noise_multiplier
from quietmax.errors import DataUnavailable, InvalidInput
from quietmax.estimators import DPSGD, DPSGDSettings, open_private, save_private
from quietmax.estimators.blocks import LocalEngine
from quietmax.estimators.dpsgd import estimator, training
from quietmax.estimators.dpsgd.estimator import _network_scores, _released_scale
from quietmax.estimators.dpsgd.gradients import exact_logits
from quietmax.estimators.dpsgd.training import Plan, make_plan
from quietmax.estimators.head import weights
from quietmax.estimators.head.exact_sums import BITS
from quietmax.estimators.training_set import Persons
from quietmax.models.stacked import MLP, initial_mlp
from tests.estimators.head.test_calibration import WEAK, error_of, weak_table
from tests.estimators.made import made

COLUMNS = 5


def _plan(size: int, noise: float, **given: Any) -> Plan:
    chosen: dict[str, Any] = {"sampling_rate": 0.5, "steps": 100, "calibration_steps": 7}
    planned = make_plan(size, epsilon=1.0, delta=1e-5, **chosen | given)
    return replace(planned, noise_multiplier=noise)


def _linear(factor: float, columns: int = COLUMNS, classes: int = 2) -> MLP:
    """A linear network of known weights, times a factor."""
    network = initial_mlp((columns, classes), "tanh", (0,), torch.float64)
    return replace(network, kernels=(3.0 * factor * network.kernels[0],))


def _labelled(network: MLP, count: int) -> tuple[Any, Any]:
    """Rows, and labels that the network's probabilities were right about."""
    generator = np.random.default_rng(1)
    rows = generator.normal(size=(count, COLUMNS)).astype(np.float32)
    shares = torch.softmax(network.logits(rows), 1).numpy()
    return rows, (generator.random(count) < shares[:, 1]).astype(np.int64)


def _scale_of(network: MLP, rows: Any, labels: Any, plan: Plan, **given: Any) -> float:
    return _released_scale(partial(_network_scores, network), rows, labels, network.classes, plan, **given)


@contextmanager
def _releases(*modules: Any) -> Iterator[list[tuple[float, float, Any]]]:
    """Note the sensitivity, the mu and the exact values of everything that some modules release."""
    seen: list[tuple[float, float, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            original = module.release_gaussian

            def noted(
                values: Any, *, sensitivity: float, mu: float, _release: Any = original, **rest: Any
            ) -> Any:
                seen.append((sensitivity, mu, values))
                return _release(values, sensitivity=sensitivity, mu=mu, **rest)

            patch.setattr(module, "release_gaussian", noted)
        yield seen


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_network_that_is_sure_by_a_factor_gets_its_inverse_as_the_scale(
    factor: float, grouped: bool, seed: int | None
) -> None:
    rows, labels = _labelled(_linear(1.0), 20_000)
    persons = Persons.of(np.arange(20_000) // 2) if grouped else None
    plan = _plan(10_000 if grouped else 20_000, noise=5.0)
    scale = _scale_of(_linear(factor), rows, labels, plan, seed=seed, persons=persons)
    assert scale == pytest.approx(1.0 / factor, rel=0.15)


@pytest.mark.parametrize("owned", [1, 3, 40])
def test_a_record_or_person_moves_the_excess_by_its_own_at_most_one(owned: int) -> None:
    """Of the first rows, which belong to one person, every one is as wrong as can be."""
    network = _linear(50.0)
    rows, labels = _labelled(network, 700)
    labels[:owned] = 1 - network.logits(rows[:owned]).argmax(1).numpy()
    people = np.concatenate([np.zeros(owned, int), np.arange(1, 701 - owned)])
    plan = _plan(700, noise=1.0, sampling_rate=1.0)

    def excess(chosen: slice) -> float:
        persons = None if owned == 1 else Persons.of(people[chosen])
        with _releases(weights) as seen:
            _scale_of(network, rows[chosen], labels[chosen], plan, seed=1, persons=persons)
        return float(seen[0][2][0])

    moved = excess(slice(None)) - excess(slice(owned, None))
    assert moved == excess(slice(owned))
    assert 0.9 < moved <= 1.0
    assert (moved * 2**BITS).is_integer()


def test_every_calibration_step_is_one_release_on_a_batch_of_its_own() -> None:
    X, y = np.random.default_rng(0).random((700, 5), dtype=np.float32), np.arange(700) % 3
    chosen = DPSGDSettings(steps=40, calibration_steps=3)
    private = DPSGD(2.0, 1e-5, declared_size=700, classes=range(3), settings=chosen)
    with _releases(estimator, training, weights) as seen:
        private.fit(X, y)
    multiplier = noise_multiplier(2.0, 1e-5, Schedule(0.5, 40))
    norm = private.plan_.settings.max_grad_norm * (1 + 2.0**-20)
    sensitivities = [sensitivity for sensitivity, _, _ in seen]
    assert sensitivities == [1.0] * 2 + [norm] * 35 + [1.0] * 3
    assert {mu for _, mu, _ in seen} == {1 / multiplier}
    facts = private.guarantee_.parameters
    assert (facts["calibration_steps"], facts["noise_multiplier"]) == (3, multiplier)
    assert facts["scale"] == private.scale_
    assert "confidence minus correctness" in private.guarantee_.because
    batches = training._draw_batches(700, 700, private.plan_.settings, seed=1)
    assert set(next(batches)) != set(next(batches))


@pytest.mark.parametrize("hidden", [(), (6,)])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_logits_follow_from_each_row_alone(hidden: tuple[int, ...], activation: str) -> None:
    network = initial_mlp((COLUMNS, *hidden, 3), activation, (0,), torch.float64)
    rows = np.random.default_rng(0).normal(size=(600, COLUMNS)).astype(np.float32)
    found = exact_logits(network, rows)
    np.testing.assert_allclose(found.T, network.logits(rows).numpy(), atol=1e-4)
    order = np.random.default_rng(1).permutation(600)[:77]
    np.testing.assert_array_equal(exact_logits(network, rows[order]), found[:, order])
    np.testing.assert_array_equal(exact_logits(network, rows[:1]), found[:, :1])


def test_a_row_whose_logits_overflow_moves_the_excess_no_further() -> None:
    network = initial_mlp((COLUMNS, 4, 2), "relu", (0,), torch.float64)
    network = replace(network, kernels=tuple(1e300 * kernel for kernel in network.kernels))
    rows = np.full((3, COLUMNS), 3e38, np.float32)
    with _releases(weights) as seen:
        plan = _plan(3, noise=1.0, sampling_rate=1.0)
        _scale_of(network, rows, np.array([0, 1, 0]), plan, seed=1)
    assert all(abs(values[0]) <= 3.0 for _, _, values in seen)


def test_a_network_on_a_table_is_calibrated_where_the_scale_can_be_found_and_saved_with_it(
    tmp_path: Path,
) -> None:
    frame, others = weak_table(6000, 0), weak_table(6000, 1)
    errors = {}
    for steps in (0, None):
        chosen = DPSGDSettings(calibration_steps=steps)
        private = DPSGD(1.0, 1e-5, schema=WEAK, declared_size=6000, settings=chosen, random_state=2).fit(
            frame
        )
        errors[steps] = error_of(private, others)
        facts = private.guarantee_.parameters
        assert ("calibration_steps" in facts, "scale" in facts, hasattr(private, "scale_")) == (
            steps is None,
        ) * 3
    assert errors[None] < errors[0] / 2
    few = DPSGD(1.0, 1e-5, schema=WEAK, declared_size=300).fit(frame.iloc[:300])
    assert few.plan_.settings.calibration_steps == 0

    exact = DPSGD(1.0, 1e-5, schema=WEAK, declared_size=6000).fit(frame)
    assert (exact.guarantee_.status, exact.plan_.settings.calibration_steps) == ("proven", 5)
    opened = open_private(save_private(exact, tmp_path / "model", dataset="weak"))
    assert opened.guarantee == exact.guarantee_
    probabilities = opened.predict_proba(opened.encode(others))
    np.testing.assert_allclose(probabilities, exact.predict_proba(others), atol=1e-6)


@pytest.mark.parametrize("damage", ["no scale", "no steps"])
def test_a_folder_whose_scale_contradicts_its_steps_cannot_be_opened(tmp_path: Path, damage: str) -> None:
    from quietmax.models.serialization import read_folder, write_folder

    X, y = np.random.default_rng(0).random((60, 5), dtype=np.float32), np.arange(60) % 3
    chosen = DPSGDSettings(steps=9, centring_steps=0, calibration_steps=2)
    private = DPSGD(2.0, 1e-5, declared_size=60, classes=range(3), settings=chosen).fit(X, y)
    open_private(save_private(private, tmp_path / "model", dataset="numbers"))
    description, tensors = read_folder(tmp_path / "model", "dpsgd")
    del description["guarantee"]["parameters"]["scale" if damage == "no scale" else "calibration_steps"]
    write_folder(tmp_path / "damaged", description, tensors, overwrite=False, released=True)
    with pytest.raises(DataUnavailable, match="damaged"):
        open_private(tmp_path / "damaged")


def test_the_scale_is_the_same_wherever_the_rows_are(tmp_path: Path) -> None:
    frame = weak_table(2000, 0)
    chosen = DPSGDSettings(steps=20, calibration_steps=5)

    def scale(engine: Any) -> float:
        private = DPSGD(3.0, 1e-5, schema=WEAK, settings=chosen, random_state=2, engine=engine)
        return float(private.fit(frame).scale_)

    assert scale(LocalEngine(max_memory=0, cache_dir=tmp_path)) == scale("local")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"analysis": "published", "accountant": "zcdp", "calibration_steps": 1},
            "requires preset='default'",
        ),
        ({"preset": "paper", "calibration_steps": 1}, "requires preset='default'"),
        ({"network": object(), "calibration_steps": 1}, "the built-in network"),
        ({"steps": 5, "centring_steps": 2, "calibration_steps": 3}, "from 0 to 2 with 5 steps, 2 of them"),
        ({"steps": 4, "calibration_steps": -1}, "calibration_steps must be an integer"),
        ({"steps": 4, "calibration_steps": 1.5}, "calibration_steps must be an integer"),
    ],
)
def test_calibration_that_makes_no_sense_is_refused(changes: dict[str, Any], match: str) -> None:
    private = made(DPSGD, 1.0, 1e-5, declared_size=60, classes=range(3), **changes)
    with pytest.raises(InvalidInput, match=match):
        private.fit(np.random.default_rng(0).random((60, 5), dtype=np.float32), np.arange(60) % 3)
