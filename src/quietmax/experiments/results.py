"""Store: results and shared networks on disk, each file whole or absent, so that a killed run loses nothing.

Every file is written beside its place, flushed to the disk and renamed. A cell's result is one JSON file; a group's
networks are one safetensors file each. One run at a time uses a store; the lock goes away with its process.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from quietmax._io import atomic_write
from quietmax.errors import QuietmaxError
from quietmax.experiments.grid import Group, Trial

Result = dict[str, Any]
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Store:
    """Results under ``folder/cells``, networks under ``folder/networks``."""

    folder: Path

    def result(self, trial: Trial) -> Result | None:
        """The stored result of a cell, or None."""
        try:
            stored = json.loads(self._result_path(trial).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return stored["result"] if isinstance(stored, dict) and "result" in stored else None

    def keep_result(self, trial: Trial, result: Result) -> None:
        """Store a cell's result."""
        text = json.dumps({"cell": trial.to_json(), "result": result}, indent=1, allow_nan=False)
        path = self._result_path(trial)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, lambda staging: staging.write_text(text, encoding="utf-8"))

    def arrays(self, group: Group, name: str, make: Callable[[], Arrays]) -> Arrays:
        """Arrays kept for a group under ``name``; made and kept if there are none.

        Of several workers that want the same, one makes them and the others wait.
        """
        path = self._arrays_path(group, name)
        if (stored := _read_arrays(path)) is not None:
            return stored
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if (stored := _read_arrays(path)) is not None:
                return stored
            made = make()
            whole = {key: np.ascontiguousarray(value) for key, value in made.items()}
            atomic_write(path, lambda staging: save_file(whole, staging))
            return made

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store for one run; refuse while another run holds it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "lock").open("w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise QuietmaxError(
                        f"Another run is using {self.folder}; wait for it, or give another --output."
                    ) from None
                yield
        except OSError as problem:
            raise QuietmaxError(
                f"Results cannot be written to {self.folder} ({problem.strerror}); give another --output."
            ) from problem

    def _result_path(self, trial: Trial) -> Path:
        return self.folder / "cells" / f"{trial.key}.json"

    def _arrays_path(self, group: Group, name: str) -> Path:
        return self.folder / "networks" / group.key / f"{name}.safetensors"


def _read_arrays(path: Path) -> Arrays | None:
    try:
        return load_file(path)
    except (OSError, SafetensorError):
        return None
