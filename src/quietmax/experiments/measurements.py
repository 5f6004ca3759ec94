"""Measurements of our own that the package carries as tables, and how they are made again.

- The paper's Table 1 with numbers: upper bounds on the L2 sensitivity of the weights, beside the change that retraining
  without one record caused.
- The constant alpha of the convexified loss on the grid that the paper searched. It leaves as future work how alpha
  changes the leakage.
- What explains the paper's numbers on CIFAR. It does not say how it scales pixels, and with its stated settings no
  scaling gives its accuracies; here a few settings are changed one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quietmax.data.records import split
from quietmax.data.registry import dataset
from quietmax.errors import QuietmaxError, counted, unknown_name
from quietmax.experiments import paper
from quietmax.experiments.findings import ACCURACY_TOLERANCE, CURVE_TOLERANCE, PAPER_SERIES, Mean
from quietmax.experiments.grid import (
    DataSource,
    Effort,
    Group,
    Result,
    Trial,
    _read_rows,
    _stored_rows,
    write_csv,
)
from quietmax.experiments.methods import source_records
from quietmax.experiments.paper import (
    BOUND_TITLES,
    BoundsRow,
    Observed,
    Row,
    _condition_lines,
    _settings,
    bounds_table,
    correlate,
)
from quietmax.experiments.report import Figure, Line, Table, _number, write_figures
from quietmax.experiments.runner import Progress, run_trials
from quietmax.models.training import (
    ALPHA_TOLERANCE,
    PAPER_GRID,
    AlphaTrial,
    accuracy_loss,
    alpha_trial,
    choose_alpha,
    train,
)
from quietmax.sensitivity.network import empirical_sensitivity, measured_facts

_MEASURED = ("location", "adult", "mnist", "cifar-10", "cifar-100")
"""The data sets whose bounds and alphas are measured."""
_QUERIES = 500


@dataclass(frozen=True)
class Shown:
    """How a measurement is shown: as JSON, on the terminal, in CSV files and in figures."""

    document: object
    tables: list[Table]
    files: dict[str, list[dict[str, Any]]]  # By name
    figures: list[Figure] = field(default_factory=list)

    def write(self, folder: Path) -> list[Path]:
        """Write the CSV files and the figures."""
        written = [write_csv(lines, folder / file) for file, lines in self.files.items()]
        return written + write_figures(self.figures, folder)


@dataclass(frozen=True)
class Measurement:
    """A stored table: its rows, and how they are measured and shown."""

    file: str  # The CSV file that the package carries
    kind: type[Any]  # Of its rows, a dataclass
    datasets: Sequence[str]  # What is measured by default
    measured: Callable[[Sequence[str], Path, int, Progress], list[Any]]
    """Measure data sets with a folder for results and a seed; the same call continues."""
    show: Callable[[Sequence[Any], Sequence[str] | None], Shown]  # Rows, and the data sets if named
    has_formulas: bool = False  # Whether there is something to show on data sets without rows

    def stored(self, names: Sequence[str] | None = None) -> list[Any]:
        """Return the rows that the package carries."""
        return _stored_rows(self.kind, self.file, None if self.has_formulas else names)


def _measured_trials(
    trials: Callable[[str, int], list[Trial]],
    rows: Callable[[Mapping[Trial, Result]], list[Any]],
    names: Sequence[str],
    folder: Path,
    seed: int,
    progress: Progress,
) -> list[Any]:
    """Measure by trials of the paper's grid, with other settings."""
    wanted = [trial for name in names for trial in trials(name, seed)]
    done = run_trials(wanted, folder, progress=progress)
    if done.failures:
        failed = counted(len(done.failures), "trial")
        raise QuietmaxError(f"{failed} failed, which the same command tries again: {'; '.join(done.failed)}.")
    return rows(done.results)


