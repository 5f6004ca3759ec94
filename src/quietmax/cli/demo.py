"""`quietmax demo`: train, query, serve and attack models of the embedded MNIST digits, and write a report.

Each step is a function that returns what the report and `--json` show, and a function that prints it.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quietmax.cli._options import Json
from quietmax.cli._output import console, print_guarantee, print_json, print_table, progress_bar
from quietmax.errors import BudgetExhausted, QuietmaxError

if TYPE_CHECKING:
    from quietmax.data.records import Split
    from quietmax.estimators.head.estimator import PrivateHead
    from quietmax.ledger.ledger import Ledger
    from quietmax.models.training import Model

RECORDS = 2000
"""Training records of the models that are trained, queried and served."""
QUERIES = 8
"""Answers that the budget of the served model pays for, epsilon 1 each."""
METHODS = ("plain", "algorithm1-gaussian", "head")
EPSILONS = (0.1, 1.0, 10.0)
ATTACKED_RECORDS = 1250
"""Training records of the attacked models: a quarter of the digits, so that shadow networks get as many."""
SHADOWS = 4

_MODEL = "digits"


def command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the report.")] = Path(
        "quietmax-demo"
    ),
    as_json: Json = False,
) -> None:
    """Train, query, serve and attack models of MNIST digits, and write a report.

    Example: quietmax demo
    """
    found = run_steps(output, quiet=as_json)
    if as_json:
        print_json(found)
        return
    console.print(
        f"{found['dataset']}: {RECORDS:,} training and as many test digits. The paper's MNIST has 10,000 of each."
    )
    _print_networks(found)
    _print_answer(found["answer"])
    _print_head(found)
    _print_service(found["service"])
    _print_attack(found["attack"])


def run_steps(output: Path, *, quiet: bool) -> dict[str, Any]:
    """Run all steps of the demo.

    Parameters
    ----------
    output : Path
        Folder for the report; trials that it holds already are not run again.
    quiet : bool
        Show no progress.

    Returns
    -------
    dict
        What each step found, by name.
    """
    from quietmax.data.load import load
    from quietmax.models.training import accuracy
    from quietmax.sensitivity.published import published_sensitivity

    data = load("mnist-5k", records=RECORDS)
    networks = _train_networks(data, quiet=quiet)
    with progress_bar("training a private head", quiet=quiet):
        head = _fit_head(data, epsilon=1.0)
    with progress_bar("serving a head that charges every answer", quiet=quiet):
        service = _query_until_exhausted(data)
    return {
        "dataset": data.name,
        "accuracy": {
            f"{loss}_{part}_acc": accuracy(model, getattr(data, part))
            for loss, model in networks.items()
            for part in ("train", "test")
        },
        "sensitivity": published_sensitivity(networks["convexified"]).to_json(),
        "answer": _one_answer(networks["convexified"], data),
        "private_head": {"test_acc": accuracy(head, data.test), "guarantee": head.guarantee_},
        "service": service,
        "attack": _attack(data.name, output, quiet=quiet),
    }


# 1 and 2. Ordinary networks: accuracy and published sensitivity.


def _train_networks(data: Split, *, quiet: bool) -> dict[str, Model]:
    """Train the paper's network with the original and with the convexified loss."""
    from quietmax.models.losses import CrossEntropy
    from quietmax.models.stacked import TrainingSettings
    from quietmax.models.training import train

    with progress_bar("training two networks", quiet=quiet) as progress:
        return {
            "original": train(data, settings=TrainingSettings(loss=CrossEntropy()), progress=progress),
            "convexified": train(data, progress=progress),
        }


