"""The five upper bounds of the paper's Table 1 on the L2 sensitivity of trained weights, with their conditions.

All five assume a loss that is convex and rho-Lipschitz in the weights and a lam-strongly convex regulariser; rho and
lam are those of `quietmax.sensitivity.published`. Each bound is computed whether or not its conditions hold. What is
known of the network decides about each condition: its shape and training settings, and, given a trained model and its
records, measurements (`measured_facts`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax.data.records import Records
from quietmax.models.losses import Convexified, CrossEntropy, Loss, Quadratic, logit_gradient, value
from quietmax.models.mlp import MLP, activation
from quietmax.models.stacked import TrainingSettings
from quietmax.models.training import Model
from quietmax.sensitivity.base import Sensitivity
from quietmax.sensitivity.published import published_sensitivity_for

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_module("torch")

CONDITIONS = (
    "convex loss",
    "smooth loss",
    "decreasing SGD step",
    "constant SGD step",
    "normalised data",
    "binary classes",
    "rho-Lipschitz loss",
    "minimiser reached",
)
"""All conditions in the order of Table 1; the last is not in it, but the proofs that need it take it for granted."""

NEGLIGIBLE = 0.01
"""Share of a bound that the distance to the minimiser may add: a gradient g of the objective adds up to 2 |g|/lam."""

_ROWS_AT_ONCE = 2048


@dataclass(frozen=True)
class Condition:
    """One condition of a bound, decided for one network."""

    name: str  # The condition
    holds: bool | None  # Whether it holds; None if that takes a trained model
    because: str  # Why, in one phrase

    def __str__(self) -> str:
        verdict = {True: "holds", False: "does not hold", None: "not checked"}[self.holds]
        return f"{verdict} ({self.because})"


@dataclass(frozen=True)
class UpperBound:
    """One row of the paper's Table 1 for one network."""

    work: str  # Whose bound it is
    formula: str  # The bound as a formula
    sensitivity: Sensitivity  # Its value, with basis "published"
    conditions: tuple[Condition, ...]

    @property
    def value(self) -> float:
        """The number."""
        return self.sensitivity.value

    @property
    def applies(self) -> bool | None:
        """False if a condition does not hold, True if all hold, None if one was not checked and the others hold."""
        verdicts = [condition.holds for condition in self.conditions]
        return False if False in verdicts else None if None in verdicts else True

    def to_json(self) -> dict[str, Any]:
        """Return the bound, its conditions and whether it applies."""
        return {
            "work": self.work,
            "formula": self.formula,
            "value": self.value,
            "applies": self.applies,
            "conditions": [asdict(condition) for condition in self.conditions],
        }


@dataclass(frozen=True)
class MeasuredFacts:
    """What a trained network and its training records say about the conditions."""

    norm: float  # Largest L2 norm of a record
    loss: float  # Loss of the network on all records, without the penalty
    loss_at_mean: float
    gradient: float
    objective_gradient: float  # Norm of the gradient of the whole objective, which is 0 at a minimiser


def upper_bounds(model: Model, records: Records) -> tuple[UpperBound, ...]:
    """Compute the bounds of Table 1 for a trained model, and check their conditions on it."""
    return upper_bounds_for(
        model.features,
        model.classes,
        model.records,
        settings=model.settings,
        facts=measured_facts(model, records),
    )


