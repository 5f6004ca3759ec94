"""What the proven mechanisms share: certified bounds on the scores and a stated cost per query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from quietmax.accounting import Cost, Guarantee, Reading
from quietmax.errors import InvalidInput
from quietmax.mechanisms.mechanism import certified_bounds
from quietmax.models import Classifier
from quietmax.sensitivity import ScoreBounds


class ProvenMechanism:
    """Base of the frozen dataclasses with a proof; both fields may be left open until `prepared` fills them.

    Whether a model certifies the bounds is known only to what `prepared` returns for it.
    """

    bounds: ScoreBounds | None
    per_query: Cost | None
    _certified = False

    @property
    def reading(self) -> Reading:
        """A budget means (epsilon, delta)."""
        return "proven"

    def prepared(self, model: Classifier, per_query: Cost) -> Self:
        """Fill in the cost per query and the model's certified bounds."""
        bounds, certified = certified_bounds(self.bounds, model)
        filled = replace(self, bounds=bounds, per_query=self.per_query or per_query)  # type: ignore[type-var]
        object.__setattr__(filled, "_certified", certified)
        filled._ready()
        return filled

    def cost(self, classes: int) -> Cost:  # noqa: ARG002
        """The stated cost per query; it does not depend on the number of classes."""
        return self._ready()[1]

    def _claimed(self, because: str, parameters: Mapping[str, Any]) -> Guarantee:
        """Proven if the model certifies the bounds on its scores; conditional on bounds that were merely stated."""
        bounds, cost = self._ready()
        proven = Guarantee.of(
            cost, status="proven", because=because, parameters={**parameters, **bounds.to_json()}
        )
        if self._certified:
            return proven
        return proven.weakened(
            "conditional",
            f"{because} The bounds on the scores were stated, not proven by this library.",
            (
                f"One record moves the scores of any query by at most {bounds.one.value:.6g} each and "
                f"{bounds.vector.value:.6g} together in L2.",
            ),
        )

    def _ready(self) -> tuple[ScoreBounds, Cost]:
        """Bounds and cost; a mechanism with one kind of noise refuses a cost in the other currency as well."""
        if self.bounds is None or self.per_query is None:
            raise InvalidInput(
                f"{type(self).__name__} still has open parameters; give bounds and per_query, or use a Predictor."
            )
        return self.bounds, self.per_query
