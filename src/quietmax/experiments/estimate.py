"""How long an evaluation will take on this machine, and how much memory.

Networks of each shape are trained for a moment to find the time per record. Everything else follows from the numbers of
networks, records and epochs, from the labels of the data set, and from fixed ratios for the compared methods.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from quietmax.accounting.dpsgd import PUBLISHED_ACCOUNTANTS
from quietmax.attacks.builtin import Shadow
from quietmax.data.registry import dataset
from quietmax.data.tables import is_table_path
from quietmax.experiments.grid import DataSource, Group, Trial
from quietmax.experiments.inputs import source_records
from quietmax.experiments.paper import EPSILONS
from quietmax.models.stacked import LARGEST_STACK, TrainingSettings, train_stack, training_bytes

_TIMED_RECORDS = 1_000
_MIN_SECONDS, _TIMINGS = 0.3, 3
_MAX_TIMED_NETWORKS = 10
"""Networks timed together; with more of them the time per network hardly changes."""

# Ratios measured on MNIST, Adult, Location and CIFAR.
_DPSGD_NETWORK = 1.1
"""Time of a DP-SGD network as published, in ordinary networks."""
_SECONDS_PER_VALUE = {"head": 2.5e-8, "sampled-neuron": 2.5e-8, "teachers": 3e-8}
_DPSGD_SECONDS_PER_VALUE = 0.8e-8
_SECONDS_PER_TRIAL = 0.15
"""Answers, attack and audit of one trial."""
_FEATURES_PER_PIXEL = 5.0
"""Scattering features of an image."""
_ASSUMED_WIDTH, _ASSUMED_CLASSES = 100, 2
_SMALLEST_IMAGE = 784
"""Data sets with at least so many features are images."""
_LIBRARY_BYTES = 450 * 2**20
_DPSGD_BYTES = 1.9
"""Memory of a DP-SGD network, in ordinary networks; the records are copied once more."""
_BYTES_PER_FEATURE = 18
"""Memory of a public feature of a record while a head or DP-SGD is trained."""


def estimated_seconds(
    trials: Sequence[Trial], *, measured: bool = True, data_dir: Path | None = None
) -> dict[Trial, float]:
    """Estimate the time of each trial on one core. A group's first trial also trains what the group shares."""
    counted: set[tuple[Group, str]] = set()
    found = {}
    for trial in trials:
        seconds = _SECONDS_PER_TRIAL + _fit_seconds(trial)
        for what, cost in _shared_seconds(trial, measured, data_dir).items():
            if (trial.group, what) not in counted:
                counted.add((trial.group, what))
                seconds += cost
        found[trial] = seconds
    return found


def estimated_bytes(trials: Sequence[Trial], *, data_dir: Path | None = None) -> int:
    """Estimate the largest memory of one worker."""
    return max(
        _group_bytes(group, {trial.method for trial in trials if trial.group == group}, data_dir)
        for group in {trial.group for trial in trials}
    )


def _group_bytes(group: Group, methods: set[str], data_dir: Path | None) -> int:
    """Memory of the libraries, the records, and whichever of the group's steps needs the most."""
    effort, settings = group.effort, TrainingSettings()
    width, classes = _shape(group.source)
    widths = (width, *settings.hidden, classes)
    steps = [training_bytes(widths, settings)]
    if effort.attacks:
        height = min(effort.shadows, LARGEST_STACK)
        kept = 4 * effort.shadows * (width * settings.hidden[0] + settings.hidden[-1] * classes)
        steps.append(height * training_bytes(widths, settings) + kept)
    records = 4 * width * _records(group.source, data_dir)
    steps.append(2 * records)  # copies while they are read, checked and divided
    if any(name.startswith("published-") for name in methods):
        networks = len(PUBLISHED_ACCOUNTANTS) * len(EPSILONS)
        steps.append(int(networks * _DPSGD_BYTES * training_bytes(widths, settings)) + records)
    if methods & {"head", "dpsgd", "teachers", "sampled-neuron"}:
        values = width * (_FEATURES_PER_PIXEL if width >= _SMALLEST_IMAGE else 1)
        steps.append(int(2 * effort.records * values * _BYTES_PER_FEATURE))
    return _LIBRARY_BYTES + records + max(steps)


@cache
def _records(source: DataSource, data_dir: Path | None) -> int:
    return len(source_records(source, data_dir))


