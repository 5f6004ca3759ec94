"""Private models as folders: `save_private` writes a fitted estimator, `open_private` reads a `PrivateModel`.

A folder holds a description with all public facts of the training, the weights, the files of encoders, and the account
of a model that is paid per answer. Opening a folder computes the guarantee again from the stored facts and from the
weights. A folder that states another guarantee, or whose parts contradict each other, cannot be opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quietmax._io import write_text
from quietmax._lazy import lazy_module
from quietmax.accounting.costs import Budget, delta_of, mu_of
from quietmax.accounting.guarantee import Guarantee
from quietmax.data.encoding import Encoding
from quietmax.data.records import Holdout
from quietmax.data.sources import as_frame
from quietmax.errors import DataUnavailable, InvalidInput, short_message
from quietmax.estimators.evaluation import EVALUATION_FILE, _save_evaluations
from quietmax.estimators.figures import Costs, checked_costs, costs_of, decided
from quietmax.estimators.head.effects import Additive, Effects
from quietmax.estimators.head.exact_sums import gradient_grid, is_whitening, on_grid
from quietmax.estimators.head.weights import (
    BIAS,
    HeadWeights,
    PrivateHeadWeights,
    TableWeights,
    even_shares,
    least_tolerance,
    max_weight_norm,
    query_guarantee,
    weight_sensitivity,
    weights_guarantee,
    whitening_kind,
)
from quietmax.estimators.training_set import (
    Basis,
    alike,
    with_holdout,
)
from quietmax.mechanisms.base import GaussianScores, Mechanism, NoisyMax
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.generic import (
    can_be_stored,
    describe_map,
    encoders,
    feature_map_from_json,
    runs_user_code,
)
from quietmax.models.features.tabular import TableCells
from quietmax.models.serialization import (
    mlp_from,
    read_description,
    read_folder,
    write_folder,
)
from quietmax.models.stacked import MLP
from quietmax.noise.sources import EXACT, NoiseSource, SeededNoise
from quietmax.predictor import Predictor
from quietmax.sensitivity.certified import ScoreBounds
from quietmax.spending import ACCOUNT_FILE, ACCOUNT_ID, FileAccount, new_identity

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import Tensor

    from quietmax.estimators.dpsgd.estimator import DPSGD, Centring, PrivateNetwork
    from quietmax.estimators.dpsgd.training import Plan
    from quietmax.estimators.head.estimator import PrivateHead
    from quietmax.estimators.teachers import Teachers
else:
    torch = lazy_module("torch")

_EVALUATION_ID = "evaluation_id"
DECISION_FILE = "decision.json"
"""The file of a model folder that says what errors cost; without it the answer is the most probable class."""
_DECISION_FORMAT = "quietmax decision"
_Classifier: TypeAlias = "HeadWeights | TableWeights | PrivateNetwork | Predictor"
"""Released weights, or a predictor that charges for every answer."""

_UNFIT = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RuntimeError)
_MOST_INPUTS = 10**7


@dataclass(frozen=True, eq=False)
class PrivateModel:
    """A private model that was opened from its folder.

    Parameters
    ----------
    kind : {"head", "teachers", "dpsgd"}
        The kind of estimator it was trained by.
    inputs : int
        Number of features of an encoded record.
    classes : tuple of str
        The labels.
    guarantee : Guarantee
        What is guaranteed of the model, computed from the folder.
    encoding : Encoding or None
        How rows of the table are encoded; None if the model was trained on numbers.
    features : FeatureMap or None
        The public feature map.
    classifier : HeadWeights, TableWeights, PrivateNetwork or Predictor
        Answers from the mapped features. A `Predictor` charges for every answer.
    holdout : Holdout or None
        Which persons of the table were held out of training; None if nobody was.
    evaluation_id : str or None
        The id of the model's evaluations. None for a model that is paid per answer.
    costs : tuple of tuples of float or None
        What errors cost, by true and predicted class. None: the most probable class is the answer.
    """

    kind: str
    inputs: int
    classes: tuple[str, ...]
    guarantee: Guarantee
    encoding: Encoding | None
    features: FeatureMap | None
    classifier: _Classifier
    holdout: Holdout | None = None
    evaluation_id: str | None = None
    costs: Costs | None = None

    def encode(self, table: Any) -> NDArray[np.float32]:
        """Encode the rows of a table as in training.

        Parameters
        ----------
        table : pandas.DataFrame, pyarrow.Table, polars.DataFrame or object with `__arrow_c_stream__`
            The rows, with the columns of the table that the model was trained on. Other columns are ignored.

        Returns
        -------
        array of shape (rows, inputs)
            Encoded records for `predict`.

        Raises
        ------
        InvalidInput
            If the model was not trained on a table, a column is missing or a cell cannot be read.
        """
        if self.encoding is None:
            raise InvalidInput("The model was trained on numbers, not on a table: it has no encoding.")
        return self.encoding.encode(as_frame(table))

    def predict(self, records: NDArray[np.float32]) -> NDArray[np.int64]:
        """Predict class indices.

        Parameters
        ----------
        records : array of shape (records, inputs)
            Encoded records.

        Returns
        -------
        array of shape (records,)
            Indices into ``classes``.
        """
        if self.costs is None:
            return self.classifier.predict(self._mapped(records))
        return self.decided(self.predict_proba(records))

    def decided(self, probabilities: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the class index for each row of probabilities that the model has released.

        Parameters
        ----------
        probabilities : array of shape (records, classes)
            What `predict_proba` has returned.

        Returns
        -------
        array of shape (records,)
            Indices into ``classes``.
        """
        return decided(probabilities, self.costs)

    def predict_proba(self, records: NDArray[np.float32]) -> NDArray[np.float64]:
        """Predict class probabilities, if the model releases them.

        Takes what `predict` takes, and returns an array of shape (records, classes).
        """
        return self.classifier.predict_proba(self._mapped(records))

    def effects(self) -> Effects:
        """Return what a released head on a table says about each column; see `PrivateHead.effects`."""
        return self.additive().effects()

    def reasons(self, records: NDArray[np.float32]) -> pd.DataFrame:
        """Return what each column contributed to the scores of encoded records; see `PrivateHead.reasons`."""
        return self.additive().reasons(records)

    def additive(self) -> Additive:
        """Return the model as a sum over the columns of a table; an error if it is none."""
        return Additive.of(self.classifier, self.features, self.encoding, self.classes)

    @property
    def remaining(self) -> int | None:
        """Number of further answers that the budget pays for; None means any number."""
        return self.classifier.remaining.queries if isinstance(self.classifier, Predictor) else None

    def _mapped(self, records: NDArray[np.float32]) -> NDArray[np.float32]:
        return records if self.features is None else self.features.transform(records)


