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
from quietmax.audit.report import AuditReport, Finding, Verdict, plot_findings
from quietmax.audit.stability import StabilityReport, audit_stability
from quietmax.audit.training import TRAINING_CONFIDENCE, audit_training, label_score, mislabelled

__all__ = [
    "CONFIDENCE",
    "TRAINING_CONFIDENCE",
    "AuditReport",
    "Finding",
    "InvariantCheck",
    "InvariantReport",
    "Neighbours",
    "ScoreChange",
    "StabilityReport",
    "Verdict",
    "audit_invariant",
    "audit_mechanism",
    "audit_model_invariant",
    "audit_stability",
    "audit_training",
    "distinguish",
    "label_score",
    "mislabelled",
    "plot_findings",
    "worst_case_neighbours",
]
