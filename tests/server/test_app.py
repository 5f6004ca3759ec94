"""The routes, asked by the unmodified client of Triton."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton  # type: ignore[import-untyped]
from tritonclient.utils import (  # type: ignore[import-untyped]
    InferenceServerException,
    triton_to_np_dtype,
)

from tests.server.running_service import (
    CLASSES,
    FEATURES,
    TABLE,
    Running,
    check_message,
    some_rows,
)


def _triton(service: Running) -> Any:
    return triton.InferenceServerClient(service.url.removeprefix("http://"))


def _triton_input(rows: Any, **how: Any) -> Any:
    tensor = triton.InferInput("features", list(rows.shape), "FP32")
    tensor.set_data_from_numpy(rows.astype(np.float32), **how)
    return tensor


def test_the_unmodified_triton_client_asks_for_health_metadata_and_answers(plain: Running) -> None:
    client, headers = _triton(plain), {"authorization": f"Bearer {plain.key}"}
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("plain", headers=headers)
    assert client.is_model_ready("plain", "1", headers=headers)
    assert not client.is_model_ready("nobody", headers=headers)
    assert client.get_server_metadata()["extensions"] == [
        "binary_tensor_data",
        "model_repository",
        "privacy_budget",
    ]
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


def _triton_column(name: str, datatype: str, cells: Any, **how: Any) -> Any:
    tensor = triton.InferInput(name, [len(cells)], datatype)
    tensor.set_data_from_numpy(np.array(cells, triton_to_np_dtype(datatype)), **how)
    return tensor


@pytest.mark.parametrize("binary", [True, False])
def test_the_unmodified_triton_client_sends_columns_and_gets_class_names(
    table: Running, binary: bool
) -> None:
    client = _triton(table)
    metadata = client.get_model_metadata("table", headers={"authorization": f"Bearer {table.key}"})
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
            headers={"authorization": f"Bearer {table.key}"},
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


def test_the_triton_client_shows_the_error_of_an_exhausted_budget(plain: Running) -> None:
    client, headers = _triton(plain), {"authorization": f"Bearer {plain.key}"}
    client.infer("plain", [_triton_input(some_rows(20))], headers=headers)
    with pytest.raises(
        InferenceServerException,
        match=r"Privacy budget exhausted: 1 answer requested, 0 left\. Nothing was charged\.",
    ) as error:
        client.infer("plain", [_triton_input(some_rows(1, 1))], headers=headers)
    assert error.value.status() == "403"
    with pytest.raises(InferenceServerException, match="An API key is required"):
        client.infer("plain", [_triton_input(some_rows(1, 1))])


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
