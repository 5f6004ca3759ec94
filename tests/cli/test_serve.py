"""`quietmax serve` until it serves: what it refuses, and what it prints."""

from __future__ import annotations

import json
import shutil
import socket
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from quietmax.cli._output import errors
from quietmax.ledger import Charge, Ledger, Terms
from quietmax.models import Model, TrainingSettings, save_model
from quietmax.models.stacked import initial_mlp
from quietmax.server import run as supervisor
from quietmax.server import telemetry as log
from quietmax.server.telemetry import Metrics
from tests.cli.conftest import Captured, run
from tests.server.running_service import log_schema

ORDINARY = ("--accept-unproven", "--budget", 10, "--queries", 20, "--port", 0)

Serve = Callable[..., tuple[int, str, str, int]]


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the log writes to standard error."""
    pieces: list[bytes] = []
    monkeypatch.setattr(log, "_write_to_stderr", pieces.append)
    return pieces


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Run `serve` with an ordinary model; what would be served is remembered, not served."""
    network = initial_mlp((6, 8, 4), "tanh", (0,))
    save_model(Model(network, TrainingSettings((8,)), 160, "people", 0), Path("plain"))
    served: list[Any] = []
    monkeypatch.setattr(supervisor, "supervise", lambda create, *_: served.append(create))
    monkeypatch.setattr(errors, "_width", 200)

    def call(*options: Any) -> tuple[int, str, str, int]:
        served.clear()
        ended = run("serve", "plain", "--ledger", "ledger.sqlite", *options)
        return *ended, len(served)

    return call


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """The names, bytes and times of all files of a folder, and its own time."""
    files = {
        str(path.relative_to(folder)): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in folder.rglob("*")
    }
    return {**files, "": (b"", folder.stat().st_mtime_ns)}


def test_what_is_served_is_announced_on_a_terminal_with_its_warning_and_the_missing_key(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Captured, "isatty", lambda _: True)
    code, _, err, served = serve(*ORDINARY)
    assert (code, served) == (0, 1)
    assert "Serving on http://127.0.0.1:" in err
    assert "plain/1 (refuted, no protection [---]): account people, 20 answers left" in err
    assert "Create one with: quietmax ledger key create NAME" in err
    with Ledger(Path("ledger.sqlite")) as ledger:
        ledger.create_key("ann")
    _, _, err, _ = serve(*ORDINARY)
    assert "key create" not in err


def test_what_is_served_is_one_line_of_the_log_when_stderr_is_no_terminal(
    serve: Serve, logged: list[bytes]
) -> None:
    code, out, err, served = serve(*ORDINARY, "--grpc-port", 0)
    assert (code, out, err, served) == (0, "", "", 1)
    (line,) = map(json.loads, b"".join(logged).splitlines())
    jsonschema.validate(line, log_schema())
    assert line["event"] == "serving"
    assert line["url"].startswith("http://127.0.0.1:")
    assert line["grpc_port"] > 0
    assert line["ledger"].endswith(str(Path("ledger.sqlite")))
    assert line["served"] == ["plain/1 (refuted, no protection [---]): account people, 20 answers left"]
    warning, key = line["warnings"]
    assert warning.startswith("plain/1: ")
    assert "quietmax ledger key create NAME" in key


