"""`quietmax reproduce`: the paper's evaluation from our own code, compared with the paper's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quietmax.cli._options import DataDir, Json, Names, Seed, with_groups
from quietmax.cli._output import console, print_json, print_table, progress_bar
from quietmax.cli.compare import (
    Output,
    RunOptions,
    WorkerCount,
    finish,
    listed,
    print_written,
    run_with_progress,
)
from quietmax.errors import DataUnavailable, QuietmaxError

if TYPE_CHECKING:
    from quietmax.experiments.findings import Summary
    from quietmax.experiments.grid import Experiment, Trial
    from quietmax.experiments.measurements import (
        AlphaChoice,
        AlphaRow,
        ArchitectureRow,
        BoundsRow,
        NetworkRow,
        PrivateRow,
    )
    from quietmax.experiments.report import Figure, ReportInfo, Table
    from quietmax.experiments.results import Result
    from quietmax.experiments.runner import Run

app = typer.Typer(
    no_args_is_help=True,
    help="""Reproduce the paper's tables and figures.

    Start with report: it shows everything from the stored run of this package and trains nothing. all runs the
    evaluation again; the other commands run or show a part of it.
    """,
)

_TITLE = "The paper's evaluation again"
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


@dataclass(frozen=True)
class _GridOptions(RunOptions):
    """The options of a command that runs trials, and the trials they select."""

    names: Names = None
    profile: Annotated[
        str, typer.Option(help="quick (minutes), or paper (10 repeats, all shadow networks).")
    ] = "quick"
    repeats: Annotated[int | None, typer.Option(min=1, help="Repeats. Default: the profile's.")] = None
    stand_ins: Annotated[
        bool,
        typer.Option(
            "--stand-ins",
            help="Where files are missing, run a stand-in: generated records of the same shape, named NAME-stand-in. "
            "They are not compared with the paper.",
        ),
    ] = False

    @cached_property
    def datasets(self) -> list[str]:
        """The chosen data sets, by default those of the paper whose files are present."""
        from quietmax.data.registry import dataset_status, stand_in_for
        from quietmax.experiments.paper import accuracy_table

        def chosen_for(name: str) -> str:
            replaced = self.stand_ins and not self.download
            if replaced and not dataset_status(name, self.data_dir).present:
                return stand_in_for(name) or name
            return name

        given, otherwise = (list(map(chosen_for, names)) for names in (listed(self.names), accuracy_table()))
        return _available(given, otherwise, self.data_dir, self.download)

    def trials(self, experiments: Sequence[Experiment], profile: str | None = None) -> list[Trial]:
        from quietmax.experiments.grid import reproduction_trials

        return reproduction_trials(
            self.datasets,
            profile or self.profile,
            experiments=experiments,
            repeats=self.repeats,
            seed=self.seed,
        )

    def info(self, done: Run) -> ReportInfo:
        from quietmax.experiments.report import ReportInfo, efforts

        return ReportInfo(
            _TITLE,
            f"Profile {self.profile}: {efforts((*done.results, *done.failures))}",
            self.seed,
            done.failed,
        )


@app.command("sensitivity-table")
def sensitivity_table(names: Names = None, as_json: Json = False) -> None:
    """Compute the table of sensitivities from the formulas.

    Example: quietmax reproduce sensitivity-table
    """
    from quietmax.experiments.paper import reproduce_sensitivity_table
    from quietmax.experiments.report import comparison

    rows = reproduce_sensitivity_table(listed(names) or None)
    if as_json:
        print_json(rows)
    else:
        _print([comparison("sensitivities", rows)])


@app.command()
def correlations(results: Results = None, as_json: Json = False) -> None:
    """Compute the correlations between OARO stability, accuracy gap and privacy leakage.

    First from the paper's own table, then from our networks in a table of trials.

    Example: quietmax reproduce correlations
    """
    from quietmax.experiments.findings import own_correlations, summarize
    from quietmax.experiments.paper import reproduce_correlations
    from quietmax.experiments.report import comparison

    printed, ours = reproduce_correlations(), own_correlations(summarize(_read_results(results)))
    if as_json:
        print_json({"paper": printed, "ours": ours})
    else:
        _print([comparison("correlations", printed), comparison("own-correlations", ours)])


@app.command()
def report(results: Results = None, output: Output = Path("quietmax-results"), as_json: Json = False) -> None:
    """Make all tables and figures from a table of trials, without training anything.

    Example: quietmax reproduce report --output paper
    """
    from quietmax.experiments.report import ReportInfo, efforts

    found = _read_results(results)
    seed = min(each.group.seed for each in found)
    _write_everything(found, output, ReportInfo(_TITLE, efforts(found), seed), as_json)


def _add_part(
    name: str, table: str, experiments: Sequence[Experiment], summary: str, datasets: str = "location"
) -> None:
    """Add a command that runs a part of the evaluation, and shows and writes one of its tables."""

    @with_groups
    def command(*, grid: _GridOptions) -> None:
        from quietmax.experiments.findings import summarize
        from quietmax.experiments.report import paper_tables, write_report

        done = grid.run(grid.trials(experiments))
        summaries = summarize(done.results)
        shown = paper_tables(summaries)[table]
        if grid.as_json:
            print_json(shown.rows)
        else:
            _print([shown])
        if name == "figures":
            written = write_report(summaries, grid.output, grid.info(done))
            if not grid.as_json:
                _print_coverage(summaries)
        else:
            written = [shown.write(grid.output / "tables" / f"{table}.csv")]
        finish(done, written, quiet=grid.as_json)

    app.command(name, help=f"{summary}\n\nExample: quietmax reproduce {name} --datasets {datasets}")(command)


_PRESENT = "Without --datasets, all data sets of the paper whose files are present."
_add_part(
    "accuracy-table",
    "accuracy",
    ("accuracy",),
    "Measure training and test accuracy with both losses, and the leakage of the network.\n\n" + _PRESENT,
)
_add_part(
    "figures",
    "curves",
    ("algorithm1", "dpsgd"),
    "Measure accuracy loss and leakage of Algorithm 1 and published DP-SGD at the paper's values of epsilon.\n\n"
    + _PRESENT,
)
_EVERYTHING: tuple[Experiment, ...] = ("accuracy", "algorithm1", "dpsgd", "like-for-like")
_add_part(
    "findings",
    "findings",
    _EVERYTHING,
    "Judge the paper's five findings from our own numbers.",
    "location adult mnist",
)
_add_part(
    "multi-query",
    "multi-query",
    _EVERYTHING,
    "Compute what one budget gives for many answers, under both of the paper's analyses.\n\n"
    "Methods that answer any number of queries are shown for comparison.",
)


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
    done = grid.run(grid.trials(_EVERYTHING))
    failures = {str(trial): failure for trial, failure in done.failures.items()}
    more = {"estimates": estimates, "computed": done.computed, "failures": failures}
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
    from quietmax.experiments.findings import summarize
    from quietmax.experiments.report import SEEDED_NOISE, paper_tables, write_report
    from quietmax.experiments.results import write_trials

    summaries = summarize(results)
    written = [write_trials(results, output / "trials.csv")] if results else []
    written += write_report(summaries, output, info)
    tables = paper_tables(summaries)
    if not as_json:
        _print_coverage(summaries)
        _print(table for table in tables.values() if table.rows)
        print_written(written)
        return
    print_json(
        {
            **{name.replace("multi-query", "multi_query"): table.rows for name, table in tables.items()},
            "about": SEEDED_NOISE,
            "results": [each.flat() for each in summaries],
            "written": [str(path) for path in written],
            **(more or {}),
        }
    )


def _read_results(paths: list[Path] | None) -> dict[Trial, Result]:
    """Read tables of trials; by default the one that the package carries."""
    from quietmax.experiments.results import STORED_TRIALS, read_trials

    found = read_trials(paths or [STORED_TRIALS])
    if not found:
        raise QuietmaxError("There are no trials in the given files.")
    return found


def _estimate(grid: _GridOptions) -> dict[str, float]:
    """Measure this machine's speed; return and print the core hours of both profiles, and the memory of a worker."""
    from quietmax.experiments.runner import estimated_bytes, estimated_seconds, usable_cores

    cores = grid.workers or usable_cores()
    hours = {}
    if not grid.as_json:
        console.print("Measuring the speed of this machine ...")
    for profile in ("quick", "paper"):
        trials = grid.trials(_EVERYTHING, profile)
        seconds = estimated_seconds(trials, data_dir=grid.data_dir)
        memory = estimated_bytes(trials, data_dir=grid.data_dir) / 2**30
        hours[profile], hours[f"{profile}_gib_per_worker"] = seconds / 3600, memory
        if not grid.as_json:
            console.print(
                f"Estimate for profile {profile}: {hours[profile]:.1f} core hours, about {_duration(seconds / cores)} "
                f"with {cores} workers of {memory:.1f} GiB each."
            )
    return hours


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _print(tables: Iterable[Table]) -> None:
    """Print tables; the findings, which are sentences, without columns."""
    from quietmax.experiments.findings import Finding

    for table in tables:
        if table.rows and isinstance(table.rows[0], Finding):
            for each in table.rows:
                console.print(
                    f"Finding {each.number}: {each.verdict.upper()}. {each.claim}\n  {each.evidence}"
                )
        else:
            caption = f"{table.caption}." if table.caption else None
            print_table(table.title, list(table.columns), table.lines, caption, prose=table.prose)


