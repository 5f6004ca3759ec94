"""A released model of a table as one HTML file that computes answers without a network."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from html import escape
from pathlib import Path
from typing import Any

from quietmax._io import atomic_write
from quietmax.data.encoding import DateColumn, NumericColumn
from quietmax.estimators.decisions import decision_in_words, threshold_of
from quietmax.estimators.serialization import PrivateModel
from quietmax.export.reading import Reading, open_additive, terms_of, unlisted
from quietmax.export.released import _metadata
from quietmax.spending import DESCRIPTION_FILE

_NOTHING_ELSE = "base-uri 'none'; form-action 'none'"


def export_html(folder: str | Path, file: str | Path) -> None:
    """Write a released model of a table as an HTML file: a form, the answer, its reasons and the guarantee.

    The file needs no network and no Quietmax. Its content security policy allows its own script and style by their
    SHA-256, and nothing else. The script has the function ``answer``, which takes a row as an object of strings, as the
    form has them, and returns ``label``, ``probabilities`` and ``contributions``.

    Parameters
    ----------
    folder : str or Path
        The model folder.
    file : str or Path
        The file to write.
    """
    model, sums, readings = open_additive(folder, "HTML")
    constant, *weights = terms_of(sums)
    costs, defaults = model.costs, dict(sums.encoding.defaults)
    data = {
        "fields": [{**_field(reading), "default": defaults.get(reading.column.name)} for reading in readings],
        "crosses": [(one, other, sums.cells.crossed_size(other)) for one, other in sums.cells.crosses],
        "summands": sums.summands,
        "constant": constant[:, 0].tolist(),
        "weights": [each.tolist() for each in weights],
        "classes": model.classes,
        "threshold": threshold_of(costs) if costs and len(costs) == 2 else None,
        "costs": costs,
        "decision": decision_in_words(costs, model.classes),
        "about": _metadata(model, (Path(folder) / DESCRIPTION_FILE).read_bytes()),
    }
    page = Path(__file__).with_suffix(".html").read_text("utf-8")
    script, style = (
        _hash(re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[0]) for tag in ("script", "style")
    )
    values = {
        "policy": f"default-src 'none'; script-src '{script}'; style-src '{style}'; {_NOTHING_ELSE}",
        "title": escape(f"Prediction of {sums.encoding.label}"),
        "guarantee": "\n".join(f"<p>{escape(line)}</p>" for line in _words(model)),
        "data": json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
    }
    text = re.sub(r"\{\{ (\w+) \}\}", lambda found: values[found[1]], page)
    atomic_write(Path(file), lambda staging: staging.write_text(text, encoding="utf-8"))


def _hash(content: str) -> str:
    return f"sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _words(model: PrivateModel) -> list[str]:
    """Return the guarantee with its strength, what it means, and what it rests on."""
    guarantee = model.guarantee
    return [
        f"{guarantee.summary}.",
        *guarantee.in_words("everything computed from this model"),
        f"{guarantee}",
        *(f"Assumption: {each}" for each in guarantee.assumptions),
    ]


def _field(reading: Reading) -> dict[str, Any]:
    """Return a column as a field of the form, and how its value is read."""
    column = reading.column
    field: dict[str, Any] = {
        "name": column.name,
        "required": not column.missing,
        "kind": "select",
        "missing": reading.missing,
        "coarse": reading.coarse,
        "starts": reading.starts,
        "other": reading.other,
        "codes": [],
        "choices": [],
        "low": None,
        "hint": "",
    }
    if isinstance(column, NumericColumn):
        hint = f"{column.low:,.12g} to {column.high:,.12g} {column.unit}".strip()
        return {
            **field,
            "kind": "number",
            "low": column.low,
            "high": column.high,
            "codes": reading.codes,
            "hint": hint,
        }
    if isinstance(column, DateColumn):
        return {
            **field,
            "kind": "date",
            "low": column.low,
            "high": column.high,
            "hint": f"{column.low} to {column.high}",
        }
    fold, cells = str.casefold if reading.folded else str, dict(reading.words)
    choices = [(word, cells[fold(word)]) for word in column.indicated if word]
    return {**field, "choices": choices, "unlisted": unlisted(column)}
