"""A forecast of a private head, before anything is spent: simulated from public numbers alone (THEORY 3.18).

Each simulation draws a table from the schema (independent columns of random shapes, or rows of a public sample), and
labels from a random additive model that is as strong as stated. It trains `PrivateHead` for every epsilon and number of
people. The best of these and of one head with many people and little noise stands for what is achievable; the others
show what privacy and fewer people cost. The private records are never read.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax.accounting.costs import GaussianCost, mu_of
from quietmax.accounting.guarantee import Guarantee, Strength
from quietmax.data.encoding import Encoding
from quietmax.data.records import Records
from quietmax.data.schema import Schema
from quietmax.data.sources import as_frame
from quietmax.data.tables import encode_table
from quietmax.errors import InvalidInput, as_number, checked_positive
from quietmax.estimators.head.estimator import PrivateHead

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
else:
    pd = lazy_module("pandas")

Floats = NDArray[np.float64]

EPSILONS = (0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
SIZES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""The numbers of people that are compared, as multiples of the planned one."""
FLAT, ENOUGH = 0.005, 0.01
"""Accuracy is flat if it is this close to that of the largest epsilon; people are enough if at most this is lost."""
MAJORITY_ERROR, ACHIEVABLE_ERROR = 0.01, 0.018
"""How well stated numbers are taken to be known: a half-width, and a standard deviation."""
MOST_CORRECTED = 0.8
"""Without `achievable`, models correct the share `0.8 u^3` of the majority's errors, with u uniform from 0 to 1."""
_CLEAR = 0.02
"""The share that survives is counted in simulations with at least this much above the majority."""
_MOST_ROWS, _TEST_ROWS, _FITTED_ROWS = 4096, 2048, 2048
"""Rows that are trained on (more people are simulated as so many with less noise), measured, and drawn labels fit."""
_MOST_ENTRIES = 2**27
_MOST_PEOPLE = 2**35
_LARGEST_EPSILON = EPSILONS[-1]
_STRONGEST = 64.0
_BINS = 15


class Interval(NamedTuple):
    """The mean of all simulations, and an interval that holds 90% of them."""

    expected: float
    low: float
    high: float

    def __str__(self) -> str:
        return "{:.3f} ({:.3f}-{:.3f})".format(*self)


@dataclass(frozen=True)
class Outlook:
    """What is expected of a head with one epsilon and one number of people."""

    epsilon: float
    people: int
    accuracy: Interval | None  # None if the majority is not stated
    survives: Interval | None  # the achievable share above the majority; None if little is achievable
    calibration_error: Interval
    max_guess: float  # how often a guess whether one person is in the data can be right at most
    strength: Strength  # what `max_guess` is called, see `Guarantee.strength`
    loss: float  # the accuracy that is expected to be lost to privacy and to few people


