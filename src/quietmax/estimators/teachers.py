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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from quietmax._ray import RayEngine, ray_map
from quietmax._threads import parallel_map
from quietmax.accounting.costs import Budget
from quietmax.accounting.guarantee import Guarantee, Unit
from quietmax.data.records import Records
from quietmax.data.schema import Schema
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.estimators.base import PrivateClassifier, _documented
from quietmax.estimators.blocks import Blocks, Floats, LocalEngine, Progress, Table
from quietmax.estimators.ray_blocks import _chosen_engine
from quietmax.estimators.training_set import (
    LIBRARY_STACK,
    OWN_MODULES,
    Basis,
    ImageShape,
    Piece,
    TrainingRows,
    check_choice,
)
from quietmax.mechanisms.base import GaussianScores, Mechanism, NoisyMax, proves_bounds
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.images import image_features
from quietmax.models.stacked import (
    MLP,
    CrossEntropy,
    TrainingSettings,
    checked_finite,
    joined_stacks,
    stack_edges,
    train_networks,
    training_bytes,
)
from quietmax.models.training import softmax, train_module
from quietmax.noise.sources import EXACT, NoiseSource, SeededNoise
from quietmax.predictor import Predictor, Remaining
from quietmax.sensitivity.certified import ScoreBounds, Sensitivity

Build = Callable[[int, int], torch.nn.Module]

NETWORK = TrainingSettings(hidden=(64,), loss=CrossEntropy(), learning_rate=0.003, epochs=60, batch_size=50)
LINEAR = TrainingSettings(
    hidden=(), loss=CrossEntropy(), learning_rate=0.1, epochs=60, batch_size=50, l2=1e-5
)
MOST_STEPS = 10**7
"""Most training steps of a teacher: hours even for the smallest networks."""
STACK_BYTES = 2**26
"""Teachers that are trained together need about this many bytes, with the records of their shards."""
MOST_TEACHERS = 2**20
_PROBE_STEPS = 3
# Sums of probabilities are rounded to floats: the slack covers that for up to `MOST_TEACHERS`.
_ROUNDING = 1 + 2.0**-30


