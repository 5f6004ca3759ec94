"""The memory that request bodies take, over HTTP and gRPC together.

The limit on one body bounds nothing by itself: very many clients may send one at the same time.
"""

from __future__ import annotations

BODIES_FULL = "The service holds too many request bodies. Send the request again later. Nothing was charged."
"""What a client is told whose body does not fit. The status is 503."""
MAX_CONTROL_BYTES = 2**16
"""Largest body of a request that holds no rows."""


class BodyMemory:
    """Counts the bytes of all request bodies that a process holds.

    A body counts from its first byte until its request has ended, also if its client has gone.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def fits(self, size: int) -> bool:
        """Return whether so many more bytes are within the limit."""
        return self.held + size <= self.limit

    def hold(self, size: int) -> None:
        """Count bytes that are held from now on."""
        self.held += size

    def release(self, size: int) -> None:
        """Count bytes that are no longer held."""
        self.held -= size
