"""What explains the paper's numbers on CIFAR: the scaling of pixels, the learning rate, alpha or the loss.

The paper does not say how it scales pixels, and with its stated settings no scaling gives its accuracies. Here a few
settings are changed one at a time. Every trial is stored, so that the explanation can be checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from quietmax.accounting.costs import Budget
from quietmax.data.records import Records, Split, split
from quietmax.data.registry import dataset
from quietmax.errors import unknown_name
from quietmax.estimators.dpsgd.config import make_plan
from quietmax.estimators.dpsgd.training import train_private_stack
from quietmax.experiments import paper
from quietmax.experiments.findings import ACCURACY_TOLERANCE, CURVE_TOLERANCE
from quietmax.experiments.summary import PAPER_SERIES, Mean
from quietmax.mechanisms.algorithm1 import Algorithm1
from quietmax.mechanisms.base import Answerer
from quietmax.models.losses import Convexified, CrossEntropy, Loss
from quietmax.models.mlp import MLP
from quietmax.models.stacked import TrainingSettings
from quietmax.models.training import Model, accuracy, accuracy_loss, train_many
from quietmax.noise.sources import SeededNoise

STORED = "cifar.csv"
DATASETS = ("cifar-10", "cifar-100")
Features = NDArray[np.float32]

LossName = Literal["cross-entropy", "convexified"]

_BATCHES = 20
"""Number of batches from which the share of the worst record is estimated."""


SCALINGS: dict[str, Callable[[Features], Features]] = {
    "pixel/255": lambda features: features,
    "pixel/255 - 0.5": lambda features: features - np.float32(0.5),
}
"""How pixels become features. The records have pixel/255."""


@dataclass(frozen=True)
class Case:
    """Settings that are trained on some splits."""

    dataset: str  # "cifar-10" or "cifar-100"
    scaling: str  # One of `SCALINGS`
    learning_rate: float  # Step size of Adam; the paper states 0.001
    epochs: int  # Passes over the training set; the paper states 100
    loss: LossName  # The loss that is trained with
    alpha: float | None  # Constant of the convexified loss
    method: Literal["plain", "published-rdp"] = "plain"  # "plain", or "published-rdp" for DP-SGD as published
    splits: int = 1  # Number of splits
    epsilons: tuple[float, ...] = ()  # The epsilons of DP-SGD


@dataclass(frozen=True)
class CifarTrial:
    """One measured accuracy."""

    dataset: str  # The settings, as in `Case`
    scaling: str
    learning_rate: float
    epochs: int
    loss: str
    alpha: float | None
    split: int  # Seed of the split, the initial weights and the order of records
    method: str  # "plain", "algorithm1-gaussian", "algorithm1-laplace" or "published-rdp"
    epsilon: float | None  # None for the plain network
    train_accuracy: float | None  # Accuracy on the training records; None for Algorithm 1
    test_accuracy: float  # Accuracy on the test records
    worst_share: float | None = None

    @property
    def settings(self) -> tuple[str, str, float, int, str, float | None]:
        """What tells one case from another, without its method."""
        return (self.dataset, self.scaling, self.learning_rate, self.epochs, self.loss, self.alpha)


_PLAIN: dict[str, tuple[tuple[str, float, int, LossName, float | None, int], ...]] = {
    "cifar-10": (
        ("pixel/255", 1e-4, 100, "cross-entropy", None, 3),
        ("pixel/255", 1e-4, 100, "convexified", 2.0, 3),
        ("pixel/255 - 0.5", 1e-4, 100, "cross-entropy", None, 1),
        ("pixel/255 - 0.5", 1e-4, 100, "convexified", 2.0, 1),
        ("pixel/255", 1e-3, 100, "cross-entropy", None, 1),
        ("pixel/255", 1e-3, 100, "convexified", 2.0, 1),
        ("pixel/255", 1e-3, 10, "cross-entropy", None, 1),
        ("pixel/255", 1e-3, 10, "convexified", 2.0, 1),
        ("pixel/255 - 0.5", 1e-3, 100, "cross-entropy", None, 1),
        ("pixel/255 - 0.5", 1e-3, 100, "convexified", 2.0, 3),
        ("pixel/255 - 0.5", 1e-3, 100, "convexified", 1.0, 1),
    ),
    "cifar-100": (
        ("pixel/255", 1e-4, 100, "cross-entropy", None, 1),
        ("pixel/255", 1e-4, 100, "convexified", 1.0, 1),
    ),
}
_PRIVATE: dict[str, tuple[tuple[str, float, LossName, float | None], ...]] = {
    "cifar-10": (
        ("pixel/255", 1e-4, "convexified", 2.0),
        ("pixel/255", 1e-3, "convexified", 2.0),
    ),
    "cifar-100": (("pixel/255", 1e-4, "convexified", 1.0),),
}
EPSILONS = (1.0, 10.0, 100.0)
"""The epsilons at which DP-SGD is trained."""


def cases(names: Sequence[str] = DATASETS) -> list[Case]:
    """Return what is trained: the plain networks, then DP-SGD."""
    for name in names:
        if name not in DATASETS:
            raise unknown_name("data set of this comparison", name, DATASETS)
    plain = [Case(name, *each[:-1], splits=each[-1]) for name in names for each in _PLAIN[name]]
    private = [
        Case(name, scaling, rate, 100, loss, alpha, "published-rdp", epsilons=EPSILONS)
        for name in names
        for scaling, rate, loss, alpha in _PRIVATE[name]
    ]
    return plain + private


def is_measured(case: Case, trials: Sequence[CifarTrial]) -> bool:
    """Return whether all networks of a case are among some trials."""
    settings = (case.dataset, case.scaling, case.learning_rate, case.epochs, case.loss, case.alpha)
    found = [trial for trial in trials if (trial.settings, trial.method) == (settings, case.method)]
    return len(found) >= case.splits * max(1, len(case.epsilons))


def measure(case: Case, records: Records, *, size: int | None = None, seed: int = 0) -> list[CifarTrial]:
    """Train the networks of one case; with the convexified loss, also answer with Algorithm 1."""
    scaled = replace(records, features=np.ascontiguousarray(SCALINGS[case.scaling](records.features)))
    count = dataset(case.dataset).records if size is None else size
    data = [split(scaled, size=count, seed=seed + number) for number in range(case.splits)]
    return _measure_plain(case, data) if case.method == "plain" else _measure_private(case, data)


def _measure_plain(case: Case, data: Sequence[Split]) -> list[CifarTrial]:
    settings = TrainingSettings(loss=_loss(case), learning_rate=case.learning_rate, epochs=case.epochs)
    trials = []
    for part, model in zip(data, train_many(data, settings=settings), strict=True):
        share = None if case.alpha is None else _worst_share(model, part.train)
        trials.append(
            _trial(case, part, "plain", None, accuracy(model, part.train), accuracy(model, part.test), share)
        )
        if case.alpha is not None:
            trials += _algorithm1(case, part, model)
    return trials


def _algorithm1(case: Case, part: Split, model: Model) -> list[CifarTrial]:
    trials = []
    for noise in ("gaussian", "laplace"):
        for place, epsilon in enumerate(paper.EPSILONS):
            answerer = Answerer.prepare(
                model,
                Algorithm1(noise),
                Budget(epsilon, queries=1),
                noise=SeededNoise(part.seed * 1000 + place),
            )
            labels = answerer.answer(part.test.features).labels
            right = float((labels == part.test.labels).mean())
            trials.append(_trial(case, part, f"algorithm1-{noise}", epsilon, None, right))
    return trials


def _measure_private(case: Case, data: Sequence[Split]) -> list[CifarTrial]:
    size = len(data[0].train_rows)
    plans = [
        make_plan(
            size,
            epsilon=epsilon,
            accountant="rdp",
            analysis="published",
            preset="paper",
            learning_rate=case.learning_rate,
        )
        for epsilon in case.epsilons
    ]
    trials = []
    for part in data:
        records = part.records
        networks = train_private_stack(
            records.features,
            records.labels,
            records.classes,
            [part.train_rows] * len(plans),
            settings=plans[0].settings,
            noise_multipliers=[plan.noise_multiplier for plan in plans],
            seeds=[part.seed] * len(plans),
            alpha=case.alpha,
        )
        for place, epsilon in enumerate(case.epsilons):
            network = networks.network(place)
            right = [_accuracy(network, each) for each in (part.train, part.test)]
            trials.append(_trial(case, part, case.method, epsilon, *right))
    return trials


def _accuracy(network: MLP, records: Records) -> float:
    return float((network.logits(records.features).argmax(-1).numpy() == records.labels).mean())


def _trial(
    case: Case,
    part: Split,
    method: str,
    epsilon: float | None,
    train: float | None,
    test: float,
    share: float | None = None,
) -> CifarTrial:
    return CifarTrial(
        case.dataset,
        case.scaling,
        case.learning_rate,
        case.epochs,
        case.loss,
        case.alpha,
        part.seed,
        method,
        epsilon,
        train,
        test,
        share,
    )


def _loss(case: Case) -> Loss:
    return CrossEntropy() if case.alpha is None else Convexified(case.alpha)


def _worst_share(model: Model, records: Records) -> float:
    """The largest share of one record in the gradient of its batch, the mean over some batches of training records.

    A record's weight is proportional to exp(alpha * its loss).
    """
    assert isinstance(model.settings.loss, Convexified)
    width = min(model.settings.batch_size, len(records))
    taken = width * min(_BATCHES, len(records) // width)
    losses = torch.nn.functional.cross_entropy(
        model.network.logits(records.features[:taken]),
        torch.from_numpy(records.labels[:taken]),
        reduction="none",
    )
    shares = torch.softmax(model.settings.loss.alpha * losses.view(-1, width), -1)
    return float(shares.amax(-1).mean())


@dataclass(frozen=True)
class NetworkRow:
    """The plain network of one case beside the paper's, and Algorithm 1's accuracy loss beside its curves."""

    dataset: str  # The settings, as in `Case`
    scaling: str
    learning_rate: float
    epochs: int
    loss: str
    alpha: float | None
    splits: int  # Number of splits
    train_accuracy: Mean  # Accuracies of the plain network
    test_accuracy: Mean
    paper_train_accuracy: float  # The paper's, for the same loss
    paper_test_accuracy: float
    worst_share: float | None  # As in `CifarTrial`, the mean over the splits
    points: int
    within: int
    largest_difference: float | None  # The largest difference of a point, ours minus the paper's

    @property
    def difference(self) -> float:
        """How far the farther of both accuracies is from the paper's."""
        return max(
            abs(self.train_accuracy.value - self.paper_train_accuracy),
            abs(self.test_accuracy.value - self.paper_test_accuracy),
        )

    @property
    def agrees(self) -> bool:
        """Whether both accuracies are within `ACCURACY_TOLERANCE` of the paper's."""
        return self.difference <= ACCURACY_TOLERANCE

    def to_json(self) -> dict[str, Any]:
        """Return all fields, the difference and the verdict."""
        return asdict(self) | {"difference": self.difference, "agrees": self.agrees}


