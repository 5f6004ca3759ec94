"""Measurements of our own that the package carries as tables, and how they are made again.

- The paper's Table 1 with numbers: upper bounds on the L2 sensitivity of the weights, beside the change that retraining
  without one record caused.
- Losses, activations and depths beyond the paper's one hidden layer of 128 tanh units, put into its formulas. Its
  Lipschitz constant is derived for the cross-entropy, so there are none for the quadratic loss.
- The constant alpha of the convexified loss on the grid that the paper searched. It leaves as future work how alpha
  changes the leakage.
- What explains the paper's numbers on CIFAR. It does not say how it scales pixels, and with its stated settings no
  scaling gives its accuracies; here a few settings are changed one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quietmax.accounting.costs import Budget
from quietmax.data.records import Records, Split, split
from quietmax.data.registry import dataset, load_records
from quietmax.errors import unknown_name
from quietmax.estimators.dpsgd.training import train_sweep
from quietmax.experiments import paper
from quietmax.experiments.findings import ACCURACY_TOLERANCE, CURVE_TOLERANCE, PAPER_SERIES, Mean
from quietmax.experiments.grid import DataSource, Effort, Group, Trial
from quietmax.experiments.inputs import source_records
from quietmax.experiments.paper import Row, correlate
from quietmax.experiments.report import Figure, Line
from quietmax.experiments.results import Result, read_rows, write_csv
from quietmax.mechanisms.algorithm1 import Algorithm1
from quietmax.mechanisms.base import Answerer
from quietmax.models.mlp import activation
from quietmax.models.stacked import Convexified, CrossEntropy, Loss, Quadratic, TrainingSettings
from quietmax.models.training import (
    PAPER_GRID,
    AlphaTrial,
    Model,
    accuracy,
    accuracy_loss,
    alpha_trial,
    choose_alpha,
    train,
    train_many,
)
from quietmax.noise.sources import SeededNoise
from quietmax.sensitivity.network import (
    CONDITIONS,
    MeasuredFacts,
    UpperBound,
    empirical_sensitivity,
    measured_facts,
    published_sensitivity,
    upper_bounds_for,
)

BOUNDS, ARCHITECTURES, ALPHA, CIFAR = "bounds.csv", "architectures.csv", "alpha.csv", "cifar.csv"
"""The files of the stored tables."""
MEASURED = ("location", "adult", "mnist", "cifar-10", "cifar-100")
"""The data sets whose bounds and alphas are measured."""
Progress = Callable[[int, int], None]
_QUERIES = 500

# --- upper bounds -------------------------------------------------------------------------------------------------

TITLES = ("Chaudhuri binary", "Chaudhuri", "Wu decreasing", "Wu constant", "this paper")
"""Short names of the five bounds, in the paper's order."""
_REMOVALS = {"location": 12, "adult": 12}
_REMOVALS_OTHERWISE = 6


@dataclass(frozen=True)
class Observed:
    """What was measured on one data set with the paper's network."""

    dataset: str  # Name of the data set
    records: int  # Training records, and how many of them were removed, one at a time
    removals: int
    weights_l2: float  # How far all weights moved at most; by removing a record as it is in the data
    ordinary_l2: float
    weight: float  # The largest move of one weight and of one logit
    logit: float
    kind: str  # Which kind of record moved the weights furthest: ordinary, mislabelled or extreme
    norm: float  # The fields of `MeasuredFacts`
    loss: float
    loss_at_mean: float
    gradient: float
    objective_gradient: float


