"""Membership-inference attacks on anything that answers queries.

>>> import quietmax as qm
>>> from quietmax import attacks
>>> data = qm.load("mnist-5k", records=200)
>>> model = qm.train(data, settings=qm.TrainingSettings(epochs=2))
>>> report = attacks.Threshold(models=2).run(model, data)
>>> report.members, report.nonmembers, report.queries
(200, 200, 400)
"""

from quietmax.attacks.base import (
    Attack,
    FittedAttack,
    LeakageCurve,
    leakage_curve,
    make_attack,
    registered_attacks,
    run_together,
)
from quietmax.attacks.lira import LiRA
from quietmax.attacks.metrics import Estimate, RocCurve
from quietmax.attacks.report import AttackReport, plot_reports
from quietmax.attacks.rmia import RMIA
from quietmax.attacks.shadow import Shadow
from quietmax.attacks.shadow_models import ShadowPool, with_shadow_data
from quietmax.attacks.targets import Endpoint, EndpointError, QueryResult, query_target
from quietmax.attacks.threshold import Threshold

__all__ = [
    "RMIA",
    "Attack",
    "AttackReport",
    "Endpoint",
    "EndpointError",
    "Estimate",
    "FittedAttack",
    "LeakageCurve",
    "LiRA",
    "QueryResult",
    "RocCurve",
    "Shadow",
    "ShadowPool",
    "Threshold",
    "leakage_curve",
    "make_attack",
    "plot_reports",
    "query_target",
    "registered_attacks",
    "run_together",
    "with_shadow_data",
]
