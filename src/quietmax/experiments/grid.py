"""Trials, the points of an evaluation, and the profiles that say which trials an evaluation consists of.

A trial is one method at one epsilon on one random split of one data set. Trials on the same split form a group; they
share the networks that are trained on that split and the attacks that are fitted to them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from quietmax.accounting.dpsgd import PUBLISHED_ACCOUNTANTS
from quietmax.data.registry import dataset
from quietmax.data.sources import is_table_path
from quietmax.errors import InvalidInput, counted
from quietmax.experiments.paper import EPSILONS

_FORMAT = 1
"""Increased whenever the meaning of a stored result changes, so that old results are not read as new ones."""

_DECLARED_IN_KEYS = {"person": "identifier", "infer": "measure"}
"""Declarations whose names in keys differ from their names today, so that results of version 0.1 are found."""

Experiment = Literal["accuracy", "algorithm1", "dpsgd", "like-for-like"]
EXPERIMENTS: tuple[Experiment, ...] = ("accuracy", "algorithm1", "dpsgd", "like-for-like")
LIKE_FOR_LIKE_EPSILONS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
LIKE_FOR_LIKE_DATASETS = ("location", "mnist", "adult", "mnist-5k")
PAPER_REPEATS = 10


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

    def to_json(self) -> dict[str, Any]:
        """Return all fields, with the names of declarations that version 0.1 used."""
        declared = {
            _DECLARED_IN_KEYS.get(name, name): value for name, value in json.loads(self.declared).items()
        }
        return {"name": self.name, "declared": json.dumps(declared, sort_keys=True), "digest": self.digest}


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

    @property
    def records_seen(self) -> int:
        """Records that the network and its shadow networks see."""
        return self.records * self.epochs * (1 + (self.shadows if self.attacks else 0))

    def to_json(self) -> dict[str, Any]:
        """Return all fields; the holdout only if there is one, so that results of the paper's split are found."""
        return {name: value for name, value in asdict(self).items() if value is not None}


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
        """Return all fields."""
        return {
            "source": self.source.to_json(),
            "effort": self.effort.to_json(),
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
        it would lose all stored results and change all figures; that is why the names are written out.
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


@dataclass(frozen=True)
class _Workload:
    """What a profile does with one data set."""

    effort: Effort  # The work of one repeat
    repeats: int  # Number of repeats
    dpsgd_repeats: int = 0  # How many of them also train DP-SGD as published
    proven_repeats: int = 0  # How many of them also train the methods with a proven guarantee
    queries: tuple[int, ...] = (1,)  # Numbers of answers for the methods that charge for every answer

    def with_repeats(self, repeats: int) -> _Workload:
        """Return the same work with another number of repeats. What is left out stays left out."""
        return replace(
            self,
            repeats=repeats,
            dpsgd_repeats=repeats if self.dpsgd_repeats else 0,
            proven_repeats=repeats if self.proven_repeats else 0,
        )


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
        proven = PAPER_REPEATS if name in LIKE_FOR_LIKE_DATASETS else 0
        return _Workload(effort, PAPER_REPEATS, PAPER_REPEATS, proven, (1, 100))
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

    Every group has a trial of the plain network, and that is its first.
    """
    trials = []
    for name in names:
        work = _workload(name, profile)
        if repeats is not None:
            work = work.with_repeats(repeats)
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
