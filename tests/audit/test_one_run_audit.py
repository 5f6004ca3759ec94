"""Audits in one run show most of the claim; the script is `benchmarks/one_run_audit.py`, its result is stored."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quietmax.audit.bounds import Claim, SummedSignals
from tests.docs.scripts import ROOT, script

one_run_audit = script("benchmarks/one_run_audit.py")
STORED = json.loads((ROOT / "docs/results/one-run-audit.json").read_text(encoding="utf-8"))


def test_the_table_of_the_page_is_that_of_the_stored_results() -> None:
    page = (ROOT / "docs/audit.md").read_text(encoding="utf-8")
    section = page.split("## One training, most of the claim")[1].split("\n## ")[0]
    shown = section.split("| ---: | ---: | ---: | ---: |\n")[1].split("\n\n")[0].splitlines()
    assert shown == [one_run_audit.line(each) for each in STORED["audits"]]


@pytest.mark.parametrize("stored", STORED["audits"], ids=lambda each: each["name"])
def test_every_stored_audit_reaches_its_goal_and_half_the_noise_is_refuted(stored: dict[str, Any]) -> None:
    """In the median: 0.8 of the claim for training and 0.9 for mechanisms and teachers, whose answers are drawn."""
    trained = stored["distances"][0] is not None
    shares = np.array(stored["lower_bounds"]["1.0"]) / stored["claimed"]
    assert np.median(shares) >= (0.8 if trained else 0.9)
    assert min(stored["lower_bounds"]["0.5"]) > stored["claimed"]
    if trained:
        halves = {"inside": stored["samples"] // 2, "outside": stored["samples"] // 2}
        for distance, bound in zip(stored["distances"], stored["lower_bounds"]["1.0"], strict=True):
            signals = SummedSignals(
                **halves,
                distance=distance,
                claim=Claim("gaussian", stored["claimed"]),
                confidence=STORED["confidence"],
            )
            # The coins put a few more or fewer canaries inside.
            assert bound == pytest.approx(signals._lower_bound(), rel=0.01)


@pytest.mark.parametrize("case", one_run_audit.CASES, ids=lambda case: case.name)
def test_fewer_canaries_do_not_refute_a_true_claim_but_half_the_noise(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """800 canaries at a confidence of 1 - 1e-7, which is the false-alarm probability.

    The bound is about 0.6 of the claim, and 1.5 with half the noise; its standard deviation is about 0.05 (0.04 of the
    distance of the means), so that either assertion fails with probability below 1e-7.
    """
    monkeypatch.setattr(one_run_audit, "CONFIDENCE", 1 - 1e-7)
    few = replace(case, canaries=800)
    honest = few.audited(8.0, 0, 1.0)
    assert honest.verdict == "consistent"
    assert honest.share > 0.3
    assert few.audited(8.0, 0, 0.5).verdict == "refuted"
