"""gRPC with an unmodified client of Triton: the same answers, charges, limits and errors as over HTTP."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from google.protobuf.descriptor import Descriptor
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from quietmax import __version__
from quietmax.errors import InvalidInput
from quietmax.estimators import decide_folder
from quietmax.ledger import Ledger
from quietmax.mechanisms.base import Answers
from quietmax.server import Settings, grpc_server
from quietmax.server.deployment import Deployment, load_models
from quietmax.server.errors import HttpError
from quietmax.server.grpc_server import (
    SERVICE,
    _decode_request,
    _encode_response,
    _Methods,
    _parse_request,
    message_class,
)
from quietmax.server.settings import Listener
from tests.docs.scripts import script
from tests.server.running_service import (
    CLASSES,
    FEATURES,
    LOANS,
    Command,
    Running,
    Start,
    bearer,
    down,
    is_ready,
    serve_command,
    some_loans,
    some_rows,
    until,
)

INFER = "/inference.GRPCInferenceService/ModelInfer"
LOANS_TEXT = {"joined": "%d.%m.%Y", "seen": "%Y-%m-%d %H:%M:%S"}


def _client(running: Running) -> triton.InferenceServerClient:
    assert running.grpc is not None
    return triton.InferenceServerClient(running.grpc)


def _tensor(name: str, values: Any, datatype: str) -> triton.InferInput:
    array = np.asarray(values)
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def _features(rows: Any) -> list[triton.InferInput]:
    return [_tensor("features", np.asarray(rows, dtype=np.float32), "FP32")]


def _infer(running: Running, model: str, rows: Any, key: str | None = None, **more: Any) -> Any:
    with _client(running) as client:
        return client.infer(model, _features(rows), headers=bearer(key or running.key), **more)


def _parameters(result: triton.InferResult) -> dict[str, Any]:
    return {
        name: getattr(value, value.WhichOneof("parameter_choice"))
        for name, value in result.get_response().parameters.items()
    }


def _message(rows: Any, **more: Any) -> service_pb2.ModelInferRequest:
    """A valid request to the model `plain`, with typed contents."""
    values = np.asarray(rows, dtype=np.float32)
    message = service_pb2.ModelInferRequest(model_name="plain", **more)
    tensor = message.inputs.add(name="features", datatype="FP32", shape=values.shape)
    tensor.contents.fp32_contents.extend(values.ravel().tolist())
    return message


@contextmanager
def _calls(running: Running, kind: str = "unary_unary", method: str = INFER) -> Iterator[Any]:
    """Call a method with bytes, by default with the key of the client."""
    with grpc.insecure_channel(str(running.grpc)) as channel:
        call = getattr(channel, kind)(method, lambda each: each, lambda each: each)
        metadata = {"metadata": tuple(bearer(running.key).items()), "timeout": 30}
        yield SimpleNamespace(
            now=lambda content, **more: call(content, **{**metadata, **more}),
            soon=lambda content, **more: call.future(content, **{**metadata, "timeout": 60, **more}),
        )


def _send(running: Running, content: bytes, method: str = INFER, **more: Any) -> bytes:
    with _calls(running, method=method) as calls:
        answer: bytes = calls.now(content, **more)
        return answer


@contextmanager
def _refused(status: str, sentence: str = "") -> Iterator[dict[str, str]]:
    """What is sent within is refused with a status and a sentence; gives the trailing metadata."""
    trailers: dict[str, str] = {}
    with pytest.raises((grpc.RpcError, InferenceServerException)) as caught:
        yield trailers
    error: Any = caught.value
    if isinstance(error, InferenceServerException):
        assert error.status() == f"StatusCode.{status}"
        assert sentence in error.message()
    else:
        assert str(error.code()) == f"StatusCode.{status}"
        assert error.details() == sentence or not sentence
        trailers |= dict(error.trailing_metadata())


def _silent(silence: threading.Event) -> Iterator[bytes]:
    """A message that does not arrive until the event is set."""
    silence.wait(60)
    yield b""


@pytest.fixture
def charged(start: Start) -> Iterator[Running]:
    """An ordinary model behind Algorithm 1, with a budget for 20 answers."""
    with start("plain", grpc=True) as running:
        yield running


def _metadata(running: Running, model: str) -> Any:
    """The parameters of a model's metadata, which Triton's own message does not have."""
    asked = message_class("ModelMetadataRequest")(name=model).SerializeToString()
    with grpc.insecure_channel(str(running.grpc)) as channel:
        call = channel.unary_unary(f"/{SERVICE}/ModelMetadata")
        answer = call(asked, metadata=tuple(bearer(running.key).items()))
    return message_class("ModelMetadataResponse").FromString(answer).parameters


def test_health_and_metadata_are_those_of_http(start: Start) -> None:
    with start("head", "loans", grpc=True) as running, _client(running) as client:
        headers = bearer(running.key)
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("head", headers=headers)
        server = client.get_server_metadata()
        assert (server.name, server.version) == ("quietmax", __version__)
        for model in ("head", "loans"):
            over_http = running.http.get(f"/v2/models/{model}").json()
            told = client.get_model_metadata(model, headers=headers, as_json=True)
            assert told["versions"] == over_http["versions"] == ["1"]
            assert told["platform"] == over_http["platform"]
            for kind in ("inputs", "outputs"):
                shapes = [
                    {**tensor, "shape": [int(size) for size in tensor["shape"]]} for tensor in told[kind]
                ]
                assert shapes == over_http[kind]
        parameters = _metadata(running, "loans")
        assert parameters["guarantee_status"].string_param == "proven"
        assert parameters["guarantee_strength"].string_param == over_http["parameters"]["guarantee_strength"]
        assert parameters["paid_at_training"].bool_param
        assert json.loads(parameters["classes"].string_param) == over_http["parameters"]["classes"]
        assert "guarantee" not in parameters, "an object is no parameter of the protocol"


def test_a_head_answers_as_over_http_and_costs_nothing(start: Start) -> None:
    rows = some_rows(5)
    with start("head", grpc=True) as running:
        over_http = running.infer(rows, "head").json()
        labels, probabilities = (output["data"] for output in over_http["outputs"])
        result = _infer(running, "head", rows, request_id="a")
        assert result.get_response().id == "a"
        assert result.as_numpy("label").tolist() == labels
        assert result.as_numpy("probabilities").shape == (5, CLASSES)
        np.testing.assert_allclose(result.as_numpy("probabilities").ravel(), probabilities, rtol=1e-6)
        assert _parameters(result) == over_http["parameters"]
        assert _parameters(result)["cost"] == 0.0
        assert _parameters(result)["paid_at_training"] is True
        chosen = _infer(running, "head", rows, outputs=[triton.InferRequestedOutput("label")])
        assert [output.name for output in chosen.get_response().outputs] == ["label"]


def test_reasons_are_those_of_http_bit_for_bit(start: Start) -> None:
    rows = LOANS.encode(some_loans(20, seed=4))
    with start("summed", grpc=True) as running:
        asked = [triton.InferRequestedOutput("reasons")]
        (tensor,) = running.infer(rows, "summed", outputs=[{"name": "reasons"}]).json()["outputs"]
        result = _infer(running, "summed", rows, outputs=asked)
        found = result.as_numpy("reasons")
        assert found.dtype == np.float64
        assert np.array_equal(found, np.array(tensor["data"]).reshape(tensor["shape"]))
        with _client(running) as client:
            metadata = client.get_model_metadata("summed", headers=bearer(running.key))
        assert [output.name for output in metadata.outputs] == ["label", "probabilities", "reasons"]
        told = running.http.get("/v2/models/summed").json()["parameters"]["reasons"]
        assert json.loads(_metadata(running, "summed")["reasons"].string_param) == told
        assert len(told) == found.shape[1]
    with (
        start("head", grpc=True) as running,
        pytest.raises(InferenceServerException, match="sums over columns"),
    ):
        _infer(running, "head", some_rows(1), outputs=asked)


def test_the_decision_of_the_owner_is_in_the_metadata_of_both_protocols(start: Start, tmp_path: Path) -> None:
    rows = LOANS.encode(some_loans(60, seed=4))
    for least, words in (
        (None, "the most probable class"),
        (0.9, "yes if its probability is above 0.9, otherwise no"),
    ):
        if least is not None:
            decide_folder(tmp_path / "summed", threshold={"yes": least})
        with start("summed", "survey", grpc=True) as running:
            told = running.http.get("/v2/models/summed").json()["parameters"]
            assert (told["decision"], told["threshold"]) == (words, least or 0.5)
            assert told.get("costs") == (
                None if least is None else [[0.0, least], [pytest.approx(1 - least), 0.0]]
            )
            over_grpc = _metadata(running, "summed")
            assert over_grpc["decision"].string_param == words
            assert over_grpc["threshold"].double_param == (least or 0.5)
            labels, probabilities = running.infer(rows, "summed").json()["outputs"]
            expected = ["yes" if share > (least or 0.5) else "no" for share in probabilities["data"][1::2]]
            assert labels["data"] == expected
            assert "decision" not in _metadata(running, "survey"), "noise decides"


def test_a_value_that_cannot_be_read_names_its_column_over_both_protocols(start: Start) -> None:
    people = some_loans(2).drop(columns=["customer", "repaid"]).astype(str)
    texts = {name: list(people[name]) for name in people}
    texts |= {"joined": ["01.01.2015", "soon"], "seen": ["", ""], "income": ["", ""]}
    inputs = [_tensor(name, np.array(cells, dtype=object), "BYTES") for name, cells in texts.items()]
    with start("loans", grpc=True) as running, _client(running) as client:
        response = running.infer_columns(texts, "loans")
        assert (response.status_code, response.json()["column"]) == (422, "joined")
        assert response.json()["error"].startswith("Row 2 has no date in the column 'joined'")
        error = HttpError(422, "Wrong.", {"column": "région"})
        assert _Methods._status(error)[2] == (("column-bin", "région".encode()),)
        with _refused("INVALID_ARGUMENT", "'joined'"):
            client.infer("loans", inputs, headers=bearer(running.key))


def test_a_table_model_takes_columns_and_answers_with_class_names(start: Start) -> None:
    people = some_loans(30, seed=1).drop(columns=["customer", "repaid"])
    columns = {
        name: people[name].dt.strftime(LOANS_TEXT[name]) if name in LOANS_TEXT else people[name]
        for name in people
    }
    texts = {name: [str(cell) for cell in cells] for name, cells in columns.items()}
    texts["income"] = [text.replace(".", ",") for text in texts["income"]]
    strings = [_tensor(name, np.array(cells, dtype=object), "BYTES") for name, cells in texts.items()]
    typed = [
        _tensor("age", people["age"].to_numpy(np.int64), "INT64"),
        _tensor("income", people["income"].to_numpy(np.float64), "FP64"),
        _tensor("smoker", people["smoker"].to_numpy(bool), "BOOL"),
        *(each for each in strings if each.name() in ("région", "joined", "seen", "zip")),
    ]
    with start("loans", grpc=True) as running, _client(running) as client:
        over_http = running.infer_columns(texts, "loans").json()
        expected = over_http["outputs"][0]["data"]
        assert set(expected) <= {"no", "yes"}
        for inputs in (strings, typed):
            result = client.infer("loans", inputs, headers=bearer(running.key))
            assert [name.decode() for name in result.as_numpy("label")] == expected
        with _refused("INVALID_ARGUMENT", "no column 'zip'"):
            client.infer(
                "loans", [each for each in strings if each.name() != "zip"], headers=bearer(running.key)
            )


def test_typed_contents_and_raw_contents_give_the_same_answers(charged: Running) -> None:
    rows = some_rows(4)
    raw = _infer(charged, "plain", rows)
    assert _parameters(raw)["new_answers"] == 4
    typed = service_pb2.ModelInferResponse.FromString(_send(charged, _message(rows).SerializeToString()))
    assert typed.parameters["new_answers"].int64_param == 0  # all four from the answer cache
    assert not typed.raw_output_contents
    assert list(typed.outputs[0].contents.int64_contents) == raw.as_numpy("label").tolist()
    assert charged.ledger.accounts()[0].spent_units == 4 * charged.service.deployments[0].unit_cost


def test_both_protocols_spend_one_budget_and_an_exhausted_one_is_permission_denied(charged: Running) -> None:
    first = _infer(charged, "plain", some_rows(15))
    assert _parameters(first)["remaining_answers"] == 5
    assert charged.infer(some_rows(3, seed=1)).json()["parameters"]["remaining_answers"] == 2
    with _refused(
        "PERMISSION_DENIED", "Privacy budget exhausted: 3 answers requested, 2 left. Nothing was charged."
    ) as trailers:
        _send(charged, _message(some_rows(3, seed=2)).SerializeToString())
    assert trailers["remaining_answers"] == "2"
    assert float(trailers["remaining"]) == charged.http.get("/v2/models/plain/budget").json()["remaining"] > 0
    assert _parameters(_infer(charged, "plain", some_rows(2, seed=3)))["remaining_answers"] == 0


def test_without_a_valid_key_or_with_two_nothing_is_answered(charged: Running) -> None:
    rows = _features(some_rows(1))
    with _client(charged) as client:
        for headers in (None, bearer("qm_wrong"), {"authorization": charged.key}):
            for ask in (
                lambda headers=headers: client.infer("plain", rows, headers=headers),
                lambda headers=headers: client.get_model_metadata("plain", headers=headers),
                lambda headers=headers: client.is_model_ready("plain", headers=headers),
            ):
                with _refused("UNAUTHENTICATED", "API key"):
                    ask()
        with _refused("NOT_FOUND", "no such model"):
            client.infer("other", rows, headers=bearer(charged.key))
        with _refused("NOT_FOUND"):
            client.infer("plain", rows, model_version="2", headers=bearer(charged.key))
    twice = tuple(("authorization", f"Bearer {key}") for key in (charged.key, "qm_wrong"))
    for metadata in (twice, twice[::-1], twice[:1] * 2):
        with _refused("INVALID_ARGUMENT", "The metadata must have `authorization` once."):
            _send(charged, _message(some_rows(1)).SerializeToString(), metadata=metadata)
    assert charged.ledger.accounts()[0].spent_units == 0


def test_the_key_is_checked_before_the_message_arrives(charged: Running) -> None:
    """A client without a key cannot make the service receive a large message or wait for one."""
    with _calls(charged, "stream_unary") as calls:
        silence = threading.Event()
        started = time.monotonic()
        with _refused("UNAUTHENTICATED"):
            calls.now(_silent(silence), metadata=None, timeout=15)
        silence.set()
        assert time.monotonic() - started < 5


def test_limits_are_those_of_http(start: Start) -> None:
    settings = Settings(max_rows=3, max_bytes=4096, timeout=0.5)
    with start("plain", settings=settings, grpc=True) as running:
        with _refused("RESOURCE_EXHAUSTED", "`features` must have at most 3 rows, got 24 values."):
            _send(running, _message(some_rows(4)).SerializeToString())
        with _refused("RESOURCE_EXHAUSTED"):
            _send(running, b"\0" * 5000)
        with _refused("UNIMPLEMENTED"):
            _send(running, _message(some_rows(1)).SerializeToString(), compression=grpc.Compression.Gzip)
        silence = threading.Event()
        with (
            _calls(running, "stream_unary") as calls,
            _refused("DEADLINE_EXCEEDED", "The message did not arrive in time. Nothing was charged."),
        ):
            calls.now(_silent(silence), timeout=15)
        silence.set()
        assert running.ledger.accounts()[0].spent_units == 0


def test_the_log_and_the_metrics_count_requests_of_both_protocols(charged: Running) -> None:
    _infer(charged, "plain", some_rows(2))
    with pytest.raises(InferenceServerException):
        _infer(charged, "plain", some_rows(2), key="qm_wrong")
    charged.infer(some_rows(2))
    requests = [
        (each["client"], each["rows"], each["status"])
        for each in charged.lines()
        if each["event"] == "request"
    ]
    assert requests == [("ann", 2, 200), (None, 0, 401), ("ann", 2, 200)]
    assert charged.key.encode() not in charged.log.getvalue()
    told = charged.http.get("/metrics").text
    assert 'quietmax_requests_total{model="plain",status="200",version="1"} 2.0' in told
    assert 'quietmax_requests_total{model="",status="401",version=""} 1.0' in told


def test_what_a_client_that_goes_away_has_asked_for_is_charged_once(charged: Running) -> None:
    """A cancelled request stays in flight until it is charged and its answer stored."""
    message = _message(some_rows(2), id="gone").SerializeToString()
    with _calls(charged) as calls:
        for _ in range(20):
            future = calls.soon(message)
            time.sleep(0.002)
            future.cancel()
        told = service_pb2.ModelInferResponse.FromString(calls.now(message))
    assert len(told.outputs[0].contents.int64_contents) == 2
    assert charged.ledger.accounts()[0].spent_units == 2 * charged.service.deployments[0].unit_cost


def test_while_the_ledger_is_away_the_status_is_unavailable(
    charged: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _client(charged).is_server_ready()
    monkeypatch.setattr(charged.ledger, "keys", down)
    monkeypatch.setattr(charged.ledger, "ping", down)
    time.sleep(1.1)
    with _refused("UNAVAILABLE") as trailers:
        _send(charged, _message(some_rows(1)).SerializeToString())
    assert trailers["retry-after"] == "1"
    with _client(charged) as client:
        assert client.is_server_live()
        assert not client.is_server_ready()


def test_the_port_is_kept_for_the_service_and_refused_to_another(start: Start) -> None:
    with start("head", grpc=True) as running:
        port = int(str(running.grpc).rpartition(":")[2])
        with (
            pytest.raises(InvalidInput, match=f"Cannot listen on 127.0.0.1:{port}"),
            Listener(port=0, grpc_port=port).reserve_grpc_port(),
        ):
            pass
    with Listener(port=0, grpc_port=port).reserve_grpc_port() as again:
        assert again.grpc_port == port


def _labels_when_ready(port: int, model: str, key: str, request_id: str = "", **tls: Any) -> list[int]:
    """Ask for one answer until the service is available."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with triton.InferenceServerClient(f"127.0.0.1:{port}", **tls) as client:
                rows, headers = _features(some_rows(1)), bearer(key)
                result = client.infer(model, rows, headers=headers, request_id=request_id)
                labels: list[int] = result.as_numpy("label").tolist()
                return labels
        except InferenceServerException as error:
            if error.status() != "StatusCode.UNAVAILABLE" or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _listening(service: subprocess.Popen[str], port: int) -> set[int]:
    return {
        child.pid
        for child in psutil.Process(service.pid).children()
        for each in child.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    }


