"""Where the service listens, and when its supervisor restarts it, waits, stops or gives up."""

from __future__ import annotations

import io
import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quietmax.errors import InvalidInput, LedgerUnavailable, QuietmaxError
from quietmax.server import run as supervisor
from quietmax.server.metrics import Log
from quietmax.server.run import Listener, supervise
from tests.server.running_service import (
    running,
)


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
        def create_service() -> Any:
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


def test_a_service_that_ends_normally_is_not_restarted(starts: Callable[..., int]) -> None:
    assert starts(_ended) == 1


def test_a_killed_service_is_restarted(starts: Callable[..., int]) -> None:
    assert starts(_killed, _ended) == 2


def test_a_service_whose_ledger_is_down_is_restarted_until_it_is_back(
    starts: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_MAX_RESTART_DELAY", 0.05)
    assert starts(*[_ledger_down] * (supervisor._MAX_FAILURES + 2), _ended) == supervisor._MAX_FAILURES + 3


def test_a_service_that_dies_at_every_start_is_given_up(starts: Callable[..., int], tmp_path: Path) -> None:
    with pytest.raises(QuietmaxError, match="died several times right after its start"):
        starts(*[_broken] * 9)
    assert (tmp_path / "starts").stat().st_size == supervisor._MAX_FAILURES


def test_a_service_that_ran_for_a_while_does_not_count_as_failed_at_its_start(
    starts: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_MIN_UPTIME", 0.0)
    assert starts(*[_broken] * 6, _ended) == 7


def test_a_supervisor_that_is_asked_to_stop_restarts_nothing(starts: Callable[..., int]) -> None:
    assert starts(_stop_the_parent, _ended) == 1


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
