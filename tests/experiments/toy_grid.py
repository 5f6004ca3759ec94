"""A tiny real grid on the embedded digits, which can be run as a process and killed; workers without processes."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from quietmax._ray import Lost
from quietmax.experiments.grid import DataSource, Effort, Group, Result, ResultStore, Trial
from quietmax.experiments.runner import Compute, ComputeFactory, LocalWorkers, _compute_trial, _measuring, run

EFFORT = Effort(records=300, shadows=2, epochs=3, attack_epochs=3)
GROUPS = [Group(DataSource("mnist-5k"), EFFORT, repeat) for repeat in range(2)]


def tiny_trials() -> list[Trial]:
    """Five trials in each of two groups."""
    private = [
        (f"algorithm1-{noise}", epsilon) for noise in ("gaussian", "laplace") for epsilon in (1.0, 10.0)
    ]
    return [
        Trial(group, name, epsilon, None if epsilon is None else 1)
        for group in GROUPS
        for name, epsilon in (("plain", None), *private)
    ]


def measuring_slowly(folder: Path) -> Compute:
    """The real measurement with a pause after each trial, so that a kill finds the grid half finished."""
    compute = _measuring(folder)

    def slowly(trial: Trial) -> Result:
        result = compute(trial)
        time.sleep(0.5)
        return result

    return slowly


class SameProcess(LocalWorkers):
    """Workers without processes: a trial is computed when its outcome is asked for, the one that was sent last first.

    ``compute`` returns a result, or `Lost` to simulate a death.
    """

    def __init__(self, compute: Compute, count: int = 1) -> None:
        self.count = count
        self.sent: list[Any] = []
        self.closed = False
        self._waiting: list[Any] = []
        self._compute = compute

    def send(self, worker: int, _method: str, *arguments: Trial) -> None:
        self._waiting.append((worker, *arguments))
        self.sent.append((worker, *arguments))

    def next(self) -> tuple[int, Any]:
        worker, trial = self._waiting.pop()
        result, failure = _compute_trial(self._compute, trial)
        return worker, result if isinstance(result, Lost) else (result, failure)

    def close(self) -> None:
        self.closed = True


def start_in_this_process(factory: ComputeFactory, *_: object) -> SameProcess:
    """Stand in for `quietmax.experiments.runner._start_workers`."""
    return SameProcess(factory())


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    run(tiny_trials(), ResultStore(folder), lambda: LocalWorkers(partial(measuring_slowly, folder), count=1))
    print("finished")