def _shared_seconds(trial: Trial, measured: bool, data_dir: Path | None) -> dict[str, float]:
    """Time of everything shared that the trial needs."""
    effort = trial.group.effort
    width, classes = _shape(trial.group.source)
    per_record = _seconds_per_record if measured else _assumed_seconds_per_record
    layers = (width, *TrainingSettings().hidden, classes)
    alone = effort.epochs * effort.records * per_record(layers, 1, 100)
    one = effort.epochs * effort.records * per_record(layers, min(effort.shadows, _MAX_TIMED_NETWORKS), 100)
    costs = {"model": alone}
    if trial.method == "original":
        return costs | {"original": alone}
    if effort.attacks:
        set_size, largest = 1.0, 1 / classes
        if measured:
            set_size, largest = _shadow_set_and_largest_class(trial.group.source, effort.records, data_dir)
        costs["shadows"] = set_size * effort.shadows * one
        # Every shadow network answers its set and as many other records. There is one attack network per class; that
        # of the largest class is still training when the others are finished.
        network = Shadow().network
        answers = 2 * effort.shadows * set_size * effort.records * effort.attack_epochs
        stack = (classes, *network.hidden, 2)
        other = (1 - largest) / (classes - 1)
        costs["attack"] = answers * (
            classes * other * per_record(stack, min(classes, _MAX_TIMED_NETWORKS), network.batch_size)
            + (largest - other) * per_record(stack, 1, network.batch_size)
        )
        if trial.method == "teachers":
            costs["attack on labels"] = costs["attack"]
    if trial.method.startswith("published-"):
        networks = len(PUBLISHED_ACCOUNTANTS) * len(EPSILONS)
        costs["dpsgd"] = networks * _DPSGD_NETWORK * one
    return costs


def _fit_seconds(trial: Trial) -> float:
    """Time of the trial's own training."""
    source = trial.group.source
    width, classes = _shape(source)
    values = trial.group.effort.records * width * classes
    if not is_table_path(source.name) and width >= _SMALLEST_IMAGE:
        values = int(values * _FEATURES_PER_PIXEL)
    if trial.method.startswith("dpsgd"):
        return _DPSGD_SECONDS_PER_VALUE * values
    return _SECONDS_PER_VALUE.get(trial.method, 0.0) * values


@cache
def _shadow_set_and_largest_class(
    source: DataSource, records: int, data_dir: Path | None
) -> tuple[float, float]:
    """Size of a shadow network's set relative to the target's (at most 1); share of the largest class."""
    labels = source_records(source, data_dir).labels
    left_over = max(len(labels) - 2 * records, 0)
    return min(1.0, left_over / (2 * records)), float(np.bincount(labels).max() / len(labels))


@cache
def _shape(source: DataSource) -> tuple[int, int]:
    """Features and classes. A table is not read for an estimate; fixed numbers are assumed for it."""
    if is_table_path(source.name):
        return _ASSUMED_WIDTH, _ASSUMED_CLASSES
    registered = dataset(source.name)
    return registered.width or registered.features, registered.classes


def _assumed_seconds_per_record(widths: tuple[int, ...], networks: int, batch: int) -> float:  # noqa: ARG001
    weights = sum(into * out for into, out in pairwise(widths))
    return 1.5e-6 + 1e-10 * weights


@cache
def _seconds_per_record(widths: tuple[int, ...], networks: int, batch: int) -> float:
    """Measure the training time per network, record and epoch with a few epochs of a small stack."""
    generator = np.random.default_rng(0)
    features = generator.random((_TIMED_RECORDS, widths[0]), dtype=np.float32)
    labels = generator.integers(widths[-1], size=_TIMED_RECORDS)
    rows, seeds = [np.arange(_TIMED_RECORDS)] * networks, list(range(networks))

    def seconds(epochs: int) -> float:
        settings = TrainingSettings(hidden=widths[1:-1], epochs=epochs, batch_size=batch)
        started = time.process_time()
        train_stack(features, labels, widths[-1], rows, settings=settings, seeds=seeds)
        return time.process_time() - started

    # The difference of two runs leaves out what is done once; the longer run is long enough for the clock.
    epochs = int(np.clip(_MIN_SECONDS / max(seconds(1), 1e-3), 2, 60))
    differences = sorted(seconds(1 + epochs) - seconds(1) for _ in range(_TIMINGS))
    return max(differences[_TIMINGS // 2], 1e-6) / (epochs * networks * _TIMED_RECORDS)
