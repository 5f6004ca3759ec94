"""The report of an evaluation: an HTML page, figures for a paper, and tables for further work.

The page is one file that fetches nothing. Its tables are made here, its plots by a small script inside the page.
"""

from __future__ import annotations

import csv
import json
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from string import Template

from quietmax.data.registry import is_stand_in
from quietmax.errors import QuietmaxError, counted
from quietmax.experiments.figures import figures, write_figures, write_stability_figure
from quietmax.experiments.findings import (
    ACCURACY_TOLERANCE,
    CURVE_TOLERANCE,
    Leakage,
    MultiQuery,
    accuracy_comparisons,
    curve_comparisons,
    findings,
    leakages,
    multi_query,
    own_correlations,
    stability_points,
)
from quietmax.experiments.grid import Trial
from quietmax.experiments.paper import (
    Comparison,
    accuracy_table,
    reproduce_correlations,
    reproduce_sensitivity_table,
)
from quietmax.experiments.summary import STATUS_WORDS, Mean, Summary, write_tables
from quietmax.experiments.workers import usable_cores

SEEDED_NOISE = (
    "All figures are experiments with seeded noise, so that the run can be repeated; the status of a guarantee is that "
    "of the method when it is served with fresh noise."
)
STAND_INS = (
    "A data set whose name ends in stand-in has generated records in the shape of one whose files are missing here: "
    "its figures show what that one costs to run, and they are not compared with the paper."
)
OWNER_ONLY = (
    "For the owner of the records only: accuracies and leakages were computed from them without noise, networks "
    "without privacy were trained on them, and the number of records is taken as public. If the records are private, "
    "do not publish any of it."
)
MULTI_QUERY_COLUMNS = (
    "data set",
    "method",
    "analysis",
    "total eps",
    "answers",
    "each",
    "accuracy loss",
    "leakage",
)
LEAKAGE_COLUMNS = ("data set", "method", "eps", "paper", "ours", "low", "high", "train - test", "verdict")
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


def write_report(summaries: Sequence[Summary], folder: Path, info: ReportInfo) -> list[Path]:
    """Write ``report.html``, ``results.csv``, ``results.parquet`` and the figures as PNG and PDF.

    A report on the paper also has each of its tables as a CSV file, in ``tables``. With a report on an owner's records,
    ``NOT-FOR-PUBLICATION.txt`` says that the folder must not be published.
    """
    if not summaries:
        return []
    page = folder / "report.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        page.write_text(html(summaries, info), encoding="utf-8")
        if not info.paper:
            (folder / "NOT-FOR-PUBLICATION.txt").write_text(f"{OWNER_ONLY}\n", encoding="utf-8")
        written = [page, *write_tables(summaries, folder)]
        if info.paper:
            written += _write_paper_tables(summaries, folder / "tables")
        return [
            *written,
            *write_figures(figures(summaries), folder / "figures"),
            *_write_stability(summaries, folder),
        ]
    except OSError as problem:
        raise QuietmaxError(f"The report could not be written to {folder}: {problem.strerror}.") from problem


def _write_paper_tables(summaries: Sequence[Summary], folder: Path) -> list[Path]:
    """Write every table of the comparison with the paper as a CSV file."""
    tables: dict[str, tuple[Sequence[str], Sequence[Sequence[str]]]] = {
        **{name: comparison_table(rows) for name, (_, rows) in paper_comparisons(summaries).items()},
        "leakage": (LEAKAGE_COLUMNS, leakage_lines(leakages(summaries))),
        "multi-query": (MULTI_QUERY_COLUMNS, multi_query_lines(multi_query(summaries))),
        "findings": (
            ("finding", "claim", "verdict", "evidence"),
            [(str(each.number), each.claim, each.verdict, each.evidence) for each in findings(summaries)],
        ),
    }
    return [_write_csv(folder / f"{name}.csv", columns, lines) for name, (columns, lines) in tables.items()]


def _write_csv(path: Path, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *lines])
    return path


def write_comparisons(rows: Sequence[Comparison], path: Path) -> Path:
    """Write comparisons with the paper as a CSV file."""
    return _write_csv(path, *comparison_table(rows))


def _write_stability(summaries: Sequence[Summary], folder: Path) -> list[Path]:
    if not stability_points(summaries):
        return []
    paths = [folder / "figures" / f"stability.{extension}" for extension in ("png", "pdf")]
    for path in paths:
        write_stability_figure(summaries, path)
    return paths


