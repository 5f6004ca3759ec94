from __future__ import annotations

from tests.cli.conftest import document, printed


def test_sensitivity_prints_exactly_the_seven_quantities() -> None:
    shape = ("--features", 784, "--hidden", 128, "--classes", 10, "--records", 10000)
    values = document("sensitivity", *shape)
    assert list(values) == [
        "rho",
        "weights_l2",
        "weight",
        "logit",
        "probability",
        "probability_untruncated",
        "oaro",
    ]
    assert round(values["rho"], 4) == 2.2274
    assert round(values["logit"], 4) == 0.3577
    assert round(values["oaro"], 4) == 1.9845
    assert "published" in printed("sensitivity", *shape)
