"""What the trials of one group share: records, networks, attacks, public features.

Nothing is computed before it is needed. Trained networks are kept in the result store, so a run that is started again
trains none of them again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quietmax.accounting.dpsgd import PUBLISHED_ACCOUNTANTS, Accountant
from quietmax.attacks.base import Attack, FittedAttack, shared_designs
from quietmax.attacks.builtin import FittedShadow, Shadow, make_attack
from quietmax.attacks.metrics import Released
from quietmax.attacks.shadow_models import Design, ShadowPool, candidate_rows
from quietmax.data.records import Records, Split, hold_out, split
from quietmax.data.registry import dataset, load_records
from quietmax.data.sources import is_table_path
from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd.training import train_sweep
from quietmax.estimators.head.weights import default_features
from quietmax.experiments.grid import DataSource, Group
from quietmax.experiments.paper import EPSILONS
from quietmax.experiments.results import Arrays, ResultStore
from quietmax.models.features.base import FeatureMap
from quietmax.models.mlp import MLP
from quietmax.models.serialization import mlp_from
from quietmax.models.stacked import Convexified, CrossEntropy, Loss, TrainingSettings
from quietmax.models.training import Model, train

Features = NDArray[np.float32]

_STORED_DESIGNS: dict[Design, str] = {"disjoint": "outside", "overlapping": "around"}
"""The names that version 0.1 gave to stored shadow networks, so that they are found again."""

_CENTRED = frozenset({"cifar-10", "cifar-100"})
"""Data sets whose pixels are shifted by one half for the paper's networks.

The paper does not say how it scales pixels. With its stated learning rate, this shift gives CIFAR-100's convexified
row. What gives the other numbers of CIFAR is measured in `quietmax.experiments.measurements`.
"""


_HOLDOUT = 0.2
"""Share of a table that is the test part of a comparison unless it is given."""


class SharedInputs:
    """The shared inputs of one group."""

    def __init__(self, group: Group, store: ResultStore, data_dir: str | Path | None = None) -> None:
        self.group, self._store, self._data_dir = group, store, data_dir
        self._pools: dict[Design, ShadowPool] = {}
        self._fitted: dict[tuple[str, Released], FittedAttack] = {}

    @cached_property
    def data(self) -> Split:
        """The records in the paper's encoding, split by the repeat's seed."""
        records, effort = source_records(self.group.source, self._data_dir), self.group.effort
        seed = self.group.seed + self.group.repeat
        if effort.holdout is not None:
            return hold_out(records, effort.holdout, seed=seed)
        return split(records, size=effort.records, seed=seed)

    @cached_property
    def settings(self) -> TrainingSettings:
        """How the network and its shadows are trained."""
        effort = self.group.effort
        return TrainingSettings(loss=Convexified(effort.alpha), epochs=effort.epochs)

    @cached_property
    def model(self) -> Model:
        """The network with the convexified loss."""
        return self._network("convexified", self.settings.loss)

    @cached_property
    def original(self) -> Model:
        """The network with the ordinary loss."""
        return self._network("original", CrossEntropy())

    @cached_property
    def _public(self) -> Records:
        return _public_records(self.group.source, self._data_dir, self.data)

    @property
    def encoding_measured(self) -> bool:
        """Whether parts of the encoding were inferred from the records; then nothing is proven."""
        encoding = self._public.encoding
        return encoding is not None and bool(encoding.inferred)

    def public_features(self, rows: NDArray[np.int64]) -> Features:
        """Return public features of rows; those of members and non-members are computed once."""
        features_map, place, candidates = self._candidate_features
        features = candidates[place[rows]]
        if len(others := np.flatnonzero(place[rows] < 0)):
            features[others] = features_map.transform(self._public.features[rows[others]])
        return features

    @cached_property
    def _candidate_features(self) -> tuple[FeatureMap, NDArray[np.int64], Features]:
        """The map, the place of each record among the candidates (-1: none), and the candidates' features."""
        chosen = default_features(self._public.features.shape[1], self._public.image_shape)
        order, place = candidate_rows(self.data), np.full(len(self.data.records), -1)
        place[order] = np.arange(len(order))
        return chosen, place, chosen.transform(self._public.features[order])

    @cached_property
    def attacks(self) -> dict[str, Attack]:
        """The group's attacks with its number of shadow networks, by name."""
        effort = self.group.effort
        seed = self.group.seed + self.group.repeat
        made = {name: make_attack(name, models=effort.shadows, seed=seed) for name in effort.attacks}
        return {
            name: replace(attack, network=replace(attack.network, epochs=effort.attack_epochs))
            if isinstance(attack, Shadow)
            else attack
            for name, attack in made.items()
        }

    def pool_for(self, name: str) -> ShadowPool:
        """Return the shadow networks that an attack learns from; attacks share them where they can."""
        designs = shared_designs(list(self.attacks.values()), self.data)
        design = dict(zip(self.attacks, designs, strict=True))[name]
        if design not in self._pools:
            self._pools[design] = self._pool(design, self.attacks[name].seed)
        return self._pools[design]

    def fitted(self, name: str, released: Released) -> FittedAttack:
        """Return an attack fitted to the shadow networks. The paper's attack is kept in the store."""
        if (name, released) not in self._fitted:
            self._fitted[name, released] = self._fit(name, released)
        return self._fitted[name, released]

    def published_dpsgd(self, accountant: Accountant, epsilon: float) -> MLP:
        """Return the network that DP-SGD trains as published."""
        place = PUBLISHED_ACCOUNTANTS.index(accountant) * len(EPSILONS) + EPSILONS.index(epsilon)
        return self._published_dpsgd.network(place)

    @cached_property
    def _published_dpsgd(self) -> MLP:
        """The networks for all accountants and epsilons, trained at once with the paper's loss: each record's is
        convexified by itself, so that its gradient can be clipped.
        """

        def train_networks() -> Arrays:
            sweep = train_sweep(
                [self.data],
                epsilons=EPSILONS,
                accountants=PUBLISHED_ACCOUNTANTS,
                alpha=self.group.effort.alpha,
            )
            return _stack_to_arrays(sweep.networks)

        return _stack_from_arrays(self._stored("dpsgd-convexified", train_networks))

    def _network(self, name: str, loss: Loss) -> Model:
        settings = replace(self.settings, loss=loss)
        arrays = self._stored(name, lambda: _stack_to_arrays(train(self.data, settings=settings).network))
        records = self.data.records
        return Model(
            _stack_from_arrays(arrays),
            settings,
            len(self.data.train_rows),
            records.name,
            self.data.seed,
            records.encoding,
            records.image_shape,
        )

    def _pool(self, design: Design, seed: int) -> ShadowPool:
        def trained() -> Arrays:
            pool = ShadowPool.train(design, self.data, self.settings, self.group.effort.shadows, seed=seed)
            arrays = {"inside": pool.inside, "drawn": pool.drawn, "notes": _to_bytes(list(pool.notes))}
            for place, stack in enumerate(pool.stacks):
                arrays |= {f"{place}/{name}": value for name, value in _stack_to_arrays(stack).items()}
            return arrays

        arrays = self._stored(f"shadows-{_STORED_DESIGNS[design]}", trained)
        places = sorted({int(name.split("/")[0]) for name in arrays if "/" in name})
        stacks = tuple(
            _stack_from_arrays({name.removeprefix(f"{place}/"): value for name, value in arrays.items()})
            for place in places
        )
        notes = tuple(_from_bytes(arrays["notes"]))
        return ShadowPool(self.data, self.settings, design, stacks, arrays["inside"], arrays["drawn"], notes)

    def _fit(self, name: str, released: Released) -> FittedAttack:
        attack = self.attacks[name]
        if not isinstance(attack, Shadow):
            return attack.fit(self.pool_for(name), released)

        def trained() -> Arrays:
            fitted = attack.fit(self.pool_for(name), released)
            return {
                **_stack_to_arrays(fitted.networks),
                "network_of_class": fitted.network_of_class,
                "threshold": np.array([fitted.threshold]),
                "notes": _to_bytes(list(fitted.notes)),
            }

        arrays = self._stored(f"attack-{name}-{released}", trained)
        return FittedShadow(
            _stack_from_arrays(arrays),
            arrays["network_of_class"],
            self.data.records.labels[candidate_rows(self.data)],
            released,
            threshold=float(arrays["threshold"][0]),
            notes=tuple(_from_bytes(arrays["notes"])),
        )

    def _stored(self, name: str, make: Callable[[], Arrays]) -> Arrays:
        return self._store.arrays(self.group, name, make)


