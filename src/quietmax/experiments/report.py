"""The report of an evaluation: an HTML page, figures for a paper, and tables for further work.

The page is one file that fetches nothing. Its tables are made here, its plots by a small script inside the page. A
figure is data, which that script and matplotlib both draw.
"""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from string import Template
from typing import Any

from quietmax._threads import usable_cores
from quietmax.errors import QuietmaxError, counted
from quietmax.experiments import paper
from quietmax.experiments.findings import (
    ACCURACY_TOLERANCE,
    CURVE_TOLERANCE,
    PAPER_SERIES,
    STATUS_WORDS,
    Leakage,
    Mean,
    Summary,
    _stability_points,
    accuracy_comparisons,
    curve_comparisons,
    findings,
    leakages,
    multi_query,
    own_correlations,
)
from quietmax.experiments.grid import Trial, write_csv
from quietmax.experiments.methods import methods
from quietmax.experiments.paper import Comparison

SEEDED_NOISE = (
    "All figures are experiments with seeded noise, so that the run can be repeated; the status of a guarantee is that "
    "of the method when it is served with fresh noise."
)
OWNER_ONLY = (
    "For the owner of the records only: accuracies and leakages were computed from them without noise, networks "
    "without privacy were trained on them, and the number of records is taken as public. If the records are private, "
    "do not publish any of it."
)
_PACKAGES = ("quietmax", "torch", "numpy", "scipy", "scikit-learn", "dp-accounting")


@dataclass(frozen=True)
class ReportInfo:
    """What a report says about itself."""

    title: str  # Title of the page
    settings: str  # How much work was done
    seed: int  # Seed of the evaluation
    failures: tuple[str, ...] = ()  # Trials that failed, with the reason
    paper: bool = True


def efforts(trials: Iterable[Trial]) -> str:
    """Return how much work went into each data set, for the settings of a report."""
    found = {trial.group.source.title: trial.group.effort for trial in trials}
    return "; ".join(
        f"{name} {counted(effort.records, 'record')}, {counted(effort.shadows, 'shadow network')}, "
        f"{counted(effort.epochs, 'epoch')}"
        for name, effort in found.items()
    )


Columns = Mapping[str, Callable[[Any], str]]
"""The columns of a table: heading -> how the entry of a row is formatted."""


def _number(value: float | None, form: str) -> str:
    """Format a number, if there is one."""
    return "" if value is None else format(value, form)


_COMPARISONS = {
    "accuracy": f"Plain networks (tolerance {ACCURACY_TOLERANCE:g}; leakage {CURVE_TOLERANCE:g})",
    "curves": f"Curves of the figures (tolerance {CURVE_TOLERANCE:g})",
    "sensitivities": "Sensitivities (to the printed digits)",
    "correlations": "Correlations of the paper's own numbers (to the printed digits)",
    "own-correlations": "Correlations of our numbers (sign and significance)",
}
"""The tables that compare numbers with the paper's, and when two numbers agree."""

_COMPARISON: Columns = {
    "of": lambda row: row.dataset,
    "quantity": lambda row: row.quantity,
    "paper": lambda row: f"{row.paper:.4f}",
    "ours": lambda row: f"{row.ours:.4f}",
    "spread": lambda row: _number(row.spread, ".4f"),
    "difference": lambda row: f"{row.difference:+.4f}",
    "agrees": lambda row: "yes" if row.agrees else "no" + (f" ({row.note})" if row.note else ""),
}
_LEAKAGE: Columns = {
    "data set": lambda row: row.dataset,
    "method": lambda row: row.method,
    "eps": lambda row: _number(row.epsilon, "g"),
    "paper": lambda row: f"{row.paper:.4f}",
    "ours": lambda row: f"{row.ours.value:.4f}",
    "low": lambda row: _number(row.ours.low, ".4f"),
    "high": lambda row: _number(row.ours.high, ".4f"),
    "train - test": lambda row: f"{row.gap:.4f}",
    "verdict": lambda row: row.verdict,
}
_MULTI_QUERY: Columns = {
    "data set": lambda row: row.dataset,
    "method": lambda row: row.method,
    "analysis": lambda row: row.analysis,
    "total eps": lambda row: f"{row.total:g}",
    "answers": lambda row: f"{row.queries:,}",
    "each": lambda row: _number(row.per_answer, ".3g"),
    "accuracy loss": lambda row: f"{row.accuracy_loss:.3f}" + ("*" if row.extrapolated else ""),
    "leakage": lambda row: _number(row.leakage, ".3f"),
}
_FINDING: Columns = {
    "finding": lambda row: str(row.number),
    "claim": lambda row: row.claim,
    "verdict": lambda row: row.verdict,
    "evidence": lambda row: row.evidence,
}
_RESULT: Columns = {
    "data set": lambda row: row.dataset,
    "method": lambda row: row.method,
    "guarantee": lambda row: STATUS_WORDS[row.status],
    "eps": lambda row: _number(row.epsilon, "g"),
    "delta": lambda row: _number(row.delta or None, ".2g"),
    "answers": lambda row: "any" if row.queries is None else f"{row.queries:,}",
    "accuracy": lambda row: _mean(row.test_accuracy),
    "accuracy loss": lambda row: _mean(row.accuracy_loss),
}
_RESULT_COSTS: Columns = {
    "audited eps (lower bound)": lambda row: (
        "" if row.audited_epsilon is None else f"{row.audited_epsilon:.2f} ({row.audited})"
    ),
    "fit, s": lambda row: f"{row.fit_seconds:.1f}",
    "answer, µs": lambda row: f"{1e6 * row.answer_seconds:.0f}",
    "repeats": lambda row: str(row.repeats),
}


