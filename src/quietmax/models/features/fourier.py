"""Random Fourier features: a public random map whose inner products approximate a Gaussian kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch

from quietmax.errors import InvalidInput
from quietmax.models.features.base import WIDTH, BatchedMap

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
