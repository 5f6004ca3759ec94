"""From a table to a private service: declare, train, show the card, answer over HTTP until the budget is spent.

    python examples/2-your-own-data/own_data.py [--quick]

The table is fictitious. Replace it with your own, and declare what is publicly known about its columns.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import quietmax as qm
from quietmax.data import load
from quietmax.estimators import save_private
from quietmax.ledger import Ledger
from quietmax.privacy_card import read_card
from quietmax.server import Client, Service, Settings, deploy, load_models
from quietmax.server.run import run_in_thread

FACTS = """\
label = "income"
classes = ["no", "yes"]
bounds = { age = [0, 120], hours = [0, 100] }
categories = { sex = ["female", "male"] }
"""
QUERIES = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="Fewer records.")
    quick = parser.parse_args().quick

    table = write_table(Path("people.csv"), 1000 if quick else 20_000)
    Path("people.toml").write_text(
        FACTS, encoding="utf-8"
    )  # read by default, because it has the table's name
    data = load(table)
    print(f"{len(data.train)} training records of {data.records.features.shape[1]} features")

    # Teachers charge every answer, so the budget runs out.
    teachers = qm.Teachers(
        epsilon=1.0,
        delta=1e-5,
        queries=QUERIES,
        teachers=5 if quick else 40,
        classes=range(2),
        declared_size=400 if quick else 8_000,  # a public round number near two fifths of the table
    ).fit(data.train.features, data.train.labels)
    save_private(teachers, "income", dataset=data.name, encoding=data.records.encoding, overwrite=True)
    for what, value in read_card("income").rows()[:6]:
        print(f"  {what}: {value}")

    query_over_http(
        [{"age": 30 + 10 * number, "hours": 40, "sex": "female"} for number in range(QUERIES + 1)]
    )


def write_table(path: Path, people: int) -> Path:
    generator = np.random.default_rng(0)
    age, hours = generator.integers(18, 90, people), generator.integers(5, 70, people)
    sex = generator.choice(["female", "male"], people)
    wealthy = age / 90 + hours / 70 + generator.normal(0, 0.25, people) > 1.25
    rows = zip(age, hours, sex, np.where(wealthy, "yes", "no"), strict=True)
    lines = ["age,hours,sex,income", *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def query_over_http(people: list[dict[str, object]]) -> None:
    """What `quietmax serve income --anonymous` does, in a thread of this script."""
    ledger = Ledger("ledger.sqlite")
    deployments = deploy(ledger, load_models(["income"]))
    service = Service(ledger, deployments, Settings(anonymous=True, log_requests=False))
    with run_in_thread(service) as url, Client(url) as client:
        for number, person in enumerate(people, start=1):
            try:
                print(f"query {number}: class {client.predict('income', [person])[0]}")
            except qm.BudgetExhausted as error:
                print(f"query {number}: {error}")


if __name__ == "__main__":
    main()
