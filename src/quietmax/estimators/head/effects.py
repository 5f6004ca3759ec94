"""What a released model of a table says about each column: effects, importances, and the reasons of one answer.

The score of a class is a sum of one number per column (`TableWeights`), so all of this is post-processing of what
training has released (THEORY 3.16). How many people are in a cell is known from the released centre alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax.data.encoding import CategoricalColumn, Column, Encoding
from quietmax.errors import InvalidInput
from quietmax.estimators.blocks import Floats
from quietmax.estimators.head.tables import normalised, parts_of
from quietmax.estimators.head.weights import TableWeights
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.tabular import CROSSED_LEVELS, TableCells
from quietmax.predictor import Predictor

if TYPE_CHECKING:
    import pandas as pd

else:
    pd = lazy_module("pandas")

CONSTANT = "(constant)"
MISSING = "missing"


@dataclass(frozen=True, eq=False)
class Effects:
    """What a released head on a table says about each column.

    The score of a class is the constant plus the effect of the row's value in each column (and cross); the probability
    of a class grows with its score. With two classes the effects on one are the negatives of those on the other. The
    effects of a column average 0 over the released shares of people, those of a cross for every value of either column,
    as if the two were independent: a cross has only what the sum of its columns lacks.

    Parameters
    ----------
    classes : tuple of str
        The classes.
    constant : DataFrame
        One row: ``noise``, and ``effect on C`` for every class C.
    importance : DataFrame
        One row per column, the most important first: ``column``, ``importance`` (mean absolute effect over the released
        shares of people and over the classes), and ``noise`` (the mean of that in the effects). An importance that is
        not above its noise says nothing.
    curves : mapping of str to DataFrame
        For each column, in the same order, one row per category or interval: ``value``; for numbers and dates also
        ``low`` and ``high``; ``share`` (of people, released with noise), ``noise`` (standard deviation of the noise in
        the effects, at most; NaN for DP-SGD, where no such bound is known), and ``effect on C`` for every class C. A
        cross is called ``A × B``.
    """

    classes: tuple[str, ...]
    constant: pd.DataFrame
    importance: pd.DataFrame
    curves: Mapping[str, pd.DataFrame]

    @property
    def shown(self) -> tuple[str, ...]:
        """The classes whose effects must be shown: of two the second one, as the others are its negatives."""
        return self.classes[-1:] if len(self.classes) == 2 else self.classes

    def summary(self, column: str, rows: int = 16) -> pd.DataFrame:
        """Return the curve of a number or date in at most so many intervals, other curves as they are.

        Shares are added, effects and noise averaged over people; the noise in a mean is no more than the mean.
        """
        curve = self.curves[column]
        if "low" not in curve or len(curve) <= rows + 1:
            return curve
        whole = curve[curve["value"] != MISSING]
        found = []
        for start, end in pairwise(np.linspace(0, len(whole), rows + 1).astype(int)):
            part = whole.iloc[start:end]
            low, high, share = part["low"].iloc[0], part["high"].iloc[-1], part["share"]
            means = {
                name: float(normalised(share.to_numpy()) @ part[name])
                for name in part
                if name not in ("value", "low", "high", "share")
            }
            named = f"{_text(low)} to {_text(high)}"
            found.append({"value": named, "low": low, "high": high, "share": share.sum(), **means})
        return pd.concat([pd.DataFrame(found), curve[curve["value"] == MISSING]], ignore_index=True)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "classes": list(self.classes),
            "constant": _records(self.constant)[0],
            "importance": _records(self.importance),
            "curves": {name: _records(curve) for name, curve in self.curves.items()},
        }


def _records(frame: Any) -> list[dict[str, Any]]:
    columns = [np.asarray(frame[name], dtype=object).tolist() for name in frame]
    rows = ([None if cell != cell else cell for cell in row] for row in zip(*columns, strict=True))
    return [dict(zip(frame, row, strict=True)) for row in rows]


# --- Effects ----------------------------------------------------------------------------------------------------------


PAID = "Effects and reasons are not offered for this model: its answers are paid one by one."
NOT_ADDITIVE = (
    "Effects and reasons are offered for heads and linear DP-SGD models of a table with a schema, without columns of "
    "text: only their scores are sums over columns. What another released model has to show is its weights."
)


@dataclass(frozen=True, eq=False)
class Additive:
    """A head whose score is a sum over the columns of a table, with the names of its columns and cells."""

    weights: TableWeights
    cells: TableCells
    encoding: Encoding
    classes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        classifier: object,
        features: FeatureMap | None,
        encoding: Encoding | None,
        classes: Iterable[Any],
    ) -> Additive:
        """Return the head; any other model is an error that says what there is instead."""
        if isinstance(classifier, Predictor):
            raise InvalidInput(PAID)
        if (
            not isinstance(classifier, TableWeights)
            or not isinstance(features, TableCells)
            or encoding is None
        ):
            raise InvalidInput(NOT_ADDITIVE)
        return cls(classifier, features, encoding, tuple(map(str, classes)))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns and crosses, in the order in which a score adds them to the constant."""
        names = [column.name for column in self.encoding.columns]
        return (*names, *(f"{names[one]} × {names[other]}" for one, other in self.cells.crosses))

    @property
    def summands(self) -> tuple[str, ...]:
        """The constant and what is added to it."""
        return (CONSTANT, *self.columns)

    def values(self, place: int) -> list[str | None]:
        """Return what each cell of a column or cross stands for; None for a cell that no row has."""
        count = len(self.cells.parts)
        if place < count:
            return _values(self.encoding.columns[place], self._levels(place, self.cells.levels))
        one, other = self.cells.crosses[place - count]
        first, second = (
            _values(self.encoding.columns[each], self._levels(each, CROSSED_LEVELS)) for each in (one, other)
        )
        return [None if None in (a, b) else f"{a} × {b}" for a in first for b in second]

    def _levels(self, position: int, levels: int) -> int | None:
        return levels if position in self.cells.numbers else None

    def effects(self) -> Effects:
        """Return constant, importances and effects."""
        return self._effects(pd.DataFrame)

    def to_json(self) -> dict[str, Any]:
        """Return the effects as JSON values, without pandas."""
        return self._effects(dict).to_json()

    def _effects(self, frame: Callable[[dict[str, Any]], Any]) -> Effects:
        sizes, shares, weights = self.weights.sizes, self.weights.centre, self.weights.weights
        noise = np.full(len(shares) + 1, np.nan) if self.weights.noise is None else self.weights.noise
        curves, rows = {}, []
        for place, (name, part) in enumerate(zip(self.columns, parts_of(sizes), strict=True)):
            effects, people = weights[:, part], normalised(shares[part])
            rows.append((name, float((np.abs(effects) @ people).mean()), float(noise[part] @ people)))
            curves[name] = frame(self._curve(place, people, noise[part], effects))
        rows.sort(key=lambda row: -row[1])
        constant = {"noise": noise[-1:], **self._named(weights[:, -1:])}
        importance = dict(zip(("column", "importance", "noise"), zip(*rows, strict=True), strict=True))
        ordered = {name: curves[name] for name, _, _ in rows}
        return Effects(self.classes, frame(constant), frame(importance), ordered)

    def _named(self, effects: Floats) -> dict[str, Floats]:
        return {f"effect on {name}": line for name, line in zip(self.classes, effects, strict=True)}

    def _curve(self, place: int, people: Floats, noise: Floats, effects: Floats) -> dict[str, Any]:
        values = self.values(place)
        found: dict[str, Any] = {"value": values}
        if place in self.cells.numbers:
            borders = _borders(self.encoding.columns[place], self.cells.levels)
            found |= {"low": [*borders[:-1], None], "high": [*borders[1:], None]}
        found |= {"share": people, "noise": noise, **self._named(effects)}
        shown = [place for place, value in enumerate(values) if value is not None]
        return {name: [column[place] for place in shown] for name, column in found.items()}

    def contributions(self, records: NDArray[np.float32]) -> Floats:
        """Return what the constant and each column add to the scores of encoded rows: (rows, columns + 1, classes)."""
        return self.weights.summands(self.cells.transform(records))

    def reasons(self, records: NDArray[np.float32]) -> pd.DataFrame:
        """Return the contributions to the scores of encoded rows as a frame."""
        contributions, indices = self.contributions(records), self.cells.transform(records).astype(np.intp)
        values: list[Any] = [np.full(len(indices), "")]
        for place in range(len(self.columns)):
            values.append(np.array(self.values(place), dtype=object)[indices[:, place]])
        count = len(self.summands)
        return pd.DataFrame(
            {
                "row": np.repeat(np.arange(len(indices)), count),
                "column": np.tile(np.array(self.summands, dtype=object), len(indices)),
                "value": np.stack(values, axis=1).ravel(),
                **{
                    f"contribution to {name}": contributions[:, :, number].ravel()
                    for number, name in enumerate(self.classes)
                },
            }
        )


