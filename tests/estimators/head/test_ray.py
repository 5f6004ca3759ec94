"""A head has the same weights, bit for bit, on any number of Ray workers, even if one of them dies (THEORY 3.11)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from quietmax import HeadSettings, PrivateHead
from quietmax._ray import Actors, RayEngine
from quietmax.data.tables import table_rows
from quietmax.errors import DataUnavailable, InvalidData, InvalidInput, QuietmaxError
from quietmax.estimators.blocks import Table
from quietmax.estimators.head import estimator
from quietmax.estimators.ray_blocks import RayBlocks
from quietmax.models.features.tabular import TableCells
from tests.estimators.made import made
from tests.estimators.table_of_people import CROSSED, PERSONS, files, table_of_people
from tests.estimators.test_out_of_core import assert_same
from tests.ray_cluster import reused_actors, running_cluster

ray = pytest.importorskip("ray")

ROWS = 2000
FEW_STEPS = 5


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with running_cluster(cores=4), reused_actors():
        yield


@pytest.fixture(scope="module")
def people() -> pd.DataFrame:
    """Rows of about 700 persons, who are spread over all rows."""
    return table_of_people(ROWS, 750)


@pytest.fixture(scope="module")
def expected(people: pd.DataFrame) -> PrivateHead:
    """The head that is trained in this process."""
    return fit(people, "local")


def fit(source: Any, engine: Any, **more: Any) -> PrivateHead:
    """Train with every kind of pass: persons, a noisy size, a centre, second moments and gradients."""
    settings = {"schema": PERSONS, "features": "unit-norm", "second_moments": 0.1, "steps": FEW_STEPS} | more
    return made(PrivateHead, 1.0, 1e-5, random_state=3, engine=engine, **settings).fit(source)


@pytest.mark.parametrize("workers", [1, 4])  # and two in the tests below
def test_the_weights_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, people: pd.DataFrame, expected: PrivateHead, workers: int
) -> None:
    """The rows are also permuted, and cut into files of other sizes."""
    permuted = people.sample(frac=1, random_state=workers)
    folder = files(tmp_path / "people", permuted, [7 * workers, 1000, 1001, 1500])
    assert_same(fit(folder, RayEngine(workers=workers)), expected)


def test_a_head_on_cells_has_the_same_weights_and_scale_on_workers(
    tmp_path: Path, people: pd.DataFrame
) -> None:
    settings = {
        "schema": CROSSED,
        "features": "auto",
        "second_moments": None,
        "calibration": 0.1,
        "pairs": True,
    }
    expected = fit(people, "local", **settings)
    assert isinstance(expected.feature_map_, TableCells)
    permuted = people.sample(frac=1, random_state=5)
    folder = files(tmp_path / "people", permuted, [9, 700, 1900])
    for source, workers in ((folder, 4), (permuted, 2)):
        found = fit(source, RayEngine(workers=workers), **settings)
        assert_same(found, expected)
        assert found.scale_ == expected.scale_


def test_the_weights_do_not_depend_on_where_the_rows_come_from(
    tmp_path: Path, people: pd.DataFrame, expected: PrivateHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    files(tmp_path / "people", people, [1300])
    people.to_csv(tmp_path / "people.csv", index=False)
    monkeypatch.chdir(tmp_path)
    engine = RayEngine(workers=2)
    for source in (people, pa.Table.from_pandas(people), "people/*.parquet", "people.csv"):
        assert_same(fit(source, engine), expected)


def test_arrays_and_groups_are_sent_to_the_workers() -> None:
    rng = np.random.default_rng(4)
    X, groups = rng.normal(size=(ROWS, 6)), rng.integers(500, size=ROWS)
    y = (X[:, 0] + rng.normal(size=ROWS) > 0).astype(int)

    def weights(order: np.ndarray, engine: Any) -> np.ndarray:
        head = PrivateHead(
            1.0, 1e-5, classes=(0, 1), random_state=1, engine=engine, settings=HeadSettings(steps=FEW_STEPS)
        )
        return np.asarray(head.fit(X[order], y[order], groups=groups[order]).coef_)

    expected = weights(np.arange(ROWS), "local")
    np.testing.assert_array_equal(weights(rng.permutation(ROWS), RayEngine(workers=2)), expected)


def _as_on_another_processor(block: Table) -> Table:
    """What a row becomes depends on the process, as it does on the machine where processors round differently."""
    return replace(block, rows=block.rows * np.float32(1 + 1e-6 * (os.getpid() % 1000)))


def _integers(block: Table) -> Table:
    """A feature map of the user's own that takes integers only."""
    if (block.rows != np.round(block.rows)).any():
        raise ValueError("integers only")
    return block


