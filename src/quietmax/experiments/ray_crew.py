"""RayCrew: the same workers as Ray actors, on one machine or many.

Results travel back to the driver, which alone writes the results; networks are kept in the folder of the worker's own
machine. On several machines the data files must lie at the same path on each, and a folder they share saves training
a group's networks again where another machine joins in.
"""

from __future__ import annotations

from typing import Any

from quietmax.errors import QuietmaxError
from quietmax.experiments.cell import Cell
from quietmax.experiments.crew import Compute, MakeCompute, Outcome, limit_threads, outcome_of
from quietmax.experiments.store import Result


class _Worker:
    """What an actor is."""

    def __init__(self, make_compute: MakeCompute) -> None:
        limit_threads(1)
        self._make = make_compute
        self._compute: Compute | None = None

    def compute(self, cell: Cell) -> tuple[Result | None, str]:
        """A cell's result, or what went wrong."""
        if self._compute is None:
            self._compute = self._make()
        return outcome_of(self._compute, cell)

    def process_id(self) -> int:
        """The actor's process."""
        import os

        return os.getpid()


class RayCrew:
    """Actors of one core each; an actor that dies is replaced, and the runner gives its cell out again."""

    def __init__(
        self, make_compute: MakeCompute, *, address: str | None = None, workers: int | None = None
    ) -> None:
        self._ray = _imported()
        self._make = make_compute
        # A cluster someone else started stays; one started here ends with the crew.
        self._started_here = not self._ray.is_initialized()
        if self._started_here:
            try:
                self._ray.init(
                    address=address, include_dashboard=False, log_to_driver=False, configure_logging=False
                )
            except (ConnectionError, RuntimeError, ValueError) as problem:
                raise QuietmaxError(
                    f"Ray could not be reached at {address or 'this machine'} ({problem}); start a cluster with 'ray "
                    "start --head', or leave --ray out."
                ) from problem
        count = workers or int(self._ray.cluster_resources().get("CPU", 1))
        environment = {"env_vars": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}}
        self._actor = self._ray.remote(_Worker).options(num_cpus=1, max_restarts=0, runtime_env=environment)
        self._members = [self._actor.remote(make_compute) for _ in range(max(count, 1))]
        self._asked: dict[Any, int] = {}

    @property
    def workers(self) -> int:
        """How many actors there are."""
        return len(self._members)

    def process_id(self, worker: int) -> int:
        """An actor's process number, for whoever wants to watch it; waits for the actor to be idle."""
        return int(self._ray.get(self._members[worker].process_id.remote()))

    def give(self, worker: int, cell: Cell) -> None:
        """Send a cell to an actor."""
        self._asked[self._members[worker].compute.remote(cell)] = worker

    def next(self) -> Outcome:
        """Wait for the next answer or death."""
        (finished, *_), _ = self._ray.wait(list(self._asked), num_returns=1)
        worker = self._asked.pop(finished)
        try:
            result, failure = self._ray.get(finished)
        except self._ray.exceptions.RayError as problem:
            self._members[worker] = self._actor.remote(self._make)
            return Outcome(worker, failure=f"the Ray worker was lost ({type(problem).__name__})", died=True)
        return Outcome(worker, result, failure)

    def stop(self) -> None:
        """End all actors, and the cluster if it was started here."""
        for member in self._members:
            self._ray.kill(member)
        if self._started_here:
            self._ray.shutdown()


def _imported() -> Any:
    try:
        import ray
    except ImportError:
        raise QuietmaxError(
            "--ray needs the package Ray, which is not installed; install quietmax[ray], or leave --ray out."
        ) from None
    return ray
