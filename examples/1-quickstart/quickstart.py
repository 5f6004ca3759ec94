"""A private classifier of a survey of people: train, read the guarantee, publish an accuracy, ask.

python examples/1-quickstart/quickstart.py [--quick]
"""

from __future__ import annotations

import argparse

import quietmax as qm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="Train on half of the people.")
    quick = parser.parse_args().quick

    # 6,366 married women were asked about their marriage, among other things whether they had an affair. The survey
    # comes with a dependency; its public bounds and categories come with Quietmax. A part is held out of training.
    data = qm.load("fair", holdout=0.5 if quick else 0.2)

    # The size is a public round number that we declare. Computed from the records, it would leak.
    head = qm.PrivateHead(epsilon=1.0, delta=1e-5, declared_size=3000 if quick else 5000)
    head.fit(data.train)
    print(head.guarantee_)
    for sentence in head.guarantee_.in_words():
        print(f"  {sentence}")

    # Noisy counts on the women who were held out: free, because nobody is in both parts.
    evaluation = head.evaluate(data.test)
    print(f"accuracy that may be published: {evaluation.accuracy}")
    for name, recall in evaluation.recall.items():
        print(f"  recall of {name!r}: {recall}")

    # The weights were released once, so any number of answers is free.
    print("answers:", *head.predict(data.test)[:5])


if __name__ == "__main__":
    main()
