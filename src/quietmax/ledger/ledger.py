"""The ledger: budgets that outlive the process and cannot be overspent, in SQLite or PostgreSQL."""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import Connection, select, text

from quietmax.accounting.costs import LIMIT, Cost, GaussianCost, delta_of
from quietmax.errors import InvalidInput, LedgerDamaged, LedgerUnavailable, QuietmaxError
from quietmax.ledger import accounts as _accounts
from quietmax.ledger import api_keys as _api_keys
from quietmax.ledger import verify as _verify
from quietmax.ledger.accounts import AccountState, Subaccount, Terms
from quietmax.ledger.answer_cache import KEY_BYTES
from quietmax.ledger.api_keys import ApiKey, Role
from quietmax.ledger.database import (
    Cursor,
    accounts,
    default_url,
    hide_password,
    is_migrated,
    journal,
    meta,
    migrate,
    open_engine,
    parse_url,
    read_transaction,
    requests,
    snapshot_transaction,
    write_transaction,
)
from quietmax.ledger.heads import Head, HeadFile, head_path, read_heads, record_loss
from quietmax.ledger.journal import JournalEntry
from quietmax.ledger.transactions import (
    Charge,
    Charged,
    ChargeResult,
    Failed,
    LimitExceeded,
    NewAnswers,
    Part,
    Pruned,
    StoredAnswer,
    prune,
    spent_by_part,
)
from quietmax.ledger.verify import Anchor, Verification
from quietmax.ledger.writer import AnswersCallback, ChargeCallback, ChargesCallback, FileGuard, LedgerWriter

TRAINING_CLIENT = "training"
"""The client that is charged for what training and evaluations spent."""
_SECRET_BYTES = 32
_MAX_HASHED = 2047
"""Bytes to hash at once: hashlib would release the interpreter lock for more, and wait to get it back."""
_FIXED_NONCE = bytes(12)
_HISTORY_POINTS = 120
_PROBE_BYTES = 2**17
"""The size of a write that tests the disk. Its text is twice as long, more than a batch of charges usually writes."""
_WRITE_PROBE = text(
    "INSERT INTO meta (name, value) VALUES ('write_probe', :value)"
    " ON CONFLICT (name) DO UPDATE SET value = excluded.value"
)


@dataclass(frozen=True)
class SpendingPoint:
    """What was spent from an account at one time."""

    time: int  # Microseconds since 1970
    spent_units: int  # The balance


