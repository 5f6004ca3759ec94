"""How leakage grows with epsilon: one attack, fitted once, against a mechanism at many prices per answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quietmax.attacks.asking import NoisyModel
from quietmax.attacks.attack import Attack, Fitted, check_same_split, settings_for
from quietmax.attacks.report import AttackReport
from quietmax.attacks.shadow_pool import Progress, ShadowPool
from quietmax.attacks.statistics import released_by
from quietmax.data import Split
from quietmax.errors import InvalidInput
from quietmax.mechanisms import Mechanism
from quietmax.models import Model
from quietmax.noise import EXACT, NoiseSource


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
    targets = [NoisyModel.at(model, mechanism, epsilon, delta=delta, noise=noise) for epsilon in epsilons]
    for asked in (plain, *(attack.ask(target, data) for target in targets)):
        released = released_by(asked.answers)
        if released not in fitted:
            fitted[released] = attack.fit(chosen, released, progress)
        reports.append(attack.report(fitted[released], asked, chosen))
    return LeakageCurve(mechanism.name, reports[0], tuple(epsilons), tuple(reports[1:]))
