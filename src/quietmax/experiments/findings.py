"""The paper's five findings restated, each with a verdict from our own numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from scipy.special import ndtr

from quietmax.accounting.budget import Analysis, Budget, per_query
from quietmax.accounting.costs import PureCost
from quietmax.experiments.paper import correlate, reproduce_sensitivity_table
from quietmax.experiments.summary import Summary

Verdict = Literal["confirmed", "not confirmed", "does not apply"]
GAUSSIAN, LAPLACE = "algorithm1-gaussian", "algorithm1-laplace"
_DPSGD = ("published-rdp", "published-zcdp", "published-ac", "published-nc")
# A rise smaller than this is within the scatter of a few repeats.
_RISE = 0.03
_CLOSE = 0.05
_FITTED_LEAKAGE = 0.02


@dataclass(frozen=True)
class Finding:
    """``claim`` is the paper's, in our words; ``evidence`` our numbers."""

    number: int
    claim: str
    verdict: Verdict
    evidence: str

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def findings(summaries: Sequence[Summary], attack: str = "shadow") -> list[Finding]:
    """All five, from whatever data sets were measured."""
    by_set: dict[str, dict[str, list[Summary]]] = {}
    for each in summaries:
        by_set.setdefault(each.dataset, {}).setdefault(each.method, []).append(each)
    return [_first(by_set, attack), _second(by_set), _third(by_set, attack), _fourth(by_set), _fifth()]


BySet = Mapping[str, Mapping[str, Sequence[Summary]]]


def _first(by_set: BySet, attack: str) -> Finding:
    claim = "Leakage under shadow-model attacks grows with overfitting; a model that does not overfit hardly leaks."
    plain = {
        name: found["plain"][0]
        for name, found in by_set.items()
        if "plain" in found and attack in found["plain"][0].leakage
    }
    gaps = {name: each.train_accuracy.value - each.test_accuracy.value for name, each in plain.items()}
    leaks = {name: each.leakage[attack].value for name, each in plain.items()}
    listed = "; ".join(f"{name}: gap {gaps[name]:.3f}, leakage {leaks[name]:.3f}" for name in plain)
    if len(plain) < 3:
        return Finding(1, claim, "does not apply", f"Needs three data sets; measured {len(plain)}. {listed}")
    found = correlate(list(gaps.values()), list(leaks.values()))
    fitted = all(leaks[name] <= _CLOSE for name in plain if gaps[name] <= _CLOSE)
    verdict: Verdict = "confirmed" if found.spearman > 0.5 and fitted else "not confirmed"
    return Finding(
        1, claim, verdict, f"Pearson {found.pearson:.3f}, Spearman {found.spearman:.3f} over {listed}."
    )


def _second(by_set: BySet) -> Finding:
    claim = (
        "Algorithm 1's accuracy loss falls steadily with epsilon, from at most about 0.5; DP-SGD's varies more "
        "and starts higher."
    )
    problems, worst, evidence = [], 0.0, []
    measured = [name for name, found in by_set.items() if GAUSSIAN in found]
    for name in measured:
        for each in (GAUSSIAN, LAPLACE):
            losses = _curve(by_set[name].get(each, ()))
            values = list(losses.values())
            if not values:
                continue
            worst = max(worst, max(values))
            rise = max((later - earlier for earlier, later in pairwise(values)), default=0.0)
            if rise > _RISE:
                problems.append(f"{name}, {each} rises by {rise:.3f}")
    dpsgd = [
        max(_curve(found[each]).values()) for found in by_set.values() for each in _DPSGD if found.get(each)
    ]
    if not measured:
        return Finding(2, claim, "does not apply", "Algorithm 1 was not measured.")
    evidence.append(f"largest loss of Algorithm 1 {worst:.3f} over {', '.join(measured)}")
    if dpsgd:
        evidence.append(f"largest loss of DP-SGD as published {max(dpsgd):.3f}")
    holds = not problems and worst <= 0.55 and (not dpsgd or max(dpsgd) > worst)
    text = (
        "; ".join([*evidence, *problems])
        + ". It is steady because only one of C logits is noised, which is also "
    )
    return Finding(
        2,
        claim,
        "confirmed" if holds else "not confirmed",
        text + "why it is not private (theory, section 2.1).",
    )


