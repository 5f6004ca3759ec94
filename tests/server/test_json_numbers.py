"""Numbers cut out of JSON: exactly what the parser of the whole body accepts and refuses."""

from __future__ import annotations

import json
import random
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quietmax.server import codec
from quietmax.server import codec as json_numbers
from quietmax.server.codec import _cut_numbers, decode_request
from quietmax.server.errors import HttpError

DEPLOYMENT: Any = SimpleNamespace(
    encoding=None, inputs=3, image_shape=None, releases_probabilities=True, classes=("a", "b")
)
NUMBERS = [
    *("0", "-0", "1", "-1.5", "2.5e-3", "1E+2", "1e400", "-1e400", "1e-400", "0e999999", "4.9e-324"),
    *("1.7976931348623158e308", "1.7976931348623159e308", "18446744073709551615", "18446744073709551616"),
    *("-9223372036854775808", "-9223372036854775809", "1" * 400, "0." + "1" * 400, "9007199254740993"),
    *("1e15", "1.0000001e15", "127", "128", "3e38", "3.5e38", "0.1", "1e22", "1e23", "123456789012345678"),
]
TOKENS = [
    *NUMBERS,
    *(
        "NaN",
        "Infinity",
        "-Infinity",
        "nan",
        "true",
        "false",
        "null",
        '"1"',
        '""',
        "{}",
        "[]",
        "[1]",
        "[[1]]",
    ),
    *("01", "+1", "1.", ".5", "-", "1e", "0x1", "1_0", "1 2", ",", ",,", "[", "]", "{", "}", ":", '"', "\\"),
    *("\\u0064ata", '"data":[1,2,3],', '"data" : [1],', '"id":"data",', "\n", "\t ", "\x0c", "\x00", "\xa0"),
    *(
        '"parameters":{"data":[1]},',
        '"outputs":[],',
        '"id":"[1,2]",',
        "/* */",
        "//",
        '"data"',
        "],[",
        "],",
        ",[",
    ),
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
    fields = [
        *(
            '"name": "features"',
            f'"shape": [{rows}, 3]',
            f'"datatype":"{datatype}"',
            f'"data"{space}:{space}{data}',
        ),
    ]
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
        request = decode_request(body, None, DEPLOYMENT, 2)
    except HttpError as error:
        return error.status, str(error.to_json())
    return request.rows.tobytes(), request.rows.shape, str(request.rows.dtype), request.id, request.outputs


def _compare(count: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode mutated bodies with and without the cut."""
    rng = random.Random(seed)
    answered = cut = 0
    for _ in range(count):
        body = _mutated(rng)
        monkeypatch.setattr(codec, "_MIN_CUT", float("inf"))
        whole = _decoded(body)
        monkeypatch.setattr(codec, "_MIN_CUT", 0)
        monkeypatch.setattr(json_numbers, "_PART", rng.choice([4, 16, 2**16]))
        assert _decoded(body) == whole, body
        answered += isinstance(whole[0], bytes)
        cut += _cut_numbers(body, 2) is not None
    assert answered > count / 20
    assert cut > count / 5


def test_two_thousand_mutated_bodies_are_decoded_as_by_the_parser_of_the_whole_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _compare(2_000, 0, monkeypatch)


@pytest.mark.slow
def test_two_hundred_thousand_mutated_bodies_are_decoded_as_by_the_parser_of_the_whole_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _compare(200_000, 1, monkeypatch)


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**63), 2**64 - 1), min_size=1)
)
def test_every_number_has_the_bits_that_the_standard_library_gives_it(numbers: list[float]) -> None:
    cut = _cut_numbers(json.dumps({"data": numbers}).encode(), 1)
    assert cut is not None
    assert cut[1].tobytes() == np.array([float(number) for number in numbers]).tobytes()


def test_lists_are_read_alike_in_parts_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.random.default_rng(0).normal(size=300)
    text = orjson.dumps({"data": numbers.tolist()})
    for part in (24, 30, 64, 1000, 2**16):
        monkeypatch.setattr(json_numbers, "_PART", part)
        cut = _cut_numbers(text, 1)
        assert cut is not None
        assert cut[0] == b'{"data":[]}'
        assert (cut[1] == numbers).all()


@pytest.mark.parametrize(
    "text",
    [
        *('{"data": [[1, 2], [3]]}', '{"data": [[1], 2]}', '{"data": [1, [2]]}', '{"data": [[[1]]]}', '{"data": []}'),
        *('{"data": [1, true]}', '{"data": [1, "2"]}', '{"data": [1, 2,]}', '{"data": [1, NaN]}', '{"data": [1}'),
        *('{"data": [1], "a": {"data": [2]}}', '{"id": "\\"", "data": [1]}', '{"data": [[1], [2], [3]]}'),
        *('{"data": {}, "a": [1]}', '{"data": [[1] [2]]}', '{"data": [,[1]]}', '"data":[1]'),
    ],
)  # fmt: skip
def test_what_is_not_certain_is_left_to_the_parser_of_the_whole_body(text: str) -> None:
    assert _cut_numbers(text.encode(), 2) is None


def test_a_large_body_takes_little_more_memory_than_its_numbers() -> None:
    rows = np.random.default_rng(0).random((500, 784)).round(4)
    tensor = {"name": "features", "shape": [500, 784], "datatype": "FP32", "data": rows.ravel().tolist()}
    body = orjson.dumps({"inputs": [tensor]})
    deployment = SimpleNamespace(**{**vars(DEPLOYMENT), "inputs": 784})
    decode_request(body, None, deployment, 500)  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        decode_request(body, None, deployment, 500)  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 30 * rows.size  # a list of Python numbers takes 32 bytes each, beside the array
