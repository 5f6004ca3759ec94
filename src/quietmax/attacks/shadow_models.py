"""Shadow networks: networks trained like the target on sets whose members are known, shared by all attacks.

``disjoint`` sets, and equally large sets that a network did not see, are drawn from the pool: none contains a
candidate. ``overlapping`` sets are all folds but one of the *candidates*, the target's training and test records
together. Sets are drawn by units: persons with all rows if the records have persons, else single records (THEORY 3.7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quietmax._ray import RayEngine, ray_map
from quietmax._threads import parallel_map
from quietmax.attacks.metrics import Floats, Labels, Released, Statistic
from quietmax.data.records import Holdout, Records, Split, is_held_out
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import Answers
from quietmax.models.stacked import (
    MLP,
    Progress,
    TrainingSettings,
    stack_edges,
    train_networks,
    training_bytes,
)
from quietmax.models.training import softmax

Design = Literal["disjoint", "overlapping"]
Rows = NDArray[np.int64]

MAX_MEMORY = 1_500_000_000
"""Bytes of working memory for networks that are trained at the same time."""
_REFERENCE_RECORDS = 10_000
_MOST_FOLDS = 10


@dataclass(frozen=True, eq=False)
class Units:
    """The persons, or single records, that some rows belong to, in the order of their first rows."""

    order: Rows  # Places of the rows, those of one unit next to each other
    starts: Rows  # Where each unit begins in `order`

    @classmethod
    def _of(cls, records: Records, rows: Rows) -> Units:
        """Find the units of some rows."""
        if records.persons is None:
            return cls(np.arange(len(rows)), np.arange(len(rows)))
        _, first, unit = np.unique(records.units[rows], return_index=True, return_inverse=True)
        numbers = np.argsort(np.argsort(first))[unit]  # from 0, by first appearance
        order = np.argsort(numbers, kind="stable")
        return cls(order, np.flatnonzero(np.diff(numbers[order], prepend=-1)))

    def __len__(self) -> int:
        return len(self.starts)

    def means(self, values: Floats) -> Floats:
        """Return the mean over each unit's rows of values of shape (..., rows)."""
        sums = np.add.reduceat(values[..., self.order], self.starts, axis=-1)
        return np.asarray(sums / np.diff(self.starts, append=len(self.order)))

    def all(self, marks: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return whether all of each unit's rows are marked; shape (..., rows) to (..., units)."""
        return np.asarray(np.logical_and.reduceat(marks[..., self.order], self.starts, axis=-1))

    def _rows_of(self, units: Rows) -> Rows:
        """Return the places of all rows of some units, unit by unit."""
        lengths = np.diff(self.starts, append=len(self.order))[units]
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return np.asarray(self.order[np.repeat(self.starts[units], lengths) + within])


@dataclass(frozen=True, eq=False)
class ShadowPool:
    """Trained shadow networks and their training sets, as `train` draws them.

    Parameters
    ----------
    data : Split
        The split that the target was trained on.
    settings : TrainingSettings
        How the networks were trained.
    design : {"disjoint", "overlapping"}
        How the training sets were drawn.
    stacks : tuple of MLP
        The networks, in groups.
    inside : array of bool, shape (networks, records)
        Which records are in the training set of which network.
    drawn : array of bool, shape (networks, records)
        The records in the training set and those held out to stand for non-members.
    notes : tuple of str
        What a reader of a report has to know about the pool.

    Examples
    --------
    >>> import quietmax as qm
    >>> data = qm.load("mnist-5k", records=100)
    >>> pool = ShadowPool.train("overlapping", data, qm.TrainingSettings(epochs=1), networks=2)
    >>> pool.networks, int(pool.inside.sum())
    (2, 200)
    """

    data: Split
    settings: TrainingSettings
    design: Design
    stacks: tuple[MLP, ...]
    inside: NDArray[np.bool_]
    drawn: NDArray[np.bool_]
    notes: tuple[str, ...] = ()

    @classmethod
    def train(
        cls,
        design: Design,
        data: Split,
        settings: TrainingSettings,
        networks: int,
        *,
        seed: int = 0,
        engine: RayEngine | None = None,
        progress: Progress | None = None,
    ) -> ShadowPool:
        """Draw training sets and train a network on each.

        Parameters
        ----------
        design : {"disjoint", "overlapping"}
            ``disjoint``: from the pool, in the target's size if it holds two such sets, else half of it, with a note.
            ``overlapping``: all candidates but one fold.
        data : Split
            The split that the target was trained on.
        settings : TrainingSettings
            The target's training settings.
        networks : int
            Number of shadow networks, at least 1.
        seed : int
            Determines the sets and the initial weights.
        engine : RayEngine, optional
            Trains the networks on a Ray cluster, one stack per task. The networks are the same, bit for bit.
        progress : callable or None
            Called with (done, total) while the networks are trained.

        Returns
        -------
        ShadowPool
            The trained networks.
        """
        if networks < 1:
            raise InvalidInput(f"The number of shadow networks must be at least 1, got {networks}.")
        check_nonmembers(data)
        if design not in _DESIGNS:
            raise InvalidInput(f"design must be 'disjoint' or 'overlapping', got {design!r}.")
        draw, key = _DESIGNS[design]
        generator = np.random.default_rng((key, seed))
        sets, drawn_from, notes = draw(data, networks, generator)
        seeds = generator.integers(2**62, size=networks).tolist()
        inside, drawn = np.zeros((2, networks, len(data.records)), dtype=np.bool_)
        for network, (members, others) in enumerate(zip(sets, drawn_from, strict=True)):
            inside[network, members] = drawn[network, others] = True
        stacks = _trained_stacks(data, settings, [np.sort(rows) for rows in sets], seeds, engine, progress)
        return cls(data, settings, design, stacks, inside, drawn, notes)

    @property
    def networks(self) -> int:
        """Number of shadow networks."""
        return len(self.inside)

    @cached_property
    def reference_rows(self) -> Rows:
        """Records that some networks trained on and others did not; thresholds are chosen on them."""
        if self.design == "overlapping":
            return candidate_rows(self.data)
        return _leftover_rows(self.data, _REFERENCE_RECORDS, 0)

    @property
    def candidate_labels(self) -> Labels:
        """True labels of the candidates."""
        return self.data.records.labels[candidate_rows(self.data)]

    def units(self, rows: Rows) -> Units:
        """Return the persons, or single records, of some ``rows``."""
        return Units._of(self.data.records, rows)

    def each(self) -> Iterator[MLP]:
        """Iterate over the networks in order."""
        return (stack.network(index) for stack in self.stacks for index in range(stack.networks))

    def values(self, rows: Rows, statistic: Statistic, released: Released = "probabilities") -> Floats:
        """Compute a statistic of every network's plain answers to the same records, shape (networks, records)."""
        features, labels = self.data.records.features[rows], self.data.records.labels[rows]
        return np.stack(
            [statistic(_plain_answers(network, features, released), labels) for network in self.each()]
        )


_Sets = tuple[list[Rows], list[Rows], tuple[str, ...]]
"""The training set of each network, what it was drawn from, and notes."""


def _disjoint_sets(data: Split, networks: int, generator: np.random.Generator) -> _Sets:
    """Draw a training set, and as many others that the network does not see, from the pool."""
    size, units = _disjoint_set_size(data), Units._of(data.records, data.pool_rows)
    orders = [generator.permutation(len(units))[: 2 * size] for _ in range(networks)]
    drawn = [data.pool_rows[units._rows_of(order)] for order in orders]
    inside = [data.pool_rows[units._rows_of(order[:size])] for order in orders]
    members = len(Units._of(data.records, data.train_rows))
    if size == members:
        return inside, drawn, ()
    what = f"{data.records.unit}s"
    note = (
        f"Only {len(units)} {what} are available to shadow networks. Each trains on half of them, {size}, "
        f"but the target on {members}: the attack is weaker than with enough {what}."
    )
    return inside, drawn, (note,)


def _overlapping_sets(data: Split, networks: int, generator: np.random.Generator) -> _Sets:
    """Divide the candidates into folds, leave each out once, and divide them anew."""
    candidates = candidate_rows(data)
    units, count = Units._of(data.records, candidates), _folds(data)
    inside: list[Rows] = []
    while len(inside) < networks:
        parts = np.array_split(generator.permutation(len(units)), count)
        for left_out in reversed(range(count)):
            kept = np.concatenate(parts[:left_out] + parts[left_out + 1 :])
            inside.append(candidates[units._rows_of(kept)])
    notes: tuple[str, ...] = ()
    if not len(data.pool_rows):
        notes = (
            f"Shadow networks are trained on the table itself, each without another 1 in {count} of its "
            f"{data.records.unit}s: this adversary knows everybody and not who was held out.",
        )
    return inside[:networks], [candidates] * networks, notes


_DESIGNS: dict[Design, tuple[Callable[[Split, int, np.random.Generator], _Sets], int]] = {
    "disjoint": (_disjoint_sets, 0x5AD0),
    "overlapping": (_overlapping_sets, 0xA401),
}
"""How the sets are drawn, and the key of the generator that draws them."""


def check_nonmembers(data: Split) -> None:
    """Raise `InvalidInput` if nobody is outside the training set."""
    if not len(data.test_rows):
        raise InvalidInput(
            f"An attack requires people who were not trained on, but everybody in '{data.name}' was: train with "
            "`holdout` (0.2 holds out a fifth), or give `shadow_data`, a table of other people."
        )


def _disjoint_set_size(data: Split) -> int:
    """Return how many units a disjoint shadow set has: as many as the target trained on, or half of the pool."""
    available = len(Units._of(data.records, data.pool_rows))
    if available < 2:
        raise InvalidInput(
            f"Disjoint shadow sets require at least 2 {data.records.unit}s outside the training and test parts; the "
            f"split of '{data.name}' leaves {available}. `shadow_data`, a table of other people, provides them."
        )
    return min(len(Units._of(data.records, data.train_rows)), available // 2)


def candidate_rows(data: Split) -> Rows:
    """Return the records to be told apart: the members, then the non-members."""
    return np.concatenate([data.train_rows, data.test_rows])


def _folds(data: Split) -> int:
    """Return into how many folds the overlapping design divides the candidates.

    A network is trained on all folds but one, so it has about the target's size: 2 folds for sets of equal size, 5 for
    a holdout of 0.2.
    """
    candidates, nonmembers = (
        len(Units._of(data.records, rows)) for rows in (candidate_rows(data), data.test_rows)
    )
    return min(max(2, round(candidates / nonmembers)), _MOST_FOLDS)


def _leftover_rows(data: Split, count: int, seed: int) -> Rows:
    """Return about ``count`` rows of the pool: whole persons, so the last one may exceed it."""
    if len(data.pool_rows) <= count:
        return data.pool_rows
    units = Units._of(data.records, data.pool_rows)
    order = units._rows_of(np.random.default_rng((0x1EF7, seed)).permutation(len(units)))
    numbers = data.records.units[data.pool_rows[order]]
    chosen = order[np.isin(numbers, numbers[:count])]
    return np.sort(data.pool_rows[chosen])


def with_shadow_data(data: Split, others: Records, *, seed: int = 0) -> Split:
    """Add a table of other people, from which shadow sets are drawn."""
    own = data.records
    facts, other_facts = (
        (each.features.shape[1], each.classes, each.unit, each.encoding and each.encoding.to_json())
        for each in (own, others)
    )
    if facts != other_facts:
        raise InvalidInput(
            f"`shadow_data` must be encoded like '{data.name}': the same columns, classes and schema, and a person "
            "column if the table has one."
        )
    if own.persons is not None and others.persons is not None and set(own.persons) & set(others.persons):
        raise InvalidInput(f"`shadow_data` must hold other people: some are in '{data.name}' too.")
    together = concatenated(own, others)
    added = len(own) + np.arange(len(others))
    if len(data.test_rows):
        return replace(data, records=together, pool_rows=np.concatenate([data.pool_rows, added]))
    outside = is_held_out(others, Holdout(0.5, seed))
    return replace(data, records=together, test_rows=added[outside], pool_rows=added[~outside])


def concatenated(first: Records, second: Records) -> Records:
    """Return the rows of both, with persons if both have them."""
    persons = None
    if first.persons is not None and second.persons is not None:
        persons = np.concatenate([first.persons, second.persons])
    return replace(
        first,
        features=np.concatenate([first.features, second.features]),
        labels=np.concatenate([first.labels, second.labels]),
        persons=persons,
        raw_hashes=None,
    )


def _plain_answers(network: MLP, features: NDArray[np.float32], released: Released) -> Answers:
    """Return the answers of a network without noise, as much of them as the target releases."""
    logits = network.logits(features).double().numpy()
    return Answers(logits.argmax(-1), None if released == "labels" else softmax(logits))


def _trained_stacks(
    data: Split,
    settings: TrainingSettings,
    sets: list[Rows],
    seeds: list[int],
    engine: RayEngine | None,
    progress: Progress | None,
) -> tuple[MLP, ...]:
    """Train one network per set in stacks: on threads, as many at once as fit into memory, or on Ray workers."""
    records = data.records
    widths = (records.features.shape[1], *settings.hidden, records.classes)
    one = training_bytes(widths, settings)
    edges = stack_edges(len(sets), one, MAX_MEMORY)
    shared = (records.features, records.labels, records.classes)
    jobs = [(sets[first:last], settings, seeds[first:last]) for first, last in pairwise(edges)]
    if engine is not None:
        reporting = engine if progress is None else replace(engine, progress=progress)
        return tuple(ray_map(reporting, train_networks, jobs, shared=shared, total=len(jobs)))
    done, lock = [0.0] * len(jobs), Lock()

    def _trained(number: int) -> MLP:
        def _report(finished: int, total: int) -> None:
            """Tell the caller of the progress of all stacks together."""
            with lock:
                done[number] = finished / total
                if progress is not None:
                    progress(round(sum(done) * total), len(done) * total)

        return train_networks(*shared, *jobs[number], None, _report)

    if len(jobs) == 1:  # it may use all threads
        return (_trained(0),)
    at_once = max(1, MAX_MEMORY // (one * max(last - first for first, last in pairwise(edges))))
    stacks: list[MLP] = []
    for start in range(0, len(jobs), at_once):
        group = range(start, min(start + at_once, len(jobs)))
        stacks += parallel_map(lambda place, group=group: _trained(group[place]), len(group))  # type: ignore[misc]
    return tuple(stacks)
