"""The sensitivity of a network: as the paper computes it, as its Table 1 bounds it, and as retraining measures it.

The paper's formulas (THEORY section 1) reproduce its tables to the last printed digit. They are *not* upper bounds:
THEORY 2.3 gives four reasons, and retraining without one record exceeds them at the paper's own setting.

Each bound of Table 1 on the L2 sensitivity of trained weights is computed whether or not its conditions hold; shape,
settings and measurements of a trained network decide about them.

Retraining compares networks that were trained with and without one unit: one person with all rows if the records have a
person column, else one record (THEORY 3.7). The largest change is a lower bound on the true sensitivity: it can refute
a claimed upper bound and never prove one. Everything else is the same, including the initial weights and the order of
the records (THEORY 2.3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax.accounting.guarantee import Unit
from quietmax.data.records import Records
from quietmax.errors import InvalidInput
from quietmax.models.stacked import (
    MLP,
    Convexified,
    CrossEntropy,
    Progress,
    Quadratic,
    TrainingSettings,
    activation,
    loss_value,
    train_stack,
)
from quietmax.models.training import Model
from quietmax.sensitivity.certified import Basis, Sensitivity

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_module("torch")


@dataclass(frozen=True)
class PublishedSensitivity:
    """The paper's quantities for one network and training set.

    Parameters
    ----------
    rho : Sensitivity
        The Lipschitz constant of the loss.
    weights_l2 : Sensitivity
        Delta_2 W: all weights together, in L2.
    weight : Sensitivity
        Delta omega: one weight.
    logit : Sensitivity
        Delta z: one logit.
    probability : Sensitivity
        Delta p: one probability, at most 1.
    probability_untruncated : Sensitivity
        Delta p before it is truncated at 1.
    oaro : Sensitivity
        The bound on On-Average-Remove-One stability.
    """

    rho: Sensitivity
    weights_l2: Sensitivity
    weight: Sensitivity
    logit: Sensitivity
    probability: Sensitivity
    probability_untruncated: Sensitivity
    oaro: Sensitivity

    def to_json(self) -> dict[str, float]:
        """Return the values by name."""
        return {name: entry["value"] for name, entry in asdict(self).items()}


def published_sensitivity(model: Model, *, maxima: Sequence[float] | None = None) -> PublishedSensitivity:
    """Compute the paper's sensitivities of a trained model.

    Parameters
    ----------
    model : Model
        A multilayer perceptron that `quietmax.train` returned.
    maxima : sequence of float or None
        The largest neuron values ``x_t``, one for each layer except the last. By default 1, as in the paper's tables.

    Returns
    -------
    PublishedSensitivity
        The paper's quantities.

    Raises
    ------
    InvalidInput
        If the activation is unbounded and `maxima` is not given.

    Examples
    --------
    >>> import quietmax as qm
    >>> data = qm.load("mnist-5k", records=500)
    >>> model = qm.train(data, settings=qm.TrainingSettings(epochs=1))
    >>> published_sensitivity(model).logit.basis
    'published'
    """
    chosen = model.settings
    return published_sensitivity_for(
        model.features,
        chosen.hidden,
        model.classes,
        model.records,
        l2=chosen.l2,
        activation_name=chosen.activation,
        maxima=maxima,
    )


def published_sensitivity_for(
    features: int,
    hidden: Sequence[int],
    classes: int,
    records: int,
    *,
    l2: float = 0.001,
    activation_name: str = "tanh",
    maxima: Sequence[float] | None = None,
) -> PublishedSensitivity:
    """Compute the paper's formulas from the shape of a network and the number of training records.

    ``rho = (C-1)/(C*|V_{T-1}|) * prod_t sqrt(|V_t|)*x_t``, ``D2W = 2*rho/(lam*n)`` with ``lam = l2/2``,
    ``Dw = D2W/sqrt(|W|)``, ``Dz = a_u*|V_{T-1}|*Dw``, ``Dp = min(exp(2*Dz)-1, 1)``, ``OARO = 2*rho^2/(lam*n)``;
    ``|V_t|`` and ``|W|`` count no biases.
    """
    layers = [features, *hidden]
    if min(layers) < 1 or classes < 2 or records < 1:
        raise InvalidInput(
            "features, hidden and records must be at least 1 and classes at least 2, got "
            f"features={features}, hidden={tuple(hidden)}, records={records}, classes={classes}."
        )
    if not (math.isfinite(l2) and l2 > 0):
        raise InvalidInput(f"l2 must be a finite number above 0, got {l2}.")
    largest = [1.0] * len(layers) if maxima is None else [float(each) for each in maxima]
    if len(largest) != len(layers) or not all(math.isfinite(each) and each >= 0 for each in largest):
        raise InvalidInput(
            f"maxima must hold {len(layers)} numbers that are finite and at least 0, one per layer, got {largest}."
        )
    bound = activation(activation_name).bound if hidden else None
    if bound is None:
        if maxima is None:
            what = f"the activation {activation_name}" if hidden else "a network without hidden layers"
            raise InvalidInput(f"maxima is required for {what}, which has no bounded activation.")
        bound = largest[-1]
    lam, last = l2 / 2, layers[-1]
    neurons = math.prod(math.sqrt(width) * top for width, top in zip(layers, largest, strict=True))
    rho = (classes - 1) / (classes * last) * neurons
    weights = sum(into * out for into, out in zip(layers, [*layers[1:], classes], strict=True))
    weights_l2 = 2 * rho / (lam * records)
    weight = weights_l2 / math.sqrt(weights)
    logit = bound * last * weight
    untruncated = math.expm1(2 * logit) if 2 * logit < 700 else math.inf

    def _entry(value: float, formula: str) -> Sensitivity:
        how = "x_t = 1" if maxima is None else "x_t as given"
        return Sensitivity(
            value, "published", f"The paper's {formula}, {how}; not an upper bound (THEORY 2.3)."
        )

    return PublishedSensitivity(
        rho=_entry(rho, "rho = (C-1)/(C*|V_{T-1}|) * prod sqrt(|V_t|)*x_t"),
        weights_l2=_entry(weights_l2, "2*rho/(lam*n)"),
        weight=_entry(weight, "D2W/sqrt(|W|)"),
        logit=_entry(logit, "a_u*|V_{T-1}|*Dw"),
        probability=_entry(min(untruncated, 1.0), "min(exp(2*Dz)-1, 1)"),
        probability_untruncated=_entry(untruncated, "exp(2*Dz)-1"),
        oaro=_entry(2 * rho**2 / (lam * records), "2*rho^2/(lam*n)"),
    )


CONDITIONS = (
    *("convex loss", "smooth loss", "decreasing SGD step", "constant SGD step"),
    *("normalised data", "binary classes", "rho-Lipschitz loss", "minimiser reached"),
)
"""All conditions in the order of Table 1; the last is not in it, but the proofs that need it take it for granted."""

_NEGLIGIBLE = 0.01
"""Share of a bound that the distance to the minimiser may add: a gradient g of the objective adds up to 2 |g|/lam."""


@dataclass(frozen=True)
class Condition:
    """One condition of a bound, decided for one network."""

    name: str
    holds: bool | None  # Whether it holds; None if that takes a trained model
    because: str


@dataclass(frozen=True)
class UpperBound:
    """One row of the paper's Table 1 for one network."""

    work: str  # Whose bound it is
    formula: str  # The bound as a formula
    value: float
    conditions: tuple[Condition, ...]

    @property
    def applies(self) -> bool | None:
        """False if a condition does not hold, True if all hold, None if one was not checked and the others hold."""
        verdicts = [condition.holds for condition in self.conditions]
        return False if False in verdicts else None if None in verdicts else True

    def to_json(self) -> dict[str, Any]:
        """Return the bound, its conditions and whether it applies."""
        stated = {"work": self.work, "formula": self.formula, "value": self.value, "applies": self.applies}
        return {**stated, "conditions": [asdict(condition) for condition in self.conditions]}