def _print_networks(found: dict[str, Any]) -> None:
    """Print accuracies and sensitivities beside the paper's."""
    from quietmax.experiments import paper

    printed = paper.accuracy_table()["mnist"]
    print_table(
        "1. Accuracy of the ordinary network",
        ("", "here", "paper's MNIST"),
        (
            (name.replace("_", " "), f"{value:.4f}", f"{printed[name]:.4f}")
            for name, value in found["accuracy"].items()
        ),
    )
    printed = paper.sensitivity_table()["mnist"]
    columns = {
        "rho": "rho",
        "weight": "delta_weight",
        "logit": "delta_logit",
        "probability": "delta_probability",
    }
    print_table(
        "2. Published sensitivity",
        ("", "here", "paper's MNIST"),
        (
            (name, f"{found['sensitivity'][name]:.4f}", f"{printed[column]:.4f}")
            for name, column in columns.items()
        ),
        caption="The paper's formulas; not upper bounds (theory, section 2).",
    )


# 3. One answer of Algorithm 1.


def _one_answer(model: Model, data: Split) -> dict[str, Any]:
    """Query the network for one test digit, without noise and through Algorithm 1."""
    from quietmax.accounting.budget import Budget
    from quietmax.mechanisms.algorithm1 import Algorithm1
    from quietmax.predictor import Predictor

    query = data.test.features[:1]
    predictor = Predictor(model, Algorithm1(noise="gaussian"), Budget(epsilon=1.0, queries=1))
    return {
        "truth": int(data.test.labels[0]),
        "plain": model.predict_proba(query)[0].tolist(),
        "noisy": predictor.predict_proba(query)[0].tolist(),
        "guarantee": predictor.guarantee,
    }


def _print_answer(answer: dict[str, Any]) -> None:
    """Print the probabilities with and without noise."""
    print_table(
        f"3. Probabilities for one test digit (a {answer['truth']}): the network's own, and those of Algorithm 1 "
        "with Gaussian noise at epsilon 1",
        ("class", "network", "Algorithm 1"),
        (
            (str(digit), f"{plain:.4f}", f"{noisy:.4f}")
            for digit, (plain, noisy) in enumerate(zip(answer["plain"], answer["noisy"], strict=True))
        ),
    )
    print_guarantee(answer["guarantee"])


# 4. A private head.


def _fit_head(data: Split, **arguments: Any) -> PrivateHead:
    """Fit a private head to the training digits."""
    from quietmax.estimators.head.estimator import PrivateHead

    head = PrivateHead(
        image_shape=data.records.image_shape, classes=range(data.classes), declared_size=RECORDS, **arguments
    )
    return head.fit(data.train.features, data.train.labels)


def _print_head(found: dict[str, Any]) -> None:
    """Print the head's accuracy beside the networks'."""
    print_table(
        "4. A private head: any number of queries, the weights may be published",
        ("", "test accuracy"),
        (
            ("ordinary network, no privacy", f"{found['accuracy']['original_test_acc']:.4f}"),
            ("convexified network, no privacy", f"{found['accuracy']['convexified_test_acc']:.4f}"),
            ("private head, epsilon 1, delta 1e-5", f"{found['private_head']['test_acc']:.4f}"),
        ),
    )
    print_guarantee(found["private_head"]["guarantee"])


# 5. A service whose ledger charges every answer.


def _query_until_exhausted(data: Split) -> dict[str, Any]:
    """Serve a head that charges epsilon 1 for each answer, and query it over HTTP until the budget is exhausted."""
    from quietmax.estimators.serialization import save_private
    from quietmax.server.client import Client

    head = _fit_head(data, epsilon=float(QUERIES), release="query", queries=QUERIES)
    labels: list[int] = []
    left: list[int] = []
    with tempfile.TemporaryDirectory(prefix="quietmax-demo-") as name:
        folder = Path(name)
        save_private(head, folder / _MODEL, dataset=data.name)
        with _running_service(folder) as (url, key, ledger), Client(url, key) as client:
            while True:
                try:
                    answer = client.infer(_MODEL, data.test.features[len(labels)][None])
                except BudgetExhausted as error:
                    return {
                        "truths": data.test.labels[: len(labels)].tolist(),
                        "labels": labels,
                        "answers_left": left,
                        "refusal": str(error),
                        "spent_fraction": client.budget(_MODEL)["spent_fraction"],
                        "journal_is_sound": ledger.verify().sound,
                    }
                labels.append(int(answer.labels[0]))
                left.append(int(answer.parameters["remaining_answers"]))


