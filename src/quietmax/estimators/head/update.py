"""Continuing a head on a table with the people of another cohort: what was released before is where it starts.

What was released is public, so starting from it costs nothing (THEORY 3.17). A training on N people alone adds noise in
proportion to `eta S T / (mu N)`. If the versions before it stand for P people, it is shortened by the factor
`sqrt(N / (N + P))`: the noise and the sampling errors of t equal cohorts then average out. What older cohorts stand for
fades, so that the model follows a table whose people change. `docs/results.md` has the evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quietmax.accounting.guarantee import Guarantee
from quietmax.data.cohorts import Cohort
from quietmax.data.encoding import Encoding
from quietmax.data.records import Holdout
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.estimators.blocks import Floats
from quietmax.estimators.evaluation import EvaluationCharge, are_free, read_evaluations
from quietmax.estimators.figures import Estimate
from quietmax.estimators.head.weights import GradientPlan, TableWeights
from quietmax.estimators.series import Version, rule_of, version_digest, versions_of
from quietmax.estimators.training_set import TrainingRows
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.tabular import TableCells

if TYPE_CHECKING:
    from quietmax.estimators.head.estimator import PrivateHead
    from quietmax.estimators.serialization import PrivateModel

FADING = 0.97
"""With each version, what the earlier cohorts stand for becomes smaller by this factor."""
FEWEST_STEPS = 20
"""A shortened training has fewer steps, but not fewer than this."""
ONLY_CELLS = (
    "`cohort` requires a PrivateHead that releases its weights and trains on the cells of a table: method='gradient', "
    "features='auto', no columns of text, without radius and second_moments."
)


@dataclass(frozen=True, eq=False)
class Prior:
    """A released version of a series, from which the next one starts."""

    cells: TableCells
    weights: TableWeights
    encoding: Encoding
    classes: tuple[str, ...]
    guarantee: Guarantee
    holdout: Holdout | None
    accuracy: Estimate | None = None  # Its published accuracy, if any that was free
    evaluations: tuple[tuple[str, float], ...] = ()  # The ids and costs of what was published

    @classmethod
    def of(
        cls,
        classifier: object,
        features: FeatureMap | None,
        encoding: Encoding | None,
        classes: Any,
        guarantee: Guarantee,
        *,
        holdout: Holdout | None,
        charges: Sequence[EvaluationCharge],
    ) -> Prior:
        """Return what a model hands on; an error if it is no version of a series."""
        if "cohort" not in guarantee.parameters:
            raise InvalidInput(
                "The model was not trained on a cohort, so it is no version of a series: train the first version with "
                "a `cohort`."
            )
        if guarantee.status == "refuted":
            raise InvalidInput("The guarantee of the model is refuted, so it cannot be continued.")
        if (
            not isinstance(classifier, TableWeights)
            or not isinstance(features, TableCells)
            or encoding is None
        ):
            raise InvalidInput(ONLY_CELLS)
        # The next version's guarantee covers what it states of this one: what cost more stays here.
        handed_on = charges if are_free(guarantee, charges) else ()
        published = [each for each in handed_on if each.result is not None]
        accuracy = published[-1].result.accuracy if published and published[-1].result else None
        spent = tuple((each.id, each.mu) for each in published)
        return cls(
            features, classifier, encoding, tuple(map(str, classes)), guarantee, holdout, accuracy, spent
        )

    @property
    def _about(self) -> dict[str, Any]:
        about: dict[str, Any] = self.guarantee.parameters["cohort"]
        return about

    @property
    def versions(self) -> list[Version]:
        """All versions of the series up to this one."""
        facts, weights = self.guarantee.parameters, self.weights
        arrays = [weights.weights, weights.centre, *(() if weights.noise is None else (weights.noise,))]
        earlier = versions_of(facts)
        own = (self._about["name"], facts["mu_version"], version_digest(facts, arrays), self.accuracy)
        return [*earlier, Version(len(earlier) + 1, *own, self.guarantee.status, self.evaluations)]

    def people(self, size: float) -> float:
        """Return for how many people a version on so many more stands."""
        return float(size) + FADING * float(self._about["people"])

    def clear(self, size: float) -> float:
        """Return how many people in one training would have about as little noise in the end."""
        return math.sqrt(size * self.people(size))

    @property
    def _scale(self) -> float:
        return float(self.guarantee.parameters.get("scale", 1.0))

    def _share(self, size: float) -> float:
        return size / self.people(size)

    def shortened(self, plan: GradientPlan, size: float) -> GradientPlan:
        """Return the plan of a training that starts from this version, on so many people of another cohort."""
        factor = math.sqrt(self._share(size))
        steps = max(min(FEWEST_STEPS, plan.steps), math.ceil(plan.steps * factor))
        rate = plan.learning_rate * factor * plan.steps / steps
        return replace(plan, steps=steps, learning_rate=rate, stages=1 if self.cells.crosses else plan.stages)

    @property
    def outputs(self) -> Floats:
        """What each cell, and last every row, adds to the outputs, before the released scale multiplied them."""
        weights = self.weights.weights / self._scale
        return weights[1:] - weights[:1] if len(weights) == 2 else weights

    def noise(self, added: Floats) -> Floats:
        """Return the noise in the effects after a training that adds some."""
        before = np.zeros(len(added)) if self.weights.noise is None else self.weights.noise / self._scale
        found = np.zeros(len(added))  # cells of pairs that are new
        found[: len(before) - 1], found[-1] = before[:-1], before[-1]
        return np.hypot(found, added)

    def shares(self, counted: Floats | None, noise: float, size: float) -> tuple[Floats, float]:
        """Return the shares of people in each cell, averaged over the cohorts, and the noise in them."""
        shares, before = self.weights.centre.copy(), float(self._about["share_noise"])
        if counted is None:
            return shares, before
        weight = self._share(size)
        shares[: len(counted)] += weight * (counted - shares[: len(counted)])
        return shares, math.hypot((1.0 - weight) * before, weight * noise)

    def check(self, data: TrainingRows, *, again: bool) -> None:
        """Raise unless a training set continues this series."""
        cohort = data.cohort
        assert cohort is not None
        before, now = (
            None if each is None else replace(each, defaults=()) for each in (self.encoding, data.encoding)
        )
        if now != before or tuple(map(str, data.classes)) != self.classes:
            raise InvalidInput(
                "The table is not encoded as in the model that is continued: a series has one schema, with the same "
                "columns, classes and `person` column."
            )
        if cohort.rule != (rule := rule_of(self.guarantee.parameters)):
            raise InvalidInput(
                f"A series has one rule for its cohorts, with the same dates, categories or key: that of the model is "
                f"{rule.by!r}, but the schema declares {cohort.rule.by!r}."
            )
        if data.holdout != self.holdout:
            raise InvalidInput(
                "A series holds out the same people: use the `holdout` and `seed` of the first version."
            )
        if not again:
            self.check_new(cohort)

    def check_new(self, cohort: Cohort) -> None:
        """Raise if the series has a version on a cohort."""
        found = next((each for each in self.versions if each.cohort == cohort.name), None)
        if found is not None:
            raise InvalidInput(
                f"Version {found.version} of the series was trained on cohort {cohort.name!r}. Training on it again "
                "adds up for its people: `again` allows it."
            )


def prior_of(version: PrivateHead | PrivateModel | str | Path) -> Prior:
    """Return what a fitted head, an opened model or a model folder hands on."""
    from sklearn.utils.validation import check_is_fitted

    from quietmax.estimators.serialization import PrivateModel, open_private

    charges: Sequence[EvaluationCharge] = ()
    if isinstance(version, str | Path):
        folder, version = version, open_private(version)
        charges = read_evaluations(folder, version)
    if isinstance(version, PrivateModel):
        names = ("classifier", "features", "encoding", "classes", "guarantee")
        return Prior.of(*(getattr(version, name) for name in names), holdout=version.holdout, charges=charges)
    check_is_fitted(version)
    fitted = (version._classifier, version.feature_map_, version.encoding_, version.classes_)
    with suppress(QuietmaxError):  # in a fork, or the folder is gone: then no accuracy is handed on
        charges = version._evaluations._read()
    return Prior.of(*fitted, version.guarantee_, holdout=version.holdout_, charges=charges)
