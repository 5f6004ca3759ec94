"""`quietmax evaluate`, `decide`, `explain`, `card`, `export` and `sensitivity`: what is done with a model folder."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quietmax.cli._options import EngineOptions, Model, with_groups
from quietmax.cli._output import (
    amount,
    console,
    in_json,
    print_guarantee,
    print_json,
    print_rows,
    print_table,
    progress_bar,
)
from quietmax.errors import InvalidData, InvalidInput, QuietmaxError, counted

if TYPE_CHECKING:
    from quietmax.estimators.figures import Evaluation
    from quietmax.estimators.head.effects import Effects
    from quietmax.privacy_card import LedgerRecord, PrivacyCard

# --- evaluate --------------------------------------------------------------------------------------------------------


@with_groups
def evaluate(
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
    by: Annotated[
        str | None,
        "State the figures also by group: a column of the schema with categories, yes and no or declared bins, or one "
        "of numbers and what divides it, as in age=30,50.",
    ] = None,
    at: Annotated[
        list[float] | None,
        "Thresholds on the probability of the second of two classes: show recall, false alarms and precision there, as "
        "in --at 0.2 0.3.",
    ] = None,
    memory: Annotated[EngineOptions, "resume"],
) -> None:
    """Evaluate a private model: noisy counts that may be published, and the figures that follow from them.

    These are accuracy, recall and calibration, for two classes also the area under the ROC curve, the log-loss and
    points of the curves. Groups and thresholds are part of the same release: name them at once, since the evaluation
    is free only once.

    A model that was trained with --holdout is evaluated on the people who were held out, for free: model and
    evaluation together have the guarantee of the model. Everybody else may be in the training set; then the costs add
    up, and --epsilon is required. The result is stored in the model folder and shown by 'quietmax card'. A model that
    is paid per answer cannot be evaluated. A folder of files is read part by part, and may be larger than the memory.

    Examples:

    quietmax evaluate income --data people.csv --by sex --at 0.2 0.3

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
    records = evaluated_rows(opened, data, in_parts=in_parts)
    with progress_bar("evaluating") as progress:
        evaluation = evaluate_folder(
            *(model, opened, records),
            epsilon=epsilon,
            delta=delta,
            exact=exact,
            by=None if by is None else _groups(by),
            at=at or (),
            engine=replace(engine, progress=progress),
        )
    print_json(evaluation.to_json())
    _print_evaluation(evaluation)
    if evaluation.guarantee is not None:
        console.print(
            f"These figures may be published. Stored in {model}; 'quietmax card {model}' shows them.",
            soft_wrap=True,
        )
        console.print("Model and evaluations together:", style="bold")
        print_guarantee(evaluation.guarantee)


def _groups(by: str) -> str | tuple[str, list[float]]:
    """Read the value of --by: a column, or a column and the numbers that divide it."""
    column, divided, numbers = by.rpartition("=")
    try:
        return (column, [float(number) for number in numbers.split(",")]) if divided else by
    except ValueError:
        raise InvalidInput(
            f"`by` must be a column, or a column with numbers as in age=30,50; got {by!r}."
        ) from None


def _print_evaluation(evaluation: Evaluation) -> None:
    """Print the figures, and what must be known of them."""
    from quietmax.estimators.figures import NOT_FOR_PUBLICATION
    from quietmax.privacy_card import detail_tables

    many = "people" if evaluation.unit == "person" else "records"
    size = evaluation.size
    rows = [
        ("accuracy", str(evaluation.accuracy)),
        *((f"recall of {name}", str(estimate)) for name, estimate in evaluation.recall.items()),
        *((name, str(value)) for name, value in evaluation.curves.items()),
        *(
            (f"{evaluation.calibrated} {each.low:.2f} to {each.high:.2f}", str(each.share))
            for each in evaluation.bins
        ),
        (many, f"{size.value:,.0f}" if evaluation.exact else size.in_people()),
        ("answer", evaluation.decision),
    ]
    title = "Exact figures, not for publication" if evaluation.exact else "Evaluation"
    print_table(title, ("", "value (95% interval)"), rows)
    counts = [
        (name, *(f"{round(count) + 0:,}" for count in row))
        for name, row in zip(evaluation.classes, evaluation.confusion, strict=True)
    ]
    columns = ("true class", *(f"predicted {name}" for name in evaluation.classes))
    print_table(f"Number of {many}", columns, counts)
    for caption, heads, lines in detail_tables(evaluation)[evaluation.edges is not None :]:
        print_table(caption, heads, [(name, *values) for name, values in lines])
    for sentence in evaluation.remarks():
        console.print(sentence, soft_wrap=True)
    if evaluation.guarantee is None:
        console.print(NOT_FOR_PUBLICATION)


