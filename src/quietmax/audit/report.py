"""The result of an audit: a lower bound beside the claim, and whether it refutes the claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from quietmax._io import write_figure
from quietmax.accounting.costs import Cost, PureCost
from quietmax.accounting.dpsgd import Schedule
from quietmax.accounting.guarantee import Definition, Guarantee, Unit
from quietmax.audit.bounds import (
    ENOUGH_POWER,
    CountedEvent,
    CountedGuesses,
    EventCounts,
    Parameter,
    SampledSteps,
)
from quietmax.errors import InvalidInput
from quietmax.sensitivity.network import BoundCheck

Floats = NDArray[np.float64]
Verdict = Literal["refuted", "consistent"]
_COLOURS: dict[Verdict, str] = {"refuted": "#c0392b", "consistent": "#1f77b4"}
"""Not green: an audit says nothing about how much the claim allows."""


@dataclass(frozen=True)
class SelfTest:
    """The same audit of the same claim, with a share of the noise that the claim requires."""

    noise_share: float  # The share of the noise; 0.5 is half of it
    lower_bound: float  # What the audit found with that noise
    power: float  # Estimated probability that a repetition with that noise refutes the claim
    samples_needed: int | None = None

    @classmethod
    def of(cls, report: AuditReport, noise_share: float) -> SelfTest:
        """Return what ``report``, of an audit with a share of the noise, says about a repetition."""
        if report.repetition is None:
            raise InvalidInput(f"The audit of {report.subject} counted nothing that its power follows from.")
        power = report.repetition.power()
        needed = None if power >= ENOUGH_POWER else report.repetition.samples_needed()
        return cls(noise_share, report.lower_bound, power, needed)

    @property
    def notices(self) -> bool:
        """Whether a repetition with this noise would refute the claim with probability 0.9 or more."""
        return self.power >= ENOUGH_POWER

    def sentence(self, parameter: str, claimed: float) -> str:
        """Return the result as a sentence about ``parameter``, epsilon or mu, that is ``claimed``."""
        share = "half the noise" if self.noise_share == 0.5 else f"{self.noise_share:g} of the noise"
        would = "would" if self.notices else "would not reliably" if self.power >= 0.5 else "would not"
        side = "above" if self.lower_bound > claimed else "not above"
        said = (
            f"This audit {would} notice {share}: with it, {parameter} is at least {self.lower_bound:.3g}, {side} the "
            f"claim of {claimed:.3g} (power about {self.power:.2g})."
        )
        if self.samples_needed is not None:
            said += f" About {self.samples_needed:,} samples would."
        return said

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name, and whether the noise is noticed."""
        return {
            "noise_share": self.noise_share,
            "notices": self.notices,
            "power": self.power,
            "lower_bound": self.lower_bound,
            "samples_needed": self.samples_needed,
        }


def self_tested(audit: Callable[[float], AuditReport], noise_share: float = 0.5) -> AuditReport:
    """Audit a claim, and if it is consistent, audit it again with less noise: would the audit have noticed?"""
    report = audit(1.0)
    if report.verdict == "refuted":
        return report
    return replace(report, self_test=SelfTest.of(audit(noise_share), noise_share))


