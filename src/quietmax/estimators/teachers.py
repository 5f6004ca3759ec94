"""Teachers: networks trained on disjoint shards of the records vote, and the votes are released with noise.

No sensitivity analysis of any network is needed (THEORY 3.4): a record sits in one shard, so it can change one
teacher, and with it the vote counts by at most sqrt(2) in L2 and 1 per class, whatever the networks are. For that to
be true, a record's shard must not depend on the other records (a keyed hash of its identifier decides, never its
position), a teacher must not depend on other shards (own seed, own place in the stack, no shared scaling), and a
teacher without records or with broken weights votes evenly instead of causing an error.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted, validate_data

from quietmax.accounting.budget import Budget
from quietmax.accounting.guarantee import Guarantee
from quietmax.data.records import Records
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.estimators import validation as conditions
from quietmax.estimators.validation import checked_records, checked_size, class_numbers, runs_own_code
from quietmax.mechanisms.base import Mechanism, proves_bounds
from quietmax.mechanisms.noisy_max import GaussianScores, NoisyMax
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.generic import describe_map
from quietmax.models.losses import CrossEntropy
from quietmax.models.mlp import MLP, checked_finite
from quietmax.models.stacked import TrainingSettings, train_independent
from quietmax.models.training import softmax, train_module
from quietmax.noise.sources import EXACT, NoiseSource, SeededNoise
from quietmax.predictor import Predictor, Remaining
from quietmax.sensitivity.base import ScoreBounds, Sensitivity

Floats = NDArray[np.float64]
Build = Callable[[int, int], torch.nn.Module]
Release = Literal["label", "probabilities"]
Method = Literal["auto", "gaussian", "exponential", "permute-and-flip"]

NETWORK = TrainingSettings(hidden=(64,), loss=CrossEntropy(), learning_rate=0.003, epochs=60, batch_size=50)
"""Teachers that see the records as they are."""
LINEAR = TrainingSettings(
    hidden=(), loss=CrossEntropy(), learning_rate=0.1, epochs=60, batch_size=50, l2=1e-5
)
"""Teachers that see public features of length 1."""
MOST_STEPS = 10**7
"""Training longer than this is refused: hours even for the smallest networks."""
_BECAUSE = (
    "One record changes one teacher's vote: one class loses at most 1, another gains at most 1 (THEORY 3.4)."
)
# Sums of probabilities are rounded to floats: the slack covers that for any number of teachers below 2^20.
_ROUNDING = 1 + 2.0**-30
VOTE_BOUNDS = ScoreBounds(
    one=Sensitivity(_ROUNDING, "certified", _BECAUSE),
    vector=Sensitivity(float(np.sqrt(2.0)) * _ROUNDING, "certified", _BECAUSE),
)


@dataclass(frozen=True, eq=False)
class TeacherEnsemble:
    """Trained teachers: the scores of a query are their vote counts, or the sums of their probability vectors.

    ``silent`` marks teachers that vote evenly: those without records or with weights that are not finite.
    """

    teachers: MLP | Sequence[torch.nn.Module | None]
    silent: NDArray[np.bool_]
    classes: int
    soft: bool

    @property
    def bounds(self) -> ScoreBounds:
        """One record moves the scores no further than this."""
        return VOTE_BOUNDS

    def scores(self, features: NDArray[np.floating]) -> Floats:
        """Votes of shape (queries, classes); each row sums to the number of teachers."""
        inputs = np.ascontiguousarray(features, dtype=np.float32)
        votes = np.zeros((len(inputs), self.classes))
        for start in range(0, len(inputs), 512):
            part = inputs[start : start + 512]
            logits = self._logits(part)
            votes[start : start + 512] = self._ballots(logits).sum(0)
        return votes

    def _logits(self, features: NDArray[np.float32]) -> Floats:
        if isinstance(self.teachers, MLP):
            return self.teachers.stacked_logits(features).double().numpy()
        answers = np.zeros((len(self.teachers), len(features), self.classes))
        inputs = checked_finite(torch.from_numpy(features))
        with torch.no_grad():
            for index, teacher in enumerate(self.teachers):
                if teacher is not None and not self.silent[index]:
                    answers[index] = teacher(inputs).double().numpy()
        return answers

    def _ballots(self, logits: Floats) -> Floats:
        even = self.silent[:, None, None] | ~np.isfinite(logits).all(-1, keepdims=True)
        safe = np.where(even, 0.0, logits)
        ballots = softmax(safe) if self.soft else np.eye(self.classes)[safe.argmax(-1)]
        return np.where(even, 1 / self.classes, ballots)


# Modules of the user's own may share state, so that one record changes several of them.
proves_bounds(TeacherEnsemble, when=lambda crowd: type(crowd.teachers) is MLP)


def shard_of(identifiers: Sequence[bytes], teachers: int, key: bytes) -> NDArray[np.int64]:
    """The shard of each record: a keyed hash of its identifier alone, so that no other record matters.

    >>> bool(shard_of([b"ann", b"bob"], 10, b"key")[1] == shard_of([b"bob"], 10, b"key")[0])
    True
    """
    digests = (hashlib.blake2b(each, key=key, digest_size=8).digest() for each in identifiers)
    return np.array([int.from_bytes(digest, "big") % teachers for digest in digests], dtype=np.int64)


def vote_noise(budget: Budget) -> tuple[float, float]:
    """Standard deviation of the noise on a vote count per query: by a pure choice, by Gaussian noise.

    The exponential mechanism with exponent eps/2 equals the largest of votes plus Gumbel noise of scale 2/eps, standard
    deviation 2.565/eps.
    """
    queries = budget.queries or 1
    pure = np.pi / np.sqrt(6) * 2 * queries / budget.epsilon
    if budget.delta == 0:
        return float(pure), float("inf")
    mu = budget.total("gaussian").to_json()["mu"]
    return float(pure), float(np.sqrt(2 * queries) / float(mu))


def default_teachers(budget: Budget, records: int) -> int:
    """How many teachers: about eight standard deviations of noise, at least 20 records each; public numbers only.

    >>> default_teachers(Budget(1.0, 1e-5, queries=1), 10_000)
    21
    """
    return int(np.clip(round(8 * min(vote_noise(budget))), 3, max(records // 20, 3)))


def _releases_probabilities(estimator: Teachers) -> bool:
    return estimator.release == "probabilities"


class Teachers(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Answer ``queries`` queries within (epsilon, delta) by the noisy vote of networks trained on disjoint shards.

    ``declared_size`` is the public number of records the defaults are computed from; without it the true number is
    used and the guarantee is conditional on that number being public. The set of ``classes`` likewise. ``network`` is
    either training settings of the built-in network, or a function (features, classes) -> new torch module; by default
    a small network, or a linear one on a feature map. ``features`` is a public feature map with a ``transform`` method.
    With a map or modules of the user's own the guarantee is conditional on their code. ``release`` is "label" or
    "probabilities" (Gaussian noise on the summed probability vectors). ``method`` "auto" takes the noise that is
    smaller for the budget. ``random_state`` None means exact noise and a fresh secret key; a number means repeatable
    experiments and a conditional guarantee.

    Every distinct query is paid for once; `quietmax.BudgetExhausted` is raised when the budget is spent.
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        queries: int = 1000,
        teachers: int | None = None,
        *,
        release: Release = "label",
        method: Method = "auto",
        features: Any = None,
        network: TrainingSettings | Build | None = None,
        declared_size: int | None = None,
        classes: Sequence[Any] | None = None,
        random_state: int | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.queries = queries
        self.teachers = teachers
        self.release = release
        self.method = method
        self.features = features
        self.network = network
        self.declared_size = declared_size
        self.classes = classes
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike, identifiers: Sequence[Any] | None = None) -> Teachers:
        """Assign records to shards and train one teacher on each.

        ``identifiers`` names each record (a person's number, say); by default its own content does.
        """
        inputs, given = checked_records(self, X, y)
        budget = Budget(self.epsilon, self.delta, self.queries)
        self.classes_, labels = class_numbers(given, self.classes)
        size = len(inputs) if self.declared_size is None else checked_size(self.declared_size)
        count = default_teachers(budget, size) if self.teachers is None else self.teachers
        if count < 1:
            raise InvalidInput(f"teachers is {count}, but must be at least 1; leave it out for a default.")
        key = (
            os.urandom(32)
            if self.random_state is None
            else b"%d" % np.random.RandomState(self.random_state).randint(2**31)
        )
        self.feature_map_ = self.features
        mapped = self._mapped(inputs)
        names = (
            _names(inputs, labels) if identifiers is None else [str(each).encode() for each in identifiers]
        )
        if len(names) != len(inputs):
            raise InvalidInput(
                f"There are {len(names)} identifiers for {len(inputs)} records; give one for each."
            )
        shards = shard_of(names, count, key)
        self.ensemble_ = self._trained(mapped, labels, shards, count, key, size)
        source: NoiseSource = (
            EXACT if self.random_state is None else SeededNoise(np.random.default_rng(list(key)))
        )
        self.predictor_ = Predictor(self.ensemble_, self._mechanism(budget, count), budget, noise=source)
        self.guarantee_ = claim(
            self.predictor_.guarantee,
            count,
            size,
            features=self.feature_map_,
            own_modules=not isinstance(self.ensemble_.teachers, MLP),
            classes_declared=self.classes is not None,
            size_declared=self.declared_size is not None,
        )
        return self

    def _mechanism(self, budget: Budget, count: int) -> Mechanism:
        if self.release == "probabilities":
            return GaussianScores(votes=count)
        if self.release != "label":
            raise InvalidInput(
                f"release is {self.release!r}, but must be 'label' or 'probabilities'; choose one."
            )
        if self.method == "auto":
            pure, gaussian = vote_noise(budget)
            return NoisyMax("permute-and-flip" if pure <= gaussian else "gaussian")
        return NoisyMax(self.method)

    def _trained(
        self,
        features: NDArray[np.float32],
        labels: NDArray[np.int64],
        shards: NDArray[np.int64],
        count: int,
        key: bytes,
        size: int,
    ) -> TeacherEnsemble:
        rows = [np.flatnonzero(shards == shard) for shard in range(count)]
        seeds = [_seed(key, shard) for shard in range(count)]
        empty = np.array([len(each) == 0 for each in rows])
        classes, soft = len(self.classes_), self.release == "probabilities"
        network = self.network or (NETWORK if self.features is None else LINEAR)
        if isinstance(network, TrainingSettings):
            steps = network.epochs * max(1, -(-size // (count * network.batch_size)))
            if steps > MOST_STEPS:
                raise InvalidInput(
                    f"For {size:,} declared records each of {count} teachers would take {steps:,} steps, more than "
                    f"{MOST_STEPS:,}; declare the size as it is, or more teachers."
                )
            stack = train_independent(
                features, labels, classes, rows, settings=network, seeds=seeds, steps=steps
            )
            broken = ~torch.isfinite(stack.weight_vectors()).all(1).numpy()
            return TeacherEnsemble(stack, empty | broken, classes, soft)
        built = [_built(network, features.shape[1], classes, seed) for seed in seeds]
        _check_apart(built)
        modules = [
            None
            if empty[shard]
            else _taught(module, features[rows[shard]], labels[rows[shard]], classes, seed)
            for shard, (module, seed) in enumerate(zip(built, seeds, strict=True))
        ]
        return TeacherEnsemble(modules, np.array([module is None for module in modules]), classes, soft)

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Labels, each distinct query paid for once."""
        queries = self._queries(X)
        return np.asarray(self.classes_[self.predictor_.predict(queries)])

    @available_if(_releases_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: ArrayLike) -> Floats:
        """Class probabilities; needs ``release="probabilities"``."""
        queries = self._queries(X)
        return self.predictor_.predict_proba(queries)

    @property
    def remaining(self) -> Remaining:
        """What is left of the budget."""
        check_is_fitted(self)
        return self.predictor_.remaining

    def _queries(self, X: ArrayLike) -> NDArray[np.float32]:
        check_is_fitted(self)
        return self._mapped(validate_data(self, X, dtype=np.float32, reset=False))

    def _mapped(self, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        if self.feature_map_ is None:
            return inputs
        return np.asarray(self.feature_map_.transform(inputs), dtype=np.float32)


def claim(
    answers: Guarantee,
    teachers: int,
    size: int,
    *,
    features: object,
    own_modules: bool,
    classes_declared: bool,
    size_declared: bool,
) -> Guarantee:
    """What is claimed of teachers whose predictor claims ``answers``, from the public facts of their training."""
    facts = {
        "teachers": teachers,
        "declared_size": size,
        "classes_declared": classes_declared,
        "size_declared": size_declared,
    }
    own_map = runs_own_code(features)
    description = describe_map(features) if isinstance(features, FeatureMap) else None
    assumptions = [*answers.assumptions, *conditions.map_assumptions(description)]
    assumptions += [conditions.SETTINGS_PUBLIC] if own_map else []
    assumptions += [] if own_modules else [conditions.LIBRARY_STACK]
    claimed = replace(answers, parameters={**answers.parameters, **facts}, assumptions=tuple(assumptions))
    for condition, applies in (
        (conditions.MAP, own_map),
        (conditions.BUILDER, own_modules),
        (conditions.CLASSES, not classes_declared),
        (conditions.SIZE, not size_declared),
    ):
        claimed = conditions.weakened(claimed, condition) if applies else claimed
    return claimed


def _names(features: NDArray[np.float32], labels: NDArray[np.int64]) -> list[bytes]:
    """A record's own content as its identifier."""
    return [row.tobytes() + bytes(str(label), "ascii") for row, label in zip(features, labels, strict=True)]


def _seed(key: bytes, shard: int) -> int:
    digest = hashlib.blake2b(b"seed %d" % shard, key=key, digest_size=7).digest()
    return int.from_bytes(digest, "big")


def _built(build: Build, width: int, classes: int, seed: int) -> torch.nn.Module | None:
    """A module of the user's own before it sees records; a failure makes a silent teacher."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return build(width, classes)
        except (QuietmaxError, RuntimeError, ValueError):
            return None


def _check_apart(modules: Sequence[torch.nn.Module | None]) -> None:
    """Refuse teachers that would train each other: no module, trained weight or buffer may be in two of them."""
    seen: set[int] = set()
    for module in modules:
        if module is None:
            continue
        trained = [each for each in module.parameters() if each.requires_grad]
        own = {id(each) for each in (module, *trained, *module.buffers())}
        if own & seen:
            raise InvalidInput(
                "The network function returned the same module or the same weights for two teachers, so a record would "
                "change more than one; return a new module each time."
            )
        seen |= own


def _taught(
    module: torch.nn.Module | None,
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
    classes: int,
    seed: int,
) -> torch.nn.Module | None:
    """Train a teacher of any kind from its own seed; a failure makes it silent rather than an error."""
    if module is None:
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            train_module(module, Records("shard", features, labels, classes), settings=NETWORK, seed=seed)
        except (QuietmaxError, RuntimeError, ValueError):
            return None
    return module.eval()
