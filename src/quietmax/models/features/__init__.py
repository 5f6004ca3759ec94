"""Public feature maps: functions of one record, chosen without the private records (THEORY 3.1)."""

from quietmax.models.features.base import BatchedMap, FeatureMap
from quietmax.models.features.generic import (
    FrozenModule,
    Pipeline,
    RandomFourier,
    describe_map,
    feature_map_from_json,
    is_batched,
    runs_user_code,
)
from quietmax.models.features.images import Scattering, dead_leaves, scatter
from quietmax.models.features.tabular import (
    Identity,
    OneHot,
    Scaling,
    TableFeatures,
    UnitNorm,
    table_features,
)

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
    "TableFeatures",
    "UnitNorm",
    "dead_leaves",
    "describe_map",
    "feature_map_from_json",
    "is_batched",
    "runs_user_code",
    "scatter",
    "table_features",
]
