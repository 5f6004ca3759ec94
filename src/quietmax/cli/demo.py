"""`quietmax demo`: from a table of people to a private service, then MNIST digits and the paper in brief.

Each step prints what it found as soon as it is there, and returns what `--json` shows.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from quietmax.cli._options import with_groups
from quietmax.cli._output import console, print_guarantee, print_json, print_rows, print_table, progress_bar

TABLE, PERSON = "survey.csv", "respondent"
HOLDOUT = 0.2
DECLARED_PERSONS = 5000
"""Public round number near the number of women that are trained on."""
QUESTIONS = (
    {"rate_marriage": 5, "age": 22, "yrs_married": 2.5, "children": 0, "religious": 4, "educ": 16}
    | {"occupation": 4, "occupation_husb": 5},
    {"rate_marriage": 2, "age": 37, "yrs_married": 16.5, "children": 3, "religious": 1, "educ": 14}
    | {"occupation": 3, "occupation_husb": 5},
)
"""Two women who were not asked in the survey."""
DIGITS = 2000
EPOCHS = 20
SHADOWS = 2


@with_groups
def command(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the table, the model and the pages.")
    ] = Path("quietmax-demo"),
) -> None:
    """Make a private service of a survey of people; then show the paper on MNIST digits.

    Example: quietmax demo
    """
    print_json(dict(_steps(output)))


def _steps(output: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the steps of the demo, one after the other."""
    yield "table", _table(output)
    yield "survey", _survey(output)
    yield "answers", _answers(output)
    yield "digits", _digits()
    yield "paper", _paper(output)
    yield "open", _to_open(output)


def _table(output: Path) -> dict[str, Any]:
    """Write the survey as the CSV file of an owner, draft its schema, and write the confirmed one beside it."""
    from quietmax.data.draft import draft_schema
    from quietmax.data.readers import FAIR_SCHEMA, fair_table

    survey = fair_table()
    survey.insert(0, PERSON, range(1, len(survey) + 1))
    output.mkdir(parents=True, exist_ok=True)
    table, schema = output / TABLE, output / "survey.toml"
    survey.to_csv(table, index=False)
    confirmed = replace(FAIR_SCHEMA, person=PERSON)
    schema.write_text(confirmed.to_toml(), encoding="utf-8")
    with progress_bar("drafting a schema for the survey"):
        draft = draft_schema(table, label=FAIR_SCHEMA.label, person=PERSON).to_dict()
    declared = confirmed.to_dict()
    _heading(f"1. A table of people: {len(survey):,} married women, and whether they had an affair")
    print_table(
        "",
        ("column", "draft, from the values", "confirmed, from the questionnaire"),
        (
            (each, _declared(draft, each), _declared(declared, each))
            for each in (PERSON, *QUESTIONS[0], declared["label"])
        ),
    )
    console.print(
        "Only what is public may be declared: a value that one woman could change would give her away. Every woman "
        f"has a number ({PERSON}), so the guarantee is for a person, with all her rows."
    )
    found = {"table": str(table), "schema": str(schema), "rows": len(survey)}
    return {**found, "draft": draft, "confirmed": declared}


def _declared(schema: dict[str, Any], column: str) -> str:
    if column == schema.get("person"):
        return "says who it is"
    if column == schema.get("label"):
        return "predict " + " or ".join(schema["classes"])
    if column in schema.get("bounds", {}):
        low, high = schema["bounds"][column]
        return f"{low:g} to {high:g}"
    categories = schema.get("categories", {}).get(column, ())
    return f"one of {', '.join(map(str, categories))}" if categories else "not used"


