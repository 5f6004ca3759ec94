"""PrivateHead: differentially private softmax regression on public features, and what is guaranteed of it.

`PrivateHead.fit` does, in this order: a noisy count, features of each record alone (`training.clipped_features`), a
noisy centre and noisy second moments, then the gradient method (`training.descend`) or the output method
(`solver.minimise`), and last the guarantee. Every row of a person with k rows counts 1/k. The guarantee is computed
from the public facts of the training alone. Opening a model folder computes it again from the stored facts, so a folder
cannot claim more than they support.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from quietmax._ray import RayEngine
from quietmax.accounting.costs import Budget, epsilon_of, mu_of
from quietmax.accounting.guarantee import Guarantee
from quietmax.data.schema import Schema
from quietmax.errors import InvalidData, InvalidInput
from quietmax.estimators.base import PrivateClassifier, documented
from quietmax.estimators.blocks import (
    FILES_IN_MEMORY,
    Blocks,
    Floats,
    LocalEngine,
    Table,
    block_rows,
    person_digests,
)
from quietmax.estimators.head.exact_sums import gradient_grid, whitening_on_grid
from quietmax.estimators.head.solver import (
    MeanCrossEntropy,
    Tilted,
    certifiable_tolerance,
    max_solution_norm,
    minimise,
    output_sensitivity,
)
from quietmax.estimators.head.training import (
    BIAS,
    OUTPUT_NOISE,
    QUERY_NOISE,
    SIZE_SHARE,
    TILTED_TOLERANCE,
    Allowance,
    GradientPlan,
    HeadSettings,
    OutputPlan,
    centred,
    clipped_features,
    default_features,
    descend,
    gradient_plan,
    gradient_sensitivity,
    moments_share,
    output_plan,
    released_centre,
    released_moments,
    released_size,
    whitened,
    whitening_kind,
    whitening_matrix,
)
from quietmax.estimators.head.weights import (
    HeadWeights,
    PrivateHeadWeights,
    query_guarantee,
    weights_guarantee,
)
from quietmax.estimators.ray_blocks import RayBlocks, chosen_engine
from quietmax.estimators.training_set import (
    NOBODY,
    ImageShape,
    TrainingRows,
    check_choice,
    check_positive,
    checked_size,
    runs_own_code,
)
from quietmax.mechanisms.base import NoisyMax
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.generic import describe_map
from quietmax.models.features.tabular import TableFeatures, table_features
from quietmax.noise.release import release_gaussian
from quietmax.noise.sources import EXACT, NoiseSource, SeededNoise
from quietmax.predictor import Predictor

TrainingMethod = Literal["gradient", "output"]
_MOST_PREPARING, _USUAL_STEPS = 5, 40
"""For the time left: passes before the weights (features, centre, centring, moments, whitening), and for them."""


@documented
class PrivateHead(PrivateClassifier):
    """Differentially private softmax regression on public features.

    The guarantee holds for one record added or removed; with ``groups``, or a `person` column in the schema, for one
    person with all their rows (THEORY 3.7). With ``release="weights"`` training releases the weights: they
    may be published, and any number of predictions is free. With ``release="query"`` training releases nothing, and
    each of ``queries`` answers is a label that is pure epsilon/queries-private.

    Parameters
    ----------
    epsilon : float, default=1.0
        epsilon of the whole training, or of all answers together with ``release="query"``.
    delta : float, default=1e-5
        delta of the whole training; answers per query are pure and do not use it.
    mu : float, optional
        States the budget as mu of Gaussian differential privacy instead of (epsilon, delta).
    method : {"gradient", "output"}, optional
        "gradient": noisy full-batch gradient steps. "output": noise on a certified minimiser. By default "gradient" if
        the weights are released and "output" if they are not.
    features : FeatureMap or {"auto", "identity", "unit-norm", "scattering", "embedding"}, default="auto"
        The public feature map. "auto": `image_features` if ``image_shape`` is given, for a table with a schema
        `table_features`, otherwise each record divided by its length together with a constant.
    declared_size : int, optional
        The public number of records, or of persons with ``groups``. The settings are computed from it; it need not be
        the true one. If None, a noisy count is released for 1% of mu^2. Required with ``release="query"``.
    release : {"weights", "query"}, default="weights"
        What leaves the estimator: the weights once, or one label per query.
    queries : int, default=1
        Number of answers that the budget pays for, with ``release="query"``.
    settings : HeadSettings, optional
        How it is trained: loss, steps, clipping, and what of the budget is spent on the mean and the second moments of
        the features.
    $shared_parameters
    engine : LocalEngine, RayEngine, "local" or "ray", default="local"
        Where the rows are kept while a head is trained, and what reports progress: this process, or the workers of a
        Ray cluster. The gradient method gives the same weights, bit for bit, whatever the engine.

    Attributes
    ----------
    coef_ : array of shape (classes, features + 1)
        The released weights; the last column is for the constant feature. Absent with ``release="query"``.
    centre_ : array of shape (features,)
        The released mean of the features.
    whitening_ : array of shape (features + 1, features + 1) or (features + 1,), or None
        What the centred features are multiplied by: a matrix computed from the released second moments, or, for
        features of tables, a diagonal one computed from the released mean. None if neither is used.
    size_ : float
        The number of records or persons that the settings were computed from: declared, or a noisy count.
    budget_ : Budget
        The guarantee's (epsilon, delta).
    sensitivity_ : Sensitivity
        How far one record or person moves what the noise is added to.
    plan_ : GradientPlan or OutputPlan
        The settings of the training method.
    predictor_ : Predictor
        Answers queries and pays for them. Only with ``release="query"``.
    $shared_attributes

    Examples
    --------
    >>> X, y = np.array([[0.0, 1.0], [1.0, 0.0]] * 500), np.array([0, 1] * 500)
    >>> head = PrivateHead(epsilon=1.0, delta=1e-5, classes=(0, 1)).fit(X, y)
    >>> head.predict([[0.1, 0.9]]), head.guarantee_.status
    (array([0]), 'proven')
    """

    _dtypes = (np.float32, np.float64)

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        *,
        mu: float | None = None,
        method: TrainingMethod | None = None,
        features: FeatureMap | str = "auto",
        image_shape: ImageShape | None = None,
        classes: Sequence[Any] | None = None,
        declared_size: int | None = None,
        release: Literal["weights", "query"] = "weights",
        queries: int = 1,
        settings: HeadSettings | None = None,
        random_state: Any = None,
        schema: Schema | None = None,
        engine: LocalEngine | RayEngine | Literal["local", "ray"] = "local",
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
        self.settings = settings
        self.random_state = random_state
        self.schema = schema
        self.engine = engine

    def _train(self, data: TrainingRows) -> Guarantee:
        """Make all releases, and compute what is guaranteed of them from public facts alone."""
        self.budget_ = self._budget()
        seed = self._seed()
        source = EXACT if seed is None else SeededNoise(seed)
        with self._read(data) as table:
            allowance = self._make_releases(data, table, source)
            facts = self._facts(data, table, allowance, source)
        own_map = runs_own_code(self.feature_map_)
        if self.release == "weights":
            return weights_guarantee(facts, own_map=own_map, encoding=data.encoding)
        answers = self.predictor_.guarantee
        return query_guarantee(answers, facts, own_map=own_map, encoding=data.encoding)

    def _read(self, data: TrainingRows) -> Blocks:
        """Read and encode all rows. Whatever is wrong with them is found here, before any noise is drawn."""
        engine = chosen_engine(self.engine)
        key = secrets.token_bytes(16)
        classes = len(self.classes_)

        def tables() -> Iterator[Table]:
            for piece in data.pieces:
                persons = None if piece.persons is None else person_digests(piece.persons, key)
                yield Table(piece.records, piece.labels, classes, persons=persons)

        table = (
            RayBlocks(classes, engine)
            if isinstance(engine, RayEngine)
            else Blocks(classes, engine, None if data.in_memory else FILES_IN_MEMORY)
        )
        if data.count:
            table.expect(1 + _MOST_PREPARING + (self._settings.steps or _USUAL_STEPS), data.count)
        try:
            table.reserve(data.count, data.columns)
            if data.source is not None:
                table.read(data.source, key)
            else:
                table.extend(tables())
            if not len(table):
                raise InvalidData(NOBODY)
            if data.unit == "person":
                table.count_persons()
        except BaseException:
            table.close()
            raise
        return table

    def _make_releases(self, data: TrainingRows, table: Blocks, source: NoiseSource) -> Allowance:
        """Make all releases, in a fixed order; return how mu was divided among them."""
        # The number of records or persons: declared, or a small release. Then everything that depends on it.
        self.size_ = self._released_size(table, source)
        self.feature_map_ = self._feature_map(data, self.size_)
        self.radius_ = float(self._settings.radius)
        allowance = self._allowance(self.feature_map_.dimension(data.columns) + 1)

        table.expect(_MOST_PREPARING + (self._settings.steps or _USUAL_STEPS))

        # Each record alone: public features of length at most 1, as exact numbers.
        table.reserve(len(table), self.feature_map_.dimension(data.columns) + 1)
        table.update(partial(_with_features, self.feature_map_, self.radius_))

        # Two releases that make the features easier to learn from: their mean and their second moments.
        self.centre_: Floats = (
            np.zeros(table.features - 1)
            if allowance.centre is None
            else released_centre(table, self.size_, allowance.centre, source)
        )
        table.update(partial(_with_rows, centred, self.centre_))
        self.whitening_ = self._whitening(table, allowance, source)
        if self.whitening_ is not None:
            table.update(partial(_with_rows, whitened, self.whitening_))

        # The weights: released with noise, or kept and asked through a mechanism that charges for every answer.
        if self.release == "query":
            self._fit_for_queries(table, source)
        elif self._training_method == "gradient":
            self._fit_by_gradient(table, allowance.training, source)
        else:
            self._fit_by_output(table, allowance.training, source)
        return allowance

    def _whitening(self, table: Blocks, allowance: Allowance, source: NoiseSource) -> Floats | None:
        """Return what the rows are whitened by: second moments, released now, or the centre; None for nothing."""
        if allowance.moments is not None:
            moments = released_moments(table, self.size_, allowance.moments, source)
            return whitening_matrix(moments, self.size_, allowance.moments)
        table_map = self._table_map
        if table_map is not None and allowance.centre is not None:
            scale = table_map.scale(self.centre_, 1.0 / (allowance.centre * self.size_))
            return whitening_on_grid(np.append(scale, 1.0))
        return None

    @property
    def _table_map(self) -> TableFeatures | None:
        """The feature map, if the gradient method sees features of a table, which are mostly indicators."""
        by_gradient = self._training_method == "gradient"
        return self.feature_map_ if by_gradient and isinstance(self.feature_map_, TableFeatures) else None

    def _fit_by_gradient(self, table: Blocks, mu: float, source: NoiseSource) -> None:
        """Release every clipped gradient sum with noise, and step along it."""
        plan = gradient_plan(
            self.size_,
            table.features,
            mu,
            whitening=whitening_kind(self.whitening_),
            settings=self._settings,
        )
        self.plan_: GradientPlan | OutputPlan = plan
        table.expect(plan.steps)
        self.sensitivity_ = gradient_sensitivity(
            plan.max_grad_norm, table.classes, table.features, gradient_grid(self.size_)
        )
        self.coef_ = descend(table, plan, self.size_, mu, source)

    def _fit_by_output(self, table: Blocks, mu: float, source: NoiseSource) -> None:
        """Minimise the regularised loss, and release the minimiser with noise."""
        weights, _ = self._minimiser(table, mu, OUTPUT_NOISE)
        noisy = release_gaussian(weights, sensitivity=self.sensitivity_.value, mu=mu, source=source).values
        self.coef_ = noisy - noisy.mean(axis=0)

    def _fit_for_queries(self, table: Blocks, source: NoiseSource) -> None:
        """Minimise the regularised loss, and keep the minimiser behind a mechanism with a budget."""
        weights, max_norm = self._minimiser(table, float(self.epsilon) / int(self.queries), QUERY_NOISE)
        private = PrivateHeadWeights._of_fit(
            HeadWeights(weights, self.centre_, BIAS, self.radius_),
            self.sensitivity_,
            max_norm=max_norm,
            unit="person" if table.repeated else "record",
        )
        self.predictor_ = Predictor(private, NoisyMax("permute-and-flip"), self.budget_, noise=source)

    def _minimiser(self, table: Blocks, strength: float, noise: float) -> tuple[Floats, float]:
        """Return the minimiser and a public bound on its length; set its settings and certified sensitivity.

        Everything but `minimise` knows public numbers only.
        """
        plan = output_plan(self.size_, strength, noise=noise, regularisation=self._settings.regularisation)
        objective: MeanCrossEntropy | Tilted = MeanCrossEntropy(self.size_, plan.regularisation)
        wanted = plan.tolerance
        if self._settings.loss == "convexified":
            objective = Tilted(
                float(self._settings.alpha), float(self._settings.mass or self.size_), plan.regularisation
            )
            wanted = TILTED_TOLERANCE
        tolerance = certifiable_tolerance(
            objective, table.features, table.classes, wanted, repeated=table.repeated
        )
        self.sensitivity_ = output_sensitivity(objective, table.classes, tolerance)
        self.plan_ = OutputPlan(plan.regularisation, tolerance)
        weights = minimise(table, objective, tolerance).weights
        return weights, max_solution_norm(objective, table.classes, tolerance)

    def _offers(self, method: str) -> bool:  # noqa: ARG002
        return self.release == "weights"

    @property
    def _classifier(self) -> HeadWeights | Predictor:
        if hasattr(self, "predictor_"):
            return self.predictor_
        return HeadWeights(self.coef_, self.centre_, BIAS, self.radius_, whitening=self.whitening_)

    @property
    def _settings(self) -> HeadSettings:
        return self.settings or HeadSettings()

    @property
    def _training_method(self) -> TrainingMethod:
        """The method, with its default."""
        return self.method or ("output" if self.release == "query" else "gradient")

    def _automatic_features(self, data: TrainingRows, size: float | None) -> FeatureMap:
        if data.encoding is None:
            return default_features(data.columns, self.image_shape)
        strength = float(self.epsilon) / int(self.queries) if self.release == "query" else self._mu
        return table_features(data.encoding, cast(float, size), len(self.classes_), strength)

    def _budget(self) -> Budget:
        """Return what everything together costs as (epsilon, delta), also if mu states it."""
        if self.release == "query":
            return Budget(self.epsilon, 0.0, self.queries)
        epsilon = self.epsilon if self.mu is None else epsilon_of(float(self.mu), self.delta)
        return Budget(epsilon, self.delta)

    @property
    def _mu(self) -> float:
        """mu of the whole training, if the weights are released."""
        return mu_of(self.epsilon, self.delta) if self.mu is None else float(self.mu)

    def _released_size(self, table: Blocks, source: NoiseSource) -> float:
        """Return the declared size, or release a noisy one."""
        if self.declared_size is not None:
            return float(self.declared_size)
        mu = Allowance.of(self._mu, SIZE_SHARE, 0.0).size
        assert mu is not None
        return released_size(table.units, mu, source)

    def _allowance(self, features: int) -> Allowance:
        """Divide mu among the releases of the training; with ``release="query"`` there are none."""
        if self.release == "query":
            return Allowance(size=None, centre=None, moments=None, training=0.0)
        size_share = SIZE_SHARE if self.declared_size is None else 0.0
        moments = self._settings.second_moments
        if moments is None:
            left = self._mu * math.sqrt(1.0 - size_share - self._settings.centring)
            by_rule = self._training_method == "gradient" and self._table_map is None
            moments = moments_share(self.size_, features, left) * (left / self._mu) ** 2 if by_rule else 0.0
        return Allowance.of(self._mu, size_share, self._settings.centring, moments)

    def _tilt(self) -> tuple[float, float]:
        """Return the constant and the public mass of the convexified loss."""
        return float(self._settings.alpha), float(self._settings.mass or self.size_)

    def _facts(
        self, data: TrainingRows, table: Blocks, allowance: Allowance, source: NoiseSource
    ) -> dict[str, Any]:
        """Return every public number of the training by name."""
        facts: dict[str, Any] = {
            "estimator": "head",
            "training_method": self._training_method,
            "release": self.release,
            "loss": self._settings.loss,
            "features": describe_map(self.feature_map_),
            "dimension": table.features,
            "classes": table.classes,
            "declared_size": self.size_,
            "size_from": "noisy count" if self.declared_size is None else "declared",
            "radius": self.radius_,
            "bias": BIAS,
            "whitening": whitening_kind(self.whitening_),
            "sensitivity": self.sensitivity_.value,
            "noise_source": source.describe(),
            **self.plan_.to_json(),
            "unit": data.unit,
            "classes_declared": data.classes_declared,
            "own_code": list(data.own_code),
        }
        if self.release == "weights":
            facts |= {
                "mu_size": allowance.size,
                "mu_centring": allowance.centre,
                "mu_moments": allowance.moments,
                "mu_training": allowance.training,
            }
        if self._training_method == "gradient":
            facts["grid"] = gradient_grid(self.size_)
        if self._settings.loss == "convexified":
            facts["alpha"], facts["mass"] = self._tilt()
        return facts

    def _check_settings(self) -> None:
        """Raise `InvalidInput` for invalid settings; no record is looked at."""
        if self.method is not None:
            check_choice("method", self.method, ("gradient", "output"))
        check_choice("release", self.release, ("weights", "query"))
        chosen_engine(self.engine)
        if not isinstance(self.features, FeatureMap | str):
            raise InvalidInput(
                "features must be a map of quietmax.models.features, 'auto', 'identity', 'unit-norm', 'scattering', "
                f"'embedding' or the name of a plug-in, got {self.features!r}."
            )
        if self._settings.loss == "convexified" and self._training_method != "output":
            raise InvalidInput("loss='convexified' requires method='output'.")
        if self.release == "query":
            self._check_query_settings()
        if self.declared_size is not None:
            checked_size(self.declared_size)
        check_positive(mu=self.mu, queries=self.queries)

    def _check_query_settings(self) -> None:
        """Raise `InvalidInput` for settings that ``release="query"`` cannot use."""
        if self._training_method != "output":
            raise InvalidInput(
                f"Releasing a number of labels (release='query') requires `method` 'output', got {self.method!r}."
            )
        if self.declared_size is None:
            raise InvalidInput("Releasing a number of labels (release='query') requires `declared_size`.")
        if self.mu is not None:
            raise InvalidInput(
                "release='query' has a pure guarantee: state its budget as epsilon, not as mu."
            )


def _with_features(feature_map: FeatureMap, radius: float, block: Table) -> Iterator[Table]:
    """Yield the features of a block's records, in blocks of suitable size."""
    most = block_rows(feature_map.dimension(block.features) + 1)
    for piece in block.pieces(-(-len(block) // most)):
        yield replace(piece, rows=clipped_features(feature_map, piece.rows, radius))


def _with_rows(
    change: Callable[[NDArray[np.float32], Floats], NDArray[np.float32]], released: Floats, block: Table
) -> Table:
    """Return a block with rows that were changed by something released."""
    return replace(block, rows=change(block.rows, released))
