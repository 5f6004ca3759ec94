"""The methods that are compared: how each answers, and what holds of its guarantee. One entry each.

Another package adds a method by naming a `Method` as an entry point in the group `quietmax.methods`.

Noise is seeded here, so that a run can be repeated; ``status`` is what holds of the method with exact noise, and
settings follow from public numbers only. THEORY section 4: *as published* means the paper's own labels, *like for
like* (epsilon, delta) with delta = 1/(10 N) for the stated number of answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quietmax._plugins import with_plugins
from quietmax.accounting.budget import Budget
from quietmax.accounting.dpsgd import ACCOUNTANTS, PUBLISHED_ACCOUNTANTS, Accountant
from quietmax.accounting.guarantee import Guarantee
from quietmax.attacks.shadow_models import candidate_rows
from quietmax.errors import InvalidInput, unknown_name
from quietmax.estimators.dpsgd.estimator import DPSGD
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.teachers import Teachers
from quietmax.experiments.grid import Trial
from quietmax.experiments.paper import EPSILONS
from quietmax.experiments.shared import Shared
from quietmax.mechanisms.algorithm1 import Algorithm1
from quietmax.mechanisms.base import Answerer, Answers, Mechanism
from quietmax.mechanisms.sampled_neuron import SampledNeuron
from quietmax.models.features.tabular import Identity
from quietmax.models.training import softmax
from quietmax.noise.sources import SeededNoise

ENTRY_POINT_GROUP = "quietmax.methods"
Status = Literal["none", "refuted", "conditional", "proven"]
Axis = Literal["published", "like-for-like"]
Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Release:
    """A method ready to answer the rows of the group's records; ``mechanism`` is what an audit can draw from."""

    answer: Callable[[Rows], Answers]
    fit_seconds: float
    claim: Guarantee | None = None
    mechanism: Mechanism | None = None


@dataclass(frozen=True, eq=False)
class Method:
    """One method. ``status`` is that of its guarantee; ``per_answer`` tells whether every answer costs.

    ``candidates_only``: it answers members and non-members, and not the records that the split leaves over.
    """

    name: str
    title: str
    status: Status
    prepare: Callable[[Trial, Shared], Release]
    axis: Axis = "like-for-like"
    per_answer: bool = False
    attacked: bool = True
    candidates_only: bool = False

    def status_for(self, classes: int) -> Status:
        """Algorithm 1 is refuted for three or more classes; for two it is private given a true bound (THEORY 2)."""
        return "conditional" if self.status == "refuted" and classes == 2 else self.status


def declared_delta(records: int) -> float:
    """``1/(10 N)`` of THEORY section 4.

    >>> declared_delta(10_000)
    1e-05
    """
    return 1 / (10 * records)


def _epsilon(trial: Trial) -> float:
    if trial.epsilon is None:
        raise InvalidInput(f"The method '{trial.method}' needs an epsilon; give at least one.")
    return trial.epsilon


def _plain(trial: Trial, shared: Shared, *, original: bool = False) -> Release:  # noqa: ARG001
    started = time.perf_counter()
    model = shared.original if original else shared.model
    seconds = time.perf_counter() - started

    def answer(rows: Rows) -> Answers:
        logits = model.logits(shared.data.records.features[rows])
        return Answers(logits.argmax(-1), softmax(logits))

    return Release(answer, seconds)


def _paid_per_answer(
    noisy: Answerer, features: Callable[[Rows], NDArray[np.float32]], seconds: float
) -> Release:
    """A method whose answers each cost something: ``features`` looks up what the model takes for the rows."""
    claim = noisy.mechanism.guarantee(noisy.model.classes)
    return Release(lambda rows: noisy.answer(features(rows)), seconds, claim, noisy.mechanism)


def _algorithm1(trial: Trial, shared: Shared, *, noise: Literal["gaussian", "laplace"]) -> Release:
    budget = Budget(_epsilon(trial), queries=trial.queries or 1)
    noisy = Answerer.prepare(shared.model, Algorithm1(noise), budget, noise=SeededNoise(trial.noise_seed))
    return _paid_per_answer(noisy, lambda rows: shared.data.records.features[rows], 0.0)


def _public(trial: Trial, shared: Shared) -> dict[str, Any]:
    return {
        "classes": range(shared.data.classes),
        "declared_size": shared.group.effort.records,
        "random_state": trial.noise_seed % 2**31,
    }


def _training_part(shared: Shared) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    return shared.public_features[: len(shared.train_labels)], shared.train_labels


