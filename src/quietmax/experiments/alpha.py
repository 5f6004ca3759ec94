"""The constant alpha of the convexified loss: accuracy and leakage on the grid that the paper searched.

The paper takes the grid (0, 10] in steps of 0.5 and an alpha with "(almost) the same" training and test accuracy as
the original loss. How alpha changes the leakage it leaves as future work. Here every alpha is a group of trials of the
common grid: a network, its shadow networks and two attacks, on the same splits for all alphas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quietmax.data.registry import dataset
from quietmax.experiments.grid import DataSource, Effort, Group, Trial
from quietmax.experiments.paper import correlate
from quietmax.experiments.results import Result
from quietmax.experiments.summary import Mean
from quietmax.models.training import PAPER_GRID, AlphaTrial, alpha_trial, choose_alpha

STORED = "alpha.csv"
ATTACKS = ("shadow", "threshold")


@dataclass(frozen=True)
class Sweep:
    """How much work goes into one data set."""

    repeats: int  # Number of splits
    shadows: int  # Shadow networks per alpha and split; 0 for no attack
    attack_epochs: int  # Epochs of the attack networks
    records: int | None = None  # Training records; by default the data set's
    epochs: int = 100  # Epochs of the networks; by default the paper's
    alphas: tuple[float, ...] | None = None  # The values of alpha; by default the paper's grid


COARSE_GRID = (0.5, 1.0, 2.0, 5.0, 10.0)
"""The values of alpha on CIFAR, where a network takes half a minute."""
_SWEEPS = {
    "location": Sweep(3, 10, 50),
    "adult": Sweep(3, 5, 10),
    "mnist": Sweep(1, 4, 20),
    "cifar-10": Sweep(1, 0, 0, alphas=COARSE_GRID),
    "cifar-100": Sweep(1, 0, 0, alphas=COARSE_GRID),
}
_OTHERWISE = Sweep(1, 4, 20)


@dataclass(frozen=True)
class AlphaRow:
    """One loss on one data set, averaged over the repeats."""

    dataset: str  # Name of the data set
    alpha: float | None  # Constant of the convexified loss; None for the original loss, the cross-entropy
    repeats: int  # Number of splits
    shadows: int  # Shadow networks per alpha and split
    train_accuracy: float  # Accuracy on members and non-members
    train_spread: float | None  # Standard deviations over the repeats; None for a single one
    test_accuracy: float
    test_spread: float | None
    shadow_leakage: float | None = None
    shadow_spread: float | None = None
    threshold_leakage: float | None = None
    threshold_spread: float | None = None

    @property
    def gap(self) -> float:
        """Training accuracy minus test accuracy."""
        return self.train_accuracy - self.test_accuracy

    def to_json(self) -> dict[str, Any]:
        """Return all fields and the gap."""
        return asdict(self) | {"gap": self.gap}


def alpha_trials(
    names: Sequence[str],
    *,
    alphas: Sequence[float] | None = None,
    repeats: int | None = None,
    seed: int = 0,
) -> list[Trial]:
    """Return one trial per data set, alpha and repeat, and one of the original loss per repeat."""
    trials = []
    for name in names:
        sweep, source = _SWEEPS.get(name, _OTHERWISE), DataSource.of(name)
        attacks = ATTACKS if sweep.shadows else ()
        for repeat in range(sweep.repeats if repeats is None else repeats):
            groups = [
                Group(
                    source,
                    Effort(
                        sweep.records or dataset(name).records,
                        sweep.shadows,
                        alpha,
                        sweep.epochs,
                        attack_epochs=sweep.attack_epochs,
                        attacks=attacks,
                    ),
                    repeat,
                    seed,
                )
                for alpha in alphas or sweep.alphas or PAPER_GRID
            ]
            trials += [Trial(groups[0], "original"), *(Trial(group, "plain") for group in groups)]
    return trials


def alpha_rows(results: Mapping[Trial, Result]) -> list[AlphaRow]:
    """Average the results of `alpha_trials` over the repeats."""
    found: dict[tuple[str, float | None], list[tuple[Trial, Result]]] = {}
    for trial, result in results.items():
        alpha = None if trial.method == "original" else trial.group.effort.alpha
        found.setdefault((trial.group.source.title, alpha), []).append((trial, result))
    names = list(dict.fromkeys(name for name, _ in found))
    order = sorted(found, key=lambda key: (names.index(key[0]), key[1] or 0.0))
    return [_averaged(name, alpha, found[name, alpha]) for name, alpha in order]


def _averaged(name: str, alpha: float | None, trials: Sequence[tuple[Trial, Result]]) -> AlphaRow:
    results = [result for _, result in trials]
    train = Mean.of([result["train_accuracy"] for result in results])
    test = Mean.of([result["test_accuracy"] for result in results])
    leakages: list[Mean | None] = [
        Mean.of([result["attacks"][attack]["leakage"]["value"] for result in results])
        if all(attack in result["attacks"] for result in results)
        else None
        for attack in ATTACKS
    ]
    measured = [(None, None) if mean is None else (mean.value, mean.spread) for mean in leakages]
    return AlphaRow(
        name,
        alpha,
        len(results),
        trials[0][0].group.effort.shadows,
        train.value,
        train.spread,
        test.value,
        test.spread,
        *measured[0],
        *measured[1],
    )


@dataclass(frozen=True)
class AlphaChoice:
    """What the rows of one data set say about the choice of alpha."""

    dataset: str  # Name of the data set
    trials: tuple[AlphaTrial, ...]
    chosen: float  # The alpha that the rule of `choose_alpha` picks from them
    paper: float  # The data set's alpha: the paper's, where it has one
    shadow_correlation: float | None
    threshold_correlation: float | None

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)


def alpha_choices(rows: Sequence[AlphaRow]) -> list[AlphaChoice]:
    """Apply the rule of the search to measured rows, and correlate alpha with the leakage."""
    choices = []
    for name in dict.fromkeys(row.dataset for row in rows):
        mine = [row for row in rows if row.dataset == name]
        original = next(row for row in mine if row.alpha is None)
        tried = {row.alpha: row for row in mine if row.alpha is not None}
        trials = tuple(
            alpha_trial(
                alpha,
                (row.train_accuracy, row.test_accuracy),
                (original.train_accuracy, original.test_accuracy),
            )
            for alpha, row in tried.items()
        )
        shadow, threshold = (
            _correlation(list(tried), [getattr(row, f"{attack}_leakage") for row in tried.values()])
            for attack in ATTACKS
        )
        choices.append(
            AlphaChoice(name, trials, choose_alpha(trials), dataset(name).alpha, shadow, threshold)
        )
    return choices


def _correlation(alphas: Sequence[float], leakages: Sequence[float | None]) -> float | None:
    known = [each for each in leakages if each is not None]
    if len(known) < max(3, len(leakages)):
        return None
    return correlate(alphas, known).spearman


def write_alpha_figures(
    rows: Sequence[AlphaRow], folder: Path, formats: Sequence[str] = ("png", "pdf")
) -> list[Path]:
    """Draw accuracy and leakage over alpha, one figure per data set."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for choice in alpha_choices(rows):
        mine = [row for row in rows if row.dataset == choice.dataset]
        canvas = Figure(figsize=(8.4, 3.4), layout="constrained")
        axes = canvas.subplots(1, 2)
        _draw_accuracy(axes[0], mine, choice)
        _draw_leakage(axes[1], mine)
        for extension in formats:
            path = folder / f"alpha-{choice.dataset}.{extension}"
            canvas.savefig(path, dpi=150)
            written.append(path)
    return written


