"""Files of version 0.1 still open: models, ledgers, stored results (`tests/fixtures/v0_1/README.md`)."""

from __future__ import annotations

import io
import json
import shutil
import sqlite3
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
from sqlalchemy import text

# All names of the package that this file uses, so that a renamed one is changed in one place.
from quietmax import BudgetExhausted, load_model
from quietmax.accounting import PureCost
from quietmax.accounting.costs import Cost
from quietmax.cli import main
from quietmax.errors import InvalidInput
from quietmax.estimators import open_private
from quietmax.ledger import Charge, Ledger, LimitExceeded, Terms
from quietmax.ledger.accounts import find_key
from quietmax.ledger.database import MIGRATIONS
from quietmax.ledger.transactions import Charged, Replayed
from quietmax.privacy_card import read_card
from quietmax.server import Service, Settings, create_app
from quietmax.server.deployment import deploy
from quietmax.server.repository import load_models
from quietmax.server.telemetry import Log

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

SAMPLES = Path(__file__).parent / "fixtures" / "v0_1"
EXPECTED = json.loads((SAMPLES / "expected.json").read_text(encoding="utf-8"))
QUERIES = dict(np.load(SAMPLES / "queries.npz"))
MODELS = sorted(path.name for path in (SAMPLES / "models").iterdir())
PRIVATE = [name for name in MODELS if EXPECTED[name]["kind"] != "mlp"]
PAID = [name for name in MODELS if "answered" in EXPECTED[name]]
RELEASED = [name for name in PRIVATE if name in QUERIES and name not in PAID]
LEDGER_OF = {"filled": "ledger sqlite", "postgresql": "ledger postgresql", "served": "ledger served"}

# Weights and noise are in the files, so nothing random is left in these answers. They are computed in floating point by
# matrix products whose rounding may differ between processors: hence a tolerance, far below any difference in meaning.
CLOSE = {"rtol": 1e-5, "atol": 1e-7}

Copy = Callable[..., Path]
Run = Callable[..., str]
LedgerAt = Callable[[str], str]


def status_of(name: str) -> str:
    """The status that an opened sample must have: the stored one, except where it was refuted since."""
    if name == "head-scattering":
        return "conditional"
    return "none" if EXPECTED[name]["kind"] == "mlp" else EXPECTED[name]["guarantee"]["status"]


def scores_behind(private: Any, queries: Any) -> Any:
    """The scores that an opened private model draws its answers from."""
    mapped = queries if private.features is None else private.features.transform(queries)
    return private.classifier.model.scores(mapped)


@pytest.fixture
def copied(tmp_path: Path) -> Copy:
    """Copy a model of the samples, since asking a model changes its folder."""

    def copy(name: str, parent: str = "models") -> Path:
        return Path(shutil.copytree(SAMPLES / parent / name, tmp_path / parent / name))

    return copy


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line in this process and return what it printed."""

    def call(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["quietmax", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        assert not ended.value.code, told.err
        return told.out

    return call


# --- models -------------------------------------------------------------------------------------------------------


def test_the_samples_hold_every_kind_of_model_and_stay_small() -> None:
    kinds = {json.loads((SAMPLES / "models" / name / "model.json").read_text())["kind"] for name in MODELS}
    assert kinds == {"mlp", "head", "teachers", "dpsgd"}
    assert {EXPECTED[name]["guarantee"]["status"] for name in PRIVATE} == {"proven", "conditional"}
    assert len(PAID) == 5
    assert sum(path.stat().st_size for path in SAMPLES.rglob("*") if path.is_file()) < 1_000_000


def test_a_network_answers_as_before() -> None:
    stored, model = EXPECTED["network"], load_model(SAMPLES / "models" / "network")
    assert (model.records, model.seed, list(model.image_shape)) == (200, 0, [1, 28, 28])
    assert model.settings.loss.alpha == stored["alpha"]
    np.testing.assert_allclose(model.scores(QUERIES["network"]), stored["scores"], **CLOSE)
    np.testing.assert_allclose(model.predict_proba(QUERIES["network"]), stored["probabilities"], **CLOSE)
    assert model.predict(QUERIES["network"]).tolist() == stored["labels"]


@pytest.mark.parametrize("name", PRIVATE)
def test_the_guarantee_of_a_private_model_is_the_one_it_was_saved_with(name: str) -> None:
    stored, opened = EXPECTED[name]["guarantee"], open_private(SAMPLES / "models" / name).guarantee
    told = opened.to_json()
    numbers = ("definition", "epsilon", "mu", "extra_delta", "neighbours")
    assert {key: told[key] for key in numbers} == {key: stored[key] for key in numbers}
    assert opened.status == status_of(name)


def test_what_was_proven_of_scattering_features_by_version_0_1_is_conditional_now() -> None:
    """Their whitening rounded with a record's place in memory, so one record could change the features of others."""
    opened = open_private(SAMPLES / "models" / "head-scattering").guarantee
    assert EXPECTED["head-scattering"]["guarantee"]["status"] == "proven"
    assert opened.status == "conditional"
    assert "Version 0.1" in opened.because