def save_private(
    estimator: PrivateHead | Teachers | DPSGD, folder: str | Path, *, dataset: str, overwrite: bool = False
) -> Path:
    """Write a fitted private estimator to a folder.

    Released weights (DP-SGD, a head with ``release="weights"``) may be published, as the guarantee says. If the folder
    holds the seed of their noise, or columns that were read off the records, only the owner of its files can read them.
    Evaluations move into the folder. If the estimator is saved again, only the first folder may evaluate for free. The
    folder of teachers or of a head with ``release="query"`` is private like the records: whoever has it can ask without
    paying. Only the owner of its files can read them. The budget moves into the folder with what was spent of it. The
    estimator goes on paying there and cannot be saved again.

    Parameters
    ----------
    estimator : PrivateHead, Teachers or DPSGD
        A fitted estimator.
    folder : str or Path
        Where to write.
    dataset : str
        Name of the data set, for the description.
    overwrite : bool, default=False
        Replace a model that is already there, unless answers were paid from its account.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    InvalidInput
        If the estimator has code of the user's own, or the folder must not be replaced.
    """
    from sklearn.utils.validation import check_is_fitted

    check_is_fitted(estimator)
    kind = str(estimator.guarantee_.parameters.get("estimator", "teachers"))
    if not can_be_stored(estimator.feature_map_):
        raise InvalidInput(
            "Only models with a feature map of quietmax.models.features or of an installed plug-in can be saved. Apply "
            "a map of your own to the records before training, or install it as a plug-in."
        )
    own, tensors = _KINDS[kind].write(estimator)
    encoding, holdout = estimator.encoding_, estimator.holdout_
    description = {
        "kind": kind,
        "dataset": dataset,
        "unit": estimator.guarantee_.unit,
        "holdout": None if holdout is None else holdout.to_json(),
        "encoding": None if encoding is None else json.loads(encoding.to_json()),
        "features": None if estimator.feature_map_ is None else estimator.feature_map_.to_json(),
        "inputs": estimator.n_features_in_,
        "classes": [label.item() if isinstance(label, np.generic) else label for label in estimator.classes_],
        **own,
        "guarantee": estimator.guarantee_.to_json(),
    }
    files = {each.stored_name: each.content for each in encoders(estimator.feature_map_)}
    if getattr(estimator, "costs_", None) is not None:
        files[DECISION_FILE] = _decision_text(estimator.costs_).encode()
    predictor: Predictor | None = getattr(estimator, "predictor_", None)
    if predictor is None:
        public = has_exact_noise(estimator.guarantee_) and (encoding is None or not encoding.inferred)

        def _written(identity: str, evaluations: str) -> None:
            described = {**description, _EVALUATION_ID: identity}
            everything = {**files, EVALUATION_FILE: evaluations.encode()}
            write_folder(folder, described, tensors, overwrite=overwrite, released=public, files=everything)

        _save_evaluations(estimator, folder, _written)
        return Path(folder)

    identity = description[ACCOUNT_ID] = new_identity()
    account = FileAccount(Path(folder) / ACCOUNT_FILE, identity=identity)

    def _moved(answered: int) -> FileAccount:
        options: dict[str, Any] = {"overwrite": overwrite, "released": False, "files": files}
        write_folder(folder, description, tensors, answered=answered, **options)
        return account

    predictor.move_account(_moved, target=account)
    return Path(folder)


