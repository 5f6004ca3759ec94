"""What every mechanism is: a function from scores to randomised answers, with a cost and a guarantee per query."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting import Cost, Currency, Guarantee, Reading
from quietmax.errors import InvalidInput
from quietmax.models import Classifier
from quietmax.noise import EXACT, NoiseSource
from quietmax.sensitivity import ScoreBounds

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

    def release(self, scores: Floats, source: NoiseSource) -> Answers:
        """Randomised answers for scores of shape (queries, classes)."""
        ...


def releases_probabilities(mechanism: Mechanism, classes: int) -> bool:
    """Whether a prepared mechanism releases probabilities or labels only: a draw for scores of nobody tells."""
    return mechanism.release(np.zeros((1, classes)), EXACT).probabilities is not None


@runtime_checkable
class Certified(Protocol):
    """A classifier that states bounds on its scores; `proves_bounds` names those whose bounds are proven."""

    @property
    def bounds(self) -> ScoreBounds:
        """How far one record moves the scores of any query."""
        ...


_PROVES_BOUNDS: dict[type, Callable[[Any], bool]] = {}


def proves_bounds(kind: type, when: Callable[[Any], bool]) -> None:
    """Name a class of this library whose bounds are proven ``when`` that holds for the model.

    Bounds that any other class states, a subclass included, are an assumption, as if they were passed as an argument.
    """
    if not kind.__module__.startswith("quietmax."):
        raise InvalidInput(
            f"{kind.__name__} is not a class of quietmax; pass its bounds as an assumption instead."
        )
    _PROVES_BOUNDS[kind] = when


def certified_bounds(given: ScoreBounds | None, model: Classifier) -> tuple[ScoreBounds, bool]:
    """The bounds given, else the model's own; and whether this library proves them of the model."""
    own = model.bounds if isinstance(model, Certified) else None
    proves = _PROVES_BOUNDS.get(type(model))
    proven = proves is not None and proves(model)
    if given is not None:
        return given, proven and given == own
    if own is not None:
        return own, proven
    raise InvalidInput(
        "This model has no certified bound on its scores, so nothing can be proven of its answers; "
        "use a private head or teachers, or pass the bounds you can prove."
    )


def checked_scores(scores: Floats) -> Floats:
    """Scores as float64 of shape (queries, classes), all finite."""
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] < 2:
        raise InvalidInput(
            f"Scores have shape {values.shape}, but expected (queries, classes) with 2 or more classes; reshape them."
        )
    if not np.isfinite(values).all():
        raise InvalidInput("A score is NaN or infinite; check the query and the model. Nothing was released.")
    return values
