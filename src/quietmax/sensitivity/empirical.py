"""Sensitivity as observed: train with and without one record, and look how far weights and logits moved.

An observed change is a lower bound on the true sensitivity: it can refute a claimed upper bound and never prove one.
Ordinary records move little, so some are made to matter: mislabelled ones, and extreme ones whose every feature lies at
the far end of the range. The training set contains them, the neighbour lacks one of them; everything else, initial
weights and order of records included, is the same (THEORY 2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from quietmax.data.records import Records
from quietmax.errors import InvalidInput
from quietmax.models.stacked import TrainingSettings, train_stack
from quietmax.sensitivity.base import Basis, Sensitivity
from quietmax.sensitivity.published import PublishedSensitivity

Floats = NDArray[np.float64]
Kind = Literal["mislabelled", "extreme", "ordinary"]
Quantity = Literal["weight", "weights_l2", "logit"]
Progress = Callable[[int, int], None]

KINDS: tuple[Kind, ...] = ("mislabelled", "extreme", "ordinary")
QUANTITIES: tuple[Quantity, ...] = ("weight", "weights_l2", "logit")


@dataclass(frozen=True)
class Removal:
    """What removing one record changed: the largest change of one weight, of all weights in L2, of one logit."""

    row: int
    kind: Kind
    weight: float
    weights_l2: float
    logit: float


@dataclass(frozen=True)
class BoundCheck:
    """An observed change beside a bound: `refuted` if it exceeds it."""

    quantity: Quantity
    observed: float
    bound: float
    basis: Basis

    @property
    def verdict(self) -> Literal["refuted", "consistent"]:
        """`refuted` if the observed change exceeds the bound; otherwise `consistent`, which proves nothing."""
        return "refuted" if self.observed > self.bound else "consistent"

    def to_json(self) -> dict[str, Any]:
        """All fields and the verdict by name."""
        return {**asdict(self), "verdict": self.verdict}


@dataclass(frozen=True)
class ObservedSensitivity:
    """The changes seen in retraining; ``records`` were trained on, logits compared on ``queries``."""

    removals: tuple[Removal, ...]
    records: int
    queries: int

    @property
    def weight(self) -> Sensitivity:
        """The largest change of one weight."""
        return self._largest("weight")

    @property
    def weights_l2(self) -> Sensitivity:
        """The largest change of all weights together, in L2."""
        return self._largest("weights_l2")

    @property
    def logit(self) -> Sensitivity:
        """The largest change of one logit of any query."""
        return self._largest("logit")

    def _largest(self, quantity: Quantity) -> Sensitivity:
        worst = max(self.removals, key=lambda removal: float(getattr(removal, quantity)))
        because = f"The largest of {len(self.removals)} retrainings, without {_article(worst.kind)} record."
        return Sensitivity(float(getattr(worst, quantity)), "observed", because)

    def against(
        self, bounds: PublishedSensitivity | Mapping[Quantity, Sensitivity]
    ) -> tuple[BoundCheck, ...]:
        """Hold what was seen against the paper's formulas or any other bounds."""
        if isinstance(bounds, PublishedSensitivity):
            bounds = {"weight": bounds.weight, "weights_l2": bounds.weights_l2, "logit": bounds.logit}
        return tuple(
            BoundCheck(
                quantity, self._largest(quantity).value, bounds[quantity].value, bounds[quantity].basis
            )
            for quantity in QUANTITIES
            if quantity in bounds
        )

    def to_json(self) -> dict[str, Any]:
        """Every removal and the largest changes."""
        return {
            "records": self.records,
            "queries": self.queries,
            **{quantity: self._largest(quantity).value for quantity in QUANTITIES},
            "removals": [asdict(removal) for removal in self.removals],
        }


@dataclass(frozen=True, eq=False)
class Trained:
    """What a retraining gives: all weights as one vector, and logits of shape (queries, classes)."""

    weights: Floats
    logits: Floats


