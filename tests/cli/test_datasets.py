from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import assert_error, document, printed, run


def test_all_thirteen_data_sets_are_listed() -> None:
    names = [entry["name"] for entry in document("datasets")]
    assert len(names) == 13
    assert {"fair", "mnist-5k"} <= set(names)
    shown = " ".join(printed("datasets").split())
    assert all(name in shown for name in names)


def test_what_is_present_comes_first_and_equal_needs_are_named_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIETMAX_DATA", str(tmp_path))
    out = printed("datasets")
    assert out.index("fair") < out.index("adult")
    assert out.count("dataset_purchase.tgz") == 1
    assert "purchase-2, purchase-10, purchase-20, purchase-50, purchase-100: dataset_purchase in" in out


def test_missing_files_of_a_data_set_are_downloaded_on_demand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIETMAX_DATA", str(tmp_path))
    fetched: list[str] = []
    monkeypatch.setattr("quietmax.data.registry._fetch", lambda each, *_, **__: fetched.append(each.name))
    assert_error(run("datasets", "--download", "adult"), 1, "adult", "quietmax datasets --download adult")
    assert fetched[0].startswith("adult")
    assert_error(run("datasets", "--download", "purchase-2"), 1, "dataset_purchase")
