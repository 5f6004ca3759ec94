"""The Python client."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from quietmax.data import CategoricalColumn, Encoding, NumericColumn
from quietmax.errors import BudgetExhausted, InvalidInput, QuietmaxError
from quietmax.ledger import Terms
from quietmax.models import Model, TrainingSettings, save_model
from quietmax.models.mlp import initial_mlp
from quietmax.server import Client
from tests.server.running_service import (
    CLASSES,
    Running,
    running,
    some_rows,
)


def test_the_client_infers_retries_and_raises_when_the_budget_is_exhausted(plain: Running) -> None:
    with Client(plain.url, plain.key) as client:
        answer = client.infer("plain", some_rows(4), request_id="c")
        assert answer.labels.shape == (4,)
        assert answer.probabilities is not None
        assert answer.probabilities.shape == (4, CLASSES)
        assert client.infer("plain", some_rows(4), request_id="c").parameters["cost"] == 0
        assert client.metadata("plain")["parameters"]["guarantee_status"] == "refuted"
        assert client.budget("plain", version="1")["remaining_answers"] == 16
        assert client._connection is not None
        client._connection.sock.shutdown(socket.SHUT_RDWR)
        assert client.predict("plain", some_rows(1, 5)).shape == (1,)
        with pytest.raises(BudgetExhausted, match="Privacy budget exhausted: 16 answers requested, 15 left"):
            client.predict("plain", some_rows(16, 9))
        with pytest.raises(InvalidInput, match="no such model"):
            client.metadata("nobody")
    with pytest.raises(QuietmaxError, match="wrong, revoked or expired"):
        Client(plain.url, "qm_nonsense").metadata("plain")
    with pytest.raises(QuietmaxError, match="cannot be reached"):
        Client("http://127.0.0.1:9").metadata("plain")
    with pytest.raises(InvalidInput, match="url must be an http or https address"):
        Client("ftp://x")


@pytest.mark.parametrize("inferred", [(), ("bounds of age",)])
def test_rows_of_a_table_are_encoded_by_the_declared_encoding_and_never_by_an_inferred_one(
    inferred: tuple[str, ...], tmp_path: Path
) -> None:
    columns = (NumericColumn("age", 0, 100, missing=False), CategoricalColumn("sex", ("female", "male")))
    encoding = Encoding(columns, "ill", ("no", "yes"), inferred)
    width = len(encoding.feature_names)
    network = initial_mlp((width, 8, 2), "tanh", (0,))
    save_model(
        Model(network, TrainingSettings((8,)), 160, "people", 0, encoding=encoding), tmp_path / "table"
    )
    table = [{"sex": "male", "age": 25}, {"sex": "female", "age": 250}]
    with (
        running(
            f"sqlite:///{tmp_path / 'l.sqlite'}",
            [f"table={tmp_path / 'table'}"],
            budget=Terms(10.0),
            queries=20,
        ) as service,
        Client(service.url, service.key) as client,
    ):
        if inferred:
            assert "encoding" not in client.metadata("table")["parameters"]
            with pytest.raises(
                InvalidInput, match="publishes no encoding of columns; features must be rows of numbers"
            ):
                client.infer("table", table)
            return
        first = client.infer("table", table)
        same = client.infer("table", encoding.encode(pd.DataFrame(table)))
        assert first.parameters["new_answers"] == 2
        assert same.parameters["new_answers"] == 0, "the same features were asked"
        np.testing.assert_array_equal(first.labels, same.labels)
        assert client.infer("table", pd.DataFrame(table)).parameters["new_answers"] == 0
        with pytest.raises(InvalidInput, match="no column 'sex'"):
            client.infer("table", [{"age": 3}])


def test_a_client_that_never_connected_can_be_closed() -> None:
    with Client("http://127.0.0.1:9") as client:
        assert client._connection is None


@pytest.mark.parametrize(
    "address", ["http://h:99999", "http://[::1", "ftp://h", "http://", "h:80", "http://h:0"]
)
def test_a_client_takes_only_http_addresses(address: str) -> None:
    with pytest.raises(InvalidInput, match="url must be an http or https address"):
        Client(address)


def test_a_client_takes_only_rows_of_numbers() -> None:
    with Client() as client, pytest.raises(InvalidInput, match="features must be an array of numbers"):
        client.infer("m", [[1, 2], [3]])