def observed(
    records: Records,
    *,
    removals: int = 6,
    kinds: Sequence[Kind] = KINDS,
    queries: NDArray[np.floating] | None = None,
    settings: TrainingSettings | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> ObservedSensitivity:
    """Train a network on ``records`` and one without each of ``removals`` of them, all at once.

    The removed records are of the ``kinds`` in turn. Logits are compared on ``queries`` and on the removed records
    themselves. Weights are the kernels, without biases, as the paper counts them.
    """
    planted, rows, kind_of = plant(records, removals=removals, kinds=kinds, seed=seed)
    stack = train_stack(
        planted.features,
        planted.labels,
        planted.classes,
        [np.arange(len(planted))] * (removals + 1),
        settings=settings or TrainingSettings(),
        seeds=[seed] * (removals + 1),
        left_out=[None, *rows],
        progress=progress,
    )
    asked = planted.features[rows]
    if queries is not None:
        asked = np.concatenate([np.asarray(queries, dtype=np.float32), asked])
    weights = torch.cat([kernel.flatten(1) for kernel in stack.kernels], 1).double().numpy()
    logits = stack.stacked_logits(asked).double().numpy()
    first, *others = (Trained(*each) for each in zip(weights, logits, strict=True))
    return _compared(first, others, rows, kind_of, len(records))


def observed_by(
    retrain: Callable[[Records], Trained],
    records: Records,
    *,
    removals: int = 6,
    kinds: Sequence[Kind] = KINDS,
    seed: int = 0,
) -> ObservedSensitivity:
    """The same for any deterministic training: ``retrain`` is called with all records and without each removed one."""
    planted, rows, kind_of = plant(records, removals=removals, kinds=kinds, seed=seed)
    others = [retrain(planted.take(np.delete(np.arange(len(planted)), row))) for row in rows]
    return _compared(retrain(planted), others, rows, kind_of, len(records))


def plant(
    records: Records, *, removals: int, kinds: Sequence[Kind] = KINDS, seed: int = 0
) -> tuple[Records, list[int], list[Kind]]:
    """Choose rows to remove later and make them what they shall be: the records, the rows, and their kinds.

    Mislabelled: the next class. Extreme: every feature at that end of the range of all features it is farther from.

    >>> points = Records("points", np.array([[0.0], [0.2], [1.0]]), np.array([0, 1, 1]), classes=2)
    >>> changed, rows, _ = plant(points, removals=1, kinds=["mislabelled"], seed=0)
    >>> bool(changed.labels[rows[0]] != points.labels[rows[0]])
    True
    """
    if not 1 <= removals < len(records) or not kinds or any(kind not in KINDS for kind in kinds):
        raise InvalidInput(
            f"{removals} removals of kinds {tuple(kinds)} from {len(records)} records are impossible; remove at least "
            f"1, fewer than there are, and choose kinds among {', '.join(KINDS)}."
        )
    generator = np.random.default_rng((0x0B5E, seed))
    rows = [int(row) for row in generator.choice(len(records), removals, replace=False)]
    kind_of: list[Kind] = [kinds[place % len(kinds)] for place in range(removals)]
    features, labels = records.features.copy(), records.labels.copy()
    low, high = float(features.min()), float(features.max())
    for row, kind in zip(rows, kind_of, strict=True):
        if kind == "mislabelled":
            labels[row] = (labels[row] + 1) % records.classes
        elif kind == "extreme":
            features[row] = np.where(features[row] > (low + high) / 2, low, high)
    return replace(records, features=features, labels=labels), rows, kind_of


def _compared(
    first: Trained, others: Sequence[Trained], rows: Sequence[int], kinds: Sequence[Kind], records: int
) -> ObservedSensitivity:
    removals = []
    for other, row, kind in zip(others, rows, kinds, strict=True):
        moved = other.weights - first.weights
        removals.append(
            Removal(
                row=row,
                kind=kind,
                weight=float(np.abs(moved).max()),
                weights_l2=float(np.linalg.norm(moved)),
                logit=float(np.abs(other.logits - first.logits).max()),
            )
        )
    return ObservedSensitivity(tuple(removals), records, len(first.logits))


def _article(kind: Kind) -> str:
    return f"{'a' if kind == 'mislabelled' else 'an'} {kind}"
