"""`quietmax reproduce`: the paper's evaluation from our own code, compared with the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quietmax.cli._grids import Output, WorkerCount, duration, finish, listed, run_with_progress
from quietmax.cli._options import DataDir, Download, Json, Names, Ray, Seed, with_groups
from quietmax.cli._output import console, print_json, print_table
from quietmax.cli._tables import alpha, architectures, bounds_table, cifar
from quietmax.errors import DataUnavailable, QuietmaxError

if TYPE_CHECKING:
    from quietmax.experiments.findings import Finding, Leakage, MultiQuery
    from quietmax.experiments.grid import Experiment, Trial
    from quietmax.experiments.paper import Comparison
    from quietmax.experiments.report import ReportInfo
    from quietmax.experiments.results import Result
    from quietmax.experiments.runner import Run
    from quietmax.experiments.summary import Summary

app = typer.Typer(
    no_args_is_help=True,
    help="""Reproduce the paper's tables and figures.

    Start with report: it shows everything from the stored run of this package and trains nothing. all runs the
    evaluation again; the other commands run or show a part of it.
    """,
)

app.command("bounds-table")(bounds_table)
app.command("architectures")(architectures)
app.command("alpha")(alpha)
app.command("cifar")(cifar)

_PRINTED = "to the printed digits"
Results = Annotated[
    list[Path] | None,
    typer.Option(
        help="Table of trials (trials.csv), may be repeated. Default: the full run of this package."
    ),
]


@dataclass(frozen=True)
class _GridOptions:
    """The options of a command that runs trials, and the trials they select."""

    names: Names = None
    profile: Annotated[
        str, typer.Option(help="quick (minutes), or paper (10 repeats, all shadow networks).")
    ] = "quick"
    repeats: Annotated[int | None, typer.Option(min=1, help="Repeats. Default: the profile's.")] = None
    output: Output = Path("quietmax-results")
    workers: WorkerCount = None
    ray: Ray = None
    data_dir: DataDir = None
    download: Download = False
    stand_ins: Annotated[
        bool,
        typer.Option(
            "--stand-ins",
            help="Where files are missing, run a stand-in: generated records of the same shape, named NAME-stand-in. "
            "They are not compared with the paper.",
        ),
    ] = False
    seed: Seed = 0
    as_json: Json = False

    @cached_property
    def datasets(self) -> list[str]:
        """The chosen data sets, by default those of the paper whose files are present."""
        from quietmax.data.load import load_records
        from quietmax.data.registry import dataset_status, stand_in_for
        from quietmax.experiments.paper import accuracy_table

        def present(name: str) -> bool:
            return dataset_status(name, self.data_dir).present

        def chosen_for(name: str) -> str:
            replaced = self.stand_ins and not self.download and not present(name)
            return (stand_in_for(name) if replaced else None) or name

        given = [chosen_for(name) for name in listed(self.names) or accuracy_table()]
        chosen = [name for name in given if self.names or self.download or present(name)]
        if not chosen:
            raise DataUnavailable(
                "No data set of the paper is present. 'quietmax datasets' lists where their files come from."
            )
        for name in chosen:
            if not present(name):
                load_records(name, data_dir=self.data_dir, download=self.download)
        return chosen

    def trials(self, experiments: Sequence[Experiment], profile: str | None = None) -> list[Trial]:
        from quietmax.experiments.grid import reproduction_trials

        return reproduction_trials(
            self.datasets,
            profile or self.profile,
            experiments=experiments,
            repeats=self.repeats,
            seed=self.seed,
        )

    def run(self, experiments: Sequence[Experiment]) -> Run:
        return run_with_progress(
            self.trials(experiments),
            self.output,
            workers=self.workers,
            ray=self.ray,
            data_dir=self.data_dir,
            quiet=self.as_json,
        )

    def info(self, done: Run) -> ReportInfo:
        from quietmax.experiments.report import ReportInfo, efforts

        return ReportInfo(
            "The paper's evaluation again",
            f"Profile {self.profile}: {efforts((*done.results, *done.failures))}",
            self.seed,
            tuple(f"{trial}: {failure}" for trial, failure in done.failures.items()),
        )


@app.command("sensitivity-table")
def sensitivity_table(names: Names = None, as_json: Json = False) -> None:
    """Compute the table of sensitivities from the formulas.

    Example: quietmax reproduce sensitivity-table
    """
    from quietmax.experiments.paper import reproduce_sensitivity_table

    _print_comparisons("Sensitivities", reproduce_sensitivity_table(listed(names) or None), _PRINTED, as_json)


@app.command()
def correlations(results: Results = None, as_json: Json = False) -> None:
    """Compute the correlations between OARO stability, accuracy gap and privacy leakage.

    First from the paper's own table, then from our networks in a table of trials.

    Example: quietmax reproduce correlations
    """
    from quietmax.experiments.findings import own_correlations
    from quietmax.experiments.paper import reproduce_correlations
    from quietmax.experiments.summary import summarize

    printed, ours = reproduce_correlations(), own_correlations(summarize(_read_results(results)))
    if as_json:
        print_json({"paper": [row.to_json() for row in printed], "ours": [row.to_json() for row in ours]})
        return
    _print_comparisons("Correlations of the paper's own numbers", printed, _PRINTED)
    _print_comparisons("Correlations of our numbers", ours, "in sign and significance")


@app.command()
def report(results: Results = None, output: Output = Path("quietmax-results"), as_json: Json = False) -> None:
    """Make all tables and figures from a table of trials, without training anything.

    Example: quietmax reproduce report --output paper
    """
    from quietmax.experiments.report import ReportInfo, efforts
    from quietmax.experiments.results import write_trials

    found = _read_results(results)
    info = ReportInfo(
        "The paper's evaluation again", efforts(found), seed=min(each.group.seed for each in found)
    )
    write_trials(found, output / "trials.csv")
    _write_everything(found, output, info, as_json)


@app.command("accuracy-table")
@with_groups
def accuracy_table(*, grid: _GridOptions) -> None:
    """Measure training and test accuracy with both losses, and the leakage of the network.

    Without --datasets, all data sets of the paper whose files are present.

    Example: quietmax reproduce accuracy-table --datasets location
    """
    from quietmax.experiments.findings import accuracy_comparisons
    from quietmax.experiments.report import write_comparisons
    from quietmax.experiments.summary import summarize

    done = grid.run(["accuracy"])
    rows = accuracy_comparisons(summarize(done.results))
    _print_comparisons("Accuracy and leakage of the network", rows, _accuracy_tolerance(), grid.as_json)
    finish(done, [write_comparisons(rows, grid.output / "tables" / "accuracy.csv")], quiet=grid.as_json)


@app.command()
@with_groups
def figures(*, grid: _GridOptions) -> None:
    """Measure accuracy loss and leakage of Algorithm 1 and published DP-SGD at the paper's values of epsilon.

    Without --datasets, all data sets of the paper whose files are present.

    Example: quietmax reproduce figures --datasets location
    """
    from quietmax.experiments.findings import CURVE_TOLERANCE, curve_comparisons
    from quietmax.experiments.report import write_report
    from quietmax.experiments.summary import summarize

    done = grid.run(["algorithm1", "dpsgd"])
    summaries = summarize(done.results)
    rows = curve_comparisons(summaries)
    _print_comparisons("Accuracy loss and leakage", rows, f"within {CURVE_TOLERANCE:g}", grid.as_json)
    if not grid.as_json:
        _print_coverage(summaries)
    finish(done, write_report(summaries, grid.output, grid.info(done)), quiet=grid.as_json)


@app.command("findings")
@with_groups
def findings_command(*, grid: _GridOptions) -> None:
    """Judge the paper's five findings from our own numbers.

    Example: quietmax reproduce findings --datasets location adult mnist
    """
    from quietmax.experiments.findings import findings
    from quietmax.experiments.grid import EXPERIMENTS
    from quietmax.experiments.summary import summarize

    done = grid.run(EXPERIMENTS)
    found = findings(summarize(done.results))
    if grid.as_json:
        print_json([each.to_json() for each in found])
    else:
        _print_findings(found)
    finish(done, [], quiet=grid.as_json)


@app.command("multi-query")
@with_groups
def multi_query_command(*, grid: _GridOptions) -> None:
    """Compute what one budget gives for many answers, under both of the paper's analyses.

    Methods that answer any number of queries are shown for comparison.

    Example: quietmax reproduce multi-query --datasets location
    """
    from quietmax.experiments.findings import multi_query
    from quietmax.experiments.grid import EXPERIMENTS
    from quietmax.experiments.summary import summarize

    done = grid.run(EXPERIMENTS)
    rows = multi_query(summarize(done.results))
    if grid.as_json:
        print_json([row.to_json() for row in rows])
    else:
        _print_multi_query(rows)
    finish(done, [], quiet=grid.as_json)


@app.command("all")
@with_groups
def everything(
    *,
    grid: _GridOptions,
    estimate_only: Annotated[
        bool, typer.Option("--estimate", help="Only estimate how long both profiles would take here.")
    ] = False,
) -> None:
    """Run the paper's evaluation on all data sets that are present, and write a report.

    The command can be interrupted; the same command continues from there.

    Example: quietmax reproduce all --profile quick
    """
    estimates = _estimate(grid)
    if estimate_only:
        if grid.as_json:
            print_json(estimates)
        return
    _run_everything(grid, estimates)


def _run_everything(grid: _GridOptions, estimates: dict[str, float]) -> None:
    from quietmax.experiments.grid import EXPERIMENTS
    from quietmax.experiments.results import write_trials

    done = grid.run(EXPERIMENTS)
    more = {
        "estimates": estimates,
        "computed": done.computed,
        "failures": {str(trial): failure for trial, failure in done.failures.items()},
    }
    if done.results:
        write_trials(done.results, grid.output / "trials.csv")
    _write_everything(done.results, grid.output, grid.info(done), grid.as_json, more)
    finish(done, [], quiet=grid.as_json)


def _write_everything(
    results: Mapping[Trial, Result],
    output: Path,
    info: ReportInfo,
    as_json: bool,
    more: Mapping[str, object] | None = None,
) -> None:
    """Write the report of an evaluation, and print its tables."""
    from quietmax.experiments import findings as ours
    from quietmax.experiments.report import SEEDED_NOISE, paper_comparisons, write_report
    from quietmax.experiments.summary import summarize

    summaries = summarize(results)
    written = write_report(summaries, output, info)
    if results:
        written.insert(0, output / "trials.csv")
    tables = paper_comparisons(summaries)
    found, many, leaks = ours.findings(summaries), ours.multi_query(summaries), ours.leakages(summaries)
    if as_json:
        print_json(
            {
                **{name: [row.to_json() for row in rows] for name, (_, rows) in tables.items()},
                "findings": [each.to_json() for each in found],
                "leakage": [row.to_json() for row in leaks],
                "multi_query": [row.to_json() for row in many],
                "about": SEEDED_NOISE,
                "results": [each.flat() for each in summaries],
                "written": [str(path) for path in written],
                **(more or {}),
            }
        )
        return
    _print_coverage(summaries)
    for title, rows in tables.values():
        _print_comparisons(title.partition(" (")[0], rows, f"({title.partition(' (')[2]}")
    _print_leakages(leaks)
    _print_findings(found)
    _print_multi_query(many)
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True)


def _read_results(paths: list[Path] | None) -> dict[Trial, Result]:
    """Read tables of trials; by default the one that the package carries."""
    from quietmax.experiments.results import STORED_TRIALS, read_trials

    found = read_trials(paths or [STORED_TRIALS])
    if not found:
        raise QuietmaxError("There are no trials in the given files.")
    return found


def _estimate(grid: _GridOptions) -> dict[str, float]:
    """Measure this machine's speed; return and print the core hours of both profiles, and the memory of a worker."""
    from quietmax.experiments.estimate import estimated_bytes, estimated_seconds
    from quietmax.experiments.grid import EXPERIMENTS
    from quietmax.experiments.workers import usable_cores

    cores = grid.workers or usable_cores()
    hours = {}
    if not grid.as_json:
        console.print("Measuring the speed of this machine ...")
    for profile in ("quick", "paper"):
        trials = grid.trials(EXPERIMENTS, profile)
        seconds = sum(estimated_seconds(trials, data_dir=grid.data_dir).values())
        memory = estimated_bytes(trials, data_dir=grid.data_dir) / 2**30
        hours[profile], hours[f"{profile}_gib_per_worker"] = seconds / 3600, memory
        if not grid.as_json:
            console.print(
                f"Estimate for profile {profile}: {hours[profile]:.1f} core hours, about {duration(seconds / cores)} "
                f"with {cores} workers of {memory:.1f} GiB each."
            )
    return hours


