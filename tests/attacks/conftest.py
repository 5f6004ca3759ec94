from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from quietmax.attacks import Attack, AttackReport, ShadowPool
from quietmax.attacks.shadow_models import Design
from quietmax.data import Records, Split, split
from quietmax.models import CrossEntropy, Model, TrainingSettings, train
from quietmax.models.stacked import Progress


@dataclass(frozen=True)
class World:
    """Records that a network has memorised, and shadow networks of both designs."""

    data: Split
    model: Model
    untrained: Model
    """A network of the same kind that was trained on no record: nothing to leak."""
    disjoint: ShadowPool
    overlapping: ShadowPool

    def pool(self, design: Design) -> ShadowPool:
        return self.disjoint if design == "disjoint" else self.overlapping

    def run(
        self,
        attack: Attack,
        target: Any = None,
        design: Design | None = None,
        progress: Progress | None = None,
    ) -> AttackReport:
        """Run an attack with the shadow networks of a design, or of the one that it prefers."""
        pool = self.pool(design or attack._designs_for(self.data)[0])
        return attack.run(self.model, self.data, target=target, pool=pool, progress=progress)


@pytest.fixture(scope="session")
def world() -> World:
    """Records with random labels: a network can only memorise them."""
    generator = np.random.default_rng(7)
    features = generator.choice([-1.0, 1.0], size=(420, 40)).astype(np.float32)
    labels = generator.integers(0, 3, 420)
    data = split(Records("random-labels", features, labels, classes=3), size=100, seed=1)
    settings = TrainingSettings(
        hidden=(24,), loss=CrossEntropy(), learning_rate=0.01, epochs=40, batch_size=50
    )
    return World(
        data,
        train(data, settings=settings),
        train(data, settings=TrainingSettings(hidden=(24,), loss=CrossEntropy(), epochs=0)),
        ShadowPool.train("disjoint", data, settings, 8, seed=3),
        ShadowPool.train("overlapping", data, settings, 12, seed=3),
    )
