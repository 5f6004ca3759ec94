"""DP-SGD for any torch module: Opacus computes the per-example gradient norms; batches and noise are ours.

Opacus's ghost clipping is used layer by layer where it knows the layer, and its general rule elsewhere; tied weights
are clipped without ghost clipping. Its own batches and noise are not used: its secure mode needs torchcsprng, which
does not exist for the PyTorch version pinned here, while `quietmax.noise` draws exact noise from the operating system.

Floating-point sums of a module's gradients cannot be made exact as those of the built-in network are. The noise allows
for `ROUNDING` of the clipping norm, and the guarantee of such a model names that as an assumption.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quietmax.accounting.guarantee import Unit
from quietmax.errors import InvalidInput, short_message
from quietmax.estimators.dpsgd.config import PrivateSettings
from quietmax.estimators.dpsgd.stored_rows import StoredRows
from quietmax.estimators.dpsgd.training import secret_batches, seeded_batches
from quietmax.estimators.training_set import Persons
from quietmax.estimators.validation import Condition
from quietmax.models.stacked import Progress, Rows, check_weights
from quietmax.noise.release import release_gaussian

Build = Callable[[int, int], torch.nn.Module]

ROUNDING = 2.0**-10
"""Share of the clipping norm that is added to the sensitivity, for sums in floating point."""
_ROWS_AT_ONCE = 256


def own_module_condition(unit: Unit) -> Condition:
    """Return the condition of a module of the user's own."""
    return Condition(
        "The module is the user's own.",
        (
            "The module computes every record of a batch by itself.",
            f"One {unit} moves the module's clipped gradient sums, computed in floating point, by at most 1.001 clip "
            "norms.",
        ),
    )


def train_private_module(
    module: torch.nn.Module,
    features: NDArray[np.float32] | StoredRows,
    labels: NDArray[np.int64],
    *,
    settings: PrivateSettings,
    noise_multiplier: float,
    size: int,
    seed: int | None = None,
    persons: Persons | None = None,
    progress: Progress | None = None,
) -> torch.nn.Module:
    """Train a module with the steps of `train_private_stack`."""
    records, targets = len(features), torch.from_numpy(labels)
    clipped = _Clipped(module.train(), settings.max_grad_norm)
    parameters = clipped.parameters
    optimizer = _optimizer(parameters, settings)
    noise = _Noise(settings.max_grad_norm, noise_multiplier, seed)
    batches: Iterator[Rows]
    if seed is None:
        batches = secret_batches(records, size, settings, persons)
    else:
        batches = seeded_batches(records, seed, size, settings, persons)
    expected = settings.sampling_rate * size
    for step, rate in enumerate(settings.learning_rates().tolist(), start=1):
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = torch.from_numpy(next(batches))
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for part in torch.split(batch, _ROWS_AT_ONCE):
            inputs = torch.from_numpy(features[part.numpy()])
            weights = torch.ones(len(part))
            if persons is not None:
                weights = torch.from_numpy(1 / persons.rows[part.numpy()]).float()
            clipped.add_to(sums, inputs, targets[part].to(torch.int64), weights)
        for parameter, total in zip(parameters, noise.added(sums), strict=True):
            parameter.grad = total / expected
        optimizer.step()
        check_weights(parameters)
        if progress is not None:
            progress(step, settings.steps)
    return clipped.unwrapped().eval()


