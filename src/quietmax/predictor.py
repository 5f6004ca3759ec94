"""Predictor: a model, a mechanism and a budget. It charges before it draws, and stops when the budget is spent."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting.costs import Budget, Cost, Meter
from quietmax.accounting.guarantee import Guarantee
from quietmax.errors import DataUnavailable, InvalidInput, QuietmaxError, check_type
from quietmax.mechanisms.base import (
    Answerer,
    Answers,
    GaussianScores,
    Mechanism,
    NoisyMax,
    SampledNeuron,
    releases_probabilities,
)
from quietmax.models.training import Classifier
from quietmax.noise.sources import EXACT, ExactNoise, NoiseSource
from quietmax.spending import Account, FileAccount, MemoryAccount, OwnProcess

Features = NDArray[np.floating]
_PROVEN = (GaussianScores, NoisyMax, SampledNeuron)
"""The mechanisms that have a proof. Subclasses are the user's own code."""
_COUNTING = (MemoryAccount, FileAccount)
"""The accounts that are known to count every answer. Subclasses are the user's own code."""


_OWN_MECHANISM = ("The mechanism is the user's own.", "The user's own mechanism has the privacy it states.")
_OWN_ACCOUNT = (
    "The account is the user's own.",
    "The user's own account counts every answer and stops when the budget is spent.",
)
_OWN_NOISE = (
    "The noise source is the user's own.",
    "The user's own noise source is exact and unpredictable.",
)
_SEEDED_NOISE = (
    "The noise is seeded and in floating point, for experiments only (THEORY 3.5).",
    "Nobody knows the seed, and nobody looks at the low digits of the answers.",
)


def claimed(guarantee: Guarantee, mechanism: Mechanism) -> Guarantee:
    """Return what may be claimed of answers: what a mechanism outside this library states is an assumption."""
    if guarantee.status != "proven" or type(mechanism) in _PROVEN:
        return guarantee
    return _assuming(guarantee, *_OWN_MECHANISM)


def _assuming(guarantee: Guarantee, because: str, assumption: str) -> Guarantee:
    return guarantee.weakened("conditional", f"{guarantee.because} {because}", (assumption,))


@dataclass(frozen=True)
class Remaining:
    """What is left of a budget."""

    cost: Cost  # The remaining cost, in the mechanism's measure
    queries: int  # The number of further queries that it pays for


