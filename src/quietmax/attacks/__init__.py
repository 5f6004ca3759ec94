"""Can members be told? Membership-inference attacks that look at released answers from outside.

>>> import quietmax as qm
>>> from quietmax import attacks
>>> data = qm.load("mnist-5k", records=200)
>>> model = qm.train(data, settings=qm.TrainingSettings(epochs=2))
>>> report = attacks.Threshold(models=2).run(model, data)
>>> report.members, report.nonmembers, report.queries
(200, 200, 400)
"""

from quietmax.attacks.base import Attack, Fitted, LeakageCurve, leakage_curve, run_together
from quietmax.attacks.lira import LiRA
from quietmax.attacks.metrics import Estimate, OperatingCurve
from quietmax.attacks.registry import named, registered
from quietmax.attacks.report import AttackReport, plot_reports, summarise
from quietmax.attacks.rmia import RMIA
from quietmax.attacks.shadow import Shadow
from quietmax.attacks.shadow_models import ShadowPool
from quietmax.attacks.targets import Endpoint, EndpointFailed, QueryResult, ask
from quietmax.attacks.threshold import Threshold

__all__ = [
    "RMIA",
    "Attack",
    "AttackReport",
    "Endpoint",
    "EndpointFailed",
    "Estimate",
    "Fitted",
    "LeakageCurve",
    "LiRA",
    "OperatingCurve",
    "QueryResult",
    "Shadow",
    "ShadowPool",
    "Threshold",
    "ask",
    "leakage_curve",
    "named",
    "plot_reports",
    "registered",
    "run_together",
    "summarise",
]
