"""A first schema for a table, proposed from its columns, and what a table loses under a schema: both for its owner.

What is proposed is read from the records and may reveal something about them, so each fact stands under `confirm`.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax.data.cells import _parse_boolean, as_numbers, as_strings, is_missing, parse_date
from quietmax.data.encoding import _KINDS, Losses, NumericColumn, missing_extra, quoted, require_columns
from quietmax.data.schema import _COLUMN_KEYS, _NO_PERSON, Schema, _check_declarations, _declared_column
from quietmax.data.sources import RawTable, as_frame, read_table
from quietmax.errors import InvalidData, InvalidInput, counted

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_module("pandas")

_MAX_CATEGORIES = 50
_BUCKETS = 64
_NEARLY_UNIQUE = 0.9
_MANY_ROWS = 20
_MARKERS = 3
"""At most so many strings among numbers or dates are taken for marks of missing values."""

_USUAL_MARKER = re.compile(
    r"-|--|\.|n/a|n\.a\.|na|#n/a|<na>|none|unknown|missing|k\.a\.|unbekannt|inconnu", re.IGNORECASE
)
"""Strings, in any case, that mark missing values among numbers or dates however few values there are."""

_LARGEST = 1e300
"""Numbers above count as infinite: they are clipped to the bounds of the others."""

_SEPARATORS = ((".", ""), (".", ","), (",", ""), (",", "."), (".", " "), (",", " "), (".", "'"), (",", "'"))

_UNIT = re.compile("[$€£¥%]|USD|EUR|GBP|CHF|k?g|lbs?|c?m|km|°[CF]")
_QUANTITY = re.compile(
    r"[+-]?(?P<before>[^\d\s.,+-]*)\s*[0-9][0-9.,' \u00a0\u202f\u2019]*\s*(?P<after>[^\d\s]*)"
)

_DAYS = [
    "%d.%m.%Y",
    "%d/%m/%Y",
    "%m/%d/%Y",
    "%Y/%m/%d",
    "%d-%m-%Y",
    "%m-%d-%Y",
    "%d.%m.%y",
    "%d/%m/%y",
    "%m/%d/%y",
]
_MONTHS = ("%d %b %Y", "%d-%b-%Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y")
_TIMES = ("", " %H:%M:%S", " %H:%M", " %I:%M %p")

_NUMBERING = (
    "ids?|nr|no|n|num|number|nummer|key|code|ref|uuid|guid|identifier|numero|identifiant|identificador|identificativo|"
    "codigo|codice|kennung|schlussel|schluessel|reference|referencia|riferimento"
)
"""Words for a number or an id: English, German, French, Spanish and Italian, without accents."""

_PEOPLE = (
    "customer|cust|client|person|people|patient|user|member|subject|respondent|participant|employee|student|"
    "borrower|applicant|donor|insured|citizen|household|"
    "kunde|kunden|kundin|patienten|personen|personal|mitglied|mitglieds|nutzer|benutzer|mitarbeiter|teilnehmer|"
    "versicherte|versicherten|antragsteller|kreditnehmer|schuler|schueler|"
    "personne|membre|utilisateur|assure|salarie|employe|eleve|etudiant|adherent|abonne|emprunteur|beneficiaire|"
    "cliente|paciente|persona|miembro|usuario|empleado|alumno|estudiante|socio|asegurado|afiliado|prestatario|"
    "paziente|membro|utente|dipendente|studente|assicurato|iscritto"
)
_FILLERS = "d|de|du|des|del|della|di|la|le|l|el|der|the|of"
_PERSON = re.compile(
    f"(?:{_NUMBERING}|{_FILLERS})*(?:{_PEOPLE})s?(?:{_NUMBERING})*|ssn|mrn|e?mail|emailaddress|courriel|dni|nif|"
    "codicefiscale|matricule|matricola|svnr"
)
_IDENTIFIER = re.compile(
    "(.*[^a-z0-9])?(ids?|nr|no|num|number|nummer|key|uuid|guid|identifier|kennung)|pid|uid|"
    "(id|num|numero|identifiant|identificador|identificativo|n)[^a-z0-9].*"
)
_LONG_INTEGER = 1e11
"""Integers with 12 digits and more; nearly unique ones are ids."""

_POSTAL = re.compile(".*(zip|zipcode|postcode|postalcode|plz)")
_ROW_NUMBER = ("", "index", "row", "rows", "rownumber", "rowno", "unnamed0")
_LEADING_ZERO = re.compile("0[0-9]+")
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}([.,][0-9]{3})+")


_MAX_CLASSES = 100
_LABEL = re.compile(
    "label|target|class|outcome|y|etiquette|cible|classe|zielvariable|ziel|zielgrosse|klasse|"
    "etiqueta|objetivo|clase|etichetta|obiettivo|esito"
)
"""Names of label columns in English, French, German, Spanish and Italian, without accents."""

_OUTCOME = re.compile(
    "churn|churned|attrition|default|defaulted|repaid|response|result|survived|fraud|approved|"
    "converted|diagnosis|readmitted|resultat|rembourse|remboursement|defaut|resilie|resiliation|"
    "decede|diagnostic|fraude|ergebnis|gekundigt|gekuendigt|kundigung|kuendigung|ausgefallen|"
    "zuruckgezahlt|zurueckgezahlt|diagnose|betrug|resultado|reembolsado|pagado|impago|moroso|"
    "diagnostico|risultato|rimborsato|insoluto|insolvente|abbandono|diagnosi|frode"
)
"""Words in the name of a column with few values that say that it is probably the label."""

_MOST_OUTCOMES = 10


# --- One column -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Proposal:
    declared: Mapping[str, Any]  # By the keys of a schema; True: the column is listed there
    because: str  # How that was found
    identifies: int = 0  # 2: its name and values say that it tells people apart; 1: its values alone


def _ignored(because: str, identifies: int = 0) -> _Proposal:
    return _Proposal({"ignore": True}, f"ignored: {because}", identifies)


def _propose(name: str, values: pd.Series[Any]) -> _Proposal:
    if pd.api.types.is_numeric_dtype(values.dtype) and values.dtype.kind != "c":
        numbers = as_numbers(values, name)
        present = numbers[~np.isnan(numbers)]
        if np.isin(present, (0, 1)).all():
            return _empty_or_boolean(len(present), "from the type and the values")
        return _numeric(name, present, "from the values", {})
    counts = _counts(values)
    if counts is None:
        return _ignored("the type of the column cannot be read")
    if all(_parse_boolean(string) is not None for string in counts):
        return _empty_or_boolean(len(counts), "from the values")
    for attempt in (_as_dates, _as_separated_numbers):
        proposal = attempt(name, counts)
        if proposal is not None:
            return proposal
    return _as_strings(name, counts)


def _with_proposals(schema: Schema, proposals: Mapping[str, _Proposal]) -> Schema:
    """Return the schema with the proposals for some columns; what the schema says itself stays."""
    values: dict[str, Any] = {}
    for name, proposal in proposals.items():
        for key, value in proposal.declared.items():
            before = values.get(key, getattr(schema, key))
            if value is True:
                values[key] = (*before, *({name} - set(before)))
            else:
                values[key] = {**before, name: before.get(name, value)}
    return replace(schema, **values)


def _infer_classes(labels: pd.Series[Any]) -> tuple[tuple[str, ...], bool]:
    """Return the distinct labels, and whether some of them differ in case only."""
    counts = _counted(labels)
    spellings = _spellings(counts)
    integers = all(re.fullmatch("-?[0-9]+", string) for string in spellings)
    return tuple(sorted(spellings, key=int if integers else None)), len(spellings) < len(counts)


def _round_outwards(low: float, high: float) -> tuple[float, float]:
    if 0 <= low <= high / 2 or 0 <= low == high:
        return 0.0, _rounded_up(high) if high > 0 else 1.0
    if low / 2 <= high <= 0 or low == high:
        return -_rounded_up(-low), 0.0
    step = 10.0 ** math.floor(math.log10(high - low))
    down, up = (float(f"{number * step:.12g}") for number in (math.floor(low / step), math.ceil(high / step)))
    return (down, up) if down < up else (down, down + step)


def _rounded_up(number: float) -> float:
    """Return the next of 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(number))
    steps = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
    rounded = (float(f"{step * power:.6g}") for step in (*steps, 12))
    return next(bound for bound in rounded if bound >= number)


