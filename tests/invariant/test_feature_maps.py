"""A record's features depend on that record alone (THEORY 3.8): the same bits whatever else is in the table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quietmax.audit import audit_invariant
from quietmax.errors import InvalidInput
from quietmax.models.features import (
    BatchedMap,
    FeatureMap,
    Identity,
    OneHot,
    Pipeline,
    RandomFourier,
    Scaling,
    Scattering,
    TableFeatures,
    UnitNorm,
    image_features,
)
from quietmax.models.features import images as scattering
from quietmax.models.features.base import square_sums
from quietmax.models.features.images import Joined, Mirrored, Patches, Reduced, Turned
from quietmax.models.features.tabular import TableCells
from tests.models.features.maps import COLUMNS, MAPS, ModuleMap

Configuration = tuple[FeatureMap, int]
WHITENINGS = (0.5, 0.0, 1.0)


@pytest.fixture(autouse=True)
def _few_images_for_whitening(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rounding follows the shape of the whitening matrix, not its values: few images give a matrix sooner."""
    monkeypatch.setattr(scattering, "_SYNTHETIC_IMAGES", 8)
    scattering._whitening.cache_clear()
    yield
    scattering._whitening.cache_clear()


def _image_maps() -> Iterator[Configuration]:
    def images(*shape: int, **settings: Any) -> Configuration:
        return Scattering(shape, **settings), int(np.prod(shape))  # type: ignore[arg-type]

    for side in range(5, 41):
        yield images(1, side, side)
        yield images(1, side, 45 - side)
        for channels in (2, 3, 4):
            yield images(channels, side, side)
    for side in range(4, 41):
        settings = {"angles": 2 + side % 8, "groups": 1, "whitening": WHITENINGS[side % 3]}
        yield images(1 + side % 4, side, 44 - side, scales=1, **settings)
        if side > 4:
            yield images(1 + side % 2, side, side, scales=2, **settings)
        if side > 8:
            yield images(1, side, side, scales=3, groups=1, angles=2 + side % 7)
    for side in (17, 23, 32, 40):
        yield images(1, side, side, scales=4, groups=1, angles=4)


