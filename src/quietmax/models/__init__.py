"""Models: multilayer perceptrons, trained one or many at once with the paper's losses; model folders; feature maps."""

from quietmax.models.losses import Convexified, CrossEntropy, Loss, Quadratic
from quietmax.models.mlp import MLP
from quietmax.models.serialization import load_model, save_model
from quietmax.models.stacked import TrainingSettings, train_independent, train_stack
from quietmax.models.training import (
    AlphaSearch,
    Classifier,
    Model,
    TorchModel,
    accuracy,
    accuracy_loss,
    search_alpha,
    softmax,
    train,
    train_many,
    train_module,
)

__all__ = [
    "MLP",
    "AlphaSearch",
    "Classifier",
    "Convexified",
    "CrossEntropy",
    "Loss",
    "Model",
    "Quadratic",
    "TorchModel",
    "TrainingSettings",
    "accuracy",
    "accuracy_loss",
    "load_model",
    "save_model",
    "search_alpha",
    "softmax",
    "train",
    "train_independent",
    "train_many",
    "train_module",
    "train_stack",
]
