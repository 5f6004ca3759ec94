from __future__ import annotations

import json
import random
import socket
import struct
import time

import httpx
import numpy as np
import pandas as pd
import pytest
import schemathesis
import tritonclient.http as triton
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tritonclient.utils import InferenceServerException

from quietmax.accounting import LIMIT
from quietmax.data import CategoricalColumn, Encoding, NumericColumn
from quietmax.errors import BudgetExhausted, InvalidInput, QuietmaxError
from quietmax.ledger import Terms
from quietmax.models import Model, TrainingSettings, save_model
from quietmax.models.mlp import initial_mlp
from quietmax.server import Client, Settings
from tests.server.running_service import CLASSES, FEATURES, inference, running, some_rows


def _triton(service):
    return triton.InferenceServerClient(service.url.removeprefix("http://"))


def _triton_input(rows, **how):
    tensor = triton.InferInput("features", list(rows.shape), "FP32")
    tensor.set_data_from_numpy(rows.astype(np.float32), **how)
    return tensor


def test_the_unmodified_triton_client_asks_for_health_metadata_and_answers(plain):
    client, headers = _triton(plain), {"authorization": f"Bearer {plain.key}"}
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
    fresh = {"authorization": f"Bearer {plain.key}"}  # the client has written into the first one
    again = client.infer("plain", listed, "1", wanted, headers=fresh)
    np.testing.assert_array_equal(again.as_numpy("probabilities"), binary.as_numpy("probabilities"))
    assert again.get_response()["parameters"]["cost"] == 0
    assert binary.get_response()["parameters"]["remaining_answers"] == 17


def test_the_triton_client_shows_our_sentence_when_the_budget_is_gone(plain):
    client, headers = _triton(plain), {"authorization": f"Bearer {plain.key}"}
    client.infer("plain", [_triton_input(some_rows(20))], headers=headers)
    with pytest.raises(InferenceServerException, match="pays for 0 more; nothing was spent") as refusal:
        client.infer("plain", [_triton_input(some_rows(1, 1))], headers=headers)
    assert refusal.value.status() == "403"
    with pytest.raises(InferenceServerException, match="A key is needed"):
        client.infer("plain", [_triton_input(some_rows(1, 1))])


def test_our_own_client_asks_retries_and_says_when_the_budget_is_gone(plain):
    with Client(plain.url, plain.key) as client:
        answer = client.ask("plain", some_rows(4), request_id="c")
        assert answer.labels.shape == (4,)
        assert answer.probabilities.shape == (4, CLASSES)
        assert client.ask("plain", some_rows(4), request_id="c").parameters["cost"] == 0
        assert client.metadata("plain")["parameters"]["guarantee_status"] == "refuted"
        assert client.budget("plain", version="1")["remaining_answers"] == 16
        client._connection.sock.shutdown(socket.SHUT_RDWR)
        assert client.predict("plain", some_rows(1, 5)).shape == (1,)
        with pytest.raises(BudgetExhausted, match="pays for 15 more"):
            client.predict("plain", some_rows(16, 9))
        with pytest.raises(InvalidInput, match="no such model"):
            client.metadata("nobody")
    with pytest.raises(QuietmaxError, match="wrong, revoked or expired"):
        Client(plain.url, "qm_nonsense").metadata("plain")
    with pytest.raises(QuietmaxError, match="cannot be reached"):
        Client("http://127.0.0.1:9").metadata("plain")
    with pytest.raises(InvalidInput, match="no http or https address"):
        Client("ftp://x")