def _colour_maps() -> Iterator[Configuration]:
    for side in (*range(7, 41), 64):
        shape = (3, side, max(7, 45 - side))
        yield Patches(shape, cells=1 + side % 2), int(np.prod(shape))
        yield Patches((3, side, side)), 3 * side * side
        yield Turned(Scattering((1, side, side)), pairs=16 * (side % 5)), side * side
        if side % 4 == 0:
            yield Turned(Scattering((2, side, 2 * side // 3)), pairs=64), 2 * side * (2 * side // 3)
            yield Mirrored(Scattering((3, side, side))), 3 * side * side
            joined = Joined((Patches((3, side, side)), Mirrored(Scattering((3, side, side)))))
            yield joined, 3 * side * side
    for shape in [
        (1, 41, 28),
        (3, 48, 48),
        (3, 64, 12),
        (2, 50, 50),
        (1, 96, 96),
        (3, 20, 128),
        (1, 224, 224),
    ]:
        yield image_features(shape), int(np.prod(shape))


def table_map(columns: int) -> TableFeatures:
    """Every third number in two kinds of bins, the number after it a missing value, and all bins of two crossed."""
    numbers = tuple(range(0, columns, 3))
    missing = tuple(place + 1 if place + 1 < columns else None for place in numbers)
    blocks = tuple((columns + 7 * place, columns + 7 * place + 7) for place in range(len(numbers)))
    crosses = (((blocks[0], blocks[-1]),) if len(blocks) > 1 else ()) + (((0, 1), (0, columns)),)
    return TableFeatures(columns, numbers, missing, (7, 21), crosses)


def cells_map(columns: int) -> TableCells:
    """Numbers with and without a missing value, indicators, and crosses."""
    edges = sorted({*range(0, columns, 3), *range(1, columns, 5), columns})
    parts = tuple(itertools.pairwise(edges))
    numbers = tuple(place for place, (first, last) in enumerate(parts) if place % 2 == 0 and last - first < 3)
    return TableCells(columns, parts, numbers, 64, ((0, len(parts) - 1), (len(parts) // 2, 0)))


def _table_maps() -> Iterator[Configuration]:
    for columns in (*range(1, 34), 63, 64, 65, 100, 257, 784):
        generator = np.random.default_rng(columns)
        low, width = generator.normal(size=columns), generator.random(columns) + 0.1
        yield UnitNorm(constant=(columns % 3) * 0.7), columns
        yield RandomFourier(count=2 * (1 + 7 * columns % 90), seed=columns), columns
        yield Scaling(tuple(low), tuple(low + width)), columns
        yield table_map(columns), columns
        yield cells_map(columns), columns
        if columns % 4 == 0:
            module = torch.nn.Sequential(torch.nn.Linear(columns, 1 + columns // 2), torch.nn.Sigmoid())
            yield ModuleMap(module, outputs=1 + columns // 2), columns
            yield Pipeline((UnitNorm(0.3), RandomFourier(count=18), UnitNorm())), columns
            yield OneHot((None,) * (columns - 1) + ((0.0, 0.5),)), columns
            yield Identity(), columns


IMAGE_MAPS, COLOUR_MAPS, TABLE_MAPS = list(_image_maps()), list(_colour_maps()), list(_table_maps())
EVERY = [*IMAGE_MAPS, *COLOUR_MAPS, *TABLE_MAPS]
# The shapes that version 0.1 computed wrongly, and some of all others.
REFUTED: list[Configuration] = [
    *((Scattering((1, side, side)), side * side) for side in (5, 6, 7)),
    *((Scattering((3, side, side)), 3 * side * side) for side in (5, 7)),
    (Scattering((2, 7, 7)), 98),
    (Scattering((1, 28, 28), angles=2, groups=1), 784),
    (Scattering((1, 30, 30), scales=1, groups=1), 900),
]
COLOUR: list[Configuration] = [
    (Patches((3, 7, 7)), 147),
    (Patches((3, 9, 14), cells=3), 378),
    (Patches((3, 16, 16)), 768),
    (Mirrored(Scattering((3, 7, 7))), 147),
    (Joined((Patches((3, 11, 11)), Mirrored(Scattering((3, 11, 11))))), 363),
    (Reduced((3, 48, 41), Joined((Patches((3, 9, 8)), Mirrored(Scattering((3, 9, 8)))))), 5904),
    (Reduced((1, 50, 20), Scattering((1, 16, 7))), 1000),
    *((Turned(Scattering((1, side, side))), side * side) for side in (5, 7)),
    (Turned(Scattering((2, 13, 9)), degrees=(-30.0, 3.0)), 234),
    (Reduced((1, 50, 20), Turned(Scattering((1, 16, 7)))), 1000),
]
USUAL: list[Configuration] = [
    *((Scattering(shape), math.prod(shape)) for shape in ((1, 28, 28), (3, 32, 32), (1, 17, 23), (1, 9, 13))),
    *((feature_map, COLUMNS) for feature_map in MAPS),
]
SMALL = [each for each in IMAGE_MAPS if each[1] <= 800]
SAMPLE = [*REFUTED, *COLOUR, *USUAL, *SMALL[7::17], *TABLE_MAPS[::9]]


def named(configuration: object) -> str | None:
    if isinstance(configuration, FeatureMap):
        shape = getattr(configuration, "image_shape", "")
        return f"{configuration.kind}{shape}".replace(" ", "")
    return None


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def offset_view(values: np.ndarray, numbers: int) -> np.ndarray:
    """The same values at an address that is a multiple of 64 bytes plus so many numbers."""
    memory = np.zeros(values.size + 32 + numbers, np.float32)
    start = (-memory.ctypes.data % 64) // 4 + numbers
    view = memory[start : start + values.size].reshape(values.shape)
    view[:] = values
    return view


def row_selections(rows: int) -> Iterator[np.ndarray]:
    """Rows that are computed together: some removed, added, moved, repeated, or alone."""
    generator = np.random.default_rng(5)
    everyone = np.arange(rows)
    yield everyone
    yield everyone[1:]
    yield np.delete(everyone, generator.integers(rows))
    yield np.concatenate([[rows - 1, 3], everyone])
    yield generator.permutation(rows)
    yield np.repeat(everyone[: rows // 2], 2)
    yield np.full(rows, generator.integers(rows))
    yield generator.integers(rows, size=1)


def changed_rows(feature_map: FeatureMap, columns: int) -> int:
    """In how many cases a record's features were not what they were in the whole table, on one thread.

    The table fills all places of a batch and some of the next one.
    """
    rows = min(70, feature_map._batch_rows() + 6) if isinstance(feature_map, Scattering | Patches) else 70
    table = np.random.default_rng(columns).random((rows, columns), np.float32)
    table[1::7] = 0.0
    table[2::7] *= 2.0**40
    torch.set_num_threads(1)
    features = feature_map.transform(table)
    changed = 0
    for threads, (number, chosen) in itertools.product((1, 2), enumerate(row_selections(rows))):
        torch.set_num_threads(threads)
        again = feature_map.transform(offset_view(table[chosen], (0, 1, 3, 8)[number % 4]))
        changed += int((bits(again) != bits(features[chosen])).any(axis=1).sum())
    return changed


@pytest.mark.parametrize(
    ("feature_map", "columns"),
    [*SAMPLE, pytest.param(Turned(Scattering((1, 28, 28))), 784, marks=pytest.mark.slow)],
    ids=named,
)
def test_no_other_record_changes_a_records_features(feature_map: FeatureMap, columns: int) -> None:
    assert changed_rows(feature_map, columns) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("feature_map", "columns"), EVERY, ids=named)
def test_no_other_record_changes_a_records_features_in_any_configuration(
    feature_map: FeatureMap, columns: int
) -> None:
    assert changed_rows(feature_map, columns) == 0


@pytest.mark.parametrize(
    "feature_map",
    [
        Scattering((1, 7, 7)),
        Reduced((1, 7, 7), Scattering((1, 5, 6))),
        RandomFourier(count=34),
        UnitNorm(0.2),
        table_map(49),
    ],
    ids=named,
)
def test_any_rows_in_any_order_at_any_alignment_have_the_features_of_the_whole_table(
    feature_map: FeatureMap,
) -> None:
    table = np.random.default_rng(1).random((90, 49), np.float32)
    features = feature_map.transform(table)

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        st.lists(st.integers(0, 89), min_size=1, max_size=140), st.integers(0, 15), st.sampled_from([1, 2])
    )
    def same(rows: list[int], alignment: int, threads: int) -> None:
        torch.set_num_threads(threads)
        again = feature_map.transform(offset_view(table[rows], alignment))
        np.testing.assert_array_equal(bits(again), bits(features[rows]))

    same()


def test_there_are_at_least_300_configurations_and_all_image_sides_from_4_to_40() -> None:
    shapes = {feature_map.image_shape for feature_map, _ in IMAGE_MAPS if isinstance(feature_map, Scattering)}
    assert len(EVERY) >= 300
    assert {shape[1] for shape in shapes} == set(range(4, 41))
    assert {shape[0] for shape in shapes} == {1, 2, 3, 4}


class RoundsByPosition(BatchedMap):
    """Every second record of a batch is one unit in the last place longer."""

    kind: ClassVar[str] = "rounds-by-place"

    def dimension(self, columns: int) -> int:
        return columns

    def _batch_rows(self) -> int:
        return 16

    def _batch(self, batch: torch.Tensor) -> torch.Tensor:
        result = batch.clone()
        result[1::2] *= 1.0 + 2.0**-23
        return result

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind}

    @classmethod
    def from_json(cls, values: Any) -> RoundsByPosition:  # noqa: ARG003
        return cls()


class Unchecked(RoundsByPosition):
    """The same without the check."""

    def _rows_at_once(self, columns: int) -> int:  # noqa: ARG002
        return 16


class Centred(Identity):
    """A scaler that is fitted on the table."""

    def _features(self, records: np.ndarray) -> np.ndarray:
        return records - records.mean(axis=0)


@pytest.mark.parametrize("broken", [Unchecked(), Centred()], ids=named)
def test_maps_that_break_the_invariant_are_caught_on_every_machine(broken: FeatureMap) -> None:
    assert changed_rows(broken, 5) > 0
    assert audit_invariant(broken, 5).verdict == "refuted"


def test_a_map_that_rounds_by_position_is_computed_one_record_at_a_time() -> None:
    feature_map = RoundsByPosition()
    assert feature_map._rows_at_once(5) == 1
    assert changed_rows(feature_map, 5) == 0
    assert audit_invariant(feature_map, 5).verdict == "consistent"


class MixesRows(torch.nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows - rows.mean(dim=0)


class Counts(torch.nn.Module):
    calls = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return rows + self.calls


def test_a_module_that_mixes_the_rows_of_a_batch_gets_one_record_at_a_time() -> None:
    feature_map = ModuleMap(MixesRows(), outputs=4)
    np.testing.assert_array_equal(feature_map.transform(np.ones((3, 4))), np.zeros((3, 4)))
    assert changed_rows(feature_map, 4) == 0


def test_a_module_that_gives_a_record_different_features_in_two_calls_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="a function of the record alone"):
        ModuleMap(Counts(), outputs=4).transform(np.ones((3, 4)))


def test_the_check_of_a_map_never_sees_the_records_of_the_table() -> None:
    seen = []

    class Watching(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            seen.append(rows.clone())
            return rows

    feature_map = ModuleMap(Watching(), outputs=3)
    feature_map.transform(np.full((2, 3), 77.0))
    *checks, table = seen
    assert len(checks) > 3
    assert not any((batch == 77.0).any() for batch in checks)
    assert (table[:2] == 77.0).all()


def test_sums_of_squares_are_right_and_do_not_depend_on_memory() -> None:
    generator = np.random.default_rng(0)
    for width in (1, 2, 3, 255, 256, 257, 700):
        rows = generator.normal(size=(9, width))
        sums = square_sums(rows)
        np.testing.assert_allclose(sums[:, 0], np.square(rows).sum(axis=1), rtol=1e-14)
        np.testing.assert_array_equal(square_sums(np.asfortranarray(rows)[::-2]), sums[::-2])
    assert square_sums(np.empty((2, 0))).tolist() == [[0.0], [0.0]]
