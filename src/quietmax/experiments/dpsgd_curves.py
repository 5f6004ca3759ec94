"""Published DP-SGD's accuracy loss over the paper's values of epsilon, four accountants, on the real data sets.

What is not known of the paper's runs, and what is done here: their loss (the text says convexified, which has no
per-example gradient; ``loss`` chooses each record convexified by itself, which comes closer on Adult and MNIST and as
close on Location, or cross-entropy); whether the L2 penalty was clipped with the gradients (here it is added after the
noise); and the noise multipliers under RDP (searched here for the batch and number of records actually used; the
program that the paper used lists one table for batches of 200 of 10,000).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from quietmax.accounting.dpsgd import PUBLISHED_ACCOUNTANTS, Accountant
from quietmax.data.records import split
from quietmax.data.registry import dataset
from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd.training import train_sweep
from quietmax.experiments import paper as reference
from quietmax.experiments.paper import EPSILONS, Comparison, paper_records
from quietmax.models.losses import Convexified
from quietmax.models.stacked import TrainingSettings
from quietmax.models.training import accuracy, accuracy_loss, train_many

Loss = Literal["cross-entropy", "convexified"]
TOLERANCE = 0.05


@dataclass(frozen=True)
class PublishedCurve:
    """Accuracy loss of every repeat at every epsilon, shape (repeats, epsilons), under one accountant."""

    dataset: str
    accountant: Accountant
    epsilons: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]

    @property
    def means(self) -> tuple[float, ...]:
        """The mean over the repeats at every epsilon."""
        return tuple(float(each) for each in np.array(self.losses).mean(0))

    def comparisons(self) -> list[Comparison]:
        """The mean curve beside the paper's; empty where the paper has none."""
        paper = reference.curve(self.dataset, "acc_loss", self.accountant)
        values = np.array(self.losses)
        rows = []
        for index, (epsilon, ours) in enumerate(zip(self.epsilons, self.means, strict=True)):
            if epsilon in paper:
                spread = float(values[:, index].std(ddof=1)) if len(values) > 1 else None
                agrees = abs(ours - paper[epsilon]) <= TOLERANCE
                what = f"accuracy loss, dp-sgd {self.accountant}, eps {epsilon:g}"
                rows.append(Comparison(self.dataset, what, paper[epsilon], ours, agrees, spread=spread))
        return rows

    def to_json(self) -> dict[str, Any]:
        """All fields and the means."""
        return {
            "dataset": self.dataset,
            "accountant": self.accountant,
            "epsilons": list(self.epsilons),
            "losses": [list(each) for each in self.losses],
            "means": list(self.means),
        }


def published_dpsgd_losses(
    name: str,
    *,
    repeats: int = 10,
    epsilons: Sequence[float] = EPSILONS,
    accountants: Sequence[Accountant] = PUBLISHED_ACCOUNTANTS,
    loss: Loss = "convexified",
    records: int | None = None,
    data_dir: str | Path | None = None,
    download: bool = False,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[PublishedCurve]:
    """Train DP-SGD as published at every epsilon under every accountant, and return one curve per accountant.

    The networks of one split (44 by default) are trained at once; splits follow one another. A loss is
    `1 - accuracy/baseline`, the baseline being the convexified network without privacy on the same split, both on the
    test part. ``records`` per part are by default the data set's own; ``progress(step, steps)`` counts all steps.
    """
    if repeats < 1:
        raise InvalidInput(f"repeats is {repeats}, but at least 1 is needed; give 10, as the paper does.")
    if loss not in ("cross-entropy", "convexified"):
        raise InvalidInput(f"The loss is {loss!r}, but must be cross-entropy or convexified; name one.")
    registered = dataset(name)
    everything = paper_records(name, data_dir=data_dir, download=download)
    size = records or registered.records
    splits = [split(everything, size=size, seed=seed + repeat) for repeat in range(repeats)]
    found = np.empty((len(accountants), repeats, len(epsilons)))
    for repeat, each in enumerate(splits):
        settings = TrainingSettings(loss=Convexified(registered.alpha))
        (plain,) = train_many([each], settings=settings)
        baseline = accuracy(plain, each.test)

        def report(step: int, steps: int, before: int = repeat) -> None:
            if progress is not None:
                progress(before * steps + step, repeats * steps)

        sweep = train_sweep(
            [each],
            epsilons=epsilons,
            accountants=accountants,
            alpha=registered.alpha if loss == "convexified" else None,
            progress=report,
        )
        for line, accuracies in enumerate(sweep.accuracies()[0]):
            found[line, repeat] = [accuracy_loss(float(reached), baseline) for reached in accuracies]
    return [
        PublishedCurve(
            name, accountant, tuple(epsilons), tuple(tuple(map(float, row)) for row in found[line])
        )
        for line, accountant in enumerate(accountants)
    ]
