"""Folders of files on the command line: training, answering and evaluating part by part."""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest

from quietmax import PrivateHead
from quietmax.cli import models as model_commands
from quietmax.cli import predict as predict_command
from quietmax.cli import train as train_command
from quietmax.cli._options import _memory_size
from quietmax.cli._output import progress_bar
from quietmax.cli.predict import ANSWERS_FILE, _answer_files
from quietmax.data import load
from quietmax.errors import QuietmaxError
from quietmax.estimators import evaluation as evaluation_module
from quietmax.estimators.blocks import FILES_IN_MEMORY, Blocks
from quietmax.estimators.dpsgd.training import StoredRows
from quietmax.estimators.head.estimator import PrivateHead as Head
from quietmax.estimators.serialization import open_private, save_private
from tests.cli.conftest import assert_error, document, printed, run
from tests.cli.own_table import DECLARED, SCHEMA, write_people

FILES = 50
COMMANDS = ("train", "evaluate", "predict")


def _split(people: Path, folder: Path, suffix: str) -> Path:
    """Write a table as 50 files of Parquet or CSV."""
    folder.mkdir()
    table = pd.read_csv(people)
    for number in range(FILES):
        _write(table.iloc[number::FILES], folder / f"part-{number + 1:02}{suffix}")
    return folder


def _write(table: pd.DataFrame, file: Path) -> None:
    if file.suffix == ".parquet":
        table.to_parquet(file, index=False)
    else:
        table.to_csv(file, index=False)


