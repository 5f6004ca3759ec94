"""One feature map of every kind, and records for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from quietmax.models.features import (
    BatchedMap,
    Embedding,
    FeatureMap,
    Identity,
    OneHot,
    Pipeline,
    RandomFourier,
    Scaling,
    Scattering,
    TableFeatures,
    UnitNorm,
)
from quietmax.models.features.images import Joined, Mirrored, Patches, Reduced, Turned

COLUMNS = 3 * 12 * 10


@dataclass(frozen=True, eq=False)
class ModuleMap(BatchedMap):
    """A map of the user's own: the outputs of a torch module."""

    module: torch.nn.Module
    outputs: int
    kind: ClassVar[str] = "own-module"

    def dimension(self, columns: int) -> int:  # noqa: ARG002
        return self.outputs

    def _batch_rows(self) -> int:
        return 64

    def _batch(self, batch: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.module(batch)
        return outputs.reshape(len(batch), -1).to(torch.float32)


SAVEABLE: list[FeatureMap] = [
    Identity(),
    Scaling(low=(-1.0,) * COLUMNS, high=(2.0,) * COLUMNS),
    OneHot((None,) * (COLUMNS - 1) + ((0.0, 0.5, 1.0),)),
    UnitNorm(),
    UnitNorm(constant=0.7),
    Embedding(0.5),
    TableFeatures(COLUMNS),
    TableFeatures(COLUMNS, (0, 5), (1, None), (4, 12), (((2, 4), (360, 364)), ((6, 9), (10, 11)))),
    RandomFourier(count=50, seed=3),
    RandomFourier(count=50, bandwidth=2.0),
    RandomFourier(count=2),
    Scattering((3, 12, 10), scales=1, angles=4, groups=5),
    Scattering((3, 12, 10), whitening=0.0),
    Patches((3, 12, 10)),
    Patches((3, 12, 10), cells=3),
    Mirrored(Scattering((3, 12, 10), scales=1, angles=4, groups=5)),
    Turned(Scattering((3, 12, 10), scales=1, angles=4, groups=5), pairs=32),
    Turned(Scattering((3, 12, 10), whitening=0.0), degrees=(-7.5, 20.0), pairs=0),
    Joined((Patches((3, 12, 10)), Mirrored(Scattering((3, 12, 10))), Scattering((3, 12, 10), whitening=0.0))),
    Reduced((3, 12, 10), Scattering((3, 6, 7))),
    Reduced((3, 12, 10), Turned(Scattering((3, 6, 7)))),
    Pipeline((Scaling(low=(0.0,) * COLUMNS, high=(2.0,) * COLUMNS), RandomFourier(count=20), UnitNorm(0.1))),
]


MAPS = [
    *SAVEABLE,
    ModuleMap(torch.nn.Sequential(torch.nn.Linear(COLUMNS, 17), torch.nn.Tanh()), outputs=17),
]


def named(feature_map: FeatureMap) -> str:
    return feature_map.kind


def records(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((rows, COLUMNS)).astype(np.float32)
