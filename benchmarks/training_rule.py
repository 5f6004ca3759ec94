"""Accuracy of the private head's training rule over data sets, sizes and epsilons; no official test set is read.

Each trial is one head with its defaults. Its seed chooses the training records, the records it is measured on and the
noise. All come from the training records of a data set. Noise is seeded, so that the figures can be repeated. For every
data set the report marks each pair of epsilons at one size, and of sizes at one epsilon, where the accuracy at the
larger one is lower by more than two standard errors of the difference. A seed measures on the same records throughout.

    python benchmarks/training_rule.py FOLDER [--sets fair adult ...] [--parts trials report]
                                       [--output docs/results/training-rule.json]

Public features of images are kept in FOLDER, and each trial is appended to FOLDER/trials.jsonl; a later run skips it.
So several processes may share the work. The data are read from QUIETMAX_DATA.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adult_table import adult_schema
from image_accuracy import stored_features
from quietmax import PrivateHead
from quietmax.data import Records, load_records
from quietmax.data.encoding import Encoding, NumericColumn
from quietmax.data.readers import adult_table
from quietmax.data.registry import dataset
from quietmax.models.features.generic import describe_map

Trial = dict[str, Any]

DELTA = 1e-5
MARKS = ("<!-- figures -->", "<!-- end of figures -->")
EPSILONS = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
SHOWN = (0.5, 1.0, 3.0, 8.0)
"""The columns of the page; the stored file has all."""
ADULT_TRAINING, MNIST_TRAINING, CIFAR_TRAINING = 32_561, 60_000, 50_000
"""The records of the official training files, which come first."""


@dataclass(frozen=True)
class Task:
    """What is measured on a data set."""

    title: str
    sizes: tuple[int, ...]
    held_out: int
    seeds: int
    epsilons: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """Sizes with other epsilons than `EPSILONS`."""

    def trials(self) -> Iterator[tuple[int, float, int]]:
        """Iterate over sizes, epsilons and seeds."""
        for size in self.sizes:
            for seed in range(self.seeds):
                for epsilon in dict(self.epsilons).get(size, EPSILONS):
                    yield size, epsilon, seed


TASKS = {
    "fair": Task("fair (survey, 8 columns)", (500, 1_500, 5_000), 1_300, 5),
    "location": Task("Location (446 columns, 30 classes)", (500, 1_200, 3_500), 1_500, 3),
    "wide": Task("wide table (50 columns of different spread)", (500, 1_000, 5_000, 25_000), 5_000, 3),
    "gaussians": Task("8 Gaussian classes (20 columns)", (500, 5_000, 60_000), 8_000, 3),
    "pixels": Task("digits as 784 pixels", (500, 1_500, 4_000), 1_000, 3),
    "adult": Task("Adult (adult.data)", (500, 2_000, 8_000, 26_000), 6_500, 3),
    "mnist": Task("MNIST, scattering", (1_000, 10_000), 5_000, 3, ((10_000, (1.0, 3.0, 8.0)),)),
    "cifar-10": Task(
        "CIFAR-10, patches and scattering", (1_000, 5_000), 5_000, 3, ((5_000, (1.0, 3.0, 8.0)),)
    ),
}


# --- Data -------------------------------------------------------------------------------------------------------------


def records_of(name: str, folder: Path) -> Records:
    """Return the training records of a data set; images as their features."""
    if name == "adult":
        table, schema = adult_table(dataset("adult").directory()).iloc[:ADULT_TRAINING], adult_schema()
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "adult.csv"
            table.to_csv(path, index=False)
            path.with_suffix(".toml").write_text(schema.to_toml(), encoding="utf-8")
            return load_records(str(path))
    if name in ("mnist", "cifar-10"):
        images = load_records(name)
        images = images.take(range(MNIST_TRAINING if name == "mnist" else CIFAR_TRAINING))
        features, _ = stored_features(images, folder / f"{name}-train")
        return Records(name, features, images.labels, images.classes)
    if name == "pixels":
        digits = load_records("mnist-5k")
        return Records(name, digits.features, digits.labels, digits.classes)
    if name == "wide":
        return wide_table(30_000, 50)
    if name == "gaussians":
        return gaussian_classes(68_000, 20, 8)
    return load_records(name)


def wide_table(rows: int, columns: int) -> Records:
    """Return a table whose columns spread between 1% and 12% of their bounds and decide the class equally."""
    rng = np.random.default_rng(3)
    spread, normal = np.exp(rng.uniform(-2.5, 0.0, columns)), rng.normal(size=(rows, columns))
    score = normal @ rng.normal(size=columns)
    labels = (rng.random(rows) < 1.0 / (1.0 + np.exp(-3.5 * score / score.std()))).astype(np.int64)
    values = (np.clip(normal * spread, -4.0, 4.0) + 4.0) / 8.0
    described = tuple(NumericColumn(f"c{number}", -4, 4, missing=False) for number in range(columns))
    encoding = Encoding(described, "class", ("0", "1"))
    return Records("wide", values.astype(np.float32), labels, 2, encoding=encoding)


def gaussian_classes(rows: int, columns: int, classes: int) -> Records:
    """Return records around random class means."""
    rng = np.random.default_rng(5)
    means, labels = rng.normal(size=(classes, columns)), rng.integers(classes, size=rows)
    values = means[labels] + 1.5 * rng.normal(size=(rows, columns))
    return Records("gaussians", values.astype(np.float32), labels, classes)


# --- Trials -----------------------------------------------------------------------------------------------------------


def trial(name: str, records: Records, size: int, epsilon: float, seed: int) -> Trial:
    """Train a head on some records and measure it on others."""
    order = np.random.default_rng(seed).permutation(len(records))
    chosen, measured = np.sort(order[:size]), np.sort(order[-TASKS[name].held_out :])
    if size + len(measured) > len(records):
        raise SystemExit(f"{name} has too few records for {size} and {len(measured)}.")
    train, test = records.take(chosen), records.take(measured)
    features = "identity" if name in ("mnist", "cifar-10") else "auto"
    head = PrivateHead(epsilon, DELTA, features=features, declared_size=size, random_state=seed)
    started = time.process_time()
    if train.encoding is None:
        head.set_params(classes=range(train.classes)).fit(train.features, train.labels)
    else:
        head.fit(train)
    seconds = time.process_time() - started
    truth: NDArray[Any] = head.classes_[test.labels]
    facts = head.guarantee_.parameters
    return {
        "set": name,
        "size": size,
        "epsilon": epsilon,
        "seed": seed,
        "accuracy": float((head.predict(test.features) == truth).mean()),
        "features": facts["dimension"],
        "map": describe_map(head.feature_map_)["kind"],
        "bins": list(getattr(head.feature_map_, "bins", ())),
        "whitening": facts["whitening"],
        "plan": head.plan_.to_json(),
        "processor_seconds": round(seconds, 2),
    }


def stored(path: Path) -> dict[tuple[str, int, float, int], Trial]:
    """Return the trials in a file that belong to the tasks."""
    if not path.exists():
        return {}
    trials = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    wanted = {(name, *key) for name, task in TASKS.items() for key in task.trials()}
    keyed = {(one["set"], one["size"], one["epsilon"], one["seed"]): one for one in trials}
    return {key: one for key, one in keyed.items() if key in wanted}


def run(names: list[str], folder: Path) -> None:
    """Run the trials that are not stored yet."""
    path = folder / "trials.jsonl"
    for name in names:
        missing = [key for key in TASKS[name].trials() if (name, *key) not in stored(path)]
        records = records_of(name, folder) if missing else None
        for key in missing:
            if records is None or (name, *key) in stored(path):
                continue
            result = trial(name, records, *key)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            print(name, *key, f"{result['accuracy']:.4f} {result['processor_seconds']:.1f} s", flush=True)


# --- Report -----------------------------------------------------------------------------------------------------------


def summary(trials: dict[tuple[str, int, float, int], Trial]) -> list[Trial]:
    """Return mean and standard error of every data set, size and epsilon whose trials are complete."""
    groups: dict[tuple[str, int, float], list[Trial]] = {}
    for (name, size, epsilon, _), one in sorted(trials.items(), key=lambda item: item[0]):
        groups.setdefault((name, size, epsilon), []).append(one)
    rows = []
    for (name, size, epsilon), ones in groups.items():
        if len(ones) < TASKS[name].seeds:
            continue
        accuracies = [one["accuracy"] for one in ones]
        error = statistics.stdev(accuracies) / math.sqrt(len(ones))
        first = ones[0]
        rows.append(
            {
                "set": name,
                "size": size,
                "epsilon": epsilon,
                "seeds": len(ones),
                "accuracies": accuracies,
                "mean": round(statistics.mean(accuracies), 4),
                "standard_error": round(error, 4),
                **{key: first[key] for key in ("features", "map", "bins", "whitening", "plan")},
                "processor_seconds": round(statistics.mean(one["processor_seconds"] for one in ones), 1),
            }
        )
    return rows


def falls(rows: list[Trial]) -> list[str]:
    """Return a sentence for each pair where a larger epsilon or size has a clearly lower accuracy."""
    found = []
    for one, other in combinations(rows, 2):
        if one["set"] != other["set"]:
            continue
        for grows, same in (("epsilon", "size"), ("size", "epsilon")):
            if one[same] != other[same]:
                continue
            small, large = sorted((one, other), key=lambda row: float(row[grows]))
            lost = [a - b for a, b in zip(small["accuracies"], large["accuracies"], strict=True)]
            limit = 2 * statistics.stdev(lost) / math.sqrt(len(lost))
            if statistics.mean(lost) > limit:
                found.append(
                    f"{TASKS[one['set']].title}, {same} {one[same]:g}: {small['mean']:.4f} at {grows} "
                    f"{small[grows]:g}, {large['mean']:.4f} at {large[grows]:g} (two standard errors: {limit:.4f})"
                )
    return found


def table(rows: list[Trial]) -> str:
    """Return a Markdown table: a line for each data set and size, a column for each epsilon."""
    lines = [
        f"| data set | N | {' | '.join(f'{epsilon:g}' for epsilon in SHOWN)} |",
        f"| --- | ---: |{' ---: |' * len(SHOWN)}",
    ]
    cells = {(row["set"], row["size"], row["epsilon"]): row for row in rows}
    for name, task in TASKS.items():
        for size in task.sizes:
            found = [cells.get((name, size, epsilon)) for epsilon in SHOWN]
            if any(found):
                texts = ["" if row is None else f"{row['mean']:.4f}" for row in found]
                lines.append(f"| {task.title} | {size:,} | {' | '.join(texts)} |")
    return "\n".join(lines)


def report(folder: Path, output: Path) -> None:
    """Store all figures, and write the table and what falls into the page beside them, between its two marks."""
    rows = summary(stored(folder / "trials.jsonl"))
    found = falls(rows)
    marked = [f"- {one}" for one in found] or ["- none"]
    text = "\n".join([table(rows), "", "Falls by more than two standard errors:", "", *marked])
    print(text)
    page = output.with_suffix(".md")
    if page.exists():
        content = page.read_text(encoding="utf-8")
        before, after = content.split(MARKS[0])[0], content.split(MARKS[1])[1]
        page.write_text(f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{after}", encoding="utf-8")
    figures = {
        "command": "python benchmarks/training_rule.py FOLDER",
        "python": platform.python_version(),
        "noise": "seeded",
        "delta": DELTA,
        "falls": found,
        "rows": rows,
    }
    output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Run the trials of some data sets, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--parts", nargs="+", choices=("trials", "report"), default=["trials", "report"])
    parser.add_argument("--output", type=Path, default=Path("docs/results/training-rule.json"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if "trials" in options.parts:
        run(options.sets, options.folder)
    if "report" in options.parts:
        report(options.folder, options.output)


if __name__ == "__main__":
    main()
