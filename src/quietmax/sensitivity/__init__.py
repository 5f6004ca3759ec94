"""How far an answer can move when one record is removed: as published, certified, observed."""

from quietmax.sensitivity.basis import Basis, Sensitivity
from quietmax.sensitivity.bounds import ScoreBounds
from quietmax.sensitivity.published import PublishedSensitivity, published, published_for

__all__ = ["Basis", "PublishedSensitivity", "ScoreBounds", "Sensitivity", "published", "published_for"]
