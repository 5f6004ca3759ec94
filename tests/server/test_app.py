"""The inference endpoint over HTTP, with an unmodified client of Triton, and the other routes."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton  # type: ignore[import-untyped]
from tritonclient.utils import (  # type: ignore[import-untyped]
    InferenceServerException,
    triton_to_np_dtype,
)

from quietmax.accounting.costs import LIMIT
from quietmax.server import Service, Settings, codec
from quietmax.server.app import create_app
from quietmax.server.codec import _decode_request
from quietmax.server.errors import HttpError
from tests.server.running_service import (
    CLASSES,
    FEATURES,
    TABLE,
    Running,
    Start,
    bearer,
    check_message,
    column_inference,
    inference,
    run_async,
    some_rows,
    watch,
)


def _triton(service: Running) -> Any:
    return triton.InferenceServerClient(service.url.removeprefix("http://"))


def _triton_input(rows: Any, **how: Any) -> Any:
    tensor = triton.InferInput("features", list(rows.shape), "FP32")
    tensor.set_data_from_numpy(rows.astype(np.float32), **how)
    return tensor


def test_the_unmodified_triton_client_asks_for_health_metadata_and_answers(plain: Running) -> None:
    client, headers = _triton(plain), bearer(plain.key)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("plain", headers=headers)
    assert client.is_model_ready("plain", "1", headers=headers)
    assert not client.is_model_ready("nobody", headers=headers)
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data", "privacy_budget"]
    metadata = client.get_model_metadata("plain", headers=headers)
    assert metadata["inputs"] == [{"name": "features", "datatype": "FP32", "shape": [-1, FEATURES]}]
    assert [output["name"] for output in metadata["outputs"]] == ["label", "probabilities"]

    rows = some_rows(3)
    binary = client.infer("plain", [_triton_input(rows)], request_id="t1", headers=headers)
    assert binary.get_response()["id"] == "t1"
    assert binary.as_numpy("label").shape == (3,)
    assert binary.as_numpy("probabilities").shape == (3, CLASSES)
    wanted = [
        triton.InferRequestedOutput("label", binary_data=False),
        triton.InferRequestedOutput("probabilities"),
    ]
    listed = [_triton_input(rows, binary_data=False)]
    again = client.infer("plain", listed, "1", wanted, headers=bearer(plain.key))
    np.testing.assert_array_equal(again.as_numpy("probabilities"), binary.as_numpy("probabilities"))
    assert again.get_response()["parameters"]["cost"] == 0
    assert binary.get_response()["parameters"]["remaining_answers"] == 17
    told = r"Privacy budget exhausted: 18 answers requested, 17 left\. Nothing was charged\."
    with pytest.raises(InferenceServerException, match=told) as error:
        client.infer("plain", [_triton_input(some_rows(18, 1))], headers=bearer(plain.key))
    assert error.value.status() == "403"
    with pytest.raises(InferenceServerException, match="An API key is required"):
        client.infer("plain", [_triton_input(some_rows(1, 1))])


def _triton_column(name: str, datatype: str, cells: Any, **how: Any) -> Any:
    tensor = triton.InferInput(name, [len(cells)], datatype)
    tensor.set_data_from_numpy(np.array(cells, triton_to_np_dtype(datatype)), **how)
    return tensor


@pytest.mark.parametrize("binary", [True, False])
def test_the_unmodified_triton_client_sends_columns_and_gets_class_names(
    table: Running, binary: bool
) -> None:
    client = _triton(table)
    metadata = client.get_model_metadata("table", headers=bearer(table.key))
    assert metadata["inputs"] == [
        {"name": "age", "datatype": "FP64", "shape": [-1]},
        {"name": "income", "datatype": "FP64", "shape": [-1]},
        {"name": "région", "datatype": "BYTES", "shape": [-1]},
    ]
    assert metadata["outputs"] == [
        {"name": "label", "datatype": "BYTES", "shape": [-1]},
        {"name": "probabilities", "datatype": "FP32", "shape": [-1, 2]},
    ]
    assert metadata["parameters"]["encoded_input"] == {
        "name": "features",
        "datatype": "FP32",
        "shape": [-1, len(TABLE.feature_names)],
    }
    assert metadata["parameters"]["encoding"]["columns"][0]["high"] == 100

    answers = [
        client.infer(
            "table",
            [
                _triton_column("age", "FP64", [30.0, 99.0, 5.0], binary_data=binary),
                _triton_column("income", "INT64", [100, 200, 300], binary_data=binary),
                _triton_column("région", "BYTES", ["north", "south", ""], binary_data=binary),
            ],
            outputs=[triton.InferRequestedOutput(name, binary) for name in ("label", "probabilities")],
            headers=bearer(table.key),
        )
        for _ in range(2)
    ]
    probabilities = answers[0].as_numpy("probabilities")
    names = [TABLE.classes[label] for label in probabilities.argmax(1)]
    for answer in answers:
        told = [
            name.decode() if isinstance(name, bytes) else name for name in answer.as_numpy("label").tolist()
        ]
        assert told == names
        np.testing.assert_array_equal(answer.as_numpy("probabilities"), probabilities)
    assert [answer.get_response()["parameters"]["new_answers"] for answer in answers] == [3, 0]


def test_unknown_paths_and_methods_are_404_and_405(plain: Running) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", "/v2/models/plain/infer", 405),
        ("DELETE", "/v2/models/plain", 405),
        ("POST", "/v2", 405),
        ("POST", "/v2/models/no/body/infer", 404),
        ("POST", "/v2/models/" + "x" * 80 + "/infer", 404),
        ("GET", "/docs", 404),
    ):
        response = plain.http.request(method, path)
        assert response.status_code == status, path
        check_message(response)


def test_bodies_and_batches_beyond_the_limits_are_413_and_compressed_ones_415(start: Start) -> None:
    with start("plain", settings=Settings(max_bytes=2000, max_rows=3)) as service:
        assert service.infer(some_rows(3)).status_code == 200
        assert service.infer(some_rows(4)).status_code == 413
        assert service.post_body(b"x" * 2001).status_code == 413
        streamed = service.http.post("/v2/models/plain/infer", content=iter([b"x" * 1500, b"x" * 1500]))
        compressed = service.post_body(b"\x1f\x8b", **{"content-encoding": "gzip"})
        for response, status in ((streamed, 413), (compressed, 415)):
            assert response.status_code == status
            check_message(response)
        assert service.ledger.account("people").spent_units == 3 * LIMIT // 20


def test_an_answer_carries_its_tensors_its_cost_and_what_is_left(plain: Running) -> None:
    body = plain.infer(some_rows(2)).json()
    assert (body["model_name"], body["model_version"]) == ("plain", "1")
    label, probabilities = body["outputs"]
    assert (label["name"], label["datatype"], label["shape"]) == ("label", "INT64", [2])
    assert (probabilities["name"], probabilities["datatype"], probabilities["shape"]) == (
        "probabilities",
        "FP32",
        [2, CLASSES],
    )
    table = np.array(probabilities["data"]).reshape(2, CLASSES)
    np.testing.assert_allclose(table.sum(1), 1, atol=1e-5)
    assert label["data"] == table.argmax(1).tolist()
    assert body["parameters"]["remaining_answers"] == 18
    assert body["parameters"]["new_answers"] == 2
    assert body["parameters"]["cost"] == pytest.approx(10 * (2 / 20) ** 0.5)
    assert body["parameters"]["remaining"] == pytest.approx(10 * (18 / 20) ** 0.5)


def test_outputs_can_be_chosen_and_nested_lists_and_integers_are_accepted(plain: Running) -> None:
    request = inference(some_rows(1), outputs=[{"name": "label"}])
    body = plain.http.post("/v2/models/plain/infer", json=request).json()
    assert [output["name"] for output in body["outputs"]] == ["label"]
    nested = inference(some_rows(2, 1))
    nested["inputs"][0]["data"] = np.array(nested["inputs"][0]["data"]).reshape(2, FEATURES).tolist()
    assert plain.http.post("/v2/models/plain/infer", json=nested).status_code == 200
    whole = inference(np.arange(FEATURES)[None])
    whole["inputs"][0].update(datatype="UINT8", data=list(range(FEATURES)))
    assert plain.http.post("/v2/models/plain/infer", json=whole).status_code == 200


def test_a_connection_that_ends_within_the_body_charges_nothing(idle: Service) -> None:
    sent: list[Any] = []

    async def infer() -> None:
        parts = iter(
            [{"type": "http.request", "body": b'{"inputs"', "more_body": True}, {"type": "http.disconnect"}]
        )

        async def receive() -> Any:
            return next(parts)

        async def send(message: Any) -> None:
            sent.append(message)

        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/v2/models/plain/infer",
            "headers": [(b"host", b"localhost")],
            "client": ("127.0.0.1", 1),
            "http_version": "1.1",
        }
        await create_app(idle)(scope, receive, send)

    run_async(infer())
    assert sent[0]["status"] == 400
    assert idle.ledger.account(idle.deployment("plain", None).account.name).spent_units == 0


def test_an_internal_error_is_500_and_reveals_nothing(
    plain: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret inner detail")

    monkeypatch.setattr(plain.service, "deployment", broken)
    response = plain.infer(some_rows(1))
    assert response.status_code == 500
    check_message(response)
    assert "secret" not in response.text
    plain.service.log.flush()
    assert b'"event":"failed","kind":"RuntimeError"' in plain.log.getvalue()
    assert b"secret" not in plain.log.getvalue()


def _body(data: str) -> bytes:
    return f'{{"inputs":[{{"name":"features","datatype":"FP32","shape":[1,{FEATURES}],"data":{data}}}]}}'.encode()


@pytest.mark.parametrize(
    ("repeated", "count"),
    [("[1],", 4_000_000), ("[[[[[[[", 2_000_000), ("1,", 8_000_000), ('"",', 5_000_000), ("{},", 5_000_000)],
    ids=["lists", "depth", "numbers", "strings", "objects"],
)
def test_a_large_body_of_the_wrong_structure_is_refused_before_it_is_parsed(
    idle: Service, monkeypatch: pytest.MonkeyPatch, repeated: str, count: int
) -> None:
    def parse(*_: Any) -> None:
        raise AssertionError("The body was parsed.")

    body = _body("[" + repeated * count + "1]")
    assert len(body) < idle.settings.max_bytes
    monkeypatch.setattr(codec, "_parse", parse)
    started = time.process_time()
    with pytest.raises(HttpError) as refused:
        _decode_request(body, None, idle.deployment("plain"), idle.settings.max_rows)
    assert time.process_time() - started < 3
    assert refused.value.status == 413


def test_the_largest_requests_and_strings_full_of_commas_pass_the_check_of_the_structure(
    table: Running, plain: Running
) -> None:
    for count in (1, 1000):
        rows = some_rows(count).round(3)
        nested = inference(rows)
        nested["inputs"][0]["data"] = rows.tolist()
        for request in (inference(rows), nested):
            codec._check_structure(
                json.dumps(request, indent=1).encode(), plain.service.deployment("plain"), 1000
            )
    columns: dict[str, list[Any]] = {
        "age": [30] * 1000,
        "income": [[5]] * 1000,
        "région": ['{"a": [1,2,3,4], "b": \\ [[[[' * 20] * 1000,
    }
    body = json.dumps(column_inference(columns)).encode()
    codec._check_structure(body, table.service.deployment("table"), 1000)
    with pytest.raises(HttpError):
        codec._check_structure(body, table.service.deployment("table"), 300)


def test_large_bodies_are_decoded_in_a_thread_and_small_ones_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = watch(monkeypatch, codec, "_decode_request", lambda *_: threading.current_thread().name)
    with start("plain", "table") as service:
        for spaces in (0, 2**20):
            assert service.post_body(_body("[1,2,3,4,5,6]") + b" " * spaces).status_code == 200
        for cell in ("north", "x" * 100_000, ""):
            columns = {"age": [30], "income": [5], "région": [cell]}
            assert service.infer_columns(columns).json()["parameters"]["new_answers"] == 1
    loop = threads[0]
    assert [thread == loop for thread in threads] == [True, False, True, False, True]


def test_every_401_403_and_404_is_logged_with_address_and_request_id(plain: Running) -> None:
    plain.infer(some_rows(20))
    for method, path, headers, status, route, client in (
        ("GET", "/v2/models", {"authorization": "Bearer x"}, 401, "/v2/models", None),
        ("GET", "/qm_key_in_the_path", {}, 404, None, None),
        ("GET", "/v2/models/nobody/budget", {}, 404, "/v2/models/{name}/budget", "ann"),
        ("POST", "/v2/models/nobody/infer", {}, 404, "/v2/models/{name}/infer", "ann"),
        ("GET", "/state", {"authorization": "Bearer x"}, 401, "/state", None),
    ):
        answered = plain.http.request(method, path, headers=headers)
        assert answered.status_code == status
        line = plain.lines()[-1]
        assert line["event"] == "request"
        assert (line["status"], line["route"], line["client"]) == (status, route, client)
        assert (line["address"], line["request"]) == ("127.0.0.1", answered.headers["x-request-id"])
    exhausted = plain.infer(some_rows(1, 1))
    assert exhausted.status_code == 403
    assert plain.lines()[-1]["request"] == exhausted.headers["x-request-id"]
    ids = [line["request"] for line in plain.lines() if "request" in line]
    assert len(set(ids)) == len(ids)
    assert b"qm_key" not in plain.log.getvalue()


def test_an_unfinished_string_of_quotes_is_checked_in_linear_time_and_its_refusal_always_logged(
    start: Start,
) -> None:
    """A search that starts again at every quote took 14 s for 36 KB. The connection can be used again afterwards."""
    body = b"{" * 65 + b'"' + b'\\"' * 500_000
    with start("head", settings=Settings(request_log=False)) as service:
        begun = time.process_time()
        response = service.http.post("/v2/models/head/infer", content=body)
        assert response.status_code in (400, 413)
        assert time.process_time() - begun < 5
        for key, status in (("x", 401), (service.key, 200)):
            assert service.infer(some_rows(1), "head", key=key).status_code == status
        logged = [line["status"] for line in service.lines() if line["event"] == "request"]
        assert logged == [401], "without a request log too"
