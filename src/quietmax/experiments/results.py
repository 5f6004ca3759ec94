"""The result store: finished trials and shared networks on disk.

Every file is written atomically, so an interrupted run loses only the trials in flight. The result of a trial is one
JSON file; the networks of a group are one safetensors file each. One run at a time uses a store; the lock ends with
its process.
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
from safetensors.numpy import load_file, save

from quietmax._io import atomic_write
from quietmax.errors import QuietmaxError
from quietmax.experiments.grid import Group, Trial

Result = dict[str, Any]
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class ResultStore:
    """Results under ``folder/trials`` and networks under ``folder/networks``.

    Version 0.1 wrote results under ``folder/cells``; they are read from there.

    Parameters
    ----------
    folder : pathlib.Path
        Created when something is stored.
    """

    folder: Path

    def result(self, trial: Trial) -> Result | None:
        """Return the stored result of a trial.

        Parameters
        ----------
        trial : Trial
            Which trial.

        Returns
        -------
        dict or None
            None if there is no result, or its file is damaged.
        """
        for folder in ("trials", "cells"):
            try:
                stored = json.loads(self._result_path(trial, folder).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if isinstance(stored, dict) and isinstance(stored.get("result"), dict):
                found: Result = stored["result"]
                return found
        return None

    def store_result(self, trial: Trial, result: Result) -> None:
        """Store the result of a trial.

        Parameters
        ----------
        trial : Trial
            Which trial.
        result : dict
            Its result, which must be valid JSON without NaN and infinities.
        """
        text = json.dumps({"trial": trial.to_json(), "result": result}, indent=1, allow_nan=False)
        path = self._result_path(trial, "trials")
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, lambda staging: staging.write_text(text, encoding="utf-8"))

    def arrays(self, group: Group, name: str, make: Callable[[], Arrays]) -> Arrays:
        """Return stored arrays of a group; make and store them if there are none.

        If several workers want the same arrays, one makes them and the others wait.

        Parameters
        ----------
        group : Group
            Which group.
        name : str
            What the arrays are, as a file name.
        make : callable
            Makes the arrays.

        Returns
        -------
        mapping of str to numpy.ndarray
        """
        path = self.folder / "networks" / group.key / f"{name}.safetensors"
        if (stored := _read_arrays(path)) is not None:
            return stored
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if (stored := _read_arrays(path)) is not None:
                return stored
            made = make()
            contiguous = {key: np.ascontiguousarray(value) for key, value in made.items()}
            atomic_write(path, lambda staging: staging.write_bytes(save(contiguous)))
            return made

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the store for one run.

        Raises
        ------
        QuietmaxError
            If another run holds the lock, or the folder is not writable.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "lock").open("w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise QuietmaxError(f"Another run is using the folder {self.folder}.") from None
                yield
        except OSError as problem:
            raise QuietmaxError(
                f"Results cannot be written to the folder {self.folder}: {problem.strerror}."
            ) from problem

    def _result_path(self, trial: Trial, folder: str) -> Path:
        return self.folder / folder / f"{trial.key}.json"


def _read_arrays(path: Path) -> Arrays | None:
    try:
        return load_file(path)
    except (OSError, SafetensorError):
        return None
