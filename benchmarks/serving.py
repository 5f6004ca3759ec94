"""How fast is the service? Private answers per second beside the same server with privacy and ledger switched off.

Run with `python benchmarks/serving.py`. The load comes from separate processes over loopback: 16 connections, each with
one request under way; all queries differ, so that every answer is new, is charged durably and draws exact noise. The
private and the plain server run in turns (each alone), so that a busy machine slows both; medians over the turns are
given, and the median of the ratios within a turn. The plain server is this server with the same network and no ledger,
no noise and no keys; it exists only in this script.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

FEATURES, CLASSES, HIDDEN = 784, 10, 128
CONNECTIONS = 16


@dataclass(frozen=True)
class Load:
    """Rows per request, JSON or binary tensors, and for how long."""

    rows: int
    binary: bool
    seconds: float


def serve(private: bool, address: str, port: int) -> None:
    """The server process: a network of the paper's size behind Algorithm 1, or plain."""
    import torch
    import uvicorn

    from quietmax.ledger import Ledger, Terms
    from quietmax.mechanisms import Answers
    from quietmax.models import Model, TrainingSettings, save_model
    from quietmax.models.mlp import initial_mlp
    from quietmax.server import Offers, Service, Settings, bind, load_servables
    from quietmax.server.run import Listening, configuration

    torch.set_num_threads(1)
    model = Model(
        initial_mlp((FEATURES, HIDDEN, CLASSES), "tanh", (0,)), TrainingSettings(), 10_000, "bench", 0
    )
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder) / "bench")
        loaded = load_servables(
            [f"bench={folder}/bench"], budget=Terms(100.0), queries=50_000_000, accept_unproven=True
        )
    ledger = Ledger(address)
    offers = bind(ledger, loaded, budget=Terms(100.0))
    if not private:
        offer = next(iter(offers))

        def plain(rows: np.ndarray) -> Answers:
            probabilities = model.predict_proba(rows)
            return Answers(probabilities.argmax(-1), probabilities)

        offers = Offers([replace(offer, unit_cost=0, servable=replace(offer.servable, answer=plain))])
    service = Service(ledger, offers, Settings(anonymous=True, log_requests=False))
    uvicorn.Server(configuration(service, Listening(port=port))).run()


class Requests:
    """Requests of one connection, no two of which ask the same: the first two features of a row count and name it."""

    def __init__(self, load: Load, seed: int, port: int) -> None:
        self._load = load
        self._seed = seed
        self._asked = 0
        rows = np.random.default_rng(seed).random((load.rows, FEATURES), dtype=np.float32).round(4)
        rows[:, 1] = seed
        self._rows = rows
        tensor: dict[str, object] = {"name": "features", "shape": [load.rows, FEATURES], "datatype": "FP32"}
        more = "\r\n"
        if load.binary:
            tensor["parameters"] = {"binary_data_size": rows.nbytes}
            request = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
            self._before, self._after = json.dumps(request).encode(), b""
            more = f"Inference-Header-Content-Length: {len(self._before)}\r\n\r\n"
        else:
            tensor["data"] = [0]
            self._before, self._after = json.dumps({"inputs": [tensor]}).encode().split(b"0]}")
            self._after = b"]}" + self._after
            self._listed = [
                ",".join([str(seed), *(f"{value:.4f}" for value in row[2:])]).encode() for row in rows
            ]
        self._head = f"POST /v2/models/bench/infer HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        self._more = more

    def next(self) -> bytes:
        first = self._asked
        self._asked += self._load.rows
        if self._load.binary:
            self._rows[:, 0] = np.arange(first, self._asked)
            body = self._before + self._rows.tobytes()
        else:
            data = b",".join(b"%d,%s" % (first + index, row) for index, row in enumerate(self._listed))
            body = self._before + data + self._after
        return f"{self._head}Content-Length: {len(body)}\r\n{self._more}".encode() + body


