"""Averages over repeats, and titles."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from quietmax.experiments.findings import summarize
from tests.experiments.made_up import result, trial


def test_repeats_are_averaged_and_their_spread_is_the_sample_standard_deviation() -> None:
    (one,) = summarize(
        {
            trial("plain", repeat=0): result(test_accuracy=0.5),
            trial("plain", repeat=1): result(test_accuracy=0.7),
        }
    )
    assert one.repeats == 2
    assert one.test_accuracy.value == pytest.approx(0.6)
    assert one.test_accuracy.spread == pytest.approx(math.sqrt(0.02))
    (single,) = summarize({trial("plain"): result()})
    assert single.test_accuracy.spread is None


def test_the_largest_audited_epsilon_of_the_repeats_counts() -> None:
    (one,) = summarize(
        {
            trial("head", 1.0, repeat=0): result(audited_epsilon=0.1, audited="first", audited_claim=1.0),
            trial("head", 1.0, repeat=1): result(audited_epsilon=0.3, audited="second", audited_claim=2.0),
            trial("head", 1.0, repeat=2): result(),
        }
    )
    assert (one.audited_epsilon, one.audited, one.audited_claim) == (0.3, "second", 2.0)


def test_titles_name_answers_and_missing_guarantees() -> None:
    teachers, algorithm = summarize(
        {
            trial("teachers", 1.0, queries=100): result(status="proven"),
            trial("algorithm1-laplace", 1.0, queries=1): result(),
        }
    )
    assert teachers.title == "teachers, 100 answers"
    assert algorithm.title == "Algorithm 1, Laplace (no guarantee)"
    assert replace(algorithm, queries=10).title == "Algorithm 1, Laplace, 10 answers (no guarantee)"
