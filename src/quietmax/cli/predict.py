"""`quietmax predict`: randomised answers from a trained model, always with what is claimed of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quietmax.accounting import Budget, Guarantee
from quietmax.cli.options import Json
from quietmax.cli.output import console, print_json, print_table
from quietmax.data.queries import read_queries
from quietmax.errors import InvalidInput
from quietmax.mechanisms import Algorithm1
from quietmax.models import load_model
from quietmax.noise import EXACT, NoiseSource, SeededNoise
from quietmax.predictor import Predictor


def command(
    model: Annotated[Path, typer.Option(help="Folder written by 'quietmax train'.")],
    input_file: Annotated[Path, typer.Option("--input", help="CSV, TSV, Parquet or NPZ file of queries.")],
    epsilon: Annotated[float, typer.Option(help="The whole budget, shared by all queries.")],
    mechanism: Annotated[
        str, typer.Option(help="algorithm1: as published, no proven guarantee.")
    ] = "algorithm1",
    noise: Annotated[str, typer.Option(help="gaussian or laplace.")] = "gaussian",
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
    """Answer the queries of a file with noise, and print the guarantee with its status.

    Example: quietmax predict --model model --input queries.csv --epsilon 1 --noise gaussian
    """
    if mechanism != "algorithm1":
        raise InvalidInput(f"There is no mechanism {mechanism!r} for this model; choose algorithm1.")
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
    labels = [names[label] for label in probabilities.argmax(-1)]
    if as_json:
        print_json(
            {
                "labels": labels,
                "probabilities": probabilities.tolist(),
                "classes": list(names),
                "cost": quiet.cost.to_json(),
                "spent": quiet.answered,
                "remaining": {"queries": quiet.remaining.queries, "cost": quiet.remaining.cost.to_json()},
                "guarantee": quiet.guarantee.to_json(),
            }
        )
        return
    shown = 20
    print_table(
        f"Answers of {mechanism} with {noise} noise",
        ("query", "label", "probability"),
        (
            (str(index + 1), label, f"{probabilities[index].max():.4f}")
            for index, label in enumerate(labels[:shown])
        ),
        caption=f"The first {shown} of {len(labels)}; --json prints all." if len(labels) > shown else None,
    )
    print_guarantee(quiet.guarantee)


def print_guarantee(guarantee: Guarantee) -> None:
    """Print what is claimed, its status first and in colour."""
    colour = {"proven": "green", "conditional": "yellow", "refuted": "red"}[guarantee.status]
    console.print("Guarantee:", style="bold", end=" ")
    console.print(str(guarantee), style=colour, markup=False, highlight=False)
    for assumption in guarantee.assumptions:
        console.print(f"  assumes: {assumption}", markup=False, highlight=False)
