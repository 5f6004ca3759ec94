"""The forecast of a head: what it draws, what it depends on, and whether heads do as it says."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from quietmax import PrivateHead, Schema, plan
from quietmax.accounting import mu_of
from quietmax.data import Encoding, encode_table
from quietmax.errors import InvalidInput
from quietmax.estimators.blocks import Floats
from quietmax.experiments import forecast
from quietmax.experiments.forecast import ACHIEVABLE_ERROR, MAJORITY_ERROR, Interval

SCHEMA = Schema(
    label="ill",
    classes=("no", "yes"),
    bounds={"age": (0, 100), "steps": (0, 20_000)},
    scales={"steps": "log"},
    edges={"steps": (100, 1000)},
    categories={"region": ("north", "south", "west")},
    booleans=("smokes",),
    dates={"seen": ("2020-01-01", "2024-12-31")},
    hashed={"code": 8},
    complete=("age", "region"),
)
FEW: dict[str, Any] = {"epsilons": (0.1, 1.0), "sizes": (), "simulations": 10}


@pytest.fixture(autouse=True)
def few_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate with few rows, which is fast, where a test does not compare with real accuracies."""
    if "as_accurate_as_forecast" not in request.node.name:
        monkeypatch.setattr(forecast, "_MOST_ROWS", 2048)
        monkeypatch.setattr(forecast, "_TEST_ROWS", 1024)


def _drawn(schema: Schema = SCHEMA, rows: int = 2000, **stated: float) -> forecast._Drawn:
    encoding, sample = forecast._described(schema, None)
    return forecast._Drawn(encoding, sample, rows, stated.get("majority"), stated.get("achievable"))


def _parts(encoding: Encoding, features: np.ndarray) -> dict[str, np.ndarray]:
    ends = np.cumsum([len(column.feature_names) for column in encoding.columns])
    return {
        column.name: part
        for column, part in zip(encoding.columns, np.split(features, ends[:-1], axis=1), strict=True)
    }


def test_drawn_rows_are_rows_of_the_schema_in_every_type_of_column() -> None:
    drawn = _drawn()
    missing = set()
    for seed in range(20):
        parts = _parts(drawn.encoding, drawn.features(500, np.random.default_rng(seed)))
        for name in ("age", "seen"):
            assert parts[name][:, 0].min() >= 0.0
            assert 0.0 < parts[name][:, 0].max() <= 1.0
        for name in ("steps", "region", "smokes", "code"):
            assert (parts[name].sum(axis=1) == 1.0).all()
            assert set(np.unique(parts[name])) <= {0.0, 1.0}
        assert (parts["age"].shape[1], parts["region"].shape[1]) == (1, 3)
        missing |= {name for name, part in parts.items() if name != "age" and part[:, -1].any()}
        assert not parts["seen"][parts["seen"][:, 1] > 0, 0].any()
    assert missing == {"steps", "region", "smokes", "seen", "code"}


def test_columns_are_drawn_independently_of_each_other() -> None:
    schema = Schema(label="y", classes=("a", "b"), bounds={"u": (0, 1), "v": (0, 1)}, complete=("*",))
    drawn = _drawn(schema)
    shapes = set()
    for seed in range(10):
        features = drawn.features(5000, np.random.default_rng(seed))
        assert abs(np.corrcoef(features[:, 0], features[:, 1]).item(1)) < 0.1
        shapes.add(round(float(features[:, 0].mean()), 2))
    assert len(shapes) > 5


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("achievable", [0.6, 0.7, 0.9])
def test_labels_have_the_stated_majority_and_best_accuracy(classes: int, achievable: float) -> None:
    """A share of 6,096 rows is off by more than 0.035 with a probability below 1e-7."""
    names = tuple("abc"[:classes])
    drawn = _drawn(Schema(label="y", classes=names, bounds=dict.fromkeys("uvwx", (0, 1))), rows=2000)
    for seed in range(3):
        generator = np.random.default_rng(seed)
        features = drawn.features(6000, generator)
        scores = forecast._random_scores(drawn.encoding, features, generator)
        shares = np.array([0.6, *[0.4 / (classes - 1)] * (classes - 1)])
        probabilities = forecast._with_strength(scores, shares, achievable)
        np.testing.assert_allclose(probabilities.mean(axis=0), shares, atol=0.035)
        assert abs(probabilities.max(axis=1).mean() - achievable) < 0.03
    table = forecast._Simulation.draw(_drawn(majority=0.6, achievable=achievable), np.random.default_rng(0))
    labels = np.concatenate([table.train.labels, table.test.labels])
    assert abs(np.bincount(labels).max() / len(labels) - 0.6) < 0.035 + MAJORITY_ERROR + 0.02


