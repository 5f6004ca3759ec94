"""Public feature maps: functions of one record, chosen without the private records (THEORY 3.1)."""

from quietmax.models.features.base import BatchedMap, FeatureMap
from quietmax.models.features.generic import (
    FrozenModule,
    Pipeline,
    RandomFourier,
    computed_in_batches,
    described,
    feature_map_from_json,
    holds_own_code,
)
from quietmax.models.features.images import Scattering, dead_leaves, scatter
from quietmax.models.features.tabular import Identity, OneHot, Scaling, UnitNorm

__all__ = [
    "BatchedMap",
    "FeatureMap",
    "FrozenModule",
    "Identity",
    "OneHot",
    "Pipeline",
    "RandomFourier",
    "Scaling",
    "Scattering",
    "UnitNorm",
    "computed_in_batches",
    "dead_leaves",
    "described",
    "feature_map_from_json",
    "holds_own_code",
    "scatter",
]
