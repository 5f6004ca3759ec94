from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import inspect, text

from quietmax.errors import InvalidInput
from quietmax.ledger import ApiKey, Charge, ChargeResult, Ledger
from quietmax.ledger.accounts import find_key
from quietmax.ledger.database import Cursor, _lock_accounts, _write_transaction, now
from quietmax.ledger.transactions import AnswerCache, ChargeBatch, Charged, InvalidKey
from tests.ledger.scenarios import charge_for, open_patients


def _decide_at(ledger: Ledger, charge: Charge, now: int) -> ChargeResult:
    """Decide a charge in a transaction at a given time; it is rolled back."""
    with _write_transaction(ledger._engine) as connection:
        cursor = Cursor(connection)
        accounts = _lock_accounts(cursor, {charge.account})
        (result,) = ChargeBatch(cursor, AnswerCache(), accounts, [charge], now).results
        connection.rollback()
        return result


def test_a_key_has_256_random_bits_and_only_its_hash_is_kept(ledger: Ledger) -> None:
    shown, key = ledger.create_key("ann", "admin", days=1)
    other, _ = ledger.create_key("ann")
    secret = shown.split("_", 2)[2]
    assert len(secret) == 43
    assert shown != other
    assert key.expires == key.created + 24 * 3600 * 10**6
    with ledger._engine.connect() as connection:
        everything = [
            str(row)
            for table in inspect(connection).get_table_names()
            for row in connection.execute(text(f"SELECT * FROM {table}"))
        ]
    assert not any(secret in row for row in everything)


def test_a_key_lasts_more_than_0_and_at_most_36500_days(sqlite_ledger: Ledger) -> None:
    _, key = sqlite_ledger.create_key("ann", days=36_500)
    assert key.expires == key.created + 36_500 * 24 * 3600 * 10**6
    for days in (-1, 0, 36_501):
        with pytest.raises(InvalidInput, match="greater than 0 and at most 36500"):
            sqlite_ledger.create_key("ann", days=days)
    with pytest.raises(InvalidInput, match="admin or client"):
        sqlite_ledger.create_key("ann", "owner")  # type: ignore[arg-type]


def test_revoking_a_key_changes_no_other_key_and_is_recorded_once(sqlite_ledger: Ledger) -> None:
    made = [sqlite_ledger.create_key(client)[1] for client in ("ann", "bob", "ann")]
    first = sqlite_ledger.revoke_key(made[1].id)
    assert first.id == made[1].id
    assert first.revoked is not None
    assert sqlite_ledger.revoke_key(made[1].id) == first
    assert [
        (key.id, key.client, key.revoked) for key in sorted(sqlite_ledger.keys(), key=lambda key: key.client)
    ] == [
        *((made[number].id, "ann", None) for number in sorted((0, 2), key=lambda each: made[each].created)),
        (made[1].id, "bob", first.revoked),
    ]
    assert sum(entry.kind == "key-revoked" for entry in sqlite_ledger.export()) == 1
    assert sqlite_ledger.verify().sound


def _keys_by_id(ledger: Ledger) -> dict[str, ApiKey]:
    keys = ledger.keys()
    return {key.id: key for key in keys}


def test_only_the_right_and_valid_key_is_found(ledger: Ledger) -> None:
    shown, key = ledger.create_key("ann", days=1)
    other, _ = ledger.create_key("bob")
    known = _keys_by_id(ledger)
    found = find_key(known, shown, now())
    assert found is not None
    assert found.client == "ann"
    mixed = f"qm_{key.id}_{other.split('_', 2)[2]}"
    for wrong in (mixed, shown[:-1], shown + "A", "", "qm__", f"qm_{'0' * 16}_{'A' * 43}", shown.upper()):
        assert find_key(known, wrong, now()) is None
    assert key.expires is not None
    assert find_key(known, shown, key.expires) is None
    ledger.revoke_key(key.id)
    assert find_key(_keys_by_id(ledger), shown, now()) is None
    with pytest.raises(InvalidInput, match="no key with the id"):
        ledger.revoke_key("0000")


def test_secrets_are_compared_in_constant_time(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []

    def compare(one: str, other: str) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("quietmax.ledger.accounts.hmac.compare_digest", compare)
    shown, _ = ledger.create_key("ann")
    known = _keys_by_id(ledger)
    find_key(known, shown, now())
    find_key(known, "nonsense", now())
    assert len(compared) == 2
    assert all(len(one) == len(other) == 64 for one, other in compared)


def test_a_key_or_a_token_is_invalid_from_the_moment_it_expires(sqlite_ledger: Ledger) -> None:
    account = open_patients(sqlite_ledger)
    shown, key = sqlite_ledger.create_key("ann", days=1)
    end = key.created + 24 * 3600 * 10**6
    with_key = Charge(account.id, key.client_id, "m/1", 1, rows=1, key=key.id)
    with_token = replace(with_key, client=sqlite_ledger.client("oidc:ann@example.org"), key=None, expires=end)
    for moment, holds in ((end - 1, True), (end, False), (end + 1, False)):
        for charge in (with_key, with_token):
            assert isinstance(_decide_at(sqlite_ledger, charge, moment), Charged if holds else InvalidKey)
        assert (find_key({key.id: key}, shown, moment) is not None) is holds


def test_a_revoked_or_expired_key_is_detected_in_the_transaction_of_the_charge(ledger: Ledger) -> None:
    _, key = ledger.create_key("ann")
    _, brief = ledger.create_key("ann", days=1e-11)
    charge, bob = charge_for(ledger, 1000, key=key.id), ledger.client("bob")
    assert isinstance(ledger.charge(charge), Charged)
    assert ledger.charge(replace(charge, client=bob)) == InvalidKey(), "of another client"
    ledger.revoke_key(key.id)
    for invalid in (charge, replace(charge, key=brief.id), replace(charge, client=bob, key="ffff")):
        assert ledger.charge(invalid) == InvalidKey()
    assert ledger.account("patients").spent_units == 1000
