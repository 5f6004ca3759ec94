"""Shadow: the attack of Shokri et al. (2017), as the paper runs it.

Shadow networks are trained like the target on sets drawn from other records; of a table without a pool, on sets drawn
from the table itself. Their answers to members and non-members
of those sets are the training data of small attack networks, one per true class, which then judge the target's answers.
Attack networks always learn from answers without noise, even if the target adds noise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from quietmax.attacks.base import Attack, FittedAttack
from quietmax.attacks.metrics import Floats, Released, best_threshold, released_probabilities
from quietmax.attacks.shadow_models import (
    Design,
    Rows,
    ShadowPool,
    Units,
    candidate_rows,
    plain_answers,
)
from quietmax.data.records import Split
from quietmax.mechanisms.base import Answers
from quietmax.models.losses import CrossEntropy
from quietmax.models.mlp import MLP
from quietmax.models.serialization import settings_to_json
from quietmax.models.stacked import Progress, TrainingSettings, train_stack

ATTACK_NETWORK = TrainingSettings(hidden=(64,), loss=CrossEntropy(), learning_rate=0.01, l2=1e-6)
"""The paper's attack network: 64 tanh units, two softmax outputs, 100 epochs in batches of 100."""


@dataclass(frozen=True, eq=False)
class FittedShadow(FittedAttack):
    """Attack networks, and which of them judges which class."""

    networks: MLP  # The attack networks, stacked
    network_of_class: NDArray[np.int64]  # The network that judges each class
    labels: NDArray[np.int64]  # True labels of the candidates
    released: Released  # What the networks were trained on
    threshold: float  # The best threshold on the shadow networks
    notes: tuple[str, ...]  # What a reader of the report has to know

    @property
    def decision(self) -> float:
        """0: the attack network finds a member likelier than a non-member."""
        return 0.0

    def scores(self, answers: Answers) -> Floats:
        """Return the log-odds of membership of ``answers``, each from the attack network of its true class."""
        features = _attack_features(answers, self.released, self.networks.widths[0])
        return _log_odds(self.networks, self.network_of_class, features, self.labels)


@dataclass(frozen=True)
class Shadow(Attack):
    """Shadow networks and one attack network per class.

    If the target releases labels only, attack networks learn from the shadow networks' labels, one-hot.

    Parameters
    ----------
    models : int
        Number of shadow networks.
    seed : int
        Determines the shadow networks and the attack networks.
    network : TrainingSettings
        How attack networks are trained.

    Examples
    --------
    >>> Shadow(models=10).network.hidden
    (64,)
    """

    network: TrainingSettings = field(default=ATTACK_NETWORK)
    name: ClassVar[str] = "shadow"

    @property
    def designs(self) -> tuple[Design, ...]:
        """Shadow sets are disjoint from the target's records; any networks whose members are known will do."""
        return ("disjoint", "overlapping")

    def designs_for(self, data: Split) -> tuple[Design, ...]:
        """Return the paper's disjoint sets if ``data`` has a pool, else overlapping ones."""
        return ("disjoint",) if len(data.pool_rows) else ("overlapping",)

    def fit(self, pool: ShadowPool, released: Released, progress: Progress | None = None) -> FittedShadow:
        """Train one attack network per class, all at once.

        Parameters
        ----------
        pool : ShadowPool
            The shadow networks.
        released : {"probabilities", "labels"}
            What the target releases.
        progress : callable or None
            Called with (done, total).

        Returns
        -------
        FittedShadow
            A class whose records are all members or all non-members is judged by a network trained on all classes.
        """
        self.check_pool(pool)
        data = attack_data(pool, released)
        by_class = [np.flatnonzero(data.labels == label) for label in range(pool.data.classes)]
        has_both = np.array([len(np.unique(data.inside[rows])) == 2 for rows in by_class])
        rows = [each for each, both in zip(by_class, has_both, strict=True) if both]
        # The network for classes without records of both kinds comes last.
        network_of_class = np.where(has_both, np.cumsum(has_both) - 1, len(rows))
        if not has_both.all():
            rows.append(np.arange(len(data.labels)))
        seeds = np.random.default_rng((0xA77A, self.seed)).integers(2**62, size=len(rows))
        networks = train_stack(
            data.features,
            data.inside,
            2,
            rows,
            settings=self.network,
            seeds=[int(seed) for seed in seeds],
            progress=progress,
        )
        judged = data.means(_log_odds(networks, network_of_class, data.features, data.labels))
        was_inside = data.means(data.inside) == 1
        return FittedShadow(
            networks,
            network_of_class,
            pool.data.records.labels[candidate_rows(pool.data)],
            released,
            threshold=best_threshold(judged[was_inside], judged[~was_inside]),
            notes=_notes(np.flatnonzero(~has_both)),
        )

    def described(self, pool: ShadowPool) -> dict[str, Any]:
        """Return the settings of attack, attack networks and ``pool`` as JSON values."""
        return {**super().described(pool), "network": settings_to_json(self.network)}