def has_exact_noise(guarantee: Guarantee) -> bool:
    """Return whether the noise of a release is exact, rather than of a seed that the folder of the model states."""
    source = guarantee.parameters.get("noise_source")
    return isinstance(source, Mapping) and source.get("exact") is True


def open_private(folder: str | Path) -> PrivateModel:
    """Open a private model; what its answers cost is charged to the folder's account.

    Parameters
    ----------
    folder : str or Path
        A folder that `save_private` wrote, with version 0.2 or later.

    Returns
    -------
    PrivateModel
        The model, with a guarantee that is computed from the folder.

    Raises
    ------
    InvalidInput
        If the folder holds another kind of model.
    DataUnavailable
        If the folder is missing, damaged or of version 0.1, its parts contradict each other, or its account is missing.
    """
    kind = str(read_description(folder).get("kind"))
    if kind not in _KINDS:
        raise InvalidInput(
            f"The model in {folder} is not a private one: its kind must be one of {', '.join(_KINDS)}, got {kind!r}."
        )
    description, stored_arrays = read_folder(folder, kind, library=_KINDS[kind].library)
    tensors = _Tensors(stored_arrays)
    try:
        features, encoding = description["features"], description["encoding"]
        stated = description["holdout"]
        holdout = None if stated is None else Holdout.from_json(stated)
        stored = _Stored(
            Path(folder),
            description,
            tensors,
            Guarantee.from_json(description["guarantee"]),
            None if features is None else feature_map_from_json(features, Path(folder)),
            None if encoding is None else Encoding.from_json(json.dumps(encoding)),
        )
        _check_same("unit", description["unit"], stored.guarantee.unit)
        if stored.encoding is not None and stored.encoding.person is not None:
            _check_same("unit", stored.guarantee.unit, "person")
        classifier, guarantee = _KINDS[kind].read(stored)
        model = PrivateModel(
            kind=kind,
            inputs=int(description["inputs"]),
            classes=tuple(str(label) for label in description["classes"]),
            guarantee=with_holdout(guarantee, holdout),
            encoding=stored.encoding,
            features=stored.features,
            classifier=classifier,
            holdout=holdout,
            evaluation_id=description.get(_EVALUATION_ID),
            costs=_read_decision(stored.folder, len(description["classes"])),
        )
        if unread := sorted(tensors.keys() - tensors.read):
            raise ValueError(f"its weights hold {unread[0]!r}, which no such model has")
        _check_shapes(model)
        _check_accounts(stored.folder, model)
        _check_guarantee(stored.guarantee, model.guarantee)
        return model
    except _UNFIT as problem:
        raise DataUnavailable(
            f"The model in {folder} is damaged ({short_message(problem)}). Train it again or restore a copy."
        ) from problem


