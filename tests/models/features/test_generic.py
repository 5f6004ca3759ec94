from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quietmax.errors import InvalidInput
from quietmax.models.features import (
    FeatureMap,
    FrozenModule,
    Identity,
    OneHot,
    Pipeline,
    RandomFourier,
    Scaling,
    Scattering,
    UnitNorm,
    feature_map_from_json,
)

COLUMNS = 3 * 12 * 10
SAVEABLE: list[FeatureMap] = [
    Identity(),
    Scaling(low=(-1.0,) * COLUMNS, high=(2.0,) * COLUMNS),
    OneHot((None,) * (COLUMNS - 1) + ((0.0, 0.5, 1.0),)),
    UnitNorm(),
    UnitNorm(constant=0.7),
    RandomFourier(count=50, seed=3),
    RandomFourier(count=50, bandwidth=2.0),
    RandomFourier(count=2),
    Scattering((3, 12, 10), scales=1, angles=4, groups=5),
    Scattering((3, 12, 10), whitening=0.0),
    Pipeline((Scaling(low=(0.0,) * COLUMNS, high=(2.0,) * COLUMNS), RandomFourier(count=20), UnitNorm(0.1))),
]
MAPS = [
    *SAVEABLE,
    FrozenModule(torch.nn.Sequential(torch.nn.Linear(COLUMNS, 17), torch.nn.Tanh()), outputs=17),
]


def named(feature_map: FeatureMap) -> str:
    return feature_map.kind


def records(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((rows, COLUMNS)).astype(np.float32)


@pytest.mark.parametrize("feature_map", MAPS, ids=named)
def test_features_are_float32_of_the_stated_dimension(feature_map):
    features = feature_map.transform(records(3))
    assert features.dtype == np.float32
    assert features.shape == (3, feature_map.dimension(COLUMNS))
    assert np.isfinite(features).all()


@pytest.mark.parametrize("feature_map", MAPS, ids=named)
def test_a_records_features_do_not_depend_on_the_other_records_bit_for_bit(feature_map):
    table = records(150)
    features = feature_map.transform(table)
    for removed in (0, 1, 63, 64, 149):
        kept = np.delete(np.arange(150), removed)
        np.testing.assert_array_equal(feature_map.transform(table[kept]), features[kept])
    order = np.random.default_rng(1).permutation(150)
    np.testing.assert_array_equal(feature_map.transform(table[order]), features[order])
    np.testing.assert_array_equal(feature_map.transform(table[7:8]), features[7:8])


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 17, 23), (1, 9, 13)])
def test_scattering_does_not_depend_on_the_place_in_the_batch_for_usual_image_sizes(shape):
    feature_map = Scattering(shape)
    table = np.random.default_rng(2).random((150, int(np.prod(shape)))).astype(np.float32)
    features = feature_map.transform(table)
    order = np.random.default_rng(3).permutation(150)
    np.testing.assert_array_equal(feature_map.transform(table[order]), features[order])
    np.testing.assert_array_equal(feature_map.transform(table[1:]), features[1:])


@pytest.mark.parametrize("feature_map", MAPS, ids=named)
def test_no_records_give_no_features(feature_map):
    assert feature_map.transform(np.empty((0, COLUMNS))).shape == (0, feature_map.dimension(COLUMNS))


@pytest.mark.parametrize("feature_map", SAVEABLE, ids=named)
def test_a_map_read_from_json_is_equal_and_computes_the_same(feature_map):
    again = feature_map_from_json(json.loads(json.dumps(feature_map.to_json())))
    assert again == feature_map
    np.testing.assert_array_equal(again.transform(records(2)), feature_map.transform(records(2)))


def test_a_frozen_module_is_not_saved_but_refused_with_a_sentence():
    with pytest.raises(InvalidInput, match="cannot be saved"):
        MAPS[-1].to_json()
    with pytest.raises(InvalidInput, match="build the feature map in Python"):
        feature_map_from_json({"kind": "frozen-module"})


