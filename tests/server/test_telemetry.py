"""The log and the metrics."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest

from quietmax.server.telemetry import Log, _libraries_logged
from tests.server.running_service import Running, down, log_schema, some_rows


def _lines(stream: io.BytesIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_the_log_names_requests_but_never_inputs_outputs_ids_or_keys(plain: Running) -> None:
    rows = some_rows(1)
    answer = plain.infer(rows, id="my-secret-id").json()
    plain.infer(rows, id="x" * 200)
    httpx.get(f"{plain.url}/contents", headers={"authorization": "Bearer qm_wrong"})
    plain.service.log.flush()
    text = plain.log.getvalue().decode()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["event"] for line in lines] == ["started", "request", "request", "request"]
    assert lines[1]["model"] == "plain"
    assert (lines[1]["client"], lines[1]["rows"], lines[1]["status"]) == ("ann", 1, 200)
    assert lines[2]["status"] == 400
    assert (lines[3]["client"], lines[3]["status"], lines[3]["route"]) == (None, 401, "/contents")
    assert lines[3]["address"] == "127.0.0.1"
    for secret in (
        plain.key,
        plain.key.split("_", 2)[2],
        plain.admin.split("_", 2)[2],
        "my-secret-id",
        "qm_wrong",
        *(str(value) for value in rows[0]),
        *(str(value) for value in answer["outputs"][1]["data"]),
    ):
        assert secret not in text


class _Blocked(io.RawIOBase):
    """A stream that nobody reads: writing waits until `opened` is set."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.written = b""

    def write(self, content: Any) -> int:
        self.opened.wait()
        self.written += bytes(content)
        return len(content)


def test_nothing_waits_for_a_log_that_is_not_read_and_what_is_dropped_is_counted() -> None:
    stream = _Blocked()
    log = Log(cast(BinaryIO, stream), max_lines=100)
    log.event("first")
    started = time.monotonic()
    for number in range(10_000):
        log.event("request", rows=number)
    assert time.monotonic() - started < 5
    assert 9_800 <= log.dropped <= 9_901
    assert not log.flush(0.1)
    stream.opened.set()
    assert log.flush(10)
    log.event("last")
    assert log.flush(10)
    lines = [json.loads(line) for line in stream.written.splitlines()]
    assert lines[-1]["event"] == "last"
    assert sum(line["event"] == "request" for line in lines) + log.dropped == 10_000
    assert sum(line["lines"] for line in lines if line["event"] == "dropped") == log.dropped


def test_a_log_that_cannot_be_written_stops_nothing() -> None:
    stream = io.BytesIO()
    stream.close()
    log = Log(stream)
    log.event("started")
    assert log.flush(10)
    assert log.dropped == 1


def test_a_forked_process_writes_its_own_lines(tmp_path: Any) -> None:
    with (tmp_path / "log").open("ab") as stream:
        log = Log(stream)
        log.event("parent")
        assert log.flush(10)
        child = os.fork()
        if child == 0:
            log.event("child")
            os._exit(0 if log.flush(10) else 1)
        assert os.waitpid(child, 0)[1] == 0
    events = [json.loads(line)["event"] for line in (tmp_path / "log").read_text().splitlines()]
    assert events == ["parent", "child"]


def test_long_lines_are_cut_and_invalid_strings_are_still_json() -> None:
    stream = io.BytesIO()
    log = Log(stream)
    log.event("odd", name="\ud800", long="x" * 10_000)
    assert log.flush(10)
    (line,) = _lines(stream)
    assert line["name"] == "\ud800"
    assert len(stream.getvalue()) < 4096


def _fail(value: str) -> None:
    raise ValueError(f"could not convert {value}")


def test_warnings_messages_and_errors_of_libraries_are_lines_of_json_without_values(
    capfd: pytest.CaptureFixture[str],
) -> None:
    stream = io.BytesIO()
    log = Log(stream)
    before = sys.excepthook, threading.excepthook, warnings.showwarning
    with _libraries_logged(log), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("the value secret-1 is odd", UserWarning, stacklevel=1)
        logging.getLogger("somebody").warning("the value %s is odd\nsecond line", "secret-2")
        logging.getLogger("somebody").warning(
            "%(a)5.1f is 7%% of %(a)-8d or %(b)r", {"a": 12345.0, "b": "secret-6"}
        )
        logging.getLogger("somebody").warning("all 100% of it")
        logging.getLogger("quietmax.server.some").warning(
            "the issuer %s fails: %s", "https://a.b", "no route"
        )
        try:
            _fail("secret-3")
        except ValueError:
            logging.getLogger("somebody").exception("Failed with %s", "secret-4")
        thread = threading.Thread(target=_fail, args=("secret-5",))
        thread.start()
        thread.join()
    assert (sys.excepthook, threading.excepthook, warnings.showwarning) == before
    assert log.flush(10)
    warning, *messages, failed, died = _lines(stream)
    assert warning["source"] == "UserWarning"
    assert "test_telemetry.py:" in warning["message"]
    assert [(each["source"], each["message"]) for each in messages] == [
        ("somebody warning", "the value … is odd"),
        ("somebody warning", "… is 7% of … or …"),
        ("somebody warning", "all 100% of it"),
        ("quietmax.server.some warning", "the issuer https://a.b fails: no route"),
    ]
    assert (failed["event"], failed["kind"], failed["source"]) == ("failed", "ValueError", "somebody error")
    assert failed["frames"][-1].endswith(" _fail")
    assert (died["event"], died["kind"]) == ("failed", "ValueError")
    assert b"secret" not in stream.getvalue()
    assert capfd.readouterr().err == ""


