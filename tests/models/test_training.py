from __future__ import annotations

import numpy as np
import pytest
import torch

from quietmax.data import Records, split
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.experiments.paper import accuracy_table
from quietmax.models import (
    Classifier,
    Convexified,
    CrossEntropy,
    Loss,
    Model,
    Quadratic,
    TorchModel,
    TrainingSettings,
    accuracy,
    accuracy_loss,
    train,
    train_many,
    train_module,
)
from quietmax.models.training import (
    ALPHA_TOLERANCE,
    alpha_trial,
    choose_alpha,
    softmax,
)
from tests.models.conftest import FAST

# --- training -----------------------------------------------------------------------------------------------------


def test_training_is_repeatable_and_many_at_once_equal_one_by_one(records: Records) -> None:
    splits = [split(records, size=100, seed=seed) for seed in range(3)]
    together = train_many(splits, settings=FAST)
    for each, alone in zip(together, [train(part, settings=FAST) for part in splits], strict=True):
        np.testing.assert_allclose(each.logits(records.features), alone.logits(records.features), atol=1e-5)
        assert (each.records, each.dataset, each.seed) == (100, "made up", alone.seed)


def test_alpha_sets_the_loss(records: Records) -> None:
    data = split(records, size=50, seed=0)
    assert train(data, alpha=3.0, settings=FAST).settings.loss == Convexified(3.0)
    with pytest.raises(InvalidInput, match="convexified"):
        train(data, alpha=3.0, settings=TrainingSettings(loss=CrossEntropy()))


def test_splits_of_different_records_are_rejected(records: Records) -> None:
    other = Records("other", records.features, records.labels, 3)
    with pytest.raises(InvalidInput, match="same Records object"):
        train_many([split(records, size=50, seed=0), split(other, size=50, seed=0)], settings=FAST)
    with pytest.raises(InvalidInput, match="same Records object"):
        train_many([])


@pytest.mark.parametrize("loss", [CrossEntropy(), Quadratic(), Convexified(1.0), Convexified(2.0, "samples")])
def test_any_torch_module_learns_with_the_same_losses(records: Records, loss: Loss) -> None:
    torch.manual_seed(0)
    data = split(records, size=150, seed=0)
    settings = TrainingSettings(loss=loss, epochs=40, batch_size=20, learning_rate=0.01)
    seen: list[tuple[int, int]] = []
    trained = train_module(
        torch.nn.Linear(6, 3),
        data.train,
        settings=settings,
        progress=lambda done, epochs: seen.append((done, epochs)),
    )
    assert accuracy(trained, data.test) > 0.85
    assert seen[-1] == (40, 40)
    assert isinstance(trained, Classifier)


def test_a_module_with_the_wrong_number_of_outputs_is_rejected(records: Records) -> None:
    with pytest.raises(InvalidInput, match="3 logits"):
        train_module(torch.nn.Linear(6, 4), records, settings=FAST)
    with pytest.raises(InvalidInput, match="3 logits"):
        TorchModel(torch.nn.Linear(6, 4), 3).logits(records.features)


def test_a_diverging_module_is_rejected(records: Records) -> None:
    with pytest.raises(QuietmaxError, match="diverged"):
        train_module(torch.nn.Linear(6, 3), records, settings=TrainingSettings(learning_rate=1e25, epochs=9))


def test_a_wrapped_module_is_asked_in_evaluation_mode_and_left_as_it_was(records: Records) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Dropout(0.9)).train()
    wrapped = TorchModel(module, 3)
    np.testing.assert_array_equal(wrapped.logits(records.features), wrapped.logits(records.features))
    assert module.training
    assert wrapped.logits(np.empty((0, 6), np.float32)).shape == (0, 3)


def test_plain_answers_are_softmax_and_argmax_of_the_logits(model: Model, records: Records) -> None:
    logits = model.logits(records.features)
    assert logits.dtype == np.float64
    np.testing.assert_allclose(model.predict_proba(records.features), softmax(logits))
    np.testing.assert_array_equal(model.predict(records.features), logits.argmax(1))


def test_the_paper_measures_accuracy_loss_relative_to_the_baseline() -> None:
    assert accuracy_loss(0.6, 0.8) == pytest.approx(0.25)
    assert accuracy_loss(0.9, 0.8) < 0
    with pytest.raises(InvalidInput, match="baseline"):
        accuracy_loss(0.1, 0.0)


# --- the choice of alpha -----------------------------------------------------------------------------------------


def test_the_smallest_alpha_with_almost_the_original_accuracy_is_chosen_and_a_gain_counts_as_no_distance() -> (
    None
):
    original = (1.0, 0.61)
    grid = {0.5: (0.93, 0.63), 1.0: (0.99, 0.70), 4.0: (1.0, 0.61)}
    trials = [alpha_trial(alpha, reached, original) for alpha, reached in grid.items()]
    assert choose_alpha(trials) == 1.0
    assert choose_alpha(trials[::-1]) == 1.0
    assert choose_alpha(trials, tolerance=0.1) == 0.5
    assert choose_alpha(trials, tolerance=0.001) == 4.0


def test_if_no_alpha_is_almost_as_accurate_the_one_with_the_least_shortfall_is_chosen() -> None:
    trials = [alpha_trial(alpha, (0.2, test), (0.9, 0.5)) for alpha, test in ((1.0, 0.1), (2.0, 0.4))]
    assert choose_alpha(trials) == 1.0  # both lack 0.7 in training
    trials.append(alpha_trial(3.0, (0.8, 0.3), (0.9, 0.5)))
    assert choose_alpha(trials) == 3.0


def test_ten_of_the_papers_eleven_choices_of_alpha_are_within_the_tolerance() -> None:
    lost = {
        name: max(
            row["original_train_acc"] - row["convexified_train_acc"],
            row["original_test_acc"] - row["convexified_test_acc"],
        )
        for name, row in accuracy_table().items()
    }
    assert [name for name, shortfall in lost.items() if shortfall > ALPHA_TOLERANCE] == ["cifar-100"]
