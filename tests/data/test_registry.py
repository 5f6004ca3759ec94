from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietmax.data import (
    DataDirectory,
    DataFile,
    DataSet,
    Download,
    Holdout,
    Records,
    Schema,
    datasets,
    load,
    load_records,
)
from quietmax.data.records import is_held_out
from quietmax.data.registry import dataset_status
from quietmax.errors import DataUnavailable, InvalidInput
from tests.data.conftest import problem_of
from tests.data.people import DECLARED, FEATURES, written

PAPER = """
adult,10000,14,2,20,1
mnist,10000,784,10,50,1
location,1200,446,30,30,1
purchase-2,10000,594,2,20,1
purchase-10,10000,594,10,20,5
purchase-20,10000,594,20,20,5
purchase-50,10000,594,50,20,5
purchase-100,10000,594,100,20,5
cifar-10,10000,3072,10,100,2
cifar-100,10000,3072,100,100,1
texas,10000,6169,100,10,4
"""


def read_points(directory: DataDirectory) -> Records:
    content = directory.read_bytes([DataFile("points.txt")])["points.txt"]
    numbers = np.array(content.split(), dtype=np.float32)
    return Records("points", numbers[:, None], (numbers > 5).astype(np.int64), 2)


POINTS = DataSet(
    name="points",
    title="Points on a line",
    records=4,
    features=1,
    classes=2,
    shadow_models=2,
    alpha=1,
    read=read_points,
    needs=((DataFile("points.txt"),),),
)


def points() -> DataSet:
    return POINTS


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(*values: str) -> None:
        entries = [EntryPoint(value.rpartition(":")[2], value, "quietmax.datasets") for value in values]
        monkeypatch.setattr(
            "quietmax._lazy.entry_points",
            lambda group: entries if group == "quietmax.datasets" else [],
        )

    return install


def test_the_configurations_are_those_of_the_paper() -> None:
    registered = [
        f"{known.name},{known.records},{known.features},{known.classes},{known.shadow_models},{known.alpha}"
        for known in datasets().values()
        if known.name not in ("mnist-5k", "fair")
    ]
    assert registered == PAPER.split()


def test_every_needed_file_can_be_downloaded_or_comes_with_a_package() -> None:
    for known in datasets().values():
        offered = {download.name for download in known.downloads}
        for alternatives in known.needs:
            names = {name for file in alternatives for name in (file.name, f"{file.name}.gz", file.archive)}
            assert names & offered, known.name


@pytest.mark.parametrize("name", ["Adult", "minst", "purchase", "cifar10", "purchase-30", "MNIST-5K"])
def test_an_unknown_name_is_rejected_with_the_nearest_one(name: str) -> None:
    message = problem_of(InvalidInput, load, name)
    assert f"'{name}'" in message
    assert "did you mean" in message


def test_a_name_like_no_other_is_rejected_with_all_names() -> None:
    message = problem_of(InvalidInput, load, "zzzzzzz")
    assert all(name in message for name in datasets())
    assert ".csv" in message


def test_status_tells_what_is_missing_and_whether_it_comes_along(tmp_path: Path) -> None:
    assert dataset_status("mnist-5k", tmp_path).present
    adult = dataset_status("adult", tmp_path)
    assert not adult.present
    assert "adult.data and adult.test" in adult.message
    Path("adult.data").write_text("something")
    assert "needs adult.test in" in dataset_status("adult", tmp_path).message
    Path("adult.test").write_text("something")
    assert dataset_status("adult", tmp_path).present


