"""gRPC with an unmodified client of Triton: the same answers, charges, limits and errors as over HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from quietmax import __version__
from quietmax.ledger import Terms
from quietmax.server import Settings
from tests.server.running_service import CLASSES, Running, Start, some_loans, some_rows

INFER = "/inference.GRPCInferenceService/ModelInfer"
LOANS_TEXT = {"joined": "%d.%m.%Y", "seen": "%Y-%m-%d %H:%M:%S"}


def _client(running: Running) -> triton.InferenceServerClient:
    assert running.grpc is not None
    return triton.InferenceServerClient(running.grpc)


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _tensor(name: str, values: Any, datatype: str) -> triton.InferInput:
    array = np.asarray(values)
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def _features(rows: Any) -> list[triton.InferInput]:
    return [_tensor("features", np.asarray(rows, dtype=np.float32), "FP32")]


def _infer(running: Running, model: str, rows: Any, key: str | None = None, **more: Any) -> Any:
    with _client(running) as client:
        return client.infer(model, _features(rows), headers=_headers(key or running.key), **more)


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


def _send(running: Running, content: bytes, method: str = INFER, **more: Any) -> bytes:
    """Send a message as it is."""
    with grpc.insecure_channel(str(running.grpc)) as channel:
        call = channel.unary_unary(method, lambda each: each, lambda each: each)
        answer: bytes = call(content, metadata=tuple(_headers(running.key).items()), timeout=30, **more)
        return answer


@pytest.fixture
def charged(start: Start) -> Iterator[Running]:
    """An ordinary model behind Algorithm 1, with a budget for 20 answers."""
    with start("plain", budget=Terms(10.0), queries=20, grpc=True) as running:
        yield running


def test_health_and_metadata_are_those_of_http(start: Start) -> None:
    with start("head", "loans", grpc=True) as running, _client(running) as client:
        headers = _headers(running.key)
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
            result = client.infer("loans", inputs, headers=_headers(running.key))
            assert [name.decode() for name in result.as_numpy("label")] == expected
        with pytest.raises(InferenceServerException, match="no column 'zip'") as caught:
            client.infer(
                "loans", [each for each in strings if each.name() != "zip"], headers=_headers(running.key)
            )
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


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
    with pytest.raises(grpc.RpcError) as caught:
        _send(charged, _message(some_rows(3, seed=2)).SerializeToString())
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert caught.value.details() == (
        "Privacy budget exhausted: 3 answers requested, 2 left. Nothing was charged."
    )
    trailers = dict(caught.value.trailing_metadata())
    assert trailers["remaining_answers"] == "2"
    assert float(trailers["remaining"]) == charged.http.get("/v2/models/plain/budget").json()["remaining"] > 0
    assert _parameters(_infer(charged, "plain", some_rows(2, seed=3)))["remaining_answers"] == 0


def test_a_retry_with_the_same_id_is_not_charged_twice(start: Start) -> None:
    rows = some_rows(2)
    settings = Settings(answer_cache=False)
    with start("plain", budget=Terms(10.0), queries=20, settings=settings, grpc=True) as running:
        first, second = (_infer(running, "plain", rows, request_id="once") for _ in range(2))
        over_http = running.infer(rows, id="once").json()
        assert first.as_numpy("label").tolist() == second.as_numpy("label").tolist()
        assert first.as_numpy("label").tolist() == over_http["outputs"][0]["data"]
        assert [_parameters(each)["new_answers"] for each in (first, second)] == [2, 0]
        with pytest.raises(InferenceServerException, match="used for another request") as caught:
            _infer(running, "plain", some_rows(2, seed=1), request_id="once")
        assert caught.value.status() == "StatusCode.ALREADY_EXISTS"
        assert running.ledger.accounts()[0].spent_units == 2 * running.service.deployments[0].unit_cost


def test_without_a_valid_key_nothing_is_answered(charged: Running) -> None:
    rows = _features(some_rows(1))
    with _client(charged) as client:
        for headers in (None, _headers("qm_wrong"), {"authorization": charged.key}):
            for ask in (
                lambda headers=headers: client.infer("plain", rows, headers=headers),
                lambda headers=headers: client.get_model_metadata("plain", headers=headers),
                lambda headers=headers: client.is_model_ready("plain", headers=headers),
            ):
                with pytest.raises(InferenceServerException, match="API key") as caught:
                    ask()
                assert caught.value.status() == "StatusCode.UNAUTHENTICATED"
        with pytest.raises(InferenceServerException, match="no such model") as caught:
            client.infer("other", rows, headers=_headers(charged.key))
        assert caught.value.status() == "StatusCode.NOT_FOUND"
        with pytest.raises(InferenceServerException) as caught:
            client.infer("plain", rows, model_version="2", headers=_headers(charged.key))
        assert caught.value.status() == "StatusCode.NOT_FOUND"
    assert charged.ledger.accounts()[0].spent_units == 0


def test_the_key_is_checked_before_the_message_arrives(charged: Running) -> None:
    """A client without a key cannot make the service receive a large message or wait for one."""
    with grpc.insecure_channel(str(charged.grpc)) as channel:
        call = channel.stream_unary(INFER, lambda each: each, lambda each: each)
        silence = threading.Event()

        def never() -> Iterator[bytes]:
            silence.wait(20)
            yield b""

        started = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            call(never(), timeout=15)
        silence.set()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert time.monotonic() - started < 5


def test_limits_are_those_of_http(start: Start) -> None:
    settings = Settings(max_rows=3, max_bytes=4096, timeout=0.5)
    with start("plain", budget=Terms(10.0), queries=20, settings=settings, grpc=True) as running:
        with pytest.raises(grpc.RpcError) as caught:
            _send(running, _message(some_rows(4)).SerializeToString())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == "`features` must have at most 3 rows, got 4."
        with pytest.raises(grpc.RpcError) as caught:
            _send(running, b"\0" * 5000)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.RpcError) as caught:
            _send(running, _message(some_rows(1)).SerializeToString(), compression=grpc.Compression.Gzip)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with grpc.insecure_channel(str(running.grpc)) as channel:
            call = channel.stream_unary(INFER, lambda each: each, lambda each: each)
            silence = threading.Event()

            def never() -> Iterator[bytes]:
                silence.wait(20)
                yield b""

            with pytest.raises(grpc.RpcError) as caught:
                call(never(), metadata=tuple(_headers(running.key).items()), timeout=15)
            silence.set()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert caught.value.details() == "The message did not arrive in time. Nothing was charged."
        assert running.ledger.accounts()[0].spent_units == 0


def test_anonymous_access_follows_the_rules_of_http(start: Start) -> None:
    settings = Settings(anonymous=True)
    with start("head", settings=settings, grpc=True) as running, _client(running) as client:
        assert client.infer("head", _features(some_rows(1))).as_numpy("label").shape == (1,)
        with pytest.raises(InferenceServerException, match="through a proxy") as caught:
            client.infer("head", _features(some_rows(1)), headers={"x-forwarded-for": "192.0.2.1"})
        assert caught.value.status() == "StatusCode.PERMISSION_DENIED"
