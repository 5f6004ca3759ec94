"""`quietmax reproduce`: the paper's evaluation from our own code, compared with the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quietmax.cli._options import Names, RunOptions, listed, with_groups
from quietmax.cli._output import console, finish_run, print_json, print_table, print_written, progress_bar
from quietmax.errors import QuietmaxError, unknown_name

if TYPE_CHECKING:
    from quietmax.experiments.findings import Summary
    from quietmax.experiments.grid import Experiment
    from quietmax.experiments.report import ReportInfo, Table
    from quietmax.experiments.runner import Run

app = typer.Typer(
    no_args_is_help=True,
    help="""Reproduce the paper's tables and figures.

    Start with report: it shows everything from the stored run of this package and trains nothing. run trains again.
    """,
)

_TITLE = "The paper's evaluation again"
_EVERYTHING: tuple[Experiment, ...] = ("accuracy", "algorithm1", "dpsgd", "like-for-like")
_EXPERIMENTS: dict[str, tuple[Experiment, ...]] = {
    "sensitivities": (),
    "correlations": (),
    "own-correlations": ("accuracy",),
    "accuracy": ("accuracy",),
    "curves": ("algorithm1", "dpsgd"),
    "leakage": ("algorithm1", "dpsgd"),
    "multi-query": _EVERYTHING,
    "findings": _EVERYTHING,
}
"""The parts of the grid of trials that each table of the paper needs."""
_MEASUREMENTS = ("bounds", "alpha", "cifar")


@dataclass(frozen=True)
class _Selection:
    """What is shown, of which data sets."""

    tables: Annotated[
        list[str] | None,
        f"One or more of {', '.join(_EXPERIMENTS)}; and of our own measurements {', '.join(_MEASUREMENTS)}. Default: "
        "all but the measurements.",
    ] = None
    names: Names = None

    def chosen(self) -> tuple[list[str], list[str]]:
        """The names of the tables, by default those of the paper, and of the data sets."""
        from quietmax.data.registry import dataset

        chosen = list(dict.fromkeys(listed(self.tables))) or list(_EXPERIMENTS)
        for name in chosen:
            if name not in (*_EXPERIMENTS, *_MEASUREMENTS):
                raise unknown_name("table", name, (*_EXPERIMENTS, *_MEASUREMENTS))
        return chosen, [dataset(name).name for name in listed(self.names)]


@app.command("report")
@with_groups
def _report(
    *,
    selection: _Selection,
    results: Annotated[
        list[Path] | None,
        "Table of trials (trials.csv), may be repeated. Default: the full run of this package.",
    ] = None,
    output: Annotated[
        Path | None, "Folder to write to. Default: quietmax-results, or nothing with --tables."
    ] = None,
) -> None:
    """Show tables, and make a report with figures, from stored trials and measurements, without training anything.

    Examples:

    quietmax reproduce report --output paper

    quietmax reproduce report --tables sensitivities correlations
    """
    from quietmax.experiments.grid import STORED_TRIALS, read_trials
    from quietmax.experiments.report import ReportInfo, efforts
    from quietmax.experiments.runner import Run

    chosen, names = selection.chosen()
    stored = read_trials(results or [STORED_TRIALS])
    if not stored:
        raise QuietmaxError("There are no trials in the given files.")
    found = {
        trial: result for trial, result in stored.items() if not names or trial.group.source.name in names
    }
    measured = {name: _measurement(name).stored(names or None) for name in chosen if name in _MEASUREMENTS}
    info = None
    if selection.tables is None:
        output = output or Path("quietmax-results")
        info = ReportInfo(_TITLE, efforts(found), min((each.group.seed for each in found), default=0))
    _show(chosen, names, Run(found), measured, output, info)


@dataclass(frozen=True)
class _Grid(RunOptions):
    """How much of the evaluation is run again."""

    profile: Annotated[str, "quick (minutes), or paper (10 repeats, all shadow networks)."] = "quick"
    repeats: Annotated[int | None, "Repeats. Default: the profile's.", {"min": 1}] = None


@app.command("run")
@with_groups
def _run(*, selection: _Selection, grid: _Grid) -> None:
    """Run the paper's evaluation, or what some of its tables need, and write a report.

    Without --datasets, all data sets of the paper whose files are present. The command can be interrupted; the same
    command continues from there.

    Examples:

    quietmax reproduce run --profile quick

    quietmax reproduce run --tables curves --datasets location
    """
    from quietmax.experiments.grid import reproduction_trials
    from quietmax.experiments.paper import accuracy_table
    from quietmax.experiments.report import ReportInfo, efforts
    from quietmax.experiments.runner import Run

    chosen, named = selection.chosen()
    measured: dict[str, list[Any]] = {}
    for name in (each for each in chosen if each in _MEASUREMENTS):
        datasets = grid.available(named, _measurement(name).datasets)
        with progress_bar(name) as progress:
            measured[name] = _measurement(name).measured(
                datasets, grid.output, grid.data_dir, grid.seed, progress
            )
    needed = {part for name in chosen for part in _EXPERIMENTS.get(name, ())}
    if not needed:
        _show(chosen, named, Run({}), measured, grid.output)
        return
    datasets = grid.available(named, list(accuracy_table()))
    parts = [part for part in _EVERYTHING if part in needed]
    trials = reproduction_trials(
        datasets, grid.profile, experiments=parts, repeats=grid.repeats, seed=grid.seed
    )
    done = grid.run(trials)
    settings = f"Profile {grid.profile}: {efforts((*done.results, *done.failures))}"
    info = ReportInfo(_TITLE, settings, grid.seed, done.failed)
    _show(chosen, named, done, measured, grid.output, info)
    finish_run(done)


def _measurement(name: str) -> Any:
    from quietmax.experiments.measurements import MEASUREMENTS

    return MEASUREMENTS[name]


def _show(
    chosen: Sequence[str],
    datasets: Sequence[str],
    run: Run,
    measured: Mapping[str, Sequence[Any]],
    folder: Path | None,
    info: ReportInfo | None = None,
) -> None:
    """Show the chosen tables, and write them; or the report, if there is information for one."""
    from quietmax.experiments.findings import summarize
    from quietmax.experiments.grid import write_trials
    from quietmax.experiments.report import SEEDED_NOISE, comparison, paper_tables, write_report

    summaries = summarize(run.results)
    tables = {name: table for name, table in paper_tables(summaries).items() if name in chosen}
    if datasets and "sensitivities" in chosen:
        rows = [row for row in tables["sensitivities"].rows if row.dataset in datasets]
        tables["sensitivities"] = comparison("sensitivities", rows)
    ours = {name: _measurement(name).show(rows, datasets or None) for name, rows in measured.items()}
    written: list[Path] = []
    if folder is not None:
        written = [path for each in ours.values() for path in each.write(folder)]
        if info is None:
            written += [table.write(folder / "tables" / f"{name}.csv") for name, table in tables.items()]
        elif run.results:
            trials = write_trials(run.results, folder / "trials.csv")
            written += [trials, *write_report(summaries, folder, info)]
    document: dict[str, object] = {name: table.rows for name, table in tables.items()}
    document |= {name: each.document for name, each in ours.items()}
    if info is not None:
        failures = {str(trial): failure for trial, failure in run.failures.items()}
        document |= {"about": SEEDED_NOISE, "results": [each.flat() for each in summaries]}
        document |= {"computed": run.computed, "failures": failures}
    print_json({**document, "written": list(map(str, written))})
    if info is not None:
        _print_coverage(summaries)
    for table in (*tables.values(), *(each for found in ours.values() for each in found.tables)):
        _print_rows(table)
    print_written(written)


def _print_rows(table: Table) -> None:
    """Print a table; findings as sentences."""
    from quietmax.experiments.findings import Finding

    if table.rows and not isinstance(table.rows[0], Finding):
        caption = f"{table.caption}." if table.caption else None
        print_table(table.title, list(table.columns), table.lines, caption, prose=table.prose)
        return
    for each in table.rows:
        console.print(f"Finding {each.number}: {each.verdict.upper()}. {each.claim}\n  {each.evidence}")


def _print_coverage(summaries: Sequence[Summary]) -> None:
    from quietmax.experiments.findings import PAPER_SERIES
    from quietmax.experiments.report import coverage

    for name in dict.fromkeys(each.dataset for each in summaries):
        measured = [each for each in summaries if each.dataset == name and each.method in PAPER_SERIES]
        console.print(f"{name}: {coverage(name, measured)}")
