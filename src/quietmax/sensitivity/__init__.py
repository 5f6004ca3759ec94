"""How far one record can move a model's weights or scores: as published, certified or measured by retraining."""

from quietmax.sensitivity.base import Basis, ScoreBounds, Sensitivity
from quietmax.sensitivity.empirical import (
    BoundCheck,
    EmpiricalSensitivity,
    Removal,
    Retraining,
    empirical_sensitivity,
    empirical_sensitivity_by,
    plant,
)
from quietmax.sensitivity.published import (
    PublishedSensitivity,
    published_sensitivity,
    published_sensitivity_for,
)

__all__ = [
    "Basis",
    "BoundCheck",
    "EmpiricalSensitivity",
    "PublishedSensitivity",
    "Removal",
    "Retraining",
    "ScoreBounds",
    "Sensitivity",
    "empirical_sensitivity",
    "empirical_sensitivity_by",
    "plant",
    "published_sensitivity",
    "published_sensitivity_for",
]
