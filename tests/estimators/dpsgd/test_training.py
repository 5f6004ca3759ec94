"""Settings and training: K networks at once are K single ones, and every step is the step that is claimed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from quietmax.data import Records, split
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.estimators.dpsgd.gradients import ClippedSums, Gradients
from quietmax.estimators.dpsgd.training import (
    LOGIT_NOISE,
    ROW_LENGTH,
    PrivateSettings,
    _draw_batches,
    make_plan,
    train_private,
    train_sweep,
)
from quietmax.estimators.training_set import Persons
from quietmax.models import Convexified
from quietmax.models.stacked import initial_mlp, loss_value
from tests.estimators.dpsgd.networks import PATHS, as_module, moved, stack, start, trained, vector
from tests.estimators.made import blobs

SETTINGS = PrivateSettings(hidden=(7,), sampling_rate=0.3, steps=12, learning_rate=0.5)


def test_the_default_step_lets_the_stated_noise_gather_on_a_logit() -> None:
    chosen = make_plan(10_000, epsilon=1.0, length=5.0)
    settings = chosen.settings
    noise = (
        settings.learning_rate
        * settings.max_grad_norm
        * chosen.noise_multiplier
        * math.sqrt(settings.steps - settings.calibration_steps)
        * 5.0
    )
    assert noise * 10 / (settings.sampling_rate * 10_000) == pytest.approx(LOGIT_NOISE)
    assert settings.optimizer == "momentum"


@pytest.mark.parametrize(("inputs", "kappa", "share"), [("centred", 0.9, 0.2), ("scaled", 0.8, 0.5)])
@pytest.mark.parametrize("size", [300, 10_000, 60_000])
@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_with_centring_the_stated_noise_gathers_on_a_logit_of_rows_of_known_length(
    inputs: Any, kappa: float, share: float, size: int, epsilon: float
) -> None:
    chosen = make_plan(size, epsilon=epsilon, delta=1e-5, inputs=inputs, accountant="zcdp")
    settings = chosen.settings
    assert settings.max_grad_norm == pytest.approx(share * math.hypot(ROW_LENGTH, 1.0))
    steps = settings._learning_rates() * settings.max_grad_norm * ROW_LENGTH
    noise = chosen.noise_multiplier * math.sqrt(sum(step * step for step in steps))
    assert noise / (settings.sampling_rate * size) == pytest.approx(kappa)
    assert (settings.optimizer, settings.sampling_rate, settings.decay) == ("sgd", 0.5, 0.3)
    assert (settings.steps, settings.centring_steps) == (100, 5)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_with_hardly_any_noise_the_length_of_all_steps_together_is_limited(optimizer: Any) -> None:
    plan = make_plan(10**9, epsilon=8.0, delta=1e-5, inputs="centred", accountant="zcdp", optimizer=optimizer)
    gain = 10.0 if optimizer == "momentum" else 1.0
    total = plan.settings._learning_rates().sum() * plan.settings.max_grad_norm * ROW_LENGTH * gain
    assert total == pytest.approx(30_000.0)


@pytest.mark.parametrize("centring_steps", [0, 7])
@pytest.mark.parametrize("decay", [0.0, 0.001, 0.5, 1.0])
def test_the_learning_rate_is_constant_and_then_falls_linearly_to_almost_zero(
    centring_steps: int, decay: float
) -> None:
    settings = PrivateSettings(steps=47, centring_steps=centring_steps, learning_rate=3.0, decay=decay)
    count = 47 - centring_steps
    falling = max(1.0, decay * count)
    rates = [3.0 * min(1.0, (count - step) / falling) for step in range(count)]
    assert settings._learning_rates().tolist() == pytest.approx(rates)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden": (0,)},
        {"activation": "cube"},
        {"sampling_rate": 0.0},
        {"sampling_rate": 1.5},
        {"steps": 0},
        {"max_grad_norm": 0.0},
        {"learning_rate": float("nan")},
        {"optimizer": "newton"},
        {"sampling": "sorted"},
        {"l2": -1.0},
        {"decay": -0.1},
        {"decay": 1.5},
        {"decay": float("nan")},
        {"steps": 3, "centring_steps": 3},
        {"centring_steps": 1, "sampling": "shuffled"},
    ],
)
def test_settings_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        PrivateSettings(**fields)


def test_settings_that_are_given_override_the_preset() -> None:
    default, paper = make_plan(2000, epsilon=1.0), make_plan(2000, epsilon=1.0, preset="paper")
    assert (default.settings.hidden, default.settings.optimizer, default.settings.steps) == (
        (),
        "momentum",
        100,
    )
    assert (paper.settings.hidden, paper.settings.optimizer, paper.settings.steps) == ((128,), "adam", 2000)
    changed = make_plan(2000, epsilon=1.0, preset="paper", hidden=(4,), sampling_rate=0.1, learning_rate=None)
    assert (changed.settings.hidden, changed.settings.learning_rate) == ((4,), 0.001)
    assert changed.settings.steps == 1000  # still 100 epochs
    assert default.delta == paper.delta == 1 / 20_000


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
@pytest.mark.parametrize("hidden", [(), (7,), (6, 5)])
def test_a_stack_equals_single_runs_with_own_noise_seed_and_records(
    optimizer: str, sampling: str, hidden: tuple[int, ...]
) -> None:
    features, labels = blobs()
    options: dict[str, Any] = {"hidden": hidden, "optimizer": optimizer, "sampling": sampling}
    settings = PrivateSettings(sampling_rate=0.2, steps=9, learning_rate=0.05, l2=0.01, **options)
    rows = [np.arange(60), np.arange(60), np.arange(30, 90), np.arange(0, 90, 2)]
    multipliers, seeds = [0.5, 2.0, 1.0, 0.0], [1, 1, 2, 3]

    def networks(part: slice) -> Any:
        options: dict[str, Any] = {"noise_multipliers": multipliers[part], "seeds": seeds[part]}
        return stack(features, labels, rows=rows[part], settings=settings, **options)

    together = networks(slice(None))
    for index in range(4):
        alone = networks(slice(index, index + 1)).weight_vectors()
        torch.testing.assert_close(together.network(index).weight_vectors(), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_without_noise_and_clipping_it_is_torchs_own_optimiser(optimizer: str, decay: float) -> None:
    features, labels = blobs(40)
    options: dict[str, Any] = {"hidden": (6,), "steps": 8, "optimizer": optimizer, "decay": decay, "l2": 0.02}
    settings = PrivateSettings(sampling_rate=1.0, max_grad_norm=1e6, learning_rate=0.1, **options)
    ours = trained("stack", features, labels, settings, size=50, noise=0.0)
    module = as_module(start(5, settings))
    groups = [
        {"params": [module[0].weight, module[2].weight], "weight_decay": 2 * settings.l2},
        {"params": [module[0].bias, module[2].bias]},
    ]
    theirs = {
        "sgd": lambda: torch.optim.SGD(groups, lr=0.1),
        "momentum": lambda: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        "adam": lambda: torch.optim.Adam(groups, lr=0.1, eps=1e-7),
    }[optimizer]()
    for step in range(8):
        for group in theirs.param_groups:
            group["lr"] = 0.1 * min(1.0, (8 - step) / 4) if decay else 0.1
        theirs.zero_grad()
        outputs = module(torch.from_numpy(features))
        loss = torch.nn.functional.cross_entropy(outputs, torch.from_numpy(labels), reduction="sum") / 50
        loss.backward()
        theirs.step()
    torch.testing.assert_close(ours, vector(module), rtol=1e-4, atol=1e-5)


NOISE_ALONE = PrivateSettings(sampling_rate=0.1, steps=1, learning_rate=1.0, max_grad_norm=0.5)


@pytest.mark.parametrize("path", PATHS)
def test_without_records_the_weights_move_by_noise_of_the_stated_spread(path: str) -> None:
    """20,100 draws: their mean square is off by 6% with probability < 1e-8."""
    features, labels = np.zeros((0, 200), np.float32), np.zeros(0, np.int64)
    noise = moved(path, features, labels, NOISE_ALONE, noise=2.0, size=400, classes=100)
    assert float(noise.square().mean()) == pytest.approx((2.0 * 0.5 / (0.1 * 400)) ** 2, rel=0.06)


def test_networks_of_one_seed_share_their_noise_and_others_do_not() -> None:
    options: dict[str, Any] = {"noise_multipliers": [2.0, 6.0, 2.0], "seeds": [1, 1, 2], "sizes": [400] * 3}
    options |= {"rows": [np.arange(0)] * 3, "settings": NOISE_ALONE}
    networks = stack(np.zeros((1, 200)), np.zeros(1, int), 100, **options)
    noise = (networks.weight_vectors() - initial_mlp((200, 100), "tanh", (1, 1, 2)).weight_vectors()).double()
    torch.testing.assert_close(noise[1], 3 * noise[0], rtol=1e-3, atol=1e-6)
    assert abs(float(torch.corrcoef(noise[[0, 2]])[0, 1])) < 0.05  # seven standard deviations


@pytest.mark.parametrize("seed", [5, None])
@pytest.mark.parametrize("most_rows", [1, 5])
def test_poisson_batches_take_every_unit_independently_at_the_stated_rate(
    seed: int | None, most_rows: int
) -> None:
    """4,000 steps: a count of mean 1200 and deviation 29 is off by more than 6.5 deviations with p < 1e-10."""
    settings = PrivateSettings(sampling_rate=0.3, steps=1)
    units, steps = 40, 4000
    codes = np.repeat(np.arange(units), 1 + np.arange(units) % most_rows)
    persons = None if most_rows == 1 else Persons(codes)
    batches = _draw_batches(len(codes), units, settings, persons, seed=seed)
    taken = np.zeros((steps, units))
    for line in taken:
        line[codes[next(batches)]] = 1
    assert np.abs(taken.mean(0) - 0.3).max() < 6.5 * np.sqrt(0.3 * 0.7 / steps)
    pairs = taken[:, ::2] * taken[:, 1::2]
    assert np.abs(pairs.mean(0) - 0.09).max() < 6.5 * np.sqrt(0.09 * 0.91 / steps)
    # The size of a batch varies as a binomial number does, which shuffled batches of one size would not.
    assert taken.sum(1).var() == pytest.approx(units * 0.3 * 0.7, rel=0.16)


@pytest.mark.parametrize("seed", [0, None])
def test_shuffled_batches_take_every_record_once_an_epoch(seed: int | None) -> None:
    settings = PrivateSettings(sampling_rate=0.25, steps=1, sampling="shuffled")
    batches = _draw_batches(np.arange(10), 8, settings, seed=seed)
    orders = []
    for _ in range(3):
        epoch = [next(batches) for _ in range(5)]
        assert [len(each) for each in epoch] == [2, 2, 2, 2, 2]
        orders.append(tuple(np.concatenate(epoch)))
        assert sorted(orders[-1]) == list(range(10))
    assert len(set(orders)) == 3


NAMES = np.array(["ann", "bob", "ann", "cid", "bob", "ann", "dan"])
PEOPLE = Persons.of(NAMES)


@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
def test_a_batch_has_all_rows_of_a_person_or_none(seed: int | None, sampling: Any) -> None:
    settings = PrivateSettings(sampling_rate=0.5, steps=1, sampling=sampling)
    batches = _draw_batches(7, 4, settings, PEOPLE, seed=seed)
    seen = set()
    for _ in range(60):
        batch = np.sort(next(batches))
        names = sorted(set(NAMES[batch]))
        np.testing.assert_array_equal(batch, np.flatnonzero(np.isin(NAMES, names)))
        seen.add(tuple(names))
        if sampling == "shuffled":
            assert len(names) == 2
    assert len(seen) >= 4


def test_persons_of_one_row_each_are_trained_like_records() -> None:
    features, labels = blobs(60)
    settings = PrivateSettings(sampling_rate=0.4, steps=8)
    plain = trained("stack", features, labels, settings, noise=1.0)
    named = trained("stack", features, labels, settings, noise=1.0, persons=Persons.of(np.arange(60)))
    assert torch.equal(plain, named)


@pytest.mark.parametrize("path", PATHS)
def test_a_step_moves_by_one_clip_norm_for_a_person_of_thirty_rows_and_by_thirty_for_its_records(
    path: str,
) -> None:
    """The worst person: equal rows with the least likely label. A bound for records says nothing about a person."""
    features, labels = blobs(90)
    settings = PrivateSettings(sampling_rate=1.0, steps=1, learning_rate=2.0, max_grad_norm=0.25)
    features[60:] = 50 * features[60]
    labels[60:] = int(start(5, settings).logits(features[60:61]).argmin())
    people = Persons.of([*range(60), *["worst"] * 30])

    def weights(rows: int, persons: Persons | None) -> torch.Tensor:
        return trained(path, features[:rows], labels[:rows], settings, size=61, persons=persons)

    def distance(with_them: Persons | None, without: Persons | None) -> float:
        # One step is learning_rate * sum / size.
        return float((weights(90, with_them) - weights(60, without)).norm()) * 61 / 2.0

    assert distance(people, Persons(people.codes[:60])) == pytest.approx(0.25, rel=1e-3)
    assert distance(None, None) == pytest.approx(30 * 0.25, rel=1e-3)


def test_a_network_gets_all_rows_of_a_person_or_none() -> None:
    options: dict[str, Any] = {"settings": PrivateSettings(steps=2), "persons": PEOPLE}
    stack(*blobs(7), rows=[np.array([1, 3, 4])], **options)
    with pytest.raises(InvalidInput, match="all records of a person"):
        stack(*blobs(7), rows=[np.array([0, 1, 4])], **options)


def test_alpha_convexifies_the_loss_of_each_record_by_itself() -> None:
    features, labels = blobs(12, classes=4)
    network = initial_mlp((5, 6, 4), "tanh", (0,))
    inputs, targets = torch.from_numpy(features), torch.from_numpy(labels)
    for alpha in (0.5, 1.0, 3.0):
        gradients = Gradients.zeros(network)
        sums = ClippedSums(network, lambda rows: (inputs[rows], targets[rows], None), 12, 1e6, alpha=alpha)
        sums.add_to(gradients, torch.arange(12).unsqueeze(0))
        kernel, output = network.kernels[0][0].clone().requires_grad_(), network.kernels[1][0]
        total = sum(
            loss_value(
                Convexified(alpha), torch.tanh(row @ kernel).unsqueeze(0) @ output.T, label.unsqueeze(0)
            )
            for row, label in zip(inputs, targets, strict=True)
        )
        total.backward()
        torch.testing.assert_close(gradients.kernels[0][0], kernel.grad, rtol=1e-4, atol=1e-5)


def test_progress_is_told_and_divergence_is_an_error() -> None:
    seen = []
    stack(*blobs(), settings=SETTINGS, progress=lambda *told: seen.append(told))
    assert seen == [(12, 12)]
    wild = PrivateSettings(sampling_rate=1.0, steps=5, learning_rate=1e38, max_grad_norm=1e6)
    with pytest.raises(QuietmaxError, match="diverged"):
        stack(*blobs(), settings=wild, noise_multipliers=[1.0])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rows": []}, "at least one network"),
        ({"rows": [np.array([0, 95])]}, "Row numbers must be from 0 to 89"),
        ({"seeds": [0, 1]}, "seeds"),
        ({"noise_multipliers": [-1.0]}, "at least 0"),
        ({"noise_multipliers": [np.inf]}, "finite"),
        ({"sizes": [0]}, "positive"),
        ({"labels": np.full(90, 3)}, "Labels must be"),
        ({"labels": np.zeros(5, np.int64)}, "shape"),
        ({"features": np.full((90, 5), np.nan)}, "NaN"),
        ({"alpha": -1.0}, "alpha"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(changes: dict[str, Any], match: str) -> None:
    features, labels = blobs()
    given = {"features": features, "labels": labels, "rows": [np.arange(90)], "settings": SETTINGS}
    with pytest.raises(InvalidInput, match=match):
        stack(**(given | changes))


@pytest.mark.parametrize("path", PATHS[1:])
@pytest.mark.parametrize(
    "changes",
    [
        *({"optimizer": optimizer, "decay": decay} for optimizer in ("sgd", "adam") for decay in (0.0, 0.4)),
        *({"optimizer": "momentum", "decay": 0.4, "hidden": hidden} for hidden in ((), (8,), (8, 6))),
    ],
    ids=str,
)
@pytest.mark.parametrize("grouped", [False, True], ids=["records", "persons"])
def test_all_ways_train_the_same_network_when_there_is_hardly_any_noise(
    path: str, changes: dict[str, Any], grouped: bool
) -> None:
    features, labels = blobs(400)
    persons = Persons.of(np.repeat(np.arange(60), np.arange(60) % 19 + 1)[:400]) if grouped else None
    options: dict[str, Any] = {"sampling_rate": 1.0, "max_grad_norm": 0.5, "learning_rate": 0.1, "l2": 0.001}
    settings = PrivateSettings(steps=20, **options, **changes)
    size = 400 if persons is None else persons.count
    expected = trained("stack", features, labels, settings, size=size, persons=persons)
    found = trained(path, features, labels, settings, size=size, persons=persons)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
    if grouped:
        assert float((expected - trained("stack", features, labels, settings, size=size)).norm()) > 0.02


def test_the_number_of_records_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quietmax.estimators.dpsgd.training.LARGEST_TABLE", 6)
    features, labels = blobs(7)
    trained("exact", features[:6], labels[:6], PrivateSettings(steps=1))
    with pytest.raises(InvalidInput, match="at most 6 records"):
        trained("exact", features, labels, PrivateSettings(steps=1))


def test_samples_are_the_same_however_many_units_are_decided_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random words drawn in parts are the words drawn at once; a person is in with all rows, or out."""
    persons = Persons.of(np.random.default_rng(0).integers(400, size=1000))
    settings = PrivateSettings(sampling_rate=0.3, steps=5)

    def drawn(at_once: int, whose: Persons | None) -> list[list[int]]:
        monkeypatch.setattr("quietmax.estimators.dpsgd.training._UNITS_AT_ONCE", at_once)
        monkeypatch.setattr("os.urandom", np.random.default_rng(5).bytes)
        return [
            next(batches).tolist()
            for batches in (
                _draw_batches(1000, 1000, settings, whose),
                _draw_batches(1000, 1000, settings, whose, seed=1),
                _draw_batches(np.arange(1000), 1000, settings, whose, seed=1),
            )
            for _ in range(3)
        ]

    for whose in (None, persons):
        whole = drawn(2**20, whose)
        assert drawn(7, whose) == whole
        assert whole[3:6] == whole[6:]
        assert len({len(batch) for batch in whole}) > 2
        for batch in whole:
            taken = np.isin(np.arange(1000), batch)
            if whose is not None:
                shares = np.bincount(whose.codes, taken) / np.bincount(whose.codes)
                assert set(shares) == {0.0, 1.0}


