"""`quietmax train`: train an ordinary classifier on a data set or on the user's own table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from quietmax.cli.options import (
    Bounds,
    Categories,
    Classes,
    DataDir,
    Download,
    Identifier,
    Ignore,
    Json,
    Label,
    Measure,
    Schema,
    Seed,
    table_options,
)
from quietmax.cli.output import print_json, print_table, progress_bar
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
from quietmax.sensitivity import published


def command(
    data: Annotated[str, typer.Argument(help="A data set's name, or a CSV, Parquet or NPZ file.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write the model to.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is already there.")
    ] = False,
    records: Annotated[int | None, typer.Option(help="Training records, and as many test records.")] = None,
    seed: Seed = 0,
    loss: Annotated[str, typer.Option(help="convexified, cross-entropy or quadratic.")] = "convexified",
    alpha: Annotated[
        str | None,
        typer.Option(help="Constant of the convexified loss, or 'search'; default: the data set's."),
    ] = None,
    averaged_over: Annotated[
        str, typer.Option(help="'samples and classes' (the authors' program) or 'samples' (as printed).")
    ] = "samples and classes",
    hidden: Annotated[
        list[int] | None, typer.Option(help="Neurons of a hidden layer; repeat per layer.")
    ] = None,
    activation: Annotated[str, typer.Option(help="tanh, sigmoid or relu.")] = "tanh",
    epochs: Annotated[int, typer.Option(min=0, help="Passes over the training records.")] = 100,
    batch_size: Annotated[int, typer.Option(help="Records per step.")] = 100,
    learning_rate: Annotated[float, typer.Option(help="Adam's step size.")] = 0.001,
    l2: Annotated[float, typer.Option(help="L2 penalty on the kernels.")] = 0.001,
    label: Label = None,
    classes: Classes = None,
    bounds: Bounds = None,
    categories: Categories = None,
    ignore: Ignore = None,
    identifier: Identifier = None,
    schema: Schema = None,
    measure: Measure = False,
    encoding: Annotated[str | None, typer.Option(help="adult: 'codes' (the paper's) or 'one-hot'.")] = None,
    data_dir: DataDir = None,
    download: Download = False,
    as_json: Json = False,
) -> None:
    """Train an ordinary classifier with the paper's loss. Its plain answers are not private.

    Examples:

    quietmax train mnist-5k --output model

    quietmax train people.csv --label income --bounds age=0:100 --categories sex=Female,Male -o model
    """
    own = table_options(label, classes, bounds, categories, ignore, identifier, schema, measure)
    settings = TrainingSettings(
        tuple(hidden) if hidden else (128,), activation, Convexified(), learning_rate, batch_size, epochs, l2
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
    searched = None
    if loss == "convexified":
        convexified = Convexified(1.0, averaged_over)  # type: ignore[arg-type]
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
        if alpha is not None:
            raise InvalidInput("--alpha belongs to --loss convexified; leave it out.")
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
    }
    if activation != "relu" and l2 > 0:
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
        caption=None if output else "Not saved: give --output FOLDER to keep it.",
    )


def _plain_loss(name: str) -> Loss:
    losses: dict[str, Loss] = {"cross-entropy": CrossEntropy(), "quadratic": Quadratic()}
    if name not in losses:
        raise InvalidInput(f"There is no loss {name!r}; choose convexified, cross-entropy or quadratic.")
    return losses[name]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"--alpha is {text!r}, but it must be a positive number or 'search'.") from None
