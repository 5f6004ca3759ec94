from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from quietmax.models.features import Scattering
from quietmax.models.features.images import _scatter, dead_leaves

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


@pytest.mark.parametrize(
    ("scales", "angles", "shape"),
    [
        (1, 8, (9, 12)),
        (2, 8, (28, 28)),
        (2, 8, (32, 32)),
        (2, 5, (30, 29)),
        (3, 8, (40, 32)),
        (4, 8, (64, 64)),
    ],
)
def test_scattering_equals_kymatio_where_it_can_be_imported(
    scales: int, angles: int, shape: tuple[int, ...]
) -> None:
    kymatio = pytest.importorskip(
        "kymatio.scattering2d.frontend.torch_frontend",
        reason="kymatio is not installed (no dependency of Quietmax)",
    )
    images = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    theirs = kymatio.ScatteringTorch2D(scales, shape, L=angles)(images).numpy()
    assert relative_difference(_scatter(images, scales, angles).numpy(), theirs) < 1e-4


def test_a_constant_image_has_its_value_at_order_zero_and_nothing_above() -> None:
    paths = _scatter(torch.full((1, 28, 28), 3.0))
    torch.testing.assert_close(paths[:, 0], torch.full((1, 7, 7), 3.0), rtol=1e-4, atol=1e-4)
    assert paths[:, 1:].abs().max() < 1e-4


def test_the_strongest_first_order_path_points_across_the_stripes() -> None:
    rows, columns = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    down, across = torch.cos(0.75 * torch.pi * rows), torch.cos(0.75 * torch.pi * columns)
    energies = _scatter(torch.stack([down, across]))[:, 1:9].sum(dim=(2, 3))
    strongest = energies.argmax(dim=1)
    # wavelet directions are (3 - turn) * pi / 8 from the vertical axis: 0 is turn 3, -pi/2 is turn 7
    assert strongest.tolist() == [3, 7]


def test_scattering_features_have_length_one_and_ignore_brightness_scale() -> None:
    images = dead_leaves(3, (1, 28, 28), seed=1).reshape(3, -1)
    features = Scattering((1, 28, 28)).transform(images)
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(Scattering((1, 28, 28)).transform(images * 255), features, atol=1e-5)


def test_an_empty_image_has_finite_features() -> None:
    assert np.isfinite(Scattering((1, 28, 28)).transform(np.zeros((1, 784)))).all()


def test_whitening_flattens_the_spectrum_of_images_it_has_not_seen() -> None:
    images = dead_leaves(200, (1, 28, 28), seed=99).reshape(200, -1)

    def largest_share(whitening: float) -> float:
        features = Scattering((1, 28, 28), whitening=whitening).transform(images).astype(float)
        values = np.linalg.eigvalsh(np.cov(features @ features.T))
        return float(values[-1] / values.sum())

    assert largest_share(0.5) < 0.75 * largest_share(0.0)


def test_dead_leaves_are_images_in_the_unit_interval_and_the_same_for_the_same_seed() -> None:
    images = dead_leaves(5, (3, 20, 16), seed=4)
    assert images.shape == (5, 3, 20, 16)
    assert images.min() >= 0.0
    assert images.max() <= 1.0
    np.testing.assert_array_equal(images, dead_leaves(5, (3, 20, 16), seed=4))
    assert (images != dead_leaves(5, (3, 20, 16), seed=5)).any()
    assert images.std() > 0.1
