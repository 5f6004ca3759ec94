"""Averages over the repeats of our trials, and what they say about the paper.

The paper's numbers are compared with ours, its five findings are judged, and many answers are read off the curves for
one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from scipy import stats
from scipy.special import ndtr

from quietmax.accounting.costs import Analysis, Budget, Measure, PureCost, per_query
from quietmax.errors import counted
from quietmax.experiments import paper
from quietmax.experiments.grid import Result, Trial
from quietmax.experiments.methods import method, methods
from quietmax.experiments.paper import Comparison, Row

_CONFIDENCE = 0.95
"""Confidence level of the intervals of means."""
_NORMAL_QUANTILE = float(stats.norm.ppf(0.5 + _CONFIDENCE / 2))

PAPER_SERIES = {
    "algorithm1-gaussian": "alg1_gauss",
    "algorithm1-laplace": "alg1_lap",
    "published-rdp": "rdp",
    "published-zcdp": "zcdp",
    "published-ac": "ac",
    "published-nc": "nc",
}
"""Method -> series of the paper's figures."""

STATUS_WORDS = {
    "none": "no guarantee",
    "refuted": "no guarantee",
    "conditional": "guarantee conditional",
    "proven": "proven",
}


@dataclass(frozen=True)
class Mean:
    """Mean over the repeats, with an interval that contains the expected value with probability 95%."""

    value: float  # The mean
    spread: float | None = None  # Standard deviation, if there are several repeats
    low: float | None = None  # The interval
    high: float | None = None

    @classmethod
    def of(cls, values: Sequence[float], single: tuple[float, float] | None = None) -> Mean:
        """Return the mean of some numbers."""
        value = float(np.mean(values))
        if len(values) == 1:
            return cls(value, None, *(single or (None, None)))
        spread = float(np.std(values, ddof=1))
        half = float(stats.t.ppf(0.5 + _CONFIDENCE / 2, len(values) - 1)) * spread / math.sqrt(len(values))
        return cls(value, spread, value - half, value + half)


@dataclass(frozen=True)
class Summary:
    """One method at one epsilon on one data set."""

    dataset: str  # Name of the data set or table
    method: str  # Name of the method
    epsilon: float | None  # None for methods without privacy
    queries: int | None  # Number of answers that epsilon pays for; None for any number
    repeats: int  # Number of repeats
    classes: int  # Classes and training records
    records: int
    status: str  # Status of the guarantee: "none", "refuted", "conditional" or "proven"
    train_accuracy: Mean
    test_accuracy: Mean
    accuracy_loss: Mean
    leakage: Mapping[str, Mean]  # TPR - FPR and area under the ROC curve of each attack
    auc: Mapping[str, Mean]
    delta: float | None  # The claimed delta
    audited_epsilon: float | None  # Largest lower bound on epsilon that the audits found
    audited: str  # What was audited
    audited_claim: float | None  # The claim against which a mechanism was audited
    fit_seconds: float  # Median time of training, and of one answer
    answer_seconds: float
    paper_accuracy_loss: float | None = None  # The paper's numbers
    paper_leakage: float | None = None

    @property
    def shadow(self) -> Mean | None:
        """Leakage under the paper's attack, if it was run."""
        return self.leakage.get("shadow")

    @property
    def gap(self) -> float:
        """Training accuracy minus test accuracy."""
        return self.train_accuracy.value - self.test_accuracy.value

    @property
    def title(self) -> str:
        """The method's title, the number of answers, and the status of a guarantee that is not proven."""
        known = methods().get(self.method)
        words = self.method if known is None else known.title
        if self.queries is not None and (known is None or known.axis == "like-for-like" or self.queries > 1):
            words += f", {counted(self.queries, 'answer')}"
        return words if self.status == "proven" else f"{words} ({STATUS_WORDS[self.status]})"

    def flat(self) -> dict[str, Any]:
        """Return one row of a table, with columns of its own for each attack."""
        row: dict[str, Any] = {}
        for name, value in asdict(self).items():
            if name in ("leakage", "auc"):
                for attack, mean in value.items():
                    row |= _flat_mean(f"{name}_{attack}", mean)
            else:
                row |= _flat_mean(name, value) if isinstance(value, dict) else {name: value}
        return row


def _flat_mean(name: str, mean: Mapping[str, float | None]) -> dict[str, float | None]:
    ends = {f"{name}_{part}": mean[part] for part in ("spread", "low", "high")}
    return {name: mean["value"], **ends}


