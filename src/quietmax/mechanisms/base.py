"""Mechanisms turn a model's scores into randomised answers; `Answerer` is the whole path from features to answers.

The mechanisms of this module are proven (THEORY 3.3, 3.4); `algorithm1` is the paper's. Another package adds a
mechanism as an entry point in the group `quietmax.mechanisms`: a frozen dataclass whose parameters all have defaults,
or a function without parameters that returns one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, log_ndtr, logsumexp

from quietmax._before_noise import is_own_class
from quietmax._lazy import with_plugins
from quietmax.accounting.costs import (
    Analysis,
    Budget,
    Cost,
    GaussianCost,
    Measure,
    PureCost,
    bounded_range_as_gaussian,
    cost_of,
    per_query,
    pure_as_gaussian,
)
from quietmax.accounting.guarantee import Guarantee
from quietmax.errors import InvalidInput
from quietmax.models.features.base import FeatureMap
from quietmax.models.training import Classifier, softmax
from quietmax.noise.release import NoisyValues, choose, permute_and_flip, release_gaussian, release_laplace
from quietmax.noise.sources import EXACT, NoiseSource
from quietmax.sensitivity.certified import ScoreBounds

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
        """Return the mechanism with every open parameter set for a model and the largest cost of one query."""
        ...

    def cost(self, classes: int) -> Cost:
        """Return the cost of one query."""
        ...

    def guarantee(self, classes: int) -> Guarantee:
        """Return what is claimed of one query's answer."""
        ...

    def release(self, scores: Floats, source: NoiseSource) -> Answers:
        """Draw answers for scores of shape (queries, classes)."""
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
    features : FeatureMap or None
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
    features: FeatureMap | None = None
    non_finite: Literal["error", "undecided"] = "error"

    @classmethod
    def prepare(
        cls, model: Classifier, mechanism: Mechanism, budget: Budget, *, noise: NoiseSource = EXACT
    ) -> Answerer:
        """Prepare a mechanism so that one answer costs the budget's share per query.

        The mechanism may have open parameters. A budget without a number of queries is for one query. The result
        answers any number of queries; nothing is charged.
        """
        one = per_query(budget, mechanism.measure, mechanism.analysis)
        return cls(model, mechanism.prepared(model, one), noise)

    @property
    def cost(self) -> Cost:
        """The cost of one answer."""
        return self.mechanism.cost(self.model.classes)

    def scores(self, features: NDArray[np.float32]) -> Floats:
        """Return the scores that the mechanism sees, shape (queries, classes); all are finite."""
        mapped = features if self.features is None else self.features.transform(features)
        scores = self.model.scores(mapped)
        if self.non_finite == "undecided":
            scores = np.where(np.isfinite(scores).all(axis=1, keepdims=True), scores, 0.0)
        return _checked_scores(scores)

    def release(self, scores: Floats) -> Answers:
        """Draw answers for what `scores` returned."""
        return self.mechanism.release(scores, self.noise)

    def answer(self, features: NDArray[np.float32]) -> Answers:
        """Draw an answer for each row of features."""
        return self.release(self.scores(features))


def plugin_mechanisms() -> Mapping[str, Mechanism]:
    """Return the mechanisms of installed plug-ins by name, with open parameters; their guarantees are conditional."""
    known = with_plugins(dict.fromkeys(_BUILT_IN), "quietmax.mechanisms", _read_plugin)
    return {name: made for name, made in known.items() if made is not None}


def _read_plugin(name: str, loaded: Any) -> tuple[str, Mechanism]:
    made: Any = loaded()
    for each in ("name", "measure", "analysis", "prepared", "cost", "guarantee", "release"):
        if not hasattr(made, each):
            raise TypeError(f"a mechanism must have {each}")
    if made.name != name:
        raise ValueError(f"the `name` of the mechanism must be the name of the entry point, '{name}'")
    if not is_dataclass(type(made)):  # its repr tells what stored answers were drawn with
        raise TypeError("a mechanism must be a frozen dataclass")
    return name, made


def digest_text(mechanism: Mechanism) -> str:
    """Return the text of a mechanism in stored digests. It must never change: `analysis` keeps its name of 0.1."""
    return repr(mechanism).replace(" analysis=", " reading=")


