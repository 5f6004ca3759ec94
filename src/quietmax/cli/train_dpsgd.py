"""The options of `quietmax train --private dpsgd`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from quietmax.estimators import DPSGD
from quietmax.models.features import FeatureMap


@dataclass(frozen=True)
class DPSGDOptions:
    """What the options said; None leaves a number to the configuration."""

    accountant: str
    reading: str
    configuration: str
    hidden: tuple[int, ...] | None
    activation: str | None
    sampling_rate: float | None
    steps: int | None
    clip: float | None
    learning_rate: float | None
    optimiser: str | None
    l2: float | None


def private_network(
    options: DPSGDOptions,
    *,
    epsilon: float,
    delta: float | None,
    features: FeatureMap | None,
    classes: Sequence[int],
    declared_size: int | None,
) -> DPSGD:
    """The estimator that the options describe, not yet fitted; its noise is exact."""
    settings: dict[str, Any] = {field.name: getattr(options, field.name) for field in fields(options)}
    return DPSGD(epsilon, delta, features=features, classes=classes, declared_size=declared_size, **settings)
