"""Send malformed requests over HTTP and gRPC to the service, and check what they cost it.

Run `python benchmarks/malformed.py`: 50,000 requests over HTTP and 50,000 over gRPC to `quietmax serve` with two
models, one with released weights and one that is charged per answer. Headers, bodies, the structure of JSON, binary
tensors and protobuf messages are mutated; request number N is the same in every run with the same `--seed`. Whatever is
sent to the charged model is wrong for certain. What is sent to the other may have stayed valid.

No response may be an error of the service (5xx over HTTP; over gRPC INTERNAL, UNKNOWN, UNAVAILABLE or none), nothing
may be spent, the journal must verify, good requests in between must be answered, and memory and descriptors must be
flat: at the end at most a tenth above those after a fifth of the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import re
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONNECTIONS = 32
CHANNELS = 4
"""Connections of gRPC, so that they reach all workers."""
GOOD_EVERY = 100
TIMEOUT = 2
"""Seconds that the service waits for headers, bodies and idle connections, so that unfinished requests end soon."""
PATIENCE = 60.0
METHOD = "/inference.GRPCInferenceService/"
JUNK: list[Any] = [
    None, True, -1, 0, 2**63, 2**70, 1e308, 0.5, "", "x", "features", "\u0000", "x" * 3000, [], {}, [[]], [None],
    {"a": 1}, [{}], [1, "2"], "NaN", [1e999],
]  # fmt: skip
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})[^\r\n]*\r\n((?:[^\r\n]+\r\n)*+)\r\n")


@dataclass(frozen=True)
class Target:
    """Where the requests go: ports, keys, and a model of each kind with so many features."""

    port: int
    grpc_port: int
    key: str
    free: str
    charged: str
    features: int


@dataclass
class Outcome:
    """What came back: how often each status, and what must not have happened."""

    http: Counter[str] = field(default_factory=Counter)
    grpc: Counter[str] = field(default_factory=Counter)
    unsent: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    good: int = 0


def document(rng: random.Random, target: Target, rows: int = 1) -> dict[str, Any]:
    """A valid request."""
    count = rows * target.features
    data = [round(rng.uniform(-2, 2), 3) for _ in range(count)]
    tensor = {"name": "features", "shape": [rows, target.features], "datatype": "FP32", "data": data}
    return {"id": f"id-{rng.randrange(10**6)}", "inputs": [tensor], "outputs": [{"name": "label"}]}


def wrong_document(rng: random.Random, target: Target) -> Any:
    """A request that no mutation has left valid."""
    valid = document(rng, target, rng.randint(1, 3))
    tensor = valid["inputs"][0]
    numbers = tensor["data"]

    def change(place: dict[str, Any], **values: Any) -> Callable[[], Any]:
        return lambda: place.update(values)

    changes: list[Callable[[], Any]] = [
        change(valid, inputs=rng.choice([None, {}, [], 5, "x", [[]], [None], [tensor, tensor]])),
        change(valid, id=rng.choice([5, [], {}, "x" * 129, True])),
        change(valid, outputs=rng.choice([{}, 5, [{"name": "other"}], [[]], [{}], [{"name": 1}]])),
        change(valid, parameters=rng.choice([[], 5, "x", {"a": [1]}, {"a": None}])),
        change(tensor, name=rng.choice(["other", 5, None, [], ""])),
        change(
            tensor, shape=rng.choice([[], None, [0], [-1, 3], [2**62, 2**62], ["1"], [1.5], "x", [1] * 9, {}])
        ),
        change(tensor, datatype=rng.choice(["FP33", "", None, 5, "BYTES", [], "fp32"])),
        change(
            tensor, data=rng.choice([None, {}, "x", 5, [], numbers[1:], [*numbers, 1], [[numbers], [[1]]]])
        ),
        change(tensor, data=[*numbers[1:], rng.choice([None, "x", [], {}, True, 1e999, "1"])]),
        change(tensor, parameters=rng.choice([[], 5, {"binary_data_size": 7}, {"binary_data_size": "x"}])),
        change(tensor, data=nested(numbers, rng.randint(3, 200))),
    ]
    rng.choice(changes)()
    return valid


def nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All containers of a JSON document with their keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def junk(rng: random.Random) -> Any:
    """Any value; a new one each time, since it may be changed later."""
    return copy.deepcopy(rng.choice(JUNK))


def mutated_document(rng: random.Random, value: Any) -> Any:
    """A request with a few places changed, removed or repeated."""
    for _ in range(rng.randint(1, 4)):
        found = list(places(value))
        if not found:
            break
        container, key = rng.choice(found)
        kind = rng.randrange(4)
        if kind == 0 and isinstance(container, dict):
            container[rng.choice(["name", "data", "shape", "x", "parameters", ""])] = junk(rng)
        elif kind == 1:
            del container[key]
        elif kind == 2 and isinstance(container, list):
            container.insert(key, junk(rng))
        else:
            container[key] = junk(rng)
    return value


def mutated_bytes(rng: random.Random, content: bytes) -> bytes:
    """The content with a few bytes changed, removed, repeated or added."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 5)):
        place = rng.randrange(len(changed) + 1)
        kind = rng.randrange(5)
        if kind == 0 and place < len(changed):
            changed[place] = rng.randrange(256)
        elif kind == 1:
            del changed[place : place + rng.randint(1, 12)]
        elif kind == 2:
            changed[place:place] = rng.randbytes(rng.randint(1, 12))
        elif kind == 3:
            changed[place:place] = changed[place : place + rng.randint(1, 60)]
        elif place < len(changed):
            changed[place] ^= 1 << rng.randrange(8)
    return bytes(changed)


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def posted(path: str, body: bytes, headers: dict[str, str], method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def infer_headers(target: Target, body: bytes) -> dict[str, str]:
    return {
        "Host": f"127.0.0.1:{target.port}",
        "Authorization": f"Bearer {target.key}",
        "Content-Length": str(len(body)),
    }


def wrong_json(rng: random.Random, target: Target) -> bytes:
    """To the charged model: a request that is wrong for certain."""
    body = encoded(wrong_document(rng, target))
    if rng.random() < 0.2:
        body = body[: rng.randrange(len(body))]
    return posted(f"/v2/models/{target.charged}/infer", body, infer_headers(target, body))


def mutated_json(rng: random.Random, target: Target) -> bytes:
    """To the free model: a body with other bytes or another structure."""
    if rng.random() < 0.5:
        body = mutated_bytes(rng, encoded(document(rng, target, rng.randint(1, 3))))
    else:
        body = encoded(mutated_document(rng, document(rng, target, rng.randint(1, 3))))
    return posted(f"/v2/models/{target.free}/infer", body, infer_headers(target, body))


def binary(rng: random.Random, target: Target) -> bytes:
    """Binary tensors whose sizes contradict each other (to the charged model), or whose bytes are mutated."""
    value = document(rng, target, 2)
    tensor = value["inputs"][0]
    raw = struct.pack(f"<{len(tensor['data'])}f", *tensor["data"])
    del tensor["data"]
    size, wrong = len(raw), rng.random() < 0.5
    tensor["parameters"] = {"binary_data_size": size}
    length: Any = None
    if wrong:
        defect = rng.randrange(5)
        if defect == 0:
            tensor["parameters"]["binary_data_size"] = rng.choice(
                [0, size - 1, size + 1, -1, 2**40, "x", None, 1.5]
            )
        elif defect == 1:
            raw = raw[: rng.randrange(size)]
        elif defect == 2:
            raw += rng.randbytes(rng.randint(1, 50))
        elif defect == 3:
            length = rng.choice([0, 1, -5, 10**9, "x", "", "1e3", 2**70])
        else:
            tensor["datatype"] = rng.choice(["BYTES", "FP64", "INT8", "BOOL", "FP33"])
    head = encoded(value)
    body = head + raw
    if not wrong:
        body = mutated_bytes(rng, body)
    headers = infer_headers(target, body)
    headers["Inference-Header-Content-Length"] = str(len(head) if length is None else length)
    return posted(f"/v2/models/{target.charged if wrong else target.free}/infer", body, headers)


def head(rng: random.Random, target: Target) -> bytes:
    """A request whose line or headers are mutated; its body and length may contradict each other."""
    body = encoded(document(rng, target))
    headers = infer_headers(target, body)
    path = f"/v2/models/{target.free}/infer"
    kind = rng.randrange(8)
    if kind == 0:
        request = posted(path, body, headers)
        end = request.index(b"\r\n\r\n")
        return mutated_bytes(rng, request[:end]) + request[end:]
    if kind == 1:
        headers["Content-Length"] = str(
            rng.choice([len(body) - 1, 0, -1, 10**30, "x", "", f"{len(body)},{len(body)}", f"+{len(body)}"])
        )
    elif kind == 2:
        headers[rng.choice(["Authorization ", "host", "authorization", "X" * 3000, "a b", "\u00e9"])] = (
            "x" * rng.choice([0, 10, 40_000])
        )
    elif kind == 3:
        headers.update({f"x-{number}": "y" for number in range(rng.choice([50, 150]))})
    elif kind == 4:
        path = rng.choice(
            ["", "/", "//", "/v2/models//infer", "/v2/models/%00/infer", "/v2/models/%ff%fe/infer", "/../../etc", "*",
             f"/v2/models/{target.free}/versions//infer", f"/v2/models/{'x' * 5000}/infer", "/\u00e9", "http://x/v2",
             f"/v2/models/{target.free}/versions/9/infer", f"/v2/models/{target.free}%2finfer"]
        )  # fmt: skip
    elif kind == 5:
        return posted(
            path, body, headers, rng.choice(["GET", "PUT", "DELETE", "PATCH", "HEAD", "TRACE", "XYZ", "post"])
        )
    elif kind == 6:
        del headers["Content-Length"]
        headers["Transfer-Encoding"] = rng.choice(
            ["chunked", "chunked, chunked", "gzip, chunked", "xchunked"]
        )
        size = rng.choice([b"%x" % len(body), b"0", b"-1", b"zz", b"f" * 40, b"%x;a=b" % len(body)])
        body = (
            size
            + b"\r\n"
            + body
            + b"\r\n0\r\n"
            + rng.choice([b"\r\n", b"X: y\r\n\r\n", b"Authorization: x\r\n\r\n", b""])
        )
    else:
        headers["Expect"] = rng.choice(["100-continue", "x"])
        headers["Content-Encoding"] = rng.choice(["gzip", "identity", "br", ""])
        headers["Connection"] = rng.choice(["Upgrade", "close", "keep-alive, x", "x"])
        headers["Upgrade"] = rng.choice(["h2c", "websocket"])
    return posted(path, body, headers)


def unauthorized(rng: random.Random, target: Target) -> bytes:
    """A valid request to the charged model with a key that is not one."""
    body = encoded(document(rng, target))
    headers = infer_headers(target, body)
    headers["Authorization"] = rng.choice(
        ["", "Bearer", "Bearer ", f"Basic {target.key}", f"Bearer {target.key[:-1]}", f"Bearer {target.key}x",
         target.key, "Bearer a.b.c", "Bearer \u00ff", f"Bearer {target.key.swapcase()}"]
    )  # fmt: skip
    return posted(f"/v2/models/{target.charged}/infer", body, headers)


def elsewhere(rng: random.Random, target: Target) -> bytes:
    """Any body to any other path."""
    path = rng.choice(
        ["/contents", "/state", "/", "/metrics", "/v2", "/v2/models",
         f"/v2/models/{target.charged}", f"/v2/models/{target.charged}/budget", "/nowhere"]
    )  # fmt: skip
    body = rng.choice([b"", b"{}", b"[", b"key=x", rng.randbytes(200), encoded(junk(rng)), b"x" * 70_000])
    headers = infer_headers(target, body)
    headers["Cookie"] = rng.choice(
        ["", "quietmax_session=x.y.z", "quietmax_session=" + "1." * 500, "a=b; ;;="]
    )
    return posted(path, body, headers, rng.choice(["GET", "POST", "PUT", "DELETE", "OPTIONS"]))


HTTP_KINDS: dict[Callable[[random.Random, Target], bytes], float] = {
    wrong_json: 0.35,
    mutated_json: 0.25,
    binary: 0.2,
    head: 0.08,
    unauthorized: 0.05,
    elsewhere: 0.07,
}


def statuses(received: bytes, *, bodies: bool = True) -> Iterator[int]:
    """The statuses of all complete responses, with or without bodies; the interim ones do not count."""
    place = 0
    while found := _STATUS.match(received, place):
        length = re.search(rb"(?i)^content-length: (\d+)", found[2], re.MULTILINE)
        chunked = b"transfer-encoding: chunked" in found[2].lower()
        place = found.end() + (int(length[1]) if length and bodies else 0)
        if chunked and bodies:
            place = received.find(b"0\r\n\r\n", found.end()) + 5
            if place < 5:
                return
        if place > len(received):
            return
        if int(found[1]) >= 200:
            yield int(found[1])


async def exchange(target: Target, request: bytes) -> list[int]:
    """Send a request on a connection of its own; return the statuses of the responses."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    received, bodies = b"", not request.startswith(b"HEAD ")
    try:
        with suppress(ConnectionError):
            writer.write(request)
            await writer.drain()
        with suppress(ConnectionError):
            while True:
                silence = 0.01 if any(statuses(received, bodies=bodies)) else PATIENCE
                try:
                    part = await asyncio.wait_for(reader.read(2**16), silence)
                except TimeoutError:
                    if silence == PATIENCE:
                        return [0]
                    break
                if not part:
                    break
                received += part
    finally:
        writer.close()
    return list(statuses(received, bodies=bodies))


async def send_http(target: Target, numbers: range, seed: int, outcome: Outcome) -> None:
    """Send the requests with these numbers over HTTP, many at a time."""
    kinds, weights = list(HTTP_KINDS), list(HTTP_KINDS.values())
    remaining = iter(numbers)

    async def connection() -> None:
        for number in remaining:
            rng = random.Random(f"{seed}-http-{number}")
            (kind,) = rng.choices(kinds, weights)
            received = await exchange(target, kind(rng, target))
            for status in received or [-1]:
                outcome.http["closed" if status == -1 else str(status)] += 1
                if status == 0 or status >= 500:
                    outcome.wrong[f"http {status} {kind.__name__} {number}"] += 1
            if number % GOOD_EVERY == 0:
                body = encoded(document(rng, target))
                good = posted(f"/v2/models/{target.free}/infer", body, infer_headers(target, body))
                answered = await exchange(target, good)
                outcome.good += 1
                if answered != [200]:
                    outcome.wrong[f"good http {answered}"] += 1

    await asyncio.gather(*(connection() for _ in range(CONNECTIONS)))


def message(name: str, **fields: Any) -> Any:
    from quietmax.server.grpc_server import message_class

    return message_class(name)(**fields)


def valid_message(rng: random.Random, target: Target, model: str, *, raw: bool) -> Any:
    """A valid request, typed or raw."""
    values = [round(rng.uniform(-2, 2), 3) for _ in range(2 * target.features)]
    request = message("ModelInferRequest", model_name=model, id=f"grpc-{rng.randrange(10**6)}")
    tensor = request.inputs.add(name="features", datatype="FP32", shape=[2, target.features])
    if raw:
        request.raw_input_contents.append(struct.pack(f"<{len(values)}f", *values))
    else:
        tensor.contents.fp32_contents.extend(values)
    return request


def wrong_message(rng: random.Random, target: Target) -> bytes:
    """To the charged model: a request that is wrong for certain."""
    request = valid_message(rng, target, target.charged, raw=rng.random() < 0.5)
    tensor = request.inputs[0]
    defects: list[Callable[[], Any]] = [
        lambda: request.ClearField("inputs"),
        lambda: request.inputs.add(name="other", datatype="FP32", shape=[1]),
        lambda: request.outputs.add(name="other"),
        lambda: setattr(request, "id", "x" * 129),
        lambda: setattr(request, "model_version", rng.choice(["9", "x" * 2000, "../1"])),
        lambda: setattr(request, "model_name", rng.choice(["", "other", "x" * 70_000, "../x", "\u0000"])),
        lambda: setattr(tensor, "datatype", rng.choice(["FP33", "BYTES", "FP64", "INT8", "", "x" * 5000])),
        lambda: setattr(tensor, "name", rng.choice(["", "other", "\u0000", "x" * 5000])),
        lambda: tensor.shape.append(rng.choice([2, -1, 2**62, 0])),
        lambda: tensor.shape.__setitem__(0, rng.choice([0, 1, 3, -2, 2**62])),
        lambda: request.raw_input_contents.append(rng.randbytes(rng.randint(1, 99))),
        lambda: tensor.contents.int64_contents.append(1),
        lambda: tensor.contents.bytes_contents.append(rng.randbytes(9)),
        lambda: tensor.parameters["x"].Clear(),
        lambda: request.parameters["x"].Clear(),
    ]
    rng.choice(defects)()
    return bytes(request.SerializeToString())


def mutated_message(rng: random.Random, target: Target) -> bytes:
    """To the free model: a message whose bytes are mutated."""
    return mutated_bytes(
        rng, valid_message(rng, target, target.free, raw=rng.random() < 0.5).SerializeToString()
    )


def grpc_request(
    rng: random.Random, target: Target
) -> tuple[str, list[bytes], list[tuple[str, str | bytes]]]:
    """A malformed request: the method, the messages and the metadata."""
    method, metadata = "ModelInfer", [("authorization", f"Bearer {target.key}")]
    kind = rng.random()
    if kind < 0.45:
        messages = [wrong_message(rng, target)]
    elif kind < 0.75:
        messages = [mutated_message(rng, target)]
    elif kind < 0.85:
        method = rng.choice(
            ["ModelReady", "ModelMetadata", "ServerLive", "ServerMetadata", "RepositoryIndex",
             "ModelStatistics", "ModelStreamInfer", "x", "ModelInfer/x"]
        )  # fmt: skip
        messages = [
            rng.choice([b"", rng.randbytes(50), b"\xff" * 100, mutated_message(rng, target), b"x" * 70_000])
        ]
    elif kind < 0.95:
        key = target.key
        metadata = rng.choice(
            [[], [("authorization", key)], [("authorization", f"Bearer {key}x")], metadata * 2,
             [("authorization", "")], [("authorization-bin", b"\0\xff")], [("authorization", f"Basic {key}")],
             [*metadata[:0], ("x-large", "y" * 4000), ("traceparent", "x")]]
        )  # fmt: skip
        messages = [valid_message(rng, target, target.charged, raw=True).SerializeToString()]
    else:
        messages = rng.choice([[], [b""], [b"", b"x"]])
    return method, messages, metadata


PARTS = 20
"""Memory and open files are sampled after each part of the requests."""
MOST_UNSENT = 20
"""How often a request is sent again whose message the client could not send."""
WRONG_CODES = ("INTERNAL", "UNKNOWN", "UNAVAILABLE", "DATA_LOSS", "ABORTED", "CANCELLED", "none")


async def code(
    channel: Any, method: str, messages: list[bytes], metadata: Any, unsent: Counter[str] | None = None
) -> str:
    """Send a request; return the name of its status, `none` if there was no answer.

    A call that is refused for its metadata or its method may end before the client has sent its message. The client
    then fails itself (`execute_batch`) and does not tell the status, so the request is sent again until it does;
    `unsent` counts these calls by the status of the refusal.
    """
    import grpc

    failed = 0
    while True:
        started = time.monotonic()
        try:
            await channel.stream_unary(METHOD + method)(iter(messages), metadata=metadata, timeout=PATIENCE)
            name = "OK"
        except grpc.RpcError as error:
            if "execute_batch" in str(error.debug_error_string()) and failed < MOST_UNSENT:
                failed += 1
                continue
            name = "none" if time.monotonic() - started > PATIENCE - 1 else str(error.code().name)
        if failed and unsent is not None:
            unsent[name] += failed
        return name


async def send_grpc(target: Target, numbers: range, seed: int, outcome: Outcome) -> None:
    """Send the requests with these numbers over gRPC, many at a time."""
    import grpc

    remaining = iter(numbers)

    async def connection(channel: Any) -> None:
        for number in remaining:
            rng = random.Random(f"{seed}-grpc-{number}")
            name = await code(channel, *grpc_request(rng, target), outcome.unsent)
            outcome.grpc[name] += 1
            if name in WRONG_CODES:
                outcome.wrong[f"grpc {name} {number}"] += 1
            if number % GOOD_EVERY == 0:
                good = valid_message(rng, target, target.free, raw=True).SerializeToString()
                answered = await code(
                    channel, "ModelInfer", [good], [("authorization", f"Bearer {target.key}")]
                )
                outcome.good += 1
                if answered != "OK":
                    outcome.wrong[f"good grpc {answered}"] += 1

    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(
                grpc.aio.insecure_channel(
                    f"127.0.0.1:{target.grpc_port}", options=[("grpc.use_local_subchannel_pool", 1)]
                )
            )
            for _ in range(CHANNELS)
        ]
        await asyncio.gather(*(connection(channels[each % CHANNELS]) for each in range(CONNECTIONS)))
    for number in numbers[:: max(len(numbers) // 50, 1)]:
        await send_noise(target, random.Random(f"{seed}-noise-{number}"))


async def send_noise(target: Target, rng: random.Random) -> None:
    """Send bytes that are not HTTP/2 to the gRPC port; there is no status to expect."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    with suppress(ConnectionError):
        _, writer = await asyncio.open_connection("127.0.0.1", target.grpc_port)
        writer.write(rng.choice([b"", preface, preface[:10]]) + rng.randbytes(rng.randint(0, 300)))
        await writer.drain()
        writer.close()


async def send(target: Target, http: range, grpc: range, seed: int, outcome: Outcome) -> None:
    """Send malformed requests over HTTP, then over gRPC."""
    await send_http(target, http, seed, outcome)
    await send_grpc(target, grpc, seed, outcome)


def spent_units(ledger: str) -> tuple[dict[str, int], bool]:
    """Return what is spent of each account, and whether the journal verifies."""
    from quietmax.ledger import Ledger

    with Ledger(ledger) as opened:
        return {each.name: each.spent_units for each in opened.accounts()}, opened.verify().sound


def quiet_sample(supervisor: Any) -> tuple[float, int]:
    """Return memory and open files once the service has ended the connections that were left to it."""
    from soak import sample

    time.sleep(2 * TIMEOUT)
    memory, files = sample(supervisor)
    return round(memory, 1), files


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--http", type=int, default=50_000, help="requests over HTTP")
    parser.add_argument("--grpc", type=int, default=50_000, help="requests over gRPC")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    import psutil

    from quietmax.ledger import Ledger
    from serving import free_port, ready_after
    from soak import FEATURES, save_models, served

    with tempfile.TemporaryDirectory(prefix="quietmax-malformed-") as place:
        folder = Path(place)
        save_models(folder)
        ledger = f"sqlite:///{folder}/ledger.sqlite"
        with Ledger(ledger) as opened:
            key, _ = opened.create_key("malformed")
        target = Target(free_port(), free_port(), key, "free", "charged", FEATURES)
        options = {
            "--workers": arguments.workers,
            "--port": target.port,
            "--grpc-port": target.grpc_port,
            "--header-timeout": TIMEOUT,
            "--idle-timeout": TIMEOUT,
        }
        flags = [part for option in options.items() for part in option]
        outcome, samples = Outcome(), []
        with (folder / "log").open("wb") as log, served(folder, ledger, 1_000_000, *flags, log=log) as server:
            ready_after(target.port, server)
            supervisor = psutil.Process(server.pid)
            before, _ = spent_units(ledger)
            samples.append(quiet_sample(supervisor))
            begun = time.monotonic()
            for part in range(PARTS):
                http, grpc = (
                    range(count * part // PARTS, count * (part + 1) // PARTS)
                    for count in (arguments.http, arguments.grpc)
                )
                asyncio.run(send(target, http, grpc, arguments.seed, outcome))
                samples.append(quiet_sample(supervisor))
                print(
                    f"{outcome.http.total() + outcome.grpc.total():,} responses, {samples[-1]}",
                    file=sys.stderr,
                )
            seconds = time.monotonic() - begun
        after, sound = spent_units(ledger)
        failures = (folder / "log").read_bytes().count(b'"event":"failed"')
    # Compared with a fifth of the requests: by then every path of the service was taken.
    flat = all(end <= 1.1 * early for early, end in zip(samples[PARTS // 5], samples[-1], strict=True))
    if outcome.unsent["OK"]:
        outcome.wrong["grpc answered what it had refused"] += outcome.unsent["OK"]
    figures = {
        "http_requests": arguments.http,
        "grpc_requests": arguments.grpc,
        "seconds": round(seconds, 1),
        "workers": arguments.workers,
        "http_statuses": dict(sorted(outcome.http.items())),
        "grpc_codes": dict(sorted(outcome.grpc.items())),
        "grpc_calls_refused_before_their_message_was_sent": dict(sorted(outcome.unsent.items())),
        "good_requests": outcome.good,
        "wrong": dict(outcome.wrong.most_common(20)),
        "failures_in_the_log": failures,
        "spent_nothing": before == after,
        "journal_verifies": sound,
        "memory_mib_at_the_start_and_after_each_part": [each[0] for each in samples],
        "open_files_at_the_start_and_after_each_part": [each[1] for each in samples],
        "flat": flat,
    }
    print(json.dumps(figures, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures) + "\n")
    if outcome.wrong or failures or before != after or not sound or not flat:
        sys.exit(1)


if __name__ == "__main__":
    main()