def decide_folder(
    folder: str | Path,
    *,
    threshold: Mapping[str, float] | None = None,
    cost: Mapping[tuple[str, str], float] | None = None,
) -> PrivateModel:
    """Choose how the model in a folder answers, as `PrivateHead.decide` does, and store it there.

    Parameters
    ----------
    folder : str or Path
        The folder of a model whose weights were released.
    threshold, cost
        As for `PrivateHead.decide`; with neither, the answer is the most probable class again.

    Returns
    -------
    PrivateModel
        The model as it answers now.
    """
    model = open_private(folder)
    if isinstance(model.classifier, Predictor):
        raise InvalidInput("A model that is paid per answer releases no probabilities to decide by.")
    chosen = costs_of(model.classes, threshold, cost)
    write_text(_decision_text(chosen), Path(folder) / DECISION_FILE, "The decision")
    return replace(model, costs=chosen)


def _decision_text(costs: Costs | None) -> str:
    return json.dumps({"format": _DECISION_FORMAT, "costs": costs}) + "\n"


def _read_decision(folder: Path, classes: int) -> Costs | None:
    path = folder / DECISION_FILE
    if not path.exists():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["format"] != _DECISION_FORMAT:
        raise ValueError(f"{DECISION_FILE} does not say what errors cost")
    return checked_costs(content["costs"], classes)


# --- What each kind of estimator writes and reads ---------------------------------------------------------------------


class _Tensors(dict[str, Any]):
    """The arrays of a folder, and the names of those that were read: others could hold anything."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        super().__init__(arrays)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


@dataclass(frozen=True, eq=False)
class _Stored:
    """The content of a model folder: its description, weights, stated guarantee, feature map and encoding."""

    folder: Path
    description: Mapping[str, Any]
    tensors: Mapping[str, Any]
    guarantee: Guarantee
    features: FeatureMap | None
    encoding: Encoding | None

    def _account(self) -> FileAccount:
        return FileAccount(self.folder / ACCOUNT_FILE, identity=str(self.description[ACCOUNT_ID]))

    def _noise_source(self) -> NoiseSource:
        described = self.guarantee.parameters["noise_source"]
        if described == EXACT.describe():
            return EXACT
        source = SeededNoise(described["seed"] if "seed" in described else np.random.default_rng(0))
        _check_same("noise_source", described, source.describe())
        return source


_Written: TypeAlias = "tuple[Mapping[str, Any], Mapping[str, Tensor]]"
_Read: TypeAlias = "tuple[_Classifier, Guarantee]"


def _write_head(head: PrivateHead) -> _Written:
    minimiser: Any = head.predictor_.model if hasattr(head, "predictor_") else None
    released = minimiser is None
    description = {
        "bias": BIAS,
        "radius": head.radius_,
        "released": released,
        "bounds": None if released else _bounds_to_json(minimiser.bounds),
        "epsilon": head.budget_.epsilon,
        "delta": head.budget_.delta if released else None,
        "queries": head.budget_.queries,
        "declared_size": int(head.size_),
    }
    weights = head.coef_ if released else minimiser.weights
    tensors = {"weights": weights, "centre": head.centre_}
    if head.whitening_ is not None:
        tensors["whitening"] = head.whitening_
    if isinstance(head.feature_map_, TableCells):
        tensors["noise"] = head.noise_
    return description, {name: torch.from_numpy(np.array(values)) for name, values in tensors.items()}


def _read_head(stored: _Stored) -> _Read:
    description, facts = stored.description, stored.guarantee.parameters
    head: HeadWeights | TableWeights
    if stored.features is None:
        raise ValueError("it has no feature map")
    if isinstance(stored.features, TableCells):
        weights, centre, noise = (stored.tensors[name] for name in ("weights", "centre", "noise"))
        head = TableWeights(weights, centre, stored.features.sizes, noise)
        _check_table_head(stored, head)
    else:
        head = HeadWeights(
            stored.tensors["weights"],
            stored.tensors["centre"],
            float(description["bias"]),
            float(description["radius"]),
            whitening=stored.tensors.get("whitening"),
        )
        _check_head(stored, head)
        if not description["released"]:
            return _read_query_head(stored, head, stored.features)
    own_map = runs_user_code(stored.features)
    guarantee = weights_guarantee(facts, own_map=own_map, encoding=stored.encoding)
    for name in ("bounds", "queries"):
        _check_same(name, description[name], None)
    own = guarantee.parameters.get("mu_version", guarantee.mu)  # epsilon and delta are those of one training
    _check_mu(own, description["epsilon"], description["delta"])
    return head, guarantee


def _check_mu(mu: float | None, epsilon: float, delta: float) -> None:
    """Raise ValueError unless a stated mu is that of epsilon and delta."""
    within = 1e-6
    # The delta grows with mu, so two deltas tell what `mu_of` would, without the library that finds its root.
    if mu and delta_of(mu * (1 - within), epsilon) < delta < delta_of(mu * (1 + within), epsilon):
        return
    _check_same("mu", mu, mu_of(epsilon, delta), within=within)


def _read_query_head(stored: _Stored, head: HeadWeights, features: FeatureMap) -> _Read:
    """Return a predictor with the folder's account, and the guarantee of its answers."""
    description, facts = stored.description, stored.guarantee.parameters
    private = PrivateHeadWeights._of_fit(
        head,
        weight_sensitivity(facts),
        max_norm=max_weight_norm(facts),
        unit=facts.get("unit", "record"),
    )
    if not np.array_equal(private.weights, head.weights):
        raise ValueError("its weights are longer than a minimiser with its settings can be")
    stated, computed = description["bounds"], _bounds_to_json(private.bounds)
    for name in ("one", "vector"):
        _check_same("bounds", stated[name]["value"], computed[name]["value"])
    _check_same("delta", description["delta"], None)
    _check_same("training_method", facts["training_method"], "output")
    budget = Budget(float(description["epsilon"]), 0.0, int(description["queries"]))
    predictor = Predictor(private, NoisyMax("permute-and-flip"), budget, account=stored._account())
    answers = predictor.guarantee_with(stored._noise_source())
    _check_parameters(stored.guarantee, answers)
    own_map = runs_user_code(features)
    return predictor, query_guarantee(answers, facts, own_map=own_map, encoding=stored.encoding)


