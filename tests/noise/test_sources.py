"""The two sources: rigorous bounds and exact draws, distributions, entropy, repeatability, what they say of themselves.

Fewer than 60 statistical tests reject below 1e-8: together a false alarm has probability below 1e-6.
"""

from __future__ import annotations

import multiprocessing
import random
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from inspect import signature

import mpmath
import numpy as np
import opendp.prelude as dp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import ndtr, ndtri

from quietmax.errors import InvalidInput
from quietmax.noise import (
    EXACT,
    ExactNoise,
    NoiseSource,
    SeededNoise,
    choose,
    permute_and_flip,
    release_gaussian,
    release_laplace,
    sources,
)

REJECT = 1e-8
FINE = 2.0**30
FAMILIES = ["gaussian", "laplace"]
SCALES = [0.3, 1.0, 7.7, 2.0**20, 1.37 * 2.0**30, 2.0**40]
points = st.fractions(min_value=0, max_value=30, max_denominator=2**40)
shares = st.integers(min_value=1, max_value=2**64).map(lambda numerator: Fraction(numerator, 2**64))


def real(value: Fraction) -> mpmath.mpf:
    return mpmath.mpf(value.numerator) / value.denominator


def generated(seed: int, margin: float | None = None) -> ExactNoise:
    """Return a source with reproducible bytes."""
    return ExactNoise(_bytes=np.random.default_rng(seed).bytes, _margin=margin)


def taped(first: bytes, seed: int = 0, margin: float | None = None) -> ExactNoise:
    """Return a source whose bytes are `first`, then pseudo-random ones."""
    generator = np.random.default_rng(seed)
    left = first

    def read(count: int) -> bytes:
        nonlocal left
        taken, left = left[:count], left[count:]
        return taken + generator.bytes(count - len(taken))

    return ExactNoise(_bytes=read, _margin=margin)


@pytest.fixture(autouse=True)
def _many_digits():
    with mpmath.workdps(700):
        yield


@pytest.mark.parametrize(
    ("enclose", "truth", "values"),
    [
        (sources._normal_survival, lambda x: mpmath.erfc(x / mpmath.sqrt(2)), points),
        (sources._exponential_survival, lambda x: mpmath.exp(-x), points),
        (sources._logarithm, mpmath.log, shares),
    ],
)
def test_the_truth_lies_within_rigorous_bounds_and_they_are_close(enclose, truth, values) -> None:
    @settings(deadline=None, max_examples=60)
    @given(values, st.integers(min_value=8, max_value=300))
    def check(value, bits) -> None:
        low, high = enclose(value, bits)
        assert real(low) <= truth(real(value)) <= real(high)
        assert high - low <= Fraction(1, 2**bits)

    check()


def test_far_out_the_bounds_stay_valid_and_cheap() -> None:
    for bits in (64, 128):
        for survival in (sources._normal_survival, sources._exponential_survival):
            low, high = survival(Fraction(10**9), bits)
            assert low == 0
            assert high == Fraction(1, 2**bits)


def uniforms_to_check() -> np.ndarray:
    generator = np.random.default_rng(20)
    spread = 2.0 ** -generator.uniform(0, 16, 1500)
    near_one = 1.0 - 2.0 ** -generator.uniform(1, 52, 500)
    at_the_formula_switch = 2 * 0.1353352832366127 + np.linspace(-1e-9, 1e-9, 201)
    return np.concatenate([spread, near_one, at_the_formula_switch, generator.random(1500)])


@pytest.mark.parametrize(
    ("function", "inputs", "error", "trusted"),
    [
        (ndtri, 0.5 * uniforms_to_check(), lambda x, y: (mpmath.ncdf(y) - x) / mpmath.npdf(y), 2.0**-43),
        (np.log, uniforms_to_check(), lambda x, y: mpmath.log(x) - y, 2.0**-43),
        (
            np.exp,
            np.append(-np.geomspace(1e-9, 700, 2000), 0.0),
            lambda x, y: y / mpmath.exp(x) - 1,
            2.0**-44,
        ),
    ],
    ids=["normal quantile", "logarithm", "exponential"],
)
def test_a_trusted_function_errs_sixty_four_times_less_than_is_trusted(
    function, inputs, error, trusted
) -> None:
    with mpmath.workdps(40):
        errors = [
            abs(float(error(mpmath.mpf(float(x)), mpmath.mpf(float(y)))))
            for x, y in zip(inputs, function(inputs), strict=True)
        ]
    assert max(errors) < trusted / 64


