"""What a series of versions states, what may be claimed of it, and its evaluations."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quietmax import PrivateHead
from quietmax.accounting.guarantee import Guarantee
from quietmax.data.cohorts import ErasureList
from quietmax.data.tables import encode_table, table_rows
from quietmax.errors import BudgetExhausted, DataUnavailable, InvalidInput, QuietmaxWarning
from quietmax.estimators import DPSGD, DPSGDSettings, Teachers
from quietmax.estimators.evaluation import (
    EvaluationCharge,
    composed_guarantee,
    evaluate_folder,
    evaluated_rows,
)
from quietmax.estimators.figures import Estimate
from quietmax.estimators.head.update import prior_of
from quietmax.estimators.serialization import open_private, save_private
from quietmax.estimators.series import Version, drift, version_digest
from quietmax.estimators.training_set import ERASURE
from tests.estimators.growing import MONTHS, PER_MONTH, SCHEMA, head, series, visits

TABLE = visits()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("series")
    return save_private(series(TABLE, *MONTHS[:3]), place / "model", dataset="visits")


def edited(folder: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Return a copy of a model folder whose stated facts were changed."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    (described,) = (file for file in target.iterdir() if file.name in ("description.json", "model.json"))
    content = json.loads(described.read_text("utf-8"))
    change(content["guarantee"])
    described.write_text(json.dumps(content), "utf-8")
    return target


def _drop_first(stated: dict[str, Any]) -> None:
    del stated["parameters"]["series"][0]


def _drop_all(stated: dict[str, Any]) -> None:
    stated["parameters"]["series"] = []


def _cheaper(stated: dict[str, Any]) -> None:
    stated["mu"] = stated["mu"] / 2


def _cheaper_training(stated: dict[str, Any]) -> None:
    stated["parameters"]["mu_version"] = stated["parameters"]["mu_version"] / 2


def _dearer_before(stated: dict[str, Any]) -> None:
    stated["parameters"]["series"][0]["mu"] = 9.0


def _same_cohort(stated: dict[str, Any]) -> None:
    stated["parameters"]["series"][0]["cohort"] = MONTHS[2]


def _unknown_cohort(stated: dict[str, Any]) -> None:
    stated["parameters"]["cohort"]["name"] = "2031-01"


def _no_cohort(stated: dict[str, Any]) -> None:
    del stated["parameters"]["cohort"]


def _negative(stated: dict[str, Any]) -> None:
    stated["parameters"]["series"][0]["mu"] = -1.0


def _other_status(stated: dict[str, Any]) -> None:
    del stated["parameters"]["series"][0]["status"]
    del stated["parameters"]["series"][1]["status"]


def _no_digest(stated: dict[str, Any]) -> None:
    stated["parameters"]["series"][0]["digest"] = "no"


def _other_accuracy(stated: dict[str, Any]) -> None:
    stated["parameters"]["series"][0]["accuracy"] = {"value": 0.5, "low": 0.6, "high": 0.4}


def _dear_evaluation(stated: dict[str, Any]) -> None:
    first = stated["parameters"]["series"][0]
    first["evaluations"] = [["id", 2.0 * first["mu"]]]


@pytest.mark.parametrize(
    "change",
    [
        _dear_evaluation,
        _drop_first,
        _drop_all,
        _cheaper,
        _cheaper_training,
        _dearer_before,
        _same_cohort,
        _unknown_cohort,
        _no_cohort,
        _negative,
        _no_digest,
        _other_status,
        _other_accuracy,
    ],
)
def test_a_folder_whose_series_was_changed_cannot_be_opened(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    open_private(folder)
    with pytest.raises((DataUnavailable, InvalidInput)):
        open_private(edited(folder, tmp_path / "edited", change))


def test_the_digest_of_a_version_names_its_weights_and_all_before_it(folder: Path) -> None:
    model = open_private(folder)
    weights: Any = model.classifier
    facts = model.guarantee.parameters
    arrays = [weights.weights, weights.centre, weights.noise]
    own = prior_of(folder).versions[-1].digest
    assert own == version_digest(facts, arrays)
    changed = {**facts, "series": [{**facts["series"][0], "digest": "00" * 32}, *facts["series"][1:]]}
    assert version_digest(changed, arrays) != own
    assert version_digest(facts, [weights.weights + 1, *arrays[1:]]) != own


def with_holdout(table: Any, cohort: str, folder: Path, share: float = 0.4, **arguments: Any) -> Path:
    rows = table_rows(table, SCHEMA, holdout=share, seed=2)
    fitted = head(schema=None, **arguments).fit(rows, cohort=cohort)
    return save_private(fitted, folder / cohort, dataset="visits")


def test_an_evaluation_counts_the_held_out_people_of_the_cohort_and_is_free(tmp_path: Path) -> None:
    place = with_holdout(TABLE, MONTHS[1], tmp_path)
    model = open_private(place)
    TABLE.to_csv(tmp_path / "visits.csv", index=False)
    exact = evaluate_folder(
        place, model, evaluated_rows(model, str(tmp_path / "visits.csv"), in_parts=False), exact=True
    )
    rows = table_rows(TABLE, SCHEMA, holdout=0.4, seed=2).test.of_cohort(MONTHS[1])
    names = {name for records in rows.records() for name in records.persons}  # type: ignore[union-attr]
    assert exact.size.value == pytest.approx(len(names))
    assert 0.25 * PER_MONTH < len(names) < 0.55 * PER_MONTH
    assert all(name.startswith("1-") for name in names)
    published = evaluate_folder(
        place, model, evaluated_rows(model, str(tmp_path / "visits.csv"), in_parts=True)
    )
    assert published.composition == "parallel"
    assert published.guarantee is not None
    assert published.guarantee.mu == model.guarantee.mu
    assert published.mu <= model.guarantee.parameters["mu_version"]  # type: ignore[operator]
    with pytest.raises(BudgetExhausted):
        evaluate_folder(place, model, evaluated_rows(model, str(tmp_path / "visits.csv"), in_parts=True))
    # The published accuracy travels with the next version.
    second = head().update(TABLE, cohort=MONTHS[2], after=place)
    assert second.guarantee_.parameters["series"][0]["accuracy"] == vars(published.accuracy)


def test_a_folder_is_evaluated_on_no_other_cohort(folder: Path) -> None:
    rows = table_rows(TABLE, SCHEMA)
    for given in (encode_table(TABLE, SCHEMA), rows, rows.of_cohort(MONTHS[0])):
        with pytest.raises(InvalidInput, match="on the rows of its own cohort"):
            evaluate_folder(folder, open_private(folder), given, exact=True)


def test_an_estimator_evaluates_its_cohort_and_nobody_else() -> None:
    fitted = head(schema=None).fit(table_rows(TABLE, SCHEMA, holdout=0.4, seed=2), cohort=MONTHS[0])
    assert fitted.evaluate(TABLE).composition == "parallel"
    with pytest.raises(InvalidInput, match="`disjoint` cannot be stated"):
        series(TABLE, *MONTHS[:2]).evaluate(TABLE, disjoint=True)
    with pytest.raises(InvalidInput, match="evaluated on its own cohort"):
        fitted.evaluate([[0.0] * fitted.n_features_in_] * 3, ["no"] * 3)


def test_only_the_own_training_of_a_version_pays_for_its_evaluation() -> None:
    whole = series(TABLE, MONTHS[0], MONTHS[1])
    again = whole.update(TABLE, cohort=MONTHS[0], again=True).guarantee_
    own = again.parameters["mu_version"]
    free = composed_guarantee(again, [EvaluationCharge(own, "parallel")])
    assert free.mu == pytest.approx(again.mu)
    dear = composed_guarantee(again, [EvaluationCharge(2 * own, "parallel")])
    assert dear.mu == pytest.approx(math.sqrt(5) * own)  # what version 1 may evaluate for free, and this one


def test_an_accuracy_that_cost_more_than_the_training_stays_with_its_version(tmp_path: Path) -> None:
    rows = table_rows(TABLE, SCHEMA, holdout=0.3)
    fitted = head(schema=None, random_state=None).fit(rows, cohort=MONTHS[0])
    place = save_private(fitted, tmp_path / "model", dataset="visits")
    assert (
        fitted.evaluate(TABLE, mu=0.5 * fitted.guarantee_.mu).accuracy == prior_of(place).versions[0].accuracy
    )
    fitted.evaluate(TABLE, mu=5.0 * fitted.guarantee_.mu)
    assert prior_of(place).versions[0].accuracy is None
    assert (
        "accuracy"
        not in head().update(TABLE, cohort=MONTHS[1], after=place).guarantee_.parameters["series"][0]
    )


@pytest.mark.parametrize(
    "new",
    [
        DPSGD(epsilon=2.0, schema=SCHEMA, declared_size=800, settings=DPSGDSettings(steps=3)),
        Teachers(epsilon=8.0, schema=SCHEMA, queries=2),
        PrivateHead(schema=SCHEMA, declared_size=800, release="query", queries=2),
    ],
    ids=lambda new: type(new).__name__,
)
def test_every_guarantee_says_what_it_assumes_of_an_erasure_list(new: Any, tmp_path: Path) -> None:
    ErasureList.add(tmp_path / "erased", "0-7")
    new.fit(TABLE, forgotten=tmp_path / "erased")
    assert ERASURE in new.guarantee_.assumptions
    opened = open_private(save_private(new, tmp_path / "model", dataset="visits"))
    assert opened.guarantee == new.guarantee_


def test_what_an_earlier_version_assumes_of_its_erasure_list_is_assumed_by_the_next(tmp_path: Path) -> None:
    ErasureList.add(tmp_path / "erased", "0-7")
    first = head().fit(TABLE, cohort=MONTHS[0], forgotten=tmp_path / "erased")
    assert ERASURE in first.update(TABLE, cohort=MONTHS[1]).guarantee_.assumptions


def test_a_series_is_no_better_than_its_earlier_versions() -> None:
    seeded = head().fit(TABLE, cohort=MONTHS[0])
    assert seeded.guarantee_.status == "conditional"
    exact = seeded.set_params(random_state=None).update(TABLE, cohort=MONTHS[1]).guarantee_
    assert exact.parameters["series"][0]["status"] == exact.status == "conditional"
    assert "earlier version of the series has a conditional guarantee" in exact.because
    proven = series(TABLE, *MONTHS[:2], random_state=None).guarantee_
    assert "status" not in proven.parameters["series"][0]
    assert proven.status == "proven"


ONE = Version(1, MONTHS[0], 1.0, "ab" * 32, Estimate(0.9, 0.88, 0.92))


def facts(*earlier: Version) -> dict[str, Any]:
    rule = {"by": "visit:month", "column": table_rows(TABLE, SCHEMA).cohorts.to_json()["column"]}  # type: ignore[union-attr]
    return {"cohort": {"name": MONTHS[1], "rule": rule}, "series": [each.to_json() for each in earlier]}


def test_a_version_apart_from_the_last_published_accuracy_is_a_warning() -> None:
    assert "outside of the interval of version 1" in str(drift(facts(ONE), Estimate(0.8, 0.78, 0.82)))
    assert "outside" in str(drift(facts(ONE), Estimate(0.95, 0.93, 0.96)))
    assert drift(facts(ONE), Estimate(0.87, 0.86, 0.88)) is None
    assert drift(facts(), Estimate(0.1, 0.0, 0.2)) is None
    assert drift(facts(ONE), Estimate(None, 0.0, 0.1)) is None


def test_evaluating_a_drifted_month_warns() -> None:
    table = visits(seed=4)
    later = table["visit"] >= MONTHS[1]
    table.loc[later, "ill"] = table.loc[later, "ill"].map({"yes": "no", "no": "yes"})
    rows = table_rows(table, SCHEMA, holdout=0.4, seed=2)
    fitted = head(schema=None, epsilon=20.0).fit(rows, cohort=MONTHS[0])
    fitted.evaluate(table)
    fitted.set_params(epsilon=0.3).update(rows, cohort=MONTHS[1])
    with pytest.warns(QuietmaxWarning, match="have changed"):
        fitted.evaluate(table, epsilon=20.0)


def test_a_model_without_a_cohort_is_as_before(tmp_path: Path) -> None:
    whole = head().fit(TABLE)
    assert "series" not in whole.guarantee_.parameters
    assert isinstance(
        open_private(save_private(whole, tmp_path / "m", dataset="visits")).guarantee, Guarantee
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole.evaluate(TABLE, epsilon=1.0)
