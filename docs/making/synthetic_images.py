"""Synthetic colour images that stand for photographs: canvases of textured, shaded shapes, and random crops of them.

Two crops of one canvas show the same shapes, colours and textures in another place, size and light. What differs
between them is what a feature should ignore. No real image is used anywhere.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import affine_grid, grid_sample

SIDE = 64
"""Height and width of a canvas."""
CROP = 32
"""Height and width of a crop, whatever part of the canvas it shows."""
AT_ONCE = 100
SHAPES = 24
COLOURS = 4
TEXTURES = 3
EXPONENTS = (2.0, 8.0, 1.0, 2.0)
"""Of the norm that draws an ellipse, a box, a diamond and a star (an ellipse with lobes)."""
STAR = 3


def canvases(count: int, seed: int) -> torch.Tensor:
    """Draw canvases.

    Parameters
    ----------
    count : int
        How many.
    seed : int
        Public seed.

    Returns
    -------
    Tensor of uint8, shape (count, 3, 64, 64)
    """
    generator = torch.Generator().manual_seed(seed)
    parts = [_canvases(AT_ONCE, generator) for _ in range(-(-count // AT_ONCE))]
    return torch.cat(parts)[:count]


def _textures(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return noise of spectrum f^-a with a from 0.5 to 2.5, in part stretched, cut at 0 or bent into gratings."""

    def uniform() -> torch.Tensor:
        return torch.rand(count, 1, 1, generator=generator)

    slope, angle = 0.5 + 2.0 * uniform(), math.pi * uniform()
    stretch = torch.exp(1.2 * uniform() * (uniform() < 0.5))
    down, right = torch.fft.fftfreq(SIDE)[:, None], torch.fft.rfftfreq(SIDE)[None]
    along = (down * angle.cos() + right * angle.sin()) * stretch
    across = (right * angle.cos() - down * angle.sin()) / stretch
    amplitude = (along.square() + across.square() + SIDE**-2) ** (-slope / 2)
    white = torch.randn(count, SIDE, SIDE, generator=generator)
    noise = torch.fft.irfft2(torch.fft.rfft2(white) * amplitude, s=(SIDE, SIDE))
    noise = (noise - noise.mean((1, 2), keepdim=True)) / noise.std((1, 2), keepdim=True)
    y, x = torch.arange(SIDE)[:, None], torch.arange(SIDE)[None]
    period = 2.5 + 14 * uniform() ** 2
    phase = (x * angle.cos() + y * angle.sin()) * 2 * math.pi / period
    grating = 1.4 * torch.sin(phase + 2 * noise * uniform())
    choice = uniform()
    return torch.where(choice < 0.3, grating, torch.where(choice < 0.45, noise.sign(), noise))


