"""Trials, the profiles that say which trials an evaluation consists of, and the files with their results.

A trial is one method at one epsilon on one random split of one data set. Trials on the same split form a group; they
share the networks that are trained on that split and the attacks that are fitted to them.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from io import StringIO
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from quietmax._io import atomic_write
from quietmax.accounting.dpsgd import PUBLISHED_ACCOUNTANTS
from quietmax.data.registry import dataset
from quietmax.data.sources import is_table_path
from quietmax.errors import InvalidInput, QuietmaxError, counted
from quietmax.experiments.paper import EPSILONS, FOLDER

_FORMAT = 1
"""Increased whenever the meaning of a stored result changes, so that old results are not read as new ones."""

_DECLARED_IN_KEYS = {"person": "identifier", "infer": "measure"}
"""Declarations whose names in keys differ from their names today, so that stored results are found."""

Experiment = Literal["accuracy", "algorithm1", "dpsgd", "like-for-like"]
EXPERIMENTS: tuple[Experiment, ...] = ("accuracy", "algorithm1", "dpsgd", "like-for-like")
LIKE_FOR_LIKE_EPSILONS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
_LIKE_FOR_LIKE_DATASETS = ("location", "mnist", "adult", "mnist-5k")
_PAPER_REPEATS = 10


@dataclass(frozen=True)
class DataSource:
    """A registered data set, or a table file with its declarations."""

    name: str  # Name of the data set, or path of the table
    declared: str = "{}"  # What is declared about the table's columns, as JSON
    digest: str = ""  # SHA-256 of the table and its schema file; empty for a registered data set

    @classmethod
    def of(cls, name: str, declared: dict[str, Any] | None = None) -> DataSource:
        """Return the source of that name, with the digest of the file's present contents.

        A changed table is another source, and so is a table whose schema file changed.
        """
        text = json.dumps(declared or {}, sort_keys=True, default=str)
        if not is_table_path(name):
            return cls(dataset(name).name, text)
        path = Path(name).expanduser()
        if not path.is_file():
            return cls(name, text)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        named = (declared or {}).get("schema")
        schema = Path(named).expanduser() if named else path.with_suffix(".toml")
        if schema.is_file():
            digest = hashlib.sha256(digest.encode() + schema.read_bytes()).hexdigest()
        return cls(name, text, digest)

    @property
    def title(self) -> str:
        """A short name for tables and file names."""
        return Path(self.name).stem if self.digest else self.name


@dataclass(frozen=True)
class Effort:
    """How much work goes into the networks and attacks of one repeat. The defaults are the paper's."""

    records: int
    shadows: int  # Shadow networks
    alpha: float = 1.0  # Parameter of the convexified loss
    epochs: int = 100  # Epochs of the network and of its shadow networks
    attack_epochs: int = 100  # Epochs of the attack networks
    attacks: tuple[str, ...] = ("shadow",)  # Names of the attacks. Without any, no shadow network is trained
    holdout: float | None = None  # Share of the persons (without persons: of the rows) that is the test part
    scaling: str | None = None  # One of `methods.SCALINGS`; None: that of the stored run
    learning_rate: float | None = None  # Of the network and its shadow networks; None: the paper's


