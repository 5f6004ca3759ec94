"""Search for the convexification constant alpha, on a validation part of the training set.

The paper searches (0, 10] in steps of 0.5 for an alpha whose training and test accuracy come closest to those
of the original loss. We do the same with a validation part held out from the training records: choosing on the
test set would report an accuracy that was chosen, not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quietmax.data import Split
from quietmax.errors import InvalidInput
from quietmax.models.ensemble import Progress, train_stack
from quietmax.models.losses import Convexified
from quietmax.models.settings import TrainingSettings

PAPER_GRID = tuple(0.5 * step for step in range(1, 21))


@dataclass(frozen=True)
class AlphaTrial:
    """Accuracy with one alpha; ``distance`` is the summed difference to the original loss's accuracies."""

    alpha: float
    train_accuracy: float
    validation_accuracy: float
    distance: float


@dataclass(frozen=True)
class AlphaSearch:
    """All trials, the original loss's accuracies, and the alpha that came closest to them."""

    alpha: float
    original_train_accuracy: float
    original_validation_accuracy: float
    trials: tuple[AlphaTrial, ...]


def search_alpha(
    data: Split,
    *,
    grid: Sequence[float] = PAPER_GRID,
    validation_share: float = 0.2,
    settings: TrainingSettings | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> AlphaSearch:
    """Train one network per alpha, all at once, and pick the one closest to the original loss.

    The choice looks at private records: a model trained with it afterwards carries no proven guarantee unless the
    choice is charged for.
    """
    chosen = settings or TrainingSettings()
    if not isinstance(chosen.loss, Convexified):
        raise InvalidInput("A search for alpha needs the convexified loss; set settings.loss=Convexified().")
    if not grid or min(grid) <= 0:
        raise InvalidInput(
            f"The grid {tuple(grid)} must hold positive values of alpha; try the paper's, 0.5 to 10."
        )
    if not 0 < validation_share < 1:
        raise InvalidInput(
            f"The validation share is {validation_share}, but must lie between 0 and 1; try 0.2."
        )
    held = int(len(data.train_rows) * validation_share)
    if not 0 < held < len(data.train_rows):
        raise InvalidInput(
            f"{len(data.train_rows)} training records are too few to hold out a validation part; take more, "
            "or give alpha."
        )
    order = np.random.default_rng((0xA1FA, seed)).permutation(data.train_rows)
    validation, rest = order[:held], order[held:]
    records = data.records
    original = replace(chosen, loss=chosen.loss.base)

    def accuracies(with_settings: TrainingSettings, alphas: list[float] | None) -> list[tuple[float, float]]:
        count = 1 if alphas is None else len(alphas)
        stack = train_stack(
            records.features,
            records.labels,
            records.classes,
            [rest] * count,
            settings=with_settings,
            seeds=[seed] * count,
            alphas=alphas,
            progress=progress if alphas is not None else None,
        )
        shares = []
        for rows in (rest, validation):
            answers = stack.stacked_logits(records.features[rows]).argmax(-1).numpy()
            shares.append((answers == records.labels[rows]).mean(-1))
        return [(float(train), float(held_out)) for train, held_out in zip(*shares, strict=True)]

    ((target_train, target_validation),) = accuracies(original, None)
    trials = tuple(
        AlphaTrial(alpha, train, held_out, abs(train - target_train) + abs(held_out - target_validation))
        for alpha, (train, held_out) in zip(grid, accuracies(chosen, list(grid)), strict=True)
    )
    best = min(trials, key=lambda trial: (trial.distance, trial.alpha))
    return AlphaSearch(best.alpha, target_train, target_validation, trials)
