"""Audit a training run with canaries: records of the auditor's own that are in the training set or not.

A canary is one record; of records with a person column it is one person with all rows (THEORY 3.7).

*Worst case.* Differential privacy holds for every pair of neighbouring training sets, so an audit may choose them. The
sets of `audit_worst_case` let one record do nearly as much as the proofs permit:

- Head, released weights: one training with thousands of canaries, each in a category of its own, so that their
  clipped gradients have directions of their own; the signals are summed.
- Head, answers per query: many records of class 0 in one direction, the canary of class 1 in another with cosine 0.3.
  The records make the model sure of class 0 for the canary, so its gradient is long, but they hardly resist its pull
  where they are not. The queries lie in the canary's direction, on the border of the two classes. The canary moves
  their scores by about 0.75 of the certified bound.
- Teachers: every teacher gets one record; half of the teachers vote for class 0 wherever they are asked, half for class
  1. The canary is put into the shard of one teacher and turns its vote on queries beside it, from a tie.
- DP-SGD: a linear model, a small clipping norm, and one column that only the canary has: every step that samples the
  canary adds a clipped gradient in the same direction. The adversary sees the weights after every step, which the
  accountant covers; a run of fewer steps from the same seed is the beginning of a longer one. The statistics are how
  far the weights moved in that direction in all, and the log-likelihood ratio of the moves of all steps, at the claimed
  noise and at half of it (Nasr et al. 2023).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from quietmax.accounting.costs import Cost, epsilon_of, mu_of
from quietmax.accounting.guarantee import Guarantee
from quietmax.attacks.shadow_models import concatenated
from quietmax.audit.bounds import (
    AuditReport,
    Claim,
    CountedGuesses,
    SampledSteps,
    SummedSignals,
    _check_confidence,
    _mu_from_guesses,
    epsilon_from_guesses,
)
from quietmax.audit.distinguishing import (
    Draw,
    _check_share,
    _drawn_answers,
    distinguish,
    mechanism_with_share,
)
from quietmax.data.records import Records, Split
from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd.estimator import DPSGD, network_guarantee
from quietmax.estimators.dpsgd.training import DPSGDSettings, make_plan, train_private_stack
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.head.weights import GradientPlan, HeadSettings
from quietmax.estimators.teachers import Teachers, shard_of
from quietmax.estimators.training_set import Basis, check_choice
from quietmax.mechanisms.base import Answerer, Answers, NoisyMax
from quietmax.models.features.tabular import Identity, TableCells
from quietmax.models.stacked import Progress, initial_mlp
from quietmax.noise.sources import SeededNoise

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
Trained = TypeVar("Trained")
Estimator = TypeVar("Estimator", PrivateHead, Teachers, DPSGD)
Fit = Callable[[Records], Trained]
Score = Callable[[Trained, Records], NDArray[Any]]
WorstCase = Literal["head", "head-query", "teachers", "dpsgd"]

TRAINING_CONFIDENCE = 0.99
"""Default confidence of an audit of training: canaries and trainings are few, draws of a mechanism many."""
GUESSED_SHARES = (0.02, 0.1, 0.25, 0.5, 1.0)
"""Shares of the canaries to guess about, the surest ones first; all shares together use the permitted error."""
DEFAULT_SAMPLES: dict[WorstCase, int] = {
    "head": 4_000,
    "head-query": 100_000,
    "teachers": 100_000,
    "dpsgd": 10_000,
}
"""Worst cases: canaries of a head; trainings with, and as many without, the canary of DP-SGD; draws of all answers."""
WORST_CASES = tuple(DEFAULT_SAMPLES)
_TEACHERS = 20
_DPSGD_SIZE, _DPSGD_STEPS = 30, 4
_ANSWERS_AT_ONCE = 4096
_WORST_NORM, _NETWORKS_AT_ONCE = 4.0, 1024
_HEAD_STEPS: dict[str, Any] = {
    "centring": 0.0,
    "calibration": 0.0,
    "steps": 10,
    "max_grad_norm": 0.1,
    "learning_rate": 1.0,
}
_HEAD_RECORDS, _HEAD_COSINE, _HEAD_PULL = 4000, 0.3, 20.0


def audit_training(
    fit: Fit[Trained],
    score: Score[Trained],
    records: Records,
    canaries: Records,
    claimed: Guarantee | Cost | None = None,
    *,
    method: Literal["one-run", "summed", "repeated"] = "one-run",
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
    method : {"one-run", "summed", "repeated"}
        Train once and guess, train once and sum the scores, or train many times and `distinguish`. Sums show most of a
        claim of mu, but only for scores that are linear in what is released with independent Gaussian noise, in
        directions of which each belongs to one canary (`quietmax.audit.bounds`). The bound from guesses is beside it.
    shares : sequence of float
        One run: shares of the canaries to guess about. The higher half of the scores is guessed to be in, the lower
        half to be out. Each share has its part of the permitted error, so the best may be reported.
    times : int
        Repeated: number of trainings with, and as many without, the canary.
    confidence, delta, subject
        As in `distinguish`.
    seed : int
        One run: determines which canaries are in.
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
    _check_confidence(confidence)
    check_choice("method", method, ("one-run", "summed", "repeated"))
    if method != "repeated":
        summed = method == "summed"
        return _one_run(
            fit, score, records, canaries, claimed, shares, confidence, delta, seed, subject, summed
        )
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
    summed: bool,
) -> AuditReport:
    """Train once with a random half of the canaries, and guess which ones were in or sum what they did."""
    everyone, count = _joined(records, canaries), _unit_count(canaries)
    if count < 2:
        raise InvalidInput(f"A one-run audit requires at least 2 canaries, got {count}.")
    if not shares or any(not 0 < share <= 1 for share in shares):
        raise InvalidInput(f"shares must be numbers above 0 and at most 1, got {tuple(shares)}.")
    generator = np.random.default_rng((0xCA7A51, seed))
    inside = generator.random(count) < 0.5
    kept = np.concatenate([np.ones(len(records), np.bool_), inside[canaries.units]])
    model = fit(everyone.take(kept))
    tested = _claim_of(model) if claimed is None else claimed
    claim = Claim._of(tested)
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
    report = AuditReport(
        subject=subject,
        **claim._stated(delta),
        lower_bound=best["lower_bound"],
        confidence=confidence,
        evidence=f"{best['right']:,} of {best['guesses']:,} guesses about canaries were right",
        samples=count,
        epsilon_lower_bound=max(game["epsilon_lower_bound"] for game in games),
        details={
            "method": "one run",
            "records": len(records),
            "canaries_inside": int(inside.sum()),
            "games": games,
            **_claimed_for(tested, records),
        },
        unit=records.unit,
        repetition=CountedGuesses(count, best["guesses"], best["right"], claim, part),
    )
    return _summed(report, SummedSignals._of(scores, inside, claim, confidence)) if summed else report


def _summed(report: AuditReport, signals: SummedSignals) -> AuditReport:
    """Return a report of one run with the bound that follows from the sums, beside that from guesses."""
    found = signals._lower_bound()
    extra = signals.claim.extra_delta
    epsilon = Guarantee("gaussian", mu=found, because="Shown.", extra_delta=extra).at_delta(report.delta)
    further = {
        "method": "one run, summed signals",
        "assumes": "independent Gaussian noise on every canary's signal",
        "distance_of_means": signals.distance,
        "mu_at_least_from_guesses": report.lower_bound,
        "power_with_half_the_noise": signals._power(0.5),
        "power_with_three_quarters_of_the_noise": signals._power(0.75),
    }
    return replace(
        report,
        lower_bound=found,
        epsilon_lower_bound=epsilon if found else 0.0,
        evidence=f"canaries inside and outside differ by {signals.distance:.3f} standard deviations on average",
        details={**report.details, **further},
        repetition=signals,
    )


def _guess(
    claim: Claim, inside: NDArray[np.bool_], side: int, confidence: float, delta: float
) -> dict[str, Any]:
    """Guess about the ``side`` lowest and as many highest scores, and bound."""
    canaries, guesses = len(inside), 2 * side
    right = int((~inside[:side]).sum() + inside[canaries - side :].sum())
    epsilon = epsilon_from_guesses(canaries, guesses, right, delta=claim._delta(delta), confidence=confidence)
    bound = epsilon
    if claim.parameter == "mu":
        bound = _mu_from_guesses(
            canaries, guesses, right, extra_delta=claim.extra_delta, confidence=confidence
        )
    return {"guesses": guesses, "right": right, "lower_bound": bound, "epsilon_lower_bound": epsilon}


def label_score(model: Any, canaries: Records) -> Floats:
    """Score canaries by how much a model agrees with their labels.

    Parameters
    ----------
    model : estimator
        Anything with ``predict_proba`` or ``predict``.
    canaries : Records
        The canaries.

    Returns
    -------
    array of float
        The log-probability of each label, or 1 where the predicted label is the canary's and else 0.
    """
    features, labels = canaries.features, canaries.labels
    try:
        # An estimator that releases labels only has no such method, or raises when it is called.
        probabilities = np.asarray(model.predict_proba(features))
    except (AttributeError, InvalidInput):
        return np.asarray(np.asarray(model.predict(features)) == labels, dtype=np.float64)
    return np.asarray(np.log(np.maximum(probabilities[np.arange(len(labels)), labels], 1e-300)))


def mislabelled(records: Records, *, count: int, seed: int = 0) -> Records:
    """Make canaries: some of the records, or of their persons with all rows, with wrong labels drawn at random.

    Parameters
    ----------
    records : Records
        Records that are not in the training set.
    count : int
        Number of canaries.
    seed : int
        Determines the records and the labels.

    Returns
    -------
    Records
        The canaries.
    """
    available = _unit_count(records)
    if not 1 <= count <= available or records.classes < 2:
        raise InvalidInput(
            f"count must be from 1 to the number of {records.unit}s, {available}, of at least 2 classes; got {count}."
        )
    generator = np.random.default_rng((0xCA7A52, seed))
    chosen = np.sort(generator.choice(available, count, replace=False))
    further = np.zeros(available, np.int64)
    further[chosen] = generator.integers(1, records.classes, count)
    rows = np.isin(records.units, chosen)
    canaries = records.take(rows)
    wrong = (canaries.labels + further[records.units[rows]]) % records.classes
    return replace(canaries, labels=wrong)


def _joined(records: Records, canaries: Records) -> Records:
    """Return the ``records``, then the ``canaries``, which must have the same columns and none of the same persons."""
    if records.features.shape[1] != canaries.features.shape[1]:
        raise InvalidInput(
            f"Canaries must have {records.features.shape[1]} features like the records, got "
            f"{canaries.features.shape[1]}."
        )
    if (records.persons is None) != (canaries.persons is None):
        raise InvalidInput("Records and canaries must both have persons, or neither.")
    if records.persons is not None and not set(records.persons).isdisjoint(canaries.persons):  # type: ignore[arg-type]
        raise InvalidInput("A canary must not be a person of the records.")
    return concatenated(records, canaries)


def _unit_count(records: Records) -> int:
    """Return the number of persons, or of records without persons."""
    return int(records.units.max(initial=-1)) + 1


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


# An estimator by name, audited on records

_TRAINED: dict[str, Callable[..., Any]] = {
    "head": PrivateHead,
    "head-query": partial(PrivateHead, release="query"),
    "teachers": Teachers,
    "dpsgd": DPSGD,
}


def check_estimator(estimator: str, noise_share: float) -> None:
    """Raise `InvalidInput` unless an audit takes these arguments."""
    check_choice("estimator", estimator, WORST_CASES)
    _check_share(noise_share)


def audit_estimator(
    estimator: str,
    data: Split,
    *,
    canaries: int = 500,
    epsilon: float = 1.0,
    delta: float = 1e-5,
    noise_share: float = 1.0,
    confidence: float = TRAINING_CONFIDENCE,
    seed: int = 0,
) -> AuditReport:
    """Audit one training of an estimator with mislabelled records as canaries.

    They are from outside the training and test parts; of a table of the user's own, from the holdout.
    """
    check_estimator(estimator, noise_share)
    train, outside = data.train, data.pool if data.holdout is None else data.test
    chosen = mislabelled(outside, count=canaries, seed=seed)
    public: dict[str, Any] = {"classes": range(train.classes), "declared_size": _unit_count(train)}
    if estimator in ("teachers", "head-query"):
        public["queries"] = len(chosen)
    reference = _TRAINED[estimator](epsilon, delta, **public, random_state=seed % 2**32)
    fit: Fit[Any] = partial(_fitted, reference)
    claimed = None
    if noise_share != 1:
        claimed = fit(train).guarantee_
        fit = _fit_like(reference, seed, noise_share)
    return audit_training(
        fit,
        label_score,
        train,
        chosen,
        claimed,
        confidence=confidence,
        delta=delta,
        seed=seed,
        subject=f"{estimator} on {data.name}",
    )


def _fitted(estimator: Any, records: Records) -> Any:
    return estimator.fit(records.features, records.labels, groups=records.persons)


# Draws of what is released, without the canary and with it


def _repeated_draws(
    fit: Fit[Trained],
    score: Score[Trained],
    records: Records,
    canary: Records,
    total: int,
    progress: Progress | None,
) -> tuple[Draw, Draw]:
    """Return draws of the scores of models trained without and with the canary."""
    if (count := _unit_count(canary)) != 1:
        raise InvalidInput(
            f"Neighbouring training sets differ in exactly 1 canary, got {count} {canary.unit}s."
        )
    trained = itertools.count(1)

    def _draws(given: Records) -> Draw:
        def _once() -> Floats:
            values = np.asarray(score(fit(given), canary), dtype=np.float64).ravel()
            done = next(trained)
            if progress is not None:
                progress(done, total)
            return values

        return lambda count: np.stack([_once() for _ in range(count)])

    return _draws(records), _draws(_joined(records, canary))


def _answer_draws(
    without: PrivateHead | Teachers,
    inside: PrivateHead | Teachers,
    queries: NDArray[np.floating],
    share: float,
    seed: int,
) -> tuple[Draw, Draw, Guarantee]:
    """Return draws of the answers of two trained models to the same queries, and the claim.

    The training of `Teachers` and of a head for answers per query has no noise, so each is trained once, and only the
    noise of the answers is drawn again.
    """
    source = SeededNoise(np.random.default_rng((0xA2517, seed)))
    if len(queries) > (without.predictor_.budget.queries or 0):
        raise InvalidInput(
            f"The budget pays for {without.predictor_.budget.queries} answers, but {len(queries)} queries are asked."
        )

    def _draws(fitted: PrivateHead | Teachers) -> Draw:
        predictor = fitted.predictor_
        mechanism = mechanism_with_share(predictor.mechanism, share)
        answerer = Answerer(predictor.model, mechanism, features=fitted.feature_map_)
        scores = answerer.scores(np.asarray(queries, np.float32))
        released = _drawn_answers(mechanism, scores, source, _ANSWERS_AT_ONCE)

        def _draw(times: int) -> Answers | Floats:
            answers = released(times)
            if answers.probabilities is not None:
                return answers.probabilities.reshape(times, -1)
            return Answers(answers.labels.reshape(times, len(scores)), None)

        return _draw

    return _draws(without), _draws(inside), without.guarantee_


def _fit_like(fitted: Any, seed: int, share: float) -> Fit[Any]:
    """Return a function that trains like a fitted estimator, with a share of its noise and another seed every time."""
    seeds = itertools.count(seed)

    def _fit(records: Records) -> Any:
        weaker = estimator_with_share(fitted, share)
        return _fitted(weaker.set_params(random_state=next(seeds) % 2**32), records)

    return _fit


# Worst cases


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
        Released weights of a head: canaries in one training. DP-SGD: trainings with, and as many without, the canary.
        For answers: draws of all answers of either model. None: `DEFAULT_SAMPLES`.
    noise_share : float
        Share of the noise that the claim requires; see `estimator_with_share`. The claim stays.
    confidence : float
        As in `distinguish`.
    seed : int
        Determines the training sets and the seeded noise.

    Returns
    -------
    AuditReport
        The lower bound beside the claim.

    Examples
    --------
    >>> audit_worst_case("teachers", epsilon=1.0, queries=4, noise_share=0.5, samples=20_000).verdict
    'refuted'
    """
    check_estimator(estimator, noise_share)
    draws = DEFAULT_SAMPLES[estimator] if samples is None else samples
    if estimator == "head":
        return _summed_head(epsilon, delta, noise_share, seed, draws, confidence)
    if estimator == "dpsgd":
        drawn = _dpsgd(epsilon, delta, sampling_rate, noise_share, seed)
    else:
        sets = _head_answers if estimator == "head-query" else _teachers
        without, inside, asked = sets(epsilon, delta, queries, seed)
        drawn = _answer_draws(without, inside, asked, noise_share, seed)
    return distinguish(
        *drawn,
        samples=draws,
        confidence=confidence,
        delta=delta,
        subject=f"{estimator}, worst case",
        details={"method": "worst case", "noise_share": noise_share},
    )


