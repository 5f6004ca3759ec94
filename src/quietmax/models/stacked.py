"""Multilayer perceptrons, and training K of them at once: losses, settings, the stack, and its steps of Adam.

A loss averages over the batch. `loss_value` is written for automatic differentiation; `_logit_gradient` is the
hand-derived gradient that the trainer uses. The tests compare the two. THEORY section 1: the paper prints
``(1/a) ln[(1/n) sum_i exp(a*l_i)]``; the authors' program averages over samples *and classes*, where every class but
the true one adds ``exp(0) = 1``. Neither makes the loss of a network with a hidden layer convex (THEORY 2.3d).

Matrix products of other shapes may be rounded otherwise. So many networks are divided into stacks by public numbers
alone (`stack_edges`), never by memory, cores or workers: the same seeds give the same bits wherever a stack is trained.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, pairwise
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax.errors import InvalidInput, QuietmaxError, check_type

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_module("torch")

_ROWS_AT_ONCE = 2048


@dataclass(frozen=True)
class Activation:
    """An activation of hidden neurons, with its derivative in terms of its own output."""

    name: str  # Name in settings and files
    bound: float | None  # Largest absolute output (the paper's a_u); None if there is no bound
    apply_: Callable[[Tensor], Tensor]  # Overwrites pre-activations with outputs
    backward: Callable[[Tensor, Tensor], Tensor]  # Multiplies a gradient by the derivative, given the output


@cache
def _minus_one(dtype: torch.dtype) -> Tensor:
    return torch.tensor(-1.0).to(dtype)


def _tanh_(values: Tensor) -> Tensor:
    """Overwrite values with their hyperbolic tangent."""
    # tanh(x) = 2*sigmoid(2x) - 1: the same to 2e-7 in float32 and over twice as fast as torch.tanh on a CPU.
    return torch.add(_minus_one(values.dtype), values.mul_(2).sigmoid_(), alpha=2, out=values)


# The lambdas leave torch to be imported on first use.
_ALL = (
    Activation("tanh", 1.0, _tanh_, lambda slope, output: torch.ops.aten.tanh_backward(slope, output)),
    Activation(
        "sigmoid",
        1.0,
        lambda values: torch.sigmoid_(values),
        lambda slope, output: torch.ops.aten.sigmoid_backward(slope, output),
    ),
    Activation(
        "relu",
        None,
        lambda values: torch.relu_(values),
        lambda slope, output: torch.ops.aten.threshold_backward(slope, output, 0),
    ),
)
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType({each.name: each for each in _ALL})
"""The activations by name. Nothing can be added: an activation that mixes the networks of a stack would void proofs."""


def activation(name: str) -> Activation:
    """Return the activation of a name."""
    if name not in ACTIVATIONS:
        raise InvalidInput(f"The activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}.")
    return ACTIVATIONS[name]


@dataclass(frozen=True, eq=False)
class MLP:
    """K stacked multilayer perceptrons of one shape.

    Parameters
    ----------
    widths : tuple of int
        Number of features, of neurons in each hidden layer, and of classes.
    activation : str
        Activation of the hidden layers.
    kernels : tuple of Tensor
        Weights of each layer, shape (networks, inputs, outputs); of the last layer (networks, classes, inputs).
    biases : tuple of Tensor
        Biases of each layer, shape (networks, 1, outputs).
    """

    widths: tuple[int, ...]
    activation: str
    kernels: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]

    @property
    def networks(self) -> int:
        """Number of stacked networks."""
        return self.kernels[0].shape[0]

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.widths[-1]

    def network(self, index: int) -> MLP:
        """Return one of the stacked networks."""
        return self._chosen(slice(index, index + 1))

    def _chosen(self, networks: slice | Tensor) -> MLP:
        kernels, biases = (tuple(each[networks] for each in layers) for layers in (self.kernels, self.biases))
        return MLP(self.widths, self.activation, kernels, biases)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight tensor with its name in model files."""
        for depth, (kernel, bias) in enumerate(zip(self.kernels, self.biases, strict=True)):
            yield f"kernel.{depth}", kernel
            yield f"bias.{depth}", bias

    def weight_vectors(self) -> Tensor:
        """Return all weights and biases of each network as one vector."""
        return torch.cat([tensor.flatten(1) for _, tensor in self.parameters()], 1)

    def stacked_logits(self, features: NDArray[np.floating] | Tensor) -> Tensor:
        """Return the logits of all networks for the same records."""
        inputs = self._inputs(features)
        parts = [self._forward(checked_finite(part)) for part in torch.split(inputs, _ROWS_AT_ONCE)]
        return torch.cat(parts, 1) if parts else inputs.new_empty(self.networks, 0, self.classes)

    def logits(self, features: NDArray[np.floating] | Tensor) -> Tensor:
        """Return the logits of a single network."""
        if self.networks != 1:
            raise InvalidInput(
                f"logits() needs a single network, but this is a stack of {self.networks}; network(index) returns one."
            )
        return self.stacked_logits(features)[0]

    def _inputs(self, features: NDArray[np.floating] | Tensor) -> Tensor:
        inputs = torch.as_tensor(features).to(self.kernels[0].dtype)
        if inputs.ndim != 2 or inputs.shape[1] != self.widths[0]:
            raise InvalidInput(
                f"The records must be an array of shape (n, {self.widths[0]}), got shape {tuple(inputs.shape)}."
            )
        return inputs

    def _forward(self, inputs: Tensor) -> Tensor:
        apply_ = activation(self.activation).apply_
        signal = inputs.expand(self.networks, *inputs.shape)
        for kernel, bias in zip(self.kernels[:-1], self.biases[:-1], strict=True):
            signal = apply_(torch.baddbmm(bias, signal, kernel))
        return torch.baddbmm(self.biases[-1], signal, self.kernels[-1].transpose(1, 2))


