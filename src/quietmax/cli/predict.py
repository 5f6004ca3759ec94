"""`quietmax predict`: private answers from a trained model, with their guarantee."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from quietmax.cli._options import Json, Ray, arguments_of, flag, mechanism_of, with_groups
from quietmax.cli._output import console, print_guarantee, print_json, print_table, progress_bar
from quietmax.errors import BudgetExhausted, InvalidInput, counted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quietmax.accounting.guarantee import Guarantee

_ROWS_SHOWN = 20


@dataclass(frozen=True)
class NetworkOptions:
    """How an ordinary network answers; a private model has its own mechanism and budget."""

    PANEL: ClassVar = "Ordinary networks"

    epsilon: Annotated[float | None, "Budget of all queries together. Required."] = None
    delta: Annotated[float | None, "Delta of --epsilon, for a plug-in. Default: 0."] = None
    mechanism: Annotated[
        str | None,
        "algorithm1, the paper's, or the name of a plug-in; neither has a proven guarantee. Default: algorithm1.",
    ] = None
    noise: Annotated[str | None, "algorithm1: gaussian or laplace. Default: gaussian."] = None
    queries: Annotated[
        int | None, "Number of queries the budget is for. Default: those in the file.", {"min": 1}
    ] = None
    seeded: Annotated[
        int | None, "For experiments: reproducible noise from this seed, which protects nobody.", {"min": 0}
    ] = None


@dataclass(frozen=True, eq=False)
class _Answers:
    """Labels as class numbers, probabilities if the model releases them, and what they cost."""

    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    probabilities: NDArray[np.float64] | None
    guarantee: Guarantee
    spending: dict[str, Any]


@with_groups
def command(
    *,
    model: Annotated[Path, "Model folder, written by 'quietmax train'."],
    input_file: Annotated[
        Path,
        typer.Option(
            "--input",
            help="CSV, TSV, Parquet or NPZ file of queries; with --output also a folder of CSV, TSV or Parquet files, "
            "or a pattern such as 'queries/*.parquet'.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for one file of answers per file of queries, with the same name and the same order of rows. "
            "Files that were answered before are skipped. Default: print the answers.",
        ),
    ] = None,
    ray: Ray = None,
    network: NetworkOptions,
    as_json: Json = False,
) -> None:
    """Answer the queries in a file or folder, and print the guarantee with its status.

    A private model (train head, teachers or dpsgd) answers under its own guarantee; its folder keeps count of what
    was spent. An ordinary network answers through Algorithm 1, or the mechanism of a plug-in. With --output, a model
    whose weights are released answers any number of queries in little memory.

    Examples:

    quietmax predict --model private --input queries.csv

    quietmax predict --model private --input queries/ --output answers/

    quietmax predict --model model --input queries.csv --epsilon 1
    """
    from quietmax.data.sources import names_several_files
    from quietmax.models.serialization import read_description

    if output is not None:
        _answer_folder(model, input_file, output, network, ray=ray, as_json=as_json)
        return
    if ray is not None:
        raise InvalidInput("--ray requires --output: the workers write files of answers.")
    if names_several_files(input_file):
        raise InvalidInput(f"--output is required, because {input_file} names a folder or a pattern.")
    if read_description(model).get("kind") == "mlp":
        answers = _network_answers(model, input_file, network)
    else:
        answers = _private_answers(model, input_file, network)
    if as_json:
        print_json(
            {
                "labels": [answers.classes[label] for label in answers.labels],
                "probabilities": None if answers.probabilities is None else answers.probabilities.tolist(),
                "classes": list(answers.classes),
                **answers.spending,
                "guarantee": answers.guarantee.to_json(),
            }
        )
    else:
        _print_answers(answers)


def _answer_folder(
    folder: Path, queries: Path, output: Path, network: NetworkOptions, *, ray: str | None, as_json: bool
) -> None:
    """Write one file of answers for each file of queries, and report."""
    from quietmax._ray import RayEngine
    from quietmax.estimators.batch_answers import PAID, answer_files
    from quietmax.estimators.serialization import open_private
    from quietmax.models.serialization import read_description

    if read_description(folder).get("kind") == "mlp":
        raise InvalidInput(PAID)
    _refuse_network_options(network)
    engine = None if ray is None else RayEngine(ray)
    private = open_private(folder)
    with progress_bar("answering", quiet=as_json) as progress:
        done = answer_files(folder, private, queries, output, progress=progress, engine=engine)
    if as_json:
        print_json({**vars(done), "output": str(output), "guarantee": private.guarantee.to_json()})
        return
    skipped = f" Files that had been answered before: {done.skipped:,}." if done.skipped else ""
    console.print(
        f"Answers are in {output}. Files answered: {done.written:,}, with "
        f"{counted(done.queries, 'query', 'queries')}.{skipped}",
        soft_wrap=True,
    )
    print_guarantee(private.guarantee)


def _refuse_network_options(network: NetworkOptions) -> None:
    """Raise if an option was given that only ordinary networks have."""
    given = [flag(name) for name in arguments_of(network)]
    if given:
        raise InvalidInput(
            f"{', '.join(given)} cannot be used with a private model, which has its own mechanism and budget."
        )


def _private_answers(folder: Path, input_file: Path, network: NetworkOptions) -> _Answers:
    """The answers of a private model, which needs no options."""
    from quietmax.data.tables import read_queries
    from quietmax.estimators.serialization import open_private
    from quietmax.spending import MOVED_FILE

    _refuse_network_options(network)
    private = open_private(folder)
    if private.remaining == 0 and (folder / MOVED_FILE).is_file():
        raise BudgetExhausted(
            f"The budget of {folder} moved to the ledger when the model was served; ask the service ('quietmax serve')."
        )
    features = read_queries(input_file, encoding=private.encoding, width=private.inputs)
    classes = private.encoding.classes if private.encoding else private.classes
    labels, probabilities = _asked(private, features, probable=private.remaining is None)
    left = {"remaining": {"queries": private.remaining}}
    return _Answers(classes, labels, probabilities, private.guarantee, left)


def _network_answers(folder: Path, input_file: Path, network: NetworkOptions) -> _Answers:
    """The answers of an ordinary network through Algorithm 1 or the mechanism of a plug-in."""
    from quietmax.accounting.costs import Budget
    from quietmax.data.tables import read_queries
    from quietmax.mechanisms.base import releases_probabilities
    from quietmax.models.serialization import load_model
    from quietmax.noise.sources import EXACT, SeededNoise
    from quietmax.predictor import Predictor

    mechanism = mechanism_of(network.mechanism or "algorithm1", network.noise)
    if network.epsilon is None:
        raise InvalidInput("--epsilon is required, because the model is an ordinary network.")
    model = load_model(folder)
    features = read_queries(input_file, encoding=model.encoding, width=model.features)
    predictor = Predictor(
        model,
        mechanism,
        Budget(network.epsilon, network.delta or 0.0, network.queries or len(features)),
        noise=EXACT if network.seeded is None else SeededNoise(network.seeded),
    )
    classes = model.encoding.classes if model.encoding else tuple(map(str, range(model.classes)))
    probable = releases_probabilities(predictor.mechanism, model.classes)
    labels, probabilities = _asked(predictor, features, probable=probable)
    left = predictor.remaining
    spending = {
        "cost": predictor.cost.to_json(),
        "spent": predictor.answered,
        "remaining": {"queries": left.queries, "cost": left.cost.to_json()},
    }
    return _Answers(classes, labels, probabilities, predictor.guarantee, spending)


def _asked(model: Any, features: Any, *, probable: bool) -> tuple[NDArray[np.int64], Any]:
    """Class numbers, and probabilities if they are released."""
    if not probable:
        return model.predict(features), None
    probabilities = model.predict_proba(features)
    return probabilities.argmax(-1), probabilities


def _print_answers(answers: _Answers) -> None:
    """Print the first answers as a table, and the guarantee."""
    rows = []
    for index, label in enumerate(answers.labels[:_ROWS_SHOWN]):
        row = [str(index + 1), answers.classes[label]]
        if answers.probabilities is not None:
            row.append(f"{answers.probabilities[index, label]:.4f}")
        rows.append(row)
    columns = ("query", "label") if answers.probabilities is None else ("query", "label", "probability")
    total = len(answers.labels)
    caption = (
        f"The first {_ROWS_SHOWN} of {total} answers; --json prints all." if total > _ROWS_SHOWN else None
    )
    print_table("Answers", columns, rows, caption)
    print_guarantee(answers.guarantee)