# --- decide ----------------------------------------------------------------------------------------------------------


@with_groups
def decide(
    *,
    model: Model,
    threshold: Annotated[
        str | None, "Of two classes, the answer if its probability is above the number, as in yes=0.3."
    ] = None,
    cost: Annotated[
        list[str] | None,
        "Cost of an error as TRUE:ANSWER=NUMBER, as in yes:no=5; any other error costs 1.",
    ] = None,
) -> None:
    """Choose how a released model answers: by a threshold, or by what each error costs.

    It is a public setting, stored in the model folder, and costs no privacy. 'quietmax predict', 'serve', 'export' and
    later evaluations use it. Without options, the answer is the most probable class again.

    Examples:

    quietmax decide income --threshold yes=0.3

    quietmax decide income --cost yes:no=5
    """
    from quietmax.estimators.figures import decision_in_words
    from quietmax.estimators.serialization import decide_folder

    chosen = None if threshold is None else dict([_named_number(threshold, "`threshold`", "yes=0.3")])
    costs = {}
    for text in cost or ():
        errors, number = _named_number(text, "`cost`", "yes:no=5")
        true, _, answer = errors.partition(":")
        costs[true, answer] = number
    opened = decide_folder(model, threshold=chosen, cost=costs)
    phrase = decision_in_words(opened.costs, opened.classes)
    print_json({"model": str(model), "decision": phrase, "costs": opened.costs})
    console.print(f"Answer: {phrase}. Stored in {model}.", soft_wrap=True)


def _named_number(text: str, option: str, example: str) -> tuple[str, float]:
    """Read NAME=NUMBER."""
    name, _, number = text.rpartition("=")
    try:
        return name, float(number)
    except ValueError:
        raise InvalidInput(f"{option} must be a name and a number, as in {example}; got {text!r}.") from None


# --- explain ---------------------------------------------------------------------------------------------------------

_BAR = 10
"""Characters of the longest bar of an effect, on either side."""


@with_groups
def explain(
    *,
    model: Model,
    column: Annotated[
        str | None, "Show the effects of this column, or of a cross such as 'age × sex'."
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for figures: an SVG file for each column."),
    ] = None,
) -> None:
    """Show what a released head on a table says about each column; this costs nothing.

    The score of a class is a constant plus the effect of the row's value in each column. Effects average 0 over the
    people of the training, as far as their shares were released. Of two classes the second one is shown.

    Examples:

    quietmax explain income

    quietmax explain income --column age

    quietmax explain income --output figures/
    """
    from quietmax.errors import unknown_name
    from quietmax.estimators.serialization import open_private

    effects = open_private(model).effects()
    if column is not None and column not in effects.curves:
        raise unknown_name("column", column, effects.curves)
    written = [] if output is None else _write_figures(effects, output)
    print_json({**effects.to_json(), "figures": written})
    if column is None:
        _print_importances(effects)
    else:
        _print_curve(effects, column)
    if written:
        console.print(f"Wrote {counted(len(written), 'figure')} to {output}.", soft_wrap=True)


def _write_figures(effects: Effects, folder: Path) -> list[str]:
    """Write one SVG file per column, in the order of importance, and return their paths."""
    from quietmax._io import atomic_write
    from quietmax.estimators.head.effects import curve_svg

    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, name in enumerate(effects.curves, start=1):
            # Names of columns may hold any character.
            file = folder / f"{number:02}-{re.sub('[^A-Za-z0-9]+', '-', name).strip('-') or 'column'}.svg"
            svg = curve_svg(effects, name)
            atomic_write(file, partial(Path.write_text, data=svg, encoding="utf-8"))
            written.append(str(file))
    except OSError as problem:
        raise QuietmaxError(f"Cannot write figures to {folder}: {problem.strerror or problem}.") from problem
    return written