@dataclass(frozen=True)
class Forecast:
    """What `plan` returns: outlooks over epsilon and over the number of people, and what follows from them."""

    people: int
    epsilon: float
    delta: float
    majority: float | None
    achievable: float | None
    by_epsilon: tuple[Outlook, ...]
    by_people: tuple[Outlook, ...]
    flattens_at: float | None  # None if accuracy still rises at the largest epsilon
    enough_people: int | None  # None if more are needed than those in `by_people`
    grid: tuple[Outlook, ...] = ()  # each epsilon with each number of people, if `plan` was asked for them

    def to_json(self) -> dict[str, Any]:
        """Return the forecast as JSON values."""
        content = asdict(self)
        for outlook in (*content["by_epsilon"], *content["by_people"], *content["grid"]):
            for name, value in outlook.items():
                if isinstance(value, Interval):
                    outlook[name] = value._asdict()
        return {**content, "assumptions": self.assumptions}

    def to_html(self, title: str) -> str:
        """Return a page with sliders for epsilon and people, which needs `grid`; it fetches and allows nothing else."""
        if not self.grid:
            raise InvalidInput("A page requires a forecast with `grid`.")
        folder = Path(__file__).with_name("plan")
        page, style, script = (
            (folder / name).read_text("utf-8") for name in ("page.html", "page.css", "sliders.js")
        )
        found: dict[str, Any] = {"least": {"flat": FLAT, "enough": ENOUGH}}
        for name, other, rule in (("flat", "people", _flattens_at), ("enough", "epsilon", _enough)):
            places = sorted({getattr(each, other) for each in self.grid})
            found[name] = [
                rule([each for each in self.grid if getattr(each, other) == place]) for place in places
            ]
        return Template(page).substitute(
            title=escape(title),
            policy=f"default-src 'none'; base-uri 'none'; style-src {_hash(style)}; script-src {_hash(script)}",
            style=style,
            script=script,
            data=json.dumps({**self.to_json(), **found}).replace("<", "\\u003c"),
        )

    @property
    def assumptions(self) -> list[str]:
        """What was simulated, as sentences."""
        found = [
            "Labels follow columns that add up, apart from chance; nothing was read of the private records.",
            "Everybody has one row.",
        ]
        if self.majority is not None:
            found.append(
                f"The share of the most frequent class is within {MAJORITY_ERROR:g} of the stated one."
            )
        if self.achievable is None:
            found.append(
                f"Without privacy, a model corrects between none and {MOST_CORRECTED:.0%} of the errors of always "
                "naming the most frequent class; stating what is achievable narrows the intervals."
            )
        else:
            error = 1.645 * ACHIEVABLE_ERROR
            found.append(f"The stated achievable accuracy is right within {error:.3f} in 90% of cases.")
        return found

    @property
    def advice(self) -> list[str]:
        """What follows from the forecast, as sentences."""
        cost = f"of at most {ENOUGH:g} of accuracy at epsilon {self.epsilon:g}"
        return [
            f"Accuracy still rises at epsilon {self.by_epsilon[-1].epsilon:g} with {self.people:,} people."
            if self.flattens_at is None
            else f"Accuracy flattens at epsilon {self.flattens_at:g}: with {self.people:,} people, a larger one is "
            f"expected to add less than {FLAT:g}.",
            f"{self.enough_people:,} people are enough for a loss {cost}."
            if self.enough_people is not None
            else f"More than {self.by_people[-1].people:,} people are needed for a loss {cost}.",
        ]

    def figure(self) -> Figure:
        """Draw accuracy (or the share that survives) and the best guess of an adversary."""
        from matplotlib.figure import Figure

        drawn = Figure(figsize=(9, 4), layout="constrained")
        left, right = drawn.subplots(1, 2, sharey=True)
        shown = "accuracy" if self.majority is not None else "survives"
        for axes, outlooks, name in ((left, self.by_epsilon, "epsilon"), (right, self.by_people, "people")):
            known = [each for each in outlooks if getattr(each, shown) is not None]
            places = [getattr(each, name) for each in known]
            values = [getattr(each, shown) for each in known]
            axes.plot(places, [each.expected for each in values], "o-", label="expected")
            axes.fill_between(
                places, [each.low for each in values], [each.high for each in values], alpha=0.2, label="90%"
            )
            axes.set_xscale("log")
            axes.set_xlabel(name)
            if self.majority is not None:
                axes.axhline(self.majority, color="black", ls=":", label="most frequent class")
            if self.achievable is not None:
                axes.axhline(self.achievable, color="black", ls="--", label="without privacy, as stated")
        left.set_ylabel("accuracy" if shown == "accuracy" else "share of what is achievable that survives")
        guess = left.twinx()
        places = [each.epsilon for each in self.by_epsilon]
        guess.plot(places, [each.max_guess for each in self.by_epsilon], "--", color="tab:red")
        guess.set_ylabel("an adversary is right at most", color="tab:red")
        guess.set_ylim(0.5, 1.0)
        left.set_title(f"{self.people:,} people")
        right.set_title(f"epsilon {self.epsilon:g}")
        right.legend(loc="best")
        return drawn


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _flattens_at(outlooks: Sequence[Outlook]) -> float | None:
    """Return the epsilon above which accuracy is flat, of outlooks with rising epsilon."""
    flat = outlooks[-1].loss + FLAT
    return next((each.epsilon for each in outlooks[:-1] if each.loss <= flat), None)


def _enough(outlooks: Sequence[Outlook]) -> int | None:
    """Return the number of people from which on little is lost, of outlooks with rising numbers."""
    return next((each.people for each in outlooks if each.loss <= ENOUGH), None)