def upper_bounds_for(
    features: int,
    classes: int,
    records: int,
    *,
    settings: TrainingSettings | None = None,
    maxima: Sequence[float] | None = None,
    facts: MeasuredFacts | None = None,
) -> tuple[UpperBound, ...]:
    """Compute the bounds of Table 1 from the shape of a network, and check what the shape decides.

    ``2 rho/(lam n)`` (Chaudhuri et al., normalised data of two classes; Wu et al., decreasing step; the paper),
    ``C ||x|| rho/(lam n)`` (Chaudhuri et al.) and ``2 eta rho/(1 - (1 - eta lam)^n)`` (Wu et al., constant step), with
    ``lam = l2/2`` and ``||x||`` the largest norm that the data space allows, ``sqrt(features) x_0``.
    """
    chosen = settings or TrainingSettings()
    published = published_sensitivity_for(
        features,
        chosen.hidden,
        classes,
        records,
        l2=chosen.l2,
        activation_name=chosen.activation,
        maxima=maxima,
    )
    rho, lam, eta = published.rho.value, chosen.l2 / 2, chosen.learning_rate
    norm = math.sqrt(features) * (1.0 if maxima is None else float(maxima[0]))
    tight = 2 * rho / (lam * records)
    general = classes * norm * rho / (lam * records)
    constant = 2 * eta * rho / -math.expm1(records * math.log1p(-eta * lam))
    convex, smooth = _convex(chosen, facts), _smooth(chosen)
    implied = (_lipschitz(rho, facts), _minimiser(tight, lam, facts))
    data = (_normalised(norm, facts), _binary(classes))

    def bound(work: str, formula: str, number: float, *conditions: Condition) -> UpperBound:
        because = f"{work}'s {formula}, as the paper's Table 1 states it."
        return UpperBound(work, formula, Sensitivity(number, "published", because), conditions)

    return (
        bound("Chaudhuri et al.", "2 rho/(lam n)", tight, convex, *data, *implied),
        bound("Chaudhuri et al.", "C ||x|| rho/(lam n)", general, convex, *implied),
        bound("Wu et al.", "2 rho/(lam n)", tight, convex, smooth, _step("decreasing"), implied[0]),
        bound(
            "Wu et al.",
            "2 eta rho/(1 - (1 - eta lam)^n)",
            constant,
            convex,
            smooth,
            _step("constant"),
            implied[0],
        ),
        bound("this paper", "2 rho/(lam n)", tight, convex, *implied),
    )


def _convex(settings: TrainingSettings, facts: MeasuredFacts | None) -> Condition:
    name = "convex loss"
    if not settings.hidden:
        if isinstance(_base(settings.loss), Quadratic):
            return Condition(name, False, "the square of a softmax is not convex")
        return Condition(name, True, "cross-entropy of a linear model, which tilting keeps convex")
    layers = " and ".join(str(width) for width in settings.hidden)
    because = f"{layers} hidden neurons"
    if facts is not None and facts.loss_at_mean > facts.loss:
        because += f"; loss {facts.loss:.3g}, at the mean of equivalent networks {facts.loss_at_mean:.3g}"
    return Condition(name, False, because)


def _smooth(settings: TrainingSettings) -> Condition:
    name = "smooth loss"
    if not settings.hidden:
        return Condition(name, True, "second derivatives of a linear model's loss are bounded")
    if activation(settings.activation).bound is None:
        return Condition(name, False, f"{settings.activation} has a kink")
    return Condition(name, False, "second derivatives grow with the output weights")


def _step(wanted: str) -> Condition:
    return Condition(
        f"{wanted} SGD step", False, "trained with Adam, which scales every step by past gradients"
    )


def _normalised(norm: float, facts: MeasuredFacts | None) -> Condition:
    largest = norm if facts is None else facts.norm
    where = "in the data space" if facts is None else "in the training set"
    return Condition("normalised data", largest <= 1 + 1e-6, f"||x|| up to {largest:.4g} {where}")


def _binary(classes: int) -> Condition:
    return Condition("binary classes", classes == 2, f"{classes} classes")


def _lipschitz(rho: float, facts: MeasuredFacts | None) -> Condition:
    name = "rho-Lipschitz loss"
    if facts is None:
        return Condition(name, None, "needs a trained network")
    exceeded = facts.gradient > rho
    because = f"a record's gradient has norm {facts.gradient:.3g}, rho is {rho:.3g}"
    # Gradients at one point can refute a Lipschitz constant and never prove it.
    return Condition(name, False if exceeded else None, because)


def _minimiser(bound: float, lam: float, facts: MeasuredFacts | None) -> Condition:
    name = "minimiser reached"
    if facts is None:
        return Condition(name, None, "needs a trained network")
    added = 2 * facts.objective_gradient / lam
    because = (
        f"the objective's gradient has norm {facts.objective_gradient:.2g}, which adds up to {added:.3g}"
    )
    return Condition(name, added <= NEGLIGIBLE * bound, because)


def _base(loss: Loss) -> CrossEntropy | Quadratic:
    return loss.base if isinstance(loss, Convexified) else loss


