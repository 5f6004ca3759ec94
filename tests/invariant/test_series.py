"""A person of one cohort moves nothing that was released before it, and later versions only through releases.

THEORY 3.17. Seeded noise stands for the same random numbers on neighbouring tables: what does not depend on the person
is the same, bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from quietmax.estimators.head import tables
from quietmax.estimators.serialization import PrivateModel
from quietmax.noise import release
from tests.estimators.growing import MONTHS, head, visits

TABLE = visits()
PERSON = "1-0"
"""Somebody of the second cohort, who comes back in the third month."""


def opened(fitted: Any) -> PrivateModel:
    about = (
        fitted.n_features_in_,
        tuple(fitted.classes_),
        fitted.guarantee_,
        fitted.encoding_,
        fitted.feature_map_,
    )
    return PrivateModel("head", *about, fitted._classifier)


def without(person: str) -> pd.DataFrame:
    return TABLE[TABLE["person"] != person]


def test_the_person_has_rows_of_two_months() -> None:
    assert sorted(TABLE.loc[TABLE["person"] == PERSON, "visit"]) == ["2026-02-15", "2026-03-15"]


def test_what_was_released_before_a_person_s_cohort_is_the_same_without_the_person() -> None:
    assert np.array_equal(
        head().fit(TABLE, cohort=MONTHS[0]).coef_, head().fit(without(PERSON), cohort=MONTHS[0]).coef_
    )


@pytest.mark.parametrize("cohort", MONTHS[2:])
def test_after_a_person_s_cohort_the_next_version_depends_on_the_person_through_the_release_alone(
    cohort: str,
) -> None:
    first = opened(head().fit(TABLE, cohort=MONTHS[0]))
    second = opened(head().update(TABLE, cohort=MONTHS[1], after=first))
    other = opened(head().update(without(PERSON), cohort=MONTHS[1], after=first))
    assert not np.array_equal(second.classifier.weights, other.classifier.weights)  # type: ignore[union-attr]
    # The same release before, with and without the person's rows in the table: the same version, bit for bit.
    third = head().update(TABLE, cohort=cohort, after=second)
    fourth = head().update(without(PERSON), cohort=cohort, after=second)
    assert np.array_equal(third.coef_, fourth.coef_)
    assert third.guarantee_ == fourth.guarantee_


@pytest.mark.parametrize("person", ["0-0", "1-0", "2-1", "3-5"])
def test_somebody_of_another_cohort_moves_nothing_of_a_version(person: str) -> None:
    for number, cohort in enumerate(MONTHS[:3]):
        same = np.array_equal(
            head().fit(TABLE, cohort=cohort).coef_, head().fit(without(person), cohort=cohort).coef_
        )
        assert same == (int(person[0]) != number)


def test_every_sum_of_an_update_moves_by_at_most_its_sensitivity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay: all noisy values of the run with the person are released in the run without, and the sums compared."""
    first = opened(head(random_state=None).fit(TABLE, cohort=MONTHS[0]))
    kept: list[tuple[np.ndarray, float, Any]] = []
    original = release.release_gaussian

    def record(values: Any, *, sensitivity: float, mu: float, source: Any) -> Any:
        found = original(values, sensitivity=sensitivity, mu=mu, source=source)
        kept.append((np.array(values, dtype=float), sensitivity, found))
        return found

    seen: list[float] = []

    def replay(values: Any, *, sensitivity: float, mu: float, source: Any) -> Any:  # noqa: ARG001
        before, stated, found = kept[len(seen)]
        assert stated == sensitivity
        seen.append(float(np.linalg.norm(np.asarray(values, dtype=float) - before)) / sensitivity)
        return found

    from quietmax.estimators.head import estimator, weights

    def patched(function: Any) -> None:
        for module in (tables, estimator, weights):
            if hasattr(module, "release_gaussian"):
                monkeypatch.setattr(module, "release_gaussian", function)

    patched(record)
    head(random_state=None).update(TABLE, cohort=MONTHS[1], after=first)
    patched(replay)
    head(random_state=None).update(without(PERSON), cohort=MONTHS[1], after=first)
    assert len(seen) == len(kept) > 20
    assert max(seen) <= 1.0 + 1e-12
    assert max(seen) > 0.3
    assert math.isfinite(sum(seen))


def test_a_row_added_in_a_later_month_leaves_a_person_in_their_cohort() -> None:
    more = pd.concat([TABLE, TABLE[TABLE["person"] == "0-1"].assign(visit="2026-03-20")])
    for cohort in MONTHS[1:3]:
        assert np.array_equal(head().fit(TABLE, cohort=cohort).coef_, head().fit(more, cohort=cohort).coef_)
