from __future__ import annotations

import json

import numpy as np
import pytest

from quietmax.account import BudgetExhausted
from quietmax.accounting import Budget, epsilon_of
from quietmax.data import Encoding
from quietmax.data.columns import NumericColumn
from quietmax.errors import DataUnavailable, InvalidInput
from quietmax.estimators import PrivateHead, open_private, save_private
from quietmax.models.features import Identity


def _data():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 400)
    return (2 * np.eye(3)[labels] @ generator.normal(size=(3, 6)) + generator.normal(size=(400, 6))).astype(
        np.float32
    ), labels


def _fitted(**changes) -> PrivateHead:
    options = {"epsilon": 50.0, "delta": 1e-5, "classes": range(3), "declared_size": 400}
    return PrivateHead(**(options | changes)).fit(*_data())


@pytest.mark.parametrize("route", ["gradient", "output"])
def test_a_saved_head_answers_any_number_of_queries_as_before(tmp_path, route):
    head, (features, _) = _fitted(route=route), _data()
    folder = save_private(head, tmp_path / "model", dataset="made up")
    opened = open_private(folder)
    np.testing.assert_array_equal(opened.predict_proba(features), head.predict_proba(features))
    np.testing.assert_array_equal(opened.predict(features), head.predict(features))
    assert opened.remaining is None
    assert opened.guarantee == head.guarantee_
    assert opened.guarantee.status == "proven"


def test_a_head_that_answers_per_query_keeps_its_account_and_its_bounds(tmp_path):
    head, (features, _) = _fitted(route="output", release="query", queries=4), _data()
    folder = save_private(head, tmp_path / "model", dataset="made up")
    opened = open_private(folder)
    assert opened.remaining == 4
    opened.predict(features[:3])
    again = open_private(folder)
    assert again.remaining == 1
    assert again.answerer.model.bounds == head.predictor_.model.bounds
    with pytest.raises(BudgetExhausted):
        again.predict(features[5:7])


@pytest.mark.parametrize("release", ["weights", "query"])
def test_settings_of_a_head_changed_after_training_change_nothing_that_is_saved(tmp_path, release):
    head, (features, _) = _fitted(route="output", release=release, queries=4), _data()
    head.set_params(epsilon=900.0, delta=0.1, queries=9000, radius=100.0)
    head.set_params(release={"weights": "query", "query": "weights"}[release])
    folder = save_private(head, tmp_path / "model", dataset="made up")
    opened, description = open_private(folder), json.loads((folder / "model.json").read_text())
    assert (description["epsilon"], description["radius"]) == (50.0, 1.0)
    if release == "weights":
        assert (description["delta"], opened.remaining) == (1e-5, None)
        np.testing.assert_array_equal(opened.predict(features), head.predict(features))
    else:
        assert opened.answerer.budget == Budget(50.0, 0.0, 4)


def test_a_head_trained_for_mu_is_filed_with_the_epsilon_that_mu_means(tmp_path):
    folder = save_private(_fitted(mu=3.0), tmp_path / "model", dataset="made up")
    assert json.loads((folder / "model.json").read_text())["epsilon"] == epsilon_of(3.0, 1e-5) > 10


def test_an_encoding_measured_on_the_records_makes_a_saved_guarantee_conditional(tmp_path):
    measured = Encoding(
        tuple(NumericColumn(name, 0.0, 1.0) for name in "abcdef"),
        "y",
        ("0", "1", "2"),
        measurements=("the bounds of a",),
    )
    head = _fitted()
    folder = save_private(head, tmp_path / "model", dataset="made up", encoding=measured)
    guarantee = open_private(folder).guarantee
    assert (head.guarantee_.status, guarantee.status) == ("proven", "conditional")
    assert guarantee.assumptions[-1].startswith("What was read off the records is public: ")
    path = folder / "model.json"
    path.write_text(path.read_text().replace('"status": "conditional"', '"status": "proven"'))
    with pytest.raises(
        DataUnavailable, match="states status 'proven', but the rest of it implies 'conditional'"
    ):
        open_private(folder)


def test_a_map_with_code_of_the_users_own_is_not_saved_as_one_of_ours(tmp_path):
    class Halved(Identity):
        def _features(self, records):
            return records / 2

    with pytest.raises(InvalidInput, match="feature map that is not one of"):
        save_private(_fitted(features=Halved()), tmp_path / "model", dataset="made up")


def test_labels_of_any_type_survive(tmp_path):
    features, labels = _data()
    names = np.array(["a", "b", "c"])
    head = PrivateHead(epsilon=50.0, classes=names, declared_size=400).fit(features, names[labels])
    assert open_private(save_private(head, tmp_path / "model", dataset="made up")).classes == ("a", "b", "c")


def test_a_damaged_head_and_a_model_of_another_kind_give_one_sentence(tmp_path):
    folder = save_private(_fitted(), tmp_path / "model", dataset="made up")
    path = folder / "model.json"
    for broken in ({"features": {}}, {"bias": None}, {"classes": None}, {"guarantee": {}}):
        path.write_text(json.dumps(json.loads(path.read_text()) | broken))
        with pytest.raises(DataUnavailable, match="damaged"):
            open_private(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kind": "mlp"}))
    with pytest.raises(InvalidInput, match="not a private one"):
        open_private(folder)
