"""Noise: exact for everything that leaves the process, seeded and fast for experiments."""

from quietmax.noise.release import NoisyValues, choose, permute_and_flip, release_gaussian, release_laplace
from quietmax.noise.sources import EXACT, ExactNoise, NoiseSource, SeededNoise

__all__ = [
    "EXACT",
    "ExactNoise",
    "NoiseSource",
    "NoisyValues",
    "SeededNoise",
    "choose",
    "permute_and_flip",
    "release_gaussian",
    "release_laplace",
]
