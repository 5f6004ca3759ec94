"""Work on Ray workers: jobs, teachers, shadow networks, evaluations, answers, and what users see of Ray."""

from __future__ import annotations

import builtins
import json
import operator
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from quietmax import DPSGD, PrivateHead, Schema, Teachers, TrainingSettings
from quietmax import _ray as ray_module
from quietmax._ray import Actors, RayEngine, ray_map
from quietmax.attacks import LiRA, Threshold, shadow_models
from quietmax.attacks.base import run_together
from quietmax.attacks.shadow_models import ShadowPool
from quietmax.cli import main, predict
from quietmax.cli.predict import _answer_files
from quietmax.data.records import Records, Split
from quietmax.data.tables import encoded_rows, table_rows
from quietmax.errors import InvalidData, InvalidInput, QuietmaxError
from quietmax.estimators import HeadSettings, teachers
from quietmax.estimators.evaluation import evaluate_folder
from quietmax.estimators.serialization import open_private, save_private
from quietmax.models.stacked import LARGEST_STACK, train_networks
from quietmax.models.training import train
from tests.ray_cluster import reused_actors, running_cluster

ray = pytest.importorskip("ray")

SCHEMA = Schema(
    label="ill",
    classes=("no", "yes"),
    bounds={"age": (0, 100)},
    categories={"job": ("a", "b")},
    person="who",
)
SCHEMA_FILE = """
label = "ill"
classes = ["no", "yes"]
person = "who"
bounds = { age = [0, 100] }
categories = { job = ["a", "b"] }
"""
TWO = RayEngine(workers=2)
QUICK = TrainingSettings(hidden=(4,), epochs=4, batch_size=10)


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with running_cluster(cores=2), reused_actors():
        yield


@pytest.fixture(scope="module")
def people() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    age = rng.integers(0, 100, 1200)
    return pd.DataFrame(
        {
            "who": [f"p{number}" for number in rng.integers(500, size=1200)],
            "age": age,
            "job": rng.choice(["a", "b"], 1200),
            "ill": np.where(age + rng.normal(0, 20, 1200) > 50, "yes", "no"),
        }
    )


