"""Running an evaluation's cells: where they are computed, which are missing, and on what machine it was."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from quietmax.errors import InvalidInput
from quietmax.experiments.cell import Cell
from quietmax.experiments.crew import Crew, LocalCrew
from quietmax.experiments.estimate import estimated_seconds
from quietmax.experiments.measure import MakeMeasure
from quietmax.experiments.runner import Progress, Run, run
from quietmax.experiments.store import Store

_PACKAGES = ("quietmax", "torch", "numpy", "scipy", "scikit-learn", "dp-accounting")


@dataclass(frozen=True)
class Where:
    """Where cells are computed: ``workers`` local processes, or a Ray cluster at ``ray`` ("" starts a local one)."""

    workers: int | None = None
    ray: str | None = None

    def crew(self, make: MakeMeasure) -> Crew:
        """Hire the workers."""
        if self.ray is not None:
            from quietmax.experiments.ray_crew import RayCrew

            return RayCrew(make, address=self.ray or None, workers=self.workers)
        return LocalCrew(make, self.workers or usable_cores())


def usable_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_cells(
    cells: Sequence[Cell],
    folder: Path,
    *,
    where: Where | None = None,
    data_dir: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Run:
    """Compute the cells that ``folder`` does not hold yet."""
    if not cells:
        raise InvalidInput("There is nothing to compute; name at least one data set and one method.")
    weights = estimated_seconds(cells, measured=False)
    make = MakeMeasure(folder.resolve(), None if data_dir is None else str(Path(data_dir).resolve()))
    chosen = where or Where()
    return run(
        cells, Store(folder), lambda: chosen.crew(make), weight=lambda cell: weights[cell], progress=progress
    )


def environment() -> dict[str, Any]:
    """Versions and machine, for the report."""
    return {
        "python": sys.version.split()[0],
        "machine": f"{platform.system()} {platform.machine()}, {usable_cores()} cores",
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"
