"""Measure On-Average-Remove-One stability by retraining, and what noise on the weights does to it.

The quantity is ``E[l(W_-i, x_i) - l(W, x_i)]``, l the cross-entropy, W trained on all records and W_-i without record
i. The paper bounds it by ``2*rho^2/(lam*n)`` (its theorem on the global sensitivity; rho is not a bound, THEORY 2.3).
A corollary concludes that noisy weights are *more* stable. Its proof compares the plain W_-i with the noisy W, so any
noise that raises the loss on x_i looks like stability, and it assumes that noise moves W closer to W_-i: ``||W_-i -
noisy W|| = ||W_-i - W|| - c`` with c > 0.

All three are measured: the quantity as written in the proof; with noise on both networks, as a learning algorithm that
adds noise has it; and the distance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import t as student

from quietmax.attacks.metrics import Estimate
from quietmax.audit.bounds import Verdict, _check_confidence
from quietmax.data.records import Records
from quietmax.errors import InvalidInput
from quietmax.models.stacked import MLP, Progress, TrainingSettings, train_stack
from quietmax.sensitivity.certified import Sensitivity
from quietmax.sensitivity.network import published_sensitivity_for

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class NoisyStability:
    """The effect of Gaussian noise on every weight."""

    noise: float  # Standard deviation
    as_written: Estimate  # `E[l(W_-i, x_i) - l(noisy W, x_i)]`, as in the proof
    both_noisy: Estimate  # The same with noise on W_-i too
    change: Estimate  # `both_noisy` minus the quantity without noise, record by record
    closer: float  # Share of the noisy networks that lie closer to W_-i than the plain W does

    @property
    def verdict(self) -> Verdict:
        """Of the corollary: `refuted` if the noisy algorithm is less stable, beyond the interval."""
        return "refuted" if self.change.low > 0 else "consistent"

    @property
    def proof_verdict(self) -> Verdict:
        """Of the step that noise moves W closer to W_-i: `refuted` by one network that it moves away."""
        return "refuted" if self.closer < 1 else "consistent"


@dataclass(frozen=True)
class StabilityReport:
    """The measured stability beside the paper's bound, and the corollary at each amount of noise."""

    plain: Estimate  # The quantity without noise
    bound: Sensitivity  # The paper's
    noisy: tuple[NoisyStability, ...]  # One per amount of noise
    records: int
    removed: int  # How many of them were removed, one at a time
    confidence: float  # Of all intervals together

    @property
    def verdict(self) -> Verdict:
        """Of the bound: `refuted` if the measured mean exceeds it, beyond the interval."""
        return "refuted" if self.plain.low > self.bound.value else "consistent"

    def to_json(self) -> dict[str, Any]:
        """Return all figures and verdicts by name."""
        return {
            "verdict": self.verdict,
            "measured": asdict(self.plain),
            "bound": self.bound.value,
            "basis": self.bound.basis,
            "records": self.records,
            "removed": self.removed,
            "confidence": self.confidence,
            "noisy": [
                {**asdict(each), "verdict": each.verdict, "proof_verdict": each.proof_verdict}
                for each in self.noisy
            ],
        }


