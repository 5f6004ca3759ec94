"""Differentially private scikit-learn estimators, and the model folders they are saved to."""

from typing import TYPE_CHECKING

from quietmax._lazy import lazy_names

if TYPE_CHECKING:
    from quietmax.estimators.dpsgd.estimator import DPSGD as DPSGD
    from quietmax.estimators.dpsgd.training import DPSGDSettings as DPSGDSettings
    from quietmax.estimators.figures import Evaluation as Evaluation
    from quietmax.estimators.head.effects import Effects as Effects
    from quietmax.estimators.head.estimator import PrivateHead as PrivateHead
    from quietmax.estimators.head.weights import HeadSettings as HeadSettings
    from quietmax.estimators.serialization import PrivateModel as PrivateModel
    from quietmax.estimators.serialization import decide_folder as decide_folder
    from quietmax.estimators.serialization import open_private as open_private
    from quietmax.estimators.serialization import save_private as save_private
    from quietmax.estimators.teachers import Teachers as Teachers

__getattr__, _MODULES = lazy_names(__name__)
__all__ = list(_MODULES)