def _check_table_head(stored: _Stored, head: TableWeights) -> None:
    facts = stored.guarantee.parameters
    _check_entries(head)
    if head.noise is None or head.noise.shape != (len(head.centre) + 1,) or not (head.noise >= 0.0).all():
        raise ValueError("the noise in its effects must be a number for each cell")
    _check_facts(
        facts, training_method="gradient", loss="cross-entropy", release="weights", whitening="cells"
    )
    _check_facts(facts, outputs=1 if head.classes == 2 else head.classes, mu_moments=None)
    _check_shared(stored, head.classes)
    if (
        facts["mu_centring"] is None
        and not facts.get("series")
        and not np.array_equal(head.centre, even_shares(head.sizes))
    ):
        raise ValueError("it has counts, but nothing was spent on releasing them")


def _check_head(stored: _Stored, head: HeadWeights) -> None:
    facts = stored.guarantee.parameters
    if "cohort" in facts:
        raise ValueError("only a head on the cells of a table is a version of a series")
    _check_shared(stored, head.classes)
    _check_facts(facts, dimension=head.weights.shape[1], bias=head.bias, radius=head.radius)
    method, loss = facts["training_method"], facts["loss"]
    if (method, loss) not in _HEAD_METHODS:
        raise ValueError(f"there is no training method {method!r} with loss {loss!r}")
    if method == "output" and facts["tolerance"] < (least := least_tolerance(facts)) * (1 - 1e-9):
        raise ValueError(f"its tolerance is {facts['tolerance']:g}, but its training certifies {least:g}")
    if facts.get("mu_centring") is None and head.centre.any():
        raise ValueError("it has a centre, but nothing was spent on releasing one")
    kind = whitening_kind(head.whitening)
    _check_same("whitening", facts.get("whitening", "none"), kind)
    if "outputs" in facts:  # in version 0.2 all classes had one
        _check_same("outputs", facts["outputs"], 1 if head.classes == 2 else head.classes)
    if (kind == "moments") != (facts.get("mu_moments") is not None):
        raise ValueError("it must have a whitening matrix if and only if second moments were released")
    if kind == "centre" and facts.get("mu_centring") is None:
        raise ValueError("it is whitened by a centre, but nothing was spent on releasing one")
    if head.whitening is not None and not is_whitening(head.whitening, head.weights.shape[1]):
        raise ValueError("its whitening is not a symmetric matrix of its dimension on the grid")


