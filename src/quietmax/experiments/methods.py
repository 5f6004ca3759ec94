"""The compared methods: how each one answers, what the trials of one group share, and the measurement of one trial.

Another package adds a method by naming a `Method` as an entry point in the group ``quietmax.methods``.

Noise is seeded here, so that a run can be repeated; the status is that of the method with exact noise, and settings
follow from public numbers only. THEORY section 4: *as published* means the paper's own labels, *like for like* means
(epsilon, delta) with delta = 1/(10 N) for the stated number of answers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from resource import RUSAGE_SELF, getrusage
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from quietmax import __version__
from quietmax._lazy import with_plugins
from quietmax.accounting.costs import Budget
from quietmax.accounting.dpsgd import ACCOUNTANTS, PUBLISHED_ACCOUNTANTS, Accountant
from quietmax.accounting.guarantee import Guarantee
from quietmax.attacks.base import Attack, FittedAttack, selected_answers, shared_designs
from quietmax.attacks.builtin import AttackNetworks, Shadow, make_attack
from quietmax.attacks.metrics import AttackReport, Released, released_by
from quietmax.attacks.shadow_models import Design, ShadowPool, candidate_rows
from quietmax.attacks.targets import QueryResult
from quietmax.audit.bounds import epsilon_from_guesses
from quietmax.audit.distinguishing import audit_mechanism
from quietmax.data.records import Records, Split, hold_out, split
from quietmax.data.registry import dataset, load_records
from quietmax.data.sources import is_table_path
from quietmax.errors import InvalidInput, unknown_name
from quietmax.estimators.dpsgd.estimator import DPSGD
from quietmax.estimators.dpsgd.training import DPSGDSettings, train_sweep
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.head.weights import default_features
from quietmax.estimators.teachers import Teachers
from quietmax.experiments.grid import Arrays, DataSource, Group, Result, ResultStore, Trial
from quietmax.experiments.paper import EPSILONS
from quietmax.mechanisms.algorithm1 import Algorithm1
from quietmax.mechanisms.base import Answerer, Answers, Mechanism, SampledNeuron
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.tabular import Identity
from quietmax.models.serialization import mlp_from
from quietmax.models.stacked import MLP, Convexified, CrossEntropy, Loss, TrainingSettings
from quietmax.models.training import Model, accuracy_loss, softmax, train
from quietmax.noise.sources import SeededNoise

MethodStatus = Literal["none", "refuted", "conditional", "proven"]
Axis = Literal["published", "like-for-like"]
_AUDIT_SAMPLES = 4_000
_AUDIT_CONFIDENCE = 0.99
_ATTACK_FIGURES = ("leakage", "advantage", "auc", "tpr_at_0_1_percent_fpr", "tpr_at_1_percent_fpr")
Rows = NDArray[np.int64]
Features = NDArray[np.float32]
Fitted = TypeVar("Fitted")

_STORED_DESIGNS: dict[Design, str] = {"disjoint": "outside", "overlapping": "around"}
"""The names of stored shadow networks."""

SCALINGS = {"pixel/255": 0.0, "pixel/255 - 0.5": 0.5}
"""How pixels become features of the paper's networks -> what is subtracted from the features of the records."""
_CENTRED = frozenset({"cifar-10", "cifar-100"})
"""Data sets whose pixels are shifted by one half unless the effort of a group has another scaling.

The paper does not say how it scales pixels. With its stated learning rate, this shift gives CIFAR-100's convexified
row. What gives the other numbers of CIFAR is measured in `quietmax.experiments.measurements`.
"""

_HOLDOUT = 0.2
"""Share of a table that is the test part of a comparison unless it is given."""


# --- what the trials of one group share ------------------------------------------------------------------------------


