"""Where the service listens."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import httpx
import pytest

from quietmax.errors import InvalidInput
from quietmax.server.run import Listener
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
