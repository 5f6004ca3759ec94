"""Audit private estimators by repetition, on training sets made to be told apart, with all and with half of the noise.

Each row of the table on the page about audits is a claim, audited once per seed with `audit_worst_case` and its
self-test. (The released weights of a head are audited in one run, by `one_run_audit.py`.) Results are stored one by
one, so the command may be interrupted and started again. Remove stored results to measure them anew. All of them take
about five minutes on one core.

    python benchmarks/worst_case_audit.py [--quick] [--only dpsgd] [--output docs/results/worst-case-audit.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quietmax.audit import AuditReport, audit_worst_case
from quietmax.audit.bounds import self_tested
from quietmax.audit.training import WORST_CASES, WorstCase

CONFIDENCE, DELTA = 0.99, 1e-5


@dataclass(frozen=True)
class Row:
    """A row of the table: a claim, and how often it is audited."""

    name: str
    estimator: WorstCase
    samples: int
    seeds: int
    options: dict[str, Any] = field(default_factory=dict)

    def stored(self, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the results of this row."""
        return [each for each in results if (each["row"], each["options"]) == (self.name, self.options)]


ROWS = (
    Row("teachers, 4 queries", "teachers", 100_000, 20, {"epsilon": 1.0, "queries": 4}),
    Row("teachers, 100 queries", "teachers", 100_000, 5, {"epsilon": 1.0, "queries": 100}),
    Row("head, 1 query", "head-query", 100_000, 20, {"epsilon": 2.0, "queries": 1}),
    Row("head, 4 queries", "head-query", 100_000, 20, {"epsilon": 2.0, "queries": 4}),
    Row("DP-SGD, full batches", "dpsgd", 10_000, 2, {"epsilon": 1.0, "sampling_rate": 1.0}),
    Row("DP-SGD, sampling rate 0.5", "dpsgd", 10_000, 3, {"epsilon": 1.0, "sampling_rate": 0.5}),
    Row("DP-SGD, sampling rate 0.5", "dpsgd", 10_000, 3, {"epsilon": 8.0, "sampling_rate": 0.5}),
    Row("DP-SGD, sampling rate 0.1", "dpsgd", 40_000, 3, {"epsilon": 1.0, "sampling_rate": 0.1}),
)


def audited(row: Row, seed: int) -> dict[str, Any]:
    """Audit a row with all and with half of the noise, and return what is stored."""
    started = time.perf_counter()
    reports: dict[float, AuditReport] = {}

    def audit(share: float) -> AuditReport:
        reports[share] = audit_worst_case(
            row.estimator,
            samples=row.samples,
            noise_share=share,
            confidence=CONFIDENCE,
            delta=DELTA,
            seed=seed,
            **row.options,
        )
        return reports[share]

    report = self_tested(audit)
    return {
        "row": row.name,
        "estimator": row.estimator,
        "options": row.options,
        "seed": seed,
        "samples": row.samples,
        "definition": report.definition,
        "claimed": report.claimed,
        "verdict": report.verdict,
        **_found(report),
        "half_noise": {**_found(reports[0.5]), "power": report.self_test.power} if report.self_test else None,
        "seconds": round(time.perf_counter() - started, 1),
    }


def _found(report: AuditReport) -> dict[str, Any]:
    counts = [report.details[f"event_{each}"] for each in ("where_likely", "where_unlikely", "trials")]
    return {"lower_bound": report.lower_bound, "delta": report.delta, "counts": counts}


def table(results: list[dict[str, Any]]) -> list[str]:
    """Return the rows of the table on the page, in Markdown."""
    lines = []
    for row in ROWS:
        found = row.stored(results)
        half = [each["half_noise"] for each in found if each["half_noise"] is not None]
        if not half or len(half) < len(found):
            continue
        claimed, samples = found[0]["claimed"], found[0]["samples"]
        cells = (
            row.name,
            f"{'mu' if found[0]['definition'] == 'gaussian' else 'epsilon'} {claimed:.3g}",
            f"{samples:,}",
            _range([each["lower_bound"] for each in found]),
            _range([each["lower_bound"] for each in half]),
            f"{sum(each['lower_bound'] > claimed for each in half)} of {len(half)}",
            _power(min(each["power"] for each in half)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _range(values: list[float]) -> str:
    low, high = (
        f"{value:.1f}" if max(values) >= 10 else f"{value:.2f}" for value in (min(values), max(values))
    )
    return low if low == high else f"{low} to {high}"


def _power(power: float) -> str:
    return "1.0" if power > 0.995 else f"{power:.2f}"


def main() -> None:
    """Run what is not stored yet, store it and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed and few samples; nothing is stored")
    parser.add_argument("--only", nargs="*", choices=WORST_CASES, default=WORST_CASES)
    parser.add_argument("--output", type=Path, default=Path("docs/results/worst-case-audit.json"))
    options = parser.parse_args()
    rows = [row for row in ROWS if row.estimator in options.only]
    if options.quick:
        print("\n".join(table([audited(replace(row, samples=500), 0) for row in rows])))
        return
    results: list[dict[str, Any]] = []
    if options.output.exists():
        results = json.loads(options.output.read_text(encoding="utf-8"))["audits"]
    for row in rows:
        for seed in range(row.seeds):
            if any(each["seed"] == seed for each in row.stored(results)):
                continue
            results.append(audited(row, seed))
            content = {
                "command": "python benchmarks/worst_case_audit.py",
                "quietmax": version("quietmax"),
                "python": platform.python_version(),
                "torch": version("torch"),
                "confidence": CONFIDENCE,
                "delta": DELTA,
                "audits": results,
            }
            options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            print(row.name, row.options, f"seed {seed}", f"{results[-1]['seconds']:.0f} s", flush=True)
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
