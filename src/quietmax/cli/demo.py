"""The demo's comparison: ordinary and private models attacked on the same digits, and a report to look at."""

from __future__ import annotations

import io
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn

from quietmax.accounting.budget import Budget
from quietmax.cli._grids import compute, where
from quietmax.cli._options import Json
from quietmax.cli._output import console, print_guarantee, print_json, print_table, progress_bar
from quietmax.cli.compare import method_cells
from quietmax.data.load import load
from quietmax.data.records import Split
from quietmax.errors import BudgetExhausted, QuietmaxError
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.serialization import save_private
from quietmax.experiments import paper as reference
from quietmax.experiments.grid import Effort, Group, Source
from quietmax.experiments.report import write_report
from quietmax.experiments.report.page import SEEDED_NOISE, About
from quietmax.experiments.summary import Summary, summarise
from quietmax.ledger.ledger import Ledger
from quietmax.mechanisms.algorithm1 import Algorithm1
from quietmax.models.losses import CrossEntropy
from quietmax.models.stacked import TrainingSettings
from quietmax.models.training import Model, accuracy, train
from quietmax.predictor import Predictor
from quietmax.sensitivity.published import published
from quietmax.server.client import Client
from quietmax.server.deployment import deploy
from quietmax.server.metrics import Log
from quietmax.server.repository import load_servables
from quietmax.server.run import Listening, configuration, open_port
from quietmax.server.service import Service
from quietmax.server.settings import Settings

METHODS = ("plain", "algorithm1-gaussian", "head")
EPSILONS = (0.1, 1.0, 10.0)
# A quarter of the 5,000 digits, so that shadow networks have as many records as their target.
EFFORT = Effort(1250, 4, 1.0, 100, 20, ("shadow",))


@dataclass(frozen=True)
class Attacked:
    """Accuracy and leakage of each method, and the report's file."""

    summaries: tuple[Summary, ...]
    report: Path

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Method, epsilon, test accuracy, leakage under the Shadow attack."""
        return [
            (
                each.title,
                "" if each.epsilon is None else f"{each.epsilon:g}",
                f"{each.test_accuracy.value:.3f}",
                f"{each.leakage['shadow'].value:+.3f}",
            )
            for each in self.summaries
        ]

    def to_json(self) -> dict[str, Any]:
        """What the figures are, the figures by name, and the report's place."""
        return {
            "about": SEEDED_NOISE,
            "results": [each.flat() for each in self.summaries],
            "report": str(self.report),
        }


def attack_and_report(
    name: str, output: Path, *, quiet: bool, methods: Sequence[str] = METHODS, effort: Effort = EFFORT
) -> Attacked:
    """Train, attack and compare on one split of the data set; what is already in ``output`` is not computed again."""
    group = Group(Source.of(name), effort, 0, 0)
    trials = [trial for each in methods for trial in method_cells(group, each, EPSILONS, [1])]
    done = compute(trials, output, where(None, None), None, quiet=quiet)
    if done.failures:
        trial, failure = next(iter(done.failures.items()))
        raise QuietmaxError(
            f"The demo's comparison failed at {trial} ({failure.rstrip('.')}); correct that and run it again, which "
            "keeps what is done."
        )
    summaries = summarise(done.results)
    about = About(
        f"Privacy and utility on {name}",
        f"{effort.records:,} training records, {effort.shadows} shadow networks, one split: a demonstration",
        0,
        paper=False,
    )
    return Attacked(tuple(summaries), write_report(summaries, output, about)[0])


MODEL = "digits"
QUERIES = 8
RECORDS = 2000
"""Training digits of the demo."""
_SECONDS_TO_START = 60