def summarize(results: Mapping[Trial, Result]) -> list[Summary]:
    """Average the results over the repeats."""
    repeats: dict[tuple[str, str, float | None, int | None], list[Result]] = {}
    for trial, result in results.items():
        key = (trial.group.source.title, trial.method, trial.epsilon, trial.queries)
        repeats.setdefault(key, []).append(result)
    return [_summary(*key, found) for key, found in repeats.items()]


def _summary(
    dataset: str, method: str, epsilon: float | None, queries: int | None, repeats: Sequence[Result]
) -> Summary:
    first = repeats[0]

    def _mean(name: str, accuracy: str, scale: float = 1.0) -> Mean:
        # One repeat: the binomial error of as many test records as training records.
        error = (
            _NORMAL_QUANTILE * math.sqrt(first[accuracy] * (1 - first[accuracy]) / first["records"]) / scale
        )
        return Mean.of([result[name] for result in repeats], (first[name] - error, first[name] + error))

    def _attack_means(figure: str) -> dict[str, Mean]:
        return {
            attack: Mean.of(
                [result["attacks"][attack][figure]["value"] for result in repeats],
                (figures[figure]["low"], figures[figure]["high"]),
            )
            for attack, figures in first["attacks"].items()
        }

    audits = [result for result in repeats if result["audited_epsilon"] is not None]
    best: Result = max(audits, key=lambda result: result["audited_epsilon"], default={})
    return Summary(
        dataset=dataset,
        method=method,
        epsilon=epsilon,
        queries=queries,
        repeats=len(repeats),
        classes=first["classes"],
        records=first["records"],
        status=first["status"],
        train_accuracy=_mean("train_accuracy", "train_accuracy"),
        test_accuracy=_mean("test_accuracy", "test_accuracy"),
        accuracy_loss=_mean("accuracy_loss", "test_accuracy", first["baseline_accuracy"]),
        leakage=_attack_means("leakage"),
        auc=_attack_means("auc"),
        delta=first["claimed_delta"],
        audited_epsilon=best.get("audited_epsilon"),
        audited=best.get("audited", ""),
        audited_claim=best.get("audited_claim"),
        fit_seconds=float(np.median([result["fit_seconds"] for result in repeats])),
        answer_seconds=float(np.median([result["answer_seconds"] for result in repeats])),
        paper_accuracy_loss=_paper_number(dataset, "acc_loss", method, epsilon),
        paper_leakage=_paper_number(dataset, "priv_leak", method, epsilon),
    )


def _paper_number(dataset: str, metric: str, method: str, epsilon: float | None) -> float | None:
    if method == "plain" and metric == "priv_leak":
        return paper.accuracy_table().get(dataset, {}).get("privacy_leakage")
    series = PAPER_SERIES.get(method)
    if series is None or epsilon is None:
        return None
    return paper.curve(dataset, metric, series).get(epsilon)


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
            if each.shadow is not None:
                number = printed["privacy_leakage"]
                rows.append(_compare(each, "leakage, plain network", number, each.shadow, CURVE_TOLERANCE))
            rows += [
                row for row in paper.reproduce_sensitivity_table([each.dataset]) if row.quantity == "oaro"
            ]
    return rows


def _stability_points(summaries: Iterable[Summary]) -> dict[str, dict[str, float]]:
    """Return what the paper's stability figure shows, from our networks: stability, gap and leakage."""
    return {
        each.dataset: {
            "oaro_stability": paper.accuracy_table()[each.dataset]["oaro_stability"],
            "convexified_gap": each.gap,
            "privacy_leakage": each.shadow.value,
        }
        for each in summaries
        if each.method == "plain" and each.dataset in paper.accuracy_table() and each.shadow is not None
    }


def own_correlations(summaries: Iterable[Summary]) -> list[Comparison]:
    """Compare the paper's correlations with those of our own networks."""
    points = _stability_points(summaries)
    if len(points) < 3:
        return []
    rows = []
    for pair, computed in paper._correlate_models(list(points.values())).items():
        printed = paper._correlation_table()[pair]
        for name in ("pearson", "spearman", "kendall"):
            ours, p_value = computed[name], computed[f"{name}_p"]
            if name == "spearman":
                p_value = paper._spearman_p(
                    *([point[column] for point in points.values()] for column in paper.CORRELATED[pair])
                )
            agrees = ours * printed[name] > 0 and (p_value < 0.05 or printed[f"{name}_p"] >= 0.05)
            note = f"p = {p_value:.3f} with {len(points)} data sets, the paper's with 9"
            rows.append(Comparison(pair, name, printed[name], ours, agrees, note))
    return rows