def test_a_unit_is_sampled_exactly_if_its_own_word_is_below_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = 0.3
    edge = int(rate * 2.0**64)
    words = np.array([edge - 1, edge, 0, 2**64 - 1, edge + 1, edge - 2], np.uint64)
    given = iter([words[:4].tobytes(), words[4:].tobytes()])
    monkeypatch.setattr("quietmax.estimators.dpsgd.training._UNITS_AT_ONCE", 4)
    monkeypatch.setattr("os.urandom", lambda _: next(given))
    persons = Persons.of(["a", "b", "a", "c", "d", "e", "f", "c"])
    batch = next(_draw_batches(8, 6, PrivateSettings(sampling_rate=rate), persons))
    assert batch.tolist() == [0, 2, 3, 6, 7]


@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
def test_it_learns_and_no_two_runs_are_alike(sampling: str) -> None:
    features, labels = blobs(600)
    settings = PrivateSettings(
        sampling_rate=0.3, steps=60, max_grad_norm=1.0, learning_rate=0.5, sampling=sampling
    )
    options: dict[str, Any] = {"settings": settings, "noise_multiplier": 2.0, "size": 600, "seed": 3}
    runs = [train_private(features, labels, 3, **options) for _ in range(2)]
    others, truth = blobs(600, seed=1)
    assert (runs[0].logits(others).argmax(1).numpy() == truth).mean() > 0.9
    assert not torch.equal(runs[0].weight_vectors(), runs[1].weight_vectors())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"noise_multiplier": 0.0}, InvalidInput),
        ({"size": 0}, InvalidInput),
        ({"labels": np.full(600, 7)}, InvalidInput),
        ({"settings": PrivateSettings(steps=2, learning_rate=1e308), "noise_multiplier": 1e9}, QuietmaxError),
    ],
)
def test_bad_input_and_divergence_are_refused(changes: dict[str, Any], error: type[Exception]) -> None:
    features, labels = blobs(600)
    options = {"features": features, "labels": labels, "classes": 3, "settings": PrivateSettings(steps=2)}
    options |= {"noise_multiplier": 1.0, "size": 600, "seed": 0} | changes
    with pytest.raises(error):
        train_private(**options)