def test_workers_that_were_killed_answer_grpc_again_and_a_retry_is_not_charged(
    models: Path, tmp_path: Path
) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        key, _ = ledger.create_key("ann")
    shutil.copytree(models / "teachers", tmp_path / "teachers")
    options = ("--grpc-port", 0, "--workers", 2)
    with serve_command(tmp_path / "ledger.sqlite", tmp_path / "teachers", *options) as command:
        service, port = command.process, command.told["grpc_port"]
        first = _labels_when_ready(port, "teachers", key, "once")
        until(lambda: len(_listening(service, port)) == 2)
        workers = _listening(service, port)
        for child in workers:
            os.kill(child, signal.SIGKILL)
        assert _labels_when_ready(port, "teachers", key, "once") == first
        assert not _listening(service, port) & workers
        until(lambda: command.events().count("started") == 4)
        service.send_signal(signal.SIGTERM)
        assert service.wait(30) == 0
        expected = {"started": 4, "died": 2, "stopped": 2}
        until(lambda: Counter(event for event in command.events() if event != "request") == expected)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert [row.answers for row in ledger.export("patients") if row.kind == "charge"] == [1]


def test_the_rate_limit_of_a_client_counts_requests_over_grpc(start: Start) -> None:
    settings = Settings(rate_limit=0.01, rate_burst=2)
    with start("head", settings=settings, grpc=True) as running:
        for _ in range(2):
            _infer(running, "head", some_rows(1))
        with _refused("RESOURCE_EXHAUSTED") as trailers:
            _send(running, _message(some_rows(1)).SerializeToString())
        assert int(trailers["retry-after"]) > 0


