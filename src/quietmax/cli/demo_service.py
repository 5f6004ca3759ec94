"""The demo's last step: a service on a real port, asked over HTTP until its budget refuses."""

from __future__ import annotations

import io
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from quietmax.account import BudgetExhausted
from quietmax.data import Split
from quietmax.errors import QuietmaxError
from quietmax.estimators import PrivateHead, save_private
from quietmax.ledger import Ledger
from quietmax.server import Client, Service, Settings, bind, load_servables
from quietmax.server.logs import Log
from quietmax.server.run import Listening, configuration
from quietmax.server.supervisor import open_port

MODEL = "digits"
QUERIES = 8
RECORDS = 2000
"""Training digits of the demo."""
_SECONDS_TO_START = 60


@dataclass(frozen=True)
class Asked:
    """What the service said: labels beside the truth, what was left after each answer, and the refusal."""

    url: str
    truths: tuple[int, ...]
    labels: tuple[int, ...]
    left: tuple[int, ...]
    refusal: str
    budget: dict[str, Any]
    sound: bool

    def to_json(self) -> dict[str, Any]:
        """All of it by name."""
        return {
            "truths": list(self.truths),
            "labels": list(self.labels),
            "answers_left": list(self.left),
            "refusal": self.refusal,
            "spent_fraction": self.budget["spent_fraction"],
            "journal_is_sound": self.sound,
        }


def ask_until_refused(data: Split, *, queries: int = QUERIES) -> Asked:
    """Train a head that pays epsilon 1 for every answer, serve it, and ask until the budget is gone."""
    head = PrivateHead(
        epsilon=float(queries),
        delta=1e-5,
        route="output",
        release="query",
        queries=queries,
        image_shape=data.records.image_shape,
        classes=range(data.classes),
        declared_size=RECORDS,
    ).fit(data.train.features, data.train.labels)
    with tempfile.TemporaryDirectory(prefix="quietmax-demo-") as folder:
        save_private(head, Path(folder) / MODEL, dataset=data.name)
        with _running(Path(folder)) as (url, key, ledger):
            return _asked(url, key, ledger, data)


def _asked(url: str, key: str, ledger: Ledger, data: Split) -> Asked:
    labels: list[int] = []
    left: list[int] = []
    with Client(url, key) as client:
        while True:
            row = data.test.features[len(labels)][None]
            try:
                answer = client.ask(MODEL, row)
            except BudgetExhausted as refusal:
                truths = tuple(int(label) for label in data.test.labels[: len(labels)])
                budget = client.budget(MODEL)
                sound = ledger.verify().sound
                return Asked(url, truths, tuple(labels), tuple(left), str(refusal), budget, sound)
            labels.append(int(answer.labels[0]))
            left.append(int(answer.parameters["remaining_answers"]))


@contextmanager
def _running(folder: Path) -> Iterator[tuple[str, str, Ledger]]:
    """The service in a thread: its address, a client's key and its ledger."""
    ledger = Ledger(folder / "ledger.sqlite")
    key, _ = ledger.create_key("demo")
    service = Service(
        ledger, bind(ledger, load_servables([str(folder / MODEL)])), Settings(), Log(io.BytesIO())
    )
    listening = Listening(port=0)
    port = open_port(listening)
    server = uvicorn.Server(configuration(service, listening))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [port]}, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + _SECONDS_TO_START
        while not server.started:
            if time.monotonic() > deadline or not thread.is_alive():
                raise QuietmaxError("The demo's service did not start; try 'quietmax serve' to see why.")
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port.getsockname()[1]}", key, ledger
    finally:
        server.should_exit = True
        thread.join()