def _check_shared(stored: _Stored, classes: int) -> None:
    assert stored.features is not None
    description, facts = stored.description, stored.guarantee.parameters
    _check_facts(
        facts,
        estimator="head",
        classes=classes,
        features=describe_map(stored.features),
        size_from="declared" if facts.get("mu_size") is None else "noisy count",
        sensitivity=weight_sensitivity(facts).value,
    )
    _check_same("released", description["released"], facts["release"] == "weights")
    _check_same("declared_size", description["declared_size"], int(facts["declared_size"]))
    if "grid" in facts:
        _check_same("grid", facts["grid"], gradient_grid(facts["declared_size"]))
    if ("scale" in facts) != (facts.get("mu_calibration") is not None):
        raise ValueError("it must have a scale if and only if one was released")
    weights = facts.get("class_weights")
    if weights is not None and not (len(weights) == classes and max(weights) == 1.0 and min(weights) > 0.0):
        raise ValueError("its weights of classes must be a number from 0 to 1 for each class, the largest 1")
    noisy = None if weights is None else facts.get("mu_class_sizes") is not None
    _check_same("class_weights_from", facts.get("class_weights_from"), _CLASS_WEIGHTS_FROM[noisy])


_CLASS_WEIGHTS_FROM = {None: None, True: "noisy sizes", False: "stated"}
_HEAD_METHODS = {("gradient", "cross-entropy"), ("output", "cross-entropy"), ("output", "convexified")}


def _bounds_to_json(bounds: ScoreBounds) -> dict[str, dict[str, float | str]]:
    named = {"one": bounds.one, "vector": bounds.vector}
    return {name: {"value": each.value, "because": each.because} for name, each in named.items()}


def _write_teachers(estimator: Teachers) -> _Written:
    """Describe the networks and how votes are released; the key that assigned records to shards is not stored."""
    ensemble = estimator.ensemble_
    if not isinstance(ensemble.teachers, MLP):
        raise InvalidInput(
            "Only teachers of the built-in network can be saved. Save modules of your own with torch."
        )
    mechanism, budget = estimator.predictor_.mechanism, estimator.predictor_.budget
    description = {
        "widths": list(ensemble.teachers.widths),
        "activation": ensemble.teachers.activation,
        "silent": [bool(each) for each in ensemble.silent],
        "soft": ensemble.soft,
        "method": mechanism.method if isinstance(mechanism, NoisyMax) else "gaussian probabilities",
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "queries": budget.queries,
        "declared_size": estimator.guarantee_.parameters["declared_size"],
    }
    return description, dict(ensemble.teachers.parameters())


def _read_teachers(stored: _Stored) -> _Read:
    from quietmax.estimators.teachers import TeacherEnsemble, vote_guarantee

    description, facts = stored.description, stored.guarantee.parameters
    network = mlp_from(stored.tensors, description["widths"], str(description["activation"]))
    silent = np.array(description["silent"])
    if silent.dtype != bool or silent.shape != (network.networks,):
        raise ValueError(f"silent must be true or false for each of {network.networks} teachers")
    soft = bool(description["soft"])
    ensemble = TeacherEnsemble._of_fit(network, silent, network.classes, soft, stored.guarantee.unit)
    _check_same("soft", description["soft"], ensemble.soft)
    mechanism: Mechanism
    if ensemble.soft:
        _check_same("method", description["method"], "gaussian probabilities")
        mechanism = GaussianScores(votes=network.networks)
    else:
        mechanism = NoisyMax(description["method"])
    budget = Budget(float(description["epsilon"]), float(description["delta"]), int(description["queries"]))
    predictor = Predictor(ensemble, mechanism, budget, account=stored._account())
    basis = Basis.of(stored.features, stored.encoding, facts)
    answers = predictor.guarantee_with(stored._noise_source())
    return predictor, vote_guarantee(answers, network.networks, description["declared_size"], basis)


def _write_dpsgd(estimator: DPSGD) -> _Written:
    model, plan = estimator.model_, estimator.plan_
    description: dict[str, Any] = {"epsilon": plan.epsilon, "delta": plan.delta, "declared_size": plan.size}
    if isinstance(model, TableWeights):
        arrays = {"weights": model.weights, "centre": model.centre}
        return description, {name: torch.from_numpy(values) for name, values in arrays.items()}
    from quietmax.estimators.dpsgd.training import CellLayer

    network = model.network
    if not isinstance(network, MLP):
        raise InvalidInput("Only the built-in network can be saved. Save a module of your own with torch.")
    description |= {"widths": list(network.widths), "activation": network.activation}
    tensors, centring = dict(network.parameters()), model.centring
    if isinstance(centring, CellLayer):
        tensors |= {
            "first": torch.from_numpy(centring.first.weights),
            "centre": torch.from_numpy(centring.first.centre),
        }
    elif centring is not None:
        tensors["centre"] = torch.from_numpy(centring.centre)
        if centring.scale is not None:
            tensors["scale"] = torch.from_numpy(centring.scale)
    return description, tensors


