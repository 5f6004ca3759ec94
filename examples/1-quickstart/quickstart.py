"""A private classifier beside an ordinary one, and an attack on both.

python examples/1-quickstart/quickstart.py [--quick]
"""

from __future__ import annotations

import argparse

import quietmax as qm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="Few records and epochs.")
    quick = parser.parse_args().quick

    # MNIST digits that come with a dependency; training and test part have equal size.
    size = 300 if quick else 2000
    data = qm.load("mnist-5k", records=size, seed=0)

    # The paper's ordinary network, without any guarantee.
    settings = qm.TrainingSettings(epochs=10 if quick else 100)
    ordinary = qm.train(data, alpha=1.0, settings=settings)

    # A private head. Classes and size are public facts that we declare, not computed from the records.
    head = qm.PrivateHead(
        epsilon=1.0,
        delta=1e-5,
        image_shape=data.records.image_shape,
        classes=range(10),
        declared_size=size,
    ).fit(data.train.features, data.train.labels)

    truth = data.test.labels
    for name, model in (("ordinary network", ordinary), ("private head", head)):
        print(f"{name}: test accuracy {(model.predict(data.test.features) == truth).mean():.3f}")
    print(head.guarantee_)

    # The same attack on both. It learns from shadow networks what answers to members look like.
    attack = qm.attacks.Threshold(models=2 if quick else 10)
    for name, target in (("ordinary network", None), ("private head", head)):
        report = attack.run(ordinary, data, target=target)
        print(
            f"attack on the {name}: leakage {report.leakage.value:.3f} "
            f"[{report.leakage.low:.3f}, {report.leakage.high:.3f}]"
        )


if __name__ == "__main__":
    main()