def _accuracy_tolerance() -> str:
    from quietmax.experiments.findings import ACCURACY_TOLERANCE, CURVE_TOLERANCE

    return f"within {ACCURACY_TOLERANCE:g} (leakage {CURVE_TOLERANCE:g})"


def _print_comparisons(title: str, rows: Sequence[Comparison], tolerance: str, as_json: bool = False) -> None:
    from quietmax.experiments.report import comparison_table

    if as_json:
        print_json([row.to_json() for row in rows])
        return
    print_table(
        title,
        *comparison_table(rows),
        caption=f"{sum(row.agrees for row in rows)} of {len(rows)} agree {tolerance}.",
    )


def _print_coverage(summaries: Sequence[Summary]) -> None:
    from quietmax.experiments.figures import coverage
    from quietmax.experiments.summary import PAPER_SERIES

    for name in dict.fromkeys(each.dataset for each in summaries):
        measured = [each for each in summaries if each.dataset == name and each.method in PAPER_SERIES]
        console.print(f"{name}: {coverage(name, measured)}")


def _print_leakages(rows: Sequence[Leakage]) -> None:
    from quietmax.experiments.report import LEAKAGE_COLUMNS, leakage_lines

    agree = sum(row.verdict == "agrees" for row in rows)
    print_table(
        "Leakage",
        LEAKAGE_COLUMNS,
        leakage_lines(rows),
        caption=f"{agree} of {len(rows)} agree. train - test: the leakage of calling right answers members.",
    )


def _print_findings(found: Sequence[Finding]) -> None:
    for each in found:
        console.print(f"Finding {each.number}: {each.verdict.upper()}. {each.claim}\n  {each.evidence}")


def _print_multi_query(rows: Sequence[MultiQuery]) -> None:
    from quietmax.experiments.report import MULTI_QUERY_COLUMNS, multi_query_lines

    print_table(
        "Many answers from one budget",
        MULTI_QUERY_COLUMNS,
        multi_query_lines(rows),
        caption="Algorithm 1 has no guarantee. * below the smallest measured epsilon: the value there.",
    )