def test_the_margins_cover_what_is_trusted() -> None:
    assert sources._MARGIN >= 2.0**-43 + 2.0**-46
    assert sources._KEY_MARGIN >= 2.0**-43 + 2.0**-46
    assert sources._WEIGHT_MARGIN >= 2 * (2.0**-43 + 2.0**-51)


def normal_magnitude(uniform: mpmath.mpf) -> mpmath.mpf:
    """Return x with P(|N(0, 1)| > x) = uniform."""
    start = mpmath.sqrt(-2 * mpmath.log(uniform))
    return mpmath.findroot(lambda x: mpmath.log(mpmath.erfc(x / mpmath.sqrt(2)) / uniform), start)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scale", SCALES)
def test_forcing_every_draw_through_the_exact_branch_changes_no_draw(family, scale) -> None:
    words = np.random.default_rng(1).bytes(8 * 1500)
    fast, exact = (getattr(taped(words, margin=margin), family)(scale, 1500) for margin in (None, 1.0))
    assert np.array_equal(fast, exact)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scale", SCALES)
def test_each_draw_is_the_nearest_integer_of_the_true_quantile_also_in_the_far_tail(family, scale) -> None:
    generator = np.random.default_rng(2)
    with mpmath.workdps(120):
        for leading_zeros in (0, 1, 5, 17, 40, 62, 63, 90):
            for negative in (False, True):
                # the word's top bit is the sign, its other 63 bits and three further words the uniform number
                digits = int.from_bytes(generator.bytes(32), "big") % 2 ** (255 - leading_zeros)
                words = [digits >> 192, digits >> 128, digits >> 64, digits]
                words = [word % 2**64 for word in words]
                words[0] |= negative << 63
                data = b"".join(word.to_bytes(8, "little") for word in words)
                (drawn,) = getattr(taped(data), family)(scale, 1)
                uniform = (mpmath.mpf(digits) + 0.5) / mpmath.mpf(2) ** 255
                magnitude = normal_magnitude(uniform) if family == "gaussian" else -mpmath.log(uniform)
                expected = int(mpmath.nint(magnitude * mpmath.mpf(scale)))
                assert drawn == (-expected if negative else expected)


def test_a_draw_whose_first_word_is_all_zeros_needs_and_uses_further_bits() -> None:
    large = {int(taped(bytes(8), seed).laplace(FINE, 1)[0]) for seed in range(20)}
    assert len(large) == 20
    assert min(large) >= FINE * 63 * np.log(2)


def gaps_and_rate() -> tuple[np.ndarray, float]:
    generator = np.random.default_rng(3)
    gaps = np.floor(generator.exponential(400_000.0, (6, 800)))
    return gaps - gaps.min(axis=0), 3.0e-6


@pytest.mark.parametrize("choice", ["exponential_choice", "permute_and_flip_choice"])
def test_forcing_every_choice_through_the_exact_branch_changes_no_choice(choice) -> None:
    gaps, rate = gaps_and_rate()
    words = np.random.default_rng(4).bytes(
        8 * (gaps.shape[1] if choice == "exponential_choice" else gaps.size)
    )
    fast, exact = (getattr(taped(words, margin=margin), choice)(gaps, rate) for margin in (None, 1.0))
    assert np.array_equal(fast, exact)
    assert len(np.unique(fast)) == 6


def test_a_choice_at_the_very_edge_of_two_candidates_is_decided_by_further_bits() -> None:
    for word, expected in ((2**63 - 1, 0), (2**63, 1)):
        source = taped(word.to_bytes(8, "little"))
        assert source.exponential_choice(np.zeros((2, 1)), 1.0)[0] == expected


