from __future__ import annotations

import math
import resource
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.models.stacked import (
    AveragedOver,
    Convexified,
    CrossEntropy,
    Loss,
    Quadratic,
    TrainingSettings,
    _logit_gradient,
    initial_mlp,
    loss_value,
    train_stack,
)

# --- losses ----------------------------------------------------------------------------------------------------------


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
    torch.testing.assert_close(_logit_gradient(loss, logits, labels), _by_autograd(loss, logits, labels))


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_left_out_record_counts_as_if_it_were_not_in_the_batch(loss: Loss) -> None:
    logits, labels = _batch()
    kept = torch.ones(logits.shape[:2], dtype=logits.dtype)
    kept[:, 2] = 0
    logits[:, 2] *= 50  # however badly it fits
    others = [0, 1, 3, 4, 5, 6]
    found = _logit_gradient(loss, logits, labels, kept=kept)
    assert (found[:, 2] == 0).all()
    torch.testing.assert_close(found[:, others], _logit_gradient(loss, logits[:, others], labels[:, others]))


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
    assert torch.isfinite(_logit_gradient(loss, logits.float(), labels)).all()
    assert torch.isfinite(loss_value(loss, logits[0].float(), labels[0]))


def test_small_alpha_gives_the_ordinary_mean_loss() -> None:
    logits, labels = _batch()
    found = _logit_gradient(Convexified(1e-9, "samples"), logits, labels)
    torch.testing.assert_close(found, _logit_gradient(CrossEntropy(), logits, labels))


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


# --- training --------------------------------------------------------------------------------------------------------


FEATURES, CLASSES = 12, 3
Blobs = tuple[np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def records() -> Blobs:
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(CLASSES, FEATURES))
    labels = generator.integers(0, CLASSES, 400)
    return (centres[labels] + generator.normal(size=(400, FEATURES))).astype(np.float32), labels


def _rows(networks: int, sizes: list[int]) -> list[np.ndarray]:
    return [np.random.default_rng(k).permutation(400)[: sizes[k % len(sizes)]] for k in range(networks)]


