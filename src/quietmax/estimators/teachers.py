"""Teachers: networks trained on disjoint shards of the records vote, and the votes are released with noise.

No sensitivity analysis of any network is needed (THEORY 3.4). A record is in one shard, so it can change one teacher,
and with it the vote counts by at most sqrt(2) in L2 and 1 per class, whatever the networks are. For that to be true:

- a record's shard does not depend on the other records: a keyed hash of its identifier decides, never its position;
- a teacher does not depend on other shards: own seed, own place in the stack, no shared scaling;
- a teacher without records or with broken weights votes evenly instead of raising an error.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
from quietmax.estimators.validation import (
    CLASSES,
    LIBRARY_STACK,
    OWN_MAP,
    OWN_MODULES,
    SETTINGS_PUBLIC,
    SIZE,
    ImageShape,
    check_choice,
    checked_records,
    checked_size,
    class_numbers,
    map_assumptions,
    named_features,
    runs_own_code,
    weakened,
)
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

NETWORK = TrainingSettings(hidden=(64,), loss=CrossEntropy(), learning_rate=0.003, epochs=60, batch_size=50)
"""Default teachers without a feature map."""
LINEAR = TrainingSettings(
    hidden=(), loss=CrossEntropy(), learning_rate=0.1, epochs=60, batch_size=50, l2=1e-5
)
"""Default teachers on public features, which have length 1."""
MOST_STEPS = 10**7
"""Most training steps of a teacher: hours even for the smallest networks."""
_BECAUSE = (
    "One record changes one teacher's vote: one class loses at most 1, another gains at most 1 (THEORY 3.4)."
)
# Sums of probabilities are rounded to floats: the slack covers that for any number of teachers below 2^20.
_ROUNDING = 1 + 2.0**-30
VOTE_BOUNDS = ScoreBounds(
    one=Sensitivity(_ROUNDING, "certified", _BECAUSE),
    vector=Sensitivity(float(np.sqrt(2.0)) * _ROUNDING, "certified", _BECAUSE),
)


def _releases_probabilities(estimator: Teachers) -> bool:
    return estimator.release == "probabilities"


class Teachers(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Answer a number of queries by the noisy vote of networks trained on disjoint shards of the records (PATE).

    Every new query is charged once; asking the same query again is free. The guarantee holds for one record added or
    removed, or for one identifier if ``fit`` is given identifiers.

    Parameters
    ----------
    epsilon : float, default=1.0
        epsilon of all answers together.
    delta : float, default=1e-5
        delta of all answers together.
    queries : int, default=1000
        Number of answers that the budget pays for.
    teachers : int, optional
        Number of teachers; by default computed from the budget and the size.
    release : {"label", "probabilities"}, default="label"
        What an answer is: the winner of the noisy vote, or the sum of the teachers' probabilities with Gaussian noise.
    method : {"auto", "gaussian", "exponential", "permute-and-flip"}, default="auto"
        How the winner is chosen. "auto" takes what adds less noise for the budget.
    features : FeatureMap or {"auto", "identity", "unit-norm", "scattering"} or None, default="auto"
        The public feature map, any object with a ``transform`` method; None for no map. "auto": wavelet scattering if
        ``image_shape`` is given, otherwise none. A map with the user's own code makes the guarantee conditional.
    image_shape : tuple of int, optional
        Channels, height and width, if the records are images.
    network : TrainingSettings or callable, optional
        Training settings of the built-in network, or a function (features, classes) -> new torch module, which makes
        the guarantee conditional. By default a small network, or a linear one on a feature map.
    declared_size : int, optional
        The public number of records, which defaults are computed from. If None, the true number is used and the
        guarantee is conditional.
    classes : sequence, optional
        The public set of labels. If None, it is read off ``y`` and the guarantee is conditional.
    random_state : int, optional
        None: exact noise and a fresh secret key. Otherwise repeatable experiments and a conditional guarantee.

    Attributes
    ----------
    ensemble_ : TeacherEnsemble
        The trained teachers. They are private: only the predictor may ask them.
    predictor_ : Predictor
        Answers queries and charges for them.
    guarantee_ : Guarantee
        What is guaranteed of all answers together.
    classes_ : array of shape (classes,)
        The labels.
    n_features_in_ : int
        Number of columns of a record.
    feature_map_ : object or None
        The feature map that was used.

    Examples
    --------
    >>> X, y = np.array([[0.0, 1.0], [1.0, 0.0]] * 200), np.array([0, 1] * 200)
    >>> teachers = Teachers(epsilon=8.0, queries=2, teachers=5, classes=(0, 1), declared_size=400).fit(X, y)
    >>> len(teachers.predict([[0.1, 0.9]])), teachers.remaining.queries
    (1, 1)
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        queries: int = 1000,
        teachers: int | None = None,
        *,
        release: Literal["label", "probabilities"] = "label",
        method: Literal["auto", "gaussian", "exponential", "permute-and-flip"] = "auto",
        features: Any = "auto",
        image_shape: ImageShape | None = None,
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
        self.image_shape = image_shape
        self.network = network
        self.declared_size = declared_size
        self.classes = classes
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike, identifiers: Sequence[Any] | None = None) -> Teachers:
        """Assign private records to shards and train one teacher on each.

        Parameters
        ----------
        X : array-like of shape (records, columns)
            The private records.
        y : array-like of shape (records,)
            Their labels.
        identifiers : sequence, optional
            What identifies each record, for instance a person's number: records with the same identifier are in the
            same shard. By default a record's own content.

        Returns
        -------
        Teachers
            The fitted estimator.
        """
        inputs, given = checked_records(self, X, y)
        budget = Budget(self.epsilon, self.delta, self.queries)
        self.classes_, labels = class_numbers(given, self.classes)
        size = len(inputs) if self.declared_size is None else checked_size(self.declared_size)
        count = default_teachers(budget, size) if self.teachers is None else self.teachers
        if count < 1:
            raise InvalidInput(f"teachers must be at least 1, got {count}.")
        self.feature_map_ = self._feature_map()
        mapped = self._mapped(inputs)
        key = self._key()
        shards = shard_of(_names(inputs, labels, identifiers), count, key)
        self.ensemble_ = self._trained(mapped, labels, shards, count, key, size)
        source: NoiseSource = (
            EXACT if self.random_state is None else SeededNoise(np.random.default_rng(list(key)))
        )
        self.predictor_ = Predictor(self.ensemble_, self._mechanism(budget, count), budget, noise=source)
        self.guarantee_ = vote_guarantee(
            self.predictor_.guarantee,
            count,
            size,
            features=self.feature_map_,
            own_modules=not isinstance(self.ensemble_.teachers, MLP),
            classes_declared=self.classes is not None,
            size_declared=self.declared_size is not None,
        )
        return self

    def _feature_map(self) -> Any:
        """Return the feature map that ``features`` names, None for no map."""
        if isinstance(self.features, str) and self.features == "auto":
            return None if self.image_shape is None else named_features("scattering", self.image_shape)
        return named_features(self.features, self.image_shape)

    def _key(self) -> bytes:
        """Return the secret key that assigns records to shards and seeds the teachers."""
        if self.random_state is None:
            return os.urandom(32)
        return b"%d" % np.random.RandomState(self.random_state).randint(2**31)

    def _mechanism(self, budget: Budget, count: int) -> Mechanism:
        """Return the mechanism that releases an answer."""
        check_choice("release", self.release, ("label", "probabilities"))
        check_choice("method", self.method, ("auto", "gaussian", "exponential", "permute-and-flip"))
        if self.release == "probabilities":
            return GaussianScores(votes=count)
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
        """Train one teacher on each shard; a teacher without records or with broken weights is silent."""
        rows = [np.flatnonzero(shards == shard) for shard in range(count)]
        seeds = [_seed(key, shard) for shard in range(count)]
        empty = np.array([len(each) == 0 for each in rows])
        classes, soft = len(self.classes_), self.release == "probabilities"
        network = self.network or (NETWORK if self.feature_map_ is None else LINEAR)
        if isinstance(network, TrainingSettings):
            steps = network.epochs * max(1, -(-size // (count * network.batch_size)))
            if steps > MOST_STEPS:
                raise InvalidInput(
                    f"Each of {count} teachers would take {steps:,} training steps for declared_size {size:,}, but at "
                    f"most {MOST_STEPS:,} are allowed."
                )
            stack = train_independent(
                features, labels, classes, rows, settings=network, seeds=seeds, steps=steps
            )
            broken = ~torch.isfinite(stack.weight_vectors()).all(1).numpy()
            return TeacherEnsemble._of_fit(stack, empty | broken, classes, soft)
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
        """Predict labels by the noisy vote; every new query is charged once.

        Parameters
        ----------
        X : array-like of shape (queries, columns)
            Queries.

        Returns
        -------
        array of shape (queries,)
            Labels.

        Raises
        ------
        BudgetExhausted
            If the budget does not pay for all new answers; nothing is charged.
        """
        queries = self._queries(X)
        return np.asarray(self.classes_[self.predictor_.predict(queries)])

    @available_if(_releases_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: ArrayLike) -> Floats:
        """Predict class probabilities; only with ``release="probabilities"``.

        Parameters
        ----------
        X : array-like of shape (queries, columns)
            Queries.

        Returns
        -------
        array of shape (queries, classes)
            Randomised probabilities.

        Raises
        ------
        BudgetExhausted
            If the budget does not pay for all new answers; nothing is charged.
        """
        queries = self._queries(X)
        return self.predictor_.predict_proba(queries)

    @property
    def remaining(self) -> Remaining:
        """What is left of the budget."""
        check_is_fitted(self)
        return self.predictor_.remaining

    def _queries(self, X: ArrayLike) -> NDArray[np.float32]:
        """Return the public features of queries."""
        check_is_fitted(self)
        return self._mapped(validate_data(self, X, dtype=np.float32, reset=False))

    def _mapped(self, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Apply the feature map."""
        if self.feature_map_ is None:
            return inputs
        return np.asarray(self.feature_map_.transform(inputs), dtype=np.float32)


