"""Every way to train a network from the same initial weights."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from quietmax.estimators.dpsgd.training import (
    PrivateSettings,
    train_private,
    train_private_module,
    train_private_stack,
)
from quietmax.models.stacked import MLP, initial_mlp

PATHS = ("stack", "exact", "module", "module, seeded")
"""K networks with seeded noise, one with exact noise, and a module with either."""
ACTIVATIONS = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU, "sigmoid": torch.nn.Sigmoid}


def as_module(stack: MLP, index: int = 0) -> torch.nn.Sequential:
    """A network of a stack as a torch module, its parameters in the order kernel, bias, kernel, ..."""
    layers: list[torch.nn.Module] = []
    last = len(stack.kernels) - 1
    for depth, (into, out) in enumerate(itertools.pairwise(stack.widths)):
        linear = torch.nn.Linear(into, out, dtype=stack.kernels[0].dtype)
        kernel = stack.kernels[depth][index]
        with torch.no_grad():
            linear.weight.copy_(kernel if depth == last else kernel.T)
            linear.bias.copy_(stack.biases[depth][index, 0])
        layers += [linear, ACTIVATIONS[stack.activation]()]
    return torch.nn.Sequential(*layers[:-1])


def vector(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in module.parameters()]).double()


def stack(features: Any, labels: Any, classes: int = 3, **changes: Any) -> MLP:
    """Train networks with seeded noise: by default one, without noise, on all rows."""
    options: dict[str, Any] = {"rows": [np.arange(len(labels))], "noise_multipliers": [0.0], "seeds": [3]}
    return train_private_stack(features, labels, classes, **(options | changes))


def trained(
    path: str,
    features: Any,
    labels: Any,
    settings: PrivateSettings,
    *,
    noise: float = 1e-9,
    size: int | None = None,
    classes: int = 3,
    persons: Any = None,
    seed: int = 3,
) -> torch.Tensor:
    """All weights of a network that was trained one way."""
    size = len(labels) if size is None else size
    common: dict[str, Any] = {"settings": settings, "persons": persons}
    if path == "stack":
        common |= {"noise_multipliers": [noise], "sizes": [size], "seeds": [seed]}
        if not len(labels):
            features, labels = np.zeros((1, features.shape[1]), np.float32), np.zeros(1, np.int64)
            common["rows"] = [np.arange(0)]
        return vector(as_module(stack(features, labels, classes, **common)))
    common |= {"noise_multiplier": noise, "size": size}
    if path == "exact":
        return vector(as_module(train_private(features, labels, classes, seed=seed, **common)))
    module = as_module(start(features.shape[1], settings, classes, seed))
    noise_seed = seed if path == "module, seeded" else None
    return vector(train_private_module(module, features, labels, seed=noise_seed, **common))


def start(columns: int, settings: PrivateSettings, classes: int = 3, seed: int = 3) -> MLP:
    """The initial weights, which all ways have in common."""
    return initial_mlp((columns, *settings.hidden, classes), settings.activation, (seed,))


def moved(path: str, features: Any, labels: Any, settings: PrivateSettings, **options: Any) -> torch.Tensor:
    """How far a training moves the weights."""
    first = start(features.shape[1], settings, options.get("classes", 3), options.get("seed", 3))
    return trained(path, features, labels, settings, **options) - vector(as_module(first))


def naive_sums(
    module: torch.nn.Module,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    max_grad_norm: float,
    weights: Any = None,
) -> list[torch.Tensor]:
    """One record at a time: its gradient by autograd, clipped, weighted and added."""
    totals = [torch.zeros_like(parameter) for parameter in module.parameters()]
    for number, (row, label) in enumerate(zip(inputs, labels, strict=True)):
        module.zero_grad()
        torch.nn.functional.cross_entropy(module(row.unsqueeze(0)), label.unsqueeze(0)).backward()
        found = [each.grad for each in module.parameters() if each.grad is not None]
        norm = float(torch.cat([each.flatten() for each in found]).norm())
        share = 1.0 if weights is None else float(weights[number])
        for total, each in zip(totals, found, strict=True):
            total += share * each * min(1.0, max_grad_norm / norm)
    return totals
