"""Errors say what is wrong and what is valid; a value of the wrong type is not a missing attribute."""

from __future__ import annotations

import numpy as np
import pytest

import quietmax as qm
from quietmax.errors import BudgetExhausted, InvalidInput, QuietmaxError, short_message, unknown_name
from quietmax.models import Model
from quietmax.models.stacked import initial_mlp

ROWS, LABELS = np.zeros((8, 3)), np.arange(8) % 2


def _model():
    settings = qm.TrainingSettings((4,))
    return Model(initial_mlp((3, 4, 2), "tanh", (0,)), settings, 8, "made up", 0)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: qm.load(3), "name must be the name of a data set"),
        (lambda: qm.train(ROWS), "data must be a Split"),
        (lambda: qm.train("mnist-5k"), "data must be a Split"),
        (
            lambda: qm.TrainingSettings(learning_rate="a"),
            "learning_rate must be a number, got a value of type str",
        ),
        (lambda: qm.TrainingSettings(epochs=None), "epochs must be a number, got a value of type NoneType"),
        (lambda: qm.Predictor(_model(), "algorithm1", qm.Budget(1.0)), "mechanism must be a mechanism"),
        (lambda: qm.Predictor(_model(), qm.Algorithm1("gaussian"), 1.0), "budget must be a Budget"),
        (
            lambda: qm.Predictor(ROWS, qm.Algorithm1("gaussian"), qm.Budget(1.0)),
            "model must be a trained model",
        ),
        (
            lambda: qm.PrivateHead(classes=3, declared_size=8).fit(ROWS, LABELS),
            "classes must be a flat sequence",
        ),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_what_is_valid(wrong, sentence) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        wrong()


def test_every_error_is_a_quietmax_error_and_invalid_input_a_value_error() -> None:
    assert issubclass(InvalidInput, ValueError)
    for error in (InvalidInput, BudgetExhausted):
        assert issubclass(error, QuietmaxError)


def test_an_unknown_name_is_told_with_the_valid_ones_and_a_similar_one_if_there_is_one() -> None:
    near = unknown_name("method", "Teacher", ["head", "teachers"], ", or a file")
    assert (
        str(near) == "Unknown method 'Teacher' (did you mean 'teachers'?). Valid: head, teachers, or a file."
    )
    assert str(unknown_name("method", "x", ["head"])) == "Unknown method 'x'. Valid: head."


def test_a_message_of_another_library_is_shortened_to_its_first_line() -> None:
    assert short_message(ValueError("x" * 300 + "\nmore")) == "x" * 160
    assert short_message(RuntimeError("  \n")) == "RuntimeError"
