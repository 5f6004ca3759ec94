"""Model folders of version 0.2 and ledgers of 0.1 and 0.2 still open (`tests/fixtures/v0_2/README.md`)."""

from __future__ import annotations

import io
import json
import shutil
import sqlite3
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psycopg
import pytest
from sqlalchemy import text

# All names of the package that this file uses, so that a renamed one is changed in one place.
from quietmax import BudgetExhausted, load_model
from quietmax.accounting import PureCost
from quietmax.errors import DataUnavailable, InvalidInput
from quietmax.estimators import open_private
from quietmax.estimators.evaluation import _evaluation_records, evaluate_folder, read_evaluations
from quietmax.ledger import Charge, Ledger, LimitExceeded, Terms
from quietmax.ledger.accounts import find_key
from quietmax.ledger.database import MIGRATIONS
from quietmax.ledger.transactions import Charged, Replayed
from quietmax.privacy_card import read_card
from quietmax.server import Service, Settings, create_app
from quietmax.server.deployment import deploy, load_models
from quietmax.server.telemetry import Log
from tests.cli.conftest import document

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

SAMPLES = Path(__file__).parent / "fixtures"
EXPECTED = {
    version: json.loads((SAMPLES / version / "expected.json").read_text(encoding="utf-8"))
    for version in ("v0_1", "v0_2")
}
STORED, FOLDERS = EXPECTED["v0_2"], SAMPLES / "v0_2" / "models"
QUERIES = dict(np.load(SAMPLES / "v0_2" / "queries.npz"))
MODELS = sorted(path.name for path in FOLDERS.iterdir())
PRIVATE = [name for name in MODELS if STORED[name]["kind"] != "mlp"]
PAID = [name for name in MODELS if "answered" in STORED[name]]
RELEASED = [name for name in PRIVATE if name in QUERIES and name not in PAID]
TABLES = ["table-head", "table-head-measured", "table-dpsgd", "table-network"]
LEDGER_OF = {"filled": "ledger sqlite", "postgresql": "ledger postgresql", "served": "ledger served"}
LEDGERS = [(version, name) for version in EXPECTED for name in LEDGER_OF]
FILLED = [each for each in LEDGERS if each[1] != "served"]

# Weights and noise are in the files, so nothing random is left in these answers. They are computed in floating point by
# matrix products in float32 whose rounding differs between processors. Two processors gave probabilities that differ by
# 4e-5 of their size behind an encoder, and scores near 0 that differ by 1e-7: hence a tolerance a little above that.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}

Copy = Callable[..., Path]
LedgerAt = Callable[..., str]


@pytest.fixture
def copied(tmp_path: Path) -> Copy:
    """Copy a model of the samples, since asking a model changes its folder."""

    def copy(name: str, parent: str = "models") -> Path:
        return Path(shutil.copytree(SAMPLES / "v0_2" / parent / name, tmp_path / parent / name))

    return copy


def test_the_samples_hold_every_kind_of_model_and_stay_small() -> None:
    kinds = {json.loads((FOLDERS / name / "model.json").read_text())["kind"] for name in MODELS}
    assert kinds == {"mlp", "head", "teachers", "dpsgd"}
    assert {STORED[name]["card"]["status"] for name in MODELS} == {"proven", "conditional", "none"}
    assert (len(PAID), len(RELEASED), len(PRIVATE) - len(PAID) - len(RELEASED)) == (5, 14, 4)
    assert sum(path.stat().st_size for path in FOLDERS.parent.rglob("*") if path.is_file()) < 700_000


@pytest.mark.parametrize(("name", "opened"), [("network", load_model), ("head-gradient", open_private)])
def test_a_folder_of_version_0_1_is_an_error_that_names_the_version_that_opens_it(
    name: str, opened: Any, copied: Copy
) -> None:
    path = copied(name) / "model.json"
    stated = json.loads(path.read_text()) | {"format_version": 1, "quietmax": "0.1.0"}
    path.write_text(json.dumps(stated))
    with pytest.raises(
        DataUnavailable, match=r"was written by Quietmax 0\.1\.0\. Version 0\.2 can open it\.$"
    ):
        opened(path.parent)


