"""How a network is trained. The defaults are the paper's configuration table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quietmax.errors import InvalidInput, QuietmaxError, check_type
from quietmax.models.losses import Convexified, Loss, logit_gradient
from quietmax.models.mlp import MLP, activation, initial_mlp


@dataclass(frozen=True)
class TrainingSettings:
    """Everything but the data and the seed.

    ``l2`` is the coefficient as Keras counts it: the penalty is ``l2 * ||kernels||^2`` (no biases), which in
    the paper's notation is ``2*lam``, so its default 0.001 is ``lam = 0.0005`` (THEORY section 1).
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
        if any(width < 1 for width in self.hidden):
            raise InvalidInput(
                f"Hidden widths {self.hidden} must all be at least 1; leave the layer out instead."
            )
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise InvalidInput(
                f"The learning rate is {self.learning_rate}, but it must be positive; try 0.001."
            )
        if self.batch_size < 1 or self.epochs < 0:
            raise InvalidInput(
                f"Batch size {self.batch_size} and epochs {self.epochs} must be at least 1 and 0; try 100 and 100."
            )
        if not (math.isfinite(self.l2) and self.l2 >= 0):
            raise InvalidInput(f"The L2 coefficient is {self.l2}, but it must be 0 or more; try 0.001.")


_DECAY_MEAN, _DECAY_SQUARE, _EPSILON = 0.9, 0.999, 1e-7


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
    """Move the weights in place, their gradients taken plus ``decay`` times them; ``taken`` counts this step already.

    torch's fused kernel does it in one pass over memory; torch.optim.Adam calls the same one, but spends five times as
    long around it. The tests hold the two against each other.
    """
    torch._fused_adam_(
        list(weights),
        list(gradients),
        list(means),
        list(squares),
        [],
        list(taken),
        lr=learning_rate,
        beta1=_DECAY_MEAN,
        beta2=_DECAY_SQUARE,
        weight_decay=decay,
        eps=_EPSILON,
        amsgrad=False,
        maximize=False,
    )


Rows = NDArray[np.int64]


def check_records(inputs: Tensor, targets: Tensor, classes: int) -> None:
    """Refuse records that do not fit together."""
    if inputs.ndim != 2 or targets.shape != inputs.shape[:1]:
        raise InvalidInput(
            f"Features of shape {tuple(inputs.shape)} and labels of shape {tuple(targets.shape)} do not fit; "
            "reshape them to (records, features) and (records,)."
        )
    if len(targets) and (int(targets.min()) < 0 or int(targets.max()) >= classes):
        raise InvalidInput(f"A label lies outside 0 to {classes - 1}; encode labels as consecutive integers.")
    if not torch.isfinite(inputs).all():
        raise InvalidInput("A feature is NaN or infinite; remove or impute such records before training.")


def check_networks(rows: Sequence[Rows], records: int, **given: Sequence[Any] | None) -> None:
    """Refuse row indices outside of the records, and options that are not ``given`` once per network."""
    if not rows:
        raise InvalidInput("There is no network to train; give the row indices of at least one.")
    for what, each in given.items():
        if each is not None and len(each) != len(rows):
            raise InvalidInput(
                f"{what} has {len(each)} entries for {len(rows)} networks; give one per network."
            )
    if any(len(each) and (each.min() < 0 or each.max() >= records) for each in rows):
        raise InvalidInput(
            f"A row index lies outside the {records} records; give indices from 0 to {records - 1}."
        )


def check_weights(weights: Sequence[Tensor]) -> None:
    """Refuse weights that training made infinite or NaN."""
    if not all(torch.isfinite(tensor).all() for tensor in weights):
        raise QuietmaxError(
            "Training diverged: a weight is no longer a finite number; lower the learning rate or check the features."
        )


Progress = Callable[[int, int], None]

_STEPS_PER_BLOCK = 64
_NOBODY = -1


