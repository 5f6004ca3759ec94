"""One torch thread per operation, and several operations at once."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Result = TypeVar("Result")


_lock = threading.Lock()
_users: list[int] = []
"""The number of threads that torch had before, once for each user of `_single_threaded_torch`."""


@contextmanager
def _single_threaded_torch() -> Iterator[int]:
    """Use torch with one thread per operation; yields the number of threads it had, which the last user restores."""
    if "torch" not in sys.modules:
        yield thread_count()
        return
    import torch

    with _lock:
        before = _users[0] if _users else torch.get_num_threads()
        torch.set_num_threads(1)
        _users.append(before)
    try:
        yield before
    finally:
        with _lock:
            _users.pop()
            if not _users:
                torch.set_num_threads(before)


def thread_count() -> int:
    """Return how many threads torch uses, or would use: importing it takes a second."""
    if "torch" in sys.modules:
        import torch

        return torch.get_num_threads()
    stated = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return max(1, int(stated)) if stated.isdecimal() else usable_cores()


def usable_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parallel_map(work: Callable[[int], Result], count: int) -> list[Result]:
    """Return `[work(0), ..., work(count - 1)]`, computing as many at once as torch has threads.

    Torch splits every operation among its threads. For many small operations that costs more than it gains. Here
    torch uses one thread per operation, and its number of threads is used for whole calls of `work` instead.
    """
    with _single_threaded_torch() as threads:
        if threads == 1 or count <= 1:
            return [work(piece) for piece in range(count)]
        with ThreadPoolExecutor(min(threads, count)) as pool:
            return list(pool.map(work, range(count)))
