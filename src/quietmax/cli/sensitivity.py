"""`quietmax sensitivity`: the paper's formulas for a network and a number of training records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quietmax.cli._options import Json
from quietmax.cli._output import print_json, print_table
from quietmax.errors import InvalidInput


def command(
    model: Annotated[
        Path | None, typer.Option(help="Model folder to take the shape of the network and the records from.")
    ] = None,
    features: Annotated[int | None, typer.Option(help="Number of features.")] = None,
    hidden: Annotated[
        list[int] | None,
        typer.Option(help="Width of a hidden layer. Repeatable, one per layer. Default: 128."),
    ] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes.")] = None,
    records: Annotated[int | None, typer.Option(help="Number of training records.")] = None,
    l2: Annotated[
        float | None,
        typer.Option(help="L2 penalty as Keras counts it (2*lambda in the paper). Default: 0.001."),
    ] = None,
    activation: Annotated[str | None, typer.Option(help="tanh, sigmoid or relu. Default: tanh.")] = None,
    maximum: Annotated[
        list[float] | None,
        typer.Option(
            help="Largest activation of a layer except the last. Repeatable, one per layer. Default: 1."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute the sensitivities that the paper publishes for a network.

    These are formulas, not upper bounds: retraining without one record can exceed them.

    Example: quietmax sensitivity --model model
    """
    from quietmax.models.serialization import load_model
    from quietmax.sensitivity.network import published_sensitivity, published_sensitivity_for

    if model is not None:
        if any(value is not None for value in (features, hidden, classes, records, l2, activation)):
            raise InvalidInput(
                "--model can only be combined with --maximum; the folder states everything else."
            )
        found = published_sensitivity(load_model(model), maxima=maximum)
    elif features is None or classes is None or records is None:
        raise InvalidInput("Either --model or all of --features, --classes and --records are required.")
    else:
        found = published_sensitivity_for(
            features,
            hidden or [128],
            classes,
            records,
            l2=0.001 if l2 is None else l2,
            activation_name=activation or "tanh",
            maxima=maximum,
        )
    if as_json:
        print_json(found.to_json())
        return
    print_table(
        "Published sensitivity",
        ("quantity", "value", "basis"),
        ((name, f"{entry.value:.6g}", entry.basis) for name, entry in vars(found).items()),
        caption="The paper's formulas; not upper bounds (theory, section 2).",
    )
