"""Workers without processes, for tests: a trial is computed when its outcome is asked for."""

from __future__ import annotations

from typing import Any

from quietmax._ray import Lost
from quietmax.experiments.grid import Trial
from quietmax.experiments.runner import Compute, ComputeFactory, LocalWorkers, compute_trial


class SameProcess(LocalWorkers):
    """Compute in the test's own process, the trial that was sent last first.

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
        result, failure = compute_trial(self._compute, trial)
        return worker, result if isinstance(result, Lost) else (result, failure)

    def close(self) -> None:
        self.closed = True


def start_in_this_process(factory: ComputeFactory, *_: object) -> SameProcess:
    """Stand in for `quietmax.experiments.runner.start_workers`."""
    return SameProcess(factory())
