"""How far one record can move a model's weights or scores: as published, certified or measured by retraining."""

from quietmax.sensitivity.certified import ScoreBounds, Sensitivity
from quietmax.sensitivity.network import (
    EmpiricalSensitivity,
    PublishedSensitivity,
    empirical_sensitivity,
    published_sensitivity,
)

__all__ = [
    "EmpiricalSensitivity",
    "PublishedSensitivity",
    "ScoreBounds",
    "Sensitivity",
    "empirical_sensitivity",
    "published_sensitivity",
]
