"""A private model opened from its folder: asked with features of records, answers with what is claimed of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from quietmax.accounting.budget import Budget
from quietmax.accounting.conversions import mu_of
from quietmax.accounting.dpsgd import loss_delta, noise_multiplier, renyi_epsilon
from quietmax.accounting.guarantee import Guarantee
from quietmax.data.encoding import Encoding
from quietmax.errors import DataUnavailable, InvalidInput, short_message
from quietmax.estimators import teachers
from quietmax.estimators import validation as conditions
from quietmax.estimators.dpsgd import estimator as dpsgd_claim
from quietmax.estimators.dpsgd.config import Plan, PrivateSettings
from quietmax.estimators.dpsgd.estimator import DPSGD, PrivateNetwork
from quietmax.estimators.head import estimator as head_claim
from quietmax.estimators.head import training as head_plan
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.head.weights import HeadWeights, PrivateHeadWeights
from quietmax.estimators.teachers import TeacherEnsemble, Teachers
from quietmax.estimators.validation import Condition, runs_own_code
from quietmax.mechanisms.base import Mechanism
from quietmax.mechanisms.noisy_max import GaussianScores, NoisyMax
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.generic import feature_map_from_json
from quietmax.models.mlp import MLP
from quietmax.models.serialization import mlp_from, read_description, read_folder, write_folder
from quietmax.noise.sources import EXACT, NoiseSource, SeededNoise
from quietmax.predictor import Predictor
from quietmax.sensitivity.base import ScoreBounds
from quietmax.spending import ACCOUNT_FILE, FileAccount

UNFIT = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RuntimeError)
"""What building a model from a damaged folder may raise."""
_MOST_INPUTS = 10**7


@dataclass(frozen=True, eq=False)
class OwnPart:
    """What one kind of private model stores of its own: its feature map, public numbers and weights."""

    features: Any
    description: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class Answers(Protocol):
    """Anything that answers in class numbers, and perhaps in probabilities."""

    def predict(self, features: NDArray[np.float32]) -> NDArray[np.int64]:
        """Class numbers."""
        ...

    def predict_proba(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """Class probabilities, where the model releases them."""
        ...


@dataclass(frozen=True, eq=False)
class PrivateModel:
    """``inputs`` features per record; ``answerer`` sees them after the public feature map.

    A `Predictor` as answerer pays for every answer; a head's weights were paid for once, at training.
    """

    kind: str
    inputs: int
    classes: tuple[str, ...]
    guarantee: Guarantee
    encoding: Encoding | None
    features: FeatureMap | None
    answerer: Answers

    def predict(self, records: NDArray[np.float32]) -> NDArray[np.int64]:
        """Class numbers for encoded records."""
        return self.answerer.predict(self._mapped(records))

    def predict_proba(self, records: NDArray[np.float32]) -> NDArray[np.float64]:
        """Class probabilities for encoded records."""
        return self.answerer.predict_proba(self._mapped(records))

    @property
    def remaining(self) -> int | None:
        """How many further answers are paid for; None means any number."""
        return self.answerer.remaining.queries if isinstance(self.answerer, Predictor) else None

    def _mapped(self, records: NDArray[np.float32]) -> NDArray[np.float32]:
        return records if self.features is None else self.features.transform(records)


def check_parts(model: PrivateModel) -> None:
    """Refuse, with one of `UNFIT`, parts that do not fit together, before an answer is paid for; zeros are scored."""
    if not 1 <= model.inputs <= _MOST_INPUTS:
        raise ValueError(f"{model.inputs} inputs")
    asked: Any = model.answerer.model if isinstance(model.answerer, Predictor) else model.answerer
    zeros = np.zeros((1, model.inputs), dtype=np.float32)
    scores = asked.scores(zeros if model.features is None else model.features.transform(zeros))
    classes = len(model.classes if model.encoding is None else model.encoding.classes)
    if scores.shape != (1, len(model.classes)) or classes != len(model.classes):
        raise ValueError("its classes are not those of its encoding or its weights")


def check_same(what: str, stored: Any, computed: Any, *, within: float = 1e-9) -> None:
    """Raise ValueError if a folder states something else than what follows from the rest of it.

    Numbers may differ by the relative error ``within``, since libraries round differently.
    """
    if not _alike(stored, computed, within):
        raise ValueError(f"it states {what} {stored!r}, but the rest of it implies {computed!r}")


def check_claim(stated: Guarantee, computed: Guarantee) -> None:
    """Raise ValueError unless a stored guarantee states what `computed` does.

    Words may differ, as another version may have written them. Assumptions may be added, but none may be lost.
    """
    for name in ("status", "definition", "neighbours", "epsilon", "mu", "delta", "extra_delta"):
        check_same(name, getattr(stated, name), getattr(computed, name))
    check_parameters(stated, computed)
    if len(stated.assumptions) > len(computed.assumptions):
        raise ValueError("it lists more assumptions than what it was made with explains")


def check_parameters(stated: Guarantee, computed: Guarantee) -> None:
    """Raise ValueError if a parameter that both guarantees name differs."""
    for name in stated.parameters.keys() & computed.parameters.keys() - {"because"}:
        check_same(name, stated.parameters[name], computed.parameters[name])


def stated_noise(guarantee: Guarantee) -> NoiseSource:
    """A source of the kind that a stored guarantee names. It is for computing the claim again, not for answers."""
    described = guarantee.parameters["noise_source"]
    if described == EXACT.describe():
        return EXACT
    source = SeededNoise(described["seed"] if "seed" in described else np.random.default_rng(0))
    check_same("noise_source", described, source.describe())
    return source


def stated_as_declared(guarantee: Guarantee, name: str, otherwise: Condition) -> bool:
    """Whether a stored guarantee says that something was declared; version 0.1 listed the assumption only."""
    assumed = any(assumption in guarantee.assumptions for assumption in otherwise.assumptions)
    return guarantee.parameters.get(name, not assumed) is True


def _alike(stored: Any, computed: Any, within: float) -> bool:
    if isinstance(stored, bool) or isinstance(computed, bool):
        return stored is computed
    if isinstance(stored, int | float) and isinstance(computed, int | float):
        return math.isclose(stored, computed, rel_tol=within)
    if isinstance(stored, Mapping) and isinstance(computed, Mapping):
        return stored.keys() == computed.keys() and all(
            _alike(stored[name], computed[name], within) for name in stored
        )
    if isinstance(stored, list | tuple) and isinstance(computed, list | tuple):
        return len(stored) == len(computed) and all(
            _alike(*pair, within) for pair in zip(stored, computed, strict=True)
        )
    return bool(stored == computed)


def head_part(head: PrivateHead) -> OwnPart:
    """The released weights, or the unreleased minimiser with its bounds."""
    minimiser: PrivateHeadWeights | None = None
    if hasattr(head, "predictor_"):
        minimiser = head.predictor_.model  # type: ignore[assignment]
    released = minimiser is None
    description = {
        "bias": head_plan.BIAS,
        "radius": head.radius_,
        "released": released,
        "bounds": None if minimiser is None else _bounds_to_json(minimiser.bounds),
        "epsilon": head.budget_.epsilon,
        "delta": head.budget_.delta if released else None,
        "queries": head.budget_.queries,
        "declared_size": int(head.size_),
    }
    weights = head.coef_ if minimiser is None else minimiser.weights
    tensors = {
        "weights": torch.from_numpy(np.array(weights)),
        "centre": torch.from_numpy(np.array(head.centre_)),
    }
    return OwnPart(head.feature_map_, description, tensors)


def head_answerer(
    folder: Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> HeadWeights | Predictor:
    """The released weights, or the unreleased ones behind their budget."""
    head = HeadWeights(
        tensors["weights"].numpy(),
        tensors["centre"].numpy(),
        float(description["bias"]),
        float(description["radius"]),
    )
    facts = description["guarantee"]["parameters"]
    check_same("released", description["released"], facts["release"] == "weights")
    if description["released"]:
        return head
    private = PrivateHeadWeights.certified(
        head, head_claim.weight_sensitivity(facts), longest=head_claim.longest_weights(facts)
    )
    if not np.array_equal(private.weights, head.weights):
        raise ValueError("its weights are longer than a minimiser with its settings can be")
    return Predictor(
        private,
        NoisyMax("permute-and-flip"),
        Budget(float(description["epsilon"]), 0.0, int(description["queries"])),
        account=FileAccount(folder / ACCOUNT_FILE),
    )


def head_guarantee(model: PrivateModel, description: Mapping[str, Any]) -> Guarantee:
    """What the stored facts support; ValueError if they contradict each other or the weights."""
    stated, head_answerer = model.guarantee, model.answerer
    facts = stated.parameters
    head = head_answerer.model if isinstance(head_answerer, Predictor) else head_answerer
    assert isinstance(head, HeadWeights)
    assert model.features is not None
    expected = {
        "estimator": "head",
        "classes": head.classes,
        "dimension": head.weights.shape[1],
        "features": model.features.to_json(),
        "bias": head.bias,
        "radius": head.radius,
        "size_from": "declared" if facts.get("mu_size") is None else "noisy count",
        "sensitivity": head_claim.weight_sensitivity(facts).value,
    }
    for name, value in expected.items():
        check_same(name, facts[name], value)
    check_same("declared_size", description["declared_size"], int(facts["declared_size"]))
    if (facts["training_method"], facts["loss"]) not in _METHODS:
        raise ValueError(f"there is no method {facts['method']!r} with loss {facts['loss']!r}")
    if facts.get("mu_centring") is None and head.centre.any():
        raise ValueError("it has a centre, but nothing was spent on releasing one")
    if isinstance(head_answerer, Predictor):
        assert isinstance(head, PrivateHeadWeights)
        check_same("bounds", _values(description["bounds"]), _values(_bounds_to_json(head.bounds)))
        check_same("delta", description["delta"], None)
        check_same("training_method", facts["training_method"], "output")
        answers = head_answerer.guarantee_with(stated_noise(stated))
        check_parameters(stated, answers)
        return head_claim.query_claim(answers, facts, own_map=False)
    claimed = head_claim.weights_claim(facts, own_map=False)
    for name in ("bounds", "queries"):
        check_same(name, description[name], None)
    check_same("mu", claimed.mu, mu_of(description["epsilon"], description["delta"]), within=1e-6)
    return claimed


_METHODS = {("gradient", "cross-entropy"), ("output", "cross-entropy"), ("output", "convexified")}


def _bounds_to_json(bounds: ScoreBounds) -> dict[str, dict[str, float | str]]:
    return {
        name: {"value": entry.value, "because": entry.because}
        for name, entry in (("one", bounds.one), ("vector", bounds.vector))
    }


def _values(bounds: Mapping[str, Mapping[str, float | str]]) -> list[float | str]:
    return [bounds[name]["value"] for name in ("one", "vector")]


def teachers_part(estimator: Teachers) -> OwnPart:
    """The networks, who is silent and how votes are released; the key that assigned records to shards is not stored."""
    crowd = estimator.ensemble_
    if not isinstance(crowd.teachers, MLP):
        raise InvalidInput(
            "Only teachers of the built-in network can be saved; save the weights of modules of your own with torch."
        )
    mechanism, budget = estimator.predictor_.mechanism, estimator.predictor_.budget
    description = {
        "widths": list(crowd.teachers.widths),
        "activation": crowd.teachers.activation,
        "silent": [bool(each) for each in crowd.silent],
        "soft": crowd.soft,
        "method": mechanism.method if isinstance(mechanism, NoisyMax) else "gaussian probabilities",
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "queries": budget.queries,
        "declared_size": estimator.guarantee_.parameters["declared_size"],
    }
    return OwnPart(estimator.feature_map_, description, dict(crowd.teachers.parameters()))


def teachers_answerer(
    folder: Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Predictor:
    """The teachers behind their budget."""
    network = mlp_from(tensors, description["widths"], str(description["activation"]))
    silent = np.array(description["silent"])
    if silent.dtype != bool or silent.shape != (network.networks,):
        raise ValueError(f"silent must be true or false for each of {network.networks} teachers")
    crowd = TeacherEnsemble(network, silent, network.classes, bool(description["soft"]))
    budget = Budget(float(description["epsilon"]), float(description["delta"]), int(description["queries"]))
    mechanism: Mechanism = (
        GaussianScores(votes=network.networks) if crowd.soft else NoisyMax(description["method"])
    )
    return Predictor(crowd, mechanism, budget, account=FileAccount(folder / ACCOUNT_FILE))


def teachers_guarantee(model: PrivateModel, description: Mapping[str, Any]) -> Guarantee:
    """What the stored facts support; the mechanism, its bounds and its cost are made anew when the folder is opened."""
    stated, predictor = model.guarantee, model.answerer
    assert isinstance(predictor, Predictor)
    assert isinstance(predictor.model, TeacherEnsemble)
    if not isinstance(predictor.mechanism, NoisyMax):
        check_same("method", description["method"], "gaussian probabilities")
    check_same("soft", description["soft"], predictor.model.soft)
    return teachers.claim(
        predictor.guarantee_with(stated_noise(stated)),
        len(predictor.model.silent),
        description["declared_size"],
        features=model.features,
        own_modules=False,
        classes_declared=stated_as_declared(stated, "classes_declared", conditions.CLASSES),
        size_declared=stated_as_declared(stated, "size_declared", conditions.SIZE),
    )


def dpsgd_part(estimator: DPSGD) -> OwnPart:
    """The network, and the public numbers of its training."""
    network = estimator.model_.network
    if not isinstance(network, MLP):
        raise InvalidInput(
            "Only the built-in network can be saved; save the weights of a module of your own with torch."
        )
    description = {
        "widths": list(network.widths),
        "activation": network.activation,
        "epsilon": estimator.plan_.epsilon,
        "delta": estimator.plan_.delta,
        "declared_size": estimator.plan_.size,
    }
    return OwnPart(estimator.feature_map_, description, dict(network.parameters()))


def dpsgd_answerer(_: Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> PrivateNetwork:
    """The released network."""
    network = mlp_from(tensors, description["widths"], str(description["activation"]))
    check_same("one network", network.networks, 1)
    return PrivateNetwork(network)


def dpsgd_guarantee(model: PrivateModel, description: Mapping[str, Any]) -> Guarantee:
    """What the stored facts support, with the accountant run again; ValueError if they contradict each other."""
    stated = model.guarantee
    facts = stated.parameters
    plan = Plan(
        PrivateSettings(**{field.name: facts[field.name] for field in fields(PrivateSettings)}),
        **{name: facts[name] for name in ("noise_multiplier", "epsilon", "delta", "accountant", "analysis")},
        size=facts["declared_size"],
    )
    assert isinstance(model.answerer, PrivateNetwork)
    network = model.answerer.network
    assert isinstance(network, MLP)
    check_same("estimator", facts["estimator"], "dpsgd")
    check_same("hidden", facts["hidden"], network.widths[1:-1])
    check_same("activation", facts["activation"], network.activation)
    check_same("sampling", facts["sampling"], "poisson" if plan.analysis == "proven" else "shuffled")
    for name, value in (("epsilon", plan.epsilon), ("delta", plan.delta), ("declared_size", plan.size)):
        check_same(name, description[name], value)
    _check_noise(plan)
    classes_declared = stated_as_declared(stated, "classes_declared", conditions.CLASSES)
    size_declared = stated_as_declared(stated, "size_declared", conditions.SIZE)
    return dpsgd_claim.claim(
        plan,
        exact=facts["noise_source"] == {"source": "exact", "exact": True},
        own_module=False,
        size_declared=size_declared,
        classes_declared=classes_declared,
        features=model.features,
        parameters={
            "dimension": network.widths[0],
            "classes": network.classes,
            "classes_declared": classes_declared,
            "size_declared": size_declared,
        },
    )


def _check_noise(plan: Plan) -> None:
    """Raise ValueError if the noise is too little for the stated epsilon and delta, according to its accountant."""
    if not 0 < plan.noise_multiplier < math.inf:
        raise ValueError(f"its noise multiplier is {plan.noise_multiplier}")
    sigma, schedule = plan.noise_multiplier, plan.schedule
    published = plan.analysis == "published"
    # One evaluation is faster than the search for the least noise, which decides if this one does not.
    if (
        plan.accountant == "pld"
        and schedule.sampling_rate < 1
        and loss_delta(sigma, plan.epsilon, schedule) <= plan.delta
    ):
        return
    if (
        plan.accountant == "rdp"
        and renyi_epsilon(sigma, plan.delta, schedule, published=published) <= plan.epsilon
    ):
        return
    needed = noise_multiplier(
        plan.epsilon, plan.delta, schedule, accountant=plan.accountant, analysis=plan.analysis
    )
    if sigma < needed:
        raise ValueError(
            f"its noise multiplier is {plan.noise_multiplier:g}, but its epsilon needs {needed:g}"
        )


@dataclass(frozen=True)
class _Kind:
    """A kind of private model: whose it is, what it stores of its own, how that answers again and what it claims."""

    estimator: type
    own_part: Callable[[Any], OwnPart]
    answerer: Callable[[Path, Mapping[str, Any], Mapping[str, Tensor]], Answers]
    claim: Callable[[PrivateModel, Mapping[str, Any]], Guarantee]


_KINDS = {
    "head": _Kind(PrivateHead, head_part, head_answerer, head_guarantee),
    "teachers": _Kind(Teachers, teachers_part, teachers_answerer, teachers_guarantee),
    "dpsgd": _Kind(DPSGD, dpsgd_part, dpsgd_answerer, dpsgd_guarantee),
}

_FIRST_SCATTERING = conditions.Condition(
    "Version 0.1 computed it with scattering features whose rounding could depend on other records (THEORY 3.8).",
    ("In the training, no record's features depended on its place among the other records.",),
)


def save_private(
    estimator: PrivateHead | Teachers | DPSGD,
    folder: str | Path,
    *,
    dataset: str,
    encoding: Encoding | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a fitted private estimator.

    Released weights (DP-SGD, a head with ``release="weights"``) may be published, as the guarantee says. The folder of
    teachers or of a head with ``release="query"`` lets its holder ask without paying: like the records, it stays with
    the owner. Its budget moves into the folder with what was spent of it; the estimator goes on paying there and cannot
    be saved again.
    """
    check_is_fitted(estimator)
    kind = next(name for name, each in _KINDS.items() if isinstance(estimator, each.estimator))
    own = _KINDS[kind].own_part(estimator)
    if runs_own_code(own.features):
        raise InvalidInput(
            "A feature map that is not one of quietmax.models.features cannot be saved; use one of those, or apply "
            "yours to the records before."
        )
    description = {
        "kind": kind,
        "dataset": dataset,
        "encoding": None if encoding is None else json.loads(encoding.to_json()),
        "features": None if own.features is None else own.features.to_json(),
        "inputs": estimator.n_features_in_,
        "classes": [_plain(label) for label in estimator.classes_],
        **own.description,
        "guarantee": with_encoding(estimator.guarantee_, encoding).to_json(),
    }
    predictor: Predictor | None = getattr(estimator, "predictor_", None)
    if predictor is None:
        return write_folder(folder, description, own.tensors, overwrite=overwrite)

    def moved(answered: int) -> FileAccount:
        written = write_folder(folder, description, own.tensors, overwrite=overwrite, answered=answered)
        return FileAccount(written.resolve() / ACCOUNT_FILE)

    predictor.move_account(moved)
    return Path(folder)


