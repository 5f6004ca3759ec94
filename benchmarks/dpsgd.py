"""A DP-SGD sweep of 44 networks at once against Opacus training them one after another, in its fastest mode.

The sweep of the paper on Location: 11 epsilons under 4 accountants, one hidden layer of 128 tanh units, Adam, batches
of 100 of 1,200 records, 100 epochs. Opacus gets its batches from memory, without a data loader, which is faster than
its own way. First every per-example gradient mode of Opacus is timed on two epochs; the fastest one then trains some of
the networks in full, in turn with the whole sweep, and its time is scaled to 44. Processor time is printed beside the
time on the clock, for busy machines. Synthetic records of Location's shape: speed does not depend on their values.

    python benchmarks/dpsgd.py [--rounds 5] [--models 2]
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

from quietmax.accounting.dpsgd import PUBLISHED_ACCOUNTANTS
from quietmax.estimators.dpsgd.training import PrivateSettings, make_plan, train_private_stack
from quietmax.experiments.paper import EPSILONS
from ratios import report

RECORDS, FEATURES, CLASSES, BATCH = 1200, 446, 30, 100
MODES = ("hooks", "functorch", "ew", "ghost")
AIM = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", type=int, default=2, help="networks that Opacus trains in full per round")
    parser.add_argument("--epochs", type=int, default=100)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    generator = np.random.default_rng(0)
    features = generator.integers(0, 2, (RECORDS, FEATURES)).astype(np.float32)
    labels = generator.integers(0, CLASSES, RECORDS)
    plans = [
        make_plan(RECORDS, epsilon=epsilon, accountant=accountant, analysis="published", preset="paper")
        for accountant in PUBLISHED_ACCOUNTANTS
        for epsilon in EPSILONS
    ]
    noise = [each.noise_multiplier for each in plans]
    steps = chosen.epochs * RECORDS // BATCH
    settings = replace(plans[0].settings, steps=steps)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {chosen.rounds} alternating rounds")

    modes = {}
    for mode in MODES:
        opacus(features, labels, settings, noise[0], mode, epochs=1)
        modes[mode] = timed(lambda mode=mode: opacus(features, labels, settings, noise[0], mode, epochs=2))[0]
        print(f"Opacus, {mode:9s} {1e3 * modes[mode] / (2 * RECORDS // BATCH):6.2f} ms per step")
    fastest = min(modes, key=modes.__getitem__)

    def sweep() -> None:
        train_private_stack(
            features,
            labels,
            CLASSES,
            [np.arange(RECORDS)] * len(noise),
            settings=settings,
            noise_multipliers=noise,
            seeds=[0] * len(noise),
        )

    ours, theirs = [], []
    for turn in range(chosen.rounds):
        ours.append(timed(sweep))
        several = [noise[(turn * chosen.models + place) % len(noise)] for place in range(chosen.models)]
        one_by_one = timed(
            lambda several=several: [
                opacus(features, labels, settings, each, fastest, epochs=chosen.epochs) for each in several
            ]
        )
        theirs.append(tuple(seconds / chosen.models * len(noise) for seconds in one_by_one))
        print(f"round {turn + 1}: {ours[-1][0]:.1f} s, Opacus {theirs[-1][0]:.1f} s", file=sys.stderr)
    print(
        f"Opacus ({fastest}, its fastest mode) scaled from {chosen.models} networks per round; aimed for {AIM:g}"
    )
    for kind, name in enumerate(("", ", processor time")):
        report(
            "dpsgd",
            f"{len(noise)} networks, {chosen.epochs} epochs{name}",
            [each[kind] for each in ours],
            "s",
            peer="Opacus",
            theirs=[each[kind] for each in theirs],
        )


def opacus(
    features: np.ndarray, labels: np.ndarray, settings: PrivateSettings, noise: float, mode: str, epochs: int
) -> None:
    """Train one network with Opacus on shuffled batches from memory."""
    inputs, targets = torch.from_numpy(features), torch.from_numpy(labels)
    module = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, settings.hidden[0]),
        torch.nn.Tanh(),
        torch.nn.Linear(settings.hidden[0], CLASSES),
    )
    optimizer = torch.optim.Adam(
        module.parameters(), lr=settings.learning_rate, weight_decay=2 * settings.l2, eps=1e-7
    )
    options = {"criterion": torch.nn.CrossEntropyLoss()} if mode == "ghost" else {}
    made = PrivacyEngine().make_private(
        module=module,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(inputs, targets), batch_size=BATCH),
        noise_multiplier=noise,
        max_grad_norm=settings.max_grad_norm,
        poisson_sampling=False,
        grad_sample_mode=mode,
        **options,
    )
    module, optimizer = made[0], made[1]
    criterion = made[2] if mode == "ghost" else torch.nn.CrossEntropyLoss()
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(RECORDS), BATCH):
            optimizer.zero_grad()
            criterion(module(inputs[batch]), targets[batch]).backward()
            optimizer.step()


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock, and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - processor


if __name__ == "__main__":
    main()
