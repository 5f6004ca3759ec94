"""`quietmax train`: an ordinary network, or a private head, teachers or DP-SGD."""

from __future__ import annotations

import math
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import typer

from quietmax.cli._options import (
    Alpha,
    DataOptions,
    EngineOptions,
    arguments_of,
    loss_of,
    with_groups,
)
from quietmax.cli._output import console, print_guarantee, print_json, print_table, progress_bar
from quietmax.errors import DataUnavailable, InvalidData, InvalidInput, QuietmaxError, unknown_name

if TYPE_CHECKING:
    from quietmax.data.records import Records, Split
    from quietmax.data.tables import TableRows
    from quietmax.estimators.dpsgd.estimator import DPSGD
    from quietmax.estimators.head.estimator import PrivateHead
    from quietmax.estimators.teachers import Teachers

app = typer.Typer(
    no_args_is_help=True,
    help="""Train a network, a private head, teachers or DP-SGD.

    Use head for many queries or to publish the weights, teachers for a few answers from any network, dpsgd for a
    network with hidden layers (usually less accurate than a head). network has no guarantee.
    """,
)

_COUNTED = "counted, assumed to be public"
# Below this many times 1/mu people, heads on a small table were hardly better than its most frequent class.
_ENOUGH = 50

# The fields below are named after the arguments they are passed to. None leaves the default to the estimator;
# the defaults shown in the help are compared with the estimators' in tests/cli/test_train.py.


@dataclass(frozen=True)
class NetworkOptions:
    """Arguments of `quietmax.TrainingSettings`."""

    hidden: Annotated[
        list[int] | None, "Width of a hidden layer. Repeatable, one per layer. Default: 128."
    ] = None
    learning_rate: Annotated[float | None, "Learning rate of Adam. Default: 0.001."] = None
    epochs: Annotated[int | None, "Passes over the training records. Default: 100."] = None


@dataclass(frozen=True)
class PrivacyOptions:
    """Arguments that all private estimators share."""

    epsilon: Annotated[float | None, "Epsilon of the whole training or of all answers. Default: 1.0."] = None
    delta: Annotated[float | None, "Delta of the whole training or of all answers. Default: 1e-05."] = None
    declared_size: Annotated[
        int | None, "Public number of persons (without --person: of rows) in the training; need not be exact."
    ] = None
    features: Annotated[
        str | None,
        "Feature map: auto, identity, unit-norm, scattering, or embedding for columns that a public encoder computed; "
        "the name of a plug-in; or a .toml file with the arguments of an Encoder, a public network in a file. Default: "
        "auto.",
    ] = None


@dataclass(frozen=True)
class HeadOptions(PrivacyOptions):
    """Arguments of `quietmax.PrivateHead`."""

    queries: Annotated[
        int | None, "Release this many labels instead of the weights. Default: release the weights."
    ] = None


@dataclass(frozen=True)
class SeriesOptions:
    """Whom of a table that grows a head is trained on, and which version it continues."""

    PANEL: ClassVar = "A table that grows"

    cohort: Annotated[
        str | None,
        "Train on one cohort, as in 2026-11, by the `cohort` of the schema: the first version of a series.",
    ] = None
    continue_from: Annotated[
        Path | None,
        typer.Option(
            "--continue",
            metavar="MODEL",
            help="Train the next version of a series, from the model folder of the last one; requires --cohort.",
            rich_help_panel=PANEL,
        ),
    ] = None
    again: Annotated[
        bool, "Train on a cohort that the series was trained on before; what its people pay adds up."
    ] = False

    def _check(self) -> None:
        for name in ("continue", "again"):
            given = self.again if name == "again" else self.continue_from is not None
            if given and self.cohort is None:
                raise InvalidInput(f"--{name} requires --cohort.")
        if self.again and self.continue_from is None:
            raise InvalidInput("--again requires --continue.")


@dataclass(frozen=True, kw_only=True)
class TeachersOptions(PrivacyOptions):
    """Arguments of `quietmax.Teachers`."""

    queries: Annotated[int, "Number of answers the budget is for."]
    teachers: Annotated[int | None, "Number of teachers. Default: computed from the budget."] = None


