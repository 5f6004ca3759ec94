"""What an encoder file computes from a record depends on that record alone (THEORY 3.8), bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from quietmax.audit import audit_invariant
from quietmax.models.features import Encoder, save_encoder
from tests.models.features.onnx_files import (
    FLOAT,
    PUBLIC_OUTPUT,
    PUBLIC_SHA256,
    convolutions,
    mixing,
    node,
    public_file,
    write,
)


def _consistent(encoder: Encoder, columns: int, records: int = 40) -> None:
    report = audit_invariant(encoder, columns, records=records)
    assert report.verdict == "consistent", report.broken
    assert report.checks[0].comparisons > records


@pytest.mark.parametrize("shape", [(1, 5, 5), (2, 8, 11), (3, 16, 16), (3, 33, 31), (3, 64, 64)])
def test_layers_in_safetensors(shape: tuple[int, int, int], tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(shape[0], 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(3),
        nn.Conv2d(24, 7, 2, groups=1),
        nn.GELU(),
        nn.Flatten(),
        nn.LayerNorm(28),
        nn.Linear(28, 19),
        nn.Softplus(),
    )
    digest = save_encoder(network, tmp_path / "net.safetensors")
    _consistent(Encoder(tmp_path / "net.safetensors", digest, image_shape=shape), int(np.prod(shape)))


@pytest.mark.parametrize("columns", [1, 3, 17, 100, 784])
def test_matrix_products_in_safetensors(columns: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(columns, 33), nn.Tanh(), nn.Linear(33, 5))
    digest = save_encoder(network, tmp_path / "net.safetensors")
    _consistent(Encoder(tmp_path / "net.safetensors", digest, mean=0.5, std=0.3), columns, 150)


@pytest.mark.parametrize("columns", [5, 23_000])
@pytest.mark.parametrize("activation", [nn.ELU(), nn.GELU(), nn.Sigmoid(), nn.SiLU(), nn.Softplus()], ids=str)
def test_activations_round_alike_at_every_place_of_a_batch(
    activation: nn.Module, columns: int, tmp_path: Path
) -> None:
    # Numbers that do not fill a vector are computed otherwise: the last of 33, where a batch had 11 rows.
    torch.manual_seed(0)
    digest = save_encoder(nn.Sequential(nn.Linear(columns, 3), activation), tmp_path / "net.safetensors")
    encoder = Encoder(tmp_path / "net.safetensors", digest, input_shape=(columns,))
    records = np.random.default_rng(99).standard_normal((75, columns)).astype(np.float32)
    expected = encoder.transform(records)
    for first in (1, 5, 32, 74):
        assert expected[first:].tobytes() == encoder.transform(records[first:]).tobytes()


@pytest.mark.parametrize("size", [None, (3, 24, 20), (3, 7, 40)])
def test_convolutions_in_onnx(size: tuple[int, int, int] | None, tmp_path: Path) -> None:
    encoder = convolutions(tmp_path, (3, 12, 10))
    scaled = Encoder(
        encoder.path, encoder.sha256, image_shape=(3, 12, 10), input_shape=size, mean=(0.4, 0.5, 0.6)
    )
    _consistent(scaled, 360)


def test_onnx_operations_that_mix_the_records_of_a_batch(tmp_path: Path) -> None:
    _consistent(mixing(tmp_path), 4)


def test_quantised_onnx_whose_scale_comes_from_all_numbers_at_once(tmp_path: Path) -> None:
    digest = write(
        tmp_path / "net.onnx",
        node("DynamicQuantizeLinear", "x", "q scale zero"),
        node("DequantizeLinear", "q scale zero", "y"),
        inputs=[("x", FLOAT, ["n", 9])],
    )
    _consistent(Encoder(tmp_path / "net.onnx", digest), 9)


def test_a_public_network_of_a_package() -> None:
    encoder = Encoder(
        public_file(), PUBLIC_SHA256, image_shape=(1, 28, 28), input_shape=(3, 48, 48), output=PUBLIC_OUTPUT
    )
    _consistent(encoder, 784, 20)
