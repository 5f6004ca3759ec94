"""The closed-form clipped sums are what a loop over the records, and Opacus, would compute."""

from __future__ import annotations

import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quietmax.estimators.dpsgd import gradients
from quietmax.estimators.dpsgd.gradients import (
    ROWS_AT_ONCE,
    ClippedSums,
    Gradients,
    exact_clipped_sum,
)
from quietmax.estimators.head.exact_sums import ExactSum
from quietmax.models.stacked import initial_mlp
from tests.estimators.dpsgd.networks import ACTIVATIONS, as_module, naive_sums

SHAPES = {"linear": (11, 3), "one hidden layer": (11, 6, 4), "two hidden layers": (11, 6, 5, 3)}


def _stack(widths, networks=1, seed=0, activation="tanh", dtype=torch.float32):
    """A stack with biases that are not zero, so that every part of a gradient is."""
    stack = initial_mlp(widths, activation, tuple(range(seed, seed + networks)), dtype)
    generator = torch.Generator().manual_seed(seed)
    for bias in stack.biases:
        bias.copy_(torch.randn(bias.shape, generator=generator).to(dtype) / 3)
    return stack


def _records(count, features, classes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    inputs = 3 * torch.randn(count, features, generator=generator).to(dtype)
    return inputs, torch.randint(0, classes, (count,), generator=generator)


def _sums(stack, inputs, labels, max_grad_norm, batch=None, factors=None, weights=None):
    """The engine's answer for batches of row indices, by default all records."""

    def read(rows):
        return inputs[rows], labels[rows], None if weights is None else weights[rows]

    sums = ClippedSums(stack, read, len(inputs), max_grad_norm, factors)
    gradients = Gradients.zeros(stack)
    sums.add_to(gradients, torch.arange(len(inputs)).unsqueeze(0) if batch is None else batch)
    return gradients


def _as_module(gradients, index):
    """The engine's sums in the order and layout of a module's parameters."""
    last = len(gradients.kernels) - 1
    for depth, (kernel, bias) in enumerate(zip(gradients.kernels, gradients.biases, strict=True)):
        yield kernel[index] if depth == last else kernel[index].T
        yield bias[index, 0]


def _weights(count: int, by_person: bool) -> torch.Tensor | None:
    """1/k for the k rows of a person: of one row, of five, and of all others."""
    people = np.minimum((np.arange(count) + 4) // 5, 2)
    return torch.from_numpy(1 / np.bincount(people)[people]) if by_person else None


BY_PERSON = pytest.mark.parametrize("by_person", [False, True], ids=["records", "persons"])


@BY_PERSON
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("widths", SHAPES.values(), ids=SHAPES)
def test_the_clipped_sums_equal_a_loop_over_the_records(
    widths: tuple[int, ...], activation: str, by_person: bool
) -> None:
    stack = _stack(widths, networks=3, activation=activation)
    inputs, labels = _records(40, widths[0], widths[-1])
    weights = _weights(40, by_person)
    for index, max_grad_norm in enumerate([0.05, 1.0, 1e6]):
        gradients = _sums(stack, inputs, labels, max_grad_norm, weights=weights)
        wanted = naive_sums(as_module(stack, index), inputs, labels, max_grad_norm, weights)
        for ours, theirs in zip(_as_module(gradients, index), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * min(max_grad_norm, 1.0))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("widths", SHAPES.values(), ids=SHAPES)
def test_the_clipped_sums_equal_those_of_opacus(widths: tuple[int, ...], mode: str) -> None:
    opacus = pytest.importorskip("opacus")
    stack = _stack(widths)
    inputs, labels = _records(64, widths[0], widths[-1], seed=3)
    max_grad_norm = 0.7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=64)
        module = as_module(stack)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        criterion = torch.nn.CrossEntropyLoss(reduction="sum")
        private = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=module,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=data,
            noise_multiplier=0.0,
            max_grad_norm=max_grad_norm,
            poisson_sampling=False,
            loss_reduction="sum",
            grad_sample_mode=mode,
        )
        module, optimizer = private[0], private[1]
        loss = private[2] if mode == "ghost" else criterion
        before = [parameter.detach().clone() for parameter in module.parameters()]
        loss(module(inputs), labels).backward()
        optimizer.step()
    moved = [old - new.detach() for old, new in zip(before, module.parameters(), strict=True)]
    for ours, theirs in zip(_as_module(_sums(stack, inputs, labels, max_grad_norm), 0), moved, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_record_whose_gradient_overflows_counts_nothing_and_spoils_nothing() -> None:
    stack = _stack((4, 3, 2), activation="relu")
    inputs, labels = _records(8, 4, 2)
    plain = [each.clone() for each in _sums(stack, inputs[1:], labels[1:], 1.0).tensors()]
    inputs[0] = 3e38
    for ours, wanted in zip(_sums(stack, inputs, labels, 1.0).tensors(), plain, strict=True):
        torch.testing.assert_close(ours, wanted)


def test_padding_counts_nothing_and_weights_multiply() -> None:
    stack = _stack((4, 3), networks=2)
    inputs, labels = _records(6, 4, 3)
    plain = _sums(stack, inputs, labels, 1.0)
    half = [0.5, 2.0]
    batch = torch.tensor([[0, 6, 1, 2, 6], [3, 4, 5, 6, 6]])
    gradients = _sums(stack, inputs, labels, 1.0, batch, half)
    parts = [_sums(stack, inputs, labels, 1.0, torch.tensor([rows])) for rows in ([0, 1, 2], [3, 4, 5])]
    for index, weight in enumerate(half):
        for ours, wanted in zip(gradients.tensors(), parts[index].tensors(), strict=True):
            torch.testing.assert_close(ours[index], weight * wanted[index])
    for whole, one, two in zip(plain.tensors(), parts[0].tensors(), parts[1].tensors(), strict=True):
        torch.testing.assert_close(whole, one + two)
    assert np.isfinite(float(plain.kernels[0].sum()))


def _network(widths, seed=0, activation="tanh", scale=1.0):
    network = _stack(widths, 1, seed, activation, torch.float64)
    for kernel in network.kernels:
        kernel.mul_(scale)
    return network


def _batch(count, widths, seed=0):
    return _records(count, widths[0], widths[-1], seed)


def _vector(gradients):
    return torch.cat([tensor.flatten() for tensor in gradients.tensors()])


def _sum(network, inputs, labels, max_grad_norm):
    return _vector(exact_clipped_sum(network, inputs, labels, max_grad_norm))


@BY_PERSON
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("widths", SHAPES.values(), ids=SHAPES)
def test_the_exact_sums_are_the_ordinary_ones_up_to_their_grid(
    widths: tuple[int, ...], activation: str, by_person: bool
) -> None:
    network = _network(widths, activation=activation)
    inputs, labels = _batch(ROWS_AT_ONCE + 30, widths)
    weights = _weights(len(inputs), by_person)
    for max_grad_norm in (0.03, 1.0, 50.0):
        ordinary = _sums(network, inputs.double(), labels, max_grad_norm, weights=weights)
        exact = _vector(exact_clipped_sum(network, inputs, labels, max_grad_norm, weights))
        assert float((exact - _vector(ordinary)).norm()) <= 2e-5 * max_grad_norm * len(inputs)
        assert float(exact.norm()) > 1e-3 * max_grad_norm


@given(
    seed=st.integers(0, 10**6),
    max_grad_norm=st.floats(1e-6, 1e6),
    stretch=st.sampled_from([1e-30, 1e-3, 1.0, 1e6, 1e30]),
    weights=st.sampled_from([0.0, 1e-6, 1.0, 1e5]),
    shape=st.sampled_from(list(SHAPES)),
    activation=st.sampled_from(list(ACTIVATIONS)),
)
@settings(max_examples=150)
def test_removing_a_record_subtracts_exactly_its_own_contribution_which_the_clip_norm_bounds(
    seed: int, max_grad_norm: float, stretch: float, weights: float, shape: Any, activation: str
) -> None:
    """Whatever the order and number of the others, also with huge or tiny features and weights."""
    widths = SHAPES[shape]
    network = _network(widths, seed % 89, activation, weights)
    count = 1 + seed % (2 * ROWS_AT_ONCE)
    inputs, labels = _batch(count, widths, seed)
    inputs[:: 1 + seed % 7] *= stretch
    victim = seed % count
    order = torch.from_numpy(np.random.default_rng(seed).permutation(count))
    kept = order[order != victim]
    with_it = _sum(network, inputs, labels, max_grad_norm)
    without = _sum(network, inputs[kept], labels[kept], max_grad_norm)
    own = _sum(network, inputs[[victim]], labels[[victim]], max_grad_norm)
    assert torch.isfinite(with_it).all()
    assert torch.equal(with_it - without, own)  # fewer than 2^53 units: the subtraction is exact
    assert float(own.norm()) <= max_grad_norm
    assert torch.equal(with_it, _sum(network, inputs[order], labels[order], max_grad_norm))


def _exact_square(vector: torch.Tensor) -> Fraction:
    """The squared length without rounding: every entry is a float, and a float is a fraction."""
    return sum((Fraction(entry) ** 2 for entry in vector.tolist()), Fraction(0))


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 60) | st.just(700),
    max_grad_norm=st.floats(1e-6, 1e6),
    stretch=st.sampled_from([1e-30, 1.0, 1e6, 1e30]),
    alike=st.booleans(),
    shape=st.sampled_from(list(SHAPES)),
    activation=st.sampled_from(list(ACTIVATIONS)),
)
@settings(max_examples=100, deadline=None)
def test_a_person_contributes_at_most_the_clip_norm_exactly_and_independently_of_everybody_else(
    seed: int, rows: int, max_grad_norm: float, stretch: float, alike: bool, shape: Any, activation: str
) -> None:
    """k rows of weight 1/k, also equal rows, whose clipped gradients add up without cancelling."""
    widths = SHAPES[shape]
    network = _network(widths, seed % 89, activation)
    inputs, labels = _batch(rows + 40, widths, seed)
    inputs[:rows] *= stretch
    if alike:
        inputs[:rows], labels[:rows] = inputs[0].clone(), labels[0].clone()
    weights = torch.ones(rows + 40, dtype=torch.float64)
    weights[:rows] = 1 / rows
    weights[rows : rows + 3] = 1 / 3

    def total(chosen: torch.Tensor) -> torch.Tensor:
        return _vector(
            exact_clipped_sum(network, inputs[chosen], labels[chosen], max_grad_norm, weights[chosen])
        )

    order = torch.from_numpy(np.random.default_rng(seed).permutation(rows + 40))
    own = total(torch.arange(rows))
    assert _exact_square(own) <= Fraction(max_grad_norm) ** 2
    assert torch.equal(total(order) - total(order[order >= rows]), own)


