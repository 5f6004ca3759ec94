"""Loss functions: cross-entropy, quadratic, and the convexified ("risk-averting") loss in both its versions.

A loss sees logits of shape ``(..., batch, classes)`` and averages over the batch. `value` is written for
automatic differentiation; `logit_gradient` is the hand-derived gradient that the stacked trainer uses. The tests
compare the two.

THEORY section 1: the paper prints ``(1/a) ln[(1/n) sum_i exp(a*l_i)]``; the authors' program averages over
samples *and classes*, where every class but the true one has loss 0 and so contributes ``exp(0) = 1``.
Neither makes the loss of a network with a hidden layer convex (THEORY 2.3d); the name is the paper's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quietmax._lazy import lazy_module
from quietmax.errors import InvalidInput

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_module("torch")

AveragedOver = Literal["samples and classes", "samples"]


@dataclass(frozen=True)
class CrossEntropy:
    """``l_i = -ln p_i[y_i]``, averaged over the batch."""


@dataclass(frozen=True)
class Quadratic:
    """``l_i = sum_c (p_i[c] - [c == y_i])^2``, averaged over the batch."""


@dataclass(frozen=True)
class Convexified:
    """``(1/alpha) ln mean exp(alpha * loss)``, the convexified loss.

    Parameters
    ----------
    alpha : float
        Constant of the convexification, positive; the paper uses 1 to 5.
    averaged_over : {"samples and classes", "samples"}
        Over what the mean is taken: as in the authors' program, or as printed in the paper.
    base : CrossEntropy or Quadratic
        The loss of one record.

    Raises
    ------
    InvalidInput
        If `alpha` is not positive or `averaged_over` is not valid.

    Examples
    --------
    >>> Convexified(alpha=2.0).base
    CrossEntropy()
    """

    alpha: float = 1.0
    averaged_over: AveragedOver = "samples and classes"
    base: CrossEntropy | Quadratic = CrossEntropy()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise InvalidInput(f"alpha must be a positive number, got {self.alpha}; the paper uses 1 to 5.")
        if self.averaged_over not in ("samples and classes", "samples"):
            raise InvalidInput(
                f"averaged_over must be 'samples and classes' or 'samples', got {self.averaged_over!r}."
            )


Loss = CrossEntropy | Quadratic | Convexified


def value(loss: Loss, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of one batch, for automatic differentiation."""
    if isinstance(loss, Convexified):
        exponents = loss.alpha * _terms(loss.base, logits, labels)
        count = logits.shape[0]
        if loss.averaged_over == "samples":
            return (torch.logsumexp(exponents.sum(-1), 0) - math.log(count)) / loss.alpha
        return (torch.logsumexp(exponents.flatten(), 0) - math.log(exponents.numel())) / loss.alpha
    return _terms(loss, logits, labels).sum(-1).mean()


def _terms(base: CrossEntropy | Quadratic, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the base loss by class; the sum over the last axis is ``l_i``."""
    truth = torch.nn.functional.one_hot(labels, logits.shape[-1]).to(logits.dtype)
    if isinstance(base, CrossEntropy):
        return -torch.log_softmax(logits, -1) * truth
    return (torch.softmax(logits, -1) - truth).square()


def logit_gradient(
    loss: Loss, logits: Tensor, labels: Tensor, alphas: Tensor | None = None, kept: Tensor | None = None
) -> Tensor:
    """Return d loss / d logits for stacked batches."""
    base = loss.base if isinstance(loss, Convexified) else loss
    picked = labels.unsqueeze(-1)
    alpha: Tensor | float
    if isinstance(loss, Convexified):
        alpha = loss.alpha if alphas is None else alphas
        averaged_over: AveragedOver | None = loss.averaged_over
    else:
        alpha, averaged_over = 0.0, None

    if isinstance(base, CrossEntropy):
        log_probabilities = torch.log_softmax(logits, -1)
        losses = log_probabilities.gather(-1, picked).squeeze(-1).neg_()
        gradient = log_probabilities.exp_()
        gradient.scatter_add_(-1, picked, gradient.new_full((), -1.0).expand(picked.shape))
        weights = _record_weights(losses, alpha, averaged_over, kept, zero_terms=logits.shape[-1] - 1)
        return gradient.mul_(weights.unsqueeze(-1))

    probabilities = torch.softmax(logits, -1)
    residual = probabilities.scatter_add(-1, picked, probabilities.new_full((), -1.0).expand(picked.shape))
    if averaged_over == "samples and classes":
        weights_by_class = _entry_weights(residual.square(), alpha, kept)
        slope = 2 * residual * weights_by_class
    else:
        losses = residual.square().sum(-1)
        slope = 2 * residual * _record_weights(losses, alpha, averaged_over, kept, 0).unsqueeze(-1)
    return probabilities * (slope - (probabilities * slope).sum(-1, keepdim=True))


def _record_weights(
    losses: Tensor,
    alpha: Tensor | float,
    averaged_over: AveragedOver | None,
    kept: Tensor | None,
    zero_terms: int,
) -> Tensor:
    """Return ``d loss / d l_i``: 1/n for a plain mean, ``exp(a*l_i)/sum`` for the convexified loss.

    In the mean over samples and classes the sum includes ``zero_terms`` terms of ``exp(0)`` per record.
    """
    count = losses.shape[-1] if kept is None else kept.sum(-1, keepdim=True).clamp_(min=1)
    if averaged_over is None:
        return (
            losses.new_full((), 1 / losses.shape[-1]).expand(losses.shape) if kept is None else kept / count
        )
    exponents = losses * alpha if kept is None else losses * alpha * kept
    largest = exponents.amax(-1, keepdim=True)
    weights = exponents.sub_(largest).exp_()
    if kept is not None:
        weights.mul_(kept)
    total = weights.sum(-1, keepdim=True)
    if averaged_over == "samples and classes" and zero_terms:
        total.add_(largest.neg_().exp_().mul_(count * zero_terms))
    return weights.div_(total.clamp_(min=torch.finfo(total.dtype).tiny))


def _entry_weights(terms: Tensor, alpha: Tensor | float, kept: Tensor | None) -> Tensor:
    """Return the tilted weight of every (record, class) entry when each class has a loss of its own."""
    exponents = terms * (alpha.unsqueeze(-1) if isinstance(alpha, torch.Tensor) else alpha)
    if kept is not None:
        exponents = exponents * kept.unsqueeze(-1)
    weights = (exponents - exponents.amax((-1, -2), keepdim=True)).exp_()
    if kept is not None:
        weights.mul_(kept.unsqueeze(-1))
    return weights.div_(weights.sum((-1, -2), keepdim=True).clamp_(min=torch.finfo(weights.dtype).tiny))
