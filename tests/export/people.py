"""A table with every kind of column that ONNX can read, cells of all sorts, and models of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from quietmax.data.schema import Schema
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.serialization import save_private

SCHEMA = Schema(
    label="y",
    classes=("früh", "spät", "nie"),
    bounds={"age": (0, 100), "gain": (-5, 9999), "hours": (0, 60)},
    scales={"gain": "log"},
    edges={"hours": (20, 40)},
    categories={
        "city": ("Zürich", "New York", "東京", "a|b.*", "NA"),
        "code": ("1", "2", "0.5", "-3", "007", "0"),
        "region": ("Straße", "North", "ﬁx"),
    },
    ignore_case=("region",),
    booleans=("smoker",),
    dates={"joined": ("2000-01-01", "2024-12-31"), "left": ("1900-03-01", "2030-01-01")},
    date_formats={"left": "%d.%m.%Y"},
    missing_values={"age": ("-999", "unknown"), "city": ("none",), "smoker": ("N",)},
    complete=("hours", "code"),
    crosses=(("city", "smoker"), ("age", "region")),
)
MISSING = ["", "?", "NA", "N/A", "null", "NULL", "nan", "NaN"]
NUMBERS: list[Any] = [
    *(0.0, -0.0, 1e-9, 20.0, 39.999, 40.0, 60.0, 99.9, 100.0, -999.0, 1e300, -1e300),
    *(np.inf, -np.inf, np.nan),
]
TEXTS = {
    "city": (
        "Zürich; Zürich;Zürich\u00a0;\u3000New York\n;new york;New  York;東京;京;a|b.*;a;ab;a|bxx;none;"
        f" none ;None;zu\u0308rich;{'x' * 300};😀;Z\u200bürich"
    ),
    "code": (
        "1;1.0;1.; 1.00 ;01;+1;2;0.5;.5;0.50;.5000;-3;-3.0;- 3;3;007;7;0;-0;0.000;0e12;-.0;1e0;10E-1;"
        "5e-1;30e-1;1e5;inf;1.5;11"
    ),
    "region": (
        "Straße;STRASSE;strasse;stra\u017fse;straSSe;Strase;STRA\u1e9eE; straße ;straßße;North;NORTH;nOrtH;north ;"
        "No rth;ﬁx;FIX;fiX;ﬀx;\u212aorth"
    ),
    "smoker": "yes;YES; y;true;True;t;1;1.0;no;No;f;FALSE;0;-0.0;N;n;ye\u017f;maybe;2;yess;1e0;0.5",
    "joined": (
        "2000-01-01;1999-12-31;2024-12-31;2025-01-01;0001-01-01;9999-12-31; 2012-02-29 ;2023-02-29;"
        "2000-02-29;1900-02-29;2024-13-01;2024-00-10;2024-04-31;2024-1-1;0000-01-01;2010-07-04 23:59:59;"
        "2010-07-04T08:30;2010-07-04 08:30:00.123456-11:00;2010-07-04 25:00;20100704;2010-07-04T08:30Z;"
        "2010-07-04 08;4.7.2010;today;2010-07-04x;٢٠١٠-٠٧-٠٤"
    ),
    "left": (
        "01.03.1900;28.02.1900;29.02.1900;29.02.2000;01.01.2030;31.12.2030; 15.06.1999 ;31.04.2000;"
        "2000-01-01;1999.06.15;15/06/1999;15.06.99"
    ),
}
CELLS: dict[str, list[Any]] = {
    "age": NUMBERS,
    "gain": [*NUMBERS, -5.0, 9999.0, 9998.5, -4.999999],
    "hours": NUMBERS,
    **{name: [*MISSING, *cells.split(";")] for name, cells in TEXTS.items()},
}


def random_rows(count: int, seed: int) -> pd.DataFrame:
    """Draw rows whose cells come from `CELLS`, in half of the rows readable ones that are common."""
    generator = np.random.default_rng(seed)
    usual = {"joined": "2012-02-29", "left": "15.06.1999", "smoker": "yes", "code": "2"}
    table = {}
    for name, cells in CELLS.items():
        kind = float if name in ("age", "gain", "hours") else object
        drawn = np.array(cells, dtype=kind)[generator.integers(0, len(cells), count)]
        if kind is float:
            drawn = np.where(generator.random(count) < 0.7, generator.uniform(-20, 120, count), drawn)
        elif name in usual:
            drawn = np.where(generator.random(count) < 0.8, usual[name], drawn)
        table[name] = drawn
    return pd.DataFrame(table)


def readable_rows(count: int, seed: int) -> pd.DataFrame:
    """Draw rows without cells that are errors."""
    rows = random_rows(8 * count, seed)
    return rows[~unreadable(rows)].head(count).reset_index(drop=True)


def unreadable(rows: pd.DataFrame) -> np.ndarray:
    """Return which rows of `random_rows` have a cell that Quietmax refuses."""
    wrong = {
        "smoker": "maybe;2;yess;0.5",
        "joined": "2023-02-29;1900-02-29;2024-13-01;2024-00-10;2024-04-31;2024-1-1;0000-01-01;2010-07-04 25:00;"
        "20100704;2010-07-04 08;4.7.2010;today;2010-07-04x;٢٠١٠-٠٧-٠٤",
        "left": "29.02.1900;31.04.2000;2000-01-01;1999.06.15;15/06/1999;15.06.99",
    }
    return np.any([rows[name].isin(cells.split(";")) for name, cells in wrong.items()], axis=0)


def train(folder: Path, kind: Any = PrivateHead, **settings: Any) -> Path:
    """Train a head, or another estimator, on random rows and save it."""
    rows = readable_rows(1500, seed=1)
    classes = np.array(SCHEMA.classes)
    rows["y"] = classes[np.clip(np.nan_to_num(rows["age"].to_numpy(), nan=0.0) // 34, 0, 2).astype(int)]
    fitted = kind(epsilon=8.0, schema=SCHEMA, declared_size=1500, **settings).fit(rows)
    return save_private(fitted, folder, dataset="people")
