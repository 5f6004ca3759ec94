"""A table of people, who are spread over all rows, as a frame and as a folder of files."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from quietmax.data.schema import Schema

COLUMNS: dict[str, Any] = {
    "label": "ill",
    "classes": ("no", "yes"),
    "bounds": {"age": (0, 100), "pay": (0, 120)},
    "categories": {"job": ("a", "b", "c")},
}
PLAIN = Schema(**COLUMNS, ignore=("who",))
PERSONS = Schema(**COLUMNS, person="who")
CROSSED = Schema(**COLUMNS, person="who", crosses=(("age", "job"),))


def table_of_people(rows: int, persons: int) -> pd.DataFrame:
    """Return a table of which about every person has several rows."""
    rng = np.random.default_rng(0)
    age = rng.integers(0, 100, rows)
    return pd.DataFrame(
        {
            "who": [f"p{number}" for number in rng.integers(persons, size=rows)],
            "age": age,
            "pay": rng.normal(50, 20, rows).round(2),
            "job": rng.choice(["a", "b", "c"], rows),
            "ill": np.where(age + rng.normal(0, 20, rows) > 50, "yes", "no"),
        }
    )


def files(folder: Path, frame: pd.DataFrame, cuts: list[int], group: int = 333) -> Path:
    """Write a table to Parquet files, cut before these rows, in row groups of this many rows."""
    folder.mkdir()
    for number, (start, stop) in enumerate(itertools.pairwise([0, *cuts, len(frame)])):
        frame.iloc[start:stop].to_parquet(folder / f"{number:02}.parquet", index=False, row_group_size=group)
    return folder
