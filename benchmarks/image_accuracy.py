"""Accuracy of the private head on images over epsilon and size, on the official test sets, with exact noise.

For every data set, size, epsilon and seed: a head with its defaults, and the accuracy on the whole official test set.
The size is declared and so are the classes, so every guarantee is proven. A seed numbers the draws of noise; where the
size is smaller than the training set, it also chooses the training records. Beside the head: logistic regression
without privacy and DP-SGD on the same features, and, in a process of its own, one head from the raw images with its
time and peak memory, which counts as one more draw.

    python benchmarks/image_accuracy.py FOLDER [--sets cifar-10 mnist] [--records 50000] [--epsilons 1 3] [--seeds 3]
                                        [--parts head logistic raw dpsgd report] [--validation]

Public features are computed once and kept in FOLDER. The script checks that a head trained on them has the same bits as
one trained on the images. Each result is appended to FOLDER/fits.jsonl as soon as it is there, and a later run skips
it. So several processes may share the work. The part `report` prints the tables and writes `--output`.

`--validation` holds out the last 5,000 training records and leaves the official test set alone. The data are read from
QUIETMAX_DATA. The sets of `unseen_images.py` (fashion-mnist, letters, emoji) had no part in any choice: name them in
`--sets` once everything is decided. Their packages are kept in FOLDER/unseen. The set mnist-5k needs no file and shows
that everything works.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from quietmax import DPSGD, DPSGDSettings, PrivateHead
from quietmax.data import Records, load_records
from quietmax.estimators.head.weights import default_features
from quietmax.models.features import FeatureMap
from quietmax.models.features.generic import describe_map
from unseen_images import load_images

Floats = NDArray[np.float32]
Fit = dict[str, Any]

DELTA = 1e-5
EPSILONS = (1.0, 3.0, 0.5, 2.0, 5.0, 8.0)
TRAINING = {
    "cifar-10": 50_000,
    "mnist": 60_000,
    "mnist-5k": 4_000,
    "fashion-mnist": 60_000,
    "letters": 52_639,
    "emoji": 6_017,
}
"""The number of training records."""
KNOWN = ("cifar-10", "mnist")
"""The data sets whose training records were used to choose settings and features."""
SIZES = (None, 10_000, 2_000)
"""Sizes of the training set; None for all records."""
HELD_OUT = 5_000
PENALTIES = (1.0, 10.0, 100.0)
"""Values of scikit-learn's C for logistic regression; the best one is chosen on a fifth of the training records."""
DPSGD_EPSILONS = (1.0, 3.0)
RAW_EPSILON = 3.0
PARTS = ("head", "logistic", "raw", "dpsgd", "report")


# --- Data and features ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Task:
    """Training records that a size and a seed choose from, and test records, all as public features."""

    name: str
    map_digest: str
    classes: int
    features: Floats
    labels: NDArray[np.int64]
    test_features: Floats
    test_labels: NDArray[np.int64]

    def training(self, records: int, seed: int) -> tuple[Floats, NDArray[np.int64]]:
        """Return features and labels of some or all training records."""
        if records == len(self.labels):
            return self.features, self.labels
        chosen = np.sort(np.random.default_rng(seed).permutation(len(self.labels))[:records])
        return self.features[chosen], self.labels[chosen]

    def accuracy(self, model: Any) -> float:
        """Return the accuracy of a fitted classifier on the test records."""
        return float((model.predict(self.test_features) == self.test_labels).mean())


def official(name: str, folder: Path) -> tuple[Records, Records]:
    """Return the training records and the test records of a data set."""
    if name in ("mnist-5k", *KNOWN):
        records, size = load_records(name), TRAINING[name]
        # The embedded digits are sorted by class and have no official test set.
        order = np.random.default_rng(0).permutation(5000) if name == "mnist-5k" else np.arange(len(records))
        return records.take(order[:size]), records.take(order[size:])
    images = load_images(name, folder / "unseen")
    classes = int(images.labels.max()) + 1
    records = Records(name, images.pixels, images.labels, classes, images.shape)
    train, test = (records.take(np.flatnonzero(images.is_test == part)) for part in (False, True))
    if len(train) != TRAINING[name]:
        raise SystemExit(f"{name} has {len(train)} training records, expected {TRAINING[name]}.")
    return train, test


def held_out(train: Records) -> tuple[Records, Records]:
    """Return all but the last training records, and the last."""
    size = len(train) - HELD_OUT
    return train.take(range(size)), train.take(range(size, len(train)))


def task(name: str, folder: Path, *, validation: bool) -> Task:
    """Return the records of a data set as features, and check the stored features."""
    train, test = official(name, folder)
    features, digest = stored_features(train, folder / f"{name}-train")
    check_same_head(train, features)
    if validation:
        train, test = held_out(train)
        parts = features[: len(train)], features[len(train) :]
    else:
        parts = features, stored_features(test, folder / f"{name}-test")[0]
    return Task(name, digest, train.classes, parts[0], train.labels, parts[1], test.labels)


