"""DP-SGD on the cells of a table: what its steps release, what one person changes of it, and what is saved."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quietmax.accounting.dpsgd import Schedule, noise_multiplier
from quietmax.errors import DataUnavailable, InvalidInput
from quietmax.estimators import DPSGD, DPSGDSettings, open_private, save_private
from quietmax.estimators.blocks import Blocks, LocalEngine, Table
from quietmax.estimators.dpsgd import training
from quietmax.estimators.dpsgd.training import (
    Batch,
    Plan,
    StoredRows,
    make_plan,
    released_shares,
    train_network_on_cells,
    train_on_cells,
)
from quietmax.estimators.head import tables as head_tables
from quietmax.estimators.head import weights
from quietmax.estimators.head.exact_sums import gradient_grid
from quietmax.estimators.head.tables import Basis, class_scores
from quietmax.estimators.head.weights import TableWeights, even_shares
from quietmax.estimators.training_set import Persons
from quietmax.models.features.tabular import TableCells
from quietmax.models.stacked import MLP, initial_mlp
from tests.estimators.made import made
from tests.estimators.table_of_people import CROSSED, PERSONS, PLAIN, table_of_people

CELLS = TableCells(4, ((0, 1), (1, 4)), (0,), levels=8)
COUNT = 400


def _plan(size: int, noise: float, **given: Any) -> Plan:
    planned = make_plan(size, epsilon=1.0, delta=1e-5, inputs="cells", columns=2, **given)
    return replace(planned, noise_multiplier=noise)


def _table(classes: int, count: int = COUNT) -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    rows = np.stack([generator.integers(0, size, count) for size in CELLS.sizes], axis=1)
    return rows.astype(np.float32), (rows.sum(axis=1) + generator.integers(0, 4, count)) % classes


def _stored(rows: Any, labels: Any, classes: int, people: Any = None) -> StoredRows:
    persons = None if people is None else np.char.zfill(people.astype("S"), 16)
    blocks = Blocks(classes)
    blocks.extend([Table(rows, labels, classes, persons=persons)])
    return StoredRows(blocks, by_person=people is not None)


def _basis() -> Basis:
    return Basis.of(CELLS, even_shares(CELLS.sizes), 1e-3, 20.0)


@contextmanager
def _releases() -> Iterator[list[tuple[float, float, Any]]]:
    """Note the sensitivity, the mu and the exact values of everything that is released."""
    seen: list[tuple[float, float, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (training, head_tables, weights):
            original = module.release_gaussian

            def noted(
                values: Any, *, sensitivity: float, mu: float, _release: Any = original, **rest: Any
            ) -> Any:
                seen.append((sensitivity, mu, np.array(values)))
                return _release(values, sensitivity=sensitivity, mu=mu, **rest)

            patch.setattr(module, "release_gaussian", noted)
        yield seen


def _dense(basis: Basis, rows: Any) -> Any:
    """The vectors that rows of cells stand for."""
    lines = basis.entries.toarray() / 2.0**20
    starts = np.cumsum([0, *CELLS.sizes[:-1]])
    return lines[rows.astype(int) + starts].sum(axis=1) + lines[-1]


@pytest.mark.parametrize("classes", [2, 3])
def test_without_noise_a_training_is_that_on_vectors_divided_by_the_public_expected_number(
    classes: int,
) -> None:
    """Gradients of softmax regression on dense rows, clipped record by record; 1,000 records are declared."""
    rows, labels = _table(classes)
    plan = _plan(1000, noise=1e-6, sampling_rate=1.0, steps=6, centring_steps=1)
    basis, settings = _basis(), plan.settings
    found = train_on_cells(_stored(rows, labels, classes), basis, plan, CELLS.sizes, seed=1)
    z, weights = _dense(basis, rows), np.zeros((classes, basis.features))
    for rate in settings._learning_rates():
        shares = torch.softmax(torch.from_numpy(z @ weights.T), 1).numpy()
        errors = shares - np.eye(classes)[labels]
        # Of two classes one output is trained, whose gradient is clipped.
        errors = errors[:, 1:] if classes == 2 else errors
        lengths = np.linalg.norm(errors, axis=1) * np.linalg.norm(z, axis=1)
        clipped = errors * np.minimum(1.0, settings.max_grad_norm / lengths)[:, None]
        step = rate / 1000 * (clipped.T @ z)
        weights -= np.concatenate([-step, step]) if classes == 2 else step
    expected = z @ (weights - weights.mean(axis=0)).T
    scores = TableWeights(class_scores(found), even_shares(CELLS.sizes), CELLS.sizes).scores(rows)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(scores, expected, atol=1e-3)


@pytest.mark.parametrize("hidden", [(5,), (4, 3)])
@pytest.mark.parametrize("name", ["tanh", "relu", "sigmoid"])
def test_a_network_on_cells_has_the_clipped_gradients_of_one_on_vectors(
    hidden: tuple[int, ...], name: str
) -> None:
    rows, labels = _table(3, 60)
    plan = _plan(60, noise=1e-6, steps=2, centring_steps=1, hidden=hidden, activation=name, max_grad_norm=0.3)
    basis, generator = _basis(), np.random.default_rng(1)
    whole = initial_mlp((basis.features, *hidden, 3), name, (3,), torch.float64)
    first = (3.0 * whole.kernels[0][0].T).contiguous()
    above = MLP(whole.widths[1:], name, whole.kernels[1:], whole.biases[1:])
    owners = generator.integers(0, 30, 60)
    batch = Batch(rows, labels, 3, Persons(owners), np.arange(60))
    sums, others = training._network_sums(batch, basis, CELLS.sizes, first, above, plan)
    parameters = [each.clone().requires_grad_() for each in (first, *above.kernels, *above.biases)]
    expected = [torch.zeros_like(each) for each in parameters]
    for z, label, owner in zip(_dense(basis, rows), labels, owners, strict=True):
        signal, depth = torch.from_numpy(z) @ parameters[0].T, len(above.kernels)
        for number in range(depth):
            signal = {"tanh": torch.tanh, "relu": torch.relu, "sigmoid": torch.sigmoid}[name](signal)
            kernel, bias = parameters[1 + number][0], parameters[1 + depth + number][0, 0]
            signal = (kernel @ signal if number == depth - 1 else signal @ kernel) + bias
        loss = torch.nn.functional.cross_entropy(signal, torch.tensor(label))
        gradients = torch.autograd.grad(loss, parameters)
        length = math.sqrt(sum(float(each.square().sum()) for each in gradients))
        share = min(1.0, 0.3 / length) / (owners == owner).sum()
        expected = [total + share * each for total, each in zip(expected, gradients, strict=True)]
    found = [torch.from_numpy(basis.gradient(sums, 2.0**-30)), *others.tensors()]
    for own, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(own.numpy(), wanted.numpy(), atol=2e-3)
    assert max(float(each.abs().max()) for each in expected) > 0.1
    # What each row adds does not depend on the others, to the last bit.
    alone = [
        training._network_sums(
            replace(batch, numbers=np.array([row])), basis, CELLS.sizes, first, above, plan
        )
        for row in generator.permutation(60)
    ]
    assert np.array_equal(sum(each for each, _ in alone), sums)
    for each, together in zip(
        zip(*(own.tensors() for _, own in alone), strict=True), others.tensors(), strict=True
    ):
        assert torch.equal(torch.stack(each).sum(0), together)


@pytest.mark.parametrize("hidden", [(), (4, 3)])
@pytest.mark.parametrize("owned", [1, 5, 60])
@pytest.mark.parametrize("classes", [2, 3])
def test_a_record_or_person_moves_every_sum_by_no_more_than_its_sensitivity(
    owned: int, classes: int, hidden: tuple[int, ...]
) -> None:
    """The first rows belong to one person, whose own sums are exactly what their removal subtracts."""
    rows, labels = _table(classes)
    people = None if owned == 1 else np.concatenate([np.zeros(owned, int), np.arange(1, COUNT + 1 - owned)])
    rows[:owned], labels[:owned] = rows[0], labels[0]
    clip = {"max_grad_norm": 0.1} if hidden else {}
    plan = _plan(COUNT, noise=1.0, sampling_rate=1.0, steps=4, centring_steps=1, hidden=hidden, **clip)
    train = train_network_on_cells if hidden else train_on_cells

    def sums(part: slice) -> list[tuple[float, Any]]:
        stored = _stored(rows[part], labels[part], classes, None if people is None else people[part])
        with _releases() as seen:
            released_shares(stored, plan, CELLS.sizes, seed=1)
            train(stored, _basis(), plan, CELLS.sizes, seed=1)
        return [(sensitivity, values) for sensitivity, _, values in seen[:2]]

    everyone, others, own = sums(slice(None)), sums(slice(owned, None)), sums(slice(owned))
    for (sensitivity, whole), (_, without), (_, alone) in zip(everyone, others, own, strict=True):
        np.testing.assert_allclose(whole - without, alone, atol=2.0**-29)
        assert 0.5 * sensitivity < np.linalg.norm(whole - without) <= sensitivity


def test_every_step_is_one_release_of_the_same_noise_multiplier() -> None:
    frame = table_of_people(900, 900)
    private = DPSGD(2.0, 1e-5, schema=PLAIN, declared_size=900, settings=DPSGDSettings(steps=60))
    with _releases() as seen:
        private.fit(frame)
    settings = private.plan_.settings
    assert (settings.centring_steps, settings.calibration_steps) == (3, 5)
    multiplier = noise_multiplier(2.0, 1e-5, Schedule(0.5, 60))
    assert private.plan_.noise_multiplier == multiplier
    assert {mu for _, mu, _ in seen} == {1 / multiplier}
    features = seen[10][2].size
    norm = settings.max_grad_norm + math.sqrt(features) * gradient_grid(900)
    counts = math.sqrt(3) * (1 + 2.0**-40)
    found = [sensitivity for sensitivity, _, _ in seen]
    np.testing.assert_allclose(found, [counts] * 3 + [norm] * 52 + [1.0] * 5, rtol=1e-12)
    assert min(found[3:55]) >= settings.max_grad_norm


@pytest.mark.parametrize("seed", [None, 3])
def test_without_people_the_shares_are_noise_of_the_stated_spread(seed: int | None) -> None:
    plan = _plan(100_000, noise=200.0, steps=80, sampling_rate=0.5)
    sizes = (20_000, 20_000)
    rows = _stored(np.zeros((1, 2), np.float32), np.zeros(1, np.int64), 2)
    shares, noise = released_shares(rows, plan, sizes, seed)
    assert noise == pytest.approx(math.sqrt(2) * 200.0 / (math.sqrt(4) * 0.5 * 100_000))
    # Shares are clipped to 0: half of them are above it, and these have the mean square of all.
    assert math.sqrt(2 * np.square(shares).mean()) == pytest.approx(noise, rel=0.03)


@pytest.mark.parametrize("schema", [PERSONS, CROSSED], ids=["persons", "crosses"])
def test_the_weights_are_the_same_in_any_order_on_disk_and_on_several_threads(
    schema: Any, tmp_path: Path
) -> None:
    frame = table_of_people(2000, 900)
    chosen = DPSGDSettings(steps=12, sampling_rate=1.0, calibration_steps=4)

    def fitted(rows: Any, engine: Any) -> Any:
        return DPSGD(
            3.0, 1e-5, schema=schema, declared_size=900, random_state=2, settings=chosen, engine=engine
        ).fit(frame.iloc[rows])

    expected = fitted(np.arange(2000), "local")
    torch.set_num_threads(2)
    order = np.random.default_rng(1).permutation(2000)
    found = fitted(order, LocalEngine(max_memory=0, cache_dir=tmp_path))
    np.testing.assert_array_equal(found.model_.weights, expected.model_.weights)
    np.testing.assert_array_equal(found.model_.centre, expected.model_.centre)
    assert found.scale_ == expected.scale_
    assert (expected.guarantee_.unit, expected.guarantee_.parameters["inputs"]) == ("person", "cells")


@pytest.mark.parametrize(("classes", "hidden"), [(2, ()), (3, ()), (3, (8, 4))])
def test_a_table_is_trained_on_as_cells_learns_and_is_saved(
    classes: int, hidden: tuple[int, ...], tmp_path: Path
) -> None:
    frame = table_of_people(3000, 3000)
    schema = PLAIN
    if classes == 3:
        frame.loc[frame["job"] == "a", "ill"] = "perhaps"
        schema = replace(PLAIN, classes=("no", "perhaps", "yes"))
    settings = DPSGDSettings(hidden=hidden)
    private = DPSGD(8.0, 1e-5, schema=schema, declared_size=3000, settings=settings).fit(frame)
    facts = private.guarantee_.parameters
    assert (private.guarantee_.status, facts["features"]["kind"], facts["inputs"]) == (
        "proven",
        "cells",
        "cells",
    )
    assert facts["dimension"] == sum(private.feature_map_.sizes)
    assert private.score(frame, frame["ill"]) > 0.75
    folder = save_private(private, tmp_path / "model", dataset="people")
    opened = open_private(folder)
    assert opened.guarantee == private.guarantee_
    np.testing.assert_array_equal(opened.predict_proba(opened.encode(frame)), private.predict_proba(frame))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"hidden": (3,)}, "cells"),
        ({"length": 0.5}, "table"),
        ({"centring_steps": 0}, "table"),
        ({"optimizer": "momentum"}, "cells"),
    ],
)
def test_networks_whose_first_steps_release_no_counts_train_on_features(
    changes: dict[str, Any], kind: str
) -> None:
    frame = table_of_people(300, 300)
    private = made(DPSGD, 3.0, 1e-5, schema=PLAIN, declared_size=300, **({"steps": 6} | changes)).fit(frame)
    assert private.guarantee_.parameters["features"]["kind"] == kind


@pytest.mark.parametrize("changes", [{"centring_steps": 0}, {"preset": "paper"}, {"length": 1.0}])
def test_cells_that_the_settings_do_not_allow_are_refused(changes: dict[str, Any]) -> None:
    frame = table_of_people(60, 60)
    cells = DPSGD(3.0, 1e-5, schema=PLAIN, settings=DPSGDSettings(steps=3)).fit(frame).feature_map_
    private = made(DPSGD, 3.0, 1e-5, schema=PLAIN, features=cells, **changes)
    with pytest.raises(InvalidInput, match="TableCells require"):
        private.fit(frame)


@pytest.mark.parametrize("hidden", [(), (5,)])
@pytest.mark.parametrize("damage", ["other cells", "no centre", "hidden", "inputs", "dimension"])
def test_a_folder_whose_parts_contradict_each_other_cannot_be_opened(
    tmp_path: Path, damage: str, hidden: tuple[int, ...]
) -> None:
    from quietmax.models.serialization import read_folder, write_folder

    frame = table_of_people(200, 200)
    settings = DPSGDSettings(steps=4, hidden=hidden)
    private = DPSGD(3.0, 1e-5, schema=PLAIN, declared_size=200, settings=settings).fit(frame)
    open_private(save_private(private, tmp_path / "model", dataset="people"))
    description, tensors = read_folder(tmp_path / "model", "dpsgd")
    changed, facts = dict(tensors), description["guarantee"]["parameters"]
    if damage == "other cells":
        name = "first" if hidden else "weights"
        changed[name] = changed[name][:, 1:].contiguous()
    elif damage == "no centre":
        del changed["centre"]
    else:
        facts[damage] = {"hidden": [3], "inputs": "scaled", "dimension": 7}[damage]
    write_folder(tmp_path / "damaged", description, changed, overwrite=False, released=True)
    with pytest.raises(DataUnavailable, match="damaged"):
        open_private(tmp_path / "damaged")
