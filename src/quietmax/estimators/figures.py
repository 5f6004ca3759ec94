"""What an evaluation counts, the figures that follow, and their intervals (THEORY 3.9); how a model answers by costs.

Two or three tables are released, with noise of the same size in every cell: true class by predicted class; for two
classes bins of the score by true class, for more bins of confidence by right or wrong; with groups, group by true class
by right or wrong by *mass*: of two classes, a row adds its score ``p`` to one cell and ``1 - p`` to its neighbour, so
that a group's mean score is known without bins; of more classes, its confidence.

What several tables state is averaged, weighted by the inverse of the variance. Answers that are counted on one side of
a ratio are never counted on the other, so the noise of the two sides is independent. The cells of a row follow from
that row and from public settings alone (THEORY 3.8), and what one person adds to a table has no negative entry and a
sum of at most 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from quietmax.accounting.guarantee import Guarantee, Unit
from quietmax.data.encoding import BooleanColumn, CategoricalColumn, Column, Encoding, NumericColumn, quoted
from quietmax.errors import InvalidInput

Costs = tuple[tuple[float, ...], ...]
"""The cost of an answer by true class (rows) and predicted class (columns); 0 on the diagonal. The answer is the class
of the lowest expected cost, of two classes a threshold: post-processing of released probabilities."""
LEAST_THRESHOLD = 1e-9
NOT_TOO_CLOSE = f"; at least {LEAST_THRESHOLD:g} away from both"


def costs_of(
    classes: Sequence[object],
    threshold: Mapping[Any, float] | None = None,
    cost: Mapping[tuple[Any, Any], float] | None = None,
) -> Costs | None:
    """Return the costs of errors that a threshold stands for, or those given (1 for each not named), or None."""
    names = [str(name) for name in classes]
    if threshold and cost:
        raise InvalidInput("Only one of `threshold` and `cost` can be given.")
    for name in [*(threshold or ()), *(each for pair in cost or () for each in pair)]:
        if str(name) not in names:
            raise InvalidInput(f"There is no class {str(name)!r}; the classes are {quoted(names)}.")
    if threshold:
        if len(names) != 2 or len(threshold) != 1:
            raise InvalidInput(
                "`threshold` names one of two classes and its least probability, as in yes=0.3. Models of more classes "
                "take costs."
            )
        ((name, least),) = threshold.items()
        if not is_threshold(least):
            raise InvalidInput(f"A threshold must be between 0 and 1, got {least}{NOT_TOO_CLOSE}.")
        second = least if str(name) == names[1] else 1 - least
        return ((0.0, second), (1 - second, 0.0))
    return _costs_of_errors(names, cost) if cost else None


def _costs_of_errors(names: list[str], cost: Mapping[tuple[Any, Any], float]) -> Costs:
    table = 1.0 - np.eye(len(names))
    for (true, predicted), number in cost.items():
        if str(true) == str(predicted) or not 0 < number < math.inf:
            raise InvalidInput(
                f"A cost must be a positive number for an answer that is wrong, got {number} for {true!r} answered as "
                f"{predicted!r}."
            )
        table[names.index(str(true)), names.index(str(predicted))] = number
    costs = tuple(map(tuple, table.tolist()))
    if len(names) == 2 and not is_threshold(threshold_of(costs)):
        raise InvalidInput(f"One cost may be at most {1 / LEAST_THRESHOLD:g} times the other.")
    return costs


def checked_costs(stored: Any, classes: int) -> Costs | None:
    """Return costs that were stored as JSON; raise ValueError if they are none."""
    if stored is None:
        return None
    table = np.array(stored, dtype=np.float64)
    wrong = ~np.eye(classes, dtype=bool)
    if table.shape != (classes, classes) or table[~wrong].any() or not np.isfinite(table).all():
        raise ValueError("not a table of costs")
    if not (table[wrong] > 0).all():
        raise ValueError("costs must be positive")
    costs = tuple(map(tuple, table.tolist()))
    if classes == 2 and not is_threshold(threshold_of(costs)):
        raise ValueError("one cost is too large beside the other")
    return costs


def is_threshold(probability: float) -> bool:
    """Return whether a probability is far enough from 0 and 1 to be a threshold."""
    return LEAST_THRESHOLD <= probability <= 1.0 - LEAST_THRESHOLD


def threshold_of(costs: Costs | None) -> float:
    """Return the probability above which the second of two classes is the answer."""
    return 0.5 if costs is None else round(costs[0][1] / (costs[0][1] + costs[1][0]), 12)


def decided(probabilities: NDArray[np.float64], costs: Costs | None) -> NDArray[np.int64]:
    """Return the class of each row, from the probabilities of that row alone."""
    if costs is None:
        return np.asarray(probabilities.argmax(-1), dtype=np.int64)
    if len(costs) == 2:
        return (probabilities[:, 1] > threshold_of(costs)).astype(np.int64)
    expected = sum(probabilities[:, [true]] * np.array(row) for true, row in enumerate(costs))
    return np.asarray(np.argmin(expected, axis=1), dtype=np.int64)


def decision_in_words(costs: Costs | None, classes: Sequence[object]) -> str:
    """Return how a model answers, as a phrase."""
    if costs is None:
        return "the most probable class"
    if len(costs) == 2:
        return f"{classes[1]} if its probability is above {threshold_of(costs):.4g}, otherwise {classes[0]}"
    named = ", ".join(
        f"{classes[true]} answered as {classes[predicted]} {cost:.4g}"
        for true, row in enumerate(costs)
        for predicted, cost in enumerate(row)
        if predicted != true and cost != 1
    )
    return f"the class with the lowest expected cost ({named}; any other error 1)"


Composition = Literal["parallel", "sequential"]
Floats = NDArray[np.float64]

NOT_FOR_PUBLICATION = (
    "Not for publication: computed from private records without noise, so no guarantee covers it."
)
BINS = 5
EDGES = (0.0, 0.01, 0.03, 0.06, 0.12, 0.2, 0.35, 0.5, 0.65, 0.8, 0.88, 0.94, 0.97, 0.99, 1.0)
"""The edges of the bins of the score, narrow where a rare class has its scores. A bin contains its upper edge."""
_WIDE = (0.0, 0.06, 0.2, 0.5, 0.8, 0.94, 1.0)
CONFIDENCE = 0.95
"""Every interval covers the true value with this probability, each on its own."""
_SIZE_ERROR = 0.002
"""The part of 1 - CONFIDENCE that is left for the bound on a noisy number of people."""
_Z_SIZE = float(ndtri(1 - _SIZE_ERROR))
_Z = float(ndtri(1 - (1 - CONFIDENCE - _SIZE_ERROR) / 2))
_Z_COUNT = float(ndtri((1 + CONFIDENCE) / 2))
_CONTINUITY = 0.5
_STEPS = 4001
"""The number of values that are tested for the interval of an area or a mean."""


def sensitivity(tables: int) -> float:
    """Return the L2 length of what one person adds to the tables, at most 1 to each, rounded up."""
    return math.nextafter(math.sqrt(tables), tables)


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval, which covers sampling and noise.

    >>> print(Estimate(0.8612, 0.8531, 0.8689))
    0.861 (0.853 to 0.869)
    """

    value: float | None  # None: the counts are too small for the noise, so nothing is known
    low: float  # The 95% interval of the true value
    high: float

    def __str__(self) -> str:
        if self.value is None:
            return "unknown"
        if self.value == self.low == 0:
            return f"below {math.ceil(1000 * self.high) / 1000:.3f}"
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"

    def in_people(self) -> str:
        """Return an estimate of a number of people as text."""
        return f"{self.value:,.0f} ({self.low:,.0f} to {self.high:,.0f})"


