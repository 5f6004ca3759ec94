"""Feature maps for images, from statistics of public synthetic images: scattering, patches, and maps made of these.

`Scattering` and `Patches` compute features; `Mirrored`, `Turned`, `Joined` and `Reduced` combine them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax._threads import parallel_map
from quietmax.errors import DataUnavailable, InvalidInput
from quietmax.models.features.base import WIDTH, BatchedMap, FeatureMap

if TYPE_CHECKING:
    import safetensors.torch
    import torch
else:
    safetensors = lazy_module("safetensors")
    torch = lazy_module("torch")

ImageShape = tuple[int, int, int]
"""Channels, height and width."""

TINY = 1e-30
_PLANES_AT_ONCE = 64
_SYNTHETIC_IMAGES, _SYNTHETIC_SEED = 512, 2021
_FLOOR = 1e-3
_LEAVES = 20
_SMALLEST, _LARGEST = 1 / 14, 10 / 14
_COLOUR = 0.25

FILE = Path(__file__).parent / "patches.safetensors"
"""The filters and the whitening matrix, made by `docs/making/patch_filters.py`."""
DIGEST = "fd3e7c1dbfb122df8dc07d59df8f910129b9f5ac4c06fa595d089218e20ae79b"
CONTRAST = 0.08
"""Added to the contrast of a patch, in units of the image's root mean square."""
_THRESHOLD = 0.5
_PIXELS_AT_ONCE = 4 * 32 * 32
_PAIRS_SEED, _DIFFERENCES_FLOOR, _DRAWN_AT_ONCE = 7, 1e-3, 64
_FEWEST_PIXELS, _LARGEST_SIDE, _REDUCED_SIDE = 5, 40, 32


def _image_shape(value: Any) -> ImageShape:
    shape: ImageShape = tuple(int(side) for side in value)  # type: ignore[assignment]
    return shape


def _check_columns(columns: int, image_shape: ImageShape) -> None:
    """Raise an error if so many numbers are not an image of this shape."""
    if columns != math.prod(image_shape):
        raise InvalidInput(
            f"The records have {columns} numbers, which do not form images of shape {image_shape}."
        )