def with_encoding(guarantee: Guarantee, encoding: Encoding | None) -> Guarantee:
    """The guarantee of a model whose records were encoded so: one read off the records makes it conditional."""
    if encoding is None or not encoding.inferred:
        return guarantee
    measured = ", ".join(encoding.inferred)
    return guarantee.weakened(
        "conditional" if guarantee.status == "proven" else guarantee.status,
        f"{guarantee.because} The encoding was measured on the private records (THEORY 3).",
        (f"What was read off the records is public: {measured}.",),
    )


def open_private(folder: str | Path) -> PrivateModel:
    """Open a private model of any kind; what its answers spent is read from and written to the folder's account.

    The guarantee is computed again from the facts that the folder states. A folder that states another one, or whose
    parts contradict each other, is refused, and so is a model that is paid per answer and has no account.
    """
    kind = str(read_description(folder).get("kind"))
    if kind not in _KINDS:
        raise InvalidInput(
            f"The model in {folder} is of kind {kind!r}, not a private one ({', '.join(_KINDS)}); name another folder."
        )
    description, tensors = read_folder(folder, kind)
    try:
        features, stated = description["features"], description["encoding"]
        encoding = None if stated is None else Encoding.from_json(json.dumps(stated))
        guarantee = Guarantee.from_json(description["guarantee"])
        model = PrivateModel(
            kind=kind,
            inputs=int(description["inputs"]),
            classes=tuple(str(label) for label in description["classes"]),
            guarantee=guarantee,
            encoding=encoding,
            features=None if features is None else feature_map_from_json(features),
            answerer=_KINDS[kind].answerer(Path(folder), description, tensors),
        )
        check_parts(model)
        _check_account(Path(folder), model.answerer)
        computed = with_encoding(_KINDS[kind].claim(model, description), encoding)
        check_claim(guarantee, computed)
        if description["format_version"] == 1 and _scatters(features):
            computed = conditions.weakened(computed, _FIRST_SCATTERING)
        return replace(model, guarantee=computed)
    except UNFIT as problem:
        raise DataUnavailable(
            f"The model in {folder} is damaged ({short_message(problem)}); train it again or restore a copy."
        ) from problem


def _check_account(folder: Path, answerer: Answers) -> None:
    """Raise unless a model that is paid per answer has its account, and only such a model has one."""
    account = FileAccount(folder / ACCOUNT_FILE)
    if not isinstance(answerer, Predictor):
        if account.path.exists():
            raise ValueError("it has an account of answers paid for, but its weights are marked as released")
    elif (answered := account.answered) > (limit := answerer.budget.queries or 0):
        raise ValueError(f"its account counts {answered} answers, but its budget is for {limit}")


def _scatters(features: Mapping[str, Any] | None) -> bool:
    """Whether a described feature map is wavelet scattering, or a pipeline with it."""
    if features is None:
        return False
    return features["kind"] == "scattering" or any(_scatters(each) for each in features.get("maps", ()))


def _plain(label: Any) -> Any:
    """A class label as a JSON value."""
    return label.item() if isinstance(label, np.generic) else label
