"""How long an evaluation takes: counted from the work in its cells, at the speed measured on this machine.

Networks of each shape are trained for a moment to find what one record costs; everything else follows from the
numbers of networks, records and epochs, from the labels of the data set, and from fixed ratios for the methods of the
comparison.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from quietmax.accounting.dpsgd import PUBLISHED_ACCOUNTANTS
from quietmax.attacks.shadow import Shadow
from quietmax.data.registry import dataset
from quietmax.data.tables import is_table_path
from quietmax.experiments.grid import Group, Source, Trial
from quietmax.experiments.paper import EPSILONS
from quietmax.experiments.shared import source_records
from quietmax.models.stacked import TrainingSettings, train_stack

_RECORDS = 1_000
_LONG_ENOUGH, _TIMES = 0.3, 3
_TOGETHER = 10
"""Networks timed together; more of them hardly gain anything each."""
# Ratios measured on MNIST, Adult and Location.
_DPSGD_NETWORK = 1.7
"""A DP-SGD network of the published configuration, in ordinary networks."""
_PER_VALUE = {"head": 2.5e-8, "sampled-neuron": 2.5e-8, "teachers": 3e-8}
_PER_VALUE_DPSGD = 0.8e-8
_CELL = 0.3
"""Seconds for answers, attack and audit of a cell."""
_SCATTERING = 5.0
"""Public features of an image per pixel."""
_GUESSED_WIDTH, _GUESSED_CLASSES = 100, 2


def estimated_seconds(
    trials: Sequence[Trial], *, measured: bool = True, data_dir: Path | None = None
) -> dict[Trial, float]:
    """Seconds of one core for each cell; a group's first cell also trains what the group shares.

    With ``measured`` False nothing is read or trained to find the speed: good enough for shares.
    """
    first: set[tuple[Group, str]] = set()
    found = {}
    for trial in trials:
        seconds = _CELL + _method(trial)
        for what, cost in _shared(trial, measured, data_dir).items():
            if (trial.group, what) not in first:
                first.add((trial.group, what))
                seconds += cost
        found[trial] = seconds
    return found


def _shared(trial: Trial, measured: bool, data_dir: Path | None) -> dict[str, float]:
    effort = trial.group.effort
    width, classes = shape_of(trial.group.source)
    speed = seconds_per_record if measured else _guess
    layers = (width, *TrainingSettings().hidden, classes)
    alone = effort.epochs * effort.records * speed(layers, 1, 100)
    one = effort.epochs * effort.records * speed(layers, min(effort.shadows, _TOGETHER), 100)
    costs = {"model": alone}
    if trial.method == "original":
        return costs | {"original": alone}
    whole, largest = 1.0, 1 / classes
    if measured:
        whole, largest = _sets(trial.group.source, effort.records, data_dir)
    costs["shadows"] = whole * effort.shadows * one
    judges = Shadow().network
    # every shadow network's answers to its set and to as many other records, one attack network per class; that of the
    # largest class trains on when the others are done
    judged = 2 * effort.shadows * whole * effort.records * effort.attack_epochs
    stack = (classes, *judges.hidden, 2)
    other = (1 - largest) / (classes - 1)
    costs["attack"] = judged * (
        classes * other * speed(stack, min(classes, _TOGETHER), judges.batch_size)
        + (largest - other) * speed(stack, 1, judges.batch_size)
    )
    if trial.method == "teachers":
        costs["attack on labels"] = costs["attack"]
    if trial.method.startswith("published-"):
        networks = len(PUBLISHED_ACCOUNTANTS) * len(EPSILONS)
        costs["dpsgd"] = networks * _DPSGD_NETWORK * one
    return costs


def _method(trial: Trial) -> float:
    width, classes = shape_of(trial.group.source)
    values = trial.group.effort.records * width * classes
    if not is_table_path(trial.group.source.name) and width >= 784:
        values = int(values * _SCATTERING)
    rate = _PER_VALUE_DPSGD if trial.method.startswith("dpsgd") else _PER_VALUE.get(trial.method, 0.0)
    return rate * values


@cache
def _sets(source: Source, records: int, data_dir: Path | None) -> tuple[float, float]:
    """A shadow network's set as a share of the target's (1 where enough records are left over); the largest class's."""
    labels = source_records(source, data_dir).labels
    left_over = max(len(labels) - 2 * records, 0)
    return min(1.0, left_over / (2 * records)), float(np.bincount(labels).max() / len(labels))


@cache
def shape_of(source: Source) -> tuple[int, int]:
    """Features and classes; of a file, whose columns are not read for an estimate, a guess."""
    if is_table_path(source.name):
        return _GUESSED_WIDTH, _GUESSED_CLASSES
    registered = dataset(source.name)
    return registered.width or registered.features, registered.classes


def _guess(widths: tuple[int, ...], networks: int, batch: int) -> float:  # noqa: ARG001
    weights = sum(into * out for into, out in pairwise(widths))
    return 1.5e-6 + 1e-10 * weights


@cache
def seconds_per_record(widths: tuple[int, ...], networks: int, batch: int) -> float:
    """What training takes per network, record and epoch on this machine, from a few epochs of a small stack."""
    generator = np.random.default_rng(0)
    features = generator.random((_RECORDS, widths[0]), dtype=np.float32)
    labels = generator.integers(widths[-1], size=_RECORDS)
    rows, seeds = [np.arange(_RECORDS)] * networks, list(range(networks))

    def seconds(epochs: int) -> float:
        settings = TrainingSettings(hidden=widths[1:-1], epochs=epochs, batch_size=batch)
        started = time.process_time()
        train_stack(features, labels, widths[-1], rows, settings=settings, seeds=seeds)
        return time.process_time() - started

    # the difference of two runs leaves out what is done once; the longer is long enough for the clock
    epochs = int(np.clip(_LONG_ENOUGH / max(seconds(1), 1e-3), 2, 60))
    found = sorted(seconds(1 + epochs) - seconds(1) for _ in range(_TIMES))
    return max(found[_TIMES // 2], 1e-6) / (epochs * networks * _RECORDS)