@dataclass(frozen=True)
class DPSGDOptions(PrivacyOptions):
    """Arguments of `quietmax.DPSGD`."""

    delta: Annotated[
        float | None,
        "Delta of the whole training. Default: 1/(10 * declared size); 1e-05 is the default of a head.",
    ] = None
    accountant: Annotated[str | None, "pld, rdp, zcdp, ac or nc. Default: pld."] = None
    analysis: Annotated[
        str | None,
        "proven (Poisson sampling, every step counted) or published (shuffled epochs, counted as in the paper's "
        "program; the guarantee is conditional). Default: proven.",
    ] = None
    preset: Annotated[
        str | None,
        "Settings where no option is given: default or paper (128 tanh units, Adam 0.001, batches of 100, 100 epochs, "
        "clipping norm 1). Default: default.",
    ] = None
    hidden: Annotated[
        list[int] | None, "Width of a hidden layer. Repeatable, one per layer. Default: the preset's."
    ] = None
    sampling_rate: Annotated[float | None, "Poisson sampling rate. Default: the preset's."] = None
    steps: Annotated[int | None, "Number of steps. Default: the preset's."] = None
    learning_rate: Annotated[float | None, "Learning rate. Default: the preset's."] = None


@dataclass(frozen=True, kw_only=True)
class _Training(DataOptions):
    """What a model is trained on, where it is written, and how the result is printed."""

    data: Annotated[
        str,
        typer.Argument(
            help="Name of a data set, or a CSV, TSV, Parquet or NPZ file. For a private model also a folder of CSV, "
            "TSV or Parquet files, or a pattern such as 'people/*.parquet'."
        ),
    ]
    forgotten: Annotated[
        Path | None,
        "Erasure list written by 'quietmax forget': its people are left out.",
    ] = None
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder to write the model to.")] = (
        None
    )
    overwrite: Annotated[bool, "Replace an existing model in that folder."] = False

    def _check(self) -> None:
        """Raise if the model could not be written, before anything is trained."""
        from quietmax.models.serialization import check_target

        if self.output is not None:
            check_target(self.output, overwrite=self.overwrite)

    def _print(self, title: str, result: dict[str, Any], caption: str) -> None:
        """Print the single values of a result as a table."""
        rows = [
            (name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else f"{value}")
            for name, value in result.items()
            if not isinstance(value, dict | list) and value is not None
        ]
        saved = "" if self.output is not None else " The model was not saved (no --output)."
        print_table(title, ("", ""), rows, caption + saved)


@app.command("network")
@with_groups
def _network(
    *, alpha: Alpha = None, settings: NetworkOptions, training: Annotated[_Training, "forgotten"]
) -> None:
    """Train an ordinary network with the paper's loss. Its answers are not private.

    Example: quietmax train network mnist-5k --output model
    """
    from quietmax.models.serialization import save_model
    from quietmax.models.stacked import TrainingSettings
    from quietmax.models.training import accuracy, train
    from quietmax.sensitivity.network import published_sensitivity

    training._check()
    arguments = arguments_of(settings)
    if "hidden" in arguments:
        arguments["hidden"] = tuple(arguments["hidden"])
    chosen = TrainingSettings(**arguments, loss=loss_of(alpha, training.data))
    split = training.load(training.data)
    with progress_bar("training") as progress:
        model = train(split, settings=chosen, progress=progress)
    if training.output is not None:
        save_model(model, training.output, overwrite=training.overwrite)
    result = {
        **{name: getattr(model, name) for name in ("dataset", "records", "features", "classes")},
        "alpha": getattr(chosen.loss, "alpha", None),
        "train_accuracy": accuracy(model, split.train),
        "test_accuracy": accuracy(model, split.test) if len(split.test) else None,
        "model": None if training.output is None else str(training.output),
        "not_for_publication": ["records", "train_accuracy", "test_accuracy", "model"],
    }
    caption = "Do not publish these numbers or the model if the records are private: no noise was added."
    training._print("Trained (answers are not private)", result, caption)
    print_json({**result, "sensitivity": published_sensitivity(model).to_json()})


# Private models


@app.command("head")
@with_groups
def _head(*, privacy: HeadOptions, training: _Training, series: SeriesOptions, engine: EngineOptions) -> None:
    """Train a private head: softmax regression on public features.

    Its weights may be published and answer any number of queries. With --queries nothing is published by training;
    each answer is a label with a pure epsilon guarantee. Everybody in your own table is trained on, except the share
    that --holdout keeps for 'quietmax evaluate'. A folder of files is read part by part, and may be larger than the
    memory; everything must then be declared. With --ray the workers of a cluster read the files.

    A table that grows: with --cohort a head is trained on one cohort of people, and with --continue it starts from the
    version before. All versions together cost what the most expensive cohort costs, not the sum.

    Examples:

    quietmax train head people.csv --holdout 0.2 --output income

    quietmax train head people/ --max-memory 2G --output everybody

    quietmax train head mnist-5k --declared-size 2000 --output private

    quietmax train head visits.csv --cohort 2026-11 --continue old --output new
    """
    from quietmax.estimators.head.estimator import PrivateHead

    series._check()
    release: Any = "weights" if privacy.queries is None else "query"
    _train("head", PrivateHead(**arguments_of(privacy), release=release), training, engine, series)


