"""LiRA: the likelihood-ratio attack of Carlini et al. (2022), one query per candidate and no augmentation.

For every candidate, the log-odds of its true class are compared with the law they follow under networks that trained
on it and networks that did not. *Online*: ``ln N(v; mean_in, var_in) - ln N(v; mean_out, var_out)``. *Offline*, with no
network inside: ``(v - mean_out)/sd_out``, how far above its law outside. *Fixed* variance pools the records' variances
within in and within out networks, better with few networks; *per-example* variance needs a few dozen.

Labels alone carry one bit, whether the label is right; a Bernoulli law then takes the place of the Gaussian one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quietmax.attacks import metrics as statistics
from quietmax.attacks.base import Attack, Fitted
from quietmax.attacks.metrics import Floats, Labels, Released, Statistic, best_threshold
from quietmax.attacks.shadow_models import Design, Progress, ShadowPool, candidate_rows
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import Answers

Mode = Literal["online", "offline"]
Variance = Literal["fixed", "per-example"]
Mask = NDArray[np.bool_]

_SMALLEST_VARIANCE = 1e-6


class Distribution(ABC):
    """The law of one value per record, learned from some networks; ``known`` says where there were enough."""

    known: Mask

    @abstractmethod
    def log_density(self, values: Floats) -> Floats:
        """Logarithm of the density (or probability) of each record's value."""

    @abstractmethod
    def standing(self, values: Floats) -> Floats:
        """How far above its expectation each value lies, on a scale comparable between records."""


@dataclass(frozen=True, eq=False)
class GaussianDistribution(Distribution):
    """``N(mean, variance)`` for each record."""

    mean: Floats
    variance: Floats
    known: Mask

    def log_density(self, values: Floats) -> Floats:
        """``-(v - mean)^2/(2*variance) - ln(variance)/2``, without the constant."""
        return np.asarray(-((values - self.mean) ** 2) / (2 * self.variance) - np.log(self.variance) / 2)

    def standing(self, values: Floats) -> Floats:
        """``(v - mean)/sd``; Carlini et al.'s ``Pr[Z <= v]`` is its increasing function Phi."""
        return np.asarray((values - self.mean) / np.sqrt(self.variance))


@dataclass(frozen=True, eq=False)
class BernoulliDistribution(Distribution):
    """Probability of a right label for each record, smoothed to ``(right + 1/2)/(networks + 1)``."""

    probability: Floats
    known: Mask

    def log_density(self, values: Floats) -> Floats:
        """``ln p`` where the label is right, ``ln(1 - p)`` where it is wrong."""
        return np.where(values > 0.5, np.log(self.probability), np.log1p(-self.probability))

    def standing(self, values: Floats) -> Floats:
        """``right - p``."""
        return values - self.probability


def gaussian_distribution(
    values: Floats, counted: Mask, variance: Variance, *, leave_one_out: bool
) -> GaussianDistribution:
    """Fit each record's law to the values, shape (networks, records), of the networks ``counted``.

    With ``leave_one_out`` row j of the result, of shape (networks, records), leaves out network j; all rows come from
    the same sums.
    """
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
    """Fit each record's chance of a right label to the networks ``counted``; see `gaussian_law`."""
    right = np.where(counted, values, 0.0)
    count, total = counted.sum(0), right.sum(0)
    if leave_one_out:
        count, total = count - counted, total - right
    return BernoulliDistribution((total + 0.5) / (count + 1), count >= 1)


@dataclass(frozen=True, eq=False)
class FittedLiRA(Fitted):
    """The candidates' laws outside and, online, inside."""

    statistic: Statistic
    labels: Labels
    inside: Distribution | None
    outside: Distribution
    threshold: float
    notes: tuple[str, ...] = ()

    def scores(self, answers: Answers) -> Floats:
        """Log-likelihood ratio, or standing above the law outside."""
        return _scores(self.statistic(answers, self.labels), self.inside, self.outside)


@dataclass(frozen=True)
class LiRA(Attack):
    """Likelihood ratios from ``models`` reference networks."""

    models: int = 32
    mode: Mode = "online"
    variance: Variance = "fixed"

    @property
    def name(self) -> str:
        """``lira``, or ``lira-offline``."""
        return "lira" if self.mode == "online" else "lira-offline"

    def __post_init__(self) -> None:
        if self.mode not in ("online", "offline") or self.variance not in ("fixed", "per-example"):
            raise InvalidInput(
                f"mode {self.mode!r} and variance {self.variance!r} must be 'online' or 'offline', and 'fixed' or "
                "'per-example'; choose one of each."
            )

    @property
    def designs(self) -> tuple[Design, ...]:
        """Online needs candidates inside; offline only needs networks without them."""
        return ("around",) if self.mode == "online" else ("outside", "around")

    def fit(
        self,
        pool: ShadowPool,
        released: Released,
        progress: Progress | None = None,  # noqa: ARG002
    ) -> FittedLiRA:
        """Fit the laws of all candidates; choose the threshold by attacking each network with the others."""
        self.check_pool(pool)
        statistic = statistics.correct if released == "labels" else statistics.log_odds
        candidates = candidate_rows(pool.data)
        values, inside = pool.values(candidates, statistic, released), pool.inside[:, candidates]
        laws = self._distributions(values, inside, released, leave_one_out=False)
        if not all(law.known.all() for law in laws if law is not None):
            raise self._too_few(pool)
        rows = pool.reference_rows
        if pool.design == "outside":
            values, inside = pool.values(rows, statistic, released), pool.inside[:, rows]
        without = self._distributions(values, inside, released, leave_one_out=True)
        judged = _scores(values, *without)
        known = without[1].known if without[0] is None else without[0].known & without[1].known
        if not (known & inside).any() or not (known & ~inside).any():
            raise self._too_few(pool)
        return FittedLiRA(
            statistic,
            pool.data.records.labels[candidates],
            *laws,
            threshold=best_threshold(judged[known & inside], judged[known & ~inside]),
        )

    def _distributions(
        self, values: Floats, inside: Mask, released: Released, *, leave_one_out: bool
    ) -> tuple[Distribution | None, Distribution]:
        """The laws inside (online only) and outside."""

        def law(counted: Mask) -> Distribution:
            if released == "labels":
                return bernoulli_distribution(values, counted, leave_one_out=leave_one_out)
            return gaussian_distribution(values, counted, self.variance, leave_one_out=leave_one_out)

        return (law(inside) if self.mode == "online" else None), law(~inside)

    def _too_few(self, pool: ShadowPool) -> InvalidInput:
        return InvalidInput(
            f"{pool.networks} reference networks are too few for {self.mode} LiRA with {self.variance} variance; "
            "give at least 8."
        )


def _scores(values: Floats, inside: Distribution | None, outside: Distribution) -> Floats:
    if inside is None:
        return outside.standing(values)
    return inside.log_density(values) - outside.log_density(values)
