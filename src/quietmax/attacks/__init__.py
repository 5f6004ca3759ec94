"""Membership-inference attacks on anything that answers queries.

>>> import quietmax as qm
>>> from quietmax import attacks
>>> data = qm.load("mnist-5k", records=200)
>>> model = qm.train(data, settings=qm.TrainingSettings(epochs=2))
>>> report = attacks.Threshold(models=2).run(model, data)
>>> report.members, report.nonmembers, report.queries
(200, 200, 400)
"""

from quietmax.attacks.base import Attack, FittedAttack, leakage_curve
from quietmax.attacks.builtin import RMIA, LiRA, Shadow, Threshold
from quietmax.attacks.metrics import AttackReport, Estimate
from quietmax.attacks.shadow_models import ShadowPool
from quietmax.attacks.targets import Endpoint

__all__ = [
    "RMIA",
    "Attack",
    "AttackReport",
    "Endpoint",
    "Estimate",
    "FittedAttack",
    "LiRA",
    "Shadow",
    "ShadowPool",
    "Threshold",
    "leakage_curve",
]
