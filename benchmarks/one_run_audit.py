"""Audit private training in one run: thousands of canaries, whose signals in the released weights are summed.

Every canary has a column or a category of its own, so that its clipped gradient has a direction of its own. Each is put
into the training set by a fair coin. The auditor's signal of a canary is the product of the released weights and that
direction: with constant steps, the sum of all released gradient sums along it. `quietmax.audit.bounds` has the bound.
The same audit runs with three quarters and with half of the noise of the claim. Teachers and mechanisms, whose answers
have no such sums, are audited by draws of their answers at the same confidence.

    python benchmarks/one_run_audit.py [--seeds 5] [--draws 1000000] [--epsilon 8] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from quietmax import DPSGD, DPSGDSettings, HeadSettings, PrivateHead
from quietmax.accounting import GaussianCost, PureCost
from quietmax.audit import AuditReport, audit_mechanism, audit_training, audit_worst_case
from quietmax.audit.distinguishing import mechanism_with_share
from quietmax.audit.training import estimator_with_share
from quietmax.data import Records
from quietmax.mechanisms import GaussianScores, NoisyMax
from quietmax.models.features import Identity, TableCells
from quietmax.sensitivity import ScoreBounds, Sensitivity

DELTA, CONFIDENCE = 1e-5, 0.95
SHARES = (1.0, 0.75, 0.5)
HIDDEN = 8
STEPS: dict[str, Any] = {
    "sampling_rate": 1.0,
    "calibration_steps": 0,
    "decay": 0.0,
    "optimizer": "sgd",
    "l2": 0.0,
    "max_grad_norm": 0.01,
}
PLAIN = STEPS | {"steps": 4, "centring_steps": 0, "learning_rate": 300.0}
HEAD = {"centring": 0.0, "calibration": 0.0, "steps": 10, "max_grad_norm": 0.1}


@dataclass(frozen=True)
class Case:
    """An estimator and its canaries: rows of an identity matrix, with alternating labels."""

    name: str
    canaries: int
    estimator: Callable[..., Any]
    settings: Any
    cells: bool = False
    scale: float = 1.0  # Of the canaries' features
    known: int = (
        0  # Records that are always in, two of opposite labels per canary: they make shares of cells precise
    )
    network: bool = False  # Trained with seeded noise, because the auditor knows its first weights

    def audited(self, epsilon: float, seed: int, noise_share: float) -> AuditReport:
        """Audit one training; the noise is exact, in a network seeded."""
        features = np.eye(self.canaries, dtype=np.float32) * np.float32(self.scale)
        labels = np.arange(self.canaries) % 2
        canaries = Records("canaries", features, labels, classes=2)
        always = Records(
            "known",
            np.tile(features, (self.known, 1)),
            np.repeat(np.arange(self.known) % 2, self.canaries),
            classes=2,
        )
        audited = self.estimator(
            epsilon,
            DELTA,
            features=TableCells(self.canaries, ((0, self.canaries),)) if self.cells else Identity(),
            classes=(0, 1),
            declared_size=self.canaries // 2 + len(always),
            settings=self.settings,
            random_state=seed if self.network else None,
        )
        fit = lambda estimator, given: clone(estimator).fit(given.features, given.labels)  # noqa: E731
        honest = fit(audited, canaries)
        weaker = estimator_with_share(honest, noise_share)

        def score(model: Any, given: Records) -> NDArray[Any]:
            return _moved(self, audited, model, canaries)[: self.canaries] * (2 * given.labels - 1)

        return audit_training(
            partial(fit, weaker),
            score,
            always,
            canaries,
            honest.guarantee_,
            method="summed",
            confidence=CONFIDENCE,
            delta=DELTA,
            seed=seed,
            subject=self.name,
        )


def _moved(case: Case, audited: Any, model: Any, canaries: Records) -> NDArray[Any]:
    """Return how far the margin of class 1 moved along every canary's direction.

    Of a network, the known first weights are taken off. Its signals must not look along upper weights that were
    trained: they know the noise of the canaries inside. So they look along the first ones.
    """
    if not case.network:
        weights = model.model_.weights if isinstance(model, DPSGD) else model.coef_
        return np.asarray(weights[1] - weights[0])
    still = clone(audited).set_params(settings=replace(case.settings, learning_rate=1e-12))
    first = still.fit(canaries.features, canaries.labels).model_.network.kernels
    kernel = (model.model_.network.kernels[0] - first[0])[0].double().numpy()
    if len(first) == 1:
        return np.asarray(kernel[1] - kernel[0])
    upper = first[1][0].double().numpy()
    return np.asarray(kernel @ (upper[1] - upper[0]))


CASES = (
    Case("head on cells", 4000, PrivateHead, HeadSettings(**HEAD, learning_rate=1.0), cells=True),
    Case(
        "head, dense",
        2000,
        PrivateHead,
        HeadSettings(**HEAD, learning_rate=1.0, second_moments=0.0),
    ),
    Case(
        "DP-SGD, linear on cells",
        2000,
        DPSGD,
        DPSGDSettings(**STEPS, hidden=(), steps=40, centring_steps=1, learning_rate=1.0),
        cells=True,
        known=20,
    ),
    Case("DP-SGD, dense", 2000, DPSGD, DPSGDSettings(**PLAIN, hidden=()), scale=4.0, network=True),
    Case(
        "DP-SGD, hidden layer", 2000, DPSGD, DPSGDSettings(**PLAIN, hidden=(HIDDEN,)), scale=4.0, network=True
    ),
)
_ONE = Sensitivity(1.0, "certified", "One record changes one vote.")
BOUNDS = ScoreBounds(_ONE, _ONE)
MECHANISMS = {
    "scores with Gaussian noise": GaussianScores(bounds=BOUNDS, per_query=GaussianCost(1.0)),
    "noisy max, Gaussian noise": NoisyMax("gaussian", bounds=BOUNDS, per_query=GaussianCost(1.0)),
    "exponential mechanism": NoisyMax("exponential", bounds=BOUNDS, per_query=PureCost(1.0)),
    "permute-and-flip": NoisyMax("permute-and-flip", bounds=BOUNDS, per_query=PureCost(1.0)),
}
DRAWS = 1_000_000


def _answers(name: str, draws: int, seed: int, noise_share: float) -> AuditReport:
    """Audit teachers, trained once on either of two neighbouring sets, or a mechanism, by draws of answers."""
    common: dict[str, Any] = {"samples": draws, "confidence": CONFIDENCE, "seed": seed}
    if name == "teachers, 4 queries":
        return audit_worst_case("teachers", epsilon=1.0, queries=4, noise_share=noise_share, **common)
    mechanism = MECHANISMS[name]
    return audit_mechanism(
        mechanism_with_share(mechanism, noise_share), 2, claimed=mechanism.guarantee(2), **common
    )


def measured(name: str, seeds: int, audit: Callable[[int, float], AuditReport]) -> dict[str, Any]:
    """Audit with each share of the noise, once per seed, and return what is stored."""
    started = time.perf_counter()
    reports = {share: [audit(seed, share) for seed in range(seeds)] for share in SHARES}
    honest = reports[1.0]
    stored: dict[str, Any] = {
        "name": name,
        "parameter": honest[0].parameter,
        "claimed": honest[0].claimed,
        "samples": honest[0].samples,
        "distances": [report.details.get("distance_of_means") for report in honest],
        "from_guesses": [report.details.get("mu_at_least_from_guesses") for report in honest],
        "lower_bounds": {
            str(share): [each.lower_bound for each in found] for share, found in reports.items()
        },
    }
    stored["seconds"] = round(time.perf_counter() - started, 1)
    print(line(stored), f"{stored['seconds']:.0f} s", flush=True)
    return stored


def line(stored: dict[str, Any]) -> str:
    """Return the row of the table on the page."""
    claimed, bounds = stored["claimed"], stored["lower_bounds"]
    guessed = [each for each in stored["from_guesses"] if each is not None]
    refuted = [
        f"{sum(each > claimed for each in bounds[str(share)])} of {len(bounds['1.0'])}" for share in SHARES
    ]
    cells = (
        stored["name"],
        f"{stored['parameter']} {claimed:.3g}",
        f"{stored['samples']:,}",
        f"{np.median(bounds['1.0']) / claimed:.2f} ({min(bounds['1.0']) / claimed:.2f} to "
        f"{max(bounds['1.0']) / claimed:.2f})",
        f"{np.median(guessed) / claimed:.2f}" if guessed else "",
        *refuted,
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run all audits, print the table and store it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--draws", type=int, default=DRAWS, help="answers of teachers and of each mechanism")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--output", type=Path, default=Path("docs/results/one-run-audit.json"))
    options = parser.parse_args()
    audits = [measured(case.name, options.seeds, partial(case.audited, options.epsilon)) for case in CASES]
    for name in ("teachers, 4 queries", *MECHANISMS):
        audits.append(measured(name, options.seeds, partial(_answers, name, options.draws)))
    content = {
        "command": f"python benchmarks/one_run_audit.py --seeds {options.seeds} --epsilon {options.epsilon:g}",
        "python": platform.python_version(),
        "confidence": CONFIDENCE,
        "delta": DELTA,
        "epsilon_of_training": options.epsilon,
        "audits": audits,
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
