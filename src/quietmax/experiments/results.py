"""Results on disk: the store that a run fills, one table of all trials, and the tables that the package carries.

In the store the result of a trial is one JSON file, and the networks of a group are one safetensors file each. Every
file is written atomically, so an interrupted run loses only the trials in flight. One run at a time uses a store; the
lock ends with its process.

The table (`write_trials`) is a CSV file with one row per trial. Tables and figures can be made from it alone.
"""

from __future__ import annotations

import csv
import fcntl
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from quietmax._io import atomic_write
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.experiments.grid import DataSource, Effort, Group, Trial
from quietmax.experiments.paper import FOLDER

Result = dict[str, Any]
Arrays = Mapping[str, NDArray[Any]]
Kind = TypeVar("Kind", bound=Any)
STORED_TRIALS = FOLDER / "trials.csv"
"""The trials of our full run of the paper's evaluation."""


@dataclass(frozen=True)
class ResultStore:
    """Results under ``folder/trials`` and networks under ``folder/networks``.

    Version 0.1 wrote results under ``folder/cells``; they are read from there.
    """

    folder: Path  # Created when something is stored

    def result(self, trial: Trial) -> Result | None:
        """Return the stored result of a trial."""
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
        """Store the result of a trial."""
        text = json.dumps({"trial": trial.to_json(), "result": result}, indent=1, allow_nan=False)
        path = self._result_path(trial, "trials")
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, lambda staging: staging.write_text(text, encoding="utf-8"), private=True)

    def arrays(self, group: Group, name: str, make: Callable[[], Arrays]) -> Arrays:
        """Return stored arrays of a group; make and store them if there are none.

        If several workers want the same arrays, one makes them and the others wait.
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
            atomic_write(path, lambda staging: staging.write_bytes(save(contiguous)), private=True)
            return made

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the store for one run."""
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


def write_csv(
    rows: Iterable[Mapping[str, object]],
    path: Path,
    *,
    columns: Sequence[str] = (),
    line_end: str = "\n",
) -> Path:
    """Write rows to a CSV file, whose columns are by default all names in them. Fractions have six digits."""
    rows = list(rows)
    names = list(columns or dict.fromkeys(name for row in rows for name in row))

    def write(staging: Path) -> None:
        with staging.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, restval="", lineterminator=line_end)
            writer.writeheader()
            for row in rows:
                writer.writerow(
                    {
                        name: f"{value:.6g}" if isinstance(value, float) else value
                        for name, value in row.items()
                    }
                )

    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, write)
    return path


def read_rows(kind: type[Kind], path: Path) -> list[Kind]:
    """Return the rows of a file as instances of a dataclass whose fields are strings, numbers or None."""
    with path.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    hints = get_type_hints(kind)
    return [
        kind(**{each.name: _value(row[each.name], hints[each.name]) for each in fields(kind)}) for row in rows
    ]


def _value(text: str, hint: Any) -> Any:
    """Return what `write_csv` wrote, by the annotation of its field."""
    if not (choices := get_args(hint)):
        return hint(text)
    return None if not text else next(each for each in choices if each is not type(None))(text)


def stored_rows(kind: type[Kind], file: str, names: Sequence[str] | None = None) -> list[Kind]:
    """Return the rows of a table that the package carries, by data set."""
    found = read_rows(kind, FOLDER / file)
    measured = list(dict.fromkeys(row.dataset for row in found))
    for name in names or ():
        if name not in measured:
            raise InvalidInput(
                f"Nothing is stored for {name!r}; stored are {', '.join(measured)}. Others can be measured with "
                "`measure`."
            )
    return [row for name in names or measured for row in found if row.dataset == name]


_SETTINGS = ("records", "shadows", "alpha", "epochs", "attack_epochs")
_NUMBERS = (
    "classes",
    "train_accuracy",
    "test_accuracy",
    "baseline_accuracy",
    "accuracy_loss",
    "claimed_delta",
    "audited_epsilon",
    "audited_claim",
    "fit_seconds",
    "answer_seconds",
    "processor_seconds",
    "peak_bytes",
)
_STRINGS = ("status", "audited", "version")
_INTEGERS = frozenset(
    {"queries", "repeat", "seed", "records", "shadows", "epochs", "attack_epochs", "classes", "peak_bytes"}
)


