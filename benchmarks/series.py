"""A table that grows for 60 months: a series of heads beside one training, one model for ever, and retraining.

The people are rows of Adult, drawn anew for each month. The table drifts: later months have older people, and the
label follows another rule for a growing share of them. Everything has the guarantee (1, 1e-5) for all months together:

- *series*: `PrivateHead.fit` on the cohort of month 1, then `update` with each month's cohort;
- *once*: the model of month 1, never trained again;
- *retrained*: a head on everybody so far, every month, each with mu / sqrt(60);
- *everybody*: one training on all people at the end.

    python benchmarks/series.py accuracy [--months 60] [--people 3000] [--seeds 0 1 2]
    python benchmarks/series.py audit [--times 1000] [--epsilon 4]

Both store their figures in docs/results/series.json. Adult is read from QUIETMAX_DATA.

`audit` adds one person to a cohort in the middle of a series of versions, with a row that lies where nobody else's
does, and asks what all versions together tell about this person: the sum of what each one says along the person's own
gradient. It runs for a series, and for heads that are trained on everybody in each month with the same claim, which is
what "each model has mu" wrongly suggests for all of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from adult_table import adult_schema
from quietmax import PrivateHead
from quietmax.accounting.costs import mu_of
from quietmax.data import Schema
from quietmax.data.readers import adult_table
from quietmax.data.registry import dataset

RESULTS = Path(__file__).parent.parent / "docs/results/series.json"
EPSILON, DELTA = 1.0, 1e-5
FIRST = pd.Period("2022-01", "M")
MOST_CHANGED, OLDER = 0.5, 0.8
"""In the last month, the share of the labels of married people that changed, and how much likelier older people are."""


def month_name(month: int) -> str:
    """Return the cohort of a month, counted from 0."""
    return str(FIRST + month)


def growing_table(months: int, people: int, seed: int) -> tuple[list[pd.DataFrame], list[pd.DataFrame]]:
    """Return for each month new people, and as many others like them to test on; both drift."""
    rows = adult_table(dataset("adult").directory())
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(rows))
    halves = rows.iloc[order[: len(rows) // 2]], rows.iloc[order[len(rows) // 2 :]]
    found: tuple[list[pd.DataFrame], list[pd.DataFrame]] = ([], [])
    for month in range(months):
        for half, parts in zip(halves, found, strict=True):
            parts.append(_drifted(half, month, months, people, generator))
    return found


def _drifted(
    rows: pd.DataFrame, month: int, months: int, people: int, generator: np.random.Generator
) -> pd.DataFrame:
    """Draw the people of one month."""
    passed = month / max(months - 1, 1)
    age = pd.to_numeric(rows["age"]).to_numpy(float)
    weights = np.exp(OLDER * passed * (age - age.mean()) / age.std())
    drawn = rows.iloc[generator.choice(len(rows), people, p=weights / weights.sum())].reset_index(drop=True)
    married = drawn["marital-status"].str.startswith("Married").to_numpy()
    changed = married & (generator.random(people) < MOST_CHANGED * passed)
    classes = adult_schema().classes
    label = np.where(changed, classes[1], drawn[adult_schema().label])
    names = [f"{month}-{number}" for number in range(people)]
    start = FIRST + month
    return drawn.assign(**{adult_schema().label: label, "person": names, "first_visit": f"{start}-15"})


def series_schema(months: int) -> Schema:
    """Return the schema of Adult, with the person and the cohort of each row."""
    end = (FIRST + months - 1).end_time.date().isoformat()
    known = adult_schema()
    return replace(
        known,
        person="person",
        dates={"first_visit": (f"{FIRST}-01", end)},
        ignore=(*known.ignore, "first_visit"),
        cohort="first_visit:month",
    )


def accuracy(head: PrivateHead, rows: pd.DataFrame) -> float:
    """Return the share of people whose class is predicted."""
    return float((head.predict(rows) == rows[adult_schema().label].to_numpy()).mean())


def one_seed(months: int, people: int, seed: int, every: int) -> dict[str, Any]:
    """Train all of them; return accuracies on people of the same month who are in no training."""
    trained, tested = growing_table(months, people, seed)
    schema, mu = series_schema(months), mu_of(EPSILON, DELTA)
    known = replace(schema, cohort=None)
    series = PrivateHead(EPSILON, DELTA, schema=schema, random_state=1000 * seed)
    found: dict[str, Any] = {"month": [], "series": [], "once": [], "retrained": []}
    started, seconds = time.perf_counter(), 0.0
    for month in range(months):
        started = time.perf_counter()
        table = pd.concat(trained[max(0, month - 1) : month + 1])  # the month before is there and left out
        if month:
            series.update(table, cohort=month_name(month))
        else:
            series.fit(table, cohort=month_name(month))
            once = PrivateHead(EPSILON, DELTA, schema=known, random_state=1000 * seed + 500).fit(table)
        seconds += time.perf_counter() - started
        if month % every and month != months - 1:
            continue
        own = PrivateHead(mu=mu / math.sqrt(months), schema=known, random_state=1000 * seed + 600 + month)
        own.fit(pd.concat(trained[: month + 1]))
        found["month"].append(month + 1)
        for name, head in (("series", series), ("once", once), ("retrained", own)):
            found[name].append(accuracy(head, tested[month]))
    everybody = PrivateHead(EPSILON, DELTA, schema=known, random_state=1000 * seed + 700)
    everybody.fit(pd.concat(trained))
    assert series.guarantee_.mu is not None and series.guarantee_.mu <= mu * 1.001
    everyone = pd.concat(tested)
    last = {"series": series, "once": once, "retrained": own, "everybody": everybody}
    return found | {
        "everybody": accuracy(everybody, tested[-1]),
        "all_months": {name: accuracy(head, everyone) for name, head in last.items()},
        "mu_of_series": series.guarantee_.mu,
        "seconds_per_update": seconds / months,
    }