@pytest.mark.parametrize("measurements", [(), ("bounds of age",)])
def test_rows_of_a_table_are_encoded_by_the_declared_encoding_and_never_by_a_measured_one(
    measurements, tmp_path
):
    columns = (NumericColumn("age", 0, 100, missing=False), CategoricalColumn("sex", ("female", "male")))
    encoding = Encoding(columns, "ill", ("no", "yes"), measurements)
    width = len(encoding.feature_names)
    network = initial_mlp((width, 8, 2), "tanh", (0,))
    save_model(
        Model(network, TrainingSettings((8,)), 160, "people", 0, encoding=encoding), tmp_path / "table"
    )
    table = [{"sex": "male", "age": 25}, {"sex": "female", "age": 250}]
    options = {"budget": Terms(10.0), "queries": 20}
    with (
        running(f"sqlite:///{tmp_path / 'l.sqlite'}", [f"table={tmp_path / 'table'}"], **options) as service,
        Client(service.url, service.key) as client,
    ):
        if measurements:
            assert "encoding" not in client.metadata("table")["parameters"]
            with pytest.raises(
                InvalidInput, match="no public encoding of columns; give its features as rows"
            ):
                client.ask("table", table)
            return
        first = client.ask("table", table)
        same = client.ask("table", encoding.encode(pd.DataFrame(table)))
        assert first.parameters["new_answers"] == 2
        assert same.parameters["new_answers"] == 0, "the same features were asked"
        np.testing.assert_array_equal(first.labels, same.labels)
        assert client.ask("table", pd.DataFrame(table)).parameters["new_answers"] == 0
        with pytest.raises(InvalidInput, match="no column 'sex'"):
            client.ask("table", [{"age": 3}])


def _raw(service, body, **headers):
    return service.http.post("/v2/models/plain/infer", content=body, headers=headers)


def test_binary_tensors_of_the_wrong_size_are_refused(plain):
    rows = some_rows(1).astype("<f4").tobytes()

    def ask(size, content, announced=None):
        tensor = {
            "name": "features",
            "shape": [1, FEATURES],
            "datatype": "FP32",
            "parameters": {"binary_data_size": size},
        }
        head = json.dumps({"inputs": [tensor]}).encode()
        length = len(head) if announced is None else announced
        return _raw(plain, head + content, **{"inference-header-content-length": str(length)}).status_code

    assert ask(len(rows), rows) == 200
    assert ask(len(rows), rows[:-1]) == 422
    assert ask(len(rows) - 4, rows[:-4]) == 422
    assert ask(len(rows), rows + b"x") == 422
    assert ask("24", rows) == 422
    assert ask(True, rows) == 422
    assert ask(len(rows), rows, announced=10**6) == 400
    assert ask(len(rows), rows, announced="x") == 400
    assert ask(len(rows), rows, announced=-1) == 400
    assert ask(len(rows), struct.pack("<6f", *[float("nan")] * 6)) == 422
    assert plain.ledger.account("people").spent_units == LIMIT // 20


def _one(**changes):
    tensor = {"name": "features", "shape": [1, FEATURES], "datatype": "FP32", "data": [0.5] * FEATURES}
    tensor.update(changes)
    return {"inputs": [{key: value for key, value in tensor.items() if value is not ...}]}


