"""An accuracy that may be published: noisy counts of answers, and what they cost (THEORY 3.9).

`figures` says what is counted. A person with k rows adds 1/k for each row, rounded down to a multiple of 2^-24. The
account of what a model's evaluations cost is in memory from `fit` on, and in the model folder once the model is saved.
Only one account of a model has the evaluation that is free: copies of it set that budget aside.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np

from quietmax._io import write_text
from quietmax._lazy import lazy_module
from quietmax._ray import RayEngine
from quietmax.accounting.costs import (
    GaussianCost,
    decimal,
    delta_of,
    epsilon_of,
    mu_of,
    root_rounded_down,
    root_rounded_up,
    rounded_up,
)
from quietmax.accounting.guarantee import Guarantee, Unit
from quietmax.data.encoding import Encoding
from quietmax.data.records import Holdout, Records, is_held_out
from quietmax.data.sources import as_frame, is_table_path, read_table, rows_at_once
from quietmax.data.tables import TableRows, encoded_rows, person_names, require_person_type
from quietmax.errors import BudgetExhausted, DataUnavailable, InvalidInput, QuietmaxError, QuietmaxWarning
from quietmax.estimators.blocks import FILES_IN_MEMORY, Blocks, LocalEngine, Table, _person_digests
from quietmax.estimators.figures import SHARE, By, Composition, Costs, Counts, Evaluation, GroupsOf, Tables
from quietmax.estimators.ray_blocks import RayBlocks, _chosen_engine
from quietmax.estimators.series import drift, earlier_amount, own_cost, rule_of
from quietmax.estimators.training_set import (
    Condition,
    Persons,
    _checked_records,
    _class_numbers,
    _names_of,
    alike,
    queries,
    weakened,
)
from quietmax.noise.release import release_gaussian
from quietmax.noise.sources import EXACT, ExactNoise, NoiseSource, SeededNoise
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
_MOST_UNITS = 2**53
Assumed = Literal["disjoint", "seeded", "names", "encoding", "cohort"]
_CONDITIONS: dict[Assumed, Condition] = {
    "disjoint": Condition(
        "Who was held out was declared, and not computed by the library (THEORY 3.8).",
        (
            "No evaluated person is in the training set, and on which side a person is does not depend on other "
            "people.",
        ),
    ),
    "seeded": Condition(
        "The noise of the evaluation is seeded and in floating point, for experiments only (THEORY 3.5).",
        ("Nobody knows the seed, and nobody looks at the low digits of the counts.",),
    ),
}
_ASSUMPTIONS: dict[Assumed, str] = {
    "names": "The evaluated people have the same names as in training.",
    "encoding": "The evaluated records are encoded as in training.",
    "cohort": "The evaluated people have the same cohorts as in training: all rows that decide are in the table.",
}


# --- what it costs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationCharge:
    """What one evaluation cost the people who were counted."""

    mu: float  # The Gaussian cost
    composition: Composition  # "parallel": they were held out of training
    assumes: tuple[Assumed, ...] = ()
    id: str = field(default_factory=new_identity)  # A random id of the evaluation
    reserved: bool = False  # Nothing was published: the free evaluation belongs to another copy
    result: Evaluation | None = None  # The published figures, unless it is reserved


def _evaluation_mu(
    training: Guarantee,
    charges: Sequence[EvaluationCharge],
    composition: Composition,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    mu: float | None = None,
) -> float:
    if mu is not None and epsilon is not None:
        raise InvalidInput("Only one of mu and epsilon can be given.")
    if delta is not None and epsilon is None:
        raise InvalidInput("`delta` requires `epsilon`.")
    if mu is not None:
        return GaussianCost(mu).mu
    if epsilon is not None:
        return mu_of(epsilon, 1e-5 if delta is None else delta)
    if composition == "sequential":
        raise InvalidInput(
            "The evaluated people may be in the training set, so the evaluation costs them something in addition to "
            "the training: a budget is required (`epsilon`, `delta`). For people who were held out it is free."
        )
    found = _free_mu(training, charges)
    if found < 1e-3 * _as_gaussian(training).mu:
        spent = (
            "The model was copied or saved before, and only the first one may evaluate the holdout for free."
            if any(each.reserved for each in charges)
            else "The evaluations of this holdout have spent as much as the training."
        )
        raise BudgetExhausted(
            f"{spent} A further evaluation requires a budget (`epsilon`, `delta`) and weakens the guarantee of the "
            "model and its evaluations together."
        )
    return found


def _free_mu(training: Guarantee, charges: Sequence[EvaluationCharge]) -> float:
    """Return the mu that evaluations of held-out people may still cost without weakening the guarantee of the model."""
    left = _as_gaussian(training).amount - _amount(charges, "parallel")
    return root_rounded_down(left) if left > 0 else 0.0


def _as_gaussian(training: Guarantee) -> GaussianCost:
    """Return the mu up to which an evaluation of held-out people is free: of a version, its own training's."""
    if (own := own_cost(training)) is not None:
        return own
    if training.definition == "approximate":
        return GaussianCost(mu_of(cast(float, training.epsilon), cast(float, training.delta)))
    return training.cost.as_gaussian()