def _read_dpsgd(stored: _Stored) -> _Read:
    from quietmax.estimators.dpsgd.estimator import Centring, network_guarantee
    from quietmax.estimators.dpsgd.training import LATER_FIELDS, Plan, PrivateSettings

    description, facts = stored.description, stored.guarantee.parameters
    model, known = _read_network(stored)
    named = [field.name for field in fields(PrivateSettings)]
    plan = Plan(
        PrivateSettings(
            **{name: facts.get(name, 0) if name in LATER_FIELDS else facts[name] for name in named}
        ),
        **{name: facts[name] for name in ("noise_multiplier", "epsilon", "delta", "accountant", "analysis")},
        size=facts["declared_size"],
    )
    sampling = "poisson" if plan.analysis == "proven" else "shuffled"
    _check_facts(facts, estimator="dpsgd", sampling=sampling, **known)
    _check_facts(description, epsilon=plan.epsilon, delta=plan.delta, declared_size=plan.size)
    _check_noise(plan)
    if ("centre" in stored.tensors) != (plan.settings.centring_steps > 0):
        raise ValueError("it must have a centre if and only if steps were spent on releasing one")
    implied: dict[str, Any] = {"inputs": "cells"} if isinstance(stored.features, TableCells) else {}
    centring = None if isinstance(model, TableWeights) else model.centring
    if plan.settings.calibration_steps:
        implied["scale"] = facts["scale"]
    guarantee = network_guarantee(
        plan,
        Basis.of(stored.features, stored.encoding, facts),
        exact=facts["noise_source"] == {"source": "exact", "exact": True},
        centring=centring if isinstance(centring, Centring) else None,
        unit=stored.guarantee.unit,
        dimension=known["dimension"],
        classes=model.classes,
        **implied,
    )
    return model, guarantee


def _read_network(stored: _Stored) -> tuple[PrivateNetwork | TableWeights, dict[str, Any]]:
    from quietmax.estimators.dpsgd.estimator import PrivateNetwork
    from quietmax.estimators.dpsgd.training import CellLayer

    description, tensors = stored.description, stored.tensors
    cells = stored.features if isinstance(stored.features, TableCells) else None
    if cells is not None:
        lines = tensors["weights" if "weights" in tensors else "first"].numpy()
        table = TableWeights(lines, tensors["centre"].numpy(), cells.sizes)
        _check_entries(table)
        if "weights" in tensors:
            return table, {"hidden": [], "dimension": len(table.centre)}
    network = mlp_from(tensors, description["widths"], str(description["activation"]))
    _check_same("one network", network.networks, 1)
    known = {"hidden": network.widths[1:-1], "activation": network.activation, "dimension": network.widths[0]}
    if cells is None:
        return PrivateNetwork(network, _read_centring(stored)), known
    _check_same("neurons of the first layer", len(table.weights), network.widths[0])
    known |= {"hidden": network.widths[:-1], "dimension": len(table.centre)}
    return PrivateNetwork(network, CellLayer(table, network.activation)), known


def _check_entries(model: TableWeights) -> None:
    cells = sum(model.sizes)
    if model.weights.shape[1:] != (cells + 1,) or model.centre.shape != (cells,):
        raise ValueError(f"its weights and its centre must have an entry for each of {cells} cells")


def _read_centring(stored: _Stored) -> Centring | None:
    """Return how features are centred; raise ValueError if the released arrays are not those of a training."""
    from quietmax.estimators.dpsgd.estimator import Centring

    if not {"centre", "scale"} & stored.tensors.keys():
        return None
    facts, tensors = stored.guarantee.parameters, stored.tensors
    centre, scale = tensors["centre"].numpy(), tensors["scale"].numpy() if "scale" in tensors else None
    radius, features = float(facts["radius"]), int(facts["dimension"])
    if not 0.0 < radius < math.inf:
        raise ValueError(f"its radius is {radius}")
    on_the_grid = (
        centre.dtype == np.float64 and np.isfinite(centre).all() and (on_grid(centre) == centre).all()
    )
    if centre.shape != (features,) or not on_the_grid:
        raise ValueError("its centre is not an array of its dimension on the grid")
    if scale is not None and not (is_whitening(scale, features + 1) and scale.ndim == 1):
        raise ValueError("its scale is not an array of its dimension on the grid")
    return Centring(centre, radius, scale)


