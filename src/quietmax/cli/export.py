"""`quietmax export`: a released model in the formats of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quietmax.cli._options import Json, with_groups
from quietmax.cli._output import console, print_guarantee, print_json
from quietmax.errors import InvalidInput, QuietmaxError


@with_groups
def command(
    *,
    model: Annotated[Path, typer.Argument(help="Model folder, written by 'quietmax train'.")],
    onnx: Annotated[Path | None, "Write an ONNX file: encoding, features and weights in one graph."] = None,
    skops: Annotated[Path | None, "Write a scikit-learn classifier as a skops file, without pickle."] = None,
    mlflow: Annotated[Path | None, "Write a new folder with an MLflow model."] = None,
    as_json: Json = False,
) -> None:
    """Export a model whose weights were released, with its guarantee as metadata.

    Models that are paid per answer are never exported: without the ledger, nobody would count their answers.

    Example: quietmax export income --onnx income.onnx --skops income.skops
    """
    if onnx is None and skops is None and mlflow is None:
        raise InvalidInput("Nothing to write: give `onnx`, `skops` or `mlflow`.")
    from quietmax.export.released import ReleasedClassifier

    classifier = ReleasedClassifier.open(model)
    written = {}
    for name, place in (("onnx", onnx), ("skops", skops), ("mlflow", mlflow)):
        if place is not None:
            _write(name, model, place)
            written[name] = str(place)
    if as_json:
        print_json({"written": written, **classifier.metadata_})
        return
    for file in written.values():
        console.print(f"Wrote {file}.", soft_wrap=True)
    print_guarantee(classifier.guarantee_)


def _write(name: str, model: Path, place: Path) -> None:
    """Write a model in one format."""
    try:
        if name == "onnx":
            from quietmax.export.onnx import export_onnx

            export_onnx(model, place)
        elif name == "skops":
            from quietmax.export.released import export_skops

            export_skops(model, place)
        else:
            from quietmax.mlflow import save_model

            save_model(model, place)
    except OSError as problem:
        raise QuietmaxError(f"Cannot write {place}: {problem.strerror or problem}.") from problem