class SharedInputs:
    """The records, networks, attacks and public features of one group.

    Nothing is computed before it is needed. Trained networks are kept in the result store, so a run that is started
    again trains none of them again.
    """

    def __init__(self, group: Group, store: ResultStore) -> None:
        self.group, self._store = group, store
        self._pools: dict[Design, ShadowPool] = {}
        self._fits: dict[tuple[str, Released], FittedAttack] = {}

    @cached_property
    def data(self) -> Split:
        """The records in the paper's encoding, split by the repeat's seed."""
        effort = self.group.effort
        records = source_records(self.group.source, effort.scaling)
        seed = self.group.seed + self.group.repeat
        if effort.holdout is not None:
            return hold_out(records, effort.holdout, seed=seed)
        return split(records, size=effort.records, seed=seed)

    @cached_property
    def _settings(self) -> TrainingSettings:
        """How the network and its shadows are trained."""
        effort = self.group.effort
        settings = TrainingSettings(loss=Convexified(effort.alpha), epochs=effort.epochs)
        return (
            settings
            if effort.learning_rate is None
            else replace(settings, learning_rate=effort.learning_rate)
        )

    @cached_property
    def model(self) -> Model:
        """The network with the convexified loss."""
        return self._network("convexified", self._settings.loss)

    @cached_property
    def _original(self) -> Model:
        """The network with the ordinary loss."""
        return self._network("original", CrossEntropy())

    @cached_property
    def public(self) -> Records:
        """The records as proven methods see them: encoded with public constants only, Adult one-hot."""
        source, data = self.group.source, self.data
        if is_table_path(source.name):
            return data.records
        if "encoding" in dataset(source.name).options:
            encoded = load_records(source.name, encoding="one-hot")
            same = split(encoded, size=len(data.train_rows), seed=data.seed)
            assert np.array_equal(same.train_rows, data.train_rows), "encodings must not change the split"
            return encoded
        shifted = _shift(source, self.group.effort.scaling)
        return load_records(source.name) if shifted else data.records

    @property
    def _encoding_inferred(self) -> bool:
        """Whether parts of the encoding were inferred from the records."""
        return self.public.encoding is not None and bool(self.public.encoding.inferred)

    def _public_features(self, rows: NDArray[np.int64]) -> Features:
        """Return public features of rows; those of members and non-members are computed once."""
        features_map, place, candidates = self._candidate_features
        features = candidates[place[rows]]
        if len(others := np.flatnonzero(place[rows] < 0)):
            features[others] = features_map.transform(self.public.features[rows[others]])
        return features

    @cached_property
    def _candidate_features(self) -> tuple[FeatureMap, NDArray[np.int64], Features]:
        """The map, the place of each record among the candidates (-1: none), and the candidates' features."""
        chosen = default_features(self.public.features.shape[1], self.public.image_shape)
        order, place = candidate_rows(self.data), np.full(len(self.data.records), -1)
        place[order] = np.arange(len(order))
        return chosen, place, chosen.transform(self.public.features[order])

    @cached_property
    def _attacks(self) -> dict[str, Attack]:
        """The group's attacks with its number of shadow networks, by name."""
        effort, made = self.group.effort, {}
        for name in effort.attacks:
            attack = make_attack(name, models=effort.shadows, seed=self.group.seed + self.group.repeat)
            if isinstance(attack, Shadow):
                attack = replace(attack, network=replace(attack.network, epochs=effort.attack_epochs))
            made[name] = attack
        return made

    def _pool_for(self, name: str) -> ShadowPool:
        """Return the shadow networks that an attack learns from; attacks share them where they can."""
        designs = shared_designs(list(self._attacks.values()), self.data)
        design = dict(zip(self._attacks, designs, strict=True))[name]
        if design not in self._pools:
            self._pools[design] = self._pool(design, self._attacks[name].seed)
        return self._pools[design]

    def _fitted(self, name: str, released: Released) -> FittedAttack:
        """Return an attack fitted to the shadow networks. The paper's attack is kept in the store."""
        if (name, released) not in self._fits:
            self._fits[name, released] = self._fit(name, released)
        return self._fits[name, released]

    def _published_dpsgd_network(self, accountant: Accountant, epsilon: float) -> MLP:
        """Return the network that DP-SGD trains as published."""
        place = PUBLISHED_ACCOUNTANTS.index(accountant) * len(EPSILONS) + EPSILONS.index(epsilon)
        return self._published_dpsgd.network(place)

    @cached_property
    def _published_dpsgd(self) -> MLP:
        """The networks for all accountants and epsilons, trained at once with the paper's loss: each record's is
        convexified by itself, so that its gradient can be clipped.
        """

        def _train_networks() -> Arrays:
            _, networks = train_sweep(
                [self.data],
                epsilons=EPSILONS,
                accountants=PUBLISHED_ACCOUNTANTS,
                alpha=self.group.effort.alpha,
                learning_rate=self.group.effort.learning_rate,
            )
            return _stack_to_arrays(networks)

        return _stack_from_arrays(self._store.arrays(self.group, "dpsgd-convexified", _train_networks))

    def _network(self, name: str, loss: Loss) -> Model:
        settings = replace(self._settings, loss=loss)
        arrays = self._store.arrays(
            self.group, name, lambda: _stack_to_arrays(train(self.data, settings=settings).network)
        )
        records = self.data.records
        return Model(
            _stack_from_arrays(arrays),
            settings,
            len(self.data.train_rows),
            records.name,
            self.data.seed,
            records.encoding,
            records.image_shape,
        )

    def _pool(self, design: Design, seed: int) -> ShadowPool:
        def _trained() -> Arrays:
            pool = ShadowPool.train(design, self.data, self._settings, self.group.effort.shadows, seed=seed)
            arrays = {"inside": pool.inside, "drawn": pool.drawn, "notes": _to_bytes(list(pool.notes))}
            for place, stack in enumerate(pool.stacks):
                arrays |= {f"{place}/{name}": value for name, value in _stack_to_arrays(stack).items()}
            return arrays

        arrays = self._store.arrays(self.group, f"shadows-{_STORED_DESIGNS[design]}", _trained)
        places = sorted({int(name.split("/")[0]) for name in arrays if "/" in name})
        stacks = tuple(
            _stack_from_arrays({name.removeprefix(f"{place}/"): value for name, value in arrays.items()})
            for place in places
        )
        notes = tuple(_from_bytes(arrays["notes"]))
        return ShadowPool(self.data, self._settings, design, stacks, arrays["inside"], arrays["drawn"], notes)

    def _fit(self, name: str, released: Released) -> FittedAttack:
        attack = self._attacks[name]
        if not isinstance(attack, Shadow):
            return attack.fit(self._pool_for(name), released)

        def _trained() -> Arrays:
            trained = attack.networks(self._pool_for(name), released)
            return {
                **_stack_to_arrays(trained.stack),
                "network_of_class": trained.network_of_class,
                "threshold": np.array([trained.threshold]),
                "notes": _to_bytes(list(trained.notes)),
            }

        arrays = self._store.arrays(self.group, f"attack-{name}-{released}", _trained)
        networks = AttackNetworks(
            _stack_from_arrays(arrays),
            arrays["network_of_class"],
            float(arrays["threshold"][0]),
            tuple(_from_bytes(arrays["notes"])),
        )
        return networks.fitted(released, self.data.records.labels[candidate_rows(self.data)])


