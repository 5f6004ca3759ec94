"""Send a day's worth of traffic to the service, and watch memory and open files of all its processes.

Run `python benchmarks/soak.py`: two million requests, at a few thousand per second. Sixteen connections over loopback
send one row each, in JSON: to released weights (free answers), to a charged model without request ids, and to the same
with ids, of which every tenth is sent twice. Some requests are malformed, and every connection is closed and opened
again after a thousand requests. At the end the journal must verify, the budget must have paid for exactly the new
answers, and memory and descriptors must be flat: the last quarter of the run at most a tenth above the second one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from serving import free_port, ready_after

FEATURES, CLASSES, CONNECTIONS = 16, 3, 16
REQUESTS_PER_CONNECTION = 1000
SHARES = {"free": 0.5, "charged": 0.3, "identified": 0.15, "malformed": 0.05}
MALFORMED = [
    b"{",
    b"[]",
    b'{"inputs": []}',
    b'{"inputs": [{"name": "features", "shape": [1, 16], "datatype": "FP32", "data": [1]}]}',
    b'{"inputs": [{"name": "features", "shape": [1, 16], "datatype": "FP32", "data": ["x"]}]}',
    b"\xff" * 200,
]


def save_models(folder: Path) -> None:
    """Save a head with released weights and an ordinary network, which is charged per answer."""
    from quietmax import PrivateHead
    from quietmax.estimators import save_private
    from quietmax.models import Model, TrainingSettings, save_model
    from quietmax.models.features import Identity
    from quietmax.models.mlp import initial_mlp

    rng = np.random.default_rng(0)
    rows = rng.normal(size=(3000, FEATURES))
    labels = rows[:, :CLASSES].argmax(1)
    head = PrivateHead(1.0, 1e-5, features=Identity(), declared_size=3000, classes=range(CLASSES))
    save_private(head.fit(rows, labels), folder / "free", dataset="free")
    network = initial_mlp((FEATURES, 8, CLASSES), "tanh", (0,))
    save_model(Model(network, TrainingSettings((8,)), 1000, "charged", 0), folder / "charged")


def message(model: str, body: bytes, port: int, key: str) -> bytes:
    head = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {key}\r\n"
    )
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def answer(sock: socket.socket) -> tuple[int, bytes]:
    """Read one response."""
    received = sock.recv(1 << 16)
    while b"\r\n\r\n" not in received:
        more = sock.recv(1 << 16)
        if not more:
            raise ConnectionError("the server closed the connection")
        received += more
    top, _, content = received.partition(b"\r\n\r\n")
    length = int(top.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(content) < length:
        content += sock.recv(1 << 16)
    return int(top.split(b" ", 2)[1]), content


def client(port: int, key: str, seed: int, requests: int, done: Any, results: Any) -> None:
    """Send requests, one after the other, and count what came back."""
    rng = random.Random(seed)
    kinds, weights = list(SHARES), list(SHARES.values())
    values = ",".join(f"{rng.uniform(-1, 1):.3f}" for _ in range(FEATURES - 2))
    new = wrong = 0
    sock: socket.socket | None = None
    for number in range(requests):
        if number % REQUESTS_PER_CONNECTION == 0:
            if sock is not None:
                sock.close()
            sock = socket.create_connection(("127.0.0.1", port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        assert sock is not None
        kind = rng.choices(kinds, weights)[0]
        data = f"{seed},{number},{values}"
        request_id = f'"id":"{seed}-{number}",' if kind == "identified" else ""
        body = (
            f'{{{request_id}"inputs":[{{"name":"features","shape":[1,{FEATURES}],"datatype":"FP32","data":[{data}]}}]}}'
        ).encode()
        if kind == "malformed":
            body = rng.choice(MALFORMED)
        sent = message("free" if kind == "free" else "charged", body, port, key)
        for _ in range(2 if kind == "identified" and number % 10 == 0 else 1):
            sock.sendall(sent)
            status, content = answer(sock)
            expected = 400 <= status < 500 if kind == "malformed" else status == 200
            wrong += not expected
            if status == 200 and kind in ("charged", "identified"):
                new += json.loads(content)["parameters"]["new_answers"]
        done[seed] = number + 1
    results.put((new, wrong))


def sample(supervisor: psutil.Process) -> tuple[float, int]:
    """Return the memory (private pages, MiB) and the open files of all processes of the service."""
    memory, files = 0.0, 0
    for process in [supervisor, *supervisor.children(recursive=True)]:
        with suppress(psutil.Error):
            memory += process.memory_full_info().uss / 2**20
            files += process.num_fds()
    return memory, files


def verified(ledger: str, new: int, queries: int) -> bool:
    """Tell whether the journal verifies and the new answers are exactly those that were paid for."""
    from quietmax.accounting import LIMIT
    from quietmax.ledger import Ledger

    with Ledger(ledger) as opened:
        sound = opened.verify().sound
        spent = opened.account("charged").spent_units
    return sound and spent == new * (LIMIT // queries)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=2_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ledger", default="", help="ledger to use instead of a fresh SQLite file")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    queries = 50_000_000
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="quietmax-soak-") as place:
        folder = Path(place)
        save_models(folder)
        ledger = arguments.ledger or f"sqlite:///{folder}/ledger.sqlite"
        from quietmax.ledger import Ledger

        with Ledger(ledger) as opened:
            key, _ = opened.create_key("soak")
        port = free_port()
        command = [
            sys.executable,
            "-m",
            "quietmax",
            "serve",
            f"free={folder}/free",
            f"charged={folder}/charged",
        ]
        options = [
            "--accept-unproven",
            "--budget",
            "100",
            "--delta",
            "1e-5",
            "--queries",
            str(queries),
            "--ledger",
            ledger,
        ]
        options += ["--workers", str(arguments.workers), "--port", str(port), "--no-request-log"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen(
            [*command, *options], stdout=subprocess.DEVNULL, stderr=sys.stderr, env=environment
        )
        try:
            ready_after(port, server)
            supervisor = psutil.Process(server.pid)
            done, results = context.Array("q", CONNECTIONS, lock=False), context.Queue()
            each = arguments.requests // CONNECTIONS
            clients = [
                context.Process(target=client, args=(port, key, seed, each, done, results), daemon=True)
                for seed in range(CONNECTIONS)
            ]
            begun = time.monotonic()
            for process in clients:
                process.start()
            samples: list[tuple[float, int, float, int]] = []
            while any(process.is_alive() for process in clients):
                time.sleep(5)
                memory, files = sample(supervisor)
                samples.append((round(time.monotonic() - begun, 1), sum(done), round(memory, 1), files))
                print(f"{samples[-1][1]:,} requests, {memory:.0f} MiB, {files} open files", file=sys.stderr)
            seconds = time.monotonic() - begun
            told = [results.get(timeout=30) for _ in clients]
        finally:
            server.terminate()
            server.wait()
        new, wrong = sum(each[0] for each in told), sum(each[1] for each in told)
        paid = verified(ledger, new, queries)
    quarters = [samples[len(samples) * part // 4 : len(samples) * (part + 1) // 4] for part in range(4)]
    flat = None  # too few samples to tell
    middle: list[tuple[float, float]] = []
    if len(samples) >= 8:
        middle = [
            (statistics.median(s[2] for s in part), statistics.median(s[3] for s in part))
            for part in quarters
        ]
        flat = all(last <= 1.1 * second for last, second in zip(middle[3], middle[1], strict=True))
    figures = {
        "requests": sum(done),
        "seconds": round(seconds, 1),
        "requests_per_second": round(sum(done) / seconds),
        "workers": arguments.workers,
        "new_charged_answers": new,
        "unexpected_responses": wrong,
        "paid_exactly_and_journal_verifies": paid,
        "memory_mib_by_quarter": [each[0] for each in middle],
        "open_files_by_quarter": [each[1] for each in middle],
        "flat": flat,
        "samples": samples[:: max(1, len(samples) // 100)],
    }
    print(json.dumps({name: value for name, value in figures.items() if name != "samples"}, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures) + "\n")
    if wrong or not paid or flat is False:
        sys.exit(1)


if __name__ == "__main__":
    main()