def _draw_accuracy(axes: Any, rows: Sequence[AlphaRow], choice: AlphaChoice) -> None:
    original = next(row for row in rows if row.alpha is None)
    for part, colour in (("train", "#3d5a80"), ("test", "#b4431f")):
        _draw_line(
            axes,
            rows,
            f"{part}_accuracy",
            f"{part}_spread",
            colour,
            f"{part}ing" if part == "train" else part,
        )
        level = getattr(original, f"{part}_accuracy")
        axes.axhline(level, color=colour, linewidth=0.8, linestyle=":", label=f"{part}, original loss")
    axes.axvline(
        choice.paper, color="#222222", linewidth=0.6, linestyle="--", label=f"the paper's {choice.paper:g}"
    )
    axes.set(xlabel="alpha", ylabel="accuracy")
    axes.set_title(f"{choice.dataset}: accuracy", fontsize=9)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=6.5, frameon=False)


def _draw_leakage(axes: Any, rows: Sequence[AlphaRow]) -> None:
    for attack, colour in zip(ATTACKS, ("#0b6e4f", "#7b3fa0"), strict=True):
        _draw_line(axes, rows, f"{attack}_leakage", f"{attack}_spread", colour, f"{attack} attack")
    _draw_line(axes, rows, "gap", None, "#888888", "training minus test accuracy")
    axes.set(xlabel="alpha", ylabel="TPR - FPR")
    axes.set_title("leakage without noise", fontsize=9)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=6.5, frameon=False)


def _draw_line(
    axes: Any, rows: Sequence[AlphaRow], value: str, spread: str | None, colour: str, name: str
) -> None:
    known = [row for row in rows if row.alpha is not None and getattr(row, value) is not None]
    if not known:
        return
    alphas = [row.alpha for row in known]
    values = np.array([getattr(row, value) for row in known])
    axes.plot(alphas, values, color=colour, marker="o", markersize=2.5, linewidth=1.3, label=name)
    if spread is not None:
        spreads = np.array([getattr(row, spread) or 0.0 for row in known])
        axes.fill_between(alphas, values - spreads, values + spreads, color=colour, alpha=0.15, linewidth=0)
