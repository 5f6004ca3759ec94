"""The service running on a real port, for tests."""

from __future__ import annotations

import io
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import numpy as np
import uvicorn

from quietmax.ledger import Ledger
from quietmax.server import Service, Settings, deploy, load_servables
from quietmax.server.metrics import Log
from quietmax.server.run import Listening, configuration, open_port

FEATURES, CLASSES = 6, 4


@dataclass
class Running:
    """A running service: its address, its ledger, keys of an administrator and a client, and its log."""

    url: str
    service: Service
    admin: str
    key: str
    log: io.BytesIO
    http: httpx.Client = field(init=False)

    def __post_init__(self):
        self.http = httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {self.key}"}, timeout=120
        )

    @property
    def ledger(self) -> Ledger:
        return self.service.ledger

    def infer(self, rows, model="plain", **more):
        return self.http.post(f"/v2/models/{model}/infer", json=inference(rows, **more))


def inference(rows, **more):
    values = np.asarray(rows, dtype=np.float64)
    tensor = {
        "name": "features",
        "shape": list(values.shape),
        "datatype": "FP32",
        "data": values.ravel().tolist(),
    }
    return {"inputs": [tensor], **more}


def some_rows(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, FEATURES)).round(4)


@contextmanager
def running(
    address, names, *, budget=None, queries=None, settings=None, mechanism=None, account=None, tls=()
):
    ledger = Ledger(address)
    loaded = load_servables(names, budget=budget, queries=queries, mechanism=mechanism, accept_unproven=True)
    admin, _ = ledger.create_key("owner", "admin")
    key, _ = ledger.create_key("ann")
    log = io.BytesIO()
    deployments = deploy(ledger, loaded, budget=budget, account=account)
    service = Service(ledger, deployments, settings or Settings(), Log(log))
    listening = Listening("127.0.0.1", 0, *tls)
    port = open_port(listening)
    server = uvicorn.Server(configuration(service, listening))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [port]})
    thread.start()
    deadline = time.monotonic() + 120
    while not server.started:
        assert time.monotonic() < deadline, "the service did not start"
        time.sleep(0.01)
    scheme = "https" if tls else "http"
    service_running = Running(f"{scheme}://127.0.0.1:{port.getsockname()[1]}", service, admin, key, log)
    try:
        yield service_running
    finally:
        service_running.http.close()
        server.should_exit = True
        thread.join()