def _places(shared: Shared, rows: Rows) -> NDArray[np.int64]:
    """Where rows stand among the candidates, in whose order public features are kept."""
    order = candidate_rows(shared.data)
    place = np.full(len(shared.data.records), -1)
    place[order] = np.arange(len(order))
    if (place[rows] < 0).any():
        raise InvalidInput(
            "This attack asks for records that are neither members nor non-members, which the proven methods of a "
            "comparison do not answer; choose shadow, threshold or lira."
        )
    return np.asarray(place[rows])


def _head(trial: Trial, shared: Shared) -> Release:
    features, labels = _training_part(shared)
    started = time.perf_counter()
    head = PrivateHead(
        _epsilon(trial),
        declared_delta(shared.group.effort.records),
        features=Identity(),
        **_public(trial, shared),
    ).fit(features, labels)
    seconds = time.perf_counter() - started

    def answer(rows: Rows) -> Answers:
        probabilities = head.predict_proba(shared.public_features[_places(shared, rows)])
        return Answers(probabilities.argmax(-1), probabilities)

    return Release(answer, seconds, head.guarantee_)


def _sampled_neuron(trial: Trial, shared: Shared) -> Release:
    """The repaired neuron on the logits of a head whose weights stay inside: pure epsilon per answer."""
    features, labels = _training_part(shared)
    queries = trial.queries or 1
    started = time.perf_counter()
    head = PrivateHead(
        _epsilon(trial),
        features=Identity(),
        method="output",
        release="query",
        queries=queries,
        **_public(trial, shared),
    ).fit(features, labels)
    seconds = time.perf_counter() - started
    budget = Budget(_epsilon(trial), queries=queries)
    model, source = head.predictor_.model, SeededNoise(trial.noise_seed)
    noisy = Answerer.prepare(model, SampledNeuron("laplace"), budget, noise=source)
    return _paid_per_answer(noisy, lambda rows: shared.public_features[_places(shared, rows)], seconds)


def _teachers(trial: Trial, shared: Shared) -> Release:
    features, labels = _training_part(shared)
    started = time.perf_counter()
    crowd = Teachers(
        _epsilon(trial),
        declared_delta(shared.group.effort.records),
        trial.queries or 1,
        features=Identity(),
        **_public(trial, shared),
    ).fit(features, labels)
    seconds = time.perf_counter() - started
    noisy = Answerer(crowd.ensemble_, crowd.predictor_.mechanism, SeededNoise(trial.noise_seed))
    return _paid_per_answer(noisy, lambda rows: shared.public_features[_places(shared, rows)], seconds)


def _dpsgd(trial: Trial, shared: Shared, *, accountant: Accountant) -> Release:
    inputs, labels = shared.public_inputs, shared.train_labels
    image = shared.data.records.image_shape is not None
    started = time.perf_counter()
    private = DPSGD(
        _epsilon(trial),
        declared_delta(shared.group.effort.records),
        accountant=accountant,
        length=1.0 if image else None,  # features of images have length 1
        **_public(trial, shared),
    ).fit(inputs[: len(labels)], labels)
    seconds = time.perf_counter() - started

    def answer(rows: Rows) -> Answers:
        probabilities = private.predict_proba(inputs[_places(shared, rows)])
        return Answers(probabilities.argmax(-1), probabilities)

    return Release(answer, seconds, private.guarantee_)


def _published_dpsgd(trial: Trial, shared: Shared, *, accountant: Accountant) -> Release:
    if trial.epsilon not in EPSILONS:
        raise InvalidInput(
            f"DP-SGD as published was asked for at epsilon {trial.epsilon}, but is trained at the paper's only; choose "
            f"among {', '.join(f'{epsilon:g}' for epsilon in EPSILONS)}."
        )
    started = time.perf_counter()
    network = shared.sweep(accountant, _epsilon(trial))
    seconds = time.perf_counter() - started

    def answer(rows: Rows) -> Answers:
        logits = network.logits(shared.data.records.features[rows]).double().numpy()
        return Answers(logits.argmax(-1), softmax(logits))

    return Release(answer, seconds)


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
    """All methods by name: the built-in ones first, then those of installed plug-ins.

    >>> methods()["head"].status
    'proven'
    """
    return with_plugins({method.name: method for method in _BUILT_IN}, ENTRY_POINT_GROUP, _read_plugin)


def _read_plugin(_: str, loaded: Any) -> tuple[str, Method]:
    """Return a plug-in's method by its own name."""
    if not isinstance(loaded, Method):
        raise TypeError("the entry point must be a quietmax.experiments.Method")
    return loaded.name, loaded


def method(name: str) -> Method:
    """The method of that name, or a refusal that suggests the nearest one."""
    known = methods()
    if name in known:
        return known[name]
    raise unknown_name("method", name, known)
