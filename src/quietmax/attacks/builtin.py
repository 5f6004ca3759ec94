"""The built-in attacks, and the registry of all attacks by name. `docs/attacks.md` describes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quietmax._lazy import with_plugins
from quietmax.attacks.base import Attack, FittedAttack
from quietmax.attacks.metrics import (
    SMALLEST_PROBABILITY,
    Floats,
    Labels,
    Released,
    Statistic,
    _auc,
    _log_probability,
    _released_probabilities,
    best_threshold,
    correct,
)
from quietmax.attacks.shadow_models import (
    Design,
    Rows,
    ShadowPool,
    Units,
    _folds,
    _leftover_rows,
    _plain_answers,
    candidate_rows,
)
from quietmax.data.records import Split
from quietmax.errors import InvalidInput, unknown_name
from quietmax.mechanisms.base import Answers
from quietmax.models.serialization import settings_to_json
from quietmax.models.stacked import MLP, CrossEntropy, Progress, TrainingSettings, train_stack

Mask = NDArray[np.bool_]
StatisticName = Literal["loss", "confidence", "entropy"]

ATTACK_NETWORK = TrainingSettings(hidden=(64,), loss=CrossEntropy(), learning_rate=0.01, l2=1e-6)
"""The paper's attack network: 64 tanh units, two softmax outputs, 100 epochs in batches of 100."""
OFFSETS = tuple(step / 10 for step in range(11))
"""Offsets of RMIA tried on the shadow networks if none is given."""
_SMALLEST_VARIANCE = 1e-6


# Threshold


def _confidence(answers: Answers, _labels: Labels) -> Floats:
    return np.asarray(_released_probabilities(answers).max(-1))


def _negative_entropy(answers: Answers, _labels: Labels) -> Floats:
    probabilities = _released_probabilities(answers)
    return np.asarray((probabilities * np.log(np.maximum(probabilities, SMALLEST_PROBABILITY))).sum(-1))


_STATISTICS: dict[StatisticName, Statistic] = {
    "loss": _log_probability,
    "confidence": _confidence,
    "entropy": _negative_entropy,
}


@dataclass(frozen=True)
class Threshold(Attack):
    """Compare one statistic of each answer with one threshold (Yeom et al. 2018).

    Yeom et al. compare the loss with the average training loss. Here the threshold is the best one on shadow networks,
    which requires no knowledge of the target. If the target releases labels only, a record is called a member if its
    label is correct; the leakage is then the training accuracy minus the test accuracy.

    Parameters
    ----------
    models, seed
        As in `Attack`.
    statistic : {"loss", "confidence", "entropy"}
        The loss of the true class, the largest probability, or the entropy of the answer. The last two do not use the
        true label (Salem et al. 2019).

    Examples
    --------
    >>> Threshold(models=4, statistic="entropy").name
    'threshold-entropy'
    """

    statistic: StatisticName = "loss"

    @property
    def name(self) -> str:
        """``threshold`` for the loss, else ``threshold-`` and the statistic."""
        return "threshold" if self.statistic == "loss" else f"threshold-{self.statistic}"

    def __post_init__(self) -> None:
        if self.statistic not in _STATISTICS:
            raise InvalidInput(f"statistic must be one of {', '.join(_STATISTICS)}, got {self.statistic!r}.")

    def fit(self, pool: ShadowPool, released: Released, progress: Progress | None = None) -> FittedAttack:  # noqa: ARG002
        """Choose the threshold on the answers of the pool to its members and non-members; 1/2 for labels only."""
        self.check_pool(pool)
        labels = pool.candidate_labels
        if released == "labels":
            note = "The target releases labels only: a record with a correct label is called a member."
            return FittedAttack(partial(correct, labels=labels), 0.5, (note,))
        statistic = _STATISTICS[self.statistic]
        rows = pool.reference_rows
        units = pool.units(rows)
        values = units.means(pool.values(rows, statistic, released))
        inside = units.all(pool.inside[:, rows])
        held_out = units.all(pool.drawn[:, rows]) & ~inside
        return FittedAttack(
            lambda answers: statistic(answers, labels), best_threshold(values[inside], values[held_out])
        )


# Shadow


