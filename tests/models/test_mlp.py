from __future__ import annotations

import numpy as np
import pytest
import torch

from quietmax.errors import InvalidInput
from quietmax.models.mlp import initial_mlp


def test_logits_of_a_stack_are_asked_network_by_network() -> None:
    stack = initial_mlp((6, 4, 3), "tanh", (0, 1))
    inputs = np.ones((2, 6), np.float32)
    with pytest.raises(InvalidInput, match="stack of 2"):
        stack.logits(inputs)
    torch.testing.assert_close(stack.network(1).logits(inputs), stack.stacked_logits(inputs)[1])
    with pytest.raises(InvalidInput, match="at least one neuron"):
        initial_mlp((6, 0, 3), "tanh", (0,))
