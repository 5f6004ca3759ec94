from __future__ import annotations

import hashlib
import json
import os

import numpy as np
import pytest
import safetensors.torch
import torch

from quietmax.data import Encoding, NumericColumn, Records, load, split
from quietmax.errors import DataUnavailable, InvalidInput, QuietmaxError
from quietmax.models import (
    Classifier,
    Convexified,
    CrossEntropy,
    Model,
    Quadratic,
    TorchModel,
    TrainingSettings,
    accuracy,
    accuracy_loss,
    load_model,
    save_model,
    search_alpha,
    softmax,
    train,
    train_many,
    train_module,
)
from quietmax.models.mlp import initial_mlp

FAST = TrainingSettings(hidden=(8,), epochs=3, batch_size=20)


@pytest.fixture(scope="module")
def records() -> Records:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 300)
    features = 2 * np.eye(3)[labels] @ generator.normal(size=(3, 6)) + generator.normal(size=(300, 6))
    return Records("made up", features.astype(np.float32), labels, 3)


@pytest.fixture
def model(records) -> Model:
    return train(split(records, size=100, seed=1), settings=FAST)


# --- training -----------------------------------------------------------------------------------------------------


def test_training_is_repeatable_and_many_at_once_equal_one_by_one(records):
    splits = [split(records, size=100, seed=seed) for seed in range(3)]
    together = train_many(splits, settings=FAST)
    for each, alone in zip(together, [train(part, settings=FAST) for part in splits], strict=True):
        np.testing.assert_allclose(each.logits(records.features), alone.logits(records.features), atol=1e-5)
        assert (each.records, each.dataset, each.seed) == (100, "made up", alone.seed)


def test_alpha_sets_the_loss(records):
    data = split(records, size=50, seed=0)
    assert train(data, alpha=3.0, settings=FAST).settings.loss == Convexified(3.0)
    with pytest.raises(InvalidInput, match="convexified"):
        train(data, alpha=3.0, settings=TrainingSettings(loss=CrossEntropy()))


def test_splits_of_different_records_are_refused(records):
    other = Records("other", records.features, records.labels, 3)
    with pytest.raises(InvalidInput, match="same records"):
        train_many([split(records, size=50, seed=0), split(other, size=50, seed=0)], settings=FAST)
    with pytest.raises(InvalidInput, match="same records"):
        train_many([])


@pytest.mark.parametrize("loss", [CrossEntropy(), Quadratic(), Convexified(1.0), Convexified(2.0, "samples")])
def test_any_torch_module_learns_with_the_same_losses(records, loss):
    torch.manual_seed(0)
    data = split(records, size=150, seed=0)
    settings = TrainingSettings(loss=loss, epochs=40, batch_size=20, learning_rate=0.01)
    seen = []
    trained = train_module(
        torch.nn.Linear(6, 3), data.train, settings=settings, progress=lambda *at: seen.append(at)
    )
    assert accuracy(trained, data.test) > 0.85
    assert seen[-1] == (40, 40)
    assert isinstance(trained, Classifier)


def test_a_module_with_the_wrong_number_of_outputs_is_refused(records):
    with pytest.raises(InvalidInput, match="3 logits"):
        train_module(torch.nn.Linear(6, 4), records, settings=FAST)
    with pytest.raises(InvalidInput, match="3 logits"):
        TorchModel(torch.nn.Linear(6, 4), 3).logits(records.features)


def test_a_diverging_module_is_refused(records):
    with pytest.raises(QuietmaxError, match="diverged"):
        train_module(torch.nn.Linear(6, 3), records, settings=TrainingSettings(learning_rate=1e25, epochs=9))


def test_a_wrapped_module_is_asked_in_evaluation_mode_and_left_as_it_was(records):
    module = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Dropout(0.9)).train()
    wrapped = TorchModel(module, 3)
    np.testing.assert_array_equal(wrapped.logits(records.features), wrapped.logits(records.features))
    assert module.training
    assert wrapped.logits(np.empty((0, 6), np.float32)).shape == (0, 3)


