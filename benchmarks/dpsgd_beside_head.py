"""Accuracy of DP-SGD beside the private head: the same records, features and (epsilon, delta), on official test sets.

Both estimators have their defaults and a declared size. Heads have exact noise, DP-SGD has seeded noise: the same
distribution, several times faster. A seed numbers the draws of noise; where fewer records train than there are, it also
chooses them, the same for both. So differences are taken seed by seed.

    python benchmarks/dpsgd_beside_head.py FOLDER [--sets cifar-10 mnist fashion-mnist adult] [--records 10000]
                                           [--seeds 3] [--parts fits report]
                                           [--output docs/results/dpsgd-beside-head.json]

Features and results of images are kept in FOLDER as those of `image_accuracy.py` are, so heads that it has trained
there are not trained again. Each result is stored at once, and a later run skips it. The data are read from
QUIETMAX_DATA. mnist-5k needs no file and shows that everything works.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import image_accuracy
from adult_table import write_adult
from image_accuracy import DELTA, Fit, Store, Task, mean_and_error, task
from quietmax import DPSGD, DPSGDSettings, PrivateHead
from quietmax.data import Records, load_records

EPSILONS = (1.0, 3.0)
MARKS = ("<!-- figures -->", "<!-- end of figures -->")
DOCS = Path(__file__).parents[1] / "docs"
OUTPUT = DOCS / "results" / "dpsgd-beside-head.json"
TITLES = {
    "cifar-10": "CIFAR-10",
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "adult": "Adult",
    "mnist-5k": "MNIST, 5,000 digits",
}
ADULT_TRAINING = 32_561
SIZES = {
    "cifar-10": (10_000, 50_000),
    "mnist": (10_000, 60_000),
    "fashion-mnist": (10_000, 60_000),
    "adult": (2_000, ADULT_TRAINING),
    "mnist-5k": (500,),
}
PARTS = ("head", "dpsgd")
EXTRA: dict[str, Fit] = {"head": {}, "dpsgd": {"noise": "seeded"}}
"""What a stored result has beside what `image_accuracy.py` stores, whose DP-SGD has exact noise."""


# --- Fits -------------------------------------------------------------------------------------------------------------


def adult() -> Records:
    """Return Adult as a table with its schema: first the rows of adult.data, then those of adult.test."""
    with tempfile.TemporaryDirectory() as folder:
        return load_records(str(write_adult(Path(folder))))


def table_fit(records: Records, part: str, size: int, epsilon: float, seed: int) -> Fit:
    """Train an estimator on rows of adult.data, and measure it on adult.test."""
    rows = np.arange(ADULT_TRAINING)
    if size < ADULT_TRAINING:
        rows = np.sort(np.random.default_rng(seed).permutation(ADULT_TRAINING)[:size])
    test = records.take(range(ADULT_TRAINING, len(records)))
    model: Any = PrivateHead(epsilon, DELTA, declared_size=size)
    if part == "dpsgd":
        model = DPSGD(epsilon, DELTA, declared_size=size, random_state=seed)
    fit = fitted(model, records.take(rows))
    return fit | {"accuracy": float((model.predict(test.features) == model.classes_[test.labels]).mean())}


def image_fit(data: Task, part: str, size: int, epsilon: float, seed: int) -> Fit:
    """Train an estimator on stored features of images, which have length 1."""
    if part == "head":
        return image_accuracy.head(data, size, epsilon, seed)
    model = DPSGD(
        epsilon,
        DELTA,
        features="identity",
        settings=DPSGDSettings(length=1.0),
        classes=range(data.classes),
        declared_size=size,
        random_state=seed,
    )
    return fitted(model, *data.training(size, seed)) | {"accuracy": data.accuracy(model)}


def fitted(model: Any, *records: Any) -> Fit:
    """Fit a private model and return what there is to know of it, except its accuracy."""
    started = time.process_time()
    model.fit(*records)
    return {
        "processor_seconds": round(time.process_time() - started, 1),
        "features": model.guarantee_.parameters["dimension"],
        "plan": model.plan_.to_json(),
    }


def fits_of(name: str, folder: Path) -> tuple[str | None, Callable[..., Fit]]:
    """Return the digest of a data set's feature map and a function that trains one estimator on the set."""
    if name == "adult":
        return None, partial(table_fit, adult())
    data = task(name, folder, validation=False)
    return data.map_digest, partial(image_fit, data)


