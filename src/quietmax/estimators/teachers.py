"""Teachers: networks trained on disjoint shards of the records vote, and the votes are released with noise.

No sensitivity analysis of any network is needed (THEORY 3.4). A record is in one shard, so it can change one teacher,
and with it the vote counts by at most sqrt(2) in L2 and 1 per class, whatever the networks are. The same holds for all
records of a person, if the person's name decides about the shard (THEORY 3.7). For that to be true:

- a record's shard does not depend on others: a keyed hash of its person or its content decides, never its position;
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
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from quietmax.accounting.budget import Budget
from quietmax.accounting.guarantee import Guarantee, Unit
from quietmax.data.encoding import Encoding
from quietmax.data.records import Records
from quietmax.data.schema import Schema
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.estimators.training_set import TrainingSet, data_conditions, queries, training_set, with_holdout
from quietmax.estimators.validation import (
    LIBRARY_STACK,
    OWN_MAP,
    OWN_MODULES,
    SETTINGS_PUBLIC,
    ImageShape,
    check_choice,
    checked_size,
    map_assumptions,
    named_features,
    person_assumptions,
    runs_own_code,
    size_condition,
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
# Sums of probabilities are rounded to floats: the slack covers that for any number of teachers below 2^20.
_ROUNDING = 1 + 2.0**-30


def vote_bounds(unit: Unit) -> ScoreBounds:
    """Return how far one unit moves the votes on any query.

    Parameters
    ----------
    unit : {"record", "person"}
        What is in one shard alone.

    Returns
    -------
    ScoreBounds
        1 per class, sqrt(2) in L2.

    Examples
    --------
    >>> round(vote_bounds("person").vector.value, 4)
    1.4142
    """
    because = f"One {unit} changes one teacher's vote: one class loses at most 1, another gains at most 1 (THEORY 3.4)."
    return ScoreBounds(
        one=Sensitivity(_ROUNDING, "certified", because),
        vector=Sensitivity(float(np.sqrt(2.0)) * _ROUNDING, "certified", because),
        unit=unit,
    )


VOTE_BOUNDS = vote_bounds("record")


def _releases_probabilities(estimator: Teachers) -> bool:
    return estimator.release == "probabilities"


class Teachers(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Answer a number of queries by the noisy vote of networks trained on disjoint shards of the records (PATE).

    Every new query is charged once; asking the same query again is free. The guarantee holds for one record added or
    removed, or for all records of one person if ``fit`` is told whose they are.

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
        The public number of records, or of persons, which defaults are computed from. If None, the true number is
        used and the guarantee is conditional.
    classes : sequence, optional
        The public set of labels. If None, it is read off ``y`` and the guarantee is conditional. A schema declares
        them instead.
    schema : Schema, optional
        What is public about the columns of a table; ``fit`` then takes a data frame.
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
    encoding_ : Encoding or None
        How the rows of a table are encoded; None for arrays.
    holdout_ : Holdout or None
        Which persons of the table were held out of training; None if nobody was.
    n_features_in_ : int
        Number of columns of an encoded record.
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
        schema: Schema | None = None,
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
        self.schema = schema
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None, *, groups: Any = None) -> Teachers:
        """Assign private records to shards and train one teacher on each.

        Parameters
        ----------
        X : array-like of shape (records, columns), data frame or Records
            The private records. A pandas or polars frame if there is a ``schema``.
        y : array-like of shape (records,), optional
            Their labels, unless they are in the frame.
        groups : array-like of shape (records,), optional
            Whose record each one is. The unit of the guarantee is then the person. The `person` column of a schema
            does the same.

        Returns
        -------
        Teachers
            The fitted estimator.
        """
        found = training_set(self, X, y, groups)
        budget = Budget(self.epsilon, self.delta, self.queries)
        size = found.units if self.declared_size is None else checked_size(self.declared_size)
        count = default_teachers(budget, size) if self.teachers is None else self.teachers
        if count < 1:
            raise InvalidInput(f"teachers must be at least 1, got {count}.")
        self.feature_map_ = self._feature_map()
        mapped = self._mapped(found.records)
        key = self._key()
        shards = shard_of(_names(found), count, key)
        self.ensemble_ = self._trained(mapped, found, shards, count, key, size)
        source: NoiseSource = (
            EXACT if self.random_state is None else SeededNoise(np.random.default_rng(list(key)))
        )
        self.predictor_ = Predictor(self.ensemble_, self._mechanism(budget, count), budget, noise=source)
        guarantee = vote_guarantee(
            self.predictor_.guarantee,
            count,
            size,
            features=self.feature_map_,
            own_modules=not isinstance(self.ensemble_.teachers, MLP),
            size_declared=self.declared_size is not None,
            classes_declared=found.classes_declared,
            encoding=found.encoding,
            fitted_steps=found.fitted_steps,
        )
        self.guarantee_ = with_holdout(guarantee, found.holdout)
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
        found: TrainingSet,
        shards: NDArray[np.int64],
        count: int,
        key: bytes,
        size: int,
    ) -> TeacherEnsemble:
        """Train one teacher on each shard; a teacher without records or with broken weights is silent."""
        labels = found.labels
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
            return TeacherEnsemble._of_fit(stack, empty | broken, classes, soft, found.unit)
        built = [_built(network, features.shape[1], classes, seed) for seed in seeds]
        _check_apart(built)
        modules = [
            None
            if empty[shard]
            else _taught(module, features[rows[shard]], labels[rows[shard]], classes, seed)
            for shard, (module, seed) in enumerate(zip(built, seeds, strict=True))
        ]
        silent = np.array([module is None for module in modules])
        return TeacherEnsemble(modules, silent, classes, soft, found.unit)

    def predict(self, X: Any) -> NDArray[Any]:
        """Predict labels by the noisy vote; every new query is charged once.

        Parameters
        ----------
        X : array-like of shape (queries, columns) or data frame
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
    def predict_proba(self, X: Any) -> Floats:
        """Predict class probabilities; only with ``release="probabilities"``.

        Parameters
        ----------
        X : array-like of shape (queries, columns) or data frame
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

    def _queries(self, X: Any) -> NDArray[np.float32]:
        """Return the public features of queries."""
        return self._mapped(queries(self, X))

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
    unit : {"record", "person"}
        What changes one teacher alone: one record, or all records of one person.
    """

    teachers: MLP | Sequence[torch.nn.Module | None]
    silent: NDArray[np.bool_]
    classes: int
    soft: bool
    unit: Unit = "record"
    _fitted: bool = field(default=False, init=False, repr=False)

    @classmethod
    def _of_fit(
        cls, teachers: MLP, silent: NDArray[np.bool_], classes: int, soft: bool, unit: Unit = "record"
    ) -> TeacherEnsemble:
        """Return an ensemble with proven bounds; only for teachers that this library trained on separate shards."""
        ensemble = cls(teachers, silent, classes, soft, unit)
        object.__setattr__(ensemble, "_fitted", True)
        return ensemble

    @property
    def bounds(self) -> ScoreBounds:
        """How far one record or person moves the scores of any query."""
        return vote_bounds(self.unit)

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


