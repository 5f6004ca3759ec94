from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quietmax.errors import InvalidInput
from quietmax.models.stacked import (
    AveragedOver,
    Convexified,
    CrossEntropy,
    Loss,
    Quadratic,
    logit_gradient,
    loss_value,
)

LOSSES = [
    CrossEntropy(),
    Quadratic(),
    *(
        Convexified(alpha, averaged_over, base)
        for alpha in (0.5, 1.0, 5.0)
        for averaged_over in ("samples", "samples and classes")
        for base in (CrossEntropy(), Quadratic())
    ),
]


def _batch(
    networks: int = 3, records: int = 7, classes: int = 4, scale: float = 3.0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = scale * torch.randn(networks, records, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, classes, (networks, records), generator=generator)


def _by_autograd(loss: Loss, logits: Tensor, labels: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    torch.stack([loss_value(loss, leaf[k], labels[k]) for k in range(len(leaf))]).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_the_hand_derived_gradient_equals_automatic_differentiation(loss: Loss) -> None:
    logits, labels = _batch()
    torch.testing.assert_close(logit_gradient(loss, logits, labels), _by_autograd(loss, logits, labels))


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_left_out_record_counts_as_if_it_were_not_in_the_batch(loss: Loss) -> None:
    logits, labels = _batch()
    kept = torch.ones(logits.shape[:2], dtype=logits.dtype)
    kept[:, 2] = 0
    logits[:, 2] *= 50  # however badly it fits
    others = [0, 1, 3, 4, 5, 6]
    found = logit_gradient(loss, logits, labels, kept=kept)
    assert (found[:, 2] == 0).all()
    torch.testing.assert_close(found[:, others], logit_gradient(loss, logits[:, others], labels[:, others]))


def test_the_two_averages_are_the_papers_formula_and_the_authors_program() -> None:
    logits, labels = _batch(networks=1)
    losses = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="none")
    n, classes = logits.shape[1:]
    alpha = 2.0
    printed = math.log(float(torch.exp(alpha * losses).sum()) / n) / alpha
    program = math.log(float((torch.exp(alpha * losses) + classes - 1).sum()) / (n * classes)) / alpha
    assert float(loss_value(Convexified(alpha, "samples"), logits[0], labels[0])) == pytest.approx(printed)
    assert float(loss_value(Convexified(alpha), logits[0], labels[0])) == pytest.approx(program)


@given(
    alpha=st.floats(0.01, 50),
    scale=st.floats(0, 1e4),
    averaged_over=st.sampled_from(["samples", "samples and classes"]),
)
def test_nothing_overflows_however_large_alpha_times_loss_is(
    alpha: float, scale: float, averaged_over: AveragedOver
) -> None:
    logits, labels = _batch(scale=scale)
    loss = Convexified(alpha, averaged_over)
    assert torch.isfinite(logit_gradient(loss, logits.float(), labels)).all()
    assert torch.isfinite(loss_value(loss, logits[0].float(), labels[0]))


def test_small_alpha_gives_the_ordinary_mean_loss() -> None:
    logits, labels = _batch()
    found = logit_gradient(Convexified(1e-9, "samples"), logits, labels)
    torch.testing.assert_close(found, logit_gradient(CrossEntropy(), logits, labels))


@pytest.mark.parametrize("alpha", [0, -1, math.nan, math.inf])
def test_alpha_must_be_a_positive_number(alpha: float) -> None:
    with pytest.raises(InvalidInput, match="alpha"):
        Convexified(alpha)


def test_an_unknown_average_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="averaged_over"):
        Convexified(1.0, "classes")  # type: ignore[arg-type]


def test_the_convexified_loss_of_a_hidden_layer_network_is_not_convex() -> None:
    """THEORY 2.3d: negating a tanh unit's weights changes nothing, so a convex loss could not beat the midpoint."""
    generator = np.random.default_rng(1)
    inputs = torch.tensor(generator.normal(size=(40, 2)))
    labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
    first = torch.tensor(generator.normal(size=(2, 16)), requires_grad=True)
    last = torch.tensor(generator.normal(size=(16, 2)), requires_grad=True)
    optimizer = torch.optim.Adam([first, last], lr=0.05)
    for alpha in (1.0, 5.0, 10.0):
        loss = Convexified(alpha)
        for _ in range(300):
            optimizer.zero_grad()
            loss_value(loss, torch.tanh(inputs @ first) @ last, labels).backward()
            optimizer.step()
        with torch.no_grad():
            trained = float(loss_value(loss, torch.tanh(inputs @ first) @ last, labels))
            mirrored = float(loss_value(loss, torch.tanh(inputs @ -first) @ -last, labels))
            midpoint = float(loss_value(loss, torch.tanh(inputs @ (0 * first)) @ (0 * last), labels))
        assert trained == pytest.approx(mirrored)
        assert midpoint > trained + 0.01
