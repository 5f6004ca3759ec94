"""Randomised release: what turns a model's logits into answers."""

from quietmax.mechanisms.algorithm1 import Algorithm1
from quietmax.mechanisms.mechanism import Answers, Mechanism

__all__ = ["Algorithm1", "Answers", "Mechanism"]
