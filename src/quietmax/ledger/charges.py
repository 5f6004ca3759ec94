"""What is asked of the ledger for one request, and what it says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from quietmax.errors import InvalidInput, QuietmaxError


@dataclass(frozen=True, slots=True)
class Charge:
    """Pay for answers from an account and the client's part of it, both or neither.

    `rows` answers of `unit_cost` units each; with `queries` (one key for each different query) only those that have
    no stored answer. `request` makes a retry free; `body` tells whether it is the same request. A charge that has not
    begun at `deadline` (`time.monotonic`) is dropped. `key` is checked in the same transaction.
    """

    account: int
    client: int
    model: str
    unit_cost: int
    rows: int
    key: str | None = None
    queries: tuple[bytes, ...] = ()
    request: bytes | None = None
    body: bytes = b""
    kind: Literal["charge", "training", "carried over"] = "charge"
    deadline: float = math.inf

    def __post_init__(self) -> None:
        if self.unit_cost < 0 or self.rows < 0:
            raise InvalidInput(
                f"A charge of {self.rows} answers at {self.unit_cost} units each is less than nothing; give a cost "
                "and a number of answers that are not negative."
            )


@dataclass(frozen=True, slots=True)
class Charged:
    """The charge is durable: `answers` new ones may be drawn, the others are in `stored`.

    `left_units` is what remains for this client afterwards. `resumed`: an earlier try of the same request had paid
    already and its answer never left.
    """

    units: int
    answers: int
    left_units: int
    stored: Mapping[bytes, bytes] = field(default_factory=dict)
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Replayed:
    """This request was answered before; the stored answer again, at no cost."""

    answer: bytes
    left_units: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was charged: `whose` limit it was, and what remains of it."""

    whose: Literal["budget", "quota"]
    units: int
    left_units: int


@dataclass(frozen=True, slots=True)
class Reused:
    """Nothing was charged: the request id belongs to another request."""


@dataclass(frozen=True, slots=True)
class KeyEnded:
    """Nothing was charged: the key was revoked or has expired."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The ledger failed: nothing may be answered. Whether it was charged is unknown; a retry by id is free."""

    problem: QuietmaxError


Outcome = Charged | Replayed | Refused | Reused | KeyEnded | Failed


@dataclass(frozen=True, slots=True)
class Store:
    """Keep answers: by query, and the whole answer of a request that carries an id.

    `queries` are the keys of new queries to an account, `answers` theirs one after the other, all of one length.
    """

    account: int = 0
    queries: tuple[bytes, ...] = ()
    answers: bytes = b""
    request: bytes | None = None
    answer: bytes = b""
    deadline: float = math.inf


@dataclass(frozen=True, slots=True)
class Stored:
    """Kept. `answer` is the request's only one: the `first` that was stored, which may be another try's."""

    answer: bytes
    first: bool
