"""A witness: a file at a second place that keeps what it saw of a ledger and of model folders, line by line, signed.

A ledger that was rolled back or forked no longer has rows that the witness saw. A folder of a model that is paid per
answer counts fewer answers than before if an old copy was put back, and lies at two places if it was copied.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quietmax.errors import InvalidInput, LedgerDamaged, QuietmaxError
from quietmax.export.bundle import signed, signing_key
from quietmax.models.serialization import read_description
from quietmax.spending import ACCOUNT_FILE, ACCOUNT_ID, FileAccount


def witness(
    file: Path,
    rows: Iterable[Mapping[str, Any]] | None,
    folders: Iterable[Path],
    *,
    key: Path,
    moved: bool = False,
) -> dict[str, Any]:
    """Compare a ledger's rows and the accounts of folders with what the witness saw; append what it sees now."""
    counts = [_count(folder) for folder in folders]
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        seen = [json.loads(json.loads(line)["content"]) for line in lines]
        heads = [] if rows is None else _heads(rows, [head for each in seen for head in each["heads"]])
        _check_counts(counts, [count for each in seen for count in each["folders"]], moved)
        before = hashlib.sha256(lines[-1].encode()).hexdigest() if lines else ""
        content = {"number": len(lines) + 1, "previous": before, "heads": heads, "folders": counts}
        content["time"] = datetime.now(UTC).isoformat(timespec="seconds")
        entry = json.dumps(signed(content, signing_key(key)))
        with open(file, "a+", encoding="utf-8") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            stream.seek(0)
            if stream.read().splitlines() != lines:
                raise QuietmaxError(f"Another process has just written to {file}: run the command again.")
            stream.write(entry + "\n")
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as problem:
        raise QuietmaxError(f"The witness cannot use {file} ({problem.strerror}).") from problem
    except (ValueError, KeyError, TypeError) as problem:
        if isinstance(problem, QuietmaxError):
            raise
        raise QuietmaxError(f"{file} is not the file of a witness, or it is damaged.") from problem
    return content


def _heads(rows: Iterable[Mapping[str, Any]], seen: list[list[Any]]) -> list[list[Any]]:
    """Return account, number and hash of the last row of each account; raise if a row that was seen is missing."""
    found = {(row["account"], row["sequence"]): row["hash"] for row in rows}
    for account, sequence, digest in seen:
        if found.get((account, sequence)) != digest:
            raise LedgerDamaged(
                f"The ledger went back or was forked: row {sequence} of account {account} is not the one that the "
                "witness saw. Stop serving from it."
            )
    last: dict[int, int] = {}
    for account, sequence in found:
        last[account] = max(sequence, last.get(account, 0))
    return [[account, sequence, found[account, sequence]] for account, sequence in sorted(last.items())]


def _count(folder: Path) -> list[Any]:
    """Return the id of a folder's account, the answers that it counts, and where it lies."""
    identity = read_description(folder).get(ACCOUNT_ID)
    if identity is None:
        raise InvalidInput(
            f"The model in {folder} is not paid per answer, so nothing of it can be spent twice."
        )
    answered = FileAccount(folder / ACCOUNT_FILE, identity=str(identity)).answered
    return [identity, answered, f"{platform.node()}:{folder.resolve()}"]


def _check_counts(counts: list[list[Any]], seen: list[list[Any]], moved: bool) -> None:
    for identity, answered, place in counts:
        for _, before, where in (each for each in seen if each[0] == identity):
            if answered < before:
                raise LedgerDamaged(
                    f"The account in {place} went back: it counted {before} answers in {where}."
                )
            if place != where and not moved:
                raise LedgerDamaged(
                    f"The model in {place} was in {where} before. A copy could be spent twice; `moved` accepts that "
                    "the folder was moved."
                )
