"""The demo's comparison: ordinary and private models attacked on the same digits, and a report to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quietmax.cli.compare import method_cells
from quietmax.cli.grids import compute, where
from quietmax.errors import QuietmaxError
from quietmax.experiments.cell import Effort, Group, Source
from quietmax.experiments.report import SEEDED_NOISE, About, write_report
from quietmax.experiments.summary import Summary, summarise

METHODS = ("plain", "algorithm1-gaussian", "head")
EPSILONS = (0.1, 1.0, 10.0)
# A quarter of the 5,000 digits, so that shadow networks have as many records as their target.
EFFORT = Effort(1250, 4, 1.0, 100, 20, ("shadow",))


@dataclass(frozen=True)
class Attacked:
    """Accuracy and leakage of each method, and the report's file."""

    summaries: tuple[Summary, ...]
    report: Path

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Method, epsilon, test accuracy, leakage under the Shadow attack."""
        return [
            (
                each.title,
                "" if each.epsilon is None else f"{each.epsilon:g}",
                f"{each.test_accuracy.value:.3f}",
                f"{each.leakage['shadow'].value:+.3f}",
            )
            for each in self.summaries
        ]

    def to_json(self) -> dict[str, Any]:
        """What the figures are, the figures by name, and the report's place."""
        return {
            "about": SEEDED_NOISE,
            "results": [each.flat() for each in self.summaries],
            "report": str(self.report),
        }


def attack_and_report(
    name: str, output: Path, *, quiet: bool, methods: Sequence[str] = METHODS, effort: Effort = EFFORT
) -> Attacked:
    """Train, attack and compare on one split of the data set; what is already in ``output`` is not computed again."""
    group = Group(Source.of(name), effort, 0, 0)
    cells = [cell for each in methods for cell in method_cells(group, each, EPSILONS, [1])]
    done = compute(cells, output, where(None, None), None, quiet=quiet)
    if done.failures:
        cell, failure = next(iter(done.failures.items()))
        raise QuietmaxError(
            f"The demo's comparison failed at {cell} ({failure.rstrip('.')}); correct that and run it again, which "
            "keeps what is done."
        )
    summaries = summarise(done.results)
    about = About(
        f"Privacy and utility on {name}",
        f"{effort.records:,} training records, {effort.shadows} shadow networks, one split: a demonstration",
        0,
        paper=False,
    )
    return Attacked(tuple(summaries), write_report(summaries, output, about)[0])