def releases_probabilities(mechanism: Mechanism, classes: int) -> bool:
    """Return whether a mechanism releases probabilities, or labels only; found by one draw for zero scores."""
    return mechanism.release(np.zeros((1, classes)), EXACT).probabilities is not None


def _checked_scores(scores: Floats) -> Floats:
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
    """Register a class of this library whose bounds are proven; those of all others are an assumption."""
    if not is_own_class(model_class):
        raise InvalidInput(
            f"Only classes of quietmax can prove bounds, got {model_class.__name__}. The bounds of other classes are "
            "assumptions."
        )
    _PROVES_BOUNDS[model_class] = when


class ProvenMechanism:
    """Base class of the mechanisms that have a proof: frozen dataclasses, complete once `prepared` has filled them."""

    name: ClassVar[str]
    analysis: ClassVar[Analysis] = "proven"
    bounds: ScoreBounds | None
    per_query: Cost | None
    _noise_field: ClassVar[str]  # Names the noise that is added to scores; the cost must be in its measure
    _certified = False

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
        if self.bounds is None or self.per_query is None:
            raise InvalidInput(
                f"{type(self).__name__} cannot release: bounds and per_query must be set. A Predictor sets them."
            )
        noise = getattr(self, self._noise_field)
        wanted = {"laplace": PureCost, "gaussian": GaussianCost}.get(noise)
        if wanted is not None and not isinstance(self.per_query, wanted):
            raise InvalidInput(
                f"per_query must be a {wanted.__name__} for {noise} noise, got a {type(self.per_query).__name__}."
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


def _check_name(mechanism: object, field: str, valid: tuple[str, ...]) -> None:
    if (given := getattr(mechanism, field)) not in valid:
        named = ", ".join(f"'{each}'" for each in valid[:-1])
        raise InvalidInput(f"{field} must be {named} or '{valid[-1]}', got {given!r}.")


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


def _noised(
    values: Floats, cost: Cost, sensitivity: float, source: NoiseSource, *, coordinates: int
) -> NoisyValues:
    """Add the noise that a cost pays for: Laplace noise for a pure cost, Gaussian noise for a Gaussian one."""
    if isinstance(cost, PureCost):
        return release_laplace(
            values, sensitivity=sensitivity, epsilon=cost.epsilon, source=source, coordinates=coordinates
        )
    return release_gaussian(
        values, sensitivity=sensitivity, mu=cost.mu, source=source, coordinates=coordinates
    )


def _chosen(
    scores: Floats, cost: Cost, selection: Selection, spread: float, source: NoiseSource
) -> NDArray[np.int64]:
    """Choose a label of each row by its scores, of which no difference moves further than the spread."""
    pick = choose if selection == "exponential" else permute_and_flip
    epsilon = selection_epsilon(cost, selection)
    return pick(scores, epsilon=epsilon, range_sensitivity=spread, source=source)


@dataclass(frozen=True)
class NoisyMax(ProvenMechanism):
    """Release a label alone.

    Parameters
    ----------
    method : {"exponential", "gaussian", "permute-and-flip"}
        ``"gaussian"``: the largest score after Gaussian noise on all of them, ``mu = D_2/sigma``. ``"exponential"``:
        label v with probability proportional to ``exp(eps*z_v/spread)``. ``"permute-and-flip"``: never worse in
        expected score at equal pure epsilon.
    count_in : {"pure", "gaussian"} or None
        The privacy measure of the cost. By default Gaussian for Gaussian noise and pure otherwise.
    bounds, per_query
        How far one record moves the scores, and the cost of one answer. By default the model's own certified bounds,
        and the share of the budget.

    Examples
    --------
    >>> from quietmax.accounting import PureCost
    >>> from quietmax.noise import SeededNoise
    >>> from quietmax.sensitivity import ScoreBounds, Sensitivity
    >>> one = Sensitivity(1.0, "certified", "One record changes one vote.")
    >>> votes = NoisyMax(bounds=ScoreBounds(one, one), per_query=PureCost(1.0))
    >>> votes.release(np.array([[0.0, 90.0, 10.0]]), SeededNoise(0)).labels
    array([1])
    """

    name: ClassVar[str] = "noisy-max"
    _noise_field: ClassVar[str] = "method"
    method: Literal["gaussian", "exponential", "permute-and-flip"] = "exponential"
    count_in: Measure | None = None
    bounds: ScoreBounds | None = None
    per_query: Cost | None = None

    def __post_init__(self) -> None:
        _check_name(self, "method", ("exponential", "gaussian", "permute-and-flip"))
        if self.method == "gaussian" and self.count_in == "pure":
            raise InvalidInput("count_in must be 'gaussian' or None with method='gaussian', got 'pure'.")

    @property
    def measure(self) -> Measure:
        """`count_in`; by default Gaussian for Gaussian noise and pure for a choice."""
        return self.count_in or ("gaussian" if self.method == "gaussian" else "pure")

    def guarantee(self, classes: int) -> Guarantee:
        """Return a proven guarantee if the model certifies the bounds, else a conditional one."""
        spread = "on the scores, whose differences move by at most the spread (THEORY 3.3)."
        because = {
            "gaussian": "Gaussian mechanism on all scores, then post-processing (THEORY 3.4).",
            "exponential": f"Exponential mechanism {spread}",
            "permute-and-flip": f"Permute-and-flip {spread}",
        }
        return self._guarantee(
            because[self.method],
            {"mechanism": self.name, "method": self.method, "classes": classes, "releases": "label"},
        )

    def release(self, scores: Floats, source: NoiseSource) -> Answers:
        """Draw labels."""
        bounds, cost = self._ready()
        values = _checked_scores(scores)
        if self.method == "gaussian":
            noisy = _noised(values, cost, bounds.vector.value, source, coordinates=values.shape[1]).values
            return Answers(noisy.argmax(-1), None)
        return Answers(_chosen(values, cost, self.method, bounds.spread, source), None)


@dataclass(frozen=True)
class GaussianScores(ProvenMechanism):
    """Release all scores with noise ``N(0, (D_2/mu)^2)`` each, as probabilities.

    Parameters
    ----------
    votes : int or None
        None: the scores are logits and go through the softmax. Otherwise the scores are votes that add up to this
        number; they are divided by it and projected onto the probability simplex.
    bounds, per_query
        As for `NoisyMax`; the cost is a `GaussianCost`.

    Examples
    --------
    >>> from quietmax.noise import SeededNoise
    >>> from quietmax.sensitivity import ScoreBounds, Sensitivity
    >>> one = Sensitivity(1.0, "certified", "One record changes one vote.")
    >>> votes = GaussianScores(votes=100, bounds=ScoreBounds(one, one), per_query=GaussianCost(1e3))
    >>> votes.release(np.array([[0.0, 90.0, 10.0]]), SeededNoise(0)).probabilities.round(2)
    array([[0. , 0.9, 0.1]])
    """

    name: ClassVar[str] = "gaussian"
    measure: ClassVar[Measure] = "gaussian"
    _noise_field: ClassVar[str] = "measure"
    votes: int | None = None
    bounds: ScoreBounds | None = None
    per_query: Cost | None = None

    def guarantee(self, classes: int) -> Guarantee:
        """Return a proven guarantee if the model certifies the bounds, else a conditional one."""
        return self._guarantee(
            "Gaussian mechanism on all scores, then post-processing (THEORY 3.4).",
            {"mechanism": self.name, "classes": classes, "releases": "probabilities"},
        )

    def release(self, scores: Floats, source: NoiseSource) -> Answers:
        """Draw probabilities."""
        bounds, cost = self._ready()
        values = _checked_scores(scores)
        noisy = _noised(values, cost, bounds.vector.value, source, coordinates=values.shape[1]).values
        probabilities = softmax(noisy) if self.votes is None else _onto_simplex(noisy / self.votes)
        return Answers(noisy.argmax(-1), probabilities)


def _onto_simplex(points: Floats) -> Floats:
    """Return the nearest probability vectors in L2 (Held, Wolfe and Crowder 1974)."""
    ordered = -np.sort(-points, axis=1)
    excess = np.cumsum(ordered, axis=1) - 1
    rank = np.arange(1, points.shape[1] + 1)
    kept = np.count_nonzero(ordered * rank > excess, axis=1)
    shift = excess[np.arange(len(points)), kept - 1] / kept
    return np.asarray(np.maximum(points - shift[:, None], 0.0))


@dataclass(frozen=True)
class SampledNeuron(ProvenMechanism):
    """Release a label and its probability.

    With two classes there is no choice: the log-odds of class 1 get the whole budget.

    Parameters
    ----------
    noise : {"laplace", "gaussian"}
        The noise on the log-odds. Laplace noise is counted in the pure measure, Gaussian noise in the Gaussian one.
    selection : {"exponential", "permute-and-flip"}
        How the label is chosen.
    sampling_share : float
        The share of the budget (of epsilon, or of mu^2) that pays for the choice; between 0 and 1, exclusive.
    bounds, per_query
        As for `NoisyMax`.

    Examples
    --------
    >>> from quietmax.noise import SeededNoise
    >>> from quietmax.sensitivity import ScoreBounds, Sensitivity
    >>> one = Sensitivity(0.1, "certified", "THEORY 3.1")
    >>> neuron = SampledNeuron(bounds=ScoreBounds(one, one), per_query=PureCost(10.0))
    >>> neuron.release(np.array([[0.0, 9.0, 1.0]]), SeededNoise(0)).labels
    array([1])
    """

    name: ClassVar[str] = "sampled-neuron"
    _noise_field: ClassVar[str] = "noise"
    noise: Noise = "laplace"
    selection: Selection = "exponential"
    sampling_share: float = 0.75
    bounds: ScoreBounds | None = None
    per_query: Cost | None = None

    def __post_init__(self) -> None:
        _check_name(self, "noise", ("laplace", "gaussian"))
        _check_name(self, "selection", ("exponential", "permute-and-flip"))
        if not 0 < self.sampling_share < 1:
            raise InvalidInput(
                f"sampling_share must be between 0 and 1, exclusive, got {self.sampling_share}."
            )

    @property
    def measure(self) -> Measure:
        """Pure for Laplace noise, Gaussian for Gaussian noise."""
        return "pure" if self.noise == "laplace" else "gaussian"

    def guarantee(self, classes: int) -> Guarantee:
        """Return a proven guarantee if the model certifies the bounds, else a conditional one."""
        parameters: dict[str, Any] = {
            "mechanism": self.name,
            "noise": self.noise,
            "selection": "none" if classes == 2 else self.selection,
            "sampling_share": 0.0 if classes == 2 else self.sampling_share,
            "classes": classes,
            "releases": "label and its probability",
        }
        return self._guarantee(
            "A label chosen by the exponential mechanism or permute-and-flip, then its noised log-odds; "
            "both move by at most the spread of the certified bounds (THEORY 3.3).",
            parameters,
        )

    def release(self, scores: Floats, source: NoiseSource) -> Answers:
        """Draw labels and probabilities."""
        bounds, cost = self._ready()
        # The slack covers the rounding of differences in float64, given that no logit exceeds 2^24 spreads.
        spread = bounds.spread * (1 + 2**-20)
        logits = np.clip(_checked_scores(scores), -bounds.spread * 2**24, bounds.spread * 2**24)
        queries, classes = logits.shape
        if classes == 2:
            odds = _noised(logits[:, 1] - logits[:, 0], cost, spread, source, coordinates=1).values
            second = expit(odds)
            return Answers((odds > 0).astype(np.int64), np.stack([1 - second, second], axis=1))
        for_choice, for_odds = self._shares(cost)
        chosen = _chosen(logits, for_choice, self.selection, spread, source)
        query = np.arange(queries)
        others = logits.copy()
        others[query, chosen] = -np.inf
        # The logarithm of a sum of exponentials is off by a few units of 2^-53 per class, however small the spread is.
        rounding = (classes + 8) * 2.0**-49
        odds = logits[query, chosen] - logsumexp(others, axis=1)
        odds = _noised(odds, for_odds, spread + rounding, source, coordinates=1).values
        # Post-processing: the chosen label gets at least 1/C, so noise cannot flip it; the others share the rest.
        winning = np.maximum(expit(odds), 1 / classes)
        each_other = np.minimum((1 - winning) / (classes - 1), winning)
        probabilities = np.repeat(each_other[:, None], classes, axis=1)
        probabilities[query, chosen] = winning
        return Answers(chosen, probabilities)

    def _shares(self, cost: Cost) -> tuple[Cost, Cost]:
        """Divide the cost (epsilon, or mu^2) into two parts that add up to no more than it."""
        share = self.sampling_share
        first: Cost
        if isinstance(cost, PureCost):
            first = PureCost(share * cost.epsilon)
        else:
            first = GaussianCost(math.sqrt(share) * cost.mu)
        return first, cost_of(cost.measure, cost.amount - first.amount, up=False)