def _canvases(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return canvases. Each has colours, textures, a kind of shape and a range of sizes of its own."""

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(count, *shape, generator=generator)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(count, *shape, generator=generator)

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=generator)

    each = torch.arange(count)
    y, x = torch.arange(SIDE)[None, :, None].float(), torch.arange(SIDE)[None, None].float()
    contrast = 0.1 + 0.5 * uniform(1, 1)
    brightness = 0.2 + 0.6 * uniform(1, 1) + 0.7 * contrast * normal(COLOURS, 1)
    colours = brightness + (0.03 + 0.21 * uniform(1, 1)) * normal(COLOURS, 3)
    textures = torch.stack([_textures(count, generator) for _ in range(TEXTURES)], dim=1)
    tints = 0.3 * normal(TEXTURES, 3) + normal(TEXTURES, 1)
    strength = 0.22 * uniform(TEXTURES, 1) ** 2
    textures = textures[:, :, None] * (tints * strength)[..., None, None]
    kind = integers(0, len(EXPONENTS))
    exponent = torch.tensor(EXPONENTS)[kind][:, None, None]
    lobes = (integers(2, 7).float() * (kind == STAR))[:, None, None]
    depth = 0.45 * uniform(1, 1) * (lobes > 0)
    smallest, largest = 2.5 + 4 * uniform(1, 1), SIDE * (0.15 + 0.4 * uniform(1, 1))
    stretch = torch.exp(0.65 * uniform(1, 1) * (uniform(1, 1) < 0.6))
    direction, any_direction = math.pi * uniform(1, 1), (uniform(1, 1) < 0.6).float()
    blur = (0.5 + 1.2 * uniform(1, 1)) / 1.5
    shapes = (3 + (SHAPES - 3) * uniform(1, 1)).round()

    def paint() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a textured colour and the slopes of its shading."""
        colour = colours[each, integers(0, COLOURS)]
        texture = textures[each, integers(0, TEXTURES)]
        colour = colour + 0.05 * normal(3)
        return colour[:, :, None, None] + texture, 0.12 * normal(1, 1), 0.12 * normal(1, 1)

    ground, right, down = paint()
    images = ground + ((2 * x / SIDE - 1) * right + (2 * y / SIDE - 1) * down)[:, None]
    for number in range(SHAPES):
        size = 1 / (1 / largest + (1 / smallest - 1 / largest) * uniform(1, 1))
        left, top = SIDE * (1.1 * uniform(1, 1) - 0.05), SIDE * (1.1 * uniform(1, 1) - 0.05)
        angle = direction + any_direction * 2 * math.pi * uniform(1, 1)
        along = ((x - left) * angle.cos() + (y - top) * angle.sin()) / stretch
        across = ((y - top) * angle.cos() - (x - left) * angle.sin()) * stretch
        distance = ((along.abs() + 1e-3) ** exponent + (across.abs() + 1e-3) ** exponent) ** (1 / exponent)
        border = size * (1 + depth * torch.cos(lobes * torch.atan2(across, along)))
        cover = torch.sigmoid((border - distance) / blur) * (SHAPES - number <= shapes)
        colour, right, down = paint()
        shaded = colour + (along / size * right + across / size * down).clamp(-2, 2)[:, None]
        images = images + (shaded - images) * cover[:, None]
    lit = 0.15 * (uniform(1, 1) < 0.5)
    images = images * (1 + lit * _textures(count, generator))[:, None]
    return (images.clamp(0, 1) * 255).round().to(torch.uint8)


def crops(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return one random view of every canvas.

    A view shows a part of 20 to 56 pixels, in part mirrored, turned by up to 14 degrees and stretched. Contrast,
    brightness and colours change, one view in seven is grey, and there is a little noise.

    Parameters
    ----------
    images : Tensor of uint8, shape (n, 3, 64, 64)
        Canvases.
    generator : torch.Generator
        Of public seed.

    Returns
    -------
    Tensor of float32, shape (n, 3, 32, 32)
        Values in [0, 1].
    """
    count = len(images)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(count, *shape, generator=generator)

    part = torch.exp(math.log(20 / SIDE) + math.log(56 / 20) * uniform())
    stretch, angle = torch.exp((uniform() - 0.5) * 0.5), (uniform() - 0.5) * 0.5
    mirror = torch.where(uniform() < 0.5, -1.0, 1.0)
    width, height = (part * stretch).clamp_max(0.95), (part / stretch).clamp_max(0.95)
    right, down = (2 * uniform() - 1) * (1 - width), (2 * uniform() - 1) * (1 - height)
    cosine, sine = angle.cos(), angle.sin()
    first = torch.stack([mirror * width * cosine, -height * sine, right], dim=1)
    second = torch.stack([mirror * width * sine, height * cosine, down], dim=1)
    grid = affine_grid(torch.stack([first, second], dim=1), [count, 3, CROP, CROP], align_corners=False)
    views = grid_sample(images.float() / 255, grid, padding_mode="reflection", align_corners=False)
    mean = views.mean((2, 3), keepdim=True)
    views = (views - mean) * (0.5 + uniform(1, 1, 1)) + mean + 0.25 * (uniform(1, 1, 1) - 0.5)
    mixing = torch.eye(3) + 0.12 * torch.randn(count, 3, 3, generator=generator)
    views = torch.einsum("nij,njhw->nihw", mixing / mixing.sum(2, keepdim=True), views)
    views = views + (uniform(1, 1, 1) < 0.15) * (views.mean(1, keepdim=True) - views)
    noise = uniform(1, 1, 1) * torch.randn(views.shape, generator=generator)
    return (views + 0.03 * noise).clamp(0, 1)
