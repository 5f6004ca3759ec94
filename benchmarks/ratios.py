"""The one way benchmarks report a comparison: times of both sides from alternating runs, and their ratio.

`report` prints a line. If QUIETMAX_BENCH_ROWS names a file, it appends a JSON object there, which `benchmarks/run.py`
collects for the page; the line then goes to stderr, as progress.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

ROWS = "QUIETMAX_BENCH_ROWS"


@dataclass(frozen=True)
class Row:
    """One comparison: medians of both sides, the ratio theirs/ours within a run (median, least, largest), the runs."""

    benchmark: str
    case: str
    unit: str
    ours: float
    peer: str | None
    theirs: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    runs: int

    def __str__(self) -> str:
        text = f"{self.case:<46} {self.ours:>11.4g} {self.unit}"
        if self.ratio is None:
            return text
        spread = f"[{self.ratio_low:.2f}, {self.ratio_high:.2f}]"
        return f"{text}; {self.peer} {self.theirs:.4g}; ratio {self.ratio:.2f} {spread}"


def report(
    benchmark: str,
    case: str,
    ours: Sequence[float],
    unit: str,
    *,
    peer: str | None = None,
    theirs: Sequence[float] = (),
) -> Row:
    """Make, print and keep the row of one comparison; run i of both sides was measured next to each other.

    >>> row = report("squares", "ten", [1.0, 2.0, 4.0], "s", peer="loop", theirs=[3.0, 8.0, 8.0])
    ten                                                      2 s; loop 8; ratio 3.00 [2.00, 4.00]
    """
    ratios = [other / mine for mine, other in zip(ours, theirs, strict=True)] if theirs else []
    row = Row(
        benchmark,
        case,
        unit,
        statistics.median(ours),
        peer if theirs else None,
        statistics.median(theirs) if theirs else None,
        statistics.median(ratios) if ratios else None,
        min(ratios, default=None),
        max(ratios, default=None),
        len(ours),
    )
    print(row, file=sys.stderr if ROWS in os.environ else sys.stdout, flush=True)
    if ROWS in os.environ:
        with open(os.environ[ROWS], "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")
    return row
