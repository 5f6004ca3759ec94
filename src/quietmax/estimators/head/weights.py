"""What is public of a head: its settings, the fitted classifier, bounds on its scores, and what is guaranteed of it.

All settings follow from public numbers. The learning rate falls linearly to almost zero, and each step gets a share of
mu^2 in proportion to it. Then the noise on every logit has standard deviation `kappa = eta * S * T / (mu * N)` after T
steps with mean learning rate eta, as if the rate were constant: eta follows from a chosen kappa
(`docs/results/training-rule.md`). Second moments are released where the size is large against the number of features
(`moments_share`); of tables, the released centre gives their diagonal (`TableFeatures.scale`).

The last steps find the scale of the scores (`released_scale`). The guarantees are computed from the public facts of the
training alone, after training and when a folder is opened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quietmax._threads import parallel_map
from quietmax.accounting.costs import GaussianCost, root_rounded_up
from quietmax.accounting.guarantee import Guarantee, Unit
from quietmax.data.encoding import Encoding
from quietmax.errors import InvalidInput
from quietmax.estimators.blocks import ROWS_AT_ONCE, Floats, Table
from quietmax.estimators.head.exact_sums import (
    _UNIT,
    GRID,
    Rows,
    _unit_rows,
    _whitened_rows,
    clipped_rows,
    logistic,
    probabilities,
)
from quietmax.estimators.head.solver import (
    MeanCrossEntropy,
    Tilted,
    _certifiable_tolerance,
    _max_solution_norm,
    _output_sensitivity,
)
from quietmax.estimators.series import is_conditional, series_amount, series_assumptions, series_because
from quietmax.estimators.training_set import (
    EARLIER_VERSION,
    Basis,
    _check_positive,
    check_choice,
    code_before,
    weakened,
)
from quietmax.mechanisms.base import proves_bounds
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.images import image_features
from quietmax.models.features.tabular import CONSTANT_PER_COLUMN, UnitNorm
from quietmax.models.training import LogitClassifier
from quietmax.noise.release import release_gaussian
from quietmax.noise.sources import EXACT, NoiseSource
from quietmax.sensitivity import certified
from quietmax.sensitivity.certified import ScoreBounds, Sensitivity

LINEAR = "linear"
"""The schedule of learning rates and of mu^2, as it is stored with a model."""
_STEPS_ROUNDED = 1 + Fraction(1, 2**48)
"""The squares of `estimator._step_mus` add up to at most this many times mu^2: each is rounded by at most four units of
2^-53."""
Whitening = Literal["none", "moments", "centre", "cells"]
"""What the rows are whitened by: released second moments, the released centre (indicator features), or counts."""

BIAS = 0.2
SIZE_SHARE = 0.01
CLASS_SIZES_SHARE, LARGEST_CLASS_WEIGHT = 0.01, 100.0
"""Share of mu^2 spent on noisy class sizes for balanced classes, and the largest weight that follows from them."""
CENTRING_SHARE = 0.05
GRADIENT_NOISE = 0.8
"""kappa of the gradient method: standard deviation of all noise together on a logit."""
OUTPUT_NOISE = 0.25
"""kappa of the output method, whose logits the regulariser keeps small."""
QUERY_NOISE = 0.15
"""kappa for answers per query, where epsilon takes the place of mu."""
MAX_GRAD_NORM, WHITENED_GRAD_NORM = 0.2, 0.5
"""Clipping norms; whitened rows need fewer steps, so less of each gradient has to be clipped."""
CELLS_NOISE, CELLS_STEPS, CELLS_TRAINING_PER_COLUMN = 0.6, 60, 300.0
"""kappa and the steps for tables, whose rows are cells, and the limit of `eta * S * T` per column."""
CELLS_GRAD_NORM, CELLS_CLEAR, CELLS_MOMENTUM = (0.25, 1.0), 200.0, 0.8
"""The clipping norm for tables is 0.25 up to `mu N = 200` per column; then it grows with the root, up to 1."""
PAIRS_FROM, PAIRED_COLUMNS = 4000.0, 6
"""From this `mu N` per column on, pairs of this many columns take part in the training."""
CALIBRATION_SHARE, CALIBRATION_STEPS, CALIBRATION_ERROR = 0.03, 7, 0.03
"""Share of mu^2 for the scale of the scores; the steps in which it is found; and the largest standard deviation of the
mean confidence, in one step, with which it is looked for."""
STEPS, FEWEST_STEPS, NUMBERS_READ = 100, 30, 6e10
"""Steps of the gradient method; fewer where they would read more numbers than this (two minutes on two cores)."""
LONGEST_TRAINING, TRAINING_PER_FEATURE = 30_000.0, 160.0
"""Limits of `eta * S * T`, in all and per feature: longer training was no better, and there is less noise then."""
MOMENTS_SHARE = 0.1
"""Share of mu^2 spent on second moments where they are used."""
MOMENTS_FROM, MOMENTS_NOISE = 1000, 10.0
"""Second moments are used from this size on, if their noise is at most this many times their mean eigenvalue."""
MOMENTS_STEPS, MOMENTS_STEPS_PER_NOISE, MOMENTS_NUMBERS_READ = (10, 40), 160.0, 4e7
"""Whitened by second moments: fewest and most steps, and how many there are for the noise beside the moments.
Directions that the noise hides are not whitened, and take more steps. At least so many numbers are read in all."""
MOMENTS_RATE = 2.0
"""Largest learning rate there, per class and feature. The loss curves by 1/(classes * features) in every direction, so
that weights oscillate at higher ones."""
SMALLEST_REGULARISATION = 1e-6
_SLACK = 2.0**-20
"""Sensitivities of scores are widened by this share."""
TOLERANCE = 0.005
"""The solver's gradient may be this share of one record's gradient, which adds 1% to the sensitivity."""
TILTED_TOLERANCE = 1e-6
"""The solver's tolerance for the convexified loss, whose gradient does not shrink with the size."""
_FEW_ROWS = 256
"""The scores of at most so many rows of cells are looked up at once; those of more, column by column."""


