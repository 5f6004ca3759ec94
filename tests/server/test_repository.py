from __future__ import annotations

import hashlib
import json
import shutil

import numpy as np
import pytest

from quietmax.accounting import LIMIT, GaussianCost, Guarantee, PureCost
from quietmax.errors import BudgetExhausted, DataUnavailable, InvalidInput, QuietmaxError
from quietmax.estimators import open_private
from quietmax.ledger import Ledger, Terms
from quietmax.server import deploy, load_servables
from quietmax.server.deployment import Deployment, Deployments, account_name
from quietmax.server.repository import LOADERS, Folder, named_folder, paid_at_training
from quietmax.spending import FileAccount
from tests.server.running_service import FEATURES, some_rows


@pytest.fixture
def folder(models, tmp_path):
    """A copy of the models, whose accounts may be emptied."""
    shutil.copytree(models, tmp_path / "models")
    return tmp_path / "models"


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as opened:
        yield opened


def test_a_model_without_proven_guarantee_is_refused_unless_accepted(folder):
    with pytest.raises(InvalidInput, match=r"is refuted, not proven: .* --accept-unproven"):
        load_servables([str(folder / "plain")], budget=Terms(1.0))
    (named,) = load_servables([str(folder / "plain")], budget=Terms(1.0), accept_unproven=True)
    assert named.servable.claim.status == "refuted"
    for name in ("head", "teachers", "asked"):
        assert load_servables([str(folder / name)])[0].servable.proven


def test_a_head_trained_with_a_seed_is_refused_like_any_other_that_is_not_proven(tmp_path):
    from quietmax.estimators import PrivateHead, save_private
    from quietmax.models.features import Identity

    rng = np.random.default_rng(0)
    head = PrivateHead(
        1.0, 1e-5, features=Identity(), declared_size=60, classes=range(2), random_state=0
    ).fit(rng.normal(size=(60, 3)), rng.integers(0, 2, 60))
    save_private(head, tmp_path / "seeded", dataset="d")
    with pytest.raises(InvalidInput, match="is conditional, not proven"):
        load_servables([str(tmp_path / "seeded")])


def test_a_folder_that_claims_to_be_proven_without_being_a_known_kind_is_refused(folder):
    path = folder / "plain" / "model.json"
    description = json.loads(path.read_text())
    path.write_text(json.dumps({**description, "kind": "pickle"}))
    with pytest.raises(
        InvalidInput, match=r"of kind 'pickle', which cannot be served; serve one of the kinds: mlp"
    ):
        load_servables([str(folder / "plain")])
    with pytest.raises(DataUnavailable, match="no model in"):
        load_servables([str(folder)])


def test_a_further_kind_is_one_function(folder, monkeypatch, ledger):
    def load(place: Folder):
        claim = Guarantee.of(
            GaussianCost(0.5), status="proven", because="A test of the registry (THEORY 3.1)."
        )
        return paid_at_training(
            place,
            lambda rows: rows,
            kind="own",
            inputs=3,
            classes=("a", "b"),
            claim=claim,
            terms=Terms(1.0, 1e-5),
        )

    monkeypatch.setitem(LOADERS, "own", load)
    path = folder / "plain" / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "kind": "own"}))
    (deployment,) = deploy(ledger, load_servables([str(folder / "plain")]))
    assert (deployment.unit_cost, deployment.account.spent_units) == (0, LIMIT)


@pytest.mark.parametrize(
    ("text", "name", "version"),
    [("a/b", "b", "1"), ("x=a/b", "x", "1"), ("x/7=a/b", "x", "7"), ("x/v1.2=/a", "x", "v1.2")],
)
def test_models_are_named_by_folder_or_by_words(text, name, version):
    assert named_folder(text)[:2] == (name, version)


@pytest.mark.parametrize("text", ["", "a b=c", "x/=c", "ä=c", "x/1 2=c", "/"])
def test_odd_names_of_models_are_refused(text):
    with pytest.raises(InvalidInput):
        named_folder(text)


def test_two_models_of_one_name_and_version_are_refused(folder):
    with pytest.raises(InvalidInput, match=r"Two models are called head/1"):
        load_servables([str(folder / "head"), f"head={folder / 'head'}"])


