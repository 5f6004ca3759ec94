"""`quietmax compare`: privacy and utility of every method on a data set or one's own file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from quietmax.attacks.base import Attack
from quietmax.attacks.registry import named
from quietmax.attacks.registry import registered as known_attacks
from quietmax.cli._grids import Output, Ray, Workers, compute, finish, listed, numbers, where
from quietmax.cli._options import DataDir, Download, Json, Seed, TableOptions, with_groups
from quietmax.cli._output import print_json, print_table
from quietmax.data.load import load_records
from quietmax.data.records import split
from quietmax.data.registry import dataset, dataset_status
from quietmax.data.tables import is_table_path
from quietmax.errors import InvalidInput, unknown_name
from quietmax.experiments.grid import Effort, Group, Source, Trial
from quietmax.experiments.methods import method
from quietmax.experiments.paper import EPSILONS
from quietmax.experiments.report import write_report
from quietmax.experiments.report.page import OWNER_ONLY, SEEDED_NOISE, About
from quietmax.experiments.shared import source_records
from quietmax.experiments.summary import STATUS_WORDS, Summary, summarise

DEFAULT_METHODS = (
    "plain",
    "algorithm1-gaussian",
    "algorithm1-laplace",
    "sampled-neuron",
    "teachers",
    "head",
    "dpsgd",
)
DEFAULT_EPSILONS = (0.1, 1.0, 10.0)


@with_groups
def command(
    *,
    subject: Annotated[
        str,
        typer.Argument(metavar="DATASET|FILE", help="A data set's name, or a .csv, .parquet or .npz file."),
    ],
    methods: Annotated[
        list[str] | None,
        typer.Option(help="One or more; also dpsgd-rdp, dpsgd-zcdp, dpsgd-ac, dpsgd-nc, published-rdp, ..."),
    ] = None,
    epsilons: Annotated[list[str] | None, typer.Option(help="As in: --epsilons 0.1 1 10.")] = None,
    queries: Annotated[
        list[str] | None, typer.Option(help="Answers that epsilon pays for, where each costs: 1,100.")
    ] = None,
    attacks: Annotated[list[str] | None, typer.Option(help="One or more; default: shadow.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Random splits to average over.")] = 1,
    records: Annotated[
        int | None, typer.Option(min=10, help="Training records; default: the data set's, else two fifths.")
    ] = None,
    shadows: Annotated[int, typer.Option(min=1, help="Shadow networks for the attacks.")] = 10,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of the network and its shadows.")] = 100,
    attack_epochs: Annotated[int, typer.Option(min=1, help="Epochs of the attack networks.")] = 50,
    output: Output = Path("quietmax-comparison"),
    workers: Workers = None,
    ray: Ray = None,
    table: TableOptions,
    data_dir: DataDir = None,
    download: Download = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Accuracy, leakage, claimed and audited epsilon, and times of every method, on the same splits of your records.

    Methods without a proven guarantee are named so. The report is for the owner of the records: its figures are
    computed from them without noise, and the number of records is taken as public. Can be stopped at any time; the
    same command goes on from there.

    Examples:

    quietmax compare mnist-5k --epsilons 1 10 --attacks threshold

    quietmax compare people.csv --label income --epsilons 1 --queries 1,100
    """
    own = table.given()
    chosen_attacks = tuple(dict.fromkeys(listed(attacks) or ["shadow"]))
    unknown = [name for name in chosen_attacks if name not in known_attacks()]
    if unknown:
        raise unknown_name("attack", unknown[0], known_attacks())
    if shadows < 2 and any(name.startswith(("lira", "rmia")) for name in chosen_attacks):
        raise InvalidInput("LiRA and RMIA compare shadow networks with each other; give --shadows 2 or more.")
    size, alpha = _size(subject, records, own, data_dir, download)
    effort = Effort(size, shadows, alpha, epochs, attack_epochs, chosen_attacks)
    source = Source.of(subject, own)
    counts = [_whole(count) for count in numbers(queries, "--queries") or [1.0]]
    wanted = numbers(epsilons, "--epsilons") or list(DEFAULT_EPSILONS)
    names = list(dict.fromkeys(listed(methods) or DEFAULT_METHODS))
    _check_attacks(source, effort, names, seed, data_dir)
    trials = [
        trial
        for repeat in range(repeats)
        for name in names
        for trial in method_cells(Group(source, effort, repeat, seed), name, wanted, counts)
    ]
    done = compute(trials, output, where(workers, ray), data_dir, quiet=as_json)
    summaries = summarise(done.results)
    about = About(
        f"Privacy and utility on {source.title}",
        f"{size:,} training records, {shadows} shadow networks, {epochs} epochs, {repeats} repeats",
        seed,
        tuple(f"{trial}: {failure}" for trial, failure in done.failures.items()),
        paper=False,
    )
    written = write_report(summaries, output, about)
    if as_json:
        failures = {str(trial): failure for trial, failure in done.failures.items()}
        print_json(
            {
                "about": f"{SEEDED_NOISE} {OWNER_ONLY}",
                "results": [each.flat() for each in summaries],
                "failures": failures,
                "computed": done.computed,
                "written": [str(path) for path in written],
            }
        )
    else:
        _print(summaries, chosen_attacks)
    finish(done, written, quiet=as_json)


