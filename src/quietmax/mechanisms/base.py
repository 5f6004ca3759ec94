"""Mechanisms turn a model's scores into randomised answers; `Answerer` is the whole path from features to answers.

Another package adds a mechanism as an entry point in the group `quietmax.mechanisms`: a frozen dataclass whose
parameters all have defaults, or a function without parameters that returns one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Literal, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from quietmax._plugins import with_plugins
from quietmax.accounting.budget import Analysis, Budget, per_query
from quietmax.accounting.conversions import bounded_range_as_gaussian, pure_as_gaussian
from quietmax.accounting.costs import Cost, Measure, PureCost
from quietmax.accounting.guarantee import Guarantee
from quietmax.errors import InvalidInput
from quietmax.models.training import Classifier
from quietmax.noise.sources import EXACT, NoiseSource
from quietmax.sensitivity.base import ScoreBounds

ENTRY_POINT_GROUP = "quietmax.mechanisms"
_BUILT_IN = ("algorithm1", "sampled-neuron", "noisy-max", "gaussian")
Floats = NDArray[np.float64]
Noise = Literal["gaussian", "laplace"]
Selection = Literal["exponential", "permute-and-flip"]


@dataclass(frozen=True, eq=False)
class Answers:
    """Released answers.

    Parameters
    ----------
    labels : ndarray of int, shape (queries,)
        The released labels.
    probabilities : ndarray of shape (queries, classes) or None
        The released probabilities; None if the mechanism releases labels only.
    """

    labels: NDArray[np.int64]
    probabilities: Floats | None


class Mechanism(Protocol):
    """The interface of a mechanism: it releases one randomised answer per query.

    Parameters of a mechanism are public constants. They may be left open; `prepared` fills them for a model and a cost
    per query and returns a mechanism that can release.
    """

    @property
    def name(self) -> str:
        """The name of the mechanism in commands and results."""
        ...

    @property
    def measure(self) -> Measure:
        """The privacy measure of its cost."""
        ...

    @property
    def analysis(self) -> Analysis:
        """How a budget becomes a total: ``"proven"``, or as the paper has it."""
        ...

    def prepared(self, model: Classifier, per_query: Cost) -> Mechanism:
        """Return the mechanism with every open parameter set.

        Parameters
        ----------
        model : Classifier
            The model whose scores will be released.
        per_query : PureCost or GaussianCost
            The largest cost of one query.
        """
        ...

    def cost(self, classes: int) -> Cost:
        """Return the cost of one query.

        Parameters
        ----------
        classes : int
            The number of classes.
        """
        ...

    def guarantee(self, classes: int) -> Guarantee:
        """Return what is claimed of one query's answer.

        Parameters
        ----------
        classes : int
            The number of classes.
        """
        ...

    def release(self, scores: Floats, source: NoiseSource) -> Answers:
        """Draw answers.

        Parameters
        ----------
        scores : ndarray of shape (queries, classes)
            The scores of the queries.
        source : NoiseSource
            Where the noise comes from.
        """
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
        """Return the scores that the mechanism sees, shape (queries, classes); all are finite.

        Parameters
        ----------
        features : ndarray of shape (queries, features)
            Rows of features, before the public feature map.

        Raises
        ------
        InvalidInput
            If the model cannot take the features, or a score is not finite and `non_finite` is ``"error"``.
        """
        mapped = features if self.features is None else self.features.transform(features)
        scores = self.model.scores(mapped)
        if self.non_finite == "undecided":
            scores = np.where(np.isfinite(scores).all(axis=1, keepdims=True), scores, 0.0)
        return checked_scores(scores)

    def release(self, scores: Floats) -> Answers:
        """Draw answers for scores.

        Parameters
        ----------
        scores : ndarray of shape (queries, classes)
            What `scores` returned.
        """
        return self.mechanism.release(scores, self.noise)

    def answer(self, features: NDArray[np.float32]) -> Answers:
        """Draw an answer for each row of features.

        Parameters
        ----------
        features : ndarray of shape (queries, features)
            Rows of features, before the public feature map.
        """
        return self.release(self.scores(features))


def plugin_mechanisms() -> Mapping[str, Mechanism]:
    """Return the mechanisms of installed plug-ins by name, with open parameters.

    Their guarantees are an assumption of the user: `quietmax.predictor.claimed` makes them conditional.
    """
    known = with_plugins(dict.fromkeys(_BUILT_IN), ENTRY_POINT_GROUP, _read_plugin)
    return {name: made for name, made in known.items() if made is not None}


def _read_plugin(name: str, loaded: Any) -> tuple[str, Mechanism]:
    """Return the mechanism of a plug-in, which has the name of its entry point."""
    made: Any = loaded()
    missing = [
        each
        for each in ("name", "measure", "analysis", "prepared", "cost", "guarantee", "release")
        if not hasattr(made, each)
    ]
    if missing:
        raise TypeError(f"a mechanism must have {missing[0]}")
    if made.name != name:
        raise ValueError(f"the `name` of the mechanism must be the name of the entry point, '{name}'")
    if not is_dataclass(type(made)):  # its repr tells what stored answers were drawn with
        raise TypeError("a mechanism must be a frozen dataclass")
    return name, made


def digest_text(mechanism: Mechanism) -> str:
    """Return the text that stands for a prepared mechanism in the digests of stored answers.

    It must not change between versions, or stored answers would be charged again: the field `analysis` keeps its name
    of version 0.1 here.
    """
    return repr(mechanism).replace(" analysis=", " reading=")


def releases_probabilities(mechanism: Mechanism, classes: int) -> bool:
    """Return whether a mechanism releases probabilities, or labels only; found by one draw for zero scores."""
    return mechanism.release(np.zeros((1, classes)), EXACT).probabilities is not None


def checked_scores(scores: Floats) -> Floats:
    """Return scores as float64 of shape (queries, classes), all finite."""
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] < 2:
        raise InvalidInput(
            f"Scores must have shape (queries, classes) with 2 or more classes, got {values.shape}."
        )
    if not np.isfinite(values).all():
        raise InvalidInput("Scores must be finite, got NaN or infinity. Nothing was released.")
    return values


@runtime_checkable
class Certified(Protocol):
    """A classifier that states bounds on its scores; `proves_bounds` registers the classes whose bounds are proven."""

    @property
    def bounds(self) -> ScoreBounds:
        """How far one record moves the scores of any query."""
        ...


_PROVES_BOUNDS: dict[type, Callable[[Any], bool]] = {}


def proves_bounds(model_class: type, when: Callable[[Any], bool]) -> None:
    """Register a class of this library whose bounds are proven.

    Bounds that any other class states, including subclasses, are an assumption, as if they were passed as an argument.
    """
    if not model_class.__module__.startswith("quietmax."):
        raise InvalidInput(
            f"Only classes of quietmax can prove bounds, got {model_class.__name__}. The bounds of other classes are "
            "assumptions."
        )
    _PROVES_BOUNDS[model_class] = when


class ProvenMechanism:
    """Base class of the mechanisms that have a proof.

    Subclasses are frozen dataclasses with the fields `bounds` and `per_query`, which may be None until `prepared` fills
    them. Only a mechanism that `prepared` returned knows whether the model certifies the bounds.
    """

    bounds: ScoreBounds | None
    per_query: Cost | None
    _certified = False

    @property
    def analysis(self) -> Analysis:
        """``"proven"``."""
        return "proven"

    def prepared(self, model: Classifier, per_query: Cost) -> Self:
        """Return the mechanism with the cost per query and the model's bounds filled in."""
        bounds, certified = _bounds_for(self.bounds, model)
        filled = replace(self, bounds=bounds, per_query=self.per_query or per_query)  # type: ignore[type-var]
        object.__setattr__(filled, "_certified", certified)
        filled._ready()
        return filled

    def cost(self, classes: int) -> Cost:  # noqa: ARG002
        """Return the cost per query; it does not depend on the number of classes."""
        return self._ready()[1]

    def _guarantee(self, because: str, parameters: Mapping[str, Any]) -> Guarantee:
        """Return a proven guarantee if the model certifies the bounds, else one that is conditional on them."""
        bounds, cost = self._ready()
        proven = Guarantee.of(
            cost,
            status="proven",
            because=because,
            parameters={**parameters, **bounds.to_json()},
            unit=bounds.unit,
        )
        if self._certified:
            return proven
        return proven.weakened(
            "conditional",
            f"{because} The bounds on the scores were stated, not proven by this library.",
            (
                f"One {bounds.unit} moves the scores of any query by at most {bounds.one.value:.6g} each and "
                f"{bounds.vector.value:.6g} together in L2.",
            ),
        )

    def _ready(self) -> tuple[ScoreBounds, Cost]:
        """Return bounds and cost; subclasses also check the measure of the cost."""
        if self.bounds is None or self.per_query is None:
            raise InvalidInput(
                f"{type(self).__name__} cannot release: bounds and per_query must be set. A Predictor sets them."
            )
        return self.bounds, self.per_query


