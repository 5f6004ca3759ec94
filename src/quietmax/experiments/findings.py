"""Our trials against the paper: its numbers compared with ours, its five findings, and many answers from one budget."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from scipy.special import ndtr

from quietmax.accounting.costs import Analysis, Budget, Measure, PureCost, per_query
from quietmax.errors import counted
from quietmax.experiments import paper
from quietmax.experiments.methods import method
from quietmax.experiments.paper import Comparison
from quietmax.experiments.summary import Mean, Summary

ACCURACY_TOLERANCE = 0.02
CURVE_TOLERANCE = 0.04

Verdict = Literal["confirmed", "not confirmed", "undecided", "does not apply"]
_GAUSSIAN, _LAPLACE = "algorithm1-gaussian", "algorithm1-laplace"
_PUBLISHED_DPSGD = ("published-rdp", "published-zcdp", "published-ac", "published-nc")
_PROVEN = ("head", "dpsgd", "teachers")
_SCATTER = 0.03
"""A smaller rise does not contradict that a curve falls steadily."""
_CLOSE = 0.05
_ALIKE = 0.1
"""The paper calls curves close that differ by up to 0.088."""
_ABOUT_HALF = 0.55
_SMALL_LEAKAGE = 0.02


def accuracy_comparisons(summaries: Iterable[Summary]) -> list[Comparison]:
    """Compare with the paper's accuracy table: accuracies and gap with both losses, leakage and OARO stability."""
    rows = []
    for each in summaries:
        printed = paper.accuracy_table().get(each.dataset)
        loss = {"plain": "convexified", "original": "original"}.get(each.method)
        if printed is None or loss is None:
            continue
        for part, mean in (("train", each.train_accuracy), ("test", each.test_accuracy)):
            number = printed[f"{loss}_{part}_acc"]
            rows.append(_compare(each, f"{loss} {part} accuracy", number, mean, ACCURACY_TOLERANCE))
        gap = _difference(each.train_accuracy, each.test_accuracy)
        rows.append(_compare(each, f"{loss} gap", printed[f"{loss}_gap"], gap, ACCURACY_TOLERANCE))
        if loss == "convexified":
            if "shadow" in each.leakage:
                number, leakage = printed["privacy_leakage"], each.leakage["shadow"]
                rows.append(_compare(each, "leakage, plain network", number, leakage, CURVE_TOLERANCE))
            rows += [
                row for row in paper.reproduce_sensitivity_table([each.dataset]) if row.quantity == "oaro"
            ]
    return rows


def stability_points(summaries: Iterable[Summary]) -> dict[str, dict[str, float]]:
    """Return what the paper's stability figure shows, from our networks: stability, gap and leakage."""
    return {
        each.dataset: {
            "oaro_stability": paper.accuracy_table()[each.dataset]["oaro_stability"],
            "convexified_gap": each.train_accuracy.value - each.test_accuracy.value,
            "privacy_leakage": each.leakage["shadow"].value,
        }
        for each in summaries
        if each.method == "plain" and each.dataset in paper.accuracy_table() and "shadow" in each.leakage
    }


def own_correlations(summaries: Iterable[Summary]) -> list[Comparison]:
    """Compare the paper's correlations with those of our own networks."""
    points = stability_points(summaries)
    if len(points) < 3:
        return []
    rows = []
    for pair, computed in paper.correlations(list(points.values())).items():
        printed = paper.correlation_table()[pair]
        for name in ("pearson", "spearman", "kendall"):
            ours, p_value = getattr(computed, name), getattr(computed, f"{name}_p")
            if name == "spearman":
                p_value = paper.spearman_p(
                    *([point[column] for point in points.values()] for column in paper.CORRELATED[pair])
                )
            agrees = ours * printed[name] > 0 and (p_value < 0.05 or printed[f"{name}_p"] >= 0.05)
            note = f"p = {p_value:.3f} with {len(points)} data sets, the paper's with 9"
            rows.append(Comparison(pair, name, printed[name], ours, agrees, note))
    return rows


