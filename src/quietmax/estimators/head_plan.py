"""How a head is trained: settings computed from public numbers only, the same rule for every data set.

The rule of the gradient route is one number. After T steps of rate eta, noise of standard deviation `kappa
= eta * S * T / (mu * N)` has gathered on every logit (features have length 1), so eta follows from a chosen
kappa. In trials on MNIST, CIFAR-10, Adult, Location and small tables, at N from 120 to 60,000 and epsilon
from 1 to 10, kappa = 0.7 was the best or as good as the best, whatever T, S, the number of classes and of
features. More steps hardly matter once a step is short (`eta * S` about 20) and cost time, so their number
is limited by the size of the head.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from quietmax.models.features import FeatureMap, Scattering, UnitNorm

SIZE_SHARE = 0.01
"""Share of mu^2 spent on a noisy count when the size is not declared."""
CENTRING_SHARE = 0.05
"""Share of mu^2 spent on the mean feature vector."""
BIAS = 0.2
"""The constant feature beside features of length about 1."""
GRADIENT_NOISE = 0.7
"""kappa: standard deviation that all noise together may have on a logit."""
OUTPUT_NOISE = 0.25
"""The same for the output route, whose logits are kept small by the regulariser."""
QUERY_NOISE = 0.15
"""The same for answers per query, where epsilon takes the place of mu."""
CLIP = 0.2
FEWEST_STEPS, MOST_STEPS = 30, 300
SHORT_STEP, LONGEST_STEP = 20.0, 300.0
VALUES_DRAWN = 1.6e6
"""Steps are limited so that about this many noise values are drawn, if the fewest steps do not need more."""
SMALLEST_REGULARISATION = 1e-6
TOLERANCE = 0.005
"""The solver's gradient may be this share of one record's, which adds 1% to the sensitivity."""
TILTED_TOLERANCE = 1e-6
"""The same for the convexified loss, whose gradient does not shrink with the size."""


CONSTANT_PER_COLUMN = 0.3
"""Default features of tables: `UnitNorm` with this constant times the root of the number of columns."""


def default_features(columns: int, image_shape: tuple[int, int, int] | None = None) -> FeatureMap:
    """Wavelet scattering for images; for a table each record divided by its length together with a constant.

    >>> default_features(100)
    UnitNorm(constant=3.0)
    """
    if image_shape is not None:
        return Scattering(image_shape)
    return UnitNorm(CONSTANT_PER_COLUMN * math.sqrt(columns))


@dataclass(frozen=True)
class GradientPlan:
    """T full-batch steps `W <- W - (rate / size) * (clipped gradient sum + noise)`."""

    steps: int
    rate: float
    clip: float

    def to_json(self) -> dict[str, Any]:
        """The three numbers."""
        return asdict(self)


@dataclass(frozen=True)
class OutputPlan:
    """Minimise with `(regularisation / 2) ||W||^2` until `||gradient|| <= tolerance`, then release."""

    regularisation: float
    tolerance: float

    def to_json(self) -> dict[str, Any]:
        """The two numbers."""
        return asdict(self)


def gradient_plan(
    size: float,
    features: int,
    classes: int,
    mu: float,
    *,
    steps: int | None = None,
    rate: float | None = None,
    clip: float | None = None,
) -> GradientPlan:
    """Fill in what is not given, for a declared size and mu of all the steps together.

    >>> gradient_plan(10_000, 3970, 10, 0.26).steps
    40
    """
    strength = GRADIENT_NOISE * mu * size
    if steps is None:
        affordable = max(FEWEST_STEPS, min(MOST_STEPS, int(VALUES_DRAWN / (features * classes))))
        steps = min(max(math.ceil(strength / SHORT_STEP), FEWEST_STEPS), affordable)
    clip = CLIP if clip is None else clip
    if rate is None:
        rate = min(strength / steps, LONGEST_STEP) / clip
    return GradientPlan(int(steps), float(rate), float(clip))


def output_plan(
    size: float, strength: float, *, noise: float = OUTPUT_NOISE, regularisation: float | None = None
) -> OutputPlan:
    """`lam = sqrt(2) / (kappa * N * strength)`, strength being mu (weights released) or epsilon (per query).

    Then the noise on a logit has a scale of about kappa (`noise`).

    >>> round(output_plan(10_000, 0.26).regularisation, 5)
    0.00218
    """
    if regularisation is None:
        regularisation = max(math.sqrt(2) / (noise * size * strength), SMALLEST_REGULARISATION)
    return OutputPlan(float(regularisation), TOLERANCE * math.sqrt(2) / size)
