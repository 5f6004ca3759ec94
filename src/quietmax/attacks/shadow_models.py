"""ShadowPool: networks trained like the target on sets whose membership is known, shared by all attacks.

Two designs, and each attack says which it can use:

* ``outside``: every network's training set, and an equally large set it did not see, are drawn from the records that
  the target's training and test parts leave over. Networks' sets overlap each other, never the target's. This is the
  adversary of Shokri et al. (2017), who knows the distribution and no candidate.
* ``around``: networks come in pairs trained on the two halves of a random division of the *candidates*, the target's
  training and test records together, so every candidate is inside half of the networks and each network has as many
  records as the target. This is the adversary of Carlini et al. (2022), who knows the candidates but not which half
  is the target's. Halves of all records, leftover ones included, would make networks of another size than the
  target: on Location that cost 0.04 of LiRA's AUC at twice the training time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from quietmax.models.stacked import TrainingSettings, train_stack
from quietmax.models.training import softmax

Design = Literal["outside", "around"]
Rows = NDArray[np.int64]
Progress = Callable[[int, int], None]

MEMORY = 1_500_000_000
"""Bytes of working memory that networks trained together may take; more networks are trained in groups."""
_REFERENCE_RECORDS = 10_000


@dataclass(frozen=True, eq=False)
class ShadowPool:
    """Trained shadow networks and who was inside: ``inside`` and ``drawn`` have shape (networks, records).

    ``drawn`` marks the records a network's set was drawn as a whole from: those inside, and those held out to stand
    for non-members.
    """

    data: Split
    settings: TrainingSettings
    design: Design
    stacks: tuple[MLP, ...]
    inside: NDArray[np.bool_]
    drawn: NDArray[np.bool_]
    notes: tuple[str, ...] = ()

    @classmethod
    def outside(
        cls,
        data: Split,
        settings: TrainingSettings,
        networks: int,
        *,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> ShadowPool:
        """Train ``networks`` on sets drawn from the records the split leaves over.

        A set is as large as the target's; if the leftover records do not hold two such sets, half of them.
        """
        wanted, available, size = len(data.train_rows), len(data.pool_rows), set_size(data)
        notes: tuple[str, ...] = ()
        if size < wanted:
            notes = (
                f"Only {available} records are left over for shadow networks, so each trains on half of them, {size}, "
                f"where the target has {wanted}; the attack is weaker than with enough records.",
            )
        generator = np.random.default_rng((0x5AD0, seed))
        drawn = [generator.permutation(data.pool_rows)[: 2 * size] for _ in range(_checked(networks))]
        inside = [each[:size] for each in drawn]
        return cls._trained(data, settings, "outside", inside, drawn, generator, notes, progress)

    @classmethod
    def around(
        cls,
        data: Split,
        settings: TrainingSettings,
        networks: int,
        *,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> ShadowPool:
        """Train pairs of networks on the two halves of random divisions of the candidates."""
        generator = np.random.default_rng((0xA401, seed))
        candidates = candidate_rows(data)
        inside: list[Rows] = []
        while len(inside) < _checked(networks):
            inside += np.array_split(generator.permutation(candidates), 2)
        return cls._trained(
            data, settings, "around", inside[:networks], [candidates] * networks, generator, (), progress
        )

    @classmethod
    def _trained(
        cls,
        data: Split,
        settings: TrainingSettings,
        design: Design,
        inside: Sequence[Rows],
        drawn: Sequence[Rows],
        generator: np.random.Generator,
        notes: tuple[str, ...],
        progress: Progress | None,
    ) -> ShadowPool:
        records = data.records
        seeds = [int(seed) for seed in generator.integers(2**62, size=len(inside))]
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
                    [np.sort(each) for each in inside[chosen]],
                    settings=settings,
                    seeds=seeds[chosen],
                    progress=None if progress is None else _part(progress, group, len(starts)),
                )
            )
        membership = np.zeros((2, len(inside), len(records)), dtype=np.bool_)
        for index, (own, whole) in enumerate(zip(inside, drawn, strict=True)):
            membership[0, index, own] = True
            membership[1, index, whole] = True
        return cls(data, settings, design, tuple(stacks), membership[0], membership[1], notes)

    @property
    def networks(self) -> int:
        """How many shadow networks there are."""
        return len(self.inside)

    @cached_property
    def reference_rows(self) -> Rows:
        """Records that some networks trained on and others did not: what thresholds are chosen on."""
        if self.design == "around":
            return candidate_rows(self.data)
        return leftover_rows(self.data, _REFERENCE_RECORDS, 0)

    def each(self) -> Iterator[MLP]:
        """The networks one by one, in order."""
        return (stack.network(index) for stack in self.stacks for index in range(stack.networks))

    def values(self, rows: Rows, statistic: Statistic, released: Released = "probabilities") -> Floats:
        """A statistic of every network's plain answers for the same records, shape (networks, records)."""
        features, labels = self.data.records.features[rows], self.data.records.labels[rows]
        return np.stack(
            [statistic(plain_answers(network, features, released), labels) for network in self.each()]
        )


def set_size(data: Split) -> int:
    """How many records a shadow set drawn from the left-over records has: the target's number, or half of them."""
    available = len(data.pool_rows)
    if available < 2:
        raise InvalidInput(
            f"The split of '{data.name}' leaves {available} records over, but shadow networks need at least two; "
            "load it with fewer records for training."
        )
    return min(len(data.train_rows), available // 2)


def candidate_rows(data: Split) -> Rows:
    """The records to be told apart: members first, then as many non-members."""
    return np.concatenate([data.train_rows, data.test_rows])


def leftover_rows(data: Split, count: int, seed: int) -> Rows:
    """At most ``count`` records that are neither members nor non-members, chosen by ``seed``, in row order."""
    if len(data.pool_rows) <= count:
        return data.pool_rows
    chosen = np.random.default_rng((0x1EF7, seed)).permutation(data.pool_rows)[:count]
    return np.sort(chosen)


def plain_answers(network: MLP, features: NDArray[np.float32], released: Released) -> Answers:
    """A network's own answers, cut down to labels where the target releases no more."""
    logits = network.logits(features).double().numpy()
    return Answers(logits.argmax(-1), None if released == "labels" else softmax(logits))


def networks_at_once(widths: tuple[int, ...], settings: TrainingSettings, memory: int = MEMORY) -> int:
    """How many networks fit into ``memory`` bytes while they train, at least one.

    A weight takes 40 bytes at the most demanding moment (initial values in double precision, then weights, gradient
    and Adam's two moments); a batch's signals and slopes take 8 bytes per neuron and record.

    >>> networks_at_once((3072, 128, 10), TrainingSettings())
    81
    """
    weights = sum((into + 1) * out for into, out in pairwise(widths))
    return max(1, memory // (40 * weights + 8 * settings.batch_size * sum(widths)))


def _checked(networks: int) -> int:
    if networks < 1:
        raise InvalidInput(f"{networks} shadow networks were asked for, but at least 1 is needed; try 20.")
    return networks


def _part(progress: Progress, group: int, groups: int) -> Progress:
    """Progress of one of several equally long parts."""
    return lambda done, total: progress(group * total + done, groups * total)
