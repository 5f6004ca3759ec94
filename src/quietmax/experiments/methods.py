"""The compared methods: how each one answers, and the status of its guarantee.

Another package adds a method by naming a `Method` as an entry point in the group ``quietmax.methods``.

Noise is seeded here, so that a run can be repeated; the status is that of the method with exact noise, and settings
follow from public numbers only. THEORY section 4: *as published* means the paper's own labels, *like for like* means
(epsilon, delta) with delta = 1/(10 N) for the stated number of answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from quietmax._plugins import with_plugins
from quietmax.accounting.costs import Budget
from quietmax.accounting.dpsgd import ACCOUNTANTS, PUBLISHED_ACCOUNTANTS, Accountant
from quietmax.accounting.guarantee import Guarantee
from quietmax.attacks.base import Attack
from quietmax.attacks.builtin import make_attack
from quietmax.attacks.shadow_models import candidate_rows
from quietmax.errors import InvalidInput, unknown_name
from quietmax.estimators.dpsgd.estimator import DPSGD
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.teachers import Teachers
from quietmax.experiments.grid import Group, Trial
from quietmax.experiments.inputs import SharedInputs
from quietmax.experiments.paper import EPSILONS
from quietmax.mechanisms.algorithm1 import Algorithm1
from quietmax.mechanisms.base import Answerer, Answers, Mechanism, SampledNeuron
from quietmax.models.features.tabular import Identity
from quietmax.models.training import softmax
from quietmax.noise.sources import SeededNoise

ENTRY_POINT_GROUP = "quietmax.methods"
MethodStatus = Literal["none", "refuted", "conditional", "proven"]
Axis = Literal["published", "like-for-like"]
Rows = NDArray[np.int64]
Fitted = TypeVar("Fitted")


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
    candidates_only: bool = False

    def status_for(self, classes: int) -> MethodStatus:
        """Return the status for a number of classes.

        Algorithm 1 is refuted for three or more classes; for two it is private if the bound is true (THEORY 2).
        """
        return "conditional" if self.status == "refuted" and classes == 2 else self.status


def declared_delta(records: int) -> float:
    """Return the delta of the like-for-like comparison, ``1/(10 N)`` (THEORY section 4)."""
    return 1 / (10 * records)


def _plain(trial: Trial, shared: SharedInputs, *, original: bool = False) -> PreparedMethod:  # noqa: ARG001
    model, seconds = _timed(lambda: shared.original if original else shared.model)

    def answer(rows: Rows) -> Answers:
        logits = model.logits(shared.data.records.features[rows])
        return Answers(logits.argmax(-1), softmax(logits))

    return PreparedMethod(answer, seconds)


def _algorithm1(
    trial: Trial, shared: SharedInputs, *, noise: Literal["gaussian", "laplace"]
) -> PreparedMethod:
    budget = Budget(_epsilon(trial), queries=trial.queries or 1)
    source = SeededNoise(trial.noise_seed)
    answerer = Answerer.prepare(shared.model, Algorithm1(noise), budget, noise=source)
    return _charged(answerer, lambda rows: shared.data.records.features[rows], 0.0)


def _published_dpsgd(trial: Trial, shared: SharedInputs, *, accountant: Accountant) -> PreparedMethod:
    _check_paper_epsilons(trial.method, [_epsilon(trial)])
    network, seconds = _timed(lambda: shared.published_dpsgd(accountant, _epsilon(trial)))

    def answer(rows: Rows) -> Answers:
        logits = network.logits(shared.data.records.features[rows]).double().numpy()
        return Answers(logits.argmax(-1), softmax(logits))

    return PreparedMethod(answer, seconds)


def _sampled_neuron(trial: Trial, shared: SharedInputs) -> PreparedMethod:
    """The repaired neuron on the logits of a head whose weights are not released: pure epsilon per answer."""
    queries = trial.queries or 1
    head = PrivateHead(
        _epsilon(trial),
        features=Identity(),
        method="output",
        release="query",
        queries=queries,
        **_public(trial, shared),
    )
    seconds = _fit(head, shared)
    budget, source = Budget(_epsilon(trial), queries=queries), SeededNoise(trial.noise_seed)
    answerer = Answerer.prepare(head.predictor_.model, SampledNeuron("laplace"), budget, noise=source)
    return _charged(answerer, lambda rows: shared.public_features[_places(shared, rows)], seconds)


def _teachers(trial: Trial, shared: SharedInputs) -> PreparedMethod:
    teachers = Teachers(
        _epsilon(trial),
        declared_delta(shared.group.effort.records),
        trial.queries or 1,
        features=Identity(),
        **_public(trial, shared),
    )
    seconds = _fit(teachers, shared)
    answerer = Answerer(teachers.ensemble_, teachers.predictor_.mechanism, SeededNoise(trial.noise_seed))
    return _charged(answerer, lambda rows: shared.public_features[_places(shared, rows)], seconds)


def _charged(
    answerer: Answerer, features: Callable[[Rows], NDArray[np.float32]], seconds: float
) -> PreparedMethod:
    """A method that is charged for every answer; ``features`` looks up the model's inputs for the rows."""
    claim = answerer.mechanism.guarantee(answerer.model.classes)
    return PreparedMethod(lambda rows: answerer.answer(features(rows)), seconds, claim, answerer.mechanism)


