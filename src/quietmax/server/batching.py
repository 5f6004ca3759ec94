"""The pipeline of a request: charge, draw, store, answer, in this order and no other.

Requests that wait together are charged in one transaction (in the ledger's thread) and drawn in one call of the model,
so that they share a disk flush and a matrix product. Charges wait as long as the event loop goes on reading requests.
Noise is drawn only after the charge is durable. A request with an id is answered only after its answer is stored
durably, so that a retry can never get a second draw for one charge; other answers are handed to the ledger before its
next charge, and stored with its next transaction. Answers that cost nothing are neither charged nor stored.

Models that take little time are drawn in the event loop: to hand a request to another thread and back takes longer than
a product of two small matrices. The scores of large batches, which have no noise and are not released, are computed
while the charge is being written. Other models are drawn in a thread of their own, so that they delay nobody else.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from quietmax.errors import LedgerTooLate, QuietmaxError
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
from quietmax.mechanisms.base import Answers, Floats
from quietmax.server.auth import Caller
from quietmax.server.codec import InferenceRequest, _pack_answers, _packed_width, _unpack_answers
from quietmax.server.deployment import Deployment, Rows
from quietmax.server.errors import HttpError, _ledger_error
from quietmax.server.settings import Settings

_Number = TypeVar("_Number", bound=np.generic)
_MAX_BATCH_ROWS = 2048
_MAX_SECONDS_IN_LOOP = 0.01
"""Draws that are expected to take longer are made in the drawing thread."""
_MIN_SECONDS_TO_SCORE = 0.001
"""Draws that are expected to take less are not split: two threads would compete for the interpreter."""
_HOLD_SECONDS = 0.01
"""How long answers that nobody waits for are held back for the next charge."""
_MAX_WAIT_FOR_CHARGES = 0.02
_SWEEP_SECONDS = 0.5
_GRACE_SECONDS = 5.0
_TIMED_OUT = Failed(
    LedgerTooLate("The answer did not arrive in time. A retry with the same id is not charged twice.")
)


@dataclass(frozen=True, slots=True)
class Reply:
    """The answers to a request, and what was charged for them."""

    answers: Answers  # One answer for each row
    units: int  # Units that were charged
    new_answers: int  # Number of answers that were drawn for this request
    remaining_units: int | None  # Units that the client has left. None: answers are free


Result = Reply | ChargeResult


@dataclass(slots=True, eq=False)
class _Pending:
    """A request in flight. `keys` name its rows in the answer cache, `new_rows` are those to draw.

    `scores` are those of all rows, if they were computed during the charge, and took `scoring_seconds`.
    """

    deployment: Deployment
    rows: Rows
    future: asyncio.Future[Result]
    deadline: float
    keys: list[bytes] = field(default_factory=list)
    request_key: bytes | None = None
    charged: Charged | None = None
    new_rows: Sequence[int] = ()
    scores: Floats | None = None
    scoring_seconds: float = 0.0


@dataclass(slots=True)
class _DrawTime:
    """How long a model took to draw: the shortest of recent times, in total and per row."""

    seconds: float = math.inf
    seconds_per_row: float = math.inf

    def _add(self, seconds: float, rows: int) -> None:
        self.seconds = min(seconds, 1.05 * self.seconds)
        self.seconds_per_row = min(seconds / rows, 1.05 * self.seconds_per_row)

    def _expected(self, rows: int) -> float:
        return max(self.seconds, self.seconds_per_row * rows)


class Pipeline:
    """Charges, draws, stores and answers the requests of one event loop."""

    def __init__(self, ledger: Ledger, settings: Settings) -> None:
        self._ledger = ledger
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._in_flight: set[_Pending] = set()
        self._free: list[_Pending] = []
        self._charges: list[tuple[Charge, _Pending]] = []
        self._decided: deque[tuple[_Pending, ChargeResult]] = deque()
        self._announced = False  # the event loop will look at `_decided`
        self._held: list[NewAnswers] = []
        self._draw_times: WeakKeyDictionary[Deployment, _DrawTime] = WeakKeyDictionary()
        self._sweeper = self._loop.create_task(self._sweep())
        self._to_draw: deque[list[_Pending]] = deque()
        self._drawing = ThreadPoolExecutor(1, "drawing")

    async def _infer(self, deployment: Deployment, request: InferenceRequest, caller: Caller) -> Result:
        """Charge a request, then answer it; return the answers, or why there are none."""
        if len(self._in_flight) >= self._settings.max_in_flight:
            raise HttpError(503, "Too many requests are in flight. Nothing was charged.")
        pending = _Pending(
            deployment,
            request.rows,
            self._loop.create_future(),
            time.monotonic() + self._settings.timeout,
        )
        self._in_flight.add(pending)
        try:
            if deployment.unit_cost == 0:
                if self._ledger.writer.error is not None:
                    raise _ledger_error(self._ledger.writer.error)
                self._draw_soon(pending)
            else:
                self._charge_soon(self._charge(pending, request, caller), pending)
            return await pending.future
        finally:
            self._in_flight.discard(pending)

    async def _close(self) -> None:
        """Answer the requests in flight, then stop."""
        while self._in_flight:
            await asyncio.sleep(0.01)
        self._submit_held()
        self._sweeper.cancel()
        await asyncio.to_thread(self._drawing.shutdown)

    def _charge(self, pending: _Pending, request: InferenceRequest, caller: Caller) -> Charge:
        deployment = pending.deployment
        distinct: tuple[bytes, ...] = ()
        if self._settings.answer_cache:
            rows = np.ascontiguousarray(request.rows)
            pending.keys = self._ledger.query_keys(
                deployment.digest, rows.data.cast("B"), rows.nbytes // len(rows)
            )
            distinct = tuple(dict.fromkeys(pending.keys))
        body = b""
        if request.id is not None:
            pending.request_key = self._ledger.request_key(caller.client_id, request.id)
            body = _body_digest(deployment, request)
        return Charge(
            deployment.account.id,
            caller.client_id,
            deployment.label,
            deployment.unit_cost,
            len(request.rows),
            caller.key,
            distinct,
            pending.request_key,
            body,
            deadline=pending.deadline,
            expires=caller.expires,
        )

    # In the ledger's thread

    def _on_charged(self, waiting: list[_Pending], results: list[ChargeResult]) -> None:
        """Hand results to the event loop, which wakes up once for all results of a transaction."""
        self._decided.extend(zip(waiting, results, strict=True))
        if not self._announced:
            self._announced = True
            self._loop.call_soon_threadsafe(self._take_decided)

    def _on_stored(self, pending: _Pending, reply: Reply, result: StoredAnswer | Failed) -> None:
        if isinstance(result, Failed):
            self._finish([(pending, result)])
        elif result.first:
            self._finish([(pending, reply)])
        else:
            answers = _unpack_bytes(result.answer, pending.deployment)
            # Another try of the same id was stored first: its draw is the one that all tries report.
            self._finish([(pending, Reply(answers, reply.units, 0, reply.remaining_units))])

    def _finish(self, finished: list[tuple[_Pending, Result]]) -> None:
        if finished:
            self._loop.call_soon_threadsafe(_deliver, finished)

    # In the drawing thread

    def _draw_in_thread(self) -> None:
        """Draw for all requests that wait; those of one deployment together."""
        waiting: list[_Pending] = []
        while self._to_draw:
            waiting += self._to_draw.popleft()
        for group in _groups(waiting):
            finished, stored = self._answer_group(group)
            if stored is not None:
                self._ledger.submit_answers(stored, _ignore)
            self._finish(finished)

    # In the drawing thread or the event loop

    def _answer_group(self, group: list[_Pending]) -> tuple[list[tuple[_Pending, Result]], NewAnswers | None]:
        """Draw for requests to one deployment; return the replies that may leave and the answers to store."""
        try:
            assembled = self._assembled(group)
        except Exception as error:
            failed = Failed(
                QuietmaxError(f"The model failed ({type(error).__name__}). The charge is not refunded.")
            )
            return [(pending, failed) for pending in group], None
        finished: list[tuple[_Pending, Result]] = []
        keys: list[bytes] = []
        new: list[bytes] = []
        for pending, reply, packed in assembled:
            new_keys, new_packed = _new_answers(pending, packed)
            if packed is not None and pending.request_key is not None:
                stored = NewAnswers(
                    pending.deployment.account.id,
                    new_keys,
                    new_packed,
                    pending.request_key,
                    packed.tobytes(),
                    pending.deadline,
                )
                self._ledger.submit_answers(stored, partial(self._on_stored, pending, reply))
            else:
                keys += new_keys
                new.append(new_packed)
                finished.append((pending, reply))
        if not keys:
            return finished, None
        deadline = max(pending.deadline for pending, _ in finished)
        account = group[0].deployment.account.id
        return finished, NewAnswers(account, tuple(keys), b"".join(new), deadline=deadline)

    def _assembled(self, group: list[_Pending]) -> list[tuple[_Pending, Reply, NDArray[np.uint8] | None]]:
        started = time.perf_counter()
        drawn = _draw(group)
        rows = sum(len(pending.new_rows) for pending in group)
        if rows:
            scoring = sum(pending.scoring_seconds for pending in group)
            self._draw_time(group)._add(time.perf_counter() - started + scoring, rows)
        return [(pending, *_assemble(pending, *each)) for pending, each in zip(group, drawn, strict=True)]

    def _draw_time(self, group: list[_Pending]) -> _DrawTime:
        return self._draw_times.setdefault(group[0].deployment, _DrawTime())

    # In the event loop

    def _charge_soon(self, charge: Charge, pending: _Pending) -> None:
        """Charge a request together with those that the event loop is about to read.

        A charge waits as long as each turn of the event loop brings another one. Few large transactions take less time
        than many small ones, and the ledger's thread does not compete for the interpreter while requests are decoded.
        """
        self._charges.append((charge, pending))
        if len(self._charges) == 1:
            self._loop.call_soon(self._submit_charges, 1, time.monotonic() + _MAX_WAIT_FOR_CHARGES)

    def _submit_charges(self, seen: int, until: float) -> None:
        waiting = len(self._charges)
        if waiting > seen and time.monotonic() < until:
            self._loop.call_soon(self._submit_charges, waiting, until)
            return
        self._submit_held()  # so that the charges find these answers
        charges, self._charges = self._charges, []
        requests = [pending for _, pending in charges]
        self._ledger.submit_charges([charge for charge, _ in charges], partial(self._on_charged, requests))
        self._score(requests)

    def _score(self, waiting: list[_Pending]) -> None:
        """Compute the scores of large batches in the event loop, which would wait for the disk otherwise."""
        for group in _groups(waiting):
            answerer = group[0].deployment.answerer
            rows = sum(len(pending.rows) for pending in group)
            expected = self._draw_time(group)._expected(rows)
            if answerer is None or not _MIN_SECONDS_TO_SCORE < expected <= _MAX_SECONDS_IN_LOOP:
                continue
            started = time.perf_counter()
            try:
                scores = answerer.scores(_concatenated([pending.rows for pending in group]))
            except Exception:  # the draw will meet it again, and report it
                continue
            seconds = time.perf_counter() - started
            start = 0
            for pending in group:
                pending.scores = scores[start : start + len(pending.rows)]
                pending.scoring_seconds = seconds * len(pending.rows) / rows
                start += len(pending.rows)

    def _draw_soon(self, pending: _Pending) -> None:
        """Draw for a free request together with those that the event loop reads at the same time."""
        self._free.append(pending)
        if len(self._free) == 1:
            self._loop.call_soon(self._draw_free)

    def _draw_free(self) -> None:
        waiting, self._free = self._free, []
        self._draw_all(waiting)

    def _take_decided(self) -> None:
        """Draw for the requests that were charged, and reply to the others."""
        self._announced = False  # before the first look, so that no result is missed
        charged: list[_Pending] = []
        finished: list[tuple[_Pending, Result]] = []
        while self._decided:
            pending, result = self._decided.popleft()
            if isinstance(result, Charged):
                pending.charged = result
                charged.append(pending)
            elif isinstance(result, Replayed):
                answers = _unpack_bytes(result.answer, pending.deployment)
                finished.append((pending, Reply(answers, 0, 0, result.remaining_units)))
            else:
                finished.append((pending, result))
        _deliver(finished)
        self._draw_all(charged)

    def _draw_all(self, waiting: list[_Pending]) -> None:
        """Draw for requests in groups of one deployment, here or in the drawing thread."""
        for group in _groups(waiting):
            rows = sum(len(pending.rows) for pending in group)
            if self._draw_time(group)._expected(rows) > _MAX_SECONDS_IN_LOOP:
                self._to_draw.append(group)
                self._drawing.submit(self._draw_in_thread)
                continue
            finished, stored = self._answer_group(group)
            if stored is not None:
                self._hold(stored)
            _deliver(finished)

    def _hold(self, stored: NewAnswers) -> None:
        self._held.append(stored)
        if len(self._held) == 1:
            self._loop.call_later(_HOLD_SECONDS, self._submit_held)

    def _submit_held(self) -> None:
        held, self._held = self._held, []
        for stored in held:
            self._ledger.submit_answers(stored, _ignore)

    async def _sweep(self) -> None:
        """Give up on requests that are long overdue; what was charged for them is spent, but stored by id."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            overdue = time.monotonic() - _GRACE_SECONDS
            _deliver(
                [(pending, _TIMED_OUT) for pending in list(self._in_flight) if pending.deadline < overdue]
            )