def test_a_network_answers_as_before() -> None:
    stored, model = STORED["network"], load_model(FOLDERS / "network")
    assert (model.records, model.seed, list(model.image_shape)) == (200, 0, [1, 28, 28])
    assert model.settings.loss.alpha == stored["alpha"]
    np.testing.assert_allclose(model.scores(QUERIES["network"]), stored["scores"], **CLOSE)
    assert model.predict(QUERIES["network"]).tolist() == stored["labels"]


@pytest.mark.parametrize("name", PRIVATE)
def test_the_guarantee_of_a_private_model_is_the_one_it_was_saved_with(name: str) -> None:
    stored = json.loads((FOLDERS / name / "model.json").read_text())["guarantee"]
    assert open_private(FOLDERS / name).guarantee.to_json() == stored


@pytest.mark.parametrize("name", RELEASED)
def test_released_weights_answer_as_before_without_end(name: str) -> None:
    stored, model = STORED[name], open_private(FOLDERS / name)
    assert (model.kind, list(model.classes), model.remaining) == (stored["kind"], stored["classes"], None)
    np.testing.assert_allclose(model.predict_proba(QUERIES[name]), stored["probabilities"], **CLOSE)
    for _ in range(2):
        assert model.predict(QUERIES[name]).tolist() == stored["labels"]


@pytest.mark.parametrize("name", PAID)
def test_a_model_that_pays_for_answers_goes_on_with_what_is_left(name: str, copied: Copy) -> None:
    """A budget of 500 per answer makes each of these labels certain up to exp(-100)."""
    stored, folder, queries = STORED[name], copied(name), QUERIES[name]
    model: Any = open_private(folder)
    assert (model.kind, list(model.classes)) == (stored["kind"], stored["classes"])
    assert model.remaining == stored["remaining"] == 20 - stored["answered"]
    mapped = queries if model.features is None else model.features.transform(queries)
    np.testing.assert_allclose(model.classifier.model.scores(mapped), stored["scores"], **CLOSE)
    assert model.predict(queries).tolist() == stored["labels"]
    again = open_private(folder)
    assert again.remaining == model.remaining == stored["remaining"] - len(queries), "the folder counts"
    left = again.remaining
    others = np.random.default_rng(8).random((left + 1, queries.shape[1]), dtype=np.float32)
    with pytest.raises(BudgetExhausted):
        again.predict(others)
    assert len(again.predict(others[:left])) == left
    assert open_private(folder).remaining == 0


@pytest.mark.parametrize("name", TABLES)
def test_a_model_of_a_table_takes_the_columns_of_a_file(name: str) -> None:
    noise = ("--epsilon", 100, "--seeded", 3) if name == "table-network" else ()
    asked = ("predict", "--model", FOLDERS / name, "--input", SAMPLES / "v0_2" / "asked.csv")
    told = document(*asked, *noise)
    assert (told["labels"], told["classes"]) == (STORED[name]["labels"], STORED[name]["classes"])
    np.testing.assert_allclose(told["probabilities"], STORED[name]["probabilities"], **CLOSE)


def test_a_head_of_texts_embeds_them_as_before() -> None:
    model = open_private(FOLDERS / "table-head-text")
    asked = model.encode(pd.DataFrame({"note": [f"note {number}" for number in range(3)]}))
    np.testing.assert_allclose(
        model.predict_proba(asked), STORED["table-head-text"]["probabilities"], **CLOSE
    )


