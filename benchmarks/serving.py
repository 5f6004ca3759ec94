"""Measure the service: private answers per second, beside MLServer and the same server without privacy.

Run `python benchmarks/serving.py`: about twelve minutes, a Markdown table on standard output. The load comes from one
process over loopback: 16 connections, each with one request in flight. It changes a few digits of a prepared request,
so that the servers get most of the processor. All queries differ, so each answer is new, is charged durably and draws
exact noise; each answer says so, and the budget afterwards, too. All servers run, but only one at a time is loaded, in
turns, so that a busy machine slows down all of them. The table shows medians over the turns, and the median of the
ratios within a turn.

- private: `quietmax serve`, a network of the paper's size behind Algorithm 1 (10 classes), with a SQLite ledger, in one
  process and with two workers;
- plain: the same server and network without noise, ledger and keys, in one process and with two workers; it exists only
  in this script;
- MLServer: the same network in numpy, in an environment of its own: in the process that answers (its fastest way here),
  and in a worker process (its default);
- by columns: a table of 14 columns (6 numbers, 8 categories), one named tensor for each. Ours is a released table head,
  whose answers are free; MLServer reads the same requests with its pandas codec and answers with a pipeline of
  scikit-learn (imputed and scaled numbers, one-hot categories, logistic regression).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from peers import peer_python
from ratios import report

FEATURES, CLASSES, HIDDEN = 784, 10, 128
DIGITS = 6
FLOAT = struct.Struct("<f")
CONTENT_LENGTH = re.compile(rb"content-length: (\d+)")
CONNECTIONS = 16
RUNTIME = """
import numpy as np
from mlserver import MLModel
from mlserver.types import InferenceResponse, ResponseOutput


class Plain(MLModel):
    async def load(self):
        weights = np.load(self.settings.parameters.uri)
        self.layers = [weights[name] for name in ("weights0", "biases0", "weights1", "biases1")]
        return True

    async def predict(self, payload):
        tensor = payload.inputs[0]
        rows = np.asarray(tensor.data.root, dtype=np.float32).reshape(tensor.shape)
        weights0, biases0, weights1, biases1 = self.layers
        scores = np.tanh(rows @ weights0 + biases0) @ weights1 + biases1
        probabilities = np.exp(scores - scores.max(1, keepdims=True))
        probabilities /= probabilities.sum(1, keepdims=True)
        return InferenceResponse(
            model_name=self.name,
            outputs=[
                ResponseOutput(
                    name="label", shape=[len(rows)], datatype="INT64", data=probabilities.argmax(1).tolist()
                ),
                ResponseOutput(
                    name="probabilities",
                    shape=list(probabilities.shape),
                    datatype="FP32",
                    data=probabilities.ravel().tolist(),
                ),
            ],
        )
"""


CATEGORIES = {
    f"category{size}": [f"value {each}" for each in range(size)] for size in (2, 5, 6, 7, 9, 15, 16, 42)
}
NUMBERS = [f"number{each}" for each in range(6)]
COLUMNS_RUNTIME = f"""
import numpy as np
import pandas as pd
from mlserver import MLModel
from mlserver.codecs import PandasCodec
from mlserver.types import InferenceResponse, ResponseOutput
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

CATEGORIES, NUMBERS = {CATEGORIES}, {NUMBERS}


class Plain(MLModel):
    async def load(self):
        rng = np.random.default_rng(0)
        table = {{name: rng.random(2000) for name in NUMBERS}}
        table |= {{name: rng.choice(values, 2000) for name, values in CATEGORIES.items()}}
        numbers = make_pipeline(SimpleImputer(), StandardScaler())
        categories = OneHotEncoder(handle_unknown="ignore")
        columns = make_column_transformer((numbers, NUMBERS), (categories, list(CATEGORIES)))
        labels = rng.choice(["no", "yes"], 2000)
        self.pipeline = make_pipeline(columns, LogisticRegression()).fit(pd.DataFrame(table), labels)
        return True

    async def predict(self, payload):
        probabilities = self.pipeline.predict_proba(PandasCodec.decode_request(payload))
        labels = self.pipeline.classes_[probabilities.argmax(1)].tolist()
        return InferenceResponse(
            model_name=self.name,
            outputs=[
                ResponseOutput(name="label", shape=[len(labels)], datatype="BYTES", data=labels),
                ResponseOutput(
                    name="probabilities",
                    shape=list(probabilities.shape),
                    datatype="FP32",
                    data=probabilities.ravel().tolist(),
                ),
            ],
        )
