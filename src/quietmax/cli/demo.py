"""`quietmax demo`: a private model of a survey of people, end to end; then MNIST digits and the paper in brief.

Each step is a function that returns what `--json` shows, and a function that prints it.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quietmax.cli._options import Json
from quietmax.cli._output import console, print_guarantee, print_json, print_table, progress_bar
from quietmax.errors import BudgetExhausted

if TYPE_CHECKING:
    from quietmax.data.records import Split
    from quietmax.estimators.head.estimator import PrivateHead
    from quietmax.ledger.ledger import Ledger
    from quietmax.models.training import Model

SURVEY = "fair"
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
ANSWERS = 4
"""Answers that the budget of the model that is charged per answer pays for, epsilon 1 each."""
DIGITS = 2000
EPOCHS = 20
SHADOWS = 2


def command(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the model of the survey and its privacy card.")
    ] = Path("quietmax-demo"),
    as_json: Json = False,
) -> None:
    """Train, evaluate, query and serve a private model of a survey of people; then the paper on MNIST digits.

    Example: quietmax demo
    """
    found = run_steps(output, quiet=as_json)
    if as_json:
        print_json(found)
        return
    _print_survey(found["survey"])
    _print_answers(found["survey"])
    _print_charged(found["charged"])
    _print_digits(found["digits"])
    _print_paper(found["paper"])
    _print_attack(found["attack"])


def run_steps(output: Path, *, quiet: bool) -> dict[str, Any]:
    """Run all steps of the demo.

    Parameters
    ----------
    output : Path
        Folder for the model of the survey and its privacy card; those of an earlier demo are replaced.
    quiet : bool
        Show no progress.

    Returns
    -------
    dict
        What each step found, by name.
    """
    from quietmax.data.load import load
    from quietmax.models.stacked import TrainingSettings
    from quietmax.models.training import train

    people = load(SURVEY, holdout=HOLDOUT)
    with progress_bar("training on the survey", quiet=quiet):
        survey = _survey(people, output)
    with progress_bar("serving a model that charges every answer", quiet=quiet):
        charged = _query_until_exhausted(people)
    digits = load("mnist-5k", records=DIGITS)
    with progress_bar("training the paper's network on digits", quiet=quiet) as progress:
        network = train(digits, settings=TrainingSettings(epochs=EPOCHS), progress=progress)
    with progress_bar("training a private head on digits", quiet=quiet):
        head = _digits_head(digits)
    with progress_bar("attacking both", quiet=quiet) as progress:
        attack = _attack(network, head, digits, progress)
    return {
        "survey": survey,
        "charged": charged,
        "digits": _accuracies(network, head, digits),
        "paper": _paper(network, digits),
        "attack": attack,
    }


# 1 and 2. A survey of people: a private model, a published accuracy, answers over HTTP.


def _survey(people: Split, output: Path) -> dict[str, Any]:
    """Train, evaluate, save and serve a private head."""
    from quietmax.estimators.evaluate import evaluate_folder
    from quietmax.estimators.head.estimator import PrivateHead
    from quietmax.estimators.serialization import open_private, save_private
    from quietmax.privacy_card import read_card
    from quietmax.server.client import Client

    head = PrivateHead(epsilon=1.0, delta=1e-5, declared_size=DECLARED_PERSONS).fit(people.train)
    folder, page = output / "affair", output / "card.html"
    save_private(head, folder, dataset=SURVEY, overwrite=True)
    evaluation = evaluate_folder(folder, open_private(folder), people.records)
    page.write_text(read_card(folder).to_html(), encoding="utf-8")
    with (
        tempfile.TemporaryDirectory(prefix="quietmax-demo-") as place,
        _running_service(folder, Path(place)) as (url, key, _),
        Client(url, key) as client,
    ):
        answer = client.infer("affair", list(QUESTIONS))
    return {
        "guarantee": head.guarantee_,
        "in_words": head.guarantee_.in_words(),
        "evaluation": evaluation,
        "questions": list(QUESTIONS),
        "answers": list(answer.labels),
        "model": str(folder),
        "card": str(page),
    }


@contextmanager
def _running_service(folder: Path, place: Path) -> Iterator[tuple[str, str, Ledger]]:
    """Serve a model in a thread, with a ledger in ``place``; yields the address, a client's key and the ledger."""
    from quietmax.ledger.ledger import Ledger
    from quietmax.server.deployment import deploy
    from quietmax.server.log import Log
    from quietmax.server.repository import load_models
    from quietmax.server.run import run_in_thread
    from quietmax.server.service import Service

    ledger = Ledger(place / "ledger.sqlite")
    key, _ = ledger.create_key("demo")
    deployments = deploy(ledger, load_models([str(folder)]))
    with run_in_thread(Service(ledger, deployments, log=Log(io.BytesIO()))) as url:
        yield url, key, ledger


