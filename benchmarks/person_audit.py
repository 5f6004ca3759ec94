"""Audit private training for whole persons: 2,000 persons with 1 to 30 rows, one worst-case person in or out.

The auditor adds a person with 30 identical rows that lie where nobody else's do and have the wrong label. A private
head is trained many times without and many times with all of these rows, with exact noise. From the released weights
the auditor computes one number, their product with the person's own gradient, which is the direction in which the
person moves them, and bounds mu from below. The same audit runs four times: of a head that knows whose row each row is,
of a head trained by records, whose claim is for one record only, of a head on the cells of a table, and of one on cells
with half the noise of its claim.

    python benchmarks/person_audit.py [--times 500] [--epsilon 8] [--output docs/results/person-audit.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from quietmax import HeadSettings, PrivateHead
from quietmax.audit import AuditReport, audit_training
from quietmax.audit.training import estimator_with_share
from quietmax.data import Records
from quietmax.estimators.head.tables import Basis
from quietmax.models.features import TableCells

PERSONS, MOST_ROWS, COLUMNS = 2000, 30, 4
DELTA = 1e-5
ONLY_STEPS: dict[str, Any] = {"centring": 0.0, "calibration": 0.0, "steps": 10}
"""The whole budget goes into ten gradient steps, which the auditor sees only through the released weights."""
TRAINING: dict[str, Any] = ONLY_STEPS | {
    "second_moments": 0.0,
    "learning_rate": 20.0,
    "max_grad_norm": 0.2,
}
TRAINING_ON_CELLS: dict[str, Any] = ONLY_STEPS | {"learning_rate": 2.0, "max_grad_norm": 0.1}
CELLS = TableCells(
    COLUMNS, tuple((column, column + 1) for column in range(COLUMNS)), tuple(range(COLUMNS)), levels=8
)


def people(persons: int = PERSONS, seed: int = 0) -> Records:
    """Persons with 1 to 30 rows; the label follows the first two columns, and the last one is 0 for everybody."""
    generator = np.random.default_rng(seed)
    numbers = np.repeat(np.arange(persons), generator.integers(1, MOST_ROWS + 1, persons))
    features = generator.random((len(numbers), COLUMNS), np.float32)
    features[:, -1] = 0.0
    names = np.array([f"person {number}" for number in numbers], dtype=object)
    labels = (features[:, 0] > features[:, 1]).astype(np.int64)
    return Records("visits", features, labels, classes=2, persons=names)


def worst_case_person() -> Records:
    """A person with 30 identical rows, far along the column in which everybody else is 0, with label 1."""
    features = np.zeros((MOST_ROWS, COLUMNS), np.float32)
    features[:, -1] = 10.0
    names = np.array(["the auditor's person"] * MOST_ROWS, dtype=object)
    return Records("worst case", features, np.ones(MOST_ROWS, np.int64), classes=2, persons=names)


def audit_head(
    records: Records,
    *,
    by_person: bool,
    epsilon: float,
    times: int,
    on_cells: bool = False,
    noise_share: float = 1.0,
    confidence: float = 0.99,
    seed: int | None = None,
) -> AuditReport:
    """Train ``times`` heads without and as many with the worst-case person, and bound mu; exact noise without a seed.

    By person the declared size is the number of persons, by records the number of rows. With a share of the noise the
    claim stays.
    """
    states = itertools.repeat(None) if seed is None else itertools.count(seed)
    size = int(records.units.max()) + 1 if by_person else len(records)

    def fit(given: Records) -> PrivateHead:
        head: PrivateHead = clone(audited).set_params(random_state=next(states))
        # The guarantee covers the weights before they are shrunk by public numbers, which hides the person further.
        with mock.patch.object(Basis, "shrunk", lambda _basis, weights, *_: weights):
            return head.fit(given.features, given.labels, groups=given.persons if by_person else None)

    training = TRAINING_ON_CELLS if on_cells else TRAINING
    features = CELLS if on_cells else "unit-norm"
    audited = PrivateHead(
        epsilon,
        DELTA,
        classes=(0, 1),
        declared_size=size,
        features=features,
        settings=HeadSettings(**training),
    )
    claimed = None
    if noise_share != 1.0:
        honest = fit(records)
        audited, claimed = estimator_with_share(honest, noise_share), honest.guarantee_
    subject = f"private head{' on cells' * on_cells} trained by {'persons' if by_person else 'records'}"
    return audit_training(
        fit,
        along_the_gradient,
        records,
        worst_case_person(),
        claimed,
        method="repeated",
        times=times,
        confidence=confidence,
        delta=DELTA,
        subject=subject + (f" with {noise_share:g} of its noise" if noise_share != 1.0 else ""),
    )


def along_the_gradient(head: PrivateHead, person: Records) -> NDArray[np.float64]:
    """Return the product of the released weights and the direction in which the person moves them.

    All gradients of the person are multiples of (e_y - e_other) f^T, so the product is the margin of their label.
    """
    return np.asarray(head.decision_function(person.features[:1]))


def main() -> None:
    """Run all audits, print them and store them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--times", type=int, default=500, help="trainings without, and as many with, the person"
    )
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--output", type=Path, default=Path("docs/results/person-audit.json"))
    options = parser.parse_args()
    records = people()
    rows = np.bincount(records.units)
    results = []
    for kind in (
        {"by_person": True},
        {"by_person": False},
        {"by_person": True, "on_cells": True},
        {"by_person": True, "on_cells": True, "noise_share": 0.5},
    ):
        started = time.perf_counter()
        report = audit_head(records, epsilon=options.epsilon, times=options.times, **kind)
        seconds = time.perf_counter() - started
        results.append({**report.to_json(), "share": report.share, "seconds": round(seconds, 1)})
        print(
            f"{report.subject}: mu claimed {report.claimed:.4f}, at least {report.lower_bound:.4f}", end=" "
        )
        print(f"({report.share:.2f} of the claim), {report.verdict}, {seconds:.0f} s")
    table = {
        "persons": len(rows),
        "rows": len(records),
        "rows_per_person": [int(rows.min()), int(rows.max())],
        "columns": COLUMNS,
        "canary_rows": MOST_ROWS,
    }
    content = {
        "command": f"python benchmarks/person_audit.py --times {options.times} --epsilon {options.epsilon:g}",
        "python": platform.python_version(),
        "noise": "exact",
        "table": table,
        "settings": {"epsilon": options.epsilon, "delta": DELTA, "features": "unit-norm", **TRAINING},
        "settings_on_cells": {"features": CELLS.to_json(), **TRAINING_ON_CELLS},
        "audits": results,
    }
    options.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