@dataclass(frozen=True)
class Asked:
    """What the service said: labels beside the truth, what was left after each answer, and the refusal."""

    url: str
    truths: tuple[int, ...]
    labels: tuple[int, ...]
    left: tuple[int, ...]
    refusal: str
    budget: dict[str, Any]
    sound: bool

    def to_json(self) -> dict[str, Any]:
        """All of it by name."""
        return {
            "truths": list(self.truths),
            "labels": list(self.labels),
            "answers_left": list(self.left),
            "refusal": self.refusal,
            "spent_fraction": self.budget["spent_fraction"],
            "journal_is_sound": self.sound,
        }


def ask_until_refused(data: Split, *, queries: int = QUERIES) -> Asked:
    """Train a head that pays epsilon 1 for every answer, serve it, and ask until the budget is gone."""
    head = PrivateHead(
        epsilon=float(queries),
        delta=1e-5,
        method="output",
        release="query",
        queries=queries,
        image_shape=data.records.image_shape,
        classes=range(data.classes),
        declared_size=RECORDS,
    ).fit(data.train.features, data.train.labels)
    with tempfile.TemporaryDirectory(prefix="quietmax-demo-") as folder:
        save_private(head, Path(folder) / MODEL, dataset=data.name)
        with _running(Path(folder)) as (url, key, ledger):
            return _asked(url, key, ledger, data)


def _asked(url: str, key: str, ledger: Ledger, data: Split) -> Asked:
    labels: list[int] = []
    left: list[int] = []
    with Client(url, key) as client:
        while True:
            row = data.test.features[len(labels)][None]
            try:
                answer = client.ask(MODEL, row)
            except BudgetExhausted as refusal:
                truths = tuple(int(label) for label in data.test.labels[: len(labels)])
                budget = client.budget(MODEL)
                sound = ledger.verify().sound
                return Asked(url, truths, tuple(labels), tuple(left), str(refusal), budget, sound)
            labels.append(int(answer.labels[0]))
            left.append(int(answer.parameters["remaining_answers"]))


@contextmanager
def _running(folder: Path) -> Iterator[tuple[str, str, Ledger]]:
    """The service in a thread: its address, a client's key and its ledger."""
    ledger = Ledger(folder / "ledger.sqlite")
    key, _ = ledger.create_key("demo")
    service = Service(
        ledger, deploy(ledger, load_servables([str(folder / MODEL)])), Settings(), Log(io.BytesIO())
    )
    listening = Listening(port=0)
    port = open_port(listening)
    server = uvicorn.Server(configuration(service, listening))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [port]}, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + _SECONDS_TO_START
        while not server.started:
            if time.monotonic() > deadline or not thread.is_alive():
                raise QuietmaxError("The demo's service did not start; try 'quietmax serve' to see why.")
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port.getsockname()[1]}", key, ledger
    finally:
        server.should_exit = True
        thread.join()


