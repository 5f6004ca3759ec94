from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from quietmax.errors import DataUnavailable, InvalidInput
from quietmax.models.features import FeatureMap, Identity, Scattering, image_features
from quietmax.models.features import images as image_maps
from quietmax.models.features.generic import feature_map_from_json, runs_user_code
from quietmax.models.features.images import Joined, Mirrored, Patches, Reduced, Turned, _dead_leaves, _scatter

# --- scattering ------------------------------------------------------------------------------------------------------


REFERENCE = Path(__file__).parent / "reference" / "kymatio.npz"


def relative_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize(("name", "scales", "angles"), [("mnist", 2, 8), ("oblong", 3, 6)])
def test_scattering_equals_the_stored_output_of_kymatio(name: str, scales: int, angles: int) -> None:
    stored = np.load(REFERENCE)
    ours = _scatter(torch.from_numpy(stored[f"{name}_image"]), scales, angles).numpy()
    theirs = stored[f"{name}_scattering"]
    assert ours.shape == theirs.shape
    # kymatio writes pi as 3.1415, which is 3e-5 per convolution
    assert relative_difference(ours, theirs) < 1e-4
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-6)


def test_whitening_flattens_the_spectrum_of_images_it_has_not_seen() -> None:
    images = _dead_leaves(200, (1, 28, 28), seed=99).reshape(200, -1)

    def largest_share(whitening: float) -> float:
        features = Scattering((1, 28, 28), whitening=whitening).transform(images).astype(float)
        values = np.linalg.eigvalsh(np.cov(features @ features.T))
        return float(values[-1] / values.sum())

    assert largest_share(0.5) < 0.75 * largest_share(0.0)


def test_dead_leaves_are_images_in_the_unit_interval_and_the_same_for_the_same_seed() -> None:
    images = _dead_leaves(5, (3, 20, 16), seed=4)
    assert images.shape == (5, 3, 20, 16)
    assert images.min() >= 0.0
    assert images.max() <= 1.0
    np.testing.assert_array_equal(images, _dead_leaves(5, (3, 20, 16), seed=4))
    assert (images != _dead_leaves(5, (3, 20, 16), seed=5)).any()
    assert images.std() > 0.1


# --- patches, and maps that are made of maps -------------------------------------------------------------------------


SHAPE = (3, 9, 8)
ROOT = Path(__file__).parents[3]


@pytest.fixture
def _read_again() -> Iterator[None]:
    image_maps._shipped.cache_clear()
    yield
    image_maps._shipped.cache_clear()


def leaves(count: int, shape: tuple[int, int, int] = SHAPE, seed: int = 3) -> np.ndarray:
    return _dead_leaves(count, shape, seed).reshape(count, -1)


def mirror(records: np.ndarray, shape: tuple[int, int, int] = SHAPE) -> np.ndarray:
    return np.ascontiguousarray(records.reshape(-1, *shape)[..., ::-1]).reshape(records.shape)


