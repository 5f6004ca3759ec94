"""Where the service listens, how it stops, and when the supervisor restarts a worker."""

from __future__ import annotations

import asyncio
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from quietmax.errors import InvalidInput, LedgerUnavailable, QuietmaxError
from quietmax.ledger import Ledger
from quietmax.server import Service, Settings
from quietmax.server import run as supervisor
from quietmax.server.deployment import deploy, load_models
from quietmax.server.run import supervise
from quietmax.server.settings import Listener
from quietmax.server.telemetry import Log, Metrics
from tests.server.running_service import (
    column_inference,
    inference,
    is_ready,
    serve_command,
    some_rows,
    until,
)


def test_anonymous_or_unencrypted_service_beyond_loopback_is_refused(tmp_path: Path) -> None:
    for name in ("certificate", "key"):
        (tmp_path / name).write_text("nothing of the kind")
    files = {f"tls_{name}": tmp_path / name for name in ("certificate", "key")}
    for options, message in (
        ({"host": "0.0.0.0"}, r"API keys would be sent to 0\.0\.0\.0 without encryption"),
        ({"tls_certificate": tmp_path / "key"}, "requires both `tls_certificate` and `tls_key`"),
        ({**files, "tls_key": tmp_path / "absent"}, "There is no file"),
        (files, "must be a PEM certificate and its private key"),
    ):
        with pytest.raises(InvalidInput, match=message):
            Listener(**options)  # type: ignore[arg-type]
    for listener in (Listener(host="0.0.0.0", behind_proxy=True), Listener(behind_proxy=True)):
        with pytest.raises(InvalidInput, match="Anonymous access requires a loopback address"):
            listener.check_anonymous()
    Listener().check_anonymous()


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(
            InvalidInput, match=rf"Cannot listen on 127.0.0.1:{number} \(Address already in use\)"
        ):
            Listener(port=number).open_socket()


_SERVE_ONE_REQUEST = """
import sys, urllib.request
from quietmax.ledger.ledger import Ledger
from quietmax.server.deployment import deploy, load_models
from quietmax.server.run import run_in_thread
from quietmax.server.service import Service
from quietmax.server.settings import Settings

ledger = Ledger(sys.argv[2])
served = deploy(ledger, load_models([f"head={sys.argv[1]}"]), accept_weak=True)
service = Service(ledger, served, Settings(anonymous=True))
with run_in_thread(service) as url:
    request = urllib.request.Request(f"{url}/v2/models/head/infer", sys.argv[3].encode())
    assert urllib.request.urlopen(request, timeout=60).status == 200
    assert urllib.request.urlopen(f"{url}/v2/models/head", timeout=60).status == 200
print([name for name in sys.argv[4:] if name in sys.modules])
"""


