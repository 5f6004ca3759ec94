"""Accounts in memory and in files. A fork copies memory, but neither budget nor noise (THEORY 3.12)."""

from __future__ import annotations

import copy
import ctypes
import json
import multiprocessing
import os
import pickle
import resource
import signal
import threading
import time

import joblib
import numpy as np
import pytest

from quietmax import spending
from quietmax.accounting import Budget
from quietmax.errors import DataUnavailable, InvalidInput, QuietmaxError
from quietmax.estimators import PrivateHead, Teachers, open_private, save_private
from quietmax.mechanisms import Algorithm1
from quietmax.models import CrossEntropy, Model, TrainingSettings
from quietmax.models.stacked import initial_mlp
from quietmax.predictor import Predictor
from quietmax.spending import FileAccount, MemoryAccount

GENERATOR = np.random.default_rng(0)
LABELS = GENERATOR.integers(0, 2, 60)
FEATURES = np.abs(GENERATOR.normal(size=(60, 2)) + LABELS[:, None]).astype(np.float32)
REFUSED = "a fork of process"


def in_fork(task, fork=os.fork, seconds=30):
    """What ``task`` returns in a forked process, or the sentence of the error it raises there; as JSON values."""
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        signal.alarm(seconds)  # a deadlock ends here
        try:
            try:
                result = task()
            except QuietmaxError as problem:
                result = str(problem)
            os.write(writing, json.dumps(result).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    assert text, f"the forked process ended without an answer (status {status})"
    return json.loads(text)


def head(**options) -> PrivateHead:
    settings = {"method": "output", "release": "query", "queries": 1, "epsilon": 1.0}
    return PrivateHead(classes=(0, 1), declared_size=60, **(settings | options)).fit(FEATURES, LABELS)


def teachers() -> Teachers:
    network = TrainingSettings(hidden=(), loss=CrossEntropy(), learning_rate=0.05, epochs=2, batch_size=8)
    return Teachers(
        epsilon=1.0, queries=1, teachers=3, network=network, declared_size=60, classes=(0, 1)
    ).fit(FEATURES, LABELS)


def predictor(account=None, queries=5) -> Predictor:
    model = Model(initial_mlp((2, 4, 2), "tanh", (0,)), TrainingSettings((4,)), 60, "made up", 0)
    return Predictor(model, Algorithm1("laplace"), Budget(1.0, queries=queries), account=account)


@pytest.mark.parametrize("made", [head, teachers])
def test_a_budget_for_one_answer_gives_one_answer_in_five_forks_and_the_parent_together(made) -> None:
    estimator = made()
    answers = [
        in_fork(lambda query=query: estimator.predict(FEATURES[query : query + 1]).tolist())
        for query in range(5)
    ]
    answers.append(estimator.predict(FEATURES[5:6]).tolist())
    assert [REFUSED in answer for answer in answers[:5]] == [True] * 5
    assert answers[5] in ([0], [1])


def test_new_and_cached_answers_and_the_balance_are_refused_in_a_fork_with_what_works() -> None:
    quiet = predictor()
    quiet.predict(FEATURES[:1])
    for ask in (
        lambda: quiet.predict(FEATURES[:1]).tolist(),  # cached
        lambda: quiet.predict(FEATURES[1:2]).tolist(),
        lambda: quiet.answered,
        lambda: quiet.remaining.queries,
    ):
        sentence = in_fork(ask)
        assert sentence.startswith(f"This is a fork of process {os.getpid()}, which holds the privacy budget")
        assert "opened from its folder" in sentence


def test_a_fork_cannot_save_the_budget_into_a_folder(tmp_path) -> None:
    estimator = head()
    assert REFUSED in in_fork(lambda: str(save_private(estimator, tmp_path / "model", dataset="made up")))
    assert not (tmp_path / "model").exists()


def test_neither_a_process_id_that_is_used_again_nor_a_fork_by_c_code_opens_the_account(monkeypatch) -> None:
    """Marks are added by hooks of Python, which do not run in the second case: there the process id tells."""
    quiet, number = predictor(), os.getpid()

    def asked():
        monkeypatch.setattr(os, "getpid", lambda: number)
        return quiet.predict(FEATURES[:1]).tolist()

    assert REFUSED in in_fork(asked)
    assert REFUSED in in_fork(lambda: quiet.predict(FEATURES[:1]).tolist(), fork=ctypes.PyDLL(None).fork)


def test_a_fork_of_a_fork_is_refused_and_a_new_predictor_of_a_fork_answers_there_alone() -> None:
    quiet = predictor()

    def asked():
        own = predictor()
        return [
            in_fork(lambda: quiet.predict(FEATURES[:1]).tolist()),
            in_fork(lambda: own.predict(FEATURES[:1]).tolist()),
            len(own.predict(FEATURES[:1])),
        ]

    theirs, child_of_own, own = in_fork(asked)
    assert REFUSED in theirs
    assert REFUSED in child_of_own
    assert own == 1


@pytest.mark.parametrize("durable", [False, True])
def test_a_fork_while_a_lock_is_held_does_not_wait_forever(tmp_path, durable) -> None:
    quiet = predictor(FileAccount.create(tmp_path / "account") if durable else None)
    with quiet._lock:
        assert REFUSED in in_fork(lambda: quiet.predict(FEATURES[:1]).tolist(), seconds=10)
    memory = MemoryAccount()
    with memory._lock:
        assert REFUSED in in_fork(lambda: memory.charge(1, 1), seconds=10)


def test_a_fork_opens_the_folder_and_pays_from_the_same_account(tmp_path) -> None:
    folder = save_private(head(queries=2), tmp_path / "model", dataset="made up")
    opened = open_private(folder)
    assert REFUSED in in_fork(lambda: opened.predict(FEATURES[:1]).tolist())
    assert in_fork(lambda: len(open_private(folder).predict(FEATURES[:1]))) == 1
    assert open_private(folder).remaining == 1


def test_a_process_forked_during_a_charge_does_not_keep_the_lock_of_the_file(tmp_path) -> None:
    account = FileAccount.create(tmp_path / "account")
    with account._locked(os.O_RDWR):
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
    charging = threading.Thread(target=account.charge, args=(1, 5), daemon=True)
    charging.start()
    charging.join(5)
    waited = charging.is_alive()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not waited
    assert account.answered == 1


def test_pools_of_processes_get_no_budget() -> None:
    estimator = head()
    with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(InvalidInput, match="copied"):
        pool.apply(estimator.predict, (FEATURES[:1],))
    with pytest.raises(Exception, match=r"pickle") as refused:
        joblib.Parallel(n_jobs=2)(joblib.delayed(estimator.predict)(FEATURES[:1]) for _ in range(2))
    assert "spent twice" in "".join(
        str(problem) for problem in (refused.value, refused.value.__cause__, refused.value.__context__)
    )
    assert estimator.predictor_.answered == 0


def test_copies_share_the_budget_or_are_refused() -> None:
    estimator = head()
    shared = copy.copy(estimator)
    assert shared.predictor_ is estimator.predictor_
    for copied in (copy.deepcopy, pickle.dumps, joblib.hash):
        with pytest.raises((InvalidInput, pickle.PicklingError), match="spent twice"):
            copied(estimator)
    with pytest.raises(InvalidInput, match="spent twice"):
        copy.copy(estimator.predictor_)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(InvalidInput, match="spent again"):
            copied(MemoryAccount())


def test_the_mark_of_this_process_stays() -> None:
    mark = list(spending._fork_marks)
    in_fork(lambda: 0)
    assert spending._fork_marks == mark


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{half a",
        '{"answered": "-1"}',
        '{"answered": 1e400}',
        '{"answered": 2.5}',
        '{"answered": "٣"}',
        "7",
    ],
)
def test_an_account_that_holds_no_integer_from_zero_up_answers_nothing(tmp_path, content) -> None:
    path = tmp_path / "account"
    path.write_text(content)
    account = FileAccount(path)
    for ask in (lambda: account.answered, lambda: predictor(account).predict(FEATURES[:1])):
        with pytest.raises(DataUnavailable, match=r"is damaged\. The number of charged answers is unknown"):
            ask()
    assert path.read_text() == content


