"""PrivateHead: differentially private softmax regression on public features.

`PrivateHead.fit` does, in this order: a noisy count, features of each record alone, a noisy centre and noisy second
moments, then the gradient method (`_descend`) or the output method (`solver._minimise`), and last the guarantee
(`weights`), from the public facts of the training alone. Opening a model folder computes it again from these facts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray

from quietmax._ray import RayEngine
from quietmax._threads import parallel_map
from quietmax.accounting.costs import Budget, epsilon_of, mu_of
from quietmax.accounting.guarantee import Guarantee
from quietmax.data.cohorts import ErasureList
from quietmax.data.schema import Schema
from quietmax.errors import InvalidInput
from quietmax.estimators.base import PrivateClassifier, _documented
from quietmax.estimators.blocks import ROWS_AT_ONCE, Blocks, Floats, LocalEngine, Table, _chunk_rows
from quietmax.estimators.head.effects import SaysEffects
from quietmax.estimators.head.exact_sums import (
    BITS,
    Rows,
    _exact_product,
    _moment_sum,
    _row_sum,
    _unit_rows,
    _weights_on_grid,
    _whitened_rows,
    _whitening_on_grid,
    clipped_rows,
    gradient_grid,
    gradient_sum,
    moments_grid,
    on_grid,
)
from quietmax.estimators.head.solver import (
    MeanCrossEntropy,
    Tilted,
    _certifiable_tolerance,
    _max_solution_norm,
    _minimise,
    _output_sensitivity,
)
from quietmax.estimators.head.tables import (
    PEOPLE_PER_INTERVAL,
    Basis,
    JoinedColumns,
    cell_scores,
    centred,
    class_scores,
    descend,
    effect_noise,
    levels_for,
    released_class_weights,
    released_counts,
    scale_by_noise,
    score_noise,
    with_lengths,
    with_shares_of_pairs,
    with_strongest_pairs,
)
from quietmax.estimators.head.tables import ROWS_AT_ONCE as CELL_ROWS_AT_ONCE
from quietmax.estimators.head.update import ONLY_CELLS, Prior, prior_of
from quietmax.estimators.head.weights import (
    BIAS,
    CALIBRATION_STEPS,
    OUTPUT_NOISE,
    QUERY_NOISE,
    SCORES_AT_ONCE,
    SIZE_SHARE,
    TILTED_TOLERANCE,
    GradientPlan,
    HeadSettings,
    HeadWeights,
    OutputPlan,
    PrivateHeadWeights,
    Scores,
    TableWeights,
    _cells_plan,
    _gradient_plan,
    _gradient_sensitivity,
    _output_plan,
    calibration_share,
    default_features,
    even_shares,
    kept_scores,
    moments_share,
    query_guarantee,
    released_scale,
    weights_guarantee,
    whitening_kind,
    with_scores,
)
from quietmax.estimators.ray_blocks import _chosen_engine
from quietmax.estimators.series import cohort_facts
from quietmax.estimators.training_set import (
    ImageShape,
    TrainingRows,
    _check_positive,
    _checked_size,
    check_choice,
)
from quietmax.mechanisms.base import NoisyMax
from quietmax.models.features.base import BatchedMap, FeatureMap
from quietmax.models.features.generic import Pipeline, describe_map, runs_user_code
from quietmax.models.features.tabular import TableCells, TableFeatures, table_cells, table_features
from quietmax.noise.release import release_gaussian
from quietmax.noise.sources import EXACT, NoiseSource, SeededNoise
from quietmax.predictor import Predictor
from quietmax.sensitivity import certified

if TYPE_CHECKING:
    from quietmax.estimators.serialization import PrivateModel

TrainingMethod = Literal["gradient", "output"]
_MOST_PREPARING, _USUAL_STEPS = 5, 40
"""For the time left: passes before the weights (features, centre, centring, moments, whitening), and for them."""
_LARGEST_COUNT = 2.0**35
"""Noisy counts are at most this: `ExactSum._to_grid` drops at most 31 bits of a sum for such a size."""
_RECORDS_AT_ONCE = 4096
_ROOT_OF_TWO = 181 / 128
"""Below sqrt(2) by less than 0.02%, and short enough in bits for exact products."""
_LARGEST_WEIGHT = 2.0**200
_SPARE = 1.0 - 1e-12
"""Shares of mu^2 are rounded; this factor keeps their sum below the whole."""


@_documented
class PrivateHead(SaysEffects, PrivateClassifier):
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
        `TableCells`, otherwise each record divided by its length together with a constant.
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
        The released weights; the last column is for the constant feature. Absent with ``release="query"``. For a table
        with a schema a feature is a cell of a column (`TableCells`): the weights are what it adds to the scores.
    centre_ : array of shape (features,)
        The released mean of the features; for a table the released share of people in each cell.
    noise_ : array of shape (features + 1,)
        For a table with a schema, the standard deviation of the noise in each effect, and last in the constant; see
        `Effects`.
    scale_ : float
        What the weights have been multiplied by, so that confidence is close to accuracy. Absent without calibration.
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

    coef_: Floats
    _dtypes = (np.float32, np.float64)
    _reads_sources = True
    _trains_on_cohorts = True
    _prior: Prior | None = None  # The version that is continued, while `update` runs

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
        if data.cohort is not None:
            self._check_cohort(data)
        self.budget_ = self._budget()
        seed = self._seed()
        if seed is not None and self._prior is not None:
            seed += len(self._prior.versions)  # no version repeats the noise of another one
        source = EXACT if seed is None else SeededNoise(seed)
        passes = 1 + _MOST_PREPARING + (self._settings.steps or _USUAL_STEPS)
        with self._read(data, _chosen_engine(self.engine), passes) as table:
            if data.unit == "person":
                table._count_persons()
            allowance = self._make_releases(data, table, source)
            facts = self._facts(data, table, allowance, source)
        own_map = runs_user_code(self.feature_map_)
        if self.release == "weights":
            return weights_guarantee(facts, own_map=own_map, encoding=data.encoding)
        answers = self.predictor_.guarantee
        return query_guarantee(answers, facts, own_map=own_map, encoding=data.encoding)

    def update(
        self,
        X: Any,
        y: Any = None,
        *,
        cohort: str,
        after: PrivateModel | str | Path | None = None,
        again: bool = False,
        forgotten: ErasureList | str | Path | None = None,
    ) -> Self:
        """Train the next version of a series on one more cohort, starting from what the last one released.

        All versions together cost as much as the most expensive cohort, and not the sum: `guarantee_` states it
        (THEORY 3.17). People of other cohorts are left out, also those who come back. Pairs of columns, the number of
        intervals and the holdout stay those of the first version. If it fails, the estimator stays the last version.

        Parameters
        ----------
        X, y
            The table with all rows of these people, as for `fit`; its schema declares a `cohort`.
        cohort : str
            The cohort that is trained on, such as "2026-11".
        after : PrivateModel or path, optional
            The version that is continued, or its folder. By default what this estimator was fitted to.
        again : bool, default=False
            Allows a cohort that the series was trained on before; what its people pay adds up.
        forgotten : ErasureList or path, optional
            As for `fit`.

        Returns
        -------
        self
            The next version.
        """
        before = {**self.__dict__}
        self._prior, self._again = prior_of(self if after is None else after), again is True
        try:
            return self.fit(X, y, cohort=cohort, forgotten=forgotten)
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise
        finally:
            for name in ("_prior", "_again"):
                self.__dict__.pop(name, None)

    def _check_cohort(self, data: TrainingRows) -> None:
        if not (self._trains_on_cells and isinstance(self._feature_map(data, 1.0), TableCells)):
            raise InvalidInput(ONLY_CELLS)
        if self._prior is not None:
            self._prior.check(data, again=self._again)

    def _make_releases(self, data: TrainingRows, table: Blocks, source: NoiseSource) -> _Allowance:
        # The number of records or persons: declared, or a small release. Then everything that depends on it.
        self.size_ = self._released_size(table, source)
        prior = self._prior
        self.feature_map_ = self._feature_map(data, self.size_) if prior is None else prior.cells
        self.radius_ = float(self._settings.radius)
        self._dimension = features = self.feature_map_.dimension(data.columns) + 1
        allowance = self._allowance(features)
        table.expect(_MOST_PREPARING + (self._settings.steps or _USUAL_STEPS))
        if isinstance(self.feature_map_, TableCells):
            self._fit_on_cells(table, self.feature_map_, allowance, source)
            return allowance
        # Each record alone: public features of length at most 1, as exact numbers.
        table._reserve(len(table), features)
        table.update(partial(_with_features, self.feature_map_, self.radius_))

        # Two releases that make the features easier to learn from: their mean and their second moments.
        self.centre_: Floats = np.zeros(features - 1)
        if allowance.centre is not None:
            self.centre_ = _released_centre(table, self.size_, allowance.centre, source)
        table.update(partial(_centred, self.centre_))
        self.whitening_ = self._whitening(table, allowance, source)
        if self.whitening_ is not None:
            table.update(partial(_whitened, self.whitening_))

        # The weights: released with noise, or kept and asked through a mechanism that charges for every answer.
        if self.release == "query":
            self._fit_for_queries(table, source)
        elif self._training_method == "gradient":
            self._fit_by_gradient(table, allowance, source)
        else:
            self._fit_by_output(table, allowance.training, source)
        if allowance.calibration is not None:
            weights = self.coef_[1:] - self.coef_[:1] if table.classes == 2 else self.coef_
            scores = partial(_dense_scores, _weights_on_grid(weights))
            weighted = self._class_weights if self._training_method == "gradient" else None
            self._calibrate(table, scores, _RECORDS_AT_ONCE, allowance.calibration, source, weighted)
        return allowance

    def _calibrate(
        self,
        table: Blocks,
        scores: Scores,
        rows_at_once: int,
        mu: float,
        source: NoiseSource,
        class_weights: Floats | None = None,
    ) -> None:
        table.update(partial(with_scores, scores, rows_at_once))
        self.scale_ = released_scale(table, kept_scores, SCORES_AT_ONCE, mu, source, class_weights)
        self.coef_ = self.coef_ * self.scale_

    def _fit_on_cells(
        self, table: Blocks, cells: TableCells, allowance: _Allowance, source: NoiseSource
    ) -> None:
        """Train on the cells of a table's rows: counts, the gradient method, pairs, and the scale of the scores."""
        prior = self._prior
        counted = cells if prior is None else replace(cells, crosses=())
        sizes = counted.sizes
        table._reserve(len(table), len(cells.sizes) + 1)
        table.update(partial(_with_cells, counted))
        self.whitening_ = None
        found, noise = None, 0.0
        if allowance.centre is not None:
            counts, noise = released_counts(table, sizes, allowance.centre, source)
            found, noise = np.clip(counts / self.size_, 0.0, 1.0), noise / self.size_
        shares = even_shares(sizes) if found is None else found
        if prior is not None:
            shares, noise = prior.shares(found, noise, self.size_)
            table.update(partial(_with_pairs, cells))
        self._share_noise = noise
        self._class_weights, weighted = self._weights_of_classes(table, allowance, source)
        plan = _cells_plan(self.size_ * weighted, len(cells.sizes), allowance.training, self._settings)
        plan = replace(plan, learning_rate=plan.learning_rate / weighted)
        if prior is not None:
            plan = prior.shortened(plan, self.size_)
        self.plan_: GradientPlan | OutputPlan = plan
        table.expect(plan.stages * plan.steps + (CALIBRATION_STEPS if allowance.calibration else 0))
        mu = allowance.training if plan.stages == 1 else allowance.training * math.sqrt(0.5) * _SPARE
        start = None if prior is None else prior.outputs
        outputs, self.noise_ = self._descend_on(table, cells, shares, noise, mu, source, start)
        if prior is not None:
            self.noise_ = prior.noise(self.noise_)
        if plan.stages == 2:
            # What was released says which pairs of columns take part from now on.
            cells = self.feature_map_ = with_strongest_pairs(cells, outputs, shares)
            table._reserve(len(table), len(cells.sizes) + 1)
            table.update(partial(_with_pairs, cells))
            known = found is not None or prior is not None
            shares = with_shares_of_pairs(cells, shares) if known else even_shares(cells.sizes)
            started, before = (_with_new_cells(each, len(shares)) for each in (outputs, self.noise_))
            outputs, added = self._descend_on(table, cells, shares, noise, mu, source, started)
            self.noise_ = np.hypot(before, added)
        self.centre_ = shares
        self.coef_ = class_scores(centred(outputs, cells, shares))
        if allowance.calibration is not None:
            scores = partial(cell_scores, self.coef_, cells.sizes)
            self._calibrate(
                table, scores, CELL_ROWS_AT_ONCE, allowance.calibration, source, self._class_weights
            )
            self.noise_ = self.noise_ * self.scale_
        elif self._settings.calibration is None:
            scale = scale_by_noise(self.coef_, cells, shares, self.noise_)
            self.coef_, self.noise_ = self.coef_ * scale, self.noise_ * scale

    def _weights_of_classes(
        self, table: Blocks, allowance: _Allowance, source: NoiseSource
    ) -> tuple[Floats | None, float]:
        """Return what a record counts by its class, None if all count the same, and the mean over all records."""
        stated = self._settings.class_weight
        if allowance.class_sizes is not None:
            return released_class_weights(table, self.size_, allowance.class_sizes, source)
        if not isinstance(stated, Mapping):
            return None, 1.0
        if unknown := [label for label in stated if label not in self.classes_]:
            raise InvalidInput(
                f"class_weight names {unknown[0]!r}, which is none of the classes {[*self.classes_]}."
            )
        weights = np.array([float(stated.get(label, 1.0)) for label in self.classes_.tolist()])
        if not (
            np.isfinite(weights) & (weights > 0.0)
        ).all():  # the settings may have been changed since their check
            raise InvalidInput(f"class_weight must have positive numbers, got {stated!r}.")
        weights /= weights.max()
        return weights, float(weights.mean())  # as if the classes were of one size

    def _descend_on(
        self,
        table: Blocks,
        cells: TableCells,
        shares: Floats,
        noise: float,
        mu: float,
        source: NoiseSource,
        start: Floats | None = None,
    ) -> tuple[Floats, Floats]:
        """Take the steps of one stage; return what each cell, and last every row, adds to outputs, and the noise."""
        plan = cast(GradientPlan, self.plan_)
        clear = self.size_ if self._prior is None else self._prior.clear(self.size_)
        per_number = self._mu * clear / (PEOPLE_PER_INTERVAL * max(1, len(cells.numbers)))
        basis = Basis.of(cells, shares, noise, per_number)
        table.update(partial(with_lengths, basis, cells.sizes))
        self._dimension = basis.features
        self.sensitivity_ = _gradient_sensitivity(
            plan.max_grad_norm, _outputs(table.classes), basis.features, gradient_grid(self.size_)
        )
        stage = replace(plan, learning_rate=plan.learning_rate / plan.stages)
        weight = score_noise(stage, self.sensitivity_.value, mu, self.size_, table.classes)
        joined = JoinedColumns.of(table, cells.sizes, self.size_)
        found = descend(joined, basis, cells.sizes, stage, mu, self.size_, source, start, self._class_weights)
        joined.separate()
        return found, effect_noise(basis, cells, shares, weight)

    def _whitening(self, table: Blocks, allowance: _Allowance, source: NoiseSource) -> Floats | None:
        if allowance.moments is not None:
            moments = _released_moments(table, self.size_, allowance.moments, source)
            return _whitening_matrix(moments, self.size_, allowance.moments)
        table_map, by_gradient = self.feature_map_, self._training_method == "gradient"
        if isinstance(table_map, TableFeatures) and by_gradient and allowance.centre is not None:
            # The gradient method sees features of a table, which are mostly indicators.
            scale = table_map.scale(self.centre_, 1.0 / (allowance.centre * self.size_))
            return _whitening_on_grid(np.append(scale, 1.0))
        return None

    def _fit_by_gradient(self, table: Blocks, allowance: _Allowance, source: NoiseSource) -> None:
        """Release every clipped gradient sum with noise, and step along it."""
        mu = allowance.training
        self._class_weights, weighted = self._weights_of_classes(table, allowance, source)
        plan = _gradient_plan(
            self.size_ * weighted,
            table.features,
            mu,
            classes=table.classes,
            whitening=whitening_kind(self.whitening_),
            settings=self._settings,
        )
        plan = replace(plan, learning_rate=plan.learning_rate / weighted)
        self.plan_ = plan
        table.expect(plan.steps + (1 + CALIBRATION_STEPS if allowance.calibration else 0))
        self.sensitivity_ = _gradient_sensitivity(
            plan.max_grad_norm, _outputs(table.classes), table.features, gradient_grid(self.size_)
        )
        self.coef_ = _descend(table, plan, self.size_, mu, source, self._class_weights)

    def _fit_by_output(self, table: Blocks, mu: float, source: NoiseSource) -> None:
        weights, _ = self._minimiser(table, mu, OUTPUT_NOISE)
        noisy = release_gaussian(weights, sensitivity=self.sensitivity_.value, mu=mu, source=source).values
        self.coef_ = noisy - noisy.mean(axis=0)

    def _fit_for_queries(self, table: Blocks, source: NoiseSource) -> None:
        weights, max_norm = self._minimiser(table, float(self.epsilon) / int(self.queries), QUERY_NOISE)
        private = PrivateHeadWeights._of_fit(
            HeadWeights(weights, self.centre_, BIAS, self.radius_),
            self.sensitivity_,
            max_norm=max_norm,
            unit="person" if table.repeated else "record",
        )
        self.predictor_ = Predictor(private, NoisyMax("permute-and-flip"), self.budget_, noise=source)

    def _minimiser(self, table: Blocks, strength: float, noise: float) -> tuple[Floats, float]:
        """Return the minimiser and a public bound on its length; set its settings and certified sensitivity."""
        plan = _output_plan(self.size_, strength, noise=noise, regularisation=self._settings.regularisation)
        objective: MeanCrossEntropy | Tilted = MeanCrossEntropy(self.size_, plan.regularisation)
        wanted = plan.tolerance
        if self._settings.loss == "convexified":
            objective = Tilted(float(self._settings.alpha), self.size_, plan.regularisation)
            wanted = TILTED_TOLERANCE
        tolerance = _certifiable_tolerance(
            objective, table.features, table.classes, wanted, repeated=table.repeated
        )
        self.sensitivity_ = _output_sensitivity(objective, table.classes, tolerance)
        self.plan_ = OutputPlan(plan.regularisation, tolerance)
        weights = _minimise(table, objective, tolerance).weights
        return weights, _max_solution_norm(objective, table.classes, tolerance)

    def _offers(self, method: str) -> bool:  # noqa: ARG002
        return self.release == "weights"

    @property
    def _classifier(self) -> HeadWeights | TableWeights | Predictor:
        if hasattr(self, "predictor_"):
            return self.predictor_
        if isinstance(self.feature_map_, TableCells):
            return TableWeights(self.coef_, self.centre_, self.feature_map_.sizes, self.noise_)
        return HeadWeights(self.coef_, self.centre_, BIAS, self.radius_, whitening=self.whitening_)

    @property
    def _settings(self) -> HeadSettings:
        return self.settings or HeadSettings()

    @property
    def _training_method(self) -> TrainingMethod:
        return self.method or ("output" if self.release == "query" else "gradient")

    @property
    def _trains_on_cells(self) -> bool:
        """Whether the settings allow to train on cells, which have neither a radius nor second moments."""
        plain = self._settings.second_moments is None and self._settings.radius == 1.0
        return plain and self.release == "weights" and self._training_method == "gradient"

    def _automatic_features(self, data: TrainingRows, size: float | None) -> FeatureMap:
        if data.encoding is None:
            return default_features(data.columns, self.image_shape)
        if self._trains_on_cells:
            levels = levels_for(
                cast(float, size), _part(self._mu, self._settings.centring), len(data.encoding.columns)
            )
            if (cells := table_cells(data.encoding, levels)) is not None:
                return cells
        strength = float(self.epsilon) / int(self.queries) if self.release == "query" else self._mu
        return table_features(data.encoding, cast(float, size), len(self.classes_), strength)

    def _budget(self) -> Budget:
        if self.release == "query":
            return Budget(self.epsilon, 0.0, self.queries)
        epsilon = self.epsilon if self.mu is None else epsilon_of(float(self.mu), self.delta)
        return Budget(epsilon, self.delta)

    @property
    def _mu(self) -> float:
        return mu_of(self.epsilon, self.delta) if self.mu is None else float(self.mu)

    def _released_size(self, table: Blocks, source: NoiseSource) -> float:
        if self.declared_size is not None:
            return float(self.declared_size)
        mu = _part(self._mu, SIZE_SHARE)
        assert mu is not None
        return _released_size(table.units, mu, source)

    def _allowance(self, features: int) -> _Allowance:
        """Divide mu among the releases of the training; with ``release="query"`` there are none."""
        if self.release == "query":
            return _Allowance(None, None, None, None, None, training=0.0)
        size_share = SIZE_SHARE if self.declared_size is None else 0.0
        first = (size_share, self._settings.class_sizes_share, self._settings.centring)
        moments, calibration = self._settings.second_moments, self._settings.calibration
        if calibration is None:
            left = 1.0 - sum(first) - (moments or 0.0)
            calibration = min(calibration_share(self.size_, self._mu), left / 2.0)
        if moments is None:
            left = self._mu * math.sqrt(1.0 - sum(first) - calibration)
            of_table = isinstance(self.feature_map_, TableFeatures | TableCells)
            by_rule = self._training_method == "gradient" and not of_table
            moments = moments_share(self.size_, features, left) * (left / self._mu) ** 2 if by_rule else 0.0
        return _Allowance.of(self._mu, (*first, moments, calibration))

    def _facts(
        self, data: TrainingRows, table: Blocks, allowance: _Allowance, source: NoiseSource
    ) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "estimator": "head",
            "training_method": self._training_method,
            "release": self.release,
            "loss": self._settings.loss,
            "features": describe_map(self.feature_map_),
            "dimension": self._dimension,
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
            **({"erasure_list": True} if data.erasure_list else {}),
        }
        if data.cohort is not None:
            prior, size = self._prior, self.size_
            earlier, people = ([], size) if prior is None else (prior.versions, prior.people(size))
            facts |= cohort_facts(data.cohort, earlier, people, self._share_noise)
            if prior is not None and prior.guarantee.parameters.get("erasure_list"):
                facts["erasure_list"] = True  # what the versions before assume is assumed of all
        if self.release == "weights":
            facts |= {
                "mu_size": allowance.size,
                "mu_centring": allowance.centre,
                "mu_moments": allowance.moments,
                "mu_training": allowance.training,
            }
            if allowance.class_sizes is not None:
                facts["mu_class_sizes"] = allowance.class_sizes
            if allowance.calibration is not None:
                facts |= {"mu_calibration": allowance.calibration, "scale": self.scale_}
        if isinstance(self.feature_map_, TableCells):
            facts["whitening"] = "cells"
        if self._training_method == "gradient":
            facts |= {"grid": gradient_grid(self.size_), "outputs": _outputs(table.classes)}
            if self._class_weights is not None:
                noisy = allowance.class_sizes is not None
                facts["class_weights"] = self._class_weights.tolist()
                facts["class_weights_from"] = "noisy sizes" if noisy else "stated"
        if self._settings.loss == "convexified":
            facts |= {"alpha": float(self._settings.alpha), "mass": self.size_}
        return facts

    def _check_settings(self) -> None:
        if self.method is not None:
            check_choice("method", self.method, ("gradient", "output"))
        check_choice("release", self.release, ("weights", "query"))
        _chosen_engine(self.engine)
        if not isinstance(self.features, FeatureMap | str):
            raise InvalidInput(
                "features must be a map of quietmax.models.features, 'auto', 'identity', 'unit-norm', 'scattering', "
                f"'embedding' or the name of a plug-in, got {self.features!r}."
            )
        if isinstance(self.features, TableCells) and not self._trains_on_cells:
            raise InvalidInput(
                "TableCells require release='weights' and method='gradient', without radius and second_moments."
            )
        if self._settings.loss == "convexified" and self._training_method != "output":
            raise InvalidInput("loss='convexified' requires method='output'.")
        if self._settings.class_weight is not None and self._training_method != "gradient":
            raise InvalidInput("class_weight requires method='gradient'.")
        if self.release == "query":
            self._check_query_settings()
        if self.declared_size is not None:
            _checked_size(self.declared_size)
        _check_positive(mu=self.mu, queries=self.queries)

    def _check_query_settings(self) -> None:
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