@dataclass(frozen=True)
class Group:
    """The trials that share a split of the records, the networks trained on it and the attacks fitted to them."""

    source: DataSource  # Where the records come from
    effort: Effort  # How much work goes into networks and attacks
    repeat: int = 0  # Number of the repeat, from 0
    seed: int = 0  # Seed of the evaluation; a repeat adds its own number

    @cached_property
    def key(self) -> str:
        """A stable name that is valid as a folder name."""
        return f"{_file_name(self.source.title)}-{self.repeat}-{_digest(self.to_json())}"

    def to_json(self) -> dict[str, Any]:
        """Return everything the networks depend on; of the effort only what is set. See `Trial.to_json`."""
        declared = {
            _DECLARED_IN_KEYS.get(name, name): value
            for name, value in json.loads(self.source.declared).items()
        }
        return {
            "source": asdict(self.source) | {"declared": json.dumps(declared, sort_keys=True)},
            "effort": {name: value for name, value in asdict(self.effort).items() if value is not None},
            "repeat": self.repeat,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Trial:
    """One method at one epsilon on one repeat."""

    group: Group  # The records, networks and attacks that the trial uses
    method: str  # Name of the method (`quietmax.experiments.methods`)
    epsilon: float | None = None  # None for methods without privacy
    queries: int | None = None

    @cached_property
    def key(self) -> str:
        """A stable name: the group's folder and a file in it."""
        words = [self.method, *([] if self.epsilon is None else [f"{self.epsilon:g}"])]
        words.append("any" if self.queries is None else str(self.queries))
        return f"{self.group.key}/{_file_name('-'.join(words))}-{_digest(self.to_json())}"

    @property
    def noise_seed(self) -> int:
        """The seed of the trial's noise, which no other trial has."""
        return int(hashlib.sha256(self.key.encode()).hexdigest()[:12], 16)

    def to_json(self) -> dict[str, Any]:
        """Return everything the result depends on.

        Keys of stored results and seeds of noise are hashes of this dictionary and of the group's. Another name in
        it would lose all stored results and change all figures.
        """
        return {
            "format": _FORMAT,
            "group": self.group.to_json(),
            "method": self.method,
            "epsilon": self.epsilon,
            "queries": self.queries,
            # Results of published DP-SGD with cross-entropy, as version 0.1 trained it, are other results.
            **({"loss": "convexified"} if self.method.startswith("published-") else {}),
        }

    def __str__(self) -> str:
        epsilon = "" if self.epsilon is None else f", epsilon {self.epsilon:g}"
        queries = "" if self.queries is None else f", {counted(self.queries, 'query', 'queries')}"
        return f"{self.group.source.title}, {self.method}{epsilon}{queries}, repeat {self.group.repeat}"


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]", "_", text)


# --- the trials of the paper's evaluation -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Workload:
    """What a profile does with one data set."""

    effort: Effort  # The work of one repeat
    repeats: int  # Number of repeats
    dpsgd_repeats: int = 0  # How many of them also train DP-SGD as published
    proven_repeats: int = 0  # How many of them also train the methods with a proven guarantee
    queries: tuple[int, ...] = (1,)  # Numbers of answers for the methods that charge for every answer


# The quick profile by data set: what differs from the paper's effort, and the repeats.
_QUICK: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "location": (
        {"shadows": 20, "attack_epochs": 50},
        {"repeats": 3, "dpsgd_repeats": 1, "proven_repeats": 3},
    ),
    "adult": ({"shadows": 5, "attack_epochs": 10}, {"repeats": 3, "proven_repeats": 3}),
    "mnist": ({"shadows": 8, "attack_epochs": 20}, {"repeats": 2, "proven_repeats": 1}),
    "mnist-5k": ({"shadows": 4, "epochs": 30, "attack_epochs": 20}, {"repeats": 1, "proven_repeats": 1}),
}
_QUICK_OTHERWISE = ({"shadows": 2, "epochs": 30, "attack_epochs": 10}, {"repeats": 1})


def _workload(name: str, profile: str) -> _Workload:
    """Return what a profile does with a data set.

    The profile ``paper`` has the paper's numbers of repeats, shadow networks and epochs. The profile ``quick`` takes
    minutes on two cores: it runs the same code with fewer repeats and shadow networks (and fewer epochs on
    photographs), so its figures vary more and its attacks are weaker.
    """
    if profile not in ("quick", "paper"):
        raise InvalidInput(f"profile must be quick or paper, got {profile!r}.")
    registered = dataset(name)
    effort = Effort(registered.records, registered.shadow_models, registered.alpha)
    if profile == "paper":
        proven = _PAPER_REPEATS if name in _LIKE_FOR_LIKE_DATASETS else 0
        return _Workload(effort, _PAPER_REPEATS, _PAPER_REPEATS, proven, (1, 100))
    less, repeats = _QUICK.get(name, _QUICK_OTHERWISE)
    return _Workload(replace(effort, **less), **repeats)  # type: ignore[arg-type]