def source_records(source: DataSource, scaling: str | None = None) -> Records:
    """Load the records of a source as the paper's networks see them."""
    if is_table_path(source.name):
        return load_records(source.name, **json.loads(source.declared))
    records = load_records(source.name)
    shift = _shift(source, scaling)
    return replace(records, features=records.features - np.float32(shift)) if shift else records


def _shift(source: DataSource, scaling: str | None) -> float:
    if scaling is None:
        return 0.5 if source.name in _CENTRED else 0.0
    return SCALINGS[scaling]


def training_size(source: DataSource, records: int | None, holdout: float | None) -> tuple[int, float | None]:
    """Return the number of training records (or persons) of a comparison, and the share that is the test part.

    The share is None for the paper's split.
    """
    table = is_table_path(source.name)
    if records is not None:
        if table or holdout is not None:
            raise InvalidInput(
                "`records` applies only to the paper's split of registered data sets; `holdout` is the share of a "
                "table that is held out."
            )
        return records, None
    share = holdout if holdout is not None else _HOLDOUT if table else dataset(source.name).holdout
    if share is None:
        return dataset(source.name).records, None
    if not 0 < share < 1:
        raise InvalidInput(
            f"`holdout` must be above 0 and below 1, since a comparison tests on it; got {share}."
        )
    units = int(source_records(source).units.max(initial=-1)) + 1
    return max(1, round((1 - share) * units)), share


