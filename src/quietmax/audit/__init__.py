"""Does the claim survive: lower bounds on epsilon and mu for a mechanism and for a training run; measured stability."""

from quietmax.audit import training
from quietmax.audit.distinguish import distinguish
from quietmax.audit.intervals import CONFIDENCE
from quietmax.audit.invariant import InvariantCheck, InvariantReport, invariant, invariant_of_model
from quietmax.audit.mechanism import mechanism
from quietmax.audit.neighbours import Neighbours, Reach, worst_case
from quietmax.audit.plot import Finding, plot_findings
from quietmax.audit.report import AuditReport, Verdict
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