def source_records(source: DataSource, data_dir: str | Path | None = None) -> Records:
    """Load the records of a source as the paper's networks see them."""
    if is_table_path(source.name):
        return load_records(source.name, **json.loads(source.declared))
    records = load_records(source.name, data_dir=data_dir)
    if source.name in _CENTRED:
        return replace(records, features=records.features - np.float32(0.5))
    return records


def _public_records(source: DataSource, data_dir: str | Path | None, data: Split) -> Records:
    """The records as proven methods see them: encoded with public constants only, Adult one-hot with public bounds."""
    if is_table_path(source.name):
        return data.records
    if "encoding" in dataset(source.name).options:
        encoded = load_records(source.name, data_dir=data_dir, encoding="one-hot")
        same = split(encoded, size=len(data.train_rows), seed=data.seed)
        assert np.array_equal(same.train_rows, data.train_rows), "encodings must not change the split"
        return encoded
    return load_records(source.name, data_dir=data_dir) if source.name in _CENTRED else data.records


def training_size(
    source: DataSource, records: int | None, holdout: float | None, data_dir: str | Path | None = None
) -> tuple[int, float | None]:
    """Return the number of training records (or persons) of a comparison, and the share that is the test part.

    The share is None for the paper's split.
    """
    table = is_table_path(source.name)
    if records is not None:
        if table or holdout is not None:
            raise InvalidInput(
                "`records` applies only to the paper's split of registered data sets; `holdout` is the share of a "
                "table that is held out."
            )
        return records, None
    share = holdout if holdout is not None else _HOLDOUT if table else dataset(source.name).holdout
    if share is None:
        return dataset(source.name).records, None
    if not 0 < share < 1:
        raise InvalidInput(
            f"`holdout` must be above 0 and below 1, since a comparison tests on it; got {share}."
        )
    units = int(source_records(source, data_dir).units.max(initial=-1)) + 1
    return max(1, round((1 - share) * units)), share


def _stack_to_arrays(stack: MLP) -> dict[str, NDArray[Any]]:
    """A stack of networks as named arrays."""
    arrays = {name: tensor.numpy() for name, tensor in stack.parameters()}
    return {**arrays, "shape": _to_bytes({"widths": stack.widths, "activation": stack.activation})}


def _stack_from_arrays(arrays: Arrays) -> MLP:
    """The inverse of `_stack_to_arrays`; other arrays are ignored."""
    tensors = {
        name: torch.from_numpy(array)
        for name, array in arrays.items()
        if name.startswith(("kernel.", "bias."))
    }
    return mlp_from(tensors, **_from_bytes(arrays["shape"]))


def _to_bytes(value: Any) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(value).encode() or b" ", dtype=np.uint8)


def _from_bytes(array: NDArray[np.uint8]) -> Any:
    return json.loads(array.tobytes())
