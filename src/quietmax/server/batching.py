"""From a query to its answer: charge, draw, store, answer, in this order and no other.

Requests that wait together are charged in one transaction (by the ledger's thread) and drawn in one go (by this
module's thread): a disk flush and a matrix product serve all of them. Noise is drawn only after the charge is durable.
A request with an id is answered only after its answer is stored durably, so that a retry can never get a second draw
for one charge; other answers are handed to the ledger before they are sent, and written with its next group.
"""

from __future__ import annotations

import asyncio
import hashlib
import queue
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from quietmax.errors import LedgerUnavailable, QuietmaxError
from quietmax.ledger.ledger import Ledger
from quietmax.ledger.transactions import (
    Charge,
    Charged,
    ChargeResult,
    Failed,
    NewAnswers,
    Replayed,
    StoredAnswer,
)
from quietmax.server.auth import Caller
from quietmax.server.codec import Packed, Query, packed, packed_width
from quietmax.server.deployment import Deployment
from quietmax.server.errors import unavailable
from quietmax.server.repository import Rows
from quietmax.server.settings import Settings

_MOST_ROWS_AT_ONCE = 4096
_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Packed answers, what they cost in units, how many were new, and what is left for this client."""

    rows: Packed
    units: int
    answers: int
    remaining_units: int | None


Result = Answer | ChargeResult


@dataclass(slots=True, eq=False)
class _Ask:
    """A query on its way."""

    deployment: Deployment
    rows: Rows
    keys: list[bytes]
    request: bytes | None
    future: asyncio.Future[Result]
    deadline: float
    charged: Charged | None = None
    new: list[int] = field(default_factory=list)


class Pipeline:
    """Answers queries of one event loop."""

    def __init__(self, ledger: Ledger, settings: Settings) -> None:
        self._ledger = ledger
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._drawing: queue.SimpleQueue[_Ask | None] = queue.SimpleQueue()
        self._in_flight: set[_Ask] = set()
        self._sweeper = self._loop.create_task(self._sweep())
        self._thread = threading.Thread(target=self._draw_all, name="drawing", daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> int:
        """How many queries are on their way."""
        return len(self._in_flight)

    async def ask(self, deployment: Deployment, query: Query, caller: Caller) -> Result:
        """The answer to a query, or why there is none."""
        if len(self._in_flight) >= self._settings.max_waiting:
            raise unavailable("Too many requests are waiting; nothing was spent, ask again in a second.")
        ask = _Ask(
            deployment,
            query.rows,
            [],
            None,
            self._loop.create_future(),
            time.monotonic() + self._settings.seconds,
        )
        self._in_flight.add(ask)
        try:
            if deployment.unit_cost == 0:
                self._check_ledger()
                self._drawing.put(ask)
            else:
                self._ledger.submit_charge(self._charge(ask, query, caller), partial(self._charged, ask))
            return await ask.future
        finally:
            self._in_flight.discard(ask)

    async def close(self) -> None:
        """Answer what is under way, then stop."""
        while self._in_flight:
            await asyncio.sleep(0.01)
        self._sweeper.cancel()
        self._drawing.put(None)
        await asyncio.to_thread(self._thread.join)

    def _check_ledger(self) -> None:
        failing = self._ledger.writer.error
        if failing is not None:
            raise unavailable(str(failing))

    def _charge(self, ask: _Ask, query: Query, caller: Caller) -> Charge:
        deployment = ask.deployment
        distinct: tuple[bytes, ...] = ()
        if self._settings.stored_answers:
            digest = deployment.servable.digest
            ask.keys = [self._ledger.query_key(digest, row.tobytes()) for row in query.rows]
            distinct = tuple(dict.fromkeys(ask.keys))
        body = b""
        if query.id is not None:
            ask.request = self._ledger.request_key(caller.client_id, query.id)
            body = _body_digest(deployment, query)
        return Charge(
            deployment.account.id,
            caller.client_id,
            deployment.label,
            deployment.unit_cost,
            len(query.rows),
            caller.key,
            distinct,
            ask.request,
            body,
            deadline=ask.deadline,
        )

    # In the ledger's thread

    def _charged(self, ask: _Ask, outcome: ChargeResult) -> None:
        if isinstance(outcome, Charged):
            ask.charged = outcome
            self._drawing.put(ask)
        elif isinstance(outcome, Replayed):
            rows = np.frombuffer(outcome.answer, np.uint8).reshape(-1, packed_width(ask.deployment.servable))
            self._finish([(ask, Answer(rows, 0, 0, outcome.remaining_units))])
        else:
            self._finish([(ask, outcome)])

    def _stored(self, ask: _Ask, answer: Answer, kept: StoredAnswer | Failed) -> None:
        if isinstance(kept, Failed):
            self._finish([(ask, kept)])
        elif kept.first:
            self._finish([(ask, answer)])
        else:
            rows = np.frombuffer(kept.answer, np.uint8).reshape(answer.rows.shape)
            self._finish([(ask, Answer(rows, answer.units, answer.answers, answer.remaining_units))])

    # In the drawing thread

    def _draw_all(self) -> None:
        closing = False
        while not closing:
            asks: list[_Ask] = []
            size = 0
            item = self._drawing.get()
            try:
                while True:
                    if item is None:
                        closing = True
                        break
                    asks.append(item)
                    size += len(item.rows)
                    if size >= _MOST_ROWS_AT_ONCE:
                        break
                    item = self._drawing.get_nowait()
            except queue.Empty:
                pass
            by_deployment: dict[int, list[_Ask]] = defaultdict(list)
            for ask in asks:
                by_deployment[id(ask.deployment)].append(ask)
            for group in by_deployment.values():
                self._draw_group(group)

    def _draw_group(self, asks: list[_Ask]) -> None:
        try:
            answers = self._drawn(asks)
        except Exception as problem:
            failed = Failed(
                QuietmaxError(
                    f"The model failed in an unforeseen way ({type(problem).__name__}); what was charged is spent."
                )
            )
            self._finish([(ask, failed) for ask in asks])
            return
        finished: list[tuple[_Ask, Result]] = []
        keys: list[bytes] = []
        together: list[bytes] = []
        for ask, answer in zip(asks, answers, strict=True):
            queries, drawn = self._new_answers(ask, answer)
            if ask.request is not None:
                store = NewAnswers(
                    ask.deployment.account.id,
                    queries,
                    drawn,
                    ask.request,
                    answer.rows.tobytes(),
                    ask.deadline,
                )
                self._ledger.submit_answers(store, partial(self._stored, ask, answer))
                continue
            keys += queries
            together.append(drawn)
            finished.append((ask, answer))
        if keys:
            latest = max(ask.deadline for ask, _ in finished)
            store = NewAnswers(
                asks[0].deployment.account.id, tuple(keys), b"".join(together), deadline=latest
            )
            self._ledger.submit_answers(store, _ignore)
        self._finish(finished)

    def _new_answers(self, ask: _Ask, answer: Answer) -> tuple[tuple[bytes, ...], bytes]:
        """Keys and answers of the rows that were drawn, to be stored."""
        if not ask.keys or not ask.new:
            return (), b""
        if len(ask.new) == len(ask.rows):
            return tuple(ask.keys), answer.rows.tobytes()
        return tuple(ask.keys[row] for row in ask.new), answer.rows[ask.new].tobytes()

    def _drawn(self, asks: list[_Ask]) -> list[Answer]:
        """Draw for all rows that are new, in one go."""
        deployment = asks[0].deployment
        parts = []
        for ask in asks:
            stored = ask.charged.stored if ask.charged is not None else {}
            if ask.keys:
                seen = set(stored)
                ask.new = [row for row, key in enumerate(ask.keys) if not (key in seen or seen.add(key))]  # type: ignore[func-returns-value]
                parts.append(ask.rows if len(ask.new) == len(ask.rows) else ask.rows[ask.new])
            else:
                parts.append(ask.rows)
        together = parts[0] if len(parts) == 1 else np.concatenate(parts)
        drawn = packed(deployment.servable.answer(together)) if len(together) else None
        answers = []
        start = 0
        for ask, part in zip(asks, parts, strict=True):
            mine = (
                np.empty((0, packed_width(deployment.servable)), np.uint8)
                if drawn is None
                else drawn[start : start + len(part)]
            )
            start += len(part)
            answers.append(_assembled(ask, mine))
        return answers

    def _finish(self, finished: list[tuple[_Ask, Result]]) -> None:
        if finished:
            self._loop.call_soon_threadsafe(_deliver, finished)

    # In the event loop

    async def _sweep(self) -> None:
        """Give up on queries that are long overdue; what was charged for them is spent, but stored by id."""
        late = Failed(
            LedgerUnavailable(
                "The answer did not come in time; ask again with the same id, it is not paid twice."
            )
        )
        while True:
            await asyncio.sleep(0.5)
            moment = time.monotonic() - _GRACE_SECONDS
            _deliver([(ask, late) for ask in list(self._in_flight) if ask.deadline < moment])


def _deliver(finished: list[tuple[_Ask, Result]]) -> None:
    for ask, result in finished:
        if not ask.future.done():
            ask.future.set_result(result)


def _assembled(ask: _Ask, drawn: Packed) -> Answer:
    """All rows of a query: new ones as drawn, the others from what was stored."""
    charged = ask.charged
    if charged is None:
        return Answer(drawn, 0, 0, None)
    if not ask.keys or len(ask.new) == len(ask.rows):
        return Answer(drawn, charged.units, charged.answers, charged.remaining_units)
    by_key = {key: np.frombuffer(answer, np.uint8) for key, answer in charged.stored.items()}
    by_key.update((ask.keys[row], drawn[index]) for index, row in enumerate(ask.new))
    rows = np.stack([by_key[key] for key in ask.keys])
    return Answer(rows, charged.units, charged.answers, charged.remaining_units)


def _body_digest(deployment: Deployment, query: Query) -> bytes:
    """What a request asks: the model version and the features. Which outputs are wanted, and how, changes no answer."""
    asked = hashlib.sha256(deployment.label.encode() + b" " + deployment.servable.digest)
    asked.update(b"%d %d " % query.rows.shape)
    asked.update(query.rows.tobytes())
    return asked.digest()


def _ignore(_: StoredAnswer | Failed) -> None:
    """Nobody waits for an answer to be stored that has no id."""
