"""Algorithm 1's accuracy loss over the paper's values of epsilon, one query each, on the real data sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quietmax.accounting import GaussianCost, PureCost
from quietmax.data import dataset, split
from quietmax.experiments import reference
from quietmax.experiments.accuracy_table import paper_records
from quietmax.experiments.comparison import Comparison
from quietmax.mechanisms import Algorithm1
from quietmax.mechanisms.algorithm1 import Noise
from quietmax.models import Convexified, TrainingSettings, accuracy_loss, train_many
from quietmax.noise import SeededNoise

EPSILONS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 50.0, 100.0, 500.0, 1000.0)
TOLERANCE = 0.04
SERIES: dict[Noise, str] = {"gaussian": "alg1_gauss", "laplace": "alg1_lap"}


@dataclass(frozen=True)
class LossCurve:
    """Accuracy loss of every repeat at every epsilon, shape (repeats, epsilons)."""

    dataset: str
    noise: Noise
    epsilons: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]

    def comparisons(self) -> list[Comparison]:
        """The mean curve beside the paper's."""
        paper = reference.curve(self.dataset, "acc_loss", SERIES[self.noise])
        values = np.array(self.losses)
        rows = []
        for index, epsilon in enumerate(self.epsilons):
            if epsilon in paper:
                ours = float(values[:, index].mean())
                spread = float(values[:, index].std(ddof=1)) if len(values) > 1 else None
                agrees = abs(ours - paper[epsilon]) <= TOLERANCE
                what = f"accuracy loss, {self.noise}, eps {epsilon:g}"
                rows.append(Comparison(self.dataset, what, paper[epsilon], ours, agrees, spread=spread))
        return rows


def measure_accuracy_loss(
    name: str,
    *,
    repeats: int = 10,
    epsilons: Sequence[float] = EPSILONS,
    data_dir: str | Path | None = None,
    download: bool = False,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[LossCurve]:
    """Train ``repeats`` convexified networks once; answer every test record once per epsilon and noise."""
    registered = dataset(name)
    records = paper_records(name, data_dir=data_dir, download=download)
    splits = [split(records, size=registered.records, seed=seed + repeat) for repeat in range(repeats)]
    settings = TrainingSettings(loss=Convexified(registered.alpha))
    models = train_many(splits, settings=settings, progress=progress)
    curves = []
    for noise in SERIES:
        source = SeededNoise(seed)
        losses = []
        for model, each in zip(models, splits, strict=True):
            logits = model.logits(each.test.features)
            baseline = float((logits.argmax(-1) == each.test.labels).mean())
            row = []
            for epsilon in epsilons:
                cost = PureCost(epsilon) if noise == "laplace" else GaussianCost(epsilon)
                labels = Algorithm1(noise).prepared(model, cost).release(logits, source).labels
                row.append(accuracy_loss(float((labels == each.test.labels).mean()), baseline))
            losses.append(tuple(row))
        curves.append(LossCurve(name, noise, tuple(epsilons), tuple(losses)))
    return curves
