"""Only released models leave their folder, and they answer as before."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import skops.io
from skops.io.exceptions import UntrustedTypesFoundException

import quietmax as qm
from quietmax.data.encoding import Encoding, NumericColumn
from quietmax.data.records import Records
from quietmax.errors import DataUnavailable, InvalidInput
from quietmax.estimators.serialization import open_private, save_private
from quietmax.export.onnx import export_onnx
from quietmax.export.released import TRUSTED, ReleasedClassifier, _metadata, export_skops, write_files
from quietmax.export.tables import export_html, export_sql
from quietmax.mlflow import save_model
from quietmax.models.serialization import save_model as save_network
from quietmax.models.stacked import TrainingSettings
from quietmax.models.training import train
from tests.export.people import readable_rows

VECTORS = np.random.default_rng(3).normal(size=(240, 3)).astype(np.float32)
LABELS = np.where(VECTORS[:, 0] > 0, 7, 3)


REASONS = {
    "teachers": "it is paid per answer",
    "query": "it is paid per answer",
    "network": "it has no guarantee",
    "seeded": "its noise is seeded",
    "inferred": "its columns were read off",
}


def export_to_duckdb(folder: Path, file: Path) -> None:
    export_sql(folder, file, "duckdb")


@pytest.fixture(scope="module")
def kept_at_home(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that must not be exported: their weights were not released, or the folder holds more than may leave."""
    place, sized = tmp_path_factory.mktemp("home"), {"epsilon": 8.0, "declared_size": 240}
    common = {"classes": (3, 7), **sized}
    columns = tuple(NumericColumn(name, -4.0, 4.0) for name in "abc")
    encoding = Encoding(columns, "y", ("0", "1"), inferred=("the bounds of a",))
    records = Records("vectors", np.tile(VECTORS, 2), (LABELS == 7).astype(np.int64), 2, encoding=encoding)
    fitted = {
        "teachers": qm.Teachers(queries=5, teachers=4, **common).fit(VECTORS, LABELS),
        "query": qm.PrivateHead(release="query", queries=5, **common).fit(VECTORS, LABELS),
        "seeded": qm.PrivateHead(random_state=7, **common).fit(VECTORS, LABELS),
        "inferred": qm.PrivateHead(**sized).fit(records),
    }
    split = qm.load("mnist-5k", records=60, seed=0)
    network = train(split, settings=TrainingSettings(hidden=(4,), epochs=1))
    return {
        "network": save_network(network, place / "network"),
        **{name: save_private(each, place / name, dataset="vectors") for name, each in fitted.items()},
    }


