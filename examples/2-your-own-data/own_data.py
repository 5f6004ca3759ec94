"""From a table to a private service: draft, declare, train, evaluate, show the card, answer over HTTP.

    python examples/2-your-own-data/own_data.py [--quick]

The table is fictitious. Replace it with your own, and declare what is publicly known about its columns.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

import quietmax as qm
from quietmax.estimators import save_private
from quietmax.ledger import Ledger
from quietmax.privacy_card import read_card
from quietmax.server import Client, Service, Settings
from quietmax.server.deployment import deploy, load_models
from quietmax.server.run import run_in_thread

# What `quietmax schema draft loans.csv` proposes, after somebody has checked and confirmed every line.
FACTS = """\
label = "repaid"
classes = ["no", "yes"]
person = "customer"
bounds = { age = [18, 100], income = [0, 200000] }
categories = { region = ["north", "south", "west"] }
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="Fewer customers.")
    quick = parser.parse_args().quick

    customers = 1000 if quick else 10_000
    loans = fictitious_loans(customers)
    loans.to_csv("loans.csv", index=False)
    print(qm.draft_schema(loans, label="repaid", person="customer").to_toml())

    # Quietmax reads loans.toml by default, because it has the table's name.
    Path("loans.toml").write_text(FACTS, encoding="utf-8")
    data = qm.load("loans.csv", holdout=0.2)

    # A public round number near the number of customers in the training, not of loans: the guarantee is for persons.
    head = qm.PrivateHead(epsilon=1.0, delta=1e-5, declared_size=int(0.8 * customers)).fit(data.train)
    print(head.guarantee_)
    print(f"accuracy that may be published: {head.evaluate(data.test).accuracy}")

    save_private(head, "repaid", dataset=data.name, overwrite=True)
    Path("card.html").write_text(read_card("repaid").to_html(), encoding="utf-8")
    query_over_http(loans.drop(columns=["customer", "repaid"])[:3])


def fictitious_loans(customers: int) -> pd.DataFrame:
    """Customers with one to three loans each."""
    generator = np.random.default_rng(0)
    loans = generator.integers(1, 4, customers)
    frame = pd.DataFrame(
        {
            "customer": np.arange(customers),
            "age": generator.integers(18, 90, customers),
            "income": generator.gamma(3, 12_000, customers).round(),
            "region": generator.choice(["north", "south", "west"], customers),
        }
    )
    frame = frame.loc[np.repeat(frame.index, loans)].reset_index(drop=True)
    score = frame["age"] / 90 + frame["income"] / 50_000 + generator.normal(0, 0.3, len(frame))
    return frame.assign(repaid=np.where(score > 1.3, "yes", "no"))


def query_over_http(people: pd.DataFrame) -> None:
    """What `quietmax serve repaid --anonymous` does, in a thread of this script: columns in, class names out.

    The ledger is a new one. In earnest there is one ledger, which adds up all models of the same people.
    """
    with tempfile.TemporaryDirectory() as place, Ledger(f"{place}/ledger.sqlite") as ledger:
        deployments = deploy(ledger, load_models(["repaid"]))
        service = Service(ledger, deployments, Settings(anonymous=True, request_log=False))
        with run_in_thread(service) as url, Client(url) as client:
            print("answers:", *client.predict("repaid", people))


if __name__ == "__main__":
    main()