def test_plain_answers_are_softmax_and_argmax_of_the_logits(model, records):
    logits = model.logits(records.features)
    assert logits.dtype == np.float64
    np.testing.assert_allclose(model.predict_proba(records.features), softmax(logits))
    np.testing.assert_array_equal(model.predict(records.features), logits.argmax(1))


def test_the_paper_measures_accuracy_loss_relative_to_the_baseline():
    assert accuracy_loss(0.6, 0.8) == pytest.approx(0.25)
    assert accuracy_loss(0.9, 0.8) < 0
    with pytest.raises(InvalidInput, match="baseline"):
        accuracy_loss(0.1, 0.0)


def test_logits_of_a_stack_are_asked_network_by_network():
    stack = initial_mlp((6, 4, 3), "tanh", (0, 1))
    inputs = np.ones((2, 6), np.float32)
    with pytest.raises(InvalidInput, match="2 networks"):
        stack.logits(inputs)
    torch.testing.assert_close(stack.network(1).logits(inputs), stack.stacked_logits(inputs)[1])
    with pytest.raises(InvalidInput, match="at least one neuron"):
        initial_mlp((6, 0, 3), "tanh", (0,))


# --- the search for alpha -----------------------------------------------------------------------------------------


def test_the_search_picks_the_alpha_closest_to_the_original_loss_without_looking_at_the_test_part(records):
    data = split(records, size=120, seed=0)
    settings = TrainingSettings(hidden=(8,), epochs=20, learning_rate=0.01)
    found = search_alpha(data, grid=(0.5, 1.0, 5.0), settings=settings)
    assert [trial.alpha for trial in found.trials] == [0.5, 1.0, 5.0]
    closest = min(found.trials, key=lambda trial: trial.distance)
    assert found.alpha == closest.alpha
    assert closest.distance == pytest.approx(
        abs(closest.train_accuracy - found.original_train_accuracy)
        + abs(closest.validation_accuracy - found.original_validation_accuracy)
    )
    spoiled = records.labels.copy()
    spoiled[data.test_rows] = (spoiled[data.test_rows] + 1) % 3
    changed = Records("made up", records.features, spoiled, 3)
    again = search_alpha(
        type(data)(changed, data.train_rows, data.test_rows, data.pool_rows, 0),
        grid=(0.5, 1.0, 5.0),
        settings=settings,
    )
    assert again == found


def test_the_papers_grid_has_twenty_steps_up_to_ten():
    from quietmax.models.training import PAPER_GRID

    assert len(PAPER_GRID) == 20
    assert (PAPER_GRID[0], PAPER_GRID[-1]) == (0.5, 10.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"grid": ()},
        {"grid": (0.0,)},
        {"validation_share": 0.0},
        {"validation_share": 0.001},
        {"settings": TrainingSettings(loss=CrossEntropy())},
    ],
    ids=str,
)
def test_impossible_searches_are_refused(records, wrong):
    with pytest.raises(InvalidInput):
        search_alpha(split(records, size=100, seed=0), **({"settings": FAST} | wrong))


# --- model files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss", [CrossEntropy(), Quadratic(), Convexified(2.5, "samples", Quadratic())], ids=str
)
def test_a_saved_model_answers_as_before(records, tmp_path, loss):
    settings = TrainingSettings((8, 5), "sigmoid", loss, epochs=2)
    model = train(split(records, size=100, seed=3), settings=settings)
    loaded = load_model(save_model(model, tmp_path / "model"))
    np.testing.assert_array_equal(loaded.logits(records.features), model.logits(records.features))
    assert (loaded.settings, loaded.records, loaded.dataset, loaded.seed) == (settings, 100, "made up", 3)


