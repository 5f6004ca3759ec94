"""Half the noise is the noise of an honest release with a larger budget; nothing can be released with less."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietmax import DPSGD, DPSGDSettings, HeadSettings, PrivateHead, Teachers
from quietmax.accounting import GaussianCost, PureCost
from quietmax.audit import mechanism_with_share
from quietmax.audit.training import estimator_with_share
from quietmax.errors import InvalidInput
from quietmax.estimators.serialization import open_private, save_private
from quietmax.mechanisms import Algorithm1, GaussianScores, NoisyMax, SampledNeuron
from quietmax.models import CrossEntropy, TrainingSettings
from quietmax.models.features import TableCells
from tests.mechanisms.made_up import bounds

PUBLIC: dict[str, Any] = {"classes": (0, 1), "declared_size": 60, "random_state": 3}
SMALL = TrainingSettings(hidden=(), loss=CrossEntropy(), epochs=1)


def fitted(estimator: Any) -> Any:
    generator = np.random.default_rng(0)
    X = generator.random((60, 3))
    return estimator.fit(X, (X[:, 0] > X[:, 1]).astype(int))


def of_part(name: str) -> Callable[[Any], float]:
    return lambda fitted: 1 / fitted.guarantee_.parameters[name]


def of_answer(fitted: Any) -> float:
    (amount,) = (1 / each for each in vars(fitted.predictor_.mechanism.per_query).values())
    return amount


CELLS = TableCells(columns=3, parts=((0, 1), (1, 2), (2, 3)), numbers=(0, 1, 2), levels=8)
SCALED = HeadSettings(calibration=0.04)
MOMENTS, FULL = HeadSettings(second_moments=0.2), DPSGDSettings(steps=20, sampling_rate=1.0)
CASES: dict[str, tuple[Any, Callable[[Any], float]]] = {
    "head": (PrivateHead(1.0, **PUBLIC), of_part("mu_training")),
    "head centre": (PrivateHead(1.0, **PUBLIC), of_part("mu_centring")),
    "head moments": (PrivateHead(1.0, settings=MOMENTS, **PUBLIC), of_part("mu_moments")),
    "head calibration": (PrivateHead(1.0, settings=SCALED, **PUBLIC), of_part("mu_calibration")),
    "head cells": (PrivateHead(1.0, features=CELLS, settings=SCALED, **PUBLIC), of_part("mu_calibration")),
    "head output": (PrivateHead(1.0, method="output", **PUBLIC), lambda head: 1 / head.guarantee_.mu),
    "head query": (PrivateHead(2.0, release="query", queries=4, **PUBLIC), of_answer),
    "teachers": (Teachers(1.0, queries=4, network=SMALL, **PUBLIC), of_answer),
    "teachers gaussian": (Teachers(1.0, queries=900, network=SMALL, **PUBLIC), of_answer),
    "dpsgd sampled": (
        DPSGD(1.0, 1e-5, settings=DPSGDSettings(steps=20), **PUBLIC),
        lambda dpsgd: dpsgd.plan_.noise_multiplier,
    ),
    "dpsgd cells": (
        DPSGD(1.0, 1e-5, features=CELLS, settings=DPSGDSettings(steps=20, calibration_steps=2), **PUBLIC),
        lambda dpsgd: dpsgd.plan_.noise_multiplier,
    ),
    "dpsgd full": (DPSGD(1.0, 1e-5, settings=FULL, **PUBLIC), lambda dpsgd: dpsgd.plan_.noise_multiplier),
}


@pytest.mark.parametrize(("estimator", "noise"), CASES.values(), ids=CASES)
def test_an_estimator_with_half_the_noise_states_a_larger_budget_and_is_otherwise_alike(
    estimator: Any, noise: Any
) -> None:
    honest = fitted(estimator)
    weaker = fitted(estimator_with_share(honest, 0.5))
    assert noise(weaker) == pytest.approx(noise(honest) / 2, rel=2e-4)
    assert weaker.guarantee_.at_delta(1e-5) > 1.5 * honest.guarantee_.at_delta(1e-5)
    if isinstance(honest, Teachers):
        assert len(weaker.ensemble_.silent) == len(honest.ensemble_.silent)
        mechanisms: list[Any] = [each.predictor_.mechanism for each in (weaker, honest)]
        assert mechanisms[0].method == mechanisms[1].method
    elif isinstance(honest, DPSGD):
        assert weaker.plan_.settings == honest.plan_.settings
    else:
        assert weaker.plan_ == honest.plan_


def test_a_folder_of_a_model_with_half_the_noise_states_the_budget_of_that_noise(tmp_path: Path) -> None:
    honest = fitted(PrivateHead(1.0, **PUBLIC))
    folder = save_private(fitted(estimator_with_share(honest, 0.5)), tmp_path / "head", dataset="people")
    opened = open_private(folder).guarantee
    assert opened.mu == pytest.approx(2 * honest.guarantee_.mu)


def test_no_estimator_and_no_mechanism_has_a_setting_for_less_noise() -> None:
    names = {name for each in (PrivateHead, Teachers, DPSGD) for name in each().get_params()}
    for mechanism in (Algorithm1, GaussianScores, NoisyMax, SampledNeuron):
        names |= {field.name for field in dataclasses.fields(mechanism)}
    assert not {name for name in names if name.startswith("noise_") or name in ("share", "scale")}


@pytest.mark.parametrize(
    "mechanism",
    [
        NoisyMax("permute-and-flip", bounds=bounds(), per_query=PureCost(1.0)),
        NoisyMax("exponential", "gaussian", bounds=bounds(), per_query=GaussianCost(0.5)),
        NoisyMax("gaussian", bounds=bounds(), per_query=GaussianCost(1.0)),
        GaussianScores(bounds=bounds(), per_query=GaussianCost(1.0)),
        SampledNeuron("laplace", bounds=bounds(), per_query=PureCost(1.0)),
    ],
)
def test_a_mechanism_with_half_the_noise_costs_twice_as_much(mechanism: Any) -> None:
    """A choice that is counted in mu gets half of the noise that its own epsilon requires."""
    same, half = (mechanism_with_share(mechanism, share).guarantee(3) for share in (1.0, 0.5))
    assert (half.epsilon or half.mu) == pytest.approx(2 * (same.epsilon or same.mu))


def test_invalid_shares_and_unknown_noise_are_errors() -> None:
    votes = NoisyMax(bounds=bounds(), per_query=PureCost(1.0))
    for share in (0.0, 1.1, float("nan")):
        with pytest.raises(InvalidInput, match="above 0 and at most 1"):
            mechanism_with_share(votes, share)
    with pytest.raises(InvalidInput, match="cannot be scaled"):
        mechanism_with_share(NoisyMax(), 0.5)
    published = fitted(
        DPSGD(1.0, 1e-5, settings=DPSGDSettings(steps=20), analysis="published", accountant="rdp", **PUBLIC)
    )
    with pytest.raises(InvalidInput, match="analysis='proven'"):
        estimator_with_share(published, 0.5)