@dataclass(frozen=True, eq=False)
class TeacherEnsemble:
    """Trained teachers. The scores of a query are their vote counts, or the sums of their probabilities.

    The bounds are proven for teachers that `Teachers.fit` trained on separate shards or that were opened from a model
    folder. For an ensemble that you make yourself, they are an assumption: its teachers may have seen the same records.

    Parameters
    ----------
    teachers : MLP or sequence of torch modules
        The teachers: a stack of built-in networks, or modules; None for a module that failed.
    silent : array of bool of shape (teachers,)
        Teachers that vote evenly: those without records or with weights that are not finite.
    classes : int
        Number of classes.
    soft : bool
        Whether teachers vote with their probabilities instead of one label.
    """

    teachers: MLP | Sequence[torch.nn.Module | None]
    silent: NDArray[np.bool_]
    classes: int
    soft: bool
    _fitted: bool = field(default=False, init=False, repr=False)

    @classmethod
    def _of_fit(cls, teachers: MLP, silent: NDArray[np.bool_], classes: int, soft: bool) -> TeacherEnsemble:
        """Return an ensemble with proven bounds; only for teachers that this library trained on separate shards."""
        ensemble = cls(teachers, silent, classes, soft)
        object.__setattr__(ensemble, "_fitted", True)
        return ensemble

    @property
    def bounds(self) -> ScoreBounds:
        """How far one record moves the scores of any query."""
        return VOTE_BOUNDS

    def scores(self, features: NDArray[np.floating]) -> Floats:
        """Count the votes.

        Parameters
        ----------
        features : array of shape (queries, features)
            Public features.

        Returns
        -------
        array of shape (queries, classes)
            Votes; each row sums to the number of teachers.
        """
        inputs = np.ascontiguousarray(features, dtype=np.float32)
        votes = np.zeros((len(inputs), self.classes))
        for start in range(0, len(inputs), 512):
            part = inputs[start : start + 512]
            logits = self._logits(part)
            votes[start : start + 512] = self._ballots(logits).sum(0)
        return votes

    def _logits(self, features: NDArray[np.float32]) -> Floats:
        """Return the logits of every teacher, of shape (teachers, queries, classes)."""
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
        """Return every teacher's vote; silent teachers and logits that are not finite vote evenly."""
        even = self.silent[:, None, None] | ~np.isfinite(logits).all(-1, keepdims=True)
        safe = np.where(even, 0.0, logits)
        ballots = softmax(safe) if self.soft else np.eye(self.classes)[safe.argmax(-1)]
        return np.where(even, 1 / self.classes, ballots)