def _empty_or_boolean(values: int, found: str) -> _Proposal:
    if not values:
        return _ignored("the column is empty")
    return _Proposal({"booleans": True}, f"boolean: {found}")


def _as_dates(_: str, counts: Mapping[str, int]) -> _Proposal | None:
    formats = [None, *(day + time for day in (*_DAYS, *_MONTHS) for time in _TIMES)]
    sample = [*counts][:20]
    fitting: list[tuple[int, str | None, dict[str, datetime], dict[str, int]]] = []
    for pattern in formats:
        if sum(parse_date(string, pattern) is None for string in sample) <= min(_MARKERS, len(sample) - 1):
            moments, markers = _read(counts, partial(parse_date, pattern=pattern))
            if _few(markers, moments):
                fitting.append((len(markers), pattern, moments, markers))
    if not fitting:
        return None
    count, pattern, moments, markers = min(fitting, key=lambda fit: fit[0])
    years = [moment.year for moment in moments.values()]
    declared: dict[str, Any] = {"dates": (f"{min(years):04}-01-01", f"{max(years):04}-12-31")}
    because = "dates: from the values, years rounded outwards"
    if pattern is not None:
        declared["date_formats"] = pattern
        because += f", format {pattern}"
    others = [fit[1] for fit in fitting if fit[0] == count and fit[1] not in (None, pattern)]
    if others:
        because += f" (they also fit {' or '.join(str(other) for other in others)})"
    return _Proposal(*_with_markers(declared, because, markers))


