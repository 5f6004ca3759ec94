"""The record of an erasure: what released models may still tell about a person who leaves, for the person and the file.

It names nobody. Which models the person may have been in follows from the rules that their folders state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Literal

import numpy as np

from quietmax.accounting.costs import GaussianCost, root_rounded_up
from quietmax.accounting.guarantee import Guarantee
from quietmax.data.cells import as_string
from quietmax.data.records import Records, is_held_out
from quietmax.errors import InvalidInput
from quietmax.estimators.head.update import prior_of
from quietmax.estimators.serialization import PrivateModel, open_private
from quietmax.estimators.series import Facts, rule_of, versions_of
from quietmax.privacy_card import read_card

_NO_LIMIT = [
    "It has no guarantee: its answers and files may reveal who was in the training data. Take it out of use."
]
_OPEN = "Their limits add up, and this page cannot state the sum: the ledger of the service counts it."
_PAGE = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class ModelRecord:
    """What is known about a person and one model."""

    model: str  # The model folder
    trained_on: Literal["maybe", "no"]  # Whether the person's rows were in its training
    because: str  # How that is known
    guarantee: Guarantee | None  # Of the model, its evaluations and its series. None: an ordinary model
    series: frozenset[str] = frozenset()  # Digests of all versions of its series up to it

    @property
    def in_words(self) -> list[str]:
        """What it tells about the person at most."""
        if self.guarantee is None:
            return _NO_LIMIT
        return self.guarantee.in_words(
            "this model" if len(self.series) < 2 else "this model and its earlier versions"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        summary = "none" if self.guarantee is None else self.guarantee.summary
        stated = {name: getattr(self, name) for name in ("model", "trained_on", "because", "in_words")}
        return {**stated, "guarantee": summary}


def model_record(folder: str | Path, person: str) -> ModelRecord:
    """Return what a model folder says about a person, whose value of the `person` column is given as a string."""
    card = read_card(folder)
    guarantee = card.released or card.guarantee
    if card.person_column is None:
        because = "It does not know people: it is an ordinary model, or was trained without a person column."
        return ModelRecord(card.model, "maybe", because, guarantee)
    model = open_private(folder)
    facts = model.guarantee.parameters
    no, because = _left_out(model, facts, _name_in(model, as_string(person), card.model))
    if not no and facts.get("erasure_list"):
        because += " People who were on the erasure list by then were left out."
    series = frozenset(each.digest for each in prior_of(model).versions) if "cohort" in facts else frozenset()
    return ModelRecord(card.model, "no" if no else "maybe", because, guarantee, series)


def _name_in(model: PrivateModel, name: str, place: str) -> str:
    """Return how the table of a model writes a person; an error if it has numbers and the name is written otherwise."""
    assert model.encoding is not None
    kind = model.encoding.person_type or ""
    number = {"i": int, "u": int, "f": float, "d": float}.get(kind[:1])
    if number is not None and kind != "date":
        try:
            written = as_string(number(name))
        except (ValueError, OverflowError):
            written = ""
        if written != name:
            raise InvalidInput(
                f"`person` must be a number, without zeros before it, as in the person column of {place}."
            )
    return name.casefold() if model.encoding.person_ignores_case else name


def _left_out(model: PrivateModel, facts: Facts, name: str) -> tuple[bool, str]:
    """Return whether the rules of a model leave out a person for sure, and what is known."""
    if model.holdout is not None:
        alone = Records("", np.zeros((1, 0)), np.zeros(1), 1, persons=np.array([name], dtype=object))
        if is_held_out(alone, model.holdout)[0]:
            return True, (
                f"It held this person out (a share of {model.holdout.share:g}, by a keyed hash). An evaluation may "
                "have counted the person; the limits cover it."
            )
    if "cohort" not in facts:
        return False, "It was trained on all people of its table who were not held out."
    rule = rule_of(facts)
    cohorts = [*(each.cohort for each in versions_of(facts)), facts["cohort"]["name"]]
    shown = ", ".join(dict.fromkeys(cohorts))
    if rule.column is not None:
        return (
            False,
            f"It and its earlier versions were trained on these cohorts of {rule.by}, one per person: {shown}.",
        )
    own = int(rule.of_persons([name.encode("utf-8", "surrogatepass")])[0])
    if own not in map(rule.number, cohorts):
        return (
            True,
            f"The person is in part {own} of {rule.by}; it and its earlier versions were trained on {shown}.",
        )
    return False, f"The person is in part {own} of {rule.by}, on which it or an earlier version was trained."


def together(records: Sequence[ModelRecord]) -> Guarantee | None:
    """Return what all models together guarantee: a series counts once, others add up. None: no such limit is known."""
    newest = [
        each for each in records if not any(each.series and each.series < other.series for other in records)
    ]
    distinct = {each.series or each.model: each.guarantee for each in newest}
    known = [each for each in distinct.values() if each is not None and each.definition != "approximate"]
    if not known or len(known) < len(distinct) or any(each.status == "refuted" for each in known):
        return None
    mu = root_rounded_up(sum(each.cost.as_gaussian().amount for each in known))
    proven = all(each.status == "proven" for each in known)
    unit = "person" if all(each.unit == "person" for each in known) else "record"
    because = (
        "Costs of different models add up; a series costs as much as its most expensive cohort (THEORY 3.17)."
    )
    return Guarantee.of(
        GaussianCost(mu), status="proven" if proven else "conditional", because=because, unit=unit
    )


def in_words(records: Sequence[ModelRecord]) -> list[str]:
    """Return what all models together tell about the person at most."""
    if not records:
        return ["No released model was named."]
    total = together(records)
    return [_OPEN] if total is None else total.in_words("all these models")


def to_html(records: Sequence[ModelRecord], entry: str) -> str:
    """Return the page for the person and for the file; `entry` names the person's entry on the list."""
    rows = "".join(
        f"<tr><th>{escape(each.model)}</th><td>{'no' if each.trained_on == 'no' else 'perhaps'}</td>"
        f"<td>{escape(each.because)}</td><td>{escape(' '.join(each.in_words))}</td></tr>\n"
        for each in records
    )
    limits = "".join(f"<p>{escape(each)}</p>\n" for each in in_words(records))
    return _PAGE.substitute(entry=escape(entry), day=date.today().isoformat(), rows=rows, limits=limits)