def test_strengths_spread_around_what_is_stated_and_over_a_range_without() -> None:
    generator = np.random.default_rng(0)

    def strengths(**stated: float) -> np.ndarray:
        drawn = _drawn(**stated)
        return np.array([drawn.strength(generator) for _ in range(2000)])

    known = strengths(majority=0.7, achievable=0.8)
    assert np.abs(known[:, 0] - 0.7).max() <= MAJORITY_ERROR
    assert abs(known[:, 1].std() - ACHIEVABLE_ERROR) < 0.002
    open_ = strengths(majority=0.7)
    assert np.quantile(open_[:, 1], 0.1) < 0.72
    assert np.quantile(open_[:, 1], 0.95) > 0.85
    unknown = strengths()
    assert unknown[:, 0].min() < 0.55
    assert unknown[:, 0].max() > 0.9


def test_more_people_than_are_simulated_are_as_many_with_less_noise() -> None:
    table = forecast._Simulation.draw(
        _drawn(rows=500, majority=0.6, achievable=0.7), np.random.default_rng(0)
    )
    assert table.measure(5000, 0.1, 1e-5, seed=3) == table.measure(500, 1.0, 1e-5, seed=3)


def test_a_measured_head_is_compared_with_the_model_that_drew_the_labels() -> None:
    table = forecast._Simulation.draw(
        _drawn(rows=2000, majority=0.6, achievable=0.75), np.random.default_rng(1)
    )
    lost, calibration = table.measure(2000, 1.0, 1e-5, seed=0)
    head = PrivateHead(mu=1.0, delta=1e-5, random_state=0).fit(table.train)
    found = head.predict_proba(table.test.features)
    best = (table.probabilities.argmax(axis=1) == table.test.labels).mean()
    right = found.argmax(axis=1) == table.test.labels
    # The labels of 4,096 rows are one draw from the probabilities: 0.03 is 4 standard deviations.
    assert abs((best - right.mean()) - lost) < 0.03
    assert abs(abs(found.max(axis=1).mean() - right.mean()) - calibration) < 0.06
    assert 0.0 <= lost < 0.1


