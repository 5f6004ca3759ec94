"""RMIA: the robust membership-inference attack of Zarifzadeh, Liu and Shokri (2024).

A candidate x is compared with records z of the population that the target did not train on:
``LR(x, z) = (p(x|target)/p(x)) / (p(z|target)/p(z))``, ``p`` the probability of the true class. The score is the share
of the z with ``LR(x, z) >= gamma``. The normaliser ``p(x)`` is an average over reference networks. *Online*: half of
the mean over networks that trained on x plus half of the mean over those that did not. *Offline*:
``((1+a)*mean_out + 1 - a)/2``, where the offset ``a`` says how much training on a record raises its probability. No
reference network of the online attack trained on population records, so there ``p(z)`` is the mean over non-members,
which shifts all scores alike.

Labels only: ``p`` is 1 for a correct label and 0 for a wrong one, and means are smoothed to
``(correct + 1/2)/(n + 1)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quietmax.attacks import metrics
from quietmax.attacks.base import Attack, FittedAttack
from quietmax.attacks.lira import Mode
from quietmax.attacks.metrics import SMALLEST_PROBABILITY, Floats, Labels, Released, Statistic
from quietmax.attacks.shadow_models import Design, Rows, ShadowPool, Units, candidate_rows, leftover_rows
from quietmax.data.records import Split
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import Answers
from quietmax.models.stacked import Progress

Mask = NDArray[np.bool_]
OFFSETS = tuple(step / 10 for step in range(11))
"""Offsets tried on the shadow networks if none is given."""


@dataclass(frozen=True)
class RMIA(Attack):
    """Pairwise likelihood ratios against population records, for which the target is queried too.

    Parameters
    ----------
    models : int
        Number of reference networks, at least 8 in practice; with a holdout of 0.2 at least 10, as in `LiRA`.
    seed : int
        Determines the reference networks and the population.
    mode : {"online", "offline"}
        Whether networks that trained on the candidates are used.
    gamma : float
        How much larger the ratio of a candidate must be than that of a population record.
    offset : float or None
        The offset ``a`` of the offline attack, from 0 to 1. None: the one of `OFFSETS` with the best AUC on the shadow
        networks.
    population : int
        Number of population records. They are chosen from the pool: the records that the split leaves over, or a table
        of other people (`with_shadow_data`). Without a pool, candidates are compared with each other.

    Examples
    --------
    >>> RMIA(mode="offline").name
    'rmia-offline'
    """

    models: int = 32
    mode: Mode = "online"
    gamma: float = 2.0
    offset: float | None = None
    population: int = 2500

    @property
    def name(self) -> str:
        """``rmia`` or ``rmia-offline``."""
        return "rmia" if self.mode == "online" else "rmia-offline"

    def __post_init__(self) -> None:
        if self.mode not in ("online", "offline"):
            raise InvalidInput(f"mode must be 'online' or 'offline', got {self.mode!r}.")
        if not (math.isfinite(self.gamma) and self.gamma > 0):
            raise InvalidInput(f"gamma must be positive and finite, got {self.gamma}.")
        if self.population < 1:
            raise InvalidInput(f"population must be at least 1, got {self.population}.")
        if self.offset is not None and not 0 <= self.offset <= 1:
            raise InvalidInput(f"offset must be from 0 to 1, or None to tune it, got {self.offset}.")

    @property
    def designs(self) -> tuple[Design, ...]:
        """Online needs networks that trained on candidates; offline does not."""
        return ("overlapping",) if self.mode == "online" else ("disjoint", "overlapping")

    def queried_rows(self, data: Split) -> Rows:
        """Return the candidates of ``data``, then the population records."""
        return np.concatenate([candidate_rows(data), leftover_rows(data, self.population, self.seed)])

    def fit(
        self,
        pool: ShadowPool,
        released: Released,
        progress: Progress | None = None,  # noqa: ARG002
    ) -> FittedRMIA:
        """Average the reference networks; tune offset and threshold by attacking each network with the others.

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
        FittedRMIA
            The normalisers and the threshold.

        Raises
        ------
        InvalidInput
            If there are too few networks.
        """
        self.check_pool(pool)
        queried, candidates = self.queried_rows(pool.data), len(candidate_rows(pool.data))
        statistic = _log_correct if released == "labels" else metrics.log_probability
        on_queried = _Reference.of(pool, queried, statistic, released)
        on_reference, units = on_queried.part(slice(candidates)), pool.units(pool.reference_rows)
        if pool.design == "disjoint":
            on_reference = _Reference.of(pool, pool.reference_rows, statistic, released)
        population = on_queried.part(slice(candidates, None)) if len(queried) > candidates else None
        # Ratios of correct labels seldom differ by as much as 2.
        gamma = 1.0 if released == "labels" else self.gamma
        offset = self._tuned(on_reference, units, population, gamma) if self.mode == "offline" else None
        log_normalisers = on_queried.log_normalisers(offset, leave_one_out=False)
        if np.isnan(log_normalisers[:candidates]).any():
            raise _too_few(pool.networks)
        notes = []
        if offset is not None and self.offset is None:
            notes.append(f"The offset a = {offset:g} has the best AUC on the shadow networks.")
        if gamma != self.gamma:
            notes.append("The target releases labels only: gamma is 1.")
        if len(queried) == candidates:
            notes.append("No records are left over: candidates are compared with each other.")
        return FittedRMIA(
            statistic,
            pool.data.records.labels[queried],
            log_normalisers,
            candidates,
            gamma,
            threshold=metrics.best_threshold(*_against_each(on_reference, units, population, offset, gamma)),
            notes=tuple(notes),
        )

    def _tuned(
        self, reference: _Reference, units: Units, population: _Reference | None, gamma: float
    ) -> float:
        """Return the offset with the best AUC when every shadow network in turn is the target."""
        if self.offset is not None:
            return self.offset
        aucs = [
            metrics.auc(*_against_each(reference, units, population, offset, gamma)).value
            for offset in OFFSETS
        ]
        return OFFSETS[int(np.argmax(aucs))]


@dataclass(frozen=True, eq=False)
class FittedRMIA(FittedAttack):
    """Logarithms of the normalisers of candidates, then population, in the order of the queries."""

    statistic: Statistic
    labels: Labels
    log_normalisers: Floats
    candidates: int
    gamma: float
    threshold: float
    notes: tuple[str, ...] = ()

    def scores(self, answers: Answers) -> Floats:
        """Return for each candidate in ``answers`` the share of the population that it dominates."""
        ratios = self.statistic(answers, self.labels) - self.log_normalisers
        population = ratios[self.candidates :] if len(ratios) > self.candidates else ratios
        return dominated(ratios[: self.candidates], population, self.gamma)


@dataclass(frozen=True, eq=False)
class _Reference:
    """Log-probabilities of some records' true classes and who trained on them, shape (networks, records)."""

    values: Floats
    inside: Mask
    smoothing: float

    @classmethod
    def of(cls, pool: ShadowPool, rows: Rows, statistic: Statistic, released: Released) -> _Reference:
        """Query all networks of a pool."""
        smoothing = 0.5 if released == "labels" else 0.0
        return cls(pool.values(rows, statistic, released), pool.inside[:, rows], smoothing)

    def part(self, records: slice) -> _Reference:
        """Select some of the records."""
        return _Reference(self.values[:, records], self.inside[:, records], self.smoothing)

    def ratios(self, offset: float | None) -> Floats:
        """Return ``ln p(x|network) - ln p(x)`` for every network, ``p(x)`` from the others; NaN where it is unknown."""
        return self.values - self.log_normalisers(offset, leave_one_out=True)

    def log_normalisers(self, offset: float | None, *, leave_one_out: bool) -> Floats:
        """Return ``ln p(x)``: offline with an offset, online without; NaN where no network gives a value."""
        outside = self._mean(~self.inside, leave_one_out)
        if offset is not None:
            return np.log(np.maximum(((1 + offset) * outside + 1 - offset) / 2, SMALLEST_PROBABILITY))
        inside = np.where(self.inside.any(0), self._mean(self.inside, leave_one_out), outside)
        return np.log(np.maximum((inside + outside) / 2, SMALLEST_PROBABILITY))

    def _mean(self, counted: Mask, leave_one_out: bool) -> Floats:
        values = np.where(counted, np.exp(self.values), 0.0)
        count, total = counted.sum(0), values.sum(0)
        if leave_one_out:
            # Rounding may take the difference below zero.
            count, total = count - counted, np.maximum(total - values, 0.0)
        mean = (total + self.smoothing) / np.maximum(count + 2 * self.smoothing, 1)
        return np.where(count > 0, mean, np.nan)