@dataclass(frozen=True, eq=False)
class AttackNetworks:
    """Trained attack networks of `Shadow`."""

    stack: MLP
    network_of_class: NDArray[np.int64]  # The network that judges each class
    threshold: float  # The best threshold on the shadow networks
    notes: tuple[str, ...]

    def fitted(self, released: Released, labels: Labels) -> FittedAttack:
        """Score by the log-odds of membership; a candidate is a member if these are positive."""

        def _scores(answers: Answers) -> Floats:
            features = _attack_features(answers, released, self.stack.widths[0])
            return _membership_odds(self.stack, self.network_of_class, features, labels)

        return FittedAttack(_scores, self.threshold, self.notes, decision=0.0)


@dataclass(frozen=True)
class Shadow(Attack):
    """Shadow networks and one attack network per class, as the paper runs it (Shokri et al. 2017).

    Attack networks learn from the shadow networks' answers without noise; from one-hot labels if the target releases
    labels only.

    Parameters
    ----------
    models, seed
        As in `Attack`.
    network : TrainingSettings
        How attack networks are trained.

    Examples
    --------
    >>> Shadow(models=10).network.hidden
    (64,)
    """

    network: TrainingSettings = field(default=ATTACK_NETWORK)
    name: ClassVar[str] = "shadow"

    def _designs_for(self, data: Split) -> tuple[Design, ...]:
        """The paper's disjoint sets if there is a pool, else overlapping ones."""
        return super()._designs_for(data)[:1]

    def fit(self, pool: ShadowPool, released: Released, progress: Progress | None = None) -> FittedAttack:
        """Train one attack network per class, all at once."""
        self.check_pool(pool)
        return self.networks(pool, released, progress).fitted(released, pool.candidate_labels)

    def networks(
        self, pool: ShadowPool, released: Released, progress: Progress | None = None
    ) -> AttackNetworks:
        """Train the attack networks.

        A class whose records are all members or all non-members is judged by a network trained on all classes.
        """
        features, labels, inside, units = _attack_data(pool, released)
        by_class = [np.flatnonzero(labels == label) for label in range(pool.data.classes)]
        has_both = np.array([len(np.unique(inside[rows])) == 2 for rows in by_class])
        rows = [each for each, both in zip(by_class, has_both, strict=True) if both]
        # The network for classes without records of both kinds comes last.
        network_of_class = np.where(has_both, np.cumsum(has_both) - 1, len(rows))
        if not has_both.all():
            rows.append(np.arange(len(labels)))
        seeds = np.random.default_rng((0xA77A, self.seed)).integers(2**62, size=len(rows))
        stack = train_stack(
            features,
            inside,
            2,
            rows,
            settings=self.network,
            seeds=[int(seed) for seed in seeds],
            progress=progress,
        )
        judged = units.means(_membership_odds(stack, network_of_class, features, labels))
        was_inside = units.means(inside.astype(np.float64)) == 1
        threshold = best_threshold(judged[was_inside], judged[~was_inside])
        return AttackNetworks(stack, network_of_class, threshold, _shadow_notes(np.flatnonzero(~has_both)))

    def _described(self, pool: ShadowPool) -> dict[str, Any]:
        return {**super()._described(pool), "network": settings_to_json(self.network)}


_AttackData = tuple[NDArray[np.float32], Labels, Labels, Units]
"""Answers of shadow networks, true labels, 1 for a member and 0 for a non-member, and whose rows these are."""


def _attack_data(pool: ShadowPool, released: Released) -> _AttackData:
    """Collect the answers of every network to its own members, then to as many non-members of its own."""
    records = pool.data.records
    features, labels, inside, orders, starts, count = [], [], [], [], [], 0
    for index, network in enumerate(pool.each()):
        held_out = np.flatnonzero(pool.drawn[index] & ~pool.inside[index])
        members = _as_many(pool, np.flatnonzero(pool.inside[index]), len(pool.units(held_out)), index)
        rows = np.concatenate([members, held_out])
        answers = _plain_answers(network, records.features[rows], released)
        features.append(_attack_features(answers, released, records.classes))
        labels.append(records.labels[rows])
        inside.append(np.repeat([1, 0], [len(members), len(held_out)]))
        units = pool.units(rows)
        orders.append(units.order + count)
        starts.append(units.starts + count)
        count += len(rows)
    together = Units(np.concatenate(orders), np.concatenate(starts))
    return np.concatenate(features), np.concatenate(labels), np.concatenate(inside), together


def _as_many(pool: ShadowPool, rows: Rows, count: int, seed: int) -> Rows:
    """Return the rows of ``count`` units chosen at random, or all if there are no more."""
    units = pool.units(rows)
    if len(units) <= count:
        return rows
    chosen = np.random.default_rng((0xE4A1, seed)).permutation(len(units))[:count]
    return np.sort(rows[units._rows_of(chosen)])