def test_exact_permute_and_flip_ranks_by_the_true_keys() -> None:
    gaps, rate = gaps_and_rate()
    words = np.random.default_rng(5).bytes(8 * gaps.size)
    chosen = taped(words).permute_and_flip_choice(gaps, rate)
    numbers = np.frombuffer(words, dtype="<u8").reshape(gaps.shape)
    with mpmath.workdps(60):
        for column in range(60):
            keys = [
                -mpmath.log((mpmath.mpf(int(word)) + 0.5) / mpmath.mpf(2) ** 64) - mpmath.mpf(rate) * int(gap)
                for word, gap in zip(numbers[:, column], gaps[:, column], strict=True)
            ]
            assert chosen[column] == max(range(6), key=keys.__getitem__)


@pytest.mark.parametrize("lines_in_the_tail", [(3,), (0, 5), (1, 2, 4)])
def test_permute_and_flip_ranks_rightly_when_uniform_numbers_are_tiny(lines_in_the_tail) -> None:
    generator = np.random.default_rng(6)
    for _ in range(20):
        words = np.frombuffer(generator.bytes(48), dtype="<u8").copy()
        for line in lines_in_the_tail:
            words[line] >>= np.uint64(generator.integers(17, 50))
        gaps = np.floor(generator.exponential(6.0, (6, 1)))
        gaps -= gaps.min()
        (chosen,) = taped(words.tobytes()).permute_and_flip_choice(gaps, 1.0)
        assert chosen == int(np.argmax(-np.log((words + 0.5) / 2.0**64) - gaps[:, 0]))


def test_permute_and_flip_decides_between_two_words_of_zeros_by_further_bits() -> None:
    gaps = np.array([[0.0], [1.0]])
    chosen = [int(taped(bytes(16), seed).permute_and_flip_choice(gaps, 1e-6)[0]) for seed in range(40)]
    assert 5 < sum(chosen) < 35


def test_the_exact_weights_sum_over_the_uniform_number_in_proportion() -> None:
    # With weights 1 and 1/2 (gap ln 2 / rate) the boundary is at 2/3; numbers on either side must fall right.
    rate = float(np.log(2.0))
    gaps = np.array([[0.0], [1.0]])
    boundary = Fraction(1) / (1 + Fraction(float(np.exp(-rate))))
    for offset, expected in ((-(2**20), 0), (2**20, 1)):
        word = int(boundary * 2**64) + offset
        source = taped(word.to_bytes(8, "little"), margin=1.0)
        assert source.exponential_choice(gaps, rate)[0] == expected


def test_bytes_for_a_test_source_never_pass_for_release() -> None:
    assert not taped(b"").exact
    assert taped(b"").name == "test"
    assert ExactNoise(_margin=1.0).name == "test"
    assert ExactNoise().exact
    assert ExactNoise().describe() == {"source": "exact", "exact": True, "entropy": "operating system"}


def laplace_cdf(x):
    return np.where(x < 0, 0.5 * np.exp(np.minimum(x, 0)), 1 - 0.5 * np.exp(-np.maximum(x, 0)))


CDF = {"gaussian": ndtr, "laplace": laplace_cdf}


def chi_square_p(drawn: np.ndarray, family: str, scale: float) -> float:
    """Compare the frequency of every integer (rare ones together, each side) with the rounded distribution."""
    reach = int(np.abs(drawn).max()) + 1
    integers = np.arange(-reach, reach + 1)
    cdf = CDF[family]
    expected = drawn.size * (cdf((integers + 0.5) / scale) - cdf((integers - 0.5) / scale))
    common = integers[expected >= 10]
    edges = np.concatenate([[-np.inf], common - 0.5, [common[-1] + 0.5, np.inf]])
    counts = np.histogram(drawn, bins=edges)[0]
    masses = np.diff(cdf(edges / scale))
    return stats.chisquare(counts, masses / masses.sum() * drawn.size).pvalue


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0, 4.0, 8.0, 11.3])
def test_every_integer_is_as_frequent_as_the_rounded_law_says(family, scale) -> None:
    drawn = getattr(generated(11), family)(scale, 400_000)
    assert chi_square_p(drawn, family, scale) > REJECT


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "source",
    [generated(13), SeededNoise(13), ExactNoise()],
    ids=["test", "seeded", "exact"],
)
def test_at_release_scale_the_noise_follows_its_continuous_distribution(family, source) -> None:
    drawn = getattr(source, family)(FINE, 300_000) / FINE
    assert stats.kstest(drawn, CDF[family]).pvalue > REJECT


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tails_at_release_scale_are_as_heavy_as_the_distribution_says(family) -> None:
    drawn = np.abs(getattr(generated(14), family)(FINE, 4_000_000)) / FINE
    for mass in (1e-2, 1e-3, 1e-4, 1e-5, 2**-17, 1e-6):
        limit = -stats.norm.ppf(mass / 2) if family == "gaussian" else -np.log(mass)
        assert stats.binomtest(int((drawn > limit).sum()), drawn.size, mass).pvalue > REJECT


