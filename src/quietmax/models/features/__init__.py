"""Public feature maps: functions of one record, chosen without the private records (THEORY 3.1)."""

from quietmax.models.features.base import BatchedMap, FeatureMap
from quietmax.models.features.encoder import Embedding, Encoder, save_encoder
from quietmax.models.features.generic import (
    FrozenModule,
    Pipeline,
    RandomFourier,
    describe_map,
    feature_map_from_json,
    is_batched,
    plugin_maps,
    runs_user_code,
)
from quietmax.models.features.images import Scattering, dead_leaves, scatter
from quietmax.models.features.patches import Joined, Mirrored, Patches, Reduced, Turned, image_features
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
    "Embedding",
    "Encoder",
    "FeatureMap",
    "FrozenModule",
    "Identity",
    "Joined",
    "Mirrored",
    "OneHot",
    "Patches",
    "Pipeline",
    "RandomFourier",
    "Reduced",
    "Scaling",
    "Scattering",
    "TableFeatures",
    "Turned",
    "UnitNorm",
    "dead_leaves",
    "describe_map",
    "feature_map_from_json",
    "image_features",
    "is_batched",
    "plugin_maps",
    "runs_user_code",
    "save_encoder",
    "scatter",
    "table_features",
]
