"""Audit an estimator on neighbouring training sets that are made to be told apart.

Differential privacy holds for every pair of neighbouring training sets, so an audit may choose them. On real records
one canary moves a release less than its noise is made for, and an audit sees little. The sets here let one record do
nearly as much as the proofs permit:

*Head, released weights.* One noisy step on four records; the canary's clipped gradient has a direction of its own.

*Head, answers per query.* Many records of class 0 in one direction, the canary of class 1 in another with cosine 0.3.
The records make the model sure of class 0 for the canary, so its gradient is long, but they hardly resist its pull
where they are not. The queries lie in the canary's direction, on the border of the two classes. The canary moves their
scores by about 0.75 of the certified bound.

*Teachers.* Every teacher gets one record; half of the teachers vote for class 0 wherever they are asked, half for class
1. The canary is put into the shard of one teacher and turns its vote on queries beside it, from a tie.

*DP-SGD.* A linear model, a small clipping norm, and one column that only the canary has: every step that samples the
canary adds a clipped gradient in the same direction. The adversary sees the weights after every step, which the
accountant covers; a run of fewer steps from the same seed is the beginning of a longer one. The statistics are how far
the weights moved in that direction in all, and the log-likelihood ratio of the moves of all steps, at the claimed noise
and at half of it (Nasr et al. 2023).

Answers are drawn as often as wanted from two trained models: their training has no noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quietmax.audit.distinguishing import Draw, distinguish
from quietmax.audit.noise_share import check_noise_share, estimator_with_share
from quietmax.audit.report import AuditReport
from quietmax.audit.training import TRAINING_CONFIDENCE, answer_draws
from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd.config import make_plan
from quietmax.estimators.dpsgd.estimator import network_guarantee
from quietmax.estimators.dpsgd.training import train_private_stack
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.teachers import Teachers, shard_of
from quietmax.models.features.tabular import Identity, UnitNorm
from quietmax.models.mlp import initial_mlp
from quietmax.models.stacked import Progress

WorstCase = Literal["head", "head-query", "teachers", "dpsgd"]
WORST_CASES: tuple[WorstCase, ...] = ("head", "head-query", "teachers", "dpsgd")
DEFAULT_SAMPLES: dict[WorstCase, int] = {
    "head": 6_000,
    "head-query": 100_000,
    "teachers": 100_000,
    "dpsgd": 10_000,
}
"""Trainings with, and as many without, the canary; for answers, draws of all answers of either model."""
TEACHERS = 20
DPSGD_SIZE, DPSGD_STEPS = 30, 4
_WORST_NORM, _NETWORKS_AT_ONCE = 4.0, 1024
_HEAD_RECORDS, _HEAD_COSINE, _HEAD_PULL = 4000, 0.3, 20.0


def audit_worst_case(
    estimator: WorstCase,
    *,
    epsilon: float = 1.0,
    delta: float = 1e-5,
    queries: int = 1,
    sampling_rate: float = 1.0,
    samples: int | None = None,
    noise_share: float = 1.0,
    confidence: float = TRAINING_CONFIDENCE,
    seed: int = 0,
    progress: Progress | None = None,
) -> AuditReport:
    """Audit an estimator on two neighbouring training sets that are made to be told apart.

    Parameters
    ----------
    estimator : {"head", "head-query", "teachers", "dpsgd"}
        What is audited: released weights of a `PrivateHead`, its answers per query, `Teachers`, or DP-SGD.
    epsilon, delta : float
        The budget of training and answers together.
    queries : int
        Answers per query and teachers: number of answers.
    sampling_rate : float
        DP-SGD: Poisson sampling rate; 1 for full batches.
    samples : int or None
        Number of trainings with, and as many without, the canary; for answers, draws of all answers of either model.
        None: `DEFAULT_SAMPLES`.
    noise_share : float
        Share of the noise that the claim requires; see `quietmax.audit.noise_share`. The claim stays.
    confidence : float
        The bound holds with at least this probability.
    seed : int
        Determines the training sets and the seeded noise.
    progress : callable or None
        Called with (trained, total).

    Returns
    -------
    AuditReport
        The lower bound beside the claim.

    Examples
    --------
    >>> audit_worst_case("teachers", epsilon=1.0, queries=4, noise_share=0.5, samples=20_000).verdict
    'refuted'
    """
    if estimator not in WORST_CASES:
        raise InvalidInput(f"estimator must be one of {', '.join(WORST_CASES)}; got {estimator!r}.")
    check_noise_share(noise_share)
    draws = DEFAULT_SAMPLES[estimator] if samples is None else samples
    if estimator == "head":
        without, inside, claimed = _head(epsilon, delta, noise_share, seed, 2 * draws, progress)
    elif estimator == "dpsgd":
        without, inside, claimed = _dpsgd(epsilon, delta, sampling_rate, noise_share, seed)
    else:
        sets = _head_answers if estimator == "head-query" else _teachers
        first, second, asked = sets(epsilon, delta, queries, seed)
        without, inside = answer_draws(first, second, asked, noise_share=noise_share, seed=seed)
        claimed = first.guarantee_
    return distinguish(
        without,
        inside,
        claimed,
        samples=draws,
        confidence=confidence,
        delta=delta,
        subject=f"{estimator}, worst case",
        details={"method": "worst case", "noise_share": noise_share},
    )


def _head(
    epsilon: float, delta: float, share: float, seed: int, total: int, progress: Progress | None
) -> tuple[Draw, Draw, Any]:
    """Train one noisy step on four records, without and with the canary; the release is all weights."""
    features, labels = np.eye(4, 2) + 0.1, np.array([0, 1, 0, 1])
    canary, canary_label = np.array([[0.0, 5.0]]), 0
    seeds: Iterator[int] = itertools.count(seed << 20)
    settings: dict[str, Any] = {
        "features": UnitNorm(),
        "classes": (0, 1),
        "declared_size": 4,
        "centring": 0.0,
        "steps": 1,
    }

    def head(state: int) -> PrivateHead:
        return PrivateHead(epsilon, delta, random_state=state % 2**32, **settings)

    reference = head(0).fit(features, labels)
    trained = 0

    def draws(X: NDArray[np.float64], y: NDArray[np.int64]) -> Draw:
        def draw(count: int) -> NDArray[np.float64]:
            nonlocal trained
            found = []
            for _ in range(count):
                chosen = estimator_with_share(reference, share).set_params(random_state=next(seeds) % 2**32)
                found.append(chosen.fit(X, y).coef_.ravel())
                trained += 1
                if progress is not None:
                    progress(trained, total)
            return np.stack(found)

        return draw

    return (
        draws(features, labels),
        draws(np.concatenate([features, canary]), np.append(labels, canary_label)),
        reference.guarantee_,
    )


def _head_answers(
    epsilon: float, delta: float, queries: int, seed: int
) -> tuple[PrivateHead, PrivateHead, NDArray[np.float32]]:
    """Train a head for answers per query without and with the canary, and return queries on the border."""
    features = np.tile(np.array([[1.0, 0.0]], np.float32), (_HEAD_RECORDS, 1))
    canary = np.array([[_HEAD_COSINE, np.sqrt(1 - _HEAD_COSINE**2)]], np.float32)
    labels = np.zeros(_HEAD_RECORDS, np.int64)

    def head() -> PrivateHead:
        return PrivateHead(
            epsilon,
            delta,
            release="query",
            queries=queries,
            features=Identity(),
            classes=(0, 1),
            declared_size=_HEAD_RECORDS,
            regularisation=_HEAD_PULL / _HEAD_RECORDS,
            random_state=seed,
        )

    # The constant feature, 0.2, pulls towards class 0 as much as these queries lean away from it.
    asked = np.array([[-0.04, 1.0]]) * (1 - 0.001 * np.arange(queries)[:, None])
    first = head().fit(features, labels)
    second = head().fit(np.concatenate([features, canary]), np.append(labels, 1))
    return first, second, asked.astype(np.float32)


def _teachers(
    epsilon: float, delta: float, queries: int, seed: int
) -> tuple[Teachers, Teachers, NDArray[np.float32]]:
    """Train teachers that are split evenly, without and with a canary that turns one of them."""

    def teachers() -> Teachers:
        return Teachers(
            epsilon,
            delta,
            queries,
            TEACHERS,
            classes=(0, 1),
            declared_size=TEACHERS,
            random_state=seed,
        )

    key = teachers()._key()
    generator = np.random.default_rng((0x7EAC, seed))

    def in_shard(start: list[float], label: int, shard: int) -> NDArray[np.float32]:
        """Return a record near a point that the key puts into a shard."""
        while True:
            row = np.array([*start, 0.01 * generator.random()], np.float32)
            if shard_of([row.tobytes() + b"%d" % label], TEACHERS, key)[0] == shard:
                return row

    labels = np.arange(TEACHERS) % 2
    features = np.stack([in_shard([1.0, 0.0], int(label), shard) for shard, label in enumerate(labels)])
    canary = in_shard([0.0, 1.0], 1, 0)[None]
    first = teachers().fit(features, labels)
    second = teachers().fit(np.concatenate([features, canary]), np.append(labels, 1))
    return first, second, (canary * (1 - 0.001 * np.arange(queries)[:, None])).astype(np.float32)


def _dpsgd(
    epsilon: float, delta: float, sampling_rate: float, share: float, seed: int
) -> tuple[Draw, Draw, Any]:
    """Train a linear model by DP-SGD, many at once; the canary differs from all records by a column of its own."""
    features = np.zeros((DPSGD_SIZE + 1, 5), np.float32)
    features[:-1, :4] = np.random.default_rng(0).random((DPSGD_SIZE, 4))
    features[-1, 4] = _WORST_NORM
    labels = (features[:, 0] >= features[:, 1]).astype(np.int64)
    planned = make_plan(
        DPSGD_SIZE,
        epsilon=epsilon,
        delta=delta,
        sampling_rate=sampling_rate,
        steps=DPSGD_STEPS,
        max_grad_norm=0.001,
        learning_rate=1.0,
        optimizer="sgd",
    )
    claimed = network_guarantee(
        planned, exact=False, own_module=False, size_declared=True, classes_declared=True
    )
    settings, taken = planned.settings, 0
    seen = _WORST_NORM / np.hypot(_WORST_NORM, 1.0)  # the rest of the canary's gradient is in the bias
    step = settings.learning_rate * settings.max_grad_norm / (settings.sampling_rate * DPSGD_SIZE)

    def moves(rows: NDArray[np.int64], seeds: list[int]) -> NDArray[np.float64]:
        """Return how far each step moved the weights of the canary's column, in units of the clipping norm."""
        iterates = [initial_mlp((5, 2), settings.activation, tuple(seeds)).kernels[0]]
        for steps in range(1, DPSGD_STEPS + 1):
            stack = train_private_stack(
                features,
                labels,
                2,
                [rows] * len(seeds),
                settings=replace(settings, steps=steps),
                noise_multipliers=[share * planned.noise_multiplier] * len(seeds),
                seeds=seeds,
                sizes=[DPSGD_SIZE] * len(seeds),
            )
            iterates.append(stack.kernels[0])
        column = np.stack([each[:, :, -1].double().numpy() for each in iterates])
        return np.asarray(np.diff(column[..., 1] - column[..., 0], axis=0).T / (np.sqrt(2.0) * step))

    def evidence(moved: NDArray[np.float64], sigma: float) -> NDArray[np.float64]:
        ratio = np.exp(seen * (2 * moved - seen) / (2 * sigma**2))
        return np.asarray(np.log1p(settings.sampling_rate * (ratio - 1)).sum(1))

    def draws(rows: NDArray[np.int64]) -> Draw:
        def draw(count: int) -> NDArray[np.float64]:
            nonlocal taken
            parts = []
            for start in range(0, count, _NETWORKS_AT_ONCE):
                networks = min(_NETWORKS_AT_ONCE, count - start)
                parts.append(moves(rows, [(seed << 32) + taken + place for place in range(networks)]))
                taken += networks
            moved = np.concatenate(parts)
            sigmas = (planned.noise_multiplier, planned.noise_multiplier / 2)
            return np.column_stack([moved.sum(1), *(evidence(moved, sigma) for sigma in sigmas)])

        return draw

    everything = np.arange(DPSGD_SIZE + 1)
    return draws(everything[:-1]), draws(everything), claimed
