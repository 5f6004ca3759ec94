"""Mechanisms: they turn a model's scores into randomised answers."""

from quietmax.mechanisms.algorithm1 import Algorithm1
from quietmax.mechanisms.base import Answerer, Answers, Certified, Mechanism, plugin_mechanisms
from quietmax.mechanisms.noisy_max import GaussianScores, NoisyMax
from quietmax.mechanisms.sampled_neuron import SampledNeuron

__all__ = [
    "Algorithm1",
    "Answerer",
    "Answers",
    "Certified",
    "GaussianScores",
    "Mechanism",
    "NoisyMax",
    "SampledNeuron",
    "plugin_mechanisms",
]