class _Clipped:
    """Sums of clipped per-example gradients of a module wrapped by Opacus."""

    def __init__(self, module: torch.nn.Module, max_grad_norm: float) -> None:
        self._module, self._max_grad_norm = module, max_grad_norm
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise InvalidInput("The module has no trainable parameter.")
        self._wrapped = self._wrap(ghost=True)

    def _wrap(self, *, ghost: bool) -> Any:
        """Return the module with Opacus's hooks."""
        try:
            from opacus.grad_sample import GradSampleModuleFastGradientClipping  # type: ignore[import-untyped]
            from opacus.validators import ModuleValidator  # type: ignore[import-untyped]
            from opacus.validators.errors import UnsupportedModuleError  # type: ignore[import-untyped]
        except ImportError as problem:
            raise InvalidInput(
                "DP-SGD with a module of your own requires Opacus: pip install opacus."
            ) from problem
        try:
            ModuleValidator.validate(self._module, strict=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return GradSampleModuleFastGradientClipping(
                    self._module,
                    loss_reduction="sum",
                    max_grad_norm=self._max_grad_norm,
                    use_ghost_clipping=ghost,
                )
        except (UnsupportedModuleError, NotImplementedError) as problem:
            raise InvalidInput(
                f"The module mixes records or cannot be clipped per record ({short_message(problem)}). For instance, "
                "BatchNorm is not supported; GroupNorm is."
            ) from problem

    def add_to(self, sums: list[Tensor], inputs: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Add the clipped gradients of these records, each times its weight."""
        if not len(labels):
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                finite = self._clip_and_sum(inputs, labels, weights)
            except NotImplementedError:
                # Tied weights: Opacus clips them without ghosts.
                self.unwrapped()
                self._wrapped = self._wrap(ghost=False)
                finite = self._clip_and_sum(inputs, labels, weights)
        if not bool(finite.all()):
            # A record whose gradient overflows contributes nothing, rather than spoiling the sum of the others.
            self.add_to(sums, inputs[finite], labels[finite], weights[finite])
            return
        for total, parameter in zip(sums, self.parameters, strict=True):
            if parameter.grad is not None:
                total += parameter.grad

    def _clip_and_sum(self, inputs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Leave the clipped sum in the parameters' gradients; return which records have finite gradients."""
        wrapped = self._wrapped
        wrapped.zero_grad()
        losses = torch.nn.functional.cross_entropy(wrapped(inputs), labels, reduction="none")
        losses.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        norms = wrapped.get_norm_sample()
        finite: Tensor = torch.isfinite(norms) & torch.isfinite(losses)
        wrapped.zero_grad()
        wrapped.disable_hooks()
        try:
            weighted = (weights * torch.clamp(self._max_grad_norm / norms, max=1.0) * losses).sum()
            weighted.backward()  # type: ignore[no-untyped-call]
        finally:
            wrapped.enable_hooks()
        return finite

    def unwrapped(self) -> torch.nn.Module:
        """Return the module without Opacus's hooks."""
        self._wrapped.zero_grad()
        module: torch.nn.Module = self._wrapped.to_standard_module()
        for parameter in self.parameters:
            parameter.grad = None
        return module


class _Noise:
    """Exact noise from the operating system, or seeded noise for experiments."""

    def __init__(self, max_grad_norm: float, multiplier: float, seed: int | None) -> None:
        self._max_grad_norm, self._multiplier = max_grad_norm, multiplier
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def added(self, sums: list[Tensor]) -> list[Tensor]:
        """Return the sums with noise added."""
        if self._generator is not None:
            spread = self._max_grad_norm * self._multiplier
            return [total + spread * torch.randn(total.shape, generator=self._generator) for total in sums]
        vector = torch.cat([total.flatten() for total in sums]).double().numpy()
        noisy = release_gaussian(
            vector, sensitivity=self._max_grad_norm * (1 + ROUNDING), mu=1 / self._multiplier
        )
        parts = torch.split(torch.from_numpy(noisy.values), [total.numel() for total in sums])
        return [part.view(total.shape).to(total.dtype) for part, total in zip(parts, sums, strict=True)]


def _optimizer(parameters: list[torch.nn.Parameter], settings: PrivateSettings) -> torch.optim.Optimizer:
    """Return torch's optimizer with the L2 penalty on kernels."""
    groups = [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": 2 * settings.l2},
        {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0},
    ]
    used = [group for group in groups if group["params"]]
    if settings.optimizer == "adam":
        return torch.optim.Adam(used, lr=settings.learning_rate, eps=1e-7)
    momentum = 0.9 if settings.optimizer == "momentum" else 0.0
    return torch.optim.SGD(used, lr=settings.learning_rate, momentum=momentum)
