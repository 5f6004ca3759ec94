from __future__ import annotations

import json
from pathlib import Path

import pytest

from quietmax.models.serialization import load_model
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


def test_the_shape_can_be_read_from_a_model_folder(network: Path) -> None:
    out = printed("sensitivity", "--model", network, "--json")
    model = load_model(network)
    shape = ("--features", model.features, "--classes", 2, "--records", model.records)
    assert json.loads(out) == pytest.approx(document("sensitivity", *shape))
    assert "published" in printed("sensitivity", "--model", network)
