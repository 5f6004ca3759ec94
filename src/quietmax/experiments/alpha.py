"""The constant alpha of the convexified loss: accuracy and leakage on the grid that the paper searched.

The paper takes the grid (0, 10] in steps of 0.5 and an alpha with "(almost) the same" training and test accuracy as
the original loss. How alpha changes the leakage it leaves as future work. Here every alpha is a group of trials of the
common grid: a network, its shadow networks and two attacks, on the same splits for all alphas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quietmax.data.registry import dataset
from quietmax.experiments.grid import DataSource, Effort, Group, Trial
from quietmax.experiments.results import Result
from quietmax.experiments.summary import Mean
from quietmax.models.training import PAPER_GRID

ATTACKS = ("shadow", "threshold")


@dataclass(frozen=True)
class Sweep:
    """How much work goes into one data set.

    Parameters
    ----------
    repeats : int
        Number of splits.
    shadows : int
        Shadow networks per alpha and split; 0 for no attack.
    attack_epochs : int
        Epochs of the attack networks.
    """

    repeats: int
    shadows: int
    attack_epochs: int


_SWEEPS = {
    "location": Sweep(3, 10, 50),
    "adult": Sweep(3, 5, 10),
    "mnist": Sweep(1, 4, 20),
    "cifar-10": Sweep(1, 0, 0),
    "cifar-100": Sweep(1, 0, 0),
}
_OTHERWISE = Sweep(1, 4, 20)


@dataclass(frozen=True)
class AlphaRow:
    """One loss on one data set, averaged over the repeats.

    Parameters
    ----------
    dataset : str
        Name of the data set.
    alpha : float or None
        Constant of the convexified loss; None for the original loss, the cross-entropy.
    repeats : int
        Number of splits.
    shadows : int
        Shadow networks per alpha and split.
    train_accuracy, test_accuracy : float
        Accuracy on members and non-members.
    shadow_leakage, threshold_leakage : float or None
        TPR - FPR of the paper's attack and of the loss threshold; None if there was no attack.
    train_spread, test_spread, shadow_spread, threshold_spread : float or None
        Standard deviations over the repeats; None for a single one.
    """

    dataset: str
    alpha: float | None
    repeats: int
    shadows: int
    train_accuracy: float
    train_spread: float | None
    test_accuracy: float
    test_spread: float | None
    shadow_leakage: float | None = None
    shadow_spread: float | None = None
    threshold_leakage: float | None = None
    threshold_spread: float | None = None

    @property
    def gap(self) -> float:
        """Training accuracy minus test accuracy."""
        return self.train_accuracy - self.test_accuracy

    def to_json(self) -> dict[str, Any]:
        """Return all fields and the gap."""
        return asdict(self) | {"gap": self.gap}


def alpha_trials(
    names: Sequence[str],
    *,
    alphas: Sequence[float] = PAPER_GRID,
    repeats: int | None = None,
    seed: int = 0,
) -> list[Trial]:
    """Return one trial per data set, alpha and repeat, and one of the original loss per repeat.

    Parameters
    ----------
    names : sequence of str
        Names of registered data sets.
    alphas : sequence of float
        The values of alpha.
    repeats : int, optional
        Number of splits; by default 3 on the small data sets and 1 on images.
    seed : int
        Seed of the first split.

    Returns
    -------
    list of Trial

    Examples
    --------
    >>> len(alpha_trials(["location"], alphas=[1.0, 2.0], repeats=2))
    6
    """
    trials = []
    for name in names:
        sweep, source = _SWEEPS.get(name, _OTHERWISE), DataSource.of(name)
        attacks = ATTACKS if sweep.shadows else ()
        for repeat in range(sweep.repeats if repeats is None else repeats):
            groups = [
                Group(
                    source,
                    Effort(
                        dataset(name).records,
                        sweep.shadows,
                        alpha,
                        attack_epochs=sweep.attack_epochs,
                        attacks=attacks,
                    ),
                    repeat,
                    seed,
                )
                for alpha in alphas
            ]
            trials += [Trial(groups[0], "original"), *(Trial(group, "plain") for group in groups)]
    return trials


def alpha_rows(results: Mapping[Trial, Result]) -> list[AlphaRow]:
    """Average the results of `alpha_trials` over the repeats.

    Parameters
    ----------
    results : mapping of Trial to dict
        Results of finished trials.

    Returns
    -------
    list of AlphaRow
        By data set: the original loss, then the alphas in increasing order.
    """
    found: dict[tuple[str, float | None], list[tuple[Trial, Result]]] = {}
    for trial, result in results.items():
        alpha = None if trial.method == "original" else trial.group.effort.alpha
        found.setdefault((trial.group.source.title, alpha), []).append((trial, result))
    names = list(dict.fromkeys(name for name, _ in found))
    order = sorted(found, key=lambda key: (names.index(key[0]), key[1] or 0.0))
    return [_averaged(name, alpha, found[name, alpha]) for name, alpha in order]


def _averaged(name: str, alpha: float | None, trials: Sequence[tuple[Trial, Result]]) -> AlphaRow:
    results = [result for _, result in trials]
    train = Mean.of([result["train_accuracy"] for result in results])
    test = Mean.of([result["test_accuracy"] for result in results])
    leakages: list[Mean | None] = [
        Mean.of([result["attacks"][attack]["leakage"]["value"] for result in results])
        if all(attack in result["attacks"] for result in results)
        else None
        for attack in ATTACKS
    ]
    measured = [(None, None) if mean is None else (mean.value, mean.spread) for mean in leakages]
    return AlphaRow(
        name,
        alpha,
        len(results),
        trials[0][0].group.effort.shadows,
        train.value,
        train.spread,
        test.value,
        test.spread,
        *measured[0],
        *measured[1],
    )