@pytest.mark.parametrize(
    "description", [{}, {"kind": "unknown"}, {"kind": "scaling"}, {"kind": "pipeline", "maps": 3}]
)
def test_a_description_that_is_none_is_refused(description):
    with pytest.raises(InvalidInput, match="not the description of a feature map"):
        feature_map_from_json(description)


@pytest.mark.parametrize(
    "table", [[[np.nan, 1.0]], [[np.inf, 1.0]], [[1e300, 1.0]], [1.0, 2.0], [["a", "b"]], 3.0], ids=str
)
def test_anything_but_a_finite_table_is_refused(table):
    with pytest.raises(InvalidInput, match="The records"):
        Identity().transform(table)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Scaling(low=(0.0,), high=(0.0,)),
        lambda: Scaling(low=(0.0, 1.0), high=(1.0,)),
        lambda: Scaling(low=(), high=()),
        lambda: OneHot(((1.0, 1.0),)),
        lambda: OneHot(((),)),
        lambda: OneHot(()),
        lambda: UnitNorm(-1.0),
        lambda: UnitNorm(float("nan")),
        lambda: RandomFourier(count=3),
        lambda: RandomFourier(bandwidth=0.0),
        lambda: RandomFourier(seed=-1),
        lambda: Scattering((1, 4, 4)),
        lambda: Scattering((28, 28)),  # type: ignore[arg-type]
        lambda: Scattering((1, 28, 28), groups=10),
        lambda: Scattering((1, 28, 28), whitening=-0.1),
        lambda: Pipeline(()),
        lambda: Pipeline(("identity",)),  # type: ignore[arg-type]
    ],
)
def test_wrong_constants_are_refused_when_the_map_is_made(build):
    with pytest.raises(InvalidInput, match=r";|give"):
        build()


@pytest.mark.parametrize(
    "feature_map",
    [
        Scaling(low=(0.0,), high=(1.0,)),
        OneHot((None,)),
        Scattering((1, 28, 28)),
        FrozenModule(torch.nn.ReLU(), 5, (5,)),
    ],
    ids=named,
)
def test_records_of_another_width_are_refused(feature_map):
    with pytest.raises(InvalidInput, match="records have 2"):
        feature_map.transform([[0.0, 1.0]])


def test_a_module_with_other_outputs_than_declared_is_refused():
    with pytest.raises(InvalidInput, match="correct the number of outputs"):
        FrozenModule(torch.nn.Linear(2, 3), outputs=4).transform([[0.0, 1.0]])


def test_a_frozen_module_runs_in_evaluation_mode_and_is_left_as_it_was():
    module = torch.nn.Dropout(0.5).train()
    np.testing.assert_array_equal(FrozenModule(module, outputs=2).transform([[1.0, 2.0]]), [[1.0, 2.0]])
    assert module.training


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=6),
    st.floats(0.01, 100.0),
)
def test_normalising_with_a_constant_keeps_every_affine_decision(values, constant):
    x = np.array([values], np.float32)
    weights = np.random.default_rng(0).normal(size=x.shape[1])
    before = float(x[0].astype(float) @ weights + constant)
    after = float(UnitNorm(constant).transform(x)[0].astype(float) @ np.append(weights, 1.0))
    length = float(np.sqrt(np.square(x.astype(float)).sum() + constant**2))
    assert after == pytest.approx(before / length, abs=1e-5 * np.linalg.norm(np.append(weights, 1.0)))


def test_random_fourier_features_have_length_one_and_approximate_the_gaussian_kernel():
    table = records(2)
    features = RandomFourier(count=20_000, bandwidth=5.0).transform(table).astype(float)
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1.0, rtol=1e-6)
    distance = np.square(table[0] - table[1]).sum()
    # mean of 10,000 cosines in [-1, 1]: 0.06 is 6 standard errors at the least (Hoeffding: below 2e-8)
    assert features[0] @ features[1] == pytest.approx(np.exp(-distance / 50), abs=0.06)
