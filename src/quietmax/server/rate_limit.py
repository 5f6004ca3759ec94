"""Rate limits per client or address: so many requests a second on average, and a burst."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable

from quietmax.server.errors import HttpError

_MAX_CLIENTS = 65_536


class RateLimiter:
    """Limits the requests of each client, by one number for each: when its last request would end at the full rate.

    A client whose time is past has its whole burst again and needs no memory. Of very many busy clients, the half that
    waited longest is forgotten, which only gives it its burst again.
    """

    def __init__(
        self, rate: float, burst: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = rate
        self._interval = 1 / rate
        self._tolerance = ((burst or max(math.floor(rate), 1)) - 1) * self._interval
        self._clock = clock
        self._busy_until: dict[Hashable, float] = {}

    def remaining_wait(self, client: Hashable) -> float:
        """Return 0 if a request is within the limit now, else the seconds until it would be. Nothing is counted."""
        now = self._clock()
        wait = self._busy_until.get(client, now) - now - self._tolerance
        return wait if wait > 1e-9 else 0.0

    def wait(self, client: Hashable) -> float:
        """Count a request; return 0 if it is within the limit, else the seconds until one would be."""
        wait = self.remaining_wait(client)
        if wait:
            return wait
        now = self._clock()
        if len(self._busy_until) >= _MAX_CLIENTS and client not in self._busy_until:
            self._forget(now)
        self._busy_until[client] = max(self._busy_until.get(client, now), now) + self._interval
        return 0.0

    def check(self, client: Hashable) -> None:
        """Count a request."""
        wait = self.wait(client)
        if wait > 0:
            raise HttpError(
                429,
                f"Too many requests: a client may send {self._rate:g} per second. Nothing was charged.",
                headers={"retry-after": str(math.ceil(wait))},
            )

    def _forget(self, now: float) -> None:
        """Forget the clients that have their burst again, or else the half that has it soonest."""
        busy = {client: until for client, until in self._busy_until.items() if until > now}
        if len(busy) >= _MAX_CLIENTS:
            latest = sorted(busy, key=busy.__getitem__)[len(busy) // 2 :]
            busy = {client: busy[client] for client in latest}
        self._busy_until = busy