@pytest.mark.parametrize(
    ("request_body", "status"),
    [
        ({}, 400),
        ([], 400),
        ("text", 400),
        (None, 400),
        (7, 400),
        ({"inputs": []}, 400),
        ({"inputs": {}}, 400),
        ({"inputs": [1]}, 400),
        ({"inputs": [None]}, 400),
        ({"inputs": _one()["inputs"] * 2}, 422),
        (_one(name="other"), 422),
        (_one(name=...), 400),
        (_one(name=5), 400),
        (_one(name="x" * 65), 400),
        (_one(shape=[FEATURES]), 422),
        (_one(shape=[1, FEATURES + 1]), 422),
        (_one(shape=[2, FEATURES]), 422),
        (_one(shape=[0, FEATURES]), 422),
        (_one(shape=[-1, FEATURES]), 400),
        (_one(shape=[1.0, FEATURES]), 400),
        (_one(shape=[True, FEATURES]), 400),
        (_one(shape="1,6"), 400),
        (_one(shape=[]), 400),
        (_one(shape=[1] * 9), 400),
        (_one(shape=...), 400),
        (_one(shape=[10**30, FEATURES]), 400),
        (_one(shape=[1001, FEATURES]), 413),
        (_one(datatype="BYTES"), 422),
        (_one(datatype="BOOL"), 422),
        (_one(datatype=["FP32"]), 422),
        (_one(datatype=...), 422),
        (_one(data=...), 400),
        (_one(data="0.5"), 400),
        (_one(data={"a": 1}), 400),
        (_one(data=[]), 422),
        (_one(data=[0.5] * 5), 422),
        (_one(data=[0.5] * 7), 422),
        (_one(data=["0.5"] * FEATURES), 422),
        (_one(data=[0.5] * 5 + ["0.5"]), 422),
        (_one(data=[True] * FEATURES), 422),
        (_one(data=[0.5] * 5 + [False]), 422),
        (_one(data=[0.5] * 5 + [None]), 422),
        (_one(data=[0.5] * 5 + [[0.5]]), 422),
        (_one(data=[[0.5] * 3, [0.5] * 3]), 422),
        (_one(data=[[0.5] * 5 + ["1"]]), 422),
        (_one(data=[0.5] * 5 + [{"a": 1}]), 422),
        (_one(data=[0.5] * 5 + [1e300]), 422),
        (_one(data=[0.5] * 5 + [10**400]), 400),
        (_one(data=[0.5] * 5 + [1e16]), 422),
        (_one(datatype="INT8"), 422),
        (_one(datatype="UINT8", data=[256] * FEATURES), 422),
        (_one(datatype="UINT8", data=[-1] * FEATURES), 422),
        (_one(parameters=[]), 400),
        (_one(parameters={"binary_data_size": 24}), 400),
        ({**_one(), "id": 5}, 400),
        ({**_one(), "id": "x" * 129}, 400),
        ({**_one(), "id": ["x"]}, 400),
        ({**_one(), "parameters": 5}, 400),
        ({**_one(), "parameters": {"a": None}}, 400),
        ({**_one(), "parameters": {"a": {}}}, 400),
        ({**_one(), "outputs": "label"}, 400),
        ({**_one(), "outputs": [5]}, 400),
        ({**_one(), "outputs": [{"name": 5}]}, 400),
        ({**_one(), "outputs": [{"name": "other"}]}, 422),
        ({**_one(), "outputs": [{"name": "label"}] * 2}, 422),
        ({**_one(), "outputs": [{"name": "label", "parameters": 5}]}, 400),
        ({**_one(), "outputs": [{"name": "label"}] * 99}, 400),
    ],
)
def test_a_malformed_request_is_refused_in_one_sentence_and_spends_nothing(
    malformed_service, request_body, status
):
    response = _raw(malformed_service, json.dumps(request_body))
    assert response.status_code == status, response.text
    _is_one_sentence(response)
    assert malformed_service.ledger.account("people").spent_units == 0


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"inputs": NaN}',
        b'{"inputs": [Infinity]}',
        b'{"a": 1,}',
        b"[" * 100_000,
        b'{"a":' * 5_000,
        b'{"inputs": "\xed\xa0\x80"}',
        json.dumps(_one()).encode().replace(b'"data"', b'"data": [9], "data"'),
        json.dumps(_one()).encode().replace(b'"name"', b'"name": "other", "name"'),
        json.dumps(_one()).encode()[:-1] + b', "inputs": []}',
        json.dumps(_one()).encode().replace(b'"name"', b'"\\u006eame": "other", "name"'),
        json.dumps(_one()).encode()[:-1] + b', "id": "a", "id": "b"}',
        json.dumps(_one()).encode() + b"x",
        json.dumps(_one()).encode()[:-1] + b', "id": "\\ud800"}',
    ],
)
def test_text_that_is_no_sound_json_is_refused(malformed_service, text):
    response = _raw(malformed_service, text)
    assert response.status_code == 400, response.text
    _is_one_sentence(response)
    assert malformed_service.ledger.account("people").spent_units == 0


