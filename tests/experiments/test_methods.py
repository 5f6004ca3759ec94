"""Every method answers and claims what its estimator claims; the trials of a comparison follow from the methods."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quietmax.accounting.costs import GaussianCost, PureCost, mu_of
from quietmax.errors import InvalidInput
from quietmax.experiments.grid import Group, Trial
from quietmax.experiments.inputs import SharedInputs
from quietmax.experiments.methods import Method, PreparedMethod, method, method_trials, methods

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


def test_published_dpsgd_exists_only_at_the_papers_epsilons(group: Group, shared: SharedInputs) -> None:
    with pytest.raises(InvalidInput, match="only at the paper's values of epsilon"):
        method("published-rdp").prepare(Trial(group, "published-rdp", 3.0), shared)
    with pytest.raises(InvalidInput, match="got 3, 4"):
        method_trials(group, ["published-rdp"], [1.0, 3.0, 4.0], [1])


def test_a_private_method_requires_an_epsilon(group: Group, shared: SharedInputs) -> None:
    with pytest.raises(InvalidInput, match="requires an epsilon"):
        method("head").prepare(Trial(group, "head"), shared)


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


def test_an_unknown_method_is_an_error_that_suggests_the_nearest_name() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'teachers'"):
        method("teacher")
    with pytest.raises(InvalidInput, match="Valid: "):
        method("zzzzz")


class _Entry:
    def __init__(self, name: str, value: object) -> None:
        self.name, self._value = name, value

    def load(self) -> object:
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


def _prepare(*_: object) -> PreparedMethod:
    raise NotImplementedError


def test_another_package_adds_a_method_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Method("mine", "my method", "proven", _prepare)
    entries = [_Entry("mine", mine), _Entry("taken", methods()["head"]), _Entry("broken", ImportError("no"))]
    monkeypatch.setattr("quietmax._plugins.entry_points", lambda **_: entries)
    methods.cache_clear()
    try:
        with pytest.warns(UserWarning, match="already in use"):
            assert methods()["mine"] is mine
    finally:
        methods.cache_clear()