def write_trials(results: Mapping[Trial, Result], path: Path) -> Path:
    """Write a CSV file with one row per trial.

    Every figure of an attack has three columns: ``ATTACK_FIGURE`` and the ends of its 95% interval, ``_low`` and
    ``_high``.
    """
    return write_csv([_trial_row(trial, result) for trial, result in results.items()], path)


def _trial_row(trial: Trial, result: Result) -> dict[str, Any]:
    group, effort = trial.group, trial.group.effort
    if group.source.digest or effort.holdout is not None:
        raise InvalidInput(f"Only trials on registered data sets can be written to one table, got {trial}.")
    row: dict[str, Any] = {
        "dataset": group.source.name,
        "method": trial.method,
        "noise": next((noise for noise in ("gaussian", "laplace") if trial.method.endswith(noise)), None),
        "epsilon": trial.epsilon,
        "queries": trial.queries,
        "repeat": group.repeat,
        "seed": group.seed,
        **{name: getattr(effort, name) for name in _SETTINGS},
        "attacks": " ".join(effort.attacks),
        **{name: result.get(name) for name in (*_NUMBERS, *_STRINGS)},
    }
    for attack, figures in result["attacks"].items():
        for figure, interval in figures.items():
            row[f"{attack}_{figure}"] = interval["value"]
            row[f"{attack}_{figure}_low"], row[f"{attack}_{figure}_high"] = interval["low"], interval["high"]
    return row


def read_trials(paths: Sequence[Path]) -> dict[Trial, Result]:
    """Read files that `write_trials` wrote."""
    results: dict[Trial, Result] = {}
    for path in paths:
        try:
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                rows = list(reader)
        except (OSError, UnicodeDecodeError, csv.Error) as problem:
            raise QuietmaxError(f"The file {path} cannot be read: {problem}.") from None
        for line, row in enumerate(rows, start=2):
            try:
                trial, result = _trial_of_row(row)
            except KeyError as problem:
                raise QuietmaxError(
                    f"The file {path} is not a table of trials: it has no column {problem}."
                ) from None
            except (TypeError, ValueError) as problem:
                raise QuietmaxError(f"Line {line} of {path} is not a trial: {problem}.") from None
            if trial in results:
                raise QuietmaxError(f"Line {line} of {path} repeats the trial {trial}.")
            results[trial] = result
    efforts: dict[str, Effort] = {}
    for trial in results:
        if efforts.setdefault(trial.group.source.name, trial.group.effort) != trial.group.effort:
            raise QuietmaxError(
                f"The trials of {trial.group.source.name} have different settings, so they cannot be averaged."
            )
    return results


def _trial_of_row(row: Mapping[str, str]) -> tuple[Trial, Result]:
    attacks = tuple(row["attacks"].split())
    effort = Effort(**{name: _required(row, name) for name in _SETTINGS}, attacks=attacks)
    group = Group(DataSource(row["dataset"]), effort, _required(row, "repeat"), _required(row, "seed"))
    trial = Trial(group, row["method"], _number(row, "epsilon"), _number(row, "queries"))
    result: Result = {name: _number(row, name) for name in _NUMBERS} | {name: row[name] for name in _STRINGS}
    result["records"] = effort.records
    result["attacks"] = {
        attack: {
            column.removeprefix(f"{attack}_"): {
                "value": _number(row, column),
                "low": _number(row, f"{column}_low"),
                "high": _number(row, f"{column}_high"),
            }
            for column in row
            if column.startswith(f"{attack}_") and not column.endswith(("_low", "_high"))
        }
        for attack in attacks
        if row[f"{attack}_leakage"]
    }
    return trial, result


def _number(row: Mapping[str, str], column: str) -> Any:
    """Return the number of a cell, None if the cell is empty."""
    text = row[column]
    return None if text == "" else int(text) if column in _INTEGERS else float(text)


def _required(row: Mapping[str, str], column: str) -> Any:
    value = _number(row, column)
    if value is None:
        raise ValueError(f"{column} is missing")
    return value