def _records(count=500, seed=0):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, count)
    features = generator.normal(size=(count, 4)) + 2 * labels[:, None]
    return Records("blobs", features.astype(np.float32), labels, 2)


def test_a_sweep_trains_every_network_as_if_alone() -> None:
    splits = [split(_records(), size=200, seed=0)]
    splits.append(split(splits[0].records, size=200, seed=1))
    plans, networks = train_sweep(splits, epsilons=[5.0, 500.0], accountants=["zcdp", "nc"])
    assert [(plan.accountant, plan.epsilon) for plan in plans][-1] == ("nc", 500.0)
    assert (len(plans), networks.networks) == (4, 8)
    chosen = make_plan(200, epsilon=500.0, accountant="nc", analysis="published", preset="paper")
    records, options = splits[1].records, {"noise_multipliers": [chosen.noise_multiplier], "seeds": [1]}
    rows = [splits[1].train_rows]
    single = stack(records.features, records.labels, 2, rows=rows, settings=chosen.settings, **options)
    found = networks.network(7)
    torch.testing.assert_close(found.weight_vectors(), single.weight_vectors(), rtol=1e-3, atol=1e-4)
    answers = found.logits(splits[1].test.features).argmax(-1).numpy()
    assert (answers == splits[1].test.labels).mean() > 0.8


def test_splits_of_different_records_or_sizes_are_refused() -> None:
    one, two = split(_records(), size=100, seed=0), split(_records(seed=1), size=100, seed=0)
    with pytest.raises(InvalidInput, match="same records"):
        train_sweep([one, two], epsilons=[1.0], accountants=["nc"])
    with pytest.raises(InvalidInput, match="same size"):
        train_sweep([one, split(one.records, size=90, seed=1)], epsilons=[1.0], accountants=["nc"])
