"""Send a day's worth of traffic to the service, and watch memory and open files of all its processes.

Run `python benchmarks/soak.py --json FILE`: two million requests, at about a thousand per second. 64 connections over
loopback send one row each, in JSON: to released weights (free answers), to a charged model without request ids, the
same query again (cached answers), and with ids, of which every tenth is sent twice. Some requests are malformed, and
every connection is closed and opened again after a thousand requests. At the end the journal must verify, the budget
must have paid for exactly the new answers, and memory and descriptors must be flat: in the last quarter of the
responses at most 3% above the third one. In the first half each worker fills its index of the answer cache, which holds
200,000 answers in at most 37 MiB and reaches that after 350,000 new ones (`quietmax.ledger.transactions`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from serving import cpu_seconds, free_port, ready_after

FEATURES, CLASSES, CONNECTIONS = 16, 3, 64
REQUESTS_PER_CONNECTION = 1000
SHARES = {"free": 0.45, "charged": 0.25, "cached": 0.1, "identified": 0.15, "malformed": 0.05}
MOST_GROWTH = 1.03
"""Of memory and open files, from the third quarter of the responses to the last."""
MOMENTS = 20
"""How many samples the figures state."""
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
    from quietmax.models.stacked import initial_mlp

    rng = np.random.default_rng(0)
    rows = rng.normal(size=(3000, FEATURES))
    labels = rows[:, :CLASSES].argmax(1)
    head = PrivateHead(1.0, 1e-5, features=Identity(), declared_size=3000, classes=range(CLASSES))
    save_private(head.fit(rows, labels), folder / "free", dataset="free")
    network = initial_mlp((FEATURES, 8, CLASSES), "tanh", (0,))
    save_model(Model(network, TrainingSettings((8,)), 1000, "charged", 0), folder / "charged")


@contextmanager
def served(
    folder: Path, ledger: str, queries: int, *options: object, log: Any = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `quietmax serve` on loopback with the models of `save_models`, one of which is charged per answer."""
    command = [sys.executable, "-m", "quietmax", "serve", f"free={folder}/free", f"charged={folder}/charged"]
    command += ["--accept-unproven", "--budget", "100", "--delta", "1e-5", "--queries", str(queries)]
    command += ["--ledger", ledger, "--no-request-log", *map(str, options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log or sys.stderr, env=environment)
    try:
        yield server
    finally:
        server.terminate()
        server.wait()


class Connection:
    """One connection of a client, with one request in flight."""

    def __init__(self, number: int, port: int, key: str, requests: int) -> None:
        self._number, self._port, self._key = number, port, key
        self._rng = random.Random(number)
        self._values = ",".join(f"{self._rng.uniform(-1, 1):.3f}" for _ in range(FEATURES - 2))
        self._left = requests
        self._kind, self._sent, self._again = "", b"", False
        self._received = b""
        self.counts: Counter[str] = Counter()
        self.new = self.wrong = 0
        self.socket = self._connected()

    def _connected(self) -> socket.socket:
        connected = socket.create_connection(("127.0.0.1", self._port))
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connected

    def send_next(self) -> bool:
        """Send the next request, on a new connection now and then; return False after the last one."""
        if self._again:
            self._again = False
        elif self._left == 0:
            self.socket.close()
            return False
        else:
            self._left -= 1
            if self._left % REQUESTS_PER_CONNECTION == 0:
                self.socket.close()
                self.socket = self._connected()
            self._sent = self._message()
        self.socket.sendall(self._sent)
        return True

    def _message(self) -> bytes:
        (self._kind,) = self._rng.choices(list(SHARES), list(SHARES.values()))
        self._again = self._kind == "identified" and self._left % 10 == 0
        query = -1 if self._kind == "cached" else self._left
        request_id = f'"id":"{self._number}-{self._left}",' if self._kind == "identified" else ""
        body = (
            f'{{{request_id}"inputs":[{{"name":"features","shape":[1,{FEATURES}],"datatype":"FP32",'
            f'"data":[{self._number},{query},{self._values}]}}]}}'
        ).encode()
        if self._kind == "malformed":
            body = self._rng.choice(MALFORMED)
        model = "free" if self._kind == "free" else "charged"
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\n"
        return (
            f"{head}Authorization: Bearer {self._key}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )

    def receive(self) -> bool:
        """Receive a part of the response; return whether it is complete, and count it then."""
        part = self.socket.recv(1 << 16)
        if not part:
            raise ConnectionError(f"the server closed a connection after {self._received!r}")
        self._received += part
        head, ended, content = self._received.partition(b"\r\n\r\n")
        if not ended or len(content) < int(_LENGTH.search(head)[1]):  # type: ignore[index]
            return False
        self._received = b""
        status = int(head[9:12])
        self.counts[f"{self._kind} {status}"] += 1
        self.wrong += not (400 <= status < 500 if self._kind == "malformed" else status == 200)
        new = _NEW_ANSWERS.search(content)
        if status == 200 and self._kind != "free" and new is not None:
            self.new += int(new[1])
        return True


_LENGTH = re.compile(rb"content-length: (\d+)")
_NEW_ANSWERS = re.compile(rb'"new_answers":(\d+)')


def client(port: int, key: str, requests: int, done: Any, results: Any) -> None:
    """Send requests over all connections, and count what came back."""
    connections = [
        Connection(number, port, key, requests // CONNECTIONS + (number < requests % CONNECTIONS))
        for number in range(CONNECTIONS)
    ]
    with selectors.DefaultSelector() as selector:
        for each in connections:
            if each.send_next():
                selector.register(each.socket, selectors.EVENT_READ, each)
        while selector.get_map():
            for ready, _ in selector.select(60):
                if not ready.data.receive():
                    continue
                done.value += 1
                before = ready.fileobj
                more = ready.data.send_next()
                if not more or ready.data.socket is not before:
                    selector.unregister(before)
                    if more:
                        selector.register(ready.data.socket, selectors.EVENT_READ, ready.data)
    counts = sum((each.counts for each in connections), Counter())
    results.put((counts, sum(each.new for each in connections), sum(each.wrong for each in connections)))


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
    from quietmax.accounting.costs import LIMIT
    from quietmax.ledger import Ledger

    with Ledger(ledger) as opened:
        sound = opened.verify().sound
        spent = opened.account("charged").spent_units
    return sound and spent == new * (LIMIT // queries)


def by_quarter(
    samples: list[tuple[float, int, float, int]],
) -> tuple[list[tuple[float, float]], bool | None]:
    """Return the median memory and open files of each quarter of the responses, and whether both are flat.

    None: there are too few samples to tell.
    """
    total = samples[-1][1]
    quarters = [
        [each for each in samples if part * total < 4 * each[1] <= (part + 1) * total] for part in range(4)
    ]
    if min(map(len, quarters)) < 2:
        return [], None
    medians = [
        (statistics.median(s[2] for s in part), statistics.median(s[3] for s in part)) for part in quarters
    ]
    return medians, all(last <= MOST_GROWTH * third for third, last in zip(*medians[2:], strict=True))


def _spread(samples: list[tuple[float, int, float, int]]) -> list[tuple[float, int, float, int]]:
    """Return samples at evenly spread moments, the first and the last included."""
    last = len(samples) - 1
    return [
        samples[place] for place in sorted({round(last * part / (MOMENTS - 1)) for part in range(MOMENTS)})
    ]


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
        with served(folder, ledger, queries, "--workers", arguments.workers, "--port", port) as server:
            ready_after(port, server)
            supervisor = psutil.Process(server.pid)
            done, results = context.Value("q", 0, lock=False), context.Queue()
            process = context.Process(
                target=client, args=(port, key, arguments.requests, done, results), daemon=True
            )
            begun = time.monotonic()
            process.start()
            samples: list[tuple[float, int, float, int]] = []
            while process.is_alive():
                process.join(5)
                memory, files = sample(supervisor)
                samples.append((round(time.monotonic() - begun, 1), done.value, round(memory, 1), files))
                print(f"{samples[-1][1]:,} responses, {memory:.0f} MiB, {files} open files", file=sys.stderr)
            seconds = time.monotonic() - begun
            counts, new, wrong = results.get(timeout=30)
            processor = cpu_seconds(supervisor)
        paid = verified(ledger, new, queries)
    middle, flat = by_quarter(samples)
    figures = {
        "requests": arguments.requests,
        "responses": counts.total(),
        "seconds": round(seconds, 1),
        "responses_per_second": round(counts.total() / seconds),
        "processor_seconds_of_the_service": round(processor, 1),
        "workers": arguments.workers,
        "connections": CONNECTIONS,
        "responses_by_kind_and_status": dict(sorted(counts.items())),
        "new_charged_answers": new,
        "unexpected_responses": wrong,
        "paid_exactly_and_journal_verifies": paid,
        "memory_mib_by_quarter": [each[0] for each in middle],
        "open_files_by_quarter": [each[1] for each in middle],
        "flat": flat,
        "samples_of_seconds_responses_mib_files": _spread(samples),
    }
    print(
        json.dumps(
            {name: value for name, value in figures.items() if not name.startswith("samples")}, indent=2
        )
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures) + "\n")
    if wrong or not paid or flat is False:
        sys.exit(1)


if __name__ == "__main__":
    main()
