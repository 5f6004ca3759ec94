"""`quietmax sensitivity`: the paper's formulas for a network and a number of training records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from quietmax.cli._options import with_groups
from quietmax.cli._output import print_json, print_rows
from quietmax.errors import InvalidInput


@with_groups
def command(
    *,
    model: Annotated[
        Path | None, "Model folder to take the shape of the network and the records from."
    ] = None,
    features: Annotated[int | None, "Number of features."] = None,
    hidden: Annotated[
        list[int] | None, "Width of a hidden layer. Repeatable, one per layer. Default: 128."
    ] = None,
    classes: Annotated[int | None, "Number of classes."] = None,
    records: Annotated[int | None, "Number of training records."] = None,
) -> None:
    """Compute the sensitivities that the paper publishes for a network.

    These are formulas, not upper bounds: retraining without one record can exceed them.

    Example: quietmax sensitivity --model model
    """
    from quietmax.models.serialization import load_model
    from quietmax.sensitivity.network import published_sensitivity, published_sensitivity_for

    if model is not None:
        if any(value is not None for value in (features, hidden, classes, records)):
            raise InvalidInput("--model can only be combined with --json; the folder states everything.")
        found = published_sensitivity(load_model(model))
    elif features is None or classes is None or records is None:
        raise InvalidInput("Either --model or all of --features, --classes and --records are required.")
    else:
        found = published_sensitivity_for(features, hidden or [128], classes, records)
    print_json(found.to_json())
    print_rows(
        "Published sensitivity",
        {"quantity": "{0}", "value": "{1.value:.6g}", "basis": "{1.basis}"},
        vars(found).items(),
        "The paper's formulas; not upper bounds (theory, section 2).",
    )