def _read(file: Path) -> pd.DataFrame:
    return pd.read_parquet(file) if file.suffix == ".parquet" else pd.read_csv(file)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The table of people in 50 files, as `.parquet` and as `.csv`, and a head that held people out."""
    root = tmp_path_factory.mktemp("originals")
    people = write_people(root / "people.csv")
    for suffix in (".parquet", ".csv"):
        _split(people, root / suffix, suffix)
    split = load(people, schema=SCHEMA, holdout=0.3)
    head = PrivateHead(4.0, 1e-5, declared_size=1000).fit(split.train)
    save_private(head, root / "model", dataset="people")
    return root


@pytest.fixture
def model(originals: Path) -> Path:
    """The head of `originals`, which a test may change."""
    return Path(shutil.copytree(originals / "model", "model"))


@pytest.fixture(params=[".parquet", ".csv"])
def files(request: pytest.FixtureRequest, originals: Path, tmp_path: Path) -> Path:
    """The table of people in 50 files of both formats, which a test may change."""
    return Path(shutil.copytree(originals / request.param, tmp_path / "parts"))


@pytest.fixture
def parquet(originals: Path, tmp_path: Path) -> Path:
    """The table of people in 50 Parquet files, where the format makes no difference."""
    return Path(shutil.copytree(originals / ".parquet", tmp_path / "parts"))


@pytest.fixture
def cache() -> Path:
    """A folder for temporary files."""
    folder = Path("cache")
    folder.mkdir()
    return folder


def _train(data: Path, output: Path, *more: object) -> tuple[object, ...]:
    options = ("--declared-size", 1000, "--epsilon", 4, "--json", "-o", output)
    return ("train", "head", data, *DECLARED, *options, *more)


def _answer(model: Path, queries: Path, answers: Path, *more: object) -> tuple[object, ...]:
    return ("predict", "--model", model, "--input", queries, "--output", answers, *more)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- What folders are read


@pytest.mark.parametrize(
    "command",
    [("head",), ("dpsgd", "--steps", 5), ("teachers", "--queries", 2, "--teachers", 20)],
    ids=["head", "dpsgd", "teachers"],
)
def test_private_models_learn_from_a_folder_or_pattern_with_all_rows_in_temporary_files(
    files: Path, queries: Path, cache: Path, command: tuple[object, ...]
) -> None:
    name, *options = command
    model, data = Path("model"), files if name == "head" else files / "part-*"
    memory = ("--max-memory", "0", "--cache-dir", cache)
    declared = (*DECLARED, "--declared-size", 1000, "--epsilon", 4)
    trained = document("train", name, data, *declared, *options, *memory, "--json", "-o", model)
    assert trained["guarantee"]["status"] == "proven"
    assert list(cache.iterdir()) == []
    if name == "head":
        assert document("predict", "--model", model, "--input", queries)["labels"] == [
            "lo",
            "hi",
        ]


def test_nested_folders_are_read_and_hidden_files_are_not(model: Path, files: Path) -> None:
    nested = files / "year=2024" / "month=01"
    nested.mkdir(parents=True)
    suffix = next(files.glob("part-01.*")).suffix
    (files / f"part-01{suffix}").rename(nested / f"part-01{suffix}")
    for name in ("_SUCCESS", "_metadata.parquet", ".part-99.csv.crc", f".part-99{suffix}", "notes.txt"):
        (files / name).write_text("not a table")
    (files / "_temporary").mkdir()
    (files / "_temporary" / f"part-98{suffix}").write_text("not a table")
    more = files / f"part-37{suffix}"
    _write(_read(more).assign(note="x"), more)  # a column that training would refuse
    answers = Path("answers")
    assert document(*_answer(model, files, answers, "--json"))["queries"] == 1200
    written = {path.relative_to(answers).as_posix() for path in answers.rglob("part-*")}
    assert written == {
        f"year=2024/month=01/part-01{suffix}",
        *(f"part-{n:02}{suffix}" for n in range(2, FILES + 1)),
    }
    schema = Path("schema.toml")
    schema.write_text(SCHEMA.read_text().replace("90]", "90], year = [2000, 2030]"))
    result = run(*_train(files, Path("head"), "--schema", schema))  # names of folders are not columns
    assert_error(result, 2, "has no column 'year'")


# --- Bad input in file 37 of 50


def _damage(folder: Path, kind: str) -> Path:
    """Damage file 37. What else can be wrong with a file is tested where files are read."""
    file = next(folder.glob("part-37.*"))
    table = _read(file)
    changed = {
        "wrong type": lambda: table.assign(age="old"),
        "undeclared label": lambda: table.assign(income=[*table["income"][1:], "middle"]),
    }
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-5])
    else:
        _write(changed[kind](), file)
    return file


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("suffix", "kind", "words"),
    [
        (".parquet", "truncated", "truncated"),
        (".csv", "wrong type", "'age'"),
        (".csv", "undeclared label", "label outside the classes"),
    ],
)
def test_a_bad_file_is_named_and_nothing_is_written_or_spent(
    originals: Path,
    model: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    kind: str,
    words: str,
    command: str,
) -> None:
    folder = Path(shutil.copytree(originals / suffix, Path("parts").absolute()))
    file = _damage(folder, kind)
    releases: list[object] = []
    for place, name in ((Head, "_make_releases"), (evaluation_module, "_noisy_evaluation")):
        monkeypatch.setattr(place, name, lambda *given: releases.append(given))  # they draw all noise
    before, answers = _contents(model), Path("answers")
    memory = ("--max-memory", "0", "--cache-dir", cache)
    commands = {
        "train": _train(folder, Path("head"), *memory),
        "evaluate": ("evaluate", model, "--data", folder, "--epsilon", 1, "--json", *memory),
        "predict": _answer(model, folder, answers),
    }
    result = run(*commands[command])
    if command == "predict" and kind == "undeclared label":
        assert result[0] == 0, result[2]  # queries need no label
        return
    assert_error(result, 1, str(file), words)
    assert releases == []
    assert _contents(model) == before
    assert list(cache.iterdir()) == []
    assert not Path("head").exists()
    written = {path.name for path in answers.iterdir()} if answers.exists() else set()
    finished = {f"part-{number:02}{suffix}" for number in range(1, 37)}
    assert written in (set(), {ANSWERS_FILE, *finished})


# --- Ctrl-C


class Reports:
    """Progress bars that count reports, and press Ctrl-C after so many of one bar; 0 for never."""

    def __init__(self, after: int = 0) -> None:
        self.after, self.most = after, 0

    @contextmanager
    def __call__(self, *_: object, **__: object) -> Iterator[Callable[[int, int], None]]:
        count = 0

        def advance(done: int, total: int) -> None:
            nonlocal count
            assert 0 <= done <= total
            count += 1
            self.most = max(self.most, count)
            if count == self.after:
                signal.raise_signal(signal.SIGINT)

        yield advance


@pytest.mark.parametrize(
    "command",
    [("head",), ("dpsgd", "--steps", 20), ("teachers", "--queries", 2, "--teachers", 60)],
    ids=["head", "dpsgd", "teachers"],
)
def test_an_interrupted_training_leaves_no_model_and_no_temporary_files(
    originals: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[object, ...],
) -> None:
    name, *options = command
    options += ["--declared-size", 1000, "--epsilon", 4, "--json", "--max-memory", "0", "--cache-dir", cache]
    train, model = ("train", name, originals / ".parquet", *DECLARED, *options), Path("private")
    reports = Reports()
    monkeypatch.setattr(train_command, "progress_bar", reports)
    assert run(*train)[0] == 0
    most = reports.most
    for after in {1, 2, most // 2, most - 1, most}:  # while rows are read, changed and trained on
        monkeypatch.setattr(train_command, "progress_bar", Reports(after))
        assert_error(run(*train, "-o", model), 130, "Interrupted")
        assert not model.exists()
        assert [path.name for path in tmp_path.iterdir()] == ["cache"]
        assert list(cache.iterdir()) == []


def test_an_interrupted_evaluation_costs_nothing(
    parquet: Path, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _contents(model)
    evaluate = ("evaluate", model, "--data", parquet, "--json", "--max-memory", "0", "--cache-dir", cache)
    reports = Reports()
    monkeypatch.setattr(model_commands, "progress_bar", reports)
    assert run(*evaluate, "--exact")[0] == 0
    assert reports.most >= FILES
    for after in (1, reports.most // 2, reports.most):
        monkeypatch.setattr(model_commands, "progress_bar", Reports(after))
        assert_error(run(*evaluate), 130, "Interrupted")
    assert _contents(model) == before
    assert list(cache.iterdir()) == []


def test_interrupted_answers_are_continued(files: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, whole = Path("answers"), Path("whole")
    printed(*_answer(model, files, whole))
    monkeypatch.setattr(predict_command, "progress_bar", Reports(21))
    assert_error(run(*_answer(model, files, answers)), 130, "Interrupted")
    finished = _contents(answers)
    assert 10 <= len(finished) < FILES
    for name, content in finished.items():
        assert name == ANSWERS_FILE or content == (whole / name).read_bytes()
    monkeypatch.setattr(predict_command, "progress_bar", Reports())
    assert document(*_answer(model, files, answers, "--json"))["skipped"] == len(finished) - 1
    continued, complete = _contents(answers), _contents(whole)
    assert all(continued[name] == complete[name] for name in os.listdir(files))


def test_an_interrupted_training_can_be_continued(
    parquet: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = _train(parquet, Path("head"), "--resume", "--cache-dir", cache)
    reports = Reports()
    monkeypatch.setattr(train_command, "progress_bar", reports)
    assert run(*_train(parquet, Path("other")))[0] == 0
    monkeypatch.setattr(train_command, "progress_bar", Reports(reports.most // 2))
    assert_error(run(*train), 130, "Interrupted")
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(train_command, "progress_bar", progress_bar)
    printed(*train)
    assert list(cache.iterdir()) == []
    assert_error(run(*_train(parquet, Path("third"), "--resume")), 2, "--resume", "--cache-dir")


@pytest.mark.parametrize(("name", "owner"), [("head", Blocks), ("dpsgd", StoredRows)])
def test_ctrl_c_before_anybody_owns_the_rows_removes_them_too(
    parquet: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, owner: type
) -> None:
    seen: list[Path] = []

    def interrupted(_: object) -> None:
        seen.extend(cache.iterdir())
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(owner, "__enter__", interrupted)
    options = ("--declared-size", 1000, "--json", "--max-memory", "0", "--cache-dir", cache)
    assert_error(run("train", name, parquet, *DECLARED, *options), 130, "Interrupted")
    gc.collect()
    assert len(seen) == 1
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    "stop",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_program_and_removes_what_it_wrote(
    originals: Path, cache: Path, stop: signal.Signals
) -> None:
    options = ("--declared-size", 1000, "--steps", 2_000_000, "--max-memory", "0", "--cache-dir", cache)
    command = ("train", "dpsgd", originals / ".csv", *DECLARED, *options, "-o", "private")
    program = [sys.executable, "-m", "quietmax", *map(str, command)]
    before = signal.signal(
        stop, signal.SIG_DFL
    )  # `nohup` and background jobs ignore some, and so would the program
    try:
        running = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(stop, before)
    with running as started:
        try:
            deadline = time.monotonic() + 300
            while not any(cache.iterdir()) and started.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            assert any(cache.iterdir())
            started.send_signal(stop)
            out, err = started.communicate(timeout=300)
        finally:
            started.kill()
    assert (started.returncode, out) == (128 + stop, "")
    *before_it, last = err.splitlines()
    assert last == "quietmax: Interrupted."
    # The signal may come before the size of the files is printed.
    assert len(before_it) <= 1
    assert all(f"emporary files in {cache}" in line for line in before_it)
    assert list(cache.iterdir()) == []
    assert not Path("private").exists()


# --- Temporary files


def test_the_size_of_temporary_files_is_stated_before_they_are_written(
    originals: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = [each for each in _train(originals / ".parquet", "head") if each != "--json"]
    train += ["--max-memory", "0", "--cache-dir", cache]
    code, _, err = run(*train)
    assert code == 0, err
    assert f"temporary files in {cache}" in err
    free = shutil.disk_usage(cache)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    result = run(*train[:-4], "-o", "other", *train[-4:])
    assert_error(result, 1, "GB free", "--cache-dir", "--max-memory")
    assert list(cache.iterdir()) == []
    assert not Path("other").exists()


def test_options_of_memory_are_checked(parquet: Path) -> None:
    assert _memory_size("2G") == _memory_size("2gb") == _memory_size(" 2 GiB") == 2**31
    assert _memory_size("500MB") == 500 * 2**20
    assert _memory_size("512M") == FILES_IN_MEMORY  # the help text states it
    assert "Default: 512M" in " ".join(run("train", "head", "--help")[1].replace("│", " ").split())
    assert _memory_size("0") == 0
    for wrong in ("much", "-1G", "1e9", "4X"):
        result = run(*_train(parquet, Path("head"), f"--max-memory={wrong}"))
        assert_error(result, 2, "--max-memory must be a size")
    result = run(*_train(parquet, Path("head"), "--cache-dir", "none"))
    assert_error(result, 2, "--cache-dir must be a folder")
    assert_error(run(*_train(parquet, Path("head"), "--infer")), 2, "--infer", "part by part")
    for command in (("schema", "draft", parquet), ("train", "network", parquet, *DECLARED)):
        assert_error(run(*command), 1, f"{parquet} is a folder")


# --- Answers


def test_answers_to_a_folder_are_those_to_its_table_and_a_second_run_skips_them(
    head: Path, people: Path, files: Path
) -> None:
    answers = Path("answers")

    def counts(queries: Path = files) -> tuple[int, int, int]:
        done = document(*_answer(head, queries, answers, "--json"))
        return done["written"], done["skipped"], done["queries"]

    assert counts() == (FILES, 0, 1200)
    expected = document("predict", "--model", head, "--input", people)["labels"]
    for number, queries in enumerate(sorted(files.iterdir())):
        found = _read(answers / queries.name)
        assert found["label"].tolist() == expected[number::FILES]
        assert list(found.columns) == ["label", "probability of lo", "probability of hi"]
    (answers / queries.name).unlink()
    assert counts()[:2] == (1, FILES - 1)
    os.utime(files / queries.name, (0, 0))  # another file, although it is older than its answers
    assert counts()[:2] == (1, FILES - 1)
    other = Path(shutil.copytree(files, Path("other")))  # with the times of the files
    assert counts(other)[1] == 0, "files of the same name, size and time in another folder are others"
    file = min(other.iterdir())
    before, content = file.stat(), file.read_bytes()
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert counts(other)[:2] == (1, FILES - 1), "a file that was written again is another"


def test_a_folder_of_answers_belongs_to_one_model_and_one_run(
    head: Path, people: Path, parquet: Path
) -> None:
    answers, other, mine = Path("answers"), "other", Path("mine")
    answer = _answer(head, parquet, answers)
    printed(*answer)
    printed(*_train(people, other))
    mine.mkdir()
    shutil.copy(next(parquet.glob("part-37.*")), mine)
    for wrong, *words in (
        (_answer(other, parquet, answers), "another model"),
        (_answer(head, parquet, parquet / "answers"), "not inside"),
        (answer[:-2], "--output is required"),
        (_answer(head, parquet, mine), "part-37", "something else"),
    ):
        assert_error(run(*wrong), 2, "--output", *words)
    assert len(list(mine.iterdir())) == 1
    place = os.open(answers, os.O_RDONLY)
    fcntl.flock(place, fcntl.LOCK_EX)
    assert_error(run(*answer), 2, "--output", "no other run")
    os.close(place)
    printed(*answer)


@pytest.mark.parametrize("limit", [0, 20])
def test_a_full_disk_is_named_and_the_next_run_starts_again(head: Path, parquet: Path, limit: int) -> None:
    model, answers = open_private(head), Path("answers")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(QuietmaxError, match=f"The answers cannot be written to {answers} \\("):
            _answer_files(head, model, parquet, answers)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert _answer_files(head, model, parquet, answers)["written"] == FILES


@pytest.mark.parametrize("kind", ["head", "network"])
def test_a_model_that_is_paid_per_answer_writes_no_folders(people: Path, originals: Path, kind: str) -> None:
    paid = Path("paid")
    options = ("--epochs", 1) if kind == "network" else ("--declared-size", 1000, "--queries", 3)
    printed("train", kind, people, *DECLARED, *options, "-o", paid)
    result = run(*_answer(paid, originals / ".csv", "answers"))
    assert_error(result, 2, "paid per answer", "--output")
    assert not Path("answers").exists()