@dataclass(frozen=True)
class Table:
    """Rows, and how they are shown."""

    title: str
    rows: Sequence[Any]
    columns: Columns
    caption: str = ""
    prose: bool = False  # Whether the entries are sentences

    @property
    def lines(self) -> list[tuple[str, ...]]:
        """The entries as they are shown, row by row."""
        return [tuple(show(row) for show in self.columns.values()) for row in self.rows]

    def write(self, path: Path) -> Path:
        """Write the table as it is shown to a CSV file."""
        names = list(self.columns)
        return write_csv((dict(zip(names, line, strict=True)) for line in self.lines), path, columns=names)


def comparison(name: str, rows: Sequence[Comparison]) -> Table:
    """Return a table of comparisons with the paper; ``name`` is one of `_COMPARISONS`."""
    spread = any(row.spread is not None for row in rows)
    columns = {name: show for name, show in _COMPARISON.items() if spread or name != "spread"}
    return Table(_COMPARISONS[name], rows, columns, _agreement(rows))


def _agreement(rows: Sequence[Comparison | Leakage]) -> str:
    return f"{sum(row.agrees for row in rows)} of {len(rows)} agree"


def paper_tables(summaries: Sequence[Summary]) -> dict[str, Table]:
    """Return every table of the comparison with the paper, by name."""
    compared = {
        "accuracy": accuracy_comparisons(summaries),
        "curves": curve_comparisons(summaries),
        "sensitivities": paper.reproduce_sensitivity_table(),
        "correlations": paper.reproduce_correlations(),
        "own-correlations": own_correlations(summaries),
    }
    leaks = leakages(summaries)
    return {
        **{name: comparison(name, rows) for name, rows in compared.items()},
        "leakage": Table("Leakage, beside training minus test accuracy", leaks, _LEAKAGE, _agreement(leaks)),
        "multi-query": Table(
            "Many answers from one budget",
            multi_query(summaries),
            _MULTI_QUERY,
            "Algorithm 1 has no guarantee. * below the smallest measured epsilon: the value there",
        ),
        "findings": Table("The five findings", findings(summaries), _FINDING),
    }


def write_report(summaries: Sequence[Summary], folder: Path, info: ReportInfo) -> list[Path]:
    """Write ``report.html``, ``results.csv`` and the figures as PNG and PDF.

    A report on the paper also has each of its tables as a CSV file, in ``tables``. With a report on an owner's records,
    ``NOT-FOR-PUBLICATION.txt`` says that the folder must not be published.
    """
    if not summaries:
        return []
    page = folder / "report.html"
    rows = [each.flat() for each in summaries]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        page.write_text(html(summaries, info), encoding="utf-8")
        if not info.paper:
            (folder / "NOT-FOR-PUBLICATION.txt").write_text(f"{OWNER_ONLY}\n", encoding="utf-8")
        written = [page, write_csv(rows, folder / "results.csv", line_end="\r\n")]
        if info.paper:
            tables = paper_tables(summaries).items()
            written += [
                table.write(folder / "tables" / f"{name}.csv") for name, table in tables if table.rows
            ]
        written += write_figures(figures(summaries), folder / "figures")
        if _stability_points(summaries):
            places = [folder / "figures" / f"stability.{extension}" for extension in ("png", "pdf")]
            written += [write_stability_figure(summaries, place) for place in places]
        return written
    except OSError as problem:
        raise QuietmaxError(f"The report could not be written to {folder}: {problem.strerror}.") from problem