def test_a_model_that_was_evaluated_has_its_result_and_no_second_evaluation_for_free(copied: Copy) -> None:
    folder = copied("table-head")
    model = open_private(folder)
    (stored,) = read_evaluations(folder, model)
    assert stored.result is not None
    before, told = STORED["table-head"]["evaluation"], stored.result.to_json()
    figures = ("accuracy", "recall", "size", "confusion", "calibration", "noise", "mu", "guarantee")
    assert {key: told[key] for key in figures} == {key: before[key] for key in figures}
    records = _evaluation_records(pd.read_csv(SAMPLES / "v0_2" / "people.csv", dtype=str), model.encoding)
    with pytest.raises(BudgetExhausted, match="have spent as much as the training"):
        evaluate_folder(folder, model, records)


@pytest.mark.parametrize("name", MODELS)
def test_the_privacy_card_of_every_model_states_the_same_numbers_as_before(name: str) -> None:
    stored, card = dict(STORED[name]["card"]), read_card(FOLDERS / name)
    told = card.to_json()
    epsilon = stored.pop("epsilon_at_delta")
    assert told["epsilon_at_delta"] == (None if epsilon is None else pytest.approx(epsilon, rel=1e-9))
    assert {key: told[key] for key in stored} == stored
    assert stored["status"] in card.to_html()


@pytest.fixture
def ledger_at(tmp_path: Path, request: pytest.FixtureRequest) -> LedgerAt:
    """The address of a copy of a stored ledger."""

    def address(version: str, name: str) -> str:
        folder = SAMPLES / version / "ledgers"
        if name != "postgresql":
            return str(shutil.copy(folder / f"{name}.sqlite", tmp_path / f"{name}.sqlite"))
        uri: str = request.getfixturevalue("postgres_address")
        with psycopg.connect(uri, autocommit=True) as connection:
            connection.execute((folder / "postgresql.sql").read_text(encoding="utf-8"))
        return uri

    return address


def account_of(ledger: Ledger, digest: str) -> str | None:
    """The name of the account of a training set."""
    found = ledger.find_account("other", digest)
    return None if found is None else found.name


@pytest.mark.parametrize(("version", "name"), LEDGERS)
def test_a_ledger_verifies_and_states_the_same_balances(version: str, name: str, ledger_at: LedgerAt) -> None:
    stored = EXPECTED[version][LEDGER_OF[name]]
    with Ledger(ledger_at(version, name)) as ledger:
        with ledger._engine.connect() as connection:
            kept: dict[str, str] = dict(
                connection.execute(text("SELECT name, value FROM meta")).tuples().all()
            )
        assert kept.keys() - {"query_hash"} == {"ledger", "query_salt", "version"}, "no secret of sessions"
        assert kept["version"] == str(len(MIGRATIONS))
        anchors = {each["account"]: (each["rows"], each["head"]) for each in stored["accounts"]}
        found = ledger.verify(anchors)
        assert found.sound, found.faults
        every = list(ledger.export())
        # One row was added where version 0.1 had stored requests: it puts them into the hash chain.
        adopted = {row.account: row for row in every if row.kind == "adopted" and version == "v0_1"}
        verified = stored["verification"]
        assert (found.accounts, found.rows) == (verified["accounts"], verified["rows"] + len(adopted))
        assert [row.hash for row in every if row not in adopted.values()] == stored["hashes"]
        for account, known in zip(ledger.accounts(), stored["accounts"], strict=True):
            last = adopted.get(account.id)
            told = account.to_json() | {"rows": account.sequence - (last is not None)}
            told["head"] = account.head if last is None else last.previous
            names = ("account", "limit_units", "spent_units", "rows", "head")
            assert [told[name] for name in names] == [known[name] for name in names]
            for name in (
                "budget",
                "spent",
                "remaining",
            ):  # the number; the measure has another name since 0.1
                assert set(told[name].values()) & set(known[name].values())
            terms = known["terms"]
            assert (account.terms.epsilon, account.terms.delta) == (terms["epsilon"], terms["delta"])
            parts = [
                [part.client, part.limit_units, part.spent_units, part.refused]
                for part in ledger.subaccounts(account)
            ]
            assert parts == stored["parts"][account.name]
            unproven = [list(each) for each in ledger.unproven_models(account)]
            assert unproven == stored["unproven"][account.name]


