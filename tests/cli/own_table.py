"""A table of people whose income follows their age, and the options that declare it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SCHEMA = Path(__file__).with_suffix(".toml")
DECLARED = ("--schema", str(SCHEMA))


def write_people(path: Path) -> Path:
    """Write 1,200 people to a CSV file."""
    ages = np.random.default_rng(0).integers(18, 90, 1200)
    rows = [f"{age},{'FM'[age % 2]},{'hi' if age > 50 else 'lo'}" for age in ages]
    path.write_text("\n".join(["age,sex,income", *rows]))
    return path


def add_persons(path: Path, column: str = "id") -> None:
    """Add a column that says whose row it is: 400 persons with three rows each."""
    header, *rows = path.read_text().splitlines()
    path.write_text(
        "\n".join([f"{column},{header}", *(f"p{number % 400},{row}" for number, row in enumerate(rows))])
    )
