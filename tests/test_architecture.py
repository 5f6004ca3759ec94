"""Imports go one way, as drawn in the architecture page."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import quietmax

ROOT = Path(quietmax.__file__).parent
# What a package may import of ours: the packages before it. `errors` and `version` are open to all.
ORDER = [
    "_io",
    "_plugins",
    "accounting",
    "noise",
    "spending",
    "data",
    "models",
    "sensitivity",
    "mechanisms",
    "predictor",
    "estimators",
    "privacy_card",
    "ledger",
    "server",
    "attacks",
    "audit",
    "experiments",
    "surface",
    "cli",
]
APART = {"spending", "accounting", "noise", "_io", "_plugins"}


def _packages() -> list[str]:
    return sorted({path.relative_to(ROOT).parts[0].removesuffix(".py") for path in ROOT.rglob("*.py")})


def _imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "quietmax":
                names = [f"quietmax.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("quietmax.")}
    return found - {"errors", "version"}


@pytest.mark.parametrize(
    "package", [name for name in _packages() if name not in ("__init__", "errors", "version")]
)
def test_a_package_imports_only_what_stands_before_it(package):
    assert package in ORDER, f"{package} has no place in the order; add it to the architecture and to ORDER"
    allowed = set(ORDER[: ORDER.index(package) + 1])
    if package in APART:
        allowed = {package}
    place = ROOT / package
    files = list(place.rglob("*.py")) if place.is_dir() else [ROOT / f"{package}.py"]
    for path in files:
        assert _imported(path) <= allowed, f"{path.relative_to(ROOT)} imports against the order"


def test_errors_and_version_import_nothing_of_ours():
    assert _imported(ROOT / "errors.py") == set()
    assert _imported(ROOT / "version.py") == set()


def test_no_module_is_named_for_leftovers():
    leftovers = {"utils", "helpers", "common", "misc"}
    assert not leftovers & {path.stem for path in ROOT.rglob("*.py")}
