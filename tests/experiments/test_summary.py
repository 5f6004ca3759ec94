"""Averages, comparisons with the paper, findings and many queries, on numbers made up for the purpose."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quietmax.data import load_records
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.experiments import estimate
from quietmax.experiments import paper as reference
from quietmax.experiments import runner as reproduction
from quietmax.experiments import workers as ray_crew
from quietmax.experiments.estimate import estimated_seconds
from quietmax.experiments.evaluate import MakeMeasure
from quietmax.experiments.findings import findings, multi_query, read_off
from quietmax.experiments.grid import Effort, Group, Source, Trial
from quietmax.experiments.methods import Method, method, methods
from quietmax.experiments.profiles import LIKE_FOR_LIKE_EPSILONS, reproduction_cells, work
from quietmax.experiments.report import write_report
from quietmax.experiments.report.page import About, html
from quietmax.experiments.report.panels import panels
from quietmax.experiments.runner import Where, environment, run_cells
from quietmax.experiments.summary import accuracy_comparisons, curve_comparisons, summarise

EPSILONS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 50.0, 100.0, 500.0, 1000.0)


def result(**changes):
    estimate = {"value": changes.pop("leakage", 0.1), "low": 0.0, "high": 0.2}
    return {
        "classes": 30,
        "records": 1200,
        "train_accuracy": 0.99,
        "test_accuracy": 0.65,
        "baseline_accuracy": 0.65,
        "accuracy_loss": 0.0,
        "attacks": {"shadow": {"leakage": estimate, "auc": estimate}},
        "status": "refuted",
        "claimed_delta": 0.0,
        "audited_epsilon": None,
        "audited": "",
        "fit_seconds": 1.0,
        "answer_seconds": 1e-6,
    } | changes


def trial(name, epsilon=None, repeat=0, dataset="location", queries=None):
    return Trial(Group(Source(dataset), Effort(1200, 2), repeat), name, epsilon, queries)


def papers_own(dataset="location"):
    """Results that are exactly the paper's curves."""
    table = reference.accuracy_table()[dataset]
    classes = 2 if dataset in ("adult", "purchase-2") else 30
    found = {
        trial("plain", dataset=dataset): result(
            train_accuracy=table["convexified_train_acc"],
            test_accuracy=table["convexified_test_acc"],
            leakage=table["privacy_leakage"],
            status="none",
            classes=classes,
        )
    }
    for name, series in (("algorithm1-gaussian", "alg1_gauss"), ("algorithm1-laplace", "alg1_lap")):
        losses, leaks = (reference.curve(dataset, metric, series) for metric in ("acc_loss", "priv_leak"))
        for epsilon in EPSILONS:
            found[trial(name, epsilon, dataset=dataset, queries=1)] = result(
                accuracy_loss=losses[epsilon], leakage=leaks[epsilon], classes=classes
            )
    return found


def test_repeats_are_averaged_and_their_spread_is_the_sample_standard_deviation():
    (one,) = summarise(
        {
            trial("plain", repeat=0): result(test_accuracy=0.5),
            trial("plain", repeat=1): result(test_accuracy=0.7),
        }
    )
    assert one.repeats == 2
    assert one.test_accuracy.value == pytest.approx(0.6)
    assert one.test_accuracy.spread == pytest.approx(math.sqrt(0.02))
    (single,) = summarise({trial("plain"): result()})
    assert single.test_accuracy.spread is None


def test_the_papers_own_curves_agree_with_the_paper_and_shifted_ones_do_not():
    summaries = summarise(papers_own())
    rows = curve_comparisons(summaries) + accuracy_comparisons(summaries)
    assert len(rows) == 4 * len(EPSILONS) + 3
    assert all(row.agrees for row in rows)
    shifted = [
        replace(each, accuracy_loss=replace(each.accuracy_loss, value=each.accuracy_loss.value + 0.05))
        for each in summaries
    ]
    disagreeing = [row for row in curve_comparisons(shifted) if not row.agrees]
    assert len(disagreeing) == 2 * len(EPSILONS)


def test_titles_name_answers_and_missing_guarantees():
    teachers, algorithm = summarise(
        {
            trial("teachers", 1.0, queries=100): result(status="proven"),
            trial("algorithm1-laplace", 1.0, queries=1): result(),
        }
    )
    assert teachers.title == "teachers, 100 answers"
    assert algorithm.title == "Algorithm 1, Laplace (no guarantee)"
    assert replace(algorithm, queries=10).title == "Algorithm 1, Laplace, 10 answers (no guarantee)"


