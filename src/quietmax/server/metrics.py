"""Counters for Prometheus and for the dashboard. No client's name is in them."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict, deque
from typing import BinaryIO

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from quietmax.ledger.accounts import AccountState

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_RECENT = 2000


class Metrics:
    """What happened in this process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "quietmax_requests",
            "Inference requests.",
            ["model", "version", "status"],
            registry=self._registry,
        )
        self._answers = Counter(
            "quietmax_answers",
            "Rows answered, new or from a stored answer.",
            ["model", "version", "origin"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "quietmax_request_seconds",
            "Time from the request to its answer.",
            ["model", "version"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._spent = Gauge(
            "quietmax_budget_spent_fraction",
            "Part of the budget that is spent.",
            ["account"],
            registry=self._registry,
        )
        self._up = Gauge("quietmax_ledger_up", "Whether the ledger can be used.", registry=self._registry)
        self._recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))

    def request(self, model: str, version: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(model, version, status).inc()
        if status == 200:
            self._seconds.labels(model, version).observe(seconds)
            self._recent[f"{model}/{version}"].append(seconds)

    def answers(self, model: str, version: str, new: int, stored: int) -> None:
        """Count answered rows."""
        if new:
            self._answers.labels(model, version, "new").inc(new)
        if stored:
            self._answers.labels(model, version, "stored").inc(stored)

    def latency(self, label: str) -> dict[str, float] | None:
        """Median and 99th percentile of the last requests, in seconds."""
        recent = sorted(self._recent[label])
        if not recent:
            return None
        return {
            "median": recent[len(recent) // 2],
            "p99": recent[min(int(len(recent) * 0.99), len(recent) - 1)],
        }

    def page(self, accounts: list[AccountState] | None) -> bytes:
        """The metrics page; `accounts` is None if the ledger cannot be reached."""
        self._up.set(0 if accounts is None else 1)
        for account in accounts or []:
            self._spent.labels(account.name).set(
                account.spent_units / account.limit_units if account.limit_units else 1.0
            )
        return generate_latest(self._registry)


_EVERY_SECONDS = 0.25


class Log:
    """Writes lines; they are flushed four times a second, and at once if they are no mere requests."""

    def __init__(self, stream: BinaryIO | None = None) -> None:
        self._stream = sys.stderr.buffer if stream is None else stream
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []
        self._flushed = 0.0

    def event(self, event: str, **fields: str | int | float | bool | None) -> None:
        """Write an event at once."""
        self._append(event, fields)
        self.flush()

    def request(self, **fields: str | int | float | None) -> None:
        """Write a request with the next flush."""
        self._append("request", fields)
        if time.monotonic() - self._flushed > _EVERY_SECONDS:
            self.flush()

    def _append(self, event: str, fields: dict[str, str | int | float | bool | None]) -> None:
        self._waiting.append(orjson.dumps({"time": round(time.time(), 3), "event": event, **fields}))

    def flush(self) -> None:
        """Write what waits."""
        with self._lock:
            lines, self._waiting = self._waiting, []
            self._flushed = time.monotonic()
            if lines:
                try:
                    self._stream.write(b"\n".join(lines) + b"\n")
                    self._stream.flush()
                except (OSError, ValueError):
                    return