def dominated(ratios: Floats, population: Floats, gamma: float) -> Floats:
    """Return for each log-ratio the share of the population's log-ratios r with ``ratio - r >= ln gamma``."""
    others = np.sort(population[~np.isnan(population)])
    below = np.searchsorted(others, ratios - math.log(gamma), side="right")
    return below / max(len(others), 1)


def _against_each(
    reference: _Reference, units: Units, population: _Reference | None, offset: float | None, gamma: float
) -> tuple[Floats, Floats]:
    """Score members and non-members when every network in turn is the target and the others are references.

    As with the target, the population are records that the network did not train on, or without any population the
    records of ``reference`` themselves.
    """
    ratios = reference.ratios(offset)
    among = ratios
    if population is not None:
        among = np.where(population.inside, np.nan, population.ratios(offset))
    scores = np.stack([dominated(own, others, gamma) for own, others in zip(ratios, among, strict=True)])
    scores, known, inside = units.means(scores), units.all(~np.isnan(ratios)), units.all(reference.inside)
    members, nonmembers = scores[known & inside], scores[known & ~inside]
    if not len(members) or not len(nonmembers):
        raise _too_few(len(ratios))
    return members, nonmembers


def _log_correct(answers: Answers, labels: Labels) -> Floats:
    """Return ``ln 1`` for a correct label, (nearly) ``ln 0`` for a wrong one."""
    return np.log(np.maximum(metrics.correct(answers, labels), SMALLEST_PROBABILITY))


def _too_few(networks: int) -> InvalidInput:
    return InvalidInput(
        f"{networks} reference networks are too few for RMIA; at least 8 are recommended, and at least 2 divided by "
        "the holdout's share."
    )
