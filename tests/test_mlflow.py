"""The MLflow flavour, with MLflow itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest
import yaml  # type: ignore[import-untyped]

import quietmax as qm
import quietmax.mlflow as flavour
from quietmax.errors import InvalidInput
from quietmax.estimators.serialization import decide_folder, open_private, save_private
from tests.export.people import readable_rows, train


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("mlflow") / "head")


@pytest.fixture(scope="module")
def saved(head: Path) -> Path:
    flavour.save_model(head, head.parent / "saved")
    return head.parent / "saved"


def test_pyfunc_answers_a_data_frame_with_column_names(head: Path, saved: Path) -> None:
    rows, model = readable_rows(300, seed=6), open_private(head)
    shuffled = rows[list(reversed(rows.columns))].assign(further=1)
    answers = mlflow.pyfunc.load_model(str(saved)).predict(shuffled)
    expected = model.predict_proba(model.encode(rows))
    assert list(answers) == ["label", *(f"probability of {name}" for name in model.classes)]
    assert np.array_equal(answers.iloc[:, 1:].to_numpy(), expected)
    assert (answers["label"] == np.array(model.classes)[expected.argmax(axis=1)]).all()


def test_pyfunc_takes_typed_and_missing_cells(head: Path, saved: Path) -> None:
    rows = readable_rows(2, seed=6).assign(
        smoker=[True, None], joined=pd.to_datetime(["2012-02-29", None]), code=[1, 2], hours=[3, 50]
    )
    model = open_private(head)
    answers = mlflow.pyfunc.load_model(str(saved)).predict(rows)
    assert np.array_equal(answers.iloc[:, 1:].to_numpy(), model.predict_proba(model.encode(rows)))


def test_pyfunc_answers_by_the_decision_of_the_folder(head: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(head, tmp_path / "copy"))
    rows, before = readable_rows(50, seed=1), open_private(head)
    counts = np.bincount(before.predict(before.encode(rows)), minlength=3)
    rare = before.classes[counts.argmin()]
    others = [label for label in before.classes if label != rare]
    decide_folder(folder, cost={(rare, label): 1e6 for label in others})
    flavour.save_model(folder, tmp_path / "saved")
    found = mlflow.pyfunc.load_model(str(tmp_path / "saved")).predict(rows)
    model = open_private(folder)
    expected = np.array(model.classes)[model.predict(model.encode(rows))]
    assert found["label"].tolist() == expected.tolist()
    probable = np.array(model.classes)[found.iloc[:, 1:].to_numpy().argmax(1)]
    assert (found["label"] != probable).any()


def test_pyfunc_states_the_reasons_if_the_parameters_ask_for_them(head: Path, saved: Path) -> None:
    rows, model = readable_rows(50, seed=6), open_private(head)
    found = mlflow.pyfunc.load_model(str(saved)).predict(rows, params={"reasons": True})
    sums = model.additive()
    expected = sums.contributions(model.encode(rows))
    for place, name in enumerate(model.classes):
        given = found[[f"contribution of {summand} to {name}" for summand in sums.summands]].to_numpy()
        assert np.array_equal(given, expected[:, :, place])


def test_a_missing_column_is_an_error_that_names_it(saved: Path) -> None:
    rows = readable_rows(2, seed=6).drop(columns="city")
    with pytest.raises(mlflow.MlflowException, match="city"):
        mlflow.pyfunc.load_model(str(saved)).predict(rows)


def test_the_flavour_loads_a_classifier_with_its_guarantee(head: Path, saved: Path) -> None:
    classifier = flavour.load_model(saved)
    assert classifier.guarantee_ == open_private(head).guarantee


def test_a_run_logs_the_model(head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    try:
        with mlflow.start_run():
            logged = flavour.log_model(head, name="people", metadata={"owner": "me"})
        rows = readable_rows(20, seed=6)
        answers = mlflow.pyfunc.load_model(logged.model_uri).predict(rows)
        assert (answers["label"] == flavour.load_model(logged.model_uri).predict(rows)).all()
        assert logged.metadata["owner"] == "me"
        assert logged.metadata["guarantee"]["status"] == "proven"
    finally:
        mlflow.set_tracking_uri(None)


def test_the_guarantee_is_readable_without_quietmax_and_mlflow(head: Path, saved: Path) -> None:
    expected = open_private(head).guarantee.to_json()
    assert (
        yaml.safe_load((saved / "MLmodel").read_text(encoding="utf-8"))["metadata"]["guarantee"] == expected
    )
    assert json.loads((saved / "quietmax.json").read_text(encoding="utf-8"))["guarantee"] == expected
    assert (saved / "requirements.txt").read_text() == f"quietmax=={qm.__version__}\n"


def test_an_existing_folder_is_not_replaced(head: Path, saved: Path) -> None:
    before = sorted(saved.rglob("*"))
    with pytest.raises(InvalidInput, match="already exists"):
        flavour.save_model(head, saved)
    assert sorted(saved.rglob("*")) == before


def test_a_model_of_vectors_has_the_signature_of_a_tensor(tmp_path: Path) -> None:
    vectors = np.random.default_rng(3).normal(size=(200, 3)).astype(np.float32)
    head = qm.PrivateHead(epsilon=8.0, classes=(3, 7), declared_size=200).fit(
        vectors, np.where(vectors[:, 0] > 0, 7, 3)
    )
    flavour.save_model(save_private(head, tmp_path / "head", dataset="vectors"), tmp_path / "saved")
    answers = mlflow.pyfunc.load_model(str(tmp_path / "saved")).predict(vectors)
    assert (answers["label"] == head.predict(vectors)).all()
