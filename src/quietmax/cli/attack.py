"""`quietmax attack`: run membership-inference attacks on a model."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from quietmax.cli._options import DataOptions, Ray, loss_of, mechanism_of, with_groups
from quietmax.cli._output import console, print_json, print_table, progress_bar
from quietmax.errors import InvalidInput

if TYPE_CHECKING:
    from quietmax.attacks.targets import Target
    from quietmax.data.records import Holdout, Split
    from quietmax.estimators.serialization import PrivateModel
    from quietmax.models.stacked import TrainingSettings
    from quietmax.models.training import Model

_DEFAULT_SHADOWS = 20


@dataclass(frozen=True)
class _TargetOptions:
    """What is queried: the model, a mechanism in front of an ordinary network, or a server."""

    PANEL: ClassVar = "What is queried instead of the model"

    mechanism: Annotated[
        str,
        "none; or noise between an ordinary network and the attacker: algorithm1, algorithm1-laplace or a plug-in.",
    ] = "none"
    epsilon: Annotated[float | None, "Epsilon of each answer. Required with a mechanism."] = None
    target: Annotated[
        str | None,
        "Query this server, as in http://host/v2/models/name (Open Inference Protocol). Its API key is read from the "
        "environment variable QUIETMAX_KEY.",
    ] = None

    def _check(self) -> None:
        """Raise if the options exclude each other, before anything is trained."""
        if self.mechanism == "none":
            if self.epsilon is not None:
                raise InvalidInput(
                    "--epsilon can only be combined with a mechanism, as in --mechanism algorithm1."
                )
            return
        mechanism_of(self.mechanism)
        if self.target is not None:
            raise InvalidInput(
                "--target cannot be combined with --mechanism: a server has its own mechanism."
            )
        if self.epsilon is None:
            raise InvalidInput(f"--mechanism {self.mechanism} requires --epsilon.")

    def _target_for(self, model: Model | TrainingSettings, private: Any) -> Target:
        """What is queried; None is the model itself."""
        from quietmax.accounting.costs import Budget
        from quietmax.attacks.targets import Endpoint
        from quietmax.mechanisms.base import Answerer
        from quietmax.models.training import Model

        if self.target is not None:
            return Endpoint(self.target, os.environ.get("QUIETMAX_KEY"))
        if self.epsilon is None:
            return private
        if not isinstance(model, Model):
            raise InvalidInput(
                "--mechanism cannot be combined with a private model: it has its own mechanism."
            )
        return Answerer.prepare(model, mechanism_of(self.mechanism), Budget(self.epsilon))


@dataclass(frozen=True, kw_only=True)
class _AttackOptions:
    """What is attacked, and by which attacks."""

    subject: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|DATA",
            help="Model folder; or a data set or table on which the paper's network is trained first.",
        ),
    ]
    attack: Annotated[
        list[str] | None,
        "shadow, threshold, threshold-confidence, threshold-entropy, lira, lira-offline, rmia, rmia-offline, or the "
        "name of a plug-in. Repeatable. Default: shadow.",
    ] = None
    shadows: Annotated[
        int | None, "Number of shadow networks. Default: that of the data set, else 20.", {"min": 1}
    ] = None
    plot: Annotated[
        Path | None, "Write the ROC curves on logarithmic axes to this .png, .pdf or .svg file."
    ] = None
    data: Annotated[
        str | None, "Model folder: the data set or table it was trained on. Default: the data set it names."
    ] = None
    shadow_data: Annotated[
        Path | None,
        "Your own table: a table of other people with the same columns. Shadow networks train on them; if the model "
        "was trained without --holdout, half of them are the non-members.",
    ] = None
    ray: Ray = None


@with_groups
def command(*, options: _AttackOptions, target: _TargetOptions, source: DataOptions) -> None:
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
    from quietmax.models.stacked import TrainingSettings
    from quietmax.models.training import train
    from quietmax.privacy_card import OBSERVED, leakage_file, record_leakage

    target._check()
    engine = None if options.ray is None else RayEngine(options.ray)
    check_figure(options.plot)
    data, source, own, private = _find(options.subject, options.data, source)
    split = _with_others(data, source, source.load(data), options.shadow_data)
    check_nonmembers(split)
    model: Model | TrainingSettings
    if own is not None:
        model = _checked(own, split)
    else:  # settings are enough if something else is queried
        model = TrainingSettings(loss=loss_of(None, data))
        if private is None and target.target is None:
            with progress_bar("training the target") as progress:
                model = train(split, settings=model, progress=progress)
    known = datasets().get(data)
    models = options.shadows or (known.shadow_models if known else _DEFAULT_SHADOWS)
    names = dict.fromkeys(options.attack or ["shadow"])
    chosen = [make_attack(name, models=models, seed=source.seed) for name in names]
    queried = target._target_for(model, private)
    with progress_bar("training shadow networks and attacking") as progress:
        reports = run_together(chosen, model, split, target=queried, engine=engine, progress=progress)
    stored = None if own is None and private is None else options.subject
    print_json(
        {
            "dataset": split.name,
            "records": len(split.train),
            "unit": split.records.unit,
            "model": stored,
            "mechanism": target.mechanism,
            "epsilon_per_answer": target.epsilon,
            "reports": reports,
            "plot": None if options.plot is None else str(options.plot),
            "caveat": OBSERVED,
        }
    )
    for report in reports:
        print_table(report.title, ("", "value", "95% interval"), report.table())
        for note in report.notes:
            console.print(f"  {note}")
    console.print(INTERVALS, style="dim")
    console.print(OBSERVED)
    if stored is not None and target.target is None:
        noisy = (
            f"{target.mechanism}, epsilon {target.epsilon:g} per answer" if target.epsilon else "the model"
        )
        record_leakage(stored, [{**report.to_json(), "released_by": noisy} for report in reports])
        console.print(
            f"Stored beside {stored} in {leakage_file(stored).name}; 'quietmax card {stored}' shows them."
        )
    if options.plot is not None:
        plot_reports(reports, options.plot)


def _find(
    subject: str, data: str | None, source: DataOptions
) -> tuple[str, DataOptions, Model | None, PrivateModel | None]:
    """Return the data that the argument names and how to load them, and the model if it is a folder."""
    from quietmax.data.registry import datasets
    from quietmax.data.sources import is_table_path
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
        return subject, source, None, None
    description = read_description(subject)
    trained_on = data or str(description.get("dataset"))
    if trained_on not in datasets() and not is_table_path(trained_on):
        raise InvalidInput(
            f"The model was trained on '{trained_on}', which is not a registered data set; --data with its file and "
            "the declarations of the training are required."
        )
    if description.get("kind") == "mlp":
        model = load_model(subject)
        source = replace(source, seed=model.seed)
        by_size = not is_table_path(trained_on) and datasets()[trained_on].holdout is None
        if by_size and source.holdout is None:
            source = replace(source, records=source.records or model.records)
        return trained_on, source, model, None
    private = open_private(subject)
    if is_table_path(trained_on) or private.holdout is not None:
        source = _with_holdout(source, private.holdout)
    return trained_on, source, None, private


def _with_holdout(source: DataOptions, holdout: Holdout | None) -> DataOptions:
    """Return the source with the holdout that the model was trained with; raise if another one was given."""
    if holdout is None:
        if source.holdout:
            raise InvalidInput("--holdout does not apply: the model was trained on everybody in the table.")
        return replace(source, holdout=0.0)
    if source.holdout is not None and source.holdout != holdout.share:
        raise InvalidInput(
            f"--holdout must be {holdout.share:g} as in the training of the model, got {source.holdout:g}."
        )
    return replace(source, holdout=holdout.share, seed=holdout.seed)


def _with_others(data: str, source: DataOptions, split: Split, shadow_data: Path | None) -> Split:
    """Add a table of other people, read with the declarations of the attacked table."""
    from quietmax.attacks.shadow_models import with_shadow_data
    from quietmax.data.registry import load_records

    if shadow_data is None:
        return split
    if split.holdout is None:
        raise InvalidInput("--shadow-data can only be combined with your own table.")
    facts = source.given()
    beside = Path(data).expanduser().with_suffix(".toml")
    if "schema" not in facts and beside.is_file():
        facts["schema"] = beside
    return with_shadow_data(split, load_records(shadow_data, **facts), seed=source.seed)


def _checked(model: Model, split: Split) -> Model:
    """Return the folder's network if it was trained on the training part of the split."""
    ours, theirs = model.encoding, split.records.encoding
    if (ours and ours.to_json()) != (theirs and theirs.to_json()):
        raise InvalidInput("The table is encoded differently than at training; its schema must be the same.")
    if split.holdout is not None and len(split.train_rows) != model.records:
        raise InvalidInput(
            f"The model was trained on {model.records} records, but --holdout {split.holdout.share:g} leaves "
            f"{len(split.train_rows)}; --holdout or --records must be as in training."
        )
    return model