@dataclass(frozen=True)
class AuditReport:
    """A lower bound on a privacy parameter beside the claimed value.

    Parameters
    ----------
    subject : str
        What was audited.
    definition : {"pure", "approximate", "gaussian"}
        What ``claimed`` and ``lower_bound`` are: epsilon (pure), epsilon at ``delta`` (approximate) or mu (gaussian).
    claimed : float
        The claimed value.
    lower_bound : float
        A lower bound on the true value, correct with probability ``confidence``.
    confidence : float
        The confidence of the bounds.
    evidence : str
        The distinguishing event in words.
    samples : int
        Number of draws on each input, or of canaries.
    delta : float
        The delta of the two epsilons below.
    epsilon_claimed, epsilon_lower_bound : float
        Claim and bound as epsilon at ``delta``; they equal ``claimed`` and ``lower_bound`` unless the claim is
        Gaussian.
    details : Mapping[str, Any]
        Further figures as JSON values.
    unit : {"record", "person"}
        What the neighbouring inputs differ in: one record, or one person with all rows.
    repetition : CountedEvent, CountedGuesses or None
        Estimates the probability that a repetition of this audit refutes the claim.
    self_test : SelfTest or None
        The same audit with less noise, if it was run.

    Examples
    --------
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
    unit: Unit = "record"
    repetition: CountedEvent | CountedGuesses | None = field(default=None, repr=False, compare=False)
    self_test: SelfTest | None = None

    @property
    def parameter(self) -> Parameter:
        """What ``claimed`` and ``lower_bound`` are: mu of a Gaussian claim, else epsilon."""
        return "mu" if self.definition == "gaussian" else "epsilon"

    @property
    def verdict(self) -> Verdict:
        """`refuted` if the lower bound exceeds the claim, else `consistent`.

        A true claim is refuted with probability at most ``1 - confidence``. `consistent` means that this adversary
        found nothing; it is no proof.
        """
        return "refuted" if self.lower_bound > self.claimed else "consistent"

    @property
    def share(self) -> float:
        """The lower bound divided by the claim: how much of the claim the adversary could show."""
        return self.lower_bound / self.claimed if self.claimed > 0 else float("inf")

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name, as JSON values."""
        return {
            "subject": self.subject,
            "verdict": self.verdict,
            "unit": self.unit,
            "definition": self.definition,
            "claimed": self.claimed,
            "lower_bound": self.lower_bound,
            "confidence": self.confidence,
            "delta": self.delta,
            "epsilon_claimed": self.epsilon_claimed,
            "epsilon_lower_bound": self.epsilon_lower_bound,
            "evidence": self.evidence,
            "samples": self.samples,
            "self_test": None if self.self_test is None else self.self_test.to_json(),
            **self.details,
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of a table: name and value."""
        name = self.parameter
        lines = [
            ("verdict", self.verdict),
            ("unit", f"one {self.unit}"),
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
        if self.self_test is not None:
            tested = self.self_test
            lines.append(
                (
                    f"{name} at least with {tested.noise_share:g} of the noise",
                    f"{tested.lower_bound:.4g}, power {tested.power:.2g}",
                )
            )
        return lines + [
            (key.replace("_", " "), str(value))
            for key, value in self.details.items()
            if isinstance(value, str | int | float)
        ]


@dataclass(frozen=True)
class Claim:
    """The claim that an audit tests."""

    definition: Definition  # The kind of claim
    amount: float  # The claimed epsilon or mu
    extra_delta: float = 0.0  # The delta that comes on top of it
    steps: SampledSteps | None = None

    @classmethod
    def of(cls, claimed: Guarantee | Cost) -> Claim:
        """Return the claim that ``claimed``, a guarantee or a cost, makes.

        >>> Claim.of(PureCost(1.0))
        Claim(definition='pure', amount=1.0, extra_delta=0.0, steps=None)
        """
        if not isinstance(claimed, Guarantee):
            return cls(claimed.measure, claimed.epsilon if isinstance(claimed, PureCost) else claimed.mu)
        if claimed.mu is not None:
            return cls("gaussian", claimed.mu, claimed.extra_delta)
        epsilon = 0.0 if claimed.epsilon is None else claimed.epsilon
        return cls(claimed.definition, epsilon, claimed.at_epsilon(epsilon), _sampled_steps(claimed))

    @property
    def parameter(self) -> Parameter:
        """What is bounded: mu of a Gaussian claim, else epsilon."""
        return "mu" if self.definition == "gaussian" else "epsilon"

    def lower_bound(self, counts: EventCounts, confidence: float) -> float:
        """Return the lower bound on the claimed epsilon or mu that ``counts`` of an event give."""
        if self.steps is not None:
            return self.steps.lower_bound(*counts.limits(confidence), self.extra_delta)
        return counts.lower_bound(self.parameter, self.extra_delta, confidence)

    def rejected(self, p: Floats, q: Floats) -> NDArray[np.bool_]:
        """Return whether events of probability ``p`` on one input and ``q`` on the other contradict the claim."""
        if self.steps is not None:
            return self.steps.rejected(p, q)
        left = np.maximum(p - self.extra_delta, 0.0)
        if self.parameter == "mu":
            return np.asarray(ndtri(left) > ndtri(q) + self.amount)
        return np.asarray(left > np.exp(self.amount) * q)

    def epsilon(self, delta: float) -> float:
        """Return the claimed epsilon; of a Gaussian claim, its epsilon at ``delta``."""
        if self.definition != "gaussian":
            return self.amount
        stated = Guarantee("gaussian", mu=self.amount, because="Under audit.", extra_delta=self.extra_delta)
        return stated.at_delta(delta)

    def delta(self, delta: float) -> float:
        """Return the claim's own delta; of a Gaussian claim, ``delta``."""
        return delta if self.definition == "gaussian" else self.extra_delta


def _sampled_steps(claimed: Guarantee) -> SampledSteps | None:
    """Return the steps that a guarantee of DP-SGD with Poisson samples states; None for any other guarantee."""
    stated = claimed.parameters
    if (stated.get("estimator"), stated.get("analysis"), stated.get("sampling")) != (
        "dpsgd",
        "proven",
        "poisson",
    ):
        return None
    if claimed.definition != "approximate" or claimed.extra_delta:
        return None
    return SampledSteps(
        float(stated["noise_multiplier"]), Schedule(float(stated["sampling_rate"]), int(stated["steps"]))
    )


@dataclass(frozen=True)
class Finding:
    """One bar of a plot: what was found beside what is claimed.

    Parameters
    ----------
    name : str
        What the bar shows.
    found : float
        What the audit found.
    claimed : float
        What is claimed.
    verdict : {"refuted", "consistent"}
        Whether the claim is refuted.
    """

    name: str
    found: float
    claimed: float
    verdict: Verdict

    @classmethod
    def of_report(cls, report: AuditReport) -> Finding:
        """Return the lower bound of ``report`` beside its claim."""
        return cls(
            f"{report.subject}\n{report.parameter}", report.lower_bound, report.claimed, report.verdict
        )

    @classmethod
    def of_check(cls, check: BoundCheck) -> Finding:
        """Return the empirical change of ``check`` beside its bound."""
        return cls(check.quantity.replace("_", " "), check.empirical, check.bound, check.verdict)

    @property
    def multiple(self) -> float:
        """What was found as a multiple of the claim.

        >>> Finding("one logit", 3.0, 2.0, "refuted").multiple
        1.5
        """
        if self.claimed <= 0:
            raise InvalidInput(
                f"Only positive claims can be plotted, got {self.claimed:g} for '{self.name}'."
            )
        return self.found / self.claimed


def plot_findings(findings: Sequence[Finding], path: str | Path, *, title: str = "") -> Path:
    """Plot one bar per finding, as a multiple of its claim."""
    from matplotlib.figure import Figure

    if not findings:
        raise InvalidInput("A plot requires at least one finding, got none.")
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
    axes.set_xlabel("found, as a multiple of the claim (line)")
    axes.set_title(title, loc="left", fontsize="medium")
    return write_figure(figure, path)
