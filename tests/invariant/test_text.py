"""A text's numbers depend on that text alone, bit for bit: beside any other rows, in any order, on any threads."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray

from quietmax.audit.invariant import audit_model_invariant
from quietmax.data import Encoding, Schema
from quietmax.data.encoding import NumericColumn, TextColumn, embed
from quietmax.estimators import PrivateHead, open_private, save_private
from quietmax.estimators.head.estimator import _clipped_features
from quietmax.estimators.serialization import PrivateModel
from quietmax.models.features.base import bits
from quietmax.models.features.tabular import table_features

WORDS = ("paid", "late", "Kunde", "42", "the", "visit", "naïve", "?!", "日本", "again")
LENGTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 40, 64, 126, 127, 300)
ENCODING = Encoding(
    (TextColumn("note"), NumericColumn("age", 0, 99), TextColumn("reply")), "ill", ("no", "yes")
)


def texts(seed: int) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, length)) for length in LENGTHS]


def table(seed: int) -> pd.DataFrame:
    notes = texts(seed)
    ages = np.random.default_rng(seed).integers(0, 99, len(notes))
    replies = [None if row % 3 == 0 else note[::-1] for row, note in enumerate(notes)]
    return pd.DataFrame({"note": notes, "age": ages, "reply": replies})


ALONE = np.concatenate([embed([text]) for text in texts(0)])


@pytest.mark.parametrize("threads", [1, 2])
def test_an_embedding_is_the_same_alone_and_beside_others_in_any_order(threads: int) -> None:
    torch.set_num_threads(threads)
    together = texts(0)
    order = np.random.default_rng(1).permutation(len(together))
    assert np.array_equal(bits(embed(together)), bits(ALONE))
    assert np.array_equal(bits(embed([together[row] for row in order])), bits(ALONE[order]))
    mixed = [*texts(2)[:5], *together, *together, *texts(3)[:5]]
    assert np.array_equal(bits(embed(mixed)[5:-5]), bits(np.concatenate([ALONE, ALONE])))


@pytest.mark.parametrize("threads", [1, 2])
def test_the_rows_of_a_table_with_texts_keep_their_features_when_others_are_removed_or_added(
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    whole, more = table(0), pd.concat([table(5)[:4], table(0)], ignore_index=True)
    feature_map = table_features(ENCODING, 1000, 2, 0.3)
    expected = _clipped_features(feature_map, ENCODING.encode(whole), 1.0)
    added = _clipped_features(feature_map, ENCODING.encode(more), 1.0)
    assert np.array_equal(bits(added[4:]), bits(expected))
    for row in (0, 5, len(whole) - 1):
        without = _clipped_features(feature_map, ENCODING.encode(whole.drop(index=row)), 1.0)
        assert np.array_equal(bits(without), bits(np.delete(expected, row, axis=0)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PrivateModel:
    """A head that was trained on a table with texts."""
    schema = Schema(
        label="ill", classes=("no", "yes"), bounds={"age": (0, 99)}, text=("reply",), ignore=("note",)
    )
    frame = table(0).assign(ill=["no", "yes"] * (len(LENGTHS) // 2))
    head = PrivateHead(schema=schema, declared_size=len(frame)).fit(frame)
    return open_private(save_private(head, tmp_path_factory.mktemp("models") / "ill", dataset="notes"))


def test_the_audit_finds_no_counterexample_for_a_model_with_texts(model: PrivateModel) -> None:
    report = audit_model_invariant(model, records=8)
    assert [check.part for check in report.checks][:2] == ["encoding", "features"]
    assert report.verdict == "consistent"


def test_the_audit_refutes_embeddings_that_depend_on_the_other_texts(
    model: PrivateModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def centred(strings: list[str]) -> NDArray[np.float32]:
        rows = embed(strings)
        return rows - rows.mean(axis=0)

    monkeypatch.setattr("quietmax.data.encoding.embed", centred)
    assert audit_model_invariant(model, records=8).verdict == "refuted"