def network_rows(trials: Sequence[CifarTrial]) -> list[NetworkRow]:
    """Average the plain networks over their splits and compare them with the paper."""
    rows = []
    for settings in dict.fromkeys(trial.settings for trial in trials if trial.method == "plain"):
        mine = [trial for trial in trials if trial.settings == settings]
        plain = [trial for trial in mine if trial.method == "plain"]
        printed = paper.accuracy_table()[plain[0].dataset]
        kind = "original" if plain[0].alpha is None else "convexified"
        shares = [trial.worst_share for trial in plain if trial.worst_share is not None]
        differences = _curve_differences(mine)
        rows.append(
            NetworkRow(
                *settings,
                len(plain),
                Mean.of([trial.train_accuracy or 0.0 for trial in plain]),
                Mean.of([trial.test_accuracy for trial in plain]),
                printed[f"{kind}_train_acc"],
                printed[f"{kind}_test_acc"],
                float(np.mean(shares)) if shares else None,
                len(differences),
                sum(abs(each) <= CURVE_TOLERANCE for each in differences),
                max(differences, key=abs, default=None),
            )
        )
    return rows


def _curve_differences(trials: Sequence[CifarTrial]) -> list[float]:
    """Accuracy loss of Algorithm 1 minus the paper's, for each point of its two curves."""
    baselines = {trial.split: trial.test_accuracy for trial in trials if trial.method == "plain"}
    differences = []
    for name in ("algorithm1-gaussian", "algorithm1-laplace"):
        for epsilon, printed in paper.curve(trials[0].dataset, "acc_loss", PAPER_SERIES[name]).items():
            losses = [
                accuracy_loss(trial.test_accuracy, baselines[trial.split])
                for trial in trials
                if trial.method == name and trial.epsilon == epsilon
            ]
            differences += [float(np.mean(losses)) - printed] if losses else []
    return differences


