"""Metrics for Prometheus and the dashboard. They name no client."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from quietmax.ledger.accounts import AccountState

CONTENT_TYPE = CONTENT_TYPE_LATEST
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LATENCY_SAMPLES = 2000


class Metrics:
    """Counters of a service."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._worker = 0
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "quietmax_requests",
            "Inference requests.",
            ["model", "version", "status"],
            registry=self._registry,
        )
        self._answers = Counter(
            "quietmax_answers",
            "Rows answered, with a new or a cached answer.",
            ["model", "version", "origin"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "quietmax_request_seconds",
            "Duration of answered inference requests.",
            ["model", "version"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._spent = Gauge(
            "quietmax_budget_spent_fraction",
            "Fraction of the budget that is spent.",
            ["account"],
            registry=self._registry,
            multiprocess_mode="mostrecent",
        )
        self._ledger_up = Gauge(
            "quietmax_ledger_up",
            "Whether the ledger is available.",
            registry=self._registry,
            multiprocess_mode="mostrecent",
        )
        self._connections = Gauge(
            "quietmax_connections",
            "Open connections.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self._dropped_lines = Gauge(
            "quietmax_log_lines_dropped",
            "Lines of the log that were dropped because nobody read them.",
            registry=self._registry,
            multiprocess_mode="sum",
        )
        self._refused = Counter(
            "quietmax_refused_connections",
            "Connections that were ended because of a limit or an invalid request.",
            ["reason"],
            registry=self._registry,
        )
        self._children: dict[tuple[Any, ...], Any] = {}
        self._recent: dict[str, _RecentSeconds] = {}

    @classmethod
    def of_worker(cls, folder: Path, number: int) -> Metrics:
        """Return the metrics of one worker, which are shown together with those of all others.

        A worker that is started again goes on with the counters of the one that died. Call this at most once in a
        process, before it creates other metrics.
        """
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
        values.ValueClass = values.MultiProcessValue(lambda: number)  # type: ignore[no-untyped-call]
        mark_process_dead(number, str(folder))  # type: ignore[no-untyped-call]
        metrics = cls()
        metrics._folder, metrics._worker = folder, number
        return metrics

    def count_request(self, model: str, version: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._child(self._requests, model, version, status).inc()
        if status == 200:
            self._child(self._seconds, model, version).observe(seconds)
            label = f"{model}/{version}"
            if label not in self._recent:
                self._recent[label] = self._new_recent(label)
            self._recent[label].append(seconds)

    def _child(self, metric: Any, *labels: str | int) -> Any:
        """Return the metric with these labels. `labels` itself takes a lock and makes strings, for every request."""
        key = (metric, *labels)
        if key not in self._children:
            try:
                self._children[key] = metric.labels(*labels)
            except OSError:  # somebody has removed the folder: no reason to fail a request
                return _NOT_COUNTED
        return self._children[key]

    def count_answers(self, model: str, version: str, new: int, cached: int) -> None:
        """Count answered rows."""
        if new:
            self._child(self._answers, model, version, "new").inc(new)
        if cached:
            self._child(self._answers, model, version, "cached").inc(cached)

    def set_connections(self, count: int) -> None:
        """State how many connections are open."""
        self._connections.set(count)

    def set_dropped_lines(self, count: int) -> None:
        """State how many lines of the log were dropped so far."""
        self._dropped_lines.set(count)

    def count_refused(self, reason: str) -> None:
        """Count a connection that was ended because of a limit or an invalid request."""
        self._child(self._refused, reason).inc()

    def latency(self, label: str) -> dict[str, float] | None:
        """Return median and 99th percentile of the latest requests in seconds; None if there were none."""
        recent = np.sort(np.concatenate([np.empty(0), *self._recent_of_all_workers(label)]))
        if not len(recent):
            return None
        return {
            "median": float(recent[len(recent) // 2]),
            "p99": float(recent[min(int(len(recent) * 0.99), len(recent) - 1)]),
        }

    def _new_recent(self, label: str) -> _RecentSeconds:
        try:
            return _RecentSeconds(self._recent_file(label, str(self._worker)))
        except OSError:  # as above
            return _RecentSeconds(None)

    def _recent_file(self, label: str, worker: str) -> Path | None:
        """Return the file of a worker's latest requests to a model; None if there are no other workers."""
        name = label.replace("/", "@")  # neither a model's name nor its version has this character
        return None if self._folder is None else self._folder / f"recent@{worker}@{name}"

    def _recent_of_all_workers(self, label: str) -> list[NDArray[np.float64]]:
        pattern = self._recent_file(label, "*")
        if pattern is None:
            return [self._recent[label].values] if label in self._recent else []
        return [_RecentSeconds(file).values for file in pattern.parent.glob(pattern.name)]

    def exposition(self, accounts: list[AccountState] | None) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        self._ledger_up.set(0 if accounts is None else 1)
        for account in accounts or []:
            self._spent.labels(account.name).set(
                account.spent_units / account.limit_units if account.limit_units else 1.0
            )
        if self._folder is None or not self._folder.is_dir():
            return generate_latest(self._registry)
        of_all_workers = CollectorRegistry()
        MultiProcessCollector(of_all_workers, str(self._folder))  # type: ignore[no-untyped-call]
        return generate_latest(of_all_workers)


class _NotCounted:
    """Stands for a metric that cannot be written."""

    def inc(self, _: float = 1) -> None:
        pass

    def observe(self, _: float) -> None:
        pass


_NOT_COUNTED = _NotCounted()


class _RecentSeconds:
    """The durations of the latest requests, in memory or in a file that other processes read."""

    def __init__(self, file: Path | None) -> None:
        self._ring: NDArray[np.float64] = np.zeros(_LATENCY_SAMPLES)
        if file is not None:
            file.touch()  # the file then grows to its size
            self._ring = np.memmap(file, np.float64, "r+", shape=(_LATENCY_SAMPLES,))
        self._next = 0

    def append(self, seconds: float) -> None:
        """Replace the oldest duration; 0 means that there is none."""
        self._ring[self._next] = seconds
        self._next = (self._next + 1) % _LATENCY_SAMPLES

    @property
    def values(self) -> NDArray[np.float64]:
        """The durations, in no order."""
        return np.asarray(self._ring[self._ring > 0])
