"""The privacy card of a model: one page with its guarantee, status, assumptions, spending and observed leakage.

It is made from the model folder and from the attack results that `quietmax attack` writes beside the folder. Attack
results are computed from private records and have no guarantee, so they are not kept in a folder that may be published.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from quietmax._io import atomic_write
from quietmax.accounting.guarantee import Guarantee
from quietmax.errors import DataUnavailable, QuietmaxError, short_message
from quietmax.estimators.serialization import open_private
from quietmax.estimators.validation import SIZE
from quietmax.models.serialization import read_description
from quietmax.spending import ACCOUNT_FILE, FileAccount

_WEIGHTS = "weights.safetensors"
OBSERVED = (
    "Not for publication: computed from the private training records without noise. The guarantee covers the model's "
    "answers, but not these numbers."
)
_PLAIN = (
    "No guarantee: this is an ordinary model. Its answers and its files may reveal who was in the training data. Keep "
    "both private, or answer through a mechanism."
)


@dataclass(frozen=True)
class PrivacyCard:
    """What a reviewer needs to know about one model.

    Parameters
    ----------
    model : str
        The model folder.
    kind : str
        The kind of model.
    dataset : str
        What it was trained on.
    declared_size : int or None
        The number of training records that the folder states.
    guarantee : Guarantee or None
        What is guaranteed; None for an ordinary model.
    delta : float or None
        delta of the budget.
    epsilon_at_delta : float or None
        epsilon of the guarantee at this delta.
    queries : str
        Number of answers that the budget pays for, in words.
    answered : int or None
        Answers charged so far; None if answers are free.
    leakage : tuple of dict
        Results of attacks.
    """

    model: str
    kind: str
    dataset: str
    declared_size: int | None
    guarantee: Guarantee | None
    delta: float | None
    epsilon_at_delta: float | None
    queries: str
    answered: int | None
    leakage: tuple[dict[str, Any], ...]

    @property
    def status(self) -> str:
        """``proven``, ``conditional``, ``refuted``, or ``none`` for an ordinary model."""
        return "none" if self.guarantee is None else self.guarantee.status

    def rows(self) -> list[tuple[str, str]]:
        """Return the card as a list of (name, value)."""
        rows = [("model", self.model), ("kind", self.kind), ("trained on", self.dataset)]
        if self.declared_size is not None:
            rows.append((self._size_name, f"{self.declared_size:,}"))
        rows.append(("status", self.status))
        rows += self._guarantee_rows()
        rows.append(("queries", self.queries))
        if self.answered is not None:
            rows.append(("answers paid for so far", f"{self.answered:,}"))
        rows += self._leakage_rows()
        if self.guarantee is not None:
            rows += [(f"parameter {name}", f"{value}") for name, value in self.guarantee.parameters.items()]
        return rows

    def _guarantee_rows(self) -> list[tuple[str, str]]:
        """Return what is guaranteed and what it assumes."""
        guarantee = self.guarantee
        if guarantee is None:
            return [("guarantee", _PLAIN)]
        rows = [("guarantee", str(guarantee))]
        if self.delta is not None and self.epsilon_at_delta is not None:
            rows.append(("in (epsilon, delta)", f"({self.epsilon_at_delta:.4g}, {self.delta:g})"))
        rows.append(("neighbours", f"{guarantee.neighbours}: training sets that differ by one record"))
        rows.append(("for a source table", _of_source_table(guarantee)))
        assumptions = guarantee.assumptions or ("nothing further",)
        return rows + [("assumes", assumption) for assumption in assumptions]

    def _leakage_rows(self) -> list[tuple[str, str]]:
        """Return what attacks observed."""
        if not self.leakage:
            return [("observed leakage", "not measured; run 'quietmax attack'")]
        rows = []
        for report in self.leakage:
            seen, area = report["leakage"], report["auc"]
            value = f"{seen['value']:.4f} [{seen['low']:.4f}, {seen['high']:.4f}], AUC {area['value']:.4f}"
            rows.append(
                (f"observed leakage, {report['attack']}", f"{value}; answers by {report['released_by']}")
            )
        return [*rows, ("observed leakage", OBSERVED)]

    @property
    def _size_name(self) -> str:
        """Where the number of records comes from: declared, released with noise, or counted."""
        if self.guarantee is None or SIZE.assumptions[0] in self.guarantee.assumptions:
            return "true number of records, assumed to be public"
        noisy = self.guarantee.parameters.get("size_from") == "noisy count"
        return "noisy number of records" if noisy else "declared number of records"

    def to_json(self) -> dict[str, Any]:
        """Return the card as JSON values."""
        return {
            **{name: getattr(self, name) for name in ("model", "kind", "dataset", "declared_size", "status")},
            "guarantee": None if self.guarantee is None else self.guarantee.to_json(),
            "delta": self.delta,
            "epsilon_at_delta": self.epsilon_at_delta,
            "queries": self.queries,
            "answered": self.answered,
            "leakage": list(self.leakage),
            "leakage_caveat": OBSERVED if self.leakage else None,
        }

    def to_html(self) -> str:
        """Return the card as one self-contained HTML page."""
        colour = {"proven": "#1a7f37", "conditional": "#9a6700", "refuted": "#cf222e", "none": "#cf222e"}[
            self.status
        ]
        lines = "\n".join(
            f"<tr><th>{escape(what)}</th><td>{escape(value)}</td></tr>" for what, value in self.rows()
        )
        return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Privacy card: {escape(self.model)}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #1f2328; }}
h1 {{ font-size: 1.4rem; }}
.status {{ display: inline-block; padding: .1rem .7rem; border-radius: 1rem; color: #fff; background: {colour}; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; vertical-align: top; padding: .35rem .5rem; border-bottom: 1px solid #d0d7de; }}
th {{ width: 13rem; font-weight: 600; }}
td {{ overflow-wrap: anywhere; }}
@media (max-width: 40rem) {{ th, td {{ display: block; width: auto; border: 0; padding: .1rem 0; }}
tr {{ display: block; border-bottom: 1px solid #d0d7de; padding: .4rem 0; }} }}
</style>
<h1>Privacy card <span class="status">{escape(self.status)}</span></h1>
<table>
{lines}
</table>
</html>
"""


