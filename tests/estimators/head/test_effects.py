"""Effects of columns and reasons of answers: what they add up to, their units, their noise, and how true they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from quietmax import DPSGD, DPSGDSettings, HeadSettings, PrivateHead, Teachers
from quietmax.data.encoding import Encoding, NumericColumn
from quietmax.data.schema import Schema
from quietmax.errors import InvalidInput
from quietmax.estimators import open_private, save_private
from quietmax.estimators.head.effects import CONSTANT, Additive, curve_svg
from quietmax.estimators.head.tables import (
    Basis,
    _rates_and_mus,
    centred,
    effect_noise,
    parts_of,
    score_noise,
    with_shares_of_pairs,
)
from quietmax.estimators.head.weights import GradientPlan, TableWeights, even_shares
from quietmax.models.features.tabular import TableCells, TableFeatures, table_cells

SCHEMA = Schema(
    label="bought",
    classes=("no", "yes"),
    bounds={"age": (0, 100), "pay": (0, 50_000), "visits": (0, 30)},
    scales={"pay": "log"},
    edges={"visits": (3, 10)},
    categories={"job": ("a", "b", "c", "d"), "city": tuple("klmnopqr")},
    booleans=("member",),
    dates={"since": ("2000-01-01", "2020-12-31")},
    hashed={"code": 4},
    complete=("age", "job", "member", "code"),
    crosses=(("member", "job"),),
)
SVG = "{http://www.w3.org/2000/svg}"
JOBS, CITIES = np.array([-1.0, -0.3, 0.4, 0.9]), np.linspace(-0.8, 0.8, 8)


def truth(frame: pd.DataFrame) -> dict[str, np.ndarray]:
    """The effects of the columns on the log-odds."""
    days = (pd.to_datetime(frame["since"]) - pd.Timestamp("2000-01-01")).dt.days.to_numpy()
    return {
        "age": 1.3 * np.sin(frame["age"].to_numpy() / 100 * 2 * np.pi),
        "pay": 0.7 * (np.log1p(frame["pay"].to_numpy()) - 7),
        "job": JOBS[["abcd".index(job) for job in frame["job"]]],
        "city": CITIES[["klmnopqr".index(city) for city in frame["city"]]],
        "member": np.where(frame["member"] == "yes", 0.4, -0.4),
        "since": 1.2 * (days / 7670 - 0.5),
    }


def customers(count: int, seed: int = 0) -> pd.DataFrame:
    """People whose log-odds are a sum of known effects; visits and codes have none."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.uniform(0, 100, count),
            "pay": np.minimum(rng.lognormal(7, 1, count), 50_000),
            "visits": rng.integers(0, 30, count).astype(float),
            "job": rng.choice(list("abcd"), count),
            "city": rng.choice(list("klmnopqr"), count, p=np.arange(8, 0, -1) / 36),
            "member": rng.choice(["yes", "no"], count),
            "since": pd.Timestamp("2000-01-01") + pd.to_timedelta(rng.integers(0, 7671, count), "D"),
            "code": rng.integers(0, 100, count).astype(str),
        }
    )
    frame["since"] = frame["since"].dt.strftime("%Y-%m-%d")
    odds = sum(truth(frame).values())
    frame["bought"] = np.where(rng.random(count) < 1 / (1 + np.exp(-odds)), "yes", "no")
    return frame


def head_on(frame: pd.DataFrame, seed: int = 0, **settings: Any) -> PrivateHead:
    return PrivateHead(schema=SCHEMA, declared_size=len(frame), random_state=seed, **settings).fit(frame)


@pytest.fixture(scope="module")
def head() -> PrivateHead:
    return head_on(customers(5000), epsilon=3.0)


def queries() -> pd.DataFrame:
    """Rows with missing, unlisted and extreme values."""
    rows = customers(200, seed=5)
    rows.loc[:40, "pay"] = np.nan
    rows.loc[30:60, "visits"] = np.nan
    rows.loc[:20, "city"] = None
    rows.loc[10:40, "job"] = "other"
    rows.loc[50:70, "since"] = None
    rows.loc[70:90, "age"] = 400.0
    return rows


def sums(reasons: pd.DataFrame, classes: tuple[str, ...], rows: int) -> np.ndarray:
    """Contributions added one after the other, in the order of the frame."""
    total = np.zeros((rows, len(classes)))
    for place, name in enumerate(classes):
        parts = reasons[f"contribution to {name}"].to_numpy().reshape(rows, -1)
        total[:, place] = parts[:, 0]
        for part in parts.T[1:]:
            total[:, place] += part
    return total