def train_stack(
    features: NDArray[np.floating] | Tensor,
    labels: NDArray[np.integer] | Tensor,
    classes: int,
    rows: Sequence[Rows],
    *,
    settings: TrainingSettings,
    seeds: Sequence[int],
    alphas: Sequence[float] | None = None,
    left_out: Sequence[int | None] | None = None,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> MLP:
    """Train one network per entry of ``rows`` on those records of the shared ``features`` and ``labels``.

    ``seeds`` fixes each network's initial weights and order of records. ``alphas`` gives each network its own
    convexification constant. ``left_out`` names, per network, one row that is passed over wherever it occurs
    while initialisation and order stay the same: the neighbour of THEORY 2.3 and of observed sensitivity.
    ``progress(step, steps)`` is called now and then.
    """
    inputs = torch.as_tensor(features).to(dtype).contiguous()
    targets = torch.as_tensor(labels).to(torch.int64)
    _check(inputs, targets, classes, rows, seeds, settings, alphas, left_out)
    if any(len(each) == 0 for each in rows):
        raise InvalidInput("Every network needs at least one training record; give non-empty row indices.")
    start = initial_mlp(
        (inputs.shape[1], *settings.hidden, classes), settings.activation, tuple(seeds), dtype
    )
    # Longest first, so that the networks still in training are always a prefix of the stack.
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    chosen = torch.tensor(order)
    stack = MLP(
        start.widths,
        start.activation,
        tuple(kernel[chosen] for kernel in start.kernels),
        tuple(bias[chosen] for bias in start.biases),
    )
    batches = _Batches([rows[index] for index in order], [seeds[index] for index in order], settings)
    excluded = None
    if left_out is not None and any(row is not None for row in left_out):
        excluded = torch.tensor([_NOBODY - 1 if (row := left_out[index]) is None else row for index in order])
    tilts = None
    if alphas is not None:
        tilts = torch.tensor([alphas[index] for index in order], dtype=dtype).unsqueeze(1)
    step = _Step(stack, inputs, targets, settings, tilts, batches.width)
    complete = excluded is None and not batches.padded
    done = 0
    for block in batches:
        for records in block:
            step.run(records, None if complete else kept_records(records, excluded))
        done += len(block)
        if progress is not None:
            progress(done, batches.steps)
    check_weights([tensor for _, tensor in stack.parameters()])
    back = torch.argsort(chosen)
    return MLP(
        stack.widths,
        stack.activation,
        tuple(kernel[back] for kernel in stack.kernels),
        tuple(bias[back] for bias in stack.biases),
    )


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
    """Train one network per entry of ``rows``, all for exactly ``steps`` batches, none influencing another.

    For teachers (THEORY 3.4): each network's weights must be a function of its own records and seed alone. All
    operations have shapes fixed by public numbers, each network keeps its place in the stack, and no branch depends
    on anybody's values. A network without records, or one that diverges, is returned like any other; the caller
    looks at its weights. ``settings.epochs`` plays no part.
    """
    inputs = torch.as_tensor(features).to(torch.float32).contiguous()
    targets = torch.as_tensor(labels).to(torch.int64)
    _check(inputs, targets, classes, rows, seeds, settings, None, None)
    # Padding is a record of zeros of its own: nobody's record may enter another network's arithmetic, even masked.
    inputs = torch.cat([inputs, inputs.new_zeros(1, inputs.shape[1])])
    targets = torch.cat([targets, targets.new_zeros(1)])
    stack = initial_mlp((inputs.shape[1], *settings.hidden, classes), settings.activation, tuple(seeds))
    step = _Step(stack, inputs, targets, settings, None, settings.batch_size, padding=len(inputs) - 1)
    streams = [_stream(each, seed, settings.batch_size) for each, seed in zip(rows, seeds, strict=True)]
    nobody = torch.full((len(rows),), _NOBODY)
    for done in range(1, steps + 1):
        records = torch.from_numpy(np.stack([next(stream) for stream in streams]))
        step.run(records, kept_records(records, nobody))
        if progress is not None and (done % _STEPS_PER_BLOCK == 0 or done == steps):
            progress(done, steps)
    return stack


def _stream(rows: Rows, seed: int, width: int) -> Iterator[Rows]:
    """Batches of ``width`` row indices without end, each pass in a new order, the last of a pass padded with -1."""
    generator = np.random.default_rng((0x0DE5, seed))
    while True:
        yield from _pass(rows, generator, width)


def _pass(rows: Rows, generator: np.random.Generator, width: int) -> Rows:
    """All records once in a new order, cut into batches; at least one batch."""
    missing = -len(rows) % width if len(rows) else width
    return np.pad(generator.permutation(rows), (0, missing), constant_values=_NOBODY).reshape(-1, width)


def _check(
    inputs: Tensor,
    targets: Tensor,
    classes: int,
    rows: Sequence[Rows],
    seeds: Sequence[int],
    settings: TrainingSettings,
    alphas: Sequence[float] | None,
    left_out: Sequence[int | None] | None,
) -> None:
    check_records(inputs, targets, classes)
    check_networks(rows, len(inputs), seeds=seeds, alphas=alphas, left_out=left_out)
    if alphas is not None:
        if not isinstance(settings.loss, Convexified):
            raise InvalidInput(
                "alphas only make sense with the convexified loss; set settings.loss=Convexified()."
            )
        for alpha in alphas:
            Convexified(alpha)


class _Batches:
    """Blocks of steps; a step is one batch of row indices per network still training, padded with -1."""

    def __init__(self, rows: Sequence[Rows], seeds: Sequence[int], settings: TrainingSettings) -> None:
        self.width = min(settings.batch_size, max(len(each) for each in rows))
        self._rows = rows
        self._generators = [np.random.default_rng((0x0DE5, seed)) for seed in seeds]
        self._totals = [settings.epochs * -(-len(each) // self.width) for each in rows]
        self.steps = max(self._totals)
        self.padded = any(len(each) % self.width for each in rows)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield int64 tensors of shape (steps, networks still training, width)."""
        empty = np.empty((0, self.width), dtype=np.int64)
        pending = [empty] * len(self._rows)
        at = 0
        while at < self.steps:
            active = sum(total > at for total in self._totals)
            length = min(_STEPS_PER_BLOCK, self._totals[active - 1] - at)
            block = np.empty((length, active, self.width), dtype=np.int64)
            for network in range(active):
                queue = [pending[network]]
                while sum(len(part) for part in queue) < length:
                    queue.append(self._epoch(network))
                ready = np.concatenate(queue)
                block[:, network], pending[network] = ready[:length], ready[length:]
            at += length
            yield torch.from_numpy(block)

    def _epoch(self, network: int) -> Rows:
        return _pass(self._rows[network], self._generators[network], self.width)


class _Step:
    """One step of Adam for every network that is still training; owns the working memory."""

    def __init__(
        self,
        stack: MLP,
        inputs: Tensor,
        targets: Tensor,
        settings: TrainingSettings,
        tilts: Tensor | None,
        width: int,
        padding: int = 0,
    ) -> None:
        self._stack, self._inputs, self._targets = stack, inputs, targets
        self._settings, self._tilts, self._padding = settings, tilts, padding
        self._activation = activation(settings.activation)
        parameters = (stack.kernels, stack.biases)
        self._gradients = tuple([torch.zeros_like(tensor) for tensor in group] for group in parameters)
        self._means = tuple([torch.zeros_like(tensor) for tensor in group] for group in parameters)
        self._squares = tuple([torch.zeros_like(tensor) for tensor in group] for group in parameters)
        self._taken = [torch.zeros((), dtype=torch.float32) for _ in stack.kernels]
        self._signals = [
            torch.empty(stack.networks, width, neurons, dtype=inputs.dtype) for neurons in stack.widths
        ]
        self._slopes = [torch.empty_like(signal) for signal in self._signals[1:-1]]
        self._views: _Views | None = None

    def run(self, records: Tensor, kept: Tensor | None) -> None:
        """Take one step on ``records``, row indices of shape (networks still training, width)."""
        gathered, weights = records, None
        if kept is not None:
            gathered, weights = torch.where(records < 0, self._padding, records), kept.to(self._inputs.dtype)
        if self._views is None or self._views.active != len(records):
            self._views = _Views(self, len(records))
        slope = self._forward(self._views, gathered, weights)
        self._backward(self._views, slope)
        self._adam(self._views)

    def _forward(self, views: _Views, records: Tensor, kept: Tensor | None) -> Tensor:
        """Fill the signals of every layer and return d loss / d logits."""
        picked = records.view(-1)
        torch.index_select(self._inputs, 0, picked, out=views.batch)
        signal, *hidden, logits = views.signals
        for depth, outgoing in enumerate(hidden):
            torch.baddbmm(views.biases[depth], signal, views.kernels[depth], out=outgoing)
            signal = self._activation.apply_(outgoing)
        torch.baddbmm(views.biases[-1], signal, views.flipped[-1], out=logits)
        labels = torch.index_select(self._targets, 0, picked).view(records.shape)
        return logit_gradient(self._settings.loss, logits, labels, views.tilts, kept)

    def _backward(self, views: _Views, slope: Tensor) -> None:
        """Fill the gradients of every layer, from the last to the first."""
        last = len(views.kernels) - 1
        for depth in range(last, -1, -1):
            incoming = views.signals[depth]
            torch.sum(slope, 1, keepdim=True, out=views.gradients[1][depth])
            if depth == last:
                torch.bmm(slope.transpose(1, 2), incoming, out=views.gradients[0][depth])
            else:
                torch.bmm(incoming.transpose(1, 2), slope, out=views.gradients[0][depth])
            if depth:
                kernel = views.kernels[depth] if depth == last else views.flipped[depth]
                outgoing = torch.bmm(slope, kernel, out=views.slopes[depth - 1])
                slope = self._activation.backward(outgoing, incoming)

    def _adam(self, views: _Views) -> None:
        """Adam for kernels (with the L2 penalty's gradient ``2*l2*W``) and biases (without)."""
        torch._foreach_add_(self._taken, 1)
        for group, decay in ((0, 2 * self._settings.l2), (1, 0.0)):
            adam_step(
                (views.kernels, views.biases)[group],
                views.gradients[group],
                views.means[group],
                views.squares[group],
                self._taken,
                learning_rate=self._settings.learning_rate,
                decay=decay,
            )


class _Views:
    """The first ``active`` networks' part of a step's memory, made once and used in every step."""

    def __init__(self, step: _Step, active: int) -> None:
        self.active = active
        self.kernels = [kernel[:active] for kernel in step._stack.kernels]
        self.flipped = [kernel.transpose(1, 2) for kernel in self.kernels]
        self.biases = [bias[:active] for bias in step._stack.biases]
        self.signals = [signal[:active] for signal in step._signals]
        self.batch = self.signals[0].view(-1, self.signals[0].shape[-1])
        self.slopes = [slope[:active] for slope in step._slopes]
        self.gradients, self.means, self.squares = (
            [[tensor[:active] for tensor in group] for group in groups]
            for groups in (step._gradients, step._means, step._squares)
        )
        self.tilts = None if step._tilts is None else step._tilts[:active]


def kept_records(records: Tensor, excluded: Tensor | None) -> Tensor:
    """True for the records that count, False for padding and each network's left-out one."""
    counting = records >= 0
    return counting if excluded is None else counting & (records != excluded[: len(records), None])
