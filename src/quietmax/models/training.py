"""Training of networks on a split: the trained model, its accuracy, and the choice of alpha."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax.data.encoding import Encoding
from quietmax.data.records import Records, Split
from quietmax.errors import InvalidInput, QuietmaxError, check_type
from quietmax.models.stacked import (
    MLP,
    Convexified,
    Progress,
    TrainingSettings,
    checked_finite,
    loss_value,
    train_stack,
)

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")


_ROWS_AT_ONCE = 1024


@runtime_checkable
class Classifier(Protocol):
    """Anything that returns one row of scores per record: logits of a network, or votes of several."""

    @property
    def classes(self) -> int:
        """Number of classes."""
        ...

    def scores(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return what a mechanism sees of records: one row for each, one column per class."""
        ...


class LogitClassifier(ABC):
    """A classifier that predicts from its logits, without any privacy."""

    @abstractmethod
    def scores(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the logits of records: one row for each, one column per class."""

    def predict(self, features: NDArray[np.floating]) -> NDArray[np.int64]:
        """Return the most probable class of each record."""
        return np.asarray(self.scores(features).argmax(-1))

    def predict_proba(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return class probabilities."""
        return softmax(self.scores(features))


@dataclass(frozen=True, eq=False)
class Model(LogitClassifier):
    """A trained multilayer perceptron. Its answers are *not* private; a `Predictor` makes private ones.

    Parameters
    ----------
    network : MLP
        A single network.
    settings : TrainingSettings
        How it was trained.
    records : int
        Number of training records.
    dataset : str
        Name of the data set.
    seed : int
        Seed of the initial weights and of the order of records.
    encoding : Encoding, optional
        How the columns of a table became features.
    image_shape : (int, int, int), optional
        Channels, height and width, where the features are pixels.
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
        """Number of classes."""
        return self.network.classes

    @property
    def features(self) -> int:
        """Number of features of a record."""
        return self.network.widths[0]

    def logits(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the logits of records: one row for each, one column per class."""
        return self.network.logits(features).double().numpy()

    scores = logits


@dataclass(frozen=True, eq=False)
class TorchModel(LogitClassifier):
    """A torch module that maps a batch of records to logits, as a classifier.

    Parameters
    ----------
    module : torch.nn.Module
        Takes a float32 batch of shape (records, features) and returns logits.
    classes : int
        Number of classes.

    Examples
    --------
    >>> TorchModel(torch.nn.Linear(4, 3), classes=3).logits(np.zeros((2, 4), np.float32)).shape
    (2, 3)
    """

    module: torch.nn.Module
    classes: int

    def logits(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the logits of records; the module runs in evaluation mode and is left as it was."""
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                parts = torch.split(torch.as_tensor(features, dtype=torch.float32), _ROWS_AT_ONCE)
                answers = [self.module(checked_finite(part)) for part in parts]
        finally:
            self.module.train(training)
        logits = torch.cat(answers) if answers else torch.empty(0, self.classes)
        _check_logits(logits, self.classes)
        return logits.double().numpy()

    scores = logits


def _check_logits(logits: torch.Tensor, classes: int) -> None:
    if logits.ndim != 2 or logits.shape[1] != classes:
        raise InvalidInput(
            f"The module must return one row of {classes} logits per record, got values of shape "
            f"{tuple(logits.shape)}."
        )


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``exp(z - max) / sum exp(z - max)`` along the last axis, which never overflows."""
    return torch.softmax(torch.from_numpy(np.ascontiguousarray(logits, dtype=np.float64)), -1).numpy()


def accuracy(model: Any, records: Records) -> float:
    """Return the share of records whose label the model predicts.

    Parameters
    ----------
    model : object with a `predict` method
        The classifier.
    records : Records
        The records.

    Returns
    -------
    float
    """
    return float((model.predict(records.features) == records.labels).mean())


def accuracy_loss(private: float, baseline: float) -> float:
    """Return ``1 - private / baseline``, the paper's accuracy loss.

    Parameters
    ----------
    private : float
        Accuracy of the private model.
    baseline : float
        Accuracy of the model without privacy on the same test set.

    Returns
    -------
    float

    Raises
    ------
    InvalidInput
        If the baseline's accuracy is not positive.

    Examples
    --------
    >>> accuracy_loss(0.45, 0.9)
    0.5
    """
    if baseline <= 0:
        raise InvalidInput(f"The accuracy of the baseline must be positive, got {baseline}.")
    return 1 - private / baseline


def train(
    data: Split,
    *,
    alpha: float | None = None,
    settings: TrainingSettings | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Model:
    """Train one network on the training set of a split.

    Parameters
    ----------
    data : Split
        The data; see `load`.
    alpha : float, optional
        Constant of the convexified loss, instead of the one in `settings`.
    settings : TrainingSettings, optional
        How the network is trained; by default as in the paper.
    seed : int, optional
        Seed of the initial weights and of the order of records; by default the split's.
    progress : callable, optional
        Called with the number of steps done and of all steps.

    Returns
    -------
    Model

    Raises
    ------
    QuietmaxError
        If training diverges.

    Examples
    --------
    >>> from quietmax.data import load
    >>> data = load("mnist-5k", records=200)
    >>> model = train(data, alpha=1.0, settings=TrainingSettings(hidden=(16,), epochs=5))
    >>> model.predict_proba(data.test.features).shape
    (200, 10)
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
    """Train one network per split, all at once.

    Parameters
    ----------
    data : sequence of Split
        Splits of the same records.
    alpha : float, optional
        Constant of the convexified loss, instead of the one in `settings`.
    settings : TrainingSettings, optional
        How the networks are trained; by default as in the paper.
    seeds : sequence of int, optional
        Seed of each network; by default the seeds of the splits.
    progress : callable, optional
        Called with the number of steps done and of all steps.

    Returns
    -------
    list of Model
        In the order of the splits.

    Raises
    ------
    QuietmaxError
        If training diverges.
    """
    for each in data:
        check_type(each, Split, "data", "a Split, as quietmax.load returns it")
    if not data or any(each.records is not data[0].records for each in data):
        raise InvalidInput(
            "data must be splits of the same Records object: load the records once, then split them repeatedly."
        )
    records = data[0].records
    chosen = _with_alpha(settings or TrainingSettings(), alpha)
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


def _with_alpha(settings: TrainingSettings, alpha: float | None) -> TrainingSettings:
    if alpha is None:
        return settings
    if not isinstance(settings.loss, Convexified):
        raise InvalidInput("alpha requires the convexified loss.")
    return replace(settings, loss=replace(settings.loss, alpha=alpha))


def train_module(
    module: torch.nn.Module,
    records: Records,
    *,
    settings: TrainingSettings | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> TorchModel:
    """Train a torch module that returns logits, with the same losses.

    The L2 penalty applies to every parameter of two or more dimensions (kernels, not biases).

    Parameters
    ----------
    module : torch.nn.Module
        Takes a float32 batch of shape (records, features) and returns logits; trained in place.
    records : Records
        The training set.
    settings : TrainingSettings, optional
        How the module is trained; `hidden` and `activation` are not used.
    seed : int
        Seed of the order of records.
    progress : callable, optional
        Called with the number of epochs done and of all epochs.

    Returns
    -------
    TorchModel

    Raises
    ------
    InvalidInput
        If the module returns another shape.
    QuietmaxError
        If training diverges.
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
            _check_logits(logits, records.classes)
            loss = loss_value(chosen.loss, logits, labels[batch])
            if not torch.isfinite(loss):
                raise QuietmaxError(
                    "Training diverged: the loss is not finite. A lower `learning_rate` may help."
                )
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if progress is not None:
            progress(epoch + 1, chosen.epochs)
    return TorchModel(module.eval(), records.classes)


PAPER_GRID = tuple(0.5 * step for step in range(1, 21))
"""The values of alpha that the paper compares: 0.5 to 10."""


ALPHA_TOLERANCE = 0.05
"""How far an accuracy may be below that of the original loss and still count as "(almost) the same". The paper states
no number. Of its own eleven choices ten lose at most 0.047 in either accuracy; CIFAR-100 loses 0.12."""


@dataclass(frozen=True)
class AlphaTrial:
    """Accuracy with one alpha."""

    alpha: float  # Constant of the convexified loss
    train_accuracy: float  # Accuracy on the records trained on and on those held out
    validation_accuracy: float
    shortfall: float  # How far the worse of the two is below that of the original loss; 0 if neither is


def alpha_trial(alpha: float, accuracies: tuple[float, float], original: tuple[float, float]) -> AlphaTrial:
    """Compare the accuracies with one alpha with those of the original loss."""
    below = max(before - now for before, now in zip(original, accuracies, strict=True))
    return AlphaTrial(alpha, *accuracies, max(0.0, below))


def choose_alpha(trials: Sequence[AlphaTrial], tolerance: float = ALPHA_TOLERANCE) -> float:
    """Return the smallest alpha whose shortfall is within the tolerance; if there is none, that with the least."""
    within = [trial.alpha for trial in trials if trial.shortfall <= tolerance]
    if within:
        return min(within)
    return min(trials, key=lambda trial: (trial.shortfall, trial.alpha)).alpha