def test_contributions_added_in_their_order_are_the_scores_to_the_last_bit(
    head: PrivateHead, tmp_path: Path
) -> None:
    rows = queries()
    scores = head._classifier.scores(head._queries(rows))
    reasons = head.reasons(rows)
    assert np.array_equal(sums(reasons, ("no", "yes"), 200), scores)
    assert np.array_equal(scores[:, 1] - scores[:, 0], head.decision_function(rows))
    opened = open_private(save_private(head, tmp_path / "head", dataset="customers"))
    pd.testing.assert_frame_equal(opened.reasons(opened.encode(rows)), reasons, check_exact=True)


def test_reasons_name_the_values_of_a_row(head: PrivateHead) -> None:
    rows = queries().iloc[[15, 60, 100]]
    reasons = head.reasons(rows)
    names = [CONSTANT, *(column.name for column in head.encoding_.columns), "member × job"]
    assert reasons["column"].tolist() == names * 3
    assert reasons["row"].tolist() == sorted([0, 1, 2] * len(names))
    first = reasons[reasons["row"] == 0].set_index("column")["value"]
    assert [first[name] for name in ("pay", "city", "job")] == ["missing", "missing", "not listed or missing"]
    assert first["member × job"] == f"{rows.iloc[0]['member']} × not listed or missing"
    assert first[CONSTANT] == ""
    second = reasons[reasons["row"] == 1].set_index("column")["value"]
    assert [second[name] for name in ("visits", "since")] == ["missing", "missing"]
    third = reasons[reasons["row"] == 2].set_index("column")["value"]
    low, high = map(float, third["age"].split(" to "))
    assert low <= rows.iloc[2]["age"] <= high
    low, high = map(float, third["pay"].split(" to "))
    assert low * 0.9999 <= rows.iloc[2]["pay"] <= high * 1.0001
    start, end = third["since"].split(" to ")
    assert start <= rows.iloc[2]["since"] <= end


def test_effects_average_zero_under_the_released_shares_and_are_sorted_by_importance(
    head: PrivateHead,
) -> None:
    effects, additive, sizes = head.effects(), head._additive(), head.feature_map_.sizes
    assert effects.importance["importance"].is_monotonic_decreasing
    assert list(effects.curves) == effects.importance["column"].tolist()
    assert additive.to_json() == additive.effects().to_json()
    places = dict(zip(additive.columns, enumerate(parts_of(sizes)), strict=True))
    for name, importance, noise in effects.importance.itertuples(index=False):
        curve, (place, part) = effects.curves[name], places[name]
        all_cells, shares = head.coef_[1, part], head.centre_[part] / head.centre_[part].sum()
        if place < len(head.feature_map_.parts):
            assert abs(all_cells @ shares) < 1e-12
        reached = [value is not None for value in additive.values(place)]
        assert np.array_equal(curve["effect on yes"], all_cells[reached])
        assert np.array_equal(curve["effect on no"], -curve["effect on yes"])
        assert np.abs(all_cells) @ shares == pytest.approx(importance)
        assert head.noise_[part] @ shares == pytest.approx(noise)
    assert {*effects.importance["column"][:3]} == {"age", "job", "pay"}
    assert {*effects.importance["column"].iloc[-3:]} == {"visits", "code", "member × job"}


def test_reasons_are_the_effects_of_the_values(head: PrivateHead) -> None:
    effects, reasons = head.effects(), head.reasons(queries())
    for name, curve in effects.curves.items():
        own = reasons[reasons["column"] == name]
        known = dict(zip(curve["value"], curve["effect on yes"], strict=True))
        np.testing.assert_array_equal(own["contribution to yes"], [known[value] for value in own["value"]])


