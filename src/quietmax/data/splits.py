"""Division of records into a training part, a test part of equal size and a pool.

Rows are ordered by a number mixed from (identity, seed), never by their row number.  The first `size` are the
training part, the next `size` the test part.  Rows of one identity (by default: equal features) form a group, and a
group goes, in order, to the first part that has room for all of it.

A guarantee speaks of neighbours of the *training part*.  The place of a row also depends on how many rows stand
before it, so for neighbours of the source table less holds.  Take one row out of the source:

- If every identity occurs once in the table, the training part loses at most one row and gains at most one, also
  where `size` is left out.  This counts as one removal and one addition: mu (or a pure epsilon) doubles.
- If `size` is given and no identity has more than g rows, the training part loses as many rows as it gains, at
  most g.  Proof: the orders of the two tables agree.  Up to the first group that only one of them takes into the
  training part, their free room differs by at most one.  That group has at most g rows, so the room left there is
  below g, and all later changes fill that room.  mu is multiplied by up to 2g.
- If `size` is left out and identities repeat, nothing is claimed: the size itself is then lowered until both parts
  can be filled, and one row can change it by many.

With an identifier column the same holds with "identifier" for "identity".  The number g is a property of the private
table: use it only where it is public that no identity occurs more often.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quietmax.data.records import GOLDEN, Records, Split, scrambled
from quietmax.errors import InvalidInput

_DEFAULT_SHARE = (2, 5)


def split(records: Records, *, size: int | None = None, seed: int = 0) -> Split:
    """Divide the records into `size` for training, `size` for testing and a pool of all others.

    Without `size`, training and test part take two fifths each.  Copies of one record stay on the same side.

    >>> points = Records("points", np.arange(10, dtype=np.float32)[:, None], np.arange(10) % 2, classes=2)
    >>> parts = split(points, size=4, seed=7)
    >>> len(parts.train), len(parts.test), len(parts.pool)
    (4, 4, 2)
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InvalidInput(
            f"The seed is {seed!r}, but it must be a whole number from 0 upwards; give such a number."
        )
    count = len(records)
    wanted = count * _DEFAULT_SHARE[0] // _DEFAULT_SHARE[1] if size is None else size
    if isinstance(wanted, bool) or not isinstance(wanted, int | np.integer) or wanted < 1:
        raise InvalidInput(
            f"Training and test part would have {wanted!r} records each of the {count} of '{records.name}', "
            "but at least 1 is needed; ask for another number of records."
        )
    if 2 * wanted > count:
        raise InvalidInput(
            f"'{records.name}' has {count} records, but {wanted} for training and as many others for "
            f"testing were asked for; ask for at most {count // 2}."
        )
    groups = _groups_in_order(records, int(seed))
    while True:
        train, test, pool = _fill(groups, int(wanted), count)
        reached = min(len(train), len(test))
        if reached == wanted:
            return Split(records, train, test, pool, int(seed))
        if size is not None or reached == 0:
            raise InvalidInput(
                f"'{records.name}' holds so many copies of the same records that two parts of {wanted} "
                "cannot be filled without putting copies of one record on both sides; ask for fewer, or "
                "name an identifier column if these are different records."
            )
        wanted = reached


def _groups_in_order(records: Records, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all rows, copies of one record next to each other, and the sizes of these groups."""
    identities = records.identities if records.identities is not None else records.contents
    keys = scrambled(scrambled(identities) + np.uint64((seed * int(GOLDEN)) % 2**64))
    rows = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[rows], prepend=~keys[rows[:1]]))
    return rows.astype(np.int64), np.diff(starts, append=len(rows)).astype(np.int64)


def _fill(
    groups: tuple[NDArray[np.int64], NDArray[np.int64]], size: int, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Give each group, in order, to the first part that has room for all of it."""
    rows, sizes = groups
    if len(sizes) == count:
        return rows[:size], rows[size : 2 * size], rows[2 * size :]
    room = [size, size, count]
    part_of_group = np.empty(len(sizes), dtype=np.int64)
    for group, members in enumerate(sizes.tolist()):
        part = 0 if members <= room[0] else 1 if members <= room[1] else 2
        room[part] -= members
        part_of_group[group] = part
    part_of_row = np.repeat(part_of_group, sizes)
    return rows[part_of_row == 0], rows[part_of_row == 1], rows[part_of_row == 2]
