"""One step of Adam on many tensors at once, with the constants of Keras (epsilon 1e-7)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_DECAY_MEAN, _DECAY_SQUARE, _EPSILON = 0.9, 0.999, 1e-7


def adam_step(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    taken: Sequence[Tensor],
    *,
    learning_rate: float,
    decay: float,
) -> None:
    """Move the weights in place, their gradients taken plus ``decay`` times them; ``taken`` counts this step already.

    torch's fused kernel does it in one pass over memory; torch.optim.Adam calls the same one, but spends five times as
    long around it. The tests hold the two against each other.
    """
    torch._fused_adam_(
        list(weights),
        list(gradients),
        list(means),
        list(squares),
        [],
        list(taken),
        lr=learning_rate,
        beta1=_DECAY_MEAN,
        beta2=_DECAY_SQUARE,
        weight_decay=decay,
        eps=_EPSILON,
        amsgrad=False,
        maximize=False,
    )
