"""Audit a training run with canaries: records of the auditor's own that are in the training set or not.

*One run*: each of many canaries is put in by a fair coin; the auditor trains once and guesses which ones are in.
*Repeated*: the auditor trains many times with and many times without one canary and tells the models apart.

A canary is one record; of records with a person column it is one person with all rows (THEORY 3.7), in the training
set with all of them or with none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting.costs import Cost
from quietmax.accounting.guarantee import Guarantee
from quietmax.audit.bounds import (
    CountedGuesses,
    check_confidence,
    epsilon_from_guesses,
    guess_tail,
    mu_from_guesses,
    mu_rejected,
)
from quietmax.audit.distinguishing import Draw, distinguish
from quietmax.audit.noise_share import mechanism_with_share
from quietmax.audit.report import AuditReport, Claim
from quietmax.data.records import Records
from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd.config import PrivateSettings
from quietmax.estimators.dpsgd.training import train_private_stack
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.teachers import Teachers
from quietmax.estimators.training_set import Persons
from quietmax.mechanisms.base import Answerer, Answers
from quietmax.models.mlp import initial_mlp
from quietmax.models.stacked import Progress, TrainingSettings, train_stack
from quietmax.noise.sources import SeededNoise

Floats = NDArray[np.float64]
Method = Literal["one-run", "repeated"]
Trained = TypeVar("Trained")
Fit = Callable[[Records], Trained]
Score = Callable[[Trained, Records], NDArray[Any]]

TRAINING_CONFIDENCE = 0.99
"""Default confidence of an audit of training: canaries and trainings are few, draws of a mechanism many."""
_ANSWERS_AT_ONCE = 4096
GUESSED_SHARES = (0.02, 0.1, 0.25, 0.5, 1.0)
"""Shares of the canaries to guess about, the surest ones first; all shares together use the permitted error."""


class _Predicts(Protocol):
    def predict(self, features: NDArray[np.float32]) -> NDArray[Any]: ...


def audit_training(
    fit: Fit[Trained],
    score: Score[Trained],
    records: Records,
    canaries: Records,
    claimed: Guarantee | Cost | None = None,
    *,
    method: Method = "one-run",
    shares: Sequence[float] = GUESSED_SHARES,
    times: int = 500,
    confidence: float = TRAINING_CONFIDENCE,
    delta: float = 1e-5,
    seed: int = 0,
    subject: str = "training",
    progress: Progress | None = None,
) -> AuditReport:
    """Audit a training algorithm with canaries.

    Parameters
    ----------
    fit : callable
        ``fit(records)`` trains and returns a model. It must draw fresh randomness at every call.
    score : callable
        ``score(model, canaries)`` returns what the adversary looks at. One run: one number per row of the canaries,
        larger if it is likelier in the training set; a person's score is the mean of their rows. Repeated: one or more
        numbers per model, for example its weights.
    records : Records
        Records that are always in the training set.
    canaries : Records
        One run: at least 2 records or persons, each added with probability 1/2. Repeated: exactly 1 record, or the
        rows of 1 person if ``records`` have persons; none of ``records`` may belong to a canary.
    claimed : Guarantee, Cost or None
        The claim to test. None: the ``guarantee_`` of the trained model. A claim for one record is tested for whole
        persons if the records have them.
    method : {"one-run", "repeated"}
        Train once and guess (bounds: `quietmax.audit.bounds`), or many times and distinguish
        (`quietmax.audit.distinguishing`).
    shares : sequence of float
        One run: shares of the canaries to guess about. The higher half of the scores is guessed to be in, the lower
        half to be out. Each share has its part of the permitted error, so the best may be reported.
    times : int
        Repeated: number of trainings with, and as many without, the canary.
    confidence : float
        The bound holds with at least this probability.
    delta : float
        Delta of the epsilon that is reported for a Gaussian claim.
    seed : int
        One run: determines which canaries are in.
    subject : str
        Name for the report.
    progress : callable or None
        Repeated: called with (trained, total).

    Returns
    -------
    AuditReport
        The lower bound beside the claim.

    Examples
    --------
    >>> from quietmax.accounting import PureCost
    >>> zero = Records("zero", np.zeros((1, 1)), np.zeros(1, int), classes=2)
    >>> canaries = Records("canaries", np.arange(1, 101)[:, None], np.zeros(100, int), classes=2)
    >>> remember = lambda records: set(records.features[:, 0])
    >>> is_in = lambda model, canaries: np.array([float(each in model) for each in canaries.features[:, 0]])
    >>> audit_training(remember, is_in, zero, canaries, PureCost(1.0)).verdict
    'refuted'
    """
    check_confidence(confidence)
    if method == "one-run":
        return _one_run(fit, score, records, canaries, claimed, shares, confidence, delta, seed, subject)
    if method != "repeated":
        raise InvalidInput(f"method must be 'one-run' or 'repeated', got {method!r}.")
    without, inside = _repeated_draws(fit, score, records, canaries, 2 * times, progress)
    tested = claimed if claimed is not None else _claim_of(fit(records))
    return distinguish(
        without,
        inside,
        tested,
        samples=times,
        confidence=confidence,
        delta=delta,
        subject=subject,
        details={
            "method": "repeated training",
            "records": len(records),
            **({"canary_rows": len(canaries)} if records.unit == "person" else {}),
            **_claimed_for(tested, records),
        },
        unit=records.unit,
    )


def _one_run(
    fit: Fit[Trained],
    score: Score[Trained],
    records: Records,
    canaries: Records,
    claimed: Guarantee | Cost | None,
    shares: Sequence[float],
    confidence: float,
    delta: float,
    seed: int,
    subject: str,
) -> AuditReport:
    """Train once with a random half of the canaries and guess which ones were in."""
    everyone = joined(records, canaries)
    count = _unit_count(canaries)
    if count < 2:
        raise InvalidInput(f"A one-run audit requires at least 2 canaries, got {count}.")
    if not shares or any(not 0 < share <= 1 for share in shares):
        raise InvalidInput(f"shares must be numbers above 0 and at most 1, got {tuple(shares)}.")
    generator = np.random.default_rng((0xCA7A51, seed))
    inside = generator.random(count) < 0.5
    kept = np.concatenate([np.ones(len(records), np.bool_), inside[canaries.units]])
    model = fit(everyone.take(kept))
    tested = claimed if claimed is not None else _claim_of(model)
    claim = Claim.of(tested)
    values = np.asarray(score(model, canaries), dtype=np.float64)
    if values.shape != (len(canaries),) or np.isnan(values).any():
        raise InvalidInput(
            f"score must return {len(canaries)} numbers, one per row of the canaries; got shape {values.shape}, or "
            "NaN values."
        )
    scores = np.bincount(canaries.units, values) / np.bincount(canaries.units)
    # Sorted by score, ties in random order: guesses about equal scores must not depend on the order of canaries.
    order = np.lexsort((generator.random(count), scores))
    sides = sorted({max(1, int(share * count) // 2) for share in shares})
    part = 1 - (1 - confidence) / len(sides)
    games = [_guess(claim, inside[order], side, part, delta) for side in sides]
    best = max(games, key=lambda game: game["lower_bound"])
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
        epsilon_lower_bound=max(game["epsilon_lower_bound"] for game in games),
        details={
            "method": "one run",
            "records": len(records),
            "canaries_inside": int(inside.sum()),
            "games": games,
            **_claimed_for(tested, records),
        },
        unit=records.unit,
        repetition=CountedGuesses(
            count, best["guesses"], best["right"], partial(_rejected, claim, count, best["guesses"], part)
        ),
    )


def _rejected(claim: Claim, canaries: int, guesses: int, confidence: float, right: int) -> bool:
    """Return whether that many right guesses contradict the claim."""
    if claim.parameter == "mu":
        return mu_rejected(
            claim.amount, canaries, guesses, right, extra_delta=claim.extra_delta, confidence=confidence
        )
    return guess_tail(canaries, guesses, right, claim.amount, claim.extra_delta) <= 1 - confidence


def _guess(
    claim: Claim, inside: NDArray[np.bool_], side: int, confidence: float, delta: float
) -> dict[str, Any]:
    """Guess about the ``side`` lowest and as many highest scores, and bound."""
    canaries, guesses = len(inside), 2 * side
    right = int((~inside[:side]).sum() + inside[canaries - side :].sum())
    epsilon = epsilon_from_guesses(canaries, guesses, right, delta=claim.delta(delta), confidence=confidence)
    bound = epsilon
    if claim.parameter == "mu":
        bound = mu_from_guesses(
            canaries, guesses, right, extra_delta=claim.extra_delta, confidence=confidence
        )
    return {"guesses": guesses, "right": right, "lower_bound": bound, "epsilon_lower_bound": epsilon}


def _repeated_draws(
    fit: Fit[Trained],
    score: Score[Trained],
    records: Records,
    canary: Records,
    total: int,
    progress: Progress | None,
) -> tuple[Draw, Draw]:
    """Return draws of the scores of models trained without and with the canary."""
    _check_single(canary)
    trained = 0

    def draws(given: Records) -> Draw:
        def draw(count: int) -> Floats:
            nonlocal trained
            found = []
            for _ in range(count):
                values = score(fit(given), canary)
                found.append(np.asarray(values, dtype=np.float64).ravel())
                trained += 1
                if progress is not None:
                    progress(trained, total)
            return np.stack(found)

        return draw

    return draws(records), draws(joined(records, canary))


def label_score(model: _Predicts, canaries: Records) -> Floats:
    """Score canaries by how much a model agrees with their labels."""
    features, labels = canaries.features, canaries.labels
    try:
        # An estimator that releases labels only has no such method, or raises when it is called.
        probabilities = np.asarray(model.predict_proba(features))  # type: ignore[attr-defined]
    except (AttributeError, InvalidInput):
        return np.asarray(np.asarray(model.predict(features)) == labels, dtype=np.float64)
    return np.asarray(np.log(np.maximum(probabilities[np.arange(len(labels)), labels], 1e-300)))


def mislabelled(records: Records, *, count: int, seed: int = 0) -> Records:
    """Make canaries: some of the records, or of their persons with all rows, with wrong labels drawn at random."""
    available = _unit_count(records)
    if not 1 <= count <= available or records.classes < 2:
        raise InvalidInput(
            f"count must be from 1 to the number of {records.unit}s, {available}, of at least 2 classes; got {count}."
        )
    generator = np.random.default_rng((0xCA7A52, seed))
    chosen = np.sort(generator.choice(available, count, replace=False))
    further = np.zeros(available, np.int64)
    further[chosen] = generator.integers(1, records.classes, count)
    canaries = records.take(np.isin(records.units, chosen))
    wrong = (canaries.labels + further[records.units[np.isin(records.units, chosen)]]) % records.classes
    return replace(canaries, labels=wrong)


def network_draws(
    records: Records,
    canary: Records,
    *,
    settings: TrainingSettings,
    seed: int = 0,
    at_once: int = 64,
    progress: Progress | None = None,
) -> tuple[Draw, Draw]:
    """Return draws for `distinguish`: the canary's logits from ordinary networks trained without and with it.

    Many networks are trained at once, each from its own seed. The release is the plain answer to one query, the canary;
    of a person with several rows it is the mean of the answers.
    """
    _check_single(canary)
    everyone = joined(records, canary)

    def train(rows: NDArray[np.int64], seeds: list[int]) -> Floats:
        stack = train_stack(
            everyone.features,
            everyone.labels,
            records.classes,
            [rows] * len(seeds),
            settings=settings,
            seeds=seeds,
            progress=progress,
        )
        return np.asarray(stack.stacked_logits(canary.features).double().numpy().mean(1))

    return _neighbouring_draws(len(records), len(canary), train, seed, at_once)


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
    """Return draws for `distinguish`: how far DP-SGD moved the canary's margin, trained without and with it.

    The margin is the logit of the canary's label minus the mean of the others, averaged over a person's rows. The
    adversary sees the released weights and the initial ones, which no record enters; the change of the margin is a
    function of both. Many networks are trained at once, each from its own seed.
    """
    _check_single(canary)
    everyone = joined(records, canary)
    persons = None if everyone.persons is None else Persons(everyone.persons)
    widths = (everyone.features.shape[1], *settings.hidden, records.classes)

    def train(rows: NDArray[np.int64], seeds: list[int]) -> Floats:
        stack = train_private_stack(
            everyone.features,
            everyone.labels,
            records.classes,
            [rows] * len(seeds),
            settings=settings,
            noise_multipliers=[noise_multiplier] * len(seeds),
            seeds=seeds,
            sizes=[size] * len(seeds),
            persons=persons,
            progress=progress,
        )
        first = initial_mlp(widths, settings.activation, tuple(seeds))
        moved = stack.stacked_logits(canary.features) - first.stacked_logits(canary.features)
        own = moved[:, np.arange(len(canary)), canary.labels]
        margins = own - (moved.sum(2) - own) / (records.classes - 1)
        return np.asarray(margins.double().numpy().mean(1))

    return _neighbouring_draws(len(records), len(canary), train, seed, at_once)


def answer_draws(
    without: PrivateHead | Teachers,
    inside: PrivateHead | Teachers,
    queries: NDArray[np.floating],
    *,
    noise_share: float = 1.0,
    seed: int = 0,
) -> tuple[Draw, Draw]:
    """Return draws for `distinguish`: the answers of two trained models to the same queries.

    The training of `Teachers` and of a head for answers per query has no noise, so each is trained once, and only the
    noise of the answers is drawn again.
    """
    source = SeededNoise(np.random.default_rng((0xA2517, seed)))
    if len(queries) > (without.predictor_.budget.queries or 0):
        raise InvalidInput(
            f"The budget pays for {without.predictor_.budget.queries} answers, but {len(queries)} queries are asked."
        )

    def draws(fitted: PrivateHead | Teachers) -> Draw:
        predictor = fitted.predictor_
        mechanism = mechanism_with_share(predictor.mechanism, noise_share)
        scores = Answerer(predictor.model, mechanism, features=fitted.feature_map_).scores(
            np.asarray(queries, np.float32)
        )

        def draw(times: int) -> Answers | Floats:
            parts = []
            for start in range(0, times, _ANSWERS_AT_ONCE):
                count = min(_ANSWERS_AT_ONCE, times - start)
                parts.append(mechanism.release(np.tile(scores, (count, 1)), source))
            released = [part.probabilities for part in parts if part.probabilities is not None]
            if released:
                return np.concatenate(released).reshape(times, -1)
            return Answers(np.concatenate([part.labels for part in parts]).reshape(times, len(scores)), None)

        return draw

    return draws(without), draws(inside)


def _neighbouring_draws(
    records: int,
    canary_rows: int,
    train: Callable[[NDArray[np.int64], list[int]], Floats],
    seed: int,
    at_once: int,
) -> tuple[Draw, Draw]:
    """Return draws without the canary, whose rows come after the records, and with it; each network has a seed."""
    everything = np.arange(records + canary_rows)
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

    return draws(everything[:records]), draws(everything)


def _claim_of(model: object) -> Guarantee | Cost:
    """Return the guarantee of a trained model."""
    own: Guarantee | None = getattr(model, "guarantee_", None)
    if own is None:
        raise InvalidInput("claimed is required: the trained model has no guarantee_.")
    return own


def _claimed_for(claimed: Guarantee | Cost, records: Records) -> dict[str, Any]:
    """Return the unit of the claim if it is another one than the audit's."""
    unit = claimed.unit if isinstance(claimed, Guarantee) else records.unit
    return {} if unit == records.unit else {"claimed_for": f"one {unit}"}