# --- Each record alone ------------------------------------------------------------------------------------------------


def _with_features(feature_map: FeatureMap, radius: float, block: Table) -> Iterator[Table]:
    for piece in block._in_blocks(feature_map.dimension(block.features) + 1):
        yield replace(piece, rows=_clipped_features(feature_map, piece.rows, radius))


def _clipped_features(
    feature_map: FeatureMap, records: NDArray[np.float32], radius: float
) -> NDArray[np.float32]:
    """Return the public features of every record, clipped to ``radius``, divided by it and put on the grid."""
    rows = np.empty((len(records), feature_map.dimension(records.shape[1]) + 1), dtype=np.float32)
    rows[:, -1] = 0.0

    def fill(part: slice) -> None:
        rows[part, :-1] = clipped_rows(feature_map.transform(records[part]), radius)

    if _may_run_on_any_thread(feature_map):
        _on_all_threads(fill, len(records), 2 * ROWS_AT_ONCE)
    else:
        for start in range(0, len(records), _RECORDS_AT_ONCE):
            fill(slice(start, start + _RECORDS_AT_ONCE))
    return rows


def _with_cells(cells: TableCells, block: Table) -> Table:
    indices = cells.transform(block.rows)
    return replace(block, rows=indices.astype(np.uint16 if max(cells.sizes) <= 2**16 else np.int32))


