"""Models: multilayer perceptrons, trained one or many at once with the paper's losses; model folders; feature maps."""

from quietmax.models.serialization import load_model, save_model
from quietmax.models.stacked import MLP, Convexified, CrossEntropy, Loss, Quadratic, TrainingSettings
from quietmax.models.training import (
    Classifier,
    Model,
    TorchModel,
    accuracy,
    accuracy_loss,
    train,
    train_many,
    train_module,
)

__all__ = [
    "MLP",
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
    "train",
    "train_many",
    "train_module",
]
