"""`quietmax datasets` and `quietmax schema`: the registered data sets, and the schema of a table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quietmax.cli._options import with_groups
from quietmax.cli._output import console, in_json, print_json, print_table, progress_bar
from quietmax.errors import InvalidData, InvalidInput, counted

if TYPE_CHECKING:
    from quietmax.data.draft import TableReport


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
        if output.suffix.lower() not in (".toml", ".json"):
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
