"""What every attack is: it learns from shadow networks, then scores a target's answers to the candidates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from quietmax.accounting.budget import Budget
from quietmax.attacks.metrics import Floats, Released, released_by
from quietmax.attacks.report import AttackReport, summarise
from quietmax.attacks.shadow_models import Design, Progress, Rows, ShadowPool, candidate_rows, set_size
from quietmax.attacks.targets import QueryResult, Target, ask
from quietmax.data.records import Split
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import Answerer, Answers, Mechanism
from quietmax.models.stacked import TrainingSettings
from quietmax.models.training import Model
from quietmax.noise.sources import EXACT, NoiseSource


class Fitted(ABC):
    """An attack that has learned from shadow networks and can score any target's answers.

    ``threshold`` is the best one on the shadow networks; it is also the decision of attacks that have no other.
    """

    threshold: float
    notes: tuple[str, ...]

    @property
    def decision(self) -> float:
        """Above it a record is called a member."""
        return self.threshold

    @abstractmethod
    def scores(self, answers: Answers) -> Floats:
        """One score per candidate from the answers to `Attack.queried_rows`, larger for likelier members."""


@dataclass(frozen=True)
class Attack(ABC):
    """A membership-inference attack with ``models`` shadow networks; ``seed`` fixes everything random in it.

    ``designs`` are the designs of shadow pools it can learn from, the usual one first.
    """

    models: int = 20
    seed: int = 0

    @property
    @abstractmethod
    def name(self) -> str:
        """What reports call it: another for every variant, the registry's for a registered one."""

    @property
    @abstractmethod
    def designs(self) -> tuple[Design, ...]:
        """Which shadow pools it can use; one is trained after the first if none is given."""

    @abstractmethod
    def fit(self, pool: ShadowPool, released: Released, progress: Progress | None = None) -> Fitted:
        """Learn from shadow networks to attack targets that release probabilities or labels only."""

    def queried_rows(self, data: Split) -> Rows:
        """The records the target is asked for: the candidates, members first, then any the attack needs besides."""
        return candidate_rows(data)

    def train_pool(
        self, data: Split, settings: TrainingSettings, progress: Progress | None = None
    ) -> ShadowPool:
        """Train the shadow networks this attack usually learns from."""
        train = ShadowPool.outside if self.designs[0] == "outside" else ShadowPool.around
        return train(data, settings, self.models, seed=self.seed, progress=progress)

    def run(
        self,
        model: Model | TrainingSettings,
        data: Split,
        *,
        target: Target = None,
        pool: ShadowPool | None = None,
        progress: Progress | None = None,
    ) -> AttackReport:
        """Attack ``model``, trained on the training part of ``data``; its settings are those of the shadow networks.

        ``target`` is asked in place of the model: see `quietmax.attacks.targets.ask` for what it may be; then training
        settings alone may stand for ``model``. ``pool`` reuses shadow networks trained before. The target is asked
        once per candidate, before anything is trained.
        """
        settings = settings_for(model, data, target)
        if pool is not None:
            self.check_pool(pool)
            check_same_split(pool, data)
        elif self.designs[0] == "outside":
            set_size(data)  # refuses, where nothing is left over, before the target is asked
        asked = self.ask(model if target is None else target, data)
        chosen = self.train_pool(data, settings, progress) if pool is None else pool
        return self.report(self.fit(chosen, released_by(asked.answers), progress), asked, chosen)

    def ask(self, target: Target, data: Split) -> QueryResult:
        """Put this attack's queries to a target."""
        rows = self.queried_rows(data)
        return ask(target, data.records.features[rows], data.classes)

    def report(self, fitted: Fitted, asked: QueryResult, pool: ShadowPool) -> AttackReport:
        """Score the answers and sum up."""
        scores = np.asarray(fitted.scores(asked.answers), dtype=np.float64)
        members = len(pool.data.train_rows)
        return summarise(
            attack=self.name,
            target=asked.target,
            released=released_by(asked.answers),
            member_scores=scores[:members],
            nonmember_scores=scores[members:],
            decision=fitted.decision,
            threshold=fitted.threshold,
            queries=asked.queries,
            spent=asked.spent,
            settings=self.described(pool),
            notes=(*pool.notes, *fitted.notes),
        )

    def check_pool(self, pool: ShadowPool) -> None:
        """Refuse a pool of a design the attack cannot learn from."""
        if pool.design not in self.designs:
            raise InvalidInput(
                f"The attack '{self.name}' needs a shadow pool of design {' or '.join(self.designs)}, but this one is "
                f"{pool.design}; train one with ShadowPool.{self.designs[0]}."
            )

    def described(self, pool: ShadowPool) -> dict[str, Any]:
        """The attack's settings and its shadow pool as JSON values, for the report."""
        return {**asdict(self), "models": pool.networks, "pool": pool.design}


def check_same_split(pool: ShadowPool, data: Split) -> None:
    """Refuse a pool trained around or outside other candidates."""
    same = len(pool.data.records) == len(data.records) and np.array_equal(
        candidate_rows(pool.data), candidate_rows(data)
    )
    if not same:
        raise InvalidInput(
            "The shadow pool was trained for another split, so its networks may have seen other records as members; "
            "train one for this split."
        )


