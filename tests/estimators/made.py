"""Estimators from arguments and settings in one dictionary, and points to train them on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import make_blobs

from quietmax.errors import QuietmaxError
from quietmax.estimators import DPSGD, DPSGDSettings, HeadSettings, PrivateHead
from quietmax.models import serialization

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


@contextmanager
def interrupted_saving(moment: str, interruption: type[BaseException] = KeyboardInterrupt) -> Iterator[None]:
    """Interrupt the saving of a model just before or just after its folder gets its name."""
    replace_folder = serialization._replace

    def interrupted(target: Path, staging: Path) -> None:
        if moment == "after":
            replace_folder(target, staging)
        raise interruption

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(serialization, "_replace", interrupted)
        with pytest.raises((KeyboardInterrupt, QuietmaxError)):
            yield
