"""Private predictions from ordinary classifiers, with guarantees you can audit.

>>> import quietmax as qm
>>> data = qm.load("mnist-5k", records=500)
>>> model = qm.train(data, alpha=1.0, settings=qm.TrainingSettings(epochs=2))
>>> quiet = qm.Predictor(model, qm.Algorithm1(noise="gaussian"), qm.Budget(epsilon=1.0, queries=100))
>>> quiet.predict_proba(data.test.features[:3]).shape
(3, 10)
>>> quiet.guarantee.status, quiet.remaining.queries
('refuted', 97)
"""

from quietmax import attacks, audit, sensitivity
from quietmax.account import BudgetExhausted, FileAccount
from quietmax.accounting import Budget, GaussianCost, Guarantee, PureCost
from quietmax.data import Records, Split, datasets, load
from quietmax.errors import QuietmaxError
from quietmax.estimators import PrivateHead, Teachers
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