def _amount(charges: Sequence[EvaluationCharge], composition: Composition) -> Fraction:
    return sum(
        (GaussianCost(each.mu).amount for each in charges if each.composition == composition), Fraction(0)
    )


def are_free(training: Guarantee, charges: Sequence[EvaluationCharge]) -> bool:
    """Return whether evaluations cost held-out people at most what the training costs others, and nobody else."""
    weaker = training.status == "proven" and any(
        name in _CONDITIONS for each in charges for name in each.assumes
    )
    free = _amount(charges, "parallel") <= _as_gaussian(training).amount
    return free and not weaker and not _amount(charges, "sequential")


def composed_guarantee(training: Guarantee, charges: Sequence[EvaluationCharge]) -> Guarantee:
    """Return what is guaranteed of a model and its evaluations together.

    A person of the training set is charged for the training, a person of the holdout for the evaluations of the
    holdout, and everybody for the other evaluations: ``mu^2 = max(mu_training^2, sum mu_parallel^2) + sum
    mu_sequential^2`` (THEORY 3.8). A pure guarantee counts by its Gaussian cost. For an (epsilon, delta) guarantee,
    evaluations of the holdout count as (epsilon, delta) at the same delta, and other evaluations are added. For a
    version of a series, held-out people of its cohort also pay for what earlier versions on it may evaluate for free.
    """
    parallel, sequential = _amount(charges, "parallel"), _amount(charges, "sequential")
    because = (
        f"{training.because} Evaluation: Gaussian mechanism on counts to which one {training.unit} adds at most 1 "
        "(THEORY 3.9)."
    )
    if parallel:
        because += " The holdout is not in the training set: parallel composition (THEORY 3.8)."
    if any(each.reserved for each in charges):
        because += " The evaluation that is free is left to another copy of the model."
    if sequential:
        because += " The evaluated people may be in the training set: their costs add up (THEORY 3.6)."
    parameters = {
        "training": {
            name: value
            for name in ("definition", "epsilon", "mu", "delta")
            if (value := getattr(training, name)) is not None
        },
        "evaluations": [
            {"mu": each.mu, "composition": each.composition, **({"reserved": True} if each.reserved else {})}
            for each in charges
        ],
    }
    assumed = {name for each in charges for name in each.assumes}
    assumptions = (
        *training.assumptions,
        *(text for name, text in _ASSUMPTIONS.items() if name in assumed),
    )
    common: dict[str, Any] = {"because": because, "parameters": parameters, "assumptions": assumptions}
    if training.definition == "approximate":
        claimed, delta = cast(float, training.epsilon), cast(float, training.delta)
        holdout = root_rounded_up(parallel)
        if parallel and delta_of(holdout, claimed) > delta:
            claimed = epsilon_of(holdout, delta)
        if sequential:
            added = decimal(claimed) + decimal(epsilon_of(root_rounded_up(sequential), delta))
            claimed, delta = rounded_up(added), rounded_up(2 * decimal(delta))
        composed = replace(training, epsilon=claimed, delta=delta, **common)
    else:
        earlier = earlier_amount(training.parameters)
        total = max(training.cost.as_gaussian().amount, parallel + earlier) + sequential
        composed = replace(training, definition="gaussian", epsilon=None, mu=root_rounded_up(total), **common)
    return weakened(composed, *(condition for name, condition in _CONDITIONS.items() if name in assumed))