def connection(load: Load, port: int, seed: int, start: Any, results: Any) -> None:
    """One connection: ask again and again; count what was not a new, paid answer."""
    requests = Requests(load, seed, port)
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    expected = (b'"new_answers":%d' % load.rows, b'"paid_at_training":true')
    times: list[float] = []
    wrong = b""
    start.wait()
    begun = time.perf_counter()
    while time.perf_counter() - begun < load.seconds:
        request = requests.next()
        asked = time.perf_counter()
        sock.sendall(request)
        answer = sock.recv(1 << 20)
        top, _, content = answer.partition(b"\r\n\r\n")
        length = int(top.split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(content) < length:
            content += sock.recv(1 << 20)
        times.append(time.perf_counter() - asked)
        if not top.startswith(b"HTTP/1.1 200") or not any(text in content for text in expected):
            wrong = content
    results.put((times, time.perf_counter() - begun, wrong))


def measure(private: bool, address: str, load: Load) -> dict[str, float]:
    """Requests per second and latency of one server under one load, after a second of warming up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--serve", "private" if private else "plain", address, str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "the server did not start"
                assert server.poll() is None, "the server ended"
                time.sleep(0.05)
        loaded(port, replace(load, seconds=1.0), first_seed=1000)
        return loaded(port, load, first_seed=1)
    finally:
        server.terminate()
        server.wait()


def loaded(port: int, load: Load, first_seed: int) -> dict[str, float]:
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(CONNECTIONS), context.Queue()
    workers = [
        context.Process(target=connection, args=(load, port, first_seed + index, start, results))
        for index in range(CONNECTIONS)
    ]
    for worker in workers:
        worker.start()
    told = [results.get(timeout=load.seconds + 60) for _ in workers]
    for worker in workers:
        worker.join()
    wrong = [answer for _, _, answer in told if answer]
    assert not wrong, f"an answer was not new and paid: {wrong[0][:300]!r}"
    times = sorted(moment for each, _, _ in told for moment in each)
    requests = sum(len(each) / elapsed for each, elapsed, _ in told)
    return {
        "requests_per_second": requests,
        "rows_per_second": requests * load.rows,
        "median_ms": 1000 * times[len(times) // 2],
        "p99_ms": 1000 * times[int(len(times) * 0.99)],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", nargs=3)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--ledger", default="")
    arguments = parser.parse_args()
    if arguments.serve:
        kind, address, port = arguments.serve
        serve(kind == "private", address, int(port))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    print(
        f"{'load':<34}{'private/s':>12}{'plain/s':>12}{'ratio':>8}{'median ms':>11}{'p99 ms':>9}{'rows/s':>10}"
    )
    for name, load in {
        "1 row, JSON": Load(1, False, arguments.seconds),
        "1 row, binary": Load(1, True, arguments.seconds),
        "100 rows, JSON": Load(100, False, arguments.seconds),
        "100 rows, binary": Load(100, True, arguments.seconds),
    }.items():
        turns = []
        for _ in range(arguments.turns):
            with tempfile.TemporaryDirectory(prefix="quietmax-bench-") as folder:
                address = arguments.ledger or f"sqlite:///{folder}/ledger.sqlite"
                private = measure(True, address, load)
                plain = measure(False, f"sqlite:///{folder}/plain.sqlite", load)
            turns.append((private, plain))
        middle = {key: statistics.median(private[key] for private, _ in turns) for key in turns[0][0]}
        others = statistics.median(plain["requests_per_second"] for _, plain in turns)
        ratio = statistics.median(
            private["requests_per_second"] / plain["requests_per_second"] for private, plain in turns
        )
        print(
            f"{name:<34}{middle['requests_per_second']:>12.0f}{others:>12.0f}{ratio:>8.2f}{middle['median_ms']:>11.1f}"
            f"{middle['p99_ms']:>9.1f}{middle['rows_per_second']:>10.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
