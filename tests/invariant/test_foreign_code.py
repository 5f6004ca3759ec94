"""Code that is not on the list of `_before_noise` makes a guarantee conditional, wherever it stands (THEORY 3.8)."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import joblib
import numpy as np
import pandas as pd
import polars
import pyarrow
import pytest
import torch
from pandas.api.extensions import ExtensionArray, ExtensionDtype
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import SparseCoder
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import Binarizer, FunctionTransformer, Normalizer

from quietmax import DPSGD, DPSGDSettings, HeadSettings, PrivateHead, Teachers
from quietmax._before_noise import _FITTING, ALLOWED, is_allowed, is_own_class
from quietmax.data.cells import as_numbers
from quietmax.data.encoding import Encoding, NumericColumn
from quietmax.data.records import Holdout, Records
from quietmax.errors import InvalidInput
from quietmax.estimators.blocks import LocalEngine
from quietmax.estimators.training_set import OWN_MAP
from quietmax.mechanisms.base import proves_bounds
from quietmax.models.features import FeatureMap, Identity, UnitNorm, generic
from quietmax.models.features import Pipeline as Maps
from quietmax.models.stacked import CrossEntropy, TrainingSettings
from tests.invariant.test_feature_maps import bits, row_selections
from tests.models.features.maps import ModuleMap

ROWS = 24
X = np.random.default_rng(0).random((ROWS, 3))
Y = np.arange(ROWS) % 2
PUBLIC: dict[str, Any] = {"classes": (0, 1), "declared_size": ROWS}
ESTIMATORS = {
    "head": PrivateHead(settings=HeadSettings(steps=1), **PUBLIC),
    "teachers": Teachers(teachers=2, queries=1, **PUBLIC),
    "dpsgd": DPSGD(settings=DPSGDSettings(steps=1), **PUBLIC),
}
every_estimator = pytest.mark.parametrize("name", ESTIMATORS)


class AddsItsPlace(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Adds the low bit of a row's number. Its tags say that it needs no fit, as those of many other steps do."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        return tags

    def fit(self, X: Any, y: Any = None) -> AddsItsPlace:  # noqa: ARG002
        return self

    def transform(self, X: Any) -> Any:
        return np.asarray(X) + (np.arange(len(X)) % 2)[:, None]


def adds_its_place(X: Any) -> Any:
    return AddsItsPlace().transform(X)


def forged(kind: type, name: str, module: str, **members: Any) -> Any:
    """A subclass that says that it is another class of another module."""
    return type(name, (kind,), {"__module__": module, "__qualname__": name, **members})


def changed_rows(compute: Callable[[Any], Any], table: np.ndarray) -> int:
    """In how many cases a row was not what it is in the whole table: at other places, strides and alignments."""
    expected = compute(table)
    changed = 0
    for number, chosen in enumerate(row_selections(len(table))):
        for laid_out in layouts(table[chosen], number):
            found = np.asarray(compute(laid_out), np.float32)
            changed += int((bits(found) != bits(np.asarray(expected, np.float32)[chosen])).any(axis=1).sum())
    return changed


def layouts(rows: np.ndarray, number: int) -> Iterator[np.ndarray]:
    """The same rows one after another, by columns, in a wider array, and at an address that is no multiple of 4."""
    yield np.ascontiguousarray(rows)
    yield np.asfortranarray(rows)
    wide = np.zeros((len(rows), rows.shape[1] + 1 + number), rows.dtype)
    wide[:, 1 : 1 + rows.shape[1]] = rows
    yield wide[:, 1 : 1 + rows.shape[1]]
    memory = np.zeros(rows.nbytes + 1 + number, np.uint8)
    unaligned = memory[1 + number :].view(rows.dtype).reshape(rows.shape)
    unaligned[:] = rows
    yield unaligned


# --- What scikit-learn runs before the estimator ----------------------------------------------------------------------


def with_method(step: Any) -> Any:
    """A step of an allowed class whose method was replaced on the object."""
    step.transform = adds_its_place
    return step


class OwnPipeline(Pipeline):  # type: ignore[misc]
    """A pipeline that changes the records itself."""

    def fit(self, X: Any, y: Any = None, **parameters: Any) -> Any:
        return super().fit(adds_its_place(X), y, **parameters)


class Watching:
    """A callback of scikit-learn, which may change the records in place."""

    def setup(self, estimator: Any, context: Any) -> None:
        pass

    teardown = on_fit_task_begin = on_fit_task_end = lambda self, *arguments, **named: None  # noqa: ARG005


STEPS: dict[str, tuple[Callable[[], Any], str]] = {
    "a step without state": (AddsItsPlace, "AddsItsPlace"),
    "forged module of scikit-learn": (
        forged(AddsItsPlace, "Binarizer", "sklearn.preprocessing._data"),
        "Binarizer",
    ),
    "forged module of quietmax": (
        forged(AddsItsPlace, "Scaling", "quietmax.models.features.tabular"),
        "Scaling",
    ),
    "a subclass of an allowed step": (
        forged(Binarizer, "Own", "sklearn.preprocessing", transform=AddsItsPlace.transform),
        "Own",
    ),
    "a method set on an allowed step": (lambda: with_method(Binarizer()), "Binarizer"),
    "a function": (lambda: FunctionTransformer(adds_its_place), "FunctionTransformer"),
    "a function of NumPy": (lambda: FunctionTransformer(np.log1p), "FunctionTransformer"),
    "a function that is vectorised": (lambda: FunctionTransformer(np.vectorize(abs)), "FunctionTransformer"),
    "an inverse": (lambda: FunctionTransformer(inverse_func=adds_its_place), "FunctionTransformer"),
    "a number of a class of its own": (
        lambda: Binarizer(threshold=forged(float, "Number", "builtins")(0.5)),
        "Binarizer",
    ),
    "a nested pipeline": (lambda: make_pipeline(Binarizer(), AddsItsPlace()), "AddsItsPlace"),
    "a nested pipeline with a cache": (lambda: make_pipeline(Binarizer(), memory="unused"), "Pipeline"),
    "columns": (lambda: ColumnTransformer([("all", AddsItsPlace(), [0, 1])]), "ColumnTransformer"),
    "a union": (lambda: FeatureUnion([("all", AddsItsPlace())]), "FeatureUnion"),
    "a step that computes a row otherwise at another place": (
        lambda: SparseCoder(np.eye(3), transform_algorithm="lasso_cd"),
        "SparseCoder",
    ),
    "a step of scikit-learn whose rounding depends on the layout": (Normalizer, "Normalizer"),
}


def code_before(fitted: Any) -> tuple[str, ...]:
    """The names in a guarantee, which must be conditional because of them."""
    guarantee = fitted.guarantee_
    assert guarantee.status == "conditional"
    names = tuple(guarantee.parameters["own_code"])
    assert guarantee.assumptions[-1].endswith(f": {', '.join(names)}.")
    return names


@pytest.mark.parametrize(("step", "named"), STEPS.values(), ids=STEPS)
def test_a_step_that_is_not_on_the_list_is_named(
    step: Callable[[], Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pipeline = make_pipeline(step(), clone(ESTIMATORS["head"])).fit(X, Y)
    assert code_before(pipeline[-1]) == (named,)


def an_extension_array() -> Any:
    return pyarrow.ExtensionArray.from_storage(OwnType(), pyarrow.array(X[:, 0]))


@pytest.mark.parametrize(
    "step", [Binarizer(), FunctionTransformer(validate=True), make_pipeline(Binarizer())]
)
@pytest.mark.parametrize("given", ["an array-like", "a subclass of a frame", "a column of an extension type"])
def test_records_that_an_allowed_step_converts_are_named(given: str, step: Any) -> None:
    (records, labels), named = RECORDS[given]
    pipeline = make_pipeline(clone(step), clone(ESTIMATORS["head"])).fit(records, labels)
    assert code_before(pipeline[-1]) == (named,)


@every_estimator
def test_every_estimator_names_a_step_and_is_proven_without_it(name: str) -> None:
    fitted = make_pipeline(AddsItsPlace(), clone(ESTIMATORS[name])).fit(X, Y)[-1]
    assert code_before(fitted) == ("AddsItsPlace",)
    allowed = make_pipeline(
        Binarizer(), FunctionTransformer(), "passthrough", None, make_pipeline(Binarizer())
    )
    fitted = Pipeline([*allowed.steps, ("last", clone(ESTIMATORS[name]))]).fit(X, Y)[-1]
    assert fitted.guarantee_.status == "proven"
    assert not fitted.guarantee_.parameters.get("own_code")


class OtherFirstArgument(BaseEstimator):  # type: ignore[misc]
    def fit(this, X: Any, y: Any) -> Any:
        this.inner_ = clone(ESTIMATORS["head"]).fit(adds_its_place(X), y)
        return this


def only(method: str) -> Any:
    """An object of a class with one method, which trains a head, after this method was called."""

    def train(self: Any, X: Any, y: Any) -> Any:  # noqa: ARG001
        return clone(ESTIMATORS["head"]).fit(adds_its_place(X), y)

    return getattr(type("Only", (), {method: train})(), method)(X, Y)


def in_a_loop_of_workers() -> Any:
    """A loop of joblib that runs here, in a worker of another loop."""

    def loop(jobs: int, function: Callable[[], Any]) -> Any:
        return joblib.Parallel(n_jobs=jobs)(joblib.delayed(function)() for _ in range(2))[0]

    with joblib.parallel_config("threading"):
        return loop(2, lambda: loop(1, lambda: clone(ESTIMATORS["head"]).fit(adds_its_place(X), Y)))


class NoEstimatorOfScikitLearn:
    def fit(*arguments: Any) -> Any:
        wrapper, X, y = arguments
        wrapper.inner_ = clone(ESTIMATORS["head"]).fit(adds_its_place(X), y)
        return wrapper


def in_workers() -> Any:
    with joblib.parallel_config("threading", n_jobs=2):
        return (
            OneVsRestClassifier(clone(ESTIMATORS["head"]), n_jobs=2)
            .fit(X, np.arange(ROWS) % 3)
            .estimators_[0]
        )


def with_callback() -> Any:
    pipeline = make_pipeline(Binarizer(), clone(ESTIMATORS["head"]))
    return pipeline.set_callbacks(Watching()).fit(X, Y)[-1]


def with_own_fit() -> Any:
    head = clone(ESTIMATORS["head"])
    head.fit = MethodType(lambda self, X, y: PrivateHead.fit(self, adds_its_place(X), y), head)
    return head.fit(X, Y)


def subclass_with_forged_names() -> Any:
    def fit(self: Any, X: Any, y: Any) -> Any:
        return PrivateHead.fit(self, adds_its_place(X), y)

    kind = forged(PrivateHead, "PrivateHead", PrivateHead.__module__, fit=fit)
    return kind(settings=HeadSettings(steps=1), **PUBLIC).fit(X, Y)


CALLERS: dict[str, tuple[Callable[[], Any], str]] = {
    "a search": (
        lambda: GridSearchCV(clone(ESTIMATORS["head"]), {"epsilon": [1.0]}, cv=2).fit(X, Y).best_estimator_,
        "GridSearchCV",
    ),
    "a pipeline of a class of its own": (
        lambda: OwnPipeline([("last", clone(ESTIMATORS["head"]))]).fit(X, Y)[-1],
        "OwnPipeline",
    ),
    "a callback of scikit-learn": (with_callback, "Pipeline"),
    "another first argument": (lambda: OtherFirstArgument().fit(X, Y).inner_, "OtherFirstArgument"),
    "no estimator of scikit-learn": (
        lambda: NoEstimatorOfScikitLearn().fit(X, Y).inner_,
        "NoEstimatorOfScikitLearn",
    ),
    **{f"only {method}": (partial(only, method), "Only") for method in _FITTING},
    "a worker of joblib": (in_workers, "joblib"),
    "a loop in a worker of joblib": (in_a_loop_of_workers, "joblib"),
    "a fit that was set on the estimator": (with_own_fit, "PrivateHead"),
    "a subclass with our names": (subclass_with_forged_names, "PrivateHead"),
}


@pytest.mark.parametrize(("fit", "named"), CALLERS.values(), ids=CALLERS)
def test_what_calls_fit_is_named(fit: Callable[[], Any], named: str) -> None:
    assert code_before(fit())[-1] == named


@pytest.mark.filterwarnings(f"ignore::{ConvergenceWarning.__module__}.ConvergenceWarning")
def test_removing_a_record_changes_the_other_codes_of_a_sparse_coder() -> None:
    generator = np.random.default_rng(0)
    dictionary = generator.standard_normal((20, 33)).astype(np.float32)
    dictionary /= np.linalg.norm(dictionary, axis=1, keepdims=True)
    coder = SparseCoder(dictionary, transform_algorithm="lasso_cd", transform_alpha=0.1)
    records = generator.random((400, 33), np.float32)
    assert records.strides == (132, 4)
    assert changed_rows(coder.fit_transform, records) > 0


TABLES = [
    np.random.default_rng(columns).normal(0.5, 1, (70, columns)).astype(dtype)
    for columns in (1, 7, 33, 130)
    for dtype in (np.float32, np.float64, np.float16, np.int64, np.uint8)
]


@pytest.mark.parametrize(
    "step",
    [
        Binarizer(threshold=0.3),
        Binarizer(copy=False),
        FunctionTransformer(),
        FunctionTransformer(validate=True),
        make_pipeline(FunctionTransformer(), Binarizer()),
        Binarizer().set_output(transform="pandas"),
    ],
    ids=str,
)
def test_an_allowed_step_gives_a_row_the_same_bits_at_every_place(step: Any) -> None:
    for table in TABLES:
        assert changed_rows(lambda rows: clone(step).fit_transform(rows.copy("K")), table) == 0
        frame = pd.DataFrame(table)
        expected = np.asarray(clone(step).fit_transform(frame), np.float32)
        for chosen in row_selections(len(frame)):
            found = np.asarray(clone(step).fit_transform(frame.iloc[chosen]), np.float32)
            np.testing.assert_array_equal(bits(found), bits(expected[chosen]))


@pytest.mark.parametrize("step", [AddsItsPlace(), Normalizer()], ids=str)
def test_steps_that_are_not_allowed_fail_the_same_test(step: Any) -> None:
    assert sum(changed_rows(step.fit_transform, table) for table in TABLES) > 0


# --- What the records are made of -------------------------------------------------------------------------------------


class ArrayLike:
    """Records that are computed when somebody asks for them."""

    shape, ndim = X.shape, 2

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return adds_its_place(X).astype(dtype or float)

    def __len__(self) -> int:
        return ROWS


class OwnArray(np.ndarray):
    """A subclass of the arrays of NumPy."""


class OwnFrame(pd.DataFrame):
    """A subclass of the frames of pandas."""


class Dtype(ExtensionDtype):
    """A type that says that it is one of float64."""

    name, type, kind = "float64", float, "f"

    @classmethod
    def construct_array_type(cls) -> Any:
        return Column


class Column(ExtensionArray):
    """A column of pandas that adds the place of a row when it is converted."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    dtype = Dtype()
    nbytes = 0

    @classmethod
    def _from_sequence(cls, scalars: Any, *, dtype: Any = None, copy: bool = False) -> Any:  # noqa: ARG003
        return cls(scalars)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, item: Any) -> Any:
        return Column(self.values[item]) if not isinstance(item, int | np.integer) else self.values[item]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return (self.values + np.arange(len(self)) % 2).astype(dtype or float)

    def isna(self) -> Any:
        return np.zeros(len(self), bool)

    def copy(self) -> Any:
        return Column(self.values)

    def take(self, indices: Any, *, allow_fill: bool = False, fill_value: Any = None) -> Any:  # noqa: ARG002
        return Column(self.values[indices])


