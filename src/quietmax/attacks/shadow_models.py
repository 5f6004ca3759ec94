"""Shadow networks: networks trained like the target on sets whose members are known, shared by all attacks.

There are two designs. Every attack states which of them it can use.

* ``disjoint``: every network's training set, and an equally large set that it did not see, are drawn from the records
  that the target's training and test parts leave over. The sets of two networks may overlap each other; none contains
  a candidate. The adversary of Shokri et al. (2017) knows the distribution and no candidate.
* ``overlapping``: networks come in pairs, trained on the two halves of a random division of the *candidates* (the
  target's training and test records together). Every candidate is in the training set of half of the networks, and
  every network has as many records as the target. The adversary of Carlini et al. (2022) knows the candidates but not
  which half the target was trained on. Dividing all records, the left-over ones included, would give networks of
  another size than the target: on Location that cost 0.04 of LiRA's AUC at twice the training time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quietmax.attacks.metrics import Floats, Released, Statistic
from quietmax.data.records import Split
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import Answers
from quietmax.models.mlp import MLP
from quietmax.models.stacked import Progress, TrainingSettings, train_stack
from quietmax.models.training import softmax

Design = Literal["disjoint", "overlapping"]
Rows = NDArray[np.int64]

MAX_MEMORY = 1_500_000_000
"""Bytes of working memory for networks that are trained together; more networks are trained in groups."""
_REFERENCE_RECORDS = 10_000


@dataclass(frozen=True, eq=False)
class ShadowPool:
    """Trained shadow networks and their training sets.

    Use `train`, which draws the sets of either design.

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
        progress: Progress | None = None,
    ) -> ShadowPool:
        """Draw training sets and train a network on each.

        Parameters
        ----------
        design : {"disjoint", "overlapping"}
            How the sets are drawn. A disjoint set has the target's size, or half of the left-over records if they do
            not hold two such sets; then the pool carries a note.
        data : Split
            The split that the target was trained on.
        settings : TrainingSettings
            The target's training settings.
        networks : int
            Number of shadow networks, at least 1.
        seed : int
            Determines the sets and the initial weights.
        progress : callable or None
            Called with (done, total) while the networks are trained.

        Returns
        -------
        ShadowPool
            The trained networks.
        """
        if networks < 1:
            raise InvalidInput(f"The number of shadow networks must be at least 1, got {networks}.")
        notes: tuple[str, ...] = ()
        if design == "disjoint":
            generator = np.random.default_rng((0x5AD0, seed))
            size = disjoint_set_size(data)
            drawn = [generator.permutation(data.pool_rows)[: 2 * size] for _ in range(networks)]
            inside = [rows[:size] for rows in drawn]
            if size < len(data.train_rows):
                notes = (
                    f"Only {len(data.pool_rows)} records are left over for shadow networks. Each trains on half of "
                    f"them, {size}, but the target on {len(data.train_rows)}: the attack is weaker than with enough "
                    "records.",
                )
        elif design == "overlapping":
            generator = np.random.default_rng((0xA401, seed))
            candidates = candidate_rows(data)
            halves: list[Rows] = []
            while len(halves) < networks:
                halves += np.array_split(generator.permutation(candidates), 2)
            inside, drawn = halves[:networks], [candidates] * networks
        else:
            raise InvalidInput(f"design must be 'disjoint' or 'overlapping', got {design!r}.")
        seeds = [int(each) for each in generator.integers(2**62, size=networks)]
        stacks = _train_in_groups(data, settings, inside, seeds, progress)
        count = len(data.records)
        return cls(data, settings, design, stacks, _as_mask(inside, count), _as_mask(drawn, count), notes)

    @property
    def networks(self) -> int:
        """Number of shadow networks."""
        return len(self.inside)

    @cached_property
    def reference_rows(self) -> Rows:
        """Records that some networks trained on and others did not; thresholds are chosen on them."""
        if self.design == "overlapping":
            return candidate_rows(self.data)
        return leftover_rows(self.data, _REFERENCE_RECORDS, 0)

    def each(self) -> Iterator[MLP]:
        """Iterate over the networks in order."""
        return (stack.network(index) for stack in self.stacks for index in range(stack.networks))

    def values(self, rows: Rows, statistic: Statistic, released: Released = "probabilities") -> Floats:
        """Compute a statistic of every network's plain answers to the same records.

        Parameters
        ----------
        rows : array of int
            The records.
        statistic : callable
            Takes answers and true labels, returns one number per answer.
        released : {"probabilities", "labels"}
            What the target releases; the networks release the same.

        Returns
        -------
        array of shape (networks, records)
            The values.
        """
        features, labels = self.data.records.features[rows], self.data.records.labels[rows]
        return np.stack(
            [statistic(plain_answers(network, features, released), labels) for network in self.each()]
        )


