"""A table that grows for 60 months: a series of heads beside one training, one model for ever, and retraining.

The people are rows of Adult, drawn anew for each month. The table drifts: later months have older people, and the
label follows another rule for a growing share of them. Everything has the guarantee (1, 1e-5) for all months together:

- *series*: `PrivateHead.fit` on the cohort of month 1, then `update` with each month's cohort;
- *once*: the model of month 1, never trained again;
- *retrained*: a head on everybody so far, every month, each with mu / sqrt(60);
- *everybody*: one training on all people at the end.

    python benchmarks/series.py accuracy [--months 60] [--people 3000] [--seeds 0 1 2]
    python benchmarks/series.py audit [--times 500] [--epsilon 4]

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
from quietmax import HeadSettings, PrivateHead
from quietmax.accounting.costs import mu_of
from quietmax.audit import AuditReport, audit_training
from quietmax.data import Records, Schema
from quietmax.data.readers import adult_table
from quietmax.data.registry import dataset
from quietmax.estimators.serialization import PrivateModel

RESULTS = Path(__file__).parent.parent / "docs/results/series.json"
EPSILON, DELTA = 1.0, 1e-5
FIRST = pd.Period("2022-01", "M")
MOST_CHANGED, OLDER = 0.5, 0.8
"""In the last month, the share of the labels of married people that changed, and how much likelier older people are."""


def month_name(month: int) -> str:
    """Return the cohort of a month, counted from 0."""
    return str(FIRST + month)


def growing_table(
    months: int, people: int, seed: int, *, drift: bool = True
) -> tuple[list[pd.DataFrame], list[pd.DataFrame]]:
    """Return for each month new people, and as many others like them to test on; both drift."""
    rows = adult_table(dataset("adult").directory())
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(rows))
    halves = rows.iloc[order[: len(rows) // 2]], rows.iloc[order[len(rows) // 2 :]]
    found: tuple[list[pd.DataFrame], list[pd.DataFrame]] = ([], [])
    for month in range(months):
        for half, parts in zip(halves, found, strict=True):
            passed = drift * month / max(months - 1, 1)
            parts.append(_month(half, month, passed, people, generator))
    return found


def _month(
    rows: pd.DataFrame, month: int, passed: float, people: int, generator: np.random.Generator
) -> pd.DataFrame:
    """Draw the people of one month, when a share of the drift has passed."""
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


def one_seed(months: int, people: int, seed: int, every: int, *, drift: bool) -> dict[str, Any]:
    """Train all of them; return accuracies on people of the same month who are in no training."""
    trained, tested = growing_table(months, people, seed, drift=drift)
    schema, mu = series_schema(months), mu_of(EPSILON, DELTA)
    known = replace(schema, cohort=None)
    series = PrivateHead(EPSILON, DELTA, schema=schema, random_state=1000 * seed)
    found: dict[str, Any] = {"month": [], "series": [], "once": [], "retrained": []}
    seconds = 0.0
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
    assert series.guarantee_.mu is not None
    assert series.guarantee_.mu <= mu * 1.001
    everyone = pd.concat(tested)
    last = {"series": series, "once": once, "retrained": own, "everybody": everybody}
    return found | {
        "everybody": accuracy(everybody, tested[-1]),
        "all_months": {name: accuracy(head, everyone) for name, head in last.items()},
        "mu_of_series": series.guarantee_.mu,
        "seconds_per_update": seconds / months,
    }


# --- What all versions together tell about one person ----------------------------------------------------------------

VERSIONS, MIDDLE, PER_COHORT = 5, 2, 300
COLUMNS = ("a", "b", "c", "apart")
ONLY_STEPS: dict[str, Any] = {
    "centring": 0.0,
    "calibration": 0.0,
    "pairs": False,
    "steps": 10,
    "learning_rate": 2.0,
    "max_grad_norm": 0.1,
}
"""The whole budget goes into gradient steps, which the auditor sees only through the released weights."""
AUDITED = Schema(
    label="label",
    classes=("no", "yes"),
    bounds=dict.fromkeys(COLUMNS, (0.0, 1.0)),
    complete=("*",),
    categories={"wave": tuple(map(str, range(VERSIONS)))},
    ignore=("wave",),
    person="person",
    cohort="wave",
)


def audited_people(seed: int = 0) -> Records:
    """People of all cohorts; the label follows the first two columns, and the last one is 0 for everybody."""
    generator = np.random.default_rng(seed)
    features = generator.random((VERSIONS * PER_COHORT, len(COLUMNS)), np.float32)
    features[:, -1] = 0.0
    names = np.array([f"{number % VERSIONS} {number}" for number in range(len(features))], dtype=object)
    labels = (features[:, 0] > features[:, 1]).astype(np.int64)
    return Records("waves", features, labels, classes=2, persons=names)


def worst_case_person() -> Records:
    """A person of the cohort in the middle, apart from everybody else, with the wrong label."""
    features = np.zeros((1, len(COLUMNS)), np.float32)
    features[:, -1] = 1.0
    names = np.array([f"{MIDDLE} the auditor's person"], dtype=object)
    return Records("worst case", features, np.ones(1, np.int64), classes=2, persons=names)


def as_frame(records: Records) -> pd.DataFrame:
    """Return records as the table that a head is trained on."""
    frame = pd.DataFrame(records.features, columns=list(COLUMNS))
    assert records.persons is not None
    waves = [name.partition(" ")[0] for name in records.persons]
    return frame.assign(wave=waves, person=records.persons, label=np.array(["no", "yes"])[records.labels])


def margins(heads: list[PrivateHead], person: Records) -> NDArray[np.float64]:
    """Return what each version says along the direction in which the person moves it."""
    row = as_frame(person)
    return np.array([head.decision_function(row)[0] for head in heads])


def audit(*, naive: bool, epsilon: float, times: int, seed: int | None = None) -> AuditReport:
    """Train all versions ``times`` times without and as often with the person, and bound mu of all together."""
    states = itertools.repeat(None) if seed is None else itertools.count(seed, 100)
    settings = HeadSettings(**ONLY_STEPS)
    claims = []

    def fit(given: Records) -> list[PrivateHead]:
        table, state = as_frame(given), next(states)
        common: dict[str, Any] = {"declared_size": PER_COHORT, "settings": settings, "random_state": state}
        heads: list[PrivateHead] = []
        for version in range(VERSIONS):
            if naive:
                many = {**common, "declared_size": PER_COHORT * (version + 1)}
                head = PrivateHead(epsilon, DELTA, schema=replace(AUDITED, cohort=None), **many)
                heads.append(head.fit(table[table["wave"] <= str(version)]))
            else:
                head = PrivateHead(epsilon, DELTA, schema=AUDITED, **common)
                if heads:
                    heads.append(head.update(table, cohort=str(version), after=opened(heads[-1])))
                else:
                    heads.append(head.fit(table, cohort=str(version)))
        claims.append(heads[-1].guarantee_)
        return heads

    def score(heads: list[PrivateHead], person: Records) -> NDArray[np.float64]:
        found = margins(heads, person)
        # Of a series, the version after the person's cohort was trained on says most, beside the one before.
        said = found[MIDDLE:].sum() if naive else found[MIDDLE] - found[MIDDLE - 1]
        return np.array([said])

    people, person = audited_people(), worst_case_person()
    fit(people)
    subject = f"{VERSIONS} models of one table, " + (
        "each trained on everybody so far" if naive else "a series"
    )
    return audit_training(
        fit, score, people, person, claims[0], method="repeated", times=times, delta=DELTA, subject=subject
    )


def opened(head: PrivateHead) -> PrivateModel:
    """Return a fitted head as the model that its folder would be opened as."""
    assert head.encoding_ is not None
    classes = tuple(map(str, head.classes_))
    facts = (head.n_features_in_, classes, head.guarantee_, head.encoding_, head.feature_map_)
    return PrivateModel("head", *facts, head._classifier, holdout=head.holdout_)


def main() -> None:
    """Run one of the two parts and store its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("accuracy", "audit"))
    parser.add_argument("--months", type=int, default=60)
    parser.add_argument("--people", type=int, default=3000)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--every", type=int, default=10, help="months between the figures over time")
    parser.add_argument("--times", type=int, default=500, help="series without, and as many with, the person")
    parser.add_argument("--epsilon", type=float, default=4.0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    stored = json.loads(options.output.read_text("utf-8")) if options.output.is_file() else {}
    stored[options.part] = accuracies(options) if options.part == "accuracy" else audits(options)
    options.output.write_text(
        json.dumps({**stored, "python": platform.python_version()}, indent=2) + "\n", "utf-8"
    )


def accuracies(options: argparse.Namespace) -> dict[str, Any]:
    """Return the accuracies with and without drift, of all seeds and their means."""
    found: dict[str, Any] = {
        "months": options.months,
        "people": options.people,
        "epsilon": EPSILON,
        "delta": DELTA,
    }
    for kind, drift in (("drifting", True), ("steady", False)):
        runs = [
            one_seed(options.months, options.people, seed, options.every, drift=drift)
            for seed in options.seeds
        ]
        names = ("series", "once", "retrained")
        last = {name: statistics.mean(run[name][-1] for run in runs) for name in names}
        last["everybody"] = statistics.mean(run["everybody"] for run in runs)
        whole = {name: statistics.mean(run["all_months"][name] for run in runs) for name in last}
        found[kind] = {"last_month": last, "all_months": whole, "runs": runs}
        print(kind, {name: round(value, 4) for name, value in last.items()}, "all months", whole, flush=True)
    return found


def audits(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the audits of a series and of models that are trained anew."""
    found = []
    for naive in (False, True):
        started = time.perf_counter()
        report = audit(naive=naive, epsilon=options.epsilon, times=options.times)
        seconds = round(time.perf_counter() - started, 1)
        found.append({**report.to_json(), "share": report.share, "seconds": seconds})
        print(
            f"{report.subject}: mu claimed {report.claimed:.4f}, at least {report.lower_bound:.4f}", end=" "
        )
        print(f"({report.share:.2f} of the claim), {report.verdict}, {seconds} s", flush=True)
    return found


if __name__ == "__main__":
    main()
