"""Shadow: the attack of Shokri et al. (2017), as the paper runs it.

Shadow networks are trained like the target on sets drawn from other records. Their answers to records inside and
outside those sets become the training data of small attack networks, one per true class, which then judge the
target's answers. Attack networks always learn from *plain* answers, also when the target adds noise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from quietmax.attacks.base import Attack, Fitted
from quietmax.attacks.metrics import Floats, Released, best_threshold, probabilities_of
from quietmax.attacks.shadow_models import Design, Progress, ShadowPool, candidate_rows, plain_answers
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import Answers
from quietmax.models.losses import CrossEntropy
from quietmax.models.mlp import MLP
from quietmax.models.serialization import settings_to_json
from quietmax.models.stacked import TrainingSettings, train_stack

ATTACK_NETWORK = TrainingSettings(hidden=(64,), loss=CrossEntropy(), learning_rate=0.01, l2=1e-6)
"""The paper's attack network: 64 tanh units, two softmax outputs, 100 epochs in batches of 100."""


@dataclass(frozen=True, eq=False)
class AttackData:
    """Answers of shadow networks: ``features`` (n, classes), true ``labels``, and whether the record was ``inside``."""

    features: NDArray[np.float32]
    labels: NDArray[np.int64]
    inside: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class FittedShadow(Fitted):
    """Attack networks, and which of them judges which class."""

    networks: MLP
    network_of_class: NDArray[np.int64]
    labels: NDArray[np.int64]
    released: Released
    threshold: float
    notes: tuple[str, ...]

    @property
    def decision(self) -> float:
        """Inside is likelier than outside."""
        return 0.0

    def scores(self, answers: Answers) -> Floats:
        """Log-odds of being inside, from the attack network of each record's true class."""
        features = attack_features(answers, self.released, self.networks.widths[0])
        return _log_odds(self.networks, self.network_of_class, features, self.labels)


@dataclass(frozen=True)
class Shadow(Attack):
    """Shadow networks and one attack network per class; ``network`` sets how attack networks are trained.

    A target that releases labels only is judged by its label alone: attack networks then learn from the shadow
    networks' labels, one-hot.
    """

    network: TrainingSettings = field(default=ATTACK_NETWORK)
    name: ClassVar[str] = "shadow"

    @property
    def designs(self) -> tuple[Design, ...]:
        """Sets must be disjoint from the target's records."""
        return ("outside",)

    def fit(self, pool: ShadowPool, released: Released, progress: Progress | None = None) -> FittedShadow:
        """Train one attack network per class, all at once."""
        self.check_pool(pool)
        data = attack_data(pool, released)
        classes = pool.data.classes
        by_class = [np.flatnonzero(data.labels == label) for label in range(classes)]
        able = np.array([len(np.unique(data.inside[rows])) == 2 for rows in by_class])
        rows = [each for each, enough in zip(by_class, able, strict=True) if enough]
        # The network for classes without data of both kinds comes last.
        network_of_class = np.where(able, np.cumsum(able) - 1, len(rows))
        if not able.all():
            rows.append(np.arange(len(data.labels)))
        networks = train_stack(
            data.features,
            data.inside,
            2,
            rows,
            settings=self.network,
            seeds=[
                int(seed)
                for seed in np.random.default_rng((0xA77A, self.seed)).integers(2**62, size=len(rows))
            ],
            progress=progress,
        )
        judged = _log_odds(networks, network_of_class, data.features, data.labels)
        was_inside = data.inside == 1
        return FittedShadow(
            networks,
            network_of_class,
            pool.data.records.labels[candidate_rows(pool.data)],
            released,
            threshold=best_threshold(judged[was_inside], judged[~was_inside]),
            notes=_notes(np.flatnonzero(~able)),
        )

    def described(self, pool: ShadowPool) -> dict[str, Any]:
        """The settings of attack and attack networks as JSON values."""
        return {**super().described(pool), "network": settings_to_json(self.network)}


def attack_data(pool: ShadowPool, released: Released) -> AttackData:
    """Every shadow network's answers to its own records, those inside first."""
    records = pool.data.records
    features, labels, inside = [], [], []
    for index, network in enumerate(pool.each()):
        own = np.flatnonzero(pool.inside[index])
        held_out = np.flatnonzero(pool.drawn[index] & ~pool.inside[index])
        rows = np.concatenate([own, held_out])
        answers = plain_answers(network, records.features[rows], released)
        features.append(attack_features(answers, released, records.classes))
        labels.append(records.labels[rows])
        inside.append(np.repeat([1, 0], [len(own), len(held_out)]))
    return AttackData(np.concatenate(features), np.concatenate(labels), np.concatenate(inside))


def attack_features(answers: Answers, released: Released, classes: int) -> NDArray[np.float32]:
    """The probability vector as released, or the label one-hot."""
    if released == "labels":
        return np.eye(classes, dtype=np.float32)[answers.labels]
    if answers.probabilities is None:
        raise InvalidInput(
            "This attack learned from probabilities, but the target releases labels only; fit it to labels."
        )
    return probabilities_of(answers).astype(np.float32)


def _log_odds(
    networks: MLP,
    network_of_class: NDArray[np.int64],
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
) -> Floats:
    """Each record judged by the network of its true class: logit of inside minus logit of outside."""
    judges = network_of_class[labels]
    odds = np.empty(len(labels))
    for judge in np.unique(judges):
        judged = judges == judge
        logits = networks.network(int(judge)).logits(torch.from_numpy(features[judged])).double()
        odds[judged] = (logits[:, 1] - logits[:, 0]).numpy()
    return odds


def _notes(without: NDArray[np.int64]) -> tuple[str, ...]:
    if not len(without):
        return ()
    listed = ", ".join(str(label) for label in without[:10]) + (" ..." if len(without) > 10 else "")
    return (
        f"The shadow networks had no records both inside and outside for {len(without)} classes ({listed}); "
        "one attack network trained on all classes judges those.",
    )
