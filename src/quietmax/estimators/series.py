"""A series of models, each trained on one cohort of a table that grows: its facts, what it costs, and drift.

Each version starts from what the earlier ones released. A person belongs to one cohort, and only the trainings on that
cohort use this person's rows: all versions together cost what those on the most expensive cohort cost (THEORY 3.17).
Trainings on the same cohort add up, as squares of mu. Held-out people are known by the same keyed hash in all versions.
A version's evaluation counts those of its own cohort, and is free as far as it costs no more than its own training.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting.costs import GaussianCost
from quietmax.accounting.guarantee import Guarantee, Status, Unit
from quietmax.data.cohorts import Cohort, CohortRule
from quietmax.data.encoding import Encoding
from quietmax.errors import InvalidInput
from quietmax.estimators.figures import Estimate

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Version:
    """One earlier version of a series, as the facts of a later one state it."""

    version: int
    cohort: str
    mu: float  # What this training alone cost
    digest: str  # Names its weights and all versions before it
    accuracy: Estimate | None = None  # The one that was published when the next version was trained
    status: Status = "proven"  # Of the guarantee of this version and all before it
    evaluations: tuple[tuple[str, float], ...] = ()  # The ids and costs of those that made the accuracy

    def to_json(self) -> dict[str, Any]:
        """Return the version as JSON values."""
        content = {name: getattr(self, name) for name in ("version", "cohort", "mu", "digest")}
        content |= {} if self.accuracy is None else {"accuracy": dict(vars(self.accuracy))}
        content |= {"evaluations": [[*each] for each in self.evaluations]} if self.evaluations else {}
        return content | ({} if self.status == "proven" else {"status": self.status})

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Version:
        """Read a version; raise `InvalidInput` if it is none."""
        try:
            given = dict(content)
            accuracy = given.pop("accuracy", None)
            spent = tuple((str(name), GaussianCost(mu).mu) for name, mu in given.pop("evaluations", ()))
            found = cls(**given, accuracy=accuracy and Estimate(**accuracy), evaluations=spent)
            named = isinstance(found.cohort, str) and type(found.version) is int
            named = named and found.status in ("proven", "conditional")
            if (
                not named
                or not 0.0 < GaussianCost(found.mu).mu < math.inf
                or len(bytes.fromhex(found.digest)) != 32
            ):
                raise ValueError("not a version")
            if sum(GaussianCost(mu).amount for _, mu in spent) > GaussianCost(found.mu).amount:
                raise ValueError("not free")
            if found.accuracy and not 0.0 <= found.accuracy.low <= found.accuracy.high <= 1.0:
                raise ValueError("not an accuracy")
        except (TypeError, ValueError, AttributeError) as problem:
            raise InvalidInput("The series of a model must be a list of its earlier versions.") from problem
        return found


def versions_of(facts: Facts) -> list[Version]:
    """Return the earlier versions of a series; raise `InvalidInput` if they are not numbered 1, 2, ... or unknown."""
    found = [Version.from_json(each) for each in facts.get("series", ())]
    if "cohort" not in facts:
        if found:
            raise InvalidInput("A model that was not trained on a cohort has no series.")
        return found
    rule = rule_of(facts)
    for name in (facts["cohort"]["name"], *(each.cohort for each in found)):
        rule.number(name)
    if [each.version for each in found] != list(range(1, len(found) + 1)):
        raise InvalidInput("The versions of a series must be numbered 1, 2, 3 and so on.")
    return found


def rule_of(facts: Facts) -> CohortRule:
    """Return what says which cohort a person is in."""
    return CohortRule.from_json(facts["cohort"]["rule"])


def series_amount(facts: Facts, own: Fraction) -> Fraction:
    """Return the squared mu of this training and all earlier ones: the largest sum over trainings on one cohort."""
    earlier = versions_of(facts)
    if "cohort" not in facts:
        return own
    amounts = {facts["cohort"]["name"]: own}
    for each in earlier:
        amounts[each.cohort] = amounts.get(each.cohort, Fraction(0)) + GaussianCost(each.mu).amount
    return max(amounts.values())


def is_conditional(facts: Facts) -> bool:
    """Return whether an earlier version, which the guarantee of this one covers too, has a conditional guarantee."""
    return any(each.status == "conditional" for each in versions_of(facts))


def earlier_amount(facts: Facts) -> Fraction:
    """Return the squared mu of earlier trainings on the cohort of this version."""
    same = (each for each in versions_of(facts) if each.cohort == facts["cohort"]["name"])
    return sum((GaussianCost(each.mu).amount for each in same), Fraction(0))


def series_because(facts: Facts) -> str:
    """Return why a series costs no more than its most expensive cohort."""
    if "cohort" not in facts or not facts["series"]:
        return ""
    return " A person is trained on with one cohort only: the most expensive one bounds all versions (THEORY 3.17)."


def series_assumptions(facts: Facts, unit: Unit, encoding: Encoding | None) -> Iterator[str]:
    """Yield what the guarantee of a series rests on."""
    if "cohort" not in facts or not facts["series"]:
        return
    rule = rule_of(facts)
    if unit != "person" or encoding is None:
        yield (
            f"Cohorts are by row, by the rule {rule.by!r}: every row is in the same cohort whenever a version is "
            "trained. A person with rows in several cohorts pays for each of them."
        )
        return
    known = (
        ""
        if rule.column is None
        else (
            ", because all rows of a person, or at least those that decide, are in the table at every training, and "
            "none that would change it is added or deleted later"
        )
    )
    yield (
        f"One person has one cohort: known by column {encoding.person!r} and the rule {rule.by!r}, it is the same "
        f"whenever a version is trained{known}."
    )


def cohort_facts(
    cohort: Cohort, earlier: Sequence[Version], people: float, share_noise: float
) -> dict[str, Any]:
    """Return what the guarantee of a version states of its cohort and of the versions before it."""
    about = {"version": len(earlier) + 1, "people": people, "share_noise": share_noise}
    return {
        "cohort": {"rule": json.loads(json.dumps(cohort.rule.to_json())), "name": cohort.name, **about},
        "series": [each.to_json() for each in earlier],
    }


def version_digest(facts: Facts, arrays: Sequence[NDArray[np.float64]]) -> str:
    """Return a SHA-256 of the weights of a version, its cohort and cost, and the versions before it."""
    sha256 = hashlib.sha256()
    for array in arrays:
        sha256.update(repr(array.shape).encode() + np.ascontiguousarray(array, "<f8").tobytes())
    stated = [facts["cohort"]["name"], facts["mu_version"], [each["digest"] for each in facts["series"]]]
    sha256.update(json.dumps(stated).encode())
    return sha256.hexdigest()


def own_cost(training: Guarantee) -> GaussianCost | None:
    """Return what the training of a version alone cost; None for a model that is no version of a series."""
    return GaussianCost(training.parameters["mu_version"]) if "cohort" in training.parameters else None


def drift(facts: Facts, accuracy: Estimate) -> str | None:
    """Return a warning if the published accuracy of a version is apart from that of the last one that has any."""
    last = next((each for each in reversed(versions_of(facts)) if each.accuracy is not None), None)
    if last is None or last.accuracy is None or accuracy.value is None or last.accuracy.value is None:
        return None
    if accuracy.low <= last.accuracy.high and last.accuracy.low <= accuracy.high:
        return None
    return (
        f"The accuracy on cohort {facts['cohort']['name']!r} is {accuracy}, outside of the interval of version "
        f"{last.version} on cohort {last.cohort!r}, {last.accuracy}: the people or what is predicted have changed."
    )
