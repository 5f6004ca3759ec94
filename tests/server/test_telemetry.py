"""Traces and metrics, as an OTLP receiver gets them; once with a collector in between."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.ledger import Terms
from quietmax.server import Settings, telemetry
from quietmax.server.telemetry import check_telemetry, current_trace, phase
from tests.server.running_service import Running, Start, inference, some_rows

_TRACE = "0af7651916cd43dd8448eb211c80319c"
_PARENT = f"00-{_TRACE}-b7ad6b7169203331-01"


class Receiver:
    """What an OTLP endpoint has received: spans and metrics."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.metrics: dict[str, Any] = {}
        self.resources: list[dict[str, str]] = []
        self.raw = b""
        self.url = ""

    def receive(self, path: str, body: bytes) -> None:
        self.raw += body
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(
                    {each.key: each.value.string_value for each in resource.resource.attributes}
                )
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        elif path == "/v1/metrics":
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for scope in resource.scope_metrics:
                    self.metrics.update((metric.name, metric) for metric in scope.metrics)

    def trace(self, trace_id: str) -> list[Any]:
        return [span for span in self.spans if span.trace_id.hex() == trace_id]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    received = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            received.receive(self.path, body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield received
    server.shutdown()
    server.server_close()
    thread.join()


def _start(
    start: Start, monkeypatch: pytest.MonkeyPatch, url: str
) -> contextlib.AbstractContextManager[Running]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    return start("plain", budget=Terms(10.0), queries=20, settings=Settings(otel=True))


def _check(received: Receiver) -> None:
    """The trace that the caller named has the request and its phases in order."""
    spans = {span.name: span for span in received.trace(_TRACE)}
    assert set(spans) == {"infer", "parse", "charge", "flush", "draw"}
    root = spans["infer"]
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    parents = {name: span.parent_span_id for name, span in spans.items()}
    assert parents["parse"] == parents["charge"] == parents["draw"] == root.span_id
    assert parents["flush"] == spans["charge"].span_id
    order = [spans[name].start_time_unix_nano for name in ("infer", "parse", "charge", "flush", "draw")]
    assert order == sorted(order)
    assert all(span.end_time_unix_nano <= root.end_time_unix_nano for span in spans.values())
    assert {each.key for each in root.attributes} == {
        "quietmax.model",
        "quietmax.version",
        "quietmax.rows",
        "http.response.status_code",
    }
    assert all(not span.attributes for name, span in spans.items() if name != "infer")
    assert {
        "quietmax.request.duration",
        "quietmax.answers",
        "quietmax.budget.spent_fraction",
        "quietmax.ledger.up",
    } <= set(received.metrics)
    (spent,) = received.metrics["quietmax.budget.spent_fraction"].gauge.data_points
    assert spent.as_double == pytest.approx(0.1)
    assert sum(point.as_int for point in received.metrics["quietmax.answers"].sum.data_points) == 2


def test_a_request_is_exported_with_its_phases_and_nothing_private(
    start: Start, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _start(start, monkeypatch, receiver.url) as service:
        body = inference(some_rows(2), id="visit-4711")
        service.http.post("/v2/models/plain/infer", json=body, headers={"traceparent": _PARENT})
        nobody = {"authorization": "Bearer x", "traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
        assert service.http.post("/v2/models/plain/infer", json=body, headers=nobody).status_code == 401
        secrets = [service.key, "visit-4711", "owner", *map(str, some_rows(2).ravel())]
    _check(receiver)
    assert receiver.trace("1" * 32) == [], "the trace of a caller that is not authenticated is ignored"
    (refused,) = [span for span in receiver.spans if span.trace_id.hex() != _TRACE]
    assert refused.name == "infer"
    for secret in secrets:
        assert secret.encode() not in receiver.raw, secret
    assert b"\x03ann" not in receiver.raw
    assert {each["service.name"] for each in receiver.resources} == {"quietmax"}


def test_a_collector_that_is_away_delays_neither_answers_nor_the_end(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _start(start, monkeypatch, "http://127.0.0.1:9") as service:
        assert service.infer(some_rows(1)).status_code == 200
        before = time.monotonic()
    assert time.monotonic() - before < telemetry._CLOSE_SECONDS + 10


def test_without_telemetry_a_request_has_no_trace(plain: Running) -> None:
    assert plain.service.telemetry is None
    assert plain.http.post(
        "/v2/models/plain/infer", json=inference(some_rows(1)), headers={"traceparent": _PARENT}
    ).is_success
    with phase("parse"):
        assert current_trace() is None


def test_missing_packages_and_unsupported_protocols_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    check_telemetry()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(InvalidInput, match="must be http/protobuf, got 'grpc'"):
        check_telemetry()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(QuietmaxError, match=r"pip install 'quietmax\[otel\]'"):
        check_telemetry()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.slow
def test_a_real_collector_receives_and_forwards_traces_and_metrics(
    start: Start, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The collector is Rotel, from the package of that name."""
    found = importlib.util.find_spec("rotel")
    assert found is not None
    assert found.origin is not None
    http_port = _free_port()
    process = subprocess.Popen(
        [
            str(Path(found.origin).parent / "rotel-agent"),
            "start",
            "--pid-file",
            str(tmp_path / "rotel.pid"),
            "--otlp-grpc-endpoint",
            f"127.0.0.1:{_free_port()}",
            "--otlp-http-endpoint",
            f"127.0.0.1:{http_port}",
            "--exporter",
            "otlp",
            "--otlp-exporter-endpoint",
            receiver.url,
            "--otlp-exporter-protocol",
            "http",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", http_port), 1):
                break
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with _start(start, monkeypatch, f"http://127.0.0.1:{http_port}") as service:
            body = inference(some_rows(2))
            answer: httpx.Response = service.http.post(
                "/v2/models/plain/infer", json=body, headers={"traceparent": _PARENT}
            )
            assert answer.status_code == 200
        while not (len(receiver.trace(_TRACE)) == 5 and len(receiver.metrics) >= 4):
            assert time.monotonic() < deadline + 20
            time.sleep(0.1)
    finally:
        process.terminate()
        process.wait(10)
    _check(receiver)
