"""Modules, names and plug-ins that are imported when they are first used."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from quietmax._lazy import lazy_module, with_plugins


def test_a_lazy_module_is_imported_by_the_first_use_and_not_before() -> None:
    code = """
import sys
from quietmax._lazy import lazy_module
colours = lazy_module("colorsys")
assert not hasattr(colours, "__wrapped__") and "colorsys" not in sys.modules
assert colours.rgb_to_hsv(0, 0, 0) == (0.0, 0.0, 0) and "colorsys" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_lazy_module_finds_modules_inside_it_and_names_what_is_missing() -> None:
    assert lazy_module("xml").dom.__name__ == "xml.dom"
    with pytest.raises(AttributeError, match="module 'math' has no attribute 'nothing'"):
        _ = lazy_module("math").nothing


def test_lazy_names_are_those_that_a_package_imports_for_type_checkers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "lazily"
    package.mkdir()
    (package / "inner.py").write_text("", encoding="utf-8")
    (package / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from quietmax._lazy import lazy_names\n"
        "if TYPE_CHECKING:\n"
        "    from json.decoder import JSONDecoder as JSONDecoder\n"
        "    from lazily import inner as inner\n"
        "__getattr__, modules = lazy_names(__name__)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    lazily = import_module("lazily")
    assert lazily.modules == {"JSONDecoder": "json.decoder", "inner": "lazily"}
    assert lazily.JSONDecoder.__module__ == "json.decoder"
    assert lazily.inner.__name__ == "lazily.inner"
    with pytest.raises(AttributeError, match="module 'lazily' has no attribute 'nothing'"):
        _ = lazily.nothing


def test_a_lazy_module_can_be_sent_to_another_process() -> None:
    used = lazy_module("math")
    assert used.pi > 3
    assert pickle.loads(pickle.dumps(used)).floor(2.5) == 2


EVEN = 2
ODD = 3


def read(name: str, loaded: Any) -> tuple[str, int]:
    if loaded % 2:
        raise ValueError("the number is odd")
    return name, loaded


def install(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    entries = [EntryPoint(name, value, "quietmax.numbers") for name, value in values.items()]
    monkeypatch.setattr(
        "quietmax._lazy.entry_points", lambda group: entries if group == "quietmax.numbers" else []
    )


def test_the_metadata_of_installed_packages_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []

    def entry_points(*, group: str) -> tuple[EntryPoint, ...]:
        reads.append(group)
        return ()

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    for _ in range(3):
        assert dict(with_plugins({"zero": 0}, "quietmax.never-read-before", read)) == {"zero": 0}
    assert reads == ["quietmax.never-read-before"]


def test_plugins_follow_the_built_in_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, two=f"{__name__}:EVEN")
    assert list(with_plugins({"zero": 0}, "quietmax.numbers", read).items()) == [("zero", 0), ("two", 2)]
    assert dict(with_plugins({"zero": 0}, "quietmax.others", read)) == {"zero": 0}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("three", f"{__name__}:ODD", "the number is odd"),
        ("zero", f"{__name__}:EVEN", "the name 'zero' is already in use"),
        ("absent", f"{__name__}:ABSENT", "has no attribute 'ABSENT'"),
        ("missing", "no_such_module:EVEN", "No module named 'no_such_module'"),
    ],
)
def test_a_broken_plugin_is_skipped_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    install(monkeypatch, **{name: value})
    with pytest.warns(UserWarning, match=f"Skipped the plug-in '{name}' .quietmax.numbers.: .*{reason}"):
        assert dict(with_plugins({"zero": 0}, "quietmax.numbers", read)) == {"zero": 0}