def _stack_to_arrays(stack: MLP) -> dict[str, NDArray[Any]]:
    """A stack of networks as named arrays."""
    arrays = {name: tensor.numpy() for name, tensor in stack.parameters()}
    return {**arrays, "shape": _to_bytes({"widths": stack.widths, "activation": stack.activation})}


def _stack_from_arrays(arrays: Arrays) -> MLP:
    """The inverse of `_stack_to_arrays`; other arrays are ignored."""
    tensors = {
        name: torch.from_numpy(array)
        for name, array in arrays.items()
        if name.startswith(("kernel.", "bias."))
    }
    return mlp_from(tensors, **_from_bytes(arrays["shape"]))


def _to_bytes(value: Any) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(value).encode() or b" ", dtype=np.uint8)


def _from_bytes(array: NDArray[np.uint8]) -> Any:
    return json.loads(array.tobytes())


# --- methods --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PreparedMethod:
    """A method that is ready to answer."""

    answer: Callable[[Rows], Answers]  # Takes row numbers of the group's records and returns `Answers`
    fit_seconds: float  # Time of training
    claim: Guarantee | None = None  # What is claimed; None for methods without a guarantee
    mechanism: Mechanism | None = None


@dataclass(frozen=True, eq=False)
class Method:
    """A method of the comparison."""

    name: str  # Name on the command line
    title: str  # Name in figures
    status: MethodStatus  # Status of its guarantee: "none", "refuted", "conditional" or "proven"
    prepare: Callable[[Trial, SharedInputs], PreparedMethod]
    axis: Axis = "like-for-like"
    per_answer: bool = False  # Whether every answer is charged
    attacked: bool = True  # Whether attacks are run on its answers

    def _status_for(self, classes: int) -> MethodStatus:
        """Return the status for a number of classes.

        Algorithm 1 is refuted for three or more classes; for two it is private if the bound is true (THEORY 2).
        """
        return "conditional" if self.status == "refuted" and classes == 2 else self.status


def _declared_delta(records: int) -> float:
    """Return the delta of the like-for-like comparison, ``1/(10 N)`` (THEORY section 4)."""
    return 1 / (10 * records)


def _plain(trial: Trial, shared: SharedInputs, *, original: bool = False) -> PreparedMethod:  # noqa: ARG001
    model, seconds = _timed(lambda: shared._original if original else shared.model)

    return PreparedMethod(
        lambda rows: _most_likely(model.logits(shared.data.records.features[rows])), seconds
    )


def _algorithm1(
    trial: Trial, shared: SharedInputs, *, noise: Literal["gaussian", "laplace"]
) -> PreparedMethod:
    budget = Budget(_epsilon(trial), queries=trial.queries or 1)
    source = SeededNoise(trial.noise_seed)
    answerer = Answerer.prepare(shared.model, Algorithm1(noise), budget, noise=source)
    return _charged(answerer, lambda rows: shared.data.records.features[rows], 0.0)


def _published_dpsgd(trial: Trial, shared: SharedInputs, *, accountant: Accountant) -> PreparedMethod:
    _check_paper_epsilons(trial.method, [_epsilon(trial)])
    network, seconds = _timed(lambda: shared._published_dpsgd_network(accountant, _epsilon(trial)))

    def _answer(rows: Rows) -> Answers:
        return _most_likely(network.logits(shared.data.records.features[rows]).double().numpy())

    return PreparedMethod(_answer, seconds)


def _most_likely(logits: NDArray[np.float64]) -> Answers:
    return Answers(logits.argmax(-1), softmax(logits))