def _groups(waiting: list[_Pending]) -> list[list[_Pending]]:
    """Split requests into groups that are drawn together: of one deployment, and not too large."""
    groups: dict[Deployment, list[list[_Pending]]] = {}
    sizes: dict[Deployment, int] = defaultdict(int)
    for pending in waiting:
        deployment = pending.deployment
        if deployment not in groups or sizes[deployment] >= _MAX_BATCH_ROWS:
            groups.setdefault(deployment, []).append([])
            sizes[deployment] = 0
        groups[deployment][-1].append(pending)
        sizes[deployment] += len(pending.rows)
    return [group for each in groups.values() for group in each]


def _draw(group: list[_Pending]) -> list[tuple[Answers, NDArray[np.uint8]]]:
    """Draw for all new rows of a group in one call; return the draws of each request, and their packed form."""
    deployment = group[0].deployment
    parts = []
    scores = []
    for pending in group:
        pending.new_rows = _new_rows(pending)
        chosen = slice(None) if len(pending.new_rows) == len(pending.rows) else list(pending.new_rows)
        parts.append(pending.rows[chosen])
        if pending.scores is not None:
            scores.append(pending.scores[chosen])
    if not any(map(len, parts)):
        return [(Answers(np.empty(0, np.int64), None), np.empty((0, 0), np.uint8))] * len(parts)
    if deployment.answerer is not None and len(scores) == len(parts):
        drawn = deployment.answerer.release(_concatenated(scores))
    else:
        drawn = deployment.answer(_concatenated(parts))
    stored = any(pending.keys or pending.request_key is not None for pending in group)
    packed = _pack_answers(drawn) if stored else np.empty((0, 0), np.uint8)
    answers = []
    start = 0
    for part in parts:
        end = start + len(part)
        probabilities = None if drawn.probabilities is None else drawn.probabilities[start:end]
        answers.append((Answers(drawn.labels[start:end], probabilities), packed[start:end]))
        start = end
    return answers


