"""DPSGD: a network trained by differentially private gradient descent, and what is guaranteed of it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state

from quietmax.accounting.costs import mu_of
from quietmax.accounting.dpsgd import Accountant, NoiseAnalysis
from quietmax.accounting.guarantee import Guarantee, Status, Unit
from quietmax.data.encoding import Encoding
from quietmax.data.schema import Schema
from quietmax.errors import InvalidInput
from quietmax.estimators.blocks import LocalEngine
from quietmax.estimators.dpsgd.centring import Centring, centre_noise, released_centre
from quietmax.estimators.dpsgd.config import Inputs, Optimizer, Plan, Preset, default_length, make_plan
from quietmax.estimators.dpsgd.opacus import Build, own_module_condition, train_private_module
from quietmax.estimators.dpsgd.stored_rows import StoredRows
from quietmax.estimators.dpsgd.training import train_private, train_private_stack
from quietmax.estimators.evaluate import EvaluationMixin, open_evaluations
from quietmax.estimators.head.exact_sums import whitening_on_grid
from quietmax.estimators.head.training import default_features
from quietmax.estimators.training_set import (
    CodeBefore,
    TrainingRows,
    data_assumptions,
    data_conditions,
    queries,
    training_rows,
    with_holdout,
)
from quietmax.estimators.validation import (
    OWN_MAP,
    SEEDED_WEIGHTS,
    SETTINGS_PUBLIC,
    ImageShape,
    checked_size,
    map_assumptions,
    named_features,
    runs_own_code,
    size_condition,
    weakened,
)
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.generic import describe_map
from quietmax.models.features.tabular import TableFeatures, table_features
from quietmax.models.mlp import MLP
from quietmax.models.training import LogitClassifier, TorchModel

Floats = NDArray[np.float64]

NUMERICAL = {
    "pld": "SciPy's Fourier transform and NumPy's elementary functions have rounding errors no larger than those that "
    "quietmax.accounting.dpsgd allows for.",
    "rdp": "dp-accounting computes the Renyi divergences of one step to within 1e-12.",
}
"""What a proven guarantee assumes of the libraries that compute it, by accountant."""
PLACES = (
    "Removing a {unit} leaves the other {unit}s in their batches: epochs are counted as one Gaussian mechanism each, "
    "although a shuffled order moves them."
)
POISSON = "Shuffled batches protect as well as Poisson samples of the same expected size, as which they are counted."
_ACCOUNTANT_NAMES = {
    "pld": "the privacy loss distribution",
    "rdp": "Renyi divergences",
    "zcdp": "concentrated privacy",
    "ac": "advanced composition",
    "nc": "adding up epsilon and delta",
}
_PROBES = 64
"""Public random records that the length of the features is guessed from."""


class DPSGD(EvaluationMixin, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A network trained by differentially private stochastic gradient descent (DP-SGD).

    Its weights may be published, and any number of predictions is free. The guarantee holds for one record added or
    removed, or for all records of one person if ``fit`` is told whose they are: then persons are sampled, and a person
    counts with the mean of its clipped gradients.

    Parameters
    ----------
    epsilon : float, default=1.0
        epsilon of the whole training.
    delta : float, optional
        delta of the whole training; 1/(10 * size) by default.
    accountant : {"pld", "rdp", "zcdp", "ac", "nc"}, default="pld"
        What calibrates the noise, see `quietmax.accounting.dpsgd`.
    analysis : {"proven", "published"}, default="proven"
        "proven": Poisson samples, every step counted. "published": shuffled epochs, counted as the paper's program
        counts them; the guarantee is conditional.
    preset : {"default", "paper"}, default="default"
        Where settings that are None come from. "paper": 128 tanh units, batches of 100, 100 epochs, Adam.
    features : FeatureMap or {"auto", "identity", "unit-norm", "scattering"} or None, default="auto"
        The public feature map, any object with a ``transform`` method. "auto": the map of a `PrivateHead` with
        ``features="auto"``, but no map with ``preset="paper"``, or with a ``network`` unless the records are images.
        None and "identity" mean no map.
    image_shape : tuple of int, optional
        Channels, height and width, if the records are images.
    hidden : sequence of int, optional
        Widths of the hidden layers. This and the next nine parameters override the preset.
    activation : str, optional
        "tanh", "sigmoid" or "relu".
    sampling_rate : float, optional
        Poisson sampling rate.
    steps : int, optional
        Number of steps, with those for centring.
    centring_steps : int, optional
        How many of the steps, the first ones, release the mean of the features, by which all rows are centred; 0 leaves
        centring out. By default 5% of the steps, and 0 with ``preset="paper"``, ``analysis="published"`` or a
        ``network``, which cannot have it.
    max_grad_norm : float, optional
        Per-example gradient clipping norm.
    learning_rate : float, optional
        Step size, before it falls.
    decay : float, optional
        Share of the gradient steps, the last ones, over which the learning rate falls linearly to almost zero.
    optimizer : {"sgd", "momentum", "adam"}, optional
        What the noisy gradients are given to.
    l2 : float, optional
        L2 penalty on the kernels.
    network : callable, optional
        A function (features, classes) -> torch module that returns logits, instead of the built-in network.
    length : float, optional
        A public guess at the length of a record's features. With centring, features are clipped to it; without, the
        default step size follows from it. By default the length that public random records in [0, 1] have after the
        feature map, or 0.3 per root of the number of columns without a map.
    declared_size : int, optional
        The public number of records, or of persons. If None, the true number is used and the guarantee is conditional.
    classes : sequence, optional
        The public set of labels. If None, it is read off ``y`` and the guarantee is conditional. A schema declares
        them instead.
    schema : Schema, optional
        What is public about the columns of a table; ``fit`` then takes a data frame, files or a stream.
    random_state : int, RandomState or None, default=None
        None: exact noise from the operating system. Otherwise seeded noise for experiments, and a conditional
        guarantee.
    engine : LocalEngine or "local", default="local"
        Where the rows are kept during the training, and what reports progress. It does not change the network.

    Attributes
    ----------
    guarantee_ : Guarantee
        What is guaranteed of the released network.
    plan_ : Plan
        All public numbers of the run.
    model_ : PrivateNetwork
        The released network.
    classes_ : array of shape (classes,)
        The labels.
    encoding_ : Encoding or None
        How the rows of a table are encoded; None for arrays.
    holdout_ : Holdout or None
        Which persons of the table were held out of training; None if nobody was.
    n_features_in_ : int
        Number of columns of an encoded record.
    feature_map_ : object or None
        The feature map that was used.

    Examples
    --------
    >>> X, y = np.array([[0.0, 1.0], [1.0, 0.0]] * 500), np.array([0, 1] * 500)
    >>> private = DPSGD(epsilon=1.0, delta=1e-5, declared_size=1000, classes=(0, 1)).fit(X, y)
    >>> private.predict([[0.1, 0.9]]), private.guarantee_.status
    (array([0]), 'proven')
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float | None = None,
        *,
        accountant: Accountant = "pld",
        analysis: NoiseAnalysis = "proven",
        preset: Preset = "default",
        features: Any = "auto",
        image_shape: ImageShape | None = None,
        hidden: Sequence[int] | None = None,
        activation: str | None = None,
        sampling_rate: float | None = None,
        steps: int | None = None,
        centring_steps: int | None = None,
        max_grad_norm: float | None = None,
        learning_rate: float | None = None,
        decay: float | None = None,
        optimizer: Optimizer | None = None,
        l2: float | None = None,
        network: Build | None = None,
        length: float | None = None,
        declared_size: int | None = None,
        classes: Sequence[Any] | None = None,
        schema: Schema | None = None,
        random_state: Any = None,
        engine: LocalEngine | Literal["local"] = "local",
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.accountant = accountant
        self.analysis = analysis
        self.preset = preset
        self.features = features
        self.image_shape = image_shape
        self.hidden = hidden
        self.activation = activation
        self.sampling_rate = sampling_rate
        self.steps = steps
        self.centring_steps = centring_steps
        self.max_grad_norm = max_grad_norm
        self.learning_rate = learning_rate
        self.decay = decay
        self.optimizer = optimizer
        self.l2 = l2
        self.network = network
        self.length = length
        self.declared_size = declared_size
        self.classes = classes
        self.schema = schema
        self.random_state = random_state
        self.engine = engine

    @np.errstate(all="ignore")  # what the caller has set must not make some records an error
    def fit(self, X: Any, y: Any = None, *, groups: Any = None) -> DPSGD:
        """Train on private records and release the network.

        Parameters
        ----------
        X : array-like of shape (records, columns), data frame, Records, or a source of rows
            The private records. A pandas or polars frame if there is a ``schema``. With a schema the rows may also be
            read part by part: from a file or folder of Parquet, CSV or TSV files, a pattern such as "people/*.parquet",
            a pyarrow dataset, or an iterator of Arrow record batches.
        y : array-like of shape (records,), optional
            Their labels, unless they are in the frame.
        groups : array-like of shape (records,), optional
            Whose record each one is. The unit of the guarantee is then the person. The `person` column of a schema
            does the same.

        Returns
        -------
        DPSGD
            The fitted estimator.
        """
        found = training_rows(self, X, y, groups)
        seed = None
        if self.random_state is not None:
            seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with StoredRows(found, self.engine) as rows:
            size = rows.units if self.declared_size is None else checked_size(self.declared_size)
            self.feature_map_ = self._feature_map(found, size)
            length = self._length(found.columns) if self.length is None else self.length
            kind = self._inputs()
            self.plan_ = self._plan(size, length, kind)
            settings = self.plan_.settings
            rows.expect(2 + settings.steps * settings.sampling_rate)
            # What the built-in network sees must be finite; a module leaves out records that it cannot compute.
            plain = kind == "plain" and self.network is None
            rows.update(self._mapped, self.feature_map_, finite=plain)
            dimension = rows.shape[1]
            centring = None
            if kind != "plain":
                centring = self._centring(rows, float(length), seed)
                rows.update(centring.rows)
            self.model_ = PrivateNetwork(self._trained(rows, seed), centring)
        guarantee = network_guarantee(
            self.plan_,
            exact=seed is None,
            own_module=self.network is not None,
            size_declared=self.declared_size is not None,
            classes_declared=found.classes_declared,
            features=self.feature_map_,
            unit=found.unit,
            encoding=found.encoding,
            code_before=found.code_before,
            centring=centring,
            parameters={"dimension": dimension, "classes": len(self.classes_)},
        )
        self.guarantee_: Guarantee = with_holdout(guarantee, found.holdout)
        open_evaluations(self)
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Predict labels.

        Parameters
        ----------
        X : array-like of shape (records, columns) or data frame
            Queries.

        Returns
        -------
        array of shape (records,)
            The most probable labels.
        """
        queries = self._queries(X)
        return np.asarray(self.classes_[self.model_.predict(queries)])

    def predict_proba(self, X: Any) -> Floats:
        """Predict class probabilities.

        Parameters
        ----------
        X : array-like of shape (records, columns) or data frame
            Queries.

        Returns
        -------
        array of shape (records, classes)
            Probabilities.
        """
        queries = self._queries(X)
        return self.model_.predict_proba(queries)

    def decision_function(self, X: Any) -> Floats:
        """Compute logits.

        Parameters
        ----------
        X : array-like of shape (records, columns) or data frame
            Queries.

        Returns
        -------
        array of shape (records, classes), or (records,) for two classes
            Logits; for two classes the difference of the two.
        """
        queries = self._queries(X)
        scores = self.model_.scores(queries)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def _feature_map(self, found: TrainingRows, size: int) -> Any:
        """Return the feature map that ``features`` names, None for no map."""
        if isinstance(self.features, str) and self.features == "identity":
            return None
        if not (isinstance(self.features, str) and self.features == "auto"):
            return named_features(self.features, self.image_shape, encoding=found.encoding)
        if self.preset == "paper" or (self.network is not None and self.image_shape is None):
            return None
        if found.encoding is not None and self.image_shape is None:
            delta = 1 / (10 * size) if self.delta is None else self.delta
            return table_features(found.encoding, size, len(self.classes_), mu_of(self.epsilon, delta))
        return default_features(found.columns, self.image_shape)

    def _inputs(self) -> Inputs:
        """Return what the network sees; a table's features are scaled by the centre."""
        possible = self.preset == "default" and self.analysis == "proven" and self.network is None
        if self.centring_steps and not possible:
            raise InvalidInput(
                "centring_steps requires preset='default', analysis='proven' and the built-in network."
            )
        if not possible or self.centring_steps == 0 or (self.centring_steps is None and self.steps == 1):
            return "plain"
        return "scaled" if isinstance(self.feature_map_, TableFeatures) else "centred"

    def _centring(self, rows: StoredRows, radius: float, seed: int | None) -> Centring:
        """Release the centre; a table's features also get a scale that is computed from it."""
        centre = released_centre(rows, self.plan_, radius=radius, seed=seed, persons=rows.persons)
        if not isinstance(self.feature_map_, TableFeatures):
            return Centring(centre, radius)
        scale = self.feature_map_.scale(centre, centre_noise(self.plan_))
        return Centring(centre, radius, whitening_on_grid(np.append(scale, 1.0)))

    def _plan(self, size: int, length: float, inputs: Inputs) -> Plan:
        """Return the settings, from public numbers (the true number of units only if none is declared)."""
        return make_plan(
            size,
            epsilon=self.epsilon,
            delta=self.delta,
            accountant=self.accountant,
            analysis=self.analysis,
            preset=self.preset,
            length=length,
            inputs=inputs,
            hidden=None if self.hidden is None else tuple(self.hidden),
            activation=self.activation,
            sampling_rate=self.sampling_rate,
            steps=self.steps,
            centring_steps=self.centring_steps,
            max_grad_norm=self.max_grad_norm,
            learning_rate=self.learning_rate,
            decay=self.decay,
            optimizer=self.optimizer,
            l2=self.l2,
        )

    def _length(self, columns: int) -> float:
        """Guess the length of a record's features from public numbers."""
        if self.feature_map_ is None:
            return default_length(columns)
        probes = np.random.default_rng(0).random((_PROBES, columns), dtype=np.float32)
        return max(float(np.median(np.linalg.norm(self._mapped(probes), axis=1))), 1e-6)

    def _trained(self, inputs: StoredRows, seed: int | None) -> MLP | TorchModel:
        """Train the user's module, the built-in network with exact noise, or the built-in network with a seed."""
        settings, multiplier, size = self.plan_.settings, self.plan_.noise_multiplier, self.plan_.size
        classes, labels, persons = len(self.classes_), inputs.labels, inputs.persons
        if self.network is not None:
            module = self.network(inputs.shape[1], classes)
            trained = train_private_module(
                module,
                inputs,
                labels,
                settings=settings,
                noise_multiplier=multiplier,
                size=size,
                seed=seed,
                persons=persons,
            )
            return TorchModel(trained, classes)
        if seed is None:
            first = int.from_bytes(os.urandom(4), "big")
            return train_private(
                inputs,
                labels,
                classes,
                settings=settings,
                noise_multiplier=multiplier,
                size=size,
                seed=first,
                persons=persons,
            )
        return train_private_stack(
            inputs,
            labels,
            classes,
            [np.arange(len(inputs))],
            settings=settings,
            noise_multipliers=[multiplier],
            seeds=[seed],
            sizes=[size],
            persons=persons,
        )

    def _queries(self, X: Any) -> NDArray[np.float32]:
        """Return the public features of queries."""
        return self._mapped(queries(self, X))

    def _mapped(self, records: NDArray[np.float32]) -> NDArray[np.float32]:
        """Apply the feature map."""
        if self.feature_map_ is None:
            return records
        return np.ascontiguousarray(self.feature_map_.transform(records), dtype=np.float32)


