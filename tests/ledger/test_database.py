"""What the database itself refuses, whatever the program does."""

from __future__ import annotations

import pytest
from sqlalchemy import Table, UniqueConstraint, create_engine, insert
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError
from sqlalchemy.schema import CreateIndex

from quietmax.ledger.database import accounts, journal, metadata, subaccounts

# A quota, an expiry or a revocation may be absent, and an answer while it is drawn; nothing else.
MAY_BE_EMPTY = {"keys.expires", "keys.revoked", "requests.answer", "subaccounts.limit_units"}
TOLD_APART_BY = {
    "meta": ["name"],
    "accounts": ["id"],
    "training_sets": ["digest"],
    "clients": ["id"],
    "subaccounts": ["account", "client"],
    "keys": ["id"],
    "journal": ["account", "sequence"],
    "requests": ["request"],
    "answers": ["id"],
}


def _columns(table: Table) -> list[str]:
    return [f"{table.name}.{column.name}" for column in table.columns if column.nullable]


def test_only_quotas_expiries_revocations_and_pending_answers_may_be_empty():
    assert {name for table in metadata.tables.values() for name in _columns(table)} == MAY_BE_EMPTY


def test_a_training_set_a_request_and_a_journal_row_exist_once():
    found = {table.name: [column.name for column in table.primary_key] for table in metadata.tables.values()}
    assert found == TOLD_APART_BY
    unique = {
        (table.name, column.name)
        for table in metadata.tables.values()
        for constraint in table.constraints
        if isinstance(constraint, UniqueConstraint)
        for column in constraint.columns
    }
    assert unique == {("accounts", "name"), ("clients", "name")}


@pytest.mark.parametrize(
    ("spent", "limit", "kept"), [(0, 10, True), (10, 10, True), (11, 10, False), (-1, 10, False)]
)
def test_the_database_refuses_an_overspent_account_or_quota(spent, limit, kept):
    engine = create_engine("sqlite://")
    metadata.create_all(engine)
    account = {"name": "a", "total": "", "terms": "", "sequence": 0, "head": "", "opened": 0}
    quota = {"account": 1, "client": 1, "refused": 0}
    for table, row in ((accounts, account), (subaccounts, quota)):
        with engine.begin() as connection:
            statement = insert(table).values(**row, spent_units=spent, limit_units=limit)
            if kept:
                connection.execute(statement)
            else:
                with pytest.raises(IntegrityError, match="CHECK"):
                    connection.execute(statement)


@pytest.mark.parametrize("dialect", [sqlite.dialect(), postgresql.dialect()], ids=["file", "server"])
def test_the_index_of_rare_journal_rows_leaves_the_charges_out(dialect):
    (rare,) = (index for index in journal.indexes if index.name == "journal_rare")
    assert str(CreateIndex(rare).compile(dialect=dialect)).endswith("WHERE kind != 'charge'")