def _print_coverage(summaries: Sequence[Summary]) -> None:
    from quietmax.experiments.findings import PAPER_SERIES
    from quietmax.experiments.report import coverage

    for name in dict.fromkeys(each.dataset for each in summaries):
        measured = [each for each in summaries if each.dataset == name and each.method in PAPER_SERIES]
        console.print(f"{name}: {coverage(name, measured)}")


# --- stored measurements of our own, measured again on request ----------------------------------------------------


@dataclass(frozen=True)
class _TableOptions:
    """The options of a command that shows a stored table."""

    names: Names = None
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Train and measure again, instead of showing the numbers that the package contains.",
        ),
    ] = False
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write the table to, as CSV, and figures if there are any. Default with --measure: "
            "quietmax-COMMAND, from which the same command continues where it can."
        ),
    ] = None
    data_dir: DataDir = None
    seed: Seed = 0
    as_json: Json = False

    @property
    def chosen(self) -> list[str] | None:
        """The data sets that were named; None for the default."""
        return listed(self.names) or None

    def folder(self, command: str) -> Path | None:
        """Where the table is written."""
        return self.output or (Path(f"quietmax-{command}") if self.measure else None)

    def measured(self, default: Sequence[str]) -> list[str]:
        """The data sets to measure."""
        return _available(self.chosen or (), default, self.data_dir)

    def rows(
        self,
        kind: type[Any],
        file: str,
        measure: Callable[..., list[Any]],
        default: Sequence[str],
        **options: object,
    ) -> list[Any]:
        """The stored rows, or with --measure those that ``measure`` returns for the data sets."""
        from quietmax.experiments.results import stored_rows

        if not self.measure:
            return stored_rows(kind, file, self.chosen)
        names = self.measured(default)
        with progress_bar(file.removesuffix(".csv"), quiet=self.as_json) as progress:
            return measure(names, data_dir=self.data_dir, seed=self.seed, progress=progress, **options)

    def show(
        self,
        command: str,
        document: object,
        tables: Iterable[Table],
        files: Mapping[str, Iterable[Mapping[str, object]]],
        figures: Sequence[Figure] = (),
    ) -> None:
        """Write files and figures, and print the JSON document, or the tables and what was written."""
        from quietmax.experiments.report import write_figures
        from quietmax.experiments.results import write_csv

        folder, written = self.folder(command), []
        if folder is not None:
            written = [write_csv(rows, folder / file) for file, rows in files.items()]
            written += write_figures(figures, folder)
        if self.as_json:
            print_json(document)
        else:
            _print(tables)
            print_written(written)


