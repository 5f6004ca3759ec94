"""What a column seems to hold: proposals for a schema, read from the records.

A proposal is not a public fact.  The owner of the table confirms it, or the guarantee becomes conditional.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax.data.cells import as_numbers, as_strings, is_missing, parse_boolean, parse_date
from quietmax.data.encoding import NumericColumn
from quietmax.data.schema import Schema
from quietmax.data.text import missing_extra
from quietmax.errors import InvalidData

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_module("pandas")

MAX_CATEGORIES = 50
BUCKETS = 64
_NEARLY_UNIQUE = 0.9
_MANY_ROWS = 20
_MARKERS = 3
"""At most so many strings among numbers or dates are taken for marks of missing values."""

_USUAL_MARKERS = frozenset(
    (
        "-",
        "--",
        ".",
        "n/a",
        "n.a.",
        "na",
        "#n/a",
        "<na>",
        "none",
        "unknown",
        "missing",
        "k.a.",
        "unbekannt",
        "inconnu",
    )
)
"""Strings, in any case, that mark missing values among numbers or dates however few values there are."""

_LARGEST = 1e300
"""Numbers above count as infinite: they are clipped to the bounds of the others."""

_SEPARATORS = ((".", ""), (".", ","), (",", ""), (",", "."), (".", " "), (",", " "), (".", "'"), (",", "'"))
"""Pairs of decimal and thousands separators, in the order in which they are tried."""

_UNITS = (
    "$",
    "€",
    "£",
    "¥",
    "%",
    "USD",
    "EUR",
    "GBP",
    "CHF",
    "kg",
    "g",
    "lb",
    "lbs",
    "cm",
    "m",
    "km",
    "°C",
    "°F",
)
_QUANTITY = re.compile(
    r"[+-]?(?P<before>[^\d\s.,+-]*)\s*[0-9][0-9.,' \u00a0\u202f\u2019]*\s*(?P<after>[^\d\s]*)"
)

_DAYS = (
    "%d.%m.%Y",
    "%d/%m/%Y",
    "%m/%d/%Y",
    "%Y/%m/%d",
    "%d-%m-%Y",
    "%m-%d-%Y",
    "%d.%m.%y",
    "%d/%m/%y",
    "%m/%d/%y",
)
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
    f"(?:{_NUMBERING}|{_FILLERS})*(?:{_PEOPLE})s?(?:{_NUMBERING})*|ssn|e?mail|emailaddress|courriel|dni|nif|"
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


@dataclass(frozen=True)
class Proposal:
    """What a column seems to hold."""

    declared: Mapping[str, Any] = field(default_factory=dict)
    because: str = ""
    identifies: int = 0


def propose(name: str, values: pd.Series[Any]) -> Proposal:
    """Propose a declaration for a column."""
    if _has_numbers(values):
        numbers = as_numbers(values, name)
        present = numbers[~np.isnan(numbers)]
        if np.isin(present, (0, 1)).all():
            return _empty_or_boolean(len(present), "from the type and the values")
        return _numeric(name, present, "from the values", {})
    try:
        strings = as_strings(values)
    except InvalidData:
        return Proposal({"ignore": True}, "ignored: the type of the column cannot be read")
    counts = Counter(strings[~is_missing(strings)].tolist())
    if all(parse_boolean(string) >= 0 for string in counts):
        return _empty_or_boolean(len(counts), "from the values")
    for attempt in (_as_dates, _as_separated_numbers):
        proposal = attempt(name, counts)
        if proposal is not None:
            return proposal
    return _as_strings(name, counts)


def with_proposals(schema: Schema, proposals: Mapping[str, Proposal]) -> Schema:
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


def infer_classes(labels: NDArray[np.object_]) -> tuple[tuple[str, ...], bool]:
    """Return the distinct labels, and whether some of them differ in case only."""
    counts = Counter(labels.tolist())
    spellings = _spellings(counts)
    integers = all(re.fullmatch("-?[0-9]+", string) for string in spellings)
    return tuple(sorted(spellings, key=int if integers else None)), len(spellings) < len(counts)


def round_outwards(low: float, high: float) -> tuple[float, float]:
    """Return round bounds around two numbers."""
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


def _has_numbers(values: pd.Series[Any]) -> bool:
    """Return whether the type of the column is one of numbers or booleans."""
    return bool(pd.api.types.is_numeric_dtype(values.dtype)) and values.dtype.kind != "c"


def _empty_or_boolean(values: int, found: str) -> Proposal:
    if not values:
        return Proposal({"ignore": True}, "ignored: the column is empty")
    return Proposal({"booleans": True}, f"boolean: {found}")


def _as_dates(_: str, counts: Mapping[str, int]) -> Proposal | None:
    """Propose dates if the strings are dates in one format."""
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
    return Proposal(*_with_markers(declared, because, markers))


def _as_separated_numbers(name: str, counts: Mapping[str, int]) -> Proposal | None:
    """Propose numbers if the strings are numbers with one pair of separators."""
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
        return Proposal(*_with_markers(proposal.declared, proposal.because, markers), proposal.identifies)
    return None


def _find_unit(counts: Mapping[str, int]) -> str:
    """Return the currency sign or unit that stands beside most of the numbers, or nothing."""
    found = Counter(
        match["before"] or match["after"] for string in counts if (match := _QUANTITY.fullmatch(string))
    )
    unit, count = max(found.items(), key=lambda item: item[1], default=("", 0))
    return unit if unit in _UNITS and count >= len(counts) / 2 else ""


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
    """Return whether so few strings could not be read that they may mark missing values."""
    unusual = [marker for marker in markers if marker.casefold() not in _USUAL_MARKERS]
    return bool(known) and len(markers) <= _MARKERS and (not unusual or len(known) >= 5 * len(markers))


def _with_markers(
    declared: Mapping[str, Any], because: str, markers: Mapping[str, int]
) -> tuple[dict[str, Any], str]:
    """Add strings that could not be read as marks of missing values."""
    if not markers:
        return dict(declared), because
    named = tuple(sorted({*markers, *declared.get("missing_values", ())}))
    return {**declared, "missing_values": named}, f"{because}; other values taken as missing"


def _numeric(name: str, numbers: NDArray[np.float64], found: str, declared: dict[str, Any]) -> Proposal:
    """Propose bounds for numbers, or that they identify somebody."""
    finite = numbers[np.abs(numbers) < _LARGEST]
    if not len(finite):
        return Proposal({"ignore": True}, "ignored: the column is empty")
    distinct = np.unique(finite)
    integers = bool((distinct == np.floor(distinct)).all())
    if integers:
        identifier = _as_identifier(name, len(distinct), len(finite))
        if identifier is not None:
            return identifier
        unique = len(distinct) >= _NEARLY_UNIQUE * len(finite)
        if unique and float(np.median(np.abs(finite))) >= _LONG_INTEGER:
            return Proposal({"ignore": True}, "ignored: long numbers, nearly all different, seem to be ids")
        if _letters(name) in _ROW_NUMBER and len(distinct) == len(finite):
            return Proposal({"ignore": True}, "ignored: it seems to number the rows")
        if _POSTAL.fullmatch(_letters(name)):
            return Proposal({"hashed": BUCKETS}, f"hashed into {BUCKETS} buckets: from the name")
    sentinels = [number for number in (-9.0, -99.0, -999.0, -9999.0) if distinct[0] == number]
    if sentinels and len(distinct) > 1 and distinct[1] >= 0:
        declared = {**declared, "missing_values": (str(int(sentinels[0])),)}
        found += f"; {sentinels[0]:g} taken as missing"
        finite, distinct = finite[finite >= 0], distinct[1:]
    low, high = round_outwards(float(distinct[0]), float(distinct[-1]))
    declared = {**declared, "bounds": (low, high)}
    because = f"bounds {low:.15g} to {high:.15g}: {found}, rounded outwards"
    if low == 0 and high >= 1_000 and float(finite.mean()) < high / 20:
        declared["scales"] = "log"
        because += "; log scale, as most values are small"
    return Proposal(declared, because)


def _as_strings(name: str, counts: Mapping[str, int]) -> Proposal:
    """Propose categories or buckets for strings, or to ignore them."""
    rows, distinct = sum(counts.values()), len(counts)
    identifier = _as_identifier(name, distinct, rows)
    if identifier is not None and not _is_text(counts):
        return identifier
    nearly_unique = rows >= _MANY_ROWS and distinct >= _NEARLY_UNIQUE * rows
    if nearly_unique or distinct > MAX_CATEGORIES:
        if _is_text(counts):
            return _as_text()
        if nearly_unique and not _POSTAL.fullmatch(_letters(name)):
            return Proposal({"ignore": True}, "ignored: nearly every row has another value")
    spellings = _spellings(counts)
    declared: dict[str, Any] = {"ignore_case": True} if len(spellings) < distinct else {}
    case = ", in any case" if declared else ""
    if len(spellings) > MAX_CATEGORIES:
        declared["hashed"] = BUCKETS
        return Proposal(declared, f"hashed into {BUCKETS} buckets{case}: many different values")
    declared["categories"] = tuple(sorted(spellings))
    return Proposal(
        declared, f"categories{case}: from the values; one that only few people have may give them away"
    )


def _as_text() -> Proposal:
    """Propose free text if the sentence encoder is installed, else to ignore the column."""
    missing = missing_extra()
    if missing is None:
        return Proposal({"text": True}, "free text: long strings with blanks, many of them different")
    return Proposal({"ignore": True}, f"ignored: free text. {missing}")


def _is_text(counts: Mapping[str, int]) -> bool:
    """Return whether strings look like sentences: long and with several blanks inside."""
    strings: Sequence[str] = [*counts]
    blanks = sum(string.count(" ") for string in strings)
    return blanks >= 2 * len(strings) and sum(map(len, strings)) >= 15 * len(strings)


def _spellings(counts: Mapping[str, int]) -> list[str]:
    """Return the strings, and of those that differ in case only the most frequent one."""
    best: dict[str, str] = {}
    for string in sorted(counts, key=lambda each: (-counts[each], each.isupper(), each)):
        best.setdefault(string.casefold(), string)
    return [*best.values()]


def is_free_text(values: pd.Series[Any]) -> bool:
    """Return whether a column seems to hold sentences: long strings with blanks, nearly all different."""
    try:
        strings = as_strings(values)
    except InvalidData:
        return False
    counts = Counter(strings[~is_missing(strings)].tolist())
    rows = sum(counts.values())
    several = len(counts) > MAX_CATEGORIES or (rows >= _MANY_ROWS and len(counts) >= _NEARLY_UNIQUE * rows)
    return several and _is_text(counts)


def words(name: str) -> list[str]:
    """Return the words of a column's name, in lower case and without accents."""
    decomposed = unicodedata.normalize("NFKD", name)
    plain = "".join(letter for letter in decomposed if not unicodedata.combining(letter))
    return re.findall("[a-z0-9]+", re.sub("([a-z0-9])([A-Z])", r"\1 \2", plain).casefold())


