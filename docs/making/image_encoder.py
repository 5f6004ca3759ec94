"""Trains a small convolutional encoder on synthetic images alone, and writes it as a file that `Encoder` reads.

    python docs/making/image_encoder.py encoder.safetensors [--steps 700] [--seed 1]

The encoder learns to tell which two of many crops come from the same canvas (`synthetic_images.py`). The loss is the
cross-entropy of the contrastive task (van den Oord, Li & Vinyals 2018, https://arxiv.org/abs/1807.03748; on images from
random processes: Baradad et al. 2021, https://arxiv.org/abs/2106.05963). The outputs of its last layer are averaged in
2 x 2 cells, normalised and whitened by the covariance of the differences between two crops of a canvas.

The script prints the loss and the SHA-256 of the file. It trains in bfloat16. Another processor or library may round
differently and give another SHA-256. `docs/results/image-accuracy.md` states what the encoder is worth.
"""

from __future__ import annotations

import argparse
import math
import time
from itertools import pairwise
from pathlib import Path

import torch
from synthetic_images import canvases, crops
from torch import nn

from quietmax.models.features import save_encoder

CANVASES, CANVAS_SEED = 4000, 5
WIDTHS = (48, 64, 128, 256)
PROJECTION = (256, 128)
PAIRS = 192
"""Pairs of crops in a step."""
TEMPERATURE = 0.15
RATE, LAST_RATE, WARM_UP = 2e-3, 4e-5, 40
WEIGHT_DECAY = 1e-4
LONGEST_GRADIENT = 5.0
CELLS = 2
FLOOR = 3e-4
"""Added to the eigenvalues of the covariance, in units of their sum."""
AT_ONCE = 100
REPORTED = 25


def make_network() -> nn.Sequential:
    """Return the untrained layers. Inputs are pixels in [0, 1] minus 0.5, divided by 0.25."""
    layers: list[nn.Module] = [nn.Conv2d(3, WIDTHS[0], 4, stride=2, padding=1, bias=False)]
    layers += [nn.BatchNorm2d(WIDTHS[0]), nn.ReLU()]
    for number, (width, following) in enumerate(pairwise(WIDTHS)):
        if number > 0:
            layers.append(nn.MaxPool2d(2))
        layers += [
            nn.Conv2d(width, following, 3, padding=1, bias=False),
            nn.BatchNorm2d(following),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def views(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random crops of canvases as inputs of the network."""
    return ((crops(images, generator) - 0.5) / 0.25).contiguous(memory_format=torch.channels_last)


def contrastive_loss(projections: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of finding the other crop of a canvas; row i belongs to row i + half."""
    units = nn.functional.normalize(projections.float(), dim=1)
    similarities = (units @ units.T / TEMPERATURE).fill_diagonal_(-math.inf)
    partners = torch.arange(len(units)).roll(len(units) // 2)
    return nn.functional.cross_entropy(similarities, partners)


def train(network: nn.Sequential, images: torch.Tensor, steps: int, generator: torch.Generator) -> None:
    """Train the network in place, with a projection that is thrown away."""
    hidden, out = PROJECTION
    projection = nn.Sequential(
        nn.Linear(WIDTHS[-1], hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, out)
    )
    parameters = [*network.parameters(), *projection.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=WEIGHT_DECAY)
    total = 0.0
    for step in range(steps):
        cosine = (1 + math.cos(math.pi * step / steps)) / 2
        rate = min(1.0, (step + 1) / WARM_UP) * (LAST_RATE + (RATE - LAST_RATE) * cosine)
        for group in optimizer.param_groups:
            group["lr"] = rate
        chosen = images[torch.randint(len(images), (PAIRS,), generator=generator)]
        both = torch.cat([views(chosen, generator), views(chosen, generator)])
        with torch.autocast("cpu", torch.bfloat16):
            projections = projection(network(both).mean((2, 3)))
        loss = contrastive_loss(projections)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, LONGEST_GRADIENT)
        optimizer.step()
        total += loss.item()
        if (step + 1) % REPORTED == 0:
            print(
                f"step {step + 1}: loss {total / REPORTED:.3f}, {time.process_time() / 60:.1f} processor minutes"
            )
            total = 0.0


def whitened(network: nn.Sequential, images: torch.Tensor, generator: torch.Generator) -> nn.Sequential:
    """Return the network with cells, normalisation and whitening after it."""
    cells = nn.Sequential(
        *network, nn.AdaptiveAvgPool2d(CELLS), nn.GroupNorm(1, WIDTHS[-1], affine=False)
    ).eval()
    first, second = (
        torch.cat([cells(views(part, generator)) for part in images.split(AT_ONCE)]) for _ in range(2)
    )
    rows = (first - second).permute(0, 2, 3, 1).flatten(0, 2).double()
    rows -= rows.mean(dim=0)
    values, vectors = torch.linalg.eigh(rows.T @ rows)
    weights = (values.clamp_min(0.0) / values.sum() + FLOOR) ** -0.5
    matrix = ((vectors * weights) @ vectors.T).float()
    whitening = nn.Conv2d(WIDTHS[-1], WIDTHS[-1], 1, bias=False)
    whitening.weight.copy_(matrix[:, :, None, None])
    return nn.Sequential(*cells, whitening, nn.Flatten(1))


def make(steps: int, seed: int) -> nn.Sequential:
    """Return the trained encoder."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    images = canvases(CANVASES, CANVAS_SEED)
    network = make_network()
    train(network, images, steps, generator)
    with torch.no_grad():
        return whitened(network, images, generator).eval()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    options = _options()
    digest = save_encoder(make(options.steps, options.seed), options.path)
    print(digest, options.path.stat().st_size)
