"""Several attacks on one target: shadow networks trained once per design, the target asked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quietmax.attacks.asking import Target, ask
from quietmax.attacks.attack import Attack, settings_for
from quietmax.attacks.report import AttackReport
from quietmax.attacks.shadow_pool import Design, Progress, ShadowPool, set_size
from quietmax.attacks.statistics import released_by
from quietmax.data import Split
from quietmax.errors import InvalidInput
from quietmax.mechanisms import Answers
from quietmax.models import Model, TrainingSettings


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
