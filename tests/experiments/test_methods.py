"""Every method answers and claims what its estimator claims; the trials of a comparison follow from the methods."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quietmax.accounting.costs import GaussianCost, PureCost, mu_of
from quietmax.attacks import AttackReport
from quietmax.attacks.shadow_models import ShadowPool
from quietmax.data import Holdout
from quietmax.errors import InvalidInput
from quietmax.experiments import methods as methods_module
from quietmax.experiments.grid import DataSource, Effort, Group, ResultStore, Trial
from quietmax.experiments.methods import (
    SharedInputs,
    _fair_guesses,
    measure,
    method,
    method_trials,
    methods,
    training_size,
)

PUBLIC_SETTINGS = (
    "What the owner declared or chose (bounds, categories, classes, size, column types, features, settings) would be "
    "the same without any one person or record."
)
UNKNOWN_SEED = "Nobody knows the seed, and nobody looks at the low digits of the weights."
ACCOUNTANT = {
    "dpsgd": "SciPy's Fourier transform and NumPy's elementary functions have rounding errors no larger than those "
    "that quietmax.accounting.dpsgd allows for.",
    "dpsgd-rdp": "dp-accounting computes the Renyi divergences of one step to within 1e-12.",
}
PROVEN = [name for name, each in methods().items() if each.status == "proven"]


@pytest.mark.parametrize("name", PROVEN)
def test_a_proven_methods_claim_is_weakened_by_nothing_but_the_seed(
    name: str, group: Group, shared: SharedInputs
) -> None:
    prepared = method(name).prepare(Trial(group, name, 2.0, 3), shared)
    claim = prepared.claim
    assert claim is not None
    delta = 1 / (10 * group.effort.records)
    total = mu_of(2.0, delta)
    if prepared.mechanism is None:
        accountant = (ACCOUNTANT[name],) if name in ACCOUNTANT else ()
        assert claim.assumptions == (PUBLIC_SETTINGS, *accountant, UNKNOWN_SEED)
        assert claim.at_delta(delta) <= 2.0 * (1 + 1e-9)
        if not name.startswith("dpsgd"):  # Sampled batches have no cost that composes.
            assert isinstance(claim.cost, GaussianCost)
            assert claim.cost.mu <= total * (1 + 1e-9)
        return
    # A mechanism's claim does not depend on its noise source; one answer costs a third of what three may cost.
    assert (claim.status, claim.assumptions) == ("proven", ())
    if isinstance(claim.cost, PureCost):
        assert claim.cost.epsilon == pytest.approx(2 / 3)
    else:
        assert claim.cost.mu == pytest.approx(total / math.sqrt(3))


@pytest.mark.parametrize(
    ("name", "epsilon", "message"),
    [
        ("teacher", 1.0, "did you mean 'teachers'"),
        ("head", None, "requires an epsilon"),
        ("published-rdp", 3.0, "only at the paper's values of epsilon"),
    ],
)
def test_a_method_that_cannot_be_prepared_is_an_error(
    name: str, epsilon: float | None, message: str, group: Group, shared: SharedInputs
) -> None:
    with pytest.raises(InvalidInput, match=message):
        method(name).prepare(Trial(group, name, epsilon), shared)


def test_proven_methods_answer_every_record(group: Group, shared: SharedInputs) -> None:
    """The public features of pool records, which some attacks query, are computed when they are needed."""
    prepared = method("head").prepare(Trial(group, "head", 1.0), shared)
    rows = np.concatenate([shared.data.pool_rows[:2], shared.data.test_rows[:2], shared.data.pool_rows[2:3]])
    together = prepared.answer(rows)
    for place, row in enumerate(rows):
        alone = prepared.answer(np.array([row]))
        assert alone.probabilities is not None
        assert together.probabilities is not None
        assert np.allclose(alone.probabilities[0], together.probabilities[place])


def test_trials_have_numbers_of_answers_only_where_answers_are_charged(group: Group) -> None:
    trials = method_trials(group, ["plain", "head", "teachers"], [1.0, 2.0], [1, 10])
    assert [(each.method, each.epsilon, each.queries) for each in trials] == [
        ("plain", None, None),
        ("head", 1.0, None),
        ("head", 2.0, None),
        ("teachers", 1.0, 1),
        ("teachers", 2.0, 1),
        ("teachers", 1.0, 10),
        ("teachers", 2.0, 10),
    ]
    with pytest.raises(InvalidInput, match="got 3, 4"):
        method_trials(group, ["published-rdp"], [1.0, 3.0, 4.0], [1])


def test_another_package_adds_a_method_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = replace(methods()["head"], name="mine")
    loaded = {"entry": mine, "taken": methods()["head"], "other": 3}
    entries = [SimpleNamespace(name=name, load=lambda each=each: each) for name, each in loaded.items()]
    monkeypatch.setattr("quietmax._lazy.entry_points", lambda **_: entries)
    methods.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"already in use|must be a quietmax\.experiments") as warned:
            assert methods()["mine"] is mine
        assert len(warned) == 2
    finally:
        methods.cache_clear()


@pytest.mark.parametrize("name", ["plain", "original", "algorithm1-laplace", "head", "teachers"])
def test_a_result_has_accuracy_leakage_by_every_attack_and_times(
    name: str, group: Group, shared: SharedInputs
) -> None:
    epsilon = None if method(name).status == "none" else 5.0
    trial = Trial(group, name, epsilon, None if epsilon is None else 1)
    found = measure(trial, shared)
    rows = np.sort(np.concatenate([shared.data.train_rows, shared.data.test_rows]))
    right = method(name).prepare(trial, shared).answer(rows).labels == shared.data.records.labels[rows]
    assert found["test_accuracy"] == right[np.isin(rows, shared.data.test_rows)].mean()
    assert found["accuracy_loss"] == pytest.approx(1 - found["test_accuracy"] / found["baseline_accuracy"])
    assert set(found["attacks"]) == (set() if name == "original" else {"shadow", "threshold"})
    assert (found["fit_seconds"] == 0) == (name == "algorithm1-laplace")  # it uses the plain network
    assert 0 < found["answer_seconds"] < found["processor_seconds"]
    # The records are an own table, whose size is taken as public, so nothing is proven.
    assert found["status"] == ("none" if name in ("plain", "original") else "conditional")
    if method(name).per_answer:
        assert found["audited"] == "one answer, in epsilon"
        assert found["audited_claim"] == {"algorithm1-laplace": 2.0, "teachers": 5.0}[name]
        assert 1 < found["audited_epsilon"] <= found["audited_claim"]
    else:
        # Attacks on networks that hardly learned guess like a coin; the original network is not attacked.
        assert (found["audited"], found["audited_epsilon"]) == (
            ("", None) if name == "original" else ("the attacks' guesses", 0.0)
        )


def test_a_mechanism_is_audited_once_and_the_bound_stays_below_a_true_claim(
    group: Group, shared: SharedInputs, table: DataSource, store: ResultStore
) -> None:
    first = measure(Trial(group, "sampled-neuron", 1.0, 1), shared)
    assert 0 <= first["audited_epsilon"] <= first["audited_claim"] == 1.0
    other = Group(table, group.effort, repeat=1)
    second = measure(Trial(other, "sampled-neuron", 1.0, 1), SharedInputs(other, store))
    assert second["audited_epsilon"] is None


@pytest.mark.parametrize(
    "name", ["plain", "algorithm1-laplace", "sampled-neuron", "teachers", "head", "dpsgd"]
)
def test_a_table_with_persons_is_held_out_attacked_and_protected_by_persons(
    name: str, visits: DataSource, store: ResultStore
) -> None:
    effort = Effort(120, 10, epochs=5, attack_epochs=3, attacks=("shadow", "threshold", "lira"), holdout=0.2)
    group = Group(visits, effort)
    shared = SharedInputs(group, store)
    chosen = method(name)
    trial = Trial(group, name, None if chosen.status == "none" else 5.0, 1 if chosen.per_answer else None)
    found = measure(trial, shared)
    assert found["records"] == len(shared.data.train_rows)
    assert set(found["attacks"]) == {"shadow", "threshold", "lira"}
    pool = shared._pool_for("shadow")
    assert pool.design == "overlapping"
    persons = shared.data.records.units
    assert all(set(persons[inside]).isdisjoint(persons[~inside]) for inside in pool.inside)
    claim = chosen.prepare(trial, shared).claim
    if name in ("sampled-neuron", "teachers", "head", "dpsgd"):
        assert claim is not None
        assert claim.unit == "person"
        pure = claim.definition == "pure"
        assert pure == (name in ("sampled-neuron", "teachers"))
        assert found["claimed_delta"] == (0.0 if pure else pytest.approx(1 / 1200))
    if not chosen.per_answer:
        # Attacks on networks that hardly learned, and on private ones, guess like a coin.
        assert (found["audited"], found["audited_epsilon"]) == ("the attacks' guesses", 0.0)


def _report(members: int, called: int, nonmembers: int, called_too: int) -> AttackReport:
    return AttackReport._from_scores(
        attack="made up",
        target="nothing",
        released="labels",
        member_scores=np.repeat([1.0, 0.0], [called, members - called]),
        nonmember_scores=np.repeat([1.0, 0.0], [called_too, nonmembers - called_too]),
        decision=0.5,
        threshold=0.5,
        queries=members + nonmembers,
        spent=None,
    )


def test_guesses_count_as_many_members_as_nonmembers() -> None:
    """Whoever calls everybody a member is right about half of a fair sample, however many members there are."""
    assert _fair_guesses(_report(100, 70, 100, 20), seed=0) == (200, 150)
    assert _fair_guesses(_report(800, 800, 200, 200), seed=0) == (400, 200)
    counted = [_fair_guesses(_report(800, 400, 200, 50), seed) for seed in range(50)]
    assert {guesses for guesses, _ in counted} == {400}
    rights = np.array([right for _, right in counted])
    assert len(set(rights)) > 5
    # 150 right rejections, and 100 expected of 200 members with standard deviation 6.1; the mean of 50 has 0.87.
    assert abs(rights.mean() - 250) < 5


def test_shared_networks_are_read_back_rather_than_trained_again(
    group: Group, shared: SharedInputs, store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = measure(Trial(group, "plain"), shared)
    for name in ("train", "train_sweep"):
        monkeypatch.setattr(methods_module, name, lambda *_, **__: pytest.fail("trained again"))
    monkeypatch.setattr(ShadowPool, "train", lambda *_, **__: pytest.fail("trained again"))
    again = measure(Trial(group, "plain"), SharedInputs(group, store))
    assert again["test_accuracy"] == pytest.approx(before["test_accuracy"])
    assert again["attacks"]["shadow"]["leakage"]["value"] == pytest.approx(
        before["attacks"]["shadow"]["leakage"]["value"]
    )


def test_a_comparison_trains_on_the_data_sets_number_of_records_or_on_what_the_holdout_leaves(
    table: DataSource,
) -> None:
    mnist, fair = DataSource.of("mnist"), DataSource.of("fair")
    assert training_size(mnist, None, None) == (10_000, None)
    assert training_size(mnist, 500, None) == (500, None)
    assert training_size(fair, None, None)[1] == 0.2
    assert training_size(fair, 500, None) == (500, None)
    assert training_size(table, None, None) == (480, 0.2)
    assert training_size(table, None, 0.3) == (420, 0.3)
    with pytest.raises(InvalidInput, match="`holdout` is the share of a table"):
        training_size(table, 100, None)
    with pytest.raises(InvalidInput, match="`holdout` must be above 0"):
        training_size(table, None, 0.0)


def test_the_holdout_is_the_test_part_and_is_stored_in_keys_only_where_there_is_one(
    table: DataSource, store: ResultStore
) -> None:
    shared = SharedInputs(Group(table, Effort(480, 2, holdout=0.2), seed=3), store)
    assert shared.data.holdout == Holdout(0.2, 3)
    assert len(shared.data.train_rows) + len(shared.data.test_rows) == 600
    assert 80 < len(shared.data.test_rows) < 160  # 120 expected, 4 standard deviations on either side
    assert not len(shared.data.pool_rows)
    assert shared.group.to_json()["effort"]["holdout"] == 0.2
    assert "holdout" not in Group(table, Effort(480, 2)).to_json()["effort"]


def test_a_scaling_and_a_learning_rate_change_the_network_and_not_what_proven_methods_see(
    store: ResultStore,
) -> None:
    def shared(**settings: Any) -> SharedInputs:
        return SharedInputs(
            Group(DataSource("mnist-5k"), Effort(200, 2, epochs=3, attacks=(), **settings)), store
        )

    stated, other = shared(), shared(scaling="pixel/255 - 0.5", learning_rate=1e-4)
    assert stated.group.to_json()["effort"].keys() | {"scaling", "learning_rate"} == (
        other.group.to_json()["effort"].keys()
    )
    assert (stated.model.settings.learning_rate, other.model.settings.learning_rate) == (1e-3, 1e-4)
    np.testing.assert_array_equal(stated.data.records.features - 0.5, other.data.records.features)
    np.testing.assert_array_equal(stated.public.features, other.public.features)


def test_published_dpsgd_loses_less_accuracy_with_less_noise(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embedded digits: with epsilon 1000 under zCDP nearly nothing is lost, with 0.01 nearly everything."""
    monkeypatch.setattr(methods_module, "EPSILONS", (0.01, 1000.0))
    monkeypatch.setattr(methods_module, "PUBLISHED_ACCOUNTANTS", ("zcdp", "nc"))
    shared = SharedInputs(Group(DataSource("mnist-5k"), Effort(200, 2, attacks=())), store)
    losses = {
        epsilon: measure(Trial(shared.group, "published-zcdp", epsilon), shared)["accuracy_loss"]
        for epsilon in (0.01, 1000.0)
    }
    assert losses[0.01] > 0.7
    assert losses[1000.0] < 0.1
    assert not np.array_equal(
        shared._published_dpsgd_network("zcdp", 0.01).weight_vectors(),
        shared._published_dpsgd_network("nc", 0.01).weight_vectors(),
    )