def _concatenated(parts: list[NDArray[_Number]]) -> NDArray[_Number]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _new_rows(pending: _Pending) -> Sequence[int]:
    """Return the rows to draw: all but those in the answer cache and repetitions."""
    if not pending.keys or (pending.charged is not None and pending.charged.answers == len(pending.rows)):
        return range(len(pending.rows))
    seen = set() if pending.charged is None else set(pending.charged.cached)
    new = []
    for row, key in enumerate(pending.keys):
        if key not in seen:
            seen.add(key)
            new.append(row)
    return new


def _assemble(
    pending: _Pending, answers: Answers, packed: NDArray[np.uint8]
) -> tuple[Reply, NDArray[np.uint8] | None]:
    """Put the answers of a request together; return them packed, too, if they will be stored."""
    charged = pending.charged
    if charged is None:
        return Reply(answers, 0, 0, None), None
    reply = Reply(answers, charged.units, charged.answers, charged.remaining_units)
    if not pending.keys and pending.request_key is None:
        return reply, None
    if len(pending.new_rows) < len(pending.rows):
        by_key = {key: np.frombuffer(answer, np.uint8) for key, answer in charged.cached.items()}
        by_key.update((pending.keys[row], packed[index]) for index, row in enumerate(pending.new_rows))
        packed = np.stack([by_key[key] for key in pending.keys])
        reply = replace(reply, answers=_unpack_answers(packed))
    return reply, packed


