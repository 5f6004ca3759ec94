"""The tables of the ledger: the same in SQLite and PostgreSQL.

Amounts are whole units (see `quietmax.accounting.Meter`). The checks make the database itself refuse a balance
beyond its limit, whatever program writes it.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
)

KEYS_BOOK = "(keys)"
"""The book in which keys are journalled; no account of a training set can have this name."""

metadata = MetaData()

_Number = BigInteger().with_variant(Integer, "sqlite")

meta = Table("meta", metadata, Column("name", Text, primary_key=True), Column("value", Text, nullable=False))

accounts = Table(
    "accounts",
    metadata,
    Column("id", _Number, primary_key=True, autoincrement=True),
    Column("name", Text, nullable=False, unique=True),
    Column("total", Text, nullable=False),
    Column("terms", Text, nullable=False),
    Column("limit_units", _Number, nullable=False),
    Column("spent_units", _Number, nullable=False),
    Column("sequence", _Number, nullable=False),
    Column("head", Text, nullable=False),
    Column("opened", _Number, nullable=False),
    CheckConstraint("0 <= spent_units AND spent_units <= limit_units", name="never_overspent"),
)
"""`total` is what `LIMIT` units are worth, as the JSON of a cost; `terms` says what the owner promised; `head` is the
hash of the journal's last row, `sequence` its number."""

training_sets = Table(
    "training_sets",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("account", _Number, ForeignKey("accounts.id"), nullable=False),
)

clients = Table(
    "clients",
    metadata,
    Column("id", _Number, primary_key=True, autoincrement=True),
    Column("name", Text, nullable=False, unique=True),
)

subaccounts = Table(
    "subaccounts",
    metadata,
    Column("account", _Number, ForeignKey("accounts.id"), nullable=False),
    Column("client", _Number, ForeignKey("clients.id"), nullable=False),
    Column("limit_units", _Number, nullable=True),
    Column("spent_units", _Number, nullable=False),
    Column("refused", _Number, nullable=False),
    PrimaryKeyConstraint("account", "client"),
    CheckConstraint(
        "0 <= spent_units AND (limit_units IS NULL OR spent_units <= limit_units)",
        name="quota_never_overspent",
    ),
)

keys = Table(
    "keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("client", _Number, ForeignKey("clients.id"), nullable=False),
    Column("role", Text, nullable=False),
    Column("secret_hash", Text, nullable=False),
    Column("created", _Number, nullable=False),
    Column("expires", _Number, nullable=True),
    Column("revoked", _Number, nullable=True),
)

journal = Table(
    "journal",
    metadata,
    Column("account", _Number, ForeignKey("accounts.id"), nullable=False),
    Column("sequence", _Number, nullable=False),
    Column("time", _Number, nullable=False),
    Column("kind", Text, nullable=False),
    Column("client", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("answers", _Number, nullable=False),
    Column("units", _Number, nullable=False),
    Column("spent_units", _Number, nullable=False),
    Column("limit_units", _Number, nullable=False),
    Column("detail", Text, nullable=False),
    Column("previous", Text, nullable=False),
    Column("hash", Text, nullable=False),
    PrimaryKeyConstraint("account", "sequence"),
)

requests = Table(
    "requests",
    metadata,
    Column("request", LargeBinary, primary_key=True),
    Column("body", LargeBinary, nullable=False),
    Column("account", _Number, nullable=False),
    Column("units", _Number, nullable=False),
    Column("time", _Number, nullable=False),
    Column("answer", LargeBinary, nullable=True),
)
"""`request` is a hash of client and request id, `body` one of what was asked; `units` is what was paid for it."""

answers = Table(
    "answers",
    metadata,
    Column("id", _Number, primary_key=True, autoincrement=True),
    Column("account", _Number, ForeignKey("accounts.id"), nullable=False),
    Column("keys", LargeBinary, nullable=False),
    Column("answers", LargeBinary, nullable=False),
    sqlite_autoincrement=True,
)
"""Answers of one request: `keys` are keyed hashes of model version and features, 16 bytes each."""

Index("answers_by_account", answers.c.account, answers.c.id)
_rare = journal.c.kind != "charge"
Index("journal_rare", journal.c.account, journal.c.kind, sqlite_where=_rare, postgresql_where=_rare)
