"""Public feature maps: functions of one record, chosen without the private records (THEORY 3.1)."""

from quietmax.models.features.base import BatchedMap, FeatureMap
from quietmax.models.features.fourier import RandomFourier
from quietmax.models.features.frozen import FrozenModule
from quietmax.models.features.pipeline import (
    Pipeline,
    computed_in_batches,
    described,
    feature_map_from_json,
    holds_own_code,
)
from quietmax.models.features.scattering import Scattering, scatter
from quietmax.models.features.synthetic import dead_leaves
from quietmax.models.features.tables import Identity, OneHot, Scaling, UnitNorm

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