def _attack_features(answers: Answers, released: Released, classes: int) -> NDArray[np.float32]:
    """Return the probability vectors as released, or the labels one-hot."""
    if released == "labels":
        return np.eye(classes, dtype=np.float32)[answers.labels]
    return _released_probabilities(answers).astype(np.float32)


def _membership_odds(
    networks: MLP, network_of_class: Labels, features: NDArray[np.float32], labels: Labels
) -> Floats:
    """Judge each record by the network of its true class: logit of member minus logit of non-member."""
    judges = network_of_class[labels]
    odds = np.empty(len(labels))
    for judge in np.unique(judges):
        judged = judges == judge
        logits = networks.network(int(judge)).logits(torch.from_numpy(features[judged])).double()
        odds[judged] = (logits[:, 1] - logits[:, 0]).numpy()
    return odds


def _shadow_notes(without: NDArray[np.int64]) -> tuple[str, ...]:
    if not len(without):
        return ()
    listed = ", ".join(str(label) for label in without[:10]) + (", ..." if len(without) > 10 else "")
    return (
        f"The shadow networks had no records both inside and outside their training sets for {len(without)} classes "
        f"({listed}); one attack network trained on all classes judges those.",
    )


# LiRA and RMIA


@dataclass(frozen=True)
class _ReferenceAttack(Attack):
    """An attack that compares each candidate with reference networks; online, also with those that trained on it."""

    models: int = 32
    mode: Literal["online", "offline"] = "online"
    least_models: ClassVar[int] = 2
    kind: ClassVar[str]

    def __post_init__(self) -> None:
        if self.mode not in ("online", "offline"):
            raise InvalidInput(f"mode must be 'online' or 'offline', got {self.mode!r}.")

    @property
    def name(self) -> str:
        """The kind of attack, followed by ``-offline`` if it is."""
        return self.kind if self.mode == "online" else f"{self.kind}-offline"

    @property
    def designs(self) -> tuple[Design, ...]:
        """Online needs networks that trained on candidates; offline does not."""
        return ("overlapping",) if self.mode == "online" else super().designs


def _sums(counted: Mask, leave_one_out: bool, *values: Floats) -> list[Floats]:
    """Count the networks and sum their values of each record, for every network over the others if it is left out."""
    each: list[Any] = [counted, *(np.where(counted, value, 0.0) for value in values)]
    return [value.sum(0) - value if leave_one_out else value.sum(0) for value in each]


def _told_apart(units: Units, scores: Floats, known: Mask, inside: Mask) -> tuple[Floats, Floats] | None:
    """Return the scores of members and of non-members, shape (networks, rows) each; None if there are none of them."""
    scores, known, inside = units.means(scores), units.all(known), units.all(inside)
    members, nonmembers = scores[known & inside], scores[known & ~inside]
    return (members, nonmembers) if len(members) and len(nonmembers) else None


