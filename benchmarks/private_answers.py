"""Accuracy of private answers on MNIST with 10,000 records, per number of queries, at the same budget.

Teachers and the private head at (1, 1e-5); the head's per-query answers and Algorithm 1 (no guarantee) at pure
epsilon 1. The head and teachers have their default features of images; teachers also get the pixels. Test records are
answered as if each belonged to its own budget of that many queries. Prints the table of `docs/choosing.md`: means and
standard deviations over random splits.

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
from quietmax.noise import EXACT

QUERIES = 3000
IMAGE = (1, 28, 28)
HEAD, NEURON, PAPER = "head", "sampled neuron", "Algorithm 1"
FEATURES, PIXELS = "teachers", "teachers on pixels"
DELTA, PURE, NONE = "proven, (1, 1e-5)", "proven, eps = 1", "**none** (refuted)"
TABLE = (
    # you want, use, guarantee, queries, what was measured
    ("many queries, or weights to publish", "`quietmax train head`", DELTA, "any number", HEAD),
    ("answers from any network", "`quietmax train teachers --queries 1`", DELTA, 1, FEATURES),
    ("", "`quietmax train teachers --queries 10`", DELTA, 10, FEATURES),
    ("", "`quietmax train teachers --queries 100`", DELTA, 100, FEATURES),
    ("", "the same on pixels", DELTA, 1, PIXELS),
    ("", "the same on pixels", DELTA, 10, PIXELS),
    ("", "the same on pixels", DELTA, 100, PIXELS),
    ("pure epsilon, no delta", "`quietmax train head --queries 1`", PURE, 1, HEAD),
    ("", "`quietmax train head --queries 10`", PURE, 10, HEAD),
    ("pure epsilon, and how sure the label is", "`SampledNeuron` on the same head", PURE, 1, NEURON),
    ("", "the same", PURE, 10, NEURON),
    (
        "the paper's mechanism",
        "`quietmax predict --mechanism algorithm1-laplace`",
        NONE,
        1,
        PAPER,
    ),
    ("", "the same", NONE, 10, PAPER),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--quick", action="store_true", help="One split of 500 embedded digits.")
    arguments = parser.parse_args()
    name, size = ("mnist-5k", 500) if arguments.quick else ("mnist", 10_000)
    splits = 1 if arguments.quick else arguments.splits
    records = load_records(name, data_dir=arguments.data_dir)
    found: dict[tuple[str, str, int | str], list[float]] = {}
    ordinary: list[float] = []

    def note(what: str, guarantee: str, count: int | str, right: np.ndarray, seconds: float) -> None:
        found.setdefault((what, guarantee, count), []).append(float(right.mean()))
        print(f"  {what}, {guarantee}, {count}: {right.mean():.4f} {seconds:6.1f} s", file=sys.stderr)

    for seed in range(splits):
        data = split(records, size=size, seed=seed)
        queries, truth = data.test.features[:QUERIES], data.test.labels[:QUERIES]
        public = {"classes": range(10), "declared_size": size}
        print(f"split {seed}", file=sys.stderr)
        model = train(data)
        logits = model.logits(queries)
        ordinary.append(float((logits.argmax(1) == truth).mean()))
        for count in (1, 10):
            cost = per_query(Budget(1.0, queries=count), "pure", "published")
            paper = Algorithm1("laplace").prepared(model, PureCost(cost.epsilon))
            note(PAPER, NONE, count, paper.release(logits, EXACT).labels == truth, 0)
            start = time.perf_counter()
            head = PrivateHead(
                1.0, method="output", release="query", queries=count, image_shape=IMAGE, **public
            ).fit(data.train.features, data.train.labels)
            predictor = head.predictor_
            scores = predictor.model.scores(head.feature_map_.transform(queries))
            answers = predictor.mechanism.release(scores, EXACT).labels
            note(HEAD, PURE, count, answers == truth, time.perf_counter() - start)
            neuron = SampledNeuron("laplace", "permute-and-flip").prepared(
                predictor.model, PureCost(1 / count)
            )
            note(NEURON, PURE, count, neuron.release(scores, EXACT).labels == truth, 0)
        for what, shape in ((PIXELS, None), (FEATURES, IMAGE)):
            for count in (1, 10, 100):
                start = time.perf_counter()
                teachers = Teachers(1.0, 1e-5, count, image_shape=shape, **public)
                teachers.fit(data.train.features, data.train.labels)
                feature_map = teachers.feature_map_
                inputs = queries if feature_map is None else feature_map.transform(queries)
                answers = teachers.predictor_.mechanism.release(
                    teachers.ensemble_.scores(inputs), EXACT
                ).labels
                note(what, DELTA, count, answers == truth, time.perf_counter() - start)
        start = time.perf_counter()
        head = PrivateHead(1.0, 1e-5, image_shape=IMAGE, **public).fit(data.train.features, data.train.labels)
        note(HEAD, DELTA, "any number", head.predict(queries) == truth, time.perf_counter() - start)
    print(
        f"{name}, {size:,} training records, {len(truth):,} test records, {splits} random splits; the ordinary "
        f"convexified network without privacy has {shown(ordinary)}.\n"
    )
    print("| you want | use | guarantee | queries | accuracy |\n| --- | --- | --- | --- | --- |")
    for want, use, guarantee, count, what in TABLE:
        accuracy = shown(found[what, guarantee, count])
        print(f"| {want} | {use} | {guarantee} | {count} | {accuracy} |")


def shown(values: list[float]) -> str:
    """Mean and, of several, standard deviation."""
    spread = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{spread}"


if __name__ == "__main__":
    main()
