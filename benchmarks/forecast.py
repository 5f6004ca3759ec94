"""The forecast of `quietmax plan` beside the accuracy that heads then have, on tables that had no part in making it.

    python benchmarks/forecast.py run [--tables NMES1988 ...]
    python benchmarks/forecast.py page

The forecast knows what an owner knows before training: the schema, the number of people, the share of the most frequent
class to two decimals, and in a second variant the accuracy of logistic regression without privacy, to two decimals. Its
constants were chosen on the tables `RULE` of tables.py; the check is on those in `UNSEEN`. Accuracies are the means
that tables.py stored. `run` stores every case in docs/results/forecast.json, and `page` writes the section of the
results page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from tables import DELTA, RULE, TABLES, TEST_SHARE, UNSEEN, Task, mean
from tables import RESULTS as ACCURACIES

DOCS = Path(__file__).parent.parent / "docs"
RESULTS, PAGE = DOCS / "results/forecast.json", DOCS / "results/table-accuracy.md"
EPSILONS, LARGE, MOST_WIDE = (0.5, 1.0, 3.0), 2000, 0.08
MARKS = ("<!-- forecast -->", "<!-- end of forecast -->")


def cases(name: str, runs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cases of a table: each epsilon, with and without the achievable accuracy."""
    from quietmax.data import Schema
    from quietmax.experiments.forecast import plan

    task = Task.of(name)
    schema = Schema(label="label", classes=task.classes, bounds=task.bounds, categories=task.categories)
    people = int((1 - TEST_SHARE) * len(task.labels))
    majority = round(float(np.bincount(task.labels).max()) / len(task.labels), 2)
    real = {epsilon: mean(runs, name, "head", epsilon, "accuracy") for epsilon in EPSILONS}
    without = mean(runs, name, "logistic", 0.0, "accuracy")
    found = []
    for achievable in (max(majority, round(without, 2)), None):
        forecast = plan(
            schema,
            people,
            delta=DELTA,
            majority=majority,
            achievable=achievable,
            epsilons=EPSILONS,
            sizes=(1.0,),
        )
        for outlook in forecast.by_epsilon:
            assert outlook.accuracy is not None
            expected, low, high = (round(each, 4) for each in outlook.accuracy)
            accuracy = round(real[outlook.epsilon], 4)
            found.append(
                {
                    "table": name,
                    "people": people,
                    "epsilon": outlook.epsilon,
                    "majority": majority,
                    "achievable": achievable,
                    "expected": expected,
                    "low": low,
                    "high": high,
                    "accuracy": accuracy,
                    "inside": low <= accuracy <= high,
                }
            )
    return found


def run(names: list[str], output: Path) -> None:
    """Compute the cases of some tables, and store them beside the others."""
    runs = json.loads(ACCURACIES.read_text("utf-8"))["runs"]
    stored = json.loads(output.read_text("utf-8"))["cases"] if output.exists() else []
    for name in names:
        found = cases(name, runs)
        stored = sorted(
            [each for each in stored if each["table"] != name] + found,
            key=lambda each: (list(TABLES).index(each["table"]), each["achievable"] is None, each["epsilon"]),
        )
        content = {
            "command": "python benchmarks/forecast.py run",
            "chosen_on": list(RULE),
            "checked_on": list(UNSEEN),
            "cases": stored,
        }
        output.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        print(name, [f"{each['accuracy']} in {each['low']} to {each['high']}" for each in found], flush=True)


def summary(found: list[dict[str, Any]]) -> str:
    """Return how many accuracies lie inside, and how wide the intervals are from 2,000 people on."""
    inside = sum(each["inside"] for each in found)
    widths = [each["high"] - each["low"] for each in found if each["people"] >= LARGE]
    narrow = sum(width <= MOST_WIDE for width in widths)
    return (
        f"{inside} of {len(found)} ({inside / len(found):.0%}) inside; widths {statistics.median(widths):.3f} in the "
        f"middle and {max(widths):.3f} at most, {narrow} of {len(widths)} up to {MOST_WIDE:g}"
    )


def section(stored: list[dict[str, Any]]) -> str:
    """Return the text between the marks of the page."""
    shown = [each for each in stored if each["table"] in UNSEEN]
    parts = {
        variant: [each for each in shown if (each["achievable"] is None) is variant]
        for variant in (False, True)
    }
    lines = [
        f"With the achievable accuracy stated: {summary(parts[False])}. Without it: {summary(parts[True])}.",
        "",
        "| table (people) | epsilon | majority | achievable | accuracy | forecast (90%) | without `achievable` |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one, other in zip(parts[False], parts[True], strict=True):
        cells = [
            f"{each['expected']:.3f} ({each['low']:.3f} to {each['high']:.3f})"
            + ("" if each["inside"] else " **outside**")
            for each in (one, other)
        ]
        lines.append(
            f"| {one['table']} ({one['people']:,}) | {one['epsilon']:g} | {one['majority']:.2f} | "
            f"{one['achievable']:.2f} | {one['accuracy']:.3f} | {cells[0]} | {cells[1]} |"
        )
    return "\n".join(lines)


def filled(page: str, stored: list[dict[str, Any]]) -> str:
    """Return the page with the section between its marks."""
    before, _, rest = page.partition(MARKS[0])
    return f"{before}{MARKS[0]}\n\n{section(stored)}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def main() -> None:
    """Run the cases, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("run", "page"))
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=[*UNSEEN])
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    if options.action == "run":
        run(options.tables, options.output)
    else:
        stored = json.loads(options.output.read_text("utf-8"))["cases"]
        PAGE.write_text(filled(PAGE.read_text("utf-8"), stored), "utf-8")


if __name__ == "__main__":
    main()
