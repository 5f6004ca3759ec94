"""Randomised release: what turns a model's scores into answers."""

from quietmax.mechanisms.algorithm1 import Algorithm1
from quietmax.mechanisms.base import Answerer, Answers, Certified, Mechanism
from quietmax.mechanisms.noisy_max import GaussianScores, NoisyMax
from quietmax.mechanisms.sampled_neuron import SampledNeuron

PROVEN = (GaussianScores, NoisyMax, SampledNeuron)
"""The mechanisms with a proof. A subclass is the user's own code and not among them."""

__all__ = [
    "PROVEN",
    "Algorithm1",
    "Answerer",
    "Answers",
    "Certified",
    "GaussianScores",
    "Mechanism",
    "NoisyMax",
    "SampledNeuron",
]