@pytest.mark.parametrize("name", RELEASED)
def test_released_weights_answer_as_before_without_end(name: str, copied: Copy) -> None:
    stored, model = EXPECTED[name], open_private(copied(name))
    assert (model.kind, list(model.classes), model.remaining) == (stored["kind"], stored["classes"], None)
    np.testing.assert_allclose(model.predict_proba(QUERIES[name]), stored["probabilities"], **CLOSE)
    for _ in range(2):
        assert model.predict(QUERIES[name]).tolist() == stored["labels"]


@pytest.mark.parametrize("name", PAID)
def test_a_model_that_pays_for_answers_goes_on_with_what_is_left(name: str, copied: Copy) -> None:
    """A budget of 500 per answer makes each of these labels certain up to exp(-100)."""
    stored, folder = EXPECTED[name], copied(name)
    model = open_private(folder)
    assert (model.kind, list(model.classes), model.remaining) == (
        stored["kind"],
        stored["classes"],
        stored["remaining"],
    )
    assert stored["remaining"] + stored["answered"] == 20
    np.testing.assert_allclose(scores_behind(model, QUERIES[name]), stored["scores"], **CLOSE)
    assert model.predict(QUERIES[name]).tolist() == stored["labels"]
    assert model.remaining == stored["remaining"] - len(QUERIES[name])
    again = open_private(folder)
    assert again.remaining == model.remaining, "the folder counts, not the process"
    width, left = QUERIES[name].shape[1], again.remaining
    others = np.random.default_rng(8).random((left + 1, width), dtype=np.float32)
    with pytest.raises(BudgetExhausted):
        again.predict(others)
    assert len(again.predict(others[:left])) == left
    assert open_private(folder).remaining == 0


@pytest.mark.parametrize("name", ["table-head", "table-head-measured"])
def test_a_head_of_a_table_takes_the_columns_of_a_file(name: str, run: Run) -> None:
    told = json.loads(
        run("predict", "--model", SAMPLES / "models" / name, "--input", SAMPLES / "asked.csv", "--json")
    )
    assert told["labels"] == EXPECTED[name]["labels"]
    assert (
        told["classes"]
        == EXPECTED[name]["classes"]
        == (["lo", "hi"] if name == "table-head" else ["hi", "lo"])
    )
    np.testing.assert_allclose(told["probabilities"], EXPECTED[name]["probabilities"], **CLOSE)


def test_a_network_of_a_table_takes_the_columns_of_a_file(run: Run) -> None:
    told = json.loads(
        run(
            "predict", "--model", SAMPLES / "models" / "table-network", "--input", SAMPLES / "asked.csv",
            "--epsilon", 100, "--seeded", 3, "--json",
        )
    )  # fmt: skip
    assert told["labels"] == EXPECTED["table-network"]["labels"]
    np.testing.assert_allclose(told["probabilities"], EXPECTED["table-network"]["probabilities"], **CLOSE)


