"""What the proven mechanisms share: certified bounds on the scores and a stated cost per query."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from quietmax.accounting import Cost, Reading
from quietmax.errors import InvalidInput
from quietmax.mechanisms.mechanism import certified_bounds
from quietmax.models import Classifier
from quietmax.sensitivity import ScoreBounds


class ProvenMechanism:
    """Base of the frozen dataclasses with a proof; both fields may be left open until `prepared` fills them."""

    bounds: ScoreBounds | None
    per_query: Cost | None

    @property
    def reading(self) -> Reading:
        """A budget means (epsilon, delta)."""
        return "proven"

    def prepared(self, model: Classifier, per_query: Cost) -> Self:
        """Fill in the cost per query and the model's certified bounds."""
        bounds = certified_bounds(self.bounds, model)
        filled = replace(self, bounds=bounds, per_query=self.per_query or per_query)  # type: ignore[type-var]
        filled._ready()
        return filled

    def cost(self, classes: int) -> Cost:  # noqa: ARG002
        """The stated cost per query; it does not depend on the number of classes."""
        return self._ready()[1]

    def _ready(self) -> tuple[ScoreBounds, Cost]:
        """Bounds and cost; a mechanism with one kind of noise refuses a cost in the other currency as well."""
        if self.bounds is None or self.per_query is None:
            raise InvalidInput(
                f"{type(self).__name__} still has open parameters; give bounds and per_query, or use a Predictor."
            )
        return self.bounds, self.per_query