def checked_finite(features: Tensor) -> Tensor:
    """Return the features if all are finite."""
    # The sum of squares decides in one pass, unless it overflows.
    flat = features.reshape(-1)
    if torch.isfinite(torch.dot(flat, flat)) or torch.isfinite(flat).all():
        return features
    raise InvalidInput("Features must be finite, but a query holds NaN or infinity. Nothing was charged.")


def initial_mlp(
    widths: tuple[int, ...],
    activation_name: str,
    seeds: tuple[int, ...],
    dtype: torch.dtype | None = None,
) -> MLP:
    """Return networks with Glorot-uniform kernels and zero biases."""
    activation(activation_name)
    if len(widths) < 2 or min(widths) < 1:
        raise InvalidInput(
            f"A network must have at least one neuron in every layer, got layers of the widths {widths}."
        )
    dtype = torch.float32 if dtype is None else dtype
    drawn = [_glorot(widths, np.random.default_rng((0x1417, seed))) for seed in seeds]
    kernels = [torch.from_numpy(np.stack(layer)).to(dtype) for layer in zip(*drawn, strict=True)]
    kernels[-1] = kernels[-1].transpose(1, 2).contiguous()
    biases = tuple(torch.zeros(len(seeds), 1, width, dtype=dtype) for width in widths[1:])
    return MLP(widths, activation_name, tuple(kernels), biases)


def _glorot(widths: tuple[int, ...], generator: np.random.Generator) -> list[NDArray[np.float64]]:
    limits = [(6 / (fan_in + fan_out)) ** 0.5 for fan_in, fan_out in itertools.pairwise(widths)]
    return [
        generator.uniform(-limit, limit, shape)
        for limit, shape in zip(limits, itertools.pairwise(widths), strict=True)
    ]


Rows = NDArray[np.int64]
Progress = Callable[[int, int], None]
"""Called with the number of steps done and the number of all steps."""

LARGEST_STACK = 25
"""Many networks are trained in stacks of at most this many. Larger ones are hardly faster per network."""

