"""`quietmax attack`: can members be told from a model's answers?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from quietmax._io import check_figure
from quietmax.accounting.budget import Budget
from quietmax.attacks.base import run_together
from quietmax.attacks.registry import BUILT_IN, named
from quietmax.attacks.report import INTERVALS, AttackReport, plot_reports
from quietmax.attacks.targets import Endpoint, Target
from quietmax.cli._options import AdultEncoding, DataDir, Download, Json, Seed, TableOptions, with_groups
from quietmax.cli._output import console, print_json, print_table, progress_bar
from quietmax.data.load import load
from quietmax.data.records import Split
from quietmax.data.registry import datasets
from quietmax.data.tables import is_table_path
from quietmax.errors import InvalidInput
from quietmax.estimators.serialization import open_private
from quietmax.mechanisms.algorithm1 import Algorithm1
from quietmax.mechanisms.base import Answerer
from quietmax.models.losses import Convexified
from quietmax.models.serialization import load_model, read_description
from quietmax.models.stacked import TrainingSettings
from quietmax.models.training import Model, train
from quietmax.noise.sources import EXACT, SeededNoise
from quietmax.privacy_card import OBSERVED, record_leakage

_DEFAULT_SHADOWS = 20


@with_groups
def command(
    *,
    subject: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|DATA",
            help="A model folder; or a data set's name or file, on which the paper's network is trained first.",
        ),
    ],
    attack: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join(BUILT_IN)}, or a plug-in's; repeat for several. Default: shadow."
        ),
    ] = None,
    shadows: Annotated[
        int | None, typer.Option(min=1, help="Shadow networks; default: the data set's, else 20.")
    ] = None,
    mechanism: Annotated[
        str, typer.Option(help="none (plain answers) or algorithm1, between model and attacker.")
    ] = "none",
    epsilon: Annotated[
        float | None, typer.Option(help="algorithm1: the price of *each* answer, as in the paper's figures.")
    ] = None,
    noise: Annotated[str, typer.Option(help="algorithm1: gaussian or laplace.")] = "gaussian",
    seeded: Annotated[
        int | None, typer.Option(min=0, help="algorithm1: fast repeatable noise from this seed.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Ask this server in place of the model: http://host/v2/models/name (Open Inference)."
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(envvar="QUIETMAX_KEY", help="The server's key; better given by QUIETMAX_KEY."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the ROC on log axes to this file.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Model folder: the file or data set it was trained on, if not a known one."),
    ] = None,
    records: Annotated[
        int | None, typer.Option(help="Training records, as at training; default: the model's or data set's.")
    ] = None,
    seed: Seed = 0,
    table: TableOptions,
    encoding: AdultEncoding = None,
    data_dir: DataDir = None,
    download: Download = False,
    as_json: Json = False,
) -> None:
    """Tell training records from others by a model's answers, and say how well that works.

    Shadow networks are trained on other records of the same data; the model is asked for its training and test
    records. A private model's account is charged for it.

    Examples:

    quietmax attack model --attack shadow --attack lira --shadows 8

    quietmax attack model --mechanism algorithm1 --epsilon 1 --shadows 8
    """
    check_figure(plot)
    found = _find(subject, data, records, seed)
    own = table.given()
    with progress_bar("loading", quiet=as_json) as progress:
        split = load(
            found.data,
            records=found.records,
            seed=found.seed,
            data_dir=data_dir,
            download=download,
            progress=lambda _, done, total: progress(done, total or done),
            encoding=encoding,
            **own,
        )
    known = datasets().get(found.data)
    if found.model is None:
        alpha = known.alpha if known else 1.0
        settings = TrainingSettings(loss=Convexified(alpha))
        if found.private is None and target is None:
            with progress_bar("training the target", quiet=as_json) as progress:
                model: Model | TrainingSettings = train(split, settings=settings, progress=progress)
        else:
            model = settings
    else:
        model = found.model
        _check_encoding(found.model, split)
    asked = _target(model, found.private, mechanism, epsilon, noise, seeded, target, key)
    number = shadows or (known.shadow_models if known else _DEFAULT_SHADOWS)
    chosen = [named(name, models=number, seed=found.seed) for name in dict.fromkeys(attack or ["shadow"])]
    with progress_bar("training shadow networks and attacking", quiet=as_json) as progress:
        reports = run_together(chosen, model, split, target=asked, progress=progress)
    if as_json:
        print_json(
            {
                "dataset": split.name,
                "records": len(split.train),
                "model": subject if found.is_folder else None,
                "mechanism": mechanism,
                "epsilon_per_answer": epsilon,
                "reports": [report.to_json() for report in reports],
                "plot": None if plot is None else str(plot),
                "caveat": OBSERVED,
            }
        )
    else:
        for report in reports:
            _print(report)
        console.print(INTERVALS, style="dim", markup=False, highlight=False)
        console.print(OBSERVED, markup=False, highlight=False)
    if found.is_folder and target is None:
        by = "the model" if mechanism == "none" else f"{mechanism}, epsilon {epsilon:g} per answer"
        record_leakage(subject, [{**report.to_json(), "released_by": by} for report in reports])
    if plot is not None:
        plot_reports(reports, plot)


@dataclass(frozen=True)
class _Found:
    """What the argument named: where its data are, and the model in its folder if it is one."""

    data: str
    records: int | None
    seed: int
    model: Model | None = None
    private: Any = None

    @property
    def is_folder(self) -> bool:
        return self.model is not None or self.private is not None


def _find(subject: str, data: str | None, records: int | None, seed: int) -> _Found:
    if not is_model(subject):
        if data is not None:
            raise InvalidInput("--data belongs to a model folder; leave it out and name the data alone.")
        if subject not in datasets() and (Path(subject).is_dir() or not is_table_path(subject)):
            raise InvalidInput(
                f"{subject!r} is neither a model folder nor a data set ({', '.join(datasets())}) nor a .csv, .parquet "
                "or .npz file; name one of these."
            )
        return _Found(subject, records, seed)
    description = read_description(subject)
    trained_on = data or str(description.get("dataset"))
    if trained_on not in datasets() and not is_table_path(trained_on):
        raise InvalidInput(
            f"The model was trained on '{trained_on}', which is no registered data set; give its file with --data and "
            "the same declarations as at training."
        )
    if description.get("kind") == "mlp":
        model = load_model(subject)
        return _Found(trained_on, records or model.records, model.seed, model=model)
    return _Found(trained_on, records, seed, private=open_private(subject))


def is_model(subject: str) -> bool:
    """Whether the argument names a folder that holds a model."""
    return (Path(subject) / "model.json").is_file()


def _check_encoding(model: Model, split: Split) -> None:
    ours, theirs = (
        None if each is None else each.to_json() for each in (model.encoding, split.records.encoding)
    )
    if ours != theirs:
        raise InvalidInput(
            "The data are encoded in another way than at training; give the same declarations (--bounds, --categories, "
            "--encoding, --schema)."
        )


def _target(
    model: Model | TrainingSettings,
    private: Any,
    mechanism: str,
    epsilon: float | None,
    noise: str,
    seeded: int | None,
    url: str | None,
    key: str | None,
) -> Target:
    """What is asked: None means the model itself."""
    if mechanism not in ("none", "algorithm1"):
        raise InvalidInput(
            f"There is no mechanism {mechanism!r} to attack through; choose none or algorithm1."
        )
    if mechanism == "none" and (epsilon is not None or seeded is not None):
        raise InvalidInput("--epsilon and --seeded belong to --mechanism algorithm1; leave them out.")
    if url is not None:
        if mechanism != "none":
            raise InvalidInput(
                "A server has its own mechanism; leave --mechanism out or attack the model itself."
            )
        return Endpoint(url, key)
    if mechanism == "none":
        return private
    if not isinstance(model, Model):
        raise InvalidInput("A private model has its own mechanism; leave --mechanism out.")
    if epsilon is None:
        raise InvalidInput("Algorithm 1 needs the price of an answer; give --epsilon.")
    source = EXACT if seeded is None else SeededNoise(seeded)
    return Answerer.prepare(model, Algorithm1(noise), Budget(epsilon), noise=source)  # type: ignore[arg-type]


def _print(report: AttackReport) -> None:
    print_table(
        f"{report.attack} against {report.target}: {report.members:,} members, {report.nonmembers:,} non-members",
        ("", "value", "95% interval"),
        report.table(),
    )
    for note in report.notes:
        console.print(f"  {note}", markup=False, highlight=False)
