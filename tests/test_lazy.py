"""Modules and names that are imported when they are first used."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from quietmax._lazy import lazy_module, lazy_names


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


def test_lazy_names_are_those_of_the_modules_that_define_them() -> None:
    get = lazy_names("json", {"JSONDecoder": "decoder"})
    assert get("JSONDecoder").__module__ == "json.decoder"
    assert get("encoder").__name__ == "json.encoder"
    with pytest.raises(AttributeError, match="module 'json' has no attribute 'nothing'"):
        get("nothing")


def test_a_lazy_module_can_be_sent_to_another_process() -> None:
    used = lazy_module("math")
    assert used.pi > 3
    assert pickle.loads(pickle.dumps(used)).floor(2.5) == 2