def _sampled_neuron(trial: Trial, shared: SharedInputs) -> PreparedMethod:
    """The repaired neuron on the logits of a head whose weights are not released: pure epsilon per answer."""
    queries = trial.queries or 1
    head = PrivateHead(
        _epsilon(trial), method="output", release="query", queries=queries, **_public(trial, shared)
    )
    seconds = _fit(head, shared)
    budget, source = Budget(_epsilon(trial), queries=queries), SeededNoise(trial.noise_seed)
    answerer = Answerer.prepare(head.predictor_.model, SampledNeuron("laplace"), budget, noise=source)
    return _charged(answerer, shared._public_features, seconds)


def _teachers(trial: Trial, shared: SharedInputs) -> PreparedMethod:
    delta = _declared_delta(shared.group.effort.records)
    teachers = Teachers(_epsilon(trial), delta, trial.queries or 1, **_public(trial, shared))
    seconds = _fit(teachers, shared)
    answerer = Answerer(teachers.ensemble_, teachers.predictor_.mechanism, SeededNoise(trial.noise_seed))
    return _charged(answerer, shared._public_features, seconds)


def _charged(
    answerer: Answerer, features: Callable[[Rows], NDArray[np.float32]], seconds: float
) -> PreparedMethod:
    """A method that is charged for every answer; ``features`` looks up the model's inputs for the rows."""
    claim = answerer.mechanism.guarantee(answerer.model.classes)
    return PreparedMethod(lambda rows: answerer.answer(features(rows)), seconds, claim, answerer.mechanism)


def _released(trial: Trial, shared: SharedInputs, *, accountant: Accountant | None = None) -> PreparedMethod:
    """A head, or DP-SGD with an accountant: its model may be released, so that it answers any number of queries."""
    public, own_table = _public(trial, shared), shared.group.effort.holdout is not None
    made: Callable[..., PrivateHead | DPSGD] = PrivateHead
    if accountant is not None:
        length = None if own_table else 1.0  # that of all public features
        made = partial(DPSGD, accountant=accountant, settings=DPSGDSettings(length=length))
    if own_table:
        # As `quietmax train` trains on it, with the estimator's own features and the classes of the schema.
        del public["classes"], public["features"]
    estimator = made(_epsilon(trial), _declared_delta(shared.group.effort.records), **public)
    if own_table:
        _, seconds = _timed(lambda: estimator.fit(shared.data.train))
    else:
        seconds = _fit(estimator, shared)

    def _answer(rows: Rows) -> Answers:
        inputs = shared.data.records.features[rows] if own_table else shared._public_features(rows)
        probabilities = estimator.predict_proba(inputs)
        return Answers(probabilities.argmax(-1), probabilities)

    return PreparedMethod(_answer, seconds, estimator.guarantee_)


def _timed(fit: Callable[[], Fitted]) -> tuple[Fitted, float]:
    started = time.perf_counter()
    return fit(), time.perf_counter() - started


def _epsilon(trial: Trial) -> float:
    if trial.epsilon is None:
        raise InvalidInput(f"The method '{trial.method}' requires an epsilon.")
    return trial.epsilon


def _public(trial: Trial, shared: SharedInputs) -> dict[str, Any]:
    """What is public about the records, which have public features already, and the seed."""
    return {
        "features": Identity(),
        "classes": range(shared.data.classes),
        "declared_size": shared.group.effort.records,
        "random_state": trial.noise_seed % 2**31,
    }


def _fit(estimator: PrivateHead | Teachers | DPSGD, shared: SharedInputs) -> float:
    """Train on the training records, and return the seconds it took."""
    train, features = shared.data.train, shared._public_features(shared.data.train_rows)
    _, seconds = _timed(lambda: estimator.fit(features, train.labels, groups=train.persons))
    return seconds