_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-7
_STEPS_PER_BLOCK = 64
_PADDING = -1
_ORDER_STREAM = 0x0DE5

# --- losses -------------------------------------------------------------------------------------------------------

AveragedOver = Literal["samples and classes", "samples"]


@dataclass(frozen=True)
class CrossEntropy:
    """``l_i = -ln p_i[y_i]``, averaged over the batch."""


@dataclass(frozen=True)
class Quadratic:
    """``l_i = sum_c (p_i[c] - [c == y_i])^2``, averaged over the batch."""


@dataclass(frozen=True)
class Convexified:
    """``(1/alpha) ln mean exp(alpha * loss)``, the convexified loss.

    Parameters
    ----------
    alpha : float
        Constant of the convexification, positive; the paper uses 1 to 5.
    averaged_over : {"samples and classes", "samples"}
        Over what the mean is taken: as in the authors' program, or as printed in the paper.
    base : CrossEntropy or Quadratic
        The loss of one record.

    Examples
    --------
    >>> Convexified(alpha=2.0).base
    CrossEntropy()
    """

    alpha: float = 1.0
    averaged_over: AveragedOver = "samples and classes"
    base: CrossEntropy | Quadratic = CrossEntropy()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise InvalidInput(f"alpha must be a positive number, got {self.alpha}; the paper uses 1 to 5.")
        if self.averaged_over not in ("samples and classes", "samples"):
            raise InvalidInput(
                f"averaged_over must be 'samples and classes' or 'samples', got {self.averaged_over!r}."
            )


Loss = CrossEntropy | Quadratic | Convexified