def test_findings_follow_the_numbers():
    everything = {}
    for name in ("location", "mnist", "adult", "purchase-100"):
        everything |= papers_own(name)
    verdicts = {each.number: each for each in findings(summarise(everything))}
    assert verdicts[1].verdict == "confirmed"
    assert verdicts[5].verdict == "confirmed"
    # at epsilon 0.01 the claim permits 0.004, the paper's own curve shows 0.19
    assert verdicts[3].verdict == "not confirmed"
    assert "permits 0.004" in verdicts[3].evidence
    rising = summarise(everything)
    rising = [
        replace(each, accuracy_loss=replace(each.accuracy_loss, value=0.9))
        if each.method == "algorithm1-gaussian" and each.epsilon == 1000.0
        else each
        for each in rising
    ]
    assert {each.number: each.verdict for each in findings(rising)}[2] == "not confirmed"
    assert {each.number: each.verdict for each in findings([])} == {
        1: "does not apply", 2: "does not apply", 3: "does not apply", 4: "does not apply", 5: "confirmed",
    }  # fmt: skip


def test_a_proven_method_that_loses_less_speaks_against_the_third_finding():
    found = papers_own() | {trial("head", 1.0): result(accuracy_loss=0.1, status="proven")}
    third = findings(summarise(found))[2]
    assert "head on location at epsilon 1" in third.evidence


def test_findings_do_without_a_plain_network_that_failed():
    found = {each: result for each, result in papers_own().items() if each.method != "plain"}
    by_number = {each.number: each for each in findings(summarise(found))}
    assert by_number[3].verdict == "does not apply"
    assert by_number[2].evidence.startswith("largest loss of Algorithm 1")


def test_many_queries_are_read_in_both_ways():
    rows = multi_query(summarise(papers_own()), totals=(10.0,), queries=(100, 10_000_000))
    by_reading = {(row.method, row.reading, row.queries): row for row in rows}
    published = by_reading["algorithm1-gaussian", "published", 100]
    example = by_reading["algorithm1-gaussian", "published-example", 100]
    assert published.per_answer == pytest.approx(1.0)
    assert example.per_answer == pytest.approx(0.1)
    curve = reference.curve("location", "acc_loss", "alg1_gauss")
    assert published.accuracy_loss == pytest.approx(curve[1.0])
    assert example.accuracy_loss == pytest.approx(curve[0.1])
    far = by_reading["algorithm1-laplace", "published", 10_000_000]
    assert far.extrapolated
    assert not published.extrapolated


@given(st.floats(0.001, 5000), st.lists(st.floats(0, 1), min_size=11, max_size=11))
def test_reading_off_a_curve_stays_within_its_values(epsilon, values):
    assert min(values) - 1e-12 <= read_off(epsilon, EPSILONS, values) <= max(values) + 1e-12


def test_the_paper_profile_has_ten_repeats_and_all_shadow_networks():
    chosen = work("mnist", "paper")
    assert (chosen.repeats, chosen.effort.shadows, chosen.effort.epochs) == (10, 50, 100)
    trials = reproduction_cells(["mnist"], "paper")
    assert len({each.group for each in trials}) == 10
    alike = {each.epsilon for each in trials if each.method == "head"}
    assert alike == set(LIKE_FOR_LIKE_EPSILONS)
    with pytest.raises(InvalidInput, match="quick or paper"):
        work("mnist", "fast")


def test_an_estimate_counts_shared_networks_once_and_grows_with_the_work():
    small = reproduction_cells(["location"], "quick", parts=["algorithm1"])
    large = reproduction_cells(["location"], "paper", parts=["algorithm1"])
    few, many = (estimated_seconds(trials, measured=False) for trials in (small, large))
    assert sum(many.values()) > 3 * sum(few.values())
    (first, *others) = [each for each in small if each.group == small[0].group]
    assert few[first] > 5 * max(few[each] for each in others)


def test_an_estimate_measures_this_machine(real_data):
    trials = reproduction_cells(["adult"], "quick", parts=["accuracy"], repeats=1)
    assert 0 < sum(estimated_seconds(trials, data_dir=real_data).values()) < 3600


