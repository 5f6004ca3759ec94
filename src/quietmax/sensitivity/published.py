"""Sensitivity as the paper computes it, for any number of layers (THEORY section 1).

The formulas reproduce the paper's tables to the last printed digit. They are *not* upper bounds: THEORY 2.3 gives four
reasons, and retraining without one record exceeds them at the paper's own setting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax.errors import InvalidInput
from quietmax.models.mlp import activation
from quietmax.models.training import Model
from quietmax.sensitivity.base import Sensitivity

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")


@dataclass(frozen=True)
class PublishedSensitivity:
    """The paper's quantities for one network and training set.

    Parameters
    ----------
    rho : Sensitivity
        The Lipschitz constant of the loss.
    weights_l2 : Sensitivity
        Delta_2 W: all weights together, in L2.
    weight : Sensitivity
        Delta omega: one weight.
    logit : Sensitivity
        Delta z: one logit.
    probability : Sensitivity
        Delta p: one probability, at most 1.
    probability_untruncated : Sensitivity
        Delta p before it is truncated at 1.
    oaro : Sensitivity
        The bound on On-Average-Remove-One stability.
    """

    rho: Sensitivity
    weights_l2: Sensitivity
    weight: Sensitivity
    logit: Sensitivity
    probability: Sensitivity
    probability_untruncated: Sensitivity
    oaro: Sensitivity

    def to_json(self) -> dict[str, float]:
        """Return the values by name."""
        return {name: entry["value"] for name, entry in asdict(self).items()}


def published_sensitivity(
    model: Model, *, records: NDArray[np.floating] | None = None, maxima: Sequence[float] | None = None
) -> PublishedSensitivity:
    """Compute the paper's sensitivities of a trained model.

    Parameters
    ----------
    model : Model
        A multilayer perceptron that `quietmax.train` returned.
    records : ndarray or None
        Training features on which the largest neuron values ``x_t`` are measured. Use either `records` or `maxima`.
    maxima : sequence of float or None
        The largest values ``x_t``, one for each layer except the last. By default 1, as in the paper's tables.

    Returns
    -------
    PublishedSensitivity
        The paper's quantities.

    Raises
    ------
    InvalidInput
        If both `records` and `maxima` are given, or the activation is unbounded and neither is.

    Examples
    --------
    >>> import quietmax as qm
    >>> data = qm.load("mnist-5k", records=500)
    >>> model = qm.train(data, settings=qm.TrainingSettings(epochs=1))
    >>> published_sensitivity(model).logit.basis
    'published'
    """
    if records is not None:
        if maxima is not None:
            raise InvalidInput("Only one of records and maxima may be given, got both.")
        maxima = measured_maxima(model, records)
    return published_sensitivity_for(
        model.features,
        model.settings.hidden,
        model.classes,
        model.records,
        l2=model.settings.l2,
        activation_name=model.settings.activation,
        maxima=maxima,
        measured=records is not None,
    )


def published_sensitivity_for(
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
    """Compute the paper's formulas from the shape of a network and the number of training records.

    ``rho = (C-1)/(C*|V_{T-1}|) * prod_t sqrt(|V_t|)*x_t``, ``D2W = 2*rho/(lam*n)`` with ``lam = l2/2``,
    ``Dw = D2W/sqrt(|W|)``, ``Dz = a_u*|V_{T-1}|*Dw``, ``Dp = min(exp(2*Dz)-1, 1)``, ``OARO = 2*rho^2/(lam*n)``;
    ``|V_t|`` and ``|W|`` count no biases.
    """
    layers = [features, *hidden]
    if min(layers) < 1 or classes < 2 or records < 1:
        raise InvalidInput(
            "features, hidden and records must be at least 1 and classes at least 2, got "
            f"features={features}, hidden={tuple(hidden)}, records={records}, classes={classes}."
        )
    if not (math.isfinite(l2) and l2 > 0):
        raise InvalidInput(f"l2 must be a finite number above 0, got {l2}.")
    largest = [1.0] * len(layers) if maxima is None else [float(each) for each in maxima]
    if len(largest) != len(layers) or not all(math.isfinite(each) and each >= 0 for each in largest):
        raise InvalidInput(
            f"maxima must hold {len(layers)} numbers that are finite and at least 0, one per layer, got {largest}."
        )
    bound = activation(activation_name).bound if hidden else None
    if bound is None:
        if maxima is None:
            what = f"the activation {activation_name}" if hidden else "a network without hidden layers"
            raise InvalidInput(f"maxima is required for {what}, which has no bounded activation.")
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
    how = "x_t = 1"
    if maxima is not None:
        how = "x_t measured on the training set" if measured else "x_t as given"

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
    """Measure the largest absolute value of any neuron, layer by layer.

    The result depends on the records, and so does a noise scale that is computed from it (THEORY 2.6).
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