def html(summaries: Sequence[Summary], info: ReportInfo) -> str:
    """Return the page."""
    files = Path(__file__).parent / "report"
    drawn = [asdict(figure) for figure in figures(summaries)]
    for each in drawn:
        del each["along"]  # always epsilon in a report
    sections = [_plots(summaries)]
    if info.paper:
        tables = paper_tables(summaries)
        sections += [_findings(tables.pop("findings")), _multi_query(tables.pop("multi-query"))]
        sections.append(_paper(tables, {each.dataset for each in summaries}))
    sections += [_results(summaries), _settings(info)]
    return Template((files / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(info.title),
        lead=_lead(summaries) + ("" if info.paper else f" <strong>{escape(OWNER_ONLY)}</strong>"),
        style=(files / "page.css").read_text(encoding="utf-8"),
        script=(files / "plots.js").read_text(encoding="utf-8"),
        # "<" is escaped so that no text can end the script element
        data=json.dumps(drawn).replace("<", "\\u003c"),
        sections="\n".join(sections),
        failures=_failures(info),
    )


def _section(name: str, title: str, content: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2>{content}</section>'


def _folded(summary: str, table: Table) -> str:
    """A table that is shown when its summary is clicked."""
    shown = _html_table(table.columns, table.lines)
    return f"<details><summary>{escape(summary)}</summary>{shown}</details>"


def _html_table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _lead(summaries: Sequence[Summary]) -> str:
    names = ", ".join(dict.fromkeys(escape(each.dataset) for each in summaries))
    return (
        f"{names}. Solid lines have a proven guarantee; dashed lines have none or a conditional one. "
        f"{SEEDED_NOISE}"
    )


def _plots(summaries: Sequence[Summary]) -> str:
    buttons = "".join(
        f'<button type="button" data-set="{name}">{name}</button>'
        for name in dict.fromkeys(escape(each.dataset) for each in summaries)
    )
    return _section(
        "plots",
        "Privacy and utility",
        f'<div class="tabs" role="tablist">{buttons}</div><div id="panels"></div><p class="hint">Point at a plot to '
        "read values; click a name in its legend to hide or show a curve. Bands are one standard deviation over the "
        "repeats; a single repeat has none.</p>",
    )


def _findings(table: Table) -> str:
    items = "".join(
        f'<li><span class="verdict {each.verdict.replace(" ", "-")}">{each.verdict}</span> '
        f"<strong>{escape(each.claim)}</strong><br>{escape(each.evidence)}</li>"
        for each in table.rows
    )
    return _section("findings", "The five findings, with our numbers", f"<ol>{items}</ol>")


def _multi_query(table: Table) -> str:
    if not table.rows:
        return ""
    return _section(
        "many",
        table.title,
        "<p>The paper reads k answers off its curves for one answer. Its composition theorem leaves eps/√k for each "
        "(published), its worked example eps/k (published-example). Head and DP-SGD answer any number. Algorithm 1 has "
        "no guarantee under either analysis. * below the smallest measured eps: the value there.</p>"
        + _folded(counted(len(table.rows), "row"), table),
    )


def _paper(tables: Mapping[str, Table], measured: set[str]) -> str:
    blocks = "".join(
        _folded(f"{table.title}: {table.caption}", table) for table in tables.values() if table.rows
    )
    absent = [name for name in paper.accuracy_table() if name not in measured]
    missing = f"<p>Not measured here: {escape(', '.join(absent))}.</p>" if absent else ""
    return _section("paper", "The paper's numbers and ours", f"{blocks}{missing}")


def results_table(summaries: Sequence[Summary]) -> Table:
    """Return all results as a table."""
    leaks: Columns = {
        f"leakage, {attack}": lambda each, attack=attack: (  # type: ignore[misc]
            _mean(each.leakage[attack]) if attack in each.leakage else ""
        )
        for attack in dict.fromkeys(attack for each in summaries for attack in each.leakage)
    }
    return Table("All results", summaries, {**_RESULT, **leaks, **_RESULT_COSTS})


def _results(summaries: Sequence[Summary]) -> str:
    table = results_table(summaries)
    return _section(
        "results",
        table.title,
        f"{_folded(counted(len(summaries), 'row'), table)}<p class='hint'>{SEEDED_NOISE} "
        "Audits at confidence 0.99: of a mechanism, one answer against its own claim (epsilon or mu); of a model, "
        "from the attacks' guesses, taking the split as fair coins.</p>",
    )


def _settings(info: ReportInfo) -> str:
    """What was run, on which machine, and the versions of the packages that figures depend on."""
    rows = [
        ("settings", info.settings),
        ("seed", str(info.seed)),
        ("python", sys.version.split()[0]),
        ("machine", f"{platform.system()} {platform.machine()}, {usable_cores()} cores"),
    ]
    for name in _PACKAGES:
        try:
            rows.append((name, version(name)))
        except PackageNotFoundError:
            rows.append((name, "not installed as a package"))
    rows.append(("written", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")))
    return _section("settings", "Settings and versions", _html_table(("", ""), rows))


def _failures(info: ReportInfo) -> str:
    if not info.failures:
        return ""
    items = "".join(f"<li>{escape(failure)}</li>" for failure in info.failures)
    return f'<section class="failures"><h2>Failed trials: {len(info.failures)}</h2><ul>{items}</ul></section>'


def _mean(mean: Mean) -> str:
    return f"{mean.value:.3f}" if mean.spread is None else f"{mean.value:.3f} ± {mean.spread:.3f}"


# --- figures ------------------------------------------------------------------------------------------------------

_COLOURS = {
    "algorithm1-gaussian": "#b4431f",
    "algorithm1-laplace": "#d98a2b",
    "published-rdp": "#3d5a80",
    "published-zcdp": "#7d93ab",
    "published-ac": "#a58e74",
    "published-nc": "#b8b06a",
    "head": "#0b6e4f",
    "teachers": "#2a62b8",
    "sampled-neuron": "#7b3fa0",
    "dpsgd": "#00838f",
    "plain": "#222222",
}
_QUANTITIES = {
    "oaro_stability": "OARO stability (formula)",
    "convexified_gap": "training minus test accuracy",
    "privacy_leakage": "leakage (TPR - FPR)",
}
_OTHER_COLOURS = ("#5d4037", "#ad1457", "#33691e", "#283593", "#827717")


@dataclass(frozen=True)
class Line:
    """One curve of a figure."""

    name: str  # Entry of the legend
    colour: str  # Colour as #rrggbb
    dashed: bool  # True for methods without a proven guarantee
    thin: bool  # True for the paper's own curves
    points: tuple[tuple[float, float, float | None], ...]


@dataclass(frozen=True)
class Figure:
    """One figure: curves over epsilon, on a logarithmic axis, or over alpha."""

    dataset: str  # Name of the data set
    kind: str  # What the figure shows, as part of a file name
    title: str  # Title
    axis: str  # Label of the vertical axis
    lines: tuple[Line, ...]  # The curves
    level: float | None = None  # Height of a horizontal line, such as the plain network's value
    level_name: str = ""  # Entry of the legend for the horizontal line
    note: str = ""  # Text below the figure
    along: str = "epsilon"  # Label of the horizontal axis


def figures(summaries: Sequence[Summary]) -> list[Figure]:
    """Return the figures of each data set.

    Accuracy loss and leakage as published come first, then accuracy and leakage like for like.
    """
    drawn = []
    for name in dict.fromkeys(each.dataset for each in summaries):
        mine = [each for each in summaries if each.dataset == name]
        published, alike = (
            [each for each in mine if each.epsilon is not None and _axis(each) == axis]
            for axis in ("published", "like-for-like")
        )
        plain = next((each for each in mine if each.method == "plain"), None)
        attacks = () if plain is None else plain.leakage
        if published:
            drawn.append(_loss_figure(name, published))
            drawn += [_leakage_figure(name, published, plain, attack, True) for attack in attacks]
        if alike:
            drawn.append(_accuracy_figure(name, alike, mine, plain))
            drawn += [_leakage_figure(name, alike, plain, attack, False) for attack in attacks]
    return drawn


def _axis(each: Summary) -> str:
    known = methods().get(each.method)
    return "like-for-like" if known is None else known.axis


def _loss_figure(name: str, published: Sequence[Summary]) -> Figure:
    lines = _lines(published, lambda each: each.accuracy_loss)
    return Figure(
        name,
        "accuracy-loss",
        f"{name}: accuracy loss, as published",
        "accuracy loss",
        (*_paper_lines(name, "acc_loss", published), *lines),
        note="epsilon is the paper's own label: for Algorithm 1 it pays for one answer, for DP-SGD for all answers. "
        + coverage(name, published),
    )


def _leakage_figure(
    name: str, chosen: Sequence[Summary], plain: Summary | None, attack: str, published: bool
) -> Figure:
    attacked = [each for each in chosen if attack in each.leakage]
    drawn = _paper_lines(name, "priv_leak", attacked) if published and attack == "shadow" else []
    level = plain.leakage[attack].value if plain is not None and attack in plain.leakage else None
    if published and level is not None and name in paper.accuracy_table():
        drawn.append(_bound_line([each.epsilon for each in attacked if each.epsilon is not None], level))
    return Figure(
        name,
        f"leakage-{attack}" if published else f"like-for-like-leakage-{attack}",
        f"{name}: leakage under {attack}, {'as published' if published else 'like for like'}",
        "leakage (TPR - FPR)",
        (*drawn, *_lines(attacked, lambda each: each.leakage[attack])),
        level,
        "plain network",
        coverage(name, attacked) if published else "",
    )


def _bound_line(epsilons: Sequence[float], leakage: float) -> Line:
    """The bound that the paper draws: min(e^eps - 1, leakage of the plain network)."""
    points = tuple(
        (epsilon, min(math.expm1(min(epsilon, 1.0)), leakage), None) for epsilon in sorted(set(epsilons))
    )
    return Line("bound in the paper: min(e^eps - 1, plain network)", "#777777", True, True, points)


def coverage(name: str, measured: Sequence[Summary]) -> str:
    """Say how many repeats the curves of a data set have, and which of the paper's curves are missing."""
    repeats: dict[int, list[str]] = {}
    for each in {one.method: one for one in measured}.values():
        repeats.setdefault(each.repeats, []).append(methods()[each.method].title)
    parts = [f"{counted(count, 'repeat')}: {', '.join(titles)}." for count, titles in repeats.items()]
    if len(parts) == 1:
        parts = [f"{parts[0].partition(':')[0]} of each curve."]
    absent = [
        methods()[method].title
        for method, series in PAPER_SERIES.items()
        if method not in {each.method for each in measured} and paper.curve(name, "acc_loss", series)
    ]
    if absent:
        parts.append(f"Not measured in this run: {', '.join(absent)}.")
    return " ".join(parts)


def _accuracy_figure(
    name: str, alike: Sequence[Summary], everything: Sequence[Summary], plain: Summary | None
) -> Figure:
    """Proven methods at equal (epsilon, delta), and Algorithm 1 at its own labels, dashed."""
    low, high = min(each.epsilon or 0 for each in alike), max(each.epsilon or 0 for each in alike)
    unproven = [
        each
        for each in everything
        if each.method.startswith("algorithm1") and each.epsilon is not None and low <= each.epsilon <= high
    ]
    delta = next((each.delta for each in alike if each.delta), None)
    return Figure(
        name,
        "like-for-like",
        f"{name}: accuracy like for like",
        "test accuracy",
        tuple(_lines([*unproven, *alike], lambda each: each.test_accuracy)),
        None if plain is None else plain.test_accuracy.value,
        "plain network",
        "Equal (epsilon, delta)"
        + ("" if delta is None else f", delta = {delta:.3g}")
        + " for the stated number of answers; head and DP-SGD answer any number. Settings were chosen on public data"
        " sets beforehand, which is not charged. Algorithm 1: its own label, one answer, no guarantee.",
    )


def _lines(summaries: Sequence[Summary], mean: Callable[[Summary], Mean]) -> list[Line]:
    """One curve per method and number of answers."""
    series: dict[tuple[str, int | None], list[Summary]] = {}
    for each in summaries:
        series.setdefault((each.method, each.queries), []).append(each)
    lines = []
    fewest = {method: min((q or 0) for other, q in series if other == method) for method, _ in series}
    others = [method for method, _ in series if method not in _COLOURS]
    for (method, queries), found in series.items():
        ordered = sorted(found, key=lambda each: each.epsilon or 0.0)
        colour = _COLOURS.get(method) or _OTHER_COLOURS[others.index(method) % len(_OTHER_COLOURS)]
        lines.append(
            Line(
                ordered[0].title,
                colour if (queries or 0) == fewest[method] else _paler(colour),
                ordered[0].status != "proven",
                False,
                tuple((each.epsilon or 0.0, mean(each).value, mean(each).spread) for each in ordered),
            )
        )
    return lines


def _paper_lines(name: str, metric: str, measured: Sequence[Summary]) -> list[Line]:
    """The paper's curve of every measured method, named "paper: " and the method's title."""
    lines = []
    for each in {one.method: one for one in measured}.values():
        series = PAPER_SERIES.get(each.method)
        curve = {} if series is None else paper.curve(name, metric, series)
        if curve:
            points = tuple((epsilon, value, None) for epsilon, value in sorted(curve.items()))
            lines.append(Line(f"paper: {each.title}", _COLOURS[each.method], True, True, points))
    return lines


def _paler(colour: str) -> str:
    """Mix a colour with white in equal parts."""
    return "#" + "".join(f"{(int(colour[at : at + 2], 16) + 255) // 2:02x}" for at in (1, 3, 5))


def write_figures(
    drawn: Sequence[Figure], folder: Path, formats: Sequence[str] = ("png", "pdf")
) -> list[Path]:
    """Draw figures with matplotlib and write them to a folder."""
    from matplotlib.figure import Figure as MatplotlibFigure

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for each in drawn:
        canvas = MatplotlibFigure(figsize=(7.6, 3.9))
        axes = canvas.add_axes((0.09, 0.13, 0.55, 0.79))
        _draw(axes, each)
        axes.legend(fontsize=6.5, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
        for extension in formats:
            path = folder / f"{each.dataset}-{each.kind}.{extension}"
            # The legend stands beside the axes; "tight" leaves as much room as it needs.
            canvas.savefig(path, dpi=150, bbox_inches="tight")
            written.append(path)
    return written


def write_stability_figure(summaries: Sequence[Summary], path: Path) -> Path:
    """Draw OARO stability, accuracy gap and leakage of the plain networks against each other.

    The paper has the same figure; its points are drawn beside ours.
    """
    from matplotlib.figure import Figure as MatplotlibFigure

    canvas = MatplotlibFigure(figsize=(10.5, 3.6), layout="constrained")
    ours = _stability_points(summaries)
    for axes, (first, second) in zip(canvas.subplots(1, 3), paper.CORRELATED.values(), strict=True):
        for label, points, colour, marker in (
            ("paper", paper.accuracy_table(), "#888888", "x"),
            ("ours", ours, "#0b6e4f", "o"),
        ):
            axes.scatter(
                [point[first] for point in points.values()],
                [point[second] for point in points.values()],
                color=colour,
                marker=marker,
                s=22,
                label=label,
            )
        for name, point in ours.items():
            axes.annotate(
                name, (point[first], point[second]), fontsize=6.5, xytext=(3, 3), textcoords="offset points"
            )
        axes.set(xlabel=_QUANTITIES[first], ylabel=_QUANTITIES[second])
        axes.grid(alpha=0.25)
        axes.legend(fontsize=7, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, dpi=150)
    return path


def _draw(axes: Any, figure: Figure) -> None:
    """Draw a figure on matplotlib axes, with a band of one spread on either side of a curve."""
    for line in figure.lines:
        places, values, spreads = zip(*line.points, strict=True)
        axes.plot(
            places,
            values,
            color=line.colour,
            linestyle="--" if line.dashed else "-",
            linewidth=0.7 if line.thin else 1.6,
            marker=None if line.thin else "o",
            markersize=3,
            label=line.name,
        )
        if any(spreads):
            low = [value - (spread or 0.0) for value, spread in zip(values, spreads, strict=True)]
            high = [value + (spread or 0.0) for value, spread in zip(values, spreads, strict=True)]
            axes.fill_between(places, low, high, color=line.colour, alpha=0.15, linewidth=0)
    if figure.level is not None:
        label = f"{figure.level_name} (no guarantee)"
        axes.axhline(figure.level, color="#222222", linewidth=0.8, linestyle=":", label=label)
    axes.set(xscale="log" if figure.along == "epsilon" else "linear", xlabel=figure.along, ylabel=figure.axis)
    axes.set_title(figure.title, fontsize=9)
    axes.grid(alpha=0.25)
