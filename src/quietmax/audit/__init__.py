"""Does the claim survive: lower bounds on epsilon and mu for a mechanism and for a training run; measured stability."""

from quietmax.audit import training
from quietmax.audit.bounds import CONFIDENCE
from quietmax.audit.distinguishing import distinguish
from quietmax.audit.invariant import InvariantCheck, InvariantReport, invariant, invariant_of_model
from quietmax.audit.mechanism import Neighbours, Reach, mechanism, worst_case
from quietmax.audit.report import AuditReport, Finding, Verdict, plot_findings
from quietmax.audit.stability import StabilityReport, stability

__all__ = [
    "CONFIDENCE",
    "AuditReport",
    "Finding",
    "InvariantCheck",
    "InvariantReport",
    "Neighbours",
    "Reach",
    "StabilityReport",
    "Verdict",
    "distinguish",
    "invariant",
    "invariant_of_model",
    "mechanism",
    "plot_findings",
    "stability",
    "training",
    "worst_case",
]
