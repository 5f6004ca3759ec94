from __future__ import annotations

import csv
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from quietmax.estimators import open_private
from tests.cli.conftest import assert_error, document, printed, run


def test_columns_are_listed_by_importance(head: Path) -> None:
    found = document("explain", head)
    effects = open_private(head).effects()
    assert found["importance"] == effects.importance.to_dict("records")
    assert list(found["curves"]) == [line["column"] for line in found["importance"]] == ["age", "sex"]
    assert found["figures"] == []
    text = printed("explain", head)
    assert text.index("age") < text.index("sex")
    assert f"{found['importance'][0]['importance']:.3f}" in text


def test_the_curve_of_a_number_is_shown_in_few_intervals_that_keep_all_people(head: Path) -> None:
    effects = open_private(head).effects()
    summary, curve = effects.summary("age"), effects.curves["age"]
    assert len(summary) <= 17 < len(curve)
    assert summary["share"].sum() == pytest.approx(curve["share"].sum())
    assert summary["low"].iloc[0] == curve["low"].iloc[0]
    shown = f"effect on {effects.shown[0]}"
    assert summary[shown] @ summary["share"] == pytest.approx(curve[shown] @ curve["share"], abs=1e-9)
    text = printed("explain", head, "--column", "age")
    for value, effect in zip(summary["value"], summary[shown], strict=True):
        assert value in text
        assert f"{effect:+.3f}" in text
    assert effects.summary("sex") is effects.curves["sex"]


def test_each_column_gets_a_figure(head: Path) -> None:
    files = [Path(file) for file in document("explain", head, "--output", "figures")["figures"]]
    assert [file.name for file in files] == ["01-age.svg", "02-sex.svg"]
    assert "Wrote 2 figures to figures." in printed("explain", head, "-o", "figures")
    for file, column in zip(files, ("age", "sex"), strict=True):
        root = ElementTree.fromstring(file.read_text(encoding="utf-8"))
        texts = ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]
        assert column in texts
        assert column in root.attrib["aria-label"]


def test_what_cannot_be_explained_is_an_error_of_one_sentence(head: Path, votes: Path, queries: Path) -> None:
    for words in (("explain", votes), ("predict", "--model", votes, "--input", queries, "--explain")):
        assert_error(run(*words), 2, "paid one by one")
    assert document("predict", "--model", votes, "--input", queries)["remaining"]["queries"] == 8
    Path("file").write_text("")
    assert_error(run("explain", head, "-o", "file"), 1, "Cannot write figures to file")


def test_answers_are_explained_and_the_reasons_add_up_to_their_score(head: Path, queries: Path) -> None:
    answer = document("predict", "--model", head, "--input", queries, "--explain")
    assert "reasons" not in document("predict", "--model", head, "--input", queries)
    for reasons, probabilities in zip(answer["reasons"], answer["probabilities"], strict=True):
        assert [each["column"] for each in reasons] == ["(constant)", "age", "sex"]
        score = np.zeros(2)
        for each in reasons:
            score += each["contributions"]
        assert np.exp(score) / np.exp(score).sum() == pytest.approx(probabilities, abs=1e-12)
    assert [reasons[2]["value"] for reasons in answer["reasons"]] == ["F", "M"]
    text = printed("predict", "--model", head, "--input", queries, "--explain")
    place = answer["classes"].index(answer["labels"][0])
    assert f"age {answer['reasons'][0][1]['contributions'][place]:+.2f}" in text


@pytest.mark.parametrize("name", ["queries.csv", "queries.tsv", "queries.parquet"])
def test_files_of_answers_have_the_reasons_beside_them(head: Path, queries: Path, name: str) -> None:
    import pandas as pd

    frame = pd.read_csv(queries)
    if name.endswith("parquet"):
        frame.to_parquet(name)
    else:
        frame.to_csv(name, index=False, sep="\t" if name.endswith("tsv") else ",")
    command = ("predict", "--model", head, "--input", name, "--output", "answers")
    assert document(*command)["written"] == 1
    assert document(*command, "--explain")["written"] == 1, "the answers there have no reasons"
    assert document(*command, "--explain")["skipped"] == 1
    file = Path("answers") / name
    if name.endswith("parquet"):
        rows = pd.read_parquet(file).to_dict("records")
    else:
        with file.open(encoding="utf-8", newline="") as opened:
            rows = list(csv.DictReader(opened, delimiter="\t" if name.endswith("tsv") else ","))
    opened_model = open_private(head)
    scores = opened_model.classifier.scores(opened_model.features.transform(opened_model.encode(frame)))
    for row, score in zip(rows, scores, strict=True):
        for number, label in enumerate(opened_model.classes):
            total = 0.0
            for summand in ("(constant)", "age", "sex"):
                total += float(row[f"contribution of {summand} to {label}"])
            assert total == score[number]
        assert row["label"] == opened_model.classes[score.argmax()]
    assert document(*command)["written"] == 1, "answers without reasons were asked for"


def test_an_export_with_reasons_has_that_output(head: Path) -> None:
    import onnx

    printed("export", head, "--onnx", "head.onnx", "--reasons")
    assert [output.name for output in onnx.load("head.onnx").graph.output] == [
        "label",
        "probabilities",
        "reasons",
    ]
