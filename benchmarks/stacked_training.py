"""Stacked training against a plain PyTorch loop and against the machine's own batched matrix products.

Prints, per case, the time per model and epoch of both, their ratio over alternating rounds (median and
range), and the share of the rate that `torch.bmm` alone reaches on the same shapes. Synthetic records of the
data sets' shapes: speed does not depend on their values.

    python benchmarks/stacked_training.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from quietmax.models.stacked import Convexified, TrainingSettings, loss_value, train_stack
from ratios import report

CASES = (
    # name, networks at once, records, features, classes, ratio that must be reached, ratio aimed for
    ("location, 31 at once", 31, 1200, 446, 30, 3.0, 6.0),
    ("adult, 21 at once", 21, 10_000, 14, 2, 15.0, 30.0),
    ("mnist, 11 at once", 11, 10_000, 784, 10, None, None),
    ("location, one alone", 1, 1200, 446, 30, 1.0, None),
    ("adult, one alone", 1, 10_000, 14, 2, 1.0, None),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="One round of the smallest cases.")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {rounds} alternating rounds")
    for name, networks, records, features, classes, required, aimed in CASES[3:] if options.quick else CASES:
        generator = np.random.default_rng(0)
        inputs = generator.random((2 * records, features), dtype=np.float32)
        labels = generator.integers(0, classes, 2 * records)
        rows = [generator.permutation(2 * records)[:records] for _ in range(networks)]
        epochs = max(1, 12_000 // records)
        settings = TrainingSettings(epochs=epochs, loss=Convexified(1.0))

        def stacked(inputs=inputs, labels=labels, classes=classes, rows=rows, settings=settings) -> None:
            train_stack(inputs, labels, classes, rows, settings=settings, seeds=range(len(rows)))

        def plain(inputs=inputs, labels=labels, classes=classes, rows=rows, settings=settings) -> None:
            plain_loop(inputs, labels, classes, rows[0], settings)

        products = product_seconds(networks, features, settings.hidden[0], classes, settings.batch_size)
        steps = epochs * (records // settings.batch_size)
        seconds: dict[str, list[float]] = {"stacked": [], "plain": [], "products": []}
        for _ in range(rounds + 1):
            seconds["stacked"].append(timed(stacked) / networks)
            seconds["plain"].append(timed(plain))
            seconds["products"].append(products(steps) / networks)
        warm = {what: values[1:] for what, values in seconds.items()}
        report(
            "stacked training",
            name,
            [second / epochs for second in warm["stacked"]],
            "s per epoch and network",
            peer="plain PyTorch loop",
            theirs=[second / epochs for second in warm["plain"]],
        )
        shares = [one / other for one, other in zip(warm["products"], warm["stacked"], strict=True)]
        goal = (
            ""
            if required is None
            else f", required {required:g}" + (f", aimed for {aimed:g}" if aimed else "")
        )
        print(
            f"{name}: {100 * statistics.median(shares):.0f}% of the rate of the matrix products alone{goal}"
        )


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def plain_loop(
    inputs: np.ndarray, labels: np.ndarray, classes: int, rows: np.ndarray, settings: TrainingSettings
) -> None:
    """What one would write with autograd and the fused optimizer: same batches, loss and penalty."""
    features, targets = torch.from_numpy(inputs[rows]), torch.from_numpy(labels[rows])
    network = torch.nn.Sequential(
        torch.nn.Linear(features.shape[1], settings.hidden[0]),
        torch.nn.Tanh(),
        torch.nn.Linear(settings.hidden[0], classes),
    )
    kernels = [network[0].weight, network[2].weight]
    biases = [network[0].bias, network[2].bias]
    groups = [{"params": kernels, "weight_decay": 2 * settings.l2}, {"params": biases}]
    optimizer = torch.optim.Adam(groups, lr=settings.learning_rate, eps=1e-7, fused=True)
    for _ in range(settings.epochs):
        for batch in torch.randperm(len(features)).split(settings.batch_size):
            optimizer.zero_grad()
            loss_value(settings.loss, network(features[batch]), targets[batch]).backward()
            optimizer.step()


def product_seconds(
    networks: int, features: int, hidden: int, classes: int, batch: int
) -> Callable[[int], float]:
    """Time only the five matrix products of a step, on the shapes and layouts the trainer uses."""
    inputs, signal = torch.rand(networks, batch, features), torch.rand(networks, batch, hidden)
    kernel, output = torch.rand(networks, features, hidden), torch.rand(networks, classes, hidden)
    slope, hidden_slope = torch.rand(networks, batch, classes), torch.empty(networks, batch, hidden)
    logits, kernel_gradient = torch.empty(networks, batch, classes), torch.empty_like(kernel)
    output_gradient = torch.empty_like(output)

    def run(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            torch.bmm(inputs, kernel, out=signal)
            torch.bmm(signal, output.transpose(1, 2), out=logits)
            torch.bmm(slope.transpose(1, 2), signal, out=output_gradient)
            torch.bmm(slope, output, out=hidden_slope)
            torch.bmm(inputs.transpose(1, 2), hidden_slope, out=kernel_gradient)
        return time.perf_counter() - start

    return run


if __name__ == "__main__":
    main()
