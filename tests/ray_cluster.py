"""A small Ray cluster on this machine for tests, and workers that several tests use one after the other."""

from __future__ import annotations

import logging
from collections import defaultdict
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


@contextmanager
def reused_actors() -> Iterator[None]:
    """Keep workers that are ended, and begin anew with them: each start of one imports PyTorch, which takes seconds."""
    import ray

    idle: dict[type, list[Any]] = defaultdict(list)
    start = Actors._start

    def started(actors: Actors, worker: int) -> Any:
        for kind in set(idle) - {actors.kind}:  # they would keep their cores
            for actor in idle.pop(kind):
                ray.kill(actor)
        if not idle[actors.kind]:
            return start(actors, worker)
        actor = idle[actors.kind].pop()
        actor.__ray_call__.remote(_begin_anew, *actors._arguments(worker))
        return actor

    def ended(actors: Actors, actor: Any) -> None:
        try:
            ray.get(actor.__ray_ready__.remote(), timeout=5)
        except ray.exceptions.RayError:
            ray.kill(actor)
        else:
            idle[actors.kind].append(actor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Actors, "_start", started)
        patch.setattr(Actors, "_end", ended)
        yield


def _begin_anew(actor: Any, *arguments: Any) -> None:
    actor.__init__(*arguments)
