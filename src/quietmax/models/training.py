"""A trained classifier together with what is known about its training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from quietmax.data.encoding import Encoding
from quietmax.data.records import Records, Split
from quietmax.errors import InvalidInput, QuietmaxError, check_type
from quietmax.models.losses import Convexified, value
from quietmax.models.mlp import MLP, checked_finite
from quietmax.models.stacked import Progress, TrainingSettings, train_stack


@runtime_checkable
class Classifier(Protocol):
    """Anything that gives one row of scores per record: logits of a network, or votes of several."""

    @property
    def classes(self) -> int:
        """The number of classes."""
        ...

    def scores(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """What a mechanism sees, in float64, shape (records, classes); `InvalidInput` for features it cannot take."""
        ...


@dataclass(frozen=True, eq=False)
class Model:
    """A trained multilayer perceptron. Its answers are *not* private; a `Predictor` makes private ones.

    ``records`` is the number of training records, ``dataset`` and ``seed`` say which ones they were.
    """

    network: MLP
    settings: TrainingSettings
    records: int
    dataset: str
    seed: int
    encoding: Encoding | None = None
    image_shape: tuple[int, int, int] | None = None

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.network.classes

    @property
    def features(self) -> int:
        """The number of features of a record."""
        return self.network.widths[0]

    def logits(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Logits in float64, shape (records, classes)."""
        return self.network.logits(features).double().numpy()

    scores = logits

    def predict_proba(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Plain class probabilities, with no privacy at all."""
        return softmax(self.logits(features))

    def predict(self, features: NDArray[np.floating]) -> NDArray[np.int64]:
        """The most probable class, with no privacy at all."""
        return np.asarray(self.logits(features).argmax(-1))


@dataclass(frozen=True, eq=False)
class TorchModel:
    """Any torch module that maps a batch of records to logits, seen as a classifier.

    >>> TorchModel(torch.nn.Linear(4, 3), classes=3).logits(np.zeros((2, 4), np.float32)).shape
    (2, 3)
    """

    module: torch.nn.Module
    classes: int
    rows_at_once: int = field(default=1024, kw_only=True)

    def logits(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Logits in float64; the module runs in evaluation mode and is left as it was."""
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                parts = torch.split(torch.as_tensor(features, dtype=torch.float32), self.rows_at_once)
                answers = [self.module(checked_finite(part)) for part in parts]
        finally:
            self.module.train(training)
        logits = torch.cat(answers).double().numpy() if answers else np.empty((0, self.classes))
        if logits.ndim != 2 or logits.shape[1] != self.classes:
            raise InvalidInput(
                f"The module returned values of shape {logits.shape}, but expected one row of {self.classes} logits "
                "per record; check its last layer and the number of classes."
            )
        return logits

    scores = logits

    def predict(self, features: NDArray[np.floating]) -> NDArray[np.int64]:
        """The most probable class, with no privacy at all."""
        return np.asarray(self.logits(features).argmax(-1))


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """``exp(z - max) / sum exp(z - max)`` along the last axis: only differences of logits matter, nothing overflows."""
    return torch.softmax(torch.from_numpy(np.ascontiguousarray(logits, dtype=np.float64)), -1).numpy()


class _Predicts(Protocol):
    def predict(self, features: NDArray[np.floating]) -> NDArray[np.int64]: ...


def accuracy(model: _Predicts, records: Records) -> float:
    """The share of records whose label the model predicts."""
    return float((model.predict(records.features) == records.labels).mean())


def accuracy_loss(private: float, baseline: float) -> float:
    """``1 - acc_private / acc_baseline``, the paper's accuracy loss on the same test set.

    >>> accuracy_loss(0.45, 0.9)
    0.5
    """
    if baseline <= 0:
        raise InvalidInput(
            f"The baseline's accuracy is {baseline}, but a loss relative to it needs a positive one; give "
            "such a baseline."
        )
    return 1 - private / baseline


PAPER_GRID = tuple(0.5 * step for step in range(1, 21))


@dataclass(frozen=True)
class AlphaTrial:
    """Accuracy with one alpha; ``distance`` is the summed difference to the original loss's accuracies."""

    alpha: float
    train_accuracy: float
    validation_accuracy: float
    distance: float


@dataclass(frozen=True)
class AlphaSearch:
    """All trials, the original loss's accuracies, and the alpha that came closest to them."""

    alpha: float
    original_train_accuracy: float
    original_validation_accuracy: float
    trials: tuple[AlphaTrial, ...]


def search_alpha(
    data: Split,
    *,
    grid: Sequence[float] = PAPER_GRID,
    validation_share: float = 0.2,
    settings: TrainingSettings | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> AlphaSearch:
    """Train one network per alpha, all at once, and pick the one closest to the original loss.

    The choice looks at private records: a model trained with it afterwards carries no proven guarantee unless the
    choice is charged for.
    """
    chosen = settings or TrainingSettings()
    if not isinstance(chosen.loss, Convexified):
        raise InvalidInput("A search for alpha needs the convexified loss; set settings.loss=Convexified().")
    if not grid or min(grid) <= 0:
        raise InvalidInput(
            f"The grid {tuple(grid)} must hold positive values of alpha; try the paper's, 0.5 to 10."
        )
    if not 0 < validation_share < 1:
        raise InvalidInput(
            f"The validation share is {validation_share}, but must lie between 0 and 1; try 0.2."
        )
    held = int(len(data.train_rows) * validation_share)
    if not 0 < held < len(data.train_rows):
        raise InvalidInput(
            f"{len(data.train_rows)} training records are too few to hold out a validation part; take more, "
            "or give alpha."
        )
    order = np.random.default_rng((0xA1FA, seed)).permutation(data.train_rows)
    validation, rest = order[:held], order[held:]
    records = data.records
    original = replace(chosen, loss=chosen.loss.base)

    def accuracies(with_settings: TrainingSettings, alphas: list[float] | None) -> list[tuple[float, float]]:
        count = 1 if alphas is None else len(alphas)
        stack = train_stack(
            records.features,
            records.labels,
            records.classes,
            [rest] * count,
            settings=with_settings,
            seeds=[seed] * count,
            alphas=alphas,
            progress=progress if alphas is not None else None,
        )
        shares = []
        for rows in (rest, validation):
            answers = stack.stacked_logits(records.features[rows]).argmax(-1).numpy()
            shares.append((answers == records.labels[rows]).mean(-1))
        return [(float(train), float(held_out)) for train, held_out in zip(*shares, strict=True)]

    ((target_train, target_validation),) = accuracies(original, None)
    trials = tuple(
        AlphaTrial(alpha, train, held_out, abs(train - target_train) + abs(held_out - target_validation))
        for alpha, (train, held_out) in zip(grid, accuracies(chosen, list(grid)), strict=True)
    )
    best = min(trials, key=lambda trial: (trial.distance, trial.alpha))
    return AlphaSearch(best.alpha, target_train, target_validation, trials)


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
        check_type(each, Split, "data", "a Split, as quietmax.load returns it")
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
    optimizer = torch.optim.Adam(
        [group for group in groups if group["params"]], lr=chosen.learning_rate, eps=1e-7
    )
    generator = np.random.default_rng((0x0DE5, seed))
    module.train()
    for epoch in range(chosen.epochs):
        order = torch.from_numpy(generator.permutation(len(records)))
        for batch in torch.split(order, chosen.batch_size):
            optimizer.zero_grad()
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
            optimizer.step()
        if progress is not None:
            progress(epoch + 1, chosen.epochs)
    return TorchModel(module.eval(), records.classes)
