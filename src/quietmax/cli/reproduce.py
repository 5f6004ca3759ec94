"""`quietmax reproduce`: the paper's evaluation from our own code, its numbers beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import typer

from quietmax.cli._grids import Output, Ray, Workers, compute, duration, finish, listed, where
from quietmax.cli._options import DataDir, Download, Json, Names, Seed, with_groups
from quietmax.cli._output import console, print_json, print_table, progress_bar
from quietmax.data.load import load_records
from quietmax.data.registry import dataset_status
from quietmax.errors import DataUnavailable
from quietmax.experiments import paper as reference
from quietmax.experiments.estimate import estimated_seconds
from quietmax.experiments.findings import Finding, ManyQueries, findings, multi_query
from quietmax.experiments.grid import Trial
from quietmax.experiments.paper import (
    TOLERANCE,
    Comparison,
    measure_accuracies,
    reproduce_correlations,
    reproduce_sensitivity_table,
)
from quietmax.experiments.profiles import PAPER_REPEATS, PARTS, Part, checked_profile, reproduction_cells
from quietmax.experiments.report import write_report
from quietmax.experiments.report.page import MANY_COLUMNS, SEEDED_NOISE, About, many_lines
from quietmax.experiments.runner import Run, usable_cores
from quietmax.experiments.summary import LOSS_TOLERANCE, accuracy_comparisons, curve_comparisons, summarise

ProfileName = Annotated[
    str, typer.Option("--profile", help="quick (minutes) or paper (10 repeats, all shadow networks).")
]

app = typer.Typer(help="Reproduce the paper's tables, its numbers beside ours.", no_args_is_help=True)


@dataclass(frozen=True)
class _Asked:
    """The options of a command that runs a grid, and the grid they ask for."""

    names: Names = None
    profile: ProfileName = "quick"
    repeats: Annotated[int | None, typer.Option(min=1, help="Repeats; default: the profile's.")] = None
    output: Output = Path("quietmax-results")
    workers: Workers = None
    ray: Ray = None
    data_dir: DataDir = None
    download: Download = False
    seed: Seed = 0
    as_json: Json = False

    @cached_property
    def chosen(self) -> list[str]:
        chosen = _chosen(self.names, self.data_dir, self.download)
        for name in chosen:
            if not dataset_status(name, self.data_dir).present:
                load_records(name, data_dir=self.data_dir, download=self.download)
        return chosen

    def trials(self, parts: Sequence[Part], profile: str | None = None) -> list[Trial]:
        return reproduction_cells(
            self.chosen, profile or self.profile, parts=parts, repeats=self.repeats, seed=self.seed
        )

    def compute(self, parts: Sequence[Part]) -> Run:
        place = where(self.workers, self.ray)
        return compute(self.trials(parts), self.output, place, self.data_dir, quiet=self.as_json)

    def about(self, done: Run) -> About:
        efforts = {trial.group.source.title: trial.group.effort for trial in (*done.results, *done.failures)}
        return About(
            "The paper's evaluation again",
            f"Profile {self.profile}: "
            + "; ".join(
                f"{name} {effort.records:,} records, {effort.shadows} shadow networks, {effort.epochs} epochs"
                for name, effort in efforts.items()
            ),
            self.seed,
            tuple(f"{trial}: {failure}" for trial, failure in done.failures.items()),
        )


@app.command("sensitivity-table")
def sensitivity_table(names: Names = None, as_json: Json = False) -> None:
    """The table of sensitivities, from the formulas.

    Example: quietmax reproduce sensitivity-table
    """
    _print(
        "Sensitivities", reproduce_sensitivity_table(listed(names) or None), as_json, "to the printed digits"
    )


@app.command("accuracy-table")
def accuracy_table(
    names: Names = None,
    profile: ProfileName = "paper",
    repeats: Annotated[
        int | None,
        typer.Option(help="Random splits to average over; default: 10, or 3 with --profile quick."),
    ] = None,
    data_dir: DataDir = None,
    download: Download = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Training and test accuracy with the original and the convexified loss, on the real data.

    Without --datasets, every data set of the paper whose files are present.

    Example: quietmax reproduce accuracy-table --datasets location --repeats 2
    """
    count = (3 if checked_profile(profile) == "quick" else PAPER_REPEATS) if repeats is None else repeats
    found = []
    for name in _chosen(names, data_dir, download):
        with progress_bar(f"{name}: {2 * count} networks", quiet=as_json) as progress:
            found.append(
                measure_accuracies(
                    name, repeats=count, data_dir=data_dir, download=download, seed=seed, progress=progress
                )
            )
    rows = [row for each in found for row in each.comparisons()]
    _print(f"Accuracy, mean of {count} splits", rows, as_json, f"within {TOLERANCE:g}")


@app.command()
def correlations(as_json: Json = False) -> None:
    """Correlations between OARO stability, accuracy gap and privacy leakage.

    Example: quietmax reproduce correlations
    """
    _print("Correlations", reproduce_correlations(), as_json, "to the printed digits")