def paper_comparisons(summaries: Sequence[Summary]) -> dict[str, tuple[str, list[Comparison]]]:
    """Return all comparisons with the paper's tables and curves."""
    tables = {
        "accuracy": (
            f"Plain networks (tolerance {ACCURACY_TOLERANCE:g}; leakage {CURVE_TOLERANCE:g})",
            accuracy_comparisons(summaries),
        ),
        "curves": (f"Curves of the figures (tolerance {CURVE_TOLERANCE:g})", curve_comparisons(summaries)),
        "sensitivities": ("Sensitivities (to the printed digits)", reproduce_sensitivity_table()),
        "correlations": (
            "Correlations of the paper's own numbers (to the printed digits)",
            reproduce_correlations(),
        ),
        "own-correlations": (
            "Correlations of our numbers (sign and significance)",
            own_correlations(summaries),
        ),
    }
    return {name: (title, rows) for name, (title, rows) in tables.items() if rows}


def html(summaries: Sequence[Summary], info: ReportInfo) -> str:
    """Return the page."""
    files = resources.files("quietmax.experiments").joinpath("report")
    drawn = [figure.to_json() for figure in figures(summaries)]
    sections = [_plots(summaries)]
    if info.paper:
        sections += [_findings(summaries), _multi_query(summaries), _paper(summaries)]
    sections += [_results(summaries), _settings(info)]
    return Template(files.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=escape(info.title),
        lead=_lead(summaries) + ("" if info.paper else f" <strong>{escape(OWNER_ONLY)}</strong>"),
        style=files.joinpath("page.css").read_text(encoding="utf-8"),
        script=files.joinpath("plots.js").read_text(encoding="utf-8"),
        # "<" is escaped so that no text can end the script element
        data=json.dumps(drawn).replace("<", "\\u003c"),
        sections="\n".join(sections),
        failures=_failures(info),
    )


def _lead(summaries: Sequence[Summary]) -> str:
    names = ", ".join(dict.fromkeys(escape(each.dataset) for each in summaries))
    generated = f" {STAND_INS}" if any(is_stand_in(each.dataset) for each in summaries) else ""
    return (
        f"{names}.{generated} Solid lines have a proven guarantee; dashed lines have none or a conditional one. "
        f"{SEEDED_NOISE}"
    )


def _plots(summaries: Sequence[Summary]) -> str:
    names = list(dict.fromkeys(each.dataset for each in summaries))
    buttons = "".join(
        f'<button type="button" data-set="{escape(name)}">{escape(name)}</button>' for name in names
    )
    return (
        f'<section id="plots"><h2>Privacy and utility</h2><div class="tabs" role="tablist">{buttons}</div>'
        '<div id="panels"></div><p class="hint">Point at a plot to read values; click a name in its legend to hide or '
        "show a curve. Bands are one standard deviation over the repeats; a single repeat has none.</p></section>"
    )


def _findings(summaries: Sequence[Summary]) -> str:
    items = "".join(
        f'<li><span class="verdict {each.verdict.replace(" ", "-")}">{each.verdict}</span> '
        f"<strong>{escape(each.claim)}</strong><br>{escape(each.evidence)}</li>"
        for each in findings(summaries)
    )
    return f'<section id="findings"><h2>The five findings, with our numbers</h2><ol>{items}</ol></section>'


def _multi_query(summaries: Sequence[Summary]) -> str:
    rows = multi_query(summaries)
    if not rows:
        return ""
    table = _table(MULTI_QUERY_COLUMNS, multi_query_lines(rows))
    return (
        '<section id="many"><h2>Many answers from one budget</h2><p>The paper reads k answers off its curves for one '
        "answer. Its composition theorem leaves eps/√k for each (published), its worked example eps/k "
        "(published-example). Head and DP-SGD answer any number. Algorithm 1 has no guarantee under either analysis. "
        "* below the smallest measured eps: the value there.</p>"
        f"<details><summary>{counted(len(rows), 'row')}</summary>{table}</details></section>"
    )


def multi_query_lines(rows: Iterable[MultiQuery]) -> list[tuple[str, ...]]:
    """Format the multi-query analysis as lines of a table under `MULTI_QUERY_COLUMNS`."""
    return [
        (
            row.dataset,
            row.method,
            row.analysis,
            f"{row.total:g}",
            f"{row.queries:,}",
            "" if row.per_answer is None else f"{row.per_answer:.3g}",
            f"{row.accuracy_loss:.3f}" + ("*" if row.extrapolated else ""),
            "" if row.leakage is None else f"{row.leakage:.3f}",
        )
        for row in rows
    ]


