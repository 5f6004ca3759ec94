"""The invariant of whole models; `tests/invariant` checks feature maps and estimators one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from quietmax import PrivateHead, Teachers
from quietmax.audit.invariant import audit_invariant, audit_model_invariant
from quietmax.data import Encoding, Records
from quietmax.data.encoding import (
    _KINDS,
    BooleanColumn,
    CategoricalColumn,
    DateColumn,
    HashedColumn,
    NumericColumn,
)
from quietmax.errors import InvalidInput
from quietmax.estimators.head import tables, weights
from quietmax.estimators.serialization import PrivateModel, open_private, save_private
from quietmax.estimators.teachers import LINEAR
from quietmax.models.features import RandomFourier
from quietmax.models.features.tabular import TableCells

ENCODING = Encoding(
    (NumericColumn("age", 0, 100, scale="log"), CategoricalColumn("town", ("a", "b"))), "ill", ("no", "yes")
)
WIDTH = len(ENCODING.feature_names)


@pytest.fixture
def head(tmp_path: Path) -> PrivateModel:
    rows = np.random.default_rng(0).random((80, WIDTH), np.float32)
    records = Records("people", rows, np.arange(80) % 2, 2, encoding=ENCODING)
    fitted = PrivateHead(features=RandomFourier(count=8), declared_size=80).fit(records)
    return open_private(save_private(fitted, tmp_path / "head", dataset="people"))


def test_a_correct_head_is_consistent_in_every_part(head: PrivateModel) -> None:
    report = audit_model_invariant(head, records=40)
    assert (report.verdict, report.subject, report.records) == ("consistent", "head", 40)
    assert [check.part for check in report.checks] == ["encoding", "features", "sums"]
    assert all(check.comparisons > 20 and check.broken is None for check in report.checks)
    assert report.to_json()["threads"] == [1, 2]


@pytest.fixture
def head_on_cells(tmp_path: Path) -> PrivateModel:
    rows = np.random.default_rng(0).random((80, WIDTH), np.float32)
    records = Records("people", rows, np.arange(80) % 2, 2, encoding=ENCODING)
    fitted = PrivateHead(declared_size=80).fit(records)
    return open_private(save_private(fitted, tmp_path / "head", dataset="people"))


def test_a_correct_head_on_cells_is_consistent_in_every_part(head_on_cells: PrivateModel) -> None:
    assert isinstance(head_on_cells.features, TableCells)
    report = audit_model_invariant(head_on_cells, records=40)
    assert (report.verdict, [check.part for check in report.checks]) == (
        "consistent",
        ["encoding", "features", "sums"],
    )
    assert all(check.comparisons > 10 for check in report.checks)
    assert audit_invariant(head_on_cells.features, WIDTH, classes=3).verdict == "consistent"


@pytest.mark.parametrize(("module", "name"), [(tables, "_errors"), (weights, "probabilities")], ids=str)
def test_a_residual_or_confidence_that_depends_on_the_place_of_a_row_is_refuted(
    module: Any, name: str, head_on_cells: PrivateModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(module, name)

    def by_place(*given: Any) -> NDArray[np.floating]:
        found = right(*given)
        return np.asarray(found * (1.0 - 1e-6 * np.arange(found.shape[1])))

    monkeypatch.setattr(module, name, by_place)
    report = audit_model_invariant(head_on_cells)
    assert report.broken == "sums changed with the order of the records (threads: 1)"


def test_every_kind_of_column_is_checked() -> None:
    every = Encoding(
        (
            NumericColumn("income", 0, 1e6, decimal=",", thousands="."),
            NumericColumn("age", 0, 100, edges=(18, 65)),
            CategoricalColumn("town", ("a", "b"), missing=False),
            BooleanColumn("smoker"),
            DateColumn("joined", "2010-01-01", "2025-12-31", format="%d.%m.%Y"),
            DateColumn("seen", "2024-01-01 00:00:00", "2024-12-31 12:00:00"),
            HashedColumn("zip", 8),
        ),
        "ill",
        ("no", "yes"),
    )
    assert {column.kind for column in every.columns} == _KINDS.keys() - {"text"}
    report = audit_invariant(None, len(every.feature_names), encoding=every, records=50)
    assert [check.part for check in report.checks] == ["encoding"]
    assert report.verdict == "consistent"
    assert report.checks[0].comparisons > 500


def test_correct_teachers_are_consistent(tmp_path: Path) -> None:
    records = np.random.default_rng(0).random((60, 4), np.float32)
    teachers = Teachers(teachers=3, network=LINEAR, classes=(0, 1), declared_size=60)
    teachers.fit(records, np.arange(60) % 2)
    model = open_private(save_private(teachers, tmp_path / "teachers", dataset="people"))
    report = audit_model_invariant(model)
    assert report.verdict == "consistent"
    assert "networks" in [check.part for check in report.checks]


def mixing(map_: RandomFourier, records: NDArray[np.float32]) -> NDArray[np.floating]:
    return FEATURES(map_, records - records.mean(axis=0))


def scaled(column: NumericColumn, values: pd.Series, features: NDArray[np.float32]) -> None:
    ENCODE(column, values, features)
    features[:, 0] /= features[:, 0].max()


FEATURES, ENCODE = RandomFourier._features, NumericColumn._encode


@pytest.mark.parametrize(
    ("kind", "name", "method", "part"),
    [(RandomFourier, "_features", mixing, "features"), (NumericColumn, "_encode", scaled, "encoding")],
)
def test_a_step_that_looks_at_other_records_is_refuted(
    kind: type, name: str, method: Any, part: str, head: PrivateModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, name, method)
    report = audit_model_invariant(head)
    assert report.verdict == "refuted"
    assert str(report.broken).startswith(f"{part} of ")


def test_fewer_than_three_records_are_an_error() -> None:
    with pytest.raises(InvalidInput, match="records must be at least 3"):
        audit_invariant(RandomFourier(count=2), 3, records=2)
