"""The Python client."""

from __future__ import annotations

import json
import socket
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars
import pyarrow
import pytest

from quietmax.attacks.targets import Endpoint, query_target
from quietmax.errors import BudgetExhausted, InvalidInput, QuietmaxError
from quietmax.estimators import open_private
from quietmax.server import Client, Settings
from tests.server.running_service import (
    CLASSES,
    LOANS,
    TABLE,
    Running,
    Start,
    some_loans,
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


PEOPLE = [{"région": "south", "age": 25, "income": 10.5}, {"région": None, "age": 250, "income": 3.0}]


def test_rows_of_a_table_are_sent_by_column_and_answered_with_class_names(table: Running) -> None:
    frame = pd.DataFrame(PEOPLE)
    with Client(table.url, table.key) as client:
        first = client.infer("table", PEOPLE)
        assert first.parameters["new_answers"] == 2
        assert set(first.labels.tolist()) <= {"no", "yes"}
        assert first.probabilities is not None
        chosen = first.probabilities.argmax(1)
        assert first.labels.tolist() == [("no", "yes")[label] for label in chosen]
        for same in (
            frame,
            frame.assign(name="Ann", approved="yes"),
            frame.convert_dtypes(dtype_backend="pyarrow"),
            frame.astype({"age": object, "income": str}),
            pyarrow.Table.from_pandas(frame),
            TABLE.encode(frame),
        ):
            again = client.infer("table", same)
            assert again.parameters["new_answers"] == 0, "the same features were sent"
            np.testing.assert_array_equal(again.labels, first.labels)
        np.testing.assert_array_equal(client.predict("table", frame), first.labels)
        unknown = client.infer("table", [{"région": "east", "age": 1, "income": 1}]).parameters
        assert (unknown["unknown_values"], unknown["unknown_columns"]) == (1, "région")
        assert "unknown_values" not in first.parameters
        refused: list[tuple[Any, str]] = [
            ([{"age": 3}], "Row 1 has no column 'income', 'région'; every column must be given"),
            ([PEOPLE[0], {"age": 3, "région": "south"}], "Row 2 has no column 'income'; every column must"),
            ([*PEOPLE, [1, 2, 3]], "Row 3 has no column 'age', 'income', 'région'"),
            (frame[["age"]], "no column 'income', 'région'"),
            (frame.assign(age="old"), "'age'"),
        ]
        for wrong, message in refused:
            with pytest.raises(InvalidInput, match=message):
                client.infer("table", wrong)
        assert table.ledger.account("people").spent_units == 3 * table.service.deployment("table").unit_cost


def test_class_names_are_read_from_the_binary_tensor_and_by_the_attacks(start: Start) -> None:
    rows = TABLE.encode(pd.DataFrame(PEOPLE))
    with start("survey") as service, Client(service.url, service.key) as client:
        response = client.infer("survey", PEOPLE)
        assert response.probabilities is None
        assert set(response.labels.tolist()) <= {"no", "yes"}
        result = query_target(Endpoint(f"{service.url}/v2/models/survey", key=service.key), rows, 2)
        assert result.answers.probabilities is None
        assert [TABLE.classes[label] for label in result.answers.labels] == response.labels.tolist()
        assert client.budget("survey")["remaining_answers"] == 38


def test_reasons_add_up_to_the_score_to_the_last_bit_over_http_and_are_named_in_the_metadata(
    start: Start, models: Path
) -> None:
    people = some_loans(60, seed=3).drop(columns="repaid")
    model = open_private(models / "summed")
    scores = model.classifier.scores(model.features.transform(model.encode(people)))
    names = ["(constant)", *(column.name for column in LOANS.columns)]
    with start("summed") as service, Client(service.url, service.key) as client:
        response = client.infer("summed", people, reasons=True)
        assert response.reasons is not None
        assert np.array_equal(np.cumsum(response.reasons, axis=1)[:, -1], scores)
        assert (response.labels == np.array(model.classes)[scores.argmax(axis=1)]).all()
        plain = client.infer("summed", people)
        assert plain.reasons is None
        np.testing.assert_array_equal(plain.probabilities, response.probabilities)
        about = client.metadata("summed")
        assert about["parameters"]["reasons"] == names
        assert about["outputs"][-1] == {"name": "reasons", "datatype": "FP64", "shape": [-1, len(names), 2]}
        as_json = service.infer(LOANS.encode(people), "summed", outputs=[{"name": "reasons"}]).json()
        (tensor,) = as_json["outputs"]
        assert tensor["shape"] == [60, len(names), 2]
        total = np.zeros((60, 2))
        for part in np.moveaxis(np.array(tensor["data"]).reshape(tensor["shape"]), 1, 0):
            total += part
        assert np.array_equal(total, scores)


@pytest.mark.parametrize(
    ("name", "words"),
    [("survey", "paid one by one"), ("table", "paid one by one"), ("loans", "sums over columns")],
)
def test_reasons_are_refused_with_a_sentence_where_there_are_none(
    start: Start, name: str, words: str
) -> None:
    with start(name) as service, Client(service.url, service.key) as client:
        assert "reasons" not in [output["name"] for output in client.metadata(name)["outputs"]]
        assert "reasons" not in client.metadata(name)["parameters"]
        before = client.budget(name)["remaining_answers"]
        people = some_loans(3).drop(columns="repaid") if name == "loans" else PEOPLE
        with pytest.raises(InvalidInput, match=words):
            client.infer(name, people, reasons=True)
        assert client.budget(name)["remaining_answers"] == before


def test_columns_of_every_type_arrive_as_the_encoding_reads_them(start: Start) -> None:
    """Typed values need no separators or date formats; strings are read as the columns declare."""
    frame = some_loans(40).astype({"smoker": "boolean"})
    frame.loc[::7, ["income", "joined", "smoker"]] = None
    written = frame.assign(
        income=frame.income.map("{:.2f}".format).str.replace(".", ",").where(frame.income.notna(), "NA"),
        joined=frame.joined.dt.strftime("%d.%m.%Y").fillna(""),
        seen=frame.seen.dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo"),
        smoker=frame.smoker.map({True: "Yes", False: "f"}, na_action="ignore"),
    )
    others = [
        written,
        frame.convert_dtypes(dtype_backend="pyarrow"),
        frame.astype(object),
        frame.astype({"age": "category", "income": "category", "zip": "category"}),
        frame.assign(
            income=frame.income.map(lambda value: value if np.isnan(value) else Decimal(str(value)))
        ),
        pyarrow.Table.from_pandas(frame),
        polars.from_pandas(frame),
    ]
    with start("loans") as service, Client(service.url, service.key) as client:
        expected = client.infer("loans", LOANS.encode(frame))
        assert expected.probabilities is not None
        for other in others:
            response = client.infer("loans", other)
            np.testing.assert_array_equal(response.probabilities, expected.probabilities)
            np.testing.assert_array_equal(response.labels, expected.labels)
        assert (response.labels == frame.repaid).mean() > 0.7
        for column, cells, message in (
            ("income", [1.5, "2"] * 20, "'income' must hold numbers or strings, got both"),
            ("smoker", "perhaps", "'smoker'"),
            ("joined", "2020-01-31", "'joined'"),
        ):
            with pytest.raises(InvalidInput, match=message):
                client.infer("loans", frame.assign(**{column: cells}))
        assert service.service.deployment("loans").status == "proven"


def test_what_was_inferred_from_the_records_is_neither_published_nor_told_by_a_warning(start: Start) -> None:
    with start("inferred") as service, Client(service.url, service.key) as client:
        metadata = client.metadata("inferred")
        assert "encoding" not in metadata["parameters"]
        assert [tensor["name"] for tensor in metadata["inputs"]] == ["age", "income", "région"]
        assert "south" not in json.dumps(metadata)
        answered = client.infer("inferred", [{"région": "east", "age": 1, "income": 1}])
        assert "unknown_values" not in answered.parameters


def test_a_client_that_never_connected_can_be_closed() -> None:
    with Client("http://127.0.0.1:9") as client:
        assert client._connection is None


@pytest.mark.parametrize(
    "address", ["http://h:99999", "http://[::1", "ftp://h", "http://", "h:80", "http://h:0"]
)
def test_a_client_takes_only_http_addresses(address: str) -> None:
    with pytest.raises(InvalidInput, match="url must be an http or https address"):
        Client(address)


def test_a_client_takes_only_rows_of_numbers_for_a_model_without_columns(plain: Running) -> None:
    with Client(plain.url, plain.key) as client:
        for wrong in ([[1, 2], [3]], None, {"age": 3}, "rows"):
            with pytest.raises(InvalidInput, match="features must be a table, or an array of numbers"):
                client.infer("plain", wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="'plain' has no columns; features must be rows of numbers"):
            client.infer("plain", PEOPLE)


@pytest.mark.parametrize("wrong", [[], None, [[1, 2]], [1, 2], {"age": 3}, [["north", 3]], "rows"])
def test_rows_that_cannot_be_of_the_table_are_answered_with_its_columns(table: Running, wrong: Any) -> None:
    with (
        Client(table.url, table.key) as client,
        pytest.raises(
            InvalidInput, match="'table' has the columns 'age', 'income', 'région': features must be"
        ),
    ):
        client.predict("table", wrong)


def test_more_rows_than_a_request_may_have_are_sent_in_several_and_not_charged_twice(start: Start) -> None:
    settings = Settings(max_rows=4, answer_cache=False)
    with start("plain", settings=settings) as service, Client(service.url, service.key) as client:
        rows = some_rows(10)
        with pytest.raises(InvalidInput, match="must have at most 4 rows, got 10"):
            client.infer("plain", rows)
        labels = client.predict("plain", rows, request_id="ten")
        assert labels.shape == (10,)
        assert client.budget("plain")["remaining_answers"] == 10
        np.testing.assert_array_equal(client.predict("plain", rows, request_id="ten"), labels)
        assert client.budget("plain")["remaining_answers"] == 10, "a retry is free"
        parts = [
            client.predict("plain", rows[first : first + 4], request_id=f"ten/{first // 4}")
            for first in (0, 4, 8)
        ]
        np.testing.assert_array_equal(np.concatenate(parts), labels)
        assert client.budget("plain")["remaining_answers"] == 10, "rows keep their order"
        with pytest.raises(
            BudgetExhausted, match=r"2 left.* The 8 rows before were answered; with request_id='m'"
        ):
            client.predict("plain", some_rows(12, 1), request_id="m")
        assert client.budget("plain")["remaining_answers"] == 2


def test_a_retry_after_an_interruption_charges_only_the_rows_that_were_not_sent(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(max_rows=1, answer_cache=False)
    send, sent = Client._infer, []

    def break_at_the_third(self: Client, *request: Any) -> Any:
        sent.append(request[-1])
        if len(sent) == 3:
            raise QuietmaxError("The network is down.")
        return send(self, *request)

    monkeypatch.setattr(Client, "_infer", break_at_the_third)
    frame = pd.DataFrame([*PEOPLE, {"région": "north", "age": 50, "income": 7.0}], index=[0.5, 2.5, 1.5])
    with start("table", settings=settings) as service, Client(service.url, service.key) as client:
        before = client.budget("table")["remaining_answers"]
        with pytest.raises(QuietmaxError, match="network is down"):
            client.predict("table", frame, request_id="r")
        assert client.budget("table")["remaining_answers"] == before - 2
        assert client.predict("table", frame, request_id="r").shape == (3,)
        assert client.budget("table")["remaining_answers"] == before - 3
        assert sent == ["r/0", "r/1", "r/2"] * 2