@dataclass(frozen=True)
class Leakage(Row):
    """The leakage of one method at one epsilon: the paper's number, ours, and what any correct attack reaches."""

    dataset: str  # Data set and method
    method: str
    epsilon: float | None  # None for the plain network
    paper: float  # The paper's leakage
    ours: Mean  # Ours
    gap: float

    derived = ("verdict",)

    @property
    def agrees(self) -> bool:
        """Whether the two agree within `CURVE_TOLERANCE`."""
        return abs(self.ours.value - self.paper) <= CURVE_TOLERANCE

    @property
    def verdict(self) -> str:
        """Whether the two agree, and if not, which attack found more, with the gap as the judge."""
        if self.agrees:
            return "agrees"
        if self.ours.value > self.paper:
            return "differs: our attack finds more" + (
                "; the paper's finds less than the gap" if self.paper < self.gap - CURVE_TOLERANCE else ""
            )
        return "differs: our attack finds less" + (
            " than the gap" if self.ours.value < self.gap - CURVE_TOLERANCE else ", but reaches the gap"
        )


def leakages(summaries: Iterable[Summary]) -> list[Leakage]:
    """Compare the leakage of every method of the paper's figures with the paper's."""
    return [
        Leakage(each.dataset, each.method, each.epsilon, each.paper_leakage, each.shadow, each.gap)
        for each in summaries
        if each.paper_leakage is not None and each.shadow is not None
    ]


def curve_comparisons(summaries: Iterable[Summary]) -> list[Comparison]:
    """Compare with the paper's figures: accuracy loss and leakage of Algorithm 1 and of DP-SGD at every epsilon."""
    rows = []
    for each in summaries:
        if each.epsilon is None:
            continue
        for quantity, number, mean in (
            ("accuracy loss", each.paper_accuracy_loss, each.accuracy_loss),
            ("leakage", each.paper_leakage, each.shadow),
        ):
            if number is not None and mean is not None:
                what = f"{quantity}, {method(each.method).title}, eps {each.epsilon:g}"
                rows.append(_compare(each, what, number, mean, CURVE_TOLERANCE))
    return rows


def _compare(each: Summary, quantity: str, number: float, ours: Mean, tolerance: float) -> Comparison:
    agrees = abs(ours.value - number) <= tolerance
    return Comparison(each.dataset, quantity, number, ours.value, agrees, spread=ours.spread)


@dataclass(frozen=True)
class Finding(Row):
    """One of the paper's five findings. It is undecided if it holds or fails only within the 95% intervals."""

    number: int
    claim: str  # The paper's claim in our words
    verdict: Verdict
    evidence: str  # Our numbers, with the numbers of repeats


ByDataset = Mapping[str, Mapping[str, Sequence[Summary]]]
Decision = bool | None
"""Whether a statement holds; None if the intervals leave it open."""


def findings(summaries: Sequence[Summary]) -> list[Finding]:
    """Judge the paper's five findings from our own numbers."""
    by_dataset: dict[str, dict[str, list[Summary]]] = {}
    for each in summaries:
        if each.dataset in paper.accuracy_table():
            by_dataset.setdefault(each.dataset, {}).setdefault(each.method, []).append(each)
    return [
        _leakage_follows_overfitting(by_dataset),
        _loss_falls_steadily(by_dataset),
        _algorithm1_loses_least(by_dataset),
        _gaussian_beats_laplace(by_dataset),
        _sensitivity_follows_classes_and_records(),
    ]


