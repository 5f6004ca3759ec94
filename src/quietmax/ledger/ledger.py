"""The ledger: budgets that outlive the process and cannot be overspent, in SQLite or PostgreSQL."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

from sqlalchemy import Connection, select, text

from quietmax.accounting.costs import Cost
from quietmax.errors import QuietmaxError
from quietmax.ledger import accounts as _accounts
from quietmax.ledger import api_keys as _keys
from quietmax.ledger import verify as _verify
from quietmax.ledger.accounts import AccountState, Subaccount, Terms
from quietmax.ledger.answer_cache import KEY_BYTES
from quietmax.ledger.api_keys import ApiKey, Role
from quietmax.ledger.database import default_url, journal, meta, migrate, opened, reading, shown, writing
from quietmax.ledger.journal import JournalEntry
from quietmax.ledger.transactions import (
    Charge,
    Charged,
    ChargeResult,
    Failed,
    LimitExceeded,
    NewAnswers,
    StoredAnswer,
)
from quietmax.ledger.verify import Verification
from quietmax.ledger.writer import ChargeDone, LedgerWriter, Place, StoreDone

Told = TypeVar("Told")
_PULSE_BYTES = 2**17
"""Twice as many letters are more than what a group of charges usually writes: a disk that takes them takes charges."""
_PULSE = text(
    "INSERT INTO meta (name, value) VALUES ('pulse', :value) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
)
_SECRET_BYTES = 32
TRAINING_CLIENT = "training"
"""The client who is charged for what training itself spent."""


@dataclass(frozen=True)
class SpendingPoint:
    """What was spent at a moment (microseconds since 1970)."""

    time: int
    spent_units: int


class Ledger:
    """Accounts, clients, keys and the journal. Safe to share between threads; several processes may open the same.

    >>> import tempfile
    >>> from quietmax.accounting import PureCost
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Ledger(Path(folder.name) / "ledger.sqlite") as ledger:
    ...     account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
    ...     client = ledger.client("ann")
    ...     charge = Charge(account.id, client, "model/1", account.units(PureCost(0.4)), rows=1)
    ...     [type(ledger.charge(charge)).__name__ for _ in range(3)]
    ['Charged', 'Charged', 'LimitExceeded']
    """

    def __init__(self, address: str | Path | None = None) -> None:
        self._engine = opened(default_url() if address is None else address)
        migrate(self._engine)
        with reading(self._engine) as connection:
            known = {row.name: row.value for row in connection.execute(select(meta))}
        self._salt, self.session_secret = _secret(known, "query_salt"), _secret(known, "session_secret")
        self._place = Place(self._engine)
        self._writer: LedgerWriter | None = None
        self._starting = threading.Lock()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what waits and let go of the database."""
        if self._writer is not None:
            self._writer.close()
        self._engine.dispose()

    @property
    def address(self) -> str:
        """Where it lies, without a password."""
        return shown(self._engine.url)

    @property
    def writer(self) -> LedgerWriter:
        """The writing thread; started on first use."""
        with self._starting:
            if self._writer is None:
                self._writer = LedgerWriter(self._engine, self._place)
            return self._writer

    # Charges

    def submit_charge(self, charge: Charge, done: ChargeDone) -> None:
        """Charge with the next group; `done` is called from the writing thread, after the flush."""
        self.writer.charge(charge, done)

    def submit_answers(self, store: NewAnswers, done: StoreDone) -> None:
        """Store answers with the next group."""
        self.writer.store(store, done)

    def charge(self, charge: Charge) -> ChargeResult:
        """Charge and wait until it is durable."""
        waiter: _Waiter[ChargeResult] = _Waiter()
        self.submit_charge(charge, waiter)
        return waiter.outcome()

    def store_answers(self, store: NewAnswers) -> StoredAnswer:
        """Store answers and wait."""
        waiter: _Waiter[StoredAnswer | Failed] = _Waiter()
        self.submit_answers(store, waiter)
        kept = waiter.outcome()
        if isinstance(kept, Failed):
            raise kept.error
        return kept

    def charge_training(
        self, account: AccountState, model: str, digest: str, cost: Cost | Literal["all"]
    ) -> None:
        """Charge, once for each model, what its training spent; refuse a model that the budget does not pay for.

        A model that takes all of the account is the only one it ever pays for: nothing can be granted afterwards.
        """
        if cost == "all":
            with self._writing() as connection:
                _accounts.take_alone(connection, account, model, digest)
            units = self.account(account.name).limit_units
        else:
            units = account.units(cost)
        request = hashlib.sha256(f"training {account.id} {digest}".encode()).digest()
        outcome = self.charge(
            Charge(
                account.id,
                self.client(TRAINING_CLIENT),
                model,
                units,
                rows=1,
                request=request,
                kind="training",
            )
        )
        if isinstance(outcome, LimitExceeded):
            raise QuietmaxError(
                f"Training the model {model} spent more than what is left of the account {account.name!r}; "
                "it cannot be served unless an administrator raises the budget with 'quietmax ledger grant'."
            )
        if isinstance(outcome, Failed):
            raise outcome.error
        if isinstance(outcome, Charged):
            self.store_answers(NewAnswers(request=request, answer=b"trained"))

    # Hashes

    def request_key(self, client: int, request_id: str) -> bytes:
        """What the ledger keeps of a request id: ids of different clients never meet."""
        return self._keyed(b"request %d " % client + request_id.encode(), 32)

    def query_key(self, model_digest: bytes, query: bytes) -> bytes:
        """What the ledger keeps of a query to a model version."""
        return self._keyed(model_digest + query, KEY_BYTES)

    def _keyed(self, content: bytes, size: int) -> bytes:
        return hashlib.blake2b(content, key=self._salt, digest_size=size).digest()

    # Administration

    def open_account(
        self,
        name: str,
        total: Cost,
        terms: Terms,
        *,
        digest: str | None = None,
        named_by_owner: bool = False,
        because: str | None = None,
    ) -> AccountState:
        """The account of a training set, opened if it is new."""
        with self._writing() as connection:
            return _accounts.open_account(
                connection,
                name,
                total,
                terms,
                digest=digest,
                named_by_owner=named_by_owner,
                because=because,
            )

    def find_account(self, name: str, digest: str | None = None) -> AccountState | None:
        """The account of that digest, else of that name, if there is one."""
        _accounts.checked_name(name, "account")
        with reading(self._engine) as connection:
            bound = None if digest is None else _accounts.by_digest(connection, digest)
            return bound or _accounts.by_name(connection, name)

    def account(self, name: str) -> AccountState:
        """The account of that name."""
        with reading(self._engine) as connection:
            return _accounts.named(connection, name)

    def accounts(self) -> list[AccountState]:
        """All accounts."""
        with reading(self._engine) as connection:
            return _accounts.all_of(connection)

    def subaccounts(self, account: AccountState) -> list[Subaccount]:
        """The clients' parts of an account."""
        with reading(self._engine) as connection:
            return _accounts.parts_of(connection, account.id)

    def client(self, name: str) -> int:
        """The number of a client, created if new."""
        with self._writing() as connection:
            _accounts.locked_keys_book(connection)
            return _accounts.client_id(connection, name, create=True)

    def grant(self, account: str, terms: Terms, because: str) -> AccountState:
        """Set an account's whole budget."""
        with self._writing() as connection:
            return _accounts.grant(connection, account, terms, because)

    def set_quota(self, account: str, client: str, share: float | None, because: str) -> AccountState:
        """Limit a client to a share of an account."""
        with self._writing() as connection:
            return _accounts.set_quota(connection, account, client, share, because)

    def revoke(self, account: str, client: str | None, because: str) -> AccountState:
        """Take back what is unspent."""
        with self._writing() as connection:
            return _accounts.revoke(connection, account, client, because)

    def note_unproven(self, account: AccountState, model: str, status: str) -> None:
        """Write down that a model without proven guarantee answers from an account."""
        with self._writing() as connection:
            _accounts.note_unproven(connection, account, model, status)

    def unproven_models(self, account: AccountState) -> list[tuple[str, str]]:
        """Models without proven guarantee that ever answered from an account, with their status."""
        with reading(self._engine) as connection:
            return _accounts.unproven_models(connection, account.id)

    def create_key(self, client: str, role: Role = "client", days: float | None = None) -> tuple[str, ApiKey]:
        """A new key, to be shown once."""
        with self._writing() as connection:
            return _keys.create_key(connection, client, role, days)

    def revoke_key(self, number: str) -> ApiKey:
        """End a key."""
        with self._writing() as connection:
            return _keys.revoke_key(connection, number)

    def keys(self) -> list[ApiKey]:
        """All keys."""
        with reading(self._engine) as connection:
            found = _keys.all_keys(connection)
        for key in found:
            texts, numbers = (key.id, key.role, key.secret_hash), (key.created, key.expires, key.revoked)
            if not (
                all(isinstance(each, str) for each in texts)
                and all(each is None or isinstance(each, int) for each in numbers)
            ):
                raise _accounts.damaged(f"The key {key.id!r} cannot be read")
        return found

    # Looking

    def ping(self) -> None:
        """Raise `LedgerUnavailable` unless the database answers; after a failed write, unless it can be written."""
        writer = self.writer
        if writer.error is None:
            self._place.check()
            with reading(self._engine) as connection:
                connection.execute(text("SELECT 1"))
        else:
            with self._writing() as connection:
                connection.execute(_PULSE, {"value": secrets.token_hex(_PULSE_BYTES)})
            writer.error = None

    def spending_history(self, account: AccountState, points: int = 120) -> list[SpendingPoint]:
        """What was spent over time: the account's rows, thinned out evenly."""
        last = account.sequence
        wanted = sorted({max(1, round(last * step / points)) for step in range(points + 1)}) if last else []
        with reading(self._engine) as connection:
            rows = connection.execute(
                select(journal.c.time, journal.c.spent_units)
                .where(journal.c.account == account.id, journal.c.sequence.in_(wanted))
                .order_by(journal.c.sequence)
            )
            return [SpendingPoint(*row) for row in rows]

    def export(self, account: str | None = None) -> Iterator[JournalEntry]:
        """The journal, row by row."""
        with reading(self._engine, snapshot=True) as connection:
            number = None if account is None else _accounts.named(connection, account).id
            for entry in _verify.entries(connection, number):
                if entry.misfits:
                    raise _accounts.damaged(
                        f"Row {entry.sequence!r} of the journal of account {entry.account!r} cannot be read"
                    )
                yield entry

    def verify(self, anchors: Mapping[str, tuple[int, str]] | None = None) -> Verification:
        """Recompute everything from the journal."""
        with reading(self._engine, snapshot=True) as connection:
            return _verify.verify(connection, anchors)

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        self._place.check()
        with writing(self._engine) as connection:
            yield connection


def _secret(known: Mapping[str, str], name: str) -> bytes:
    """A secret that the ledger made for itself when it was created."""
    try:
        secret = bytes.fromhex(known[name])
    except (KeyError, TypeError, ValueError):
        secret = b""
    if len(secret) != _SECRET_BYTES:
        raise _accounts.damaged(f"The ledger's {name} is missing or was changed")
    return secret


class _Waiter(Generic[Told]):
    """Is told an outcome by the writing thread, and waits for it in another."""

    def __init__(self) -> None:
        self._ready = threading.Event()

    def __call__(self, outcome: Told) -> None:
        self._outcome = outcome
        self._ready.set()

    def outcome(self) -> Told:
        """What was told."""
        self._ready.wait()
        return self._outcome
