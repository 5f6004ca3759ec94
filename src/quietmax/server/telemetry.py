"""OpenTelemetry: a trace of each inference request, and metrics, exported over OTLP.

A request only notes when its phases began and ended: parse, charge (with the flush of the ledger inside) and draw. The
spans are made when it ends. Attributes are the model, the version, the number of rows and the status; inputs, answers,
keys, clients and request ids are never exported. OpenTelemetry is imported only if it is used.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any

from quietmax import __version__
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.ledger.ledger import Ledger

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_CLOSE_SECONDS = 3.0
_PROTOCOL = "http/protobuf"


class Trace:
    """When the phases of one request began and ended, in nanoseconds since 1970. Any thread may add one."""

    __slots__ = ("phases", "started", "token")

    def __init__(self) -> None:
        self.started = time.time_ns()
        self.phases: list[tuple[str, int, int, str | None]] = []
        self.token: Token[Trace | None] | None = None

    def add(self, name: str, started: int, ended: int, parent: str | None = None) -> None:
        """Add a phase."""
        self.phases.append((name, started, ended, parent))


_current: ContextVar[Trace | None] = ContextVar("quietmax_trace", default=None)


def current_trace() -> Trace | None:
    """Return the trace of the request that is handled; None if there is no telemetry."""
    return _current.get()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Add a phase to the trace of the request that is handled, if there is one."""
    trace = _current.get()
    if trace is None:
        yield
        return
    started = time.time_ns()
    try:
        yield
    finally:
        trace.add(name, started, time.time_ns())


def check_telemetry() -> None:
    """Raise if telemetry cannot be exported: a package is missing, or a variable has an unsupported value."""
    for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise QuietmaxError(
                f"Telemetry requires the package {package.replace('.', '-')}. Install: pip install 'quietmax[otel]'."
            )
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", _PROTOCOL)
    if protocol != _PROTOCOL:
        raise InvalidInput(f"OTEL_EXPORTER_OTLP_PROTOCOL must be {_PROTOCOL}, got {protocol!r}.")


class Telemetry:
    """Exports traces and metrics of one server process, as the variables OTEL_* say."""

    def __init__(self, ledger: Ledger) -> None:
        check_telemetry()
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._ledger = ledger
        own = {"service.instance.id": str(uuid.uuid4()), "service.version": __version__}
        if "OTEL_SERVICE_NAME" not in os.environ:
            own["service.name"] = "quietmax"
        resource = Resource.create(own)
        self._tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        if os.environ.get("OTEL_TRACES_EXPORTER") != "none":
            self._tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        readers = []
        if os.environ.get("OTEL_METRICS_EXPORTER") != "none":
            readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
        self._meters = MeterProvider(readers, resource, shutdown_on_exit=False)
        self._tracer = self._tracers.get_tracer("quietmax", __version__)
        self._create_instruments()

    def begin(self) -> Trace:
        """Begin the trace of a request, in the task that handles it."""
        trace = Trace()
        trace.token = _current.set(trace)
        return trace

    def end(
        self, trace: Trace, *, model: str, version: str, rows: int, status: int, traceparent: str | None
    ) -> None:
        """End the trace of a request: make its spans and count it."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if trace.token is not None:
            _current.reset(trace.token)
        ended = time.time_ns()
        labels: dict[str, str | int] = {
            "quietmax.model": model,
            "quietmax.version": version,
            "http.response.status_code": status,
        }
        self._seconds.record((ended - trace.started) / 1e9, labels)
        parent = (
            None
            if traceparent is None
            else TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        )
        span = self._tracer.start_span(
            "infer", parent, SpanKind.SERVER, {**labels, "quietmax.rows": rows}, start_time=trace.started
        )
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        contexts: dict[str | None, Context] = {None: set_span_in_context(span)}
        for name, started, phase_ended, inside in list(trace.phases):
            child = self._tracer.start_span(name, contexts.get(inside, contexts[None]), start_time=started)
            child.end(phase_ended)
            contexts[name] = set_span_in_context(child)
        span.end(ended)

    def count_answers(self, model: str, version: str, new: int, cached: int) -> None:
        """Count answered rows."""
        for origin, count in (("new", new), ("cached", cached)):
            if count:
                labels = {"quietmax.model": model, "quietmax.version": version, "quietmax.origin": origin}
                self._answers.add(count, labels)

    def close(self) -> None:
        """Export what waits, for a few seconds at most, and stop."""
        thread = threading.Thread(target=self._shut_down, daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)

    def _shut_down(self) -> None:
        self._tracers.shutdown()
        self._meters.shutdown()

    def _create_instruments(self) -> None:
        meter = self._meters.get_meter("quietmax", __version__)
        self._seconds = meter.create_histogram(
            "quietmax.request.duration",
            "s",
            "Duration of inference requests.",
            explicit_bucket_boundaries_advisory=_BUCKETS,
        )
        self._answers = meter.create_counter("quietmax.answers", "{row}", "Rows answered.")
        meter.create_observable_gauge(
            "quietmax.budget.spent_fraction", [self._spent], "1", "Fraction of the budget that is spent."
        )
        meter.create_observable_gauge(
            "quietmax.ledger.up", [self._ledger_up], "1", "Whether the ledger is available."
        )

    def _spent(self, _: Any) -> Iterable[Any]:
        from opentelemetry.metrics import Observation

        try:
            accounts = self._ledger.accounts()
        except QuietmaxError:
            return []
        return [
            Observation(
                account.spent_units / account.limit_units if account.limit_units else 1.0,
                {"quietmax.account": account.name},
            )
            for account in accounts
        ]

    def _ledger_up(self, _: Any) -> Iterable[Any]:
        from opentelemetry.metrics import Observation

        try:
            self._ledger.accounts()
        except QuietmaxError:
            return [Observation(0)]
        return [Observation(1)]
