from __future__ import annotations

from dataclasses import replace

import pytest

from quietmax.experiments import architectures as ours
from quietmax.experiments.architectures import ARCHITECTURES, measure_architecture, stored_architectures
from quietmax.models import TrainingSettings
from quietmax.sensitivity.network import published_sensitivity_for


def test_the_cases_go_beyond_the_papers_network_in_loss_activation_and_depth() -> None:
    assert ARCHITECTURES[0] == (1, "tanh", "convexified cross-entropy")
    assert {layers for layers, _, _ in ARCHITECTURES} == {1, 2, 3}
    assert {activation for _, activation, _ in ARCHITECTURES} == {"tanh", "sigmoid", "relu"}
    assert any("quadratic" in loss for _, _, loss in ARCHITECTURES)


@pytest.mark.parametrize(
    ("layers", "activation", "loss"),
    [(2, "tanh", "convexified cross-entropy"), (1, "relu", "cross-entropy"), (1, "sigmoid", "quadratic")],
)
def test_a_case_is_trained_and_put_into_the_formulas(
    monkeypatch: pytest.MonkeyPatch, layers: int, activation: str, loss: str
) -> None:
    monkeypatch.setattr(ours, "TrainingSettings", lambda *given: replace(TrainingSettings(*given), epochs=1))
    row = measure_architecture("mnist-5k", layers, activation, loss, repeats=2, removals=2)
    assert (row.repeats, row.removals) == (2, 2)
    assert 0 < row.test_accuracy <= 1
    assert row.observed_weights_l2 > 0
    if loss == "quadratic":
        assert (row.rho, row.weights_l2, row.logit, row.exceeded) == (None, None, None, ())
    elif activation == "tanh":
        assert row.logit == published_sensitivity_for(784, [128, 128], 10, 2_000).logit.value
    else:
        assert row.rho is not None


def test_the_stored_table_has_every_case_on_both_data_sets_and_its_formulas_are_ours() -> None:
    rows = stored_architectures()
    cases = {
        name: [(row.layers, row.activation, row.loss) for row in rows if row.dataset == name]
        for name in ("location", "adult")
    }
    assert cases["location"] == list(ARCHITECTURES)
    assert cases["adult"] == list(ARCHITECTURES)
    features, classes, records = 446, 30, 1_200
    for row in rows:
        if row.dataset == "location" and row.rho is not None and row.activation != "relu":
            ours_now = published_sensitivity_for(
                features, [128] * row.layers, classes, records, activation_name=row.activation
            )
            assert row.rho == pytest.approx(ours_now.rho.value, rel=1e-5)
            assert row.logit == pytest.approx(ours_now.logit.value, rel=1e-5)