def test_a_sum_of_many_equal_records_is_exactly_so_many_times_one() -> None:
    network = _network((11, 2))
    inputs, labels = _batch(1, (11, 2))
    count = 2**16 + 1
    many = _sum(network, inputs.expand(count, -1), labels.expand(count), 0.1)
    assert torch.equal(many, count * _sum(network, inputs, labels, 0.1))


def test_sums_over_any_number_of_rows_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers of 63 bits are moved into pairs before they overflow; that changes no bit."""
    network = _network((11, 6, 2))
    inputs, labels = _batch(3 * ROWS_AT_ONCE, (11, 2))
    whole = _sum(network, inputs, labels, 0.1)
    monkeypatch.setattr(gradients, "_INTEGER_ROWS", ROWS_AT_ONCE)
    assert torch.equal(_sum(network, inputs, labels, 0.1), whole)


def test_the_largest_sums_of_the_largest_table_do_not_overflow() -> None:
    sums = gradients._ExactSums(_network((11, 2)), 1.0)
    most = 2 * gradients._INTEGER_ROWS * 2**42
    carried = gradients.LARGEST_TABLE // gradients._INTEGER_ROWS
    assert most < 2**63
    total = ExactSum.of(np.array([most, -most, most - 1]))
    for _ in range(carried.bit_length() - 1):
        total = total + total
    exact = [carried * most, -carried * most, carried * (most - 1)]
    assert gradients._nearest(total, 200).tolist() == [float(each) for each in exact]
    assert gradients._nearest(total, 62).tolist() == [2.0**62, -(2.0**62), 2.0**62]
    # What a step does with them.
    sums._kernel_sums[0].fill_(most - 1)
    sums._carry()
    sums._kernel_sums[0].fill_(most - 1)
    unit = sums._unit * 2.0**-sums._bits
    assert (sums._gradients(2**21).kernels[0] == float(2 * (most - 1)) * unit).all()


@settings(max_examples=300)
@given(st.integers(-(2**70), 2**70), st.integers(-(2**42), 2**42), st.integers(0, 6))
def test_rounding_and_clamping_add_no_more_than_stated_to_a_difference(
    total: int, contribution: int, more: int
) -> None:
    """A sum and its neighbour, rounded: in units of 2^-42 of a clipping norm from 0.5 to 1, of which one has 2^42."""
    size, limit = gradients._INTEGER_ROWS * 2**more, 62 + more
    assert gradients._more_bits(size) == more
    assert gradients._more_bits(size + 1) == more + 1

    def rounded(value: int) -> Fraction:
        pair = ExactSum(np.array([value >> 32]), np.array([value & (2**32 - 1)]))
        found = float(gradients._nearest(pair, limit)[0])
        assert found == max(min(float(value), 2.0**limit), -(2.0**limit))
        return Fraction(found)

    change = abs(rounded(total + contribution) - rounded(total))
    norm = Fraction(2) ** 41
    assert change <= abs(contribution) + Fraction(gradients.rounding_share(1, size)) * norm
    assert change <= abs(contribution) + Fraction(2) ** (more - 32) * norm


def test_a_record_that_overflows_counts_nothing() -> None:
    network = _network((11, 6, 5, 3), activation="relu", scale=1e80)
    inputs, labels = _batch(6, (11, 3))
    plain = _sum(network, inputs[1:], labels[1:], 1.0)
    inputs[0] = 3e38
    assert torch.isfinite(_sum(network, inputs, labels, 1.0)).all()
    assert float((_sum(network, inputs, labels, 1.0) - plain).norm()) <= 1.0