class Ledger:
    """Accounts, clients, API keys and the journal.

    Threads can share a ledger, and several processes can open the same one.

    Parameters
    ----------
    address : str or Path, optional
        A SQLite file (a path or ``sqlite:///FILE``) or ``postgresql://USER@HOST/DATABASE``. Default: the environment
        variable `QUIETMAX_LEDGER`, else a SQLite file in the user's state directory.
    accept_loss : str, optional
        The reason to go on although the database has lost rows that the head file names. What is known to be lost is
        charged to client ``lost``, and the journal keeps the reason.
    read_only : bool
        Create, migrate and change nothing: the ledger must exist, with the newest schema.

    Raises
    ------
    LedgerUnavailable
        If the database cannot be opened.
    LedgerDamaged
        If the database is not a ledger, or is newer than this version of Quietmax. A ledger that has lost rows can be
        read and verified; this is raised by everything that would write.

    Examples
    --------
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

    def __init__(
        self,
        address: str | Path | None = None,
        *,
        accept_loss: str | None = None,
        read_only: bool = False,
    ) -> None:
        where = default_url() if address is None else address
        if read_only and not ledger_exists(where):
            shown = hide_password(parse_url(where))
            raise InvalidInput(f"The ledger {shown} must exist and have the newest schema to be read only.")
        self._engine = open_engine(where, read_only=read_only)
        self._writer: LedgerWriter | None = None
        self._writer_lock = threading.Lock()
        try:
            self._open(accept_loss, read_only)
        except BaseException:
            self._engine.dispose()  # else SQLite keeps its write-ahead log as long as this process runs
            raise

    def _open(self, accept_loss: str | None, read_only: bool) -> None:
        """Bring the schema up to date, read the secrets and compare the journal with the head file."""
        if not read_only:
            migrate(self._engine)
        with read_transaction(self._engine) as connection:
            values = {row.name: row.value for row in connection.execute(select(meta))}
        self._salt, self._id = _secret(values, "query_salt"), str(values.get("ledger"))
        self._query_hashes: dict[bytes, AESGCM] = {}  # by the digest of the model
        self._has_gmac_keys = values.get("query_hash") == "gmac"  # a ledger of version 0.1 keeps its hash
        self._guard = FileGuard(self._engine)
        self._heads = HeadFile(head_path(self._engine), self._id, self._engine, read_only=read_only)
        with read_transaction(self._engine) as connection:
            self._heads.load(connection)
        if accept_loss is not None:
            self._accept_loss(accept_loss)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what waits and close the database."""
        if self._writer is not None:
            self._writer.close()
        self._heads.close()
        self._engine.dispose()

    @property
    def address(self) -> str:
        """The address of the database, without its password."""
        return hide_password(self._engine.url)

    @property
    def writer(self) -> LedgerWriter:
        """The thread that writes charges and answers; started on first use."""
        with self._writer_lock:
            if self._writer is None:
                self._writer = LedgerWriter(
                    self._engine, self._guard, self._salt, self._heads, self._newest_time()
                )
            return self._writer

    # Charges and answers

    def submit_charge(self, charge: Charge, done: ChargeCallback) -> None:
        """Decide a charge with the next batch.

        Parameters
        ----------
        charge : Charge
            The charge.
        done : callable
            Called with the `ChargeResult` after the disk flush, from the writer's thread.
        """
        self.submit_charges([charge], lambda results: done(results[0]))

    def submit_charges(self, charges: Sequence[Charge], done: ChargesCallback) -> None:
        """Decide charges with the next batch.

        Parameters
        ----------
        charges : sequence of Charge
            The charges.
        done : callable
            Called once with all `ChargeResult`, in the order of the charges, after the disk flush, from the writer's
            thread.
        """
        self.writer.submit_charges(charges, done)

    def submit_answers(self, answers: NewAnswers, done: AnswersCallback) -> None:
        """Store answers with the next batch.

        Parameters
        ----------
        answers : NewAnswers
            The answers.
        done : callable
            Called with the `StoredAnswer` or `Failed` after the disk flush, from the writer's thread.
        """
        self.writer.submit_answers(answers, done)

    def charge(self, charge: Charge) -> ChargeResult:
        """Decide a charge and wait for the result.

        Parameters
        ----------
        charge : Charge
            The charge.

        Returns
        -------
        ChargeResult
            `Charged` if the charge is durable; else why nothing may be answered.
        """
        result: Future[ChargeResult] = Future()
        self.submit_charge(charge, result.set_result)
        return result.result()

    def store_answers(self, answers: NewAnswers) -> StoredAnswer:
        """Store answers and wait until they are durable.

        Parameters
        ----------
        answers : NewAnswers
            The answers.

        Returns
        -------
        StoredAnswer
            The answer that may leave.

        Raises
        ------
        QuietmaxError
            If they cannot be stored.
        """
        result: Future[StoredAnswer | Failed] = Future()
        self.submit_answers(answers, result.set_result)
        stored = result.result()
        if isinstance(stored, Failed):
            raise stored.error
        return stored

    def charge_training(
        self,
        account: AccountState,
        model: str,
        digest: str,
        cost: Cost | Literal["all"],
        *,
        split: str | None = None,
    ) -> None:
        """Charge, once for each model, what its training spent.

        Parameters
        ----------
        account : AccountState
            The account.
        model : str
            The model, as ``name/version``.
        digest : str
            The digest of the model.
        cost : Cost or "all"
            What training spent. "all": the guarantee does not compose with others, so the model takes the whole
            account, and nothing can be granted afterwards.
        split : str, optional
            Name of the split that held people out of the training set. They are not charged.

        Raises
        ------
        QuietmaxError
            If the account cannot pay for it.
        """
        if cost == "all":
            with self._write() as connection:
                _accounts.reserve_exclusively(connection, account, model, digest)
            units = self.account(account.name).limit_units
        else:
            units = account.units(cost)
        request = _training_request(account, digest)
        part = None if split is None else Part(split, "training")
        self._charge_release(account, model, units, request, "training", part)

    def is_training_charged(self, account: AccountState, digest: str) -> bool:
        """Tell whether `charge_training` has charged a model.

        Parameters
        ----------
        account : AccountState
            The account.
        digest : str
            The digest of the model.
        """
        query = select(requests.c.request).where(requests.c.request == _training_request(account, digest))
        with read_transaction(self._engine) as connection:
            return connection.execute(query).first() is not None

    def charge_evaluation(
        self, account: AccountState, model: str, digest: str, cost: GaussianCost, *, split: str | None = None
    ) -> None:
        """Charge, once for each evaluation, what it spent.

        An evaluation of the people that a split held out costs nothing as long as it spends no more than the training
        on the other people (parallel composition, THEORY 3.8).

        Parameters
        ----------
        account : AccountState
            The account.
        model : str
            The model, as ``name/version``.
        digest : str
            The digest of the evaluation.
        cost : GaussianCost
            What the evaluation spent.
        split : str, optional
            Name of the split that held out the evaluated people. None: they may be in the training set.

        Raises
        ------
        QuietmaxError
            If the account cannot pay for it.
        """
        terms = account.terms
        if (
            account.total.measure == "pure"
            and terms.delta
            and delta_of(cost.mu, terms.epsilon) <= terms.delta
        ):
            # The account promises one pair (epsilon, delta), which does not compose: the holdout takes all of it. A
            # budget that was lowered cannot pay for that pair.
            units = max(account.limit_units, LIMIT)
        else:
            units = account.units(cost)
        request = hashlib.sha256(f"evaluation {account.id} {digest}".encode()).digest()
        part = None if split is None else Part(split, "holdout")
        self._charge_release(account, model, units, request, "evaluation", part)

    def _charge_release(
        self,
        account: AccountState,
        model: str,
        units: int,
        request: bytes,
        kind: Literal["training", "evaluation"],
        part: Part | None,
    ) -> None:
        """Charge for a release that was made before it came to the ledger."""
        client = self.client(TRAINING_CLIENT)
        result = self.charge(
            Charge(account.id, client, model, units, rows=1, request=request, kind=kind, part=part)
        )
        if isinstance(result, LimitExceeded):
            what = "Training" if kind == "training" else "Evaluating"
            raise QuietmaxError(
                f"{what} the model {model} spent more than remains in the account {account.name!r}. "
                "'quietmax ledger grant' raises the budget."
            )
        if isinstance(result, Failed):
            raise result.error
        if isinstance(result, Charged):
            self.store_answers(NewAnswers(account.id, request=request, answer=b"trained"))

    def parts(self, account: AccountState) -> dict[Part, int]:
        """Return what each side of each split has spent, in units.

        Parameters
        ----------
        account : AccountState
            The account.

        Returns
        -------
        dict of Part to int
            In the order of their names. Empty if everything that was charged concerns everybody.
        """
        with read_transaction(self._engine) as connection:
            spent = spent_by_part(Cursor(connection), [account.id])[account.id]
        return dict(sorted(spent.items(), key=lambda item: (item[0].split, item[0].side)))

    def request_key(self, client: int, request_id: str) -> bytes:
        """Return the keyed hash that stands for a request id. Different clients have different keys.

        Parameters
        ----------
        client : int
            The id of the client.
        request_id : str
            The id that the client chose.
        """
        return self._keyed_hash(b"request %d " % client + request_id.encode(), 32)

    def query_key(self, model_digest: bytes, query: bytes) -> bytes:
        """Return the keyed hash that stands for a query in the answer cache.

        Parameters
        ----------
        model_digest : bytes
            The digest of the model version.
        query : bytes
            The features of one row.
        """
        return self.query_keys(model_digest, memoryview(query), len(query))[0]

    def query_keys(self, model_digest: bytes, queries: memoryview, size: int) -> list[bytes]:
        """Return the `query_key` of each of many queries.

        The keys are GMAC tags, a keyed universal hash: without the salt nobody can choose two queries whose keys are
        equal more often than by chance, about 2^-120 for each pair. Tags never leave the ledger, so one nonce serves
        for all of them. GMAC takes a third of the time of SHA-256.

        Parameters
        ----------
        model_digest : bytes
            The digest of the model version.
        queries : memoryview
            The bytes of all queries, one after the other.
        size : int
            Number of bytes of each query, at least 1.
        """
        rows = (queries[start : start + size] for start in range(0, len(queries), size))
        if self._has_gmac_keys:
            if model_digest not in self._query_hashes:
                self._query_hashes[model_digest] = AESGCM(self._keyed_hash(b"query " + model_digest, 32))
            hash_row = self._query_hashes[model_digest].encrypt
            return [hash_row(_FIXED_NONCE, b"", row) for row in rows]
        start = hashlib.blake2b(model_digest, key=self._salt, digest_size=KEY_BYTES)
        keys = []
        for row in rows:
            digest = start.copy()
            for begin in range(0, size, _MAX_HASHED):
                digest.update(row[begin : begin + _MAX_HASHED])
            keys.append(digest.digest())
        return keys

    def _keyed_hash(self, content: bytes, size: int) -> bytes:
        return hashlib.blake2b(content, key=self._salt, digest_size=size).digest()

    # Accounts

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
        """Return the account of a training set; open one if neither its digest nor its name is known.

        Parameters
        ----------
        name : str
            The name of the account: letters, digits, dots, dashes and underscores.
        total : Cost
            The budget of a new account. An existing account must have been opened with the same.
        terms : Terms
            The (epsilon, delta) behind `total`.
        digest : str, optional
            The digest of the training set.
        named_by_owner : bool
            Whether the owner chose the name. If so, records that belong to another account are an error.
        because : str, optional
            The reason to move records that belong to another account to this one.
        """
        with self._write() as connection:
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
        """Return the account of a digest, else of a name, if there is one.

        Parameters
        ----------
        name : str
            The name of the account.
        digest : str, optional
            The digest of the training set.
        """
        _accounts.check_name(name, "account")
        with read_transaction(self._engine) as connection:
            found = None if digest is None else _accounts.find_by_digest(connection, digest)
            return found or _accounts.find_by_name(connection, name)

    def account(self, name: str) -> AccountState:
        """Return an account.

        Parameters
        ----------
        name : str
            The name of the account.

        Raises
        ------
        InvalidInput
            If there is no such account.
        """
        with read_transaction(self._engine) as connection:
            return _accounts.get_account(connection, name)

    def accounts(self) -> list[AccountState]:
        """Return all accounts, by name."""
        with read_transaction(self._engine) as connection:
            return _accounts.list_accounts(connection)

    def subaccounts(self, account: AccountState) -> list[Subaccount]:
        """Return the clients' shares of an account, those that spent most first.

        Parameters
        ----------
        account : AccountState
            The account.
        """
        with read_transaction(self._engine) as connection:
            return _accounts.list_subaccounts(connection, account.id)

    def spending_history(self, account: AccountState, points: int = _HISTORY_POINTS) -> list[SpendingPoint]:
        """Return what was spent over time.

        Parameters
        ----------
        account : AccountState
            The account.
        points : int
            About how many journal rows to read, spread evenly.
        """
        last = account.sequence
        wanted = {1, last, *(round(last * step / points) for step in range(points))}
        with read_transaction(self._engine) as connection:
            rows = connection.execute(
                select(journal.c.time, journal.c.spent_units)
                .where(journal.c.account == account.id, journal.c.sequence.in_(wanted))
                .order_by(journal.c.sequence)
            )
            return [SpendingPoint(*row) for row in rows]

    def lost_accounts(self) -> list[int]:
        """Return the ids of accounts that have spent something and were lost; a new account then needs a reason."""
        with read_transaction(self._engine) as connection:
            return _accounts.lost_accounts(connection)

    def check_opening(self, name: str, because: str | None) -> None:
        """Raise `InvalidInput` if a new account needs a reason, because accounts were lost.

        Parameters
        ----------
        name : str
            The name of the new account.
        because : str or None
            The reason, if there is one.
        """
        with read_transaction(self._engine) as connection:
            _accounts.check_opening(connection, name, because)

    def charged_models(self, account: AccountState) -> list[str]:
        """Return the models that an account was charged for, as ``name/version``, by name.

        Parameters
        ----------
        account : AccountState
            The account.
        """
        rows = (
            select(journal.c.model).where(journal.c.account == account.id, journal.c.model != "").distinct()
        )
        with read_transaction(self._engine) as connection:
            return sorted(connection.execute(rows).scalars())

    def heads(self) -> list[tuple[str, Head]]:
        """Return the last journal row of every account with its name, that of the API keys included."""
        with read_transaction(self._engine) as connection:
            names = {row.id: row.name for row in connection.execute(select(accounts))}
            return [(names[head.account], head) for head in read_heads(connection)]

    def grant(self, account: str, terms: Terms, because: str) -> AccountState:
        """Set the budget of an account. What was spent stays spent.

        Parameters
        ----------
        account : str
            The name of the account.
        terms : Terms
            The new budget.
        because : str
            The reason, at least three words; the journal keeps it.
        """
        with self._write() as connection:
            return _accounts.grant(connection, account, terms, because)

    def set_quota(self, account: str, client: str, share: float | None, because: str) -> AccountState:
        """Limit a client to a share of an account's budget.

        Parameters
        ----------
        account : str
            The name of the account.
        client : str
            The client's name.
        share : float or None
            The quota as a fraction of the budget, from 0 to 1. None: no quota.
        because : str
            The reason, at least three words; the journal keeps it.
        """
        with self._write() as connection:
            return _accounts.set_quota(connection, account, client, share, because)

    def revoke(self, account: str, client: str | None, because: str) -> AccountState:
        """Take back what is unspent.

        Parameters
        ----------
        account : str
            The name of the account.
        client : str or None
            The client's name. None: the whole account.
        because : str
            The reason, at least three words; the journal keeps it.
        """
        with self._write() as connection:
            return _accounts.revoke(connection, account, client, because)

    def record_unproven(self, account: AccountState, model: str, status: str) -> None:
        """Record, once, that a model without a proven guarantee uses an account.

        Parameters
        ----------
        account : AccountState
            The account.
        model : str
            The model, as ``name/version``.
        status : str
            The status of its guarantee.
        """
        with self._write() as connection:
            _accounts.record_unproven(connection, account.id, model, status)

    def unproven_models(self, account: AccountState) -> list[tuple[str, str]]:
        """Return the models without a proven guarantee that ever used an account, with their status.

        Parameters
        ----------
        account : AccountState
            The account.
        """
        with read_transaction(self._engine) as connection:
            return _accounts.unproven_models(connection, account.id)

    def prune(self, days: float) -> Pruned:
        """Delete what is stored for requests and queries of long ago. The journal and all balances stay.

        A request id that was pruned is unknown: it is charged and drawn like a new one. So is a query that was pruned
        from the answer cache.

        Parameters
        ----------
        days : float
            Keep what was charged or drawn in the last so many days; at least an hour, so that no request is in flight.

        Returns
        -------
        Pruned
            How much was deleted.
        """
        with self._write() as connection:
            return prune(Cursor(connection), days, _accounts.now())

    # Clients and API keys

    def client(self, name: str) -> int:
        """Return the id of a client; the client is created if new.

        Parameters
        ----------
        name : str
            The client's name.
        """
        with self._write() as connection:
            _accounts.lock_keys_account(connection)
            return _accounts.client_id(connection, name, create=True)

    def create_key(self, client: str, role: Role = "client", days: float | None = None) -> tuple[str, ApiKey]:
        """Create an API key; the client is created if new.

        Parameters
        ----------
        client : str
            The client's name.
        role : {"client", "admin"}
            The role.
        days : float, optional
            Days until the key expires. Default: never.

        Returns
        -------
        (str, ApiKey)
            The key itself, to be shown once, and what the ledger keeps of it.
        """
        with self._write() as connection:
            return _api_keys.create_key(connection, client, role, days)

    def revoke_key(self, key_id: str) -> ApiKey:
        """Revoke an API key.

        Parameters
        ----------
        key_id : str
            The id of the key.
        """
        with self._write() as connection:
            return _api_keys.revoke_key(connection, key_id)

    def keys(self) -> list[ApiKey]:
        """Return all API keys, the oldest first."""
        with read_transaction(self._engine) as connection:
            if self._heads.damage is None:
                self._heads.check_all(connection)  # else keys that were revoked could come back
            found = _api_keys.list_keys(connection)
        for key in found:
            if key.has_wrong_types:
                raise _accounts.damaged(f"The key {key.id!r} cannot be read")
        return found

    def end_session(self, session: str, expires: int) -> None:
        """Record that a session of the dashboard was closed, for all processes that share the ledger.

        Parameters
        ----------
        session : str
            The id of the session.
        expires : int
            When the session would have expired, in microseconds since 1970. It is forgotten afterwards.
        """
        with self._write() as connection:
            _api_keys.end_session(connection, session, expires)

    def ended_sessions(self) -> frozenset[str]:
        """Return the ids of the sessions that were closed and have not expired yet."""
        with read_transaction(self._engine) as connection:
            return _api_keys.ended_sessions(connection)

    # Checks

    def ping(self) -> None:
        """Raise `LedgerUnavailable` unless the database answers; after a failed write, unless it can be written."""
        writer = self.writer
        if writer.error is None:
            self._guard.check()
            if self._heads.error is not None:
                raise self._heads.error
            with read_transaction(self._engine) as connection:
                self._heads.check_all(connection)
        else:
            with self._write() as connection:
                connection.execute(_WRITE_PROBE, {"value": secrets.token_hex(_PROBE_BYTES)})
            writer.error = None

    def export(self, account: str | None = None) -> Iterator[JournalEntry]:
        """Read the journal.

        Parameters
        ----------
        account : str, optional
            The name of the only account to read.

        Yields
        ------
        JournalEntry
            One row.
        """
        with read_transaction(self._engine) as connection:
            number = None if account is None else _accounts.get_account(connection, account).id
            for entry in _verify.read_journal(connection, number):
                if entry.has_wrong_types:
                    raise _accounts.damaged(
                        f"Row {entry.sequence!r} of the journal of account {entry.account!r} cannot be read"
                    )
                yield entry

    def verify(self, anchors: Mapping[str, Anchor] | None = None) -> Verification:
        """Recompute every hash chain, balance, quota and key from the journal.

        Parameters
        ----------
        anchors : mapping, optional
            Rows that an auditor wrote down: account name -> (row, hash). They must still be in the chain.
        """
        with snapshot_transaction(self._engine) as connection:
            found = _verify.verify(connection, anchors)
        damage = self._heads.damage
        return found if damage is None else replace(found, faults=(*found.faults, str(damage)))

    def check_damage(self) -> None:
        """Raise `LedgerDamaged` if the ledger has lost rows that its head file or this process knows of."""
        with read_transaction(self._engine) as connection:
            self._heads.check_all(connection)

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        self._guard.check()
        with write_transaction(self._engine) as connection:
            self._heads.check_all(connection)
            yield connection
            heads = read_heads(connection)
        self._heads.record(heads)

    def _newest_time(self) -> int:
        """Return the time of the newest journal row; now if there is none."""
        last = (journal.c.account == accounts.c.id) & (journal.c.sequence == accounts.c.sequence)
        with read_transaction(self._engine) as connection:
            times = connection.execute(select(journal.c.time).join_from(accounts, journal, last)).scalars()
            return max((each for each in times if type(each) is int), default=_accounts.now())

    def _accept_loss(self, because: str) -> None:
        """Charge what the head file knows of and the database has lost, and begin a new head file."""
        if self._heads.damage is None:
            raise InvalidInput("The ledger has lost nothing that its head file names.")
        try:
            ledger, known = self._heads.read()
        except LedgerDamaged:
            ledger, known = None, []
        with write_transaction(self._engine) as connection:
            spent = {head.account: head.spent_units for head in known}
            record_loss(connection, spent, because, same_ledger=ledger == self._id)
            heads = read_heads(connection)
        self._heads.reset(heads)


def ledger_exists(address: str | Path) -> bool:
    """Check that a ledger can be opened, without creating or migrating it."""
    url = parse_url(address)
    if url.drivername == "sqlite" and not Path(str(url.database)).exists():
        _check_creatable(Path(str(url.database)))
        return False
    engine = open_engine(address, read_only=True)
    try:
        return is_migrated(engine)
    finally:
        engine.dispose()


def _check_creatable(path: Path) -> None:
    """Raise unless a file could be created: the nearest folder above it that exists must be writable."""
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise LedgerUnavailable(f"Cannot create the ledger {path}: {above} is not a writable folder.")


def _training_request(account: AccountState, digest: str) -> bytes:
    """The request key of a training. The words are part of stored keys: they cannot change."""
    return hashlib.sha256(f"training {account.id} {digest}".encode()).digest()


def _secret(values: Mapping[str, str], name: str) -> bytes:
    """Return a secret that was generated when the ledger was created."""
    try:
        secret = bytes.fromhex(values[name])
    except (KeyError, TypeError, ValueError):
        secret = b""
    if len(secret) != _SECRET_BYTES:
        raise _accounts.damaged(f"The ledger's {name} is missing or was changed")
    return secret
