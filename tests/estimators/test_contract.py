"""What all private estimators promise alike: whose guarantee it is, on what it rests, and what a fit leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_array_equal
from sklearn.exceptions import NotFittedError
from sklearn.preprocessing import StandardScaler

from quietmax.accounting import Guarantee
from quietmax.data.records import hold_out
from quietmax.data.schema import Schema
from quietmax.data.tables import encode_table
from quietmax.errors import InvalidInput
from quietmax.estimators import DPSGD, PrivateHead, Teachers, open_private, save_private
from quietmax.estimators.training_set import CLASSES, SETTINGS_PUBLIC, size_condition
from quietmax.models import CrossEntropy, TrainingSettings
from quietmax.models.features import RandomFourier, UnitNorm
from tests.estimators.made import made

LINEAR = TrainingSettings(hidden=(), loss=CrossEntropy(), learning_rate=0.05, epochs=5, batch_size=8)
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "head": (PrivateHead, {"epsilon": 2.0, "steps": 5}),
    "head, output": (PrivateHead, {"epsilon": 2.0, "method": "output"}),
    "head, query": (PrivateHead, {"epsilon": 40.0, "release": "query", "queries": 40}),
    "dpsgd": (DPSGD, {"epsilon": 2.0, "delta": 1e-5, "steps": 5}),
    "teachers": (Teachers, {"epsilon": 8.0, "queries": 40, "teachers": 3, "network": LINEAR}),
}
COLUMNS = tuple(f"x{number}" for number in range(4))
NAMES = np.array(["low", "middle", "high"])
SCHEMA = Schema(
    label="grade",
    classes=tuple(NAMES),
    bounds=dict.fromkeys(COLUMNS, (0.0, 1.0)),
    complete=COLUMNS,
    person="owner",
)


def _records(count: int = 300, seed: int = 0) -> tuple[Any, Any]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 3, count)
    centres = np.random.default_rng(99).random((3, 4))
    points = centres[labels] + 0.1 * generator.normal(size=(count, 4))
    return np.clip(points, 0, 1).astype(np.float32), labels


RECORDS, LABELS = _records()
PEOPLE = np.arange(300) // 3
FRAME = pd.DataFrame(RECORDS.astype(float), columns=COLUMNS).assign(grade=NAMES[LABELS], owner=PEOPLE)


@pytest.fixture(params=WAYS)
def new(request: pytest.FixtureRequest) -> Any:
    """Make an estimator with everything declared, except what is given."""
    kind, usual = WAYS[request.param]
    return lambda **given: made(kind, **({"classes": range(3), "declared_size": 300} | usual | given))


def _weights(fitted: Any) -> Any:
    if hasattr(fitted, "coef_"):
        return fitted.coef_
    if hasattr(fitted, "model_"):
        return fitted.model_.network.weight_vectors().numpy()
    model = fitted.predictor_.model
    return model.weights if isinstance(fitted, PrivateHead) else model.teachers.weight_vectors().numpy()


def test_a_guarantee_with_everything_declared_is_proven_and_survives_json(new: Any) -> None:
    fitted = new().fit(RECORDS, LABELS)
    claim = fitted.guarantee_
    assert (claim.status, claim.unit) == ("proven", "record")
    assert SETTINGS_PUBLIC in claim.assumptions
    assert Guarantee.from_json(json.loads(json.dumps(claim.to_json()))) == claim
    assert fitted.n_features_in_ == 4
    assert fitted.classes_.tolist() == [0, 1, 2]
    assert (fitted.encoding_, fitted.holdout_) == (None, None)


def test_what_was_read_off_the_records_or_seeded_makes_a_guarantee_conditional(new: Any) -> None:
    undeclared = new(classes=None).fit(RECORDS, LABELS).guarantee_
    assert undeclared.status == "conditional"
    assert undeclared.assumptions[-1:] == CLASSES.assumptions
    seeded = new(random_state=0).fit(RECORDS, LABELS).guarantee_
    assert seeded.status == "conditional"
    assert "seed" in seeded.because
    if new().get_params().get("release") == "query":
        with pytest.raises(InvalidInput, match="requires `declared_size`"):
            new(declared_size=None).fit(RECORDS, LABELS)
        return
    unsized = new(declared_size=None).fit(RECORDS, LABELS).guarantee_
    if isinstance(new(), PrivateHead):  # which releases a noisy count
        assert (unsized.status, unsized.parameters["size_from"]) == ("proven", "noisy count")
    else:
        assert unsized.assumptions[-1:] == size_condition("record").assumptions
        assert unsized.parameters["declared_size"] == 300


def test_persons_are_named_by_groups_or_by_a_column_alike(new: Any) -> None:
    options: dict[str, Any] = {"random_state": 3, "declared_size": 100, "features": UnitNorm(0.5)}
    arrays = new(**options).fit(RECORDS, LABELS, groups=PEOPLE)
    framed = new(classes=None, schema=SCHEMA, **options).fit(FRAME)
    beside = new(classes=None, schema=SCHEMA, **options).fit(FRAME.drop(columns="grade"), FRAME["grade"])
    assert framed.encoding_ is not None
    for other in (framed, beside):
        assert_array_equal(_weights(other), _weights(arrays))
        assert other.guarantee_.unit == arrays.guarantee_.unit == "person"
    assert set(framed.predict(FRAME[:5])) <= set(NAMES)
    stated = [each for each in framed.guarantee_.assumptions if "same value in column 'owner'" in each]
    assert len(stated) == 1
    assert new(declared_size=100).fit(RECORDS, LABELS, groups=PEOPLE).guarantee_.status == "proven"


def test_who_was_held_out_is_a_fact_of_the_guarantee(new: Any) -> None:
    parts = hold_out(encode_table(FRAME, SCHEMA), 0.3, seed=1)
    fitted = new(classes=None).fit(parts.train)
    assert fitted.holdout_ == parts.holdout
    assert fitted.guarantee_.parameters["holdout"] == {"share": 0.3, "seed": 1}
    one_too_many = parts.records.take(np.append(parts.train_rows, parts.test_rows[:1]))
    for wrong in (parts.test, parts.records, one_too_many):
        with pytest.raises(InvalidInput, match=r"held out by their own split.*`split\.train`"):
            new(classes=None).fit(wrong)
    with pytest.raises(InvalidInput, match="Nobody is left to train on"):
        new(classes=None).fit(hold_out(encode_table(FRAME, SCHEMA), 0.999_999).train)


def test_a_seed_repeats_a_training_and_no_two_others_are_alike(new: Any) -> None:
    one, two = (new(random_state=4).fit(RECORDS, LABELS) for _ in range(2))
    assert_array_equal(_weights(one), _weights(two))
    if hasattr(one, "predictor_"):  # the minimiser has no noise, and teachers are secret
        return
    one, two = (new().fit(RECORDS, LABELS) for _ in range(2))
    assert (_weights(one) != _weights(two)).all()


@pytest.mark.parametrize(
    "features", [UnitNorm(0.5), RandomFourier(count=20, bandwidth=1.0)], ids=["norm", "fourier"]
)
def test_any_public_map_can_come_first_and_is_saved_with_the_model(
    new: Any, features: Any, tmp_path: Path
) -> None:
    fitted = new(features=features).fit(RECORDS, LABELS)
    assert fitted.guarantee_.status == "proven"
    assert fitted.feature_map_ == features
    opened = open_private(save_private(fitted, tmp_path / "model", dataset="points"))
    assert opened.guarantee == fitted.guarantee_
    if not hasattr(fitted, "predictor_"):
        np.testing.assert_allclose(opened.predict_proba(RECORDS[:9]), fitted.predict_proba(RECORDS[:9]))


def test_an_estimator_whose_last_fit_failed_is_not_fitted(new: Any, tmp_path: Path) -> None:
    """The second fit is by record; the guarantee for persons was that of the first one."""
    fitted = new().fit(RECORDS, LABELS, groups=PEOPLE)
    with pytest.raises(InvalidInput, match="not one of the 3 declared classes"):
        fitted.fit(RECORDS, LABELS + 1)
    assert not hasattr(fitted, "guarantee_")
    for use in (
        lambda: fitted.predict(RECORDS),
        lambda: save_private(fitted, tmp_path / "model", dataset="points"),
    ):
        with pytest.raises(NotFittedError):
            use()
    with pytest.raises(InvalidInput, match="fit it again"):
        fitted.evaluate(RECORDS, LABELS, mu=1.0)


def test_a_class_that_inherits_from_an_estimator_may_look_at_the_records_first(new: Any) -> None:
    kind = type("Scaled", (type(new()),), {})
    own = kind(**new().get_params(deep=False)).fit(RECORDS, LABELS)
    assert own.guarantee_.status == "conditional"
    assert own.guarantee_.parameters["own_code"] == ["Scaled"]
    assert "is public: Scaled." in own.guarantee_.assumptions[-1]


@pytest.mark.parametrize("value", [1e-45, -3.4e38])
def test_no_record_is_an_error_because_the_caller_made_numpy_strict(new: Any, value: float) -> None:
    records = RECORDS.copy()
    records[7] = value
    with np.errstate(all="raise"):
        new().fit(records, LABELS)


@pytest.mark.parametrize(
    ("changes", "groups", "match"),
    [
        ({"epsilon": 0.0}, None, "epsilon"),
        ({"classes": [0]}, None, "two different classes"),
        ({"engine": "disk"}, None, "engine must be"),
        ({"features": "wavelets"}, None, "features must be one of auto, identity, unit-norm, scattering"),
        ({"features": StandardScaler()}, None, "features must be "),
        ({"features": "scattering"}, None, "requires image_shape"),
        ({}, [1, 2], "groups must have one entry for each row"),
    ],
    ids=str,
)
def test_bad_input_is_refused_with_a_sentence(new: Any, changes: Any, groups: Any, match: str) -> None:
    with pytest.raises(InvalidInput, match=match) as error:
        new(**changes).fit(RECORDS, LABELS, groups=groups)
    assert "\n" not in str(error.value)