def test_the_forecast_follows_from_its_arguments_and_the_seed() -> None:
    one, same, other = (
        plan(SCHEMA, 300, majority=0.6, achievable=0.7, seed=seed, **FEW) for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other


def test_the_grid_adds_pairs_and_changes_no_other_number() -> None:
    settings: dict[str, Any] = {"epsilons": (0.1, 3.0), "sizes": (1.0, 2.0), "simulations": 10}
    plain = plan(SCHEMA, 300, majority=0.6, **settings)
    found = plan(SCHEMA, 300, majority=0.6, grid=True, **settings)
    assert [(each.people, each.epsilon) for each in found.grid] == [
        (people, epsilon) for people in (300, 600) for epsilon in (0.1, 1.0, 3.0)
    ]
    assert (found.by_epsilon, found.by_people) == (plain.by_epsilon, plain.by_people)
    assert {*found.by_epsilon, *found.by_people} <= {*found.grid}
    with pytest.raises(InvalidInput, match="`grid`"):
        plain.to_html("people.toml")


@pytest.mark.parametrize(
    ("width", "scheme", "majority"),
    [(1280, "light", 0.6), (1280, "dark", None), (390, "light", 0.6)],
    ids=["desk", "dark without a majority", "phone"],
)
def test_the_page_follows_its_sliders_and_allows_nothing_else(
    browser: Any, axe: str, tmp_path: Path, screenshot: Any, width: int, scheme: str, majority: float | None
) -> None:
    found = plan(
        SCHEMA, 300, majority=majority, epsilons=(0.5, 8.0), sizes=(1.0, 4.0), simulations=10, grid=True
    )
    file = tmp_path / "plan.html"
    file.write_text(found.to_html("<people>.toml"), encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(file.as_uri())
    assert page.get_by_text("<people>.toml").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shown = "survives" if majority is None else "accuracy"
    for keys, people, epsilon in (
        ((), 300, 1.0),
        (("Tab", "End"), 300, 8.0),
        (("Tab", "ArrowRight"), 1200, 8.0),
    ):
        for key in keys:
            page.keyboard.press(key)
        chosen = next(each for each in found.grid if (each.people, each.epsilon) == (people, epsilon))
        value = getattr(chosen, shown)
        written = f"{value.expected:.3f}" if majority else f"{value.expected:.0%}"
        assert page.locator("#value").inner_text() == written
        assert page.locator("#guess").inner_text() == f"{math.ceil(1000 * chosen.max_guess) / 10:.1f}%"
        assert chosen.strength in page.locator("#strength").get_attribute("class")
        assert page.locator("#ece").inner_text() == f"{chosen.calibration_error.expected:.3f}"
        assert page.get_by_label("People in the training").get_attribute("aria-valuetext") == f"{people:,}"
        losses = {each.epsilon: each.loss for each in found.grid if each.people == people}
        flat = next((each for each in (0.5, 1.0) if losses[each] <= losses[8.0] + forecast.FLAT), None)
        said = "still rises at epsilon 8" if flat is None else f"flattens at epsilon {flat:g}:"
        assert f"With {people:,} people, accuracy {said}" in page.locator("#flattens").inner_text()
        losses = {each.people: each.loss for each in found.grid if each.epsilon == epsilon}
        least = next(
            (f"{each:,} people are enough" for each, loss in losses.items() if loss <= 0.01), "more than"
        )
        assert re.match(f"At epsilon {epsilon:g}, {least}", page.locator("#enough").inner_text())
        assert page.locator("svg .here").count() == 2
    page.get_by_text("All numbers").first.click()
    assert page.locator("#rows tr:visible").count() == len(found.grid) == 6
    assert page.locator("#assumptions li").all_inner_texts() == found.assumptions
    page.evaluate(axe)
    assert [each["id"] for each in page.evaluate("axe.run()")["violations"]] == []
    screenshot(page, "plan")
    assert wrong == []
    blocked = page.evaluate(
        """() => new Promise(done => {
            addEventListener("securitypolicyviolation", each => done(each.violatedDirective));
            document.body.appendChild(document.createElement("img")).src = "file:///x.png";
        })"""
    )
    assert blocked == "img-src"
    context.close()


def test_a_larger_epsilon_is_more_accurate_better_calibrated_and_leaks_more() -> None:
    found = plan(SCHEMA, 1000, majority=0.6, achievable=0.8, **FEW)
    weak, strong = found.by_epsilon[1], found.by_epsilon[0]
    assert weak.accuracy is not None
    assert strong.accuracy is not None
    assert weak.survives is not None
    assert strong.survives is not None
    assert strong.accuracy.expected + 0.03 < weak.accuracy.expected
    assert strong.survives.expected + 0.15 < weak.survives.expected
    assert weak.calibration_error.expected < strong.calibration_error.expected
    head = PrivateHead(1.0, 1e-5, classes=(0, 1), random_state=0).fit(np.eye(2), [0, 1])
    assert weak.max_guess == pytest.approx(head.guarantee_.max_accuracy(), rel=1e-9)
    for outlook in (weak, strong):
        assert outlook.accuracy is not None
        assert outlook.accuracy.low <= outlook.accuracy.expected <= outlook.accuracy.high


def test_the_advice_names_the_flat_epsilon_and_the_people_that_are_enough() -> None:
    found = plan(
        SCHEMA, 400, majority=0.6, achievable=0.8, epsilons=(0.1, 1, 3, 8), sizes=(0.25, 1, 8), simulations=10
    )
    accuracy = {each.epsilon: each.accuracy.expected for each in found.by_epsilon if each.accuracy}
    flat = [epsilon for epsilon, each in accuracy.items() if each >= accuracy[8.0] - forecast.FLAT]
    assert found.flattens_at == min(flat)
    assert [each.people for each in found.by_people] == [100, 400, 3200]
    assert found.enough_people == 3200
    assert "3,200 people are enough" in found.advice[1]
    few = plan(SCHEMA, 40, majority=0.6, achievable=0.8, **FEW)
    assert few.enough_people is None
    assert "More than 40 people are needed" in few.advice[1]
    assert (few.flattens_at, few.advice[0]) == (None, "Accuracy still rises at epsilon 1 with 40 people.")


def test_heads_on_tables_of_another_making_are_as_accurate_as_forecast() -> None:
    """Columns here depend on each other, and labels on a sum that the forecast never draws."""
    generator = np.random.default_rng(5)
    schema = Schema(
        label="y",
        classes=("a", "b"),
        bounds={"u": (-4, 4), "v": (-4, 4), "w": (-4, 4)},
        booleans=("t",),
        complete=("*",),
    )
    u = generator.normal(size=6000)
    v = 0.6 * u + 0.8 * generator.normal(size=6000)
    w = generator.normal(size=6000)
    t = generator.random(6000) < 0.3
    chance = 1.0 / (1.0 + np.exp(-(0.9 * u + 0.5 * v + 0.2 * np.abs(w) + 0.8 * t - 0.8)))
    labels = generator.random(6000) < chance
    frame = pd.DataFrame({"u": u, "v": v, "w": w, "t": t, "y": np.where(labels, "b", "a")})
    majority = max(labels.mean(), 1 - labels.mean())
    achievable = ((chance > 0.5) == labels).mean()
    found = plan(
        schema,
        2000,
        majority=round(majority, 2),
        achievable=round(achievable, 2),
        epsilons=(0.5, 3),
        sizes=(),
        simulations=20,
    )
    for outlook in found.by_epsilon:
        head = PrivateHead(outlook.epsilon, 1e-5, schema=schema, random_state=0).fit(frame[:2000])
        accuracy = (head.predict(frame[2000:]) == frame["y"][2000:]).mean()
        assert outlook.accuracy is not None
        assert outlook.accuracy.low <= accuracy <= outlook.accuracy.high
    last = found.by_epsilon[-1].accuracy
    assert last is not None
    assert last.high - last.low < 0.08


def test_without_a_majority_there_is_no_accuracy_but_the_share_that_survives() -> None:
    found = plan(SCHEMA, 1000, **FEW)
    assert [each.accuracy for each in found.by_epsilon] == [None, None]
    assert all(each.survives is not None for each in found.by_epsilon)


def test_where_nothing_is_achievable_no_share_of_it_is_stated() -> None:
    found = plan(SCHEMA, 1000, majority=0.9, achievable=0.9, **FEW)
    assert [each.survives for each in found.by_epsilon] == [None, None]
    assert found.by_epsilon[1].accuracy is not None
    assert abs(found.by_epsilon[1].accuracy.expected - 0.9) < 0.02


def test_without_the_achievable_accuracy_intervals_are_wider_and_the_assumption_says_so() -> None:
    few = {"epsilons": (3.0,), "sizes": (), "simulations": 20}
    known = plan(SCHEMA, 1000, majority=0.6, achievable=0.7, **few)
    unknown = plan(SCHEMA, 1000, majority=0.6, **few)

    def width(interval: Interval | None) -> float:
        assert interval is not None
        return interval.high - interval.low

    assert width(unknown.by_epsilon[0].accuracy) > 2 * width(known.by_epsilon[0].accuracy)
    assert any("stating what is achievable" in sentence for sentence in unknown.assumptions)


def _sample() -> pd.DataFrame:
    return pd.DataFrame(
        {"age": [10.0, 20.0], "smokes": ["yes", "no"], "who": ["a", "b"], "ill": ["no", "yes"]}
    )


def test_the_rows_of_a_sample_are_drawn_and_its_labels_are_not_read() -> None:
    schema = Schema(
        label="ill",
        classes=("no", "yes"),
        bounds={"*": (0, 100)},
        booleans=("smokes",),
        person="who",
        complete=("*",),
    )
    encoding, records = forecast._described(schema, _sample())
    drawn = forecast._Drawn(encoding, records, 100, None, None)
    rows: Floats = drawn.features(200, np.random.default_rng(0)).astype(np.float64)
    np.testing.assert_allclose(np.unique(rows, axis=0), [[0.1, 0.0, 1.0], [0.2, 1.0, 0.0]], atol=1e-6)
    turned = _sample().assign(ill=["yes", "sick"])
    unlabelled = _sample().drop(columns=["ill", "who"])
    wanted = plan(schema, 100, sample=_sample(), **FEW)
    assert plan(schema, 100, sample=turned, **FEW) == wanted
    assert plan(schema, 100, sample=unlabelled, **FEW) == wanted
    assert list(turned["ill"]) == ["yes", "sick"]


def test_persons_and_ignored_columns_are_no_columns_of_the_forecast() -> None:
    schema = Schema(
        label="ill",
        classes=("no", "yes"),
        bounds={"age": (0, 100)},
        person="who",
        ignore=("name",),
        ignore_case=("who", "ill"),
    )
    encoding, _ = forecast._described(schema, None)
    assert encoding.feature_names == ("age", "age missing")
    assert encoding.person is None


def test_the_encoding_is_the_one_that_training_uses() -> None:
    frame = pd.DataFrame(
        {
            "age": [3.0],
            "steps": [5.0],
            "region": ["west"],
            "smokes": ["no"],
            "seen": ["2021-01-01"],
            "code": ["x"],
        }
    )
    trained = encode_table(frame.assign(ill="no"), SCHEMA).encoding
    assert trained is not None
    encoding, _ = forecast._described(SCHEMA, None)
    assert {column.name: column for column in encoding.columns} == {
        column.name: column for column in trained.columns
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"people": 9}, "people must be an integer from 10"),
        ({"people": 50.0}, "people must be an integer"),
        ({"simulations": 9}, "simulations must be an integer from 10"),
        ({"majority": 0.4}, "majority must be the share"),
        ({"majority": 1.0}, "majority must be the share"),
        ({"majority": "most"}, "majority must be the share"),
        ({"achievable": 0.8}, "achievable requires `majority`"),
        ({"majority": 0.7, "achievable": 0.6}, "achievable must be from `majority`"),
        ({"majority": 0.7, "achievable": 1.1}, "achievable must be from `majority`"),
        ({"epsilon": 0.0}, "epsilon must be between"),
        ({"epsilons": (1.0, -1.0)}, "epsilons must be between"),
        ({"sizes": (0.0,)}, "sizes must be between"),
        ({"delta": 0.0}, "delta"),
        ({"sample": pd.DataFrame({"age": []})}, "`sample` must have at least one row"),
        ({"sample": pd.DataFrame({"age": [1.0]})}, "steps"),
        ({"schema": Schema(label="ill")}, "must name the label column and the classes"),
        ({"schema": Schema(classes=("a", "b"))}, "must name the label column and the classes"),
        ({"schema": Schema(label="y", classes=("a", "b"))}, "at least one column"),
        ({"schema": Schema(label="y", classes=("a", "b"), bounds={"*": (0, 1)})}, "bounds of '\\*'"),
        ({"schema": Schema(label="y", classes=("a", "b"), text=("note",))}, "'note' holds free text"),
        (
            {"schema": Schema(label="y", classes=("a", "b"), booleans=("t",), confirm={"classes": "seen"})},
            "nobody has confirmed classes",
        ),
    ],
)
def test_wrong_arguments_are_one_clear_error(arguments: dict[str, Any], message: str) -> None:
    given = {"schema": SCHEMA, "people": 100, **FEW, **arguments}
    with pytest.raises(InvalidInput, match=message):
        plan(**given)


