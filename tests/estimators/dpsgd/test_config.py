"""Settings of DP-SGD: valid values, presets, and the default learning rate."""

from __future__ import annotations

import math
from typing import Any

import pytest

from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd.config import LOGIT_NOISE, ROW_LENGTH, PrivateSettings, make_plan


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


@pytest.mark.parametrize(("inputs", "kappa", "share"), [("centred", 0.9, 0.2), ("scaled", 0.8, 0.5)])
@pytest.mark.parametrize("size", [300, 10_000, 60_000])
@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_with_centring_the_stated_noise_gathers_on_a_logit_of_rows_of_known_length(
    inputs: Any, kappa: float, share: float, size: int, epsilon: float
) -> None:
    chosen = make_plan(size, epsilon=epsilon, delta=1e-5, inputs=inputs, accountant="zcdp")
    settings = chosen.settings
    assert settings.max_grad_norm == pytest.approx(share * math.hypot(ROW_LENGTH, 1.0))
    steps = settings.learning_rates() * settings.max_grad_norm * ROW_LENGTH
    noise = chosen.noise_multiplier * math.sqrt(sum(step * step for step in steps))
    assert noise / (settings.sampling_rate * size) == pytest.approx(kappa)
    assert (settings.optimizer, settings.sampling_rate, settings.decay) == ("sgd", 0.5, 0.3)
    assert (settings.steps, settings.centring_steps) == (100, 5)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_with_hardly_any_noise_the_length_of_all_steps_together_is_limited(optimizer: Any) -> None:
    plan = make_plan(10**9, epsilon=8.0, delta=1e-5, inputs="centred", accountant="zcdp", optimizer=optimizer)
    gain = 10.0 if optimizer == "momentum" else 1.0
    total = plan.settings.learning_rates().sum() * plan.settings.max_grad_norm * ROW_LENGTH * gain
    assert total == pytest.approx(30_000.0)


@pytest.mark.parametrize("centring_steps", [0, 7])
@pytest.mark.parametrize("decay", [0.0, 0.001, 0.5, 1.0])
def test_the_learning_rate_is_constant_and_then_falls_linearly_to_almost_zero(
    centring_steps: int, decay: float
) -> None:
    settings = PrivateSettings(steps=47, centring_steps=centring_steps, learning_rate=3.0, decay=decay)
    count = 47 - centring_steps
    falling = max(1.0, decay * count)
    rates = [3.0 * min(1.0, (count - step) / falling) for step in range(count)]
    assert settings.learning_rates().tolist() == pytest.approx(rates)


def test_inputs_that_do_not_fit_the_centring_steps_are_refused() -> None:
    for inputs, steps in (("plain", 2), ("centred", 0)):
        with pytest.raises(InvalidInput, match="does not fit centring_steps"):
            make_plan(1000, epsilon=1.0, inputs=inputs, centring_steps=steps)
    with pytest.raises(InvalidInput, match="Poisson"):
        make_plan(1000, epsilon=1.0, inputs="centred", analysis="published", accountant="zcdp")


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
        {"decay": -0.1},
        {"decay": 1.5},
        {"decay": float("nan")},
        {"steps": 3, "centring_steps": 3},
        {"centring_steps": 1, "sampling": "shuffled"},
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