# Modules of the user's own may share state, so that one record changes several of them.
proves_bounds(TeacherEnsemble, when=lambda ensemble: ensemble._fitted and type(ensemble.teachers) is MLP)


def shard_of(identifiers: Sequence[bytes], teachers: int, key: bytes) -> NDArray[np.int64]:
    """Return the shard of each record: a keyed hash of its identifier alone, so that no other record matters.

    Parameters
    ----------
    identifiers : sequence of bytes
        What identifies each record.
    teachers : int
        Number of shards.
    key : bytes
        The secret key.

    Returns
    -------
    array of int of shape (records,)
        Shard numbers.

    Examples
    --------
    >>> bool(shard_of([b"ann", b"bob"], 10, b"key")[1] == shard_of([b"bob"], 10, b"key")[0])
    True
    """
    digests = (hashlib.blake2b(each, key=key, digest_size=8).digest() for each in identifiers)
    return np.array([int.from_bytes(digest, "big") % teachers for digest in digests], dtype=np.int64)


def vote_noise(budget: Budget) -> tuple[float, float]:
    """Return the standard deviation of the noise on a vote count, for a pure choice and for Gaussian noise.

    The exponential mechanism with exponent eps/2 equals the largest of votes plus Gumbel noise of scale 2/eps, standard
    deviation 2.565/eps.

    Parameters
    ----------
    budget : Budget
        The budget of all queries.

    Returns
    -------
    tuple of float
        Both standard deviations; the second is infinite without a delta.
    """
    queries = budget.queries or 1
    pure = np.pi / np.sqrt(6) * 2 * queries / budget.epsilon
    if budget.delta == 0:
        return float(pure), float("inf")
    mu = budget.total("gaussian").to_json()["mu"]
    return float(pure), float(np.sqrt(2 * queries) / float(mu))


