"""The dice: exact noise for everything that leaves the process, seeded fast noise for experiments."""

from quietmax.noise.release import GaussianRelease, LaplaceRelease, release_gaussian, release_laplace
from quietmax.noise.selection import Choice, choose, permute_and_flip
from quietmax.noise.sources import EXACT, ExactNoise, NoiseSource, SeededNoise

__all__ = [
    "EXACT",
    "Choice",
    "ExactNoise",
    "GaussianRelease",
    "LaplaceRelease",
    "NoiseSource",
    "SeededNoise",
    "choose",
    "permute_and_flip",
    "release_gaussian",
    "release_laplace",
]
