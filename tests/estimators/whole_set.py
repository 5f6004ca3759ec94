"""A whole training set in memory, as the tests of what an estimator is trained on look at it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from quietmax.estimators.training_set import Basis, Persons, _training_rows, code_before


def training_set(estimator: Any, X: Any, y: Any, groups: Any) -> Any:
    """Read everything that an estimator is trained on: the rows of all pieces, and what is known of them."""
    rows = _training_rows(estimator, X, y, groups)
    pieces = list(rows.pieces)
    records = np.concatenate([piece.records for piece in pieces])
    names = np.concatenate([piece.persons for piece in pieces]) if rows.unit == "person" else None
    persons = None if names is None else Persons.of(names)
    known = {"classes_declared": rows.classes_declared, "encoding": rows.encoding}
    return SimpleNamespace(
        records=records,
        labels=np.concatenate([piece.labels for piece in pieces]),
        names=names,
        persons=persons,
        units=len(records) if persons is None else persons.count,
        conditions=Basis(**known, code_before=code_before({"own_code": rows.own_code}))._data_conditions,
        **known,
        **{name: getattr(rows, name) for name in ("unit", "classes", "own_code")},
    )