@pytest.fixture(scope="module")
def folder(people: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five files; the rows of most persons are in several of them."""
    place = tmp_path_factory.mktemp("people")
    for number, part in enumerate(np.split(np.arange(len(people)), [100, 110, 600, 900])):
        people.iloc[part].to_parquet(place / f"{number}.parquet", index=False)
    return place


@pytest.fixture(scope="module")
def model(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a head that was trained with a holdout."""
    rows = table_rows(folder, SCHEMA, holdout=0.4)
    head = PrivateHead(5.0, 1e-5, settings=HeadSettings(steps=5), random_state=0).fit(rows.train)
    save_private(head, place := tmp_path_factory.mktemp("models") / "head", dataset="people")
    return place


def slow_double(number: int) -> int:
    time.sleep(0.3 if number == 0 else 0.0)
    return 2 * number


def test_results_come_in_the_order_of_the_jobs_and_jobs_are_taken_one_by_one() -> None:
    taken: list[int] = []
    seen: list[tuple[int, int]] = []

    def jobs() -> Iterator[tuple[int]]:
        for number in range(8):
            taken.append(number)
            yield (number,)

    results = ray_map(replace(TWO, progress=lambda *done: seen.append(done)), slow_double, jobs(), total=8)
    assert next(results) == 0
    assert list(results) == [2, 4, 6, 8, 10, 12, 14]
    assert seen == [(done, 8) for done in range(1, 9)]
    assert taken == list(range(8))


def test_only_as_many_jobs_as_workers_are_taken_at_once(tmp_path: Path) -> None:
    def jobs() -> Iterator[tuple[Path, int]]:
        for number in range(5):
            assert number - len(list(tmp_path.iterdir())) <= 2
            yield tmp_path, number

    assert list(ray_map(TWO, touched, jobs())) == list(range(5))


def touched(folder: Path, number: int) -> int:
    (folder / str(number)).touch()
    return number


def own_process() -> bytes:
    return b"%d" % os.getpid()


def test_workers_that_compute_different_numbers_are_an_error() -> None:
    with pytest.raises(QuietmaxError, match="compute different numbers"):
        list(ray_map(TWO, slow_double, [(number,) for number in range(8)], probe=own_process))
    assert list(ray_map(TWO, slow_double, [(1,), (2,)], probe=bytes)) == [2, 4]


def test_what_all_jobs_share_is_copied_once() -> None:
    numbers = np.arange(4.0)
    assert list(ray_map(TWO, operator.getitem, [(1,), (3,)], shared=(numbers,))) == [1.0, 3.0]


def test_an_error_of_a_job_is_raised_as_it_is() -> None:
    with pytest.raises(InvalidInput) as caught:
        list(ray_map(TWO, refuse, [()]))
    assert type(caught.value) is InvalidInput
    assert str(caught.value) == "Bad."


def refuse() -> None:
    raise InvalidInput("Bad.")


def test_workers_that_do_not_start_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with Actors(TWO, ray_module._Caller) as both:
        for worker in range(2):
            both.send(worker, "call", slow_double, worker)
        results = [both.next() for _ in range(2)]
        assert sorted(results) == [(0, (b"", 0)), (1, (b"", 2))]  # no probe, and the doubles
        monkeypatch.setattr(ray_module, "START_SECONDS", 0.5)
        monkeypatch.setattr(ray_module, "_LOOK_SECONDS", 0.1)
        with pytest.raises(QuietmaxError, match=r"did not start within 0\.5 seconds"):
            list(ray_map(RayEngine(workers=1), slow_double, [(1,)]))


def test_workers_that_die_again_and_again_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ray_module.MOST_LOSSES == 3
    monkeypatch.setattr(ray_module, "MOST_LOSSES", 2)  # each takes the start of a worker
    with pytest.raises(QuietmaxError, match="lost 2 times at the same work") as caught:
        list(ray_map(TWO, die, [(tmp_path / "deaths",)]))
    assert "\n" not in str(caught.value)
    assert (tmp_path / "deaths").read_text() == "xx"


def die(marks: Path) -> None:
    with marks.open("a") as file:
        file.write("x")
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(mark: Path) -> None:
    """Kill the first worker that comes here."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def train_and_die_once(mark: Path, *arguments: Any) -> Any:
    """Train a stack; the first worker to come dies in the middle of it."""
    own = mark.with_suffix(f".{os.getpid()}")

    def step(done: int, steps: int) -> None:
        own.write_text(f"{done} {steps}")
        if 2 * done >= steps:
            die_once(mark)

    return partial(train_networks, progress=step)(*arguments)


def assert_died_in_the_middle(mark: Path) -> None:
    """One of three workers died after half of the steps of a stack, and before the last one."""
    assert mark.exists()
    told = [path.read_text().split() for path in mark.parent.glob(f"{mark.name}.*")]
    assert len(told) == 3
    assert any(0 < int(done) < int(steps) for done, steps in told)


def test_teachers_are_the_same_after_a_worker_was_killed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 3 * LARGEST_STACK

    def weights(engine: Any) -> np.ndarray:
        settings: dict[str, Any] = {"network": replace(QUICK, epochs=200), "random_state": 3}
        fitted = Teachers(2.0, queries=5, teachers=count, schema=SCHEMA, engine=engine, **settings)
        return np.asarray(fitted.fit(folder).ensemble_.teachers.weight_vectors())

    expected = weights("local")
    monkeypatch.setattr(teachers, "train_networks", partial(train_and_die_once, tmp_path / "mark"))
    np.testing.assert_array_equal(weights(TWO), expected)
    assert_died_in_the_middle(tmp_path / "mark")


@pytest.fixture(scope="module")
def split() -> Split:
    rng = np.random.default_rng(1)
    features = rng.normal(size=(300, 5)).astype(np.float32)
    records = Records("numbers", features, (features[:, 0] > 0).astype(np.int64), 2)
    return Split(records, np.arange(100), np.arange(100, 200), np.arange(200, 300), seed=0)


def test_shadow_networks_are_the_same_after_a_worker_was_killed(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, count = replace(QUICK, epochs=40), 3 * LARGEST_STACK
    here = ShadowPool.train("overlapping", split, settings, count, seed=2)
    monkeypatch.setattr(shadow_models, "train_networks", partial(train_and_die_once, tmp_path / "mark"))
    there = ShadowPool.train("overlapping", split, settings, count, seed=2, engine=TWO)
    assert len(there.stacks) == 3
    for one, other in zip(here.stacks, there.stacks, strict=True):
        np.testing.assert_array_equal(one.weight_vectors(), other.weight_vectors())
    assert_died_in_the_middle(tmp_path / "mark")


def test_attacks_report_the_same(split: Split) -> None:
    target = train(split, settings=QUICK)
    attacks = [Threshold(models=6), LiRA(models=6)]
    here, there = (run_together(attacks, target, split, engine=engine) for engine in (None, TWO))
    assert [report.to_json() for report in here] == [report.to_json() for report in there]


def test_an_evaluation_counts_the_same(model: Path, folder: Path) -> None:
    opened = open_private(model)
    rows = encoded_rows(folder, opened.encoding)
    here, there = (
        evaluate_folder(model, opened, rows, exact=True, engine=engine).to_json() for engine in (None, TWO)
    )
    assert here == there
    again = replace(rows, holdout=opened.holdout, held_out=True)
    assert evaluate_folder(model, opened, again, exact=True, engine=TWO).to_json() == here


def test_an_estimator_evaluates_with_its_own_engine(folder: Path) -> None:
    head = PrivateHead(5.0, 1e-5, settings=HeadSettings(steps=2), random_state=0, engine=TWO)
    rows = table_rows(folder, SCHEMA, holdout=0.4)
    noisy = head.fit(rows.train).evaluate(folder).to_json()
    assert (
        PrivateHead(**{**head.get_params(), "engine": "local"}).fit(rows.train).evaluate(folder).to_json()
        == noisy
    )


def answer_and_die_once(mark: Path, *arguments: Any) -> int:
    """Answer a file; the first worker to come dies when all answers are written to its temporary file."""

    die = partial(die_once, mark)
    return partial(ANSWER_FILE, advance=lambda share: die() if share == 1.0 else None)(*arguments)


ANSWER_FILE = predict._answer_file


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name[0] != "."}


def test_answers_are_the_same_after_a_worker_was_killed(
    model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_private(model)
    here = _answer_files(model, opened, folder, tmp_path / "here")
    mark = tmp_path / "mark"
    monkeypatch.setattr(predict, "_answer_file", partial(answer_and_die_once, mark))
    monkeypatch.chdir(tmp_path)
    done: list[tuple[int, int]] = []
    there = _answer_files(
        model, opened, folder, Path("there"), engine=TWO, progress=lambda *each: done.append(each)
    )
    assert mark.exists()
    assert (there, there["written"], there["queries"]) == (here, 5, 1200)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert [path.name for path in (tmp_path / "there").glob(".*")] == [predict.ANSWERS_FILE]
    assert done[-1][0] == done[-1][1] > 0
    again = _answer_files(model, opened, folder, tmp_path / "there", engine=TWO)
    assert (again["written"], again["skipped"]) == (0, 5)


def test_a_bad_file_of_queries_is_named_and_nothing_half_is_written(
    model: Path, people: pd.DataFrame, tmp_path: Path
) -> None:
    (queries := tmp_path / "queries").mkdir()
    for number in range(4):
        part = people.iloc[300 * number : 300 * (number + 1)].drop(columns="ill")
        part.astype({"age": object} if number == 2 else {}).assign(
            **({"age": "old"} if number == 2 else {})
        ).to_csv(queries / f"{number}.csv", index=False)
    with pytest.raises(InvalidData, match=r"2\.csv"):
        _answer_files(model, open_private(model), queries, tmp_path / "out", engine=TWO)
    assert all(name.endswith(".csv") for name in contents(tmp_path / "out"))
    assert "2.csv" not in contents(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob(".*")] == [predict.ANSWERS_FILE]


@pytest.mark.parametrize(
    ("use", "arguments", "message"),
    [
        *(
            (RayEngine, {"workers": workers}, "workers must be a positive integer")
            for workers in (0, -1, 1.5)
        ),
        *(
            (RayEngine, {"address": address}, "must be host:port, 'auto' or 'local'")
            for address in ("people.csv", "ray://host:1", "host", "a b:1", "")
        ),
        (lambda engine: [*ray_map(engine, slow_double, [])], {"engine": RayEngine(workers=3)}, "at most 2"),
        (PrivateHead, {"engine": "spark"}, "must be 'local', 'ray', a LocalEngine or a RayEngine"),
        (DPSGD, {"engine": "ray"}, "engine must be 'local' or a LocalEngine"),
    ],
)
def test_an_engine_that_cannot_be_used_is_an_error(
    people: pd.DataFrame, use: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        use(**arguments).set_params(schema=SCHEMA).fit(people)


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_ray(name: str, *rest: Any, **more: Any) -> Any:
        if name == "ray":
            raise ImportError
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(
        QuietmaxError, match=r"^Ray is not installed\. It comes with: pip install 'quietmax\[ray\]'\.$"
    ):
        list(ray_map(TWO, slow_double, [(1,)]))


@pytest.fixture
def _not_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


@pytest.mark.usefixtures("_not_connected")
def test_an_address_where_nobody_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_module, "_ANSWER_SECONDS", 2.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(
            QuietmaxError, match=f"could not be reached at {place}: no answer within 2 seconds"
        ):
            list(ray_map(RayEngine(place), slow_double, [(1,)]))


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run a command line; spaces separate the words of a string."""
    words = (word for each in arguments for word in str(each).split())
    monkeypatch.setattr(sys, "argv", ["quietmax", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.usefixtures("_not_connected")
def test_a_cluster_that_is_not_there_is_one_line_on_the_terminal(
    model: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = command(
        monkeypatch, "predict --ray 127.0.0.1:1 --model", model, "--input", folder, "-o", tmp_path / "o"
    )
    out, err = capfd.readouterr()
    assert (code, out) == (1, "")
    assert err == (
        "quietmax: Ray could not be reached at 127.0.0.1:1: Connection refused. `ray start --head` starts a cluster. "
        "If the cluster uses tokens, as Ray's clusters do by default, set RAY_AUTH_MODE=token.\n"
    )


def test_every_command_computes_on_ray(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one row: a head, its evaluation and its answers; teachers; an attack. None prints a word of Ray."""
    used: list[int | None] = []
    original = Actors.__init__

    def noted(actors: Actors, engine: RayEngine, *rest: Any) -> None:
        used.append(engine.workers)
        original(actors, engine, *rest)

    monkeypatch.setattr(Actors, "__init__", noted)
    schema = tmp_path / "people.toml"
    schema.write_text(SCHEMA_FILE)
    declared = f"--schema {schema} --declared-size 300"
    head, out = tmp_path / "head", tmp_path / "out"
    for words in (
        f"train head --ray {folder} --holdout 0.4 {declared} -o {head}",
        f"evaluate {head} --data {folder} --ray",
        f"predict --model {head} --input {folder} --output {out} --ray auto",
        "attack mnist-5k --records 100 --shadows 2 --ray",
        f"train teachers {folder} {declared} --queries 1 --teachers 4 -o {tmp_path / 'votes'} --ray",
    ):
        assert command(monkeypatch, words, "--json") == 0, capfd.readouterr().err
        told, err = capfd.readouterr()
        assert err == ""
        json.loads(told)
    assert used == [None] * 5
    assert len(contents(out)) == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train head {folder} --max-memory=1G --ray", "--max-memory cannot be combined with --ray."),
        ("train head {folder} --cache-dir=. --ray", "--cache-dir cannot be combined with --ray."),
        ("train head {folder} --resume --ray", "--resume cannot be combined with --ray."),
        ("predict --model {model} --input {folder}/0.parquet --ray", "--ray requires --output"),
    ],
)
def test_what_cannot_be_combined_with_ray_is_wrong_usage(
    model: Path,
    folder: Path,
    words: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, words.format(model=model, folder=folder)) == 2
    assert message in capfd.readouterr().err


def processes_of(session: int) -> list[str]:
    """Return the command lines of all processes of a session."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z" and int(fields[3]) == session:
                found.append((place / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_stopped_leaves_no_process_and_no_model(
    people: pd.DataFrame, tmp_path: Path, stop: signal.Signals
) -> None:
    schema = tmp_path / "people.toml"
    schema.write_text(SCHEMA_FILE)
    (tmp_path / "people").mkdir()
    pd.concat([people] * 500).to_parquet(tmp_path / "people" / "0.parquet", index=False)
    words = ("train", "head", tmp_path / "people", "--schema", schema, "-o", tmp_path / "head", "--ray")
    started = subprocess.Popen(
        [sys.executable, "-m", "quietmax", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 120
        while not any("ray::_Worker" in line for line in processes_of(started.pid)):
            assert time.monotonic() < end
            assert started.poll() is None, started.communicate()
            time.sleep(0.1)
        time.sleep(1)
        (os.killpg if stop == signal.SIGINT else os.kill)(started.pid, stop)  # Ctrl-C reaches all processes
        out, err = started.communicate(timeout=60)
        assert (started.returncode, out) == (128 + stop, "")
        assert "Traceback" not in err
        assert err.count("\n") <= 1
        assert not (tmp_path / "head").exists()
        end = time.monotonic() + 20
        while processes_of(started.pid):
            assert time.monotonic() < end, processes_of(started.pid)
            time.sleep(0.1)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