def run(options: argparse.Namespace, store: Store) -> None:
    """Run everything that is not stored yet."""
    for name in options.sets:
        digest, train = fits_of(name, options.folder)
        for size in options.records or SIZES[name]:
            for seed in range(options.seeds):
                for epsilon in EPSILONS:
                    for part in PARTS:
                        key = {"set": name, "part": part, "records": size, "epsilon": epsilon, "seed": seed}
                        key |= {"map": digest} | EXTRA[part]
                        store.once(key, partial(train, part, size, epsilon, seed))


# --- Report -----------------------------------------------------------------------------------------------------------


def summary(fits: list[Fit]) -> list[dict[str, Any]]:
    """Return both means and the mean difference, over the seeds that both estimators have."""
    found = {
        (fit["set"], fit["records"], fit["epsilon"], fit["part"], fit["seed"]): fit
        for fit in fits
        if fit["part"] in PARTS and fit | EXTRA[fit["part"]] == fit
    }
    rows = []
    for name, sizes in SIZES.items():
        for size in sizes:
            for epsilon in EPSILONS:
                seeds = sorted(
                    seed
                    for *key, part, seed in found
                    if key == [name, size, epsilon]
                    and part == "dpsgd"
                    and (name, size, epsilon, "head", seed) in found
                )
                if seeds:
                    pairs = {
                        part: [found[name, size, epsilon, part, seed] for seed in seeds] for part in PARTS
                    }
                    rows.append({"set": name, "records": size, "epsilon": epsilon, **compared(pairs)})
    return rows


def compared(pairs: dict[str, list[Fit]]) -> dict[str, Any]:
    """Return what is known of the fits of both estimators that belong together."""
    if len({fit.get("map") for fits in pairs.values() for fit in fits}) != 1:
        raise SystemExit("The estimators were trained on different features.")
    row: dict[str, Any] = {"draws": len(pairs["head"])}
    accuracies = {part: [fit["accuracy"] for fit in fits] for part, fits in pairs.items()}
    lost = [own - other for own, other in zip(accuracies["head"], accuracies["dpsgd"], strict=True)]
    for name, values in (*accuracies.items(), ("head_minus_dpsgd", lost)):
        mean, error = mean_and_error(values)
        row[name] = {"mean": mean, "standard_error": error, "values": values}
    for part, fits in pairs.items():
        row[part]["processor_seconds"] = statistics.median(fit["processor_seconds"] for fit in fits)
        row[part]["plan"] = fits[0]["plan"]
    return row


def cell(values: dict[str, Any], sign: str = "") -> str:
    """Return a mean with its standard error."""
    error = values["standard_error"]
    return f"{values['mean']:{sign}.4f}" + ("" if error is None else f" ± {error:.4f}")


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table with a line for each data set, size and epsilon."""
    lines = [
        "| data set | records | epsilon | DP-SGD | head | head minus DP-SGD | draws |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        lines.append(
            f"| {TITLES[row['set']]} | {row['records']:,} | {row['epsilon']:g} | {row['dpsgd']['mean']:.4f} | "
            f"{row['head']['mean']:.4f} | {cell(row['head_minus_dpsgd'], '+')} | {row['draws']} |"
        )
    return "\n".join(lines)


def report(fits: list[Fit], output: Path) -> None:
    """Store all figures, and write the table into the page on DP-SGD, between its two marks."""
    rows = summary(fits)
    print(table(rows))
    page = DOCS / "dpsgd.md"
    if output == OUTPUT:
        content = page.read_text(encoding="utf-8")
        before, after = content.split(MARKS[0])[0], content.split(MARKS[1])[1]
        page.write_text(f"{before}{MARKS[0]}\n\n{table(rows)}\n\n{MARKS[1]}{after}", encoding="utf-8")
    figures = {
        "command": "python benchmarks/dpsgd_beside_head.py FOLDER",
        "python": platform.python_version(),
        "noise": {"head": "exact", "dpsgd": "seeded"},
        "delta": DELTA,
        "rows": rows,
    }
    output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Run what is not stored yet, and report everything that is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="Where features and results are kept.")
    parser.add_argument("--sets", nargs="+", choices=tuple(SIZES), default=list(SIZES)[:-1])
    parser.add_argument("--records", nargs="+", type=int)
    parser.add_argument("--seeds", type=int, default=3, help="Number of seeds.")
    parser.add_argument("--parts", nargs="+", choices=("fits", "report"), default=["fits", "report"])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    store = Store(options.folder / "fits.jsonl")
    if "fits" in options.parts:
        run(options, store)
    if "report" in options.parts:
        report(store.all(), options.output)


if __name__ == "__main__":
    main()