def _paper(summaries: Sequence[Summary]) -> str:
    measured = {each.dataset for each in summaries}
    blocks = "".join(
        f"<details><summary>{escape(title)}: {sum(row.agrees for row in rows)} of {len(rows)} agree</summary>"
        f"{_table(*comparison_table(rows))}</details>"
        for title, rows in paper_comparisons(summaries).values()
    )
    leaks = leakages(summaries)
    if leaks:
        agree = sum(each.verdict == "agrees" for each in leaks)
        blocks += (
            f"<details><summary>Leakage, beside training minus test accuracy: {agree} of {len(leaks)} agree</summary>"
            f"{_table(LEAKAGE_COLUMNS, leakage_lines(leaks))}</details>"
        )
    absent = [name for name in accuracy_table() if name not in measured]
    missing = f"<p>Not measured here: {escape(', '.join(absent))}.</p>" if absent else ""
    return f'<section id="paper"><h2>The paper\'s numbers and ours</h2>{blocks}{missing}</section>'


def leakage_lines(rows: Iterable[Leakage]) -> list[tuple[str, ...]]:
    """Format leakages as lines of a table under `LEAKAGE_COLUMNS`."""
    return [
        (
            row.dataset,
            row.method,
            "" if row.epsilon is None else f"{row.epsilon:g}",
            f"{row.paper:.4f}",
            f"{row.ours.value:.4f}",
            "" if row.ours.low is None else f"{row.ours.low:.4f}",
            "" if row.ours.high is None else f"{row.ours.high:.4f}",
            f"{row.gap:.4f}",
            row.verdict,
        )
        for row in rows
    ]


def comparison_table(rows: Sequence[Comparison]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Format comparisons with the paper as a table."""
    spread = any(row.spread is not None for row in rows)
    columns = ("of", "quantity", "paper", "ours", *(["spread"] if spread else []), "difference", "agrees")
    lines = [
        (
            row.dataset,
            row.quantity,
            f"{row.paper:.4f}",
            f"{row.ours:.4f}",
            *(["" if row.spread is None else f"{row.spread:.4f}"] if spread else []),
            f"{row.difference:+.4f}",
            "yes" if row.agrees else "no" + (f" ({row.note})" if row.note else ""),
        )
        for row in rows
    ]
    return columns, lines


def _results(summaries: Sequence[Summary]) -> str:
    attacks = list(dict.fromkeys(attack for each in summaries for attack in each.attacks))
    table = _table(
        (
            "data set",
            "method",
            "guarantee",
            "eps",
            "delta",
            "answers",
            "accuracy",
            "accuracy loss",
            *(f"leakage, {attack}" for attack in attacks),
            "audited eps (lower bound)",
            "fit, s",
            "answer, µs",
            "repeats",
        ),
        (
            (
                each.dataset,
                each.method,
                STATUS_WORDS[each.status],
                "" if each.epsilon is None else f"{each.epsilon:g}",
                "" if not each.delta else f"{each.delta:.2g}",
                "any" if each.queries is None else f"{each.queries:,}",
                _mean(each.test_accuracy),
                _mean(each.accuracy_loss),
                *(_mean(each.leakage[attack]) if attack in each.leakage else "" for attack in attacks),
                "" if each.audited_epsilon is None else f"{each.audited_epsilon:.2f} ({each.audited})",
                f"{each.fit_seconds:.1f}",
                f"{1e6 * each.answer_seconds:.0f}",
                str(each.repeats),
            )
            for each in summaries
        ),
    )
    rows = counted(len(summaries), "row")
    return (
        f'<section id="results"><h2>All results</h2><details><summary>{rows}</summary>{table}</details>'
        f"<p class='hint'>{SEEDED_NOISE} "
        "Audits at confidence 0.99: of a mechanism, one answer against its own claim (epsilon or mu); of a model, "
        "from the attacks' guesses, taking the split as fair coins.</p></section>"
    )


def _settings(info: ReportInfo) -> str:
    rows = [("settings", info.settings), ("seed", str(info.seed)), *_environment()]
    rows.append(("written", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")))
    return f'<section id="settings"><h2>Settings and versions</h2>{_table(("", ""), rows)}</section>'


def _environment() -> list[tuple[str, str]]:
    """The machine and the versions of the packages that figures depend on."""
    rows = [
        ("python", sys.version.split()[0]),
        ("machine", f"{platform.system()} {platform.machine()}, {usable_cores()} cores"),
    ]
    for name in _PACKAGES:
        try:
            rows.append((name, version(name)))
        except PackageNotFoundError:
            rows.append((name, "not installed as a package"))
    return rows


def _failures(info: ReportInfo) -> str:
    if not info.failures:
        return ""
    items = "".join(f"<li>{escape(failure)}</li>" for failure in info.failures)
    return f'<section class="failures"><h2>Failed trials: {len(info.failures)}</h2><ul>{items}</ul></section>'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _mean(mean: Mean) -> str:
    return f"{mean.value:.3f}" if mean.spread is None else f"{mean.value:.3f} ± {mean.spread:.3f}"
