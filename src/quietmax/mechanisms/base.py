"""What every mechanism is: a function from scores to randomised answers, with a cost and a guarantee per query."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from quietmax.accounting.budget import Analysis, Budget, per_query
from quietmax.accounting.conversions import bounded_range_as_gaussian, pure_as_gaussian
from quietmax.accounting.costs import Cost, Measure, PureCost
from quietmax.accounting.guarantee import Guarantee
from quietmax.errors import InvalidInput
from quietmax.models.training import Classifier
from quietmax.noise.sources import EXACT, NoiseSource
from quietmax.sensitivity.base import ScoreBounds

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
    def measure(self) -> Measure:
        """The measure its cost is counted in."""
        ...

    @property
    def analysis(self) -> Analysis:
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


class PublicMap(Protocol):
    """A feature map that was chosen without the private records."""

    def transform(self, features: NDArray[np.float32]) -> NDArray[np.floating]:
        """Map rows of features to the rows that the model takes."""
        ...


@dataclass(frozen=True, eq=False)
class Answerer:
    """The path from features to released answers: feature map, model, mechanism, noise.

    `Predictor`, the server, the attacks and the experiments all answer through this class. It does not count what
    an answer costs: the caller charges between `scores` and `release`, or has no budget to charge.

    Parameters
    ----------
    model : Classifier
        Maps features to scores.
    mechanism : Mechanism
        A prepared mechanism; see `prepare`.
    noise : NoiseSource
        Where the mechanism draws its noise from. Exact noise by default.
    features : PublicMap or None
        A public feature map that is applied before the model. None: the model takes the features as they are.
    non_finite : {"error", "undecided"}
        What happens to a row whose scores are not all finite. ``"error"`` raises `InvalidInput`. ``"undecided"``
        gives the row equal scores: an error that is raised after a charge would reveal something about the model.

    Examples
    --------
    >>> import torch
    >>> from quietmax.mechanisms import Algorithm1
    >>> from quietmax.models.training import TorchModel
    >>> model = TorchModel(torch.nn.Identity(), classes=2)
    >>> mechanism = Algorithm1("laplace", 0.5, 0.5, 0.3, 0.8)
    >>> Answerer(model, mechanism).answer(np.zeros((3, 2), np.float32)).probabilities.shape
    (3, 2)
    """

    model: Classifier
    mechanism: Mechanism
    noise: NoiseSource = EXACT
    features: PublicMap | None = None
    non_finite: Literal["error", "undecided"] = "error"

    @classmethod
    def prepare(
        cls, model: Classifier, mechanism: Mechanism, budget: Budget, *, noise: NoiseSource = EXACT
    ) -> Answerer:
        """Prepare a mechanism so that one answer costs the budget's share per query.

        Parameters
        ----------
        model : Classifier
            The model to answer with.
        mechanism : Mechanism
            A mechanism that may have open parameters.
        budget : Budget
            The total and the number of queries that share it; one query if the budget states no number.
        noise : NoiseSource
            Where the mechanism draws its noise from.

        Returns
        -------
        Answerer
            It answers any number of queries; nothing is charged.
        """
        one = per_query(budget, mechanism.measure, mechanism.analysis)
        return cls(model, mechanism.prepared(model, one), noise)

    @property
    def cost(self) -> Cost:
        """The cost of one answer."""
        return self.mechanism.cost(self.model.classes)

    def scores(self, features: NDArray[np.float32]) -> Floats:
        """Compute the scores that the mechanism sees, shape (queries, classes); all are finite."""
        mapped = features if self.features is None else self.features.transform(features)
        scores = self.model.scores(mapped)
        if self.non_finite == "undecided":
            scores = np.where(np.isfinite(scores).all(axis=1, keepdims=True), scores, 0.0)
        return checked_scores(scores)

    def release(self, scores: Floats) -> Answers:
        """Draw answers for scores that `scores` returned."""
        return self.mechanism.release(scores, self.noise)

    def answer(self, features: NDArray[np.float32]) -> Answers:
        """Draw an answer for each row of features."""
        return self.release(self.scores(features))


def digest_text(mechanism: Mechanism) -> str:
    """Return the text that stands for a prepared mechanism in the digests of stored answers.

    It must not change between versions, or stored answers would be charged again: the field `analysis` keeps its name
    of version 0.1 here.
    """
    return repr(mechanism).replace(" analysis=", " reading=")


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


class ProvenMechanism:
    """Base of the frozen dataclasses with a proof; both fields may be left open until `prepared` fills them.

    Whether a model certifies the bounds is known only to what `prepared` returns for it.
    """

    bounds: ScoreBounds | None
    per_query: Cost | None
    _certified = False

    @property
    def analysis(self) -> Analysis:
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
        """Bounds and cost; a mechanism with one kind of noise refuses a cost in the other measure as well."""
        if self.bounds is None or self.per_query is None:
            raise InvalidInput(
                f"{type(self).__name__} still has open parameters; give bounds and per_query, or use a Predictor."
            )
        return self.bounds, self.per_query


Selection = Literal["exponential", "permute-and-flip"]


def selection_epsilon(cost: Cost, selection: Selection) -> float:
    """The largest epsilon that ``cost`` pays for.

    Pure: epsilon itself. Gaussian: the inverse of the conversions of THEORY section 3, rounded down: the exponential
    mechanism has bounded range, permute-and-flip is only epsilon-private.

    >>> from quietmax.accounting import GaussianCost
    >>> round(selection_epsilon(GaussianCost(0.5), "exponential") / 0.5, 2)
    1.6
    """
    if isinstance(cost, PureCost):
        return cost.epsilon
    log_odds = float(log_ndtr(cost.mu / 2) - log_ndtr(-cost.mu / 2))
    convert = bounded_range_as_gaussian if selection == "exponential" else pure_as_gaussian
    epsilon = 2 * log_odds if selection == "exponential" else log_odds
    while convert(epsilon) > cost.mu:
        epsilon *= 1 - 2**-50
    return epsilon
