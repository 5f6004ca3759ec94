"""Sensitivity as the paper computes it, for any number of layers (THEORY section 1).

These are the paper's formulas, reproduced to the last printed digit of its tables. They are *not* upper bounds:
THEORY 2.3 names four reasons, and retraining without one record exceeds them at the paper's own setting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quietmax.errors import InvalidInput
from quietmax.models.mlp import activation
from quietmax.models.training import Model
from quietmax.sensitivity.base import Sensitivity


@dataclass(frozen=True)
class PublishedSensitivity:
    """The paper's quantities for one network and training set.

    ``rho`` Lipschitz constant; ``weights_l2`` Delta_2 W; ``weight`` Delta omega; ``logit`` Delta z;
    ``probability`` Delta p, and without its truncation at 1; ``oaro`` the bound on On-Average-Remove-One stability.
    """

    rho: Sensitivity
    weights_l2: Sensitivity
    weight: Sensitivity
    logit: Sensitivity
    probability: Sensitivity
    probability_untruncated: Sensitivity
    oaro: Sensitivity

    def to_json(self) -> dict[str, float]:
        """The plain numbers by name."""
        return {name: entry["value"] for name, entry in asdict(self).items()}


def published(
    model: Model, *, records: NDArray[np.floating] | None = None, maxima: Sequence[float] | None = None
) -> PublishedSensitivity:
    """The paper's sensitivities of a trained model.

    The neurons' maxima ``x_t`` are taken as 1, as the paper's tables do; given as ``maxima`` (one per layer but
    the last); or measured on ``records``, the training features.
    """
    if records is not None:
        if maxima is not None:
            raise InvalidInput(
                "Both the records to measure the maxima on and the maxima themselves were given; give one, not both."
            )
        maxima = measured_maxima(model, records)
    return published_for(
        model.features,
        model.settings.hidden,
        model.classes,
        model.records,
        l2=model.settings.l2,
        activation_name=model.settings.activation,
        maxima=maxima,
        measured=records is not None,
    )


def published_for(
    features: int,
    hidden: Sequence[int],
    classes: int,
    records: int,
    *,
    l2: float = 0.001,
    activation_name: str = "tanh",
    maxima: Sequence[float] | None = None,
    measured: bool = False,
) -> PublishedSensitivity:
    """The paper's formulas from the shape of the network and the number of training records.

    ``rho = (C-1)/(C*|V_{T-1}|) * prod_t sqrt(|V_t|)*x_t``, ``D2W = 2*rho/(lam*n)`` with ``lam = l2/2``,
    ``Dw = D2W/sqrt(|W|)``, ``Dz = a_u*|V_{T-1}|*Dw``, ``Dp = min(exp(2*Dz)-1, 1)``, ``OARO = 2*rho^2/(lam*n)``;
    ``|V_t|`` and ``|W|`` count no biases.

    >>> round(published_for(784, [128], 10, 10_000).logit.value, 4)
    0.3577
    """
    layers = [features, *hidden]
    if min(layers) < 1 or classes < 2 or records < 1:
        raise InvalidInput(
            f"Features {features}, hidden {tuple(hidden)}, classes {classes}, records {records} do not describe a "
            "network and its training set; give widths and records of at least 1, classes of at least 2."
        )
    if not (math.isfinite(l2) and l2 > 0):
        raise InvalidInput(f"The L2 coefficient is {l2}, but the formulas divide by it; give a positive one.")
    largest = [1.0] * len(layers) if maxima is None else [float(each) for each in maxima]
    if len(largest) != len(layers) or not all(math.isfinite(each) and each >= 0 for each in largest):
        raise InvalidInput(
            f"maxima {largest} must hold one number of 0 or more for each of {len(layers)} layers; give as many."
        )
    bound = activation(activation_name).bound if hidden else None
    if bound is None:
        if maxima is None:
            what = (
                f"{activation_name} is unbounded"
                if hidden
                else "a network without hidden layer has no activation"
            )
            raise InvalidInput(
                f"The formula for one logit needs a bound on its inputs, but {what}; give maxima."
            )
        bound = largest[-1]
    lam = l2 / 2
    last = layers[-1]
    rho = (
        (classes - 1)
        / (classes * last)
        * math.prod(math.sqrt(width) * top for width, top in zip(layers, largest, strict=True))
    )
    weights = sum(into * out for into, out in zip(layers, [*layers[1:], classes], strict=True))
    weights_l2 = 2 * rho / (lam * records)
    weight = weights_l2 / math.sqrt(weights)
    logit = bound * last * weight
    untruncated = math.expm1(2 * logit) if 2 * logit < 700 else math.inf
    how = (
        "x_t measured on the training set"
        if measured
        else "x_t as given"
        if maxima is not None
        else "x_t = 1"
    )

    def entry(value: float, formula: str) -> Sensitivity:
        return Sensitivity(
            value, "published", f"The paper's {formula}, {how}; not an upper bound (THEORY 2.3)."
        )

    return PublishedSensitivity(
        rho=entry(rho, "rho = (C-1)/(C*|V_{T-1}|) * prod sqrt(|V_t|)*x_t"),
        weights_l2=entry(weights_l2, "2*rho/(lam*n)"),
        weight=entry(weight, "D2W/sqrt(|W|)"),
        logit=entry(logit, "a_u*|V_{T-1}|*Dw"),
        probability=entry(min(untruncated, 1.0), "min(exp(2*Dz)-1, 1)"),
        probability_untruncated=entry(untruncated, "exp(2*Dz)-1"),
        oaro=entry(2 * rho**2 / (lam * records), "2*rho^2/(lam*n)"),
    )


def measured_maxima(model: Model, records: NDArray[np.floating]) -> list[float]:
    """The largest absolute value of any neuron, layer by layer, over ``records``.

    Read off private data, so a noise scale computed from it depends on them (THEORY 2.6).
    """
    network = model.network
    apply_ = activation(network.activation).apply_
    maxima = [0.0] * (len(network.widths) - 1)
    for part in torch.split(torch.as_tensor(records, dtype=network.kernels[0].dtype), 4096):
        signal = part.unsqueeze(0)
        for depth in range(len(maxima)):
            maxima[depth] = max(maxima[depth], float(signal.abs().max()))
            if depth < len(maxima) - 1:
                signal = apply_(torch.baddbmm(network.biases[depth], signal, network.kernels[depth]))
    return maxima