@pytest.mark.parametrize(("version", "name"), FILLED)
def test_the_requests_of_a_stored_ledger_are_in_the_hash_chain(
    version: str, name: str, ledger_at: LedgerAt
) -> None:
    with Ledger(ledger_at(version, name)) as ledger:
        assert ("adopted" in {entry.kind for entry in ledger.export()}) == (version == "v0_1")
        for statement, fault in (
            ("UPDATE requests SET answer = NULL WHERE LENGTH(body) > 0", "was changed"),
            ("DELETE FROM requests", "stored requests are missing"),
        ):
            with ledger._engine.begin() as connection:
                assert connection.execute(text(statement)).rowcount > 0
            assert any(fault in each for each in ledger.verify().faults)


@pytest.mark.parametrize(("version", "name"), FILLED)
def test_api_keys_open_a_stored_ledger_unless_revoked(version: str, name: str, ledger_at: LedgerAt) -> None:
    stored = EXPECTED[version][LEDGER_OF[name]]
    with Ledger(ledger_at(version, name)) as ledger:
        known = {key.id: key for key in ledger.keys()}  # noqa: SIM118
        moment = time.time_ns() // 1000
        found = {client: find_key(known, key, moment) for client, key in stored["api_keys"].items()}
        assert {client: key and (key.client, key.role) for client, key in found.items()} == {
            "owner": ("owner", "admin"),
            "ann": ("ann", "client"),
            "bob": ("bob", "client"),
            "eve": None,
        }
        wrong = stored["api_keys"]["ann"][:-1] + ("A" if stored["api_keys"]["ann"][-1] != "A" else "B")
        assert find_key(known, wrong, moment) is None
        assert sorted(known) == sorted(stored["keys"])


@pytest.mark.parametrize(("version", "name"), FILLED)
def test_stored_answers_are_free_and_new_ones_are_charged(
    version: str, name: str, ledger_at: LedgerAt
) -> None:
    noted = EXPECTED[version][LEDGER_OF[name]]["stored"]
    address = ledger_at(version, name)
    with Ledger(address) as ledger:
        before = ledger.account("patients")
        keys = tuple(ledger.query_keys(b"digest of a model", memoryview(b"query 0query 1query 2query 3"), 7))
        asked = Charge(before.id, noted["client"], "m/1", noted["unit_cost"], 3, queries=keys[:3])
        free = ledger.charge(asked)
        assert isinstance(free, Charged)
        assert (free.units, free.answers) == (0, 0)
        assert [free.cached[key] for key in keys[:3]] == [b"answer 0", b"answer 1", b"answer 2"]
        request = ledger.request_key(noted["client"], "first")
        replayed = ledger.charge(replace(asked, request=request, body=b"body"))
        assert isinstance(replayed, Replayed)
        assert replayed.answer == b"the whole answer"
        assert ledger.account("patients").spent_units == before.spent_units
        paid = ledger.charge(replace(asked, rows=4, queries=keys))
        assert isinstance(paid, Charged)
        assert (paid.units, paid.answers) == (noted["unit_cost"], 1)
        closed = ledger.account("closed")
        assert isinstance(ledger.charge(Charge(closed.id, noted["client"], "c/1", 1, 1)), LimitExceeded)
        ledger.grant("closed", Terms(3.0), "The study goes on.")
        assert isinstance(ledger.charge(Charge(closed.id, noted["client"], "c/1", 1, 1)), Charged)
        ledger.create_key("new")
        opened = ledger.open_account("new", PureCost(1.0), Terms(1.0))
        assert opened.id > max(account.id for account in (before, closed))
    with Ledger(address) as ledger:
        assert ledger.account("patients").spent_units == before.spent_units + noted["unit_cost"]
        assert ledger.verify().sound