def _of_source_table(guarantee: Guarantee) -> str:
    """Return what holds for a record of the table from which a split took the training part."""
    twice = {
        "pure": "epsilon doubles",
        "gaussian": "mu doubles",
        "approximate": "epsilon doubles, delta grows by the factor 1 + e^epsilon",
    }[guarantee.definition]
    return (
        "if the training set is the training part of a split, as 'quietmax train' makes it, and no two records of the "
        "table have the same features (with a person column: the same person), one record more or less in the table "
        f"may replace one training record, which counts as a removal and an addition: {twice}; if such copies occur, "
        "one record may move many others, and nothing is claimed for the table"
    )


def leakage_file(folder: str | Path) -> Path:
    """Return the file with the attack results of a model: beside its folder, so that they are not published with it.

    The name contains a digest of the weights, so that another model in the same folder has other results.

    Parameters
    ----------
    folder : str or Path
        The model folder.

    Returns
    -------
    Path
        The file; it need not exist.

    Raises
    ------
    DataUnavailable
        If the weights cannot be read.
    """
    try:
        digest = hashlib.sha256((Path(folder) / _WEIGHTS).read_bytes()).hexdigest()
    except OSError as problem:
        raise DataUnavailable(f"The weights in {folder} cannot be read ({problem.strerror}).") from problem
    return Path(folder).resolve().parent / f"leakage-{digest[:16]}.json"


def record_leakage(folder: str | Path, reports: Sequence[Mapping[str, Any]]) -> None:
    """Store attack results beside the model's folder, for its card.

    Parameters
    ----------
    folder : str or Path
        The model folder.
    reports : sequence of mapping
        Reports of attacks with ``attack``, ``released_by``, ``leakage`` and ``auc``. A newer run of an attack replaces
        the older one.

    Raises
    ------
    DataUnavailable
        If the results stored so far cannot be read.
    QuietmaxError
        If the file cannot be written.
    """
    path = leakage_file(folder)
    kept = {(entry["attack"], entry["released_by"]): entry for entry in _recorded(path)}
    for report in reports:
        entry = {name: report[name] for name in ("attack", "released_by", "leakage", "auc")}
        kept[entry["attack"], entry["released_by"]] = entry
    try:
        text = json.dumps({"caveat": OBSERVED, "attacks": list(kept.values())}, indent=2) + "\n"
        atomic_write(path, lambda staging: staging.write_text(text, encoding="utf-8"))
    except OSError as problem:
        raise QuietmaxError(f"Cannot write the attack results to {path} ({problem.strerror}).") from problem


def _recorded(path: Path) -> list[dict[str, Any]]:
    """Return the stored attack results; none if there is no file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["attacks"] if path.exists() else []
        if not isinstance(found, list) or not all(_is_report(entry) for entry in found):
            raise ValueError("not attack results")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as problem:
        raise DataUnavailable(
            f"The attack results in {path} cannot be read. Delete the file and run the attack again."
        ) from problem
    return found


def _is_report(entry: Any) -> bool:
    """Return whether an entry is one that `record_leakage` writes."""
    return (
        isinstance(entry, dict)
        and all(isinstance(entry.get(name), str) for name in ("attack", "released_by"))
        and all(
            isinstance(entry.get(name), dict)
            and all(type(entry[name].get(part)) in (int, float) for part in ("value", "low", "high"))
            for name in ("leakage", "auc")
        )
    )


def read_card(folder: str | Path) -> PrivacyCard:
    """Read the privacy card of a model.

    Parameters
    ----------
    folder : str or Path
        The model folder.

    Returns
    -------
    PrivacyCard
        The card.

    Raises
    ------
    DataUnavailable
        If the folder or its attack results are missing or damaged.
    """
    place = Path(folder)
    description = read_description(place)
    account = place / ACCOUNT_FILE
    answered = FileAccount(account).answered if account.exists() else None
    leakage = tuple(_recorded(leakage_file(place)))
    try:
        delta, size, queries = (_number(description, name) for name in ("delta", "declared_size", "queries"))
        guarantee = open_private(place).guarantee if "guarantee" in description else None
        card = PrivacyCard(
            model=str(place),
            kind=str(description.get("kind")),
            dataset=str(description.get("dataset", "unknown")),
            declared_size=None if size is None else int(size),
            guarantee=guarantee,
            delta=delta,
            epsilon_at_delta=guarantee.at_delta(delta) if guarantee is not None and delta else None,
            queries="any number"
            if queries is None and guarantee is not None
            else f"{queries or 'no budget'}",
            answered=answered,
            leakage=leakage,
        )
        card.rows()  # a value of a wrong type is noticed here, and not when the card is shown
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as problem:
        raise DataUnavailable(
            f"The model in {place} is damaged ({short_message(problem)}). Train it again or restore a copy."
        ) from problem
    return card


def _number(description: Mapping[str, Any], name: str) -> float | None:
    """Return a number that is not negative, or None if there is none."""
    value = description.get(name)
    if value is None or (type(value) in (int, float) and 0 <= value < math.inf):
        return value
    raise ValueError(f"{name} must be a number, at least 0")
