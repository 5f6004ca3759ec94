"""Score bounds, neighbouring scores and call spies for the tests of mechanisms."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from quietmax.sensitivity import ScoreBounds, Sensitivity


def bounds(one: float = 0.5, vector: float = 0.6) -> ScoreBounds:
    return ScoreBounds(Sensitivity(one, "certified", "made up"), Sensitivity(vector, "certified", "made up"))


def neighbours(
    generator: np.random.Generator, classes: int, limits: ScoreBounds
) -> tuple[np.ndarray, np.ndarray]:
    """Return two score vectors as far apart as the bounds allow."""
    scores = generator.normal(0, 2, classes)
    move = (
        generator.choice([-1.0, 1.0], classes) if generator.random() < 0.5 else generator.normal(size=classes)
    )
    move *= min(limits.one.value / np.abs(move).max(), limits.vector.value / np.linalg.norm(move))
    return scores, scores + move


class Spy:
    """Passes a call on and records its arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.given: list[dict[str, Any]] = []
        self.values: list[np.ndarray] = []

    def __call__(self, values: Any, **options: Any) -> Any:
        self.given.append(options)
        self.values.append(np.asarray(values))
        return self._function(values, **options)


def spied(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> Spy:
    """Replace a function of a module by a spy."""
    spy = Spy(getattr(module, name))
    monkeypatch.setattr(module, name, spy)
    return spy
