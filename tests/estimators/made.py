"""Estimators from arguments and settings in one dictionary, and points to train them on."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from quietmax.estimators import DPSGD, DPSGDSettings, HeadSettings, PrivateHead

SETTINGS: dict[Any, Any] = {PrivateHead: HeadSettings, DPSGD: DPSGDSettings}


def made(kind: Any, *arguments: Any, **given: Any) -> Any:
    """Return an estimator; what is a field of its settings goes there."""
    if kind not in SETTINGS:
        return kind(*arguments, **given)
    own = {field.name for field in fields(SETTINGS[kind])} & given.keys()
    settings = SETTINGS[kind](**{name: given.pop(name) for name in own})
    return kind(*arguments, **({"settings": settings} if own else {}), **given)


def blobs(count: int = 90, classes: int = 3, columns: int = 5, seed: int = 0) -> Any:
    """Points around one centre for each class, and their classes."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, count)
    centres = 3 * np.random.default_rng(99).normal(size=(classes, columns))
    return (centres[labels] + generator.normal(size=(count, columns))).astype(np.float32), labels