def _short(value: float) -> str:
    """Format a number with three digits, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _by_dataset(rows: Sequence[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for row in rows:
        found.setdefault(row.dataset, []).append(row)
    return found


# --- upper bounds -------------------------------------------------------------------------------------------------

_REMOVALS = {"location": 12, "adult": 12}
_REMOVALS_OTHERWISE = 6


def _measured_bounds(names: Sequence[str], folder: Path, seed: int, progress: Progress) -> list[Observed]:
    path = folder / "bounds.csv"
    rows = _read_rows(Observed, path) if path.is_file() else []
    for done, name in enumerate(names):
        progress(done, len(names))
        if name not in {row.dataset for row in rows}:
            rows.append(_observe(name, seed))
            write_csv(map(asdict, rows), path)
    return [row for row in rows if row.dataset in names]


def _observe(name: str, seed: int) -> Observed:
    """Train the paper's network with all records and without each of a few, and compare."""
    data = split(source_records(DataSource.of(name)), size=dataset(name).records, seed=seed)
    count = _REMOVALS.get(name, _REMOVALS_OTHERWISE)
    found = empirical_sensitivity(
        data.train, removals=count, queries=data.test.features[:_QUERIES], settings=_settings(name), seed=seed
    )
    return Observed(
        name,
        len(data.train),
        count,
        found.weights_l2.value,
        max((each.weights_l2 for each in found.removals if each.kind == "ordinary"), default=0.0),
        found.weight.value,
        found.logit.value,
        max(found.removals, key=lambda removal: removal.weights_l2).kind,
        *astuple(measured_facts(train(data, settings=_settings(name)), data.train)),
    )


def _show_bounds(observed: Sequence[Observed], names: Sequence[str] | None) -> Shown:
    rows = bounds_table(names, observed)
    return Shown(rows, list(_bounds_tables(rows)), {"bounds-table.csv": [row.flat() for row in rows]})


def _bounds_tables(rows: Sequence[BoundsRow]) -> Iterator[Table]:
    applying = sum(bound.applies is True for row in rows for bound in row.bounds)
    bounds = {
        title: lambda row, place=place: _short(row.bounds[place].value)
        for place, title in enumerate(BOUND_TITLES)
    }
    yield Table(
        "Table 1: upper bounds on the change of all weights by one record (L2)",
        rows,
        {"data set": lambda row: row.dataset, **bounds},
        f"All conditions are known to hold for {applying} of {len(rows) * len(BOUND_TITLES)} bounds",
    )
    yield Table(
        "Conditions of the bounds",
        _condition_lines(rows),
        {
            name: lambda line, place=place: line[place]  # type: ignore[misc]
            for place, name in enumerate(("condition", "needed by", "verdict", "why (first data set)"))
        },
        "That the minimiser is reached is not in the paper's table; the proofs take it for granted",
        prose=True,
    )
    observed = [row for row in rows if row.observed is not None]
    if observed:
        yield Table(
            "Observed change of all weights (L2)",
            observed,
            {
                "data set": lambda row: row.dataset,
                "this paper's bound": lambda row: _short(row.bounds[-1].value),
                "observed": lambda row: f"{_short(row.observed.weights_l2)} ({row.observed.kind})",
                "ordinary record": lambda row: _short(row.observed.ordinary_l2),
                "removals": lambda row: str(row.observed.removals),
                "bound": lambda row: row.verdict,
            },
            "The largest change by retraining without one record: a lower bound on the true sensitivity, so 'not "
            "exceeded' proves nothing. Mislabelled and extreme records were planted",
        )


# --- alpha --------------------------------------------------------------------------------------------------------