def test_what_is_served_is_announced_as_json(serve: Serve) -> None:
    code, out, err, served = serve(*ORDINARY, "--anonymous", "--json")
    assert (code, err, served) == (0, "", 1)
    body = json.loads(out)
    assert body["url"].startswith("http://127.0.0.1:")
    assert body["served"] == ["plain/1 (refuted, no protection [---]): account people, 20 answers left"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*ORDINARY, "--anonymous", "--behind-proxy"), "requires a loopback address"),
        ((*ORDINARY, "--anonymous", "--host", "0.0.0.0", "--behind-proxy"), "requires a loopback address"),
        (("--accept-unproven", "--delta", 1e-5), "--delta requires --budget"),
        ((*ORDINARY, "--because", "They are other people."), "--because requires --account"),
        ((*ORDINARY, "--host", "0.0.0.0"), "without encryption"),
        (("--budget", 10, "--queries", 20), "requires --accept-unproven"),
        (("--accept-unproven",), "--budget is required"),
        (("--accept-unproven", "--budget", "nan"), "--budget must be between 1e-100 and 1e100, got nan."),
        ((*ORDINARY, "--oidc-issuer", "https://login.example.org"), "--oidc-issuer requires --oidc-audience"),
        ((*ORDINARY, "--rate-limit", 0), "must be greater than 0"),
        ((*ORDINARY, "--rate-burst", 5), "--rate-burst requires --rate-limit"),
        ((*ORDINARY, "--tls-key", "k.pem"), "requires both --tls-certificate and --tls-key"),
    ],
)
def test_invalid_options_are_refused_and_open_no_account(
    serve: Serve, options: tuple[Any, ...], message: str
) -> None:
    code, out, err, served = serve(*options)
    assert (code, out, served) == (2, "", 0)
    assert message in err
    if Path("ledger.sqlite").exists():
        with Ledger(Path("ledger.sqlite")) as ledger:
            assert ledger.accounts() == []


def test_an_exhausted_budget_is_announced(serve: Serve, logged: list[bytes], tmp_path: Path) -> None:
    serve(*ORDINARY)
    with Ledger(Path("ledger.sqlite")) as ledger:
        ledger.revoke("people", None, "The study is over.")
    *_, served = serve(f"again={tmp_path / 'plain'}", *ORDINARY)
    assert served == 1
    before, after = b"".join(logged).splitlines()
    assert b"The budget of the account people is exhausted" not in before
    assert after.count(b"The budget of the account people is exhausted") == 1


def test_check_finds_a_valid_configuration_and_writes_nothing(serve: Serve) -> None:
    code, out, err, served = serve(*ORDINARY, "--check")
    assert (code, out, served) == (0, "", 0)
    assert "The configuration is valid." in err
    assert "plain/1 (refuted)" in err
    assert not Path("ledger.sqlite").exists()
    with Ledger(Path("ledger.sqlite")) as ledger:
        ledger.create_key("ann")
    before = Path("ledger.sqlite").read_bytes()
    code, out, err, served = serve(*ORDINARY, "--check", "--json")
    assert (code, err, served) == (0, "", 0)
    found = json.loads(out)
    assert found["served"] == ["plain/1 (refuted)"]
    assert Path("ledger.sqlite").read_bytes() == before
    with Ledger(Path("ledger.sqlite")) as ledger:
        assert ledger.accounts() == []


@pytest.mark.parametrize("state", ["missing", "closed", "without a head file", "in another mode"])
def test_check_leaves_the_folder_of_the_ledger_as_it_is(serve: Serve, state: str) -> None:
    place = Path("state")
    place.mkdir()
    ledger = place / "ledger.sqlite"
    if state != "missing":
        assert serve(*ORDINARY, "--ledger", ledger)[0] == 0
    if state == "without a head file":
        (place / "ledger.sqlite.head").unlink()
    if state == "in another mode":
        with sqlite3.connect(ledger) as connection:
            assert connection.execute("PRAGMA journal_mode=DELETE").fetchone() == ("delete",)
        connection.close()
    before = snapshot(place)
    code, _, err, _ = serve(*ORDINARY, "--ledger", ledger, "--check")
    assert (code, snapshot(place)) == (0, before), err


