"""The public names of the package, which are imported on first use."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

import quietmax


def test_all_public_names_are_reached_through_the_package() -> None:
    assert set(quietmax.__all__) <= set(dir(quietmax))
    for name in quietmax.__all__:
        assert getattr(quietmax, name) is not None


def test_type_checkers_see_the_same_public_names_as_users() -> None:
    """The imports under TYPE_CHECKING name the module that `__getattr__` takes each name from."""
    (checked,) = (
        node
        for node in ast.parse(Path(quietmax.__file__).read_text(encoding="utf-8")).body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    seen = {}
    for node in checked.body:
        assert isinstance(node, ast.ImportFrom)
        assert node.module is not None
        for alias in node.names:
            seen[alias.name] = node.module.removeprefix("quietmax").removeprefix(".")
    packages = {
        name: "" for name in quietmax.__all__ if name not in quietmax._MODULES and name != "__version__"
    }
    assert seen == {**quietmax._MODULES, **packages}


def test_a_star_import_gives_the_public_names_and_an_unknown_name_is_an_error() -> None:
    names: dict[str, object] = {}
    exec("from quietmax import *", names)
    assert set(quietmax.__all__) <= set(names)
    assert quietmax.noise.SeededNoise is quietmax.SeededNoise  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'Bugdet'"):
        quietmax.Bugdet  # type: ignore[attr-defined]  # noqa: B018


def test_the_citation_has_the_version_and_the_date_of_the_last_release_in_the_changelog() -> None:
    root = Path(__file__).parents[1]
    citation = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    releases = re.findall(
        r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert (str(citation["version"]), str(citation["date-released"])) == releases[0]
    if "dev" not in quietmax.__version__:
        assert quietmax.__version__ == releases[0][0]