@app.command()
@with_groups
def figures(asked: _Asked) -> None:
    """Accuracy loss and leakage of Algorithm 1 and published DP-SGD at the paper's eleven values of epsilon.

    Without --datasets, every data set of the paper whose files are present.

    Example: quietmax reproduce figures --datasets location
    """
    done = asked.compute(["algorithm1", "dpsgd"])
    summaries = summarise(done.results)
    _print(
        "Accuracy loss and leakage", curve_comparisons(summaries), asked.as_json, f"within {LOSS_TOLERANCE:g}"
    )
    finish(done, write_report(summaries, asked.output, asked.about(done)), quiet=asked.as_json)


@app.command("findings")
@with_groups
def findings_command(asked: _Asked) -> None:
    """The paper's five findings, each with a verdict from our own numbers.

    Example: quietmax reproduce findings --datasets location adult mnist
    """
    done = asked.compute(PARTS)
    found = findings(summarise(done.results))
    if asked.as_json:
        print_json([each.to_json() for each in found])
    else:
        _print_findings(found)
    finish(done, [], quiet=asked.as_json)


@app.command("multi-query")
@with_groups
def multi_query_command(asked: _Asked) -> None:
    """What a total epsilon gives for many answers, in both of the paper's readings, beside methods without a limit.

    Example: quietmax reproduce multi-query --datasets location
    """
    done = asked.compute(PARTS)
    rows = multi_query(summarise(done.results))
    if asked.as_json:
        print_json([row.to_json() for row in rows])
    else:
        _print_multi_query(rows)
    finish(done, [], quiet=asked.as_json)


@app.command("all")
@with_groups
def everything(
    *,
    asked: _Asked,
    estimate_only: Annotated[
        bool, typer.Option("--estimate", help="Only say how long both profiles would take here.")
    ] = False,
) -> None:
    """Every table and figure of the paper's evaluation on every data set that is present, and a report.

    Can be stopped at any time; the same command goes on from there.

    Example: quietmax reproduce all --profile quick
    """
    estimates = _estimates(asked)
    if estimate_only:
        if asked.as_json:
            print_json(estimates)
        return
    done = asked.compute(PARTS)
    summaries = summarise(done.results)
    about = asked.about(done)
    written = write_report(summaries, asked.output, about)
    found, many = findings(summaries), multi_query(summaries)
    if asked.as_json:
        print_json(
            {
                "sensitivity": [row.to_json() for row in reproduce_sensitivity_table()],
                "correlations": [row.to_json() for row in reproduce_correlations()],
                "accuracy": [row.to_json() for row in accuracy_comparisons(summaries)],
                "figures": [row.to_json() for row in curve_comparisons(summaries)],
                "findings": [each.to_json() for each in found],
                "multi_query": [row.to_json() for row in many],
                "about": SEEDED_NOISE,
                "results": [each.flat() for each in summaries],
                "estimates": estimates,
                "computed": done.computed,
                "failures": {str(trial): failure for trial, failure in done.failures.items()},
                "written": [str(path) for path in written],
            }
        )
    else:
        _print("Sensitivities", reproduce_sensitivity_table(), False, "to the printed digits")
        _print("Correlations", reproduce_correlations(), False, "to the printed digits")
        _print("Plain networks", accuracy_comparisons(summaries), False, "within 0.02 (leakage 0.04)")
        _print("Figures", curve_comparisons(summaries), False, f"within {LOSS_TOLERANCE:g}")
        _print_findings(found)
        _print_multi_query(many)
    finish(done, written, quiet=asked.as_json)


def _estimates(asked: _Asked) -> dict[str, float]:
    """Hours of one core for both profiles, measured at the start; printed with the time on these cores."""
    cores = asked.workers or usable_cores()
    found = {}
    if not asked.as_json:
        console.print("Measuring this machine's speed for an estimate ...", highlight=False)
    for profile in ("quick", "paper"):
        trials = asked.trials(PARTS, profile)
        found[profile] = sum(estimated_seconds(trials, data_dir=asked.data_dir).values()) / 3600
        if not asked.as_json:
            console.print(
                f"Estimate, profile {profile}: {found[profile]:.1f} core hours, about "
                f"{duration(3600 * found[profile] / cores)} with {cores} workers.",
                highlight=False,
            )
    return found


def _print_findings(found: Sequence[Finding]) -> None:
    for each in found:
        console.print(
            f"Finding {each.number}: {each.verdict.upper()}. {each.claim}\n  {each.evidence}",
            markup=False,
            highlight=False,
        )


def _print_multi_query(rows: Sequence[ManyQueries]) -> None:
    print_table(
        "Many answers from one total",
        MANY_COLUMNS,
        many_lines(rows),
        caption="Algorithm 1 has no guarantee. * below the smallest measured epsilon: the value there.",
    )


def _chosen(names: list[str] | None, data_dir: Path | None, download: bool) -> list[str]:
    chosen = listed(names) or [
        name for name in reference.accuracy_table() if download or dataset_status(name, data_dir).present
    ]
    if not chosen:
        raise DataUnavailable(
            "None of the paper's data sets is present; run 'quietmax datasets' to see what to fetch."
        )
    return chosen


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
