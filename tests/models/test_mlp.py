from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quietmax.errors import InvalidInput
from quietmax.models.stacked import ACTIVATIONS, Activation, initial_mlp


def test_logits_of_a_stack_are_asked_network_by_network() -> None:
    stack = initial_mlp((6, 4, 3), "tanh", (0, 1))
    inputs = np.ones((2, 6), np.float32)
    with pytest.raises(InvalidInput, match="stack of 2"):
        stack.logits(inputs)
    torch.testing.assert_close(stack.network(1).logits(inputs), stack.stacked_logits(inputs)[1])
    with pytest.raises(InvalidInput, match="at least one neuron"):
        initial_mlp((6, 0, 3), "tanh", (0,))


def test_no_activation_can_be_added_or_replaced() -> None:
    """An activation of the user's own could mix the networks of a stack, and one record would then change all."""
    table: Any = ACTIVATIONS
    mixing = Activation("mixing", None, lambda values: values.add_(values.mean(0)), lambda slope, _: slope)
    for name in ("mixing", "tanh"):
        with pytest.raises(TypeError, match="item assignment"):
            table[name] = mixing
    assert list(ACTIVATIONS) == ["tanh", "sigmoid", "relu"]
    with pytest.raises(InvalidInput, match="must be one of tanh, sigmoid, relu, got 'mixing'"):
        initial_mlp((6, 4, 3), "mixing", (0,))
