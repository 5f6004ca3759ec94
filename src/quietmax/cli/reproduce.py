"""`quietmax reproduce`: the paper's evaluation from our own code, compared with the paper's numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quietmax.cli._options import DataDir, Json, Names, Output, RunOptions, Seed, listed, with_groups
from quietmax.cli._output import console, finish_run, print_json, print_table, print_written, progress_bar
from quietmax.errors import DataUnavailable, QuietmaxError

if TYPE_CHECKING:
    from quietmax.experiments.findings import Summary
    from quietmax.experiments.grid import Experiment, Result, Trial
    from quietmax.experiments.report import ReportInfo, Table
    from quietmax.experiments.runner import Run

app = typer.Typer(
    no_args_is_help=True,
    help="""Reproduce the paper's tables and figures.

    Start with report: it shows everything from the stored run of this package and trains nothing. all runs the
    evaluation again; the other commands run or show a part of it.
    """,
)

_TITLE = "The paper's evaluation again"
_EVERYTHING: tuple[Experiment, ...] = ("accuracy", "algorithm1", "dpsgd", "like-for-like")
Results = Annotated[
    list[Path] | None,
    typer.Option(
        help="Table of trials (trials.csv), may be repeated. Default: the full run of this package."
    ),
]


def _available(
    given: Sequence[str], otherwise: Sequence[str], data_dir: Path | None, download: bool = False
) -> list[str]:
    """The given data sets, whose files must be there; if none is given, those of the others that are present."""
    from quietmax.data.registry import dataset_status, load_records

    present = {name: dataset_status(name, data_dir).present for name in given or otherwise}
    chosen = list(given) or [name for name in otherwise if download or present[name]]
    if not chosen:
        raise DataUnavailable(
            f"None of {', '.join(otherwise)} is present. 'quietmax datasets' lists where their files come from."
        )
    for name in chosen:
        if not present[name]:
            load_records(name, data_dir=data_dir, download=download)
    return chosen


# --- tables of the paper that need no data, and the report of stored trials ---------------------------------------


@app.command("sensitivity-table")
def _sensitivity_table(names: Names = None, as_json: Json = False) -> None:
    """Compute the table of sensitivities from the formulas.

    Example: quietmax reproduce sensitivity-table
    """
    from quietmax.experiments.paper import reproduce_sensitivity_table
    from quietmax.experiments.report import comparison

    rows = reproduce_sensitivity_table(listed(names) or None)
    _show([comparison("sensitivities", rows)], rows, as_json)


@app.command("correlations")
def _correlations(results: Results = None, as_json: Json = False) -> None:
    """Compute the correlations between OARO stability, accuracy gap and privacy leakage.

    First from the paper's own table, then from our networks in a table of trials.

    Example: quietmax reproduce correlations
    """
    from quietmax.experiments.findings import own_correlations, summarize
    from quietmax.experiments.paper import reproduce_correlations
    from quietmax.experiments.report import comparison

    printed, ours = reproduce_correlations(), own_correlations(summarize(_read_results(results)))
    tables = [comparison("correlations", printed), comparison("own-correlations", ours)]
    _show(tables, {"paper": printed, "ours": ours}, as_json)


@app.command("report")
def _report(
    results: Results = None, output: Output = Path("quietmax-results"), as_json: Json = False
) -> None:
    """Make all tables and figures from a table of trials, without training anything.

    Example: quietmax reproduce report --output paper
    """
    from quietmax.experiments.report import ReportInfo, efforts

    found = _read_results(results)
    seed = min(each.group.seed for each in found)
    _write_everything(found, output, ReportInfo(_TITLE, efforts(found), seed), as_json)


def _read_results(paths: list[Path] | None) -> dict[Trial, Result]:
    """Read tables of trials; by default the one that the package carries."""
    from quietmax.experiments.grid import STORED_TRIALS, read_trials

    found = read_trials(paths or [STORED_TRIALS])
    if not found:
        raise QuietmaxError("There are no trials in the given files.")
    return found


def _write_everything(
    results: Mapping[Trial, Result],
    output: Path,
    info: ReportInfo,
    as_json: bool,
    more: Mapping[str, object] | None = None,
) -> None:
    """Write the report of an evaluation, and print its tables."""
    from quietmax.experiments.findings import summarize
    from quietmax.experiments.grid import write_trials
    from quietmax.experiments.report import SEEDED_NOISE, paper_tables, write_report

    summaries = summarize(results)
    written = [write_trials(results, output / "trials.csv")] if results else []
    written += write_report(summaries, output, info)
    tables = paper_tables(summaries)
    document = {
        **{name.replace("multi-query", "multi_query"): table.rows for name, table in tables.items()},
        "about": SEEDED_NOISE,
        "results": [each.flat() for each in summaries],
        "written": [str(path) for path in written],
        **(more or {}),
    }
    if not as_json:
        _print_coverage(summaries)
    _show([table for table in tables.values() if table.rows], document, as_json, written)


def _show(tables: Iterable[Table], document: object, as_json: bool, written: Iterable[Path] = ()) -> None:
    """Print the JSON document; or the tables (the findings as sentences), and what was written."""
    from quietmax.experiments.findings import Finding

    if as_json:
        print_json(document)
        return
    for table in tables:
        if table.rows and isinstance(table.rows[0], Finding):
            for each in table.rows:
                console.print(
                    f"Finding {each.number}: {each.verdict.upper()}. {each.claim}\n  {each.evidence}"
                )
        else:
            caption = f"{table.caption}." if table.caption else None
            print_table(table.title, list(table.columns), table.lines, caption, prose=table.prose)
    print_written(written)


def _print_coverage(summaries: Sequence[Summary]) -> None:
    from quietmax.experiments.findings import PAPER_SERIES
    from quietmax.experiments.report import coverage

    for name in dict.fromkeys(each.dataset for each in summaries):
        measured = [each for each in summaries if each.dataset == name and each.method in PAPER_SERIES]
        console.print(f"{name}: {coverage(name, measured)}")


# --- running the grid of trials -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _GridOptions(RunOptions):
    """The options of a command that runs trials, and the trials they select."""

    names: Names = None
    profile: Annotated[str, "quick (minutes), or paper (10 repeats, all shadow networks)."] = "quick"
    repeats: Annotated[int | None, "Repeats. Default: the profile's.", {"min": 1}] = None
    stand_ins: Annotated[
        bool,
        "Where files are missing, run a stand-in: generated records of the same shape, named NAME-stand-in. They are "
        "not compared with the paper.",
    ] = False

    @cached_property
    def datasets(self) -> list[str]:
        """The chosen data sets, by default those of the paper whose files are present."""
        from quietmax.data.registry import dataset_status, stand_in_for
        from quietmax.experiments.paper import accuracy_table

        def _chosen_for(name: str) -> str:
            replaced = self.stand_ins and not self.download
            if replaced and not dataset_status(name, self.data_dir).present:
                return stand_in_for(name) or name
            return name

        given, otherwise = (list(map(_chosen_for, names)) for names in (listed(self.names), accuracy_table()))
        return _available(given, otherwise, self.data_dir, self.download)

    def trials(self, experiments: Sequence[Experiment], profile: str | None = None) -> list[Trial]:
        """The trials of some experiments in a profile, by default the chosen one."""
        from quietmax.experiments.grid import reproduction_trials

        return reproduction_trials(
            self.datasets,
            profile or self.profile,
            experiments=experiments,
            repeats=self.repeats,
            seed=self.seed,
        )

    def info(self, done: Run) -> ReportInfo:
        """What the report of a run says about itself."""
        from quietmax.experiments.report import ReportInfo, efforts

        settings = f"Profile {self.profile}: {efforts((*done.results, *done.failures))}"
        return ReportInfo(_TITLE, settings, self.seed, done.failed)


_PRESENT = "\n\nWithout --datasets, all data sets of the paper whose files are present."
# Command -> the table that it shows, the parts of the grid that it runs, its help, and the data sets of its example.
_PARTS: dict[str, tuple[str, tuple[Experiment, ...], str, str]] = {
    "accuracy-table": (
        "accuracy",
        ("accuracy",),
        f"Measure training and test accuracy with both losses, and the leakage of the network.{_PRESENT}",
        "location",
    ),
    "figures": (
        "curves",
        ("algorithm1", "dpsgd"),
        "Measure accuracy loss and leakage of Algorithm 1 and published DP-SGD at the paper's values of epsilon."
        + _PRESENT,
        "location",
    ),
    "findings": (
        "findings",
        _EVERYTHING,
        "Judge the paper's five findings from our own numbers.",
        "location adult mnist",
    ),
    "multi-query": (
        "multi-query",
        _EVERYTHING,
        "Compute what one budget gives for many answers, under both of the paper's analyses.\n\n"
        "Methods that answer any number of queries are shown for comparison.",
        "location",
    ),
}


def _run_part(name: str, grid: _GridOptions) -> None:
    """Run a part of the evaluation; show and write its table, or the report if it has figures."""
    from quietmax.experiments.findings import summarize
    from quietmax.experiments.report import paper_tables, write_report

    table, experiments, _, _ = _PARTS[name]
    done = grid.run(grid.trials(experiments))
    summaries = summarize(done.results)
    shown = paper_tables(summaries)[table]
    if name == "figures":
        written = write_report(summaries, grid.output, grid.info(done))
        if not grid.as_json:
            _print_coverage(summaries)
    else:
        written = [shown.write(grid.output / "tables" / f"{table}.csv")]
    _show([shown], shown.rows, grid.as_json, written)
    finish_run(done, quiet=grid.as_json)


def _add_part(name: str) -> None:
    @with_groups
    def _command(*, grid: _GridOptions) -> None:
        _run_part(name, grid)

    *_, summary, datasets = _PARTS[name]
    example = f"Example: quietmax reproduce {name} --datasets {datasets}"
    app.command(name, help=f"{summary}\n\n{example}")(_command)


for _name in _PARTS:
    _add_part(_name)


@app.command("all")
@with_groups
def _everything(
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
    done = grid.run(grid.trials(_EVERYTHING))
    failures = {str(trial): failure for trial, failure in done.failures.items()}
    more = {"estimates": estimates, "computed": done.computed, "failures": failures}
    _write_everything(done.results, grid.output, grid.info(done), grid.as_json, more)
    finish_run(done, quiet=grid.as_json)


def _estimate(grid: _GridOptions) -> dict[str, float]:
    """Measure this machine's speed; return and print the core hours of both profiles."""
    from quietmax.experiments.runner import estimated_seconds, usable_cores

    cores = grid.workers or usable_cores()
    hours = {}
    if not grid.as_json:
        console.print("Measuring the speed of this machine ...")
    for profile in ("quick", "paper"):
        seconds = estimated_seconds(grid.trials(_EVERYTHING, profile), data_dir=grid.data_dir)
        hours[profile] = seconds / 3600
        if not grid.as_json:
            console.print(
                f"Estimate for profile {profile}: {hours[profile]:.1f} core hours, about {_duration(seconds / cores)} "
                f"with {cores} workers."
            )
    return hours


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