def _as_separated_numbers(name: str, counts: Mapping[str, int]) -> _Proposal | None:
    if any(_LEADING_ZERO.fullmatch(string) for string in counts):
        return None
    unit = _find_unit(counts)
    for decimal, thousands in _SEPARATORS:
        column = NumericColumn(name, 0, 1, decimal=decimal, thousands=thousands, unit=unit)
        numbers, markers = _read(counts, column.parse)
        if not _few(markers, numbers):
            continue
        declared: dict[str, Any] = {}
        found = "from the values"
        if decimal != ".":
            declared["decimal"] = decimal
            found += f", decimal separator '{decimal}'"
        if thousands:
            declared["thousands"] = thousands
            found += f", thousands separator '{thousands}'"
        if unit:
            declared["units"] = unit
            found += f", unit '{unit}'"
        dotted = [string for string in numbers if "." in string or "," in string]
        if dotted and all(_GROUPED.fullmatch(string) for string in dotted):
            found += " (check whether '.' and ',' separate thousands or decimals)"
        present = np.repeat([*numbers.values()], [counts[string] for string in numbers])
        proposal = _numeric(name, present, found, declared)
        return _Proposal(*_with_markers(proposal.declared, proposal.because, markers), proposal.identifies)
    return None


def _find_unit(counts: Mapping[str, int]) -> str:
    found = Counter(
        match["before"] or match["after"] for string in counts if (match := _QUANTITY.fullmatch(string))
    )
    unit, count = max(found.items(), key=lambda item: item[1], default=("", 0))
    return unit if _UNIT.fullmatch(unit) and count >= len(counts) / 2 else ""


