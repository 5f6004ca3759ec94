"""1,000 teachers and 200 shadow networks on a Ray cluster on this machine, with 1 worker and with 2, in turns.

    python benchmarks/ray_scaling.py [--rounds 3] [--quick]

A worker is a process with one core and one thread. Measured is the whole call, from the start of the workers to the
networks; the cluster runs already. The networks must be the same, bit for bit. Two workers must be at least 1.7 times
as fast as one (not checked with `--quick`), which needs two idle cores.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np
import ray

from quietmax import RayEngine, Teachers, TrainingSettings
from quietmax.attacks.shadow_models import ShadowPool
from quietmax.data.records import Records, Split
from quietmax.models.stacked import CrossEntropy
from ratios import report

WANTED = 1.7
COLUMNS, CLASSES = 50, 10

Weights = np.ndarray


def numbers(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return made-up records and labels."""
    rng = np.random.default_rng(0)
    labels = rng.integers(CLASSES, size=rows)
    features = rng.normal(size=(rows, COLUMNS)) + np.eye(CLASSES, COLUMNS)[labels]
    return features.astype(np.float32), labels


def teachers(count: int, shard: int) -> Callable[[RayEngine], Weights]:
    features, labels = numbers(count * shard)

    def fit(engine: RayEngine) -> Weights:
        estimator = Teachers(
            1.0, queries=1, teachers=count, classes=range(CLASSES), declared_size=len(labels), random_state=0
        )
        fitted = estimator.set_params(engine=engine).fit(features, labels)
        return fitted.ensemble_.teachers.weight_vectors().numpy()

    return fit


def shadow_networks(count: int, records: int, epochs: int) -> Callable[[RayEngine], Weights]:
    features, labels = numbers(3 * records)
    parts = np.split(np.arange(3 * records), 3)
    data = Split(Records("numbers", features, labels, CLASSES), *parts, seed=0)
    settings = TrainingSettings(hidden=(64,), loss=CrossEntropy(), epochs=epochs)

    def train(engine: RayEngine) -> Weights:
        pool = ShadowPool.train("disjoint", data, settings, count, engine=engine)
        return np.concatenate([stack.weight_vectors().numpy() for stack in pool.stacks])

    return train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        cases = {"50 teachers": teachers(50, 40), "50 shadow networks": shadow_networks(50, 50, 1)}
    else:
        cases = {
            "1,000 teachers": teachers(1000, 1000),
            "200 shadow networks": shadow_networks(200, 2000, 150),
        }
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    slow = []
    for case, work in cases.items():
        seconds: dict[int, list[float]] = {1: [], 2: []}
        found: list[Weights] = []
        for _ in range(1 if options.quick else options.rounds):
            for workers in (1, 2):
                start = time.perf_counter()
                found.append(work(RayEngine(workers=workers)))
                seconds[workers].append(time.perf_counter() - start)
        assert all(np.array_equal(found[0], other) for other in found[1:]), "the networks differ"
        row = report("ray_scaling", f"{case}, 2 workers", seconds[2], "s", peer="1 worker", theirs=seconds[1])
        if row.ratio is None or row.ratio < WANTED:
            slow.append(case)
    ray.shutdown()
    if slow and not options.quick:
        sys.exit(f"Less than {WANTED} times as fast with 2 workers: {', '.join(slow)}")


if __name__ == "__main__":
    main()
