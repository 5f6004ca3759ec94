"""`quietmax compare` and `quietmax reproduce`: all methods on the user's data, and the paper's evaluation again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quietmax.cli._options import Ray, Seed, TableOptions, with_groups
from quietmax.cli._output import console, errors, print_json, print_table, progress_bar
from quietmax.errors import DataUnavailable, InvalidInput, QuietmaxError, counted, unknown_name

if TYPE_CHECKING:
    from quietmax.experiments.findings import Summary
    from quietmax.experiments.grid import DataSource, Effort, Experiment, Trial
    from quietmax.experiments.report import ReportInfo, Table
    from quietmax.experiments.runner import Run

_Output = Annotated[Path, typer.Option(help="Folder of results. Trials that it contains are not run again.")]


@dataclass(frozen=True)
class _RunOptions:
    """How a command runs trials, and where it keeps their results."""

    output: _Output = Path("quietmax-results")
    workers: Annotated[
        int | None, "Worker processes of one thread each. Default: one per core.", {"min": 1}
    ] = None
    ray: Ray = None
    seed: Seed = 0

    def _run(self, trials: Sequence[Trial]) -> Run:
        """Run trials with a progress bar, and print those that failed."""
        from quietmax.experiments.runner import run_trials

        with progress_bar(counted(len(set(trials)), "trial")) as advance:
            try:
                done = run_trials(
                    trials,
                    self.output,
                    workers=self.workers,
                    ray=self.ray,
                    progress=advance,
                )
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"Interrupted. Finished trials are stored in {self.output}; the same command continues from there."
                ) from None
        for failure in done.failed:
            errors.print(f"failed: {failure}", style="red", soft_wrap=True)
        return done


def _available(given: Sequence[str], otherwise: Sequence[str] = ()) -> list[str]:
    """The given data sets, whose files must be there; if none is given, those of the others that are present."""
    from quietmax.data.registry import dataset_status, load_records

    present = {name: dataset_status(name).present for name in given or otherwise}
    chosen = list(given) or [name for name in otherwise if present[name]]
    if not chosen:
        raise DataUnavailable(
            f"None of {', '.join(otherwise)} is present. 'quietmax datasets' lists where their files come from."
        )
    for name in chosen:
        if not present[name]:
            load_records(name)  # says which files are missing
    return chosen


def _listed(values: list[str] | None) -> list[str]:
    """Split the values of a list option, each of which may contain several separated by commas."""
    return [part for value in values or [] for part in value.split(",") if part]


def _print_written(paths: Sequence[Path]) -> None:
    """Print the written files."""
    for path in paths:
        console.print(f"wrote {path}", soft_wrap=True)


def _finish_run(done: Run) -> None:
    """Print the counts of a run of trials; exit with code 1 if one failed."""
    console.print(
        f"{counted(done.computed, 'trial')} computed in {done.seconds:.0f} s, "
        f"{len(done.results) - done.computed} found, {len(done.failures)} failed."
    )
    if done.failures:
        raise typer.Exit(1)


# --- compare ----------------------------------------------------------------------------------------------------------

DEFAULT_METHODS = (
    "plain",
    "algorithm1-gaussian",
    "algorithm1-laplace",
    "sampled-neuron",
    "teachers",
    "head",
    "dpsgd",
)


@dataclass(frozen=True)
class _Comparison(_RunOptions):
    """What is compared, on which part of the records."""

    output: _Output = Path("quietmax-comparison")
    methods: Annotated[
        list[str] | None,
        "One or more methods. Beside the default ones: original, dpsgd-rdp, dpsgd-zcdp, dpsgd-ac, dpsgd-nc, "
        "published-rdp, published-zcdp, published-ac, published-nc.",
    ] = None
    epsilons: Annotated[list[float] | None, "As in: --epsilons 0.1 1 10, the default."] = None
    queries: Annotated[
        list[str] | None,
        "Numbers of answers that epsilon pays for, where every answer is charged, as in 1,100. Default: 1.",
    ] = None
    attacks: Annotated[list[str] | None, "One or more attacks. Default: shadow."] = None
    repeats: Annotated[int, "Random splits to average over.", {"min": 1}] = 1
    records: Annotated[
        int | None,
        "Data sets of the paper: number of training records. Default: the data set's number.",
        {"min": 10},
    ] = None
    holdout: Annotated[
        float | None,
        "Your own table: share of the persons (without --person: of the rows) that is the test part. Default: 0.2.",
    ] = None
    shadows: Annotated[int, "Shadow networks of the attacks.", {"min": 1}] = 10
    epochs: Annotated[int, "Epochs of the network and its shadow networks.", {"min": 1}] = 100
    attack_epochs: Annotated[int, "Epochs of the attack networks.", {"min": 1}] = 50

    def _effort(self, source: DataSource) -> Effort:
        """The work of one repeat, if the options are valid and the files are there."""
        from quietmax.attacks.builtin import make_attack
        from quietmax.data.registry import dataset
        from quietmax.data.sources import is_table_path
        from quietmax.experiments.grid import Effort
        from quietmax.experiments.methods import training_size

        attacks = tuple(dict.fromkeys(_listed(self.attacks) or ["shadow"]))
        for name in attacks:
            make_attack(name, models=self.shadows, seed=self.seed)
        alpha = 1.0
        if not is_table_path(source.name):
            if source.declared != "{}":
                raise InvalidInput(
                    f"The options about your own table do not apply to the data set {source.name!r}."
                )
            alpha = dataset(*_available([source.name])).alpha
        size, share = training_size(source, self.records, self.holdout)
        return Effort(size, self.shadows, alpha, self.epochs, self.attack_epochs, attacks, share)

    def _trials(self, source: DataSource, effort: Effort) -> list[Trial]:
        """All methods on all repeats."""
        from quietmax.experiments.grid import Group
        from quietmax.experiments.methods import method_trials

        chosen = list(dict.fromkeys(_listed(self.methods) or DEFAULT_METHODS))
        epsilons = sorted(set(self.epsilons or (0.1, 1.0, 10.0)))
        if not all(0 < epsilon < math.inf for epsilon in epsilons):
            raise InvalidInput(f"--epsilons must be positive numbers, got {epsilons}.")
        counts = _listed(self.queries) or ["1"]
        if not all(count.isdecimal() and int(count) for count in counts):
            raise InvalidInput(f"--queries must be positive integers, as in 1,100, got {','.join(counts)}.")
        return [
            trial
            for repeat in range(self.repeats)
            for trial in method_trials(
                Group(source, effort, repeat, self.seed), chosen, epsilons, sorted(set(map(int, counts)))
            )
        ]


@with_groups
def compare(
    *,
    subject: Annotated[
        str,
        typer.Argument(metavar="DATASET|FILE", help="Name of a data set, or a .csv, .parquet or .npz file."),
    ],
    options: _Comparison,
    table: TableOptions,
) -> None:
    """Compare accuracy, leakage, claimed and audited epsilon, and times of all methods on the same splits.

    The output names the methods without a proven guarantee. A table is split by --holdout; the attacks train shadow
    networks on the table itself, each without another random part of it, and tell persons apart if there is a person
    column. The report is for the owner of the records only: it is computed from them without noise, and the number of
    records is taken as public. The command can be interrupted; the same command continues from there.

    Examples:

    quietmax compare mnist-5k --epsilons 1 10 --attacks threshold

    quietmax compare people.csv --epsilons 1 --queries 1,100
    """
    from quietmax.experiments.findings import summarize
    from quietmax.experiments.grid import DataSource
    from quietmax.experiments.methods import source_records
    from quietmax.experiments.report import OWNER_ONLY, SEEDED_NOISE, ReportInfo, results_table, write_report

    source = DataSource.of(subject, table.given())
    effort = options._effort(source)
    done = options._run(options._trials(source, effort))
    summaries = summarize(done.results)
    unit = source_records(source).unit
    info = ReportInfo(
        f"Privacy and utility on {source.title}",
        f"{counted(effort.records, f'training {unit}')}, {counted(effort.shadows, 'shadow network')}, "
        f"{counted(effort.epochs, 'epoch')}, {counted(options.repeats, 'repeat')}",
        options.seed,
        done.failed,
        paper=False,
    )
    written = write_report(summaries, options.output, info)
    about = f"{SEEDED_NOISE} {OWNER_ONLY}"
    print_json(
        {
            "about": about,
            "results": [each.flat() for each in summaries],
            "failures": {str(trial): failure for trial, failure in done.failures.items()},
            "computed": done.computed,
            "written": [str(path) for path in written],
        }
    )
    shown = results_table(summaries)
    print_table(
        shown.title,
        list(shown.columns),
        shown.lines,
        "Audited: lower bound on epsilon; where every answer is charged, on the epsilon or mu of one answer. "
        + about,
        optional=list(shown.columns)[:1:-1],
    )
    _print_written(written)
    _finish_run(done)


# --- reproduce --------------------------------------------------------------------------------------------------------

reproduce = typer.Typer(
    no_args_is_help=True,
    help="""Reproduce the paper's tables and figures.

    Start with report: it shows everything from the stored run of this package and trains nothing. run trains again.
    """,
)

_TITLE = "The paper's evaluation again"
_Names = Annotated[
    list[str] | None,
    typer.Option("--datasets", help="One or more data sets, as in: --datasets mnist location."),
]
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
    names: _Names = None

    def _chosen(self) -> tuple[list[str], list[str]]:
        """The names of the tables, by default those of the paper, and of the data sets."""
        from quietmax.data.registry import dataset

        chosen = list(dict.fromkeys(_listed(self.tables))) or list(_EXPERIMENTS)
        for name in chosen:
            if name not in (*_EXPERIMENTS, *_MEASUREMENTS):
                raise unknown_name("table", name, (*_EXPERIMENTS, *_MEASUREMENTS))
        return chosen, [dataset(name).name for name in _listed(self.names)]


@reproduce.command("report")
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

    chosen, names = selection._chosen()
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
class _Grid(_RunOptions):
    """How much of the evaluation is run again."""

    profile: Annotated[str, "quick (minutes), or paper (10 repeats, all shadow networks)."] = "quick"
    repeats: Annotated[int | None, "Repeats. Default: the profile's.", {"min": 1}] = None


@reproduce.command("run")
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

    chosen, named = selection._chosen()
    measured: dict[str, list[Any]] = {}
    for name in (each for each in chosen if each in _MEASUREMENTS):
        datasets = _available(named, _measurement(name).datasets)
        with progress_bar(name) as progress:
            measured[name] = _measurement(name).measured(datasets, grid.output, grid.seed, progress)
    needed = {part for name in chosen for part in _EXPERIMENTS.get(name, ())}
    if not needed:
        _show(chosen, named, Run({}), measured, grid.output)
        return
    datasets = _available(named, list(accuracy_table()))
    parts = [part for part in _EVERYTHING if part in needed]
    trials = reproduction_trials(
        datasets, grid.profile, experiments=parts, repeats=grid.repeats, seed=grid.seed
    )
    done = grid._run(trials)
    settings = f"Profile {grid.profile}: {efforts((*done.results, *done.failures))}"
    info = ReportInfo(_TITLE, settings, grid.seed, done.failed)
    _show(chosen, named, done, measured, grid.output, info)
    _finish_run(done)


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
    _print_written(written)


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
