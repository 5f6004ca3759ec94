"""LiRA: the likelihood-ratio attack of Carlini et al. (2022), with one query per candidate and no augmentation.

For every candidate, the log-odds v of its true class are compared with their distribution over networks that trained on
the candidate and over networks that did not. *Online*: ``ln N(v; mean_in, var_in) - ln N(v; mean_out, var_out)``.
*Offline*, without networks that trained on the candidate: ``(v - mean_out)/sd_out``. *Fixed* variance pools the
variances of all records, which is better with few networks; *per-example* variance needs a few dozen.

A label alone carries one bit: whether it is correct. A Bernoulli distribution then replaces the Gaussian.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quietmax.attacks import metrics
from quietmax.attacks.base import Attack, FittedAttack
from quietmax.attacks.metrics import Floats, Labels, Released, Statistic
from quietmax.attacks.shadow_models import Design, ShadowPool, candidate_rows, folds
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import Answers
from quietmax.models.stacked import Progress

Mode = Literal["online", "offline"]
Variance = Literal["fixed", "per-example"]
Mask = NDArray[np.bool_]

_SMALLEST_VARIANCE = 1e-6


@dataclass(frozen=True)
class LiRA(Attack):
    """Compare each answer with its distributions over reference networks.

    Parameters
    ----------
    models : int
        Number of reference networks, at least 8 in practice. Every candidate must be outside some of them, and online
        inside some: with a holdout of 0.2 a network leaves out one candidate in five, so take at least 10.
    seed : int
        Determines the reference networks.
    mode : {"online", "offline"}
        Whether networks that trained on the candidates are used.
    variance : {"fixed", "per-example"}
        Whether all records share one variance.

    Examples
    --------
    >>> LiRA(models=16, mode="offline").name
    'lira-offline'
    """

    models: int = 32
    mode: Mode = "online"
    variance: Variance = "fixed"

    @property
    def name(self) -> str:
        """``lira`` or ``lira-offline``."""
        return "lira" if self.mode == "online" else "lira-offline"

    def __post_init__(self) -> None:
        if self.mode not in ("online", "offline"):
            raise InvalidInput(f"mode must be 'online' or 'offline', got {self.mode!r}.")
        if self.variance not in ("fixed", "per-example"):
            raise InvalidInput(f"variance must be 'fixed' or 'per-example', got {self.variance!r}.")

    @property
    def designs(self) -> tuple[Design, ...]:
        """Online needs networks that trained on candidates; offline does not."""
        return ("overlapping",) if self.mode == "online" else ("disjoint", "overlapping")

    def fit(
        self,
        pool: ShadowPool,
        released: Released,
        progress: Progress | None = None,  # noqa: ARG002
    ) -> FittedLiRA:
        """Fit the distributions of all candidates; choose the threshold by attacking each network with the others.

        Parameters
        ----------
        pool : ShadowPool
            The reference networks.
        released : {"probabilities", "labels"}
            What the target releases.
        progress : callable or None
            Not used.

        Returns
        -------
        FittedLiRA
            The distributions and the threshold.

        Raises
        ------
        InvalidInput
            If there are too few networks.
        """
        self.check_pool(pool)
        statistic = metrics.correct if released == "labels" else metrics.log_odds
        candidates = candidate_rows(pool.data)
        values, inside = pool.values(candidates, statistic, released), pool.inside[:, candidates]
        members, nonmembers = self._distributions(values, inside, released, leave_one_out=False)
        if not nonmembers.known.all() or (members is not None and not members.known.all()):
            raise self._too_few(pool)
        rows = pool.reference_rows
        if pool.design == "disjoint":
            values, inside = pool.values(rows, statistic, released), pool.inside[:, rows]
        without = self._distributions(values, inside, released, leave_one_out=True)
        known = without[1].known if without[0] is None else without[0].known & without[1].known
        units = pool.units(rows)
        judged, known, inside = units.means(_scores(values, *without)), units.all(known), units.all(inside)
        if not (known & inside).any() or not (known & ~inside).any():
            raise self._too_few(pool)
        return FittedLiRA(
            statistic,
            pool.data.records.labels[candidates],
            members,
            nonmembers,
            threshold=metrics.best_threshold(judged[known & inside], judged[known & ~inside]),
        )

    def _distributions(
        self, values: Floats, inside: Mask, released: Released, *, leave_one_out: bool
    ) -> tuple[Distribution | None, Distribution]:
        """Fit the distributions over members (online only) and over non-members."""

        def fitted(counted: Mask) -> Distribution:
            if released == "labels":
                return bernoulli_distribution(values, counted, leave_one_out=leave_one_out)
            return gaussian_distribution(values, counted, self.variance, leave_one_out=leave_one_out)

        return (fitted(inside) if self.mode == "online" else None), fitted(~inside)

    def _too_few(self, pool: ShadowPool) -> InvalidInput:
        return InvalidInput(
            f"{pool.networks} reference networks are too few for {self.mode} LiRA with {self.variance} variance; at "
            f"least {max(8, 2 * folds(pool.data))} are recommended."
        )


@dataclass(frozen=True, eq=False)
class FittedLiRA(FittedAttack):
    """Distributions of the candidates' values over non-members and, online, over members."""

    statistic: Statistic
    labels: Labels
    members: Distribution | None
    nonmembers: Distribution
    threshold: float
    notes: tuple[str, ...] = ()

    def scores(self, answers: Answers) -> Floats:
        """Return the log-likelihood ratio of ``answers``; offline, their standardised distance to non-members."""
        return _scores(self.statistic(answers, self.labels), self.members, self.nonmembers)


