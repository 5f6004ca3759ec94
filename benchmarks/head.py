"""Accuracy and time of the private head beside other linear classifiers, as a Markdown table on stdout.

The same records and, where it says so, the same public features for all: the private head with its defaults,
ordinary logistic regression (no privacy), and diffprivlib's LogisticRegression at the same epsilon (pure
differential privacy, its own guarantee). Means and standard deviations over random splits; times are those of the
processor in `fit`, features included: other programs on the machine disturb them least.

    python benchmarks/head.py [--sets mnist adult location cifar-10] [--splits 3] [--official] [--sizes]
    python benchmarks/head.py --large [--rounds 5] [--json docs/results/large-table.json]

By size: synthetic tables of 10^4, 10^5 and 10^6 rows and 50 numeric columns, as arrays and as a pandas frame with a
schema (public bounds, missing values allowed), at (1, 1e-5). The head, logistic regression and diffprivlib at epsilon 1
are fitted in turns. diffprivlib gets rows that are already clipped to length 1. Only `fit` is timed. `--sizes` runs
this alone.

`--large` compares the head with logistic regression on the table of 10^6 rows, held in float64: alternating fits, test
accuracy, and the peak memory of a process of its own that makes the table and fits the head once. Of the second table,
on which logistic regression needs many steps, there is one fit each. The first table is also a pandas frame with a
schema: public bounds of all columns, once with and once without "no missing values".

The real data are read from QUIETMAX_DATA. `--official` adds all 60,000 MNIST training records and the official
test set. diffprivlib gets an environment of its own (see `peers.py`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

import quietmax.data
from peers import peer_python
from quietmax.data import Records, Schema
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.head.weights import default_features
from ratios import report

RECORDS = {"mnist": 10_000, "adult": 10_000, "location": 1_200, "cifar-10": 10_000, "mnist-5k": 500}
OPTIONS = {"adult": {"encoding": "one-hot"}}
EPSILONS = {
    "mnist": (1.0, 4.38),
    "adult": (1.0,),
    "location": (1.0, 10.0),
    "cifar-10": (1.0, 3.0),
    "mnist-5k": (1.0,),
}
DELTA = 1e-5

DIFFPRIVLIB = """
import sys, time, warnings
import numpy as np
from diffprivlib.models import LogisticRegression
warnings.simplefilter("ignore")
data = np.load(sys.argv[1])
train, labels = data["train"], data["labels"]
model = LogisticRegression(epsilon=float(sys.argv[2]), data_norm=1.0, max_iter=100)
started = time.process_time()
model.fit(train, labels)
seconds = time.process_time() - started
print(model.score(data["test"], data["test_labels"]), seconds)
"""


@dataclass(frozen=True)
class Measured:
    accuracy: float
    seconds: float


def head(train: Records, test: Records, **settings: object) -> Measured:
    started = time.process_time()
    fitted = PrivateHead(
        delta=DELTA,
        image_shape=train.image_shape,
        classes=range(train.classes),
        declared_size=len(train),
        **settings,  # type: ignore[arg-type]
    ).fit(train.features, train.labels)
    seconds = time.process_time() - started
    assert fitted.guarantee_.status == "proven"
    return Measured(fitted.score(test.features, test.labels), seconds)


def public_features(train: Records, test: Records) -> tuple[NDArray[np.float32], NDArray[np.float32], float]:
    """The features the head sees by default, of length 1, and the time to compute the training part."""
    feature_map = default_features(train.features.shape[1], train.image_shape)
    started = time.process_time()
    features = feature_map.transform(train.features)
    return features, feature_map.transform(test.features), time.process_time() - started


def ordinary(
    train: Records, test: Records, features: tuple[NDArray[np.float32], NDArray[np.float32], float]
) -> Measured:
    started = time.process_time()
    model = LogisticRegression(C=10.0, max_iter=200).fit(features[0], train.labels)
    seconds = features[2] + time.process_time() - started
    return Measured(float(model.score(features[1], test.labels)), seconds)


def diffprivlib(
    train: Records, test: Records, features: tuple[NDArray[np.float32], NDArray[np.float32]], epsilon: float
) -> Measured | str:
    """diffprivlib's classifier in its own interpreter, on records of length at most 1; or why it did not run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.npz"
        save_clipped(path, features[0], train.labels, features[1], test.labels)
        return fit_diffprivlib(path, epsilon)