# --- Settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadSettings:
    """How a `PrivateHead` is trained, where its defaults are not wanted. All are public numbers.

    Parameters
    ----------
    centring : float, default=0.05
        Share of mu^2 spent on the mean of the features; 0 leaves centring out. For a table with a schema it is spent on
        the number of people in each category and interval.
    calibration : float, optional
        Share of mu^2 spent on the scale at which confidence equals accuracy; 0 leaves calibration out. By default 0.03
        where the size allows to find the scale. Elsewhere scores of tables shrink by what the noise in them says.
    class_weight : "balanced" or mapping of labels to numbers, optional
        What a record counts in the gradient method by its class; classes that are not named count 1. "balanced": all
        classes count the same together; their noisy sizes cost 1% of mu^2. Probabilities are then those of a population
        with these weights.
    pairs : bool, optional
        Whether what two columns say together counts, for a table with a schema. The pairs are those of the six columns
        that matter most in what was released before; half of the training's mu^2 is spent on them. By default only
        where there are so many people that this pays.
    second_moments : float, optional
        Share of mu^2 spent on the second moments of the features, by which the rows are whitened so that few steps are
        enough; 0 leaves them out. By default the gradient method uses a tenth of what the count and the centre leave if
        the size is large against the number of features, and 0 otherwise. Features of tables that have a schema need
        none: they are scaled by the mean (`TableFeatures.scale`).
    radius : float, default=1.0
        Features are clipped to this length, from 1e-12 to 1e12.
    loss : {"cross-entropy", "convexified"}, default="cross-entropy"
        The loss; "convexified" needs ``method="output"``.
    alpha : float, default=1.0
        Constant of the convexified loss.
    steps : int, optional
        Number of gradient steps. By default computed from public numbers, like the next three.
    learning_rate : float, optional
        Mean step size of the gradient method; the step size falls linearly.
    max_grad_norm : float, optional
        Per-record gradient clipping norm of the gradient method. For two classes it is that of the gradient for the
        difference of their scores.
    regularisation : float, optional
        L2 regularisation of the output method.

    Raises
    ------
    InvalidInput
        If a number is not valid.

    Examples
    --------
    >>> HeadSettings(steps=20, second_moments=0.0).centring
    0.05
    """

    centring: float = CENTRING_SHARE
    calibration: float | None = None
    class_weight: Literal["balanced"] | Mapping[Any, float] | None = None
    pairs: bool | None = None
    second_moments: float | None = None
    radius: float = 1.0
    loss: Literal["cross-entropy", "convexified"] = "cross-entropy"
    alpha: float = 1.0
    steps: int | None = None
    learning_rate: float | None = None
    max_grad_norm: float | None = None
    regularisation: float | None = None

    def __post_init__(self) -> None:
        check_choice("loss", self.loss, ("cross-entropy", "convexified"))
        most = 1.0 - SIZE_SHARE - self.class_sizes_share
        for name in ("centring", "calibration", "second_moments"):
            share = getattr(self, name)
            if share is not None and not 0.0 <= share < most:
                others = "" if name == "centring" else ", with this centring,"
                raise InvalidInput(f"{name} must be at least 0 and{others} below {most:g}, got {share}.")
            most -= share or 0.0
        _check_positive(
            radius=self.radius,
            alpha=self.alpha,
            steps=self.steps,
            learning_rate=self.learning_rate,
            max_grad_norm=self.max_grad_norm,
            regularisation=self.regularisation,
        )
        if isinstance(self.class_weight, Mapping):
            object.__setattr__(self, "class_weight", dict(self.class_weight))
            _check_positive(**{f"class_weight[{label!r}]": each for label, each in self.class_weight.items()})
        elif self.class_weight not in (None, "balanced"):
            raise InvalidInput(
                f"class_weight must be 'balanced', a mapping of labels to numbers or None, got {self.class_weight!r}."
            )
        if not 1e-12 <= self.radius <= 1e12:
            raise InvalidInput(f"radius must be a number from 1e-12 to 1e12, got {self.radius!r}.")

    @property
    def class_sizes_share(self) -> float:
        """The share of mu^2 that is spent on the sizes of the classes."""
        return CLASS_SIZES_SHARE if self.class_weight == "balanced" else 0.0


