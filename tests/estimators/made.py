"""Estimators from arguments and settings in one dictionary, for tests with many of them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from quietmax.estimators import DPSGD, DPSGDSettings, HeadSettings, PrivateHead

SETTINGS: dict[Any, Any] = {PrivateHead: HeadSettings, DPSGD: DPSGDSettings}


def made(kind: Any, *arguments: Any, **given: Any) -> Any:
    """Return an estimator; what is a field of its settings goes there."""
    if kind not in SETTINGS:
        return kind(*arguments, **given)
    own = {field.name for field in fields(SETTINGS[kind])} & given.keys()
    settings = SETTINGS[kind](**{name: given.pop(name) for name in own})
    return kind(*arguments, **({"settings": settings} if own else {}), **given)