def _bounds_for(given: ScoreBounds | None, model: Classifier) -> tuple[ScoreBounds, bool]:
    """Return the given bounds, else the model's own; and whether this library proves them for the model."""
    own = model.bounds if isinstance(model, Certified) else None
    proves = _PROVES_BOUNDS.get(type(model))
    proven = proves is not None and proves(model)
    if given is not None:
        # A subclass may compare as it likes.
        return given, proven and type(given) is ScoreBounds and given == own
    if own is not None:
        return own, proven
    raise InvalidInput(
        f"A model of type {type(model).__name__} has no certified bounds on its scores. Private heads and teachers "
        "have them; for any other model, bounds must be given."
    )


def selection_epsilon(cost: Cost, selection: Selection) -> float:
    """Return the largest epsilon of a choice that a cost pays for.

    Pure: epsilon itself. Gaussian: the inverse of the conversions of THEORY section 3, rounded down. The exponential
    mechanism has bounded range; permute-and-flip is only epsilon-private.
    """
    if isinstance(cost, PureCost):
        return cost.epsilon
    log_odds = float(log_ndtr(cost.mu / 2) - log_ndtr(-cost.mu / 2))
    convert = bounded_range_as_gaussian if selection == "exponential" else pure_as_gaussian
    epsilon = 2 * log_odds if selection == "exponential" else log_odds
    while convert(epsilon) > cost.mu:
        epsilon *= 1 - 2**-50
    return epsilon