def save_clipped(
    path: Path, train: NDArray[Any], labels: NDArray[Any], test: NDArray[Any], test_labels: NDArray[Any]
) -> None:
    """Save what `fit_diffprivlib` reads: rows of length at most 1, in float64."""
    clipped = (
        (part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1.0)).astype(np.float64)
        for part in (train, test)
    )
    np.savez(
        path, **dict(zip(("train", "test"), clipped, strict=True)), labels=labels, test_labels=test_labels
    )


def fit_diffprivlib(path: Path, epsilon: float) -> Measured | str:
    """Fit and test diffprivlib's classifier in its own interpreter; or say why it did not run."""
    run = subprocess.run(
        [str(peer_python("diffprivlib")), "-c", DIFFPRIVLIB, str(path), str(epsilon)],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        return run.stderr.strip().splitlines()[-1]
    accuracy, seconds = (float(word) for word in run.stdout.split())
    return Measured(accuracy, seconds)


TOP = "| method | (epsilon, delta) | accuracy | fit, s | its time : ours |\n| --- | --- | --- | --- | --- |"


def line(name: str, guarantee: str, values: list[Measured | str], ours: list[Measured | str]) -> str:
    """A row of the table; `ours` are the fits of the head, in the same order, that the times are compared with."""
    pairs = [
        (value, mine)
        for value, mine in zip(values, ours, strict=True)
        if isinstance(value, Measured) and isinstance(mine, Measured)
    ]
    if not pairs:
        return f"| {name} | {guarantee} | not run: {values[0]} | | |"
    accuracies = [value.accuracy for value, _ in pairs]
    spread = f" ± {statistics.stdev(accuracies):.4f}" if len(accuracies) > 1 else ""
    seconds = statistics.median(value.seconds for value, _ in pairs)
    ratios = [value.seconds / mine.seconds for value, mine in pairs]
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"| {name} | {guarantee} | {statistics.mean(accuracies):.4f}{spread} | {seconds:.1f} | {ratio} |"


def compare(name: str, splits: int, *, with_diffprivlib: bool) -> None:
    results: dict[tuple[str, str], list[Measured | str]] = {}
    feature_seconds = []

    def note(method: str, guarantee: str, value: Measured | str) -> None:
        results.setdefault((method, guarantee), []).append(value)
        print(f"{name}: {method}, {guarantee}: {value}", file=sys.stderr)

    for seed in range(splits):
        split = quietmax.data.load(name, records=RECORDS[name], seed=seed, **OPTIONS.get(name, {}))  # type: ignore[arg-type]
        train, test = split.train, split.test
        features = public_features(train, test)
        feature_seconds.append(features[2])
        note("logistic regression on the same features", "none", ordinary(train, test, features))
        for epsilon in EPSILONS[name]:
            private = f"({epsilon:g}, {DELTA:g})"
            note("head, gradient method", private, head(train, test, epsilon=epsilon))
            note("head, output method", private, head(train, test, epsilon=epsilon, method="output"))
            if not with_diffprivlib:
                continue
            pure = f"({epsilon:g}, 0)"
            raw = (train.features, test.features)
            note("diffprivlib, raw records", pure, diffprivlib(train, test, raw, epsilon))
            note("diffprivlib, same features", pure, diffprivlib(train, test, features[:2], epsilon))
    mean_seconds = statistics.mean(feature_seconds)
    print(f"\n{name}: {RECORDS[name]} training records, {splits} splits; features in {mean_seconds:.1f} s\n")
    print(TOP)
    ours = results["head, gradient method", f"({EPSILONS[name][0]:g}, {DELTA:g})"]
    for (method, guarantee), values in results.items():
        print(line(method, guarantee, values, ours))


def official() -> None:
    records = quietmax.data.load_records("mnist")
    train, test = records.take(range(60_000)), records.take(range(60_000, 70_000))
    print("\nmnist: all 60,000 training records, official test set\n")
    print(TOP)
    for epsilon in (1.0, 3.0):
        fits: list[Measured | str] = [head(train, test, epsilon=epsilon)]
        print(line("head, gradient method", f"({epsilon:g}, {DELTA:g})", fits, fits))


LARGE_ROWS, LARGE_COLUMNS, LARGE_TEST = 1_000_000, 50, 200_000
NAMES = tuple(f"column {number}" for number in range(LARGE_COLUMNS))


def large_table(rows: int, seed: int, *, uneven: bool) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Numeric columns and labels that follow a logistic model. Uneven: correlated columns of different spread."""
    public = np.random.default_rng(2026)
    weights = public.normal(size=LARGE_COLUMNS)
    mixing = public.normal(size=(LARGE_COLUMNS, LARGE_COLUMNS))
    mixing *= 0.3 * np.exp(public.normal(size=LARGE_COLUMNS))
    generator = np.random.default_rng(seed)
    table = np.empty((rows, LARGE_COLUMNS))
    labels = np.empty(rows, dtype=np.int64)
    for start in range(0, rows, 10_000):
        part = table[start : start + 10_000]
        generator.standard_normal(out=part)
        logits = part @ weights * (2 / np.sqrt(LARGE_COLUMNS))
        if uneven:
            part[:] = 1 / (1 + np.exp(-(part @ mixing)))
            logits = 4 * (part - 0.5) @ weights
        labels[start : start + 10_000] = generator.random(len(part)) < 1 / (1 + np.exp(-logits))
    return table, labels


SOURCES = ("arrays", "frame, complete columns", "frame")
"""How the head gets a large table: arrays; a frame with a schema that excludes missing values; one that allows them."""


def large_input(table: NDArray[np.float64], labels: NDArray[np.int64], source: str) -> Any:
    """What `fit` takes; a frame shares the memory of the table."""
    if source == "arrays":
        return table, labels
    return pd.DataFrame(table, columns=NAMES, copy=False).assign(label=labels), None


def large_head(rows: int, source: str) -> PrivateHead:
    if source == "arrays":
        return PrivateHead(1.0, DELTA, classes=(0, 1), declared_size=rows)
    schema = Schema(
        label="label",
        classes=("0", "1"),
        bounds=dict.fromkeys(NAMES, (-5.0, 5.0)),
        complete=NAMES if source == "frame, complete columns" else (),
    )
    return PrivateHead(1.0, DELTA, declared_size=rows, schema=schema)


SIZES = {10_000: 7, 100_000: 7, LARGE_ROWS: 5}
"""Rows of the tables by size, and how many times each method is fitted."""


def by_size(sizes: dict[int, int], *, with_diffprivlib: bool) -> None:
    """The head from arrays and from a frame beside logistic regression and diffprivlib, fitted in turns."""
    lines = []
    large_head(1000, "arrays").fit(
        *large_table(1000, 2, uneven=False)
    )  # Imports and thread pools are not timed.
    for rows, rounds in sizes.items():
        table, labels = large_table(rows, 0, uneven=False)
        test, test_labels = large_table(min(LARGE_TEST, rows), 1, uneven=False)

        def private(source: str, table=table, labels=labels, test=test, truth=test_labels) -> Measured:
            records, given = large_input(table, labels, source)
            model = large_head(len(table), source)
            started = time.process_time()
            model.fit(records, given)
            seconds = time.process_time() - started
            assert model.guarantee_.status == "proven"
            answers = model.predict(large_input(test, truth, source)[0]).astype(np.int64)
            return Measured(float((answers == truth).mean()), seconds)

        def plain(table=table, labels=labels, test=test, truth=test_labels) -> Measured:
            started = time.process_time()
            model = LogisticRegression(max_iter=300).fit(table, labels)
            seconds = time.process_time() - started
            return Measured(float(model.score(test, truth)), seconds)

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "data.npz"
            methods: dict[str, Callable[[], Measured | str]] = {
                "arrays": partial(private, "arrays"),
                "frame": partial(private, "frame"),
                "scikit-learn": plain,
            }
            if with_diffprivlib:
                save_clipped(path, table, labels, test, test_labels)
                methods["diffprivlib"] = partial(fit_diffprivlib, path, 1.0)
            found: dict[str, list[Measured]] = {name: [] for name in methods}
            for _ in range(rounds):
                for name, fit in methods.items():
                    measured = fit()
                    if isinstance(measured, str):
                        sys.exit(f"{name} failed: {measured}")
                    found[name].append(measured)
                    print(f"{rows:,} rows: {name}: {measured}", file=sys.stderr)
        seconds = {name: [each.seconds for each in values] for name, values in found.items()}
        for source in ("arrays", "frame"):
            for peer in list(methods)[2:]:
                case = f"{rows:,} rows, {source}"
                report("head", case, seconds[source], "s", peer=peer, theirs=seconds[peer])
        accuracies = (statistics.mean(each.accuracy for each in values) for values in found.values())
        lines.append(f"| {rows:,} | {rounds} | {' | '.join(f'{each:.4f}' for each in accuracies)} |")
    named = ("head, arrays", "head, frame", "logistic regression, no privacy", "diffprivlib, epsilon 1")
    shown = named[: len(methods)]
    print(
        "\nBy size, 50 numeric columns, (1, 1e-05), processor time: mean accuracy on other rows of the same table\n"
    )
    print(f"| rows | runs | {' | '.join(shown)} |\n| ---: | ---: |{' ---: |' * len(shown)}")
    print("\n".join(lines))


def peak_kib() -> int:
    """The peak resident memory of this process; unlike `getrusage`, without that of the process it was forked from."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0])


def large_memory(rows: int, source: str) -> None:
    """Print the peak memory before there is a table, with it, and after a fit, in KiB."""
    before = peak_kib()
    records, labels = large_input(*large_table(rows, 0, uneven=False), source)
    made = peak_kib()
    large_head(rows, source).fit(records, labels)
    print(json.dumps({"libraries": before, "with_table": made, "after_fit": peak_kib()}))


def large_case(rows: int, rounds: int, source: str, *, uneven: bool) -> dict[str, Any]:
    """Alternating fits of the head and of logistic regression."""
    table, labels = large_table(rows, 0, uneven=uneven)
    test, test_labels = large_table(min(LARGE_TEST, rows), 1, uneven=uneven)
    records, given = large_input(table, labels, source)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):
        started = time.process_time()
        private = large_head(rows, source).fit(records, given)
        ours.append(time.process_time() - started)
        started = time.process_time()
        plain = LogisticRegression(max_iter=300).fit(table, labels)
        theirs.append(time.process_time() - started)
    assert private.guarantee_.status == "proven"
    columns = "uneven, correlated columns" if uneven else "independent columns"
    report("head", f"{rows:,} x 50, {columns}, {source}", ours, "s", peer="LogisticRegression", theirs=theirs)
    answers = private.predict(large_input(test, test_labels, source)[0])
    return {
        "head_seconds": ours,
        "logistic_regression_seconds": theirs,
        "head_over_logistic_regression": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        "head_accuracy": float((answers.astype(np.int64) == test_labels).mean()),
        "logistic_regression_accuracy": float(plain.score(test, test_labels)),
        "features": private.feature_map_.kind,
        "steps": private.plan_.steps,
        "mu": private.guarantee_.mu,
    }