@dataclass(frozen=True)
class GradientPlan:
    """Settings of the gradient method; the rate of step t of T is `2 (T - t) / (T + 1)` times `learning_rate`."""

    steps: int  # Number T of full-batch steps
    learning_rate: float  # Mean over all steps; with momentum, of what they move in the end
    max_grad_norm: float  # Per-record gradient clipping norm
    momentum: float = 0.0  # The share of its direction that a step hands on to the next one (Nesterov)
    stages: int = 1  # How often all steps are taken; in a second stage pairs of columns take part

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.learning_rate * (2.0 * (self.steps - step) / (self.steps + 1.0))

    def to_json(self) -> dict[str, Any]:
        """Return the numbers, but no momentum of 0 and no single stage, and the schedule by name."""
        usual = {"momentum": 0.0, "stages": 1}
        facts = {name: value for name, value in asdict(self).items() if usual.get(name) != value}
        return {**facts, "schedule": LINEAR}


@dataclass(frozen=True)
class OutputPlan:
    """Settings of the output method: _minimise until `||gradient|| <= tolerance`, then release."""

    regularisation: float  # lam of the penalty `(lam / 2) ||W||^2`
    tolerance: float  # Bound on the length of the gradient at the solution

    def to_json(self) -> dict[str, Any]:
        """Return the two numbers by name."""
        return asdict(self)


def _gradient_plan(
    size: float,
    features: int,
    mu: float,
    *,
    classes: int = 2,
    whitening: Whitening = "none",
    settings: HeadSettings | None = None,
) -> GradientPlan:
    settings, steps = settings or HeadSettings(), _default_steps(size, features, mu, whitening)
    max_grad_norm = MAX_GRAD_NORM if whitening == "none" else WHITENED_GRAD_NORM
    length = min(GRADIENT_NOISE * mu * size, LONGEST_TRAINING, TRAINING_PER_FEATURE * features)
    if whitening == "moments":
        length = min(length, MOMENTS_RATE * classes * features * (settings.steps or steps) * max_grad_norm)
    # Of two classes only one residual is summed, which is shorter than the pair.
    share = math.sqrt(0.5) if classes == 2 else 1.0
    return _plan(settings, steps, share * max_grad_norm, share * length)


def _cells_plan(size: float, columns: int, mu: float, settings: HeadSettings) -> GradientPlan:
    length = min(CELLS_NOISE * mu * size, CELLS_TRAINING_PER_COLUMN * columns)
    clear = mu * size / columns
    least, most = CELLS_GRAD_NORM
    plan = _plan(settings, CELLS_STEPS, min(most, least * max(1.0, math.sqrt(clear / CELLS_CLEAR))), length)
    paired = clear >= PAIRS_FROM if settings.pairs is None else settings.pairs
    return replace(plan, momentum=CELLS_MOMENTUM, stages=2 if paired and columns > 1 else 1)