def test_streams_that_send_nothing_stop_neither_other_clients_nor_health_and_have_an_end(
    start: Start,
) -> None:
    settings = Settings(max_in_flight=8, max_bytes=2**20, max_body_memory=4 * 2**20, timeout=3)
    with start("plain", settings=settings, grpc=True) as running:
        silence = threading.Event()
        with _calls(running, "stream_unary") as calls:
            streams = [calls.soon(_silent(silence)) for _ in range(settings.max_in_flight)]
            time.sleep(0.5)
            started = time.monotonic()
            other = _infer(running, "plain", some_rows(1), key=running.admin)
            assert other.as_numpy("label").shape == (1,)
            with _client(running) as client:
                assert client.is_server_live()
            assert time.monotonic() - started < 2, "not only after the streams have ended"
            ended = Counter(each.code() for each in streams)
            assert time.monotonic() - started < 10
            silence.set()
        assert set(ended) == {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}
        assert ended[grpc.StatusCode.UNAVAILABLE] == 4, "a client may have half of the requests in flight"
        assert _infer(running, "plain", some_rows(1, 1)).as_numpy("label").shape == (1,)


def test_only_so_many_messages_are_received_at_the_same_time_as_fit_into_the_memory(start: Start) -> None:
    settings = Settings(max_bytes=2**20, max_body_memory=4 * 2**20)
    with start("plain", settings=settings, grpc=True) as running:
        arriving: list[int] = []
        most = 0

        async def count(context: Any) -> bytes:
            nonlocal most
            arriving.append(1)
            most = max(most, len(arriving))
            await asyncio.sleep(0.02)
            arriving.pop()
            content: bytes = await context.read()
            return content

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grpc_server, "_read", count)
            with _calls(running) as calls:
                message = _message(some_rows(1)).SerializeToString()
                futures = [
                    calls.soon(message, metadata=tuple(bearer(key).items()))
                    for key in (running.key, running.admin)
                    for _ in range(20)
                ]
                assert {each.code() for each in futures} == {grpc.StatusCode.OK}
        assert most == 4
        assert running.service.bodies.held == 0