def large_peak(rows: int, source: str) -> dict[str, float]:
    """The peak memory of a process that makes the table and fits the head once."""
    run = subprocess.run(
        [sys.executable, __file__, "--large-memory", str(rows), source],
        capture_output=True,
        text=True,
        check=True,
    )
    memory = {f"{name}_kib": value for name, value in json.loads(run.stdout).items()}
    table_kib = rows * LARGE_COLUMNS * 8 / 1024
    return memory | {
        "table_kib": table_kib,
        "peak_over_table": memory["after_fit_kib"] / table_kib,
        "peak_without_libraries_over_table": (memory["after_fit_kib"] - memory["libraries_kib"]) / table_kib,
    }


def large(rows: int, rounds: int, output: str | None) -> None:
    results: dict[str, Any] = {
        "rows": rows,
        "columns": LARGE_COLUMNS,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }
    for source in SOURCES:
        results[source] = large_case(rows, rounds, source, uneven=False)
        results[source]["memory"] = large_peak(rows, source)
        print({name: value for name, value in results[source].items() if not name.endswith("seconds")})
        _store(results, output)
    results["arrays, uneven columns"] = large_case(rows, 1, "arrays", uneven=True)
    print(results["arrays, uneven columns"])
    _store(results, output)


def _store(results: dict[str, Any], output: str | None) -> None:
    if output is not None:
        Path(output).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="+", default=["adult", "location", "mnist"], choices=list(RECORDS))
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--official", action="store_true")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="One split of 500 embedded digits and a table of 2,000 rows, without diffprivlib.",
    )
    parser.add_argument("--sizes", action="store_true", help="Only the comparison by size.")
    parser.add_argument("--large", action="store_true", help="Only a table of 10^6 rows and 50 columns.")
    parser.add_argument("--rounds", type=int, default=5, help="Alternating fits of --large.")
    parser.add_argument("--json", metavar="FILE", help="Where to store the results of --large.")
    parser.add_argument(
        "--large-memory", nargs=2, metavar=("ROWS", "SOURCE"), help="Only the peak memory of one fit."
    )
    arguments = parser.parse_args()
    if arguments.large_memory is not None:
        large_memory(int(arguments.large_memory[0]), arguments.large_memory[1])
        return
    if arguments.large:
        large(20_000 if arguments.quick else LARGE_ROWS, arguments.rounds, arguments.json)
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    sets = [] if arguments.sizes else ["mnist-5k"] if arguments.quick else arguments.sets
    for name in sets:
        compare(name, 1 if arguments.quick else arguments.splits, with_diffprivlib=not arguments.quick)
    by_size({2000: 1} if arguments.quick else SIZES, with_diffprivlib=not arguments.quick)
    if arguments.official:
        official()


if __name__ == "__main__":
    main()
