"""How far an answer can move when one record is removed: as published, certified, observed."""

from quietmax.sensitivity.base import Basis, ScoreBounds, Sensitivity
from quietmax.sensitivity.empirical import (
    BoundCheck,
    ObservedSensitivity,
    Removal,
    Trained,
    observed,
    observed_by,
    plant,
)
from quietmax.sensitivity.published import PublishedSensitivity, published, published_for

__all__ = [
    "Basis",
    "BoundCheck",
    "ObservedSensitivity",
    "PublishedSensitivity",
    "Removal",
    "ScoreBounds",
    "Sensitivity",
    "Trained",
    "observed",
    "observed_by",
    "plant",
    "published",
    "published_for",
]
