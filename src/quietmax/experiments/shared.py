"""Shared: what the cells of one group have in common, made when first asked for and kept in the store.

The split of the records, the networks with both losses, the shadow networks, the fitted attacks, the public features
of the proven methods, and the DP-SGD networks of the paper's figures. Trained networks are read back from the store,
so a restarted run trains none of them again.
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
from quietmax.attacks.base import Attack, Fitted, shared_designs
from quietmax.attacks.metrics import Released
from quietmax.attacks.registry import named
from quietmax.attacks.shadow import FittedShadow, Shadow
from quietmax.attacks.shadow_models import Design, ShadowPool, candidate_rows
from quietmax.data.load import load_records
from quietmax.data.records import Records, Split, split
from quietmax.data.registry import dataset
from quietmax.data.tables import is_table_path
from quietmax.estimators.dpsgd.training import train_sweep
from quietmax.estimators.head.training import default_features
from quietmax.experiments.grid import Group, Source
from quietmax.experiments.paper import CENTRED, EPSILONS, paper_records
from quietmax.experiments.results import Arrays, Store
from quietmax.models.losses import Convexified, CrossEntropy, Loss
from quietmax.models.mlp import MLP
from quietmax.models.stacked import TrainingSettings
from quietmax.models.training import Model, train

Features = NDArray[np.float32]


class Shared:
    """Everything of one group; nothing is computed before it is needed."""

    def __init__(self, group: Group, store: Store, data_dir: str | Path | None = None) -> None:
        self.group, self._store, self._data_dir = group, store, data_dir
        self._pools: dict[Design, ShadowPool] = {}
        self._fitted: dict[tuple[str, Released], Fitted] = {}

    @cached_property
    def data(self) -> Split:
        """The records in the paper's encoding, split by the repeat's seed."""
        records = source_records(self.group.source, self._data_dir)
        return split(records, size=self.group.effort.records, seed=self.group.seed + self.group.repeat)

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
        return public_records(self.group.source, self._data_dir, self.data)

    @property
    def encoding_measured(self) -> bool:
        """Whether the encoding that proven methods see was read off the records; nothing is proven then."""
        encoding = self._public.encoding
        return encoding is not None and bool(encoding.inferred)

    @cached_property
    def public_features(self) -> Features:
        """Public features of members and non-members, in the order of `candidate_rows`.

        Adult is encoded one-hot with public bounds; the split is the same, as it depends on the source's records.
        """
        chosen = default_features(self._public.features.shape[1], self._public.image_shape)
        return chosen.transform(self._public.features[candidate_rows(self.data)])

    @cached_property
    def public_inputs(self) -> Features:
        """What a network trained by DP-SGD sees: public features of images, records of tables as they are encoded.

        Records of tables did better than their scaled features in trials on Location and Adult.
        """
        if self._public.image_shape is not None:
            return self.public_features
        return self._public.features[candidate_rows(self.data)]

    @property
    def train_labels(self) -> NDArray[np.int64]:
        """Labels of the training part."""
        return self.data.records.labels[self.data.train_rows]

    @cached_property
    def attacks(self) -> list[Attack]:
        """The group's attacks with its number of shadow networks."""
        return [self._attack(name) for name in self.group.effort.attacks]

    def pool_for(self, attack: Attack) -> ShadowPool:
        """The shadow networks the attack learns from; attacks share them where they can."""
        design = shared_designs(self.attacks)[self.attacks.index(attack)]
        if design not in self._pools:
            self._pools[design] = self._pool(design, attack.seed)
        return self._pools[design]

    def fitted(self, attack: Attack, released: Released) -> Fitted:
        """The attack fitted to the shadow networks; the paper's attack is kept in the store."""
        key = (self._name(attack), released)
        if key not in self._fitted:
            self._fitted[key] = self._fit(attack, released)
        return self._fitted[key]

    def sweep(self, accountant: Accountant, epsilon: float) -> MLP:
        """The DP-SGD network of the paper's figures for an accountant at an epsilon of the paper's."""
        place = PUBLISHED_ACCOUNTANTS.index(accountant) * len(EPSILONS) + EPSILONS.index(epsilon)
        return self._sweep.network(place)

    @cached_property
    def _sweep(self) -> MLP:
        def trained() -> Arrays:
            found = train_sweep([self.data], epsilons=EPSILONS, accountants=PUBLISHED_ACCOUNTANTS)
            return stack_to_arrays(found.networks)

        return stack_from_arrays(self._kept("dpsgd", trained))

    def _network(self, name: str, loss: Loss) -> Model:
        settings = replace(self.settings, loss=loss)
        arrays = self._kept(name, lambda: stack_to_arrays(train(self.data, settings=settings).network))
        records = self.data.records
        return Model(
            stack_from_arrays(arrays),
            settings,
            len(self.data.train_rows),
            records.name,
            self.data.seed,
            records.encoding,
            records.image_shape,
        )

    def _pool(self, design: Design, seed: int) -> ShadowPool:
        def trained() -> Arrays:
            train_pool = ShadowPool.outside if design == "outside" else ShadowPool.around
            pool = train_pool(self.data, self.settings, self.group.effort.shadows, seed=seed)
            arrays = {"inside": pool.inside, "drawn": pool.drawn, "notes": _text(list(pool.notes))}
            for place, stack in enumerate(pool.stacks):
                arrays |= {f"{place}/{name}": value for name, value in stack_to_arrays(stack).items()}
            return arrays

        arrays = self._kept(f"shadows-{design}", trained)
        places = sorted({int(name.split("/")[0]) for name in arrays if "/" in name})
        stacks = tuple(
            stack_from_arrays(
                {name.split("/")[1]: value for name, value in arrays.items() if name.startswith(f"{place}/")}
            )
            for place in places
        )
        notes = tuple(_read_text(arrays["notes"]))
        return ShadowPool(self.data, self.settings, design, stacks, arrays["inside"], arrays["drawn"], notes)

    def _fit(self, attack: Attack, released: Released) -> Fitted:
        if not isinstance(attack, Shadow):
            return attack.fit(self.pool_for(attack), released)

        def trained() -> Arrays:
            fitted = attack.fit(self.pool_for(attack), released)
            return {
                **stack_to_arrays(fitted.networks),
                "network_of_class": fitted.network_of_class,
                "threshold": np.array([fitted.threshold]),
                "notes": _text(list(fitted.notes)),
            }

        arrays = self._kept(f"attack-{self._name(attack)}-{released}", trained)
        return FittedShadow(
            stack_from_arrays(arrays),
            arrays["network_of_class"],
            self.data.records.labels[candidate_rows(self.data)],
            released,
            threshold=float(arrays["threshold"][0]),
            notes=tuple(_read_text(arrays["notes"])),
        )

    def _attack(self, name: str) -> Attack:
        made = named(name, models=self.group.effort.shadows, seed=self.group.seed + self.group.repeat)
        if isinstance(made, Shadow):
            return replace(made, network=replace(made.network, epochs=self.group.effort.attack_epochs))
        return made

    def _name(self, attack: Attack) -> str:
        return self.group.effort.attacks[self.attacks.index(attack)]

    def _kept(self, name: str, make: Callable[[], Arrays]) -> Arrays:
        return self._store.arrays(self.group, name, make)


