"""Model folders that hold an encoder's file: they answer without the original, and refuse another file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone

from quietmax.errors import DataUnavailable
from quietmax.estimators import DPSGD, DPSGDSettings, PrivateHead, Teachers, open_private, save_private
from quietmax.models import TrainingSettings
from quietmax.models.features import Encoder, Pipeline, UnitNorm, save_encoder
from quietmax.privacy_card import read_card
from quietmax.server.deployment import load_models
from tests.models.features.onnx_files import convolutions

GENERATOR = np.random.default_rng(0)
LABELS = GENERATOR.integers(0, 2, 60)
RECORDS = (GENERATOR.normal(size=(60, 3 * 6 * 5)) + LABELS[:, None]).astype(np.float32)
PUBLIC: dict[str, Any] = {"declared_size": 60, "classes": (0, 1)}
ESTIMATORS: dict[str, Any] = {
    "head": PrivateHead(**PUBLIC),
    "head per query": PrivateHead(**PUBLIC, method="output", release="query", queries=500),
    "teachers": Teachers(2.0, 1e-5, 500, 3, network=TrainingSettings((), epochs=1), **PUBLIC),
    "dpsgd": DPSGD(2.0, 1e-3, settings=DPSGDSettings(steps=2, hidden=()), **PUBLIC),
}


def onnx_encoder(folder: Path) -> Encoder:
    return convolutions(folder, (3, 6, 5))


def layer_encoder(folder: Path) -> Encoder:
    torch.manual_seed(0)
    # This name is also that of a file in a model folder.
    path = folder / "weights.safetensors"
    digest = save_encoder(torch.nn.Sequential(torch.nn.Linear(90, 8), torch.nn.ReLU()), path)
    return Encoder(path, digest, mean=0.5, std=(2.0,) * 90)


@pytest.fixture(params=[onnx_encoder, layer_encoder])
def encoder(request: pytest.FixtureRequest, tmp_path: Path) -> Encoder:
    made: Encoder = request.param(tmp_path)
    return made


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_model_on_an_encoder_is_proven_and_answers_from_its_folder_alone(
    name: str, encoder: Encoder, tmp_path: Path
) -> None:
    estimator = clone(ESTIMATORS[name]).set_params(features=encoder).fit(RECORDS, LABELS)
    assert estimator.guarantee_.status == "proven"
    named = [each for each in estimator.guarantee_.assumptions if f"SHA-256 {encoder.sha256}" in each]
    assert named == [
        f"The encoder file {encoder.file} (SHA-256 {encoder.sha256}) was made without the private records."
    ]
    Path(encoder.path).unlink()
    folder = save_private(estimator, tmp_path / "model", dataset="made up")
    moved = shutil.move(folder, tmp_path / "moved")
    model = open_private(moved)
    assert model.features == encoder
    assert model.guarantee == estimator.guarantee_
    if name in ("head", "dpsgd"):
        np.testing.assert_array_equal(model.predict(RECORDS), estimator.predict(RECORDS))
    else:
        assert model.predict(RECORDS).shape == (60,)
    (deployment,) = load_models([str(moved)])
    assert deployment.status == "proven"
    assert deployment.answer(RECORDS[:3]).labels.shape == (3,)
    assert any(f"SHA-256 {encoder.sha256}" in sentence for sentence in read_card(moved).in_words())


def test_an_encoder_inside_a_pipeline_is_saved_too(encoder: Encoder, tmp_path: Path) -> None:
    steps = Pipeline((encoder, UnitNorm(1.0)))
    head = PrivateHead(**PUBLIC, features=steps).fit(RECORDS, LABELS)
    model = open_private(save_private(head, tmp_path / "model", dataset="made up"))
    assert model.guarantee == head.guarantee_
    assert any(str(encoder.sha256) in each for each in model.guarantee.assumptions)
    np.testing.assert_array_equal(model.predict(RECORDS), head.predict(RECORDS))


def test_a_missing_or_changed_file_is_one_clear_error(encoder: Encoder, tmp_path: Path) -> None:
    head = PrivateHead(**PUBLIC, features=encoder).fit(RECORDS, LABELS)
    folder = save_private(head, tmp_path / "model", dataset="made up")
    stored = folder / encoder.stored_name
    content = stored.read_bytes()
    assert content == encoder.content
    stored.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(
        DataUnavailable, match=rf"{stored.name} has the SHA-256 \w+, but {encoder.sha256} was"
    ):
        open_private(folder)
    stored.unlink()
    for opened in (open_private, read_card, lambda place: load_models([str(place)])):
        with pytest.raises(DataUnavailable, match=rf"{stored.name} cannot be read: No such file"):
            opened(folder)


@pytest.mark.parametrize("where", ["features", "guarantee", "assumptions"])
def test_a_folder_that_names_another_file_or_none_in_one_place_is_refused(
    where: str, encoder: Encoder, tmp_path: Path
) -> None:
    head = PrivateHead(**PUBLIC, features=encoder).fit(RECORDS, LABELS)
    folder = save_private(head, tmp_path / "model", dataset="made up")
    description = json.loads((folder / "model.json").read_text())
    claim = description["guarantee"]
    if where == "assumptions":
        (named,) = (each for each in claim["assumptions"] if "SHA-256" in each)
        claim["assumptions"].remove(named)
    else:
        place = description if where == "features" else claim["parameters"]
        place["features"]["file"] = "famous" + encoder.suffix
    (folder / "model.json").write_text(json.dumps(description))
    with pytest.raises(DataUnavailable, match="is damaged"):
        open_private(folder)
