"""The supervisor's decisions, with services that end at once: when it starts one again, waits, stops or gives up."""

from __future__ import annotations

import io
import os
import signal
import socket

import pytest

from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.ledger import LedgerUnavailable
from quietmax.server import supervisor
from quietmax.server.logs import Log
from quietmax.server.run import Listening
from quietmax.server.supervisor import open_port, supervise


@pytest.fixture
def starts(tmp_path, monkeypatch):
    """Supervise services that behave as told, one after the other; the number of services that were started.

    A service runs in a process of its own, so that what it did is read off a file.
    """
    monkeypatch.setattr(supervisor, "run", lambda *_: None)
    monkeypatch.setattr(supervisor, "_end_with_parent", lambda _: None)
    record = tmp_path / "starts"
    record.write_bytes(b"")

    def supervised(*behaviours):
        def make():
            number = record.stat().st_size
            with record.open("ab") as file:
                file.write(b".")
            behaviours[number]()

        with socket.socket() as port:
            supervise(make, Listening(), port, Log(io.BytesIO()))
        return record.stat().st_size

    yield supervised
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def _away():
    raise LedgerUnavailable("The ledger is away.")


def _broken():
    raise QuietmaxError("The model is broken.")


def _killed():
    os.kill(os.getpid(), signal.SIGKILL)


def _stop_the_parent():
    os.kill(os.getppid(), signal.SIGTERM)
    _away()


def _well():
    return None


def test_a_service_that_ends_well_is_not_started_again(starts):
    assert starts(_well) == 1


def test_a_service_that_is_killed_is_started_again(starts):
    assert starts(_killed, _well) == 2


def test_a_ledger_that_is_away_is_tried_until_it_is_back_however_often(starts, monkeypatch):
    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE_SECONDS", 0.05)
    assert starts(*[_away] * (supervisor._MOST_FAILURES + 2), _well) == supervisor._MOST_FAILURES + 3


def test_a_service_that_dies_at_every_start_is_given_up(starts, tmp_path):
    with pytest.raises(QuietmaxError, match="died several times right after its start"):
        starts(*[_broken] * 9)
    assert (tmp_path / "starts").stat().st_size == supervisor._MOST_FAILURES


def test_a_service_that_lasted_is_no_failure_at_the_start(starts, monkeypatch):
    monkeypatch.setattr(supervisor, "_AT_LEAST_SECONDS", 0.0)
    assert starts(*[_broken] * 6, _well) == 7


def test_asked_to_stop_it_starts_no_service_again(starts):
    assert starts(_stop_the_parent, _well) == 1


def test_a_port_that_is_taken_is_refused_with_a_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(
            InvalidInput, match=f"cannot listen on 127.0.0.1:{number} .*; choose another port"
        ):
            open_port(Listening(port=number))