"""


@dataclass(frozen=True)
class Server:
    """A server that runs: `charges` for its answers, if it is one of `ours`."""

    port: int
    process: psutil.Process
    ours: bool = False
    charges: bool = False


@dataclass(frozen=True)
class Load:
    """What to send: rows per request, as JSON or binary tensors, for so many seconds; or named columns, as JSON."""

    rows: int
    binary: bool
    seconds: float
    columns: bool = False


def serve(kind: str, address: str, port: int, workers: int) -> None:
    """Run a server: a network of the paper's size behind Algorithm 1, or without privacy."""
    import torch

    from quietmax.ledger import Ledger, Terms
    from quietmax.mechanisms import Answers
    from quietmax.server import Service, Settings
    from quietmax.server.deployment import deploy, load_models
    from quietmax.server.run import run, supervise
    from quietmax.server.settings import Listener
    from quietmax.server.telemetry import Log, Metrics

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = save_network(Path(folder) / "bench")
        loaded = load_models(
            [f"bench={folder}/bench"], budget=Terms(100.0), queries=50_000_000, accept_unproven=True
        )

    def plain(rows: np.ndarray) -> Answers:
        probabilities = model.predict_proba(rows)
        return Answers(probabilities.argmax(-1), probabilities)

    def create_service(metrics: Metrics | None = None) -> Service:
        ledger = Ledger(address)
        deployments = deploy(ledger, loaded, budget=Terms(100.0))
        if kind == "plain":
            deployments = [replace(deployments[0], unit_cost=0, answer=plain)]
        return Service(ledger, deployments, Settings(anonymous=True, request_log=False), metrics=metrics)

    listener = Listener(port=port)
    with listener.open_socket() as opened:
        if workers == 1:
            run(create_service(), listener, opened)
        else:
            supervise(create_service, listener, opened, Log(), workers)


def save_network(folder: Path) -> Any:
    """Save the network to a folder and return it."""
    from quietmax.models import Model, TrainingSettings, save_model
    from quietmax.models.stacked import initial_mlp

    model = Model(
        initial_mlp((FEATURES, HIDDEN, CLASSES), "tanh", (0,)), TrainingSettings(), 10_000, "bench", 0
    )
    save_model(model, folder)
    return model


def save_table_head(folder: Path) -> None:
    """Save a head on a table with released weights to a folder."""
    import pandas as pd

    from quietmax import PrivateHead, Schema
    from quietmax.estimators import save_private

    rng = np.random.default_rng(0)
    columns = {name: rng.random(5000) for name in NUMBERS}
    columns |= {name: rng.choice(values, 5000) for name, values in CATEGORIES.items()}
    table = pd.DataFrame({**columns, "label": rng.choice(["no", "yes"], 5000)})
    bounds = dict.fromkeys(NUMBERS, (0.0, 1.0))
    schema = Schema(label="label", classes=("no", "yes"), bounds=bounds, categories=CATEGORIES)
    save_private(
        PrivateHead(1.0, 1e-5, declared_size=5000, schema=schema).fit(table), folder, dataset="bench"
    )


def save_head(folder: Path) -> None:
    """Save a head with released weights to a folder."""
    from quietmax import PrivateHead
    from quietmax.estimators import save_private

    rng = np.random.default_rng(0)
    rows, labels = rng.random((1000, FEATURES), dtype=np.float32), rng.integers(0, CLASSES, 1000)
    head = PrivateHead(1.0, 1e-5, declared_size=1000, classes=range(CLASSES)).fit(rows, labels)
    save_private(head, folder, dataset="bench")