def shard_of(names: Sequence[bytes], teachers: int, key: bytes) -> NDArray[np.int64]:
    """Return the shard of each record: a keyed hash of its own name alone, so that no other record matters.

    Parameters
    ----------
    names : sequence of bytes
        The name of each record's person, or its content.
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
    digests = (hashlib.blake2b(each, key=key, digest_size=8).digest() for each in names)
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
    size_declared: bool,
    classes_declared: bool,
    encoding: Encoding | None,
    fitted_steps: Sequence[str],
) -> Guarantee:
    """Return the guarantee of all answers of teachers.

    Parameters
    ----------
    answers : Guarantee
        The guarantee of the predictor that answers.
    teachers : int
        Number of teachers.
    size : int
        The public number of records or persons.
    features : object or None
        The feature map.
    own_modules : bool
        Whether the teachers are the user's own modules.
    size_declared : bool
        Whether the number of records or persons was declared.
    classes_declared, encoding, fitted_steps
        See `data_conditions`.

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
        **({"fitted_steps": list(fitted_steps)} if fitted_steps else {}),
    }
    own_map = runs_own_code(features)
    description = describe_map(features) if isinstance(features, FeatureMap) else None
    assumptions = [
        *answers.assumptions,
        SETTINGS_PUBLIC,
        *person_assumptions(answers.unit, None if encoding is None else encoding.person),
        *map_assumptions(description),
    ]
    assumptions += [] if own_modules else [LIBRARY_STACK]
    guarantee = replace(answers, parameters={**answers.parameters, **facts}, assumptions=tuple(assumptions))
    return weakened(
        guarantee,
        *((OWN_MAP,) if own_map else ()),
        *((OWN_MODULES,) if own_modules else ()),
        *data_conditions(classes_declared=classes_declared, encoding=encoding, fitted_steps=fitted_steps),
        *(() if size_declared else (size_condition(answers.unit),)),
    )


def _names(found: TrainingSet) -> list[bytes]:
    """Return what decides about each record's shard: its person's name, or its own content."""
    if found.persons is not None:
        return [name.encode("utf-8", "surrogatepass") for name in found.persons.names]
    return [
        row.tobytes() + bytes(str(label), "ascii")
        for row, label in zip(found.records, found.labels, strict=True)
    ]


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