@contextmanager
def _running_service(folder: Path) -> Iterator[tuple[str, str, Ledger]]:
    """Run the service in a thread; yields its address, a client's key and its ledger."""
    from quietmax.ledger.ledger import Ledger
    from quietmax.server.deployment import deploy
    from quietmax.server.metrics import Log
    from quietmax.server.repository import load_models
    from quietmax.server.run import run_in_thread
    from quietmax.server.service import Service

    ledger = Ledger(folder / "ledger.sqlite")
    key, _ = ledger.create_key("demo")
    deployments = deploy(ledger, load_models([str(folder / _MODEL)]))
    with run_in_thread(Service(ledger, deployments, log=Log(io.BytesIO()))) as url:
        yield url, key, ledger


def _print_service(service: dict[str, Any]) -> None:
    """Print the answers over HTTP and the error that ended them."""
    print_table(
        f"5. A service that charges epsilon 1 for each answer, with a budget for {len(service['labels'])}",
        ("query", "true digit", "private answer", "answers left"),
        (
            (str(number), str(truth), str(label), str(left))
            for number, (truth, label, left) in enumerate(
                zip(service["truths"], service["labels"], service["answers_left"], strict=True), start=1
            )
        ),
    )
    console.print(f"The next query got HTTP 403: {service['refusal']}")
    console.print(
        f"{service['spent_fraction']:.1%} of the budget is spent; the ledger's journal is "
        f"{'intact' if service['journal_is_sound'] else 'damaged'}. Serve your own model with: quietmax serve FOLDER"
    )


# 6. Membership-inference attacks on the same digits, and a report.


def _attack(name: str, output: Path, *, quiet: bool) -> dict[str, Any]:
    """Attack ordinary and private models of one split; trials that ``output`` holds already are not run again."""
    from quietmax.cli._grids import run_with_progress
    from quietmax.experiments.grid import DataSource, Effort, Group
    from quietmax.experiments.methods import method_trials
    from quietmax.experiments.report import SEEDED_NOISE, ReportInfo, write_report
    from quietmax.experiments.summary import summarize

    effort = Effort(ATTACKED_RECORDS, SHADOWS, 1.0, 100, 20, ("shadow",))
    trials = method_trials(Group(DataSource.of(name), effort), METHODS, EPSILONS, [1])
    done = run_with_progress(trials, output, quiet=quiet)
    if done.failures:
        trial, failure = next(iter(done.failures.items()))
        raise QuietmaxError(f"The demo's comparison failed at {trial}: {failure}")
    summaries = summarize(done.results)
    info = ReportInfo(
        f"Privacy and utility on {name}",
        f"{effort.records:,} training records, {effort.shadows} shadow networks, one split: a demonstration",
        0,
        paper=False,
    )
    return {
        "about": SEEDED_NOISE,
        "results": [{"title": each.title, **each.flat()} for each in summaries],
        "report": str(write_report(summaries, output, info)[0]),
    }


def _print_attack(attack: dict[str, Any]) -> None:
    """Print accuracy and leakage of each method."""
    print_table(
        f"6. The paper's shadow attack on {ATTACKED_RECORDS:,} training digits: leakage 0 is guessing, 1 identifies "
        "every member",
        ("answers from", "epsilon", "test accuracy", "leakage"),
        (
            (
                each["title"],
                "" if each["epsilon"] is None else f"{each['epsilon']:g}",
                f"{each['test_accuracy']:.3f}",
                f"{each['leakage_shadow']:+.3f}",
            )
            for each in attack["results"]
        ),
        caption=attack["about"],
    )
    console.print(f"Curves and tables: open {attack['report']} in a browser.", soft_wrap=True)