def _print_survey(survey: dict[str, Any]) -> None:
    """Print the guarantee, what it means, and the accuracy that may be published."""
    console.print(
        "1. A private model of a survey: 6,366 married women, and whether they had an affair", style="bold"
    )
    print_guarantee(survey["guarantee"])
    for sentence in survey["in_words"]:
        console.print(f"  {sentence}")
    evaluation = survey["evaluation"]
    print_table(
        f"Accuracy on the {HOLDOUT:.0%} that were held out, with noise: it may be published, and costs nothing more",
        ("", "estimate and 95% interval"),
        (
            ("accuracy", str(evaluation.accuracy)),
            *((f"recall of {name!r}", str(each)) for name, each in evaluation.recall.items()),
        ),
    )
    console.print(f"The model is in {survey['model']}, its privacy card in {survey['card']}.", soft_wrap=True)


def _print_answers(survey: dict[str, Any]) -> None:
    """Print columns in, class names out."""
    print_table(
        "2. Columns in, class names out, over HTTP: paid at training, any number of answers",
        ("", *(f"woman {number}" for number in range(1, len(survey["questions"]) + 1))),
        (
            *(
                (column, *(str(question[column]) for question in survey["questions"]))
                for column in survey["questions"][0]
            ),
            ("answer: affair", *survey["answers"]),
        ),
    )


# 3. A service whose ledger charges every answer.


def _query_until_exhausted(people: Split) -> dict[str, Any]:
    """Serve a head that charges epsilon 1 for each answer, and query it over HTTP until the budget is exhausted."""
    from quietmax.estimators.head.estimator import PrivateHead
    from quietmax.estimators.serialization import save_private
    from quietmax.server.client import Client

    head = PrivateHead(
        epsilon=float(ANSWERS), release="query", queries=ANSWERS, declared_size=DECLARED_PERSONS
    ).fit(people.train)
    labels: list[str] = []
    left: list[int] = []
    with tempfile.TemporaryDirectory(prefix="quietmax-demo-") as name:
        place = Path(name)
        save_private(head, place / "charged", dataset=SURVEY)
        with _running_service(place / "charged", place) as (url, key, ledger), Client(url, key) as client:
            while True:
                try:
                    answer = client.infer("charged", people.test.features[len(labels)][None])
                except BudgetExhausted as error:
                    return {
                        "labels": labels,
                        "answers_left": left,
                        "refusal": str(error),
                        "spent_fraction": client.budget("charged")["spent_fraction"],
                        "journal_is_sound": ledger.verify().sound,
                    }
                labels.append(str(answer.labels[0]))
                left.append(int(answer.parameters["remaining_answers"]))


def _print_charged(charged: dict[str, Any]) -> None:
    """Print the answers over HTTP and the error that ended them."""
    print_table(
        f"3. A model that charges epsilon 1 for each answer, with a budget for {ANSWERS}",
        ("query", "private answer", "answers left"),
        (
            (str(number), label, str(left))
            for number, (label, left) in enumerate(
                zip(charged["labels"], charged["answers_left"], strict=True), start=1
            )
        ),
    )
    console.print(f"The next query got HTTP 403: {charged['refusal']}")
    console.print(
        f"{charged['spent_fraction']:.1%} of the budget is spent; the ledger's journal is "
        f"{'intact' if charged['journal_is_sound'] else 'damaged'}. Each model of this demo has a budget of its own; "
        "in earnest, all models of the same people share one.",
        soft_wrap=True,
    )


# 4. Digits: a private head beside the paper's network.


