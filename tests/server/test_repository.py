"""Which model folders are served, under which names."""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietmax.accounting import GaussianCost, Guarantee
from quietmax.accounting.costs import LIMIT
from quietmax.cli.serve import command
from quietmax.errors import DataUnavailable, InvalidInput, QuietmaxError
from quietmax.estimators import PrivateHead, save_private
from quietmax.ledger import Ledger, Terms
from quietmax.mechanisms import Algorithm1, Answers
from quietmax.models import Model
from quietmax.models.features import Identity
from quietmax.noise import ExactNoise
from quietmax.server import Deployment, Service, Settings
from quietmax.server.deployment import deploy
from quietmax.server.repository import LOADERS, ModelFolder, _parse_model, load_models
from tests.server.running_service import CLASSES, FEATURES


def test_scores_that_are_not_finite_are_answered_as_undecided_and_not_with_an_error(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error after the charge would reveal something about the model."""
    broken = np.zeros((3, CLASSES))
    broken[0, 0], broken[1, 1] = np.nan, np.inf
    (deployment,) = load_models([str(models / "plain")], budget=Terms(1.0), accept_unproven=True)
    monkeypatch.setattr(Model, "scores", lambda *_: broken)
    answers = deployment.answer(np.zeros((3, FEATURES), np.float32))
    assert answers.probabilities is not None
    assert np.isfinite(answers.probabilities).all()
    assert len(answers.labels) == 3


def test_served_answers_draw_exact_noise_only(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a mechanism releases, the source is the exact one; no option or file names another."""
    sources = []
    original = Algorithm1.release

    def watched(self: Algorithm1, scores: Any, source: Any) -> Any:
        sources.append(source)
        return original(self, scores, source)

    monkeypatch.setattr(Algorithm1, "release", watched)
    (deployment,) = load_models([str(models / "plain")], budget=Terms(1.0), accept_unproven=True)
    deployment.answer(np.zeros((2, FEATURES), np.float32))
    assert sources
    assert all(type(source) is ExactNoise and source.exact for source in sources)
    for entry in (command, load_models, ModelFolder, Deployment, deploy, Settings, Service):
        assert not {"seed", "seeded", "source", "random_state"} & set(inspect.signature(entry).parameters)


def test_a_model_without_proven_guarantee_is_refused_unless_accepted(folder: Path) -> None:
    with pytest.raises(
        InvalidInput, match=r"is refuted, not proven: .*theory page, section 2.* requires `accept_unproven`"
    ):
        load_models([str(folder / "plain")], budget=Terms(1.0))
    (deployment,) = load_models([str(folder / "plain")], budget=Terms(1.0), accept_unproven=True)
    assert deployment.status == "refuted"
    for name in ("head", "teachers", "asked"):
        assert load_models([str(folder / name)])[0].status == "proven"


def test_a_head_trained_with_a_seed_is_refused_like_any_other_that_is_not_proven(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    head = PrivateHead(
        1.0, 1e-5, features=Identity(), declared_size=60, classes=range(2), random_state=0
    ).fit(rng.normal(size=(60, 3)), rng.integers(0, 2, 60))
    save_private(head, tmp_path / "seeded", dataset="d")
    with pytest.raises(InvalidInput, match="is conditional, not proven"):
        load_models([str(tmp_path / "seeded")])


def test_a_folder_that_claims_to_be_proven_without_being_a_known_kind_is_refused(folder: Path) -> None:
    path = folder / "plain" / "model.json"
    description = json.loads(path.read_text())
    path.write_text(json.dumps({**description, "kind": "pickle"}))
    with pytest.raises(InvalidInput, match=r"must be one of mlp, head, teachers, dpsgd, but .* has 'pickle'"):
        load_models([str(folder / "plain")])
    with pytest.raises(DataUnavailable, match="no model in"):
        load_models([str(folder)])


def test_a_further_kind_is_one_function(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    guarantee = Guarantee.of(
        GaussianCost(0.5), status="proven", because="A test of the registry (THEORY 3.1)."
    )

    def load(folder: ModelFolder) -> Deployment:
        return Deployment(
            folder.name,
            folder.version,
            kind="own",
            inputs=3,
            classes=("a", "b"),
            dataset=folder.dataset,
            mechanism="released weights",
            answer=lambda rows: Answers(np.zeros(len(rows), np.int64), None),
            guarantee=guarantee,
            digest=folder.digest(),
            training_cost=guarantee.cost,
            terms=Terms(1.0, 1e-5),
        )

    monkeypatch.setitem(LOADERS, "own", load)
    path = folder / "plain" / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "kind": "own"}))
    (deployment,) = deploy(ledger, load_models([str(folder / "plain")]))
    assert (deployment.unit_cost, deployment.account.spent_units) == (0, LIMIT)


@pytest.mark.parametrize(
    ("text", "name", "version"),
    [("a/b", "b", "1"), ("x=a/b", "x", "1"), ("x/7=a/b", "x", "7"), ("x/v1.2=/a", "x", "v1.2")],
)
def test_models_are_named_after_their_folder_or_as_stated(text: str, name: str, version: str) -> None:
    assert _parse_model(text)[:2] == (name, version)


@pytest.mark.parametrize("text", ["", "a b=c", "x/=c", "ä=c", "x/1 2=c", "/"])
def test_invalid_names_of_models_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        _parse_model(text)


def test_two_models_of_one_name_and_version_are_refused(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="must be unique, got two models called head/1"):
        load_models([str(folder / "head"), f"head={folder / 'head'}"])


def test_an_ordinary_model_requires_a_budget_and_algorithm_1(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="`budget` is required"):
        load_models([str(folder / "plain")], accept_unproven=True)
    with pytest.raises(InvalidInput, match="must be algorithm1"):
        load_models(
            [str(folder / "plain")], budget=Terms(1.0), mechanism="sampled-neuron", accept_unproven=True
        )
    with pytest.raises(InvalidInput, match="must be noisy-max, got 'algorithm1'"):
        load_models([str(folder / "teachers")], mechanism="algorithm1")
    with pytest.raises(InvalidInput, match="`mechanism` must not be set"):
        load_models([str(folder / "head")], mechanism="sampled-neuron")


def test_the_digest_of_a_served_model_changes_with_weights_and_mechanism(folder: Path) -> None:
    def digest(**more: Any) -> bytes:
        return load_models([str(folder / "plain")], budget=Terms(1.0), accept_unproven=True, **more)[0].digest

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


def test_a_folder_with_an_equals_sign_in_its_name_is_a_folder(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(models / "head", tmp_path / "eps=1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="NAME=FOLDER gives a folder another name"):
        load_models(["eps=1"])
    (deployment,) = load_models(["head=eps=1"])
    assert deployment.label == "head/1"
    with pytest.raises(QuietmaxError):
        load_models(["eps=2"])


def test_a_mechanism_that_spends_a_delta_per_answer_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarantee = Algorithm1.guarantee

    def with_delta(self: Algorithm1, classes: int) -> Guarantee:
        return replace(guarantee(self, classes), extra_delta=1e-9)

    monkeypatch.setattr(Algorithm1, "guarantee", with_delta)
    with pytest.raises(InvalidInput, match="spends a delta with every answer"):
        load_models([str(folder / "plain")], budget=Terms(1.0), accept_unproven=True)
