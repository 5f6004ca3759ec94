"""A first schema for a table, proposed from its columns, for the owner to confirm.

Everything that a draft proposes is read from the records and may reveal something about them.  It stands in the
section `confirm` of the schema, with how it was found, until the owner has checked it and deletes the line.  Every
fact has a line of its own, by the key and the column that declare it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quietmax._lazy import lazy_module
from quietmax.data.cells import as_strings, is_missing
from quietmax.data.encoding import require_columns
from quietmax.data.inference import (
    Proposal,
    infer_classes,
    may_tell_people_apart,
    propose,
    with_proposals,
    words,
)
from quietmax.data.schema import COLUMN_KEYS, Schema
from quietmax.data.tables import as_frame, read_table
from quietmax.errors import InvalidData, InvalidInput

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_module("pandas")

MAX_CLASSES = 100
_LABELS = frozenset(
    {
        "label",
        "target",
        "class",
        "outcome",
        "y",
        "etiquette",
        "cible",
        "classe",
        "zielvariable",
        "ziel",
        "zielgrosse",
        "klasse",
        "etiqueta",
        "objetivo",
        "clase",
        "etichetta",
        "obiettivo",
        "esito",
    }
)
"""Names of label columns in English, French, German, Spanish and Italian, without accents."""

_OUTCOMES = frozenset(
    {
        "churn",
        "churned",
        "attrition",
        "default",
        "defaulted",
        "repaid",
        "response",
        "result",
        "survived",
        "fraud",
        "approved",
        "converted",
        "diagnosis",
        "readmitted",
        "resultat",
        "rembourse",
        "remboursement",
        "defaut",
        "resilie",
        "resiliation",
        "decede",
        "diagnostic",
        "fraude",
        "ergebnis",
        "gekundigt",
        "gekuendigt",
        "kundigung",
        "kuendigung",
        "ausgefallen",
        "zuruckgezahlt",
        "zurueckgezahlt",
        "diagnose",
        "betrug",
        "resultado",
        "reembolsado",
        "pagado",
        "impago",
        "moroso",
        "diagnostico",
        "risultato",
        "rimborsato",
        "insoluto",
        "insolvente",
        "abbandono",
        "diagnosi",
        "frode",
    }
)
"""Words in the name of a column with few values that say that it is probably the label."""

_MOST_OUTCOMES = 10
_HEADER = """\
# A draft. Each line under [confirm] says how a proposal was found in the records. Only facts that would be the same
# without any of these people may stay: check each proposal, correct it if needed, and delete its line under [confirm]
# or, for a fact about a column, under [confirm.bounds] and so on. When all are checked, delete these sections.
"""


@dataclass(frozen=True)
class Draft:
    """A proposed schema.

    Parameters
    ----------
    schema : Schema
        The proposals; `confirm` names each of them and says how it was found.

    Examples
    --------
    >>> people = pd.DataFrame({"age": [17, 90, 45], "ill": ["no", "yes", "no"]})
    >>> draft_schema(people, label="ill").schema.confirm["bounds"]["age"]
    'bounds 0 to 100: from the values, rounded outwards'
    """

    schema: Schema

    def to_toml(self) -> str:
        """Return the draft as the content of a .toml file, with a comment that says what to do with it."""
        missing = "" if self.schema.label else '# label = "..."    the column to predict; and its classes\n'
        return f"{_HEADER}\n{missing}{self.schema.to_toml()}"


def draft_schema(table: Any, *, label: str | None = None, person: str | None = None) -> Draft:
    """Propose a schema for a table.

    Parameters
    ----------
    table : str, Path, pandas.DataFrame, pyarrow.Table, polars.DataFrame or object with `__arrow_c_stream__`
        A CSV, TSV or Parquet file, or a frame.
    label : str, optional
        Name of the label column; by default the draft proposes one.
    person : str, optional
        Name of the column that tells people apart; by default the draft proposes one if a column looks like it.

    Returns
    -------
    Draft

    Raises
    ------
    DataUnavailable
        If the file cannot be read.
    InvalidInput
        If the table has no such column, no rows, or is not a table; if the label column is empty or also the person
        column.

    Examples
    --------
    >>> visits = pd.DataFrame({"patient_id": [1, 1, 2, 3], "smoker": ["Y", "n", "y", ""], "ill": [0, 1, 1, 0]})
    >>> draft = draft_schema(visits, label="ill")
    >>> draft.schema.person, draft.schema.booleans, draft.schema.classes
    ('patient_id', ('smoker',), ('0', '1'))
    """
    frame = _frame(table)
    require_columns(frame, [name for name in (label, person) if name is not None])
    if label is not None and label == person:
        raise InvalidInput(f"Column '{label}' cannot be both the label and the person.")
    if label is not None and is_missing(as_strings(frame[label])).all():
        raise InvalidInput(f"The label column '{label}' is empty; the label must have at least two classes.")
    proposals = {str(name): propose(str(name), frame[name]) for name in frame.columns}
    how: dict[str, str] = {}
    if label is None:
        label, how["label"] = _find_label(frame, proposals)
    if person is None:
        person, how["person"] = _find_person(frame, proposals, label)
    columns = {name: found for name, found in proposals.items() if name not in (label, person)}
    schema = Schema(label=label, person=person)
    if label is not None:
        schema, how["classes"] = _with_classes(schema, frame, label)
    schema = with_proposals(schema, columns)
    return Draft(replace(schema, confirm=_to_confirm(schema, how, columns)))


def _to_confirm(schema: Schema, how: Mapping[str, str], columns: Mapping[str, Proposal]) -> dict[str, Any]:
    """Return how each proposed fact was found, by its key, and by its column."""
    confirm: dict[str, Any] = {key: because for key, because in how.items() if because}
    for name, found in columns.items():
        first = next(key for key in COLUMN_KEYS if key in found.declared)
        confirm.setdefault(first, {})[name] = found.because
        for key in found.declared:
            confirm.setdefault(key, {}).setdefault(name, f"as said under {first}")
    if schema.label in schema.ignore_case:
        confirm.setdefault("ignore_case", {})[schema.label] = "as said under classes"
    return confirm


def _frame(table: Any) -> pd.DataFrame:
    """Return the table as a frame with at least one row."""
    if isinstance(table, str | Path):
        if Path(table).suffix.lower() == ".npz":
            raise InvalidInput("A draft needs named columns: a CSV, TSV or Parquet file, or a frame.")
        return read_table(table).frame
    frame = as_frame(table)
    if frame.empty:
        raise InvalidData("The table has no rows.")
    return frame


def _find_label(frame: pd.DataFrame, proposals: Mapping[str, Proposal]) -> tuple[str | None, str]:
    """Return the column that is probably the label, and why."""
    few = {
        name
        for name, found in proposals.items()
        if "booleans" in found.declared or 2 <= len(found.declared.get("categories", ())) <= _MOST_OUTCOMES
    }
    for name, found in proposals.items():
        if "".join(words(name)) in _LABELS and not {"ignore", "text"} & found.declared.keys():
            return name, "from the name"
    for name in proposals:
        if name in few and _OUTCOMES & {*words(name)}:
            return name, "from the name and the few values"
    last = str(frame.columns[-1])
    if {"booleans", "categories"} & proposals[last].declared.keys():
        return last, "the last column, which has few values"
    return None, ""


def _find_person(
    frame: pd.DataFrame, proposals: Mapping[str, Proposal], label: str | None
) -> tuple[str | None, str]:
    """Return the column that probably tells people apart, and why; or None, and which column may do so."""
    candidates = [name for name, found in proposals.items() if found.identifies and name != label]
    if not candidates:
        return None, _question(frame, proposals, label)
    best = max(candidates, key=lambda name: proposals[name].identifies)
    found = (
        "from the name and the values"
        if proposals[best].identifies == 2
        else "only because the values repeat; the name does not say that they are people"
    )
    return best, (
        f"{found}; it must be the same in all rows of one person. Delete `person` if rows are not people: the "
        "guarantee then holds for one row"
    )


def _question(frame: pd.DataFrame, proposals: Mapping[str, Proposal], label: str | None) -> str:
    """Ask about the first column that may tell people apart by its name, and whose values repeat."""
    for name, found in proposals.items():
        if name == label or "booleans" in found.declared or not may_tell_people_apart(name):
            continue
        if _repeats(frame[name]):
            return (
                f"not proposed: is '{name}' the person? Its name says that it may be, and its values repeat. If one "
                f"person can have several rows, name the column that tells people apart: person = {json.dumps(name)}. "
                "Without it, the guarantee holds for one row"
            )
    return ""


def _repeats(values: pd.Series[Any]) -> bool:
    """Return whether several rows have the same value."""
    try:
        strings = as_strings(values)
    except InvalidData:
        return False
    present = strings[~is_missing(strings)].tolist()
    return len(set(present)) < len(present)


def _with_classes(schema: Schema, frame: pd.DataFrame, label: str) -> tuple[Schema, str]:
    """Return the schema with the classes of the label, and how they were found."""
    strings = as_strings(frame[label])
    present = strings[~is_missing(strings)]
    classes, ignore_case = infer_classes(np.asarray(present, dtype=object))
    if len(classes) > MAX_CLASSES:
        return (
            schema,
            f"not proposed: the label has more than {MAX_CLASSES} values; name ranges of it as classes",
        )
    because = "from the values of the label" + (", in any case" if ignore_case else "")
    if len(classes) > 2:
        because += "; if one is a misspelling or means unknown, take it out and delete its rows"
    return replace(schema, classes=classes, ignore_case=(label,) if ignore_case else ()), because
