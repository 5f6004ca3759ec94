"""The commands of `quietmax reproduce` that show stored measurements of our own, and measure them again on request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quietmax.cli._grids import WorkerCount, finish, listed, run_with_progress
from quietmax.cli._options import DataDir, Json, Names, Seed, with_groups
from quietmax.cli._output import console, print_json, print_table, progress_bar
from quietmax.errors import DataUnavailable

if TYPE_CHECKING:
    from quietmax.experiments.alpha import AlphaChoice, AlphaRow
    from quietmax.experiments.architectures import ArchitectureRow
    from quietmax.experiments.bounds_table import BoundsRow
    from quietmax.experiments.cifar import CifarTrial, NetworkRow, PrivateRow

_VERDICTS = {True: "holds", False: "does not hold", None: "not decided"}


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
        Path | None, typer.Option(help="Folder to write the table to, as CSV, and figures if there are any.")
    ] = None
    data_dir: DataDir = None
    seed: Seed = 0
    as_json: Json = False

    @property
    def chosen(self) -> list[str] | None:
        """The data sets that were named; None for the default."""
        return listed(self.names) or None

    def measured(self, default: Sequence[str]) -> list[str]:
        """The data sets to measure: those that were named, else those of the default that are present."""
        from quietmax.data.load import load_records
        from quietmax.data.registry import dataset_status

        present = [name for name in default if dataset_status(name, self.data_dir).present]
        chosen = self.chosen or present
        if not chosen:
            raise DataUnavailable(
                f"None of {', '.join(default)} is present. 'quietmax datasets' lists where their files come from."
            )
        for name in self.chosen or ():
            if not dataset_status(name, self.data_dir).present:
                load_records(name, data_dir=self.data_dir)
        return chosen

    def wrote(self, paths: Sequence[Path]) -> None:
        """Print the written files."""
        if not self.as_json:
            for path in paths:
                console.print(f"wrote {path}", soft_wrap=True)


Removals = Annotated[
    int | None, typer.Option(min=1, help="With --measure: records to remove. Default: 6 to 12, by data set.")
]
Repeats = Annotated[
    int | None, typer.Option(min=1, help="With --measure: number of splits. Default: 1 to 3, by data set.")
]


@with_groups
def bounds_table(*, table: _TableOptions, removals: Removals = None) -> None:
    """Show the upper bounds of the paper's Table 1 side by side, with their conditions and the observed change.

    The bounds follow from the shape of the paper's network; no data is needed. The observed change (retraining without
    single records) is stored for the data sets that we have.

    Example: quietmax reproduce bounds-table --datasets location adult
    """
    from quietmax.experiments import bounds_table as bounds
    from quietmax.experiments.stored import write_table

    observed = []
    if table.measure:
        names = table.measured(("location", "adult", "mnist", "cifar-10", "cifar-100"))
        for name in names:
            with progress_bar(f"retraining on {name}", quiet=table.as_json) as progress:
                observed.append(
                    bounds.observe(
                        name, removals=removals, data_dir=table.data_dir, seed=table.seed, progress=progress
                    )
                )
    else:
        observed = bounds.stored_observations()
    rows = bounds.bounds_table(table.chosen, observed)
    if table.as_json:
        print_json([row.to_json() for row in rows])
    else:
        _print_bounds(rows)
    if table.output is not None:
        written = [write_table([row.flat() for row in rows], table.output / "bounds-table.csv")]
        if table.measure:
            written.append(write_table([asdict(each) for each in observed], table.output / bounds.STORED))
        table.wrote(written)


def _print_bounds(rows: Sequence[BoundsRow]) -> None:
    from quietmax.experiments.bounds_table import TITLES, condition_summaries

    applying = sum(bound.applies is True for row in rows for bound in row.bounds)
    print_table(
        "Table 1: upper bounds on the change of all weights by one record (L2)",
        ("data set", *TITLES),
        [(row.dataset, *(_short(bound.value) for bound in row.bounds)) for row in rows],
        caption=f"All conditions are known to hold for {applying} of {len(rows) * len(TITLES)} bounds.",
    )
    print_table(
        "Conditions of the bounds",
        ("condition", "needed by", "verdict", "why (first data set)"),
        [
            (
                each.condition,
                "all" if len(each.needed_by) == len(TITLES) else ", ".join(each.needed_by),
                f"{_VERDICTS[each.holds]}: {'all' if len(each.datasets) == len(rows) else ', '.join(each.datasets)}",
                each.because,
            )
            for each in condition_summaries(rows)
        ],
        caption="That the minimiser is reached is not in the paper's table; the proofs take it for granted.",
        prose=True,
    )
    observed = [(row, row.observed) for row in rows if row.observed is not None]
    if observed:
        print_table(
            "Observed change of all weights (L2)",
            ("data set", "this paper's bound", "observed", "ordinary record", "removals", "bound"),
            [
                (
                    row.dataset,
                    _short(row.bounds[-1].value),
                    f"{_short(seen.weights_l2)} ({seen.kind})",
                    _short(seen.ordinary_l2),
                    str(seen.removals),
                    row.verdict,
                )
                for row, seen in observed
            ],
            caption="The largest change by retraining without one record: a lower bound on the true sensitivity, so "
            "'not exceeded' proves nothing. Mislabelled and extreme records were planted.",
        )


def _short(value: float) -> str:
    """Format a number with three digits, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@with_groups
