"""Folders whose description was changed by hand: one sentence when they are opened, before anything is paid for."""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import pytest
import torch

from quietmax.accounting import Budget, epsilon_of
from quietmax.data import Encoding, NumericColumn
from quietmax.errors import BudgetExhausted, DataUnavailable, InvalidInput
from quietmax.estimators import DPSGD, PrivateHead, Teachers, open_private, save_private
from quietmax.ledger import Terms
from quietmax.models import CrossEntropy, TrainingSettings
from quietmax.models.features import Identity, UnitNorm
from quietmax.predictor import Predictor
from quietmax.privacy_card import read_card
from quietmax.server import load_models
from quietmax.spending import FileAccount


def _data():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 400)
    return (2 * np.eye(3)[labels] @ generator.normal(size=(3, 6)) + generator.normal(size=(400, 6))).astype(
        np.float32
    ), labels


def _fitted(**changes) -> PrivateHead:
    options = {"epsilon": 50.0, "delta": 1e-5, "classes": range(3), "declared_size": 400}
    return PrivateHead(**(options | changes)).fit(*_data())


@pytest.mark.parametrize("method", ["gradient", "output"])
def test_a_saved_head_answers_any_number_of_queries_as_before(tmp_path, method):
    head, (features, _) = _fitted(method=method), _data()
    folder = save_private(head, tmp_path / "model", dataset="made up")
    opened = open_private(folder)
    np.testing.assert_array_equal(opened.predict_proba(features), head.predict_proba(features))
    np.testing.assert_array_equal(opened.predict(features), head.predict(features))
    assert opened.remaining is None
    assert opened.guarantee == head.guarantee_
    assert opened.guarantee.status == "proven"


def test_a_head_that_answers_per_query_keeps_its_account_and_its_bounds(tmp_path):
    head, (features, _) = _fitted(method="output", release="query", queries=4), _data()
    folder = save_private(head, tmp_path / "model", dataset="made up")
    opened = open_private(folder)
    assert opened.remaining == 4
    opened.predict(features[:3])
    again = open_private(folder)
    assert again.remaining == 1
    assert again.classifier.model.bounds == head.predictor_.model.bounds
    with pytest.raises(BudgetExhausted):
        again.predict(features[5:7])


@pytest.mark.parametrize("release", ["weights", "query"])
def test_settings_of_a_head_changed_after_training_change_nothing_that_is_saved(tmp_path, release):
    head, (features, _) = _fitted(method="output", release=release, queries=4), _data()
    head.set_params(epsilon=900.0, delta=0.1, queries=9000, radius=100.0)
    head.set_params(release={"weights": "query", "query": "weights"}[release])
    folder = save_private(head, tmp_path / "model", dataset="made up")
    opened, description = open_private(folder), json.loads((folder / "model.json").read_text())
    assert (description["epsilon"], description["radius"]) == (50.0, 1.0)
    if release == "weights":
        assert (description["delta"], opened.remaining) == (1e-5, None)
        np.testing.assert_array_equal(opened.predict(features), head.predict(features))
    else:
        assert opened.classifier.budget == Budget(50.0, 0.0, 4)


def test_a_head_trained_for_mu_is_filed_with_the_epsilon_that_mu_means(tmp_path):
    folder = save_private(_fitted(mu=3.0), tmp_path / "model", dataset="made up")
    assert json.loads((folder / "model.json").read_text())["epsilon"] == epsilon_of(3.0, 1e-5) > 10


def test_an_encoding_measured_on_the_records_makes_a_saved_guarantee_conditional(tmp_path):
    measured = Encoding(
        tuple(NumericColumn(name, 0.0, 1.0) for name in "abcdef"),
        "y",
        ("0", "1", "2"),
        inferred=("the bounds of a",),
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


LINEAR = TrainingSettings(hidden=(), loss=CrossEntropy(), learning_rate=0.05, epochs=20, batch_size=8)


def _fitted_of_teachers_file(**changes) -> tuple[Teachers, np.ndarray]:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 120)
    features = (3 * (2 * labels[:, None] - 1) + generator.normal(size=(120, 4))).astype(np.float32)
    options = {
        "epsilon": 200.0,
        "queries": 5,
        "teachers": 4,
        "network": LINEAR,
        "declared_size": 120,
        "classes": ["no", "yes"],
    }
    return Teachers(**(options | changes)).fit(features, np.array(["no", "yes"])[labels]), features