def _plan(settings: HeadSettings, steps: int, max_grad_norm: float, length: float) -> GradientPlan:
    """Return what is given, and the rest by default: a `length` of training, `eta * S * T`."""
    if settings.steps is not None:
        steps = settings.steps
        if steps < 1 or steps != int(steps):
            raise InvalidInput(f"steps must be an integer of at least 1, got {steps!r}.")
    if settings.max_grad_norm is not None:
        max_grad_norm = settings.max_grad_norm
    rate = settings.learning_rate
    return GradientPlan(
        int(steps), length / (steps * max_grad_norm) if rate is None else float(rate), float(max_grad_norm)
    )


def _default_steps(size: float, features: int, mu: float, whitening: Whitening) -> int:
    if whitening == "moments":
        fewest, most = MOMENTS_STEPS
        steps = max(
            MOMENTS_STEPS_PER_NOISE * _moments_noise(size, features, mu),
            MOMENTS_NUMBERS_READ / (size * features),
        )
        return int(max(fewest, min(most, steps)))
    return int(max(FEWEST_STEPS, min(STEPS, NUMBERS_READ / (size * features))))


def _moments_noise(size: float, features: int, mu: float) -> float:
    """Return the largest eigenvalue of the noise of second moments, over their mean eigenvalue."""
    return features * math.sqrt(features) / (mu * math.sqrt(MOMENTS_SHARE) * size)


def moments_share(size: float, features: int, mu: float) -> float:
    """Return the share of mu^2 spent on second moments by default: 0 if their noise is not small beside them."""
    pays = size >= MOMENTS_FROM and _moments_noise(size, features, mu) <= MOMENTS_NOISE
    return MOMENTS_SHARE if pays else 0.0


def calibration_share(size: float, mu: float) -> float:
    """Return the share of mu^2 that is spent on calibration by default, or 0 if the scale cannot be found well."""
    error = math.sqrt(CALIBRATION_STEPS) / (mu * math.sqrt(CALIBRATION_SHARE) * size)
    return CALIBRATION_SHARE if error <= CALIBRATION_ERROR else 0.0


def _output_plan(
    size: float, strength: float, *, noise: float = OUTPUT_NOISE, regularisation: float | None = None
) -> OutputPlan:
    """Return the settings of the output method: `lam = sqrt(2) / (kappa * N * strength)` unless it is given."""
    if regularisation is None:
        regularisation = max(math.sqrt(2) / (noise * size * strength), SMALLEST_REGULARISATION)
    return OutputPlan(float(regularisation), TOLERANCE * math.sqrt(2) / size)


def default_features(columns: int, image_shape: tuple[int, int, int] | None = None) -> FeatureMap:
    """Return the feature map of a head with ``features="auto"``."""
    if image_shape is not None:
        return image_features(image_shape)
    return UnitNorm(CONSTANT_PER_COLUMN * math.sqrt(columns))


@dataclass(frozen=True, eq=False)
class TableWeights(LogitClassifier):
    """The classifier whose scores are sums of one number for the cell of a row in each column, and a constant."""

    weights: Floats  # (classes, cells + 1); the last column is the constant
    centre: Floats  # (cells,) the released share of people in each cell
    sizes: tuple[int, ...]  # Number of cells of each column
    noise: Floats | None = None  # (cells + 1,) standard deviation of the noise in each, if known

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.weights)

    def scores(self, features: NDArray[Any]) -> Floats:
        """Compute the logits of rows of cells."""
        if len(features) <= _FEW_ROWS:
            return np.ascontiguousarray(np.add.accumulate(self.summands(features), axis=1)[:, -1])
        columns = [*np.asarray(features).T.astype(np.intp)]
        return np.ascontiguousarray(added_scores(columns, self.sizes, self.weights).T)

    def predict_proba(self, features: NDArray[Any]) -> Floats:
        """Compute class probabilities; those of a row do not depend on the other rows."""
        return np.ascontiguousarray(probabilities(self.scores(features).T).T)

    def summands(self, features: NDArray[Any]) -> Floats:
        """Return what the constant and each column add to scores: (rows, columns + 1, classes), in this order."""
        places = np.full((len(features), len(self.sizes) + 1), -1)
        places[:, 1:] = features + np.cumsum([0, *self.sizes[:-1]])
        return np.ascontiguousarray(self.weights.T[places])