@pytest.mark.parametrize(("version", "name"), FILLED)
def test_records_and_models_that_a_ledger_knows_are_not_counted_again(
    version: str, name: str, ledger_at: LedgerAt
) -> None:
    with Ledger(ledger_at(version, name)) as ledger:
        assert account_of(ledger, "a" * 64) == "second", "these records were moved by a reason"
        assert account_of(ledger, "b" * 64) == "visitors"
        visitors, whole = ledger.account("visitors"), ledger.account("whole")
        ledger.charge_training(visitors, "head/1", "c" * 64, visitors.total)
        ledger.charge_training(whole, "approximate/1", "d" * 64, "all")
        assert ledger.account("visitors").spent_units == visitors.spent_units
        assert ledger.account("whole").spent_units == whole.spent_units
        with pytest.raises(InvalidInput, match="reserved for the model approximate/1"):
            ledger.grant("whole", Terms(9.0, 1e-3), "The board allows more.")


@pytest.mark.parametrize(("version", "name"), FILLED)
def test_a_migrated_ledger_keeps_its_rows_and_adds_rows_in_new_words(
    version: str, name: str, ledger_at: LedgerAt
) -> None:
    with Ledger(ledger_at(version, name)) as ledger:
        old = [entry.hash for entry in ledger.export()]
        moved = ledger.open_account(
            "third", PureCost(1.0), Terms(1.0), digest="a" * 64, because="The board allows a third study."
        )
        ledger.charge_training(moved, "approximate/2", "e" * 64, "all")
        kinds = {entry.kind for entry in ledger.export()}
        assert {"exclusive", "reassign"} <= kinds
        assert (version == "v0_1") == ({"alone", "bind", "carried over"} <= kinds)
        assert set(old) < {entry.hash for entry in ledger.export()}
        assert ledger.verify().sound


def test_a_damaged_row_of_a_stored_ledger_is_found(ledger_at: LedgerAt) -> None:
    address = ledger_at("v0_1", "filled")
    with sqlite3.connect(address) as database:
        database.execute("UPDATE journal SET units = units - 1 WHERE kind = 'carried over'")
    with Ledger(address) as ledger:
        assert not ledger.verify().sound


def test_a_service_goes_on_with_stored_models_and_their_ledger(copied: Copy, ledger_at: LedgerAt) -> None:
    """Nothing is charged again: not training, not the budget that moved into the ledger, not stored answers."""
    stored = STORED["ledger served"]
    folders = {name: copied(name, "served") for name in ("crowd", "released")} | {"plain": copied("network")}
    with Ledger(ledger_at("v0_2", "served")) as ledger:
        private = load_models([f"{name}={folders[name]}" for name in ("crowd", "released")])
        plain = load_models(
            [f"plain={folders['plain']}"], budget=Terms(10.0), queries=20, accept_unproven=True
        )
        deployments = [*deploy(ledger, private, accept_weak=True), *deploy(ledger, plain, budget=Terms(10.0))]
        service = Service(ledger, deployments, Settings(), Log(io.BytesIO()))
        header = {"authorization": f"Bearer {stored['key']}"}
        with TestClient(create_app(service), headers=header) as client:
            for name, before in stored["answers"].items():
                rows = QUERIES[stored["models"][name]][:3]
                tensor = {"name": "features", "shape": list(rows.shape), "datatype": "FP32"}
                asked = {"inputs": [tensor | {"data": rows.ravel().tolist()}]}
                for body in (asked, asked | {"id": f"request-{name}"}):
                    told = client.post(f"/v2/models/{name}/infer", json=body).json()
                    assert told["parameters"]["cost"] == 0
                    assert told["parameters"]["new_answers"] == 0
                    for ours, theirs in zip(told["outputs"], before["outputs"], strict=True):
                        np.testing.assert_allclose(ours["data"], theirs["data"], **CLOSE)
            spent = {account.name: account.spent_units for account in ledger.accounts()}
            assert spent == {each["account"]: each["spent_units"] for each in stored["accounts"]}
            asked["inputs"][0]["data"][0] += 0.5
            told = client.post(f"/v2/models/{name}/infer", json=asked).json()
            assert told["parameters"]["new_answers"] == 1
        assert ledger.verify().sound