@_documented
@dataclass(eq=False, repr=False)
class Teachers(PrivateClassifier):
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
        The public feature map; None for no map. "auto": `image_features` if ``image_shape`` is given, otherwise none.
        A map with the user's own code makes the guarantee conditional.
    network : TrainingSettings or callable, optional
        Training settings of the built-in network, or a function (features, classes) -> new torch module, which makes
        the guarantee conditional. By default a small network, or a linear one on a feature map.
    declared_size : int, optional
        The public number of records, or of persons, which defaults are computed from. If None, the true number is
        used and the guarantee is conditional.
    $shared_parameters
    engine : LocalEngine, RayEngine, "local" or "ray", default="local"
        Where the rows are kept and the teachers are trained. Teachers are trained in stacks of at most 25, on threads
        or on the workers of a Ray cluster. The rows stay here; a thread or worker gets those of one stack: about
        64 MiB (for persons, times the rows that a person has), or one shard if that is larger. The teachers are the
        same, bit for bit, wherever they are trained.

    Attributes
    ----------
    ensemble_ : TeacherEnsemble
        The trained teachers. They are private: only the predictor may ask them.
    predictor_ : Predictor
        Answers queries and charges for them.
    $shared_attributes

    Examples
    --------
    >>> X, y = np.array([[0.0, 1.0], [1.0, 0.0]] * 200), np.array([0, 1] * 200)
    >>> teachers = Teachers(epsilon=8.0, queries=2, teachers=5, classes=(0, 1), declared_size=400).fit(X, y)
    >>> len(teachers.predict([[0.1, 0.9]])), teachers.remaining.queries
    (1, 1)
    """

    epsilon: float = 1.0
    delta: float = 1e-5
    queries: int = 1000
    teachers: int | None = None
    _: KW_ONLY
    release: Literal["label", "probabilities"] = "label"
    method: Literal["auto", "gaussian", "exponential", "permute-and-flip"] = "auto"
    features: FeatureMap | str | None = "auto"
    image_shape: ImageShape | None = None
    network: TrainingSettings | Build | None = None
    declared_size: int | None = None
    classes: Sequence[Any] | None = None
    schema: Schema | None = None
    random_state: Any = None
    engine: LocalEngine | RayEngine | Literal["local", "ray"] = "local"

    def _train(self, data: TrainingRows) -> Guarantee:
        budget = Budget(self.epsilon, self.delta, self.queries)
        key = self._key()
        self.feature_map_ = self._feature_map(data)
        engine = _chosen_engine(self.engine)
        # Rows are kept here, also if the teachers are trained on Ray workers.
        place = engine if isinstance(engine, LocalEngine) else LocalEngine()
        epochs = self._settings().epochs
        with self._read(data, place, 2 + epochs, lambda piece: _hashes(_names(piece), key)) as blocks:
            blocks.expect(1 + epochs)
            size = self._size(len(blocks) if data.unit == "record" else blocks._distinct_persons())
            count = _default_teachers(budget, size) if self.teachers is None else self.teachers
            if not 1 <= count <= MOST_TEACHERS or count != int(count):
                raise InvalidInput(f"teachers must be an integer from 1 to {MOST_TEACHERS:,}, got {count!r}.")
            shards = self._sharded(blocks, count)
            self.ensemble_ = self._trained(shards, data.unit, count, key, size, engine)
        source: NoiseSource = (
            EXACT if self.random_state is None else SeededNoise(np.random.default_rng(list(key)))
        )
        self.predictor_ = Predictor(self.ensemble_, self._mechanism(budget, count), budget, noise=source)
        own_modules = type(self.ensemble_.teachers) is not MLP
        return vote_guarantee(
            self.predictor_.guarantee, count, size, self._basis(data), own_modules=own_modules
        )

    @property
    def _classifier(self) -> Predictor:
        return self.predictor_

    def _offers(self, method: str) -> bool:
        return method == "predict_proba" and self.release == "probabilities"

    def _automatic_features(self, data: TrainingRows, size: float | None) -> FeatureMap | None:  # noqa: ARG002
        return None if self.image_shape is None else image_features(self.image_shape)

    def _key(self) -> bytes:
        if self.random_state is None:
            return os.urandom(32)
        return b"%d" % check_random_state(self.random_state).randint(2**31)

    def _mechanism(self, budget: Budget, count: int) -> Mechanism:
        check_choice("release", self.release, ("label", "probabilities"))
        check_choice("method", self.method, ("auto", "gaussian", "exponential", "permute-and-flip"))
        if self.release == "probabilities":
            return GaussianScores(votes=count)
        if self.method == "auto":
            pure, gaussian = _vote_noise(budget)
            return NoisyMax("permute-and-flip" if pure <= gaussian else "gaussian")
        return NoisyMax(self.method)

    def _settings(self) -> TrainingSettings:
        if isinstance(self.network, TrainingSettings):
            return self.network
        return NETWORK if self.feature_map_ is None or self.network is not None else LINEAR

    def _sharded(self, blocks: Blocks, count: int) -> _Shards:
        starts: list[NDArray[np.int64]] = []

        def _sorted_by_shard(block: Table) -> Table:
            assert block.persons is not None
            shards = (block.persons.view(">u8") % np.uint64(count)).astype(np.int64)
            order = np.argsort(shards, kind="stable")
            starts.append(np.searchsorted(shards[order], np.arange(count + 1)))
            return Table(block.rows[order], block.labels[order], block.classes)

        self._map_rows(blocks, finite=not callable(self.network), then=_sorted_by_shard)
        return _Shards(blocks, np.stack(starts))

    def _trained(
        self, shards: _Shards, unit: Unit, count: int, key: bytes, size: int, engine: LocalEngine | RayEngine
    ) -> TeacherEnsemble:
        """Train one teacher on each shard; a teacher without records or with broken weights is silent."""
        seeds = [_seed(key, shard) for shard in range(count)]
        classes, soft = len(self.classes_), self.release == "probabilities"
        if self.network is None or isinstance(self.network, TrainingSettings):
            stack = _trained_stacks(shards, seeds, classes, self._settings(), size, engine)
            broken = ~torch.isfinite(stack.weight_vectors()).all(1).numpy()
            return TeacherEnsemble._of_fit(stack, shards._empty | broken, classes, soft, unit)
        built = [_built(self.network, shards._columns, classes, seed) for seed in seeds]
        _check_apart(built)
        modules: list[torch.nn.Module | None] = []
        for shard, (module, seed) in enumerate(zip(built, seeds, strict=True)):
            taught = None
            if not shards._empty[shard]:
                table, _ = shards._read(shard, shard + 1)
                taught = _taught(module, table.rows, table.labels, classes, seed)
                shards.blocks.advance(NETWORK.epochs * len(table))
            modules.append(taught)
        silent = np.array([module is None for module in modules])
        return TeacherEnsemble(modules, silent, classes, soft, unit)

    @property
    def remaining(self) -> Remaining:
        """What is left of the budget."""
        check_is_fitted(self)
        return self.predictor_.remaining


@dataclass(frozen=True, eq=False)
class TeacherEnsemble:
    """Trained teachers. The scores of a query are their vote counts, or the sums of their probabilities.

    The bounds are proven for teachers of `Teachers.fit` or of a model folder; of others, they are an assumption.
    """

    teachers: MLP | Sequence[torch.nn.Module | None]
    silent: NDArray[np.bool_]
    classes: int  # Number of classes
    soft: bool  # Whether teachers vote with their probabilities instead of one label
    unit: Unit = "record"  # What changes one teacher alone: one record, or all records of one person
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
        because = (
            f"One {self.unit} changes one teacher's vote: one class loses at most 1, another gains at most 1 "
            "(THEORY 3.4)."
        )
        one = Sensitivity(_ROUNDING, "certified", because)
        return ScoreBounds(one, replace(one, value=float(np.sqrt(2.0)) * _ROUNDING), unit=self.unit)

    def scores(self, features: NDArray[np.floating]) -> Floats:
        """Count the votes."""
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
        """Return every teacher's vote; silent teachers and logits that are not finite vote evenly."""
        even = self.silent[:, None, None] | ~np.isfinite(logits).all(-1, keepdims=True)
        safe = np.where(even, 0.0, logits)
        ballots = softmax(safe) if self.soft else np.eye(self.classes)[safe.argmax(-1)]
        return np.where(even, 1 / self.classes, ballots)


