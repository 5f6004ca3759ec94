"""Feature maps for any records: random Fourier features, pipelines; reading maps from JSON."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from quietmax._before_noise import is_plain
from quietmax._lazy import lazy_module, with_plugins
from quietmax.errors import InvalidInput
from quietmax.models.features.base import WIDTH, BatchedMap, FeatureMap, Floats
from quietmax.models.features.encoder import Embedding, Encoder
from quietmax.models.features.images import Joined, Mirrored, Patches, Reduced, Scattering, Turned
from quietmax.models.features.tabular import Identity, OneHot, Scaling, TableCells, TableFeatures, UnitNorm

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

ENTRY_POINT_GROUP = "quietmax.features"
_ROWS_AT_ONCE = 256


@lru_cache(maxsize=4)
def _frequencies(columns: int, pairs: int, bandwidth: float, seed: int) -> torch.Tensor:
    drawn = np.random.default_rng(seed).standard_normal((columns, pairs)) / bandwidth
    return torch.from_numpy(np.pad(drawn, ((0, 0), (0, -pairs % WIDTH))))


@dataclass(frozen=True)
class RandomFourier(BatchedMap):
    """Random Fourier features: a public random map whose inner products approximate a Gaussian kernel.

    The features are `(cos(w_k.x), sin(w_k.x)) / sqrt(K)` for K = count/2 frequencies `w_k ~ N(0, 1/bandwidth^2)`.
    They have length exactly 1, and their inner products approximate `exp(-||x - y||^2 / (2 bandwidth^2))` (Rahimi &
    Recht, 2007).

    Parameters
    ----------
    count : int
        Number of features, even.
    bandwidth : float, optional
        Bandwidth of the kernel. The default `sqrt(m)/4` suits m columns in [0, 1]: two unrelated uniform records
        are about `0.41 sqrt(m)` apart.
    seed : int
        Public seed of the frequencies.

    Examples
    --------
    >>> RandomFourier(count=6).transform([[0.0, 0.0]]).round(3)
    array([[0.577, 0.577, 0.577, 0.   , 0.   , 0.   ]], dtype=float32)
    """

    count: int = 2000
    bandwidth: float | None = None
    seed: int = 0
    kind: ClassVar[str] = "random-fourier"
    parallel: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.count < 2 or self.count % 2:
            raise InvalidInput(
                f"The number of random Fourier features must be even and at least 2, got {self.count}."
            )
        if self.bandwidth is not None and not 0.0 < self.bandwidth < math.inf:
            raise InvalidInput(f"The bandwidth must be a positive number, got {self.bandwidth}.")
        if self.seed < 0:
            raise InvalidInput(f"The public seed must be an integer of at least 0, got {self.seed}.")

    def dimension(self, columns: int) -> int:
        """Return the number of features: `count`."""
        if columns < 1:
            raise InvalidInput("The records must have at least one column.")
        return self.count

    def _batch_rows(self) -> int:
        return _ROWS_AT_ONCE

    def _batch(self, batch: torch.Tensor) -> torch.Tensor:
        columns, pairs = batch.shape[1], self.count // 2
        bandwidth = math.sqrt(columns) / 4 if self.bandwidth is None else float(self.bandwidth)
        angles = (batch.double() @ _frequencies(columns, pairs, bandwidth, self.seed))[:, :pairs]
        return (torch.cat([angles.cos(), angles.sin()], dim=1) / math.sqrt(pairs)).float()


@dataclass(frozen=True)
class Pipeline(FeatureMap):
    """Maps applied one after the other.

    Parameters
    ----------
    maps : tuple of FeatureMap
        At least one map.

    Examples
    --------
    >>> Pipeline((Scaling(low=(0.0,), high=(10.0,)), UnitNorm(constant=1.0))).transform([[20.0]]).round(3)
    array([[0.707, 0.707]], dtype=float32)
    """

    maps: tuple[FeatureMap, ...]
    kind: ClassVar[str] = "pipeline"

    def __post_init__(self) -> None:
        object.__setattr__(self, "maps", tuple(self.maps))
        if not self.maps or not all(isinstance(step, FeatureMap) for step in self.maps):
            raise InvalidInput("A pipeline must be a tuple of at least one feature map and nothing else.")

    def dimension(self, columns: int) -> int:
        """Return the number of features: those of the last map."""
        for step in self.maps:
            columns = step.dimension(columns)
        return columns

    def _features(self, records: Floats) -> Floats:
        for step in self.maps:
            records = step.transform(records)
        return records


def runs_user_code(feature_map: FeatureMap) -> bool:
    """Return whether a map or something in it is not on the list of `_before_noise`."""
    return not is_plain(feature_map, "map")


def describe_map(feature_map: FeatureMap) -> dict[str, Any]:
    """Return a map's public parameters; only the kind of a map that runs the user's code."""
    if runs_user_code(feature_map):
        return {"kind": getattr(feature_map, "kind", type(feature_map).__name__)}
    return feature_map.to_json()


def is_batched(description: Mapping[str, Any]) -> bool:
    """Return whether a map is a `BatchedMap` or a pipeline with one."""
    kind = _KINDS.get(description["kind"])
    steps = description.get("maps", ())
    return (kind is not None and issubclass(kind, BatchedMap)) or any(map(is_batched, steps))


_KINDS: dict[str, type[FeatureMap]] = {
    kind.kind: kind
    for kind in (
        Identity,
        Scaling,
        OneHot,
        UnitNorm,
        TableFeatures,
        TableCells,
        RandomFourier,
        Scattering,
        Patches,
        Mirrored,
        Turned,
        Joined,
        Reduced,
        Encoder,
        Embedding,
        Pipeline,
    )
}


def plugin_maps() -> Mapping[str, type[FeatureMap]]:
    """Return the feature maps of installed plug-ins (entry points in the group `quietmax.features`) by name."""
    known = with_plugins(_KINDS, ENTRY_POINT_GROUP, _read_plugin)
    return {name: known[name] for name in known.keys() - _KINDS.keys()}


def _read_plugin(name: str, loaded: Any) -> tuple[str, type[FeatureMap]]:
    """Return the class of a plug-in, which has the name of its entry point."""
    if not (isinstance(loaded, type) and issubclass(loaded, FeatureMap)):
        raise TypeError("the entry point must be a subclass of quietmax.models.features.FeatureMap")
    if getattr(loaded, "kind", None) != name:
        raise ValueError(f"the `kind` of the class must be the name of the entry point, '{name}'")
    return name, loaded


def make_plugin_map(name: str, image_shape: tuple[int, int, int] | None) -> FeatureMap:
    """Make the feature map of a plug-in with its default parameters."""
    kind = plugin_maps()[name]
    takes_shape = "image_shape" in inspect.signature(kind).parameters
    return kind(image_shape=image_shape) if takes_shape else kind()  # type: ignore[call-arg]


def can_be_stored(feature_map: object) -> bool:
    """Return whether a model folder can describe a map: one of quietmax or of an installed plug-in."""
    if type(feature_map) in (Pipeline, Joined):
        return all(can_be_stored(step) for step in feature_map.maps)  # type: ignore[attr-defined]
    if not isinstance(feature_map, FeatureMap):
        return feature_map is None
    return not runs_user_code(feature_map) or plugin_maps().get(feature_map.kind) is type(feature_map)


def encoders(feature_map: FeatureMap | None) -> tuple[Encoder, ...]:
    """Return the encoders in a map, whose files a model folder must hold."""
    if isinstance(feature_map, Pipeline):
        return tuple(each for step in feature_map.maps for each in encoders(step))
    return (feature_map,) if isinstance(feature_map, Encoder) else ()


def feature_map_from_json(values: Mapping[str, Any], folder: Path | None = None) -> FeatureMap:
    """Return the map that `to_json` described; the files of encoders are in `folder`."""
    try:
        inner = (
            {"maps": [feature_map_from_json(each, folder) for each in values["maps"]]}
            if "maps" in values
            else {}
        )
        located = {} if folder is None else {"folder": folder}
        kind = _KINDS.get(values["kind"]) or plugin_maps()[values["kind"]]
        return kind.from_json({**values, **inner, **located})
    except InvalidInput:
        raise
    except (KeyError, TypeError, ValueError) as problem:
        raise InvalidInput(
            f"These values do not describe a feature map of quietmax or of an installed plug-in: {values!r:.200}."
        ) from problem