def _is_one_sentence(response):
    told = response.json()["error"]
    assert told[0].isupper()
    assert told.endswith(".")
    assert "\n" not in told
    assert "Traceback" not in told
    assert len(told) < 400


@pytest.fixture(scope="module")
def malformed_service(models, tmp_path_factory):
    from running_service import running

    place = f"sqlite:///{tmp_path_factory.mktemp('malformed') / 'ledger.sqlite'}"
    with running(place, [f"plain={models / 'plain'}"], budget=Terms(10.0), queries=20) as service:
        yield service


_BROKEN = (None, True, "x", "\u0000", "🙂" * 30, -1, 1.5, 10**30, [], {}, [[]], [None], {"a": {}}, ["1"] * 6)


def _mutated(rng: random.Random) -> bytes:
    """A request with something wrong in it, sound JSON or not."""
    request = _one()
    request.update(id="x", parameters={}, outputs=[{"name": "label"}])
    how = rng.randrange(9)
    tensor = request["inputs"][0]
    if how == 0:
        tensor[rng.choice(["name", "shape", "datatype", "data"])] = rng.choice(_BROKEN)
    elif how == 1:
        field = rng.choice(["inputs", "outputs", "parameters", "id"])
        sound = {"id": (str, type(None)), "parameters": type(None), "outputs": type(None), "inputs": ()}[
            field
        ]
        wrong = [value for value in _BROKEN if not isinstance(value, sound) and value not in ([], {})]
        request[field] = rng.choice(wrong)
    elif how == 2:
        tensor["shape"] = [rng.choice([0, 2, 7, 10**9, -5]), rng.choice([FEATURES, 5, 0])]
    elif how == 3:
        tensor["data"] = [rng.choice(_BROKEN) if rng.random() < 0.5 else 0.5 for _ in range(FEATURES - 1)] + [
            None
        ]
    elif how == 4:
        tensor["data"] = [0.5] * rng.choice([0, 1, 5, 7, 600])
    elif how == 5:
        tensor["data"] = [[0.5] * rng.randrange(1, 6) for _ in range(rng.randrange(2, 5))]
    text = json.dumps(request).encode()
    if how == 6:
        text = text[: rng.randrange(len(text) - 1)]
    elif how == 7:
        place = text.index(b'"datatype"')
        text = text[:place] + rng.choice([b'"name": 1, ', b'"data": [1], ', b'"shape": [], ']) + text[place:]
    elif how == 8:
        place = text.index(b"0.5")
        text = (
            text[:place]
            + rng.choice([b"NaN", b"-Infinity", b"1e999", b"0x5", b"'5'", b"\xff", b".5"])
            + text[place + 3 :]
        )
    return text