@dataclass(frozen=True)
class Scattering(BatchedMap):
    """Wavelet scattering of images: normalised per image, whitened, of unit length.

    1. The image is divided by the root of its mean square, so that units do not matter; then the scattering
       coefficients of every colour channel are computed: K paths at every position.
    2. Group normalisation: each of `groups` groups of neighbouring paths is brought to mean 0 and variance 1 in
       each image.
    3. The K paths of every position are multiplied by `(C / trace C + 0.001)^(-whitening/2)`, where C is their
       covariance over 512 synthetic images (dead leaves), so that no few directions dominate the norm.
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

    Examples
    --------
    >>> Scattering((1, 28, 28)).dimension(784)
    3969
    """

    image_shape: ImageShape
    scales: int = 2
    angles: int = 8
    groups: int = 27
    whitening: float = 0.5
    kind: ClassVar[str] = "scattering"
    parallel: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_shape", _image_shape(self.image_shape))
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

    def _coefficients(self, images: torch.Tensor) -> torch.Tensor:
        """Return the group-normalised scattering coefficients of images, of shape (n, K, positions)."""
        planes = _scatter(
            _unit_brightness(images).reshape(-1, *self.image_shape[1:]), self.scales, self.angles
        )
        paths = planes.reshape(len(images), self.paths, -1)
        return torch.nn.functional.group_norm(paths, self.groups)

    def _batch_rows(self) -> int:
        return max(1, _PLANES_AT_ONCE // self.image_shape[0])

    def _batch(self, batch: torch.Tensor) -> torch.Tensor:
        paths = self._coefficients(batch.reshape(len(batch), *self.image_shape))
        if self.whitening > 0.0:
            paths = (paths.mT.contiguous() @ _whitening(self))[..., : self.paths].mT
        return _unit(paths.flatten(1))

    def _prepare(self) -> None:
        if self.whitening > 0.0:
            _whitening(self)


@lru_cache(maxsize=8)
def _whitening(scattering: Scattering) -> torch.Tensor:
    """Return `(C / trace C + floor)^(-whitening/2)`, padded, for the covariance C of paths over synthetic images."""
    images = _dead_leaves(_SYNTHETIC_IMAGES, scattering.image_shape, _SYNTHETIC_SEED)
    parts = torch.split(torch.from_numpy(images), _PLANES_AT_ONCE)
    channels = torch.cat([scattering._coefficients(part) for part in parts]).to(torch.float64)
    centred = channels - channels.mean(dim=(0, 2), keepdim=True)
    values, vectors = torch.linalg.eigh(torch.einsum("ncp,nep->ce", centred, centred))
    weights = (values.clamp_min(0.0) / values.sum() + _FLOOR) ** (-scattering.whitening / 2)
    matrix: torch.Tensor = (vectors * weights) @ vectors.T
    return torch.nn.functional.pad(matrix.to(torch.float32), (0, -len(matrix) % WIDTH))


def _unit(features: torch.Tensor) -> torch.Tensor:
    lengths: torch.Tensor = features.norm(dim=1, keepdim=True).clamp_min(TINY)
    return features / lengths


def _unit_brightness(images: torch.Tensor) -> torch.Tensor:
    flat = images.flatten(1)
    lengths: torch.Tensor = flat.norm(dim=1, keepdim=True).clamp_min(TINY) / math.sqrt(flat.shape[1])
    return (flat / lengths).reshape(images.shape)


def _scatter(images: torch.Tensor, scales: int = 2, angles: int = 8) -> torch.Tensor:
    """Return the scattering coefficients of images up to order 2, `1 + J L + L^2 J (J - 1) / 2` paths as in kymatio."""
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


class _Filters(NamedTuple):
    # wavelets[j][r]: Fourier multipliers of scale j at resolution r, (L, rows, columns, 2) with equal factors for the
    # real and the imaginary part.
    wavelets: tuple[tuple[torch.Tensor, ...], ...]
    # averages[r]: the matrix that averages a flattened image of resolution r, padded with zero columns.
    averages: tuple[torch.Tensor, ...]
    grid: tuple[int, int]  # The shape of the averages


def _padded(size: int, scales: int) -> int:
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


def _lower_resolution(multiplier: NDArray[np.float64], resolution: int, *axes: int) -> NDArray[np.float64]:
    """Drop the upper frequencies along some axes, keeping `size / 2^resolution` of them."""
    for axis in axes if resolution else ():
        half = multiplier.shape[axis] // 2 ** (resolution + 1)
        kept = np.r_[:half, multiplier.shape[axis] - half : multiplier.shape[axis]]
        multiplier = np.take(multiplier, kept, axis)
    return multiplier


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
    height, width = _padded(rows, scales), _padded(columns, scales)
    turns = [(angles // 2 - 1 - turn) * math.pi / angles for turn in range(angles)]
    wavelets = []
    for scale in range(scales):
        bank = np.stack([_morlet(height, width, scale, turn, angles) for turn in turns])
        levels = [_lower_resolution(bank, resolution, 1, 2) for resolution in range(max(scale, 1))]
        wavelets.append(
            tuple(torch.from_numpy(np.stack([level, level], -1)).to(torch.float32) for level in levels)
        )
    lines = [(_averaging(height, scales, level), _averaging(width, scales, level)) for level in range(scales)]
    # The Gaussian window is a product of two lines, so the average of an image U is A U B^T = (A x B) vec(U).
    averages = [torch.from_numpy(np.kron(*pair).T.copy()).to(torch.float32) for pair in lines]
    padded = tuple(torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % WIDTH)) for matrix in averages)
    return _Filters(tuple(wavelets), padded, (len(lines[0][0]), len(lines[0][1])))


def _reflect(images: torch.Tensor, scales: int) -> torch.Tensor:
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


def _dead_leaves(count: int, image_shape: ImageShape, seed: int) -> NDArray[np.float32]:
    """Draw synthetic dead-leaves images (Matheron 1968; Lee, Mumford & Huang 2001): discs that cover one another.

    Radii have density proportional to `r^-2` between 1/14 and 10/14 of the mean side; channels differ by at most 0.25.
    """
    channels, height, width = image_shape
    generator = np.random.default_rng(seed)
    rows, columns = np.arange(height)[:, None], np.arange(width)[None, :]
    side = (height + width) / 2

    def _uniform(*shape: int) -> NDArray[np.float64]:
        return generator.random((count, *shape))

    def _paint() -> NDArray[np.float64]:
        shift = _COLOUR * (2 * _uniform(channels, 1, 1) - 1) if channels > 1 else 0.0
        return np.clip(_uniform(1, 1, 1) + shift, 0.0, 1.0)

    images = np.broadcast_to(_paint(), (count, *image_shape)).copy()
    for _ in range(_LEAVES):
        radius = side / (1 / _LARGEST + (1 / _SMALLEST - 1 / _LARGEST) * _uniform(1, 1, 1))
        distance = np.hypot(rows - height * _uniform(1, 1, 1), columns - width * _uniform(1, 1, 1))
        leaf = 1 / (1 + np.exp(np.clip(2 * (distance - radius), -50, 50)))
        images = images * (1 - leaf) + _paint() * leaf
    return images.astype(np.float32)


# --- Patches, and maps that are made of maps --------------------------------------------------------------------------


class _PatchFilters(NamedTuple):
    """What `Patches` computes with; all of it comes from synthetic images."""

    filters: torch.Tensor  # Whitened patches
    offsets: torch.Tensor  # What is subtracted from the responses
    whitening: torch.Tensor  # The matrix that every cell's responses are multiplied by


@lru_cache(maxsize=1)
def _shipped() -> _PatchFilters:
    try:
        content = FILE.read_bytes()
    except OSError as problem:
        raise DataUnavailable(
            f"The file {FILE.name} of the package cannot be read. Install it again."
        ) from problem
    if hashlib.sha256(content).hexdigest() != DIGEST:
        raise DataUnavailable(
            f"The file {FILE.name} of the package does not have its SHA-256 {DIGEST}. Install it again."
        )
    return _PatchFilters(**safetensors.torch.load(content))


def _responses(
    images: torch.Tensor, filters: torch.Tensor, offsets: torch.Tensor, cells: int
) -> torch.Tensor:
    """Return the mean rectified response of every cell of an image and its mirror image to every filter, both ways."""
    box = torch.full((1, *filters.shape[1:]), 1 / filters[0].numel())

    def _one_side(images: torch.Tensor) -> torch.Tensor:
        mean = torch.nn.functional.conv2d(images, box)
        variance = (torch.nn.functional.conv2d(images.square(), box) - mean.square()).clamp_min_(0.0)
        contrast = (variance + CONTRAST**2).sqrt_()
        z = torch.nn.functional.conv2d(images, filters).div_(contrast).sub_(offsets[:, None, None])
        below = torch.nn.functional.adaptive_avg_pool2d((-_THRESHOLD - z).relu_(), cells)
        above = torch.nn.functional.adaptive_avg_pool2d(z.sub_(_THRESHOLD).relu_(), cells)
        return torch.cat([above, below], dim=1).flatten(2)

    return (_one_side(images) + _one_side(images.flip(3))) / 2


def _normalised(means: torch.Tensor) -> torch.Tensor:
    roots = means.mT.sqrt().contiguous()
    centred = roots - roots.mean(dim=2, keepdim=True)
    return centred / centred.square().mean(dim=2, keepdim=True).sqrt().clamp_min(TINY)


@dataclass(frozen=True)
class Patches(BatchedMap):
    """Responses of colour images to 400 whitened patches of synthetic images (Coates, Lee & Ng 2011), of unit length.

    The 800 numbers of every cell are whitened by how two crops of one synthetic image differ (theory-head.md).
    """

    image_shape: ImageShape
    cells: int = 2
    kind: ClassVar[str] = "patches"
    parallel: ClassVar[bool] = True
    filters: ClassVar[int] = 400
    side: ClassVar[int] = 6

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_shape", _image_shape(self.image_shape))
        if len(self.image_shape) != 3 or self.image_shape[0] != 3:
            raise InvalidInput(
                f"Patches need colour images, of a shape (3, height, width); got {self.image_shape}."
            )
        if self.cells < 1 or min(self.image_shape[1:]) < self.side + self.cells - 1:
            raise InvalidInput(
                f"Patches need at least 1 cell in each direction, and images of at least {self.side - 1} pixels more "
                f"than cells; got {self.cells} cells and {self.image_shape[1]} x {self.image_shape[2]} pixels."
            )

    def dimension(self, columns: int) -> int:
        """Return the number of features: 800 for every cell."""
        _check_columns(columns, self.image_shape)
        return 2 * self.filters * self.cells**2

    def _batch_rows(self) -> int:
        return max(1, min(16, _PIXELS_AT_ONCE // math.prod(self.image_shape[1:])))

    def _batch(self, batch: torch.Tensor) -> torch.Tensor:
        shipped = _shipped()
        images = _unit_brightness(batch.reshape(len(batch), *self.image_shape))
        cells = _normalised(_responses(images, shipped.filters, shipped.offsets, self.cells))
        return _unit((cells @ shipped.whitening).mT.flatten(1))

    def to_json(self) -> dict[str, Any]:
        """Return the image shape, the constants and the digest of the filters as JSON values."""
        return {**super().to_json(), "sha256": DIGEST}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FeatureMap:
        """Return the map that `to_json` described, if the filters are those of this version."""
        if values["sha256"] != DIGEST:
            raise InvalidInput(
                f"The map needs filters of SHA-256 {values['sha256']}, but this version of Quietmax comes with those "
                f"of SHA-256 {DIGEST}."
            )
        return super().from_json(values)


class _OnImages(BatchedMap):
    """A map that passes images on to another map."""

    feature_map: Any
    parallel: ClassVar[bool] = True

    def dimension(self, columns: int) -> int:
        """Return the number of features: those of the map."""
        return self.feature_map.dimension(columns)  # type: ignore[no-any-return]

    def _prepare(self) -> None:
        self.feature_map._prepare()

    def _batch_rows(self) -> int:
        return self.feature_map._batch_rows()  # type: ignore[no-any-return]


class _OnScattering(_OnImages):
    """A map of the scattering of several views of an image."""

    def __post_init__(self) -> None:
        if not isinstance(self.feature_map, Scattering):
            raise InvalidInput(f"A {self.kind} map must be made from a Scattering map.")

    @property
    def image_shape(self) -> ImageShape:
        """Channels, height and width."""
        return self.feature_map.image_shape  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Mirrored(_OnScattering):
    """The mean scattering of an image and of its mirror image, at the left half (and middle) of the positions."""

    feature_map: Scattering
    kind: ClassVar[str] = "mirrored"

    def dimension(self, columns: int) -> int:
        """Return the number of features: those of the map at the left half of the positions."""
        across = self.feature_map.grid[1]
        return self.feature_map.dimension(columns) // across * ((across + 1) // 2)

    def _batch(self, batch: torch.Tensor) -> torch.Tensor:
        mirror = batch.reshape(-1, *self.image_shape).flip(3).reshape(batch.shape)
        total = self.feature_map._batch(batch) + self.feature_map._batch(mirror)
        across = self.feature_map.grid[1]
        return _unit(total.reshape(len(batch), -1, across)[..., : (across + 1) // 2].flatten(1))


@dataclass(frozen=True)
class Turned(_OnScattering):
    """The mean of the scattering of an image turned by several angles, without what differs between like drawings.

    It is multiplied by `(C / trace C + 0.001)^(-1/2)`: C are second moments of differences between synthetic drawings.
    """

    feature_map: Scattering
    degrees: tuple[float, ...] = (-10.0, 0.0, 10.0)
    pairs: int = 1024  # Pairs of drawings, a multiple of 16; 0 leaves step 2 out
    kind: ClassVar[str] = "turned"

    def __post_init__(self) -> None:
        object.__setattr__(self, "degrees", tuple(float(angle) for angle in self.degrees))
        super().__post_init__()
        if not self.degrees or not all(-90.0 <= angle <= 90.0 for angle in self.degrees):
            raise InvalidInput(
                f"A turned map needs at least one angle, all between -90 and 90 degrees; got {self.degrees}."
            )
        if self.pairs < 0 or self.pairs % WIDTH:
            raise InvalidInput(f"The number of pairs must be 0 or a multiple of {WIDTH}, got {self.pairs}.")

    def _prepare(self) -> None:
        self.feature_map._prepare()
        if self.pairs:
            _differences(self.feature_map, self.pairs)

    def _batch(self, batch: torch.Tensor) -> torch.Tensor:
        images = _unit_brightness(batch.reshape(-1, *self.image_shape))
        total = torch.zeros(len(batch), self.dimension(batch.shape[1]))
        for angle in self.degrees:
            total += self.feature_map._batch(_turned(images, angle).flatten(1))
        if self.pairs:
            across, back = _differences(self.feature_map, self.pairs)
            total -= ((total @ across) @ back)[:, : total.shape[1]]
        return _unit(total)


@dataclass(frozen=True)
class Joined(BatchedMap):
    """Features of several maps side by side: every map's features have the same length, all together length 1."""

    maps: tuple[Scattering | Patches | Mirrored, ...]
    kind: ClassVar[str] = "joined"
    parallel: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "maps", tuple(self.maps))
        if not self.maps or not all(isinstance(each, Scattering | Patches | Mirrored) for each in self.maps):
            raise InvalidInput(
                "Joined maps must be a tuple of at least one Scattering, Patches or Mirrored map."
            )
        if len({each.image_shape for each in self.maps}) > 1:
            raise InvalidInput("Joined maps must have the same image shape.")

    @property
    def image_shape(self) -> ImageShape:
        """Channels, height and width."""
        return self.maps[0].image_shape

    def dimension(self, columns: int) -> int:
        """Return the number of features: those of all maps."""
        return sum(each.dimension(columns) for each in self.maps)

    def _prepare(self) -> None:
        for each in self.maps:
            each._prepare()

    def _batch_rows(self) -> int:
        return min(each._batch_rows() for each in self.maps)

    def _batch(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.cat([each._batch(batch) for each in self.maps], dim=1) / math.sqrt(len(self.maps))


@dataclass(frozen=True)
class Reduced(_OnImages):
    """A map of smaller images: pixel i of h averages the inputs from `floor(i H / h)` to `ceil((i + 1) H / h)`."""

    image_shape: ImageShape
    feature_map: Scattering | Patches | Mirrored | Turned | Joined
    kind: ClassVar[str] = "reduced"

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_shape", _image_shape(self.image_shape))
        if not isinstance(self.feature_map, Scattering | Patches | Mirrored | Turned | Joined):
            raise InvalidInput(
                "A reduced map must be made from a Scattering, Patches, Mirrored, Turned or Joined map."
            )
        small = self.feature_map.image_shape
        larger = len(self.image_shape) == 3 and all(
            few <= many for few, many in zip(small, self.image_shape, strict=True)
        )
        if not larger or small[0] != self.image_shape[0]:
            raise InvalidInput(f"Images of shape {self.image_shape} cannot be reduced to the shape {small}.")

    def dimension(self, columns: int) -> int:
        """Return the number of features: those of the map."""
        _check_columns(columns, self.image_shape)
        return self.feature_map.dimension(math.prod(self.feature_map.image_shape))

    def _batch(self, batch: torch.Tensor) -> torch.Tensor:
        # A sum of large float32 numbers may overflow; their mean in float64 does not.
        images = batch.reshape(-1, *self.image_shape).double()
        small = torch.nn.functional.adaptive_avg_pool2d(images, self.feature_map.image_shape[1:])
        return self.feature_map._batch(small.float().flatten(1))


def image_features(image_shape: ImageShape) -> Scattering | Turned | Joined | Reduced:
    """Return the feature map for images of a shape, which is all it depends on.

    Colour images (three channels, at least 7 pixels in height and width) get patches and mirrored scattering side by
    side. Grey images (one channel) get turned scattering, and other images get scattering. A side of more than 40
    pixels is first reduced to 32 pixels (`Reduced`).

    Parameters
    ----------
    image_shape : (int, int, int)
        Channels, height and width.

    Returns
    -------
    Scattering, Turned, Joined or Reduced

    Raises
    ------
    InvalidInput
        If the shape does not have three numbers, or the images have fewer than 5 pixels in height or width.

    Examples
    --------
    >>> image_features((1, 28, 28)).degrees
    (-10.0, 0.0, 10.0)
    >>> image_features((3, 224, 224)).dimension(3 * 224 * 224)
    10976
    """
    if len(image_shape) != 3 or image_shape[0] < 1 or min(image_shape[1:]) < _FEWEST_PIXELS:
        raise InvalidInput(
            f"Images must have a shape (channels, height, width) with at least {_FEWEST_PIXELS} pixels in height and "
            f"width, got {tuple(image_shape)}."
        )
    channels, height, width = image_shape
    rows, columns = (_REDUCED_SIDE if side > _LARGEST_SIDE else side for side in (height, width))
    small = (channels, rows, columns)
    scattering = Scattering(small)
    feature_map: Scattering | Turned | Joined = Turned(scattering) if channels == 1 else scattering
    if channels == 3 and min(height, width) >= Patches.side + 1:
        feature_map = Joined((Patches(small), Mirrored(scattering)))
    return (
        feature_map if small == (channels, height, width) else Reduced((channels, height, width), feature_map)
    )


@lru_cache(maxsize=4)
def _differences(scattering: Scattering, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A (d, pairs) and padded B (pairs, d), so that I - A B is `(C / trace C + c)^(-1/2)`, up to its scale."""
    scattering._prepare()

    def _rows(images: NDArray[np.float32]) -> torch.Tensor:
        parts = torch.split(torch.from_numpy(images).flatten(1), scattering._batch_rows())
        return torch.cat([scattering._batch(part) for part in parts]).to(torch.float64)

    def _matrices(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = _drawings(pairs, scattering.image_shape, _PAIRS_SEED)
        rows = _rows(first) - _rows(second)
        values, vectors = torch.linalg.eigh(rows @ rows.T)
        total = values.sum()
        # Directions without a difference keep their length: their weight below is about 0.
        values = values.clamp_min(1e-9 * total)
        directions = ((vectors / values.sqrt()).T @ rows).to(torch.float32)
        weights = 1 - (values / (total * _DIFFERENCES_FLOOR) + 1).rsqrt()
        back = directions * weights.to(torch.float32)[:, None]
        return directions.T.contiguous(), torch.nn.functional.pad(back, (0, -back.shape[1] % WIDTH))

    # With one thread per operation the bits do not depend on the number of threads.
    return parallel_map(_matrices, 1)[0]


def _drawings(
    count: int, image_shape: ImageShape, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Draw synthetic Bezier curves (one or two) twice, with other widths, bent, turned, stretched and shifted."""
    generator = np.random.default_rng(seed)
    points = generator.uniform(-1.0, 1.0, (count, 2, 4, 2))
    # The second curve starts at the end of the first one or at one of its control points. Four in ten have one curve.
    joint = np.where(generator.random((count, 1)) < 0.5, points[:, 0, 3], points[:, 0, 1])
    points[:, 1, 0] = joint
    single = generator.random(count) < 0.4
    points[single, 1] = points[single, 0]
    return _drawn(points, image_shape, generator), _drawn(points, image_shape, generator)


def _drawn(
    points: NDArray[np.float64], image_shape: ImageShape, generator: np.random.Generator
) -> NDArray[np.float32]:
    count, sides = len(points), np.array(image_shape[1:], dtype=np.float64)
    times = np.linspace(0.0, 1.0, 12)[:, None]
    basis = np.concatenate(
        [(1 - times) ** 3, 3 * times * (1 - times) ** 2, 3 * times**2 * (1 - times), times**3], axis=1
    )
    curves = basis @ (points + 0.08 * generator.standard_normal(points.shape))
    places = curves.reshape(count, -1, 2)
    places = places - (places.max(axis=1, keepdims=True) + places.min(axis=1, keepdims=True)) / 2
    places = places / np.maximum(np.abs(places).max(axis=(1, 2), keepdims=True), 0.3)

    def _change(largest: float, *shape: int) -> NDArray[np.float64]:
        return generator.uniform(-largest, largest, (count, *shape))

    turn, slant, stretch = _change(math.radians(12)), _change(0.2), np.exp(_change(0.12, 2))
    rotation = np.stack([np.cos(turn), -np.sin(turn), np.sin(turn), np.cos(turn)], axis=1).reshape(-1, 2, 2)
    slanted = np.tile(np.eye(2), (count, 1, 1))
    slanted[:, 1, 0] = slant
    matrix = rotation @ slanted * stretch[:, None, :]
    places = places @ matrix.transpose(0, 2, 1) * (9 / 28 * sides) + (sides - 1) / 2
    places = places + _change(1 / 28, 1, 2) * sides
    unit = float(sides.mean()) / 28
    width = 1.3 * unit * np.exp(_change(0.4, 1))
    lines = places.reshape(count, 2, -1, 2)
    starts, steps = (
        part.reshape(count, 1, -1, 2).astype(np.float32)
        for part in (lines[:, :, :-1], lines[:, :, 1:] - lines[:, :, :-1])
    )
    lengths = np.maximum(np.square(steps).sum(axis=-1), np.float32(1e-6))
    rows, columns = np.meshgrid(
        *(np.arange(side, dtype=np.float32) for side in image_shape[1:]), indexing="ij"
    )
    pixels = np.stack([rows.ravel(), columns.ravel()], axis=1)[None, :, None]
    images = np.empty((count, 1, *image_shape[1:]), dtype=np.float32)
    for low in range(0, count, _DRAWN_AT_ONCE):
        part = slice(low, low + _DRAWN_AT_ONCE)
        offsets = pixels - starts[part]
        along = np.clip((offsets * steps[part]).sum(axis=-1) / lengths[part], 0.0, 1.0)
        nearest = np.square(offsets - along[..., None] * steps[part]).sum(axis=-1).min(axis=2)
        inside = 2 / unit * (width[part] - np.sqrt(nearest))
        images[part] = (1 / (1 + np.exp(-np.clip(inside, -50, 50)))).reshape(-1, 1, *image_shape[1:])
    return np.repeat(images, image_shape[0], axis=1)


def _turned(images: torch.Tensor, degrees: float) -> torch.Tensor:
    grid = _places(images.shape[2], images.shape[3], degrees).expand(len(images), -1, -1, -1)
    return torch.nn.functional.grid_sample(
        images, grid, mode="bilinear", padding_mode="border", align_corners=False
    )


@lru_cache(maxsize=32)
def _places(height: int, width: int, degrees: float) -> torch.Tensor:
    """Return the place in an image that every pixel of the turned image shows, in the units of `grid_sample`."""
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    down = (torch.arange(height, dtype=torch.float64) - (height - 1) / 2)[:, None]
    right = (torch.arange(width, dtype=torch.float64) - (width - 1) / 2)[None]
    x, y = cosine * right + sine * down, cosine * down - sine * right
    return torch.stack([2 * x / width, 2 * y / height], dim=-1).to(torch.float32)[None]