def _survey(output: Path) -> dict[str, Any]:
    """Train, save and evaluate a private head, and write its privacy card."""
    from quietmax.data.registry import load
    from quietmax.estimators.evaluation import evaluate_folder
    from quietmax.estimators.head.estimator import PrivateHead
    from quietmax.estimators.serialization import open_private, save_private
    from quietmax.privacy_card import read_card

    folder, page = output / "affair", output / "card.html"
    with progress_bar("training on the survey"):
        people = load(str(output / TABLE), holdout=HOLDOUT)
        head = PrivateHead(epsilon=1.0, delta=1e-5, declared_size=DECLARED_PERSONS).fit(people.train)
        save_private(head, folder, dataset=people.name, overwrite=True)
        evaluation = evaluate_folder(folder, open_private(folder), people.records)
        page.write_text(read_card(folder).to_html(), encoding="utf-8")
    guarantee = head.guarantee_
    _heading("2. A private model of the survey, and an accuracy that may be published")
    print_guarantee(guarantee)
    for sentence in guarantee.in_words():
        console.print(f"  {sentence}")
    shown = {"accuracy": evaluation.accuracy}
    shown |= {f"recall of {name!r}": recall for name, recall in evaluation.recall.items()}
    print_table(
        "",
        ("", "estimate", "95% interval"),
        ((name, f"{each.value:.3f}", f"{each.low:.3f} to {each.high:.3f}") for name, each in shown.items()),
    )
    console.print(
        f"Measured with noise on the {HOLDOUT:.0%} of the women who were held out: it may be published, and costs "
        "nothing more."
    )
    found = {"guarantee": guarantee, "in_words": guarantee.in_words(), "evaluation": evaluation}
    return {**found, "model": str(folder), "card": str(page)}


def _answers(output: Path) -> dict[str, Any]:
    """Serve the model in a thread, with a new ledger, and ask about two women."""
    from quietmax.ledger.ledger import Ledger
    from quietmax.server.client import Client
    from quietmax.server.deployment import deploy, load_models
    from quietmax.server.run import run_in_thread
    from quietmax.server.service import Service
    from quietmax.server.telemetry import Log

    for file in output.glob("demo.sqlite*"):  # the ledger of an earlier demo, whose model was replaced
        file.unlink()
    with progress_bar("asking over HTTP"), Ledger(output / "demo.sqlite") as ledger:
        key, _ = ledger.create_key("demo")
        deployments = deploy(ledger, load_models([str(output / "affair")]))
        service = Service(ledger, deployments, log=Log(io.BytesIO()))
        with run_in_thread(service) as url, Client(url, key) as client:
            answers = [str(label) for label in client.predict("affair", list(QUESTIONS))]
    _heading("3. Columns in, class names out, over HTTP")
    rows = [(column, *(str(question[column]) for question in QUESTIONS)) for column in QUESTIONS[0]]
    women = (f"woman {number}" for number in range(1, len(QUESTIONS) + 1))
    print_table("", ("", *women), [*rows, ("answer: affair", *answers)])
    console.print("Training has paid for every answer: ask as often as you like.")
    return {"questions": list(QUESTIONS), "answers": answers}


def _digits() -> dict[str, Any]:
    """Compare the paper's network, its Algorithm 1 and a private head, and print the comparison."""
    with progress_bar("training and attacking networks on digits"):
        digits = _measured_digits()
    _heading(f"4. Images, and a paper (Lu and others, 2022) that claims the same: {DIGITS:,} MNIST digits")
    names = {
        "the paper's network": "network",
        "the paper's Algorithm 1": "algorithm1",
        "private head": "head",
    }
    print_rows(
        "",
        {
            "answers of": "{0}",
            "test accuracy": "{1[test_acc]:.3f}",
            "guarantee": "{1[guarantee]}",
            "leakage": "{1[leakage][value]:+.3f}",
            "95% interval": "{1[leakage][low]:+.3f} to {1[leakage][high]:+.3f}",
        },
        ((name, digits[key]) for name, key in names.items()),
    )
    console.print(
        "Algorithm 1 claims epsilon 1 for one answer; the head has epsilon 1 for any number. Leakage is what an attack "
        "gains that tells members from others: 0 is guessing, 1 recognises every member. An attack that fails proves "
        "nothing."
    )
    console.print(f"Why Algorithm 1 is refuted: {digits['algorithm1']['because']}")
    return digits