@pytest.mark.parametrize(
    "changes", [{}, {"features": UnitNorm(constant=1.0)}, {"release": "probabilities"}], ids=str
)
def test_saved_teachers_answer_as_before_and_keep_their_account(tmp_path, changes):
    teachers, features = _fitted_of_teachers_file(**changes)
    before = teachers.predict(features[:1])
    folder = save_private(teachers, tmp_path / "model", dataset="made up")
    opened = open_private(folder)
    assert opened.classes == ("no", "yes")
    assert opened.guarantee == teachers.guarantee_
    assert (np.array(opened.classes)[opened.predict(features[:2])][:1] == before).all()
    assert opened.remaining == 2
    again = open_private(folder)
    assert again.remaining == 2
    with pytest.raises(BudgetExhausted):
        again.predict(features[10:13])
    if changes.get("release") == "probabilities":
        np.testing.assert_allclose(again.predict_proba(features[20:21]).sum(1), 1.0)


def test_a_budget_lives_in_one_place(tmp_path):
    """In memory until it is saved, then in the folder, with what was spent of it."""
    teachers, features = _fitted_of_teachers_file()
    teachers.predict(features[:2])
    with pytest.raises(InvalidInput, match="exists already"):
        save_private(teachers, tmp_path, dataset="made up")
    assert teachers.remaining.queries == 3, "what could not be saved goes on in memory"
    folder = save_private(teachers, tmp_path / "model", dataset="made up")
    assert open_private(folder).remaining == teachers.remaining.queries == 3
    open_private(folder).predict(features[2:4])
    assert teachers.remaining.queries == 1
    teachers.predict(features[4:5])
    for asked in (teachers, open_private(folder)):
        with pytest.raises(BudgetExhausted):
            asked.predict(features[5:6])
    with pytest.raises(InvalidInput, match="lives there alone"):
        save_private(teachers, tmp_path / "second", dataset="made up")
    assert not (tmp_path / "second").exists()


def test_a_folder_in_which_something_was_spent_is_not_overwritten(tmp_path):
    teachers, features = _fitted_of_teachers_file()
    folder = save_private(teachers, tmp_path / "model", dataset="made up")
    save_private(_fitted_of_teachers_file()[0], folder, dataset="made up", overwrite=True)
    open_private(folder).predict(features[:2])
    with pytest.raises(InvalidInput, match="counts 2 answers paid for"):
        save_private(_fitted_of_teachers_file()[0], folder, dataset="made up", overwrite=True)
    assert open_private(folder).remaining == 3


def test_settings_changed_after_training_change_nothing_that_is_saved(tmp_path):
    teachers, _ = _fitted_of_teachers_file(features=UnitNorm(constant=1.0))
    teachers.set_params(epsilon=900.0, delta=0.1, queries=9000, features=None, release="probabilities")
    opened = open_private(save_private(teachers, tmp_path / "model", dataset="made up"))
    assert opened.classifier.budget == Budget(200.0, 1e-5, 5)
    assert opened.features == UnitNorm(constant=1.0)
    assert opened.classifier.guarantee.cost == teachers.guarantee_.cost


def test_the_key_is_not_stored(tmp_path):
    teachers, _ = _fitted_of_teachers_file()
    folder = save_private(teachers, tmp_path / "model", dataset="made up")
    assert "key" not in json.loads((folder / "model.json").read_text())


def test_what_cannot_be_saved_is_refused(tmp_path):
    modules, _ = _fitted_of_teachers_file(network=lambda width, classes: torch.nn.Linear(width, classes))
    with pytest.raises(InvalidInput, match="built-in network"):
        save_private(modules, tmp_path / "model", dataset="made up")

    class Mine:
        def transform(self, records):
            return records

    with pytest.raises(InvalidInput, match="feature map"):
        save_private(_fitted_of_teachers_file(features=Mine())[0], tmp_path / "model", dataset="made up")