def _third(by_set: BySet, attack: str) -> Finding:
    claim = (
        "Where the plain model leaks, Algorithm 1 loses the least accuracy at every epsilon and its leakage stays "
        "close to the bound of its claim."
    )
    leaking = [
        name
        for name, found in by_set.items()
        if GAUSSIAN in found
        and "plain" in found
        and attack in found["plain"][0].leakage
        and found["plain"][0].leakage[attack].value > _FITTED_LEAKAGE
    ]
    if not leaking:
        return Finding(3, claim, "does not apply", "No measured data set leaks more than 0.02.")
    beaten, broken = [], []
    for name in leaking:
        ours = _curve(by_set[name][GAUSSIAN])
        for method in ("head", "dpsgd", "teachers"):
            other = _curve(by_set[name].get(method, ()))
            beaten += [
                f"{method} on {name} at epsilon {epsilon:g} ({other[epsilon]:.3f} against {ours[epsilon]:.3f})"
                for epsilon in other
                if epsilon in ours and other[epsilon] < ours[epsilon]
            ]
        for each in by_set[name][GAUSSIAN]:
            if each.epsilon is not None and attack in each.leakage:
                cap, leakage = gaussian_cap(each.epsilon), each.leakage[attack].value
                if leakage > cap + _CLOSE:
                    broken.append(
                        f"{name} at epsilon {each.epsilon:g}: {leakage:.3f}, its claim permits {cap:.3f}"
                    )
    verdict: Verdict = "not confirmed" if broken or beaten else "confirmed"
    parts = []
    if broken:
        parts.append(f"Leakage above what is claimed: {broken[0]}" + _more(broken))
    if beaten:
        parts.append(f"proven methods that lose less: {beaten[0]}" + _more(beaten))
    return Finding(
        3, claim, verdict, ("; ".join(parts) or "No counter-example on " + ", ".join(leaking)) + "."
    )


def gaussian_cap(mu: float) -> float:
    """The largest TPR - FPR under mu-Gaussian privacy, ``2*Phi(mu/2) - 1``.

    >>> round(gaussian_cap(1.0), 3)
    0.383
    """
    return float(2 * ndtr(mu / 2) - 1)


def _fourth(by_set: BySet) -> Finding:
    claim = (
        "With two classes Laplace and Gaussian noise do alike; with more classes Gaussian noise does better."
    )
    evidence, holds = [], True
    for name, found in by_set.items():
        gaussian, laplace = (_curve(found.get(each, ())) for each in (GAUSSIAN, LAPLACE))
        together = [epsilon for epsilon in gaussian if epsilon in laplace]
        if not together:
            continue
        gaps = [laplace[epsilon] - gaussian[epsilon] for epsilon in together]
        two = found[GAUSSIAN][0].classes == 2
        holds &= max(map(abs, gaps)) <= _CLOSE if two else min(gaps) >= -_CLOSE and max(gaps) > _CLOSE
        evidence.append(
            f"{name} ({found[GAUSSIAN][0].classes} classes): "
            f"Laplace minus Gaussian {min(gaps):+.3f} to {max(gaps):+.3f}"
        )
    if not evidence:
        return Finding(4, claim, "does not apply", "Algorithm 1 was not measured with both noises.")
    evidence.append(f"alike means within {_CLOSE:g}")
    return Finding(4, claim, "confirmed" if holds else "not confirmed", "; ".join(evidence) + ".")


def _fifth() -> Finding:
    claim = (
        "The published sensitivities follow the numbers of classes and records, not the Lipschitz constant."
    )
    rows = {(row.dataset, row.quantity): row.ours for row in reproduce_sensitivity_table()}
    large = sorted({name for name, _ in rows} - {"location", "adult", "purchase-2"})
    logits = [rows[name, "logit"] for name in large]
    rhos = [rows[name, "rho"] for name in large]
    halves = [rows[name, "logit"] / float(np.mean(logits)) for name in ("adult", "purchase-2")]
    tenfold = rows["location", "logit"] / float(np.mean(logits))
    holds = (
        max(logits) / min(logits) < 1.2
        and max(rhos) / min(rhos) > 2
        and all(0.4 < ratio < 0.6 for ratio in halves)
        and 7 < tenfold < 11
    )
    text = (
        f"Among the {len(large)} sets of 10,000 records and ten or more classes rho varies by a factor "
        f"{max(rhos) / min(rhos):.1f}, the bound on a logit by {max(logits) / min(logits):.2f}; two classes give "
        f"{halves[0]:.2f} and {halves[1]:.2f} of it, 1,200 records {tenfold:.1f} times as much. The formulas say so; "
        "that they bound anything is refuted (theory, section 2.3)."
    )
    return Finding(5, claim, "confirmed" if holds else "not confirmed", text)