def even_shares(sizes: Sequence[int]) -> Floats:
    """Return the share of people in each cell of columns of which nothing is known."""
    return np.concatenate([np.full(size, 1.0 / size) for size in sizes])


def added_scores(columns: Sequence[NDArray[np.intp]], sizes: Sequence[int], weights: Floats) -> Floats:
    """Return the scores of some rows, one line per output: the constant (last), and what their cells add."""
    scores = np.repeat(weights[:, -1:], len(columns[0]), axis=1)
    start = 0
    for cells, size in zip(columns, sizes, strict=True):
        for score, looked_up in zip(scores, weights[:, start : start + size], strict=True):
            score += looked_up[cells]
        start += size
    return scores


def whitening_kind(whitening: Floats | None) -> Whitening:
    """Return what a whitening was computed from: a matrix from second moments, a diagonal from the centre."""
    if whitening is None:
        return "none"
    return "moments" if whitening.ndim == 2 else "centre"


# --- The fitted head --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HeadWeights(LogitClassifier):
    """The classifier `scores(f) = W (f - m, b) / ||(f - m, b)||` of public features f, clipped to a radius."""

    weights: Floats  # W; the last column is for the constant feature b
    centre: Floats  # m
    bias: float  # b
    radius: float  # Features are clipped to this length and divided by it
    whitening: Floats | None = field(default=None, kw_only=True)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.weights)

    def scores(self, features: NDArray[np.floating]) -> Floats:
        """Compute the logits."""
        inputs = np.asarray(features, dtype=np.float32)
        logits = np.empty((len(inputs), self.classes))
        for start in range(0, len(inputs), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            rows = _unit_rows(clipped_rows(inputs[part], self.radius), self.centre, self.bias)
            if self.whitening is not None:
                rows = _whitened_rows(rows, self.whitening)
            logits[part] = rows @ self.weights.T
        return logits

    def predict_proba(self, features: NDArray[np.floating]) -> Floats:
        """Compute class probabilities."""
        logits = self.scores(features)
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


@dataclass(frozen=True, eq=False)
class PrivateHeadWeights(HeadWeights):
    """Weights that were not released, with bounds on their scores: a `Predictor` may answer from them.

    The bounds are proven for weights of `PrivateHead.fit` or of a model folder; for others, they are an assumption.
    """

    bounds: ScoreBounds  # How far one record or person moves the scores of any query
    _fitted: bool = field(default=False, init=False, repr=False)

    @classmethod
    def certified(
        cls, head: HeadWeights, sensitivity: Sensitivity, *, max_norm: float, unit: Unit = "record"
    ) -> PrivateHeadWeights:
        """Add the bounds that follow from the sensitivity of the weights, widened for the rounding of the scores.

        A computed score is off by at most `(d + 2) 2^-53 ||W||`, twice that between neighbours, doubled to be safe.
        """
        length = math.sqrt(float(np.square(head.weights).sum()))
        weights = head.weights * min(1.0, max_norm / max(length, max_norm))
        rounding = 4 * (head.weights.shape[1] + 2) * 2.0**-53 * max_norm * math.sqrt(head.classes)
        widened = Sensitivity(
            sensitivity.value * (1 + _SLACK) + rounding, sensitivity.basis, sensitivity.because
        )
        bounds = certified.score_bounds(widened, classes=head.classes, unit=unit)
        return cls(weights, head.centre, head.bias, head.radius, bounds, whitening=head.whitening)

    @classmethod
    def _of_fit(
        cls, head: HeadWeights, sensitivity: Sensitivity, *, max_norm: float, unit: Unit = "record"
    ) -> PrivateHeadWeights:
        """Return weights with proven bounds; only for weights whose sensitivity this library derived itself."""
        private = cls.certified(head, sensitivity, max_norm=max_norm, unit=unit)
        object.__setattr__(private, "_fitted", True)
        return private


proves_bounds(PrivateHeadWeights, when=lambda head: head._fitted)


Facts = Mapping[str, Any]
"""The public facts of a training by name: the ``parameters`` of its guarantee."""


def weights_guarantee(facts: Facts, *, own_map: bool, encoding: Encoding | None = None) -> Guarantee:
    """Return the guarantee of released weights."""
    because = f"Gaussian mechanism on a certified minimiser. {weight_sensitivity(facts).because}"
    if facts["training_method"] == "gradient":
        because = "Gaussian mechanisms on exact clipped gradient sums compose to mu (THEORY 3.1)."
    names = ("mu_size", "mu_class_sizes", "mu_centring", "mu_moments", "mu_calibration")
    parts = [mu for mu in map(facts.get, names) if mu is not None]
    if not all(mu > 0.0 for mu in (*parts, facts["mu_training"])):
        raise InvalidInput("Every release of a training must have a mu above 0.")
    own = sum([GaussianCost(mu).amount for mu in parts], _training_amount(facts))
    unit: Unit = facts.get("unit", "record")
    guarantee = Guarantee.of(
        GaussianCost(root_rounded_up(series_amount(facts, own))),
        status="proven",
        because=because + series_because(facts),
        parameters={**facts, "mu_version": root_rounded_up(own)} if "cohort" in facts else facts,
        assumptions=tuple(series_assumptions(facts, unit, encoding)),
        unit=unit,
    )
    guarantee = _of_facts(guarantee, facts, own_map, encoding, facts["noise_source"] != EXACT.describe())
    return weakened(guarantee, EARLIER_VERSION) if is_conditional(facts) else guarantee


def _training_amount(facts: Facts) -> Fraction:
    whole = GaussianCost(facts["mu_training"]).amount
    if facts["training_method"] != "gradient":
        return whole
    if "schedule" not in facts:  # A model made before the learning rate fell: the same noise in all steps.
        steps = facts["steps"]
        if not (isinstance(steps, int) and steps >= 1):
            raise InvalidInput(f"steps must be an integer of at least 1, got {steps!r}.")
        return steps * GaussianCost(facts["mu_training"] / math.sqrt(steps)).amount
    check_choice("schedule", facts["schedule"], (LINEAR,))
    return whole * _STEPS_ROUNDED


def query_guarantee(
    answers: Guarantee, facts: Facts, *, own_map: bool, encoding: Encoding | None = None
) -> Guarantee:
    """Return the guarantee of all answers from weights that are not released."""
    guarantee = Guarantee.of(
        answers.cost,
        status=answers.status,
        because=answers.because,
        parameters={**answers.parameters, **facts},
        assumptions=answers.assumptions,
        unit=facts.get("unit", "record"),
    )
    return _of_facts(guarantee, facts, own_map, encoding)


def _of_facts(
    guarantee: Guarantee,
    facts: Facts,
    own_map: bool,
    encoding: Encoding | None,
    seeded: bool = False,
) -> Guarantee:
    declared = facts["classes_declared"] is True
    erased = facts.get("erasure_list") is True
    basis = Basis(facts["features"], own_map, encoding, True, declared, code_before(facts), erased)
    return basis.under(guarantee, seeded=seeded)


def _gradient_sensitivity(
    max_grad_norm: float, classes: int, features: int, grid: float = GRID
) -> Sensitivity:
    return certified.head_gradient(max_grad_norm, coordinates=classes * features, grid=grid)


def weight_sensitivity(facts: Facts) -> Sensitivity:
    """Return how far one record moves what is released: a gradient sum, or the minimiser of the output method."""
    if facts["training_method"] == "gradient":
        # Heads of earlier versions have no fact `grid`; they could not have more than 2^22 records.
        grid = facts.get("grid", GRID)
        outputs = facts.get("outputs", facts["classes"])
        return _gradient_sensitivity(facts["max_grad_norm"], outputs, facts["dimension"], grid)
    return _output_sensitivity(_objective(facts), facts["classes"], facts["tolerance"])


def max_weight_norm(facts: Facts) -> float:
    """Return a public bound on the length of the minimiser of the output method."""
    return _max_solution_norm(_objective(facts), facts["classes"], float(facts["tolerance"]))


def least_tolerance(facts: Facts) -> float:
    """Return the tolerance of the output method with these facts, which float64 can certify."""
    wanted = TILTED_TOLERANCE
    if facts["loss"] != "convexified":
        wanted = _output_plan(facts["declared_size"], 1.0, regularisation=facts["regularisation"]).tolerance
    repeated = facts.get("unit", "record") == "person"
    return _certifiable_tolerance(
        _objective(facts), facts["dimension"], facts["classes"], wanted, repeated=repeated
    )


def _objective(facts: Facts) -> MeanCrossEntropy | Tilted:
    if facts["loss"] == "convexified":
        return Tilted(facts["alpha"], facts["mass"], facts["regularisation"])
    return MeanCrossEntropy(facts["declared_size"], facts["regularisation"])


# --- The scale of the scores ------------------------------------------------------------------------------------------

SMALLEST_SCALE, LARGEST_SCALE = 0.125, 4.0

Scores = Callable[[Table, slice], Floats]
"""Returns the scores of some rows of a block, one line per class; each row's follow from that row alone. For two
classes one line may stand for the difference."""
SCORES_AT_ONCE = 2**13
_LARGEST_SCORE = 1e30
"""Kept scores are at most this: float32 holds them."""


def with_scores(scores: Scores, rows_at_once: int, block: Table) -> Table:
    """Put the scores of all rows in the place of the rows; for two classes, their difference."""
    rows = np.empty((len(block), 1 if block.classes == 2 else block.classes), np.float32)

    def fill(number: int) -> None:
        part = slice(number * rows_at_once, min((number + 1) * rows_at_once, len(block)))
        found = scores(block, part)
        difference = found[1:] - found[:1] if len(found) == 2 else found
        rows[part] = np.clip(difference, -_LARGEST_SCORE, _LARGEST_SCORE).T

    parallel_map(fill, -(-len(block) // rows_at_once))
    return replace(block, rows=rows)


def kept_scores(block: Table, part: slice) -> Floats:
    """Return what `with_scores` has kept."""
    return np.asarray(block.rows[part].T, np.float64)


def released_scale(
    table: Rows,
    scores: Scores,
    rows_at_once: int,
    mu: float,
    source: NoiseSource,
    class_weights: Floats | None = None,
) -> float:
    """Release the scale; all bisection steps together are mu-Gaussian private."""
    # The squares add up to less than mu^2 after rounding.
    step_mu = mu / math.sqrt(CALIBRATION_STEPS) * (1.0 - 1e-12)
    excess = partial(_Excess, scores, rows_at_once=rows_at_once, class_weights=class_weights)
    return _bisected_scale(lambda scale: table.sum(excess(scale)), CALIBRATION_STEPS, step_mu, source)


def _bisected_scale(
    excess_at: Callable[[float], int], steps: int, step_mu: float, source: NoiseSource
) -> float:
    """Release the scale at which confidence equals accuracy (THEORY 3.15); each step is step_mu-Gaussian private.

    `excess_at(s)`, the sum of confidence minus correctness of the scores times s, grows with s, and one record or
    person moves it by at most 1. Bisection finds where it is zero.
    """
    low, high = math.log(SMALLEST_SCALE), math.log(LARGEST_SCALE)
    for _ in range(steps):
        middle = (low + high) / 2.0
        # From 2^33 rows on the sum may not be a float64 number; clamping moves no two sums further apart.
        excess = max(-(2**53), min(excess_at(math.exp(middle)), 2**53)) / _UNIT
        noisy = release_gaussian([excess], sensitivity=1.0, mu=step_mu, source=source).values[0]
        low, high = (low, middle) if noisy > 0.0 else (middle, high)
    return math.exp((low + high) / 2.0)


@dataclass(frozen=True)
class _Excess:
    """Sums confidence minus correctness over a block, in units of 2^-20, each rounded towards zero."""

    scores: Scores
    scale: float
    rows_at_once: int
    class_weights: Floats | None = None  # What a record counts by its class, at most 1

    def __call__(self, block: Table) -> int:
        total = 0
        for start in range(0, len(block), self.rows_at_once):
            part = slice(start, min(start + self.rows_at_once, len(block)))
            found = self.scores(block, part)
            if len(found) == 1:
                excess = logistic(np.abs(found[0]) * self.scale)
                excess -= (found[0] > 0.0) == block.labels[part]
            else:
                excess = probabilities(found * self.scale).max(axis=0)
                excess -= found.argmax(axis=0) == block.labels[part]
            if self.class_weights is not None:
                excess *= self.class_weights[block.labels[part]]
            if block.repeats is not None:
                excess = excess / block.repeats[part]
            total += int(np.trunc(excess * _UNIT).sum())
        return total
