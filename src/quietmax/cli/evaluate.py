"""`quietmax evaluate`: the accuracy of a model, with noise so that it may be published, or exact for its owner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quietmax.cli._options import DataDir, EngineOptions, Json, with_groups
from quietmax.cli._output import console, print_guarantee, print_json, print_table, progress_bar
from quietmax.errors import InvalidInput

if TYPE_CHECKING:
    from quietmax.data.records import Records
    from quietmax.data.tables import TableRows
    from quietmax.estimators.evaluation import Evaluation
    from quietmax.estimators.serialization import PrivateModel

_NO_TABLE = "The model was not trained on a table: --data must be a data set."


@with_groups
def command(
    *,
    model: Annotated[Path, typer.Argument(help="Model folder, written by 'quietmax train'.")],
    data: Annotated[
        str,
        "The table (CSV, TSV, Parquet, NPZ, or a folder or pattern of CSV, TSV or Parquet files) or data set that the "
        "model was trained on.",
    ],
    epsilon: Annotated[
        float | None, "Budget of the evaluation. Default: for a holdout, that of the training."
    ] = None,
    delta: Annotated[float | None, "delta of the budget. Default: 1e-5."] = None,
    exact: Annotated[
        bool, "Exact figures for the owner, not for publication. Nothing is charged or stored."
    ] = False,
    memory: EngineOptions,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Evaluate a private model: noisy counts that may be published, with accuracy, recall and calibration.

    A model that was trained with --holdout is evaluated on the people who were held out, for free: model and
    evaluation together have the guarantee of the model. Everybody else may be in the training set; then the costs add
    up, and --epsilon is required. The result is stored in the model folder and shown by 'quietmax card'. A model that
    is paid per answer cannot be evaluated. A folder of files is read part by part, and may be larger than the memory.

    Examples:

    quietmax evaluate income --data people.csv

    quietmax evaluate income --data people.csv --exact
    """
    from quietmax.estimators.evaluate import PAID_PER_ANSWER, evaluate_folder
    from quietmax.estimators.serialization import open_private

    if exact and (epsilon is not None or delta is not None):
        raise InvalidInput("--exact takes no budget: leave out --epsilon and --delta.")
    opened = open_private(model)
    if opened.remaining is not None:
        raise InvalidInput(PAID_PER_ANSWER)
    engine = memory.engine(quiet=as_json)
    in_parts = memory.reads_parts(data) or memory.ray is not None
    records = _rows(opened, data) if in_parts else _records(opened, data, data_dir)
    with progress_bar("evaluating", quiet=as_json) as progress:
        evaluation = evaluate_folder(
            *(model, opened, records),
            epsilon=epsilon,
            delta=delta,
            exact=exact,
            engine=replace(engine, progress=progress),
        )
    if as_json:
        print_json(evaluation.to_json())
    else:
        _print(evaluation, model)


def _rows(model: PrivateModel, data: str) -> TableRows:
    """Prepare files that are read part by part with the encoding of the model."""
    from quietmax.data.tables import encoded_rows

    if model.encoding is None:
        raise InvalidInput(_NO_TABLE)
    return encoded_rows(data, model.encoding)


def _records(model: PrivateModel, data: str, data_dir: Path | None) -> Records:
    """Read the table with the encoding of the model."""
    from quietmax.data.registry import load_records
    from quietmax.data.sources import is_table_path, read_table
    from quietmax.estimators.evaluate import evaluation_records

    encoding = model.encoding
    if not is_table_path(data):
        if model.holdout is None or model.holdout.share == 0:
            raise InvalidInput(
                f"The model was trained on {data!r} without --holdout, so nobody is left to evaluate it on: --data "
                "must be a file."
            )
        records = load_records(data, data_dir=data_dir)
        if records.features.shape[1] != model.inputs or records.encoding != encoding:
            raise InvalidInput(f"The data set {data!r} is not encoded as the records of the model.")
        return records
    if encoding is None:
        raise InvalidInput(_NO_TABLE)
    return evaluation_records(read_table(data, label=encoding.label).frame, encoding, Path(data).stem)


def _print(evaluation: Evaluation, folder: Path) -> None:
    """Print the figures, and what may be done with them."""
    from quietmax.estimators.evaluation import NOT_FOR_PUBLICATION

    many = "people" if evaluation.unit == "person" else "records"
    rows = [("accuracy", str(evaluation.accuracy))]
    rows += [(f"recall of {name}", str(estimate)) for name, estimate in evaluation.recall.items()]
    rows += [
        (f"right with confidence {each.low:.2f} to {each.high:.2f}", str(each.right))
        for each in evaluation.bins
    ]
    size = evaluation.size
    between = "" if evaluation.exact else f" ({size.low:,.0f} to {size.high:,.0f})"
    rows.append((many, f"{size.value:,.0f}{between}"))
    title = "Exact figures, not for publication" if evaluation.exact else "Evaluation"
    print_table(title, ("", "value (95% interval)"), rows)
    print_table(
        f"Number of {many}",
        ("true class", *(f"predicted {name}" for name in evaluation.classes)),
        [
            (name, *(f"{round(count) + 0:,}" for count in counts))
            for name, counts in zip(evaluation.classes, evaluation.confusion, strict=True)
        ],
    )
    for sentence in evaluation.remarks():
        console.print(sentence, soft_wrap=True)
    if evaluation.guarantee is None:
        console.print(NOT_FOR_PUBLICATION)
        return
    console.print(
        f"These figures may be published. Stored in {folder}; 'quietmax card {folder}' shows them.",
        soft_wrap=True,
    )
    console.print("Model and evaluations together:", style="bold")
    print_guarantee(evaluation.guarantee)
