"""Accuracy of the private head on tables of people, from the CSV file to the holdout, beside models without privacy.

Adult as a user's own table (adult.csv with a header, all 48,842 rows, a public schema) and the survey 'fair'. Each seed
is the seed of the holdout and of the noise. For every seed: the head with its defaults, the accuracy that may be
published, with its interval, and, without privacy, logistic regression and gradient boosting. Prints a Markdown table
and stores all figures.

    python benchmarks/table_accuracy.py [--seeds 0 1 2 3 4] [--tables adult fair]
                                        [--output docs/results/table-accuracy.json]

Adult is read from QUIETMAX_DATA.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression

from adult_table import write_adult
from quietmax import PrivateHead
from quietmax.data import Split, load
from tables import figures

EPSILON, DELTA, HOLDOUT = 1.0, 1e-5, 0.2
COLUMNS = {
    "private": "private head",
    "published": "published",
    "auc": "AUC",
    "log_loss": "log-loss",
    "ece": "ECE",
    "logistic_columns": "logistic regression",
    "boosting": "gradient boosting",
    "majority": "majority",
}


@contextmanager
def table_source(name: str) -> Iterator[str]:
    """Give what `load` takes: the path of adult.csv beside its schema, or the name of a registered table."""
    if name != "adult":
        yield name
        return
    with tempfile.TemporaryDirectory() as folder:
        yield str(write_adult(Path(folder)))


def one_seed(split: Split, seed: int) -> dict[str, Any]:
    """Train all models on everybody who is not held out, and measure them on the holdout."""
    train, test = split.train, split.test
    started = time.perf_counter()
    head = PrivateHead(EPSILON, DELTA, random_state=seed).fit(train)
    seconds = time.perf_counter() - started
    answers = head.predict(test.features)
    truth = head.classes_[test.labels]
    published = head.evaluate(test).accuracy
    probabilities = head.predict_proba(test.features)
    linear = LogisticRegression(max_iter=1000)
    boosting = HistGradientBoostingClassifier(random_state=seed).fit(train.features, train.labels)
    return {
        "seed": seed,
        "train_rows": len(train),
        "holdout_rows": len(test),
        "private": float((answers == truth).mean()),
        "published": published.value,
        "published_interval": [published.low, published.high],
        "logistic_columns": float(linear.fit(train.features, train.labels).score(test.features, test.labels)),
        "boosting": float(boosting.score(test.features, test.labels)),
        "majority": float(max((test.labels == label).mean() for label in range(test.classes))),
        **{name: value for name, value in figures(probabilities, test.labels).items() if name != "accuracy"},
        "plan": head.plan_.to_json(),
        "mu": head.guarantee_.mu,
        "seconds": round(seconds, 1),
    }


def line(table: str, seed: str, figures: dict[str, Any]) -> str:
    """Return one line of the printed table."""
    return f"| {table} | {seed} | {' | '.join(f'{figures[key]:.4f}' for key in COLUMNS)} |"


def main() -> None:
    """Run all seeds of all tables, print the means and store every figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--tables", nargs="+", choices=("adult", "fair"), default=["adult", "fair"])
    parser.add_argument("--output", type=Path, default=Path("docs/results/table-accuracy.json"))
    options = parser.parse_args()
    tables: dict[str, Any] = {}
    print(f"| table | seed | {' | '.join(COLUMNS.values())} |\n| --- | --- |{' ---: |' * len(COLUMNS)}")
    for name in options.tables:
        runs = []
        with table_source(name) as source:
            for seed in options.seeds:
                runs.append(one_seed(load(source, holdout=HOLDOUT, seed=seed), seed))
                print(line(name, str(seed), runs[-1]), flush=True)
        means = {key: statistics.mean(run[key] for run in runs) for key in COLUMNS}
        spread = statistics.stdev([run["private"] for run in runs]) if len(runs) > 1 else 0.0
        tables[name] = {"mean": means, "standard_deviation": spread, "runs": runs}
        print(line(name, "mean", means), flush=True)
    content = {
        "command": f"python benchmarks/table_accuracy.py --seeds {' '.join(map(str, options.seeds))}",
        "python": platform.python_version(),
        "noise": "seeded",
        "settings": {"epsilon": EPSILON, "delta": DELTA, "holdout": HOLDOUT},
        "tables": tables,
    }
    options.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
