"""`quietmax sensitivity`: the paper's formulas for a network and a number of training records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quietmax.cli._options import Json
from quietmax.cli._output import print_json, print_table
from quietmax.errors import InvalidInput
from quietmax.models.serialization import load_model
from quietmax.sensitivity.published import published, published_for


def command(
    features: Annotated[int | None, typer.Option(help="Features of a record.")] = None,
    hidden: Annotated[
        list[int] | None, typer.Option(help="Neurons of a hidden layer; repeat per layer.")
    ] = None,
    classes: Annotated[int | None, typer.Option(help="Classes.")] = None,
    records: Annotated[int | None, typer.Option(help="Training records.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Take all of these from a trained model's folder.")
    ] = None,
    l2: Annotated[float, typer.Option(help="L2 coefficient (Keras's count, 2*lam in the paper).")] = 0.001,
    activation: Annotated[str, typer.Option(help="tanh, sigmoid or relu.")] = "tanh",
    maximum: Annotated[
        list[float] | None,
        typer.Option(help="Largest neuron x_t of a layer but the last; repeat per layer. Default 1."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the sensitivities as published: rho, D2W, Dw, Dz, Dp and the OARO bound.

    They are the paper's formulas, not upper bounds: retraining without one record exceeds them.

    Example: quietmax sensitivity --model model
    """
    if model is not None:
        if not (features is None and hidden is None and classes is None and records is None):
            raise InvalidInput("Both --model and the network's shape were given; give one of them, not both.")
        found = published(load_model(model), maxima=maximum)
    elif features is None or classes is None or records is None:
        raise InvalidInput(
            "Without --model, all of --features, --classes and --records are needed; give them, or --model FOLDER."
        )
    else:
        found = published_for(
            features, hidden or [128], classes, records, l2=l2, activation_name=activation, maxima=maximum
        )
    if as_json:
        print_json(found.to_json())
        return
    print_table(
        "Sensitivity as published",
        ("quantity", "value", "basis"),
        ((name, f"{entry.value:.6g}", entry.basis) for name, entry in vars(found).items()),
        caption="The paper's formulas; not upper bounds (theory, section 2).",
    )