_ATTACKS = ("shadow", "threshold")
_COARSE_GRID = (0.5, 1.0, 2.0, 5.0, 10.0)
"""The values of alpha on CIFAR, where a network takes half a minute."""
# By data set: repeats, what differs from the paper's effort, and the values of alpha.
_SWEEPS: dict[str, tuple[int, dict[str, int], tuple[float, ...]]] = {
    "location": (3, {"shadows": 10, "attack_epochs": 50}, PAPER_GRID),
    "adult": (3, {"shadows": 5, "attack_epochs": 10}, PAPER_GRID),
    "mnist": (1, {"shadows": 4, "attack_epochs": 20}, PAPER_GRID),
    "cifar-10": (1, {"shadows": 0, "attack_epochs": 0}, _COARSE_GRID),
    "cifar-100": (1, {"shadows": 0, "attack_epochs": 0}, _COARSE_GRID),
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


def _alpha_trials(name: str, seed: int) -> list[Trial]:
    """One trial per alpha and repeat, and one of the original loss per repeat."""
    repeats, less, alphas = _SWEEPS.get(name, _SWEEPS["mnist"])
    attacks = _ATTACKS if less["shadows"] else ()
    effort = replace(Effort(dataset(name).records, 0, attacks=attacks), **less)  # type: ignore[arg-type]
    trials = []
    for repeat in range(repeats):
        groups = [Group(DataSource.of(name), replace(effort, alpha=alpha), repeat, seed) for alpha in alphas]
        trials += [Trial(groups[0], "original"), *(Trial(group, "plain") for group in groups)]
    return trials


def _alpha_rows(results: Mapping[Trial, Result]) -> list[AlphaRow]:
    """Average the results of the trials over the repeats."""
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
    numbers: list[Any] = [each for mean in means for each in (mean.value, mean.spread)]
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


def _alpha_choices(rows: Sequence[AlphaRow]) -> list[AlphaChoice]:
    """Apply the rule of the search to measured rows, and correlate alpha with the leakage."""
    choices = []
    for name, mine in _by_dataset(rows).items():
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


def _show_alpha(rows: Sequence[AlphaRow], _: object) -> Shown:
    choices, mine = _alpha_choices(rows), _by_dataset(rows)
    return Shown(
        {"rows": rows, "choices": choices},
        [_alpha_table(choice, mine[choice.dataset]) for choice in choices],
        {"alpha.csv": list(map(asdict, rows))},
        [figure for choice in choices for figure in _alpha_figures(choice, mine[choice.dataset])],
    )


def _alpha_table(choice: AlphaChoice, rows: Sequence[AlphaRow]) -> Table:
    shortfalls = {trial.alpha: trial.shortfall for trial in choice.trials}
    correlations = {"shadow": choice.shadow_correlation, "threshold": choice.threshold_correlation}
    attacked = [f"{name} {value:.2f}" for name, value in correlations.items() if value is not None]
    marks = {"rule": choice.chosen, "paper": choice.paper}
    return Table(
        f"{choice.dataset}: alpha of the convexified loss",
        rows,
        {
            "alpha": lambda row: "original loss" if row.alpha is None else f"{row.alpha:g}",
            "train acc.": lambda row: f"{row.train_accuracy:.4f}",
            "test acc.": lambda row: f"{row.test_accuracy:.4f}",
            "below original by": lambda row: _number(shortfalls.get(row.alpha), ".4f"),
            "leakage, shadow": lambda row: _number(row.shadow_leakage, ".4f"),
            "leakage, threshold": lambda row: _number(row.threshold_leakage, ".4f"),
            "": lambda row: ", ".join(name for name, value in marks.items() if value == row.alpha),
        },
        f"Means of {rows[-1].repeats} splits, {rows[-1].shadows} shadow networks per alpha. Our rule: the "
        f"smallest alpha at most {ALPHA_TOLERANCE:g} below the original loss in training and test accuracy"
        + (f". Spearman correlation of alpha and leakage: {', '.join(attacked)}" if attacked else ""),
    )


# Figure, number, its spread, colour.
_ALPHA_LINES = (
    ("accuracy", "train_accuracy", "train_spread", "#3d5a80"),
    ("accuracy", "test_accuracy", "test_spread", "#b4431f"),
    ("leakage", "shadow_leakage", "shadow_spread", "#0b6e4f"),
    ("leakage", "threshold_leakage", "threshold_spread", "#7b3fa0"),
    ("leakage", "gap", None, "#888888"),
)


def _alpha_figures(choice: AlphaChoice, rows: Sequence[AlphaRow]) -> Iterator[Figure]:
    """Accuracy and leakage over alpha; thin lines are the original loss."""
    lines: dict[str, list[Line]] = {"accuracy": [], "leakage": []}
    for kind, value, spread, colour in _ALPHA_LINES:
        points = [
            (row.alpha, getattr(row, value), getattr(row, spread) if spread else None)
            for row in rows
            if row.alpha is not None and getattr(row, value) is not None
        ]
        name = value.replace("_", " ")
        if points:
            lines[kind].append(Line(name, colour, False, False, tuple(points)))
        level = next(getattr(row, value) for row in rows if row.alpha is None)
        if level is not None:
            ends = ((points[0][0], level, None), (points[-1][0], level, None))
            lines[kind].append(Line(f"{name}, original loss", colour, True, True, ends))
    for kind, found in lines.items():
        title = f"{choice.dataset}: {kind} over alpha (the paper's: {choice.paper:g})"
        yield Figure(choice.dataset, f"alpha-{kind}", title, kind, tuple(found), along="alpha")


# --- CIFAR --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CifarSettings:
    """What is changed from one network to another."""

    dataset: str  # "cifar-10" or "cifar-100"
    scaling: str  # One of `SCALINGS`
    learning_rate: float  # Step size of Adam; the paper states 0.001
    epochs: int  # Passes over the training set; the paper states 100
    loss: str  # "cross-entropy" or "convexified"
    alpha: float | None  # Constant of the convexified loss, None with cross-entropy

    @property
    def settings(self) -> CifarSettings:
        """These settings alone."""
        return CifarSettings(*(getattr(self, each.name) for each in fields(CifarSettings)))


@dataclass(frozen=True)
class CifarTrial(CifarSettings):
    """One measured accuracy."""

    split: int  # Seed of the split, the initial weights and the order of records
    method: str  # "plain", "algorithm1-gaussian" or "algorithm1-laplace"
    epsilon: float | None  # None for the plain network
    train_accuracy: float | None  # Accuracy on the training records; stored for plain networks only
    test_accuracy: float  # Accuracy on the test records


# Data set, scaling of pixels, learning rate, epochs, alpha, and number of splits.
_CIFAR_CASES = (
    ("cifar-10", "pixel/255", 1e-4, 100, 2.0, 3),
    ("cifar-10", "pixel/255 - 0.5", 1e-4, 100, 2.0, 1),
    ("cifar-10", "pixel/255", 1e-3, 100, 2.0, 1),
    ("cifar-10", "pixel/255", 1e-3, 10, 2.0, 1),
    ("cifar-10", "pixel/255 - 0.5", 1e-3, 100, 2.0, 3),
    ("cifar-10", "pixel/255 - 0.5", 1e-3, 100, 1.0, 1),
    ("cifar-100", "pixel/255", 1e-4, 100, 1.0, 1),
)


def _cifar_trials(name: str, seed: int) -> list[Trial]:
    """The plain network and Algorithm 1 with each of the settings; with the paper's alpha, also the original loss."""
    cases = [case for case in _CIFAR_CASES if case[0] == name]
    if not cases:
        raise unknown_name("data set of this comparison", name, ("cifar-10", "cifar-100"))
    trials = []
    for _, scaling, rate, epochs, alpha, splits in cases:
        effort = Effort(
            dataset(name).records, 0, alpha, epochs, attacks=(), scaling=scaling, learning_rate=rate
        )
        for repeat in range(splits):
            group = Group(DataSource.of(name), effort, repeat, seed)
            methods = ("plain", "original") if alpha == dataset(name).alpha else ("plain",)
            trials += [Trial(group, method) for method in methods]
            trials += [
                Trial(group, f"algorithm1-{noise}", epsilon, 1)
                for noise in ("gaussian", "laplace")
                for epsilon in paper.EPSILONS
            ]
    return trials


def _cifar_rows(results: Mapping[Trial, Result]) -> list[CifarTrial]:
    rows = []
    for trial, result in results.items():
        group, effort, original = trial.group, trial.group.effort, trial.method == "original"
        rows.append(
            CifarTrial(
                group.source.name,
                str(effort.scaling),
                float(effort.learning_rate or 0.0),
                effort.epochs,
                "cross-entropy" if original else "convexified",
                None if original else effort.alpha,
                group.seed + group.repeat,
                "plain" if original else trial.method,
                trial.epsilon,
                result["train_accuracy"],
                result["test_accuracy"],
            )
        )
    return rows


@dataclass(frozen=True)
class NetworkRow(CifarSettings, Row):
    """The plain network of one case beside the paper's, and Algorithm 1's accuracy loss beside its curves."""

    splits: int  # Number of splits
    train_accuracy: Mean  # Accuracies of the plain network
    test_accuracy: Mean
    paper_train_accuracy: float  # The paper's, for the same loss
    paper_test_accuracy: float
    points: int  # Points of Algorithm 1's accuracy loss; how many are within `CURVE_TOLERANCE` of the paper's
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
        differences = _curve_differences(mine)
        rows.append(
            NetworkRow(
                **asdict(settings),
                splits=len(plain),
                train_accuracy=Mean.of([trial.train_accuracy or 0.0 for trial in plain]),
                test_accuracy=Mean.of([trial.test_accuracy for trial in plain]),
                paper_train_accuracy=printed[f"{kind}_train_acc"],
                paper_test_accuracy=printed[f"{kind}_test_acc"],
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


def _show_cifar(trials: Sequence[CifarTrial], _: object) -> Shown:
    networks = network_rows(trials)
    return Shown(
        {"networks": networks}, list(_cifar_tables(networks)), {"cifar.csv": list(map(asdict, trials))}
    )


def _cifar_tables(networks: Sequence[NetworkRow]) -> Iterator[Table]:
    for name, mine in _by_dataset(networks).items():
        printed = dict.fromkeys((row.loss, row.paper_train_accuracy, row.paper_test_accuracy) for row in mine)
        yield Table(
            f"{name}: networks without privacy, and Algorithm 1",
            mine,
            {
                "pixels": lambda row: row.scaling,
                "rate": lambda row: (
                    f"{row.learning_rate:g}" + ("" if row.epochs == 100 else f", {row.epochs} epochs")
                ),
                "loss": lambda row: row.loss + ("" if row.alpha is None else f", {row.alpha:g}"),
                "splits": lambda row: str(row.splits),
                "train": lambda row: f"{row.train_accuracy.value:.3f}",
                "test": lambda row: f"{row.test_accuracy.value:.3f}",
                "Alg. 1": lambda row: f"{row.within}/{row.points}" if row.points else "",
            },
            "; ".join(f"the paper's {loss}: {train:.3f}, {test:.3f}" for loss, train, test in printed)
            + ". Rate: learning rate; after the loss: alpha; last column: points of Algorithm 1's accuracy loss "
            f"within {CURVE_TOLERANCE:g} of the paper's curves",
        )


MEASUREMENTS = {
    "bounds": Measurement(
        "bounds.csv", Observed, _MEASURED, _measured_bounds, _show_bounds, has_formulas=True
    ),
    "alpha": Measurement(
        "alpha.csv", AlphaRow, _MEASURED, partial(_measured_trials, _alpha_trials, _alpha_rows), _show_alpha
    ),
    "cifar": Measurement(
        "cifar.csv",
        CifarTrial,
        ("cifar-10", "cifar-100"),
        partial(_measured_trials, _cifar_trials, _cifar_rows),
        _show_cifar,
    ),
}
"""Our own measurements, by the names of their tables."""