def unit(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def bounds(size: int, cells: int) -> list[tuple[int, int]]:
    return [(cell * size // cells, -(-(cell + 1) * size // cells)) for cell in range(cells)]


def plain_means(image: np.ndarray, cells: int) -> np.ndarray:
    """The mean responses of every cell, patch by patch in float64; shape (800, cells^2)."""
    stored = safetensors.numpy.load_file(image_maps.FILE)
    filters = stored["filters"].reshape(400, -1).astype(float)
    image = image.astype(float) / np.sqrt(np.square(image.astype(float)).mean())
    down, across = image.shape[1] - 5, image.shape[2] - 5
    z = np.empty((400, down, across))
    for row in range(down):
        for column in range(across):
            patch = image[:, row : row + 6, column : column + 6].ravel()
            centred = (patch - patch.mean()) / np.sqrt(patch.var() + 0.08**2)
            z[:, row, column] = filters @ centred - stored["offsets"]
    both = np.concatenate([np.maximum(z - 0.5, 0), np.maximum(-z - 0.5, 0)])
    averages = [
        both[:, top:bottom, left:right].mean(axis=(1, 2))
        for top, bottom in bounds(down, cells)
        for left, right in bounds(across, cells)
    ]
    return np.stack(averages, axis=1)


@pytest.mark.parametrize("cells", [1, 2, 3])
def test_patches_are_the_plain_computation(cells: int) -> None:
    records = leaves(4)
    whitening = safetensors.numpy.load_file(image_maps.FILE)["whitening"].astype(float)
    expected = []
    for image in records.reshape(-1, *SHAPE):
        means = (plain_means(image, cells) + plain_means(image[..., ::-1], cells)) / 2
        roots = np.sqrt(means)
        normal = (roots - roots.mean(axis=0)) / roots.std(axis=0)
        expected.append((whitening @ normal).ravel())
    features = Patches(SHAPE, cells).transform(records)
    # The root of a mean response near 0 turns an error of 1e-7 into 3e-4, so single features differ more than others.
    assert np.linalg.norm(features - unit(np.array(expected)), axis=1).max() < 2e-4
    assert np.abs(features).max() > 0.05


def test_an_image_and_its_mirror_image_have_the_same_mean() -> None:
    records = leaves(5)
    for feature_map in (Patches(SHAPE), Mirrored(Scattering(SHAPE))):
        features = feature_map.transform(records)
        np.testing.assert_allclose(feature_map.transform(mirror(records)), features, atol=1e-5)
    one_sided = Scattering(SHAPE)
    assert np.abs(one_sided.transform(mirror(records)) - one_sided.transform(records)).max() > 0.01


@pytest.mark.parametrize(
    ("shape", "across", "kept"), [((3, 32, 32), 8, 4), ((1, 28, 28), 7, 4), (SHAPE, 2, 1)]
)
def test_mirrored_scattering_is_the_mean_at_the_left_half_of_the_positions(
    shape: tuple[int, int, int], across: int, kept: int
) -> None:
    scattering, records = Scattering(shape), leaves(3, shape)
    assert scattering.grid[1] == across
    total = scattering.transform(records) + scattering.transform(mirror(records, shape))
    left = total.reshape(3, -1, across)[..., :kept].reshape(3, -1)
    np.testing.assert_allclose(Mirrored(scattering).transform(records), unit(left), atol=1e-6)


def turned(image: np.ndarray, degrees: float) -> np.ndarray:
    """An image of shape (channels, rows, columns) turned about its middle, pixel by pixel in float64."""
    rows, columns = image.shape[1:]
    cosine, sine = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    result = np.empty(image.shape)
    for row in range(rows):
        for column in range(columns):
            down, right = row - (rows - 1) / 2, column - (columns - 1) / 2
            y = np.clip((rows - 1) / 2 + cosine * down - sine * right, 0, rows - 1)
            x = np.clip((columns - 1) / 2 + sine * down + cosine * right, 0, columns - 1)
            top, left = min(int(y), rows - 2), min(int(x), columns - 2)
            weights = np.outer([top + 1 - y, y - top], [left + 1 - x, x - left])
            result[:, row, column] = (image[:, top : top + 2, left : left + 2] * weights).sum(axis=(1, 2))
    return result


@pytest.mark.parametrize(
    ("shape", "degrees"),
    [((1, 28, 28), (-10.0, 0.0, 10.0)), ((2, 9, 14), (25.0,)), ((3, 16, 11), (0.0, -90.0))],
)
def test_a_turned_map_is_the_mean_over_turned_images(
    shape: tuple[int, int, int], degrees: tuple[float, ...]
) -> None:
    scattering, records = Scattering(shape), leaves(4, shape)
    total = sum(
        scattering.transform([turned(image, angle).ravel() for image in records.reshape(-1, *shape)])
        for angle in degrees
    )
    features = Turned(scattering, degrees, pairs=0).transform(records)
    np.testing.assert_allclose(features, unit(np.asarray(total)), atol=1e-4)
    assert np.abs(features - scattering.transform(records)).max() > 0.01


@pytest.mark.parametrize(("shape", "pairs"), [((1, 16, 12), 48), ((1, 8, 8), 512)])
def test_directions_in_which_drawings_of_the_same_curves_differ_get_short(
    shape: tuple[int, int, int], pairs: int
) -> None:
    """The features equal those of the matrix itself, with fewer and with more pairs than features."""
    scattering, records = Scattering(shape), leaves(4, shape)
    first, second = (
        scattering.transform(images.reshape(pairs, -1)).astype(float)
        for images in image_maps._drawings(pairs, shape, 7)
    )
    moments = (first - second).T @ (first - second)
    values, vectors = np.linalg.eigh(moments / np.trace(moments))
    matrix = vectors / np.sqrt(np.maximum(values, 0) + 1e-3) @ vectors.T
    plain = Turned(scattering, pairs=0).transform(records)
    features = Turned(scattering, pairs=pairs).transform(records)
    np.testing.assert_allclose(features, unit(plain @ matrix), atol=2e-5)
    assert np.abs(features - plain).max() > 0.01


def test_two_drawings_show_the_same_curves_and_depend_on_the_seed_alone() -> None:
    first, second = image_maps._drawings(200, (2, 28, 20), 1)
    assert first.shape == second.shape == (200, 2, 28, 20)
    assert first.min() >= 0.0
    assert first.max() <= 1.0
    np.testing.assert_array_equal(first[:, 0], first[:, 1])
    again = image_maps._drawings(200, (2, 28, 20), 1)
    np.testing.assert_array_equal(again, (first, second))
    assert np.abs(image_maps._drawings(200, (2, 28, 20), 2)[0] - first).max() > 0.5

    def likeness(others: np.ndarray) -> float:
        return float((unit(first.reshape(200, -1)) * unit(others.reshape(200, -1))).sum(axis=1).mean())

    assert likeness(np.roll(second, 1, axis=0)) + 0.2 < likeness(second) < 0.95


def test_the_matrix_of_a_turned_map_does_not_depend_on_the_number_of_threads() -> None:
    scattering, before, found = Scattering((1, 16, 16)), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            image_maps._differences.cache_clear()
            found.append(image_maps._differences(scattering, 256))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*matrices) for matrices in zip(*found, strict=True))


def test_joined_maps_have_equal_weight_and_length_one_together() -> None:
    records = leaves(3)
    maps = (Patches(SHAPE), Mirrored(Scattering(SHAPE)), Scattering(SHAPE))
    features = Joined(maps).transform(records)
    blocks = [each.transform(records) / np.sqrt(3) for each in maps]
    np.testing.assert_allclose(features, np.concatenate(blocks, axis=1), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1.0, rtol=1e-5)


def block_means(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """The mean of every block of an image of shape (channels, rows, columns), block by block in float64."""
    blocks = [
        [
            image[:, top:bottom, left:right].astype(float).mean(axis=(1, 2))
            for left, right in bounds(image.shape[2], width)
        ]
        for top, bottom in bounds(image.shape[1], height)
    ]
    return np.array(blocks).transpose(2, 0, 1)


@pytest.mark.parametrize("shape", [(3, 18, 16), (3, 20, 9), (3, 9, 8)])
def test_a_reduced_map_is_the_map_of_block_means(shape: tuple[int, int, int]) -> None:
    images = leaves(3, shape).reshape(-1, *shape)
    small = np.array([block_means(image, *SHAPE[1:]) for image in images]).reshape(3, -1)
    for feature_map in (Scattering(SHAPE), Joined((Patches(SHAPE), Mirrored(Scattering(SHAPE))))):
        features = Reduced(shape, feature_map).transform(images.reshape(3, -1))
        assert np.linalg.norm(features - feature_map.transform(small), axis=1).max() < 2e-4


@pytest.mark.parametrize("side", [16, 28, 32, 48, 64, 96, 128, 224])
def test_images_of_every_size_have_features(side: int) -> None:
    kept = side if side <= 40 else 32
    wide, kept_wide = side // 2, side // 2 if side <= 80 else 32
    for channels, height, width in [(1, side, side), (3, side, side), (1, side, wide), (3, wide, side)]:
        rows, columns = (kept if each == side else kept_wide for each in (height, width))
        scattering = Scattering((channels, rows, columns))
        expected = (
            Joined((Patches(scattering.image_shape), Mirrored(scattering)))
            if channels == 3
            else Turned(scattering)
        )
        feature_map = image_features((channels, height, width))
        reduced = side > 40
        assert feature_map == (Reduced((channels, height, width), expected) if reduced else expected)
        assert feature_map_from_json(feature_map.to_json()) == feature_map
        assert feature_map.dimension(channels * height * width) <= 16_000


def test_colour_images_get_patches_from_7_pixels_on_grey_images_turned_scattering_and_others_scattering() -> (
    None
):
    assert isinstance(image_features((3, 7, 9)), Joined)
    assert image_features((3, 6, 9)) == Scattering((3, 6, 9))
    assert image_features((4, 32, 32)) == Scattering((4, 32, 32))
    assert image_features((1, 28, 28)) == Turned(Scattering((1, 28, 28)))
    assert image_features((1, 5, 5)) == Turned(Scattering((1, 5, 5)))
    assert image_features((2, 28, 28)) == Scattering((2, 28, 28))
    assert image_features((3, 40, 41)).image_shape == (3, 40, 41)
    assert image_features((3, 32, 32)).dimension(3072) == 10_976


@pytest.mark.parametrize(
    "feature_map",
    [
        Scattering(SHAPE),
        Patches(SHAPE),
        Joined((Patches(SHAPE), Mirrored(Scattering(SHAPE)))),
        Reduced(SHAPE, Joined((Patches((3, 8, 7)), Mirrored(Scattering((3, 8, 7)))))),
        Turned(Scattering(SHAPE)),
    ],
)
def test_units_do_not_matter_and_any_finite_image_has_finite_features(feature_map: FeatureMap) -> None:
    records = leaves(2)
    features = feature_map.transform(records)
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(feature_map.transform(records * 255), features, atol=1e-4)
    spike = np.zeros((1, records.shape[1]), np.float32)
    spike[0, 40] = 1.0
    for scale in (0.0, 1e-38, 1e-20, 1e15, 3e38):
        extreme = np.concatenate([records * 0 + 1, records, -records, spike]) * np.float32(scale)
        assert np.isfinite(feature_map.transform(extreme)).all()
        assert (np.linalg.norm(feature_map.transform(extreme), axis=1) < 1.00001).all()


def test_the_whitening_of_patches_flattens_the_spectrum_of_images_it_has_not_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records, feature_map = leaves(150, (3, 32, 32), seed=99), Patches((3, 32, 32))

    def largest_share() -> float:
        features = feature_map.transform(records).astype(float)
        values = np.linalg.eigvalsh(np.cov(features @ features.T))
        return float(values[-1] / values.sum())

    whitened, shipped = largest_share(), image_maps._shipped()
    plain = image_maps._PatchFilters(shipped.filters, shipped.offsets, shipped.whitening.new_ones(800).diag())
    monkeypatch.setattr(image_maps, "_shipped", lambda: plain)
    assert whitened < 0.5 * largest_share()


@pytest.mark.usefixtures("_read_again")
def test_a_changed_or_missing_file_of_filters_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(image_maps.FILE.read_bytes())
    content[-1] ^= 1
    monkeypatch.setattr(image_maps, "FILE", Path("patches.safetensors"))
    with pytest.raises(DataUnavailable, match=r"patches.safetensors of the package cannot be read"):
        Patches(SHAPE).transform(leaves(1))
    Path("patches.safetensors").write_bytes(content)
    with pytest.raises(DataUnavailable, match="does not have its SHA-256"):
        Patches(SHAPE).transform(leaves(1))


def test_a_map_described_with_other_filters_is_an_error() -> None:
    described = Patches(SHAPE).to_json()
    assert feature_map_from_json(described) == Patches(SHAPE)
    with pytest.raises(InvalidInput, match="needs filters of SHA-256 abc"):
        feature_map_from_json({**described, "sha256": "abc"})


@pytest.mark.parametrize("kind", ["mirrored", "turned", "joined", "reduced"])
def test_only_image_maps_can_be_parts(kind: str) -> None:
    described = {
        "kind": kind,
        "maps": [Identity().to_json()],
        "image_shape": SHAPE,
        "degrees": [0],
        "pairs": 0,
    }
    with pytest.raises(InvalidInput, match=r"must be (made from|a tuple of at least one)"):
        feature_map_from_json(described)


class Own(Scattering):
    """A class of the user's own."""


def test_a_users_class_inside_a_map_is_seen() -> None:
    assert runs_user_code(Mirrored(Own(SHAPE)))
    assert runs_user_code(Joined((Patches(SHAPE), Mirrored(Own(SHAPE)))))
    assert runs_user_code(Reduced((3, 20, 20), Own(SHAPE)))
    assert runs_user_code(Reduced((3, 20, 20), Turned(Own(SHAPE))))
    assert not runs_user_code(Turned(Scattering(SHAPE)))
    assert not runs_user_code(Reduced((3, 20, 20), Scattering(SHAPE)))
    assert not runs_user_code(Joined((Patches(SHAPE), Mirrored(Scattering(SHAPE)))))


@pytest.mark.slow
def test_the_script_makes_the_filters_that_come_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs/making")
    spec = importlib.util.spec_from_file_location("patch_filters", ROOT / "docs/making/patch_filters.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    made, stored = script.make(), safetensors.numpy.load_file(image_maps.FILE)
    assert made.keys() == stored.keys()
    for name, tensor in made.items():
        scale = np.abs(stored[name]).max()
        np.testing.assert_allclose(tensor.numpy() / scale, stored[name] / scale, atol=1e-3)
