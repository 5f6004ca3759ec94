"""Versions of a head, each on one cohort of a table that grows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from quietmax import DPSGD, HeadSettings, PrivateHead
from quietmax._ray import RayEngine
from quietmax.data.cohorts import ErasureList
from quietmax.data.tables import table_rows
from quietmax.errors import InvalidData, InvalidInput
from quietmax.estimators.blocks import LocalEngine
from quietmax.estimators.head.update import prior_of
from quietmax.estimators.serialization import open_private, save_private
from tests.estimators.growing import MONTHS, SCHEMA, head, series, visits

TABLE = visits()


def test_all_versions_together_cost_what_the_most_expensive_cohort_costs() -> None:
    found = series(TABLE, *MONTHS[:3])
    mus = [each["mu"] for each in found.guarantee_.parameters["series"]]
    assert len(mus) == 2
    assert found.guarantee_.mu == max(*mus, found.guarantee_.parameters["mu_version"])
    assert [each["cohort"] for each in found.guarantee_.parameters["series"]] == [*MONTHS[:2]]
    assert "One person has one cohort: known by column 'person'" in found.guarantee_.assumptions[0]
    more = head(epsilon=6.0).update(TABLE, cohort=MONTHS[3], after=prior_model(found))
    assert more.guarantee_.mu == more.guarantee_.parameters["mu_version"] > mus[0]
    less = head(epsilon=0.5).update(TABLE, cohort=MONTHS[3], after=prior_model(found))
    assert less.guarantee_.mu == max(mus) > less.guarantee_.parameters["mu_version"]


def prior_model(fitted: PrivateHead, folder: Path | None = None) -> Any:
    import tempfile

    place = Path(tempfile.mkdtemp()) if folder is None else folder
    return open_private(save_private(fitted, place / "model", dataset="visits"))


def test_training_on_a_cohort_twice_adds_up_and_must_be_asked_for() -> None:
    found = series(TABLE, *MONTHS[:2])
    with pytest.raises(InvalidInput, match=r"Version 1 of the series .* `again` allows it"):
        found.update(TABLE, cohort=MONTHS[0])
    assert (
        found.guarantee_.parameters["cohort"]["name"] == MONTHS[1]
    )  # the estimator is still the last version
    mu = found.guarantee_.mu
    found.update(TABLE, cohort=MONTHS[0], again=True)
    assert found.guarantee_.mu == pytest.approx(mu * math.sqrt(2))
    found.update(TABLE, cohort=MONTHS[2])
    assert found.guarantee_.mu == pytest.approx(mu * math.sqrt(2))


def test_a_version_is_better_than_the_first_and_learns_from_every_month() -> None:
    others = visits(seed=9)
    found = head(random_state=5).fit(TABLE, cohort=MONTHS[0])
    first = (found.predict(others) == others["ill"]).mean()
    for name in MONTHS[1:]:
        found.update(TABLE, cohort=name)
    assert (found.predict(others) == others["ill"]).mean() > max(0.8, first - 0.02)


def test_a_version_from_a_folder_is_the_one_from_memory(tmp_path: Path) -> None:
    first = head().fit(TABLE, cohort=MONTHS[0])
    folder = save_private(first, tmp_path / "one", dataset="visits")
    from_folder = head().update(TABLE, cohort=MONTHS[1], after=folder)
    first.update(TABLE, cohort=MONTHS[1])
    assert np.array_equal(first.coef_, from_folder.coef_)
    assert first.guarantee_ == from_folder.guarantee_
    opened = open_private(save_private(from_folder, tmp_path / "two", dataset="visits"))
    assert opened.guarantee == from_folder.guarantee_
    assert prior_of(opened).versions == prior_of(from_folder).versions


def test_pieces_and_persons_and_workers_make_the_same_version(tmp_path: Path) -> None:
    TABLE[:300].to_parquet(tmp_path / "1.parquet", index=False)
    TABLE[300:].to_parquet(tmp_path / "2.parquet", index=False)
    whole = series(TABLE, *MONTHS[:2])
    mixed = series(TABLE.sample(frac=1.0, random_state=1), *MONTHS[:2])
    small = LocalEngine(max_memory=0, cache_dir=tmp_path)
    parts = head(engine=small).fit(str(tmp_path), cohort=MONTHS[0]).update(str(tmp_path), cohort=MONTHS[1])
    for other in (mixed, parts):
        assert np.array_equal(whole.coef_, other.coef_)
        assert whole.guarantee_ == other.guarantee_


@pytest.mark.slow
def test_the_workers_of_a_cluster_make_the_same_version(tmp_path: Path) -> None:
    TABLE[:300].to_parquet(tmp_path / "1.parquet", index=False)
    TABLE[300:].to_parquet(tmp_path / "2.parquet", index=False)
    whole = series(TABLE, *MONTHS[:2])
    spread = head(engine=RayEngine()).fit(str(tmp_path), cohort=MONTHS[0])
    assert np.array_equal(spread.update(str(tmp_path), cohort=MONTHS[1]).coef_, whole.coef_)


def test_a_resumed_training_forgets_the_rows_of_another_cohort(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    file = tmp_path / "visits.parquet"
    TABLE.to_parquet(file, index=False)

    class Stop(Exception):
        pass

    def stop(done: int, _: int) -> None:
        if done > 600:
            raise Stop

    engine = LocalEngine(cache_dir=cache, resume=True, progress=stop)
    with pytest.raises(Stop):
        head(engine=engine).fit(str(file), cohort=MONTHS[0])
    assert [*cache.iterdir()]
    resumed = head(engine=LocalEngine(cache_dir=cache, resume=True)).fit(str(file), cohort=MONTHS[1])
    assert np.array_equal(resumed.coef_, head().fit(TABLE, cohort=MONTHS[1]).coef_)


def test_an_update_trains_on_the_people_who_are_not_held_out() -> None:
    rows = table_rows(TABLE, SCHEMA, holdout=0.3, seed=1)
    first = head(schema=None).fit(rows, cohort=MONTHS[0])
    found = head().update(TABLE, cohort=MONTHS[1], after=prior_model(first))  # the same people by itself
    assert found.holdout_ == first.holdout_
    other = table_rows(TABLE, SCHEMA, holdout=0.2, seed=1)
    with pytest.raises(InvalidInput, match="A series holds out the same people"):
        head(schema=None).update(other, cohort=MONTHS[2], after=prior_model(found))


def test_people_on_an_erasure_list_are_missing_from_the_next_version(tmp_path: Path) -> None:
    for number in range(50):
        ErasureList.add(tmp_path / "erased", f"1-{number}")
    left = TABLE[~TABLE["person"].isin([f"1-{number}" for number in range(50)])]
    first = prior_model(head().fit(TABLE, cohort=MONTHS[0]))
    found = head().update(TABLE, cohort=MONTHS[1], after=first, forgotten=tmp_path / "erased")
    assert np.array_equal(found.coef_, head().update(left, cohort=MONTHS[1], after=first).coef_)
    assert any("erasure list" in each for each in found.guarantee_.assumptions)
    assert prior_model(found).guarantee == found.guarantee_


def test_another_schema_or_rule_does_not_continue_a_series() -> None:
    first = prior_model(head().fit(TABLE, cohort=MONTHS[0]))
    with pytest.raises(InvalidInput, match="a series has one schema"):
        head(schema=replace(SCHEMA, bounds={"age": (0, 90), "income": (0, 1)})).update(
            TABLE, cohort=MONTHS[1], after=first
        )
    with pytest.raises(InvalidInput, match="one rule for its cohorts"):
        head(schema=replace(SCHEMA, cohort="visit:quarter")).update(TABLE, cohort="2026-Q2", after=first)
    whole = prior_model(head().fit(TABLE))
    with pytest.raises(InvalidInput, match="no version of a series"):
        head().update(TABLE, cohort=MONTHS[1], after=whole)


def test_only_a_head_on_the_cells_of_a_table_is_trained_on_a_cohort() -> None:
    with pytest.raises(InvalidInput, match="cells of a table"):
        head(features="unit-norm").fit(TABLE, cohort=MONTHS[0])
    with pytest.raises(InvalidInput, match="cells of a table"):
        head(settings=HeadSettings(radius=2.0)).fit(TABLE, cohort=MONTHS[0])
    with pytest.raises(InvalidInput, match="requires a PrivateHead"):
        DPSGD(epsilon=4.0, schema=SCHEMA).fit(TABLE, cohort=MONTHS[0])
    with pytest.raises(InvalidInput, match="require a table with a `schema`"):
        PrivateHead().fit([[0.0], [1.0]] * 9, [0, 1] * 9, cohort=MONTHS[0])


def test_nobody_in_a_cohort_is_said_without_saying_more() -> None:
    with pytest.raises(InvalidData, match="Nobody is left to train on"):
        head().fit(TABLE, cohort="2026-09")


def test_seeded_versions_do_not_repeat_their_noise() -> None:
    found = series(TABLE, *MONTHS[:2])
    again = head().fit(TABLE, cohort=MONTHS[1])
    seeds = [each.guarantee_.parameters["noise_source"]["seed"] for each in (found, again)]
    assert seeds[0] == seeds[1] + 1


def test_pairs_of_columns_are_chosen_once() -> None:
    settings = HeadSettings(pairs=True)
    first = head(settings=settings).fit(TABLE, cohort=MONTHS[0])
    crosses = first.feature_map_.crosses  # type: ignore[union-attr]
    assert len(crosses) == 3
    first.update(TABLE, cohort=MONTHS[1])
    assert first.feature_map_.crosses == crosses  # type: ignore[union-attr]
    late = head().fit(TABLE, cohort=MONTHS[0])
    late = head(settings=settings).update(TABLE, cohort=MONTHS[1], after=prior_model(late))
    assert len(late.feature_map_.crosses) == 3  # type: ignore[union-attr]
    assert prior_model(late).guarantee == late.guarantee_


def test_cohorts_by_row_say_so() -> None:
    schema = replace(SCHEMA, person=None, ignore=("visit", "person"))
    found = series(TABLE, *MONTHS[:2], schema=schema)
    assert found.guarantee_.unit == "record"
    assert found.guarantee_.assumptions[0].startswith("Cohorts are by row, by the rule 'visit:month'")


def test_more_classes_continue_too() -> None:
    sick = np.where(TABLE["age"] > 70, "old", TABLE["ill"])
    schema = replace(SCHEMA, classes=("no", "yes", "old"))
    table: pd.DataFrame = TABLE.assign(ill=sick)
    found = series(table, *MONTHS[:3], schema=schema)
    assert found.coef_.shape[0] == 3
    assert (found.predict(table) == sick).mean() > 0.6
