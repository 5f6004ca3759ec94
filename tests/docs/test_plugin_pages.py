"""The plug-ins of the documentation: each page is a package; it is put on the path, and built and installed by pip."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import quietmax as qm
from quietmax import _lazy, data, mechanisms
from quietmax.attacks.builtin import registered_attacks
from quietmax.data.readers import fair_table
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.estimators import open_private, save_private
from quietmax.models import features
from tests.docs.code_blocks import blocks_of, commands, exit_code, printed

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "extend.md"
NAMES = ("A data set", "A mechanism", "An attack", "A feature map")
FOUND_BY = {
    "quietmax.datasets": data.datasets,
    "quietmax.mechanisms": mechanisms.base.plugin_mechanisms,
    "quietmax.attacks": registered_attacks,
    "quietmax.features": features.generic.plugin_maps,
}
QUIETMAX = [sys.executable, "-c", "from quietmax.cli import main; main()"]


def save_package(page: str, folder: Path) -> dict[str, dict[str, str]]:
    """Save the files of a page as its reader does, and a file of queries; return the package's entry points."""
    for block in blocks_of(PAGE, page):
        if block.saved_as is not None:
            (folder / block.saved_as).write_text(block.text, encoding="utf-8")
    fair_table().drop(columns="affair").head(3).to_csv(folder / "queries.csv", index=False)
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, dict[str, str]] = project["entry-points"]
    return found


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which packages with metadata are found, as in site-packages."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == tmp_path:
            del sys.modules[name]
    _lazy.entry_points.cache_clear()


def write_metadata(folder: Path, name: str, entry_points: dict[str, dict[str, str]]) -> None:
    """Write what pip writes about an installed package."""
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    sections = (
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in named.items())
        for group, named in entry_points.items()
    )
    (metadata / "entry_points.txt").write_text("\n".join(sections))
    _lazy.entry_points.cache_clear()


def install(page: str, folder: Path) -> None:
    write_metadata(folder, page.replace(" ", "-"), save_package(page, folder))


@pytest.mark.parametrize("page", NAMES)
def test_the_plug_in_of_a_page_is_found_by_its_name_and_its_scripts_run(on_path: Path, page: str) -> None:
    entry_points = save_package(page, on_path)
    ((group, named),) = entry_points.items()
    (name,) = named
    assert name not in FOUND_BY[group]()
    write_metadata(on_path, page.replace(" ", "-"), entry_points)
    assert name in FOUND_BY[group]()
    told = io.StringIO()
    modules = {value.partition(":")[0] for value in named.values()}
    with contextlib.redirect_stdout(told):
        for script in sorted(on_path.glob("*.py")):
            if script.stem not in modules:
                runpy.run_path(str(script))
    expected = {
        "A mechanism": ["1.0 consistent", "0.5 refuted", "conditional"],
        "A feature map": ["consistent"],
    }
    for words in expected.get(page, []):
        assert words in told.getvalue()
    assert "proven" not in told.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("page", NAMES)
def test_the_commands_of_a_page_run_when_its_package_was_built_and_installed(
    tmp_path: Path, page: str
) -> None:
    save_package(page, tmp_path)
    target = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    printed([*pip, "--target", str(target), "."], cwd=tmp_path)
    place = os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": place, "QUIETMAX_LEDGER": str(tmp_path / "ledger.sqlite")}
    elsewhere = tmp_path / "elsewhere"  # where the module does not lie beside
    elsewhere.mkdir()
    (tmp_path / "queries.csv").rename(elsewhere / "queries.csv")
    told = ""
    for block in blocks_of(PAGE, page):
        for words in commands(block.text) if block.language == "sh" else ():
            told += printed([*QUIETMAX, *words[1:]], cwd=elsewhere, env=environment)
    expected = {
        "A data set": ["small-digits", "test accuracy"],
        "A mechanism": ["conditional", "The user's own mechanism has the privacy it states."],
        "An attack": ["margin", "threshold"],
        "A feature map": ["conditional", "The user's own feature map computes", "consistent"],
    }
    assert all(words in " ".join(told.split()) for words in expected[page]), told


def test_a_model_with_the_feature_map_of_a_plug_in_stays_conditional_and_needs_the_plug_in(
    on_path: Path,
) -> None:
    install("A feature map", on_path)
    split = qm.load("fair")
    rows, labels = split.train.features, split.train.labels
    head = qm.PrivateHead(features="squares", declared_size=5000, classes=range(2)).fit(rows, labels)
    save_private(head, "squared", dataset="fair")
    opened = open_private("squared")
    assert head.guarantee_ == opened.guarantee
    assert opened.guarantee.status == "conditional"
    np.testing.assert_array_equal(opened.predict(rows[:20]), head.predict(rows[:20]))
    for metadata in on_path.glob("*.dist-info/*"):
        metadata.unlink()
    _lazy.entry_points.cache_clear()
    with pytest.raises(QuietmaxError, match="installed plug-in"):
        open_private("squared")
    with pytest.raises(InvalidInput, match="can be saved"):
        save_private(head, "again", dataset="fair")
    with pytest.raises(InvalidInput, match="features must be one of"):
        qm.PrivateHead(features="squares", declared_size=5000, classes=range(2)).fit(rows, labels)


def test_a_feature_map_that_looks_at_other_records_is_refused_before_training(
    on_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry_points = save_package("A feature map", on_path)
    module = on_path / "squares_map.py"
    text = module.read_text(encoding="utf-8")
    changed = text.replace("[records, ", "[records - records.mean(axis=0), ")
    assert changed != text
    module.write_text(changed, encoding="utf-8")
    write_metadata(on_path, "squares-map", entry_points)
    words = "quietmax train head fair --features squares --declared-size 5000 --output squared"
    assert exit_code(words.split()) == 1
    assert "must compute a record's features from that record alone" in capsys.readouterr().err
    assert not (on_path / "squared").exists()


def test_a_plug_in_that_does_not_fit_is_skipped_with_a_reason(on_path: Path) -> None:
    entry_points = {"quietmax.features": {"squares": "no_map:Squares", "other": "no_map:Other"}}
    (on_path / "no_map.py").write_text(
        "from quietmax.models.features import Identity as Other\nclass Squares: kind = 'squares'\n"
    )
    write_metadata(on_path, "no-map", entry_points)
    with pytest.warns(UserWarning, match=r"must be (a subclass|the name of the entry point)") as warned:
        assert not {"squares", "other"} & {*FOUND_BY["quietmax.features"]()}
    assert len(warned) == 2
