"""The structure of the package: imports go one way, and the public names are imported on first use."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import quietmax

ROOT = Path(quietmax.__file__).parent
# What a package may import of ours: itself and the packages before it. Everything may import `errors`.
ORDER = [
    "_before_noise",
    "_io",
    "_lazy",
    "_ray",
    "_threads",
    "accounting",
    "noise",
    "spending",
    "data",
    "models",
    "sensitivity",
    "mechanisms",
    "predictor",
    "estimators",
    "export",
    "mlflow",
    "privacy_card",
    "erasure_record",
    "ledger",
    "server",
    "attacks",
    "audit",
    "experiments",
    "cli",
    "__main__",
]
APART = {"spending", "accounting", "noise", "_before_noise", "_io", "_ray", "_threads"}
"""These import no other package of ours."""
HEAVY = ("torch", "sklearn", "pandas", "scipy", "matplotlib")


def _packages() -> list[str]:
    return sorted({path.relative_to(ROOT).parts[0].removesuffix(".py") for path in ROOT.rglob("*.py")})


def _imported(path: Path) -> set[str]:
    """Return the packages of ours that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "quietmax":
                names = [f"quietmax.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("quietmax.")}
    return found - {"errors", "__version__"}


@pytest.mark.parametrize("package", [name for name in _packages() if name not in ("__init__", "errors")])
def test_a_package_imports_only_the_packages_before_it(package: str) -> None:
    assert package in ORDER, (
        f"{package} has no place in the order; add it to docs/architecture.md and to ORDER"
    )
    allowed = set(ORDER[: ORDER.index(package) + 1])
    if package in APART:
        allowed = {package}
    place = ROOT / package
    files = list(place.rglob("*.py")) if place.is_dir() else [ROOT / f"{package}.py"]
    for path in files:
        assert _imported(path) <= allowed, f"{path.relative_to(ROOT)} imports against the order"


def test_errors_imports_nothing_of_ours() -> None:
    assert _imported(ROOT / "errors.py") == set()


def test_no_module_is_named_for_leftovers() -> None:
    leftovers = {"utils", "helpers", "common", "misc"}
    assert not leftovers & {path.stem for path in ROOT.rglob("*.py")}


def test_importing_quietmax_or_its_command_line_imports_no_heavy_library() -> None:
    program = f"import sys, quietmax, quietmax.cli; print([name for name in {HEAVY} if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def _modules() -> dict[str, Path]:
    """Return all modules of ours by name."""
    return {
        ".".join(("quietmax", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in ROOT.rglob("*.py")
    }


def _imported_modules(path: Path, modules: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each import of ours at the top level of a file."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "quietmax":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if full in modules else node.module), alias.name


def test_imports_name_the_module_that_defines_a_thing() -> None:
    """A package's `__init__` gathers names for users; our own modules do not import through it."""
    modules = _modules()
    through = [
        f"{name} imports {thing} from {module}"
        for name, path in modules.items()
        for module, thing in _imported_modules(path, modules)
        if modules[module].name == "__init__.py"
        and module != "quietmax"
        and not name.startswith(module)
        and not module.endswith(f".{thing}")
    ]
    assert not through, "\n".join(through)


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = _modules()
    graph = {
        name: {module for module, _ in _imported_modules(path, modules)} - {name, "quietmax"}
        for name, path in modules.items()
        if path.name != "__init__.py"
    }
    list(TopologicalSorter(graph).static_order())


def test_the_page_on_architecture_describes_every_package_and_names_modules_that_exist() -> None:
    page = (ROOT.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_][a-z0-9_.]*)`", page))
    assert named <= {name.removeprefix("quietmax.") for name in _modules()}
    assert set(_packages()) - {"__init__"} <= named
