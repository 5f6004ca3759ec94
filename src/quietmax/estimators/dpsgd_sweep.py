"""Many DP-SGD networks at once, for comparisons: every epsilon under every accountant on every split.

Networks on one split share initial weights, batches and standard noise, each scaled by its own noise multiplier, so
that curves over epsilon compare like with like. For experiments only: the noise is seeded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting.dpsgd import Accountant, NoiseReading
from quietmax.data import Split
from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd_plan import Configuration, Plan, plan
from quietmax.models import MLP
from quietmax.models.ensemble import Progress
from quietmax.models.private_stack import train_private_stack


@dataclass(frozen=True, eq=False)
class Sweep:
    """Trained networks, ordered by split, then accountant, then epsilon; ``plans`` are those of one split."""

    splits: tuple[Split, ...]
    accountants: tuple[Accountant, ...]
    epsilons: tuple[float, ...]
    plans: tuple[Plan, ...]
    networks: MLP

    def network(self, split: int, accountant: Accountant, epsilon: float) -> MLP:
        """One of the networks."""
        place = self.accountants.index(accountant) * len(self.epsilons) + self.epsilons.index(epsilon)
        return self.networks.network(split * len(self.plans) + place)

    def accuracies(self) -> NDArray[np.float64]:
        """Test accuracies of shape (splits, accountants, epsilons)."""
        found = np.empty((len(self.splits), len(self.plans)))
        for split, data in enumerate(self.splits):
            for place in range(len(self.plans)):
                network = self.networks.network(split * len(self.plans) + place)
                answers = network.logits(data.test.features).argmax(-1).numpy()
                found[split, place] = (answers == data.test.labels).mean()
        return found.reshape(len(self.splits), len(self.accountants), len(self.epsilons))


def train_sweep(
    data: Sequence[Split],
    *,
    epsilons: Sequence[float],
    accountants: Sequence[Accountant],
    reading: NoiseReading = "published",
    configuration: Configuration = "paper",
    alpha: float | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Train one network per split, accountant and epsilon, all at once; the splits must divide the same records.

    A split's own seed fixes initial weights, batches and noise. ``alpha`` convexifies each record's loss by itself.
    """
    if not data or any(each.records is not data[0].records for each in data):
        raise InvalidInput(
            "The splits must divide one and the same records; load them once, then split repeatedly."
        )
    sizes = {len(each.train_rows) for each in data}
    if len(sizes) != 1:
        raise InvalidInput(
            f"The training parts have {sorted(sizes)} records, but a sweep needs equal ones; split alike."
        )
    records, size = data[0].records, sizes.pop()
    plans = [
        plan(size, epsilon=epsilon, accountant=accountant, reading=reading, configuration=configuration)
        for accountant in accountants
        for epsilon in epsilons
    ]
    settings = plans[0].settings
    if any(each.settings != settings for each in plans):
        raise InvalidInput(
            "A sweep needs one learning rate for all networks; take the configuration 'paper', or train one by one."
        )
    networks = train_private_stack(
        records.features,
        records.labels,
        records.classes,
        [each.train_rows for each in data for _ in plans],
        settings=settings,
        noise_multipliers=[each.noise_multiplier for each in plans] * len(data),
        seeds=[each.seed for each in data for _ in plans],
        alpha=alpha,
        progress=progress,
    )
    return Sweep(tuple(data), tuple(accountants), tuple(epsilons), tuple(plans), networks)
