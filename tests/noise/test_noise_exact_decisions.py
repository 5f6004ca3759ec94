"""Draw by draw: the fast branch, the exact branch and independent high-precision arithmetic agree."""

from __future__ import annotations

from fractions import Fraction

import mpmath
import numpy as np
import pytest

from quietmax.noise import ExactNoise
from quietmax.noise.inversion import rounded_gaussian, rounded_laplace
from quietmax.noise.selection import exponential_choice, permute_and_flip_choice

SCALES = [0.3, 1.0, 7.7, 2.0**20, 1.37 * 2.0**30, 2.0**40]
FAMILIES = [rounded_gaussian, rounded_laplace]


def tape(first: bytes, seed: int = 0):
    """Return a byte source that yields `first`, then pseudo-random bytes."""
    generator = np.random.default_rng(seed)
    position = 0

    def read(count: int) -> bytes:
        nonlocal position
        taken = first[position : position + count]
        position += len(taken)
        return taken + generator.bytes(count - len(taken))

    return read


def normal_magnitude(uniform: mpmath.mpf) -> mpmath.mpf:
    """Return x with P(|N(0, 1)| > x) = uniform."""
    start = mpmath.sqrt(-2 * mpmath.log(uniform))
    return mpmath.findroot(lambda x: mpmath.log(mpmath.erfc(x / mpmath.sqrt(2)) / uniform), start)


@pytest.mark.parametrize("draw", FAMILIES)
@pytest.mark.parametrize("scale", SCALES)
def test_forcing_every_draw_through_the_exact_branch_changes_no_draw(draw, scale):
    words = np.random.default_rng(1).bytes(8 * 1500)
    fast = draw(1500, scale, tape(words))
    exact = draw(1500, scale, tape(words), margin=1.0)
    assert np.array_equal(fast, exact)


@pytest.mark.parametrize(("draw", "normal"), [(rounded_gaussian, True), (rounded_laplace, False)])
@pytest.mark.parametrize("scale", SCALES)
def test_each_draw_is_the_nearest_integer_of_the_true_quantile_also_in_the_far_tail(draw, normal, scale):
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
                (drawn,) = draw(1, scale, tape(data))
                uniform = (mpmath.mpf(digits) + 0.5) / mpmath.mpf(2) ** 255
                magnitude = normal_magnitude(uniform) if normal else -mpmath.log(uniform)
                expected = int(mpmath.nint(magnitude * mpmath.mpf(scale)))
                assert drawn == (-expected if negative else expected)


def test_a_draw_whose_first_word_is_all_zeros_needs_and_uses_further_bits():
    zero_word = bytes(8)
    large = {int(rounded_laplace(1, 2.0**30, tape(zero_word, seed))[0]) for seed in range(20)}
    assert len(large) == 20
    assert min(large) >= 2.0**30 * 63 * np.log(2)


def gaps_and_rate() -> tuple[np.ndarray, float]:
    generator = np.random.default_rng(3)
    gaps = np.floor(generator.exponential(400_000.0, (6, 800)))
    return gaps - gaps.min(axis=0), 3.0e-6


@pytest.mark.parametrize("draw", [exponential_choice, permute_and_flip_choice])
def test_forcing_every_choice_through_the_exact_branch_changes_no_choice(draw):
    gaps, rate = gaps_and_rate()
    words = np.random.default_rng(4).bytes(8 * gaps.size)
    if draw is exponential_choice:
        words = words[: 8 * gaps.shape[1]]
    fast = draw(gaps, rate, tape(words))
    exact = draw(gaps, rate, tape(words), margin=1.0)
    assert np.array_equal(fast, exact)
    assert len(np.unique(fast)) == 6


def test_a_choice_at_the_very_edge_of_two_candidates_is_decided_by_further_bits():
    gaps = np.zeros((2, 1))
    half = (2**63 - 1).to_bytes(8, "little"), (2**63).to_bytes(8, "little")
    assert exponential_choice(gaps, 1.0, tape(half[0]))[0] == 0
    assert exponential_choice(gaps, 1.0, tape(half[1]))[0] == 1


def test_exact_permute_and_flip_ranks_by_the_true_keys():
    gaps, rate = gaps_and_rate()
    words = np.random.default_rng(5).bytes(8 * gaps.size)
    chosen = permute_and_flip_choice(gaps, rate, tape(words))
    numbers = np.frombuffer(words, dtype="<u8").reshape(gaps.shape)
    with mpmath.workdps(60):
        for column in range(60):
            keys = [
                -mpmath.log((mpmath.mpf(int(word)) + 0.5) / mpmath.mpf(2) ** 64) - mpmath.mpf(rate) * int(gap)
                for word, gap in zip(numbers[:, column], gaps[:, column], strict=True)
            ]
            assert chosen[column] == max(range(6), key=keys.__getitem__)


@pytest.mark.parametrize("lines_in_the_tail", [(3,), (0, 5), (1, 2, 4)])
def test_permute_and_flip_ranks_rightly_when_uniform_numbers_are_tiny(lines_in_the_tail):
    generator = np.random.default_rng(6)
    for _ in range(20):
        words = np.frombuffer(generator.bytes(48), dtype="<u8").copy()
        for line in lines_in_the_tail:
            words[line] >>= np.uint64(generator.integers(17, 50))
        gaps = np.floor(generator.exponential(6.0, (6, 1)))
        gaps -= gaps.min()
        keys = [
            -np.log((float(word) + 0.5) / 2.0**64) - gap for word, gap in zip(words, gaps[:, 0], strict=True)
        ]
        (chosen,) = permute_and_flip_choice(gaps, 1.0, tape(words.tobytes()))
        assert chosen == int(np.argmax(keys))


def test_permute_and_flip_decides_between_two_words_of_zeros_by_further_bits():
    gaps = np.array([[0.0], [1.0]])
    chosen = [int(permute_and_flip_choice(gaps, 1e-6, tape(bytes(16), seed))[0]) for seed in range(40)]
    assert 5 < sum(chosen) < 35


def test_the_exact_weights_sum_over_the_uniform_number_in_proportion():
    # With weights 1 and 1/2 (gap ln 2 / rate) the boundary is at 2/3; numbers on either side must fall right.
    rate = float(np.log(2.0))
    gaps = np.array([[0.0], [1.0]])
    boundary = Fraction(1) / (1 + Fraction(float(np.exp(-rate))))
    for offset, expected in ((-(2**20), 0), (2**20, 1)):
        word = int(boundary * 2**64) + offset
        assert exponential_choice(gaps, rate, tape(word.to_bytes(8, "little")), margin=1.0)[0] == expected


def test_bytes_for_a_test_source_never_pass_for_release():
    assert not ExactNoise(_bytes=tape(b"")).exact
    assert ExactNoise(_bytes=tape(b"")).name == "test"
    assert ExactNoise(_margin=1.0).name == "test"
    assert ExactNoise().exact
    assert ExactNoise().describe() == {"source": "exact", "exact": True, "entropy": "operating system"}