def _head(trial: Trial, shared: SharedInputs) -> PreparedMethod:
    delta = declared_delta(shared.group.effort.records)
    return _released(partial(PrivateHead, _epsilon(trial), delta), trial, shared)


def _dpsgd(trial: Trial, shared: SharedInputs, *, accountant: Accountant) -> PreparedMethod:
    delta = declared_delta(shared.group.effort.records)
    length = 1.0 if shared.group.effort.holdout is None else None  # that of all public features
    made = partial(DPSGD, _epsilon(trial), delta, accountant=accountant, length=length)
    return _released(made, trial, shared)


def _released(made: Callable[..., PrivateHead | DPSGD], trial: Trial, shared: SharedInputs) -> PreparedMethod:
    """A method whose model may be released, so that it answers any number of queries."""
    public = _public(trial, shared)
    if shared.group.effort.holdout is None:
        estimator = made(features=Identity(), **public)
        seconds = _fit(estimator, shared)
    else:
        # A user's own table: as `quietmax train` trains on it, with the estimator's own features.
        del public["classes"]
        estimator = made(**public)
        _, seconds = _timed(lambda: estimator.fit(shared.data.train))

    def answer(rows: Rows) -> Answers:
        if shared.group.effort.holdout is None:
            inputs = shared.public_features[_places(shared, rows)]
        else:
            inputs = shared.data.records.features[rows]
        probabilities = estimator.predict_proba(inputs)
        return Answers(probabilities.argmax(-1), probabilities)

    return PreparedMethod(answer, seconds, estimator.guarantee_)


def _timed(fit: Callable[[], Fitted]) -> tuple[Fitted, float]:
    started = time.perf_counter()
    return fit(), time.perf_counter() - started


def _epsilon(trial: Trial) -> float:
    if trial.epsilon is None:
        raise InvalidInput(f"The method '{trial.method}' requires an epsilon.")
    return trial.epsilon


def _public(trial: Trial, shared: SharedInputs) -> dict[str, Any]:
    """What is public about the records, and the seed."""
    return {
        "classes": range(shared.data.classes),
        "declared_size": shared.group.effort.records,
        "random_state": trial.noise_seed % 2**31,
    }


def _fit(estimator: PrivateHead | Teachers | DPSGD, shared: SharedInputs) -> float:
    """Train on the training records, which come first among the candidates, and return the seconds it took."""
    train, features = shared.data.train, shared.public_features[: len(shared.data.train)]
    _, seconds = _timed(lambda: estimator.fit(features, train.labels, groups=train.persons))
    return seconds


def _places(shared: SharedInputs, rows: Rows) -> NDArray[np.int64]:
    """Positions of rows among the candidates, the order in which public features are stored."""
    order = candidate_rows(shared.data)
    place = np.full(len(shared.data.records), -1)
    place[order] = np.arange(len(order))
    if (place[rows] < 0).any():
        raise InvalidInput(
            "Methods with a proven guarantee answer only members and non-members in a comparison. Attacks that query "
            "no other records: shadow, threshold, lira."
        )
    return np.asarray(place[rows])


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
    Method(
        "sampled-neuron",
        "repaired neuron",
        "proven",
        _sampled_neuron,
        per_answer=True,
        candidates_only=True,
    ),
    Method("teachers", "teachers", "proven", _teachers, per_answer=True, candidates_only=True),
    Method("head", "private head", "proven", _head, candidates_only=True),
    *(
        Method(
            "dpsgd" if accountant == "pld" else f"dpsgd-{accountant}",
            f"DP-SGD, {accountant.upper()}",
            "proven",
            partial(_dpsgd, accountant=accountant),
            candidates_only=True,
        )
        for accountant in ACCOUNTANTS
    ),
)


@cache
def methods() -> Mapping[str, Method]:
    """Return all methods by name: the built-in ones first, then those of installed plug-ins."""
    return with_plugins({each.name: each for each in _BUILT_IN}, ENTRY_POINT_GROUP, _read_plugin)


def _read_plugin(_: str, loaded: Any) -> tuple[str, Method]:
    """Return a plug-in's method by its own name."""
    if not isinstance(loaded, Method):
        raise TypeError("the entry point must be a quietmax.experiments.Method")
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


def check_attacks(names: Sequence[str], shared: SharedInputs) -> None:
    """Check that the methods answer every record that the attacks of a group query."""
    unable = [name for name in names if method(name).candidates_only and method(name).attacked]
    querying = [
        name
        for name in shared.group.effort.attacks
        if type(make_attack(name, models=shared.group.effort.shadows)).queried_rows is not Attack.queried_rows
    ]
    if unable and querying and len(shared.data.pool_rows):
        raise InvalidInput(
            f"The attack {querying[0]} also queries records that are neither members nor non-members, which "
            f"{', '.join(unable)} do not answer in a comparison. Attacks that query no other records: shadow, "
            "threshold, lira."
        )
