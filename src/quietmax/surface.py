"""What `import quietmax` offers: the names, each from the package that holds it."""

from __future__ import annotations

from quietmax import attacks, audit, sensitivity
from quietmax.accounting.budget import Budget
from quietmax.accounting.costs import GaussianCost, PureCost
from quietmax.accounting.guarantee import Guarantee
from quietmax.data.load import load
from quietmax.data.records import Records, Split
from quietmax.data.registry import datasets
from quietmax.errors import QuietmaxError
from quietmax.estimators.dpsgd.estimator import DPSGD
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.teachers import Teachers
from quietmax.mechanisms.algorithm1 import Algorithm1
from quietmax.mechanisms.noisy_max import GaussianScores, NoisyMax
from quietmax.mechanisms.sampled_neuron import SampledNeuron
from quietmax.models.losses import Convexified, CrossEntropy, Quadratic
from quietmax.models.serialization import load_model, save_model
from quietmax.models.stacked import TrainingSettings
from quietmax.models.training import Model, TorchModel, train, train_many, train_module
from quietmax.noise.sources import ExactNoise, SeededNoise
from quietmax.predictor import Predictor
from quietmax.spending import BudgetExhausted, FileAccount
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
