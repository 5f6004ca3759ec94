"""Exact clipped sums: the same gradients, and what one record adds is a function of that record alone, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quietmax.models.clipped_sums import ClippedSums, Gradients
from quietmax.models.exact_sums import ROWS_AT_ONCE, _exponential, exact_clipped_sum
from quietmax.models.mlp import initial_mlp

SHAPES = {"linear": (11, 2), "one hidden layer": (11, 6, 4), "two hidden layers": (11, 6, 5, 3)}
ACTIVATIONS = ["tanh", "relu", "sigmoid"]


def _network(widths, seed=0, activation="tanh", scale=1.0):
    network = initial_mlp(widths, activation, (seed,), torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for bias in network.biases:
        bias.copy_(torch.randn(bias.shape, generator=generator).double() / 3)
    for kernel in network.kernels:
        kernel.mul_(scale)
    return network


def _records(count, widths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = 3 * torch.randn(count, widths[0], generator=generator)
    return inputs, torch.randint(0, widths[-1], (count,), generator=generator)


def _vector(gradients):
    return torch.cat([tensor.flatten() for tensor in gradients.tensors()])


def _sum(network, inputs, labels, clip):
    return _vector(exact_clipped_sum(network, inputs, labels, clip))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("widths", SHAPES.values(), ids=SHAPES)
def test_the_exact_sums_are_the_ordinary_ones_up_to_their_grid(widths, activation):
    network = _network(widths, activation=activation)
    inputs, labels = _records(ROWS_AT_ONCE + 30, widths)
    for clip in (0.03, 1.0, 50.0):
        ordinary = Gradients.zeros(network)
        padded = torch.cat([inputs, torch.zeros(1, widths[0])]).double()
        targets = torch.cat([labels, torch.zeros(1, dtype=torch.int64)])
        sums = ClippedSums(network, padded, targets, torch.tensor([clip], dtype=torch.float64))
        sums.add_to(ordinary, torch.arange(len(inputs)).unsqueeze(0))
        exact = _sum(network, inputs, labels, clip)
        assert float((exact - _vector(ordinary)).norm()) <= 2e-5 * clip * len(inputs)
        assert float(exact.norm()) > 1e-3 * clip


@given(
    seed=st.integers(0, 10**6),
    clip=st.floats(1e-6, 1e6),
    stretch=st.sampled_from([1e-30, 1e-3, 1.0, 1e6, 1e30]),
    weights=st.sampled_from([0.0, 1e-6, 1.0, 1e5]),
    shape=st.sampled_from(list(SHAPES)),
    activation=st.sampled_from(ACTIVATIONS),
)
@settings(max_examples=150)
def test_removing_a_record_subtracts_exactly_its_own_contribution_which_the_clip_norm_bounds(
    seed, clip, stretch, weights, shape, activation
):
    """Whatever the order and number of the others, also with huge or tiny features and weights."""
    widths = SHAPES[shape]
    network = _network(widths, seed % 89, activation, weights)
    count = 1 + seed % (2 * ROWS_AT_ONCE)
    inputs, labels = _records(count, widths, seed)
    inputs[:: 1 + seed % 7] *= stretch
    victim = seed % count
    order = torch.from_numpy(np.random.default_rng(seed).permutation(count))
    kept = order[order != victim]
    with_it = _sum(network, inputs, labels, clip)
    without = _sum(network, inputs[kept], labels[kept], clip)
    own = _sum(network, inputs[[victim]], labels[[victim]], clip)
    assert torch.isfinite(with_it).all()
    assert torch.equal(with_it - without, own)  # fewer than 2^53 units: the subtraction is exact
    assert float(own.norm()) <= clip
    assert torch.equal(with_it, _sum(network, inputs[order], labels[order], clip))


def test_the_bound_is_reached():
    network = _network((11, 6, 4))
    inputs, labels = _records(1, (11, 4))
    assert float(_sum(network, 100 * inputs, labels, 0.25).norm()) == pytest.approx(0.25, rel=1e-5)


def test_a_sum_of_many_equal_records_is_exactly_so_many_times_one():
    network = _network((11, 2))
    inputs, labels = _records(1, (11, 2))
    count = 2**16 + 1
    many = _sum(network, inputs.expand(count, -1), labels.expand(count), 0.1)
    assert torch.equal(many, count * _sum(network, inputs, labels, 0.1))


def test_a_record_that_overflows_counts_nothing():
    network = _network((11, 6, 5, 3), activation="relu", scale=1e80)
    inputs, labels = _records(6, (11, 3))
    plain = _sum(network, inputs[1:], labels[1:], 1.0)
    inputs[0] = 3e38
    assert torch.isfinite(_sum(network, inputs, labels, 1.0)).all()
    assert float((_sum(network, inputs, labels, 1.0) - plain).norm()) <= 1.0


def test_the_exponential_is_right_and_repeatable():
    points = torch.linspace(-745.0, 0.0, 100_003, dtype=torch.float64)
    reference = torch.exp(torch.clamp(points, min=-700.0))
    assert float(((_exponential(points) - reference) / reference).abs().max()) < 1e-15
    assert torch.equal(_exponential(points)[17:], _exponential(points[17:].clone()))
