"""A step is divided by the public number `q*N`, on every path, however many records a batch or a table has.

Opacus 1.0 to 1.6 divides by `int(len(dataset) / len(data_loader))`, the number of private records (issues 571 and 819
of Opacus). One record more or less can change that divisor and thereby all weights, which no noise for one clipped
gradient hides.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import quietmax
from quietmax import DPSGD, Schema
from quietmax.estimators.blocks import Blocks, LocalEngine, Table
from quietmax.estimators.dpsgd import estimator, training
from quietmax.estimators.dpsgd.training import PrivateSettings, StoredRows, make_plan
from quietmax.estimators.head.exact_sums import clipped_rows
from quietmax.estimators.training_set import Persons
from tests.estimators.dpsgd.networks import PATHS, as_module, moved, naive_sums, start, vector
from tests.estimators.made import made

pytest.importorskip("opacus")

DECLARED, RATE, CLIP = 20, 0.5, 0.5
NOISE = 1e-6
STEP = PrivateSettings(sampling_rate=RATE, steps=1, max_grad_norm=CLIP, learning_rate=1.0)


def _records(count: int) -> tuple[Any, Any]:
    generator = np.random.default_rng(count)
    features = generator.normal(size=(count, 5)).astype(np.float32)
    return features, generator.integers(0, 3, count)


def _module(*_: Any) -> torch.nn.Module:
    return as_module(start(5, STEP))


def _clipped_sum(features: Any, labels: Any, batch: Any, persons: Persons | None) -> Any:
    """The clipped gradients of a linear model at the initial weights, summed record by record."""
    weights = None if persons is None else 1 / persons.rows[batch]
    inputs, targets = torch.from_numpy(features[batch]), torch.from_numpy(labels[batch])
    sums = naive_sums(_module(), inputs, targets, CLIP, weights)
    return torch.cat([each.flatten() for each in sums]).double().numpy()


@pytest.fixture
def given_batch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make every sampler yield one given batch."""

    def give(batch: Any) -> None:
        def batches(*_: Any, **__: Any) -> Iterator[Any]:
            while True:
                yield batch

        monkeypatch.setattr(training, "_batches", batches)

    return give


@pytest.mark.parametrize("stored", [False, True], ids=["in memory", "out of core"])
@pytest.mark.parametrize("by_person", [False, True], ids=["records", "persons"])
@pytest.mark.parametrize("path", PATHS)
def test_a_step_is_divided_by_the_public_expected_number_whatever_the_batch_and_the_table(
    path: str, by_person: bool, stored: bool, given_batch: Any, tmp_path: Path
) -> None:
    """Tables of 13 and of 40 records, 20 declared; batches of 0, 1, 7 and all records, 10 expected."""
    for count in (13, 40):
        features, labels = _records(count)
        persons = Persons.of(np.arange(count) // 3) if by_person else None
        for batch in (np.arange(0), np.arange(3, 4), np.arange(6, 13), np.arange(count)):
            given_batch(batch)
            wanted = -_clipped_sum(features, labels, batch, persons) / (RATE * DECLARED)
            rows: Any = nullcontext(features)
            if stored:
                blocks = Blocks(3, LocalEngine(max_memory=0, cache_dir=tmp_path))
                blocks.extend([Table(features, labels, 3)])
                rows = StoredRows(blocks, by_person=False)
            with rows as read:
                found = moved(path, read, labels, STEP, noise=NOISE, size=DECLARED, persons=persons)
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("count", [13, 40])
def test_a_centring_step_is_divided_by_the_public_expected_number(
    count: int, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, _ = _records(count)
    plan = make_plan(
        DECLARED, epsilon=1.0, delta=1e-5, inputs="centred", sampling_rate=RATE, centring_steps=2
    )
    plan = replace(plan, noise_multiplier=NOISE)
    for batch in (np.arange(0), np.arange(1), np.arange(6, 13)):
        monkeypatch.setattr(estimator, "_draw_batches", lambda *_, batch=batch, **__: iter([batch] * 2))
        centre = estimator._released_centre(features, plan, radius=4.0, seed=seed)
        wanted = clipped_rows(features[batch], 4.0).sum(0) / (RATE * DECLARED)
        np.testing.assert_allclose(centre, wanted, atol=1e-5)


COLUMNS = [f"x{number}" for number in range(5)]
SCHEMA = Schema(label="y", classes=(0, 1, 2), bounds=dict.fromkeys(COLUMNS, (-4, 4)))
WAYS: dict[str, dict[str, Any]] = {
    "arrays": {},
    "arrays, seeded": {"random_state": 1},
    "persons": {"by_person": True},
    "frame": {"schema": SCHEMA},
    "files": {"schema": SCHEMA, "files": True},
    "files, seeded": {"schema": SCHEMA, "files": True, "random_state": 1},
    "module": {"network": _module},
    "module, seeded": {"network": _module, "random_state": 1},
    "two layers": {"hidden": (4,)},
    "shuffled": {"analysis": "published", "accountant": "rdp"},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_n_copies_of_all_records_move_the_released_weights_n_times_as_far(
    way: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no number of private records is a divisor between the rows and the released weights."""
    options = {
        "features": "identity",
        "centring_steps": 0,
        "sampling_rate": 1.0,
        "steps": 1,
        "optimizer": "sgd",
    }
    options |= {"max_grad_norm": CLIP, "learning_rate": 4.0, "declared_size": 60, **way}
    by_person, files = options.pop("by_person", False), options.pop("files", False)
    features, labels = _records(20)

    def released(copies: int) -> Any:
        X, y = np.tile(features, (copies, 1)), np.tile(labels, copies)
        # The same initial weights each time; the noise is far too small to see.
        monkeypatch.setattr("os.urandom", np.random.default_rng(5).bytes)
        private = made(DPSGD, 1e6, 1e-5, length=1.0, **({"classes": (0, 1, 2)} | options))
        if "schema" in options:
            private.set_params(classes=None)
            frame = pd.DataFrame(X, columns=COLUMNS).assign(y=y)
            source: Any = frame
            if files:
                source = tmp_path / str(copies)
                source.mkdir()
                frame.to_parquet(source / "rows.parquet")
                private.set_params(engine=LocalEngine(max_memory=0, cache_dir=tmp_path))
            private.fit(source)
        else:
            private.fit(X, y, groups=np.arange(len(y)) // 4 if by_person else None)
        network = private.model_.network
        return vector(network.module if private.network is not None else as_module(network)).numpy()

    once, twice, thrice = released(1), released(2), released(3)
    assert np.abs(twice - once).max() > 0.01
    np.testing.assert_allclose(thrice - twice, twice - once, rtol=1e-3, atol=1e-3)


def test_of_opacus_we_use_gradients_and_the_validator_alone() -> None:
    """No engine, optimizer, data loader or accountant: those divide by the number of private records."""
    used = set()
    for path in Path(quietmax.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "opacus":
                used |= {f"{node.module}.{each.name}" for each in node.names}
            elif isinstance(node, ast.Import):
                used |= {each.name for each in node.names if each.name.split(".")[0] == "opacus"}
    assert used == {
        "opacus.grad_sample.GradSampleModuleFastGradientClipping",
        "opacus.validators.ModuleValidator",
        "opacus.validators.errors.UnsupportedModuleError",
    }
