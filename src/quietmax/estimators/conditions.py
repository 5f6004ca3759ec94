"""What makes a proven guarantee conditional, in one set of words for all estimators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quietmax.accounting import Guarantee
from quietmax.accounting.guarantee import Status
from quietmax.models.features import FeatureMap, computed_in_batches, holds_own_code


@dataclass(frozen=True)
class Condition:
    """A sentence added to the reason of a guarantee, and the assumptions on which it then rests."""

    because: str
    assumptions: tuple[str, ...]


SETTINGS_PUBLIC = "The feature map and all settings were chosen without looking at the private records."
LIBRARY_ROUNDING = (
    "The numerical library rounds a record's features alike at every place of a batch and beside all other records. "
    "This was checked on synthetic records before training; `quietmax audit invariant` checks it again."
)
LIBRARY_STACK = (
    "The numerical library computes every network of a stack from that network's numbers alone, and rounds equal "
    "calls alike. `quietmax audit invariant` checks it."
)
CLASSES = Condition(
    "The classes were not declared (THEORY 3.1).",
    ("The set of classes is public: it was read off the labels, since none were declared.",),
)
SIZE = Condition(
    "The number of records was not declared (THEORY 3.1).",
    ("The number of records is public: it was read off them, since no declared_size was given.",),
)
MAP = Condition(
    "The feature map runs the user's own code.",
    ("The user's own feature map computes a record's features from that record alone.",),
)
BUILDER = Condition(
    "The teachers are the user's own modules.",
    ("The user's own modules share nothing: a record changes the answers of its own teacher alone.",),
)


def map_assumptions(description: Mapping[str, Any] | None) -> tuple[str, ...]:
    """What a proven guarantee assumes of the library because of its feature map, as `features.described` states it."""
    return () if description is None or not computed_in_batches(description) else (LIBRARY_ROUNDING,)


def weakened(guarantee: Guarantee, condition: Condition) -> Guarantee:
    """The guarantee under a further condition."""
    status: Status = "conditional" if guarantee.status == "proven" else guarantee.status
    return guarantee.weakened(status, f"{guarantee.because} {condition.because}", condition.assumptions)


def runs_own_code(features: object) -> bool:
    """Whether a feature map (None for none) is the user's own, or holds code of theirs.

    >>> runs_own_code(None), runs_own_code(object())
    (False, True)
    """
    if isinstance(features, FeatureMap):
        return holds_own_code(features)
    return features is not None
