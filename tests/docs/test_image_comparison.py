"""The page on images compares with peers at every epsilon that matters, and says where they are ahead."""

from __future__ import annotations

import json
from typing import NamedTuple

from tests.docs.scripts import ROOT

PAGE = (ROOT / "docs/results/image-accuracy.md").read_text(encoding="utf-8")
RECORDS = {"CIFAR-10": 50_000, "MNIST": 60_000, "Fashion-MNIST": 60_000}


class Peer(NamedTuple):
    data: str
    epsilon: float
    ours: str
    published: str
    year: int


def peers() -> list[Peer]:
    """The rows of the table of published results."""
    section = PAGE.split("## Beside published results")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    return [Peer(row[0], float(row[1]), row[2], row[3], int(row[4][-5:-1])) for row in rows]


def measured(data: str, epsilon: float) -> float:
    stored = json.loads((ROOT / "docs/results/image-accuracy.json").read_text(encoding="utf-8"))["rows"]
    wanted = (data.lower(), "head", RECORDS[data], epsilon)
    (mean,) = (
        row["mean"] for row in stored if (row["set"], row["part"], row["records"], row["epsilon"]) == wanted
    )
    return float(mean)


def test_our_side_is_the_stored_result_and_the_larger_figure_is_bold() -> None:
    assert len(peers()) >= 14
    for row in peers():
        ours, published = (cell.strip("*") for cell in (row.ours, row.published))
        assert ours == f"{measured(row.data, row.epsilon):.4f}"
        ahead = float(published) > float(ours)
        assert (row.ours, row.published) == (
            (ours, f"**{published}**") if ahead else (f"**{ours}**", published)
        )


def test_peers_are_named_at_epsilon_8_and_newer_ones_than_2021_at_epsilon_3() -> None:
    named = {(row.data, row.epsilon, row.published.strip("*"), row.year) for row in peers()}
    assert {
        ("CIFAR-10", 8.0, "0.814", 2022),
        ("CIFAR-10", 1.0, "0.723", 2023),
        ("CIFAR-10", 3.0, "0.7083", 2023),
        ("MNIST", 3.0, "0.9888", 2023),
        ("Fashion-MNIST", 3.0, "0.8971", 2023),
    } <= named


def test_the_text_says_where_others_are_ahead() -> None:
    ahead = {(row.data, row.epsilon) for row in peers() if row.published.startswith("**")}
    assert ahead == {("CIFAR-10", 8.0), ("Fashion-MNIST", 2.0), ("Fashion-MNIST", 3.0)}
    said = PAGE.split("**Others are ahead**")[1].split(".\n")[0]
    assert all(
        word in said for word in ("epsilon 8 on CIFAR-10, by 0.036", "Fashion-MNIST at epsilon 2 and 3")
    )
