from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from quietmax.errors import InvalidInput
from quietmax.models.features import FeatureMap, RandomFourier
from quietmax.models.features.generic import feature_map_from_json
from tests.models.features.maps import SAVEABLE, named, records


@pytest.mark.parametrize("feature_map", SAVEABLE, ids=named)
def test_a_map_read_from_json_is_equal_and_computes_the_same(feature_map: FeatureMap) -> None:
    again = feature_map_from_json(json.loads(json.dumps(feature_map.to_json())))
    assert again == feature_map
    np.testing.assert_array_equal(again.transform(records(2)), feature_map.transform(records(2)))


@pytest.mark.parametrize(
    "description", [{}, {"kind": "unknown"}, {"kind": "scaling"}, {"kind": "pipeline", "maps": 3}]
)
def test_values_that_describe_no_map_are_rejected(description: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="do not describe a feature map"):
        feature_map_from_json(description)


def test_random_fourier_features_have_length_one_and_approximate_the_gaussian_kernel() -> None:
    table = records(2)
    features = RandomFourier(count=20_000, bandwidth=5.0).transform(table).astype(float)
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1.0, rtol=1e-6)
    distance = np.square(table[0] - table[1]).sum()
    # mean of 10,000 cosines in [-1, 1]: 0.06 is 6 standard errors at the least (Hoeffding: below 2e-8)
    assert features[0] @ features[1] == pytest.approx(np.exp(-distance / 50), abs=0.06)