@dataclass(frozen=True)
class LiRA(_ReferenceAttack):
    """Compare each answer with its distributions over reference networks (Carlini et al. 2022), one query each.

    v is the log-odds of the true class. Online: ``ln N(v; mean_in, var_in) - ln N(v; mean_out, var_out)``. Offline:
    ``(v - mean_out)/sd_out``. If the target releases labels only, Bernoulli distributions of a correct label replace
    the Gaussian ones.

    Parameters
    ----------
    models : int
        Number of reference networks, at least 8 in practice. Every candidate must be outside some of them, and online
        inside some: with a holdout of 0.2 a network leaves out one candidate in five, so take at least 10.
    seed : int
        Determines the reference networks.
    mode : {"online", "offline"}
        Whether networks that trained on the candidates are used.
    variance : {"fixed", "per-example"}
        Whether all records share one variance; else it takes a few dozen networks.

    Examples
    --------
    >>> LiRA(models=16, mode="offline").name
    'lira-offline'
    """

    variance: Literal["fixed", "per-example"] = "fixed"
    kind: ClassVar[str] = "lira"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variance not in ("fixed", "per-example"):
            raise InvalidInput(f"variance must be 'fixed' or 'per-example', got {self.variance!r}.")

    def fit(self, pool: ShadowPool, released: Released, progress: Progress | None = None) -> FittedAttack:  # noqa: ARG002
        """Fit the distributions of all candidates; choose the threshold by attacking each network with the others."""
        self.check_pool(pool)
        statistic = correct if released == "labels" else _log_odds
        candidates, rows, labels = candidate_rows(pool.data), pool.reference_rows, pool.candidate_labels
        values, inside = pool.values(candidates, statistic, released), pool.inside[:, candidates]
        ratio, known = self._ratio(values, inside, released, leave_one_out=False)
        if pool.design == "disjoint":
            values, inside = pool.values(rows, statistic, released), pool.inside[:, rows]
        without, also_known = self._ratio(values, inside, released, leave_one_out=True)
        told = _told_apart(pool.units(rows), without(values), also_known, inside)
        if told is None or not known.all():
            raise InvalidInput(
                f"{pool.networks} reference networks are too few for {self.mode} LiRA with {self.variance} variance; "
                f"at least {max(8, 2 * _folds(pool.data))} are recommended."
            )
        return FittedAttack(lambda answers: ratio(statistic(answers, labels)), best_threshold(*told))

    def _ratio(
        self, values: Floats, inside: Mask, released: Released, *, leave_one_out: bool
    ) -> tuple[Callable[[Floats], Floats], Mask]:
        """Return the log-likelihood ratio, offline the deviation from non-members, and where it is known."""
        fitted = _bernoulli if released == "labels" else partial(_gaussian, pooled=self.variance == "fixed")
        nonmembers = fitted(values, ~inside, leave_one_out)
        if self.mode == "offline":
            return nonmembers.deviation, nonmembers.known
        members = fitted(values, inside, leave_one_out)
        return (
            lambda seen: members.log_density(seen) - nonmembers.log_density(seen),
            members.known & nonmembers.known,
        )


def _log_odds(answers: Answers, labels: Labels) -> Floats:
    """Return ``ln p_y - ln(sum of the other probabilities)`` at the true labels.

    This is the logit scaling of Carlini et al. (2022), under which the values are nearly Gaussian. The other
    probabilities are summed: ``1 - p_y`` would lose digits.
    """
    others = _released_probabilities(answers).copy()
    others[np.arange(len(others)), labels] = 0.0
    log_others = np.log(np.maximum(others.sum(-1), SMALLEST_PROBABILITY))
    return np.asarray(_log_probability(answers, labels) - log_others)


class _Distribution(NamedTuple):
    """The distribution of each record's values over some networks."""

    log_density: Callable[[Floats], Floats]  # Of values, without the constant
    deviation: Callable[[Floats], Floats]  # How far values lie above their mean
    known: Mask  # Where there were enough networks to fit it


def _gaussian(values: Floats, counted: Mask, leave_one_out: bool, *, pooled: bool) -> _Distribution:
    """Fit ``N(mean, variance)`` to the values that count; ``pooled``: all records share the variance.

    ``(v - mean)/sd`` replaces Carlini et al.'s ``Pr[Z <= v]``, which is its increasing function Phi.
    """
    centre = values.mean(0)
    count, first, second = _sums(counted, leave_one_out, values - centre, (values - centre) ** 2)
    shift = first / np.maximum(count, 1)
    squares = np.maximum(second - count * shift**2, 0.0)
    freedom = np.maximum(count - 1, 0)
    if pooled:
        squares, freedom = squares.sum(-1, keepdims=True), freedom.sum(-1, keepdims=True)
    spread = np.broadcast_to(squares / np.maximum(freedom, 1), shift.shape)
    mean, variance = centre + shift, np.maximum(spread, _SMALLEST_VARIANCE)
    return _Distribution(
        lambda seen: -((seen - mean) ** 2) / (2 * variance) - np.log(variance) / 2,
        lambda seen: (seen - mean) / np.sqrt(variance),
        count >= (1 if pooled else 2),
    )


def _bernoulli(values: Floats, counted: Mask, leave_one_out: bool) -> _Distribution:
    """Fit the probability of a correct label, smoothed to ``(correct + 1/2)/(networks + 1)``."""
    count, total = _sums(counted, leave_one_out, values)
    probability = (total + 0.5) / (count + 1)
    return _Distribution(
        lambda seen: np.where(seen > 0.5, np.log(probability), np.log1p(-probability)),
        lambda seen: seen - probability,
        count >= 1,
    )