class Cell(float):
    """A number that is another one when it is converted."""

    def __float__(self) -> float:
        return 0.25


class Word(str):
    """A string that is equal to every other one."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class OwnType(pyarrow.ExtensionType):  # type: ignore[misc]
    """A type of Arrow, whose arrays say what they hold."""

    def __init__(self) -> None:
        super().__init__(pyarrow.float64(), "tests.own")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: Any, serialized: Any) -> Any:
        return cls()

    def __arrow_ext_class__(self) -> Any:
        return OwnExtensionArray


class OwnExtensionArray(pyarrow.ExtensionArray):  # type: ignore[misc]
    @property
    def storage(self) -> Any:
        return pyarrow.array(np.arange(len(self)) % 2 + 0.5)


class Zone(tzinfo):
    def utcoffset(self, moment: Any) -> timedelta:  # noqa: ARG002
        return timedelta(hours=1)

    dst = utcoffset

    def tzname(self, moment: Any) -> str:  # noqa: ARG002
        return "own"


def with_attribute(records: Any, name: str, value: Any = lambda *_, **__: adds_its_place(X)) -> Any:
    """Records that answer one question themselves."""
    records.__dict__[name] = value
    return records


WORDS = [Word("ann"), *map(str, range(1, ROWS))]
BOUNDS = Encoding(
    tuple(NumericColumn(f"{number}", 0, 1, missing=False) for number in range(3)), "ill", ("0", "1")
)
OWN_COLUMN = forged(NumericColumn, "NumericColumn", NumericColumn.__module__)
RECORDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "an array-like": ((ArrayLike(), Y), "ArrayLike"),
    "a subclass of an array": ((X.view(OwnArray), Y), "OwnArray"),
    "a subclass of a frame": ((OwnFrame(X), Y), "OwnFrame"),
    "a column of an extension type": ((pd.DataFrame({"0": Column(X[:, 0]), "1": X[:, 1]}), Y), "Column"),
    "objects that convert themselves": ((np.array([[Cell(1), 1]] * ROWS, object), Y), "Cell"),
    "rows in lists": (([[Cell(1), 1]] * ROWS, Y), "Cell"),
    "rows that are arrays": (([row.view(OwnArray) for row in X], Y), "OwnArray"),
    "a column of objects": ((pd.DataFrame({"0": [Cell(1)] * ROWS}, dtype=object), Y), "Cell"),
    "labels": ((X, np.array([Cell(1), *Y[1:]], object)), "Cell"),
    "persons": ((X, Y, WORDS), "Word"),
    "persons in a series of strings": ((X, Y, pd.Series(WORDS, dtype=object)), "Word"),
    "persons in a column of strings": (
        (X, Y, pd.Series(pd.array(WORDS, dtype="string[python]"))),
        "Word",
    ),
    "persons in categories": (
        (X, Y, pd.Series(pd.Categorical.from_codes([0] * ROWS, pd.Index(WORDS[:1], dtype=object)))),
        "Word",
    ),
    "a method set on a frame": ((with_attribute(pd.DataFrame(X), "to_numpy"), Y), "DataFrame"),
    "a method set on a tensor": ((with_attribute(torch.from_numpy(X.copy()), "numpy"), Y), "Tensor"),
    "an interface set on a tensor": (
        (
            with_attribute(
                torch.from_numpy(X.copy()), "__array_interface__", adds_its_place(X).__array_interface__
            ),
            Y,
        ),
        "Tensor",
    ),
    "objects in a frame of polars": (
        (polars.DataFrame({"0": polars.Series([Cell(1)] * ROWS, dtype=polars.Object), "1": X[:, 1]}), Y),
        "Cell",
    ),
    "a table of Arrow": ((pyarrow.table({"0": an_extension_array()}), Y), "OwnType"),
    "a column of Arrow": (
        (pd.DataFrame({"0": pd.arrays.ArrowExtensionArray(an_extension_array())}), Y),
        "OwnType",
    ),
    "persons in columns of Arrow": ((X, Y, pyarrow.chunked_array([an_extension_array()])), "OwnType"),
    "persons with a time zone": ((X, Y, [datetime(2020, 1, 1, tzinfo=Zone())] * ROWS), "Zone"),
    "persons in intervals": ((X, Y, [pd.Interval(Cell(0), Cell(1))] * ROWS), "Cell"),
    "persons in a sparse column": (
        (X, Y, pd.Series(pd.arrays.SparseArray(np.array([Cell(1)] * ROWS, object)))),
        "Cell",
    ),
    "an encoding": (
        (
            Records(
                "own",
                X,
                Y,
                2,
                encoding=Encoding(
                    (OWN_COLUMN("0", 0, 1, missing=False), *BOUNDS.columns[1:]), "ill", ("0", "1")
                ),
            ),
        ),
        "Encoding",
    ),
    "a holdout": (
        (Records("own", X, Y, 2, holdout=forged(Holdout, "Holdout", Holdout.__module__)(0.0)),),
        "Holdout",
    ),
    "persons of records": (
        (Records("own", X, Y, 2, encoding=BOUNDS, persons=np.array(WORDS, object)),),
        "Word",
    ),
}


@pytest.mark.parametrize(("given", "named"), RECORDS.values(), ids=RECORDS)
@every_estimator
def test_records_that_run_code_of_their_own_are_named(name: str, given: tuple[Any, ...], named: str) -> None:
    fitted = clone(ESTIMATORS[name])
    if isinstance(given[0], Records):
        fitted.set_params(classes=None)
    fitted.fit(given[0], given[1] if len(given) > 1 else None, groups=given[2] if len(given) > 2 else None)
    assert code_before(fitted) == (named,)


class Most(float):
    """A number that multiplies otherwise than it says."""

    def __rmul__(self, other: float) -> float:
        return 100 * other

    __mul__ = __rmul__


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("head", {"epsilon": Most(1.0)}),
        ("head", {"settings": HeadSettings(steps=1, max_grad_norm=Most(0.2))}),
        ("teachers", {"epsilon": Most(1.0)}),
        ("dpsgd", {"settings": DPSGDSettings(steps=1, max_grad_norm=Most(0.2))}),
        ("head", {"engine": forged(LocalEngine, "Most", LocalEngine.__module__)()}),
        ("head", {"release": forged(str, "Most", "builtins")("weights")}),
    ],
)
def test_a_setting_of_a_class_of_its_own_is_named(name: str, settings: dict[str, Any]) -> None:
    assert code_before(clone(ESTIMATORS[name]).set_params(**settings).fit(X, Y)) == ("Most",)


def test_a_class_of_its_own_among_the_declared_classes_is_named() -> None:
    fitted = clone(ESTIMATORS["head"]).set_params(classes=(Word("a"), "b"))
    assert code_before(fitted.fit(X, np.where(Y, "a", "b"))) == ("Word",)


@pytest.mark.parametrize("kind", [TrainingSettings, forged(TrainingSettings, "Own", "own", __call__=print)])
def test_a_loss_of_its_own_is_named(kind: Any) -> None:
    loss = forged(CrossEntropy, "CrossEntropy", CrossEntropy.__module__)()
    settings = kind((), "tanh", loss, learning_rate=0.1, batch_size=10)
    fitted = clone(ESTIMATORS["teachers"]).set_params(network=settings)
    assert code_before(fitted.fit(X, Y)) == (kind.__name__,)


PLAIN = [
    X.tolist(),
    tuple(map(tuple, X.tolist())),
    [*X],
    X.astype(object),
    np.asfortranarray(X),
    torch.from_numpy(X),
    pd.DataFrame(X),
    pd.DataFrame(X).astype("Float64"),
    pd.DataFrame(X).astype("float64[pyarrow]"),
    pd.DataFrame(X > 0.5).astype("boolean"),
    polars.DataFrame(X),
    pyarrow.table({"0": X[:, 0]}),
]


def test_the_class_of_an_arrow_array_does_not_say_what_it_holds() -> None:
    column = pd.Series(pd.arrays.ArrowExtensionArray(an_extension_array()))
    assert (an_extension_array().storage.to_numpy() != X[:, 0]).all()
    np.testing.assert_array_equal(as_numbers(column, "0"), X[:, 0])


@pytest.mark.parametrize(
    "persons",
    [
        pd.date_range("2024-01-01", periods=ROWS, tz="UTC"),
        pd.Series(pd.date_range("2024-01-01", periods=ROWS, tz="Europe/Paris")).astype(object),
        [datetime(2024, 1, 1, tzinfo=UTC)] * ROWS,
        pd.CategoricalIndex(list("ab") * (ROWS // 2)),
        pd.cut(pd.Series(X[:, 0]), 3),
        polars.Series(list("ab") * (ROWS // 2), dtype=polars.Categorical),
        pyarrow.array(list("ab") * (ROWS // 2)),
    ],
    ids=lambda each: type(each).__name__,
)
def test_persons_of_usual_types_stay_proven(persons: Any) -> None:
    assert clone(ESTIMATORS["head"]).fit(X, Y, groups=persons).guarantee_.status == "proven"


@pytest.mark.parametrize("records", PLAIN, ids=lambda each: type(each).__name__)
@every_estimator
def test_records_of_python_numpy_torch_and_pandas_stay_proven(name: str, records: Any) -> None:
    labels = pd.Series(Y, dtype="Int64") if isinstance(records, pd.DataFrame) else Y.tolist()
    fitted = clone(ESTIMATORS[name]).fit(records, labels, groups=[f"person {row}" for row in range(ROWS)])
    assert fitted.guarantee_.status == "proven"


# --- Feature maps -----------------------------------------------------------------------------------------------------


class PlaceMap(FeatureMap):
    """Adds the low bit of a row's number; its kind is that of a map of ours."""

    kind = "identity"

    def dimension(self, columns: int) -> int:
        return columns

    def _features(self, records: Any) -> Any:
        return adds_its_place(records)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind}

    @classmethod
    def from_json(cls, values: Any) -> PlaceMap:  # noqa: ARG003
        return cls()