def architectures(*, table: _TableOptions, repeats: Repeats = None, removals: Removals = None) -> None:
    """Show training and the paper's formulas beyond its network: other losses, activations and depths.

    Example: quietmax reproduce architectures --datasets location
    """
    from quietmax.experiments import architectures as ours
    from quietmax.experiments.stored import write_table

    if table.measure:
        names = table.measured(("location", "adult"))
        cases = [(name, *case) for name in names for case in ours.ARCHITECTURES]
        rows = []
        with progress_bar("architectures", quiet=table.as_json) as progress:
            for done, case in enumerate(cases):
                progress(done, len(cases))
                rows.append(
                    ours.measure_architecture(
                        *case,
                        repeats=repeats or 3,
                        removals=removals or 6,
                        data_dir=table.data_dir,
                        seed=table.seed,
                    )
                )
    else:
        rows = ours.stored_architectures(table.chosen)
    if table.as_json:
        print_json([row.to_json() for row in rows])
    else:
        for name in dict.fromkeys(row.dataset for row in rows):
            _print_architectures(name, [row for row in rows if row.dataset == name])
    if table.output is not None:
        table.wrote([write_table([asdict(row) for row in rows], table.output / ours.STORED)])


def _print_architectures(name: str, rows: Sequence[ArchitectureRow]) -> None:
    def against(formula: float | None, seen: float) -> str:
        if formula is None:
            return f"{_short(seen)} / -"
        return f"{_short(seen)} {'>' if seen > formula else '<='} {_short(formula)}"

    print_table(
        f"{name}: hidden layers of 128 neurons",
        ("layers", "loss", "train", "test", "gradient, rho", "weights, D2W", "logit, Dz"),
        [
            (
                f"{row.layers} {row.activation}",
                row.loss.replace("cross-entropy", "CE"),
                f"{row.train_accuracy:.3f}",
                f"{row.test_accuracy:.3f}",
                against(row.rho, row.gradient),
                against(row.weights_l2, row.observed_weights_l2),
                against(row.logit, row.observed_logit),
            )
            for row in rows
        ],
        caption=f"Means of {rows[0].repeats} splits; CE: cross-entropy. Measured against the paper's formula: the "
        f"largest gradient of one record, and the largest change by removing one of {rows[0].removals} records. The "
        "paper has no rho for the quadratic loss. For relu the neuron values in the formulas are measured.",
    )


@with_groups
def alpha(*, table: _TableOptions, repeats: Repeats = None, workers: WorkerCount = None) -> None:
    """Show accuracy and leakage for the values of alpha that the paper searched, 0.5 to 10.

    With --measure, finished trials are kept in --output (default: quietmax-alpha); the same command continues from
    there.

    Example: quietmax reproduce alpha --datasets location --output alpha
    """
    from quietmax.experiments import alpha as ours
    from quietmax.experiments.stored import stored_table, write_table

    done, output = None, table.output
    if table.measure:
        output = output or Path("quietmax-alpha")
        names = table.measured(("location", "adult", "mnist", "cifar-10", "cifar-100"))
        done = run_with_progress(
            ours.alpha_trials(names, repeats=repeats, seed=table.seed),
            output,
            workers=workers,
            data_dir=table.data_dir,
            quiet=table.as_json,
        )
        rows = ours.alpha_rows(done.results)
    else:
        rows = stored_table(ours.AlphaRow, ours.STORED, table.chosen)
    choices = ours.alpha_choices(rows)
    if table.as_json:
        print_json({"rows": [row.to_json() for row in rows], "choices": [each.to_json() for each in choices]})
    else:
        for choice in choices:
            _print_alphas(choice, [row for row in rows if row.dataset == choice.dataset])
    written = []
    if output is not None:
        written = [
            write_table([asdict(row) for row in rows], output / ours.STORED),
            *ours.write_alpha_figures(rows, output),
        ]
    if done is None:
        table.wrote(written)
    else:
        finish(done, written, quiet=table.as_json)


