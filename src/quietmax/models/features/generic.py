"""Random Fourier features: a public random map whose inner products approximate a Gaussian kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch

from quietmax.errors import InvalidInput
from quietmax.models.features.base import WIDTH, BatchedMap, FeatureMap, Floats
from quietmax.models.features.images import Scattering
from quietmax.models.features.tabular import Identity, OneHot, Scaling, UnitNorm

_ROWS_AT_ONCE = 256


@lru_cache(maxsize=4)
def _frequencies(columns: int, pairs: int, bandwidth: float, seed: int) -> torch.Tensor:
    drawn = np.random.default_rng(seed).standard_normal((columns, pairs)) / bandwidth
    return torch.from_numpy(np.pad(drawn, ((0, 0), (0, -pairs % WIDTH))))


@dataclass(frozen=True)
class RandomFourier(BatchedMap):
    """`(cos(w_k.x), sin(w_k.x)) / sqrt(K)` for K = count/2 frequencies `w_k ~ N(0, 1/bandwidth^2)`, from a public seed.

    Every record's features have length exactly 1, and their inner products approximate `exp(-||x - y||^2 /
    (2 bandwidth^2))` (Rahimi & Recht, 2007). The default bandwidth `sqrt(m)/4` suits m columns in [0, 1]:
    two unrelated uniform records are about `0.41 sqrt(m)` apart.

    >>> RandomFourier(count=6).transform([[0.0, 0.0]]).round(3)
    array([[0.577, 0.577, 0.577, 0.   , 0.   , 0.   ]], dtype=float32)
    """

    count: int = 2000
    bandwidth: float | None = None
    seed: int = 0
    kind: ClassVar[str] = "random-fourier"

    def __post_init__(self) -> None:
        if self.count < 2 or self.count % 2:
            raise InvalidInput(
                f"The number of random Fourier features is {self.count}, but must be even and at least 2; give one."
            )
        if self.bandwidth is not None and not 0.0 < self.bandwidth < math.inf:
            raise InvalidInput(f"The bandwidth is {self.bandwidth}, but must be a positive number; give one.")
        if self.seed < 0:
            raise InvalidInput(
                f"The public seed is {self.seed}, but must be a whole number from 0 up; give one."
            )

    def dimension(self, columns: int) -> int:
        """The number asked for."""
        if columns < 1:
            raise InvalidInput(
                "The records have no columns, but at least one is needed; give records with features."
            )
        return self.count

    def _batch_rows(self) -> int:
        return _ROWS_AT_ONCE

    def _batch(self, batch: torch.Tensor) -> torch.Tensor:
        columns, pairs = batch.shape[1], self.count // 2
        bandwidth = math.sqrt(columns) / 4 if self.bandwidth is None else float(self.bandwidth)
        angles = (batch.double() @ _frequencies(columns, pairs, bandwidth, self.seed))[:, :pairs]
        return (torch.cat([angles.cos(), angles.sin()], dim=1) / math.sqrt(pairs)).float()

    def to_json(self) -> dict[str, Any]:
        """Count, bandwidth and seed."""
        return {"kind": self.kind, "count": self.count, "bandwidth": self.bandwidth, "seed": self.seed}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RandomFourier:
        """The inverse of `to_json`."""
        bandwidth = values["bandwidth"]
        return cls(int(values["count"]), None if bandwidth is None else float(bandwidth), int(values["seed"]))


@dataclass(frozen=True, eq=False)
class FrozenModule(BatchedMap):
    """The outputs of a torch module whose weights owe nothing to the private records, flattened per record.

    The module gets batches of `rows_at_once` records shaped `(rows, *input_shape)` (`(rows, m)` without
    one), in evaluation mode and without gradients. A module that mixes the rows of a batch gets one record at a time.

    >>> FrozenModule(torch.nn.ReLU(), outputs=2).transform([[-1.0, 2.0]])
    array([[0., 2.]], dtype=float32)
    """

    module: torch.nn.Module
    outputs: int
    input_shape: tuple[int, ...] | None = None
    rows_at_once: int = field(default=64, kw_only=True)
    kind: ClassVar[str] = "frozen-module"

    def dimension(self, columns: int) -> int:
        """The declared number of outputs."""
        if self.input_shape is not None and int(np.prod(self.input_shape)) != columns:
            raise InvalidInput(
                f"The records have {columns} numbers, which do not make an input of shape {self.input_shape}; correct "
                "the shape or the records."
            )
        return self.outputs

    def _batch_rows(self) -> int:
        return self.rows_at_once

    def _batch(self, batch: torch.Tensor) -> torch.Tensor:
        shape = (-1,) if self.input_shape is None else self.input_shape
        outputs: torch.Tensor = self.module(batch.reshape(len(batch), *shape))
        if outputs.shape[0] != len(batch) or outputs[0].numel() != self.outputs:
            raise InvalidInput(
                f"The module returned values of shape {tuple(outputs.shape)} for {len(batch)} records, but "
                f"{self.outputs} per record were declared; correct the number of outputs."
            )
        return outputs.reshape(len(batch), -1).to(torch.float32)

    def _features(self, records: Floats) -> Floats:
        training = self.module.training
        self.module.eval()
        try:
            return super()._features(records)
        finally:
            self.module.train(training)

    def to_json(self) -> NoReturn:
        """Refused: a module's code cannot be written to a file that is safe to load."""
        raise InvalidInput(
            "A head on a frozen torch module cannot be saved, because its code cannot be stored safely; save the "
            "module yourself and build the head's features from it again."
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> NoReturn:  # noqa: ARG003
        """Refused, as `to_json` is."""
        raise InvalidInput(
            "A frozen torch module cannot be read from a file; build the feature map in Python."
        )


@dataclass(frozen=True)
class Pipeline(FeatureMap):
    """Maps applied one after the other.

    >>> Pipeline((Scaling(low=(0.0,), high=(10.0,)), UnitNorm(constant=1.0))).transform([[20.0]]).round(3)
    array([[0.707, 0.707]], dtype=float32)
    """

    maps: tuple[FeatureMap, ...]
    kind: ClassVar[str] = "pipeline"

    def __post_init__(self) -> None:
        object.__setattr__(self, "maps", tuple(self.maps))
        if not self.maps or not all(isinstance(step, FeatureMap) for step in self.maps):
            raise InvalidInput(
                "A pipeline needs at least one feature map and nothing else; give a tuple of maps."
            )

    def dimension(self, columns: int) -> int:
        """What the last map returns."""
        for step in self.maps:
            columns = step.dimension(columns)
        return columns

    def _features(self, records: Floats) -> Floats:
        for step in self.maps:
            records = step.transform(records)
        return records

    def to_json(self) -> dict[str, Any]:
        """The maps in order."""
        return {"kind": self.kind, "maps": [step.to_json() for step in self.maps]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Pipeline:
        """The inverse of `to_json`."""
        return cls(tuple(feature_map_from_json(step) for step in values["maps"]))


def runs_user_code(feature_map: FeatureMap) -> bool:
    """Whether the map runs the user's code: a frozen torch module or a class of their own, perhaps in a pipeline.

    >>> runs_user_code(Pipeline((UnitNorm(), Identity())))
    False
    """
    if type(feature_map) is Pipeline:
        return any(runs_user_code(step) for step in feature_map.maps)
    return type(feature_map) is FrozenModule or type(feature_map) not in _KINDS.values()


def describe_map(feature_map: FeatureMap) -> dict[str, Any]:
    """The map's public parameters; of one that runs the user's code, its kind alone.

    >>> describe_map(UnitNorm(constant=0.5))["kind"]
    'unit-norm'
    """
    if runs_user_code(feature_map):
        return {"kind": getattr(feature_map, "kind", type(feature_map).__name__)}
    return feature_map.to_json()


def is_batched(description: Mapping[str, Any]) -> bool:
    """Whether a map, as `describe_map` gives it, is a `BatchedMap` or a pipeline with one.

    >>> is_batched(describe_map(Pipeline((UnitNorm(), RandomFourier(count=2)))))
    True
    """
    kind = _KINDS.get(description["kind"])
    steps = description.get("maps", ())
    return (kind is not None and issubclass(kind, BatchedMap)) or any(map(is_batched, steps))


_KINDS: dict[str, type[FeatureMap]] = {
    kind.kind: kind
    for kind in (Identity, Scaling, OneHot, UnitNorm, RandomFourier, Scattering, FrozenModule, Pipeline)
}


def feature_map_from_json(values: Mapping[str, Any]) -> FeatureMap:
    """The map that `to_json` described.

    >>> feature_map_from_json(UnitNorm(constant=0.5).to_json())
    UnitNorm(constant=0.5)
    """
    try:
        return _KINDS[values["kind"]].from_json(values)
    except InvalidInput:
        raise
    except (KeyError, TypeError, ValueError) as problem:
        raise InvalidInput(
            "This is not the description of a feature map; give what a map's to_json returned."
        ) from problem
