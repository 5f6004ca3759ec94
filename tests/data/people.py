"""A small table of people, its declarations, and the features that it must become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from quietmax.data import load_records

PEOPLE = """\
name,age,sex,gain,ill
Ann,30,f,10,yes
Bob,,m,0,no
Cid,95,x,1000,no
Dan,40,,?,yes
Eve,20,f,5,no
"""


DECLARED: dict[str, Any] = {
    "label": "ill",
    "classes": ["no", "yes"],
    "bounds": {"age": (20, 60), "gain": (0, 100)},
    "categories": {"sex": ["f", "m"]},
    "ignore": ["name"],
}


FEATURES = np.array(
    [
        [0.25, 0, 1, 0, 0, 0.1, 0],
        [0, 1, 0, 1, 0, 0, 0],
        [1, 0, 0, 0, 0, 1, 0],
        [0.5, 0, 0, 0, 1, 0, 1],
        [0, 0, 1, 0, 0, 0.05, 0],
    ]
)


LABELS = [1, 0, 0, 1, 0]


def written(text: str = PEOPLE, name: str = "people.csv") -> Path:
    """Write a table into the current folder."""
    path = Path(name)
    path.write_text(text, encoding="utf-8")
    return path


def expect_people(path: Path, **options: Any) -> None:
    records = load_records(path, **{**DECLARED, **options})
    np.testing.assert_allclose(records.features, FEATURES, rtol=1e-6)
    assert records.labels.tolist() == LABELS
    assert records.name == "people"
    assert records.encoding is not None
    assert not records.encoding.inferred
    assert records.encoding.feature_names[:3] == ("age", "age missing", "sex=f")
