"""How long an evaluation takes: counted from the work in its cells, at the speed measured on this machine.

Networks of each shape are trained for a moment to find what one record costs; everything else follows from the
numbers of networks, records and epochs, and from fixed ratios for the methods of the comparison.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np

from quietmax.accounting.dpsgd import PUBLISHED_ACCOUNTANTS
from quietmax.attacks.shadow import Shadow
from quietmax.data import dataset, is_table_path
from quietmax.experiments.accuracy_loss import EPSILONS
from quietmax.experiments.cell import Cell, Group, Source
from quietmax.models import TrainingSettings, train_stack

_RECORDS = 1_000
_LONG_ENOUGH = 0.6
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
_LARGEST_CLASS = {"adult": 0.75, "location": 0.06}
"""Share of the largest class where classes are uneven: its attack network trains on when the others are done."""


def estimated_seconds(cells: Sequence[Cell], *, measured: bool = True) -> dict[Cell, float]:
    """Seconds of one core for each cell; a group's first cell also trains what the group shares.

    With ``measured`` False nothing is trained to find the speed: good enough for shares.
    """
    first: set[tuple[Group, str]] = set()
    found = {}
    for cell in cells:
        seconds = _CELL + _method(cell)
        for what, cost in _shared(cell, measured).items():
            if (cell.group, what) not in first:
                first.add((cell.group, what))
                seconds += cost
        found[cell] = seconds
    return found


def _shared(cell: Cell, measured: bool) -> dict[str, float]:
    effort = cell.group.effort
    width, classes = shape_of(cell.group.source)
    speed = seconds_per_record if measured else _guess
    layers = (width, *TrainingSettings().hidden, classes)
    trained = effort.epochs * effort.records
    alone = trained * speed(layers, 1, 100)
    one = trained * speed(layers, min(effort.shadows, _TOGETHER), 100)
    costs = {"model": alone}
    if cell.method == "original":
        return costs | {"original": alone}
    costs["shadows"] = effort.shadows * one
    judges = Shadow().network
    # every shadow network's answers to its set and to as many other records, one attack network per class
    judged = 2 * effort.shadows * effort.records * effort.attack_epochs
    stack = (classes, *judges.hidden, 2)
    largest = _LARGEST_CLASS.get(cell.group.source.name, 1 / classes)
    other = (1 - largest) / (classes - 1)
    costs["attack"] = judged * (
        classes * other * speed(stack, min(classes, _TOGETHER), judges.batch_size)
        + (largest - other) * speed(stack, 1, judges.batch_size)
    )
    if cell.method == "teachers":
        costs["attack on labels"] = costs["attack"]
    if cell.method.startswith("published-"):
        networks = len(PUBLISHED_ACCOUNTANTS) * len(EPSILONS)
        costs["dpsgd"] = networks * _DPSGD_NETWORK * one
    return costs


def _method(cell: Cell) -> float:
    width, classes = shape_of(cell.group.source)
    values = cell.group.effort.records * width * classes
    if not is_table_path(cell.group.source.name) and width >= 784:
        values = int(values * _SCATTERING)
    rate = _PER_VALUE_DPSGD if cell.method.startswith("dpsgd") else _PER_VALUE.get(cell.method, 0.0)
    return rate * values


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

    # the difference of two runs leaves out what is done once; the second is long enough for the clock
    short = seconds(1)
    epochs = int(np.clip(_LONG_ENOUGH / max(short, 1e-3), 3, 60))
    return max(seconds(1 + epochs) - short, 1e-6) / (epochs * networks * _RECORDS)
