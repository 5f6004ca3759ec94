"""A guarantee that adds up with no other: its model takes an account whole, within what the account promises."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.estimators import DPSGD, PrivateHead, Teachers, save_private
from quietmax.ledger import Charge, Charged, Ledger, Terms
from quietmax.models import TrainingSettings
from quietmax.models.features import Identity
from quietmax.server import bind, load_servables

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
    return next(iter(bind(ledger, load_servables([str(folders / name)]), **options)))


@pytest.mark.parametrize("delta", [1e-5, 1e-9])
def test_a_model_weaker_than_the_budget_is_refused_and_opens_no_account(folders, ledger, delta):
    name, epsilon = ("weak", 1.0) if delta == 1e-5 else ("strong", 2.0)
    with pytest.raises(InvalidInput, match="which its account promises; train it for less"):
        _bind(ledger, folders, name, budget=Terms(epsilon, delta))
    assert ledger.accounts() == []
    assert _bind(ledger, folders, "strong").status == "proven"


def test_it_takes_the_account_whole_once_and_nothing_can_be_granted_afterwards(folders, ledger):
    for _ in range(2):
        offer = _bind(ledger, folders, "strong")
        assert (offer.account.left_units, offer.guarantee(offer.account).epsilon) == (0, 1.0)
    with pytest.raises(InvalidInput, match="taken whole by the model strong/1"):
        ledger.grant("people", Terms(2.0, 1e-5), "more budget for another model")
    with pytest.raises(InvalidInput, match="which its account promises"):
        _bind(ledger, folders, "weak")
    assert [entry.kind for entry in ledger.export("people")] == ["open", "alone", "training"]
    assert ledger.verify().sound


def test_it_takes_grants_made_before_too_and_leaves_nothing_for_others(folders, ledger):
    assert _bind(ledger, folders, "asked").account.left_units > 0
    ledger.grant("people", Terms(2.0, 1e-5), "more budget for the second model")
    assert _bind(ledger, folders, "strong").account.left_units == 0
    assert _bind(ledger, folders, "asked").account.left_units == 0
    assert ledger.verify().sound


def test_it_comes_too_late_for_an_account_that_has_paid_already(folders, ledger):
    offer = _bind(ledger, folders, "asked")
    charge = Charge(offer.account.id, ledger.client("ann"), offer.label, offer.unit_cost, rows=1)
    assert isinstance(ledger.charge(charge), Charged)
    with pytest.raises(InvalidInput, match="has paid for something already; give it an account of its own"):
        _bind(ledger, folders, "strong")
    assert ledger.account("people").spent_units == offer.unit_cost


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
    assert "alone" not in [entry.kind for entry in ledger.export("people")]