@dataclass(frozen=True)
class RMIA(_ReferenceAttack):
    """Pairwise likelihood ratios against population records (Zarifzadeh et al. 2024); the target is queried for both.

    The score of x is the share of population records z with ``LR(x, z) = (p(x|target)/p(x)) / (p(z|target)/p(z)) >=
    gamma``, p the probability of the true class. Online ``p(x)`` is half of the mean over networks that trained on x
    plus half of the mean over others; offline ``((1+a)*mean_out + 1 - a)/2``. No network of the online attack trained
    on z, so ``p(z)`` is the mean over all, which shifts all scores alike. Labels only: p is 1 for a correct label, else
    0, and means are smoothed to ``(correct + 1/2)/(n + 1)``.

    Parameters
    ----------
    models : int
        Number of reference networks, at least 8 in practice; with a holdout of 0.2 at least 10, as in `LiRA`.
    seed : int
        Determines the reference networks and the population.
    mode : {"online", "offline"}
        Whether networks that trained on the candidates are used.
    gamma : float
        How much larger the ratio of a candidate must be than that of a population record.
    offset : float or None
        The offset ``a`` of the offline attack, from 0 to 1. None: the one of `OFFSETS` with the best AUC on the shadow
        networks.
    population : int
        Number of population records, chosen from the pool: the records that the split leaves over, or a table of other
        people. Without a pool, candidates are compared with each other.

    Examples
    --------
    >>> RMIA(mode="offline").name
    'rmia-offline'
    """

    gamma: float = 2.0
    offset: float | None = None
    population: int = 2500
    kind: ClassVar[str] = "rmia"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.gamma) and self.gamma > 0):
            raise InvalidInput(f"gamma must be positive and finite, got {self.gamma}.")
        if self.population < 1:
            raise InvalidInput(f"population must be at least 1, got {self.population}.")
        if self.offset is not None and not 0 <= self.offset <= 1:
            raise InvalidInput(f"offset must be from 0 to 1, or None to tune it, got {self.offset}.")

    def queried_rows(self, data: Split) -> Rows:
        """Return the candidates of ``data``, then the population records."""
        return np.concatenate([candidate_rows(data), _leftover_rows(data, self.population, self.seed)])

    def fit(self, pool: ShadowPool, released: Released, progress: Progress | None = None) -> FittedAttack:  # noqa: ARG002
        """Average the reference networks; tune offset and threshold by attacking each network with the others."""
        self.check_pool(pool)
        queried, candidates = self.queried_rows(pool.data), len(candidate_rows(pool.data))
        statistic = _log_correct if released == "labels" else _log_probability
        seen = _Seen._of(pool, queried, statistic, released)
        reference = seen._part(slice(candidates))
        if pool.design == "disjoint":
            reference = _Seen._of(pool, pool.reference_rows, statistic, released)
        population = seen._part(slice(candidates, None)) if len(queried) > candidates else None
        # Ratios of correct labels seldom differ by as much as 2.
        gamma = 1.0 if released == "labels" else self.gamma
        against = partial(_against_each, reference, pool.units(pool.reference_rows), population, gamma)
        offset = self.offset if self.mode == "offline" else None
        notes = []
        if self.mode == "offline" and offset is None:
            offset = OFFSETS[int(np.argmax([_auc(*against(each)).value for each in OFFSETS]))]
            notes.append(f"The offset a = {offset:g} has the best AUC on the shadow networks.")
        log_normalisers = seen._log_normalisers(offset, leave_one_out=False)
        if np.isnan(log_normalisers[:candidates]).any():
            raise _too_few(pool.networks)
        if gamma != self.gamma:
            notes.append("The target releases labels only: gamma is 1.")
        if population is None:
            notes.append("No records are left over: candidates are compared with each other.")
        labels = pool.data.records.labels[queried]

        def _score(answers: Answers) -> Floats:
            ratios = statistic(answers, labels) - log_normalisers
            others = ratios if population is None else ratios[candidates:]
            return _dominated(ratios[:candidates], others, gamma)

        return FittedAttack(_score, best_threshold(*against(offset)), tuple(notes))


