"""The public number of records that an estimator's settings are computed from."""

from __future__ import annotations

from numbers import Real

from quietmax.errors import InvalidInput

LARGEST_SIZE = 10**9
"""More than the memory of a machine holds; a fixed number, so that a refusal tells nothing of the records."""


def checked_size(size: int) -> int:
    """The size, unless it cannot be the number of records in a table.

    >>> checked_size(1000)
    1000
    """
    if (
        isinstance(size, bool)
        or not isinstance(size, Real)
        or not 1 <= size <= LARGEST_SIZE
        or size != int(size)
    ):
        raise InvalidInput(
            f"The declared size is {size!r}, but must be a whole number from 1 to {LARGEST_SIZE:,}: give one."
        )
    return int(size)
