"""RMIA: the robust membership-inference attack of Zarifzadeh, Liu and Shokri (2024).

A candidate x is compared with records z of the population that the target did not train on:
``LR(x, z) = (p(x|target)/p(x)) / (p(z|target)/p(z))``, ``p`` the probability of the true class. The score is the share
of the z with ``LR(x, z) >= gamma``. The normaliser ``p(x)`` is an average over reference networks. *Online*: the mean
of those with x inside and of those without, halved and added. *Offline*: ``((1+a)*mean_out + 1 - a)/2``, where the
offset ``a`` says how much training on a record lifts its probability. Population records are inside no reference
network of the online attack, so there ``p(z)`` is the mean outside, which shifts all scores alike.

Labels alone: ``p`` is 1 for a right label and 0 for a wrong one, and means are smoothed to ``(right + 1/2)/(n + 1)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quietmax.attacks import metrics as statistics
from quietmax.attacks.base import Attack, Fitted
from quietmax.attacks.lira import Mode
from quietmax.attacks.metrics import FLOOR, Floats, Labels, Released, Statistic, area, best_threshold
from quietmax.attacks.shadow_models import Design, Progress, Rows, ShadowPool, candidate_rows, leftover_rows
from quietmax.data.records import Split
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import Answers

Mask = NDArray[np.bool_]
OFFSETS = tuple(step / 10 for step in range(11))
"""Offsets tried on the shadow networks when none is given."""


@dataclass(frozen=True, eq=False)
class FittedRMIA(Fitted):
    """Logarithms of the normalisers of candidates, then population, in the order they are asked."""

    statistic: Statistic
    labels: Labels
    log_normalisers: Floats
    candidates: int
    gamma: float
    threshold: float
    notes: tuple[str, ...] = ()

    def scores(self, answers: Answers) -> Floats:
        """For each candidate the share of the population it dominates."""
        ratios = self.statistic(answers, self.labels) - self.log_normalisers
        population = ratios[self.candidates :] if len(ratios) > self.candidates else ratios
        return dominated(ratios[: self.candidates], population, self.gamma)


@dataclass(frozen=True)
class RMIA(Attack):
    """Pairwise likelihood ratios against ``population`` records that are no candidates; the target is asked them too.

    ``offset`` None: the one of `OFFSETS` that attacks the shadow networks best.
    """

    models: int = 32
    mode: Mode = "online"
    gamma: float = 2.0
    offset: float | None = None
    population: int = 2500

    @property
    def name(self) -> str:
        """``rmia``, or ``rmia-offline``."""
        return "rmia" if self.mode == "online" else "rmia-offline"

    def __post_init__(self) -> None:
        if self.mode not in ("online", "offline"):
            raise InvalidInput(
                f"mode is {self.mode!r}, but must be 'online' or 'offline'; choose one of them."
            )
        if not (math.isfinite(self.gamma) and self.gamma > 0) or self.population < 1:
            raise InvalidInput(
                f"gamma {self.gamma} and population {self.population} must be positive; try 2 and 2500."
            )
        if self.offset is not None and not 0 <= self.offset <= 1:
            raise InvalidInput(
                f"The offset is {self.offset}, but must be from 0 to 1; leave it out to tune it."
            )

    @property
    def designs(self) -> tuple[Design, ...]:
        """Online needs candidates inside; offline only needs networks without them."""
        return ("around",) if self.mode == "online" else ("outside", "around")

    def queried_rows(self, data: Split) -> Rows:
        """Candidates, then population records from what the split leaves over."""
        return np.concatenate([candidate_rows(data), leftover_rows(data, self.population, self.seed)])

    def fit(
        self,
        pool: ShadowPool,
        released: Released,
        progress: Progress | None = None,  # noqa: ARG002
    ) -> FittedRMIA:
        """Average the reference networks; tune offset and threshold by attacking each network with the others."""
        self.check_pool(pool)
        asked, candidates = self.queried_rows(pool.data), len(candidate_rows(pool.data))
        statistic = _log_correct if released == "labels" else statistics.log_probability
        on_asked = _Reference.of(pool, asked, statistic, released)
        on_reference = on_asked.part(slice(candidates))
        if pool.design == "outside":
            on_reference = _Reference.of(pool, pool.reference_rows, statistic, released)
        population = on_asked.part(slice(candidates, None)) if len(asked) > candidates else on_asked
        # Ratios of right labels seldom differ by as much as 2.
        gamma = 1.0 if released == "labels" else self.gamma
        offset = self._tuned(on_reference, population, gamma) if self.mode == "offline" else None
        log_normalisers = on_asked.log_normalisers(offset, leave_one_out=False)
        if np.isnan(log_normalisers[:candidates]).any():
            raise _too_few(pool.networks)
        notes = []
        if offset is not None and self.offset is None:
            notes.append(f"The offset a = {offset:g} attacks the shadow networks best.")
        if gamma != self.gamma:
            notes.append("Only labels are released, so gamma is 1.")
        if len(asked) == candidates:
            notes.append("No records are left over, so candidates are compared with each other.")
        return FittedRMIA(
            statistic,
            pool.data.records.labels[asked],
            log_normalisers,
            candidates,
            gamma,
            threshold=best_threshold(*_against_each(on_reference, population, offset, gamma)),
            notes=tuple(notes),
        )

    def _tuned(self, reference: _Reference, population: _Reference, gamma: float) -> float:
        """The offset with the best AUC when every shadow network in turn is the target."""
        if self.offset is not None:
            return self.offset
        areas = [area(*_against_each(reference, population, offset, gamma)).value for offset in OFFSETS]
        return OFFSETS[int(np.argmax(areas))]


@dataclass(frozen=True, eq=False)
class _Reference:
    """Log-probabilities the networks give some records' true classes, and who was inside; (networks, records)."""

    values: Floats
    inside: Mask
    smoothing: float

    @classmethod
    def of(cls, pool: ShadowPool, rows: Rows, statistic: Statistic, released: Released) -> _Reference:
        """Ask all networks of a pool."""
        smoothing = 0.5 if released == "labels" else 0.0
        return cls(pool.values(rows, statistic, released), pool.inside[:, rows], smoothing)

    def part(self, records: slice) -> _Reference:
        """Some of the records."""
        return _Reference(self.values[:, records], self.inside[:, records], self.smoothing)

    def ratios(self, offset: float | None) -> Floats:
        """``ln p(x|network) - ln p(x)`` for every network, ``p(x)`` from the others; NaN where there are none."""
        return self.values - self.log_normalisers(offset, leave_one_out=True)

    def log_normalisers(self, offset: float | None, *, leave_one_out: bool) -> Floats:
        """``ln p(x)``: offline with an offset, online without; NaN where no network tells."""
        outside = self._mean(~self.inside, leave_one_out)
        if offset is not None:
            return np.log(np.maximum(((1 + offset) * outside + 1 - offset) / 2, FLOOR))
        inside = np.where(self.inside.any(0), self._mean(self.inside, leave_one_out), outside)
        return np.log(np.maximum((inside + outside) / 2, FLOOR))

    def _mean(self, counted: Mask, leave_one_out: bool) -> Floats:
        values = np.where(counted, np.exp(self.values), 0.0)
        count, total = counted.sum(0), values.sum(0)
        if leave_one_out:
            # What subtraction leaves may fall below zero by rounding.
            count, total = count - counted, np.maximum(total - values, 0.0)
        mean = (total + self.smoothing) / np.maximum(count + 2 * self.smoothing, 1)
        return np.where(count > 0, mean, np.nan)


