from __future__ import annotations

import pytest

from quietmax.experiments import bounds_table as ours
from quietmax.experiments.bounds_table import Observed, bounds_table, condition_summaries, stored_observations
from quietmax.experiments.paper import sensitivity_table
from quietmax.models import TrainingSettings
from quietmax.sensitivity.network import published_sensitivity_for

SEEN = Observed("mnist", 10_000, 6, 1.4, 0.1, 0.2, 2.8, "mislabelled", 13.0, 0.2, 2.3, 9.0, 0.1)


def test_all_eleven_configurations_have_five_bounds_and_the_last_is_the_papers() -> None:
    rows = bounds_table()
    assert [row.dataset for row in rows] == list(sensitivity_table())
    assert len(rows) == 11
    for row in rows:
        printed = sensitivity_table()[row.dataset]
        shape = (int(printed["features"]), [128], int(printed["classes"]), int(printed["records"]))
        assert row.bounds[-1].value == published_sensitivity_for(*shape).weights_l2.value
        assert len(row.bounds) == 5


def test_only_the_general_bound_of_chaudhuri_is_looser_at_the_papers_setting() -> None:
    """The bound for constant steps is within 0.3% of the paper's, which it calls tighter."""
    for row in bounds_table():
        first, general, decreasing, constant, paper = (bound.value for bound in row.bounds)
        assert first == decreasing == paper
        assert 1 < constant / paper < 1.003
        assert general / paper > 3.7


def test_a_change_above_the_papers_bound_is_called_exceeded() -> None:
    (row,) = bounds_table(["mnist"], [SEEN])
    assert row.verdict == "exceeded"
    assert row.flat()["observed"] == 1.4
    assert bounds_table(["mnist"])[0].verdict == "not measured"
    small = Observed(**(vars(SEEN) | {"weights_l2": 0.5}))
    assert bounds_table(["mnist"], [small])[0].verdict == "not exceeded"


def test_conditions_are_summarised_by_verdict_and_every_data_set_is_counted_once() -> None:
    found = condition_summaries(bounds_table(None, [SEEN]))
    convex = [each for each in found if each.condition == "convex loss"]
    assert len(convex) == 1
    assert len(convex[0].datasets) == 11
    assert len(convex[0].needed_by) == 5
    binary = {each.holds: each.datasets for each in found if each.condition == "binary classes"}
    assert binary[True] == ("adult", "purchase-2")
    assert len(binary[False]) == 9
    lipschitz = {each.holds: each.datasets for each in found if each.condition == "rho-Lipschitz loss"}
    assert lipschitz[False] == ("mnist",)


def test_a_measurement_retrains_and_can_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_settings", lambda _: TrainingSettings(epochs=1))
    found = ours.observe("mnist-5k", removals=3)
    assert (found.records, found.removals) == (2_000, 3)
    assert 0 < found.ordinary_l2 <= found.weights_l2
    assert bounds_table(["mnist-5k"], [found])[0].observed == found


def test_the_stored_measurements_exceed_the_papers_bound_where_the_documentation_says_so() -> None:
    stored = stored_observations()
    verdicts = {row.dataset: row.verdict for row in bounds_table([each.dataset for each in stored], stored)}
    exceeded = {name for name, verdict in verdicts.items() if verdict == "exceeded"}
    assert exceeded == {"adult", "mnist", "cifar-10", "cifar-100"}
    assert verdicts["location"] == "not exceeded"
    for each in stored:
        assert each.loss_at_mean > each.loss
        assert each.gradient > published_rho(each.dataset)


def published_rho(name: str) -> float:
    return sensitivity_table()[name]["rho"]