def _print_importances(effects: Effects) -> None:
    shown = f"{effects.shown[0]!r}" if len(effects.shown) == 1 else "each class"
    print_rows(
        "Columns by importance",
        {"column": "{0}", "importance": "{1:.3f}", "noise": "{2}"},
        ((name, size, _number(noise)) for name, size, noise in effects.importance.itertuples(index=False)),
        f"Importance: mean absolute effect on the score of {shown}. One that is not above its noise says nothing.",
    )


def _number(noise: float) -> str:
    return "unknown" if math.isnan(noise) else f"{noise:.3f}"


def _print_curve(effects: Effects, column: str) -> None:
    """Print the effects of a column, of a number in at most 16 intervals; a bar if there are two classes."""
    curve = effects.summary(column)
    names = [f"effect on {name}" for name in effects.shown]
    longest = max(float(curve[names].abs().to_numpy().max()), 1e-12)
    rows = []
    for _, line in curve.iterrows():
        bars = []
        if len(names) == 1:
            length = round(abs(line[names[0]]) / longest * _BAR)
            left, right = (length, 0) if line[names[0]] < 0 else (0, length)
            bars = [f"{'█' * left:>{_BAR}}│{'█' * right:<{_BAR}}".replace(" ", "\u00a0")]
        effect = (f"{line[name]:+.3f} ±{_number(2 * line['noise'])}" for name in names)
        rows.append((line["value"], f"{line['share']:.1%}", *effect, *bars))
    bars = [""] if len(names) == 1 else []
    print_table(
        f"Effects of {column}",
        (column, "people", *names, *bars),
        rows,
        "±: two standard deviations of noise.",
    )


# --- card ------------------------------------------------------------------------------------------------------------

_NOT_IN_LEDGER = "The ledger has no account for this training set yet."
Form = Literal["card", "nist-800-226", "edpb-28-2024"]


@with_groups
def card(
    *,
    model: Model,
    html: Annotated[Path | None, "Also write the card as a web page to this file."] = None,
    public: Annotated[bool, "Leave out what is not for publication: results of attacks."] = False,
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            help="The card, or a checklist after NIST or the EDPB, which marks what the software cannot know.",
        ),
    ] = "card",
    ledger: Annotated[
        str | None,
        "With a checklist: also state what this ledger has charged. A SQLite file or the address of a "
        "PostgreSQL database; it is only read.",
    ] = None,
    account: Annotated[str | None, "Account in the ledger. Default: that of the model's data set."] = None,
) -> None:
    """Show the privacy card of a model: what somebody can learn at most, for whom, and how good the model is.

    A card that shows results of attacks says on top that it is not for publication; --public leaves them out.

    Examples:

    quietmax card model --html card.html --public

    quietmax card private --format nist-800-226 --ledger ledger.sqlite
    """
    from quietmax._io import write_text
    from quietmax.privacy_card import edpb_checklist, nist_checklist, read_card

    if ledger is not None and form == "card":
        raise InvalidInput("`ledger` requires `form` nist-800-226 or edpb-28-2024.")
    if account is not None and ledger is None:
        raise InvalidInput("`account` requires `ledger`.")
    card = read_card(model)
    if public:
        card = card.for_publication()
    if html is not None:
        write_text(card.to_html(), html, "The page")
    if form == "card":
        print_json(card.to_json())
        print_table(card.title, ("", ""), card.rows(), prose=True)
        if html is not None:
            console.print(f"Wrote {html}.", soft_wrap=True)
        return
    record = None if ledger is None else _read_ledger(ledger, card, account)
    nist = form == "nist-800-226"
    items = (nist_checklist if nist else edpb_checklist)(card, record)
    source = "NIST SP 800-226" if nist else "EDPB Opinion 28/2024"
    print_json([item._asdict() for item in items])
    print_table(f"Checklist after {source}", ("factor", "question", "answer"), items, prose=True)