# --- evaluating ---------------------------------------------------------------------------------------------------


def _evaluate(
    estimator: Any,
    X: Any,
    y: Any = None,
    groups: Any = None,
    *,
    by: By | None = None,
    at: Sequence[float] = (),
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
        tables=_tables(
            *(estimator.classes_, estimator.encoding_, getattr(estimator, "costs_", None)), by=by, at=at
        ),
        encoding=estimator.encoding_,
        training=estimator.guarantee_,
        source=EXACT if seed is None else SeededNoise(seed),
        engine=_chosen_engine(estimator.engine),
        recognised=recognised,
    )
    return subject._evaluated(records, account, budget, disjoint)


def _tables(
    classes: Sequence[object],
    encoding: Encoding | None,
    costs: Costs | None,
    *,
    by: By | None,
    at: Sequence[float],
) -> Tables:
    groups = None if by is None else GroupsOf.of(by, encoding)
    return Tables(tuple(map(str, classes)), costs, tuple(sorted({*map(float, at)})), groups)


def _as_records(estimator: Any, X: Any, y: Any, groups: Any) -> tuple[Records | TableRows, bool]:
    encoding: Encoding | None = estimator.encoding_
    if encoding is not None and "cohort" in estimator.guarantee_.parameters:
        if groups is not None:
            raise InvalidInput("The model knows people by its rule for cohorts: leave out `groups`.")
        return _of_cohort(X, y, encoding, estimator.guarantee_), True
    if isinstance(X, Records | TableRows) or (isinstance(X, str | Path) and encoding is not None):
        if y is not None or groups is not None:
            raise InvalidInput("Records and files have labels and persons: leave out `y` and `groups`.")
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


def _of_cohort(X: Any, y: Any, encoding: Encoding, training: Guarantee) -> TableRows:
    facts = training.parameters
    if isinstance(X, TableRows):
        rows = replace(X, cohorts=rule_of(facts))
    elif isinstance(X, str | Path | pd.DataFrame) or hasattr(X, "__arrow_c_stream__"):
        if y is not None:
            X = as_frame(X).assign(**{encoding.label: np.asarray(y, dtype=object)})
        rows = encoded_rows(X, encoding, rule_of(facts))
    else:
        raise InvalidInput(
            "A version of a series is evaluated on its own cohort: `X` must be a table or files."
        )
    return rows.of_cohort(facts["cohort"]["name"])