class Predictor:
    """Answers queries with a mechanism, under a budget that all callers share.

    A batch is answered completely or not at all. An identical query is answered from the cache at no cost. A predictor
    is safe to share between threads. It answers only in the process that made it: a forked process must open the
    model's folder itself.

    Parameters
    ----------
    model : Classifier
        A trained model, as `quietmax.train` returns it.
    mechanism : Mechanism
        The mechanism; parameters that it leaves open are set from the model and the budget.
    budget : Budget
        The total of all answers, and the number of queries that share it.
    noise : NoiseSource
        Where the mechanism draws its noise from. Exact noise by default.
    cache_size : int
        The number of answers that the cache keeps; 0 turns it off.
    account : Account or None
        Counts the answers that were charged. In memory by default; a `FileAccount` outlives the process. With an
        account of any other class, the guarantee is conditional.

    Examples
    --------
    >>> import quietmax as qm
    >>> data = qm.load("mnist-5k", records=500)
    >>> model = qm.train(data, settings=qm.TrainingSettings(epochs=1))
    >>> quiet = qm.Predictor(model, qm.Algorithm1("laplace"), qm.Budget(epsilon=1.0, queries=10))
    >>> quiet.predict(data.test.features[:4]).shape
    (4,)
    >>> quiet.remaining.queries
    6
    """

    def __init__(
        self,
        model: Classifier,
        mechanism: Mechanism,
        budget: Budget,
        *,
        noise: NoiseSource = EXACT,
        cache_size: int = 10_000,
        account: Account | None = None,
    ) -> None:
        check_type(model, Classifier, "model", "a trained model, as quietmax.train returns it")
        check_type(budget, Budget, "budget", "a Budget, as in Budget(epsilon=1.0, queries=100)")
        if not hasattr(mechanism, "prepared"):
            raise InvalidInput(
                f"mechanism must be a mechanism, as in Algorithm1(noise='gaussian'), got {mechanism!r}."
            )
        if cache_size < 0:
            raise InvalidInput(f"cache_size must be at least 0, got {cache_size}.")
        self._budget = budget
        self._answerer = Answerer.prepare(model, mechanism, budget, noise=noise)
        self._meter = Meter(budget.total(mechanism.measure, mechanism.analysis))
        self._units = self._meter.units(self.cost)
        affordable = self._meter.affordable(self.cost)
        self._queries = affordable if budget.queries is None else min(affordable, budget.queries)
        if self._queries < 1:
            raise InvalidInput(
                f"The cost of one answer must be at most the budget of {self._meter.total}, got {self.cost}."
            )
        self._account: Account = MemoryAccount() if account is None else account
        self._cache: OrderedDict[bytes, Answers] = OrderedDict()
        self._cache_size = cache_size
        self._process = OwnProcess()
        self._lock = threading.Lock()

    # Read-only: the guarantee is computed from what the answers are drawn with.
    @property
    def model(self) -> Classifier:
        """The model."""
        return self._answerer.model

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism with every parameter set."""
        return self._answerer.mechanism

    @property
    def budget(self) -> Budget:
        """The budget."""
        return self._budget

    @property
    def noise(self) -> NoiseSource:
        """The noise source."""
        return self._answerer.noise

    @property
    def cost(self) -> Cost:
        """The cost of one answer."""
        return self._answerer.cost

    @property
    def remaining(self) -> Remaining:
        """What is left of the budget."""
        answered = self.answered
        return Remaining(self._meter.remaining(answered * self._units), max(self._queries - answered, 0))

    @property
    def answered(self) -> int:
        """The number of answers that were charged."""
        return self._account.answered

    def move_account(self, moved: Callable[[int], FileAccount], *, target: FileAccount | None = None) -> None:
        """Continue with another account; nothing is answered meanwhile.

        Once a budget is in a file it cannot be moved again. If the move is interrupted, for example by Ctrl-C, the
        predictor pays from the file if it is there already: `target` is the account that `moved` is about to create.
        """
        self._process.check()
        with self._lock:
            if isinstance(self._account, FileAccount):
                raise InvalidInput(
                    f"The budget of this model is in {self._account.path.parent} since the model was saved. Only a "
                    "model opened from that folder can spend it."
                )
            before, answered = self._account, self.answered
            # Nothing can be charged here until it is certain where the budget is, whatever interrupts the move.
            self._account = _MovingAccount()
            try:
                account = moved(answered)
                if type(account) is not FileAccount:
                    raise InvalidInput(
                        f"A budget can be moved to a FileAccount only, got {type(account).__name__}. Nothing was "
                        "moved."
                    )
            except BaseException:
                self._account = target if target is not None and _is_open(target) else before
                raise
            self._account = account

    @property
    def guarantee(self) -> Guarantee:
        """What is claimed of all answers together, when the whole budget is spent."""
        return self.guarantee_with(self.noise)

    def guarantee_with(self, noise: NoiseSource) -> Guarantee:
        """Return what is claimed if the noise comes from a source."""
        one = self.mechanism.guarantee(self.model.classes)
        total = Guarantee.of(
            one.cost.times(self._queries),
            status=one.status,
            because=one.because,
            assumptions=one.assumptions,
            extra_delta=one.extra_delta * self._queries,
            unit=one.unit,
            parameters={**one.parameters, "queries": self._queries, "noise_source": noise.describe()},
        )
        total = claimed(total, self.mechanism)
        if total.status == "refuted":
            return total
        if type(self._account) not in _COUNTING:
            total = _assuming(total, *_OWN_ACCOUNT)
        if type(noise) is ExactNoise and noise.exact:
            return total
        return _assuming(total, *(_OWN_NOISE if noise.exact else _SEEDED_NOISE))

    def predict_proba(self, features: Features) -> NDArray[np.float64]:
        """Return randomised class probabilities, shape (queries, classes).

        Raises
        ------
        InvalidInput
            If the queries are invalid, or the mechanism releases labels only. Nothing is charged.
        BudgetExhausted
            If the budget does not pay for all new queries. None is answered and nothing is charged.
        """
        if not releases_probabilities(self.mechanism, self.model.classes):
            raise InvalidInput(
                f"The mechanism {self.mechanism.name} releases labels only; predict() returns them."
            )
        probabilities = self._answer(features).probabilities
        assert probabilities is not None
        return probabilities

    def predict(self, features: Features) -> NDArray[np.int64]:
        """Return randomised labels, shape (queries,); errors as in `predict_proba`."""
        return self._answer(features).labels

    def __getstate__(self) -> dict[str, Any]:
        raise InvalidInput(
            "A predictor cannot be pickled or copied, because the budget could then be spent twice. A saved model can "
            "be opened again."
        )

    def _answer(self, features: Features) -> Answers:
        """Answer identical queries from the cache and charge for the others."""
        self._process.check()
        queries = np.ascontiguousarray(features, dtype=np.float32)
        if queries.ndim != 2:
            raise InvalidInput(f"Queries must have shape (queries, features), got {queries.shape}.")
        with self._lock:
            if not self._cache_size:
                return self._draw(queries)
            keys = [row.tobytes() for row in queries + np.float32(0)]  # -0.0 becomes 0.0
            known = {key: self._cache[key] for key in keys if key in self._cache}
            new = {key: index for index, key in enumerate(keys) if key not in known}
            if new:
                drawn = self._draw(queries[list(new.values())])
                for index, key in enumerate(new):
                    probabilities = None if drawn.probabilities is None else drawn.probabilities[index]
                    known[key] = Answers(drawn.labels[index], probabilities)
            self._keep(known)
            return _joined([known[key] for key in keys], self.model.classes)

    def _draw(self, queries: NDArray[np.float32]) -> Answers:
        """Charge for the queries, then draw their answers. Invalid queries raise before the charge.

        A process that was forked between the charge and the end of the draw has drawn answers of its own that nobody
        paid for, so the process is checked again.
        """
        scores = self._answerer.scores(queries)
        self._account.charge(len(queries), self._queries)
        answers = self._answerer.release(scores)
        self._process.check()
        return answers

    def _keep(self, answers: dict[bytes, Answers]) -> None:
        """Put answers into the cache and drop the ones that were not used for longest."""
        for key, answer in answers.items():
            self._cache[key] = answer
            self._cache.move_to_end(key)
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)


class _MovingAccount:
    """The account of a predictor whose budget is being moved: it counts nothing."""

    @property
    def answered(self) -> int:
        """Raise: the number of answers is that of the new account."""
        raise QuietmaxError(
            "Saving this model was interrupted, so its budget may be in its folder. Open the model from there, or fit "
            "it again."
        )

    def charge(self, queries: int, limit: int) -> None:  # noqa: ARG002
        """Raise: nothing is charged to an account that is being moved."""
        _ = self.answered


def _is_open(account: FileAccount) -> bool:
    try:
        return account.answered >= 0
    except DataUnavailable:
        return False


def _joined(answers: list[Answers], classes: int) -> Answers:
    labels = np.array([answer.labels for answer in answers], dtype=np.int64)
    if any(answer.probabilities is None for answer in answers):
        return Answers(labels, None)
    return Answers(labels, np.array([answer.probabilities for answer in answers]).reshape(-1, classes))