def command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the report.")] = Path(
        "quietmax-demo"
    ),
    as_json: Json = False,
) -> None:
    """Train on real digits as the paper does, train with a proven guarantee, serve that, attack both, write a report.

    Example: quietmax demo
    """
    data = load("mnist-5k", records=RECORDS)
    models = {}
    with progress_bar("training two networks", quiet=as_json) as progress:
        models["original"] = train(data, settings=TrainingSettings(loss=CrossEntropy()), progress=progress)
        models["convexified"] = train(data, progress=progress)
    accuracies = {
        f"{loss}_{part}_acc": accuracy(model, getattr(data, part))
        for loss, model in models.items()
        for part in ("train", "test")
    }
    model = models["convexified"]
    sensitivities = published(model).to_json()
    answer = _one_answer(model, data)
    with progress_bar("training a private head", quiet=as_json):
        head = PrivateHead(
            epsilon=1.0,
            delta=1e-5,
            image_shape=data.records.image_shape,
            classes=range(data.classes),
            declared_size=RECORDS,
        ).fit(data.train.features, data.train.labels)
        private_accuracy = accuracy(head, data.test)
    with progress_bar("serving a head that pays for every answer", quiet=as_json):
        asked = ask_until_refused(data)
    attacked = attack_and_report(data.name, output, quiet=as_json)
    if as_json:
        answer["guarantee"] = answer["guarantee"].to_json()
        private = {"test_acc": private_accuracy, "guarantee": head.guarantee_.to_json()}
        print_json(
            {
                "dataset": data.name,
                "accuracy": accuracies,
                "sensitivity": sensitivities,
                "answer": answer,
                "private_head": private,
                "service": asked.to_json(),
                "attack": attacked.to_json(),
            }
        )
        return
    console.print(
        f"{data.name}: {len(data.train):,} training and {len(data.test):,} test digits; the paper's MNIST has 10,000."
    )
    printed = reference.accuracy_table()["mnist"]
    print_table(
        "1. Accuracy of the ordinary network",
        ("", "here", "paper's MNIST"),
        (
            (name.replace("_", " "), f"{value:.4f}", f"{printed[name]:.4f}")
            for name, value in accuracies.items()
        ),
    )
    printed = reference.sensitivity_table()["mnist"]
    columns = {
        "rho": "rho",
        "weight": "delta_weight",
        "logit": "delta_logit",
        "probability": "delta_probability",
    }
    print_table(
        "2. Sensitivity as published",
        ("", "here", "paper's MNIST"),
        ((name, f"{sensitivities[name]:.4f}", f"{printed[column]:.4f}") for name, column in columns.items()),
        caption="The paper's formulas; not upper bounds (theory, section 2).",
    )
    print_table(
        f"3. One test digit (a {answer['truth']}), asked plainly and through Algorithm 1 with Gaussian noise, eps = 1",
        ("class", "plain", "noisy"),
        (
            (str(digit), f"{plain:.4f}", f"{noisy:.4f}")
            for digit, (plain, noisy) in enumerate(zip(answer["plain"], answer["noisy"], strict=True))
        ),
    )
    print_guarantee(answer["guarantee"])
    print_table(
        "4. A private head: any number of queries, the weights may be published",
        ("", "test accuracy"),
        (
            ("ordinary network, no privacy", f"{accuracies['original_test_acc']:.4f}"),
            ("convexified network, no privacy", f"{accuracies['convexified_test_acc']:.4f}"),
            ("private head, epsilon 1, delta 1e-5", f"{private_accuracy:.4f}"),
        ),
    )
    print_guarantee(head.guarantee_)
    print_table(
        f"5. The service, asked over HTTP until it refuses: epsilon 1 for each of {len(asked.labels)} answers",
        ("question", "true digit", "private answer", "answers left"),
        (
            (str(number), str(truth), str(label), str(left))
            for number, (truth, label, left) in enumerate(
                zip(asked.truths, asked.labels, asked.left, strict=True), start=1
            )
        ),
    )
    console.print(f"The next question was refused (HTTP 403): {asked.refusal}", markup=False, highlight=False)
    console.print(
        f"{asked.budget['spent_fraction']:.1%} of the budget is spent; the ledger's journal is "
        f"{'sound' if asked.sound else 'damaged'}. Serve a model of your own with: quietmax serve FOLDER",
        markup=False,
        highlight=False,
    )
    print_table(
        f"6. The paper's Shadow attack on {EFFORT.records:,} training digits: 0 is guessing, 1 tells every member",
        ("answers from", "epsilon", "test accuracy", "leakage"),
        attacked.rows(),
        caption=SEEDED_NOISE,
    )
    console.print(
        f"Curves and tables: open {attacked.report} in a browser.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _one_answer(model: Model, data: Split) -> dict[str, Any]:
    query = data.test.features[:1]
    quiet = Predictor(model, Algorithm1(noise="gaussian"), Budget(epsilon=1.0, queries=1))
    return {
        "truth": int(data.test.labels[0]),
        "plain": model.predict_proba(query)[0].tolist(),
        "noisy": quiet.predict_proba(query)[0].tolist(),
        "guarantee": quiet.guarantee,
    }
