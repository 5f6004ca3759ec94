"""The supervisor's decisions, with services that end at once: when it starts one again, waits, stops or gives up."""

from __future__ import annotations

import io
import os
import shutil
import signal
import socket

import numpy as np
import pytest

from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.estimators import DPSGD, PrivateHead, Teachers, save_private
from quietmax.ledger import Charge, Charged, Ledger, LedgerUnavailable, Terms
from quietmax.models import TrainingSettings
from quietmax.models.features import Identity
from quietmax.server import deploy, load_servables
from quietmax.server import run as supervisor
from quietmax.server.metrics import Log
from quietmax.server.run import Listening, open_port, supervise


@pytest.fixture
def starts(tmp_path, monkeypatch):
    """Supervise services that behave as told, one after the other; the number of services that were started.

    A service runs in a process of its own, so that what it did is read off a file.
    """
    monkeypatch.setattr(supervisor, "run", lambda *_: None)
    monkeypatch.setattr(supervisor, "_end_with_parent", lambda _: None)
    record = tmp_path / "starts"
    record.write_bytes(b"")

    def supervised(*behaviours):
        def make():
            number = record.stat().st_size
            with record.open("ab") as file:
                file.write(b".")
            behaviours[number]()

        with socket.socket() as port:
            supervise(make, Listening(), port, Log(io.BytesIO()))
        return record.stat().st_size

    yield supervised
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def _away():
    raise LedgerUnavailable("The ledger is away.")


def _broken():
    raise QuietmaxError("The model is broken.")


def _killed():
    os.kill(os.getpid(), signal.SIGKILL)


def _stop_the_parent():
    os.kill(os.getppid(), signal.SIGTERM)
    _away()


def _well():
    return None


def test_a_service_that_ends_well_is_not_started_again(starts):
    assert starts(_well) == 1


def test_a_service_that_is_killed_is_started_again(starts):
    assert starts(_killed, _well) == 2


def test_a_ledger_that_is_away_is_tried_until_it_is_back_however_often(starts, monkeypatch):
    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE_SECONDS", 0.05)
    assert starts(*[_away] * (supervisor._MOST_FAILURES + 2), _well) == supervisor._MOST_FAILURES + 3


def test_a_service_that_dies_at_every_start_is_given_up(starts, tmp_path):
    with pytest.raises(QuietmaxError, match="died several times right after its start"):
        starts(*[_broken] * 9)
    assert (tmp_path / "starts").stat().st_size == supervisor._MOST_FAILURES


def test_a_service_that_lasted_is_no_failure_at_the_start(starts, monkeypatch):
    monkeypatch.setattr(supervisor, "_AT_LEAST_SECONDS", 0.0)
    assert starts(*[_broken] * 6, _well) == 7


def test_asked_to_stop_it_starts_no_service_again(starts):
    assert starts(_stop_the_parent, _well) == 1


def test_a_port_that_is_taken_is_refused_with_a_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(
            InvalidInput, match=f"cannot listen on 127.0.0.1:{number} .*; choose another port"
        ):
            open_port(Listening(port=number))


PUBLIC = {"declared_size": 120, "classes": (0, 1)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    rng = np.random.default_rng(0)
    features = rng.random((120, 3), dtype=np.float32)
    labels = (features[:, 0] > 0.5).astype(int)
    for name, epsilon in (("strong", 1.0), ("weak", 50.0)):
        private = DPSGD(epsilon, 1e-5, sampling_rate=0.5, steps=4, **PUBLIC).fit(features, labels)
        assert private.guarantee_.definition == "approximate"
        save_private(private, folder / name, dataset="people")
    asked = Teachers(1.0, 1e-5, 10, 3, network=TrainingSettings((4,), epochs=1), **PUBLIC)
    save_private(asked.fit(features, labels), folder / "asked", dataset="people")
    released = PrivateHead(1.0, 1e-5, features=Identity(), **PUBLIC).fit(features, labels)
    save_private(released, folder / "released", dataset="people")
    return folder


@pytest.fixture
def folders(trained, tmp_path):
    """Copies of the model folders: serving one takes its account into the ledger."""
    return shutil.copytree(trained, tmp_path / "models")


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as opened:
        yield opened


def _bind(ledger, folders, name, **options):
    return next(iter(deploy(ledger, load_servables([str(folders / name)]), **options)))


@pytest.mark.parametrize("delta", [1e-5, 1e-9])
def test_a_model_weaker_than_the_budget_is_refused_and_opens_no_account(folders, ledger, delta):
    name, epsilon = ("weak", 1.0) if delta == 1e-5 else ("strong", 2.0)
    with pytest.raises(InvalidInput, match="which its account promises; train it for less"):
        _bind(ledger, folders, name, budget=Terms(epsilon, delta))
    assert ledger.accounts() == []
    assert _bind(ledger, folders, "strong").status == "proven"


def test_it_takes_the_account_whole_once_and_nothing_can_be_granted_afterwards(folders, ledger):
    for _ in range(2):
        deployment = _bind(ledger, folders, "strong")
        assert (deployment.account.remaining_units, deployment.guarantee(deployment.account).epsilon) == (
            0,
            1.0,
        )
    with pytest.raises(InvalidInput, match="taken whole by the model strong/1"):
        ledger.grant("people", Terms(2.0, 1e-5), "more budget for another model")
    with pytest.raises(InvalidInput, match="which its account promises"):
        _bind(ledger, folders, "weak")
    assert [entry.kind for entry in ledger.export("people")] == ["open", "exclusive", "training"]
    assert ledger.verify().sound


def test_it_takes_grants_made_before_too_and_leaves_nothing_for_others(folders, ledger):
    assert _bind(ledger, folders, "asked").account.remaining_units > 0
    ledger.grant("people", Terms(2.0, 1e-5), "more budget for the second model")
    assert _bind(ledger, folders, "strong").account.remaining_units == 0
    assert _bind(ledger, folders, "asked").account.remaining_units == 0
    assert ledger.verify().sound


def test_it_comes_too_late_for_an_account_that_has_paid_already(folders, ledger):
    deployment = _bind(ledger, folders, "asked")
    charge = Charge(
        deployment.account.id, ledger.client("ann"), deployment.label, deployment.unit_cost, rows=1
    )
    assert isinstance(ledger.charge(charge), Charged)
    with pytest.raises(InvalidInput, match="has paid for something already; give it an account of its own"):
        _bind(ledger, folders, "strong")
    assert ledger.account("people").spent_units == deployment.unit_cost


def test_a_model_that_has_spent_more_than_the_budget_asked_for_opens_no_account(folders, ledger):
    with pytest.raises(QuietmaxError, match=r"more than the budget of epsilon 0\.5 and delta 1e-05"):
        _bind(ledger, folders, "released", budget=Terms(0.5, 1e-5))
    assert ledger.accounts() == []
    assert _bind(ledger, folders, "released").account.spent_units > 0


@pytest.mark.parametrize("lowered", ["grant", "revoke"])
def test_it_is_not_served_from_an_account_that_was_lowered_below_its_terms(folders, ledger, lowered):
    _bind(ledger, folders, "asked")
    if lowered == "grant":
        ledger.grant("people", Terms(0.1, 1e-5), "less budget than at first")
    else:
        ledger.revoke("people", None, "nothing more for anybody")
    with pytest.raises(InvalidInput, match="was lowered below the terms it was opened with"):
        _bind(ledger, folders, "strong")
    assert "exclusive" not in [entry.kind for entry in ledger.export("people")]
