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
    CURVE_TOLERANCE,
    Leakage,
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
from quietmax.experiments.grid import STORED_TRIALS, Result, Trial, read_trials
from quietmax.experiments.measurements import (
    MEASUREMENTS,
    NetworkRow,
    network_rows,
)
from quietmax.experiments.methods import methods
from quietmax.experiments.paper import Comparison, bounds_table, reproduce_sensitivity_table
from quietmax.experiments.report import figures, write_figures, write_stability_figure

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
        rows.append((name, str(len(repeats)), str(len(every)), f"{minutes:.1f}", f"{memory:.2f}"))
    return table(("data set", "repeats", "trials", "processor minutes per repeat", "peak memory, GiB"), rows)


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
    """How many points of each curve agree, and the largest difference with its epsilon."""
    found: dict[str, dict[str, list[Comparison]]] = defaultdict(lambda: defaultdict(list))
    for each in curve_comparisons(summaries):
        if each.quantity.startswith("accuracy loss"):
            curve = each.quantity.removeprefix("accuracy loss, ").rpartition(", eps")[0]
            found[each.dataset][curve].append(each)
    columns = list(dict.fromkeys(curve for each in found.values() for curve in each))

    def cell(points: Sequence[Comparison]) -> str:
        worst = max(points, key=lambda point: abs(point.difference))
        agree = f"{sum(point.agrees for point in points)} of {len(points)}"
        return f"{agree}; {worst.difference:+.3f} at {worst.quantity.rpartition('eps ')[2]}"

    rows = ((name, *(cell(each[curve]) for curve in columns)) for name, each in found.items())
    return table(("data set", *columns), rows)


LEAKAGE_EPSILONS = (0.01, 1.0, 100.0)


def leakage(summaries: Sequence[Summary]) -> str:
    """The leakage of Algorithm 1, without noise (the plain network) and at three epsilons, and of DP-SGD."""
    found: dict[tuple[str, str], dict[float | None, Leakage]] = defaultdict(dict)
    for each in leakages(summaries):
        if each.method in ("plain", "algorithm1-gaussian", "published-rdp"):
            method = "algorithm1-gaussian" if each.method == "plain" else each.method
            found[each.dataset, method][each.epsilon] = each
    rows = []
    for (name, method), points in found.items():
        shown = [points.get(epsilon) for epsilon in (None, *LEAKAGE_EPSILONS)]
        widths = [each.ours.high - each.ours.low for each in shown if each and each.ours.low is not None]
        rows.append(
            (
                name,
                methods()[method].title,
                *("" if each is None else _leakage_cell(each) for each in shown),
                f"{max(widths) / 2:.3f}" if widths else "",
            )
        )
    columns = ("no noise", *(f"epsilon {epsilon:g}" for epsilon in LEAKAGE_EPSILONS))
    return table(("data set (paper / ours / gap)", "method", *columns, "95%: at most ±"), rows)


def _leakage_cell(each: Leakage) -> str:
    """The paper's leakage, ours, and training minus test accuracy; bold where ours differs, † below the gap."""
    ours = f"{each.ours.value:.3f}" if each.agrees else f"**{each.ours.value:.3f}**"
    below = "†" if each.paper < each.gap - CURVE_TOLERANCE else ""
    return f"{each.paper:.3f}{below} / {ours} / {each.gap:.3f}"


def five_findings(summaries: Sequence[Summary]) -> str:
    """The verdicts on the findings; the report has the evidence."""
    return "\n".join(f"{each.number}. **{each.verdict}**: {each.claim}" for each in findings(summaries))


def correlations(summaries: Sequence[Summary]) -> str:
    """The paper's correlations and ours, with the p-values of ours."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for each in own_correlations(summaries):
        p_value = each.note.partition(" with")[0]
        found[each.dataset][each.quantity] = f"{each.paper:.4f} / {each.ours:.4f} ({p_value})"
    if not found:
        return "Fewer than three data sets are in the stored run."
    columns = tuple(next(iter(found.values())))
    rows = ((pair.replace("_", " "), *coefficients.values()) for pair, coefficients in found.items())
    return table(("pair (paper / ours)", *columns), rows)


def many_queries(summaries: Sequence[Summary]) -> str:
    """The paper's example: Location, a total of 10; one row for a method whose epsilon pays for any number."""
    rows = [
        (
            methods()[each.method].title,
            each.analysis,
            "" if each.per_answer is None else f"{each.queries:,}",
            "" if each.per_answer is None else f"{each.per_answer:.3g}",
            f"{each.accuracy_loss:.3f}",
            "" if each.leakage is None else f"{each.leakage:.3f}",
        )
        for each in multi_query(summaries, totals=(10.0,), queries=(100,))
        if each.dataset == "location" and each.method != "algorithm1-laplace"
    ]
    columns = ("method", "analysis", "answers", "epsilon each", "accuracy loss", "leakage")
    return table(columns, dict.fromkeys(rows))


def like_for_like(summaries: Sequence[Summary]) -> str:
    """Test accuracy at equal (epsilon, delta) on the data sets on which proven methods ran."""
    names = ("head", "dpsgd", "teachers", "sampled-neuron", "algorithm1-gaussian")
    tables = []
    for dataset in dict.fromkeys(each.dataset for each in summaries if each.method == "head"):
        own = [each for each in summaries if each.dataset == dataset]
        plain = next(each for each in own if each.method == "plain").test_accuracy.value
        epsilons = (0.1, 1.0, 5.0, 10.0)
        rows = []
        for name in names:
            found = {each.epsilon: each for each in own if each.method == name and each.queries in (None, 1)}
            shown = next(iter(found.values()))
            answers = "any number" if shown.queries is None else "1"
            accuracies = [f"{found[e].test_accuracy.value:.3f}" if e in found else "" for e in epsilons]
            title = f"{methods()[name].title} ({found[epsilons[0]].status})"
            rows.append((title, answers, *accuracies))
        columns = (
            f"{dataset}, plain network {plain:.3f}",
            "answers",
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
    for each in bounds_table(observed=MEASUREMENTS["bounds"].stored()):
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


def cifar_networks() -> str:
    """CIFAR with other settings: the networks without privacy, and Algorithm 1."""
    rows = [each for each in network_rows(MEASUREMENTS["cifar"].stored()) if each.epochs == 100]
    return table(
        (
            "data set",
            "pixels",
            "learning rate",
            "loss",
            "train (paper / ours)",
            "test",
            "Algorithm 1 within 0.04",
        ),
        (
            (
                each.dataset,
                each.scaling,
                f"{each.learning_rate:g}",
                each.loss + ("" if each.alpha is None else f", alpha {each.alpha:g}"),
                _beside(each, "train"),
                _beside(each, "test"),
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


def blocks() -> dict[str, str]:
    """All generated parts of the page, by name."""
    results = read_trials([STORED_TRIALS])
    summaries = summarize(results)
    return {
        "run": stored_run(results),
        "bounds": upper_bounds(),
        "cifar": cifar_networks(),
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
    shown = (("location", "accuracy-loss"), ("location", "leakage-shadow"))
    drawn = [figure for figure in figures(summaries) if (figure.dataset, figure.kind) in shown]
    write_figures(drawn, FIGURES, ["png"])
    write_stability_figure(summaries, FIGURES / "stability.png")


if __name__ == "__main__":
    main()
