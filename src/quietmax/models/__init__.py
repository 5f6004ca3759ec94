"""Train: multilayer perceptrons, one or K at once, with the paper's losses; model files."""

from quietmax.models.alpha import AlphaSearch, search_alpha
from quietmax.models.ensemble import train_apart, train_stack
from quietmax.models.files import load_model, save_model
from quietmax.models.losses import Convexified, CrossEntropy, Loss, Quadratic
from quietmax.models.metrics import accuracy, accuracy_loss
from quietmax.models.mlp import MLP
from quietmax.models.model import Classifier, Model, TorchModel, softmax
from quietmax.models.settings import TrainingSettings
from quietmax.models.training import train, train_many, train_module

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
    "train_apart",
    "train_many",
    "train_module",
    "train_stack",
]
