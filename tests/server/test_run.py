"""Where the service listens, and how it stops."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from quietmax.errors import InvalidInput
from quietmax.server.settings import Listener
from tests.server.running_service import inference, running, some_rows


def test_anonymous_or_unencrypted_service_beyond_loopback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"API keys would be sent to 0\.0\.0\.0 without encryption"):
        Listener(host="0.0.0.0")
    with pytest.raises(InvalidInput, match="Anonymous access requires a loopback address"):
        Listener(host="0.0.0.0", behind_proxy=True).check_anonymous()
    with pytest.raises(InvalidInput, match="Anonymous access requires a loopback address"):
        Listener(behind_proxy=True).check_anonymous()
    with pytest.raises(InvalidInput, match="requires both `tls_certificate` and `tls_key`"):
        Listener(tls_certificate=tmp_path / "c.pem")
    with pytest.raises(InvalidInput, match="There is no file"):
        Listener(tls_certificate=tmp_path / "c.pem", tls_key=tmp_path / "k.pem")
    Listener().check_anonymous()
    assert Listener(host="0.0.0.0", behind_proxy=True).secure_cookies
    assert not Listener().secure_cookies


def test_with_a_certificate_the_service_speaks_tls_and_nothing_else(
    models: Path, tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    with running(
        f"sqlite:///{tmp_path / 'ledger.sqlite'}", [f"head={models / 'head'}"], tls=certificate
    ) as service:
        trusted = ssl.create_default_context(cafile=certificate[0])
        assert httpx.get(f"{service.url}/v2/health/ready", verify=trusted, timeout=120).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{service.url.replace('https', 'http')}/v2/health/ready", timeout=120)


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(
            InvalidInput, match=rf"Cannot listen on 127.0.0.1:{number} \(Address already in use\)"
        ):
            Listener(port=number).open_socket()


def test_a_file_that_is_no_certificate_is_refused_at_once(tmp_path: Path) -> None:
    for name in ("certificate", "key"):
        (tmp_path / name).write_text("nothing of the kind")
    with pytest.raises(InvalidInput, match="must be a PEM certificate and its private key"):
        Listener("127.0.0.1", 0, tmp_path / "certificate", tmp_path / "key")


def test_a_certificate_that_becomes_broken_stays_in_use_as_it_was(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    files = tuple(shutil.copy(file, tmp_path) for file in certificate)
    listener = Listener("127.0.0.1", 0, *map(Path, files))
    context = listener.ssl_context
    assert context is not None
    Path(files[0]).write_text("nothing of the kind")
    with pytest.raises(InvalidInput, match="must be a PEM certificate"):
        listener.load_certificate()
    assert listener.ssl_context is context


_STOPPED = """
import asyncio, os, signal, socket, sys, threading, time
from pathlib import Path
from quietmax.ledger import Ledger
from quietmax.server import Service, Settings
from quietmax.server.deployment import deploy
from quietmax.server.repository import load_models
from quietmax.server.run import run
from quietmax.server.settings import Listener

folder, signals = Path(sys.argv[1]), int(sys.argv[2])
ledger = Ledger(folder / "ledger.sqlite")
service = Service(ledger, deploy(ledger, load_models([str(folder / "head")])), Settings(anonymous=True, timeout=60))
listener = Listener(port=0)
opened = listener.open_socket()
address = opened.getsockname()

async def never(*_):
    await asyncio.sleep(600)

def stop():
    head = b"POST /v2/models/head/infer HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: 2\\r\\n\\r\\n"
    slow_body, slow_head = socket.create_connection(address), socket.create_connection(address)
    slow_body.sendall(head.replace(b"/v2/models/head/infer", b"/login"))
    slow_head.sendall(head[:20])
    if signals == 2:
        service.auth.authenticate = never
        in_flight = socket.create_connection(address)
        in_flight.sendall(head + b"{}")
    time.sleep(0.5)
    print(time.monotonic(), flush=True)
    for _ in range(signals):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
    time.sleep(600)

threading.Thread(target=stop, daemon=True).start()
run(service, listener, opened)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("signals", "code"), [(1, 0), (2, 128 + signal.SIGTERM)])
def test_unfinished_requests_do_not_delay_a_stop_and_a_second_signal_stops_at_once(
    models: Path, tmp_path: Path, signals: int, code: int
) -> None:
    (tmp_path / "head").symlink_to(models / "head")
    process = subprocess.Popen(
        [sys.executable, "-c", _STOPPED, str(tmp_path), str(signals)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == code
        assert time.monotonic() - float(out) < 10, "15 seconds is what requests in flight are given"
    finally:
        process.kill()
        process.wait()


_SERVE_ONE_REQUEST = """
import sys, urllib.request
from quietmax.ledger.ledger import Ledger
from quietmax.server.deployment import deploy
from quietmax.server.repository import load_models
from quietmax.server.run import run_in_thread
from quietmax.server.service import Service
from quietmax.server.settings import Settings

ledger = Ledger(sys.argv[2])
service = Service(ledger, deploy(ledger, load_models([f"head={sys.argv[1]}"])), Settings(anonymous=True))
with run_in_thread(service) as url:
    request = urllib.request.Request(f"{url}/v2/models/head/infer", sys.argv[3].encode())
    assert urllib.request.urlopen(request, timeout=60).status == 200
print([name for name in sys.argv[4:] if name in sys.modules])
"""


def test_serving_a_head_imports_no_library_of_training_of_tables_or_of_pages(
    models: Path, tmp_path: Path
) -> None:
    heavy = ["torch", "sklearn", "scipy.stats", "pandas", "pyarrow", "matplotlib", "dp_accounting"]
    heavy += ["scipy.optimize", "jinja2", "grpc"]
    body = json.dumps(inference(some_rows(3)))
    done = subprocess.run(
        [sys.executable, "-c", _SERVE_ONE_REQUEST, models / "head", tmp_path / "l.sqlite", body, *heavy],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