def test_values_are_in_the_units_of_the_schema(head: PrivateHead) -> None:
    curves, levels = head.effects().curves, head.feature_map_.levels
    age = curves["age"]
    assert age["low"].tolist() == [100 / levels * level for level in range(levels)]
    assert age["value"].iloc[-1].endswith(" to 100")
    pay = curves["pay"]
    assert pay["high"].iloc[-2] == pytest.approx(50_000)
    assert pay["low"].iloc[levels // 2] == pytest.approx(np.sqrt(50_001) - 1)
    assert pay["value"].iloc[-1] == "missing"
    assert np.isnan(pay["low"].iloc[-1])
    since = curves["since"]
    assert (since["low"].iloc[0], since["high"].iloc[-2]) == ("2000-01-01", "2020-12-31")
    assert curves["visits"]["value"].tolist() == ["0 to 3", "3 to 10", "10 to 30", "missing"]
    assert curves["job"]["value"].tolist() == [*"abcd", "not listed or missing"]
    assert curves["city"]["value"].tolist() == [*"klmnopqr", "missing", "not listed"]
    assert curves["member"]["value"].tolist() == ["no", "yes", "missing"]
    assert curves["code"]["value"].tolist() == [*(f"bucket {number}" for number in range(4)), "missing"]
    assert len(curves["member × job"]) == 3 * 5
    assert curves["member × job"]["value"].iloc[1] == "no × b"


def test_a_number_in_a_cross_has_eight_intervals() -> None:
    columns = NumericColumn("age", 0, 80, missing=False), NumericColumn("pay", 0, 16)
    encoding = Encoding(columns, "y", ("no", "yes"), crosses=(("age", "pay"),))
    cells = table_cells(encoding, 16)
    assert cells is not None
    count = sum(cells.sizes)
    weights = TableWeights(
        np.zeros((2, count + 1)), even_shares(cells.sizes), cells.sizes, np.ones(count + 1)
    )
    curve = Additive.of(weights, cells, encoding, ("no", "yes")).effects().curves["age × pay"]
    assert len(curve) == 8 * 9
    assert curve["value"].iloc[[0, -1]].tolist() == ["0 to 10 × 0 to 2", "70 to 80 × missing"]


def test_other_models_say_what_there_is_to_show() -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(200, 3)), rng.integers(0, 2, 200)
    plain = PrivateHead(classes=(0, 1)).fit(X, y)
    paid = PrivateHead(classes=(0, 1), release="query", declared_size=200).fit(X, y)
    whole = head_on(customers(200), settings=HeadSettings(second_moments=0.0))
    assert isinstance(whole.feature_map_, TableFeatures)
    deep = DPSGD(classes=(0, 1), declared_size=200, settings=DPSGDSettings(hidden=(4,))).fit(X, y)
    refused = (plain, "its weights"), (whole, "its weights"), (deep, "linear DP-SGD"), (paid, "one by one")
    for model, words in refused:
        with pytest.raises(InvalidInput, match=words):
            model.effects()
        with pytest.raises(InvalidInput, match=words):
            model.reasons(X)
    assert not hasattr(Teachers, "effects")


def test_the_noise_of_an_effect_is_that_of_a_linear_function_of_the_weights() -> None:
    """The same numbers from the effects of every single weight."""
    rng = np.random.default_rng(1)
    cells = TableCells(7, ((0, 1), (1, 3), (3, 6), (6, 7)), (0, 1), levels=16)
    shares = np.clip(even_shares(cells.sizes) + rng.normal(0.0, 0.02, sum(cells.sizes)), 0.0, 1.0)
    cells = replace(cells, crosses=((0, 2), (1, 3), (1, 2)))
    shares = with_shares_of_pairs(cells, shares)
    basis = Basis.of(cells, shares, 1e-3, 40.0)
    lines = basis.entries.toarray().T * 2.0**-20
    expected = 0.3 * np.sqrt(np.square(centred(lines, cells, shares)).sum(axis=0))
    np.testing.assert_allclose(effect_noise(basis, cells, shares, 0.3), expected, rtol=1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize("steps", [1, 7, 60])
def test_the_noise_of_all_steps_is_one_product_of_public_numbers(steps: int, momentum: float) -> None:
    """Compared with what noise in a single step moves in the end."""
    plan = GradientPlan(steps, 3.0, 0.25, momentum)
    rates, mus = _rates_and_mus(plan, 0.7)
    moved = []
    for noisy in range(steps):
        weight = direction = 0.0
        for step in range(steps):
            noise = 0.26 / mus[step] if step == noisy else 0.0
            direction = momentum * direction + noise
            weight += rates[step] / 900.0 * (noise + momentum * direction)
        moved.append(weight)
    for classes, factor in ((2, 1.0), (3, np.sqrt(2 / 3)), (10, np.sqrt(9 / 10))):
        whole = score_noise(plan, 0.26, 0.7, 900.0, classes)
        assert whole == pytest.approx(factor * np.sqrt(np.square(moved).sum()), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "centring"), [(2, 0.0), (2, 0.05), (3, 0.0)])
def test_the_noise_in_effects_is_no_more_than_stated_and_not_far_below(classes: int, centring: float) -> None:
    """Over 30 trainings on the same people: four standard errors of a deviation from 30 draws are 52%.

    With centring the places of numbers move, too, with the released shares; that averages out over a column.
    """
    frame = customers(3000)
    schema = SCHEMA
    if classes == 3:
        frame["bought"] = np.where(frame["age"] < 30, "maybe", frame["bought"])
        schema = SCHEMA.updated({"classes": ("no", "yes", "maybe")})
    found: dict[str, list[pd.DataFrame]] = {}
    for seed in range(30):
        settings = HeadSettings(calibration=0.0, centring=centring)
        head = PrivateHead(1.0, schema=schema, declared_size=3000, random_state=seed, settings=settings)
        effects = head.fit(frame).effects()
        for name, curve in (*effects.curves.items(), (CONSTANT, effects.constant.assign(share=1.0))):
            found.setdefault(name, []).append(curve)
    ratios = []
    for curves in found.values():
        drawn = np.std([curve["effect on yes"] for curve in curves], axis=0, ddof=1)
        stated = np.sqrt(np.mean([curve["noise"] ** 2 for curve in curves], axis=0))
        shares = np.mean([curve["share"] for curve in curves], axis=0)
        ratios.append(np.sqrt(np.square(drawn / stated) @ shares / shares.sum()))
        if not centring:
            assert (drawn / stated).max() < 1.52
    assert max(ratios) < 1.0
    assert min(ratios) > 0.25


