"""Beyond the paper's one hidden layer: other losses, activations and depths, trained and put into its formulas.

The paper states its formulas for any number of layers and names ReLU, sigmoid and the quadratic loss, but trains one
hidden layer of 128 tanh units with cross-entropy only. Its Lipschitz constant is derived for the cross-entropy, so
there are no formulas for the quadratic loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quietmax.data.records import split
from quietmax.data.registry import dataset
from quietmax.experiments.grid import DataSource
from quietmax.experiments.inputs import source_records
from quietmax.experiments.stored import stored_table
from quietmax.experiments.summary import Mean
from quietmax.models.losses import Convexified, CrossEntropy, Loss, Quadratic
from quietmax.models.mlp import activation
from quietmax.models.stacked import TrainingSettings
from quietmax.models.training import accuracy, train_many
from quietmax.sensitivity.network import empirical_sensitivity, measured_facts, published_sensitivity

STORED = "architectures.csv"
_QUERIES = 500
_WIDTH = 128

_LOSSES: dict[str, Callable[[float], Loss]] = {
    "convexified cross-entropy": Convexified,
    "cross-entropy": lambda _: CrossEntropy(),
    "quadratic": lambda _: Quadratic(),
    "convexified quadratic": lambda alpha: Convexified(alpha, base=Quadratic()),
    "convexified quadratic, over samples": lambda alpha: Convexified(alpha, "samples", Quadratic()),
}
ARCHITECTURES: tuple[tuple[int, str, str], ...] = (
    (1, "tanh", "convexified cross-entropy"),
    (1, "tanh", "cross-entropy"),
    (1, "tanh", "quadratic"),
    (1, "tanh", "convexified quadratic"),
    (1, "tanh", "convexified quadratic, over samples"),
    (1, "sigmoid", "convexified cross-entropy"),
    (1, "relu", "convexified cross-entropy"),
    (2, "tanh", "convexified cross-entropy"),
    (2, "sigmoid", "convexified cross-entropy"),
    (2, "relu", "convexified cross-entropy"),
    (3, "tanh", "convexified cross-entropy"),
    (3, "sigmoid", "convexified cross-entropy"),
    (3, "relu", "convexified cross-entropy"),
)
"""Number of hidden layers of 128 neurons, their activation and the loss; the first is the paper's."""


@dataclass(frozen=True)
class ArchitectureRow:
    """One architecture on one data set."""

    dataset: str  # Name of the data set
    layers: int  # Number of hidden layers of 128 neurons
    activation: str  # Their activation
    loss: str  # The loss function
    repeats: int  # Number of splits, and of records removed from the first of them, one at a time
    removals: int
    train_accuracy: float  # Means over the splits
    train_spread: float | None  # Standard deviations; None for a single split
    test_accuracy: float
    test_spread: float | None
    rho: float | None
    weights_l2: float | None
    logit: float | None
    gradient: float  # Largest norm of the gradient of one record's loss: what rho claims to bound
    observed_weights_l2: float  # The largest changes by removing one record
    observed_logit: float

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and which formulas were exceeded."""
        return asdict(self) | {"exceeded": list(self.exceeded)}

    @property
    def exceeded(self) -> tuple[str, ...]:
        """The formulas that a measurement exceeded: "rho", "weights_l2", "logit"."""
        measured = {
            "rho": (self.rho, self.gradient),
            "weights_l2": (self.weights_l2, self.observed_weights_l2),
            "logit": (self.logit, self.observed_logit),
        }
        return tuple(
            name for name, (formula, seen) in measured.items() if formula is not None and seen > formula
        )


def measure_architecture(
    name: str,
    layers: int,
    activation_name: str,
    loss: str,
    *,
    repeats: int = 3,
    removals: int = 6,
    data_dir: Path | None = None,
    seed: int = 0,
) -> ArchitectureRow:
    """Train one architecture on several splits, and on the first without each of a few records."""
    records, shape = source_records(DataSource.of(name), data_dir), dataset(name)
    parts = [split(records, size=shape.records, seed=seed + repeat) for repeat in range(repeats)]
    settings = TrainingSettings((_WIDTH,) * layers, activation_name, _LOSSES[loss](shape.alpha))
    models = train_many(parts, settings=settings)
    trained = Mean.of([accuracy(model, part.train) for model, part in zip(models, parts, strict=True)])
    tested = Mean.of([accuracy(model, part.test) for model, part in zip(models, parts, strict=True)])
    first = parts[0]
    found = empirical_sensitivity(
        first.train,
        removals=removals,
        queries=first.test.features[:_QUERIES],
        settings=settings,
        seed=seed,
    )
    formulas: tuple[float | None, float | None, float | None] = (None, None, None)
    if "quadratic" not in loss:
        unbounded = activation(activation_name).bound is None
        claimed = published_sensitivity(models[0], records=first.train.features if unbounded else None)
        formulas = (claimed.rho.value, claimed.weights_l2.value, claimed.logit.value)
    return ArchitectureRow(
        name,
        layers,
        activation_name,
        loss,
        repeats,
        removals,
        trained.value,
        trained.spread,
        tested.value,
        tested.spread,
        *formulas,
        measured_facts(models[0], first.train).gradient,
        found.weights_l2.value,
        found.logit.value,
    )


def stored_architectures(names: list[str] | None = None) -> list[ArchitectureRow]:
    """Return the rows that are shipped with the package."""
    return stored_table(ArchitectureRow, STORED, names)
