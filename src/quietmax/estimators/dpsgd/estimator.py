"""DPSGD: a network trained by differentially private gradient descent, and what is guaranteed of it.

The first steps release the mean of the features, by which all rows are centred; the last ones how far confidence is
above accuracy at some scales of the logits. In each a record taken adds a vector of length at most 1, with noise of
standard deviation sigma; a step on gradients clipped to S has noise of sigma*S. All are the same mechanism up to the
factor S, so the accountant counts all steps alike.

A row f becomes `5 (f - m) / ||(f - m, 0.2)||`, for the released mean m: the row of the private head, times 5, so that
its constant 0.2 becomes the bias of the network. Features of tables are scaled as well (`TableFeatures.scale`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from quietmax.accounting.costs import mu_of
from quietmax.accounting.dpsgd import Accountant, NoiseAnalysis
from quietmax.accounting.guarantee import Guarantee, Status, Unit
from quietmax.data.schema import Schema
from quietmax.errors import InvalidInput
from quietmax.estimators.base import PrivateClassifier, _documented
from quietmax.estimators.blocks import ROWS_AT_ONCE, Floats, LocalEngine, Table
from quietmax.estimators.dpsgd.gradients import exact_logits
from quietmax.estimators.dpsgd.training import (
    CENTRING_SHARE,
    LENGTH_PER_COLUMN,
    ROW_LENGTH,
    Batch,
    Build,
    CellLayer,
    DPSGDSettings,
    Inputs,
    Plan,
    Preset,
    StoredRows,
    _check_length,
    _draw_batches,
    _randomness,
    make_plan,
    released_shares,
    train_network_on_cells,
    train_on_cells,
    train_private,
    train_private_module,
    train_private_stack,
)
from quietmax.estimators.head.effects import SaysEffects
from quietmax.estimators.head.exact_sums import (
    BITS,
    _row_sum,
    _unit_rows,
    _whitened_rows,
    _whitening_on_grid,
    clipped_rows,
    on_grid,
)
from quietmax.estimators.head.tables import (
    PEOPLE_PER_INTERVAL,
    cell_scores,
    centred,
    class_scores,
    levels_for,
)
from quietmax.estimators.head.tables import Basis as CellBasis
from quietmax.estimators.head.weights import Scores, TableWeights, _bisected_scale, _Excess, default_features
from quietmax.estimators.training_set import (
    Basis,
    Condition,
    ImageShape,
    Persons,
    TrainingRows,
)
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.tabular import TableCells, TableFeatures, table_cells, table_features
from quietmax.models.stacked import MLP
from quietmax.models.training import LogitClassifier, TorchModel
from quietmax.noise.release import release_gaussian


@dataclass(frozen=True, eq=False)
class Centring:
    """What makes rows of features centred, from released and public numbers."""

    centre: Floats  # The released mean of the features, clipped to the radius and divided by it
    radius: float  # Features are clipped to this length
    scale: Floats | None = None

    def rows(self, features: NDArray[np.floating]) -> NDArray[np.float32]:
        """Return what the network sees; each row depends on its own features alone."""
        rows = np.empty(np.shape(features), dtype=np.float32)
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            clipped = clipped_rows(np.asarray(features[part], dtype=np.float32), self.radius)
            centred = _unit_rows(clipped, self.centre, 1.0 / ROW_LENGTH)
            if self.scale is not None:
                centred = _whitened_rows(centred, self.scale)
            rows[part] = ROW_LENGTH * centred[:, :-1]
        return rows


def _centred(centring: Centring, block: Table) -> Table:
    return replace(block, rows=centring.rows(block.rows))


def _released_centre(
    features: NDArray[np.float32] | StoredRows,
    plan: Plan,
    *,
    radius: float,
    seed: int | None = None,
    persons: Persons | None = None,
) -> Floats:
    """Release the mean of clipped features by the centring steps of a plan."""
    settings, records = plan.settings, len(features)
    _check_length(records)
    source, drawn = _randomness(0xCE27, seed)
    batches = _draw_batches(records, plan.size, settings, persons, seed=drawn)
    total = np.zeros(features.shape[1])
    for _ in range(settings.centring_steps):
        exact = _batch_sum(features, next(batches), radius, persons)
        total += release_gaussian(exact, sensitivity=1.0, mu=1 / plan.noise_multiplier, source=source).values
    mean = total / (settings.centring_steps * settings.sampling_rate * plan.size)
    length = math.sqrt(float(np.square(mean).sum()))
    return on_grid(mean * ((1.0 - 2.0**-BITS) / max(length, 1.0)))


def _released_scale(
    scores: Scores,
    features: NDArray[np.float32] | StoredRows,
    labels: NDArray[np.integer[Any]],
    classes: int,
    plan: Plan,
    *,
    seed: int | None = None,
    persons: Persons | None = None,
) -> float:
    """Release the scale at which confidence equals accuracy, by the calibration steps of a plan."""
    source, drawn = _randomness(0xCA1B, seed)
    batches = _draw_batches(len(features), plan.size, plan.settings, persons, seed=drawn)

    def _excess_at(scale: float) -> int:
        """Sum over the rows of the next batch; one record, or all rows of one person, move it by at most 1."""
        batch = Batch(features, labels, classes, persons, next(batches))
        return batch.sum(_Excess(scores, scale, ROWS_AT_ONCE))

    return _bisected_scale(_excess_at, plan.settings.calibration_steps, 1 / plan.noise_multiplier, source)


def _network_scores(network: MLP, table: Table, part: slice, layer: CellLayer | None = None) -> Floats:
    rows = table.rows[part]
    return exact_logits(network, rows if layer is None else layer.rows(rows))


def _scaled(network: MLP, scale: float) -> MLP:
    kernels, biases = ((*layers[:-1], layers[-1] * scale) for layers in (network.kernels, network.biases))
    return replace(network, kernels=kernels, biases=biases)


def _centre_noise(plan: Plan) -> float:
    """Return the standard deviation of the noise on each coordinate of a released centre."""
    settings = plan.settings
    expected = settings.sampling_rate * plan.size
    return plan.noise_multiplier / (math.sqrt(settings.centring_steps) * expected)


def _batch_sum(
    features: NDArray[np.float32] | StoredRows,
    batch: NDArray[np.int64],
    radius: float,
    persons: Persons | None,
) -> Floats:
    """Sum the clipped rows of a batch without rounding; one person changes the sum by at most 1 in L2."""
    total = np.zeros(features.shape[1])
    for start in range(0, len(batch), ROWS_AT_ONCE):
        part = batch[start : start + ROWS_AT_ONCE]
        rows = clipped_rows(features[part], radius).astype(np.float32)
        # Sums are integer multiples of 2^-20 below 2^33, so adding them is exact.
        repeats = None if persons is None else persons.rows[part]
        total += _row_sum(Table(rows, np.zeros(len(part), np.int64), 1, repeats))
    return total


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


@_documented
@dataclass(eq=False, repr=False)
class DPSGD(SaysEffects, PrivateClassifier):
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
        The public feature map. "auto": the map of a `PrivateHead` with ``features="auto"``, but no map with
        ``preset="paper"``, or with a ``network`` unless the records are images. None and "identity" mean no map.
    network : callable, optional
        A function (features, classes) -> torch module that returns logits, instead of the built-in network.
    settings : DPSGDSettings, optional
        Layers, sampling rate, steps, clipping and optimizer; they override the preset.
    declared_size : int, optional
        The public number of records, or of persons. If None, the true number is used and the guarantee is conditional.
    $shared_parameters
    engine : LocalEngine or "local", default="local"
        Where the rows are kept during the training, and what reports progress. It does not change the network.

    Attributes
    ----------
    plan_ : Plan
        All public numbers of the run.
    model_ : PrivateNetwork or TableWeights
        The released network, or what each cell of a table adds to the logits of a linear model.
    scale_ : float
        What the logits have been multiplied by, so that confidence is close to accuracy. Absent without calibration.
    $shared_attributes

    Examples
    --------
    >>> X, y = np.array([[0.0, 1.0], [1.0, 0.0]] * 500), np.array([0, 1] * 500)
    >>> private = DPSGD(epsilon=1.0, delta=1e-5, declared_size=1000, classes=(0, 1)).fit(X, y)
    >>> private.predict([[0.1, 0.9]]), private.guarantee_.status
    (array([0]), 'proven')
    """

    epsilon: float = 1.0
    delta: float | None = None
    _: KW_ONLY
    accountant: Accountant = "pld"
    analysis: NoiseAnalysis = "proven"
    preset: Preset = "default"
    features: FeatureMap | str | None = "auto"
    image_shape: ImageShape | None = None
    network: Build | None = None
    settings: DPSGDSettings | None = None
    declared_size: int | None = None
    classes: Sequence[Any] | None = None
    schema: Schema | None = None
    random_state: Any = None
    engine: LocalEngine | Literal["local"] = "local"

    def _train(self, data: TrainingRows) -> Guarantee:
        seed = self._seed()
        engine = LocalEngine() if self.engine == "local" else self.engine
        with StoredRows(self._read(data, engine), by_person=data.unit == "person") as rows:
            size = self._size(rows.units)
            self.feature_map_ = self._feature_map(data, size)
            given = self._settings.length
            length = self._length(data.columns) if given is None else given
            kind = self._inputs()
            self.plan_ = self._plan(size, length, kind)
            settings = self.plan_.settings
            changes = 2 if kind in ("centred", "scaled") else 1
            rows.blocks.expect(changes + settings.steps * settings.sampling_rate)
            # What the built-in network sees must be finite; a module leaves out records that it cannot compute.
            self._map_rows(rows.blocks, finite=kind == "plain" and self.network is None)
            dimension, centring = rows.shape[1], None
            if isinstance(self.feature_map_, TableCells):
                self.model_: PrivateNetwork | TableWeights = self._on_cells(rows, self.feature_map_, seed)
                dimension = sum(self.feature_map_.sizes)
            else:
                if kind != "plain":
                    centring = self._centring(rows, float(length), seed)
                    rows.blocks.update(partial(_centred, centring))
                self.model_ = PrivateNetwork(self._trained(rows, seed), centring)
            if settings.calibration_steps:
                self.model_ = self._calibrated(self.model_, rows, seed)
        return network_guarantee(
            self.plan_,
            self._basis(data),
            exact=seed is None,
            own_module=self.network is not None,
            centring=centring,
            unit=data.unit,
            dimension=dimension,
            classes=len(self.classes_),
            **({"inputs": kind} if kind == "cells" else {}),
            **({"scale": self.scale_} if settings.calibration_steps else {}),
        )

    def _on_cells(
        self, rows: StoredRows, cells: TableCells, seed: int | None
    ) -> PrivateNetwork | TableWeights:
        plan, sizes = self.plan_, cells.sizes
        shares, noise = released_shares(rows, plan, sizes, seed)
        per_number = (
            mu_of(plan.epsilon, plan.delta) * plan.size / (PEOPLE_PER_INTERVAL * max(1, len(cells.numbers)))
        )
        basis = CellBasis.of(cells, shares, noise, per_number)
        if plan.settings.hidden:
            first, network = train_network_on_cells(rows, basis, plan, sizes, seed)
            return PrivateNetwork(network, CellLayer(TableWeights(first, shares, sizes), network.activation))
        outputs = train_on_cells(rows, basis, plan, sizes, seed)
        return TableWeights(class_scores(centred(outputs, cells, shares)), shares, sizes)

    def _calibrated(
        self, model: PrivateNetwork | TableWeights, rows: StoredRows, seed: int | None
    ) -> PrivateNetwork | TableWeights:
        def _scale(scores: Scores) -> float:
            self.scale_ = _released_scale(
                scores, rows, rows.labels, model.classes, self.plan_, seed=seed, persons=rows.persons
            )
            return self.scale_

        if isinstance(model, TableWeights):
            scale = _scale(partial(cell_scores, model.weights, model.sizes))
            return replace(model, weights=model.weights * scale)
        assert isinstance(model.network, MLP)
        layer = model.centring if isinstance(model.centring, CellLayer) else None
        scale = _scale(partial(_network_scores, model.network, layer=layer))
        return replace(model, network=_scaled(model.network, scale))

    def _check_settings(self) -> None:
        if self.engine != "local" and not isinstance(self.engine, LocalEngine):
            raise InvalidInput("DP-SGD is trained in this process: engine must be 'local' or a LocalEngine.")

    @property
    def _classifier(self) -> PrivateNetwork | TableWeights:
        return self.model_

    @property
    def _settings(self) -> DPSGDSettings:
        return self.settings or DPSGDSettings()

    def _feature_map(self, data: TrainingRows, size: float | None = None) -> FeatureMap | None:
        return None if self.features == "identity" else super()._feature_map(data, size)

    def _automatic_features(self, data: TrainingRows, size: float | None) -> FeatureMap | None:
        if self.preset == "paper" or (self.network is not None and self.image_shape is None):
            return None
        if data.encoding is None or self.image_shape is not None or size is None:
            return default_features(data.columns, self.image_shape)
        mu = mu_of(self.epsilon, 1 / (10 * size) if self.delta is None else self.delta)
        if self._trains_on_cells:
            levels = levels_for(size, mu * math.sqrt(CENTRING_SHARE), len(data.encoding.columns))
            if (cells := table_cells(data.encoding, levels)) is not None:
                return cells
        return table_features(data.encoding, size, len(self.classes_), mu)

    @property
    def _trains_on_cells(self) -> bool:
        settings = self._settings
        counted = settings.centring_steps != 0 and not (
            settings.centring_steps is None and settings.steps == 1
        )
        return self._may_centre and counted and settings.length is None

    @property
    def _may_centre(self) -> bool:
        return self.preset == "default" and self.analysis == "proven" and self.network is None

    def _inputs(self) -> Inputs:
        """Return what the network sees; a table's features are scaled by the centre."""
        settings = self._settings
        possible = self._may_centre
        if isinstance(self.feature_map_, TableCells):
            if not self._trains_on_cells:
                raise InvalidInput(
                    "TableCells require preset='default', analysis='proven' and centring steps, without `network` and "
                    "`length`."
                )
            return "cells"
        for name in ("centring_steps", "calibration_steps"):
            if getattr(settings, name) and not possible:
                raise InvalidInput(
                    f"{name} requires preset='default', analysis='proven' and the built-in network."
                )
        if not possible or settings.centring_steps == 0:
            return "plain"
        if settings.centring_steps is None and settings.steps == 1:
            return "plain"
        return "scaled" if isinstance(self.feature_map_, TableFeatures) else "centred"

    def _centring(self, rows: StoredRows, radius: float, seed: int | None) -> Centring:
        centre = _released_centre(rows, self.plan_, radius=radius, seed=seed, persons=rows.persons)
        if not isinstance(self.feature_map_, TableFeatures):
            return Centring(centre, radius)
        scale = self.feature_map_.scale(centre, _centre_noise(self.plan_))
        return Centring(centre, radius, _whitening_on_grid(np.append(scale, 1.0)))

    def _plan(self, size: int, length: float, inputs: Inputs) -> Plan:
        given = vars(self._settings) | {"length": length}
        if isinstance(self.feature_map_, TableCells):
            given["columns"] = len(self.feature_map_.sizes)
        if self.network is not None:
            given["calibration_steps"] = 0
        return make_plan(
            size,
            epsilon=self.epsilon,
            delta=self.delta,
            accountant=self.accountant,
            analysis=self.analysis,
            preset=self.preset,
            inputs=inputs,
            **given,
        )

    def _length(self, columns: int) -> float:
        if self.feature_map_ is None:
            return LENGTH_PER_COLUMN * math.sqrt(columns)
        probes = np.random.default_rng(0).random((_PROBES, columns), dtype=np.float32)
        return max(float(np.median(np.linalg.norm(self._mapped(probes), axis=1))), 1e-6)

    def _trained(self, inputs: StoredRows, seed: int | None) -> MLP | TorchModel:
        plan, classes, labels = self.plan_, len(self.classes_), inputs.labels
        common: dict[str, Any] = {"settings": plan.settings, "persons": inputs.persons}
        own = {**common, "noise_multiplier": plan.noise_multiplier, "size": plan.size}
        if self.network is not None:
            module = self.network(inputs.shape[1], classes)
            return TorchModel(train_private_module(module, inputs, labels, seed=seed, **own), classes)
        if seed is None:
            first = int.from_bytes(os.urandom(4), "big")
            return train_private(inputs, labels, classes, seed=first, **own)
        one: dict[str, Any] = {
            "noise_multipliers": [plan.noise_multiplier],
            "sizes": [plan.size],
            "seeds": [seed],
        }
        return train_private_stack(inputs, labels, classes, [np.arange(len(inputs))], **one, **common)