@dataclass(frozen=True)
class MeasuredFacts:
    """What a trained network and its training records say about the conditions."""

    norm: float  # Largest L2 norm of a record
    loss: float  # Loss of the network on all records, without the penalty
    loss_at_mean: float
    gradient: float
    objective_gradient: float  # Norm of the gradient of the whole objective, which is 0 at a minimiser


def upper_bounds_for(
    features: int,
    classes: int,
    records: int,
    *,
    settings: TrainingSettings | None = None,
    facts: MeasuredFacts | None = None,
) -> tuple[UpperBound, ...]:
    """Compute the bounds of Table 1 from the shape of a network, and check what the shape decides.

    ``2 rho/(lam n)`` (Chaudhuri et al., normalised data of two classes; Wu et al., decreasing step; the paper),
    ``C ||x|| rho/(lam n)`` (Chaudhuri et al.) and ``2 eta rho/(1 - (1 - eta lam)^n)`` (Wu et al., constant step), with
    ``lam = l2/2`` and ``||x||`` the largest norm that the data space allows, ``sqrt(features)``.
    """
    chosen = settings or TrainingSettings()
    published = published_sensitivity_for(
        features, chosen.hidden, classes, records, l2=chosen.l2, activation_name=chosen.activation
    )
    rho, lam, eta = published.rho.value, chosen.l2 / 2, chosen.learning_rate
    norm = math.sqrt(features)
    tight = 2 * rho / (lam * records)
    general = classes * norm * rho / (lam * records)
    constant = 2 * eta * rho / -math.expm1(records * math.log1p(-eta * lam))
    known = _conditions(chosen, classes, norm, rho, tight, facts)
    rows = (
        ("Chaudhuri et al.", "2 rho/(lam n)", tight, "convex normalised binary Lipschitz minimiser"),
        ("Chaudhuri et al.", "C ||x|| rho/(lam n)", general, "convex Lipschitz minimiser"),
        ("Wu et al.", "2 rho/(lam n)", tight, "convex smooth decreasing Lipschitz"),
        ("Wu et al.", "2 eta rho/(1 - (1 - eta lam)^n)", constant, "convex smooth constant Lipschitz"),
        ("this paper", "2 rho/(lam n)", tight, "convex Lipschitz minimiser"),
    )
    return tuple(
        UpperBound(work, formula, bound, tuple(known[name] for name in needed.split()))
        for work, formula, bound, needed in rows
    )


