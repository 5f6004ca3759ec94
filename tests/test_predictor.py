from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quietmax.accounting import Budget, GaussianCost, PureCost
from quietmax.errors import BudgetExhausted, InvalidInput, QuietmaxError
from quietmax.estimators.teachers import TeacherEnsemble
from quietmax.mechanisms import Algorithm1, Answers, NoisyMax
from quietmax.models import Model, TrainingSettings
from quietmax.models.stacked import initial_mlp
from quietmax.noise import ExactNoise, SeededNoise
from quietmax.predictor import Predictor
from quietmax.spending import FileAccount, MemoryAccount
from tests.mechanisms.made_up import bounds


def _model(classes: int = 4) -> Model:
    return Model(initial_mlp((6, 8, classes), "tanh", (0,)), TrainingSettings((8,)), 500, "made up", 0)


def _predictor(queries=10, classes=4, noise="gaussian", **more) -> Predictor:
    return Predictor(_model(classes), Algorithm1(noise), Budget(epsilon=1.0, queries=queries), **more)


def _queries(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 6)).astype(np.float32)


def test_a_budget_for_ten_answers_gives_exactly_ten() -> None:
    quiet = _predictor(10)
    for index in range(10):
        assert quiet.remaining.queries == 10 - index
        assert quiet.predict_proba(_queries(1, index)).shape == (1, 4)
    with pytest.raises(
        BudgetExhausted,
        match="Privacy budget exhausted: 1 answer requested, 0 of 10 left",
    ):
        quiet.predict_proba(_queries(1, 99))
    assert quiet.answered == 10


@given(
    queries=st.integers(1, 5000),
    noise=st.sampled_from(["gaussian", "laplace"]),
    classes=st.sampled_from([2, 3, 30]),
)
def test_no_number_of_queries_is_one_too_many_or_too_few_by_rounding(queries, noise, classes) -> None:
    quiet = _predictor(queries, classes, noise)
    assert quiet.remaining.queries == queries
    with pytest.raises(BudgetExhausted):
        quiet.predict(
            np.zeros((queries + 1, 6), np.float32) + np.arange(queries + 1, dtype=np.float32)[:, None]
        )
    assert quiet.answered == 0


def test_a_batch_is_answered_completely_or_not_at_all() -> None:
    quiet = _predictor(5)
    quiet.predict(_queries(3))
    with pytest.raises(BudgetExhausted):
        quiet.predict(_queries(3, seed=1))
    assert quiet.remaining.queries == 2
    assert len(quiet.predict(_queries(2, seed=2))) == 2


def test_an_identical_query_is_answered_from_the_cache_and_charged_once() -> None:
    quiet = _predictor(10)
    first = quiet.predict_proba(_queries(4))
    again = quiet.predict_proba(np.vstack([_queries(4)[::-1], _queries(4)]))
    np.testing.assert_array_equal(again, np.vstack([first[::-1], first]))
    assert quiet.answered == 4
    within = quiet.predict_proba(np.repeat(_queries(2, seed=1), 3, axis=0))
    np.testing.assert_array_equal(within[0], within[1])
    assert quiet.answered == 6
    zeros = np.zeros((1, 6), np.float32)
    np.testing.assert_array_equal(quiet.predict_proba(zeros), quiet.predict_proba(-zeros))
    assert quiet.answered == 7, "minus zero is the same query as zero"


def test_without_a_cache_every_query_costs_and_is_drawn_anew() -> None:
    quiet = _predictor(10, cache_size=0)
    first, again = quiet.predict_proba(_queries(1)), quiet.predict_proba(_queries(1))
    assert quiet.answered == 2
    assert (first != again).any()


def test_the_cache_is_bounded() -> None:
    quiet = _predictor(100, cache_size=3)
    quiet.predict(_queries(5))
    quiet.predict(_queries(5)[2:])
    assert quiet.answered == 5  # the last three are still stored
    quiet.predict(_queries(5)[:1])
    assert quiet.answered == 6  # the first was forgotten


class _Recorder:
    """A mechanism that notes what was spent at the moment it draws."""

    name, measure, analysis = "recorder", "pure", "proven"

    def __init__(self):
        self.seen: list[int] = []
        self.predictor: Predictor | None = None

    def prepared(self, model, per_query):  # noqa: ARG002
        self.per_query = per_query
        return self

    def cost(self, classes):  # noqa: ARG002
        return self.per_query

    def guarantee(self, classes):
        return Algorithm1("laplace", 1, 1, 1, 1).guarantee(classes)

    def release(self, logits, source):  # noqa: ARG002
        self.seen.append(self.predictor.answered)
        if len(self.seen) == 2:
            raise RuntimeError("the dice fell off the table")
        return Answers(logits.argmax(-1), None)


