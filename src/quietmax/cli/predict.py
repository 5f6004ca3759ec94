"""`quietmax predict`: randomised answers from a trained model, always with what is claimed of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from quietmax.accounting.budget import Budget
from quietmax.accounting.guarantee import Guarantee
from quietmax.cli._options import Json
from quietmax.cli._output import print_guarantee, print_json, print_table
from quietmax.data.tables import read_queries
from quietmax.errors import InvalidInput
from quietmax.estimators.serialization import PrivateModel, open_private
from quietmax.mechanisms.algorithm1 import Algorithm1
from quietmax.models.serialization import load_model, read_description
from quietmax.noise.sources import EXACT, NoiseSource, SeededNoise
from quietmax.predictor import Predictor

_SHOWN = 20


def command(
    model: Annotated[Path, typer.Option(help="Folder written by 'quietmax train'.")],
    input_file: Annotated[Path, typer.Option("--input", help="CSV, TSV, Parquet or NPZ file of queries.")],
    epsilon: Annotated[
        float | None, typer.Option(help="Ordinary model: the whole budget, shared by all queries.")
    ] = None,
    mechanism: Annotated[
        str | None, typer.Option(help="Ordinary model: algorithm1, as published, without proven guarantee.")
    ] = None,
    noise: Annotated[str, typer.Option(help="algorithm1: gaussian or laplace.")] = "gaussian",
    queries: Annotated[
        int | None, typer.Option(min=1, help="Queries the budget is for; default: those in the file.")
    ] = None,
    epsilon_sampling: Annotated[float | None, typer.Option(help="Instead of the paper's split.")] = None,
    epsilon_neuron: Annotated[float | None, typer.Option(help="Instead of the paper's split.")] = None,
    seeded: Annotated[
        int | None,
        typer.Option(min=0, help="Experiments only: fast repeatable noise from this seed, no protection."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer the queries of a file, and print the guarantee with its status.

    A private model (trained with --private) answers under its own guarantee; its folder counts what was spent.

    Examples:

    quietmax predict --model private --input queries.csv

    quietmax predict --model model --input queries.csv --epsilon 1
    """
    if read_description(model).get("kind") != "mlp":
        if any(
            each is not None
            for each in (epsilon, mechanism, seeded, queries, epsilon_sampling, epsilon_neuron)
        ):
            raise InvalidInput("A private model has its own mechanism and budget; leave those options out.")
        private = open_private(model)
        names = private.encoding.classes if private.encoding else private.classes
        _report(names, *_private_answers(private, input_file), as_json)
        return
    if (mechanism or "algorithm1") != "algorithm1":
        raise InvalidInput(f"There is no mechanism {mechanism!r} for an ordinary model; choose algorithm1.")
    if epsilon is None:
        raise InvalidInput("An ordinary model answers only with noise under a budget; give --epsilon.")
    trained = load_model(model)
    features = read_queries(input_file, encoding=trained.encoding, width=trained.features)
    source: NoiseSource = EXACT if seeded is None else SeededNoise(seeded)
    quiet = Predictor(
        trained,
        Algorithm1(noise, epsilon_sampling, epsilon_neuron),  # type: ignore[arg-type]
        Budget(epsilon=epsilon, queries=queries or len(features)),
        noise=source,
    )
    probabilities = quiet.predict_proba(features)
    names = (
        trained.encoding.classes
        if trained.encoding
        else tuple(str(label) for label in range(trained.classes))
    )
    spending = {
        "cost": quiet.cost.to_json(),
        "spent": quiet.answered,
        "remaining": {"queries": quiet.remaining.queries, "cost": quiet.remaining.cost.to_json()},
    }
    _report(names, probabilities.argmax(-1), probabilities, quiet.guarantee, spending, as_json)


def _private_answers(
    private: PrivateModel, input_file: Path
) -> tuple[NDArray[np.int64], NDArray[np.float64] | None, Guarantee, dict[str, Any]]:
    features = read_queries(input_file, encoding=private.encoding, width=private.inputs)
    releases_probabilities = private.remaining is None
    probabilities = private.predict_proba(features) if releases_probabilities else None
    labels = private.predict(features) if probabilities is None else probabilities.argmax(-1)
    return labels, probabilities, private.guarantee, {"remaining": {"queries": private.remaining}}


def _report(
    names: tuple[str, ...],
    labels: NDArray[np.int64],
    probabilities: NDArray[np.float64] | None,
    guarantee: Guarantee,
    spending: dict[str, Any],
    as_json: bool,
) -> None:
    if as_json:
        print_json(
            {
                "labels": [names[label] for label in labels],
                "probabilities": None if probabilities is None else probabilities.tolist(),
                "classes": list(names),
                **spending,
                "guarantee": guarantee.to_json(),
            }
        )
        return
    print_table(
        "Answers",
        ("query", "label", *(() if probabilities is None else ("probability",))),
        (
            (
                str(index + 1),
                names[label],
                *(() if probabilities is None else (f"{probabilities[index, label]:.4f}",)),
            )
            for index, label in enumerate(labels[:_SHOWN])
        ),
        caption=f"The first {_SHOWN} of {len(labels)}; --json prints all." if len(labels) > _SHOWN else None,
    )
    print_guarantee(guarantee)