class _Seen(NamedTuple):
    """Log-probabilities of some records' true classes and who trained on them, shape (networks, records)."""

    values: Floats
    inside: Mask
    smoothing: float

    @classmethod
    def _of(cls, pool: ShadowPool, rows: Rows, statistic: Statistic, released: Released) -> _Seen:
        smoothing = 0.5 if released == "labels" else 0.0
        return cls(pool.values(rows, statistic, released), pool.inside[:, rows], smoothing)

    def _part(self, records: slice) -> _Seen:
        return _Seen(self.values[:, records], self.inside[:, records], self.smoothing)

    def _ratios(self, offset: float | None) -> Floats:
        """Return ``ln p(x|network) - ln p(x)`` for every network, ``p(x)`` from the others; NaN where it is unknown."""
        return self.values - self._log_normalisers(offset, leave_one_out=True)

    def _log_normalisers(self, offset: float | None, *, leave_one_out: bool) -> Floats:
        """Return ``ln p(x)``: offline with an offset, online without; NaN where no network gives a value."""
        outside = self._mean(~self.inside, leave_one_out)
        if offset is not None:
            return np.log(np.maximum(((1 + offset) * outside + 1 - offset) / 2, SMALLEST_PROBABILITY))
        inside = np.where(self.inside.any(0), self._mean(self.inside, leave_one_out), outside)
        return np.log(np.maximum((inside + outside) / 2, SMALLEST_PROBABILITY))

    def _mean(self, counted: Mask, leave_one_out: bool) -> Floats:
        count, total = _sums(counted, leave_one_out, np.exp(self.values))
        # Rounding may take a difference of sums below zero.
        total = np.maximum(total, 0.0) + self.smoothing
        return np.where(count > 0, total / np.maximum(count + 2 * self.smoothing, 1), np.nan)


def _dominated(ratios: Floats, population: Floats, gamma: float) -> Floats:
    """Return for each log-ratio the share of the population's log-ratios r with ``ratio - r >= ln gamma``."""
    others = np.sort(population[~np.isnan(population)])
    below = np.searchsorted(others, ratios - math.log(gamma), side="right")
    return below / max(len(others), 1)


def _against_each(
    reference: _Seen, units: Units, population: _Seen | None, gamma: float, offset: float | None
) -> tuple[Floats, Floats]:
    """Score members and non-members when every network in turn is the target and the others are references.

    As with the target, the population are records that the network did not train on, or without any population the
    records of ``reference`` themselves.
    """
    ratios = reference._ratios(offset)
    among = ratios
    if population is not None:
        among = np.where(population.inside, np.nan, population._ratios(offset))
    scores = np.stack([_dominated(own, others, gamma) for own, others in zip(ratios, among, strict=True)])
    told = _told_apart(units, scores, ~np.isnan(ratios), reference.inside)
    if told is None:
        raise _too_few(len(ratios))
    return told


def _log_correct(answers: Answers, labels: Labels) -> Floats:
    """Return ``ln 1`` for a correct label, (nearly) ``ln 0`` for a wrong one."""
    return np.log(np.maximum(correct(answers, labels), SMALLEST_PROBABILITY))


def _too_few(networks: int) -> InvalidInput:
    return InvalidInput(
        f"{networks} reference networks are too few for RMIA; at least 8 are recommended, and at least 2 divided by "
        "the holdout's share."
    )


# The registry

_BUILT_IN: dict[str, Callable[..., Attack]] = {
    "shadow": Shadow,
    "threshold": Threshold,
    "threshold-confidence": partial(Threshold, statistic="confidence"),
    "threshold-entropy": partial(Threshold, statistic="entropy"),
    "lira": LiRA,
    "lira-offline": partial(LiRA, mode="offline"),
    "rmia": RMIA,
    "rmia-offline": partial(RMIA, mode="offline"),
}


def registered_attacks() -> Mapping[str, Callable[..., Attack]]:
    """Return all attacks by name: the built-in ones, then those of plug-ins.

    A plug-in is an entry point in the group ``quietmax.attacks``: a class or function that takes the keyword arguments
    ``models`` and ``seed`` and returns an `Attack`.
    """
    return with_plugins(_BUILT_IN, "quietmax.attacks", _read_plugin)


def _read_plugin(name: str, loaded: Any) -> tuple[str, Callable[..., Attack]]:
    if not callable(loaded):
        raise TypeError("the entry point must be a class or function that returns a quietmax.attacks.Attack")
    return name, loaded


def make_attack(name: str, *, models: int, seed: int = 0) -> Attack:
    """Make a registered attack."""
    known = registered_attacks()
    if name not in known:
        raise unknown_name("attack", name, known)
    made = known[name](models=models, seed=seed)
    if not isinstance(made, Attack):
        raise InvalidInput(
            f"The plug-in '{name}' must return a quietmax.attacks.Attack, got {type(made).__name__}."
        )
    if models < made.least_models:
        raise InvalidInput(
            f"shadows must be at least {made.least_models} for the attack '{name}', got {models}."
        )
    return made