def _integers_as_on_another_processor(block: Table) -> Table:
    return _as_on_another_processor(_integers(block))


def _zeros_as_on_another_processor(block: Table) -> Table:
    if block.rows.shape != (10, 2) and block.rows.any():
        raise ValueError("no such rows")
    return replace(block, rows=block.rows + np.float32(os.getpid() % 1000))


def _large(block: Table) -> Table:
    """A feature map that takes none of the public rows."""
    if block.rows.max() < 10:
        raise ValueError("large numbers only")
    return block


def two_tables(rows: np.ndarray) -> list[Table]:
    return [Table(part, np.zeros(10, np.int64), 2) for part in np.split(rows, 2)]


def test_workers_that_round_differently_are_an_error() -> None:
    rows = np.arange(40, dtype=np.float32).reshape(20, 2)
    for workers, function, wrong in (
        (1, _as_on_another_processor, False),
        (2, _as_on_another_processor, True),
        (2, _integers, False),
        (2, _integers_as_on_another_processor, True),
        (2, _zeros_as_on_another_processor, True),
    ):
        with RayBlocks(2, RayEngine(workers=workers)) as blocks:
            blocks.extend(two_tables(rows))
            with pytest.raises(QuietmaxError, match="compute different numbers") if wrong else nullcontext():
                blocks.update(function)


def test_a_map_that_refuses_all_public_rows_is_an_error_and_not_left_out() -> None:
    rows = np.arange(100, 140, dtype=np.float32).reshape(20, 2)
    with RayBlocks(2, RayEngine(workers=2)) as blocks:
        blocks.extend(two_tables(rows))
        with pytest.raises(InvalidInput, match=r"must be compared on public rows.*\(large numbers only\)"):
            blocks.update(_large)


def test_a_person_whose_rows_are_in_several_files_is_counted_once(
    tmp_path: Path, people: pd.DataFrame
) -> None:
    per_person = people["who"].value_counts()
    cuts = [300, 600, 1500]
    spread = people.groupby("who").apply(lambda own: len(set(np.searchsorted(cuts, own.index, "right"))))
    assert (spread > 1).sum() > 300
    rows = table_rows(files(tmp_path / "people", people, cuts), PERSONS)
    blocks = RayBlocks(2, RayEngine(workers=4))
    with blocks:
        blocks.read(rows, b"key")
        blocks._count_persons()
        assert blocks.units == len(per_person)
        assert len(blocks) == ROWS
        repeats: Counter[int] = blocks.sum(lambda block: Counter(block.repeats.tolist()))
    assert repeats == Counter(per_person[people["who"]].tolist())


# --- Workers that die -------------------------------------------------------------------------------------------------


def waiting_once(work: Callable[[Table], Any], place: Path) -> Callable[[Table], Any]:
    """Return work that one worker does, and then does not return; all workers that do it write their numbers."""

    def wait(block: Table) -> Any:
        found = work(block)
        with place.with_suffix(".workers").open("a") as file:
            file.write(f"{os.getpid()}\n")
        try:
            mark = os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return found
        os.write(mark, f"{os.getpid()}\n".encode())
        os.close(mark)
        time.sleep(300)
        return found

    return wait


class Killer:
    """Kills the worker process that is in the middle of a pass, for some passes of a training.

    Parameters
    ----------
    passes : sequence of pairs
        A method of `RayBlocks`, and which of its calls.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, *passes: tuple[str, int]) -> None:
        self._folder = folder
        self._threads: list[threading.Thread] = []
        self._left = set(passes)
        folder.mkdir()
        for method in {method for method, _ in passes}:
            self._patch(monkeypatch, method)

    def _patch(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        original, calls = getattr(RayBlocks, method), Counter[str]()

        def changed(blocks: RayBlocks, work: Callable[[Table], Any]) -> Any:
            calls[method] += 1
            if (method, calls[method]) not in self._left:
                return original(blocks, work)
            self._left.remove((method, calls[method]))
            place = self._folder / f"{method} {calls[method]}"
            self._threads.append(threading.Thread(target=_kill, args=(place,), daemon=True))
            self._threads[-1].start()
            return original(blocks, waiting_once(work, place))

        monkeypatch.setattr(RayBlocks, method, changed)

    def check(self) -> None:
        """Check that a worker died in the middle of each pass, and that another one did its work again."""
        assert not self._left
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        for place in self._folder.glob("*[0-9]"):
            killed = place.read_text().strip()
            assert not _is_running(int(killed))
            worked = place.with_suffix(".workers").read_text().split()
            assert killed in worked, "it was killed after it had done the work, and before it could return"
            assert len(set(worked)) >= 3, "two workers, and the one in place of the killed one"


def _kill(place: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if place.exists() and (told := place.read_text()).endswith("\n"):
            os.kill(int(told), signal.SIGKILL)
            return
        time.sleep(0.02)


def _is_running(process: int) -> bool:
    """Return whether a process runs; one that has ended but was not waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_killed_in_the_middle_of_passes_change_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, people: pd.DataFrame, expected: PrivateHead
) -> None:
    """While persons are counted, rows are centred, moments are summed, and at the third gradient."""
    folder = files(tmp_path / "people", people, [900, 1200])
    passes = (("_sum_labels", 1), ("update", 2), ("sum", 2), ("sum", 5))
    killer = Killer(monkeypatch, tmp_path / "marks", *passes)
    assert_same(fit(folder, RayEngine(workers=2)), expected)
    killer.check()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [("_update_labels", 1), ("_update_labels", 2), ("update", 1), ("sum", 1)])
