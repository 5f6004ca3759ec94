"""A small table that grows from month to month, for tests of series."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from quietmax import PrivateHead
from quietmax.data import Schema

SCHEMA = Schema(
    label="ill",
    classes=("no", "yes"),
    person="person",
    bounds={"age": (0, 100), "income": (0, 1)},
    categories={"sex": ("f", "m")},
    dates={"visit": ("2026-01-01", "2026-12-31")},
    ignore=("visit",),
    cohort="visit:month",
)
MONTHS = tuple(f"2026-{month:02d}" for month in range(1, 5))
PER_MONTH = 200


def visits(seed: int = 0) -> pd.DataFrame:
    """People of four months; each third one comes back in the next month."""
    generator = np.random.default_rng(seed)
    parts = []
    for month, name in enumerate(MONTHS):
        persons = [f"{month}-{number}" for number in range(PER_MONTH)]
        persons += [f"{month - 1}-{number}" for number in range(0, PER_MONTH, 3)] if month else []
        count = len(persons)
        age, income = generator.uniform(0, 100, count), generator.uniform(0, 1, count)
        ill = np.where(age / 100 + income + generator.normal(0, 0.2, count) > 1, "yes", "no")
        sex = generator.choice(["f", "m"], count)
        parts.append(
            pd.DataFrame(
                {
                    "person": persons,
                    "visit": f"{name}-15",
                    "age": age,
                    "income": income,
                    "sex": sex,
                    "ill": ill,
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def head(**arguments: Any) -> PrivateHead:
    """A head with a large budget and seeded noise."""
    return PrivateHead(**{"epsilon": 4.0, "schema": SCHEMA, "random_state": 3, **arguments})


def series(table: pd.DataFrame, *names: str, **arguments: Any) -> PrivateHead:
    """A series of versions on these cohorts."""
    found = head(**arguments).fit(table, cohort=names[0])
    for name in names[1:]:
        found.update(table, cohort=name)
    return found
