"""Write Adult as a user's own table: adult.csv with a header and all 48,842 rows, and its schema adult.toml.

    python benchmarks/adult_table.py FOLDER

The official files must be in the data folder (QUIETMAX_DATA).
"""

from __future__ import annotations

import sys
from pathlib import Path

from quietmax.data import Schema
from quietmax.data.readers import _ADULT_CLASSES, _ADULT_COLUMNS, _ADULT_LABEL, adult_table
from quietmax.data.registry import dataset


def adult_schema() -> Schema:
    """Return the public facts about Adult as an owner would declare them for `adult_table`."""
    facts = {name: each for name, each in _ADULT_COLUMNS.items() if name != "fnlwgt"}
    return Schema(
        label=_ADULT_LABEL,
        classes=_ADULT_CLASSES,
        bounds={name: each for name, each in facts.items() if not isinstance(each, str)},
        scales={"capital-gain": "log", "capital-loss": "log"},
        categories={name: tuple(each.split(", ")) for name, each in facts.items() if isinstance(each, str)},
        ignore=("fnlwgt",),
    )


def write_adult(folder: Path) -> Path:
    """Write both files and return the path of the table."""
    path = folder / "adult.csv"
    adult_table(dataset("adult").directory()).to_csv(path, index=False)
    path.with_suffix(".toml").write_text(adult_schema().to_toml(), encoding="utf-8")
    return path


if __name__ == "__main__":
    print(write_adult(Path(sys.argv[1])))
