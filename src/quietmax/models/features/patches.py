"""Feature maps for images: filters from synthetic images, averages over views of an image, joined maps."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax._threads import parallel_map
from quietmax.errors import DataUnavailable, InvalidInput
from quietmax.models.features.base import WIDTH, BatchedMap, FeatureMap
from quietmax.models.features.images import TINY, Scattering, _check_columns, unit, unit_brightness

if TYPE_CHECKING:
    import safetensors.torch
    import torch
else:
    safetensors = lazy_module("safetensors")
    torch = lazy_module("torch")

FILE = Path(__file__).parent / "patches.safetensors"
"""The filters and the whitening matrix, made by `docs/making/patch_filters.py`."""
DIGEST = "fd3e7c1dbfb122df8dc07d59df8f910129b9f5ac4c06fa595d089218e20ae79b"
"""SHA-256 of `FILE`."""
_CHANNELS = 3
_THRESHOLD = 0.5
CONTRAST = 0.08
"""Added to the contrast of a patch, in units of the image's root mean square."""
DEGREES = (-10.0, 0.0, 10.0)
"""By how much grey images are turned."""
PAIRS, _PAIRS_SEED = 1024, 7
"""Pairs of drawings of the same curves, whose differences say what features should ignore."""
_DIFFERENCES_FLOOR = 1e-3
_DRAWN_AT_ONCE = 64
_PIXELS_AT_ONCE = 4 * 32 * 32
_FEWEST_PIXELS, _LARGEST_SIDE, _REDUCED_SIDE = 5, 40, 32


@dataclass(frozen=True)
class Filters:
    """What the map computes with; all of it comes from synthetic images."""

    filters: torch.Tensor  # Whitened patches
    offsets: torch.Tensor  # What is subtracted from the responses
    whitening: torch.Tensor  # The matrix that every cell's responses are multiplied by


@lru_cache(maxsize=1)
def _shipped() -> Filters:
    """Read the filters that come with the package."""
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
    return Filters(**safetensors.torch.load(content))


def responses(images: torch.Tensor, filters: torch.Tensor, offsets: torch.Tensor, cells: int) -> torch.Tensor:
    """Return the mean response of every cell of an image and its mirror image to every filter, in both directions.

    The response z of a patch of the image is the filter applied to the patch, divided by the patch's contrast, minus
    the offset. A cell averages `max(z - 0.5, 0)` and `max(-z - 0.5, 0)` over its patches.
    """
    box = torch.full((1, *filters.shape[1:]), 1 / filters[0].numel())

    def one_side(images: torch.Tensor) -> torch.Tensor:
        mean = torch.nn.functional.conv2d(images, box)
        variance = (torch.nn.functional.conv2d(images.square(), box) - mean.square()).clamp_min_(0.0)
        contrast = (variance + CONTRAST**2).sqrt_()
        z = torch.nn.functional.conv2d(images, filters).div_(contrast).sub_(offsets[:, None, None])
        below = torch.nn.functional.adaptive_avg_pool2d((-_THRESHOLD - z).relu_(), cells)
        above = torch.nn.functional.adaptive_avg_pool2d(z.sub_(_THRESHOLD).relu_(), cells)
        return torch.cat([above, below], dim=1).flatten(2)

    return (one_side(images) + one_side(images.flip(3))) / 2


def normalised(means: torch.Tensor) -> torch.Tensor:
    """Return the square roots of responses, brought to mean 0 and variance 1 in every cell."""
    roots = means.mT.sqrt().contiguous()
    centred = roots - roots.mean(dim=2, keepdim=True)
    return centred / centred.square().mean(dim=2, keepdim=True).sqrt().clamp_min(TINY)