# --- stored measurements of our own, measured again on request ----------------------------------------------------


@dataclass(frozen=True)
class _MeasurementOptions:
    """The options of a command that shows a stored table."""

    names: Names = None
    measure: Annotated[
        bool, "Train and measure again, instead of showing the numbers that the package contains."
    ] = False
    output: Annotated[
        Path | None,
        "Folder to write the table to, as CSV, and figures if there are any. Default with --measure: quietmax-COMMAND, "
        "from which the same command continues.",
    ] = None
    data_dir: DataDir = None
    seed: Seed = 0
    as_json: Json = False


# Command -> its help and the options of its example.
_MEASUREMENTS = {
    "bounds-table": (
        "Show the upper bounds of the paper's Table 1 side by side, with their conditions and the observed change.\n\n"
        "The bounds follow from the shape of the paper's network; no data is needed. The observed change (retraining "
        "without single records) is stored for the data sets that we have.",
        "location adult",
    ),
    "architectures": (
        "Show training and the paper's formulas beyond its network: other losses, activations and depths.",
        "location",
    ),
    "alpha": (
        "Show accuracy and leakage for the values of alpha that the paper searched, 0.5 to 10.",
        "location --output alpha",
    ),
    "cifar": (
        "Show which scaling of pixels, learning rate and loss give the paper's numbers on CIFAR.",
        "cifar-100",
    ),
}


