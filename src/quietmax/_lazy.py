"""Modules, names and plug-ins that are imported when they are first used, so that a command imports only what it needs.

PyTorch alone takes longer to import than a small service takes to start.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from quietmax.errors import DataUnavailable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Value = TypeVar("Value")


class _LazyModule(ModuleType):
    """Stands for a module until one of its attributes is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":  # what tools ask of any object
            raise AttributeError(name)
        module = import_module(self.__name__)
        try:
            value = getattr(module, name)
        except AttributeError:
            try:
                value = import_module(f"{self.__name__}.{name}")
            except ModuleNotFoundError:
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from None
        setattr(self, name, value)
        return value

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        """Send the name alone to another process, with a function that uses the module."""
        return lazy_module, (self.__name__,)


def lazy_module(name: str) -> Any:
    """Return a module that is imported when it is first used."""
    return _LazyModule(name)


def required(package: str, what: str, *modules: str, extra: str | None = None) -> Any:
    """Import a package, and modules of it, that an extra (by default of the same name) installs."""
    try:
        for module in modules:
            import_module(f"{package}.{module}")
        return import_module(package)
    except ImportError:
        raise DataUnavailable(
            f"{what} requires the package {package}. Install: pip install 'quietmax[{extra or package}]'."
        ) from None


def lazy_names(package: str) -> tuple[Callable[[str], Any], dict[str, str]]:
    """Return the `__getattr__` of a package whose public names are imported on first use, and their modules by name.

    The names are those that its ``__init__.py`` imports for type checkers, below ``if TYPE_CHECKING:``.
    """
    tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
    below = (each for part in tree.body if isinstance(part, ast.If) for each in part.body)
    modules = {
        alias.name: str(each.module)
        for each in below
        if isinstance(each, ast.ImportFrom)
        for alias in each.names
    }

    def _get(name: str) -> Any:
        module = modules.get(name, package)
        if module != package:
            return getattr(import_module(module), name)
        if not name.startswith("_"):
            try:
                return import_module(f"{package}.{name}")
            except ModuleNotFoundError:
                pass
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return _get, modules


@cache
def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group. They are read once: the metadata of all installed packages takes long."""
    from importlib import metadata

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