def with_features(feature_map: Any, name: str = "_features") -> Any:
    """A map of ours with another method on the object."""
    feature_map.__dict__[name] = adds_its_place
    return feature_map


MAPS: dict[str, Callable[[], Any]] = {
    "a map": PlaceMap,
    "forged names": forged(PlaceMap, "Identity", Identity.__module__),
    "a subclass of ours": forged(Identity, "Identity", Identity.__module__, _features=PlaceMap._features),
    "a method set on ours": lambda: with_features(Identity()),
    "a transform set on ours": lambda: with_features(UnitNorm(), "transform"),
    "a map in a pipeline": lambda: Maps((UnitNorm(), PlaceMap())),
    "a module in pipelines": lambda: Maps((Identity(), Maps((ModuleMap(torch.nn.ReLU(), outputs=3),)))),
    "a method set on ours in a pipeline": lambda: Maps((with_features(Identity()), UnitNorm())),
    "a module": lambda: ModuleMap(torch.nn.ReLU(), outputs=3),
}


@pytest.mark.parametrize("make", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize(
    "estimator",
    [
        *ESTIMATORS.values(),
        *(PrivateHead(method="output", release=each, **PUBLIC) for each in ("weights", "query")),
    ],
    ids=[*ESTIMATORS, "head, output", "head, query"],
)
def test_a_feature_map_that_is_not_on_the_list_is_a_condition(
    estimator: Any, make: Callable[[], Any]
) -> None:
    guarantee = clone(estimator).set_params(features=make()).fit(X, Y).guarantee_
    assert guarantee.status == "conditional"
    assert set(OWN_MAP.assumptions) <= set(guarantee.assumptions)
    assert OWN_MAP.because in guarantee.because


@every_estimator
def test_a_map_of_a_plug_in_is_a_condition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = forged(PlaceMap, "Identity", Identity.__module__)
    kind.kind = "quietmax-identity"
    monkeypatch.setattr(generic, "plugin_maps", lambda: {kind.kind: kind})
    monkeypatch.setattr("quietmax.estimators.training_set.plugin_maps", lambda: {kind.kind: kind})
    guarantee = clone(ESTIMATORS[name]).set_params(features=kind.kind).fit(X, Y).guarantee_
    assert guarantee.status == "conditional"
    assert set(OWN_MAP.assumptions) <= set(guarantee.assumptions)


# --- The list itself --------------------------------------------------------------------------------------------------


def test_a_class_that_says_that_it_is_ours_cannot_prove_bounds() -> None:
    own = forged(object, "Model", "quietmax.models.stacked")
    assert not is_own_class(own)
    with pytest.raises(InvalidInput, match="Only classes of quietmax"):
        proves_bounds(own, when=lambda model: True)  # noqa: ARG005


def test_the_maps_of_the_list_are_all_maps() -> None:
    assert all(is_allowed(kind, "map") for kind in generic._KINDS.values())


def test_every_type_of_the_list_exists_and_every_test_too() -> None:
    root = Path(__file__).parents[2]
    for line in ALLOWED:
        assert (root / line.test).is_file()
        for name in line.types:
            module, _, own = name.rpartition(".")
            loaded = importlib.import_module(module)
            assert own == "*" or hasattr(loaded, own)


def test_the_page_on_sharp_edges_shows_the_list() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sharp-edges.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (\w+) \| (.+) \| (.+) \| `(.+)` \|$", page, re.MULTILINE)
    stated = [
        (
            line.role,
            ", ".join(
                f"`{name.rpartition('.')[2]}`" if "*" not in name else f"`{name}`" for name in line.types
            ),
        )
        for line in ALLOWED
    ]
    assert [(role, types) for role, types, _, _ in shown] == stated
    assert [(because, test) for _, _, because, test in shown] == [
        (line.because, line.test) for line in ALLOWED
    ]
