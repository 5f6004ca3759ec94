"""Private training with a scikit-learn face, and the models it leaves behind."""

from quietmax.estimators.dpsgd import DPSGD
from quietmax.estimators.head import PrivateHead
from quietmax.estimators.private_file import open_private, save_private
from quietmax.estimators.private_model import PrivateModel
from quietmax.estimators.teachers import Teachers

__all__ = ["DPSGD", "PrivateHead", "PrivateModel", "Teachers", "open_private", "save_private"]
