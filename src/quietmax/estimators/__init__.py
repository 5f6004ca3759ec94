"""Private training with a scikit-learn face, and the models it leaves behind."""

from quietmax.estimators.dpsgd.estimator import DPSGD
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.serialization import PrivateModel, open_private, save_private
from quietmax.estimators.teachers import Teachers

__all__ = ["DPSGD", "PrivateHead", "PrivateModel", "Teachers", "open_private", "save_private"]
