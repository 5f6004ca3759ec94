"""`quietmax train`: train an ordinary classifier on a data set or on the user's own table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from quietmax.cli.guarantees import print_guarantee
from quietmax.cli.option_groups import with_groups
from quietmax.cli.options import AdultEncoding, DataDir, Download, Json, Seed, TableOptions
from quietmax.cli.output import print_json, print_table, progress_bar
from quietmax.cli.train_dpsgd import DPSGDOptions
from quietmax.cli.train_options import check_options
from quietmax.cli.train_private import PrivateOptions, train_private
from quietmax.data import datasets, load
from quietmax.errors import InvalidInput
from quietmax.models import (
    Convexified,
    CrossEntropy,
    Loss,
    Quadratic,
    TrainingSettings,
    accuracy,
    save_model,
    search_alpha,
    train,
)
from quietmax.models.files import check_target
from quietmax.sensitivity import published

_PRIVATE = "Private training"
_DPSGD = "Private training with DP-SGD"


@with_groups
def command(
    *,
    data: Annotated[str, typer.Argument(help="A data set's name, or a CSV, Parquet or NPZ file.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write the model to.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is already there.")
    ] = False,
    records: Annotated[int | None, typer.Option(help="Training records, and as many test records.")] = None,
    seed: Seed = 0,
    private: Annotated[
        str | None,
        typer.Option(help="head, teachers or dpsgd: train with a guarantee.", rich_help_panel=_PRIVATE),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="The whole privacy budget; default 1.", rich_help_panel=_PRIVATE)
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Its delta; default 1e-5, with DP-SGD 1/(10 * declared size).", rich_help_panel=_PRIVATE
        ),
    ] = None,
    queries: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Answers the budget is for; a head without it answers any number.",
            rich_help_panel=_PRIVATE,
        ),
    ] = None,
    declared_size: Annotated[
        int | None,
        typer.Option(min=1, help="The public number of training records.", rich_help_panel=_PRIVATE),
    ] = None,
    teachers: Annotated[
        int | None, typer.Option(min=1, help="Number of teachers.", rich_help_panel=_PRIVATE)
    ] = None,
    route: Annotated[
        str | None,
        typer.Option(
            help="Head: gradient (default) or output; with --queries always output.", rich_help_panel=_PRIVATE
        ),
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(
            help="Public features: auto (default), identity, unit-norm or scattering.",
            rich_help_panel=_PRIVATE,
        ),
    ] = None,
    accountant: Annotated[
        str | None, typer.Option(help="pld (default), rdp, zcdp, ac or nc.", rich_help_panel=_DPSGD)
    ] = None,
    reading: Annotated[
        str | None,
        typer.Option(
            help="proven (default): Poisson samples, every step counted; published: shuffled epochs, counted as the "
            "paper's program did, conditional.",
            rich_help_panel=_DPSGD,
        ),
    ] = None,
    configuration: Annotated[
        str | None,
        typer.Option(
            help="Where other settings come from: today (default), or paper (128 tanh units, Adam 0.001, batches of "
            "100, 100 epochs, clip 1).",
            rich_help_panel=_DPSGD,
        ),
    ] = None,
    sampling_rate: Annotated[
        float | None,
        typer.Option(help="Chance of a record to be in a step's batch.", rich_help_panel=_DPSGD),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to take.", rich_help_panel=_DPSGD)] = None,
    clip: Annotated[
        float | None, typer.Option(help="Largest norm of one record's gradient.", rich_help_panel=_DPSGD)
    ] = None,
    optimiser: Annotated[
        str | None, typer.Option(help="sgd, momentum or adam.", rich_help_panel=_DPSGD)
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="convexified (default), cross-entropy or quadratic.")
    ] = None,
    alpha: Annotated[
        str | None,
        typer.Option(help="Constant of the convexified loss, or 'search'; default: the data set's."),
    ] = None,
    averaged_over: Annotated[
        str | None,
        typer.Option(
            help="'samples and classes' (default, the authors' program) or 'samples' (as printed); convexified only."
        ),
    ] = None,
    hidden: Annotated[
        list[int] | None, typer.Option(help="Neurons of a hidden layer; repeat per layer.")
    ] = None,
    activation: Annotated[str | None, typer.Option(help="tanh (default), sigmoid or relu.")] = None,
    epochs: Annotated[
        int | None, typer.Option(min=0, help="Passes over the training records; default 100.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Records per step; default 100.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Step size; default Adam's 0.001.")] = None,
    l2: Annotated[float | None, typer.Option(help="L2 penalty on the kernels; default 0.001.")] = None,
    table: TableOptions,
    encoding: AdultEncoding = None,
    data_dir: DataDir = None,
    download: Download = False,
    as_json: Json = False,
) -> None:
    """Train an ordinary classifier with the paper's loss (plain answers, not private), or a private one.

    Which private one? Many queries, or weights to publish: --private head. A few queries (up to about 4 at epsilon 1
    with 10,000 records) from any network: --private teachers --queries N. A network of your own shape trained by noisy
    gradients, any number of queries: --private dpsgd (usually less accurate than a head).

    Examples:

    quietmax train mnist-5k --output model

    quietmax train mnist-5k --private head --epsilon 1 --output private

    quietmax train mnist-5k --private dpsgd --declared-size 2000 -o dpsgd

    quietmax train people.csv --label income --private head --output income
    """
    own = table.given()
    if output is not None:
        check_target(output, overwrite=overwrite)
    check_options(
        private,
        {
            "epsilon": epsilon,
            "delta": delta,
            "queries": queries,
            "declared_size": declared_size,
            "teachers": teachers,
            "route": route,
            "features": features,
            "accountant": accountant,
            "reading": reading,
            "configuration": configuration,
            "sampling_rate": sampling_rate,
            "steps": steps,
            "clip": clip,
            "optimiser": optimiser,
            "loss": loss,
            "alpha": alpha,
            "averaged_over": averaged_over,
            "hidden": hidden,
            "activation": activation,
            "epochs": epochs,
            "batch_size": batch_size,
            "learning_rate": learning_rate,
            "l2": l2,
        },
    )
    settings = TrainingSettings(
        tuple(hidden) if hidden else (128,),
        activation or "tanh",
        Convexified(),
        0.001 if learning_rate is None else learning_rate,
        100 if batch_size is None else batch_size,
        100 if epochs is None else epochs,
        0.001 if l2 is None else l2,
    )
    with progress_bar("loading", quiet=as_json) as progress:
        split = load(
            data,
            records=records,
            seed=seed,
            data_dir=data_dir,
            download=download,
            progress=lambda _, done, total: progress(done, total or done),
            encoding=encoding,
            **own,
        )
    if private is not None:
        noisy = DPSGDOptions(
            accountant or "pld",
            reading or "proven",
            configuration or "today",
            tuple(hidden) if hidden else None,
            activation,
            sampling_rate,
            steps,
            clip,
            learning_rate,
            optimiser,
            l2,
        )
        options = PrivateOptions(
            private,
            1.0 if epsilon is None else epsilon,
            delta,
            queries,
            declared_size,
            teachers,
            route or "gradient",
            features or "auto",
            noisy,
        )
        with progress_bar(f"training {private}", quiet=as_json):
            _report_private(train_private(split, options, output, overwrite), as_json)
        return
    searched = None
    loss = loss or "convexified"
    if loss == "convexified":
        convexified = Convexified(1.0, averaged_over or "samples and classes")  # type: ignore[arg-type]
        if alpha == "search":
            with progress_bar("searching alpha", quiet=as_json) as progress:
                searched = search_alpha(
                    split, settings=replace(settings, loss=convexified), seed=seed, progress=progress
                )
            chosen = searched.alpha
        else:
            chosen = (
                _number(alpha) if alpha is not None else datasets()[data].alpha if data in datasets() else 1.0
            )
        settings = replace(settings, loss=replace(convexified, alpha=chosen))
    else:
        if alpha is not None or averaged_over is not None:
            raise InvalidInput("--alpha and --averaged-over belong to --loss convexified; leave them out.")
        settings = replace(settings, loss=_plain_loss(loss))
    with progress_bar("training", quiet=as_json) as progress:
        model = train(split, settings=settings, progress=progress)
    if output is not None:
        save_model(model, output, overwrite=overwrite)
    result = {
        "dataset": model.dataset,
        "records": model.records,
        "features": model.features,
        "classes": model.classes,
        "loss": loss,
        "alpha": settings.loss.alpha if isinstance(settings.loss, Convexified) else None,
        "train_accuracy": accuracy(model, split.train),
        "test_accuracy": accuracy(model, split.test),
        "model": None if output is None else str(output),
        "not_for_publication": ["records", "train_accuracy", "test_accuracy", "model"],
    }
    if settings.activation != "relu" and settings.l2 > 0:
        result["sensitivity"] = published(model).to_json()
    if searched is not None:
        result["alpha_search"] = [vars(trial) for trial in searched.trials]
    if as_json:
        print_json(result)
        return
    print_table(
        "Trained (plain answers, not private)",
        ("", ""),
        (
            (name.replace("_", " "), f"{value:.4f}" if isinstance(value, float) else f"{value}")
            for name, value in result.items()
            if not isinstance(value, dict | list) and value is not None
        ),
        caption="Not for publication if the records are private: these numbers and the model are computed from them "
        "without noise." + ("" if output else " Not saved: give --output FOLDER to keep the model."),
    )


def _report_private(result: dict[str, Any], as_json: bool) -> None:
    guarantee = result.pop("guarantee")
    if as_json:
        print_json({**result, "guarantee": guarantee.to_json()})
        return
    print_table(
        "Trained with privacy",
        ("", ""),
        (
            (name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else f"{value}")
            for name, value in result.items()
            if not isinstance(value, list) and value is not None
        ),
        caption=f"Not for publication: {' and '.join(result['not_for_publication']).replace('_', ' ')}. The guarantee "
        "does not cover them."
        + ("" if result["model"] else " Not saved: give --output FOLDER to keep the model."),
    )
    print_guarantee(guarantee)


def _plain_loss(name: str) -> Loss:
    losses: dict[str, Loss] = {"cross-entropy": CrossEntropy(), "quadratic": Quadratic()}
    if name not in losses:
        raise InvalidInput(f"There is no loss {name!r}; choose convexified, cross-entropy or quadratic.")
    return losses[name]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(
            f"--alpha is {text!r}, but it must be a positive number or 'search'; give one of these."
        ) from None
