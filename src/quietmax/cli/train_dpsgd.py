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

    accountant: str | None = None
    reading: str | None = None
    configuration: str = "today"
    hidden: tuple[int, ...] | None = None
    activation: str | None = None
    sampling_rate: float | None = None
    steps: int | None = None
    clip: float | None = None
    learning_rate: float | None = None
    optimiser: str | None = None
    l2: float | None = None

    def given(self) -> list[str]:
        """The command's names of the options that were set."""
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        return ["--" + name.replace("_", "-") for name in changed]


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
    settings["accountant"] = options.accountant or "pld"
    settings["reading"] = options.reading or "proven"
    return DPSGD(epsilon, delta, features=features, classes=classes, declared_size=declared_size, **settings)
