"""Accuracy of private answers on MNIST with 10,000 records, per number of queries, at the same budget.

Teachers and the private head at (1, 1e-5); the head's per-query answers and Algorithm 1 (no guarantee) at pure
epsilon 1. Test records are answered as if each belonged to its own budget of that many queries.

    python benchmarks/private_answers.py [--splits 3] [--data-dir DIR]
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from quietmax.accounting import Budget, PureCost, per_query
from quietmax.data import load_records, split
from quietmax.estimators import PrivateHead, Teachers
from quietmax.mechanisms import Algorithm1, SampledNeuron
from quietmax.models import train
from quietmax.models.features import Scattering
from quietmax.noise import EXACT

QUERIES = 3000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--quick", action="store_true", help="One split of 500 embedded digits.")
    arguments = parser.parse_args()
    name, size = ("mnist-5k", 500) if arguments.quick else ("mnist", 10_000)
    splits = 1 if arguments.quick else arguments.splits
    records = load_records(name, data_dir=arguments.data_dir)
    scattering = Scattering((1, 28, 28))
    found: dict[str, list[float]] = {}

    def note(what: str, right: np.ndarray, seconds: float) -> None:
        found.setdefault(what, []).append(float(right.mean()))
        print(f"  {what:60s} {right.mean():.4f}   {seconds:6.1f} s", file=sys.stderr)

    for seed in range(splits):
        data = split(records, size=size, seed=seed)
        queries, truth = data.test.features[:QUERIES], data.test.labels[:QUERIES]
        public = {"classes": range(10), "declared_size": size}
        print(f"split {seed}", file=sys.stderr)
        model = train(data)
        logits = model.logits(queries)
        note("ordinary convexified network (no privacy)", logits.argmax(1) == truth, 0)
        for count in (1, 10):
            cost = per_query(Budget(1.0, queries=count), "pure", "published")
            labels = (
                Algorithm1("laplace").prepared(model, PureCost(cost.epsilon)).release(logits, EXACT).labels
            )
            note(f"Algorithm 1, Laplace, pure eps 1 for {count} queries (no guarantee)", labels == truth, 0)
            start = time.perf_counter()
            head = PrivateHead(
                1.0, method="output", release="query", queries=count, image_shape=(1, 28, 28), **public
            ).fit(data.train.features, data.train.labels)
            features = head.feature_map_.transform(queries)
            predictor = head.predictor_
            answers = predictor.mechanism.release(predictor.model.scores(features), EXACT).labels
            note(
                f"head per query, label, pure eps 1 for {count} queries",
                answers == truth,
                time.perf_counter() - start,
            )
            neuron = SampledNeuron("laplace", "permute-and-flip").prepared(
                predictor.model, PureCost(1 / count)
            )
            answers = neuron.release(predictor.model.scores(features), EXACT).labels
            note(
                f"sampled neuron, label and probability, pure eps 1 for {count} queries",
                answers == truth,
                0,
            )
        for name, features in (("pixels", None), ("scattering", scattering)):
            for count in (1, 10, 100):
                start = time.perf_counter()
                teachers = Teachers(1.0, 1e-5, count, features=features, **public)
                teachers.fit(data.train.features, data.train.labels)
                inputs = queries if features is None else features.transform(queries)
                answers = teachers.predictor_.mechanism.release(
                    teachers.ensemble_.scores(inputs), EXACT
                ).labels
                what = f"teachers on {name} ({len(teachers.ensemble_.silent)}), (1, 1e-5) for {count} queries"
                note(what, answers == truth, time.perf_counter() - start)
        start = time.perf_counter()
        head = PrivateHead(1.0, 1e-5, image_shape=(1, 28, 28), **public).fit(
            data.train.features, data.train.labels
        )
        note(
            "private head, (1, 1e-5), any number of queries",
            head.predict(queries) == truth,
            time.perf_counter() - start,
        )
    print("| method | accuracy, mean over splits | deviation |\n| --- | ---: | ---: |")
    for what, values in found.items():
        spread = np.std(values, ddof=1) if len(values) > 1 else 0.0
        print(f"| {what} | {np.mean(values):.4f} | {spread:.4f} |")


if __name__ == "__main__":
    main()
