"""`quietmax compare`: privacy and utility of all methods on a data set or the user's own table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quietmax.cli._options import Output, RunOptions, TableOptions, listed, with_groups
from quietmax.cli._output import finish_run, print_json, print_table, print_written
from quietmax.errors import InvalidInput, counted

if TYPE_CHECKING:
    from quietmax.experiments.grid import DataSource, Effort, Trial

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
class _Comparison(RunOptions):
    """What is compared, on which part of the records."""

    output: Output = Path("quietmax-comparison")
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

    def effort(self, source: DataSource) -> Effort:
        """The work of one repeat, if the options are valid and the files are there."""
        from quietmax.attacks.builtin import make_attack
        from quietmax.data.registry import dataset
        from quietmax.data.sources import is_table_path
        from quietmax.experiments.grid import Effort
        from quietmax.experiments.methods import training_size

        attacks = tuple(dict.fromkeys(listed(self.attacks) or ["shadow"]))
        for name in attacks:
            make_attack(name, models=self.shadows, seed=self.seed)
        if self.shadows < 2 and any(name.startswith(("lira", "rmia")) for name in attacks):
            raise InvalidInput(
                "LiRA and RMIA compare shadow networks with each other: --shadows must be at least 2."
            )
        alpha = 1.0
        if not is_table_path(source.name):
            if source.declared != "{}":
                raise InvalidInput(
                    f"The options about your own table do not apply to the data set {source.name!r}."
                )
            alpha = dataset(*self.available([source.name])).alpha
        size, share = training_size(source, self.records, self.holdout, self.data_dir)
        return Effort(size, self.shadows, alpha, self.epochs, self.attack_epochs, attacks, share)

    def trials(self, source: DataSource, effort: Effort) -> list[Trial]:
        """All methods on all repeats."""
        from quietmax.experiments.grid import Group
        from quietmax.experiments.methods import method_trials

        chosen = list(dict.fromkeys(listed(self.methods) or DEFAULT_METHODS))
        epsilons = sorted(set(self.epsilons or (0.1, 1.0, 10.0)))
        if not all(0 < epsilon < math.inf for epsilon in epsilons):
            raise InvalidInput(f"--epsilons must be positive numbers, got {epsilons}.")
        counts = listed(self.queries) or ["1"]
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
def command(
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
    effort = options.effort(source)
    done = options.run(options.trials(source, effort))
    summaries = summarize(done.results)
    unit = source_records(source, options.data_dir).unit
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
    print_written(written)
    finish_run(done)