def default_teachers(budget: Budget, records: int) -> int:
    """Return the default number of teachers: about eight standard deviations of noise, at least 20 records each.

    Parameters
    ----------
    budget : Budget
        The budget of all queries.
    records : int
        The public number of records.

    Returns
    -------
    int
        At least 3.

    Examples
    --------
    >>> default_teachers(Budget(1.0, 1e-5, queries=1), 10_000)
    21
    """
    return int(np.clip(round(8 * min(vote_noise(budget))), 3, max(records // 20, 3)))


def vote_guarantee(
    answers: Guarantee,
    teachers: int,
    size: int,
    *,
    features: object,
    own_modules: bool,
    classes_declared: bool,
    size_declared: bool,
) -> Guarantee:
    """Return the guarantee of all answers of teachers.

    Parameters
    ----------
    answers : Guarantee
        The guarantee of the predictor that answers.
    teachers : int
        Number of teachers.
    size : int
        The public number of records.
    features : object or None
        The feature map.
    own_modules : bool
        Whether the teachers are the user's own modules.
    classes_declared, size_declared : bool
        Whether the classes and the number of records were declared.

    Returns
    -------
    Guarantee
        That of the answers, with the public facts of the training and the conditions that apply.
    """
    facts = {
        "teachers": teachers,
        "declared_size": size,
        "classes_declared": classes_declared,
        "size_declared": size_declared,
    }
    own_map = runs_own_code(features)
    description = describe_map(features) if isinstance(features, FeatureMap) else None
    assumptions = [*answers.assumptions, *map_assumptions(description)]
    assumptions += [SETTINGS_PUBLIC] if own_map else []
    assumptions += [] if own_modules else [LIBRARY_STACK]
    guarantee = replace(answers, parameters={**answers.parameters, **facts}, assumptions=tuple(assumptions))
    conditions = (
        (OWN_MAP, own_map),
        (OWN_MODULES, own_modules),
        (CLASSES, not classes_declared),
        (SIZE, not size_declared),
    )
    return weakened(guarantee, *(condition for condition, applies in conditions if applies))


def _names(
    features: NDArray[np.float32], labels: NDArray[np.int64], identifiers: Sequence[Any] | None
) -> list[bytes]:
    """Return what identifies each record: its identifier, or its own content."""
    if identifiers is None:
        return [
            row.tobytes() + bytes(str(label), "ascii") for row, label in zip(features, labels, strict=True)
        ]
    if len(identifiers) != len(features):
        raise InvalidInput("identifiers must have one entry for each record.")
    return [str(each).encode() for each in identifiers]


def _seed(key: bytes, shard: int) -> int:
    """Return the seed of a teacher."""
    digest = hashlib.blake2b(b"seed %d" % shard, key=key, digest_size=7).digest()
    return int.from_bytes(digest, "big")


def _built(build: Build, width: int, classes: int, seed: int) -> torch.nn.Module | None:
    """Build a module of the user's own; a failure makes a silent teacher."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return build(width, classes)
        except (QuietmaxError, RuntimeError, ValueError):
            return None


def _check_apart(modules: Sequence[torch.nn.Module | None]) -> None:
    """Raise `InvalidInput` if two teachers share a module, a trained weight or a buffer."""
    seen: set[int] = set()
    for module in modules:
        if module is None:
            continue
        trained = [each for each in module.parameters() if each.requires_grad]
        own = {id(each) for each in (module, *trained, *module.buffers())}
        if own & seen:
            raise InvalidInput(
                "The network function must return a new module each time, but two teachers share a module or weights."
            )
        seen |= own


def _taught(
    module: torch.nn.Module | None,
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
    classes: int,
    seed: int,
) -> torch.nn.Module | None:
    """Train a module from its own seed; a failure makes it silent instead of raising an error."""
    if module is None:
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            train_module(module, Records("shard", features, labels, classes), settings=NETWORK, seed=seed)
        except (QuietmaxError, RuntimeError, ValueError):
            return None
    return module.eval()