def _evaluation_records(frame: pd.DataFrame, encoding: Encoding, name: str = "evaluation") -> Records:
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
    tables: Tables
    encoding: Encoding | None
    training: Guarantee
    source: NoiseSource = EXACT
    engine: LocalEngine | RayEngine = field(default_factory=LocalEngine)
    recognised: bool = True  # Whether the rule of the training can tell who of these people was held out

    @property
    def _holdout(self) -> Holdout | None:
        rule = self.training.parameters.get("holdout")
        return None if rule is None or not self.recognised else Holdout.from_json(rule)

    def _evaluated(
        self,
        records: Records | TableRows,
        account: _Account,
        budget: Mapping[str, float | None],
        disjoint: bool = False,
    ) -> Evaluation:
        if self.training.status == "refuted":
            raise InvalidInput(
                "The guarantee of the model is refuted, so no evaluation of it may be published."
            )
        self._check(records)
        if disjoint and "cohort" in self.training.parameters:
            raise InvalidInput(
                "`disjoint` cannot be stated for a version of a series: other versions may be trained on these people. "
                "Its cohort's held-out people are evaluated for free."
            )
        by_rule, unit = self._holdout is not None, self.training.unit
        composition: Composition = "parallel" if by_rule or disjoint else "sequential"
        assumes: tuple[Assumed, ...] = (
            *(("disjoint",) if disjoint and not by_rule else ()),
            *(("seeded",) if self.source is not EXACT else ()),
            *(("names",) if by_rule and unit == "person" else ()),
            *(("encoding",) if by_rule and unit == "record" else ()),
            *(("cohort",) if "cohort" in self.training.parameters else ()),
        )
        with account._locked():
            earlier = account._read()
            mu = _evaluation_mu(self.training, earlier, composition, **budget)
            charges = [*earlier, EvaluationCharge(mu, composition, assumes)]
            # The result leaves this method only after it and its cost were stored together. Whatever fails before that
            # costs nothing, because nothing was released.
            counts = self._counts(records)
            result = _noisy_evaluation(counts, self.tables, self.training, charges, self.source)
            account._write([*earlier, replace(charges[-1], result=result)])
        if (warning := drift(self.training.parameters, result.accuracy)) is not None:
            warnings.warn(warning, QuietmaxWarning, stacklevel=2)
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
        about, cohort = self.training.parameters.get("cohort"), getattr(records, "cohort", None)
        if about is not None and (cohort is None or cohort.name != about["name"]):
            raise InvalidInput("A version of a series is evaluated on the rows of its own cohort.")
        if self.recognised and records.encoding != self.encoding:
            raise InvalidInput("The records must have the encoding that the model was trained with.")

    def _counts(self, records: Records | TableRows) -> Counts:
        """Answer every row of the people who are counted (held out, or all if no rule tells), and count the answers."""
        if isinstance(records, TableRows):
            return self._streamed_counts(records)
        counted = self._held_out(records)
        rows = None if counted.persons is None else Persons.of(counted.persons).rows
        answers = self.tables.answers(self.classifier, self.feature_map, counted.features)
        return self.tables.count(counted.labels, answers, rows)

    def _streamed_counts(self, rows: TableRows) -> Counts:
        """Count the answers to rows that are read part by part; they are kept until all rows of a person are known."""
        classes, key = len(self.tables.classes), secrets.token_bytes(16)
        answered = partial(_answered, self.tables, self.classifier, self.feature_map)
        if isinstance(self.engine, RayEngine):
            table: Blocks = RayBlocks(classes, self.engine)
        else:
            table = Blocks(classes, replace(self.engine, progress=None, resume=False), FILES_IN_MEMORY)
        with table:
            if isinstance(table, RayBlocks):
                self._send(table, rows, key)
                if len(table):
                    table.update(answered)
            else:
                table.extend(map(answered, self._read(rows, key)))
            if not len(table):
                return self.tables.count(np.empty(0, np.int64), np.empty((0, 4), np.int32), None)
            if self.training.unit == "person":
                table._count_persons()
            return table.sum(partial(_block_counts, self.tables))

    def _read(self, rows: TableRows, key: bytes) -> Iterator[Table]:
        """Read the rows of the people who are counted. Progress is in rows, or in files if these do not state them."""
        progress = self.engine.progress if isinstance(self.engine, LocalEngine) else None
        total, done = None if progress is None else rows.count(), 0
        for number, part in enumerate(rows.parts, start=1):
            for records in rows.part_records(part):
                counted = self._held_out(records)
                persons = None if counted.persons is None else _person_digests(counted.persons, key)
                if len(counted):
                    yield Table(counted.features, counted.labels, len(self.tables.classes), persons=persons)
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
            table.extend(self._read(rows, key))
        else:
            table.read(replace(rows, holdout=holdout, held_out=holdout is not None), key)

    def _held_out(self, records: Records) -> Records:
        return records if self._holdout is None else records.take(is_held_out(records, self._holdout))


def _answered(tables: Tables, classifier: Any, feature_map: Any, block: Table) -> Table:
    """Return a block whose rows are answers, as `Tables.answers` returns them."""
    height = rows_at_once(block.features)
    answers = [
        tables.answers(classifier, feature_map, block.rows[start : start + height])
        for start in range(0, len(block), height)
    ]
    return replace(block, rows=np.concatenate(answers))


