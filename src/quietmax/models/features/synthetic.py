"""Synthetic images that stand for "images in general": the public measure of how scattering channels vary together.

Dead leaves (Matheron 1968; Lee, Mumford & Huang 2001): discs of random place, size and brightness that
cover one another. They share with natural images and drawings what matters here, edges of all directions
and scales with flat regions between, and owe nothing to any record.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_LEAVES = 20
_SMALLEST, _LARGEST = 1 / 14, 10 / 14
_COLOUR = 0.25


def dead_leaves(count: int, image_shape: tuple[int, int, int], seed: int) -> NDArray[np.float32]:
    """`count` images of shape (channels, height, width) with values in [0, 1], from a public seed.

    Radii have density proportional to `r^-2` between 1/14 and 10/14 of the image's mean side; brightness is
    uniform, and each channel differs from it by at most 0.25.

    >>> dead_leaves(2, (3, 16, 16), seed=0).shape
    (2, 3, 16, 16)
    """
    channels, height, width = image_shape
    generator = np.random.default_rng(seed)
    rows, columns = np.arange(height)[:, None], np.arange(width)[None, :]
    side = (height + width) / 2

    def uniform(*shape: int) -> NDArray[np.float64]:
        return generator.random((count, *shape))

    def paint() -> NDArray[np.float64]:
        shift = _COLOUR * (2 * uniform(channels, 1, 1) - 1) if channels > 1 else 0.0
        return np.clip(uniform(1, 1, 1) + shift, 0.0, 1.0)

    images = np.broadcast_to(paint(), (count, *image_shape)).copy()
    for _ in range(_LEAVES):
        radius = side / (1 / _LARGEST + (1 / _SMALLEST - 1 / _LARGEST) * uniform(1, 1, 1))
        distance = np.hypot(rows - height * uniform(1, 1, 1), columns - width * uniform(1, 1, 1))
        leaf = 1 / (1 + np.exp(np.clip(2 * (distance - radius), -50, 50)))
        images = images * (1 - leaf) + paint() * leaf
    return images.astype(np.float32)