@dataclass(frozen=True)
class Patches(BatchedMap):
    """Responses of colour images to 400 filters that come from synthetic images, of unit length.

    The filters are whitened patches of 6 x 6 pixels of dead-leaves images (`dead_leaves`), as Coates, Lee & Ng (2011)
    take them from photographs. They come with the package; `docs/making/patch_filters.py` makes them.

    1. The image is divided by the root of its mean square, so that units do not matter.
    2. Every cell of a grid of `cells` x `cells` averages the responses of its patches to each filter, in both
       directions, with those of the mirror image (`responses`).
    3. Square root; then the 800 numbers of every cell are brought to mean 0 and variance 1.
    4. They are multiplied by `(C / trace C + 0.0003)^(-1/2)`, where C is the covariance of the differences between
       two crops of one synthetic image, over 4,000 pairs. Directions in which crops of one image differ get short.
    5. Every image's features are divided by their length.

    Parameters
    ----------
    image_shape : (int, int, int)
        Channels (3), height and width.
    cells : int
        Cells in each direction.

    Raises
    ------
    InvalidInput
        If a parameter is not valid.

    Examples
    --------
    >>> Patches((3, 32, 32)).dimension(3072)
    3200
    """

    image_shape: tuple[int, int, int]
    cells: int = 2
    kind: ClassVar[str] = "patches"
    parallel: ClassVar[bool] = True
    filters: ClassVar[int] = 400
    side: ClassVar[int] = 6

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_shape", tuple(int(side) for side in self.image_shape))
        if len(self.image_shape) != 3 or self.image_shape[0] != _CHANNELS:
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
        images = unit_brightness(batch.reshape(len(batch), *self.image_shape))
        cells = normalised(responses(images, shipped.filters, shipped.offsets, self.cells))
        return unit((cells @ shipped.whitening).mT.flatten(1))

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