def test_pairs_are_part_of_effects_and_reasons_and_have_their_noise(tmp_path: Path) -> None:
    frame = customers(3000)
    head = head_on(frame, epsilon=3.0, settings=HeadSettings(pairs=True))
    assert len(head.feature_map_.crosses) > 3
    rows = queries()
    scores = head._classifier.scores(head._queries(rows))
    assert np.array_equal(sums(head.reasons(rows), ("no", "yes"), 200), scores)
    assert head.noise_.shape == (sum(head.feature_map_.sizes) + 1,)
    effects = head.effects()
    assert len(effects.curves) == 8 + len(head.feature_map_.crosses)
    assert all((curve["noise"] > 0.0).all() for curve in effects.curves.values())
    opened = open_private(save_private(head, tmp_path / "head", dataset="customers"))
    assert opened.effects().to_json() == effects.to_json()
    assert (
        json.loads(json.dumps(effects.to_json(), allow_nan=False))["curves"]["age"][-1]["value"]
        == "99.6094 to 100"
    )


def test_linear_models_of_dpsgd_have_effects_of_unknown_noise(tmp_path: Path) -> None:
    model = DPSGD(3.0, 1e-5, schema=SCHEMA, declared_size=3000, random_state=0).fit(customers(3000))
    opened = open_private(save_private(model, tmp_path / "model", dataset="customers"))
    rows = queries()
    assert np.array_equal(
        sums(opened.reasons(opened.encode(rows)), ("no", "yes"), 200),
        model._classifier.scores(model._queries(rows)),
    )
    assert model.reasons(rows).equals(opened.reasons(opened.encode(rows)))
    effects = opened.effects()
    assert effects.importance.equals(model.effects().importance)
    assert effects.importance["noise"].isna().all()
    assert effects.importance["importance"].iloc[0] > 0.0
    assert effects.to_json()["constant"]["noise"] is None
    assert "nan" not in "".join(curve_svg(effects, name) for name in effects.curves)


@pytest.mark.parametrize("classes", [2, 3])
def test_figures_are_valid_and_name_what_they_show(classes: int) -> None:
    frame, names = customers(1000), ("no", "<yes> & more", "maybe")[:classes]
    frame["bought"] = np.where(frame["bought"] == "no", "no", names[-1])
    cities = tuple("abcdefghijklmnopqr")
    schema = SCHEMA.updated({"classes": names, "categories": {"job": tuple("abcd"), "city": cities}})
    effects = PrivateHead(3.0, schema=schema, declared_size=1000, random_state=0).fit(frame).effects()
    for name, curve in effects.curves.items():
        root = ElementTree.fromstring(curve_svg(effects, name))
        texts = ["".join(each.itertext()) for each in root.findall(f"{SVG}text")]
        assert texts[0].startswith(name)
        assert ("<yes> & m…" in " ".join(texts)) == (classes == 3)
        numbers = "low" in curve
        assert len(root.findall(f"{SVG}polyline")) == (len(effects.shown) if numbers else 0)
        dots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in root.findall(f"{SVG}circle")]
        apart = curve["value"].eq("missing").sum() if numbers else min(len(curve), 12)
        assert len(dots) == len(effects.shown) * apart
        assert all(0 <= x <= 320 and 0 <= y <= 210 for x, y in dots)
        assert ("rarer values left out" in texts[0]) == (not numbers and len(curve) > 12)


def test_effects_are_those_of_the_population_at_50_000_rows_and_epsilon_1() -> None:
    frame = customers(50_000, seed=1)
    head = head_on(frame, epsilon=1.0)
    reasons = head.reasons(frame.head(20_000))
    importance = head.effects().importance.set_index("column")
    learned, known, clear = [], [], []
    for name, effect in truth(frame.head(20_000)).items():
        own = reasons.loc[reasons["column"] == name, "contribution to yes"].to_numpy()
        learned.append(own - own.mean())
        known.append(effect - effect.mean())
        if importance.loc[name, "importance"] > 2.0 * importance.loc[name, "noise"]:
            assert np.corrcoef(own, effect)[0, 1] >= 0.95, name
            clear.append(name)
    assert len(clear) >= 5
    assert np.corrcoef(np.concatenate(learned), np.concatenate(known))[0, 1] >= 0.95
    least = importance.loc[[*truth(frame.head(1))], "importance"].min()
    assert importance.loc[["visits", "code", "member × job"], "importance"].max() < 0.2 * least