def method_cells(group: Group, name: str, epsilons: Sequence[float], queries: Sequence[int]) -> list[Trial]:
    """The cells of one method; published DP-SGD exists at the paper's epsilons only."""
    chosen = method(name)
    if chosen.status == "none":
        return [Trial(group, name)]
    if name.startswith("published-") and not set(epsilons) <= set(EPSILONS):
        raise InvalidInput(
            f"The method {name} is trained at the paper's epsilons only "
            f"({', '.join(f'{epsilon:g}' for epsilon in EPSILONS)}), but --epsilons holds "
            f"{', '.join(f'{epsilon:g}' for epsilon in epsilons if epsilon not in EPSILONS)}; choose among them."
        )
    counts: Sequence[int | None] = queries if chosen.per_answer else [None]
    return [Trial(group, name, epsilon, count) for count in counts for epsilon in epsilons]


def _size(
    subject: str, records: int | None, own: dict[str, Any], data_dir: Path | None, download: bool
) -> tuple[int, float]:
    """Training records and alpha; reading a file here refuses a bad one before anything is trained."""
    if is_table_path(subject):
        found = load_records(subject, **own)
        return len(split(found, size=records).train_rows), 1.0
    if own:
        raise InvalidInput(
            f"The declarations about a table do not belong to the data set '{subject}'; leave them out."
        )
    registered = dataset(subject)
    if download or not dataset_status(subject, data_dir).present:
        load_records(subject, data_dir=data_dir, download=download)
    return records or registered.records, registered.alpha


def _check_attacks(
    source: Source, effort: Effort, names: Sequence[str], seed: int, data_dir: Path | None
) -> None:
    """Refuse attacks that ask for more than the candidates where a method answers no others."""
    unable = [name for name in names if method(name).candidates_only and method(name).attacked]
    asking = [
        name
        for name in effort.attacks
        if type(named(name, models=effort.shadows)).queried_rows is not Attack.queried_rows
    ]
    if not (unable and asking):
        return
    if len(split(source_records(source, data_dir), size=effort.records, seed=seed).pool_rows):
        raise InvalidInput(
            f"The attack {asking[0]} also asks for records that are neither members nor non-members, which "
            f"{', '.join(unable)} do not answer in a comparison; choose shadow, threshold or lira, or other --methods."
        )


def _whole(count: float) -> int:
    if count != int(count):
        raise InvalidInput(f"--queries holds {count:g}, but must be whole numbers; correct it.")
    return int(count)


def _print(summaries: Sequence[Summary], attacks: Sequence[str]) -> None:
    print_table(
        "Privacy and utility",
        ("method", "guarantee", "eps", "answers", "accuracy", "loss", *attacks, "audited", "fit, s"),
        (
            (
                each.method,
                STATUS_WORDS[each.status],
                "" if each.epsilon is None else f"{each.epsilon:g}",
                "any" if each.queries is None else f"{each.queries:,}",
                f"{each.test_accuracy.value:.3f}",
                f"{each.accuracy_loss.value:.3f}",
                *(f"{each.leakage[name].value:.3f}" if name in each.leakage else "" for name in attacks),
                "" if each.audited_epsilon is None else f"{each.audited_epsilon:.2f}",
                f"{each.fit_seconds:.1f}",
            )
            for each in summaries
        ),
        caption="Attacks: leakage, TPR - FPR. Audited: at least this epsilon (of one answer, in its currency, where "
        f"each costs). {SEEDED_NOISE} {OWNER_ONLY}",
    )