def _borders(column: Column, levels: int) -> list[Any]:
    return [column.value_at(number / levels) for number in range(levels + 1)]


def _values(column: Column, levels: int | None) -> list[str | None]:
    if levels is not None:
        named = [f"{_text(low)} to {_text(high)}" for low, high in pairwise(_borders(column, levels))]
        return [*named, MISSING if column.missing else None]
    found = [*column.indicated, *([MISSING] if column.missing else [])]
    if isinstance(column, CategoricalColumn):
        return [*found, "not listed" if column.missing else "not listed or missing"]
    return [*found, None if column.missing else MISSING]


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


class SaysEffects:
    """What `PrivateHead` and `DPSGD` say of a model whose scores are sums over the columns of a table."""

    _classifier: Any
    feature_map_: Any
    encoding_: Encoding | None
    classes_: NDArray[Any]

    def effects(self) -> Effects:
        """Return what a released model of a table says about each column; it costs nothing.

        Returns
        -------
        Effects
            Importances, and for each column a frame of effects with their noise.

        Raises
        ------
        InvalidInput
            If the score is not a sum over the columns of a table, or if answers are paid for one by one.
        """
        return self._additive().effects()

    def reasons(self, X: Any) -> pd.DataFrame:
        """Return what each column contributed to the scores of rows of a table; it costs nothing.

        Parameters
        ----------
        X : data frame
            Queries, as for `predict`.

        Returns
        -------
        DataFrame
            For each row the constant, then its columns and crosses: ``row``, ``column``, ``value`` and ``contribution
            to C`` for every class C. Added one after the other, in this order, the contributions to a class are its
            score, to the last bit.
        """
        from quietmax.estimators.training_set import queries

        additive = self._additive()
        return additive.reasons(queries(self, X))

    def _additive(self) -> Additive:
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self)
        return Additive.of(self._classifier, self.feature_map_, self.encoding_, self.classes_)