def test_an_image_model_keeps_its_shape(tmp_path):
    model = train(load("mnist-5k", records=200), settings=FAST)
    assert load_model(save_model(model, tmp_path / "model")).image_shape == (1, 28, 28)


def test_a_model_file_holds_no_pickle(model, tmp_path):
    folder = save_model(model, tmp_path / "model")
    assert sorted(path.name for path in folder.iterdir()) == ["model.json", "weights.safetensors"]
    for path in folder.iterdir():
        assert b"\x80\x04" not in path.read_bytes()[:16]


def test_an_existing_folder_is_not_touched_unless_it_is_a_model_and_overwriting_was_asked_for(
    model, tmp_path
):
    folder = save_model(model, tmp_path / "model")
    before = (folder / "weights.safetensors").read_bytes()
    with pytest.raises(InvalidInput, match="exists already"):
        save_model(model, folder)
    save_model(model, folder, overwrite=True)
    assert (folder / "weights.safetensors").read_bytes() == before
    (precious := tmp_path / "precious").mkdir()
    (precious / "file").write_text("keep")
    with pytest.raises(InvalidInput, match="left alone"):
        save_model(model, precious, overwrite=True)
    assert (precious / "file").read_text() == "keep"


def test_nothing_is_left_behind_when_writing_fails(model, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(QuietmaxError, match="No space left"):
        save_model(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


TWO_CLASSES = json.loads(Encoding((NumericColumn("a", 0, 4),), "y", ("no", "yes")).to_json())


def _truncate(folder, name, keep):
    path = folder / name
    path.write_bytes(path.read_bytes()[:keep])


def _edit(folder, **changes):
    path = folder / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _store_twice(folder):
    path = folder / "weights.safetensors"
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({name: torch.cat([each, each]) for name, each in tensors.items()}, path)
    _edit(folder, weights_sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def _flip_a_bit(folder):
    path = folder / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda folder: (folder / "model.json").unlink(), "no model"),
        (lambda folder: (folder / "weights.safetensors").unlink(), "cannot be read"),
        (lambda folder: _truncate(folder, "weights.safetensors", 100), "cannot be read"),
        (lambda folder: _truncate(folder, "weights.safetensors", 0), "cannot be read"),
        (lambda folder: _truncate(folder, "model.json", 40), "cannot be read"),
        (lambda folder: (folder / "model.json").write_text('{"a": 1}'), "not a Quietmax model"),
        (lambda folder: (folder / "model.json").write_text("[]"), "not a Quietmax model"),
        (lambda folder: (folder / "model.json").write_bytes(b"\xff\xfe"), "cannot be read"),
        (lambda folder: _edit(folder, format_version=99), "format version 99"),
        (lambda folder: _edit(folder, kind="head"), "kind 'head'"),
        (lambda folder: _edit(folder, widths=[6, 9, 3]), "damaged"),
        (lambda folder: _edit(folder, widths=None), "damaged"),
        (lambda folder: _edit(folder, widths=[6]), "damaged"),
        (_store_twice, "2 networks instead of one"),
        (_flip_a_bit, "are not those that model.json describes"),
        (lambda folder: _edit(folder, weights_sha256=None), "are not those that model.json describes"),
        (lambda folder: _edit(folder, guarantee={"status": "proven"}), "an ordinary network has none"),
        (lambda folder: _edit(folder, image_shape=[1, 2, 2]), "takes 6 features"),
        (lambda folder: _edit(folder, encoding=TWO_CLASSES), "it has 3 classes, but its encoding 2"),
        (lambda folder: _edit(folder, settings={}), "damaged"),
    ],
)
def test_a_damaged_or_foreign_file_gives_one_clear_sentence(model, tmp_path, damage, match):
    folder = save_model(model, tmp_path / "model")
    damage(folder)
    with pytest.raises((DataUnavailable, InvalidInput), match=match) as refusal:
        load_model(folder)
    assert "\n" not in str(refusal.value)
