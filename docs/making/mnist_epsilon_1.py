"""Draws the README's picture from the figures of `results.md` and `choosing.md`: MNIST, 10,000 training records.

python docs/making/mnist_epsilon_1.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TARGET = Path(__file__).parents[1] / "pictures" / "mnist-epsilon-1.png"
PROVEN, NONE, PLAIN = "#0b7a6b", "#b23c28", "#607d8b"
# What, its accuracy on test digits, its colour: proven at (1, 1e-5) or pure epsilon 1, no guarantee, no privacy.
FIGURES = (
    ("ordinary network, no privacy", 0.953, PLAIN),
    ("private head, any number of queries", 0.971, PROVEN),
    ("teachers, 1 query", 0.976, PROVEN),
    ("teachers, 100 queries", 0.895, PROVEN),
    ("head per query, pure epsilon, 1 query", 0.963, PROVEN),
    ("head per query, pure epsilon, 10 queries", 0.863, PROVEN),
    ("Algorithm 1, Laplace, 1 query", 0.679, NONE),
    ("Algorithm 1, Laplace, 10 queries", 0.496, NONE),
)


def main() -> None:
    """Draw the picture."""
    figure, axes = plt.subplots(figsize=(8, 3.6))
    names = [name for name, _, _ in FIGURES][::-1]
    for row, (_, accuracy, colour) in enumerate(FIGURES[::-1]):
        style = {"facecolor": "white", "hatch": "////"} if colour == NONE else {"facecolor": colour}
        axes.barh(row, accuracy, edgecolor=colour, height=0.66, **style)
        axes.text(accuracy + 0.008, row, f"{accuracy:.3f}", va="center", fontsize=9)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_xlim(0, 1.1)
    axes.set_xlabel("accuracy on test digits")
    figure.suptitle(
        "MNIST, 10,000 training records, epsilon = 1 in total (delta 1e-5, or 0 where pure)", fontsize=10
    )
    axes.spines[["top", "right"]].set_visible(False)
    keys = (
        ("proven", PROVEN, {}),
        ("no guarantee", NONE, {"fill": False, "hatch": "////"}),
        ("no privacy", PLAIN, {}),
    )
    handles = [plt.Rectangle((0, 0), 1, 1, edgecolor=c, **({"facecolor": c} | s)) for _, c, s in keys]
    axes.legend(handles, [name for name, _, _ in keys], fontsize=8, loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(TARGET, dpi=130)


if __name__ == "__main__":
    main()
