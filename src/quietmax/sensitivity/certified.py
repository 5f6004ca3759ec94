"""Certified sensitivities of a linear head: proven upper bounds on what one record, added or removed, can move.

The head is a softmax classifier with weights W (C x d) on features of length at most R, and N is its
declared size, a public constant. The cross-entropy l of one record has `||grad l|| = ||p - e_y|| * ||f|| <=
sqrt(2) R =: rho`. Proofs: THEORY 3.1 and 3.2, and the page on the head. All values are rounded up.
"""

from __future__ import annotations

import math

from quietmax.errors import InvalidInput
from quietmax.sensitivity.base import ScoreBounds, Sensitivity

_UP = 1.0 + 2.0**-40
"""Covers the rounding of the few floating-point steps of each formula."""


def head_gradient(clip: float, *, coordinates: int = 0, grid: float = 0.0) -> Sensitivity:
    """Sum of per-record gradients, each clipped to length S: `S + sqrt(coordinates) * grid`.

    The second term is there if every coordinate of the sum is rounded to a grid before release.

    >>> round(head_gradient(0.5).value, 6)
    0.5
    """
    _positive(clip=clip)
    value = clip + math.sqrt(coordinates) * grid
    return Sensitivity(
        value * _UP, "certified", f"One record adds one gradient clipped to {clip:g} (THEORY 3.1)."
    )


def head_output(
    *, regularisation: float, declared_size: float, radius: float = 1.0, tolerance: float = 0.0
) -> Sensitivity:
    """Minimiser of `(1/N) sum_i l_i(W) + (lam/2) ||W||^2`, found up to `||grad|| <= tolerance`, in Frobenius norm.

    `sqrt(2) R / (lam N) + 2 tolerance / lam`: at the minimiser without record i the gradient of the
    objective with it is `grad l_i / N`, and the objective is lam-strongly convex (THEORY 3.1).

    >>> round(head_output(regularisation=0.01, declared_size=10_000).value, 5)
    0.01414
    """
    _positive(regularisation=regularisation, declared_size=declared_size, radius=radius)
    _nonnegative(tolerance=tolerance)
    value = (math.sqrt(2) * radius / declared_size + 2 * tolerance) / regularisation
    return Sensitivity(
        value * _UP,
        "certified",
        "The regularised mean cross-entropy is strongly convex and Lipschitz (THEORY 3.1).",
    )


def tilted_share(
    *, alpha: float, mass: float, regularisation: float, classes: int, radius: float = 1.0
) -> float:
    """Largest share `e^(aB) / (M + e^(aB))` of the tilted weight that one record can have, at any minimiser.

    `B = ln C + sqrt(2) R w` bounds a record's loss, w being `weight_bound`. Close to 1 means that tilting
    gives one record as much say as all others together, and the certified sensitivity is useless.

    >>> tilted_share(alpha=1.0, mass=10_000, regularisation=0.01, classes=10) > 0.999
    True
    """
    _positive(alpha=alpha, mass=mass)
    largest_loss = math.log(classes) + math.sqrt(2) * radius * weight_bound(regularisation, classes, radius)
    return 1.0 / (1.0 + math.exp(math.log(mass) - alpha * largest_loss))


def weight_bound(regularisation: float, classes: int, radius: float = 1.0) -> float:
    """Largest length `min(sqrt(2 ln(C) / lam), sqrt(2) R / lam)` of a minimiser of the tilted objective.

    The objective at the minimiser is at most that at 0, where every loss is ln C; and at the minimiser
    `-lam W` is a sum of gradients with weights that add up to less than 1.

    >>> round(weight_bound(0.01, 10), 2)
    21.46
    """
    _positive(regularisation=regularisation, radius=radius)
    if classes < 2:
        raise InvalidInput(f"The number of classes is {classes}, but must be at least 2; give such a number.")
    return min(math.sqrt(2 * math.log(classes) / regularisation), math.sqrt(2) * radius / regularisation)


def head_tilted(
    *,
    alpha: float,
    mass: float,
    regularisation: float,
    classes: int,
    radius: float = 1.0,
    tolerance: float = 0.0,
) -> Sensitivity:
    """Minimiser of the convexified loss `(1/a) ln(M + sum_i exp(a l_i)) + (lam/2) ||W||^2`, in Frobenius norm.

    `min(pi (rho / lam + w), 2 w) + 2 tolerance / lam`, with pi the `tilted_share`, w the `weight_bound`
    (THEORY 3.2 states it with `2 rho / lam`, which is no smaller since `lam w <= rho`).

    >>> round(head_tilted(alpha=1.0, mass=10_000, regularisation=0.01, classes=10).value, 1)
    42.9
    """
    share = tilted_share(
        alpha=alpha, mass=mass, regularisation=regularisation, classes=classes, radius=radius
    )
    _nonnegative(tolerance=tolerance)
    bound = weight_bound(regularisation, classes, radius)
    value = (
        min(share * (math.sqrt(2) * radius / regularisation + bound), 2 * bound)
        + 2 * tolerance / regularisation
    )
    return Sensitivity(
        value * _UP,
        "certified",
        f"A record's share of the tilted weight is at most {share:.3g} (THEORY 3.2).",
    )


def logit(weights: Sensitivity, *, classes: int, length: float = 1.0) -> Sensitivity:
    """One logit `W_c . f` with `||f|| <= length`: `sqrt((C-1)/C) * D * length`.

    The rows of a minimiser sum to zero, so a change of one row by t moves the others by at least `t /
    sqrt(C-1)` together.

    >>> round(logit(Sensitivity(1.0, "certified", "given"), classes=2).value, 4)
    0.7071
    """
    _certified(weights)
    _positive(length=length)
    value = math.sqrt((classes - 1) / classes) * weights.value * length
    return Sensitivity(
        value * _UP, "certified", f"{weights.because} Rows of weights sum to zero (THEORY 3.1)."
    )


def logits(weights: Sensitivity, *, length: float = 1.0) -> Sensitivity:
    """All logits `W f` together, in L2, with `||f|| <= length`: `D * length`."""
    _certified(weights)
    _positive(length=length)
    return Sensitivity(weights.value * length * _UP, "certified", weights.because)


def score_bounds(weights: Sensitivity, *, classes: int, length: float = 1.0) -> ScoreBounds:
    """Both bounds in the form that the per-query mechanisms take."""
    return ScoreBounds(logit(weights, classes=classes, length=length), logits(weights, length=length))


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 < value < math.inf:
            raise InvalidInput(
                f"The {name.replace('_', ' ')} is {value}, but must be a positive number; give one."
            )


def _nonnegative(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 <= value < math.inf:
            raise InvalidInput(
                f"The {name.replace('_', ' ')} is {value}, but must be at least 0; give such a number."
            )


def _certified(weights: Sensitivity) -> None:
    if weights.basis != "certified":
        raise InvalidInput(
            f"A bound on logits needs a certified sensitivity of the weights, not an {weights.basis} one; give one."
        )