def loss_value(loss: Loss, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of one batch, for automatic differentiation."""
    if isinstance(loss, Convexified):
        exponents = loss.alpha * _terms(loss.base, logits, labels)
        count = logits.shape[0]
        if loss.averaged_over == "samples":
            return (torch.logsumexp(exponents.sum(-1), 0) - math.log(count)) / loss.alpha
        return (torch.logsumexp(exponents.flatten(), 0) - math.log(exponents.numel())) / loss.alpha
    return _terms(loss, logits, labels).sum(-1).mean()


def _terms(base: CrossEntropy | Quadratic, logits: Tensor, labels: Tensor) -> Tensor:
    truth = torch.nn.functional.one_hot(labels, logits.shape[-1]).to(logits.dtype)
    if isinstance(base, CrossEntropy):
        return -torch.log_softmax(logits, -1) * truth
    return (torch.softmax(logits, -1) - truth).square()


def _logit_gradient(loss: Loss, logits: Tensor, labels: Tensor, kept: Tensor | None = None) -> Tensor:
    picked = labels.unsqueeze(-1)
    base, alpha = loss, 0.0
    averaged_over: AveragedOver | None = None
    if isinstance(loss, Convexified):
        base, alpha, averaged_over = loss.base, loss.alpha, loss.averaged_over
    if isinstance(base, CrossEntropy):
        log_probabilities = torch.log_softmax(logits, -1)
        losses = log_probabilities.gather(-1, picked).squeeze(-1).neg_()
        gradient = log_probabilities.exp_()
        gradient.scatter_add_(-1, picked, gradient.new_full((), -1.0).expand(picked.shape))
        weights = _record_weights(losses, alpha, averaged_over, kept, zero_terms=logits.shape[-1] - 1)
        return gradient.mul_(weights.unsqueeze(-1))

    probabilities = torch.softmax(logits, -1)
    residual = probabilities.scatter_add(-1, picked, probabilities.new_full((), -1.0).expand(picked.shape))
    if averaged_over == "samples and classes":
        weights_by_class = _entry_weights(residual.square(), alpha, kept)
        slope = 2 * residual * weights_by_class
    else:
        losses = residual.square().sum(-1)
        slope = 2 * residual * _record_weights(losses, alpha, averaged_over, kept, 0).unsqueeze(-1)
    return probabilities * (slope - (probabilities * slope).sum(-1, keepdim=True))


def _record_weights(
    losses: Tensor,
    alpha: float,
    averaged_over: AveragedOver | None,
    kept: Tensor | None,
    zero_terms: int,
) -> Tensor:
    """Return ``d loss / d l_i``: 1/n for a plain mean, ``exp(a*l_i)/sum`` for the convexified loss."""
    count = losses.shape[-1] if kept is None else kept.sum(-1, keepdim=True).clamp_(min=1)
    if averaged_over is None:
        return (
            losses.new_full((), 1 / losses.shape[-1]).expand(losses.shape) if kept is None else kept / count
        )
    exponents = losses * alpha if kept is None else losses * alpha * kept
    largest = exponents.amax(-1, keepdim=True)
    weights = exponents.sub_(largest).exp_()
    if kept is not None:
        weights.mul_(kept)
    total = weights.sum(-1, keepdim=True)
    if averaged_over == "samples and classes" and zero_terms:
        total.add_(largest.neg_().exp_().mul_(count * zero_terms))
    return weights.div_(total.clamp_(min=torch.finfo(total.dtype).tiny))


def _entry_weights(terms: Tensor, alpha: float, kept: Tensor | None) -> Tensor:
    exponents = terms * alpha
    if kept is not None:
        exponents = exponents * kept.unsqueeze(-1)
    weights = (exponents - exponents.amax((-1, -2), keepdim=True)).exp_()
    if kept is not None:
        weights.mul_(kept.unsqueeze(-1))
    return weights.div_(weights.sum((-1, -2), keepdim=True).clamp_(min=torch.finfo(weights.dtype).tiny))


# --- settings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingSettings:
    """How a network is trained: everything but the data and the seed. The defaults are the paper's.

    Parameters
    ----------
    hidden : tuple of int
        Number of neurons in each hidden layer.
    activation : str
        Activation of the hidden layers: "tanh", "sigmoid" or "relu".
    loss : CrossEntropy, Quadratic or Convexified
        The loss function.
    learning_rate : float
        Step size of Adam.
    batch_size : int
        Records per step.
    epochs : int
        Passes over the training set.
    l2 : float
        Coefficient of the penalty ``l2 * ||kernels||^2`` (without biases), as Keras counts it. In the paper's
        notation it is ``2*lam``: the default 0.001 is ``lam = 0.0005`` (THEORY section 1).

    Examples
    --------
    >>> TrainingSettings(hidden=(64, 32), epochs=20).batch_size
    100
    """

    hidden: tuple[int, ...] = (128,)
    activation: str = "tanh"
    loss: Loss = Convexified()
    learning_rate: float = 0.001
    batch_size: int = 100
    epochs: int = 100
    l2: float = 0.001

    def __post_init__(self) -> None:
        activation(self.activation)
        for name in ("learning_rate", "batch_size", "epochs", "l2"):
            check_type(getattr(self, name), Real, name, "a number")
        checks = (
            ("hidden", all(width >= 1 for width in self.hidden), "at least 1 for every layer"),
            ("learning_rate", 0 < self.learning_rate < math.inf, "a positive number"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("epochs", self.epochs >= 0, "at least 0"),
            ("l2", 0 <= self.l2 < math.inf, "a number of at least 0"),
        )
        for name, valid, expected in checks:
            if not valid:
                raise InvalidInput(f"{name} must be {expected}, got {getattr(self, name)}.")


# --- training -----------------------------------------------------------------------------------------------------


def train_stack(
    features: NDArray[np.floating] | Tensor,
    labels: NDArray[np.integer] | Tensor,
    classes: int,
    rows: Sequence[Rows],
    *,
    settings: TrainingSettings,
    seeds: Sequence[int],
    left_out: Sequence[Sequence[int] | Rows] | None = None,
    progress: Progress | None = None,
) -> MLP:
    """Train several networks at once, each on its own rows of shared records."""
    inputs = torch.as_tensor(features).to(torch.float32).contiguous()
    targets = torch.as_tensor(labels).to(torch.int64)
    check_records(inputs, targets, classes)
    check_networks(rows, len(inputs), seeds=seeds, left_out=left_out)
    if any(len(each) == 0 for each in rows):
        raise InvalidInput("Every network needs at least one training record.")
    start = initial_mlp((inputs.shape[1], *settings.hidden, classes), settings.activation, tuple(seeds))
    # Longest first, so that the networks still in training are always a prefix of the stack.
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    stack = start._chosen(torch.tensor(order))
    width = min(settings.batch_size, max(len(each) for each in rows))
    totals = [settings.epochs * -(-len(rows[index]) // width) for index in order]
    excluded = None
    if left_out is not None and any(len(each) for each in left_out):
        most = max(len(each) for each in left_out)
        excluded = torch.tensor(
            [[*left_out[index], *[_PADDING] * (most - len(left_out[index]))] for index in order]
        )
    trainer = _StackTrainer(stack, inputs, targets, settings, width)
    complete = excluded is None and not any(len(each) % width for each in rows)
    done = 0
    for block in _blocks([_endless_batches(rows[index], seeds[index], width) for index in order], totals):
        for records in block:
            trainer._step(records, None if complete else _kept(records, excluded))
        done += len(block)
        if progress is not None:
            progress(done, totals[0])
    check_weights([tensor for _, tensor in stack.parameters()])
    return stack._chosen(torch.argsort(torch.tensor(order)))


def train_independent(
    features: NDArray[np.floating] | Tensor,
    labels: NDArray[np.integer] | Tensor,
    classes: int,
    rows: Sequence[Rows],
    *,
    settings: TrainingSettings,
    seeds: Sequence[int],
    steps: int,
    progress: Progress | None = None,
) -> MLP:
    """Train several networks for exactly the same number of steps, none influencing another (THEORY 3.4).

    All operations have shapes fixed by public numbers, each network keeps its place in the stack, and no branch depends
    on anybody's values. A network without records, or one that diverges, is returned like any other.
    """
    inputs = torch.as_tensor(features).to(torch.float32).contiguous()
    targets = torch.as_tensor(labels).to(torch.int64)
    check_records(inputs, targets, classes)
    check_networks(rows, len(inputs), seeds=seeds)
    # Padding is a record of zeros of its own: nobody's record may enter another network's arithmetic, even masked.
    inputs = torch.cat([inputs, inputs.new_zeros(1, inputs.shape[1])])
    targets = torch.cat([targets, targets.new_zeros(1)])
    stack = initial_mlp((inputs.shape[1], *settings.hidden, classes), settings.activation, tuple(seeds))
    trainer = _StackTrainer(stack, inputs, targets, settings, settings.batch_size, padding=len(inputs) - 1)
    streams = [
        _endless_batches(each, seed, settings.batch_size) for each, seed in zip(rows, seeds, strict=True)
    ]
    for done in range(1, steps + 1):
        records = torch.from_numpy(np.stack([next(stream) for stream in streams]))
        trainer._step(records, _kept(records, None))
        if progress is not None and (done % _STEPS_PER_BLOCK == 0 or done == steps):
            progress(done, steps)
    return stack


def train_networks(
    features: NDArray[np.floating],
    labels: NDArray[np.integer],
    classes: int,
    rows: Sequence[Rows],
    settings: TrainingSettings,
    seeds: Sequence[int],
    steps: int | None = None,
    progress: Progress | None = None,
) -> MLP:
    """Train one stack of many networks: the task that a worker is given."""
    if steps is None:
        return train_stack(features, labels, classes, rows, settings=settings, seeds=seeds, progress=progress)
    return train_independent(
        features, labels, classes, rows, settings=settings, seeds=seeds, steps=steps, progress=progress
    )


def stack_edges(networks: int, network_bytes: int, stack_bytes: int) -> list[int]:
    """Divide networks into stacks of about equal size, by public numbers alone."""
    height = max(1, min(LARGEST_STACK, stack_bytes // max(network_bytes, 1)))
    stacks = -(-networks // height)
    return [networks * number // stacks for number in range(stacks + 1)]


def training_bytes(widths: Sequence[int], settings: TrainingSettings) -> int:
    """Return about how many bytes a network needs while it is trained, without the records."""
    weights = sum((into + 1) * out for into, out in pairwise(widths))
    return 40 * weights + 8 * settings.batch_size * sum(widths)


def joined_stacks(stacks: Sequence[MLP]) -> MLP:
    """Return the networks of several stacks as one stack."""
    kernels, biases = (
        tuple(map(torch.cat, zip(*layers, strict=True)))
        for layers in ([stack.kernels for stack in stacks], [stack.biases for stack in stacks])
    )
    return replace(stacks[0], kernels=kernels, biases=biases)


def check_records(inputs: Tensor, targets: Tensor, classes: int) -> None:
    """Check that features and labels match and are valid."""
    if inputs.ndim != 2 or targets.shape != inputs.shape[:1]:
        raise InvalidInput(
            f"Features and labels must have the shapes (n, m) and (n,), got {tuple(inputs.shape)} and "
            f"{tuple(targets.shape)}."
        )
    if len(targets) and (int(targets.min()) < 0 or int(targets.max()) >= classes):
        raise InvalidInput(f"Labels must be integers from 0 to {classes - 1}.")
    if not torch.isfinite(inputs).all():
        raise InvalidInput("Features must be finite, but a record holds NaN or infinity.")


def check_networks(rows: Sequence[Rows], records: int, **given: Sequence[Any] | None) -> None:
    """Check the row numbers of each network, and that further arguments have one entry per network."""
    if not rows:
        raise InvalidInput("There must be at least one network to train.")
    for name, each in given.items():
        if each is not None and len(each) != len(rows):
            raise InvalidInput(
                f"{name} must have one entry for each of the {len(rows)} networks, got {len(each)}."
            )
    if any(len(each) and (each.min() < 0 or each.max() >= records) for each in rows):
        raise InvalidInput(f"Row numbers must be from 0 to {records - 1}.")


def check_weights(weights: Sequence[Tensor]) -> None:
    """Check that weights are finite after training."""
    if not all(torch.isfinite(tensor).all() for tensor in weights):
        raise QuietmaxError("Training diverged: a weight is not finite. A lower `learning_rate` may help.")


def _endless_batches(rows: Rows, seed: int, width: int) -> Iterator[Rows]:
    generator = np.random.default_rng((_ORDER_STREAM, seed))
    missing = -len(rows) % width if len(rows) else width
    while True:
        # A copy, for numpy shuffles no array without entries that is read-only, as those are that a Ray worker gets.
        order = generator.permutation(np.array(rows))
        yield from np.pad(order, (0, missing), constant_values=_PADDING).reshape(-1, width)


def _blocks(streams: Sequence[Iterator[Rows]], totals: Sequence[int]) -> Iterator[Tensor]:
    """Yield all networks' batches in blocks of shape (steps, networks still training, width); the totals fall."""
    at = 0
    while at < totals[0]:
        active = sum(total > at for total in totals)
        length = min(_STEPS_PER_BLOCK, totals[active - 1] - at)
        batches = [np.stack([*islice(stream, length)]) for stream in streams[:active]]
        yield torch.from_numpy(np.stack(batches, axis=1))
        at += length


class _StackTrainer:
    """Takes one step of Adam at a time for every network that is still training; owns the working memory."""

    def __init__(
        self,
        stack: MLP,
        inputs: Tensor,
        targets: Tensor,
        settings: TrainingSettings,
        width: int,
        padding: int = 0,
    ) -> None:
        self._inputs, self._targets, self._settings, self._padding = inputs, targets, settings, padding
        self._activation = activation(settings.activation)
        self._weights = [list(stack.kernels), list(stack.biases)]
        self._gradients, self._means, self._squares = (
            [[torch.zeros_like(tensor) for tensor in group] for group in self._weights] for _ in range(3)
        )
        self._taken = [torch.zeros((), dtype=torch.float32) for _ in stack.kernels]
        self._signals = [
            torch.empty(stack.networks, width, neurons, dtype=inputs.dtype) for neurons in stack.widths
        ]
        self._slopes = [torch.empty_like(signal) for signal in self._signals[1:-1]]
        self._narrow(stack.networks)

    def _narrow(self, active: int) -> None:
        for groups in (self._weights, self._gradients, self._means, self._squares):
            groups[:] = [[tensor[:active] for tensor in group] for group in groups]
        self._signals = [signal[:active] for signal in self._signals]
        self._slopes = [slope[:active] for slope in self._slopes]
        self._flipped = [kernel.transpose(1, 2) for kernel in self._weights[0]]
        self._active = active

    def _step(self, records: Tensor, kept: Tensor | None) -> None:
        """Take one step on ``records``, row indices of shape (networks still training, width)."""
        gathered, weights = records, None
        if kept is not None:
            gathered, weights = torch.where(records < 0, self._padding, records), kept.to(self._inputs.dtype)
        if self._active != len(records):
            self._narrow(len(records))
        self._backward(self._forward(gathered, weights))
        # Adam for kernels (with the L2 penalty's gradient ``2*l2*W``) and biases (without).
        torch._foreach_add_(self._taken, 1)
        groups = zip(self._weights, self._gradients, self._means, self._squares, strict=True)
        for group, decay in zip(groups, (2 * self._settings.l2, 0.0), strict=True):
            adam_step(*group, self._taken, learning_rate=self._settings.learning_rate, decay=decay)

    def _forward(self, records: Tensor, kept: Tensor | None) -> Tensor:
        """Fill the signals of every layer and return d loss / d logits."""
        kernels, biases = self._weights
        picked = records.view(-1)
        signal, *hidden, logits = self._signals
        torch.index_select(self._inputs, 0, picked, out=signal.view(-1, signal.shape[-1]))
        for depth, outgoing in enumerate(hidden):
            torch.baddbmm(biases[depth], signal, kernels[depth], out=outgoing)
            signal = self._activation.apply_(outgoing)
        torch.baddbmm(biases[-1], signal, self._flipped[-1], out=logits)
        labels = torch.index_select(self._targets, 0, picked).view(records.shape)
        return _logit_gradient(self._settings.loss, logits, labels, kept)

    def _backward(self, slope: Tensor) -> None:
        kernels, (kernel_gradients, bias_gradients) = self._weights[0], self._gradients
        last = len(kernels) - 1
        for depth in range(last, -1, -1):
            incoming = self._signals[depth]
            torch.sum(slope, 1, keepdim=True, out=bias_gradients[depth])
            if depth == last:
                torch.bmm(slope.transpose(1, 2), incoming, out=kernel_gradients[depth])
            else:
                torch.bmm(incoming.transpose(1, 2), slope, out=kernel_gradients[depth])
            if depth:
                kernel = kernels[depth] if depth == last else self._flipped[depth]
                outgoing = torch.bmm(slope, kernel, out=self._slopes[depth - 1])
                slope = self._activation.backward(outgoing, incoming)


def _kept(records: Tensor, excluded: Tensor | None) -> Tensor:
    counting = records >= 0
    if excluded is None:
        return counting
    return counting & (records[:, :, None] != excluded[: len(records), None, :]).all(-1)


def adam_step(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    taken: Sequence[Tensor],
    *,
    learning_rate: float,
    decay: float,
) -> None:
    """Take one step of Adam, in place: the kernel of torch.optim.Adam, without what it does around it."""
    torch._fused_adam_(
        list(weights),
        list(gradients),
        list(means),
        list(squares),
        [],
        list(taken),
        lr=learning_rate,
        beta1=_BETA_1,
        beta2=_BETA_2,
        weight_decay=decay,
        eps=_EPSILON,
        amsgrad=False,
        maximize=False,
    )
