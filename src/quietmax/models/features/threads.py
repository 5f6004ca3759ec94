"""Independent pieces of work side by side, each on one thread.

Torch splits every operation among its threads. For many small operations that costs more than it gains, and on a busy
machine, where threads wait for one another, far more. Here torch is held to one thread per operation and its number
of threads is used for whole pieces instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")


class _Threads:
    """Counts who holds torch to one thread, and restores its number of threads when the last one is done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 1

    @contextmanager
    def held(self) -> Iterator[int]:
        """Torch with one thread per operation; yields the number of threads it had."""
        with self._lock:
            if self._users == 0:
                self._before = torch.get_num_threads()
                torch.set_num_threads(1)
            self._users += 1
            before = self._before
        try:
            yield before
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    torch.set_num_threads(self._before)


_THREADS = _Threads()


def side_by_side(work: Callable[[int], Result], pieces: int) -> list[Result]:
    """`[work(0), ..., work(pieces - 1)]`, as many at once as torch has threads.

    >>> side_by_side(lambda piece: piece * piece, 4)
    [0, 1, 4, 9]
    """
    with _THREADS.held() as threads:
        if threads == 1 or pieces <= 1:
            return [work(piece) for piece in range(pieces)]
        with ThreadPoolExecutor(min(threads, pieces)) as pool:
            return list(pool.map(work, range(pieces)))