def audit_stability(
    records: Records,
    *,
    removed: int = 31,
    settings: TrainingSettings | None = None,
    noise: Sequence[float] = (),
    draws: int = 32,
    confidence: float = 0.95,
    seed: int = 0,
    progress: Progress | None = None,
) -> StabilityReport:
    """Retrain without each of some random records, with the same initial weights and batches, and compare the losses.

    Every network gets the same draws of noise. This changes no expectation and reduces the variance of differences.

    Parameters
    ----------
    records : Records
        The training records.
    removed : int
        Number of records to remove, one at a time; at least 2.
    settings : TrainingSettings or None
        How the networks are trained. None: the paper's settings.
    noise : sequence of float
        Standard deviations of Gaussian noise on every weight.
    draws : int
        Draws of each noise.
    confidence : float
        Confidence of all intervals together. Each interval has its part of the permitted error and assumes that the
        mean is nearly normal.
    seed : int
        Determines the removed records, the training and the noise.
    progress : callable or None
        Called with (done, total) while the networks are trained.

    Returns
    -------
    StabilityReport
        The measured quantity beside the paper's bound.
    """
    _check_confidence(confidence)
    if not 2 <= removed <= len(records):
        raise InvalidInput(f"removed must be from 2 to the number of records, {len(records)}; got {removed}.")
    if draws < 1:
        raise InvalidInput(f"draws must be at least 1, got {draws}.")
    if any(not scale > 0 for scale in noise):
        raise InvalidInput(f"noise must be positive standard deviations, got {tuple(noise)}.")
    chosen = settings or TrainingSettings()
    generator = np.random.default_rng((0x0A20, seed))
    rows = np.sort(generator.choice(len(records), removed, replace=False))
    stack = train_stack(
        records.features,
        records.labels,
        records.classes,
        [np.arange(len(records))] * (removed + 1),
        settings=chosen,
        seeds=[seed] * (removed + 1),
        left_out=[[], *([int(row)] for row in rows)],
        progress=progress,
    )
    own = records.take(rows)
    part = 1 - (1 - confidence) / (1 + len(noise))
    bound = published_sensitivity_for(
        records.features.shape[1],
        chosen.hidden,
        records.classes,
        len(records),
        l2=chosen.l2,
        activation_name=chosen.activation,
    )
    with_record, without = _losses(stack, own)
    rng = torch.Generator().manual_seed(seed % 2**63)
    noisy = tuple(_with_noise(stack, own, scale, draws, part, rng) for scale in noise)
    plain = _mean(without - with_record, part)
    return StabilityReport(plain, bound.oaro, noisy, len(records), removed, confidence)


def _mean(values: Floats, confidence: float) -> Estimate:
    """Compute the mean over removed records with Student's two-sided interval."""
    middle = float(values.mean())
    quantile = student.isf((1 - confidence) / 2, len(values) - 1)
    half = float(quantile * values.std(ddof=1) / math.sqrt(len(values)))
    return Estimate(middle, middle - half, middle + half)


def _losses(stack: MLP, own: Records) -> tuple[Floats, Floats]:
    """Return the cross-entropy on each removed record: of the first network, and of the one trained without it."""
    logits = stack.stacked_logits(own.features).double()
    losses = -torch.log_softmax(logits, -1)[:, torch.arange(len(own)), torch.from_numpy(own.labels)].numpy()
    return losses[0], losses[1:].diagonal()


def _with_noise(
    stack: MLP,
    own: Records,
    scale: float,
    draws: int,
    confidence: float,
    rng: torch.Generator,
) -> NoisyStability:
    with_record, without = _losses(stack, own)
    noisy_with, noisy_without = np.zeros((2, len(own)))
    closer = 0.0
    weights = stack.weight_vectors().double()
    apart = weights[1:] - weights[0]
    for _ in range(draws):
        shift = [scale * torch.randn(tensor.shape[1:], generator=rng) for _, tensor in stack.parameters()]
        moved = MLP(
            stack.widths,
            stack.activation,
            tuple(kernel + part for kernel, part in zip(stack.kernels, shift[::2], strict=True)),
            tuple(bias + part for bias, part in zip(stack.biases, shift[1::2], strict=True)),
        )
        first, others = _losses(moved, own)
        noisy_with += first / draws
        noisy_without += others / draws
        away = apart - torch.cat([part.flatten() for part in shift]).double()
        closer += float((away.norm(dim=1) < apart.norm(dim=1)).double().mean()) / draws
    both = noisy_without - noisy_with
    return NoisyStability(
        scale,
        _mean(without - noisy_with, confidence),
        _mean(both, confidence),
        _mean(both - (without - with_record), confidence),
        closer,
    )