Removals = Annotated[
    int | None, typer.Option(min=1, help="With --measure: records to remove. Default: 6 to 12, by data set.")
]
Repeats = Annotated[
    int | None, typer.Option(min=1, help="With --measure: number of splits. Default: 1 to 3, by data set.")
]


@app.command("bounds-table")
@with_groups
def bounds_table(*, table: _TableOptions, removals: Removals = None) -> None:
    """Show the upper bounds of the paper's Table 1 side by side, with their conditions and the observed change.

    The bounds follow from the shape of the paper's network; no data is needed. The observed change (retraining without
    single records) is stored for the data sets that we have.

    Example: quietmax reproduce bounds-table --datasets location adult
    """
    from quietmax.experiments import measurements as ours
    from quietmax.experiments.results import stored_rows

    files: dict[str, Iterable[Mapping[str, object]]] = {}
    if table.measure:
        observed = table.rows(ours.Observed, ours.BOUNDS, ours.observe, ours.MEASURED, removals=removals)
        files[ours.BOUNDS] = map(asdict, observed)
    else:
        observed = stored_rows(ours.Observed, ours.BOUNDS)
    rows = ours.bounds_table(table.chosen, observed)
    files["bounds-table.csv"] = (row.flat() for row in rows)
    table.show("bounds-table", rows, _bounds_tables(rows), files)


