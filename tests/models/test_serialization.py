from __future__ import annotations

import hashlib
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import safetensors.torch
import torch

from quietmax.data import Encoding, Records, load, split
from quietmax.data.encoding import NumericColumn
from quietmax.errors import DataUnavailable, InvalidInput, QuietmaxError
from quietmax.models import (
    Convexified,
    CrossEntropy,
    Loss,
    Model,
    Quadratic,
    TrainingSettings,
    load_model,
    save_model,
    train,
)
from tests.models.conftest import FAST


@pytest.mark.parametrize(
    "loss", [CrossEntropy(), Quadratic(), Convexified(2.5, "samples", Quadratic())], ids=str
)
def test_a_saved_model_answers_as_before(records: Records, loss: Loss) -> None:
    settings = TrainingSettings((8, 5), "sigmoid", loss, epochs=2)
    model = train(split(records, size=100, seed=3), settings=settings)
    loaded = load_model(save_model(model, Path("model")))
    np.testing.assert_array_equal(loaded.logits(records.features), model.logits(records.features))
    assert (loaded.settings, loaded.records, loaded.dataset, loaded.seed) == (settings, 100, "made up", 3)


def test_an_image_model_keeps_its_shape() -> None:
    model = train(load("mnist-5k", records=200), settings=FAST)
    assert load_model(save_model(model, Path("model"))).image_shape == (1, 28, 28)


def test_a_model_file_holds_no_pickle(model: Model) -> None:
    folder = save_model(model, Path("model"))
    assert sorted(path.name for path in folder.iterdir()) == ["model.json", "weights.safetensors"]
    for path in folder.iterdir():
        assert b"\x80\x04" not in path.read_bytes()[:16]


def test_an_existing_folder_is_not_touched_unless_it_is_a_model_and_overwriting_was_asked_for(
    model: Model,
) -> None:
    folder = save_model(model, Path("model"))
    before = (folder / "weights.safetensors").read_bytes()
    with pytest.raises(InvalidInput, match="already exists"):
        save_model(model, folder)
    save_model(model, folder, overwrite=True)
    assert (folder / "weights.safetensors").read_bytes() == before
    (precious := Path("precious")).mkdir()
    (precious / "file").write_text("keep")
    with pytest.raises(InvalidInput, match="not a Quietmax model"):
        save_model(model, precious, overwrite=True)
    assert (precious / "file").read_text() == "keep"


def test_nothing_is_left_behind_when_writing_fails(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(QuietmaxError, match="No space left"):
        save_model(model, Path("model"))
    assert list(tmp_path.iterdir()) == []


TWO_CLASSES = json.loads(Encoding((NumericColumn("a", 0, 4),), "y", ("no", "yes")).to_json())


def test_a_disk_without_room_for_the_weights_gives_one_sentence_and_leaves_nothing(
    model: Model, tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(QuietmaxError, match=r"^The model cannot be written to .*: File too large\.$"):
            save_model(model, Path("model"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def _truncate(folder: Path, name: str, keep: int) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[:keep])


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _store_twice(folder: Path) -> None:
    path = folder / "weights.safetensors"
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({name: torch.cat([each, each]) for name, each in tensors.items()}, path)
    _edit(folder, weights_sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def _flip_a_bit(folder: Path) -> None:
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
        (lambda folder: (folder / "model.json").write_text('{"a": 1}'), "does not describe a Quietmax model"),
        (lambda folder: (folder / "model.json").write_text("[]"), "does not describe a Quietmax model"),
        (lambda folder: (folder / "model.json").write_bytes(b"\xff\xfe"), "cannot be read"),
        (lambda folder: _edit(folder, format_version=99), "must be 4, got 99"),
        (lambda folder: _edit(folder, kind="head"), "of kind 'mlp', got 'head'"),
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
def test_a_damaged_or_foreign_file_is_an_error(
    model: Model, damage: Callable[[Path], object], match: str
) -> None:
    folder = save_model(model, Path("model"))
    damage(folder)
    with pytest.raises((DataUnavailable, InvalidInput), match=match) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
