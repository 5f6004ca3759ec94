"""Public feature maps: functions of one record, chosen without the private records (THEORY 3.1)."""

from quietmax.models.features.base import BatchedMap, FeatureMap
from quietmax.models.features.encoder import Embedding, Encoder, save_encoder
from quietmax.models.features.generic import Pipeline, RandomFourier
from quietmax.models.features.images import Scattering, image_features
from quietmax.models.features.tabular import (
    Identity,
    OneHot,
    Scaling,
    TableCells,
    TableFeatures,
    UnitNorm,
    table_features,
)

__all__ = [
    "BatchedMap",
    "Embedding",
    "Encoder",
    "FeatureMap",
    "Identity",
    "OneHot",
    "Pipeline",
    "RandomFourier",
    "Scaling",
    "Scattering",
    "TableCells",
    "TableFeatures",
    "UnitNorm",
    "image_features",
    "save_encoder",
    "table_features",
]