def test_a_message_that_does_not_fit_into_the_memory_for_bodies_is_unavailable(start: Start) -> None:
    settings = Settings(max_bytes=2**20, max_body_memory=2**20)
    with start("plain", settings=settings, grpc=True) as running:
        running.service.bodies._hold(2**20 - 10)
        with _refused(
            "UNAVAILABLE",
            "The service holds too many request bodies. Send the request again later. Nothing was charged.",
        ) as trailers:
            _send(running, _message(some_rows(1)).SerializeToString())
        assert trailers["retry-after"] == "1"
        running.service.bodies._release(2**20 - 10)
        assert _send(running, _message(some_rows(1)).SerializeToString())
        assert running.service.bodies.held == 0


def test_a_message_without_rows_must_be_small(charged: Running) -> None:
    method = INFER.replace("ModelInfer", "ModelReady")
    with _refused("RESOURCE_EXHAUSTED", "The message must have at most 65536 bytes."):
        _send(charged, service_pb2.ModelReadyRequest(name="x" * 2**17).SerializeToString(), method)


def test_nobody_is_anonymous_over_grpc(start: Start) -> None:
    """The name that a client has connected to is not known there, so a local proxy would not be noticed."""
    with start("head", settings=Settings(anonymous=True), grpc=True) as running, _client(running) as client:
        assert client.is_server_live()
        for headers in (None, {"x-forwarded-for": "192.0.2.1"}):
            with _refused("PERMISSION_DENIED", "Anonymous access requires HTTP"):
                client.infer("head", _features(some_rows(1)), headers=headers)
        assert _infer(running, "head", some_rows(1)).as_numpy("label").shape == (1,)


