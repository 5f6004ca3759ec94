"""Workers without processes, for tests: a trial is computed when its outcome is asked for."""

from __future__ import annotations

from quietmax.experiments.grid import Trial
from quietmax.experiments.runner import Compute, ComputeFactory, TrialOutcome, compute_trial


class SameProcess:
    """Compute in the test's own process, the trial that was submitted last first.

    ``compute`` returns a result, or a `TrialOutcome` to simulate failures and deaths.
    """

    def __init__(self, compute: Compute, count: int = 1) -> None:
        self.count = count
        self.submitted: list[tuple[int, Trial]] = []
        self.stopped = False
        self._waiting: list[tuple[int, Trial]] = []
        self._compute = compute

    def submit(self, worker: int, trial: Trial) -> None:
        self._waiting.append((worker, trial))
        self.submitted.append((worker, trial))

    def next_outcome(self) -> TrialOutcome:
        worker, trial = self._waiting.pop()
        result, failure = compute_trial(self._compute, trial)
        return result if isinstance(result, TrialOutcome) else TrialOutcome(worker, result, failure)

    def stop(self) -> None:
        self.stopped = True


def start_in_this_process(factory: ComputeFactory, *_: object) -> SameProcess:
    """Stand in for `quietmax.experiments.runner.start_workers`."""
    return SameProcess(factory())
