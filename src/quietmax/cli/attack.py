"""`quietmax attack`: run membership-inference attacks on a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quietmax.cli._options import DataOptions, Json, Ray, with_groups
from quietmax.cli._output import console, print_json, print_table, progress_bar
from quietmax.errors import InvalidInput

if TYPE_CHECKING:
    from quietmax.attacks.metrics import AttackReport
    from quietmax.attacks.targets import Target
    from quietmax.data.records import Holdout, Split
    from quietmax.mechanisms.base import Mechanism
    from quietmax.models.stacked import TrainingSettings
    from quietmax.models.training import Model

_MECHANISM_PANEL = "Noise between the network and the attacker"
_DEFAULT_SHADOWS = 20


@dataclass(frozen=True)
class MechanismOptions:
    """A mechanism in front of an ordinary network; every answer costs the same epsilon."""

    mechanism: Annotated[
        str, typer.Option(help="none, algorithm1 or the name of a plug-in.", rich_help_panel=_MECHANISM_PANEL)
    ] = "none"
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="Epsilon of each answer. Required with a mechanism.", rich_help_panel=_MECHANISM_PANEL
        ),
    ] = None
    noise: Annotated[
        str, typer.Option(help="algorithm1: gaussian or laplace.", rich_help_panel=_MECHANISM_PANEL)
    ] = "gaussian"
    seeded: Annotated[
        int | None,
        typer.Option(min=0, help="Reproducible noise from this seed.", rich_help_panel=_MECHANISM_PANEL),
    ] = None


@with_groups
def command(
    *,
    subject: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|DATA",
            help="Model folder; or a data set or table on which the paper's network is trained first.",
        ),
    ],
    attack: Annotated[
        list[str] | None,
        typer.Option(
            help="shadow, threshold, threshold-confidence, threshold-entropy, lira, lira-offline, rmia, "
            "rmia-offline, or the name of a plug-in. Repeatable. Default: shadow."
        ),
    ] = None,
    shadows: Annotated[
        int | None,
        typer.Option(min=1, help="Number of shadow networks. Default: that of the data set, else 20."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Query this server instead of the model, as in http://host/v2/models/name (Open Inference Protocol)."
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(envvar="QUIETMAX_KEY", help="API key of the server. Prefer the environment variable."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write the ROC curves on logarithmic axes to this .png, .pdf or .svg file."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Model folder: the data set or table it was trained on. Default: the data set it names."
        ),
    ] = None,
    shadow_data: Annotated[
        Path | None,
        typer.Option(
            help="Your own table: a table of other people with the same columns. Shadow networks train on them; if the "
            "model was trained without --holdout, half of them are the non-members."
        ),
    ] = None,
    ray: Ray = None,
    mechanism: MechanismOptions,
    options: DataOptions,
    as_json: Json = False,
) -> None:
    """Run membership-inference attacks on a model and report how well they work.

    The attacker trains shadow networks on records of the same data and queries the model for its training and test
    records. A private model's account is charged for the queries. Of your own table the non-members are the holdout of
    the training, or other people from --shadow-data. With a person column persons are told apart, by the mean score of
    their rows.

    Examples:

    quietmax attack model --attack shadow --attack lira --shadows 8

    quietmax attack model --mechanism algorithm1 --epsilon 1 --shadows 8
    """
    from quietmax._io import check_figure
    from quietmax._ray import RayEngine
    from quietmax.attacks.base import run_together
    from quietmax.attacks.builtin import make_attack
    from quietmax.attacks.metrics import INTERVALS, plot_reports
    from quietmax.attacks.shadow_models import check_nonmembers
    from quietmax.data.registry import datasets
    from quietmax.privacy_card import OBSERVED, leakage_file, record_leakage

    _check_mechanism(mechanism, target)
    engine = None if ray is None else RayEngine(ray)
    check_figure(plot)
    found = _find(subject, data, options)
    split = _with_others(found, found.options.load(found.data, quiet=as_json), shadow_data)
    check_nonmembers(split)
    known = datasets().get(found.data)
    alpha = known.alpha if known else 1.0
    model = _model(found, split, alpha, train_first=target is None, quiet=as_json)
    queried = _target(model, found.private, mechanism, target, key)
    models = shadows or (known.shadow_models if known else _DEFAULT_SHADOWS)
    chosen = [
        make_attack(name, models=models, seed=found.options.seed)
        for name in dict.fromkeys(attack or ["shadow"])
    ]
    with progress_bar("training shadow networks and attacking", quiet=as_json) as progress:
        reports = run_together(chosen, model, split, target=queried, engine=engine, progress=progress)
    if as_json:
        print_json(
            {
                "dataset": split.name,
                "records": len(split.train),
                "unit": split.records.unit,
                "model": subject if found.is_folder else None,
                "mechanism": mechanism.mechanism,
                "epsilon_per_answer": mechanism.epsilon,
                "reports": reports,
                "plot": None if plot is None else str(plot),
                "caveat": OBSERVED,
            }
        )
    else:
        for report in reports:
            _print(report)
        console.print(INTERVALS, style="dim")
        console.print(OBSERVED)
    if found.is_folder and target is None:
        by = (
            "the model"
            if mechanism.mechanism == "none"
            else f"{mechanism.mechanism}, epsilon {mechanism.epsilon:g} per answer"
        )
        record_leakage(subject, [{**report.to_json(), "released_by": by} for report in reports])
        if not as_json:
            stored = leakage_file(subject).name
            console.print(f"Stored beside {subject} in {stored}; 'quietmax card {subject}' shows them.")
    if plot is not None:
        plot_reports(reports, plot)


@dataclass(frozen=True)
class _Found:
    """What the argument names: its data, and the model if it is a folder."""

    data: str
    options: DataOptions
    model: Model | None = None
    private: Any = None

    @property
    def is_folder(self) -> bool:
        return self.model is not None or self.private is not None


def _find(subject: str, data: str | None, options: DataOptions) -> _Found:
    """Open the model folder, or check that the argument names data."""
    from quietmax.data.registry import datasets
    from quietmax.data.tables import is_table_path
    from quietmax.estimators.serialization import open_private
    from quietmax.models.serialization import load_model, read_description

    if not (Path(subject) / "model.json").is_file():
        if data is not None:
            raise InvalidInput("--data can only be combined with a model folder.")
        if subject not in datasets() and (Path(subject).is_dir() or not is_table_path(subject)):
            raise InvalidInput(
                f"The argument must be a model folder, a data set ({', '.join(datasets())}) or a .csv, .parquet or "
                f".npz file, got {subject!r}."
            )
        return _Found(subject, options)
    description = read_description(subject)
    trained_on = data or str(description.get("dataset"))
    if trained_on not in datasets() and not is_table_path(trained_on):
        raise InvalidInput(
            f"The model was trained on '{trained_on}', which is not a registered data set; --data with its file and "
            "the declarations of the training are required."
        )
    if description.get("kind") == "mlp":
        model = load_model(subject)
        found = replace(options, seed=model.seed)
        by_size = not is_table_path(trained_on) and datasets()[trained_on].holdout is None
        if by_size and options.holdout is None:
            found = replace(found, records=options.records or model.records)
        return _Found(trained_on, found, model=model)
    private = open_private(subject)
    if is_table_path(trained_on) or private.holdout is not None:
        options = _with_holdout(options, private.holdout)
    return _Found(trained_on, options, private=private)


def _with_holdout(options: DataOptions, holdout: Holdout | None) -> DataOptions:
    """Return the options with the holdout that the model was trained with; raise if another one was given."""
    if holdout is None:
        if options.holdout:
            raise InvalidInput("--holdout does not apply: the model was trained on everybody in the table.")
        return replace(options, holdout=0.0)
    if options.holdout is not None and options.holdout != holdout.share:
        raise InvalidInput(
            f"--holdout must be {holdout.share:g} as in the training of the model, got {options.holdout:g}."
        )
    return replace(options, holdout=holdout.share, seed=holdout.seed)


def _with_others(found: _Found, split: Split, shadow_data: Path | None) -> Split:
    """Add a table of other people, read with the declarations of the attacked table."""
    from quietmax.attacks.shadow_models import with_shadow_data
    from quietmax.data.load import load_records

    if shadow_data is None:
        return split
    if split.holdout is None:
        raise InvalidInput("--shadow-data can only be combined with your own table.")
    facts = found.options.given()
    beside = Path(found.data).expanduser().with_suffix(".toml")
    if "schema" not in facts and beside.is_file():
        facts["schema"] = beside
    return with_shadow_data(split, load_records(shadow_data, **facts), seed=found.options.seed)


def _model(
    found: _Found, split: Split, alpha: float, *, train_first: bool, quiet: bool
) -> Model | TrainingSettings:
    """Return the folder's network, else train one; training settings are enough if something else is queried."""
    from quietmax.models.losses import Convexified
    from quietmax.models.stacked import TrainingSettings
    from quietmax.models.training import train

    if found.model is not None:
        _check_encoding(found.model, split)
        if split.holdout is not None and len(split.train_rows) != found.model.records:
            raise InvalidInput(
                f"The model was trained on {found.model.records} records, but --holdout {split.holdout.share:g} leaves "
                f"{len(split.train_rows)}; --holdout or --records must be as in training."
            )
        return found.model
    settings = TrainingSettings(loss=Convexified(alpha))
    if found.private is not None or not train_first:
        return settings
    with progress_bar("training the target", quiet=quiet) as progress:
        return train(split, settings=settings, progress=progress)


