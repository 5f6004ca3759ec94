"""The paper on one page: sensitivity, losses, Algorithm 1 over epsilon, its attack, and the audit of its claim.

    python examples/3-paper/paper.py [--quick] [--dataset mnist --data-dir FOLDER]

The embedded digits need no files. With the official MNIST files the setting is the paper's.
"""

from __future__ import annotations

import argparse

import quietmax as qm
from quietmax.experiments.paper import reproduce_sensitivity_table
from quietmax.mechanisms import Answerer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="Few records, epochs and samples.")
    parser.add_argument("--dataset", default="mnist-5k")
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    quick = options.quick

    rows = reproduce_sensitivity_table()
    print(
        f"sensitivity table: {sum(row.agrees for row in rows)} of {len(rows)} numbers equal the paper's printed digits"
    )

    data = qm.load(options.dataset, records=300 if quick else None, data_dir=options.data_dir)
    epochs = 10 if quick else 100
    for loss in (qm.CrossEntropy(), qm.Convexified(1.0)):
        model = qm.train(data, settings=qm.TrainingSettings(epochs=epochs, loss=loss))
        train, test = (
            (model.predict(part.features) == part.labels).mean() for part in (data.train, data.test)
        )
        print(f"{type(loss).__name__}: train {train:.3f}, test {test:.3f}")

    published = qm.sensitivity.published_sensitivity(model)
    print(f"published sensitivity of a logit: {published.logit.value:.3f} (a formula, not an upper bound)")

    asked = 200 if quick else 2000
    queries, truth = data.test.features[:asked], data.test.labels[:asked]
    baseline = (model.predict(queries) == truth).mean()
    for epsilon in (0.1, 1.0, 10.0, 100.0):
        target = Answerer.prepare(model, qm.Algorithm1(noise="gaussian"), qm.Budget(epsilon))
        right = (target.answer(queries).labels == truth).mean()
        print(f"Algorithm 1 at eps = {epsilon:g} per answer: accuracy loss {1 - right / baseline:.3f}")

    print(qm.attacks.Shadow(models=2 if quick else 20).run(model, data))

    claimed = qm.Algorithm1("laplace", 1 / 21, 1 / 21, logit_sensitivity=0.358, probability_sensitivity=1.0)
    report = qm.audit.audit_mechanism(claimed, classes=10, samples=4000 if quick else 100_000)
    print(
        f"claimed epsilon of one answer: 1; lower bound: {report.lower_bound:.2f}; verdict: {report.verdict}"
    )


if __name__ == "__main__":
    main()