def _bounds_tables(rows: Sequence[BoundsRow]) -> Iterator[Table]:
    from quietmax.experiments.measurements import TITLES, condition_summaries
    from quietmax.experiments.report import Table

    applying = sum(bound.applies is True for row in rows for bound in row.bounds)
    bounds = {
        title: lambda row, place=place: _short(row.bounds[place].value) for place, title in enumerate(TITLES)
    }
    yield Table(
        "Table 1: upper bounds on the change of all weights by one record (L2)",
        rows,
        {"data set": lambda row: row.dataset, **bounds},
        f"All conditions are known to hold for {applying} of {len(rows) * len(TITLES)} bounds",
    )
    verdicts = {True: "holds", False: "does not hold", None: "not decided"}
    yield Table(
        "Conditions of the bounds",
        condition_summaries(rows),
        {
            "condition": lambda each: each.condition,
            "needed by": lambda each: (
                "all" if len(each.needed_by) == len(TITLES) else ", ".join(each.needed_by)
            ),
            "verdict": lambda each: (
                f"{verdicts[each.holds]}: {'all' if len(each.datasets) == len(rows) else ', '.join(each.datasets)}"
            ),
            "why (first data set)": lambda each: each.because,
        },
        "That the minimiser is reached is not in the paper's table; the proofs take it for granted",
        prose=True,
    )
    observed = [row for row in rows if row.observed is not None]
    if observed:
        yield Table(
            "Observed change of all weights (L2)",
            observed,
            {
                "data set": lambda row: row.dataset,
                "this paper's bound": lambda row: _short(row.bounds[-1].value),
                "observed": lambda row: f"{_short(row.observed.weights_l2)} ({row.observed.kind})",
                "ordinary record": lambda row: _short(row.observed.ordinary_l2),
                "removals": lambda row: str(row.observed.removals),
                "bound": lambda row: row.verdict,
            },
            "The largest change by retraining without one record: a lower bound on the true sensitivity, so 'not "
            "exceeded' proves nothing. Mislabelled and extreme records were planted",
        )