@pytest.mark.parametrize("family", FAMILIES)
def test_signs_are_fair_and_low_digits_uniform(family) -> None:
    drawn = getattr(generated(15), family)(FINE, 1_000_000)
    assert stats.binomtest(int((drawn > 0).sum()), int((drawn != 0).sum()), 0.5).pvalue > REJECT
    assert stats.chisquare(np.bincount(drawn % 64, minlength=64)).pvalue > REJECT


@pytest.mark.parametrize("family", FAMILIES)
def test_the_noise_agrees_with_opendp(family) -> None:
    dp.enable_features("contrib")
    domain = dp.vector_domain(dp.atom_domain(T="i64"))
    if family == "gaussian":
        reference = dp.m.make_gaussian(domain, dp.l2_distance(T="f64"), FINE)
    else:
        reference = dp.m.make_laplace(domain, dp.l1_distance(T="i64"), FINE)
    theirs = np.array(reference([0] * 30_000))
    ours = getattr(ExactNoise(), family)(FINE, 300_000)
    assert stats.ks_2samp(ours, theirs).pvalue > REJECT
    assert stats.ks_2samp(np.abs(ours), np.abs(theirs)).pvalue > REJECT


def test_the_discrete_gaussian_is_within_the_stated_distance_of_the_rounded_one() -> None:
    # Theory section 3.5: total variation 4*phi(1)/48 = 0.0202 over sigma squared. True from sigma = 6 up.
    for sigma in np.arange(6.0, 40.0, 0.37):
        integers = np.arange(-int(12 * sigma), int(12 * sigma) + 1)
        weights = np.exp(-0.5 * (integers / sigma) ** 2)
        rounded = ndtr((integers + 0.5) / sigma) - ndtr((integers - 0.5) / sigma)
        distance = 0.5 * np.abs(weights / weights.sum() - rounded).sum()
        assert 0.0200 < distance * sigma**2 < 0.0202


def draw_in_child(queue) -> None:
    queue.put(EXACT.gaussian(2.0**30, 50).tolist())


def test_the_default_source_of_every_release_is_exact() -> None:
    for release in (release_gaussian, release_laplace, choose, permute_and_flip):
        assert signature(release).parameters["source"].default is EXACT
    assert EXACT.exact


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


@pytest.mark.parametrize("seed", [None, -1, 1.5, True, "7"])
def test_a_seed_must_be_given_as_a_whole_number_or_a_generator(seed) -> None:
    with pytest.raises(InvalidInput, match="seed must be an integer of at least 0"):
        SeededNoise(seed)


@pytest.mark.parametrize("source", [ExactNoise(), SeededNoise(0)], ids=["exact", "seeded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_as_asked_and_scales_outside_the_proven_range_are_refused(source, family) -> None:
    assert isinstance(source, NoiseSource)
    draw = getattr(source, family)
    for shape, expected in ((0, (0,)), (5, (5,)), ((2, 3), (2, 3)), ((), ())):
        assert np.shape(draw(1.0, shape)) == expected
    for scale in (0.0, -1.0, 2.0**-9, 2.0**51, float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match="between 2\\^-8 and 2\\^50"):
            draw(scale, 3)
