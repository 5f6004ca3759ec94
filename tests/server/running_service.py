"""Services that run on a real port, and requests to them."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import httpx
import numpy as np
import pandas as pd
import pytest
from numpy.typing import ArrayLike, NDArray

from quietmax.data import Encoding, Schema, encode_table
from quietmax.errors import LedgerUnavailable
from quietmax.ledger import Ledger, Terms
from quietmax.server import Service, Settings
from quietmax.server.auth import Caller
from quietmax.server.codec import InferenceRequest
from quietmax.server.deployment import deploy, load_models
from quietmax.server.run import run_in_thread
from quietmax.server.settings import Listener
from quietmax.server.telemetry import Log

T = TypeVar("T")
FEATURES, CLASSES = 6, 4
Start = Callable[..., AbstractContextManager["Running"]]
TABLE_SCHEMA = Schema(
    label="approved",
    classes=("no", "yes"),
    bounds={"age": (0, 100), "income": (0, 100_000)},
    categories={"région": ("north", "south")},
    complete=("income",),
)
"""What is declared about the table of the models `table` and `survey`."""
LOANS_SCHEMA = Schema(
    label="repaid",
    classes=("no", "yes"),
    person="customer",
    bounds={"age": (18, 100), "income": (0, 100_000)},
    decimal={"income": ","},
    thousands={"income": "."},
    units={"income": "€"},
    categories={"région": ("north", "south")},
    booleans=("smoker",),
    dates={
        "joined": ("2010-01-01", "2025-12-31"),
        "seen": ("2024-01-01 00:00:00", "2024-12-31 00:00:00"),
    },
    date_formats={"joined": "%d.%m.%Y"},
    hashed={"zip": 8},
    complete=("age", "région"),
)
"""What is declared about the table of the model `loans`: columns of every kind, and persons."""
LEDGER_DOWN = LedgerUnavailable("The ledger is down.")


@dataclass
class Running:
    """A running service: its address, the keys of an administrator and of a client, and its log."""

    url: str
    service: Service
    admin: str
    key: str
    log: io.BytesIO
    grpc: str | None = None
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, headers=bearer(self.key), timeout=120)

    @property
    def ledger(self) -> Ledger:
        return self.service.ledger

    def lines(self) -> list[dict[str, Any]]:
        self.service.log.flush(30)
        return [json.loads(line) for line in self.log.getvalue().splitlines()]

    def infer(
        self, rows: ArrayLike, model: str = "plain", *, key: str | None = None, **more: Any
    ) -> httpx.Response:
        path = f"/v2/models/{model}/infer"
        return self.http.post(path, json=inference(rows, **more), headers=bearer(key or self.key))

    def get(self, path: str, key: str | None = None) -> httpx.Response:
        return self.http.get(path, headers=bearer(key or self.key))

    def infer_columns(
        self, columns: dict[str, list[Any]], model: str = "table", **more: Any
    ) -> httpx.Response:
        return self.http.post(f"/v2/models/{model}/infer", json=column_inference(columns, **more))

    def post_body(self, body: bytes | str, **headers: str) -> httpx.Response:
        """Send a body to the model `plain` as it is."""
        return self.http.post("/v2/models/plain/infer", content=body, headers=headers)


@dataclass
class Command:
    """`quietmax serve` as a process: what it says when it listens, and the lines of its log so far."""

    process: subprocess.Popen[str]
    told: dict[str, Any]
    lines: list[str]

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.lines]


@contextmanager
def serve_command(
    ledger: Path,
    *options: object,
    read_log: bool = True,
    most_files: int | None = None,
    **environment: str | None,
) -> Iterator[Command]:
    """Run `quietmax serve` until it listens; at the end, stop it."""
    limited = [] if most_files is None else ["prlimit", f"--nofile={most_files}"]
    command = [*limited, sys.executable, "-m", "quietmax", "serve", "--ledger", str(ledger), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--json", *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in {**os.environ, **environment}.items() if value is not None},
    )
    lines: list[str] = []
    try:
        assert process.stdout is not None
        told = "".join(iter(process.stdout.readline, "}\n")) + "}"
        if read_log:
            threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True).start()
        yield Command(process, json.loads(told), lines)
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def down(*_: object) -> NoReturn:
    """Stands for a function of the ledger while it is down."""
    raise LEDGER_DOWN


def watch(patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]) -> list[Any]:
    """Return a list that gets what `note` says of the arguments of each call of a function."""
    original, noted = getattr(owner, name), []

    def watched(*arguments: Any) -> Any:
        noted.append(note(*arguments))
        return original(*arguments)

    patch.setattr(owner, name, watched)
    return noted


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    """Wait until a condition holds; an error of a connection counts as no."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(httpx.TransportError, ConnectionError):
            if condition():
                return
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_ready(url: str) -> bool:
    return httpx.get(f"{url}/v2/health/ready", timeout=30).status_code == 200