def measured_facts(model: Model, records: Records) -> MeasuredFacts:
    """Measure what the conditions of the bounds depend on."""
    network = _doubled(model.network)
    features = torch.from_numpy(np.asarray(records.features, dtype=np.float64))
    labels = torch.from_numpy(records.labels)
    loss = model.settings.loss
    objective, gradient = _objective(network, model.settings, features, labels)
    return MeasuredFacts(
        norm=float(features.norm(dim=1).max()),
        loss=objective,
        loss_at_mean=float(value(loss, mean_of_equivalent(network).logits(features), labels)),
        gradient=float(record_gradient_norms(network, _base(loss), features, labels).max()),
        objective_gradient=gradient,
    )


def mean_of_equivalent(network: MLP) -> MLP:
    """Return the mean of all networks that differ from a network only in the order of neurons in each hidden layer."""
    last = len(network.kernels) - 1
    kernels, biases = [], []
    for depth, (kernel, bias) in enumerate(zip(network.kernels, network.biases, strict=True)):
        # The last kernel is stored as (networks, outputs, inputs), the others as (networks, inputs, outputs).
        into, out = (2, 1) if depth == last else (1, 2)
        if depth > 0:
            kernel = kernel.mean(into, keepdim=True).expand_as(kernel)
        if depth < last:
            kernel = kernel.mean(out, keepdim=True).expand_as(kernel)
            bias = bias.mean(2, keepdim=True).expand_as(bias)
        kernels.append(kernel.contiguous())
        biases.append(bias.contiguous())
    return replace(network, kernels=tuple(kernels), biases=tuple(biases))


def record_gradient_norms(
    network: MLP, base: CrossEntropy | Quadratic, features: Tensor, labels: Tensor
) -> NDArray[np.float64]:
    """Return the norm of the gradient of each record's own loss in the kernels, without biases as in the paper.

    A record's gradient in one kernel is an outer product of what comes in and what flows back, so that its norm is the
    product of theirs.
    """
    used = activation(network.activation)
    parts = []
    for part, own in zip(
        torch.split(features, _ROWS_AT_ONCE), torch.split(labels, _ROWS_AT_ONCE), strict=True
    ):
        signals = [part]
        for kernel, bias in zip(network.kernels[:-1], network.biases[:-1], strict=True):
            signals.append(used.apply_(signals[-1] @ kernel[0] + bias[0, 0]))
        logits = signals[-1] @ network.kernels[-1][0].T + network.biases[-1][0, 0]
        # One network per record, each with a batch of one: the mean over the batch is the record's own loss.
        slope = logit_gradient(base, logits.unsqueeze(1), own.unsqueeze(1)).squeeze(1)
        squares = torch.zeros(len(part), dtype=part.dtype)
        for depth in range(len(signals) - 1, -1, -1):
            squares += slope.square().sum(1) * signals[depth].square().sum(1)
            if depth:
                kernel = network.kernels[depth][0]
                back = slope @ (kernel if depth == len(signals) - 1 else kernel.T)
                slope = used.backward(back, signals[depth])
        parts.append(squares.sqrt())
    return torch.cat(parts).numpy()


def _objective(
    network: MLP, settings: TrainingSettings, features: Tensor, labels: Tensor
) -> tuple[float, float]:
    """Return the loss of all records without the penalty, and the norm of the gradient of loss and penalty."""
    parameters = [tensor.clone().requires_grad_() for _, tensor in network.parameters()]
    kernels, biases = parameters[::2], parameters[1::2]
    function = {"tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu}[network.activation]
    signal = features
    for kernel, bias in zip(kernels[:-1], biases[:-1], strict=True):
        signal = function(signal @ kernel[0] + bias[0, 0])
    loss = value(settings.loss, signal @ kernels[-1][0].T + biases[-1][0, 0], labels)
    penalty = settings.l2 * sum(kernel.square().sum() for kernel in kernels)
    gradients = torch.autograd.grad(loss + penalty, parameters)
    return float(loss.detach()), float(torch.stack([each.square().sum() for each in gradients]).sum().sqrt())


def _doubled(network: MLP) -> MLP:
    """Return the network in double precision."""
    return replace(
        network,
        kernels=tuple(kernel.double() for kernel in network.kernels),
        biases=tuple(bias.double() for bias in network.biases),
    )
