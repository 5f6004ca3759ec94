"""Write Adult as a user's own table: adult.csv with a header and all 48,842 rows, and its schema adult.toml.

    python benchmarks/adult_table.py FOLDER

The official files must be in the data folder (QUIETMAX_DATA).
"""

from __future__ import annotations

import sys
from pathlib import Path

from quietmax.data.readers import adult_schema, adult_table
from quietmax.data.registry import dataset


def write_adult(folder: Path) -> Path:
    """Write both files and return the path of the table."""
    path = folder / "adult.csv"
    adult_table(dataset("adult").directory()).to_csv(path, index=False)
    path.with_suffix(".toml").write_text(adult_schema().to_toml(), encoding="utf-8")
    return path


if __name__ == "__main__":
    print(write_adult(Path(sys.argv[1])))