def _read(counts: Mapping[str, int], parse: Callable[[str], Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return what the strings stand for, and the number of those that stand for nothing."""
    known: dict[str, Any] = {}
    markers: dict[str, int] = {}
    for string, count in counts.items():
        value = parse(string)
        if value is None:
            markers[string] = count
        else:
            known[string] = value
        if len(markers) > _MARKERS:
            break
    return known, markers


def _few(markers: Mapping[str, int], known: Mapping[str, Any]) -> bool:
    unusual = [marker for marker in markers if not _USUAL_MARKER.fullmatch(marker)]
    return bool(known) and len(markers) <= _MARKERS and (not unusual or len(known) >= 5 * len(markers))


def _with_markers(
    declared: Mapping[str, Any], because: str, markers: Mapping[str, int]
) -> tuple[dict[str, Any], str]:
    if not markers:
        return dict(declared), because
    named = tuple(sorted({*markers, *declared.get("missing_values", ())}))
    return {**declared, "missing_values": named}, f"{because}; other values taken as missing"


def _numeric(name: str, numbers: NDArray[np.float64], found: str, declared: dict[str, Any]) -> _Proposal:
    finite = numbers[np.abs(numbers) < _LARGEST]
    if not len(finite):
        return _ignored("the column is empty")
    distinct = np.unique(finite)
    integers = bool((distinct == np.floor(distinct)).all())
    if integers:
        identifier = _as_identifier(name, len(distinct), len(finite))
        if identifier is not None:
            return identifier
        unique = len(distinct) >= _NEARLY_UNIQUE * len(finite)
        if unique and float(np.median(np.abs(finite))) >= _LONG_INTEGER:
            return _ignored("long numbers, nearly all different, seem to be ids")
        if _letters(name) in _ROW_NUMBER and len(distinct) == len(finite):
            return _ignored("it seems to number the rows")
        if _POSTAL.fullmatch(_letters(name)):
            return _Proposal({"hashed": _BUCKETS}, f"hashed into {_BUCKETS} buckets: from the name")
    sentinels = [number for number in (-9.0, -99.0, -999.0, -9999.0) if distinct[0] == number]
    if sentinels and len(distinct) > 1 and distinct[1] >= 0:
        declared = {**declared, "missing_values": (str(int(sentinels[0])),)}
        found += f"; {sentinels[0]:g} taken as missing"
        finite, distinct = finite[finite >= 0], distinct[1:]
    low, high = _round_outwards(float(distinct[0]), float(distinct[-1]))
    declared = {**declared, "bounds": (low, high)}
    because = f"bounds {low:.15g} to {high:.15g}: {found}, rounded outwards"
    if low == 0 and high >= 1_000 and float(finite.mean()) < high / 20:
        declared["scales"] = "log"
        because += "; log scale, as most values are small"
    return _Proposal(declared, because)


def _as_strings(name: str, counts: Mapping[str, int]) -> _Proposal:
    rows, distinct = sum(counts.values()), len(counts)
    identifier = _as_identifier(name, distinct, rows)
    if identifier is not None and not _is_text(counts):
        return identifier
    nearly_unique = rows >= _MANY_ROWS and distinct >= _NEARLY_UNIQUE * rows
    if nearly_unique or distinct > _MAX_CATEGORIES:
        if _is_text(counts):
            if missing := missing_extra():
                return _ignored(f"free text. {missing}")
            return _Proposal({"text": True}, "free text: long strings with blanks, many of them different")
        if nearly_unique and not _POSTAL.fullmatch(_letters(name)):
            return _ignored("nearly every row has another value")
    spellings = _spellings(counts)
    declared: dict[str, Any] = {"ignore_case": True} if len(spellings) < distinct else {}
    case = ", in any case" if declared else ""
    if len(spellings) > _MAX_CATEGORIES:
        declared["hashed"] = _BUCKETS
        return _Proposal(declared, f"hashed into {_BUCKETS} buckets{case}: many different values")
    declared["categories"] = tuple(sorted(spellings))
    return _Proposal(
        declared, f"categories{case}: from the values; one that only few people have may give them away"
    )


def _is_text(counts: Mapping[str, int]) -> bool:
    strings: Sequence[str] = [*counts]
    blanks = sum(string.count(" ") for string in strings)
    return blanks >= 2 * len(strings) and sum(map(len, strings)) >= 15 * len(strings)


def _spellings(counts: Mapping[str, int]) -> list[str]:
    best: dict[str, str] = {}
    for string in sorted(counts, key=lambda each: (-counts[each], each.isupper(), each)):
        best.setdefault(string.casefold(), string)
    return [*best.values()]


def _is_free_text(values: pd.Series[Any]) -> bool:
    """Return whether a column seems to hold sentences: long strings with blanks, nearly all different."""
    counts = _counts(values) or Counter[str]()
    rows = sum(counts.values())
    several = len(counts) > _MAX_CATEGORIES or (rows >= _MANY_ROWS and len(counts) >= _NEARLY_UNIQUE * rows)
    return several and _is_text(counts)


def _counted(values: pd.Series[Any]) -> Counter[str]:
    strings = as_strings(values)
    return Counter(strings[~is_missing(strings)].tolist())


def _counts(values: pd.Series[Any]) -> Counter[str] | None:
    try:
        return _counted(values)
    except InvalidData:
        return None


def _words(name: str) -> list[str]:
    decomposed = unicodedata.normalize("NFKD", name)
    plain = "".join(letter for letter in decomposed if not unicodedata.combining(letter))
    return re.findall("[a-z0-9]+", re.sub("([a-z0-9])([A-Z])", r"\1 \2", plain).casefold())


def _may_tell_people_apart(name: str) -> bool:
    """Return whether the name of a column says that it may number or name people. No value is looked at."""
    letters = _letters(name)
    if letters in _ROW_NUMBER:
        return False
    return bool(_PERSON.fullmatch(letters) or _IDENTIFIER.fullmatch(" ".join(_words(name))))


def _letters(name: str) -> str:
    return "".join(_words(name))


def _as_identifier(name: str, distinct: int, rows: int) -> _Proposal | None:
    if distinct < min(10, rows / 3) or distinct < rows / 200:
        return None
    if _PERSON.fullmatch(_letters(name)):
        return _ignored("it seems to number or name people", 2)
    separated = " ".join(_words(name))
    if not _IDENTIFIER.fullmatch(separated) or not (separated == "id" or distinct >= rows / 3):
        return None
    if 2 * distinct <= rows:
        return _ignored("it seems to number something that has several rows", 1)
    return _ignored(
        "it seems to number the rows, not people; name it as `person` if each value is one person"
    )


# --- The draft --------------------------------------------------------------------------------------------------------


def draft_schema(table: Any, *, label: str | None = None, person: str | None = None) -> Schema:
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
    Schema
        The proposals; `confirm` names each of them and says how it was found.

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
    >>> draft.person, draft.booleans, draft.classes
    ('patient_id', ('smoker',), ('0', '1'))
    >>> draft.confirm["person"].partition(";")[0]
    'from the name and the values'
    """
    frame = _table(table).frame
    if frame.empty:
        raise InvalidData("The table has no rows.")
    require_columns(frame, [name for name in (label, person) if name is not None])
    if label is not None and label == person:
        raise InvalidInput(f"Column '{label}' cannot be both the label and the person.")
    if label is not None and is_missing(as_strings(frame[label])).all():
        raise InvalidInput(f"The label column '{label}' is empty; the label must have at least two classes.")
    proposals = {str(name): _propose(str(name), frame[name]) for name in frame.columns}
    how: dict[str, str] = {}
    if label is None:
        label, how["label"] = _find_label(frame, proposals)
    if person is None:
        person, how["person"] = _find_person(frame, proposals, label)
    columns = {name: found for name, found in proposals.items() if name not in (label, person)}
    schema = Schema(label=label, person=person)
    if label is not None:
        schema, how["classes"] = _with_classes(schema, frame, label)
    schema = _with_proposals(schema, columns)
    return replace(schema, confirm=_to_confirm(schema, how, columns))


def _to_confirm(schema: Schema, how: Mapping[str, str], columns: Mapping[str, _Proposal]) -> dict[str, Any]:
    """Return how each proposed fact was found, by its key, and by its column."""
    confirm: dict[str, Any] = {key: because for key, because in how.items() if because}
    for name, found in columns.items():
        first = next(key for key in _COLUMN_KEYS if key in found.declared)
        confirm.setdefault(first, {})[name] = found.because
        for key in found.declared:
            confirm.setdefault(key, {}).setdefault(name, f"as said under {first}")
    if schema.label in schema.ignore_case:
        confirm.setdefault("ignore_case", {})[schema.label] = "as said under classes"
    return confirm


def _table(table: Any) -> RawTable:
    if not isinstance(table, str | Path):
        return RawTable(as_frame(table))
    if Path(table).suffix.lower() == ".npz":
        raise InvalidInput("A schema needs named columns: a CSV, TSV or Parquet file, or a frame.")
    return read_table(table)


def _find_label(frame: pd.DataFrame, proposals: Mapping[str, _Proposal]) -> tuple[str | None, str]:
    """Return the column that is probably the label, and why."""
    few = {
        name
        for name, found in proposals.items()
        if "booleans" in found.declared or 2 <= len(found.declared.get("categories", ())) <= _MOST_OUTCOMES
    }
    for name, found in proposals.items():
        if _LABEL.fullmatch(_letters(name)) and not {"ignore", "text"} & found.declared.keys():
            return name, "from the name"
    for name in proposals:
        if name in few and any(map(_OUTCOME.fullmatch, _words(name))):
            return name, "from the name and the few values"
    last = str(frame.columns[-1])
    if {"booleans", "categories"} & proposals[last].declared.keys():
        return last, "the last column, which has few values"
    return None, ""


def _find_person(
    frame: pd.DataFrame, proposals: Mapping[str, _Proposal], label: str | None
) -> tuple[str | None, str]:
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


def _question(frame: pd.DataFrame, proposals: Mapping[str, _Proposal], label: str | None) -> str:
    """Ask about the first column that may tell people apart by its name, and whose values repeat."""
    for name, found in proposals.items():
        if name == label or "booleans" in found.declared or not _may_tell_people_apart(name):
            continue
        if max((_counts(frame[name]) or {"": 0}).values(), default=0) > 1:
            return (
                f"not proposed: is '{name}' the person? Its name says that it may be, and its values repeat. If one "
                f"person can have several rows, name the column that tells people apart: person = {json.dumps(name)}. "
                "Without it, the guarantee holds for one row"
            )
    return ""


def _with_classes(schema: Schema, frame: pd.DataFrame, label: str) -> tuple[Schema, str]:
    classes, ignore_case = _infer_classes(frame[label])
    if len(classes) > _MAX_CLASSES:
        return (
            schema,
            f"not proposed: the label has more than {_MAX_CLASSES} values; name ranges of it as classes",
        )
    because = "from the values of the label" + (", in any case" if ignore_case else "")
    if len(classes) > 2:
        because += "; if one is a misspelling or means unknown, take it out and delete its rows"
    return replace(schema, classes=classes, ignore_case=(label,) if ignore_case else ()), because


# --- The check --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnReport:
    """What a column loses."""

    name: str
    kind: str  # As in `Column.kind`: "numeric", "categorical" and so on
    losses: Losses  # How many of its cells are missing, clipped, unknown or unreadable


@dataclass(frozen=True)
class TableReport:
    """What a table loses when it is read as a schema declares; exact numbers, not for publication."""

    rows: int
    columns: tuple[ColumnReport, ...]  # The columns that become features
    ignored: tuple[str, ...]
    undeclared: tuple[str, ...]  # Columns that the schema says nothing about
    unconfirmed: tuple[str, ...]  # Facts that nobody has confirmed
    classes: dict[str, int]  # Number of rows of each declared class
    unlabelled: int  # Rows with no label, or with one that is not a class
    persons: int | None  # Number of people; None without a `person` column
    most_rows: int  # The largest number of rows of one person
    without_person: int
    first_without_person: int = 0  # Number of the first such row, counted from 1; 0 if there is none
    similar_persons: int = 0  # Names unlike another only in case, blanks or leading zeros
    free_text: tuple[str, ...] = ()  # Hashed columns that seem to hold free text
    unnamed: int = 0  # Columns of a text file without a name, which are ignored
    missing_extra: str | None = None  # How to install the sentence encoder where text columns lack it

    @property
    def problems(self) -> tuple[str, ...]:
        """Why training would be refused, one or two sentences each."""
        found = []
        if self.unconfirmed:
            found.append(
                "The schema is a draft: training refuses it until each line under [confirm] is checked and deleted."
            )
        if self.undeclared:
            found.append(f"The schema does not say what {quoted(self.undeclared, limit=20)} hold.")
        if not self.classes:
            found.append("The schema does not declare the label and its classes.")
        elif self.unlabelled:
            found.append(
                f"{counted(self.unlabelled, 'row has', 'rows have')} no label, or one that is not in `classes`: add "
                "the class there, or delete such rows."
            )
        if self.without_person:
            more = f" (and {self.without_person - 1} more)" if self.without_person > 1 else ""
            found.append(
                f"Row {self.first_without_person}{more} has no value in the person column. {_NO_PERSON}"
            )
        for column in self.columns:
            if column.losses.unreadable:
                what, keys = _KINDS[column.kind]._written_as
                found.append(
                    f"{counted(column.losses.unreadable, 'cell', 'cells')} of column '{column.name}' cannot be read "
                    f"as {what}; {keys} in the schema can say how they are written."
                )
        if self.missing_extra is not None:
            found.append(self.missing_extra)
        return tuple(found)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What training accepts, but what may be a mistake, one or two sentences each."""
        found = []
        if self.similar_persons:
            found.append(
                f"{self.similar_persons:,} names in the person column differ from another one only in case, blanks or "
                "leading zeros. If these are the same people, write each name in one way; where they differ in case, "
                "list the person column in `ignore_case`."
            )
        if self.persons and self.most_rows == 1:
            found.append("Every person has just one row: does the person column tell people apart, or rows?")
        if self.free_text:
            found.append(
                f"The hashed columns {quoted(self.free_text)} seem to hold free text, of which buckets make no useful "
                "features; declare them in `text`, or leave them out by `ignore`."
            )
        if self.unnamed:
            found.append(
                f"{counted(self.unnamed, 'column has', 'columns have')} no name, and will be ignored."
            )
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Return all fields, the problems and the warnings as JSON values."""
        return {**asdict(self), "problems": list(self.problems), "warnings": list(self.warnings)}


def check_table(table: Any, schema: Schema) -> TableReport:
    """Count what a table loses when it is read as a schema declares.

    Parameters
    ----------
    table : str, Path, pandas.DataFrame, pyarrow.Table, polars.DataFrame or object with `__arrow_c_stream__`
        A CSV, TSV or Parquet file, or a frame.
    schema : Schema
        The declarations; some may be missing or unconfirmed.

    Returns
    -------
    TableReport
        `problems` says why training would be refused, `warnings` what may be a mistake.  `columns` has the losses of
        each column, `classes` and `persons` count.  These exact numbers are private.

    Raises
    ------
    DataUnavailable
        If the file cannot be read.
    InvalidInput
        If the schema names columns that do not exist, or contradicts itself.

    Examples
    --------
    >>> import pandas as pd
    >>> people = pd.DataFrame({"age": ["25", "250", "old", None], "ill": ["no", "yes", "no", "no"]})
    >>> report = check_table(people, Schema(label="ill", classes=("no", "yes"), bounds={"age": (0, 100)}))
    >>> report.columns[0].losses
    Losses(missing=1, clipped=1, unknown=0, unreadable=1)
    """
    content = _table(table)
    frame = content.frame
    _check_declarations(frame, schema, schema.label)
    names = [str(name) for name in frame.columns]
    unused = [name for name in names if name in {schema.label, schema.person, *schema.ignore}]
    described = {name: _declared_column(name, schema, content) for name in names if name not in unused}
    columns = tuple(
        ColumnReport(name, column.kind, column._losses(frame[name]))
        for name, column in described.items()
        if column is not None
    )
    classes, unlabelled = _count_classes(content, schema)
    return TableReport(
        rows=len(frame),
        columns=columns,
        ignored=tuple(name for name in unused if name not in (schema.label, schema.person)),
        undeclared=tuple(name for name, column in described.items() if column is None),
        unconfirmed=schema.unconfirmed,
        classes=classes,
        unlabelled=unlabelled,
        free_text=tuple(name for name in schema.hashed if name in described and _is_free_text(frame[name])),
        unnamed=content.unnamed,
        missing_extra=missing_extra() if any(column.kind == "text" for column in columns) else None,
        **_count_persons(content, schema),
    )


def _count_classes(table: RawTable, schema: Schema) -> tuple[dict[str, int], int]:
    if schema.label is None or schema.classes is None:
        return {}, 0
    fold = str.casefold if schema.label in schema.ignore_case else str
    counts = Counter(fold(string) for string in as_strings(table.frame[schema.label]))
    classes = {name: counts[fold(name)] for name in schema.classes}
    return classes, len(table.frame) - sum(classes.values())


def _count_persons(table: RawTable, schema: Schema) -> dict[str, Any]:
    if schema.person is None:
        return {"persons": None, "most_rows": 1, "without_person": 0}
    names = as_strings(table.frame[schema.person])
    absent = is_missing(names)
    fold = str.casefold if schema.person in schema.ignore_case else str
    counts = Counter(fold(name) for name in names[~absent].tolist())
    # In lower case, without blanks and without zeros before a number.
    alike = Counter(re.sub("(?<![0-9])0+(?=[0-9])", "", "".join(name.casefold().split())) for name in counts)
    return {
        "persons": len(counts),
        "most_rows": max(counts.values(), default=0),
        "without_person": int(np.sum(absent)),
        "first_without_person": int(np.argmax(absent)) + 1 if absent.any() else 0,
        "similar_persons": sum(count for count in alike.values() if count > 1),
    }