def _leakage_follows_overfitting(by_dataset: ByDataset) -> Finding:
    claim = "Leakage under shadow-model attacks grows with overfitting; a model that does not overfit hardly leaks."
    plain = {name: found["plain"][0] for name, found in by_dataset.items() if "plain" in found}
    leaks = {name: each.shadow for name, each in plain.items() if each.shadow is not None}
    gaps = {name: plain[name].gap for name in leaks}
    numbers = "; ".join(
        f"{name} ({_repeats([plain[name]])}): gap {gaps[name]:.3f}, leakage {_with_interval(leak)}"
        for name, leak in leaks.items()
    )
    if len(leaks) < 3:
        evidence = f"Needs three data sets; {len(leaks)} measured. {numbers}"
        return Finding(1, claim, "does not apply", evidence)
    values = [leak.value for leak in leaks.values()]
    found = paper.correlate(list(gaps.values()), values)
    p_value = paper._spearman_p(list(gaps.values()), values)
    grows: Decision = found["spearman"] > 0 if p_value < 0.05 else None
    fitted = _all(_at_most(leak, _CLOSE) for name, leak in leaks.items() if gaps[name] <= _CLOSE)
    evidence = (
        f"Pearson {found['pearson']:.3f}, Spearman {found['spearman']:.3f} (p = {p_value:.3f}) over "
        f"{len(leaks)} data sets. {numbers}. Hardly means at most {_CLOSE:g}."
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


def _algorithm1_loses_least(by_dataset: ByDataset) -> Finding:
    claim = (
        "Where the plain model leaks, Algorithm 1 loses the least accuracy of the paper's methods at every epsilon, "
        "and its leakage stays close to the bound of its claim."
    )
    leaking = {
        name: found
        for name, found in by_dataset.items()
        if _GAUSSIAN in found
        and "plain" in found
        and (leakage := found["plain"][0].shadow) is not None
        and leakage.value > _SMALL_LEAKAGE
    }
    if not leaking:
        return Finding(3, claim, "does not apply", "No measured data set leaks more than 0.02.")
    excess = {text: by for name, found in leaking.items() for text, by in _above_claim(name, found)}
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


def _above_claim(name: str, found: Mapping[str, Sequence[Summary]]) -> Iterator[tuple[str, Mean]]:
    """By how much Algorithm 1 leaks more than mu-Gaussian privacy permits, at each epsilon."""
    for each in found[_GAUSSIAN]:
        if each.epsilon is not None and (leakage := each.shadow) is not None:
            # The largest TPR - FPR under mu-Gaussian privacy is 2 Phi(mu/2) - 1.
            permitted = float(2 * ndtr(each.epsilon / 2) - 1)
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
        largest, smallest = (pick(gaps, key=lambda gap: gap.value) for pick in (max, min))
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
_CHARGED_METHODS: tuple[tuple[str, Measure, Analysis], ...] = (
    (_GAUSSIAN, "gaussian", "published"),
    (_GAUSSIAN, "gaussian", "published-example"),
    (_LAPLACE, "pure", "published"),
)
_UNLIMITED_METHODS = ("published-rdp", "dpsgd", "head")


@dataclass(frozen=True)
class MultiQuery(Row):
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


def multi_query(
    summaries: Sequence[Summary], *, totals: Sequence[float] = TOTALS, queries: Sequence[int] = QUERIES
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
            for method_name, measure, analysis in _CHARGED_METHODS:
                curve = [each for each in curves.get(method_name, ()) if each.queries == 1]
                for count in queries if curve else ():
                    cost = per_query(Budget(total, queries=count), measure, analysis)
                    one = cost.epsilon if isinstance(cost, PureCost) else cost.mu
                    rows.append(_multi_query(curve, analysis, total, count, one))
            for method_name in _UNLIMITED_METHODS:
                curve = curves.get(method_name, [])
                if any(each.epsilon == total for each in curve):
                    rows += [_multi_query(curve, "any number", total, count, None) for count in queries]
    return rows


def _multi_query(
    curve: Sequence[Summary], analysis: str, total: float, queries: int, per_answer: float | None
) -> MultiQuery:
    epsilon = total if per_answer is None else per_answer
    points = {
        each.epsilon: each for each in sorted(curve, key=lambda one: one.epsilon or 0.0) if each.epsilon
    }
    losses = {at: each.accuracy_loss.value for at, each in points.items()}
    leaks = {at: each.shadow.value for at, each in points.items() if each.shadow is not None}
    return MultiQuery(
        curve[0].dataset,
        curve[0].method,
        analysis,
        total,
        queries,
        per_answer,
        _interpolate(losses, epsilon),
        _interpolate(leaks, epsilon) if len(leaks) == len(points) else None,
        epsilon < min(points),
    )


def _interpolate(curve: Mapping[float, float], epsilon: float) -> float:
    """Read a curve at an epsilon: linear in log epsilon, constant beyond its ends."""
    return float(np.interp(np.log(epsilon), np.log(list(curve)), list(curve.values())))
