"""What a private answer costs beside a plain one (the paper: "marginally more time").

Prints the time of 10,000 private answers to the MNIST network relative to its plain forward pass, both with the
seeded and the exact source, over alternating rounds; and the exact source's cost per query for 2, 10 and 100 classes.
Random weights and records of MNIST's shape: speed does not depend on their values.

    python benchmarks/algorithm1.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from quietmax.accounting import Budget
from quietmax.mechanisms import Algorithm1
from quietmax.models import Model, TrainingSettings
from quietmax.models.stacked import initial_mlp
from quietmax.noise import EXACT, SeededNoise
from quietmax.predictor import Predictor
from ratios import report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="One round.")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    model = Model(initial_mlp((784, 128, 10), "tanh", (0,)), TrainingSettings(), 10_000, "mnist", 0)
    queries = np.random.default_rng(0).random((10_000, 784), dtype=np.float32)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {rounds} alternating rounds")

    def answer(source, stored: int) -> Callable[[], object]:
        mechanism, budget = Algorithm1("gaussian"), Budget(1.0, queries=10**9)
        quiet = Predictor(model, mechanism, budget, noise=source, cache_size=stored)
        return lambda: quiet.predict_proba(queries)

    def unstored() -> object:
        quiet = Predictor(model, Algorithm1("gaussian"), Budget(1.0, queries=10**9), noise=SeededNoise(0))
        return quiet.predict_proba(queries)

    work = {
        "plain forward pass": lambda: model.predict_proba(queries),
        "private, seeded source": answer(SeededNoise(0), 0),
        "private, exact source": answer(EXACT, 0),
        "private, seeded, all new queries stored": unstored,
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds + 1):
        for name, run in work.items():
            seconds[name].append(timed(run))
    plain = seconds["plain forward pass"][1:]
    for name, values in seconds.items():
        if values[1:] != plain:
            report(
                "Algorithm 1",
                f"10,000 answers, {name}",
                values[1:],
                "s",
                peer="plain forward pass",
                theirs=plain,
            )
    for classes in (2, 10, 100):
        logits = np.random.default_rng(0).normal(size=(10_000, classes))
        for noise in ("gaussian", "laplace"):
            mechanism = Algorithm1(noise, 0.1, 0.1, 0.36, 1.0)
            times = [timed(lambda m=mechanism, z=logits: m.release(z, EXACT)) for _ in range(rounds)]
            report(
                "Algorithm 1",
                f"exact {noise} noise, {classes} classes",
                [time / 10_000 * 1e6 for time in times],
                "µs per answer",
            )


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
