"""A small Ray cluster on this machine for tests, and workers that several tests use one after the other."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quietmax._ray import Actors


@contextmanager
def running_cluster(cores: int) -> Iterator[None]:
    """Start a cluster, to which everything in this process is connected meanwhile.

    Parameters
    ----------
    cores : int
        How many cores Ray believes to have: as many workers can run.
    """
    import ray

    logging.getLogger("ray").setLevel(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        # Ray's workers must find the tests, and sources that may not be installed.
        here = Path(__file__).parents[1]
        patch.setenv("PYTHONPATH", f"{here / 'src'}:{here}")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local",
            num_cpus=cores,
            object_store_memory=100 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
        )
        try:
            yield
        finally:
            ray.shutdown()


class _Host:
    """A worker of any kind, in a process that outlives it."""

    def __init__(self, kind: type, *arguments: Any) -> None:
        self.begin(kind, *arguments)

    def begin(self, kind: type, *arguments: Any) -> None:
        self._worker = kind(*arguments)

    def call(self, *arguments: Any) -> Any:
        return self._worker.call(*arguments)

    def run(self, *arguments: Any) -> Any:
        return self._worker.run(*arguments)


@contextmanager
def reused_actors() -> Iterator[None]:
    """Keep the processes of workers that are ended for the next ones: each start of one imports PyTorch, which takes
    seconds.
    """
    import ray

    idle: list[Any] = []
    host = ray.remote(_Host).options(num_cpus=1, max_restarts=0, max_task_retries=0)

    def started(actors: Actors, worker: int) -> Any:
        arguments = (actors.kind, *actors._arguments(worker))
        if not idle:
            return host.remote(*arguments)
        actor = idle.pop()
        actor.begin.remote(*arguments)
        return actor

    def ended(_: Actors, actor: Any) -> None:
        try:
            ray.get(actor.__ray_ready__.remote(), timeout=1)
        except ray.exceptions.RayError:
            ray.kill(actor)
        else:
            idle.append(actor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Actors, "_start", started)
        patch.setattr(Actors, "_end", ended)
        yield
