"""Observed against certified: what removing one record moved, beside each bound, as a Markdown table on stdout.

The noiseless head of each method and the teachers are trained with all records and without each of a few (ordinary,
mislabelled, extreme); the paper's network stands beside them with its published formulas. A change above a certified
bound would refute its proof.

    python benchmarks/observed.py [--dataset mnist] [--records 10000] [--removals 6] [--data-dir DIR]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from quietmax.accounting import mu_of
from quietmax.data import Records, load
from quietmax.estimators import Teachers
from quietmax.estimators.blocks import Table
from quietmax.estimators.head.estimator import _centred, _clipped_features, _outputs
from quietmax.estimators.head.exact_sums import gradient_sum
from quietmax.estimators.head.solver import MeanCrossEntropy, Objective, Tilted, _minimise
from quietmax.estimators.head.weights import (
    TILTED_TOLERANCE,
    _gradient_plan,
    _gradient_sensitivity,
    _output_plan,
    default_features,
)
from quietmax.models.features import FeatureMap, Identity
from quietmax.sensitivity import Sensitivity, certified, empirical_sensitivity
from quietmax.sensitivity.network import (
    EmpiricalSensitivity,
    PublishedSensitivity,
    Quantity,
    _compared,
    _plant,
    published_sensitivity_for,
)

EPSILON, DELTA, QUERIES = 1.0, 1e-5, 500
Retraining = tuple[np.ndarray, np.ndarray]
"""The weights of a training as one vector, and the logits of the queries."""


def empirical_sensitivity_by(
    retrain: Callable[[Records], Retraining], records: Records, *, removals: int
) -> EmpiricalSensitivity:
    """Measure the sensitivity of any deterministic training by retraining without single units."""
    planted, rows, kinds = _plant(records, removals=removals)
    others = [retrain(planted.take(np.delete(np.arange(len(planted)), gone))) for gone in rows]
    return _compared(retrain(planted), others, rows, kinds, records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--removals", type=int, default=6)
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    data = load(options.dataset, records=options.records, data_dir=options.data_dir, seed=0)
    train, classes, size = data.train, data.classes, float(options.records)
    feature_map = default_features(train.features.shape[1], train.image_shape)
    mapped = on_features(train, feature_map)
    queries = table_of(on_features(data.test.take(range(min(QUERIES, len(data.test)))), feature_map)).rows
    mu = mu_of(EPSILON, DELTA)
    print(
        f"{options.dataset}, {options.records} records, {options.removals} removals, torch {torch.__version__}\n"
    )
    print("| trained | quantity | observed | bound | share | basis | verdict |")
    print("| --- | --- | ---: | ---: | ---: | --- | --- |")

    def show(
        name: str,
        found: EmpiricalSensitivity,
        bounds: PublishedSensitivity | Mapping[Quantity, Sensitivity],
    ) -> None:
        for check in found.against(bounds):
            print(
                f"| {name} | {check.quantity.replace('_', ' ')} | {check.empirical:.3g} | {check.bound:.3g} "
                f"| {check.empirical / check.bound:.0%} | {check.basis} | {check.verdict} |",
                flush=True,
            )

    def solved(objective: Objective, tolerance: float) -> EmpiricalSensitivity:
        def retrain(kept: Records) -> Retraining:
            weights = _minimise(table_of(kept), objective, tolerance).weights
            return weights.ravel(), queries @ weights.T

        return empirical_sensitivity_by(retrain, mapped, removals=options.removals)

    def bounds_of(weights: Sensitivity) -> dict[Quantity, Sensitivity]:
        return {"weights_l2": weights, "logit": certified.score_bounds(weights, classes=classes).one}

    plan = _output_plan(size, mu)
    show(
        "head, output method",
        solved(MeanCrossEntropy(size, plan.regularisation), plan.tolerance),
        bounds_of(
            certified.head_output(
                regularisation=plan.regularisation, declared_size=size, tolerance=plan.tolerance
            )
        ),
    )
    tolerance = TILTED_TOLERANCE
    show(
        "head, output method, convexified loss (alpha 1)",
        solved(Tilted(1.0, size, plan.regularisation), tolerance),
        bounds_of(
            certified.head_tilted(
                alpha=1.0, mass=size, regularisation=plan.regularisation, classes=classes, tolerance=tolerance
            )
        ),
    )
    steps, outputs = (
        _gradient_plan(size, mapped.features.shape[1] + 1, mu, classes=classes),
        _outputs(classes),
    )

    def one_gradient(kept: Records) -> Retraining:
        table = table_of(kept)
        total = gradient_sum(table, np.zeros((outputs, table.features)), steps.max_grad_norm)
        return total.ravel(), np.zeros((1, classes))

    show(
        "head, gradient method, one sum",
        empirical_sensitivity_by(one_gradient, mapped, removals=options.removals),
        {"weights_l2": _gradient_sensitivity(steps.max_grad_norm, outputs, mapped.features.shape[1] + 1)},
    )

    def votes(kept: Records) -> Retraining:
        teachers = Teachers(
            EPSILON, DELTA, 100, classes=range(classes), declared_size=options.records, random_state=0
        )
        teachers.fit(kept.features, kept.labels)
        return np.zeros(1), teachers.ensemble_.scores(data.test.features[:QUERIES])

    one_vote = Sensitivity(1.0, "certified", "A record is in one teacher's shard (THEORY 3.4).")
    show(
        "teachers, votes for a label",
        empirical_sensitivity_by(votes, train, removals=options.removals),
        {"logit": one_vote},
    )
    show(
        "the paper's network",
        empirical_sensitivity(train, removals=options.removals, queries=data.test.features[:QUERIES]),
        published_sensitivity_for(train.features.shape[1], (128,), classes, options.records),
    )


def on_features(records: Records, feature_map: FeatureMap) -> Records:
    """The same records by their public features."""
    return replace(records, features=feature_map.transform(records.features), image_shape=None)


def table_of(records: Records) -> Table:
    """Records as the head sees them: clipped to length 1, with the constant feature, on the grid."""
    rows = _clipped_features(Identity(), records.features, 1.0)
    return _centred(np.zeros(rows.shape[1] - 1), Table(rows, records.labels, records.classes))


if __name__ == "__main__":
    main()
