"""Differentially private scikit-learn estimators, and the model folders they are saved to."""

from typing import TYPE_CHECKING

from quietmax._lazy import lazy_names

if TYPE_CHECKING:
    from quietmax.estimators.dpsgd.estimator import DPSGD
    from quietmax.estimators.dpsgd.training import DPSGDSettings
    from quietmax.estimators.figures import Evaluation
    from quietmax.estimators.head.effects import Effects
    from quietmax.estimators.head.estimator import PrivateHead
    from quietmax.estimators.head.weights import HeadSettings
    from quietmax.estimators.serialization import (
        PrivateModel,
        decide_folder,
        open_private,
        save_private,
    )
    from quietmax.estimators.teachers import Teachers
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "DPSGD": "dpsgd.estimator",
            "DPSGDSettings": "dpsgd.training",
            "Effects": "head.effects",
            "Evaluation": "figures",
            "HeadSettings": "head.weights",
            "PrivateHead": "head.estimator",
            "PrivateModel": "serialization",
            "Teachers": "teachers",
            "decide_folder": "serialization",
            "open_private": "serialization",
            "save_private": "serialization",
        },
    )

__all__ = [
    "DPSGD",
    "DPSGDSettings",
    "Effects",
    "Evaluation",
    "HeadSettings",
    "PrivateHead",
    "PrivateModel",
    "Teachers",
    "decide_folder",
    "open_private",
    "save_private",
]
