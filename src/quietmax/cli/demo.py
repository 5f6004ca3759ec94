"""`quietmax demo`: the whole story on real digits that come with a dependency; no download."""

from __future__ import annotations

from quietmax.cli.options import Json
from quietmax.cli.output import console, print_json, print_table, progress_bar
from quietmax.data import load
from quietmax.experiments import reference
from quietmax.models import CrossEntropy, TrainingSettings, accuracy, train
from quietmax.sensitivity import published


def command(as_json: Json = False) -> None:
    """Train on 5,000 real digits and print both of the paper's table rows for them.

    Example: quietmax demo
    """
    data = load("mnist-5k")
    models = {}
    with progress_bar("training two networks", quiet=as_json) as progress:
        models["original"] = train(data, settings=TrainingSettings(loss=CrossEntropy()), progress=progress)
        models["convexified"] = train(data, progress=progress)
    accuracies = {
        f"{loss}_{part}_acc": accuracy(model, getattr(data, part))
        for loss, model in models.items()
        for part in ("train", "test")
    }
    sensitivities = published(models["convexified"]).to_json()
    if as_json:
        print_json({"dataset": "mnist-5k", "accuracy": accuracies, "sensitivity": sensitivities})
        return
    console.print(
        f"mnist-5k: {len(data.train):,} training and {len(data.test):,} test digits. The paper's MNIST row has 10,000."
    )
    printed = reference.accuracy_table()["mnist"]
    print_table(
        "Accuracy of the ordinary network",
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
        "Sensitivity as published",
        ("", "here", "paper's MNIST"),
        ((name, f"{sensitivities[name]:.4f}", f"{printed[column]:.4f}") for name, column in columns.items()),
        caption="The paper's formulas; not upper bounds (theory, section 2).",
    )
