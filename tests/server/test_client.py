"""The Python client."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import polars
import pyarrow
import pytest

from quietmax.attacks.targets import Endpoint, query_target
from quietmax.errors import BudgetExhausted, InvalidInput, QuietmaxError
from quietmax.estimators import open_private
from quietmax.server import AsyncClient, Client, Response, Settings
from quietmax.server import client as client_module
from quietmax.server.errors import HttpError
from tests.server.running_service import (
    CLASSES,
    LOANS,
    TABLE,
    Running,
    Start,
    run_async,
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
        client._idle[-1].sock.shutdown(socket.SHUT_RDWR)
        assert client.predict("plain", some_rows(1, 5)).shape == (1,)
        with pytest.raises(BudgetExhausted, match="Privacy budget exhausted: 16 answers requested, 15 left"):
            client.predict("plain", some_rows(16, 9))
        with pytest.raises(InvalidInput, match="no such model"):
            client.metadata("nobody")
    with pytest.raises(QuietmaxError, match="wrong, revoked or expired"):
        Client(plain.url, "qm_nonsense").metadata("plain")
    with pytest.raises(QuietmaxError, match="cannot be reached"):
        Client("http://127.0.0.1:9", retries=1).metadata("plain")


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
        assert not client._idle


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
    send, sent = Client._send, []

    def break_at_the_third(self: Client, *request: Any) -> Any:
        sent.append(request[-1])
        if len(sent) == 3:
            raise QuietmaxError("The network is down.")
        return send(self, *request)

    monkeypatch.setattr(Client, "_send", break_at_the_third)
    frame = pd.DataFrame([*PEOPLE, {"région": "north", "age": 50, "income": 7.0}], index=[0.5, 2.5, 1.5])
    with start("table", settings=settings) as service, Client(service.url, service.key) as client:
        before = client.budget("table")["remaining_answers"]
        with pytest.raises(QuietmaxError, match="network is down"):
            client.predict("table", frame, request_id="r")
        assert client.budget("table")["remaining_answers"] == before - 2
        assert client.predict("table", frame, request_id="r").shape == (3,)
        assert client.budget("table")["remaining_answers"] == before - 3
        assert sent == ["r/0", "r/1", "r/2"] * 2


def test_the_client_is_imported_without_numpy_or_pandas_and_fast() -> None:
    code = (
        "import sys, time; started = time.process_time()\n"
        "from quietmax.server import AsyncClient, Client; Client()\n"
        "heavy = {'numpy', 'pandas', 'pyarrow', 'scipy', 'sqlalchemy', 'torch'} & set(sys.modules)\n"
        "print(time.process_time() - started, *heavy)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=True) for _ in range(3)]
    assert all(len(run.stdout.split()) == 1 for run in runs), "no heavy module"
    assert min(float(run.stdout) for run in runs) < 0.2


def test_rows_of_plain_values_need_no_pandas_and_mean_the_same_as_a_frame(start: Start) -> None:
    frame = some_loans(30)[["age", "income", "région", "smoker", "joined", "seen", "zip"]]
    frame[["joined", "seen"]] = frame[["joined", "seen"]].astype(str)
    rows = frame.astype(object).to_dict("records")
    for number, name in enumerate(frame.columns):
        rows[number][name] = None
        rows[10 + number][name] = float("nan") if name in ("age", "income") else ""
    rows[20]["zip"] = 8001
    with start("loans") as service, Client(service.url, service.key) as client:
        dated = [{**row, "joined": None, "seen": None} for row in rows]
        expected = client.infer(
            "loans", pd.DataFrame(dated).astype({"age": str, "zip": str}).replace("None", "")
        )
        plain = client.infer("loans", dated)
        np.testing.assert_array_equal(plain.probabilities, expected.probabilities)
        with pytest.raises(InvalidInput, match="'smoker' must hold numbers or strings, got both"):
            client.infer("loans", [{**dated[0], "smoker": cell} for cell in (True, 0.5)])
        with pytest.raises(InvalidInput, match="'income' has an integer that is too large"):
            client.infer("loans", [{**dated[0], "income": cell} for cell in (10**400, 0.5)])


def _failing_first(patch: pytest.MonkeyPatch, service: Running, *errors: Exception) -> list[str | None]:
    """Let the first inferences fail after they were charged; return a list that gets the request ids."""
    infer, ids, left = service.service.infer, [], list(errors)

    async def fail(deployment: Any, query: Any, caller: Any) -> Any:
        ids.append(query.id)
        answered = await infer(deployment, query, caller)
        if left:
            raise left.pop(0)
        return answered

    patch.setattr(service.service, "infer", fail)
    return ids


def test_a_service_that_is_unavailable_is_asked_again_with_the_same_id_and_paid_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    away, busy, long = (HttpError(503, "Away.", headers={"retry-after": each}) for each in ("0", "7", "31"))
    with (
        start("plain", settings=Settings(answer_cache=False)) as service,
        Client(service.url, service.key) as client,
    ):
        monkeypatch.setattr(client_module, "time", SimpleNamespace(sleep=waits.append))
        ids = _failing_first(monkeypatch, service, away, busy, away, away)
        assert len(client.infer("plain", some_rows(2)).labels) == 2
        assert len(ids) == 5
        assert len(set(ids)) == 1
        assert waits[1] == 7
        for wait, most in zip((waits[0], *waits[2:]), (0.1, 0.4, 0.8), strict=True):
            assert most / 2 <= wait <= most
        assert client.budget("plain")["remaining_answers"] == 18
        for errors, asked in (((away,) * 5, 5), ((long,), 1)):
            ids = _failing_first(monkeypatch, service, *errors)
            with pytest.raises(QuietmaxError, match="Away"):
                client.infer("plain", some_rows(1), request_id=f"given up after {asked}")
            assert len(ids) == asked


def test_an_answer_that_got_lost_is_asked_for_again_and_paid_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, lost = Client._exchange_once, [ConnectionResetError(), http.client.BadStatusLine("")]

    def lose(self: Client, method: str, *request: Any) -> Any:
        answered = exchange(self, method, *request)
        if method == "POST" and lost:
            raise lost.pop()
        return answered

    monkeypatch.setattr(Client, "_exchange_once", lose)
    with (
        start("plain", settings=Settings(answer_cache=False)) as service,
        Client(service.url, service.key) as client,
    ):
        assert client.infer("plain", some_rows(2)).parameters["cost"] == 0
        assert not lost
        assert client.budget("plain")["remaining_answers"] == 18


def test_the_answers_of_a_frame_are_a_frame_with_its_index(start: Start) -> None:
    frame = pd.DataFrame(PEOPLE * 3, index=list("abcdef"))
    settings, seen = Settings(max_rows=4), []
    with start("table", settings=settings) as service, Client(service.url, service.key) as client:
        answers = client.ask("table", frame, progress=lambda *done: seen.append(done))
        assert list(answers.columns) == ["label", "probability of no", "probability of yes"]
        assert answers.index.tolist() == list("abcdef")
        assert seen == [(4, 6), (6, 6)]
        response = client.infer("table", PEOPLE)
        assert answers["label"].tolist() == response.labels.tolist() * 3
        np.testing.assert_array_equal(answers.iloc[:2, 1:], response.probabilities)
    with start("survey") as service, Client(service.url, service.key) as client:
        assert list(client.ask("survey", PEOPLE).columns) == ["label"]


def test_the_async_client_asks_at_the_same_time_and_answers_as_the_other(start: Start) -> None:
    async def ask(service: Running) -> tuple[list[Response], Any, Any, Any]:
        async with AsyncClient(service.url, service.key, connections=4) as client:
            await client.infer("table", PEOPLE)
            responses = await asyncio.gather(*(client.infer("table", PEOPLE) for _ in range(12)))
            with pytest.raises(InvalidInput, match="no such model"):
                await client.metadata("nobody")
            frame = await client.ask("table", PEOPLE)
            return responses, frame, await client.predict("table", PEOPLE), await client.budget("table")

    with start("table") as service:
        responses, frame, labels, budget = run_async(ask(service))
    for response in responses:
        np.testing.assert_array_equal(response.probabilities, responses[0].probabilities)
    assert frame["label"].tolist() == labels.tolist() == responses[0].labels.tolist()
    assert {response.parameters["new_answers"] for response in responses} == {0}
    assert budget["remaining_answers"] == responses[0].parameters["remaining_answers"]


def test_the_answers_to_a_file_are_written_at_once_and_paid_once_whatever_ends_a_run(
    start: Start, tmp_path: Path
) -> None:
    frame = pd.DataFrame(
        {"name": "Ann", "income": np.arange(7) * 1000.5, "région": "south", "age": np.arange(20, 27)}
    )
    people, answers = tmp_path / "people.csv", tmp_path / "answers.csv"
    frame.to_csv(people, index=False)
    frame.to_parquet(tmp_path / "people.parquet")
    settings = Settings(max_rows=3, answer_cache=False)

    def interrupt(done: int, total: int) -> None:
        assert total == 7
        if done == 6:
            raise KeyboardInterrupt

    with start("table", settings=settings) as service, Client(service.url, service.key) as client:
        before = client.budget("table")["remaining_answers"]
        with pytest.raises(KeyboardInterrupt):
            client.ask_file("table", people, answers, progress=interrupt)
        assert sorted(each.name for each in tmp_path.glob("*.csv")) == ["people.csv"]
        assert client.budget("table")["remaining_answers"] == before - 6
        done = client.ask_file("table", people, answers)
        assert done == {"rows": 7, "new_answers": 1, "remaining_answers": before - 7}
        written = answers.read_bytes()
        assert client.ask_file("table", people, answers)["new_answers"] == 0
        assert answers.read_bytes() == written
        again = pd.read_csv(answers)
        assert list(again.columns) == ["label", "probability of no", "probability of yes"]
        assert len(again) == 7
        typed = client.ask_file("table", tmp_path / "people.parquet", answers)
        assert typed["new_answers"] == 7, "other bytes are another request"
        for wrong, message in (
            ("income,age\n1,2\n", "has no column 'région'"),
            ("région,income,age\nsouth,1,2\nsouth,1,2\nsouth,1,2\nsouth,much,2\n", "Row 4 .*'income'"),
            ("région,income,age\n", "has no rows"),
        ):
            people.write_text(wrong, encoding="utf-8")
            with pytest.raises(InvalidInput, match=message):
                client.ask_file("table", people, tmp_path / "none.csv")
        assert not (tmp_path / "none.csv").exists()
        with pytest.raises(InvalidInput, match="output must be another file"):
            client.ask_file("table", people, people)
        with pytest.raises(
            BudgetExhausted,
            match=r"\d left\. Nothing was charged\. The \d+ rows before .* file and key, they are not charged again",
        ):
            client.ask_file("table", _longer(people, frame), answers)
        assert len(pd.read_csv(answers)) == 7, "what was there stays"


def _longer(people: Path, frame: pd.DataFrame) -> Path:
    pd.concat([frame] * 8).to_csv(people, index=False)
    return people


def test_a_file_of_numbers_is_answered_by_a_model_without_columns(head_numbers: Path, start: Start) -> None:
    with start("head") as service, Client(service.url, service.key) as client:
        answers = head_numbers.with_name("answers.csv")
        done = client.ask_file("head", head_numbers, answers)
        assert done == {"rows": 5, "new_answers": 0, "remaining_answers": None}
        labels = client.predict("head", pd.read_csv(head_numbers).to_numpy())
        assert pd.read_csv(answers)["label"].tolist() == labels.tolist()


@pytest.fixture
def head_numbers(tmp_path: Path) -> Path:
    file = tmp_path / "numbers.csv"
    pd.DataFrame(some_rows(5)).to_csv(file, index=False)
    return file