# Modules of the user's own may share state, so that one record changes several of them.
proves_bounds(TeacherEnsemble, when=lambda ensemble: ensemble._fitted and type(ensemble.teachers) is MLP)


def shard_of(names: Sequence[bytes], teachers: int, key: bytes) -> NDArray[np.int64]:
    """Return the shard of each record: a keyed hash of its own name alone, so that no other record matters."""
    return (_hashes(names, key).view(">u8") % np.uint64(teachers)).astype(np.int64)


def _hashes(names: Iterable[bytes], key: bytes) -> NDArray[np.bytes_]:
    digests = b"".join(hashlib.blake2b(each, key=key, digest_size=8).digest() for each in names)
    return np.frombuffer(digests, "S8")


@dataclass(frozen=True, eq=False)
class _Shards:
    """Rows in blocks, each sorted by shard; `starts` says where each shard begins in each block, and the last ends."""

    blocks: Blocks
    starts: NDArray[np.int64]

    @property
    def _columns(self) -> int:
        return self.blocks.features

    @property
    def _empty(self) -> NDArray[np.bool_]:
        return np.asarray(np.diff(self.starts).sum(0) == 0)

    def _read(self, first: int, last: int) -> tuple[Table, list[NDArray[np.int64]]]:
        table = self.blocks.slices([slice(start[first], start[last]) for start in self.starts])
        counts = np.diff(self.starts[:, first : last + 1])
        shards = np.repeat(np.tile(np.arange(last - first), len(counts)), counts.ravel())
        return table, [np.flatnonzero(shards == shard) for shard in range(last - first)]

    def _progress(self, rows: int) -> Progress:
        before = 0

        def _report(done: int, total: int) -> None:
            nonlocal before
            self.blocks.advance(rows * done // total - before)
            before = rows * done // total

        return _report


def _trained_stacks(
    shards: _Shards,
    seeds: Sequence[int],
    classes: int,
    network: TrainingSettings,
    size: int,
    engine: LocalEngine | RayEngine,
) -> MLP:
    steps = network.epochs * max(1, -(-size // (len(seeds) * network.batch_size)))
    if steps > MOST_STEPS:
        raise InvalidInput(
            f"Each of {len(seeds)} teachers would take {steps:,} training steps for declared_size {size:,}, but at "
            f"most {MOST_STEPS:,} are allowed."
        )
    edges = _teacher_stacks(len(seeds), size, shards._columns, classes, network)

    def _job(number: int) -> tuple[Any, Any, int, Any, TrainingSettings, Sequence[int], int]:
        first, last = edges[number], edges[number + 1]
        table, own = shards._read(first, last)
        return table.rows, table.labels, classes, own, network, seeds[first:last], steps

    def _stack(number: int) -> MLP:
        given = _job(number)
        return train_networks(*given, shards._progress(network.epochs * len(given[0])))

    numbers = range(len(edges) - 1)
    if isinstance(engine, RayEngine):
        height = int(np.diff(edges).max())
        probe = partial(_trained_on_public_rows, shards._columns, classes, network, height)
        stacks = [*ray_map(engine, train_networks, map(_job, numbers), total=len(numbers), probe=probe)]
    else:
        stacks = parallel_map(_stack, len(numbers))
    return joined_stacks(stacks)


def _teacher_stacks(
    count: int, size: int, features: int, classes: int, network: TrainingSettings
) -> list[int]:
    """Divide teachers into stacks that are trained together, by public numbers alone; see `stack_edges`."""
    shard = 4 * features * -(-size // count)
    training = training_bytes((features, *network.hidden, classes), network)
    return stack_edges(count, shard + training, STACK_BYTES)


def _trained_on_public_rows(features: int, classes: int, network: TrainingSettings, height: int) -> bytes:
    """Return the weights of a stack of teachers after a few steps on public rows, which all workers must agree on."""
    rows = np.random.default_rng(0).random((height * network.batch_size, features), np.float32)
    own = np.array_split(np.arange(len(rows)), height)
    labels = np.arange(len(rows)) % classes
    trained = train_networks(rows, labels, classes, own, network, range(height), _PROBE_STEPS)
    return trained.weight_vectors().numpy().tobytes()


def _vote_noise(budget: Budget) -> tuple[float, float]:
    """Return the standard deviation of the noise on a vote count, for a pure choice and for Gaussian noise."""
    queries = budget.queries or 1
    pure = np.pi / np.sqrt(6) * 2 * queries / budget.epsilon
    if budget.delta == 0:
        return float(pure), float("inf")
    mu = budget.total("gaussian").to_json()["mu"]
    return float(pure), float(np.sqrt(2 * queries) / float(mu))


def _default_teachers(budget: Budget, records: int) -> int:
    """Return the default number of teachers: about eight standard deviations of noise, at least 20 records each."""
    return int(np.clip(round(8 * min(_vote_noise(budget))), 3, max(records // 20, 3)))


def vote_guarantee(
    answers: Guarantee, teachers: int, size: int, basis: Basis, *, own_modules: bool = False
) -> Guarantee:
    """Return the guarantee of all answers of teachers."""
    facts = {"teachers": teachers, "declared_size": size, **basis.facts}
    guarantee = replace(answers, parameters={**answers.parameters, **facts})
    if own_modules:
        return basis.under(guarantee, own_modules=OWN_MODULES)
    return basis.under(guarantee, (LIBRARY_STACK,))


def _names(piece: Piece) -> Iterator[bytes]:
    """Yield what decides about each record's shard: its person's name, or its own content."""
    if piece.persons is not None:
        for name in piece.persons:
            yield name.encode("utf-8", "surrogatepass")
        return
    for row, label in zip(piece.records, piece.labels, strict=True):
        yield row.tobytes() + bytes(str(label), "ascii")


def _seed(key: bytes, shard: int) -> int:
    digest = hashlib.blake2b(b"seed %d" % shard, key=key, digest_size=7).digest()
    return int.from_bytes(digest, "big")


def _built(build: Build, width: int, classes: int, seed: int) -> torch.nn.Module | None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return build(width, classes)
        except (QuietmaxError, RuntimeError, ValueError):
            return None


def _check_apart(modules: Sequence[torch.nn.Module | None]) -> None:
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
