"""Feature maps one after the other, and reading any of them from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quietmax.errors import InvalidInput
from quietmax.models.features.base import BatchedMap, FeatureMap, Floats
from quietmax.models.features.fourier import RandomFourier
from quietmax.models.features.frozen import FrozenModule
from quietmax.models.features.scattering import Scattering
from quietmax.models.features.tables import Identity, OneHot, Scaling, UnitNorm


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


def holds_own_code(feature_map: FeatureMap) -> bool:
    """Whether the map runs the user's code: a frozen torch module or a class of their own, perhaps in a pipeline.

    >>> holds_own_code(Pipeline((UnitNorm(), Identity())))
    False
    """
    if type(feature_map) is Pipeline:
        return any(holds_own_code(step) for step in feature_map.maps)
    return type(feature_map) is FrozenModule or type(feature_map) not in _KINDS.values()


def described(feature_map: FeatureMap) -> dict[str, Any]:
    """The map's public parameters; of one that runs the user's code, its kind alone.

    >>> described(UnitNorm(constant=0.5))["kind"]
    'unit-norm'
    """
    if holds_own_code(feature_map):
        return {"kind": getattr(feature_map, "kind", type(feature_map).__name__)}
    return feature_map.to_json()


def computed_in_batches(description: Mapping[str, Any]) -> bool:
    """Whether a map, as `described`, is a `BatchedMap` or a pipeline with one.

    >>> computed_in_batches(described(Pipeline((UnitNorm(), RandomFourier(count=2)))))
    True
    """
    kind = _KINDS.get(description["kind"])
    steps = description.get("maps", ())
    return (kind is not None and issubclass(kind, BatchedMap)) or any(map(computed_in_batches, steps))


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