def _new_answers(pending: _Pending, packed: NDArray[np.uint8] | None) -> tuple[tuple[bytes, ...], bytes]:
    """Return keys and packed answers of the rows that were drawn, for the answer cache."""
    if packed is None or not pending.keys or not pending.new_rows:
        return (), b""
    if len(pending.new_rows) == len(pending.rows):
        return tuple(pending.keys), packed.tobytes()
    rows = list(pending.new_rows)
    return tuple(pending.keys[row] for row in rows), packed[rows].tobytes()


def _unpack_bytes(answer: bytes, deployment: Deployment) -> Answers:
    return _unpack_answers(np.frombuffer(answer, np.uint8).reshape(-1, _packed_width(deployment)))


def _body_digest(deployment: Deployment, request: InferenceRequest) -> bytes:
    """Return a digest of the model version and the features; the requested outputs change no answer."""
    digest = hashlib.sha256(deployment.label.encode() + b" " + deployment.digest)
    digest.update(b"%d %d " % request.rows.shape)
    digest.update(request.rows.tobytes())
    return digest.digest()


def _deliver(finished: list[tuple[_Pending, Result]]) -> None:
    for pending, result in finished:
        if not pending.future.done():
            pending.future.set_result(result)


def _ignore(_: StoredAnswer | Failed) -> None:
    """Nobody waits until an answer without a request id is stored."""
