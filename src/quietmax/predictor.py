"""Predictor: a model, a mechanism and a budget. It spends before it draws, and refuses when the budget is gone."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting.budget import LIMIT, Budget, Meter
from quietmax.accounting.costs import Cost
from quietmax.accounting.guarantee import Guarantee
from quietmax.errors import InvalidInput, check_type
from quietmax.mechanisms.base import Answerer, Answers, Mechanism, releases_probabilities
from quietmax.mechanisms.noisy_max import GaussianScores, NoisyMax
from quietmax.mechanisms.sampled_neuron import SampledNeuron
from quietmax.models.training import Classifier
from quietmax.noise.sources import EXACT, ExactNoise, NoiseSource
from quietmax.spending import Account, FileAccount, MemoryAccount, OwnProcess

Features = NDArray[np.floating]
_PROVEN = (GaussianScores, NoisyMax, SampledNeuron)
"""The mechanisms that have a proof. Subclasses are the user's own code."""


@dataclass(frozen=True)
class Remaining:
    """What is left: a cost in the mechanism's measure, and the number of further queries it pays for."""

    cost: Cost
    queries: int


class Predictor:
    """Answers queries with a mechanism under a budget shared by everyone who asks.

    A batch is answered whole or not at all. The same query asked again gets the stored answer at no cost, as long
    as it is among the last ``stored_answers`` ones (0 turns this off). Safe to share between threads. What was spent
    is kept by ``account``: in memory, or in a `FileAccount` that outlives the process. A predictor answers only in the
    process that made it: a forked process must open the model's folder itself.
    """

    def __init__(
        self,
        model: Classifier,
        mechanism: Mechanism,
        budget: Budget,
        *,
        noise: NoiseSource = EXACT,
        stored_answers: int = 10_000,
        account: Account | None = None,
    ) -> None:
        if stored_answers < 0:
            raise InvalidInput(
                f"stored_answers is {stored_answers}, but must be 0 (none are kept) or more; give such a number."
            )
        check_type(model, Classifier, "model", "a trained model, as quietmax.train returns it")
        check_type(budget, Budget, "budget", "a Budget, as in Budget(epsilon=1.0, queries=100)")
        if not hasattr(mechanism, "prepared"):
            raise InvalidInput(
                f"{mechanism!r} is no mechanism; give one, as in Algorithm1(noise='gaussian')."
            )
        self.model = model
        self.budget = budget
        self.noise = noise
        self._answerer = Answerer.prepare(model, mechanism, budget, noise=noise)
        self.mechanism = self._answerer.mechanism
        self.cost = self._answerer.cost
        self._meter = Meter(budget.total(mechanism.measure, mechanism.analysis))
        self._units = self._meter.units(self.cost)
        affordable = LIMIT // max(self._units, 1)
        self._queries = affordable if budget.queries is None else min(affordable, budget.queries)
        if self._queries < 1:
            raise InvalidInput(
                f"One answer costs {self.cost}, more than the whole budget of {self._meter.total}; "
                "raise the budget or lower the mechanism's epsilons."
            )
        self._account: Account = MemoryAccount() if account is None else account
        self._stored: OrderedDict[bytes, Answers] = OrderedDict()
        self._stored_answers = stored_answers
        self._process = OwnProcess()
        self._lock = threading.Lock()

    @property
    def remaining(self) -> Remaining:
        """What is left of the budget."""
        answered = self.answered
        return Remaining(self._meter.remaining(answered * self._units), max(self._queries - answered, 0))

    @property
    def answered(self) -> int:
        """How many answers were paid for."""
        return self._account.answered

    def move_account(self, moved: Callable[[int], Account]) -> None:
        """Go on with the account that ``moved`` makes for the answers paid so far; nothing is answered meanwhile.

        A budget lives in one place: once it has left this process's memory it cannot be moved again.
        """
        self._process.check()
        with self._lock:
            if isinstance(self._account, FileAccount):
                raise InvalidInput(
                    f"The budget of this model moved to {self._account.path.parent} when it was saved, and lives there "
                    "alone; open that folder, or fit again."
                )
            self._account = moved(self.answered)

    @property
    def guarantee(self) -> Guarantee:
        """What is claimed of all answers together, once the whole budget is spent."""
        return self.guarantee_with(self.noise)

    def guarantee_with(self, noise: NoiseSource) -> Guarantee:
        """What would be claimed if the noise came from this source."""
        one = self.mechanism.guarantee(self.model.classes)
        total = Guarantee.of(
            one.cost.times(self._queries),
            status=one.status,
            because=one.because,
            assumptions=one.assumptions,
            extra_delta=one.extra_delta * self._queries,
            parameters={**one.parameters, "queries": self._queries, "noise_source": noise.describe()},
        )
        if total.status == "proven" and type(self.mechanism) not in _PROVEN:
            total = total.weakened(
                "conditional",
                f"{total.because} The mechanism is the user's own.",
                ("The user's own mechanism has the privacy it states.",),
            )
        if (type(noise) is ExactNoise and noise.exact) or total.status == "refuted":
            return total
        if noise.exact:
            return total.weakened(
                "conditional",
                f"{total.because} The noise source is the user's own.",
                ("The user's own noise source is exact and unpredictable.",),
            )
        return total.weakened(
            "conditional",
            f"{total.because} The noise is seeded and in floating point, for experiments only (THEORY 3.5).",
            ("Nobody knows the seed, and nobody looks at the low digits of the answers.",),
        )

    def predict_proba(self, features: Features) -> NDArray[np.float64]:
        """Randomised class probabilities, shape (queries, classes)."""
        if not releases_probabilities(self.mechanism, self.model.classes):
            raise InvalidInput(f"{self.mechanism.name} releases labels only; ask predict() instead.")
        probabilities = self._answer(features).probabilities
        assert probabilities is not None
        return probabilities

    def predict(self, features: Features) -> NDArray[np.int64]:
        """Randomised labels, shape (queries,)."""
        return self._answer(features).labels

    def __getstate__(self) -> dict[str, Any]:
        raise InvalidInput(
            "A predictor cannot be pickled or copied: the copy would carry the budget too, to be spent twice; "
            "save the model and open one predictor."
        )

    def _answer(self, features: Features) -> Answers:
        self._process.check()
        queries = np.ascontiguousarray(features, dtype=np.float32)
        if queries.ndim != 2:
            raise InvalidInput(
                f"Queries have shape {queries.shape}, but expected (queries, features); add an axis."
            )
        with self._lock:
            if not self._stored_answers:
                return self._draw(queries)
            keys = [row.tobytes() for row in queries + np.float32(0)]  # -0.0 becomes 0.0
            stored = {key: self._stored[key] for key in keys if key in self._stored}
            new = {key: index for index, key in enumerate(keys) if key not in stored}
            if new:
                drawn = self._draw(queries[list(new.values())])
                for index, key in enumerate(new):
                    probabilities = None if drawn.probabilities is None else drawn.probabilities[index]
                    stored[key] = Answers(drawn.labels[index], probabilities)
            self._keep(stored)
            return _joined([stored[key] for key in keys], self.model.classes)

    def _draw(self, queries: NDArray[np.float32]) -> Answers:
        """Charge for the queries, then draw their answers."""
        scores = self._answerer.scores(queries)
        self._account.charge(len(queries), self._queries)
        return self._answerer.release(scores)

    def _keep(self, answers: dict[bytes, Answers]) -> None:
        for key, answer in answers.items():
            self._stored[key] = answer
            self._stored.move_to_end(key)
        while len(self._stored) > self._stored_answers:
            self._stored.popitem(last=False)


def _joined(answers: list[Answers], classes: int) -> Answers:
    labels = np.array([answer.labels for answer in answers], dtype=np.int64)
    if any(answer.probabilities is None for answer in answers):
        return Answers(labels, None)
    return Answers(labels, np.array([answer.probabilities for answer in answers]).reshape(-1, classes))
