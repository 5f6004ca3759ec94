"""`quietmax predict`: private answers from a trained model, with their guarantee."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from quietmax.cli._options import Ray, arguments_of, flag, mechanism_of, with_groups
from quietmax.cli._output import console, print_guarantee, print_json, print_table, progress_bar
from quietmax.errors import BudgetExhausted, InvalidInput, counted

if TYPE_CHECKING:
    from quietmax.accounting.guarantee import Guarantee

_ROWS_SHOWN = 20


@dataclass(frozen=True)
class NetworkOptions:
    """How an ordinary network answers; a private model has its own mechanism and budget."""

    PANEL: ClassVar = "Ordinary networks"

    epsilon: Annotated[float | None, "Budget of all queries together. Required."] = None
    mechanism: Annotated[
        str | None,
        "algorithm1, the paper's with Gaussian noise, algorithm1-laplace, or the name of a plug-in; none has a proven "
        "guarantee. Default: algorithm1.",
    ] = None
    seeded: Annotated[
        int | None, "For experiments: reproducible noise from this seed, which protects nobody.", {"min": 0}
    ] = None


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
    from quietmax.estimators.batch_answers import PAID
    from quietmax.models.serialization import read_description

    if ray is not None and output is None:
        raise InvalidInput("--ray requires --output: the workers write files of answers.")
    if output is None and names_several_files(input_file):
        raise InvalidInput(f"--output is required, because {input_file} names a folder or a pattern.")
    ordinary = read_description(model).get("kind") == "mlp"
    if ordinary and output is not None:
        raise InvalidInput(PAID)
    given = [flag(name) for name in arguments_of(network)]
    if given and not ordinary:
        raise InvalidInput(
            f"{', '.join(given)} cannot be used with a private model, which has its own mechanism and budget."
        )
    if output is not None:
        _answer_files(model, input_file, output, ray)
        return
    if ordinary:
        answers, guarantee = _network_answers(model, input_file, network)
    else:
        answers, guarantee = _private_answers(model, input_file)
    print_json({**answers, "guarantee": guarantee.to_json()})
    _print_answers(answers)
    print_guarantee(guarantee)


def _answer_files(folder: Path, queries: Path, output: Path, ray: str | None) -> None:
    """Write one file of answers for each file of queries, and report."""
    from quietmax._ray import RayEngine
    from quietmax.estimators.batch_answers import answer_files
    from quietmax.estimators.serialization import open_private

    engine = None if ray is None else RayEngine(ray)
    private = open_private(folder)
    with progress_bar("answering") as progress:
        done = answer_files(folder, private, queries, output, progress=progress, engine=engine)
    print_json({**vars(done), "output": str(output), "guarantee": private.guarantee.to_json()})
    skipped = f" Files that had been answered before: {done.skipped:,}." if done.skipped else ""
    console.print(
        f"Answers are in {output}. Files answered: {done.written:,}, with "
        f"{counted(done.queries, 'query', 'queries')}.{skipped}",
        soft_wrap=True,
    )
    print_guarantee(private.guarantee)


def _private_answers(folder: Path, input_file: Path) -> tuple[dict[str, Any], Guarantee]:
    """The answers of a private model, which needs no options."""
    from quietmax.data.tables import read_queries
    from quietmax.estimators.serialization import open_private
    from quietmax.spending import MOVED_FILE

    private = open_private(folder)
    if private.remaining == 0 and (folder / MOVED_FILE).is_file():
        raise BudgetExhausted(
            f"The budget of {folder} moved to the ledger when the model was served; ask the service ('quietmax serve')."
        )
    queries = read_queries(input_file, encoding=private.encoding, width=private.inputs)
    classes = private.encoding.classes if private.encoding else private.classes
    answers = _answers(private, queries, classes, probable=private.remaining is None)
    return {**answers, "remaining": {"queries": private.remaining}}, private.guarantee


def _network_answers(
    folder: Path, input_file: Path, network: NetworkOptions
) -> tuple[dict[str, Any], Guarantee]:
    """The answers of an ordinary network through Algorithm 1 or the mechanism of a plug-in."""
    from quietmax.accounting.costs import Budget
    from quietmax.data.tables import read_queries
    from quietmax.mechanisms.base import releases_probabilities
    from quietmax.models.serialization import load_model
    from quietmax.noise.sources import EXACT, SeededNoise
    from quietmax.predictor import Predictor

    mechanism = mechanism_of(network.mechanism or "algorithm1")
    if network.epsilon is None:
        raise InvalidInput("--epsilon is required, because the model is an ordinary network.")
    model = load_model(folder)
    queries = read_queries(input_file, encoding=model.encoding, width=model.features)
    budget = Budget(network.epsilon, 0.0, len(queries))
    noise = EXACT if network.seeded is None else SeededNoise(network.seeded)
    predictor = Predictor(model, mechanism, budget, noise=noise)
    classes = model.encoding.classes if model.encoding else tuple(map(str, range(model.classes)))
    probable = releases_probabilities(predictor.mechanism, model.classes)
    answers = _answers(predictor, queries, classes, probable=probable)
    left = predictor.remaining
    spending = {
        "cost": predictor.cost.to_json(),
        "spent": predictor.answered,
        "remaining": {"queries": left.queries, "cost": left.cost.to_json()},
    }
    return {**answers, **spending}, predictor.guarantee


def _answers(model: Any, queries: Any, classes: tuple[str, ...], *, probable: bool) -> dict[str, Any]:
    """Labels, and probabilities if they are released."""
    probabilities = model.predict_proba(queries) if probable else None
    labels = model.predict(queries) if probabilities is None else probabilities.argmax(-1)
    return {
        "labels": [classes[label] for label in labels],
        "probabilities": None if probabilities is None else probabilities.tolist(),
        "classes": list(classes),
    }


def _print_answers(answers: dict[str, Any]) -> None:
    """Print the first answers as a table."""
    columns, rows = ["query", "label"], []
    for number, label in enumerate(answers["labels"][:_ROWS_SHOWN]):
        rows.append([str(number + 1), label])
        if answers["probabilities"] is not None:
            rows[-1].append(f"{max(answers['probabilities'][number]):.4f}")
    if answers["probabilities"] is not None:
        columns.append("probability")
    total = len(answers["labels"])
    more = f"The first {_ROWS_SHOWN} of {total} answers; --json prints all." if total > _ROWS_SHOWN else None
    print_table("Answers", columns, rows, more)