def may_tell_people_apart(name: str) -> bool:
    """Return whether the name of a column says that it may number or name people. No value is looked at.

    >>> [may_tell_people_apart(name) for name in ("patient_id", "Customer", "id", "age", "row_number")]
    [True, True, True, False, False]
    """
    letters = _letters(name)
    if letters in _ROW_NUMBER:
        return False
    return bool(_PERSON.fullmatch(letters) or _IDENTIFIER.fullmatch(" ".join(words(name))))


def _letters(name: str) -> str:
    return "".join(words(name))


def _as_identifier(name: str, distinct: int, rows: int) -> Proposal | None:
    """Propose to ignore a column whose name and number of values say that it tells people or rows apart."""
    if distinct < min(10, rows / 3) or distinct < rows / 200:
        return None
    if _PERSON.fullmatch(_letters(name)):
        return Proposal({"ignore": True}, "ignored: it seems to number or name people", 2)
    separated = " ".join(words(name))
    if not _IDENTIFIER.fullmatch(separated) or not (separated == "id" or distinct >= rows / 3):
        return None
    if 2 * distinct <= rows:
        return Proposal({"ignore": True}, "ignored: it seems to number something that has several rows", 1)
    because = (
        "ignored: it seems to number the rows, not people; name it as `person` if each value is one person"
    )
    return Proposal({"ignore": True}, because)
