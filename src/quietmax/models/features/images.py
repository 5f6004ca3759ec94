"""Feature maps for images: wavelet scattering, whitened with statistics of public synthetic images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax.errors import InvalidInput
from quietmax.models.features.base import WIDTH, BatchedMap

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

_PLANES_AT_ONCE = 64
_SYNTHETIC_IMAGES, _SYNTHETIC_SEED = 512, 2021
_FLOOR = 1e-3
TINY = 1e-30
_LEAVES = 20
_SMALLEST, _LARGEST = 1 / 14, 10 / 14
_COLOUR = 0.25


@dataclass(frozen=True)
class Scattering(BatchedMap):
    """Wavelet scattering of images: normalised per image, whitened, of unit length.

    1. The image is divided by the root of its mean square, so that units do not matter; then the scattering
       coefficients of every colour channel are computed: K paths at every position.
    2. Group normalisation: each of `groups` groups of neighbouring paths is brought to mean 0 and variance 1 in
       each image.
    3. The K paths of every position are multiplied by `(C / trace C + 0.001)^(-whitening/2)`, where C is their
       covariance over 512 synthetic images (`dead_leaves`), so that no few directions dominate the norm.
    4. Every image's features are divided by their length.

    Parameters
    ----------
    image_shape : (int, int, int)
        Channels, height and width.
    scales : int
        Number of scales J.
    angles : int
        Number of angles L.
    groups : int
        Number of groups; a divisor of the number of paths.
    whitening : float
        Power of the whitening, from 0 (none) to 2.

    Raises
    ------
    InvalidInput
        If a parameter is not valid.

    Examples
    --------
    >>> Scattering((1, 28, 28)).dimension(784)
    3969
    """

    image_shape: tuple[int, int, int]
    scales: int = 2
    angles: int = 8
    groups: int = 27
    whitening: float = 0.5
    kind: ClassVar[str] = "scattering"
    parallel: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_shape", tuple(int(side) for side in self.image_shape))
        if len(self.image_shape) != 3 or self.image_shape[0] < 1 or self.scales < 1 or self.angles < 2:
            raise InvalidInput(
                "Scattering needs an image shape (channels, height, width), at least one scale and two angles; "
                f"got {self.image_shape}, {self.scales} and {self.angles}."
            )
        if min(self.image_shape[1:]) <= 2**self.scales:
            raise InvalidInput(
                f"Scattering with {self.scales} scales needs images of more than {2**self.scales} pixels in height "
                f"and width, got {self.image_shape[1]} x {self.image_shape[2]}."
            )
        if self.groups < 1 or self.paths % self.groups:
            raise InvalidInput(
                f"The number of groups must divide the {self.paths} scattering paths, got {self.groups}."
            )
        if not 0.0 <= self.whitening <= 2.0:
            raise InvalidInput(f"The whitening power must be between 0 and 2, got {self.whitening}.")

    @property
    def paths(self) -> int:
        """K, the number of scattering paths of all colour channels."""
        scales, angles = self.scales, self.angles
        return self.image_shape[0] * int(1 + scales * angles + angles**2 * scales * (scales - 1) // 2)

    @property
    def grid(self) -> tuple[int, int]:
        """The number of positions down and across."""
        down, across = (_padded(side, self.scales) // 2**self.scales - 2 for side in self.image_shape[1:])
        return down, across

    def dimension(self, columns: int) -> int:
        """Return the number of features: K paths at every position."""
        _check_columns(columns, self.image_shape)
        return self.paths * math.prod(self.grid)

    def normalised(self, images: torch.Tensor) -> torch.Tensor:
        """Return the group-normalised scattering coefficients of images, of shape (n, K, positions)."""
        planes = _scatter(
            unit_brightness(images).reshape(-1, *self.image_shape[1:]), self.scales, self.angles
        )
        paths = planes.reshape(len(images), self.paths, -1)
        return torch.nn.functional.group_norm(paths, self.groups)

    def _batch_rows(self) -> int:
        return max(1, _PLANES_AT_ONCE // self.image_shape[0])

    def _batch(self, batch: torch.Tensor) -> torch.Tensor:
        paths = self.normalised(batch.reshape(len(batch), *self.image_shape))
        if self.whitening > 0.0:
            paths = (paths.mT.contiguous() @ _whitening(self))[..., : self.paths].mT
        return unit(paths.flatten(1))

    def _prepare(self) -> None:
        if self.whitening > 0.0:
            _whitening(self)


@lru_cache(maxsize=8)
def _whitening(scattering: Scattering) -> torch.Tensor:
    """Return `(C / trace C + floor)^(-whitening/2)` for the covariance C of the paths over synthetic images.

    The matrix is padded with zero columns.
    """
    images = dead_leaves(_SYNTHETIC_IMAGES, scattering.image_shape, _SYNTHETIC_SEED)
    parts = torch.split(torch.from_numpy(images), _PLANES_AT_ONCE)
    channels = torch.cat([scattering.normalised(part) for part in parts]).to(torch.float64)
    centred = channels - channels.mean(dim=(0, 2), keepdim=True)
    values, vectors = torch.linalg.eigh(torch.einsum("ncp,nep->ce", centred, centred))
    weights = (values.clamp_min(0.0) / values.sum() + _FLOOR) ** (-scattering.whitening / 2)
    matrix: torch.Tensor = (vectors * weights) @ vectors.T
    return torch.nn.functional.pad(matrix.to(torch.float32), (0, -len(matrix) % WIDTH))


def _check_columns(columns: int, image_shape: tuple[int, ...]) -> None:
    """Raise an error if so many numbers are not an image of this shape."""
    if columns != math.prod(image_shape):
        raise InvalidInput(
            f"The records have {columns} numbers, which do not form images of shape {image_shape}."
        )


def unit(features: torch.Tensor) -> torch.Tensor:
    """Return rows divided by their length."""
    lengths: torch.Tensor = features.norm(dim=1, keepdim=True).clamp_min(TINY)
    return features / lengths


def unit_brightness(images: torch.Tensor) -> torch.Tensor:
    """Return images divided by the root of their mean square, so that units do not matter."""
    flat = images.flatten(1)
    lengths: torch.Tensor = flat.norm(dim=1, keepdim=True).clamp_min(TINY) / math.sqrt(flat.shape[1])
    return (flat / lengths).reshape(images.shape)


def _scatter(images: torch.Tensor, scales: int = 2, angles: int = 8) -> torch.Tensor:
    """Return the scattering coefficients of images up to order 2.

    Order 0 is `x * phi`, order 1 `|x * psi_1| * phi`, order 2 `||x * psi_1| * psi_2| * phi` over the
    wavelets psi_2 coarser than psi_1, in kymatio's order: `1 + J L + L^2 J (J - 1) / 2` paths.
    """
    filters = _filters(images.shape[-2], images.shape[-1], scales, angles)
    padded = _reflect(images.to(torch.float32), scales)
    spectrum = torch.fft.fft2(padded)
    first, second = [], []
    for fine in range(scales):
        moduli = _moduli(spectrum, filters.wavelets[fine][0], 2**fine)
        first.append(moduli.flatten(-2) @ filters.averages[fine])
        inner = torch.fft.fft2(moduli) if fine + 1 < scales else moduli
        coarser = [
            _moduli(inner, filters.wavelets[coarse][fine], 2 ** (coarse - fine)).flatten(-2)
            @ filters.averages[coarse]
            for coarse in range(fine + 1, scales)
        ]
        if coarser:
            second.append(torch.cat(coarser, dim=2).flatten(1, 2))
    mean = (padded.flatten(-2) @ filters.averages[0])[:, None]
    paths = torch.cat([mean, *first, *second], dim=1)
    return paths[..., : math.prod(filters.grid)].reshape(len(images), -1, *filters.grid)


@dataclass(frozen=True)
class _Filters:
    """The filters for one image size.

    `wavelets[j][r]`: Fourier multipliers of scale j at resolution r, (L, rows, columns, 2) with equal
    factors for the real and the imaginary part. `averages[r]`: the matrix that averages a flattened image
    of resolution r, padded with zero columns; the averages have the shape `grid`.
    """

    wavelets: tuple[tuple[torch.Tensor, ...], ...]
    averages: tuple[torch.Tensor, ...]
    grid: tuple[int, int]


def _padded(size: int, scales: int) -> int:
    """Return the size of a padded side."""
    step = 2**scales
    return int(((size + step) // step + 1) * step)


def _gabor(
    rows: int, columns: int, sigma: float, angle: float, frequency: float, slant: float
) -> NDArray[np.complex128]:
    """Return a Gaussian envelope times a plane wave, periodised over the padded image."""
    cosine, sine = math.cos(angle), math.sin(angle)
    y, x = np.meshgrid(np.arange(-2 * rows, 3 * rows), np.arange(-2 * columns, 3 * columns), indexing="ij")
    along, across = cosine * y + sine * x, -sine * y + cosine * x
    wave = np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2) + 1j * frequency * along)
    folded: NDArray[np.complex128] = wave.reshape(5, rows, 5, columns).sum(axis=(0, 2))
    return folded * slant / (2 * math.pi * sigma**2)


def _morlet(rows: int, columns: int, scale: int, angle: float, angles: int) -> NDArray[np.float64]:
    """Return the Fourier transform (real) of the Morlet wavelet: a Gabor function made to have mean zero."""
    sigma, frequency, slant = 0.8 * 2**scale, 0.75 * math.pi / 2**scale, 4.0 / angles
    gabor = _gabor(rows, columns, sigma, angle, frequency, slant)
    envelope = _gabor(rows, columns, sigma, angle, 0.0, slant)
    wavelet = gabor - envelope * (gabor.sum() / envelope.sum())
    return np.fft.fft2(wavelet).real


def _lower_resolution(multiplier: NDArray[np.float64], resolution: int, axis: int) -> NDArray[np.float64]:
    """Drop the upper frequencies along an axis, keeping `size / 2^resolution` of them."""
    if resolution == 0:
        return multiplier
    moved = np.moveaxis(multiplier, axis, -1)
    half = moved.shape[-1] // 2 ** (resolution + 1)
    low = np.concatenate([moved[..., :half], moved[..., moved.shape[-1] - half :]], axis=-1)
    return np.moveaxis(low, -1, axis)


def _averaging(size: int, scales: int, resolution: int) -> NDArray[np.float64]:
    """Return the matrix that averages `size / 2^resolution` points with a window of width 2^J and subsamples them."""
    sigma = 0.8 * 2 ** (scales - 1)
    offsets = np.arange(-2 * size, 3 * size)
    line = np.exp(-(offsets**2) / (2 * sigma**2)).reshape(5, size).sum(axis=0) / math.sqrt(
        2 * math.pi * sigma**2
    )
    kernel = np.fft.ifft(_lower_resolution(np.fft.fft(line).real, resolution, 0)).real
    points = np.arange(kernel.size)
    centres = points[:: 2 ** (scales - resolution)][1:-1]  # the outermost two lie in the padding
    matrix: NDArray[np.float64] = kernel[(centres[:, None] - points[None, :]) % kernel.size]
    return matrix


@lru_cache(maxsize=8)
def _filters(rows: int, columns: int, scales: int, angles: int) -> _Filters:
    """Compute the filters for images of rows x columns pixels."""
    height, width = _padded(rows, scales), _padded(columns, scales)
    turns = [(angles // 2 - 1 - turn) * math.pi / angles for turn in range(angles)]
    wavelets = []
    for scale in range(scales):
        bank = np.stack([_morlet(height, width, scale, turn, angles) for turn in turns])
        levels = [
            _lower_resolution(_lower_resolution(bank, resolution, 1), resolution, 2)
            for resolution in range(max(scale, 1))
        ]
        wavelets.append(
            tuple(torch.from_numpy(np.stack([level, level], -1)).to(torch.float32) for level in levels)
        )
    lines = [(_averaging(height, scales, level), _averaging(width, scales, level)) for level in range(scales)]
    # The Gaussian window is a product of two lines, so the average of an image U is A U B^T = (A x B) vec(U).
    averages = [torch.from_numpy(np.kron(*pair).T.copy()).to(torch.float32) for pair in lines]
    padded = tuple(torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % WIDTH)) for matrix in averages)
    return _Filters(tuple(wavelets), padded, (len(lines[0][0]), len(lines[0][1])))


def _reflect(images: torch.Tensor, scales: int) -> torch.Tensor:
    """Pad images by reflection."""
    rows, columns = images.shape[-2:]
    above, left = _padded(rows, scales) - rows, _padded(columns, scales) - columns
    padding = (left // 2, (left + 1) // 2, above // 2, (above + 1) // 2)
    return torch.nn.functional.pad(images[:, None], padding, mode="reflect")[:, 0]


def _moduli(spectrum: torch.Tensor, wavelets: torch.Tensor, step: int) -> torch.Tensor:
    """Return |x * psi| subsampled by `step`, for every wavelet of a bank; subsampling folds the spectrum."""
    rows, columns = spectrum.shape[-2] // step, spectrum.shape[-1] // step
    folded = torch.zeros((*spectrum.shape[:-2], wavelets.shape[0], rows, columns, 2), dtype=torch.float32)
    parts = torch.view_as_real(spectrum)[..., None, :, :, :]
    for top in range(0, step * rows, rows):
        for left in range(0, step * columns, columns):
            window = (..., slice(top, top + rows), slice(left, left + columns), slice(None))
            folded.addcmul_(parts[window], wavelets[window], value=1 / step**2)
    squares = torch.view_as_real(torch.fft.ifft2(torch.view_as_complex(folded))).square_()
    return (squares[..., 0] + squares[..., 1]).sqrt_()


def dead_leaves(count: int, image_shape: tuple[int, int, int], seed: int) -> NDArray[np.float32]:
    """Draw synthetic dead-leaves images, which stand for images in general.

    Dead leaves (Matheron 1968; Lee, Mumford & Huang 2001) are discs of random position, size and brightness that
    cover one another. Like natural images and drawings they have edges of all directions and scales with flat
    regions between them, and they depend on no record. Radii have density proportional to `r^-2` between 1/14 and
    10/14 of the image's mean side; brightness is uniform, and each channel differs from it by at most 0.25.
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