def _conditions(
    settings: TrainingSettings,
    classes: int,
    norm: float,
    rho: float,
    bound: float,
    facts: MeasuredFacts | None,
) -> dict[str, Condition]:
    adam = False, "trained with Adam, which scales every step by past gradients"
    where = "data space" if facts is None else "training set"
    largest = norm if facts is None else facts.norm
    lipschitz: tuple[bool | None, str]
    minimiser: tuple[bool | None, str]
    lipschitz = minimiser = None, "needs a trained network"
    if facts is not None:
        # Gradients at one point can refute a Lipschitz constant and never prove it.
        refuted = False if facts.gradient > rho else None
        lipschitz = refuted, f"a record's gradient has norm {facts.gradient:.3g}, rho is {rho:.3g}"
        added, size = 2 * facts.objective_gradient / (settings.l2 / 2), facts.objective_gradient
        because = f"the objective's gradient has norm {size:.2g}, which adds up to {added:.3g}"
        minimiser = added <= _NEGLIGIBLE * bound, because
    hidden = f"{' and '.join(str(width) for width in settings.hidden)} hidden neurons"
    if facts is not None and facts.loss_at_mean > facts.loss:
        hidden += f"; loss {facts.loss:.3g}, at the mean of equivalent networks {facts.loss_at_mean:.3g}"
    verdicts = {
        "convex": (False, hidden),
        "smooth": (False, "second derivatives grow with the output weights"),
        "decreasing": adam,
        "constant": adam,
        "normalised": (largest <= 1 + 1e-6, f"||x|| up to {largest:.4g} in the {where}"),
        "binary": (classes == 2, f"{classes} classes"),
        "Lipschitz": lipschitz,
        "minimiser": minimiser,
    }
    return {
        short: Condition(name, *verdict)
        for name, (short, verdict) in zip(CONDITIONS, verdicts.items(), strict=True)
    }


def measured_facts(model: Model, records: Records) -> MeasuredFacts:
    """Measure what the conditions of the bounds depend on."""
    network = replace(
        model.network,
        kernels=tuple(kernel.double() for kernel in model.network.kernels),
        biases=tuple(bias.double() for bias in model.network.biases),
    )
    features = torch.from_numpy(np.asarray(records.features, dtype=np.float64))
    labels = torch.from_numpy(records.labels)
    form = model.settings.loss
    base = form.base if isinstance(form, Convexified) else form
    parameters, _, outputs = _layers(network, features)
    loss = loss_value(form, outputs[-1], labels)
    penalty = model.settings.l2 * sum(kernel.square().sum() for kernel in parameters[::2])
    gradients = torch.autograd.grad(loss + penalty, parameters)
    return MeasuredFacts(
        norm=float(features.norm(dim=1).max()),
        loss=float(loss.detach()),
        loss_at_mean=float(loss_value(form, _mean_of_equivalent(network).logits(features), labels)),
        gradient=float(_record_gradient_norms(network, base, features, labels).max()),
        objective_gradient=float(torch.stack([each.square().sum() for each in gradients]).sum().sqrt()),
    )