def test_it_spends_before_it_draws_and_gives_nothing_back() -> None:
    mechanism = _Recorder()
    quiet = Predictor(_model(), mechanism, Budget(epsilon=1.0, queries=10))
    mechanism.predictor = quiet
    quiet.predict(_queries(3))
    with pytest.raises(RuntimeError, match="dice"):
        quiet.predict(_queries(2, seed=1))
    assert mechanism.seen == [3, 5]
    assert quiet.answered == 5


@pytest.mark.parametrize("cache_size", [0, 100])
@pytest.mark.parametrize("durable", [False, True])
def test_sixteen_threads_never_get_more_than_the_budget(cache_size, durable, tmp_path) -> None:
    account = FileAccount.create(tmp_path / "account") if durable else None
    quiet = _predictor(200, cache_size=cache_size, account=account)
    answered, refused = [], []
    start = threading.Barrier(16)

    def ask(thread: int) -> None:
        start.wait()
        for index in range(40):
            batch = 1 + (thread + index) % 3
            try:
                answered.append(len(quiet.predict(_queries(batch, seed=1000 * thread + index))))
            except BudgetExhausted:
                refused.append(batch)

    threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(answered) == quiet.answered == 200
    assert refused


@pytest.mark.parametrize(
    ("queries", "match"),
    [
        (np.zeros(6), "shape"),
        (np.zeros((1, 5)), "6"),
        (np.full((1, 6), np.nan), "NaN"),
        (np.full((1, 6), np.inf), "NaN"),
    ],
)
def test_invalid_input_and_an_empty_batch_cost_nothing(queries, match) -> None:
    quiet = _predictor(10)
    with pytest.raises(InvalidInput, match=match):
        quiet.predict(queries)
    assert quiet.predict_proba(np.empty((0, 6), np.float32)).shape == (0, 4)
    assert quiet.answered == 0


@pytest.mark.parametrize(
    ("noise", "classes", "total", "one", "status"),
    [
        ("gaussian", 4, GaussianCost(1.0), GaussianCost(0.1), "refuted"),
        ("laplace", 4, PureCost(1.0), PureCost(0.01), "refuted"),
        ("laplace", 2, PureCost(0.4), PureCost(0.004), "conditional"),
    ],
)
def test_one_answer_costs_the_papers_share_and_the_guarantee_is_of_all_together(
    noise, classes, total, one, status
) -> None:
    quiet = _predictor(100, classes, noise)
    assert type(quiet.cost) is type(quiet.guarantee.cost) is type(one)
    assert float(quiet.cost.amount / one.amount) == pytest.approx(1.0)
    assert float(quiet.guarantee.cost.amount / total.amount) == pytest.approx(1.0)
    assert quiet.guarantee.status == status


def test_seeded_noise_shows_in_the_guarantee_and_is_repeatable() -> None:
    def ask():
        quiet = Predictor(_model(2), Algorithm1("laplace"), Budget(1.0, queries=10), noise=SeededNoise(4))
        return quiet.predict_proba(_queries(3)), quiet.guarantee

    (first, guarantee), (second, _) = ask(), ask()
    np.testing.assert_array_equal(first, second)
    assert guarantee.parameters["noise_source"]["source"] == "seeded"
    assert "seeded" in guarantee.because
    assert _predictor(1).guarantee.parameters["noise_source"]["source"] == "exact", "by default"


@pytest.mark.parametrize("name", ["model", "mechanism", "budget", "noise", "cost"])
def test_what_the_guarantee_is_computed_from_cannot_be_replaced(name) -> None:
    quiet = Predictor(_model(2), Algorithm1("laplace"), Budget(1.0, queries=10), noise=SeededNoise(4))
    before, other = quiet.guarantee, _predictor(10, 2)
    with pytest.raises(AttributeError):
        setattr(quiet, name, getattr(other, name))
    assert quiet.guarantee == before


def test_an_answer_that_costs_more_than_the_whole_budget_and_a_negative_cache_are_refused_at_once() -> None:
    mechanism = Algorithm1("laplace", epsilon_sampling=1.0, epsilon_neuron=1.0)
    with pytest.raises(InvalidInput, match="must be at most the budget"):
        Predictor(_model(), mechanism, Budget(epsilon=1.0, queries=1))
    with pytest.raises(InvalidInput, match="cache_size"):
        _predictor(1, cache_size=-1)