def _print_alphas(choice: AlphaChoice, rows: Sequence[AlphaRow]) -> None:
    from quietmax.models.training import ALPHA_TOLERANCE

    shortfalls = {trial.alpha: trial.shortfall for trial in choice.trials}

    def marks(row: AlphaRow) -> str:
        names = (("rule", choice.chosen), ("paper", choice.paper))
        return ", ".join(name for name, value in names if value == row.alpha)

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.4f}"

    attacked = [
        f"{name} {value:.2f}"
        for name, value in (
            ("shadow", choice.shadow_correlation),
            ("threshold", choice.threshold_correlation),
        )
        if value is not None
    ]
    print_table(
        f"{choice.dataset}: alpha of the convexified loss",
        (
            "alpha",
            "train acc.",
            "test acc.",
            "below original by",
            "leakage, shadow",
            "leakage, threshold",
            "",
        ),
        [
            (
                "original loss" if row.alpha is None else f"{row.alpha:g}",
                number(row.train_accuracy),
                number(row.test_accuracy),
                "" if row.alpha is None else number(shortfalls[row.alpha]),
                number(row.shadow_leakage),
                number(row.threshold_leakage),
                marks(row),
            )
            for row in rows
        ],
        caption=f"Means of {rows[-1].repeats} splits, {rows[-1].shadows} shadow networks per alpha. Our rule: the "
        f"smallest alpha at most {ALPHA_TOLERANCE:g} below the original loss in training and test accuracy."
        + (f" Spearman correlation of alpha and leakage: {', '.join(attacked)}." if attacked else ""),
    )


@with_groups
def cifar(*, table: _TableOptions) -> None:
    """Show which scaling of pixels, learning rate and loss give the paper's numbers on CIFAR.

    With --measure, finished trials are kept in --output (default: quietmax-cifar); the same command continues from
    there.

    Example: quietmax reproduce cifar --datasets cifar-100
    """
    from quietmax.experiments import cifar as ours
    from quietmax.experiments.stored import stored_table, write_table

    output = table.output
    if table.measure:
        output = output or Path("quietmax-cifar")
        trials = _measured_cifar(table, output / ours.STORED)
    else:
        trials = stored_table(ours.CifarTrial, ours.STORED, table.chosen)
    networks, private = ours.network_rows(trials), ours.private_rows(trials)
    if table.as_json:
        print_json(
            {"networks": [row.to_json() for row in networks], "dpsgd": [row.to_json() for row in private]}
        )
    else:
        for name in dict.fromkeys(trial.dataset for trial in trials):
            _print_networks(name, [row for row in networks if row.dataset == name])
            if any(row.dataset == name for row in private):
                _print_private(name, [row for row in private if row.dataset == name])
    if output is not None:
        table.wrote([write_table([asdict(trial) for trial in trials], output / ours.STORED)])


def _measured_cifar(table: _TableOptions, path: Path) -> list[CifarTrial]:
    from quietmax.data.load import load_records
    from quietmax.experiments import cifar as ours
    from quietmax.experiments.stored import read_table, write_table

    wanted = ours.cases(table.measured(ours.DATASETS))
    trials: list[CifarTrial] = read_table(ours.CifarTrial, path) if path.is_file() else []
    records = None
    with progress_bar("CIFAR", quiet=table.as_json) as progress:
        for done, case in enumerate(wanted):
            progress(done, len(wanted))
            if ours.is_measured(case, trials):
                continue
            if records is None or records.name != case.dataset:
                records = load_records(case.dataset, data_dir=table.data_dir)
            trials += ours.measure(case, records, seed=table.seed)
            write_table([asdict(trial) for trial in trials], path)
    return trials


def _print_networks(name: str, rows: Sequence[NetworkRow]) -> None:
    from quietmax.experiments.findings import CURVE_TOLERANCE

    print_table(
        f"{name}: networks without privacy, and Algorithm 1",
        ("pixels", "rate", "loss", "splits", "train", "test", "Alg. 1"),
        [
            (
                row.scaling,
                f"{row.learning_rate:g}" + ("" if row.epochs == 100 else f", {row.epochs} epochs"),
                row.loss + ("" if row.alpha is None else f", {row.alpha:g}"),
                str(row.splits),
                f"{row.train_accuracy.value:.3f}",
                f"{row.test_accuracy.value:.3f}",
                f"{row.within}/{row.points}" if row.points else "",
            )
            for row in rows
        ],
        caption="; ".join(
            f"the paper's {loss}: {train:.3f}, {test:.3f}"
            for loss, train, test in dict.fromkeys(
                (row.loss, row.paper_train_accuracy, row.paper_test_accuracy) for row in rows
            )
        )
        + f". Rate: learning rate; after the loss: alpha; last column: points of Algorithm 1's accuracy loss within "
        f"{CURVE_TOLERANCE:g} of the paper's curves.",
    )


def _print_private(name: str, rows: Sequence[PrivateRow]) -> None:
    print_table(
        f"{name}: DP-SGD as published, accountant RDP",
        ("pixels", "rate", "loss", "eps", "test", "paper", "lost", "paper "),
        [
            (
                row.scaling,
                f"{row.learning_rate:g}",
                row.loss,
                f"{row.epsilon:g}",
                f"{row.test_accuracy:.3f}",
                f"{row.paper_test_accuracy:.3f}",
                "" if row.accuracy_loss is None else f"{row.accuracy_loss:.3f}",
                f"{row.paper_accuracy_loss:.3f}",
            )
            for row in rows
        ],
        caption="Test accuracy, and the accuracy lost against the network without privacy of the same settings.",
    )
