"""`quietmax audit invariant` reports a model whose records change each other, with one sentence and exit code 1."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from quietmax import PrivateHead, Teachers
from quietmax.audit import invariant
from quietmax.cli import main
from quietmax.data import CategoricalColumn, Encoding, NumericColumn
from quietmax.errors import InvalidInput
from quietmax.estimators.serialization import save_private
from quietmax.estimators.teachers import LINEAR
from quietmax.models.features import RandomFourier

ENCODING = Encoding(
    (NumericColumn("age", 0, 100, scale="log"), CategoricalColumn("town", ("a", "b"))), "ill", ("no", "yes")
)
WIDTH = len(ENCODING.feature_names)


@pytest.fixture
def run(capsys, monkeypatch):
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["quietmax", "audit", "invariant", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def head(tmp_path) -> Path:
    records = np.random.default_rng(0).random((80, WIDTH), np.float32)
    fitted = PrivateHead(features=RandomFourier(count=8), classes=("no", "yes"), declared_size=80)
    fitted.fit(records, np.array(["no", "yes"] * 40))
    return save_private(fitted, tmp_path / "head", dataset="people", encoding=ENCODING)


def test_a_sound_head_is_consistent_in_every_part(run, head):
    code, out, _ = run(head, "--records", 40, "--json")
    report = json.loads(out)
    assert (code, report["verdict"], report["records"], report["threads"]) == (0, "consistent", 40, [1, 2])
    assert [check["part"] for check in report["checks"]] == ["encoding", "features", "sums"]
    assert all(check["comparisons"] > 20 and check["broken"] is None for check in report["checks"])


def test_sound_teachers_are_consistent_and_shown_as_a_table(run, tmp_path):
    records = np.random.default_rng(0).random((60, 4), np.float32)
    crowd = Teachers(teachers=3, network=LINEAR, classes=(0, 1), declared_size=60)
    crowd.fit(records, np.arange(60) % 2)
    code, out, err = run(save_private(crowd, tmp_path / "crowd", dataset="people"))
    assert (code, err) == (0, "")
    assert "networks" in out
    assert "consistent" in out


def test_a_map_that_mixes_records_is_reported_with_one_sentence_and_exit_code_1(run, head, monkeypatch):
    sound = RandomFourier._features

    def mixing(self, records):
        return sound(self, records - records.mean(axis=0))

    monkeypatch.setattr(RandomFourier, "_features", mixing)
    code, out, err = run(head, "--json")
    assert code == 1
    assert json.loads(out)["verdict"] == "refuted"
    assert " ".join(err.split()).startswith("quietmax: The invariant is broken on this machine: features of ")
    assert run(head)[0] == 1


def test_an_encoding_that_looks_at_the_whole_column_is_reported(run, head, monkeypatch):
    sound = NumericColumn.encode

    def fitted(self, values: pd.Series, features: np.ndarray) -> None:
        sound(self, values, features)
        features[:, 0] /= features[:, 0].max()

    monkeypatch.setattr(NumericColumn, "encode", fitted)
    code, _, err = run(head, "--json")
    assert code == 1
    assert "encoding of" in " ".join(err.split())


def test_what_is_no_private_model_and_too_few_records_are_errors(run, tmp_path):
    code, _, err = run(tmp_path)
    assert code == 1
    assert err.startswith("quietmax: ")
    with pytest.raises(InvalidInput, match="records must be at least 3"):
        invariant(RandomFourier(count=2), 3, records=2)