def _summed_head(
    epsilon: float, delta: float, share: float, seed: int, canaries: int, confidence: float
) -> AuditReport:
    """Train one head with many canaries, each in a category of its own, and sum what they did to its weights."""
    categories = np.eye(canaries, dtype=np.float32)
    chosen = Records("canaries", categories, np.ones(canaries, np.int64), classes=2)
    reference = PrivateHead(
        epsilon,
        delta,
        features=TableCells(canaries, ((0, canaries),)),
        classes=(0, 1),
        declared_size=canaries // 2,
        settings=HeadSettings(**_HEAD_STEPS),
        random_state=0,
    ).fit(categories[:1], [1])
    return audit_training(
        _fit_like(reference, seed << 20, share),
        lambda head, records: head.decision_function(records.features),
        chosen.take(np.zeros(canaries, np.bool_)),
        chosen,
        reference.guarantee_,
        method="summed",
        confidence=confidence,
        delta=delta,
        seed=seed,
        subject="head, worst case",
    )


def _head_answers(
    epsilon: float, delta: float, queries: int, seed: int
) -> tuple[PrivateHead, PrivateHead, NDArray[np.float32]]:
    """Train a head for answers per query without and with the canary, and return queries on the border."""
    features = np.tile(np.array([[1.0, 0.0]], np.float32), (_HEAD_RECORDS, 1))
    canary = np.array([[_HEAD_COSINE, np.sqrt(1 - _HEAD_COSINE**2)]], np.float32)
    labels = np.zeros(_HEAD_RECORDS, np.int64)

    head = partial(
        PrivateHead,
        epsilon,
        delta,
        release="query",
        queries=queries,
        features=Identity(),
        classes=(0, 1),
        declared_size=_HEAD_RECORDS,
        settings=HeadSettings(regularisation=_HEAD_PULL / _HEAD_RECORDS),
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

    public: dict[str, Any] = {"classes": (0, 1), "declared_size": _TEACHERS, "random_state": seed}
    teachers = partial(Teachers, epsilon, delta, queries, _TEACHERS, **public)
    key = teachers()._key()
    generator = np.random.default_rng((0x7EAC, seed))

    def _in_shard(start: list[float], label: int, shard: int) -> NDArray[np.float32]:
        """Return a record near a point that the key puts into a shard."""
        while True:
            row = np.array([*start, 0.01 * generator.random()], np.float32)
            if shard_of([row.tobytes() + b"%d" % label], _TEACHERS, key)[0] == shard:
                return row

    labels = np.arange(_TEACHERS) % 2
    features = np.stack([_in_shard([1.0, 0.0], int(label), shard) for shard, label in enumerate(labels)])
    canary = _in_shard([0.0, 1.0], 1, 0)[None]
    first = teachers().fit(features, labels)
    second = teachers().fit(np.concatenate([features, canary]), np.append(labels, 1))
    return first, second, (canary * (1 - 0.001 * np.arange(queries)[:, None])).astype(np.float32)


def _dpsgd(
    epsilon: float, delta: float, sampling_rate: float, share: float, seed: int
) -> tuple[Draw, Draw, Guarantee]:
    """Train a linear model by DP-SGD, many at once; the canary differs from all records by a column of its own."""
    features = np.zeros((_DPSGD_SIZE + 1, 5), np.float32)
    features[:-1, :4] = np.random.default_rng(0).random((_DPSGD_SIZE, 4))
    features[-1, 4] = _WORST_NORM
    labels = (features[:, 0] >= features[:, 1]).astype(np.int64)
    planned = make_plan(
        _DPSGD_SIZE,
        epsilon=epsilon,
        delta=delta,
        sampling_rate=sampling_rate,
        steps=_DPSGD_STEPS,
        max_grad_norm=0.001,
        learning_rate=1.0,
        optimizer="sgd",
    )
    settings = planned.settings
    seen = _WORST_NORM / np.hypot(_WORST_NORM, 1.0)  # the rest of the canary's gradient is in the bias
    step = settings.learning_rate * settings.max_grad_norm / (settings.sampling_rate * _DPSGD_SIZE)

    def _statistics(rows: Rows, seeds: list[int]) -> Floats:
        """Return the move of all steps, and its evidence at the claimed noise and at half of it."""
        iterates = [initial_mlp((5, 2), settings.activation, tuple(seeds)).kernels[0]]
        for steps in range(1, _DPSGD_STEPS + 1):
            stack = train_private_stack(
                features,
                labels,
                2,
                [rows] * len(seeds),
                settings=replace(settings, steps=steps),
                noise_multipliers=[share * planned.noise_multiplier] * len(seeds),
                seeds=seeds,
                sizes=[_DPSGD_SIZE] * len(seeds),
            )
            iterates.append(stack.kernels[0])
        column = np.stack([each[:, :, -1].double().numpy() for each in iterates])
        # How far each step moved the weights of the canary's column, in units of the clipping norm.
        moved = np.diff(column[..., 1] - column[..., 0], axis=0).T / (np.sqrt(2.0) * step)
        found = [moved.sum(1)]
        for sigma in (planned.noise_multiplier, planned.noise_multiplier / 2):
            ratio = np.exp(seen * (2 * moved - seen) / (2 * sigma**2))
            found.append(np.log1p(settings.sampling_rate * (ratio - 1)).sum(1))
        return np.column_stack(found)

    fresh = itertools.count(seed << 32)  # every network has a seed of its own

    def _draws(rows: Rows) -> Draw:
        def _draw(wanted: int) -> Floats:
            counts = [min(_NETWORKS_AT_ONCE, wanted - start) for start in range(0, wanted, _NETWORKS_AT_ONCE)]
            return np.concatenate(
                [_statistics(rows, list(itertools.islice(fresh, networks))) for networks in counts]
            )

        return _draw

    claim = network_guarantee(planned, Basis(), exact=False)
    return _draws(np.arange(_DPSGD_SIZE)), _draws(np.arange(_DPSGD_SIZE + 1)), claim


# Estimators with less noise


def estimator_with_share(fitted: Estimator, share: float) -> Estimator:
    """Return an estimator like a fitted one, not fitted, whose larger budget has a share of its noise.

    All other settings are those that the fitted one has computed from its budget.
    """
    _check_share(share)
    if isinstance(fitted, PrivateHead):
        settings = _head_settings(fitted, share)
    else:
        settings = (_teacher_settings if isinstance(fitted, Teachers) else _dpsgd_settings)(fitted, share)
    changed: Estimator = clone(fitted)
    return changed.set_params(**settings)  # type: ignore[no-any-return]


def _head_settings(fitted: PrivateHead, share: float) -> dict[str, object]:
    plan, chosen = fitted.plan_, fitted.settings or HeadSettings()
    settings: dict[str, object] = {"features": fitted.feature_map_}
    if fitted.release == "query":
        own = replace(chosen, regularisation=plan.regularisation)  # type: ignore[union-attr]
        return {**settings, "settings": own, "epsilon": fitted.epsilon / share}
    mu = mu_of(fitted.epsilon, fitted.delta) if fitted.mu is None else float(fitted.mu)
    moments, calibration = (
        fitted.guarantee_.parameters.get(f"mu_{name}") for name in ("moments", "calibration")
    )
    kept = (
        ("steps", "learning_rate", "max_grad_norm") if isinstance(plan, GradientPlan) else ("regularisation",)
    )
    own = replace(
        chosen,
        second_moments=None if isinstance(fitted.feature_map_, TableCells) else _share(moments, mu),
        calibration=_share(calibration, mu),
        **{name: getattr(plan, name) for name in kept},
    )
    return settings | {"mu": mu / share, "settings": own}


def _share(part: float | None, mu: float) -> float:
    """Return the share of mu^2 that was spent on a part of a training."""
    return 0.0 if part is None else (part / mu) ** 2


def _teacher_settings(fitted: Teachers, share: float) -> dict[str, object]:
    mechanism = fitted.predictor_.mechanism
    settings: dict[str, object] = {"teachers": len(fitted.ensemble_.silent)}
    if isinstance(mechanism, NoisyMax):
        settings["method"] = mechanism.method
    if mechanism.measure == "pure":
        return {**settings, "epsilon": fitted.epsilon / share}
    return {**settings, "epsilon": epsilon_of(mu_of(fitted.epsilon, fitted.delta) / share, fitted.delta)}


def _dpsgd_settings(fitted: DPSGD, share: float) -> dict[str, object]:
    plan = fitted.plan_
    if plan.analysis != "proven" or plan.accountant != "pld":
        raise InvalidInput(
            "A share of the noise of DP-SGD requires analysis='proven' and accountant='pld', got "
            f"{plan.analysis!r} and {plan.accountant!r}."
        )
    multiplier = share * plan.noise_multiplier
    if plan.settings.sampling_rate == 1.0:
        epsilon = epsilon_of(float(np.sqrt(plan.settings.steps)) / multiplier, plan.delta)
    else:
        epsilon = SampledSteps(multiplier, plan.schedule)._epsilon(plan.delta)
    chosen = fitted.settings or DPSGDSettings()
    kept = [each.name for each in fields(DPSGDSettings) if each.name != "length"]
    own = replace(chosen, **{name: getattr(plan.settings, name) for name in kept})
    return {"settings": own, "epsilon": epsilon, "delta": plan.delta, "features": fitted.feature_map_}