def stored_features(records: Records, path: Path) -> tuple[Floats, str]:
    """Return the default features of all records from a file, which is made first if it is not there, and their digest.

    The file is named by the digest of the map's description. Some of its rows are computed again and compared.
    """
    feature_map = default_features(records.features.shape[1], records.image_shape)
    digest = map_digest(feature_map)
    path = path.with_name(f"{path.name}-{digest}.npy")
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}")
        shape = (len(records), feature_map.dimension(records.features.shape[1]))
        features = np.lib.format.open_memmap(partial, mode="w+", dtype=np.float32, shape=shape)
        started = time.perf_counter()
        for start in range(0, len(records), 2048):
            features[start : start + 2048] = feature_map.transform(records.features[start : start + 2048])
        features.flush()
        partial.rename(path)
        show(f"{path.name}: {len(records)} records in {time.perf_counter() - started:.0f} s")
    features = np.load(path, mmap_mode="r")
    checked = np.linspace(0, len(records) - 1, 200).astype(int)
    if not np.array_equal(feature_map.transform(records.features[checked]), features[checked]):
        raise SystemExit(f"{path} does not hold the features of these records. Delete it.")
    return features, digest


def map_digest(feature_map: FeatureMap) -> str:
    """Return the digest of a map's description."""
    description = json.dumps(describe_map(feature_map), sort_keys=True)
    return hashlib.sha256(description.encode()).hexdigest()[:12]


def check_same_head(train: Records, features: Floats) -> None:
    """Stop unless a head has the same bits whether it is given stored features or images; 400 records, seeded noise."""
    settings: dict[str, Any] = {"classes": range(train.classes), "declared_size": 400, "random_state": 0}
    labels = train.labels[:400]
    of_images = PrivateHead(1.0, DELTA, image_shape=train.image_shape, **settings).fit(
        train.features[:400], labels
    )
    of_features = PrivateHead(1.0, DELTA, features="identity", **settings).fit(features[:400], labels)
    same = of_images.plan_ == of_features.plan_ and all(
        np.array_equal(getattr(of_images, name), getattr(of_features, name)) for name in ("centre_", "coef_")
    )
    if not same:
        raise SystemExit("A head trained on stored features differs from one trained on the images.")


# --- One fit ----------------------------------------------------------------------------------------------------------


def head(data: Task, records: int, epsilon: float, seed: int) -> Fit:
    """Train a head with exact noise."""
    features, labels = data.training(records, seed)
    model = PrivateHead(
        epsilon, DELTA, features="identity", classes=range(data.classes), declared_size=records
    )
    return private(model, data, features, labels)


def dpsgd(data: Task, records: int, epsilon: float, seed: int) -> Fit:
    """Train the linear model of DP-SGD with exact noise; the features have length 1."""
    features, labels = data.training(records, seed)
    model = DPSGD(
        epsilon,
        DELTA,
        features="identity",
        settings=DPSGDSettings(length=1.0),
        classes=range(data.classes),
        declared_size=records,
    )
    return private(model, data, features, labels)


def private(model: Any, data: Task, features: Floats, labels: NDArray[np.int64]) -> Fit:
    """Fit a private model and measure it."""
    started, used = time.perf_counter(), time.process_time()
    model.fit(features, labels)
    seconds, processor = time.perf_counter() - started, time.process_time() - used
    if model.guarantee_.status != "proven":
        raise SystemExit(f"The guarantee is {model.guarantee_.status}: {model.guarantee_.because}")
    return {
        "accuracy": data.accuracy(model),
        "threads": torch.get_num_threads(),
        "seconds": round(seconds, 1),
        "processor_seconds": round(processor, 1),
        "features": features.shape[1],
        "plan": model.plan_.to_json(),
    }


def logistic(data: Task, records: int, epsilon: float, seed: int) -> Fit:  # noqa: ARG001
    """Train logistic regression without privacy; its penalty is chosen on a fifth of the training records."""
    features, labels = data.training(records, seed)
    part = 4 * records // 5

    def fitted(penalty: float, count: int) -> LogisticRegression:
        # Features of length 1 have small gradients: with a larger tolerance, the solver stops far too early.
        return LogisticRegression(C=penalty, max_iter=300, tol=1e-6).fit(features[:count], labels[:count])

    started = time.perf_counter()
    scores = {each: fitted(each, part).score(features[part:], labels[part:]) for each in PENALTIES}
    best = max(scores, key=scores.__getitem__)
    model = fitted(best, records)
    return {
        "accuracy": data.accuracy(model),
        "penalty": best,
        "held_out": {str(each): float(score) for each, score in scores.items()},
        "iterations": int(model.n_iter_[0]),
        "seconds": round(time.perf_counter() - started, 1),
    }