def _naive(
    features: np.ndarray, labels: np.ndarray, rows: np.ndarray, settings: TrainingSettings, seed: int
) -> list[torch.Tensor]:
    """One network, record by record in torch's own words: autograd and torch.optim.Adam, the same order."""
    start = initial_mlp((FEATURES, *settings.hidden, CLASSES), settings.activation, (seed,))
    activation = {"tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu}[settings.activation]
    kernels = [kernel[0].clone().requires_grad_() for kernel in start.kernels]
    biases = [bias[0].clone().requires_grad_() for bias in start.biases]
    groups: list[dict[str, Any]] = [{"params": kernels, "weight_decay": 2 * settings.l2}, {"params": biases}]
    optimizer = torch.optim.Adam(groups, lr=settings.learning_rate, eps=1e-7)
    generator = np.random.default_rng((0x0DE5, seed))
    width = min(settings.batch_size, len(rows))
    for _ in range(settings.epochs):
        order = generator.permutation(rows)
        for at in range(0, len(order), width):
            batch = order[at : at + width]
            signal = torch.from_numpy(features[batch])
            for kernel, bias in zip(kernels[:-1], biases[:-1], strict=True):
                signal = activation(signal @ kernel + bias)
            logits = signal @ kernels[-1].T + biases[-1]
            optimizer.zero_grad()
            loss_value(settings.loss, logits, torch.from_numpy(labels[batch])).backward()
            optimizer.step()
    return [tensor.detach() for pair in zip(kernels, biases, strict=True) for tensor in pair]


@pytest.mark.parametrize("loss", [Convexified(2.0), CrossEntropy(), Quadratic()], ids=str)
@pytest.mark.parametrize(
    ("hidden", "activation"), [((8,), "tanh"), ((9, 6), "sigmoid"), ((7, 5, 6), "relu"), ((), "tanh")]
)
def test_the_stacked_trainer_equals_a_plain_autograd_loop(
    records: Blobs, loss: Loss, hidden: tuple[int, ...], activation: str
) -> None:
    settings = TrainingSettings(hidden, activation, loss, learning_rate=0.01, batch_size=32, epochs=4)
    (rows,) = _rows(1, [150])
    stack = train_stack(*records, CLASSES, [rows], settings=settings, seeds=[7])
    expected = _naive(*records, rows, settings, 7)
    for (_, found), reference in zip(stack.parameters(), expected, strict=True):
        torch.testing.assert_close(found[0], reference, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sizes", [[200], [200, 130, 57, 300]], ids=["equal sizes", "different sizes"])
def test_k_networks_at_once_equal_k_single_runs(records: Blobs, sizes: list[int]) -> None:
    settings = TrainingSettings((16,), batch_size=50, epochs=20)
    rows, seeds = _rows(6, sizes), [3, 1, 4, 1, 5, 9]
    together = train_stack(*records, CLASSES, rows, settings=settings, seeds=seeds)
    for k in range(6):
        alone = train_stack(*records, CLASSES, [rows[k]], settings=settings, seeds=[seeds[k]])
        for (_, one), (_, other) in zip(together.network(k).parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_leaving_out_records_equals_training_without_their_influence(records: Blobs) -> None:
    """The order of the others and the initial weights stay; only the gradients of these records are gone."""
    features, labels = (each.copy() for each in records)
    settings = TrainingSettings((8,), batch_size=20, epochs=3, loss=CrossEntropy(), learning_rate=0.01)
    (rows,) = _rows(1, [60])
    several, one = rows[[3, 17, 40]], rows[[5]]

    def train(networks: int, left_out: Any) -> torch.Tensor:
        stack = train_stack(
            features,
            labels,
            CLASSES,
            [rows] * networks,
            settings=settings,
            seeds=[2] * networks,
            left_out=left_out,
        )
        return stack.weight_vectors()

    found = train(3, [several, [], one])
    torch.testing.assert_close(found[1], train(1, None)[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(found[2], train(1, [one])[0], atol=1e-6, rtol=0)
    assert float((found[[0, 2]] - found[1]).norm(dim=1).min()) > 1e-3
    # What the left-out records say no longer matters at all.
    features[several], labels[several] = 7.0, (labels[several] + 1) % CLASSES
    torch.testing.assert_close(train(1, [several])[0], found[0], atol=1e-6, rtol=0)


def test_leaving_out_the_only_record_of_a_batch_is_harmless(records: Blobs) -> None:
    settings = TrainingSettings((4,), batch_size=20, epochs=2)
    (rows,) = _rows(1, [21])
    stacks = [
        train_stack(*records, CLASSES, [rows], settings=settings, seeds=[0], left_out=[[int(row)]])
        for row in rows
    ]
    assert all(torch.isfinite(stack.weight_vectors()).all() for stack in stacks)


def test_progress_counts_up_to_the_last_step(records: Blobs) -> None:
    seen: list[tuple[int, int]] = []
    settings = TrainingSettings((4,), batch_size=10, epochs=9)
    train_stack(
        *records,
        CLASSES,
        _rows(2, [100, 50]),
        settings=settings,
        seeds=[0, 1],
        progress=lambda done, steps: seen.append((done, steps)),
    )
    assert seen[-1] == (90, 90)
    assert [step for step, _ in seen] == sorted({step for step, _ in seen})


def test_records_are_shared_not_copied() -> None:
    """A copy of these 20 MB of records for each of 60 networks would take 1.2 GB."""
    features = np.zeros((20_000, 256), np.float32)
    labels = np.arange(20_000) % CLASSES
    rows = [np.arange(20_000)] * 60
    settings = TrainingSettings((2,), epochs=1, batch_size=500)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    train_stack(features, labels, CLASSES, rows, settings=settings, seeds=range(60))
    grown_kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kilobytes < 300_000


def test_bad_input_is_an_error_of_one_line(records: Blobs) -> None:
    features, labels = records
    settings = TrainingSettings(epochs=1)

    def attempt(
        match: str,
        features: np.ndarray = features,
        labels: np.ndarray = labels,
        rows: list[np.ndarray] | None = None,
        kind: type[QuietmaxError] = InvalidInput,
        **more: Any,
    ) -> None:
        with pytest.raises(kind, match=match) as caught:
            train_stack(
                features,
                labels,
                CLASSES,
                [np.arange(10)] if rows is None else rows,
                **{"settings": settings, "seeds": [0], **more},
            )
        assert "\n" not in str(caught.value)

    attempt(r"shapes \(n, m\) and \(n,\)", labels=labels[:-1])
    attempt("seeds must have one entry", seeds=[0, 1])
    attempt("at least one training record", rows=[np.arange(0)])
    attempt("at least one network", rows=[], seeds=[])
    attempt("Row numbers must be from 0 to 399", rows=[np.array([400])])
    attempt("Labels must be integers from 0 to 2", labels=labels + 1)
    attempt("NaN", features=np.full_like(features, np.nan))
    attempt(
        "diverged",
        features=features * 1e30,
        kind=QuietmaxError,
        settings=TrainingSettings(activation="relu", learning_rate=1e30, epochs=20),
    )


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("alpha", value) for value in (0, -1, math.nan, math.inf)),
        ("averaged_over", "classes"),
        ("hidden", (0,)),
        *(("learning_rate", value) for value in (0, math.nan)),
        ("batch_size", 0),
        ("epochs", -1),
        ("l2", -1),
        ("activation", "step"),
    ],
)
def test_settings_are_checked_when_made(name: str, wrong: Any) -> None:
    kind: Any = Convexified if name in ("alpha", "averaged_over") else TrainingSettings
    with pytest.raises(InvalidInput, match=name):
        kind(**{name: wrong})