@with_groups
def forget(
    *,
    models: Annotated[
        list[Path] | None, typer.Argument(help="Folders of released models.", show_default=False)
    ] = None,
    schema: Annotated[Path, "Schema of the table; it names the `person` column."],
    person: Annotated[str, "The person, as in the `person` column. -: read it from standard input."],
    erased: Annotated[
        Path | None, typer.Option("--list", help="The erasure list. Default: the schema's name with .erased.")
    ] = None,
    html: Annotated[Path | None, "Also write a page for the person and for the file."] = None,
) -> None:
    """Leave a person out of all later trainings, and say what released models may tell about the person at most.

    The list keeps a keyed hash, not the name. Train with --forgotten LIST. Released models stay as they are: what they
    tell is limited by their guarantees. Nothing is deleted from your table: that is yours to do.

    Examples:

    quietmax forget --schema people.toml --person 4711

    quietmax forget visits --schema people.toml --person - --html page.html
    """
    from quietmax._io import atomic_write
    from quietmax.data import ErasureList, Schema
    from quietmax.erasure_record import in_words, model_record, to_html

    if Schema.from_file(schema).person is None:
        raise InvalidData("The schema must name a person column: without one nobody can be left out.")
    name = sys.stdin.readline().strip() if person == "-" else person
    records = [model_record(folder, name) for folder in models or []]
    place = schema.with_suffix(".erased") if erased is None else erased
    added = ErasureList.add(place, name)
    entry = ErasureList.from_file(place).entry(name)
    words = in_words(records)
    if html is not None:
        try:
            atomic_write(html, lambda staging: staging.write_text(to_html(records, entry), encoding="utf-8"))
        except OSError as problem:
            raise QuietmaxError(
                f"The person is on the list {place}, but the page {html} cannot be written: {problem.strerror}."
            ) from problem
    names = ("model", "trained_on", "because", "in_words")
    shown = [{name: getattr(each, name) for name in names} for each in records]
    print_json({"list": str(place), "entry": entry, "added": added, "in_words": words, "models": shown})
    known = "is now on" if added else "was already on"
    console.print(f"The person {known} the erasure list {place} (entry {entry}).", soft_wrap=True)
    if records:
        rows = [(each.model, each.trained_on, f"{each.because} {each.in_words}") for each in records]
        print_table("Released models, which stay", ("model", "trained on", "what is known"), rows, prose=True)
        console.print("Together: " + " ".join(words), soft_wrap=True)
    console.print(
        "Nothing was deleted from the table: delete the person's rows there, and in its copies and backups."
    )


def _read_ledger(address: str, card: PrivacyCard, account: str | None) -> LedgerRecord:
    """Read what a ledger states about the training set of a model; the ledger is not changed."""
    from quietmax.ledger.database import KEYS_ACCOUNT, now
    from quietmax.ledger.ledger import Ledger
    from quietmax.privacy_card import LedgerRecord
    from quietmax.server.deployment import find_account

    with Ledger(address, read_only=True) as ledger:
        ledger.check_damage()
        _, _, found = find_account(ledger, card.dataset, account)
        if found is None and account is not None:
            ledger.account(account)  # names those that exist
        budget = releases = _NOT_IN_LEDGER
        if found is not None:
            amounts = ", ".join(f"{name} {amount(getattr(found, name))}" for name in ("spent", "remaining"))
            clients = sum(each.spent_units > 0 for each in ledger.subaccounts(found))
            budget = (
                f"Account {found.name}, opened with epsilon {found.terms.epsilon:g} and delta {found.terms.delta:g}: "
                f"budget {amount(found.limit)}, {amounts}; {counted(clients, 'client')}."
            )
            releases = f"Of the same account: {', '.join(ledger.charged_models(found)) or 'none'}."
        known = ledger.keys()
        keys = [key for key in known if key.is_valid(now())]
        administrators = sum(key.role == "admin" for key in keys)
        access = f"{counted(len(keys), 'valid API key')}, {administrators} of them of administrators."
        named = {KEYS_ACCOUNT, found.name if found else KEYS_ACCOUNT}
        heads = [f"{name}:{head.sequence}:{head.hash}" for name, head in ledger.heads() if name in named]
    log = f" Audit log at the time of this form: {', '.join(heads)}." if heads else ""
    return LedgerRecord(budget, releases, access + log)


# --- export ----------------------------------------------------------------------------------------------------------


