"""The interface of an attack, and the functions that run attacks.

An attack learns from shadow networks and then scores a target's answers to the candidates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np

from quietmax._ray import RayEngine
from quietmax.accounting.costs import Budget
from quietmax.attacks.metrics import AttackReport, Floats, Released, released_by
from quietmax.attacks.shadow_models import (
    Design,
    Rows,
    ShadowPool,
    _disjoint_set_size,
    candidate_rows,
    check_nonmembers,
)
from quietmax.attacks.targets import QueryResult, Target, query_target
from quietmax.data.records import Split
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import Answerer, Answers, Mechanism
from quietmax.models.stacked import Progress, TrainingSettings
from quietmax.models.training import Model
from quietmax.noise.sources import EXACT, NoiseSource


@dataclass(frozen=True, eq=False)
class FittedAttack:
    """An attack that has learned from shadow networks and can score the answers of any target.

    Parameters
    ----------
    scores : callable
        Scores every candidate from the target's answers to `Attack.queried_rows`. Larger for likelier members; all
        scores are finite.
    threshold : float
        The threshold with the largest TPR - FPR on the shadow networks.
    notes : tuple of str
        What a reader of the report has to know.
    decision : float or None
        A record is called a member if its score is above this. None: above ``threshold``.
    """

    scores: Callable[[Answers], Floats]
    threshold: float
    notes: tuple[str, ...] = ()
    decision: float | None = None


@dataclass(frozen=True)
class Attack(ABC):
    """A membership-inference attack.

    A subclass is a frozen dataclass with a ``name`` and `fit`, and with ``designs`` if it cannot learn from every
    pool, and ``least_models`` if one shadow network is too few.

    Parameters
    ----------
    models : int
        Number of shadow networks.
    seed : int
        Determines everything random in the attack.
    """

    models: int = 20
    seed: int = 0
    least_models: ClassVar[int] = 1

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in reports; every variant has its own. A registered attack has its registered name."""

    @property
    def designs(self) -> tuple[Design, ...]:
        """The designs of shadow pools that the attack can learn from, the preferred one first."""
        return ("disjoint", "overlapping")

    def _designs_for(self, data: Split) -> tuple[Design, ...]:
        """Return the designs that ``data`` permits: without a pool no disjoint one, unless there is no other."""
        if len(data.pool_rows):
            return self.designs
        return tuple(design for design in self.designs if design != "disjoint") or self.designs

    @abstractmethod
    def fit(self, pool: ShadowPool, released: Released, progress: Progress | None = None) -> FittedAttack:
        """Learn from shadow networks.

        Parameters
        ----------
        pool : ShadowPool
            The shadow networks.
        released : {"probabilities", "labels"}
            What the target releases.
        progress : callable or None
            Called with (done, total).

        Returns
        -------
        FittedAttack
            The attack, ready to score answers.
        """

    def queried_rows(self, data: Split) -> Rows:
        """Return the records of ``data`` to query: the candidates, members first, then others the attack needs."""
        return candidate_rows(data)

    def query(self, target: Target, data: Split) -> QueryResult:
        """Query ``target`` for the records of ``data`` that this attack needs."""
        return query_target(target, data.records.features[self.queried_rows(data)], data.classes)

    def run(
        self,
        model: Model | TrainingSettings,
        data: Split,
        *,
        target: Target = None,
        pool: ShadowPool | None = None,
        engine: RayEngine | None = None,
        progress: Progress | None = None,
    ) -> AttackReport:
        """Run the attack. The target is queried once per record, before anything is trained.

        Parameters
        ----------
        model : Model or TrainingSettings
            The model to attack, trained on the training part of ``data``; shadow networks are trained with its
            settings. With a ``target``, training settings are enough.
        data : Split
            The split that the model was trained on.
        target : optional
            What is queried instead of the model: a classifier, `Predictor`, `Answerer`, fitted estimator, private
            model, `Endpoint`, URL, or function of features.
        pool : ShadowPool or None
            Shadow networks trained before; None trains them.
        engine : RayEngine or None
            Trains the shadow networks on a Ray cluster. They are the same, bit for bit.
        progress : callable or None
            Called with (done, total).

        Returns
        -------
        AttackReport
            How well members were told from non-members.
        """
        (report,) = run_together(
            [self], model, data, target=target, pool=pool, engine=engine, progress=progress
        )
        return report

    def report(self, fitted: FittedAttack, result: QueryResult, pool: ShadowPool) -> AttackReport:
        """Score the target's answers and compute the report. A person's score is the mean over their rows."""
        units = pool.units(candidate_rows(pool.data))
        scores = units.means(np.asarray(fitted.scores(result.answers), dtype=np.float64))
        members = len(pool.units(pool.data.train_rows))
        return AttackReport._from_scores(
            attack=self.name,
            target=result.target,
            released=released_by(result.answers),
            member_scores=scores[:members],
            nonmember_scores=scores[members:],
            decision=fitted.threshold if fitted.decision is None else fitted.decision,
            threshold=fitted.threshold,
            queries=result.queries,
            spent=result.spent,
            settings=self._described(pool),
            notes=(*pool.notes, *fitted.notes),
            unit=pool.data.records.unit,
        )

    def check_pool(self, pool: ShadowPool) -> None:
        """Raise `InvalidInput` if the attack cannot learn from the design of ``pool``."""
        designs = self._designs_for(pool.data)
        if pool.design not in designs:
            raise InvalidInput(
                f"The attack '{self.name}' requires a shadow pool of design {' or '.join(designs)}, got {pool.design}."
            )

    def _described(self, pool: ShadowPool) -> dict[str, Any]:
        """The settings of the attack and of its pool, for reports."""
        return {**asdict(self), "models": pool.networks, "pool": pool.design}