@dataclass(frozen=True, eq=False)
class PrivateNetwork(LogitClassifier):
    """A network whose weights were released: everything computed from it is post-processing."""

    network: MLP | TorchModel  # The network
    centring: Centring | None = None  # How features are centred before the network sees them

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.network.classes

    def scores(self, features: NDArray[np.floating]) -> Floats:
        """Compute the logits."""
        rows = features if self.centring is None else self.centring.rows(features)
        logits = self.network.logits(rows)
        return logits.double().numpy() if isinstance(logits, torch.Tensor) else logits


def network_guarantee(
    plan: Plan,
    *,
    exact: bool,
    own_module: bool,
    size_declared: bool,
    classes_declared: bool,
    features: object = None,
    centring: Centring | None = None,
    unit: Unit = "record",
    encoding: Encoding | None = None,
    code_before: CodeBefore = MappingProxyType({}),
    parameters: Mapping[str, Any] | None = None,
) -> Guarantee:
    """Return the guarantee of a network trained by a plan.

    Full batches with the proven analysis are exactly sqrt(steps)/multiplier-Gaussian private. Everything else is the
    one point (epsilon, delta) that the noise was calibrated for.
    """
    description = _described(features)
    steps = plan.settings.steps
    gaussian = plan.analysis == "proven" and plan.settings.sampling_rate == 1
    status, because, assumptions = _counting(plan, gaussian, unit)
    guarantee = Guarantee(
        definition="gaussian" if gaussian else "approximate",
        epsilon=None if gaussian else plan.epsilon,
        delta=None if gaussian else plan.delta,
        mu=math.sqrt(steps) / plan.noise_multiplier * (1 + 2.0**-50) if gaussian else None,
        status=status,
        because=because,
        parameters={
            "estimator": "dpsgd",
            **plan.to_json(),
            "features": description,
            **_centring_facts(centring),
            **(parameters or {}),
            "classes_declared": classes_declared,
            "size_declared": size_declared,
            **code_before,
            "noise_source": {"source": "exact" if exact else "seeded", "exact": exact},
        },
        assumptions=(
            SETTINGS_PUBLIC,
            *data_assumptions(unit, encoding),
            *map_assumptions(description),
            *assumptions,
        ),
        unit=unit,
    )
    return weakened(
        guarantee,
        *((own_module_condition(unit),) if own_module else ()),
        *((OWN_MAP,) if runs_own_code(features) else ()),
        *data_conditions(classes_declared=classes_declared, encoding=encoding, code_before=code_before),
        *(() if size_declared else (size_condition(unit),)),
        *(() if exact else (SEEDED_WEIGHTS,)),
    )