_BUILT_IN = (
    Method("plain", "plain network, convexified loss", "none", _plain, "published"),
    Method(
        "original",
        "plain network, original loss",
        "none",
        partial(_plain, original=True),
        "published",
        attacked=False,
    ),
    *(
        Method(
            f"algorithm1-{noise}",
            f"Algorithm 1, {noise.title()}",
            "refuted",
            partial(_algorithm1, noise=noise),
            "published",
            per_answer=True,
        )
        for noise in ("gaussian", "laplace")
    ),
    *(
        Method(
            f"published-{accountant}",
            f"DP-SGD as published, {accountant.upper()}",
            "conditional",
            partial(_published_dpsgd, accountant=accountant),
            "published",
        )
        for accountant in PUBLISHED_ACCOUNTANTS
    ),
    Method("sampled-neuron", "repaired neuron", "proven", _sampled_neuron, per_answer=True),
    Method("teachers", "teachers", "proven", _teachers, per_answer=True),
    Method("head", "private head", "proven", _released),
    *(
        Method(
            "dpsgd" if accountant == "pld" else f"dpsgd-{accountant}",
            f"DP-SGD, {accountant.upper()}",
            "proven",
            partial(_released, accountant=accountant),
        )
        for accountant in ACCOUNTANTS
    ),
)


@cache
def methods() -> Mapping[str, Method]:
    """Return all methods by name: the built-in ones first, then those of installed plug-ins."""
    return with_plugins({each.name: each for each in _BUILT_IN}, "quietmax.methods", _read_plugin)


def _read_plugin(_: str, loaded: Any) -> tuple[str, Method]:
    """Return a plug-in's method by its own name."""
    if not isinstance(loaded, Method):
        raise TypeError("the entry point must be a quietmax.experiments.methods.Method")
    return loaded.name, loaded


def method(name: str) -> Method:
    """Return the method of that name."""
    known = methods()
    if name in known:
        return known[name]
    raise unknown_name("method", name, known)


def method_trials(
    group: Group, names: Sequence[str], epsilons: Sequence[float], queries: Sequence[int]
) -> list[Trial]:
    """Return the trials of some methods in a group."""
    trials = []
    for name in names:
        chosen = method(name)
        if chosen.status == "none":
            trials.append(Trial(group, name))
            continue
        if name.startswith("published-"):
            _check_paper_epsilons(name, epsilons)
        counts: Sequence[int | None] = queries if chosen.per_answer else [None]
        trials += [Trial(group, name, epsilon, count) for count in counts for epsilon in epsilons]
    return trials


def _check_paper_epsilons(name: str, epsilons: Sequence[float]) -> None:
    other = [f"{epsilon:g}" for epsilon in epsilons if epsilon not in EPSILONS]
    if other:
        raise InvalidInput(
            f"The method {name} is trained only at the paper's values of epsilon "
            f"({', '.join(f'{epsilon:g}' for epsilon in EPSILONS)}), got {', '.join(other)}."
        )


def measure(trial: Trial, shared: SharedInputs) -> Result:
    """Let the method of a trial answer every member and non-member once, and evaluate the answers."""
    begun = time.process_time()
    chosen = method(trial.method)
    prepared = chosen.prepare(trial, shared)
    data = shared.data
    attacks = shared._attacks if chosen.attacked else {}
    queried = {name: attack.queried_rows(data) for name, attack in attacks.items()}
    rows = np.unique(np.concatenate([data.train_rows, data.test_rows, *queried.values()]))
    started = time.perf_counter()
    answers = prepared.answer(rows)
    answer_seconds = time.perf_counter() - started
    right = answers.labels == data.records.labels[rows]
    test_accuracy = float(right[np.searchsorted(rows, data.test_rows)].mean())
    baseline = float((shared.model.predict(data.test.features) == data.test.labels).mean())
    reports = {
        name: _attack(
            name, shared, selected_answers(answers, np.searchsorted(rows, queried[name])), len(rows)
        )
        for name in attacks
    }
    return {
        "classes": data.classes,
        "records": len(data.train_rows),
        "train_accuracy": float(right[np.searchsorted(rows, data.train_rows)].mean()),
        "test_accuracy": test_accuracy,
        "baseline_accuracy": baseline,
        "accuracy_loss": accuracy_loss(test_accuracy, baseline),
        "attacks": {
            name: {figure: getattr(report, figure).to_json() for figure in _ATTACK_FIGURES}
            for name, report in reports.items()
        },
        **_claim(trial, chosen, prepared, shared),
        **_audit(trial, chosen, prepared, shared, reports),
        "fit_seconds": prepared.fit_seconds,
        "answer_seconds": answer_seconds / len(rows),
        "processor_seconds": time.process_time() - begun,
        "peak_bytes": getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "version": __version__,
    }