@pytest.mark.parametrize("model", ["head", "summed"])
def test_serving_a_head_imports_no_library_of_training_of_tables_or_of_pages(
    models: Path, tmp_path: Path, model: str
) -> None:
    heavy = ["torch", "sklearn", "scipy.stats", "pandas", "pyarrow", "matplotlib", "dp_accounting"]
    heavy += ["scipy.optimize", "jinja2", "grpc"]
    request = inference(some_rows(3))
    if model == "summed":  # a row with a missing value in every column that may lack one
        row = {
            "age": [30],
            "région": ["west"],
            **{name: [None] for name in ("income", "smoker", "joined", "seen", "zip")},
        }
        request = {**column_inference(row), "outputs": [{"name": "probabilities"}, {"name": "reasons"}]}
    body = json.dumps(request)
    done = subprocess.run(
        [sys.executable, "-c", _SERVE_ONE_REQUEST, models / model, tmp_path / "l.sqlite", body, *heavy],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_a_worker_that_serves_a_table_head_has_no_library_of_tables_and_takes_less_than_150_megabytes(
    models: Path, tmp_path: Path
) -> None:
    row = {
        "age": [30],
        "région": ["west"],
        **{name: [None] for name in ("income", "smoker", "joined", "seen", "zip")},
    }
    options = ("--anonymous", "--accept-weak", models / "summed")
    with serve_command(tmp_path / "l.sqlite", *options) as command:
        model = f"{command.told['url']}/v2/models/summed"
        for _ in range(20):
            assert httpx.post(f"{model}/infer", json=column_inference(row)).status_code == 200
        assert httpx.get(model).status_code == 200
        for process in (psutil.Process(command.process.pid), *psutil.Process(command.process.pid).children()):
            mapped = {Path(each.path).parts for each in process.memory_maps()}
            assert not {"torch", "pandas", "pyarrow", "sklearn"} & {
                part for parts in mapped for part in parts
            }
            assert process.memory_info().rss < 150e6


CONTEXT = multiprocessing.get_context("fork")


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Supervise services with the given behaviours, one after the other; returns how many were started.

    Services run in processes of their own, so they write to a file that they were started.
    """
    monkeypatch.setattr(supervisor, "run", lambda *_: None)
    monkeypatch.setattr(supervisor, "_stop_with_parent", lambda _: None)
    record, handler = tmp_path / "starts", signal.getsignal(signal.SIGTERM)
    record.write_bytes(b"")

    def supervised(*behaviours: Callable[[], None]) -> int:
        def create_service(_: Metrics) -> Any:
            number = record.stat().st_size
            with record.open("ab") as file:
                file.write(b".")
            behaviours[number]()

        with socket.socket() as port:
            supervise(create_service, Listener(), port, Log(io.BytesIO()))
        return record.stat().st_size

    yield supervised
    assert signal.getsignal(signal.SIGTERM) == handler


def _ledger_down() -> None:
    raise LedgerUnavailable("The ledger is down.")


def _broken() -> None:
    raise QuietmaxError("The model is broken.")


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop_the_parent() -> None:
    os.kill(os.getppid(), signal.SIGTERM)
    _ledger_down()


def _ended() -> None:
    return None


@pytest.mark.parametrize(
    ("ends", "changed"),
    [
        ([_ended], {}),
        ([_killed], {}),
        ([_ledger_down] * (supervisor._MAX_FAILURES + 2), {"_MAX_RESTART_DELAY": 0.05}),
        ([_broken] * 6, {"_MIN_UPTIME": 0.0}),
        ([], {}),
    ],
    ids=["ended", "killed", "ledger down", "broken after a while", "asked to stop"],
)
def test_a_service_that_ends_by_itself_is_restarted_until_the_supervisor_is_asked_to_stop(
    starts: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    ends: list[Callable[[], None]],
    changed: dict[str, float],
) -> None:
    for name, value in changed.items():
        monkeypatch.setattr(supervisor, name, value)
    assert starts(*ends, _stop_the_parent, _ended) == len(ends) + 1


def test_a_service_that_dies_at_every_start_is_given_up(starts: Callable[..., int], tmp_path: Path) -> None:
    with pytest.raises(QuietmaxError, match="died several times right after its start"):
        starts(*[_broken] * 9)
    assert (tmp_path / "starts").stat().st_size == supervisor._MAX_FAILURES


def _log(place: Path) -> Log:
    return Log((place / "log").open("ab", buffering=0))


def _logged(place: Path, event: str) -> int:
    return (place / "log").read_text().count(f'"event":"{event}"')


def _create_service(place: Path, folder: Path, metrics: Metrics) -> Service:
    ledger = Ledger(place / "ledger.sqlite")
    deployments = deploy(ledger, load_models([f"head={folder}"]))
    return Service(ledger, deployments, Settings(anonymous=True, request_log=False), _log(place), metrics)


@contextmanager
def _workers(count: int, models: Path, tmp_path: Path) -> Iterator[tuple[psutil.Process, str]]:
    """A supervisor with so many workers that serve a head; its process, and the URL of the service."""
    Ledger(tmp_path / "ledger.sqlite").close()
    opened = Listener(port=0).open_socket()
    create = partial(_create_service, tmp_path, models / "head")
    supervised = (create, Listener(port=0), opened, _log(tmp_path), count)
    process = CONTEXT.Process(target=supervise, args=supervised)
    process.start()
    url = f"http://127.0.0.1:{opened.getsockname()[1]}"
    opened.close()
    started = psutil.Process(process.pid)
    try:
        until(lambda: len(started.children()) == count)
        _all_listen(url, started, count)
        yield started, url
    finally:
        workers = started.children() if started.is_running() else []
        process.kill()
        process.join()
        psutil.wait_procs(workers, 60)


def _connections(worker: psutil.Process, url: str) -> int:
    """How many clients a worker is connected to."""
    port = int(url.rsplit(":", 1)[1])
    return sum(each.status == "ESTABLISHED" and each.laddr.port == port for each in worker.net_connections())


def _all_listen(url: str, supervisor: psutil.Process, count: int) -> None:
    """Wait until each worker has taken one of several connections."""

    def taken() -> bool:
        with _clients(url, 2 * count):
            return all(_connections(worker, url) for worker in supervisor.children())

    until(taken)
    until(lambda: not any(_connections(worker, url) for worker in supervisor.children()))


@contextmanager
def _clients(url: str, count: int) -> Iterator[list[httpx.Client]]:
    """Clients with an open connection each, opened as fast as they can be."""
    clients = [httpx.Client(base_url=url, timeout=60) for _ in range(count)]
    try:
        for client in clients:
            with suppress(httpx.HTTPError):
                client.get("/v2/health/live")
        yield clients
    finally:
        for client in clients:
            client.close()


def test_sixteen_connections_opened_at_once_are_shared_by_the_workers(models: Path, tmp_path: Path) -> None:
    with _workers(2, models, tmp_path) as (supervised, url):
        address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        for _ in range(3):
            opened = [socket.create_connection(address, 60) for _ in range(16)]
            until(lambda: sum(_connections(each, url) for each in supervised.children()) == 16)
            shares = sorted(_connections(each, url) for each in supervised.children())
            for connection in opened:
                connection.close()
            until(lambda: not any(_connections(each, url) for each in supervised.children()))
            time.sleep(0.2)  # the workers tell each other ten times a second
            assert shares[0] >= 6, shares


def _infer_head(url: str, client: httpx.Client | None = None) -> None:
    """Send a query that must be answered."""
    send = httpx.post if client is None else client.post
    sent = send(f"{url}/v2/models/head/infer", json=inference(some_rows(1)), timeout=60)
    assert sent.status_code == 200


def test_metrics_cover_all_workers_and_outlive_a_killed_one(models: Path, tmp_path: Path) -> None:
    def counted() -> int:
        text = httpx.get(f"{url}/metrics", timeout=60).text
        found = re.findall(r'quietmax_requests_total\{.*status="200".*\} (.*)', text)
        return round(sum(map(float, found)))

    with _workers(2, models, tmp_path) as (supervised, url):
        with _clients(url, 6) as clients:
            assert all(_connections(worker, url) > 1 for worker in supervised.children())
            for client in clients:
                for _ in range(5):
                    _infer_head(url, client)
        assert counted() == 30
        text = httpx.get(f"{url}/metrics", timeout=60).text
        assert text.count("quietmax_ledger_up 1.0") == 1
        assert 'quietmax_request_seconds_count{model="head",version="1"} 30.0' in text
        victim = supervised.children()[0]
        victim.kill()
        victim.wait(60)
        until(lambda: len(supervised.children()) == 2)
        _all_listen(url, supervised, 2)
        _infer_head(url)
        assert counted() == 31


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGTERM])
def test_all_workers_go_with_the_supervisor_and_so_does_the_folder_of_their_metrics(
    models: Path, metrics: Path, tmp_path: Path, ends: signal.Signals
) -> None:
    """A killed supervisor leaves the folder to workers that still answer."""
    with _workers(3, models, tmp_path) as (supervised, url):
        workers = supervised.children()
        assert len(list(metrics.iterdir())) == 1
        supervised.send_signal(ends)
        _, alive = psutil.wait_procs([supervised, *workers], 60)
        assert not alive
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url}/v2/health/live", timeout=5)
        assert len(list(metrics.iterdir())) == (ends == signal.SIGKILL)


@pytest.fixture
def metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folder of the metrics is made."""
    place = tmp_path / "metrics"
    place.mkdir()
    monkeypatch.setattr(supervisor, "_metrics_folder", lambda: TemporaryDirectory(dir=place))
    return place


def test_workers_whose_folder_of_metrics_was_removed_by_somebody_else_go_on_answering(
    models: Path, metrics: Path, tmp_path: Path
) -> None:
    with _workers(2, models, tmp_path) as (_, url):
        (folder,) = metrics.iterdir()
        shutil.rmtree(folder)
        for _ in range(4):
            _infer_head(url)
            assert httpx.get(f"{url}/metrics", timeout=60).status_code == 200


def test_a_second_signal_stops_workers_that_do_not_stop(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stop(_: Service) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(Service, "stop", stop)
    with _workers(2, models, tmp_path) as (supervised, _):
        workers = supervised.children()
        supervised.terminate()
        with pytest.raises(psutil.TimeoutExpired):
            supervised.wait(1.0)
        supervised.terminate()
        supervised.wait(10.0)
        assert not any(worker.is_running() for worker in workers)


def test_one_ctrl_c_reaches_supervisor_and_workers_and_still_stops_gracefully(
    models: Path, tmp_path: Path
) -> None:
    with _workers(2, models, tmp_path) as (supervised, _):
        workers = supervised.children()
        for process in (supervised, *workers):
            process.send_signal(signal.SIGINT)
        psutil.wait_procs([supervised, *workers], 60)
    assert _logged(tmp_path, "stopped") == 2


@pytest.mark.parametrize(("count", "asked"), [(1, signal.SIGTERM), (2, signal.SIGTERM), (2, signal.SIGKILL)])
def test_only_the_worker_that_died_or_was_asked_to_stop_by_somebody_else_is_restarted(
    models: Path, tmp_path: Path, count: int, asked: signal.Signals
) -> None:
    with _workers(count, models, tmp_path) as (supervised, url):
        stopped, *spared = supervised.children()
        stopped.send_signal(asked)
        stopped.wait(60)
        until(lambda: len(supervised.children()) == count)
        assert set(spared) < set(supervised.children())
        assert _logged(tmp_path, "stopped") == (asked is signal.SIGTERM), "gracefully"
        until(lambda: _logged(tmp_path, "died") == 1)
        until(lambda: is_ready(url))


def test_a_worker_that_dies_at_every_start_stops_all(tmp_path: Path) -> None:
    def create_service(_: Metrics) -> Any:
        try:
            (tmp_path / "first").touch(exist_ok=False)
        except FileExistsError:
            raise QuietmaxError("The model is broken.") from None
        time.sleep(60)

    before = psutil.Process().children()
    with socket.socket() as port, pytest.raises(QuietmaxError, match="died several times"):
        supervise(create_service, Listener(), port, Log(io.BytesIO()), 2)
    assert not set(psutil.Process().children()) - set(before)