@dataclass(frozen=True)
class Leakage:
    """The leakage of one method at one epsilon: the paper's number, ours, and what any correct attack reaches."""

    dataset: str  # Data set and method
    method: str
    epsilon: float | None  # None for the plain network
    paper: float  # The paper's leakage
    ours: Mean  # Ours
    gap: float

    @property
    def verdict(self) -> str:
        """Whether the two agree, and if not, which attack found more, with the gap as the judge."""
        if abs(self.ours.value - self.paper) <= CURVE_TOLERANCE:
            return "agrees"
        if self.ours.value > self.paper:
            return "differs: our attack finds more" + (
                "; the paper's finds less than the gap" if self.paper < self.gap - CURVE_TOLERANCE else ""
            )
        return "differs: our attack finds less" + (
            " than the gap" if self.ours.value < self.gap - CURVE_TOLERANCE else ", but reaches the gap"
        )

    def to_json(self) -> dict[str, Any]:
        """Return all fields and the verdict."""
        return asdict(self) | {"verdict": self.verdict}


def leakages(summaries: Iterable[Summary], attack: str = "shadow") -> list[Leakage]:
    """Compare the leakage of every method of the paper's figures with the paper's."""
    return [
        Leakage(
            each.dataset,
            each.method,
            each.epsilon,
            each.paper_leakage,
            each.leakage[attack],
            each.train_accuracy.value - each.test_accuracy.value,
        )
        for each in summaries
        if each.paper_leakage is not None and attack in each.leakage
    ]


def curve_comparisons(summaries: Iterable[Summary]) -> list[Comparison]:
    """Compare with the paper's figures: accuracy loss and leakage of Algorithm 1 and of DP-SGD at every epsilon."""
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
        "confirmed", "not confirmed", "undecided" or "does not apply". A finding is undecided if it holds or fails
        only within the 95% intervals of the numbers.
    evidence : str
        Our numbers, with the numbers of repeats.
    """

    number: int
    claim: str
    verdict: Verdict
    evidence: str

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)


ByDataset = Mapping[str, Mapping[str, Sequence[Summary]]]
Decision = bool | None
"""Whether a statement holds; None if the intervals leave it open."""


def findings(summaries: Sequence[Summary], attack: str = "shadow") -> list[Finding]:
    """Judge the paper's five findings from our own numbers."""
    by_dataset: dict[str, dict[str, list[Summary]]] = {}
    for each in summaries:
        if each.dataset in paper.accuracy_table():
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
    leaks = {name: each.leakage[attack] for name, each in plain.items()}
    numbers = "; ".join(
        f"{name} ({_repeats([plain[name]])}): gap {gaps[name]:.3f}, leakage {_with_interval(leaks[name])}"
        for name in plain
    )
    if len(plain) < 3:
        evidence = f"Needs three data sets; {len(plain)} measured. {numbers}"
        return Finding(1, claim, "does not apply", evidence)
    values = [leak.value for leak in leaks.values()]
    found = paper.correlate(list(gaps.values()), values)
    p_value = paper.spearman_p(list(gaps.values()), values)
    grows: Decision = found.spearman > 0 if p_value < 0.05 else None
    fitted = _all(_at_most(leaks[name], _CLOSE) for name in plain if gaps[name] <= _CLOSE)
    evidence = (
        f"Pearson {found.pearson:.3f}, Spearman {found.spearman:.3f} (p = {p_value:.3f}) over "
        f"{len(plain)} data sets. {numbers}. Hardly means at most {_CLOSE:g}."
    )
    return Finding(1, claim, _verdict(_all([grows, fitted])), evidence)


def _loss_falls_steadily(by_dataset: ByDataset) -> Finding:
    claim = "Algorithm 1's accuracy loss falls steadily with epsilon, from at most about 0.5; DP-SGD's starts higher."
    curves = {
        (name, each): _by_epsilon(found[each])
        for name, found in by_dataset.items()
        for each in (_GAUSSIAN, _LAPLACE)
        if found.get(each)
    }
    if not curves:
        return Finding(2, claim, "does not apply", "Algorithm 1 was not measured.")
    points = [each for curve in curves.values() for each in curve.values()]
    top = max(points, key=lambda each: each.accuracy_loss.value)
    steps = {
        f"{name}, {method(each).title}, epsilon {first:g} to {second:g}": _difference(
            curve[second].accuracy_loss, curve[first].accuracy_loss
        )
        for (name, each), curve in curves.items()
        for first, second in pairwise(curve)
    }
    where, rise = max(
        steps.items(), key=lambda step: step[1].value, default=("no step", Mean(0.0, None, 0.0, 0.0))
    )
    evidence = [
        f"Largest loss of Algorithm 1 {_with_interval(top.accuracy_loss)} on {top.dataset}, largest rise "
        f"{_with_interval(rise)} ({where}); {_repeats(points)}"
    ]
    steady = _all(_at_most(step, _SCATTER) for step in steps.values())
    parts = [steady, _at_most(top.accuracy_loss, _ABOUT_HALF)]
    dpsgd = [
        each for found in by_dataset.values() for name in _PUBLISHED_DPSGD for each in found.get(name, ())
    ]
    if dpsgd:
        worst = max(dpsgd, key=lambda each: each.accuracy_loss.value)
        evidence.append(f"largest loss of DP-SGD as published {_with_interval(worst.accuracy_loss)}")
        parts.append(_at_least(_difference(worst.accuracy_loss, top.accuracy_loss), 0.0))
    text = (
        "; ".join(evidence)
        + f". Steadily means that no step rises by more than {_SCATTER:g}. It is steady because "
        "only one of C logits is noised, which is also why it is not private (theory, section 2.1)."
    )
    return Finding(2, claim, _verdict(_all(parts)), text)