@pytest.fixture
def with_tls(
    models: Path, tmp_path: Path, new_certificate: Callable[[Path], tuple[Path, Path]]
) -> Callable[..., AbstractContextManager[Command]]:
    """Run `quietmax serve` with a certificate, of a head and with gRPC."""
    certificate, private = new_certificate(tmp_path / "tls")
    shutil.copytree(models / "head", tmp_path / "head")
    options = ("--grpc-port", 0, "--tls-certificate", certificate, "--tls-key", private)
    return partial(serve_command, tmp_path / "ledger.sqlite", tmp_path / "head", *options)


def test_with_a_certificate_grpc_speaks_tls_and_nothing_else_and_uses_a_new_one_after_sighup(
    with_tls: Callable[..., AbstractContextManager[Command]],
    tmp_path: Path,
    new_certificate: Callable[[Path], tuple[Path, Path]],
) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        key, _ = ledger.create_key("ann")
    certificate, later = tmp_path / "tls" / "certificate.pem", new_certificate(tmp_path / "later")
    with with_tls() as command:
        (served,) = command.told["served"]
        assert served.startswith("head/1 (proven, moderate protection [##-]: ")
        assert served.endswith("): account visitors, answers are free")
        port = command.told["grpc_port"]
        _labels_when_ready(port, "head", key, ssl=True, root_certificates=str(certificate))
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as client, _refused("UNAVAILABLE"):
            client.is_server_live()

        def presented() -> str:
            return ssl.get_server_certificate(("127.0.0.1", port), timeout=30)

        assert presented() == certificate.read_text()
        for new in later:
            shutil.copy(new, tmp_path / "tls")
        command.process.send_signal(signal.SIGHUP)
        until(lambda: presented() == later[0].read_text())
        _labels_when_ready(port, "head", key, ssl=True, root_certificates=str(later[0]))