def _ratio(right: float, wrong: float, right_noise: float, wrong_noise: float) -> Estimate:
    """Estimate the share of right answers from two noisy counts, with an interval that is honest for small counts.

    It contains each share p that a test does not reject: ``right - p (right + wrong)`` has mean 0 and at most the
    variance ``n p (1 - p) + (1 - p)^2 s_r^2 + p^2 s_w^2`` (Wilson's interval, Fieller's terms for the noise), where
    n is an upper bound that holds with probability 0.998. A continuity correction of half a person keeps the interval
    valid for few people and for shares near 0 and 1. People with several rows add fractions, which vary no more.
    """
    size = right + wrong
    right_variance, wrong_variance = right_noise**2, wrong_noise**2
    at_most = max(size, 0.0) + _Z_SIZE * math.sqrt(right_variance + wrong_variance)
    square = size**2 + _Z**2 * (at_most - right_variance - wrong_variance)
    ends = []
    for side, count, noise in ((-1, right, right_noise), (1, wrong, wrong_noise)):
        shifted = right + side * _CONTINUITY
        half = shifted * size + _Z**2 * (at_most / 2 - right_variance)
        under_root = half**2 - square * (shifted**2 - _Z**2 * right_variance)
        if size <= 0 or square <= 0 or under_root < 0:
            return Estimate(None, 0.0, 1.0)
        if count - _CONTINUITY <= _Z * noise:  # so few that none at all is not rejected
            ends.append(float(side > 0))
        else:
            ends.append(min(max((half + side * math.sqrt(under_root)) / square, 0.0), 1.0))
    low, high = ends
    if low <= 0 and high >= 1:
        return Estimate(None, 0.0, 1.0)
    return Estimate(min(max(right / size, low), high), low, high)


def _tested(value: float, ends: tuple[float, float], kept: NDArray[np.bool_]) -> Estimate:
    """Return the estimate whose interval spans the candidates between two ends that a test keeps, one step wider."""
    low, high = ends
    nothing = Estimate(None, low, high)
    if not kept.any() or not math.isfinite(value):
        return nothing
    step = (high - low) / (len(kept) - 1)
    first, last = np.flatnonzero(kept)[[0, -1]]
    found = max(low + (first - 1) * step, low), min(low + (last + 1) * step, high)
    return nothing if found == ends else Estimate(min(max(value, found[0]), found[1]), *found)