def plan(
    schema: Schema,
    people: int,
    *,
    epsilon: float = 1.0,
    delta: float = 1e-5,
    majority: float | None = None,
    achievable: float | None = None,
    sample: Any = None,
    epsilons: Sequence[float] = EPSILONS,
    sizes: Sequence[float] = SIZES,
    simulations: int = 30,
    seed: int = 0,
    grid: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Forecast:
    """Forecast how accurate a private head will be, before any budget is spent.

    The forecast is simulated from the arguments alone: it costs no privacy as long as these are public. It takes about
    half a minute.

    Parameters
    ----------
    schema : Schema
        What is public about the table. Columns of free text cannot be forecast.
    people : int
        How many people, or rows, the head will be trained on; from 10 up.
    epsilon : float
        The planned epsilon, for which the number of people varies.
    delta : float
        delta of the training.
    majority : float, optional
        The share of the most frequent class. Without it the forecast has no accuracy, but says how much of what is
        achievable above the majority survives.
    achievable : float, optional
        The accuracy of a model without privacy, such as a logistic regression on similar people. Without it a wide
        range is simulated, and intervals are wide.
    sample : DataFrame or other table, optional
        Public rows with the columns of the schema, whose distribution is used; labels in it are not.
    epsilons : sequence of float
        The epsilons that are compared.
    sizes : sequence of float
        The numbers of people that are compared, as multiples of the planned one.
    simulations : int
        Number of tables that are drawn; from 10 up.
    seed : int
        The same seed gives the same forecast.
    grid : bool
        Whether to simulate each epsilon with each number of people, for `Forecast.to_html`; four times as slow.
    progress : callable, optional
        Called with the number of simulations done, and of all.

    Returns
    -------
    Forecast
        `by_epsilon` and `by_people` have outlooks with `accuracy`, `survives` and `calibration_error` (each expected,
        low, high: a 90% interval) and `max_guess`, how often an adversary can be right at most who guesses whether a
        person is in the data. `flattens_at` and `enough_people` say which epsilon and how many people are enough;
        `figure()` draws them, `to_json()` returns them, `to_html(title)` makes a page with sliders.

    Raises
    ------
    InvalidInput
        If an argument is out of range, or the schema leaves something open.

    Examples
    --------
    >>> schema = Schema(label="ill", classes=("no", "yes"), bounds={"age": (0, 100)}, booleans=("smokes",))
    >>> found = plan(schema, 2000, majority=0.6, achievable=0.7, epsilons=(0.1, 1), sizes=(), simulations=10)
    >>> found.by_epsilon[0].accuracy.expected < found.by_epsilon[1].accuracy.expected
    True
    """
    encoding, rows = _described(schema, sample)
    _check(len(encoding.classes), people, majority, achievable, simulations)
    ordered = sorted({checked_positive(each, "epsilons") for each in epsilons} or {epsilon})
    factors = {checked_positive(each, "sizes") for each in sizes} or {1.0}
    counts = sorted({int(min(max(10, round(people * each)), _MOST_PEOPLE)) for each in factors})
    pairs = [*((people, each) for each in ordered), *((each, epsilon) for each in counts)]
    rows_of_grid = sorted({*counts, people}) if grid else []
    cells = [(size, each) for size in rows_of_grid for each in sorted({*ordered, epsilon})]
    pairs = list(dict.fromkeys([*pairs, *cells]))
    strengths = {each: mu_of(checked_positive(each, "epsilon"), delta) for _, each in pairs}
    little_noise = mu_of(_LARGEST_EPSILON, delta)
    most = max(1024, _MOST_ENTRIES // len(encoding.feature_names) - _TEST_ROWS)
    drawn = _Drawn(encoding, rows, min(_MOST_ROWS, most), majority, achievable)

    def simulate(number: int) -> Floats:
        table = _Simulation.draw(drawn, np.random.default_rng([seed, number]))
        found = [table.measure(size, strengths[each], delta, number) for size, each in pairs]
        lost = np.array([each[0] for each in found])
        best, _ = table.measure(max(people, len(table.train)), little_noise, delta, number)
        lost -= min([best, *(each for each, (size, _) in zip(lost, pairs, strict=True) if size == people)])
        gain = table.achievable - table.majority
        survives = 1.0 - lost / gain if gain >= _CLEAR else np.full(len(lost), math.nan)
        return np.array([table.achievable - lost, survives, [each[1] for each in found], lost])

    simulated = []
    for number in range(simulations):
        simulated.append(simulate(number))
        if progress is not None:
            progress(number + 1, simulations)
    outcomes = np.array(simulated)
    outlooks = {}
    for place, (size, each) in enumerate(pairs):
        accuracy, survives, calibration, lost = outcomes[:, :, place].T
        clear = survives[~np.isnan(survives)]
        claim = Guarantee.of(GaussianCost(strengths[each]), status="conditional", because="Planned.")
        outlooks[size, each] = Outlook(
            each,
            size,
            None if majority is None else _interval(accuracy),
            _interval(clear) if len(clear) >= simulations / 4 else None,
            _interval(calibration),
            claim.max_accuracy(),
            claim.strength,
            float(lost.mean()),
        )
    by_epsilon = tuple(outlooks[people, each] for each in ordered)
    by_people = tuple(outlooks[each, epsilon] for each in counts)
    flattens_at, enough = _flattens_at(by_epsilon), _enough(by_people)
    found = tuple(outlooks[cell] for cell in cells)
    return Forecast(
        people, epsilon, delta, majority, achievable, by_epsilon, by_people, flattens_at, enough, found
    )


def _interval(values: Floats) -> Interval:
    # The next value lies between these two with a probability of 90%, however few values there are.
    low, high = np.quantile(values, [0.05, 0.95], method="weibull")
    return Interval(float(values.mean()), float(low), float(high))


def _check(
    classes: int, people: object, majority: float | None, achievable: float | None, simulations: object
) -> None:
    for name, value, least in (("people", people, 10), ("simulations", simulations, 10)):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST_PEOPLE:
            raise InvalidInput(f"{name} must be an integer from {least} to 2^35, got {value!r}.")
    if majority is not None and not 1.0 / classes <= as_number(majority) < 1.0:
        raise InvalidInput(
            f"majority must be the share of the most frequent of {classes} classes, at least {1 / classes:.3g} and "
            f"below 1, got {majority!r}."
        )
    if achievable is not None and majority is None:
        raise InvalidInput("achievable requires `majority`, the share of the most frequent class.")
    if achievable is not None and majority is not None and not majority <= as_number(achievable) <= 1.0:
        raise InvalidInput(f"achievable must be from `majority` ({majority:g}) to 1, got {achievable!r}.")


def _described(schema: Schema, sample: Any) -> tuple[Encoding, Records | None]:
    """Return how rows of the table are encoded, and those of the sample."""
    if schema.label is None or schema.classes is None:
        raise InvalidInput("The schema must name the label column and the classes for a forecast.")
    texts = [name for name in schema.text if name not in schema.ignore]
    if texts:
        raise InvalidInput(
            f"Column '{texts[0]}' holds free text, for which there is no forecast: name it in `ignore` for a forecast "
            "from the other columns."
        )
    if sample is None:
        if "*" in schema.bounds:
            raise InvalidInput(
                "The schema declares the bounds of '*' and so does not say how many columns there are: name the "
                "columns, or give a public `sample`."
            )
        declared = (
            schema.bounds,
            schema.categories,
            schema.dates,
            schema.booleans,
            schema.hashed,
            schema.text,
        )
        frame = pd.DataFrame({name: [None] for names in declared for name in names}, index=[0])
    else:
        frame = as_frame(sample).copy()
        if not len(frame):
            raise InvalidInput("The `sample` must have at least one row.")
    unused = [name for name in (*schema.ignore, schema.person) if name]
    for name in unused:
        frame[name] = ""
    frame[schema.label] = schema.classes[0]
    records = encode_table(frame, replace(schema, person=None, ignore=tuple(unused)))
    assert records.encoding is not None
    return records.encoding, None if sample is None else records


# --- Simulated tables -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Simulation:
    """A table whose labels were drawn from a known model."""

    train: Records
    test: Records
    probabilities: Floats  # of the classes of the test rows
    majority: float
    achievable: float

    @classmethod
    def draw(cls, plan: _Drawn, generator: np.random.Generator) -> _Simulation:
        classes = len(plan.encoding.classes)
        features = plan.features(_TEST_ROWS + plan.rows, generator)
        scores = _random_scores(plan.encoding, features, generator)
        majority, achievable = plan.strength(generator)
        shares = np.full(classes, (1.0 - majority) / (classes - 1))
        shares[generator.integers(classes)] = majority
        probabilities = _with_strength(scores, shares, achievable)
        chosen = (probabilities.cumsum(axis=1) < generator.random((len(features), 1))).sum(axis=1)
        labels = np.minimum(chosen, classes - 1)
        records = Records("simulated", features, labels, classes, encoding=plan.encoding)
        train, test = np.arange(_TEST_ROWS, len(features)), np.arange(_TEST_ROWS)
        return cls(records.take(train), records.take(test), probabilities[:_TEST_ROWS], majority, achievable)

    def measure(self, people: int, mu: float, delta: float, seed: int) -> tuple[float, float]:
        """Train a head; return how much accuracy it loses to the model that drew the labels, and its ECE."""
        rows = min(people, len(self.train))
        head = PrivateHead(mu=mu * people / rows, delta=delta, random_state=seed)
        found = head.fit(self.train.take(np.arange(rows))).predict_proba(self.test.features)
        answers, confidence = found.argmax(axis=1), found.max(axis=1)
        right = self.probabilities[np.arange(len(found)), answers]
        bins = np.minimum((confidence * _BINS).astype(np.int64), _BINS - 1)
        gaps = np.bincount(bins, right - confidence, _BINS) / len(found)
        return float((self.probabilities.max(axis=1) - right).mean()), float(np.abs(gaps).sum())


def _random_scores(
    encoding: Encoding, features: NDArray[np.float32], generator: np.random.Generator
) -> Floats:
    """Return random sums over columns, (rows, classes): few columns matter much, and numbers have smooth effects."""
    classes = len(encoding.classes)
    scores = np.zeros((len(features), classes))
    start = 0
    for column in encoding.columns:
        width = len(column.feature_names)
        part = features[:, start : start + width].astype(np.float64)
        start += width
        effects = generator.normal(size=(width, classes))
        if column.is_share:
            values = part[:, 0]
            ranks = np.searchsorted(np.sort(values), values, side="left") / len(values)
            mixed = generator.random()
            places = mixed * values + (1 - mixed) * ranks
            wave = np.sin(2 * math.pi * (places * generator.uniform(0.3, 1.5) + generator.random()))
            found = np.outer(places, generator.normal(size=classes))
            found += 0.5 * np.outer(wave, effects[0])
            if column.missing:
                found += part[:, -1:] * effects[-1]
        else:
            found = part @ effects
        found -= found.mean(axis=0)
        spread = found.std()
        if spread > 0:
            scores += found * (math.exp(generator.normal(0.0, 1.5)) / spread)
    return scores / max(float(scores.std()), 1e-12)


def _with_strength(scores: Floats, shares: Floats, achievable: float) -> Floats:
    """Return the probabilities of the classes of a model with these class shares and this best accuracy."""
    low, high = 1.0 / _STRONGEST, _STRONGEST
    part = scores[:_FITTED_ROWS]
    for _ in range(12):
        middle = math.sqrt(low * high)
        best = _softmax(middle * part + _intercepts(middle * part, shares)).max(axis=1).mean()
        low, high = (middle, high) if best < achievable else (low, middle)
    return _softmax(high * scores + _intercepts(high * part, shares))


def _intercepts(scores: Floats, shares: Floats) -> Floats:
    """Return what must be added to scores for classes with these shares."""
    found = np.log(shares)
    # Newton's steps, each class alone; shorter and shorter, as steep scores have no slope
    for longest in 8.0 / np.arange(1, 21):
        given = _softmax(scores + found)
        slopes = np.maximum((given * (1.0 - given)).mean(axis=0), 1e-3)
        found = found + np.clip((shares - given.mean(axis=0)) / (2.0 * slopes), -longest, longest)
    return found


def _softmax(scores: Floats) -> Floats:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


@dataclass(frozen=True, eq=False)
class _Drawn:
    """What a simulation is drawn from: public numbers alone."""

    encoding: Encoding
    sample: Records | None
    rows: int
    majority: float | None
    achievable: float | None

    def features(self, rows: int, generator: np.random.Generator) -> NDArray[np.float32]:
        """Draw encoded rows: independent columns of random shapes, or rows of the sample."""
        if self.sample is not None:
            return self.sample.features[generator.integers(len(self.sample), size=rows)]
        features = np.zeros((rows, len(self.encoding.feature_names)), np.float32)
        start, every = 0, np.arange(rows)
        for column in self.encoding.columns:
            values = len(column.feature_names) - column.missing
            if column.is_share:
                first, second = np.exp(generator.uniform(-0.7, 2.0, 2))
                shares = generator.beta(first, second, rows)
                if generator.random() < 0.25:
                    shares[generator.random(rows) < generator.uniform(0.3, 0.95)] = 0.0
                features[:, start] = shares
            else:
                weights = np.exp(generator.normal(0.0, 1.2, values))
                features[every, start + generator.choice(values, rows, p=weights / weights.sum())] = 1.0
            if column.missing and generator.random() < 0.3:
                absent = generator.random(rows) < generator.uniform(0.0, 0.2)
                features[absent, start : start + values] = 0.0
                features[absent, start + values] = 1.0
            start += values + column.missing
        return features

    def strength(self, generator: np.random.Generator) -> tuple[float, float]:
        """Draw the share of the most frequent class and the accuracy of the best model."""
        least = 1.0 / len(self.encoding.classes)
        if self.majority is None:
            majority = generator.uniform(least, 0.95)
        else:
            majority = self.majority + generator.uniform(-MAJORITY_ERROR, MAJORITY_ERROR)
        majority = min(max(majority, least), 0.999)
        if self.achievable is None:
            best = majority + (1.0 - majority) * MOST_CORRECTED * float(generator.random()) ** 3
        else:
            best = generator.normal(self.achievable, ACHIEVABLE_ERROR)
        return majority, min(max(best, majority + 1e-3), 0.999)
