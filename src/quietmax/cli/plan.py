"""`quietmax plan`: how accurate a private head will be, before anything is spent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quietmax.cli._options import with_groups
from quietmax.cli._output import console, print_json, print_table, progress_bar
from quietmax.errors import InvalidInput

if TYPE_CHECKING:
    from quietmax.experiments.forecast import Outlook

_SCHEMAS = (".toml", ".json")


@with_groups
def command(
    *,
    schema: Annotated[Path, typer.Argument(help="Schema of the table: a .toml or .json file.")],
    people: Annotated[int, "How many people, or rows, the head will be trained on."],
    epsilon: Annotated[float, "Planned epsilon, for which the number of people varies."] = 1.0,
    delta: Annotated[float, "delta of the training."] = 1e-5,
    majority: Annotated[
        float | None, "Share of the most frequent class. Without it, no accuracy is stated."
    ] = None,
    achievable: Annotated[
        float | None,
        "Accuracy without privacy, as of a logistic regression on similar people. Without it, intervals are wide.",
    ] = None,
    sample: Annotated[
        Path | None, "Public table (CSV, TSV or Parquet) whose rows show how the columns are distributed."
    ] = None,
    simulations: Annotated[int, "Number of tables that are drawn."] = 30,
    seed: Annotated[int, "The same seed gives the same forecast.", {"min": 0}] = 0,
    output: Annotated[Path | None, "Also draw the forecast to this .png, .pdf or .svg file."] = None,
    html: Annotated[
        Path | None, "Also write a page with sliders for epsilon and people; takes four times as long."
    ] = None,
) -> None:
    """Forecast the accuracy, calibration and leakage of a private head over epsilon and the number of people.

    Tables and labels are drawn at random from public numbers alone, and heads are trained on them: the records are
    never read, and nothing is spent. Intervals hold 90% of the simulations. It takes about half a minute.

    Example: quietmax plan people.toml --people 5000 --html plan.html
    """
    from quietmax._io import check_figure, check_page, write_figure, write_text
    from quietmax.data.schema import Schema
    from quietmax.data.sources import read_table
    from quietmax.experiments.forecast import plan

    if schema.suffix.lower() not in _SCHEMAS:
        raise InvalidInput(
            f"A forecast reads the schema, a .toml or .json file, and never the records; got '{schema}'. "
            "'quietmax schema draft' writes a schema."
        )
    check_figure(output)
    check_page(html)
    with progress_bar("simulating") as progress:
        forecast = plan(
            Schema.from_file(schema),
            people,
            epsilon=epsilon,
            delta=delta,
            majority=majority,
            achievable=achievable,
            sample=None if sample is None else read_table(sample).frame,
            simulations=simulations,
            seed=seed,
            grid=html is not None,
            progress=progress,
        )
    if output is not None:
        write_figure(forecast.figure(), output)
    if html is not None:
        write_text(forecast.to_html(schema.name), html, "The page")
    print_json(forecast.to_json())
    _print_outlooks(f"{people:,} people, delta {delta:g}", "epsilon", forecast.by_epsilon)
    _print_outlooks(f"epsilon {epsilon:g}, delta {delta:g}", "people", forecast.by_people)
    console.print(
        "survives: the share of the achievable accuracy above the most frequent class; adversary: how often a guess "
        "whether one person is in the data can be right at most.",
        style="italic",
        soft_wrap=True,
    )
    for sentence in forecast.advice:
        console.print(sentence, style="bold", soft_wrap=True)
    for sentence in forecast.assumptions:
        console.print(f"  assumes: {sentence}", soft_wrap=True)
    if html is not None:
        console.print(f"Wrote {html}.", soft_wrap=True)


def _print_outlooks(title: str, first: str, outlooks: tuple[Outlook, ...]) -> None:
    rows = [
        (
            f"{getattr(each, first):,.12g}",
            str(each.accuracy or ""),
            "" if each.survives is None else f"{each.survives.expected:.0%}",
            str(each.calibration_error),
            f"{math.ceil(1000 * each.max_guess) / 10:.1f}%",
        )
        for each in outlooks
    ]
    print_table(title, (first, "accuracy (90%)", "survives", "ECE (90%)", "adversary"), rows)
