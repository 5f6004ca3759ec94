"""Estimators from arguments and settings in one dictionary, and points to train them on."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from sklearn.datasets import make_blobs

from quietmax.estimators import DPSGD, DPSGDSettings, HeadSettings, PrivateHead

SETTINGS: dict[Any, Any] = {PrivateHead: HeadSettings, DPSGD: DPSGDSettings}

TABLE, LABELS = make_blobs(400, centers=3, n_features=4, cluster_std=1.0, random_state=0)
TABLE = (TABLE - TABLE.min(0)) / (TABLE.max(0) - TABLE.min(0))
PUBLIC = {"classes": (0, 1, 2), "declared_size": 400}


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
