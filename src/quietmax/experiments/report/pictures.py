"""The panels as PNG and PDF, for a paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quietmax.experiments.report.panels import Panel


def draw(found: Sequence[Panel], folder: Path, formats: Sequence[str] = ("png", "pdf")) -> list[Path]:
    """Write each panel to ``folder`` in each format."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for panel in found:
        figure = Figure(figsize=(7.6, 3.9))
        axes = figure.add_axes((0.09, 0.13, 0.55, 0.79))
        draw_panel(axes, panel)
        axes.legend(fontsize=6.5, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
        for each in formats:
            path = folder / f"{panel.file_name}.{each}"
            figure.savefig(path, dpi=150)
            written.append(path)
    return written


def draw_panel(axes: Any, panel: Panel) -> None:
    """One panel on matplotlib axes."""
    for line in panel.lines:
        epsilons = [point[0] for point in line.points]
        values = [point[1] for point in line.points]
        spreads = [point[2] or 0.0 for point in line.points]
        axes.plot(
            epsilons,
            values,
            color=line.colour,
            linestyle="--" if line.dashed else "-",
            linewidth=0.7 if line.thin else 1.6,
            marker=None if line.thin else "o",
            markersize=3,
            label=line.name,
        )
        if any(spreads):
            low = [value - spread for value, spread in zip(values, spreads, strict=True)]
            high = [value + spread for value, spread in zip(values, spreads, strict=True)]
            axes.fill_between(epsilons, low, high, color=line.colour, alpha=0.15, linewidth=0)
    if panel.level is not None:
        axes.axhline(
            panel.level,
            color="#222222",
            linewidth=0.8,
            linestyle=":",
            label=f"{panel.level_name} (no guarantee)",
        )
    axes.set(xscale="log", xlabel="epsilon", ylabel=panel.axis)
    axes.set_title(panel.title, fontsize=9)
    axes.grid(alpha=0.25)