def _curve(summaries: Sequence[Summary]) -> dict[float, float]:
    """Accuracy loss by epsilon, of the fewest answers where there are several numbers."""
    fewest = min((each.queries or 0 for each in summaries), default=0)
    return {
        each.epsilon: each.accuracy_loss.value
        for each in sorted(summaries, key=lambda one: one.epsilon or 0.0)
        if each.epsilon is not None and (each.queries or 0) == fewest
    }


def _more(entries: Sequence[str]) -> str:
    return f" (and {len(entries) - 1} more)" if len(entries) > 1 else ""


QUERIES = (1, 10, 100, 1_000, 10_000)
TOTALS = (1.0, 10.0)
_READINGS: tuple[tuple[str, Analysis], ...] = (
    ("algorithm1-gaussian", "published"),
    ("algorithm1-gaussian", "published-example"),
    ("algorithm1-laplace", "published"),
)
_UNLIMITED = ("published-rdp", "dpsgd", "head")


@dataclass(frozen=True)
class ManyQueries:
    """Accuracy loss and leakage per answer when ``total`` pays for ``queries`` answers."""

    dataset: str
    method: str
    reading: str
    total: float
    queries: int
    per_answer: float | None
    accuracy_loss: float
    leakage: float | None
    extrapolated: bool

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def multi_query(
    summaries: Sequence[Summary],
    *,
    totals: Sequence[float] = TOTALS,
    queries: Sequence[int] = QUERIES,
    attack: str = "shadow",
) -> list[ManyQueries]:
    """The analysis for every data set whose curves were measured.

    Between measured epsilons curves are read linearly in log epsilon; below the smallest the value there is taken, as
    the paper argues, and ``extrapolated`` says so.
    """
    rows = []
    for name in dict.fromkeys(each.dataset for each in summaries):
        mine = [each for each in summaries if each.dataset == name]
        for total in totals:
            for method, reading in _READINGS:
                curve = [each for each in mine if each.method == method and each.queries == 1]
                for count in queries if curve else ():
                    measure = "pure" if method.endswith("laplace") else "gaussian"
                    cost = per_query(Budget(total, queries=count), measure, reading)  # type: ignore[arg-type]
                    one = cost.epsilon if isinstance(cost, PureCost) else cost.mu
                    rows.append(_row(name, method, reading, total, count, one, curve, attack))
            for method in _UNLIMITED:
                curve = [each for each in mine if each.method == method]
                if curve and any(each.epsilon == total for each in curve):
                    rows += [
                        _row(name, method, "any number", total, count, None, curve, attack)
                        for count in queries
                    ]
    return rows


def _row(
    name: str,
    method: str,
    reading: str,
    total: float,
    count: int,
    one: float | None,
    curve: Sequence[Summary],
    attack: str,
) -> ManyQueries:
    where = total if one is None else one
    points = sorted((each.epsilon, each) for each in curve if each.epsilon is not None)
    epsilons = [epsilon for epsilon, _ in points]
    loss = read_off(where, epsilons, [each.accuracy_loss.value for _, each in points])
    leakage = None
    if all(attack in each.leakage for _, each in points):
        leakage = read_off(where, epsilons, [each.leakage[attack].value for _, each in points])
    return ManyQueries(name, method, reading, total, count, one, loss, leakage, where < epsilons[0])


def read_off(epsilon: float, epsilons: Sequence[float], values: Sequence[float]) -> float:
    """A curve's value, linear in log epsilon, constant beyond its ends.

    >>> read_off(10.0, [1.0, 100.0], [0.5, 0.1])
    0.3
    """
    return float(np.interp(np.log(epsilon), np.log(epsilons), values))