def reproduction_trials(
    names: Sequence[str],
    profile: str,
    *,
    experiments: Sequence[Experiment] = EXPERIMENTS,
    repeats: int | None = None,
    seed: int = 0,
) -> list[Trial]:
    """Return the trials of the paper's evaluation and of the like-for-like comparison.

    Every group has a trial of the plain network, and that is its first. What a profile leaves out of all repeats stays
    left out with another number of repeats.
    """
    trials = []
    for name in names:
        work = _workload(name, profile)
        if repeats is not None:
            dpsgd, proven = (repeats if each else 0 for each in (work.dpsgd_repeats, work.proven_repeats))
            work = replace(work, repeats=repeats, dpsgd_repeats=dpsgd, proven_repeats=proven)
        source = DataSource.of(name)
        for repeat in range(work.repeats):
            trials += _group_trials(Group(source, work.effort, repeat, seed), work, experiments)
    return trials


def _group_trials(group: Group, work: _Workload, experiments: Sequence[Experiment]) -> list[Trial]:
    chosen: list[tuple[str, Sequence[float | None], int | None]] = [("plain", [None], None)]
    if "accuracy" in experiments:
        chosen.append(("original", [None], None))
    if "algorithm1" in experiments:
        chosen += [(f"algorithm1-{noise}", EPSILONS, 1) for noise in ("gaussian", "laplace")]
    if "dpsgd" in experiments and group.repeat < work.dpsgd_repeats:
        chosen += [(f"published-{accountant}", EPSILONS, None) for accountant in PUBLISHED_ACCOUNTANTS]
    if "like-for-like" in experiments and group.repeat < work.proven_repeats:
        chosen += [(name, LIKE_FOR_LIKE_EPSILONS, None) for name in ("head", "dpsgd")]
        chosen += [
            (name, LIKE_FOR_LIKE_EPSILONS, queries)
            for name in ("teachers", "sampled-neuron")
            for queries in work.queries
        ]
    return [
        Trial(group, name, epsilon, queries) for name, epsilons, queries in chosen for epsilon in epsilons
    ]


# --- stored results -----------------------------------------------------------------------------------------------

Result = dict[str, Any]
Arrays = Mapping[str, NDArray[Any]]
Kind = TypeVar("Kind", bound=Any)
STORED_TRIALS = FOLDER / "trials.csv"
"""The trials of our full run of the paper's evaluation."""


@dataclass(frozen=True)
class ResultStore:
    """Results under ``folder/trials``, one JSON file each, and networks under ``folder/networks``.

    Every file is written atomically, so an interrupted run loses only the trials in flight.
    """

    folder: Path  # Created when something is stored

    def result(self, trial: Trial) -> Result | None:
        """Return the stored result of a trial."""
        try:
            stored = json.loads(self._result_path(trial).read_text(encoding="utf-8"))
            found: Result = stored["result"]
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return found

    def store_result(self, trial: Trial, result: Result) -> None:
        """Store the result of a trial."""
        text = json.dumps({"trial": trial.to_json(), "result": result}, indent=1, allow_nan=False)
        path = self._result_path(trial)
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
        """Lock the store for one run. The lock ends with its process."""
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

    def _result_path(self, trial: Trial) -> Path:
        return self.folder / "trials" / f"{trial.key}.json"


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
    text = StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator=line_end)
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()}
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, lambda staging: staging.write_bytes(text.getvalue().encode()))
    return path


def _read_rows(kind: type[Kind], path: Path) -> list[Kind]:
    """Return the rows of a file as instances of a dataclass whose fields are strings, numbers or None."""
    with path.open(encoding="utf-8") as lines:
        return [_instance(kind, row) for row in csv.DictReader(lines)]


def _stored_rows(kind: type[Kind], file: str, names: Sequence[str] | None = None) -> list[Kind]:
    """Return the rows of a table that the package carries, by data set."""
    found = _read_rows(kind, FOLDER / file)
    measured = list(dict.fromkeys(row.dataset for row in found))
    for name in names or ():
        if name not in measured:
            raise InvalidInput(
                f"Nothing is stored for {name!r}; stored are {', '.join(measured)}. 'quietmax "
                "reproduce run' measures others."
            )
    return [row for name in names or measured for row in found if row.dataset == name]


