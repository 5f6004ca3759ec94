"""A released model as a file of skops: a scikit-learn classifier without pickle.

The file is a zip archive with `quietmax.json` beside the objects, so that the guarantee can be read without Quietmax.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

from quietmax._io import atomic_write
from quietmax.errors import DataUnavailable
from quietmax.export.released import METADATA, ReleasedClassifier

TRUSTED = ("quietmax.export.released.ReleasedClassifier",)
"""The types that `skops.io.load` must be told to trust."""


def export_skops(folder: str | Path, file: str | Path) -> None:
    """Write a released model as a skops file, which ``skops.io.load(file, trusted=TRUSTED)`` reads.

    What is loaded is a `ReleasedClassifier`. It needs Quietmax to run.

    Parameters
    ----------
    folder : str or Path
        The model folder.
    file : str or Path
        The file to write.

    Raises
    ------
    InvalidInput
        If the model must not be exported.
    DataUnavailable
        If the package skops is not installed, or the folder is damaged.
    """
    try:
        from skops.io import dumps
    except ImportError:
        raise DataUnavailable(
            "An export to skops requires the package skops. Install: pip install 'quietmax[skops]'."
        ) from None
    classifier = ReleasedClassifier.open(folder)
    about = json.dumps(classifier.metadata_, indent=2, ensure_ascii=False) + "\n"
    content = io.BytesIO(dumps(classifier))
    with zipfile.ZipFile(content, "a") as archive:
        archive.writestr(METADATA, about)
    atomic_write(Path(file), lambda staging: staging.write_bytes(content.getvalue()))
