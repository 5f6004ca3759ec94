"""What `import quietmax` offers: the names, each from the package that holds it."""

from __future__ import annotations

from quietmax import attacks, audit, sensitivity
from quietmax.account import BudgetExhausted, FileAccount
from quietmax.accounting import Budget, GaussianCost, Guarantee, PureCost
from quietmax.data import Records, Split, datasets, load
from quietmax.errors import QuietmaxError
from quietmax.estimators import DPSGD, PrivateHead, Teachers
from quietmax.mechanisms import Algorithm1, GaussianScores, NoisyMax, SampledNeuron
from quietmax.models import (
    Convexified,
    CrossEntropy,
    Model,
    Quadratic,
    TorchModel,
    TrainingSettings,
    load_model,
    save_model,
    train,
    train_many,
    train_module,
)
from quietmax.noise import ExactNoise, SeededNoise
from quietmax.predictor import Predictor
from quietmax.version import __version__

__all__ = [
    "DPSGD",
    "Algorithm1",
    "Budget",
    "BudgetExhausted",
    "Convexified",
    "CrossEntropy",
    "ExactNoise",
    "FileAccount",
    "GaussianCost",
    "GaussianScores",
    "Guarantee",
    "Model",
    "NoisyMax",
    "Predictor",
    "PrivateHead",
    "PureCost",
    "Quadratic",
    "QuietmaxError",
    "Records",
    "SampledNeuron",
    "SeededNoise",
    "Split",
    "Teachers",
    "TorchModel",
    "TrainingSettings",
    "__version__",
    "attacks",
    "audit",
    "datasets",
    "load",
    "load_model",
    "save_model",
    "sensitivity",
    "train",
    "train_many",
    "train_module",
]