def test_an_ordinary_model_needs_a_budget_and_algorithm_1(folder):
    with pytest.raises(InvalidInput, match="give --budget"):
        load_servables([str(folder / "plain")], accept_unproven=True)
    with pytest.raises(InvalidInput, match="choose algorithm1"):
        load_servables(
            [str(folder / "plain")], budget=Terms(1.0), mechanism="sampled-neuron", accept_unproven=True
        )
    with pytest.raises(InvalidInput, match="leave the mechanism out"):
        load_servables([str(folder / "teachers")], mechanism="algorithm1")
    with pytest.raises(InvalidInput, match="need no mechanism"):
        load_servables([str(folder / "head")], mechanism="sampled-neuron")


def test_a_retrained_model_of_the_same_data_set_continues_its_account(folder, ledger):
    loaded = load_servables([f"one={folder / 'plain'}"], budget=Terms(1.0), queries=10, accept_unproven=True)
    (first,) = deploy(ledger, loaded, budget=Terms(1.0))
    retrained = load_servables(
        [f"two={folder / 'plain'}"], budget=Terms(1.0), queries=5, accept_unproven=True
    )
    (second,) = deploy(ledger, retrained, budget=Terms(1.0))
    assert first.account.id == second.account.id
    assert (first.unit_cost, second.unit_cost) == (LIMIT // 10, LIMIT // 5)
    with pytest.raises(InvalidInput, match="was opened with mu = 1"):
        deploy(ledger, loaded, budget=Terms(2.0))
    (again,) = deploy(ledger, loaded)
    assert again.account.id == first.account.id


def test_records_are_counted_in_a_second_account_only_with_a_reason_in_words(folder, ledger):
    loaded = load_servables([str(folder / "head")])
    (first,) = deploy(ledger, loaded)
    with pytest.raises(InvalidInput, match=r"belong to the account 'visitors'.*give a reason in words"):
        deploy(ledger, loaded, account="fresh")
    with pytest.raises(InvalidInput, match="must be a sentence"):
        deploy(ledger, loaded, account="fresh", because="because")
    assert [account.name for account in ledger.accounts()] == ["visitors"]
    (second,) = deploy(ledger, loaded, account="fresh", because="New records came in under the old name.")
    assert second.account.name == "fresh"
    (third,) = deploy(ledger, loaded)
    assert third.account.id == second.account.id != first.account.id
    told = [json.loads(row.detail) for row in ledger.export() if row.kind in ("open", "reassign")]
    assert sum("New records came in" in detail.get("because", "") for detail in told) == 2
    assert ledger.verify().sound


def test_two_releases_from_the_same_records_share_one_budget(folder, ledger):
    head = load_servables([str(folder / "head")])
    teachers = load_servables([str(folder / "teachers")])
    budget = Terms(4.0, 1e-5)
    (one,) = deploy(ledger, head, budget=budget, account="same")
    spent = ledger.account("same").spent_units
    assert 0 < spent < LIMIT
    assert spent == one.account.units(one.servable.training_cost)
    (two,) = deploy(ledger, teachers, account="same")
    assert two.account.id == one.account.id
    assert ledger.account("same").spent_units == spent
    deploy(ledger, head, account="same")
    assert ledger.account("same").spent_units == spent, "training is charged once"


def test_a_head_that_cost_more_than_what_is_left_is_not_served(folder, ledger):
    head = load_servables([str(folder / "head")])
    few = Terms(0.5, 1e-5)
    ledger.open_account("visitors", few.total("gaussian"), few)
    with pytest.raises(QuietmaxError, match="spent more than what is left"):
        deploy(ledger, head)
    assert ledger.account("visitors").spent_units == 0


def test_a_gaussian_model_is_not_paid_from_a_pure_account(folder, ledger):
    ledger.open_account("patients", PureCost(9.0), Terms(9.0))
    with pytest.raises(InvalidInput, match="cannot be paid from the account 'patients'"):
        deploy(ledger, load_servables([str(folder / "teachers")]))


def test_what_a_folder_had_answered_is_carried_into_the_ledger_and_nothing_is_left_in_it(folder, ledger):
    rows = some_rows(7).astype(np.float32)
    open_private(folder / "teachers").predict(rows)
    (deployment,) = deploy(ledger, load_servables([str(folder / "teachers")]))
    assert deployment.account.remaining_units // deployment.unit_cost == 33
    with pytest.raises(BudgetExhausted):
        open_private(folder / "teachers").predict(rows + 1)
    deploy(ledger, load_servables([str(folder / "teachers")]))
    assert ledger.account("patients").spent_units == 7 * deployment.unit_cost, "carried over once"
    assert [row.kind for row in ledger.export("patients")] == ["open", "migrated-budget"]


def test_another_ledger_believes_that_an_emptied_folder_is_spent(folder, ledger, tmp_path):
    deploy(ledger, load_servables([str(folder / "teachers")]))
    with Ledger(tmp_path / "second.sqlite") as second:
        (deployment,) = deploy(second, load_servables([str(folder / "teachers")]))
        assert deployment.account.remaining_units < deployment.unit_cost


def test_an_answer_from_the_folder_while_it_is_carried_over_is_charged_too(folder, ledger, monkeypatch):
    account = FileAccount(folder / "teachers" / "account.json")
    original = Ledger.charge
    sneaked = []

    def sneaking(self, charge):
        outcome = original(self, charge)
        if charge.kind == "migrated-budget" and not sneaked:
            sneaked.append(account.charge(2, 40))
        return outcome

    monkeypatch.setattr(Ledger, "charge", sneaking)
    (deployment,) = deploy(ledger, load_servables([str(folder / "teachers")]))
    assert ledger.account("patients").spent_units == 2 * deployment.unit_cost
    assert account.answered == 40


def test_versions_are_ordered_as_numbers(ledger, folder):
    (deployment,) = deploy(ledger, load_servables([str(folder / "head")]))
    versions = ["2", "10", "1", "v2", "v10"]
    deployments = Deployments(
        [Deployment("head", version, deployment.servable, deployment.account, 0) for version in versions]
    )
    assert deployments.versions("head") == ["1", "2", "10", "v2", "v10"]
    assert deployments.find("head", None).version == "v10"
    assert deployments.find("head", "2").version == "2"
    assert deployments.find("head", "3") is None


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("mnist", "mnist"),
        ("my people.csv", "my-people.csv"),
        ("/data/x", "data-x"),
        ("", "records"),
        ("(keys)", "keys"),
    ],
)
def test_a_data_set_names_its_account(dataset, name):
    assert account_name(dataset) == name


