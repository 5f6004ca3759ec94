"""The public names of the package, which are imported on first use."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import quietmax


def test_all_public_names_are_reached_through_the_package() -> None:
    assert set(quietmax.__all__) <= set(dir(quietmax))
    for name in quietmax.__all__:
        assert getattr(quietmax, name) is not None


def test_users_get_each_public_name_from_the_module_that_type_checkers_see() -> None:
    assert {"Budget", "PrivateHead", "audit", "load"} <= quietmax._MODULES.keys()
    for name, module in quietmax._MODULES.items():
        assert getattr(import_module(module), name) is getattr(quietmax, name)


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
