"""Mechanisms: they turn a model's scores into randomised answers."""

from quietmax.mechanisms.algorithm1 import Algorithm1
from quietmax.mechanisms.base import (
    Answerer,
    Answers,
    Certified,
    GaussianScores,
    Mechanism,
    NoisyMax,
    SampledNeuron,
)

__all__ = [
    "Algorithm1",
    "Answerer",
    "Answers",
    "Certified",
    "GaussianScores",
    "Mechanism",
    "NoisyMax",
    "SampledNeuron",
]
