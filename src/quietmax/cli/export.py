"""`quietmax export`: a released model in the formats of other tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from quietmax.cli._options import Model, with_groups
from quietmax.cli._output import console, print_guarantee, print_json
from quietmax.errors import InvalidInput, QuietmaxError


@with_groups
def command(
    *,
    model: Model,
    onnx: Annotated[Path | None, "Write an ONNX file: encoding, features and weights in one graph."] = None,
    skops: Annotated[Path | None, "Write a scikit-learn classifier as a skops file, without pickle."] = None,
    mlflow: Annotated[Path | None, "Write a new folder with an MLflow model."] = None,
) -> None:
    """Export a model whose weights were released, with its guarantee as metadata.

    Models that are paid per answer are never exported: without the ledger, nobody would count their answers.

    Example: quietmax export income --onnx income.onnx --skops income.skops
    """
    from quietmax.export import ReleasedClassifier, export_onnx, export_skops
    from quietmax.mlflow import save_model

    formats: dict[str, tuple[Callable[[Path, Path], None], Path | None]]
    formats = {"onnx": (export_onnx, onnx), "skops": (export_skops, skops), "mlflow": (save_model, mlflow)}
    wanted = {name: (write, place) for name, (write, place) in formats.items() if place is not None}
    if not wanted:
        raise InvalidInput("Nothing to write: give `onnx`, `skops` or `mlflow`.")
    classifier = ReleasedClassifier.open(model)
    for write, place in wanted.values():
        try:
            write(model, place)
        except OSError as problem:
            raise QuietmaxError(f"Cannot write {place}: {problem.strerror or problem}.") from problem
    written = {name: str(place) for name, (_, place) in wanted.items()}
    print_json({"written": written, **classifier.metadata_})
    for _, place in wanted.values():
        console.print(f"Wrote {place}.", soft_wrap=True)
    print_guarantee(classifier.guarantee_)
