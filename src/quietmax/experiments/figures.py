"""The figures of a report as data, which the page's script and matplotlib both draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quietmax.errors import counted
from quietmax.experiments import paper
from quietmax.experiments.findings import stability_points
from quietmax.experiments.methods import methods
from quietmax.experiments.paper import CORRELATED
from quietmax.experiments.summary import PAPER_SERIES, Summary

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
    """One figure: curves over epsilon on a logarithmic axis."""

    dataset: str  # Name of the data set
    kind: str  # What the figure shows, as part of a file name
    title: str  # Title
    axis: str  # Label of the vertical axis
    lines: tuple[Line, ...]  # The curves
    level: float | None = None  # Height of a horizontal line, such as the plain network's value
    level_name: str = ""  # Entry of the legend for the horizontal line
    note: str = ""  # Text below the figure

    @property
    def file_name(self) -> str:
        """Name of the figure's files, without the format."""
        return f"{self.dataset}-{self.kind}"

    def to_json(self) -> dict[str, Any]:
        """Return all fields, for the page's script."""
        return asdict(self)


def figures(summaries: Sequence[Summary]) -> list[Figure]:
    """Return the figures of each data set.

    Accuracy loss and leakage as published come first, then accuracy and leakage like for like.
    """
    drawn = []
    for name in dict.fromkeys(each.dataset for each in summaries):
        mine = [each for each in summaries if each.dataset == name]
        published = [each for each in mine if _axis(each) == "published" and each.epsilon is not None]
        alike = [each for each in mine if _axis(each) == "like-for-like" and each.epsilon is not None]
        plain = next((each for each in mine if each.method == "plain"), None)
        attacks = plain.attacks if plain is not None else ()
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
    lines = _lines(published, lambda each: (each.accuracy_loss.value, each.accuracy_loss.spread))
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
    with_attack = [each for each in chosen if attack in each.leakage]
    lines = _lines(with_attack, lambda each: (each.leakage[attack].value, each.leakage[attack].spread))
    drawn = _paper_lines(name, "priv_leak", with_attack) if published and attack == "shadow" else []
    level = plain.leakage[attack].value if plain is not None and attack in plain.leakage else None
    if published and level is not None and name in paper.accuracy_table():
        drawn.append(_bound_line([each.epsilon for each in with_attack if each.epsilon is not None], level))
    which = "as published" if published else "like for like"
    return Figure(
        name,
        f"leakage-{attack}" if published else f"like-for-like-leakage-{attack}",
        f"{name}: leakage under {attack}, {which}",
        "leakage (TPR - FPR)",
        (*drawn, *lines),
        level,
        "plain network",
        coverage(name, with_attack) if published else "",
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
        tuple(
            _lines([*unproven, *alike], lambda each: (each.test_accuracy.value, each.test_accuracy.spread))
        ),
        None if plain is None else plain.test_accuracy.value,
        "plain network",
        "Equal (epsilon, delta)"
        + ("" if delta is None else f", delta = {delta:.3g}")
        + " for the stated number of answers; head and DP-SGD answer any number. Settings were chosen on public data"
        " sets beforehand, which is not charged. Algorithm 1: its own label, one answer, no guarantee.",
    )


def _lines(
    summaries: Sequence[Summary], value: Callable[[Summary], tuple[float, float | None]]
) -> list[Line]:
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
                tuple((each.epsilon or 0.0, *value(each)) for each in ordered),
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
            path = folder / f"{each.file_name}.{extension}"
            # The legend stands beside the axes; "tight" leaves as much room as it needs.
            canvas.savefig(path, dpi=150, bbox_inches="tight")
            written.append(path)
    return written


def write_stability_figure(summaries: Sequence[Summary], path: Path) -> None:
    """Draw OARO stability, accuracy gap and leakage of the plain networks against each other.

    The paper has the same figure; its points are drawn beside ours.
    """
    from matplotlib.figure import Figure as MatplotlibFigure

    canvas = MatplotlibFigure(figsize=(10.5, 3.6), layout="constrained")
    ours = stability_points(summaries)
    for axes, (first, second) in zip(canvas.subplots(1, 3), CORRELATED.values(), strict=True):
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


def _draw(axes: Any, figure: Figure) -> None:
    """Draw a figure on matplotlib axes."""
    for line in figure.lines:
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
    if figure.level is not None:
        axes.axhline(
            figure.level,
            color="#222222",
            linewidth=0.8,
            linestyle=":",
            label=f"{figure.level_name} (no guarantee)",
        )
    axes.set(xscale="log", xlabel="epsilon", ylabel=figure.axis)
    axes.set_title(figure.title, fontsize=9)
    axes.grid(alpha=0.25)
