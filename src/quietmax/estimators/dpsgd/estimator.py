"""What is claimed of a network trained by DP-SGD, and on which assumptions."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from quietmax.accounting.dpsgd import Accountant, NoiseAnalysis
from quietmax.accounting.guarantee import Guarantee, Status
from quietmax.estimators import validation as conditions
from quietmax.estimators.dpsgd import opacus as dpsgd_module
from quietmax.estimators.dpsgd.config import LENGTH_PER_COLUMN, Optimizer, Plan, Preset, plan
from quietmax.estimators.dpsgd.opacus import Build, train_private_module
from quietmax.estimators.dpsgd.training import train_private, train_private_stack
from quietmax.estimators.validation import SETTINGS_PUBLIC, checked_records, class_numbers, runs_own_code
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.generic import describe_map
from quietmax.models.mlp import MLP
from quietmax.models.training import TorchModel, softmax

_NAMES = {
    "pld": "the privacy loss distribution",
    "rdp": "Renyi divergences",
    "zcdp": "concentrated privacy",
    "ac": "advanced composition",
    "nc": "adding up epsilon and delta",
}
NUMERICAL = {
    "pld": "SciPy's Fourier transform and NumPy's elementary functions have rounding errors no larger than those that "
    "quietmax.accounting.dpsgd allows for.",
    "rdp": "dp-accounting computes the Renyi divergences of one step to within 1e-12.",
}
PLACES = (
    "Removing a record leaves the other records in their batches: epochs are counted as one Gaussian mechanism each, "
    "although a shuffled order moves them."
)
POISSON = "Shuffled batches protect as well as Poisson samples of the same expected size, as which they are counted."


def claim(
    plan: Plan,
    *,
    exact: bool,
    own_module: bool,
    size_declared: bool,
    classes_declared: bool,
    features: object = None,
    parameters: Mapping[str, Any] | None = None,
) -> Guarantee:
    """Return the guarantee of a run by this plan.

    Full batches with the proven analysis are exactly sqrt(steps)/multiplier-Gaussian private; everything else is the
    one point (epsilon, delta) that the accountant was asked for.
    """
    assumptions = [SETTINGS_PUBLIC, *conditions.map_assumptions(_described(features))]
    status: Status = "proven"
    steps, rate = plan.settings.steps, plan.settings.sampling_rate
    gaussian = plan.analysis == "proven" and rate == 1
    if gaussian:
        because = (
            f"{steps} Gaussian mechanisms on clipped gradient sums of all records (DP-SGD page, section 2)."
        )
    elif plan.analysis == "proven":
        because = (
            f"{steps} Gaussian mechanisms on Poisson samples of clipped gradients, composed by "
            f"{_NAMES[plan.accountant]} (DP-SGD page, section 2)."
        )
        assumptions += [NUMERICAL[plan.accountant]] if plan.accountant in NUMERICAL else []
    else:
        status = "conditional"
        assumptions.append(POISSON if plan.accountant == "rdp" else PLACES)
        because = (
            f"The noise is what the paper's program computes by {_NAMES[plan.accountant]}, for batches other than "
            "those it shuffles (DP-SGD page, section 3)."
        )
    if own_module:
        status = "conditional"
        assumptions += dpsgd_module.ASSUMPTIONS
        because += " The module is the user's own."
    met = ((conditions.MAP, runs_own_code(features)), (conditions.CLASSES, not classes_declared))
    for condition in [each for each, applies in (*met, (conditions.SIZE, not size_declared)) if applies]:
        status = "conditional"
        assumptions += condition.assumptions
        because += f" {condition.because}"
    if not exact:
        status = "conditional"
        assumptions.append("Nobody knows the seed, and nobody looks at the low digits of the weights.")
        because += " The noise is seeded and in floating point, for experiments only (THEORY 3.5)."
    source = {"source": "exact" if exact else "seeded", "exact": exact}
    described = {
        "estimator": "dpsgd",
        **plan.to_json(),
        "features": _described(features),
        **(parameters or {}),
        "noise_source": source,
    }
    return Guarantee(
        definition="gaussian" if gaussian else "approximate",
        epsilon=None if gaussian else plan.epsilon,
        delta=None if gaussian else plan.delta,
        mu=math.sqrt(steps) / plan.noise_multiplier * (1 + 2.0**-50) if gaussian else None,
        status=status,
        because=because,
        parameters=described,
        assumptions=tuple(assumptions),
    )


def _described(features: object) -> Any:
    if features is None:
        return None
    if isinstance(features, FeatureMap):
        return describe_map(features)
    return {"kind": type(features).__name__}


Floats = NDArray[np.float64]
_PROBES = 64


@dataclass(frozen=True, eq=False)
class PrivateNetwork:
    """A network whose weights were released: everything computed from it is post-processing."""

    network: MLP | TorchModel

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.network.classes

    def scores(self, features: NDArray[np.floating]) -> Floats:
        """Logits of shape (records, classes)."""
        logits = self.network.logits(features)
        return logits.double().numpy() if isinstance(logits, torch.Tensor) else logits

    def predict(self, features: NDArray[np.floating]) -> NDArray[np.int64]:
        """Class numbers."""
        return np.asarray(self.scores(features).argmax(-1))

    def predict_proba(self, features: NDArray[np.floating]) -> Floats:
        """Class probabilities."""
        return softmax(self.scores(features))


class DPSGD(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A network trained by DP-SGD; its weights may be published and predictions are unlimited.

    Parameters
    ----------
    epsilon, delta : the promise; delta None means 1/(10*size).
    accountant : "pld", "rdp", "zcdp", "ac" or "nc", see `quietmax.accounting.dpsgd`.
    analysis : "proven" (Poisson samples, every step counted) or "published" (shuffled epochs, counted as the program
        that the paper used does; conditional).
    preset : "default" or "paper", where settings that are None come from (`dpsgd_plan`).
    features : a public feature map with a `transform` method, or None.
    hidden, activation, sampling_rate, steps, max_grad_norm, learning_rate, optimiser, l2 : override the preset.
    network : a function (features, classes) -> torch module that returns logits, instead of the built-in network.
    length : a public guess at the length of a record's features, for the default step size; by default what public
        random records in [0, 1] have after the feature map, or 0.3 per root of the number of columns without one.
    declared_size : the public number of records; without it the true one is used and the guarantee is conditional.
    classes : the public set of labels; if None it is read off `y` and the guarantee is conditional.
    random_state : None means exact noise from the operating system; anything else means seeded noise for experiments,
        and a conditional guarantee.

    Attributes
    ----------
    guarantee_ : what is claimed. plan_ : all public numbers of the run. model_ : the released network.
    classes_, n_features_in_, feature_map_ : the labels, the number of columns and the map used.

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
        features: Any = None,
        hidden: Sequence[int] | None = None,
        activation: str | None = None,
        sampling_rate: float | None = None,
        steps: int | None = None,
        max_grad_norm: float | None = None,
        learning_rate: float | None = None,
        optimizer: Optimizer | None = None,
        l2: float | None = None,
        network: Build | None = None,
        length: float | None = None,
        declared_size: int | None = None,
        classes: Sequence[Any] | None = None,
        random_state: Any = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.accountant = accountant
        self.analysis = analysis
        self.preset = preset
        self.features = features
        self.hidden = hidden
        self.activation = activation
        self.sampling_rate = sampling_rate
        self.steps = steps
        self.max_grad_norm = max_grad_norm
        self.learning_rate = learning_rate
        self.optimizer = optimizer
        self.l2 = l2
        self.network = network
        self.length = length
        self.declared_size = declared_size
        self.classes = classes
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike) -> DPSGD:
        """Train and release."""
        records, given = checked_records(self, X, y)
        self.classes_, labels = class_numbers(given, self.classes)
        self.feature_map_ = self.features
        self.plan_ = self._plan(len(records), records.shape[1])
        inputs = self._mapped(records)
        seed = None
        if self.random_state is not None:
            seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.model_ = PrivateNetwork(self._trained(inputs, labels, seed))
        self.guarantee_: Guarantee = claim(
            self.plan_,
            exact=seed is None,
            own_module=self.network is not None,
            size_declared=self.declared_size is not None,
            classes_declared=self.classes is not None,
            features=self.features,
            parameters={
                "dimension": inputs.shape[1],
                "classes": len(self.classes_),
                "classes_declared": self.classes is not None,
                "size_declared": self.declared_size is not None,
            },
        )
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The most probable label of each record."""
        queries = self._queries(X)
        return np.asarray(self.classes_[self.model_.predict(queries)])

    def predict_proba(self, X: ArrayLike) -> Floats:
        """Class probabilities."""
        queries = self._queries(X)
        return self.model_.predict_proba(queries)

    def decision_function(self, X: ArrayLike) -> Floats:
        """Logits, (n, C); for two classes their difference, (n,)."""
        queries = self._queries(X)
        scores = self.model_.scores(queries)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def _plan(self, records: int, columns: int) -> Plan:
        """Everything here is computed from public numbers (the true number of records only if none is declared)."""
        return plan(
            records if self.declared_size is None else self.declared_size,
            epsilon=self.epsilon,
            delta=self.delta,
            accountant=self.accountant,
            analysis=self.analysis,
            preset=self.preset,
            length=self._length(columns) if self.length is None else self.length,
            hidden=None if self.hidden is None else tuple(self.hidden),
            activation=self.activation,
            sampling_rate=self.sampling_rate,
            steps=self.steps,
            max_grad_norm=self.max_grad_norm,
            learning_rate=self.learning_rate,
            optimizer=self.optimizer,
            l2=self.l2,
        )

    def _length(self, columns: int) -> float:
        if self.features is None:
            return LENGTH_PER_COLUMN * math.sqrt(columns)
        probes = np.random.default_rng(0).random((_PROBES, columns), dtype=np.float32)
        return max(float(np.median(np.linalg.norm(self._mapped(probes), axis=1))), 1e-6)

    def _trained(
        self, inputs: NDArray[np.float32], labels: NDArray[np.int64], seed: int | None
    ) -> MLP | TorchModel:
        settings, multiplier, size = self.plan_.settings, self.plan_.noise_multiplier, self.plan_.size
        classes = len(self.classes_)
        if self.network is not None:
            module = self.network(inputs.shape[1], classes)
            trained = train_private_module(
                module, inputs, labels, settings=settings, noise_multiplier=multiplier, size=size, seed=seed
            )
            return TorchModel(trained, classes)
        if seed is None:
            first = int.from_bytes(os.urandom(4), "big")
            return train_private(
                inputs, labels, classes, settings=settings, noise_multiplier=multiplier, size=size, seed=first
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
        )

    def _queries(self, X: ArrayLike) -> NDArray[np.float32]:
        check_is_fitted(self)
        return self._mapped(validate_data(self, X, dtype=np.float32, reset=False))

    def _mapped(self, records: NDArray[np.float32]) -> NDArray[np.float32]:
        if self.feature_map_ is None:
            return records
        return np.ascontiguousarray(self.feature_map_.transform(records), dtype=np.float32)
