"""Imports a script by its path: those of the documentation and the benchmarks belong to no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def script(path: str) -> ModuleType:
    """The module at a path of the project."""
    name = "script_" + Path(path).stem
    found = importlib.util.spec_from_file_location(name, ROOT / path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module
