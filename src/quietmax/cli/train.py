"""Which options of `quietmax train` each kind of training reads; any other that is given is refused, never ignored."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from quietmax.cli._options import AdultEncoding, DataDir, Download, Json, Seed, TableOptions, with_groups
from quietmax.cli._output import print_guarantee, print_json, print_table, progress_bar
from quietmax.data.load import load
from quietmax.data.records import Split
from quietmax.data.registry import datasets
from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd.estimator import DPSGD
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.serialization import save_private, with_encoding
from quietmax.estimators.teachers import Teachers
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.images import Scattering
from quietmax.models.features.tabular import Identity, UnitNorm
from quietmax.models.losses import Convexified, CrossEntropy, Loss, Quadratic
from quietmax.models.serialization import check_target, save_model
from quietmax.models.stacked import TrainingSettings
from quietmax.models.training import accuracy, search_alpha, train
from quietmax.sensitivity.published import published

_BUDGET = {"epsilon", "delta", "declared_size", "features"}
_NETWORK = {"hidden", "activation", "learning_rate", "l2"}
_NOISY = {"accountant", "reading", "configuration", "sampling_rate", "steps", "clip", "optimiser"}
_READ_BY_PRIVATE = {
    "head": _BUDGET | {"queries", "route"},
    "teachers": _BUDGET | {"queries", "teachers"},
    "dpsgd": _BUDGET | _NETWORK | _NOISY,
}
_PLAIN = _NETWORK | {"loss", "alpha", "averaged_over", "epochs", "batch_size"}


def check_options(private: str | None, given: Mapping[str, object]) -> None:
    """Refuse what the chosen training would not read; ``given`` has every option, None (or nothing) if left out."""
    present = [name for name, value in given.items() if value is not None and value != []]
    if private is None:
        unread = [name for name in present if name not in _PLAIN]
        if unread and _NOISY.issuperset(unread):
            raise InvalidInput(
                f"Only --private dpsgd reads {_listed(unread)}; add it, or leave that out to train without privacy."
            )
        if unread:
            raise InvalidInput(
                f"Only private training reads {_listed(unread)}; add --private head, teachers or dpsgd, or leave that "
                "out to train without privacy."
            )
        return
    if private not in _READ_BY_PRIVATE:
        raise InvalidInput(f"--private {private!r} is not known; choose head, teachers or dpsgd.")
    unread = [name for name in present if name not in _READ_BY_PRIVATE[private]]
    if private == "dpsgd" and "queries" in unread:
        raise InvalidInput("DP-SGD releases its weights for any number of answers; leave --queries out.")
    if private == "dpsgd" and {"epochs", "batch_size"}.intersection(unread):
        raise InvalidInput(
            "DP-SGD draws random samples, not epochs of batches; give --sampling-rate (batch/records) and --steps."
        )
    if unread and _NOISY.issuperset(unread):
        raise InvalidInput(f"Only --private dpsgd reads {_listed(unread)}; leave that out, or train with it.")
    if unread:
        raise InvalidInput(
            f"--private {private} does not read {_listed(unread)}; leave that out, or choose another training."
        )
    if private == "head" and "queries" in present and given["route"] not in (None, "output"):
        raise InvalidInput(
            f"A head with --queries has the route output, but --route is {given['route']}; leave one of the two out."
        )


def _listed(names: list[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


@dataclass(frozen=True)
class DPSGDOptions:
    """What the options said; None leaves a number to the configuration."""

    accountant: str
    analysis: str
    preset: str
    hidden: tuple[int, ...] | None
    activation: str | None
    sampling_rate: float | None
    steps: int | None
    max_grad_norm: float | None
    learning_rate: float | None
    optimizer: str | None
    l2: float | None


def private_network(
    options: DPSGDOptions,
    *,
    epsilon: float,
    delta: float | None,
    features: FeatureMap | None,
    classes: Sequence[int],
    declared_size: int | None,
) -> DPSGD:
    """The estimator that the options describe, not yet fitted; its noise is exact."""
    settings: dict[str, Any] = {field.name: getattr(options, field.name) for field in fields(options)}
    return DPSGD(epsilon, delta, features=features, classes=classes, declared_size=declared_size, **settings)


@dataclass(frozen=True)
class PrivateOptions:
    """What the private options of the command said."""

    kind: str
    epsilon: float
    delta: float | None
    queries: int | None
    declared_size: int | None
    teachers: int | None
    route: str
    features: str
    dpsgd: DPSGDOptions


DELTA = 1e-5
"""Unless another is asked for; DP-SGD has its own rule, 1/(10 * declared size)."""


def train_private(
    data: Split, options: PrivateOptions, output: Path | None, overwrite: bool
) -> dict[str, Any]:
    """Fit a private estimator on the training part, save it, and return what to report."""
    shape = data.records.image_shape
    encoding = data.records.encoding
    started = time.perf_counter()
    estimator: PrivateHead | Teachers | DPSGD
    delta = DELTA if options.delta is None else options.delta
    if options.kind == "head":
        per_query = options.queries is not None
        estimator = PrivateHead(
            options.epsilon,
            delta,
            method="output" if per_query else options.route,  # type: ignore[arg-type]
            features="auto" if options.features == "auto" else _feature_map(options.features, shape),
            image_shape=shape,
            classes=range(data.classes),
            declared_size=options.declared_size,
            release="query" if per_query else "weights",
            queries=options.queries or 1,
        )
    elif options.kind == "teachers":
        automatic = "scattering" if shape else "identity"
        name = automatic if options.features == "auto" else options.features
        estimator = Teachers(
            options.epsilon,
            delta,
            options.queries or 1,
            options.teachers,
            features=_feature_map(name, shape),
            declared_size=options.declared_size,
            classes=range(data.classes),
        )
    else:
        automatic = "scattering" if shape and options.dpsgd.preset == "default" else "identity"
        name = automatic if options.features == "auto" else options.features
        estimator = private_network(
            options.dpsgd,
            epsilon=options.epsilon,
            delta=options.delta,
            features=None if name == "identity" else _feature_map(name, shape),
            classes=range(data.classes),
            declared_size=options.declared_size,
        )
    train = data.train
    estimator.fit(train.features, train.labels)
    seconds = time.perf_counter() - started
    guarantee = with_encoding(estimator.guarantee_, encoding)
    if output is not None:
        save_private(estimator, output, dataset=data.name, encoding=encoding, overwrite=overwrite)
    unlimited = options.kind == "dpsgd" or (options.kind == "head" and options.queries is None)
    if isinstance(estimator, DPSGD):
        delta = estimator.plan_.delta
    return {
        "dataset": data.name,
        "private": options.kind,
        "epsilon": options.epsilon,
        "delta": delta,
        "queries": "any number" if unlimited else options.queries or 1,
        **_size(estimator),
        **(_settings(estimator) if isinstance(estimator, DPSGD) else {}),
        # The test part is not the private training set; only released weights answer it for nothing.
        "test_accuracy": accuracy(estimator, data.test) if unlimited else None,
        "seconds": round(seconds, 2),
        "model": None if output is None else str(output),
        "not_for_publication": ["test_accuracy", "seconds"] if unlimited else ["seconds"],
        "guarantee": guarantee,
    }


def _size(estimator: PrivateHead | Teachers | DPSGD) -> dict[str, Any]:
    """The number of records that training used: declared, or a noisy count; the true one only if assumed public."""
    if isinstance(estimator, PrivateHead):
        size, otherwise = estimator.size_, "noisy count"
    else:
        size, otherwise = estimator.guarantee_.parameters["declared_size"], "counted, assumed to be public"
    return {
        "records": round(size),
        "records_from": "declared" if estimator.declared_size is not None else otherwise,
    }


def _settings(estimator: DPSGD) -> dict[str, Any]:
    """The public numbers of a run of DP-SGD that a reader wants to see."""
    plan = estimator.plan_
    return {
        "accountant": plan.accountant,
        "analysis": plan.analysis,
        "hidden": list(plan.settings.hidden) or None,
        "sampling_rate": plan.settings.sampling_rate,
        "steps": plan.settings.steps,
        "max_grad_norm": plan.settings.max_grad_norm,
        "learning_rate": plan.settings.learning_rate,
        "noise_multiplier": plan.noise_multiplier,
    }


def _feature_map(name: str, shape: tuple[int, int, int] | None) -> FeatureMap:
    if name == "identity":
        return Identity()
    if name == "unit-norm":
        return UnitNorm(1.0)
    if name == "scattering":
        if shape is None:
            raise InvalidInput(
                "--features scattering needs images, but these records are a table; choose identity."
            )
        return Scattering(shape)
    raise InvalidInput(f"--features {name!r} is not known; choose auto, identity, unit-norm or scattering.")


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
            help="Where other settings come from: default, or paper (128 tanh units, Adam 0.001, batches of "
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
    optimizer: Annotated[
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
            "optimiser": optimizer,
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
            configuration or "default",
            tuple(hidden) if hidden else None,
            activation,
            sampling_rate,
            steps,
            clip,
            learning_rate,
            optimizer,
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