def test_an_estimate_knows_when_too_few_records_are_left_over_for_shadow_networks(real_data, monkeypatch):
    monkeypatch.setattr(estimate, "seconds_per_record", lambda *_: 1.0)
    plain, *_ = reproduction_cells(["cifar-10"], "paper", parts=["accuracy"], repeats=1)
    total = len(load_records("cifar-10", data_dir=real_data))
    half = min(10_000, (total - 20_000) // 2)
    networks = 100 * (10_000 + 100 * half)
    attack = 100 * 2 * 100 * half
    seconds = estimated_seconds([plain], data_dir=real_data)[plain]
    assert seconds == pytest.approx(networks + attack, rel=1e-3)


def test_unknown_methods_are_refused_with_the_nearest_name():
    with pytest.raises(InvalidInput, match="did you mean 'teachers'"):
        method("teacher")
    with pytest.raises(InvalidInput, match="Valid: "):
        method("zzzzz")


class _Entry:
    def __init__(self, name, value):
        self.name, self._value = name, value

    def load(self):
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


def test_another_package_adds_a_method_by_an_entry_point(monkeypatch):
    mine = Method("mine", "my method", "proven", lambda *_: None)
    entries = [_Entry("mine", mine), _Entry("taken", methods()["head"]), _Entry("broken", ImportError("no"))]
    monkeypatch.setattr("quietmax._plugins.entry_points", lambda **_: entries)
    methods.cache_clear()
    try:
        with pytest.warns(UserWarning, match="already in use"):
            assert methods()["mine"] is mine
    finally:
        methods.cache_clear()


def test_a_page_escapes_what_it_is_given_and_holds_every_section():
    summaries = summarise(papers_own() | {trial("head", 1.0): result(status="proven", claimed_delta=1e-4)})
    page = html(summaries, About("A <b>title</b>", "few & quick", 7, ("x </script> failed",)))
    assert "<b>title" not in page
    assert page.count("</script>") == 2
    for part in ("plots", "findings", "many", "paper", "results", "settings"):
        assert f'id="{part}"' in page
    assert "few &amp; quick" in page
    header, results = page.partition("</header>")[0], page.partition('id="results"')[2]
    for part in (header, results):
        assert "experiments with seeded noise" in part
        assert "the method when it is served with fresh noise" in part
    lines = {line.name: line for panel in panels(summaries) for line in panel.lines}
    assert not lines["private head"].dashed
    assert lines["Algorithm 1, Gaussian (no guarantee)"].dashed
    assert any(line.thin and name.startswith("paper:") for name, line in lines.items())
    json.dumps([panel.to_json() for panel in panels(summaries)])


def test_the_findings_also_speak_of_single_noises_and_of_published_dpsgd():
    found = papers_own()
    only_gaussian = {each: result for each, result in found.items() if each.method != "algorithm1-laplace"}
    with_dpsgd = only_gaussian | {
        trial("published-rdp", 1.0): result(accuracy_loss=0.9, status="conditional")
    }
    by_number = {each.number: each for each in findings(summarise(with_dpsgd))}
    assert "DP-SGD as published 0.900" in by_number[2].evidence
    assert by_number[4].verdict == "does not apply"


def test_nothing_measured_gives_no_report_and_an_unwritable_folder_a_sentence(tmp_path):
    assert write_report([], tmp_path / "none", About("", "", 0)) == []
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(QuietmaxError, match="could not be written"):
        write_report(summarise(papers_own()), tmp_path / "file", About("", "", 0))


def test_every_kind_of_cell_has_an_estimate():
    trials = reproduction_cells(["location", "mnist"], "paper", repeats=1)
    seconds = estimated_seconds(trials, measured=False)
    shared = {each.method: seconds[each] for each in reversed(trials) if each.group.source.name == "mnist"}
    assert shared["published-rdp"] > shared["head"] > shared["algorithm1-gaussian"] > 0
    own = Trial(Group(Source("own.csv", digest="1"), Effort(100, 2)), "plain")
    assert estimated_seconds([own], measured=False)[own] > 0


def test_the_environment_names_versions_and_nothing_to_compute_is_refused(tmp_path):
    assert environment()["torch"]
    with pytest.raises(InvalidInput, match="nothing to compute"):
        run_cells([], tmp_path)


def test_workers_are_local_processes_unless_ray_is_asked_for(monkeypatch, tmp_path):
    hired = []
    monkeypatch.setattr(reproduction, "LocalCrew", lambda _, workers: hired.append(("local", workers)))
    monkeypatch.setattr(ray_crew, "RayCrew", lambda _, **options: hired.append(("ray", options)))
    make = MakeMeasure(tmp_path)
    Where(3).crew(make)
    Where(2, "").crew(make)
    Where(None, "host:1").crew(make)
    assert hired == [
        ("local", 3),
        ("ray", {"address": None, "workers": 2}),
        ("ray", {"address": "host:1", "workers": None}),
    ]
