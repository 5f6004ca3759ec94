"""How the cost grows: training with n and K, an answer with C, a ledger with its queries and replicas; as a figure.

    python benchmarks/growth.py [--quick] [--figure docs/figures/growth.png]

Each curve gives the median of alternating rounds; the slope on double logarithmic axes is printed (1: proportional).
The last row of a curve compares its ends: the time per record (network, class, query) at the largest size beside that
at the smallest. A ratio of 1 is proportional growth, above 1 is slower growth.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from quietmax.accounting import PureCost
from quietmax.estimators import PrivateHead
from quietmax.ledger import Charge, Ledger, Terms
from quietmax.ledger.transactions import Charged
from quietmax.mechanisms import Algorithm1
from quietmax.models.stacked import TrainingSettings, train_stack
from quietmax.noise import EXACT
from ratios import report

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "growth.png"


@dataclass(frozen=True)
class Curve:
    """What is measured, over what, at which sizes, and the work to be timed at a size; `one` of what it grows with.

    Without `one`, the work is the same at all sizes, and the times themselves are compared.
    """

    name: str
    over: str
    one: str | None
    sizes: tuple[int, ...]
    work: Callable[[int], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="One round, the two smallest sizes, no figure.")
    parser.add_argument("--figure", type=Path, default=FIGURE)
    options = parser.parse_args()
    curves = (
        Curve("private head, fit", "records", "record", (1000, 2000, 4000, 8000, 16000), head),
        Curve("networks trained at once", "networks", "network", (1, 2, 4, 8, 16, 32), networks),
        Curve("1,000 private answers", "classes", "class", (2, 10, 100, 1000), answers),
        Curve("charges in one ledger", "queries", "query", (100, 400, 1600, 6400), charges),
        Curve("800 charges shared by replicas", "replicas", None, (1, 2, 4, 8), replicas),
    )
    figure, places = plt.subplots(1, len(curves), figsize=(4 * len(curves), 3.4))
    for curve, axes in zip(curves, places, strict=True):
        sizes = curve.sizes[:2] if options.quick else curve.sizes
        rounds = 1 if options.quick else options.rounds
        seconds: dict[int, list[float]] = {size: [] for size in sizes}
        curve.work(sizes[0])  # Imports and thread pools are not timed.
        for _ in range(rounds):
            for size in sizes:
                seconds[size].append(curve.work(size))
        for size in sizes:
            report("growth", f"{curve.name}, {size:,} {curve.over}", seconds[size], "s")
        low, high = sizes[0], sizes[-1]
        report(
            "growth",
            f"{curve.name}, {high:,} {curve.over} beside {low:,}",
            [taken / high if curve.one else taken for taken in seconds[high]],
            f"s per {curve.one}" if curve.one else "s",
            peer=f"{low:,} {curve.over}",
            theirs=[taken / low if curve.one else taken for taken in seconds[low]],
        )
        medians = [statistics.median(seconds[size]) for size in sizes]
        slope = np.polyfit(np.log(sizes), np.log(medians), 1)[0]
        print(f"{curve.name}, over {curve.over}: slope {slope:.2f}")
        axes.loglog(sizes, medians, marker="o", color="#0b7a6b")
        axes.fill_between(
            sizes,
            [min(seconds[s]) for s in sizes],
            [max(seconds[s]) for s in sizes],
            alpha=0.2,
            color="#0b7a6b",
        )
        axes.set_xlabel(curve.over)
        axes.set_ylabel("seconds")
        axes.set_title(f"{curve.name} (slope {slope:.2f})", fontsize=9)
    if not options.quick:
        figure.tight_layout()
        figure.savefig(options.figure, dpi=110)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def head(records: int) -> float:
    generator = np.random.default_rng(0)
    features, labels = generator.random((records, 50), dtype=np.float32), generator.integers(0, 5, records)
    estimator = PrivateHead(1.0, 1e-5, classes=range(5), declared_size=records)
    return timed(lambda: estimator.fit(features, labels))


def networks(count: int) -> float:
    generator = np.random.default_rng(0)
    features, labels = generator.random((1200, 446), dtype=np.float32), generator.integers(0, 30, 1200)
    rows = [np.arange(1200) for _ in range(count)]
    settings = TrainingSettings(epochs=2)
    return timed(lambda: train_stack(features, labels, 30, rows, settings=settings, seeds=range(count)))


def answers(classes: int) -> float:
    logits = np.random.default_rng(0).normal(size=(1000, classes))
    mechanism = Algorithm1("gaussian", 0.1, 0.1, 0.36, 1.0)
    return timed(lambda: mechanism.release(logits, EXACT))


def charges(queries: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return _charged(f"{folder}/ledger.sqlite", queries)


def replicas(count: int) -> float:
    """Processes that charge one and the same ledger, 800 answers in all."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        place = f"{folder}/ledger.sqlite"
        _charged(place, 1)
        ready = context.Barrier(count + 1)
        workers = [context.Process(target=_replica, args=(place, 800 // count, ready)) for _ in range(count)]
        for worker in workers:
            worker.start()
        ready.wait()
        started = time.perf_counter()
        ready.wait()
        seconds = time.perf_counter() - started
        for worker in workers:
            worker.join()
    return seconds


def _replica(place: str, queries: int, ready) -> None:
    with Ledger(place) as ledger:
        account, client = ledger.account("growth"), ledger.client("replica")
        ready.wait()
        for _ in range(queries):
            assert isinstance(ledger.charge(Charge(account.id, client, "m/1", 1, rows=1)), Charged)
        ready.wait()


def _charged(place: str, queries: int) -> float:
    with Ledger(place) as ledger:
        account = ledger.open_account("growth", PureCost(1.0), Terms(1.0))
        client = ledger.client("replica")
        charge = Charge(account.id, client, "m/1", 1, rows=1)
        return timed(lambda: [ledger.charge(charge) for _ in range(queries)])


if __name__ == "__main__":
    main()
