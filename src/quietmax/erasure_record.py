"""The record of an erasure: what released models may still tell about a person who leaves, for the person and the file.

It names nobody. Which models the person may have been in follows from the rules that their folders state.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from fractions import Fraction
from html import escape
from pathlib import Path
from string import Template
from typing import Literal

import numpy as np

from quietmax.accounting.costs import GaussianCost, root_rounded_up
from quietmax.accounting.guarantee import Guarantee
from quietmax.data.cells import as_string
from quietmax.data.records import Records, is_held_out
from quietmax.errors import InvalidInput
from quietmax.estimators.evaluation import are_free, read_evaluations
from quietmax.estimators.head.update import prior_of
from quietmax.estimators.serialization import PrivateModel, open_private
from quietmax.estimators.series import Facts, rule_of, versions_of
from quietmax.privacy_card import read_card

_ADD_UP = "Costs of models add up; a series costs as much as its most expensive cohort (THEORY 3.17)."
_NO_LIMIT = "No guarantee: its answers and files may reveal who was in the training data. Take it out of use."
_OPEN = "Their limits add up, and this page cannot state the sum: the ledger of the service counts it."
_PAGE = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class ModelRecord:
    """What is known about a person and one model."""

    model: str  # The model folder
    trained_on: Literal["maybe", "no"]  # Whether the person's rows were in its training
    because: str  # How that is known
    guarantee: Guarantee | None  # Of the model, its evaluations and its series. None: an ordinary model
    series: frozenset[str] = (
        frozenset()
    )  # Of all versions of its series up to it, if its evaluations were free

    @property
    def in_words(self) -> str:
        """What it tells about the person at most."""
        what = "this model" if len(self.series) < 2 else "this model and its earlier versions"
        return _NO_LIMIT if self.guarantee is None else " ".join(self.guarantee.in_words(what))


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
    series: frozenset[str] = frozenset()  # dear evaluations are in no later version's guarantee: they add up
    if "cohort" in facts and are_free(model.guarantee, read_evaluations(folder, model)):
        series = frozenset(each.digest for each in prior_of(model).versions)
    return ModelRecord(card.model, "no" if no else "maybe", because, guarantee, series)


def _name_in(model: PrivateModel, name: str, place: str) -> str:
    """Return how the table of a model writes a person; an error if it has numbers and the name is written otherwise."""
    assert model.encoding is not None
    numbers = {"int": int, "uin": int, "flo": float, "dou": float}
    number = numbers.get(str(model.encoding.person_type)[:3])
    with suppress(ValueError, OverflowError):
        if number is None or as_string(number(name)) == name:
            return name.casefold() if model.encoding.person_ignores_case else name
    raise InvalidInput(
        f"`person` must be a number as in the person column of {place}, without zeros before it."
    )


def _left_out(model: PrivateModel, facts: Facts, name: str) -> tuple[bool, str]:
    """Return whether the rules of a model leave out a person for sure, and what is known."""
    if model.holdout is not None:
        features, label = np.zeros((1, 0), np.float32), np.zeros(1, np.int64)
        alone = Records("", features, label, 1, persons=np.array([name], dtype=object))
        if is_held_out(alone, model.holdout)[0]:
            return True, "It held this person out of training; an evaluation may have counted the person."
    if "cohort" not in facts:
        return False, "It was trained on all people of its table who were not held out."
    rule = rule_of(facts)
    cohorts = [*(each.cohort for each in versions_of(facts)), facts["cohort"]["name"]]
    shown = f"it and its earlier versions were trained on {', '.join(dict.fromkeys(cohorts))}."
    if rule.column is not None:
        return False, f"A person is in one cohort by {rule.by}; {shown}"
    own = int(rule.of_persons([name.encode("utf-8", "surrogatepass")])[0])
    return own not in map(rule.number, cohorts), f"The person is in part {own} of {rule.by}; {shown}"


def together(records: Sequence[ModelRecord]) -> Guarantee | None:
    """Return what all models together guarantee: a series counts once, others add up. None: no such limit is known."""
    distinct = {
        each.series or each.model: each.guarantee
        for each in records
        if not any(each.series and each.series < other.series for other in records)
    }
    known = [each for each in distinct.values() if each is not None and each.definition != "approximate"]
    if not known or len(known) < len(distinct) or any(each.status == "refuted" for each in known):
        return None
    total = GaussianCost(
        root_rounded_up(sum((each.cost.as_gaussian().amount for each in known), Fraction(0)))
    )
    status: Literal["proven", "conditional"] = "proven"
    if any(each.status != "proven" for each in known):
        status = "conditional"
    unit: Literal["person", "record"] = "person" if all(each.unit == "person" for each in known) else "record"
    return Guarantee.of(total, status=status, because=_ADD_UP, unit=unit)


def in_words(records: Sequence[ModelRecord]) -> list[str]:
    """Return what all models together tell about the person at most."""
    if not records:
        return ["No released model was named."]
    total = together(records)
    return [_OPEN] if total is None else total.in_words("all these models")


def to_html(records: Sequence[ModelRecord], entry: str) -> str:
    """Return the page for the person and for the file; `entry` names the person's entry on the list."""
    cells = ((each.trained_on, each.because, each.in_words) for each in records)
    rows = "".join(
        f"<tr><th>{escape(each.model)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n"
        for each, row in zip(records, cells, strict=True)
    )
    limits = "".join(f"<p>{escape(each)}</p>\n" for each in in_words(records))
    return _PAGE.substitute(entry=escape(entry), day=date.today().isoformat(), rows=rows, limits=limits)