def _short(value: float) -> str:
    """Format a number with three digits, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@app.command()
@with_groups
def architectures(*, table: _TableOptions, repeats: Repeats = None, removals: Removals = None) -> None:
    """Show training and the paper's formulas beyond its network: other losses, activations and depths.

    Example: quietmax reproduce architectures --datasets location
    """
    from quietmax.experiments import measurements as ours

    rows = table.rows(
        ours.ArchitectureRow,
        ours.ARCHITECTURES,
        ours.measure_architectures,
        ("location", "adult"),
        repeats=repeats,
        removals=removals,
    )
    table.show("architectures", rows, _architecture_tables(rows), {ours.ARCHITECTURES: map(asdict, rows)})


def _architecture_tables(rows: Sequence[ArchitectureRow]) -> Iterator[Table]:
    from quietmax.experiments.report import Table

    def against(formula: float | None, seen: float) -> str:
        if formula is None:
            return f"{_short(seen)} / -"
        return f"{_short(seen)} {'>' if seen > formula else '<='} {_short(formula)}"

    for name in dict.fromkeys(row.dataset for row in rows):
        mine = [row for row in rows if row.dataset == name]
        yield Table(
            f"{name}: hidden layers of 128 neurons",
            mine,
            {
                "layers": lambda row: f"{row.layers} {row.activation}",
                "loss": lambda row: row.loss.replace("cross-entropy", "CE"),
                "train": lambda row: f"{row.train_accuracy:.3f}",
                "test": lambda row: f"{row.test_accuracy:.3f}",
                "gradient, rho": lambda row: against(row.rho, row.gradient),
                "weights, D2W": lambda row: against(row.weights_l2, row.observed_weights_l2),
                "logit, Dz": lambda row: against(row.logit, row.observed_logit),
            },
            f"Means of {mine[0].repeats} splits; CE: cross-entropy. Measured against the paper's formula: the "
            f"largest gradient of one record, and the largest change by removing one of {mine[0].removals} records. "
            "The paper has no rho for the quadratic loss. For relu the neuron values in the formulas are measured",
        )


@app.command()
@with_groups
def alpha(*, table: _TableOptions, repeats: Repeats = None, workers: WorkerCount = None) -> None:
    """Show accuracy and leakage for the values of alpha that the paper searched, 0.5 to 10.

    Example: quietmax reproduce alpha --datasets location --output alpha
    """
    from quietmax.experiments import measurements as ours
    from quietmax.experiments.results import stored_rows

    done, folder = None, table.folder("alpha")
    if table.measure and folder is not None:
        trials = ours.alpha_trials(table.measured(ours.MEASURED), repeats=repeats, seed=table.seed)
        done = run_with_progress(trials, folder, workers, table.data_dir, quiet=table.as_json)
        rows = ours.alpha_rows(done.results)
    else:
        rows = stored_rows(ours.AlphaRow, ours.ALPHA, table.chosen)
    choices = ours.alpha_choices(rows)
    tables = [
        _alpha_table(choice, [row for row in rows if row.dataset == choice.dataset]) for choice in choices
    ]
    figures = [] if folder is None else ours.alpha_figures(rows)
    files = {ours.ALPHA: map(asdict, rows)}
    table.show("alpha", {"rows": rows, "choices": choices}, tables, files, figures)
    if done is not None:
        finish(done, [], quiet=table.as_json)


def _alpha_table(choice: AlphaChoice, rows: Sequence[AlphaRow]) -> Table:
    from quietmax.experiments.report import Table, number
    from quietmax.models.training import ALPHA_TOLERANCE

    shortfalls = {trial.alpha: trial.shortfall for trial in choice.trials}
    correlations = {"shadow": choice.shadow_correlation, "threshold": choice.threshold_correlation}
    attacked = [f"{name} {value:.2f}" for name, value in correlations.items() if value is not None]
    marks = {"rule": choice.chosen, "paper": choice.paper}
    return Table(
        f"{choice.dataset}: alpha of the convexified loss",
        rows,
        {
            "alpha": lambda row: "original loss" if row.alpha is None else f"{row.alpha:g}",
            "train acc.": lambda row: f"{row.train_accuracy:.4f}",
            "test acc.": lambda row: f"{row.test_accuracy:.4f}",
            "below original by": lambda row: number(shortfalls.get(row.alpha), ".4f"),
            "leakage, shadow": lambda row: number(row.shadow_leakage, ".4f"),
            "leakage, threshold": lambda row: number(row.threshold_leakage, ".4f"),
            "": lambda row: ", ".join(name for name, value in marks.items() if value == row.alpha),
        },
        f"Means of {rows[-1].repeats} splits, {rows[-1].shadows} shadow networks per alpha. Our rule: the "
        f"smallest alpha at most {ALPHA_TOLERANCE:g} below the original loss in training and test accuracy"
        + (f". Spearman correlation of alpha and leakage: {', '.join(attacked)}" if attacked else ""),
    )


@app.command()
@with_groups
def cifar(*, table: _TableOptions) -> None:
    """Show which scaling of pixels, learning rate and loss give the paper's numbers on CIFAR.

    Example: quietmax reproduce cifar --datasets cifar-100
    """
    from quietmax.experiments import measurements as ours

    trials = table.rows(
        ours.CifarTrial, ours.CIFAR, ours.measure_cifar, ours.CIFAR_DATASETS, folder=table.folder("cifar")
    )
    networks, private = ours.network_rows(trials), ours.private_rows(trials)
    document = {"networks": networks, "dpsgd": private}
    table.show("cifar", document, _cifar_tables(networks, private), {ours.CIFAR: map(asdict, trials)})


def _cifar_tables(networks: Sequence[NetworkRow], private: Sequence[PrivateRow]) -> Iterator[Table]:
    from quietmax.experiments.findings import CURVE_TOLERANCE
    from quietmax.experiments.report import Table, number

    for name in dict.fromkeys(row.dataset for row in networks):
        mine = [row for row in networks if row.dataset == name]
        printed = dict.fromkeys((row.loss, row.paper_train_accuracy, row.paper_test_accuracy) for row in mine)
        yield Table(
            f"{name}: networks without privacy, and Algorithm 1",
            mine,
            {
                "pixels": lambda row: row.scaling,
                "rate": lambda row: (
                    f"{row.learning_rate:g}" + ("" if row.epochs == 100 else f", {row.epochs} epochs")
                ),
                "loss": lambda row: row.loss + ("" if row.alpha is None else f", {row.alpha:g}"),
                "splits": lambda row: str(row.splits),
                "train": lambda row: f"{row.train_accuracy.value:.3f}",
                "test": lambda row: f"{row.test_accuracy.value:.3f}",
                "Alg. 1": lambda row: f"{row.within}/{row.points}" if row.points else "",
            },
            "; ".join(f"the paper's {loss}: {train:.3f}, {test:.3f}" for loss, train, test in printed)
            + ". Rate: learning rate; after the loss: alpha; last column: points of Algorithm 1's accuracy loss "
            f"within {CURVE_TOLERANCE:g} of the paper's curves",
        )
        if any(row.dataset == name for row in private):
            yield Table(
                f"{name}: DP-SGD as published, accountant RDP",
                [row for row in private if row.dataset == name],
                {
                    "pixels": lambda row: row.scaling,
                    "rate": lambda row: f"{row.learning_rate:g}",
                    "loss": lambda row: row.loss,
                    "eps": lambda row: f"{row.epsilon:g}",
                    "test": lambda row: f"{row.test_accuracy:.3f}",
                    "paper": lambda row: f"{row.paper_test_accuracy:.3f}",
                    "lost": lambda row: number(row.accuracy_loss, ".3f"),
                    "paper ": lambda row: f"{row.paper_accuracy_loss:.3f}",
                },
                "Test accuracy, and the accuracy lost against the network without privacy of the same settings",
            )