def _digits_head(digits: Split) -> PrivateHead:
    """Fit a private head to the training digits."""
    from quietmax.estimators.head.estimator import PrivateHead

    head = PrivateHead(
        image_shape=digits.records.image_shape, classes=range(digits.classes), declared_size=DIGITS
    )
    return head.fit(digits.train.features, digits.train.labels)


def _accuracies(network: Model, head: PrivateHead, digits: Split) -> dict[str, Any]:
    """Test accuracies of the network and of the head."""
    from quietmax.models.training import accuracy

    return {
        "network_test_acc": accuracy(network, digits.test),
        "head_test_acc": accuracy(head, digits.test),
        "guarantee": head.guarantee_,
    }


def _print_digits(digits: dict[str, Any]) -> None:
    """Print the accuracies and the head's guarantee."""
    print_table(
        f"4. {DIGITS:,} MNIST digits",
        ("", "test accuracy"),
        (
            ("the paper's network, no privacy", f"{digits['network_test_acc']:.4f}"),
            ("private head, epsilon 1, delta 1e-5", f"{digits['head_test_acc']:.4f}"),
        ),
    )
    print_guarantee(digits["guarantee"])


# 5. The paper: published sensitivity, and one answer of Algorithm 1.


def _paper(network: Model, digits: Split) -> dict[str, Any]:
    """The published sensitivities, and one test digit answered without noise and through Algorithm 1."""
    from quietmax.accounting.budget import Budget
    from quietmax.mechanisms.algorithm1 import Algorithm1
    from quietmax.predictor import Predictor
    from quietmax.sensitivity.published import published_sensitivity

    query = digits.test.features[:1]
    predictor = Predictor(network, Algorithm1(noise="gaussian"), Budget(epsilon=1.0, queries=1))
    return {
        "sensitivity": published_sensitivity(network).to_json(),
        "truth": int(digits.test.labels[0]),
        "plain": network.predict_proba(query)[0].tolist(),
        "noisy": predictor.predict_proba(query)[0].tolist(),
        "guarantee": predictor.guarantee,
    }


def _print_paper(found: dict[str, Any]) -> None:
    """Print the sensitivities beside the paper's, and the probabilities with and without noise."""
    from quietmax.experiments import paper

    printed = paper.sensitivity_table()["mnist"]
    columns = {"rho": "rho", "logit": "delta_logit", "probability": "delta_probability"}
    print_table(
        "5. The paper's sensitivity formulas",
        ("", "here", "paper's MNIST"),
        (
            (name, f"{found['sensitivity'][name]:.4f}", f"{printed[column]:.4f}")
            for name, column in columns.items()
        ),
        caption="They are not upper bounds (theory, section 2).",
    )
    print_table(
        f"Probabilities for one test digit (a {found['truth']}): the network's own, and those of the paper's "
        "Algorithm 1 with Gaussian noise at epsilon 1",
        ("class", "network", "Algorithm 1"),
        (
            (str(digit), f"{plain:.4f}", f"{noisy:.4f}")
            for digit, (plain, noisy) in enumerate(zip(found["plain"], found["noisy"], strict=True))
        ),
    )
    print_guarantee(found["guarantee"])


# 6. The same membership-inference attack on both models of the digits.


def _attack(
    network: Model, head: PrivateHead, digits: Split, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Leakage of the network's and of the head's answers about their training digits, with its 95% interval."""
    from quietmax.attacks.threshold import Threshold

    attack = Threshold(models=SHADOWS)
    pool = attack.train_pool(digits, network.settings, progress)
    reports = {
        "the paper's network, no privacy": attack.run(network, digits, pool=pool),
        "private head, epsilon 1, delta 1e-5": attack.run(network, digits, target=head, pool=pool),
    }
    return {
        name: {"leakage": each.leakage.value, "low": each.leakage.low, "high": each.leakage.high}
        for name, each in reports.items()
    }


def _print_attack(attack: dict[str, Any]) -> None:
    """Print the leakage of each model."""
    print_table(
        "6. A membership-inference attack on the digits: leakage 0 is guessing, 1 identifies every member",
        ("answers from", "leakage", "95% interval"),
        (
            (name, f"{each['leakage']:+.3f}", f"{each['low']:+.3f} to {each['high']:+.3f}")
            for name, each in attack.items()
        ),
    )
    console.print(
        "An attack that fails proves nothing. Compare all methods on your data with: quietmax compare"
    )
