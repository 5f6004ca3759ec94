from __future__ import annotations

import json
from pathlib import Path

import pytest

from quietmax.models.serialization import load_model
from tests.cli.conftest import Run, assert_error, json_of, output_of


def test_sensitivity_prints_exactly_the_seven_quantities(run: Run) -> None:
    shape = ("--features", 784, "--hidden", 128, "--classes", 10, "--records", 10000)
    values = json_of(run("sensitivity", *shape, "--json"))
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


def test_the_shape_can_be_read_from_a_model_folder(run: Run, network: Path) -> None:
    out = output_of(run("sensitivity", "--model", network, "--json"))
    model = load_model(network)
    shape = ("--features", model.features, "--classes", 2, "--records", model.records)
    assert json.loads(out) == pytest.approx(json.loads(run("sensitivity", *shape, "--json")[1]))
    out = output_of(run("sensitivity", "--model", network))
    assert "published" in out


def test_a_shape_or_a_model_is_required_and_not_both(run: Run, network: Path) -> None:
    for option in (("--features", 784), ("--hidden", 128)):
        assert_error(run("sensitivity", *option, "--model", network), 2, "--model can only be combined")