@app.command("teachers")
@with_groups
def _teachers(
    *, privacy: TeachersOptions, training: _Training, engine: Annotated[EngineOptions, "resume"]
) -> None:
    """Train teachers on disjoint parts of the records; they answer a fixed number of queries by a noisy vote.

    Suited to a few queries: up to about 4 at epsilon 1 with 10,000 records. Without --declared-size the guarantee is
    conditional.

    Examples:

    quietmax train teachers mnist-5k --queries 2 --declared-size 2000 -o votes
    """
    from quietmax.estimators.teachers import Teachers

    _train("teachers", Teachers(**arguments_of(privacy)), training, engine)


@app.command("dpsgd")
@with_groups
def _dpsgd(
    *, privacy: DPSGDOptions, training: _Training, engine: Annotated[EngineOptions, "resume", "ray"]
) -> None:
    """Train a network by differentially private stochastic gradient descent (DP-SGD).

    Its weights may be published and answer any number of queries. A head is usually more accurate. The default delta
    is 1/(10 * declared size), which is larger than a head's for fewer than 10,000 persons or records; --delta 1e-5
    sets the head's. Without --declared-size the guarantee is conditional.

    Example: quietmax train dpsgd mnist-5k --declared-size 2000 -o dpsgd
    """
    from quietmax.estimators.dpsgd.estimator import DPSGD
    from quietmax.estimators.dpsgd.training import DPSGDSettings

    arguments = arguments_of(privacy)
    own = {field.name for field in fields(DPSGDSettings)} & arguments.keys()
    settings = DPSGDSettings(**{name: arguments.pop(name) for name in own})
    _train("dpsgd", DPSGD(**arguments, settings=settings), training, engine)


def _train(
    name: str,
    estimator: PrivateHead | Teachers | DPSGD,
    training: _Training,
    memory: EngineOptions,
    series: SeriesOptions | None = None,
) -> None:
    """Fit the estimator to the training part, save it and report."""
    from quietmax.estimators.serialization import save_private

    training._check()
    engine = memory.engine()
    split: Split | TableRows
    image_shape, series = None, series or SeriesOptions()
    if memory.reads_parts(training.data) or series.cohort or training.forgotten:
        split = _selected(training, series)
    else:
        split = training.load(training.data)
        image_shape = split.records.image_shape
    estimator.set_params(image_shape=image_shape)
    features = str(estimator.features)
    if features.endswith(".toml"):
        estimator.set_params(features=_encoder(Path(features), image_shape=image_shape))
    else:
        _check_plugin_map(features, image_shape, split)
    started = time.perf_counter()
    with progress_bar(f"training {name}") as progress:
        estimator.set_params(engine=replace(engine, progress=progress))
        if series.continue_from is None:
            estimator.fit(split.train)
        else:
            chosen: Any = {"cohort": series.cohort, "after": series.continue_from, "again": series.again}
            cast("PrivateHead", estimator).update(split.train, **chosen)
    seconds = time.perf_counter() - started
    if training.output is not None:
        save_private(estimator, training.output, dataset=split.name, overwrite=training.overwrite)
    result = _result(name, estimator, split, seconds, training)
    print_json({**result, "guarantee": estimator.guarantee_})
    unprotected = " and ".join(result["not_for_publication"]).replace("_", " ")
    shown = {**result, "size": f"{result['size']:,} {result['unit']}s ({result['size_from']})"}
    caption = f"Do not publish: {unprotected}. The guarantee does not cover them."
    training._print("Trained with privacy", {**shown, "size_from": None}, caption)
    print_guarantee(estimator.guarantee_)
    for warning in result["warnings"]:
        console.print(warning, style="yellow", soft_wrap=True)
    if result["model"] and result["holdout"] and result["queries"] == "any number":
        evaluate = f"quietmax evaluate {result['model']} --data {training.data}"
        console.print(f"An accuracy that may be published: {evaluate}", soft_wrap=True)


def _selected(training: _Training, series: SeriesOptions) -> TableRows:
    """The rows of one cohort, without those of people who asked to be erased; a series holds out the same people."""
    from quietmax.data.cohorts import ErasureList
    from quietmax.estimators.head.update import prior_of

    rows = training.rows(training.data)
    if series.continue_from is not None and training.holdout is None:
        rows = replace(rows, holdout=prior_of(series.continue_from).holdout)
    if training.forgotten is not None:
        rows = rows.without(ErasureList.from_file(training.forgotten))
    return rows if series.cohort is None else rows.of_cohort(series.cohort)