@pytest.mark.parametrize("kind", REASONS)
@pytest.mark.parametrize("export", [export_onnx, export_skops, save_model, export_html, export_to_duckdb])
def test_only_released_weights_without_secrets_beside_them_are_exported(
    kept_at_home, kind, export, tmp_path
) -> None:
    with pytest.raises(InvalidInput, match=f"is not exported: {REASONS[kind]}"):
        export(kept_at_home[kind], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_files_of_a_model_that_is_paid_per_answer_give_no_classifier(kept_at_home) -> None:
    folder = kept_at_home["query"]
    files = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
    classifier = ReleasedClassifier(files)
    with pytest.raises(InvalidInput, match="paid per answer"):
        classifier.predict(VECTORS)


@pytest.mark.parametrize("through", ["folder", "skops"])
def test_the_classifier_answers_like_the_folder_by_label(table_head: Path, file: Path, through: str) -> None:
    rows = readable_rows(200, seed=3)
    model, classifier = open_private(table_head), ReleasedClassifier.open(table_head)
    if through == "skops":
        classifier = skops.io.load(file, trusted=list(TRUSTED))
    encoded = model.encode(rows)
    assert (classifier.predict(rows) == np.array(model.classes)[model.predict(encoded)]).all()
    assert np.array_equal(classifier.predict_proba(rows), model.predict_proba(encoded))
    assert list(classifier.feature_names_in_) == [column.name for column in model.encoding.columns]
    assert classifier.guarantee_ == model.guarantee
    assert classifier.score(rows, classifier.predict(rows)) == 1.0


def test_the_classifier_keeps_the_decision_of_the_folder(tmp_path: Path) -> None:
    head = qm.PrivateHead(epsilon=8.0, classes=(3, 7), declared_size=240).fit(VECTORS, LABELS)
    plain, shares = head.predict(VECTORS), head.predict_proba(VECTORS)
    median = float(np.median(shares[plain == 7, 1]).round(4))
    head.decide(threshold={7: min(median, 0.9999)})  # the noise is exact, so the median may round to 1
    folder = save_private(head, tmp_path / "head", dataset="vectors")
    export_skops(folder, tmp_path / "head.skops")
    for classifier in (
        ReleasedClassifier.open(folder),
        skops.io.load(tmp_path / "head.skops", trusted=list(TRUSTED)),
    ):
        assert classifier.predict(VECTORS).tolist() == head.predict(VECTORS).tolist() != plain.tolist()
        assert classifier.decided(shares).tolist() == head.predict(VECTORS).tolist()
        assert classifier.metadata_["decision"].startswith("7 if its probability is above 0.")


def test_labels_keep_their_type(tmp_path: Path) -> None:
    head = qm.PrivateHead(epsilon=8.0, classes=(3, 7), declared_size=240).fit(VECTORS, LABELS)
    classifier = ReleasedClassifier.open(save_private(head, tmp_path / "head", dataset="vectors"))
    assert (classifier.predict(VECTORS) == head.predict(VECTORS)).all()
    assert classifier.classes_.tolist() == [3, 7]
    assert classifier.n_features_in_ == 3
    assert not hasattr(classifier, "feature_names_in_")


def test_changed_files_claim_nothing(table_head: Path) -> None:
    files = dict(ReleasedClassifier.open(table_head).files)
    described = json.loads(files["model.json"])
    described["guarantee"]["mu"] /= 2
    with pytest.raises(DataUnavailable, match="damaged"):
        _ = ReleasedClassifier({**files, "model.json": json.dumps(described).encode()}).guarantee_
    changed = bytearray(files["weights.safetensors"])
    changed[-1] ^= 1
    with pytest.raises(DataUnavailable, match="SHA-256"):
        _ = ReleasedClassifier({**files, "weights.safetensors": bytes(changed)}).guarantee_


def test_files_are_written_into_their_folder_alone(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    with pytest.raises(InvalidInput, match="one folder"):
        write_files({"../outside": b"x"}, inner)
    assert not (tmp_path / "outside").exists()


def test_the_metadata_is_json_and_names_the_guarantee_in_words(table_head: Path) -> None:
    model = open_private(table_head)
    about = json.loads(json.dumps(_metadata(model, (table_head / "model.json").read_bytes())))
    assert about["guarantee"]["status"] == "proven"
    assert about["guarantee"]["unit"] == "record"
    assert about["guarantee"]["assumptions"]
    assert "everything computed from this model" in about["in_words"][0]
    assert set(about["provenance"]) == {
        *("kind", "dataset", "trained_with", "exported_with", "model_json_sha256", "weights_sha256")
    }


# --- skops: a file without pickle -------------------------------------------------------------------------------------


@pytest.fixture
def file(table_head: Path, tmp_path: Path) -> Path:
    place = tmp_path / "head.skops"
    export_skops(table_head, place)
    return place


def test_the_documented_types_are_all_that_must_be_trusted(file: Path) -> None:
    assert skops.io.get_untrusted_types(file=file) == list(TRUSTED)
    with pytest.raises(UntrustedTypesFoundException):
        skops.io.load(file)


def test_a_classifier_that_was_used_can_be_dumped_again(file: Path) -> None:
    classifier = skops.io.load(file, trusted=list(TRUSTED))
    rows = readable_rows(20, seed=4)
    before = classifier.predict_proba(rows)
    again = skops.io.loads(skops.io.dumps(classifier), trusted=list(TRUSTED))
    assert np.array_equal(again.predict_proba(rows), before)


def test_the_guarantee_is_readable_with_the_standard_library_alone(table_head: Path, file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        about = json.loads(archive.read("quietmax.json"))
    assert about["guarantee"] == open_private(table_head).guarantee.to_json()


def test_the_packages_are_imported_when_needed_and_the_error_names_the_extra(
    table_head: Path, tmp_path: Path
) -> None:
    program = (
        "import sys; sys.modules['skops'] = None; sys.modules['onnx'] = None; sys.modules['mlflow'] = None\n"
        "from quietmax.errors import DataUnavailable\n"
        "from quietmax.export import export_onnx, export_skops\n"
        "from quietmax.mlflow import save_model\n"
        "for export in (export_onnx, export_skops, save_model):\n"
        "    try: export(sys.argv[1], sys.argv[2])\n"
        "    except DataUnavailable as problem: print(problem)"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, str(table_head), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
    )
    for extra, line in zip(("onnx", "skops", "mlflow"), told.stdout.splitlines(), strict=True):
        assert f"pip install 'quietmax[{extra}]'" in line
