"""A parent process that starts the service again when it dies.

The parent imports everything, reads the models and opens the port once; the service runs in a fork of it. Should the
service be killed or crash, a new fork is ready in a fraction of a second, instead of the seconds that imports take, and
connections wait in the meantime. The parent itself never opens the ledger while a service runs. A ledger that is away
when the service starts again is tried until it is back; a service that fails otherwise at every start is given up.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.ledger import LedgerUnavailable
from quietmax.server.logs import Log
from quietmax.server.run import Listening, run
from quietmax.server.service import Service

_STOPPING = (signal.SIGINT, signal.SIGTERM)
_AT_LEAST_SECONDS = 2.0
_MOST_FAILURES = 3
_LEDGER_AWAY = 75
_LONGEST_PAUSE_SECONDS = 5.0
_BACKLOG = 2048
_SIGNAL_AT_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG of Linux


def open_port(listening: Listening) -> socket.socket:
    """The listening socket, or one sentence why there is none."""
    family = socket.AF_INET6 if ":" in listening.host else socket.AF_INET
    port = socket.socket(family)
    try:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind((listening.host, listening.port))
        port.listen(_BACKLOG)
    except OSError as problem:
        port.close()
        raise InvalidInput(
            f"The service cannot listen on {listening.host}:{listening.port} ({problem.strerror}); choose another port."
        ) from problem
    return port


def supervise(make: Callable[[], Service], listening: Listening, port: socket.socket, log: Log) -> None:
    """Run the service that `make` builds in a child process, again whenever it dies, until asked to stop."""
    parent = _Parent()
    failures = 0
    number = os.getpid()
    with parent:
        while True:
            started = time.monotonic()
            child = os.fork()
            if child == 0:
                parent.restore()
                _serve(make, listening, port, number)
            code = parent.wait_for(child)
            if code == 0 or parent.asked_to_stop:
                return
            lasted = time.monotonic() - started
            failures = failures + 1 if lasted < _AT_LEAST_SECONDS else 0
            log.event("died", code=code, seconds=round(lasted, 2))
            if code == _LEDGER_AWAY:
                parent.pause(min(0.1 * 2 ** min(failures, 8), _LONGEST_PAUSE_SECONDS))
                if parent.asked_to_stop:
                    return
            elif failures >= _MOST_FAILURES:
                raise QuietmaxError(
                    "The service died several times right after its start; see the log for why."
                )


def _serve(make: Callable[[], Service], listening: Listening, port: socket.socket, parent: int) -> None:
    """The child: serve, and end without returning into the parent's code."""
    code = 1
    try:
        _end_with_parent(parent)
        run(make(), listening, port)
        code = 0
    except LedgerUnavailable as problem:
        code = _LEDGER_AWAY
        sys.stderr.write(f"quietmax: {problem}\n")
    except QuietmaxError as refusal:
        sys.stderr.write(f"quietmax: {refusal}\n")
    except BaseException as problem:
        sys.stderr.write(f"quietmax: the service failed ({type(problem).__name__})\n")
    finally:
        sys.stderr.flush()
        os._exit(code)


def _end_with_parent(parent: int) -> None:
    """Ask the system to stop this process when the parent is gone; only Linux can, elsewhere it goes on alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)


class _Parent:
    """The parent's signals: asked to stop, it asks the child to stop and waits for it."""

    def __init__(self) -> None:
        self.asked_to_stop = False
        self._child = 0
        self._before = {number: signal.getsignal(number) for number in _STOPPING}

    def __enter__(self) -> None:
        for number in _STOPPING:
            signal.signal(number, self._stop)

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Put the signals back as they were."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait_for(self, child: int) -> int:
        """The child's exit code; negative if a signal ended it."""
        self._child = child
        if self.asked_to_stop:
            os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        self._child = 0
        return os.waitstatus_to_exitcode(status)

    def pause(self, seconds: float) -> None:
        """Wait, but no longer than until asked to stop."""
        end = time.monotonic() + seconds
        while not self.asked_to_stop and time.monotonic() < end:
            time.sleep(0.02)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.asked_to_stop = True
        if self._child:
            os.kill(self._child, signal.SIGTERM)
