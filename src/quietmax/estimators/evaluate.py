"""Evaluating a model: who is counted, and the account of what evaluations cost.

People who were held out of training are not in the training set. For them, the model is post-processing of other
people's records, and for the people of the training set, the evaluation is: the two together are as private as the
weaker of them (parallel composition, THEORY 3.8). Anybody else may be in both, and the two compose.

The account of a model is in memory from `fit` on, and in the model folder once the model is saved. Only one account of
a model has the evaluation that is free: copies of it set that budget aside.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from quietmax._io import atomic_write
from quietmax._lazy import lazy_module
from quietmax._ray import RayEngine
from quietmax.accounting.costs import GaussianCost
from quietmax.accounting.guarantee import Guarantee
from quietmax.data.encoding import Encoding
from quietmax.data.records import Holdout, Records, is_held_out
from quietmax.data.sources import as_frame, is_source, is_table_path, read_table, rows_at_once
from quietmax.data.tables import TableRows, encoded_rows, person_names, require_person_type
from quietmax.errors import DataUnavailable, InvalidInput, QuietmaxError
from quietmax.estimators.blocks import FILES_IN_MEMORY, Blocks, LocalEngine, Table, _person_digests
from quietmax.estimators.evaluation import (
    Assumed,
    Composition,
    Counts,
    Evaluation,
    EvaluationCharge,
    _binned_answers,
    _count_answers,
    _evaluation_mu,
    _exact_evaluation,
    _free_mu,
    _free_probabilities,
    _noisy_evaluation,
    composed_guarantee,
)
from quietmax.estimators.ray_blocks import RayBlocks, _chosen_engine
from quietmax.estimators.training_set import (
    Persons,
    _checked_records,
    _class_numbers,
    _names_of,
    alike,
    queries,
)
from quietmax.noise.sources import EXACT, NoiseSource, SeededNoise
from quietmax.predictor import Predictor
from quietmax.spending import DESCRIPTION_FILE, OwnProcess, new_identity

if TYPE_CHECKING:
    import pandas as pd

    from quietmax.estimators.serialization import PrivateModel
else:
    pd = lazy_module("pandas")

PAID_PER_ANSWER = (
    "A model that is paid per answer cannot be evaluated: what the answers cost, and which answers are free "
    "afterwards, would tell who was evaluated. Train a head that releases its weights, or with DP-SGD, to publish an "
    "accuracy; or compare the answers of `predict` for people whose records are public."
)


def _evaluate(
    estimator: Any,
    X: Any,
    y: Any = None,
    groups: Any = None,
    *,
    disjoint: bool = False,
    **budget: float | None,
) -> Evaluation:
    """Evaluate a fitted private estimator so that the result may be published; see `PrivateClassifier.evaluate`."""
    from sklearn.utils.validation import check_is_fitted

    check_is_fitted(estimator, "classes_")  # if the last fit failed, the account says so
    if hasattr(estimator, "predictor_"):
        raise InvalidInput(PAID_PER_ANSWER)
    account, seed = _account(estimator), estimator._seed()
    records, recognised = _as_records(estimator, X, y, groups)
    subject = _Subject(
        classifier=estimator._classifier,
        feature_map=estimator.feature_map_,
        classes=tuple(estimator.classes_.tolist()),
        encoding=estimator.encoding_,
        training=estimator.guarantee_,
        source=EXACT if seed is None else SeededNoise(seed),
        engine=_chosen_engine(estimator.engine),
        recognised=recognised,
    )
    return subject._evaluated(records, account, budget, disjoint)


def _as_records(estimator: Any, X: Any, y: Any, groups: Any) -> tuple[Records | TableRows, bool]:
    """Return what an estimator is evaluated on, checked as in training, and whether a rule can recognise the people."""
    encoding: Encoding | None = estimator.encoding_
    if isinstance(X, Records | TableRows) or (is_source(X) and encoding is not None):
        if y is not None or groups is not None:
            raise InvalidInput(
                "Records, files, datasets and streams have labels and persons: leave out `y` and `groups`."
            )
        if isinstance(X, Records):
            return replace(X, features=queries(estimator, X)), True
        return X if isinstance(X, TableRows) else encoded_rows(X, estimator.encoding_), True
    if encoding is not None and (isinstance(X, pd.DataFrame) or hasattr(X, "__arrow_c_stream__")):
        frame = as_frame(X)
        if y is not None:
            frame = frame.assign(**{encoding.label: np.asarray(y, dtype=object)})
        records = _evaluation_records(frame, encoding)
        if records.persons is not None and groups is not None:
            raise InvalidInput("The table has a `person` column already: leave out `groups`.")
    else:
        features = queries(estimator, X)
        from sklearn.base import BaseEstimator

        _, given = _checked_records(BaseEstimator(), features, y)
        _, labels = _class_numbers(given, estimator.classes_)
        records = Records("evaluation", features, labels, len(estimator.classes_))
        encoding = None
    if groups is not None:
        records = replace(records, persons=_names_of(groups))
    return records, encoding is not None and groups is None


def _evaluation_records(frame: pd.DataFrame, encoding: Encoding, name: str = "evaluation") -> Records:
    """Encode the table that a model is evaluated on, as in training."""
    persons = None
    if encoding.person is not None:
        require_person_type(frame, encoding)
        persons = person_names(frame, encoding.person, ignore_case=encoding.person_ignores_case)
    features, labels = encoding.encode(frame), encoding.encode_labels(frame)
    return Records(name, features, labels, len(encoding.classes), encoding=encoding, persons=persons)


@dataclass(frozen=True, eq=False)
class _Subject:
    """What is evaluated: released weights, how records became features, and what is guaranteed of the training."""

    classifier: Any
    feature_map: Any
    classes: tuple[Any, ...]
    encoding: Encoding | None
    training: Guarantee
    source: NoiseSource = EXACT
    engine: LocalEngine | RayEngine = field(default_factory=LocalEngine)
    recognised: bool = True  # Whether the rule of the training can tell who of these people was held out

    @property
    def _holdout(self) -> Holdout | None:
        """The rule that held people out of the training."""
        rule = self.training.parameters.get("holdout")
        return None if rule is None or not self.recognised else Holdout.from_json(rule)

    def _evaluated(
        self,
        records: Records | TableRows,
        account: _MemoryAccount | _FolderAccount,
        budget: Mapping[str, float | None],
        disjoint: bool = False,
    ) -> Evaluation:
        """Count the answers, add noise, and store the result with its cost."""
        if self.training.status == "refuted":
            raise InvalidInput(
                "The guarantee of the model is refuted, so no evaluation of it may be published."
            )
        self._check(records)
        by_rule, unit = self._holdout is not None, self.training.unit
        composition: Composition = "parallel" if by_rule or disjoint else "sequential"
        assumes: tuple[Assumed, ...] = (
            *(("disjoint",) if disjoint and not by_rule else ()),
            *(("seeded",) if self.source is not EXACT else ()),
            *(("names",) if by_rule and unit == "person" else ()),
            *(("encoding",) if by_rule and unit == "record" else ()),
        )
        with account._locked():
            earlier = account._read()
            mu = _evaluation_mu(self.training, earlier, composition, **budget)
            charges = [*earlier, EvaluationCharge(mu, composition, assumes)]
            # The result leaves this method only after it and its cost were stored together. Whatever fails before that
            # costs nothing, because nothing was released.
            counts = self._counts(records)
            result = _noisy_evaluation(counts, self.classes, self.training, charges, self.source)
            account._write([*earlier, replace(charges[-1], result=result)])
        return result

    def _check(self, records: Records | TableRows) -> None:
        """Refuse rows that are not those of the people whom the model protects."""
        if isinstance(records, TableRows):
            unit = "record" if records.encoding.person is None else "person"
        else:
            unit = records.unit
        if unit != self.training.unit:
            raise InvalidInput(
                "The model protects persons, so the evaluation must know whose row each row is: `groups` is required."
                if self.training.unit == "person"
                else "The model protects single records, so rows cannot be counted by person: leave out `groups`."
            )
        if self.recognised and records.encoding != self.encoding:
            raise InvalidInput("The records must have the encoding that the model was trained with.")

    def _counts(self, records: Records | TableRows) -> Counts:
        """Answer every row of the people who are counted, and count the answers.

        Those are the people whom training held out, or everybody if no rule tells them.
        """
        if isinstance(records, TableRows):
            return self._streamed_counts(records)
        counted = self._held_out(records)
        rows = None if counted.persons is None else Persons.of(counted.persons).rows
        classes = len(self.classes)
        answers = _probabilities(self.classifier, self.feature_map, counted.features, classes)
        return _count_answers(counted.labels, *_binned_answers(answers), rows, classes)

    def _streamed_counts(self, rows: TableRows) -> Counts:
        """Count the answers to rows that are read part by part.

        Answers are kept until it is known how many rows each person has: in this process, beyond the memory of the
        engine in files; or on the workers of a Ray cluster, which also compute them.
        """
        classes, key = len(self.classes), secrets.token_bytes(16)
        answered = partial(_with_probabilities, self.classifier, self.feature_map)
        if isinstance(self.engine, RayEngine):
            table: Blocks = RayBlocks(classes, self.engine)
        else:
            table = Blocks(classes, replace(self.engine, progress=None, resume=False), FILES_IN_MEMORY)
        with table:
            if isinstance(table, RayBlocks):
                self._send(table, rows, key)
                if len(table):
                    table.update(answered)
                    table.update(_binned)
            else:
                table.extend(map(_binned, map(answered, self._tables(rows, key))))
            if not len(table):
                nobody = np.empty(0, np.int64)
                return _count_answers(nobody, nobody, nobody, None, classes)
            if self.training.unit == "person":
                table._count_persons()
            return table.sum(_block_counts)

    def _tables(self, rows: TableRows, key: bytes) -> Iterator[Table]:
        """Read the rows of the people who are counted. Progress is in rows, or in files if these do not state them."""
        progress = self.engine.progress if isinstance(self.engine, LocalEngine) else None
        total, done = None if progress is None else rows.count(), 0
        for number, part in enumerate(rows.parts, start=1):
            for records in rows.part_records(part):
                counted = self._held_out(records)
                persons = None if counted.persons is None else _person_digests(counted.persons, key)
                if len(counted):
                    yield Table(counted.features, counted.labels, len(self.classes), persons=persons)
                done += len(records)
                if progress is not None and total is not None:
                    progress(done, total)
            if progress is not None and total is None:
                progress(number, len(rows.parts))

    def _send(self, table: RayBlocks, rows: TableRows, key: bytes) -> None:
        """Let the workers read the rows of the people who are counted; what a holdout has changed is read here."""
        count, holdout = rows.count(), self._holdout
        if count is not None:
            table.expect(3, count)
        if rows.holdout is not None or (holdout is not None and holdout.share == 0):
            table.extend(self._tables(rows, key))
        else:
            table.read(replace(rows, holdout=holdout, held_out=holdout is not None), key)

    def _held_out(self, records: Records) -> Records:
        return records if self._holdout is None else records.take(is_held_out(records, self._holdout))


def _probabilities(
    classifier: Any, feature_map: Any, records: NDArray[np.float32], classes: int
) -> NDArray[np.float64]:
    features = records if feature_map is None else feature_map.transform(records)
    return _free_probabilities(classifier, features, classes)


def _with_probabilities(classifier: Any, feature_map: Any, block: Table) -> Table:
    """Return a block whose rows are probabilities."""
    height = rows_at_once(block.features)
    answers = [
        _probabilities(classifier, feature_map, block.rows[start : start + height], block.classes)
        for start in range(0, len(block), height)
    ]
    return replace(block, rows=np.concatenate(answers))


def _binned(block: Table) -> Table:
    """Return a block whose rows are answers: the predicted class, and the bin of its confidence."""
    return replace(block, rows=np.stack(_binned_answers(block.rows), 1).astype(np.int32))


def _block_counts(block: Table) -> Counts:
    predicted, bins = block.rows.astype(np.int64).T
    return _count_answers(block.labels, predicted, bins, block.repeats, block.classes)


# --- what evaluations have cost -----------------------------------------------------------------------------------


def _with_reserve(evaluations: Sequence[EvaluationCharge], training: Guarantee) -> list[EvaluationCharge]:
    """Return the evaluations of a copy: what is left of the free budget belongs to the original."""
    left = _free_mu(training, evaluations)
    return [*evaluations, *([EvaluationCharge(left, "parallel", reserved=True)] if left else [])]


_MEMORY_LOCK = threading.RLock()


@dataclass(eq=False)
class _MemoryAccount:
    """The evaluations of an estimator since it was fitted, until it is saved.

    A copy or a pickle leaves the free evaluation to the original. A fork cannot evaluate (THEORY 3.12).
    """

    id: str
    training: Guarantee
    evaluations: list[EvaluationCharge] = field(default_factory=list)
    process: OwnProcess = field(default_factory=OwnProcess)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.process.check()
        with _MEMORY_LOCK:
            yield

    def _read(self) -> list[EvaluationCharge]:
        return self.evaluations

    def _write(self, evaluations: list[EvaluationCharge]) -> None:
        self.evaluations = evaluations

    def __reduce__(self) -> tuple[Any, ...]:
        return _MemoryAccount, (self.id, self.training, _with_reserve(self.evaluations, self.training))


def _open_evaluations(estimator: Any) -> None:
    """Open the account of evaluations of an estimator that was fitted now."""
    estimator._evaluations = _MemoryAccount(new_identity(), estimator.guarantee_)


def _account(estimator: Any) -> _MemoryAccount | _FolderAccount:
    """Return the account of a fitted estimator."""
    account: _MemoryAccount | _FolderAccount | None = getattr(estimator, "_evaluations", None)
    if account is None:
        raise InvalidInput(
            "The last `fit` of the estimator failed, or another version made it: fit it again before it is evaluated "
            "or saved."
        )
    return account


def _save_evaluations(estimator: Any, folder: str | Path, write: Callable[[str, str], object]) -> None:
    """Save an estimator together with its evaluations: `write` gets their id and the content of their file.

    Of several folders, the first one keeps the evaluation that is free; later evaluations of the estimator are stored
    there too.
    """
    account, target = _account(estimator), Path(folder).resolve()
    saved = _FolderAccount(target, str(account.id), estimator.guarantee_)
    moves = isinstance(account, _MemoryAccount) or account.folder == target
    with ExitStack() as stack:
        try:
            if moves:
                stack.enter_context(account._locked())
            evaluations = account._read()
        except QuietmaxError:  # in a fork, or the first folder is gone: nobody knows what was evaluated there
            evaluations, moves = [], False
        if not moves:
            evaluations = _with_reserve(evaluations, estimator.guarantee_)
        if not isinstance(account, _MemoryAccount):
            write(saved.id, saved._text(evaluations))
            return
        # Whoever holds the account in memory must not spend again what moves into the folder, whatever interrupts
        # the writing.
        before = account.evaluations
        account._write(_with_reserve(before, account.training))
        try:
            write(saved.id, saved._text(evaluations))
        except BaseException:
            if saved._is_there():
                estimator._evaluations = saved
            else:
                account._write(before)
            raise
        estimator._evaluations = saved


# --- evaluations of a model folder --------------------------------------------------------------------------------

EVALUATION_FILE = "evaluation.json"
"""The file of a model folder with its evaluations and what they cost. It may be published with the folder."""
_FORMAT = "quietmax evaluations"


def read_evaluations(folder: str | Path, model: PrivateModel) -> list[EvaluationCharge]:
    """Read the evaluations of a model folder."""
    if isinstance(model.classifier, Predictor):
        return []
    return _FolderAccount(Path(folder), str(model.evaluation_id), model.guarantee)._read()


def evaluate_folder(
    folder: str | Path,
    model: PrivateModel,
    records: Records | TableRows,
    *,
    exact: bool = False,
    engine: LocalEngine | RayEngine | None = None,
    **budget: float | None,
) -> Evaluation:
    """Evaluate a saved model for a budget of `epsilon`, `delta` or `mu`, and store the result in its folder.

    The folder keeps account of what its evaluations cost. The result is stored with its cost before it is returned.
    """
    if isinstance(model.classifier, Predictor):
        raise InvalidInput(PAID_PER_ANSWER)
    subject = _Subject(
        *(model.classifier, model.features, model.classes, model.encoding, model.guarantee),
        engine=engine or LocalEngine(),
    )
    if exact:
        subject._check(records)
        return _exact_evaluation(subject._counts(records), model.classes, model.guarantee.unit)
    account = _FolderAccount(Path(folder), str(model.evaluation_id), model.guarantee)
    return subject._evaluated(records, account, budget)


def evaluated_rows(
    model: PrivateModel, data: str, *, in_parts: bool, data_dir: Path | None = None
) -> Records | TableRows:
    """Read a table, also part by part, or a data set as the model has read its training set."""
    from quietmax.data.registry import load_records

    if is_table_path(data) or in_parts:
        if model.encoding is None:
            raise InvalidInput("The model was not trained on a table: `data` must be a data set.")
        if in_parts:
            return encoded_rows(data, model.encoding)
        return _evaluation_records(
            read_table(data, label=model.encoding.label).frame, model.encoding, Path(data).stem
        )
    if model.holdout is None or model.holdout.share == 0:
        raise InvalidInput(
            f"The model was trained on {data!r} without `holdout`, so nobody is left to evaluate it on: `data` must be "
            "a file."
        )
    records = load_records(data, data_dir=data_dir)
    if records.features.shape[1] != model.inputs or records.encoding != model.encoding:
        raise InvalidInput(f"The data set {data!r} is not encoded as the records of the model.")
    return records


def split_name(model: PrivateModel) -> str | None:
    """Return a name of the split that held people out of a model's training set.

    Two models with the same name of the split hold the same people out of a table. The name says what is held out,
    records or people, and how they are recognised: by an encoding, which names the `person` column and its type. People
    of plain arrays are recognised by nothing, so the split belongs to the one model.
    """
    holdout, encoding, unit = model.holdout, model.encoding, model.guarantee.unit
    if holdout is None:
        return None
    if encoding is None or (unit == "person" and encoding.person is None):
        known_by = f"model {model.evaluation_id}"
    else:
        known_by = f"encoding {hashlib.sha256(encoding.to_json().encode()).hexdigest()[:32]}"
    return f"{holdout.share!r} of the {unit}s of {known_by}, seed {holdout.seed}"


@dataclass(frozen=True, eq=False)
class _FolderAccount:
    """The evaluations of a model folder, in its file."""

    folder: Path
    id: str  # That of the description
    training: Guarantee

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            file = os.open(self.folder / DESCRIPTION_FILE, os.O_RDONLY)
        except OSError as problem:
            raise DataUnavailable(
                f"The model in {self.folder} cannot be opened ({problem.strerror})."
            ) from problem
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def _read(self) -> list[EvaluationCharge]:
        path = self.folder / EVALUATION_FILE
        found: list[EvaluationCharge] = []
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT or content["id"] != self.id:
                raise ValueError("another model")
            for entry in content["evaluations"]:
                found.append(_charge_from_json(entry, found, self.training))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
            raise DataUnavailable(
                f"The evaluations in {path} are missing, damaged or those of another model. What was spent on them is "
                "unknown. Restore the file from a copy."
            ) from problem
        return found

    def _is_there(self) -> bool:
        """Return whether the folder has the evaluations of this model."""
        with suppress(DataUnavailable):
            self._read()
            return True
        return False

    def _text(self, evaluations: Sequence[EvaluationCharge]) -> str:
        """Return the content of the file."""
        entries = [
            {**vars(each), "result": None if each.result is None else each.result.to_json()}
            for each in evaluations
        ]
        content = {"format": _FORMAT, "id": self.id, "evaluations": entries}
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    def _write(self, evaluations: list[EvaluationCharge]) -> None:
        text = self._text(evaluations)
        path = self.folder / EVALUATION_FILE
        try:
            atomic_write(path, lambda staging: staging.write_text(text, encoding="utf-8"))
        except OSError as problem:
            raise QuietmaxError(
                f"The evaluation cannot be written to {path} ({problem.strerror})."
            ) from problem


def _charge_from_json(
    entry: Mapping[str, Any], earlier: Sequence[EvaluationCharge], training: Guarantee
) -> EvaluationCharge:
    """Return what `_FolderAccount` wrote; raise ValueError if the result contradicts what it was charged for."""
    charge = EvaluationCharge(
        mu=GaussianCost(float(entry["mu"])).mu,
        composition=entry["composition"],
        assumes=tuple(entry["assumes"]),
        id=str(entry["id"]),
        reserved=entry["reserved"] is True,
    )
    if charge.composition not in get_args(Composition) or not set(charge.assumes) <= set(get_args(Assumed)):
        raise ValueError("not the charge of an evaluation")
    if entry["result"] is None and charge.reserved:
        return charge
    result = Evaluation.from_json(entry["result"])
    computed, stated = composed_guarantee(training, [*earlier, charge]), cast(Guarantee, result.guarantee)
    if (
        (result.mu, result.composition, result.unit) != (charge.mu, charge.composition, training.unit)
        or charge.reserved
        or not alike(stated.to_json(), json.loads(json.dumps(computed.to_json())))
    ):
        raise ValueError("a result that is not the one charged for")
    return replace(charge, result=result)