def test_loading_needs_the_file_and_never_fetches_it_unasked(
    tmp_path: Path, plug_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda *_args, **_more: pytest.fail("asked the network"))
    for name in ("adult", "mnist", "location", "texas", "cifar-10"):
        message = problem_of(DataUnavailable, load, name, data_dir=tmp_path)
        assert "`download`" in message
        assert "https://" in message
        assert str(tmp_path) in message
    plug_in("tests.data.test_registry:POINTS")
    assert "needs points.txt" in problem_of(DataUnavailable, load, "points", data_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_plug_in_adds_a_data_set_or_a_function_that_makes_one(
    tmp_path: Path, plug_in: Callable[..., None]
) -> None:
    Path("points.txt").write_text(" ".join(map(str, range(10))))
    for value in ("tests.data.test_registry:POINTS", "tests.data.test_registry:points"):
        plug_in(value)
        assert list(datasets())[-1] == "points"
        data = load("points", data_dir=tmp_path)
        assert (len(data.train), len(data.test), len(data.pool)) == (4, 4, 2)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("tests.data.test_registry:PAPER", "not callable"),
        ("builtins:dict", r"must be a quietmax\.data\.DataSet"),
    ],
)
def test_a_plug_in_that_is_no_data_set_is_skipped_with_a_warning(
    plug_in: Callable[..., None], value: str, said: str
) -> None:
    plug_in(value)
    with pytest.warns(UserWarning, match=said):
        names = list(datasets())
    assert names[-1] == "fair"  # the last one that is built in


def test_a_missing_file_is_fetched_when_asked_and_then_read(
    plug_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = " ".join(map(str, range(10))).encode()
    origin = Path("origin.txt").absolute()
    origin.write_bytes(content)
    download = Download("points.txt", origin.as_uri(), hashlib.sha256(content).hexdigest())
    monkeypatch.setattr("tests.data.test_registry.POINTS", replace(POINTS, downloads=(download,)))
    plug_in("tests.data.test_registry:POINTS")
    steps: list[int] = []
    records = load_records(
        "points",
        data_dir=Path("data"),
        download=True,
        progress=lambda _name, size, _total: steps.append(size),
    )
    assert records.features[:, 0].tolist() == list(range(10))
    assert Path("data/points/points.txt").read_bytes() == content
    assert steps == [len(content)]


# --- Loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("people.csv", {**DECLARED, "records": 3}, "holdout"),
        ("mnist-5k", {"records": 9, "holdout": 0.1}, "only one"),
        ("mnist-5k", {"encoding": "one-hot"}, "only one encoding"),
        ("mnist-5k", {"label": "digit"}, "label applies only to files"),
    ],
)
def test_options_that_do_not_apply_are_rejected(name: str, options: dict[str, Any], said: str) -> None:
    written()
    assert said in problem_of(InvalidInput, load, name, **options)
    with pytest.raises(TypeError, match="'dowload'"):
        load(name, dowload=True)  # type: ignore[call-arg]


def test_an_own_table_trains_on_everybody_who_is_not_held_out() -> None:
    text = "x,y\n" + "".join(f"{number},{number % 2}\n" for number in range(50))
    path = written(text)
    declared: dict[str, Any] = {"label": "y", "classes": 2, "bounds": {"x": (0, 50)}}
    everybody = load(path, **declared, seed=2)
    assert (len(everybody.train), len(everybody.test), len(everybody.pool)) == (50, 0, 0)
    data = load(path, **declared, holdout=0.3, seed=2)
    assert data.holdout == Holdout(0.3, seed=2)
    assert data.test_rows.tolist() == np.flatnonzero(is_held_out(data.records, data.holdout)).tolist()
    assert sorted([*data.train_rows, *data.test_rows]) == [*range(50)]
    assert 0 < len(data.test) < 25


def test_the_toml_file_beside_a_table_is_its_schema_unless_another_is_named() -> None:
    path = written()
    written(
        'label = "ill"\nclasses = ["no", "yes"]\nignore = ["name"]\n'
        'bounds = { age = [20, 60], gain = [0, 100] }\ncategories = { sex = ["f", "m"] }\n',
        "people.toml",
    )
    beside = load_records(path)
    np.testing.assert_allclose(beside.features, FEATURES, rtol=1e-6)
    assert not beside.encoding.inferred
    wider = load_records(path, bounds={"age": (20, 95)})
    assert wider.features[0, 0] == pytest.approx(10 / 75)
    with pytest.raises(InvalidInput, match="beside the table"):
        load_records(path, schema=Schema(label="ill"))
