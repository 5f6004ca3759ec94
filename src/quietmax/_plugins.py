"""Objects that other installed packages add to Quietmax through entry points."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from types import MappingProxyType
from typing import Any, TypeVar

Value = TypeVar("Value")


@cache
def entry_points(group: str) -> tuple[metadata.EntryPoint, ...]:
    """Return the entry points of a group. They are read once: the metadata of all installed packages takes long."""
    return tuple(metadata.entry_points(group=group))


def with_plugins(
    built_in: Mapping[str, Value], group: str, read: Callable[[str, Any], tuple[str, Value]]
) -> Mapping[str, Value]:
    """Return the built-in objects by name, followed by those of installed plug-ins.

    A plug-in that fails to load, that `read` rejects or whose name is in use is skipped with a warning.
    """
    known = dict(built_in)
    for entry in entry_points(group=group):
        try:
            name, value = read(entry.name, entry.load())
            if name in known:
                raise ValueError(f"the name '{name}' is already in use")
        except Exception as error:
            warnings.warn(f"Skipped the plug-in '{entry.name}' ({group}): {error}.", stacklevel=3)
            continue
        known[name] = value
    return MappingProxyType(known)
