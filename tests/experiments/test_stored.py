from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

import pytest

from quietmax.errors import InvalidInput
from quietmax.experiments.stored import stored_table, write_table


@dataclass(frozen=True)
class _Row:
    dataset: str
    count: int
    value: float
    perhaps: float | None


def test_rows_survive_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [_Row("a", 1, 0.25, None), _Row("b", 2, 1e-9, 3.0), _Row("a", 3, 1.0, 0.0)]
    write_table([asdict(row) for row in rows], tmp_path / "paper" / "rows.csv")
    monkeypatch.setattr(resources, "files", lambda _: tmp_path)
    assert stored_table(_Row, "rows.csv") == [rows[0], rows[2], rows[1]]
    assert stored_table(_Row, "rows.csv", ["b"]) == [rows[1]]
    with pytest.raises(InvalidInput, match="Nothing is stored for 'c'; stored are a, b"):
        stored_table(_Row, "rows.csv", ["b", "c"])
