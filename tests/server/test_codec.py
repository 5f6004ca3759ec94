"""Request bodies: what is decoded, and what is refused without a charge; numbers read straight into an array."""

from __future__ import annotations

import copy
import json
import random
import re
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quietmax.accounting.costs import LIMIT
from quietmax.data.encoding import (
    BooleanColumn,
    CategoricalColumn,
    Column,
    DateColumn,
    Encoding,
    HashedColumn,
    NumericColumn,
)
from quietmax.errors import InvalidInput
from quietmax.estimators.head.effects import Additive
from quietmax.estimators.head.weights import TableWeights
from quietmax.estimators.serialization import open_private
from quietmax.ledger import Terms
from quietmax.mechanisms import Answers
from quietmax.models.features.tabular import table_cells
from quietmax.server import codec
from quietmax.server.codec import (
    COLUMN_DATATYPES,
    _decode_request,
    _join_strings,
    _output_tensors,
    _pack_answers,
    _parse_with_array,
    _requested_tensors,
    _split_strings,
    _unpack_answers,
)
from quietmax.server.deployment import Deployment, load_models
from quietmax.server.errors import HttpError
from tests.docs.scripts import script
from tests.server.running_service import (
    FEATURES,
    LOANS,
    TABLE,
    Running,
    Start,
    check_message,
    column_inference,
    running,
    some_loans,
    some_rows,
)

malformed = script("benchmarks/malformed.py")


def test_binary_tensors_of_the_wrong_size_are_refused(plain: Running) -> None:
    rows = some_rows(1).astype("<f4").tobytes()

    def ask(tensor: dict[str, Any], content: bytes, announced: Any = None) -> int:
        head = json.dumps({"inputs": [tensor]}).encode()
        length = len(head) if announced is None else announced
        return plain.post_body(head + content, **{"inference-header-content-length": str(length)}).status_code

    def sized(size: Any) -> dict[str, Any]:
        return _one(data=..., parameters={"binary_data_size": size})["inputs"][0]

    assert ask(sized(len(rows)), rows) == 200
    for tensor, content, announced, status in (
        (sized(len(rows)), rows[:-1], None, 422),
        (sized(len(rows) - 4), rows[:-4], None, 422),
        (sized(len(rows)), rows + b"x", None, 422),
        (sized("24"), rows, None, 422),
        (sized(True), rows, None, 422),
        (_one()["inputs"][0], b"1234", None, 422),
        (sized(len(rows)), struct.pack("<6f", *[float("nan")] * 6), None, 422),
        *((sized(len(rows)), rows, announced, 400) for announced in (10**6, "x", -1)),
    ):
        assert ask(tensor, content, announced) == status
    assert plain.ledger.account("people").spent_units == LIMIT // 20


def _one(**changes: Any) -> dict[str, Any]:
    tensor: dict[str, Any] = {
        "name": "features",
        "shape": [1, FEATURES],
        "datatype": "FP32",
        "data": [0.5] * FEATURES,
    }
    tensor.update(changes)
    return {"inputs": [{key: value for key, value in tensor.items() if value is not ...}]}


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


_MALFORMED: list[tuple[Any, int]] = [
    *(({}, 400), ([], 400), ("text", 400), (None, 400), (7, 400)),
    *(({"inputs": []}, 400), ({"inputs": {}}, 400), ({"inputs": [1]}, 400), ({"inputs": [None]}, 400)),
    ({"inputs": _one()["inputs"] * 2}, 422),
    *((_one(name=name), status) for name, status in (("other", 422), (..., 400), (5, 400), ("x" * 257, 422))),
    *((_one(shape=shape), 422) for shape in ([FEATURES], [1, FEATURES + 1], [2, FEATURES], [0, FEATURES])),
    *((_one(shape=[first, FEATURES]), 400) for first in (-1, 1.0, True, 10**30)),
    *((_one(shape=shape), 400) for shape in ("1,6", [], [1] * 9, ...)),
    (_one(shape=[1001, FEATURES]), 413),
    *((_one(datatype=datatype), 422) for datatype in ("BYTES", "BOOL", ["FP32"], ..., "INT8")),
    *((_one(data=data), 400) for data in (..., "0.5", {"a": 1})),
    *((_one(data=[0.5] * count), 422) for count in (0, 5, 7)),
    *((_one(data=[cell] * FEATURES), 422) for cell in ("0.5", True)),
    *((_one(data=[0.5] * 5 + [cell]), 422) for cell in ("0.5", False, None, [0.5], {"a": 1}, 1e300, 1e16)),
    (_one(data=[[0.5] * 3, [0.5] * 3]), 422),
    (_one(data=[[0.5] * 5 + ["1"]]), 422),
    (_one(data=_nested([0.5] * FEATURES, 12)), 422),
    (_one(data=[_nested([0.5] * FEATURES, 11), "x"]), 422),
    (_one(data=[0.5] * 5 + [10**400]), 400),
    *((_one(datatype="UINT8", data=[cell] * FEATURES), 422) for cell in (256, -1)),
    (_one(parameters=[]), 400),
    (_one(parameters={"binary_data_size": 24}), 400),
    *(({**_one(), "id": each}, 400) for each in (5, "x" * 129, ["x"])),
    ({**_one(), "parameters": 5}, 400),
    ({**_one(), "parameters": {"a": None}}, 400),
    ({**_one(), "parameters": {"a": {}}}, 400),
    ({**_one(), "parameters": {"a": _nested([], 900)}}, 400),
    *(({**_one(), "outputs": each}, 400) for each in ("label", [5], [{"name": 5}], [{"name": "label"}] * 99)),
    *(({**_one(), "outputs": each}, 422) for each in ([{"name": "other"}], [{"name": "label"}] * 2)),
    ({**_one(), "outputs": [{"name": "label", "parameters": 5}]}, 400),
]


