"""The report: one HTML file to look at without a network, pictures for a paper, tables for further work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quietmax.errors import QuietmaxError
from quietmax.experiments.report.page import OWNER_ONLY, SEEDED_NOISE, About, html
from quietmax.experiments.report.panels import Panel, draw, panels
from quietmax.experiments.summary import Summary, write_tables

__all__ = ["OWNER_ONLY", "SEEDED_NOISE", "About", "Panel", "html", "panels", "write_report"]


def write_report(summaries: Sequence[Summary], folder: Path, about: About) -> list[Path]:
    """Write ``report.html``, ``results.csv``, ``results.parquet`` and the figures as PNG and PDF.

    Beside a report on an owner's records, ``NOT-FOR-PUBLICATION.txt`` says that nothing in the folder is for others.
    """
    if not summaries:
        return []
    page = folder / "report.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        page.write_text(html(summaries, about), encoding="utf-8")
        if not about.paper:
            (folder / "NOT-FOR-PUBLICATION.txt").write_text(f"{OWNER_ONLY}\n", encoding="utf-8")
        return [page, *write_tables(summaries, folder), *draw(panels(summaries), folder / "figures")]
    except OSError as problem:
        raise QuietmaxError(
            f"The report could not be written to {folder} ({problem.strerror}); give another --output."
        ) from problem