def dominated(ratios: Floats, population: Floats, gamma: float) -> Floats:
    """The share of the population's log-ratios r with ``ratio - r >= ln gamma``, for each ratio.

    Unknown (NaN) log-ratios of the population are passed over.

    >>> dominated(np.log([4.0, 1.0]), np.log([1.0, 3.0]), gamma=2.0).tolist()
    [0.5, 0.0]
    """
    others = np.sort(population[~np.isnan(population)])
    below = np.searchsorted(others, ratios - math.log(gamma), side="right")
    return below / max(len(others), 1)


def _against_each(
    reference: _Reference, population: _Reference, offset: float | None, gamma: float
) -> tuple[Floats, Floats]:
    """Scores of records inside and outside when every network in turn is the target and the others are references."""
    ratios, among = reference.ratios(offset), population.ratios(offset)
    scores = np.stack(
        [
            dominated(own, others[~seen], gamma)
            for own, others, seen in zip(ratios, among, population.inside, strict=True)
        ]
    )
    known = ~np.isnan(ratios)
    members, nonmembers = scores[known & reference.inside], scores[known & ~reference.inside]
    if not len(members) or not len(nonmembers):
        raise _too_few(len(ratios))
    return members, nonmembers


def _log_correct(answers: Answers, labels: Labels) -> Floats:
    """``ln 1`` for a right label, (nearly) ``ln 0`` for a wrong one."""
    return np.log(np.maximum(statistics.correct(answers, labels), FLOOR))


def _too_few(networks: int) -> InvalidInput:
    return InvalidInput(f"{networks} reference networks are too few for RMIA; give at least 8.")