@with_groups
def export(
    *,
    model: Model,
    onnx: Annotated[Path | None, "Write an ONNX file: encoding, features and weights in one graph."] = None,
    skops: Annotated[Path | None, "Write a scikit-learn classifier as a skops file, without pickle."] = None,
    mlflow: Annotated[Path | None, "Write a new folder with an MLflow model."] = None,
    sql: Annotated[
        Literal["duckdb", "postgres", "sqlite", "bigquery", "snowflake"] | None,
        "Write a model of a table as one SQL statement in this dialect.",
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="With --sql: the file. Default: standard output."),
    ] = None,
    table: Annotated[str | None, "With --sql: the table to read. Default: people."] = None,
    keep: Annotated[
        list[str] | None,
        "With --sql: further columns of the table beside the answers, as in --keep id region.",
    ] = None,
    html: Annotated[
        Path | None, "Write a model of a table as one HTML file: a calculator that needs no network."
    ] = None,
    reasons: Annotated[
        bool, "With --onnx or --sql: also compute what each column of a table contributed to an answer."
    ] = False,
) -> None:
    """Export a model whose weights were released, with its guarantee.

    Models that are paid per answer are never exported: without the ledger, nobody would count their answers.

    Examples:

    quietmax export income --onnx income.onnx --skops income.skops

    quietmax export income --sql duckdb --output income.sql --keep id

    quietmax export income --html calculator.html
    """
    from quietmax.export.onnx import export_onnx
    from quietmax.export.released import ReleasedClassifier, export_skops
    from quietmax.export.tables import export_html, export_sql
    from quietmax.mlflow import save_model

    if reasons and onnx is None and sql is None:
        raise InvalidInput("`reasons` requires `onnx` or `sql`.")
    if sql is None and (output or table or keep):
        raise InvalidInput("`output`, `table` and `keep` require `sql`.")
    statement = partial(
        export_sql, dialect=sql or "", table=table or "people", keep=keep or (), reasons=reasons
    )
    formats: dict[str, tuple[Callable[[Path, Path], object], Path | None]] = {
        "onnx": (partial(export_onnx, reasons=reasons), onnx),
        "skops": (export_skops, skops),
        "mlflow": (save_model, mlflow),
        "sql": (statement, output),
        "html": (export_html, html),
    }
    wanted = {name: (write, place) for name, (write, place) in formats.items() if place is not None}
    if not wanted and sql is None:
        raise InvalidInput("Nothing to write: give `onnx`, `skops`, `mlflow`, `sql` or `html`.")
    classifier = ReleasedClassifier.open(model)
    printed = statement(model, None) if sql is not None and output is None else None
    for write, place in wanted.values():
        try:
            write(model, place)
        except OSError as problem:
            raise QuietmaxError(f"Cannot write {place}: {problem.strerror or problem}.") from problem
    written = {name: str(place) for name, (_, place) in wanted.items()}
    print_json({"written": written, **({"sql": printed} if printed else {}), **classifier.metadata_})
    if printed is not None:  # alone on standard output; the guarantee is its comment
        return None if in_json() else typer.echo(printed, nl=False)
    for _, place in wanted.values():
        console.print(f"Wrote {place}.", soft_wrap=True)
    print_guarantee(classifier.guarantee_)
    return None


# --- sensitivity -----------------------------------------------------------------------------------------------------


@with_groups
def sensitivity(
    *,
    features: Annotated[int, "Number of features."],
    hidden: Annotated[
        list[int] | None, "Width of a hidden layer. Repeatable, one per layer. Default: 128."
    ] = None,
    classes: Annotated[int, "Number of classes."],
    records: Annotated[int, "Number of training records."],
) -> None:
    """Compute the sensitivities that the paper publishes for a network.

    These are formulas, not upper bounds: retraining without one record can exceed them.

    Example: quietmax sensitivity --features 784 --classes 10 --records 10000
    """
    from quietmax.sensitivity.network import published_sensitivity_for

    found = published_sensitivity_for(features, hidden or [128], classes, records)
    print_json(found.to_json())
    print_rows(
        "Published sensitivity",
        {"quantity": "{0}", "value": "{1.value:.6g}", "basis": "{1.basis}"},
        vars(found).items(),
        "The paper's formulas; not upper bounds (theory, section 2).",
    )


@with_groups
def bundle(
    model: Model,
    key: Annotated[Path, "PEM file of the Ed25519 key; it is created if there is none."] = Path("key.pem"),
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. Default: FOLDER.bundle.json.")
    ] = None,
) -> None:
    """Sign the files of a model folder, so that verify.py notices every change of them.

    Example: quietmax bundle model --key key.pem
    """
    from quietmax.export.bundle import write_bundle

    folder = model.resolve()
    target = folder.with_name(f"{folder.name}.bundle.json") if output is None else output
    entry = write_bundle(model, key, target)
    print_json({"bundle": str(target), "public_key": entry["public_key"]})
    console.print(f"Signed in {target}. Public key: {entry['public_key']}", soft_wrap=True)