def _check_encoding(model: Model, split: Split) -> None:
    ours, theirs = (
        None if each is None else each.to_json() for each in (model.encoding, split.records.encoding)
    )
    if ours != theirs:
        raise InvalidInput(
            "The table is encoded differently than at training; --bounds, --categories, --encoding and --schema must "
            "be the same."
        )


def _check_mechanism(options: MechanismOptions, url: str | None) -> None:
    """Raise if the options of the mechanism contradict each other."""
    from quietmax.mechanisms.base import plugin_mechanisms

    if options.mechanism not in ("none", "algorithm1") and options.mechanism not in plugin_mechanisms():
        raise InvalidInput(
            f"--mechanism must be none or algorithm1, or that of an installed plug-in, got {options.mechanism!r}."
        )
    if options.noise not in ("gaussian", "laplace"):
        raise InvalidInput(f"--noise must be gaussian or laplace, got {options.noise!r}.")
    if options.mechanism == "none" and (options.epsilon is not None or options.seeded is not None):
        raise InvalidInput(
            "--epsilon and --seeded can only be combined with a mechanism, as in --mechanism algorithm1."
        )
    if options.mechanism != "none" and url is not None:
        raise InvalidInput("--target cannot be combined with --mechanism: a server has its own mechanism.")
    if options.mechanism != "none" and options.epsilon is None:
        raise InvalidInput(f"--mechanism {options.mechanism} requires --epsilon.")


