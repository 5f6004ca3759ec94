"""Centring: what the first steps release, what one record or person changes of it, and the rows that follow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietmax.accounting.dpsgd import Schedule, noise_multiplier
from quietmax.errors import DataUnavailable, InvalidInput
from quietmax.estimators import DPSGDSettings, open_private, save_private
from quietmax.estimators.dpsgd import estimator, training
from quietmax.estimators.dpsgd.estimator import DPSGD, Centring, _batch_sum, _centre_noise, _released_centre
from quietmax.estimators.dpsgd.training import Plan, make_plan
from quietmax.estimators.head.exact_sums import _unit_rows, clipped_rows, on_grid
from quietmax.estimators.training_set import Persons
from quietmax.models.features import UnitNorm
from tests.estimators.made import made
from tests.estimators.table_of_people import PLAIN, table_of_people


def _features(count: int = 700, columns: int = 5, seed: int = 0) -> Any:
    return np.random.default_rng(seed).random((count, columns), dtype=np.float32)


def _plan(size: int, noise: float, **given: Any) -> Plan:
    planned = make_plan(size, epsilon=1.0, delta=1e-5, inputs="centred", **given)
    return replace(planned, noise_multiplier=noise)


@pytest.mark.parametrize("radius", [0.5, 2.0])
def test_removing_a_record_subtracts_exactly_its_own_row_of_length_at_most_one(radius: float) -> None:
    features = _features() * np.float32(3.0)
    everyone = np.arange(700)
    for record in (0, 350, 699):
        others = np.delete(everyone, record)
        moved = _batch_sum(features, everyone, radius, None) - _batch_sum(features, others, radius, None)
        np.testing.assert_array_equal(moved, clipped_rows(features[[record]], radius)[0])
        assert 0.5 < np.linalg.norm(moved) <= 1.0


@pytest.mark.parametrize("rows", [1, 3, 300])
def test_a_person_moves_the_sum_by_at_most_one_however_many_rows_it_has(rows: int) -> None:
    features = np.full((700, 5), 4.0, np.float32)
    people = np.concatenate([np.zeros(rows, int), np.arange(1, 701 - rows)])
    persons = Persons.of(people)
    everyone = np.arange(700)
    moved = _batch_sum(features, everyone, 1.0, persons) - _batch_sum(features, everyone[rows:], 1.0, persons)
    assert 0.99 < np.linalg.norm(moved) <= 1.0


@pytest.mark.parametrize("seed", [None, 3])
def test_without_features_the_centre_is_noise_of_the_stated_spread(seed: int | None) -> None:
    plan = _plan(100_000, noise=200.0, steps=80, sampling_rate=0.5)
    assert plan.settings.centring_steps == 4
    assert _centre_noise(plan) == pytest.approx(200.0 / (2 * 0.5 * 100_000))
    centre = _released_centre(np.zeros((10, 40_000), np.float32), plan, radius=1.0, seed=seed)
    # The standard deviation of 40,000 draws is off by more than 2% with a probability below 2e-8.
    assert centre.std() == pytest.approx(_centre_noise(plan), rel=0.02)
    assert abs(centre.mean()) < 6 * _centre_noise(plan) / 200


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("grouped", [False, True])
def test_with_hardly_any_noise_the_centre_is_the_mean_divided_by_the_declared_size(
    seed: int | None, grouped: bool
) -> None:
    features = _features()
    persons = Persons.of(np.arange(700) // 2) if grouped else None
    units = 350 if grouped else 700
    plan = _plan(2 * units, noise=1e-3, sampling_rate=1.0)
    centre = _released_centre(features, plan, radius=3.0, seed=seed, persons=persons)
    np.testing.assert_allclose(centre, clipped_rows(features, 3.0).mean(0) / 2, atol=1e-4)
    np.testing.assert_array_equal(on_grid(centre), centre)


def test_a_centre_is_never_longer_than_one() -> None:
    plan = _plan(10, noise=50.0)
    centre = _released_centre(_features(10), plan, radius=1.0, seed=0)
    assert 0.99 < np.linalg.norm(centre) <= 1.0


def test_the_batches_of_centring_are_not_those_of_the_first_gradient_steps() -> None:
    settings = _plan(700, noise=1.0).settings
    seen: list[Any] = []

    def noted(*given: Any, seed: int) -> Any:
        seen.append(seed)
        return training._draw_batches(*given, seed=seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimator, "_draw_batches", noted)
        _released_centre(_features(), _plan(700, noise=1.0), radius=1.0, seed=5)
    first, second = (next(training._draw_batches(700, 700, settings, seed=seed)) for seed in (*seen, 5))
    assert set(first) != set(second)


def test_every_step_is_one_release_of_the_same_noise_multiplier(monkeypatch: pytest.MonkeyPatch) -> None:
    releases: list[tuple[float, float]] = []
    for module in (estimator, training):
        original = module.release_gaussian

        def counted(
            values: Any, *, sensitivity: float, mu: float, _release: Any = original, **rest: Any
        ) -> Any:
            releases.append((sensitivity, mu))
            return _release(values, sensitivity=sensitivity, mu=mu, **rest)

        monkeypatch.setattr(module, "release_gaussian", counted)
    features, labels = _features(), np.arange(700) % 3
    fitted = DPSGD(2.0, 1e-5, declared_size=700, classes=range(3), settings=DPSGDSettings(steps=40)).fit(
        features, labels
    )
    plan = fitted.plan_
    assert plan.noise_multiplier == noise_multiplier(2.0, 1e-5, Schedule(0.5, 40))
    norm = plan.settings.max_grad_norm * (1 + 2.0**-20)
    assert releases == [(1.0, 1 / plan.noise_multiplier)] * 2 + [(norm, 1 / plan.noise_multiplier)] * 38
    assert (fitted.guarantee_.epsilon, fitted.guarantee_.delta) == (2.0, 1e-5)
    assert fitted.guarantee_.parameters["centring_steps"] == 2
    assert "clipped features and gradients" in fitted.guarantee_.because


def test_rows_are_those_of_a_head_times_five_and_depend_on_their_own_features_alone() -> None:
    features = _features(1100)
    centre = on_grid(np.full(5, 0.3))
    made = Centring(centre, radius=1.5)
    rows = made.rows(features)
    expected = 5.0 * _unit_rows(clipped_rows(features, 1.5), centre, 0.2)[:, :-1]
    np.testing.assert_array_equal(rows, expected.astype(np.float32))
    assert np.linalg.norm(rows, axis=1).max() < 5.0
    order = np.random.default_rng(1).permutation(1100)[:601]
    for each in (made, Centring(centre, 1.5, np.array([1.0, 0.5, 0.5, 0.25, 0.125, 1.0]))):
        np.testing.assert_array_equal(each.rows(features[order]), each.rows(features)[order])
        np.testing.assert_array_equal(each.rows(features[:1]), each.rows(features)[:1])


def test_the_number_of_records_is_limited_before_anything_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quietmax.estimators.dpsgd.training.LARGEST_TABLE", 100)
    monkeypatch.setattr(estimator, "_batch_sum", None)
    with pytest.raises(InvalidInput, match="at most 100 records"):
        _released_centre(_features(), _plan(700, noise=1.0), radius=1.0)


def _alone(steps: int | None) -> DPSGDSettings:
    return DPSGDSettings(centring_steps=steps, calibration_steps=0)


def test_centring_helps_where_features_have_much_in_common() -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 4000)
    points = 0.5 + 0.05 * np.eye(3)[labels] + 0.02 * generator.normal(size=(4000, 3))
    public: dict[str, Any] = {"declared_size": 3000, "classes": range(3), "random_state": 0}
    scores = [
        DPSGD(1.0, 1e-5, features=UnitNorm(0.5), settings=_alone(steps), **public)
        .fit(points[:3000], labels[:3000])
        .score(points[3000:], labels[3000:])
        for steps in (None, 0)
    ]
    assert scores[0] > 0.9
    assert scores[0] > scores[1] + 0.05


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"analysis": "published", "accountant": "zcdp", "centring_steps": 1}, "requires preset='default'"),
        ({"preset": "paper", "centring_steps": 1}, "requires preset='default'"),
        ({"network": object(), "centring_steps": 1}, "the built-in network"),
        ({"steps": 4, "centring_steps": 4}, "from 0 to 3 with 4 steps"),
        ({"steps": 4, "centring_steps": -1}, "from 0 to 3 with 4 steps"),
        ({"steps": 4, "centring_steps": 1.5}, "from 0 to 3 with 4 steps"),
    ],
)
def test_centring_that_makes_no_sense_is_refused(changes: dict[str, Any], match: str) -> None:
    private = made(DPSGD, 1.0, 1e-5, declared_size=60, classes=range(3), **changes)
    with pytest.raises(InvalidInput, match=match):
        private.fit(_features(60), np.arange(60) % 3)


@pytest.mark.parametrize("changes", [{"centring_steps": 0}, {"steps": 1}, {"preset": "paper", "steps": 3}])
def test_without_centring_the_network_sees_the_features_as_they_are(changes: dict[str, Any]) -> None:
    private = made(DPSGD, 1.0, 1e-5, declared_size=60, classes=range(3), **changes)
    private.fit(_features(60), np.arange(60) % 3)
    assert private.model_.centring is None
    assert "centring_steps" not in private.guarantee_.parameters
    assert "clipped gradients" in private.guarantee_.because


def test_a_network_with_a_length_sees_scaled_features_of_a_table_and_is_saved_with_them(
    tmp_path: Path,
) -> None:
    frame = table_of_people(900, 900)
    chosen = DPSGDSettings(hidden=(3,), length=1.0)
    private = DPSGD(8.0, 1e-5, schema=PLAIN, declared_size=900, settings=chosen).fit(frame)
    assert private.guarantee_.status == "proven"
    assert private.guarantee_.parameters["features"]["kind"] == "table"
    assert private.guarantee_.parameters["inputs"] == "scaled"
    assert private.score(frame, frame["ill"]) > 0.7
    folder = save_private(private, tmp_path / "model", dataset="people")
    opened = open_private(folder)
    assert opened.guarantee == private.guarantee_
    records = opened.encode(frame)
    np.testing.assert_allclose(opened.predict_proba(records), private.predict_proba(frame), atol=1e-6)


@pytest.mark.parametrize("damage", ["no centre", "other centre", "no steps"])
def test_a_folder_whose_centre_contradicts_its_steps_cannot_be_opened(tmp_path: Path, damage: str) -> None:
    from quietmax.models.serialization import read_folder, write_folder

    private = DPSGD(2.0, 1e-5, declared_size=60, classes=range(3), settings=DPSGDSettings(steps=4))
    folder = save_private(
        private.fit(_features(60), np.arange(60) % 3), tmp_path / "model", dataset="numbers"
    )
    open_private(folder)
    description, tensors = read_folder(folder, "dpsgd")
    changed = dict(tensors)
    if damage == "no centre":
        del changed["centre"]
    elif damage == "other centre":
        changed["centre"] = changed["centre"] + 1e-9
    else:
        del description["guarantee"]["parameters"]["centring_steps"]
    write_folder(tmp_path / "damaged", description, changed, overwrite=False, released=True)
    with pytest.raises(DataUnavailable, match="centre"):
        open_private(tmp_path / "damaged")