def _instance(kind: type[Kind], row: Mapping[str, str], **known: Any) -> Kind:
    """Make a dataclass of what `write_csv` wrote and of fields that are known, by the annotations of its fields."""
    read = {name: _value(row, name, hint) for name, hint in _columns(kind) if name not in known}  # type: ignore[arg-type]
    made: Kind = kind(**known, **read)
    return made


@cache
def _columns(kind: Any) -> list[tuple[str, Any]]:
    """The names of the fields of a dataclass with their annotations."""
    hints = get_type_hints(kind)
    return [(each.name, hints[each.name]) for each in fields(kind)]


def _value(row: Mapping[str, str], name: str, hint: Any) -> Any:
    kind, *others = get_args(hint) or (hint,)
    if row[name] or hint is str:
        return kind(row[name])
    if not others:
        raise ValueError(f"{name} is missing")
    return None


# A trial in the table of trials: the settings of its effort, then these numbers and strings of its result.
_SETTINGS = ("records", "shadows", "alpha", "epochs", "attack_epochs")
_UNSTATED = ("holdout", "scaling", "learning_rate")
_NUMBERS: dict[str, type] = {
    "classes": int,
    "train_accuracy": float,
    "test_accuracy": float,
    "baseline_accuracy": float,
    "accuracy_loss": float,
    "claimed_delta": float,
    "audited_epsilon": float,
    "audited_claim": float,
    "fit_seconds": float,
    "answer_seconds": float,
    "processor_seconds": float,
    "peak_bytes": int,
}
_STRINGS = ("status", "audited", "version")


def write_trials(results: Mapping[Trial, Result], path: Path) -> Path:
    """Write a CSV file with one row per trial, from which tables and figures can be made.

    Every figure of an attack has three columns: ``ATTACK_FIGURE`` and the ends of its 95% interval, ``_low`` and
    ``_high``.
    """
    return write_csv([_trial_row(trial, result) for trial, result in results.items()], path)


def _trial_row(trial: Trial, result: Result) -> dict[str, Any]:
    group, effort = trial.group, trial.group.effort
    if group.source.digest or any(getattr(effort, name) is not None for name in _UNSTATED):
        raise InvalidInput(
            f"Only trials on registered data sets with the paper's settings can be written to one table, got {trial}."
        )
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
            row |= {f"{attack}_{figure}_{end}": interval[end] for end in ("low", "high")}
    return row


def read_trials(paths: Sequence[Path]) -> dict[Trial, Result]:
    """Read files that `write_trials` wrote."""
    results: dict[Trial, Result] = {}
    efforts: dict[str, Effort] = {}
    for path in paths:
        try:
            with path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
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
            name, effort = trial.group.source.name, trial.group.effort
            if efforts.setdefault(name, effort) != effort:
                raise QuietmaxError(
                    f"The trials of {name} have different settings, so they cannot be averaged."
                )
            results[trial] = result
    return results


def _trial_of_row(row: Mapping[str, str]) -> tuple[Trial, Result]:
    attacks = tuple(row["attacks"].split())
    effort = _instance(Effort, row, attacks=attacks, **dict.fromkeys(_UNSTATED))
    group = _instance(Group, row, source=DataSource(row["dataset"]), effort=effort)
    result: Result = {name: _value(row, name, kind | None) for name, kind in _NUMBERS.items()}
    result |= {name: row[name] for name in _STRINGS} | {"records": effort.records}
    result["attacks"] = {
        attack: {
            column.removeprefix(f"{attack}_"): {
                "value": _value(row, column, float | None),
                "low": _value(row, f"{column}_low", float | None),
                "high": _value(row, f"{column}_high", float | None),
            }
            for column in row
            if column.startswith(f"{attack}_") and not column.endswith(("_low", "_high"))
        }
        for attack in attacks
        if row[f"{attack}_leakage"]
    }
    return _instance(Trial, row, group=group), result