def _target(
    model: Model | TrainingSettings, private: Any, options: MechanismOptions, url: str | None, key: str | None
) -> Target:
    """Return what is queried; None means the model itself."""
    from quietmax.accounting.costs import Budget
    from quietmax.attacks.targets import Endpoint
    from quietmax.mechanisms.algorithm1 import Algorithm1
    from quietmax.mechanisms.base import Answerer, plugin_mechanisms
    from quietmax.models.training import Model
    from quietmax.noise.sources import EXACT, SeededNoise

    if url is not None:
        return Endpoint(url, key)
    if options.mechanism == "none":
        return private
    if not isinstance(model, Model):
        raise InvalidInput("--mechanism cannot be combined with a private model: it has its own mechanism.")
    assert options.epsilon is not None
    source = EXACT if options.seeded is None else SeededNoise(options.seeded)
    mechanism: Mechanism = Algorithm1("laplace" if options.noise == "laplace" else "gaussian")
    if options.mechanism != "algorithm1":
        mechanism = plugin_mechanisms()[options.mechanism]
    return Answerer.prepare(model, mechanism, Budget(options.epsilon), noise=source)


def _print(report: AttackReport) -> None:
    print_table(report.title, ("", "value", "95% interval"), report.table())
    for note in report.notes:
        console.print(f"  {note}")