# --- Figures ----------------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM, _PEOPLE = 320, 210, 52, 312, 30, 126, 156
"""The size of a figure, where its effects are, and where the bars of people, which are underneath, end."""
_MISSING_WIDTH = 24
_COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#cf222e", "#6e7781")
_MOST_CATEGORIES, _MOST_BARS, _LONGEST_NAME = 12, 32, 10
_Slot = tuple[float, float]


def curve_svg(effects: Effects, column: str) -> str:
    """Return the effects of a column as an SVG figure: a band of two deviations of noise, people underneath."""
    curve = effects.curves[column]
    numbers = "low" in curve
    shown = curve if numbers else curve.loc[curve["share"].nlargest(_MOST_CATEGORIES).index.sort_values()]
    continuous = int((shown["value"] != MISSING).sum()) if numbers else 0
    slots, limit = _slots(len(shown), continuous), _limit(effects)

    def _heights(values: Floats) -> list[float]:
        middle = (_TOP + _BOTTOM) / 2.0
        return list(middle - np.clip(values / limit, -1.0, 1.0) * (_BOTTOM - middle))

    parts = [*_frame(effects, column, limit, len(curve) - len(shown)), *_people(shown, slots, continuous)]
    for name, colour in zip(effects.shown, _COLOURS, strict=False):
        values, noise = shown[f"effect on {name}"].to_numpy(), 2.0 * shown["noise"].fillna(0.0).to_numpy()
        heights, tops, feet = _heights(values), _heights(values + noise), _heights(values - noise)
        if continuous:
            steps, above, below = (_steps(slots[:continuous], each) for each in (heights, tops, feet))
            parts.append(
                f'<polygon points="{_points([*above, *below[::-1]])}" fill="{colour}" opacity=".2"/>'
            )
            parts.append(
                f'<polyline points="{_points(steps)}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            )
        for place in range(continuous, len(shown)):
            x = sum(slots[place]) / 2.0
            line = f'd="M{x:.1f} {tops[place]:.1f}V{feet[place]:.1f}" stroke="{colour}" stroke-width="3"'
            parts.append(f'<path {line} opacity=".4"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{heights[place]:.1f}" r="3" fill="{colour}"/>')
    parts += _values_below(shown, slots, continuous)
    described = escape(f"Effects of {column} on {', '.join(effects.shown)}, and shares of people")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" role="img" aria-label="{described}" font-family="system-ui, sans-serif" font-size="12" '
        f'fill="currentColor">{"".join(parts)}</svg>'
    )