def _block_counts(tables: Tables, block: Table) -> Counts:
    return tables.count(block.labels, block.rows, block.repeats)


def _exact_evaluation(counts: Counts, tables: Tables, unit: Unit) -> Evaluation:
    """Return the owner's exact figures. They are not for publication."""
    return tables.evaluation(
        counts / SHARE, noise=0.0, unit=unit, mu=None, composition="sequential", guarantee=None
    )


def _noisy_evaluation(
    counts: Counts,
    tables: Tables,
    training: Guarantee,
    charges: Sequence[EvaluationCharge],
    source: NoiseSource = EXACT,
) -> Evaluation:
    """Draw the noise of an evaluation, the last of the charges, and return the publishable figures."""
    charge = charges[-1]
    if not (type(source) is ExactNoise and source.exact) and "seeded" not in charge.assumes:
        raise InvalidInput("An evaluation with seeded noise must be charged as one that assumes 'seeded'.")
    released = release_gaussian(
        np.minimum(counts, _MOST_UNITS) / SHARE, sensitivity=tables.sensitivity, mu=charge.mu, source=source
    )
    return tables.evaluation(
        released.values,
        noise=released.scale,
        unit=training.unit,
        mu=charge.mu,
        composition=charge.composition,
        guarantee=composed_guarantee(training, charges),
    )


# --- what evaluations have cost -----------------------------------------------------------------------------------


def _with_reserve(evaluations: Sequence[EvaluationCharge], training: Guarantee) -> list[EvaluationCharge]:
    """Return the evaluations of a copy: what is left of the free budget belongs to the original."""
    left = _free_mu(training, evaluations)
    return [*evaluations, *([EvaluationCharge(left, "parallel", reserved=True)] if left else [])]


EVALUATION_FILE = "evaluation.json"
"""The file of a model folder with its evaluations and what they cost. It may be published with the folder."""
_FORMAT = "quietmax evaluations"
_LOCK = threading.RLock()


@dataclass(eq=False)
class _Account:
    """The evaluations of a model: in memory from `fit` on, and in the folder once it is saved.

    A copy leaves the free evaluation to the original. A fork has no account in memory (THEORY 3.12).
    """

    id: str  # That of the description
    training: Guarantee
    folder: Path | None = None
    evaluations: list[EvaluationCharge] = field(default_factory=list)  # Without a folder
    process: OwnProcess = field(default_factory=OwnProcess)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with _LOCK:
            if self.folder is None:
                self.process.check()
                yield
                return
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
        return self.evaluations if self.folder is None else _read_evaluations(self.folder, self)

    def _write(self, evaluations: list[EvaluationCharge]) -> None:
        if self.folder is None:
            self.evaluations = evaluations
            return
        write_text(self._text(evaluations), self.folder / EVALUATION_FILE, "The evaluation")

    def _text(self, evaluations: Sequence[EvaluationCharge]) -> str:
        entries = [
            {**vars(each), "result": None if each.result is None else each.result.to_json()}
            for each in evaluations
        ]
        content = {"format": _FORMAT, "id": self.id, "evaluations": entries}
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    def __reduce__(self) -> tuple[Any, ...]:
        left = [] if self.folder else _with_reserve(self.evaluations, self.training)
        return _Account, (self.id, self.training, self.folder, left)


def _account(estimator: Any) -> _Account:
    account: _Account | None = getattr(estimator, "_evaluations", None)
    if account is None:
        raise InvalidInput(
            "The last `fit` of the estimator failed, or another version made it: fit it again before it is evaluated "
            "or saved."
        )
    return account


def _save_evaluations(estimator: Any, folder: str | Path, write: Callable[[str, str], object]) -> None:
    """Save an estimator with its evaluations; of several folders, the first one keeps the evaluation that is free."""
    account, target = _account(estimator), Path(folder).resolve()
    with ExitStack() as stack:
        moves = account.folder in (None, target)
        try:
            if moves:
                stack.enter_context(account._locked())
            evaluations = account._read()
        except QuietmaxError:  # in a fork, or the first folder is gone: nobody knows what was evaluated there
            evaluations, moves = [], False
        if not moves:
            evaluations = _with_reserve(evaluations, account.training)
        text = account._text(evaluations)
        if account.folder is not None:
            write(account.id, text)
            return
        # Whoever holds the account in memory must not spend again what moves into the folder, whatever interrupts
        # the writing.
        before = account.evaluations
        account.evaluations = _with_reserve(before, account.training)
        try:
            write(account.id, text)
        finally:
            try:
                _read_evaluations(target, account)
                account.folder = target
            except DataUnavailable:
                account.evaluations = before


