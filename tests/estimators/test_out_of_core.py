"""An estimator is the same, bit for bit, wherever its rows are (THEORY 3.11), and it leaves nothing behind."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from quietmax import DPSGD, PrivateHead, Teachers
from quietmax.errors import InvalidData, InvalidInput
from quietmax.estimators.blocks import LocalEngine
from quietmax.estimators.dpsgd import training
from quietmax.estimators.dpsgd.training import CellLayer
from quietmax.estimators.head import estimator as head
from quietmax.estimators.head.weights import TableWeights
from quietmax.models import MLP, CrossEntropy, TrainingSettings
from tests.estimators.made import made
from tests.estimators.table_of_people import CROSSED, PERSONS, PLAIN, files, table_of_people

FAST = TrainingSettings(hidden=(4,), loss=CrossEntropy(), learning_rate=0.01, epochs=2, batch_size=10)
SHUFFLED = {"analysis": "published", "accountant": "rdp", "sampling_rate": 0.3}
USUAL: dict[Any, dict[str, Any]] = {
    PrivateHead: {"epsilon": 1.0, "delta": 1e-5, "steps": 4},
    DPSGD: {"epsilon": 2.0, "delta": 1e-5, "steps": 8},
    Teachers: {"epsilon": 2.0, "queries": 5, "teachers": 5, "network": FAST},
}
ROWS: dict[Any, int] = {PrivateHead: 600, DPSGD: 600, Teachers: 300}
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "head, records": (PrivateHead, {"schema": PLAIN}),
    "head, persons": (PrivateHead, {}),
    "head, crosses and a scale": (PrivateHead, {"schema": CROSSED, "calibration": 0.1}),
    "head, pairs of columns": (PrivateHead, {"pairs": True, "class_weight": "balanced"}),
    "dpsgd, records": (DPSGD, {"schema": PLAIN}),
    "dpsgd, persons": (DPSGD, {}),
    "dpsgd, small batches": (DPSGD, {"sampling_rate": 0.005, "hidden": (3,), "optimizer": "momentum"}),
    "dpsgd, all in every step": (DPSGD, {"sampling_rate": 1.0, "centring_steps": 0}),
    "dpsgd, shuffled": (DPSGD, {"schema": PLAIN, **SHUFFLED}),
    "dpsgd, shuffled persons": (DPSGD, SHUFFLED),
    "dpsgd, other features": (DPSGD, {"features": "unit-norm", "declared_size": 300}),
    "dpsgd, a module": (DPSGD, {"network": torch.nn.Linear}),
    "teachers, records": (Teachers, {"schema": PLAIN}),
    "teachers, persons": (Teachers, {}),
    "teachers, three stacks": (Teachers, {"teachers": 60}),
    "teachers, modules": (Teachers, {"network": torch.nn.Linear, "teachers": 2}),
}
KINDS = pytest.mark.parametrize("kind", [PrivateHead, DPSGD, Teachers])


def people(kind: Any) -> Any:
    """Rows of persons, who are spread over all rows."""
    return table_of_people(ROWS[kind], ROWS[kind] * 2 // 5)


def fit(kind: Any, source: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    return made(kind, **({"schema": PERSONS, "random_state": 3} | USUAL[kind] | settings)).fit(source)


def released(fitted: Any) -> list[Any]:
    """All numbers that a training computed from the records."""
    if isinstance(fitted, PrivateHead):
        found = [fitted.size_, fitted.centre_, fitted.coef_, fitted.whitening_]
        return [each for each in found if each is not None]
    if hasattr(fitted, "model_") and isinstance(fitted.model_, TableWeights):
        return [fitted.model_.weights, fitted.model_.centre]
    network = fitted.ensemble_.teachers if isinstance(fitted, Teachers) else fitted.model_.network
    others = [fitted.ensemble_.silent] if isinstance(fitted, Teachers) else []
    if isinstance(fitted, DPSGD) and fitted.model_.centring is not None:
        centring = fitted.model_.centring
        first = centring.first if isinstance(centring, CellLayer) else None
        others = [centring.centre] if first is None else [first.centre, first.weights]
    if isinstance(network, MLP):
        return [network.weight_vectors().numpy(), *others]
    modules = network if isinstance(network, list) else [network.module]
    return [*(each.detach().numpy() for module in modules for each in module.parameters()), *others]


def assert_same(one: Any, other: Any) -> None:
    for expected, found in zip(released(one), released(other), strict=True):
        np.testing.assert_array_equal(expected, found)
    assert one.guarantee_ == other.guarantee_


@pytest.mark.parametrize(("kind", "settings"), WAYS.values(), ids=WAYS)
def test_the_weights_are_the_same_in_memory_and_out_of_core(
    tmp_path: Path, kind: Any, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    frame = people(kind)
    expected = fit(kind, frame, **settings)
    assert np.any(released(expected)[0])
    request.getfixturevalue("small_blocks")
    folder = files(tmp_path / "people", frame, [7, 100, 101, 250], group=60)
    frame.to_csv(tmp_path / "people.csv", index=False)
    disk, little = LocalEngine(0, tmp_path), LocalEngine(6000, tmp_path)
    ways: list[tuple[Any, Any]] = [
        (pa.Table.from_pandas(frame), "local"),
        (frame, disk),
        (folder, "local"),
        (str(folder / "*.parquet"), little),
        (tmp_path / "people.csv", disk),
    ]
    if kind is PrivateHead:  # to whom not even the order of the rows matters
        ways += [
            (frame.sample(frac=1, random_state=2), little),
            (files(tmp_path / "other", frame.sample(frac=1, random_state=1), [500]), disk),
        ]
    before = set(tmp_path.iterdir())
    for source, engine in ways:
        assert_same(fit(kind, source, engine=engine, **settings), expected)
        assert set(tmp_path.iterdir()) == before


@KINDS
@pytest.mark.parametrize("error", [InvalidInput, KeyboardInterrupt])
def test_nothing_is_left_on_disk_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, error: type[BaseException]
) -> None:
    seen: list[Path] = []

    def interrupted(*_: Any, **__: Any) -> None:
        seen.extend(tmp_path.rglob("*.labels"))
        raise error("stopped")

    steps = {PrivateHead: "descend", DPSGD: "train_on_cells", Teachers: "train_networks"}
    monkeypatch.setattr(inspect.getmodule(kind), steps[kind], interrupted)
    private = made(kind, **USUAL[kind], schema=PLAIN, random_state=3, engine=LocalEngine(0, tmp_path))
    with pytest.raises(error):
        private.fit(people(kind))
    assert seen
    assert not list(tmp_path.iterdir())
    assert not any(hasattr(private, name) for name in ("guarantee_", "feature_map_", "centre_", "plan_"))


@KINDS
@pytest.mark.parametrize("schema", [PLAIN, PERSONS], ids=["records", "persons"])
def test_a_bad_file_is_found_before_any_noise_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, schema: Any
) -> None:
    def drawn(*_: object, **__: object) -> None:
        raise AssertionError("noise was drawn")

    for module in (head, training, inspect.getmodule(DPSGD)):
        monkeypatch.setattr(module, "release_gaussian", drawn)
    frame = people(kind)
    frame.loc[290, "ill"] = "secret"
    folder = files(tmp_path / "people", frame.iloc[:300], list(range(60, 300, 60)))
    with pytest.raises(InvalidData, match=r"04.parquet: Row 51 has a label outside the classes") as caught:
        fit(kind, folder, schema=schema, engine=LocalEngine(0, tmp_path), random_state=None)
    assert "secret" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["people"]


@KINDS
def test_files_without_rows_are_an_error(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(InvalidData, match="Nobody is left"):
        fit(kind, files(tmp_path / "people", people(kind).iloc[:0], []))


@KINDS
@pytest.mark.parametrize(
    ("settings", "more", "message"),
    [
        ({"schema": None}, {}, "need a `schema`"),
        ({}, {"groups": [1]}, "leave out `groups`"),
        ({}, {"y": [1]}, "leave out `y`"),
        ({"engine": 5}, {}, "engine must be"),
    ],
)
def test_what_files_cannot_have_is_an_error(
    tmp_path: Path, kind: Any, settings: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    folder = files(tmp_path / "people", people(kind), [100])
    with pytest.raises(InvalidInput, match=message):
        made(kind, **({"schema": PERSONS} | USUAL[kind] | settings)).fit(folder, **more)


@KINDS
def test_progress_ends_at_its_total(tmp_path: Path, kind: Any) -> None:
    seen: list[tuple[int, int]] = []
    folder = files(tmp_path / "people", people(kind), [100])
    fit(kind, folder, engine=LocalEngine(progress=lambda *done: seen.append(done)))
    done, whole = seen[-1]
    # The sizes of the batches of DP-SGD are random.
    assert 0.9 * whole < done if kind is DPSGD else done == whole
    assert done > ROWS[kind]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert all(done <= whole for done, whole in seen)


@KINDS
@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_threads_changes_no_bit(kind: Any, threads: int) -> None:
    expected = fit(kind, people(kind))
    torch.set_num_threads(threads)
    assert_same(fit(kind, people(kind)), expected)
