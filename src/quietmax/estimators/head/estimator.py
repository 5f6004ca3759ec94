"""What is claimed of a private head, computed from the public facts of its training and from nothing else.

`fit` and the opening of a model folder both call this, so a folder cannot claim what its facts do not support. The
facts are the ``parameters`` of the guarantee: method, release, loss, sizes, settings, the mu of each release and the
noise source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted, validate_data

from quietmax.accounting.budget import Budget
from quietmax.accounting.conversions import epsilon_of, mu_of, root_rounded_up
from quietmax.accounting.costs import GaussianCost
from quietmax.accounting.guarantee import Guarantee
from quietmax.errors import InvalidInput
from quietmax.estimators import validation as conditions
from quietmax.estimators.head import training as head_plan
from quietmax.estimators.head.exact_sums import GRID, Floats, Labels, Table
from quietmax.estimators.head.solver import (
    MeanCrossEntropy,
    Solution,
    Tilted,
    certifiable_tolerance,
    minimise,
)
from quietmax.estimators.head.training import (
    Allowance,
    centred,
    clipped_features,
    descend,
    gradient_sensitivity,
    released_centre,
    released_size,
)
from quietmax.estimators.head.weights import HeadWeights, PrivateHeadWeights
from quietmax.estimators.validation import (
    SETTINGS_PUBLIC,
    checked_records,
    checked_size,
    class_numbers,
    runs_own_code,
)
from quietmax.mechanisms.noisy_max import NoisyMax
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.generic import describe_map
from quietmax.noise.release import release_gaussian
from quietmax.noise.sources import EXACT, NoiseSource, SeededNoise
from quietmax.predictor import Predictor
from quietmax.sensitivity import certified
from quietmax.sensitivity.base import Sensitivity

Facts = Mapping[str, Any]


def weight_sensitivity(facts: Facts) -> Sensitivity:
    """How far one record moves what is released: a gradient sum, or the minimiser of the output method."""
    if facts["training_method"] == "gradient":
        coordinates = facts["classes"] * facts["dimension"]
        return certified.head_gradient(facts["max_grad_norm"], coordinates=coordinates, grid=GRID)
    return output_sensitivity(_objective(facts), facts["classes"], facts["tolerance"])


def output_sensitivity(objective: MeanCrossEntropy | Tilted, classes: int, tolerance: float) -> Sensitivity:
    """How far one record moves a minimiser that was found up to the tolerance."""
    if isinstance(objective, Tilted):
        return certified.head_tilted(
            alpha=objective.alpha,
            mass=objective.mass,
            regularisation=objective.regularisation,
            classes=classes,
            tolerance=tolerance,
        )
    return certified.head_output(
        regularisation=objective.regularisation, declared_size=objective.size, tolerance=tolerance
    )


def longest_weights(facts: Facts) -> float:
    """The public bound on the length of a minimiser that `head_solver.minimise` states."""
    objective = _objective(facts)
    longest = objective.longest(facts["classes"]) + float(facts["tolerance"]) / objective.regularisation
    return longest * (1 + 2.0**-40)


def weights_claim(facts: Facts, *, own_map: bool) -> Guarantee:
    """What is claimed of released weights."""
    releases, because = 1, f"Gaussian mechanism on a certified minimiser. {weight_sensitivity(facts).because}"
    if facts["training_method"] == "gradient":
        releases = facts["steps"]
        because = "Gaussian mechanisms on exact clipped gradient sums compose to mu (THEORY 3.1)."
    allowance = Allowance(facts["mu_size"], facts["mu_centring"], facts["mu_training"])
    before = [GaussianCost(mu).amount for mu in (allowance.size, allowance.centre) if mu is not None]
    squared = sum(before, releases * GaussianCost(allowance.per_step(releases)).amount)
    guarantee = _under_conditions(
        Guarantee.of(
            GaussianCost(root_rounded_up(squared)),
            status="proven",
            because=because,
            parameters=facts,
            assumptions=(SETTINGS_PUBLIC, *conditions.map_assumptions(facts["features"])),
        ),
        facts,
        own_map,
    )
    if facts["noise_source"] == EXACT.describe():
        return guarantee
    return guarantee.weakened(
        "conditional",
        f"{guarantee.because} The noise is seeded and in floating point, for experiments only (THEORY 3.5).",
        ("Nobody knows the seed, and nobody looks at the low digits of the weights.",),
    )


def query_claim(answers: Guarantee, facts: Facts, *, own_map: bool) -> Guarantee:
    """What is claimed of answers from weights that are not released; ``answers`` is what the predictor claims."""
    return _under_conditions(
        Guarantee.of(
            answers.cost,
            status=answers.status,
            because=answers.because,
            parameters={**answers.parameters, **facts},
            assumptions=(
                *answers.assumptions,
                SETTINGS_PUBLIC,
                *conditions.map_assumptions(facts["features"]),
            ),
        ),
        facts,
        own_map,
    )


def _objective(facts: Facts) -> MeanCrossEntropy | Tilted:
    if facts["loss"] == "convexified":
        return Tilted(facts["alpha"], facts["mass"], facts["regularisation"])
    return MeanCrossEntropy(facts["declared_size"], facts["regularisation"])


def _under_conditions(guarantee: Guarantee, facts: Facts, own_map: bool) -> Guarantee:
    """Conditional if it rests on the user's own code or on classes read off the labels."""
    if own_map:
        guarantee = conditions.weakened(guarantee, conditions.MAP)
    return (
        guarantee if facts["classes_declared"] is True else conditions.weakened(guarantee, conditions.CLASSES)
    )