def _read_evaluations(folder: Path, account: _Account) -> list[EvaluationCharge]:
    path = folder / EVALUATION_FILE
    found: list[EvaluationCharge] = []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT or content["id"] != account.id:
            raise ValueError("another model")
        for entry in content["evaluations"]:
            found.append(_charge_from_json(entry, found, account.training))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise DataUnavailable(
            f"The evaluations in {path} are missing, damaged or those of another model. What was spent on them is "
            "unknown. Restore the file from a copy."
        ) from problem
    return found


def _charge_from_json(
    entry: Mapping[str, Any], earlier: Sequence[EvaluationCharge], training: Guarantee
) -> EvaluationCharge:
    """Return what `_Account._text` wrote; raise ValueError if the result contradicts what it was charged for."""
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


# --- model folders --------------------------------------------------------------------------------------------------


def read_evaluations(folder: str | Path, model: PrivateModel) -> list[EvaluationCharge]:
    """Read the evaluations of a model folder."""
    if isinstance(model.classifier, Predictor):
        return []
    return _Account(str(model.evaluation_id), model.guarantee, Path(folder))._read()


def evaluate_folder(
    folder: str | Path,
    model: PrivateModel,
    records: Records | TableRows,
    *,
    exact: bool = False,
    by: By | None = None,
    at: Sequence[float] = (),
    engine: LocalEngine | RayEngine | None = None,
    **budget: float | None,
) -> Evaluation:
    """Evaluate a saved model for a budget, and store the result with its cost in its folder before returning it."""
    if isinstance(model.classifier, Predictor):
        raise InvalidInput(PAID_PER_ANSWER)
    subject = _Subject(
        *(model.classifier, model.features),
        _tables(model.classes, model.encoding, model.costs, by=by, at=at),
        *(model.encoding, model.guarantee),
        engine=engine or LocalEngine(),
    )
    if exact:
        subject._check(records)
        return _exact_evaluation(subject._counts(records), subject.tables, model.guarantee.unit)
    account = _Account(str(model.evaluation_id), model.guarantee, Path(folder))
    return subject._evaluated(records, account, budget)


def evaluated_rows(model: PrivateModel, data: str, *, in_parts: bool) -> Records | TableRows:
    """Read a table, also part by part, or a data set as the model has read its training set."""
    from quietmax.data.registry import load_records

    if is_table_path(data) or in_parts:
        if model.encoding is None:
            raise InvalidInput("The model was not trained on a table: `data` must be a data set.")
        if "cohort" in model.guarantee.parameters:
            return _of_cohort(data, None, model.encoding, model.guarantee)
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
    records = load_records(data)
    if records.features.shape[1] != model.inputs or records.encoding != model.encoding:
        raise InvalidInput(f"The data set {data!r} is not encoded as the records of the model.")
    return records


def split_name(model: PrivateModel) -> str | None:
    """Return a name of the split that held people out of a model's training set.

    Models with the same name hold the same people out of a table: it says whether records or people are held out, and
    how they are recognised. People of plain arrays are recognised by nothing, so the split belongs to the one model.
    """
    holdout, encoding, unit = model.holdout, model.encoding, model.guarantee.unit
    if holdout is None:
        return None
    if encoding is None or (unit == "person" and encoding.person is None):
        known_by = f"model {model.evaluation_id}"
    else:
        known_by = (
            f"encoding {hashlib.sha256(replace(encoding, defaults=()).to_json().encode()).hexdigest()[:32]}"
        )
    return f"{holdout.share!r} of the {unit}s of {known_by}, seed {holdout.seed}"