def settings_for(model: Model | TrainingSettings, data: Split, target: Target) -> TrainingSettings:
    """The settings to train shadow networks with, after checking that model and data belong together."""
    if isinstance(model, TrainingSettings):
        if target is None:
            raise InvalidInput("Training settings alone cannot be attacked; give the target to ask.")
        return model
    if not isinstance(model, Model):
        raise InvalidInput(
            f"The model is of type {type(model).__name__}, but shadow networks need a Quietmax model or training "
            "settings; give these, and the thing to be asked as target."
        )
    width = data.records.features.shape[1]
    if (model.features, model.classes, model.records) != (width, data.classes, len(data.train_rows)):
        raise InvalidInput(
            f"The model was trained on {model.records} records of {model.features} features and {model.classes} "
            f"classes, but the data's training part has {len(data.train_rows)} of {width} and {data.classes}; give "
            "the split it was trained on."
        )
    return model.settings


def run_together(
    attacks: Sequence[Attack],
    model: Model | TrainingSettings,
    data: Split,
    *,
    target: Target = None,
    progress: Progress | None = None,
) -> list[AttackReport]:
    """Run all ``attacks`` as `Attack.run` does, sharing answers and shadow networks.

    An attack that can learn from either design uses whichever another attack needs. Each report states the queries
    of all of them, which were asked together.
    """
    if not attacks:
        raise InvalidInput("There is no attack to run; name at least one.")
    settings = settings_for(model, data, target)
    designs = shared_designs(attacks)
    if "outside" in designs:
        set_size(data)  # refuses, where nothing is left over, before the target is asked
    rows = np.unique(np.concatenate([attack.queried_rows(data) for attack in attacks]))
    asked = ask(model if target is None else target, data.records.features[rows], data.classes)
    pools: dict[Design, ShadowPool] = {}
    reports = []
    for attack, design in zip(attacks, designs, strict=True):
        if design not in pools:
            needing = [other for other in attacks if design in other.designs]
            train = ShadowPool.outside if design == "outside" else ShadowPool.around
            networks = max(other.models for other in needing)
            pools[design] = train(data, settings, networks, seed=attack.seed, progress=progress)
        pool = pools[design]
        own = np.searchsorted(rows, attack.queried_rows(data))
        probabilities = asked.answers.probabilities
        answers = Answers(asked.answers.labels[own], None if probabilities is None else probabilities[own])
        fitted = attack.fit(pool, released_by(answers), progress)
        reports.append(attack.report(fitted, replace(asked, answers=answers), pool))
    if len(reports) == 1:
        return reports
    note = f"The target was asked once for all {len(reports)} attacks together."
    return [replace(report, notes=(*report.notes, note)) for report in reports]


def shared_designs(attacks: Sequence[Attack]) -> list[Design]:
    """The design each attack learns from, so that as few pools as possible are trained.

    >>> from quietmax.attacks import LiRA, Threshold
    >>> shared_designs([Threshold(), LiRA()])
    ['around', 'around']
    """
    needed = {attack.designs[0] for attack in attacks if len(attack.designs) == 1}
    if not needed:
        needed = {attack.designs[0] for attack in attacks}
    return [
        next((design for design in attack.designs if design in needed), attack.designs[0])
        for attack in attacks
    ]


@dataclass(frozen=True, eq=False)
class LeakageCurve:
    """Reports of one attack: against the plain model, and against the mechanism at each epsilon per answer."""

    mechanism: str
    plain: AttackReport
    epsilons: tuple[float, ...]
    reports: tuple[AttackReport, ...]

    @property
    def leakages(self) -> tuple[float, ...]:
        """Leakage at each epsilon."""
        return tuple(report.leakage.value for report in self.reports)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "mechanism": self.mechanism,
            "plain": self.plain.to_json(),
            "epsilons": list(self.epsilons),
            "leakages": list(self.leakages),
            "reports": [report.to_json() for report in self.reports],
        }


def leakage_curve(
    model: Model,
    data: Split,
    mechanism: Mechanism,
    epsilons: Sequence[float],
    *,
    attack: Attack,
    pool: ShadowPool | None = None,
    delta: float = 0.0,
    noise: NoiseSource = EXACT,
    progress: Progress | None = None,
) -> LeakageCurve:
    """Attack ``model`` plain and behind ``mechanism`` at each epsilon, every answer at that price, as in the paper.

    The shadow networks and the attack are trained once, on plain answers; each epsilon is a fresh round of queries.
    """
    if not epsilons:
        raise InvalidInput("There is no epsilon to attack at; give at least one.")
    settings = settings_for(model, data, model)
    if pool is not None:
        check_same_split(pool, data)
    plain = attack.ask(model, data)
    chosen = attack.train_pool(data, settings, progress) if pool is None else pool
    fitted: dict[str, Fitted] = {}
    reports = []
    targets = [
        Answerer.prepare(model, mechanism, Budget(epsilon, delta, queries=1), noise=noise)
        for epsilon in epsilons
    ]
    for asked in (plain, *(attack.ask(target, data) for target in targets)):
        released = released_by(asked.answers)
        if released not in fitted:
            fitted[released] = attack.fit(chosen, released, progress)
        reports.append(attack.report(fitted[released], asked, chosen))
    return LeakageCurve(mechanism.name, reports[0], tuple(epsilons), tuple(reports[1:]))