def inference(rows: ArrayLike, **more: Any) -> dict[str, Any]:
    values = np.asarray(rows, dtype=np.float64)
    tensor = {
        "name": "features",
        "shape": list(values.shape),
        "datatype": "FP32",
        "data": values.ravel().tolist(),
    }
    return {"inputs": [tensor], **more}


def column_inference(columns: dict[str, list[Any]], **more: Any) -> dict[str, Any]:
    """An inference request with columns as JSON; strings are BYTES, everything else is FP64."""
    inputs = [
        {
            "name": name,
            "shape": [len(cells)],
            "datatype": "BYTES" if any(isinstance(cell, str) for cell in cells) else "FP64",
            "data": cells,
        }
        for name, cells in columns.items()
    ]
    return {"inputs": inputs, **more}


def some_people(count: int, seed: int = 0) -> pd.DataFrame:
    """Rows of the table of `table` and `survey`; approved exactly if the income is high."""
    rng = np.random.default_rng(seed)
    income = rng.uniform(0, 100_000, count)
    return pd.DataFrame(
        {
            "age": rng.integers(0, 100, count),
            "income": income,
            "région": rng.choice(["north", "south"], count),
            "approved": np.where(income > 50_000, "yes", "no"),
        }
    )


def some_loans(count: int, seed: int = 0) -> pd.DataFrame:
    """Rows of the table that `loans` is trained on, with types, and repaid exactly if the income is high."""
    rng = np.random.default_rng(seed)
    income = rng.uniform(0, 100_000, count).round(2)
    days = pd.to_timedelta(rng.integers(0, 365, count), unit="D")
    return pd.DataFrame(
        {
            "customer": [f"C{number // 2}" for number in range(count)],
            "age": rng.integers(18, 100, count),
            "income": income,
            "région": rng.choice(["north", "south"], count),
            "smoker": rng.random(count) < 0.3,
            "joined": pd.Timestamp("2012-03-04") + days,
            "seen": pd.Timestamp("2024-01-01 08:30:00") + days,
            "zip": rng.choice(["8001", "1010", "75001"], count),
            "repaid": np.where(income > 50_000, "yes", "no"),
        }
    )


def some_rows(count: int, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(size=(count, FEATURES)).round(4)


def decoded(count: int = 1, request_id: str | None = None) -> InferenceRequest:
    return InferenceRequest(some_rows(count).astype(np.float32), request_id, ())


def caller(service: Service) -> Caller:
    return Caller("ann", service.ledger.client("ann"), None, False)


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run in a thread of its own: Playwright leaves a loop running in the main one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result(120)


def check_message(response: httpx.Response) -> None:
    """An error is a plain message that reveals nothing about the code."""
    message = response.json()["error"]
    assert message[0].isupper() or message[0] == "`"
    assert message.endswith(".")
    assert "\n" not in message
    assert "Traceback" not in message
    assert len(message) < 400


def log_schema() -> Any:
    return json.loads((Path(__file__).parents[2] / "docs" / "log-schema.json").read_text(encoding="utf-8"))


def _encoding(frame: pd.DataFrame, schema: Schema) -> Encoding:
    encoding = encode_table(frame, schema).encoding
    assert encoding is not None
    return encoding


TABLE = _encoding(some_people(9), TABLE_SCHEMA)
LOANS = _encoding(some_loans(9), LOANS_SCHEMA)


@contextmanager
def running(
    address: str,
    models: Sequence[str],
    *,
    budget: Terms | None = None,
    queries: int | None = None,
    settings: Settings | None = None,
    account: str | None = None,
    tls: tuple[Path, Path] | None = None,
    grpc: bool = False,
) -> Iterator[Running]:
    ledger = Ledger(address)
    loaded = load_models(models, budget=budget, queries=queries, accept_unproven=True)
    admin, _ = ledger.create_key("owner", "admin")
    key, _ = ledger.create_key("ann")
    log = io.BytesIO()
    service = Service(
        ledger, deploy(ledger, loaded, budget=budget, account=account, accept_weak=True), settings, Log(log)
    )
    certificate, tls_key = tls or (None, None)
    where = Listener("127.0.0.1", 0, certificate, tls_key, grpc_port=0 if grpc else None)
    with where.reserve_grpc_port() as listener, run_in_thread(service, listener) as url:
        started = Running(url, service, admin, key, log, f"localhost:{listener.grpc_port}" if grpc else None)
        try:
            yield started
        finally:
            started.http.close()