# --- cards and results --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_privacy_card_of_every_model_is_built(name: str) -> None:
    card = read_card(SAMPLES / "models" / name)
    status = status_of(name)
    assert card.status == status
    assert card.answered == EXPECTED[name].get("answered")
    assert status in card.to_html()


@pytest.mark.parametrize("name", ["network", "head-gradient", "teachers-labels", "table-head-measured"])
def test_a_card_states_the_same_numbers_as_before(name: str) -> None:
    stored = json.loads((SAMPLES / "output" / f"card-{name}.json").read_text())
    card = read_card(SAMPLES / "models" / name).to_json()
    # Version 0.1 wrote a string: a number, or why there is none.
    stored["queries"] = int(stored["queries"]) if stored["queries"].isdigit() else None
    for key in ("kind", "dataset", "declared_size", "status", "delta", "queries", "answered"):
        assert card[key] == stored[key], key
    if name == "network":
        assert card["epsilon_at_delta"] is None
    else:
        assert card["epsilon_at_delta"] == pytest.approx(stored["epsilon_at_delta"], rel=1e-9)
    # Version 0.1 kept attack results, with the exact number of members, inside the folder; they are no longer read.
    assert card["leakage"] == []


def test_an_attack_on_the_stored_network_reports_the_same_figures(copied: Copy, run: Run) -> None:
    """Shadow networks are trained again: their last digits may differ between processors, the figures hardly."""
    stored = json.loads((SAMPLES / "output" / "attack.json").read_text())
    folder = copied("network")
    asked = ("--attack", "threshold", "--attack", "lira", "--shadows", 4, "--json")
    told = json.loads(run("attack", folder, *asked))
    assert [each["attack"] for each in told["reports"]] == [each["attack"] for each in stored["reports"]]
    for ours, theirs in zip(told["reports"], stored["reports"], strict=True):
        assert (ours["members"], ours["queries"]) == (theirs["members"], theirs["queries"])
        for figure in ("leakage", "auc", "tpr", "fpr"):
            assert ours[figure]["value"] == pytest.approx(theirs[figure]["value"], abs=0.011), figure