@dataclass(frozen=True)
class PrivateRow:
    """DP-SGD as published, with the accountant RDP, beside the paper's."""

    dataset: str  # The settings, as in `Case`
    scaling: str
    learning_rate: float
    loss: str
    epsilon: float  # The paper's epsilon
    test_accuracy: float  # Ours, and what the paper's accuracy loss and its accuracy without privacy give
    paper_test_accuracy: float
    accuracy_loss: float | None
    paper_accuracy_loss: float  # The paper's

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)


def private_rows(trials: Sequence[CifarTrial]) -> list[PrivateRow]:
    """Compare DP-SGD with the paper's."""
    baselines = {
        (trial.dataset, trial.scaling, trial.learning_rate, trial.split): trial.test_accuracy
        for trial in trials
        if (trial.method, trial.loss, trial.epochs) == ("plain", "convexified", 100)
        and trial.alpha == dataset(trial.dataset).alpha
    }
    rows = []
    for trial in trials:
        if trial.method != "published-rdp" or trial.epsilon is None:
            continue
        printed = paper.curve(trial.dataset, "acc_loss", "rdp")[trial.epsilon]
        plain = paper.accuracy_table()[trial.dataset]["convexified_test_acc"]
        baseline = baselines.get((trial.dataset, trial.scaling, trial.learning_rate, trial.split))
        rows.append(
            PrivateRow(
                trial.dataset,
                trial.scaling,
                trial.learning_rate,
                trial.loss,
                trial.epsilon,
                trial.test_accuracy,
                plain * (1 - printed),
                None if baseline is None else accuracy_loss(trial.test_accuracy, baseline),
                printed,
            )
        )
    return rows