def test_the_digest_of_a_served_model_changes_with_weights_and_mechanism(folder):
    def digest(**more):
        return load_servables([str(folder / "plain")], budget=Terms(1.0), accept_unproven=True, **more)[
            0
        ].servable.digest

    first = digest()
    assert first == digest()
    assert first != digest(queries=2)
    assert first != digest(noise="laplace")
    weights = folder / "plain" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    with pytest.raises(DataUnavailable, match=r"are not those that model\.json describes"):
        digest()
    path = folder / "plain" / "model.json"
    description = json.loads(path.read_text())
    path.write_text(json.dumps(description | {"weights_sha256": hashlib.sha256(content).hexdigest()}))
    assert first != digest()


def test_images_are_taken_in_their_own_shape(tmp_path):
    from quietmax.models import Model, TrainingSettings, save_model
    from quietmax.models.mlp import initial_mlp
    from quietmax.server.codec import read_query

    model = Model(
        initial_mlp((FEATURES, 4, 2), "tanh", (0,)), TrainingSettings((4,)), 9, "d", 0, None, (1, 2, 3)
    )
    save_model(model, tmp_path / "image")
    (named,) = load_servables([str(tmp_path / "image")], budget=Terms(1.0), accept_unproven=True)
    request = {
        "inputs": [{"name": "features", "shape": [2, 1, 2, 3], "datatype": "FP32", "data": [0.5] * 12}]
    }
    assert read_query(json.dumps(request).encode(), None, named.servable, 5).rows.shape == (2, FEATURES)
    assert named.servable.claim.status == "conditional"