def raw_fit(name: str, folder: Path, *, validation: bool) -> Fit:
    """Train a head from the raw images in this process, and measure time and peak memory."""
    train, test = official(name, folder)
    if validation:
        train, test = held_out(train)
    loaded = peak_kib()
    model = PrivateHead(
        RAW_EPSILON,
        DELTA,
        image_shape=train.image_shape,
        classes=range(train.classes),
        declared_size=len(train),
    )
    load_before = os.getloadavg()[0]
    started, used = time.perf_counter(), time.process_time()
    model.fit(train.features, train.labels)
    seconds, processor = time.perf_counter() - started, time.process_time() - used
    peak = peak_kib()
    return {
        "map": map_digest(model.feature_map_),
        "seconds": round(seconds, 1),
        "processor_seconds": round(processor, 1),
        "threads": torch.get_num_threads(),
        "load_before": load_before,
        "peak_gib": round(peak / 2**20, 2),
        "peak_before_fit_gib": round(loaded / 2**20, 2),
        "plan": model.plan_.to_json(),
        "status": model.guarantee_.status,
        "accuracy": float((model.predict(test.features) == test.labels).mean()),
    }


def peak_kib() -> int:
    """Return the peak resident memory of this process."""
    return int(Path("/proc/self/status").read_text(encoding="ascii").split("VmHWM:")[1].split()[0])


# --- All fits ---------------------------------------------------------------------------------------------------------


class Store:
    """Results in a file of JSON lines, found by what they are results of."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def all(self) -> list[Fit]:
        """Return everything that is stored."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def once(self, key: Fit, make: Callable[[], Fit]) -> None:
        """Make and store a result, unless it is stored already."""
        if any(fit | key == fit for fit in self.all()):
            return
        fit = key | make()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fit) + "\n")
        show(json.dumps(fit))


