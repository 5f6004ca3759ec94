"""Differentially private scikit-learn estimators, and the model folders they are saved to."""

from quietmax.estimators.dpsgd.estimator import DPSGD
from quietmax.estimators.evaluation import Evaluation
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.serialization import PrivateModel, open_private, save_private
from quietmax.estimators.teachers import Teachers

__all__ = ["DPSGD", "Evaluation", "PrivateHead", "PrivateModel", "Teachers", "open_private", "save_private"]
