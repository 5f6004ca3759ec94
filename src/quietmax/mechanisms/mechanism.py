"""What every mechanism is: a function from logits to randomised answers, with a cost and a guarantee per query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting import Cost, Currency, Guarantee, Reading
from quietmax.models import Classifier
from quietmax.noise import NoiseSource

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Answers:
    """Released answers: ``labels`` of shape (queries,), ``probabilities`` (queries, classes) or None."""

    labels: NDArray[np.int64]
    probabilities: Floats | None


class Mechanism(Protocol):
    """Randomised release of one answer per query.

    A mechanism may leave parameters open; `prepared` fills them for a model and a cost per query and returns a
    mechanism that can release. Its parameters are public constants.
    """

    @property
    def name(self) -> str:
        """The mechanism's word in commands and results."""
        ...

    @property
    def currency(self) -> Currency:
        """The currency its cost is counted in."""
        ...

    @property
    def reading(self) -> Reading:
        """How a budget is read: ``proven``, or as the paper reads it."""
        ...

    def prepared(self, model: Classifier, per_query: Cost) -> Mechanism:
        """The mechanism with every open parameter set, so that one query costs at most ``per_query``."""
        ...

    def cost(self, classes: int) -> Cost:
        """What one query costs."""
        ...

    def guarantee(self, classes: int) -> Guarantee:
        """What is claimed of one query's answer."""
        ...

    def release(self, logits: Floats, source: NoiseSource) -> Answers:
        """Randomised answers for logits of shape (queries, classes)."""
        ...