def _measured_digits() -> dict[str, Any]:
    """Test accuracy, status of the guarantee and leakage of the paper's network, of its Algorithm 1 and of a head."""
    from quietmax.accounting.costs import Budget
    from quietmax.attacks.builtin import Threshold
    from quietmax.attacks.shadow_models import ShadowPool
    from quietmax.data.registry import load
    from quietmax.estimators.head.estimator import PrivateHead
    from quietmax.mechanisms.algorithm1 import Algorithm1
    from quietmax.mechanisms.base import Answerer
    from quietmax.models.stacked import TrainingSettings
    from quietmax.models.training import train

    digits = load("mnist-5k", records=DIGITS)
    network = train(digits, settings=TrainingSettings(epochs=EPOCHS))
    head = PrivateHead(image_shape=digits.records.image_shape, declared_size=DIGITS).fit(digits.train)
    noisy = Answerer.prepare(network, Algorithm1(noise="gaussian"), Budget(1.0))
    claimed = noisy.mechanism.guarantee(digits.classes)
    attack, test = Threshold(models=SHADOWS), digits.test
    pool = ShadowPool.train("disjoint", digits, network.settings, SHADOWS)

    def _row(target: Any, labels: Any, status: str) -> dict[str, Any]:
        leakage = attack.run(network, digits, target=target, pool=pool).leakage
        ends = {name: getattr(leakage, name) for name in ("value", "low", "high")}
        return {"test_acc": float((labels == test.labels).mean()), "guarantee": status, "leakage": ends}

    return {
        "network": _row(None, network.predict(test.features), "none"),
        "algorithm1": {
            **_row(noisy, noisy.answer(test.features).labels, claimed.status),
            "because": claimed.reason,
        },
        "head": _row(head, head.predict(test.features), head.guarantee_.status),
    }


def _paper(output: Path) -> dict[str, Any]:
    """Compare the sensitivity formulas with the paper's digits, and write the report of the stored trials."""
    from quietmax.experiments.findings import summarize
    from quietmax.experiments.grid import STORED_TRIALS, read_trials
    from quietmax.experiments.paper import reproduce_sensitivity_table
    from quietmax.experiments.report import ReportInfo, efforts, html

    page = output / "report.html"
    with progress_bar("writing the paper's tables and figures from the stored run"):
        rows = reproduce_sensitivity_table()
        equal = sum(row.agrees for row in rows)
        trials = read_trials([STORED_TRIALS])
        seed = min(trial.group.seed for trial in trials)
        info = ReportInfo("The paper's evaluation again", efforts(trials), seed)
        page.write_text(html(summarize(trials), info), encoding="utf-8")
    _heading("5. The paper again")
    console.print(
        f"{equal} of {len(rows)} numbers of its sensitivity table come out the same to the printed digits. The report "
        f"shows {len(trials):,} stored trials beside its curves."
    )
    found = {"sensitivities": len(rows), "equal_to_the_paper": equal, "trials": len(trials)}
    return {**found, "report": str(page)}


def _to_open(output: Path) -> dict[str, Any]:
    """Name the pages that were written, and the command that serves the model."""
    program = "quietmax" if shutil.which("quietmax") else sys.argv[0]
    card, report, page = str(output / "card.html"), str(output / "report.html"), "http://127.0.0.1:8080/"
    serve = f"{program} serve {output / 'affair'} --anonymous --ledger {output / 'demo.sqlite'}"
    _heading("Three things to open")
    for line in (
        f"  {card}: the privacy card, one page for a data protection officer",
        f"  {report}: the paper's figures, and ours beside them",
        f"  {page}: the page with a form for the columns, while this runs:",
        f"    {serve}",
    ):
        console.print(line, soft_wrap=True)
    return {"card": card, "report": report, "page": page, "serve": serve}


def _heading(text: str) -> None:
    console.print(f"\n{text}", style="bold")
