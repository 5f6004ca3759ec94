"""A published accuracy is the same, bit for bit, wherever the evaluated rows are."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quietmax import DPSGD, PrivateHead
from quietmax.data.records import Holdout, Records, is_held_out
from quietmax.data.schema import Schema
from quietmax.data.tables import table_rows
from quietmax.errors import InvalidData, InvalidInput
from quietmax.estimators import blocks, evaluation
from quietmax.estimators.blocks import LocalEngine
from quietmax.estimators.evaluation import _evaluation_records, evaluate_folder
from quietmax.estimators.figures import Evaluation
from quietmax.estimators.serialization import open_private, save_private
from tests.estimators.made import made
from tests.estimators.table_of_people import PERSONS, PLAIN, table_of_people
from tests.estimators.table_of_people import files as written_files

ROWS, SHARE = 900, 0.4
SCHEMAS = {"records": PLAIN, "persons": PERSONS}
people = partial(table_of_people, ROWS, 300)
files = partial(written_files, group=70)


def fitted(schema: Schema, kind: Any = PrivateHead) -> Any:
    """Return an estimator that held people out; seeded, so that all have the same weights and the same noise."""
    rows = table_rows(people(), schema, holdout=SHARE, seed=4)
    return made(kind, 4.0, 1e-5, declared_size=300, steps=5, random_state=2).fit(rows.train)


@pytest.mark.parametrize("kind", [PrivateHead, DPSGD])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_an_evaluation_is_the_same_in_memory_and_out_of_core(
    tmp_path: Path, schema: Schema, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = people()
    asked: Any = {"by": ("pay", [40, 60]), "at": [0.3]}
    expected = fitted(schema, kind).evaluate(frame, **asked)
    monkeypatch.setattr(blocks, "ROWS_AT_ONCE", 16)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)
    monkeypatch.setattr(blocks, "_PERSONS_AT_ONCE", 50)
    monkeypatch.setattr(evaluation, "FILES_IN_MEMORY", 1000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = files(tmp_path / "people", frame, [1, 400, 401, 700])
    shuffled = files(tmp_path / "shuffled", frame.sample(frac=1, random_state=1), [300])
    frame.to_csv(tmp_path / "people.csv", index=False)
    before = set(tmp_path.iterdir())
    for source in (folder, shuffled, tmp_path / "people.csv"):
        found = fitted(schema, kind).evaluate(source, **asked)
        assert found.to_json() == expected.to_json()
        assert set(tmp_path.iterdir()) == before
    assert 0.6 < float(expected.accuracy.value or 0) < 1.0


@pytest.mark.parametrize("name", SCHEMAS)
def test_exactly_the_people_whom_the_hash_holds_out_are_counted_whatever_file_they_are_in(
    tmp_path: Path, name: str
) -> None:
    frame, estimator = people(), fitted(SCHEMAS[name])
    model = save_private(estimator, tmp_path / "model", dataset="people")
    folder = files(tmp_path / "people", frame, [200, 500])

    def exact(source: Any, schema: Schema) -> Evaluation:
        rows = source if isinstance(source, Records) else table_rows(source, schema)
        engine = LocalEngine(0, tmp_path)
        return evaluate_folder(model, open_private(model), rows, exact=True, engine=engine)

    records = _evaluation_records(frame, estimator.encoding_)
    chosen = is_held_out(records, Holdout(SHARE, 4))
    units = frame["who"][chosen].nunique() if name == "persons" else int(chosen.sum())
    found = exact(folder, SCHEMAS[name])
    assert 0 < units < 0.6 * (frame["who"].nunique() if name == "persons" else ROWS)
    # A person of k rows adds k times 1/k, rounded down to multiples of 2^-24.
    assert found.size.value == pytest.approx(units, abs=1e-3)
    assert found.to_json() == exact(records, SCHEMAS[name]).to_json()
    # People who were trained on change nothing.
    without = files(tmp_path / "without", frame[chosen], [100])
    assert exact(without, SCHEMAS[name]).to_json() == found.to_json()


def test_a_head_whose_training_can_be_continued_is_evaluated_on_files(tmp_path: Path) -> None:
    frame, schema = people(), SCHEMAS["persons"]
    folder = files(tmp_path / "people", frame, [200])
    estimator = fitted(schema).set_params(engine=LocalEngine(0, tmp_path, resume=True))
    assert estimator.evaluate(folder).to_json() == fitted(schema).evaluate(frame).to_json()
    assert [path.name for path in tmp_path.iterdir()] == ["people"]


def test_an_error_in_the_last_file_costs_nothing(tmp_path: Path) -> None:
    frame = people()
    frame.loc[ROWS - 1, "ill"] = "perhaps"
    estimator, schema = fitted(SCHEMAS["persons"]), SCHEMAS["persons"]
    with pytest.raises(InvalidInput, match=r"02\.parquet"):
        estimator.evaluate(files(tmp_path / "people", frame, [300, 600]))
    broken = files(tmp_path / "broken", people(), [300])
    (broken / "01.parquet").write_bytes((broken / "01.parquet").read_bytes()[:-50])
    with pytest.raises(InvalidData, match=r"01\.parquet"):
        estimator.evaluate(broken)
    # The one evaluation that is free is still there.
    assert estimator.evaluate(people()).to_json() == fitted(schema).evaluate(people()).to_json()