@dataclass(frozen=True, eq=False)
class AttackData:
    """Training data of the attack networks."""

    features: NDArray[np.float32]  # Answers of shadow networks
    labels: NDArray[np.int64]  # True labels of the records
    inside: NDArray[np.int64]  # 1 if the record was in the shadow network's training set, else 0
    parts: tuple[tuple[int, Units], ...]

    def means(self, values: NDArray[Any]) -> Floats:
        """Return the mean of ``values`` over the rows of each person that a network answered."""
        ends = np.cumsum([rows for rows, _ in self.parts])[:-1]
        pieces = np.split(np.asarray(values, dtype=np.float64), ends)
        return np.concatenate([units.means(own) for own, (_, units) in zip(pieces, self.parts, strict=True)])


def attack_data(pool: ShadowPool, released: Released) -> AttackData:
    """Collect the answers of every network of ``pool`` to its own members, then to its own non-members.

    There are as many members as non-members, persons or single records. ``released`` says what an answer contains:
    probabilities or labels.
    """
    records = pool.data.records
    features, labels, inside, parts = [], [], [], []
    for index, network in enumerate(pool.each()):
        held_out = np.flatnonzero(pool.drawn[index] & ~pool.inside[index])
        members = _as_many(pool, np.flatnonzero(pool.inside[index]), len(pool.units(held_out)), index)
        rows = np.concatenate([members, held_out])
        answers = plain_answers(network, records.features[rows], released)
        features.append(_attack_features(answers, released, records.classes))
        labels.append(records.labels[rows])
        inside.append(np.repeat([1, 0], [len(members), len(held_out)]))
        parts.append((len(rows), pool.units(rows)))
    return AttackData(np.concatenate(features), np.concatenate(labels), np.concatenate(inside), tuple(parts))


def _as_many(pool: ShadowPool, rows: Rows, count: int, seed: int) -> Rows:
    """Return rows of ``count`` units chosen at random, or all ``rows`` if they have no more units."""
    units = pool.units(rows)
    if len(units) <= count:
        return rows
    chosen = np.random.default_rng((0xE4A1, seed)).permutation(len(units))[:count]
    return np.sort(rows[units.rows_of(chosen)])


def _attack_features(answers: Answers, released: Released, classes: int) -> NDArray[np.float32]:
    """Return the probability vectors as released, or the labels one-hot."""
    if released == "labels":
        return np.eye(classes, dtype=np.float32)[answers.labels]
    return released_probabilities(answers).astype(np.float32)


def _log_odds(
    networks: MLP,
    network_of_class: NDArray[np.int64],
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
) -> Floats:
    """Judge each record by the network of its true class: logit of member minus logit of non-member."""
    judges = network_of_class[labels]
    odds = np.empty(len(labels))
    for judge in np.unique(judges):
        judged = judges == judge
        logits = networks.network(int(judge)).logits(torch.from_numpy(features[judged])).double()
        odds[judged] = (logits[:, 1] - logits[:, 0]).numpy()
    return odds


def _notes(without: NDArray[np.int64]) -> tuple[str, ...]:
    """Name the classes that one network for all classes judges."""
    if not len(without):
        return ()
    listed = ", ".join(str(label) for label in without[:10]) + (", ..." if len(without) > 10 else "")
    return (
        f"The shadow networks had no records both inside and outside their training sets for {len(without)} classes "
        f"({listed}); one attack network trained on all classes judges those.",
    )