def _algorithm1_loses_least(by_dataset: ByDataset, attack: str) -> Finding:
    claim = (
        "Where the plain model leaks, Algorithm 1 loses the least accuracy of the paper's methods at every epsilon, "
        "and its leakage stays close to the bound of its claim."
    )
    leaking = {
        name: found
        for name, found in by_dataset.items()
        if _GAUSSIAN in found
        and "plain" in found
        and attack in found["plain"][0].leakage
        and found["plain"][0].leakage[attack].value > _SMALL_LEAKAGE
    }
    if not leaking:
        return Finding(3, claim, "does not apply", "No measured data set leaks more than 0.02.")
    excess = {text: by for name, found in leaking.items() for text, by in _above_claim(name, found, attack)}
    lead = {text: by for name, found in leaking.items() for text, by in _leads(name, found, _PUBLISHED_DPSGD)}
    proven = {text: by for name, found in leaking.items() for text, by in _leads(name, found, _PROVEN)}
    bounded = _all(_at_most(by, _CLOSE) for by in excess.values())
    least = _all(_at_least(by, -_CLOSE) for by in lead.values())
    broken = [text for text, by in excess.items() if _at_most(by, _CLOSE) is False]
    beaten = [text for text, by in lead.items() if _at_least(by, -_CLOSE) is False]
    better = [text for text, by in proven.items() if _at_least(by, 0.0) is False]
    parts = [
        f"{_repeats([each for found in leaking.values() for each in found[_GAUSSIAN]])} on {', '.join(leaking)}"
    ]
    if broken:
        parts.append(f"leakage above what is claimed: {broken[0]}{_and_more(broken)}")
    if beaten:
        parts.append(f"DP-SGD as published that loses less: {beaten[0]}{_and_more(beaten)}")
    elif lead:
        parts.append(f"no DP-SGD as published loses less by more than {_CLOSE:g} beyond its interval")
    if better:
        parts.append(f"beside it, proven methods that lose less: {better[0]}{_and_more(better)}")
    evidence = "; ".join(parts)
    return Finding(3, claim, _verdict(_all([bounded, least])), f"{evidence[0].upper()}{evidence[1:]}.")


def _above_claim(
    name: str, found: Mapping[str, Sequence[Summary]], attack: str
) -> Iterator[tuple[str, Mean]]:
    """By how much Algorithm 1 leaks more than mu-Gaussian privacy permits, at each epsilon."""
    for each in found[_GAUSSIAN]:
        if each.epsilon is not None and attack in each.leakage:
            # The largest TPR - FPR under mu-Gaussian privacy is 2 Phi(mu/2) - 1.
            permitted, leakage = float(2 * ndtr(each.epsilon / 2) - 1), each.leakage[attack]
            text = f"{name} at epsilon {each.epsilon:g}: {_with_interval(leakage)}, its claim permits {permitted:.3f}"
            yield text, _difference(leakage, Mean(permitted, None, permitted, permitted))


def _leads(
    name: str, found: Mapping[str, Sequence[Summary]], others: Sequence[str]
) -> Iterator[tuple[str, Mean]]:
    """By how much other methods lose more accuracy than Algorithm 1, at each epsilon."""
    ours = _by_epsilon(found[_GAUSSIAN])
    for other in others:
        for epsilon, each in _by_epsilon(found.get(other, ())).items():
            if epsilon in ours:
                text = (
                    f"{method(other).title} on {name} at epsilon {epsilon:g} ({each.accuracy_loss.value:.3f} against "
                    f"{ours[epsilon].accuracy_loss.value:.3f})"
                )
                yield text, _difference(each.accuracy_loss, ours[epsilon].accuracy_loss)