def test_a_worker_killed_in_any_other_pass_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    people: pd.DataFrame,
    expected: PrivateHead,
    killed: tuple[str, int],
) -> None:
    """While persons get their numbers of rows, digests are dropped, features are made, and the centre is summed."""
    folder = files(tmp_path / "people", people, [900, 1200])
    killer = Killer(monkeypatch, tmp_path / "marks", killed)
    assert_same(fit(folder, RayEngine(workers=2)), expected)
    killer.check()


def test_a_worker_whose_rows_were_sent_gets_them_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, people: pd.DataFrame, expected: PrivateHead
) -> None:
    killer = Killer(monkeypatch, tmp_path / "marks", ("sum", 4))
    assert_same(fit(people, RayEngine(workers=2)), expected)
    killer.check()


def test_a_worker_that_finds_other_rows_ends_the_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, people: pd.DataFrame
) -> None:
    """The rows of each person have been counted: with other rows the sensitivity would not hold."""
    folder = files(tmp_path / "people", people, [1000])
    original = RayBlocks.sum
    calls: list[int] = []

    def changed(blocks: RayBlocks, work: Callable[[Table], Any]) -> Any:
        calls.append(1)
        if len(calls) == 3:
            people.iloc[500:1000].to_parquet(folder / "00.parquet", index=False)
            ray.kill(blocks._actors._actors[0])
        return original(blocks, work)

    monkeypatch.setattr(RayBlocks, "sum", changed)
    with pytest.raises(DataUnavailable, match="files have changed"):
        fit(folder, RayEngine(workers=2))
    assert len(calls) == 3


# --- Errors and reports -----------------------------------------------------------------------------------------------


def test_a_bad_file_is_found_before_any_noise_is_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, people: pd.DataFrame
) -> None:
    def drawn(*_: object, **__: object) -> None:
        raise AssertionError("noise was drawn")

    monkeypatch.setattr(estimator, "release_gaussian", drawn)
    wrong = people.copy()
    wrong.loc[1990, "ill"] = "secret"
    folder = files(tmp_path / "people", wrong, [500, 1000, 1500])
    with pytest.raises(InvalidData, match=r"3.parquet: Row 491 has a label outside the classes") as caught:
        fit(folder, RayEngine(workers=2))
    assert type(caught.value) is InvalidData
    assert "secret" not in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_progress_ends_at_its_total(people: pd.DataFrame) -> None:
    seen: list[tuple[int, int]] = []
    fit(people, RayEngine(workers=2, progress=lambda *done: seen.append(done)))
    assert seen[-1][0] == seen[-1][1] >= (FEW_STEPS + 5) * ROWS


def test_no_worker_outlives_a_training_that_is_interrupted(
    people: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = []

    def end(actors: Actors, actor: Any) -> None:
        ended.append(actor)
        actors._ray.kill(actor)

    monkeypatch.setattr(Actors, "_end", end)

    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(people, RayEngine(workers=2, progress=interrupt))
    assert len(ended) == 2

    def call_for_a_while(worker: Any) -> None:
        """Call a worker again and again: Ray ends it soon after `kill` has returned."""
        for _ in range(300):
            ray.get(worker.__ray_ready__.remote(), timeout=30)
            time.sleep(0.1)

    for worker in ended:
        with pytest.raises(ray.exceptions.RayActorError):
            call_for_a_while(worker)
    assert ray.is_initialized()
