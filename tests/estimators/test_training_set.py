"""One way into every estimator: arrays, groups, frames and records become the same kind of training set."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars
import pyarrow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.dummy import DummyClassifier
from sklearn.ensemble import BaggingClassifier, StackingClassifier, VotingClassifier
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Binarizer, Normalizer, StandardScaler

from quietmax import _before_noise
from quietmax._before_noise import Allowed
from quietmax.data.encoding import Encoding, NumericColumn
from quietmax.data.records import Records, hold_out
from quietmax.data.schema import Schema
from quietmax.data.tables import encode_table
from quietmax.errors import InvalidInput
from quietmax.estimators.training_set import (
    Persons,
    _check_embedding,
    _names_of,
    _training_rows,
    alike,
    queries,
)
from tests.estimators.whole_set import training_set

SCHEMA = Schema(
    label="ill",
    classes=("no", "yes"),
    bounds={"age": (0, 100)},
    categories={"region": ("north", "south")},
    complete=("age", "region"),
)
PEOPLE = pd.DataFrame(
    {
        "age": [25, 75, 50, 100],
        "region": ["north", "south", "north", "south"],
        "customer": ["ann", "bob", "ann", "cid"],
        "ill": ["no", "yes", "no", "yes"],
    }
)
PERSONAL = replace(SCHEMA, person="customer")


class Bare(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """An estimator that keeps its training set and predicts the first class."""

    def __init__(self, schema: Schema | None = None, classes: Any = None, strength: float = 1.0) -> None:
        self.schema = schema
        self.classes = classes
        self.strength = strength

    def fit(self, X: Any, y: Any = None, *, groups: Any = None) -> Bare:
        self.seen_ = training_set(self, X, y, groups)
        return self

    def predict(self, X: Any) -> Any:
        return np.full(len(queries(self, X)), self.classes_[0])

    def predict_proba(self, X: Any) -> Any:
        return np.full((len(queries(self, X)), len(self.classes_)), 1 / len(self.classes_))


@pytest.fixture(autouse=True)
def _bare_is_an_estimator_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Allowed("estimator", (f"{__name__}.Bare",), "it computes nothing", __file__)
    monkeypatch.setattr(_before_noise, "ALLOWED", (*_before_noise.ALLOWED, line))


def seen(X: Any, y: Any = None, *, groups: Any = None, **parameters: Any) -> Any:
    return Bare(**parameters).fit(X, y, groups=groups).seen_


def test_arrays_are_records_of_their_own_without_groups() -> None:
    found = seen([[0.0], [1.0], [2.0]], ["b", "a", "b"])
    assert (found.unit, found.units, found.persons, found.encoding) == ("record", 3, None, None)
    assert found.classes.tolist() == ["a", "b"]
    assert found.labels.tolist() == [1, 0, 1]
    assert not found.classes_declared
    assert seen([[0.0], [1.0]], ["b", "a"], classes=("b", "a")).classes_declared


def test_groups_make_the_person_the_unit() -> None:
    found = seen([[0.0], [1.0], [2.0]], [0, 1, 0], groups=["ann", "bob", "ann"], classes=(0, 1))
    assert (found.unit, found.units) == ("person", 2)
    assert found.persons.rows.tolist() == [2, 1, 2]
    assert found.conditions == ()


@pytest.mark.parametrize(
    "groups",
    [
        [1, 2, 1],
        [1.0, 2.0, 1.0],
        ["1", " 2", "1 "],
        np.array([1, 2, 1]),
        np.array([1.0, 2.0, 1.0]),
        np.array(["1", "2", "1"]),
        np.array([1, "2", 1.0], dtype=object),
        (np.int64(1), np.float32(2), np.array(1)),
        pd.Series([1, 2, 1], index=[7, 8, 9]),
        pd.Series([1, 2, 1], dtype="Int64"),
        pd.Series([1, 2, 1], dtype="int32[pyarrow]"),
        pd.Series(["1", "2", "1"], dtype="category"),
        range(1, 3),
        pyarrow.array([1, 2, 1]),
        pyarrow.chunked_array([["1"], ["2", "1"]]),
        polars.Series([1, 2, 1]),
        polars.Series(["1", "2", "1"]),
        pd.Index([1, 2, 1]),
        pd.Index(["1", "2", "1"], dtype="category"),
        pd.array([1, 2, 1], dtype="Int64"),
        torch.tensor([1, 2, 1]),
    ],
)
def test_a_person_has_the_same_name_whatever_holds_the_groups(groups: Any) -> None:
    assert _names_of(groups).tolist() == ["1", "2", "1"][: len(groups)]


@given(
    st.lists(
        st.integers(-(2**70), 2**70)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text("ab1.", min_size=1, max_size=3)
        | st.binary(min_size=1, max_size=3).filter(bytes.strip)
        | st.booleans()
        | st.datetimes(timezones=st.none() | st.timezones())
        | st.datetimes(dt.datetime(1700, 1, 1), dt.datetime(2200, 1, 1)).map(pd.Timestamp)
        | st.dates()
        | st.times()
        | st.timedeltas()
        | st.decimals(allow_nan=False, allow_infinity=False),
        min_size=1,
        max_size=12,
    ),
    st.data(),
)
def test_a_persons_name_and_number_of_rows_depend_on_no_other_person(groups: list[Any], data: Any) -> None:
    everyone = _names_of(groups)
    persons, names = Persons.of(everyone), everyone.tolist()
    removed = data.draw(st.sampled_from(names))
    kept = [row for row, name in enumerate(names) if name != removed]
    order = data.draw(st.permutations(kept))
    found = _names_of([groups[row] for row in order])
    others = Persons.of(found)
    assert found.tolist() == [names[row] for row in order]
    assert others.rows.tolist() == persons.rows[order].tolist()
    assert others.count == persons.count - 1
    # Exact grouping: two rows have the same number if and only if they have the same name.
    same = persons.codes[:, None] == persons.codes
    assert (same == (everyone[:, None] == everyone)).all()


BIRTHS = [dt.datetime(1980, 1, day, 0, 0, 0, 500_000) for day in range(1, 13)]


@pytest.mark.parametrize(
    "stranger", ["x", 7, 0.5, None, BIRTHS[0].replace(tzinfo=dt.UTC), dt.date(1980, 1, 1)]
)
@pytest.mark.parametrize("births", [BIRTHS, [birth - BIRTHS[0] for birth in BIRTHS]], ids=["dates", "spans"])
def test_a_stranger_with_an_id_of_another_type_renames_nobody(births: list[Any], stranger: Any) -> None:
    names = _names_of(births).tolist()
    if stranger is not None:
        assert _names_of([*births, stranger])[:-1].tolist() == names
    # Labels that come beside a frame are read by the same rule.
    schema = replace(SCHEMA, classes=(*names, "x"))
    frame = pd.DataFrame({"age": [50] * 13, "region": ["north"] * 13})
    assert seen(frame[:-1], births, schema=schema).labels.tolist() == [*range(12)]
    assert seen(frame, [*births, "x"], schema=schema).labels.tolist() == [*range(13)]


@pytest.mark.parametrize("made", [pd.Series, pd.Index, polars.Series, pyarrow.array, np.array])
def test_a_type_that_the_container_declares_is_kept(made: Any) -> None:
    names = _names_of(made(BIRTHS)).tolist()
    assert names == _names_of(made(BIRTHS[:1])).tolist() + _names_of(made(BIRTHS[1:])).tolist()
    assert names == _names_of(BIRTHS).tolist()
    assert len(set(names)) == 12


@pytest.mark.parametrize(
    "made",
    [lambda frame: frame, pyarrow.Table.from_pandas, polars.from_pandas],
    ids=["pandas", "arrow", "polars"],
)
def test_a_frame_is_encoded_by_the_schema(made: Any) -> None:
    found = seen(made(PEOPLE), schema=replace(PERSONAL))
    assert found.classes.tolist() == ["no", "yes"]
    assert found.labels.tolist() == [0, 1, 0, 1]
    assert found.records.tolist() == [[0.25, 1, 0], [0.75, 0, 1], [0.5, 1, 0], [1, 0, 1]]
    assert (found.unit, found.units) == ("person", 3)
    assert found.encoding is not None
    assert found.conditions == ()


@pytest.mark.parametrize("at_once", [2, 100])
def test_labels_and_persons_may_come_beside_the_frame(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quietmax.data.tables.rows_at_once", lambda _: at_once)
    frame = PEOPLE[["age", "region"]]
    found = seen(frame, PEOPLE["ill"], groups=PEOPLE["customer"], schema=SCHEMA)
    same = seen(PEOPLE, schema=PERSONAL)
    np.testing.assert_array_equal(found.records, same.records)
    np.testing.assert_array_equal(found.labels, same.labels)
    np.testing.assert_array_equal(found.names, same.names)


def test_records_are_taken_as_they_are() -> None:
    records = encode_table(PEOPLE, PERSONAL)
    found, same = seen(records), seen(PEOPLE, schema=PERSONAL)
    np.testing.assert_array_equal(found.records, same.records)
    assert found.classes.tolist() == ["no", "yes"]
    assert found.unit == "person"
    assert seen(POINTS).classes.tolist() == [0, 1, 2]
    assert seen(POINTS).classes_declared
    assert seen(POINTS, classes=("a", "b", "c")).classes.tolist() == ["a", "b", "c"]


def test_it_is_known_where_rows_lie_before_they_are_read(tmp_path: Path) -> None:
    frame = PEOPLE.drop(columns="customer")
    frame.to_csv(tmp_path / "people.csv", index=False)
    records, names = encode_table(frame, SCHEMA), ["ann", "bob", "ann", "cid"]
    from_file = _training_rows(Bare(SCHEMA), tmp_path / "people.csv", None, None)
    from_frame = _training_rows(Bare(SCHEMA), frame, None, None)
    for rows in (from_file, from_frame):
        assert rows.source is not None
        assert rows.in_memory is rows.source.in_memory is (rows is from_frame)
        (piece,) = rows.pieces
        np.testing.assert_array_equal(piece.records, records.features)
    for rows in (
        _training_rows(Bare(SCHEMA), frame, None, names),
        _training_rows(Bare(), records, None, None),
        _training_rows(Bare(), records.features, records.labels, None),
    ):
        assert rows.source is None
        assert rows.in_memory
    with pytest.raises(InvalidInput, match="leave out `groups`"):
        _training_rows(Bare(SCHEMA), tmp_path / "people.csv", None, names)


def test_only_a_holdout_of_somebody_is_kept() -> None:
    records = encode_table(PEOPLE, PERSONAL)
    assert Bare().fit(hold_out(records, 0.0).train).holdout_ is None
    parts = hold_out(records, 0.4, seed=1)
    assert len(parts.train)
    assert Bare().fit(parts.train).holdout_ == parts.holdout


ENCODED = encode_table(PEOPLE, PERSONAL)
POINTS = Records("points", np.eye(3, dtype=np.float32), np.array([0, 1, 0]), classes=3)
NO_UNICODE = "secret\ud800"
NO_SEQUENCES: list[Any] = [
    *([["ann"], ["bob"]], np.array([["ann"], ["bob"]]), "ab", b"ab", 7, {"ann": 1, "bob": 2}),
    *(pd.DataFrame({"a": [1], "b": [2]}), polars.Series([object(), object()], dtype=polars.Object)),
]
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (ENCODED, {"schema": PERSONAL}, "leave out `schema` and `y`"),
    (ENCODED, {"y": [0, 1, 0, 1]}, "leave out `schema` and `y`"),
    (ENCODED, {"groups": [1, 2, 1, 3]}, "leave out `groups`"),
    (ENCODED, {"classes": ("yes", "no")}, "leave out `classes`"),
    (POINTS, {"classes": ("a", "b")}, "3 classes"),
    (PEOPLE[["age", "region"]], {"y": PEOPLE["ill"]}, "needs a `schema`"),
    (
        PEOPLE.drop(columns="ill"),
        {"y": ["no", NO_UNICODE, "yes", "no"], "schema": PERSONAL},
        "Row 2 has a label",
    ),
    (
        PEOPLE.assign(customer=pd.Series(["ann", NO_UNICODE, "bob", NO_UNICODE], dtype=object)),
        {"schema": PERSONAL},
        r"Row 2 \(and 1 more\) has a string that is not valid Unicode",
    ),
    *(
        ([[0.0], [1.0]], {"y": [0, 1], "groups": groups}, match)
        for groups, match in [
            (["ann"], "one entry for each row"),
            (["ann", NO_UNICODE], "valid Unicode"),
            *(
                (["secret", missing], "name a person for every row")
                for missing in (None, np.nan, "", "NA", pd.NA)
            ),
            *((wrong, "flat sequence") for wrong in NO_SEQUENCES),
        ]
    ),
]


@pytest.mark.parametrize(("X", "more", "match"), REFUSED)
def test_what_is_said_twice_or_makes_no_sense_is_an_error_that_shows_no_value(
    X: Any, more: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidInput, match=match) as caught:
        seen(X, **more)
    assert "secret" not in repr(caught.value)
    assert "north" not in str(caught.value)


def test_queries_are_frames_or_encoded_rows() -> None:
    fitted = Bare(PERSONAL).fit(PEOPLE)
    for given_queries in (
        PEOPLE[["region", "age"]],
        pyarrow.Table.from_pandas(PEOPLE),
        polars.from_pandas(PEOPLE),
        fitted.seen_.records,
        encode_table(PEOPLE, PERSONAL),
    ):
        np.testing.assert_array_equal(queries(fitted, given_queries), fitted.seen_.records)
    with pytest.raises(InvalidInput, match="age"):
        queries(fitted, PEOPLE[["region"]])
    with pytest.raises(ValueError, match="features"):
        queries(fitted, fitted.seen_.records[:, 1:])


# --- Steps that were fitted before the estimator ----------------------------------------------------------------------

X, Y = np.arange(24.0).reshape(12, 2), np.arange(12) % 2


def test_a_pipeline_hands_groups_on() -> None:
    pipeline = make_pipeline(Normalizer(), Bare()).fit(X, Y, bare__groups=np.arange(12) // 3)
    assert (pipeline[-1].seen_.unit, pipeline[-1].seen_.units) == ("person", 4)


def test_steps_of_outer_pipelines_and_searches_are_seen() -> None:
    nested = make_pipeline(StandardScaler(), make_pipeline(Binarizer(), Bare())).fit(X, Y)
    assert nested[-1][-1].seen_.own_code == ("StandardScaler",)
    grid = {"strength": [1.0, 2.0]}
    inside = make_pipeline(StandardScaler(), GridSearchCV(Bare(), grid, cv=2)).fit(X, Y)
    assert inside[-1].best_estimator_.seen_.own_code == ("StandardScaler", "GridSearchCV")
    outside = GridSearchCV(make_pipeline(StandardScaler(), Bare()), {"bare__strength": [1.0, 2.0]}, cv=2).fit(
        X, Y
    )
    assert outside.best_estimator_[-1].seen_.own_code == ("GridSearchCV", "StandardScaler")


@pytest.mark.parametrize(
    ("meta", "inner"),
    [
        (
            StackingClassifier([("first", DummyClassifier())], Bare(), cv=2),
            lambda fitted: fitted.final_estimator_,
        ),
        (VotingClassifier([("only", Bare())]), lambda fitted: fitted.estimators_[0]),
        (OneVsRestClassifier(Bare()), lambda fitted: fitted.estimators_[0]),
        (BaggingClassifier(Bare(), n_estimators=1), lambda fitted: fitted.estimators_[0]),
        (
            CalibratedClassifierCV(Bare(), cv=2, ensemble=False),
            lambda fitted: fitted.calibrated_classifiers_[0].estimator,
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_other_estimator_that_is_being_fitted_is_seen(meta: Any, inner: Any) -> None:
    assert inner(meta.fit(X, Y)).seen_.own_code == (type(meta).__name__,)


@pytest.mark.parametrize(
    "rows",
    [
        PEOPLE[["age", "region"]].to_numpy(),
        [["25", "north"]],
        np.array([["25", "1"]]),
        [{"age": 25, "region": "north"}],
        [[1.0, 0.0, 0.0], [1.0]],
    ],
    ids=["objects", "lists", "strings", "mappings", "ragged"],
)
def test_queries_to_a_model_of_a_table_that_are_no_numbers_need_column_names(rows: Any) -> None:
    bare = Bare(schema=SCHEMA).fit(PEOPLE[["age", "region", "ill"]])
    with pytest.raises(
        InvalidInput, match=r"^X must be a data frame with the columns 'age', 'region', or an"
    ):
        queries(bare, rows)
    encoded = bare.encoding_.encode(PEOPLE[["age", "region"]])
    np.testing.assert_array_equal(queries(bare, encoded.astype(object)), encoded)


def test_an_estimator_outside_a_pipeline_or_in_cross_validation_has_no_such_condition() -> None:
    assert seen(X, Y).own_code == ()
    assert cross_val_score(Bare(), X, Y, cv=2, error_score="raise").tolist() == [0.5, 0.5]
    StandardScaler().fit(X)
    assert Bare().fit(X, Y).seen_.own_code == ()


def test_an_embedding_takes_columns_whose_values_lie_evenly_around_zero() -> None:
    even = NumericColumn("x", -2, 2, missing=False)
    _check_embedding(Encoding((even,), "y", ("a", "b")))
    for change in ({"low": -1}, {"scale": "log"}, {"edges": (0.0,)}, {"missing": True}):
        with pytest.raises(InvalidInput, match="'z'"):
            _check_embedding(Encoding((even, replace(even, name="z", **change)), "y", ("a", "b")))


def test_values_are_alike_up_to_rounding_and_of_one_kind() -> None:
    assert alike({"a": [1.0, "b"]}, {"a": (1 + 1e-10, "b")})
    assert not any(alike(1.0, other) for other in (1 + 1e-8, True, "1", None))
    assert not alike({"a": 1}, [1])
    assert not alike([1], {"a": 1})
