"""Audits: test a claimed guarantee by computing a lower bound on its epsilon or mu, or by searching a counterexample.

>>> from quietmax import audit
>>> from quietmax.accounting import PureCost
>>> from quietmax.mechanisms import Algorithm1
>>> leaky = Algorithm1("laplace", 1 / 7, 1 / 7, logit_sensitivity=0.4, probability_sensitivity=1.0)
>>> audit.audit_mechanism(leaky, classes=3, claimed=PureCost(1.0), samples=4000).verdict
'refuted'
"""

from quietmax.audit.bounds import CONFIDENCE
from quietmax.audit.distinguishing import distinguish
from quietmax.audit.invariant import (
    InvariantCheck,
    InvariantReport,
    audit_invariant,
    audit_model_invariant,
)
from quietmax.audit.mechanism import Neighbours, ScoreChange, audit_mechanism, worst_case_neighbours
from quietmax.audit.noise_share import estimator_with_share, mechanism_with_share
from quietmax.audit.report import AuditReport, Finding, SelfTest, Verdict, plot_findings, self_tested
from quietmax.audit.stability import StabilityReport, audit_stability
from quietmax.audit.training import (
    TRAINING_CONFIDENCE,
    answer_draws,
    audit_training,
    label_score,
    mislabelled,
)
from quietmax.audit.worst_case import audit_worst_case

__all__ = [
    "CONFIDENCE",
    "TRAINING_CONFIDENCE",
    "AuditReport",
    "Finding",
    "InvariantCheck",
    "InvariantReport",
    "Neighbours",
    "ScoreChange",
    "SelfTest",
    "StabilityReport",
    "Verdict",
    "answer_draws",
    "audit_invariant",
    "audit_mechanism",
    "audit_model_invariant",
    "audit_stability",
    "audit_training",
    "audit_worst_case",
    "distinguish",
    "estimator_with_share",
    "label_score",
    "mechanism_with_share",
    "mislabelled",
    "plot_findings",
    "self_tested",
    "worst_case_neighbours",
]