def test_check_refuses_a_ledger_that_was_rolled_back_and_an_account_that_was_lost(
    serve: Serve, tmp_path: Path
) -> None:
    path, old = Path("ledger.sqlite"), "old.sqlite"
    with Ledger(path) as ledger:
        ledger.create_key("ann")
    shutil.copy(path, old)
    assert serve(*ORDINARY)[0] == 0
    with Ledger(path) as ledger:
        account = ledger.account("people")
        ledger.charge(Charge(account.id, ledger.client("ann"), "plain/1", 1000, rows=1))
    shutil.copy(old, path)
    before = snapshot(tmp_path)
    code, _, err, _ = serve(*ORDINARY, "--check")
    assert (code, snapshot(tmp_path)) == (1, before)
    assert "The ledger has lost charges" in err
    with Ledger(path, accept_loss="the old copy is the newest"):
        pass
    code, _, err, _ = serve(*ORDINARY, "--check")
    assert code == 2
    assert "has lost 1 account," in err
    reason = ("--account", "people", "--because", "The disk was lost.")
    assert serve(*ORDINARY, *reason, "--check")[0] == 0
    assert serve(*ORDINARY)[0] == 2
    assert serve(*ORDINARY, *reason)[0] == 0
    assert serve(*ORDINARY)[0] == 0


def test_a_weak_guarantee_is_served_only_with_a_flag(monkeypatch: pytest.MonkeyPatch, votes: Path) -> None:
    served: list[Any] = []
    monkeypatch.setattr(supervisor, "supervise", lambda create, *_: served.append(create))
    options = (votes, "--budget", 20, "--delta", 1e-5, "--ledger", "new.sqlite", "--port", 0)
    for more in ((), ("--check",)):
        code, _, err = run("serve", *options, *more)
        assert (code, served) == (2, [])
        assert "votes/1 is proven, no protection [---]" in " ".join(err.split())
        assert "requires --accept-weak" in " ".join(err.split())
    code, _, _ = run("serve", *options, "--accept-weak", "--json")
    assert (code, len(served)) == (0, 1)


def test_a_worker_starts_again_after_a_grant_that_makes_the_guarantee_weak(
    monkeypatch: pytest.MonkeyPatch, votes: Path
) -> None:
    served: list[Any] = []
    monkeypatch.setattr(supervisor, "supervise", lambda create, *_: served.append(create))
    assert run("serve", votes, "--ledger", "new.sqlite", "--port", 0, "--json")[0] == 0
    with Ledger(Path("new.sqlite")) as ledger:
        (account,) = ledger.accounts()
        ledger.grant(account.name, Terms(20.0, 1e-5), "The board has allowed it.")
    service = served[0](Metrics())
    assert service.deployments[0].total_guarantee(service.ledger.account(account.name)).strength == "none"
    service.ledger.close()
    assert run("serve", votes, "--ledger", "new.sqlite", "--port", 0)[0] == 2, (
        "the operator decides at the next start"
    )


def test_check_names_what_would_keep_the_service_from_starting(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_width", 400)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err, _ = serve(*ORDINARY[:-1], port, "--check")
        assert (code, f"Cannot listen on 127.0.0.1:{port}" in err) == (2, True)
    wrong = {
        "requires --accept-unproven": ("--budget", 10, "--queries", 20),
        "There is no file": (*ORDINARY, "--tls-key", "absent.pem", "--tls-certificate", "absent.pem"),
        "Only one of --ledger and --ledger-file": (*ORDINARY, "--ledger-file", "secret"),
        "must be a directory": (*ORDINARY, "--repository", "absent"),
    }
    for message, options in wrong.items():
        code, _, err, served = serve(*options, "--check")
        assert (code, served, message in err) == (2, 0, True), err
    model, unreachable = Path("plain"), "postgresql://ann:word@127.0.0.1:1/x"
    code, _, err = run("serve", model, *ORDINARY, "--ledger", unreachable, "--check")
    assert (code, "is not available" in err, "word" in err) == (1, True, False)
    Path("file").write_text("")
    code, _, err = run("serve", model, *ORDINARY, "--ledger", "file/ledger.sqlite", "--check")
    assert (code, "is not a writable folder" in err) == (1, True)
    Path("text.sqlite").write_text("This is not a database, but a long text. " * 100)
    code, _, err = run("serve", model, *ORDINARY, "--ledger", "text.sqlite", "--check")
    assert (code, "not a database" in err) == (1, True)
