"""What every attack is: it learns from shadow networks, then scores a target's answers to the candidates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from quietmax.attacks.asking import Asked, Target, ask
from quietmax.attacks.rates import Floats
from quietmax.attacks.report import AttackReport, summarise
from quietmax.attacks.shadow_pool import Design, Progress, Rows, ShadowPool, candidate_rows, set_size
from quietmax.attacks.statistics import Released, released_by
from quietmax.data import Split
from quietmax.errors import InvalidInput
from quietmax.mechanisms import Answers
from quietmax.models import Model, TrainingSettings


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

        ``target`` is asked in place of the model: see `quietmax.attacks.asking.ask` for what it may be; then training
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

    def ask(self, target: Target, data: Split) -> Asked:
        """Put this attack's queries to a target."""
        rows = self.queried_rows(data)
        return ask(target, data.records.features[rows], data.classes)

    def report(self, fitted: Fitted, asked: Asked, pool: ShadowPool) -> AttackReport:
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