def run_together(
    attacks: Sequence[Attack],
    model: Model | TrainingSettings,
    data: Split,
    *,
    target: Target = None,
    pool: ShadowPool | None = None,
    engine: RayEngine | None = None,
    progress: Progress | None = None,
) -> list[AttackReport]:
    """Run several attacks that share the target's answers and the shadow networks.

    The target is queried once; every report states the queries of all attacks together.
    """
    if not attacks:
        raise InvalidInput("run_together requires at least one attack, got none.")
    settings = _checked(model, data, target, pool)
    pools: dict[Design, ShadowPool] = {}
    if pool is None:
        designs = shared_designs(attacks, data)
        if "disjoint" in designs:
            _disjoint_set_size(data)  # an error before the target is charged
    else:
        for attack in attacks:
            attack.check_pool(pool)
        designs, pools = [pool.design] * len(attacks), {pool.design: pool}
    queried = [attack.queried_rows(data) for attack in attacks]
    rows = queried[0] if len(attacks) == 1 else np.unique(np.concatenate(queried))
    result = query_target(model if target is None else target, data.records.features[rows], data.classes)
    reports = []
    for attack, design, own in zip(attacks, designs, queried, strict=True):
        if design not in pools:
            networks = max(other.models for other in attacks if design in other._designs_for(data))
            pools[design] = ShadowPool.train(
                design, data, settings, networks, seed=attack.seed, engine=engine, progress=progress
            )
        answers = result.answers
        if len(attacks) > 1:
            answers = selected_answers(answers, np.searchsorted(rows, own))
        fitted = attack.fit(pools[design], released_by(answers), progress)
        reports.append(attack.report(fitted, replace(result, answers=answers), pools[design]))
    if len(reports) == 1:
        return reports
    note = f"The target was queried once for all {len(reports)} attacks together."
    return [replace(report, notes=(*report.notes, note)) for report in reports]


def shared_designs(attacks: Sequence[Attack], data: Split) -> list[Design]:
    """Choose a design that the data permit for each attack, so that as few pools as possible are trained."""
    possible = [attack._designs_for(data) for attack in attacks]
    needed = {designs[0] for designs in possible if len(designs) == 1} or {designs[0] for designs in possible}
    return [next((design for design in designs if design in needed), designs[0]) for designs in possible]


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
) -> dict[float | None, AttackReport]:
    """Attack a model without noise and behind a mechanism at several epsilons, as in the paper's figures.

    The shadow networks and the attack are trained once, on answers without noise. Each epsilon is a new round of
    queries, and every answer costs that epsilon.

    Parameters
    ----------
    model, data, pool, progress
        As in `Attack.run`.
    mechanism : Mechanism
        A mechanism with open parameters.
    epsilons : sequence of float
        Epsilon of each answer, at least one.
    attack : Attack
        The attack.
    delta : float
        Delta of each answer.
    noise : NoiseSource
        Where the mechanism draws its noise from.

    Returns
    -------
    dict
        A report for each epsilon; at None, that against the model without noise.
    """
    if not epsilons:
        raise InvalidInput("epsilons must contain at least one number, got none.")
    settings = _checked(model, data, model, pool)
    found: dict[float | None, QueryResult] = {None: attack.query(model, data)}
    chosen = pool or ShadowPool.train(
        attack._designs_for(data)[0], data, settings, attack.models, seed=attack.seed, progress=progress
    )
    for epsilon in epsilons:
        target = Answerer.prepare(model, mechanism, Budget(epsilon, delta, queries=1), noise=noise)
        found[epsilon] = attack.query(target, data)
    fit = cache(lambda released: attack.fit(chosen, released, progress))
    return {
        epsilon: attack.report(fit(released_by(result.answers)), result, chosen)
        for epsilon, result in found.items()
    }


def _checked(
    model: Model | TrainingSettings, data: Split, target: Target, pool: ShadowPool | None = None
) -> TrainingSettings:
    """Check that the model, the data and the pool fit together, and return the settings for shadow networks."""
    check_nonmembers(data)
    # The networks of a pool with other candidates may have been trained on other members.
    if pool is not None and not (
        len(pool.data.records) == len(data.records)
        and np.array_equal(candidate_rows(pool.data), candidate_rows(data))
    ):
        raise InvalidInput("The shadow pool was trained for another split of the records.")
    if isinstance(model, TrainingSettings):
        if target is None:
            raise InvalidInput("target is required if model is TrainingSettings.")
        return model
    if not isinstance(model, Model):
        raise InvalidInput(
            f"model must be a quietmax Model or TrainingSettings, got {type(model).__name__}. Anything else that can "
            "be queried is passed as target."
        )
    width = data.records.features.shape[1]
    if (model.features, model.classes, model.records) != (width, data.classes, len(data.train_rows)):
        raise InvalidInput(
            f"The model was trained on other data: {model.records} records, {model.features} features and "
            f"{model.classes} classes; the training part has {len(data.train_rows)}, {width} and {data.classes}."
        )
    return model.settings


def selected_answers(answers: Answers, rows: Rows) -> Answers:
    """Return the answers to some of the queries."""
    probabilities = answers.probabilities
    return Answers(answers.labels[rows], None if probabilities is None else probabilities[rows])