def _fuzz(service, count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        body = _mutated(rng)
        response = _raw(service, body)
        assert 400 <= response.status_code < 500, (response.status_code, body[:500])
        _is_one_sentence(response)
    assert service.ledger.account("people").spent_units == 0
    assert service.infer(some_rows(1), id="after").status_code == 200


def test_five_hundred_mutated_bodies_are_all_refused_and_spend_nothing(models, tmp_path):
    from running_service import running

    with running(
        f"sqlite:///{tmp_path / 'l.sqlite'}", [f"plain={models / 'plain'}"], budget=Terms(10.0), queries=20
    ) as service:
        _fuzz(service, 500, seed=0)


@pytest.mark.slow
def test_ten_thousand_mutated_bodies_are_all_refused_and_spend_nothing(models, tmp_path):
    from running_service import running

    with running(
        f"sqlite:///{tmp_path / 'l.sqlite'}", [f"plain={models / 'plain'}"], budget=Terms(10.0), queries=20
    ) as service:
        _fuzz(service, 10_000, seed=1)


def test_bodies_and_batches_beyond_the_limits_are_413(start):
    limits = Settings(max_bytes=2000, max_rows=3)
    with start("plain", budget=Terms(10.0), queries=20, settings=limits) as service:
        assert service.infer(some_rows(3)).status_code == 200
        assert service.infer(some_rows(4)).status_code == 413
        assert _raw(service, b"x" * 2001).status_code == 413
        streamed = service.http.post("/v2/models/plain/infer", content=iter([b"x" * 1500, b"x" * 1500]))
        assert streamed.status_code == 413
        _is_one_sentence(streamed)
        assert service.ledger.account("people").spent_units == 3 * LIMIT // 20


@pytest.mark.parametrize("begun", ["{", ""])
def test_a_body_that_comes_too_slowly_is_given_up_with_408(start, begun):
    with start("plain", budget=Terms(10.0), queries=20, settings=Settings(seconds=3)) as service:
        host, port = service.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(
                f"POST /v2/models/plain/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {service.key}\r\n"
                f"Content-Length: 100\r\n\r\n{begun}".encode()
            )
            sock.settimeout(60)
            assert sock.recv(4096).startswith(b"HTTP/1.1 408")


def test_compressed_bodies_are_refused_with_415(plain):
    response = _raw(plain, b"\x1f\x8b", **{"content-encoding": "gzip"})
    assert response.status_code == 415
    _is_one_sentence(response)


def test_wrong_paths_and_methods_are_404_and_405_with_a_sentence(plain):
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
        _is_one_sentence(response)


def test_too_many_waiting_requests_are_turned_away_unpaid(start):
    with start("plain", budget=Terms(10.0), queries=20, settings=Settings(max_waiting=1)) as service:
        import asyncio

        pipeline = service.service._pipeline
        deployment = next(iter(service.service.deployments))
        held = asyncio.run_coroutine_threadsafe(_hold(pipeline, deployment), pipeline._loop)
        while not pipeline.in_flight:
            time.sleep(0.01)
        refused = service.infer(some_rows(1))
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        pipeline._loop.call_soon_threadsafe(pipeline._in_flight.clear)
        held.result(60)
        assert service.infer(some_rows(1)).status_code == 200


async def _hold(pipeline, deployment):
    pipeline._in_flight.add(deployment)


def test_the_openapi_document_lists_every_route_and_no_other(plain):
    document = plain.http.get("/openapi.json").json()
    app = plain.service
    from quietmax.server import documented_application

    routes = {
        (path, method.lower())
        for route in documented_application(app).routes
        if (path := getattr(route, "path", None)) and getattr(route, "include_in_schema", False)
        for method in route.methods
    }
    described = {(path, method) for path, operations in document["paths"].items() for method in operations}
    assert described == routes
    assert len(described) >= 16


@pytest.mark.slow
def test_schemathesis_finds_no_server_error_and_no_undocumented_answer(plain):
    _schemathesis(plain, examples=60)


def test_schemathesis_finds_nothing_in_a_short_search(plain):
    _schemathesis(plain, examples=5)


def _schemathesis(service, examples):
    """Sound and unsound requests to every operation, half of those to models for the one that exists."""
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
    checks = [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    ]
    statuses = set()
    tried = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        cases = st.one_of(
            operation.as_strategy(generation_mode=mode)
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        )

        @settings(
            max_examples=examples,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases, real=st.booleans())
        def search(case, real):
            if real and case.path_parameters:
                case.path_parameters = {"name": "plain", "version": "1"}
            response = case.call(headers={"Authorization": f"Bearer {service.key}"})
            case.validate_response(response, checks=checks)
            statuses.add(response.status_code)

        search()
        tried += 1
    assert tried >= 16
    assert {200, 404} <= statuses


def test_httpx_can_reuse_a_connection_after_a_refusal(plain):
    with httpx.Client(base_url=plain.url) as http:
        assert http.post("/v2/models/plain/infer", json=inference(some_rows(1))).status_code == 401
        again = http.post(
            "/v2/models/plain/infer",
            json=inference(some_rows(1)),
            headers={"authorization": f"Bearer {plain.key}"},
        )
        assert again.status_code == 200
