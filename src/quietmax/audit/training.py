"""The guessing game of a one-run audit: how many correct guesses about canaries a private training run permits.

Each of m canaries is put into the training set by a fair coin. From the trained model the auditor says of r of them
whether they were in, and abstains on the rest; r is fixed beforehand. If v guesses are right, what follows?

*Epsilon and delta.* Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", arXiv:2305.08846v1,
Corollary 5.4: under (epsilon, delta)-privacy, with W binomial with r trials and success ``q = 1/(1 + exp(-epsilon))``,

    P[at least v right] <= P[W >= v] + 2*m*delta * max_{i >= 1} P[v > W >= v - i] / i.

*Mu.* Pairs (epsilon, delta) waste most of what a Gaussian release lets one see, so mu is bounded directly, by
the idea of Mahloujifar, Melis and Chaudhuri, "Auditing f-Differential Privacy in One Run", arXiv:2410.22235. Let N
be the number of right guesses and J one of the m canaries at random. Flipping J's coin turns a right guess about J
into a wrong one and leaves the other guesses alone. Write ``R_k = P[J guessed right, N >= k]``, ``H_k = P[J guessed
wrong, N >= k]``, and ``F(x) = Phi(Phi^-1(x) + mu)`` for the largest probability that an event of probability x can
have in the neighbouring world. Then

    R_k <= F(H_{k-1})   for all k,

where averaging over J and the other coins is Jensen's inequality, F being concave. ``p_i = P[N = i]`` adds
``i*p_i/m`` to R and ``(r-i)*p_i/m`` to H, and everything must add up to ``R_0 + H_0 = r/m``. Suppose ``P[N >= v] =
t``. Putting all of t on N = v and then, from v-1 down to 0, adding no more mass than the inequality for k = i+1
demands, uses the least total: if p' is another solution, then ``R'_i >= R_i`` and ``R'_i - R_i >= i/(r-i) *
(H'_i - H_i)`` hold at i = v and carry over from i+1 to i. If even this needs more than r/m, then P[N >= v] < t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from quietmax.accounting.costs import Cost
from quietmax.accounting.guarantee import Guarantee
from quietmax.audit.bounds import checked_confidence
from quietmax.audit.distinguishing import Draw, distinguish
from quietmax.audit.report import AuditReport, Claim
from quietmax.data.records import Records
from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd.config import PrivateSettings
from quietmax.estimators.dpsgd.training import train_private_stack
from quietmax.models.mlp import initial_mlp
from quietmax.models.stacked import TrainingSettings, train_stack

_LARGEST_EPSILON = 64.0
_LARGEST_MU = 32.0
_SCANNED = 129
_ROUNDS = 5
_GRID = 65


def tail_under_epsilon(canaries: int, guesses: int, right: int, epsilon: float, delta: float = 0.0) -> float:
    """The largest probability of ``right`` or more right guesses under (epsilon, delta)-privacy: a p-value.

    >>> round(tail_under_epsilon(100, 100, 75, np.log(3)), 3)
    0.553
    """
    _check(canaries, guesses, right)
    if not (epsilon >= 0 and 0 <= delta <= 1):
        raise InvalidInput(
            f"epsilon {epsilon} and delta {delta} must be at least 0, and delta at most 1; give such numbers."
        )
    share = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, share))
    if delta > 0 and right > 0:
        below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, share))
        tail += 2 * canaries * delta * float((below / np.arange(1, right + 1)).max())
    return min(tail, 1.0)


def epsilon_lower_bound(
    canaries: int, guesses: int, right: int, *, delta: float = 0.0, confidence: float
) -> float:
    """The largest epsilon such that it and all smaller ones are rejected; 0 if none is.

    >>> round(epsilon_lower_bound(1000, 100, 75, delta=1e-4, confidence=0.95), 3)
    0.673
    """
    error = 1 - checked_confidence(confidence)

    def rejected(epsilon: float) -> bool:
        return tail_under_epsilon(canaries, guesses, right, epsilon, delta) <= error

    # The tail need not grow with epsilon where delta counts: look for the first epsilon that is not rejected. The last
    # one is not: there a guess is right with probability 1 in floating point, and the tail is 1.
    scanned = np.linspace(0.0, _LARGEST_EPSILON, _SCANNED)
    first = next(place for place, epsilon in enumerate(scanned) if not rejected(epsilon))
    return 0.0 if first == 0 else _bisected(rejected, float(scanned[first - 1]), float(scanned[first]))


def mu_lower_bound(
    canaries: int, guesses: int, right: int, *, extra_delta: float = 0.0, confidence: float
) -> float:
    """The largest mu that is rejected: under it, ``right`` or more right guesses are rarer than ``1 - confidence``.

    ``extra_delta`` is a probability with which the release may do anything: ``F(x) + extra_delta`` instead of F.

    >>> round(mu_lower_bound(1000, 100, 90, confidence=0.95), 2)
    0.6
    """
    _check(canaries, guesses, right)
    error = 1 - checked_confidence(confidence)
    low, high = 0.0, _LARGEST_MU
    for _ in range(_ROUNDS):
        grid = np.linspace(low, high, _GRID)
        rejected = _mass_needed(grid, canaries, guesses, right, extra_delta, error) > guesses / canaries
        count = int(np.count_nonzero(np.logical_and.accumulate(rejected)))
        if count == 0:
            return 0.0
        if count == _GRID:
            return high
        low, high = float(grid[count - 1]), float(grid[count])
    return low


def _mass_needed(
    mus: NDArray[np.float64], canaries: int, guesses: int, right: int, extra_delta: float, tail: float
) -> NDArray[np.float64]:
    """``R_0 + H_0`` of the cheapest law with ``P[N >= right] = tail``, for each mu; see the module."""
    correct = np.full(len(mus), tail * right / canaries)
    wrong = np.full(len(mus), tail * (guesses - right) / canaries)
    for index in range(right - 1, -1, -1):
        # H_i >= F^-1(R_{i+1}), and mass is only ever added
        demanded = ndtr(ndtri(np.clip(correct - extra_delta, 0.0, 1.0)) - mus)
        added = np.maximum(demanded - wrong, 0.0)
        wrong = wrong + added
        correct = correct + added * (index / (guesses - index))
        if index % 64 == 0 and (correct + wrong > guesses / canaries).all():
            break
    return np.asarray(correct + wrong)


def _bisected(rejected: Callable[[float], bool], low: float, high: float) -> float:
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low


def _check(canaries: int, guesses: int, right: int) -> None:
    if not 0 <= right <= guesses <= canaries or guesses < 1:
        raise InvalidInput(
            f"{right} right of {guesses} guesses about {canaries} canaries is impossible; need at least one guess, "
            "no more right than guessed and no more guessed than canaries; count again."
        )


Floats = NDArray[np.float64]
Trained = TypeVar("Trained")
Fit = Callable[[NDArray[np.float32], NDArray[np.int64]], Trained]
Score = Callable[[Trained, NDArray[np.float32], NDArray[np.int64]], NDArray[Any]]
Progress = Callable[[int, int], None]

CONFIDENCE = 0.99
"""Of an audit of training, unless another is asked for: canaries and trainings are few, draws of a mechanism many."""
GUESSED_SHARES = (0.02, 0.1, 0.25, 0.5, 1.0)
"""Of the canaries, how many to guess about: the surest ones first; each share is an attempt that is paid for."""


class _Predicts(Protocol):
    def predict(self, features: NDArray[np.float32]) -> NDArray[Any]: ...


def label_score(model: _Predicts, features: NDArray[np.float32], labels: NDArray[np.int64]) -> Floats:
    """How much the model believes in each label: ``ln p[label]`` if it releases probabilities, else right or wrong.

    The model's classes must be the whole numbers from 0, as in encoded records.
    """
    try:
        # An estimator that releases labels only has no such method, or refuses at the call.
        probabilities = np.asarray(model.predict_proba(features))  # type: ignore[attr-defined]
    except (AttributeError, InvalidInput):
        return np.asarray(np.asarray(model.predict(features)) == labels, dtype=np.float64)
    return np.asarray(np.log(np.maximum(probabilities[np.arange(len(labels)), labels], 1e-300)))


def one_run(
    fit: Fit[Trained],
    score: Score[Trained],
    records: Records,
    canaries: Records,
    claimed: Guarantee | Cost | None = None,
    *,
    shares: Sequence[float] = GUESSED_SHARES,
    confidence: float = CONFIDENCE,
    delta: float = 1e-5,
    seed: int = 0,
    subject: str = "training",
) -> AuditReport:
    """Train once on ``records`` and a random half of ``canaries``; guess by ``score`` which ones were in.

    ``fit(features, labels)`` trains; ``score(model, features, labels)`` gives one number per canary, larger for those
    believed to be in. Of the share guessed about, the upper half is said to be in, the lower half out. Bounds:
    `quietmax.audit.training`; each share is tested with its part of the permitted error, so the best may be reported.
    Without ``claimed``, the trained model's own ``guarantee_`` is tested.
    """
    checked_confidence(confidence)
    count = len(canaries)
    if count < 2 or not shares or any(not 0 < share <= 1 for share in shares):
        raise InvalidInput(
            f"{count} canaries and shares {tuple(shares)} make no game; give at least 2 canaries and shares in (0, 1]."
        )
    generator = np.random.default_rng((0xCA7A51, seed))
    inside = generator.random(count) < 0.5
    model = fit(*_joined(records, canaries.take(inside)))
    claim = Claim.of(_claimed(model, claimed))
    scores = np.asarray(score(model, canaries.features, canaries.labels), dtype=np.float64)
    if scores.shape != (count,) or np.isnan(scores).any():
        raise InvalidInput(
            f"The scores have shape {scores.shape} or hold NaN, but must be {count} numbers, one per canary; correct "
            "the score."
        )
    # Sorted by score, ties in random order: what is said of equal scores must not depend on the order of canaries.
    order = np.lexsort((generator.random(count), scores))
    sides = sorted({max(1, int(share * count) // 2) for share in shares})
    part = 1 - (1 - confidence) / len(sides)
    games = [_game(claim, inside[order], side, part, delta) for side in sides]
    best = max(games, key=lambda game: game["lower_bound"])
    epsilon = max(game["epsilon_lower_bound"] for game in games)
    return AuditReport(
        subject=subject,
        definition=claim.definition,
        claimed=claim.amount,
        lower_bound=best["lower_bound"],
        confidence=confidence,
        evidence=f"{best['right']:,} of {best['guesses']:,} guesses about canaries were right",
        samples=count,
        delta=claim.delta(delta),
        epsilon_claimed=claim.epsilon(delta),
        epsilon_lower_bound=epsilon,
        details={
            "method": "one run",
            "records": len(records),
            "canaries_inside": int(inside.sum()),
            "games": games,
        },
    )


def _game(
    claim: Claim, inside: NDArray[np.bool_], side: int, confidence: float, delta: float
) -> dict[str, Any]:
    """Guess about the ``side`` lowest and as many highest scores, and bound."""
    canaries, guesses = len(inside), 2 * side
    right = int((~inside[:side]).sum() + inside[canaries - side :].sum())
    epsilon = epsilon_lower_bound(canaries, guesses, right, delta=claim.delta(delta), confidence=confidence)
    bound = epsilon
    if claim.parameter == "mu":
        bound = mu_lower_bound(canaries, guesses, right, extra_delta=claim.extra_delta, confidence=confidence)
    return {"guesses": guesses, "right": right, "lower_bound": bound, "epsilon_lower_bound": epsilon}


def repeated(
    fit: Fit[Trained],
    score: Score[Trained],
    records: Records,
    canary: Records,
    claimed: Guarantee | Cost | None = None,
    *,
    times: int = 500,
    confidence: float = CONFIDENCE,
    delta: float = 1e-5,
    subject: str = "training",
    progress: Progress | None = None,
) -> AuditReport:
    """Train ``times`` with and ``times`` without the one record ``canary``, and tell the two apart.

    ``fit`` must draw fresh randomness at every call. ``score(model, features, labels)`` gives what the adversary looks
    at: one or more numbers per model, such as the released weights or the canary's loss. Without ``claimed``, a trained
    model's own ``guarantee_`` is tested.
    """
    _single(canary)
    trained = 0

    def draws(features: NDArray[np.float32], labels: NDArray[np.int64]) -> Draw:
        def draw(count: int) -> Floats:
            nonlocal trained
            found = []
            for _ in range(count):
                found.append(
                    np.asarray(
                        score(fit(features, labels), canary.features, canary.labels), dtype=np.float64
                    ).ravel()
                )
                trained += 1
                if progress is not None:
                    progress(trained, 2 * times)
            return np.stack(found)

        return draw

    return distinguish(
        draws(records.features, records.labels),
        draws(*_joined(records, canary)),
        claimed if claimed is not None else _claimed(fit(records.features, records.labels), None),
        samples=times,
        confidence=confidence,
        delta=delta,
        subject=subject,
        details={"method": "repeated training", "records": len(records)},
    )


def network_draws(
    records: Records,
    canary: Records,
    *,
    settings: TrainingSettings,
    seed: int = 0,
    at_once: int = 64,
    progress: Progress | None = None,
) -> tuple[Draw, Draw]:
    """Draws for `distinguish`: the canary's logits from ordinary networks without and with it, many trained at once.

    Every network has its own seed. What is released here is the plain answer to one query, the canary itself.
    """
    features, labels = _joined(records, _single(canary))

    def train(rows: NDArray[np.int64], seeds: list[int]) -> Floats:
        stack = train_stack(
            features,
            labels,
            records.classes,
            [rows] * len(seeds),
            settings=settings,
            seeds=seeds,
            progress=progress,
        )
        return np.asarray(stack.stacked_logits(canary.features).double().numpy()[:, 0])

    return _neighbouring_draws(len(labels), train, seed, at_once)


def private_network_draws(
    records: Records,
    canary: Records,
    *,
    settings: PrivateSettings,
    noise_multiplier: float,
    size: int,
    seed: int = 0,
    at_once: int = 512,
    progress: Progress | None = None,
) -> tuple[Draw, Draw]:
    """Draws for `distinguish`: how far DP-SGD moved the canary's margin, without and with it, many trained at once.

    The margin is the logit of its label minus the mean of the others. Every network has its own seed. The adversary
    sees the released weights and, since no record enters them, the first ones; the margin after training minus the one
    before is a function of both. ``size`` is the declared number of records.
    """
    features, labels = _joined(records, _single(canary))
    widths = (features.shape[1], *settings.hidden, records.classes)

    def train(rows: NDArray[np.int64], seeds: list[int]) -> Floats:
        stack = train_private_stack(
            features,
            labels,
            records.classes,
            [rows] * len(seeds),
            settings=settings,
            noise_multipliers=[noise_multiplier] * len(seeds),
            seeds=seeds,
            sizes=[size] * len(seeds),
            progress=progress,
        )
        first = initial_mlp(widths, settings.activation, tuple(seeds))
        moved = (stack.stacked_logits(canary.features) - first.stacked_logits(canary.features))[:, 0]
        own = moved[:, int(canary.labels[0])]
        return np.asarray((own - (moved.sum(1) - own) / (records.classes - 1)).double().numpy())

    return _neighbouring_draws(len(labels), train, seed, at_once)


def _neighbouring_draws(
    count: int, train: Callable[[NDArray[np.int64], list[int]], Floats], seed: int, at_once: int
) -> tuple[Draw, Draw]:
    """Draws without the last of ``count`` records, and with it; every network gets a seed of its own."""
    everything = np.arange(count)
    taken = 0

    def draws(rows: NDArray[np.int64]) -> Draw:
        def draw(wanted: int) -> Floats:
            nonlocal taken
            parts = []
            for start in range(0, wanted, at_once):
                networks = min(at_once, wanted - start)
                parts.append(train(rows, [(seed << 32) + taken + place for place in range(networks)]))
                taken += networks
            return np.concatenate(parts)

        return draw

    return draws(everything[:-1]), draws(everything)


def _single(canary: Records) -> Records:
    if len(canary) != 1:
        raise InvalidInput(
            f"There are {len(canary)} canaries, but neighbours differ in exactly one record; give one."
        )
    return canary


def mislabelled(records: Records, *, count: int, seed: int = 0) -> Records:
    """Canaries: ``count`` of these records, each with a wrong label drawn at random."""
    if not 1 <= count <= len(records) or records.classes < 2:
        raise InvalidInput(
            f"{count} canaries were asked for, but there are {len(records)} records to make them of; ask for fewer."
        )
    generator = np.random.default_rng((0xCA7A52, seed))
    chosen = records.take(np.sort(generator.choice(len(records), count, replace=False)))
    wrong = (chosen.labels + generator.integers(1, records.classes, count)) % records.classes
    return Records(chosen.name, chosen.features, wrong, chosen.classes, chosen.image_shape, chosen.encoding)


def _claimed(model: object, given: Guarantee | Cost | None) -> Guarantee | Cost:
    """The claim given, else the model's own."""
    own = getattr(model, "guarantee_", None) if given is None else given
    if own is None:
        raise InvalidInput("The trained model states no guarantee of its own; say what is claimed of it.")
    checked: Guarantee | Cost = own
    return checked


def _joined(records: Records, more: Records) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    if records.features.shape[1] != more.features.shape[1]:
        raise InvalidInput(
            f"The canaries have {more.features.shape[1]} features, the records {records.features.shape[1]}; "
            "make canaries of the same kind."
        )
    return np.concatenate([records.features, more.features]), np.concatenate([records.labels, more.labels])
