"""Attack the service in every way an operator fears, and measure an honest client meanwhile.

Run `python benchmarks/hostile.py --json FILE`: four minutes, on loopback only; every attack is bounded in count and
time. An honest client, in a process of its own, asks for one row every 20 ms, each tenth time on a new connection.
First it is measured alone, then beside each attack: slow headers, slow bodies, idle sockets, floods of headers and
long URLs, malformed JSON of up to 15 MB, ambiguous requests that try to smuggle a second one, odd paths, and streams
of gRPC with junk.

It fails if a request of the honest client fails, if a smuggled request is answered, if an odd path is found, or if a
response is an error of the service (5xx) other than 503 with `retry-after` for bodies that memory has no room for.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import math
import multiprocessing
import os
import random
import re
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from malformed import Target, encoded, spent_units, statuses
from serving import free_port, ready_after
from soak import FEATURES, sample, save_models, served

Counts = Counter[str]
REST_SECONDS = 10
HOLD_SECONDS = 8
MOST_REPEATS = 40
"""A short attack is repeated for half of `HOLD_SECONDS`, so that the honest client sends enough requests beside it."""
INTERVAL = 0.02
QUICK = {"slow headers": 90, "slow bodies": 40, "idle sockets": 500, "junk gRPC streams": 3200}
"""Fewer of what is many, for a short run."""
GET = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n"
HIDDEN = b"GET /v2/models HTTP/1.1\r\nHost: x\r\n\r\n"


async def connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, limit=2**22)


async def answers(target: Target, request: bytes, seconds: float = 20) -> list[int]:
    """Send a request on a connection of its own; return the statuses that come until it ends, or nothing more comes."""
    received = b""
    with suppress(ConnectionError, TimeoutError):
        reader, writer = await connected(target.port)
        with suppress(ConnectionError, TimeoutError):
            writer.write(request)
            await asyncio.wait_for(writer.drain(), seconds)
        with suppress(ConnectionError, TimeoutError):
            while part := await asyncio.wait_for(reader.read(2**16), 0.5 if received else seconds):
                received += part
        writer.close()
    return list(statuses(received))


async def trickle(target: Target, count: int, start: bytes) -> Counts:
    """Open many connections that send a start, and then a byte each second."""
    counts: Counts = Counter()

    async def one() -> None:
        received = b""
        with suppress(OSError):
            reader, writer = await connected(target.port)
            with suppress(OSError):
                writer.write(start)
                for _ in range(HOLD_SECONDS):
                    await asyncio.sleep(1)
                    writer.write(b"x")
                    await writer.drain()
            with suppress(OSError, TimeoutError):
                received = await asyncio.wait_for(reader.read(2**16), 0.1)
            writer.close()
        counts[str(next(statuses(received), "no answer"))] += 1

    await asyncio.gather(*(one() for _ in range(count)))
    return counts


async def slow_headers(target: Target, count: int) -> Counts:
    return await trickle(target, count, GET + b"X-Slow: ")


async def slow_bodies(target: Target, count: int) -> Counts:
    return await trickle(target, count, infer(target, b"{", length=1000))


async def idle_sockets(target: Target, count: int) -> Counts:
    """Open connections that send nothing, and count those that the service keeps."""
    opened = []
    for start in range(0, count, 250):
        some = await asyncio.gather(
            *(connected(target.port) for _ in range(min(250, count - start))), return_exceptions=True
        )
        opened += [each for each in some if isinstance(each, tuple)]
    await asyncio.sleep(HOLD_SECONDS / 2)
    kept = sum(not reader.at_eof() and reader.exception() is None for reader, _ in opened)
    for _, writer in opened:
        writer.close()
    return Counter({"opened": len(opened), "kept until the end": kept})


async def one_by_one(target: Target, requests: Iterator[bytes], at_a_time: int) -> Counts:
    """Send requests, a few at a time, and count the statuses that come."""
    counts: Counts = Counter()

    async def some() -> None:
        for request in requests:
            found = await answers(target, request)
            counts[" and ".join(map(str, found)) or "no answer"] += 1

    await asyncio.gather(*(some() for _ in range(at_a_time)))
    return counts


async def floods(target: Target, count: int) -> Counts:
    """Send huge headers, very many headers, and long URLs."""
    kinds = [
        GET + b"X: " + b"x" * 2**20 + b"\r\n\r\n",
        GET + b"a: b\r\n" * 100_000 + b"\r\n",
        b"GET /" + b"x" * 2**20 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /?" + b"x=y&" * 2**18 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ]
    return await one_by_one(target, (kinds[number % 4] for number in range(count)), 16)


def infer(target: Target, body: bytes, length: int | None = None) -> bytes:
    """Return a request with a key to the charged model."""
    size = len(body) if length is None else length
    return (
        f"POST /v2/models/{target.charged}/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {target.key}\r\n"
        f"Content-Length: {size}\r\n\r\n".encode()
        + body
    )


def bodies() -> list[bytes]:
    """Return 30 bodies that are no valid request, of up to 15 MB."""
    sizes = (10_000, 1_000_000, 15_000_000)
    makers: list[Callable[[int], bytes]] = [
        lambda size: b"[" * size,
        lambda size: b'{"a":' * (size // 5),
        lambda size: b'{"inputs": [' + b"1," * (size // 2) + b"1]}",
        lambda size: b'{"id": "' + b"x" * size + b'"}',
        lambda size: b'{"inputs": ' + b"9" * size + b"}",
        lambda size: b"\xff" * size,
        lambda size: b" " * size,
        lambda size: (
            b'{"inputs": [{"name": "features", "shape": [1, 16], "datatype": "FP32", "data": ['
            + b"1e999," * (size // 6)
            + b"1]}]}"
        ),
        lambda size: b'{"' + b'a": 1, "' * (size // 8) + b'": 1}',
        lambda size: b'{"inputs": "' + b"\\ud800" * (size // 6) + b'"}',
    ]
    return [make(size) for size in sizes for make in makers]


async def malformed_json(target: Target, count: int) -> Counts:
    return await one_by_one(target, (infer(target, body) for body in bodies()[:count]), 3)


def smuggling() -> list[bytes]:
    """Return 36 requests that two readers could end at different places; each hides another request."""
    length, chunked = b"Content-Length: %d\r\n" % len(HIDDEN), b"Transfer-Encoding: chunked\r\n"
    headers = [
        length + chunked,
        chunked + length,
        b"Content-Length: 0\r\n" + length,
        length + b"Content-Length: 0\r\n",
        b"Content-Length: 0, %d\r\n" % len(HIDDEN),
        b"Content-Length: +0\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: 0x0\r\n",
        b"Content-Length: 0 0\r\n",
        b"Content-Length:\r\n",
        b"Content-Length: 00000000000000000000000000\n1\r\n",
        b"Content-Length : 0\r\n",
        b"Content-Length\t: 0\r\n",
        b" Content-Length: 0\r\n",
        b"A: b\r\n Content-Length: 0\r\n",
        b"Content-Length: 18446744073709551616\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: \x0bchunked\r\n",
        b"Transfer-Encoding: chunked\x00\r\n",
        b'Transfer-Encoding: "chunked"\r\n',
        b"Transfer-Encoding:\n chunked\r\n",
        b"Transfer-Encoding\r\n: chunked\r\n",
        chunked + chunked,
        chunked + b"Transfer-Encoding: identity\r\n",
        b"A: b\n" + chunked,
        b"A: b\r" + chunked,
        b"A: b\0" + chunked,
    ]
    framed = [
        chunked + b"\r\n0\n\n",
        chunked + b"\r\n0\r\nContent-Length: 5\r\n\r\n",
        chunked + b"\r\n0;\n\r\n",
        chunked + b"\r\n0x0\r\n\r\n",
        chunked + b"\r\n-0\r\n\r\n",
        chunked + b"\r\n10000000000000000\r\n\r\n",
    ]
    start = b"POST /v2/health/live HTTP/1.1\r\nHost: x\r\n"
    return [start + each + b"\r\n0\r\n\r\n" + HIDDEN for each in headers] + [
        start + each + HIDDEN for each in framed
    ]


async def request_smuggling(target: Target, count: int) -> Counts:
    return await one_by_one(target, iter(smuggling()[:count]), 4)


def paths() -> list[str]:
    """Return 32 paths that lead nowhere."""
    return [
        "//", "/../../etc/passwd", "/..%2f..%2fetc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/.env", "/.git/config",
        "/v2/", "/v2//models", "/v2/models/", "/v2/models/..", "/v2/models/../..", "/v2/models/free/../charged",
        "/v2/models/%00", "/v2/models/free%00", "/v2/models/%ff", "/v2/models/free/infer/", "/v2/models/free/x",
        "/v2/models/free/versions", "/v2/models/free/versions/", "/v2/models/free/versions/../1/infer",
        "/v2/models/" + "x" * 4000, "/V2/models", "/v2/models;a=b", "/metrics/", "/metrics/../v2", "/admin",
        "/contents/..", "/static/../../x", "/%0d%0aX-Injected:%201", "/index.php", "/wp-login.php", "/$%7bjndi:ldap://x/a%7d",
    ]  # fmt: skip


async def odd_paths(target: Target, count: int) -> Counts:
    requests = (
        f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {target.key}\r\nConnection: close\r\n\r\n".encode()
        for path in paths()[:count]
    )
    return await one_by_one(target, requests, 4)


async def junk_streams(target: Target, count: int) -> Counts:
    """Open streams of gRPC on 32 connections that hold junk, and reset every second one at once."""
    counts: Counts = Counter()

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload

    async def read_all(reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while part := await reader.read(2**16):
                counts["bytes of answers"] += len(part)

    async def one(number: int) -> None:
        rng = random.Random(number)
        with suppress(OSError):
            reader, writer = await connected(target.grpc_port)
            drained = asyncio.create_task(read_all(reader))
            with suppress(OSError, TimeoutError):
                writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
                for stream in range(1, 2 * (count // 32), 2):
                    path = b"/" + rng.randbytes(8).hex().encode()
                    headers = b"\x83\x86\x44" + bytes([len(path)]) + path + b"\x41\x01x"
                    writer.write(frame(1, 4, stream, headers) + frame(0, 0, stream, rng.randbytes(20)))
                    if stream % 4 == 1:
                        writer.write(frame(3, 0, stream, b"\0\0\0\x08"))
                    counts["streams"] += 1
                    if stream % 64 == 1:
                        await asyncio.wait_for(writer.drain(), 20)
            await asyncio.sleep(1)
            counts["connections that the service ended"] += drained.done()
            drained.cancel()
            writer.close()

    await asyncio.gather(*(one(number) for number in range(32)))
    return counts


ATTACKS: dict[str, tuple[Callable[[Target, int], Awaitable[Counts]], int]] = {
    "slow headers": (slow_headers, 900),
    "slow bodies": (slow_bodies, 400),
    "idle sockets": (idle_sockets, 5000),
    "header and URL floods": (floods, 400),
    "malformed JSON": (malformed_json, 30),
    "request smuggling": (request_smuggling, 36),
    "odd paths": (odd_paths, 32),
    "junk gRPC streams": (junk_streams, 32_000),
}


def honest(target: Target, stop: Any, results: Any) -> None:
    """Ask for one row again and again; put when each request began, how long it took, and why it failed."""
    rng, seen, connection = random.Random(0), [], None
    while not stop.is_set():
        data = [round(rng.uniform(-2, 2), 3) for _ in range(FEATURES)]
        tensor = {"name": "features", "shape": [1, FEATURES], "datatype": "FP32", "data": data}
        begun, failure = time.monotonic(), None
        try:
            if connection is None or len(seen) % 10 == 0:
                connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=30)
            headers = {"authorization": f"Bearer {target.key}"}
            connection.request(
                "POST", f"/v2/models/{target.free}/infer", encoded({"inputs": [tensor]}), headers
            )
            response = connection.getresponse()
            response.read()
            failure = None if response.status == 200 else str(response.status)
        except (OSError, http.client.HTTPException) as error:
            failure, connection = type(error).__name__, None
        seen.append((begun, time.monotonic() - begun, failure))
        time.sleep(max(INTERVAL - seen[-1][1], 0))
    results.put(seen)


def percentile(values: list[float], share: float) -> float:
    """Return a percentile in milliseconds."""
    return round(1000 * sorted(values)[max(math.ceil(share * len(values)) - 1, 0)], 1)


def of_honest(seen: list[tuple[float, float, str | None]], begun: float, ended: float) -> dict[str, Any]:
    during = [each for each in seen if begun <= each[0] < ended]
    seconds = [each[1] for each in during]
    return {
        "requests": len(during),
        "failed": dict(Counter(each[2] for each in during if each[2])),
        "p50_ms": percentile(seconds, 0.5),
        "p99_ms": percentile(seconds, 0.99),
        "most_ms": percentile(seconds, 1),
    }


def unexpected(name: str, counts: Counts) -> list[str]:
    """Return the outcomes of an attack that must not happen."""
    fine = {"request smuggling": r"400|no answer", "odd paths": r"4\d\d", "malformed JSON": r"4\d\d|503"}
    pattern = fine.get(name, r"(?!5\d\d).*")
    return [outcome for outcome in counts if re.fullmatch(pattern, outcome) is None]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a tenth of the connections and streams")
    parser.add_argument("--only", choices=ATTACKS, help="this attack alone")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    from quietmax.ledger import Ledger

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="quietmax-hostile-") as place:
        folder = Path(place)
        save_models(folder)
        ledger = f"sqlite:///{folder}/ledger.sqlite"
        with Ledger(ledger) as opened:
            key, _ = opened.create_key("hostile")
        target = Target(free_port(), free_port(), key, "free", "charged", FEATURES)
        flags = ["--workers", arguments.workers, "--port", target.port, "--grpc-port", target.grpc_port]
        attacks: dict[str, Any] = {}
        with (folder / "log").open("wb") as log, served(folder, ledger, 1_000_000, *flags, log=log) as server:
            ready_after(target.port, server)
            supervisor = psutil.Process(server.pid)
            before, memory = spent_units(ledger), [sample(supervisor)[0]]
            stop, results = context.Event(), context.Queue()
            client = context.Process(target=honest, args=(target, stop, results), daemon=True)
            client.start()
            time.sleep(3)
            spans = {"at rest": (time.monotonic(), time.monotonic() + REST_SECONDS)}
            time.sleep(REST_SECONDS)
            for name in [arguments.only] if arguments.only else ATTACKS:
                attack, count = ATTACKS[name]
                begun = time.monotonic()
                times = QUICK.get(name, count) if arguments.quick else count
                counts: Counts = Counter()
                repeats = 0
                while repeats < MOST_REPEATS and (not repeats or time.monotonic() - begun < HOLD_SECONDS / 2):
                    repeats += 1
                    counts += asyncio.run(attack(target, times))  # type: ignore[arg-type]
                spans[name] = (begun, time.monotonic())
                outcomes = dict(sorted(counts.items()))
                attacks[name] = {"count": times, "repeats": repeats, "outcomes": outcomes}
                memory.append(sample(supervisor)[0])
                print(name, attacks[name], round(memory[-1]), file=sys.stderr)
                time.sleep(3)
            stop.set()
            seen = results.get(timeout=60)
            client.join()
        after = spent_units(ledger)
        failures = (folder / "log").read_bytes().count(b'"event":"failed"')
    beside = {name: of_honest(seen, *span) for name, span in spans.items()}
    wrong = {name: bad for name in attacks if (bad := unexpected(name, Counter(attacks[name]["outcomes"])))}
    failed = sum(each[2] is not None for each in seen)
    figures = {
        "load_average": round(os.getloadavg()[0], 1),
        "workers": arguments.workers,
        "honest_requests": len(seen),
        "honest_failed": failed,
        "honest_client": beside,
        "attacks": attacks,
        "unexpected": wrong,
        "failures_in_the_log": failures,
        "spent_nothing": before[0] == after[0] and after[1],
        "memory_mib_at_the_start_and_after_each_attack": [round(each, 1) for each in memory],
    }
    print(json.dumps(figures, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures) + "\n")
    if failed or wrong or failures or not figures["spent_nothing"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
