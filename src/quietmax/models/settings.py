"""How a network is trained. The defaults are the paper's configuration table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

from quietmax.errors import InvalidInput, expect
from quietmax.models.activations import activation
from quietmax.models.losses import Convexified, Loss


@dataclass(frozen=True)
class TrainingSettings:
    """Everything but the data and the seed.

    ``l2`` is the coefficient as Keras counts it: the penalty is ``l2 * ||kernels||^2`` (no biases), which in
    the paper's notation is ``2*lam``, so its default 0.001 is ``lam = 0.0005`` (THEORY section 1).
    """

    hidden: tuple[int, ...] = (128,)
    activation: str = "tanh"
    loss: Loss = Convexified()
    learning_rate: float = 0.001
    batch_size: int = 100
    epochs: int = 100
    l2: float = 0.001

    def __post_init__(self) -> None:
        activation(self.activation)
        for name in ("learning_rate", "batch_size", "epochs", "l2"):
            expect(getattr(self, name), Real, name, "a number")
        if any(width < 1 for width in self.hidden):
            raise InvalidInput(
                f"Hidden widths {self.hidden} must all be at least 1; leave the layer out instead."
            )
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise InvalidInput(
                f"The learning rate is {self.learning_rate}, but it must be positive; try 0.001."
            )
        if self.batch_size < 1 or self.epochs < 0:
            raise InvalidInput(
                f"Batch size {self.batch_size} and epochs {self.epochs} must be at least 1 and 0; try 100 and 100."
            )
        if not (math.isfinite(self.l2) and self.l2 >= 0):
            raise InvalidInput(f"The L2 coefficient is {self.l2}, but it must be 0 or more; try 0.001.")
