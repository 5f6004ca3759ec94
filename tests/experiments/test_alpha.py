from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from quietmax.experiments.alpha import (
    COARSE_GRID,
    STORED,
    AlphaRow,
    alpha_choices,
    alpha_rows,
    alpha_trials,
    write_alpha_figures,
)
from quietmax.experiments.stored import stored_table
from quietmax.models.training import PAPER_GRID


def result(train: float, test: float, leakage: float | None = None) -> dict[str, Any]:
    figures = {} if leakage is None else {"leakage": {"value": leakage}}
    attacks = {} if leakage is None else {"shadow": figures, "threshold": figures}
    return {"train_accuracy": train, "test_accuracy": test, "attacks": attacks}


def test_every_alpha_has_a_trial_on_every_split_and_the_original_loss_too() -> None:
    trials = alpha_trials(["location", "mnist"])
    location = [trial for trial in trials if trial.group.source.title == "location"]
    assert len(location) == 3 * 21
    assert {trial.group.effort.alpha for trial in location if trial.method == "plain"} == set(PAPER_GRID)
    assert sum(trial.method == "original" for trial in trials) == 4
    assert len({trial.key for trial in trials}) == len(trials)


def test_rows_are_means_over_the_repeats() -> None:
    trials = alpha_trials(["location"], alphas=(2.0, 0.5), repeats=2)
    results = {
        trial: result(1.0, 0.6)
        if trial.method == "original"
        else result(0.9, 0.5 + 0.2 * trial.group.repeat, trial.group.effort.alpha / 10)
        for trial in trials
    }
    original, first, second = alpha_rows(results)
    assert (original.alpha, original.shadow_leakage, original.repeats) == (None, None, 2)
    assert (first.alpha, second.alpha) == (0.5, 2.0)
    assert round(first.test_accuracy, 9) == 0.6
    assert first.shadow_leakage == first.threshold_leakage == 0.05
    assert first.test_spread is not None
    assert first.test_spread > 0


def test_the_choice_follows_the_rule_and_correlates_alpha_with_the_leakage() -> None:
    rows = [AlphaRow("location", None, 1, 2, 1.0, None, 0.61, None)]
    for alpha, train in ((0.5, 0.92), (1.0, 0.99), (1.5, 1.0)):
        rows.append(AlphaRow("location", alpha, 1, 2, train, None, 0.65, None, alpha, None, -alpha, None))
    (choice,) = alpha_choices(rows)
    assert (choice.chosen, choice.paper) == (1.0, 1.0)
    assert (choice.shadow_correlation, choice.threshold_correlation) == (1.0, -1.0)
    without = [replace(row, shadow_leakage=None, threshold_leakage=None) for row in rows]
    assert alpha_choices(without)[0].shadow_correlation is None


def test_the_stored_rows_cover_the_papers_grid_and_give_the_papers_alpha_on_location_and_mnist(
    tmp_path: Path,
) -> None:
    rows = stored_table(AlphaRow, STORED)
    choices = {choice.dataset: choice for choice in alpha_choices(rows)}
    for name, choice in choices.items():
        grid = COARSE_GRID if name.startswith("cifar") else PAPER_GRID
        assert [trial.alpha for trial in choice.trials] == list(grid), name
    assert choices["location"].chosen == choices["location"].paper == 1.0
    assert choices["mnist"].chosen == choices["mnist"].paper == 1.0
    correlation = choices["location"].shadow_correlation
    assert correlation is not None
    assert correlation > 0.9
    written = write_alpha_figures(rows, tmp_path, formats=("svg",))
    assert sorted(path.name for path in written) == sorted(f"alpha-{name}.svg" for name in choices)
    assert all("<svg" in path.read_text() for path in written)
