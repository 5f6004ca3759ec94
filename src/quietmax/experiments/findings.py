"""Our trials against the paper: its numbers compared with ours, its five findings, and many answers from one budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from scipy.special import ndtr

from quietmax.accounting.budget import Analysis, Budget, per_query
from quietmax.accounting.costs import Measure, PureCost
from quietmax.data.registry import is_stand_in
from quietmax.experiments import paper
from quietmax.experiments.methods import method
from quietmax.experiments.paper import Comparison
from quietmax.experiments.summary import Mean, Summary

ACCURACY_TOLERANCE = 0.02
CURVE_TOLERANCE = 0.04

Verdict = Literal["confirmed", "not confirmed", "does not apply"]
_GAUSSIAN, _LAPLACE = "algorithm1-gaussian", "algorithm1-laplace"
_PUBLISHED_DPSGD = ("published-rdp", "published-zcdp", "published-ac", "published-nc")
_SCATTER = 0.03
"""A rise smaller than this is within the variation of a few repeats."""
_CLOSE = 0.05
_SMALL_LEAKAGE = 0.02


def accuracy_comparisons(summaries: Iterable[Summary]) -> list[Comparison]:
    """Compare with the paper's accuracy table: both losses, and the leakage of the plain network.

    Parameters
    ----------
    summaries : iterable of Summary
        Summaries of any methods; those of ``plain`` and ``original`` are compared.

    Returns
    -------
    list of Comparison
        Accuracies agree within `ACCURACY_TOLERANCE`, the leakage within `CURVE_TOLERANCE`.
    """
    rows = []
    for each in summaries:
        printed = paper.accuracy_table().get(each.dataset)
        loss = {"plain": "convexified", "original": "original"}.get(each.method)
        if printed is None or loss is None:
            continue
        for part, mean in (("train", each.train_accuracy), ("test", each.test_accuracy)):
            number = printed[f"{loss}_{part}_acc"]
            rows.append(_compare(each, f"{loss} {part} accuracy", number, mean, ACCURACY_TOLERANCE))
        if loss == "convexified" and "shadow" in each.leakage:
            number, leakage = printed["privacy_leakage"], each.leakage["shadow"]
            rows.append(_compare(each, "leakage, plain network", number, leakage, CURVE_TOLERANCE))
    return rows


def curve_comparisons(summaries: Iterable[Summary]) -> list[Comparison]:
    """Compare with the paper's figures: accuracy loss and leakage of Algorithm 1 and of DP-SGD at every epsilon.

    Parameters
    ----------
    summaries : iterable of Summary
        Summaries of any methods; those with a curve in the paper are compared.

    Returns
    -------
    list of Comparison
        Two numbers agree within `CURVE_TOLERANCE`.
    """
    rows = []
    for each in summaries:
        if each.epsilon is None:
            continue
        for quantity, number, mean in (
            ("accuracy loss", each.paper_accuracy_loss, each.accuracy_loss),
            ("leakage", each.paper_leakage, each.leakage.get("shadow")),
        ):
            if number is not None and mean is not None:
                what = f"{quantity}, {method(each.method).title}, eps {each.epsilon:g}"
                rows.append(_compare(each, what, number, mean, CURVE_TOLERANCE))
    return rows


def _compare(each: Summary, quantity: str, number: float, ours: Mean, tolerance: float) -> Comparison:
    agrees = abs(ours.value - number) <= tolerance
    return Comparison(each.dataset, quantity, number, ours.value, agrees, spread=ours.spread)


@dataclass(frozen=True)
class Finding:
    """One of the paper's five findings.

    Parameters
    ----------
    number : int
        1 to 5.
    claim : str
        The paper's claim in our words.
    verdict : str
        "confirmed", "not confirmed" or "does not apply".
    evidence : str
        Our numbers.
    """

    number: int
    claim: str
    verdict: Verdict
    evidence: str

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)


ByDataset = Mapping[str, Mapping[str, Sequence[Summary]]]


def findings(summaries: Sequence[Summary], attack: str = "shadow") -> list[Finding]:
    """Judge the paper's five findings from our own numbers.

    Parameters
    ----------
    summaries : sequence of Summary
        Summaries of any data sets and methods; those of stand-ins do not count.
    attack : str
        Name of the attack whose leakage counts.

    Returns
    -------
    list of Finding
        All five.
    """
    by_dataset: dict[str, dict[str, list[Summary]]] = {}
    for each in summaries:
        if is_stand_in(each.dataset):
            continue
        by_dataset.setdefault(each.dataset, {}).setdefault(each.method, []).append(each)
    return [
        _leakage_follows_overfitting(by_dataset, attack),
        _loss_falls_steadily(by_dataset),
        _algorithm1_loses_least(by_dataset, attack),
        _gaussian_beats_laplace(by_dataset),
        _sensitivity_follows_classes_and_records(),
    ]


def _leakage_follows_overfitting(by_dataset: ByDataset, attack: str) -> Finding:
    claim = "Leakage under shadow-model attacks grows with overfitting; a model that does not overfit hardly leaks."
    plain = {
        name: found["plain"][0]
        for name, found in by_dataset.items()
        if "plain" in found and attack in found["plain"][0].leakage
    }
    gaps = {name: each.train_accuracy.value - each.test_accuracy.value for name, each in plain.items()}
    leaks = {name: each.leakage[attack].value for name, each in plain.items()}
    numbers = "; ".join(f"{name}: gap {gaps[name]:.3f}, leakage {leaks[name]:.3f}" for name in plain)
    if len(plain) < 3:
        evidence = f"Needs three data sets; {len(plain)} measured. {numbers}"
        return Finding(1, claim, "does not apply", evidence)
    found = paper.correlate(list(gaps.values()), list(leaks.values()))
    fitted = all(leaks[name] <= _CLOSE for name in plain if gaps[name] <= _CLOSE)
    evidence = f"Pearson {found.pearson:.3f}, Spearman {found.spearman:.3f} over {numbers}."
    return Finding(1, claim, _verdict(found.spearman > 0.5 and fitted), evidence)


def _loss_falls_steadily(by_dataset: ByDataset) -> Finding:
    claim = (
        "Algorithm 1's accuracy loss falls steadily with epsilon, from at most about 0.5; DP-SGD's varies more "
        "and starts higher."
    )
    measured = [name for name, found in by_dataset.items() if _GAUSSIAN in found]
    if not measured:
        return Finding(2, claim, "does not apply", "Algorithm 1 was not measured.")
    curves = {
        f"{name}, {each}": list(_losses(by_dataset[name][each]).values())
        for name in measured
        for each in (_GAUSSIAN, _LAPLACE)
        if by_dataset[name].get(each)
    }
    largest = max(max(values) for values in curves.values())
    rises = {
        name: max((later - earlier for earlier, later in pairwise(values)), default=0.0)
        for name, values in curves.items()
    }
    problems = [f"{name} rises by {rise:.3f}" for name, rise in rises.items() if rise > _SCATTER]
    dpsgd = [
        max(_losses(found[each]).values())
        for found in by_dataset.values()
        for each in _PUBLISHED_DPSGD
        if found.get(each)
    ]
    evidence = [f"largest loss of Algorithm 1 {largest:.3f} over {', '.join(measured)}"]
    if dpsgd:
        evidence.append(f"largest loss of DP-SGD as published {max(dpsgd):.3f}")
    holds = not problems and largest <= 0.55 and (not dpsgd or max(dpsgd) > largest)
    text = (
        "; ".join([*evidence, *problems])
        + ". It is steady because only one of C logits is noised, which is also why it is not private (theory, "
        "section 2.1)."
    )
    return Finding(2, claim, _verdict(holds), text)


def _algorithm1_loses_least(by_dataset: ByDataset, attack: str) -> Finding:
    claim = (
        "Where the plain model leaks, Algorithm 1 loses the least accuracy at every epsilon and its leakage stays "
        "close to the bound of its claim."
    )
    leaking = [
        name
        for name, found in by_dataset.items()
        if _GAUSSIAN in found
        and "plain" in found
        and attack in found["plain"][0].leakage
        and found["plain"][0].leakage[attack].value > _SMALL_LEAKAGE
    ]
    if not leaking:
        return Finding(3, claim, "does not apply", "No measured data set leaks more than 0.02.")
    broken = [text for name in leaking for text in _above_claim(name, by_dataset[name][_GAUSSIAN], attack)]
    beaten = [text for name in leaking for text in _losing_less(name, by_dataset[name])]
    parts = []
    if broken:
        parts.append(f"Leakage above what is claimed: {broken[0]}" + _and_more(broken))
    if beaten:
        parts.append(f"proven methods that lose less: {beaten[0]}" + _and_more(beaten))
    evidence = "; ".join(parts) or "No counter-example on " + ", ".join(leaking)
    return Finding(3, claim, _verdict(not parts), f"{evidence}.")


def _above_claim(name: str, algorithm1: Sequence[Summary], attack: str) -> list[str]:
    """The epsilons at which Algorithm 1 leaks more than mu-Gaussian privacy permits."""
    texts = []
    for each in algorithm1:
        if each.epsilon is not None and attack in each.leakage:
            # The largest TPR - FPR under mu-Gaussian privacy is 2 Phi(mu/2) - 1.
            permitted, leakage = float(2 * ndtr(each.epsilon / 2) - 1), each.leakage[attack].value
            if leakage > permitted + _CLOSE:
                texts.append(
                    f"{name} at epsilon {each.epsilon:g}: {leakage:.3f}, its claim permits {permitted:.3f}"
                )
    return texts


def _losing_less(name: str, found: Mapping[str, Sequence[Summary]]) -> list[str]:
    """The epsilons at which a proven method loses less accuracy than Algorithm 1."""
    ours = _losses(found[_GAUSSIAN])
    return [
        f"{other} on {name} at epsilon {epsilon:g} ({loss:.3f} against {ours[epsilon]:.3f})"
        for other in ("head", "dpsgd", "teachers")
        for epsilon, loss in _losses(found.get(other, ())).items()
        if epsilon in ours and loss < ours[epsilon]
    ]


def _gaussian_beats_laplace(by_dataset: ByDataset) -> Finding:
    claim = (
        "With two classes Laplace and Gaussian noise do alike; with more classes Gaussian noise does better."
    )
    evidence, holds = [], True
    for name, found in by_dataset.items():
        gaussian, laplace = (_losses(found.get(each, ())) for each in (_GAUSSIAN, _LAPLACE))
        gaps = [laplace[epsilon] - loss for epsilon, loss in gaussian.items() if epsilon in laplace]
        if not gaps:
            continue
        classes = found[_GAUSSIAN][0].classes
        if classes == 2:
            holds &= max(map(abs, gaps)) <= _CLOSE
        else:
            holds &= min(gaps) >= -_CLOSE and max(gaps) > _CLOSE
        evidence.append(
            f"{name} ({classes} classes): Laplace minus Gaussian {min(gaps):+.3f} to {max(gaps):+.3f}"
        )
    if not evidence:
        return Finding(4, claim, "does not apply", "Algorithm 1 was not measured with both noises.")
    evidence.append(f"alike means within {_CLOSE:g}")
    return Finding(4, claim, _verdict(holds), "; ".join(evidence) + ".")


def _sensitivity_follows_classes_and_records() -> Finding:
    claim = (
        "The published sensitivities follow the numbers of classes and records, not the Lipschitz constant."
    )
    rows = {(row.dataset, row.quantity): row.ours for row in paper.reproduce_sensitivity_table()}
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
    evidence = (
        f"Among the {len(large)} sets of 10,000 records and ten or more classes rho varies by a factor "
        f"{max(rhos) / min(rhos):.1f}, the bound on a logit by {max(logits) / min(logits):.2f}; two classes give "
        f"{halves[0]:.2f} and {halves[1]:.2f} of it, 1,200 records {tenfold:.1f} times as much. This follows from the "
        "formulas; that they bound anything is refuted (theory, section 2.3)."
    )
    return Finding(5, claim, _verdict(holds), evidence)


def _losses(summaries: Sequence[Summary]) -> dict[float, float]:
    """Accuracy loss by epsilon, for the smallest number of answers."""
    fewest = min((each.queries or 0 for each in summaries), default=0)
    return {
        each.epsilon: each.accuracy_loss.value
        for each in sorted(summaries, key=lambda one: one.epsilon or 0.0)
        if each.epsilon is not None and (each.queries or 0) == fewest
    }


def _verdict(holds: bool) -> Verdict:
    return "confirmed" if holds else "not confirmed"


def _and_more(entries: Sequence[str]) -> str:
    return f" (and {len(entries) - 1} more)" if len(entries) > 1 else ""


QUERIES = (1, 10, 100, 1_000, 10_000)
TOTALS = (1.0, 10.0)
_CHARGED_METHODS: tuple[tuple[str, Analysis], ...] = (
    (_GAUSSIAN, "published"),
    (_GAUSSIAN, "published-example"),
    (_LAPLACE, "published"),
)
_UNLIMITED_METHODS = ("published-rdp", "dpsgd", "head")


@dataclass(frozen=True)
class MultiQuery:
    """Accuracy loss and leakage when one total epsilon pays for many answers.

    Parameters
    ----------
    dataset, method : str
        Data set and method.
    analysis : str
        How the total is divided: "published" (the paper's composition theorem), "published-example" (its worked
        example), or "any number" for methods that do not charge for answers.
    total : float
        The total epsilon.
    queries : int
        Number of answers.
    per_answer : float or None
        Epsilon of one answer.
    accuracy_loss : float
        Accuracy loss at that epsilon.
    leakage : float or None
        Leakage at that epsilon.
    extrapolated : bool
        Whether that epsilon is below the smallest measured one, where the value at the smallest is used.
    """

    dataset: str
    method: str
    analysis: str
    total: float
    queries: int
    per_answer: float | None
    accuracy_loss: float
    leakage: float | None
    extrapolated: bool

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)


def multi_query(
    summaries: Sequence[Summary],
    *,
    totals: Sequence[float] = TOTALS,
    queries: Sequence[int] = QUERIES,
    attack: str = "shadow",
) -> list[MultiQuery]:
    """Read many answers off the measured curves for one answer, as the paper does.

    Between measured epsilons curves are linear in log epsilon. Below the smallest the value there is used, as the paper
    argues; ``extrapolated`` says so.

    Parameters
    ----------
    summaries : sequence of Summary
        Summaries of any data sets and methods.
    totals : sequence of float
        Total epsilons.
    queries : sequence of int
        Numbers of answers.
    attack : str
        Name of the attack whose leakage counts.

    Returns
    -------
    list of MultiQuery
    """
    rows = []
    for name in dict.fromkeys(each.dataset for each in summaries):
        curves: dict[str, list[Summary]] = {}
        for each in summaries:
            if each.dataset == name and each.epsilon is not None:
                curves.setdefault(each.method, []).append(each)
        for total in totals:
            for method_name, analysis in _CHARGED_METHODS:
                curve = [each for each in curves.get(method_name, ()) if each.queries == 1]
                for count in queries if curve else ():
                    one = _epsilon_per_answer(method_name, analysis, total, count)
                    rows.append(_multi_query(curve, analysis, total, count, one, attack))
            for method_name in _UNLIMITED_METHODS:
                curve = curves.get(method_name, [])
                if any(each.epsilon == total for each in curve):
                    rows += [
                        _multi_query(curve, "any number", total, count, None, attack) for count in queries
                    ]
    return rows


def _epsilon_per_answer(method_name: str, analysis: Analysis, total: float, queries: int) -> float:
    measure: Measure = "pure" if method_name == _LAPLACE else "gaussian"
    cost = per_query(Budget(total, queries=queries), measure, analysis)
    return cost.epsilon if isinstance(cost, PureCost) else cost.mu


def _multi_query(
    curve: Sequence[Summary], analysis: str, total: float, queries: int, per_answer: float | None, attack: str
) -> MultiQuery:
    epsilon = total if per_answer is None else per_answer
    points = {
        each.epsilon: each for each in sorted(curve, key=lambda one: one.epsilon or 0.0) if each.epsilon
    }
    losses = {at: each.accuracy_loss.value for at, each in points.items()}
    leakage = None
    if all(attack in each.leakage for each in points.values()):
        leakage = interpolate({at: each.leakage[attack].value for at, each in points.items()}, epsilon)
    return MultiQuery(
        curve[0].dataset,
        curve[0].method,
        analysis,
        total,
        queries,
        per_answer,
        interpolate(losses, epsilon),
        leakage,
        epsilon < min(points),
    )


def interpolate(curve: Mapping[float, float], epsilon: float) -> float:
    """Read a curve at an epsilon: linear in log epsilon, constant beyond its ends.

    Parameters
    ----------
    curve : mapping of float to float
        Epsilon -> value, by increasing epsilon.
    epsilon : float
        Where to read.

    Returns
    -------
    float

    Examples
    --------
    >>> interpolate({1.0: 0.5, 100.0: 0.1}, 10.0)
    0.3
    """
    return float(np.interp(np.log(epsilon), np.log(list(curve)), list(curve.values())))
