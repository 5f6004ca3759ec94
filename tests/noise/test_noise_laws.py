"""Statistical tests of the drawn noise against its law.

Fewer than 60 tests reject at a p-value below 1e-8, so all together raise a false alarm with probability below 1e-6
(Bonferroni); the seeded ones always give the same result.
"""

from __future__ import annotations

import numpy as np
import opendp.prelude as dp
import pytest
from scipy import stats
from scipy.special import ndtr

from quietmax.noise import ExactNoise, SeededNoise

REJECT = 1e-8
FINE = 2.0**30


def laplace_cdf(x):
    return np.where(x < 0, 0.5 * np.exp(np.minimum(x, 0)), 1 - 0.5 * np.exp(-np.maximum(x, 0)))


CDF = {"gaussian": ndtr, "laplace": laplace_cdf}


def exact(seed: int, margin: float | None = None) -> ExactNoise:
    return ExactNoise(_bytes=np.random.default_rng(seed).bytes, _margin=margin)


def chi_square_p(drawn: np.ndarray, family: str, scale: float) -> float:
    """Compare the frequency of every integer (rare ones together, each side) with the rounded law."""
    reach = int(np.abs(drawn).max()) + 1
    integers = np.arange(-reach, reach + 1)
    cdf = CDF[family]
    expected = drawn.size * (cdf((integers + 0.5) / scale) - cdf((integers - 0.5) / scale))
    common = integers[expected >= 10]
    edges = np.concatenate([[-np.inf], common - 0.5, [common[-1] + 0.5, np.inf]])
    counts = np.histogram(drawn, bins=edges)[0]
    masses = np.diff(cdf(edges / scale))
    return stats.chisquare(counts, masses / masses.sum() * drawn.size).pvalue


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0, 4.0, 8.0, 11.3])
def test_every_integer_is_as_frequent_as_the_rounded_law_says(family, scale):
    drawn = getattr(exact(11), family)(scale, 400_000)
    assert chi_square_p(drawn, family, scale) > REJECT


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_the_law_is_the_same_when_every_draw_takes_the_exact_branch(family):
    drawn = getattr(exact(12, margin=1.0), family)(2.5, 6_000)
    assert chi_square_p(drawn, family, 2.5) > REJECT


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
@pytest.mark.parametrize(
    "source", [exact(13), SeededNoise(13), ExactNoise()], ids=["test", "seeded", "exact"]
)
def test_at_release_scale_the_noise_follows_its_continuous_law(family, source):
    drawn = getattr(source, family)(FINE, 300_000) / FINE
    assert stats.kstest(drawn, CDF[family]).pvalue > REJECT


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_the_tails_at_release_scale_are_as_heavy_as_the_law_says(family):
    drawn = np.abs(getattr(exact(14), family)(FINE, 4_000_000)) / FINE
    for mass in (1e-2, 1e-3, 1e-4, 1e-5, 2**-17, 1e-6):
        limit = -stats.norm.ppf(mass / 2) if family == "gaussian" else -np.log(mass)
        assert stats.binomtest(int((drawn > limit).sum()), drawn.size, mass).pvalue > REJECT


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_signs_are_fair_and_low_digits_uniform(family):
    drawn = getattr(exact(15), family)(FINE, 1_000_000)
    assert stats.binomtest(int((drawn > 0).sum()), int((drawn != 0).sum()), 0.5).pvalue > REJECT
    assert stats.chisquare(np.bincount(drawn % 64, minlength=64)).pvalue > REJECT


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_the_noise_agrees_with_opendp(family):
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


def test_the_discrete_gaussian_is_within_the_stated_distance_of_the_rounded_one():
    # Theory section 3.5: total variation 4*phi(1)/48 = 0.0202 over sigma squared. True from sigma = 6 up.
    for sigma in np.arange(6.0, 40.0, 0.37):
        integers = np.arange(-int(12 * sigma), int(12 * sigma) + 1)
        weights = np.exp(-0.5 * (integers / sigma) ** 2)
        rounded = ndtr((integers + 0.5) / sigma) - ndtr((integers - 0.5) / sigma)
        distance = 0.5 * np.abs(weights / weights.sum() - rounded).sum()
        assert 0.0200 < distance * sigma**2 < 0.0202