def test_streams_and_connections_that_send_nothing_do_not_delay_a_stop(start: Start) -> None:
    silence = threading.Event()
    with ExitStack() as opened:
        with start("plain", grpc=True) as running:
            port = int(str(running.grpc).rpartition(":")[2])
            opened.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(HTTP2_PREFACE)
            stream = opened.enter_context(_calls(running, "stream_unary")).soon(_silent(silence))
            assert _infer(running, "plain", some_rows(1)).as_numpy("label").shape == (1,)
            started = time.monotonic()
        assert time.monotonic() - started < 5
        assert stream.code() is grpc.StatusCode.UNAVAILABLE
        assert stream.details() == "The service is stopping. Nothing was charged."
        silence.set()


@pytest.mark.slow
def test_idle_connections_of_both_protocols_leave_descriptors_for_the_ledger(
    models: Path, tmp_path: Path
) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        key, _ = ledger.create_key("ann")
    options = ("--grpc-port", 0, "--idle-timeout", 600, "--header-timeout", 600)
    with (
        serve_command(tmp_path / "ledger.sqlite", models / "head", *options, most_files=700) as command,
        ExitStack() as opened,
    ):
        url, grpc_port = command.told["url"], command.told["grpc_port"]
        until(lambda: is_ready(url))
        for _ in range(200):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", grpc_port)))
            connection.sendall(HTTP2_PREFACE)
        for _ in range(600):
            opened.enter_context(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))))
        time.sleep(0.5)
        (worker,) = psutil.Process(command.process.pid).children()
        assert worker.num_fds() < 660
        time.sleep(1.1)  # the keys are read again
        assert httpx.get(f"{url}/v2/models", headers=bearer(key), timeout=30).status_code == 200
        command.process.terminate()
        command.process.wait(60)
        assert "accept_failed" not in command.events()


HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""How a client of HTTP/2 begins, with empty settings."""


def _connects(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port)):
        return True


def test_what_grpc_itself_writes_does_not_stop_the_service_when_nobody_reads_it(
    with_tls: Callable[..., AbstractContextManager[Command]], tmp_path: Path
) -> None:
    """The core of gRPC writes a line for each failed handshake, in the thread that failed, and waits until it can."""
    with with_tls(read_log=False, GRPC_VERBOSITY=None) as command:
        fcntl.fcntl(command.process.stderr, fcntl.F_SETPIPE_SZ, 4096)
        port = command.told["grpc_port"]
        until(partial(_connects, port))
        for _ in range(100):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(b"not TLS\r\n\r\n")
                with suppress(ConnectionError):
                    connection.recv(100)
        certificate = str(tmp_path / "tls" / "certificate.pem")
        with triton.InferenceServerClient(
            f"127.0.0.1:{port}", ssl=True, root_certificates=certificate
        ) as client:
            assert client.is_server_live(client_timeout=20)
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(30) == 0


FOLDER = Path(__file__).parents[2] / "src" / "quietmax" / "server"


@pytest.fixture(scope="module")
def head(models: Path) -> Deployment:
    return load_models([f"head={models / 'head'}"])[0]


@pytest.fixture(scope="module")
def survey(models: Path) -> Deployment:
    return load_models([f"survey={models / 'survey'}"])[0]


def _fields(message: Descriptor) -> dict[str, Any]:
    """Names, numbers and types of all fields, with those of the messages within."""
    return {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            None if field.containing_oneof is None else field.containing_oneof.name,
            None if field.message_type is None else _fields(field.message_type),
        )
        for field in message.fields
    }


def test_the_service_has_the_methods_and_messages_that_triton_defines() -> None:
    ours = message_class("ModelInferRequest").DESCRIPTOR.file.services_by_name[SERVICE.rpartition(".")[2]]
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    assert len(ours.methods) == 6
    for method in ours.methods:
        known = theirs[method.name]
        for own, other in (
            (method.input_type, known.input_type),
            (method.output_type, known.output_type),
        ):
            fields = _fields(own)
            if own.name == "ModelMetadataResponse":
                assert fields.pop("parameters")[0] == 6, (
                    "a field that MLServer adds, and that Triton's clients skip"
                )
            assert (own.full_name, fields) == (other.full_name, _fields(other))


def test_the_stored_descriptors_are_those_of_the_proto_file(tmp_path: Path) -> None:
    script("docs/making/inference_messages.py").compile_messages(tmp_path / "compiled.binpb")
    assert (tmp_path / "compiled.binpb").read_bytes() == (FOLDER / "inference.binpb").read_bytes()


def _decode(message: Any, deployment: Deployment) -> Any:
    return _decode_request(_parse_request(message.SerializeToString(), 3), deployment, 3)


@pytest.mark.parametrize(
    ("datatype", "field", "value"),
    [
        ("INT8", "int_contents", -128),
        ("INT16", "int_contents", -(2**15)),
        ("INT32", "int_contents", -7),
        ("INT64", "int64_contents", -7),
        ("UINT8", "uint_contents", 255),
        ("UINT16", "uint_contents", 2**16 - 1),
        ("UINT32", "uint_contents", 2**32 - 1),
        ("UINT64", "uint64_contents", 7),
        ("FP32", "fp32_contents", 0.5),
        ("FP64", "fp64_contents", 0.5),
        ("FP16", None, 0.5),
    ],
)
def test_typed_and_raw_features_of_every_datatype_are_the_same_rows(
    head: Deployment, datatype: str, field: str | None, value: float
) -> None:
    typed = service_pb2.ModelInferRequest()
    tensor = typed.inputs.add(name="features", datatype=datatype, shape=[1, FEATURES])
    raw = service_pb2.ModelInferRequest.FromString(typed.SerializeToString())
    kind = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}.get(datatype, datatype.lower())
    raw.raw_input_contents.append(np.full(FEATURES, value, np.dtype(kind)).tobytes())
    if field is not None:
        getattr(tensor.contents, field).extend([value] * FEATURES)
    else:
        with pytest.raises(HttpError, match="FP16 requires `raw_input_contents`"):
            _decode(typed, head)
    for message in (typed, raw) if field is not None else (raw,):
        rows = _decode(message, head).rows
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows, np.full((1, FEATURES), value, np.float32))


def test_typed_columns_are_encoded_and_class_names_sent_as_bytes(survey: Deployment) -> None:
    message = service_pb2.ModelInferRequest(model_name="survey")
    message.inputs.add(name="age", datatype="INT8", shape=[2]).contents.int_contents.extend([30, 40])
    message.inputs.add(name="income", datatype="FP64", shape=[2, 1]).contents.fp64_contents.extend([1.0, 9.0])
    region = message.inputs.add(name="région", datatype="BYTES", shape=[2])
    region.contents.bytes_contents.extend([b"north", b"ouest"])
    request = _decode(message, survey)
    assert request.unknown == {"région": 1}
    encoded = _encode_response(message, request, Answers(np.array([1, 0]), None), {"cost": 0.5}, survey)
    response = service_pb2.ModelInferResponse.FromString(encoded)
    (label,) = response.outputs
    assert (label.name, label.datatype, list(label.shape)) == ("label", "BYTES", [2])
    assert list(label.contents.bytes_contents) == [b"yes", b"no"]
    assert response.parameters["cost"].double_param == 0.5


def _with_raw(*contents: bytes) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        message.inputs[0].ClearField("contents")
        message.raw_input_contents.extend(contents)

    return change


def _with_rows(count: int) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        message.inputs[0].shape[0] = count
        _with_raw(b"\0" * 4 * FEATURES * count)(message)

    return change


def _with_integers(message: Any) -> None:
    message.inputs[0].datatype = "INT8"
    message.inputs[0].contents.CopyFrom(service_pb2.InferTensorContents(int_contents=[128] * 2 * FEATURES))


MALFORMED: dict[str, tuple[int, Callable[[Any], object]]] = {
    "too many rows": (413, _with_rows(4)),
    "too many values": (413, lambda message: message.inputs[0].contents.fp32_contents.extend([0.0] * 99)),
    "unknown datatype": (422, lambda message: setattr(message.inputs[0], "datatype", "FP8")),
    "strings": (422, lambda message: setattr(message.inputs[0], "datatype", "BYTES")),
    "another field": (422, lambda message: message.inputs[0].contents.int_contents.append(1)),
    "no contents": (422, lambda message: message.inputs[0].ClearField("contents")),
    "too few values": (422, lambda message: message.inputs[0].contents.fp32_contents.pop()),
    "integers too large": (422, _with_integers),
    "raw and typed": (400, lambda message: message.raw_input_contents.append(b"\0" * 8 * FEATURES)),
    "too many raw contents": (400, _with_raw(b"\0" * 8 * FEATURES, b"")),
    "raw of another size": (422, _with_raw(b"\0")),
    "thousands of dimensions": (400, lambda message: message.inputs[0].shape.extend([10] * 5000)),
    "a negative size": (400, lambda message: message.inputs[0].shape.__setitem__(0, -2)),
    "output twice": (422, lambda message: message.outputs.extend(2 * [message.outputs.add(name="label")])),
    "parameter without a value": (400, lambda message: message.parameters["binary_data_output"]),
}


@pytest.mark.parametrize("change", MALFORMED)
def test_a_malformed_message_is_refused_with_a_sentence(head: Deployment, change: str) -> None:
    message = _message(some_rows(2), id="a")
    assert _decode(message, head).id == "a"
    status, apply = MALFORMED[change]
    apply(message)
    with pytest.raises(HttpError) as caught:
        _decode(message, head)
    assert caught.value.status == status
    assert caught.value.message.endswith(".")
    assert "binary_data_size" not in caught.value.message


@pytest.mark.parametrize("content", [b"\xff", b"\x0a\x05ab", b"\x0a\x01\xff", b"\x2a\x80\x80\x80\x80\x80"])
def test_bytes_that_are_no_message_are_refused(content: bytes) -> None:
    with pytest.raises(HttpError, match="not a valid ModelInferRequest") as caught:
        _parse_request(content, 3)
    assert caught.value.status == 400


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes as it is sent."""
    size, length = len(content), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