def source_records(source: Source, data_dir: str | Path | None) -> Records:
    """The records of a source as the networks see them."""
    if is_table_path(source.name):
        return load_records(source.name, **json.loads(source.declared))
    return paper_records(source.name, data_dir=data_dir)


def public_records(source: Source, data_dir: str | Path | None, data: Split) -> Records:
    """The records of a source as the proven methods see them: encoded with public constants only."""
    if is_table_path(source.name):
        return data.records
    if "encoding" in dataset(source.name).options:
        encoded = load_records(source.name, data_dir=data_dir, encoding="one-hot")
        same = split(encoded, size=len(data.train_rows), seed=data.seed)
        assert np.array_equal(same.train_rows, data.train_rows), "encodings must not change the split"
        return encoded
    return data.records if source.name not in CENTRED else load_records(source.name, data_dir=data_dir)


def stack_to_arrays(stack: MLP) -> dict[str, NDArray[Any]]:
    """A stack of networks as named arrays."""
    arrays = {name: tensor.numpy() for name, tensor in stack.parameters()}
    return {**arrays, "shape": _text({"widths": stack.widths, "activation": stack.activation})}


def stack_from_arrays(arrays: Arrays) -> MLP:
    """The stack that `stack_to_arrays` took apart."""
    shape = _read_text(arrays["shape"])
    layers = range(len(shape["widths"]) - 1)
    return MLP(
        tuple(shape["widths"]),
        shape["activation"],
        tuple(torch.from_numpy(arrays[f"kernel.{depth}"]) for depth in layers),
        tuple(torch.from_numpy(arrays[f"bias.{depth}"]) for depth in layers),
    )


def _text(value: Any) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(value).encode() or b" ", dtype=np.uint8)


def _read_text(array: NDArray[np.uint8]) -> Any:
    return json.loads(array.tobytes())
