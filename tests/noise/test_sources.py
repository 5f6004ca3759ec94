"""The two sources: entropy, independence of threads and forks, repeatability, and what they say of themselves."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from quietmax.errors import InvalidInput
from quietmax.noise import (
    EXACT,
    ExactNoise,
    NoiseSource,
    SeededNoise,
    choose,
    release_gaussian,
    release_laplace,
)


def draw_in_child(queue) -> None:
    queue.put(EXACT.gaussian(2.0**30, 50).tolist())


def test_both_sources_offer_the_same_interface() -> None:
    assert isinstance(ExactNoise(), NoiseSource)
    assert isinstance(SeededNoise(0), NoiseSource)


def test_the_default_source_of_every_release_is_exact() -> None:
    assert release_gaussian([0.0], sensitivity=1.0, mu=1.0).source == "exact"
    assert release_laplace([0.0], sensitivity=1.0, epsilon=1.0).source == "exact"
    assert choose([0.0, 1.0], epsilon=1.0, sensitivity=1.0).source == "exact"


def test_forked_children_never_repeat_their_parents_or_siblings_noise() -> None:
    context = multiprocessing.get_context("fork")
    EXACT.gaussian(2.0**30, 50)
    queue = context.Queue()
    children = [context.Process(target=draw_in_child, args=(queue,)) for _ in range(3)]
    for child in children:
        child.start()
    draws = [queue.get(timeout=30) for _ in children] + [EXACT.gaussian(2.0**30, 50).tolist()]
    for child in children:
        child.join()
    everything = [number for draw in draws for number in draw]
    # 200 numbers of about 2^31 values coincide by chance with probability below 2^15/2^31; draws wholly equal never
    assert len({tuple(draw) for draw in draws}) == 4
    assert len(set(everything)) >= 198


def test_threads_never_repeat_each_others_noise() -> None:
    with ThreadPoolExecutor(8) as pool:
        draws = list(pool.map(lambda _: tuple(EXACT.laplace(2.0**30, 100).tolist()), range(32)))
    assert len(set(draws)) == 32


def test_the_exact_source_cannot_be_made_repeatable_by_seeding_numpy_or_python() -> None:
    import random

    draws = []
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        draws.append(EXACT.gaussian(2.0**30, 20).tolist())
    assert draws[0] != draws[1]


def test_seeded_noise_repeats_itself_and_says_that_it_is_seeded() -> None:
    first, second = SeededNoise(5), SeededNoise(5)
    assert np.array_equal(first.gaussian(2.0**30, 9), second.gaussian(2.0**30, 9))
    assert np.array_equal(first.laplace(2.0**30, 9), second.laplace(2.0**30, 9))
    gaps = np.tile([[0.0], [1.0], [2.0]], (1, 50))
    assert np.array_equal(first.exponential_choice(gaps, 0.5), second.exponential_choice(gaps, 0.5))
    assert np.array_equal(first.permute_and_flip_choice(gaps, 0.5), second.permute_and_flip_choice(gaps, 0.5))
    assert first.describe() == {"source": "seeded", "exact": False, "seed": 5}
    assert SeededNoise(np.random.default_rng(1)).describe() == {"source": "seeded", "exact": False}
    assert release_gaussian([0.0], sensitivity=1.0, mu=1.0, source=first).source == "seeded"


@pytest.mark.parametrize("seed", [None, -1, 1.5, True, "7"])
def test_a_seed_must_be_given_as_a_whole_number_or_a_generator(seed) -> None:
    with pytest.raises(InvalidInput):
        SeededNoise(seed)


@pytest.mark.parametrize("source", [ExactNoise(), SeededNoise(0)], ids=["exact", "seeded"])
@pytest.mark.parametrize("scale", [0.0, -1.0, 2.0**-9, 2.0**51, float("nan"), float("inf")])
def test_scales_outside_the_proven_range_are_refused(source, scale) -> None:
    with pytest.raises(InvalidInput):
        source.gaussian(scale, 3)
    with pytest.raises(InvalidInput):
        source.laplace(scale, 3)


@pytest.mark.parametrize("source", [ExactNoise(), SeededNoise(0)], ids=["exact", "seeded"])
def test_shapes_are_as_asked(source) -> None:
    for shape in (0, 5, (2, 3), ()):
        expected = (shape,) if isinstance(shape, int) else shape
        assert np.shape(source.gaussian(1.0, shape)) == expected
        assert np.shape(source.laplace(1.0, shape)) == expected