def _check_noise(plan: Plan) -> None:
    """Raise ValueError if the noise is too little for the stated epsilon and delta, according to its accountant."""
    from quietmax.accounting.dpsgd import loss_delta, noise_multiplier, renyi_epsilon

    sigma, schedule = plan.noise_multiplier, plan.schedule
    if not 0 < sigma < math.inf:
        raise ValueError(f"its noise multiplier is {sigma}")
    # One evaluation is faster than the search for the least noise, which decides if this one does not.
    if plan.accountant == "pld" and schedule.sampling_rate < 1:
        if loss_delta(sigma, plan.epsilon, schedule) <= plan.delta:
            return
    elif plan.accountant == "rdp":
        published = plan.analysis == "published"
        if renyi_epsilon(sigma, plan.delta, schedule, published=published) <= plan.epsilon:
            return
    needed = noise_multiplier(
        plan.epsilon, plan.delta, schedule, accountant=plan.accountant, analysis=plan.analysis
    )
    if sigma < needed:
        raise ValueError(f"its noise multiplier is {sigma:g}, but its epsilon needs {needed:g}")


class _Kind(NamedTuple):
    """How one kind of estimator is written to a folder and read from it, and whose arrays it reads."""

    library: Literal["torch", "numpy"]
    write: Callable[[Any], _Written]
    read: Callable[[_Stored], _Read]


_KINDS = {
    "head": _Kind("numpy", _write_head, _read_head),
    "teachers": _Kind("torch", _write_teachers, _read_teachers),
    "dpsgd": _Kind("torch", _write_dpsgd, _read_dpsgd),
}


# --- Checks of a folder: each raises ValueError -----------------------------------------------------------------------


def _check_shapes(model: PrivateModel) -> None:
    """Raise if the feature map, the weights, the classes and the encoding do not fit together; zeros are scored."""
    if not 1 <= model.inputs <= _MOST_INPUTS:
        raise ValueError(f"{model.inputs} inputs")
    scored: Any = model.classifier.model if isinstance(model.classifier, Predictor) else model.classifier
    zeros = np.zeros((1, model.inputs), dtype=np.float32)
    scores = scored.scores(zeros if model.features is None else model.features.transform(zeros))
    classes = len(model.classes if model.encoding is None else model.encoding.classes)
    if scores.shape != (1, len(model.classes)) or classes != len(model.classes):
        raise ValueError("its classes are not those of its encoding or its weights")


def _check_accounts(folder: Path, model: PrivateModel) -> None:
    """Raise unless a model that is paid per answer has an account of answers, and another one that of evaluations."""
    predictor = model.classifier if isinstance(model.classifier, Predictor) else None
    if predictor is None:
        if (folder / ACCOUNT_FILE).exists():
            raise ValueError("it has an account of answers paid for, but its weights are marked as released")
    elif (answered := predictor.answered) > (limit := predictor.budget.queries or 0):
        raise ValueError(f"its account counts {answered} answers, but its budget is for {limit}")
    if isinstance(model.evaluation_id, str) != (predictor is None):
        raise ValueError("it must have an id of its evaluations if and only if its weights are released")


def _check_guarantee(stated: Guarantee, computed: Guarantee) -> None:
    """Raise unless a stored guarantee states, word for word, what follows from the folder."""
    for name in (*_CLAIMS, "because", "assumptions"):
        _check_same(name, getattr(stated, name), getattr(computed, name))
    _check_parameters(stated, computed)
    _check_same("parameters", sorted(stated.parameters), sorted(computed.parameters))


_CLAIMS = ("status", "definition", "neighbours", "unit", "epsilon", "mu", "delta", "extra_delta")


def _check_parameters(stated: Guarantee, computed: Guarantee) -> None:
    for name in stated.parameters.keys() & computed.parameters.keys() - {"because"}:
        _check_same(name, stated.parameters[name], computed.parameters[name])


def _check_facts(stated: Mapping[str, Any], **implied: Any) -> None:
    for name, value in implied.items():
        _check_same(name, stated[name], value)


def _check_same(what: str, stored: Any, computed: Any, *, within: float = 1e-9) -> None:
    """Raise if a folder states something else, by a relative error ``within``, than what follows from the rest."""
    if not alike(stored, computed, within):
        raise ValueError(f"it states {what} {stored!r}, but the rest of it implies {computed!r}")
