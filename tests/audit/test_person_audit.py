"""Private training protects whole persons if it knows whose row each row is, and only single records if it does not.

The script `benchmarks/person_audit.py` makes the table and the auditor's person; its stored result is
`docs/results/person-audit.json`.
"""

from __future__ import annotations

import itertools
import json
from functools import partial
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone

from quietmax import DPSGD, DPSGDSettings
from quietmax.audit import AuditReport, audit_training
from quietmax.audit.bounds import Claim, EventCounts
from quietmax.audit.training import estimator_with_share
from quietmax.data import Records
from tests.docs.scripts import ROOT, script

SURE = 1 - 1e-6
person_audit = script("benchmarks/person_audit.py")


def sure_bound(report: AuditReport) -> float:
    """The bound on mu from the same event, which was fixed before it was counted, at the confidence `SURE`."""
    counts = (report.details[f"event_{name}"] for name in ("where_likely", "where_unlikely", "trials"))
    return Claim("gaussian", report.claimed)._lower_bound(EventCounts(*counts), SURE)


def test_the_table_has_persons_with_1_to_30_rows_and_the_auditor_adds_30_rows_that_stand_alone() -> None:
    records, person = person_audit.people(), person_audit.worst_case_person()
    rows = np.bincount(records.units)
    assert (len(rows), rows.min(), rows.max()) == (2000, 1, 30)
    assert (len(person), len(np.unique(person.features, axis=0)), len(set(person.persons))) == (30, 1, 1)
    # Nobody else has anything in the direction of the auditor's person.
    assert (records.features @ person.features[0] == 0).all()


def test_training_by_persons_is_consistent_and_training_by_records_is_refuted_for_persons() -> None:
    """200 trainings without and 200 with the person, on 60 others. A true claim is refuted with probability 1e-6.

    By records the person moves the weights by 30 times what the claim, mu = 0.92, permits: the two kinds of models lie
    27 standard deviations apart. So 120 trainings of each kind, which are all told apart, suffice.
    """
    records = person_audit.people(persons=60)
    options = {"epsilon": 4.0, "confidence": SURE, "seed": 1}
    honest = person_audit.audit_head(records, by_person=True, times=200, **options)
    assert (honest.unit, honest.verdict) == ("person", "consistent")
    assert "claimed_for" not in honest.details
    broken = person_audit.audit_head(records, by_person=False, times=120, **options)
    assert (broken.unit, broken.verdict) == ("person", "refuted")
    assert broken.details["claimed_for"] == "one record"
    assert broken.claimed == pytest.approx(honest.claimed)


def test_training_on_cells_by_persons_is_consistent_and_half_its_noise_is_refuted() -> None:
    """200 trainings without and 200 with the person, who moves the weights by at most 1.7 times the noise.

    A true claim is refuted with probability 1e-6. With half the noise the two kinds of models lie 3.4 standard
    deviations apart, twice the claim.
    """
    records = person_audit.people(persons=60)
    options = {"by_person": True, "on_cells": True, "epsilon": 8.0, "times": 200, "seed": 1}
    honest = person_audit.audit_head(records, **options, confidence=SURE)
    assert (honest.unit, honest.verdict) == ("person", "consistent")
    weaker = person_audit.audit_head(records, **options, noise_share=0.5)
    assert (weaker.claimed, weaker.verdict) == (honest.claimed, "refuted")
    assert weaker.subject == "private head on cells trained by persons with 0.5 of its noise"


@pytest.mark.slow
def test_dpsgd_on_cells_by_persons_is_consistent_and_half_its_noise_is_refuted() -> None:
    """400 trainings without and 400 with the person, beside four others, who hardly move the weights.

    Batches are full, so the claim is Gaussian; a tenth of it goes into the counts of the cells, which the auditor does
    not see. A true claim is refuted with probability 1e-6.
    """
    records = person_audit.people(persons=4)
    steps = DPSGDSettings(steps=10, centring_steps=1, sampling_rate=1.0, learning_rate=4.0, max_grad_norm=0.1)
    public: dict[str, Any] = {"classes": (0, 1), "declared_size": 60, "features": person_audit.CELLS}
    audited = DPSGD(8.0, person_audit.DELTA, settings=steps, random_state=0, **public)
    seeds = itertools.count(1)

    def fit(given: Records, private: DPSGD) -> DPSGD:
        fresh = clone(private).set_params(random_state=next(seeds))
        return fresh.fit(given.features, given.labels, groups=given.persons)

    claimed = fit(records, audited).guarantee_
    verdicts = {}
    for share in (1.0, 0.5):
        private = estimator_with_share(fit(records, audited), share)
        verdicts[share] = audit_training(
            partial(fit, private=private),
            person_audit.along_the_gradient,
            records,
            person_audit.worst_case_person(),
            claimed,
            method="repeated",
            times=400,
            confidence=SURE if share == 1.0 else 0.99,
            delta=person_audit.DELTA,
        )
    assert (verdicts[1.0].unit, verdicts[1.0].verdict) == ("person", "consistent")
    assert verdicts[0.5].verdict == "refuted"
    assert verdicts[0.5].lower_bound > claimed.mu


@pytest.mark.slow
def test_a_thousand_trainings_show_at_least_half_of_the_claim_for_a_person() -> None:
    """The run of the documentation with fixed seeds: 500 trainings without and 500 with the person.

    The auditor's bound is expected at three quarters of mu = 1.67, at 99% confidence; half of it is about four standard
    errors away. A true claim exceeds the bound at `SURE` with probability 1e-6 at most.
    """
    records = person_audit.people()
    honest = person_audit.audit_head(records, by_person=True, epsilon=8.0, times=500, seed=10)
    assert sure_bound(honest) <= honest.claimed
    assert honest.verdict == "consistent"
    assert honest.share >= 0.5
    broken = person_audit.audit_head(records, by_person=False, epsilon=8.0, times=500, seed=10)
    assert sure_bound(broken) > broken.claimed


def test_the_stored_result_is_that_of_a_thousand_trainings_with_exact_noise() -> None:
    stored = json.loads((ROOT / "docs/results/person-audit.json").read_text())
    assert stored["noise"] == "exact"
    assert stored["table"]["persons"] == 2000
    assert stored["table"]["rows_per_person"] == [1, 30]
    by_person, by_record, on_cells, weaker = stored["audits"]
    assert {each["samples"] for each in stored["audits"]} == {500}
    assert (on_cells["verdict"], weaker["verdict"]) == ("consistent", "refuted")
    assert on_cells["lower_bound"] >= on_cells["claimed"] / 2
    assert weaker["claimed"] == on_cells["claimed"]
    assert (by_person["verdict"], by_record["verdict"]) == ("consistent", "refuted")
    assert by_person["lower_bound"] >= by_person["claimed"] / 2
    assert by_record["claimed_for"] == "one record"
