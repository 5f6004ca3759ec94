"""DP-SGD gives the same network, bit for bit, wherever its rows are."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quietmax import DPSGD
from quietmax._ray import RayEngine
from quietmax.errors import InvalidInput
from quietmax.estimators import DPSGDSettings, blocks
from quietmax.estimators.blocks import Blocks, LocalEngine, Table
from quietmax.estimators.dpsgd import training
from quietmax.estimators.dpsgd.training import (
    _numbered_persons,
)
from quietmax.estimators.training_set import Persons
from quietmax.models.features import Identity
from quietmax.noise import release
from quietmax.noise.sources import SeededNoise
from tests.estimators.made import made
from tests.estimators.table_of_people import PERSONS, PLAIN, table_of_people
from tests.estimators.test_out_of_core import assert_same, released

ROWS = 1500
people = partial(table_of_people, ROWS, 600)


def fit(source: Any, settings: dict[str, Any], **more: Any) -> DPSGD:
    torch.manual_seed(0)
    return made(DPSGD, 2.0, 1e-5, steps=8, random_state=3, **settings, **more).fit(source)


@pytest.mark.usefixtures("small_blocks")
def test_exact_training_is_the_same_in_memory_and_out_of_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same entropy for batches and noise, exact sums of rows from disk give the same weights."""
    frame = people()
    shuffled = frame.sample(frac=1, random_state=1)

    def exact(source: Any, rate: float, engine: Any = "local") -> DPSGD:
        entropy, noise = np.random.default_rng(5), SeededNoise(7)
        monkeypatch.setattr("os.urandom", entropy.bytes)
        for module in (training, "quietmax.estimators.dpsgd.estimator"):
            monkeypatch.setattr(
                *((module, "release_gaussian") if module is training else (f"{module}.release_gaussian",)),
                lambda total, **given: release.release_gaussian(total, **(given | {"source": noise})),
            )
        fitted = DPSGD(
            2.0,
            1e-5,
            settings=DPSGDSettings(steps=8, sampling_rate=rate, hidden=(3,), length=1.0),
            schema=PERSONS,
            engine=engine,
        )
        return fitted.fit(source)

    disk = LocalEngine(max_memory=0, cache_dir=tmp_path)
    sampled = exact(frame, 0.3)
    assert_same(sampled, exact(frame, 0.3, disk))
    # With all records in every step, not even their order matters.
    whole = exact(frame, 1.0)
    assert_same(whole, exact(shuffled, 1.0, disk))
    assert any((one != other).any() for one, other in zip(released(sampled), released(whole), strict=True))


@pytest.mark.usefixtures("small_blocks")
def test_rows_are_read_by_number_in_any_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(700, 5)).astype(np.float32)
    with Blocks(2, LocalEngine(4000, tmp_path)) as stored:
        stored.extend([Table(rows, np.zeros(700, np.int64), 2)])
        assert 0 < len(list(tmp_path.rglob("*.labels"))) < -(-700 // 16)
        for numbers in (
            np.arange(700),
            rng.permutation(700),
            rng.integers(700, size=50),
            np.array([699, 0, 0, 350]),
            np.empty(0, np.int64),
        ):
            np.testing.assert_array_equal(stored._rows_at(numbers), rows[numbers])


def test_digests_of_persons_are_numbered_as_their_names_are() -> None:
    names = people()["who"].to_numpy(object)
    plain, digested = Persons.of(names), _numbered_persons(blocks._person_digests(names, b"any key"))
    np.testing.assert_array_equal(plain.codes, digested.codes)
    np.testing.assert_array_equal(plain.rows, digested.rows)


def test_another_engine_is_an_error() -> None:
    for engine in (RayEngine(), "ray", 5):
        with pytest.raises(InvalidInput, match="engine must be 'local' or a LocalEngine"):
            fit(people(), {"schema": PLAIN}, engine=engine)


def test_features_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    class Endless(Identity):
        def _features(self, records: Any) -> Any:
            return np.full_like(records, np.inf)

    options = {"schema": PLAIN, "features": Endless(), "centring_steps": 0, "length": 1.0}
    with pytest.raises(InvalidInput, match="must be finite"):
        fit(people(), options, engine=LocalEngine(0, tmp_path))
