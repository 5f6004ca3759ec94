"""The HTML page: tables made here, plots by a small script inside the page; nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib import resources
from string import Template

from quietmax.experiments import paper as reference
from quietmax.experiments.findings import ManyQueries, findings, multi_query
from quietmax.experiments.paper import Comparison, reproduce_correlations, reproduce_sensitivity_table
from quietmax.experiments.report.panels import panels
from quietmax.experiments.runner import environment
from quietmax.experiments.summary import STATUS_WORDS, Summary, accuracy_comparisons, curve_comparisons

SEEDED_NOISE = (
    "All figures are experiments with seeded noise, so that the run can be repeated; the status of a guarantee is that "
    "of the method when it is served with fresh noise."
)
OWNER_ONLY = (
    "For the owner of the records only: accuracies and leakages were computed from them without noise, networks "
    "without privacy were trained on them, and the number of records is taken as public. If the records are private, "
    "do not publish any of it."
)

MANY_COLUMNS = ("data set", "method", "reading", "total eps", "answers", "each", "accuracy loss", "leakage")


@dataclass(frozen=True)
class About:
    """What a report says of itself; ``paper`` tells whether it sets the paper's numbers beside ours."""

    title: str
    settings: str
    seed: int
    failures: tuple[str, ...] = ()
    paper: bool = True


def html(summaries: Sequence[Summary], about: About) -> str:
    """The whole page as one text."""
    files = resources.files("quietmax.experiments.report")
    drawn = [panel.to_json() for panel in panels(summaries)]
    sections = [_plots(summaries)]
    if about.paper:
        sections += [_findings(summaries), _multi_query(summaries), _paper(summaries)]
    sections += [_results(summaries), _settings(about)]
    return Template(files.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=escape(about.title),
        lead=_lead(summaries) + ("" if about.paper else f" <strong>{escape(OWNER_ONLY)}</strong>"),
        style=files.joinpath("page.css").read_text(encoding="utf-8"),
        script=files.joinpath("plots.js").read_text(encoding="utf-8"),
        # "<" is escaped so that no text can end the script element
        data=json.dumps(drawn).replace("<", "\\u003c"),
        sections="\n".join(sections),
        failures=_failures(about),
    )


def _lead(summaries: Sequence[Summary]) -> str:
    names = ", ".join(dict.fromkeys(escape(each.dataset) for each in summaries))
    return f"{names}. Solid lines have a proven guarantee, dashed ones have none or a conditional one. {SEEDED_NOISE}"


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
    table = _table(MANY_COLUMNS, many_lines(rows))
    return (
        '<section id="many"><h2>Many answers from one total</h2><p>The paper reads k answers off its single-answer '
        "curves. Its composition theorem leaves eps/√k for each (published), its worked example eps/k "
        "(published-example). Head and DP-SGD answer any number. Algorithm 1 has no guarantee in either reading. "
        f"* below the smallest measured eps: the value there.</p><details><summary>{len(rows)} rows</summary>{table}"
        "</details></section>"
    )


def many_lines(rows: Iterable[ManyQueries]) -> list[tuple[str, ...]]:
    """Many answers from one total as lines of a table under `MANY_COLUMNS`."""
    return [
        (
            row.dataset,
            row.method,
            row.reading,
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
    parts = [
        ("Plain networks (tolerance 0.02; leakage 0.04)", accuracy_comparisons(summaries)),
        ("Curves of the figures (tolerance 0.04)", curve_comparisons(summaries)),
        ("Sensitivities (to the printed digits)", reproduce_sensitivity_table()),
        ("Correlations (to the printed digits)", reproduce_correlations()),
    ]
    blocks = "".join(
        f"<details><summary>{escape(title)}: {sum(row.agrees for row in rows)} of {len(rows)} agree</summary>"
        f"{_comparisons(rows)}</details>"
        for title, rows in parts
        if rows
    )
    absent = [name for name in reference.accuracy_table() if name not in measured]
    missing = f"<p>Not measured here: {escape(', '.join(absent))}.</p>" if absent else ""
    return f'<section id="paper"><h2>The paper\'s numbers beside ours</h2>{blocks}{missing}</section>'


def _comparisons(rows: Sequence[Comparison]) -> str:
    return _table(
        ("of", "quantity", "paper", "ours", "spread", "difference", "agrees"),
        (
            (
                row.dataset,
                row.quantity,
                f"{row.paper:.4f}",
                f"{row.ours:.4f}",
                "" if row.spread is None else f"{row.spread:.4f}",
                f"{row.difference:+.4f}",
                "yes" if row.agrees else f"no {row.note}".strip(),
            )
            for row in rows
        ),
    )


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
            "eps at least (audit)",
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
                _mean(each.test_accuracy.value, each.test_accuracy.spread),
                _mean(each.accuracy_loss.value, each.accuracy_loss.spread),
                *(
                    _mean(each.leakage[attack].value, each.leakage[attack].spread)
                    if attack in each.leakage
                    else ""
                    for attack in attacks
                ),
                "" if each.audited_epsilon is None else f"{each.audited_epsilon:.2f} ({each.audited})",
                f"{each.fit_seconds:.1f}",
                f"{1e6 * each.answer_seconds:.0f}",
                str(each.repeats),
            )
            for each in summaries
        ),
    )
    return (
        f'<section id="results"><h2>All results</h2><details><summary>{len(summaries)} rows</summary>{table}</details>'
        f"<p class='hint'>{SEEDED_NOISE} "
        "Audits at confidence 0.99: of a mechanism, one answer against its own claim in its currency; of a model, "
        "from the attacks' guesses, taking the split as fair coins.</p></section>"
    )


def _settings(about: About) -> str:
    rows = [("settings", about.settings), ("seed", str(about.seed)), *environment().items()]
    rows.append(("written", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")))
    return f'<section id="settings"><h2>Settings and versions</h2>{_table(("", ""), rows)}</section>'


def _failures(about: About) -> str:
    if not about.failures:
        return ""
    items = "".join(f"<li>{escape(failure)}</li>" for failure in about.failures)
    return f'<section class="failures"><h2>{len(about.failures)} cells failed</h2><ul>{items}</ul></section>'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _mean(value: float, spread: float | None) -> str:
    return f"{value:.3f}" if spread is None else f"{value:.3f} ± {spread:.3f}"