@dataclass(frozen=True)
class BoundsRow:
    """The five bounds of one data set beside what was observed."""

    dataset: str  # Name of the data set
    bounds: tuple[UpperBound, ...]  # The rows of Table 1 in the paper's order
    observed: Observed | None  # None if nothing was measured on this data set

    @property
    def verdict(self) -> str:
        """Whether retraining exceeded the paper's bound."""
        if self.observed is None:
            return "not measured"
        return "exceeded" if self.observed.weights_l2 > self.bounds[-1].value else "not exceeded"

    def flat(self) -> dict[str, object]:
        """Return one value per bound, and the observations, for a CSV file."""
        seen = self.observed
        return {
            "dataset": self.dataset,
            **{title: bound.value for title, bound in zip(TITLES, self.bounds, strict=True)},
            "observed": None if seen is None else seen.weights_l2,
            "observed_ordinary": None if seen is None else seen.ordinary_l2,
            "removals": None if seen is None else seen.removals,
            "verdict": self.verdict,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the bounds with their conditions, the observations and the verdict."""
        return {
            "dataset": self.dataset,
            "bounds": [bound.to_json() for bound in self.bounds],
            "observed": None if self.observed is None else asdict(self.observed),
            "verdict": self.verdict,
        }


def bounds_table(names: Sequence[str] | None = None, observed: Sequence[Observed] = ()) -> list[BoundsRow]:
    """Compute Table 1 for data sets, from the shape of the paper's network and what was measured."""
    measured = {each.dataset: each for each in observed}
    rows = []
    for name in names or paper.sensitivity_table():
        shape, seen = dataset(name), measured.get(name)
        facts = None if seen is None else MeasuredFacts(*astuple(seen)[-len(fields(MeasuredFacts)) :])
        bounds = upper_bounds_for(
            shape.features, shape.classes, shape.records, settings=_settings(name), facts=facts
        )
        rows.append(BoundsRow(name, bounds, seen))
    return rows


@dataclass(frozen=True)
class _ConditionSummary:
    """On which data sets a condition holds, does not hold or was not checked."""

    condition: str  # The condition
    needed_by: tuple[str, ...]  # Short names of the bounds that need it
    holds: bool | None  # The verdict; None for "not checked"
    datasets: tuple[str, ...]  # The data sets with that verdict
    because: str  # The reason on the first of them


def condition_summaries(rows: Sequence[BoundsRow]) -> list[_ConditionSummary]:
    """Summarise the conditions of all bounds over the data sets."""
    needed: dict[str, dict[str, None]] = {}
    found: dict[tuple[str, bool | None], dict[str, str]] = {}
    for row in rows:
        for title, bound in zip(TITLES, row.bounds, strict=True):
            for condition in bound.conditions:
                needed.setdefault(condition.name, {})[title] = None
                found.setdefault((condition.name, condition.holds), {})[row.dataset] = condition.because
    return [
        _ConditionSummary(name, tuple(needed[name]), holds, tuple(whose), next(iter(whose.values())))
        for name in CONDITIONS
        for (condition, holds), whose in found.items()
        if condition == name
    ]


def observe(
    names: Sequence[str],
    *,
    removals: int | None = None,
    data_dir: Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Observed]:
    """Train the paper's network with all records and without each of a few, and compare."""
    rows = []
    for name in names:
        data = split(source_records(DataSource.of(name), data_dir), size=dataset(name).records, seed=seed)
        count = removals or _REMOVALS.get(name, _REMOVALS_OTHERWISE)
        found = empirical_sensitivity(
            data.train,
            removals=count,
            queries=data.test.features[:_QUERIES],
            settings=_settings(name),
            seed=seed,
            progress=progress,
        )
        ordinary = [each.weights_l2 for each in found.removals if each.kind == "ordinary"]
        rows.append(
            Observed(
                name,
                len(data.train),
                count,
                found.weights_l2.value,
                max(ordinary, default=0.0),
                found.weight.value,
                found.logit.value,
                max(found.removals, key=lambda removal: removal.weights_l2).kind,
                *astuple(measured_facts(train(data, settings=_settings(name)), data.train)),
            )
        )
    return rows


def _settings(name: str) -> TrainingSettings:
    """The paper's settings with the data set's alpha."""
    return TrainingSettings(loss=Convexified(dataset(name).alpha))


# --- other architectures ------------------------------------------------------------------------------------------

_WIDTH = 128
_LOSSES: dict[str, Callable[[float], Loss]] = {
    "convexified cross-entropy": Convexified,
    "cross-entropy": lambda _: CrossEntropy(),
    "quadratic": lambda _: Quadratic(),
    "convexified quadratic": lambda alpha: Convexified(alpha, base=Quadratic()),
    "convexified quadratic, over samples": lambda alpha: Convexified(alpha, "samples", Quadratic()),
}
ARCHITECTURE_CASES: tuple[tuple[int, str, str], ...] = (
    *((1, "tanh", loss) for loss in _LOSSES),
    *((1, name, "convexified cross-entropy") for name in ("sigmoid", "relu")),
    *(
        (layers, name, "convexified cross-entropy")
        for layers in (2, 3)
        for name in ("tanh", "sigmoid", "relu")
    ),
)
"""Number of hidden layers of 128 neurons, their activation and the loss; the first is the paper's."""


@dataclass(frozen=True)
class ArchitectureRow(Row):
    """One architecture on one data set."""

    dataset: str  # Name of the data set
    layers: int  # Number of hidden layers of 128 neurons
    activation: str  # Their activation
    loss: str  # The loss function
    repeats: int  # Number of splits, and of records removed from the first of them, one at a time
    removals: int
    train_accuracy: float  # Means over the splits
    train_spread: float | None  # Standard deviations; None for a single split
    test_accuracy: float
    test_spread: float | None
    rho: float | None  # The paper's formulas, where it has them
    weights_l2: float | None
    logit: float | None
    gradient: float  # Largest norm of the gradient of one record's loss: what rho claims to bound
    observed_weights_l2: float  # The largest changes by removing one record
    observed_logit: float

    derived = ("exceeded",)

    @property
    def exceeded(self) -> tuple[str, ...]:
        """The formulas that a measurement exceeded: "rho", "weights_l2", "logit"."""
        measured = {
            "rho": (self.rho, self.gradient),
            "weights_l2": (self.weights_l2, self.observed_weights_l2),
            "logit": (self.logit, self.observed_logit),
        }
        return tuple(
            name for name, (formula, seen) in measured.items() if formula is not None and seen > formula
        )


def measure_architectures(
    names: Sequence[str],
    *,
    repeats: int | None = None,
    removals: int | None = None,
    data_dir: Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[ArchitectureRow]:
    """Train every architecture on several splits, and on the first without each of a few records."""
    rows = []
    for name in names:
        records = source_records(DataSource.of(name), data_dir)
        parts = [split(records, size=dataset(name).records, seed=seed + each) for each in range(repeats or 3)]
        for case in ARCHITECTURE_CASES:
            rows.append(_measure_architecture(name, case, parts, removals or 6, seed))
            if progress is not None:
                progress(len(rows), len(names) * len(ARCHITECTURE_CASES))
    return rows


def _measure_architecture(
    name: str, case: tuple[int, str, str], parts: Sequence[Split], removals: int, seed: int
) -> ArchitectureRow:
    layers, activation_name, loss = case
    settings = TrainingSettings((_WIDTH,) * layers, activation_name, _LOSSES[loss](dataset(name).alpha))
    models = train_many(parts, settings=settings)
    trained = Mean.of([accuracy(model, part.train) for model, part in zip(models, parts, strict=True)])
    tested = Mean.of([accuracy(model, part.test) for model, part in zip(models, parts, strict=True)])
    first = parts[0]
    found = empirical_sensitivity(
        first.train,
        removals=removals,
        queries=first.test.features[:_QUERIES],
        settings=settings,
        seed=seed,
    )
    formulas: tuple[float | None, float | None, float | None] = (None, None, None)
    if "quadratic" not in loss:
        unbounded = activation(activation_name).bound is None
        claimed = published_sensitivity(models[0], records=first.train.features if unbounded else None)
        formulas = (claimed.rho.value, claimed.weights_l2.value, claimed.logit.value)
    return ArchitectureRow(
        name,
        *case,
        len(parts),
        removals,
        trained.value,
        trained.spread,
        tested.value,
        tested.spread,
        *formulas,
        measured_facts(models[0], first.train).gradient,
        found.weights_l2.value,
        found.logit.value,
    )


# --- alpha --------------------------------------------------------------------------------------------------------

_ATTACKS = ("shadow", "threshold")
COARSE_GRID = (0.5, 1.0, 2.0, 5.0, 10.0)
"""The values of alpha on CIFAR, where a network takes half a minute."""
# By data set: repeats, what differs from the paper's effort, and the values of alpha.
_SWEEPS: dict[str, tuple[int, dict[str, int], tuple[float, ...]]] = {
    "location": (3, {"shadows": 10, "attack_epochs": 50}, PAPER_GRID),
    "adult": (3, {"shadows": 5, "attack_epochs": 10}, PAPER_GRID),
    "mnist": (1, {"shadows": 4, "attack_epochs": 20}, PAPER_GRID),
    "cifar-10": (1, {"shadows": 0, "attack_epochs": 0}, COARSE_GRID),
    "cifar-100": (1, {"shadows": 0, "attack_epochs": 0}, COARSE_GRID),
}


@dataclass(frozen=True)
class AlphaRow(Row):
    """One loss on one data set, averaged over the repeats."""

    dataset: str  # Name of the data set
    alpha: float | None  # Constant of the convexified loss; None for the original loss, the cross-entropy
    repeats: int  # Number of splits
    shadows: int  # Shadow networks per alpha and split
    train_accuracy: float  # Accuracy on members and non-members
    train_spread: float | None  # Standard deviations over the repeats; None for a single one
    test_accuracy: float
    test_spread: float | None
    shadow_leakage: float | None = None
    shadow_spread: float | None = None
    threshold_leakage: float | None = None
    threshold_spread: float | None = None

    derived = ("gap",)

    @property
    def gap(self) -> float:
        """Training accuracy minus test accuracy."""
        return self.train_accuracy - self.test_accuracy


def alpha_trials(names: Sequence[str], *, repeats: int | None = None, seed: int = 0) -> list[Trial]:
    """Return one trial per data set, alpha and repeat, and one of the original loss per repeat."""
    trials = []
    for name in names:
        count, less, alphas = _SWEEPS.get(name, _SWEEPS["mnist"])
        attacks = _ATTACKS if less["shadows"] else ()
        effort = replace(Effort(dataset(name).records, 0, attacks=attacks), **less)  # type: ignore[arg-type]
        for repeat in range(repeats or count):
            groups = [
                Group(DataSource.of(name), replace(effort, alpha=alpha), repeat, seed) for alpha in alphas
            ]
            trials += [Trial(groups[0], "original"), *(Trial(group, "plain") for group in groups)]
    return trials


def alpha_rows(results: Mapping[Trial, Result]) -> list[AlphaRow]:
    """Average the results of `alpha_trials` over the repeats."""
    found: dict[tuple[str, float | None], dict[Trial, Result]] = {}
    for trial, result in results.items():
        alpha = None if trial.method == "original" else trial.group.effort.alpha
        found.setdefault((trial.group.source.title, alpha), {})[trial] = result
    names = list(dict.fromkeys(name for name, _ in found))
    order = sorted(found, key=lambda key: (names.index(key[0]), key[1] or 0.0))
    return [_averaged(*key, found[key]) for key in order]


def _averaged(name: str, alpha: float | None, found: Mapping[Trial, Result]) -> AlphaRow:
    results, shadows = list(found.values()), next(iter(found)).group.effort.shadows
    means = [Mean.of([result[f"{part}_accuracy"] for result in results]) for part in ("train", "test")]
    for attack in _ATTACKS:
        if all(attack in result["attacks"] for result in results):
            means.append(Mean.of([result["attacks"][attack]["leakage"]["value"] for result in results]))
    numbers: list[Any] = [number for mean in means for number in (mean.value, mean.spread)]
    return AlphaRow(name, alpha, len(results), shadows, *numbers)


@dataclass(frozen=True)
class AlphaChoice(Row):
    """What the rows of one data set say about the choice of alpha."""

    dataset: str  # Name of the data set
    trials: tuple[AlphaTrial, ...]
    chosen: float  # The alpha that the rule of `choose_alpha` picks from them
    paper: float  # The data set's alpha: the paper's, where it has one
    shadow_correlation: float | None  # Spearman's, of alpha with the leakage; None if that was not measured
    threshold_correlation: float | None


def alpha_choices(rows: Sequence[AlphaRow]) -> list[AlphaChoice]:
    """Apply the rule of the search to measured rows, and correlate alpha with the leakage."""
    choices = []
    for name in dict.fromkeys(row.dataset for row in rows):
        mine = [row for row in rows if row.dataset == name]
        (original,) = (row for row in mine if row.alpha is None)
        tried = {row.alpha: row for row in mine if row.alpha is not None}
        trials = tuple(
            alpha_trial(
                alpha,
                (row.train_accuracy, row.test_accuracy),
                (original.train_accuracy, original.test_accuracy),
            )
            for alpha, row in tried.items()
        )
        correlations = [
            _correlation(list(tried), [getattr(row, f"{attack}_leakage") for row in tried.values()])
            for attack in _ATTACKS
        ]
        choices.append(AlphaChoice(name, trials, choose_alpha(trials), dataset(name).alpha, *correlations))
    return choices


def _correlation(alphas: Sequence[float], leakages: Sequence[float | None]) -> float | None:
    known = [each for each in leakages if each is not None]
    if len(known) < max(3, len(leakages)):
        return None
    return correlate(alphas, known)["spearman"]


# Figure, number, its spread, colour.
_ALPHA_LINES = (
    ("accuracy", "train_accuracy", "train_spread", "#3d5a80"),
    ("accuracy", "test_accuracy", "test_spread", "#b4431f"),
    ("leakage", "shadow_leakage", "shadow_spread", "#0b6e4f"),
    ("leakage", "threshold_leakage", "threshold_spread", "#7b3fa0"),
    ("leakage", "gap", None, "#888888"),
)


def alpha_figures(rows: Sequence[AlphaRow]) -> list[Figure]:
    """Return accuracy and leakage over alpha, two figures per data set; thin lines are the original loss."""
    drawn = []
    for choice in alpha_choices(rows):
        mine = [row for row in rows if row.dataset == choice.dataset]
        lines: dict[str, list[Line]] = {"accuracy": [], "leakage": []}
        for kind, value, spread, colour in _ALPHA_LINES:
            points = [
                (row.alpha, getattr(row, value), getattr(row, spread) if spread else None)
                for row in mine
                if row.alpha is not None and getattr(row, value) is not None
            ]
            name = value.replace("_", " ")
            if points:
                lines[kind].append(Line(name, colour, False, False, tuple(points)))
            level = next(getattr(row, value) for row in mine if row.alpha is None)
            if level is not None:
                ends = ((points[0][0], level, None), (points[-1][0], level, None))
                lines[kind].append(Line(f"{name}, original loss", colour, True, True, ends))
        for kind, found in lines.items():
            title = f"{choice.dataset}: {kind} over alpha (the paper's: {choice.paper:g})"
            drawn.append(Figure(choice.dataset, f"alpha-{kind}", title, kind, tuple(found), along="alpha"))
    return drawn


# --- CIFAR --------------------------------------------------------------------------------------------------------

CIFAR_DATASETS = ("cifar-10", "cifar-100")
SCALINGS: dict[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
    "pixel/255": lambda features: features,
    "pixel/255 - 0.5": lambda features: features - np.float32(0.5),
}
"""How pixels become features. The records have pixel/255."""
_BATCHES = 20
"""Number of batches from which the share of the worst record is estimated."""


@dataclass(frozen=True)
class _CifarSettings:
    """What is changed from one case to another."""

    dataset: str  # "cifar-10" or "cifar-100"
    scaling: str  # One of `SCALINGS`
    learning_rate: float  # Step size of Adam; the paper states 0.001
    epochs: int  # Passes over the training set; the paper states 100
    loss: str  # "cross-entropy" or "convexified"
    alpha: float | None  # Constant of the convexified loss, None with cross-entropy

    @property
    def settings(self) -> _CifarSettings:
        """These settings alone."""
        return _CifarSettings(*(getattr(self, each.name) for each in fields(_CifarSettings)))


@dataclass(frozen=True)
class Case(_CifarSettings):
    """Settings that are trained on some splits."""

    splits: int = 1  # Number of splits
    epsilons: tuple[float, ...] = ()  # The epsilons of DP-SGD as published; without any, no privacy

    @property
    def method(self) -> str:
        """The method of the case's networks."""
        return "published-rdp" if self.epsilons else "plain"

    def trial(self, part: Split, method: str, epsilon: float | None, *measured: float | None) -> CifarTrial:
        """Return what was measured with these settings on a split."""
        return CifarTrial(*[*astuple(self.settings), part.seed, method, epsilon, *measured])


@dataclass(frozen=True)
class CifarTrial(_CifarSettings):
    """One measured accuracy."""

    split: int  # Seed of the split, the initial weights and the order of records
    method: str  # "plain", "algorithm1-gaussian", "algorithm1-laplace" or "published-rdp"
    epsilon: float | None  # None for the plain network
    train_accuracy: float | None  # Accuracy on the training records; None for Algorithm 1
    test_accuracy: float  # Accuracy on the test records
    worst_share: float | None = None  # Largest share of one record in the gradient of its batch, on average


# Scaling, learning rate, epochs, alpha (None: cross-entropy), number of splits.
_PLAIN: dict[str, tuple[tuple[str, float, int, float | None, int], ...]] = {
    "cifar-10": (
        ("pixel/255", 1e-4, 100, None, 3),
        ("pixel/255", 1e-4, 100, 2.0, 3),
        ("pixel/255 - 0.5", 1e-4, 100, None, 1),
        ("pixel/255 - 0.5", 1e-4, 100, 2.0, 1),
        ("pixel/255", 1e-3, 100, None, 1),
        ("pixel/255", 1e-3, 100, 2.0, 1),
        ("pixel/255", 1e-3, 10, None, 1),
        ("pixel/255", 1e-3, 10, 2.0, 1),
        ("pixel/255 - 0.5", 1e-3, 100, None, 1),
        ("pixel/255 - 0.5", 1e-3, 100, 2.0, 3),
        ("pixel/255 - 0.5", 1e-3, 100, 1.0, 1),
    ),
    "cifar-100": (("pixel/255", 1e-4, 100, None, 1), ("pixel/255", 1e-4, 100, 1.0, 1)),
}
_PRIVATE = {
    "cifar-10": (("pixel/255", 1e-4, 100, 2.0, 1), ("pixel/255", 1e-3, 100, 2.0, 1)),
    "cifar-100": (("pixel/255", 1e-4, 100, 1.0, 1),),
}
_PRIVATE_EPSILONS = (1.0, 10.0, 100.0)


def _cifar_cases(names: Sequence[str] = CIFAR_DATASETS) -> list[Case]:
    """Return what is trained: the plain networks, then DP-SGD."""
    for name in names:
        if name not in CIFAR_DATASETS:
            raise unknown_name("data set of this comparison", name, CIFAR_DATASETS)
    return [
        Case(
            name, scaling, rate, epochs, "convexified" if alpha else "cross-entropy", alpha, splits, epsilons
        )
        for table, epsilons in ((_PLAIN, ()), (_PRIVATE, _PRIVATE_EPSILONS))
        for name in names
        for scaling, rate, epochs, alpha, splits in table[name]
    ]


def _is_measured(case: Case, trials: Sequence[CifarTrial]) -> bool:
    """Return whether all networks of a case are among some trials."""
    found = [trial for trial in trials if (trial.settings, trial.method) == (case.settings, case.method)]
    return len(found) >= case.splits * max(1, len(case.epsilons))


def measure_cifar(
    names: Sequence[str], *, folder: Path, data_dir: Path | None, seed: int, progress: Progress
) -> list[CifarTrial]:
    """Train the cases that a folder does not have yet, and store them there."""
    cases, path = _cifar_cases(names), folder / CIFAR
    trials: list[CifarTrial] = read_rows(CifarTrial, path) if path.is_file() else []
    for done, case in enumerate(cases):
        progress(done, len(cases))
        if not _is_measured(case, trials):
            trials += _measure_case(case, load_records(case.dataset, data_dir=data_dir), seed=seed)
            write_csv(map(asdict, trials), path)
    return trials


def _measure_case(case: Case, records: Records, *, seed: int = 0) -> list[CifarTrial]:
    """Train the networks of one case; with the convexified loss, also answer with Algorithm 1."""
    scaled = replace(records, features=np.ascontiguousarray(SCALINGS[case.scaling](records.features)))
    size = dataset(case.dataset).records
    data = [split(scaled, size=size, seed=seed + number) for number in range(case.splits)]
    return _measure_private(case, data) if case.epsilons else _measure_plain(case, data)


def _measure_plain(case: Case, data: Sequence[Split]) -> list[CifarTrial]:
    loss = CrossEntropy() if case.alpha is None else Convexified(case.alpha)
    settings = TrainingSettings(loss=loss, learning_rate=case.learning_rate, epochs=case.epochs)
    trials = []
    for part, model in zip(data, train_many(data, settings=settings), strict=True):
        right = accuracy(model, part.train), accuracy(model, part.test)
        if case.alpha is None:
            trials.append(case.trial(part, "plain", None, *right))
        else:
            trials.append(
                case.trial(part, "plain", None, *right, _worst_share(model, part.train, case.alpha))
            )
            trials += _answer_with_algorithm1(case, part, model)
    return trials


def _answer_with_algorithm1(case: Case, part: Split, model: Model) -> Iterator[CifarTrial]:
    for noise in ("gaussian", "laplace"):
        for place, epsilon in enumerate(paper.EPSILONS):
            source = SeededNoise(part.seed * 1000 + place)
            answerer = Answerer.prepare(model, Algorithm1(noise), Budget(epsilon, queries=1), noise=source)
            right = float((answerer.answer(part.test.features).labels == part.test.labels).mean())
            yield case.trial(part, f"algorithm1-{noise}", epsilon, None, right)


def _measure_private(case: Case, data: Sequence[Split]) -> list[CifarTrial]:
    sweep = train_sweep(
        data,
        epsilons=case.epsilons,
        accountants=("rdp",),
        alpha=case.alpha,
        learning_rate=case.learning_rate,
    )
    trials = []
    for place, part in enumerate(data):
        for epsilon in case.epsilons:
            network = sweep.network(place, "rdp", epsilon)
            right = [
                float((network.logits(each.features).argmax(-1).numpy() == each.labels).mean())
                for each in (part.train, part.test)
            ]
            trials.append(case.trial(part, case.method, epsilon, *right))
    return trials


def _worst_share(model: Model, records: Records, alpha: float) -> float:
    """The largest share of one record in the gradient of its batch, the mean over some batches of training records.

    A record's weight is proportional to exp(alpha * its loss).
    """
    width = min(model.settings.batch_size, len(records))
    taken = width * min(_BATCHES, len(records) // width)
    losses = torch.nn.functional.cross_entropy(
        model.network.logits(records.features[:taken]),
        torch.from_numpy(records.labels[:taken]),
        reduction="none",
    )
    return float(torch.softmax(alpha * losses.view(-1, width), -1).amax(-1).mean())


@dataclass(frozen=True)
class NetworkRow(_CifarSettings, Row):
    """The plain network of one case beside the paper's, and Algorithm 1's accuracy loss beside its curves."""

    splits: int  # Number of splits
    train_accuracy: Mean  # Accuracies of the plain network
    test_accuracy: Mean
    paper_train_accuracy: float  # The paper's, for the same loss
    paper_test_accuracy: float
    worst_share: float | None  # As in `CifarTrial`, the mean over the splits
    points: (
        int  # Points of Algorithm 1's accuracy loss, and how many are within `CURVE_TOLERANCE` of the paper's
    )
    within: int
    largest_difference: float | None  # The largest difference of a point, ours minus the paper's

    derived = ("difference", "agrees")

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


def network_rows(trials: Sequence[CifarTrial]) -> list[NetworkRow]:
    """Average the plain networks over their splits and compare them with the paper."""
    rows = []
    for settings in dict.fromkeys(trial.settings for trial in trials if trial.method == "plain"):
        mine = [trial for trial in trials if trial.settings == settings]
        plain = [trial for trial in mine if trial.method == "plain"]
        printed = paper.accuracy_table()[settings.dataset]
        kind = "original" if settings.alpha is None else "convexified"
        shares = [trial.worst_share for trial in plain if trial.worst_share is not None]
        differences = _curve_differences(mine)
        rows.append(
            NetworkRow(
                **asdict(settings),
                splits=len(plain),
                train_accuracy=Mean.of([trial.train_accuracy or 0.0 for trial in plain]),
                test_accuracy=Mean.of([trial.test_accuracy for trial in plain]),
                paper_train_accuracy=printed[f"{kind}_train_acc"],
                paper_test_accuracy=printed[f"{kind}_test_acc"],
                worst_share=float(np.mean(shares)) if shares else None,
                points=len(differences),
                within=sum(abs(each) <= CURVE_TOLERANCE for each in differences),
                largest_difference=max(differences, key=abs, default=None),
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
class PrivateRow(_CifarSettings, Row):
    """DP-SGD as published, with the accountant RDP, beside the paper's."""

    epsilon: float  # The paper's epsilon
    test_accuracy: float  # Ours, and what the paper's accuracy loss and its accuracy without privacy give
    paper_test_accuracy: float
    accuracy_loss: float | None  # None if the network without privacy was not measured
    paper_accuracy_loss: float


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
                **asdict(trial.settings),
                epsilon=trial.epsilon,
                test_accuracy=trial.test_accuracy,
                paper_test_accuracy=plain * (1 - printed),
                accuracy_loss=None if baseline is None else accuracy_loss(trial.test_accuracy, baseline),
                paper_accuracy_loss=printed,
            )
        )
    return rows
