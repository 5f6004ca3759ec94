"""Audit of a training run: the auditor's own records (canaries) go in or stay out, and the model tells which.

`one_run` needs a single training: many canaries, each put in by a fair coin. `repeated` trains many times with and
without one canary, which takes longer and shows more; networks are trained many at once. Both work with any function
that trains and any function that scores, so with teachers, a private head, noisy gradients or a plain network. What is
scored must be what is *released*; an audit that looks deeper than the claim refutes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting import Cost, Guarantee
from quietmax.audit import guessing
from quietmax.audit.distinguish import Draw, distinguish
from quietmax.audit.intervals import checked_confidence
from quietmax.audit.report import AuditReport, Claim
from quietmax.data import Records
from quietmax.errors import InvalidInput
from quietmax.models import TrainingSettings, train_stack
from quietmax.models.mlp import initial_mlp
from quietmax.models.private_settings import PrivateSettings
from quietmax.models.private_stack import train_private_stack

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
    `quietmax.audit.guessing`; each share is tested with its part of the permitted error, so the best may be reported.
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
    epsilon = guessing.epsilon_lower_bound(
        canaries, guesses, right, delta=claim.delta(delta), confidence=confidence
    )
    bound = epsilon
    if claim.parameter == "mu":
        bound = guessing.mu_lower_bound(
            canaries, guesses, right, extra_delta=claim.extra_delta, confidence=confidence
        )
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
