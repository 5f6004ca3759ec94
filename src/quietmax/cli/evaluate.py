"""`quietmax evaluate`: the accuracy of a model, with noise so that it may be published, or exact for its owner."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from quietmax.cli._options import DataDir, EngineOptions, Model, with_groups
from quietmax.cli._output import console, print_guarantee, print_json, print_table, progress_bar
from quietmax.errors import InvalidInput

if TYPE_CHECKING:
    from quietmax.estimators.evaluation import Evaluation


@with_groups
def command(
    *,
    model: Model,
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
    memory: Annotated[EngineOptions, "resume"],
    data_dir: DataDir = None,
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
    from quietmax.estimators.evaluation import PAID_PER_ANSWER, evaluate_folder, evaluated_rows
    from quietmax.estimators.serialization import open_private

    if exact and (epsilon is not None or delta is not None):
        raise InvalidInput("--exact takes no budget: leave out --epsilon and --delta.")
    opened = open_private(model)
    if opened.remaining is not None:
        raise InvalidInput(PAID_PER_ANSWER)
    engine = memory.engine()
    in_parts = memory.reads_parts(data) or memory.ray is not None
    records = evaluated_rows(opened, data, in_parts=in_parts, data_dir=data_dir)
    with progress_bar("evaluating") as progress:
        evaluation = evaluate_folder(
            *(model, opened, records),
            epsilon=epsilon,
            delta=delta,
            exact=exact,
            engine=replace(engine, progress=progress),
        )
    print_json(evaluation.to_json())
    _print(evaluation)
    if evaluation.guarantee is not None:
        console.print(
            f"These figures may be published. Stored in {model}; 'quietmax card {model}' shows them.",
            soft_wrap=True,
        )
        console.print("Model and evaluations together:", style="bold")
        print_guarantee(evaluation.guarantee)


def _print(evaluation: Evaluation) -> None:
    """Print the figures, and what must be known of them."""
    from quietmax.estimators.evaluation import NOT_FOR_PUBLICATION

    many = "people" if evaluation.unit == "person" else "records"
    size = evaluation.size
    between = "" if evaluation.exact else f" ({size.low:,.0f} to {size.high:,.0f})"
    rows = [
        ("accuracy", str(evaluation.accuracy)),
        *((f"recall of {name}", str(estimate)) for name, estimate in evaluation.recall.items()),
        *(
            (f"right with confidence {each.low:.2f} to {each.high:.2f}", str(each.right))
            for each in evaluation.bins
        ),
        (many, f"{size.value:,.0f}{between}"),
    ]
    title = "Exact figures, not for publication" if evaluation.exact else "Evaluation"
    print_table(title, ("", "value (95% interval)"), rows)
    counts = [
        (name, *(f"{round(count) + 0:,}" for count in row))
        for name, row in zip(evaluation.classes, evaluation.confusion, strict=True)
    ]
    columns = ("true class", *(f"predicted {name}" for name in evaluation.classes))
    print_table(f"Number of {many}", columns, counts)
    for sentence in evaluation.remarks():
        console.print(sentence, soft_wrap=True)
    if evaluation.guarantee is None:
        console.print(NOT_FOR_PUBLICATION)
