"""A tiny real grid on the embedded digits, run as its own process so that tests can kill it."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from quietmax.experiments.evaluate import MakeMeasure
from quietmax.experiments.grid import Effort, Group, Source, Trial
from quietmax.experiments.results import Store
from quietmax.experiments.runner import run
from quietmax.experiments.workers import LocalWorkers

EFFORT = Effort(records=300, shadows=2, epochs=3, attack_epochs=3)
GROUPS = [Group(Source("mnist-5k"), EFFORT, repeat) for repeat in range(2)]


def tiny_cells() -> list[Trial]:
    return [
        Trial(group, name, epsilon, None if epsilon is None else 1)
        for group in GROUPS
        for name, epsilon in (
            ("plain", None),
            *(
                (name, epsilon)
                for name in ("algorithm1-gaussian", "algorithm1-laplace")
                for epsilon in (1.0, 10.0)
            ),
        )
    ]


@dataclass(frozen=True)
class MakeSlow:
    """The real measurement, slowed down after each cell so that a kill finds the grid half done."""

    folder: Path

    def __call__(self):
        compute = MakeMeasure(self.folder)()

        def slowly(trial):
            result = compute(trial)
            time.sleep(0.5)
            return result

        return slowly


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    run(tiny_cells(), Store(folder), lambda: LocalWorkers(MakeSlow(folder), workers=1))
    print("finished")