def show(text: str) -> None:
    """Print progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def training_size(name: str, *, validation: bool) -> int:
    """Return the number of records that may be trained on."""
    return TRAINING[name] - (HELD_OUT if validation else 0)


def sizes(name: str, chosen: list[int] | None, *, validation: bool) -> list[int]:
    """Return the sizes of the training set, the largest first."""
    most = training_size(name, validation=validation)
    return sorted({min(size or most, most) for size in (chosen or SIZES)}, reverse=True)


def jobs(options: argparse.Namespace, part: str, name: str) -> Iterator[tuple[int, float, int]]:
    """Iterate over (records, epsilon, seed) of a part, the most important first."""
    for epsilon in {"logistic": (math.inf,), "dpsgd": DPSGD_EPSILONS}.get(part, options.epsilons):
        for records in sizes(name, options.records, validation=options.validation):
            # Without noise, the training set of all records has one result.
            once = part == "logistic" and records == training_size(name, validation=options.validation)
            for seed in range(1 if once else options.seeds):
                yield records, epsilon, seed


def run(options: argparse.Namespace, store: Store) -> None:
    """Run everything that is not stored yet."""
    kinds = {"head": head, "logistic": logistic, "dpsgd": dpsgd}
    for name in options.sets:
        data = None
        for part in options.parts:
            for records, epsilon, seed in jobs(options, part, name) if part in kinds else ():
                data = data or task(name, options.folder, validation=options.validation)
                key = {
                    "set": name,
                    "part": part,
                    "records": records,
                    "epsilon": None if math.isinf(epsilon) else epsilon,
                    "seed": seed,
                    "map": data.map_digest,
                }
                store.once(
                    key,
                    lambda d=data, p=part, r=records, e=epsilon, s=seed: kinds[p](d, r, e, s),
                )
        if "raw" in options.parts:
            command = [sys.executable, __file__, str(options.folder), "--raw-fit", name]
            command += ["--validation"] if options.validation else []
            records = training_size(name, validation=options.validation)
            store.once(
                {"set": name, "part": "raw", "records": records, "epsilon": RAW_EPSILON},
                lambda c=command: json.loads(subprocess.run(c, stdout=subprocess.PIPE, check=True).stdout),
            )


# --- The report -------------------------------------------------------------------------------------------------------


def mean_and_error(values: list[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error; None if there is one value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.mean(values), error


def summary(fits: list[Fit]) -> dict[tuple[str, str, int, float | None], dict[str, Any]]:
    """Return mean, standard error and all accuracies by data set, part, records and epsilon."""
    groups: dict[tuple[str, str, int, float | None], list[Fit]] = {}
    for fit in fits:
        part = "head" if fit["part"] == "raw" else fit["part"]
        groups.setdefault((fit["set"], part, fit["records"], fit["epsilon"]), []).append(fit)
    found = {}
    for key, group in groups.items():
        if len({fit["map"] for fit in group}) > 1:
            raise SystemExit(f"{key} has results of different feature maps.")
        accuracies = [fit["accuracy"] for fit in sorted(group, key=lambda fit: fit.get("seed", math.inf))]
        mean, error = mean_and_error(accuracies)
        seconds = statistics.median(fit["seconds"] for fit in group if "seed" in fit or len(group) == 1)
        found[key] = {"mean": mean, "standard_error": error, "accuracies": accuracies, "seconds": seconds}
    return found


def falls(found: dict[tuple[str, str, int, float | None], dict[str, Any]]) -> list[str]:
    """Return where the head's accuracy falls by more than two standard errors as epsilon or the size grows.

    A mean of one accuracy has no standard error; it counts as 0, so that every fall is named.
    """
    keys = sorted(key for key in found if key[1] == "head")
    lines = []
    for smaller in keys:
        for larger in keys:
            same_set = smaller[0] == larger[0]
            grows = (smaller[2] == larger[2] and smaller[3] < larger[3]) or (
                smaller[3] == larger[3] and smaller[2] < larger[2]
            )
            if not (same_set and grows):
                continue
            fall = found[smaller]["mean"] - found[larger]["mean"]
            error = math.hypot(*(found[key]["standard_error"] or 0.0 for key in (smaller, larger)))
            if fall > 2 * error:
                lines.append(
                    f"{smaller[0]}: from {smaller[2]:,} records at epsilon {smaller[3]:g} to {larger[2]:,} at "
                    f"{larger[3]:g}: falls by {fall:.4f}, standard error {error:.4f}"
                )
    return lines


def report(fits: list[Fit], output: Path | None, *, validation: bool) -> None:
    """Print the tables and write all figures."""
    found = summary(fits)
    for name in dict.fromkeys(key[0] for key in found):
        epsilons = sorted({key[3] for key in found if key[0] == name and key[3] is not None})
        print(
            f"\n| {name}, training | records | {' | '.join(f'{each:g}' for each in epsilons)} | without privacy |"
        )
        print(f"| --- | ---: |{' ---: |' * (len(epsilons) + 1)}")
        rows = sorted(
            {key[1:3] for key in found if key[0] == name and key[1] != "logistic"},
            key=lambda row: (row[0] != "head", -row[1]),
        )
        for part, records in rows:
            cells = [cell(found.get((name, part, records, each))) for each in epsilons]
            cells.append(cell(found.get((name, "logistic", records, None))) if part == "head" else "")
            print(f"| {part} | {records:,} | {' | '.join(cells)} |")
    raw = [fit for fit in fits if fit["part"] == "raw"]
    for fit in raw:
        print(
            f"\n{fit['set']}, {fit['records']:,} raw images: {fit['seconds']:.0f} s "
            f"({fit['processor_seconds']:.0f} s of processor time), peak {fit['peak_gib']:.2f} GiB, {fit['plan']}, "
            f"accuracy {fit['accuracy']:.4f}"
        )
    fallen = falls(found)
    print("\nFalls of more than two standard errors:", *(fallen or ["none"]), sep="\n")
    if output is None:
        return
    content = {
        "command": "python benchmarks/image_accuracy.py FOLDER" + (" --validation" if validation else ""),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "noise": "exact",
        "delta": DELTA,
        "rows": [
            dict(zip(("set", "part", "records", "epsilon"), key, strict=True)) | values
            for key, values in found.items()
        ],
        "falls": fallen,
        "raw_images": raw,
        "fits": [fit for fit in fits if fit["part"] != "raw"],
    }
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def cell(values: dict[str, Any] | None) -> str:
    """Return the mean with its standard error."""
    if values is None:
        return ""
    error = values["standard_error"]
    return f"{values['mean']:.4f}" + ("" if error is None else f" ± {error:.4f}")


def main() -> None:
    """Run what is not stored yet, and report everything that is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="Where features and results are kept.")
    parser.add_argument("--sets", nargs="+", choices=list(TRAINING), default=list(KNOWN))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--records", nargs="+", type=int)
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--seeds", type=int, default=3, help="Number of seeds.")
    parser.add_argument("--validation", action="store_true", help="Hold out training records instead.")
    parser.add_argument("--output", type=Path, help="Where the report is written as JSON.")
    parser.add_argument("--raw-fit", choices=list(TRAINING), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.validation and not set(options.sets) <= set(KNOWN):
        parser.error("--validation is for choosing; the unseen data sets have no part in it.")
    if options.raw_fit:
        print(json.dumps(raw_fit(options.raw_fit, options.folder, validation=options.validation)))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    store = Store(options.folder / ("validation.jsonl" if options.validation else "fits.jsonl"))
    run(options, store)
    if "report" in options.parts:
        report(store.all(), options.output, validation=options.validation)


if __name__ == "__main__":
    main()