def _mean_of_equivalent(network: MLP) -> MLP:
    """Return the mean of all networks that differ only in the order of neurons in each hidden layer."""
    last = len(network.kernels) - 1
    kernels, biases = [], []
    for depth, (kernel, bias) in enumerate(zip(network.kernels, network.biases, strict=True)):
        # The last kernel is stored as (networks, outputs, inputs), the others as (networks, inputs, outputs).
        into, out = (2, 1) if depth == last else (1, 2)
        if depth > 0:
            kernel = kernel.mean(into, keepdim=True).expand_as(kernel)
        if depth < last:
            kernel = kernel.mean(out, keepdim=True).expand_as(kernel)
            bias = bias.mean(2, keepdim=True).expand_as(bias)
        kernels.append(kernel.contiguous())
        biases.append(bias.contiguous())
    return replace(network, kernels=tuple(kernels), biases=tuple(biases))


def _layers(network: MLP, features: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    parameters = [tensor.clone().requires_grad_() for _, tensor in network.parameters()]
    function = {"tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu}[network.activation]
    inputs: list[Tensor] = [features]
    outputs: list[Tensor] = []
    for kernel, bias in zip(parameters[:-2:2], parameters[1:-2:2], strict=True):
        outputs.append(inputs[-1] @ kernel[0] + bias[0, 0])
        inputs.append(function(outputs[-1]))
    outputs.append(inputs[-1] @ parameters[-2][0].T + parameters[-1][0, 0])
    return parameters, inputs, outputs


def _record_gradient_norms(
    network: MLP, base: CrossEntropy | Quadratic, features: Tensor, labels: Tensor
) -> Tensor:
    """Return the norm of the gradient of each record's own loss in the kernels, without biases as in the paper."""
    _, inputs, outputs = _layers(network, features)
    slopes = torch.autograd.grad(len(labels) * loss_value(base, outputs[-1], labels), outputs)
    squares = [
        slope.square().sum(1) * signal.detach().square().sum(1)
        for slope, signal in zip(slopes, inputs, strict=True)
    ]
    return torch.stack(squares).sum(0).sqrt()


Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
Kind = Literal["mislabelled", "extreme", "ordinary"]
Quantity = Literal["weight", "weights_l2", "logit"]

_KINDS: tuple[Kind, ...] = ("mislabelled", "extreme", "ordinary")
_QUANTITIES: tuple[Quantity, ...] = ("weight", "weights_l2", "logit")


@dataclass(frozen=True)
class Removal:
    """What removing one unit changed."""

    rows: tuple[int, ...]  # The removed rows: one record, or all rows of one person
    kind: Kind
    weight: float  # The largest change of one weight
    weights_l2: float  # The change of all weights together, in L2
    logit: float  # The largest change of one logit


@dataclass(frozen=True)
class BoundCheck:
    """A measured change compared with a bound."""

    quantity: Quantity
    empirical: float  # The largest change seen in retraining
    bound: float
    basis: Basis

    @property
    def verdict(self) -> Literal["refuted", "consistent"]:
        """``"refuted"`` if the change exceeds the bound, else ``"consistent"``, which proves nothing."""
        return "refuted" if self.empirical > self.bound else "consistent"

    def to_json(self) -> dict[str, Any]:
        """Return all fields and the verdict by name."""
        return {**asdict(self), "verdict": self.verdict}


@dataclass(frozen=True)
class EmpiricalSensitivity:
    """The changes seen in retraining.

    Parameters
    ----------
    removals : tuple of Removal
        One entry for each unit that was removed.
    records : int
        The number of training records.
    queries : int
        The number of queries whose logits were compared.
    unit : {"record", "person"}
        What was removed each time.
    """

    removals: tuple[Removal, ...]
    records: int
    queries: int
    unit: Unit = "record"

    @property
    def weight(self) -> Sensitivity:
        """The largest change of one weight."""
        return self._largest("weight")

    @property
    def weights_l2(self) -> Sensitivity:
        """The largest change of all weights together, in L2."""
        return self._largest("weights_l2")

    @property
    def logit(self) -> Sensitivity:
        """The largest change of one logit of any query."""
        return self._largest("logit")

    def _largest(self, quantity: Quantity) -> Sensitivity:
        worst = max(self.removals, key=lambda removal: float(getattr(removal, quantity)))
        article = "a" if worst.kind == "mislabelled" else "an"
        because = (
            f"The largest of {len(self.removals)} retrainings, without {article} {worst.kind} {self.unit}."
        )
        return Sensitivity(float(getattr(worst, quantity)), "empirical", because)

    def against(
        self, bounds: PublishedSensitivity | Mapping[Quantity, Sensitivity]
    ) -> tuple[BoundCheck, ...]:
        """Compare the largest changes with the paper's formulas, or with each bound that a mapping holds."""
        given = vars(bounds) if isinstance(bounds, PublishedSensitivity) else bounds
        return tuple(
            BoundCheck(quantity, self._largest(quantity).value, given[quantity].value, given[quantity].basis)
            for quantity in _QUANTITIES
            if quantity in given
        )

    def to_json(self) -> dict[str, Any]:
        """Return every removal and the largest changes by name."""
        return {
            "unit": self.unit,
            "records": self.records,
            "queries": self.queries,
            **{quantity: self._largest(quantity).value for quantity in _QUANTITIES},
            "removals": [asdict(removal) for removal in self.removals],
        }


def empirical_sensitivity(
    records: Records,
    *,
    removals: int = 6,
    queries: NDArray[np.floating] | None = None,
    settings: TrainingSettings | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> EmpiricalSensitivity:
    """Measure the sensitivity of a network by retraining it without single units: persons, or records.

    One network is trained on all records and one without each removed unit, all at once. Weights are the kernels
    without the biases, as in the paper.

    Parameters
    ----------
    records : Records
        The training records. With persons, a unit is all rows of one person.
    removals : int
        How many units are removed, one at a time: in turn a mislabelled, an extreme and an ordinary one.
    queries : ndarray of shape (queries, features) or None
        Logits are compared on these rows and on the removed records.
    settings : TrainingSettings or None
        How the networks are trained; the paper's settings by default.
    seed : int
        Seed of the initial weights, the order of the records and the choice of the removed units.
    progress : callable or None
        Called with the number of finished epochs and of all epochs.

    Returns
    -------
    EmpiricalSensitivity
        The changes, one entry per removed unit.

    Examples
    --------
    >>> import quietmax as qm
    >>> data = qm.load("mnist-5k", records=60)
    >>> settings = qm.TrainingSettings(hidden=(4,), epochs=1)
    >>> found = empirical_sensitivity(data.train, removals=2, settings=settings)
    >>> found.logit.basis, len(found.removals)
    ('empirical', 2)
    """
    planted, rows, kinds = _plant(records, removals=removals, seed=seed)
    stack = train_stack(
        planted.features,
        planted.labels,
        planted.classes,
        [np.arange(len(planted))] * (removals + 1),
        settings=settings or TrainingSettings(),
        seeds=[seed] * (removals + 1),
        left_out=[(), *rows],
        progress=progress,
    )
    asked = planted.features[np.concatenate(rows)]
    if queries is not None:
        asked = np.concatenate([np.asarray(queries, dtype=np.float32), asked])
    weights = torch.cat([kernel.flatten(1) for kernel in stack.kernels], 1).double().numpy()
    logits = stack.stacked_logits(asked).double().numpy()
    first, *others = zip(weights, logits, strict=True)
    return _compared(first, others, rows, kinds, records)


def _plant(records: Records, *, removals: int, seed: int = 0) -> tuple[Records, list[Rows], list[Kind]]:
    """Change chosen units into units of each kind in turn; return the records, each unit's rows and kind.

    Mislabelled rows get the next class; features of extreme rows move to the farther end of their range.
    """
    units = len(np.unique(records.units))
    if not 1 <= removals < units:
        raise InvalidInput(f"removals must be between 1 and {units - 1}, got {removals}.")
    generator = np.random.default_rng((0x0B5E, seed))
    chosen = generator.choice(units, removals, replace=False)
    rows = [np.flatnonzero(records.units == unit) for unit in chosen]
    kinds = [_KINDS[place % len(_KINDS)] for place in range(removals)]
    features, labels = records.features.copy(), records.labels.copy()
    low, high = float(features.min()), float(features.max())
    for changed, kind in zip(rows, kinds, strict=True):
        if kind == "mislabelled":
            labels[changed] = (labels[changed] + 1) % records.classes
        elif kind == "extreme":
            features[changed] = np.where(features[changed] > (low + high) / 2, low, high)
    return replace(records, features=features, labels=labels), rows, kinds


def _compared(
    first: tuple[Floats, Floats],
    others: Sequence[tuple[Floats, Floats]],
    rows: Sequence[Rows],
    kinds: Sequence[Kind],
    records: Records,
) -> EmpiricalSensitivity:
    removals = []
    for (weights, logits), gone, kind in zip(others, rows, kinds, strict=True):
        moved = weights - first[0]
        largest, logit = np.abs(moved).max(), np.abs(logits - first[1]).max()
        removed = tuple(gone.tolist())
        removals.append(Removal(removed, kind, float(largest), float(np.linalg.norm(moved)), float(logit)))
    return EmpiricalSensitivity(tuple(removals), len(records), len(first[1]), records.unit)