class Connection:
    """A connection that has one request in flight at any time.

    The request is built once. Each time before it is sent, every row of it gets another first feature, a number of as
    many digits; the second feature is the seed of the connection. So no two rows are equal.
    """

    def __init__(self, load: Load, port: int, seed: int, expected: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.times: list[float] = []
        self._expected = expected
        self._binary = load.binary
        self._request, self._places = request_of(load, port, seed)
        self._asked = 0
        self._unsent = memoryview(self._request)[:0]
        self._sent_at = 0.0
        self._answer = b""

    def ask(self) -> bool:
        """Send the next request, as far as the socket takes it; return whether all of it is sent."""
        for place in self._places:
            if self._binary:
                FLOAT.pack_into(self._request, place, self._asked)
            else:
                self._request[place : place + DIGITS] = b"%0*d" % (DIGITS, self._asked)
            self._asked += 1
        self._unsent = memoryview(self._request)
        self._sent_at = time.perf_counter()
        return self.send()

    def send(self) -> bool:
        """Send the rest of the request; return whether all of it is sent."""
        with suppress(BlockingIOError):
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
        return not self._unsent

    def is_answered(self) -> bool:
        """Read what has arrived; return whether it is a whole answer. It must be what was asked for."""
        self._answer += self.socket.recv(1 << 20)
        top, _, content = self._answer.partition(b"\r\n\r\n")
        assert top.startswith(b"HTTP/1.1 200"), f"the server answered {self._answer[:300]!r}"
        length = CONTENT_LENGTH.search(top)
        if length is None or len(content) < int(length[1]):
            return False
        self.times.append(time.perf_counter() - self._sent_at)
        assert self._expected in content, f"an answer was not new and charged: {content[:300]!r}"
        self._answer = b""
        return True


def request_of(load: Load, port: int, seed: int) -> tuple[bytearray, list[int]]:
    """Return a request, and where the first feature of each row is in it."""
    if load.columns:
        return request_of_columns(load.rows, port, seed)
    rows = np.random.default_rng(seed).random((load.rows, FEATURES), dtype=np.float32).round(4)
    rows[:, 1] = seed
    tensor: dict[str, object] = {"name": "features", "shape": [load.rows, FEATURES], "datatype": "FP32"}
    if load.binary:
        tensor["parameters"] = {"binary_data_size": rows.nbytes}
        asked = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
        before, after = json.dumps(asked).encode(), b""
        listed = [row.tobytes() for row in rows]
        more = f"Inference-Header-Content-Length: {len(before)}\r\n"
    else:
        tensor["data"] = [0]
        before, after = json.dumps({"inputs": [tensor]}).encode().split(b"0]}")
        after = b"]}" + after
        numbers = [[f"0.{0:0{DIGITS}}", str(seed), *(f"{value:.4f}" for value in row[2:])] for row in rows]
        listed = [(",".join(row) + ",").encode() for row in numbers]
        listed[-1] = listed[-1].rstrip(b",")
        more = ""
    body = b"".join((before, *listed, after))
    head = (
        f"POST /v2/models/bench/infer HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Length: {len(body)}\r\n{more}\r\n"
    ).encode()
    lengths = [len(head) + len(before) + (0 if load.binary else len("0."))] + [
        len(row) for row in listed[:-1]
    ]
    return bytearray(head + body), np.cumsum(lengths).tolist()


def request_of_columns(rows: int, port: int, seed: int) -> tuple[bytearray, list[int]]:
    """Return a request of named columns, and where the first number of each row is in it."""
    rng = np.random.default_rng(seed)

    def tensor(name: str, datatype: str, data: list[Any], content_type: str | None = None) -> dict[str, Any]:
        described = {"name": name, "datatype": datatype, "shape": [rows, 1], "data": data}
        return (
            described if content_type is None else {**described, "parameters": {"content_type": content_type}}
        )

    inputs = [tensor(name, "FP64", rng.random(rows).round(4).tolist()) for name in NUMBERS]
    inputs[0]["data"] = [0.123456] * rows
    inputs += [
        tensor(name, "BYTES", rng.choice(values, rows).tolist(), "str") for name, values in CATEGORIES.items()
    ]
    body = json.dumps({"parameters": {"content_type": "pd"}, "inputs": inputs}).encode()
    head = f"POST /v2/models/bench/infer HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
    request = bytearray(head.encode() + body)
    return request, [found.start() + len("0.") for found in re.finditer(rb"0\.123456", request)][:rows]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(command: list[str], port: int, folder: Path | None = None) -> Iterator[psutil.Process]:
    """Start a server and wait until it is ready."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder, env=environment
    )
    try:
        ready_after(port, server, "v2/models/bench/ready")
        yield psutil.Process(server.pid)
    finally:
        server.terminate()
        server.wait()


def ready_after(port: int, server: subprocess.Popen[Any], path: str = "v2/health/ready") -> float:
    """Wait until a server is ready; return the seconds that it took."""
    begun = time.monotonic()
    while True:
        with (
            suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as told,
        ):
            if told.status == 200:
                return time.monotonic() - begun
        assert time.monotonic() < begun + 120, "the server did not start"
        assert server.poll() is None, "the server ended"
        time.sleep(0.01)


@contextmanager
def ours(kind: str, address: str, workers: int = 1) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, __file__, "--serve", kind, address, str(port), str(workers)]
    with started(command, port) as process:
        yield Server(port, process, ours=True, charges=kind == "private")


@contextmanager
def mlserver(folder: Path, workers: int, runtime: str = RUNTIME) -> Iterator[Server]:
    """Run MLServer with the same network, in an environment of its own. No workers: in the process that answers."""
    model = folder / "models" / "bench"
    model.mkdir(parents=True)
    (model / "runtime.py").write_text(runtime)
    network = weights()
    np.savez(model / "weights.npz", **network)
    described = {
        "name": "bench",
        "implementation": "runtime.Plain",
        "parameters": {"uri": str(model / "weights.npz")},
    }
    (model / "model-settings.json").write_text(json.dumps(described))
    port = free_port()
    settings = {
        "http_port": port,
        "grpc_port": free_port(),
        "metrics_port": free_port(),
        "parallel_workers": workers,
        "debug": False,
        "host": "127.0.0.1",
    }
    (model.parent / "settings.json").write_text(json.dumps(settings))
    binaries = peer_python("mlserver").parent
    with started([str(binaries / "mlserver"), "start", "."], port, model.parent) as process:
        yield Server(port, process)


def weights() -> dict[str, np.ndarray]:
    """Return the weights of the network for MLServer."""
    rng = np.random.default_rng(0)
    return {
        "weights0": rng.normal(0, 0.05, (FEATURES, HIDDEN)).astype(np.float32),
        "biases0": np.zeros(HIDDEN, np.float32),
        "weights1": rng.normal(0, 0.1, (HIDDEN, CLASSES)).astype(np.float32),
        "biases1": np.zeros(CLASSES, np.float32),
    }


def measure(server: Server, load: Load, seeds: Iterator[int]) -> dict[str, float]:
    """Measure one server under one load, after half a second of warm-up. What it answered must have been charged."""
    loaded(server, replace(load, seconds=0.5), next(seeds))
    before, left = cpu_seconds(server.process), remaining_answers(server)
    told = loaded(server, load, next(seeds))
    assert left - remaining_answers(server) == (told["requests"] * load.rows if server.charges else 0)
    return {**told, "cpu_us": 1e6 * (cpu_seconds(server.process) - before) / told.pop("requests")}


def remaining_answers(server: Server) -> int:
    """Return how many answers the budget still pays for; 0 for a server without one."""
    if not server.charges:
        return 0
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/v2/models/bench/budget", timeout=5) as told:
        return int(json.load(told)["remaining_answers"])


def cpu_seconds(process: psutil.Process) -> float:
    """Return the processor time of a server and its worker processes."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def loaded(server: Server, load: Load, first_seed: int) -> dict[str, float]:
    """Send requests over all connections until the time is over; each connection waits for its last answer."""
    expected = b'"new_answers":%d' % (load.rows if server.charges else 0) if server.ours else b'"outputs":'
    connections = [
        Connection(load, server.port, first_seed + index, expected) for index in range(CONNECTIONS)
    ]
    by_number = {each.socket.fileno(): each for each in connections}
    waiting = len(connections)
    with select.epoll() as ready:
        own = time.process_time()
        begun = time.perf_counter()
        for number, connection in by_number.items():
            connection.ask()
            ready.register(number, select.EPOLLIN | select.EPOLLOUT)
        while waiting:
            events = ready.poll(30)
            assert events, "the server does not answer"
            for number, event in events:
                connection = by_number[number]
                if event & select.EPOLLOUT and connection.send():
                    ready.modify(number, select.EPOLLIN)
                if not event & select.EPOLLIN or not connection.is_answered():
                    continue
                if time.perf_counter() - begun > load.seconds:
                    waiting -= 1
                    ready.unregister(number)
                elif not connection.ask():
                    ready.modify(number, select.EPOLLIN | select.EPOLLOUT)
        elapsed = time.perf_counter() - begun
        own = time.process_time() - own
    for connection in connections:
        connection.socket.close()
    times = sorted(moment for each in connections for moment in each.times)
    return {
        "requests": len(times),
        "per_second": len(times) / elapsed,
        "rows": len(times) * load.rows / elapsed,
        "median_ms": 1000 * times[len(times) // 2],
        "p99_ms": 1000 * times[int(len(times) * 0.99)],
        "client_us": 1e6 * own / len(times),
    }


def flush_ms(folder: Path) -> float:
    """Measure one disk flush in milliseconds: a single charge cannot be faster."""
    times = []
    with (folder / "flush").open("wb", buffering=0) as file:
        for _ in range(50):
            file.write(b"x" * 4096)
            begun = time.perf_counter()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - begun)
    return 1000 * statistics.median(times)


@contextmanager
def command_started(model: Path, ledger: Path, *options: str) -> Iterator[tuple[int, psutil.Popen]]:
    """Start `quietmax serve` with one model; give its port and its supervisor at once."""
    port = free_port()
    command = [sys.executable, "-m", "quietmax", "serve", str(model), "--anonymous", "--ledger", str(ledger)]
    with psutil.Popen(
        [*command, "--port", str(port), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            yield port, server
        finally:
            server.terminate()


@contextmanager
def table_head(folder: Path) -> Iterator[Server]:
    """Serve a table head with `quietmax serve`; the process is that of the worker."""
    model = folder / "table" / "bench"
    model.parent.mkdir()
    save_table_head(model)
    with command_started(model, folder / "table.sqlite", "--no-request-log") as (port, server):
        ready_after(port, server)
        yield Server(port, server.children()[0], ours=True)


def restarts(folder: Path, kills: int = 5) -> tuple[float, float]:
    """Return the seconds until a network is served: from the start, and (median) after its worker was killed."""
    save_network(folder / "network")
    options = ("--accept-unproven", "--budget", "100")
    with command_started(folder / "network", folder / "network.sqlite", *options) as (port, server):
        first = ready_after(port, server)
        again = []
        for _ in range(kills):
            (worker,) = server.children()
            time.sleep(2)
            worker.kill()
            worker.wait()
            again.append(ready_after(port, server))
    return first, statistics.median(again)


def head_starts(folder: Path, starts: int = 9) -> tuple[list[float], float]:
    """Return the seconds until a head is served, of several starts, and the processor seconds (median) of one."""
    save_head(folder / "head")
    seconds, processor = [], []
    for _ in range(starts):
        with command_started(folder / "head", folder / "head.sqlite") as (port, server):
            seconds.append(ready_after(port, server))
            processor.append(cpu_seconds(server))
    return sorted(seconds), statistics.median(processor)


LOADS = {
    "1 row, JSON": Load(1, False, 0),
    "1 row, binary": Load(1, True, 0),
    "100 rows, JSON": Load(100, False, 0),
    "100 rows, binary": Load(100, True, 0),
    "1 row, columns": Load(1, False, 0, columns=True),
    "100 rows, columns": Load(100, False, 0, columns=True),
}
Turns = list[dict[str, dict[str, float]]]


HEAD, PRIVATE, PRIVATE2, PLAIN, PLAIN2, FASTEST, DEFAULT = (
    "table head",
    "private",
    "private, 2 workers",
    "plain",
    "plain, 2 workers",
    "MLServer, in its process",
    "MLServer, default",
)


def table(name: str, turns: Turns) -> Iterator[str]:
    """Write the rows of one load: medians over the turns."""

    def ratio(one: str, other: str) -> str:
        if one == other or one not in turns[0] or other == HEAD:
            return "-"
        parts = [turn[one]["per_second"] / turn[other]["per_second"] for turn in turns]
        return f"{statistics.median(parts):.2f} ({min(parts):.2f} to {max(parts):.2f})"

    for server in turns[0]:
        figures = {key: statistics.median(turn[server][key] for turn in turns) for key in turns[0][server]}
        speed = f"{figures['per_second']:,.0f} | {figures['rows']:,.0f}"
        latency = f"{figures['median_ms']:.1f} | {figures['p99_ms']:.1f}"
        ratios = f"{ratio(HEAD if HEAD in turns[0] else PRIVATE, server)} | {ratio(PRIVATE2, server)}"
        yield f"| {name} | {server} | {speed} | {latency} | {figures['cpu_us']:,.0f} | {ratios} |"


def report_ratios(name: str, turns: Turns) -> None:
    """Report the rates of one load beside those of the same server without privacy and of MLServer."""
    peers = (FASTEST, DEFAULT)
    for mine, others in ((HEAD, peers), (PRIVATE, (PLAIN, *peers)), (PRIVATE2, (PLAIN2, *peers))):
        for peer in others:
            if mine in turns[0] and peer in turns[0]:
                times = [[1e3 / turn[each]["per_second"] for turn in turns] for each in (mine, peer)]
                shown = peer.replace(PLAIN, "the same without privacy")
                report("serving", f"{name}, {mine}", times[0], "ms per request", peer=shown, theirs=times[1])


def client_us(turns: Turns) -> float:
    """Return the processor time of the load itself for one request, in microseconds: the median over all servers."""
    return statistics.median(each["client_us"] for turn in turns for each in turn.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", nargs=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--ledger", default="", help="ledger to use instead of a fresh SQLite file")
    parser.add_argument("--without-mlserver", action="store_true")
    parser.add_argument(
        "--only", default="", help="measure the loads whose name has this in it, as in 'columns'"
    )
    arguments = parser.parse_args()
    if arguments.serve:
        kind, address, port, workers = arguments.serve
        serve(kind, address, int(port), int(workers))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    seeds = count(1, CONNECTIONS)
    busy = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="quietmax-bench-") as place, ExitStack() as stack:
        folder = Path(place)
        flush = flush_ms(folder)
        print("Measuring restarts.", file=sys.stderr)
        first, again = restarts(folder)
        heads, processor = head_starts(folder)
        ledger = arguments.ledger or f"sqlite:///{folder}/ledger.sqlite"
        servers = {
            PRIVATE: stack.enter_context(ours("private", ledger)),
            PRIVATE2: stack.enter_context(
                ours("private", arguments.ledger or f"sqlite:///{folder}/2.sqlite", 2)
            ),
            PLAIN: stack.enter_context(ours("plain", f"sqlite:///{folder}/plain.sqlite")),
            PLAIN2: stack.enter_context(ours("plain", f"sqlite:///{folder}/plain2.sqlite", 2)),
        }
        by_columns = {HEAD: stack.enter_context(table_head(folder))}
        if not arguments.without_mlserver:
            try:
                for name, workers in ((FASTEST, 0), (DEFAULT, 1)):
                    place = folder / f"mlserver-{workers}"
                    servers[name] = stack.enter_context(mlserver(place, workers))
                    place = folder / f"mlserver-columns-{workers}"
                    by_columns[name] = stack.enter_context(mlserver(place, workers, COLUMNS_RUNTIME))
            except (OSError, subprocess.CalledProcessError) as problem:
                print(f"MLServer is left out: {problem}", file=sys.stderr)
        turns: dict[str, Turns] = {name: [] for name in LOADS if arguments.only in name}
        for turn in range(arguments.turns):
            for name, load in ((name, LOADS[name]) for name in turns):
                print(f"Turn {turn + 1}: {name}", file=sys.stderr)
                turns[name].append(
                    {
                        name: measure(server, replace(load, seconds=arguments.seconds), seeds)
                        for name, server in (by_columns if load.columns else servers).items()
                        if server.ours or not load.binary
                    }
                )
        memory = by_columns[HEAD].process.memory_full_info()
    print(
        "| load | server | requests/s | rows/s | median ms | p99 ms | CPU us/request "
        "| ours : this | private, 2 workers : this |"
    )
    print("| --- " * 9 + "|")
    for name, measured in turns.items():
        print("\n".join(table(name, measured)))
    client = ", ".join(f"{name}: {client_us(measured):,.0f} us" for name, measured in turns.items())
    print()
    print(
        f"{os.cpu_count()} cores, load average {busy:.1f} before; {arguments.turns} turns of {arguments.seconds:g} s; "
        f"{CONNECTIONS} connections from one process, whose own processor time per request is: {client}. "
        f"A disk flush takes {flush:.2f} ms. `quietmax serve` is ready "
        f"{statistics.median(heads):.2f} s ({heads[0]:.2f} to {heads[-1]:.2f} in {len(heads)} starts; "
        f"{processor:.2f} s of processor time) after its start with a head, {first:.1f} s with a network, and "
        f"{again:.2f} s after its worker was killed. A worker that serves a table head takes "
        f"{memory.rss / 1e6:.0f} MB (RSS; {memory.pss / 1e6:.0f} MB PSS) after its requests."
    )
    for name, measured in turns.items():
        report_ratios(name, measured)


if __name__ == "__main__":
    main()
