"""How fast is exact noise? Microseconds per value beside OpenDP's exact samplers, in alternating runs.

Run with `python benchmarks/noise.py [--quick]`. Both sides run in turns; each line gives the medians and the ratio of
OpenDP's time to ours within a turn, so that a busy machine slows both. Every call draws fresh noise from the
operating system. OpenDP takes lists and chooses for one row at a time; beyond 10,000 values its time per value no
longer falls, so it is not timed with more.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import opendp.prelude as dp

from quietmax.noise import EXACT, SeededNoise, choose, permute_and_flip, release_gaussian, release_laplace
from ratios import report

SCALE = 2.0**30
TURNS = 7
SECONDS_PER_TURN = 0.04


def seconds(call: Callable[[], object]) -> float:
    """Return the time of one call, repeated for at least SECONDS_PER_TURN."""
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS_PER_TURN:
        call()
        calls += 1
    return (time.perf_counter() - start) / calls


def compare(
    name: str,
    ours: Callable[[], object],
    our_count: int,
    theirs: Callable[[], object] | None = None,
    their_count: int = 1,
) -> None:
    ours()
    mine, other = [], []
    for _ in range(TURNS):
        mine.append(seconds(ours) / our_count * 1e6)
        if theirs is not None:
            other.append(seconds(theirs) / their_count * 1e6)
    report("noise", name, mine, "µs per value", peer="OpenDP", theirs=other)


def compare_noise() -> None:
    domain = dp.vector_domain(dp.atom_domain(T="i64"))
    references = {
        "gaussian": dp.m.make_gaussian(domain, dp.l2_distance(T="f64"), SCALE),
        "laplace": dp.m.make_laplace(domain, dp.l1_distance(T="i64"), SCALE),
    }
    for family, reference in references.items():
        for count in (1, 10, 100, 1000, 10**6):
            zeros = [0] * min(count, 10_000)
            ours = partial(getattr(EXACT, family), SCALE, count)
            compare(f"{family} noise, {count:,} values", ours, count, partial(reference, zeros), len(zeros))


def compare_releases() -> None:
    for count in (1, 1000, 10**6):
        values = np.zeros(count)
        gaussian = partial(release_gaussian, values, sensitivity=1.0, mu=0.1, coordinates=1)
        compare(f"release_gaussian, {count:,} values", gaussian, count)
        laplace = partial(release_laplace, values, sensitivity=1.0, epsilon=0.1, coordinates=1)
        compare(f"release_laplace, {count:,} values", laplace, count)
        compare(f"  the same, seeded, {count:,} values", partial(laplace, source=SeededNoise(0)), count)


def compare_choices() -> None:
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.linf_distance(T="i64")
    gumbel = dp.m.make_noisy_max(*space, dp.zero_concentrated_divergence(), scale=2.0**20)
    exponential = dp.m.make_noisy_max(*space, dp.max_divergence(), scale=2.0**20)
    for candidates in (2, 10, 100):
        for rows in (1, 1000):
            scores = np.random.default_rng(0).random((rows, candidates))
            counts = [int(score * 2**20) for score in scores[0]]
            for mechanism, reference in ((choose, gumbel), (permute_and_flip, exponential)):
                ours = partial(mechanism, scores, epsilon=2.0, range_sensitivity=2.0)
                name = f"{mechanism.__name__}, C = {candidates}, {rows:,} rows"
                compare(name, ours, rows, partial(reference, counts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="Choices only, one turn.")
    global TURNS
    if parser.parse_args().quick:
        TURNS = 1
        dp.enable_features("contrib")
        compare_choices()
        return
    dp.enable_features("contrib")
    compare_noise()
    compare_releases()
    compare_choices()
    start = time.perf_counter()
    EXACT.gaussian(SCALE, 2_400_000)
    print(f"2,400,000 Gaussian values (one private fit on MNIST): {time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    main()
