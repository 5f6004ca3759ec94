"""Makes `patches.safetensors`, the filters and the whitening of the map `Patches`, from synthetic images alone.

    python docs/making/patch_filters.py patches.safetensors

The filters are patches of dead-leaves images. The whitening shortens the directions in which two crops of one synthetic
canvas differ (`synthetic_images.py`). The script prints the SHA-256 of the file. It uses one thread, because the last
digits depend on their number. Another processor or library may round differently too and give another SHA-256.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from synthetic_images import canvases, crops

from quietmax.models.features.images import (
    CONTRAST,
    Patches,
    _dead_leaves,
    _normalised,
    _responses,
    _unit_brightness,
)

SHAPE = (3, 32, 32)
PATCH_IMAGES, PATCH_SEED = 4000, 2021
PATCHES, CHOICE_SEED = 60_000, 1
CANVASES, CANVAS_SEED, CROP_SEED = 4000, 5, 1
PATCH_FLOOR = 0.1
"""Added to the eigenvalues of the patches' covariance, in units of their mean."""
FLOOR = 3e-4
"""Added to the eigenvalues of the covariance of the differences, in units of their sum."""
CELLS = 2
AT_ONCE = 16


def make_filters() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the filters and the offsets: whitened random patches of dead-leaves images."""
    images = _unit_brightness(torch.from_numpy(_dead_leaves(PATCH_IMAGES, SHAPE, PATCH_SEED)))
    generator = np.random.default_rng(CHOICE_SEED)
    windows = images.unfold(2, Patches.side, 1).unfold(3, Patches.side, 1)
    image, row, column = (
        generator.integers(size, size=PATCHES) for size in (PATCH_IMAGES, *windows.shape[2:4])
    )
    patches = windows[image, :, row, column].reshape(PATCHES, -1).double()
    patches -= patches.mean(dim=1, keepdim=True)
    patches /= (patches.square().mean(dim=1, keepdim=True) + CONTRAST**2).sqrt()
    mean = patches.mean(dim=0)
    patches -= mean
    values, vectors = torch.linalg.eigh(patches.T @ patches / PATCHES)
    whitening = (vectors / (values + PATCH_FLOOR * values.mean()).sqrt()) @ vectors.T
    whitened = patches @ whitening
    lengths = whitened.norm(dim=1)
    # Flat patches are left out. The patches are drawn in random order already.
    chosen = whitened[lengths > lengths.median() / 2][: Patches.filters]
    filters = (chosen / chosen.norm(dim=1, keepdim=True)) @ whitening
    offsets = filters @ mean
    filters -= filters.mean(dim=1, keepdim=True)
    return filters.float().reshape(-1, SHAPE[0], Patches.side, Patches.side), offsets.float()


def make_whitening(filters: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return `(C / trace C + floor)^(-1/2)`; C is the covariance of the differences between two crops of a canvas."""
    images, generator = canvases(CANVASES, CANVAS_SEED), torch.Generator().manual_seed(CROP_SEED)

    def cells() -> torch.Tensor:
        views = torch.split(_unit_brightness(crops(images, generator)), AT_ONCE)
        return torch.cat([_normalised(_responses(part, filters, offsets, CELLS)) for part in views])

    rows = (cells() - cells()).flatten(0, 1).double()
    rows -= rows.mean(dim=0)
    values, vectors = torch.linalg.eigh(rows.T @ rows)
    weights = (values.clamp_min(0.0) / values.sum() + FLOOR) ** -0.5
    matrix: torch.Tensor = (vectors * weights) @ vectors.T
    return matrix.float()


def make() -> dict[str, torch.Tensor]:
    """Return all tensors of the file."""
    filters, offsets = make_filters()
    return {"filters": filters, "offsets": offsets, "whitening": make_whitening(filters, offsets)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    content = safetensors.torch.save({name: tensor.contiguous() for name, tensor in make().items()})
    Path(sys.argv[1]).write_bytes(content)
    print(hashlib.sha256(content).hexdigest(), len(content))
