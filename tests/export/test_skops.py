"""A skops file holds a classifier without pickle."""

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

from quietmax.estimators.serialization import open_private
from quietmax.export.released import TRUSTED, export_skops
from tests.export.people import readable_rows


@pytest.fixture
def file(table_head: Path, tmp_path: Path) -> Path:
    place = tmp_path / "head.skops"
    export_skops(table_head, place)
    return place


def test_the_loaded_classifier_gives_the_answers_of_the_folder(table_head: Path, file: Path) -> None:
    rows, model = readable_rows(200, seed=4), open_private(table_head)
    classifier = skops.io.load(file, trusted=list(TRUSTED))
    assert np.array_equal(classifier.predict_proba(rows), model.predict_proba(model.encode(rows)))
    assert (classifier.predict(rows) == np.array(model.classes)[model.predict(model.encode(rows))]).all()
    assert classifier.guarantee_ == model.guarantee


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
