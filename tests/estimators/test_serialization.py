"""Saved models answer as before and keep their budget and guarantee; damaged folders are an error."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone

from quietmax.accounting import Budget, epsilon_of
from quietmax.data import Schema, hold_out
from quietmax.data.tables import encode_table
from quietmax.errors import BudgetExhausted, DataUnavailable, InvalidInput, QuietmaxError
from quietmax.estimators import (
    DPSGD,
    DPSGDSettings,
    HeadSettings,
    PrivateHead,
    Teachers,
    open_private,
    save_private,
)
from quietmax.models import CrossEntropy, Model, TrainingSettings, save_model, serialization
from quietmax.models.features import Identity, UnitNorm, image_features
from quietmax.models.features.images import DIGEST, _dead_leaves
from quietmax.models.stacked import initial_mlp
from tests.estimators.made import interrupted_saving, made


def _data():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 400)
    return (2 * np.eye(3)[labels] @ generator.normal(size=(3, 6)) + generator.normal(size=(400, 6))).astype(
        np.float32
    ), labels


def _fitted_head(**changes) -> PrivateHead:
    options = {"epsilon": 50.0, "delta": 1e-5, "classes": range(3), "declared_size": 400}
    return made(PrivateHead, **(options | changes)).fit(*_data())


def _saved(fitted: Any, folder: Path, **options: Any) -> Path:
    return save_private(fitted, folder, dataset="made up", **options)


def _asked(queries: int = 1) -> PrivateHead:
    """A head that answers so many queries."""
    return _fitted_head(method="output", release="query", queries=queries)


def _images(shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(60) % 2
    images = _dead_leaves(60, shape, seed=1).reshape(60, -1)
    images[labels == 1, : images.shape[1] // 3] *= 0.2
    return images, labels


BY_PERSON: dict[str, Any] = {"declared_size": 130, "second_moments": 0.2}
GREY: dict[str, Any] = {"declared_size": 60, "classes": (0, 1), "image_shape": (1, 12, 9)}
COLOUR: dict[str, Any] = GREY | {"image_shape": (3, 50, 9)}


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "unit-norm"),
        ({"method": "output"}, "unit-norm"),
        (BY_PERSON, "unit-norm"),
        (BY_PERSON | {"method": "output"}, "unit-norm"),
        (GREY, "turned"),
        (GREY | {"features": "scattering"}, "scattering"),
        (COLOUR, "reduced"),
    ],
    ids=str,
)
def test_a_saved_head_answers_any_number_of_queries_as_before(
    tmp_path: Path, settings: dict[str, Any], kind: str
) -> None:
    features, labels = _images(settings["image_shape"]) if "image_shape" in settings else _data()
    groups = np.arange(400) // 3 if settings.get("declared_size") == 130 else None
    options = {"epsilon": 50.0, "delta": 1e-5, "classes": range(3), "declared_size": 400}
    head = made(PrivateHead, **(options | settings)).fit(features, labels, groups=groups)
    opened = open_private(_saved(head, tmp_path / "model"))
    np.testing.assert_array_equal(opened.predict_proba(features), head.predict_proba(features))
    np.testing.assert_array_equal(opened.predict(features), head.predict(features))
    assert opened.remaining is None
    assert opened.guarantee == head.guarantee_
    assert opened.guarantee.status == "proven"
    assert opened.guarantee.unit == ("record" if groups is None else "person")
    assert opened.guarantee.parameters["features"]["kind"] == kind
    if "second_moments" in settings:
        assert opened.guarantee.parameters["mu_moments"] == pytest.approx(head.guarantee_.mu * 0.2**0.5)


def test_a_head_on_colour_images_needs_the_same_filters(tmp_path: Path) -> None:
    head = made(PrivateHead, 50.0, 1e-5, **COLOUR).fit(*_images((3, 50, 9)))
    assert head.feature_map_ == image_features((3, 50, 9))
    folder = _saved(head, tmp_path / "model")
    for path in folder.rglob("*.json"):
        path.write_text(path.read_text().replace(DIGEST, "0" * 64))
    with pytest.raises(DataUnavailable, match="needs filters of SHA-256 0000"):
        open_private(folder)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("interruption", [KeyboardInterrupt, TimeoutError])
def test_an_interrupted_save_leaves_the_budget_in_one_place(
    tmp_path: Path, moment: str, interruption: type[BaseException]
) -> None:
    """Ctrl-C, or a signal handler that raises, just before or just after the folder gets its name."""
    head, (features, _) = _asked(4), _data()
    with interrupted_saving(moment, interruption):
        _saved(head, tmp_path / "model")
    assert len(head.predict(features[:3])) == 3
    if moment == "before":
        assert not (tmp_path / "model").exists()
        _saved(head, tmp_path / "model")
    opened = open_private(tmp_path / "model")
    assert opened.remaining == head.predictor_.remaining.queries == 1
    with pytest.raises(BudgetExhausted):
        opened.predict(features[5:7])


def test_nothing_is_answered_if_nobody_knows_where_the_budget_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, (features, _) = _asked(4), _data()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serialization, "_replace", interrupted)
    monkeypatch.setattr("quietmax.predictor._is_open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _saved(head, tmp_path / "model")
    with pytest.raises(QuietmaxError, match="Saving this model was interrupted"):
        head.predict(features[:1])


@pytest.mark.parametrize("release", ["weights", "query"])
def test_settings_of_a_head_changed_after_training_change_nothing_that_is_saved(
    tmp_path: Path, release: str
) -> None:
    head, (features, _) = _fitted_head(method="output", release=release, queries=4), _data()
    head.set_params(epsilon=900.0, delta=0.1, queries=9000, settings=HeadSettings(radius=100.0))
    head.set_params(release={"weights": "query", "query": "weights"}[release])
    folder = _saved(head, tmp_path / "model")
    opened, description = open_private(folder), json.loads((folder / "model.json").read_text())
    assert (description["epsilon"], description["radius"]) == (50.0, 1.0)
    if release == "weights":
        assert (description["delta"], opened.remaining) == (1e-5, None)
        np.testing.assert_array_equal(opened.predict(features), head.predict(features))
    else:
        assert opened.classifier.budget == Budget(50.0, 0.0, 4)


def test_a_head_trained_for_mu_is_filed_with_the_epsilon_that_mu_means(tmp_path: Path) -> None:
    folder = _saved(_fitted_head(mu=3.0), tmp_path / "model")
    assert json.loads((folder / "model.json").read_text())["epsilon"] == epsilon_of(3.0, 1e-5) > 10


@pytest.mark.parametrize(("change", "refused"), [(-3e-4, True), (-3e-8, False), (3e-8, False), (3e-4, True)])
@pytest.mark.parametrize("stated", ["epsilon", "delta"])
def test_a_head_whose_epsilon_or_delta_is_not_that_of_its_mu_is_refused(
    tmp_path: Path, stated: str, change: float, refused: bool
) -> None:
    folder = _saved(_fitted_head(mu=0.5), tmp_path / "model")
    path = folder / "model.json"
    description = json.loads(path.read_text())
    path.write_text(json.dumps({**description, stated: description[stated] * (1 + change)}))
    with pytest.raises(DataUnavailable, match=r"states mu 0\.49") if refused else nullcontext():
        open_private(folder)


PEOPLE = pd.DataFrame(
    {
        "age": np.arange(200) % 80 + 10.0,
        "region": np.where(np.arange(200) % 3 == 0, "north", "south"),
        "customer": [f"c{row // 2}" for row in range(200)],
        "repaid": np.where(np.arange(200) % 80 > 40, "yes", "no"),
    }
)
PEOPLE_SCHEMA = Schema(
    label="repaid",
    classes=("no", "yes"),
    bounds={"age": (0, 100)},
    categories={"region": ("north", "south")},
    person="customer",
)
OF_PEOPLE: dict[str, Any] = {
    "head": PrivateHead(epsilon=8.0, declared_size=80),
    "head, asked": PrivateHead(epsilon=8.0, declared_size=80, method="output", release="query", queries=9),
    "teachers": Teachers(epsilon=8.0, queries=9, teachers=3, declared_size=80),
    "dpsgd": DPSGD(epsilon=8.0, declared_size=80, settings=DPSGDSettings(steps=3)),
}


@pytest.mark.parametrize("kind", OF_PEOPLE)
def test_a_folder_keeps_unit_holdout_and_encoding_of_a_table(kind: str, tmp_path: Path) -> None:
    records = encode_table(PEOPLE, PEOPLE_SCHEMA)
    parts = hold_out(records, 0.2, seed=7)
    fitted = clone(OF_PEOPLE[kind]).fit(parts.train)
    opened = open_private(_saved(fitted, tmp_path / "model"))
    description = json.loads((tmp_path / "model" / "model.json").read_text())
    assert (description["format_version"], description["unit"]) == (4, "person")
    assert description["holdout"] == {"share": 0.2, "seed": 7}
    assert opened.guarantee == fitted.guarantee_
    assert opened.guarantee.unit == "person"
    assert opened.holdout == fitted.holdout_ == parts.holdout
    assert opened.classes == ("no", "yes")
    np.testing.assert_array_equal(opened.encode(PEOPLE), records.features)
    # The same answers from the frame, by the estimator and by the opened model (a random one if it is paid for).
    asked, rows = PEOPLE.drop(columns=["repaid", "customer"]).head(4), opened.encode(PEOPLE.head(4))
    if opened.remaining is None:
        np.testing.assert_array_equal(fitted.predict(asked), np.array(opened.classes)[opened.predict(rows)])
    else:
        assert set(fitted.predict(asked)) <= {"no", "yes"}
        assert open_private(tmp_path / "model").remaining == 5


def test_a_model_trained_on_numbers_encodes_no_table(tmp_path: Path) -> None:
    opened = open_private(_saved(_fitted_head(), tmp_path / "model"))
    assert (opened.holdout, opened.guarantee.unit) == (None, "record")
    with pytest.raises(InvalidInput, match="trained on numbers"):
        opened.encode(PEOPLE)


def test_a_map_with_code_of_the_users_own_is_not_saved_as_one_of_ours(tmp_path: Path) -> None:
    class Halved(Identity):
        def _features(self, records):
            return records / 2

    with pytest.raises(InvalidInput, match="Only models with a feature map"):
        _saved(_fitted_head(features=Halved()), tmp_path / "model")


LINEAR = TrainingSettings(hidden=(), loss=CrossEntropy(), learning_rate=0.05, epochs=20, batch_size=8)


def _fitted_teachers(**changes) -> tuple[Teachers, np.ndarray]:
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
def test_saved_teachers_answer_as_before_and_keep_their_account(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    teachers, features = _fitted_teachers(**changes)
    before = teachers.predict(features[:1])
    folder = _saved(teachers, tmp_path / "model")
    assert "key" not in json.loads((folder / "model.json").read_text())
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


def test_a_budget_lives_in_one_place(tmp_path: Path) -> None:
    """In memory until it is saved, then in the folder, with what was spent of it."""
    teachers, features = _fitted_teachers()
    teachers.predict(features[:2])
    with pytest.raises(InvalidInput, match="already exists"):
        _saved(teachers, tmp_path)
    assert teachers.remaining.queries == 3, "what could not be saved goes on in memory"
    folder = _saved(teachers, tmp_path / "model")
    assert open_private(folder).remaining == teachers.remaining.queries == 3
    open_private(folder).predict(features[2:4])
    assert teachers.remaining.queries == 1
    teachers.predict(features[4:5])
    for asked in (teachers, open_private(folder)):
        with pytest.raises(BudgetExhausted):
            asked.predict(features[5:6])
    with pytest.raises(InvalidInput, match="since the model was saved"):
        _saved(teachers, tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_a_folder_in_which_something_was_spent_is_not_overwritten(tmp_path: Path) -> None:
    teachers, features = _fitted_teachers()
    folder = _saved(teachers, tmp_path / "model")
    _saved(_fitted_teachers()[0], folder, overwrite=True)
    open_private(folder).predict(features[:2])
    with pytest.raises(InvalidInput, match="counts 2 paid answers"):
        _saved(_fitted_teachers()[0], folder, overwrite=True)
    assert open_private(folder).remaining == 3


def test_a_model_does_not_pay_from_the_account_of_a_model_saved_in_its_place(tmp_path: Path) -> None:
    head, (features, _) = _asked(), _data()
    folder = _saved(head, tmp_path / "model")
    opened = open_private(folder)
    folder.rename(tmp_path / "moved")
    for _ in range(3):
        _saved(_asked(), folder)
        with pytest.raises(DataUnavailable, match="belongs to another model"):
            head.predict(features[:1])
        with pytest.raises(DataUnavailable, match="belongs to another model"):
            opened.predict(features[:1])
        assert open_private(folder).remaining == 1
        shutil.rmtree(folder)
    moved = open_private(tmp_path / "moved")
    moved.predict(features[:1])
    with pytest.raises(BudgetExhausted):
        moved.predict(features[1:2])


def test_a_folder_with_the_account_of_another_model_is_not_opened(tmp_path: Path) -> None:
    first, second = (_saved(_asked(), tmp_path / name) for name in ("a", "b"))
    shutil.copy(first / "account.json", second)
    with pytest.raises(DataUnavailable, match="belongs to another model"):
        open_private(second)


@pytest.mark.parametrize(("step", "call"), [("_fill", 1), ("check_target", 2)])
def test_an_answer_given_while_the_new_model_is_written_stops_the_overwriting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, call: int
) -> None:
    """The other process answers after the first check, or after the last one."""
    features, _ = _data()
    folder = _saved(_asked(), tmp_path / "model")
    opened, replacing, original = open_private(folder), _asked(), getattr(serialization, step)
    calls: list[Any] = []

    def answer_meanwhile(*arguments: Any, **options: Any) -> Any:
        calls.append(original(*arguments, **options))
        if len(calls) == call:
            opened.predict(features[:1])
        return calls[-1]

    monkeypatch.setattr(serialization, step, answer_meanwhile)
    with pytest.raises(InvalidInput, match="counts 1 paid answers"):
        _saved(replacing, folder, overwrite=True)
    with pytest.raises(BudgetExhausted):
        opened.predict(features[1:2])
    assert replacing.predictor_.remaining.queries == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_that_is_being_replaced_gives_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, _ = _data()
    folder = _saved(_asked(), tmp_path / "model")
    opened, replace = open_private(folder), serialization._replace
    assert opened.remaining == 1

    def ask_before_the_rename(*arguments: Path) -> None:
        with pytest.raises(DataUnavailable, match="was closed when its model was replaced"):
            opened.predict(features[:1])
        replace(*arguments)

    monkeypatch.setattr(serialization, "_replace", ask_before_the_rename)
    _saved(_asked(), folder, overwrite=True)
    with pytest.raises(DataUnavailable, match="belongs to another model"):
        opened.predict(features[:1])
    assert open_private(folder).remaining == 1


def test_a_model_whose_replacement_fails_answers_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, _ = _data()
    folder = _saved(_asked(), tmp_path / "model")
    opened = open_private(folder)

    def fail(*_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(serialization, "_replace", fail)
    with pytest.raises(QuietmaxError, match="No space left on device"):
        _saved(_asked(), folder, overwrite=True)
    opened.predict(features[:1])
    assert open_private(folder).remaining == 0


def test_a_folder_that_appears_during_the_writing_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, write = _asked(), serialization._fill
    elsewhere = _saved(first, tmp_path / "elsewhere")

    def appear_meanwhile(*arguments: Any) -> None:
        write(*arguments)
        elsewhere.rename(tmp_path / "model")

    monkeypatch.setattr(serialization, "_fill", appear_meanwhile)
    with pytest.raises(InvalidInput, match="already exists"):
        _saved(_asked(), tmp_path / "model")
    assert open_private(tmp_path / "model").remaining == 1


def test_settings_changed_after_training_change_nothing_that_is_saved(tmp_path: Path) -> None:
    teachers, _ = _fitted_teachers(features=UnitNorm(constant=1.0))
    teachers.set_params(epsilon=900.0, delta=0.1, queries=9000, features=None, release="probabilities")
    opened = open_private(_saved(teachers, tmp_path / "model"))
    assert opened.classifier.budget == Budget(200.0, 1e-5, 5)
    assert opened.features == UnitNorm(constant=1.0)
    assert opened.classifier.guarantee.cost == teachers.guarantee_.cost


def test_modules_of_ones_own_are_not_saved(tmp_path: Path) -> None:
    network = DPSGD(
        network=torch.nn.Linear, declared_size=400, classes=range(3), settings=DPSGDSettings(steps=2)
    )
    for fitted in (_fitted_teachers(network=torch.nn.Linear)[0], network.fit(*_data())):
        with pytest.raises(InvalidInput, match="built-in network"):
            _saved(fitted, tmp_path / "model")


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("usual_umask")
@pytest.mark.parametrize("kind", ["network", "teachers", "head per query", "released head", "seeded head"])
def test_weights_that_are_not_released_are_never_readable_by_others(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, opened, open_file = tmp_path / "model", {}, os.open

    def watched(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_CREAT:
            opened[Path(path).name] = mode
        return open_file(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", watched)
    mode = 0o644 if kind == "released head" else 0o600
    names = {"model.json", "weights.safetensors"}
    for overwrite in (False, True):
        opened.clear()
        _save(kind, folder, overwrite)
        assert {(folder / name).stat().st_mode & 0o777 for name in names} == {mode}
        assert {opened[name] & 0o755 for name in names} == {mode}, "from the moment it is created"
        for name in names:  # as an earlier version wrote it
            (folder / name).chmod(0o644)


def _save(kind: str, folder: Path, overwrite: bool) -> None:
    """Save a model of a kind."""
    if kind == "network":
        network = initial_mlp((6, 8, 4), "tanh", (0,))
        save_model(Model(network, TrainingSettings((8,)), 160, "people", 0), folder, overwrite=overwrite)
    elif kind == "teachers":
        _saved(_fitted_teachers()[0], folder, overwrite=overwrite)
    else:
        seeded = {"random_state": 0} if kind == "seeded head" else {}
        head = _asked() if kind == "head per query" else _fitted_head(**seeded)
        _saved(head, folder, overwrite=overwrite)