def test_damaged_teachers_give_one_sentence(tmp_path):
    folder = save_private(_fitted_of_teachers_file()[0], tmp_path / "model", dataset="made up")
    path = folder / "model.json"
    whole = json.loads(path.read_text())
    for broken in (
        {"queries": 0},
        {"method": "best"},
        {"classes": None},
        {"widths": None},
        {"widths": []},
        {"widths": [5, 2]},
    ):
        path.write_text(json.dumps(whole | broken))
        with pytest.raises(DataUnavailable, match="damaged"):
            open_private(folder).predict(np.zeros((1, 4), np.float32))


GENERATOR = np.random.default_rng(0)
LABELS = GENERATOR.integers(0, 2, 60)
FEATURES = np.abs(GENERATOR.normal(size=(60, 2)) + LABELS[:, None]).astype(np.float32)
ENCODING = Encoding((NumericColumn("a", 0, 4),), "y", ("no", "yes"))
ESTIMATORS = {
    "head": PrivateHead(declared_size=60, classes=(0, 1), features=UnitNorm(1.0)),
    "head asked": PrivateHead(
        declared_size=60, classes=(0, 1), method="output", release="query", queries=5, features=UnitNorm(1.0)
    ),
    "teachers": Teachers(
        declared_size=60, classes=(0, 1), queries=5, teachers=3, features=UnitNorm(1.0)
    ),
    "dpsgd": DPSGD(declared_size=60, classes=(0, 1), features=UnitNorm(1.0), steps=2, random_state=0),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder for each kind of private model."""
    place = tmp_path_factory.mktemp("models")
    return {
        kind: save_private(
            estimator.fit(FEATURES, LABELS), place / kind, dataset="made up", encoding=ENCODING
        )
        for kind, estimator in ESTIMATORS.items()
    }


def _changed(folder, target, **changes):
    shutil.copytree(folder, target, dirs_exist_ok=True)
    path = target / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return target


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_folder_as_it_was_written_is_opened(saved, kind):
    assert open_private(saved[kind]).inputs == 2


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize(
    "changes",
    [
        {"features": None},
        {"inputs": 3},
        {"inputs": 0},
        {"inputs": 1e308},
        {"inputs": 10**12},
        {"classes": ["no"]},
        {"classes": ["no", "yes", "perhaps"]},
        {"encoding": json.loads(Encoding((NumericColumn("a", 0, 4),), "y", ("a", "b", "c")).to_json())},
        {"guarantee": -1},
        {"guarantee": [None]},
    ],
    ids=str,
)
def test_parts_that_do_not_fit_together_are_refused_in_a_sentence(saved, kind, changes, tmp_path):
    with pytest.raises(DataUnavailable, match="is damaged") as refusal:
        open_private(_changed(saved[kind], tmp_path / "bad", **changes))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "silent",
    [None, -1, "x", [], {}, 1e308, True, [None], [False] * 2, [0, 0, 0], ["", "", ""], [[False]] * 3],
    ids=str,
)
def test_teachers_that_do_not_say_who_is_silent_are_refused_in_a_sentence(saved, silent, tmp_path):
    with pytest.raises(DataUnavailable, match="is damaged"):
        open_private(_changed(saved["teachers"], tmp_path / "bad", silent=silent))


GENERATOR_of_contradicting_folders = np.random.default_rng(0)
LABELS_of_contradicting_folders = GENERATOR_of_contradicting_folders.integers(0, 2, 60)
FEATURES_of_contradicting_folders = np.abs(
    GENERATOR_of_contradicting_folders.normal(size=(60, 2)) + LABELS_of_contradicting_folders[:, None]
).astype(np.float32)
LINEAR_of_contradicting_folders = TrainingSettings(
    hidden=(), loss=CrossEntropy(), learning_rate=0.05, epochs=2, batch_size=8
)
PUBLIC = {"declared_size": 60, "classes": (0, 1), "features": UnitNorm(1.0)}
QUERY = {"method": "output", "release": "query", "queries": 5}
CROWD = {"queries": 5, "teachers": 3, "network": LINEAR_of_contradicting_folders}
MEASURED = Encoding(
    (NumericColumn("a", 0, 4), NumericColumn("b", 0, 4)), "y", ("0", "1"), inferred=("bounds",)
)
ESTIMATORS_of_contradicting_folders = {
    "head, gradient": PrivateHead(**PUBLIC),
    "head, noisy size": PrivateHead(**(PUBLIC | {"declared_size": None})),
    "head, output": PrivateHead(**PUBLIC, method="output"),
    "head, convexified": PrivateHead(**PUBLIC, method="output", loss="convexified", regularisation=0.1),
    "head, mu": PrivateHead(**PUBLIC, mu=0.5, centring=0.0),
    "head, seeded": PrivateHead(**PUBLIC, random_state=0),
    "head, classes not declared": PrivateHead(**(PUBLIC | {"classes": None})),
    "head asked": PrivateHead(**PUBLIC, **QUERY),
    "head asked, convexified": PrivateHead(**PUBLIC, **QUERY, loss="convexified", regularisation=0.1),
    "head asked, seeded": PrivateHead(**PUBLIC, **QUERY, random_state=0),
    "teachers": Teachers(**PUBLIC, **CROWD),
    "teachers, gaussian": Teachers(**PUBLIC, **CROWD, method="gaussian"),
    "teachers, probabilities": Teachers(**PUBLIC, **CROWD, release="probabilities"),
    "teachers, seeded": Teachers(**PUBLIC, **CROWD, random_state=0),
    "teachers, size not declared": Teachers(**(PUBLIC | {"declared_size": None}), **CROWD),
    "dpsgd": DPSGD(**PUBLIC, delta=1e-5, steps=2, sampling_rate=1.0),
    "dpsgd, hidden layer": DPSGD(**PUBLIC, delta=1e-5, steps=2, hidden=(3,), sampling_rate=1.0),
    "dpsgd, samples": DPSGD(**PUBLIC, delta=1e-5, steps=2, sampling_rate=0.5, accountant="zcdp"),
    "dpsgd, samples, pld": DPSGD(**PUBLIC, delta=1e-5, steps=2, sampling_rate=0.5),
    "dpsgd, samples, rdp": DPSGD(**PUBLIC, delta=1e-5, steps=2, sampling_rate=0.5, accountant="rdp"),
    "dpsgd, published": DPSGD(**PUBLIC, delta=1e-5, steps=2, accountant="zcdp", analysis="published"),
    "dpsgd, seeded": DPSGD(**PUBLIC, delta=1e-5, steps=2, sampling_rate=1.0, random_state=0),
}  # fmt: skip
PAID = [kind for kind in ESTIMATORS_of_contradicting_folders if "asked" in kind or "teachers" in kind]


@pytest.fixture(scope="module")
def saved_of_contradicting_folders(tmp_path_factory):
    """A folder for each kind of private model."""
    place = tmp_path_factory.mktemp("models")
    return {
        kind: save_private(
            estimator.fit(FEATURES_of_contradicting_folders, LABELS_of_contradicting_folders),
            place / kind,
            dataset="made up",
        )
        for kind, estimator in ESTIMATORS_of_contradicting_folders.items()
    }


def _copied(folder, target):
    shutil.copytree(folder, target)
    return target


def _edit(folder, change):
    path = folder / "model.json"
    description = json.loads(path.read_text())
    change(description)
    path.write_text(json.dumps(description))
    return folder


def _refused(folder, match="is damaged"):
    """The folder is refused wherever its guarantee could be shown or used."""
    for use in (open_private, read_card, lambda place: load_models([f"m={place}"], accept_unproven=True)):
        with pytest.raises(DataUnavailable, match=match) as refusal:
            use(folder)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind", ESTIMATORS_of_contradicting_folders)
def test_a_folder_as_it_was_written_claims_what_the_estimator_did(saved_of_contradicting_folders, kind):
    opened = open_private(saved_of_contradicting_folders[kind])
    assert opened.guarantee == ESTIMATORS_of_contradicting_folders[kind].guarantee_
    assert read_card(saved_of_contradicting_folders[kind]).guarantee == opened.guarantee


@pytest.mark.parametrize("kind", [kind for kind in ESTIMATORS_of_contradicting_folders if "seeded" in kind])
def test_seeded_noise_with_a_proven_status_is_refused(saved_of_contradicting_folders, kind, tmp_path):
    assert open_private(saved_of_contradicting_folders[kind]).guarantee.status == "conditional"
    folder = _copied(saved_of_contradicting_folders[kind], tmp_path / "model")
    _refused(
        _edit(folder, lambda found: found["guarantee"].update(status="proven", assumptions=[])),
        "states status 'proven', but the rest of it implies 'conditional'",
    )


@pytest.mark.parametrize(
    "kind", [kind for kind in ESTIMATORS_of_contradicting_folders if "not declared" in kind]
)
def test_what_was_read_off_the_records_with_a_proven_status_is_refused(
    saved_of_contradicting_folders, kind, tmp_path
):
    folder = _copied(saved_of_contradicting_folders[kind], tmp_path / "model")
    _refused(_edit(folder, lambda found: found["guarantee"].update(status="proven", assumptions=[])))


@pytest.mark.parametrize("kind", ["head asked", "head asked, convexified"])
def test_bounds_that_do_not_follow_from_the_training_are_refused(
    saved_of_contradicting_folders, kind, tmp_path
):
    def smaller(found):
        for bound in found["bounds"].values():
            bound["value"] = 1e-9

    def smaller_everywhere(found):
        smaller(found)
        found["guarantee"]["parameters"].update(one_score=1e-9, score_vector_l2=1e-9, sensitivity=1e-9)

    for number, change in enumerate((smaller, smaller_everywhere)):
        _refused(_edit(_copied(saved_of_contradicting_folders[kind], tmp_path / str(number)), change))


@pytest.mark.parametrize("kind", ["head asked", "head asked, convexified"])
def test_weights_that_were_not_released_and_are_marked_so_are_refused(
    saved_of_contradicting_folders, kind, tmp_path
):
    def mark(found):
        found.update(released=True, bounds=None, delta=1e-5, queries=None)

    folder = _edit(_copied(saved_of_contradicting_folders[kind], tmp_path / "model"), mark)
    _refused(folder)
    (folder / "account.json").unlink()
    _refused(folder)
    released = json.loads((saved_of_contradicting_folders["head, output"] / "model.json").read_text())
    _edit(folder, lambda found: found.update(guarantee=released["guarantee"]))
    FileAccount.create(folder / "account.json")
    _refused(folder, "has an account of answers paid for, but its weights are marked as released")


@pytest.mark.parametrize("kind", ESTIMATORS_of_contradicting_folders)
def test_weights_of_another_folder_are_refused(saved_of_contradicting_folders, kind, tmp_path):
    other = save_private(
        copy.copy(ESTIMATORS_of_contradicting_folders[kind]).fit(
            FEATURES_of_contradicting_folders[::-1] / 2, LABELS_of_contradicting_folders
        ),
        tmp_path / "other",
        dataset="made up",
    )
    shutil.copy(saved_of_contradicting_folders[kind] / "weights.safetensors", other)
    _refused(other, "are not those that model.json describes")


def test_an_encoding_that_was_measured_and_is_marked_as_declared_is_refused(tmp_path):
    head = PrivateHead(**PUBLIC).fit(FEATURES_of_contradicting_folders, LABELS_of_contradicting_folders)
    folder = save_private(head, tmp_path / "model", dataset="made up", encoding=MEASURED)
    assert open_private(folder).guarantee.status == "conditional"
    declared = json.loads(Encoding(MEASURED.columns, MEASURED.label, MEASURED.classes).to_json())
    _refused(_edit(folder, lambda found: found.update(encoding=declared)))


def _leaves(value, path=()):
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, (*path, name))
    else:
        yield path, value


def _others(value):
    """Other values of the same type, and None."""
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int | float):
        return [type(value)(value * 2), type(value)(value / 2), 0, 10**9, None]
    words = ("proven", "conditional", "exact", "seeded", "weights", "query", "output", "gradient", "gaussian")
    words += (
        "published",
        "pure",
        "cross-entropy",
        "convexified",
        "permute-and-flip",
        "exponential",
        "declared",
    )
    return [*(word for word in words if word != value), None] if isinstance(value, str) else [1e-9, True, "x"]


def _promise(model):
    """All that an asker is promised and that answers are drawn with."""
    asked = model.classifier
    claim = model.guarantee
    drawn = ()
    if isinstance(asked, Predictor):
        bounds = asked.mechanism.bounds
        drawn = (
            asked.mechanism.name,
            asked.cost,
            asked.budget,
            asked.remaining,
            float(bounds.one),
            float(bounds.vector),
        )
    amounts = [f"{each or 0:.12g}" for each in (claim.epsilon, claim.mu, claim.delta)]
    return (claim.status, claim.definition, *amounts, *drawn)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow) if "rdp" in kind else kind
        for kind in ESTIMATORS_of_contradicting_folders
    ],
)
def test_no_single_edit_of_a_description_changes_what_is_promised(
    saved_of_contradicting_folders, kind, tmp_path
):
    """Every value of model.json is replaced by others: the folder is refused, or promises and draws as before.

    It may then list a further assumption, which promises less.
    """
    folder = _copied(saved_of_contradicting_folders[kind], tmp_path / "model")
    description = json.loads((folder / "model.json").read_text())
    first = open_private(folder)
    refused = 0
    for path, value in _leaves(description):
        for other in _others(value):
            edited = copy.deepcopy(description)
            place = edited
            for name in path[:-1]:
                place = place[name]
            place[path[-1]] = other
            (folder / "model.json").write_text(json.dumps(edited))
            try:
                opened = open_private(folder)
            except (DataUnavailable, InvalidInput):
                refused += 1
                continue
            assert _promise(opened) == _promise(first), (path, value, other)
            assert set(opened.guarantee.assumptions) >= set(first.guarantee.assumptions), (path, value, other)
    assert refused > 50


@pytest.mark.parametrize("kind", PAID)
def test_a_model_that_is_paid_per_answer_and_has_no_account_is_refused(
    saved_of_contradicting_folders, kind, tmp_path
):
    folder = _copied(saved_of_contradicting_folders[kind], tmp_path / "model")
    open_private(folder).predict(FEATURES_of_contradicting_folders[:2])
    (folder / "account.json").unlink()
    _refused(folder, r"account\.json is missing, so it is unknown how many answers were paid for")
    assert not (folder / "account.json").exists()
    with pytest.raises(DataUnavailable, match="is missing"):
        load_models([f"m={folder}"], budget=Terms(1.0, 1e-5), accept_unproven=True)
    with pytest.raises(DataUnavailable, match="is missing"):
        save_private(
            copy.copy(ESTIMATORS_of_contradicting_folders[kind]).fit(
                FEATURES_of_contradicting_folders, LABELS_of_contradicting_folders
            ),
            folder,
            dataset="d",
            overwrite=True,
        )
    FileAccount.create(folder / "account.json", answered=2)
    assert open_private(folder).remaining == 3


@pytest.mark.parametrize("kind", PAID)
def test_the_account_is_there_as_soon_as_the_model_is_saved(saved_of_contradicting_folders, kind):
    assert FileAccount(saved_of_contradicting_folders[kind] / "account.json").answered == 0


@pytest.mark.parametrize("kind", PAID)
def test_an_account_that_counts_more_than_the_budget_or_nothing_is_refused(
    saved_of_contradicting_folders, kind, tmp_path
):
    folder = _copied(saved_of_contradicting_folders[kind], tmp_path / "model")
    account = (folder / "account.json").read_text()
    (folder / "account.json").write_text(account.replace("00000000000000000000", "00000000000000000006"))
    _refused(folder, "its account counts 6 answers, but its budget is for 5")
    for broken in ("", account[:-4], "{}"):
        (folder / "account.json").write_text(broken)
        _refused(folder, "is damaged, so nobody knows what was spent")
