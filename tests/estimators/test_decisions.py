from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietmax import PrivateHead
from quietmax.errors import DataUnavailable, InvalidInput
from quietmax.estimators.figures import costs_of, decided, decision_in_words, threshold_of
from quietmax.estimators.serialization import (
    DECISION_FILE,
    decide_folder,
    open_private,
    save_private,
)
from tests.estimators.made import blobs, made

NAMES = ("no", "yes")


def test_the_answer_has_the_lowest_expected_cost() -> None:
    rng = np.random.default_rng(0)
    for classes in (2, 4):
        probabilities = rng.dirichlet(np.ones(classes), 500)
        chosen = {pair: rng.uniform(0.1, 9) for pair in itertools.permutations(range(classes), 2)}
        costs = costs_of(range(classes), cost=chosen)
        expected = probabilities @ np.array(costs)
        assert np.array_equal(decided(probabilities, costs), expected.argmin(1))
        one_by_one = [decided(row[None], costs)[0] for row in probabilities]
        assert np.array_equal(decided(probabilities, costs), one_by_one)
        assert np.array_equal(decided(probabilities, None), probabilities.argmax(1))


def test_a_threshold_is_the_least_probability_of_the_class_that_it_names() -> None:
    probabilities = np.array([[0.75, 0.25], [0.69, 0.31], [0.2, 0.8]])
    for threshold in ({"yes": 0.3}, {"no": 0.7}):
        costs = costs_of(NAMES, threshold)
        assert threshold_of(costs) == 0.3
        assert decided(probabilities, costs).tolist() == [0, 1, 1]
        assert decision_in_words(costs, NAMES) == "yes if its probability is above 0.3, otherwise no"
    costs = costs_of(NAMES, cost={("yes", "no"): 4})
    assert threshold_of(costs) == 0.2
    assert (threshold_of(None), costs_of(NAMES)) == (0.5, None)
    assert decision_in_words(None, NAMES) == "the most probable class"
    many = costs_of("abc", cost={("a", "b"): 3})
    assert decision_in_words(many, "abc").endswith("(a answered as b 3; any other error 1)")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"threshold": {"yes": 0.3}, "cost": {("no", "yes"): 2}}, "Only one of `threshold` and `cost`"),
        ({"threshold": {"maybe": 0.3}}, "no class 'maybe'; the classes are 'no', 'yes'"),
        ({"threshold": {"yes": 1.0}}, "between 0 and 1, got 1.0"),
        ({"threshold": {"yes": 1e-13}}, "got 1e-13; at least 1e-09 away from both"),
        ({"cost": {("yes", "no"): 1e13}}, r"at most 1e\+09 times the other"),
        ({"threshold": {"yes": 0.3, "no": 0.3}}, "names one of two classes"),
        ({"cost": {("yes", "yes"): 2}}, "for an answer that is wrong"),
        ({"cost": {("yes", "no"): 0}}, "must be a positive number"),
        ({"cost": {("yes", ""): 2}}, "no class ''"),
    ],
)
def test_what_names_no_decision_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        costs_of(NAMES, **given)


def test_a_threshold_is_for_two_classes() -> None:
    with pytest.raises(InvalidInput, match="Models of more classes take costs"):
        costs_of("abc", {"a": 0.3})


def head(classes: int = 2, **settings: Any) -> tuple[PrivateHead, Any]:
    X, y = blobs(600, classes)
    fitted = made(
        PrivateHead, epsilon=2.0, delta=1e-5, declared_size=600, classes=tuple(range(classes)), **settings
    ).fit(X, y)
    return fitted, X


def test_a_decision_is_stored_in_the_folder_and_used_by_every_prediction(tmp_path: Path) -> None:
    fitted, X = head()
    plain = fitted.predict(X)
    shares = fitted.predict_proba(X)
    high = round(float(np.quantile(shares[:, 1], 0.8)), 6)
    assert fitted.decide(threshold={1: high}).predict(X).tolist() == (shares[:, 1] > high).tolist()
    assert (fitted.predict(X) != plain).any()
    folder = save_private(fitted, tmp_path / "model", dataset="blobs")
    model = open_private(folder)
    assert np.array_equal(model.predict(X), fitted.predict(X))
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != DECISION_FILE}
    changed = decide_folder(folder, cost={("1", "0"): 9})
    assert threshold_of(changed.costs) == pytest.approx(0.1)
    assert open_private(folder).costs == changed.costs
    assert np.array_equal(open_private(folder).predict(X), shares[:, 1] > 0.1)
    decide_folder(folder)
    assert np.array_equal(open_private(folder).predict(X), plain)
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.name != DECISION_FILE} == files
    fitted.fit(X, plain)
    assert not hasattr(fitted, "costs_")


def test_a_damaged_decision_is_refused(tmp_path: Path) -> None:
    folder = save_private(head()[0], tmp_path / "model", dataset="blobs")
    for text in (
        "",
        "{}",
        '{"format": "quietmax decision", "costs": [[0, 1]]}',
        '{"format": "x", "costs": null}',
    ):
        (folder / DECISION_FILE).write_text(text)
        with pytest.raises(DataUnavailable, match="damaged"):
            open_private(folder)


def test_a_model_that_is_paid_per_answer_takes_no_decision(tmp_path: Path) -> None:
    fitted, _ = head(release="query", queries=10)
    with pytest.raises(InvalidInput, match="paid per answer"):
        fitted.decide(threshold={1: 0.9})
    folder = save_private(fitted, tmp_path / "model", dataset="blobs")
    with pytest.raises(InvalidInput, match="paid per answer"):
        decide_folder(folder, threshold={"1": 0.9})
