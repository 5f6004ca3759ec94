"""Audits: test a claimed guarantee by computing a lower bound on its epsilon or mu, or by searching a counterexample.

>>> from quietmax import audit
>>> from quietmax.accounting import PureCost
>>> from quietmax.mechanisms import Algorithm1
>>> leaky = Algorithm1("laplace", 1 / 7, 1 / 7, logit_sensitivity=0.4, probability_sensitivity=1.0)
>>> audit.audit_mechanism(leaky, classes=3, claimed=PureCost(1.0), samples=4000).verdict
'refuted'
"""

from quietmax.audit.bounds import AuditReport
from quietmax.audit.distinguishing import Neighbours, audit_mechanism, distinguish, mechanism_with_share
from quietmax.audit.invariant import audit_invariant
from quietmax.audit.stability import audit_stability
from quietmax.audit.training import (
    audit_training,
    audit_worst_case,
    label_score,
    mislabelled,
)

__all__ = [
    "AuditReport",
    "Neighbours",
    "audit_invariant",
    "audit_mechanism",
    "audit_stability",
    "audit_training",
    "audit_worst_case",
    "distinguish",
    "label_score",
    "mechanism_with_share",
    "mislabelled",
]