def _show_measurement(name: str, options: _MeasurementOptions) -> None:
    """Show and write a stored table; with --measure, what is measured now."""
    from quietmax.experiments.grid import write_csv
    from quietmax.experiments.measurements import MEASUREMENTS
    from quietmax.experiments.report import write_figures

    measurement, named = MEASUREMENTS[name], listed(options.names) or None
    folder = options.output or (Path(f"quietmax-{name}") if options.measure else None)
    if options.measure and folder is not None:
        chosen = _available(named or (), measurement.datasets, options.data_dir)
        with progress_bar(name, quiet=options.as_json) as progress:
            rows = measurement.measured(chosen, folder, options.data_dir, options.seed, progress)
    else:
        rows = measurement.stored(named)
    shown, written = measurement.show(rows, named), []
    if folder is not None:
        written = [write_csv(lines, folder / file) for file, lines in shown.files.items()]
        written += write_figures(shown.figures, folder)
    _show(shown.tables, shown.document, options.as_json, written)


def _add_measurement(name: str) -> None:
    @with_groups
    def _command(*, options: _MeasurementOptions) -> None:
        _show_measurement(name, options)

    summary, example = _MEASUREMENTS[name]
    app.command(name, help=f"{summary}\n\nExample: quietmax reproduce {name} --datasets {example}")(_command)


for _name in _MEASUREMENTS:
    _add_measurement(_name)