_UNREAD = """
import http.client, os, signal, sys, threading
from pathlib import Path
from quietmax.ledger import Ledger
from quietmax.server import Service, Settings
from quietmax.server.deployment import deploy, load_models
from quietmax.server.run import run
from quietmax.server.settings import Listener

folder = Path(sys.argv[1])
ledger = Ledger(folder / "ledger.sqlite")
service = Service(ledger, deploy(ledger, load_models([str(folder / "head")])), Settings())
listener = Listener(port=0)
opened = listener.open_socket()
url = listener.url(opened)

def load():
    try:
        connection = http.client.HTTPConnection(url.partition("://")[2], timeout=30)
        for _ in range(600):
            connection.request("POST", "/v2/models/head/infer", b"{}")
            assert connection.getresponse().read().startswith(b'{"error":"An API key is required')
        assert service.log.dropped > 0
        print("answered", flush=True)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)

service.log._max_lines = 50
threading.Thread(target=load, daemon=True).start()
run(service, listener, opened)
print("stopped", flush=True)
"""


def test_a_service_whose_stderr_nobody_reads_answers_and_stops(models: Any, tmp_path: Any) -> None:
    (tmp_path / "head").symlink_to(models / "head")
    unread, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write_end, b" " * 4096)
    os.set_blocking(write_end, True)
    process = subprocess.Popen(
        [sys.executable, "-c", _UNREAD, str(tmp_path)], stdout=subprocess.PIPE, stderr=write_end
    )
    os.close(write_end)
    try:
        out, _ = process.communicate(timeout=60)
        assert out.split() == [b"answered", b"stopped"]
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
        os.close(unread)


def test_real_lines_of_the_log_follow_the_documented_schema(
    plain: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain.infer(some_rows(1))
    plain.infer([[0.0]])
    httpx.get(f"{plain.url}/nowhere")
    httpx.get(plain.url, headers={"x": "y" * 40_000})
    monkeypatch.setattr(plain.ledger, "ping", down)
    plain.http.get("/v2/health/ready")
    monkeypatch.setattr(plain.service, "deployment", lambda *_: 1 / 0)
    plain.infer(some_rows(1))
    schema = log_schema()
    for line in plain.lines():
        jsonschema.validate(line, schema)
    told = {line["event"] for line in plain.lines()}
    assert told == {"started", "request", "refused", "not_ready", "failed"}


def test_every_event_and_field_that_the_service_logs_is_in_the_schema() -> None:
    properties = log_schema()["properties"]
    source = Path(__file__).parents[2] / "src" / "quietmax"
    for file in (*(source / "server").rglob("*.py"), source / "cli" / "serve.py"):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            if ast.unparse(call.func).endswith("log.event") and isinstance(call.args[0], ast.Constant):
                assert call.args[0].value in properties["event"]["enum"], (file, call.lineno)
                assert {each.arg for each in call.keywords if each.arg} <= set(properties), (
                    file,
                    call.lineno,
                )
            if call.func.attr == "_count_refused" and isinstance(call.args[0], ast.Constant):
                assert call.args[0].value in properties["reason"]["enum"], (file, call.lineno)


def test_metrics_count_requests_answers_and_the_budget_but_name_no_client(plain: Running) -> None:
    for rows in (some_rows(4), some_rows(4), [[0.0]]):
        plain.infer(rows)
    text = plain.http.get("/metrics").text
    for line in (
        'quietmax_requests_total{model="plain",status="200",version="1"} 2.0',
        'quietmax_requests_total{model="plain",status="422",version="1"} 1.0',
        'quietmax_answers_total{model="plain",origin="new",version="1"} 4.0',
        'quietmax_answers_total{model="plain",origin="cached",version="1"} 4.0',
        'quietmax_budget_spent_fraction{account="people"} 0.2',
        "quietmax_ledger_up 1.0",
    ):
        assert line in text.splitlines()
    assert "ann" not in text


def test_metrics_say_that_the_ledger_is_down(plain: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "quietmax_ledger_up 1.0" in plain.http.get("/metrics").text
    monkeypatch.setattr(plain.ledger, "keys", down)
    monkeypatch.setattr(plain.ledger, "accounts", down)
    monkeypatch.setattr(plain.service.auth, "_read_at", -1e9)
    assert "quietmax_ledger_up 0.0" in plain.http.get("/metrics").text
    assert httpx.get(f"{plain.url}/metrics", headers={"authorization": "Bearer qm_wrong"}).status_code == 401
    assert plain.http.get("/v2/models").status_code == 503