class Distribution(ABC):
    """The distribution of one value per record over some networks."""

    known: Mask  # Where there were enough networks to fit it

    @abstractmethod
    def log_density(self, values: Floats) -> Floats:
        """Return the logarithm of the density (or probability) of ``values``."""

    @abstractmethod
    def deviation(self, values: Floats) -> Floats:
        """Return how far ``values`` lie above their expectation, on a scale comparable between records."""


@dataclass(frozen=True, eq=False)
class GaussianDistribution(Distribution):
    """``N(mean, variance)`` for each record."""

    mean: Floats
    variance: Floats
    known: Mask

    def log_density(self, values: Floats) -> Floats:
        """Return ``-(v - mean)^2/(2*variance) - ln(variance)/2`` of ``values``, without the constant."""
        return np.asarray(-((values - self.mean) ** 2) / (2 * self.variance) - np.log(self.variance) / 2)

    def deviation(self, values: Floats) -> Floats:
        """Return ``(v - mean)/sd`` of ``values``; Carlini et al.'s ``Pr[Z <= v]`` is its increasing function Phi."""
        return np.asarray((values - self.mean) / np.sqrt(self.variance))


@dataclass(frozen=True, eq=False)
class BernoulliDistribution(Distribution):
    """The probability of a correct label for each record, smoothed to ``(correct + 1/2)/(networks + 1)``."""

    probability: Floats
    known: Mask

    def log_density(self, values: Floats) -> Floats:
        """Return ``ln p`` where ``values`` are 1 (a correct label), else ``ln(1 - p)``."""
        return np.where(values > 0.5, np.log(self.probability), np.log1p(-self.probability))

    def deviation(self, values: Floats) -> Floats:
        """Return ``values - p``."""
        return values - self.probability


def gaussian_distribution(
    values: Floats, counted: Mask, variance: Variance, *, leave_one_out: bool
) -> GaussianDistribution:
    """Fit a Gaussian to each record's values."""
    centre = values.mean(0)
    deviations = np.where(counted, values - centre, 0.0)
    count, first, second = counted.sum(0), deviations.sum(0), (deviations**2).sum(0)
    if leave_one_out:
        count, first, second = count - counted, first - deviations, second - deviations**2
    mean = first / np.maximum(count, 1)
    squares = np.maximum(second - count * mean**2, 0.0)
    freedom = np.maximum(count - 1, 0)
    if variance == "fixed":
        spread = np.broadcast_to(
            squares.sum(-1, keepdims=True) / np.maximum(freedom.sum(-1, keepdims=True), 1), mean.shape
        )
        enough = 1
    else:
        spread, enough = squares / np.maximum(freedom, 1), 2
    return GaussianDistribution(centre + mean, np.maximum(spread, _SMALLEST_VARIANCE), count >= enough)


def bernoulli_distribution(values: Floats, counted: Mask, *, leave_one_out: bool) -> BernoulliDistribution:
    """Fit the probability of a correct label to ``values`` of 0 and 1.

    ``counted`` and ``leave_one_out`` are those of `gaussian_distribution`.
    """
    right = np.where(counted, values, 0.0)
    count, total = counted.sum(0), right.sum(0)
    if leave_one_out:
        count, total = count - counted, total - right
    return BernoulliDistribution((total + 0.5) / (count + 1), count >= 1)


def _scores(values: Floats, members: Distribution | None, nonmembers: Distribution) -> Floats:
    """Return log-likelihood ratios; without a distribution over members, deviations from non-members."""
    if members is None:
        return nonmembers.deviation(values)
    return members.log_density(values) - nonmembers.log_density(values)
