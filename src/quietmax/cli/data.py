"""`quietmax datasets`, `schema` and `plan`: what is known and declared before anything is trained."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quietmax.cli._options import with_groups
from quietmax.cli._output import console, in_json, print_json, print_table, progress_bar
from quietmax.errors import InvalidData, InvalidInput, counted

if TYPE_CHECKING:
    from quietmax.data.draft import TableReport
    from quietmax.experiments.forecast import Outlook


@with_groups
def datasets(
    download: Annotated[
        list[str] | None,
        typer.Option(help="First download the official files of this data set that are missing. Repeatable."),
    ] = None,
) -> None:
    """List the data sets, their sizes and whether their files are present.

    The files are looked for in the folder that the environment variable QUIETMAX_DATA names, else in the user's cache
    folder.

    Example: quietmax datasets
    """
    from quietmax.data.registry import dataset_status, datasets, load_records

    for name in download or []:
        with progress_bar(f"downloading {name}") as progress:
            load_records(name, download=True, progress=lambda _, done, total: progress(done, total or done))
    found = {name: (each, dataset_status(name)) for name, each in datasets().items()}
    facts = ("title", "records", "holdout", "features", "classes", "shadow_models", "alpha")
    print_json(
        [
            {"name": name, **{fact: getattr(each, fact) for fact in facts}, **status._asdict()}
            for name, (each, status) in found.items()
        ]
    )
    rows = [
        (
            name,
            f"{each.records:,}" if each.holdout is None else f"all but {each.holdout:.0%}",
            f"{each.features:,}",
            str(each.classes),
            str(each.shadow_models),
            f"{each.alpha:g}",
            "yes" if status.present else "no",
        )
        for name, (each, status) in sorted(found.items(), key=lambda entry: not entry[1][1].present)
    ]
    print_table(
        "Data sets (records: size of the training part, and of the test part)",
        ("name", "records", "features", "classes", "shadow models", "alpha", "present"),
        rows,
        optional=("alpha", "shadow models"),
    )
    missing: dict[str, list[str]] = {}
    for name, (_, status) in found.items():
        if not status.present:
            missing.setdefault(status.message.partition(" needs ")[2], []).append(name)
    if missing:
        console.print("Missing files; 'quietmax datasets --download NAME' fetches official ones:")
    for files, names in missing.items():
        console.print(f"  {', '.join(names)}: {files}", soft_wrap=True)


_SCHEMAS = (".toml", ".json")
schema = typer.Typer(no_args_is_help=True, add_completion=False)

Table = Annotated[Path, typer.Argument(metavar="TABLE", help="A CSV, TSV or Parquet file.")]


@schema.command("draft")
@with_groups
def _draft(
    table: Table,
    label: Annotated[str | None, "Column to predict. Default: proposed."] = None,
    person: Annotated[
        str | None,
        "Column that tells people apart. Default: proposed if one looks like it.",
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the draft. Default: the standard output.")
    ] = None,
    overwrite: Annotated[bool, "Replace an existing file."] = False,
) -> None:
    """Propose a schema for a table, for its owner to check and confirm.

    The draft is read from the records and may reveal something about them. Check each proposal and delete its line
    under [confirm].

    Example: quietmax schema draft people.csv --label income --output people.toml
    """
    from quietmax._io import write_text
    from quietmax.data.draft import draft_schema

    as_document = in_json()
    if output is not None:
        if output.suffix.lower() not in _SCHEMAS:
            raise InvalidInput(f"--output must end in .toml or .json, got '{output}'.")
        if output.exists() and not overwrite:
            raise InvalidInput(f"The file {output} exists; --overwrite replaces it.")
        as_document = output.suffix.lower() == ".json"
    proposed = draft_schema(table, label=label, person=person)
    document = json.dumps(proposed.to_dict(), indent=2, ensure_ascii=False) + "\n"
    text = document if as_document else proposed.to_toml()
    if output is None:
        sys.stdout.write(text)
        return
    write_text(text, output, "The schema")
    console.print(f"Wrote {output}. Check each line under [confirm] and delete it.", soft_wrap=True)


@schema.command("check")
@with_groups
def _check(
    table: Table,
    schema: Annotated[
        Path | None,
        "TOML or JSON file. Default: the .toml file of the same name beside the table.",
    ] = None,
) -> None:
    """Show what a table loses when it is read as the schema declares: clipped, unknown and missing values.

    The numbers are exact and for the owner of the table only. Exit code 1 if training would be refused.

    Example: quietmax schema check people.csv --schema people.toml
    """
    from quietmax.data.draft import check_table
    from quietmax.data.registry import find_schema
    from quietmax.data.schema import Schema

    declared = find_schema(table, schema)
    report = check_table(table, declared)
    print_json(report)
    _print_report(report)
    problems = [*report.problems]
    if declared == Schema():
        beside = table.with_suffix(".toml")
        problems.append(
            f"There is no schema: 'quietmax schema draft {table} --output {beside}' proposes one."
        )
    if problems:
        raise InvalidData(" ".join(problems))


def _print_report(report: TableReport) -> None:
    """Print the losses of each column, and the classes and persons."""
    from quietmax.data.encoding import quoted

    kinds = ("missing", "clipped", "unknown", "unreadable")
    rows = []
    for column in report.columns:
        counts = [getattr(column.losses, kind) for kind in kinds]
        shares = (f"{count / report.rows:.2%}" if count else "-" for count in counts)
        rows.append((column.name, column.kind, *shares))
    title = "Lost or changed values (exact: for the owner's eyes only)"
    print_table(title, ("column", "type", *kinds), rows)
    console.print(f"Rows: {report.rows:,}.")
    if report.persons is None:
        console.print("Persons: no person column; guarantees hold for one row.")
    else:
        console.print(f"Persons: {report.persons:,}, with at most {counted(report.most_rows, 'row')} each.")
    if report.classes:
        classes = ", ".join(f"{name} {count:,}" for name, count in report.classes.items())
        console.print(f"Classes: {classes}.", soft_wrap=True)
    if report.ignored:
        console.print(f"Ignored: {quoted(report.ignored)}.", soft_wrap=True)
    if report.unconfirmed:
        console.print(f"Not confirmed: {', '.join(report.unconfirmed)}.", soft_wrap=True)
    for warning in report.warnings:
        console.print(f"Note: {warning}", soft_wrap=True)


@with_groups
def plan(
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

    Example: quietmax plan people.toml --people 5000 --majority 0.7 --html a.html
    """
    from quietmax._io import check_figure, check_page, write_figure, write_text
    from quietmax.data.schema import Schema
    from quietmax.data.sources import read_table
    from quietmax.experiments import forecast

    if schema.suffix.lower() not in _SCHEMAS:
        raise InvalidInput(
            f"A forecast reads the schema, a .toml or .json file, and never the records; got '{schema}'. "
            "'quietmax schema draft' writes a schema."
        )
    check_figure(output)
    check_page(html)
    with progress_bar("simulating") as progress:
        found = forecast.plan(
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
        write_figure(found.figure(), output)
    if html is not None:
        write_text(found.to_html(schema.name), html, "The page")
    print_json(found.to_json())
    _print_outlooks(f"{people:,} people, delta {delta:g}", "epsilon", found.by_epsilon)
    _print_outlooks(f"epsilon {epsilon:g}, delta {delta:g}", "people", found.by_people)
    console.print(
        "survives: the share of the achievable accuracy above the most frequent class; adversary: how often a guess "
        "whether one person is in the data can be right at most.",
        style="italic",
        soft_wrap=True,
    )
    for sentence in found.advice:
        console.print(sentence, style="bold", soft_wrap=True)
    for sentence in found.assumptions:
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