def test_progress_is_reported_and_an_interruption_ends_it() -> None:
    seen: list[tuple[int, int]] = []
    plan(SCHEMA, 50, **FEW, progress=lambda *counts: seen.append(counts))
    assert seen == [(done, 10) for done in range(1, 11)]
    seen.clear()

    def interrupt(*counts: int) -> None:
        seen.append((counts[0], counts[1]))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan(SCHEMA, 50, epsilons=(1.0,), sizes=(), simulations=1000, progress=interrupt)
    assert seen == [(1, 1000)]


def test_the_guarantee_of_the_plan_is_that_of_the_training() -> None:
    found = plan(SCHEMA, 50, delta=1e-6, **FEW)
    frame = np.eye(2)
    trained = PrivateHead(1.0, 1e-6, classes=(0, 1), random_state=0).fit(frame, [0, 1]).guarantee_
    assert trained.mu == pytest.approx(mu_of(1.0, 1e-6))
    assert found.by_epsilon[1].max_guess == pytest.approx(trained.max_accuracy(), rel=1e-9)


@pytest.mark.parametrize("majority", [None, 0.6])
def test_the_figure_and_the_json_hold_every_outlook(majority: float | None) -> None:
    found = plan(SCHEMA, 50, majority=majority, epsilons=(0.5, 2), sizes=(1, 2), simulations=10)
    content = found.to_json()
    assert [each["epsilon"] for each in content["by_epsilon"]] == [0.5, 2.0]
    assert [each["people"] for each in content["by_people"]] == [50, 100]
    assert set(content["by_people"][0]["calibration_error"]) == {"expected", "low", "high"}
    assert (content["by_epsilon"][0]["accuracy"] is None) is (majority is None)
    left, right, _ = found.figure().axes
    assert list(left.lines[0].get_xdata()) == [0.5, 2.0]
    assert list(right.lines[0].get_xdata()) == [50, 100]
