"""Experiments: the paper's evaluation, and the comparison of all methods on one data set or table.

Trials (`grid`) are measured (`evaluate`) by workers (`workers`), stored (`results`) by the runner (`runner`), averaged
(`summary`), compared with the paper (`paper`, `findings`) and shown (`figures`, `report`).
"""

from quietmax.experiments.grid import DataSource, Effort, Group, Trial, reproduction_trials
from quietmax.experiments.inputs import SharedInputs
from quietmax.experiments.methods import Method, PreparedMethod, method_trials
from quietmax.experiments.report import ReportInfo, write_report
from quietmax.experiments.runner import Progress, Run, run_trials
from quietmax.experiments.summary import Summary, summarize

__all__ = [
    "DataSource",
    "Effort",
    "Group",
    "Method",
    "PreparedMethod",
    "Progress",
    "ReportInfo",
    "Run",
    "SharedInputs",
    "Summary",
    "Trial",
    "method_trials",
    "reproduction_trials",
    "run_trials",
    "summarize",
    "write_report",
]
