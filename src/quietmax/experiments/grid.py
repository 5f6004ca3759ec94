"""Cell: one point of an evaluation, named by everything its result depends on."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from quietmax.data.registry import dataset
from quietmax.data.tables import is_table_path

_FORMAT = 1
"""Raised whenever the meaning of a stored result changes, so that old results are not taken for new ones."""


@dataclass(frozen=True)
class Source:
    """Which records: a registered data set, or the user's own file with its declarations as JSON text."""

    name: str
    declared: str = "{}"
    digest: str = ""

    @classmethod
    def of(cls, name: str, declared: dict[str, Any] | None = None) -> Source:
        """The source of that name; a file is known by its contents, so a changed one is another source.

        So is the file that declares it, named or beside it (`quietmax.load`).

        >>> Source.of("mnist").title
        'mnist'
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
    shadows: int
    alpha: float = 1.0
    epochs: int = 100
    attack_epochs: int = 100
    attacks: tuple[str, ...] = ("shadow",)


@dataclass(frozen=True)
class Group:
    """The cells that share a split of the records, the networks trained on it and the attacks fitted to them."""

    source: Source
    effort: Effort
    repeat: int = 0
    seed: int = 0

    @cached_property
    def key(self) -> str:
        """A stable name, usable as a folder's."""
        return f"{_plain(self.source.title)}-{self.repeat}-{_digest(asdict(self))}"


@dataclass(frozen=True)
class Trial:
    """One method at one epsilon on one repeat; ``queries`` is the number of answers the epsilon pays for.

    ``epsilon`` is None for methods without privacy, ``queries`` for methods that answer any number.

    >>> trial = Trial(Group(Source("mnist"), Effort(records=100, shadows=2)), "head", 1.0)
    >>> trial.key.split("/")[1].startswith("head-1-any")
    True
    """

    group: Group
    method: str
    epsilon: float | None = None
    queries: int | None = None

    @cached_property
    def key(self) -> str:
        """A stable name: the group's folder and a file in it."""
        words = [self.method, *([] if self.epsilon is None else [f"{self.epsilon:g}"])]
        words.append("any" if self.queries is None else str(self.queries))
        return f"{self.group.key}/{_plain('-'.join(words))}-{_digest(self.to_json())}"

    @property
    def noise_seed(self) -> int:
        """A seed of its own for the cell's noise."""
        return int(hashlib.sha256(self.key.encode()).hexdigest()[:12], 16)

    def to_json(self) -> dict[str, Any]:
        """Everything the result depends on."""
        return {"format": _FORMAT, **asdict(self)}

    def __str__(self) -> str:
        epsilon = "" if self.epsilon is None else f", epsilon {self.epsilon:g}"
        queries = "" if self.queries is None else f", {self.queries} queries"
        return f"{self.group.source.title}, {self.method}{epsilon}{queries}, repeat {self.group.repeat}"


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]", "_", text)