@pytest.fixture(scope="module")
def service(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The models `plain` and `table`, whose account nothing may be charged to."""
    place = f"sqlite:///{tmp_path_factory.mktemp('malformed') / 'ledger.sqlite'}"
    served = [f"{name}={models / name}" for name in ("plain", "table")]
    with running(place, served, budget=Terms(10.0), queries=20) as started:
        yield started


def _check_refused(service: Running, model: str, body: bytes, status: int, told: str, **headers: str) -> None:
    response = service.http.post(f"/v2/models/{model}/infer", content=body, headers=headers)
    assert response.status_code == status, response.text
    assert told in response.json()["error"]
    check_message(response)
    assert service.ledger.account("people").spent_units == 0


@pytest.mark.parametrize(("request_body", "status"), _MALFORMED)
def test_a_malformed_request_is_refused_and_charges_nothing(
    service: Running, request_body: Any, status: int
) -> None:
    _check_refused(service, "plain", json.dumps(request_body).encode(), status, "")


_TEXT = json.dumps(_one()).encode()


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"\xff\xfe", b'{"inputs": NaN}', b'{"inputs": [Infinity]}', b'{"a": 1,}'),
        b'{"a":' * 5_000,
        b'{"inputs": "\xed\xa0\x80"}',
        _TEXT + b"x",
        _TEXT.replace(b'"data"', b'"data": [9], "data"'),
        _TEXT.replace(b'"name"', b'"name": "other", "name"'),
        _TEXT.replace(b'"name"', b'"\\u006eame": "other", "name"'),
        *(
            _TEXT[:-1] + end
            for end in (b', "inputs": []}', b', "id": "a", "id": "b"}', b', "id": "\\ud800"}')
        ),
    ],
)
def test_text_that_is_not_valid_json_is_refused(service: Running, text: bytes) -> None:
    _check_refused(service, "plain", text, 400, "")


def test_packed_answers_are_unpacked_unchanged() -> None:
    labels = np.array([2, 0], np.int64)
    probabilities = np.array([[0.25, 0.125, 0.625], [1 / 3, 1 / 3, 1 / 3]])
    for answers in (Answers(labels, None), Answers(labels, probabilities)):
        unpacked = _unpack_answers(_pack_answers(answers))
        np.testing.assert_array_equal(unpacked.labels, labels)
        assert (unpacked.probabilities is None) == (answers.probabilities is None)
        for name, tensor in _output_tensors(answers).items():
            np.testing.assert_array_equal(_output_tensors(unpacked)[name], tensor)


PEOPLE: dict[str, list[Any]] = {
    "age": [30, 250, None],
    "income": [1000.5, 0, 99_999],
    "région": ["south", None, "east"],
}


@pytest.fixture(scope="module")
def table_deployment(models: Path) -> Deployment:
    return load_models([str(models / "table")], budget=Terms(1.0), accept_unproven=True)[0]


def _rows_of(deployment: Deployment, request: dict[str, Any], binary: bytes = b"") -> Any:
    text = json.dumps(request).encode()
    return _decode_request(text + binary, len(text) if binary else None, deployment, 5).rows


def test_columns_are_encoded_as_the_table_of_the_training_was(table_deployment: Deployment) -> None:
    request = _decode_request(json.dumps(column_inference(PEOPLE)).encode(), None, table_deployment, 5)
    np.testing.assert_array_equal(request.rows, TABLE.encode(pd.DataFrame(PEOPLE)))
    assert request.unknown == {"région": 1}, "a missing value is not unknown"
    shuffled = column_inference(dict(reversed(PEOPLE.items())))
    np.testing.assert_array_equal(_rows_of(table_deployment, shuffled), request.rows)


@pytest.mark.parametrize("datatype", [name for name in COLUMN_DATATYPES if name != "BOOL"])
def test_the_same_values_in_any_datatype_listed_or_binary_are_the_same_query(
    table_deployment: Deployment, datatype: str
) -> None:
    expected = TABLE.encode(pd.DataFrame({"age": [7, 30], "income": [1, 2], "région": ["north", "ñ"]}))
    names = ["north", "ñ"]
    strings = {"name": "région", "shape": [2], "datatype": "BYTES"}
    ages: list[Any] = ["7", "30"] if datatype == "BYTES" else [7, 30]
    listed = [
        {"name": "age", "shape": [2], "datatype": datatype, "data": ages},
        {"name": "income", "shape": [2], "datatype": "INT64", "data": [1, 2]},
        {**strings, "data": names},
    ]
    np.testing.assert_array_equal(_rows_of(table_deployment, {"inputs": listed}), expected)
    kind = COLUMN_DATATYPES[datatype]
    packed = _join_strings(ages) if datatype == "BYTES" else np.array(ages, kind).tobytes()
    written = "".join(names).encode()
    text = struct.pack("<I", 5) + written[:5] + struct.pack("<I", 2) + written[5:]
    binary = [
        {**strings, "parameters": {"binary_data_size": len(text)}},
        listed[1],
        {**listed[0], "data": None, "parameters": {"binary_data_size": len(packed)}},
    ]
    np.testing.assert_array_equal(_rows_of(table_deployment, {"inputs": binary}, text + packed), expected)


def _column(name: str, datatype: str, data: Any, shape: Any = None, **parameters: Any) -> dict[str, Any]:
    """A column as an input tensor; data of None: they are binary."""
    described = {"name": name, "datatype": datatype, "shape": shape or [1 if data is None else len(data)]}
    return {**described, "data": data, "parameters": parameters}


_NORTH, _FIVE = _column("région", "BYTES", ["north"]), _column("income", "INT64", [5])
_MISSING: dict[str, list[Any]] = {"age": [None], "income": [5], "région": ["north"]}
_PEOPLE_TENSORS = column_inference(PEOPLE)["inputs"]
_READ: dict[str, tuple[list[dict[str, Any]], bytes, dict[str, list[Any]]]] = {
    "two dimensions": ([{**each, "shape": [3, 1]} for each in _PEOPLE_TENSORS], b"", PEOPLE),
    "nested lists": (
        [{**each, "data": [[cell] for cell in each["data"]]} for each in _PEOPLE_TENSORS],
        b"",
        PEOPLE,
    ),
    **{
        f"{cell!r} as {datatype}": ([_column("age", datatype, [cell]), _FIVE, _NORTH], b"", _MISSING)
        for cell, datatypes in ((None, "FP64 FP32 INT64 UINT8 BOOL BYTES"), ("", "BYTES"), ("NA", "BYTES"))
        for datatype in datatypes.split()
    },
    "binary NaN": (
        [_column("age", "FP64", None, binary_data_size=8), _FIVE, _NORTH],
        struct.pack("<d", float("nan")),
        _MISSING,
    ),
    "booleans": ([_column("age", "BOOL", [True]), _FIVE, _NORTH], b"", {**_MISSING, "age": [1]}),
    "binary booleans": (
        [_column("age", "BOOL", None, binary_data_size=1), _FIVE, _NORTH],
        b"\x01",
        {**_MISSING, "age": [1]},
    ),
    "as PandasCodec.encode_request of MLServer 1.7.1 writes them": (
        [
            _column("age", "FP64", [30.0, None], [2, 1]),
            _column("income", "INT64", [1, 2], [2, 1]),
            _column("région", "BYTES", ["north", "south"], [2, 1], content_type="str"),
        ],
        b"",
        {"age": [30, None], "income": [1, 2], "région": ["north", "south"]},
    ),
}


@pytest.mark.parametrize("form", _READ)
def test_columns_are_read_in_every_form(table_deployment: Deployment, form: str) -> None:
    inputs, binary, expected = _READ[form]
    rows = _rows_of(table_deployment, {"parameters": {"content_type": "pd"}, "inputs": inputs}, binary)
    np.testing.assert_array_equal(rows, TABLE.encode(pd.DataFrame(expected)))


def test_the_content_type_datetime_means_iso_dates_whatever_the_column_declares(
    table_deployment: Deployment,
) -> None:
    column = DateColumn("joined", "2020-01-01 00:00:00", "2020-01-11 00:00:00", format="%Y-%d-%m")
    deployment = _with_columns(table_deployment, column)
    tensor: dict[str, Any] = {"name": "joined", "shape": [4], "datatype": "BYTES"}
    tensor["data"] = ["2020-01-06", "2020-01-06T00:00Z", "2020-01-06 02:00:00+02:00", ""]
    tensor["parameters"] = {"content_type": "datetime"}
    assert _rows_of(deployment, {"inputs": [tensor]}).tolist() == [[0.5, 0.0]] * 3 + [[0.0, 1.0]]
    tensor["parameters"] = {"content_type": "str"}
    tensor["data"] = ["2020-06-01"] * 3 + ["NA"]
    assert _rows_of(deployment, {"inputs": [tensor]}).tolist() == [[0.5, 0.0]] * 3 + [[0.0, 1.0]]
    for content_type, cell, told in (
        ("datetime", "6.1.2020", "Row 1 (and 3 more) has no date in the column 'joined'"),
        ("str", "2020-01-16", "Row 1 (and 3 more) has no date in the column 'joined'"),
        ("base64", "", "must be str or datetime"),
        (5, "", "must be str or datetime"),
    ):
        tensor.update(data=[cell] * 4, parameters={"content_type": content_type})
        with pytest.raises(HttpError) as error:
            _rows_of(deployment, {"inputs": [tensor]})
        assert error.value.status == 422
        assert told in error.value.message


def test_a_column_named_features_is_a_column(table_deployment: Deployment) -> None:
    deployment = _with_columns(table_deployment, NumericColumn("features", 0, 10, missing=False))
    request = {"inputs": [_column("features", "FP64", [5, 10])]}
    assert _rows_of(deployment, request).tolist() == [[0.5], [1.0]]


_SOUND: dict[str, list[Any]] = {"age": [30], "income": [10.0], "région": ["north"]}


def _people(name: str = "age", /, **changes: Any) -> dict[str, Any]:
    request = column_inference(_SOUND)
    for tensor in request["inputs"]:
        if tensor["name"] == name:
            tensor.update(changes)
    return request


@pytest.mark.parametrize(
    ("request_body", "status", "told"),
    [
        (
            column_inference({"age": [30]}),
            422,
            "has no column 'income', 'région'; every column must be given",
        ),
        (
            column_inference({**_SOUND, "height": [3]}),
            422,
            "no column 'height'; the columns are 'age', 'income'",
        ),
        (column_inference({**_SOUND, "features": [3]}), 422, "no column 'features'"),
        (column_inference({"x" * 300: [3]}), 422, "no column 'xxxx"),
        (column_inference({"x\ny": [3]}), 422, "no column"),
        ({"inputs": column_inference(_SOUND)["inputs"] * 2}, 422, "given once"),
        (column_inference({**_SOUND, "age": [30, 31]}), 422, "same number of rows"),
        (column_inference({name: [] for name in _SOUND}), 422, "at least 1 row"),
        (column_inference({name: cells * 1001 for name, cells in _SOUND.items()}), 413, "at most 1000 rows"),
        (_people(data=["thirty"], datatype="BYTES"), 422, "'age'"),
        (_people(data=["30"]), 422, "numbers or null"),
        (_people(data=[True]), 422, "numbers or null"),
        (_people(data=[[30, 31]]), 422, "numbers or null"),
        (_people(data=[{"a": 1}]), 422, "numbers or null"),
        (_people(data=[30], datatype="BYTES"), 422, "strings or null"),
        (_people(data=[1], datatype="BOOL"), 422, "booleans or null"),
        (_people(data=[1.5], datatype="INT64"), 422, "integers or null"),
        (_people(data=[300], datatype="INT8"), 422, "integers of the stated"),
        (_people(data=[-1], datatype="UINT64"), 422, "integers of the stated"),
        (_people(data=[]), 422, "1 values, got 0"),
        (_people(data=[1, 2]), 422, "1 values, got 2"),
        (_people(data=None), 400, "must be a list"),
        (_people(data="30"), 400, "must be a list"),
        (_people(datatype="FP8"), 422, "BYTES, BOOL, FP16"),
        (_people(datatype=None), 422, "BYTES, BOOL, FP16"),
        (_people(datatype=["FP64"]), 422, "BYTES, BOOL, FP16"),
        (_people(shape=None), 400, "list of integers"),
        (_people(shape=[]), 400, "list of integers"),
        (_people(shape=[-1]), 400, "list of integers"),
        (_people(shape=[True]), 400, "list of integers"),
        (_people(shape=[1, 2]), 422, "[rows] or [rows, 1]"),
        (_people(shape=[1, 1, 1]), 422, "[rows] or [rows, 1]"),
        (_people(parameters=[]), 400, "parameters"),
        (_people(parameters={"binary_data_size": 8}), 400, "either `data` or `binary_data_size`"),
        (_people(data=None, parameters={"binary_data_size": 8}), 422, "number of bytes"),
        (_people(data=None, parameters={"binary_data_size": "8"}), 422, "number of bytes"),
        (_people("région", data=[5]), 422, "strings or null"),
        ({**_people(), "id": 5}, 400, "`id`"),
        ({**_people(), "outputs": [{"name": "other"}]}, 422, "label, probabilities"),
    ],
)
def test_malformed_columns_are_refused_and_charge_nothing(
    service: Running, request_body: Any, status: int, told: str
) -> None:
    _check_refused(service, "table", json.dumps(request_body).encode(), status, told)


_COLUMNS_TEXT = json.dumps(_people()).encode()


@pytest.mark.parametrize(
    "text",
    [
        _COLUMNS_TEXT.replace(b'"data": [30]', b'"data": [31], "data": [30]'),
        _COLUMNS_TEXT.replace(b'"shape"', b'"name": "age", "shape"', 1),
        _COLUMNS_TEXT.replace(b'"shape"', b'"\\u006eame": "age", "shape"', 1),
    ],
)
def test_a_key_that_is_repeated_among_columns_is_refused(service: Running, text: bytes) -> None:
    assert text != _COLUMNS_TEXT
    _check_refused(service, "table", text, 400, "")


@pytest.mark.parametrize(
    ("datatype", "content", "told"),
    [
        ("FP64", b"1234567", "8 bytes of binary data"),
        ("BOOL", b"\x02", "bytes 0 and 1"),
        ("BYTES", b"", "1 strings"),
        ("BYTES", b"\x01", "4 bytes for its length"),
        ("BYTES", b"\x05\x00\x00\x001234", "4 bytes for its length"),
        ("BYTES", b"\xff\xff\xff\xff", "4 bytes for its length"),
        ("BYTES", b"\x01\x00\x00\x00\xff", "UTF-8"),
        ("BYTES", b"\x01\x00\x00\x001" * 2, "1 strings"),
    ],
)
def test_malformed_binary_columns_are_refused_and_charge_nothing(
    service: Running, datatype: str, content: bytes, told: str
) -> None:
    size = {"binary_data_size": len(content)}
    text = json.dumps(_people(data=None, datatype=datatype, parameters=size)).encode()
    headers = {"inference-header-content-length": str(len(text))}
    for extra, sentence in ((b"", told), (b"x", "")):
        _check_refused(service, "table", text + content + extra, 422, sentence, **headers)


def test_mutated_requests_of_columns_cause_no_error_of_the_service_and_only_answers_are_charged(
    start: Start,
) -> None:
    rng = random.Random(0)
    statuses: Counter[int] = Counter()
    answers = 0
    with start("table", budget=Terms(10.0), queries=1000) as service:
        for _ in range(500):
            request = malformed.mutated_document(rng, copy.deepcopy(_people()))
            response = service.http.post("/v2/models/table/infer", content=malformed.encoded(request))
            statuses[response.status_code] += 1
            if response.status_code == 200:
                answers += response.json()["parameters"]["new_answers"]
            else:
                check_message(response)
        assert set(statuses) <= {200, 400, 413, 422}
        assert statuses[400] + statuses[422] > 250
        spent = service.ledger.account("people").spent_units
        assert spent == answers * service.service.deployment("table").unit_cost > 0


@pytest.mark.parametrize("column", [column.name for column in LOANS.columns])
@pytest.mark.parametrize(
    "cell", ["1" * 20_000 + "x", "1" * 10**6, "-" * 10**6, "1.111" * 10**5, "2024-01-01 " * 10**5]
)
def test_a_long_cell_takes_no_longer_than_many_short_ones(
    table_deployment: Deployment, column: str, cell: str
) -> None:
    deployment = _with_columns(table_deployment, *LOANS.columns)
    cells = {"age": 30, "income": 5, "région": "north", "smoker": "yes", "joined": "", "seen": "", "zip": "1"}
    request = column_inference({name: [value] for name, value in {**cells, column: cell}.items()})
    started = time.process_time()
    with suppress(HttpError):
        _rows_of(deployment, request)
    assert time.process_time() - started < 5, "a quadratic search takes longer"


_CELLS = st.one_of(
    st.none(),
    st.text(max_size=12),
    st.from_regex(r"[+-]?[0-9.,']{0,12}([eE][+-]?[0-9]{1,5})?( ?€)?", fullmatch=True),
    st.from_regex(
        r"[0-9]{4}-[01][0-9]-[0-3][0-9]([T ][0-9]{2}:[0-9]{2}(:[0-9]{2})?(Z|[+-][0-9]{2}:?[0-9]{2})?)?"
    ),
    st.datetimes().map(str),
    st.sampled_from(["0001-01-01T00:00+14:00", "9999-12-31T23:59:59-14:00", "inf", "nan", "yes", "1.1.0001"]),
)


@settings(max_examples=400)
@given(column=st.sampled_from(LOANS.columns), cell=_CELLS, iso=st.booleans())
def test_any_string_in_any_column_is_encoded_or_refused(
    table_deployment: Deployment, column: Column, cell: str | None, iso: bool
) -> None:
    tensor: dict[str, Any] = {"name": column.name, "shape": [1], "datatype": "BYTES", "data": [cell]}
    if iso:
        tensor["parameters"] = {"content_type": "datetime"}
    _check_encoded_or_refused(table_deployment, column, orjson.dumps({"inputs": [tensor]}))


@settings(max_examples=200)
@given(
    column=st.sampled_from(LOANS.columns),
    datatype=st.sampled_from([name for name in COLUMN_DATATYPES if name != "BYTES"]),
    content=st.binary(min_size=8, max_size=8),
)
def test_any_number_in_any_column_is_encoded_or_refused(
    table_deployment: Deployment, column: Column, datatype: str, content: bytes
) -> None:
    part = content[: COLUMN_DATATYPES[datatype].itemsize]
    tensor = {"name": column.name, "shape": [1], "datatype": datatype}
    text = orjson.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": len(part)}}]})
    _check_encoded_or_refused(table_deployment, column, text + part, len(text))


_STRINGS = [
    "",
    "?",
    "NaN",
    " NA ",
    "a",
    "A",
    "b",
    "1",
    "01",
    "2.0",
    "-3",
    "1.5e1",
    "1e400",
    "-inf",
    "none",
    "€ 7",
]
_STRINGS += [
    "2,5",
    "1.000",
    "yes",
    "No",
    "T",
    "0",
    "2020-01-03",
    "2020-01-03 07:00Z",
    "03.01.2020",
    "ß",
    "\x00a",
    "-0",
]
_FLOATS = [0.0, -0.0, 1.0, 2.0, 2.5, -3.0, 1e300, np.inf, -np.inf, np.nan, 0.1, -999.0, 1e-320]
_INTEGERS = [0, 1, 2, -3, 50, 100, -999, 20200103, 2**53 + 1, -(2**63), 2**63 - 1, 2**64 - 1]
_EVERY_KIND: tuple[Column, ...] = tuple(
    replace(column, name=f"{place} {missing}", missing=missing)  # type: ignore[call-arg, type-var]
    for missing in (True, False)
    for place, column in enumerate(
        (
            NumericColumn("", 0, 10, missing_values=("-999", "none")),
            NumericColumn("", -5, 1000, scale="log", decimal=",", thousands=".", unit="€"),
            NumericColumn("", 0, 100, edges=(1.5, 30, 60)),
            CategoricalColumn("", ("a", "b", "1", "NA"), missing_values=("none",)),
            CategoricalColumn("", ("a", "ß", "2", "True"), style="codes", ignore_case=True),
            BooleanColumn("", missing_values=("none",)),
            DateColumn("", "2020-01-01", "2020-01-11"),
            DateColumn("", "2020-01-01 00:00:00", "2020-01-11 00:00:00", format="%d.%m.%Y"),
            DateColumn("", "2020-01-01", "2020-12-11", format="%Y%m%d"),
            HashedColumn("", 7, ignore_case=True),
        )
    )
)


def _held(datatype: str, cells: list[Any]) -> Any:
    """Cells of a datatype as pandas holds them."""
    kind = COLUMN_DATATYPES[datatype]
    if kind.kind == "O":
        return pd.Series(cells, dtype=object)
    if kind.kind == "f":
        with np.errstate(over="ignore"):
            return np.array(cells, np.float64).astype(kind)
    name = "boolean" if datatype == "BOOL" else f"{'U' if kind.kind == 'u' else ''}Int{8 * kind.itemsize}"
    return pd.array(cells, dtype=name)


def _random_column(
    column: Column, count: int, rng: np.random.Generator, *, readable: bool
) -> tuple[str, list[Any], Any]:
    """The datatype and the cells of a column, and the same cells as pandas holds them."""
    datatype = str(rng.choice([*COLUMN_DATATYPES, *["BYTES"] * 6]))
    kind = COLUMN_DATATYPES[datatype]
    pools: dict[str, list[Any]] = {"O": _STRINGS, "f": _FLOATS}
    pool = pools.get(kind.kind, [True, False])
    if datatype != "BOOL" and kind.kind in "iu":
        pool = [each for each in _INTEGERS if np.iinfo(kind).min <= each <= np.iinfo(kind).max]
    if readable:
        unreadable = column._read(pd.DataFrame({"": _held(datatype, pool)})[""])[1]
        pool = [cell for cell, wrong in zip(pool, unreadable, strict=True) if not wrong] or [None]
    cells = [None if rng.random() < 0.1 else pool[rng.integers(len(pool))] for _ in range(count)]
    return datatype, cells, _held(datatype, cells)


def _request_of(
    columns: dict[str, tuple[str, list[Any], Any]], rng: np.random.Generator
) -> tuple[bytes, int]:
    """A request whose columns are listed or binary, where both can say the same."""
    inputs, binary = [], b""
    for name, (datatype, cells, held) in columns.items():
        tensor: dict[str, Any] = {"name": name, "datatype": datatype, "shape": [len(cells)]}
        kind = COLUMN_DATATYPES[datatype]
        listed = None in cells or rng.random() < 0.5
        if kind.kind == "f":  # JSON has no infinity and no short numbers, and binary numbers may be NaN
            listed = datatype == "FP64" and not np.isinf(held).any() and rng.random() < 0.5
        if listed:
            tensor["data"] = cells
        else:
            part = _join_strings(cells) if datatype == "BYTES" else np.asarray(held, kind).tobytes()
            tensor["parameters"], binary = {"binary_data_size": len(part)}, binary + part
        inputs.append(tensor)
    text = orjson.dumps({"inputs": inputs})
    return text + binary, len(text)


def _additive(encoding: Encoding, rng: np.random.Generator) -> Additive:
    cells = table_cells(encoding, 32)
    assert cells is not None
    cells = replace(cells, crosses=((0, 3), (4, 5), (1, 2)))
    weights = rng.normal(size=(3, sum(cells.sizes) + 1))
    return Additive(TableWeights(weights, weights[0, :-1], cells.sizes), cells, encoding, ("a", "b", "c"))


def test_a_request_is_read_as_the_same_table_of_pandas_bit_for_bit(table_deployment: Deployment) -> None:
    rng = np.random.default_rng(0)
    refused: list[bool] = []
    for _ in range(120):
        chosen = [_EVERY_KIND[place] for place in rng.permutation(len(_EVERY_KIND))]
        count, readable = int(rng.choice([1, 2, 9])), rng.random() < 0.7
        columns: dict[str, tuple[str, list[Any], Any]] = {
            column.name: _random_column(column, count, rng, readable=readable or rng.random() < 0.9)
            for column in chosen
        }
        deployment = _with_columns(table_deployment, *chosen)
        assert deployment.encoding is not None
        additive = _additive(deployment.encoding, rng)
        on_cells = replace(deployment, additive=additive)
        body, length = _request_of(columns, rng)
        frame = pd.DataFrame({name: held for name, (_, _, held) in columns.items()})
        problem, expected = _encoded(deployment.encoding, frame)
        refused.append(problem is not None)
        if problem is not None:
            for served in (deployment, on_cells):
                with pytest.raises(HttpError, match=re.escape(problem)):
                    _decode_request(body, length, served, 9)
            continue
        decoded, as_cells = (_decode_request(body, length, served, 9) for served in (deployment, on_cells))
        np.testing.assert_array_equal(decoded.rows.view(np.uint32), expected.view(np.uint32))
        np.testing.assert_array_equal(as_cells.rows, additive.cells.transform(expected))
        assert as_cells.unknown == decoded.unknown == _plain_unknown(deployment.encoding, expected)
        asked = replace(as_cells, outputs=(("reasons", False),))
        reasons = _requested_tensors(asked, Answers(np.zeros(count, np.int64), None), on_cells)["reasons"]
        np.testing.assert_array_equal(reasons, additive.contributions(expected))
    assert sum(refused) > 15
    assert refused.count(False) > 60


def _encoded(encoding: Encoding, frame: pd.DataFrame) -> tuple[str | None, Any]:
    """The encoded rows of a frame, or why there are none."""
    try:
        return None, encoding.encode(frame) + np.float32(0)
    except InvalidInput as error:
        return str(error), None


def _plain_unknown(encoding: Encoding, rows: Any) -> dict[str, int]:
    """How many rows have no feature of a column of categories, by column."""
    counts, start = {}, 0
    for column in encoding.columns:
        end = start + len(column.feature_names)
        if isinstance(column, CategoricalColumn):
            counts[column.name] = int((~rows[:, start:end].any(axis=1)).sum())
        start = end
    return {name: count for name, count in counts.items() if count}


def test_a_table_head_answers_columns_and_encoded_rows_as_its_folder_does_bit_for_bit(models: Path) -> None:
    (deployment,), private = load_models([str(models / "summed")]), open_private(models / "summed")
    frame = some_loans(300, seed=5).drop(columns=["customer", "repaid"])
    frame["joined"] = frame["joined"].dt.strftime("%d.%m.%Y")
    frame["seen"] = frame["seen"].astype(str)
    frame.loc[::7, "zip"], frame.loc[::5, "age"], frame.loc[::11, "région"] = "", 1000, "west"
    frame["smoker"] = np.where(frame["smoker"], "yes", "no")
    encoded = private.encode(frame)
    expected, contributions = private.predict_proba(encoded), private.additive().contributions(encoded)
    features = {"name": "features", "shape": [*encoded.shape], "datatype": "FP32"}
    for part in (slice(0, 1), slice(1, 8), slice(0, 300)):
        listed = column_inference({name: frame[name][part].tolist() for name in map(str, frame)})
        rows = len(encoded[part])
        features |= {"shape": [rows, encoded.shape[1]], "data": encoded[part].ravel().tolist()}
        for request in (listed, {"inputs": [features]}):
            asked = {**request, "outputs": [{"name": "reasons"}]}
            decoded = _decode_request(json.dumps(asked).encode(), None, deployment, 300)
            answers = deployment.answer(decoded.rows)
            np.testing.assert_array_equal(answers.probabilities, expected[part])
            np.testing.assert_array_equal(answers.labels, private.predict(encoded[part]))
            reasons = _requested_tensors(decoded, answers, deployment)["reasons"]
            np.testing.assert_array_equal(reasons, contributions[part])
            np.testing.assert_array_equal(
                np.add.accumulate(reasons, axis=1)[:, -1],
                private.classifier.scores(private._mapped(encoded[part])),
            )


def _with_columns(deployment: Deployment, *columns: Column) -> Deployment:
    encoding = Encoding(columns, "ill", ("no", "yes"))
    return replace(deployment, encoding=encoding, inputs=len(encoding.feature_names))


def _check_encoded_or_refused(
    deployment: Deployment, column: Column, body: bytes, json_length: int | None = None
) -> None:
    served = _with_columns(deployment, column)
    refused, rows = None, np.zeros((1, served.inputs), np.float32)
    try:
        rows = _decode_request(body, json_length, served, 5).rows
    except HttpError as error:
        refused = error
    assert refused is None or (refused.status == 422 and len(refused.message) < 400)
    assert rows.shape == (1, served.inputs)
    assert ((rows >= 0) & (rows <= 1)).all()


@given(st.lists(st.text()))
def test_strings_are_split_as_they_were_joined(strings: list[str]) -> None:
    try:
        joined = _join_strings(strings)
    except UnicodeEncodeError:  # a lone surrogate
        return
    assert _split_strings(joined) == strings


DEPLOYMENT: Any = SimpleNamespace(
    encoding=None, inputs=3, releases_probabilities=True, classes=("a", "b"), additive=None
)
NUMBERS = [
    *("0", "-0", "1", "-1.5", "2.5e-3", "1E+2", "1e400", "-1e400", "1e-400", "0e999999", "4.9e-324"),
    *("1.7976931348623158e308", "1.7976931348623159e308", "18446744073709551615", "18446744073709551616"),
    *("-9223372036854775808", "-9223372036854775809", "1" * 400, "0." + "1" * 400, "9007199254740993"),
    *("1e15", "1.0000001e15", "127", "128", "3e38", "3.5e38", "0.1", "1e22", "1e23", "123456789012345678"),
]
TOKENS = [
    *NUMBERS,
    *("NaN", "Infinity", "-Infinity", "nan", "true", "false", "null", '"1"', '""', "{}", "[]", "[1]"),
    *("01", "+1", "1.", ".5", "-", "1e", "0x1", "1_0", "1 2", ",", ",,", "[", "]", "{", "}", ":", '"', "\\"),
    *("\\u0064ata", '"data":[1,2,3],', '"data" : [1],', '"id":"data",', "\n", "\t ", "\x0c", "\x00", "\xa0"),
    *('"parameters":{"data":[1]},', '"outputs":[],', '"id":"[1,2]",', "/* */", "//", '"data"', "[[1]]"),
    *("],[", "],", ",["),
]


def _body(rng: random.Random) -> str:
    """Write a valid request in one of many layouts."""
    rows = rng.choice([1, 1, 2, 3])
    numbers = [rng.choice(NUMBERS[:5] if rng.random() < 0.1 else ("1", "20", "7")) for _ in range(3 * rows)]
    space = rng.choice(["", " ", "\n  "])
    if rng.random() < 0.5:
        lists = ["[" + f",{space}".join(numbers[3 * row : 3 * row + 3]) + "]" for row in range(rows)]
        data = f"[{space}" + f"{space},".join(lists) + f"{space}]"
    else:
        data = f"[{space}" + f",{space}".join(numbers) + f"{space}]"
    datatype = rng.choice(["FP32", "FP64", "INT8", "INT64", "UINT8"])
    fields = ['"name": "features"', f'"shape": [{rows}, 3]', f'"datatype":"{datatype}"']
    fields.append(f'"data"{space}:{space}{data}')
    rng.shuffle(fields)
    others = ['"inputs":[{' + f",{space}".join(fields) + "}]"]
    others += rng.sample(
        ['"id": "one"', '"outputs": [{"name":"label"}]', '"parameters": {"a": 1}'], rng.randint(0, 2)
    )
    rng.shuffle(others)
    return "{" + ", ".join(others) + "}"


def _mutated(rng: random.Random) -> bytes:
    """Change a valid request in up to three places."""
    text = _body(rng)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        first, second = sorted(rng.sample(range(len(text) + 1), 2))
        second = min(second, first + rng.choice([0, 0, 1, 1, 2, 8, 40]))
        text = text[:first] + rng.choice([*TOKENS, text[first:second] * 2, ""]) + text[second:]
    if rng.random() < 0.3:  # one number among the data
        places = [place for place in range(len(text)) if text[place] in "[,"]
        place = rng.choice(places) if places else 0
        text = text[: place + 1] + rng.choice(TOKENS) + rng.choice([",", ""]) + text[place + 1 :]
    return text.encode("utf-8" if rng.random() < 0.9 else "latin-1")


def _decoded(body: bytes) -> tuple[object, ...]:
    try:
        request = _decode_request(body, None, DEPLOYMENT, 2)
    except HttpError as error:
        return error.status, str(error.to_json())
    return request.rows.tobytes(), request.rows.shape, str(request.rows.dtype), request.id, request.outputs


@pytest.mark.parametrize(("count", "seed"), [(2_000, 0), pytest.param(200_000, 1, marks=pytest.mark.slow)])
def test_mutated_bodies_are_decoded_alike_with_and_without_an_array(
    monkeypatch: pytest.MonkeyPatch, count: int, seed: int
) -> None:
    rng = random.Random(seed)
    answered = arrays = 0
    for _ in range(count):
        body = _mutated(rng)
        monkeypatch.setattr(codec, "_MIN_ARRAY_BYTES", float("inf"))
        whole = _decoded(body)
        monkeypatch.setattr(codec, "_MIN_ARRAY_BYTES", 0)
        assert _decoded(body) == whole, body
        answered += isinstance(whole[0], bytes)
        arrays += _parse_with_array(body) is not None
    assert answered > count / 20
    assert arrays > count / 6


def _with_data(data: str) -> bytes:
    return f'{{"inputs": [{{"name": "features", "data": {data}}}]}}'.encode()


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**63), 2**64 - 1), min_size=1)
)
def test_every_number_has_the_bits_that_the_standard_library_gives_it(numbers: list[float]) -> None:
    parsed = _parse_with_array(_with_data(json.dumps(numbers)))
    assert parsed is not None
    assert parsed["inputs"][0]["data"].tobytes() == np.array([float(number) for number in numbers]).tobytes()


@pytest.mark.parametrize(
    "data",
    [
        *("[[1, 2], [3]]", "[[1], 2]", "[1, [2]]", "[[[1]]]", "[]", "[1, true]", '[1, "2"]', "[1, 2,]"),
        *("[1, NaN]", "[1", "{}", "[[1] [2]]", "[,[1]]", "[[1], []]", "[1, {}]", "[1, null]"),
        '[1], "\\u0061": 1',
    ],
)
def test_what_is_no_list_of_numbers_is_left_to_the_parser_of_the_whole_body(data: str) -> None:
    assert _parse_with_array(_with_data(data)) is None


def test_a_large_body_takes_little_more_memory_than_its_numbers() -> None:
    rows = np.random.default_rng(0).random((500, 784)).round(4)
    tensor = {"name": "features", "shape": [500, 784], "datatype": "FP32", "data": rows.ravel().tolist()}
    body = orjson.dumps({"inputs": [tensor]})
    deployment = SimpleNamespace(**{**vars(DEPLOYMENT), "inputs": 784})
    _decode_request(body, None, deployment, 500)  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        _decode_request(body, None, deployment, 500)  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 30 * rows.size  # a list of Python numbers takes 32 bytes each, beside the array