def _attack(name: str, shared: SharedInputs, answers: Answers, queries: int) -> AttackReport:
    fitted = shared._fitted(name, released_by(answers))
    found = QueryResult(answers, queries, None, "trial")
    return shared._attacks[name].report(fitted, found, shared._pool_for(name))


def _claim(trial: Trial, chosen: Method, prepared: PreparedMethod, shared: SharedInputs) -> dict[str, Any]:
    """What is claimed: epsilon as published, or (epsilon, delta) for all the stated answers."""
    status = chosen._status_for(shared.data.classes)
    # The number of records of a user's own table is taken as public, so its guarantee rests on that assumption; and
    # nothing is proven if parts of the encoding were inferred from the records.
    if status == "proven" and (trial.group.source.digest or shared._encoding_inferred):
        status = "conditional"
    pure = prepared.claim is not None and prepared.claim.definition == "pure"
    delta = (
        _declared_delta(trial.group.effort.records) if chosen.axis == "like-for-like" and not pure else 0.0
    )
    return {
        "status": status,
        "claimed_epsilon": trial.epsilon,
        "claimed_delta": delta if trial.epsilon is not None else None,
        "because": "" if prepared.claim is None else prepared.claim.because,
    }


def _audit(
    trial: Trial,
    chosen: Method,
    prepared: PreparedMethod,
    shared: SharedInputs,
    reports: Mapping[str, AttackReport],
) -> dict[str, Any]:
    """A lower bound on epsilon: of one answer of a mechanism, or of a trained model from the attacks' guesses.

    A mechanism is audited once, at repeat 0, against the claim for *one* answer. The bound of a model takes the
    division into members and non-members as fair coins (`quietmax.audit.bounds`) and gives each attack its share of
    the permitted error; it is 0 where the attacks hardly guess better than a coin. If there are more members than
    non-members, as with a holdout, a random part of them counts, as large as the non-members.
    """
    delta = _declared_delta(trial.group.effort.records)
    if prepared.mechanism is not None:
        if trial.group.repeat:
            return {"audited_epsilon": None, "audited": ""}
        report = audit_mechanism(
            prepared.mechanism,
            shared.data.classes,
            samples=_AUDIT_SAMPLES,
            confidence=_AUDIT_CONFIDENCE,
            delta=delta,
            seed=trial.group.seed,
        )
        return {
            "audited_epsilon": _finite(report.lower_bound),
            "audited_claim": _finite(report.claimed),
            "audited": f"one answer, in {'mu' if report.definition == 'gaussian' else 'epsilon'}",
        }
    if not reports:
        return {"audited_epsilon": None, "audited": ""}
    bounds = []
    for attacked in reports.values():
        guesses, right = _fair_guesses(attacked, trial.noise_seed)
        bounds.append(
            epsilon_from_guesses(
                guesses,
                guesses,
                right,
                delta=0.0 if chosen.status == "none" else delta,
                confidence=1 - (1 - _AUDIT_CONFIDENCE) / len(reports),
            )
        )
    return {"audited_epsilon": _finite(max(bounds)), "audited": "the attacks' guesses"}


def _fair_guesses(report: AttackReport, seed: int) -> tuple[int, int]:
    """Return the number of guesses about as many members as non-members, and of right ones."""
    found = round(report.tpr.value * report.members)
    counted = min(report.members, report.nonmembers)
    if counted < report.members:
        generator = np.random.default_rng((0xFA12, seed))
        found = int(generator.hypergeometric(found, report.members - found, counted))
    rejected = round((1 - report.fpr.value) * report.nonmembers)
    return counted + report.nonmembers, found + rejected


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None
