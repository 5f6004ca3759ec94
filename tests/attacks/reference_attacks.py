"""LiRA and RMIA written a second time, in plain loops over records and networks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.stats import norm

from quietmax.attacks import ShadowPool
from quietmax.attacks.shadow_models import Rows
from quietmax.data import Split
from quietmax.models import Model
from quietmax.models.stacked import MLP

Pair = Sequence[float]
"""The probability of a record's true class, and of all other classes together."""
View = tuple[Sequence[Pair], Sequence[Sequence[Pair]], Sequence[Sequence[bool]]]
"""The target's pairs, every network's pairs, and which network trained on which record."""


def view_of(model: Model, data: Split, pool: ShadowPool, rows: Rows) -> View:
    """What the adversary sees of some records."""
    inside = pool.inside[:, rows].tolist()
    return _pairs([model.network], data, rows)[0], _pairs(pool.each(), data, rows), inside


def _pairs(networks: Iterable[MLP], data: Split, rows: Rows) -> list[list[Pair]]:
    records = data.records
    return [
        [_pair(network, records.features[row], int(records.labels[row])) for row in rows]
        for network in networks
    ]


def _pair(network: MLP, features: np.ndarray, label: int) -> Pair:
    logits = network.logits(features[None]).double()[0].tolist()
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return weights[label] / sum(weights), (sum(weights) - weights[label]) / sum(weights)


def lira_scores(view: View, *, online: bool, fixed: bool) -> list[float]:
    """Scores of LiRA for every record."""
    target, networks, inside = view
    records = range(len(target))

    def scaled(pair: Pair) -> float:
        own, others = pair
        return math.log(own) - math.log(others)

    groups = {
        member: [
            [scaled(net[i]) for net, seen in zip(networks, inside, strict=True) if seen[i] == member]
            for i in records
        ]
        for member in (True, False)
    }

    def spread(member: bool, i: int) -> float:
        if not fixed:
            return math.sqrt(np.var(groups[member][i], ddof=1))
        squares = sum(sum((v - np.mean(group)) ** 2 for v in group) for group in groups[member])
        return math.sqrt(squares / sum(len(group) - 1 for group in groups[member]))

    fixed_spread = {member: spread(member, 0) for member in (True, False) if fixed and groups[member][0]}
    scores = []
    for i in records:
        value = scaled(target[i])
        sds = {
            member: fixed_spread[member] if fixed else spread(member, i)
            for member in (True, False)
            if groups[member][i]
        }
        if online:
            inner = norm.logpdf(value, np.mean(groups[True][i]), sds[True])
            scores.append(inner - norm.logpdf(value, np.mean(groups[False][i]), sds[False]))
        else:
            scores.append((value - np.mean(groups[False][i])) / sds[False])
    return scores


def rmia_scores(view: View, candidates: int, *, gamma: float, offset: float | None) -> list[float]:
    """Scores of RMIA by the pairwise definition: for every x, count the z with LR(x, z) >= gamma."""
    target, networks, inside = view

    def normaliser(i: int) -> float:
        outs = [net[i][0] for net, seen in zip(networks, inside, strict=True) if not seen[i]]
        ins = [net[i][0] for net, seen in zip(networks, inside, strict=True) if seen[i]]
        if offset is not None:
            return float(((1 + offset) * np.mean(outs) + 1 - offset) / 2)
        return float((np.mean(ins) + np.mean(outs)) / 2 if ins else np.mean(outs))

    ratios = [target[i][0] / normaliser(i) for i in range(len(target))]
    population = ratios[candidates:]
    return [sum(x / z >= gamma for z in population) / len(population) for x in ratios[:candidates]]