def test_a_comparison_goes_on_from_stored_results(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "comparison"
    shutil.copytree(SAMPLES / "output" / "comparison", folder)
    kept = {path: path.read_bytes() for path in folder.rglob("*.json")}
    told = json.loads(
        run(
            "compare", "mnist-5k", "--methods", "plain", "--methods", "algorithm1-gaussian", "--methods", "head",
            "--epsilons", "1", "--epsilons", "10", "--attacks", "threshold", "--records", 200, "--shadows", 2,
            "--epochs", 3, "--workers", 1, "--output", folder, "--json",
        )
    )  # fmt: skip
    stored = json.loads((SAMPLES / "output" / "comparison.json").read_text())
    assert len(kept) == 5
    assert {path: path.read_bytes() for path in kept} == kept
    assert not (folder / "networks").exists(), "nothing was computed again"
    figures = (
        "method",
        "epsilon",
        "status",
        "test_accuracy",
        "accuracy_loss",
        "leakage_threshold",
        "fit_seconds",
    )
    assert [[row[name] for name in figures] for row in told["results"]] == [
        [row[name] for name in figures] for row in stored["results"]
    ]


# --- ledgers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def ledger_at(tmp_path: Path, request: pytest.FixtureRequest) -> LedgerAt:
    """The address of a copy of a stored ledger."""

    def address(name: str) -> str:
        if name != "postgresql":
            shutil.copy(SAMPLES / "ledgers" / f"{name}.sqlite", tmp_path / f"{name}.sqlite")
            return str(tmp_path / f"{name}.sqlite")
        uri = request.getfixturevalue("postgres_address")
        with psycopg.connect(uri, autocommit=True) as connection:
            connection.execute((SAMPLES / "ledgers" / "postgresql.sql").read_text(encoding="utf-8"))
        return uri

    return address


def account_of(ledger: Ledger, digest: str) -> str | None:
    """The name of the account of a training set."""
    found = ledger.find_account("other", digest)
    return None if found is None else found.name


def number_of(cost: Cost) -> float:
    """The one number of a cost's JSON form."""
    (number,) = [value for value in cost.to_json().values() if isinstance(value, float)]
    return number


@pytest.mark.parametrize("name", LEDGER_OF)
def test_a_ledger_verifies_and_states_the_same_balances(name: str, ledger_at: LedgerAt) -> None:
    stored = EXPECTED[LEDGER_OF[name]]
    with Ledger(ledger_at(name)) as ledger:
        anchors = {each["account"]: (each["rows"], each["head"]) for each in stored["accounts"]}
        found = ledger.verify(anchors)
        assert found.sound, found.faults
        every = list(ledger.export())
        adopted = {row.account: row for row in every if row.kind == "adopted"}
        assert (found.accounts, found.rows) == (
            stored["verification"]["accounts"],
            stored["verification"]["rows"] + len(adopted),
        )
        assert [each.name for each in ledger.accounts()] == [each["account"] for each in stored["accounts"]]
        for account, known in zip(ledger.accounts(), stored["accounts"], strict=True):
            # One row was added where requests were stored: it puts them into the hash chain.
            last = adopted.get(account.id)
            assert (account.limit_units, account.spent_units, account.sequence - (last is not None)) == (
                known["limit_units"],
                known["spent_units"],
                known["rows"],
            )
            assert (account.head if last is None else last.previous) == known["head"]
            for ours, theirs in (
                (account.limit, "budget"),
                (account.spent, "spent"),
                (account.remaining, "remaining"),
            ):
                assert number_of(ours) in known[theirs].values()
            assert (account.terms.epsilon, account.terms.delta) == (
                known["terms"]["epsilon"],
                known["terms"]["delta"],
            )
            parts = [
                [part.client, part.limit_units, part.spent_units, part.refused]
                for part in ledger.subaccounts(account)
            ]
            assert parts == stored["parts"][account.name]
            assert [list(each) for each in ledger.unproven_models(account)] == stored["unproven"][
                account.name
            ]
        rows = [entry.to_json() for entry in every if entry.kind != "adopted"]
        assert [row["hash"] for row in rows] == [row["hash"] for row in stored["journal"]]
        assert rows == stored["journal"]


@pytest.mark.parametrize("name", ["filled", "postgresql"])
def test_the_requests_of_a_stored_ledger_are_in_the_hash_chain(name: str, ledger_at: LedgerAt) -> None:
    with Ledger(ledger_at(name)) as ledger:
        assert "adopted" in {entry.kind for entry in ledger.export()}
        for statement, fault in (
            ("UPDATE requests SET answer = NULL WHERE LENGTH(body) > 0", "was changed"),
            ("DELETE FROM requests", "stored requests are missing"),
        ):
            with ledger._engine.begin() as connection:
                assert connection.execute(text(statement)).rowcount > 0
            assert any(fault in each for each in ledger.verify().faults)


@pytest.mark.parametrize("name", LEDGER_OF)
def test_the_secret_of_sessions_is_deleted_from_a_stored_ledger(name: str, ledger_at: LedgerAt) -> None:
    with Ledger(ledger_at(name)) as ledger, ledger._engine.connect() as connection:
        names = set(connection.execute(text("SELECT name FROM meta")).scalars())
    assert names == {"ledger", "query_salt", "version"}


@pytest.mark.parametrize("name", ["filled", "postgresql"])
def test_api_keys_open_a_stored_ledger_unless_revoked(name: str, ledger_at: LedgerAt) -> None:
    stored = EXPECTED[LEDGER_OF[name]]
    with Ledger(ledger_at(name)) as ledger:
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
        assert sorted(known) == sorted(key["id"] for key in stored["keys"])


@pytest.mark.parametrize("name", ["filled", "postgresql"])
def test_stored_answers_are_free_and_new_ones_are_charged(name: str, ledger_at: LedgerAt) -> None:
    noted = EXPECTED[LEDGER_OF[name]]["stored"]
    address = ledger_at(name)
    with Ledger(address) as ledger:
        before = ledger.account("patients")
        queries = memoryview(b"query 0query 1query 2query 3")
        keys = tuple(ledger.query_keys(b"digest of a model", queries, 7))
        charge = Charge(before.id, noted["client"], noted["model"], noted["unit_cost"], 3, queries=keys[:3])
        free = ledger.charge(charge)
        assert isinstance(free, Charged)
        assert (free.units, free.answers) == (0, 0)
        assert [free.cached[key].decode() for key in keys[:3]] == noted["answers"]
        request = ledger.request_key(noted["client"], noted["request_id"])
        replayed = ledger.charge(
            Charge(
                before.id,
                noted["client"],
                noted["model"],
                noted["unit_cost"],
                3,
                queries=keys[:3],
                request=request,
                body=b"body",
            )
        )
        assert isinstance(replayed, Replayed)
        assert replayed.answer.decode() == noted["whole"]
        assert ledger.account("patients").spent_units == before.spent_units
        paid = ledger.charge(
            Charge(before.id, noted["client"], noted["model"], noted["unit_cost"], 4, queries=keys)
        )
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


@pytest.mark.parametrize("name", ["filled", "postgresql"])
def test_records_and_models_that_a_ledger_knows_are_not_counted_anew(name: str, ledger_at: LedgerAt) -> None:
    with Ledger(ledger_at(name)) as ledger:
        assert account_of(ledger, "a" * 64) == "second", "these records were moved by a reason"
        assert account_of(ledger, "b" * 64) == "visitors"
        visitors, whole = ledger.account("visitors"), ledger.account("whole")
        ledger.charge_training(visitors, "head/1", "c" * 64, visitors.total)
        ledger.charge_training(whole, "approximate/1", "d" * 64, "all")
        assert ledger.account("visitors").spent_units == visitors.spent_units
        assert ledger.account("whole").spent_units == whole.spent_units
        with pytest.raises(InvalidInput, match="reserved for the model approximate/1"):
            ledger.grant("whole", Terms(9.0, 1e-3), "The board allows more.")


@pytest.mark.parametrize("name", ["filled", "postgresql"])
def test_a_migrated_ledger_keeps_its_rows_and_adds_rows_in_new_words(name: str, ledger_at: LedgerAt) -> None:
    with Ledger(ledger_at(name)) as ledger:
        with ledger._engine.connect() as connection:
            version = connection.execute(text("SELECT value FROM meta WHERE name = 'version'")).scalar_one()
        assert version == str(len(MIGRATIONS))
        old = [entry.hash for entry in ledger.export()]
        moved = ledger.open_account(
            "third", PureCost(1.0), Terms(1.0), digest="a" * 64, because="The board allows a third study."
        )
        ledger.charge_training(moved, "approximate/2", "e" * 64, "all")
        kinds = {entry.kind for entry in ledger.export()}
        assert {"alone", "bind", "carried over", "exclusive", "reassign"} <= kinds
        assert set(old) < {entry.hash for entry in ledger.export()}
        assert ledger.verify().sound


def test_a_damaged_row_of_a_stored_ledger_is_found(ledger_at: LedgerAt) -> None:
    address = ledger_at("filled")
    with sqlite3.connect(address) as database:
        database.execute("UPDATE journal SET units = units - 1 WHERE kind = 'carried over'")
    with Ledger(address) as ledger:
        assert not ledger.verify().sound


def test_a_service_goes_on_with_stored_models_and_their_ledger(copied: Copy, ledger_at: LedgerAt) -> None:
    """Nothing is charged again: not training, not the budget that moved into the ledger, not stored answers."""
    stored = EXPECTED["ledger served"]
    folders = {name: copied(name, "served") for name in stored["models"]}
    with Ledger(ledger_at("served")) as ledger:
        private = load_models([f"{name}={folders[name]}" for name in ("crowd", "released")])
        plain = load_models(
            [f"plain={folders['plain']}"], budget=Terms(10.0), queries=20, accept_unproven=True
        )
        deployments = [*deploy(ledger, private), *deploy(ledger, plain, budget=Terms(10.0))]
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