def _mean(values: Floats, counts: Floats, noise: float) -> Estimate:
    """Estimate the mean of a bounded value, which every cell of a table has for all of its people.

    ``sum_i n_i (v_i - m)`` has mean 0 for the true mean m, and at most the variance of the noise and of the people: the
    noisy counts that are positive, and one person with the value farthest from m. The correction is half that person.
    """
    ends = float(values.min()), float(values.max())
    size, spread = float(counts.sum()), noise * math.sqrt(counts.size)
    if size <= _Z * spread or size <= 1:
        return Estimate(None, *ends)
    means = np.linspace(*ends, _STEPS)
    squares = (values.ravel()[:, None] - means) ** 2
    statistic = np.abs((values * counts).sum() - size * means)
    variance = (np.maximum(counts.ravel(), 0) + noise**2) @ squares + squares.max(0)
    kept = statistic - _CONTINUITY * np.sqrt(squares.max(0)) <= _Z * np.sqrt(variance)
    return _tested(float((values * counts).sum() / size), ends, kept)


def _area(second: Floats, first: Floats, noise: float) -> Estimate:
    """Estimate the area under the ROC curve from noisy counts of two classes by bin of the score, the lowest first.

    ``sum_ba n_b m_a (w_ba - A)``, with w of 1, 1/2 or 0, has mean 0 for the true area A, as the noise of the classes is
    independent. Its variance is that of the noise and of the people (DeLong, DeLong and Clarke-Pearson 1988; for few
    people at least that of Hanley and McNeil 1982).
    """
    sizes = float(second.sum()), float(first.sum())
    margin = _Z * noise * math.sqrt(len(second))
    if min(sizes) <= max(margin, 1.0):
        return Estimate(None, 0.0, 1.0)
    wins = (np.tri(len(second)) + np.tri(len(second), k=-1)) / 2
    areas = np.linspace(0, 1, _STEPS)
    of_second = (wins @ first)[:, None] - sizes[1] * areas
    of_first = (second @ wins)[:, None] - sizes[0] * areas
    by_people = np.maximum(second, 0) @ of_second**2 + np.maximum(first, 0) @ of_first**2
    above, below = areas / (2 - areas), 2 * areas**2 / (1 + areas)
    by_people = np.maximum(
        by_people,
        sizes[0]
        * sizes[1]
        * (areas * (1 - areas) + (sizes[0] - 1) * (above - areas**2) + (sizes[1] - 1) * (below - areas**2)),
    )
    pairs = ((wins.ravel()[:, None] - areas) ** 2).sum(0)
    by_noise = noise**2 * ((of_second**2).sum(0) + (of_first**2).sum(0)) + noise**4 * pairs
    value = float(second @ wins @ first) / (sizes[0] * sizes[1])
    statistic = np.abs(value - areas) * sizes[0] * sizes[1] - _CONTINUITY * max(sizes)
    return _tested(value, (0.0, 1.0), statistic <= _Z * np.sqrt(by_people + by_noise))


@dataclass(frozen=True)
class Bin:
    """The rows whose probability lies in one interval."""

    low: float  # Of the second class's probability; for more than two classes, the answer's
    high: float
    share: Estimate  # The share of the second class; for more than two, of right answers


@dataclass(frozen=True)
class Point:
    """How a model of two classes answers at one threshold: a point of the ROC and of the precision-recall curve."""

    threshold: float  # The second class is the answer if its probability is above
    recall: Estimate  # The share of the second class that is found (the true-positive rate)
    false_alarms: Estimate  # Of the first class, answered as the second (false-positive rate)
    precision: Estimate  # The share of the second class among these answers


@dataclass(frozen=True)
class GroupCounts:
    """Noisy counts by group."""

    column: str  # The column that says who is in which group
    names: tuple[str, ...]
    counts: tuple[tuple[tuple[tuple[float, float], tuple[float, float]], ...], ...]  # see `figures`


@dataclass(frozen=True)
class Group:
    """The figures of one group of people; unknown if the group is too small for the noise."""

    name: str
    size: Estimate
    accuracy: Estimate
    recall: dict[str, Estimate]
    # The mean probability of the second class minus its share; for more than two classes, the mean probability of the
    # answer minus the share of right ones. 0: right on average. Above 0: the model expects more than there is.
    excess: Estimate