Method = Literal["gradient", "output"]
Release = Literal["weights", "query"]
Loss = Literal["cross-entropy", "convexified"]


@dataclass(frozen=True, eq=False)
class _Prepared:
    """What every method starts from."""

    table: Table
    centre: Floats
    size: float
    allowance: Allowance | None
    source: NoiseSource


def _releases_weights(estimator: PrivateHead) -> bool:
    return estimator.release == "weights"


class PrivateHead(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Softmax regression on public features, (epsilon, delta)-private in one record added or removed.

    With `release="weights"` the weights are released once: they may be published, and predictions are
    unlimited. With `release="query"` (output method) nothing is released by training, and each of `queries`
    answers is pure epsilon/queries-private; only labels are given.

    Parameters
    ----------
    epsilon, delta : the guarantee; `mu` states it in the Gaussian measure instead.
    method : "gradient" (noisy full-batch steps) or "output" (noise on the certified minimiser).
    features : a map of `quietmax.models.features`, or "auto": wavelet scattering if `image_shape` (channels,
        height, width) is given, otherwise each record divided by its length together with a constant.
    classes : the public set of labels; if None it is read off `y` and the guarantee is conditional.
    declared_size : the public number of records, for the settings; it need not be the true one. If None, a
        noisy count is released first, for 1% of mu^2.
    centring : share of mu^2 spent on the mean of the features; 0 leaves centring out.
    radius : features are clipped to this length.
    loss : "cross-entropy", or "convexified" (output method) with its `alpha` and public `mass` (the size).
    steps, learning_rate, max_grad_norm, regularisation : override the defaults that `head_plan` computes from public numbers.
    random_state : None means exact noise from the operating system; anything else means seeded noise for
        experiments, and a conditional guarantee.

    Attributes
    ----------
    coef_ : the released weights (C, d + 1), the last column for the constant feature.
    centre_, size_ : the released mean of the features, and the size used.
    guarantee_ : what is claimed, budget_ : its (epsilon, delta). sensitivity_, plan_ : what the noise was made for.
    classes_, n_features_in_, feature_map_ : the labels, the number of columns and the map used.

    >>> X, y = np.array([[0.0, 1.0], [1.0, 0.0]] * 500), np.array([0, 1] * 500)
    >>> head = PrivateHead(epsilon=1.0, delta=1e-5, classes=(0, 1)).fit(X, y)
    >>> head.predict([[0.1, 0.9]]), head.guarantee_.status
    (array([0]), 'proven')
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        *,
        mu: float | None = None,
        method: Method = "gradient",
        features: FeatureMap | Literal["auto"] = "auto",
        image_shape: tuple[int, int, int] | None = None,
        classes: Sequence[Any] | None = None,
        declared_size: int | None = None,
        release: Release = "weights",
        queries: int = 1,
        centring: float = head_plan.CENTRING_SHARE,
        radius: float = 1.0,
        loss: Loss = "cross-entropy",
        alpha: float = 1.0,
        mass: float | None = None,
        steps: int | None = None,
        learning_rate: float | None = None,
        max_grad_norm: float | None = None,
        regularisation: float | None = None,
        random_state: Any = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.mu = mu
        self.method = method
        self.features = features
        self.image_shape = image_shape
        self.classes = classes
        self.declared_size = declared_size
        self.release = release
        self.queries = queries
        self.centring = centring
        self.radius = radius
        self.loss = loss
        self.alpha = alpha
        self.mass = mass
        self.steps = steps
        self.learning_rate = learning_rate
        self.max_grad_norm = max_grad_norm
        self.regularisation = regularisation
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike) -> PrivateHead:
        """Train and release."""
        self._check_settings()
        for stale in ("coef_", "predictor_"):
            self.__dict__.pop(stale, None)
        records, given = checked_records(self, X, y)
        self.classes_, labels = class_numbers(given, self.classes)
        self.feature_map_ = self._feature_map(records.shape[1])
        prepared = self._prepare(records, labels)
        self.size_, self.centre_, self.radius_ = prepared.size, prepared.centre, float(self.radius)
        self.budget_ = self._budget()
        if self.release == "query":
            self._fit_for_queries(prepared)
        elif self.method == "gradient":
            self._fit_by_gradient(prepared)
        else:
            self._fit_by_output(prepared)
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The most probable label of each record; with `release="query"` a private answer that is paid for."""
        features = self._public_features(X)
        numbers = self._answerer.predict(features)
        return np.asarray(self.classes_[numbers])

    @available_if(_releases_weights)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: ArrayLike) -> Floats:
        """Class probabilities from the released weights."""
        features = self._public_features(X)
        return self._released_weights.predict_proba(features)

    @available_if(_releases_weights)  # type: ignore[untyped-decorator]
    def decision_function(self, X: ArrayLike) -> Floats:
        """Logits from the released weights, (n, C); for two classes their difference, (n,)."""
        features = self._public_features(X)
        scores = self._released_weights.scores(features)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    @property
    def _released_weights(self) -> HeadWeights:
        return HeadWeights(self.coef_, self.centre_, head_plan.BIAS, self.radius_)

    @property
    def _answerer(self) -> HeadWeights | Predictor:
        return self.predictor_ if hasattr(self, "predictor_") else self._released_weights

    def _public_features(self, X: ArrayLike) -> NDArray[np.float32]:
        check_is_fitted(self)
        records = validate_data(self, X, dtype=np.float32, reset=False)
        return self.feature_map_.transform(records)

    def _feature_map(self, columns: int) -> FeatureMap:
        if isinstance(self.features, FeatureMap):
            return self.features
        return head_plan.default_features(columns, self.image_shape)

    def _prepare(self, records: NDArray[np.float32], labels: Labels) -> _Prepared:
        source: NoiseSource = EXACT
        if self.random_state is not None:
            source = SeededNoise(int(check_random_state(self.random_state).randint(2**31 - 1)))
        allowance = None if self.release == "query" else self._allowance()
        rows = clipped_features(self.feature_map_, records, float(self.radius))
        size = float(self.declared_size or len(records))
        centre = np.zeros(rows.shape[1] - 1)
        if allowance is not None and allowance.size is not None:
            size = released_size(len(records), allowance.size, source)
        if allowance is not None and allowance.centre is not None:
            centre = released_centre(rows, size, allowance.centre, source)
        table = Table(centred(rows, centre, head_plan.BIAS), labels, len(self.classes_))
        return _Prepared(table, centre, size, allowance, source)

    def _budget(self) -> Budget:
        """What all answers together cost as (epsilon, delta), also where mu states it."""
        if self.release == "query":
            return Budget(self.epsilon, 0.0, self.queries)
        epsilon = self.epsilon if self.mu is None else epsilon_of(float(self.mu), self.delta)
        return Budget(epsilon, self.delta)

    def _allowance(self) -> Allowance:
        mu = mu_of(self.epsilon, self.delta) if self.mu is None else float(self.mu)
        return Allowance.of(mu, head_plan.SIZE_SHARE if self.declared_size is None else 0.0, self.centring)

    def _fit_by_gradient(self, prepared: _Prepared) -> None:
        table, allowance = prepared.table, prepared.allowance
        assert allowance is not None
        plan = head_plan.gradient_plan(
            prepared.size,
            table.features,
            table.classes,
            allowance.training,
            steps=self.steps,
            learning_rate=self.learning_rate,
            max_grad_norm=self.max_grad_norm,
        )
        self.plan_: head_plan.GradientPlan | head_plan.OutputPlan = plan
        self.sensitivity_ = gradient_sensitivity(table, plan)
        self.coef_ = descend(table, plan, prepared.size, allowance.training, prepared.source)
        self.guarantee_ = weights_claim(self._facts(prepared), own_map=runs_own_code(self.feature_map_))

    def _fit_by_output(self, prepared: _Prepared) -> None:
        allowance = prepared.allowance
        assert allowance is not None
        solution = self._minimised(prepared, allowance.training, head_plan.OUTPUT_NOISE)
        noisy = release_gaussian(
            solution.weights,
            sensitivity=self.sensitivity_.value,
            mu=allowance.training,
            source=prepared.source,
        ).values
        self.coef_ = noisy - noisy.mean(axis=0)
        self.guarantee_ = weights_claim(self._facts(prepared), own_map=runs_own_code(self.feature_map_))

    def _fit_for_queries(self, prepared: _Prepared) -> None:
        solution = self._minimised(prepared, float(self.epsilon) / int(self.queries), head_plan.QUERY_NOISE)
        weights = PrivateHeadWeights.certified(
            HeadWeights(solution.weights, self.centre_, head_plan.BIAS, self.radius_),
            self.sensitivity_,
            longest=solution.longest,
        )
        mechanism = NoisyMax("permute-and-flip")
        self.predictor_ = Predictor(weights, mechanism, self.budget_, noise=prepared.source)
        self.guarantee_ = query_claim(
            self.predictor_.guarantee, self._facts(prepared), own_map=runs_own_code(self.feature_map_)
        )

    def _minimised(self, prepared: _Prepared, strength: float, noise: float) -> Solution:
        """Solve, and set the certified sensitivity of the solution; all but the solving knows public numbers only."""
        table = prepared.table
        plan = head_plan.output_plan(prepared.size, strength, noise=noise, regularisation=self.regularisation)
        objective: MeanCrossEntropy | Tilted = MeanCrossEntropy(prepared.size, plan.regularisation)
        wanted = plan.tolerance
        if self.loss == "convexified":
            objective = Tilted(float(self.alpha), float(self.mass or prepared.size), plan.regularisation)
            wanted = head_plan.TILTED_TOLERANCE
        tolerance = certifiable_tolerance(objective, table.features, table.classes, wanted)
        self.sensitivity_ = output_sensitivity(objective, table.classes, tolerance)
        self.plan_ = head_plan.OutputPlan(plan.regularisation, tolerance)
        return minimise(table, objective, tolerance)

    def _facts(self, prepared: _Prepared) -> dict[str, Any]:
        """Every public number of the training, by name: what `head_claim` computes the guarantee from."""
        parameters: dict[str, Any] = {
            "estimator": "head",
            "training_method": self.method,
            "release": self.release,
            "loss": self.loss,
            "features": describe_map(self.feature_map_),
            "dimension": prepared.table.features,
            "classes": prepared.table.classes,
            "classes_declared": self.classes is not None,
            "declared_size": prepared.size,
            "size_from": "noisy count" if self.declared_size is None else "declared",
            "radius": self.radius_,
            "bias": head_plan.BIAS,
            "sensitivity": self.sensitivity_.value,
            "noise_source": prepared.source.describe(),
            **self.plan_.to_json(),
        }
        if prepared.allowance is not None:
            parameters["mu_size"] = prepared.allowance.size
            parameters["mu_centring"] = prepared.allowance.centre
            parameters["mu_training"] = prepared.allowance.training
        if self.loss == "convexified":
            parameters |= {"alpha": float(self.alpha), "mass": float(self.mass or prepared.size)}
        return parameters

    def _check_settings(self) -> None:
        """Refuse settings that make no sense; none of this looks at the records."""
        words: dict[str, tuple[Any, tuple[str, ...]]] = {
            "method": (self.method, ("gradient", "output")),
            "release": (self.release, ("weights", "query")),
            "loss": (self.loss, ("cross-entropy", "convexified")),
        }
        for name, (word, allowed) in words.items():
            if word not in allowed:
                raise InvalidInput(
                    f"The {name} is {word!r}, but must be one of {', '.join(allowed)}; choose one."
                )
        if not (isinstance(self.features, FeatureMap) or self.features == "auto"):
            raise InvalidInput(
                f"The features are {self.features!r}, but must be 'auto' or a quietmax.models.features map; give one."
            )
        if self.release == "query" and (self.method != "output" or self.declared_size is None):
            raise InvalidInput(
                "Answers per query need the output method and a declared size; set method='output' and declared_size."
            )
        if self.release == "query" and self.mu is not None:
            raise InvalidInput("Answers per query are pure and cost epsilon; leave mu out.")
        if self.loss == "convexified" and self.method != "output":
            raise InvalidInput(
                "The convexified loss is certified for the output method only; set method='output'."
            )
        if not 0.0 <= self.centring < 1.0 - head_plan.SIZE_SHARE:
            raise InvalidInput(
                f"The centring share is {self.centring}, but must be from 0 to below 0.99; give such a share."
            )
        if self.declared_size is not None:
            checked_size(self.declared_size)
        positive = {
            "mu": self.mu,
            "queries": self.queries,
            "radius": self.radius,
            "alpha": self.alpha,
            "mass": self.mass,
            "steps": self.steps,
            "learning_rate": self.learning_rate,
            "max_grad_norm": self.max_grad_norm,
            "regularisation": self.regularisation,
        }
        for name, value in positive.items():
            if value is not None and not 0.0 < value < math.inf:
                raise InvalidInput(
                    f"The setting {name} is {value!r}, but must be a positive number; give one."
                )
