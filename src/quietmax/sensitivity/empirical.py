"""Empirical sensitivity: train with and without one unit and compare weights and logits.

The unit is one person with all rows if the records have a person column, else one record (THEORY 3.7). The largest
change is a lower bound on the true sensitivity: it can refute a claimed upper bound and never prove one. Ordinary
records move a model little, so `plant` changes some units before training: mislabelled ones, and extreme ones whose
every feature is at the far end of the range. The training set contains them and each neighbour lacks one of them.
Everything else is the same, including the initial weights and the order of the records (THEORY 2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax.accounting.guarantee import Unit
from quietmax.data.records import Records
from quietmax.errors import InvalidInput
from quietmax.models.stacked import Progress, TrainingSettings, train_stack
from quietmax.sensitivity.base import Basis, Sensitivity
from quietmax.sensitivity.published import PublishedSensitivity

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
Kind = Literal["mislabelled", "extreme", "ordinary"]
Quantity = Literal["weight", "weights_l2", "logit"]

KINDS: tuple[Kind, ...] = ("mislabelled", "extreme", "ordinary")
QUANTITIES: tuple[Quantity, ...] = ("weight", "weights_l2", "logit")


@dataclass(frozen=True)
class Removal:
    """What removing one unit changed."""

    rows: tuple[int, ...]  # The removed rows: one record, or all rows of one person
    kind: Kind  # What kind of unit it was
    weight: float  # The largest change of one weight
    weights_l2: float  # The change of all weights together, in L2
    logit: float  # The largest change of one logit


@dataclass(frozen=True)
class BoundCheck:
    """A measured change compared with a bound."""

    quantity: Quantity  # What changed
    empirical: float  # The largest change seen in retraining
    bound: float  # The bound
    basis: Basis  # What the bound is based on

    @property
    def verdict(self) -> Literal["refuted", "consistent"]:
        """``"refuted"`` if the change exceeds the bound, else ``"consistent"``, which proves nothing."""
        return "refuted" if self.empirical > self.bound else "consistent"

    def to_json(self) -> dict[str, Any]:
        """Return all fields and the verdict by name."""
        return {**asdict(self), "verdict": self.verdict}


@dataclass(frozen=True)
class EmpiricalSensitivity:
    """The changes seen in retraining.

    Parameters
    ----------
    removals : tuple of Removal
        One entry for each unit that was removed.
    records : int
        The number of training records.
    queries : int
        The number of queries whose logits were compared.
    unit : {"record", "person"}
        What was removed each time.
    """

    removals: tuple[Removal, ...]
    records: int
    queries: int
    unit: Unit = "record"

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
        """Return the largest change of one quantity."""
        worst = max(self.removals, key=lambda removal: float(getattr(removal, quantity)))
        article = "a" if worst.kind == "mislabelled" else "an"
        because = (
            f"The largest of {len(self.removals)} retrainings, without {article} {worst.kind} {self.unit}."
        )
        return Sensitivity(float(getattr(worst, quantity)), "empirical", because)

    def against(
        self, bounds: PublishedSensitivity | Mapping[Quantity, Sensitivity]
    ) -> tuple[BoundCheck, ...]:
        """Compare the largest changes with bounds.

        Parameters
        ----------
        bounds : PublishedSensitivity or Mapping
            The paper's formulas, or bounds by quantity.

        Returns
        -------
        tuple of BoundCheck
            One check for each quantity that has a bound.
        """
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
        """Return every removal and the largest changes by name."""
        return {
            "unit": self.unit,
            "records": self.records,
            "queries": self.queries,
            **{quantity: self._largest(quantity).value for quantity in QUANTITIES},
            "removals": [asdict(removal) for removal in self.removals],
        }


@dataclass(frozen=True, eq=False)
class Retraining:
    """The result of one training."""

    weights: Floats  # All weights as one vector
    logits: Floats  # The logits of the queries


def empirical_sensitivity(
    records: Records,
    *,
    removals: int = 6,
    kinds: Sequence[Kind] = KINDS,
    queries: NDArray[np.floating] | None = None,
    settings: TrainingSettings | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> EmpiricalSensitivity:
    """Measure the sensitivity of a network by retraining it without single units: persons, or records.

    One network is trained on all records and one without each removed unit, all at once. Weights are the kernels
    without the biases, as in the paper.

    Parameters
    ----------
    records : Records
        The training records. With persons, a unit is all rows of one person.
    removals : int
        How many units are removed, one at a time.
    kinds : sequence of {"mislabelled", "extreme", "ordinary"}
        What kinds of units are removed, in turn.
    queries : ndarray of shape (queries, features) or None
        Logits are compared on these rows and on the removed records.
    settings : TrainingSettings or None
        How the networks are trained; the paper's settings by default.
    seed : int
        Seed of the initial weights, the order of the records and the choice of the removed units.
    progress : callable or None
        Called with the number of finished epochs and of all epochs.

    Returns
    -------
    EmpiricalSensitivity
        The changes, one entry per removed unit.

    Examples
    --------
    >>> import quietmax as qm
    >>> data = qm.load("mnist-5k", records=60)
    >>> settings = qm.TrainingSettings(hidden=(4,), epochs=1)
    >>> found = empirical_sensitivity(data.train, removals=2, settings=settings)
    >>> found.logit.basis, len(found.removals)
    ('empirical', 2)
    """
    planted, rows, kind_of = plant(records, removals=removals, kinds=kinds, seed=seed)
    stack = train_stack(
        planted.features,
        planted.labels,
        planted.classes,
        [np.arange(len(planted))] * (removals + 1),
        settings=settings or TrainingSettings(),
        seeds=[seed] * (removals + 1),
        left_out=[(), *rows],
        progress=progress,
    )
    asked = planted.features[np.concatenate(rows)]
    if queries is not None:
        asked = np.concatenate([np.asarray(queries, dtype=np.float32), asked])
    weights = torch.cat([kernel.flatten(1) for kernel in stack.kernels], 1).double().numpy()
    logits = stack.stacked_logits(asked).double().numpy()
    first, *others = (Retraining(*each) for each in zip(weights, logits, strict=True))
    return _compared(first, others, rows, kind_of, records)


def empirical_sensitivity_by(
    retrain: Callable[[Records], Retraining],
    records: Records,
    *,
    removals: int = 6,
    kinds: Sequence[Kind] = KINDS,
    seed: int = 0,
) -> EmpiricalSensitivity:
    """Measure the sensitivity of any deterministic training by retraining without single units."""
    planted, rows, kind_of = plant(records, removals=removals, kinds=kinds, seed=seed)
    others = [retrain(planted.take(np.delete(np.arange(len(planted)), gone))) for gone in rows]
    return _compared(retrain(planted), others, rows, kind_of, records)


def plant(
    records: Records, *, removals: int, kinds: Sequence[Kind] = KINDS, seed: int = 0
) -> tuple[Records, list[Rows], list[Kind]]:
    """Choose units that will be removed and change them into units of the given kinds.

    Mislabelled rows get the next class. Every feature of extreme rows is moved to the end of the range of all features
    that is farther away. Ordinary rows are left as they are.

    Parameters
    ----------
    records : Records
        The records before the change. With persons, all rows of a chosen person are changed.
    removals : int
        The number of units to choose.
    kinds : sequence of {"mislabelled", "extreme", "ordinary"}
        The kinds of the chosen units, in turn.
    seed : int
        Seed of the choice.

    Returns
    -------
    tuple of (Records, list of arrays of int, list of str)
        The changed records, the rows of each chosen unit, and the kinds of the units.

    Raises
    ------
    InvalidInput
        If there are too few units, or a kind is unknown.

    Examples
    --------
    >>> points = Records("points", np.array([[0.0], [0.2], [1.0]]), np.array([0, 1, 1]), classes=2)
    >>> changed, rows, _ = plant(points, removals=1, kinds=["mislabelled"], seed=0)
    >>> (changed.labels[rows[0]] != points.labels[rows[0]]).tolist()
    [True]
    """
    units = len(np.unique(records.units))
    if not 1 <= removals < units or not kinds or any(kind not in KINDS for kind in kinds):
        raise InvalidInput(
            f"removals must be between 1 and {units - 1} and kinds among {', '.join(KINDS)}, "
            f"got {removals} and {tuple(kinds)}."
        )
    generator = np.random.default_rng((0x0B5E, seed))
    chosen = generator.choice(units, removals, replace=False)
    rows = [np.flatnonzero(records.units == unit) for unit in chosen]
    kind_of: list[Kind] = [kinds[place % len(kinds)] for place in range(removals)]
    features, labels = records.features.copy(), records.labels.copy()
    low, high = float(features.min()), float(features.max())
    for changed, kind in zip(rows, kind_of, strict=True):
        if kind == "mislabelled":
            labels[changed] = (labels[changed] + 1) % records.classes
        elif kind == "extreme":
            features[changed] = np.where(features[changed] > (low + high) / 2, low, high)
    return replace(records, features=features, labels=labels), rows, kind_of


def _compared(
    first: Retraining,
    others: Sequence[Retraining],
    rows: Sequence[Rows],
    kinds: Sequence[Kind],
    records: Records,
) -> EmpiricalSensitivity:
    """Compare each retraining with the first training."""
    removals = []
    for other, gone, kind in zip(others, rows, kinds, strict=True):
        moved = other.weights - first.weights
        removals.append(
            Removal(
                rows=tuple(gone.tolist()),
                kind=kind,
                weight=float(np.abs(moved).max()),
                weights_l2=float(np.linalg.norm(moved)),
                logit=float(np.abs(other.logits - first.logits).max()),
            )
        )
    return EmpiricalSensitivity(tuple(removals), len(records), len(first.logits), records.unit)