@dataclass(frozen=True)
class Evaluation:
    """How good a model is, from noisy counts: publishable, with a guarantee for the people who were counted.

    Parameters
    ----------
    classes : tuple of str
        The class names.
    confusion : tuple of tuples of float
        Noisy number of people by true class (rows) and predicted class (columns).
    calibration : tuple of pairs of float
        Noisy number of people of the second and of the first class, by bin of the second class's probability. With
        ``edges=None``: with right and with wrong answers, by bin of confidence.
    noise : float
        The standard deviation of the noise of each count. 0: the counts are exact and not for publication.
    unit : {"record", "person"}
        What counts as one: a row, or all rows of a person.
    mu : float or None
        What the counts cost the people who were counted.
    composition : {"parallel", "sequential"}
        "parallel": they were held out of training. "sequential": they may be in the training set too.
    guarantee : Guarantee or None
        What is guaranteed of the model and its evaluations so far together. None: exact counts.
    edges : tuple of float or None
        The edges of the bins of the second class's probability. None for more than two classes, and for what version
        0.2 has stored.
    at : tuple of float
        The thresholds that the owner named; they are among the edges.
    costs : tuple of tuples of float or None
        The cost of each error, by true and predicted class, with which the model answered. None: the most probable
        class is the answer.
    by_group : GroupCounts or None
        Noisy counts by group.

    Examples
    --------
    >>> counts = ((900.2, 98.1), (151.7, 848.9))
    >>> confidence = ((310.4, 102.3), (522.9, 99.8), (915.1, 45.6))
    >>> evaluation = Evaluation(("no", "yes"), counts, confidence, 5.3, "person", 0.27, "parallel", None)
    >>> print(evaluation.accuracy)
    0.875 (0.859 to 0.890)
    >>> print(evaluation.recall["yes"])
    0.848 (0.822 to 0.872)
    """

    classes: tuple[str, ...]
    confusion: tuple[tuple[float, ...], ...]
    calibration: tuple[tuple[float, float], ...]
    noise: float
    unit: Unit
    mu: float | None
    composition: Composition
    guarantee: Guarantee | None
    edges: tuple[float, ...] | None = None
    at: tuple[float, ...] = ()
    costs: Costs | None = None
    by_group: GroupCounts | None = None

    @property
    def exact(self) -> bool:
        """Whether the counts have no noise; then nothing of this may be published."""
        return self.noise == 0

    @property
    def threshold(self) -> float:
        """Of two classes, the probability above which the second one was the answer."""
        return threshold_of(self.costs)

    @property
    def decision(self) -> str:
        """How the model answered, as a phrase."""
        return decision_in_words(self.costs, self.classes)

    @cached_property
    def _scores(self) -> Floats:
        return np.asarray(self.calibration)

    @cached_property
    def _groups(self) -> Floats:
        return np.asarray(cast(GroupCounts, self.by_group).counts)

    def _count(self, *, right: bool, true: int | None = None) -> tuple[float, float]:
        """Return the averaged noisy number of right or of wrong answers, to all or to one class, and its noise."""
        of_class = (
            np.arange(len(self.classes)) == true if true is not None else np.full(len(self.classes), True)
        )
        stated = [np.asarray(self.confusion)[(np.eye(len(of_class)) == right) & of_class[:, None]]]
        if self.edges is not None:
            above = np.asarray(self.edges[:-1]) >= self.threshold
            stated.append(self._scores[(np.stack([above, ~above], 1) == right) & of_class[::-1]])
        elif true is None:
            stated.append(self._scores[:, 0 if right else 1])
        if self.by_group is not None:
            stated.append(self._groups[:, of_class, 0 if right else 1])
        weight = sum(1 / cells.size for cells in stated)
        total = sum(float(cells.sum()) / cells.size for cells in stated) / weight
        return total, self.noise / math.sqrt(weight)

    def _share(self, true: int | None = None) -> Estimate:
        (right, right_noise), (wrong, wrong_noise) = (
            self._count(right=side, true=true) for side in (True, False)
        )
        return _ratio(right, wrong, right_noise, wrong_noise)

    @property
    def size(self) -> Estimate:
        """The number of people who were counted; the interval covers the noise."""
        (right, right_noise), (wrong, wrong_noise) = (self._count(right=side) for side in (True, False))
        return _size(right + wrong, math.hypot(right_noise, wrong_noise))

    @property
    def accuracy(self) -> Estimate:
        """The share of right answers."""
        return self._share()

    @property
    def recall(self) -> dict[str, Estimate]:
        """The share of right answers among the people of each class."""
        return {name: self._share(number) for number, name in enumerate(self.classes)}

    @property
    def bins(self) -> tuple[Bin, ...]:
        """The calibration curve."""
        return self._bins_between(range(len(self.calibration) + 1))

    @property
    def wide_bins(self) -> tuple[Bin, ...]:
        """The calibration curve of two classes in fewer and wider bins; otherwise the same as `bins`."""
        if self.edges is None:
            return self.bins
        return self._bins_between([number for number, edge in enumerate(self.edges) if edge in _WIDE])

    def _bins_between(self, numbers: Sequence[int]) -> tuple[Bin, ...]:
        """Join the bins between the edges of these numbers."""
        edges = self.edges or np.linspace(1 / len(self.classes), 1, len(self.calibration) + 1).tolist()
        found = []
        for low, high in itertools.pairwise(numbers):
            ours, others = self._scores[low:high].sum(0).tolist()
            noise = self.noise * math.sqrt(high - low)
            found.append(Bin(edges[low], edges[high], _ratio(ours, others, noise, noise)))
        return tuple(found)

    @cached_property
    def auc(self) -> Estimate | None:
        """The area under the ROC curve of two classes, for probabilities in bins.

        It is the probability that a person of the second class has a higher bin than one of the first, plus half of
        that of the same bin. None for more than two classes.
        """
        return None if self.edges is None else _area(self._scores[:, 0], self._scores[:, 1], self.noise)

    @cached_property
    def log_loss(self) -> Estimate | None:
        """The log-loss of two classes, with the middle of its bin for each probability, so that it is bounded.

        None for more than two classes.
        """
        if self.edges is None:
            return None
        middle = (np.asarray(self.edges[1:]) + np.asarray(self.edges[:-1])) / 2
        return _mean(-np.log(np.stack([middle, 1 - middle], 1)), self._scores, self.noise)

    @property
    def curves(self) -> dict[str, Estimate]:
        """The area and the log-loss by name; nothing for more than two classes."""
        named = {"area under the ROC curve": self.auc, "log-loss": self.log_loss}
        return {name: each for name, each in named.items() if each is not None}

    @property
    def points(self) -> tuple[Point, ...]:
        """The ROC and precision-recall curve: a point for each edge of the bins, the lowest threshold first."""
        return tuple(self._point(number) for number in range(1, len(self.edges or ()) - 1))

    def _point(self, edge: int) -> Point:
        (missed, rejected), (found, alarms) = self._scores[:edge].sum(0), self._scores[edge:].sum(0)
        below, above = (self.noise * math.sqrt(cells) for cells in (edge, len(self.calibration) - edge))
        threshold = cast(tuple[float, ...], self.edges)[edge]
        if threshold == self.threshold:  # other tables know it too
            recall, false_alarms = self._share(1), _complement(self._share(0))
        else:
            recall = _ratio(found, missed, above, below)
            false_alarms = _ratio(alarms, rejected, above, below)
        return Point(threshold, recall, false_alarms, _ratio(found, alarms, above, above))

    @property
    def named_points(self) -> tuple[Point, ...]:
        """The points at the thresholds that the owner named, and at that of the model."""
        return tuple(each for each in self.points if each.threshold in (*self.at, self.threshold))

    @property
    def calibrated(self) -> str:
        """What the share of each bin is, as the beginning of a phrase that ends with the probabilities of the bin."""
        if self.edges is None:
            return "right with confidence"
        return f"share of {self.classes[1]} with probability"

    @property
    def excess(self) -> str:
        """What `Group.excess` is, as a phrase."""
        if len(self.classes) == 2:
            return f"mean probability of {self.classes[1]} minus its share"
        return "mean confidence minus share of right answers"

    @property
    def groups(self) -> tuple[Group, ...]:
        """The figures of each group.

        Nothing is said of a group whose noisy size is below twice the margin of its noise, a public number.
        """
        return () if self.by_group is None else tuple(map(self._group, self.by_group.names, self._groups))

    def _group(self, name: str, counts: Floats) -> Group:
        classes = len(self.classes)
        spread = self.noise * math.sqrt(counts.size)
        size = _size(float(counts.sum()), spread)
        accuracy, excess = Estimate(None, 0.0, 1.0), Estimate(None, -1.0, 1.0)
        recalls = [accuracy] * classes
        if counts.sum() >= self.least_group:
            answers = counts.sum(2)  # by true class, right or wrong
            side, own = self.noise * math.sqrt(2 * classes), self.noise * math.sqrt(2)
            accuracy = _ratio(float(answers[:, 0].sum()), float(answers[:, 1].sum()), side, side)
            recalls = [_ratio(float(right), float(wrong), own, own) for right, wrong in answers]
            # What a row has: of two classes, its true class is the second; of more classes, its answer is right.
            had = np.arange(2)[:, None, None] if classes == 2 else np.array([[1], [0]])
            values = np.broadcast_to(np.arange(2.0) - had, counts.shape)
            excess = _mean(values, counts, self.noise)
        return Group(name, size, accuracy, dict(zip(self.classes, recalls, strict=True)), excess)

    @property
    def least_group(self) -> float:
        """The noisy number of people from which on something is said of a group; it follows from the noise alone."""
        return 2 * _Z_COUNT * self.noise * math.sqrt(4 * len(self.classes))

    @property
    def margin(self) -> float:
        """Half the width of the 95% interval of each noisy count."""
        return _Z_COUNT * self.noise

    @property
    def cells(self) -> tuple[tuple[Estimate, ...], ...]:
        """The confusion matrix with an interval for each cell, which covers the noise."""
        return tuple(tuple(_size(count, self.noise, count) for count in row) for row in self.confusion)

    def remarks(self) -> list[str]:
        """Return what a reader of the figures must know, as plain sentences.

        Examples
        --------
        >>> counts, confidence = ((900.0, 98.0), (151.0, 848.0)), ((310.0, 12.0), (720.0, 45.0), (700.0, 210.0))
        >>> Evaluation(("no", "yes"), counts, confidence, 5.3, "person", 0.27, "parallel", None).remarks()[-1]
        'The probabilities are too confident: with 0.83 to 1.00, only 0.769 (0.738 to 0.798) of the answers are right.'
        """
        found, many = [], "people" if self.unit == "person" else "records"
        if not self.exact:
            found.append(
                f"Every count has noise: it is within \u00b1{math.ceil(self.margin):,} of the true one with 95% "
                "confidence, and it can be negative. The cells do not add up to the accuracy and the number of "
                f"{many}, which average several noisy tables."
            )
        if self.edges is not None:
            found.append(
                "The area under the ROC curve and the log-loss know of each probability only its bin. The area of the "
                "exact probabilities is usually a little higher."
            )
        known = [each for each in self.bins if each.share.value is not None]
        too_high = [each for each in known if each.share.high < each.low]
        too_low = [each for each in known if each.share.low > each.high and self.edges is not None]
        if too_high and self.edges is None:
            named = "; ".join(
                f"with {each.low:.2f} to {each.high:.2f}, only {each.share}" for each in too_high
            )
            found.append(f"The probabilities are too confident: {named} of the answers are right.")
        for word, bins in (("high", too_high), ("low", too_low)):
            if bins and self.edges is not None:
                named = "; ".join(
                    f"with {each.low:.2f} to {each.high:.2f}, the share is {each.share}" for each in bins
                )
                found.append(f"The probabilities of {self.classes[1]} are too {word}: {named}.")
        small = [each.name for each in self.groups if each.accuracy.value is None]
        if small:
            named = ", ".join(small) if len(small) < 6 else f"{len(small)} of the groups"
            found.append(
                f"Nothing can be said of {named}: with this noise, a group needs about "
                f"{math.ceil(self.least_group):,} {many}."
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the counts and all figures as JSON values. Exact counts are marked as not for publication."""
        return {
            "publishable": not self.exact,
            **({"caveat": NOT_FOR_PUBLICATION} if self.exact else {}),
            "unit": self.unit,
            "confidence": CONFIDENCE,
            "size": asdict(self.size),
            "decision": self.decision,
            "accuracy": asdict(self.accuracy),
            "recall": {name: asdict(estimate) for name, estimate in self.recall.items()},
            "auc": None if self.auc is None else asdict(self.auc),
            "log_loss": None if self.log_loss is None else asdict(self.log_loss),
            "points": [asdict(each) for each in self.points],
            "groups": [asdict(each) for each in self.groups],
            "bins": [asdict(each) for each in self.bins],
            "classes": list(self.classes),
            "confusion": [list(row) for row in self.confusion],
            "cells": [[asdict(cell) for cell in row] for row in self.cells],
            "remarks": self.remarks(),
            "calibration": [list(pair) for pair in self.calibration],
            "edges": None if self.edges is None else list(self.edges),
            "at": list(self.at),
            "costs": None if self.costs is None else [list(row) for row in self.costs],
            "by_group": None if self.by_group is None else asdict(self.by_group),
            "noise": self.noise,
            "mu": self.mu,
            "composition": self.composition,
            "guarantee": None if self.guarantee is None else self.guarantee.to_json(),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Evaluation:
        """Return the evaluation that `to_json` wrote. Figures are computed again from the counts."""
        classes = len(record["classes"])
        edges, by_group = record.get("edges"), record.get("by_group")  # version 0.2 has none
        evaluation = cls(
            classes=tuple(map(str, record["classes"])),
            confusion=_nested(record["confusion"], (classes, classes)),
            calibration=_nested(record["calibration"], (BINS if edges is None else len(edges) - 1, 2)),
            noise=float(record["noise"]),
            unit=record["unit"],
            mu=float(record["mu"]),
            composition=record["composition"],
            guarantee=Guarantee.from_json(record["guarantee"]),
            edges=None if edges is None else tuple(map(float, edges)),
            at=tuple(map(float, record.get("at", ()))),
            costs=checked_costs(record.get("costs"), classes),
            by_group=None if by_group is None else _group_counts(by_group, classes),
        )
        tables = 2 if by_group is None else 3
        if (
            classes < 2
            or (edges is not None and not _are_edges(evaluation))
            or evaluation.unit not in ("record", "person")
            or evaluation.composition not in ("parallel", "sequential")
            or not 0 < cast(float, evaluation.mu) < math.inf
            # Noise of this size is what the stated mu pays for; rounding on the grid adds less than 1%.
            or not 0.99 < evaluation.noise * cast(float, evaluation.mu) / sensitivity(tables) < 1.01
        ):
            raise ValueError("not a publishable evaluation")
        return evaluation


def _size(count: float, noise: float, value: float | None = None) -> Estimate:
    margin = _Z_COUNT * noise
    shown = max(count, 0.0) if value is None else value
    return Estimate(shown, max(count - margin, 0.0), max(count + margin, 0.0))


def _complement(share: Estimate) -> Estimate:
    return Estimate(None if share.value is None else 1 - share.value, 1 - share.high, 1 - share.low)


def edges_with(thresholds: Sequence[float]) -> tuple[float, ...]:
    """Return the edges of the bins of the score: the usual ones, and thresholds, which must have bins of their own."""
    return tuple(sorted({*EDGES, *thresholds}))


def _are_edges(evaluation: Evaluation) -> bool:
    """Return whether the edges are those of two classes with the thresholds that the evaluation names."""
    named = {*evaluation.at, evaluation.threshold}
    return (
        len(evaluation.classes) == 2
        and evaluation.edges == edges_with([*named])
        and max(named) < 1 > 0 < min(named)
    )


def _nested(stored: Any, shape: tuple[int, ...]) -> Any:
    table = np.array(stored, dtype=np.float64)
    if table.shape != shape or not np.isfinite(table).all():
        raise ValueError("not the counts of an evaluation")
    return nested_tuples(table.tolist())


def nested_tuples(values: Any) -> Any:
    """Return lists in lists as tuples."""
    return tuple(map(nested_tuples, values)) if isinstance(values, list) else values


def _group_counts(stored: Mapping[str, Any], classes: int) -> GroupCounts:
    names = tuple(map(str, stored["names"]))
    return GroupCounts(str(stored["column"]), names, _nested(stored["counts"], (len(names), classes, 2, 2)))


# --- Counting ---------------------------------------------------------------------------------------------------------

Counts = NDArray[np.int64]
By = str | tuple[str, Sequence[float]]
"""The column of the groups; of a column of numbers also the numbers that divide it."""

SHARE = 2**24
"""A person's rows share this many units; sums of units below 2^53 are exact in float64."""
_NO_GROUP = "missing or other"


@dataclass(frozen=True)
class GroupsOf:
    """Groups of people by one declared column."""

    column: str
    names: tuple[str, ...]  # The last one is for values that are missing or not declared
    start: int  # The first feature of the column
    width: int  # The number of its features, without that of a missing value
    cuts: tuple[float, ...] | None  # Of a column with one feature: the least feature of each group
    missing: bool  # Whether a missing value has a feature

    @classmethod
    def of(cls, by: By, encoding: Encoding | None) -> GroupsOf:
        """Find the groups of a column of the schema."""
        if encoding is None:
            raise InvalidInput("`by` requires a model that was trained on a table with a schema.")
        name, ends = (by, ()) if isinstance(by, str) else (by[0], tuple(sorted(map(float, by[1]))))
        columns = {column.name: column for column in encoding.columns}
        if name not in columns:
            raise InvalidInput(
                f"`by` must be a column of the schema, got {name!r}; the columns are {quoted([*columns])}."
            )
        names, cuts = _groups_of(columns[name], ends)
        before = itertools.takewhile(lambda column: column.name != name, encoding.columns)
        start = sum(len(column.feature_names) for column in before)
        column = columns[name]
        width = len(column.feature_names) - column.missing
        return cls(name, (*names, _NO_GROUP), start, width, cuts, column.missing)

    def numbers(self, records: NDArray[np.float32]) -> Counts:
        """Return the number of the group of each encoded row."""
        cells = records[:, self.start : self.start + self.width]
        if self.cuts is None:
            found = np.where(cells.any(1), cells.argmax(1), -1)
        else:
            found = np.searchsorted(np.array(self.cuts, np.float32), cells[:, 0], side="right") - 1
            if self.missing:
                found[records[:, self.start + self.width] > 0] = -1
        return np.where(found < 0, len(self.names) - 1, found)


def _groups_of(column: Column, ends: tuple[float, ...]) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """Return the names of the groups of a column, and of a column with one feature the least feature of each."""
    if isinstance(column, BooleanColumn | CategoricalColumn) and not ends:
        names = ("no", "yes") if isinstance(column, BooleanColumn) else column.categories
        codes = (np.arange(len(names)) + 0.5) / len(names)
        return names, tuple(codes.tolist()) if column.is_share else None
    if not isinstance(column, NumericColumn) or bool(column.edges) == bool(ends):
        raise InvalidInput(
            "`by` must be a column of categories, of yes and no or of numbers with declared bins, or one of other "
            f"numbers together with the numbers that divide it, as in age=30,50; got {column.name!r}"
            f"{' with numbers' if ends else ''}."
        )
    given = column.edges or ends
    if not all(column.low < end <= column.high for end in given) or len({*given}) < len(given):
        raise InvalidInput(
            f"The numbers that divide {column.name!r} must be different, above {column.low:g} and at most "
            f"{column.high:g}, got {', '.join(f'{end:g}' for end in given)}."
        )
    between = (f"{low:g} to {high:g}" for low, high in itertools.pairwise(given))
    names = (f"below {given[0]:g}", *between, f"{given[-1]:g} and above")
    return names, None if column.edges else (-math.inf, *column._code(np.array(given)).tolist())


@dataclass(frozen=True)
class Tables:
    """The tables that an evaluation counts."""

    classes: tuple[str, ...]
    costs: Costs | None = None  # How the model answers
    at: tuple[float, ...] = ()  # Thresholds that the owner named
    groups: GroupsOf | None = None

    def __post_init__(self) -> None:
        if self.at and len(self.classes) != 2:
            raise InvalidInput(f"`at` requires a model of two classes; this one has {len(self.classes)}.")
        if not all(map(is_threshold, self.at)):
            raise InvalidInput(
                f"Every threshold of `at` must be between 0 and 1, got {', '.join(f'{each:g}' for each in self.at)}"
                f"{NOT_TOO_CLOSE}."
            )

    @cached_property
    def edges(self) -> tuple[float, ...] | None:
        """The edges of the bins of the score, for two classes."""
        return edges_with([*self.at, threshold_of(self.costs)]) if len(self.classes) == 2 else None

    @property
    def sensitivity(self) -> float:
        """How far one person moves all counts together."""
        return sensitivity(2 if self.groups is None else 3)

    def answers(self, classifier: Any, feature_map: Any, records: NDArray[np.float32]) -> NDArray[np.int32]:
        """Answer encoded rows: the predicted class, the bin, the group and the mass of each, in units of 2^-24."""
        probabilities = _probabilities(classifier, feature_map, records, len(self.classes))
        predicted = decided(probabilities, self.costs)
        if self.edges is None:
            mass = np.take_along_axis(probabilities, predicted[:, None], 1)[:, 0]
            scaled = (mass - 1 / len(self.classes)) / (1 - 1 / len(self.classes)) * BINS
            bins = np.clip(np.floor(scaled), 0, BINS - 1)
        else:
            mass = probabilities[:, 1]
            bins = np.searchsorted(self.edges[1:-1], mass)
        group = np.zeros(len(mass)) if self.groups is None else self.groups.numbers(records)
        units = np.clip(np.rint(mass * SHARE), 0, SHARE)
        return np.stack([predicted, bins, group, units], 1).astype(np.int32)

    def count(self, labels: Counts, answers: NDArray[np.int32], rows_of_person: Counts | None) -> Counts:
        """Count answers in units of 2^-24 people, one table after the other. The sums are exact."""
        predicted, bins, group, units = answers.astype(np.int64).T
        shares = np.full(len(labels), SHARE) if rows_of_person is None else SHARE // rows_of_person
        confusion, calibration, grouped = (np.zeros(math.prod(shape), np.int64) for shape in self._shapes)
        wrong = labels != predicted
        np.add.at(confusion, labels * len(self.classes) + predicted, shares)
        np.add.at(calibration, 2 * bins + (wrong if self.edges is None else labels == 0), shares)
        if self.groups is not None:
            cells = ((group * len(self.classes) + labels) * 2 + wrong) * 2
            high = shares * units // SHARE
            np.add.at(grouped, cells, shares - high)
            np.add.at(grouped, cells + 1, high)
        return np.concatenate([confusion, calibration, grouped])

    def evaluation(self, counts: NDArray[np.float64], **fields: Any) -> Evaluation:
        """Return the evaluation of what was counted, in people."""
        sizes = [math.prod(shape) for shape in self._shapes]
        parts = np.split(counts, np.cumsum(sizes)[:-1])
        confusion, calibration, grouped = (
            nested_tuples(part.reshape(shape).tolist())
            for part, shape in zip(parts, self._shapes, strict=True)
        )
        by_group = (
            None if self.groups is None else GroupCounts(self.groups.column, self.groups.names, grouped)
        )
        return Evaluation(
            classes=self.classes,
            confusion=confusion,
            calibration=calibration,
            edges=self.edges,
            at=self.at,
            costs=self.costs,
            by_group=by_group,
            **fields,
        )

    @property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        classes, groups = len(self.classes), 0 if self.groups is None else len(self.groups.names)
        bins = BINS if self.edges is None else len(self.edges) - 1
        return (classes, classes), (bins, 2), (groups, classes, 2, 2)


def _probabilities(
    classifier: Any, feature_map: Any, records: NDArray[np.float32], classes: int
) -> NDArray[np.float64]:
    """Answer each row on its own, so that no other row changes its rounding."""
    features = records if feature_map is None else feature_map.transform(records)
    row = np.empty((1, features.shape[1]), dtype=np.float32)  # one place in memory for all rows
    probabilities = np.empty((len(features), classes))
    for number, values in enumerate(features):
        row[0] = values
        probabilities[number] = classifier.predict_proba(row)[0]
    # A network may overflow for some rows. What such a row adds must stay between 0 and 1.
    return np.clip(np.nan_to_num(probabilities, nan=0.0), 0.0, 1.0)