def _encoder(file: Path, **shape: Any) -> Any:
    """The public network that a TOML file names; its path is relative to the file."""
    from quietmax.models.features.encoder import Encoder

    try:
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise DataUnavailable(f"Cannot read {file}: {problem.strerror}.") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise InvalidData(f"{file} is not a TOML file: {problem}.") from problem
    known = ("path", "sha256", "input_shape", "output", "pool", "mean", "std")
    for name in settings:
        if name not in known:
            raise unknown_name(f"argument of an encoder in {file}:", name, known)
    if not isinstance(settings.get("path"), str):
        raise InvalidData(f"{file} must have the path of the network, as in path = 'net.onnx'.")
    return Encoder(file.parent / settings.pop("path"), **settings, **shape)


def _check_plugin_map(name: str, image_shape: tuple[int, int, int] | None, split: Split | TableRows) -> None:
    """Raise if the feature map of a plug-in breaks the invariant on synthetic records (THEORY 3.8)."""
    from quietmax.estimators.training_set import BUILT_IN_FEATURES, named_features

    if name in BUILT_IN_FEATURES:
        return
    from quietmax.audit.invariant import audit_invariant
    from quietmax.data.tables import TableRows

    columns = (
        len(split.encoding.feature_names) if isinstance(split, TableRows) else split.records.features.shape[1]
    )
    report = audit_invariant(named_features(name, image_shape), columns, subject=name)
    if report.broken is not None:
        raise QuietmaxError(
            f"The feature map {name!r} must compute a record's features from that record alone, but {report.broken}."
        )


def _result(
    name: str,
    estimator: PrivateHead | Teachers | DPSGD,
    split: Split | TableRows,
    seconds: float,
    training: _Training,
) -> dict[str, Any]:
    """What is reported of a private training. The size is the true number only if that was assumed to be public."""
    guarantee, paid_per_answer = estimator.guarantee_, hasattr(estimator, "predictor_")
    assumed = "declared" if estimator.declared_size is not None else _COUNTED
    # Released weights answer the test records at no cost; answers that are paid for are not spent here.
    test_accuracy = None if paid_per_answer else _accuracy(estimator, split)
    about = guarantee.parameters.get("cohort", {})
    result = {
        "dataset": split.name,
        "estimator": name,
        **{each: about[key] for each, key in (("cohort", "name"), ("version", "version")) if about},
        "epsilon": estimator.epsilon,
        "delta": estimator.plan_.delta if name == "dpsgd" else estimator.delta,  # type: ignore[union-attr]
        "queries": estimator.queries if paid_per_answer else "any number",
        "unit": guarantee.unit,
        "size": round(guarantee.parameters["declared_size"]),
        "size_from": guarantee.parameters.get("size_from", assumed),
        "holdout": split.holdout.share if split.holdout else None,
        "test_accuracy": test_accuracy,
        "seconds": round(seconds, 2),
        "model": None if training.output is None else str(training.output),
        "not_for_publication": ["seconds"] if test_accuracy is None else ["test_accuracy", "seconds"],
    }
    return {**result, "warnings": list(_warnings(result))}


def _accuracy(estimator: Any, split: Split | TableRows) -> float | None:
    """The exact share of test records whose class the estimator predicts; None if there are none."""
    right = total = 0
    with progress_bar("testing") as progress:
        for records in _test_records(split, progress):
            right += int((estimator.predict(records) == estimator.classes_[records.labels]).sum())
            total += len(records)
    return right / total if total else None


def _test_records(split: Split | TableRows, progress: Callable[[int, int], None]) -> Iterator[Records]:
    """The test records, part by part if they are in files; nothing is read if nobody is held out."""
    from quietmax.data.records import Split

    if isinstance(split, Split):
        yield from [split.test] if len(split.test) else []
    elif split.holdout:
        for number, part in enumerate(split.parts, start=1):
            yield from split.test.part_records(part)
            progress(number, len(split.parts))


def _warnings(result: dict[str, Any]) -> Iterator[str]:
    """What the owner should know, from the declared or released size and the budget alone."""
    from quietmax.accounting.costs import mu_of

    paid_per_answer = result["queries"] != "any number"
    answers = result["queries"] if paid_per_answer else 1
    # What one answer, or all of the released weights, may spend: mu, or epsilon of a pure guarantee.
    if paid_per_answer and result["estimator"] == "head":
        strength = result["epsilon"] / answers
    else:
        strength = mu_of(result["epsilon"], result["delta"]) / math.sqrt(answers)
    enough = _ENOUGH / strength
    if result["size"] < enough:
        many = "people" if result["unit"] == "person" else "records"
        fewer = " or fewer --queries" if paid_per_answer else ""
        yield (
            f"Too few {many} for this epsilon: the noise outweighs them, so answers are close to guesses. More than "
            f"{enough:,.0f} {many}, a larger --epsilon{fewer} would help."
        )
    if result["size_from"] == _COUNTED:
        yield (
            "The guarantee is conditional, and 'quietmax serve' refuses the model, because the true size was used: "
            "train with --declared-size, a public round number."
        )