@dataclass(frozen=True, eq=False)
class PrivateNetwork(LogitClassifier):
    """A network whose weights were released: everything computed from it is post-processing."""

    network: MLP | TorchModel  # The network
    centring: Centring | CellLayer | None = None  # What makes rows of features before the network sees them

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
    basis: Basis,
    *,
    exact: bool,
    own_module: bool = False,
    centring: Centring | None = None,
    unit: Unit = "record",
    **parameters: Any,
) -> Guarantee:
    """Return the guarantee of a network trained by a plan: Gaussian for proven full batches, else (epsilon, delta)."""
    centred = {}
    if centring is not None:
        centred = {"radius": centring.radius, "inputs": "centred" if centring.scale is None else "scaled"}
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
            "features": basis.features,
            **centred,
            **parameters,
            **basis.facts,
            "noise_source": {"source": "exact" if exact else "seeded", "exact": exact},
        },
        unit=unit,
    )
    own = _own_module(unit) if own_module else None
    return basis.under(guarantee, assumptions, own_modules=own, seeded=not exact)


def _own_module(unit: Unit) -> Condition:
    return Condition(
        "The module is the user's own.",
        (
            "The module computes every record of a batch by itself.",
            f"One {unit} moves the module's clipped gradient sums, computed in floating point, by at most 1.001 clip "
            "norms.",
        ),
    )


def _counting(plan: Plan, gaussian: bool, unit: Unit) -> tuple[Status, str, tuple[str, ...]]:
    steps, accountant = plan.settings.steps, _ACCOUNTANT_NAMES[plan.accountant]
    gradients, where = "clipped gradients", "DP-SGD page, section 2"
    if plan.settings.centring_steps:
        gradients = "clipped features and gradients"
    if plan.settings.calibration_steps:
        gradients += ", and of confidence minus correctness"
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