def _unit_count(records: Records) -> int:
    """Return the number of persons, or of records without persons."""
    return int(records.units.max(initial=-1)) + 1


def _check_single(canary: Records) -> None:
    if _unit_count(canary) != 1:
        raise InvalidInput(
            f"Neighbouring training sets differ in exactly 1 canary, got {_unit_count(canary)} {canary.unit}s."
        )


def joined(records: Records, canaries: Records) -> Records:
    """Return the ``records``, then the ``canaries``, which must have the same columns and none of the same persons."""
    if records.features.shape[1] != canaries.features.shape[1]:
        raise InvalidInput(
            f"Canaries must have {records.features.shape[1]} features like the records, got "
            f"{canaries.features.shape[1]}."
        )
    persons = None
    if records.persons is not None or canaries.persons is not None:
        if records.persons is None or canaries.persons is None:
            raise InvalidInput("Records and canaries must both have persons, or neither.")
        if not set(records.persons).isdisjoint(canaries.persons):
            raise InvalidInput("A canary must not be a person of the records.")
        persons = np.concatenate([records.persons, canaries.persons])
    return replace(
        records,
        features=np.concatenate([records.features, canaries.features]),
        labels=np.concatenate([records.labels, canaries.labels]),
        persons=persons,
        raw_hashes=None,
    )
