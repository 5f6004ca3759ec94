"""`quietmax demo`: the whole story on real digits that come with a dependency; no download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from quietmax.accounting import Budget
from quietmax.cli.demo_report import EFFORT, attack_and_report
from quietmax.cli.demo_service import RECORDS, ask_until_refused
from quietmax.cli.guarantees import print_guarantee
from quietmax.cli.options import Json
from quietmax.cli.output import console, print_json, print_table, progress_bar
from quietmax.data import Split, load
from quietmax.estimators import PrivateHead
from quietmax.experiments import reference
from quietmax.experiments.report import SEEDED_NOISE
from quietmax.mechanisms import Algorithm1
from quietmax.models import CrossEntropy, Model, TrainingSettings, accuracy, train
from quietmax.predictor import Predictor
from quietmax.sensitivity import published


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
