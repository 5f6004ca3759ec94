"""Fill the tables of the page `paper.md` from the stored run of the paper's evaluation.

Run `python docs/making/paper_page.py` after the run has changed. It also draws the figures of the page. A test compares
the page with what this script writes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from quietmax.experiments.findings import (
    ACCURACY_TOLERANCE,
    Mean,
    Summary,
    accuracy_comparisons,
    curve_comparisons,
    findings,
    leakages,
    multi_query,
    own_correlations,
    summarize,
)
from quietmax.experiments.grid import Trial
from quietmax.experiments.measurements import (
    ALPHA,
    ARCHITECTURES,
    BOUNDS,
    CIFAR,
    AlphaRow,
    ArchitectureRow,
    CifarTrial,
    NetworkRow,
    Observed,
    alpha_choices,
    bounds_table,
    network_rows,
    private_rows,
)
from quietmax.experiments.methods import methods
from quietmax.experiments.paper import Comparison, reproduce_sensitivity_table
from quietmax.experiments.report import figures, write_figures, write_stability_figure
from quietmax.experiments.results import STORED_TRIALS, Result, read_trials, stored_rows

PAGE = Path(__file__).parents[1] / "paper.md"
FIGURES = PAGE.parent / "figures" / "paper"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is left-aligned."""
    lines = [" | ".join(columns), " | ".join(["---"] + ["---:"] * (len(columns) - 1))]
    return "\n".join(f"| {line} |" for line in (*lines, *(" | ".join(row) for row in rows)))


