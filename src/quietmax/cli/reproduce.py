"""`quietmax reproduce`: the paper's tables from our own code, its numbers beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from quietmax.cli.options import DataDir, Download, Json, Names, Seed
from quietmax.cli.output import print_json, print_table, progress_bar
from quietmax.data import status
from quietmax.errors import DataUnavailable
from quietmax.experiments import reference
from quietmax.experiments.accuracy_loss import TOLERANCE as LOSS_TOLERANCE
from quietmax.experiments.accuracy_loss import measure_accuracy_loss
from quietmax.experiments.accuracy_table import TOLERANCE, measure_accuracies
from quietmax.experiments.comparison import Comparison
from quietmax.experiments.correlation import reproduce_correlations
from quietmax.experiments.sensitivity_table import reproduce_sensitivity_table

app = typer.Typer(help="Reproduce the paper's tables, its numbers beside ours.", no_args_is_help=True)


@app.command("sensitivity-table")
def sensitivity_table(names: Names = None, as_json: Json = False) -> None:
    """The table of sensitivities, from the formulas.

    Example: quietmax reproduce sensitivity-table
    """
    _print("Sensitivities", reproduce_sensitivity_table(_listed(names)), as_json, "to the printed digits")


@app.command("accuracy-table")
def accuracy_table(
    names: Names = None,
    repeats: Annotated[
        int, typer.Option(help="Random splits to average over; the paper's number is 10.")
    ] = 10,
    data_dir: DataDir = None,
    download: Download = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Training and test accuracy with the original and the convexified loss, on the real data.

    Without --datasets, every data set of the paper whose files are present.

    Example: quietmax reproduce accuracy-table --datasets mnist location adult --repeats 10
    """
    found = []
    for name in _chosen(names, data_dir, download):
        with progress_bar(f"{name}: {2 * repeats} networks", quiet=as_json) as progress:
            found.append(
                measure_accuracies(
                    name, repeats=repeats, data_dir=data_dir, download=download, seed=seed, progress=progress
                )
            )
    rows = [row for each in found for row in each.comparisons()]
    _print(f"Accuracy, mean of {repeats} splits", rows, as_json, f"within {TOLERANCE:g}")


@app.command()
def correlations(as_json: Json = False) -> None:
    """Correlations between OARO stability, accuracy gap and privacy leakage.

    Example: quietmax reproduce correlations
    """
    _print("Correlations", reproduce_correlations(), as_json, "to the printed digits")


@app.command()
def figures(
    names: Names = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="Networks to average over; the paper's number is 10.")
    ] = 10,
    data_dir: DataDir = None,
    download: Download = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Algorithm 1's accuracy loss at the paper's eleven values of epsilon, both noises.

    Without --datasets, every data set of the paper whose files are present.

    Example: quietmax reproduce figures --datasets location mnist
    """
    rows = []
    for name in _chosen(names, data_dir, download):
        with progress_bar(f"{name}: {repeats} networks", quiet=as_json) as progress:
            curves = measure_accuracy_loss(
                name, repeats=repeats, data_dir=data_dir, download=download, seed=seed, progress=progress
            )
        rows += [row for curve in curves for row in curve.comparisons()]
    _print(f"Accuracy loss of Algorithm 1, mean of {repeats}", rows, as_json, f"within {LOSS_TOLERANCE:g}")


def _chosen(names: list[str] | None, data_dir: Path | None, download: bool) -> list[str]:
    chosen = _listed(names) or [
        name for name in reference.accuracy_table() if download or status(name, data_dir).present
    ]
    if not chosen:
        raise DataUnavailable(
            "None of the paper's data sets is present; run 'quietmax datasets' to see what to fetch."
        )
    return chosen


def _listed(names: list[str] | None) -> list[str] | None:
    return [part for name in names for part in name.split(",") if part] if names else None


def _print(title: str, rows: Sequence[Comparison], as_json: bool, tolerance: str) -> None:
    if as_json:
        print_json([row.to_json() for row in rows])
        return
    spread = any(row.spread is not None for row in rows)
    print_table(
        title,
        ("of", "quantity", "paper", "ours", *(["spread"] if spread else []), "difference", "agrees"),
        (
            (
                row.dataset,
                row.quantity,
                f"{row.paper:.4f}",
                f"{row.ours:.4f}",
                *([f"{row.spread:.4f}" if row.spread is not None else ""] if spread else []),
                f"{row.difference:+.4f}",
                "yes" if row.agrees else "no" + (f" ({row.note})" if row.note else ""),
            )
            for row in rows
        ),
        caption=f"{sum(row.agrees for row in rows)} of {len(rows)} agree {tolerance}.",
    )