def test_probabilities_asked_of_a_labels_only_mechanism_cost_nothing() -> None:
    quiet = Predictor(
        _model(),
        NoisyMax("exponential", bounds=bounds(), per_query=PureCost(1.0)),
        Budget(10.0, queries=5),
    )
    with pytest.raises(InvalidInput, match="labels only"):
        quiet.predict_proba(_queries(2))
    assert quiet.answered == 0
    assert quiet.predict(_queries(2)).shape == (2,)
    assert quiet.answered == 2


def _votes(classes: int = 3) -> TeacherEnsemble:
    return TeacherEnsemble._of_fit(
        initial_mlp((6, classes), "tanh", range(4)), np.zeros(4, dtype=bool), classes, False
    )


class _Quieter(NoisyMax):
    def release(self, scores, source):  # noqa: ARG002
        return Answers(scores.argmax(-1), None)


class _Stating(_Recorder):
    def guarantee(self, classes):
        return NoisyMax().prepared(_votes(), self.per_query).guarantee(classes)


class _Silent(ExactNoise):
    def permute_and_flip_choice(self, gaps, rate):  # noqa: ARG002
        return gaps.argmin(0)


class _Free:
    """An account that never charges."""

    answered = 0

    def charge(self, queries: int, limit: int) -> None:
        pass


class _FreeInMemory(MemoryAccount):
    def charge(self, queries: int, limit: int) -> None:
        pass


def _claimed(mechanism=None, **parts):
    return Predictor(_votes(), mechanism or NoisyMax(), Budget(1.0, 1e-5, queries=5), **parts).guarantee


@pytest.mark.parametrize(
    ("parts", "what", "assumption"),
    [
        ({"mechanism": _Quieter()}, "mechanism", "has the privacy it states."),
        ({"mechanism": _Stating()}, "mechanism", "has the privacy it states."),
        ({"noise": _Silent()}, "noise source", "is exact and unpredictable."),
        ({"account": _Free()}, "account", "counts every answer and stops when the budget is spent."),
        ({"account": _FreeInMemory()}, "account", "counts every answer and stops when the budget is spent."),
    ],
)
def test_a_part_of_the_users_own_is_not_proven(parts, what, assumption) -> None:
    claimed = _claimed(**parts)
    assert claimed.status == "conditional"
    assert claimed.because.endswith(f"The {what} is the user's own.")
    assert claimed.assumptions == (f"The user's own {what} {assumption}",)


def test_our_own_parts_are_proven_and_what_is_refuted_stays_so(tmp_path) -> None:
    for account in (None, MemoryAccount(), FileAccount.create(tmp_path / "account")):
        assert _claimed(account=account).status == "proven"
    assert _predictor(1, account=_Free()).guarantee.status == "refuted"


def test_a_budget_moves_to_a_file_and_nowhere_else(tmp_path) -> None:
    quiet = _predictor(5)
    quiet.predict(_queries(2))
    for other in (_Free(), MemoryAccount()):
        with pytest.raises(InvalidInput, match="to a FileAccount only"):
            quiet.move_account(lambda answered, other=other: other)  # type: ignore[misc]  # noqa: ARG005
    assert quiet.answered == 2
    quiet.move_account(lambda answered: FileAccount.create(tmp_path / "account", answered))
    assert FileAccount(tmp_path / "account").answered == quiet.answered == 2


@pytest.mark.parametrize("cache_size", [0, 10])
@pytest.mark.parametrize("durable", [False, True])
def test_forks_between_the_charge_and_the_draw_get_no_answers(cache_size, durable, tmp_path) -> None:
    """A signal handler or a profiler can fork there; each process would draw its own answer for one charge."""
    parent = os.getpid()

    class Forking(NoisyMax):
        def release(self, scores, source):
            for _ in range(3):
                child = os.fork() if os.getpid() == parent else 0
                if child == 0:
                    break
                os.waitpid(child, 0)
            return super().release(scores, source)

    account = FileAccount.create(tmp_path / "account") if durable else None
    quiet = Predictor(_votes(), Forking(), Budget(1.0, queries=1), cache_size=cache_size, account=account)
    reader, writer = os.pipe()
    try:
        said = f"answers {len(quiet.predict(_queries(1)))}"
    except QuietmaxError as error:
        said = str(error)
    except BaseException as error:
        said = repr(error)
    os.write(writer, said[:40].encode() + b"\n")
    if os.getpid() != parent:
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        lines = pipe.read().splitlines()
    assert lines[3:] == ["answers 1"]
    assert len(lines) == 4
    assert all(line.startswith("This is a fork of process") for line in lines[:3])
    assert quiet.answered == 1