def stored_run(results: Mapping[Trial, Result]) -> str:
    """Repeats, trials, processor time and memory of the stored run."""
    groups: dict[str, dict[int, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for trial, result in results.items():
        groups[trial.group.source.name][trial.group.repeat].append(result)
    rows = []
    for name, repeats in groups.items():
        every = [result for found in repeats.values() for result in found]
        minutes = sum(result["processor_seconds"] for result in every) / 60 / len(repeats)
        memory = max(result["peak_bytes"] for result in every) / 2**30
        versions = ", ".join(sorted({result["version"] for result in every}))
        rows.append((name, str(len(repeats)), str(len(every)), f"{minutes:.1f}", f"{memory:.2f}", versions))
    return table(
        ("data set", "repeats", "trials", "processor minutes per repeat", "peak memory, GiB", "version"), rows
    )


def accuracy(summaries: Sequence[Summary]) -> str:
    """The paper's table of accuracies, one row per data set and number."""
    rows: dict[str, dict[str, Comparison]] = defaultdict(dict)
    for each in accuracy_comparisons(summaries):
        rows[each.dataset][each.quantity] = each
    quantities = {
        "original loss, train": "original train accuracy",
        "test": "original test accuracy",
        "gap": "original gap",
        "convexified, train": "convexified train accuracy",
        "test ": "convexified test accuracy",
        "gap ": "convexified gap",
        "leakage": "leakage, plain network",
        "OARO": "oaro",
    }
    lines = []
    for name, found in rows.items():
        shown = [found.get(quantity) for quantity in quantities.values()]
        lines.append(
            (name, *("" if each is None else f"{each.paper:.3f} / {_marked(each)}" for each in shown))
        )
    return table(("data set (paper / ours)", *quantities), lines)


def _marked(each: Comparison) -> str:
    return f"{each.ours:.3f}" if each.agrees else f"**{each.ours:.3f}**"


def curves(summaries: Sequence[Summary]) -> str:
    """How many points of each curve agree, and the largest difference."""
    found: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for each in curve_comparisons(summaries):
        if each.quantity.startswith("accuracy loss"):
            found[each.dataset, each.quantity.removeprefix("accuracy loss, ").rpartition(", eps")[0]].append(
                each
            )
    rows = []
    for (name, curve), points in found.items():
        worst = max(points, key=lambda point: abs(point.difference))
        rows.append(
            (
                name,
                curve,
                f"{sum(point.agrees for point in points)} of {len(points)}",
                f"{worst.difference:+.3f}",
                worst.quantity.rpartition("eps ")[2],
            )
        )
    return table(("data set", "curve", "within 0.04", "largest difference", "at epsilon"), rows)


def leakage(summaries: Sequence[Summary]) -> str:
    """The leakage of the plain network and of Algorithm 1 at three epsilons."""
    rows = [
        (
            each.dataset,
            methods()[each.method].title,
            "" if each.epsilon is None else f"{each.epsilon:g}",
            f"{each.paper:.3f}",
            f"{each.ours.value:.3f}",
            "" if each.ours.low is None else f"{each.ours.low:.3f} to {each.ours.high:.3f}",
            f"{each.gap:.3f}",
            each.verdict,
        )
        for each in leakages(summaries)
        if each.method == "plain"
        or (each.method in ("algorithm1-gaussian", "published-rdp") and each.epsilon in (0.01, 1.0, 100.0))
    ]
    return table(
        ("data set", "method", "epsilon", "paper", "ours", "95%", "training - test", "verdict"), rows
    )


def five_findings(summaries: Sequence[Summary]) -> str:
    """The verdicts on the findings."""
    return "\n".join(
        f"{each.number}. **{each.verdict}**: {each.claim} {each.evidence}" for each in findings(summaries)
    )


def correlations(summaries: Sequence[Summary]) -> str:
    """The paper's correlations and ours."""
    rows = own_correlations(summaries)
    if not rows:
        return "Fewer than three data sets are in the stored run."
    return table(
        ("pair", "coefficient", "paper", "ours", "ours: p-value"),
        (
            (
                each.dataset,
                each.quantity,
                f"{each.paper:.4f}",
                f"{each.ours:.4f}",
                each.note.partition(" with")[0],
            )
            for each in rows
        ),
    )


def many_queries(summaries: Sequence[Summary]) -> str:
    """The paper's example: Location, a total of 10."""
    rows = [
        (
            methods()[each.method].title,
            each.analysis,
            f"{each.queries:,}",
            "" if each.per_answer is None else f"{each.per_answer:.3g}",
            f"{each.accuracy_loss:.3f}" + ("*" if each.extrapolated else ""),
            "" if each.leakage is None else f"{each.leakage:.3f}",
        )
        for each in multi_query(summaries, totals=(10.0,), queries=(100, 1000, 10_000))
        if each.dataset == "location"
    ]
    return table(("method", "analysis", "answers", "epsilon each", "accuracy loss", "leakage"), rows)


def like_for_like(summaries: Sequence[Summary]) -> str:
    """Test accuracy at equal (epsilon, delta) on the data sets on which proven methods ran."""
    names = ("head", "dpsgd", "teachers", "sampled-neuron", "algorithm1-gaussian", "algorithm1-laplace")
    tables = []
    for dataset in dict.fromkeys(each.dataset for each in summaries if each.method == "head"):
        own = [each for each in summaries if each.dataset == dataset]
        plain = next(each for each in own if each.method == "plain").test_accuracy.value
        epsilons = sorted({each.epsilon for each in own if each.method == "head" and each.epsilon})
        rows = []
        for name in names:
            found = {each.epsilon: each for each in own if each.method == name and each.queries in (None, 1)}
            shown = next(iter(found.values()))
            answers = "any number" if shown.queries is None else "1"
            accuracies = [f"{found[e].test_accuracy.value:.3f}" if e in found else "" for e in epsilons]
            title = f"{methods()[name].title} ({found[epsilons[0]].status})"
            rows.append((title, answers, str(shown.repeats), *accuracies))
        columns = (
            f"{dataset}, plain network {plain:.3f}",
            "answers",
            "repeats",
            *map("{:g}".format, epsilons),
        )
        tables.append(table(columns, rows))
    return "\n\n".join(tables)


def sensitivities() -> str:
    """How many numbers of the sensitivity table agree, and which do not."""
    rows = reproduce_sensitivity_table()
    wrong = [row for row in rows if not row.agrees]
    listed = "; ".join(f"{row.dataset}, {row.quantity}: {row.note}" for row in wrong)
    return f"{len(rows) - len(wrong)} of {len(rows)} numbers equal the paper's to the printed digits. Others: {listed}."


def upper_bounds() -> str:
    """Table 1, and the change of the weights that retraining caused."""
    rows = []
    for each in bounds_table(observed=stored_rows(Observed, BOUNDS)):
        _, general, _, constant, ours = (f"{bound.value:.3g}" for bound in each.bounds)
        seen = each.observed
        observed = "" if seen is None else f"{seen.weights_l2:.3g}"
        rows.append((each.dataset, ours, general, constant, observed, "" if seen is None else each.verdict))
    return table(
        (
            "data set",
            "2 rho/(lam n): Chaudhuri binary, Wu decreasing, this paper",
            "Chaudhuri, any classes",
            "Wu, constant step",
            "observed",
            "the paper's bound",
        ),
        rows,
    )


def other_networks() -> str:
    """Deeper networks, other activations and losses: measured, and the paper's formula."""

    def beside(seen: float, formula: float | None) -> str:
        return (
            f"{seen:.3g}" if formula is None else f"{seen:.3g} {'>' if seen > formula else '≤'} {formula:.3g}"
        )

    return table(
        ("data set", "hidden layers", "loss", "train / test", "gradient, rho", "weights, D2W", "logit, Dz"),
        (
            (
                each.dataset,
                f"{each.layers} {each.activation}",
                each.loss,
                f"{each.train_accuracy:.3f} / {each.test_accuracy:.3f}",
                beside(each.gradient, each.rho),
                beside(each.observed_weights_l2, each.weights_l2),
                beside(each.observed_logit, each.logit),
            )
            for each in stored_rows(ArchitectureRow, ARCHITECTURES)
        ),
    )


def alphas() -> str:
    """Accuracy and leakage at some values of alpha."""
    stored = stored_rows(AlphaRow, ALPHA)
    rows = [each for each in stored if each.alpha in (None, 0.5, 1.0, 2.0, 5.0, 10.0)]
    lines = [
        (
            each.dataset,
            "original loss" if each.alpha is None else f"{each.alpha:g}",
            f"{each.train_accuracy:.3f}",
            f"{each.test_accuracy:.3f}",
            "" if each.shadow_leakage is None else f"{each.shadow_leakage:.3f}",
            "" if each.threshold_leakage is None else f"{each.threshold_leakage:.3f}",
        )
        for each in rows
    ]
    chosen = "; ".join(
        f"{each.dataset}: chosen {each.chosen:g} (paper {each.paper:g})"
        + (
            ""
            if each.shadow_correlation is None
            else f", Spearman correlation with the leakage {each.shadow_correlation:.2f} (shadow), "
            f"{_number(each.threshold_correlation)} (threshold)"
        )
        for each in alpha_choices(stored)
    )
    columns = ("data set", "alpha", "train", "test", "leakage, shadow", "leakage, threshold")
    return f"{table(columns, lines)}\n\n{chosen}."


def cifar_networks() -> str:
    """CIFAR with other settings: the networks without privacy, and Algorithm 1."""
    rows = network_rows(stored_rows(CifarTrial, CIFAR))
    return table(
        (
            "data set",
            "pixels",
            "learning rate",
            "loss",
            "splits",
            "train (paper / ours)",
            "test",
            "share of the worst record",
            "Algorithm 1 within 0.04",
        ),
        (
            (
                each.dataset,
                each.scaling,
                f"{each.learning_rate:g}" + ("" if each.epochs == 100 else f", {each.epochs} epochs"),
                each.loss + ("" if each.alpha is None else f", alpha {each.alpha:g}"),
                str(each.splits),
                _beside(each, "train"),
                _beside(each, "test"),
                "" if each.worst_share is None else f"{each.worst_share:.2f}",
                f"{each.within} of {each.points}" if each.points else "",
            )
            for each in sorted(rows, key=lambda row: (row.dataset, row.alpha is not None, row.difference))
        ),
    )


def _beside(row: NetworkRow, part: str) -> str:
    printed: float = getattr(row, f"paper_{part}_accuracy")
    ours: Mean = getattr(row, f"{part}_accuracy")
    text = f"{ours.value:.3f}"
    marked = text if abs(ours.value - printed) <= ACCURACY_TOLERANCE else f"**{text}**"
    return f"{printed:.3f} / {marked}" + ("" if ours.spread is None else f" ± {ours.spread:.3f}")


def cifar_dpsgd(summaries: Sequence[Summary]) -> str:
    """CIFAR with other settings: DP-SGD as published, accountant RDP, beside the stored run."""
    rows = private_rows(stored_rows(CifarTrial, CIFAR))
    epsilons = sorted({row.epsilon for row in rows})
    lines: list[tuple[str, ...]] = []

    def add(*words: str, accuracies: Mapping[float, float], losses: Mapping[float, float | None]) -> None:
        shown = [losses[epsilon] for epsilon in epsilons]
        lines.append(
            (
                *words,
                *(f"{accuracies[epsilon]:.3f}" for epsilon in epsilons),
                *("" if loss is None else f"{loss:.3f}" for loss in shown),
            )
        )

    for name in dict.fromkeys(row.dataset for row in rows):
        mine = [row for row in rows if row.dataset == name]
        add(
            name,
            "the paper",
            "",
            "",
            accuracies={row.epsilon: row.paper_test_accuracy for row in mine},
            losses={row.epsilon: row.paper_accuracy_loss for row in mine},
        )
        stored = {
            each.epsilon: each
            for each in summaries
            if (each.dataset, each.method) == (name, "published-rdp") and each.epsilon is not None
        }
        add(
            name,
            "pixel/255 - 0.5, stored run",
            "0.001",
            "convexified",
            accuracies={epsilon: each.test_accuracy.value for epsilon, each in stored.items()},
            losses={epsilon: each.accuracy_loss.value for epsilon, each in stored.items()},
        )
        for case in dict.fromkeys((row.scaling, row.learning_rate, row.loss) for row in mine):
            same = [row for row in mine if (row.scaling, row.learning_rate, row.loss) == case]
            add(
                name,
                case[0],
                f"{case[1]:g}",
                case[2],
                accuracies={row.epsilon: row.test_accuracy for row in same},
                losses={row.epsilon: row.accuracy_loss for row in same},
            )
    return table(
        (
            "data set",
            "pixels",
            "learning rate",
            "loss",
            *(f"test accuracy, epsilon {epsilon:g}" for epsilon in epsilons),
            *(f"accuracy loss, epsilon {epsilon:g}" for epsilon in epsilons),
        ),
        lines,
    )


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"


def blocks() -> dict[str, str]:
    """All generated parts of the page, by name."""
    results = read_trials([STORED_TRIALS])
    summaries = summarize(results)
    return {
        "run": stored_run(results),
        "bounds": upper_bounds(),
        "architectures": other_networks(),
        "alpha": alphas(),
        "cifar": cifar_networks(),
        "cifar-dpsgd": cifar_dpsgd(summaries),
        "sensitivities": sensitivities(),
        "accuracy": accuracy(summaries),
        "correlations": correlations(summaries),
        "curves": curves(summaries),
        "leakage": leakage(summaries),
        "findings": five_findings(summaries),
        "many-queries": many_queries(summaries),
        "like-for-like": like_for_like(summaries),
    }


def filled(page: str, parts: Mapping[str, str]) -> str:
    """The page with every part between its markers."""
    for name, text in parts.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"The page has no place for {name}.")
        page = f"{before}{begin}{text}\n{end}{after}"
    return page


def main() -> None:
    """Write the page and its figures."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), blocks()), encoding="utf-8")
    summaries = summarize(read_trials([STORED_TRIALS]))
    drawn = [figure for figure in figures(summaries) if figure.kind in ("accuracy-loss", "leakage-shadow")]
    write_figures(drawn, FIGURES, ["png"])
    write_stability_figure(summaries, FIGURES / "stability.png")


if __name__ == "__main__":
    main()