_MIB = 2**20
LARGE = {
    "inputs": _field(5, b"") * _MIB,
    "outputs": _field(6, b"") * _MIB,
    "raw contents": _field(7, b"") * _MIB,
    "parameters": _field(4, b"") * _MIB,
    "unknown fields": b"\x78\x00" * _MIB,
    "parameters of an input": _field(5, _field(4, b"") * _MIB),
    "shape of an input": _field(5, _field(3, b"\0" * _MIB)),
    "strings of an input": _field(5, _field(5, _field(8, b"") * _MIB)),
    "numbers of an input": _field(5, _field(5, b"\x18\x01" * _MIB)),
    "a field that does not end": _field(5, b"\x2a\xff\xff\xff\x7f" + b"\0" * _MIB),
    "a number that does not end": b"\x80" * _MIB,
    "groups": b"\x7b\x7c" * _MIB,
}


@pytest.mark.parametrize("name", LARGE)
def test_a_message_of_countless_tiny_parts_is_refused_before_it_is_parsed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(*_: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(grpc_server, "_parse_message", parse)
    with pytest.raises(HttpError) as caught:
        _parse_request(LARGE[name], 1000)
    assert caught.value.status in (400, 413)


def test_a_large_valid_message_is_parsed(head: Deployment, survey: Deployment) -> None:
    features = service_pb2.ModelInferRequest()
    tensor = features.inputs.add(name="features", datatype="FP32", shape=[5000, FEATURES])
    tensor.contents.fp32_contents.extend([0.5] * 5000 * FEATURES)
    columns = service_pb2.ModelInferRequest()
    for name, value in (("age", b"30"), ("income", b"9000"), ("région", b"north")):
        column = columns.inputs.add(name=name, datatype="BYTES", shape=[5000])
        column.contents.bytes_contents.extend([value] * 5000)
    for message, deployment in ((features, head), (columns, survey)):
        content = message.SerializeToString()
        assert len(content) > 2**16
        assert len(_decode_request(_parse_request(content, 5000), deployment, 5000).rows) == 5000