@dataclass(frozen=True)
class Mirrored(_OnImages):
    """The mean of the scattering of an image and of its mirror image, at the left half of the positions.

    The mirror image's scattering paths are nearly those of the image, in other directions and at mirrored
    positions. So the right half of the mean nearly repeats the left half and is left out. The middle column of an odd
    number is kept. The features have length 1.

    Parameters
    ----------
    feature_map : Scattering
        The map.

    Raises
    ------
    InvalidInput
        If the map is another one.

    Examples
    --------
    >>> Mirrored(Scattering((3, 32, 32))).dimension(3072)
    7776
    """

    feature_map: Scattering
    kind: ClassVar[str] = "mirrored"

    def __post_init__(self) -> None:
        if not isinstance(self.feature_map, Scattering):
            raise InvalidInput("A mirrored map must be made from a Scattering map.")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return self.feature_map.image_shape

    def dimension(self, columns: int) -> int:
        """Return the number of features: those of the map at the left half of the positions."""
        across = self.feature_map.grid[1]
        return self.feature_map.dimension(columns) // across * ((across + 1) // 2)

    def _batch(self, batch: torch.Tensor) -> torch.Tensor:
        mirror = batch.reshape(-1, *self.image_shape).flip(3).reshape(batch.shape)
        total = self.feature_map._batch(batch) + self.feature_map._batch(mirror)
        across = self.feature_map.grid[1]
        return unit(total.reshape(len(batch), -1, across)[..., : (across + 1) // 2].flatten(1))


@dataclass(frozen=True)
class Turned(_OnImages):
    """The mean of the scattering of an image turned by several angles, without what differs between like drawings.

    1. The image is divided by the root of its mean square and turned about its middle by every angle, with bilinear
       interpolation; places outside it have the value of the nearest pixel. The scattering features are averaged.
    2. They are multiplied by `(C / trace C + 0.001)^(-1/2)`, where C holds the second moments of the differences
       between two drawings of the same synthetic curves. Directions in which these differ get short.
    3. Every image's features are divided by their length.

    Parameters
    ----------
    feature_map : Scattering
        The map.
    degrees : tuple of float
        The angles, between -90 and 90 degrees; at least one.
    pairs : int
        Number of pairs of drawings; a multiple of 16, or 0 to leave step 2 out.

    Raises
    ------
    InvalidInput
        If the map is another one, or an angle or the number of pairs is not valid.

    Examples
    --------
    >>> Turned(Scattering((1, 28, 28))).dimension(784)
    3969
    """

    feature_map: Scattering
    degrees: tuple[float, ...] = DEGREES
    pairs: int = PAIRS
    kind: ClassVar[str] = "turned"

    def __post_init__(self) -> None:
        object.__setattr__(self, "degrees", tuple(float(angle) for angle in self.degrees))
        if not isinstance(self.feature_map, Scattering):
            raise InvalidInput("A turned map must be made from a Scattering map.")
        if not self.degrees or not all(-90.0 <= angle <= 90.0 for angle in self.degrees):
            raise InvalidInput(
                f"A turned map needs at least one angle, all between -90 and 90 degrees; got {self.degrees}."
            )
        if self.pairs < 0 or self.pairs % WIDTH:
            raise InvalidInput(f"The number of pairs must be 0 or a multiple of {WIDTH}, got {self.pairs}.")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return self.feature_map.image_shape

    def _prepare(self) -> None:
        self.feature_map._prepare()
        if self.pairs:
            _differences(self.feature_map, self.pairs)

    def _batch(self, batch: torch.Tensor) -> torch.Tensor:
        images = unit_brightness(batch.reshape(-1, *self.image_shape))
        total = torch.zeros(len(batch), self.dimension(batch.shape[1]))
        for angle in self.degrees:
            total += self.feature_map._batch(_turned(images, angle).flatten(1))
        if self.pairs:
            across, back = _differences(self.feature_map, self.pairs)
            total -= ((total @ across) @ back)[:, : total.shape[1]]
        return unit(total)


@dataclass(frozen=True)
class Joined(BatchedMap):
    """Features of several maps side by side: every map's features have the same length, all together length 1.

    Parameters
    ----------
    maps : tuple of Scattering, Patches and Mirrored
        At least one map, for one image shape.

    Raises
    ------
    InvalidInput
        If there is no map, another map, or another image shape.

    Examples
    --------
    >>> Joined((Patches((3, 32, 32)), Mirrored(Scattering((3, 32, 32))))).dimension(3072)
    10976
    """

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
    def image_shape(self) -> tuple[int, int, int]:
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
    """A map of smaller images: every image is first reduced by averaging blocks of pixels.

    Output pixel i of h averages the input pixels from `floor(i H / h)` to `ceil((i + 1) H / h)`, in each direction.

    Parameters
    ----------
    image_shape : (int, int, int)
        Channels, height and width of the records.
    feature_map : Scattering, Patches, Mirrored, Turned or Joined
        The map of the reduced images, with its own, smaller image shape.

    Raises
    ------
    InvalidInput
        If the map is another one, or its images are larger or have other channels.

    Examples
    --------
    >>> Reduced((1, 224, 224), Scattering((1, 32, 32))).dimension(224 * 224)
    5184
    """

    image_shape: tuple[int, int, int]
    feature_map: Scattering | Patches | Mirrored | Turned | Joined
    kind: ClassVar[str] = "reduced"

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_shape", tuple(int(side) for side in self.image_shape))
        if not isinstance(self.feature_map, Scattering | Patches | Mirrored | Turned | Joined):
            raise InvalidInput(
                "A reduced map must be made from a Scattering, Patches, Mirrored, Turned or Joined map."
            )
        small = self.feature_map.image_shape
        if (
            len(self.image_shape) != 3
            or small[0] != self.image_shape[0]
            or small[1] > self.image_shape[1]
            or small[2] > self.image_shape[2]
        ):
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


def image_features(image_shape: tuple[int, int, int]) -> Scattering | Turned | Joined | Reduced:
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
    if channels == _CHANNELS and min(height, width) >= Patches.side + 1:
        feature_map = Joined((Patches(small), Mirrored(scattering)))
    return (
        feature_map if small == (channels, height, width) else Reduced((channels, height, width), feature_map)
    )


@lru_cache(maxsize=4)
def _differences(scattering: Scattering, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return matrices A (d, pairs) and B (pairs, d), so that I - A B is `(C / trace C + c)^(-1/2)`, up to its scale.

    C holds the second moments of the differences between the features of two drawings. B is padded with zero columns.
    """
    scattering._prepare()

    def features(images: NDArray[np.float32]) -> torch.Tensor:
        parts = torch.split(torch.from_numpy(images).flatten(1), scattering._batch_rows())
        return torch.cat([scattering._batch(part) for part in parts]).to(torch.float64)

    def matrices(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = _drawings(pairs, scattering.image_shape, _PAIRS_SEED)
        rows = features(first) - features(second)
        values, vectors = torch.linalg.eigh(rows @ rows.T)
        total = values.sum()
        # Directions without a difference keep their length: their weight below is about 0.
        values = values.clamp_min(1e-9 * total)
        directions = ((vectors / values.sqrt()).T @ rows).to(torch.float32)
        weights = 1 - (values / (total * _DIFFERENCES_FLOOR) + 1).rsqrt()
        back = directions * weights.to(torch.float32)[:, None]
        return directions.T.contiguous(), torch.nn.functional.pad(back, (0, -back.shape[1] % WIDTH))

    # With one thread per operation the bits do not depend on the number of threads.
    return parallel_map(matrices, 1)[0]


def _drawings(
    count: int, image_shape: tuple[int, int, int], seed: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Draw synthetic curves twice: with other widths, bent, turned, slanted, stretched and shifted a little.

    A drawing has one or two Bezier curves with random control points. It depends on no record.
    """
    generator = np.random.default_rng(seed)
    points = generator.uniform(-1.0, 1.0, (count, 2, 4, 2))
    # The second curve starts at the end of the first one or at one of its control points. Four in ten have one curve.
    joint = np.where(generator.random((count, 1)) < 0.5, points[:, 0, 3], points[:, 0, 1])
    points[:, 1, 0] = joint
    single = generator.random(count) < 0.4
    points[single, 1] = points[single, 0]
    return _drawn(points, image_shape, generator), _drawn(points, image_shape, generator)


def _drawn(
    points: NDArray[np.float64], image_shape: tuple[int, int, int], generator: np.random.Generator
) -> NDArray[np.float32]:
    """Draw the curves of control points, each picture with random changes."""
    count, sides = len(points), np.array(image_shape[1:], dtype=np.float64)
    times = np.linspace(0.0, 1.0, 12)[:, None]
    basis = np.concatenate(
        [(1 - times) ** 3, 3 * times * (1 - times) ** 2, 3 * times**2 * (1 - times), times**3], axis=1
    )
    curves = basis @ (points + 0.08 * generator.standard_normal(points.shape))
    places = curves.reshape(count, -1, 2)
    places = places - (places.max(axis=1, keepdims=True) + places.min(axis=1, keepdims=True)) / 2
    places = places / np.maximum(np.abs(places).max(axis=(1, 2), keepdims=True), 0.3)

    def change(largest: float, *shape: int) -> NDArray[np.float64]:
        return generator.uniform(-largest, largest, (count, *shape))

    turn, slant, stretch = change(math.radians(12)), change(0.2), np.exp(change(0.12, 2))
    rotation = np.stack([np.cos(turn), -np.sin(turn), np.sin(turn), np.cos(turn)], axis=1).reshape(-1, 2, 2)
    slanted = np.tile(np.eye(2), (count, 1, 1))
    slanted[:, 1, 0] = slant
    matrix = rotation @ slanted * stretch[:, None, :]
    places = places @ matrix.transpose(0, 2, 1) * (9 / 28 * sides) + (sides - 1) / 2
    places = places + change(1 / 28, 1, 2) * sides
    unit = float(sides.mean()) / 28
    width = 1.3 * unit * np.exp(change(0.4, 1))
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
    """Return images turned about their middle."""
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