@pytest.mark.parametrize("limit", [1, 30, 77])
def test_a_charge_that_is_not_written_whole_is_an_error(tmp_path, limit) -> None:
    account = FileAccount.create(tmp_path / "account")
    account.charge(3, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(QuietmaxError, match=r"cannot be read or written \(.+\)\. Nothing was answered"):
            account.charge(1, 10)
        with pytest.raises(QuietmaxError, match=r"cannot be created \(.+\)"):
            FileAccount.create(tmp_path / "another")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert account.answered in (3, 4)
    assert [file.name for file in tmp_path.iterdir()] == ["account"]


def test_a_missing_account_is_an_unknown_balance_and_not_a_new_one(tmp_path) -> None:
    account = FileAccount(tmp_path / "account")
    for ask in (lambda: account.answered, lambda: account.charge(1, 10)):
        with pytest.raises(DataUnavailable, match=r"is missing\. The number of charged answers is unknown"):
            ask()
    assert not list(tmp_path.iterdir())


def test_the_owner_states_the_balance_of_a_new_account_once(tmp_path) -> None:
    assert FileAccount.create(tmp_path / "new").answered == 0
    account = FileAccount.create(tmp_path / "lost", answered=7)
    assert account.answered == FileAccount(tmp_path / "lost").answered == 7
    account.charge(2, 9)
    with pytest.raises(InvalidInput, match="already"):
        FileAccount.create(tmp_path / "lost")
    assert account.answered == 9
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["lost", "new"]
    for wrong in (-1, 2.5, True, "3"):
        with pytest.raises(InvalidInput, match="answered must be an integer"):
            FileAccount.create(tmp_path / "wrong", answered=wrong)
    with pytest.raises(QuietmaxError, match="cannot be created"):
        FileAccount.create(tmp_path / "absent" / "account")
    with pytest.raises(QuietmaxError, match="cannot be opened"):
        FileAccount(account.path / "within").charge(1, 10)


def test_an_account_can_be_read_where_it_cannot_be_written(tmp_path, monkeypatch) -> None:
    account = FileAccount.create(tmp_path / "account.json")
    account.charge(3, 10)
    opened = os.open

    def read_only(path, flags, *more):
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise PermissionError(30, "Read-only file system")
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", read_only)
    assert FileAccount(tmp_path / "account.json").answered == 3
    with pytest.raises(QuietmaxError, match="Read-only file system"):
        account.charge(1, 10)


def test_an_account_of_another_model_is_not_charged(tmp_path) -> None:
    mine = FileAccount.create(tmp_path / "account")
    mine.charge(1, 5)
    assert FileAccount(mine.path, identity=mine.identity).answered == 1
    (tmp_path / "account").rename(tmp_path / "moved")
    other = FileAccount.create(tmp_path / "account")
    before = (tmp_path / "account").read_bytes()
    for ask in (lambda: mine.answered, lambda: mine.charge(1, 5)):
        with pytest.raises(DataUnavailable, match=r"belongs to another model\. Nothing was charged"):
            ask()
    assert (tmp_path / "account").read_bytes() == before
    assert other.identity != FileAccount(tmp_path / "moved").identity


def test_every_charge_writes_an_account_of_the_same_length(tmp_path) -> None:
    path = FileAccount.create(tmp_path / "account").path
    identity, length = FileAccount(path).identity, len(path.read_bytes())
    for count in (1, 10**6, 10**15):
        FileAccount(path).charge(count, 10**18)
        assert (len(path.read_bytes()), FileAccount(path).identity) == (length, identity)
    assert length < 512


def test_an_account_without_an_id_stays_as_it_is(tmp_path) -> None:
    path = tmp_path / "account"
    path.write_text('{"answered": "00000000000000000002"}')
    FileAccount(path).charge(3, 10)
    assert path.read_text() == '{"answered": "00000000000000000005"}'
    assert FileAccount(path, identity="").answered == 5
    with pytest.raises(DataUnavailable, match="belongs to another model"):
        FileAccount(path, identity="5f0c").charge(1, 10)


def test_a_relative_path_is_resolved_when_the_account_is_opened(tmp_path, monkeypatch) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        FileAccount.create(tmp_path / name / "account")
    monkeypatch.chdir(tmp_path / "here")
    account = FileAccount("account")
    monkeypatch.chdir(tmp_path / "there")
    account.charge(1, 5)
    assert FileAccount(tmp_path / "here" / "account").answered == 1
    assert FileAccount(tmp_path / "there" / "account").answered == 0


@pytest.mark.parametrize("text", [None, '{"answered": "00000000000000000000"}'], ids=["new", "without an id"])
def test_a_closed_account_is_not_charged_and_opens_again_after_an_error(tmp_path, text) -> None:
    path = tmp_path / "account"
    if text is None:
        FileAccount.create(path)
    else:
        path.write_text(text)
    account, before = FileAccount(path), path.read_bytes()
    with pytest.raises(KeyError), account.closed():
        raise KeyError
    assert path.read_bytes() == before
    with account.closed():
        assert len(path.read_bytes()) == len(before)
    for ask in (lambda: account.answered, lambda: account.charge(1, 5), lambda: account.closed().__enter__()):
        with pytest.raises(DataUnavailable, match="was closed when its model was replaced"):
            ask()


def test_an_account_that_counts_answers_cannot_be_closed(tmp_path) -> None:
    account = FileAccount.create(tmp_path / "account")
    account.charge(2, 5)
    with pytest.raises(InvalidInput, match="counts 2 paid answers"), account.closed():
        pytest.fail("the block must not run")
    account.charge(1, 5)
    assert account.answered == 3


def test_a_lost_account_of_a_model_is_created_with_the_id_that_the_model_names(tmp_path) -> None:
    folder = save_private(head(queries=5), tmp_path / "model", dataset="made up")
    opened = open_private(folder)
    identity = json.loads((folder / "model.json").read_text())["account_id"]
    (folder / "account.json").unlink()
    assert FileAccount.create(folder / "account.json", answered=2).identity == identity
    assert opened.remaining == open_private(folder).remaining == 3
