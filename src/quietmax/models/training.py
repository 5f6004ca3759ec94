"""Train ordinary, non-private classifiers: one, many at once, or any torch module in a plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from quietmax.data import Records, Split
from quietmax.errors import InvalidInput, QuietmaxError, expect
from quietmax.models.ensemble import Progress, train_stack
from quietmax.models.losses import Convexified, value
from quietmax.models.model import Model, TorchModel
from quietmax.models.settings import TrainingSettings


def train(
    data: Split,
    *,
    alpha: float | None = None,
    settings: TrainingSettings | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Model:
    """Train one network on the training part of ``data``.

    ``alpha`` sets the constant of the convexified loss; without it the settings' own loss is used. ``seed``
    (default: the split's) fixes initial weights and order.
    """
    seeds = None if seed is None else [seed]
    return train_many([data], alpha=alpha, settings=settings, seeds=seeds, progress=progress)[0]


def train_many(
    data: Sequence[Split],
    *,
    alpha: float | None = None,
    settings: TrainingSettings | None = None,
    seeds: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> list[Model]:
    """Train one network per split, all at once; the splits must divide the same records."""
    for each in data:
        expect(each, Split, "The data to train on", "a split, as quietmax.load returns it")
    if not data or any(each.records is not data[0].records for each in data):
        raise InvalidInput(
            "The splits must divide one and the same records; load them once, then split repeatedly."
        )
    records = data[0].records
    chosen = with_alpha(settings or TrainingSettings(), alpha)
    used = [each.seed for each in data] if seeds is None else list(seeds)
    stack = train_stack(
        records.features,
        records.labels,
        records.classes,
        [each.train_rows for each in data],
        settings=chosen,
        seeds=used,
        progress=progress,
    )
    return [
        Model(
            stack.network(index),
            chosen,
            len(each.train_rows),
            records.name,
            used[index],
            records.encoding,
            records.image_shape,
        )
        for index, each in enumerate(data)
    ]


def with_alpha(settings: TrainingSettings, alpha: float | None) -> TrainingSettings:
    """The settings with another convexification constant; None changes nothing."""
    if alpha is None:
        return settings
    if not isinstance(settings.loss, Convexified):
        raise InvalidInput(
            "alpha only makes sense with the convexified loss; leave it out or change the loss."
        )
    return replace(settings, loss=replace(settings.loss, alpha=alpha))


def train_module(
    module: torch.nn.Module,
    records: Records,
    *,
    settings: TrainingSettings | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> TorchModel:
    """Train any torch module that returns logits with the same losses, in an ordinary loop; it is changed in place.

    The L2 penalty falls on every parameter of two or more dimensions (kernels, not biases). The settings'
    ``hidden`` and ``activation`` play no part.
    """
    chosen = settings or TrainingSettings()
    features, labels = torch.from_numpy(records.features), torch.from_numpy(records.labels)
    kernels = [parameter for parameter in module.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in module.parameters() if parameter.ndim < 2]
    groups = [{"params": kernels, "weight_decay": 2 * chosen.l2}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.Adam(
        [group for group in groups if group["params"]], lr=chosen.learning_rate, eps=1e-7
    )
    generator = np.random.default_rng((0x0DE5, seed))
    module.train()
    for epoch in range(chosen.epochs):
        order = torch.from_numpy(generator.permutation(len(records)))
        for batch in torch.split(order, chosen.batch_size):
            optimiser.zero_grad()
            logits = module(features[batch])
            if logits.ndim != 2 or logits.shape[1] != records.classes:
                raise InvalidInput(
                    f"The module returned values of shape {tuple(logits.shape)}, but expected one row of "
                    f"{records.classes} logits per record; check its last layer."
                )
            loss = value(chosen.loss, logits, labels[batch])
            if not torch.isfinite(loss):
                raise QuietmaxError(
                    "Training diverged: the loss is no longer finite; lower the learning rate."
                )
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        if progress is not None:
            progress(epoch + 1, chosen.epochs)
    return TorchModel(module.eval(), records.classes)
