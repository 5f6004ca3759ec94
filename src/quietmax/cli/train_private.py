"""The private half of `quietmax train`: fit, save, report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quietmax.cli.train_dpsgd import DPSGDOptions, private_network
from quietmax.data import Split
from quietmax.errors import InvalidInput
from quietmax.estimators import DPSGD, PrivateHead, Teachers, save_private
from quietmax.estimators.private_file import with_encoding
from quietmax.models import accuracy
from quietmax.models.features import FeatureMap, Identity, Scattering, UnitNorm


@dataclass(frozen=True)
class PrivateOptions:
    """What the private options of the command said."""

    kind: str
    epsilon: float
    delta: float | None
    queries: int | None
    declared_size: int | None
    teachers: int | None
    route: str
    features: str
    dpsgd: DPSGDOptions


DELTA = 1e-5
"""Unless another is asked for; DP-SGD has its own rule, 1/(10 * declared size)."""


def train_private(
    data: Split, options: PrivateOptions, output: Path | None, overwrite: bool
) -> dict[str, Any]:
    """Fit a private estimator on the training part, save it, and return what to report."""
    shape = data.records.image_shape
    encoding = data.records.encoding
    started = time.perf_counter()
    estimator: PrivateHead | Teachers | DPSGD
    delta = DELTA if options.delta is None else options.delta
    if options.kind == "head":
        per_query = options.queries is not None
        estimator = PrivateHead(
            options.epsilon,
            delta,
            route="output" if per_query else options.route,  # type: ignore[arg-type]
            features="auto" if options.features == "auto" else _feature_map(options.features, shape),
            image_shape=shape,
            classes=range(data.classes),
            declared_size=options.declared_size,
            release="query" if per_query else "weights",
            queries=options.queries or 1,
        )
    elif options.kind == "teachers":
        automatic = "scattering" if shape else "identity"
        name = automatic if options.features == "auto" else options.features
        estimator = Teachers(
            options.epsilon,
            delta,
            options.queries or 1,
            options.teachers,
            features=_feature_map(name, shape),
            declared_size=options.declared_size,
            classes=range(data.classes),
        )
    else:
        automatic = "scattering" if shape and options.dpsgd.configuration == "today" else "identity"
        name = automatic if options.features == "auto" else options.features
        estimator = private_network(
            options.dpsgd,
            epsilon=options.epsilon,
            delta=options.delta,
            features=None if name == "identity" else _feature_map(name, shape),
            classes=range(data.classes),
            declared_size=options.declared_size,
        )
    train = data.train
    estimator.fit(train.features, train.labels)
    seconds = time.perf_counter() - started
    guarantee = with_encoding(estimator.guarantee_, encoding)
    if output is not None:
        save_private(estimator, output, dataset=data.name, encoding=encoding, overwrite=overwrite)
    unlimited = options.kind == "dpsgd" or (options.kind == "head" and options.queries is None)
    if isinstance(estimator, DPSGD):
        delta = estimator.plan_.delta
    return {
        "dataset": data.name,
        "private": options.kind,
        "epsilon": options.epsilon,
        "delta": delta,
        "queries": "any number" if unlimited else options.queries or 1,
        **_size(estimator),
        **(_settings(estimator) if isinstance(estimator, DPSGD) else {}),
        # The test part is not the private training set; only released weights answer it for nothing.
        "test_accuracy": accuracy(estimator, data.test) if unlimited else None,
        "seconds": round(seconds, 2),
        "model": None if output is None else str(output),
        "not_for_publication": ["test_accuracy", "seconds"] if unlimited else ["seconds"],
        "guarantee": guarantee,
    }


def _size(estimator: PrivateHead | Teachers | DPSGD) -> dict[str, Any]:
    """The number of records that training used: declared, or a noisy count; the true one only if assumed public."""
    if isinstance(estimator, PrivateHead):
        size, otherwise = estimator.size_, "noisy count"
    else:
        size, otherwise = estimator.guarantee_.parameters["declared_size"], "counted, assumed to be public"
    return {
        "records": round(size),
        "records_from": "declared" if estimator.declared_size is not None else otherwise,
    }


def _settings(estimator: DPSGD) -> dict[str, Any]:
    """The public numbers of a run of DP-SGD that a reader wants to see."""
    plan = estimator.plan_
    return {
        "accountant": plan.accountant,
        "reading": plan.reading,
        "hidden": list(plan.settings.hidden) or None,
        "sampling_rate": plan.settings.sampling_rate,
        "steps": plan.settings.steps,
        "clip": plan.settings.clip,
        "learning_rate": plan.settings.learning_rate,
        "noise_multiplier": plan.noise_multiplier,
    }


def _feature_map(name: str, shape: tuple[int, int, int] | None) -> FeatureMap:
    if name == "identity":
        return Identity()
    if name == "unit-norm":
        return UnitNorm(1.0)
    if name == "scattering":
        if shape is None:
            raise InvalidInput(
                "--features scattering needs images, but these records are a table; choose identity."
            )
        return Scattering(shape)
    raise InvalidInput(f"--features {name!r} is not known; choose auto, identity, unit-norm or scattering.")
