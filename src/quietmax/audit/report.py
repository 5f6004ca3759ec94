"""What an audit says: a lower bound beside the claim, and whether the claim survives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from quietmax._io import write_figure
from quietmax.accounting.costs import Cost, PureCost
from quietmax.accounting.guarantee import Definition, Guarantee
from quietmax.audit.bounds import Parameter
from quietmax.errors import InvalidInput
from quietmax.sensitivity.empirical import BoundCheck

Verdict = Literal["refuted", "consistent"]


@dataclass(frozen=True)
class AuditReport:
    """A lower bound on the privacy parameter of ``subject``, true with the stated ``confidence``, beside the claim.

    ``definition`` says what ``claimed`` and ``lower_bound`` count: epsilon (pure, or approximate: at ``delta``) or mu
    (gaussian). The two figures of ``epsilon`` are those at ``delta``; unless the claim is Gaussian they repeat the
    former. ``evidence`` is the distinguishing event in words; ``samples`` the number of draws per world, or of
    canaries. ``details`` are further figures as JSON values.

    `refuted`: the bound exceeds the claim, so the claim is false unless an event of probability ``1 - confidence``
    occurred. `consistent`: this adversary found nothing; that is no proof.

    >>> AuditReport("coin", "pure", 1.0, 1.5, 0.999, "heads", 100, 0.0, 1.0, 1.5).verdict
    'refuted'
    """

    subject: str
    definition: Definition
    claimed: float
    lower_bound: float
    confidence: float
    evidence: str
    samples: int
    delta: float
    epsilon_claimed: float
    epsilon_lower_bound: float
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """`refuted` if the lower bound exceeds the claim, else `consistent`."""
        return "refuted" if self.lower_bound > self.claimed else "consistent"

    @property
    def share(self) -> float:
        """The lower bound as a part of the claim: how much of it the adversary could show."""
        return self.lower_bound / self.claimed if self.claimed > 0 else float("inf")

    def to_json(self) -> dict[str, Any]:
        """All fields by name, as JSON values."""
        return {
            "subject": self.subject,
            "verdict": self.verdict,
            "definition": self.definition,
            "claimed": self.claimed,
            "lower_bound": self.lower_bound,
            "confidence": self.confidence,
            "delta": self.delta,
            "epsilon_claimed": self.epsilon_claimed,
            "epsilon_lower_bound": self.epsilon_lower_bound,
            "evidence": self.evidence,
            "samples": self.samples,
            **self.details,
        }

    def rows(self) -> list[tuple[str, str]]:
        """The report as lines of a table: what, and its value."""
        name = "mu" if self.definition == "gaussian" else "epsilon"
        lines = [
            ("verdict", self.verdict),
            (f"{name} claimed", f"{self.claimed:.4g}"),
            (f"{name} at least", f"{self.lower_bound:.4g}"),
        ]
        if self.definition == "gaussian":
            lines += [
                (f"epsilon claimed at delta {self.delta:g}", f"{self.epsilon_claimed:.4g}"),
                (f"epsilon at least at delta {self.delta:g}", f"{self.epsilon_lower_bound:.4g}"),
            ]
        elif self.delta:
            lines.append(("at delta", f"{self.delta:g}"))
        lines += [
            ("confidence", f"{self.confidence:.10g}"),
            ("evidence", self.evidence),
            ("samples", f"{self.samples:,}"),
        ]
        return lines + [
            (key.replace("_", " "), str(value))
            for key, value in self.details.items()
            if isinstance(value, str | int | float)
        ]


@dataclass(frozen=True)
class Claim:
    """What is to be tested: its definition, its epsilon or mu, and the delta that comes on top of it."""

    definition: Definition
    amount: float
    extra_delta: float = 0.0

    @classmethod
    def of(cls, claimed: Guarantee | Cost) -> Claim:
        """Read the claim off a guarantee or a cost.

        >>> Claim.of(PureCost(1.0))
        Claim(definition='pure', amount=1.0, extra_delta=0.0)
        """
        if not isinstance(claimed, Guarantee):
            return cls(claimed.measure, claimed.epsilon if isinstance(claimed, PureCost) else claimed.mu)
        if claimed.mu is not None:
            return cls("gaussian", claimed.mu, claimed.extra_delta)
        epsilon = 0.0 if claimed.epsilon is None else claimed.epsilon
        return cls(claimed.definition, epsilon, claimed.at_epsilon(epsilon))

    @property
    def parameter(self) -> Parameter:
        """What is bounded: mu of a Gaussian claim, else epsilon."""
        return "mu" if self.definition == "gaussian" else "epsilon"

    def epsilon(self, delta: float) -> float:
        """The claimed epsilon: the claim itself, or of a Gaussian claim its epsilon at ``delta``."""
        if self.definition != "gaussian":
            return self.amount
        stated = Guarantee("gaussian", mu=self.amount, because="Under audit.", extra_delta=self.extra_delta)
        return stated.at_delta(delta)

    def delta(self, delta: float) -> float:
        """The delta of the epsilon figures: the claim's own, or of a Gaussian claim ``delta``."""
        return delta if self.definition == "gaussian" else self.extra_delta


_COLOURS: dict[Verdict, str] = {"refuted": "#c0392b", "consistent": "#2e7d4f"}


@dataclass(frozen=True)
class Finding:
    """One bar: what was ``found`` for ``name``, beside what is ``claimed``."""

    name: str
    found: float
    claimed: float
    verdict: Verdict

    @classmethod
    def of_report(cls, report: AuditReport) -> Finding:
        """The lower bound of an audit beside the claim."""
        parameter = "mu" if report.definition == "gaussian" else "epsilon"
        return cls(f"{report.subject}\n{parameter}", report.lower_bound, report.claimed, report.verdict)

    @classmethod
    def of_check(cls, check: BoundCheck) -> Finding:
        """An observed change beside a bound."""
        return cls(check.quantity.replace("_", " "), check.empirical, check.bound, check.verdict)

    @property
    def multiple(self) -> float:
        """What was found as a multiple of the claim.

        >>> Finding("one logit", 3.0, 2.0, "refuted").multiple
        1.5
        """
        if self.claimed <= 0:
            raise InvalidInput(
                f"A claim of {self.claimed:g} cannot be drawn to scale; audit a positive one, or print it instead."
            )
        return self.found / self.claimed


def plot_findings(findings: Sequence[Finding], path: str | Path, *, title: str = "") -> Path:
    """Draw one bar per finding, with a line at 1 where the claim stands, and write them to ``path``."""
    from matplotlib.figure import Figure

    if not findings:
        raise InvalidInput("There is no finding to plot; give at least one.")
    multiples = [finding.multiple for finding in findings]
    figure = Figure(figsize=(6.4, 1.4 + 0.6 * len(findings)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(findings))
    axes.barh(places, multiples, height=0.6, color=[_COLOURS[finding.verdict] for finding in findings])
    axes.axvline(1.0, color="black", linewidth=1.2)
    for place, finding, multiple in zip(places, findings, multiples, strict=True):
        text = f"{finding.found:.3g} of {finding.claimed:.3g}: {finding.verdict}"
        axes.annotate(text, (multiple, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, [finding.name for finding in findings])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * max(1.0, *multiples))
    axes.set_xlabel("found, as a multiple of what is claimed (line)")
    axes.set_title(title, loc="left", fontsize="medium")
    return write_figure(figure, path)
