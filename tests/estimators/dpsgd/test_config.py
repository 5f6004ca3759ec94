"""Settings of DP-SGD: valid values, presets, and the default learning rate."""

from __future__ import annotations

import math
from typing import Any

import pytest

from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd.config import LOGIT_NOISE, PrivateSettings, make_plan


def test_the_default_step_lets_the_stated_noise_gather_on_a_logit() -> None:
    chosen = make_plan(10_000, epsilon=1.0, length=5.0)
    settings = chosen.settings
    noise = (
        settings.learning_rate
        * settings.max_grad_norm
        * chosen.noise_multiplier
        * math.sqrt(settings.steps)
        * 5.0
    )
    assert noise * 10 / (settings.sampling_rate * 10_000) == pytest.approx(LOGIT_NOISE)
    assert settings.optimizer == "momentum"


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden": (0,)},
        {"activation": "cube"},
        {"sampling_rate": 0.0},
        {"sampling_rate": 1.5},
        {"steps": 0},
        {"max_grad_norm": 0.0},
        {"learning_rate": float("nan")},
        {"optimizer": "newton"},
        {"sampling": "sorted"},
        {"l2": -1.0},
    ],
)
def test_settings_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        PrivateSettings(**fields)


def test_settings_that_are_given_override_the_preset() -> None:
    default, paper = make_plan(2000, epsilon=1.0), make_plan(2000, epsilon=1.0, preset="paper")
    assert (default.settings.hidden, default.settings.optimizer, default.settings.steps) == (
        (),
        "momentum",
        100,
    )
    assert (paper.settings.hidden, paper.settings.optimizer, paper.settings.steps) == ((128,), "adam", 2000)
    changed = make_plan(2000, epsilon=1.0, preset="paper", hidden=(4,), sampling_rate=0.1, learning_rate=None)
    assert (changed.settings.hidden, changed.settings.learning_rate) == ((4,), 0.001)
    assert changed.settings.steps == 1000  # still 100 epochs
    assert default.delta == paper.delta == 1 / 20_000