def _gaussian_beats_laplace(by_dataset: ByDataset) -> Finding:
    claim = (
        "With two classes Laplace and Gaussian noise do alike; with more classes Gaussian noise does better."
    )
    evidence: list[str] = []
    parts: list[Decision] = []
    for name, found in by_dataset.items():
        gaussian, laplace = (_by_epsilon(found.get(each, ())) for each in (_GAUSSIAN, _LAPLACE))
        gaps = [
            _difference(laplace[epsilon].accuracy_loss, each.accuracy_loss)
            for epsilon, each in gaussian.items()
            if epsilon in laplace
        ]
        if not gaps:
            continue
        classes = found[_GAUSSIAN][0].classes
        largest, smallest = max(gaps, key=_value), min(gaps, key=_value)
        if classes == 2:
            parts += [_at_most(largest, _ALIKE), _at_least(smallest, -_ALIKE)]
        else:
            parts += [_at_least(largest, _CLOSE), _at_least(smallest, -_CLOSE)]
        evidence.append(
            f"{name} ({classes} classes, {_repeats(found[_GAUSSIAN])}): Laplace minus Gaussian from "
            f"{_with_interval(smallest)} to {_with_interval(largest)}"
        )
    if not evidence:
        return Finding(4, claim, "does not apply", "Algorithm 1 was not measured with both noises.")
    evidence.append(
        f"alike means within {_ALIKE:g} (the paper's own curves differ by up to 0.088 on Adult), better by more than "
        f"{_CLOSE:g} at some epsilon and never worse by as much"
    )
    return Finding(4, claim, _verdict(_all(parts)), "; ".join(evidence) + ".")


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


def _by_epsilon(summaries: Sequence[Summary]) -> dict[float, Summary]:
    """Summaries by increasing epsilon, for the smallest number of answers."""
    fewest = min((each.queries or 0 for each in summaries), default=0)
    return {
        each.epsilon: each
        for each in sorted(summaries, key=lambda one: one.epsilon or 0.0)
        if each.epsilon is not None and (each.queries or 0) == fewest
    }


def _value(mean: Mean) -> float:
    return mean.value


def _difference(first: Mean, second: Mean) -> Mean:
    """First minus second; half the widths of the two intervals are added as those of independent numbers."""
    value = first.value - second.value
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return Mean(value)
    down = float(np.hypot(first.value - first.low, second.high - second.value))
    up = float(np.hypot(first.high - first.value, second.value - second.low))
    return Mean(value, None, value - down, value + up)


def _at_most(mean: Mean, limit: float) -> Decision:
    """Whether a number is at most a limit; None if its interval contains the limit or is unknown."""
    if mean.low is None or mean.high is None:
        return None
    return True if mean.high <= limit else False if mean.low > limit else None


def _at_least(mean: Mean, limit: float) -> Decision:
    """Whether a number is at least a limit; None if its interval contains the limit or is unknown."""
    if mean.low is None or mean.high is None:
        return None
    return True if mean.low >= limit else False if mean.high < limit else None


def _all(decisions: Iterable[Decision]) -> Decision:
    """False if one is False, else None if one is None."""
    listed = list(decisions)
    return False if False in listed else None if None in listed else True


def _verdict(holds: Decision) -> Verdict:
    return "undecided" if holds is None else "confirmed" if holds else "not confirmed"


def _repeats(summaries: Sequence[Summary]) -> str:
    counts = sorted({each.repeats for each in summaries})
    return counted(counts[0], "repeat") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} repeats"


def _with_interval(mean: Mean) -> str:
    if mean.low is None or mean.high is None:
        return f"{mean.value:.3f}"
    return f"{mean.value:.3f} [{mean.low:.3f}, {mean.high:.3f}]"


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
    """Accuracy loss and leakage when one total epsilon pays for many answers."""

    dataset: str  # Data set and method
    method: str
    analysis: str
    total: float  # The total epsilon
    queries: int  # Number of answers
    per_answer: float | None  # Epsilon of one answer
    accuracy_loss: float  # Accuracy loss at that epsilon
    leakage: float | None  # Leakage at that epsilon
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
    """Read a curve at an epsilon: linear in log epsilon, constant beyond its ends."""
    return float(np.interp(np.log(epsilon), np.log(list(curve)), list(curve.values())))