def _limit(effects: Effects) -> float:
    names = [f"effect on {name}" for name in effects.shown]
    found = 1e-9
    for curve in effects.curves.values():
        ends = curve[names].abs().max(axis=1) + 2.0 * curve["noise"].fillna(0.0)
        found = max(found, float(ends[curve["share"] > 0.0].max()))
    return found


def _slots(count: int, continuous: int) -> list[_Slot]:
    """Return the places of values: of intervals one after the other, of a missing value apart, of categories apart."""
    end = _RIGHT - (_MISSING_WIDTH if 0 < continuous < count else 0)
    borders = np.linspace(_LEFT, end, (continuous or count) + 1).tolist()
    slots = [*pairwise(borders)]
    return [*slots, *([(end + 6.0, float(_RIGHT))] if len(slots) < count else [])]


def _steps(slots: Sequence[_Slot], heights: Sequence[float]) -> list[tuple[float, float]]:
    return [(x, height) for slot, height in zip(slots, heights, strict=False) for x in slot]


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _frame(effects: Effects, column: str, limit: float, left_out: int) -> Iterator[str]:
    more = f" ({left_out} rarer values left out)" if left_out else ""
    yield f'<text x="{_LEFT}" y="12" font-weight="600">{escape(_short(column, 30))}{more}</text>'
    middle = (_TOP + _BOTTOM) / 2
    for y, value in ((_TOP, limit), (middle, 0.0), (_BOTTOM, -limit)):
        yield f'<text x="{_LEFT - 5}" y="{y + 4:.0f}" text-anchor="end">{f"{value:+.2g}" if value else 0}</text>'
    yield f'<path d="M{_LEFT} {middle:.1f}H{_RIGHT}" stroke="currentColor" opacity=".4"/>'
    if len(effects.shown) > 1:
        spans = zip(effects.shown, _COLOURS, strict=False)
        names = "".join(
            f'<tspan fill="{colour}" dx="6">{escape(_short(name))}</tspan>' for name, colour in spans
        )
        yield f'<text x="{_LEFT}" y="24">{names}</text>'


def _people(shown: pd.DataFrame, slots: Sequence[_Slot], continuous: int) -> Iterator[str]:
    """Yield a bar for the share of people of each value, or of several intervals together, and what it means."""
    shares, first = shown["share"].to_numpy(), [*range(len(shown))]
    if continuous > _MOST_BARS:
        first = [*range(0, continuous, continuous // _MOST_BARS), *range(continuous, len(shown))]
        shares = np.add.reduceat(shares, first)
    slots = [(slots[one][0], slots[next_one - 1][1]) for one, next_one in pairwise([*first, len(shown)])]
    tallest = max(float(shares.max()), 1e-12)
    for (start, end), share in zip(slots, shares, strict=True):
        height = 24.0 * share / tallest
        place = f'x="{start:.1f}" y="{_PEOPLE - height:.1f}" width="{max(end - start - 0.5, 0.5):.1f}"'
        yield f'<rect {place} height="{height:.1f}" opacity=".35"/>'
    yield f'<text x="{_LEFT - 5}" y="{_PEOPLE}" text-anchor="end">people</text>'


def _values_below(shown: pd.DataFrame, slots: Sequence[_Slot], continuous: int) -> Iterator[str]:
    """Yield the names of categories, or the ends and the middle of the intervals, and that a value is missing."""
    names = shown["value"].tolist()
    if continuous:
        for place, anchor in ((0, "start"), (continuous // 2, "middle"), (continuous, "end")):
            value = shown["low"].iloc[place] if place < continuous else shown["high"].iloc[place - 1]
            x = slots[place][0] if place < continuous else slots[place - 1][1]
            name = escape(_text(value))
            yield f'<text x="{x:.1f}" y="{_PEOPLE + 15}" text-anchor="{anchor}">{name}</text>'
    for place in range(continuous, len(shown)):
        x = sum(slots[place]) / 2.0
        y = _PEOPLE + (28 if continuous else 14)
        turned = f'transform="rotate(-30 {x:.1f} {y})" text-anchor="end"'
        yield (
            f'<text x="{x:.1f}" y="{y}" {turned}>{escape(_short(names[place]))}'
            f"<title>{escape(names[place])}</title></text>"
        )


def _short(name: str, longest: int = _LONGEST_NAME) -> str:
    return name if len(name) <= longest else f"{name[: longest - 1]}…"