def disjoint_set_size(data: Split) -> int:
    """Return the size of a shadow set drawn from the left-over records of ``data``; raise if there are none.

    It is the size of the target's training part, or half of the left-over records if they are fewer than two such sets.
    """
    available = len(data.pool_rows)
    if available < 2:
        raise InvalidInput(
            f"Disjoint shadow sets require at least 2 records outside the training and test parts; the split of "
            f"'{data.name}' leaves {available}. A smaller number of training records leaves more."
        )
    return min(len(data.train_rows), available // 2)


def candidate_rows(data: Split) -> Rows:
    """Return the records of ``data`` to be told apart: the members, then as many non-members."""
    return np.concatenate([data.train_rows, data.test_rows])


def leftover_rows(data: Split, count: int, seed: int) -> Rows:
    """Return at most ``count`` records of ``data`` that are no candidates, chosen by ``seed``, in row order."""
    if len(data.pool_rows) <= count:
        return data.pool_rows
    chosen = np.random.default_rng((0x1EF7, seed)).permutation(data.pool_rows)[:count]
    return np.sort(chosen)


def plain_answers(network: MLP, features: NDArray[np.float32], released: Released) -> Answers:
    """Return the answers of ``network`` to ``features`` without noise; labels only if ``released`` says so."""
    logits = network.logits(features).double().numpy()
    return Answers(logits.argmax(-1), None if released == "labels" else softmax(logits))


def networks_at_once(widths: tuple[int, ...], settings: TrainingSettings, memory: int = MAX_MEMORY) -> int:
    """Return how many networks fit into memory while they are trained together, at least one.

    A weight takes 40 bytes at most (initial values in double precision, then weights, gradient and Adam's two moments).
    A batch takes 8 bytes per neuron and record for activations and their derivatives.

    Parameters
    ----------
    widths : tuple of int
        Layer widths, from the features to the classes.
    settings : TrainingSettings
        Determines the batch size.
    memory : int
        Bytes that the networks may take.

    Returns
    -------
    int
        The number of networks.

    Examples
    --------
    >>> networks_at_once((3072, 128, 10), TrainingSettings())
    81
    """
    weights = sum((into + 1) * out for into, out in pairwise(widths))
    return max(1, memory // (40 * weights + 8 * settings.batch_size * sum(widths)))


def _train_in_groups(
    data: Split,
    settings: TrainingSettings,
    inside: Sequence[Rows],
    seeds: Sequence[int],
    progress: Progress | None,
) -> tuple[MLP, ...]:
    """Train one network per set, as many at once as fit into memory."""
    records = data.records
    at_once = networks_at_once((records.features.shape[1], *settings.hidden, records.classes), settings)
    starts = range(0, len(inside), at_once)
    stacks = []
    for group, start in enumerate(starts):
        chosen = slice(start, start + at_once)
        stacks.append(
            train_stack(
                records.features,
                records.labels,
                records.classes,
                [np.sort(rows) for rows in inside[chosen]],
                settings=settings,
                seeds=seeds[chosen],
                progress=None if progress is None else _progress_of_part(progress, group, len(starts)),
            )
        )
    return tuple(stacks)


def _progress_of_part(progress: Progress, part: int, parts: int) -> Progress:
    """Report the progress of one of several equally long parts as progress of the whole."""
    return lambda done, total: progress(part * total + done, parts * total)


def _as_mask(sets: Sequence[Rows], records: int) -> NDArray[np.bool_]:
    """Mark the rows of each set, shape (sets, records)."""
    mask = np.zeros((len(sets), records), dtype=np.bool_)
    for row, members in zip(mask, sets, strict=True):
        row[members] = True
    return mask
