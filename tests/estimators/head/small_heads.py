"""Thousands of small heads solved at once by damped Newton: a reference that shares no code with the package."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Problem:
    """B problems: rows (B, n, d), labels (B, n), how often each record is present (B, n), the objective's constants.

    Without `alpha` the objective is the mean cross-entropy over a public size; with it the convexified loss.
    """

    rows: torch.Tensor
    labels: torch.Tensor
    present: torch.Tensor
    classes: int
    regularisation: float
    size: float = 1.0
    alpha: float | None = None
    mass: float = 1.0

    def without(self, record: int) -> Problem:
        """The same problems without one record."""
        present = self.present.clone()
        present[:, record] = 0.0
        return Problem(**{**self.__dict__, "present": present})

    def objective(self, weights: torch.Tensor) -> torch.Tensor:
        """One value per problem, for weights (B, C, d)."""
        _, losses = self._logits_and_losses(weights)
        penalty = self.regularisation / 2 * weights.square().sum((1, 2))
        if self.alpha is None:
            return (losses * self.present).sum(1) / self.size + penalty
        return torch.logsumexp(self._tilted(losses), 1) / self.alpha + penalty

    def gradient_and_hessian(self, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, flattened to (B, C d) and (B, C d, C d)."""
        logits, losses = self._logits_and_losses(weights)
        probabilities = torch.softmax(logits, -1)
        errors = probabilities - torch.nn.functional.one_hot(self.labels, self.classes)
        each = (errors[..., :, None] * self.rows[..., None, :]).flatten(2)
        tilted = self.alpha is not None
        shares = torch.softmax(self._tilted(losses), 1)[:, 1:] if tilted else self.present / self.size
        mean = torch.einsum("bn,bnk->bk", shares, each)
        curvature = (
            torch.diag_embed(probabilities) - probabilities[..., :, None] * probabilities[..., None, :]
        )
        hessian = torch.einsum("bn,bnce,bni,bnj->bciej", shares, curvature, self.rows, self.rows)
        hessian = hessian.reshape(len(weights), mean.shape[1], mean.shape[1])
        if self.alpha is not None:
            spread = torch.einsum("bn,bnk,bnl->bkl", shares, each, each) - mean[:, :, None] * mean[:, None, :]
            hessian = hessian + self.alpha * spread
        identity = torch.eye(mean.shape[1], dtype=torch.float64)
        return mean + self.regularisation * weights.flatten(1), hessian + self.regularisation * identity

    def _logits_and_losses(self, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.einsum("bnd,bcd->bnc", self.rows, weights)
        return logits, torch.logsumexp(logits, -1) - logits.gather(-1, self.labels[..., None])[..., 0]

    def _tilted(self, losses: torch.Tensor) -> torch.Tensor:
        assert self.alpha is not None
        tilted = self.alpha * losses + self.present.log()
        return torch.cat([torch.full_like(tilted[:, :1], self.mass).log(), tilted], 1)


def minimisers(problem: Problem, iterations: int = 200) -> torch.Tensor:
    """Minimisers (B, C, d) to about 1e-6 or better, by Newton steps that are halved until the objective falls."""
    batch, _, columns = problem.rows.shape
    weights = torch.zeros(batch, problem.classes, columns, dtype=torch.float64)
    for _ in range(iterations):
        gradient, hessian = problem.gradient_and_hessian(weights)
        step = torch.linalg.solve(hessian, gradient)
        if step.norm(dim=1).max() < 1e-6:
            return weights - step.reshape(weights.shape)
        slope, step = (gradient * step).sum(1), step.reshape(weights.shape)
        before, rate = problem.objective(weights), torch.ones(batch, dtype=torch.float64)
        for _ in range(40):
            rise = problem.objective(weights - rate[:, None, None] * step) - before + 1e-4 * rate * slope
            too_far = rise > 1e-12 * before.abs()
            if not too_far.any():
                break
            rate = torch.where(too_far, rate / 2, rate)
        weights = weights - rate[:, None, None] * step
    raise AssertionError("the reference solver did not converge")


def random_problems(
    generator: torch.Generator,
    batch: int,
    records: int,
    columns: int,
    classes: int,
    **constants: float | None,
) -> Problem:
    """Rows of length up to 1, among them extreme, duplicated and mislabelled ones; the first record will be removed."""

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    rows = torch.randn(batch, records, columns, generator=generator, dtype=torch.float64)
    rows = rows / rows.norm(dim=-1, keepdim=True)
    rows[: batch // 4] *= uniform(batch // 4, records, 1)
    labels = torch.randint(classes, (batch, records), generator=generator)
    present = torch.ones(batch, records, dtype=torch.float64)
    line = slice(batch // 2, 3 * batch // 4)
    rows[line, 1:] = rows[line, :1] * torch.sign(rows[line, 1:, :1])  # all on one line, to and fro
    crowd = slice(3 * batch // 4, batch)  # a mislabelled record against a crowd of short ones like it
    size = len(rows[crowd])
    rows[crowd, 1:] = rows[crowd, :1] * 10 ** (-3 * uniform(size, 1, 1))
    labels[crowd], labels[crowd, 0] = 1, 0
    present[crowd, 1:] = 10 ** (5 * uniform(size, 1)) / (records - 1)
    return Problem(rows, labels, present, classes, **constants)  # type: ignore[arg-type]


def movement(problem: Problem, record: int = 0) -> torch.Tensor:
    """How far leaving out a record moves the weights of every problem: (B, C, d)."""
    return minimisers(problem) - minimisers(problem.without(record))
