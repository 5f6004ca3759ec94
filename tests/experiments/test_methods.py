"""Every method of the table answers, claims what its estimator claims, and is measured."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quietmax.accounting import PureCost, mu_of
from quietmax.errors import InvalidInput
from quietmax.experiments import shared as shared_module
from quietmax.experiments.evaluate import measure
from quietmax.experiments.grid import Effort, Group, Source, Trial
from quietmax.experiments.methods import method, methods
from quietmax.experiments.results import Store
from quietmax.experiments.shared import Shared


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "points.csv"
    generator = np.random.default_rng(0)
    rows = [f"{a:.4f},{b:.4f},{int(a + b > 1)}" for a, b in generator.random((600, 2))]
    path.write_text("a,b,above\n" + "\n".join(rows) + "\n")
    return Source.of(
        str(path), {"label": "above", "classes": ["0", "1"], "bounds": {"a": [0.0, 1.0], "b": [0.0, 1.0]}}
    )


@pytest.fixture(scope="module")
def group(table):
    return Group(table, Effort(200, 2, epochs=5, attack_epochs=3, attacks=("shadow", "threshold")))


@pytest.fixture(scope="module")
def shared(group, tmp_path_factory):
    return Shared(group, Store(tmp_path_factory.mktemp("store")))


CHOSEN_BLINDLY = "The feature map and all settings were chosen without looking at the private records."
SEEDED = "Nobody knows the seed, and nobody looks at the low digits of the weights."
PRIVATE = [name for name, each in methods().items() if each.status == "proven"]


@pytest.mark.parametrize("name", PRIVATE)
def test_a_proven_methods_claim_is_weakened_by_nothing_but_the_seed(name, group, shared):
    release = method(name).prepare(Trial(group, name, 2.0, 3), shared)
    claim = release.claim
    whole = mu_of(2.0, 1 / (10 * group.effort.records))
    if release.mechanism is None:
        assert claim.assumptions == (CHOSEN_BLINDLY, SEEDED)
        assert claim.cost.mu <= whole * (1 + 1e-9)
        return
    # A mechanism's claim says nothing of its noise; one answer costs a third of what three may cost.
    assert (claim.status, claim.assumptions) == ("proven", ())
    if isinstance(claim.cost, PureCost):
        assert claim.cost.epsilon == pytest.approx(2 / 3)
    else:
        assert claim.cost.mu == pytest.approx(whole / math.sqrt(3))


@pytest.mark.parametrize("name", ["plain", "original", "algorithm1-laplace", "head", "teachers"])
def test_a_cell_reports_accuracy_leakage_by_every_attack_and_times(name, group, shared):
    epsilon = None if method(name).status == "none" else 5.0
    trial = Trial(group, name, epsilon, None if epsilon is None else 1)
    found = measure(trial, shared)
    rows = np.sort(np.concatenate([shared.data.train_rows, shared.data.test_rows]))
    right = method(name).prepare(trial, shared).answer(rows).labels == shared.data.records.labels[rows]
    assert found["test_accuracy"] == right[np.isin(rows, shared.data.test_rows)].mean()
    assert found["accuracy_loss"] == pytest.approx(1 - found["test_accuracy"] / found["baseline_accuracy"])
    assert set(found["attacks"]) == (set() if name == "original" else {"shadow", "threshold"})
    assert (found["fit_seconds"] == 0) == (name == "algorithm1-laplace")  # which asks the plain network
    assert 0 < found["answer_seconds"] < found["processor_seconds"]
    assert found["status"] == {"plain": "none", "original": "none", "algorithm1-laplace": "conditional"}.get(
        name, "proven"
    )
    if method(name).per_answer:
        assert found["audited"] == "one answer, in epsilon"
        assert found["audited_claim"] == {"algorithm1-laplace": 2.0, "teachers": 5.0}[name]
        assert 1 < found["audited_epsilon"] <= found["audited_claim"]
    else:
        # Attacks on networks that hardly learned guess like a coin; the original network is not attacked.
        assert (found["audited"], found["audited_epsilon"]) == (
            ("", None) if name == "original" else ("the attacks' guesses", 0.0)
        )


def test_a_mechanism_is_audited_once_and_an_audit_of_a_true_claim_stays_below_it(group, shared, table):
    first = measure(Trial(group, "sampled-neuron", 1.0, 1), shared)
    assert 0 <= first["audited_epsilon"] <= first["audited_claim"] == 1.0
    other = Group(table, group.effort, repeat=1)
    second = measure(Trial(other, "sampled-neuron", 1.0, 1), Shared(other, shared._store))
    assert second["audited_epsilon"] is None


def test_shared_networks_are_read_back_rather_than_trained_again(group, shared, monkeypatch):
    before = measure(Trial(group, "plain"), shared)
    for name in ("train", "train_sweep"):
        monkeypatch.setattr(shared_module, name, lambda *_, **__: pytest.fail("trained again"))
    monkeypatch.setattr(shared_module.ShadowPool, "outside", lambda *_, **__: pytest.fail("trained again"))
    again = measure(Trial(group, "plain"), Shared(group, shared._store))
    assert again["test_accuracy"] == pytest.approx(before["test_accuracy"])
    assert again["attacks"]["shadow"]["leakage"]["value"] == pytest.approx(
        before["attacks"]["shadow"]["leakage"]["value"]
    )


def test_published_dpsgd_exists_at_the_papers_epsilons_only(group, shared):
    with pytest.raises(InvalidInput, match="choose among"):
        method("published-rdp").prepare(Trial(group, "published-rdp", 3.0), shared)


def test_a_private_method_without_epsilon_is_refused(group, shared):
    with pytest.raises(InvalidInput, match="needs an epsilon"):
        method("head").prepare(Trial(group, "head"), shared)


def test_attacks_that_ask_for_other_records_are_refused_for_proven_methods(group, shared):
    release = method("head").prepare(Trial(group, "head", 1.0), shared)
    with pytest.raises(InvalidInput, match="neither members nor non-members"):
        release.answer(shared.data.pool_rows[:2])


def test_published_sweep_networks_answer(group, shared, monkeypatch):
    monkeypatch.setattr(shared_module, "EPSILONS", (1.0,))
    short = {"train_sweep": shared_module.train_sweep}

    def tiny_sweep(splits, *, epsilons, accountants):
        from quietmax.estimators.dpsgd import training as dpsgd_sweep

        plan = dpsgd_sweep.plan
        monkeypatch.setattr(
            dpsgd_sweep, "plan", lambda size, **options: plan(size, **options, sampling_rate=0.5, steps=4)
        )
        return short["train_sweep"](splits, epsilons=epsilons, accountants=accountants)

    monkeypatch.setattr(shared_module, "train_sweep", tiny_sweep)
    found = measure(Trial(group, "published-zcdp", 1.0), shared)
    assert 0 <= found["test_accuracy"] <= 1
    assert found["status"] == "conditional"