def _counting(plan: Plan, gaussian: bool, unit: Unit) -> tuple[Status, str, tuple[str, ...]]:
    """Return the status, the reason and the assumptions that follow from how the steps are counted."""
    steps, accountant = plan.settings.steps, _ACCOUNTANT_NAMES[plan.accountant]
    gradients, where = "clipped gradients", "DP-SGD page, section 2"
    if plan.settings.centring_steps:
        gradients = "clipped features and gradients"
    if unit == "person":
        gradients, where = f"persons' mean {gradients}", f"THEORY 3.7; {where}"
    if gaussian:
        return "proven", f"{steps} Gaussian mechanisms on sums of all {gradients} ({where}).", ()
    if plan.analysis == "proven":
        reason = f"{steps} Gaussian mechanisms on Poisson samples of {gradients}, composed by {accountant} ({where})."
        return "proven", reason, (NUMERICAL[plan.accountant],) if plan.accountant in NUMERICAL else ()
    reason = (
        f"The noise is what the paper's program computes by {accountant}, for batches other than those it shuffles "
        "(DP-SGD page, section 3)."
    )
    return "conditional", reason, (POISSON if plan.accountant == "rdp" else PLACES.format(unit=unit),)


def _centring_facts(centring: Centring | None) -> dict[str, Any]:
    """Return the public facts of centring by name."""
    if centring is None:
        return {}
    return {"radius": centring.radius, "inputs": "centred" if centring.scale is None else "scaled"}


def _described(features: object) -> Any:
    """Describe a feature map by JSON values."""
    if features is None:
        return None
    if isinstance(features, FeatureMap):
        return describe_map(features)
    return {"kind": type(features).__name__}