def _with_pairs(cells: TableCells, block: Table) -> Table:
    return replace(block, rows=cells.with_crosses(block.rows), lengths=None)


def _with_new_cells(values: Floats, cells: int) -> Floats:
    """Return numbers of cells, and last of the constant, with zeros for cells that are new."""
    found = np.zeros((*values.shape[:-1], cells + 1))
    found[..., : values.shape[-1] - 1], found[..., -1] = values[..., :-1], values[..., -1]
    return found


def _outputs(classes: int) -> int:
    return 1 if classes == 2 else classes


def _dense_scores(weights: Floats, block: Table, part: slice) -> Floats:
    """Return the scores of rows on the grid by weights on a grid: the products and their sums are exact."""
    return np.ascontiguousarray(_exact_product(block.rows[part].astype(np.float64), weights.T.copy()).T)


def _on_all_threads(fill: Callable[[slice], None], rows: int, height: int) -> None:
    parallel_map(lambda number: fill(slice(number * height, (number + 1) * height)), -(-rows // height))


def _may_run_on_any_thread(feature_map: FeatureMap) -> bool:
    """Return whether a map is neither the user's own code nor computed in batches, which use the threads themselves."""
    if isinstance(feature_map, Pipeline):
        return all(_may_run_on_any_thread(step) for step in feature_map.maps)
    return not (isinstance(feature_map, BatchedMap) or runs_user_code(feature_map))


def _centred(centre: Floats, block: Table) -> Table:
    return _changed(block, lambda rows: _unit_rows(rows[:, :-1], centre, BIAS))


def _whitened(whitening: Floats, block: Table) -> Table:
    return _changed(block, lambda rows: _whitened_rows(rows, whitening))


def _changed(block: Table, function: Callable[[Floats], Floats]) -> Table:
    """Replace every row, in place, by its image under a function of rows in float64, on all threads."""

    def fill(part: slice) -> None:
        block.rows[part] = function(block.rows[part].astype(np.float64))

    _on_all_threads(fill, len(block), _chunk_rows(2 * block.features))
    return block


# --- What is released before the weights ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Allowance:
    """How mu is divided among the releases of a training; mu^2 adds up."""

    size: float | None  # mu of the noisy count; None if the size is declared
    class_sizes: float | None  # mu of the noisy sizes of the classes; None if they are not needed
    centre: float | None  # mu of the noisy centre; None if there is no centring
    moments: float | None  # mu of the noisy second moments; None if they are not used
    calibration: float | None  # mu of the scale of the scores; None if it is not looked for
    training: float  # mu of all other releases together

    @classmethod
    def of(cls, mu: float, shares: tuple[float, float, float, float, float]) -> _Allowance:
        """Divide mu by the shares of mu^2, in the order of the fields; the training has the rest."""
        size, classes, centre, moments, calibration = (_part(mu, share) for share in shares)
        rest = mu * math.sqrt(1.0 - sum(shares)) * _SPARE
        return cls(size, classes, centre, moments, calibration, rest)


def _part(mu: float, share: float) -> float | None:
    return mu * math.sqrt(share) * _SPARE if share > 0.0 else None


def _released_size(units: int, mu: float, source: NoiseSource) -> float:
    noisy = release_gaussian([float(units)], sensitivity=1.0, mu=mu, source=source).values[0]
    return min(max(1.0, float(np.rint(noisy))), _LARGEST_COUNT)


def _released_centre(table: Rows, size: float, mu: float, source: NoiseSource) -> Floats:
    """Release the noisy mean of clipped rows."""
    noisy = release_gaussian(_row_sum(table)[:-1], sensitivity=1.0, mu=mu, source=source).values / size
    length = math.sqrt(float(np.square(noisy).sum()))
    return on_grid(noisy * ((1.0 - 2.0**-BITS) / max(length, 1.0)))


def _released_moments(table: Rows, size: float, mu: float, source: NoiseSource) -> Floats:
    """Release the second moments of the rows, with noise of 1/mu on the diagonal and 1/(sqrt(2) mu) above it (3.10)."""
    grid = moments_grid(size)
    sensitivity = certified.head_moments(features=table.features, grid=grid)
    total, above = _moment_sum(table, grid=grid), np.triu_indices(table.features, 1)
    # An entry above the diagonal counts twice in the Frobenius norm, so it is released times (a little below) sqrt(2).
    # It is at most 2^45 grid steps, so the product is exact.
    values = np.concatenate([np.diag(total), total[above] * _ROOT_OF_TWO])
    noisy = release_gaussian(values, sensitivity=sensitivity.value, mu=mu, source=source).values
    moments = np.diag(noisy[: table.features])
    moments[above] = noisy[table.features :] / _ROOT_OF_TWO
    return np.triu(moments) + np.triu(moments, 1).T


def _whitening_matrix(moments: Floats, size: float, mu: float) -> Floats:
    """Compute `(M_+ / N + c I)^(-1/2)`, up to its scale, from released moments M; `c = sqrt(d) / (mu N)`."""
    variances, directions = np.linalg.eigh(moments / size)
    floor = math.sqrt(len(moments)) / (mu * size)
    return _whitening_on_grid(directions / np.sqrt(np.maximum(variances, 0.0) + floor) @ directions.T)


# --- The gradient method ----------------------------------------------------------------------------------------------


def _step_mus(steps: int, mu: float) -> Floats:
    """Divide mu among the gradient steps: the squares fall linearly, like the learning rate, and add up to mu^2."""
    falling = np.arange(steps, 0, -1, dtype=np.float64)
    return np.asarray(mu * np.sqrt(falling * (2.0 / (steps * (steps + 1.0)))))


def _descend(
    table: Rows,
    plan: GradientPlan,
    size: float,
    mu: float,
    source: NoiseSource,
    class_weights: Floats | None = None,
) -> Floats:
    """Take noisy full-batch gradient steps: exactly mu-Gaussian private for all steps together (THEORY 3.1)."""
    grid, outputs = gradient_grid(size), _outputs(table.classes)
    sensitivity = _gradient_sensitivity(plan.max_grad_norm, outputs, table.features, grid)
    weights = np.zeros((outputs, table.features))
    for step, step_mu in enumerate(_step_mus(plan.steps, mu)):
        total = gradient_sum(table, weights, plan.max_grad_norm, grid=grid, class_weights=class_weights)
        noisy = release_gaussian(
            total, sensitivity=sensitivity.value, mu=float(step_mu), source=source
        ).values
        rate = plan.rate(step) * (2.0 if outputs == 1 else 1.0)  # both scores move
        weights = weights - (rate / size) * noisy
        if not np.abs(weights).max() < _LARGEST_WEIGHT:
            raise InvalidInput(
                f"Training diverged: learning_rate {plan.learning_rate:g} is too large for this head."
            )
    if outputs == 1:
        weights = np.concatenate([-weights / 2.0, weights / 2.0])
    zero_sum: Floats = weights - weights.mean(axis=0)
    return zero_sum
